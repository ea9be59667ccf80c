"""One started command: its output in files, a bounded time, and nothing of it left behind. No torch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from windlass.errors import RunError

LIMIT_SECONDS = 600.0  # of one command: an hour's rehearsal would be none
GRACE_SECONDS = 20.0  # to end in when the rehearsal itself is stopped
POLL_SECONDS = 0.1
# Variables by which a platform tells a process its place among others, and what only GPUs need.
PLACES = ("PET_", "SLURM_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "JOB_COMPLETION_INDEX", "WINDLASS_", "NCCL_")


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    log: Path


@dataclass(slots=True)
class Running:
    """A command that is running. Its stdout goes to NAME.out, its stderr to NAME.log."""

    process: subprocess.Popen[bytes]
    name: str
    folder: Path
    deadline: float

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def until(self, done: Callable[[], bool], tick: Callable[[], None]) -> bool:
        """Wait until something is there; False when the command ended before it came."""
        while not done():
            if self.process.poll() is not None:
                return done()
            if time.monotonic() > self.deadline:
                raise RunError(
                    f"{self.name} has not ended within {LIMIT_SECONDS:.0f} s",
                    str(self.log),
                    "its log says how far it came; is the machine very busy?",
                )
            tick()
            time.sleep(POLL_SECONDS)
        return True

    def ended(self, tick: Callable[[], None]) -> Ended:
        self.until(lambda: self.process.poll() is not None, tick)
        out = (self.folder / f"{self.name}.out").read_text(encoding="utf-8", errors="replace")
        return Ended(self.process.returncode, out, self.log)


@contextlib.contextmanager
def started(name: str, command: Sequence[str], folder: Path, environ: Mapping[str, str]) -> Iterator[Running]:
    """Run a command; whatever happens to the rehearsal, it has ended afterwards."""
    with (folder / f"{name}.out").open("wb") as out, (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            list(command),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield Running(process, name, folder, time.monotonic() + LIMIT_SECONDS)
    finally:
        if process.poll() is None:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ranks have sessions of their own: whoever started them is asked first, and forwards it."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """A job that is cancelled ends what it started, as with Ctrl-C."""

    def leave(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def windlass(*arguments: str) -> list[str]:
    """A command as a user would type it, with this Python."""
    return [sys.executable, "-m", "windlass", *arguments]


def environment(environ: Mapping[str, str], ranks: int, scratch: Path) -> dict[str, str]:
    """This machine's CPU, no network, and no other's word on where this process stands among others."""
    kept = {key: value for key, value in environ.items() if not key.startswith(PLACES)}
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    return {
        "OMP_NUM_THREADS": str(threads),
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{environ.get('PATH', os.defpath)}",
        "TMPDIR": str(scratch),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
        "COLUMNS": "120",
    }
