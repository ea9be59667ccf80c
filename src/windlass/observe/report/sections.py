"""The parts of one run's page that are text, tables and bars; the curves are drawn by page.js into `plots`."""

from __future__ import annotations

from collections.abc import Sequence

from windlass.observe.report.charts import NAMES, Chart
from windlass.observe.report.facts import Facts
from windlass.observe.report.html import Html, count, duration, figure, join, percent, size, table, tag
from windlass.observe.report.read import ask, number

LEVELS = {"good": "All well", "warn": "Worth a look", "bad": "Something is wrong"}
PLACES = {"gpu": "GPU", "host": "host"}
NONE = figure(None)  # how a value that nobody knows is shown
COLUMN = 44  # pixels that a layer's column may be wide
MANY = 12  # ranks that are listed openly; more are folded away


def verdict(facts: Facts) -> Html:
    found = facts["verdict"]
    against = tag("ul", *(tag("li", reason) for reason in found["against"])) if found["against"] else None
    mark = tag("span", LEVELS[found["level"]], class_="mark")
    return tag("div", tag("p", mark, found["text"]), against, class_=f"verdict {found['level']}")


def headline(facts: Facts) -> Html:
    head, memory = facts["headline"], facts["memory"]
    peak = max((row["peak_gib"] or 0 for row in memory["per_rank"]), default=0)
    tiles = [
        ("final loss", figure(head["final_loss"], digits=4), f"from {figure(head['first_loss'], digits=4)}"),
        ("evaluation loss", figure(head["least_eval_loss"], digits=4), "lowest"),
        ("throughput", figure(head["per_second"]), f"{head['unit']}/s, whole job"),
        ("step", duration(head["step_seconds"]), "median"),
        ("MFU", percent(head["mfu"], 1), "model FLOPs of peak"),
        ("peak memory", figure(peak or None, "GiB"), f"{PLACES[memory['place']]}, fullest rank"),
        (
            "time",
            duration(head["seconds"]),
            f"{figure(head['gpu_hours'])} {'GPU' if memory['place'] == 'gpu' else 'rank'}-hours",
        ),
    ]
    known = [tile for tile in tiles if tile[1] != NONE]
    cells = [tag("div", tag("dt", name), tag("dd", value), tag("p", note)) for name, value, note in known]
    return tag("dl", *cells, class_="tiles")


def plots(charts: Sequence[Chart], names: Sequence[str], prefix: str) -> Html:
    """In two columns; the loss, or the first of an odd number, takes both."""
    chosen = [chart for name in names for chart in charts if chart["id"] == name]
    if not chosen:
        return Html("")
    wide = {chart["id"] for chart in chosen if chart["id"] == "loss"}
    narrow = [chart["id"] for chart in chosen if chart["id"] not in wide]
    wide |= set(narrow[: len(narrow) % 2])
    return tag("div", *(plot(chart, prefix, wide=chart["id"] in wide) for chart in chosen), class_="plots")


def plot(chart: Chart, prefix: str, *, wide: bool = False) -> Html:
    keys = [
        tag(
            "button",
            tag("i"),
            tag("span", series["label"]),
            tag("output", "", aria_live="off"),
            type="button",
            aria_pressed="true",
            style=f"--c:var(--s{i % 8})",
        )
        for i, series in enumerate(chart["series"])
    ]
    if len(keys) == 1:  # its name is the title's, and its value is read beside the step
        keys = []
    title, unit, x = chart["title"], chart["unit"], chart["x"]
    said = f"{title}, steps {x[0]} to {x[-1]}. Arrow keys read values, + and - zoom, 0 resets."
    caption = tag("figcaption", tag("h3", title), tag("span", unit, class_="unit"), tag("output", "", class_="at"))
    area = tag("div", "", class_="plot", tabindex="0", role="application", aria_label=said)
    kind = " ".join(name for name, on in (("wide", wide), ("tall", chart["id"] == "loss")) if on)
    return tag(
        "figure",
        caption,
        area,
        tag("div", *keys, class_="keys") if keys else None,
        data_chart=f"{prefix}{chart['id']}",
        class_=kind or None,
    )


def marked(facts: Facts) -> Html | None:
    """What the lines across the charts are."""
    return tag("p", tag("i", class_="dash"), "An alarm; the list is below.", class_="note") if facts["alarms"] else None


def dot(colour: str) -> Html:
    return tag("i", class_="dot", style=colour)


def phases(facts: Facts) -> Html | None:
    time = facts["step_time"]
    if not time["shares"]:
        return None
    order = [phase for phase in NAMES if phase in time["shares"]]
    colour = {phase: f"--c:var(--s{i})" for i, phase in enumerate(NAMES)}
    widths = {phase: f"width:{100 * time['shares'][phase]:.3f}%" for phase in order}
    stretches = [tag("i", style=f"{widths[p]};{colour[p]}", title=NAMES[p]) for p in order]
    bar = tag("div", *stretches, class_="stack", aria_hidden="true")
    rows = [
        (join([dot(colour[p]), NAMES[p]]), duration(time["seconds"][p]), percent(time["shares"][p], 1)) for p in order
    ]
    note = tag("p", f"Measuring cost {percent(time['meter_share'], 2)} of the step time.", class_="note")
    return join([bar, table(("phase", "mean", "share"), rows), note if time["meter_share"] is not None else None])


def memory(facts: Facts) -> Html:
    found = facts["memory"]
    peaks = [row["peak_gib"] for row in found["per_rank"]]
    planned, capacity = found["planned_gib"], found["capacity_gib"]
    top = max([value for value in (*peaks, planned, capacity) if value] or [1.0]) * 1.04
    bars = []
    for row in found["per_rank"]:
        peak = row["peak_gib"]
        fill = tag("i", style=f"width:{100 * (peak or 0) / top:.2f}%")
        marks = [
            tag("b", style=f"left:{100 * at / top:.2f}%", class_=kind)
            for at, kind in ((planned, "plan"), (capacity, "cap"))
            if at
        ]
        bars.append(
            tag(
                "li",
                tag("span", f"rank {row['rank']}"),
                tag("div", fill, *marks),
                tag("span", figure(peak, "GiB"), class_="n"),
            )
        )
    said = [f"Peak {PLACES[found['place']]} memory of each rank."]
    said += (
        [f"Planned: {figure(planned, 'GiB')} (thin line)."] if planned else ["The plan has no figure to compare with."]
    )
    said += [f"One GPU holds {figure(capacity, 'GiB')} (red line)."] if capacity else []
    return join([tag("ul", *bars, class_="bars"), tag("p", " ".join(said), class_="note")])


def tokens(facts: Facts) -> Html | None:
    found = facts["tokens"]
    if not found:
        return None
    parts = [
        ("supervised", found["supervised"], 0),
        ("read, not learned", found["masked"], 1),
        ("padding", found["padded"], 5),
    ]
    total = sum(value or 0 for _, value, _ in parts) or 1
    bar = tag(
        "div",
        *(tag("i", style=f"width:{100 * (v or 0) / total:.3f}%;--c:var(--s{c})") for _, v, c in parts),
        class_="stack",
        aria_hidden="true",
    )
    rows = [
        (join([dot(f"--c:var(--s{c})"), name]), count(value), percent((value or 0) / total, 1))
        for name, value, c in parts
    ]
    return join([bar, table(("tokens computed on", "count", "share"), rows)])


def experts(facts: Facts) -> Html | None:
    """One column per layer: its busiest expert's load; the line is an even share."""
    found = facts["experts"]
    if not found:
        return None
    heights = [value or 0.0 for value in found["busiest"]]
    picture = columns(heights, [value or 0.0 for value in found["idlest"]])
    unused = sum(value or 0 for value in found["unused"])
    said = (
        f"Step {found['step']}: each column is a layer's busiest expert, the line an even share; "
        f"the busiest of all carries {max(heights):.1f} times its share. "
        f"{figure(int(unused))} experts over all layers saw no token in that look."
    )
    return join([picture, tag("p", said, class_="note")])


def columns(busiest: Sequence[float], idlest: Sequence[float]) -> Html:
    """One column per layer, and a line at an even share."""
    top, wide = max(*busiest, 1.5) * 1.05, 10
    bars = []
    for layer, (high, low) in enumerate(zip(busiest, idlest, strict=True)):
        said = tag("title", f"layer {layer}: busiest {high:.2f}, idlest {low:.2f} of an even share")
        place = {"x": layer * wide + 1, "y": f"{100 * (1 - high / top):.2f}"}
        bars.append(tag("rect", said, **place, width=wide - 2, height=f"{100 * high / top:.2f}"))
    even = f"{100 * (1 - 1 / top):.2f}"
    line = tag("line", x1=0, x2=len(busiest) * wide, y1=even, y2=even)
    box = f"0 0 {len(busiest) * wide} 100"
    what = "load of the busiest expert per layer"
    return tag(
        "svg",
        *bars,
        line,
        class_="layers",
        style=f"max-width:{COLUMN * len(busiest)}px",
        viewBox=box,
        preserveAspectRatio="none",
        role="img",
        aria_label=what,
    )


def planned(facts: Facts) -> Html | None:
    if not facts["planned"]:
        return None
    rows = [
        (
            row["what"],
            figure(row["planned"]),
            figure(row["measured"]),
            f"{row['ratio']:.2f} ×" if row["ratio"] is not None else "–",
        )
        for row in facts["planned"]
    ]
    return table(("", "planned", "measured", "ratio"), rows)


def ranks(facts: Facts) -> Html | None:
    rows = [
        (
            f"rank {row['rank']}",
            row["host"] or "–",
            figure(row["steps"]),
            duration(row["step_seconds"]),
            percent(row["communication_share"], 1),
            figure(row["per_second"]),
            percent(row["gpu_utilization"]),
            figure(row["power_watts"], "W"),
            figure(row["rss_gib"], "GiB"),
        )
        for row in facts["ranks"]
    ]
    head = (
        "rank",
        "host",
        "steps",
        "step",
        "waiting",
        f"{facts['headline']['unit']}/s",
        "GPU busy",
        "power",
        "host memory",
    )
    filled = [i for i in range(len(head)) if any(row[i] != NONE for row in rows)]
    made = table([head[i] for i in filled], [[row[i] for i in filled] for row in rows], left=sum(i < 2 for i in filled))
    return tag("details", tag("summary", f"{len(rows)} ranks"), made) if len(rows) > MANY else made


def saves(facts: Facts) -> Html | None:
    found = facts["saves"]
    if not found["count"]:
        return None
    said = f"{figure(found['count'] - found['failed'])} saved"
    said += f", {figure(found['failed'])} failed: {found['error']}" if found["failed"] else ""
    if found["seconds"] is not None:
        said += f"; {duration(found['seconds'])} each, the longest {duration(found['most_seconds'])}"
    said += f"; {size(found['bytes'])} the last" if found["bytes"] is not None else ""
    return tag("p", f"{said}.")


def alarms(facts: Facts) -> Html:
    if not facts["alarms"]:
        said = "None." if facts["watched"] else "Nobody watched this run: `windlass train` and kind: script do."
        return tag("p", said, class_="note")
    rows = [
        (
            figure(number(a.get("step")), digits=6),
            a.get("kind", ""),
            "all" if a.get("rank") is None else a.get("rank"),
            a.get("message", ""),
        )
        for a in facts["alarms"]
    ]
    more = facts["alarm_count"] - len(rows)
    return join(
        [
            table(("step", "alarm", "rank", "what"), rows, left=4),
            tag("p", f"and {more} more", class_="note") if more else None,
        ]
    )


def adapter(facts: Facts) -> Html | None:
    found = facts["adapter"]
    if not found:
        return None
    share = f"{count(found['trainable'])} trainable parameters, {figure(found['percent'])} % of the model"
    said = f"Rank {figure(found['r'])}, alpha {figure(found['alpha'])}: {share}."
    rows = [(t["pattern"], t["part"] or "", figure(t["modules"]), count(t["parameters"])) for t in found["targets"]]
    return join([tag("p", said), table(("target", "part", "modules", "parameters"), rows, left=2) if rows else None])


def certificate(facts: Facts) -> Html | None:
    found = facts["certificate"]
    if not found:
        return None
    checked = (
        ", ".join(f"{count(v) if isinstance(v, int | float) else v} {k}" for k, v in found["checked"].items())
        if isinstance(found["checked"], dict)
        else ""
    )
    rows = [
        ("checkpoint", found["checkpoint"] or "–"),
        ("parameters loaded", figure(found["loaded"])),
        ("stored but not needed", figure(found["unread"])),
        ("compared with the files again", checked or "–"),
    ]
    return table(("loading certificate", ""), rows, left=2)


def hardware(facts: Facts) -> Html | None:
    """One row per host: its ranks together."""
    hosts: dict[str, list[Facts]] = {}
    for machine in facts["hardware"]:
        hosts.setdefault(str(machine.get("host", "?")), []).append(machine)
    rows = []
    for host, machines in hosts.items():
        one = machines[0]
        gpus = ask(one, "gpus")
        names = [str(ask(gpu, "name")) for gpu in gpus] if isinstance(gpus, list) else []
        shown = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)) or "none"
        fabric = (
            ", ".join(map(str, one["infiniband"]))
            if isinstance(one.get("infiniband"), list) and one["infiniband"]
            else "no InfiniBand"
        )
        driver = f"driver {one['driver']}, CUDA {one.get('cuda')}" if one.get("driver") else "–"
        rows.append(
            (
                host,
                ", ".join(str(m["rank"]) for m in machines),
                one.get("processor", "–"),
                figure(one.get("memory_gib"), "GiB"),
                shown,
                driver,
                fabric,
            )
        )
    return table(("host", "ranks", "processor", "memory", "GPUs", "driver", "network"), rows, left=7) if rows else None
