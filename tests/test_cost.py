"""Closed forms: what sharding, traffic and time must come to for Mistral Small 4's published sizes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from windlass import model as weights
from windlass.hardware import GPUS, Machine, fabric, gpu
from windlass.model import Base, Parameter
from windlass.model.family import Family
from windlass.model.targets import Adapter, Target
from windlass.plan.cost import Batch, Cost, Work, cost, memory
from windlass.plan.cost.memory import optimizer, temporary
from windlass.plan.layout import Layout

GIB = 2**30
TOTAL = 118_972_826_624
EXPERTS = 36 * 128 * 3 * 2048 * 4096


def mistral4() -> Base:
    """Every parameter of Mistral Small 4 with its published shape."""
    hidden, vocab, heads, latent_q, latent_kv, width, experts = 4096, 131072, 32, 1024, 256, 2048, 128
    parameters = [
        Parameter("model.embed_tokens.weight", (vocab, hidden), "embedding"),
        Parameter("model.norm.weight", (hidden,), "norm"),
        Parameter("lm_head.weight", (vocab, hidden), "head"),
    ]
    for index in range(36):
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
        parameters += [
            Parameter(f"model.layers.{index}.{name}.weight", shape, part) for name, (shape, part) in layer.items()
        ]
        stacks = {"gate_up_proj": (experts, 2 * width, hidden), "down_proj": (experts, hidden, width)}
        parameters += [
            Parameter(f"model.layers.{index}.mlp.experts.{n}", shape, "experts") for n, shape in stacks.items()
        ]
    family = Family("mistral4", "Mistral4ForCausalLM", "Mistral4DecoderLayer")
    dims, fp8 = {"heads": 32, "top_k": 4}, {"quant_method": "fp8", "weight_block_size": None}
    return Base("Mistral Small 4", None, family, {}, dims, tuple(parameters), quantization=fp8)


CHECKPOINT = mistral4()
PUBLISHED = weights.published_base("Mistral-Small-4-119B-2603") or CHECKPOINT


def lora(r: int = 16, experts: bool = False) -> Adapter:
    """All attention projections and the shared expert, and the routed experts if asked."""
    plain = [p for p in CHECKPOINT.parameters if p.part in ("attention", "shared_experts")]
    stacks = [p for p in CHECKPOINT.parameters if p.part == "experts" and experts]
    trainable = sum(r * sum(p.shape) for p in plain) + sum(r * p.shape[0] * sum(p.shape[1:]) for p in stacks)
    modules = tuple(p.name.removesuffix(".weight") for p in plain)
    return Adapter(r, 32, (), modules, tuple(p.name for p in stacks), trainable, 4)


def machine(name: str = "h200", nics: int = 1, host: float | None = 1000.0) -> Machine:
    card = gpu(name)
    return Machine(card, fabric(card.link), fabric("infiniband-400"), fabric(card.host_link), nics, host)


def work(nodes: int, gpus: int, micro: int = 1, accumulation: int = 16, nics: int = 1, **layout: Any) -> Work:
    experts = layout.pop("experts", False)
    settings = {"name": "full-shard", "reason": "", "shard": nodes * gpus, "activation_checkpointing": True, **layout}
    return Work(
        CHECKPOINT,
        lora(experts=experts),
        Layout(nodes=nodes, gpus_per_node=gpus, **settings),
        Batch(micro, accumulation, 1024),
        machine(nics=nics),
        "adamw_torch",
        2,
    )


def item(answer: Cost, name: str, phase: str = "step", place: str = "gpu") -> float:
    return sum(row.bytes for row in answer.rows if (row.item, row.phase, row.place) == (name, phase, place))


def flow(answer: Cost, kind: str) -> float:
    return sum(f.bytes for f in answer.flows if f.kind == kind)


def test_the_fixture_is_the_published_model() -> None:
    assert lora().trainable == 27_463_680
    assert lora(experts=True).trainable == 1_084_428_288
    assert item(cost(work(1, 1, shard=1)), "base weights") == 2 * TOTAL


def test_the_published_config_costs_the_same_as_the_shapes_written_here() -> None:
    assert PUBLISHED is not CHECKPOINT
    for given, *_ in ROOFLINE.values():
        assert cost(replace(given, base=PUBLISHED)) == cost(given)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_even_shards_divide_the_base(ranks: int) -> None:
    assert item(cost(work(1, ranks)), "base weights") == 2 * TOTAL / ranks


def test_three_ranks_hold_a_third_each_rounded_up_to_rows() -> None:
    held = item(cost(work(3, 1)), "base weights")
    assert held == pytest.approx(79.3e9, rel=0.01)
    assert held > 2 * TOTAL / 3  # 43 experts of 128 on the fullest rank
    assert held < 2 * TOTAL / 3 * (43 * 3 / 128)


def test_experts_are_232_gb_and_stay_on_their_rank() -> None:
    experts = 2 * EXPERTS
    assert experts == pytest.approx(232e9, rel=0.001)
    split = cost(work(2, 1, expert_parallel=2, name="expert-parallel"))
    assert item(split, "base weights") == TOTAL  # 2 bytes, over 2 ranks
    assert flow(split, "all-gather forward") == pytest.approx((TOTAL - EXPERTS) * 2 / 2, rel=1e-6)
    assert flow(split, "expert dispatch") == 1024 * 4 * 4096 * 2 * 2 * 3 * 36 / 2


def test_adapter_gradients_and_optimizer() -> None:
    answer = cost(work(3, 1))
    assert item(answer, "adapter") == 4 * 27_463_680
    assert item(answer, "adapter gradients") == 4 * 27_463_680
    assert item(answer, "optimizer") == 8 * 27_463_680
    assert item(cost(replace(work(3, 1), optim="sgd")), "optimizer") == 0
    assert optimizer("adamw_torch_fused") == optimizer("adamw_torch") == optimizer("something_new")
    assert optimizer("paged_adamw_8bit")[1] == pytest.approx(2.03)


def test_a_base_in_fp8_is_a_byte_for_what_is_stored_so() -> None:
    wide = TOTAL - sum(p.count for p in CHECKPOINT.parameters if p.part in ("attention", "shared_experts", "experts"))
    assert item(cost(work(1, 1, shard=1, base_dtype="fp8")), "base weights") == TOTAL + wide
    assert wide == pytest.approx(1.09e9, rel=0.01)  # embedding, head, routers, norms stay as they are
    blocks = replace(CHECKPOINT, quantization={"quant_method": "fp8", "weight_block_size": [128, 128]})
    scales = item(cost(replace(work(1, 1, shard=1, base_dtype="fp8"), base=blocks)), "base weights")
    assert scales - TOTAL - wide == pytest.approx(4 * (TOTAL - wide) / 128**2)
    bf16 = replace(CHECKPOINT, quantization=None)
    plain = replace(work(1, 1, shard=1, base_dtype="fp8"), base=bf16)
    assert item(cost(plain), "base weights") == 2 * TOTAL


def test_fp8_halves_the_wire_and_costs_time_on_the_chip() -> None:
    wide, narrow = cost(work(3, 1)), cost(work(3, 1, base_dtype="fp8"))
    assert wide.wire_gb_per_step / narrow.wire_gb_per_step == pytest.approx(2, rel=0.02)
    slower = (
        cost(work(1, 1, 16, 1, shard=1, base_dtype="fp8")).step_seconds - cost(work(1, 1, 16, 1, shard=1)).step_seconds
    )
    assert slower == pytest.approx(3 * 7 * 117.88e9 / 4.32e12, rel=0.01)


@pytest.mark.parametrize("shape", [(128, 4096, 4096), (128, 4096, 2048), (4, 64, 32), (4096, 1024), (384, 7168, 4096)])
@pytest.mark.parametrize("width", [2, 4])
def test_what_is_dequantised_at_once_is_what_the_engine_says(shape: tuple[int, ...], width: int) -> None:
    from windlass.train import fp8

    assert temporary(shape, 1, width) == fp8.temporary(shape, width)


def test_what_is_being_read_at_once_is_what_the_loader_says() -> None:
    from windlass.train import reading

    assert (memory.THREADS, memory.AT_ONCE) == (reading.THREADS, reading.AT_ONCE)


def test_split_experts_average_their_adapters_among_their_replicas_only() -> None:
    two = cost(work(1, 2, experts=True, expert_parallel=2, name="expert-parallel"))
    assert flow(two, "adapter all-reduce") == 2 * (2 - 1) / 2 * 4 * 27_463_680
    assert flow(two, "adapter all-reduce, experts") == 0
    hybrid = cost(work(2, 2, experts=True, shard=2, replicate=2, expert_parallel=2, name="expert-parallel"))
    assert flow(hybrid, "adapter all-reduce, experts") == 2 * (2 - 1) / 2 * 4 * (1_084_428_288 - 27_463_680) / 2


def test_weights_that_stay_gathered_travel_once_a_step() -> None:
    kept = cost(work(1, 8, name="no-reshard", reshard_after_forward=False))
    gathers = [f for f in kept.flows if f.kind.startswith("all-gather")]
    assert [(f.kind, f.per_step) for f in gathers] == [("all-gather forward", 1)]
    dropped = cost(work(1, 8))
    assert [f.per_step for f in dropped.flows if f.kind.startswith("all-gather")] == [16, 16]


def test_on_a_processor_nothing_overlaps() -> None:
    given = work(2, 1)
    answer = cost(replace(given, machine=machine("cpu")))
    assert answer.step_seconds == answer.step_seconds_serial


def test_expert_adapters_are_whole_on_every_rank_unless_the_experts_are_split() -> None:
    assert item(cost(work(2, 1, experts=True)), "adapter") == 4 * 1_084_428_288
    split = cost(work(2, 1, experts=True, expert_parallel=2))
    assert item(split, "adapter") == 4 * (27_463_680 + (1_084_428_288 - 27_463_680) // 2)


def test_adapters_of_experts_count_with_their_own_rank() -> None:
    experts = lora(experts=True)
    stacks = Target("lora.experts", (), "experts", experts.target_parameters, (1_084_428_288 - 27_463_680) // 4, r=4)
    quarter = replace(experts, targets=(stacks,), trainable=27_463_680 + (1_084_428_288 - 27_463_680) // 4)
    split = replace(work(2, 1, experts=True, expert_parallel=2), adapter=quarter)
    assert item(cost(split), "adapter") == 4 * (27_463_680 + (1_084_428_288 - 27_463_680) // 8)


def test_merged_expert_adapters_keep_every_layers_stack() -> None:
    plain = replace(work(8, 8, experts=True), layout=replace(work(8, 8).layout, activation_checkpointing=False))
    split = item(cost(plain), "activations")
    merged = item(cost(replace(plain, expert_path="merged")), "activations")
    # 6.4 GB a layer, 232 GB in all; and, both under 2 GB, the stacks' input rows and the adapters' copies in 16 bits
    assert 2 * EXPERTS < merged - split < 2 * EXPERTS + 2 * 2 * 10**9 + 10**8


# name: work, seconds a step, seconds when nothing overlaps, tokens per second where the step is the bound
ROOFLINE: dict[str, tuple[Work, float, float]] = {
    "3x1, offload": (work(3, 1, offload=True), 113, 167),
    "3x1, 16 rows, no accumulation": (work(3, 1, 16, 1), 7.1, 9.5),
    "3x1, 16 rows, 8-bit shards": (work(3, 1, 16, 1, base_dtype="fp8"), 3.5, 6.0),
    "3x1, 8-bit base on every GPU": (
        work(3, 1, 8, 2, shard=1, replicate=3, name="resident", base_dtype="fp8"),
        3.63,
        3.63,
    ),
    "2x1, offload": (work(2, 1, offload=True), 85, 164),
    "2x1, expert parallel": (work(2, 1, 8, 2, expert_parallel=2), 2.5, 4.0),
    "2x8 flat": (work(2, 8), 159, 165),
    "2x8 flat, eight NICs": (work(2, 8, nics=8), 20, 28),
    "2x8 hybrid": (work(2, 8, 8, 2, shard=8, replicate=2, name="hybrid"), 2.5, 4.8),
    "2x8 hybrid, experts split": (work(2, 8, 8, 2, shard=8, replicate=2, expert_parallel=8), 2.5, 2.8),
}


@pytest.mark.parametrize("name", ROOFLINE)
def test_step_times_agree_with_an_independent_roofline(name: str) -> None:
    """Worked out by hand from the same rates. It leaves out FSDP2's copies: 15 % on the serial sum.

    8-bit on every GPU: 2 x (1.24 of compute + 3 passes x 117.9 G x 7 bytes of decoding / 4.32 TB/s), one after the
    other on the same stream.
    """
    given, step, serial = ROOFLINE[name]
    answer = cost(given)
    assert answer.step_seconds == pytest.approx(step, rel=0.04)
    assert answer.step_seconds_serial == pytest.approx(serial, rel=0.15)
    assert answer.step_seconds <= answer.step_seconds_serial
    tokens = given.batch.tokens * given.batch.accumulation * given.layout.ranks
    assert answer.tokens_per_second == pytest.approx(tokens / answer.step_seconds)


def test_the_recipe_waits_for_its_network() -> None:
    answer = cost(work(3, 1, offload=True))
    assert answer.bound == "wire"
    assert answer.wire_seconds / answer.compute_seconds > 40
    assert answer.mfu < 0.01
    assert answer.wire_gb_per_step == pytest.approx(16 * 2 * 238 * 2 / 3, rel=0.01)
    assert answer.host_seconds == pytest.approx(3.21, rel=0.01)


def test_operations_per_token() -> None:
    """6.10 B active parameters: 12.2 G forward; with checkpointing 37.8 G, and the fused head projects once more."""
    answer = cost(work(3, 1))
    both = answer.flops_per_token + answer.recompute_flops_per_token
    head = 2 * 4096 * 131072
    assert both - head == pytest.approx(37.8e9 - head, rel=0.02)
    assert answer.flops_per_token == pytest.approx(2 * 12.2e9, rel=0.05)


def test_keeping_weights_whole_trades_memory_for_traffic() -> None:
    dropped, kept = cost(work(1, 8)), cost(work(1, 8, name="no-reshard", reshard_after_forward=False))
    assert dropped.wire_gb_per_step / kept.wire_gb_per_step == pytest.approx(2 * 16, rel=0.02)
    assert kept.gpu_gib - dropped.gpu_gib > 200


def test_one_rank_moves_nothing() -> None:
    answer = cost(work(1, 1, shard=1, name="resident"))
    assert answer.flows == ()
    assert answer.wire_gb_per_step == 0


def test_nics_are_shared_by_the_gpus_of_a_node() -> None:
    one, eight = cost(work(2, 8)), cost(work(2, 8, nics=8))
    assert one.wire_seconds / eight.wire_seconds == pytest.approx(8)
    inside = cost(work(2, 8, shard=8, replicate=2))
    assert {f.fabric for f in inside.flows if f.kind.startswith("all-gather")} == {"nvlink4"}
    assert {f.fabric for f in one.flows} == {"infiniband-400"}


def test_offload_moves_the_base_to_the_host() -> None:
    answer = cost(work(3, 1, offload=True))
    assert item(answer, "base weights") == 0
    pinned = item(answer, "offloaded base weights", place="host")
    parts = (2 * math.ceil(p.shape[0] / 3) * math.prod(p.shape[1:]) for p in CHECKPOINT.parameters)
    assert pinned == sum(2 ** math.ceil(math.log2(part)) for part in parts)
    assert pinned > 1.4 * 79.3e9  # a third of a layer's experts is 1.44 GB, and takes 2 GiB


def test_packed_rows_under_a_mask_cost_the_whole_square_and_keep_the_mask() -> None:
    rows = work(1, 8, micro=2, shard=1, activation_checkpointing=False)
    plain, masked = cost(rows), cost(replace(rows, masked=True))
    half = 36 * (4096 + 4096) * 1024  # of one forward, per token: all heads' scores, and their product with the values
    assert masked.flops_per_token - plain.flops_per_token == 3 * half
    assert masked.compute_seconds > plain.compute_seconds
    square = 2 * 1024 * 1024
    kept = item(masked, "activations") - item(plain, "activations")
    assert kept == square + 36 * square * 2  # the mask, and each layer's in 16 bits


def test_attention_within_documents_costs_what_they_are_long() -> None:
    rows = work(1, 8, shard=8, activation_checkpointing=False)
    apart = cost(replace(rows, document=100))
    assert cost(rows).flops_per_token - apart.flops_per_token == 3 * 36 * 8192 * (1024 - 100)
    assert apart.rows == cost(rows).rows


def test_rank_0_writes_the_whole_adapter() -> None:
    """Parameters and two moments copied, and the moments once more as the file that is made of them."""
    answer = cost(work(1, 8, shard=8, expert_parallel=8, experts=True))
    assert item(answer, "adapter being written", "save", "host") == (4 + 8 + 8) * 1_084_428_288


def test_what_does_not_fit_says_what_would() -> None:
    whole = cost(work(1, 1, shard=1, name="resident"))
    assert not whole.fits
    assert "2 nodes (2 GPUs)" in whole.remedy
    unchecked = cost(replace(work(3, 1, 16), layout=replace(work(3, 1).layout, activation_checkpointing=False)))
    assert not unchecked.fits
    assert "gradient_checkpointing: true" in unchecked.remedy
    resident = cost(replace(work(2, 1, shard=1, replicate=2, name="resident"), base=PUBLISHED))
    assert "full-shard" in resident.remedy
    hopper = replace(work(1, 4), machine=machine("h100"), base=PUBLISHED)
    crowded_layers = cost(
        replace(hopper, layout=replace(hopper.layout, name="no-reshard", reshard_after_forward=False))
    )
    assert "expert-parallel" in crowded_layers.remedy
    tiny = cost(replace(work(1, 1, shard=1), machine=machine("l4"), batch=Batch(1, 1, 1024)))
    assert "GiB of 22.5 a GPU" in tiny.remedy
    crowded = cost(replace(work(3, 1, offload=True), machine=machine(host=64)))
    assert not crowded.fits
    assert "a host" in crowded.remedy
    assert "offload: false" in crowded.remedy
    assert cost(work(3, 1)).remedy == ""


def test_every_row_says_how_it_comes_about_and_sums_to_the_peak() -> None:
    for given, *_ in ROOFLINE.values():
        answer = cost(given)
        assert all(row.formula and row.bytes > 0 for row in answer.rows)
        assert all(f.formula and f.seconds > 0 for f in answer.flows)
        phases = {row.phase for row in answer.rows}
        assert phases == {"load", "step", "save"}
        step = sum(row.bytes for row in answer.rows if (row.phase, row.place) == ("step", "gpu"))
        assert answer.gpu_gib == pytest.approx(step / GIB)


def test_more_tokens_need_more_memory_and_checkpointing_less() -> None:
    sizes = [cost(work(3, 1, micro)).gpu_gib for micro in (1, 8, 16, 64)]
    assert sizes == sorted(sizes)
    open_layout = replace(work(3, 1, 8).layout, activation_checkpointing=False)
    assert cost(replace(work(3, 1, 8), layout=open_layout)).gpu_gib > cost(work(3, 1, 8)).gpu_gib


def test_full_logits_and_dropout_are_counted() -> None:
    full = cost(replace(work(3, 1, 16), full_logits=True))
    assert item(full, "loss") == pytest.approx(3 * 16 * 1024 * 131072 * 4, rel=0.02)
    given = work(3, 1, 8)
    bare = replace(given, layout=replace(given.layout, activation_checkpointing=False))
    extra = item(cost(replace(bare, dropout=0.05)), "activations") - item(cost(bare), "activations")
    inputs = 36 * (4096 + 1024 + 4096 + 256 + 4096 + 4096 + 4096 + 2048)
    assert extra == pytest.approx(8 * 1024 * inputs, rel=0.03)  # a byte of mask for each adapted input


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_of_the_table_can_be_planned_for(name: str) -> None:
    answer = cost(replace(work(2, 8), machine=machine(name)))
    assert answer.step_seconds > 0
    assert 0 < answer.mfu < 1
