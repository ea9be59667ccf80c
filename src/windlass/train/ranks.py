"""The ranks of this machine, as whoever starts them sees it: begun, signalled, waited for, their end told. No torch."""

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
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

from windlass.errors import RANK_USER_INPUT, SAVED, Problem, RunError, UserError
from windlass.runfile.machines import GRACE_SECONDS
from windlass.train.rank import NOTES_FOLDER, PARENT_SPEAKS, SIGNALS, end_with_parent, noted

PATIENCE_SECONDS: Final = 20.0  # what the other ranks get once one has failed
SAME_SECONDS: Final = 1.0  # a signal sent to a process and to its group comes twice, and is one


def start(
    command: Sequence[str],
    ranks: int,
    environ: Mapping[str, str],
    *,
    grace_seconds: float = GRACE_SECONDS,
    patience_seconds: float = PATIENCE_SECONDS,
) -> int:
    """Run `command` once per rank, forward signals, wait, and say why it ended if it failed. Returns the exit code.

    grace_seconds: what ranks get to save in after a signal. patience_seconds: what the others get once one failed.

    Plain processes rather than torchrun: it would turn every exit code into 1, kill the ranks 30 s after SIGTERM
    whether they have saved or not, and leave them orphaned on SIGUSR1.
    """
    with tempfile.TemporaryDirectory(prefix="windlass-") as folder:
        notes = Path(folder)
        processes: list[subprocess.Popen[bytes]] = []
        beginning = (
            begin(command, {**variables, NOTES_FOLDER: str(notes)}, notes / f"output-{rank}" if rank else None)
            for rank, variables in enumerate(environments(ranks, without_accelerate(dict(environ))))
        )
        first, cut_short = wait(processes, beginning, grace_seconds, patience_seconds)
        return _verdict([_code(process.returncode) for process in processes], first, cut_short, notes)


def environments(ranks: int, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """One environment per rank. In an operator's pod the other nodes' ranks are counted in."""
    nodes = int(environ.get("PET_NNODES", "1"))
    node = int(environ.get("PET_NODE_RANK", environ.get("RANK", "0"))) if nodes > 1 else 0
    inherited = dict(environ)
    inherited.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    inherited.setdefault("TOKENIZERS_PARALLELISM", "false")  # true would make forked workers wait for ever
    shared = {
        "WORLD_SIZE": str(nodes * ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": environ.get("PET_MASTER_ADDR", "localhost") if nodes > 1 else "localhost",
        "MASTER_PORT": environ.get("PET_MASTER_PORT", "29500") if nodes > 1 else str(_free_port()),
        PARENT_SPEAKS: "windlass",
    }
    return [
        {**inherited, **shared, "RANK": str(node * ranks + local), "LOCAL_RANK": str(local)} for local in range(ranks)
    ]


def without_accelerate(environ: dict[str, str]) -> dict[str, str]:
    """Without the settings by which Accelerate and the Trainer would shard the model a second time."""
    return {key: value for key, value in environ.items() if not _accelerates(key)}


def clear_accelerate(environ: MutableMapping[str, str]) -> dict[str, str]:
    """Take those settings out of this process's environment and return them."""
    return {key: environ.pop(key) for key in list(environ) if _accelerates(key)}


def _accelerates(key: str) -> bool:
    return key.startswith("FSDP_") or key in (
        "ACCELERATE_USE_FSDP",
        "ACCELERATE_MIXED_PRECISION",  # the run file's bf16 and fp16 decide
        "ACCELERATE_DYNAMO_BACKEND",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def begin(
    command: Sequence[str],
    environ: Mapping[str, str],
    output: Path | None = None,
    farewell: signal.Signals = signal.SIGTERM,
) -> subprocess.Popen[bytes]:
    """Without `output` a rank shares this terminal; what it writes to a file is read only when it fails.

    Each in a session of its own: a Ctrl-C reaches it once, through the signals forwarded below.
    farewell: what it gets should this process be killed.
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
            preexec_fn=lambda: end_with_parent(farewell),
        )


def _code(code: int) -> int:
    """A rank that a signal ended without a word had not begun: from `inside` on it answers them itself."""
    return SAVED if code in (-signal.SIGTERM, -signal.SIGUSR1) else code


def wait(
    processes: list[subprocess.Popen[bytes]],
    beginning: Iterable[subprocess.Popen[bytes]],
    grace_seconds: float,
    patience_seconds: float,
    *,
    hurries: bool = True,
    stop: threading.Event | None = None,
) -> tuple[int | None, str]:
    """Until all have ended; returns the first that failed, if any, and why ranks that were saving had to be ended.

    Ranks begin in here, `processes` filled with them, so that no signal finds some begun and nobody to pass it on.
    One failed: the others get a bounded time. A signal: they save. A second signal: at once, if it
    `hurries`. Below a launcher it is nobody's wish: that one signals all because one of them has ended.
    stop: asked for by another thread, it is the same as a signal.
    """
    forward = _Forward(processes, hurries)
    before = {number: signal.signal(number, forward) for number in SIGNALS}
    first: int | None = None
    deadline: float | None = None
    asked = saving = False
    try:
        for process in beginning:
            processes.append(process)
            if forward.at is not None:
                signal_all([process], signal.SIGTERM)
        while None in (codes := [process.poll() for process in processes]):
            if stop is not None and stop.is_set() and forward.at is None:
                forward()
            if first is None:
                first = _first(codes)
            if deadline is None and (first is not None or forward.at is not None):
                saving = forward.at is not None
                deadline = time.monotonic() + (grace_seconds if saving else patience_seconds)
            if deadline is not None and time.monotonic() > deadline:
                if saving and (first is None or _code(codes[first] or 0) == SAVED):
                    forward.cut_short = f"the ranks had not saved {grace_seconds:g} s after the signal"
                signal_all(processes, signal.SIGKILL if asked or saving else signal.SIGTERM)
                asked, deadline = True, time.monotonic() + 5.0
            time.sleep(0.05)
    finally:
        signal_all(processes, signal.SIGKILL)
        for number, handler in before.items():
            signal.signal(number, handler)
    return _first([process.returncode for process in processes]) if first is None else first, forward.cut_short


class _Forward:
    """A stop signal on its way to the ranks: as SIGTERM, and another one, if it hurries, as SIGKILL."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], hurries: bool) -> None:
        self.processes, self.hurries = processes, hurries
        self.at: float | None = None  # when the first one came
        self.cut_short = ""

    def __call__(self, _number: int = signal.SIGTERM, _frame: FrameType | None = None) -> None:
        if self.at is None:
            self.at = time.monotonic()
            signal_all(self.processes, signal.SIGTERM)
        elif self.hurries and time.monotonic() - self.at > SAME_SECONDS:
            self.cut_short = "a second signal ended the ranks before they had saved"
            signal_all(self.processes, signal.SIGKILL)


def _first(codes: Sequence[int | None]) -> int | None:
    """The first rank that ended otherwise than well. One that a signal reached explains those that lost it."""
    ended = [rank for rank, code in enumerate(codes) if code]
    return min(ended, key=lambda rank: (codes[rank] != SAVED, rank), default=None)


def signal_all(processes: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)


def _verdict(codes: Sequence[int], first: int | None, cut_short: str, notes: Path) -> int:
    """The exit code; for a failure its root. Ranks that only lost their peer come later than the one that it was."""
    if first is None:
        return 0
    if cut_short and not set(codes) <= {0, SAVED}:
        hint = "resume from the last checkpoint with --resume; cluster.grace_seconds is the time that ranks get"
        raise RunError(cut_short, "windlass train", hint)
    if codes[first] == SAVED:  # the others saved too, or only lost this one
        if said := noted(notes, f"stopped-{first}"):
            print(said, file=sys.stderr, flush=True)
        return SAVED
    errors = {rank: error for rank in range(len(codes)) if (error := _read(notes, f"error-{rank}"))}
    stated = {rank: error for rank, error in errors.items() if "problems" in error}
    if stated:
        error = stated[min(stated, key=lambda rank: (stated[rank]["time"], rank))]
        kind = UserError if error["code"] == RANK_USER_INPUT else RunError
        raise kind.of([Problem(**problem) for problem in error["problems"]])
    if codes[first] < 0:
        raise RunError(
            f"rank {first} was killed by {signal.Signals(-codes[first]).name}"
            f" while {noted(notes, f'phase-{first}') or 'starting'}",
            "windlass train",
            "a SIGKILL that nobody sent is most often the kernel out of memory (see dmesg); "
            "resume from the last checkpoint with --resume",
        )
    if errors:
        rank = min(errors, key=lambda rank: (errors[rank]["time"], rank))
        print(f"rank {rank} failed:\n{errors[rank]['traceback']}", file=sys.stderr, flush=True)
        return 1
    output = noted(notes, f"output-{first}")[-4000:]
    print(f"rank {first} ended with {codes[first]}:\n{output}", file=sys.stderr, flush=True)
    return 1


def _read(notes: Path, name: str) -> dict[str, Any]:
    text = noted(notes, name)
    return json.loads(text) if text else {}
