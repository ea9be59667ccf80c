"""This process as one rank of a run: its number, the status it reports, how signals and errors end it. No torch."""

import contextlib
import ctypes
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from windlass.errors import RANK_USER_INPUT, SAVED, RunError, UserError
from windlass.files import FULL, explain_write_error, write_atomic
from windlass.ranks.place import parse_number

SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# Directory on this machine where ranks write their phase, error and exit code.
STATUS_DIR: Final = "WINDLASS_STATUS_DIR"
SAME_ERROR_SECONDS: Final = 10.0  # equal errors of ranks that started together within this time are one
SUPERVISED: Final = "WINDLASS_SUPERVISED"  # if set, `windlass train` reads those files and ranks print no errors


@dataclass(frozen=True, slots=True)
class Rank:
    rank: int = 0
    local_rank: int = 0
    world: int = 1
    status_dir: Path | None = None
    supervised: bool = False

    def report(self, name: str, text: str) -> None:
        """Write `name`-RANK to the status directory, if there is one."""
        if self.status_dir is not None:
            with contextlib.suppress(OSError):  # reporting a failure must not become one
                write_atomic(self.status_dir / f"{name}-{self.rank}", text)

    def phase(self, name: str) -> None:
        """Record what this rank is doing, for the message if it is killed."""
        self.report("phase", name)


def read_rank(environ: Mapping[str, str]) -> Rank | None:
    """Read this rank from the variables that torchrun, `accelerate launch`, a job's operator or `start_ranks`
    set; None if no launcher started ranks."""
    if "RANK" not in environ:
        return None
    local = environ.get("LOCAL_RANK")
    per_node = environ.get("PET_NPROC_PER_NODE", "1")
    if local is None and per_node.isdigit() and int(per_node) > 1:
        return None  # in an operator's pod, RANK is the pod's number and its ranks are still to be started
    rank = parse_number(environ["RANK"])
    world = parse_number(environ.get("WORLD_SIZE", ""))
    local_rank = parse_number(local or environ.get("SLURM_LOCALID", "0"))
    local_world = parse_number(environ.get("LOCAL_WORLD_SIZE") or environ.get("WORLD_SIZE", ""))
    if not (0 <= rank < world and 0 <= local_rank < local_world <= world):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        what = f"{', '.join(f'{name}={environ[name]}' for name in names if name in environ)} is not a valid rank"
        hint = f"start it with torchrun or srun, which set them all; to start it alone: unset {' '.join(names)}"
        raise UserError(what, "the environment", hint, "wrong-environment")
    status_dir = Path(environ[STATUS_DIR]) if STATUS_DIR in environ else None
    return Rank(rank, local_rank, world, status_dir, supervised=SUPERVISED in environ)


def read_status(status_dir: Path, name: str) -> str:
    path = status_dir / name
    return path.read_text(errors="replace") if path.exists() else ""


class StopSignal:
    """Receives SIGTERM and SIGUSR1. While `training`, the loop checks it in every step; before, there is nothing to
    save."""

    def __init__(self) -> None:
        self.received = self.training = False
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._receive)

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        # Only the first counts. torchrun sends all ranks another as soon as one has saved and ended, however long the
        # others still need to write. To end a rank at once, send SIGKILL, as `windlass train` does.
        if not self.received:
            self.received = True
            if not self.training:
                sys.exit(SAVED)


@contextlib.contextmanager
def holding_stop_signals() -> Iterator[None]:
    """Let a stop signal wait for the end of `import torch`, which loses an exit while it imports numpy, and leaves half
    of that."""
    received: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, lambda given, _: received.append(given)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        sys.exit(SAVED)


def run_rank(here: Rank, work: Callable[[], int], *, print_error: Callable[[UserError], None]) -> int:
    """Run one rank's work. Its end becomes an exit code and is reported to the supervisor or printed. The code is also
    written to the status directory: torchrun and `accelerate launch` turn every code into 1."""
    if here.supervised:
        signal_on_parent_death()
    printed = ""
    try:
        for number in (signal.SIGTERM, signal.SIGUSR1):  # `StopSignal` takes them over
            signal.signal(number, lambda *_: sys.exit(SAVED))
        try:
            code = work()
        except OSError as error:
            if error.errno not in FULL:
                raise
            path = Path(error.filename or ".")
            raise RunError(
                explain_write_error(path, error), hint="make room, then start again", code="disk-full"
            ) from error
    except UserError as error:
        code = 1 if isinstance(error, RunError) else RANK_USER_INPUT
        problems = [problem.as_dict() for problem in error.problems]
        here.report("error", json.dumps({"problems": problems, "code": code, "time": time.monotonic()}))
        if not here.supervised and (here.local_rank == 0 or code == 1):
            if is_first_to_print(here, str(error)):
                print_error(error)
        else:  # usually local rank 0 prints the same in full; if not, one line is enough
            printed = f"rank {here.rank}: {error.problems[0].where}: {error.problems[0].problem}"
    except SystemExit as leaving:  # a signal arrived when there was nothing to save
        code = leaving.code if isinstance(leaving.code, int) else 1
        if code == SAVED:
            phase = read_status(here.status_dir, f"phase-{here.rank}") if here.status_dir else ""
            message = f"stopped by a signal {f'while {phase}' if phase else 'at the start'}"
            message += ": there was nothing new to save; start again with --resume"
            here.report("stopped", message)
            printed = message if here.local_rank == 0 else ""
    except Exception:
        code = 1
        trace = traceback.format_exc()
        here.report("error", json.dumps({"traceback": trace, "time": time.monotonic()}))
        printed = f"rank {here.rank} failed:\n{trace}" if is_first_to_print(here, trace) else ""
    if printed and not here.supervised:
        print(printed, file=sys.stderr, flush=True)
    here.report("code", str(code))
    return code


def read_start_time(pid: int) -> str | None:
    """Return a process's start time in the kernel's ticks; None if it is gone or the kernel doesn't report it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *rest = text.rpartition(")")[2].split()  # man proc_pid_stat: the name before it may contain anything
    return None if state == "Z" else rest[18]


def is_first_to_print(here: Rank, text: str) -> bool:
    """Return whether no other rank of this machine from the same launcher has printed this text: once is enough."""
    if here.world == 1 or os.environ.get("LOCAL_WORLD_SIZE") == "1":
        return True
    # The launcher's start time: a pod's next launcher may have the same PID.
    start = [os.getuid(), os.getppid(), *map(os.environ.get, ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"))]
    start.append(read_start_time(os.getppid()))
    name = hashlib.blake2b(f"{start} {text}".encode(), digest_size=8).hexdigest()
    path = Path(tempfile.gettempdir()) / f"windlass-printed-{name}"
    try:
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < time.time() - SAME_ERROR_SECONDS:  # from an earlier launcher with the same PID
                path.unlink()
        path.open("x").close()
    except FileExistsError:
        return False
    except OSError:  # twice is better than never
        pass
    return True


def wait_for_peers(seconds: float) -> None:
    """Wait until the scripts of this launcher's other ranks on this machine have ended too, if this rank's saved first.
    Launchers treat every exit code but 0 as a failure: they signal the other ranks and kill them 30 s later. (torch's
    elastic/multiprocessing/api.py uses its default, whatever PET_SHUTDOWN_TIMEOUT says.)"""
    import psutil  # type: ignore[import-untyped]

    ignore_signals()  # everything is saved already
    until = time.monotonic() + seconds
    is_any_left = True
    while is_any_left and time.monotonic() < until:
        time.sleep(0.05)
        is_any_left = False
        with contextlib.suppress(psutil.NoSuchProcess):  # one that ended in between
            peers = psutil.Process(os.getppid()).children()
            is_any_left = any(peer.children() for peer in peers if peer.pid != os.getpid())


def ignore_signals() -> None:
    """Ignore stop signals from here on: near its end Python takes its handlers away, and a signal would kill."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def signal_on_parent_death(number: signal.Signals = signal.SIGTERM) -> None:
    """Get this signal when the parent process is killed: save and end instead of running on unsupervised."""
    pr_set_pdeathsig = 1  # linux/prctl.h
    with contextlib.suppress(OSError, AttributeError):  # not on Linux: only a convenience is lost
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)
