"""The interpreter that tests start processes with behaves like Python's own."""

import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
import warm


@pytest.mark.parametrize(
    "code",
    [
        "import atexit, os, sys; atexit.register(print, 'at exit'); print(os.getcwd(), sys.argv, os.environ['MARK'],"
        " __name__, input())",
        "import sys; sys.exit('a message')",
        "import sys, subprocess; sys.exit(subprocess.run([sys.executable, '-c', 'raise SystemExit(3)']).returncode)",
        "1 / 0",
    ],
)
def test_a_program_ends_as_under_a_cold_interpreter(code: str, tmp_path: Path) -> None:
    warmed, cold = (
        subprocess.run(
            [python, "-c", code, "argument"],
            cwd=tmp_path,
            env={**os.environ, "MARK": "mark"},
            input="typed\n",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        for python in (warm.python(), sys.executable)
    )
    assert (warmed.returncode, warmed.stdout) == (cold.returncode, cold.stdout)
    assert warmed.stderr.splitlines()[-1:] == cold.stderr.splitlines()[-1:]


def test_signals_reach_the_program_and_killing_the_client_ends_it() -> None:
    wait = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    for number in (signal.SIGTERM, signal.SIGKILL):
        with subprocess.Popen([warm.python(), "-c", wait], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            pid = int(process.stdout.readline())
            process.send_signal(number)
            assert process.wait(60) == -number
            until = time.monotonic() + 60
            while Path(f"/proc/{pid}").exists():
                assert time.monotonic() < until, "the program outlived its client"
                time.sleep(0.02)


@pytest.mark.parametrize("folders", ["{libraries}", "/nowhere"])
def test_ranks_and_what_they_start_are_warm(folders: str) -> None:
    """torchrun starts ranks with -u, they start reports and data workers. Other folders may hold other libraries."""
    path = folders.format(libraries=sysconfig.get_path("purelib"))
    environ = os.environ | {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "PYTHONPATH": path}
    command = [warm.python(), "-u", "-c", "import sys; print('torch' in sys.modules)"]
    done = subprocess.run(command, capture_output=True, env=environ, text=True)
    assert done.stdout == f"{folders != '/nowhere'}\n"
