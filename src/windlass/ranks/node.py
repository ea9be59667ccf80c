"""This node of a job: it joins the others, checks, starts its ranks, and tells the others how it ended. No torch."""

import contextlib
import json
import os
import pwd
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from windlass.errors import FAILED, RANK_USER_INPUT, SAVED, USER_INPUT, RunError, UserError
from windlass.files import write_atomic
from windlass.hardware import GIB, read_gpus, read_text
from windlass.ranks.place import Node, read_node
from windlass.ranks.rank import STATUS_DIR, ignore_signals
from windlass.ranks.rendezvous import LEAVING, LOST, READY, STOPPED_EARLY, Rendezvous, RendezvousError
from windlass.run_folder import read_versions

POLL_SECONDS: Final = 0.1
TELL_SECONDS: Final = 60.0  # for node 0 to start, to which a node that can't start tells why
CHECK_SECONDS: Final = 30.0  # for a check to end whose node is lost: that node's check may have told this one's
LIBRARIES: Final = ("torch", "transformers", "peft", "accelerate", "datasets")


class OtherNodes:
    """The job's other nodes, through a process next to the ranks that keeps the connections."""

    def __init__(self, status_dir: Path) -> None:
        self.status_dir = status_dir
        self.process: subprocess.Popen[bytes] | None = None

    def join(self, node: Node, fingerprint: str, seconds: float) -> None:
        """Wait for all nodes. Exits if they can't start together; the process has reported why."""
        words = (node.number, node.count, node.host, node.port + 1, seconds, fingerprint, self.status_dir)
        self.process = subprocess.Popen([sys.executable, "-m", "windlass.ranks.rendezvous", *map(str, words)])
        while not (self.status_dir / READY).exists():
            code = self.process.poll()
            if code is not None:
                self.process = None
                # A signal to the whole group may reach it before this process.
                sys.exit(SAVED if code == -signal.SIGTERM else code or FAILED)
            time.sleep(POLL_SECONDS)

    @property
    def lost_code(self) -> int | None:
        """Return the exit code of the first node that was lost; None while all are there."""
        path = self.status_dir / LOST
        return int(path.read_text()) if path.exists() else None

    def leave(self, code: int) -> None:
        if self.process is not None:
            write_atomic(self.status_dir / LEAVING, str(code))
            self.process.terminate()  # it may still be joining
            self.process.wait()


def run_node(
    node: Node,
    run_ranks: Callable[[Path], int],
    environ: Mapping[str, str],
    print_error: Callable[[UserError], None],
    *,
    fingerprint: str,
    wait_seconds: float,
    check: Sequence[str],
) -> int:
    """Join the other nodes, check, run this node's ranks and tell the others how it ended. Returns the exit code.
    run_ranks: starts them, given the status directory, and waits. fingerprint: of run file and options, the same on
    every node. wait_seconds: for all nodes to start. check: the command that checks all nodes at once; empty for
    none."""
    with tempfile.TemporaryDirectory(prefix="windlass-") as folder:  # of this node and this try alone
        status_dir = Path(folder)
        others = OtherNodes(status_dir)
        have_begun = False
        code = FAILED
        try:
            if node.count > 1:
                others.join(node, fingerprint, wait_seconds)
            if check:
                place = {"PET_NODE_RANK": str(node.number), "PET_NNODES": str(node.count)}
                place |= {"PET_MASTER_ADDR": node.host, "PET_MASTER_PORT": str(node.port)}
                check_nodes(check, {**environ, **place}, others)
            have_begun = True
            code = run_ranks(status_dir)
        except UserError as error:
            print_error(error)
            code = to_node_code(error)
            problems = [problem.as_dict() for problem in error.problems]
            # For the other nodes, unless a rank has left its own before.
            write_atomic(status_dir / "error-node", json.dumps({"problems": problems, "time": time.monotonic()}))
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else FAILED
        finally:
            ignore_signals()
            if have_begun and code not in (0, RANK_USER_INPUT) and others.lost_code is not None:
                # Wrong input on one node is wrong on all; ranks that saved without the lost one have not all saved.
                code = RANK_USER_INPUT if others.lost_code == RANK_USER_INPUT else FAILED
            # Before there were ranks that agree with the others', 75 would tell them that theirs have saved too.
            others.leave(STOPPED_EARLY if code == SAVED and not have_begun else code)
    return code


def end_node(node: Node, code: int, *, scheduled: bool) -> int:
    """Report how this node ended and return its exit code. Wrong input is 13 to a scheduler, which then doesn't retry,
    and 2 to a person."""
    if code == RANK_USER_INPUT and not scheduled:
        code = USER_INPUT
    if code:
        print(f"windlass: node {node.number} ({socket.gethostname()}): ended with {code}", file=sys.stderr, flush=True)
    return code


def to_node_code(error: UserError) -> int:
    return FAILED if isinstance(error, RunError) else RANK_USER_INPUT


def check_nodes(check: Sequence[str], environ: Mapping[str, str], others: OtherNodes) -> None:
    """Run `windlass check` on all nodes at once, before anything is loaded. Exits if it fails."""
    process = subprocess.Popen(check, env={**environ, STATUS_DIR: str(others.status_dir)})
    lost_at: float | None = None
    try:
        while process.poll() is None:
            if lost_at is None and others.lost_code is not None:
                lost_at = time.monotonic()
            if lost_at is not None and time.monotonic() > lost_at + CHECK_SECONDS:  # a lost node joins no check
                process.terminate()
            time.sleep(POLL_SECONDS)
    finally:
        process.terminate()
    if process.returncode:
        # After a lost node, a traceback or a kill for memory a retry may succeed.
        is_input = RANK_USER_INPUT in (process.returncode, others.lost_code)
        sys.exit(RANK_USER_INPUT if is_input else FAILED)


def tell_other_nodes(node: Node, problem: str, code: int, seconds: float = TELL_SECONDS) -> None:
    """Tell node 0, and through it all others, why this node can't start: they would wait for it without a word."""
    if node.count > 1:
        rendezvous = Rendezvous(replace(node, port=node.port + 1), problem=(problem, code))
        with contextlib.suppress(RendezvousError):
            rendezvous.join(min(seconds, TELL_SECONDS))


def print_log_head(node: Node, title: str, run: Path) -> None:
    """Print what one needs to know when something went wrong."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = "no name"
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    memory = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked >> 10} kB"
    shm = f"{shutil.disk_usage('/dev/shm').total / GIB:.1f} GiB" if Path("/dev/shm").is_dir() else "none"
    lines = [
        f"--- {title}",
        f"date     {time.strftime('%Y-%m-%d %H:%M:%S %z')}",
        f"host     {socket.gethostname()}, node {node.number} of {node.count}",
        f"master   {node.host}:{node.port}",
        f"user     {os.getuid()}:{os.getgid()} ({user}), locked memory {memory}, open files {files}",
        f"shm      {shm}",
        f"run      {run}",
        f"versions {' '.join(f'{name} {version}' for name, version in read_versions(LIBRARIES).items())}",
    ]
    gpus = read_gpus()
    for gpu in gpus.gpus:
        # Without NVLink, GPUs of a node communicate over PCIe; without InfiniBand, nodes communicate over TCP.
        links = f"{gpu.nvlinks_up or 0} NVLinks up, driver {gpus.driver}"
        lines.append(f"gpu {gpu.index}    {gpu.name}, {gpu.memory_gib:.1f} GiB, {links}")
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        state = read_text(port / "state").strip()
        lines.append(f"fabric   {port.parent.parent.name} port {port.name}: {state} {read_text(port / 'rate').strip()}")
    print("\n".join(lines), flush=True)


def require_gpus(count: int) -> None:
    """Refuse to start ranks for which there are no GPUs."""
    gpus = read_gpus(health=False)
    if len(gpus.gpus) < count:
        why = f" ({gpus.error})" if gpus.error else ""
        hint = "see `windlass check RUN --here`; cluster.gpus_per_node is what the run needs"
        what = f"{count} GPUs are needed; this node has {len(gpus.gpus)}{why}"
        raise RunError(what, "windlass train", hint, "too-few-gpus")


def main() -> int:
    """Tell the other nodes why launch.sh can't start this one: NODES CODE TEXT."""
    nodes, code, problem = sys.argv[1:]
    with contextlib.suppress(UserError):
        tell_other_nodes(read_node(os.environ, int(nodes)), problem, int(code))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
