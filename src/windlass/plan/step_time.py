"""Estimate the seconds of an optimizer step: traffic on each link, compute and copies on the GPU, dispatch on the host.

A micro-batch takes as long as the busiest of GPU, host and links, since the host can run ahead of the GPU; each
synchronization with the GPU adds a wait. On a CPU they all share one processor, so their times add up.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from windlass.hardware import Fabric, get_product_rate, interpolate
from windlass.plan.memory import FLOAT, adapter_share, base_bytes, gathered_bytes
from windlass.plan.workload import Layer, Lora, ModelShape, Workload
from windlass.settings import FUSED_INPUTS

SKEW = 1.03  # ranks wait for the slowest one, and collectives use some of the GPU's own units and memory
LOGIT_BYTES = 26  # per logit in the loss: written, read, in float32, exponentiated, its gradient written and read
OPTIMIZER_BYTES = 40  # per trained parameter: gradient, two moments and value, read and written, and its norm
GATHER_OPERATORS = 40  # to gather and free a layer: a few kernels, and FSDP2's Python; assumed
EXCHANGE_OPERATORS = 12  # per pass, to send tokens to experts and back: benchmarks/operators.py counts 24 in two
# Devices for which torch has no grouped product of all experts (GPUs before Hopper, and CPUs): the host reads back the
# rows of each expert every time and starts one product per expert.
ONE_BY_ONE = ("a10", "l4", "cpu")
# Python outside the layers, per micro-batch and per step: batch, mask, loss, optimizer, measuring; assumed.
MICRO_BATCH_OPERATORS, STEP_OPERATORS = 150, 600
# Exponent of the norm that replaces max(GPU, host): neither is ahead of the other all of the time.
AHEAD = 4
PHASES = ("forward", "backward")
# Extra seconds of the first step on a GPU: loading kernels, filling allocators, connecting communicators; assumed.
FIRST_STEP = 8.0


@dataclass(frozen=True, slots=True)
class Flow:
    """The bytes that one GPU sends, and the same number it receives, once per micro-batch or per optimizer step."""

    kind: str  # all-gather forward, all-gather backward, expert dispatch, adapter all-reduce, host transfer
    fabric: str
    bytes: float
    per_step: int  # times per optimizer step
    seconds: float  # of one transfer
    formula: str


@dataclass(frozen=True)
class Time:
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
    evaluation_seconds: float  # per sequence of a rank; 0: no evaluation


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


def estimate_time(work: Workload) -> Time:
    rates, accumulation, ranks = work.machine.rates, work.batch.accumulation, work.layout.ranks
    gathers, dispatch, reduces, transfers = (
        _gather_flows(work),
        _dispatch_flows(work),
        _reduce_flows(work),
        _offload_flows(work),
    )
    flops, recomputed = count_flops(work)
    forward, backward, outside = (
        _estimate_pass(work, "forward"),
        _estimate_pass(work, "backward"),
        _estimate_outside_layers(work),
    )
    passes = forward + backward + outside
    if work.layout.activation_checkpointing:
        passes += _estimate_pass(work, "forward", products=not work.keeps_products)
    memory = passes.memory + _weights_seconds(work)
    exchanged, gathered, transferred = (
        sum(f.seconds * f.per_step for f in flows) / accumulation for flows in (dispatch, gathers, transfers)
    )
    overlapped = _exchange_overlap(work, exchanged)
    waits = _count_syncs(work) * rates.sync_seconds
    once = sum(f.seconds for f in reduces) + _optimizer_seconds(work)
    # The expert exchange sits between two dependent products and overlaps only with shared experts; weights are sent
    # while earlier layers compute, except the first layer's.
    gpu = passes.compute + memory + exchanged - overlapped
    serial = gpu + overlapped + gathered + transferred + passes.host + waits
    longest = max(gpu + gathered / len(work.shape.layers), gathered, transferred)
    longest = (longest**AHEAD + passes.host**AHEAD) ** (1 / AHEAD) + waits
    within = {"compute": passes.compute, "memory": memory, "wire": exchanged}
    busiest = {"gpu": gpu, "wire": gathered, "host link": transferred, "host": passes.host}
    if work.on_cpu:  # gloo's collectives, copies and dispatch all run on the processor that computes
        longest, busiest = serial, {**busiest, **within, "wire": exchanged + gathered, "gpu": 0.0}
    bound = max(busiest, key=lambda name: busiest[name])
    skew = SKEW if ranks > 1 else 1.0
    step = (accumulation * longest + once) * skew
    tokens = work.batch.tokens * accumulation * ranks
    return Time(
        flows=tuple(flow for flow in (*gathers, *dispatch, *reduces, *transfers) if flow.bytes > 0),
        flops_per_token=flops,
        recompute_flops_per_token=recomputed,
        compute_seconds=passes.compute,
        memory_seconds=memory,
        wire_seconds=gathered + exchanged,
        transfer_seconds=transferred,
        host_seconds=passes.host,
        sync_seconds=waits,
        wire_gb_per_step=sum(f.bytes * f.per_step for f in (*gathers, *dispatch, *reduces)) / 1e9,
        step_seconds=step,
        step_seconds_low=step * rates.low,
        step_seconds_high=step * rates.high,
        step_seconds_serial=(accumulation * serial + once) * skew,
        tokens_per_second=tokens / step,
        tokens_per_second_low=tokens / step / rates.high,
        tokens_per_second_high=tokens / step / rates.low,
        mfu=flops * tokens / step / (work.machine.gpu.bf16_tflops * 1e12 * ranks),
        bound=max(within, key=lambda name: within[name]) if bound == "gpu" else bound,
        basis=rates.basis,
        load_seconds=_load_seconds(work),
        first_step_seconds=0.0 if work.on_cpu else FIRST_STEP,
        evaluation_seconds=_evaluation_seconds(work),
    )


# --- operations ------------------


def count_flops(work: Workload) -> tuple[float, float]:
    """Return the FLOPs per token of forward and backward, and those of recomputation.

    A frozen weight is multiplied in the forward and for the gradient of its input only: 4 FLOPs per active frozen
    parameter, 6 per active adapter parameter.
    """
    shape, adapter = work.shape, 0.0
    for layer, times in shape.kinds:
        adapter += times * sum(lora.parameters for lora in layer.plain_lora)
        adapter += times * sum(lora.parameters * shape.top_k / lora.experts for lora in layer.expert_lora)
    length = work.attention_length
    # Kernels skip the upper half of the square only if nothing else is masked.
    square = 2 if work.masked and length == work.batch.length else 1
    attention, back = (causal_attention_flops(shape, length, phase) * square for phase in PHASES)
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
    found = Passes()
    for layer, times in work.shape.kinds:
        found += _estimate_layer(work, layer, phase, products=products) * times
    return found


def _estimate_layer(work: Workload, layer: Layer, phase: str, *, products: bool) -> Passes:
    rates, shape, tokens, back = work.machine.rates, work.shape, work.batch.tokens, phase == "backward"
    compute, used = 0.0, 0.0
    for p in layer.parameters:
        if len(p.shape) == 2 and p.part != "experts":
            compute += _product_seconds(work, tokens, p.shape[1], p.shape[0])
    wide = work.layout.precision != "bf16" and shape.adapter.dtype_bytes > work.width
    for lora in layer.plain_lora:  # its backward also makes the gradients of A and B
        once = _product_seconds(work, tokens, lora.inputs, lora.r, wide=wide)
        once += _product_seconds(work, tokens, lora.outputs, lora.r, wide=wide)
        compute += once * (2 if back else 1)
    if layer.experts:
        # Each rank has some experts, and is sent the tokens of all ranks that route to them.
        own = layer.experts / work.layout.expert_parallel
        used = own * (1 - (1 - shape.top_k / layer.experts) ** (tokens * work.layout.expert_parallel))
        rows = tokens * shape.top_k / used
        for p in layer.parameters if products else ():
            if len(p.shape) == 3:
                compute += _product_seconds(work, rows, p.shape[2], p.shape[1], experts=used)
        for lora in layer.expert_lora if products else ():
            once = _product_seconds(work, rows, lora.inputs, lora.r, experts=used)
            once += _product_seconds(work, rows, lora.r, lora.outputs, experts=used)
            compute += once * (2 if back else 1)
    length = work.attention_length
    square = _attention_flops(layer, length) * tokens * (2 if work.masked else 1)
    head = layer.query / max(shape.heads, 1)
    if layer.traced:
        others = layer.traced.at(f"{phase}_products", length) / length * tokens
        rate = get_product_rate(rates, "bfloat16" if work.width == 2 else "float32", length, (head * length) ** 0.5)
        compute += others / rate / 1e12
    compute += square / interpolate(rates.attention_backward if back else rates.attention, length, head) / 1e12
    did = count_dispatch(shape, layer, phase, length, separate=work.separate, dora=work.dora)
    moved = did.bytes * work.width / 2  # counted in 16 bits
    memory = moved * tokens / rates.memory_gb_per_second / 1e9
    operators = did.operators + GATHER_OPERATORS * (work.layout.shard > 1)
    operators += EXCHANGE_OPERATORS * (work.layout.expert_parallel > 1 and layer.experts > 0)
    operators += _count_unfused_products(work, layer, phase) * layer.experts / work.layout.expert_parallel
    host = operators * rates.operator_seconds + did.modules * rates.module_seconds
    return Passes(compute, memory, host) + _adapter_options(work, layer, phase, wide=wide)


def _adapter_options(work: Workload, layer: Layer, phase: str, *, wide: bool) -> Passes:
    """Return the time that DoRA, dropout and float32 without autocast add to plain LoRA. DoRA builds each adapted
    weight and its norm in every forward."""
    tokens, compute, found = work.batch.tokens, 0.0, Passes()
    plain = [(lora, tokens) for lora in layer.plain_lora]
    every = [*plain, *((lora, tokens * work.shape.top_k) for lora in layer.expert_lora)]
    if wide:
        found += _linear_option(work, "float32", plain, phase)
    if work.dora:
        found += _linear_option(work, "dora" + ", dropout" * bool(work.dropout), every, phase)
    elif work.dropout:
        way = "separate" if work.separate else "fused"
        found += _linear_option(work, f"dropout, {way}", every, phase)
    for lora, rows in every if work.dora else ():
        if phase == "forward":  # an identity matrix through A and B
            compute += _product_seconds(work, lora.inputs, lora.inputs, lora.r)
            compute += _product_seconds(work, lora.inputs, lora.outputs, lora.r)
        if work.dropout:  # the frozen weight's product with the input after dropout
            compute += _product_seconds(work, rows, lora.inputs, lora.outputs)
    return found + Passes(compute)


def _linear_option(work: Workload, name: str, adapted: Sequence[tuple[Lora, int]], phase: str) -> Passes:
    """Return the time of an option for the adapted layers, each with its number of rows, from counts of one linear."""
    rates, row, moved = work.machine.rates, load_operators()["linear"][name][phase], 0.0
    for lora, rows in adapted:
        size = dict(zip(OF_LINEAR, linear_features(lora.inputs, lora.outputs, rows), strict=True))
        moved += sum(size[what] * value for what, value in row["bytes"].items())
    host = (row["operators"] + VIEW * row["views"]) * rates.operator_seconds + row["modules"] * rates.module_seconds
    return Passes(0.0, moved * work.width / 2 / rates.memory_gb_per_second / 1e9, host * len(adapted))


def _estimate_outside_layers(work: Workload) -> Passes:
    """Return the time of head and loss, forward and backward, and of a micro-batch's host work outside its layers."""
    rates, shape, tokens = work.machine.rates, work.shape, work.batch.tokens
    head = _product_seconds(work, tokens, shape.hidden, shape.vocab)
    logits = LOGIT_BYTES * tokens * shape.vocab / rates.memory_gb_per_second / 1e9
    return Passes(2 * head, logits, MICRO_BATCH_OPERATORS * rates.operator_seconds)


def _optimizer_seconds(work: Workload) -> float:
    """Return the seconds of the optimizer, once per step: every trained parameter, and the Python around it."""
    rates = work.machine.rates
    trained, _ = adapter_share(work)
    return OPTIMIZER_BYTES * trained / rates.memory_gb_per_second / 1e9 + STEP_OPERATORS * rates.operator_seconds


def _count_unfused_products(work: Workload, layer: Layer, phase: str) -> int:
    """Return the number of products that are computed one expert at a time."""
    if not layer.experts or not work.machine.gpu.name.startswith(ONE_BY_ONE):
        return 0
    return 2 + len(layer.expert_lora) * (4 if phase == "backward" else 2)  # gate with up, and down; A and B of each


def _count_syncs(work: Workload) -> float:
    """Count a micro-batch's synchronizations, where the host reads the number of tokens per rank or per expert."""
    total = 0.0
    for layer, times in work.shape.kinds:
        exchanged = work.layout.expert_parallel > 1 and layer.experts > 0  # recomputation already knows it
        apart = (work.expert_passes - 1) * _count_unfused_products(work, layer, "forward") + _count_unfused_products(
            work, layer, "backward"
        )
        total += times * (exchanged + apart)
    return total


def _weights_seconds(work: Workload) -> float:
    """Return the seconds to decode weights (4-bit ones at the rate of FP8) and to copy gathered ones."""
    layout, rates, shape, size = work.layout, work.machine.rates, work.shape, gathered_bytes(work)
    routed = shape.routed // layout.expert_parallel
    seconds = 0.0
    if layout.base_dtype != "bf16":  # GPUs also decode unused experts
        codes = work.passes * (shape.elements - shape.routed).narrow + work.expert_passes * routed.narrow
        seconds += codes / rates.decode_gb_per_second / 1e9
    if layout.shard > 1:  # written by the gather, then read and written by the copy out of the buffer
        gathers = 2 if layout.reshard_after_forward else 1 / work.batch.accumulation
        seconds += gathers * 3 * size.of(shape.elements - shape.routed + routed) / rates.memory_gb_per_second / 1e9
    return seconds


# --- around the steps ------------------


def _load_seconds(work: Workload) -> float:
    """Return the load time: each node reads its part of the files once, then each rank copies its part to the GPU."""
    rates, (mine, _) = work.machine.rates, base_bytes(work)
    narrow = work.shape.elements.narrow if work.shape.published else 0
    files = 2 * work.shape.elements.total - (1 if work.shape.published == "fp8" else 1.5) * narrow
    read = min(files, mine * work.layout.gpus_per_node) / rates.storage_gb_per_second
    return (read + (0.0 if work.on_cpu else mine / rates.host_link_gb_per_second)) / 1e9


def _evaluation_seconds(work: Workload) -> float:
    """Return the seconds of one sequence in an evaluation: its share of a batch's forward."""
    if not work.evaluated:
        return 0.0
    batch = replace(work, batch=replace(work.batch, micro=work.evaluated), dropout=0.0)
    passes = _estimate_pass(batch, "forward") + _estimate_outside_layers(batch) * 0.5
    gpu = passes.compute + passes.memory
    return (gpu + passes.host if work.on_cpu else max(gpu, passes.host)) / work.evaluated


# --- traffic ------------------


def _ring_seconds(
    work: Workload, kind: str, size: float, ranks: int, groups: int = 1, calls: int = 1
) -> tuple[Fabric, float, float]:
    """Return the slowest link of a ring over consecutive ranks, its rate, and its seconds for `size` bytes per GPU.

    A ring that spans nodes enters and leaves each node once, so all of `size` crosses the node's NICs for each of the
    `groups` concurrent rings; inside the node it runs over the GPUs' own links.
    """
    layout, machine = work.layout, work.machine
    near = machine.rates.collective(kind, "link", min(ranks, layout.gpus_per_node))
    inside = size / (near.gb_per_second * 1e9)
    if ranks <= layout.gpus_per_node:
        return machine.link, near.gb_per_second, inside + calls * near.latency_seconds
    far = machine.rates.collective(kind, "network", ranks)
    outside = groups * size / (far.gb_per_second * 1e9)
    if layout.gpus_per_node == 1 or outside >= inside:
        return machine.network, far.gb_per_second, outside + calls * far.latency_seconds
    return machine.link, near.gb_per_second, inside + calls * far.latency_seconds


def _gather_flows(work: Workload) -> list[Flow]:
    """Return the all-gathers of the sharded weights: in the forward, and again in the backward if resharded."""
    layout, shape, size = work.layout, work.shape, gathered_bytes(work)
    if layout.shard == 1:
        return []
    times = work.batch.accumulation if layout.reshard_after_forward else 1

    def flow(kind: str, size: float, ranks: int, what: str, outside: int = 0) -> Flow:
        rings = max(1, layout.gpus_per_node // layout.shard)
        fabric, rate, seconds = _ring_seconds(
            work, "all-gather", size, layout.shard, rings, len(shape.layers) + outside
        )
        words = f"{what}: {size / 1e9:.3g} GB in a ring of {ranks} ranks at {rate:g} GB/s"
        return Flow(kind, fabric.name, size, times, seconds, words)

    split = layout.expert_parallel > 1
    dense = sum(size.of((layer.dense if split else layer.elements) * count) for layer, count in shape.kinds)
    share = (layout.shard - 1) / layout.shard
    # Plus the embedding, and the group of final norm and head, which stays gathered for the backward.
    found = [flow("all-gather forward", (dense + size.of(shape.rest)) * share, layout.shard, "dense weights", 2)]
    if layout.reshard_after_forward:
        found.append(flow("all-gather backward", dense * share, layout.shard, "layers"))
    replicas = layout.shard // layout.expert_parallel
    if split and replicas > 1:
        own = size.of(shape.routed) / layout.expert_parallel * (replicas - 1) / replicas
        kinds = ("forward", "backward") if layout.reshard_after_forward else ("forward",)
        found += [flow(f"all-gather {kind}, experts", own, layout.shard, "own experts") for kind in kinds]
    return found


def _dispatch_flows(work: Workload) -> list[Flow]:
    """Return the traffic of tokens to their experts' rank and back, in forward, recomputation and backward."""
    layout, machine, shape, ranks = work.layout, work.machine, work.shape, work.layout.expert_parallel
    if ranks == 1:
        return []
    passes = work.expert_passes
    moe = sum(times for layer, times in shape.kinds if layer.expert)
    pairs = work.batch.tokens * shape.top_k * shape.hidden * work.width * 2 * passes * moe
    inside_ranks = min(ranks, layout.gpus_per_node)
    inside, outside = pairs * (inside_ranks - 1) / ranks, pairs * (ranks - inside_ranks) / ranks
    near, far = (machine.rates.collective("all-to-all", fabric, ranks) for fabric in ("link", "network"))
    seconds_inside = inside / (near.gb_per_second * 1e9)
    seconds_outside = outside * layout.gpus_per_node / (far.gb_per_second * 1e9)
    slow, latency = machine.network, far.latency_seconds
    if seconds_outside <= seconds_inside:
        slow, latency = machine.link, near.latency_seconds
    words = (
        f"{work.batch.tokens} x top {shape.top_k} x {shape.hidden} x {work.width} bytes x 2 ways x {passes} passes"
        f" x {moe} layers, {(ranks - 1) / ranks:.0%} of it to other ranks"
    )
    seconds = max(seconds_inside, seconds_outside) + 2 * passes * moe * latency
    return [Flow("expert dispatch", slow.name, inside + outside, work.batch.accumulation, seconds, words)]


def _exchange_overlap(work: Workload, seconds: float) -> float:
    """Return the seconds of the token exchange that overlap with shared experts (train/exchange.py): in each pass, one
    of its two directions, for as long as they compute."""
    layers = [(layer, times) for layer, times in work.shape.kinds if layer.experts]
    passes = work.expert_passes
    one_way, hidden = seconds / max(2 * passes * sum(times for _, times in layers), 1), 0.0
    for layer, times in layers if seconds else ():
        matrices = [p.shape for p in layer.parameters if p.part == "shared_experts" and len(p.shape) == 2]
        shared = sum(_product_seconds(work, work.batch.tokens, inputs, outputs) for outputs, inputs in matrices)
        hidden += passes * times * min(one_way, shared)
    return hidden


def _reduce_flows(work: Workload) -> list[Flow]:
    """Return the all-reduce of the adapter's gradients, one per optimizer step, in float32 for any adapter dtype.

    Adapters of experts that are split over ranks are reduced only among ranks with the same experts.
    """
    layout = work.layout
    if layout.ranks == 1:
        return []

    def flow(kind: str, count: int, ranks: int, groups: int) -> Flow:
        size = 2 * (ranks - 1) / ranks * count * FLOAT
        fabric, _, seconds = _ring_seconds(work, "all-reduce", size, layout.ranks, groups)
        return Flow(kind, fabric.name, size, 1, seconds, f"2 x ({ranks} - 1) / {ranks} x {count} parameters x {FLOAT}")

    mine, _ = adapter_share(work)
    split = layout.expert_parallel > 1
    own = work.shape.expert_adapter_parameters // layout.expert_parallel if split else 0
    found = [flow("adapter all-reduce", mine - own, layout.ranks, 1)]
    alike = layout.ranks // layout.expert_parallel
    if own and alike > 1:  # one concurrent ring per different set of experts on a node
        groups = min(layout.expert_parallel, layout.gpus_per_node)
        found.append(flow("adapter all-reduce, experts", own, alike, groups))
    return found


def _offload_flows(work: Workload) -> list[Flow]:
    """Return the host transfers of offloading: each gather first copies the rank's shard from the host."""
    if not work.layout.offload:
        return []
    base, words = base_bytes(work)
    times = 2 if work.layout.reshard_after_forward else 1
    seconds = times * base / (work.machine.rates.host_link_gb_per_second * 1e9)
    runs = work.batch.accumulation if work.layout.reshard_after_forward else 1
    name = work.machine.host_link.name
    return [Flow("host transfer", name, times * base, runs, seconds, f"{times} x {words}")]


# Host cost of a view, as a fraction of an operator that launches a kernel.
VIEW = 0.3

# Features that a layer's operator count is linear in; its bytes are linear in all features.
COUNTED = ("layer", "adapters", "inputs", "expert_adapters")
ADAPTED = ("adapted_in", "adapted_out", "adapted_r")
OF_ADAPTERS = ("adapters", "inputs", *ADAPTED)
OF_FUSED = ("inputs", "apart")  # no effect on layers that are not fused
OF_LINEAR = ("inputs", "outputs", "weight", "square", "rows", "columns")  # the bytes of options are linear in these


def layer_features(layer: Layer, hidden: int, top_k: int) -> dict[str, float]:
    """Return the features of one layer that its operators and bytes are linear in."""
    plain, stacks = layer.plain_lora, layer.expert_lora
    shared = apart = 0
    matrices = [p for p in layer.parameters if len(p.shape) == 2]
    for part in {p.part for p in matrices}:
        widths = {p.name.split(".")[-2]: p.shape[1] for p in matrices if p.part == part}
        adapted = {lora.leaf for lora in plain if lora.part == part}
        for names in FUSED_INPUTS:
            if adapted.issuperset(names):
                shared += len(names) - 1
            elif widths.keys() >= set(names):  # their input gradients are added one by one
                apart += (len(names) - 1) * widths[names[0]]
    return {
        "layer": 1.0,
        "adapters": float(len(plain)),
        "inputs": float(len(plain) - shared),
        "expert_adapters": float(len(stacks)),
        "hidden": hidden,
        "apart": apart,
        "norms": layer.norms,
        "query": layer.query,
        "key": layer.key,
        "attended": layer.attended,
        "mlp": layer.mlp,
        "routed_hidden": top_k * hidden * bool(layer.expert),
        "routed_width": top_k * layer.expert,
        "experts": layer.experts,
        "adapted_in": sum(lora.inputs for lora in plain),
        "adapted_out": sum(lora.outputs for lora in plain),
        "adapted_r": sum(lora.r for lora in plain),
        "routed_in": top_k * sum(lora.inputs for lora in stacks),
        "routed_out": top_k * sum(lora.outputs for lora in stacks),
    }


def linear_features(inputs: int, outputs: int, tokens: int) -> tuple[int, ...]:
    """Return the features of one adapted linear layer for a pass over `tokens` tokens, in the order of OF_LINEAR."""
    return tokens * inputs, tokens * outputs, inputs * outputs, inputs * inputs, outputs, inputs


@dataclass(frozen=True, slots=True)
class DispatchCounts:
    """The work of one pass through one layer."""

    operators: float  # including views, at their fraction of a launch
    modules: float
    bytes: float  # per token, read and written by operators other than matrix products


@cache
def load_operators() -> dict[str, Any]:
    return dict(json.loads(Path(__file__).with_name("operators.json").read_text()))


def count_dispatch(
    shape: ModelShape, layer: Layer, phase: str, length: int, *, separate: bool, dora: bool = False
) -> DispatchCounts:
    """Return the work of a forward or backward, with separate operators or fused as on GPUs (DoRA is never fused).

    A family without counts uses those of the most similar one.
    """
    if layer.traced:  # plus what the trace leaves out: adapters and routed experts
        rest = count_dispatch(shape, replace(layer, traced=None), phase, length, separate=separate, dora=dora)
        bare = replace(layer, traced=None, plain_lora=(), expert_lora=(), expert=0, experts=0)
        without = count_dispatch(shape, bare, phase, length, separate=separate)
        count = {what: layer.traced.at(f"{phase}_{what}", length) for what in ("operators", "views", "bytes")}
        operators = count["operators"] + VIEW * count["views"] + rest.operators - without.operators
        moved = count["bytes"] / length + rest.bytes - without.bytes
        return DispatchCounts(operators, rest.modules, moved)
    way, name = "separate" if separate else "fused", shape.base.family.model_type
    rows = load_operators()[way]
    if not layer.experts and f"{name}, dense" in rows:
        name = f"{name}, dense"
    name = name if name in rows else "mixtral" if layer.experts else "qwen3"
    row, of_adapters = rows[name][phase], load_operators()["separate" if dora else way][name][phase]
    size = layer_features(layer, shape.hidden, shape.top_k)

    def of(what: str, names: Collection[str] = size) -> float:
        every = row[what] | {name: of_adapters[what].get(name, 0.0) for name in OF_ADAPTERS}
        return float(sum(size[name] * value for name, value in every.items() if name in names))

    return DispatchCounts(of("operators") + VIEW * of("views"), of("modules"), of("bytes"))
