"""List possible layouts and micro-batches for a run, compare them, and choose the best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from windlass.errors import UserError
from windlass.plan.cost import HEADROOM, Batch, Cost, Workload, estimate_cost
from windlass.plan.layout import (
    AUTO,
    Layout,
    LayoutRequest,
    list_divisors,
    resolve_layout,
    why_not_expert_parallel,
)
from windlass.runfile import Loaded, Train
from windlass.settings import (
    FOUR_BITS,
    IN_NAMES,
    PUBLISHED,
)

# Layouts whose best cases are within this factor count as equal; the one with the least to overlap with compute wins.
EQUAL = 1.02
MAY_GATHER_ONCE = ("hybrid", "expert-parallel")  # they gather in each pass, or once for all micro-batches of a step
GATHERED_ONCE = "gathered once"
# Keys of `layout` that rule layouts out if `layout.name` is not set.
FREE_KEYS = ("shard", "replicate", "expert_parallel", "reshard_after_forward", "offload")

Named = tuple[str, Layout]  # a title, such as "full-shard, parameters offloaded", and its layout
BatchesOf = Callable[[int], tuple[Batch, ...]]  # number of ranks -> the ways to split an optimizer step over them


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that the run could have, with its best micro-batch and its cost."""

    name: str
    layout: Layout
    cost: Cost
    tried: tuple[Cost, ...]  # micro-batches, smallest first
    here: bool  # it uses the run's number of nodes; False: more or fewer
    why_not: str = ""  # why training cannot use it; empty if it can

    @property
    def seconds(self) -> float:
        return self.cost.step_seconds


@dataclass(frozen=True, slots=True)
class Search:
    """The run that a layout is chosen for."""

    work: Workload
    usual: int  # tokens of a usual row
    batches: BatchesOf
    experts: int  # routed experts per layer that ranks can share; 0 for a dense model
    kept_dtype: str  # the checkpoint's quantized dtype, if the base can stay in it
    shards: bool  # the model can be sharded
    may_add_nodes: bool  # there is a network between nodes

    def compare(self, layouts: Sequence[Named], barred: Mapping[str, str] | None = None) -> tuple[Candidate, ...]:
        able = [(name, layout) for name, layout in layouts if self.shards or layout.shard == 1]
        return compare_layouts(self.work, self.usual, able, self.batches, barred)


@dataclass(frozen=True, slots=True)
class Choice:
    """A run's layout and micro-batch, and those that they were compared with."""

    layout: Layout
    batch: Batch
    fits: bool
    contenders: tuple[Candidate, ...] = ()
    impossible: Mapping[str, str] = field(default_factory=dict)  # impossible layouts, and why
    tried: tuple[Cost, ...] = ()  # micro-batches with this layout, smallest first

    def with_reason(self, reason: str) -> Choice:
        return replace(self, layout=replace(self.layout, reason=reason))


def choose(search: Search, request: LayoutRequest, place: str) -> Choice:
    """Choose the layout that is requested, or the best. `place`: where the run file sets it, for errors."""
    layouts, impossible = list_layouts(request, search.experts, search.kept_dtype)
    if not search.may_add_nodes:
        layouts = [(name, layout) for name, layout in layouts if layout.nodes <= request.nodes]
    contenders = search.compare(layouts, request.barred)
    if request.name == AUTO:
        best = choose_layout(contenders)
    else:
        best = choose_layout(search.compare(list_named_layouts(request, search.experts, search.kept_dtype)))
    if best is None:
        text = "no layout is possible"
        hint = "leave keys of `layout` out: no layout that the run can have agrees with them"
        if not search.shards:
            model = search.work.shape.base.family.causal_lm
            text = f"{model} can't be sharded: it reads weights that FSDP2 would not have gathered"
            hint = "set layout.name: resident"
        raise UserError(text, place, hint)
    choice = Choice(best.layout, best.cost.batch, best.cost.fits, contenders, impossible, best.tried)
    if request.name == AUTO:
        return choice
    reason = f"set by {request.where}"
    if best.layout.base_dtype != "bf16" and request.base_dtype is None:
        reason += f"; the plan keeps the base in {search.kept_dtype.upper()} as published"
    return choice.with_reason(reason)


# --- candidate layouts ------------------


def list_layouts(request: LayoutRequest, experts: int, kept: str = "") -> tuple[list[Named], dict[str, str]]:
    """Return every layout on the run's nodes, then sensible ones on a quarter to twice as many; and why others are
    impossible here.

    `experts`: routed experts per layer, 0 for a dense model. `kept`: the checkpoint's quantized dtype; each layout is
    then also listed with the base as published, unless the run sets its dtype.
    """
    # The run's keys apply to the layout that they name, but `offload: false` applies to all layouts.
    keys = FREE_KEYS if request.name == AUTO else ("offload",) if request.offload is False else ()
    free = replace(request, where="", barred={}, **dict.fromkeys(FREE_KEYS))  # type: ignore[arg-type]
    dtypes = _list_dtypes(free, kept)
    nodes, impossible = request.nodes, dict[str, str]()
    others = range(1, 2 * nodes + 1) if nodes <= 4 else (max(1, nodes // 4), nodes // 2, nodes * 3 // 2, nodes * 2)
    found = []
    for count in (nodes, *sorted(set(others) - {nodes})):
        for dtype in dtypes:
            suffix = IN_NAMES.get(dtype, "")
            suffix += "" if count == nodes else f", on {count} node{'s' * (count > 1)}"
            on_nodes = replace(free, nodes=count)
            for title, name, why_not, sizes in _list_variants(on_nodes, experts, wide=dtype == "bf16"):
                if why_not:
                    impossible.setdefault(title, why_not) if count == nodes else None
                    continue
                if count != nodes and (name == "no-reshard" or "offload" in sizes):
                    continue
                settings = replace(free, nodes=count, name=name, base_dtype=dtype, **sizes)  # type: ignore[arg-type]
                layout = replace(resolve_layout(settings, experts), reason="compared")
                found.append((title + suffix, layout))
                if name in MAY_GATHER_ONCE:
                    once = replace(layout, reshard_after_forward=False)
                    found.append((f"{title}, {GATHERED_ONCE}{suffix}", once))
    wanted = {key: getattr(request, key) for key in keys if getattr(request, key) is not None}
    return [row for row in found if all(getattr(row[1], key) == value for key, value in wanted.items())], impossible


def list_named_layouts(request: LayoutRequest, experts: int, kept: str = "") -> list[Named]:
    """Return the layout that a request names, once for each dtype that the base may be stored in."""
    layouts = [resolve_layout(replace(request, base_dtype=dtype), experts) for dtype in _list_dtypes(request, kept)]
    return [(request.name + IN_NAMES.get(layout.base_dtype, ""), layout) for layout in layouts]


def _list_dtypes(request: LayoutRequest, kept: str) -> list[str]:
    """Return the base's possible dtypes. An offloaded base stays in the compute dtype: host memory is large enough."""
    if request.base_dtype:
        return [request.base_dtype]
    return ["bf16", kept] if kept and not request.offload else ["bf16"]


def _list_variants(
    request: LayoutRequest, experts: int, *, wide: bool
) -> Iterator[tuple[str, str, str, Mapping[str, int | bool]]]:
    """Yield title, layout name, why not, and sizes of each variant, one per number of ranks to split experts over."""
    ranks, nodes, gpus = request.ranks, request.nodes, request.gpus_per_node
    alone = "one GPU: there is nothing to shard over" if ranks == 1 else ""
    yield "full-shard", "full-shard", alone, {}
    if wide:
        yield "full-shard, parameters offloaded", "full-shard", alone, {"offload": True}
    yield "no-reshard", "no-reshard", alone, {}
    no_hybrid = ""
    if nodes == 1:
        no_hybrid = "one node: there is nothing to replicate across, it would be full-shard"
    elif gpus == 1:
        no_hybrid = "one GPU per node: there is nothing to shard over inside a node, it would be resident"
    yield "hybrid", "hybrid", no_hybrid, {}
    splits = [size for size in list_divisors(ranks) if 1 < size <= experts]
    if not splits:
        yield "expert-parallel", "expert-parallel", why_not_expert_parallel(experts, ranks, ranks), {}
    for size in splits:
        why = why_not_expert_parallel(experts, size, ranks)
        yield f"expert-parallel {size}", "expert-parallel", why, {"expert_parallel": size}
    if nodes > 1 and gpus > 1 and not why_not_expert_parallel(experts, gpus, gpus):
        sizes = {"shard": gpus, "replicate": nodes, "expert_parallel": gpus}
        yield f"expert-parallel {gpus}, replicated across nodes", "expert-parallel", "", sizes
    yield "resident" if ranks > 1 else "one GPU", "resident", "", {}


# --- candidate micro-batches ------------------


def list_micro_batches(train: Train, accumulation: int, length: int) -> tuple[Batch, ...]:
    """Return the micro-batch that the run file sets, or every way to split an optimizer step, smallest first.

    `accumulation`: micro-batches of an optimizer step with the smallest micro-batch. Every rank makes the same choice,
    since it depends on the run file, the headers and the hardware table only, not on measurements.
    """
    if train.per_device_train_batch_size != "auto":
        return (Batch(train.per_device_train_batch_size, accumulation, length),)
    return tuple(Batch(size, accumulation // size, length) for size in list_divisors(accumulation))


def try_batches(work: Workload, layout: Layout, usual: int, batches: Sequence[Batch]) -> tuple[Cost, tuple[Cost, ...]]:
    """Return the fastest batch that leaves headroom, the larger of equals; if none does, the smallest. Also return all
    that were tried, up to the first without headroom: no later one would leave it."""
    tried: list[Cost] = []
    for batch in batches:
        tried.append(estimate_cost(replace(work, batch=batch, layout=layout), usual, advise=False))
        if not tried[-1].has_headroom:
            break
    fitting = [each for each in tried if each.has_headroom]
    fastest = min((each.step_seconds for each in fitting), default=0.0)
    equals = [each for each in fitting if each.step_seconds <= fastest * EQUAL]
    return equals[-1] if equals else tried[0], tuple(tried)


# --- the best layout ------------------


def compare_layouts(
    work: Workload, usual: int, layouts: Iterable[Named], batches: BatchesOf, barred: Mapping[str, str] | None = None
) -> tuple[Candidate, ...]:
    """Return every layout with its best micro-batch, best first. `usual`: the tokens of a usual row. `barred`: layouts
    that training cannot use on several ranks, and why.
    """
    found = []
    for name, layout in layouts:
        here, why_not = layout.nodes == work.layout.nodes, (barred or {}).get(layout.name, "") * (layout.ranks > 1)
        if here or not why_not:
            best, tried = try_batches(work, layout, usual, batches(layout.ranks))
            found.append(Candidate(name, layout, best, tried, here, why_not))

    def rank(c: Candidate) -> tuple[bool, bool, float]:
        """Return a sort key: possible and fitting first, then by GPU-hours per token: more nodes must pay off."""
        return bool(c.why_not), not c.cost.fits, c.layout.ranks / c.cost.tokens_per_second

    return tuple(sorted(found, key=rank))


def choose_layout(contenders: Sequence[Candidate]) -> Candidate | None:
    """Return the fastest contender that training can use on these nodes and that fits, with headroom if any has it; if
    none fits, the smallest; None if none is possible. Its layout's reason explains the choice."""
    able = [c for c in contenders if c.here and not c.why_not]
    if not able:
        return None
    fitting = [c for c in able if c.cost.has_headroom] or [c for c in able if c.cost.fits]
    if not fitting:
        best = min(able, key=lambda c: c.cost.gpu_gib)
        reason = f"none of {len(able)} layouts fits, and this one needs least, {best.cost.gpu_gib:.0f} GiB per GPU"
    else:
        fastest = min(c.seconds for c in fitting)
        equals = [c for c in fitting if c.seconds <= fastest * EQUAL]
        best = min(equals, key=lambda c: c.cost.step_seconds_serial)
        reason = (
            f"the only one of {len(able)} layouts that fits" if len(able) > 1 else "the only layout that is possible"
        )
        if others := sorted((c for c in fitting if c is not best), key=lambda c: c.seconds):
            margin, next_best = others[0].seconds / best.seconds, others[0]
            ahead = f"{margin:.2f} x faster than" if margin >= EQUAL else "as fast as"
            reason = (
                f"the fastest of the {len(fitting)} layouts that fit, {best.seconds:.3g} s a step: {ahead} the next"
            )
            reason += f", {next_best.name}"
        tight = [c for c in able if c.cost.fits and not c.cost.has_headroom and c.seconds < best.seconds]
        if tight and best.cost.has_headroom:
            reason += f"; {tight[0].name} would be faster, but leaves less than {HEADROOM:.0%} of the GPU free"
    layout = best.layout
    kept = f" with the base kept in {layout.base_dtype.upper()} as published"
    base = {"bf16": "", **dict.fromkeys(PUBLISHED, kept)}.get(
        layout.base_dtype, f" with the base in {layout.base_dtype.upper()}"
    )
    once = f", {GATHERED_ONCE} a step" * (layout.name in MAY_GATHER_ONCE and not layout.reshard_after_forward)
    return replace(best, layout=replace(layout, reason=f"chosen{base}{once}: {reason}"))


def is_same_layout(one: Layout, other: Layout) -> bool:
    """Return whether two layouts are equal, ignoring their reasons."""
    return replace(one, reason="") == replace(other, reason="")


def drop_dominated(contenders: Sequence[Candidate], planned: Layout) -> list[Candidate]:
    """Return the contenders worth showing, all of which `plan` accepts. On the run's own nodes, variants of a layout
    that another variant beats in both memory and time are dropped; other numbers of nodes keep only their best."""
    rows: list[Candidate] = []
    able = [c for c in contenders if not c.why_not]
    for c in able:
        if c.here:
            figures = c.cost.gpu_gib, c.seconds
            rivals = [(o.cost.gpu_gib, o.seconds) for o in able if o.here and o.layout.name == c.layout.name]
            beaten = any(o != figures and o[0] <= figures[0] and o[1] <= figures[1] for o in rivals)
            rows += [c] if is_same_layout(c.layout, planned) or not beaten else []
        elif c.layout.nodes not in {o.layout.nodes for o in rows if not o.here}:
            rows.append(c)
    return rows


def list_overrides(c: Candidate, loaded: Loaded, kept: str) -> list[str]:
    """Return the overrides with which `windlass plan RUN` takes this row. `kept`: the checkpoint's quantized dtype."""
    layout, train, cluster = c.layout, loaded.run.train, loaded.run.cluster
    keys: dict[str, object] = {}
    if layout.name == "expert-parallel":
        keys["expert_parallel"] = layout.expert_parallel
        keys |= {"shard": layout.shard, "replicate": layout.replicate} if layout.replicate > 1 else {}
    if layout.name in MAY_GATHER_ONCE and not layout.reshard_after_forward:
        keys["reshard_after_forward"] = "false"
    keys |= {"base_dtype": layout.base_dtype} if kept or layout.base_dtype in FOUR_BITS else {}
    keys |= {"offload": "true"} if layout.offload else {}
    keys |= {"activation_checkpointing": "true"} if loaded.run.layout.activation_checkpointing else {}
    # A name alone replaces the whole section.
    found = [f"layout={layout.name}", *(f"layout.{key}={value}" for key, value in keys.items())]
    sizes = ("nodes", layout.nodes), ("gpus_per_node", layout.gpus_per_node)  # an Accelerate file may set them too
    found += [f"cluster.{key}={size}" for key, size in sizes if size != getattr(cluster, key)]
    accumulation = c.cost.batch.micro * c.cost.batch.accumulation // train.least_batch
    if not c.here and train.global_batch_size is not None:
        found.append(f"train.global_batch_size={accumulation * train.least_batch * layout.ranks}")
    is_set = train.global_batch_size is None or loaded.is_set("train.gradient_accumulation_steps")
    if is_set and accumulation != train.gradient_accumulation_steps:
        found.append(f"train.gradient_accumulation_steps={accumulation}")
    return found
