"""The interpreter that tests start processes with is signalled, and killed, like Python's own."""

import signal
import subprocess
import time
from pathlib import Path

import warm


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
