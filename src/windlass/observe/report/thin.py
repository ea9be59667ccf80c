"""Many steps into few points that still show every spike: each point is a stretch's mean with its least and most."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Series = tuple[list[float | None], list[float | None], list[float | None]]  # mean, least, most


def edges(length: int, points: int) -> list[int]:
    """Where the stretches begin; the last entry is the end. As many as there are steps if those are few."""
    count = min(length, points)
    return [length * i // count for i in range(count)] + [length] if count else [0]


def thin(values: Sequence[float], cuts: Sequence[int]) -> Series:
    means: list[float | None] = []
    least: list[float | None] = []
    most: list[float | None] = []
    for start, end in itertools.pairwise(cuts):
        stretch = [value for value in values[start:end] if not math.isnan(value)]
        means.append(short(math.fsum(stretch) / len(stretch)) if stretch else None)
        least.append(short(min(stretch)) if stretch else None)
        most.append(short(max(stretch)) if stretch else None)
    return means, least, most


def short(value: float) -> float | None:
    """Five digits: more than a screen shows."""
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def smooth(values: Sequence[float], weight: float) -> list[float]:
    """Exponential mean without the pull of its start; a gap stays a gap."""
    total = norm = 0.0
    smoothed = []
    for value in values:
        if math.isnan(value):
            smoothed.append(value)
            continue
        total = total * weight + value * (1 - weight)
        norm = norm * weight + (1 - weight)
        smoothed.append(total / norm)
    return smoothed
