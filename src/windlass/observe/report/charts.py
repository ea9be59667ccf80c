"""The curves of one run, few points each: what the page draws and report.json keeps under `charts`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final

from windlass.observe import steps
from windlass.observe.report.facts import Facts, job_rate
from windlass.observe.report.format import NONE, duration, figure, percent
from windlass.observe.report.read import NAN, Run, known, listed, number, short, thin

SMOOTHED: Final = 160  # steps from which a smoothed loss is worth a curve
POINTS: Final = 480  # of one curve: every second pixel of a wide chart; the rest is in the band around it
BUDGET: Final = 60_000  # points of all curves of a page together, to keep it under a megabyte
CURVES: Final = 33  # of one run, with their bands, about
PHASES: Final = {phase: "waiting for ranks" if phase == "communication" else phase for phase in steps.PHASES}
COMPARED: Final = ("loss", "grad_norm", "rate", "slowest", "memory", "learning_rate")

Chart = dict[str, Any]
Curve = dict[str, Any]


def points(runs: int) -> int:
    """Of each curve, if that many runs share a page."""
    return max(100, min(POINTS, BUDGET // max(1, runs * CURVES)))


def charts(run: Run) -> list[Chart]:
    """Chart = {id, title, unit, x, stacked, series: [{label, values, least?, most?}]}; those without data are left out.

    A chart with a unit counts something, and begins at zero.
    """
    first = run.first
    if not first.length:
        return []
    x = [int(first["step"][end - 1]) for end in run.cuts[1:]]
    phases = [_curve(label, first[f"{phase}_seconds"], run, band=False) for phase, label in PHASES.items()]
    memory = [("gpu_peak_gib", "GPU peak"), ("gpu_reserved_gib", "GPU reserved"), ("rss_gib", "host, resident")]
    found: list[tuple[str, str, str, list[Curve]]] = [
        ("loss", "Loss", "", _losses(run, x)),
        ("grad_norm", "Gradient norm", "", [_curve("gradient norm", first["grad_norm"], run)]),
        ("learning_rate", "Learning rate", "", [_curve("learning rate", first["learning_rate"], run)]),
        ("rate", "Throughput", f"{run.unit}/s", [_curve("whole job", job_rate(run), run)]),
        ("time", "Where step time goes", "s", phases),
        ("slowest", "Step time of the ranks", "s", _across(run, "step_seconds", "step time")),
        ("memory", "Memory", "GiB", [curve for name, label in memory for curve in _across(run, name, label)]),
        ("utilization", "GPU utilisation", "%", _across(run, "gpu_utilization", "busy", 100)),
        ("power", "GPU power", "W", _across(run, "gpu_power_watts", "power")),
        ("mfu", "Model FLOPs utilisation", "%", _across(run, "mfu", "MFU", 100)),
        ("experts", "Expert load", "times an even share", _experts(run)),
    ]
    made = []
    for name, title, unit, series in found:
        if drawn := [curve for curve in series if any(value is not None for value in curve["values"])]:
            stacked = name == "time"
            made.append({"id": name, "title": title, "unit": unit, "x": x, "stacked": stacked, "series": drawn})
    return made


def _curve(label: str, values: Sequence[float], run: Run, *, band: bool = True) -> Curve:
    middle, least, most = thin(values, run.cuts) if len(values) else ([], [], [])
    curve = {"label": label, "values": middle}
    return {**curve, "least": least, "most": most} if band and least != most else curve


def _losses(run: Run, x: list[int]) -> list[Curve]:
    loss = _curve("loss", run.first["loss"], run)
    evaluations: list[float | None] = [None] * len(x)
    for event in run.events:
        step, value = number(event.get("step")), number(event.get("eval_loss"))
        if event.get("kind") == "eval" and step == step and value == value:
            at = next((i for i, last in enumerate(x) if last >= step), len(x) - 1)
            evaluations[at] = short(value)
    curves = [loss]
    if len(run.first["loss"]) >= SMOOTHED:
        weight = 1 - 1 / max(1.0, min(run.first.length / 80, 200.0))
        curves = [{**loss, "faint": True}, _curve("smoothed", smooth(run.first["loss"], weight), run, band=False)]
    return [*curves, {"label": "evaluation", "values": evaluations, "dots": True}]


def smooth(values: Sequence[float], weight: float) -> list[float]:
    """Exponential mean without the pull of its start; a gap stays a gap."""
    total = norm = 0.0
    smoothed = []
    for value in values:
        if value == value:
            total = total * weight + value * (1 - weight)
            norm = norm * weight + (1 - weight)
            smoothed.append(total / norm)
        else:
            smoothed.append(NAN)
    return smoothed


def _across(run: Run, name: str, label: str, scale: float = 1) -> list[Curve]:
    """The mean over the ranks, and around it the least and the most of them."""
    series = [rank.curves[name] for rank in run.ranks.values() if name in rank.curves]
    if not series:
        return []

    def combine(part: int, how: Any) -> list[float | None]:
        stretches = zip(*(each[part] for each in series), strict=True)
        found = ([value for value in stretch if value is not None] for stretch in stretches)
        return [short(scale * how(values)) if values else None for values in found]

    middle, least, most = combine(0, lambda values: sum(values) / len(values)), combine(1, min), combine(2, max)
    curve: Curve = {"label": label, "values": middle}
    return [{**curve, "least": least, "most": most} if least != most else curve]


def _experts(run: Run) -> list[Curve]:
    """The busiest and the idlest expert of all layers. Each sample holds until the next one."""
    if not run.first.experts:
        return []
    busiest, idlest = array("d", [NAN] * run.first.length), array("d", [NAN] * run.first.length)
    for row, balance in run.first.experts.items():
        high, low = (known(map(number, listed(balance.get(name)))) for name in ("busiest", "idlest"))
        if high and low:
            busiest[row], idlest[row] = max(high), min(low)
    for column in (busiest, idlest):
        for i in range(1, len(column)):
            if column[i] != column[i]:
                column[i] = column[i - 1]
    return [_curve("busiest expert", busiest, run), _curve("idlest expert", idlest, run)]


# --- several runs ---


def compared(runs: Sequence[Facts]) -> list[Chart]:
    """Each main chart with one curve per run, on the steps of all of them."""
    made = []
    for name in COMPARED:
        found = [(facts["name"], chart) for facts in runs for chart in facts["charts"] if chart["id"] == name]
        if not found or len({chart["unit"] for _, chart in found}) > 1:
            continue
        x = sorted({step for _, chart in found for step in chart["x"]})
        at = {step: i for i, step in enumerate(x)}
        series = []
        for label, chart in found:
            curves = chart["series"]
            main = next((curve for curve in curves if curve["label"] == "smoothed"), curves[0])
            values: list[float | None] = [None] * len(x)
            for step, value in zip(chart["x"], main["values"], strict=True):
                values[at[step]] = value
            series.append({"label": label, "values": values})
        made.append({**found[0][1], "x": x, "series": series, "stacked": False})
    return made


def comparison(runs: Sequence[Facts]) -> list[tuple[str, list[str]]]:
    """The same figures of every run, for the page and for the terminal."""
    heads = [facts["headline"] for facts in runs]
    peaks = [max((row["peak_gib"] or 0 for row in facts["memory"]["per_rank"]), default=0) or None for facts in runs]
    waiting = [facts["step_time"]["shares"].get("communication") for facts in runs]
    units = dict.fromkeys(head["unit"] for head in heads)
    rows = [
        ("state", [facts["state"] for facts in runs]),
        ("steps", [figure(head["steps"]) for head in heads]),
        ("ranks", [figure(head["ranks"]) for head in heads]),
        ("final loss", [figure(head["final_loss"], digits=4) for head in heads]),
        ("lowest evaluation loss", [figure(head["least_eval_loss"], digits=4) for head in heads]),
        ("clipped steps", [percent(head["clipped_share"]) for head in heads]),
        ("seconds per step", [duration(head["step_seconds"]) for head in heads]),
        *(
            (f"{unit} per second", [figure(h["per_second"] if h["unit"] == unit else None) for h in heads])
            for unit in units
        ),
        ("model FLOPs used", [percent(head["mfu"], 1) for head in heads]),
        ("peak memory", [figure(peak, "GiB") for peak in peaks]),
        ("waiting for ranks", [percent(share, 1) for share in waiting]),
        ("time", [duration(head["seconds"]) for head in heads]),
        ("alarms", [figure(facts["alarm_count"]) for facts in runs]),
    ]
    return [(name, values) for name, values in rows if any(value != NONE for value in values)]
