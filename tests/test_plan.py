"""Plans of examples and options, one whole and the others by their figures, their choices, text, and a run's length.

`python tests/test_plan.py` rewrites the golden files: read the difference before you commit it.
"""

import itertools
import json
import math
import re
import shlex
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from text_run import make_text_run

from windlass import hardware
from windlass.data.reading import RowCount
from windlass.data.select import RowSet
from windlass.plan import Plan, make_plan
from windlass.plan.cost import HEADROOM, BatchSize
from windlass.plan.rows import Counts, DataSample, RowLengths, SplitSample, make_schedule
from windlass.plan.search import EQUAL, drop_dominated, is_same_layout
from windlass.plan.show import format_rough, print_plan
from windlass.runfile import Data, Train, read_run_file
from windlass.runfile.accelerate import read_accelerate
from windlass.settings import FOUR_BITS

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples" / "mistral-small-4"
GOLDEN = Path(__file__).parent / "golden" / "plan"
TWO_BY_EIGHT = ("cluster.nodes=2", "cluster.gpus_per_node=8", "cluster.nics_per_node=8")
CASES: dict[str, tuple[str, str | None, tuple[str, ...]]] = {
    "train": ("train.yaml", None, ()),
    "train-fsdp": ("train.yaml", "fsdp.yaml", ()),
    "2xH200": ("configs/mistral4small_2xH200.yaml", None, ("cluster.gpus_per_node=2",)),
    "2xH200-on-three-nodes": ("configs/mistral4small_2xH200.yaml", "fsdp.yaml", ()),
    "fsdpv2": ("mistral_fsdpv2.yaml", "config/fsdp_2xH200.yaml", ()),
    "2x8": ("train.yaml", None, TWO_BY_EIGHT),
    "one-80gb": ("one-80gb.yaml", None, ()),
}
# Overrides of train.yaml: each option that costs memory, traffic or time.
CHECKPOINTED = "train.gradient_checkpointing=true"
EXPERTS = ("lora.experts={r: 4}", "lora.lora_dropout=0")
SPLIT = ("layout=expert-parallel", "train.per_device_train_batch_size=16", *EXPERTS)
PAIRS = ("train.objective=dpo", "data.packing=false", "train.per_device_eval_batch_size=96")
OPTIONS: dict[str, tuple[str, ...]] = {
    "experts": ("lora.experts=true", "lora.lora_dropout=0"),
    "packed, checkpointed": ("data.packing=true", CHECKPOINTED),
    "masked": ("data.packing=true", "model.attn_implementation=eager", "layout=full-shard"),
    "masked, few keys": (
        *("model.model_name_or_path=Llama-3.1-8B", "lora.target_modules=all-linear", "layout=resident"),
        *("data.packing=true", "model.attn_implementation=eager"),
    ),
    "dora": ("lora.use_dora=true", "layout=resident", "lora.lora_dropout=0.1", "cluster.gpu=b300"),
    "without dropout": ("lora.lora_dropout=0", "layout=full-shard"),
    "float32": ("layout={name: full-shard, base_dtype: bf16}", "model.torch_dtype=float32", "train.bf16=false"),
    "wide base": ("layout={name: full-shard, base_dtype: bf16}", "model.torch_dtype=float32"),
    "trained embedding": ("lora.modules_to_save=[lm_head, embed_tokens]", "layout=full-shard"),
    "8-bit optimizer": ("lora.r=256", "train.optim=adamw_torch_8bit", "layout=resident"),
    "replicated": ("lora.modules_to_save=[lm_head]", "layout=hybrid", *TWO_BY_EIGHT),
    "large evaluation": ("train.per_device_eval_batch_size=64", "layout=full-shard", "cluster.nodes=6"),
    "split": (*SPLIT, *TWO_BY_EIGHT, CHECKPOINTED),
    "split, selective": (*SPLIT, *TWO_BY_EIGHT, "train.gradient_checkpointing=selective"),
    "split, replicated": (*SPLIT, *TWO_BY_EIGHT, "layout.replicate=2", "layout.shard=8"),
    "split, offloaded": (*SPLIT, *TWO_BY_EIGHT, "layout.offload=true"),
    "split, a100": (*SPLIT, *TWO_BY_EIGHT, "cluster.gpu=a100", CHECKPOINTED),
    "context": ("layout.context_parallel=4", "data.max_length=16384", *TWO_BY_EIGHT),
    "blocks": (
        *("model.model_name_or_path=DeepSeek-V3", "lora.target_modules=all-linear", "layout.base_dtype=fp8"),
        *("cluster.nodes=8", "cluster.gpus_per_node=8"),
    ),
    "dpo": (*PAIRS, "layout=full-shard"),
    "dpo, split": (*PAIRS, *SPLIT, "cluster.nodes=2", "train.per_device_eval_batch_size=400"),
    "cpu": ("cluster.gpu=cpu", "cluster.host_memory_gib=4000", "cluster.nodes=1", "layout.base_dtype=fp8"),
    "one node": ("cluster.nodes=1", "train.per_device_train_batch_size=auto", "data.packing=true", CHECKPOINTED),
}
CASES |= {name: ("train.yaml", None, overrides) for name, overrides in OPTIONS.items()}


@cache
def planned(case: str) -> Plan:
    file, accelerate, overrides = CASES[case]
    settings = read_accelerate(EXAMPLES / accelerate) if accelerate else None
    return make_plan(read_run_file(EXAMPLES / file, overrides, settings), compare=case not in OPTIONS)


@cache
def of_train(*overrides: str, compare: bool = False) -> Plan:
    return make_plan(read_run_file(EXAMPLES / "train.yaml", overrides), compare=compare)


def rounded(value: Any) -> Any:
    """Round figures to six digits, count modules instead of naming them, and shorten paths to the repository's root."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items() if key not in ("matched", "windlass")}
    if isinstance(value, list | tuple):
        return [rounded(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return value.replace(f"{ROOT}/", "") if isinstance(value, str) else value


def figures(record: dict[str, Any]) -> dict[str, Any]:
    """Return a plan in a line: its layout, its batch, its memory by phase and place, its traffic, time and length."""
    memory: dict[str, float] = {}
    for row in record["memory"]["rows"]:
        key = f"{row['phase']} {row['place']}"
        memory[key] = memory.get(key, 0.0) + row["gib"]
    chosen = {
        "layout": record["layout"]["name"],
        "base_dtype": record["layout"]["base_dtype"],
        "micro": record["batch"]["micro"],
        "accumulation": record["batch"]["accumulation"],
        "steps": record["batch"]["steps"],
        "trainable": record["adapter"]["trainable"],
        "layouts": len(record["layouts"]),
        "traffic": sum(flow["bytes"] * flow["per_step"] for flow in record["traffic"]),
    }
    estimate = {key: value for key, value in record["estimate"].items() if isinstance(value, float)}
    seconds = {f"{key} seconds": value for key, value in record["estimate"]["seconds"].items()}
    line: dict[str, Any] = rounded({**chosen, **memory, **estimate, **seconds})
    return line


def test_what_bfloat16_means_in_a_layout_is_noted_where_layouts_differ() -> None:
    wide = ("model.torch_dtype=float32", "train.bf16=true", "model.attn_implementation=sdpa")
    for name, given, noted in (
        ("full-shard", wide, True),
        ("resident", wide, False),
        ("full-shard", wide[2:], False),
        ("full-shard", (*wide, "train.bf16=false"), False),
    ):
        notes = of_train(f"layout.name={name}", "layout.base_dtype=bf16", "cluster.nodes=4", *given).notes
        assert any("are gathered in bfloat16, in which the sum between layers is" in note for note in notes) is noted


def test_the_time_counts_every_evaluation() -> None:
    """Held-out rows each time, and once of the base alone; kept sets with the adapter and without."""
    seconds = []
    for steps in (100, 50, 25):
        made = of_train("train.max_steps=100", "train.eval_strategy=steps", f"train.eval_steps={steps}")
        made = replace(made, evaluated=made.layout.readers * 5, kept=made.layout.readers * 3)
        assert made.seconds is not None
        seconds.append(made.seconds["evaluations"] / made.cost.evaluation_seconds)
    assert [once - before for before, once in itertools.pairwise(seconds)] == pytest.approx([11, 22])
    assert seconds[0] == pytest.approx(5 + 11)


@pytest.mark.parametrize(
    ("given", "noted"),
    [
        (["lora.use_dora=true", "layout.name=resident"], "DoRA rounds its sum twice"),
        (["lora.experts={r: 8, lora_alpha: 16}"], "the grouped product of experts on h200 rounds its sum twice"),
        (["lora.experts={r: 8, lora_alpha: 16}", "cluster.gpu=a100"], ""),
        ([], ""),
    ],
)
def test_a_sum_that_is_rounded_twice_in_training_is_noted(given: list[str], noted: str) -> None:
    notes = [note for note in of_train(*given).notes if "rounds its sum twice" in note]
    assert [note.partition(" in training")[0] for note in notes] == ([noted] if noted else [])


@pytest.mark.parametrize("case", CASES)
def test_plans_are_the_golden_ones(case: str) -> None:
    record = planned(case).as_dict()
    if case == "train":  # all that the plan says
        assert rounded(record) == json.loads((GOLDEN / "train.json").read_text())
    assert figures(record) == json.loads((GOLDEN / "figures.json").read_text())[case]


# --- what the plan chooses ------------------

AUTO = ("train.per_device_train_batch_size=auto", "train.gradient_checkpointing=true", "data.packing=true")


def test_auto_takes_the_fastest_that_fits_and_that_training_can_run() -> None:
    made = planned("train")
    able = [c for c in made.contenders if c.cost.fits and c.here and not c.why_not]
    assert made.cost.step_seconds <= EQUAL * min(c.cost.step_seconds for c in able)
    # By the plan's own figures this is the fastest of all on four nodes and on two of eight.
    for made in (of_train("cluster.nodes=4", compare=True), planned("2x8")):
        assert (made.layout.name, made.layout.reshard_after_forward) == ("expert-parallel", False)
        assert made.layout.reason.startswith("chosen")
        assert "gathered once a step" in made.layout.reason


def test_a_chosen_micro_batch_is_the_fastest_that_leaves_headroom_and_keeps_the_global_batch() -> None:
    rows = "data.max_length=4096", AUTO[1]
    plain, auto = of_train(*rows), of_train(AUTO[0], *rows)
    assert auto.schedule.global_sequences == plain.schedule.global_sequences == 48
    assert auto.batch == min((t for t in auto.tried if t.has_headroom), key=lambda t: t.step_seconds).batch
    assert auto.batch.micro > 1
    assert auto.cost.gpu_gib <= (1 - HEADROOM) * auto.machine.gpu.memory_gib
    assert not auto.tried[-1].has_headroom  # the next larger one was tried, and is too large
    assert auto.cost.step_seconds < plain.cost.step_seconds
    assert plain.tried == ()


def test_layout_without_headroom_is_skipped_and_named() -> None:
    tight = of_train("lora.experts=true", "lora.lora_dropout=0", "lora.r=15")
    resident = next(c for c in tight.contenders if c.name == "resident, FP8")
    assert resident.cost.fits
    assert not resident.cost.has_headroom
    assert resident.cost.step_seconds < tight.cost.step_seconds
    assert "resident, FP8 would be faster, but leaves less than 5% of the GPU free" in tight.layout.reason
    assert tight.cost.gpu_gib <= tight.machine.gpu.memory_gib * (1 - HEADROOM)
    forced = of_train("lora.experts=true", "lora.lora_dropout=0", "layout.name=resident")
    assert forced.layout.name == "resident"


def test_auto_divides_a_given_global_batch_also_on_other_numbers_of_nodes() -> None:
    made = of_train(*AUTO, "train.global_batch_size=72", "train.gradient_accumulation_steps=24", compare=True)
    assert [t.batch.micro * t.batch.accumulation for t in made.tried] == [24] * len(made.tried)
    assert made.schedule.global_sequences == 72
    with refused("broken-rule", "train.global_batch_size=70"):
        of_train(*AUTO, "train.global_batch_size=70")


def test_advised_gain_equals_the_changed_plan() -> None:
    plain, packed = of_train(compare=True), of_train("data.packing=true", compare=True)
    advice = {advice.change: advice for advice in plain.advice}["data.packing: true"]
    assert advice.gain == pytest.approx(packed.cost.tokens_per_second / plain.cost.tokens_per_second)
    assert advice.gain > 5
    assert not [advice for advice in packed.advice if "packing" in advice.change]
    made = of_train("layout=full-shard", compare=True)
    changes = [advice.change for advice in made.advice]
    assert changes[0] == "all of these"
    assert {"data.packing: true", "train.per_device_train_batch_size: auto", "layout: auto"} <= set(changes)
    for advice in made.advice:
        assert advice.gain == pytest.approx(advice.tokens_per_second / made.cost.tokens_per_second)


@pytest.mark.parametrize(
    "key",
    ["layout.replicate=1", "layout.expert_parallel=4"],
)
def test_no_key_of_layout_is_without_effect(key: str) -> None:
    made = of_train(key, "cluster.nodes=2", "cluster.gpus_per_node=4", compare=True)
    name, value = key.removeprefix("layout.").split("=")
    assert str(getattr(made.layout, name)).lower() == value
    if made.layout.reason.startswith("chosen"):
        assert {str(getattr(c.layout, name)).lower() for c in made.contenders} == {value}


# --- what the run file rules out or changes ------------------


def test_model_and_adapter_rule_out_settings() -> None:
    in_16_bits = ("model.model_name_or_path=Mixtral-8x7B-v0.1", "lora.target_modules=[q_proj]")
    for code, *overrides in (
        ("base-dtype", *in_16_bits, "layout.base_dtype=fp8"),
        ("float16", "train.bf16=false", "train.fp16=true"),
        ("base-dtype", "lora.use_dora=true", "cluster.nodes=1", "layout.base_dtype=fp8"),
    ):
        with refused(code, overrides[-1]):
            of_train(*overrides)
    rows = of_train("lora.use_dora=true", "cluster.nodes=1", "layout=full-shard").contenders  # one GPU has all of it
    assert not [row for row in rows if row.layout.base_dtype == "fp8"]
    asked = ("train.optim=adafactor", "lora.lora_dropout=0", "cluster.nodes=2", "layout=expert-parallel")
    for keys in (("lora.target_modules=all",), ("lora.experts=true",)):
        with refused("barred-layout"):
            of_train(*asked, *keys)
    assert of_train(*asked, "lora.target_modules=all-linear").layout.expert_parallel == 2


# Qwen3-30B-A3B, on processors.
ON_CPU = (
    "cluster.nodes=1",
    "cluster.gpu=cpu",
    "model.model_name_or_path=Qwen3-30B-A3B",
    "lora.target_modules=[q_proj,k_proj,v_proj,o_proj]",
)


@pytest.mark.parametrize(("gib", "ranks", "fits"), [(256, 4, True), (60, 2, False)])
def test_a_rank_on_a_cpu_is_compared_with_its_share_of_the_memory(
    gib: float, ranks: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = hardware.read_this_machine()
    monkeypatch.setattr(hardware, "read_this_machine", lambda: type(here)((), 8, gib, None))
    made = make_plan(read_run_file(EXAMPLES / "train.yaml", (*ON_CPU, f"cluster.gpus_per_node={ranks}")))
    assert (made.machine.gpu.memory_gib, made.machine.host_memory_gib) == (gib / ranks, gib)
    assert made.cost.fits == (made.cost.gpu_gib <= gib / ranks) == fits
    assert made.cost.host_gib >= ranks * made.cost.gpu_gib
    assert not [c for c in made.contenders if c.layout.offload]  # a CPU has nowhere to offload from
    given = of_train(*ON_CPU, f"cluster.gpus_per_node={ranks}", "cluster.host_memory_gib=1000")
    assert given.machine.gpu.memory_gib == 1000 / ranks
    figures = "cluster.gpu={name: cpu, memory_gib: 4, bf16_tflops: 1, memory_gb_per_second: 10}"
    small = of_train(*ON_CPU[:1], *ON_CPU[2:], figures, "cluster.gpus_per_node=2")
    assert (small.machine.gpu.memory_gib, small.machine.host_memory_gib, small.cost.fits) == (4, 8, False)


def test_gpu_runs_are_refused_on_a_cpu_and_vice_versa(tmp_path: Path) -> None:
    with refused("offload-on-cpu", "layout.offload=true"):
        of_train(*ON_CPU, "cluster.gpus_per_node=2", "layout.offload=true")
    (tmp_path / "fsdp.yaml").write_text("distributed_type: FSDP\nuse_cpu: true\nnum_processes: 2\n")
    file = read_accelerate(tmp_path / "fsdp.yaml")
    sizes = ("cluster.nodes=1", "cluster.gpus_per_node=2")
    with refused("cpu-for-gpu", "fsdp.yaml:2: use_cpu"):
        make_plan(read_run_file(EXAMPLES / "train.yaml", sizes, file))
    assert make_plan(read_run_file(EXAMPLES / "train.yaml", (*ON_CPU, *sizes), file)).machine.gpu.name == "cpu"
    # A network is needed also if an Accelerate file sets the nodes.
    (tmp_path / "fsdp.yaml").write_text("distributed_type: FSDP\nnum_machines: 2\nnum_processes: 2\n")
    (tmp_path / "run.yaml").write_text("model: {model_name_or_path: Qwen3-30B-A3B}\ncluster: {gpu: h200}\n")
    with refused("no-network"):
        make_plan(read_run_file(tmp_path / "run.yaml", ON_CPU[-1:], read_accelerate(tmp_path / "fsdp.yaml")))


@pytest.mark.fault("a router's loss for a model without experts", "`windlass plan`", "has no routed experts")
def test_a_dense_models_balancing_loss_is_refused(tmp_path: Path) -> None:
    run = "model: {model_name_or_path: Mistral-7B-v0.1}\ntrain: {router_aux_loss_coef: 0.01}\ncluster: {gpu: h200}\n"
    (tmp_path / "run.yaml").write_text(run)
    with refused("no-experts", "run.yaml:2: train.router_aux_loss_coef") as problems:
        make_plan(read_run_file(tmp_path / "run.yaml", ON_CPU[-1:]))
    assert "has no routed experts" in problems[0].problem


def test_packed_rows_are_masked_except_for_attention_within_documents() -> None:
    masked = planned("masked").cost.flops_per_token
    for name in ("sdpa", "flash_attention_2", "flex_attention"):
        assert of_train("data.packing=true", f"model.attn_implementation={name}").cost.flops_per_token < masked
    on_amd = of_train("data.packing=true", "cluster.gpu=mi300x")
    assert on_amd.cost.flops_per_token == masked
    assert "mi300x: windlass trains on NVIDIA's GPUs" in on_amd.warnings[0].text


@cache
def of_pairs(objective: str, *overrides: str) -> Plan:
    return of_train(f"train.objective={objective}", "data.packing=auto", *overrides, compare=True)


def test_a_micro_batch_of_pairs_costs_what_twice_as_many_sequences_do() -> None:
    rows = "train.per_device_train_batch_size=2", "train.per_device_eval_batch_size=2", "data.packing=false"
    sft = of_train(*rows, "layout=full-shard")
    pairs = of_pairs("orpo", "layout=full-shard")
    assert (pairs.batch.micro, pairs.batch.sides, pairs.batch.tokens) == (1, 2, sft.batch.tokens)
    assert (pairs.cost.gpu_gib, pairs.cost.step_seconds) == (sft.cost.gpu_gib, sft.cost.step_seconds)
    assert pairs.cost.evaluation_seconds == 2 * sft.cost.evaluation_seconds
    # Steps count pairs: as many rows make twice the steps of a micro-batch of two.
    assert pairs.schedule.global_sequences * 2 == sft.schedule.global_sequences
    assert pairs.schedule.tokens_per_step == sft.schedule.tokens_per_step
    assert not any("packing" in advice.change for advice in pairs.advice)
    assert not any("packing" in warning.override for warning in pairs.warnings)


def test_pairs_are_never_packed_by_themselves() -> None:
    free = ("train.per_device_train_batch_size=null", "train.gradient_accumulation_steps=auto")
    assert of_train("data.packing=auto", *free).run.data.packs
    pairs = of_pairs("orpo", *free)
    assert not pairs.run.data.packs
    assert any("data.packing false" in note for note in pairs.notes)


def test_a_rate_of_sft_is_warned_about_for_pairs() -> None:
    def warned(*overrides: str) -> list[str]:
        return [warning.override for warning in of_pairs("dpo", *overrides).warnings if "rate" in warning.text]

    assert warned() == ["train.learning_rate=1e-5"]  # the file sets 1e-4
    assert not warned("train.learning_rate=1e-5")
    assert not any("rate" in warning.text for warning in of_train().warnings)


# --- what is printed ------------------


def test_a_plan_of_pairs_says_pairs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_plan(of_pairs("dpo"), compare=True)
    out = capsys.readouterr().out
    batch = next(line for line in out.splitlines() if line.startswith("batch"))
    assert batch.startswith("batch    48 pairs a step of up to 2 x 1,024 tokens")
    rows = of_pairs("dpo").schedule.rows or 0
    assert f"reference  {rows + (of_pairs('dpo').evaluated or 0):,} pairs, " in out
    assert "48 pairs a step)" in out
    assert "sequence" not in out
    print_plan(of_pairs("orpo"))
    assert "reference" not in capsys.readouterr().out


def pasted(text: str) -> dict[str, list[str]]:
    """Return what `plan --compare` prints to paste for each row, as a shell reads it."""
    block = text.partition("take a row:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^ (\S.*)\n((?:   .*\n?)+)", block, re.MULTILINE)
    return {
        name: [word.removeprefix("--override=") for word in shlex.split(words.replace("\\\n", ""))]
        for name, words in found
    }


@pytest.mark.parametrize(
    ("batch", "overrides"),
    [("  global_batch_size: 48 #", ()), ("  gradient_accumulation_steps:", TWO_BY_EIGHT)],
)
@pytest.mark.takes("makes many plans")
def test_every_compared_layout_equals_its_own_plan(
    batch: str, overrides: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (EXAMPLES / "train.yaml").read_text()
    (tmp_path / "run.yaml").write_text(text.replace("  gradient_accumulation_steps:", batch))
    made = make_plan(read_run_file(tmp_path / "run.yaml", overrides))
    rows = drop_dominated(made.contenders, made.layout)
    assert [c for c in rows if is_same_layout(c.layout, made.layout)]
    assert len({c.layout.nodes for c in rows}) > 2
    print_plan(made, compare=True)
    changes = pasted(capsys.readouterr().out)
    assert len(changes) == len(rows)
    for row in rows[::3]:
        nodes = f"{row.layout.nodes} node{'s' * (row.layout.nodes > 1)}: "
        name = row.name if row.here else nodes + row.name.rpartition(", on ")[0]
        written = read_run_file(tmp_path / "run.yaml", (*overrides, *changes[name]))
        again = make_plan(written, compare=bool(overrides))  # which changes nothing of the plan itself
        assert is_same_layout(again.layout, row.layout)
        assert again.batch == row.cost.batch
        assert again.cost.step_seconds == pytest.approx(row.cost.step_seconds), row.name
        assert again.cost.gpu_gib == pytest.approx(row.cost.gpu_gib)
        assert again.gpu_hours == pytest.approx(made.estimate_gpu_hours(row))
        # Other numbers of nodes take the nearest global batch that their ranks can share.
        assert abs(again.schedule.global_sequences - made.schedule.global_sequences) <= row.layout.ranks / 2
    for c in made.contenders:
        if c.here and not c.why_not and c not in rows:
            better = [o.cost for o in rows if o.layout.name == c.layout.name]
            assert any(o.gpu_gib <= c.cost.gpu_gib and o.step_seconds <= c.cost.step_seconds for o in better)


# Runs that do not fit, and what they are told.
TOO_LARGE = {
    "train.per_device_eval_batch_size": (
        "layout=full-shard",
        "cluster.nodes=4",
        "train.per_device_eval_batch_size=512",
    ),
    "train.gradient_checkpointing": ("layout=full-shard", "train.per_device_train_batch_size=16"),
    "train.per_device_train_batch_size": (
        *("layout=full-shard", "train.per_device_train_batch_size=1024", "train.gradient_checkpointing=true"),
        "train.gradient_accumulation_steps=1",
    ),
    "layout.name: full-shard": ("layout=no-reshard",),
    "layout.name: expert-parallel": ("layout=no-reshard", *TWO_BY_EIGHT, "cluster.gpu=a100-40gb"),
    "layout.reshard_after_forward": (
        *("layout={name: hybrid, reshard_after_forward: false, base_dtype: bf16}", "train.gradient_checkpointing=true"),
        *("cluster.nodes=2", "cluster.gpus_per_node=3"),
    ),
    "layout.offload: true": ("layout=full-shard", "cluster.gpu=a100-40gb", "train.gradient_checkpointing=true"),
    "layout.offload: false": ("layout=full-shard", "layout.offload=true", "cluster.host_memory_gib=64"),
    "layout.base_dtype: nf4": ("cluster.nodes=1", "cluster.gpu=h100"),
}


@pytest.mark.parametrize("key", TOO_LARGE)
def test_suggested_overrides_fit_when_pasted(key: str) -> None:
    made = of_train(*TOO_LARGE[key])
    assert not made.cost.fits
    assert key in made.cost.remedy
    pasted = re.search(r" with (.*) it needs", made.cost.remedy)
    assert pasted, made.cost.remedy
    again = of_train(*TOO_LARGE[key], *(one.replace(": ", "=") for one in pasted[1].split(", ")))
    assert again.cost.fits, made.cost.remedy


def test_no_layout_is_suggested_that_the_run_can_not_have() -> None:
    whole = of_train("layout=resident", "lora.use_dora=true")
    assert not whole.cost.fits
    assert "needs the whole base on each GPU, take GPUs with more memory" in whole.cost.remedy
    assert "layout.name" not in whole.cost.remedy


def test_the_full_model_in_4_bits_fits_one_gpu_of_80_gb() -> None:
    """As in the example: suggested if nothing else fits, never chosen by itself."""
    made = make_plan(read_run_file(EXAMPLES / "one-80gb.yaml"))
    assert (made.layout.base_dtype, made.machine.gpu.name) == ("nf4", "h100")
    assert made.cost.has_headroom
    assert made.batch.tokens >= 8192
    unasked = make_plan(read_run_file(EXAMPLES / "one-80gb.yaml", ["layout=auto"]))
    assert unasked.layout.base_dtype == "fp8"
    assert "with layout.base_dtype: nf4 it needs" in unasked.cost.remedy
    assert re.search(
        r"about [\d,]{5,} tokens/s with full rows, and 4 bits change each weight by about 9%", unasked.cost.remedy
    )
    assert not any(c.layout.base_dtype in FOUR_BITS for c in unasked.contenders)


def test_settings_incompatible_with_4_bits_are_refused() -> None:
    for code, place, *more in (
        ("base-dtype", "layout.base_dtype=nf4", "lora.use_dora=true", "layout.name=resident"),
        ("offload-of-4-bits", "layout.offload=true", "layout.base_dtype=nf4", "layout.name=full-shard"),
    ):
        with refused(code, f"--override {place}") as problems:
            of_train(place, *more)
        assert len(problems) == 1
        assert "base_dtype: bf16" in problems[0].hint or "write bf16" in problems[0].hint


@pytest.mark.parametrize("case", ["2xH200-on-three-nodes", "2x8", "too small"])
def test_plan_prints_the_verdict_first_in_fifteen_lines(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("cluster.gpu=l4", "lora.experts=true", "lora.lora_dropout=0", AUTO[0])
    made = of_train(*small, compare=True) if case == "too small" else planned(case)
    monkeypatch.setenv("COLUMNS", "80")
    print_plan(made)
    lines = capsys.readouterr().out.splitlines()
    cut = [line for line in lines if line.startswith("warning") and line.endswith(" …")]
    assert "x 1 micro-batches" not in " ".join(lines)
    assert len(lines) <= 15 + len(cut)
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("fits " if made.cost.fits else "does not fit ")
    assert f"{made.cost.gpu_gib:,.1f} GiB of {made.machine.gpu.memory_gib:,.1f} GiB a GPU" in lines[0]
    assert made.cost.fits or lines[1].startswith("hint ")
    low, high = format_rough(made.cost.tokens_per_second_low), format_rough(made.cost.tokens_per_second_high)
    assert f"{low} to {high} tokens/s" in "\n".join(lines)
    shown = [line.split()[0] for line in lines]
    assert {"speed", "time", "layout", "limit", "batch", "more"} <= set(shown)
    # Each warning has a line at least; where one is cut, the last line says how to see the rest.
    assert shown.count("warning") == len(made.warnings)
    assert bool(cut) == ("--details: warnings in full, " in lines[-1])


@pytest.mark.parametrize(("case", "columns"), [("train", 80), ("2x8", 120)])
def test_in_tables_no_digit_is_cut(
    case: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = planned(case)
    monkeypatch.setenv("COLUMNS", str(columns))
    print_plan(made, details=True, compare=True)
    shown = capsys.readouterr().out
    assert "Memory at the peak\n" in re.sub(r" +$", "", shown, flags=re.MULTILINE)  # a title on one line
    assert "more     --explain: every row" in shown
    assert max(map(len, shown.splitlines())) <= columns
    rates = []
    for row in drop_dominated(made.contenders, made.layout):
        rate, seconds = f"{row.cost.tokens_per_second:,.0f}", f"{row.cost.step_seconds:,.2f}"
        if row.here:
            assert re.search(rf" {row.cost.gpu_gib:,.1f} .* {seconds} +{rate}\b", shown), row.name
            rates.append((not row.cost.fits, -row.cost.tokens_per_second, rate))
        else:
            hours = rf"{made.estimate_gpu_hours(row):,.1f}" if made.estimate_gpu_hours(row) is not None else ""
            assert re.search(rf" {row.layout.nodes} .* {row.cost.gpu_gib:,.1f} +{rate} +{hours}", shown), row.name
    table = shown.partition("Layouts of this run")[2].partition("The best layout")[0]
    places = [table.index(f" {rate} ") for *_, rate in sorted(rates)]
    assert places == sorted(places)  # what fits first, by tokens/s
    assert all(f"\n {advice.change} " in shown for advice in made.advice)
    for memory in made.cost.rows:
        if (memory.place, memory.phase) == ("gpu", "step"):
            assert re.search(rf"{memory.item} +{memory.bytes / hardware.GIB:,.2f}", shown)


@pytest.mark.takes("makes many plans")
def test_unlikely_settings_are_warned_about() -> None:
    def texts(*overrides: str) -> dict[str, str]:
        return {warning.text: warning.override for warning in of_train(*overrides, compare=True).warnings}

    # What the run is, the warning, and what the override that it prints makes of it: no such warning.
    cases: dict[tuple[str, ...], str] = {
        ("data.packing=true", "train.gradient_accumulation_steps=100"): "optimizer step",
        (): "of data.max_length",
        ("data.max_length=64",): "are cut at data.max_length 64",
        ("lora.r=3000",): "is larger than its",
        ("lora.r=16", "lora.experts=true", "lora.lora_dropout=0"): "trained parameters for",
        ("data.packing=true", "layout=full-shard", "cluster.gpus_per_node=8"): "too small for the GPU",
    }
    for overrides, expected in cases.items():
        found = {text: key for text, key in texts(*overrides).items() if expected in text}
        assert len(found) == 1, (overrides, texts(*overrides))
        ((text, key),) = found.items()
        assert key, text
        assert not [again for again in texts(*overrides, key) if expected in again], key
    for gpu, warns in {"Tesla T4": True, "l4": False}.items():
        assert any("no bfloat16 arithmetic" in text for text in texts(f"cluster.gpu={gpu}")) is warns
    # A short run that max_steps asks for, and rows that fill their sequences, are meant so.
    assert texts("data.packing=true", "train.max_steps=5", AUTO[0]) == {}


@pytest.mark.fault(
    "rows whose positions depend on the rows beside them",
    "`windlass plan`",
    "so a row's loss depends on its micro-batch",
)
def test_a_rope_type_that_depends_on_the_micro_batch_is_said(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "keel"}\n' * 40)
    config: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 512, "hidden_size": 64}
    config |= {"num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 64}
    config |= {"num_key_value_heads": 2, "rms_norm_eps": 1e-6}

    def cautions(rope: dict[str, Any], *overrides: str) -> dict[str, str]:
        (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": rope}))
        (tmp_path / "run.yaml").write_text(
            f"model: {{model_name_or_path: {tmp_path}}}\nlora: {{target_modules: [q_proj]}}\n"
            f"data: {{dataset_name_or_path: {tmp_path}/rows.jsonl, text_field: text, max_length: 64, packing: false}}\n"
            f"train: {{output_dir: {tmp_path}/run, max_steps: 4, per_device_train_batch_size: 4}}\n"
            "cluster: {nodes: 1, gpus_per_node: 1, gpu: h100}\n"
        )
        plan = make_plan(read_run_file(tmp_path / "run.yaml", overrides))
        said = "so a row's loss depends on its micro-batch"
        return {caution.text: caution.override for caution in plan.warnings if said in caution.text}

    factors = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0}
    longrope = factors | {"original_max_position_embeddings": 32}
    ((text, override),) = cautions(longrope).items()
    assert text.startswith("rope type longrope: a row longer than 32 tokens changes the positions of all rows")
    assert cautions(longrope, override) == {}
    assert cautions(longrope, "data.max_length=32") == {}
    assert [*cautions(longrope, override, "data.packing=true").values()] == ["data.packing=false"]
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    assert cautions(dynamic) == {}
    assert len(cautions(dynamic, "data.max_length=128")) == 1


# --- the run's length ------------------


def count(rows: int | None) -> Counts:
    return Counts(rows, None, 0, RowLengths(128), None, "counted" if rows else "a stream", 0.0)


@pytest.mark.parametrize(
    ("rows", "ranks", "micro", "accumulation", "steps"),
    [
        (48, 3, 1, 16, 1),
        (49, 3, 1, 16, 2),
        (1, 8, 4, 4, 1),
    ],
)
def test_steps_of_an_epoch(rows: int, ranks: int, micro: int, accumulation: int, steps: int) -> None:
    adapter, batch = planned("train").adapter, BatchSize(micro, accumulation, 128)
    made = make_schedule(Train(num_train_epochs=3), batch, ranks, adapter, count(rows))
    assert (made.steps_per_epoch, made.steps) == (steps, 3 * steps)
    assert made.global_sequences == ranks * micro * accumulation
    assert made.warmup_steps == math.ceil(3 * steps * 0.05)
    assert make_schedule(Train(), batch, ranks, adapter, count(None)).steps is None
    assert make_schedule(Train(max_steps=7, save_steps=2), batch, ranks, adapter, count(None)).checkpoints == 3


def test_rows_as_sequences() -> None:
    def estimate(rows: RowCount, *, packing: bool, known: bool = True) -> tuple[int | None, int, str]:
        data = Data.model_validate({"dataset_name_or_path": "x", "max_length": 1000, "packing": packing})
        groups = [[(100, 1)]] if known else []
        split = SplitSample(RowSet("train", data, str), rows, groups=groups)
        counts = DataSample([split], [], None).estimate(data)
        assert counts.tolerance is None
        return counts.sequences, counts.lengths.usual, counts.reason

    for rows in (RowCount(1000, "counted"), RowCount(2000, "counted", blank=1000)):
        assert estimate(rows, packing=False)[:2] == (1000, 100)
        assert estimate(rows, packing=True)[:2] == (100, 1000)
    assert estimate(RowCount(1000, "counted"), packing=False, known=False) == (1000, 1000, "counted")
    assert estimate(RowCount(None, "a stream"), packing=True, known=False) == (None, 1000, "a stream")


def write_json(value: Any, indent: str = "") -> str:
    """Return JSON with a line for each value that fits on one."""
    line = json.dumps(value)
    if len(indent + line) < 120 or not isinstance(value, dict | list):
        return line
    inner = indent + " "
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {write_json(item, inner)}" for key, item in value.items()]
    else:
        items = [write_json(item, inner) for item in value]
    first, last = ("{", "}") if isinstance(value, dict) else ("[", "]")
    return first + "\n" + ",\n".join(inner + item for item in items) + f"\n{indent}{last}"


if __name__ == "__main__":
    (GOLDEN / "train.json").write_text(write_json(rounded(planned("train").as_dict())) + "\n")
    rows = [f"{json.dumps(name)}: {json.dumps(figures(planned(name).as_dict()))}" for name in CASES]
    (GOLDEN / "figures.json").write_text("{\n" + ",\n".join(rows) + "\n}\n")


@pytest.mark.parametrize("has", [True, False])
def test_bfloat16_that_a_processor_only_emulates(has: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.hardware.has_bf16_products", lambda: has)
    file = make_text_run(tmp_path / "made")

    def planned(*overrides: str) -> Any:
        return make_plan(read_run_file(file, list(overrides)))

    assert planned("model.torch_dtype=float32", "train.bf16=auto").run.train.bf16 is has
    monkeypatch.setattr("windlass.hardware.read_gpu_name", lambda: "cpu")
    unnamed = planned("model.torch_dtype=float32", "train.bf16=auto", "cluster.gpu=null")
    assert unnamed.run.train.bf16 is has, "this machine's"
    cautions = planned("train.bf16=true").warnings
    warned = [each for each in cautions if "no instructions for bfloat16" in each.text]
    assert len(warned) == (0 if has else 1)
