"""The ranks of this machine: started, signalled, waited for, and their end told in one message. No torch here."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from windlass.errors import RANK_USER_INPUT, SAVED, Problem, RunError, UserError

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAME_SECONDS = 1.0  # a signal sent to a process and to its group comes twice, and is one
DESK = "WINDLASS_DESK"  # a folder of this machine where ranks leave word: exit code, error, what they are doing
TELLER = "WINDLASS_TELLER"  # set: whoever started the ranks reads the desk and tells, so they print no errors


@dataclass(frozen=True, slots=True)
class Place:
    """This process among the ranks."""

    rank: int = 0
    local_rank: int = 0
    world: int = 1
    desk: Path | None = None
    tells: bool = True  # this rank prints its own errors

    def note(self, name: str, text: str) -> None:
        """Leave word, whole or not at all."""
        if self.desk is not None:
            with contextlib.suppress(OSError):  # word of a failure must not become a failure
                part = self.desk / f".{name}-{self.rank}"
                part.write_text(text)
                part.replace(self.desk / f"{name}-{self.rank}")

    def phase(self, name: str) -> None:
        """What this rank is doing, for the message should it be killed."""
        self.note("phase", name)


def place(environ: Mapping[str, str]) -> Place | None:
    """Where torchrun, `accelerate launch`, a job's operator or `start` put this process; None: nobody started ranks."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    world, local = int(environ["WORLD_SIZE"]), environ.get("LOCAL_RANK")
    per_node = int(environ.get("PET_NPROC_PER_NODE", "1") if environ.get("PET_NPROC_PER_NODE", "1").isdigit() else 1)
    if local is None and per_node > 1:
        return None  # an operator's pod: RANK is the pod's number, its ranks are still to be started
    desk = Path(environ[DESK]) if DESK in environ else None
    return Place(int(environ["RANK"]), int(local or 0), world, desk, tells=TELLER not in environ)


class Interruption:
    """SIGTERM and SIGUSR1 in a rank. While it trains, asked for at the end of a step; else there is nothing to save."""

    def __init__(self) -> None:
        self.at: float | None = None
        self.training = False
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._received)

    def __call__(self) -> bool:
        return self.at is not None

    def _received(self, number: int, _frame: FrameType | None) -> None:
        if self.at is not None and time.monotonic() - self.at > SAME_SECONDS:
            os._exit(128 + number)  # not SAVED: nobody knows what is
        self.at = self.at or time.monotonic()
        if not self.training:
            sys.exit(SAVED)


def inside(here: Place, work: Callable[[], int], *, say: Callable[[UserError], None]) -> int:
    """Run one rank's work and turn its end into an exit code, told to whoever started it or printed.

    The code is also left on the desk: torchrun and `accelerate launch` turn every one of them into 1.
    """
    here.note("pid", str(os.getpid()))  # for signals: a launcher's own processes do not pass all of them on
    if not here.tells:
        _outlive_nobody()
    try:
        for number in (signal.SIGTERM, signal.SIGUSR1):  # nothing is held yet; `Interruption` takes them over
            signal.signal(number, _nothing_to_save)
        code = work()
    except UserError as error:
        code = 1 if isinstance(error, RunError) else RANK_USER_INPUT
        problems = [problem.as_dict() for problem in error.problems]
        here.note("error", json.dumps({"problems": problems, "code": code, "time": time.monotonic()}))
        if here.tells and (here.local_rank == 0 or code == 1):  # each node has its own log
            say(error)
    except SystemExit as leaving:  # a signal while there was nothing to save
        code = leaving.code if isinstance(leaving.code, int) else 1
    except Exception:
        code = 1
        trace = traceback.format_exc()
        here.note("error", json.dumps({"traceback": trace, "time": time.monotonic()}))
        if here.tells:
            print(f"rank {here.rank} failed:\n{trace}", file=sys.stderr, flush=True)
    here.note("code", str(code))
    return code


def await_others(here: Place, local_ranks: int, seconds: float) -> None:
    """Until the other ranks of this machine have ended too, where this one saved first.

    A launcher takes every end but 0 for a failure: it signals the other ranks, and kills them 30 s later. (torch's
    elastic/multiprocessing/api.py closes them with its default, whatever PET_SHUTDOWN_TIMEOUT says.)
    """
    if here.desk is None:
        return
    for number in SIGNALS:  # what they ask for is done
        signal.signal(number, signal.SIG_IGN)
    first, until = here.rank - here.local_rank, time.monotonic() + seconds
    while any(_at_work(here.desk, rank) for rank in range(first, first + local_ranks)) and time.monotonic() < until:
        time.sleep(0.05)


def _at_work(desk: Path, rank: int) -> bool:
    """It has left no code, and was not killed either."""
    if (desk / f"code-{rank}").exists():
        return False
    if pid := _text(desk, f"pid-{rank}"):
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return False
    return True


def _outlive_nobody(farewell: signal.Signals = signal.SIGTERM) -> None:
    """Should whoever started this rank be killed: save and end, rather than go on with nobody to stop it."""
    pr_set_pdeathsig = 1  # linux/prctl.h
    with contextlib.suppress(OSError, AttributeError):  # not Linux: only a convenience is lost
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, farewell)


def _nothing_to_save(_number: int, _frame: FrameType | None) -> None:
    sys.exit(SAVED)


def start(
    command: Sequence[str],
    ranks: int,
    environ: Mapping[str, str],
    *,
    grace_seconds: float = 120.0,
    patience_seconds: float = 20.0,
) -> int:
    """Run `command` once per rank, forward signals, wait, and say why it ended if it failed. Returns the exit code.

    grace_seconds: what ranks get to save in after a signal. patience_seconds: what the others get once one failed.

    Plain processes rather than torchrun: it would turn every exit code into 1, kill the ranks 30 s after SIGTERM
    whether they have saved or not, and leave them orphaned on SIGUSR1.
    """
    with tempfile.TemporaryDirectory(prefix="windlass-") as folder:
        desk = Path(folder)
        crew: list[subprocess.Popen[bytes]] = []
        beginning = (
            begin(command, {**variables, DESK: str(desk)}, desk / f"output-{rank}" if rank else None)
            for rank, variables in enumerate(environments(ranks, without_accelerate(dict(environ))))
        )
        first, cut_short = wait(crew, beginning, grace_seconds, patience_seconds)
        return _verdict([_code(process.returncode) for process in crew], first, cut_short, desk)


def environments(ranks: int, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """One environment per rank. In an operator's pod the other nodes' ranks are counted in."""
    nodes = int(environ.get("PET_NNODES", "1"))
    node = int(environ.get("PET_NODE_RANK", environ.get("RANK", "0"))) if nodes > 1 else 0
    inherited = dict(environ)
    inherited.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    inherited.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads deadlock after a fork
    shared = {
        "WORLD_SIZE": str(nodes * ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": environ.get("PET_MASTER_ADDR", "localhost") if nodes > 1 else "localhost",
        "MASTER_PORT": environ.get("PET_MASTER_PORT", "29500") if nodes > 1 else str(_free_port()),
        TELLER: "windlass",
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
            preexec_fn=lambda: _outlive_nobody(farewell),
        )


def _code(code: int) -> int:
    """A rank that a signal ended without a word had not begun: from `inside` on it answers them itself."""
    return SAVED if code in (-signal.SIGTERM, -signal.SIGUSR1) else code


def wait(
    crew: list[subprocess.Popen[bytes]],
    beginning: Iterable[subprocess.Popen[bytes]],
    grace_seconds: float,
    patience_seconds: float,
    *,
    hurries: bool = True,
    stop: threading.Event | None = None,
) -> tuple[int | None, str]:
    """Until all have ended; returns the first that failed, if any, and why ranks that were saving had to be ended.

    Ranks begin in here, `crew` filled with them, so that no signal finds some begun and nobody to pass it on.
    One failed: the others get a bounded time. A signal: they save. A second signal: at once, if it
    `hurries`. Below a launcher it is nobody's wish: that one signals all because one of them has ended.
    stop: asked for by another thread, it is the same as a signal.
    """
    forward = _Forward(crew, hurries)
    before = {number: signal.signal(number, forward) for number in SIGNALS}
    first: int | None = None
    deadline: float | None = None
    asked = saving = False
    try:
        for process in beginning:
            crew.append(process)
            if forward.at is not None:
                signal_all([process], signal.SIGTERM)
        while None in (codes := [process.poll() for process in crew]):
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
                signal_all(crew, signal.SIGKILL if asked else signal.SIGTERM)
                asked, deadline = True, time.monotonic() + 5.0
            time.sleep(0.05)
    finally:
        signal_all(crew, signal.SIGKILL)
        for number, handler in before.items():
            signal.signal(number, handler)
    return _first([process.returncode for process in crew]) if first is None else first, forward.cut_short


class _Forward:
    """A stop signal on its way to the ranks: as SIGTERM, and another one, if it hurries, as SIGKILL."""

    def __init__(self, crew: Sequence[subprocess.Popen[bytes]], hurries: bool) -> None:
        self.crew, self.hurries = crew, hurries
        self.at: float | None = None  # when the first one came
        self.cut_short = ""

    def __call__(self, _number: int = signal.SIGTERM, _frame: FrameType | None = None) -> None:
        if self.at is None:
            self.at = time.monotonic()
            signal_all(self.crew, signal.SIGTERM)
        elif self.hurries and time.monotonic() - self.at > SAME_SECONDS:
            self.cut_short = "a second signal ended the ranks before they had saved"
            signal_all(self.crew, signal.SIGKILL)


def _first(codes: Sequence[int | None]) -> int | None:
    """The first rank that ended otherwise than well. One that a signal reached explains those that lost it."""
    ended = [rank for rank, code in enumerate(codes) if code]
    return min(ended, key=lambda rank: (codes[rank] != SAVED, rank), default=None)


def signal_all(crew: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in crew:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)


def _verdict(codes: Sequence[int], first: int | None, cut_short: str, desk: Path) -> int:
    """The exit code; for a failure its root. Ranks that only lost their peer come later than the one that it was."""
    if first is None:
        return 0
    if cut_short and not set(codes) <= {0, SAVED}:
        hint = "resume from the last checkpoint with --resume; cluster.grace_seconds is the time that ranks get"
        raise RunError(cut_short, "windlass train", hint)
    if codes[first] == SAVED:  # the others saved too, or only lost this one
        return SAVED
    errors = {rank: error for rank in range(len(codes)) if (error := _read(desk, f"error-{rank}"))}
    stated = {rank: error for rank, error in errors.items() if "problems" in error}
    if stated:
        error = stated[min(stated, key=lambda rank: (stated[rank]["time"], rank))]
        kind = UserError if error["code"] == RANK_USER_INPUT else RunError
        raise kind.of([Problem(**problem) for problem in error["problems"]])
    if codes[first] < 0:
        raise RunError(
            f"rank {first} was killed by {signal.Signals(-codes[first]).name}"
            f" while {_text(desk, f'phase-{first}') or 'starting'}",
            "windlass train",
            "a SIGKILL that nobody sent is most often the kernel out of memory (see dmesg); "
            "resume from the last checkpoint with --resume",
        )
    if errors:
        rank = min(errors, key=lambda rank: (errors[rank]["time"], rank))
        print(f"rank {rank} failed:\n{errors[rank]['traceback']}", file=sys.stderr, flush=True)
        return 1
    output = _text(desk, f"output-{first}")[-4000:]
    print(f"rank {first} ended with {codes[first]}:\n{output}", file=sys.stderr, flush=True)
    return 1


def _read(desk: Path, name: str) -> dict[str, Any]:
    text = _text(desk, name)
    return json.loads(text) if text else {}


def _text(desk: Path, name: str) -> str:
    path = desk / name
    return path.read_text(errors="replace") if path.exists() else ""
