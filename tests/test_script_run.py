"""Runs of kind: script, from the run file to the report; the ranks are real processes."""

import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import torch
import warm
import yaml
from chromium import PROGRAM, Chromium
from launch_jobs import environ, render
from refusals import refused
from script_ranks import DEAF, DIVERGES_SAVES, FAILS, LOOP, SAVES, SLOW, STALLS

from windlass import explain, start
from windlass.errors import RunError, UserError
from windlass.files import read_json_lines
from windlass.launch.job import build_job
from windlass.launch.platforms import kubernetes
from windlass.meter import StepProfiler
from windlass.observe import report
from windlass.observe.watch.prometheus import format_prometheus
from windlass.plan.script import ScriptPlan, make_any_plan
from windlass.ranks import supervisor as ranks
from windlass.ranks.place import Node
from windlass.runfile import LoadedScript, read_any, read_preset, read_run_file
from windlass.train import script

pytestmark = pytest.mark.long

NASTY = ["--name", "a b'c\"d`e$(touch pwned)$HOME\\f;g&h|i\tä€\U0001f409 #*?", "line\nbreak", "", "$(HOME)", "{x}"]
SITE = (
    "cluster.nodes=2",
    "cluster.network=infiniband-400",
    "cluster.gpu=h200",
    "cluster.runai.project=research",
    "cluster.image=registry.example/team/detector@sha256:" + "0123456789abcdef" * 4,
    "cluster.volumes=[{claim: data, path: /data}]",
    "cluster.working_dir=/data/scripts",
    "cluster.memory_limit=64Gi",
    "script.output_dir=/data/run",
)


def run_file(folder: Path, script: str, args: list[Any] | None = None, **more: Any) -> Path:
    """Write a script and its run file, two ranks on this CPU."""
    folder.mkdir(exist_ok=True)
    (folder / "train me.py").write_text(script)
    about = {"path": str(folder / "train me.py"), "args": args or [], "output_dir": str(folder / "run")}
    tree = {"kind": "script", "script": about, "layout": {"ranks": 2}, "cluster": {"gpu": "cpu"}, **more}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree, allow_unicode=True))
    return path


def windlass(*words: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [warm.python(), "-m", "windlass", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, **more)


def state(folder: Path) -> str:
    return str(json.loads((folder / "run/manifest.json").read_text())["state"])


def wait_for(process: subprocess.Popen[str], *paths: Path) -> None:
    until = time.monotonic() + 240
    while not all(path.exists() for path in paths):
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            pytest.fail(f"{paths} never came; ended with {process.returncode}: {process.communicate()[1]}")
        time.sleep(0.02)


def started(path: Path, *ready: str, **more: Any) -> subprocess.Popen[str]:
    command = [warm.python(), "-m", "windlass", "train", str(path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **more)
    wait_for(process, *(path.parent / name for name in ready))
    return process


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    done = windlass("train", run_file(folder, LOOP, NASTY, watch={"loss_divergence": "stop"}))
    assert done.returncode == 0, done.stderr
    return folder


# --- the run file ---------------------------------------------------------------------------------------------------


def loaded(text: str, tmp_path: Path, *overrides: str) -> LoadedScript:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    found = read_any(path, overrides)
    assert isinstance(found, LoadedScript)
    return found


def test_script_arguments_are_passed_as_text(tmp_path: Path) -> None:
    assert loaded(read_preset("script"), tmp_path).run.script.args[:2] == ["--epochs", "2"]
    assert "word by word" in explain.explain_topic("script.args")[0].text
    text = "kind: script\nscript: {module: a.b, args: [--lr, 0.5, --n, 16, '007', 'x y']}\n"
    run = loaded(text, tmp_path).run
    assert run.command == ["-m", "a.b", "--lr", "0.5", "--n", "16", "007", "x y"]
    assert run.ranks == 1


@pytest.mark.parametrize(
    ("text", "code", "place", "hint"),
    [
        ("kind: scirpt\nscript: {path: a.py}", "wrong-value", ":1: kind", "mean script?"),
        ("script: {path: a.py}", "unknown-key", ":1: script", "write `kind: script`"),
        ("kind: script\nscript: {path: a.py, module: b}", "broken-rule", ":2: script.path", ""),
        ("kind: script\nscript: {path: a.py}\nmodel: {}", "unknown-key", ":3: model", "remove"),
        ("kind: script\nscript: {path: a.py, args: [true]}", "wrong-value", "script.args[0]", '"true"'),
        ("kind: script\nscript: {path: a.py}\nwatch: {straggler: checkpoint}", "broken-rule", "watch.straggler", "use"),
        (
            "kind: script\nscript: {path: a}\nlayout: {ranks: 3}\ncluster: {nodes: 2, gpus_per_node: 1}",
            *("broken-rule", ":3: layout.ranks", ""),
        ),
    ],
)  # fmt: skip
def test_bad_input_is_reported_with_its_place(tmp_path: Path, text: str, code: str, place: str, hint: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with refused(code, place) as problems:
        read_any(tmp_path / "run.yaml")
    assert hint in problems[0].hint


def test_language_model_commands_refuse_scripts(tmp_path: Path) -> None:
    path = run_file(tmp_path, "pass")
    with pytest.raises(UserError, match="is for language models"):
        read_run_file(path)
    done = windlass("plan", path, "--accelerate", "examples/mistral-small-4/fsdp.yaml")
    assert done.returncode == 2
    assert "leave --accelerate out" in done.stderr
    assert loaded("kind: script\nscript: {path: a}\nwatch: {dead_experts: warn}", tmp_path).notes


# --- plan and check -------------------------------------------------------------------------------------------------


def test_plan_of_a_script_marks_unknown_values(tmp_path: Path) -> None:
    path = run_file(tmp_path, "pass", ["a b"])
    plan = json.loads(windlass("plan", path, "--json").stdout)
    assert plan["kind"] == "script"
    assert plan["script"]["command"] == ["python", str(tmp_path / "train me.py"), "a b"]
    assert plan["layout"] == {"nodes": 1, "gpus_per_node": 2, "name": "script", "ranks": 2}
    assert plan["memory"]["gpu_gib"] is plan["memory"]["fits"] is plan["estimate"]["step_seconds"] is None
    assert "not known before it runs" in windlass("plan", path).stdout.replace("\n", " ")


# --- train ----------------------------------------------------------------------------------------------------------


def test_every_rank_gets_torchruns_environment_and_arguments(trained: Path, tmp_path: Path) -> None:
    """Started by windlass, and by torchrun, whose ranks run the script as a child, so that its exit code is known."""
    output = [json.loads((trained / f"run/told-{rank}.json").read_text()) for rank in range(2)]
    assert [each["argv"] for each in output] == [NASTY, NASTY]
    assert [each["name"] for each in output] == ["__main__", "__main__"]
    assert [(each["env"]["RANK"], each["env"]["LOCAL_RANK"]) for each in output] == [("0", "0"), ("1", "1")]
    keys = (
        "import os; open(os.environ['WINDLASS_OUTPUT_DIR'] + '/' + os.environ['RANK'], 'w').write(' '.join(os.environ))"
    )
    with ranks.reserve_port() as port:
        command = [warm.python(), "-m", "torch.distributed.run", "--nproc-per-node", "2", f"--master-port={port}"]
        command += ["-m", "windlass", "train", str(run_file(tmp_path, keys))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "1").exists()
    # Its store, its error file and its choice for NCCL are the launcher's own; a script asks for none of them.
    own = {"TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
    own |= {"TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCHELASTIC_HEALTH_CHECK_PORT"}
    assert set((tmp_path / "run" / "0").read_text().split()) - own <= output[0]["env"].keys()


def test_meter_writes_configured_counts(trained: Path) -> None:
    for rank in range(2):
        lines = list(read_json_lines(trained / f"run/steps-rank{rank}.jsonl"))
        assert [line["step"] for line in lines] == list(range(1, 41))
        assert {line["images"] for line in lines} == {4}
        assert all(line["images_per_second"] == pytest.approx(4 / line["step_seconds"], rel=1e-6) for line in lines)
        for phase in ("data", "forward", "backward"):  # a slow step's digits round a fast phase to 0
            assert sum(line[f"{phase}_seconds"] for line in lines) > 0
        assert "tokens" not in lines[0]
        assert lines[-1]["loss"] < lines[0]["loss"]
    events = list(read_json_lines(trained / "run/events.jsonl"))
    assert [event["kind"] for event in events] == ["start", "eval", "eval", "save", "end"]
    assert json.loads((trained / "run/meter-rank1.json").read_text())["unit"] == "images"
    assert 'windlass_images{run="line",rank="0"} 4.0' in format_prometheus("line", {0: lines[-1]}, {})
    assert (trained / "run/heartbeat-rank1.json").exists()
    manifest = json.loads((trained / "run/manifest.json").read_text())
    assert (manifest["state"], manifest["kind"], manifest["ranks"]) == ("finished", "script", 2)


def test_the_watch_and_the_report_speak_of_images(trained: Path) -> None:
    shown = windlass("watch", trained / "run", "--once").stdout
    assert "finished" in shown
    assert "images/s" in shown
    assert "no alarm" in shown
    output = windlass("report", trained / "run").stdout
    assert "images per second" in output
    assert "token" not in output
    (facts,) = report.make_report([trained / "run"]).runs
    assert facts["verdict"]["text"].startswith("Finished after 40 steps; loss from")
    assert facts["headline"]["unit"] == "images"
    assert facts["headline"]["per_second"] > 0
    assert facts["tokens"] is facts["adapter"] is facts["certificate"] is facts["experts"] is None
    assert facts["planned"] == []
    assert not [name for name in facts["absent"] if "load.json" in name or "data.json" in name]


@pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine (apt-get install chromium)")
def test_the_page_of_a_script_has_no_part_of_a_language_model(trained: Path, tmp_path: Path) -> None:
    pages = [report.make_report([trained / "run"], tmp_path / "one").html]
    pages += [report.make_report([trained / "run", trained / "run"], tmp_path / "two").html]
    browser = Chromium()
    try:
        browser.open(pages[0])
        heads = browser.run("[...document.querySelectorAll('h2')].map(head => head.textContent)")
        assert {"Learning", "Speed", "Memory", "Ranks", "Hardware"} <= set(heads)
        assert not {"Tokens", "Experts", "Adapter", "Loading", "Data", "Planned and measured"} & set(heads)
        text = browser.run("document.body.innerText")
        assert "images/s" in text
        assert "token" not in re.sub("run file.*", "", text, flags=re.DOTALL)
        browser.open(pages[1])
        assert "images per second" in browser.run("document.body.innerText")
        assert not browser.errors
    finally:
        browser.close()


@pytest.mark.parametrize(
    ("code", "exits", "printed"),
    [(3, 1, "rank 1 ended with exit code 3"), (13, 2, "rank 1 reports wrong input")],
)
def test_a_rank_that_fails_is_named_with_its_code(tmp_path: Path, code: int, exits: int, printed: str) -> None:
    path = run_file(tmp_path, FAILS.replace("time.sleep(600)", "time.sleep(1)"), [code])
    done = windlass("train", path)
    assert done.returncode == exits, done.stderr
    assert printed in done.stderr
    assert "words of rank 1" in done.stderr
    assert state(tmp_path) == "failed"
    again = windlass("train", path)
    assert again.returncode == 2
    assert "contains an unfinished script's run" in again.stderr


@pytest.mark.parametrize(
    ("script", "exits", "printed"), [(SAVES, 75, ""), (DEAF, 1, "SIGTERM")], ids=["saves", "does not listen"]
)
def test_a_stop_signal_reaches_the_script(tmp_path: Path, script: str, exits: int, printed: str) -> None:
    path = run_file(tmp_path, script)
    process = started(path, "run/ready-0", "run/ready-1")
    process.send_signal(signal.SIGTERM)
    words = process.communicate(timeout=60)[1]
    assert process.returncode == exits, words
    assert printed in words
    assert len(list((tmp_path / "run").glob("saved-*"))) == (2 if exits == 75 else 0)


def test_interrupted_save_does_not_count(tmp_path: Path) -> None:
    """Although another rank has saved in time, and first."""
    once = SLOW.replace("def save(*_):", "def save(*_):\n    signal.signal(signal.SIGTERM, signal.SIG_DFL)")
    path = run_file(tmp_path, once, cluster={"gpu": "cpu", "grace_seconds": 1})
    process = started(path, "run/ready-0", "run/ready-1")
    process.send_signal(signal.SIGTERM)
    words = process.communicate(timeout=60)[1]
    assert process.returncode == 1, words
    assert "had not saved 1 s after the signal" in words
    assert state(tmp_path) == "failed"


LAUNCHER = """
import os, signal, subprocess, sys
ranks = [
    subprocess.Popen([sys.executable, "-m", "windlass", "train", sys.argv[1]], env=os.environ | {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
    })
    for rank in range(2)
]
signal.signal(signal.SIGTERM, lambda *_: [rank.send_signal(signal.SIGTERM) for rank in ranks])
codes = [ranks[1].wait(), os.path.exists(sys.argv[2] + "/run/saved-0"), ranks[0].wait()]
print(*codes, flush=True)
"""


def test_under_a_launcher_ranks_wait_for_each_other(tmp_path: Path) -> None:
    """A launcher signals all ranks when one has ended, and kills them even while they save."""
    path = run_file(tmp_path, SLOW)
    command = [sys.executable, "-c", LAUNCHER, str(path), str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(process, tmp_path / "run/ready-0", tmp_path / "run/ready-1")
    process.send_signal(signal.SIGTERM)
    wait_for(process, tmp_path / "run/saved-1")
    time.sleep(1.2)
    process.send_signal(signal.SIGTERM)
    printed, words = process.communicate(timeout=200)
    assert printed.split() == ["75", "True", "75"], words


def test_alarm_stops_ranks_with_their_grace(plan: Callable[..., ScriptPlan], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only the time left once another rank has failed."""
    monkeypatch.setattr(ranks, "PATIENCE_SECONDS", 0.2)
    made = plan(script=DIVERGES_SAVES)
    with ranks.reserve_port() as port:
        environs = ranks.make_environments(2, os.environ, Node(port=port))
    with pytest.raises(RunError, match="non finite at step 3"):
        script.run_script(made, environs, 60, resume=False)
    folder = Path(made.loaded.run.folder)
    assert len(list(folder.glob("saved-*"))) == 2
    (alarm,) = read_json_lines(folder / "alarms.jsonl")
    assert alarm["kind"] == "non_finite"


@pytest.mark.prove
def test_a_script_that_stalls_is_ended_with_its_stacks_written(tmp_path: Path) -> None:
    path = run_file(tmp_path, STALLS, layout={"ranks": 1}, watch={"stall": "stop", "stall_seconds": 2})
    done = windlass("train", path)
    assert done.returncode == 1
    assert "no progress for 2 s" in done.stderr
    assert "train me.py" in (tmp_path / "run/stacks-rank0.txt").read_text()
    (alarm,) = read_json_lines(tmp_path / "run/alarms.jsonl")
    assert (alarm["kind"], alarm["level"]) == ("stall", "stop")


def test_failures_before_the_script_starts_are_reported(tmp_path: Path) -> None:
    done = windlass("train", run_file(tmp_path, ""), "--override", "script.path=nix.py")
    assert done.returncode == 2
    assert "--override script.path=nix.py: there is no file nix.py" in done.stderr
    assert not (tmp_path / "run").exists()
    words = "import os; print(*(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE')))"
    more = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    done = windlass("train", run_file(tmp_path, words), env={**os.environ, **more})  # an operator's pod with one rank
    assert (done.returncode, done.stdout) == (0, "1 0 2 1\n")
    assert list((tmp_path / "run").iterdir()) == [], "there for what the script writes; the rest is rank 0's"
    with socket.socket() as taken:  # no rank is left behind
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        path = run_file(tmp_path, SAVES, watch={"prometheus_port": taken.getsockname()[1]})
        done = windlass("train", path)
    assert done.returncode == 2
    assert "can't listen" in done.stderr
    assert state(tmp_path) == "failed"


# --- submit ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., ScriptPlan]:
    def made(*overrides: str, script: str = "pass", ranks: int = 2) -> ScriptPlan:
        path = run_file(tmp_path, script, NASTY, layout={"ranks": ranks})
        found = make_any_plan(read_any(path, overrides))
        assert isinstance(found, ScriptPlan)
        return found

    return made


def test_launch_sh_passes_on_exit_codes_and_signals(plan: Callable[..., ScriptPlan], tmp_path: Path) -> None:
    files = render(plan(script=SLOW), "script")
    assert files.keys() == {"launch.sh", "run.yaml"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    process = subprocess.Popen(
        ["bash", tmp_path / "launch.sh"],
        env=environ(tmp_path / "bin"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(process, *(tmp_path / f"run/ready-{rank}" for rank in range(2)))
    process.terminate()
    words = process.communicate(timeout=100)[1]
    assert process.returncode == 75, words
    assert len(list((tmp_path / "run").glob("saved-*"))) == 2


def test_a_rank_that_starts_after_a_short_script_ended_runs_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launcher's rank 0 may be faster; a run that had finished before both is refused."""
    made = make_any_plan(read_any(run_file(tmp_path, "pass")))
    manifest = tmp_path / "run" / "manifest.json"
    manifest.parent.mkdir()
    manifest.write_text(json.dumps({"state": "finished", "kind": "script"}))
    for rank, refuses in (("1", False), ("0", True)):
        monkeypatch.setenv("RANK", rank)
        with refused("finished-run") if refuses else contextlib.nullcontext():
            start.leave_finished(made, resume=False)
    os.utime(manifest, (1.0, 1.0))
    monkeypatch.setenv("RANK", "1")
    with refused("finished-run"):
        start.leave_finished(made, resume=False)


@pytest.mark.fault(
    "a finished script with other arguments", "`windlass train --resume`", 'was ["1"] when this run began, is ["2"] now'
)
def test_a_finished_script_is_that_with_its_arguments(tmp_path: Path) -> None:
    made = make_any_plan(read_any(run_file(tmp_path, "pass", ["1"])))
    made.folder.mkdir()
    recorded = made.run.model_dump(mode="json")
    (made.folder / "manifest.json").write_text(json.dumps({"state": "finished", "kind": "script", "run": recorded}))
    with pytest.raises(SystemExit) as ended:
        start.leave_finished(
            make_any_plan(read_any(run_file(tmp_path, "pass", ["1"]), ["script.workers=3"])), resume=True
        )
    assert ended.value.code == 0
    with refused("changed-setting", "script.args") as problems:
        start.leave_finished(make_any_plan(read_any(run_file(tmp_path, "pass", ["2"]))), resume=True)
    assert problems[0].problem == 'was ["1"] when this run began, is ["2"] now'
    assert problems[0].hint == "name another script.output_dir"


def test_manifests_of_scripts_are_valid_and_carry_the_arguments(plan: Callable[..., ScriptPlan]) -> None:
    job = build_job(plan(*SITE))
    documents = list(yaml.safe_load_all(kubernetes.render_job_yaml(job, "job")))
    files = documents[0]["data"]
    assert files.keys() == {"run.yaml", "launch.sh"}
    assert yaml.safe_load(files["run.yaml"])["script"]["args"] == NASTY
    kubernetes_validate.validate(documents[-1], "1.36", strict=True)
    (container,) = documents[-1]["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["memory"] == "64Gi"


def test_pods_require_settings_that_cannot_be_planned(plan: Callable[..., ScriptPlan]) -> None:
    made = plan(*SITE, "cluster.memory_limit=null", "script.output_dir=here", "cluster.working_dir=null")
    with pytest.raises(UserError) as caught:
        render(made, "kubernetes")
    printed = str(caught.value)
    assert "what a script needs of host memory can't be planned" in printed
    assert "here is a path of this machine's working folder" in printed


# --- the meter ------------------------------------------------------------------------------------------------------


@pytest.fixture
def meter(tmp_path: Path) -> Iterator[StepProfiler]:
    with StepProfiler(tmp_path, unit="clips", debug_freq=0, from_step=7, report=False) as made:
        yield made


def test_marks_become_phases_and_gaps_between_loops_pauses(meter: StepProfiler, tmp_path: Path) -> None:
    def slow() -> Iterator[int]:
        for number in range(2):
            time.sleep(0.05)
            yield number

    time.sleep(0.1)  # setting up
    for _ in meter.batches(slow()):
        meter.mark("forward")
        time.sleep(0.02)
        meter.mark("backward")
    meter.step(items=6, loss=torch.tensor(2.0), grad_norm=math.inf)
    (line,) = read_json_lines(tmp_path / "steps-rank0.jsonl")
    assert (line["step"], line["clips"], line["micro_batches"], line["loss"]) == (8, 6, 2, 2.0)
    assert line["non_finite"] == ["grad_norm"]
    assert line["pause_seconds"] >= 0.1
    assert line["data_seconds"] >= 0.1
    assert 0.04 <= line["backward_seconds"] < line["step_seconds"]
    assert line["step_seconds"] < 0.1 + line["data_seconds"]


def test_meter_misuse_is_an_error(meter: StepProfiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="'froward' is not a phase"):
        meter.mark("froward")
    with pytest.raises(UserError, match="can't name what is counted"):
        StepProfiler(tmp_path, unit="pcie_sent_gb")
    with pytest.raises(UserError, match="with meter:"):
        StepProfiler(tmp_path).step(items=1)
    monkeypatch.delenv("WINDLASS_OUTPUT_DIR", raising=False)
    with pytest.raises(UserError, match="no folder to write into"), StepProfiler():
        pass
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    with pytest.raises(UserError, match="the ranks are not connected yet"), StepProfiler(tmp_path):
        pass
