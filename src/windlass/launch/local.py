"""A run that no platform looks after: started here or by hand, told of by its run folder, stopped by a signal."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from windlass.errors import UserError
from windlass.observe import steps
from windlass.observe.watch.heartbeat import read_beats

ALIVE_SECONDS = 30  # a rank shows a sign of life every 5


def about() -> dict[str, Any]:
    """How to find this process again; the run takes its place."""
    return {"pid": os.getpid(), "began": _began(os.getpid()), "host": socket.gethostname()}


def refuse_two(record: Path) -> None:
    """A second run would wait at the folder's lock, and the first could no longer be found."""
    facts = steps.read(record)
    if facts.get("host") == socket.gethostname() and _is(facts):
        what = f"it runs already, as process {facts['pid']}"
        raise UserError(what, str(record), "windlass status RUN; windlass stop RUN; or another train.output_dir")


def begin(words: Sequence[str]) -> NoReturn:
    """The same command that a user would type, in place of this process: signals and its exit code are the run's own.

    --resume begins anew where there is nothing to resume.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "windlass", "train", *words, "--resume"])


def status(run: Path, facts: Mapping[str, Any]) -> str:
    """One line, and where to see more. `run`: the run folder."""
    state = steps.read(run / steps.MANIFEST).get("state")
    lives, how = _lives(run, facts)
    if state == "finished":
        said = "finished"
    elif lives:
        said = f"running, {_step(run)}{how}" if state else f"starting{how}"
    elif state == "running":
        said = f"ended without finishing after {_step(run)}: windlass submit resumes from its last checkpoint"
    elif state == "failed":
        said = f"failed after {_step(run)}: what it printed says why; windlass submit resumes from its last checkpoint"
    elif state:
        said = f"{state} after {_step(run)}, and saved: windlass submit resumes from there"
    else:
        said = "no sign of life yet: it has not started, or died before its first heartbeat; its output says why"
    more = f"\nwindlass watch {run} shows curves, ranks and alarms" if state else ""
    return f"{run}: {said}{more}"


def stop(run: Path, facts: Mapping[str, Any], place: Path) -> str:
    """SIGTERM to the process that the run took the place of: it passes it on, its ranks save, it ends with 75."""
    here = socket.gethostname()
    if facts["host"] != here:
        hint = f"there: windlass stop, or kill -TERM {facts['pid']}"
        raise UserError(f"it was started on {facts['host']}, and this is {here}", str(place), hint)
    if not _is(facts):
        return f"{run}: its process has ended already"
    os.kill(facts["pid"], signal.SIGTERM)
    return f"{run}: process {facts['pid']} is told to stop; its ranks save, and windlass submit resumes from there"


def by_hand(verb: str, run: Path, place: Path) -> UserError:
    """Nobody knows from here where launch.sh or `windlass train` runs."""
    what, hint = {
        "logs": ("its nodes print where they were started", "look there, or in Slurm's output file"),
        "stop": (
            "it is stopped where it was started",
            "scancel, or kill -TERM the process of launch.sh or windlass train on any one node: all save and end",
        ),
    }[verb]
    return UserError(what, str(place), f"{hint}; windlass watch {run} shows how it goes")


def _lives(run: Path, facts: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether it runs, and by what that is known."""
    if facts.get("host") == socket.gethostname():
        return _is(facts), f" (process {facts['pid']})"
    newest = max(read_beats(run).values(), key=lambda word: word["time"], default=None)
    if newest is None:
        return False, ""
    ago = max(0.0, time.time() - newest["time"])
    return ago < ALIVE_SECONDS, f" ({newest['host']} showed a sign of life {ago:.0f} s ago)"


def _is(facts: Mapping[str, Any]) -> bool:
    """The very process: numbers are given again."""
    try:
        os.kill(facts["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return bool(_began(facts["pid"]) == facts["began"])


def _began(pid: int) -> str | None:
    """When a process was started, in the kernel's ticks; None where the kernel does not say, or it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *rest = text.rpartition(")")[2].split()  # man proc_pid_stat: the name before may hold anything
    return None if state == "Z" else rest[18]


def _step(run: Path) -> str:
    last = 0
    if path := steps.files(run).get(0):
        last = max((int(line.get("step", 0)) for line in steps.lines(path)), default=0)
    planned = (steps.read(run / steps.PLAN).get("batch") or {}).get("steps")
    return f"step {last:,} of {planned:,}" if planned else f"step {last:,}"
