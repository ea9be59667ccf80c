"""Runs on pairs: equal to TRL's DPOTrainer and ORPO's formula in every layout; stopped, resumed, and with faults."""

import functools
import importlib
import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from windlass import tiny
from windlass.files import read_json_lines
from windlass.run_folder import ADAPTER, REFERENCE

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

train: Any = importlib.import_module("test_train")
case = train.case
EXPERTS, SPLIT, CHECKPOINTING = train.EXPERTS, train.SPLIT, train.CHECKPOINTING
STEPS = 10
TOLERANCE = 2e-6  # in float32, of losses that begin at ln 2
RUN = """
model: {{model_name_or_path: {folder}/model, torch_dtype: float32}}
lora: {{r: 4, lora_alpha: 8, lora_dropout: 0, target_modules: all-linear}}
data: {{dataset_name_or_path: {folder}/pairs.jsonl, val_split: null, max_length: 96, packing: false}}
train:
  objective: dpo
  output_dir: {folder}/out
  max_steps: {steps}
  learning_rate: 0.002
  warmup_ratio: 0.1
  lr_scheduler_type: cosine
  weight_decay: 0.01
  bf16: false
  gradient_checkpointing: false
  max_grad_norm: 0.25
  eval_strategy: "no"
  save_strategy: "no"
  seed: 3
  ddp_timeout: 60
"""
IPO = {"dpo__loss": "ipo"}
SMOOTHED = {"dpo__label_smoothing": 0.1}
NORMALIZED = {"dpo__length_normalized": True, "dpo__beta": 2.0}
ORPO = {"train__objective": "orpo", "orpo__beta": 0.2}
IN_FULL = {"lora__modules_to_save": ["lm_head"], "layout__base_dtype": "bf16"}
SAVING = {
    "data__val_fraction": 0.1,
    "train__eval_strategy": "steps",
    "train__eval_steps": 2,
    "train__save_strategy": "steps",
    "train__save_steps": 2,
    "train__max_steps": 6,
}
AS_LOADED = {"layout__base_dtype": "bf16"}
NARROW = {"model__torch_dtype": "bfloat16", "train__bf16": True}
BALANCED = {"train__router_aux_loss_coef": 0.5, "train__max_steps": 4, "layout__base_dtype": "bf16"}
MIXED = {"file": "{folder}/mix.yaml", **SAVING}
NF4 = {"layout__base_dtype": "nf4", "train__max_steps": 2}
OSS = {"model__model_name_or_path": "{folder}/oss", "lora__target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
# Runs that continue on another base: each with what it began with.
REBASED: dict[str, Any] = {"another base": {}, "another base under an adapter": {"lora__adapter": "{out}/whole/final"}}
# name -> what it is equal to among TRL's runs
EQUAL = {
    1: {
        "alone": (case(1, accumulation=2), "trl"),
        "experts": (case(1, **EXPERTS), "trl experts"),
        "head in full": (case(1, **IN_FULL), "trl head in full"),
    },
    2: {
        "full-shard": (case(2, accumulation=2), "trl"),
        "checkpointing": (case(2, **CHECKPOINTING), "trl"),
        "resident": (case(2, layout="resident"), "trl"),
        "kept in FP8": (case(2, layout="resident", layout__base_dtype="fp8"), "trl"),
        "kept in MXFP4": (case(2, layout="resident", layout__base_dtype="mxfp4", **OSS), "trl oss"),
        "ipo": (case(2, layout="resident", **IPO), "trl ipo"),
        "smoothed": (case(2, **SMOOTHED), "trl smoothed"),
        "normalized": (case(2, layout="resident", **NORMALIZED), "trl normalized"),
        "orpo": (case(2, **ORPO), "plain orpo"),
        "experts split": (case(2, **SPLIT, **EXPERTS), "trl experts"),
        "orpo, experts split": (case(2, **SPLIT, **EXPERTS, **ORPO), "plain orpo experts"),
    },
    4: {"experts hybrid": (case(4, **SPLIT, layout__shard=2, layout__replicate=2, **EXPERTS), "trl experts")},
}
# Run by `make prove`: others meet the same branches.
LATER = ("checkpointing", "resident", "normalized", "kept in FP8")
NARROW_LATER = ("dense", "float32", "fp8")
PLAIN = {
    "trl": case(1, plain=True),
    "trl experts": case(1, plain=True, **EXPERTS),
    "trl head in full": case(1, plain=True, **IN_FULL),
    "trl oss": case(1, plain=True, **OSS),
    "trl ipo": case(1, plain=True, **IPO),
    "trl smoothed": case(1, plain=True, **SMOOTHED),
    "trl normalized": case(1, plain=True, **NORMALIZED),
    "plain orpo": case(1, plain=True, **ORPO),
    "plain orpo experts": case(1, plain=True, **EXPERTS, **ORPO),
}


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preference")
    tiny.write_model(folder / "model", experts=4)
    tiny.write_model(folder / "other", experts=4, seed=1)
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    quantized = {"quant_method": "mxfp4"}
    tiny.write_family(folder / "oss", "gpt_oss", config=sizes, layers=2, quantized=quantized, tokenizer=True)
    chance = random.Random(0)

    def words() -> str:
        return " ".join(chance.choices(train.WORDS.split(), k=chance.randint(2, 9)))

    rows = [{"prompt": f"{words()}:", "chosen": f" {words()}", "rejected": f" {words()}"} for _ in range(120)]
    for name, part in (("pairs", rows), ("some", rows[:40]), ("others", rows[40:70])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (folder / "run.yaml").write_text(RUN.format(folder=folder, steps=STEPS))
    mix = RUN.replace("dataset_name_or_path: {folder}/pairs.jsonl", "mix: [{sets}]")
    sets = f"{{path: {folder}/some.jsonl, epochs: 2}}, {{path: {folder}/others.jsonl, rows: 20}}"
    (folder / "mix.yaml").write_text(mix.format(folder=folder, steps=STEPS, sets=sets))
    return folder


@pytest.fixture(scope="session")
def one(pairs: Path) -> Any:
    cases = {
        "balanced": case(1, accumulation=2, **BALANCED),
        "mix": case(1, **MIXED),
        "whole": case(1, **SAVING),
    }
    return train.launched(pairs, 1, PLAIN | {name: each for name, (each, _) in EQUAL[1].items()} | cases)


@pytest.fixture(scope="session")
def two(pairs: Path) -> Any:
    def saved(name: str, **more: Any) -> Any:
        return case(2, train__output_dir=f"{{out}}/{name}", **SAVING, **more)

    cases = {
        "whole": saved("whole"),
        "stopped": saved("in two", faults=["terminate 5"]),
        "resumed": saved("in two", resume=True),
        "balanced": case(2, **BALANCED),
        "mix": case(2, layout="resident", accumulation=2, **MIXED),
        "in 4 bits": case(2, **NF4),
        "continued": saved("continued", lora__adapter="{out}/whole/final"),
        **{
            f"left {name}": saved(f"left {name}", faults=["terminate 5"])
            for name in ("as it was", "without", "other", "sharded")
        },
        **{
            f"left {name}": saved(f"left {name}", faults=["terminate 5"], lora__adapter="{out}/whole/final")
            for name in ("continued", "in other dtypes")
        },
        "stopped early": saved("early", faults=["terminate in the reference"]),
        **{
            f"left for {name}": saved(f"left for {name}", faults=["terminate 5"], **more)
            for name, more in REBASED.items()
        },
    }
    equal = {name: each for name, (each, _) in EQUAL[2].items() if name not in LATER}
    return train.launched(pairs, 2, equal | cases)


@pytest.fixture(scope="session")
def later(pairs: Path) -> Any:
    return train.launched(pairs, 2, {name: EQUAL[2][name][0] for name in LATER}, "later ")


@pytest.mark.parametrize(
    ("world", "name"),
    [
        pytest.param(world, name, marks=[pytest.mark.prove] if world == 4 or name in LATER else [])
        for world, cases in EQUAL.items()
        for name in cases
    ],
)
def test_steps_equal_trls(one: Any, world: int, name: str, pairs: Path, request: pytest.FixtureRequest) -> None:
    if world == 4:
        outcomes = train.launched(pairs, 4, {name: EQUAL[4][name][0]})
    else:
        outcomes = request.getfixturevalue("later" if name in LATER else {1: "one", 2: "two"}[world])
    assert "error" not in outcomes[name], outcomes[name]
    steps = outcomes.steps(name)
    expected = one.steps(EQUAL[world][name][1])
    assert len(steps) == len(expected) == STEPS
    for step, reference in zip(steps, expected, strict=True):
        for key in ("loss", "grad_norm"):
            assert step[key] == pytest.approx(reference[key], rel=TOLERANCE), (step["step"], key)


@pytest.mark.parametrize("name", ["balanced", "mix", "whole"])
def test_losses_are_the_same_on_any_number_of_ranks(one: Any, two: Any, name: str) -> None:
    steps = two.steps(name)
    expected = one.steps(name)
    assert len(steps) == len(expected) >= 4
    for step, reference in zip(steps, expected, strict=True):
        assert step["loss"] == pytest.approx(reference["loss"], rel=TOLERANCE)
        assert step.get("source_loss", {}) == pytest.approx(reference.get("source_loss", {}), rel=1e-5)
        assert step["preference"] == pytest.approx(reference["preference"], rel=1e-4, abs=1e-5)
        assert step.get("router_aux_loss", 0) == pytest.approx(reference.get("router_aux_loss", 0), rel=1e-5)
    if name == "mix":
        assert set(steps[-1]["source_loss"]) == {"some", "others"}
        assert any(step["preference"]["rewards/margins"] > 0 for step in steps)
    evaluations = [evaluation_figures(each.folder / name) for each in (one, two)]
    assert len(evaluations[0]) == (0 if name == "balanced" else 3)
    for found, wanted in zip(*evaluations, strict=True):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.fixture(scope="session")
def narrow(pairs: Path, two: Any) -> Callable[[bool], dict[int, Any]]:
    """Runs in bfloat16 that begin with one adapter, and evaluate before their only step; on one rank and on two."""
    dense, experts = (str(two.folder / name / "final") for name in ("whole", "experts split"))
    given: dict[str, Any] = {**SAVING, **NARROW, "train__max_steps": 1, "train__eval_on_start": True}
    bare: dict[str, Any] = {"data__val_fraction": SAVING["data__val_fraction"], **NARROW, "train__max_steps": 1}
    kinds = {
        "dense": ({"lora__adapter": dense, **AS_LOADED, **ORPO}, {}),
        "float32": ({"lora__adapter": dense, **AS_LOADED, **ORPO, "model__torch_dtype": "float32"}, {}),
        "experts": ({"lora__adapter": experts, **AS_LOADED, **ORPO, **EXPERTS}, SPLIT),
        "fp8": ({"lora__adapter": dense, "layout__base_dtype": "fp8", **ORPO}, {}),
        "nf4": ({"lora__adapter": dense, "layout__base_dtype": "nf4", **ORPO}, {}),
        "dpo": ({"lora__adapter": dense, **AS_LOADED, "train__objective": "dpo"}, {}),
    }

    def run(later: bool) -> dict[int, Any]:
        outcomes = {}
        for world in (1, 2):
            cases = {}
            for name, (settings, layout) in kinds.items():
                if (name in NARROW_LATER) == later:
                    sharded = layout if world > 1 else {}
                    cases[name] = case(world, **{**given, **settings, **sharded})
                    cases[f"{name}, not evaluated"] = case(world, **{**bare, **settings, **sharded})
            outcomes[world] = train.launched(pairs, world, cases, f"{'later ' if later else ''}narrow ")
        return outcomes

    return functools.cache(run)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.prove] if name in NARROW_LATER else [])
        for name in ("dense", "experts", "fp8", "nf4", "dpo", "float32")
    ],
)
def test_sharded_bases_are_evaluated_in_float32(narrow: Callable[[bool], dict[int, Any]], name: str) -> None:
    """As one rank evaluates with the whole base. Steps stay in bfloat16, bit for bit what they are without it."""
    runs = narrow(name in NARROW_LATER)
    (one, *_), (two, *_) = (evaluation_figures(runs[world].folder / name) for world in (1, 2))
    assert one["eval_logps/chosen"] != 0
    # Weights in float32 are gathered in bfloat16, and rounded if they have more digits.
    assert two == pytest.approx(one, rel=1e-5, abs=2e-5 if name == "float32" else 1e-7)
    if name == "dpo":
        found, expected = (read_tables(runs[world].folder / name)["validation"] for world in (2, 1))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert_bit_equal(runs[2].folder / name, runs[2].folder / f"{name}, not evaluated")


def evaluation_figures(folder: Path) -> list[dict[str, float]]:
    lines = [line for line in read_json_lines(folder / "events.jsonl") if "eval_loss" in line]
    names = [name for name in (lines[0] if lines else {}) if name.startswith("eval_") and name != "eval_runtime"]
    return [{name: line[name] for name in names} for line in lines]


def test_reference_of_a_base_in_4_bits_is_that_base(two: Any) -> None:
    assert two.steps("in 4 bits")[0]["loss"] == pytest.approx(math.log(2), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "start"),
    [("full-shard", math.log(2)), ("kept in MXFP4", math.log(2)), ("smoothed", math.log(2)), ("ipo", 25.0)],
)
def test_first_loss_is_that_of_no_difference(two: Any, name: str, start: float) -> None:
    first, *_, last = two.steps(name)
    assert first["loss"] == pytest.approx(start, rel=1e-5)
    assert first["preference"]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert last["preference"]["rewards/margins"] > 0.005
    assert set(last["preference"]) >= {"rewards/chosen", "rewards/rejected", "rewards/accuracies", "logps/chosen"}


@pytest.fixture(scope="session")
def faulty(pairs: Path, two: Any) -> Any:
    """Runs that find a reference in their folder, or miss it."""
    reference = two.folder / "whole" / REFERENCE
    tables = load_file(reference)
    with safe_open(reference, "pt") as file:
        identity = json.loads(file.metadata()["identity"])

    def put(folder: Path, change: Any = lambda table: table, **other: str) -> None:
        folder.mkdir(exist_ok=True)
        changed = {name: change(table).contiguous() for name, table in tables.items()}
        save_file(changed, folder / REFERENCE, {"identity": json.dumps(identity | other)})

    put(pairs / "swapped", lambda table: table.flip(1))
    put(pairs / "moved", lambda table: table + 0.01 * torch.arange(2))
    put(pairs / "of another base", base="0" * 32)
    put(two.folder / "left other", rows="0" * 32)
    shutil.copytree(two.folder / "early", pairs / "early")
    rounded = two.folder / "left in other dtypes" / REFERENCE
    with safe_open(rounded, "pt") as file:
        rounded_identity = json.loads(file.metadata()["identity"]) | {"precision": "other"}
    save_file(load_file(rounded), rounded, {"identity": json.dumps(rounded_identity)})
    for name in ("left without", "left continued"):
        (two.folder / name / REFERENCE).unlink()
    cases = {
        **{
            name: case(2, train__output_dir=str(pairs / name), **SAVING)
            for name in ("swapped", "moved", "of another base")
        },
        **{
            name: case(2, resume=True, train__output_dir=str(two.folder / name), **SAVING)
            for name in ("left as it was", "left without", "left other")
        },
        **{
            name: case(
                2,
                resume=True,
                train__output_dir=str(two.folder / name),
                lora__adapter=str(two.folder / "whole" / "final"),
                **SAVING,
            )
            for name in ("left continued", "left in other dtypes")
        },
        "left sharded": case(
            2, layout="resident", resume=True, train__output_dir=str(two.folder / "left sharded"), **SAVING
        ),
        "early, not resumed": case(2, train__output_dir=str(pairs / "early"), **SAVING),
        "early, eager": case(
            2, resume=True, train__output_dir=str(pairs / "early"), model__attn_implementation="eager", **SAVING
        ),
        "early": case(2, resume=True, train__output_dir=str(pairs / "early"), **SAVING),
    }
    other = {"model__model_name_or_path": str(pairs / "other"), **SAVING}
    for name, more in REBASED.items():
        adapter = {key: value.format(out=two.folder) for key, value in more.items()}
        left = {"resume": True, "train__output_dir": str(two.folder / f"left for {name}"), **other}
        cases[f"{name}, not accepted"] = case(2, **left, **adapter)
        if adapter:
            cases[f"{name}, gone"] = case(2, **left, lora__adapter=str(pairs / "gone"), allow_other_base=True)
        cases[name] = case(2, **left, **adapter, allow_other_base=True)
        cases[f"new on {name}"] = case(
            2, train__output_dir=str(pairs / name), **adapter, **other, allow_other_base=True
        )
    return train.launched(pairs, 2, cases, "faulty ")


def final_adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final" / ADAPTER)


def assert_bit_equal(folder: Path, whole: Path) -> None:
    expected = final_adapter(whole)
    found = final_adapter(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_stopped_and_resumed_run_is_bit_equal(two: Any) -> None:
    assert two["stopped"]["code"] == 75
    assert_bit_equal(two.folder / "in two", two.folder / "whole")
    events, whole = (evaluation_figures(two.folder / name) for name in ("in two", "whole"))
    assert events == whole
    assert len(whole) == 3


def test_reference_is_the_adapter_that_a_run_begins_with(two: Any) -> None:
    """An adapter that was trained before is part of the reference: the first loss is ln 2 again."""
    first = two.steps("continued")[0]
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert first["preference"]["logps/chosen"] != pytest.approx(two.steps("whole")[0]["preference"]["logps/chosen"])


@pytest.mark.fault("a reference whose chosen and rejected are swapped", "`windlass train`", "they are swapped")
@pytest.mark.fault("a reference that was taken with the trained adapter on", "`windlass train`", "the loss begins at")
@pytest.mark.parametrize(("name", "words"), [("swapped", "they are swapped"), ("moved", "the loss begins at")])
def test_a_wrong_reference_stops_the_run_before_step_1(faulty: Any, name: str, words: str) -> None:
    assert words in faulty[name]["error"]
    assert faulty[name]["kind"] == "RunError"
    assert not (Path(faulty[name]["where"]).parent / "steps-rank0.jsonl").exists()


def test_a_reference_of_another_base_is_computed_again_for_a_new_run(faulty: Any, two: Any, pairs: Path) -> None:
    assert "is of another base: it is computed again" in faulty.printed
    assert_bit_equal(pairs / "of another base", two.folder / "whole")


@pytest.mark.fault(
    "a reference of other rows at the resume", "`windlass train --resume`", "is the reference of other rows"
)
@pytest.mark.fault(
    "a lost reference of a run that began with an adapter",
    "`windlass train --resume`",
    "the adapter that it began with has moved on",
)
def test_resumed_run_needs_the_reference_that_it_began_with(faulty: Any, two: Any) -> None:
    assert_bit_equal(two.folder / "left as it was", two.folder / "whole")
    assert_bit_equal(two.folder / "left without", two.folder / "whole")  # the base's can be computed again
    assert "is the reference of other rows than this run's" in faulty["left other"]["error"]
    assert "the adapter that it began with has moved on" in faulty["left continued"]["error"]


def read_tables(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / REFERENCE)


@pytest.mark.fault(
    "a stop signal while the reference of pairs is computed",
    "`windlass train`",
    "what there is of the reference is saved",
)
def test_a_stopped_reference_is_continued(faulty: Any, two: Any, pairs: Path) -> None:
    assert two["stopped early"]["code"] == 75
    assert "what there is of the reference is saved" in two.printed
    whole = read_tables(two.folder / "whole")
    part = read_tables(two.folder / "early")
    computed = ~part["train"].isnan().any(1)
    assert 0 < computed.sum() < len(computed)
    assert torch.equal(part["train"][computed], whole["train"][computed])
    assert f"reference {computed.sum()} of {len(computed)} train pairs are there already" in faulty.printed
    continued = read_tables(pairs / "early")
    assert continued.keys() == whole.keys()
    assert all(torch.equal(continued[name], table) for name, table in whole.items())
    assert_bit_equal(pairs / "early", two.folder / "whole")


@pytest.mark.fault(
    "another setting after a stop while the reference was computed",
    "`windlass train --resume`",
    'was null when this run began, is "eager" now',
)
def test_a_stopped_reference_is_a_run_that_has_begun(faulty: Any) -> None:
    assert 'was null when this run began, is "eager" now' in faulty["early, eager"]["error"]
    assert "contains an unfinished run (stopped by a signal" in faulty["early, not resumed"]["error"]


def test_a_run_that_is_resumed_on_another_layout_keeps_its_reference(faulty: Any, two: Any) -> None:
    """Pairs are evaluated in float32 on every layout."""
    assert faulty["left sharded"].get("code") == 0, faulty["left sharded"]
    assert f"reference {two.folder / 'left sharded' / REFERENCE} is" not in faulty.printed
    for ours, theirs in zip(
        *(evaluation_figures(two.folder / name) for name in ("left sharded", "whole")), strict=True
    ):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def test_a_run_goes_on_from_its_checkpoint_after_its_reference_was_computed_again(faulty: Any, two: Any) -> None:
    """Which is that of the adapter that it began with."""
    assert "is of other dtypes: it is computed again, under the adapter that the run began with" in faulty.printed
    assert faulty["left in other dtypes"].get("code") == 0, faulty["left in other dtypes"]
    found, expected = (read_tables(two.folder / name) for name in ("left in other dtypes", "continued"))
    assert all(torch.equal(found[name], table) for name, table in expected.items())
    assert_bit_equal(two.folder / "left in other dtypes", two.folder / "continued")


@pytest.mark.parametrize("name", REBASED)
def test_a_run_that_continues_on_another_base_has_its_reference(faulty: Any, two: Any, pairs: Path, name: str) -> None:
    """That of the adapter that the run began with, not of the checkpoint's."""
    assert faulty[name].get("code") == 0, faulty[name]
    assert "is of another base: it is computed again, under the adapter that the run began with" in faulty.printed
    found = read_tables(two.folder / f"left for {name}")
    assert not torch.equal(found["train"], read_tables(two.folder / "whole")["train"])
    expected = read_tables(pairs / name)
    assert all(torch.equal(found[name], table) for name, table in expected.items())


@pytest.mark.fault(
    "another base at the resume of a run that began with an adapter, which is gone",
    "`windlass train --resume --allow-other-base`",
    "whose answers are compared with, is not there",
)
def test_another_base_needs_to_be_accepted_and_the_first_adapter(faulty: Any) -> None:
    for name in REBASED:
        assert "--allow-other-base" in faulty[f"{name}, not accepted"]["error"]
    gone = faulty["another base under an adapter, gone"]["error"]
    assert "whose answers are compared with, is not there" in gone
    assert "start from the folder that the run was started in" in gone
