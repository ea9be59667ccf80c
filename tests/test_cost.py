"""Traffic and time worked out by hand for Mistral Small 4's published sizes, counts of a trace, and measured memory.

tests/test_plan.py has the figures of whole plans, by layout and option.
"""

import importlib
import itertools
import math
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear

from windlass.data.packing import group_by_length
from windlass.hardware import GPUS, Machine, find_fabric, find_gpu
from windlass.model import Parameter, find_published_base
from windlass.model.family import FAMILIES
from windlass.model.targets import resolve_adapter
from windlass.plan import memory, operators
from windlass.plan.cost import BatchSize, Cost, Workload, estimate_cost, read_shape
from windlass.plan.layout import Layout
from windlass.plan.rows import RowLengths
from windlass.plan.workload import AdaptedModule, ModelShape
from windlass.runfile import Lora

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
dispatched: Any = importlib.import_module("dispatched")

GIB = 2**30
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = {"r": 16, "lora_dropout": 0, "target_modules": PROJECTIONS}
(BASE,) = filter(None, [find_published_base("Mistral-Small-4-119B-2603")])
TOTAL = 118_972_826_624
PLAIN, ALL = 27_463_680, 1_084_428_288  # trained parameters of r = 16, without and with the routed experts


@cache
def shape(experts: bool = False) -> ModelShape:
    """Adapters of all attention projections and of the shared expert, and of the routed experts if requested."""
    return read_shape(BASE, resolve_adapter(Lora.model_validate({**LORA, "experts": experts}), BASE, str))


def machine(name: str = "h200", nics: int = 1) -> Machine:
    """A machine with one rate for all products, without host time or latency."""
    card = find_gpu(name)
    link, network, host_link = map(find_fabric, (card.link, "infiniband-400", card.host_link))
    found = Machine(card, link, network, host_link, nics, 1000.0)
    sheet, flat = found.rates, ((1e-9, 1.0, 250.0),)
    ideal = replace(sheet, products={"bfloat16": flat, "float32": flat}, grouped=flat, attention=flat)
    ideal = replace(ideal, memory_gb_per_second=1e9, operator_seconds=0.0, module_seconds=0.0, sync_seconds=0.0)
    reached = tuple(replace(one, latency_seconds=0.0) for one in sheet.collectives)
    return replace(found, measured=replace(ideal, collectives=reached))


def work(nodes: int, gpus: int, micro: int = 1, accumulation: int = 16, nics: int = 1, **layout: Any) -> Workload:
    model, batch = shape(layout.pop("experts", False)), BatchSize(micro, accumulation, 1024)
    settings = {"name": "full-shard", "reason": "", "shard": nodes * gpus, "activation_checkpointing": True, **layout}
    placed = Layout(nodes=nodes, gpus_per_node=gpus, **settings)
    return Workload(model, placed, batch, machine(nics=nics), "adamw_torch", 2)


def item(answer: Cost, name: str, phase: str = "step", place: str = "gpu") -> float:
    return sum(row.bytes for row in answer.rows if (row.item, row.phase, row.place) == (name, phase, place))


def flow(answer: Cost, kind: str) -> float:
    return sum(f.bytes for f in answer.flows if f.kind == kind)


def test_split_experts_are_pinned_by_the_rank_that_has_them() -> None:
    split = estimate_cost(work(2, 2, offload=True, expert_parallel=2, name="expert-parallel"))
    parts = []
    for parameter in BASE.parameters:
        rows = math.ceil(parameter.shape[0] / 4)  # of experts: half of them, in two parts
        parts.append(2 * rows * math.prod(parameter.shape[1:]))
    pinned = 2 * sum(2 ** math.ceil(math.log2(part)) for part in parts)  # two ranks on a host
    assert item(split, "offloaded base weights", place="host") == pinned


def test_split_experts_average_their_adapters_among_their_replicas_only() -> None:
    two = estimate_cost(work(1, 2, experts=True, expert_parallel=2, name="expert-parallel"))
    assert flow(two, "adapter all-reduce") == 2 * (2 - 1) / 2 * 4 * PLAIN
    assert flow(two, "adapter all-reduce, experts") == 0
    hybrid = estimate_cost(work(2, 2, experts=True, shard=2, replicate=2, expert_parallel=2, name="expert-parallel"))
    assert flow(hybrid, "adapter all-reduce, experts") == 2 * (2 - 1) / 2 * 4 * (ALL - PLAIN) / 2


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


def test_every_gpu_can_be_planned_and_cpu_has_no_overlap() -> None:
    for name in GPUS:
        answer = estimate_cost(replace(work(2, 8), machine=replace(machine(name), measured=None)))
        assert answer.step_seconds_low < answer.step_seconds < answer.step_seconds_high
        assert answer.tokens_per_second_low < answer.tokens_per_second < answer.tokens_per_second_high
        assert answer.basis == ("any CPU, not calibrated" if name == "cpu" else "data sheet")
        assert 0 < answer.mfu < 1
        assert name != "cpu" or answer.step_seconds == answer.step_seconds_serial


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


@pytest.mark.parametrize(("mixed", "dropout"), [(True, 0.1), (False, 0.0)])
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


@pytest.mark.parametrize("micro", [2, 32])
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
