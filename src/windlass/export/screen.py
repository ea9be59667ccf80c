"""Export's messages and progress on stderr."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

LOG_SECONDS = 30  # between lines in a log
Say = Callable[[str], None]
Advance = Callable[[int], None]  # bytes done since the last call
ShowProgress = Callable[[str, int], AbstractContextManager[Advance]]  # stage, its bytes


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
    lock = Lock()
    began = time.monotonic()
    logged = began
    done = 0

    def advance(count: int) -> None:
        nonlocal done, logged
        with lock:
            done += count
            now = time.monotonic()
            if not done or now - logged < LOG_SECONDS:
                return
            logged = now
            rate = done / (now - began)
            minutes = (size - done) / rate / 60
            print_line(f"{stage:<9} {done / size:.0%} at {rate / 2**20:,.0f} MiB/s, {minutes:.0f} min left")

    yield advance
