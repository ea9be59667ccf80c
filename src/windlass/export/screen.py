"""Export's messages and progress on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from windlass.export.merge import Advance

LOG_SECONDS = 30  # between lines in a log


def print_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def show_progress(stage: str, size: int) -> Iterator[Advance]:
    """Show a bar in bytes with speed and time left; in a log, a line every LOG_SECONDS."""
    if sys.stderr.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(f"{stage:<9}", total=size)
            yield lambda count: bar.advance(task, count)
        return
    lock, began = Lock(), time.monotonic()
    done, logged = 0, began

    def advance(count: int) -> None:
        nonlocal done, logged
        with lock:
            done += count
            now = time.monotonic()
            if done and now - logged >= LOG_SECONDS:
                logged, rate = now, done / (now - began)
                left = (size - done) / rate / 60
                print_line(f"{stage:<9} {done / size:.0%} at {rate / 2**20:,.0f} MiB/s, {left:.0f} min left")

    yield advance
