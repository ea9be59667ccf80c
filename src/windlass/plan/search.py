"""List possible layouts and micro-batches for a run, compare them, and choose the best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from windlass.errors import UserError, is_written
from windlass.observe.format import format_plural
from windlass.plan.cost import HEADROOM, BatchSize, Cost, Workload, estimate_cost
from windlass.plan.layout import (
    AUTO,
    MAY_GATHER_ONCE,
    OPEN,
    Layout,
    list_divisors,
    list_keys,
    resolve_layout,
    why_not_expert_parallel,
)
from windlass.plan.rows import RowLengths
from windlass.runfile import Loaded, Train
from windlass.runfile.reference import format_value
from windlass.settings import FOUR_BITS, IN_NAMES, PUBLISHED
from windlass.versions import find_lacking

# Layouts whose best cases are within this factor count as equal; the one with the least to overlap with compute wins.
EQUAL = 1.02
GATHERED_ONCE = "gathered once"
SPLIT = "context_parallel"
# Keys of `layout` that rule layouts out if `layout.name` is not set.
FREE_KEYS = ("shard", "replicate", "expert_parallel", "reshard_after_forward", "offload")

NamedLayout = tuple[str, Layout]  # a title, such as "full-shard, parameters offloaded", and its layout
Contenders = tuple["Candidate", ...]
BatchesOf = Callable[[int], tuple[BatchSize, ...]]  # number of readers -> the ways to split an optimizer step over them


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that the run could have, with its best micro-batch and its cost."""

    name: str
    layout: Layout
    cost: Cost
    tried: tuple[Cost, ...]  # micro-batches, smallest first
    here: bool  # it uses the run's number of nodes; False: more or fewer
    why_not: str = ""  # why training cannot use it; empty if it can

    def with_reason(self, reason: str) -> Candidate:
        return replace(self, layout=replace(self.layout, reason=reason))


@dataclass(frozen=True, slots=True)
class Search:
    work: Workload
    lengths: RowLengths
    batches: BatchesOf
    experts: int  # routed experts per layer that ranks can share; 0 for a dense model
    kept_dtype: str  # the checkpoint's quantized dtype, if the base can stay in it
    shards: bool  # the model can be sharded
    other_nodes: bool  # compare other numbers of nodes too: there is a network between them
    barred: Mapping[str, str]  # layouts that the rest of the run rules out on several ranks, and why

    def compare(self, layouts: Iterable[NamedLayout]) -> Contenders:
        """Return every possible layout with its best micro-batch, best first."""
        candidates = []
        for name, layout in layouts:
            is_here = layout.nodes == self.work.layout.nodes
            why_not = self.barred.get(layout.name, "") if layout.ranks > 1 else ""
            if not why_not and (lacking := find_lacking(layout.needs, self.work.versions)):
                why_not, _ = lacking
            if (self.shards or layout.shard == 1) and (is_here or not why_not):
                best, tried = try_batches(self.work, layout, self.lengths, self.batches(layout.readers))
                candidates.append(Candidate(name, layout, best, tried, is_here, why_not))

        # Possible and fitting layouts first, then by GPU-hours per token: more nodes must pay off.
        candidates.sort(key=lambda c: (bool(c.why_not), not c.cost.fits, c.layout.ranks / c.cost.tokens_per_second))
        return tuple(candidates)


def choose_fitting(search: Search, request: Layout, place: str) -> tuple[Candidate, Contenders]:
    """Choose the layout that is requested, or the best; return also what it was compared with. What no key sets is
    tried only if nothing fits otherwise: activations recomputed, then also layer inputs in host memory, then also rows
    split over GPUs, if a micro-batch of one row is too large. `place`: where the run file sets the layout, for errors.
    """
    ways = [request]
    if request.activation_checkpointing is None:
        ways.append(replace(request, activation_checkpointing=True))
    if request.offload_activations is None and ways[-1].activation_checkpointing and search.work.may_offload:
        ways.append(replace(ways[-1], offload_activations=True))
    choices = []
    for way in ways:
        choices.append(choose(search, way, place))
        best, contenders = choices[-1]
        if best.cost.fits:
            return _explain_way(best, request, way), contenders
    first, contenders = choices[0]
    if first.cost.batch.micro > 1 or request.context_parallel or not search.work.splits:
        return first, contenders
    for way in [way for way in ways if way.activation_checkpointing == ways[-1].activation_checkpointing]:
        best, contenders = choose(search, way, place, search.work.splits)
        if best.cost.fits:
            parts = f"rows are split over {best.layout.context_parallel} GPUs"
            return _explain_way(best, request, way, parts), contenders
    return first, contenders


def _explain_way(best: Candidate, request: Layout, way: Layout, split: str = "") -> Candidate:
    """Add to the layout's reason what the request leaves open and the run needs in order to fit."""
    words = [split] if split else []
    if way.activation_checkpointing and not request.activation_checkpointing and not split:
        words.append("activations are recomputed")
    if way.offload_activations and not request.offload_activations:
        words.append("layer inputs are in host memory")
    if not words:
        return best
    return best.with_reason(f"{best.layout.reason}; {' and '.join(words)}, it doesn't fit without")


def choose(search: Search, request: Layout, place: str, splits: Sequence[int] = ()) -> tuple[Candidate, Contenders]:
    """Choose the layout that is requested, or the best; return also what it was compared with. `splits`: compare these
    numbers of GPUs to split rows over."""
    layouts = list_layouts(request, search.experts, search.kept_dtype)
    if not search.other_nodes:
        layouts = [(name, layout) for name, layout in layouts if layout.nodes == request.nodes]
    layouts += [
        (f"{title}, {SPLIT} {split}", replace(layout, context_parallel=split))
        for split in splits
        for title, layout in layouts
        if layout.nodes == request.nodes
    ]
    contenders = search.compare(layouts)
    if any(c.here and c.cost.fits for c in contenders):  # then those that don't fit in spite of split rows say nothing
        contenders = tuple(c for c in contenders if c.cost.fits or c.layout.context_parallel not in splits)
    if request.name == AUTO:
        best = choose_layout(contenders)
    else:
        named = list_named_layouts(request, search.experts, search.kept_dtype)
        best = choose_layout(search.compare(named))
        lacking = find_lacking(named[0][1].needs, search.work.versions)
        if best is None and lacking:
            raise UserError(lacking[0], place, lacking[1], "too-old")
    if best is None:
        code = "no-layout"
        text = "no layout is possible"
        hint = "leave keys of `layout` out: no layout that the run can have agrees with them"
        if not search.shards:
            model = search.work.shape.base.family.causal_lm
            code = "not-shardable"
            text = f"{model} can't be sharded: it reads weights that FSDP2 would not have gathered"
            hint = "set layout.name: resident"
        raise UserError(text, place, hint, code)
    if request.name == AUTO:
        return best, contenders
    reason = f"set by {request.reason}"
    if best.layout.base_dtype != "bf16" and not request.base_dtype:
        reason += f"; the plan keeps the base in {search.kept_dtype.upper()} as published"
    return best.with_reason(reason), contenders


def list_layouts(request: Layout, experts: int, kept: str = "") -> list[NamedLayout]:
    """Return every layout on the run's nodes, then sensible ones on a quarter to twice as many. `experts`: routed
    experts per layer, 0 for a dense model. `kept`: the checkpoint's quantized dtype; each layout is then also listed
    with the base as published, unless the run sets its dtype."""
    free = _leave_open(request)
    layouts: list[NamedLayout] = []
    others = {max(1, request.nodes // 4), request.nodes // 2, request.nodes * 3 // 2, request.nodes * 2}
    if request.nodes <= 4:
        others = {*range(1, 2 * request.nodes + 1)}
    for nodes in (request.nodes, *sorted(others - {request.nodes})):
        is_here = nodes == request.nodes
        for dtype in _list_dtypes(free, kept):
            on_nodes = replace(free, nodes=nodes, base_dtype=dtype)
            if on_nodes.ranks % (free.context_parallel or 1):
                continue
            suffix = IN_NAMES.get(dtype, "")
            if not is_here:
                suffix += f", on {format_plural(nodes, 'node')}"
            for title, why_not, variant in _list_variants(on_nodes, experts):
                if why_not or (not is_here and (variant.name == "no-reshard" or variant.offload)):
                    continue
                layout = replace(resolve_layout(variant, experts), reason="compared")
                layouts.append((title + suffix, layout))
                if variant.name in MAY_GATHER_ONCE:
                    once = replace(layout, reshard_after_forward=False)
                    layouts.append((f"{title}, {GATHERED_ONCE}{suffix}", once))
    # The run's keys apply to the layout that they name, but `offload: false` applies to all layouts.
    keys: Sequence[str] = ()
    if request.name == AUTO:
        keys = FREE_KEYS
    elif request.offload is False:
        keys = ("offload",)
    wanted = {key: getattr(request, key) for key in keys if getattr(request, key) != OPEN[key]}
    return [
        (title, layout)
        for title, layout in layouts
        if all(getattr(layout, key) == value for key, value in wanted.items())
    ]


def list_impossible(request: Layout, experts: int) -> dict[str, str]:
    variants = _list_variants(replace(_leave_open(request), base_dtype=request.base_dtype or "bf16"), experts)
    return {title: why_not for title, why_not, _ in variants if why_not}


def _leave_open(request: Layout) -> Layout:
    return replace(request, reason="", **{key: OPEN[key] for key in FREE_KEYS})


def list_named_layouts(request: Layout, experts: int, kept: str = "") -> list[NamedLayout]:
    """Return the layout that a request names, once for each dtype that the base may be stored in."""
    layouts = [resolve_layout(replace(request, base_dtype=dtype), experts) for dtype in _list_dtypes(request, kept)]
    return [(request.name + IN_NAMES.get(layout.base_dtype, ""), layout) for layout in layouts]


def _list_dtypes(request: Layout, kept: str) -> list[str]:
    """Return the base's possible dtypes. An offloaded base stays in the compute dtype: host memory is large enough."""
    if request.base_dtype:
        return [request.base_dtype]
    return ["bf16", kept] if kept and not request.offload else ["bf16"]


def _list_variants(request: Layout, experts: int) -> Iterator[tuple[str, str, Layout]]:
    """Yield every layout with its title, and why these ranks can't have it, empty if they can; expert-parallel for each
    number of ranks that can share experts."""
    ranks = request.ranks
    nodes = request.nodes
    gpus = request.gpus_per_node
    full, kept, hybrid, experts_split, resident = (
        replace(request, name=name) for name in ("full-shard", "no-reshard", "hybrid", "expert-parallel", "resident")
    )
    alone = "one GPU: there is nothing to shard over" if ranks == 1 else ""
    yield "full-shard", alone, full
    if request.base_dtype == "bf16":
        yield "full-shard, parameters offloaded", alone, replace(full, offload=True)
    yield "no-reshard", alone, kept
    no_hybrid = ""
    if nodes == 1:
        no_hybrid = "one node: there is nothing to replicate across, it would be full-shard"
    elif gpus == 1:
        no_hybrid = "one GPU per node: there is nothing to shard over inside a node, it would be resident"
    yield "hybrid", no_hybrid, hybrid
    splits = [size for size in list_divisors(ranks) if 1 < size <= experts]
    if not splits:
        yield "expert-parallel", why_not_expert_parallel(experts, ranks, ranks), experts_split
    for size in splits:
        why_not = why_not_expert_parallel(experts, size, ranks)
        yield f"expert-parallel {size}", why_not, replace(experts_split, expert_parallel=size)
    if nodes > 1 and gpus > 1 and not why_not_expert_parallel(experts, gpus, gpus):
        replicated = replace(experts_split, shard=gpus, replicate=nodes, expert_parallel=gpus)
        yield f"expert-parallel {gpus}, replicated across nodes", "", replicated
    yield "resident", "", resident


def list_micro_batches(train: Train, accumulation: int, length: int) -> tuple[BatchSize, ...]:
    """Return the micro-batch that the run file sets, or every way to split an optimizer step, smallest first.
    `accumulation`: micro-batches of an optimizer step with the smallest micro-batch. Every rank makes the same choice,
    since it depends on the run file, the headers and the hardware table only, not on measurements."""
    if not train.plan_cuts_batches:
        return (BatchSize(train.least_batch, accumulation, length, train.sides),)
    return tuple(BatchSize(size, accumulation // size, length, train.sides) for size in list_divisors(accumulation))


def divide_batch(train: Train, total: int, length: int, readers: int) -> tuple[BatchSize, ...]:
    """Return the batches for a number of readers: the nearest global batch that divides evenly over them. `total`: the
    smallest micro-batches of an optimizer step over all of the run's readers."""
    return list_micro_batches(train, max(1, round(total / readers)), length)


def try_batches(
    work: Workload, layout: Layout, lengths: RowLengths, batches: Sequence[BatchSize]
) -> tuple[Cost, tuple[Cost, ...]]:
    """Return the fastest batch that leaves headroom, the larger of equals; if none does, the smallest. Also return all
    that were tried, up to the first without headroom: no later one would leave it."""
    tried: list[Cost] = []
    for batch in batches:
        tried.append(estimate_cost(replace(work, batch=batch, layout=layout), lengths, advise=False))
        if not tried[-1].has_headroom:
            break
    fitting = [cost for cost in tried if cost.has_headroom]
    if not fitting:
        return tried[0], tuple(tried)
    fastest = min(cost.step_seconds for cost in fitting)
    equals = [cost for cost in fitting if cost.step_seconds <= fastest * EQUAL]
    return equals[-1], tuple(tried)


def choose_layout(contenders: Sequence[Candidate]) -> Candidate | None:
    """Return the fastest contender that training can use on these nodes and that fits, with headroom if any has it; if
    none fits, the smallest; None if none is possible. Its layout's reason explains the choice."""
    able = [c for c in contenders if c.here and not c.why_not]
    if not able:
        return None
    fitting = [c for c in able if c.cost.has_headroom] or [c for c in able if c.cost.fits]
    if fitting:
        fastest = min(c.cost.step_seconds for c in fitting)
        equals = [c for c in fitting if c.cost.step_seconds <= fastest * EQUAL]
        best = min(equals, key=lambda c: c.cost.step_seconds_serial)
        reason = _explain_fastest(best, fitting, able)
    else:
        best = min(able, key=lambda c: c.cost.gpu_gib)
        reason = f"none of {len(able)} layouts fits, and this one needs least, {best.cost.gpu_gib:.0f} GiB per GPU"
    dtype = best.layout.base_dtype
    chosen = "chosen"
    if dtype in PUBLISHED:
        chosen += f" with the base kept in {dtype.upper()} as published"
    elif dtype != "bf16":
        chosen += f" with the base in {dtype.upper()}"
    if best.layout.name in MAY_GATHER_ONCE and not best.layout.reshard_after_forward:
        chosen += f", {GATHERED_ONCE} a step"
    return replace(best, layout=replace(best.layout, reason=f"{chosen}: {reason}"))


def _explain_fastest(best: Candidate, fitting: Sequence[Candidate], able: Sequence[Candidate]) -> str:
    seconds = best.cost.step_seconds
    second = min((c for c in fitting if c is not best), key=lambda c: c.cost.step_seconds, default=None)
    if second:
        margin = second.cost.step_seconds / seconds
        ahead = f"{margin:.2f} x faster than" if margin >= EQUAL else "as fast as"
        reason = f"the fastest of the {len(fitting)} layouts that fit, {seconds:.3g} s a step: {ahead} the next "
        reason += f"({second.name})"
    elif len(able) > 1:
        reason = f"the only one of {len(able)} layouts that fits"
    else:
        reason = "the only layout that is possible"
    tight = [c for c in able if c.cost.fits and not c.cost.has_headroom and c.cost.step_seconds < seconds]
    if tight and best.cost.has_headroom:
        reason += f"; {tight[0].name} would be faster, but leaves less than {HEADROOM:.0%} of the GPU free"
    return reason


def is_same_layout(one: Layout, other: Layout) -> bool:
    """Return whether two layouts are equal, ignoring their reasons."""
    return replace(one, reason="") == replace(other, reason="")


def drop_dominated(contenders: Sequence[Candidate], planned: Layout) -> list[Candidate]:
    """Return the contenders worth showing, all of which `plan` accepts. On the run's own nodes, variants of a layout
    that another variant beats in both memory and time are dropped; other numbers of nodes keep only their best."""
    able = [c for c in contenders if not c.why_not]
    rows: list[Candidate] = []
    nodes_shown: set[int] = set()
    for c in able:
        if not c.here:
            if c.layout.nodes not in nodes_shown:
                nodes_shown.add(c.layout.nodes)
                rows.append(c)
            continue
        rivals = [other for other in able if other.here and other.layout.name == c.layout.name]
        if is_same_layout(c.layout, planned) or not any(_dominates(rival, c) for rival in rivals):
            rows.append(c)
    return rows


def _dominates(rival: Candidate, c: Candidate) -> bool:
    """Return whether `rival` needs no more memory and no more time, and less of one."""
    theirs = (rival.cost.gpu_gib, rival.cost.step_seconds)
    ours = (c.cost.gpu_gib, c.cost.step_seconds)
    return theirs != ours and theirs[0] <= ours[0] and theirs[1] <= ours[1]


def list_overrides(c: Candidate, loaded: Loaded, kept: str) -> list[str]:
    """Return the overrides with which `windlass plan RUN` takes this row. `kept`: the checkpoint's quantized dtype."""
    layout = c.layout
    train = loaded.run.train
    keys = list_keys(layout)
    if not kept and layout.base_dtype not in FOUR_BITS:
        del keys["base_dtype"]
    overrides = [f"layout={keys.pop('name')}"]  # a name alone replaces the whole section
    overrides += [f"layout.{key}={format_value(value)}" for key, value in keys.items()]
    if layout.offload_activations and train.offload_activations is not True:
        overrides.append("train.offload_activations=true")
    if loaded.run.layout.activation_checkpointing is True:
        overrides.append("layout.activation_checkpointing=true")
    if layout.nodes != loaded.run.cluster.size[0]:
        overrides += [f"cluster.nodes={layout.nodes}", f"cluster.gpus_per_node={layout.gpus_per_node}"]
    accumulation = c.cost.batch.micro * c.cost.batch.accumulation // train.least_batch
    if not c.here and train.global_batch_size is not None:
        overrides.append(f"train.global_batch_size={accumulation * train.least_batch * layout.readers}")
    is_set = train.global_batch_size is None or train.gradient_accumulation_steps != AUTO
    if is_set and accumulation != train.micro_batches:
        overrides.append(f"train.gradient_accumulation_steps={accumulation}")
        key = "train.per_device_train_batch_size"  # 1 if only the accumulation is set
        if train.plan_cuts_batches and not is_written(loaded.where, key):
            overrides.append(f"{key}=auto")
    return overrides
