"""The same run under every layout: one row each, those that fit first, the fastest on top."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from windlass.cost import Cost, Work, cost
from windlass.layout import Candidate, Figures, Layout, choose


@dataclass(frozen=True, slots=True)
class Contender:
    """A layout, whether training can run it, and what it would cost."""

    candidate: Candidate
    ranks: int
    cost: Cost | None  # None where not even its costs can be said
    gpu_hours: float | None

    @property
    def name(self) -> str:
        return self.candidate.title


def weigh(work: Work, length: int) -> Cost:
    """Memory as when every row is full, for some will be; time and traffic at the length that rows usually have."""
    full = cost(work)
    if length == work.batch.length:
        return full
    usual = cost(replace(work, batch=replace(work.batch, length=length)))
    kept = ("rows", "gpu_gib", "host_gib", "fits", "remedy", "peak")
    return replace(usual, **{name: getattr(full, name) for name in kept})


def lay_out(work: Work, candidate: Candidate) -> Work | None:
    """The run under a candidate. Everything but the layout (and, for some, the base's dtype) is the run's own."""
    if candidate.layout is None:
        return None
    return replace(work.under(candidate.layout), base_bytes=candidate.base_bytes or work.base_bytes)


def contend(
    work: Work, length: int, candidates: Sequence[Candidate], gpu_hours: Callable[[Layout, Cost], float | None]
) -> tuple[Contender, ...]:
    made = []
    for candidate in candidates:
        laid = lay_out(work, candidate)
        weighed = weigh(laid, length) if laid else None
        hours = gpu_hours(laid.layout, weighed) if laid and weighed else None
        made.append(Contender(candidate, (laid or work).layout.ranks, weighed, hours))
    return tuple(sorted(made, key=_rank))


def _rank(contender: Contender) -> tuple[bool, bool, bool, float]:
    """Possible and fitting first; then by GPU-hours a token, so that more nodes win only when they pay."""
    c = contender.cost
    per_token = contender.ranks / c.tokens_per_second if c else float("inf")
    return c is None, not contender.candidate.possible, not (c and c.fits), per_token


def chosen(contenders: Sequence[Contender]) -> Layout | None:
    """What `layout: auto` takes: the fastest that fits and that training can run on these nodes."""
    return choose(
        [Figures(c.candidate, c.cost.fits, c.cost.gpu_gib, c.cost.step_seconds) for c in contenders if c.cost]
    )
