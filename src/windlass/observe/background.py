"""Write a run's report while it trains, in a separate process that reads the run folder's files."""

import atexit
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from windlass import run_folder

FINISH_SECONDS: Final = 120  # how long the end of a run waits for its report
LEAST_SECONDS: Final = 15  # between reports: tiny runs save several times a second
STREAMS: Final[dict[str, Any]] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}


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
                self.process = subprocess.Popen(self.command, **STREAMS)
            except OSError as error:
                print(f"the report can't be written: {error}", file=sys.stderr)

    def finish(self) -> None:
        """Write the report at the end of the run, however it ended. A run without a step has no report."""
        atexit.unregister(self.finish)
        if not run_folder.find_step_files(self.folder):
            return
        try:
            if self.process is not None:
                self.process.wait(FINISH_SECONDS)
            subprocess.run(self.command, **STREAMS, timeout=FINISH_SECONDS, check=True)
        except (subprocess.SubprocessError, OSError) as error:
            print(f"the final report can't be written: {error}", file=sys.stderr)
