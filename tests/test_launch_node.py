"""A node of a job: joins the others, checks, starts its ranks, and tells the others how it ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import warm
from launch_jobs import environ, wait_for
from ports import free_port

from windlass import hardware
from windlass.errors import RunError
from windlass.ranks import node as nodes

# Runs one node as `windlass train` does; its only rank is rank.py.
NODE = """
import json, os, sys
from windlass.errors import print_error
from windlass.ranks import node as nodes, supervisor
from windlass.ranks.place import read_node
from windlass.start import exit_when_signalled

options = json.loads(sys.argv[1])
supervisor.LOST_SECONDS = options.get("lost_seconds", 20)
nodes.CHECK_SECONDS = 1
exit_when_signalled()
node = read_node(os.environ)
environs = supervisor.make_environments(1, os.environ, node)

def run_ranks(status_dir):
    command = [sys.executable, "FOLDER/rank.py"]
    return supervisor.run_ranks(command, environs, status_dir, grace_seconds=options.get("grace", 60), scheduled=True)

check = options.get("check")
check = [sys.executable, "-c", "import os, sys, time; folder = 'FOLDER'; " + check] if check else []
code = nodes.run_node(node, run_ranks, os.environ, print_error, fingerprint="f", wait_seconds=60, check=check)
sys.exit(nodes.end_node(node, code, scheduled=True))
"""
RANK = """
import os, signal, sys, time
from pathlib import Path
from windlass.errors import RunError, UserError
from windlass.ranks.rank import StopSignal, read_rank, run_rank
here = read_rank(os.environ)
folder = Path("FOLDER")

def save():
    stop_signal = StopSignal()
    stop_signal.training = True
    (folder / "trains").touch()
    while not stop_signal.received:
        time.sleep(0.02)
    time.sleep(0.3)
    (folder / "saved").touch()
    return 75

def wait():
    (folder / "trains").touch()
    while not (here.status_dir / "lost").exists():
        time.sleep(0.02)
    raise ConnectionError("peer is gone")

def work():
    WORK

sys.exit(run_rank(here, work, print_error=print))
"""
DEAF = "signal.signal(15, signal.SIG_IGN); here.phase('step 3'); (folder / 'trains').touch(); time.sleep(60)"


class Started:
    """One node in a process group of its own."""

    def __init__(self, folder: Path, work: str, place: dict[str, str], **options: Any) -> None:
        folder.mkdir()
        self.folder, self.log_file = folder, folder / "log"
        (folder / "rank.py").write_text(RANK.replace("FOLDER", str(folder)).replace("WORK", work))
        text = NODE.replace("FOLDER", str(folder))
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", text, json.dumps(options)],
                env={**environ(folder), "TMPDIR": str(folder), **place},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def code(self) -> int:
        return self.process.wait(200)

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    started: list[Started] = []

    def start_node(work: str, place: dict[str, str] | None = None, **options: Any) -> Started:
        started.append(Started(tmp_path / f"node-{len(started)}", work, place or {}, **options))
        return started[-1]

    yield start_node
    for node in started:
        if node.process.poll() is None:
            os.killpg(node.process.pid, signal.SIGKILL)
            node.process.wait(120)


def make_places() -> list[dict[str, str]]:
    shared = {"PET_NNODES": "2", "PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": str(free_port())}
    return [{**shared, "PET_NODE_RANK": str(node)} for node in range(2)]


@pytest.fixture
def two(start: Callable[..., Started]) -> Callable[..., list[Started]]:
    """Start two nodes; options that end in a node's number are that node's."""

    def start_both(work: str, **options: Any) -> list[Started]:
        started = []
        for node, place in enumerate(make_places()):
            own = {name[:-1]: value for name, value in options.items() if name.endswith(str(node))}
            shared = {name: value for name, value in options.items() if not name[-1].isdigit()}
            started.append(start(work, place, **shared, **own))
        return started

    return start_both


def test_the_nodes_exit_code_is_that_of_its_ranks(start: Callable[..., Started]) -> None:
    cases = [
        ("return 0", 0, ""),
        ("raise UserError('no such column', 'data')", 13, "data: no such column"),
        ("raise RunError('loss is NaN')", 1, "loss is NaN"),
        ("raise ZeroDivisionError('a bug')", 1, "a bug"),
        ("sys.exit(75)", 75, "there was nothing new to save"),
    ]
    started = [start(work) for work, _, _ in cases]
    for node, (work, code, text) in zip(started, cases, strict=True):
        assert (node.code, text in node.log) == (code, True), (work, node.log)
        assert (f"ended with {code}" in node.log) == bool(code)
        assert not list(node.folder.glob("windlass-*")), "the status directory is removed"


@pytest.mark.takes("starts nodes that wait for each other")
def test_ranks_that_exceed_the_grace_are_killed(start: Callable[..., Started]) -> None:
    """A scheduler may repeat its signal: the ranks keep their time."""
    deaf, slow = start(DEAF, grace=1), start(DEAF.replace("time.sleep(60)", "time.sleep(2); return 75"))
    wait_for(lambda: deaf.has("trains") and slow.has("trains"), [deaf, slow])
    for node in (deaf, slow, slow):
        node.process.terminate()
        time.sleep(0.5)
    assert (deaf.code, slow.code) == (1, 75), deaf.log + slow.log
    words = "the ranks had not saved 1 s after the signal"
    assert (words in deaf.log, words in slow.log) == (True, False)


def test_only_invalid_input_prevents_a_retry_after_failed_checks(start: Callable[..., Started]) -> None:
    """After a traceback, a kill for memory or a lost node a retry may succeed."""
    place = "[os.environ[f'PET_{name}'] for name in ('NODE_RANK', 'NNODES', 'MASTER_ADDR')]"
    started = {
        code: start("(folder / 'trains').touch(); return 0", check=f"print({place}); sys.exit({code})")
        for code in (13, 75, 0)
    }
    assert [node.code for node in started.values()] == [13, 1, 0]
    for code, node in started.items():
        assert "['0', '1', 'localhost']" in node.log
        assert node.has("trains") == (code == 0)


@pytest.mark.takes("starts nodes that wait for each other")
def test_stop_signal_ends_the_checks(start: Callable[..., Started]) -> None:
    node = start("return 0", check="open(f'{folder}/pid', 'w').write(str(os.getpid())); time.sleep(60)")
    wait_for(lambda: node.has("pid") and (node.folder / "pid").read_text(), [node])
    node.process.terminate()
    assert node.code == 75
    wait_for(lambda: not Path(f"/proc/{(node.folder / 'pid').read_text()}").exists())


def test_sigterm_to_every_process_of_two_nodes_saves_on_both(two: Callable[..., list[Started]]) -> None:
    """As scancel sends it. A node whose ranks are still saving must not be taken for lost."""
    both = two("return save()")
    wait_for(lambda: all(node.has("trains") for node in both), both)
    for node in reversed(both):
        os.killpg(node.process.pid, signal.SIGTERM)
        time.sleep(0.1)
    assert [(node.code, node.has("saved"), "gone" in node.log) for node in both] == [(75, True, False)] * 2


def test_a_node_that_is_stopped_before_all_have_come_ends_at_once(start: Callable[..., Started]) -> None:
    first, second = make_places()
    nodes = [start("return 0", first), start("return 0", second | {"PET_MASTER_ADDR": "no-such-name.invalid"})]
    wait_for(lambda: all(list(node.folder.glob("windlass-*")) for node in nodes), nodes)
    time.sleep(0.5)  # they have begun to join, or will be stopped before
    for node, kill in zip(nodes, (os.kill, os.killpg), strict=True):
        kill(node.process.pid, signal.SIGTERM)
        began = time.monotonic()
        assert node.code == 75, node.log
        assert time.monotonic() - began < 30


def test_node_stopped_before_its_ranks_is_not_awaited(two: Callable[..., list[Started]]) -> None:
    """It ends with 75 like one that has saved, and the others' ranks would wait for it."""
    first, second = two("wait()", check1="open(f'{folder}/checks', 'w'); time.sleep(60)", check0="pass")
    wait_for(lambda: second.has("checks") and first.has("trains"), [first, second])
    second.process.terminate()
    assert second.code == 75
    assert first.code == 1, "it did not save, and may be tried again"
    assert "node 1 (" in first.log
    assert "was stopped before its ranks began" in first.log


@pytest.mark.takes("starts nodes that wait for each other")
def test_all_nodes_log_why_one_failed(two: Callable[..., list[Started]]) -> None:
    """In its check, while the other's would wait for it, and in its ranks, which the other's wait for."""
    error = json.dumps({"time": 1, "problems": [{"where": "data", "problem": "not here"}]})
    writes = f"open(os.environ['WINDLASS_STATUS_DIR'] + '/error-check', 'w').write({error!r}); sys.exit(13)"
    both = two("return 0", check0=writes, check1="time.sleep(60)")
    assert [node.code for node in both] == [13, 13], both[0].log + both[1].log
    assert f"node 0 ({socket.gethostname()}) ended with 13: data: not here" in both[1].log
    work = "if here.rank == 0: raise UserError('no fp8 here', 'train.dtype')\n    {}"
    both = two(work.format(DEAF), lost_seconds=1)
    assert [node.code for node in both] == [13, 13], both[0].log + both[1].log
    assert "another node was lost 2 s before, and the ranks had not ended" in both[1].log
    assert "ended with 13: train.dtype: no fp8 here" in both[1].log


def test_a_node_that_cannot_start_tells_the_others(start: Callable[..., Started], tmp_path: Path) -> None:
    first, second = make_places()
    other = start("return 0", first)
    command = [warm.python(), "-m", "windlass.ranks.node", "2", "13", "the working folder is missing"]
    assert subprocess.run(command, env={**environ(tmp_path), **second}, check=False).returncode == 13
    assert other.code == 13, other.log
    assert f"node 1 ({socket.gethostname()}): the working folder is missing" in other.log


def test_a_person_gets_2_for_wrong_input_and_the_other_nodes_are_told(
    start: Callable[..., Started], tmp_path: Path
) -> None:
    first, second = make_places()
    other = start("return 0", second)
    words = [warm.python(), "-m", "windlass", "train", str(tmp_path / "nix")]
    done = subprocess.run(words, env={**environ(tmp_path), **first}, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1].endswith("ended with 2")) == (2, True), done.stderr
    assert other.code == 13, other.log
    assert f"node 0 ({socket.gethostname()}): {tmp_path / 'nix'}" in other.log


# --- as launch.sh starts it: `windlass train`, here of a script, which needs no model ---

PET = {"PET_NODE_RANK": "0", "PET_NNODES": "2", "PET_MASTER_ADDR": "localhost"}
JOB = {"WINDLASS_JOB": "a job", "WINDLASS_GRACE_SECONDS": "5", "WINDLASS_RANKS_PER_NODE": "1", "WINDLASS_CHECK": "no"}


def train(folder: Path, *overrides: str, **more: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text("import sys; print('a \"b\" ä', file=sys.stderr); print('last')")
    text = f"kind: script\nscript: {{path: {folder}/train.py, output_dir: {folder}/run}}\n"
    (folder / "run.yaml").write_text(text + f"cluster: {{gpu: cpu, nodes: {more['WINDLASS_NODES']}}}\n")
    words = [word for override in overrides for word in ("--override", override)]
    command = [warm.python(), "-m", "windlass", "train", str(folder / "run.yaml"), *words]
    variables = {**environ(folder), **JOB, **more}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)


# Python's own end, which takes its handlers away, lasts until its input is closed.
LATE = """
import ctypes
ctypes.pythonapi.Py_AtExit(ctypes.cast(ctypes.CDLL(None).getchar, ctypes.c_void_p))
from windlass.cli import main
main()
"""


def test_a_signal_after_the_ranks_end_does_not_kill(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')")
    (tmp_path / "run.yaml").write_text(
        f"kind: script\nscript: {{path: {tmp_path}/train.py, output_dir: {tmp_path}/run}}\n"
        "layout: {ranks: 1}\ncluster: {gpu: cpu}\n"
    )
    words = [sys.executable, "-c", LATE, "train", str(tmp_path / "run.yaml")]
    with subprocess.Popen(words, env=environ(tmp_path), stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None

        def has_no_handler() -> bool:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            (caught,) = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt")]
            return (tmp_path / "run/manifest.json").exists() and not caught >> (signal.SIGUSR1 - 1) & 1

        wait_for(has_no_handler)
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.2)
        _, printed = process.communicate(timeout=60)
    assert process.returncode == 0, printed


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ({**PET, "PET_NNODES": "3"}, "planned for 2 nodes, and this is 3"),
        ({"SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, "one task per node"),
    ],
)  # fmt: skip
def test_a_platform_that_disagrees_with_the_plan_is_not_tried_again(
    tmp_path: Path, place: dict[str, str], text: str
) -> None:
    done = train(tmp_path, "cluster.network=ethernet-25", WINDLASS_NODES="2", WINDLASS_WAIT_SECONDS="1", **place)
    assert (done.returncode, text in " ".join(done.stderr.split())) == (13, True), done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.fault(
    "a node that never comes, without launch.sh", "`windlass train`", "node 1 did not join within 1 s (node 0 did)"
)
@pytest.mark.takes("starts nodes that wait for each other")
def test_a_node_that_never_comes_is_named_without_a_job_too(tmp_path: Path) -> None:
    """As a person starts nodes: `windlass train` and the variables of PET."""
    (tmp_path / "train.py").write_text("print('started')")
    text = f"kind: script\nscript: {{path: {tmp_path}/train.py, output_dir: {tmp_path}/run}}\n"
    (tmp_path / "run.yaml").write_text(text + "cluster: {gpu: cpu, nodes: 2, network: ethernet-25}\n")
    for number, words in (
        ("0", "node 1 did not join within 1 s (node 0 did)"),
        ("1", "was not reached within 1 s: Connection refused"),
    ):
        place = {**PET, "PET_NODE_RANK": number, "PET_MASTER_PORT": str(free_port()), "WINDLASS_WAIT_SECONDS": "1"}
        command = [warm.python(), "-m", "windlass", "train", str(tmp_path / "run.yaml")]
        done = subprocess.run(
            command, env={**environ(tmp_path), **place}, capture_output=True, text=True, timeout=120, check=False
        )
        assert (done.returncode, words in done.stderr) == (1, True), done.stderr
        assert "Traceback" not in done.stderr
        assert "started" not in done.stdout


@pytest.mark.fault(
    "a node that comes back after the end",
    "`windlass train --resume`",
    "contains this run, finished: nothing is left to train",
)
def test_a_node_that_comes_back_after_the_end_has_nothing_to_do(tmp_path: Path) -> None:
    """And nobody to ask: node 0 has gone, and its name with it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text(json.dumps({"state": "finished"}))
    (tmp_path / "run.yaml").write_text(
        f"model: {{model_name_or_path: Llama-3.1-8B}}\ntrain: {{output_dir: {tmp_path}/run}}\n"
        "cluster: {nodes: 2, gpus_per_node: 8, gpu: h100, network: infiniband-400}\n"
    )
    place = {**PET, "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "no-such-name.invalid"}
    command = [sys.executable, "-X", "importtime", "-m", "windlass", "train", str(tmp_path / "run.yaml"), "--resume"]
    variables = {**environ(tmp_path), **JOB, "WINDLASS_NODES": "2", **place}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}/run contains this run, finished: nothing is left to train" in done.stderr
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "windlass.start" in names
    assert "torch" not in names


def test_a_log_of_json_has_every_line_with_its_node(tmp_path: Path) -> None:
    done = train(tmp_path, WINDLASS_NODES="1", WINDLASS_LOG_FORMAT="json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0
    assert {(line["run"], line["node"], line["host"]) for line in lines} == {("a job", 0, socket.gethostname())}
    assert {'a "b" ä', "last", "--- a job: 1 x 1 cpu, script"} <= {line["message"] for line in lines}
    done = train(tmp_path, "script.nix=1", WINDLASS_NODES="1", WINDLASS_LOG_FORMAT="json")
    assert done.returncode == 13
    assert json.loads(done.stdout.splitlines()[-1])["message"].endswith("ended with 13")


def test_gpus_are_counted_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = hardware.GpuReading(0, "H200", 141.0, 140.0)
    for gpus, text in (
        (hardware.Gpus((gpu,)), "2 GPUs are needed; this node has 1"),
        (hardware.Gpus(error="NVML does not start: no driver"), "this node has 0 (NVML does not start: no driver)"),
    ):
        monkeypatch.setattr(nodes, "read_gpus", lambda *, health, gpus=gpus: gpus)
        with pytest.raises(RunError) as caught:
            nodes.require_gpus(2)
        assert text in str(caught.value)
    nodes.require_gpus(0)
