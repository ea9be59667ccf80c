"""This process as one of the ranks: its place, what it leaves word of, how signals and errors end it. No torch."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from windlass.errors import RANK_USER_INPUT, SAVED, RunError, UserError

SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
NOTES_FOLDER: Final = (
    "WINDLASS_STATUS_DIR"  # on this machine; ranks leave their exit code, error, what they are doing there
)
PARENT_SPEAKS: Final = "WINDLASS_TELLER"  # set: whoever started the ranks reads their notes, so they print no errors


@dataclass(frozen=True, slots=True)
class Place:
    """This process among the ranks."""

    rank: int = 0
    local_rank: int = 0
    world: int = 1
    notes: Path | None = None
    tells: bool = True  # this rank prints its own errors

    def note(self, name: str, text: str) -> None:
        """Leave word, whole or not at all."""
        if self.notes is not None:
            with contextlib.suppress(OSError):  # word of a failure must not become a failure
                part = self.notes / f".{name}-{self.rank}"
                part.write_text(text)
                part.replace(self.notes / f"{name}-{self.rank}")

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
    notes = Path(environ[NOTES_FOLDER]) if NOTES_FOLDER in environ else None
    return Place(int(environ["RANK"]), int(local or 0), world, notes, tells=PARENT_SPEAKS not in environ)


class Interruption:
    """SIGTERM and SIGUSR1 in a rank. While it trains, asked for at the end of a step; else there is nothing to save."""

    def __init__(self) -> None:
        self.received = False
        self.training = False
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._received)

    def __call__(self) -> bool:
        return self.received

    def _received(self, _number: int, _frame: FrameType | None) -> None:
        # Only the first counts. torchrun sends all ranks another as soon as one has saved and ended, however long
        # the others still have to write; whoever means it sends SIGKILL, as `windlass train` does.
        if not self.received:
            self.received = True
            if not self.training:
                sys.exit(SAVED)


def inside(here: Place, work: Callable[[], int], *, say: Callable[[UserError], None]) -> int:
    """Run one rank's work and turn its end into an exit code, told to whoever started it or printed.

    The code is also left in the notes folder: torchrun and `accelerate launch` turn every one of them into 1.
    """
    here.note("pid", str(os.getpid()))  # for signals: a launcher's own processes do not pass all of them on
    if not here.tells:
        end_with_parent()
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
        if code == SAVED:
            doing = noted(here.notes, f"phase-{here.rank}") if here.notes else ""
            lost = "there was nothing new to save; start again with --resume"
            said = f"stopped by a signal while {doing or 'starting'}: {lost}"
            here.note("stopped", said)
            if here.tells and here.local_rank == 0:
                print(said, file=sys.stderr, flush=True)
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
    if here.notes is None:
        return
    for number in SIGNALS:  # what they ask for is done
        signal.signal(number, signal.SIG_IGN)
    first, until = here.rank - here.local_rank, time.monotonic() + seconds
    while any(_at_work(here.notes, rank) for rank in range(first, first + local_ranks)) and time.monotonic() < until:
        time.sleep(0.05)


def _at_work(notes: Path, rank: int) -> bool:
    """It has left no code, and was not killed either."""
    if (notes / f"code-{rank}").exists():
        return False
    if pid := noted(notes, f"pid-{rank}"):
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return False
    return True


def end_with_parent(farewell: signal.Signals = signal.SIGTERM) -> None:
    """Should whoever started this rank be killed: save and end, rather than go on with nobody to stop it."""
    pr_set_pdeathsig = 1  # linux/prctl.h
    with contextlib.suppress(OSError, AttributeError):  # not Linux: only a convenience is lost
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, farewell)


def _nothing_to_save(_number: int, _frame: FrameType | None) -> None:
    sys.exit(SAVED)


def noted(notes: Path, name: str) -> str:
    path = notes / name
    return path.read_text(errors="replace") if path.exists() else ""
