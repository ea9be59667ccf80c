"""Writes the report of a run while it trains, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from windlass.observe import steps

PATIENCE = 120  # seconds that the end of a run waits for its report


class BackgroundReport:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.command = [sys.executable, "-m", "windlass.observe.report", str(folder), "--quiet"]
        self.writing: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """At a save: without waiting, and not while the one before is still at it."""
        if self.writing is None or self.writing.poll() is not None:
            try:
                self.writing = subprocess.Popen(self.command, stdin=subprocess.DEVNULL)
            except OSError as error:
                print(f"the report can't be made: {error}", file=sys.stderr)

    def finish(self) -> None:
        """At the end of the run, whatever ended it: the page that stays. Nothing to show: no page."""
        if not steps.files(self.folder):
            return
        try:
            if self.writing is not None:
                self.writing.wait(PATIENCE)
            subprocess.run(self.command, stdin=subprocess.DEVNULL, timeout=PATIENCE, check=True)
        except (subprocess.SubprocessError, OSError) as error:
            print(f"the report of the run's end can't be made: {error}", file=sys.stderr)
