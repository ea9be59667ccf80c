"""Successive halving of a sweep: who goes on is what it would be alone, who doesn't can be continued by hand."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from refusals import refused
from test_sweep import RUN, assert_same_run, material, output, read_steps, run, same_adapter

from windlass.files import read_json, read_json_lines
from windlass.plan import make_plan
from windlass.run_folder import FAILED, FINISHED, list_trials, log_event
from windlass.runfile import read_run_file
from windlass.runfile.fields import Sweep
from windlass.runfile.sweep import Halving, list_halvings, share_of_steps
from windlass.sweep.halving import has_reached, read_loss
from windlass.train.checkpoint.folder import prune_checkpoints

__all__ = ["material"]  # a fixture
TRIALS: dict[str, dict[str, Any]] = {
    "slow": {"train.learning_rate": 1e-4, "train.seed": 7},
    "fast": {"train.learning_rate": 2e-2, "lora.lora_dropout": 0.1},
    "wide": {"lora.r": 8, "train.learning_rate": 1e-2, "lora.experts": True},
}
USUAL = "keep: 1, at: [2, 4]"
PAIRS = ("train.neftune_noise_alpha=null",)


def write(folder: Path, name: str, trials: dict[str, dict[str, Any]], halving: str = USUAL, more: str = "") -> Path:
    """Write a sweep of 6 steps, evaluated every 2 and saved every 3: where it is halved isn't saved otherwise."""
    listed = [{"name": trial, **settings} for trial, settings in trials.items()]
    text = RUN.replace("output_dir: sweep", f"output_dir: {name}").replace("max_steps: 4", "max_steps: 6")
    text = text.replace("save_steps: 2", "save_steps: 3") + more
    path = folder / f"{name}.yaml"
    path.write_text(f"{text}sweep: {{{halving}, trials: {json.dumps(listed)}}}\n")
    return path


def read_losses(trial: Path) -> dict[int, float]:
    events = [event for event in read_json_lines(trial / "events.jsonl") if event["kind"] == "eval"]
    return {event["step"]: event["eval_loss"] for event in events}


@pytest.mark.long
def test_who_goes_on_is_the_run_alone_and_who_is_dropped_continues_by_hand(material: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(material, tmp_path / "here")
    file = write(folder, "sweep", TRIALS)
    printed = run(f"train {file} --override train.logging_steps=3", folder)
    trials = folder / "sweep" / "trials"
    for name in TRIALS:
        run(f"train {trials / name / 'run.yaml'} --override train.output_dir=alone/{name}", folder)
    alone = {name: read_losses(folder / "alone" / name) for name in TRIALS}
    second = sorted(TRIALS, key=lambda name: alone[name][2])[:2]
    last = min(second, key=lambda name: alone[name][4])
    dropped = {name: f"dropped at step {4 if name in second else 2}" for name in TRIALS if name != last}
    states = {path.name: state for path, state in list_trials(folder / "sweep").items()}
    assert states == {last: FINISHED, **dropped}
    assert_same_run(trials / last, folder / "alone" / last)
    state = "checkpoints/step-6/trainer_state.json"
    logs = [read_json(path / last / state) for path in (trials, folder / "alone")]
    means = [[line["loss"] for line in log["log_history"] if "loss" in line] for log in logs]
    assert (len(means[0]), means[0]) == (2, means[1])
    assert "1 of 3 trials finished, 2 were dropped" in printed
    assert f"step 4: kept {last} ({alone[last][4]:.4f}); dropped" in " ".join(printed.split())
    decisions = read_json(folder / "sweep" / "manifest.json")["halved"]["decisions"]
    assert [decision["losses"] for decision in decisions] == [
        {name: alone[name][2] for name in TRIALS},
        {name: alone[name][4] for name in second},
    ]
    for name, state in dropped.items():
        step = int(state.split()[-1])
        assert read_losses(trials / name) == {at: loss for at, loss in alone[name].items() if at <= step}
        assert [line["loss"] for line in read_steps(trials / name / "steps-rank0.jsonl")] == [
            line["loss"] for line in read_steps(folder / "alone" / name / "steps-rank0.jsonl")
        ][:step]
        assert read_json(trials / name / "manifest.json")["state"] == state
        assert (trials / name / "checkpoints" / f"step-{step}").is_dir()
    reported = output("report sweep --json", folder)["sweep"]
    assert {trial["name"]: trial["state"] for trial in reported["trials"]} == states
    assert reported["effects_at_step"] == 2
    rates = {row["value"]: row["mean_eval_loss"] for row in reported["effects"] if row["key"] == "train.learning_rate"}
    assert rates == {str(TRIALS[name]["train.learning_rate"]): alone[name][2] for name in TRIALS}
    assert f"trial {last}, 3 of 3 trials ended" in run("watch sweep --once", folder)
    assert "nothing is left to train" in run(f"train {file} --resume", folder)
    other = write(folder, "sweep", TRIALS, "keep: 2, at: [2, 4]")
    assert "was 1 when trials were dropped, is 2 now" in " ".join(run(f"train {other} --resume", folder, 2).split())
    for name in {state: name for name, state in dropped.items()}.values():  # one of each step
        run(f"train {trials / name / 'run.yaml'} --resume", folder)
        same_adapter(trials / name, folder / "alone" / name)
        assert read_losses(trials / name) == alone[name]


@pytest.mark.long
@pytest.mark.fault("a halved sweep whose trial diverges", "`windlass train`", "an alarm ended 1 of 4 trials: wide")
def test_a_trial_that_diverges_is_the_worst_and_equals_go_on_in_order(material: Path, tmp_path: Path) -> None:
    """Such a decay changes no bit, so three trials are equal."""
    folder = shutil.copytree(material, tmp_path / "here")
    trials: dict[str, dict[str, Any]] = {
        "wide": {"train.learning_rate": 1e30, "train.max_grad_norm": 0, "train.warmup_ratio": 0},
        "c": {"train.weight_decay": 1e-30},
        "a": {"train.weight_decay": 0.0},
        "b": {"train.weight_decay": 1e-29},
    }
    file = write(folder, "sweep", trials, "keep: 2, at: [4]")
    printed = run(f"train {file} --override cluster.gpus_per_node=1", folder, code=1)
    assert "an alarm ended 1 of 4 trials: wide" in printed
    states = {path.name: state for path, state in list_trials(folder / "sweep").items()}
    assert states == {"wide": FAILED, "c": FINISHED, "a": FINISHED, "b": "dropped at step 4"}
    decision = read_json(folder / "sweep" / "manifest.json")["halved"]["decisions"][0]
    assert decision["kept"] == ["c", "a"]
    assert decision["losses"]["wide"] is None
    # What was decided holds for these trials and these steps.
    one = "--resume --override cluster.gpus_per_node=1"
    manifest = folder / "sweep" / "trials" / "a" / "manifest.json"
    manifest.write_text(json.dumps(read_json(manifest) | {"state": "stopped by a signal"}))
    for halving, words in {
        "keep: 1, at: [4]": "was 2 when trials were dropped, is 1 now",
        "keep: 2, at: [2]": "was [4] when trials were dropped, is [2] now",
    }.items():
        assert words in " ".join(run(f"train {write(folder, 'sweep', trials, halving)} {one}", folder, code=2).split())
    more = write(folder, "sweep", trials | {"d": {"lora.r": 2}}, "keep: 2, at: [4]")
    assert "other trials" in run(f"train {more} {one}", folder, code=2)


# --- what is refused ---


@pytest.mark.parametrize(
    ("halving", "code", "place", "override"),
    [
        ("keep: 1", "half-a-halving", "sweep.keep", ""),
        ("at: [2, 4]", "half-a-halving", "sweep.at", ""),
        ("keep: 0, at: [2]", "wrong-value", "sweep.keep", ""),
        ("keep: 1, at: [2, 2]", "halving-order", "sweep.at", ""),
        ("keep: 4, at: [2]", "halving-keeps-all", "sweep.keep", ""),
        ("keep: 1, at: [2, 6]", "halving-at-end", "sweep.at", ""),
        (USUAL, "not-evaluated", "sweep.at", "train.eval_strategy=no"),
        (USUAL, "between-evaluations", "sweep.at", "train.eval_steps=3"),
    ],
)
def test_a_halving_that_is_none_is_refused_with_its_place(
    halving: str, code: str, place: str, override: str, tmp_path: Path
) -> None:
    with refused(code, place):
        read_run_file(write(tmp_path, "run", TRIALS, halving), [override] if override else [])


def test_the_hint_names_steps_that_would_do(tmp_path: Path) -> None:
    for halving, hint in {
        "keep: 1, at: [3]": "write `at: [4]`, or set train.eval_steps: 3",
        "keep: 1, at: [1, 4]": "write `at: [2, 4]`, or set train.eval_steps: 1",
        "keep: 1, at: [2, 40]": "write `at: [2, 4]`",
    }.items():
        with refused(("halving-at-end" if "40" in halving else "between-evaluations"), "sweep.at") as problems:
            read_run_file(write(tmp_path, "run", TRIALS, halving))
        assert problems[0].hint == hint


def test_trials_that_can_not_be_compared_are_not_halved(tmp_path: Path) -> None:
    other = {"one": {}, "two": {"data.dataset_name_or_path": "other.txt"}}
    with refused("not-comparable", "sweep.keep"):
        read_run_file(write(tmp_path, "run", other, "keep: 1, at: [2]"))
    beta = {"one": {}, "two": {"dpo.beta": 0.5}}
    with refused("not-comparable", "sweep.keep"):
        read_run_file(write(tmp_path, "run", beta, "keep: 1, at: [2]"), ["train.objective=dpo", *PAIRS])


@pytest.mark.long
@pytest.mark.fault("a halving between trials' validation rows", "`windlass train`", "different validation rows")
@pytest.mark.fault("a halving at a step that no epoch ends with", "`windlass train`", "no evaluation at step 2")
def test_what_the_data_decide_is_refused_before_the_base_is_loaded(material: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(material, tmp_path / "here")
    one = "--override cluster.gpus_per_node=1"
    rows = write(folder, "rows", {"one": {}, "two": {"data.max_length": 8}})
    printed = run(f"train {rows} {one} --override sweep.at=[2]", folder, code=2)
    assert "different validation rows" in " ".join(printed.split())
    epochs = write(folder, "epochs", {"one": {}, "two": {"lora.r": 2}}, "keep: 1, at: [2]")
    printed = run(f"train {epochs} {one} --override train.eval_strategy=epoch --override train.max_steps=60", folder, 2)
    assert "no evaluation at step 2" in printed
    none = write(folder, "none", {"one": {}, "two": {"lora.r": 2}}, "keep: 1, at: [2]")
    none.write_text(none.read_text().replace(", val_fraction: 0.1", "").replace("  eval_steps: 2\n", ""))
    printed = run(f"train {none} {one} --override sweep.at=[200] --override train.max_steps=300", folder, code=2)
    assert "there are no validation rows" in " ".join(printed.split())
    assert not any((folder / name / "load.json").exists() for name in ("rows", "epochs", "none"))


# --- figures ---


@pytest.mark.parametrize(
    ("trials", "keep", "at", "expected"),
    [
        (12, 2, [50, 100], [(50, 6), (100, 2)]),
        (7, 1, [1, 2, 3], [(1, 4), (2, 2), (3, 1)]),
        (4, 2, [50, 100], [(50, 2)]),
        (5, 4, [50, 100], [(50, 4)]),
    ],
)
def test_half_goes_on_until_keep_are_left(trials: int, keep: int, at: list[int], expected: list[Any]) -> None:
    assert list(map(tuple, list_halvings(Sweep(keep=keep, at=at), trials))) == expected


def test_the_plan_counts_the_steps_of_those_that_go_on(material: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(material)
    plan = make_plan(read_run_file(write(material, "halved", TRIALS)))
    assert plan.halvings == ((2, 2), (4, 1))
    share = share_of_steps(plan.halvings, 3, 6)
    assert share == (3 * 2 + 2 * 2 + 1 * 2) / (3 * 6)
    seconds = [trial.seconds for trial in plan.trials]
    assert plan.seconds is not None
    assert plan.seconds["steps"] == pytest.approx(share * sum(each["steps"] for each in seconds if each))
    assert plan.as_dict()["halvings"] == [{"step": 2, "trials": 2}, {"step": 4, "trials": 1}]
    assert plan.seconds["load"] == seconds[0]["load"]  # type: ignore[index]


def test_checkpoints_that_a_run_alone_would_not_have_change_nothing_once_there_is_a_newer_one(tmp_path: Path) -> None:
    """`step-4` is the best of all, and would be neither saved nor counted."""
    losses = {1: 0.9, 2: 0.5, 3: 0.8, 4: 0.1}
    for step, loss in losses.items():
        (tmp_path / f"step-{step}").mkdir(parents=True)
        (tmp_path / f"step-{step}" / "manifest.json").write_text(json.dumps({"eval_loss": loss}))
    prune_checkpoints(tmp_path, 1, [4])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3", "step-4"]
    (tmp_path / "step-5").mkdir()
    (tmp_path / "step-5" / "manifest.json").write_text(json.dumps({"eval_loss": 0.7}))
    prune_checkpoints(tmp_path, 1, [4])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-5"]


def test_a_trial_is_judged_by_its_last_evaluation_at_the_step(tmp_path: Path) -> None:
    """A resumed run repeats an evaluation. A checkpoint at the step, or behind it, is not enough."""
    trial: Any = SimpleNamespace(folder=tmp_path)
    halving = Halving(4, 1)
    (tmp_path / "checkpoints" / "step-4").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-4" / "manifest.json").write_text("{}")
    log_event(tmp_path, "eval", 2, eval_loss=0.1)
    assert read_loss(tmp_path, 4) is None
    assert not has_reached(trial, halving)
    for loss in (0.9, 0.8):
        log_event(tmp_path, "eval", 4, eval_loss=loss)
    assert read_loss(tmp_path, 4) == 0.8
    assert has_reached(trial, halving)
