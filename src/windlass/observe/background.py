"""Write a run's report while it trains, in a separate process that reads the run folder's files."""

import atexit
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

from windlass import run_folder

FINISH_SECONDS: Final = 120  # how long the end of a run waits for its report
LEAST_SECONDS: Final = 15  # between reports: tiny runs save several times a second
STREAMS: Final[dict[str, Any]] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}

# Reports are started by threads that save or watch, while training forks the workers of its data loaders. A worker
# that is forked in the middle of a start keeps that start's pipe open, and the thread would wait for the worker's end.
# So a fork waits for the start to end, and a start for the fork.
STARTING: Final = threading.Lock()
os.register_at_fork(before=STARTING.acquire, after_in_parent=STARTING.release, after_in_child=STARTING.release)


class BackgroundReport:
    """Writes reports in a process. at_exit: also when an exception ends the program."""

    def __init__(self, folder: Path, *, at_exit: bool = False) -> None:
        self.folder = folder
        self.command = [sys.executable, "-m", "windlass", "report", str(folder)]
        self.process: subprocess.Popen[bytes] | None = None
        self.started = -math.inf
        if at_exit:
            atexit.register(self.finish)

    def start(self) -> None:
        """Start a report at a save, without waiting, unless the last one is unfinished or was just started."""
        writing = self.process is not None and self.process.poll() is None
        if not writing and time.monotonic() - self.started >= LEAST_SECONDS:
            self.started = time.monotonic()
            try:
                self.process = self._start()
            except OSError as error:
                print(f"the report can't be written: {error}", file=sys.stderr)

    def _start(self) -> subprocess.Popen[bytes]:
        with STARTING:
            return subprocess.Popen(self.command, **STREAMS)

    def finish(self) -> None:
        """Write the report at the end of the run, however it ended. A run without a step has no report."""
        atexit.unregister(self.finish)
        folders = run_folder.list_trials(self.folder) or [self.folder]
        if not any(map(run_folder.find_step_files, folders)):
            return
        try:
            if self.process is not None:
                self.process.wait(FINISH_SECONDS)
            process = self._start()
            try:
                code = process.wait(FINISH_SECONDS)
            finally:
                process.kill()
            if code:
                raise subprocess.CalledProcessError(code, self.command)
        except (subprocess.SubprocessError, OSError) as error:
            print(f"the final report can't be written: {error}", file=sys.stderr)
