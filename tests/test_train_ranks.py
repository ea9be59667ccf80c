"""Ranks as processes: started, signalled, waited for, and what is said when they fail. No torch in any of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from windlass.errors import SAVED, Problem, RunError, UserError
from windlass.train import ranks
from windlass.train.rank import Rank, read_rank

PROLOGUE = """
import os, signal, sys, time
from windlass.errors import SAVED, Problem, RunError, UserError
from windlass.train import ranks
from windlass.train.rank import Rank, StopSignal, read_rank, run_rank, wait_for_peers
here = read_rank(os.environ)
"""


def crew(tmp_path: Path, body: str, world: int = 2, **options: float) -> int:
    script = tmp_path / "rank.py"
    script.write_text(PROLOGUE + textwrap.dedent(body))
    return ranks.start([sys.executable, str(script)], world, {**os.environ}, **options)


def test_every_rank_knows_its_place_and_shares_the_cores(tmp_path: Path) -> None:
    body = f"""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    open(r"{tmp_path}/" + str(here.rank), "w").write(" ".join(os.environ[name] for name in names))
    """
    assert crew(tmp_path, body, 3) == 0
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // 3))
    for rank in range(3):
        assert (tmp_path / str(rank)).read_text() == f"{rank} {rank} 3 3 localhost {threads}"


def test_accelerates_settings_do_not_reach_the_ranks() -> None:
    environ = {"FSDP_VERSION": "2", "ACCELERATE_USE_FSDP": "true", "HOME": "/h", "ACCELERATE_USE_CPU": "true"}
    assert ranks.without_accelerate(environ) == {"HOME": "/h", "ACCELERATE_USE_CPU": "true"}
    assert ranks.clear_accelerate(environ) == {"FSDP_VERSION": "2", "ACCELERATE_USE_FSDP": "true"}
    assert environ == {"HOME": "/h", "ACCELERATE_USE_CPU": "true"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}, Rank(1, 1, 4)),
        ({"RANK": "1", "WORLD_SIZE": "3"}, Rank(1, 0, 3)),  # an operator's pod with one rank
        ({"RANK": "1", "WORLD_SIZE": "16", "PET_NPROC_PER_NODE": "8"}, None),  # its eight ranks are not started yet
        ({"RANK": "1", "WORLD_SIZE": "3", "PET_NPROC_PER_NODE": "auto"}, Rank(1, 0, 3)),
    ],
)
def test_who_started_this_process_is_read_from_the_environment(environ: dict[str, str], expected: Rank | None) -> None:
    assert read_rank(environ) == expected


def test_an_operators_pod_starts_its_own_ranks_and_counts_the_others(tmp_path: Path) -> None:
    environ = {
        "RANK": "1", "WORLD_SIZE": "4", "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "2",
        "PET_MASTER_ADDR": "job-master-0", "PET_MASTER_PORT": "23456",
    }  # fmt: skip
    made = ranks.environments(2, environ, 1)
    assert [(e["RANK"], e["LOCAL_RANK"], e["WORLD_SIZE"], e["MASTER_ADDR"], e["MASTER_PORT"]) for e in made] == [
        ("2", "0", "4", "job-master-0", "23456"),
        ("3", "1", "4", "job-master-0", "23456"),
    ]


def test_the_users_mistake_is_told_once_with_its_place(tmp_path: Path) -> None:
    body = """
    def work(): raise UserError("'k' matches nothing", "run.yaml:3: lora.target_modules", "see windlass plan")
    sys.exit(run_rank(here, work, print_error=print))
    """
    with pytest.raises(UserError) as caught:
        crew(tmp_path, body)
    assert not isinstance(caught.value, RunError)
    assert caught.value.problems == (
        Problem("'k' matches nothing", "run.yaml:3: lora.target_modules", "see windlass plan"),
    )


def test_the_root_is_told_and_not_what_followed_from_it(tmp_path: Path) -> None:
    body = """
    def work():
        if here.rank == 0:
            time.sleep(0.3)
            raise ConnectionError("peer is gone")
        raise RunError("non-finite loss at step 7: rank 1, rows 3, 9", "watch.non_finite", "look at them")
    sys.exit(run_rank(here, work, print_error=print))
    """
    with pytest.raises(RunError, match="rank 1, rows 3, 9"):
        crew(tmp_path, body)


def test_an_unforeseen_failure_shows_the_traceback_of_the_rank_that_was_first(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = """
    def work():
        if here.rank == 0:
            time.sleep(0.3)
            raise ConnectionError("peer is gone")
        raise ZeroDivisionError("the root")
    sys.exit(run_rank(here, work, print_error=print))
    """
    assert crew(tmp_path, body) == 1
    said = capfd.readouterr().err
    assert "rank 1 failed" in said
    assert "the root" in said
    assert "peer is gone" not in said


def test_a_killed_rank_is_named_with_what_it_was_doing(tmp_path: Path) -> None:
    body = """
    here.phase("training step 12")
    if here.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    def work():
        time.sleep(2)
        raise ConnectionError("peer is gone")
    sys.exit(run_rank(here, work, print_error=print))
    """
    with pytest.raises(RunError, match="rank 1 was killed by SIGKILL while training step 12"):
        crew(tmp_path, body)


def test_ranks_that_hang_after_one_has_failed_are_ended_in_bounded_time(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = """
    if here.rank == 1:
        print("cannot import torch")
        sys.exit(3)
    time.sleep(60)
    """
    began = time.monotonic()
    assert crew(tmp_path, body, patience_seconds=0.2) == 1
    assert time.monotonic() - began < 5
    assert "rank 1 ended with 3:\ncannot import torch" in capfd.readouterr().err


LAUNCHER = """
import os, sys
from windlass.train import ranks
sys.exit(ranks.start([sys.executable, sys.argv[1]], 2, dict(os.environ), grace_seconds=float(sys.argv[2])))
"""


def launched(tmp_path: Path, body: str, grace: float = 20) -> subprocess.Popen[bytes]:
    (tmp_path / "rank.py").write_text(PROLOGUE + textwrap.dedent(body).replace("TMP", str(tmp_path)))
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    process = subprocess.Popen([sys.executable, tmp_path / "launcher.py", tmp_path / "rank.py", str(grace)])
    deadline = time.monotonic() + 20
    while len(list(tmp_path.glob("ready-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    return process


SAVES = """
interruption = StopSignal()
interruption.training = True
open(f"TMP/ready-{here.rank}", "w")
while not interruption.received:
    time.sleep(0.02)
time.sleep(0.5)
open(f"TMP/saved-{here.rank}", "w")
sys.exit(SAVED)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_to_the_launcher_reaches_the_ranks_and_they_save(tmp_path: Path, number: signal.Signals) -> None:
    process = launched(tmp_path, SAVES)
    process.send_signal(number)
    assert process.wait(20) == SAVED
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]


def test_the_same_signal_twice_is_one(tmp_path: Path) -> None:
    """As GNU timeout sends it: to the process, and to its group."""
    process = launched(tmp_path, SAVES)
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    assert process.wait(20) == SAVED
    assert len(list(tmp_path.glob("saved-*"))) == 2


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    process = launched(tmp_path, SAVES.replace("time.sleep(0.5)", "time.sleep(60)"))
    process.send_signal(signal.SIGTERM)
    time.sleep(1.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) != 0
    assert not list(tmp_path.glob("saved-*"))


def test_ranks_that_do_not_save_within_the_grace_are_ended(tmp_path: Path) -> None:
    process = launched(tmp_path, SAVES.replace("time.sleep(0.5)", "time.sleep(60)"), grace=0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(15) != 0


def test_a_rank_that_holds_nothing_yet_stops_at_once(tmp_path: Path) -> None:
    process = launched(tmp_path, SAVES.replace("interruption.training = True", "").replace("0.02", "60"))
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == SAVED


def test_who_saved_first_awaits_the_others_but_neither_the_dead_nor_for_ever(tmp_path: Path) -> None:
    script = """
    from pathlib import Path
    status_dir, waited = Path(sys.argv[1]), []
    here = Rank(rank=3, local_rank=1, world=4, status_dir=status_dir)
    here.report("code", "75")
    for name, text in (("pid-0", "1"), ("pid-2", str(os.getpid())), ("pid-2", sys.argv[2]), ("code-2", "1")):
        (status_dir / name).write_text(text)
        began = time.monotonic()
        wait_for_peers(here, 2, 0.5)
        waited.append(time.monotonic() - began >= 0.5)
        (status_dir / name).unlink()
    print(waited)
    """
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    words = [sys.executable, "-c", PROLOGUE + textwrap.dedent(script), str(tmp_path), str(gone.pid)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.split() == ["[True,", "True,", "False,", "False]"]
