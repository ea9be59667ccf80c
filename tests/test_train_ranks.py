"""Ranks as processes: started, signalled, waited for, and the messages when they fail. None imports torch."""

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import warm
from refusals import refused

from windlass.errors import SAVED, Problem, RunError, UserError
from windlass.ranks import collectives
from windlass.ranks import supervisor as ranks
from windlass.ranks.place import Node, read_node, translate_launcher
from windlass.ranks.rank import Rank, read_rank
from windlass.runfile import read_run_file
from windlass.train.connect import choose_gpu, create_process_group
from windlass.variables import DEFAULTS

PROLOGUE = """
import os, signal, sys, time
from windlass.errors import LOST_RANK, SAVED, Problem, RunError, UserError
from windlass.ranks import supervisor as ranks
from windlass.ranks.rank import Rank, StopSignal, read_rank, run_rank
here = read_rank(os.environ)
"""
RUN = "\nsys.exit(run_rank(here, work, print_error=print))\n"


def crew(tmp_path: Path, body: str, world: int = 2, **options: float) -> int:
    script = tmp_path / "rank.py"
    script.write_text(PROLOGUE + textwrap.dedent(body) + (RUN if "def work()" in body else ""))
    return ranks.start_ranks([warm.python(), str(script)], world, {**os.environ}, **options)


def test_a_full_disk_before_the_first_step_is_named(tmp_path: Path) -> None:
    body = """
    def work():
        raise OSError(28, "No space left on device", "/tmp/load.json")
    """
    with pytest.raises(RunError, match=r"^/tmp/load\.json can't be written: No space left .*\n\nhint: make room"):
        crew(tmp_path, body, 1)


def test_ranks_that_another_launcher_started_say_the_same_error_once(tmp_path: Path) -> None:
    """Of one start: the next one says it again, and so does each start of a pod."""
    body = """
    def work():
        time.sleep(0.3 * here.rank)
        raise RunError("1 adapter tensor is not training" if here.rank < 2 else "another error", "runs/one")
    """
    script = tmp_path / "rank.py"
    script.write_text(PROLOGUE + textwrap.dedent(body) + RUN)

    def start(ranks: int, **environ: str) -> str:
        own = {**os.environ, "TMPDIR": str(tmp_path), **environ}
        command = [warm.python(), str(script)]
        started = [
            subprocess.Popen(command, env={**own, "RANK": rank, "LOCAL_RANK": rank}, stdout=subprocess.PIPE, text=True)
            for rank in map(str, range(ranks))
        ]
        return "".join(process.communicate(timeout=120)[0] for process in started)

    for port in ("1", "2"):
        text = start(3, WORLD_SIZE="3", MASTER_PORT=port)
        assert text.count("1 adapter tensor is not training") == text.count("another error") == 1, text
        assert "1 adapter tensor is not training" in start(1, WORLD_SIZE="2", LOCAL_WORLD_SIZE="1")


# --- which rank this is, and how many there are ---


def test_every_rank_knows_its_place_and_shares_the_cores(tmp_path: Path) -> None:
    body = f"""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    open(r"{tmp_path}/" + str(here.rank), "w").write(" ".join(os.environ[name] for name in names))
    """
    assert crew(tmp_path, body, 3) == 0
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // 3))
    for rank in range(3):
        assert (tmp_path / str(rank)).read_text() == f"{rank} {rank} 3 3 localhost {threads}"


def test_accelerates_settings_are_removed() -> None:
    environ = {"FSDP_VERSION": "2", "ACCELERATE_USE_FSDP": "windlass", "HOME": "/h", "ACCELERATE_USE_CPU": "windlass"}
    ranks.remove_accelerate_settings(environ)
    assert environ == {"HOME": "/h", "ACCELERATE_USE_CPU": "windlass"}


SRUN = {"SLURM_JOB_ID": "4711", "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "11"}
SRUN |= {"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_LOCALID": "3", "SLURM_NODEID": "1", "MASTER_ADDR": "n1"}
MPI = {"OMPI_COMM_WORLD_RANK": "11", "OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
MPI |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "8", "MASTER_ADDR": "n1"}
TORCHRUN = {"RANK": "11", "LOCAL_RANK": "3", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "n1"}
BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_TASKS_PER_NODE": "1",
    "SLURM_JOB_NODELIST": "n1",
}
KUBEFLOW = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-master-0", "PET_MASTER_PORT": "23456"}
OLD_POD = {"RANK": "1", "WORLD_SIZE": "16", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
ONE_EACH = {"CUDA_VISIBLE_DEVICES": "3"}
LEADS, PODS = ("n1", "29422"), ("job-master-0", "23456")
OURS = ("localhost", "77")  # one machine's own ranks: a port that is free


@pytest.mark.parametrize(
    ("environ", "ranks_here", "gpus", "expected"),  # of all ranks that start here: rank, local rank, world, GPU
    [
        ({}, 2, 2, ([(0, 0, 2, 0), (1, 1, 2, 1)], OURS, [2])),
        (TORCHRUN | {"MASTER_PORT": "29422"}, 8, 8, ([(11, 3, 16, 3)], LEADS, [2, 8])),
        (TORCHRUN | SRUN | {"MASTER_PORT": "29422"}, 8, 8, ([(11, 3, 16, 3)], LEADS, [2, 8])),  # srun torchrun
        (TORCHRUN | ONE_EACH | {"MASTER_PORT": "29422"}, 8, 1, ([(11, 3, 16, 0)], LEADS, [2, 8])),
        (SRUN, 8, 8, ([(11, 3, 16, 3)], LEADS, [2, 8])),
        (SRUN | ONE_EACH, 8, 1, ([(11, 3, 16, 0)], LEADS, [2, 8])),  # srun --gpus-per-task=1
        (
            SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"},
            *(2, 2, ([(2, 0, 4, 0), (3, 1, 4, 1)], LEADS, [2, 2])),
        ),
        (  # a shell of srun's
            SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"},
            *(2, 2, ([(0, 0, 2, 0), (1, 1, 2, 1)], OURS, [2])),
        ),
        (BATCH, 2, 2, ([(0, 0, 2, 0), (1, 1, 2, 1)], OURS, [2])),  # sbatch without srun
        (MPI, 8, 8, ([(11, 3, 16, 3)], ("n1", "29500"), [2, 8])),
        (
            MPI | {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            *(2, 2, ([(2, 0, 4, 0), (3, 1, 4, 1)], ("n1", "29500"), [2, 2])),
        ),
        # PyTorchJob, which Run:ai's distributed workloads are, and a TrainJob: both start the command once a pod.
        (OLD_POD | KUBEFLOW | {"PET_NPROC_PER_NODE": "8"}, 8, 8, ([(8 + n, n, 16, n) for n in range(8)], PODS, [2, 8])),
        (KUBEFLOW | {"PET_NPROC_PER_NODE": "auto"}, 2, 2, ([(2, 0, 4, 0), (3, 1, 4, 1)], PODS, [2, 2])),
        (KUBEFLOW | {"PET_NNODES": "1:2"}, 1, 1, ([(1, 0, 2, 0)], PODS, [2])),  # an elastic one
        (OLD_POD | {"WORLD_SIZE": "3"}, 1, 1, ([(1, 0, 3, 0)], PODS, [])),  # one rank a pod
    ],
)
def test_who_started_this_process_is_read_from_the_environment(
    environ: dict[str, str], ranks_here: int, gpus: int, expected: object, tmp_path: Path
) -> None:
    environ = {**environ, **translate_launcher(environ)}
    own = read_rank(environ)
    every = [environ]
    if own is None:
        node = read_node(environ)
        node = node if node.count > 1 else Node(port=77)
        every = ranks.make_environments(ranks_here, environ, node)
    places = [found for each in every if (found := own or read_rank(each))]
    where = {(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in every}
    path = tmp_path / "run.yaml"
    path.write_text("lora: {r: 8}\n")
    sizes = [int(each.partition("=")[2]) for each in ranks.default_overrides(read_run_file(path), environ, ranks_here)]
    seen = [(each.rank, each.local_rank, each.world, choose_gpu(each.local_rank, gpus)) for each in places]
    assert (seen, *where, sizes) == expected


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (TORCHRUN | {"RANK": "16"}, "RANK=16, WORLD_SIZE=16, LOCAL_RANK=3, LOCAL_WORLD_SIZE=8 is not a valid rank"),
        (TORCHRUN | {"LOCAL_RANK": "8"}, "LOCAL_RANK=8, LOCAL_WORLD_SIZE=8 is not a valid rank"),
        (
            TORCHRUN | {"WORLD_SIZE": "4", "RANK": "3"},
            "WORLD_SIZE=4, LOCAL_RANK=3, LOCAL_WORLD_SIZE=8 is not a valid rank",
        ),
        ({"RANK": "3"}, "RANK=3 is not a valid rank"),
        ({"RANK": "a", "WORLD_SIZE": "2"}, "RANK=a, WORLD_SIZE=2 is not a valid rank"),
        (KUBEFLOW | {"PET_NODE_RANK": "2"}, "there is no node '2' among '2'"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "0"}, "PET_NODE_RANK=0, PET_NNODES=2: the address of node 0 is unknown"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "8,7"}, "16 tasks are spread unevenly over the nodes: 8,7"),
        ({**SRUN, "MASTER_ADDR": ""}, "16 tasks on several nodes, and MASTER_ADDR is not set"),
    ],
)
@pytest.mark.fault("a launcher's variables that contradict", "`windlass train`", "RANK=16, WORLD_SIZE=16, LOCAL_RANK=3")
def test_an_environment_that_contradicts_itself_is_refused(environ: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        assert read_rank({**environ, **translate_launcher(environ)}) or read_node(environ)


# --- failures ---


def test_the_users_mistake_is_reported_once_with_its_place(tmp_path: Path) -> None:
    body = """
    def work(): raise UserError("'k' matches nothing", "run.yaml:3: lora.target_modules", "see windlass plan")
    """
    with pytest.raises(UserError) as caught:
        crew(tmp_path, body)
    assert not isinstance(caught.value, RunError)
    assert caught.value.problems == (
        Problem("'k' matches nothing", "run.yaml:3: lora.target_modules", "see windlass plan"),
    )


AFTER = """
def wait_until(condition):  # a loaded machine may start rank 1 long after rank 0
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
"""
LATER = f"""{AFTER}
def work():
    if here.rank == 0:
        wait_until((here.status_dir / "error-1").exists)
        raise ConnectionError("peer is gone")
"""


@pytest.mark.fault("a rank that fails, and others that lose it", "`windlass train`", "rank 1, rows 3, 9")
def test_root_cause_is_reported_before_consequences(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    error = '    raise RunError("non-finite loss at step 7: rank 1, rows 3, 9", "watch.non_finite", "look at them")'
    with pytest.raises(RunError, match="rank 1, rows 3, 9"):
        crew(tmp_path, LATER + error)
    assert crew(tmp_path, LATER + '    raise ZeroDivisionError("the root")') == 1
    printed = capfd.readouterr().err
    assert "rank 1 failed" in printed
    assert "the root" in printed
    assert "peer is gone" not in printed


@pytest.mark.long
def test_a_rank_that_knows_what_it_lost_explains_the_end_if_no_rank_explains_it_better(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lost = 'RunError("rank 0 lost another rank: closed", "windlass train", "", LOST_RANK)'
    later = LATER.replace('ConnectionError("peer is gone")', lost)
    assert later != LATER
    silent = '    print("native library: out of luck", flush=True); os._exit(9)'
    assert crew(tmp_path, later + silent, patience_seconds=1) == 1
    assert "out of luck" in capfd.readouterr().err
    with pytest.raises(RunError, match="rank 0 lost another rank"):
        crew(tmp_path, later + f"    raise {lost}")


@pytest.mark.fault("a port that another program has", "`windlass train`", "another program has port")
@pytest.mark.takes("starts ranks that wait")
def test_ranks_that_cant_connect_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", *DEFAULTS):  # set by the ranks themselves
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with socket.create_server(("", 0)) as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with refused("port-taken", "MASTER_PORT", RunError) as problems:
            create_process_group(Rank(0, 0, 2), 1)
    assert problems[0].problem.startswith("another program has port ")
    with refused("no-connection", "MASTER_ADDR", RunError) as problems:  # the port is free now, and nobody else comes
        create_process_group(Rank(0, 0, 2), 1)
    assert "1/2 clients joined" in problems[0].problem


def test_a_rank_that_loses_another_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = """
import torch
import torch.distributed as dist
from windlass.ranks import collectives
from windlass.train.connect import create_process_group

def work():
    try:
        create_process_group(here, 60)
        if here.rank == 1:
            os._exit(0)  # rank 0 may still be connecting
        collectives.barrier()
        dist.all_reduce(torch.ones(1))
    except Exception as error:
        raise collectives.explain_lost_rank(error) from error
"""
    with refused("lost-rank", "windlass train", RunError) as problems:
        crew(tmp_path, body)
    assert "/gloo/" not in problems[0].problem


def test_a_rank_lost_while_the_others_connect_is_explained_too() -> None:
    said = (
        "Gloo connectFullMesh failed with [/__w/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
        "[127.0.0.1]:46263. This is typically caused by a remote worker crashing."
    )
    explained = collectives.explain_lost_rank(RuntimeError(said))
    assert explained is not None
    assert explained.problems[0].problem.startswith("rank 0 lost another rank: Connection closed by peer [127.0.0.1]:")


@pytest.mark.fault("a rank that is killed", "`windlass train`", "rank 1 was killed by SIGKILL while training step 12")
def test_a_killed_rank_is_named_with_what_it_was_doing(tmp_path: Path) -> None:
    body = f"""{AFTER}
def alive(pid):
    try:
        return ") Z " not in open(f"/proc/{{pid}}/stat").read()
    except FileNotFoundError:
        return False
pid = here.status_dir / "pid"
here.phase("training step 12")
if here.rank == 1:
    pid.write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGKILL)
def work():
    wait_until(lambda: pid.exists() and not alive(pid.read_text()))
    raise ConnectionError("peer is gone")
"""
    with pytest.raises(RunError, match="rank 1 was killed by SIGKILL while training step 12"):
        crew(tmp_path, body)


@pytest.mark.fault("a native library that aborts a rank", "`windlass train`", "rank 1 was killed by SIGABRT while")
def test_an_aborted_rank_shows_its_last_words(tmp_path: Path) -> None:
    body = """
    if here.rank == 1:
        here.phase("computing the probe")
        print("native library: no such luck", flush=True)
        os.abort()
    """
    with refused("killed-rank", "windlass train", RunError) as problems:
        crew(tmp_path, body)
    expected = "rank 1 was killed by SIGABRT while computing the probe; it printed:\nnative library: no such luck"
    assert problems[0].problem == expected


def test_a_killed_rank_explains_one_that_is_aborted_for_it() -> None:
    assert ranks.find_first_failure([-signal.SIGABRT, -signal.SIGKILL, 1]) == 1
    assert ranks.find_first_failure([1, None, -signal.SIGABRT]) == 2


def test_a_rank_that_has_finished_is_not_failed_by_a_library(tmp_path: Path) -> None:
    """A library's thread may abort the process at Python's own end."""
    program = """
import atexit, os
from windlass.start import RankCommand, run_in_ranks

atexit.register(os.abort)
command = RankCommand(["windlass"], dict(os.environ), print)
run_in_ranks(lambda: None, lambda plan, here: print("finished") or 0, command)
"""
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={**os.environ, **rank}, capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stdout) == (0, "finished\n"), done.stderr


@pytest.mark.parametrize("command", ["train", "best"])
@pytest.mark.fault("a stop signal while torch imports numpy", "`windlass train`, `best`", "exits with 75")
def test_a_stop_signal_waits_for_the_end_of_imports(command: str) -> None:
    """torch loses what is raised while it imports numpy, of which half is left. The rank exits with 75 afterwards."""
    program = """
import builtins, os, signal, sys
from types import SimpleNamespace
from windlass import start

def import_as_torch(name, *rest):
    if name not in ("torch", "windlass.train.run", "windlass.best"):
        return original(name, *rest)
    if name == "torch":
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException as error:
            print(f"lost: {error!r}", flush=True)
    return SimpleNamespace(train_rank=lambda *_, **__: 1, rank_checkpoints=lambda *_, **__: 1)

original, builtins.__import__ = builtins.__import__, import_as_torch
start.leave_finished = start.require_inputs = lambda *_, **__: None
make_plan = lambda: SimpleNamespace(trials=())
ranks = start.RankCommand(["windlass"], dict(os.environ), print)
start.Plan = SimpleNamespace
if sys.argv[1] == "train":
    start.train(make_plan, ranks, resume=False)
else:
    start.best(make_plan, None, ranks, show=print)
"""
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    words = [sys.executable, "-c", program, command]
    done = subprocess.run(words, env={**os.environ, **rank}, capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stdout) == (SAVED, ""), done.stderr
    assert "there was nothing new to save; start again with --resume" in done.stderr


@pytest.mark.fault("a native library that ends a rank", "`windlass train`", "native library: out of luck")
def test_silently_failed_rank_shows_its_last_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = """
    if here.rank == 1:
        print("native library: out of luck", flush=True)
        os._exit(9)
    """
    assert crew(tmp_path, body) == 1
    assert "native library: out of luck" in capfd.readouterr().err


def test_hanging_ranks_are_killed_and_failure_is_not_a_stop(tmp_path: Path) -> None:
    body = """
    def work():
        if here.rank == 0:
            raise RunError("non-finite loss at step 7", "watch.non_finite", "look")
        time.sleep(60)
    """
    began = time.monotonic()
    with pytest.raises(RunError, match="non-finite loss at step 7"):
        crew(tmp_path, body, patience_seconds=0.2)
    assert time.monotonic() - began < 20


# --- signals ---

LAUNCHER = """
import os, sys
from windlass.errors import UserError
from windlass.ranks import supervisor as ranks
command, grace = sys.argv[1:3], float(sys.argv[3])
try:
    sys.exit(ranks.start_ranks(command, 2, dict(os.environ), grace_seconds=grace))
except UserError as error:
    sys.exit(str(error))
"""
SAVES = """
stop_signal = StopSignal()
stop_signal.training = True
open(f"TMP/ready-{here.rank}", "w")
while not stop_signal.received:
    time.sleep(0.02)
time.sleep(0.5)
open(f"TMP/saved-{here.rank}", "w")
sys.exit(SAVED)
"""
STUBBORN = SAVES.replace("time.sleep(0.5)", "time.sleep(60)")


def launched(tmp_path: Path, body: str, grace: float = 20, python: str = "") -> subprocess.Popen[str]:
    python = python or warm.python()
    (tmp_path / "rank.py").write_text(PROLOGUE + textwrap.dedent(body).replace("TMP", str(tmp_path)))
    command = [python, "-c", LAUNCHER, python, str(tmp_path / "rank.py"), str(grace)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path, "ready-*")
    return process


def wait_for(tmp_path: Path, pattern: str) -> list[str]:
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob(pattern))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    return sorted(path.name for path in tmp_path.glob(pattern))


@pytest.mark.parametrize(
    ("number", "times"),
    [
        pytest.param(signal.SIGUSR1, 1, id="SIGUSR1"),
        pytest.param(signal.SIGTERM, 2, id="as GNU timeout sends it, to the process and to its group"),
    ],
)
def test_a_signal_to_the_launcher_reaches_the_ranks_and_they_save(
    tmp_path: Path, number: signal.Signals, times: int
) -> None:
    process = launched(tmp_path, SAVES)
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.1)
    assert process.communicate(timeout=200)[1] == ""
    assert process.returncode == SAVED
    assert wait_for(tmp_path, "saved-*") == ["saved-0", "saved-1"]


@pytest.mark.parametrize(
    ("signals", "grace", "expected"),
    [(1, 0.3, "had not saved 0.3 s after the signal"), (2, 20, "a second signal ended the ranks")],
)
def test_ranks_killed_before_saving_are_reported(tmp_path: Path, signals: int, grace: float, expected: str) -> None:
    process = launched(tmp_path, STUBBORN, grace)
    for number in range(signals):
        time.sleep(1.1 if number else 0)
        process.send_signal(signal.SIGTERM)
    error = process.communicate(timeout=200)[1]
    assert process.returncode == 1
    assert expected in error
    assert "resume from the last checkpoint with --resume" in error
    assert not list(tmp_path.glob("saved-*"))


def test_rank_without_progress_stops_at_once(tmp_path: Path) -> None:
    process = launched(tmp_path, SAVES.replace("stop_signal.training = True", "").replace("0.02", "60"))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=200)
    assert process.returncode == SAVED


def test_ranks_whose_launcher_is_killed_save_and_end(tmp_path: Path) -> None:
    """In cold interpreters: the parent's death is the signal."""
    body = f"""
    def work():
    {SAVES.replace(chr(10), chr(10) + "        ").replace("sys.exit(SAVED)", "return SAVED")}
    """
    process = launched(tmp_path, textwrap.dedent(body) + RUN, python=sys.executable)
    process.kill()
    process.communicate()
    assert wait_for(tmp_path, "saved-*") == ["saved-0", "saved-1"]


def test_signal_before_the_first_step_loses_nothing(tmp_path: Path) -> None:
    body = """
    if here.rank == 1:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
    """
    assert crew(tmp_path, body, patience_seconds=0.2) == SAVED


@pytest.mark.fault(
    "a stop signal while the model is loaded",
    "`windlass train`",
    "stopped by a signal while loading the model: there was nothing new to save",
)
def test_a_signal_while_loading_ends_at_once_and_says_that_nothing_is_lost(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = """
    def work():
        here.phase("loading the model")
        if here.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    """
    assert crew(tmp_path, body, patience_seconds=0.2) == SAVED
    assert capfd.readouterr().err == (
        "stopped by a signal while loading the model: there was nothing new to save; start again with --resume\n"
    )


def test_failure_names_the_signalled_rank_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = f"""
    stopped = {str(tmp_path / "stopped")!r}
    def work():
        if here.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
            open(stopped, "w").close()
            time.sleep(60)
        while not os.path.exists(stopped):
            time.sleep(0.05)
        raise ConnectionError("peer is gone")
    """
    assert crew(tmp_path, body, patience_seconds=0.2) == SAVED
    assert "peer is gone" not in capfd.readouterr().err


def test_second_signal_does_not_interrupt_saving(tmp_path: Path) -> None:
    """torchrun sends it to all others once one has saved and ended."""
    body = SAVES.replace("TMP", str(tmp_path)).replace("while not", "os.kill(os.getpid(), signal.SIGTERM)\nwhile not")
    again = "time.sleep(1.2)\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(0.1)"
    assert crew(tmp_path, body.replace("time.sleep(0.5)", again)) == SAVED
    assert wait_for(tmp_path, "saved-*") == ["saved-0", "saved-1"]


@pytest.mark.takes("starts ranks that wait")
def test_first_saver_waits_for_living_ranks_up_to_a_limit() -> None:
    """Of the processes that its launcher started, those that have a child: the script."""
    launcher = """
    def wait(seconds):
        code = f"from windlass.ranks.rank import wait_for_peers; wait_for_peers({seconds})"
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.monotonic() - began
    peer = subprocess.Popen(["bash", "-c", "sleep 40; true"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(wait(3) >= 3)
    peer.kill()
    print(wait(300) < 300)
    """
    words = [sys.executable, "-c", "import subprocess, sys, time\n" + textwrap.dedent(launcher)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=400, check=True)
    assert done.stdout.split() == ["True", "True"]
