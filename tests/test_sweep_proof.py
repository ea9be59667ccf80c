"""Sweeps in full: six trials equal the runs alone, on one rank and on two; killed ten times they end the same; compiled
layers and trackers."""

import itertools
import json
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from safetensors.torch import load_file
from test_sweep import RUN, assert_same_run, count_steps, material, read_steps, run, start

from windlass.errors import SAVED
from windlass.files import read_json, read_json_lines
from windlass.run_folder import ADAPTER, FINISHED, list_trials

__all__ = ["material"]  # a fixture

# Learning rate x r; one with other data, one with dropout.
SIX: dict[str, dict[str, Any]] = {
    **{
        f"lr{rate}-r{r}": {"train.learning_rate": rate, "lora.r": r}
        for rate, r in itertools.product((1e-3, 1e-2), (4, 8))
    },
    "data": {"data.dataset_name_or_path": "other.txt"},
    "dropout": {"lora.lora_dropout": 0.2, "train.seed": 3},
}


def write(folder: Path, name: str, trials: dict[str, dict[str, Any]], options: str = "", **replaced: str) -> Path:
    """Write a sweep. `replaced`: values of keys of the run file."""
    text = RUN.replace("output_dir: sweep", f"output_dir: {name}")
    for key, value in replaced.items():
        before = next(line for line in text.splitlines() if line.strip().startswith(f"{key}:"))
        text = text.replace(before, f"{before.partition(':')[0]}: {value}")
    listed = json.dumps([{"name": trial, **settings} for trial, settings in trials.items()])
    path = folder / f"{name}.yaml"
    path.write_text(f"{text}sweep: {{{options}trials: {listed}}}\n")
    return path


@pytest.mark.prove
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_of_six_trials_equals_the_run_alone(ranks: int, material: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(material, tmp_path / "here")
    on = f"--override cluster.gpus_per_node={ranks}"
    run(f"train {write(folder, 'sweep', SIX)} {on}", folder)
    for name in SIX:
        trial = folder / "sweep" / "trials" / name
        run(f"train {trial / 'run.yaml'} --override train.output_dir=alone/{name} {on}", folder)
        assert_same_run(folder / "alone" / name, trial)
    assert set(list_trials(folder / "sweep").values()) == {FINISHED}


# --- kills ---

FOUR = {name: SIX[name] for name in ("lr0.001-r4", "lr0.01-r8", "dropout")} | {"slow": {"train.learning_rate": 1e-5}}
LONG = {"max_steps": "40", "eval_steps": "5", "save_steps": "10"}
# At step 15 nothing would be saved otherwise.
HALVED = {"whole": "", "halved": "keep: 1, at: [15, 30], "}


def read_outcome(sweep: Path) -> dict[str, Any]:
    """Return what a sweep's trials came to: states, losses, evaluations, and the adapters that they ended with."""
    outcome: dict[str, Any] = {}
    for trial, state in list_trials(sweep).items():
        steps = [
            [line.get("loss"), line["grad_norm"], line["rows"]] for line in read_steps(trial / "steps-rank0.jsonl")
        ]
        events = read_json_lines(trial / "events.jsonl")
        evaluated = [[event["step"], event["eval_loss"]] for event in events if event["kind"] == "eval"]
        ended = trial / ("final" if state == FINISHED else f"checkpoints/step-{state.split()[-1]}")
        outcome[trial.name] = [state, steps, evaluated, load_file(ended / ADAPTER)]
    return outcome


def assert_same_outcome(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name][:3] == other[name][:3], name
        ours, theirs = one[name][3], other[name][3]
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[tensor], theirs[tensor]) for tensor in ours), name


def count_all(sweep: Path) -> int:
    return sum(count_steps(trial) for trial in (sweep / "trials").glob("*"))


def wait_until(steps: int, seconds: float, sweep: Path, process: subprocess.Popen[str]) -> None:
    """Wait until the trials have so many more steps, or so long if that is shorter."""
    began = time.monotonic()
    wanted = count_all(sweep) + steps
    while process.poll() is None and time.monotonic() - began < min(seconds, 200) and count_all(sweep) < wanted:
        time.sleep(0.005)


@pytest.mark.prove
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("options", [*HALVED])
def test_a_sweep_that_is_killed_ten_times_ends_as_it_would(options: str, material: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(material, tmp_path / "here")
    run(f"train {write(folder, 'expected', FOUR, HALVED[options], **LONG)}", folder)
    expected = read_outcome(folder / "expected")
    file = write(folder, "killed", FOUR, HALVED[options], **LONG)
    chance = random.Random(len(options))
    sweep = folder / "killed"
    kills: list[str] = []
    while len(kills) < 10:
        process = start(f"train {file} --resume", folder, warm.python())
        # Mostly while training, sometimes while starting, loading or between trials.
        seconds = chance.choice([200, 200, 200, chance.uniform(0, 30)])
        wait_until(chance.randint(1, 24), seconds, sweep, process)
        number = chance.choice([signal.SIGKILL, signal.SIGTERM])
        process.send_signal(number)
        printed, _ = process.communicate(timeout=300)
        if process.returncode == 0:  # it came to its end first: once more, with the kills that are left
            assert_same_outcome(expected, read_outcome(sweep))
            shutil.rmtree(sweep)
            continue
        kills.append(number.name)
        assert process.returncode in (SAVED, -signal.SIGKILL, -signal.SIGTERM, 143), (kills, printed)
    run(f"train {file} --resume", folder)
    assert_same_outcome(expected, read_outcome(sweep))
    if HALVED[options]:
        decisions = [read_json(folder / name / "manifest.json")["halved"] for name in ("expected", "killed")]
        assert decisions[0] == decisions[1]
    assert len(set(kills)) == 2


# --- compiled layers, and trackers ---


@pytest.mark.prove
@pytest.mark.timeout(3000)  # the C++ compiler takes minutes on a loaded machine
def test_compiled_trials_equal_the_compiled_runs_alone(material: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(material, tmp_path / "here")
    on = "--override cluster.gpus_per_node=1 --override train.compile=true"
    trials = {name: SIX[name] for name in ("lr0.001-r4", "lr0.01-r8", "dropout")}
    process = start(f"train {write(folder, 'sweep', trials)} {on}", folder, warm.python())
    printed, _ = process.communicate(timeout=2000)
    assert process.returncode == 0, printed
    assert printed.count("proven equal to eager") == len(trials), printed
    for name in trials:
        trial = folder / "sweep" / "trials" / name
        run(f"train {trial / 'run.yaml'} --override train.output_dir=alone/{name}", folder)
        assert_same_run(folder / "alone" / name, trial)


@pytest.mark.long
def test_each_trial_has_its_own_tensorboard_log(material: Path, tmp_path: Path) -> None:
    """Also if the sweep is halved: the trials' runs are continued below their own folders."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = shutil.copytree(material, tmp_path / "here")
    trials = {name: SIX[name] for name in ("lr0.001-r4", "lr0.01-r8")}
    file = write(folder, "sweep", trials, "keep: 1, at: [2], ")
    run(f"train {file} --override cluster.gpus_per_node=1 --override train.report_to=tensorboard", folder)
    for trial in list_trials(folder / "sweep"):
        assert read_json(trial / "manifest.json")["run"]["train"]["run_name"] == trial.name
        logged: dict[int, float] = {}
        for path in sorted(trial.glob("runs/*")):
            scalars = events.EventAccumulator(str(path)).Reload().Scalars("train/step/loss")
            logged |= {event.step: event.value for event in scalars}
        assert logged == {
            line["step"]: pytest.approx(line["loss"], rel=1e-6) for line in read_steps(trial / "steps-rank0.jsonl")
        }
    assert not (folder / "sweep" / "runs").exists()
    assert not (folder / "runs").exists()
