"""All of it together: does it fit, what would make it fit, how long is a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from windlass.plan.cost import memory, shape, traffic
from windlass.plan.cost.flops import flops
from windlass.plan.cost.shape import Shape
from windlass.plan.cost.work import Cost, Flow, Work

GIB = memory.GIB
# Dense models keep matrix units busier than mixtures do: two fifths of the peak (torchtitan's published Llama runs).
DENSE_SHARE = 0.4
MOST_NODES = 64  # where the search for enough of them ends


@dataclass(frozen=True, slots=True)
class Seconds:
    """Per micro-batch, and what happens once per optimizer step."""

    compute: float
    reads: float  # weights out of the GPU's own memory, beside which compute can run
    decoding: float  # an FP8 base turned into 16 bits, in between what computes
    copies: float  # gathered weights written and read once more
    wire: float
    host: float
    once: float


def cost(work: Work, usual: int | None = None, *, advise: bool = True) -> Cost:
    """Memory, traffic and time of this run. Pure: the same work costs the same.

    Memory is counted as when every row is full, for some will be; with `usual`, traffic and time are those of rows
    of that many tokens. `advise`: where it does not fit, find out what would.
    """
    model = shape.read(work.base, work.adapter)
    table, peak = memory.rows(work, model)
    gpu_gib, host_gib = memory.total(table, "gpu") / GIB, memory.total(table, "host") / GIB
    fits = _fits(work, gpu_gib, host_gib)
    remedy = _remedy(work, gpu_gib, host_gib) if advise and not fits else ""
    if usual is not None:
        work = replace(work, batch=replace(work.batch, length=usual))
    moved = traffic.flows(work, model)
    operations = flops(work, model)
    seconds = _seconds(work, model, moved)
    step, serial = _step(work, seconds)
    tokens = work.batch.tokens * work.batch.accumulation * work.layout.ranks
    peak_flops = work.machine.gpu.bf16_tflops * 1e12 * work.layout.ranks
    wire = sum(f.bytes * f.per_step for f in moved if f.kind != "host transfer")
    return Cost(
        rows=table,
        flows=moved,
        gpu_gib=gpu_gib,
        host_gib=host_gib,
        fits=fits,
        remedy=remedy,
        flops_per_token=operations.model,
        recompute_flops_per_token=operations.again,
        compute_seconds=seconds.compute,
        step_seconds=step,
        step_seconds_serial=serial,
        tokens_per_second=tokens / step,
        mfu=operations.model * tokens / step / peak_flops,
        wire_gb_per_step=wire / 1e9,
        wire_seconds=seconds.wire,
        host_seconds=seconds.host,
        bound=_bound(seconds),
        peak=peak,
    )


def _seconds(work: Work, model: Shape, moved: tuple[Flow, ...]) -> Seconds:
    accumulation = work.batch.accumulation
    once = [f for f in moved if f.kind.startswith("adapter all-reduce")]
    wires = [f for f in moved if f.kind != "host transfer" and f not in once]
    operations = flops(work, model)
    gpu = work.machine.gpu
    rate = (gpu.achieved_tflops if model.experts else gpu.bf16_tflops * DENSE_SHARE) * 1e12
    compute = (work.batch.tokens * (operations.model + operations.again) + operations.fixed) / rate
    reads, decoding, copies = _memory(work, model)
    return Seconds(
        compute=compute,
        reads=reads,
        decoding=decoding,
        copies=copies,
        wire=sum(f.seconds * f.per_step for f in wires) / accumulation,
        host=sum(f.seconds * f.per_step for f in moved if f.kind == "host transfer") / accumulation,
        once=sum(f.seconds for f in once),
    )


def _memory(work: Work, model: Shape) -> tuple[float, float, float]:
    """Seconds that weights take through the GPU's memory: each pass reads those that its tokens need."""
    layout, machine, size = work.layout, work.machine, memory.gathered(work)
    passes, width = 3 if layout.activation_checkpointing else 2, max(size.size, 2)
    stay = 1 - (1 - model.top_k / max(model.layers[-1].experts, 1)) ** work.batch.tokens if model.experts else 1.0
    routed = model.routed // layout.expert_parallel
    dense = model.whole.all - model.experts - model.embedding.all + (model.head if model.tied else 0)
    reads = passes * (dense + routed.all * stay) * width
    decoding = copies = 0.0
    if layout.base_dtype == "fp8":  # codes read, values written, then scaled in place; on GPUs unused experts too
        used = stay if machine.gpu.name == "cpu" else 1.0
        decoding = passes * (model.whole.fp8 - model.routed.fp8 + routed.fp8 * used) * (size.fp8 + 3 * width)
    if layout.shard > 1:  # written by the gather, read and written by the copy out of its buffer
        gathers = 2 if layout.reshard_after_forward else 1 / work.batch.accumulation
        gathered = size.bytes(model.inside) - size.bytes(model.routed) + size.bytes(routed) + size.bytes(model.rest)
        copies = gathers * 3 * gathered
    rate = machine.gpu.memory_gb_per_second * 1e9
    return reads / rate, decoding / rate, copies / rate


def _step(work: Work, seconds: Seconds) -> tuple[float, float]:
    """The best case, where all that can overlaps does, and the worst, where nothing does."""
    busy = max(seconds.compute, seconds.reads) + seconds.decoding
    longest = max(busy, seconds.reads + seconds.decoding + seconds.copies, seconds.wire, seconds.host)
    serial = busy + seconds.copies + seconds.wire + seconds.host
    if work.machine.gpu.name == "cpu":  # gloo's collectives and the copies take the processor that computes
        longest = serial
    return work.batch.accumulation * longest + seconds.once, work.batch.accumulation * serial + seconds.once


def _bound(seconds: Seconds) -> str:
    rates = {
        "compute": seconds.compute,
        "memory": seconds.reads + seconds.decoding + seconds.copies,
        "wire": seconds.wire,
        "host": seconds.host,
    }
    return max(rates, key=lambda name: rates[name])


def _fits(work: Work, gpu_gib: float, host_gib: float) -> bool:
    machine = work.machine
    return gpu_gib <= machine.gpu.memory_gib and (
        machine.host_memory_gib is None or host_gib <= machine.host_memory_gib
    )


def _changes(work: Work) -> Iterator[tuple[str, Work]]:
    """What a user could change, mildest first."""
    layout, batch = work.layout, work.batch
    if work.evaluated > batch.micro:
        work = replace(work, evaluated=batch.micro)
        yield f"train.per_device_eval_batch_size: {batch.micro}", work
    checkpointed = replace(layout, activation_checkpointing=True)
    if not layout.activation_checkpointing:
        yield "train.gradient_checkpointing: true", replace(work, layout=checkpointed)
    if batch.micro > 1:
        smaller = replace(batch, micro=1, accumulation=batch.accumulation * batch.micro)
        work = replace(work, batch=smaller, evaluated=min(work.evaluated, 1))
        yield "train.per_device_train_batch_size: 1", replace(work, layout=checkpointed)
    work = replace(work, layout=checkpointed)
    if layout.shard == 1 and layout.ranks > 1:
        sharded = replace(checkpointed, name="full-shard", shard=layout.ranks, replicate=1, reshard_after_forward=True)
        yield "layout.name: full-shard", replace(work, layout=sharded)
    experts = work.base.dims.get("experts", 0)
    if experts and layout.expert_parallel == 1 and layout.ranks > 1 and experts % layout.ranks == 0:
        split = replace(checkpointed, name="expert-parallel", shard=layout.ranks, replicate=1)
        split = replace(split, expert_parallel=layout.ranks, reshard_after_forward=True, offload=False)
        yield "layout.name: expert-parallel", replace(work, layout=split)
    if not layout.reshard_after_forward and layout.shard > 1:
        name = "full-shard" if layout.name == "no-reshard" else layout.name
        resharded = replace(checkpointed, name=name, reshard_after_forward=True)
        yield "layout.reshard_after_forward: true", replace(work, layout=resharded)
    if layout.replicate > 1 and layout.shard > 1:
        flat = replace(checkpointed, name="full-shard", shard=layout.ranks, replicate=1, expert_parallel=1)
        yield "layout.name: full-shard over all ranks", replace(work, layout=flat)
    if layout.offload:
        yield "layout.offload: false", replace(work, layout=replace(checkpointed, offload=False))
    elif layout.shard > 1 and work.machine.gpu.name != "cpu":
        offloaded = replace(checkpointed, offload=True, base_dtype="bf16")
        yield "layout.offload: true", replace(work, layout=offloaded)


def _sizes(work: Work) -> tuple[float, float]:
    table, _ = memory.rows(work, shape.read(work.base, work.adapter))
    return memory.total(table, "gpu") / GIB, memory.total(table, "host") / GIB


def _remedy(work: Work, gpu_gib: float, host_gib: float) -> str:
    """The mildest change that fits; else how many GPUs would do; else what is left over."""
    have = work.machine.gpu.memory_gib
    room = work.machine.host_memory_gib
    short = f"{gpu_gib:.1f} GiB of {have:.1f} a GPU"
    if room is not None and host_gib > room and gpu_gib <= have:
        short = f"{host_gib:.1f} GiB of {room:.1f} a host"
    tried: list[str] = []
    for label, changed in _changes(work):
        gpu, host = _sizes(changed)
        tried.append(f"{label} ({gpu:.1f} GiB a GPU)")
        if _fits(changed, gpu, host):
            return (
                f"needs {short}: with {', '.join(t.partition(' (')[0] for t in tried)} it needs {gpu:.1f} GiB and fits"
            )
    nodes = _nodes(work)
    if nodes:
        count = nodes * work.layout.gpus_per_node
        return f"needs {short}: {nodes} nodes ({count} GPUs) fit, full-shard with checkpointing, one sequence at a time"
    enough = f"{'; '.join(tried)} do not suffice: " if tried else ""
    return f"needs {short}: {enough}no number of such nodes up to {MOST_NODES} holds it, take GPUs with more memory"


def _nodes(work: Work) -> int | None:
    """The fewest nodes of this kind on which the base fits when it is split over all of them."""
    per_node = work.layout.gpus_per_node
    for nodes in range(work.layout.nodes + 1, MOST_NODES + 1):
        layout = replace(
            work.layout,
            name="full-shard",
            nodes=nodes,
            shard=nodes * per_node,
            replicate=1,
            expert_parallel=1,
            reshard_after_forward=True,
            activation_checkpointing=True,
        )
        changed = replace(work, layout=layout, batch=replace(work.batch, micro=1), evaluated=min(work.evaluated, 1))
        if _fits(changed, *_sizes(changed)):
            return nodes
    return None
