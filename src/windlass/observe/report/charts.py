"""The curves of a run, reduced to few points: drawn on the page and stored in report.json under `charts`."""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from statistics import fmean
from typing import Any, Final

from windlass import run_folder
from windlass.observe import steps
from windlass.observe.format import NONE, format_duration, format_figure, format_percent, shorten
from windlass.observe.reader import NAN, as_dict, as_number, get_path, read_kept
from windlass.observe.report.facts import Facts, highest_peak_gib
from windlass.observe.report.read import RunData, Series, finite_numbers, round_value, thin_curve
from windlass.observe.symptoms import has_shared_steps

POINTS: Final = 480  # of one curve: every second pixel of a wide chart; a band shows the rest
BUDGET: Final = 60_000  # points of all curves on a page, to keep it under a megabyte
CURVES: Final = 33  # approximate number per run, with bands
PHASES: Final = {phase: "waiting for ranks" if phase == "communication" else phase for phase in steps.PHASES}
KEPT: Final = ("kept_worse", "kept_kl")
OF_RUN: Final = ("grad_norm", "rate", "slowest", "memory", "learning_rate")
COMPARED: Final = ("loss", *KEPT, "margin", "accuracy", *OF_RUN)

ANSWERS: Final = ("chosen", "rejected")
BASE: Final = "base model, evaluated"  # without its adapter
# Of runs on pairs: chart, title, unit, factor, fields by label (of an evaluation with `eval_` before).
PREFERENCE: Final[tuple[tuple[str, str, str, float, dict[str, str]], ...]] = (
    ("margin", "Reward margin", "", 1, {"margin": "rewards/margins"}),
    ("accuracy", "Chosen answer preferred", "%", 100, {"pairs": "rewards/accuracies"}),
    ("rewards", "Rewards", "", 1, {answer: f"rewards/{answer}" for answer in ANSWERS}),
    ("logps", "Log-probability of the answers", "", 1, {answer: f"logps/{answer}" for answer in ANSWERS}),
)

Chart = dict[str, Any]
Curve = dict[str, Any]


def choose_points(runs: int) -> int:
    """Return the points of each curve if that many runs share a page."""
    return max(100, min(POINTS, BUDGET // max(1, runs * CURVES)))


def make_charts(run: RunData) -> list[Chart]:
    """Chart = {id, title, unit, x, stacked, series: [{label, values, least?, most?}]}; those without data are left out.

    A chart with a unit counts something, and begins at zero.
    """
    first = run.first
    x = make_axes(run)["step"]

    def curve(label: str, values: Sequence[float], *, band: bool = True) -> list[Curve]:
        return _curve(label, thin_curve(values, run.cuts), band=band) if len(values) else []

    def across(name: str, label: str, scale: float = 1) -> list[Curve]:
        """Return the mean over the ranks with a band from their minimum to their maximum."""
        series = [rank.curves[name] for rank in run.ranks.values() if name in rank.curves]

        def combined(part: int, way: Callable[[list[float]], float]) -> list[float | None]:
            points = zip(*(curves[part] for curves in series), strict=True)
            stretches = [[value for value in point if value is not None] for point in points]
            return [round_value(scale * way(values)) if values else None for values in stretches]

        return _curve(label, (combined(0, fmean), combined(1, min), combined(2, max)))

    def of_pairs(fields: Mapping[str, str], scale: float) -> list[Curve]:
        drawn = []
        for label, field in fields.items():
            drawn += curve(label, [scale * value for value in _pick(run, "preference", field)])
            drawn += _evaluations(run, x, {f"eval_{field}": f"evaluation {label}"}, scale)
        return drawn

    sources = sorted({name for losses in first.objects["source_loss"].values() for name in as_dict(losses)})
    memory = {"gpu_peak_gib": "GPU peak", "gpu_reserved_gib": "GPU reserved", "rss_gib": "host, resident"}
    by_source = [drawn for name in sources for drawn in curve(name, _pick(run, "source_loss", name))]
    phases = [drawn for p, label in PHASES.items() for drawn in curve(label, first[f"{p}_seconds"], band=False)]
    ends = {"busiest": max, "idlest": min}
    loads = [drawn for e, way in ends.items() for drawn in curve(f"{e} expert", _pick(run, "experts", e, way))]
    candidates: list[tuple[str, str, str, list[Curve]]] = [
        ("loss", "Loss", "", [*curve("loss", first["loss"]), *_evaluations(run, x, _name_losses(run))]),
        ("source_loss", "Loss by source", "", by_source),
        ("kept_worse", "Kept sets: loss above the base's", "", _kept(run, x, "worse")),
        ("kept_kl", "Kept sets: KL divergence from the base, per token", "nats", _kept(run, x, "kl")),
        *((name, title, unit, of_pairs(fields, scale)) for name, title, unit, scale, fields in PREFERENCE),
        ("grad_norm", "Gradient norm", "", curve("gradient norm", first["grad_norm"])),
        ("learning_rate", "Learning rate", "", curve("learning rate", first["learning_rate"])),
        ("rate", "Throughput", f"{first.unit}/s", [*curve("whole job", run.job_rate), *_planned_rate(run, len(x))]),
        ("time", "Where step time goes", "s", phases),
        ("slowest", "Step time of the ranks", "s", across("step_seconds", "step time")),
        ("memory", "Memory", "GiB", [drawn for name, label in memory.items() for drawn in across(name, label)]),
        ("utilization", "GPU utilisation", "%", across("gpu_utilization", "busy", 100)),
        ("power", "GPU power", "W", across("gpu_power_watts", "power")),
        ("mfu", "Model FLOPs utilisation", "%", across("mfu", "MFU", 100)),
        ("experts", "Expert load", "times an even share", loads),
    ]
    charts = []
    for name, title, unit, curves in candidates:
        drawn = [curve for curve in curves if any(value is not None for value in curve["values"])]
        charts.append({"id": name, "title": title, "unit": unit, "x": x, "stacked": name == "time", "series": drawn})
    return [chart for chart in charts if chart["series"]]


def make_axes(run: RunData) -> dict[str, list[Any]]:
    """Return the available x axes of the curves: steps, counted items, hours."""
    first = run.first
    ends = [end - 1 for end in run.cuts[1:]] if first.length else []
    counted = list(accumulate(items if items == items else 0.0 for items in run.items))
    times = list(accumulate(first["time"], max))
    axes: dict[str, list[Any]] = {
        "step": [int(first["step"][end]) for end in ends],
        first.unit: [round_value(counted[end]) for end in ends] if counted and counted[-1] else [],
        "hours": [round_value((times[end] - times[0]) / 3600) for end in ends] if times else [],
    }
    return {name: axis for name, axis in axes.items() if len(axis) == len(ends) and None not in axis}


def _curve(label: str, series: Series, *, band: bool = True) -> list[Curve]:
    values, least, most = series
    bounds = {"least": least, "most": most} if band and least != most else {}
    return [{"label": label, "values": values, **bounds}]


def _planned_rate(run: RunData, length: int) -> list[Curve]:
    """Return the plan's range, drawn behind the measured curve."""
    names = ("tokens_per_second", "tokens_per_second_low", "tokens_per_second_high")
    rates = [as_number(run.get(run_folder.PLAN, "estimate", name)) for name in names]
    is_known = run.first.unit == steps.TOKENS and len(finite_numbers(rates)) == len(names)
    if not is_known or has_shared_steps(run.files.get(run_folder.PLAN)):
        return []
    middle, low, high = ([round_value(rate)] * length for rate in rates)
    return [{**curve, "faint": True} for curve in _curve("planned", (middle, low, high))]


def _name_losses(run: RunData) -> dict[str, str]:
    """Return the labels of the evaluations' losses: of all rows, and of each named set."""
    names = {"eval_loss": None} | {name: None for event in run.events if event.get("kind") == "eval" for name in event}
    losses = [name for name in names if name.startswith("eval_") and name.endswith("_loss")]
    labels = {name: f"evaluation {name[5:-5]}".strip() for name in losses}
    return {**labels, "eval_base": BASE} if "eval_base" in names else labels


def _kept(run: RunData, x: list[int], figure: str) -> list[Curve]:
    names = dict.fromkeys(name for event in run.events for name in read_kept(event, figure))
    return _evaluations(run, x, {f"{steps.KEPT}{name}/{figure}": name for name in names})


def _evaluations(run: RunData, x: list[int], labels: Mapping[str, str], scale: float = 1) -> list[Curve]:
    """Return a curve for each of these fields of the evaluations."""
    curves: dict[str, list[float | None]] = {label: [None] * len(x) for label in labels.values()}
    for event in run.events:
        step = as_number(event.get("step"))
        if not x or event.get("kind") != "eval" or step != step:
            continue
        at = next((i for i, last in enumerate(x) if last >= step), len(x) - 1)
        for name, label in labels.items():
            value = scale * as_number(event.get(name))
            if value == value:
                curves[label][at] = round_value(value)
    return [{"label": label, "values": values, "dots": True} for label, values in curves.items()]


def _pick(run: RunData, field: str, name: str, way: Callable[..., float] = max) -> Sequence[float]:
    """Return a number of each step's object, or of a list of numbers the largest or the smallest."""
    column = array("d", [NAN]) * (run.first.length if run.first.objects[field] else 0)
    for row, values in run.first.objects[field].items():
        value = get_path(values, name)
        column[row] = way(finite_numbers(value if isinstance(value, list) else [value]), default=NAN)
    return column


# --- several runs ---


def make_comparison_charts(runs: Sequence[Facts]) -> list[Chart]:
    """Return each main chart, each evaluation set and each kept set, with one curve per run on the steps of all."""
    drawn = [(i, chart) for i, facts in enumerate(runs) for chart in facts["charts"]]
    combined = []
    for name in COMPARED:
        charts = [(i, chart) for i, chart in drawn if chart["id"] == name]
        if charts and name not in KEPT:
            combined.append(_combine_charts(runs, [(i, chart, chart["series"][0]) for i, chart in charts]))
        if name in ("loss", *KEPT):
            curves = [(i, chart, curve) for i, chart in charts for curve in chart["series"]]
            of_sets = [row for row in curves if row[2].get("dots") and row[2]["label"] != BASE]
            for number, label in enumerate(dict.fromkeys(curve["label"] for _, _, curve in of_sets)):
                of_set = _combine_charts(runs, [row for row in of_sets if row[2]["label"] == label])
                title = f"{of_set['title']}, {label}"
                combined.append({**of_set, "id": f"{name}-{number}", "title": title})
    return [chart for chart in combined if chart]


def _combine_charts(runs: Sequence[Facts], curves: Sequence[tuple[int, Chart, Curve]]) -> Chart:
    if len({chart["unit"] for _, chart, _ in curves}) > 1:
        return {}
    x = sorted({step for _, chart, _ in curves for step in chart["x"]})
    series = []
    for i, chart, curve in curves:
        at = dict(zip(chart["x"], curve["values"], strict=True))
        dots = {"dots": True} if curve.get("dots") else {}
        series.append({"label": runs[i]["name"], "run": i, "values": [at.get(step) for step in x], **dots})
    return {**curves[0][1], "x": x, "series": series, "stacked": False}


def compare_figures(runs: Sequence[Facts]) -> list[tuple[str, list[str]]]:
    """Return the same figures of every run, for the page and for the terminal."""
    heads = [facts["headline"] for facts in runs]
    rows = [
        ("state", [facts["state"] for facts in runs]),
        ("steps", [format_figure(head["steps"]) for head in heads]),
        ("ranks", [format_figure(head["ranks"]) for head in heads]),
        ("final loss", [format_figure(head["final_loss"], digits=4) for head in heads]),
        ("lowest evaluation loss", [format_figure(head["least_eval_loss"], digits=4) for head in heads]),
        ("gain over the base", [format_figure(head["gain"], digits=4) for head in heads]),
        ("chosen answer preferred", [format_percent(head["preferred"], 1) for head in heads]),
        ("reward margin", [format_figure(head["margin"], digits=4) for head in heads]),
        ("clipped steps", [format_percent(head["clipped_share"]) for head in heads]),
        ("seconds per step", [format_duration(head["step_seconds"]) for head in heads]),
        *(
            (f"{unit} per second", [format_figure(h["per_second"] if h["unit"] == unit else None) for h in heads])
            for unit in dict.fromkeys(head["unit"] for head in heads)
        ),
        ("model FLOPs used", [format_percent(head["mfu"], 1) for head in heads]),
        ("peak memory", [format_figure(highest_peak_gib(facts), "GiB") for facts in runs]),
        ("waiting for ranks", [format_percent(facts["step_time"]["shares"].get("communication"), 1) for facts in runs]),
        ("time", [format_duration(head["seconds"]) for head in heads]),
        ("alarms", [format_figure(facts["alarm_count"]) for facts in runs]),
    ]
    return [(name, values) for name, values in rows if any(value != NONE for value in values)]


def compare_run_files(runs: Sequence[Facts]) -> list[tuple[str, list[str]]]:
    """Return the keys of the run file that differ between the runs, each with its value in every run."""
    flat = [dict(_iter_leaves(facts["run"] or {})) for facts in runs]
    keys = sorted(set().union(*flat))
    rows = [(key, [str(values.get(key, NONE)) for values in flat]) for key in keys]
    return [(key, [shorten(value, 80) for value in values]) for key, values in rows if len(set(values)) > 1]


def _iter_leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _iter_leaves(inner, f"{key}.{name}".lstrip("."))
    else:
        yield key, value
