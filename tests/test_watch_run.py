"""Real ranks with a planted fault each: the alarm is raised, its action follows, and a clean run has none."""

import contextlib
import importlib.util
import json
import os
import random
import sqlite3
import struct
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import warm
from ports import free_port
from test_faults import RUN, WORDS
from text_run import write_rows

from windlass import run_folder, tiny
from windlass.files import read_json, read_json_lines
from windlass.observe.watch.monitor import Monitor
from windlass.runfile import Watch
from windlass.train import trackers

pytestmark = pytest.mark.long

# Of test_faults' run file.
OVERRIDES = ["lora.r=2", "lora.lora_alpha=4", "data.max_length=32", "layout=resident", "cluster.gpus_per_node=2"]
OVERRIDES += ["train.max_steps=26", "train.per_device_train_batch_size=2", "train.gradient_accumulation_steps=1"]
OVERRIDES += ["train.learning_rate=0.002", "train.lr_scheduler_type=constant", "train.warmup_ratio=0", "train.seed=3"]
OVERRIDES += ["train.gradient_checkpointing=false", "train.logging_steps=10", "train.save_strategy=no"]
OVERRIDES += ["train.ddp_timeout=60"]

PORT = free_port()
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
HERE = [name for name in TRACKERS if importlib.util.find_spec(name)] or ["none"]
# The last one ends the processes.
CASES: dict[str, dict[str, Any]] = {
    "clean": {"faults": ["scrape"], "set": [f"watch.prometheus_port={PORT}", f"train.report_to=[{','.join(HERE)}]"]},
    "sleeper": {"faults": ["sleeper"], "set": ["train.max_steps=60", "watch.straggler=stop"]},
    "poison": {
        "faults": ["poison"],
        "set": ["train.max_steps=40", "watch.gradient_spike=checkpoint", "train.max_grad_norm=1"],
    },
    "rising": {"faults": ["rising"], "set": ["train.max_steps=100", "watch.loss_divergence=stop"]},
    "leak": {"faults": ["leak"], "set": ["train.max_steps=100000", "watch.memory_growth=stop"]},
    "dead": {"faults": [], "set": ["train.learning_rate=1000", "train.weight_decay=0", "lora.target_modules=[o_proj]"]},
    "nan": {"faults": ["nan"], "set": []},
    "nan skipped": {"faults": ["nan"], "set": ["watch.non_finite=skip", "train.max_steps=7"]},
    "grip": {"faults": ["grip"], "set": ["train.max_steps=6", "watch.stall_seconds=2"]},
    "hang": {"faults": ["hang"], "set": ["watch.stall=stop", "watch.stall_seconds=3"]},
}


class Outcomes:
    def __init__(self, folder: Path, code: int, output: str) -> None:
        self.folder, self.code, self.output = folder, code, output
        self.by_rank = [read_json(folder / f"outcome-{rank}") for rank in range(2)]

    def __getitem__(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.by_rank[0][name]
        return found

    def lines(self, name: str, file: str) -> list[dict[str, Any]]:
        path = self.folder / name / file
        return list(read_json_lines(path)) if path.exists() else []

    def alarm(self, name: str, kind: str) -> dict[str, Any]:
        alarms = self.lines(name, run_folder.ALARMS)
        found = [alarm for alarm in alarms if alarm["kind"] == kind]
        assert found, (kind, alarms, self.by_rank[0].get(name), self.output[-3000:])
        return found[0]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return launch(tmp_path_factory.mktemp("watch"), CASES)


def launch(folder: Path, runs: dict[str, dict[str, Any]]) -> Outcomes:
    """Run all of them in the same two processes."""
    tiny.write_model(folder / "model", experts=4)
    (folder / "data").mkdir()
    chance = random.Random(0)
    texts = [" ".join(chance.choices(WORDS.split(), k=chance.randint(8, 12))) for _ in range(400)]
    write_rows(folder / "data" / "train.jsonl", [{"text": text} for text in texts])
    (folder / "run.yaml").write_text(RUN)
    cases = {
        name: {"faults": each["faults"], "overrides": [*OVERRIDES, *each["set"], f"train.output_dir={folder / name}"]}
        for name, each in runs.items()
    }
    (folder / "cases.json").write_text(json.dumps(cases))
    script = Path(__file__).with_name("watch_ranks.py")
    command = [warm.python(), script, folder / "run.yaml", folder / "cases.json", folder / "outcome"]
    stores = {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder),
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "TRACKIO_DIR": str(folder / "trackio"),
    }
    environ = {**os.environ, **stores, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "SCRAPED_PORT": str(PORT)}
    program = (
        "import json, os, sys; from windlass.ranks import supervisor; from windlass.errors import print_error\n"
        "from windlass.errors import UserError\n"
        "try: sys.exit(supervisor.start_ranks(json.loads(sys.argv[1]), 2, dict(os.environ), patience_seconds=5))\n"
        "except UserError as error: print_error(error); sys.exit(1)"
    )
    done = subprocess.run(
        [warm.python(), "-c", program, json.dumps([str(part) for part in command])],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert (folder / "outcome-0").exists(), done.stdout + done.stderr
    return Outcomes(folder, done.returncode, done.stdout + done.stderr)


def test_a_clean_run_has_no_alarm_and_was_scraped(runs: Outcomes) -> None:
    assert runs["clean"] == {"code": 0}
    assert runs.lines("clean", run_folder.ALARMS) == []
    assert not list((runs.folder / "clean").glob("stacks-*")), "no stall, no stacks"
    assert len(runs.lines("clean", "steps-rank1.jsonl")) == 26
    size = 0
    for rank in range(2):
        written = (runs.folder / "clean" / f"steps-rank{rank}.jsonl").read_bytes().splitlines(keepends=True)
        size += sum(len(line) for line in written if line.startswith(b"["))
        assert len(written) <= 26 + 6, "as many headers as there are kinds of rows"
    assert size / (2 * 26) <= 200, "bytes a step and rank"
    page = runs.by_rank[0]["scraped"]
    assert page["type"].startswith("text/plain; version=0.0.4")
    samples = dict(line.rsplit(" ", 1) for line in page["text"].splitlines() if not line.startswith("#"))
    assert 1 <= float(samples['windlass_step{run="clean"}']) <= 22
    assert float(samples['windlass_loss{run="clean"}']) > 0
    assert float(samples['windlass_step_seconds{run="clean",rank="1"}']) > 0


@pytest.mark.fault("a rank that is slow", "`windlass train`", "slow in forward")
def test_a_slow_rank_is_named_with_its_phase_and_stops_the_run(runs: Outcomes) -> None:
    alarm = runs.alarm("sleeper", "straggler")
    assert (alarm["rank"], alarm["level"]) == (1, "stop")
    assert "slow in forward" in alarm["message"]
    assert runs["sleeper"]["where"] == "watch"
    assert [outcome["sleeper"] for outcome in runs.by_rank] == [runs["sleeper"]] * 2, "both ranks report the same"
    assert len(runs.lines("sleeper", "steps-rank0.jsonl")) < 60
    kinds = [alarm["kind"] for alarm in runs.lines("sleeper", run_folder.ALARMS)]
    assert kinds == ["straggler"], "the stop itself is no second alarm"


def test_a_poisoned_batch_is_named_by_its_rows_and_a_checkpoint_saved(runs: Outcomes) -> None:
    alarm = runs.alarm("poison", "gradient_spike")
    assert alarm["step"] == 23
    rows = next(line["rows"] for line in runs.lines("poison", "steps-rank1.jsonl") if line["step"] == 23)
    assert len(rows) == 2
    assert f"rank 1, rows {', '.join(map(str, rows))}" in alarm["message"]
    assert runs["poison"] == {"code": 0}, "a checkpoint is no end"
    assert list((runs.folder / "poison" / "checkpoints").glob("step-*")), "action: checkpoint"
    assert not list((runs.folder / "sleeper" / "checkpoints").glob("step-*"))
    raised: list[Any] = []
    monitor = Monitor(runs.folder / "poison", Watch(), 2, raised=raised.append)
    monitor.check_new_records()  # afterwards, from the files alone
    assert [(a.kind, a.step) for a in raised if a.kind == "gradient_spike"] == [("gradient_spike", 23)]


@pytest.mark.fault("memory that leaks", "`windlass train`", "GiB would be used at step")
@pytest.mark.fault("a loss that diverges", "`windlass train`", "loss divergence")
def test_divergence_and_a_leak_stop_the_run(runs: Outcomes) -> None:
    assert runs.alarm("rising", "loss_divergence")["step"] > 26
    assert "loss divergence" in runs["rising"]["error"]
    leak = runs.alarm("leak", "memory_growth")
    assert leak["rank"] == 1
    assert "GiB would be used at step" in leak["message"]
    assert "memory growth" in runs["leak"]["error"]


@pytest.mark.fault("a learning rate that kills the adapter", "`windlass train`", "and the loss has not fallen")
def test_an_adapter_that_dies_after_the_first_steps_stops_the_run(runs: Outcomes) -> None:
    """Also one whose steps are so fast that the watch sees it only after the last."""
    alarm = runs.alarm("dead", "dead_adapter")
    assert (alarm["step"] <= 26, alarm["level"]) == (True, "stop")
    assert "and the loss has not fallen" in alarm["message"]
    assert "dead adapter" in runs["dead"]["error"]
    assert [outcome["dead"] for outcome in runs.by_rank] == [runs["dead"]] * 2
    assert not (runs.folder / "dead" / "final").exists()
    assert (runs.folder / "clean" / "final").exists()


def test_non_finite_values_raise_an_alarm(runs: Outcomes) -> None:
    assert runs["nan"]["where"] == "watch.non_finite"
    stopped, skipped = runs.alarm("nan", "non_finite"), runs.alarm("nan skipped", "non_finite")
    assert stopped["level"] == "stop"
    assert "rank 1, rows" in stopped["message"]
    assert (skipped["step"], skipped["level"]) == (6, "warn")
    assert "update skipped; rank 0, rows" in skipped["message"]


@pytest.mark.fault("a rank that never comes to a collective", "`windlass train`", "rank 1 absent from gloo:all_")
def test_a_stall_names_the_absent_rank_and_its_collective_with_all_stacks(runs: Outcomes) -> None:
    alarm = runs.alarm("hang", "stall")
    assert "rank 1 absent from gloo:all_" in alarm["message"]
    assert "rank 0 in it" in alarm["message"]
    assert "asleep_for_good" in (runs.folder / "hang" / "stacks-rank1.txt").read_text()
    assert "train_step" in (runs.folder / "hang" / "stacks-rank0.txt").read_text(), "where the other one waits"
    assert "hang" not in runs.by_rank[0]
    assert runs.code == 1
    assert "rank 1 absent from gloo:all_" in runs.output
    assert "Traceback" not in runs.output


@pytest.mark.fault("a rank that holds Python's lock", "`windlass train`", "no sign of life from rank 1 (pid")
def test_a_rank_that_holds_pythons_lock_is_named_with_its_stack(runs: Outcomes) -> None:
    """None of its threads can run: faulthandler's timer writes, and the other rank waits for that."""
    alarm = runs.alarm("grip", "stall")
    assert "no sign of life from rank 1 (pid " in alarm["message"]
    assert "rank 1 holds Python's lock: File " in alarm["message"]
    assert "in held_in_c" in alarm["message"]
    assert (runs.folder / "grip" / "stacks-rank1.txt").read_text().startswith("Timeout (0:00:03)!")
    assert "train_step" in (runs.folder / "grip" / "stacks-rank0.txt").read_text()
    assert runs["grip"] == {"code": 0}, "only a warning: it goes on when it can"


def test_a_run_that_did_not_end_well_has_a_report_that_says_why(runs: Outcomes) -> None:
    """None of these saved anything, so no earlier report exists."""
    for name, kind in (("sleeper", "straggler"), ("nan", "non_finite"), ("hang", "stall")):
        (made,) = read_json(runs.folder / name / "report.json")["runs"]
        assert made["verdict"]["level"] == "bad"
        assert kind in [alarm["kind"] for alarm in made["alarms"]]
        # In a stall each rank leaves by itself: one that waits may see its peer gone first, and fail of that.
        assert made["state"] in (("stopped by an alarm", "failed") if name == "hang" else ("failed",))


Logged = dict[str, dict[int, float]]  # name -> step -> value


def of_tensorboard(folder: Path) -> Logged:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(next((folder / "clean").rglob("events.out.tfevents*")).parent)).Reload()
    return {name: {each.step: each.value for each in found.Scalars(name)} for name in found.Tags()["scalars"]}


def of_wandb(folder: Path) -> Logged:
    """Read the file that `wandb sync` would send: LevelDB's log format after a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    stored, at, data = next(folder.rglob("run-*.wandb")).read_bytes(), 7, b""
    logged: Logged = {}
    while at + 7 <= len(stored):
        if 0x8000 - at % 0x8000 < 7:  # too little of a block for another head
            at += 0x8000 - at % 0x8000
        size, part = struct.unpack("<HB", stored[at + 4 : at + 7])
        data += stored[at + 7 : at + 7 + size]
        at += 7 + size
        if part not in (1, 4):  # whole, or the last part
            continue
        record = Record()
        record.ParseFromString(data)
        data = b""
        items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for name in items.keys() - {"train/global_step"}:
            logged.setdefault(name, {})[items.get("train/global_step", -1)] = items[name]
    return logged


def of_mlflow(folder: Path) -> Logged:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    run = client.search_runs(["0"])[0]
    history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {name: {each.step: each.value for each in values} for name, values in history.items()}


def of_trackio(folder: Path) -> Logged:
    logged: Logged = {}
    with contextlib.closing(sqlite3.connect(next((folder / "trackio").glob("*.db")))) as store:
        for (text,) in store.execute("SELECT metrics FROM metrics"):
            items = json.loads(text)
            for name in items.keys() - {"train/global_step"}:
                logged.setdefault(name, {})[items["train/global_step"]] = items[name]
    return logged


STORES = {"tensorboard": of_tensorboard, "wandb": of_wandb, "mlflow": of_mlflow, "trackio": of_trackio}


@pytest.mark.filterwarnings("default")
def test_two_runs_of_one_process_are_two_in_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As trials that train together."""
    pytest.importorskip("wandb", reason="wandb is not installed (pip install wandb)")
    for variable, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.chdir(tmp_path)
    opened = [trackers.open_wandb(tmp_path, f"trial-{number}", {"number": number}) for number in range(2)]
    for step in (1, 2):
        for number, (log, _) in enumerate(opened):
            log({"loss": float(10 * number + step)}, step)
    for _, close in opened:
        close()
    expected = [{1: 1, 2: 2}, {1: 11, 2: 12}]
    losses: list[Any] = []
    until = time.monotonic() + 60  # its own process may write the end a little later
    while losses != expected and time.monotonic() < until:
        time.sleep(0.1)
        folders = (tmp_path / "wandb").glob("offline-run-*")
        losses = sorted((of_wandb(folder).get("train/loss") for folder in folders), key=str)
    assert losses == expected


@pytest.mark.parametrize("name", TRACKERS)
@pytest.mark.filterwarnings("default")
def test_a_tracker_gets_every_step(name: str, runs: Outcomes) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed (pip install {name})")
    logged = STORES[name](runs.folder)
    lines = {line["step"]: line for line in runs.lines("clean", "steps-rank0.jsonl")}
    assert len(lines) == 26
    for field in ("loss", "grad_norm", "learning_rate", "step_seconds", "tokens", "tokens_per_second", "meter_seconds"):
        found = logged[f"train/step/{field}"]
        assert found.keys() == lines.keys(), field
        assert all(found[step] == pytest.approx(lines[step][field], rel=1e-5) for step in lines), field
    given = {field for line in lines.values() for field, value in line.items() if isinstance(value, int | float)}
    assert {n for n in logged if "step/" in n} == {f"train/step/{field}" for field in given - {"step", "time", "epoch"}}


@pytest.mark.prove
def test_clean_runs_have_no_alarm(tmp_path: Path) -> None:
    """Full trainings, each with its own seed, one of them sharded."""
    cases: dict[str, dict[str, Any]] = {
        f"clean {seed}": {"faults": [], "set": [f"train.seed={seed}", "train.max_steps=120", f"layout={layout}"]}
        for seed, layout in enumerate(("resident", "full-shard"))
    }
    outcomes = launch(tmp_path, cases)
    for name in cases:
        assert outcomes[name] == {"code": 0}, outcomes.output[-3000:]
        assert outcomes.lines(name, run_folder.ALARMS) == []
