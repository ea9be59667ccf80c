"""Progress of tokenizing, on stderr: one process tokenizes, whichever rank it is, and that one reports."""

import sys
import time
from collections.abc import Callable
from typing import Final

from windlass.observe.steps import format_clock

FIRST_SECONDS: Final = 2.0  # what is done sooner is not reported
GROWTH: Final = 1.4  # of the time between two lines, so that hours don't fill a log
LONGEST_SECONDS: Final = 60.0


class Progress:
    """Called with the rows done so far; prints a line now and then. `count`: all rows, asked only if it takes long."""

    def __init__(self, name: str, count: Callable[[], int | None]) -> None:
        self.name = name
        self.count = count
        self.began = time.monotonic()
        self.pause = FIRST_SECONDS
        self.due = self.began + self.pause
        self.total: int | None = None

    def __call__(self, rows: int) -> None:
        now = time.monotonic()
        if now < self.due or not rows:
            return
        if self.pause == FIRST_SECONDS:
            self.total = self.count()
        self.pause = min(self.pause * GROWTH, LONGEST_SECONDS)
        self.due = now + self.pause
        rate = rows / (now - self.began)
        text = f"tokenizing {self.name}: {rows:,} rows, {rate:,.0f} rows/s"
        if self.total and self.total >= rows:
            left = format_clock((self.total - rows) / rate)
            text = f"tokenizing {self.name}: {rows:,} of {self.total:,} rows, {rate:,.0f} rows/s, {left} left"
        print(text, file=sys.stderr, flush=True)
