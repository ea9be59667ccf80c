"""The report in the terminal: the verdict and the figures, then where the page is."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from windlass.observe.report import Report
from windlass.observe.report.charts import PHASES, comparison
from windlass.observe.report.format import duration, figure, percent

STYLES = {"good": "green", "warn": "yellow", "bad": "bold red"}


def show(report: Report, console: Console | None = None) -> None:
    """Figures to stdout, one column per run."""
    console = console or Console(highlight=False)
    table = Table(box=None, pad_edge=False, show_header=len(report.runs) > 1)
    table.add_column("")
    for facts in report.runs:
        verdict, style = facts["verdict"], STYLES[facts["verdict"]["level"]]
        console.print(Text(f"{facts['name']}: ", style="bold") + Text(verdict["text"], style=style))
        for reason in verdict["against"]:
            console.print(Text(f"  {reason}", style=style))
        table.add_column(Text(facts["name"]), justify="right")
    times = [facts["step_time"] for facts in report.runs]
    rows = comparison(report.runs)
    for phase, label in PHASES.items():
        if any(time["shares"].get(phase) for time in times):
            cells = [f"{duration(t['seconds'].get(phase))} {percent(t['shares'].get(phase)):>6}" for t in times]
            rows.append((f"  {label}", cells))
    for name, values in rows:
        table.add_row(Text(name), *map(Text, values))
    console.print(table)
    for facts in report.runs:
        for row in facts["planned"]:
            if row["ratio"] is not None:
                ratio = f"{row['ratio']:.2f} x the planned {figure(row['planned'])}"
                console.print(Text(f"{row['what']}: {figure(row['measured'])}, {ratio}"))
    console.print(Text(f"{report.html}\n{report.json}"), soft_wrap=True)
