"""The layouts and micro-batches that a run could have, which of them is best, and which keys would make it faster."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from windlass.plan.cost import Batch, Cost, Work, cost
from windlass.plan.layout import AUTO, Layout, LayoutRequest, resolve, why_not_expert_parallel
from windlass.runfile import RunFile, Train

# What a micro-batch or layout that the plan chooses leaves free of a GPU: the memory model was compared with torch's
# tracker to within as much.
HEADROOM = 0.05
# Layouts whose best cases are this close are equal; of those the one with least to hide behind computing is taken.
EQUAL = 1.02
MAY_GATHER_ONCE = ("hybrid", "expert-parallel")  # in each pass, or once for all micro-batches of a step
GATHERED_ONCE = "gathered once"
# Keys of `layout` that rule layouts out when they name none.
FREE_KEYS = ("shard", "replicate", "expert_parallel", "reshard_after_forward", "offload")
WORTH = 1.05  # below this a gain is within what the estimate can tell
LEAST_PRIME = 3  # next to smaller numbers a step would be quite another one

BatchesOf = Callable[[int], tuple[Batch, ...]]  # the ways to cut an optimizer step on so many ranks


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout to compare. `layout` is None if not even its costs can be computed."""

    title: str  # full-shard, parameters offloaded
    layout: Layout | None
    why_not: str = ""  # why training cannot run it; empty if it can
    here: bool = True  # on the nodes that the run has; False: what more or fewer of them would give

    @property
    def possible(self) -> bool:
        return not self.why_not


@dataclass(frozen=True, slots=True)
class Trial:
    """One way to cut the sequences that a GPU trains on in an optimizer step into micro-batches."""

    batch: Batch
    cost: Cost
    fits: bool  # with headroom, if there is a choice


@dataclass(frozen=True, slots=True)
class Contender:
    """A candidate with the micro-batch that suits it and what that would cost."""

    candidate: Candidate
    ranks: int
    batch: Batch
    cost: Cost | None  # None if not even its costs can be computed
    gpu_hours: float | None
    tried: tuple[Trial, ...] = ()
    roomy: bool = False  # it fits and leaves HEADROOM free

    @property
    def name(self) -> str:
        if self.candidate.here or not self.layout:
            return self.candidate.title
        return f"{self.candidate.title}, on {self.layout.nodes} node{'s' * (self.layout.nodes > 1)}"

    @property
    def layout(self) -> Layout | None:
        return self.candidate.layout

    @property
    def seconds(self) -> float:
        return self.cost.step_seconds if self.cost else math.inf


@dataclass(frozen=True, slots=True)
class Advice:
    """One change, or all of them together, and the useful tokens per second that it would give."""

    change: str  # data.packing: true
    tokens_per_second: float
    gain: float  # against the run as planned
    remark: str


# --- which layouts there are ------------------


def candidates(request: LayoutRequest, experts: int, fp8: bool = False) -> tuple[Candidate, ...]:
    """Every layout on the nodes of the run, then those that make sense on a quarter to twice as many.

    `experts`: routed experts per layer, 0 for a dense model. `fp8`: the checkpoint is published in FP8, so that each
    layout is listed with the base as published too, unless the run sets how it is stored.
    """
    free = replace(request, where="", barred={}, **dict.fromkeys(FREE_KEYS))  # type: ignore[arg-type]
    rows = [_bar(row, request) for row in _layouts_on(free, experts, fp8) if _is_as_set(row, request)]
    # Every number of nodes if they are few, else halves and steps of a half.
    nodes = request.nodes
    others = range(1, 2 * nodes + 1) if nodes <= 4 else (max(1, nodes // 4), nodes // 2, nodes * 3 // 2, nodes * 2)
    for count in sorted(set(others) - {nodes}):
        rows += [
            replace(row, here=False)
            for row in (_bar(row, request) for row in _layouts_on(replace(free, nodes=count), experts, fp8))
            if row.possible and row.layout and not row.layout.offload and row.layout.name != "no-reshard"
            if _is_as_set(row, request)
        ]
    return tuple(rows)


def named(request: LayoutRequest, experts: int, fp8: bool = False) -> tuple[Candidate, ...]:
    """The layout that a request names, in each dtype that the base may be stored in."""
    return tuple(
        Candidate(
            request.name + (", FP8" if dtype == "fp8" else ""), resolve(replace(request, base_dtype=dtype), experts)
        )
        for dtype in _dtypes(request, fp8)
    )


def _is_as_set(row: Candidate, request: LayoutRequest) -> bool:
    """Whether the run's keys allow a layout. If one is named they are about that one alone, except an offload that is
    ruled out: that holds for all."""
    keys = FREE_KEYS if request.name == AUTO else ("offload",) if request.offload is False else ()
    return row.layout is None or all(getattr(request, key) in (None, getattr(row.layout, key)) for key in keys)


def _bar(row: Candidate, request: LayoutRequest) -> Candidate:
    """With the reason why the rest of the run rules it out, if it does."""
    why = request.barred.get(row.layout.name, "") if row.layout and row.layout.ranks > 1 else ""
    return replace(row, why_not=row.why_not or why)


def _dtypes(request: LayoutRequest, fp8: bool) -> list[str]:
    """What is offloaded stays in the dtype of compute: host memory is large enough."""
    if request.base_dtype:
        return [request.base_dtype]
    return ["bf16", "fp8"] if fp8 and not request.offload else ["bf16"]


def _layouts_on(request: LayoutRequest, experts: int, fp8: bool) -> list[Candidate]:
    """Every layout on the request's nodes, in each dtype; those that are impossible in any dtype once."""
    impossible: dict[str, Candidate] = {}
    rows = []
    for dtype in _dtypes(request, fp8):
        suffix = ", FP8" if dtype == "fp8" else ""
        for title, name, why_not, sizes in _variants(request, experts, fp8=dtype == "fp8"):
            if why_not:
                impossible[title] = Candidate(title, None, why_not)
                continue
            settings = replace(request, name=name, base_dtype=dtype, **sizes)  # type: ignore[arg-type]
            layout = replace(resolve(settings, experts), reason="compared")
            rows.append(Candidate(title + suffix, layout))
            if name in MAY_GATHER_ONCE:
                once = replace(layout, reshard_after_forward=False)
                rows.append(Candidate(f"{title}, {GATHERED_ONCE}{suffix}", once))
    return rows + list(impossible.values())


def _variants(
    request: LayoutRequest, experts: int, *, fp8: bool
) -> Iterator[tuple[str, str, str, Mapping[str, int | bool]]]:
    """Title, layout name, why not, and the sizes that make it: one row per number of ranks to split experts over."""
    ranks, nodes, gpus = request.ranks, request.nodes, request.gpus_per_node
    alone = "one GPU: there is nothing to shard over" if ranks == 1 else ""
    yield "full-shard", "full-shard", alone, {}
    if not fp8:
        yield "full-shard, parameters offloaded", "full-shard", alone, {"offload": True}
    yield "no-reshard", "no-reshard", alone, {}
    no_hybrid = ""
    if nodes == 1:
        no_hybrid = "one node: there is nothing to replicate across, it would be full-shard"
    elif gpus == 1:
        no_hybrid = "one GPU per node: there is nothing to shard over inside a node, it would be resident"
    yield "hybrid", "hybrid", no_hybrid, {}
    splits = [size for size in range(2, ranks + 1) if ranks % size == 0] if experts else []
    if not splits:
        yield "expert-parallel", "expert-parallel", why_not_expert_parallel(experts, ranks, ranks), {}
    for size in splits:
        why = why_not_expert_parallel(experts, size, ranks)
        yield f"expert-parallel {size}", "expert-parallel", why, {"expert_parallel": size}
    if nodes > 1 and gpus > 1 and not why_not_expert_parallel(experts, gpus, gpus):
        sizes = {"shard": gpus, "replicate": nodes, "expert_parallel": gpus}
        yield f"expert-parallel {gpus}, replicated across nodes", "expert-parallel", "", sizes
    yield "resident" if ranks > 1 else "one GPU", "resident", "", {}


# --- which micro-batches there are ------------------


def micro_batches(train: Train, accumulation: int, length: int) -> tuple[Batch, ...]:
    """Smallest first: as the run file sets it, or every way to cut an optimizer step.

    `accumulation`: micro-batches of an optimizer step with the smallest micro-batch. Every rank makes the same choice:
    it follows from the run file, the headers and the hardware table, and nothing is measured for it.
    """
    if train.per_device_train_batch_size != "auto":
        return (Batch(train.per_device_train_batch_size, accumulation, length),)
    sizes = [size for size in range(1, accumulation + 1) if accumulation % size == 0]
    return tuple(Batch(size, accumulation // size, length) for size in sizes)


def try_batches(work: Work, layout: Layout, usual: int, batches: Sequence[Batch]) -> tuple[Trial, ...]:
    """Smallest micro-batch first, up to the first that does not fit: none after it would."""
    trials: list[Trial] = []
    limit = work.machine.gpu.memory_gib * (1 - HEADROOM if len(batches) > 1 else 1)
    for batch in batches:
        found = cost(replace(work, batch=batch).under(layout), usual, advise=False)
        trials.append(Trial(batch, found, found.fits and found.gpu_gib <= limit))
        if not trials[-1].fits:
            break
    return tuple(trials)


def pick_batch(trials: Sequence[Trial]) -> Trial:
    """The fastest that fits, the smaller of equals; if none does, the smallest."""
    fitting = [trial for trial in trials if trial.fits]
    return min(fitting, key=lambda trial: round(trial.cost.step_seconds, 9)) if fitting else trials[0]


# --- which is best ------------------


def compare(
    work: Work,
    usual: int,
    rows: Sequence[Candidate],
    batches: BatchesOf,
    gpu_hours: Callable[[Layout, Batch, Cost], float | None] = lambda *_: None,
) -> tuple[Contender, ...]:
    """Every candidate with its best micro-batch, best on top. `usual`: the tokens that most rows have.

    Other numbers of nodes whose ranks cannot share the configured global batch are left out: `plan` would refuse them.
    """
    made = []
    for row in rows:
        ways = batches(row.layout.ranks if row.layout else work.layout.ranks)
        if not ways:
            continue
        if row.layout is None:
            made.append(Contender(row, work.layout.ranks, ways[0], None, None))
            continue
        trials = try_batches(work, row.layout, usual, ways)
        best = pick_batch(trials)
        hours = gpu_hours(row.layout, best.batch, best.cost)
        roomy = best.cost.fits and best.cost.gpu_gib <= work.machine.gpu.memory_gib * (1 - HEADROOM)
        made.append(Contender(row, row.layout.ranks, best.batch, best.cost, hours, trials, roomy))

    def rank(c: Contender) -> tuple[bool, bool, bool, float]:
        """Possible and fitting first; then by GPU-hours a token, so that more nodes win only when they pay."""
        per_token = c.ranks / c.cost.tokens_per_second if c.cost else math.inf
        return c.cost is None, not c.candidate.possible, not (c.cost and c.cost.fits), per_token

    return tuple(sorted(made, key=rank))


def choose(contenders: Sequence[Contender]) -> Contender | None:
    """The fastest that training can run on these nodes and that fits, with headroom if any has it; if none fits, the
    smallest. Its layout's reason explains the choice. None if nothing is possible at all."""
    able = [c for c in contenders if c.candidate.possible and c.candidate.here and c.cost and c.layout]
    if not able:
        return None
    fitting = [c for c in able if c.roomy] or [c for c in able if c.cost and c.cost.fits]
    if not fitting:
        best = min(able, key=lambda c: c.cost.gpu_gib if c.cost else math.inf)
        need = best.cost.gpu_gib if best.cost else math.inf
        reason = f"none of {len(able)} layouts fits, and this one needs least, {need:.0f} GiB per GPU"
    else:
        fastest = min(c.seconds for c in fitting)
        equals = [c for c in fitting if c.seconds <= fastest * EQUAL]
        best = min(equals, key=lambda c: c.cost.step_seconds_serial if c.cost else math.inf)
        reason = _praise(best, fitting, len(able))
        tight = [c for c in able if c.cost and c.cost.fits and not c.roomy and c.seconds < best.seconds]
        if tight and best.roomy:
            reason += f"; {tight[0].name} would be faster, but leaves less than {HEADROOM:.0%} of the GPU free"
    layout = best.layout
    assert layout is not None  # `able` has no other
    base = " with the base kept in FP8 as published" * (layout.base_dtype == "fp8")
    once = f", {GATHERED_ONCE} a step" * (layout.name in MAY_GATHER_ONCE and not layout.reshard_after_forward)
    return replace(
        best, candidate=replace(best.candidate, layout=replace(layout, reason=f"chosen{base}{once}: {reason}"))
    )


def _praise(best: Contender, fitting: Sequence[Contender], able: int) -> str:
    if len(fitting) == 1:
        return f"the only one of {able} layouts that fits" if able > 1 else "the only layout that is possible"
    others = sorted((c for c in fitting if c is not best), key=lambda c: c.seconds)
    rivals = others[:1] + others[1:][-1:]  # the next and the slowest
    named_rivals = ", ".join(f"{rival.name} {rival.seconds:.3g} s" for rival in rivals)
    return f"the fastest of the {len(fitting)} layouts that fit, {best.seconds:.3g} s a step ({named_rivals})"


def same(one: Layout, other: Layout) -> bool:
    """Whatever the reason for either."""
    return replace(one, reason="") == replace(other, reason="")


def undominated(contenders: Sequence[Contender], planned: Layout) -> list[Contender]:
    """The rows worth showing, all of which `plan` accepts. Of a layout's variants on the run's own nodes, those that
    another of them beats in both memory and time are left out; of each other number of nodes, all but the best."""
    rows: list[Contender] = []
    able = [c for c in contenders if c.cost and c.layout and c.candidate.possible]
    for c in able:
        assert c.layout
        if c.candidate.here:
            rivals = (o for o in able if o.candidate.here and o.layout and o.layout.name == c.layout.name)
            if same(c.layout, planned) or not any(_beats(o, c) for o in rivals):
                rows.append(c)
        elif c.layout.nodes not in {o.layout.nodes for o in rows if o.layout and not o.candidate.here}:
            rows.append(c)
    return rows


def _beats(one: Contender, other: Contender) -> bool:
    assert one.cost
    assert other.cost
    mine, its = (one.cost.gpu_gib, one.seconds), (other.cost.gpu_gib, other.seconds)
    return mine != its and mine[0] <= its[0] and mine[1] <= its[1]


# --- what would make it faster ------------------


def advise(
    work: Work, usual: int, contenders: Sequence[Contender], run: RunFile, *, batch_is_set: bool, layout_is_set: bool
) -> tuple[Advice, ...]:
    """Each change alone, then all together, the best first."""
    sequences, full = work.batch.micro * work.batch.accumulation, work.batch.length
    ways = micro_batches(run.train.model_copy(update={"per_device_train_batch_size": "auto"}), sequences, full)
    here = [c.candidate for c in contenders if c.candidate.here and c.candidate.possible]
    now = try_batches(work, work.layout, usual, [work.batch])[0].cost.tokens_per_second
    found: list[tuple[str, Trial | Contender | None, str]] = []
    packed = work
    if not run.data.packing and usual < full:
        masked = run.model_copy(update={"data": run.data.model_copy(update={"packing": True})}).masked
        packed = replace(work, masked=masked, document=None if masked else usual)
        remark = f"a sequence then holds {full / usual:.1f} rows; a step trains on as many times the tokens"
        best = pick_batch(try_batches(packed, work.layout, full, [work.batch]))
        found.append(("data.packing: true", best, remark))
    if batch_is_set and len(ways) > 1:
        best = pick_batch(try_batches(work, work.layout, usual, ways))
        found.append(("train.per_device_train_batch_size: auto", best, f"micro-batches of {best.batch.micro}"))
    if not work.layout.activation_checkpointing:
        recomputed = replace(work.layout, activation_checkpointing=True)
        best = pick_batch(try_batches(work, recomputed, usual, [work.batch] if batch_is_set else ways))
        remark = f"{best.cost.gpu_gib:,.1f} GiB a GPU, micro-batches of {best.batch.micro}"
        found.append(("train.gradient_checkpointing: true", best, remark))
    if layout_is_set:
        other = choose([c for c in contenders if c.candidate.here])
        found.append(("layout: auto", other, f"takes {other.name}" if other else ""))
    several = len(found) > 1
    if not batch_is_set and len(ways) == 2 and work.batch.micro == 1 and ways[-1].micro > LEAST_PRIME:
        found.append(_advise_divisible(work, usual, run, ways[-1].micro))
    if several:
        found.append(_advise_all(packed, full, here, ways))
    made = []
    for change, way, remark in found:
        if way is not None and way.cost is not None and way.cost.fits and way.cost.tokens_per_second >= WORTH * now:
            made.append(Advice(change, way.cost.tokens_per_second, way.cost.tokens_per_second / now, remark))
    return tuple(sorted(made, key=lambda advice: -advice.gain))


def _advise_divisible(work: Work, usual: int, run: RunFile, prime: int) -> tuple[str, Trial, str]:
    """A prime number of sequences can't be cut into micro-batches of several: the better of the numbers next to it."""

    def token_seconds(trial: Trial) -> float:
        return 1 / trial.cost.tokens_per_second if trial.fits else math.inf

    cuts = [micro_batches(run.train, count, work.batch.length) for count in (prime - 1, prime + 1)]
    best = min((pick_batch(try_batches(work, work.layout, usual, cut)) for cut in cuts), key=token_seconds)
    count = best.batch.micro * best.batch.accumulation
    change = f"train.gradient_accumulation_steps: {count}"
    if run.train.global_batch_size:
        change = f"train.global_batch_size: {count * work.layout.ranks}"
    return change, best, f"micro-batches of {best.batch.micro}; {prime} divides into 1 or {prime} alone"


def _advise_all(
    work: Work, full: int, here: Sequence[Candidate], ways: tuple[Batch, ...]
) -> tuple[str, Contender | None, str]:
    """Every change at once, with and without checkpointing, under whichever layout is then the fastest."""
    both = [
        replace(c, layout=replace(c.layout, activation_checkpointing=recompute))
        for c in here
        if c.layout
        for recompute in (False, True)
    ]
    best = choose(compare(work, full, both, lambda _: ways))
    if best is None or best.layout is None:
        return "all of these", None, ""
    recompute = "checkpointing" if best.layout.activation_checkpointing else "no checkpointing"
    return "all of these", best, f"{best.name}, micro-batches of {best.batch.micro}, {recompute}"
