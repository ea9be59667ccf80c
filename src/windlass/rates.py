"""How fast a machine really is, as the time model takes it: rates over shapes, latencies, host time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import exp, log

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")

# A rate as a function of two sizes: (rows, width, TFLOP/s). Between points it is interpolated, in logarithms.
Points = tuple[tuple[float, float, float], ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """One kind of collective over so many ranks: seconds = latency + bytes that one GPU sends / rate."""

    kind: str  # all-gather, reduce-scatter, all-reduce, all-to-all
    fabric: str  # link: all ranks on one node; network: they span nodes
    ranks: int
    latency_seconds: float  # of the smallest, called through PyTorch
    # Large ones. link: bytes that one GPU sends a second ((n - 1) / n of all; twice that for all-reduce).
    # network: bytes that leave one node a second, over all its NICs (a ring sends each byte out of a node once).
    gb_per_second: float


@dataclass(frozen=True, slots=True)
class Rates:
    """What the time model takes of a machine: measured by `windlass calibrate`, else implied by data sheets."""

    basis: str  # "data sheet", or "calibrated on 2 x h100, 2026-01-31"
    products: Mapping[str, Points]  # by dtype (bfloat16, float32): rows, sqrt(inputs x outputs), TFLOP/s
    grouped: Points  # one product of all experts, in the dtype of compute: rows per expert, the same width, TFLOP/s
    attention: Points  # causal attention forward: length, head width, TFLOP/s of the unmasked half
    memory_gb_per_second: float  # read + written by a large elementwise operation
    decode_gb_per_second: float  # FP8 codes read, with the scales applied
    operator_seconds: float  # host time of one dispatched operator, autograd included
    module_seconds: float  # host time of one module's call in Python
    sync_seconds: float  # host waits for the GPU and starts again
    collectives: tuple[Collective, ...]
    host_link_gb_per_second: float  # pinned host memory to GPU
    storage_gb_per_second: float  # cold weights, per node
    low: float  # measured / planned step time: the range of its residuals
    high: float

    __hash__ = object.__hash__  # a key of caches

    def collective(self, kind: str, fabric: str, ranks: int) -> Collective:
        """Of the measured group that is most like it."""
        alike = [c for c in self.collectives if (c.kind, c.fabric) == (kind, fabric)]
        return min(alike, key=lambda c: abs(log(c.ranks / ranks)))


@lru_cache(maxsize=10_000)
def product_rate(rates: Rates, kind: str, rows: float, width: float) -> float:
    """TFLOP/s of matrix products: of a dtype, or `grouped` for those of all experts at once."""
    return interpolate(rates.grouped if kind == "grouped" else rates.products[kind], rows, width)


def interpolate(points: Points, first: float, second: float) -> float:
    """The rate at these two sizes. Beyond the points: the nearest one's, but below the fewest rows in proportion."""
    firsts, lines = _by_first(points)
    after = bisect_right(firsts, first)
    near = slice(max(after - 1, 0), min(after + 1, len(firsts)))
    line = [(one, _between(rest, second)) for one, rest in zip(firsts[near], lines[near], strict=True)]
    return _between(line, first) * min(1.0, first / firsts[0])


@lru_cache
def _by_first(points: Points) -> tuple[list[float], list[list[tuple[float, float]]]]:
    found: dict[float, list[tuple[float, float]]] = {}
    for one, other, rate in sorted(points):
        found.setdefault(one, []).append((other, rate))
    return list(found), list(found.values())


def _between(line: list[tuple[float, float]], at: float) -> float:
    after = bisect_right(line, at, key=lambda point: point[0])
    if after in (0, len(line)):
        return line[min(after, len(line) - 1)][1]
    (left, low), (right, high) = line[after - 1], line[after]
    share = log(at / left) / log(right / left)
    return exp(log(low) * (1 - share) + log(high) * share)
