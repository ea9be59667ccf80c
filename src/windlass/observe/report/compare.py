"""Several runs side by side: a table of their figures, and their main curves over one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from windlass.observe.report.charts import Chart
from windlass.observe.report.facts import Facts
from windlass.observe.report.html import Html, duration, figure, join, percent, table, tag
from windlass.observe.report.sections import plots

OVERLAID = ("loss", "grad_norm", "rate", "slowest", "memory", "learning_rate")


def rows(runs: Sequence[Facts]) -> list[tuple[str, list[Any]]]:
    """The same figures of every run; also what the terminal prints."""
    heads = [facts["headline"] for facts in runs]
    peaks = [max((row["peak_gib"] or 0 for row in facts["memory"]["per_rank"]), default=0) or None for facts in runs]
    return [
        ("state", [facts["state"] for facts in runs]),
        ("steps", [figure(head["steps"]) for head in heads]),
        ("ranks", [figure(head["ranks"]) for head in heads]),
        ("final loss", [figure(head["final_loss"], digits=4) for head in heads]),
        ("lowest evaluation loss", [figure(head["least_eval_loss"], digits=4) for head in heads]),
        ("seconds per step", [duration(head["step_seconds"]) for head in heads]),
        *((f"{unit} per second", [_rate(head, unit) for head in heads]) for unit in units(runs)),
        ("model FLOPs used", [percent(head["mfu"], 1) for head in heads]),
        ("peak memory", [figure(peak, "GiB") for peak in peaks]),
        ("waiting for ranks", [percent(facts["step_time"]["shares"].get("communication"), 1) for facts in runs]),
        ("time", [duration(head["seconds"]) for head in heads]),
        ("alarms", [figure(facts["alarm_count"]) for facts in runs]),
    ]


def units(runs: Sequence[Facts]) -> list[str]:
    """What the runs count, each once."""
    return list(dict.fromkeys(facts["headline"]["unit"] for facts in runs))


def _rate(head: Facts, unit: str) -> str:
    return figure(head["per_second"] if head["unit"] == unit else None)


def comparison(runs: Sequence[Facts], overlays: Sequence[Chart]) -> Html:
    figures = table(("", *(facts["name"] for facts in runs)), [(name, *values) for name, values in rows(runs)])
    drawn = plots(overlays, OVERLAID, "all-")
    return join([tag("header", tag("h1", f"{len(runs)} runs"), class_="run"), tag("section", figures, drawn)])


def overlay(runs: Sequence[Facts]) -> list[Chart]:
    """Each main chart with one curve per run, on the steps of all of them."""
    made = []
    for name in OVERLAID:
        found = [(facts["name"], chart) for facts in runs for chart in facts["charts"] if chart["id"] == name]
        if not found or (name == "rate" and len(units(runs)) > 1):
            continue
        x = sorted({step for _, chart in found for step in chart["x"]})
        at = {step: i for i, step in enumerate(x)}
        series = []
        for label, chart in found:
            values: list[float | None] = [None] * len(x)
            for step, value in zip(chart["x"], _main(chart)["values"], strict=True):
                values[at[step]] = value
            series.append({"label": label, "values": values})
        made.append({**found[0][1], "x": x, "series": series, "stacked": False})
    return made


def _main(chart: Chart) -> dict[str, Any]:
    """The smoothed curve where there is one, else the first."""
    curves: list[dict[str, Any]] = chart["series"]
    return next((curve for curve in curves if curve["label"] == "smoothed"), curves[0])
