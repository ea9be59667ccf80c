"""A run on pairs as a user makes it, from `init` to the model card; and one on top of the first one's adapter."""

import json
import math
import random
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from refusals import refused
from safetensors.torch import load_file

from windlass import tiny
from windlass.best import find_first_adapter
from windlass.files import read_json, read_json_lines
from windlass.plan.finished import load_finished_run

pytestmark = pytest.mark.long

FAST = ("train.learning_rate=5e-3", "train.max_steps=24", "train.eval_steps=8", "train.save_steps=8")


def windlass(folder: Path, *arguments: str, code: int = 0) -> str:
    command = [warm.python(), "-m", "windlass", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def overrides(*keys: str) -> list[str]:
    return [word for key in keys for word in ("--override", key)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the runs `first` and, on its adapter, `second`."""
    root = tmp_path_factory.mktemp("pairs")
    tiny.write_model(root / "model", "llama")
    chance = random.Random(0)
    rows: list[dict[str, str]] = []
    for _ in range(200):
        a, b = chance.randrange(9), chance.randrange(9)
        right, wrong = f"{a} and {b} make {a + b}.", f"{a} and {b} make {a + b + chance.choice([-1, 1])}."
        rows.append({"prompt": f"{a} + {b} = ? ", "chosen": right, "rejected": wrong})
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ("--model", "model", "--data", "pairs.jsonl", "--gpus", "1xcpu", "--out", "run.yaml")
    windlass(root, "init", *asked, *overrides("data.val_fraction=0.2"))
    windlass(root, "train", "run.yaml", *overrides(*FAST, "train.output_dir=first"))
    second = ("train.output_dir=second", "lora.adapter=first/final")
    windlass(root, "train", "run.yaml", *overrides(*FAST, *second))
    return root


def test_init_chooses_dpo_for_pairs(folder: Path) -> None:
    text = (folder / "run.yaml").read_text()
    assert "objective: dpo  # the rows have a chosen and a rejected answer" in text
    assert "learning_rate: 1e-05  # pairs need less" in text
    assert "packing: false" in text
    assert "beta: 0.1  #" in text
    plan = json.loads(windlass(folder, "plan", "run.yaml", "--json"))
    assert (plan["batch"]["rows"], plan["batch"]["sides"]) == (160, 2)
    assert plan["batch"]["tolerance"] == 0  # each row is a pair: nothing to guess
    assert plan["estimate"]["seconds"]["reference"] > 0


def evaluations(run: Path) -> dict[str, dict[str, Any]]:
    return {
        f"step-{event['step']}": event for event in read_json_lines(run / "events.jsonl") if event["kind"] == "eval"
    }


@pytest.mark.parametrize("name", ["first", "second"])
def test_best_measures_what_the_run_did(folder: Path, name: str) -> None:
    run = folder / name
    found = json.loads(windlass(folder, "best", name, "--json"))
    recorded = evaluations(run)
    ranked = {each["name"]: each for each in found["best"]}
    # The first run is compared with the base; the second with the adapter that it began with.
    began = ranked.pop("base model" if name == "first" else "as it began")
    assert (began["loss"], began["accuracy"]) == (pytest.approx(math.log(2), rel=1e-6), 0.0)  # ties, as TRL counts
    assert ranked.keys() == recorded.keys()
    assert len(recorded) == 3
    for step, event in recorded.items():
        assert ranked[step]["loss"] == pytest.approx(event["eval_loss"], rel=1e-5), step
        assert ranked[step]["accuracy"] == pytest.approx(event["eval_rewards/accuracies"]), step
    assert found["rows"] == found["tokens"] == 40
    by_accuracy = json.loads(windlass(folder, "best", name, "--json", "--by", "accuracy"))
    shares = [each["accuracy"] for each in by_accuracy["best"]]
    assert shares == sorted(shares, reverse=True)


def test_best_without_the_adapter_that_the_run_began_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    with refused("no-reference", "first/final"):
        find_first_adapter(folder / "second")
    assert find_first_adapter(folder / "first") is None


def test_accuracy_is_for_pairs(folder: Path) -> None:
    done = windlass(folder, "best", "first", "--by", "speed", code=2)
    assert done == ""
    assert load_finished_run(folder / "first", eval_data=None, ranks=None).run.objective.of_pairs


def test_report_and_card_are_of_pairs(folder: Path) -> None:
    windlass(folder, "report", "second")
    run = read_json(folder / "second" / "report.json")["runs"][0]
    last = evaluations(folder / "second")["step-24"]
    assert run["headline"]["preferred"] == last["eval_rewards/accuracies"]
    assert f"is preferred in {last['eval_rewards/accuracies']:.0%} of 40 evaluation pairs" in run["verdict"]["text"]
    assert {"margin", "accuracy", "rewards", "logps"} <= {chart["id"] for chart in run["charts"]}
    assert run["alarms"] == []
    windlass(folder, "export", "second", "--to", "exported")
    card = (folder / "exported" / "README.md").read_text()
    assert "It was tuned on 160 pairs" in card
    assert "the reference is the adapter that it began with, first/final." in card
    assert "accuracy" in windlass(folder, "watch", "second", "--once")


def test_trials_with_another_beta_equal_runs_alone(folder: Path) -> None:
    """And their losses, which are of other functions, are not offered for comparison without a word."""
    short = overrides("train.max_steps=4", "train.eval_steps=2", "train.save_steps=2", "train.learning_rate=5e-3")
    of_sweep = overrides("train.output_dir=betas", "sweep.dpo.beta=[0.1,0.5]")
    windlass(folder, "train", "run.yaml", *short, *of_sweep)
    windlass(folder, "train", "betas/trials/beta0.5/run.yaml", *overrides("train.output_dir=alone"))
    for name in ("final/adapter_model.safetensors", "reference.safetensors"):
        alone, trial = (load_file(folder / run / name) for run in ("alone", "betas/trials/beta0.5"))
        assert alone.keys() == trial.keys()
        assert all(torch.equal(alone[key], trial[key]) for key in alone)
    printed = windlass(folder, "report", "betas")
    assert "dpo.beta: another value is another loss" in printed
    ranked = windlass(folder, "best", "betas", "--by", "accuracy")
    assert "beta0.5/step-4" in ranked.replace("\n", "")
    assert "another loss" not in ranked
    assert "dpo.beta: another value is another loss" in windlass(folder, "best", "betas")


@pytest.mark.parametrize("in_bf16", [True, False])
def test_a_run_says_how_noisy_its_margins_are(folder: Path, in_bf16: bool) -> None:
    short = (
        "train.max_steps=1",
        "train.eval_strategy=no",
        "train.save_strategy=no",
        f"train.bf16={json.dumps(in_bf16)}",
    )
    given = overrides(*short, f"train.output_dir=in_bf16-{in_bf16}")
    command = [warm.python(), "-m", "windlass", "train", "run.yaml", *given]
    printed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500, check=True).stderr
    said = re.search(r"margins +of a step are within ([\d.]+) of float32's", printed)
    assert (said is not None) is in_bf16
    assert said is None or 0 < float(said[1]) < 0.1
