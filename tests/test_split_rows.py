"""Rows split over ranks, as planned: what is refused, and how many rows, tokens and steps follow."""

import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from windlass.launch.check.bandwidth import BandwidthResult, check_groups
from windlass.launch.check.results import PASS, WARN
from windlass.model import find_published_base
from windlass.model.quantization import published_dtype
from windlass.plan import Plan, make_plan
from windlass.plan.longest import find_planned_longest_row
from windlass.plan.memory import Tokens, forward_bytes, layer_bytes, list_training_moments
from windlass.plan.search import drop_dominated, is_same_layout, list_overrides
from windlass.plan.split_rows import check_split_rows, pad_to_pieces, why_not_split
from windlass.runfile import read_run_file
from windlass.runfile.accelerate import read_accelerate
from windlass.runfile.importers import import_file

KEY = "layout.context_parallel"
ONE_ROW = ("train.per_device_train_batch_size=1", "train.gradient_accumulation_steps=2")
FILE = """
model: {model_name_or_path: Mistral-Small-4-119B-2603}
data: {val_split: null, max_length: 16384, packing: true}
train: {eval_strategy: "no", max_steps: 10, gradient_checkpointing: true}
cluster: {gpu: h200, gpus_per_node: 8, network: infiniband-400}
"""


def planned(folder: Path, *overrides: str, accelerate: str = "", compare: bool = False) -> Plan:
    path = folder / "run.yaml"
    path.write_text(FILE)
    (folder / "fsdp.yaml").write_text(f"distributed_type: FSDP\n{accelerate}")
    file = read_accelerate(folder / "fsdp.yaml") if accelerate else None
    return make_plan(read_run_file(path, overrides, file), compare=compare)


# --- what is refused ------------------

REFUSED: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "does not divide": ("ranks-not-divisible", KEY, (f"{KEY}=3",)),
    "more than the ranks": ("ranks-not-divisible", KEY, (f"{KEY}=16",)),
    "one rank": ("ranks-not-divisible", KEY, (f"{KEY}=2", "cluster.gpus_per_node=1")),
    "rows shorter than the pieces": ("row-too-short", "data.max_length", (f"{KEY}=8", "data.max_length=15")),
    "flash": ("not-with-split-rows", "model.attn_implementation", ("model.attn_implementation=flash_attention_2",)),
    "eager": ("not-with-split-rows", "model.attn_implementation", ("model.attn_implementation=eager",)),
    "dpo": ("not-with-split-rows", "train.objective", ("train.objective=dpo", "data.packing=false")),
    "orpo": ("not-with-split-rows", "train.objective", ("train.objective=orpo", "data.packing=false")),
    "compile": ("not-with-split-rows", "train.compile", ("train.compile=true",)),
    "sweep": ("not-with-split-rows", KEY, ("sweep={lora.r: [4, 8]}",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_split_rows_do_not_work_with_are_refused(case: str, tmp_path: Path) -> None:
    code, place, overrides = REFUSED[case]
    number = () if any(override.startswith(KEY) for override in overrides) else (f"{KEY}=2",)
    with refused(code) as problems:
        planned(tmp_path, *number, *overrides)
    assert [problem for problem in problems if problem.code == code and place in problem.where and problem.hint]


def test_families_are_named_that_carry_a_state_or_are_not_proven(tmp_path: Path) -> None:
    base = find_published_base("Mistral-Small-4-119B-2603")
    assert base is not None
    assert why_not_split(base) == ""
    unproven = replace(base, family=replace(base.family, model_type="gpt2", causal_lm="GPT2LMHeadModel"))
    assert "not proven for GPT2LMHeadModel" in why_not_split(unproven)
    carrying = replace(base, family=replace(base.family, without_formula=3, causal_lm="NemotronHForCausalLM"))
    assert "3 of 36 layers of NemotronHForCausalLM carry a state" in why_not_split(carrying)
    loaded = planned(tmp_path, f"{KEY}=2").loaded
    request = planned(tmp_path, f"{KEY}=2").request
    for other in (unproven, carrying):
        problems = check_split_rows(request, loaded, other)
        assert [(problem.code, KEY in problem.where) for problem in problems] == [("not-splittable", True)]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_rows_length_are_refused(kind: str) -> None:
    base = find_published_base("Mistral-Small-4-119B-2603")
    assert base is not None
    scaled: dict[str, Any] = {**base.config, "rope_parameters": {"rope_type": kind}}
    assert kind in why_not_split(replace(base, config=scaled))


# --- what follows ------------------


@pytest.mark.parametrize("split", [1, 2, 4, 8])
def test_a_step_has_the_rows_of_as_many_readers_as_there_are_groups(split: int, tmp_path: Path) -> None:
    made = planned(tmp_path, f"{KEY}={split}", "train.gradient_accumulation_steps=2", "layout.name=full-shard")
    assert (made.layout.context_parallel, made.layout.readers) == (split, 8 // split)
    assert made.schedule.global_sequences == 2 * 8 // split
    assert made.schedule.tokens_per_step == made.schedule.global_sequences * 16384
    work = replace(made.search.work, layout=made.layout)
    assert work.tokens * split == 16384
    assert made.as_dict()["layout"]["context_parallel"] == split


def test_a_global_batch_is_divided_among_the_groups(tmp_path: Path) -> None:
    made = planned(tmp_path, f"{KEY}=4", "train.global_batch_size=6")
    assert made.batch.micro * made.batch.accumulation == 3
    with refused("broken-rule", "train.global_batch_size=7") as problems:
        planned(tmp_path, f"{KEY}=4", "train.global_batch_size=7")
    assert "1 per 4 GPUs that split rows x 2 = 2" in problems[0].problem
    assert "set it to 6 or 8" in problems[0].hint


def test_rows_are_padded_to_whole_pieces() -> None:
    assert [pad_to_pieces(tokens, 4) for tokens in (1, 8, 9, 16)] == [8, 8, 16, 16]
    assert pad_to_pieces(9, 1) == 9


def test_epochs_count_the_rows_of_groups(tmp_path: Path) -> None:
    lines = "".join('{"text": "%s"}\n' % ("word " * 50) for _ in range(640))
    (tmp_path / "rows.jsonl").write_text(lines)
    data = (f"data.dataset_name_or_path={tmp_path}/rows.jsonl", "data.packing=false", "data.max_length=512")
    epochs = ("train.max_steps=-1", "train.num_train_epochs=1", "train.gradient_accumulation_steps=1")
    steps = [planned(tmp_path, f"{KEY}={split}", *data, *epochs).schedule.steps for split in (1, 4)]
    assert steps == [80, 320]


def test_compared_layouts_have_the_same_split(tmp_path: Path) -> None:
    made = planned(tmp_path, f"{KEY}=8", compare=True)
    assert {c.layout.context_parallel for c in made.contenders} == {8}
    assert all(c.layout.ranks % 8 == 0 for c in made.contenders)
    three = planned(tmp_path, f"{KEY}=3", "cluster.gpus_per_node=3", compare=True)
    assert all(c.layout.ranks % 3 == 0 for c in three.contenders)


# --- what it costs ------------------


def test_activations_are_split_and_keys_and_values_of_full_rows_are_not(tmp_path: Path) -> None:
    one, four = (planned(tmp_path, f"{KEY}={split}", "layout.name=full-shard", *ONE_ROW) for split in (1, 4))
    works = [replace(made.search.work, layout=made.layout, batch=made.batch) for made in (one, four)]
    kept = [list_training_moments(work)["loss's backward"][0].bytes for work in works]
    assert kept[1] * 4 == pytest.approx(kept[0])
    assert four.cost.gpu_gib < one.cost.gpu_gib
    layer = four.search.work.shape.layers[0]
    assert layer.gathered == 32 * 128 + 32 * 128  # expanded from the latent: keys and values of all heads
    assert [flow.kind for flow in four.cost.flows if flow.kind.startswith("keys")] == [
        "keys all-gather forward",
        "keys reduce-scatter",
    ]
    gather = next(flow for flow in four.cost.flows if flow.kind == "keys all-gather forward")
    assert gather.bytes == 3 / 4 * 16384 * layer.gathered * 36 * 2
    assert gather.per_step == 2 * four.batch.accumulation  # and again when layers are recomputed
    assert gather.fabric == "nvlink4"


def test_received_keys_and_values_are_those_of_all_ranks_of_a_group(tmp_path: Path) -> None:
    made = planned(tmp_path, f"{KEY}=4", "layout.name=full-shard", *ONE_ROW)
    layer = replace(made.search.work.shape.layers[0], expert=0, mlp=0)  # attention is all there is
    tokens = Tokens.of(replace(made.search.work, layout=made.layout, batch=made.batch))
    two, four = (replace(tokens, split=split) for split in (2, 4))
    keys = tokens.count * layer.gathered * tokens.width
    assert layer_bytes(layer, four) - layer_bytes(layer, two) == 2 * keys  # kept for the backward
    assert forward_bytes(layer, 4096, four) - forward_bytes(layer, 4096, two) == 2 * 2 * keys  # and as received


def test_groups_within_a_node_use_its_links_and_others_the_network(tmp_path: Path) -> None:
    def fabric(*overrides: str) -> str:
        made = planned(tmp_path, "layout.name=full-shard", *overrides)
        return next(flow.fabric for flow in made.cost.flows if flow.kind == "keys reduce-scatter")

    two = ("cluster.nodes=2", "cluster.gpus_per_node=4")
    assert fabric(*two, f"{KEY}=4") == "nvlink4"
    assert fabric(*two, f"{KEY}=8") == "infiniband-400"
    # Consecutive ranks of which one is on each node
    assert fabric("cluster.nodes=2", "cluster.gpus_per_node=3", f"{KEY}=2") == "infiniband-400"


def test_auto_splits_rows_only_if_they_do_not_fit_otherwise(tmp_path: Path) -> None:
    free = ("train.gradient_checkpointing=auto", "train.gradient_accumulation_steps=2")
    short = planned(tmp_path, *free)
    assert short.layout.context_parallel == 1
    assert {c.layout.context_parallel for c in short.contenders} == {1}
    long = planned(tmp_path, *free, "data.max_length=524288")
    assert long.layout.context_parallel > 1
    assert long.cost.fits
    assert long.layout.activation_checkpointing
    assert "rows are split over" in long.layout.reason
    assert long.schedule.global_sequences == short.schedule.global_sequences  # a step has the rows that it had
    kept = planned(tmp_path, *free, "data.max_length=524288", f"{KEY}=1")
    assert kept.layout.context_parallel == 1
    assert not kept.cost.fits
    unproven = planned(tmp_path, *free, "data.max_length=524288", "train.compile=true")
    assert unproven.layout.context_parallel == 1


def test_every_compared_split_equals_its_own_plan(tmp_path: Path) -> None:
    long = planned(tmp_path, "data.max_length=524288")
    shown = [c for c in drop_dominated(long.contenders, long.layout) if c.layout.context_parallel > 1]
    assert shown
    for candidate in shown:
        overrides = list_overrides(candidate, long.loaded, published_dtype(long.base))
        again = planned(tmp_path, "data.max_length=524288", *overrides)
        assert is_same_layout(again.layout, candidate.layout), candidate.name
        assert again.cost.step_seconds == pytest.approx(candidate.cost.step_seconds)
        assert again.schedule.global_sequences == long.schedule.global_sequences


def test_the_hint_of_a_layout_that_does_not_fit_is_a_setting_that_does(tmp_path: Path) -> None:
    made = planned(tmp_path, "data.max_length=524288", "layout=expert-parallel")
    assert not made.cost.fits
    number = re.search(r"layout.context_parallel: (\d+)", made.cost.remedy)
    assert number
    assert planned(tmp_path, "data.max_length=524288", "layout=expert-parallel", f"{KEY}={number[1]}").cost.fits


def test_the_longest_row_is_longer_when_split_and_fits_when_pasted(tmp_path: Path) -> None:
    made = planned(tmp_path, "layout=full-shard")
    row = find_planned_longest_row(made)
    assert row.context_parallel > 1
    assert row.split_tokens > 2 * row.longest
    assert f"{row.split_tokens:,} with layout.context_parallel: {row.context_parallel}" in row.longer
    pasted = ("layout=full-shard", f"{KEY}={row.context_parallel}", f"data.max_length={row.split_tokens}")
    assert planned(tmp_path, *pasted, "data.packing=false").cost.has_headroom
    alone = find_planned_longest_row(planned(tmp_path, "layout=full-shard", "train.compile=true"))
    assert (alone.split_tokens, alone.context_parallel, *alone.longer) == (0, 1)


def test_an_accelerate_file_sets_it_and_an_override_wins(tmp_path: Path) -> None:
    sizes = "num_machines: 1\nnum_processes: 8\nparallelism_config:\n  parallelism_config_cp_size: {}\n"
    made = planned(tmp_path, accelerate=sizes.format(4))
    assert (made.layout.context_parallel, made.layout.shard) == (4, 8)
    both = sizes.format(4) + "  parallelism_config_dp_shard_size: 2\n"
    assert planned(tmp_path, accelerate=both).layout.shard == 8  # Accelerate shards over both
    with refused("ranks-not-divisible", "parallelism_config.parallelism_config_cp_size"):
        planned(tmp_path, accelerate=sizes.format(3))
    made = planned(tmp_path, f"{KEY}=2", accelerate=sizes.format(4))
    assert made.layout.context_parallel == 2
    assert any("parallelism_config_cp_size: 4 is overridden by --override" in note for note in made.notes)


# --- checked, imported, explained ------------------


@pytest.mark.fault("a slow link within a group that splits rows", "`windlass check`", "is slowest")
def test_check_measures_the_links_of_a_group(tmp_path: Path) -> None:
    def check(*overrides: str, slow: tuple[int, int] = (0, 1)) -> list[tuple[str, str]]:
        made = planned(tmp_path, "layout.name=full-shard", "cluster.nodes=4", "cluster.gpus_per_node=2", *overrides)
        pairs: dict[tuple[int, int], float | None] = dict.fromkeys(combinations(range(4), 2), 45.0)
        measured = BandwidthResult("nccl", {**pairs, slow: 1.0}, 45.0)
        return [(result.verdict, result.seen) for result in check_groups(made, measured, ["a", "b", "c", "d"])]

    assert check() == []
    ((verdict, seen),) = check(f"{KEY}=2")
    assert (verdict, "on one node" in seen) == (PASS, True)
    ((verdict, seen),) = check(f"{KEY}=4")
    assert (verdict, "a with b is slowest, 1.00 GB/s" in seen) == (WARN, True)
    ((verdict, seen),) = check(f"{KEY}=4", slow=(1, 2))  # between two groups, which send each other no keys
    assert (verdict, "45.00 GB/s" in seen) == (PASS, True)


def test_other_tools_files_become_the_key(tmp_path: Path) -> None:
    theirs = "base_model: m\nadapter: lora\ndatasets: [{path: rows.jsonl, type: chat_template}]\n"
    for key in ("context_parallel_size", "sequence_parallel_degree", "sequence_parallel_size"):
        for ranks, expected in ((4, 4), (1, None)):
            (tmp_path / "theirs.yaml").write_text(f"{theirs}{key}: {ranks}\n")
            made = import_file(tmp_path / "theirs.yaml")
            assert made.settings.get(KEY) == expected
            assert key not in made.no_effect
