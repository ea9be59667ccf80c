"""Progress on the terminal, a line now and then in a log; and what servers do, as a table."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from windlass.export.serve import Served
from windlass.export.write import Advance

EVERY_SECONDS = 30  # between lines where nobody watches


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def progress(stage: str, size: int) -> Iterator[Advance]:
    """A bar in bytes with speed and time left; lines in a log."""
    if not sys.stderr.isatty():
        yield _lines(stage, size)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"{stage:<9}", total=size)
        yield lambda count: bar.advance(task, count)


def _lines(stage: str, size: int) -> Advance:
    lock, began = Lock(), time.monotonic()
    state = {"done": 0.0, "told": began}

    def advance(count: int) -> None:
        with lock:
            state["done"] += count
            now = time.monotonic()
            if now - state["told"] >= EVERY_SECONDS and size:
                state["told"] = now
                rate = state["done"] / (now - began)
                left = (size - state["done"]) / rate if rate else 0.0
                say(f"{stage:<9} {state['done'] / size:.0%} at {rate / 2**20:,.0f} MiB/s, {left / 60:.0f} min left")

    return advance


def served(answer: Served) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("server", "target", "adapters", "unmerged", "source"):
        table.add_column(heading, overflow="fold")
    for row in answer.rows:
        table.add_row(row.server, row.target, str(row.adapters), row.unmerged, row.source)
    console = Console()
    console.print(table)
    console.print(answer.advice, soft_wrap=True)
    for what, command in answer.commands.items():
        print(f"# {what}\n{command}")
