"""Progress of preparing data, on stderr: one process tokenizes, whichever rank it is, and that one reports."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from windlass.observe.steps import format_clock

FIRST_SECONDS: Final = 1.0  # what is done sooner is not reported
GROWTH: Final = 1.4  # of the time between two lines of a log, so that hours don't fill it
LONGEST_SECONDS: Final = 60.0
REDRAW_SECONDS: Final = 0.2  # between two states of a terminal's bar
BAR: Final = 24  # characters


class ProgressBar:
    """Called with the rows done so far; redraws a bar, or writes a line to a log now and then. `count`: all rows, asked
    only if it takes long."""

    def __init__(self, stage: str, count: Callable[[], int | None]) -> None:
        self.stage = stage
        self.count = count
        self.on_terminal = sys.stderr.isatty()
        self.began = time.monotonic()
        self.pause = FIRST_SECONDS
        self.due = self.began + self.pause
        self.total: int | None = None
        self.reported = False

    def __call__(self, rows: int) -> None:
        now = time.monotonic()
        if now < self.due or not rows:
            return
        if not self.reported:
            self.total = self.count()
            self.reported = True
        self.pause = min(self.pause * GROWTH, LONGEST_SECONDS)
        self.due = now + (REDRAW_SECONDS if self.on_terminal else self.pause)
        rate = rows / (now - self.began)
        counted = f"{rows:,} rows, {rate:,.0f} rows/s"
        bar = ""
        if self.total and self.total >= rows:
            left = format_clock((self.total - rows) / rate)
            counted = f"{rows:,} of {self.total:,} rows, {rate:,.0f} rows/s, {left} left"
            bar = "━" * (BAR * rows // self.total)
        if self.on_terminal:
            print(f"\r{self.stage} {bar:─<{BAR}} {counted}\x1b[K", end="", file=sys.stderr, flush=True)
        else:
            print(f"{self.stage}: {counted}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the bar."""
        if self.on_terminal and self.reported:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextmanager
def show_progress(stage: str, count: Callable[[], int | None]) -> Iterator[ProgressBar]:
    """Report how far a stage is, and how long the rest takes, if it takes long."""
    progress = ProgressBar(stage, count)
    try:
        yield progress
    finally:
        progress.close()
