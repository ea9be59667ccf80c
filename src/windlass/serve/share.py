"""The share of an adapter's effect that arrives: robust slopes between differences of log-probabilities. No torch."""

import math
import statistics
from collections.abc import Sequence
from operator import mul
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
    weighted: Sequence[float] = x
    slope = error = 0.0
    for _ in range(ITERATIONS):
        square = sum(map(mul, weighted, x))
        if square < TINY * TINY:
            return 0.0, math.inf
        before, slope = slope, sum(map(mul, weighted, y)) / square
        if abs(slope - before) < SETTLED * error:
            break
        rest = [b - slope * a for a, b in zip(x, y, strict=True)]
        parts = list(map(mul, weighted, rest))
        error = math.sqrt(sum(map(mul, parts, parts))) / square
        sizes = [abs(r) + TINY for r in rest]
        limit = OUTLIER * statistics.median(sizes)
        weighted = [a if size <= limit else a * limit / size for a, size in zip(x, sizes, strict=True)]
    return slope, error


def measure_kept(effect: Sequence[float], served: Sequence[float], noise: Sequence[float]) -> tuple[float, float]:
    """Return the share of an adapter's effect that is served, and its standard error.

    noise: as in the effect itself, which makes a slope smaller; empty if there is none. An infinite error if the effect
    is no larger than its noise."""
    slope, error = fit_slope(effect, served)
    heard = 1 - sum(map(mul, noise, noise)) / max(sum(map(mul, effect, effect)), TINY)
    return (min(1.0, slope / heard), error / heard) if heard > 0 else (1.0, math.inf)
