"""Start this machine's ranks as processes, signal them, wait for them, and explain why they failed. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from windlass.errors import RANK_USER_INPUT, SAVED, Problem, RunError, UserError
from windlass.ranks.rank import (
    SIGNALS,
    STATUS_DIR,
    SUPERVISED,
    read_node,
    read_rank,
    read_status,
    signal_on_parent_death,
)
from windlass.runfile import Loaded, LoadedScript
from windlass.runfile.machines import GRACE_SECONDS
from windlass.variables import DEFAULTS

PATIENCE_SECONDS: Final = 20.0  # time for the other ranks to end once one has failed
SAME_SECONDS: Final = 1.0  # a signal sent to a process and its group arrives twice and counts once


def start_ranks(
    command: Sequence[str],
    ranks: int,
    environ: Mapping[str, str],
    *,
    grace_seconds: float = GRACE_SECONDS,
    patience_seconds: float = PATIENCE_SECONDS,
) -> int:
    """Run `command` once per rank, forward signals, wait, and report the cause if a rank failed. Returns the exit code.

    grace_seconds: for ranks to save after a signal. patience_seconds: for the others once one has failed.

    These are plain processes because torchrun would turn every exit code into 1, kill ranks 30 s after SIGTERM whether
    they have saved or not, and orphan them on SIGUSR1.
    """
    with tempfile.TemporaryDirectory(prefix="windlass-") as folder, reserve_port() as port:
        status_dir = Path(folder)
        processes: list[subprocess.Popen[bytes]] = []
        starting = (
            start_process(
                command,
                {**variables, STATUS_DIR: str(status_dir)},
                status_dir / f"output-{rank}" if rank else None,
            )
            for rank, variables in enumerate(make_environments(ranks, environ, port))
        )
        first, cut_short = wait_for_ranks(processes, starting, grace_seconds, patience_seconds)
        return _explain_end([to_exit_code(process.returncode) for process in processes], first, cut_short, status_dir)


@contextlib.contextmanager
def reserve_port() -> Iterator[int]:
    """Reserve a port for the ranks' rendezvous, so that the system gives it to no other process.

    It is bound but not listening: with SO_REUSEADDR, rank 0's store, which sets it too, can still take it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("localhost", 0))
        yield int(holder.getsockname()[1])


def make_environments(
    ranks: int, environ: Mapping[str, str], port: int, *, alone: bool = False
) -> list[dict[str, str]]:
    """Return one environment per rank. In an operator's pod, other nodes' ranks are counted, unless `alone`."""
    node, nodes, first = (0, 1, "localhost") if alone else read_node(environ)
    inherited = dict(environ)
    inherited.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    inherited.setdefault("TOKENIZERS_PARALLELISM", "false")  # true makes forked workers deadlock
    shared = {
        "WORLD_SIZE": str(nodes * ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": first,
        "MASTER_PORT": environ.get("PET_MASTER_PORT", "29500") if nodes > 1 else str(port),
        SUPERVISED: "1",
    }
    return [
        {**inherited, **shared, "RANK": str(node * ranks + local), "LOCAL_RANK": str(local)} for local in range(ranks)
    ]


def remove_accelerate_settings(environ: MutableMapping[str, str]) -> None:
    """Remove settings with which Accelerate would shard a model a second time; the run file sets the precision."""
    others = ("USE_FSDP", "MIXED_PRECISION", "DYNAMO_BACKEND", "GRADIENT_ACCUMULATION_STEPS")
    for key in list(environ):
        if key.startswith("FSDP_") or key in (f"ACCELERATE_{name}" for name in others):
            del environ[key]


def set_allocator(environ: MutableMapping[str, str]) -> None:
    """Set the allocator as in submitted jobs, also under torchrun: batches of different shapes fragment memory
    otherwise.

    Call before CUDA starts. A setting of the user's, by either name, is left alone.
    """
    names = [name for name in DEFAULTS if name.endswith("ALLOC_CONF")]
    if not any(name in environ for name in names):
        environ.update({name: DEFAULTS[name] for name in names})


def start_process(
    command: Sequence[str],
    environ: Mapping[str, str],
    output: Path | None = None,
    parent_death_signal: signal.Signals = signal.SIGTERM,
) -> subprocess.Popen[bytes]:
    """Start a rank. Without `output` it shares this terminal; output written to a file is shown only if the rank fails.

    Each rank has a session of its own: Ctrl-C reaches it once, through the signals forwarded below.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(output.open("wb")) if output else None
        return subprocess.Popen(
            list(command),
            env=environ,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            preexec_fn=lambda: signal_on_parent_death(parent_death_signal),
        )


def to_exit_code(code: int) -> int:
    """Return the exit code: a rank that a signal ended without a message had not begun, since `run_rank` handles
    signals."""
    return SAVED if code in (-signal.SIGTERM, -signal.SIGUSR1) else code


def wait_for_ranks(
    processes: list[subprocess.Popen[bytes]],
    starting: Iterable[subprocess.Popen[bytes]],
    grace_seconds: float,
    patience_seconds: float,
    *,
    second_kills: bool = True,
    stop: threading.Event | None = None,
) -> tuple[int | None, str]:
    """Wait until all have ended. Returns the first that failed, if any, and why ranks were ended before they had saved.

    Ranks start in here and are added to `processes`, so that a signal always reaches those that run. If one fails, the
    others get a bounded time. On a signal, they save. A second signal kills them, if `second_kills`: not below a
    launcher, which signals all ranks because one of them has ended. stop: an event that acts like a signal.
    """
    signalled: float | None = None
    cut_short = ""

    def forward(_number: int = signal.SIGTERM, _frame: FrameType | None = None) -> None:
        nonlocal signalled, cut_short
        if signalled is None:
            signalled = time.monotonic()
            signal_all(processes, signal.SIGTERM)
        elif second_kills and time.monotonic() - signalled > SAME_SECONDS:
            cut_short = "a second signal ended the ranks before they had saved"
            signal_all(processes, signal.SIGKILL)

    before = {number: signal.signal(number, forward) for number in SIGNALS}
    first: int | None = None
    deadline: float | None = None
    killed = saving = False
    try:
        for process in starting:
            processes.append(process)
            if signalled is not None:
                signal_all([process], signal.SIGTERM)
        while None in (codes := [process.poll() for process in processes]):
            if stop is not None and stop.is_set() and signalled is None:
                forward()
            first = find_first_failure(codes) if first is None else first
            if deadline is None and (first is not None or signalled is not None):
                saving = signalled is not None
                deadline = time.monotonic() + (grace_seconds if saving else patience_seconds)
            if deadline is not None and time.monotonic() > deadline:
                if saving and (first is None or to_exit_code(codes[first] or 0) == SAVED):
                    cut_short = f"the ranks had not saved {grace_seconds:g} s after the signal"
                signal_all(processes, signal.SIGKILL if killed or saving else signal.SIGTERM)
                killed, deadline = True, time.monotonic() + 5.0
            time.sleep(0.05)
    finally:
        signal_all(processes, signal.SIGKILL)
        for number, handler in before.items():
            signal.signal(number, handler)
    return find_first_failure([process.returncode for process in processes]) if first is None else first, cut_short


def find_first_failure(codes: Sequence[int | None]) -> int | None:
    """Return the first rank that did not end well. One that saved or was killed explains those that lost it."""
    ended = [(code != SAVED, code > 0, rank) for rank, code in enumerate(codes) if code]
    return min(ended)[2] if ended else None


def signal_all(processes: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)


def _explain_end(codes: Sequence[int], first: int | None, cut_short: str, status_dir: Path) -> int:
    """Return the exit code, or raise the root cause of a failure: ranks that only lost their peer fail after it."""
    resume = "resume from the last checkpoint with --resume"
    if first is None:
        return 0
    if cut_short and not set(codes) <= {0, SAVED}:
        hint = f"{resume}; cluster.grace_seconds is the time that ranks get"
        raise RunError(cut_short, "windlass train", hint)
    if codes[first] == SAVED:  # the others have saved too, or lost this one
        if message := read_status(status_dir, f"stopped-{first}"):
            print(message, file=sys.stderr, flush=True)
        return SAVED
    written = ((rank, read_status(status_dir, f"error-{rank}")) for rank in range(len(codes)))
    errors = [{"rank": rank, **json.loads(text)} for rank, text in written if text]
    if of_users := [error for error in errors if "problems" in error]:
        error = min(of_users, key=lambda error: error["time"])
        kind = UserError if error["code"] == RANK_USER_INPUT else RunError
        raise kind.of([Problem(**problem) for problem in error["problems"]])
    if codes[first] < 0:
        doing = read_status(status_dir, f"phase-{first}") or "starting"
        hint = f"a SIGKILL that nobody sent is most often the kernel out of memory (see dmesg); {resume}"
        what = f"rank {first} was killed by {signal.Signals(-codes[first]).name} while {doing}"
        raise RunError(what, "windlass train", hint)
    words = f"rank {first} ended with {codes[first]}:\n{read_status(status_dir, f'output-{first}')[-4000:]}"
    if errors:
        error = min(errors, key=lambda error: error["time"])
        words = f"rank {error['rank']} failed:\n{error['traceback']}"
    print(words, file=sys.stderr, flush=True)
    return 1


# --- the number of nodes and GPUs to start ranks on


def default_overrides(loaded: Loaded | LoadedScript, environ: Mapping[str, str], gpus: int) -> list[str]:
    """Return overrides for what the run file leaves open: from the launcher that started this rank, else this machine's
    GPUs.

    CUDA_VISIBLE_DEVICES limits the GPUs that a process started here may use.
    """
    cluster, layout = loaded.run.cluster, loaded.run.layout
    if cluster.nodes != "auto" or cluster.gpus_per_node != "auto" or layout.ranks is not None:
        return []
    world, local = environ.get("WORLD_SIZE", ""), environ.get("LOCAL_WORLD_SIZE", "")
    if "RANK" in environ and world.isdigit() and local.isdigit() and int(local):
        return [f"cluster.nodes={max(1, int(world) // int(local))}", f"cluster.gpus_per_node={local}"]
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = min(gpus, sum(name.strip() not in ("", "-1") for name in visible.split(",")))
    nodes = 1 if read_rank(environ) else read_node(environ)[1]
    return [f"cluster.nodes={nodes}"] * (nodes > 1) + [f"cluster.gpus_per_node={gpus}"] * (gpus > 1)


def require_all_nodes(planned: int, where: Callable[[str], str], environ: Mapping[str, str]) -> None:
    """Refuse to start on another number of nodes than planned: one of several would wait for the others, and too few
    would train another run."""
    nodes = read_node(environ)[1]
    if planned != nodes:
        problem = f"the run is planned for {planned} node{'s' * (planned != 1)}, and this is {nodes}"
        hint = "add --ranks N to use this machine alone, or start it with `windlass submit RUN`"
        raise UserError(problem, where("cluster.nodes"), hint)
