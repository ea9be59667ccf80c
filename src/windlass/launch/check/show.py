"""The checks as a table, for people: what is wrong first to the eye, what was not looked at last."""

from __future__ import annotations

from collections import Counter

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from windlass.launch.check import Report
from windlass.launch.check.result import FAIL, PASS, UNSEEN, WARN, Result

STYLES = {PASS: "green", WARN: "yellow", FAIL: "bold red", UNSEEN: "dim"}


def show(report: Report) -> None:
    """Each check with what was seen, below it where and how to go on; the verdict last."""
    console = Console(highlight=False, emoji=False, markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    several = any(result.node for result in report.results)
    for column in ("check", "verdict", *(["node"] if several else []), "what was seen"):
        table.add_column(column, overflow="fold", no_wrap=column == "verdict")
    for result in report.results:
        table.add_row(
            result.name,
            Text(result.verdict, STYLES[result.verdict]),
            *([result.node] if several else []),
            seen(result),
        )
    console.print(table)
    console.print(verdict(report))


def seen(result: Result) -> Text:
    text = Text(result.seen, "dim" if result.verdict == UNSEEN else "")
    if result.where and result.verdict in (WARN, FAIL):
        text = Text(f"{result.where}: ", "bold") + text
    if result.hint:
        text += Text("\nhint: ", "cyan") + Text(result.hint)
    return text


def verdict(report: Report) -> Text:
    counts = Counter(result.verdict for result in report.results)
    said = ", ".join(f"{counts[kind]} {kind}" for kind in (FAIL, WARN, PASS, UNSEEN) if counts[kind])
    bad = [result for result in report.results if result.verdict == FAIL]
    failing = dict.fromkeys(f"{result.name}{f' on {result.node}' if result.node else ''}" for result in bad)
    where = f"; failing: {', '.join(failing)}" if failing else ""
    return Text(f"{report.verdict}: ", STYLES[report.verdict]) + Text(f"{said}{where} ({report.seconds:.1f} s)")
