"""The same run under every layout, each with the micro-batch that suits it: one row each, the fastest on top."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from windlass.plan.cost import Batch, Cost, Work, cost
from windlass.plan.layout import Candidate, Layout
from windlass.plan.layout.compare import ONCE

# What a micro-batch or layout that the plan chooses leaves free of a GPU: the memory model was held against torch's
# tracker to within as much.
HEADROOM = 0.05
# Layouts whose best cases are this close are equal; of those the one with least to hide behind computing is taken.
EQUAL = 1.02


@dataclass(frozen=True, slots=True)
class Trial:
    """One way to cut the sequences that a GPU learns from in an optimizer step into micro-batches."""

    batch: Batch
    cost: Cost
    fits: bool  # with room to spare, where there is a choice


@dataclass(frozen=True, slots=True)
class Contender:
    """A layout, whether training can run it, and what it would cost."""

    candidate: Candidate
    ranks: int
    batch: Batch
    cost: Cost | None  # None where not even its costs can be said
    gpu_hours: float | None
    tried: tuple[Trial, ...] = ()
    roomy: bool = False  # it fits and leaves HEADROOM free

    @property
    def name(self) -> str:
        return self.candidate.title

    @property
    def layout(self) -> Layout | None:
        return self.candidate.layout


def contend(
    work: Work,
    usual: int,
    candidates: Sequence[Candidate],
    batches: Sequence[Batch],
    gpu_hours: Callable[[Layout, Batch, Cost], float | None] = lambda *_: None,
) -> tuple[Contender, ...]:
    """Everything but layout and micro-batch is the run's own. `usual`: the tokens that its rows have, most of them."""
    made = []
    for candidate in candidates:
        if candidate.layout is None:
            made.append(Contender(candidate, work.layout.ranks, batches[0], None, None))
            continue
        tried = trials(work, candidate.layout, usual, batches)
        best = chosen_batch(tried)
        hours = gpu_hours(candidate.layout, best.batch, best.cost)
        roomy = best.cost.fits and best.cost.gpu_gib <= work.machine.gpu.memory_gib * (1 - HEADROOM)
        made.append(Contender(candidate, candidate.layout.ranks, best.batch, best.cost, hours, tried, roomy))
    return tuple(sorted(made, key=_rank))


def trials(work: Work, layout: Layout, usual: int, batches: Sequence[Batch]) -> tuple[Trial, ...]:
    """Smallest micro-batch first, up to the first that does not fit: none after it would."""
    made: list[Trial] = []
    room = work.machine.gpu.memory_gib * (1 - HEADROOM if len(batches) > 1 else 1)
    for batch in batches:
        found = cost(replace(work, batch=batch).under(layout), usual, advise=False)
        made.append(Trial(batch, found, found.fits and found.gpu_gib <= room))
        if not made[-1].fits:
            break
    return tuple(made)


def chosen_batch(tried: Sequence[Trial]) -> Trial:
    """The fastest that fits, the smaller of equals; where none does, the smallest."""
    fitting = [trial for trial in tried if trial.fits]
    return min(fitting, key=lambda trial: round(trial.cost.step_seconds, 9)) if fitting else tried[0]


def _rank(contender: Contender) -> tuple[bool, bool, bool, float]:
    """Possible and fitting first; then by GPU-hours a token, so that more nodes win only when they pay."""
    c = contender.cost
    per_token = contender.ranks / c.tokens_per_second if c else float("inf")
    return c is None, not contender.candidate.possible, not (c and c.fits), per_token


def chosen(contenders: Sequence[Contender]) -> Contender | None:
    """The fastest that training can run on these nodes and that fits, with room to spare where any does; where none
    fits, the smallest. Its layout says why. None where nothing is possible at all."""
    able = [c for c in contenders if c.candidate.possible and c.candidate.here and c.cost and c.layout]
    if not able:
        return None
    roomy = any(c.roomy for c in able)
    fitting = [c for c in able if (c.roomy if roomy else c.cost and c.cost.fits)]
    if not fitting:
        best = min(able, key=_gpu_gib)
        reason = f"none of {len(able)} layouts fits, and this one needs least, {_gpu_gib(best):.0f} GiB per GPU"
    else:
        fastest = min(map(_seconds, fitting))
        best = min((c for c in fitting if _seconds(c) <= fastest * EQUAL), key=_serial_seconds)
        reason = _praise(best, fitting, len(able)) + _too_tight(able, best) * roomy
    layout = best.layout
    assert layout is not None  # `able` holds no other
    held = " with the base kept in FP8 as published" * (layout.base_dtype == "fp8")
    once = f", {ONCE} a step" * (ONCE in best.name)
    told = replace(layout, reason=f"chosen{held}{once}: {reason}")
    return replace(best, candidate=replace(best.candidate, layout=told))


def _seconds(contender: Contender) -> float:
    return contender.cost.step_seconds if contender.cost else math.inf


def _serial_seconds(contender: Contender) -> float:
    return contender.cost.step_seconds_serial if contender.cost else math.inf


def _gpu_gib(contender: Contender) -> float:
    return contender.cost.gpu_gib if contender.cost else math.inf


def _praise(best: Contender, fitting: Sequence[Contender], able: int) -> str:
    if len(fitting) == 1:
        return f"the only one of {able} layouts that fits" if able > 1 else "the only layout that is possible"
    text = f"the fastest of the {len(fitting)} layouts that fit, {_seconds(best):.3g} s a step"
    others = sorted((c for c in fitting if c is not best), key=_seconds)
    rivals = others[:1] + others[1:][-1:]  # the next and the slowest
    return f"{text} ({', '.join(f'{rival.name} {_seconds(rival):.3g} s' for rival in rivals)})"


def _too_tight(able: Sequence[Contender], best: Contender) -> str:
    """Which faster one was passed over, since it fits by a hair's breadth."""
    tight = [c for c in able if c.cost and c.cost.fits and not c.roomy and _seconds(c) < _seconds(best)]
    if not tight:
        return ""
    return f"; {tight[0].name} would be faster, but leaves less than {HEADROOM:.0%} of the GPU free"


def same(one: Layout, other: Layout) -> bool:
    """Whatever the reason for either."""
    return replace(one, reason="") == replace(other, reason="")


def readable(contenders: Sequence[Contender], planned: Layout) -> list[Contender]:
    """The rows to show. Of a layout's variants on the run's own nodes, those that another of them beats in both
    memory and time are left out; of other numbers of nodes, all but the best."""
    rows: list[Contender] = []
    nodes: set[int] = set()
    for c in contenders:
        if c.cost is None or c.layout is None:
            continue
        here = [o for o in contenders if o.candidate.here and o.layout and o.layout.name == c.layout.name]
        own = same(c.layout, planned)
        if (c.candidate.here and (own or not any(_beats(o, c) for o in here))) or (
            not c.candidate.here and c.candidate.possible and c.layout.nodes not in nodes
        ):
            rows.append(c)
            if not c.candidate.here:
                nodes.add(c.layout.nodes)
    return rows


def _beats(one: Contender, other: Contender) -> bool:
    if one.cost is None or other.cost is None or one is other or not one.candidate.possible:
        return False
    mine, its = ((c.cost.gpu_gib, c.cost.step_seconds) for c in (one, other) if c.cost)
    return mine != its and mine[0] <= its[0] and mine[1] <= its[1]
