"""The detectors: what the last steps hold -> alarms. Pure functions, robust against noise: medians, not means."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, Final

from windlass.observe import steps
from windlass.observe.watch.alarm import Alarm
from windlass.runfile import Watch

Record = Mapping[str, Any]

WINDOW: Final = 50  # steps that are looked back on
LEAST: Final = 20  # steps before anything is judged
RECENT: Final = 5  # steps whose median is `now`: one odd batch is no trend
SLOW_STEPS: Final = 10  # the same for times, which scatter more
SIGMA: Final = 1.4826  # median absolute deviation -> standard deviation of a normal distribution
WARM_UP: Final = 5  # first steps, slow for reasons of their own
SAMPLES: Final = 64  # of memory, in a trace
GROWTH: Final = 0.05  # share of the memory that has to be gained within a trace
IMBALANCE: Final = 0.05  # share of the memory by which a rank has to exceed the others
PER_EXPERT: Final = 64  # choices an even share would give each expert: of fewer, texts on one subject leave some out
LOOKS: Final = 3  # looks at the experts in a row
ROWS_SHOWN: Final = 64

SLICE: Final = 0.02  # seconds: what a rank loses to its operating system's other work is no fault of the rank

# A power cap is how a busy GPU of these wattages normally runs; the others are faults of cooling or supply.
HARMLESS: Final = ("software power cap", "sync boost")


@dataclass
class Trace:
    """At most SAMPLES of (step, value): every one, then every second, every fourth …: a whole run in constant room."""

    stride: int = 1
    seen: int = 0
    points: list[tuple[int, float]] = field(default_factory=list)

    def add(self, step: int, value: float) -> None:
        if self.seen % self.stride == 0:
            self.points.append((step, value))
        self.seen += 1
        if len(self.points) > SAMPLES:
            self.points, self.stride = self.points[::2], self.stride * 2


@dataclass
class Memory:
    """One rank's, of its GPU or, where there is none, of its process: the whole run, and the last samples."""

    capacity_gib: float
    whole: Trace = field(default_factory=Trace)
    last: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=SAMPLES))


@dataclass
class Past:
    """What the detectors look at. Constant room, however long the run is."""

    limits: Watch
    max_steps: int | None = None
    joined: deque[tuple[int, Mapping[int, Record]]] = field(default_factory=lambda: deque(maxlen=WINDOW + RECENT))
    memory: dict[int, Memory] = field(default_factory=dict)
    looks: deque[tuple[int, Mapping[int, Record]]] = field(default_factory=lambda: deque(maxlen=LOOKS))
    lowest: tuple[float, float] | None = None  # median and deviation of the loss where its median was lowest
    fastest: deque[float] = field(default_factory=lambda: deque(maxlen=1000))  # seconds of steps
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    seen: int = 0

    def add(self, step: int, records: Mapping[int, Record]) -> None:
        self.joined.append((step, records))
        self.seen += 1
        for rank, record in records.items():
            held = record.get("gpu_peak_gib", record.get("rss_gib"))
            if rank in self.memory and held is not None:
                self.memory[rank].whole.add(step, held)
                self.memory[rank].last.append((step, held))
        if any("experts" in record for record in records.values()):
            self.looks.append((step, records))
        before = values(list(self.joined)[:-RECENT], "loss")
        if len(before) >= LEAST:
            around = center(before)
            self.lowest = min(self.lowest or around, around)
        seconds = slowest(records)
        if seconds and self.seen > WARM_UP:
            self.fastest.append(seconds)

    def clear(self) -> None:
        """Forget the steps: the run went back to a checkpoint."""
        self.joined.clear()
        self.looks.clear()


def center(numbers: Sequence[float]) -> tuple[float, float]:
    """Median, and the standard deviation that the median absolute deviation stands for."""
    middle = median(numbers)
    return middle, SIGMA * median(abs(number - middle) for number in numbers)


def values(joined: Iterable[tuple[int, Mapping[int, Record]]], name: str) -> list[float]:
    """Of the first rank that knows it: loss and gradient norm are the same on all."""
    found = (next((r[name] for r in records.values() if r.get(name) is not None), None) for _, records in joined)
    return [value for value in found if value is not None]


def slowest(records: Mapping[int, Record]) -> float:
    """A step takes as long as its slowest rank."""
    return max((record.get("step_seconds") or 0.0 for record in records.values()), default=0.0)


def loss_divergence(past: Past) -> Iterator[Alarm]:
    now = values(list(past.joined)[-RECENT:], "loss")
    if past.lowest is None or len(now) < RECENT:
        return
    middle, deviation = past.lowest
    limit = middle + max(past.limits.deviations * deviation, 0.1 * abs(middle))
    if median(now) > limit:
        yield Alarm(
            "loss_divergence",
            past.joined[-1][0],
            f"median of the last {RECENT} steps {median(now):.4g}; it was {middle:.4g} with a deviation of"
            f" {deviation:.2g}, the limit is {limit:.4g}",
        )


def gradient_spike(past: Past) -> Iterator[Alarm]:
    step, records = past.joined[-1]
    before = values(list(past.joined)[-WINDOW - 1 : -1], "grad_norm")
    now = values([past.joined[-1]], "grad_norm")
    if len(before) < LEAST or not now:
        return
    middle, deviation = center(before)
    limit = max(past.limits.gradient_factor * middle, middle + past.limits.deviations * deviation)
    if now[0] > limit:
        message = f"norm {now[0]:.4g}, the median before was {middle:.4g}, the limit is {limit:.4g}; "
        yield Alarm("gradient_spike", step, message + rows(records))


def rows(records: Mapping[int, Record]) -> str:
    """The step's rows of the data set, rank by rank."""
    said = []
    for rank, record in sorted(records.items()):
        listed = record.get("rows") or []
        more = f" and {len(listed) - ROWS_SHOWN} more" if len(listed) > ROWS_SHOWN else ""
        said.append(f"rank {rank}, rows {', '.join(map(str, listed[:ROWS_SHOWN])) or 'unknown'}{more}")
    return "; ".join(said)


def non_finite(past: Past) -> Iterator[Alarm]:
    step, records = past.joined[-1]
    odd = sorted({name for record in records.values() for name in record.get("non_finite") or ()})
    skipped = any(record.get("skipped") for record in records.values())
    if odd or skipped:
        what = ", ".join(odd) or "gradient"
        said = f"{what}{', step left out' if skipped else ''}; {rows(records)}"
        yield Alarm("non_finite", step, said, broken="loss" in odd)


def straggler(past: Past) -> Iterator[Alarm]:
    """The first phase in which one rank takes longer than the others: that others are late after it is no fault."""
    recent = list(past.joined)[-LEAST:]
    ranks = sorted(recent[-1][1])
    if len(recent) < LEAST or len(ranks) < 2:
        return
    whole = median(slowest(records) for _, records in recent)
    for phase in ("data", "forward", "backward", "optimizer", "other"):
        name = f"{phase}_seconds"
        taken = {rank: median(records[rank].get(name) or 0.0 for _, records in recent) for rank in ranks}
        worst = max(taken, key=lambda rank: taken[rank])
        others = median(taken[rank] for rank in ranks if rank != worst)
        if taken[worst] - others > max(past.limits.straggler_share * whole, SLICE):
            waits = f"{taken[worst]:.3g} s, the others {others:.3g} s of a step of {whole:.3g} s"
            yield Alarm("straggler", recent[-1][0], f"slow in {phase}: {waits}", worst)
            return


def memory_growth(past: Past) -> Iterator[Alarm]:
    for rank, memory in past.memory.items():
        limit = past.limits.memory_fraction * memory.capacity_gib
        for points in (list(memory.last), memory.whole.points):
            slope = steady(points, GROWTH * memory.capacity_gib)
            if slope is None:
                continue
            step, held = points[-1]
            full = step + (limit - held) / slope
            if past.max_steps is None or full < past.max_steps:
                message = f"{held:.2f} GiB and {slope * 1024:.3g} MiB more per step: {limit:.1f} of"
                message += f" {memory.capacity_gib:.1f} GiB would be held at step {max(full, step):.0f}"
                yield Alarm("memory_growth", step, message, rank)
                break


def steady(points: Sequence[tuple[int, float]], least: float) -> float | None:
    """GiB per step, where it grew by `least` and no slower at its end: caches level off, leaks don't."""
    if len(points) < SAMPLES // 2:
        return None
    size = len(points) // 4
    parts = [points[i * size : (i + 1) * size] for i in range(4)]
    middles = [(median(step for step, _ in part), median(value for _, value in part)) for part in parts]
    gains = [after[1] - before[1] for before, after in pairwise(middles)]
    gained = middles[3][1] - middles[0][1]
    if gained < least or min(gains) < 0.5 * gained / 3 or gains[-1] < 0.8 * gained / 3:
        return None
    return gained / (middles[3][0] - middles[0][0])


def memory_imbalance(past: Past) -> Iterator[Alarm]:
    held = {rank: median(v for _, v in memory.last) for rank, memory in past.memory.items() if len(memory.last) >= 5}
    if len(held) < 2 or len(held) < len(past.memory):
        return
    worst = max(held, key=lambda rank: held[rank])
    others = median(value for rank, value in held.items() if rank != worst)
    excess = held[worst] - others
    if held[worst] > past.limits.memory_ratio * others and excess > IMBALANCE * past.memory[worst].capacity_gib:
        message = f"{held[worst]:.2f} GiB, the others {others:.2f} GiB"
        yield Alarm("memory_imbalance", past.joined[-1][0], message, worst)


def throughput(past: Past) -> Iterator[Alarm]:
    recent = [seconds for _, records in list(past.joined)[-SLOW_STEPS:] if (seconds := slowest(records))]
    if len(past.fastest) < WINDOW or len(recent) < SLOW_STEPS:
        return
    usual, now = median(past.fastest), median(recent)
    if now * past.limits.throughput_fraction > usual:
        records = past.joined[-1][1].values()
        phases = {p: sum(r.get(f"{p}_seconds") or 0.0 for r in records) for p in steps.PHASES}
        message = f"median step {now:.3g} s over the last {SLOW_STEPS}, {usual:.3g} s before: {usual / now:.0%} of"
        message += f" the speed; most of it goes into {max(phases, key=lambda p: phases[p])}"
        yield Alarm("throughput", past.joined[-1][0], message)


def throttling(past: Past) -> Iterator[Alarm]:
    recent = list(past.joined)[-LEAST:]
    for rank in recent[-1][1]:
        found = [r[rank]["gpu_throttle"] for _, r in recent if r[rank].get("gpu_throttle") is not None]
        bad = [faults for each in found if (faults := [reason for reason in each if reason not in HARMLESS])]
        if len(found) >= 5 and len(bad) * 2 >= len(found):
            reasons = ", ".join(sorted({reason for each in bad for reason in each}))
            yield Alarm("throttling", recent[-1][0], f"{reasons} in {len(bad)} of {len(found)} samples", rank)


def dead_experts(past: Past) -> Iterator[Alarm]:
    if len(past.looks) < LOOKS:
        return
    unused: list[int] = []  # per layer, the fewest that were unused in any look of any rank
    for _, records in past.looks:
        for record in records.values():
            look = record.get("experts")
            if not look or (record.get("tokens") or 0) < PER_EXPERT * look["experts"]:
                return
            unused = [min(pair) for pair in zip(unused or look["unused"], look["unused"], strict=True)]
    if layers := [str(layer) for layer, number in enumerate(unused) if number]:
        message = f"layers {', '.join(layers)}: up to {max(unused)} experts unused by any rank in {LOOKS} looks"
        yield Alarm("dead_experts", past.looks[-1][0], message)


def eval_loss(past: Past) -> Iterator[Alarm]:
    patience = past.limits.eval_patience
    if len(past.evaluations) <= patience:
        return
    best_step, best = min(past.evaluations[:-patience], key=lambda each: each[1])
    last = [loss for _, loss in past.evaluations[-patience:]]
    if min(last) > best and all(a <= b for a, b in pairwise(last)):
        message = f"{patience} evaluations in a row without a fall: {', '.join(f'{loss:.4g}' for loss in last)}"
        yield Alarm("eval_loss", past.evaluations[-1][0], f"{message}; the best was {best:.4g} at step {best_step}")


Detector = Callable[[Past], Iterable[Alarm]]
OF_STEPS: Final[dict[str, Detector]] = {
    each.__name__: each
    for each in (
        loss_divergence,
        gradient_spike,
        non_finite,
        straggler,
        memory_growth,
        memory_imbalance,
        throughput,
        throttling,
        dead_experts,
    )
}
OF_EVALUATIONS: Final[dict[str, Detector]] = {"eval_loss": eval_loss}
