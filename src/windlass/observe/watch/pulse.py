"""A rank's own part of the watch, from inside the process that trains: what it calls, where it is, its heartbeat."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch._C._distributed_c10d as c10d

from windlass.observe import steps
from windlass.observe.watch import alarm as alarms
from windlass.observe.watch import collectives
from windlass.observe.watch.alarm import Alarm
from windlass.observe.watch.heartbeat import Heartbeat, Position
from windlass.observe.watch.patrol import OFF, STOP
from windlass.runfile import ScriptRun

# What follows the last mark that a meter made.
NEXT: Final = {"start": "data", "data": "forward", "forward": "backward", "backward": "optimizer", "pause": "data"}
STALL_SECONDS: Final = 300.0  # of a script that says nothing of it: half of torch's own patience with NCCL


def recorder() -> dict[str, Any]:
    """This rank's calls of collectives, from torch's flight recorders: NCCL has its own, which counts for itself."""
    found: dict[str, Any] = {}
    for kind, dump in (("", "_dump_fr_trace_json"), ("NCCL ", "_dump_nccl_trace_json")):
        with suppress(AttributeError, ValueError, RuntimeError):  # this torch has none
            calls = collectives.calls(json.loads(getattr(c10d, dump)()))
            found |= {f"{kind}{group}": about for group, about in calls.items()}
    return found


def of_script(folder: Path, rank: int, ranks: int, position: Callable[[], Position]) -> Heartbeat | None:
    """The heartbeat of a script's rank, as the run file says that started it; None where none did."""
    try:
        run = ScriptRun.model_validate(json.loads((folder / steps.MANIFEST).read_bytes())["run"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    limits = run.watch

    def stalled(alarm: Alarm) -> None:
        alarms.append(folder, Alarm(alarm.kind, alarm.step, alarm.message, level=limits.stall))
        print(f"alarm: {alarm}", file=sys.stderr, flush=True)

    def leave(message: str) -> None:
        """Nobody can be asked to stop in a stall: each rank ends itself."""
        print(f"rank {rank} ends itself: {message}", file=sys.stderr, flush=True)
        os._exit(1)

    seconds = None if limits.stall == OFF else float(limits.stall_seconds or STALL_SECONDS)
    heart = Heartbeat(
        folder, rank, ranks, seconds, position, stalled, leave if limits.stall == STOP else None, recorder
    )
    heart.start()
    return heart
