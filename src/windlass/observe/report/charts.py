"""The curves of one run, few points each: what the page draws and report.json keeps under `charts`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from windlass.observe import steps
from windlass.observe.report.facts import aligned, job_rate
from windlass.observe.report.read import NAN, Run, known, listed, number
from windlass.observe.report.thin import edges, short, smooth, thin

SMOOTHED = 160  # steps from which a smoothed loss is worth a curve
POINTS = 480  # of one curve: every second pixel of a wide chart; the rest is in the band around it
BUDGET = 60_000  # points of all curves of a page together: what keeps it under a megabyte

NAMES = {phase: "waiting for ranks" if phase == "communication" else phase for phase in steps.PHASES}

Chart = dict[str, Any]


def charts(run: Run, points: int = POINTS) -> list[Chart]:
    """Chart = {id, title, unit, x, series: [{label, values, least?, most?}], …}; a chart without data is left out."""
    first = run.first
    if not first.length:
        return []
    cuts = edges(first.length, points)
    x = [int(first["step"][end - 1]) for end in cuts[1:]]
    weight = 1 - 1 / max(1.0, min(first.length / 80, 200.0))
    made = [
        _chart("loss", "Loss", "", x, _losses(run, cuts, x, weight)),
        _chart("grad_norm", "Gradient norm", "", x, [_curve("gradient norm", first["grad_norm"], cuts)]),
        _chart("learning_rate", "Learning rate", "", x, [_curve("learning rate", first["learning_rate"], cuts)]),
        _chart("rate", "Throughput", f"{run.unit}/s", x, [_curve("whole job", job_rate(run), cuts)]),
        _chart("time", "Where step time goes", "s", x, _phases(run, cuts), stacked=True),
        _chart("slowest", "Step time of the ranks", "s", x, _across(run, "step_seconds", "step time", cuts)),
        _chart("memory", "Memory", "GiB", x, _memory(run, cuts)),
        _chart("utilization", "GPU utilisation", "%", x, _across(run, "gpu_utilization", "busy", cuts, 100)),
        _chart("power", "GPU power", "W", x, _across(run, "gpu_power_watts", "power", cuts)),
        _chart("mfu", "Model FLOPs utilisation", "%", x, _across(run, "mfu", "MFU", cuts, 100)),
        _chart("experts", "Expert load", "times an even share", x, _experts(run, cuts)),
    ]
    return [chart for chart in made if chart["series"]]


def _chart(name: str, title: str, unit: str, x: list[int], series: list[Any], *, stacked: bool = False) -> Chart:
    """A chart with a unit counts something, and so begins at zero."""
    kept = [curve for curve in series if curve and any(value is not None for value in curve["values"])]
    return {"id": name, "title": title, "unit": unit, "x": x, "stacked": stacked, "series": kept}


def _curve(label: str, values: Sequence[float], cuts: Sequence[int], *, band: bool = True) -> dict[str, Any]:
    middle, least, most = thin(values, cuts) if len(values) else ([None] * (len(cuts) - 1), [], [])
    if band and least != most:
        return {"label": label, "values": middle, "least": least, "most": most}
    return {"label": label, "values": middle}


def _losses(run: Run, cuts: Sequence[int], x: list[int], weight: float) -> list[dict[str, Any]]:
    values = run.first["loss"]
    curves = [_curve("loss", values, cuts) | {"faint": True}]
    if len(values) >= SMOOTHED:
        curves.append(_curve("smoothed", smooth(values, weight), cuts, band=False))
    else:
        curves[0].pop("faint")
    return [*curves, _evaluations(run, x)]


def _evaluations(run: Run, x: list[int]) -> dict[str, Any]:
    """Each evaluation at the point that covers its step."""
    values: list[float | None] = [None] * len(x)
    for event in run.events:
        step, loss = number(event.get("step")), number(event.get("eval_loss"))
        if event.get("kind") == "eval" and step == step and loss == loss:
            at = next((i for i, last in enumerate(x) if last >= step), len(x) - 1)
            values[at] = short(loss)
    return {"label": "evaluation", "values": values, "dots": True}


def _phases(run: Run, cuts: Sequence[int]) -> list[dict[str, Any]]:
    return [_curve(NAMES[phase], run.first[f"{phase}_seconds"], cuts, band=False) for phase in steps.PHASES]


def _across(run: Run, name: str, label: str, cuts: Sequence[int], scale: float = 1) -> list[dict[str, Any]]:
    """The mean over the ranks, and around it the least and the most of them."""
    by = run.first["step"]
    rows = [aligned(columns, name, by) for columns in run.ranks.values() if len(columns[name])]
    if not rows:
        return []
    middle, low, high = array("d"), array("d"), array("d")
    for at in zip(*rows, strict=True):
        found = [value for value in at if value == value]
        middle.append(scale * sum(found) / len(found) if found else NAN)
        low.append(scale * min(found) if found else NAN)
        high.append(scale * max(found) if found else NAN)
    curve: dict[str, Any] = {"label": label, "values": thin(middle, cuts)[0]}
    least, most = thin(low, cuts)[1], thin(high, cuts)[2]
    return [curve | {"least": least, "most": most} if least != most else curve]


def _memory(run: Run, cuts: Sequence[int]) -> list[dict[str, Any]]:
    curves = []
    for name, label in (
        ("gpu_peak_gib", "GPU peak"),
        ("gpu_reserved_gib", "GPU reserved"),
        ("rss_gib", "host, resident"),
    ):
        curves += _across(run, name, label, cuts)
    return curves


def _experts(run: Run, cuts: Sequence[int]) -> list[dict[str, Any]]:
    """Over the layers: the busiest of all, and the idlest of all."""
    if not run.first.experts:
        return []
    busiest, idlest = array("d", [NAN] * run.first.length), array("d", [NAN] * run.first.length)
    for row, look in run.first.experts.items():
        high, low = (known(map(number, listed(look.get(name)))) for name in ("busiest", "idlest"))
        if high and low:
            busiest[row], idlest[row] = max(high), min(low)
    # A look every few steps: its value holds until the next one.
    for column in (busiest, idlest):
        for i in range(1, len(column)):
            if column[i] != column[i]:
                column[i] = column[i - 1]
    return [_curve("busiest expert", busiest, cuts), _curve("idlest expert", idlest, cuts)]
