"""`sweep:` every trial is what it would be alone, on a base that stays as it was loaded; what is wrong is refused."""

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import warm
from ports import free_port
from refusals import refused
from run_records import read_records
from safetensors.torch import load_file
from test_faults import windlass
from text_run import WORDS

from windlass import tiny
from windlass.compat import enable_checkpointing
from windlass.errors import RANK_USER_INPUT, SAVED, RunError, UserError
from windlass.files import WriteGuard, read_json, read_json_lines
from windlass.observe.reader import Tail
from windlass.observe.report.trials import collect_trials
from windlass.plan import Plan, make_plan
from windlass.plan.sweep import plan_sweep
from windlass.ranks.rank import Rank
from windlass.run_folder import (
    ADAPTER,
    FAILED,
    FINISHED,
    HALVED,
    RUNNING,
    STOPPED,
    WAITING,
    begin_manifest,
    list_trials,
    read_trial_states,
    update_manifest,
)
from windlass.run_folder import TRIALS as TRIALS_KEY
from windlass.runfile import list_keys, read_run_file
from windlass.runfile.sweep import CHANGE_STEPS, SHARED, format_number, why_shared
from windlass.start import leave_finished
from windlass.sweep import trials
from windlass.sweep.trials import begin_sweep, claim_sweep, train_trials
from windlass.train.checkpoint.resume import describe_run
from windlass.train.load import load_base
from windlass.train.lora import attach_adapter
from windlass.train.patches import ModelPatches
from windlass.train.session import Options, Session
from windlass.train.shared_base import SharedBase
from windlass.train.trackers import open_tensorboard

RUN = """\
model: {model_name_or_path: model, torch_dtype: float32}
lora: {r: 4, lora_alpha: 8, target_modules: [q_proj, o_proj]}
data: {dataset_name_or_path: data.txt, max_length: 48, packing: false, val_fraction: 0.1}
train:
  output_dir: sweep
  max_steps: 4
  per_device_train_batch_size: 2
  gradient_accumulation_steps: 2
  learning_rate: 0.005
  bf16: false
  eval_steps: 2
  save_steps: 2
  save_total_limit: null
  logging_steps: 1
  neftune_noise_alpha: 5
cluster: {nodes: 1, gpus_per_node: 2, gpu: cpu}
"""
# Different ranks, targets, seeds, rates, data, dropout and optimizers; all experts in one, none in the others.
TRIALS: dict[str, dict[str, Any]] = {
    "first": {"lora.r": 8, "train.learning_rate": 1e-3, "train.seed": 7, "lora.lora_dropout": 0.0},
    "second": {"lora.target_modules": "all-linear", "lora.experts": True, "lora.lora_dropout": 0.1, "train.seed": 3},
    "third": {"data.dataset_name_or_path": "other.txt", "train.optim": "adafactor", "train.max_grad_norm": 0.1},
}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    tiny.write_model(folder / "model", files=2, experts=4)
    chance = random.Random(0)
    for name in ("data.txt", "other.txt"):
        (folder / name).write_text("".join(" ".join(chance.choices(WORDS.split(), k=9)) + "\n" for _ in range(60)))
    return folder


def write_sweep(folder: Path, name: str, trials: dict[str, dict[str, Any]], more: str = "") -> Path:
    listed = [{"name": trial, **settings} for trial, settings in trials.items()]
    path = folder / f"{name}.yaml"
    text = RUN.replace("output_dir: sweep", f"output_dir: {name}") + more
    path.write_text(f"{text}\nsweep:\n  trials: {json.dumps(listed)}\n")
    return path


def copy_material(material: Path, tmp_path: Path, *sweeps: str) -> Path:
    """Copy the model and the data, and sweeps of these names."""
    wanted = {"model", "data.txt", "other.txt", *sweeps, *(f"{name}.yaml" for name in sweeps)}
    left_out = [path.name for path in material.iterdir() if path.name not in wanted]
    return Path(shutil.copytree(material, tmp_path / "here", ignore=lambda *_: left_out))


def run(command: str, folder: Path, code: int = 0) -> str:
    got, printed = windlass(command, folder)
    assert (got, "Traceback" in printed) == (code, False), printed
    return printed


def output(command: str, folder: Path) -> Any:
    """Return the JSON on stdout."""
    process = start(command, folder, warm.python(), stderr=subprocess.DEVNULL)
    printed, _ = process.communicate(timeout=800)
    assert process.returncode == 0
    return json.loads(printed)


def read_steps(path: Path) -> list[dict[str, Any]]:
    return list(Tail(path).objects())


READERS: dict[str, Callable[[Path], Any]] = {
    "adapter_model.safetensors": load_file,
    "optimizer.pt": partial(torch.load, weights_only=False),
    "random.json": read_json,
    "scheduler.json": read_json,
    "reference.safetensors": load_file,
}


def read_run(run: Path) -> dict[str, Any]:
    """Return what two equal runs have in common: checkpoints, losses and evaluations, and what was recorded."""
    found: dict[str, Any] = {
        str(path.relative_to(run)): READERS[path.name](path) for path in run.rglob("*") if path.name in READERS
    }
    keys = ("step", "loss", "grad_norm", "learning_rate", "rows", "tokens")
    for path in run.glob("steps-rank*.jsonl"):
        found[path.name] = [{key: line.get(key) for key in keys} for line in read_steps(path)]
    events = read_json_lines(run / "events.jsonl")
    found["evaluations"] = [(event["step"], event["eval_loss"]) for event in events if "eval_loss" in event]
    manifest = read_json(run / "manifest.json")
    del manifest["run"]["train"]["output_dir"], manifest["layout"]["reason"]
    return found | {key: manifest.get(key) for key in ("run", "base_digest", "data", "layout")}


def assert_same_run(one: Path, other: Path) -> None:
    ours, theirs = read_run(one), read_run(other)
    assert {"final/adapter_model.safetensors", "steps-rank0.jsonl"} <= ours.keys()
    assert_same(ours, theirs)


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for ours, theirs in zip(one, other, strict=True):
            assert_same(ours, theirs)
    else:
        assert one is other or repr(one) == repr(other)


# --- a trial is the run alone ---


ONE_RANK = "cluster.gpus_per_node=1"
RESIDENT = "layout: resident\n"


@pytest.fixture(scope="module")
def swept(material: Path) -> Path:
    """A finished sweep on one rank, beside the model and the data."""
    run(f"train {write_sweep(material, 'swept', TRIALS, RESIDENT)} --override {ONE_RANK}", material)
    return material / "swept"


@pytest.mark.long
def test_every_trial_equals_the_run_alone_in_any_order(swept: Path, material: Path) -> None:
    """Whatever a trial leaves behind is before another one in one of the two orders."""
    backward = write_sweep(material, "backward", dict(reversed(TRIALS.items())), RESIDENT)
    run(f"train {backward} --override {ONE_RANK}", material)
    for name in TRIALS:
        assert_same_run(material / "backward" / "trials" / name, swept / "trials" / name)
    run(f"train {swept / 'trials' / 'second' / 'run.yaml'} --override train.output_dir=alone", material)
    assert_same_run(material / "alone", swept / "trials" / "second")
    assert set(list_trials(swept).values()) == {FINISHED}


@pytest.mark.long
def test_a_trial_after_one_with_split_experts_equals_the_run_alone(material: Path, tmp_path: Path) -> None:
    folder = copy_material(material, tmp_path)
    trials = {"second": TRIALS["second"], "third": {**TRIALS["third"], "train.optim": "adamw_torch"}}
    run(f"train {write_sweep(folder, 'sweep', trials, 'layout: {name: expert-parallel, expert_parallel: 2}')}", folder)
    third = folder / "sweep" / "trials" / "third"
    run(f"train {third / 'run.yaml'} --override train.output_dir=alone", folder)
    assert_same_run(folder / "alone", third)


# --- what ends a trial, or the sweep ---


def start(command: str, folder: Path, python: str, stderr: int = subprocess.STDOUT) -> subprocess.Popen[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    words = [python, "-m", "windlass", *shlex.split(command)]
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": stderr}
    return subprocess.Popen(words, cwd=folder, env=environ, text=True, start_new_session=True, **streams)


def wait_for(what: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 200
    while not what() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


def count_steps(run: Path) -> int:
    path = run / "steps-rank0.jsonl"
    return len(read_steps(path)) if path.exists() else 0


@pytest.mark.long
def test_a_stopped_sweep_goes_on_with_the_trial_that_was_stopped(swept: Path, material: Path, tmp_path: Path) -> None:
    folder = copy_material(material, tmp_path)
    trials = TRIALS | {"second": {**TRIALS["second"], "train.max_steps": 24}}
    file = write_sweep(folder, "stopped", trials, RESIDENT)
    file.write_text(file.read_text().replace("gpus_per_node: 2", "gpus_per_node: 1"))
    process = start(f"train {file}", folder, warm.python())
    sweep, second = folder / "stopped", folder / "stopped" / "trials" / "second"
    wait_for(lambda: count_steps(second) > 2, process)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=800)
    assert process.returncode == SAVED, printed
    states = [read_json(trial / "manifest.json").get("state") for trial in list_trials(sweep)]
    assert states == [FINISHED, STOPPED, None]
    assert read_json(sweep / "manifest.json")["state"] == STOPPED
    first = (sweep / "trials" / "first" / "manifest.json").stat().st_mtime_ns
    assert "trial second, 1 of 3 trials ended" in run("watch stopped --once", folder)
    assert "trial second, 1 of 3 trials ended, step" in run(f"status {file}", folder)
    assert "unfinished sweep" in run(f"train {file}", folder, code=2)
    run(f"train {file} --resume", folder)
    assert (sweep / "trials" / "first" / "manifest.json").stat().st_mtime_ns == first
    for name in ("first", "third"):
        assert_same_run(sweep / "trials" / name, swept / "trials" / name)
    run(f"train {second / 'run.yaml'} --override train.output_dir=alone", folder)
    same_adapter(second, folder / "alone")
    assert "finished sweep" in run(f"train {file}", folder, code=2)
    before = read_records(sweep)
    assert "contains this sweep, finished: nothing is left to train" in run(f"train {file} --resume", folder)
    assert read_records(sweep) == before


def same_adapter(one: Path, other: Path) -> None:
    ours, theirs = (load_file(folder / "final" / ADAPTER) for folder in (one, other))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.long
@pytest.mark.fault("a trial of a sweep that diverges", "`windlass train`", "an alarm ended 1 of 3 trials: second")
def test_a_trial_that_diverges_ends_alone(swept: Path, material: Path, tmp_path: Path) -> None:
    folder = copy_material(material, tmp_path)
    diverging = {"train.learning_rate": 1e30, "train.max_grad_norm": 0, "train.warmup_ratio": 0}
    trials = {**TRIALS, "second": TRIALS["second"] | diverging}
    train = f"train {write_sweep(folder, 'sweep', trials, RESIDENT)} --override {ONE_RANK}"
    assert "an alarm ended 1 of 3 trials: second" in run(train, folder, code=1)
    assert list(list_trials(folder / "sweep").values()) == [FINISHED, FAILED, FINISHED]
    assert_same_run(folder / "sweep" / "trials" / "third", swept / "trials" / "third")
    assert "an alarm ended 1 of 3 trials: second" in run(f"{train} --resume", folder, code=1), "not trained again"
    report = run("report sweep", folder)
    assert report.index("first") < report.index("second"), "what never was evaluated comes last"
    # Trials that have ended are compared with the data as they are now.
    data, before = folder / "data.txt", read_records(folder / "sweep")
    data.write_text(data.read_text().replace("mast", "hull"))
    write_sweep(folder, "sweep", {"fourth" if name == "third" else name: trials[name] for name in trials}, RESIDENT)
    printed = " ".join(run(f"{train} --resume", folder, code=2).split())
    assert "third is no longer in the run file" in printed
    assert "trial first: the data are not those" in printed
    assert read_records(folder / "sweep") == before


def make_session(said: list[str]) -> Session:
    others: dict[str, Any] = dict.fromkeys(("stop_signal", "report"))
    console: Any = SimpleNamespace(print=said.append)
    return Session(Rank(), console, unwritten=WriteGuard(print), options=Options(resume=True), **others)


def plan_trials(material: Path, folder: Path, names: list[str], *overrides: str) -> Plan:
    path = write_sweep(material, "claimed", {name: TRIALS.get(name, {}) for name in names}, RESIDENT)
    return make_plan(read_run_file(path, [ONE_RANK, f"train.output_dir={folder}", *overrides]))


def finish(sweep: Path) -> None:
    """Record that all trials have finished, as they are in the folder."""
    for trial in list_trials(sweep):
        begin_manifest(trial, describe_run(make_plan(read_run_file(trial / "run.yaml")), ""))
        update_manifest(trial, state=FINISHED)
    update_manifest(sweep, state=FINISHED, **{TRIALS_KEY: {trial.name: FINISHED for trial in list_trials(sweep)}})


def test_a_sweep_whose_resume_is_refused_is_as_it_was(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the record of a trial that has failed and is no longer in the run file: it would be trained again."""
    monkeypatch.chdir(material)
    session = make_session([])
    monkeypatch.setattr(trials, "load_shared", mock.Mock())

    def check_data(trial: Plan, session: Session) -> Any:
        raise UserError("other rows", code="other-data")

    monkeypatch.setattr(trials, "check_data", check_data)

    def train(*names: str) -> None:
        with refused("other-data") as problems:
            plan = plan_trials(material, tmp_path, [*names])
            train_trials(plan, session)
        assert problems[0].problem == f"trial {names[0]}: other rows"

    train("first", "second")
    assert list(list_trials(tmp_path).values()) == [WAITING, WAITING], "a new one is recorded as a sweep"
    assert (tmp_path / "trials" / "first" / "run.yaml").is_file()
    finish(tmp_path)
    update_manifest(tmp_path / "trials" / "first", state=FAILED)
    update_manifest(tmp_path, **{TRIALS_KEY: {"first": FAILED, "second": FINISHED}})
    before = read_records(tmp_path)
    train("second", "third")
    assert read_records(tmp_path) == before
    assert read_trial_states(tmp_path, ["first", "second"]) == {"first": FAILED, "second": FINISHED}


@pytest.mark.fault(
    "a finished sweep with another setting",
    "`windlass train --resume`",
    "was 4 when this run began, is 6 now",
)
def test_a_finished_sweep_is_left_as_a_finished_run_is(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(material)
    plan = plan_trials(material, tmp_path, ["first", "second"])
    with ExitStack() as held:
        claim_sweep(plan, make_session([]), held)
    leave_finished(plan, resume=True)
    finish(tmp_path)
    with refused("finished-run", f"train.output_dir={tmp_path}"):
        leave_finished(plan, resume=False)
    auto = plan_trials(material, tmp_path, ["second", "first"], "train.resume=auto")
    for again, resume in ((plan, True), (auto, False)):
        with pytest.raises(SystemExit) as ended:
            leave_finished(again, resume=resume)
        assert ended.value.code == 0
        assert f"{tmp_path} contains this sweep, finished: nothing is left to train" in capsys.readouterr().err
    with refused("changed-setting", "train.max_steps=6") as problems:
        leave_finished(plan_trials(material, tmp_path, ["first", "second"], "train.max_steps=6"), resume=True)
    assert [problem.problem for problem in problems] == ["was 4 when this run began, is 6 now"], "of all trials"
    leave_finished(plan_trials(material, tmp_path, ["first", "second", "third"]), resume=True)
    halved = {"keep": 1, "at": [2], "trials": ["first", "second"], "decisions": []}
    update_manifest(tmp_path, **{HALVED: halved})
    with refused("changed-halving"):
        leave_finished(plan, resume=True)
    update_manifest(tmp_path, **{HALVED: None, TRIALS_KEY: {"first": FAILED, "second": FINISHED}})
    update_manifest(tmp_path / "trials" / "first", state=FAILED)
    with refused("trials-failed", error=RunError):
        leave_finished(plan, resume=True)


@pytest.mark.fault(
    "other settings after trials were taken out of a sweep",
    "`windlass train --resume`",
    "no longer in the run file: left out of the sweep's table",
)
def test_results_of_other_settings_leave_the_table_with_their_trials(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(material)
    said: list[str] = []
    session = make_session(said)

    def claim(names: list[str], *overrides: str) -> dict[str, str]:
        plan = plan_trials(material, tmp_path, names, *overrides)
        with ExitStack() as held:
            states = claim_sweep(plan, session, held)
        begin_sweep(plan, session, states)
        return states

    claim(["first", "second"])
    finish(tmp_path)
    with refused("changed-setting", "data.max_length=40"):
        claim(["second", "third"], "data.max_length=40")
    with refused("changed-setting", "train.max_steps=5") as problems:
        claim(["first", "third"], "train.max_steps=5")
    assert problems[0].problem == "trial first: was 4 when this run began, is 5 now"
    assert claim(["third", "fourth"], "data.max_length=40") == {"third": WAITING, "fourth": WAITING}
    assert said == ["first, second are no longer in the run file: left out of the sweep's table"]
    assert [trial.name for trial in list_trials(tmp_path)] == ["third", "fourth"]
    assert [trial.name for trial in collect_trials(tmp_path, {}).trials] == ["third", "fourth"]
    assert {path.name for path in (tmp_path / "trials").iterdir()} == {"first", "second", "third", "fourth"}


@pytest.mark.long
@pytest.mark.fault("a run into the folder of a sweep", "`windlass train`", "contains a sweep, and no run")
@pytest.mark.fault("a sweep into the folder of a run", "`windlass train`", "contains a run, and no sweep")
def test_runs_and_sweeps_share_no_folder_and_all_commands_take_them(
    swept: Path, material: Path, tmp_path: Path
) -> None:
    folder = copy_material(material, tmp_path, "swept")
    run_file = folder / "run.yaml"
    run_file.write_text(RUN.replace("output_dir: sweep", "output_dir: swept"))
    assert "contains a sweep, and no run" in " ".join(run(f"train {run_file} --resume", folder, code=2).split())
    to_trial = f"--override train.output_dir={folder / 'swept' / 'trials' / 'second'}"
    printed = run(f"train {folder / 'swept.yaml'} {to_trial} --resume", folder, code=2)
    assert "contains a run, and no sweep" in " ".join(printed.split())

    losses = {each["name"]: each["loss"] for each in output("best swept --json", folder)["best"]}
    assert losses.keys() == {"base model", *(f"{trial}/step-{step}" for trial in TRIALS for step in (2, 4))}
    for each in output("best swept/trials/second --json", folder)["best"]:
        of_all = losses.get(f"second/{each['name']}", losses["base model"])
        assert each["loss"] == of_all, "ranked together as alone"
    assert "it is a sweep, whose adapters are in its trials" in run("export swept --to adapter", folder, code=2)
    run("export swept/trials/second --to adapter", folder)
    run("generate swept/trials/second --prompt mast --tokens 2", folder)
    report = output("report swept --json", folder)
    found = [trial["eval_loss"] for trial in report["sweep"]["trials"]]
    assert found == sorted(found)
    assert {trial["name"] for trial in report["sweep"]["trials"]} == {*TRIALS}
    page = (folder / "swept" / "report.html").read_text()
    assert "Trials, the lowest evaluation loss first" in page
    assert "gain over the base" in page


# --- the base ---


@pytest.mark.fault("a trial that changes the base", "`windlass train`", "is not as it was loaded")
def test_a_base_that_is_not_as_it_was_loaded_ends_the_sweep(material: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(material)
    plan = make_plan(read_run_file(write_sweep(material, "base", TRIALS, RESIDENT), [ONE_RANK])).trials[1]
    base = SharedBase(keeps=True)
    model, _ = base.get(lambda: load_base(plan.base, plan.layout, dtype=torch.float32))
    before: dict[str, Any] = {name: vars(module).copy() for name, module in model.named_modules()}
    adapted = attach_adapter(model, plan.run.lora, plan.adapter, 1)
    base.undo.callback(ModelPatches(model, dtype=None, noise_alpha=5).undo)
    enable_checkpointing(model, {"use_reentrant": False})
    assert len(list(adapted.get_base_model().modules())) > len(before)
    base.restore("sweep: trial second")
    after: dict[str, Any] = {name: vars(module) for name, module in model.named_modules()}
    assert {name: [*attributes] for name, attributes in after.items()} == {name: [*old] for name, old in before.items()}
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())

    weight = model.get_submodule("model.layers.0.self_attn.o_proj").weight.data
    kept = weight[3, 4].clone()
    weight[3, 4] += 1e-6
    with refused("base-changed", "sweep: trial second", RunError) as problems:
        base.restore("sweep: trial second")
    assert "o_proj.weight is not as it was loaded" in problems[0].problem
    weight[3, 4] = kept
    base.restore("sweep: trial second")
    weight[[0, 1]] = weight[[1, 0]]
    with refused("base-changed", "sweep: trial second", RunError):
        base.restore("sweep: trial second")


@pytest.mark.long
@pytest.mark.fault(
    "another config.json of the base where a trial was stopped",
    "`windlass train --resume`",
    "trial first: config.json of model is not the one that first/final was trained with",
)
@pytest.mark.fault(
    "another config.json of the base before a sweep's second trial",
    "`windlass train --resume`",
    "trial first: config.json of model is not the one that first/final was trained with",
)
def test_trials_of_two_bases_share_no_table(swept: Path, material: Path, tmp_path: Path) -> None:
    folder = copy_material(material, tmp_path, "swept")
    resume = f"train {folder / 'swept.yaml'} --override {ONE_RANK} --resume"
    sweep, config = folder / "swept", folder / "model" / "config.json"
    second = sweep / "trials" / "second"
    config.write_text(config.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 20000.0'))
    shutil.rmtree(second / "final")
    for state in (STOPPED, WAITING):
        if state == STOPPED:
            update_manifest(second, state=state)
        else:
            shutil.rmtree(second)
        states = {"first": FINISHED, "second": state, "third": FINISHED}
        update_manifest(sweep, state=STOPPED, **{TRIALS_KEY: states})
        before = read_records(sweep)
        printed = " ".join(run(resume, folder, code=2).split())
        assert "trial first: config.json of model is not the one that first/final was trained with" in printed
        assert "'rope_theta': 10000.0" in printed
        assert "add --allow-other-base" in printed
        assert read_records(sweep) == before
    printed = " ".join(run(f"{resume} --allow-other-base", folder).split())
    assert "warning: config.json of model is not the one that first/final" in printed
    assert set(list_trials(sweep).values()) == {FINISHED}


# --- the run file ---

VARIED = {
    "lora": """r lora_alpha lora_dropout target_modules rank_pattern alpha_pattern layers_to_transform task_type
        use_rslora use_dora init_lora_weights adapter dtype experts""",
    "data": """dataset_config_name format columns text_field prompt_template prompt_field completion_field
        messages_field chat_template template_kwargs completion_only_loss turns reasoning tools dataset_name_or_path
        train_split max_length truncation packing streaming mix""",
    "train": """num_train_epochs max_steps per_device_train_batch_size gradient_accumulation_steps global_batch_size
        optim learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_ratio warmup_steps weight_decay adam_beta1
        adam_beta2 adam_epsilon max_grad_norm router_aux_loss_coef neftune_noise_alpha seed data_seed""",
    "dpo": "beta loss label_smoothing length_normalized sft_weight",
    "orpo": "beta",
}


def test_every_key_is_shared_for_a_reason_or_may_differ() -> None:
    """A new key has to be put on one side."""
    keys = [key for key in list_keys() if key.count(".") == 1]
    varied = {key for key in keys if not why_shared(key)}
    assert varied == {f"{section}.{key}" for section, names in VARIED.items() for key in names.split()}
    assert {*CHANGE_STEPS} <= varied
    assert {*SHARED} <= {*list_keys()}


@pytest.mark.parametrize(
    ("sweep", "code", "place"),
    [
        ("{}", "empty-sweep", ": sweep"),
        ("{lora.r: [4]}", "one-value", "sweep.lora.r"),
        ("{lora.r: []}", "one-value", "sweep.lora.r"),
        ("{lora.r: 4}", "wrong-value", "sweep.lora.r"),
        ("{lora.r: [4, 4]}", "alike-trials", "sweep.lora.r[1]"),
        ("{lora.rank: [4, 8]}", "unknown-key", "sweep.lora.rank[0]"),
        ("{lora: [4, 8]}", "section-in-sweep", "sweep.lora"),
        ("{train: {learning_rate: [1, 2]}}", "wrong-value", "sweep.train"),
        ("{model.torch_dtype: [bfloat16, float32]}", "shared-key", "sweep.model.torch_dtype"),
        ("{layout: [resident, full-shard]}", "shared-key", "sweep.layout"),
        ("{cluster.nodes: [1, 2]}", "shared-key", "sweep.cluster.nodes"),
        ("{train.save_steps: [1, 2]}", "shared-key", "sweep.train.save_steps"),
        ("{train.output_dir: [a, b]}", "shared-key", "sweep.train.output_dir"),
        ("{lora.bias: [none, all]}", "shared-key", "sweep.lora.bias"),
        ("{lora.r: [4, -8]}", "wrong-value", "sweep.lora.r[1]"),
        ("{train.optim: [sgd, nonsense]}", "broken-rule", "sweep.train.optim[1]"),
        ("{lora.r: [4, 8], keep: [1, 2]}", "wrong-value", "sweep.keep"),
        ("{trials: [{lora.r: 8}]}", "one-value", "sweep.trials"),
        ("{trials: [{lora.r: 8}, 3]}", "not-a-trial", "sweep.trials[1]"),
        ("{trials: [{lora.r: 8}, {lora.r: 8}]}", "alike-trials", "sweep.trials[1]"),
        ("{trials: [{}, {lora.r: 4}]}", "alike-trials", "sweep.trials[1].lora.r"),
        ("{trials: [{lora.r: 8}, {lora.r: 2}], lora.r: [1, 2]}", "trials-and-lists", "sweep.lora.r"),
        ("{trials: [{name: a, lora.r: 8}, {name: a, lora.r: 2}]}", "alike-trials", "sweep.trials"),
        ("{trials: [{name: a/b, lora.r: 8}, {lora.r: 2}]}", "trial-name", "sweep.trials[0].name"),
        (f"{{train.seed: {list(range(300))}}}", "many-trials", ": sweep"),
    ],
)
def test_what_makes_no_sweep_is_refused_with_its_place(sweep: str, code: str, place: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"{RUN}sweep: {sweep}\n")
    with refused(code, place):
        read_run_file(tmp_path / "run.yaml")


def test_a_sweep_that_would_train_the_base_or_overrides_an_option_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN + "sweep: {lora.r: [4, 8]}\n")
    with refused("sweep-trains-base", "lora.bias=all"):
        read_run_file(path, ["lora.bias=all"])
    with refused("sweep-trains-base", "lora.modules_to_save=[embed_tokens]"):
        read_run_file(path, ["lora.modules_to_save=[embed_tokens]"])
    with refused("set-twice", "sweep.lora.r[0]"):
        read_run_file(path, ["lora.r=16"])
    assert len(read_run_file(path, ["sweep.lora.r=[1, 2, 3]"]).trials) == 3
    assert read_run_file(path, ["sweep={}"]).trials == (), "the run file without its sweep"
    path.write_text(RUN.replace("packing: false", "packing: true") + "sweep: {data.packing: [true, false]}\n")
    assert [trial.trial.name for trial in read_run_file(path).trials if trial.trial] == [
        "packing-true",
        "packing-false",
    ]


def test_a_sweep_is_refused_by_the_plan_with_the_trials_name(material: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(material)
    path = write_sweep(material, "wrong", {"good": {}, "bad": {"lora.target_modules": ["q_proj", "nothing"]}})
    with pytest.raises(UserError) as caught:
        make_plan(read_run_file(path))
    assert [problem.problem.startswith("trial bad: ") for problem in caught.value.problems] == [True]
    assert "sweep.trials[1].lora.target_modules" in caught.value.problems[0].where


def test_trials_are_named_by_their_settings(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        f"{RUN}sweep:\n  train.learning_rate: [1e-4, 0.002]\n  lora.target_modules: [[q_proj], all-linear]\n"
    )
    loaded = read_run_file(tmp_path / "run.yaml")
    names = [trial.trial.name for trial in loaded.trials if trial.trial]
    assert names == ["lr1e-4-targets1", "lr1e-4-all-linear", "lr2e-3-targets1", "lr2e-3-all-linear"]
    assert [trial.run.folder for trial in loaded.trials] == [f"sweep/trials/{name}" for name in names]
    assert [format_number(x) for x in (1e-4, 2.5e-5, 0.05, 32, 1.0, 3e8)] == [
        "1e-4",
        "2.5e-5",
        "0.05",
        "32",
        "1",
        "3e8",
    ]


def test_a_trials_run_file_is_the_trial(material: Path, tmp_path: Path) -> None:
    more = 'lora.rank_pattern: {"layers.(0|1).*q_proj": 8, "a, b: [c]": 2}'
    path = write_sweep(material, "files", TRIALS | {"odd": {"data.prompt_template": None, "train.data_seed": 5}})
    text = path.read_text().replace("lora: {", f"lora: {{{more.removeprefix('lora.')}, ")
    path.write_text(text)
    for trial in read_run_file(path).trials:
        assert trial.trial is not None
        (tmp_path / "trial.yaml").write_text(trial.trial.file)
        assert read_run_file(tmp_path / "trial.yaml").run == trial.run


def test_the_plan_has_all_trials_on_one_layout(material: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(material)
    path = write_sweep(material, "plan", TRIALS)
    plan = make_plan(read_run_file(path))
    assert [trial.loaded.trial.name for trial in plan.trials if trial.loaded.trial] == list(TRIALS)
    assert len({replace(trial.layout, reason="") for trial in plan.trials}) == 1
    assert plan.adapter == max((trial.adapter for trial in plan.trials), key=lambda adapter: adapter.trainable)
    seconds = [trial.seconds for trial in plan.trials]
    assert plan.seconds is not None
    assert plan.seconds["steps"] == pytest.approx(sum(each["steps"] for each in seconds if each))
    assert plan.seconds["load"] == seconds[0]["load"]  # type: ignore[index]
    described = plan.as_dict()["trials"]
    assert [trial["settings"] for trial in described] == list(TRIALS.values())


def test_trials_write_no_common_tensorboard_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the environment names one folder for all."""
    opened = mock.Mock()  # TensorBoard's writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", mock.Mock(SummaryWriter=opened))
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", f"{tmp_path}/logs")
    begin_manifest(tmp_path, {TRIALS_KEY: {"one": RUNNING, "two": RUNNING}})
    for folder in (*list_trials(tmp_path), tmp_path):
        open_tensorboard(folder, None, {})
    folders = [call.kwargs["log_dir"] for call in opened.call_args_list]
    assert folders == [f"{tmp_path}/logs/one", f"{tmp_path}/logs/two", f"{tmp_path}/logs"]


@pytest.mark.long
@pytest.mark.fault("ranks that would train other trials together", "`windlass train`", "sweep.together is [")
def test_ranks_that_would_train_other_trials_together_are_refused(material: Path, tmp_path: Path) -> None:
    """Their collectives would be other trials', or hang."""
    folder = copy_material(material, tmp_path)
    file = write_sweep(folder, "unlike", {"small": {"lora.r": 2}, "wide": {"lora.r": 8}})
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = []
    for rank in range(2):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}.items():
                patch.setenv(name, value)
            ranks.append(start(f"train {file} --override sweep.together={rank + 1}", folder, warm.python()))
    printed = "".join(process.communicate(timeout=800)[0] for process in ranks)
    assert [process.returncode for process in ranks] == [RANK_USER_INPUT] * 2, printed
    assert "sweep.together is [['small', 'wide']] on rank 1, [['small'], ['wide']] on rank 0" in printed
    assert not (folder / "unlike").exists()


def test_trials_that_would_choose_other_layouts_get_one(material: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DoRA rules sharding out, so all are resident; each file then says so, and makes the same plan alone."""
    monkeypatch.chdir(material)
    trials: dict[str, dict[str, Any]] = {"sharded": {"lora.r": 8}, "dora": {"lora.use_dora": True}}
    path = write_sweep(material, "layouts", trials, "layout: {activation_checkpointing: false}\n")
    with mock.patch("windlass.plan.make.plan_sweep", lambda sweep, _, *a, **k: plan_sweep(sweep, make_other, *a, **k)):
        plan = make_plan(read_run_file(path))
    assert [trial.layout.name for trial in plan.trials] == ["resident", "resident"]
    for trial in plan.trials:
        assert trial.loaded.trial is not None
        (material / "one.yaml").write_text(trial.loaded.trial.file)
        alone = make_plan(read_run_file(material / "one.yaml"))
        assert replace(alone.layout, reason="") == replace(trial.layout, reason="")
        assert alone.batch == trial.batch


def make_other(trial: Any, *arguments: Any, **named: Any) -> Any:
    """Plan as if the first trial chose to shard."""
    plan = make_plan(trial, *arguments, **named)
    if trial.trial.name == "sharded" and trial.run.layout.name == "auto":
        return replace(plan, layout=replace(plan.layout, name="full-shard", shard=2, replicate=1))
    return plan


# --- in full ---


def count_all(sweep: Path) -> int:
    return sum(count_steps(trial) for trial in (sweep / "trials").glob("*"))


def read_outcome(sweep: Path) -> dict[str, Any]:
    """Return what a sweep's trials came to: states, steps, evaluations, and the adapters that they ended with."""
    outcome: dict[str, Any] = {}
    for trial, state in list_trials(sweep).items():
        steps = [
            (step.get("loss"), step["grad_norm"], step["rows"]) for step in read_steps(trial / "steps-rank0.jsonl")
        ]
        events = read_json_lines(trial / "events.jsonl")
        evaluated = [(event["step"], event["eval_loss"]) for event in events if event["kind"] == "eval"]
        ended = trial / ("final" if state == FINISHED else f"checkpoints/step-{state.split()[-1]}")
        adapter = {name: tensor.tolist() for name, tensor in load_file(ended / ADAPTER).items()}
        outcome[trial.name] = [state, steps, evaluated, adapter]
    return outcome


@pytest.mark.prove
@pytest.mark.timeout(1800)
def test_a_halved_sweep_that_is_killed_ends_as_it_would(material: Path, tmp_path: Path) -> None:
    """Mostly while it trains, once at any time of its start."""
    folder = copy_material(material, tmp_path)
    trials: dict[str, dict[str, Any]] = {
        **{f"r{r}": {"train.learning_rate": rate, "lora.r": r} for rate, r in ((1e-3, 4), (1e-2, 8))},
        "dropout": {"lora.lora_dropout": 0.2, "train.seed": 3},
    }
    files = [write_sweep(folder, name, trials) for name in ("expected", "killed")]
    for file in files:
        text = file.read_text().replace("max_steps: 4", "max_steps: 40").replace("eval_steps: 2", "eval_steps: 5")
        file.write_text(f"{text.replace('save_steps: 2', 'save_steps: 10')}  keep: 1\n  at: [15, 30]\n")
    run(f"train {files[0]}", folder)
    sweep, chance = folder / "killed", random.Random(0)
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGTERM):
        process = start(f"train {files[1]} --resume", folder, warm.python())
        wanted = count_all(sweep) + chance.randint(1, 14)
        until = time.monotonic() + (200 if sweep.exists() else chance.uniform(0, 10))
        while process.poll() is None and count_all(sweep) < wanted and time.monotonic() < until:
            time.sleep(0.005)
        process.send_signal(number)
        printed, _ = process.communicate(timeout=300)
        assert process.returncode in (SAVED, -signal.SIGKILL, -signal.SIGTERM, 143), printed
    run(f"train {files[1]} --resume", folder)
    assert read_outcome(folder / "expected") == read_outcome(sweep)
    decisions = [read_json(folder / name / "manifest.json")[HALVED] for name in ("expected", "killed")]
    assert decisions[0] == decisions[1]


@pytest.mark.prove
@pytest.mark.timeout(1800)  # the C++ compiler takes minutes on a loaded machine
def test_a_compiled_trial_equals_the_compiled_run_alone(material: Path, tmp_path: Path) -> None:
    folder = copy_material(material, tmp_path)
    trials: dict[str, dict[str, Any]] = {"first": {"lora.r": 8}, "second": {"lora.lora_dropout": 0.2}}
    process = start(
        f"train {write_sweep(folder, 'sweep', trials)} --override {ONE_RANK} --override train.compile=true",
        folder,
        warm.python(),
    )
    printed, _ = process.communicate(timeout=1500)
    assert process.returncode == 0, printed
    assert printed.count("proven equal to eager") == len(trials), printed
    second = folder / "sweep" / "trials" / "second"
    run(f"train {second / 'run.yaml'} --override train.output_dir=alone", folder)
    assert_same_run(folder / "alone", second)
