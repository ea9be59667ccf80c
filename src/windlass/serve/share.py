"""The share of an adapter's effect that arrives: robust slopes between differences of log-probabilities. No torch."""

import math
import statistics
from collections.abc import Sequence
from typing import Final

OUTLIER: Final = 1.5 * 1.48  # medians of absolute residuals from which on they count less (Huber)
ITERATIONS: Final = 12
SETTLED: Final = 0.01  # of the standard error
TINY: Final = 1e-9


def subtract(values: Sequence[float], others: Sequence[float]) -> list[float]:
    return [one - other for one, other in zip(values, others, strict=True)]


def median_size(values: Sequence[float]) -> float:
    return statistics.median(map(abs, values))


def fit_slope(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return the slope of y against x through the origin, and its standard error.

    Unlikely tokens have log-probabilities with much more noise than others: they must not decide.
    """
    weights = [1.0] * len(x)
    slope = error = 0.0
    for _ in range(ITERATIONS):
        square = sum(w * a * a for w, a in zip(weights, x, strict=True))
        if square < TINY * TINY:
            return 0.0, math.inf
        before, slope = slope, sum(w * a * b for w, a, b in zip(weights, x, y, strict=True)) / square
        if abs(slope - before) < SETTLED * error:
            break
        rest = [b - slope * a for a, b in zip(x, y, strict=True)]
        error = math.sqrt(sum((w * a * r) ** 2 for w, a, r in zip(weights, x, rest, strict=True))) / square
        limit = OUTLIER * median_size(rest) + TINY
        weights = [min(1.0, limit / (abs(r) + TINY)) for r in rest]
    return slope, error
