"""The report in the terminal: the verdict and the figures, then where the page is."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from windlass.observe.report import Report
from windlass.observe.report.charts import NAMES
from windlass.observe.report.compare import rows
from windlass.observe.report.html import duration, figure, percent

STYLES = {"good": "green", "warn": "yellow", "bad": "bold red"}


def show(report: Report, console: Console | None = None) -> None:
    """Figures to stdout, one column per run."""
    console = console or Console(highlight=False)
    for facts in report.runs:
        verdict = facts["verdict"]
        console.print(Text(f"{facts['name']}: ", style="bold") + Text(verdict["text"], style=STYLES[verdict["level"]]))
        for reason in verdict["against"]:
            console.print(Text(f"  {reason}", style=STYLES[verdict["level"]]))
    table = Table(box=None, pad_edge=False, show_header=len(report.runs) > 1)
    table.add_column("")
    for facts in report.runs:
        table.add_column(Text(facts["name"]), justify="right")
    for name, values in rows(report.runs):
        table.add_row(Text(name), *(Text(str(value)) for value in values))
    for phase, label in NAMES.items():
        seconds = [facts["step_time"]["seconds"].get(phase) for facts in report.runs]
        shares = [facts["step_time"]["shares"].get(phase) for facts in report.runs]
        if any(share for share in shares):
            cells = (f"{duration(s)} {percent(share):>6}" for s, share in zip(seconds, shares, strict=True))
            table.add_row(Text(f"  {label}"), *map(Text, cells))
    console.print(table)
    for facts in report.runs:
        for row in facts["planned"]:
            if row["ratio"] is not None:
                ratio = f"{row['ratio']:.2f} x the plan's {figure(row['planned'])}"
                console.print(Text(f"{row['what']}: {figure(row['measured'])}, {ratio}"))
    console.print(Text(f"{report.html}\n{report.json}"), soft_wrap=True)
