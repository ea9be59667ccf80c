"""How long rows are once padded: as the longest of their micro-batch, in which training puts rows of like length."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import fmean

from windlass.settings import WINDOW_BATCHES

MOST_ROWS = 4096  # of a window: more say nothing new about a sample


@dataclass(frozen=True, slots=True)
class RowLengths:
    """The tokens of rows as they are trained on, cut to max_length."""

    usual: int  # the mean
    sample: tuple[int, ...] = ()  # shortest first; empty if rows are not padded, or of one length
    count: int | None = None  # rows of an epoch; None: a stream, which is not sorted

    def pad(self, micro: int, step_rows: int) -> float:
        """Return the mean length after padding, in micro-batches of `micro` rows and steps of `step_rows`."""
        if micro == 1 or not self.sample:
            return self.usual
        if self.count is None:
            return _pad_at_random(self.sample, micro)
        return _pad_sorted(self.sample, micro, min(self.count, step_rows * WINDOW_BATCHES, MOST_ROWS))


@cache
def _pad_at_random(sample: tuple[int, ...], micro: int) -> float:
    """Return the expected longest of `micro` rows that are drawn from the sample."""
    known = len(sample)
    chances = [((place + 1) / known) ** micro - (place / known) ** micro for place in range(known)]
    return sum(length * chance for length, chance in zip(sample, chances, strict=True))


@cache
def _pad_sorted(sample: tuple[int, ...], micro: int, rows: int) -> float:
    """Return the mean of the longest in each micro-batch of a window of `rows` rows, sorted, distributed as the
    sample."""
    firsts = range(0, max(1, rows), micro)  # each micro-batch's longest row, counted from the window's longest
    return fmean(sample[-1 - place * len(sample) // max(1, rows)] for place in firsts)
