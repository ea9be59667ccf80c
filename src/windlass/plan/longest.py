"""The longest row that fits on the run's machines, under each layout, with activations kept or recomputed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from windlass.model.quantization import published_dtype
from windlass.plan.cost import Cost, estimate_cost
from windlass.plan.layout import AUTO, Layout
from windlass.plan.plan import Plan
from windlass.plan.search import Candidate, list_layouts, list_overrides

STEP = 256  # lengths are multiples of it
MOST_TOKENS = 2**20  # of a row, if the model's positions are unknown


@dataclass(frozen=True, slots=True)
class LongestRow:
    """A layout's longest row with one row per micro-batch, 5 % of the GPU left free. 0: not even STEP tokens fit."""

    layout: str
    tokens: int  # with every activation kept
    recomputed_tokens: int  # with activations recomputed
    split_tokens: int  # recomputed, with rows split over more GPUs as well; 0: no longer, or not possible
    context_parallel: int  # the fewest GPUs that take that length; 1: none
    tokens_per_second: float | None  # of the longer of the first two
    overrides: tuple[str, ...]  # with which `plan` takes it

    @property
    def longest(self) -> int:
        return max(self.tokens, self.recomputed_tokens)

    @property
    def split(self) -> str:
        """Return what splitting rows gains, in words; empty if nothing."""
        how = f"with layout.context_parallel: {self.context_parallel}"
        return f"{self.split_tokens:,} {how}" if self.split_tokens else ""


def find_longest_rows(plan: Plan) -> list[LongestRow]:
    """Return the longest row of each possible layout, the longest first."""
    layouts, _ = list_layouts(plan.request, plan.search.experts, plan.search.kept_dtype)
    rows = []
    for name, layout in layouts:
        is_barred = layout.ranks > 1 and layout.name in plan.request.barred
        can_shard = plan.search.shards or layout.shard == 1
        if layout.nodes == plan.layout.nodes and can_shard and not is_barred:
            rows.append(_find_longest_row(plan, name, layout))
    return sorted(rows, key=lambda row: (-row.longest, -(row.tokens_per_second or 0)))


def find_planned_longest_row(plan: Plan) -> LongestRow:
    """Return the longest row of the plan's own layout."""
    return _find_longest_row(plan, plan.layout.name, plan.layout)


def _find_longest_row(plan: Plan, name: str, layout: Layout) -> LongestRow:
    tokens, recomputed = (_bisect(plan, replace(layout, activation_checkpointing=value)) for value in (False, True))
    recompute = recomputed > tokens
    longest = max(tokens, recomputed)
    split_tokens = 0
    context_parallel = 1
    for split in plan.search.work.splits:
        if split > layout.context_parallel:
            found = _bisect(plan, replace(layout, activation_checkpointing=True, context_parallel=split))
            if found > max(longest, split_tokens):
                split_tokens = found
                context_parallel = split
    if not longest:
        return LongestRow(name, 0, 0, split_tokens, context_parallel, None, ())
    chosen = replace(layout, activation_checkpointing=recompute)
    cost = _estimate(plan, chosen, longest)
    candidate = Candidate(name, chosen, cost, (), here=True)
    overrides = list_overrides(candidate, plan.loaded, published_dtype(plan.base))
    written = plan.run.layout.activation_checkpointing
    if recompute and written is not True:
        key = "train.gradient_checkpointing" if written == AUTO else "layout.activation_checkpointing"
        overrides.append(f"{key}=true")
    speed = cost.tokens_per_second
    return LongestRow(name, tokens, recomputed, split_tokens, context_parallel, speed, tuple(overrides))


def _bisect(plan: Plan, layout: Layout) -> int:
    positions = plan.base.positions or MOST_TOKENS
    if _estimate(plan, layout, positions).has_headroom:
        return positions
    fits = 0
    too_long = -(-positions // STEP)
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if _estimate(plan, layout, middle * STEP).has_headroom:
            fits = middle
        else:
            too_long = middle
    return fits * STEP


def _estimate(plan: Plan, layout: Layout, tokens: int) -> Cost:
    """Return the cost of rows of one document of this many tokens, one row per micro-batch."""
    batch = replace(plan.search.batches(layout.readers)[0], length=tokens)
    return estimate_cost(replace(plan.search.work, layout=layout, batch=batch, document=None), advise=False)


def list_columns(rows: list[LongestRow]) -> Iterator[list[str]]:
    for row in rows:
        speed = "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"
        split = f"{row.split_tokens:,} over {row.context_parallel}" if row.split_tokens else "–"
        yield [row.layout, _format_tokens(row.tokens), _format_tokens(row.recomputed_tokens), split, speed]


def _format_tokens(tokens: int) -> str:
    return f"{tokens:,}" if tokens else "–"
