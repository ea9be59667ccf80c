"""Closed forms of sharding, traffic and time for Mistral Small 4's published sizes."""

import importlib
import itertools
import math
import sys
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear

from windlass import model as weights
from windlass.data.packing import group_by_length
from windlass.hardware import GPUS, Machine, find_fabric, find_gpu, interpolate
from windlass.model import Base, Parameter
from windlass.model.family import FAMILIES, Family
from windlass.model.targets import Adapter, Target
from windlass.plan import memory, operators
from windlass.plan.cost import BatchSize, Cost, Workload, estimate_cost, read_shape
from windlass.plan.layout import Layout
from windlass.plan.memory import dequantized_bytes
from windlass.plan.rows import RowLengths
from windlass.plan.workload import AdaptedModule, ModelShape

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
dispatched: Any = importlib.import_module("dispatched")

GIB = 2**30
TOTAL = 118_972_826_624
EXPERTS = 36 * 128 * 3 * 2048 * 4096
PLAIN, ALL = 27_463_680, 1_084_428_288  # trained parameters of r = 16, without and with the routed experts


def mistral4() -> Base:
    """Every parameter of Mistral Small 4 with its published shape."""
    hidden, vocab, heads, latent_q, latent_kv, width, experts = 4096, 131072, 32, 1024, 256, 2048, 128
    parameters = [
        Parameter("model.embed_tokens.weight", (vocab, hidden), "embedding"),
        Parameter("model.norm.weight", (hidden,), "norm"),
        Parameter("lm_head.weight", (vocab, hidden), "head"),
    ]
    layer = {
        "self_attn.q_a_proj": ((latent_q, hidden), "attention"),
        "self_attn.q_b_proj": ((heads * 128, latent_q), "attention"),
        "self_attn.kv_a_proj_with_mqa": ((latent_kv + 64, hidden), "attention"),
        "self_attn.kv_b_proj": ((heads * 192, latent_kv), "attention"),
        "self_attn.o_proj": ((hidden, heads * 128), "attention"),
        "self_attn.q_a_layernorm": ((latent_q,), "norm"),
        "self_attn.kv_a_layernorm": ((latent_kv,), "norm"),
        "input_layernorm": ((hidden,), "norm"),
        "post_attention_layernorm": ((hidden,), "norm"),
        "mlp.gate": ((experts, hidden), "router"),
        "mlp.shared_experts.gate_proj": ((width, hidden), "shared_experts"),
        "mlp.shared_experts.up_proj": ((width, hidden), "shared_experts"),
        "mlp.shared_experts.down_proj": ((hidden, width), "shared_experts"),
    }
    stacks = {"gate_up_proj": (experts, 2 * width, hidden), "down_proj": (experts, hidden, width)}
    for i in range(36):
        parameters += [Parameter(f"model.layers.{i}.{name}.weight", *rest) for name, rest in layer.items()]
        parameters += [Parameter(f"model.layers.{i}.mlp.experts.{n}", shape, "experts") for n, shape in stacks.items()]
    family = Family("mistral4", "Mistral4ForCausalLM", "Mistral4DecoderLayer")
    dims, fp8 = {"heads": 32, "top_k": 4, "experts": 128}, {"quant_method": "fp8", "weight_block_size": None}
    return Base("Mistral Small 4", None, family, {}, dims, tuple(parameters), quantization=fp8)


BASE = mistral4()
PUBLISHED = weights.find_published_base("Mistral-Small-4-119B-2603") or BASE


def lora(r: int = 16, experts: bool = False) -> Adapter:
    """Adapt all attention projections and the shared expert, and the routed experts if requested."""
    plain = [p for p in BASE.parameters if p.part in ("attention", "shared_experts")]
    stacks = [p for p in BASE.parameters if p.part == "experts" and experts]
    trainable = sum(r * sum(p.shape) for p in plain) + sum(r * p.shape[0] * sum(p.shape[1:]) for p in stacks)
    modules = tuple(p.name.removesuffix(".weight") for p in plain)
    return Adapter(r, 32, (), modules, tuple(p.name for p in stacks), trainable, 4)


@cache
def shape(experts: bool = False) -> ModelShape:
    return read_shape(BASE, lora(experts=experts))


def machine(name: str = "h200", nics: int = 1, host: float | None = 1000.0) -> Machine:
    """A machine with one rate for all products, without host time or latency."""
    card = find_gpu(name)
    found = Machine(
        card, find_fabric(card.link), find_fabric("infiniband-400"), find_fabric(card.host_link), nics, host
    )
    sheet, flat = found.rates, ((1e-9, 1.0, 250.0),)
    ideal = replace(sheet, products={"bfloat16": flat, "float32": flat}, grouped=flat, attention=flat)
    ideal = replace(ideal, memory_gb_per_second=1e9, operator_seconds=0.0, module_seconds=0.0, sync_seconds=0.0)
    reached = tuple(replace(one, latency_seconds=0.0) for one in sheet.collectives)
    return replace(found, measured=replace(ideal, collectives=reached))


def real(given: Workload, **rates: Any) -> Workload:
    """A machine by data sheets, but for these rates."""
    bare = replace(given.machine, measured=None)
    return replace(given, machine=replace(bare, measured=replace(bare.rates, **rates)))


def work(nodes: int, gpus: int, micro: int = 1, accumulation: int = 16, nics: int = 1, **layout: Any) -> Workload:
    model, batch = shape(layout.pop("experts", False)), BatchSize(micro, accumulation, 1024)
    settings = {"name": "full-shard", "reason": "", "shard": nodes * gpus, "activation_checkpointing": True, **layout}
    placed = Layout(nodes=nodes, gpus_per_node=gpus, **settings)
    return Workload(model, placed, batch, machine(nics=nics), "adamw_torch", 2)


def test_keys_of_a_full_row_are_received_by_each_rank_of_its_group() -> None:
    layer = shape().layers[0]
    needed = []
    for split in (2, 4):
        batch = BatchSize(1, 1, 1024 * split)  # as many tokens a rank
        found = replace(work(1, 4, context_parallel=split), batch=batch)
        needed.append(memory._attention_bytes(layer, memory.Tokens.of(found)))
    assert needed[1] - needed[0] == 2 * layer.gathered * 2


def test_keys_copied_for_attention_sinks_grow_with_the_square_of_the_row() -> None:
    """Of gpt_oss: 64 heads share 8 of keys and values, each 64 wide."""
    sinks = Parameter("model.layers.0.self_attn.sinks", (64,), "attention")
    kept = {}
    for parameters in ((sinks,), ()):
        layer = replace(shape().layers[0], parameters=parameters, query=4096, key=512, gathered=1024)
        model = replace(shape(), layers=(layer,), kinds=((layer, 1),), heads=64)
        for length in (16384, 32768):
            split = replace(work(1, 4, context_parallel=4), shape=model, batch=BatchSize(1, 1, length))
            kept[len(parameters), length] = memory.layer_bytes(layer, memory.Tokens.of(split)) / GIB
    assert kept[1, 16384] - kept[0, 16384] == pytest.approx(2.63, rel=0.01)
    assert kept[1, 32768] - kept[0, 32768] == pytest.approx(4 * 2.63, rel=0.01)


class Separate(Workload):
    @property
    def separate(self) -> bool:
        return True


def unchecked(given: Workload) -> Workload:
    return replace(given, layout=replace(given.layout, activation_checkpointing=False))


def item(answer: Cost, name: str, phase: str = "step", place: str = "gpu") -> float:
    return sum(row.bytes for row in answer.rows if (row.item, row.phase, row.place) == (name, phase, place))


def flow(answer: Cost, kind: str) -> float:
    return sum(f.bytes for f in answer.flows if f.kind == kind)


# --- memory ------------------


def test_base_memory_is_divided_by_shards() -> None:
    assert (lora().trainable, lora(experts=True).trainable) == (PLAIN, ALL)
    assert item(estimate_cost(work(1, 1, shard=1)), "base weights") == 2 * TOTAL
    for ranks in (2, 4, 8):
        assert item(estimate_cost(work(1, ranks)), "base weights") == 2 * TOTAL / ranks
    third = item(estimate_cost(work(3, 1)), "base weights")
    assert third == pytest.approx(79.3e9, rel=0.01)
    assert 2 * TOTAL / 3 < third < 2 * TOTAL / 3 * (43 * 3 / 128)  # 43 experts of 128 on the fullest rank


def test_fp8_base_takes_one_byte_per_fp8_weight() -> None:
    wide = TOTAL - sum(p.count for p in BASE.parameters if p.part in ("attention", "shared_experts", "experts"))
    given = work(1, 1, shard=1, base_dtype="fp8")
    assert item(estimate_cost(given), "base weights") == TOTAL + wide
    assert wide == pytest.approx(1.09e9, rel=0.01)  # embedding, head, routers, norms stay as they are
    blocks = replace(BASE, quantization={"quant_method": "fp8", "weight_block_size": [128, 128]})
    scales = item(estimate_cost(replace(given, shape=read_shape(blocks, lora()))), "base weights")
    assert scales - TOTAL - wide == pytest.approx(4 * (TOTAL - wide) / 128**2)
    assert (
        item(estimate_cost(replace(given, shape=read_shape(replace(BASE, quantization=None), lora()))), "base weights")
        == 2 * TOTAL
    )


def test_adapter_gradients_and_optimizer() -> None:
    answer = estimate_cost(work(3, 1))
    assert item(answer, "adapter") == item(answer, "adapter gradients") == 4 * PLAIN
    assert item(answer, "optimizer") == 8 * PLAIN
    assert item(estimate_cost(replace(work(3, 1), optim="sgd")), "optimizer") == 0
    states = memory.find_optimizer_states
    assert states("adamw_torch_fused") == states("adamw_torch") == states("something_new")
    assert states("paged_adamw_8bit")[1] == pytest.approx(2.03)


def test_adapters_of_experts_are_on_every_rank_unless_the_experts_are_split() -> None:
    split = work(2, 1, experts=True, expert_parallel=2)
    assert item(estimate_cost(work(2, 1, experts=True)), "adapter") == 4 * ALL
    assert item(estimate_cost(split), "adapter") == 4 * (PLAIN + (ALL - PLAIN) // 2)
    # Experts may have a rank of their own.
    experts = lora(experts=True)
    stacks = Target("lora.experts", (), "experts", experts.target_parameters, (ALL - PLAIN) // 4, r=4)
    quarter = replace(experts, targets=(stacks,), trainable=PLAIN + (ALL - PLAIN) // 4)
    assert item(estimate_cost(replace(split, shape=read_shape(BASE, quarter))), "adapter") == 4 * (
        PLAIN + (ALL - PLAIN) // 8
    )
    # Rank 0 writes all of them: parameters, two moments, and the moments once more as the file made of them.
    answer = estimate_cost(work(1, 8, shard=8, expert_parallel=8, experts=True))
    assert item(answer, "adapter being written", "save", "host") == (4 + 8 + 8) * ALL


def test_offload_moves_the_base_to_the_host() -> None:
    answer = estimate_cost(work(3, 1, offload=True))
    assert item(answer, "base weights") == 0
    pinned = item(answer, "offloaded base weights", place="host")
    parts = (2 * math.ceil(p.shape[0] / 3) * math.prod(p.shape[1:]) for p in BASE.parameters)
    assert pinned == sum(2 ** math.ceil(math.log2(part)) for part in parts)
    assert pinned > 1.4 * 79.3e9  # a third of a layer's experts is 1.44 GB, and takes 2 GiB


def test_split_experts_are_pinned_by_the_rank_that_has_them() -> None:
    split = estimate_cost(work(2, 2, offload=True, expert_parallel=2, name="expert-parallel"))
    parts = []
    for parameter in BASE.parameters:
        rows = math.ceil(parameter.shape[0] / 4)  # of experts: half of them, in two parts
        parts.append(2 * rows * math.prod(parameter.shape[1:]))
    pinned = 2 * sum(2 ** math.ceil(math.log2(part)) for part in parts)  # two ranks on a host
    assert item(split, "offloaded base weights", place="host") == pinned


def test_a_rank_dequantizes_its_own_experts_only() -> None:
    assert dequantized_bytes((8, 512, 256), 2, 2) == 4 * 512 * 256 * 2


def test_experts_that_are_split_and_sharded_are_copied_twice() -> None:
    """FSDP2 copies them out of its buffer while it fills the next layer's; unsharded ones are copied once."""
    sharded = estimate_cost(work(1, 8, 8, expert_parallel=4, name="expert-parallel"))
    whole = estimate_cost(work(2, 4, 8, expert_parallel=4, shard=4, replicate=2, name="expert-parallel"))
    own = 128 // 4 * 3 * 2048 * 4096 * 2
    assert item(sharded, "gathered layers") - item(whole, "gathered layers") == own


def test_adapters_of_experts_keep_their_low_rank_rows_and_each_tokens_state() -> None:
    rows = unchecked(work(1, 8, expert_parallel=8, name="expert-parallel"))
    with_experts = replace(rows, shape=shape(experts=True))
    kept = item(estimate_cost(with_experts), "activations") - item(estimate_cost(rows), "activations")
    low_rank = 2 * 4 * 16  # gate_up and down, for each of a token's experts
    assert kept == pytest.approx(36 * 1024 * 2 * (low_rank * memory.IMBALANCE + 4096))


def test_packed_rows_under_a_mask_cost_the_full_square_and_keep_the_mask() -> None:
    rows = work(1, 8, micro=2, shard=1, activation_checkpointing=False)
    plain, masked = estimate_cost(rows), estimate_cost(replace(rows, masked=True))
    half = 36 * (4096 + 4096) * 1024  # of one forward, per token: all heads' scores, and their product with the values
    assert masked.flops_per_token - plain.flops_per_token == 3 * half
    assert masked.compute_seconds > plain.compute_seconds
    square = 2 * 1024 * 1024
    kept = item(masked, "activations") - item(plain, "activations")
    assert kept == square + 36 * square * 2  # the mask, and each layer's in 16 bits
    apart = estimate_cost(replace(rows, document=100))  # attention within documents costs what they are long
    assert plain.flops_per_token - apart.flops_per_token == 3 * 36 * 8192 * (1024 - 100)
    assert apart.rows == plain.rows


def test_tokens_checkpointing_and_dropout_are_counted() -> None:
    sizes = [estimate_cost(work(3, 1, micro)).gpu_gib for micro in (1, 8, 16, 64)]
    assert sizes == sorted(sizes)
    given = work(3, 1, 8)
    bare = unchecked(given)
    assert estimate_cost(bare).gpu_gib > estimate_cost(given).gpu_gib
    extra = item(estimate_cost(replace(bare, dropout=0.05)), "activations") - item(estimate_cost(bare), "activations")
    inputs = 4096 + 1024 + 4096 + 256 + 4096 + 4096 + 4096 + 2048
    shared = 4096 + 1024 + 256 + 4096 + 2048  # without dropout; o_proj's is kept anyway
    assert extra == pytest.approx(8 * 1024 * 36 * (3 * inputs - 2 * shared), rel=0.03)  # a copy and a mask for each
    on_cpu = replace(bare, machine=replace(bare.machine, gpu=find_gpu("cpu")))
    masks = item(estimate_cost(replace(on_cpu, dropout=0.05)), "activations")
    masks -= item(estimate_cost(on_cpu), "activations")
    assert masks == pytest.approx(8 * 1024 * 36 * inputs, rel=0.03)  # which copies each input in any case


# --- traffic and time ------------------


def test_experts_of_119b_are_planned_on_their_rank() -> None:
    experts = 2 * EXPERTS
    assert experts == pytest.approx(232e9, rel=0.001)
    split = estimate_cost(work(2, 1, expert_parallel=2, name="expert-parallel"))
    assert item(split, "base weights") == TOTAL  # 2 bytes, over 2 ranks
    assert flow(split, "all-gather forward") == pytest.approx((TOTAL - EXPERTS) * 2 / 2, rel=1e-6)
    assert flow(split, "expert dispatch") == 1024 * 4 * 4096 * 2 * 2 * 3 * 36 / 2


def test_split_experts_average_their_adapters_among_their_replicas_only() -> None:
    two = estimate_cost(work(1, 2, experts=True, expert_parallel=2, name="expert-parallel"))
    assert flow(two, "adapter all-reduce") == 2 * (2 - 1) / 2 * 4 * PLAIN
    assert flow(two, "adapter all-reduce, experts") == 0
    hybrid = estimate_cost(work(2, 2, experts=True, shard=2, replicate=2, expert_parallel=2, name="expert-parallel"))
    assert flow(hybrid, "adapter all-reduce, experts") == 2 * (2 - 1) / 2 * 4 * (ALL - PLAIN) / 2


def test_tokens_of_experts_cross_the_network_for_ranks_of_other_nodes_only() -> None:
    split = estimate_cost(work(2, 4, expert_parallel=8, name="expert-parallel"))
    (dispatch,) = [f for f in split.flows if f.kind == "expert dispatch"]
    sent = 1024 * 4 * 4096 * 2 * 2 * 3 * 36  # there and back, in three passes
    assert dispatch.bytes == sent * 7 / 8
    network = machine().rates.collective("all-to-all", "network", 8)
    assert dispatch.seconds == pytest.approx(sent / 2 * 4 / (network.gb_per_second * 1e9), rel=1e-6)


def test_a_node_reads_its_part_of_the_files_once() -> None:
    given = work(2, 4)
    rates = given.machine.rates
    narrow = sum(p.count for p in BASE.parameters if p.part in ("attention", "shared_experts", "experts"))
    narrow -= sum(p.count for p in BASE.parameters if p.part == "attention" and len(p.shape) == 1)
    files = 2 * TOTAL - narrow
    part = 2 * TOTAL / 8
    read = min(files, 4 * part) / rates.storage_gb_per_second
    assert estimate_cost(given).load_seconds == pytest.approx((read + part / rates.host_link_gb_per_second) / 1e9)
    one = estimate_cost(work(1, 8))
    read = files / rates.storage_gb_per_second
    assert one.load_seconds == pytest.approx((read + part / rates.host_link_gb_per_second) / 1e9, rel=1e-3)


def test_an_evaluation_batch_takes_its_sequences_times_as_long() -> None:
    def of_sequence(size: int, *ranks: int, **layout: Any) -> float:
        return estimate_cost(replace(work(*ranks, **layout), evaluated=size)).evaluation_seconds

    alone = {"shard": 1, "name": "resident"}
    assert of_sequence(8, 1, 1, **alone) == pytest.approx(of_sequence(1, 1, 1, **alone), rel=0.01)
    # Each batch gathers sharded weights, which take longer than computing with them.
    assert of_sequence(8, 1, 8) == pytest.approx(of_sequence(1, 1, 8) / 8, rel=0.01)


def test_a_reference_is_computed_in_batches_as_large_as_trainings() -> None:
    """An evaluation's are of other sizes: each gathers sharded weights."""
    small, large = (estimate_cost(replace(work(1, 8, micro=2), evaluated=size)) for size in (1, 8))
    assert small.forward_seconds == large.forward_seconds
    assert small.evaluation_seconds > large.evaluation_seconds


def test_trained_base_weights_stay_sharded() -> None:
    sizes = {p.name: p.count for p in BASE.parameters if p.part in ("embedding", "head")}
    full, plain = sum(sizes.values()), lora()
    found = replace(plain, in_full=sizes, trainable=plain.trainable + full)
    with_it, without = (estimate_cost(replace(work(1, 4), shape=read_shape(BASE, each))) for each in (found, plain))
    assert item(with_it, "adapter") == item(with_it, "adapter gradients") == 4 * (plain.trainable + full // 4)
    assert item(with_it, "optimizer") == 8 * (plain.trainable + full // 4)
    assert item(without, "base weights") - item(with_it, "base weights") == 2 * full // 4
    assert item(with_it, "trained weights, gathered") == full * (4 + 4 - 2)
    replicated = work(2, 4, shard=4, replicate=2, name="hybrid")  # a part for each rank of a node, on both nodes
    hybrid = estimate_cost(replace(replicated, shape=read_shape(BASE, found)))
    assert item(hybrid, "adapter") == 4 * (plain.trainable + full // 4)


def test_weights_that_stay_gathered_are_sent_once_a_step_and_need_memory() -> None:
    kept, freed = estimate_cost(work(1, 8, name="no-reshard", reshard_after_forward=False)), estimate_cost(work(1, 8))
    gathers = [(f.kind, f.per_step) for f in kept.flows if f.kind.startswith("all-gather")]
    assert gathers == [("all-gather forward", 1)]
    assert [f.per_step for f in freed.flows if f.kind.startswith("all-gather")] == [16, 16]
    assert freed.wire_gb_per_step / kept.wire_gb_per_step == pytest.approx(2 * 16, rel=0.02)
    assert kept.gpu_gib - freed.gpu_gib > 200
    alone = estimate_cost(work(1, 1, shard=1, name="resident"))
    assert (alone.flows, alone.wire_gb_per_step) == ((), 0)


def test_fp8_halves_the_traffic_and_costs_time_on_the_chip() -> None:
    wide, narrow = estimate_cost(work(3, 1)), estimate_cost(work(3, 1, base_dtype="fp8"))
    assert wide.wire_gb_per_step / narrow.wire_gb_per_step == pytest.approx(2, rel=0.02)
    one = {dtype: estimate_cost(work(1, 1, 16, 1, shard=1, base_dtype=dtype)).step_seconds for dtype in ("fp8", "bf16")}
    assert one["fp8"] - one["bf16"] == pytest.approx(3 * 4 * 117.88e9 / 4.08e12, rel=0.01)


def test_nics_are_shared_by_the_gpus_of_a_node() -> None:
    one, eight = estimate_cost(work(2, 8)), estimate_cost(work(2, 8, nics=8))
    assert one.wire_seconds / eight.wire_seconds == pytest.approx(8)
    inside = estimate_cost(work(2, 8, shard=8, replicate=2))
    assert {f.fabric for f in inside.flows if f.kind.startswith("all-gather")} == {"nvlink4"}
    assert {f.fabric for f in one.flows} == {"infiniband-400"}


# Seconds of 16,384 tokens' routed rows: 36 layers, 4 experts, 52 bytes x 4,096 and 39 x 2,048 a row, at 1,250 GB/s.
ROUTED = 0.55
# name: work, seconds a step, seconds when nothing overlaps
ROOFLINE: dict[str, tuple[Workload, float, float]] = {
    "3x1, offload": (work(3, 1, offload=True), 113, 167),
    "3x1, 16 rows, no accumulation": (work(3, 1, 16, 1), 7.1, 9.5),
    "3x1, 16 rows, 8-bit shards": (work(3, 1, 16, 1, base_dtype="fp8"), 3.5, 6.0 + ROUTED),
    "3x1, 8-bit base on every GPU": (
        work(3, 1, 8, 2, shard=1, replicate=3, name="resident", base_dtype="fp8"),
        3.11 + ROUTED,
        3.11 + ROUTED,
    ),
    "2x1, offload": (work(2, 1, offload=True), 85, 164),
    "2x1, expert parallel": (work(2, 1, 8, 2, expert_parallel=2), 3.45 + ROUTED, 4.0 + ROUTED),
    "2x8 flat": (work(2, 8), 159, 165),
    "2x8 flat, eight NICs": (work(2, 8, nics=8), 20, 23),
    "2x8 hybrid": (work(2, 8, 8, 2, shard=8, replicate=2, name="hybrid"), 2.5 + ROUTED, 4.8 + ROUTED),
    "2x8 hybrid, experts split": (
        work(2, 8, 8, 2, shard=8, replicate=2, expert_parallel=8),
        2.65 + ROUTED,
        2.8 + ROUTED,
    ),
}


@pytest.mark.parametrize("name", ROOFLINE)
def test_step_times_agree_with_an_independent_roofline(name: str) -> None:
    """Worked out by hand from the same rates: 250 TFLOP/s for every product.

    Split experts: 2 x (1.24 of compute + 29 GB of tokens at 45 GB/s, or 51 at 360), because products wait for them,
    less what overlaps with shared experts, 1.65 ms in each of 3 passes of 36 layers: 0.18 s, or one way of two, 0.07.
    8-bit on every GPU: 2 x (1.24 of compute + 3 passes x 117.9 G x 7 bytes of decoding / 4.32 TB/s), one after the
    other on the same stream.
    """
    given, step, serial = ROOFLINE[name]
    answer = estimate_cost(given)
    assert answer.step_seconds == pytest.approx(step, rel=0.04)
    assert answer.step_seconds_serial == pytest.approx(serial, rel=0.15)
    assert answer.step_seconds <= answer.step_seconds_serial
    tokens = given.batch.tokens * given.batch.accumulation * given.layout.ranks
    assert answer.tokens_per_second == pytest.approx(tokens / answer.step_seconds)
    # Every row has a formula, and the fullest phase is the peak.
    assert all(row.formula and row.bytes > 0 for row in answer.rows)
    assert all(f.formula and f.seconds > 0 for f in answer.flows)
    assert {row.phase for row in answer.rows} == {"load", "step", "save"}
    peak = sum(row.bytes for row in answer.rows if (row.phase, row.place) == ("step", "gpu"))
    assert answer.gpu_gib == pytest.approx(peak / GIB)


def test_the_published_config_has_the_shapes_that_are_written_here() -> None:
    assert PUBLISHED is not BASE
    for given, *_ in ROOFLINE.values():
        assert estimate_cost(replace(given, shape=read_shape(PUBLISHED, lora()))) == estimate_cost(given)


def test_the_baseline_recipe_waits_for_its_network() -> None:
    answer = estimate_cost(work(3, 1, offload=True))
    assert answer.bound == "wire"
    assert answer.wire_seconds / answer.compute_seconds > 40
    assert answer.mfu < 0.01
    assert answer.wire_gb_per_step == pytest.approx(16 * 2 * 238 * 2 / 3, rel=0.01)
    assert answer.transfer_seconds == pytest.approx(3.21, rel=0.01)


def test_operations_per_token() -> None:
    """6.10 B active parameters: 12.2 G forward; with checkpointing 37.8 G, and the fused head projects once more."""
    answer = estimate_cost(work(3, 1))
    head = 2 * 4096 * 131072
    both = answer.flops_per_token + answer.recompute_flops_per_token
    assert both - head == pytest.approx(37.8e9 - head, rel=0.02)
    assert answer.flops_per_token == pytest.approx(2 * 12.2e9, rel=0.05)


def test_a_cpu_pays_for_each_matrix_that_it_decodes() -> None:
    """With torch's own operators, several a matrix: more than the bytes that FP8 saves."""
    card = find_gpu("cpu")
    link = find_fabric(card.link)
    given = replace(work(1, 2, shard=1, name="resident"), machine=Machine(card, link, link, link, 1, None))
    kept = replace(given, layout=replace(given.layout, base_dtype="fp8"))
    matrices = sum(
        36 * (128 if p.part == "experts" else 1)
        for p in BASE.parameters
        if "layers.0." in p.name and p.name in shape().narrow
    )
    least = 13 * matrices * given.machine.rates.operator_seconds
    assert estimate_cost(kept).host_seconds - estimate_cost(given).host_seconds >= 2 * least


def test_every_gpu_can_be_planned_and_cpu_has_no_overlap() -> None:
    for name in GPUS:
        answer = estimate_cost(real(replace(work(2, 8), machine=machine(name))))
        assert answer.step_seconds_low < answer.step_seconds < answer.step_seconds_high
        assert answer.tokens_per_second_low < answer.tokens_per_second < answer.tokens_per_second_high
        assert answer.basis == ("any CPU, not calibrated" if name == "cpu" else "data sheet")
        assert 0 < answer.mfu < 1
        assert name != "cpu" or answer.step_seconds == answer.step_seconds_serial


def test_the_host_bounds_small_micro_batches_and_waits_are_added() -> None:
    """A Mistral 4 layer with its adapters dispatches about 180 operators forward and 230 back: 36 of them, forward
    twice, and views: 0.17 s at 7 us, and at 20 more than the GPU needs to read all experts' weights. Fused: half."""
    small = replace(work(1, 1, 1, 16, shard=1, name="resident"), batch=BatchSize(1, 16, 256))
    fused = estimate_cost(real(small, operator_seconds=7e-6, module_seconds=0.0))
    assert fused.host_seconds == pytest.approx(0.08, rel=0.15)
    values = {field.name: getattr(small, field.name) for field in fields(small)}
    answer = estimate_cost(real(Separate(**values), operator_seconds=20e-6, module_seconds=0.0))
    assert answer.bound == "host"
    assert answer.host_seconds * 7 / 20 == pytest.approx(0.17, rel=0.15)
    assert answer.compute_seconds + answer.memory_seconds < answer.host_seconds
    assert answer.step_seconds >= 16 * answer.host_seconds
    large = estimate_cost(
        real(replace(Separate(**values), batch=BatchSize(16, 1, 1024)), operator_seconds=20e-6, module_seconds=0.0)
    )
    assert large.host_seconds == pytest.approx(answer.host_seconds)
    assert large.bound == "compute"
    assert large.tokens_per_second > 3 * answer.tokens_per_second
    split = real(work(1, 8, 4, 1, expert_parallel=8, name="expert-parallel"), sync_seconds=1.0)
    assert estimate_cost(split).sync_seconds == 36  # in each layer's forward; known when it is computed again
    assert estimate_cost(split).step_seconds - estimate_cost(real(split, sync_seconds=0.0)).step_seconds >= 36
    # Before Hopper each product of experts waits, two forward, again and back, and is one for each of 16 experts here.
    older = replace(split, machine=replace(split.machine, gpu=find_gpu("a100")))
    assert estimate_cost(older).sync_seconds == (1 + 3 * 2) * 36
    assert estimate_cost(replace(older, keeps_products=True)).sync_seconds == (1 + 2 * 2) * 36
    per_layer = (
        (estimate_cost(older).host_seconds - estimate_cost(split).host_seconds)
        / split.machine.rates.operator_seconds
        / 36
    )
    assert per_layer == pytest.approx(3 * 2 * 128 / 8)


def test_kept_products_are_not_computed_again_and_need_memory() -> None:
    whole = work(1, 8, 4, 1, expert_parallel=8, name="expert-parallel", base_dtype="fp8")
    kept, again, stored = (
        estimate_cost(replace(whole, keeps_products=True)),
        estimate_cost(whole),
        estimate_cost(unchecked(whole)),
    )
    dispatch = [flow(answer, "expert dispatch") for answer in (stored, kept, again)]
    assert dispatch[0] == dispatch[1] == dispatch[2] * 2 / 3
    assert stored.step_seconds < kept.step_seconds < again.step_seconds
    tokens, width = 4 * 1024 * 4, 2 * 2048 + 3 * 4096  # gate with up; down, and what is sent to a rank and back
    grown = item(kept, "activations") - item(again, "activations")
    assert grown == pytest.approx(36 * tokens * width * 2 * memory.IMBALANCE, rel=1e-6)
    assert stored.gpu_gib > kept.gpu_gib > again.gpu_gib
    # Of products: the routed experts' alone, forward once less.
    routed = 36 * 4 * 1024 * 4 * 3 * 4096 * 2048 * 2 / 250e12
    assert again.compute_seconds - kept.compute_seconds == pytest.approx(routed, rel=0.05)


def test_products_are_slower_when_small_and_collectives_have_a_latency() -> None:
    def rate(tokens: int) -> float:
        given = real(replace(work(1, 1, shard=1, name="resident"), batch=BatchSize(1, 1, tokens)))
        answer = estimate_cost(given)
        return tokens * (answer.flops_per_token + answer.recompute_flops_per_token) / answer.compute_seconds

    rates = [rate(tokens) for tokens in (32, 256, 2048, 16384)]
    assert rates == sorted(rates)
    assert rates[0] < 0.1 * 250e12 < 250e12 < rates[-1] < 692e12
    sheet = machine().rates
    slow = tuple(replace(one, latency_seconds=0.01) for one in sheet.collectives)
    given = work(1, 8)
    waiting = replace(given, machine=replace(given.machine, measured=replace(sheet, collectives=slow)))
    calls = 2 * 36 + 2  # of each layer, forward and backward, of the embedding and of the head
    assert estimate_cost(waiting).wire_seconds - estimate_cost(given).wire_seconds == pytest.approx(calls * 0.01)
    # The rate that is looked up is the measured group's that is most like it.
    assert sheet.collective("all-gather", "link", 8).ranks == 8
    assert sheet.collective("all-gather", "network", 24).ranks == 32
    assert interpolate(((8, 64, 1.0), (32, 64, 4.0), (8, 256, 2.0), (32, 256, 8.0)), 16, 128) == pytest.approx(8**0.5)
    assert interpolate(((8, 64, 1.0),), 2, 999) == 0.25


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "way"), [("llama", "separate"), ("qwen3_moe", "fused")])
def test_counts_are_those_of_a_fresh_trace(name: str, way: str) -> None:
    """Compares the shipped table with the model that transformers builds today."""
    sizes, found = dispatched.count_layer(FAMILIES[name], (128, 8, 4, 64, 16, 2, 9), False, way)
    for key, counted in found.items():
        phase, _, what = key.partition(" ")
        row = operators.load_operators()[way][name][phase][what]
        shipped = sum(sizes[feature] * value for feature, value in row.items())
        assert shipped == pytest.approx(counted, rel=0.04, abs=1), key
    assert set(FAMILIES) <= set(operators.load_operators()[way])


@pytest.mark.parametrize("name", dispatched.OPTIONS)
def test_options_are_priced_as_a_linear_layer_dispatches_them(name: str) -> None:
    """Counted on PEFT's own layer; DoRA and dropout take more time and memory."""
    dora, dropout, way, autocast = dispatched.OPTIONS[name]
    inputs, outputs, tokens = 80, 112, 48
    sizes = dict(zip(operators.OF_LINEAR, operators.linear_features(inputs, outputs, tokens), strict=True))
    for phase, counted in dispatched.count_linear((inputs, outputs, tokens), dora, dropout, way, autocast).items():
        row = dict(operators.load_operators()["linear"][name][phase])
        row["bytes"] = sum(sizes[what] * value for what, value in row["bytes"].items())
        assert row == pytest.approx(counted, rel=1e-6), phase
    given = replace(work(1, 4, shard=1, name="resident"), dropout=0.0)
    seconds, gib = (
        [getattr(estimate_cost(each), what) for each in (given, replace(given, dora=dora, dropout=dropout))]
        for what in ("step_seconds", "gpu_gib")
    )
    assert (seconds[1] > seconds[0]) == (gib[1] > gib[0]) == (dora or dropout > 0)


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_planned_dora_memory_equals_a_measured_layer(mixed: bool, dropout: float) -> None:
    """Peak and kept bytes of PEFT's own layer, by torch's profiler."""
    dtype, (inputs, outputs, tokens, r) = torch.bfloat16 if mixed else torch.float32, (768, 512, 64, 4)
    found = []
    for dora in (False, True):
        base = torch.nn.Linear(inputs, outputs, bias=False, dtype=dtype).requires_grad_(False)
        config = LoraConfig(r=r, use_dora=dora, lora_dropout=dropout)
        linear = Linear(base, "default", config=config, r=r, lora_alpha=8)
        for each in (linear.lora_A, linear.lora_B, linear.lora_magnitude_vector):
            each.float()
        x = torch.randn(tokens, inputs, dtype=dtype).requires_grad_() * 1
        with (
            torch.profiler.profile(profile_memory=True) as profiled,
            torch.autocast("cpu", torch.bfloat16, enabled=mixed),
        ):
            y = linear(x)
        events = [each for each in profiled.profiler.kineto_results.events() if each.name() == "[memory]"]
        sizes = list(itertools.accumulate(each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())))
        found.append((max(sizes), sizes[-1] - y.nbytes))
        del x, y  # or they would be freed while the next one is measured
    (_, kept), (peak, kept_by_dora) = found
    lora = AdaptedModule("q_proj", "attention", inputs, outputs, r)
    given = memory.Tokens.of(replace(work(1, 4, shard=1, name="resident"), dropout=dropout))
    without = replace(given, count=tokens, width=dtype.itemsize, cast=mixed, mask=4.0 if dropout else 0.0)
    layer = replace(work(1, 4).shape.layers[0], plain_lora=(lora,))
    priced = [memory.layer_bytes(layer, replace(without, dora=dora)) for dora in (False, True)]
    assert kept_by_dora - kept == pytest.approx(priced[1] - priced[0], rel=0.1)
    assert peak == pytest.approx(memory.dora_bytes(lora, without), rel=0.15)


# --- what would make it fit ------------------


def test_plan_that_does_not_fit_suggests_one_that_does() -> None:
    hopper = replace(work(1, 4, name="no-reshard", reshard_after_forward=False), machine=machine("h100"))
    remedies = {
        "2 nodes (2 GPUs)": work(1, 1, shard=1, name="resident"),
        "gradient_checkpointing: true": unchecked(work(3, 1, 16)),
        "layout.name: full-shard": work(2, 1, shard=1, replicate=2, name="resident"),
        "expert-parallel": hopper,
        "GiB of 22.5 a GPU": replace(work(1, 1, shard=1), machine=machine("l4")),
        "GiB of 64.0 a host: with layout.offload: false": replace(work(3, 1, offload=True), machine=machine(host=64)),
    }
    for remedy, given in remedies.items():
        answer = estimate_cost(given)
        assert not answer.fits
        assert remedy in answer.remedy
        assert answer.remedy.partition(" it needs")[0].count("layout.") <= 1  # no two layouts in one suggestion
    assert estimate_cost(work(3, 1)).remedy == ""


@pytest.mark.parametrize("micro", [1, 2, 8, 32])
def test_rows_are_padded_as_training_pads_them(micro: int) -> None:
    """A sample of a fifth of the rows tells the padding of all of them, sorted or not, within 5 %."""
    chance = np.random.default_rng(0)
    rows = np.minimum(1024, chance.lognormal(4, 1, 5000)).astype(np.int64)
    known = tuple(sorted(rows[::5].tolist()))
    step = 64
    orders = {
        len(rows): group_by_length(rows, step, 0, 0),
        None: chance.permutation(len(rows)),  # a stream
    }
    for count, order in orders.items():
        full = rows[order][: len(rows) - len(rows) % micro].reshape(-1, micro)
        found = RowLengths(round(rows.mean()), known, count).pad(micro, step)
        assert found == pytest.approx(full.max(1).mean(), rel=0.05)
    assert RowLengths(100).pad(micro, step) == 100  # packed


def test_padding_costs_time_and_no_tokens() -> None:
    given = work(1, 2, micro=8)
    plain = estimate_cost(given, RowLengths(100))
    padded = estimate_cost(given, RowLengths(100, (25, 75, 100, 200)))
    assert padded.compute_seconds > 1.2 * plain.compute_seconds
    tokens = [answer.tokens_per_second * answer.step_seconds for answer in (plain, padded)]
    assert tokens[0] == pytest.approx(tokens[1], rel=0.01)
    one = replace(given, batch=replace(given.batch, micro=1))
    assert estimate_cost(one, RowLengths(100, (25, 75, 100, 200))) == estimate_cost(one, RowLengths(100))


def test_evaluations_of_pairs_hold_a_layer_in_float32() -> None:
    """Of experts that are split, those of the rank."""
    split = {"experts": True, "name": "expert-parallel", "expert_parallel": 4}
    for layout in ({"shard": 1, "name": "resident"}, {}, {"experts": True}, split):
        given = replace(work(1, 4, **layout), evaluated=2, of_narrow_pairs=True)
        rows = {row.item: row for row in memory._list_evaluation_moments(given)["evaluation"]}
        layer = max((layer for layer, _ in given.shape.kinds), key=lambda layer: layer.elements.total)
        elsewhere = layer.routed.total * (1 - 1 / given.layout.expert_parallel)
        assert rows["a layer in float32"].bytes == 4 * (layer.elements.total - elsewhere)
        assert elsewhere > 0 or layout is not split
        wide = replace(given, base_bytes=4, layout=replace(given.layout, precision="no"))
        assert "a layer in float32" not in {row.item for row in memory._list_evaluation_moments(wide)["evaluation"]}
        gathered = 2 * 2 * given.layout.is_sharded
        (embedding,) = memory._list_evaluation_moments(given)["evaluation's embedding"]
        assert embedding.bytes == (4 + gathered) * given.shape.embedding.total


def test_evaluations_of_pairs_in_float32_take_longer() -> None:
    """By the peaks of products on a GPU; weights are gathered in bfloat16 all the same."""
    for given in (work(1, 1, name="resident"), work(1, 4)):
        alone, widened = (
            estimate_cost(replace(given, evaluated=2, of_narrow_pairs=widens)).evaluation_seconds
            for widens in (False, True)
        )
        gpu = given.machine.gpu
        factor = gpu.bf16_tflops / (gpu.fp32_tflops or gpu.bf16_tflops / 16)
        sent = given.layout.is_sharded
        assert widened > alone
        assert (widened < factor * alone) if sent else widened == pytest.approx(factor * alone)
