"""How ranks end when somebody ends them, and what is said of it. Processes without torch."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_train_ranks import SAVES, crew, launched

from windlass.errors import SAVED, RunError


def test_ranks_whose_launcher_is_killed_save_and_end(tmp_path: Path) -> None:
    body = f"""
    def work():
    {SAVES.replace(chr(10), chr(10) + "        ").replace("sys.exit(SAVED)", "return SAVED")}
    sys.exit(run_rank(here, work, print_error=print))
    """
    process = launched(tmp_path, body)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while len(list(tmp_path.glob("saved-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]


def test_a_rank_that_had_not_begun_when_the_signal_came_lost_nothing(tmp_path: Path) -> None:
    body = """
    if here.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
    """
    assert crew(tmp_path, body, patience_seconds=0.2) == SAVED


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_signal_while_loading_ends_at_once_and_says_that_nothing_is_lost(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], stopped: int
) -> None:
    body = f"""
    def work():
        here.phase("loading the model")
        if here.rank == {stopped}:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    sys.exit(run_rank(here, work, print_error=print))
    """
    assert crew(tmp_path, body, patience_seconds=0.2) == SAVED
    assert capfd.readouterr().err == (
        "stopped by a signal while loading the model: there was nothing new to save; start again with --resume\n"
    )


def test_the_signalled_rank_explains_those_that_lost_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = """
    def work():
        if here.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(5)
        raise ConnectionError("peer is gone") if not time.sleep(0.3) else None
    sys.exit(run_rank(here, work, print_error=print))
    """
    assert crew(tmp_path, body) == SAVED
    assert "peer is gone" not in capfd.readouterr().err


def test_another_signal_to_a_rank_that_saves_cuts_nothing_short(tmp_path: Path) -> None:
    """As torchrun sends it to all the others once one has saved and ended."""
    body = SAVES.replace("TMP", str(tmp_path)).replace("while not", "os.kill(os.getpid(), signal.SIGTERM)\nwhile not")
    again = "time.sleep(1.2)\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(0.1)"
    assert crew(tmp_path, body.replace("time.sleep(0.5)", again)) == SAVED
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]


def test_a_failure_is_no_stop_though_the_others_are_told_to_end(tmp_path: Path) -> None:
    body = """
    def work():
        if here.rank == 0:
            raise RunError("non-finite loss at step 7", "watch.non_finite", "look")
        time.sleep(60)
    sys.exit(run_rank(here, work, print_error=print))
    """
    with pytest.raises(RunError, match="non-finite loss at step 7"):
        crew(tmp_path, body, patience_seconds=0.2)


STUBBORN = SAVES.replace("time.sleep(0.5)", "time.sleep(60)")


@pytest.mark.parametrize(
    ("signals", "grace", "expected"),
    [
        (1, 0.3, "had not saved 0.3 s after the signal"),  # killed
        (2, 20, "a second signal ended the ranks"),
    ],
)
def test_ended_before_they_had_saved_is_said(tmp_path: Path, signals: int, grace: float, expected: str) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_checkpoint_signals import STUBBORN
from test_train_ranks import crew
from windlass.errors import UserError
try:
    crew(Path({str(tmp_path)!r}), STUBBORN.replace("TMP", {str(tmp_path)!r}), grace_seconds={grace})
except UserError as error:
    sys.exit(str(error))
"""
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 20
    while len(list(tmp_path.glob("ready-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    for number in range(signals):
        time.sleep(1.1 if number else 0)
        process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=20)
    assert process.returncode == 1
    assert expected in error
    assert "resume from the last checkpoint with --resume" in error
