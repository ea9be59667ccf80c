"""The longest row that fits on the run's machines, under each layout, with activations kept or recomputed."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

from windlass.model.quantization import published_dtype
from windlass.plan.cost import Cost, estimate_cost
from windlass.plan.layout import AUTO, Layout
from windlass.plan.plan import Plan
from windlass.plan.search import Candidate, list_layouts, list_overrides
from windlass.versions import find_lacking

STEP = 256  # lengths are multiples of it
MOST_TOKENS = 2**20  # of a row, if the model's positions are unknown


@dataclass(frozen=True, slots=True)
class LongestRow:
    """A layout's longest row with one row per micro-batch, 5 % of the GPU left free. 0: not even STEP tokens fit."""

    layout: str
    tokens: int  # with every activation kept
    recomputed_tokens: int  # with activations recomputed
    offloaded_tokens: int  # recomputed, with layer inputs in host memory; 0: no longer, or not possible
    split_tokens: int  # recomputed, with rows split over more GPUs as well; 0: no longer, or not possible
    context_parallel: int  # the fewest GPUs that take that length; 1: none
    split_offloaded_tokens: int  # so split, with layer inputs in host memory as well
    tokens_per_second: float | None  # of the longer of the first two
    overrides: tuple[str, ...]  # with which `plan` takes it

    @property
    def longest(self) -> int:
        return max(self.tokens, self.recomputed_tokens)

    @property
    def longer(self) -> Iterator[str]:
        if self.offloaded_tokens:
            yield f"{self.offloaded_tokens:,} with train.offload_activations: true"
        if self.split_tokens:
            yield f"{self.split_tokens:,} with layout.context_parallel: {self.context_parallel}"
        if self.split_offloaded_tokens:
            yield f"{self.split_offloaded_tokens:,} with both"


def find_longest_rows(plan: Plan) -> list[LongestRow]:
    """Return the longest row of each possible layout, the longest first."""
    layouts = list_layouts(plan.request, plan.search.experts, plan.search.kept_dtype)
    rows = []
    for name, layout in layouts:
        is_barred = layout.ranks > 1 and layout.name in plan.search.barred
        is_barred = is_barred or find_lacking(layout.needs, plan.search.work.versions) is not None
        can_shard = plan.search.shards or layout.shard == 1
        if layout.nodes == plan.layout.nodes and can_shard and not is_barred:
            rows.append(_find_longest_row(plan, name, layout))
    return sorted(rows, key=lambda row: (-row.longest, -(row.tokens_per_second or 0)))


def find_planned_longest_row(plan: Plan) -> LongestRow:
    return _find_longest_row(plan, plan.layout.name, plan.layout)


def _find_longest_row(plan: Plan, name: str, layout: Layout) -> LongestRow:
    layout = replace(layout, activation_checkpointing=True)
    tokens = _bisect(plan, replace(layout, activation_checkpointing=False, offload_activations=False))
    recomputed = _bisect(plan, layout)
    recompute = recomputed > tokens
    longest = max(tokens, recomputed)
    split_tokens = 0
    context_parallel = 1
    for split in plan.search.work.splits:
        if split > layout.context_parallel:
            found = _bisect(plan, replace(layout, context_parallel=split))
            if found > max(longest, split_tokens):
                split_tokens = found
                context_parallel = split
    offloaded = both = 0
    if plan.search.work.may_offload and not layout.offload_activations:
        offloaded = _bisect(plan, replace(layout, offload_activations=True))
        if split_tokens:
            both = _bisect(plan, replace(layout, offload_activations=True, context_parallel=context_parallel))
    more = (
        offloaded if offloaded > longest else 0,
        split_tokens,
        context_parallel,
        both if both > max(offloaded, split_tokens) else 0,
    )
    if not longest:
        return LongestRow(name, 0, 0, *more, None, ())
    chosen = layout
    if not recompute:
        chosen = replace(layout, activation_checkpointing=False, offload_activations=False)
    cost = _estimate(plan, chosen, longest)
    candidate = Candidate(name, chosen, cost, (), here=True)
    overrides = list_overrides(candidate, plan.loaded, published_dtype(plan.base))
    written = plan.run.layout.activation_checkpointing
    if recompute and written is not True:
        key = "train.gradient_checkpointing" if written == AUTO else "layout.activation_checkpointing"
        overrides.append(f"{key}=true")
    speed = cost.tokens_per_second
    return LongestRow(name, tokens, recomputed, *more, speed, tuple(overrides))


def _bisect(plan: Plan, layout: Layout) -> int:
    positions = plan.base.positions or MOST_TOKENS
    if _estimate(plan, layout, positions).has_headroom:
        return positions
    lengths = range(STEP, positions, STEP)
    return STEP * bisect_left(lengths, True, key=lambda tokens: not _estimate(plan, layout, tokens).has_headroom)


def _estimate(plan: Plan, layout: Layout, tokens: int) -> Cost:
    """Return the cost of rows of one document of this many tokens, one row per micro-batch."""
    batch = replace(plan.search.batches(layout.readers)[0], length=tokens)
    return estimate_cost(replace(plan.search.work, layout=layout, batch=batch, document=None), advise=False)


def list_columns(rows: list[LongestRow]) -> Iterator[list[str]]:
    for row in rows:
        speed = "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"
        split = f"{row.split_tokens:,} over {row.context_parallel}" if row.split_tokens else "–"
        counts = (row.tokens, row.recomputed_tokens, row.offloaded_tokens)
        yield [row.layout, *(f"{tokens:,}" if tokens else "–" for tokens in counts), split, speed]
