"""What launch.sh tells `windlass train` about the job that it is part of, and its log as JSON."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Final

from windlass.ranks.rank import ignore_signals

JOB: Final = "WINDLASS_JOB"  # its name
NODES: Final = "WINDLASS_NODES"
RANKS_PER_NODE: Final = "WINDLASS_RANKS_PER_NODE"
GRACE: Final = "WINDLASS_GRACE_SECONDS"
CHECK: Final = "WINDLASS_CHECK"  # `no`: no `windlass check` before the ranks start
LOG_FORMAT: Final = "WINDLASS_LOG_FORMAT"
WAIT: Final = "WINDLASS_WAIT_SECONDS"  # for all nodes to start
USUAL_WAIT_SECONDS: Final = 300.0  # names resolve only once pods are ready, and image pulls differ by minutes
LAST_LINES_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class LaunchedJob:
    """A job whose nodes launch.sh starts, one process each."""

    name: str
    nodes: int
    ranks_per_node: int
    grace_seconds: float
    check: bool
    json_log: bool


def take_job(environ: MutableMapping[str, str]) -> LaunchedJob | None:
    """Return the job that launch.sh describes, and remove its variables: what this process starts is no node."""
    if JOB not in environ:
        return None
    return LaunchedJob(
        name=environ.pop(JOB),
        nodes=int(environ.pop(NODES)),
        ranks_per_node=int(environ.pop(RANKS_PER_NODE)),
        grace_seconds=float(environ.pop(GRACE)),
        check=environ.pop(CHECK, "yes") != "no",
        json_log=environ.pop(LOG_FORMAT, "text") == "json",
    )


@contextlib.contextmanager
def log_as_json(name: str, node: int) -> Iterator[None]:
    """Write each line of this process and of all that it starts as a JSON object with time, run, node and host."""
    command = [sys.executable, "-m", "windlass.ranks.job", name, str(node)]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert writer.stdin is not None
    streams = {stream: os.dup(stream) for stream in (1, 2)}
    for stream in streams:
        os.dup2(writer.stdin.fileno(), stream)
    writer.stdin.close()
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, terminal in streams.items():
            os.dup2(terminal, stream)
            os.close(terminal)
        # Wait for the last lines, but not for a process that was left behind.
        with contextlib.suppress(subprocess.TimeoutExpired):
            writer.wait(LAST_LINES_SECONDS)


def main() -> None:
    ignore_signals()  # it ends with its last writer
    name, node = sys.argv[1:]
    for line in sys.stdin.buffer:
        head = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "run": name, "node": int(node)}
        message = {"host": socket.gethostname(), "message": line.decode(errors="replace").rstrip()}
        sys.stdout.write(json.dumps(head | message) + "\n")
        sys.stdout.flush()  # at once: nodes share a log


if __name__ == "__main__":
    main()
