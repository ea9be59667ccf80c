"""Seconds of an optimizer step: what crosses each link, operations, and the roofline over both."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.hardware import Fabric
from windlass.plan.memory import FLOAT, adapter_share, base_bytes, gathered_bytes
from windlass.plan.work import Shape, Work

# Dense models keep matrix units busier than mixtures do: two fifths of the peak (torchtitan's published Llama runs).
DENSE_SHARE = 0.4


@dataclass(frozen=True, slots=True)
class Flow:
    """Bytes that one GPU sends (and as many it receives) once per micro-batch or once per optimizer step."""

    kind: str  # all-gather forward, all-gather backward, expert dispatch, adapter all-reduce, host transfer
    fabric: str
    bytes: float
    per_step: int  # how many times in one optimizer step
    seconds: float  # for one time
    formula: str


@dataclass(frozen=True)
class Time:
    """An optimizer step, estimated. Seconds per micro-batch, but for those named `step`."""

    flows: tuple[Flow, ...]
    flops_per_token: float  # model FLOPs: forward + backward, without recomputation
    recompute_flops_per_token: float
    compute_seconds: float
    wire_seconds: float
    host_seconds: float  # between host and GPU memory
    wire_gb_per_step: float  # per GPU
    step_seconds: float  # the best case: all that can overlap does
    step_seconds_serial: float  # nothing overlaps
    tokens_per_second: float  # of all ranks together
    mfu: float
    bound: str  # what the step waits for: compute, memory, wire or host


def estimate_time(work: Work) -> Time:
    shape, gpu, accumulation = work.shape, work.machine.gpu, work.batch.accumulation
    gathers, dispatch, reduces, transfers = _gathers(work), _dispatch(work), _reduces(work), _offload(work)
    flops, recomputed = count_flops(work)
    rate = (gpu.achieved_tflops / 2.8 if shape.routed.all else gpu.bf16_tflops * DENSE_SHARE) * 1e12
    compute = work.batch.tokens * (flops + recomputed) / rate
    reads, decoding, copies = _memory_seconds(work)
    wire = sum(f.seconds * f.per_step for f in (*gathers, *dispatch)) / accumulation
    host = sum(f.seconds * f.per_step for f in transfers) / accumulation
    once = sum(f.seconds for f in reduces)
    # Weights are read while others compute; decoding runs in between, on the same stream.
    busy = max(compute, reads) + decoding
    serial = busy + copies + wire + host
    longest = max(busy, reads + decoding + copies, wire, host)
    if work.on_cpu:  # gloo's collectives and the copies take the processor that computes
        longest = serial
    rates = {"compute": compute, "memory": reads + decoding + copies, "wire": wire, "host": host}
    step = accumulation * longest + once
    per_second = work.batch.tokens * accumulation * work.layout.ranks / step
    return Time(
        flows=tuple(flow for flow in (*gathers, *dispatch, *reduces, *transfers) if flow.bytes > 0),
        flops_per_token=flops,
        recompute_flops_per_token=recomputed,
        compute_seconds=compute,
        wire_seconds=wire,
        host_seconds=host,
        wire_gb_per_step=sum(f.bytes * f.per_step for f in (*gathers, *dispatch, *reduces)) / 1e9,
        step_seconds=step,
        step_seconds_serial=accumulation * serial + once,
        tokens_per_second=per_second,
        mfu=flops * per_second / (gpu.bf16_tflops * 1e12 * work.layout.ranks),
        bound=max(rates, key=lambda name: rates[name]),
    )


# --- operations ------------------


def count_flops(work: Work) -> tuple[float, float]:
    """Per token: forward and backward, and recomputed.

    A frozen weight is multiplied forward and for the gradient of its input only: 4 per active frozen parameter, 6 per
    active adapter parameter.
    """
    shape, adapter = work.shape, 0.0
    for layer, times in shape.kinds:
        adapter += times * sum(lora.parameters for lora in layer.plain_lora)
        adapter += times * sum(lora.parameters * shape.top_k / lora.experts for lora in layer.expert_lora)
    attention = causal_attention(shape, work.document or work.batch.length)
    if work.masked:  # kernels pass over the upper half of the square only if told that it is all there is to mask
        attention *= 2
    recomputed = 0.0 if work.full_logits else 2.0 * shape.head  # the fused head projects again in its backward
    if work.layout.activation_checkpointing:
        recomputed += 2 * (shape.active - shape.head) + 2 * adapter + attention
    return 4 * shape.active + 6 * adapter + 3 * attention, recomputed


def causal_attention(shape: Shape, length: int) -> float:
    """Of one forward, per token: scores and their product with the values, over the unmasked half of the square."""
    return float(sum(times * (layer.query + layer.attended) * length for layer, times in shape.kinds))


def _memory_seconds(work: Work) -> tuple[float, float, float]:
    """Seconds that weights take through the GPU's memory: read, decoded from FP8, and copied once gathered."""
    layout, gpu, shape, size = work.layout, work.machine.gpu, work.shape, gathered_bytes(work)
    passes, width = 3 if layout.activation_checkpointing else 2, max(size.most, 2)
    experts = shape.routed.all
    used = 1 - (1 - shape.top_k / max(shape.layers[-1].experts, 1)) ** work.batch.tokens if experts else 1.0
    routed = shape.routed // layout.expert_parallel
    dense = shape.all.all - experts - shape.embedding.all + (shape.head if shape.tied else 0)
    reads = passes * (dense + routed.all * used) * width
    decoding = copies = 0.0
    if layout.base_dtype == "fp8":  # codes read, values written, then scaled in place; on GPUs unused experts too
        decoded = (shape.all - shape.routed).fp8 + routed.fp8 * (used if work.on_cpu else 1.0)
        decoding = passes * decoded * (size.fp8 + 3 * width)
    if layout.shard > 1:  # written by the gather, read and written by the copy out of its buffer
        gathers = 2 if layout.reshard_after_forward else 1 / work.batch.accumulation
        copies = gathers * 3 * size.of(shape.all - shape.routed + routed)
    rate = gpu.memory_gb_per_second * 1e9
    return reads / rate, decoding / rate, copies / rate


# --- traffic ------------------


def _ring(work: Work, size: float, ranks: int, groups: int = 1) -> tuple[Fabric, float]:
    """The slowest link of a ring over consecutive ranks, and its seconds for `size` bytes per GPU.

    A ring that spans nodes enters and leaves each node once, so all of `size` crosses the node's NICs for each of the
    `groups` rings that run at the same time; inside the node it runs over the GPUs' own links.
    """
    layout, machine = work.layout, work.machine
    inside = size / (machine.link.gb_per_second * 1e9)
    if ranks <= layout.gpus_per_node:
        return machine.link, inside
    outside = groups * size / (machine.nics_per_node * machine.network.gb_per_second * 1e9)
    if layout.gpus_per_node == 1 or outside >= inside:
        return machine.network, outside
    return machine.link, inside


def _gathers(work: Work) -> list[Flow]:
    """All-gather of the sharded weights: forward, and once more for the backward if they were resharded."""
    layout, shape, size = work.layout, work.shape, gathered_bytes(work)
    if layout.shard == 1:
        return []
    times = work.batch.accumulation if layout.reshard_after_forward else 1

    def flow(kind: str, size: float, what: str) -> Flow:
        fabric, seconds = _ring(work, size, layout.shard, max(1, layout.gpus_per_node // layout.shard))
        words = f"{what}: {size / 1e9:.3g} GB in a ring of {layout.shard} ranks at {fabric.gb_per_second:g} GB/s"
        words += f" x {work.machine.nics_per_node} NICs" if fabric is work.machine.network else ""
        return Flow(kind, fabric.name, size, times, seconds, words)

    split = layout.expert_parallel > 1
    dense = sum(size.of((layer.dense if split else layer.all) * count) for layer, count in shape.kinds)
    share = (layout.shard - 1) / layout.shard
    found = [flow("all-gather forward", (dense + size.of(shape.rest)) * share, "dense weights")]
    if layout.reshard_after_forward:
        found.append(flow("all-gather backward", dense * share, "layers"))
    replicas = layout.shard // layout.expert_parallel
    if split and replicas > 1:
        own = size.of(shape.routed) / layout.expert_parallel * (replicas - 1) / replicas
        kinds = ("forward", "backward") if layout.reshard_after_forward else ("forward",)
        found += [flow(f"all-gather {kind}, experts", own, "own experts") for kind in kinds]
    return found


def _dispatch(work: Work) -> list[Flow]:
    """Tokens to their experts' rank and back, in the forward, in its recomputation, and in the backward."""
    layout, machine, shape, ranks = work.layout, work.machine, work.shape, work.layout.expert_parallel
    if ranks == 1:
        return []
    passes = 3 if layout.activation_checkpointing else 2
    moe = sum(times for layer, times in shape.kinds if layer.expert)
    pairs = work.batch.tokens * shape.top_k * shape.hidden * work.width * 2 * passes * moe
    inside_ranks = min(ranks, layout.gpus_per_node)
    inside, outside = pairs * (inside_ranks - 1) / ranks, pairs * (ranks - inside_ranks) / ranks
    seconds_inside = inside / (machine.link.gb_per_second * 1e9)
    seconds_outside = outside * layout.gpus_per_node / (machine.nics_per_node * machine.network.gb_per_second * 1e9)
    slow = machine.network if seconds_outside > seconds_inside else machine.link
    words = (
        f"{work.batch.tokens} x top {shape.top_k} x {shape.hidden} x {work.width} bytes x 2 ways x {passes} passes"
        f" x {moe} layers, {(ranks - 1) / ranks:.0%} of it to other ranks"
    )
    seconds = max(seconds_inside, seconds_outside)
    return [Flow("expert dispatch", slow.name, inside + outside, work.batch.accumulation, seconds, words)]


def _reduces(work: Work) -> list[Flow]:
    """One all-reduce of the adapter's gradients per optimizer step, in float32 whatever the adapter's dtype.

    Adapters of experts that are split over ranks are reduced among the ranks that have the same experts only.
    """
    layout = work.layout
    if layout.ranks == 1:
        return []

    def flow(kind: str, count: int, ranks: int, groups: int) -> Flow:
        size = 2 * (ranks - 1) / ranks * count * FLOAT
        fabric, seconds = _ring(work, size, layout.ranks, groups)
        return Flow(kind, fabric.name, size, 1, seconds, f"2 x ({ranks} - 1) / {ranks} x {count} parameters x {FLOAT}")

    mine, _ = adapter_share(work)
    split = layout.expert_parallel > 1
    own = work.shape.expert_adapter_parameters // layout.expert_parallel if split else 0
    found = [flow("adapter all-reduce", mine - own, layout.ranks, 1)]
    alike = layout.ranks // layout.expert_parallel
    if own and alike > 1:  # as many rings at the same time as there are different experts on a node
        groups = min(layout.expert_parallel, layout.gpus_per_node)
        found.append(flow("adapter all-reduce, experts", own, alike, groups))
    return found


def _offload(work: Work) -> list[Flow]:
    """Each gather first brings the rank's shard up from the host."""
    if not work.layout.offload:
        return []
    base, words = base_bytes(work)
    times = 2 if work.layout.reshard_after_forward else 1
    fabric = work.machine.host_link
    seconds = times * base / (fabric.gb_per_second * 1e9)
    runs = work.batch.accumulation if work.layout.reshard_after_forward else 1
    return [Flow("host transfer", fabric.name, times * base, runs, seconds, f"{times} x {words}")]
