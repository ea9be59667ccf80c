"""Estimate the seconds of an optimizer step: traffic on each link, compute and copies on the GPU, dispatch on the host.

A micro-batch takes as long as the busiest of GPU, host and links; on a CPU, which they share, their times add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from windlass.hardware import SLOW_HOST, Fabric, get_product_rate, interpolate
from windlass.plan.memory import FLOAT, adapter_share, base_bytes, gathered_bytes, input_bytes, inputs_on_host
from windlass.plan.operators import OF_LINEAR, VIEW, count_dispatch, linear_features, load_operators
from windlass.plan.workload import AdaptedModule, Layer, ModelShape, Workload

INPUTS = ("layer inputs to host", "layer inputs from host")
KEYS = ("keys all-gather forward", "keys reduce-scatter")  # of split rows
SKEW = 1.03  # ranks wait for the slowest one, and collectives use some of the GPU's own units and memory
LOGIT_BYTES = 26  # per logit in the loss: written, read, in float32, exponentiated, its gradient written and read
UPDATE_BYTES = 40  # per trained parameter: gradient, two moments and value, read and written, and its norm
MASKED = 3.7  # times as long under a mask, which flash attention has no kernel for: measured on an H100
# GB/s of what is done to the rows of routed experts, wherever memory is faster: gathers, and products with weights in
# float32, that torch's kernels are not fast at. Measured with all of Mistral Small 4 on an H200 and an H100.
ROUTED_RATE = 1250.0
GATHER_OPERATORS = 40  # to gather and free a layer: a few kernels, and FSDP2's Python; assumed
DECODE_OPERATORS = 13  # per matrix on a CPU, which decodes with torch's own operators
EXCHANGE_OPERATORS = 12  # per pass, to send tokens to experts and back; counted in a training step
SPLIT_OPERATORS = 40  # per pass, to gather keys and values of split rows and attend by pieces; assumed
# Devices for which torch has no grouped product of all experts (GPUs before Hopper, and CPUs): the host reads back the
# rows of each expert every time and starts one product per expert.
ONE_BY_ONE = ("a10", "l4", "t4", "rtx-3090", "rtx-4090", "rtx-a6000", "cpu")  # beginnings of names
# Python outside the layers, per micro-batch and per step: batch, mask, loss, optimizer, measuring; assumed.
MICRO_BATCH_OPERATORS = 150
STEP_OPERATORS = 600
# Exponent of the norm that replaces max(GPU, host): neither is ahead of the other all of the time.
AHEAD = 4
# Extra seconds of the first step on a GPU: loading kernels, filling allocators, connecting communicators; assumed.
FIRST_STEP = 8.0
FLOAT32_ON_CPU = 1.5  # times as long as bfloat16, with instructions for it: measured on SmolLM2 135M


@dataclass(frozen=True, slots=True)
class Flow:
    """The bytes that one GPU sends, and the same number it receives, once per micro-batch or per optimizer step."""

    kind: str  # all-gather forward, all-gather backward, expert dispatch, adapter all-reduce, host transfer
    fabric: str
    bytes: float
    per_step: int  # times per optimizer step
    seconds: float  # of one transfer
    formula: str


@dataclass(frozen=True, slots=True)
class Traffic:
    gathers: tuple[Flow, ...]  # sharded weights
    dispatches: tuple[Flow, ...]  # tokens to their experts' ranks and back
    keys: tuple[Flow, ...]  # keys and values of split rows, and their gradients
    reductions: tuple[Flow, ...]  # gradients of the adapter
    transfers: tuple[Flow, ...]  # offloaded weights and layer inputs, between host and GPU

    @property
    def sent(self) -> tuple[Flow, ...]:
        return (*self.gathers, *self.dispatches, *self.keys, *self.reductions)


@dataclass(frozen=True)
class StepTime:
    """The estimated time of an optimizer step. Seconds are per micro-batch, except in fields named `step`."""

    flows: tuple[Flow, ...]
    flops_per_token: float  # model FLOPs: forward + backward, without recomputation
    recompute_flops_per_token: float
    compute_seconds: float  # matrix products and attention
    memory_seconds: float  # elementwise operators, dequantization, copies of gathered weights
    wire_seconds: float
    transfer_seconds: float  # between host and GPU memory
    host_seconds: float  # host dispatch of operators
    sync_seconds: float  # host waits for the GPU
    wire_gb_per_step: float  # per GPU
    step_seconds: float
    step_seconds_low: float  # the range of measured steps
    step_seconds_high: float
    step_seconds_serial: float  # without any overlap
    tokens_per_second: float  # all ranks together
    tokens_per_second_low: float
    tokens_per_second_high: float
    mfu: float
    bound: str  # the bottleneck: compute, memory, wire, host (dispatch) or host link
    basis: str  # the source of the rates
    load_seconds: float  # weights from storage to GPU
    first_step_seconds: float  # extra time of the first step
    evaluation_seconds: float  # per row of a rank; 0: no evaluation
    forward_seconds: float  # the same in batches as large as training's, as a reference is computed


@dataclass(frozen=True, slots=True)
class Passes:
    """The seconds of one micro-batch's forward, backward and recomputation on one GPU."""

    compute: float = 0.0
    memory: float = 0.0
    host: float = 0.0

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.compute + other.compute, self.memory + other.memory, self.host + other.host)

    def __mul__(self, times: float) -> Passes:
        return Passes(self.compute * times, self.memory * times, self.host * times)


def estimate_time(work: Workload) -> StepTime:
    rates = work.machine.rates
    accumulation = work.batch.accumulation
    ranks = work.layout.ranks
    traffic = estimate_traffic(work)
    flops, recomputed = count_flops(work)
    forward = _estimate_pass(work, "forward")
    passes = forward + _estimate_pass(work, "backward") + _estimate_outside_layers(work)
    if work.layout.activation_checkpointing:
        passes += _estimate_pass(work, "forward", products=not work.keeps_products)
    memory = passes.memory + _weights_seconds(work)
    exchanged = _sum_seconds(traffic.dispatches) / accumulation
    keys = _sum_seconds(traffic.keys) / accumulation
    gathered = _sum_seconds(traffic.gathers) / accumulation
    transferred = _sum_seconds(traffic.transfers) / accumulation
    overlapped = _exchange_overlap(work, exchanged)
    waits = _count_syncs(work) * rates.sync_seconds
    trained, _ = adapter_share(work)
    optimizer = UPDATE_BYTES * trained / rates.memory_gb_per_second / 1e9 + STEP_OPERATORS * rates.operator_seconds
    once = _sum_seconds(traffic.reductions) + optimizer
    # The expert exchange sits between two dependent products and overlaps only with shared experts, and attention waits
    # for keys; weights are sent while earlier layers compute, except the first layer's.
    gpu = passes.compute + memory + exchanged - overlapped + keys
    # Layer inputs leave during the forward; the backward, in which they come back, takes at least twice as long.
    leaving = sum(flow.seconds for flow in traffic.transfers if flow.kind == INPUTS[0])
    gpu += max(0.0, leaving - forward.compute - forward.memory)
    serial = gpu + overlapped + gathered + transferred + passes.host + waits
    if work.on_cpu:  # gloo's collectives, copies and dispatch all run on the processor that computes
        longest = serial
        parts = {"wire": exchanged + keys + gathered, "host link": transferred, "host": passes.host}
        bound = _find_largest(parts | {"compute": passes.compute, "memory": memory})
    else:
        device = max(gpu + gathered / len(work.shape.layers), gathered, transferred)
        longest = _run_ahead(device, passes.host) + waits
        bound = _find_largest({"gpu": gpu, "wire": gathered, "host link": transferred, "host": passes.host})
        if bound == "gpu":
            bound = _find_largest({"compute": passes.compute, "memory": memory, "wire": exchanged + keys})
    skew = SKEW if ranks > 1 else 1.0
    step = (accumulation * longest + once) * skew
    high = step * rates.high
    if not work.on_cpu and work.machine.measured is None:
        high = max(high, (accumulation * (_run_ahead(device, passes.host * SLOW_HOST) + waits) + once) * skew)
    tokens = work.batch.tokens * accumulation * work.layout.readers
    sheet = work.machine.gpu
    widening = 1.0  # how much longer an evaluation takes in float32, if it computes in it: by the peaks of products
    if work.of_narrow_pairs:
        peak = sheet.fp32_tflops or sheet.bf16_tflops / 16
        widening = FLOAT32_ON_CPU if work.on_cpu else sheet.bf16_tflops / peak
    return StepTime(
        flows=tuple(flow for flow in (*traffic.sent, *traffic.transfers) if flow.bytes > 0),
        flops_per_token=flops,
        recompute_flops_per_token=recomputed,
        compute_seconds=passes.compute,
        memory_seconds=memory,
        wire_seconds=gathered + exchanged + keys,
        transfer_seconds=transferred,
        host_seconds=passes.host,
        sync_seconds=waits,
        wire_gb_per_step=sum(flow.bytes * flow.per_step for flow in traffic.sent) / 1e9,
        step_seconds=step,
        step_seconds_low=step * rates.low,
        step_seconds_high=high,
        step_seconds_serial=(accumulation * serial + once) * skew,
        tokens_per_second=tokens / step,
        tokens_per_second_low=tokens / high,
        tokens_per_second_high=tokens / step / rates.low,
        mfu=flops * tokens / step / (work.machine.gpu.bf16_tflops * 1e12 * ranks),
        bound=bound,
        basis=rates.basis,
        load_seconds=_load_seconds(work),
        first_step_seconds=0.0 if work.on_cpu else FIRST_STEP,
        evaluation_seconds=_forward_seconds(work, work.evaluated, widening),
        forward_seconds=_forward_seconds(work, work.batch.micro),
    )


def _run_ahead(device: float, host: float) -> float:
    """Return how long a device and the host that runs ahead of it take together."""
    return float((device**AHEAD + host**AHEAD) ** (1 / AHEAD))


def _sum_seconds(flows: Iterable[Flow]) -> float:
    """Return the seconds of an optimizer step that these flows take."""
    return sum(flow.seconds * flow.per_step for flow in flows)


def _find_largest(seconds: Mapping[str, float]) -> str:
    return max(seconds, key=lambda name: seconds[name])


def count_flops(work: Workload) -> tuple[float, float]:
    """Return the FLOPs per token of forward and backward, and those of recomputation. A frozen weight is multiplied in
    the forward and for the gradient of its input only: 4 FLOPs per active frozen parameter, 6 per active adapter
    parameter."""
    shape = work.shape
    adapter = 0.0
    for layer, times in shape.kinds:
        adapter += times * sum(lora.parameters for lora in layer.plain_lora)
        adapter += times * sum(lora.parameters * shape.top_k / lora.experts for lora in layer.expert_lora)
    length = work.attention_length
    # Kernels skip the upper half of the square only if nothing else is masked.
    square = 2 if work.has_mask and length == work.batch.length else 1
    attention = causal_attention_flops(shape, length) * square
    back = causal_attention_flops(shape, length, "backward") * square
    recomputed = 2.0 * shape.head  # the fused head projects again in its backward
    if work.layout.activation_checkpointing:
        recomputed += 2 * (shape.active - shape.head) + 2 * adapter + attention
    return 4 * shape.active + 6 * adapter + attention + back, recomputed


def causal_attention_flops(shape: ModelShape, length: int, phase: str = "forward") -> float:
    """Return the FLOPs per token of attention in one forward or backward: scores and their product with the values,
    over the unmasked half of the square; for layers without a formula also all other products between tokens."""
    total = 0.0
    for layer, times in shape.kinds:
        products = layer.traced.at(f"{phase}_products", length) / length if layer.traced else 0.0
        total += times * (_attention_flops(layer, length) * (2 if phase == "backward" else 1) + products)
    return total


def _attention_flops(layer: Layer, length: int) -> float:
    """Return the FLOPs per token of one layer's attention in the forward."""
    if layer.traced:
        return layer.traced.at("attention", length) / length
    return float((layer.query + layer.attended) * length)


def _product_seconds(
    work: Workload, rows: float, inputs: float, outputs: float, *, experts: float = 0, wide: bool = False
) -> float:
    """Return the seconds of one matrix product, or of a grouped product of all experts with `rows` rows each."""
    dtype = "bfloat16" if work.width == 2 and not wide else "float32"
    kind = "grouped" if experts else dtype
    rate = get_product_rate(work.machine.rates, kind, max(rows, 1e-3), (inputs * outputs) ** 0.5)
    return 2 * max(experts, 1) * rows * inputs * outputs / rate / 1e12


def _estimate_pass(work: Workload, phase: str, *, products: bool = True) -> Passes:
    """Return the time of all layers' forward or backward. `products`: include those of the routed experts."""
    layers = (_estimate_layer(work, layer, phase, products=products) * times for layer, times in work.shape.kinds)
    return sum(layers, Passes())


def _estimate_layer(work: Workload, layer: Layer, phase: str, *, products: bool) -> Passes:
    rates = work.machine.rates
    shape = work.shape
    tokens = work.tokens
    back = phase == "backward"
    adapter_passes = 2 if back else 1  # its backward also makes the gradients of A and B
    compute = 0.0
    for p in layer.parameters:
        if len(p.shape) == 2 and p.part != "experts":
            compute += _product_seconds(work, tokens, p.shape[1], p.shape[0])
    wide = work.layout.precision != "bf16" and shape.adapter.dtype_bytes > work.width
    for lora in layer.plain_lora:
        seconds = _product_seconds(work, tokens, lora.inputs, lora.r, wide=wide)
        seconds += _product_seconds(work, tokens, lora.outputs, lora.r, wide=wide)
        compute += seconds * adapter_passes
    if layer.experts and products:
        # Each rank has some experts, and is sent the tokens of all ranks that route to them.
        experts = layer.experts / work.layout.expert_parallel
        used = experts * (1 - (1 - shape.top_k / layer.experts) ** (tokens * work.layout.expert_parallel))
        rows = tokens * shape.top_k / used
        for p in layer.parameters:
            if len(p.shape) == 3:
                compute += _product_seconds(work, rows, p.shape[2], p.shape[1], experts=used)
        for lora in layer.expert_lora:
            seconds = _product_seconds(work, rows, lora.inputs, lora.r, experts=used)
            seconds += _product_seconds(work, rows, lora.r, lora.outputs, experts=used)
            compute += seconds * adapter_passes
    length = work.attention_length
    square = _attention_flops(layer, length) * tokens * (2 if work.has_mask else 1)
    head = layer.query / max(shape.heads, 1)
    if layer.traced:
        others = layer.traced.at(f"{phase}_products", length) / length * tokens
        rate = get_product_rate(rates, "bfloat16" if work.width == 2 else "float32", length, (head * length) ** 0.5)
        compute += others / rate / 1e12
    attended = square / interpolate(rates.attention_backward if back else rates.attention, length, head) / 1e12
    compute += attended * (MASKED if work.has_mask and not work.on_cpu else 1)
    dispatched = count_dispatch(shape, layer, phase, length, separate=work.separate, dora=work.dora)
    moved = dispatched.bytes * work.width / 2  # counted in 16 bits
    memory = moved * tokens / rates.memory_gb_per_second / 1e9
    if not work.on_cpu and rates.memory_gb_per_second > ROUTED_RATE:
        slower = 1 / ROUTED_RATE - 1 / rates.memory_gb_per_second
        memory += dispatched.routed * work.width / 2 * tokens * slower / 1e9
    operators = dispatched.operators
    if work.layout.shard > 1:
        operators += GATHER_OPERATORS
    if work.layout.expert_parallel > 1 and layer.experts > 0:
        operators += EXCHANGE_OPERATORS
    if work.layout.context_parallel > 1:
        operators += SPLIT_OPERATORS
    operators += _count_unfused_products(work, layer, phase) * layer.experts / work.layout.expert_parallel
    if work.on_cpu and work.layout.base_dtype != "bf16":
        for p in layer.parameters:
            if p.name in shape.narrow:
                matrices = layer.experts / work.layout.expert_parallel if len(p.shape) == 3 else 1
                operators += DECODE_OPERATORS * matrices
    host = operators * rates.operator_seconds + dispatched.modules * rates.module_seconds
    return Passes(compute, memory, host) + _adapter_options(work, layer, phase, wide=wide)


def _adapter_options(work: Workload, layer: Layer, phase: str, *, wide: bool) -> Passes:
    """Return the time that DoRA, dropout and float32 without autocast add to plain LoRA. DoRA builds each adapted
    weight and its norm in every forward."""
    tokens = work.tokens
    plain = [(lora, tokens) for lora in layer.plain_lora]
    adapted = [*plain, *((lora, tokens * work.shape.top_k) for lora in layer.expert_lora)]
    total = Passes()
    if wide:
        total += _linear_option(work, "float32", plain, phase)
    if not work.dora:
        if work.dropout:
            total += _linear_option(work, "dropout, separate" if work.separate else "dropout, fused", adapted, phase)
        return total
    total += _linear_option(work, "dora, dropout" if work.dropout else "dora", adapted, phase)
    compute = 0.0
    for lora, rows in adapted:
        if phase == "forward":  # an identity matrix through A and B
            compute += _product_seconds(work, lora.inputs, lora.inputs, lora.r)
            compute += _product_seconds(work, lora.inputs, lora.outputs, lora.r)
        if work.dropout:  # the frozen weight's product with the input after dropout
            compute += _product_seconds(work, rows, lora.inputs, lora.outputs)
    return total + Passes(compute)


def _linear_option(work: Workload, name: str, adapted: Sequence[tuple[AdaptedModule, int]], phase: str) -> Passes:
    """Return the time of an option for the adapted layers, each with its number of rows, from counts of one linear."""
    rates = work.machine.rates
    counts = load_operators()["linear"][name][phase]
    moved = 0.0
    for lora, rows in adapted:
        features = dict(zip(OF_LINEAR, linear_features(lora.inputs, lora.outputs, rows), strict=True))
        moved += sum(features[feature] * value for feature, value in counts["bytes"].items())
    operators = counts["operators"] + VIEW * counts["views"]
    host = operators * rates.operator_seconds + counts["modules"] * rates.module_seconds
    return Passes(0.0, moved * work.width / 2 / rates.memory_gb_per_second / 1e9, host * len(adapted))


def _estimate_outside_layers(work: Workload) -> Passes:
    """Return the time of head and loss, forward and backward, and of a micro-batch's host work outside its layers."""
    rates = work.machine.rates
    shape = work.shape
    tokens = work.tokens
    head = _product_seconds(work, tokens, shape.hidden, shape.vocab)
    logits = LOGIT_BYTES * tokens * shape.vocab / rates.memory_gb_per_second / 1e9
    return Passes(2 * head, logits, MICRO_BATCH_OPERATORS * rates.operator_seconds)


def _count_unfused_products(work: Workload, layer: Layer, phase: str) -> int:
    """Return the number of products that are computed one expert at a time."""
    if not layer.experts or not work.machine.gpu.name.startswith(ONE_BY_ONE):
        return 0
    return 2 + len(layer.expert_lora) * (4 if phase == "backward" else 2)  # gate with up, and down; A and B of each


def _count_syncs(work: Workload) -> int:
    """Count a micro-batch's synchronizations, where the host reads the number of tokens per rank or per expert."""
    total = 0
    for layer, times in work.shape.kinds:
        syncs = (work.expert_passes - 1) * _count_unfused_products(work, layer, "forward")
        syncs += _count_unfused_products(work, layer, "backward")
        if work.layout.expert_parallel > 1 and layer.experts > 0:  # recomputation already knows it
            syncs += 1
        total += times * syncs
    return total


def _weights_seconds(work: Workload) -> float:
    """Return the seconds to decode weights (4-bit ones at the rate of FP8) and to copy gathered ones."""
    layout = work.layout
    rates = work.machine.rates
    shape = work.shape
    width = gathered_bytes(work)
    routed = shape.routed // layout.expert_parallel
    seconds = 0.0
    if layout.base_dtype != "bf16":  # GPUs also decode unused experts
        codes = work.passes * (shape.elements - shape.routed).narrow + work.expert_passes * routed.narrow
        seconds += codes / rates.decode_gb_per_second / 1e9
    if layout.shard > 1:  # written by the gather, then read and written by the copy out of the buffer
        gathers = 2 if layout.reshard_after_forward else 1 / work.batch.accumulation
        seconds += gathers * 3 * width.of(shape.elements - shape.routed + routed) / rates.memory_gb_per_second / 1e9
    return seconds


def _exchange_overlap(work: Workload, seconds: float) -> float:
    """Return the seconds of the token exchange that overlap with shared experts (train/experts/exchange.py): in each
    pass, one of its two directions, for as long as they compute."""
    layers = [(layer, times) for layer, times in work.shape.kinds if layer.experts]
    if not seconds or not layers:
        return 0.0
    passes = work.expert_passes
    one_way = seconds / (2 * passes * sum(times for _, times in layers))
    hidden = 0.0
    for layer, times in layers:
        matrices = [p.shape for p in layer.parameters if p.part == "shared_experts" and len(p.shape) == 2]
        shared = sum(_product_seconds(work, work.tokens, inputs, outputs) for outputs, inputs in matrices)
        hidden += passes * times * min(one_way, shared)
    return hidden


def _load_seconds(work: Workload) -> float:
    """Return the load time: each node reads its part of the files once, then each rank copies its part to the GPU."""
    rates = work.machine.rates
    elements = work.shape.elements
    size, _ = base_bytes(work)
    files = 2.0 * elements.total
    if work.shape.published:
        files -= (1 if work.shape.published == "fp8" else 1.5) * elements.narrow
    read = min(files, size * work.layout.gpus_per_node) / rates.storage_gb_per_second
    copied = 0.0 if work.on_cpu else size / rates.host_link_gb_per_second
    return (read + copied) / 1e9


def _forward_seconds(work: Workload, micro: int, longer: float = 1.0) -> float:
    """Return the seconds of one row in a forward without gradient: its share of a batch of `micro` rows, whose products
    take so many times as long."""
    if not micro:
        return 0.0
    batch = replace(work, batch=replace(work.batch, micro=micro), dropout=0.0)
    passes = _estimate_pass(batch, "forward") + _estimate_outside_layers(batch) * 0.5
    gpu = (passes.compute + passes.memory) * longer
    traffic = estimate_traffic(batch)
    gpu += sum(flow.seconds for flow in traffic.keys if "forward" in flow.kind)
    sent = 0.0
    if work.layout.reshard_after_forward:  # else the first batch's weights stay gathered for the others
        sent = sum(flow.seconds for flow in traffic.gathers if "forward" in flow.kind)
    seconds = gpu + passes.host + sent if work.on_cpu else max(gpu, passes.host, sent)
    return seconds / micro


def estimate_traffic(work: Workload) -> Traffic:
    return Traffic(
        gathers=tuple(_list_gathers(work)),
        dispatches=tuple(_list_dispatches(work)),
        keys=tuple(_list_keys(work)),
        reductions=tuple(_list_reductions(work)),
        transfers=tuple(_list_transfers(work)),
    )


def _ring_seconds(
    work: Workload, kind: str, size: float, ranks: int, groups: int = 1, calls: int = 1
) -> tuple[Fabric, float, float]:
    """Return the slowest link of a ring over consecutive ranks, its rate, and its seconds for `size` bytes per GPU. A
    ring that spans nodes enters and leaves each node once, so all of `size` crosses the node's NICs for each of the
    `groups` concurrent rings; inside the node it runs over the GPUs' own links."""
    layout = work.layout
    machine = work.machine
    near = machine.rates.collective(kind, "link", min(ranks, layout.gpus_per_node))
    inside = size / (near.gb_per_second * 1e9)
    if layout.gpus_per_node % min(ranks, layout.gpus_per_node) == 0 and ranks <= layout.gpus_per_node:
        return machine.link, near.gb_per_second, inside + calls * near.latency_seconds
    far = machine.rates.collective(kind, "network", ranks)
    outside = groups * size / (far.gb_per_second * 1e9)
    if layout.gpus_per_node == 1 or outside >= inside:
        return machine.network, far.gb_per_second, outside + calls * far.latency_seconds
    return machine.link, near.gb_per_second, inside + calls * far.latency_seconds


def _list_gathers(work: Workload) -> Iterator[Flow]:
    """Yield the all-gathers of the sharded weights: in the forward, and again in the backward if resharded."""
    layout = work.layout
    shape = work.shape
    width = gathered_bytes(work)
    if layout.shard == 1:
        return
    times = work.batch.accumulation if layout.reshard_after_forward else 1
    rings = max(1, layout.gpus_per_node // layout.shard)

    def gather(kind: str, size: float, weights: str, outside: int = 0) -> Flow:
        calls = len(shape.layers) + outside
        fabric, rate, seconds = _ring_seconds(work, "all-gather", size, layout.shard, rings, calls)
        formula = f"{weights}: {size / 1e9:.3g} GB in a ring of {layout.shard} ranks at {rate:g} GB/s"
        return Flow(kind, fabric.name, size, times, seconds, formula)

    split = layout.expert_parallel > 1
    dense = sum(width.of((layer.dense if split else layer.elements) * count) for layer, count in shape.kinds)
    share = (layout.shard - 1) / layout.shard
    # Plus the embedding, and the group of final norm and head, which stays gathered for the backward.
    yield gather("all-gather forward", (dense + width.of(shape.rest)) * share, "dense weights", 2)
    if layout.reshard_after_forward:
        yield gather("all-gather backward", dense * share, "layers")
    replicas = layout.shard // layout.expert_parallel
    if split and replicas > 1:
        experts = width.of(shape.routed) / layout.expert_parallel * (replicas - 1) / replicas
        yield gather("all-gather forward, experts", experts, "own experts")
        if layout.reshard_after_forward:
            yield gather("all-gather backward, experts", experts, "own experts")


def _list_dispatches(work: Workload) -> Iterator[Flow]:
    """Yield the traffic of tokens to their experts' rank and back, in forward, recomputation and backward."""
    layout = work.layout
    machine = work.machine
    shape = work.shape
    ranks = layout.expert_parallel
    if ranks == 1:
        return
    passes = work.expert_passes
    layers = sum(times for layer, times in shape.kinds if layer.expert)
    size = work.tokens * shape.top_k * shape.hidden * work.width * 2 * passes * layers
    ranks_inside = min(ranks, layout.gpus_per_node)
    inside = size * (ranks_inside - 1) / ranks
    outside = size * (ranks - ranks_inside) / ranks
    near = machine.rates.collective("all-to-all", "link", ranks)
    far = machine.rates.collective("all-to-all", "network", ranks)
    seconds_inside = inside / (near.gb_per_second * 1e9)
    seconds_outside = outside * layout.gpus_per_node / (far.gb_per_second * 1e9)
    slowest = machine.network
    latency = far.latency_seconds
    if seconds_outside <= seconds_inside:
        slowest = machine.link
        latency = near.latency_seconds
    formula = (
        f"{work.tokens} x top {shape.top_k} x {shape.hidden} x {work.width} bytes x 2 ways x {passes} passes"
        f" x {layers} layers, {(ranks - 1) / ranks:.0%} of it to other ranks"
    )
    seconds = max(seconds_inside, seconds_outside) + 2 * passes * layers * latency
    yield Flow("expert dispatch", slowest.name, inside + outside, work.batch.accumulation, seconds, formula)


def _list_keys(work: Workload) -> Iterator[Flow]:
    """Yield the all-gathers of keys and values over a group that splits rows, in each layer's forward and when it is
    recomputed, and the reduce-scatters of their gradients."""
    layout = work.layout
    split = layout.context_parallel
    if split == 1:
        return
    gathered = sum(times * layer.gathered for layer, times in work.shape.kinds)
    size = (split - 1) * work.tokens * gathered * work.width
    layers = len(work.shape.layers)
    formula = f"({split} - 1) x {work.tokens} tokens x {gathered} values of {layers} layers x {work.width} bytes"
    forwards = 1 + bool(layout.activation_checkpointing)
    for kind, times in zip(KEYS, (forwards, 1), strict=True):
        fabric, _, seconds = _ring_seconds(work, "all-gather", size, split, calls=layers)
        yield Flow(kind, fabric.name, size, times * work.batch.accumulation, seconds, formula)


def _list_reductions(work: Workload) -> Iterator[Flow]:
    """Yield the all-reduce of the adapter's gradients, one per optimizer step, in float32 for any adapter dtype.
    Adapters of experts that are split over ranks are reduced only among ranks with the same experts."""
    layout = work.layout
    if layout.ranks == 1:
        return

    def reduce(kind: str, count: int, ranks: int, groups: int) -> Flow:
        size = 2 * (ranks - 1) / ranks * count * FLOAT
        fabric, _, seconds = _ring_seconds(work, "all-reduce", size, layout.ranks, groups)
        return Flow(kind, fabric.name, size, 1, seconds, f"2 x ({ranks} - 1) / {ranks} x {count} parameters x {FLOAT}")

    trained, _ = adapter_share(work)
    experts = 0
    if layout.expert_parallel > 1:
        experts = work.shape.expert_adapter_parameters // layout.expert_parallel
    yield reduce("adapter all-reduce", trained - experts, layout.ranks, 1)
    alike = layout.ranks // layout.expert_parallel
    if experts and alike > 1:  # one concurrent ring per different set of experts on a node
        groups = min(layout.expert_parallel, layout.gpus_per_node)
        yield reduce("adapter all-reduce, experts", experts, alike, groups)


def _list_transfers(work: Workload) -> Iterator[Flow]:
    """Yield the host transfers of offloading: each gather first copies the rank's shard from the host; inputs of
    recomputed layers go there in the forward, and come back in the backward."""
    layout = work.layout
    rate = work.machine.rates.host_link_gb_per_second
    if inputs_on_host(work):
        size = float(len(work.shape.layers) * input_bytes(work))
        words = f"inputs of {len(work.shape.layers)} layers: {work.tokens} x {work.shape.hidden} x {work.width}"
        for kind in INPUTS:
            yield Flow(kind, work.machine.host_link.name, size, work.batch.accumulation, size / (rate * 1e9), words)
    if not layout.offload:
        return
    base, formula = base_bytes(work)
    times = 2 if layout.reshard_after_forward else 1
    runs = work.batch.accumulation if layout.reshard_after_forward else 1
    seconds = times * base / (rate * 1e9)
    yield Flow("host transfer", work.machine.host_link.name, times * base, runs, seconds, f"{times} x {formula}")
