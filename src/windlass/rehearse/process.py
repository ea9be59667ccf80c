"""Run one command of the rehearsal, with output in files and a time limit, and leave nothing running afterwards."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from windlass.errors import RANK_USER_INPUT, SAVED, USER_INPUT
from windlass.ranks.place import LAUNCHERS
from windlass.rehearse.record import Failed

LIMIT_SECONDS = 600.0  # limit of one command: nobody waits an hour for a rehearsal
GRACE_SECONDS = 20.0  # time to end when the rehearsal itself is stopped
POLL_SECONDS = 0.1
ERROR = "error: "  # prefix of a command's error message
LAST_LINES = 40  # of a log, if a failed command printed no error
# Variables that give a process its place among others, and those that only GPUs need.
DROPPED = (*LAUNCHERS, "WINDLASS_", "NCCL_")


class RunningCommand:
    """A running command, one process per node that this machine plays (`nodes`: variables of each).

    Writes NAME.out and NAME.log.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        environ: Mapping[str, str],
        nodes: Sequence[Mapping[str, str]] = ({},),
        tick: Callable[[], None] = lambda: None,
        limit_seconds: float = LIMIT_SECONDS,
    ) -> None:
        self.name = name
        self.tick = tick
        self.limit_seconds = limit_seconds
        self.deadline = time.monotonic() + limit_seconds
        self.processes = list[subprocess.Popen[bytes]]()
        self.files = list[Path]()
        for node, variables in enumerate(nodes):
            path = folder / (name if len(nodes) == 1 else f"{name}-node{node}")
            self.files.append(path)
            with path.with_suffix(".out").open("wb") as out, path.with_suffix(".log").open("wb") as log:
                environment = {**environ, **variables}
                options: Any = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": log, "start_new_session": True}
                self.processes.append(subprocess.Popen(list(command), env=environment, **options))

    @property
    def has_ended(self) -> bool:
        return None not in [process.poll() for process in self.processes]  # poll every one of them

    @property
    def code(self) -> int:
        """Return the exit code over all nodes: wrong input if any reports it, else any failure."""
        inputs = (USER_INPUT, RANK_USER_INPUT)
        fine = (0, SAVED)
        codes = [process.returncode for process in self.processes]
        return min(codes, key=lambda code: (code not in inputs, code in fine, code == 0))

    @property
    def out(self) -> str:
        return self.files[0].with_suffix(".out").read_text(encoding="utf-8", errors="replace")

    @property
    def log(self) -> Path:
        """Return the log of the node that explains the failure, if several have ended."""
        logs = [path.with_suffix(".log") for path in self.files]
        failed = [log for log, process in zip(logs, self.processes, strict=True) if process.poll()]
        explained = [log for log in failed if ERROR in log.read_text(encoding="utf-8", errors="replace")]
        return (explained or failed or logs)[0]

    def wait_until(self, done: Callable[[], bool]) -> bool:
        """Wait for a condition; return False if the command ended before."""
        while not done():
            if self.has_ended:
                return done()
            if time.monotonic() > self.deadline:
                raise Failed(f"{self.name} has not ended within {self.limit_seconds:.0f} s", 1, self.log)
            self.tick()
            time.sleep(POLL_SECONDS)
        return True

    def finish(self, *codes: int) -> Self:
        """Wait for all nodes. Any other exit code than these (0) raises `Failed`, with the command's own words."""
        self.wait_until(lambda: self.has_ended)
        if self.code not in (codes or (0,)):
            # From the first `error:` on, else the last lines.
            lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            first = next((i for i, line in enumerate(lines) if line.startswith(ERROR)), -LAST_LINES)
            reason = "\n".join(lines[first:]) or f"it ended with {self.code} and printed nothing"
            raise Failed(reason, self.code, self.log)
        return self

    def stop(self) -> None:
        """End what still runs. Ranks have their own sessions, so their parents are signalled first and forward it."""
        running = [process for process in self.processes if process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def node_variables(nodes: int) -> list[dict[str, str]]:
    """Return the variables that a platform sets on each node; this machine plays all of them."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("localhost", 0))
            port = int(first.getsockname()[1])
            with contextlib.suppress(OSError, OverflowError):  # nodes rendezvous on the port above it
                second.bind(("localhost", port + 1))
                break
    shared = {"PET_NNODES": str(nodes), "PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": str(port)}
    return [{**shared, "PET_NODE_RANK": str(node)} for node in range(nodes)]


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """On SIGTERM, end what was started, as with Ctrl-C: a cancelled job leaves nothing running."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def make_environment(environ: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """Return an environment for this machine's CPU, without network and without a launcher's variables."""
    return {
        **{key: value for key, value in environ.items() if not key.startswith(DROPPED)},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{environ.get('PATH', os.defpath)}",
        "TMPDIR": str(scratch),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
        "COLUMNS": "120",
    }
