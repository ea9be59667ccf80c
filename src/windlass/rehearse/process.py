"""One started command: its output in files, a bounded time, and nothing of it left behind. No torch."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from windlass.errors import RANK_USER_INPUT, SAVED, USER_INPUT, RunError

LIMIT_SECONDS = 600.0  # of one command: an hour's rehearsal would be none
GRACE_SECONDS = 20.0  # to end in when the rehearsal itself is stopped
POLL_SECONDS = 0.1
INPUT, WELL = (USER_INPUT, RANK_USER_INPUT), (0, SAVED)
ERROR = "error: "  # how a command begins to say what is wrong
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
    """A command that is running, perhaps on several nodes that this machine plays. It writes NAME.out and NAME.log."""

    name: str
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    deadline: float = field(default_factory=lambda: time.monotonic() + LIMIT_SECONDS)

    @property
    def has_ended(self) -> bool:
        return None not in [process.poll() for process in self.processes]  # each of them is asked

    @property
    def log(self) -> Path:
        """Of the node that says why, where several have ended."""
        codes = [process.poll() for process in self.processes]
        failed = [node for node, code in enumerate(codes) if code]
        told = [node for node in failed if ERROR in self._log(node).read_text(encoding="utf-8", errors="replace")]
        return self._log((told or failed or [0])[0])

    def _log(self, node: int) -> Path:
        return self.folder / f"{named(self.name, node, len(self.processes))}.log"

    def until(self, done: Callable[[], bool], tick: Callable[[], None]) -> bool:
        """Wait until something is there; False when the command ended before it came."""
        while not done():
            if self.has_ended:
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
        """Wait for all nodes. Wrong input is the cause where one says so, else any failure."""
        self.until(lambda: self.has_ended, tick)
        out = self.folder / f"{named(self.name, 0, len(self.processes))}.out"
        codes = [process.returncode for process in self.processes]
        code = min(codes, key=lambda code: (code not in INPUT, code in WELL, code == 0))
        return Ended(code, out.read_text(encoding="utf-8", errors="replace"), self.log)


def named(name: str, node: int, nodes: int) -> str:
    return name if nodes == 1 else f"{name}-node{node}"


@contextlib.contextmanager
def started(
    name: str,
    command: Sequence[str],
    folder: Path,
    environ: Mapping[str, str],
    nodes: Sequence[Mapping[str, str]] = ({},),
) -> Iterator[Running]:
    """Run a command; whatever happens to the rehearsal, it has ended afterwards. `nodes`: variables of each."""
    running = Running(name, folder)
    try:
        for node, variables in enumerate(nodes):
            output = named(name, node, len(nodes))
            with (folder / f"{output}.out").open("wb") as out, (folder / f"{output}.log").open("wb") as log:
                process = subprocess.Popen(
                    list(command),
                    env={**environ, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=log,
                    start_new_session=True,
                )
            running.processes.append(process)
        yield running
    finally:
        end([process for process in running.processes if process.poll() is None])


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ranks have sessions of their own: whoever started them is asked first, and forwards it."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def places(nodes: int) -> list[dict[str, str]]:
    """What a platform tells each of so many nodes, all of them played by this machine."""
    port = free_ports()
    told = {"PET_NNODES": str(nodes), "PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": str(port)}
    return [{**told, "PET_NODE_RANK": str(node)} for node in range(nodes)]


def free_ports() -> int:
    """A port that is free, and the one above it, where nodes meet."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("localhost", 0))
            port = int(first.getsockname()[1])
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("localhost", port + 1))
                return port


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
