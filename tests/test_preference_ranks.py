"""Runs on pairs: equal to TRL's DPOTrainer and ORPO's formula in every layout; stopped, resumed, and with faults."""

import json
import math
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_faults import windlass
from test_train import CHECKPOINTING, EXPERTS, SPLIT, WORDS, Outcomes, case, launched, write_run
from text_run import write_rows

from windlass import tiny
from windlass.files import read_json_lines
from windlass.plan import make_plan
from windlass.run_folder import ADAPTER, REFERENCE
from windlass.runfile import read_run_file

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 10
TOLERANCE = 2e-6  # in float32, of losses that begin at ln 2
ORPO: dict[str, Any] = {"train__objective": "orpo", "orpo__beta": 0.2}
SAVING: dict[str, Any] = {
    "data__val_fraction": 0.1,
    "train__eval_strategy": "steps",
    "train__eval_steps": 2,
    "train__save_strategy": "steps",
    "train__save_steps": 2,
    "train__max_steps": 6,
}
AS_LOADED: dict[str, Any] = {"layout__base_dtype": "bf16"}
MIXED: dict[str, Any] = {"file": "{folder}/mix.yaml", **SAVING}
# Runs that continue on another base, each with the run that it continues, and what that began with.
REBASED: dict[str, tuple[str, dict[str, Any]]] = {
    "another base": ("stopped", {}),
    "another base under an adapter": ("continued, stopped", {"lora__adapter": "{out}/whole/final"}),
}
PLAIN = {
    "trl": case(1, plain=True),
    "trl experts": case(1, plain=True, **EXPERTS),
    "plain orpo": case(1, plain=True, **ORPO),
}
# name -> what it is equal to among TRL's runs
EQUAL = {
    1: {"experts": (case(1, accumulation=2, **EXPERTS), "trl experts")},
    2: {
        "full-shard": (case(2, accumulation=2, **CHECKPOINTING), "trl"),
        "orpo": (case(2, layout="resident", **ORPO), "plain orpo"),
        "experts split": (case(2, **SPLIT, **EXPERTS), "trl experts"),
    },
}
# In bfloat16, from one adapter: by name that adapter's run, what is evaluated, and how it is laid out on two ranks.
NARROW: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "experts": ("experts split", {**AS_LOADED, **ORPO, **EXPERTS}, SPLIT),
    "nf4": ("whole", {"layout__base_dtype": "nf4", **ORPO}, {}),
    "dpo": ("whole", AS_LOADED, {}),
}
IN_BF16: dict[str, Any] = {"model__torch_dtype": "bfloat16", "train__bf16": True, "train__max_steps": 1}


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preference")
    tiny.write_model(folder / "model", experts=4)
    tiny.write_model(folder / "other", experts=4, seed=1)
    chance = random.Random(0)

    def words() -> str:
        return " ".join(chance.choices(WORDS.split(), k=chance.randint(2, 9)))

    pairs = [{"prompt": f"{words()}:", "chosen": f" {words()}", "rejected": f" {words()}"} for _ in range(120)]
    for name, part in (("pairs", pairs), ("some", pairs[:40]), ("others", pairs[40:70])):
        write_rows(folder / f"{name}.jsonl", part)
    mix = [{"path": f"{folder}/some.jsonl", "epochs": 2}, {"path": f"{folder}/others.jsonl", "rows": 20}]
    for name, rows in (("run", {"dataset_name_or_path": f"{folder}/pairs.jsonl"}), ("mix", {"mix": mix})):
        data = {**rows, "val_split": None, "max_length": 96, "packing": False}
        train = {"train__objective": "dpo", "train__max_steps": STEPS, "train__learning_rate": 0.002}
        write_run(folder / f"{name}.yaml", data=data, **train)
    return folder


def narrow(world: int, folder: str, *, evaluated: bool) -> dict[str, Any]:
    """Return runs in bfloat16 that begin with the adapters of runs in a folder, evaluated before their only step."""
    evaluation = {**SAVING, "train__eval_on_start": True}
    given = evaluation if evaluated else {"data__val_fraction": SAVING["data__val_fraction"]}
    return {
        f"in bf16, {name}" + ", not evaluated" * (not evaluated): case(
            world,
            **{**given, **IN_BF16, **settings, **(layout if world > 1 else {})},
            lora__adapter=f"{folder}/{run}/final",
        )
        for name, (run, settings, layout) in NARROW.items()
    }


@pytest.fixture(scope="session")
def two(pairs: Path) -> Outcomes:
    begun: dict[str, Any] = {"lora__adapter": "{out}/whole/final"}
    cases = {
        "whole": case(2, **SAVING),
        "stopped": case(2, faults=["terminate 5"], **SAVING),
        "continued": case(2, **begun, **SAVING),
        "continued, stopped": case(2, faults=["terminate 5"], **begun, **SAVING),
        "stopped early": case(2, faults=["terminate in the reference"], **SAVING),
        "mix": case(2, layout="resident", accumulation=2, **MIXED),
        **{name: each for name, (each, _) in EQUAL[2].items()},
        **narrow(2, "{out}", evaluated=True),
        **narrow(2, "{out}", evaluated=False),
    }
    return launched(pairs, 2, cases)


@pytest.fixture(scope="session")
def one(pairs: Path, two: Outcomes) -> Outcomes:
    cases: dict[str, Any] = {"mix": case(1, **MIXED), "whole": case(1, **SAVING)}
    cases |= {name: each for name, (each, _) in EQUAL[1].items()} | narrow(1, str(two.folder), evaluated=True)
    return launched(pairs, 1, PLAIN | cases)


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, cases in EQUAL.items() for name in cases])
def test_steps_equal_trls(one: Outcomes, two: Outcomes, world: int, name: str) -> None:
    outcomes = one if world == 1 else two
    assert "error" not in outcomes[name], outcomes[name]
    steps = outcomes.steps(name)
    expected = one.steps(EQUAL[world][name][1])
    assert len(steps) == len(expected) == STEPS
    for step, reference in zip(steps, expected, strict=True):
        for key in ("loss", "grad_norm"):
            assert step[key] == pytest.approx(reference[key], rel=TOLERANCE), (step["step"], key)


@pytest.mark.parametrize("name", ["mix", "whole"])
def test_losses_are_the_same_on_any_number_of_ranks(one: Outcomes, two: Outcomes, name: str) -> None:
    steps = two.steps(name)
    expected = one.steps(name)
    assert len(steps) == len(expected) >= 4
    for step, reference in zip(steps, expected, strict=True):
        assert step["loss"] == pytest.approx(reference["loss"], rel=TOLERANCE)
        assert step.get("source_loss", {}) == pytest.approx(reference.get("source_loss", {}), rel=1e-5)
        assert step["preference"] == pytest.approx(reference["preference"], rel=1e-4, abs=1e-5)
    if name == "mix":
        assert set(steps[-1]["source_loss"]) == {"some", "others"}
        assert any(step["preference"]["rewards/margins"] > 0 for step in steps)
    found, wanted = (evaluation_figures(each.folder / name) for each in (one, two))
    assert len(found) == len(wanted) == 3
    for figures, other in zip(found, wanted, strict=True):
        assert figures == pytest.approx(other, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", [f"in bf16, {name}" for name in NARROW])
def test_sharded_bases_are_evaluated_in_float32(one: Outcomes, two: Outcomes, name: str) -> None:
    """As one rank evaluates with the whole base. Steps stay in bfloat16, bit for bit what they are without it."""
    (alone, *_), (sharded, *_) = (evaluation_figures(each.folder / name) for each in (one, two))
    assert alone["eval_logps/chosen"] != 0
    assert sharded == pytest.approx(alone, rel=1e-5, abs=1e-7)
    if name.endswith("dpo"):
        found, expected = (read_tables(each.folder / name)["validation"] for each in (two, one))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert_bit_equal(two.folder / name, two.folder / f"{name}, not evaluated")


def evaluation_figures(folder: Path) -> list[dict[str, float]]:
    lines = [line for line in read_json_lines(folder / "events.jsonl") if "eval_loss" in line]
    names = [name for name in (lines[0] if lines else {}) if name.startswith("eval_") and name != "eval_runtime"]
    return [{name: line[name] for name in names} for line in lines]


def test_first_loss_is_that_of_no_difference(two: Outcomes) -> None:
    first, *_, last = two.steps("full-shard")
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert first["preference"]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert last["preference"]["rewards/margins"] > 0.005
    assert set(last["preference"]) >= {"rewards/chosen", "rewards/rejected", "rewards/accuracies", "logps/chosen"}


@pytest.fixture(scope="session")
def faulty(pairs: Path, two: Outcomes) -> Outcomes:
    """Runs that find a reference in their folder, or miss it."""

    def write(folder: Path, change: Any = lambda table: table, **other: str) -> None:
        """Write a reference into a folder, changed in its tables or in what it says of itself."""
        folder.mkdir(exist_ok=True)
        run = folder if (folder / REFERENCE).exists() else two.folder / "whole"
        with safe_open(run / REFERENCE, "pt") as file:
            identity = json.loads(file.metadata()["identity"]) | other
        changed = {name: change(table).contiguous() for name, table in load_file(run / REFERENCE).items()}
        save_file(changed, folder / REFERENCE, {"identity": json.dumps(identity)})

    def leave(name: str, run: str) -> Path:
        """Copy a run that was stopped."""
        return Path(shutil.copytree(two.folder / run, pairs / name, symlinks=True))

    write(pairs / "swapped", lambda table: table.flip(1))
    write(pairs / "moved", lambda table: table + 0.01 * torch.arange(2))
    write(pairs / "of another base", base="0" * 32)
    leave("left as it was", "stopped")
    leave("left sharded", "stopped")
    (leave("left without", "stopped") / REFERENCE).unlink()
    write(leave("left other", "stopped"), rows="0" * 32)
    (leave("left continued", "continued, stopped") / REFERENCE).unlink()
    write(leave("left in other dtypes", "continued, stopped"), precision="other")
    leave("early", "stopped early")

    def run(name: str, **more: Any) -> dict[str, Any]:
        return case(2, **{"train__output_dir": str(pairs / name), **SAVING, **more})

    first = str(two.folder / "whole" / "final")
    cases = {
        **{name: run(name) for name in ("swapped", "moved", "of another base")},
        **{name: run(name, resume=True) for name in ("left as it was", "left without", "left other")},
        **{name: run(name, resume=True, lora__adapter=first) for name in ("left continued", "left in other dtypes")},
        "left sharded": run("left sharded", resume=True, layout="resident"),
        "early, not resumed": run("early"),
        "early, eager": run("early", resume=True, model__attn_implementation="eager"),
        "early": run("early", resume=True),
    }
    for name, (left, begun) in REBASED.items():
        leave(name, left)
        other = {"model__model_name_or_path": str(pairs / "other"), **dict.fromkeys(begun, first)}
        if begun:
            gone = {**other, "lora__adapter": str(pairs / "gone")}
            cases[f"{name}, gone"] = run(name, resume=True, allow_other_base=True, **gone)
        else:
            cases[f"{name}, not accepted"] = run(name, resume=True, **other)
        cases[name] = run(name, resume=True, allow_other_base=True, **other)
        cases[f"new on {name}"] = run(f"new on {name}", allow_other_base=True, **other)
    return launched(pairs, 2, cases, "faulty ")


def final_adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final" / ADAPTER)


def assert_bit_equal(folder: Path, whole: Path) -> None:
    expected = final_adapter(whole)
    found = final_adapter(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_reference_is_the_adapter_that_a_run_begins_with(two: Outcomes) -> None:
    """An adapter that was trained before is part of the reference: the first loss is ln 2 again."""
    first = two.steps("continued")[0]
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert first["preference"]["logps/chosen"] != pytest.approx(two.steps("whole")[0]["preference"]["logps/chosen"])


@pytest.mark.fault("a reference whose chosen and rejected are swapped", "`windlass train`", "they are swapped")
@pytest.mark.fault("a reference that was taken with the trained adapter on", "`windlass train`", "the loss begins at")
@pytest.mark.parametrize(("name", "words"), [("swapped", "they are swapped"), ("moved", "the loss begins at")])
def test_a_wrong_reference_stops_the_run_before_step_1(faulty: Outcomes, name: str, words: str) -> None:
    assert words in faulty[name]["error"]
    assert faulty[name]["kind"] == "RunError"
    assert not (Path(faulty[name]["where"]).parent / "steps-rank0.jsonl").exists()


def test_a_reference_of_another_base_is_computed_again_for_a_new_run(
    faulty: Outcomes, two: Outcomes, pairs: Path
) -> None:
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
def test_resumed_run_needs_the_reference_that_it_began_with(faulty: Outcomes, two: Outcomes, pairs: Path) -> None:
    assert two["stopped"]["code"] == 75
    assert evaluation_figures(pairs / "left as it was") == evaluation_figures(two.folder / "whole")
    assert_bit_equal(pairs / "left as it was", two.folder / "whole")
    assert_bit_equal(pairs / "left without", two.folder / "whole")  # the base's can be computed again
    assert "is the reference of other rows than this run's" in faulty["left other"]["error"]
    assert "the adapter that it began with has moved on" in faulty["left continued"]["error"]


def read_tables(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / REFERENCE)


@pytest.mark.fault(
    "a stop signal while the reference of pairs is computed",
    "`windlass train`",
    "what there is of the reference is saved",
)
def test_a_stopped_reference_is_continued(faulty: Outcomes, two: Outcomes, pairs: Path) -> None:
    assert two["stopped early"]["code"] == 75
    assert "what there is of the reference is saved" in two.printed
    whole = read_tables(two.folder / "whole")
    part = read_tables(two.folder / "stopped early")
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
def test_a_stopped_reference_is_a_run_that_has_begun(faulty: Outcomes) -> None:
    assert 'was null when this run began, is "eager" now' in faulty["early, eager"]["error"]
    assert "contains an unfinished run (stopped by a signal" in faulty["early, not resumed"]["error"]


def test_a_run_that_is_resumed_on_another_layout_keeps_its_reference(
    faulty: Outcomes, two: Outcomes, pairs: Path
) -> None:
    """Pairs are evaluated in float32 on every layout."""
    assert faulty["left sharded"].get("code") == 0, faulty["left sharded"]
    assert f"reference {pairs / 'left sharded' / REFERENCE} is" not in faulty.printed
    figures = [evaluation_figures(folder) for folder in (pairs / "left sharded", two.folder / "whole")]
    for ours, theirs in zip(*figures, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def test_a_run_goes_on_from_its_checkpoint_after_its_reference_was_computed_again(
    faulty: Outcomes, two: Outcomes, pairs: Path
) -> None:
    """Which is that of the adapter that it began with."""
    assert "is of other dtypes: it is computed again, under the adapter that the run began with" in faulty.printed
    assert faulty["left in other dtypes"].get("code") == 0, faulty["left in other dtypes"]
    found, expected = (read_tables(folder) for folder in (pairs / "left in other dtypes", two.folder / "continued"))
    assert all(torch.equal(found[name], table) for name, table in expected.items())
    assert_bit_equal(pairs / "left in other dtypes", two.folder / "continued")


@pytest.mark.parametrize("name", REBASED)
def test_a_run_that_continues_on_another_base_has_its_reference(
    faulty: Outcomes, two: Outcomes, pairs: Path, name: str
) -> None:
    """That of the adapter that the run began with, not of the checkpoint's."""
    assert faulty[name].get("code") == 0, faulty[name]
    assert "is of another base: it is computed again, under the adapter that the run began with" in faulty.printed
    found = read_tables(pairs / name)
    assert not torch.equal(found["train"], read_tables(two.folder / "whole")["train"])
    expected = read_tables(pairs / f"new on {name}")
    assert all(torch.equal(found[name], table) for name, table in expected.items())


@pytest.mark.fault(
    "another base at the resume of a run that began with an adapter, which is gone",
    "`windlass train --resume --allow-other-base`",
    "whose answers are compared with, is not there",
)
def test_another_base_needs_to_be_accepted_and_the_first_adapter(faulty: Outcomes) -> None:
    assert "--allow-other-base" in faulty["another base, not accepted"]["error"]
    gone = faulty["another base under an adapter, gone"]["error"]
    assert "whose answers are compared with, is not there" in gone
    assert "start from the folder that the run was started in" in gone


# --- other commands ---


def test_init_chooses_dpo_for_pairs(pairs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pairs)
    words = "init --model model --data pairs.jsonl --gpus 1xcpu --out own.yaml --override data.val_fraction=0.2"
    assert windlass(words, pairs)[0] == 0
    text = (pairs / "own.yaml").read_text()
    assert "objective: dpo  # the rows have a chosen and a rejected answer" in text
    assert "learning_rate: 1e-05  # pairs need less" in text
    plan = make_plan(read_run_file(pairs / "own.yaml")).as_dict()
    assert (plan["batch"]["rows"], plan["batch"]["sides"], plan["batch"]["tolerance"]) == (96, 2, 0)


@pytest.mark.parametrize(("name", "began"), [("whole", "base model"), ("continued", "as it began")])
def test_best_measures_what_the_run_did(two: Outcomes, name: str, began: str) -> None:
    """And compares with the base, or with the adapter that the run began with."""
    code, printed = windlass(f"best {name} --ranks 1 --by accuracy --json", two.folder)
    assert code == 0, printed
    found = json.loads(printed[printed.index("{\n") : printed.rindex("}") + 1])
    shares = [each["accuracy"] for each in found["best"]]
    assert shares == sorted(shares, reverse=True)
    ranked = {each["name"]: each for each in found["best"]}
    first = ranked.pop(began)
    assert (first["loss"], first["accuracy"]) == (pytest.approx(math.log(2), rel=1e-6), 0.0)  # ties, as TRL counts
    recorded = evaluation_figures(two.folder / name)
    assert [*sorted(ranked)] == ["step-2", "step-4", "step-6"]
    for step, figures in zip(sorted(ranked), recorded, strict=True):
        assert ranked[step]["loss"] == pytest.approx(figures["eval_loss"], rel=1e-5), step
        assert ranked[step]["accuracy"] == pytest.approx(figures["eval_rewards/accuracies"]), step
    assert found["rows"] == found["tokens"] == 12


def test_a_run_in_bf16_says_how_noisy_its_margins_are(one: Outcomes) -> None:
    said = {
        name: re.search(r"margins +of a step are within ([\d.]+) of float32's", text)
        for name, text in (part.split("\n", 1) for part in one.printed.split("--- ")[1:])
    }
    assert said["whole"] is None
    noisy = said["in bf16, dpo"]
    assert noisy
    assert 0 < float(noisy[1]) < 0.1
