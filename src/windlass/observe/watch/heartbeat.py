"""A thread in every rank that shows signs of life, and, when the rank makes no progress, writes down why.

A rank that waits in a collective holds no GIL, so the thread runs. Where something holds the GIL for good, the
thread's last act was to set faulthandler's own timer, which is C and needs no GIL: the stacks are written all the same.
The other ranks see that this one gives no sign of life, and wait for those stacks before they tell or leave.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from windlass.observe.watch import collectives
from windlass.observe.watch.alarm import Alarm

BEAT: Final = "heartbeat-rank{rank}.json"
STACKS: Final = "stacks-rank{rank}.txt"
LATEST: Final = 1e11  # seconds since 1970 that a clock may show
SLOWEST_BEAT: Final = 5.0  # seconds


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank is. `moved` changes with every bit of progress."""

    step: int
    phase: str
    moved: object


class Heartbeat(threading.Thread):
    """`stalled` is called on one rank alone, the lowest that lives, once all have had time to write where they are."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        ranks: int,
        stall_seconds: float | None,
        position: Callable[[], Position],
        stalled: Callable[[Alarm], None],
        leave: Callable[[str], None] | None,
        recorder: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        super().__init__(name="windlass heartbeat", daemon=True)
        self.folder, self.rank, self.ranks, self.stall_seconds = folder, rank, ranks, stall_seconds
        self.position, self.stalled, self.leave, self.recorder = position, stalled, leave, recorder
        self.period = min(SLOWEST_BEAT, (stall_seconds or 60.0) / 4)
        self.over = threading.Event()
        self.stacks = (folder / STACKS.format(rank=rank)).open("w")
        self.about = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
        self.asleep = ""  # since when, once it was noticed

    def run(self) -> None:
        last, since = None, time.monotonic()
        while not self.over.is_set():
            now = self.position()
            if last is None or now.moved != last.moved:
                last, since, self.asleep = now, time.monotonic(), ""
                self.arm()
            quiet = time.monotonic() - since
            if self.stall_seconds and quiet >= self.stall_seconds and not self.asleep:
                self.asleep = time.strftime("%H:%M:%S", time.localtime(time.time() - quiet))
                self.dump()
                self.beat(now, quiet, self.recorder())
                self.over.wait(2 * self.period)  # for the others to notice and to write
                self.report(now, quiet)
            elif not self.asleep:
                self.beat(now, quiet, {})
            self.over.wait(self.period)

    def close(self) -> None:
        self.over.set()
        if self.is_alive():
            self.join(10)
        faulthandler.cancel_dump_traceback_later()
        empty = self.stacks.tell() == 0
        self.stacks.close()
        if empty:
            Path(self.stacks.name).unlink(missing_ok=True)

    def arm(self) -> None:
        if self.stall_seconds:
            faulthandler.dump_traceback_later(self.stall_seconds + 2 * self.period, file=self.stacks)

    def dump(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self.stacks.write(f"rank {self.rank}, no progress since {self.asleep}\n")
        self.stacks.flush()
        faulthandler.dump_traceback(self.stacks, all_threads=True)

    def beat(self, now: Position, quiet: float, calls: Mapping[str, Any]) -> None:
        word = {**self.about, "time": round(time.time(), 3), "step": now.step, "phase": now.phase}
        word |= {"quiet_seconds": round(quiet, 1), "stalled": bool(self.asleep), "collectives": calls}
        part = self.folder / f".heartbeat-{self.rank}.partial"
        with suppress(OSError):  # a sign of life that can't be given must not end the life
            part.write_text(json.dumps(word))
            part.replace(self.folder / BEAT.format(rank=self.rank))

    def report(self, now: Position, quiet: float) -> None:
        """One rank tells; with action `stop` every rank then ends itself, before the process group's timeout does."""
        words = read(self.folder)
        fresh = [rank for rank, word in words.items() if time.time() - word["time"] < 4 * self.period]
        self.await_stacks({*range(self.ranks)} - {*fresh})
        stuck = {rank: where for rank in range(self.ranks) if (where := holds_lock(self.folder, rank))}
        message = stall_message(words, self.ranks, fresh, quiet, stuck)
        if min(fresh, default=self.rank) == self.rank:
            self.stalled(Alarm("stall", now.step, message))
        if self.leave is not None:
            self.leave(message)

    def await_stacks(self, silent: set[int]) -> None:
        """A while: a rank that is dead, or on a node that is, writes none."""
        late = time.monotonic() + 2 * self.period
        while any(not stacks(self.folder, rank) for rank in silent) and time.monotonic() < late:
            if self.over.wait(self.period / 4):
                return


def stacks(folder: Path, rank: int) -> str:
    try:
        return (folder / STACKS.format(rank=rank)).read_text(errors="replace")
    except OSError:
        return ""


def holds_lock(folder: Path, rank: int) -> str:
    """Where a rank is whose stacks only faulthandler's timer could write; empty for every other rank."""
    said = stacks(folder, rank)
    lines = said.splitlines()
    mains = [at for at, line in enumerate(lines) if line.startswith("Thread ")]  # the main thread is the last one
    return lines[mains[-1] + 1].strip() if said.startswith("Timeout ") and mains and mains[-1] + 1 < len(lines) else ""


def read(folder: Path) -> dict[int, dict[str, Any]]:
    """Every rank's last sign of life."""
    found = {}
    for path in sorted(folder.glob(BEAT.format(rank="*"))):
        with suppress(OSError, ValueError, TypeError, KeyError, OverflowError):
            word = json.loads(path.read_bytes())
            if 0 <= (seconds := float(word["time"])) < LATEST:
                found[int(word["rank"])] = {**word, "time": seconds}
    return dict(sorted(found.items()))


def stall_message(
    words: Mapping[int, Mapping[str, Any]], ranks: int, fresh: list[int], quiet: float, stuck: Mapping[int, str]
) -> str:
    said = [f"no progress for {quiet:.0f} s"]
    silent = [rank for rank in range(ranks) if rank not in fresh]
    if silent:
        where = ", ".join(f"pid {words[r]['pid']} on {words[r]['host']}" for r in silent if r in words)
        said.append(f"no sign of life from {collectives.named(silent)}{f' ({where})' if where else ''}")
    said += [f"rank {rank} holds Python's lock: {where}" for rank, where in stuck.items()]
    said += collectives.absent({rank: words[rank].get("collectives") or {} for rank in fresh if words[rank]["stalled"]})
    phases = [f"rank {rank} in {word['phase']} of step {word['step']}" for rank, word in words.items()][:8]
    return "; ".join([*said, *phases, f"stacks in {STACKS.format(rank='*')}"])
