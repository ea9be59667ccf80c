"""Heartbeat: a thread in every rank that shows signs of life and writes down why the rank makes no progress.

If something holds the GIL for good, faulthandler's timer, which needs no GIL, writes the stacks (docs/watch.md).
"""

import faulthandler
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from windlass import run_folder
from windlass.files import WriteGuard, write_atomic
from windlass.observe.reader import as_number, drop_nan
from windlass.observe.watch.detectors import Alarm

BEAT: Final = "heartbeat-rank{rank}.json"
STACKS: Final = "stacks-rank{rank}.txt"
LATEST_TIME: Final = 1e11  # latest valid time, in seconds since 1970
SLOWEST_BEAT: Final = 5.0  # seconds
RECENT_CALLS: Final = 8  # collectives kept per group


@dataclass(frozen=True, slots=True)
class Position:
    """A rank's position in its work. `progress` changes whenever it gets on."""

    step: int
    phase: str
    progress: object


@dataclass(eq=False, repr=False)
class Heartbeat(threading.Thread):
    """`stalled` is called on one rank only, the lowest live one, once all have had time to write their positions.

    leave: called on every rank after that; ends it. flight_recorder: this rank's last collectives.
    """

    folder: Path
    rank: int
    ranks: int
    stall_seconds: float | None
    position: Callable[[], Position]
    stalled: Callable[[Alarm], None]
    leave: Callable[[str], None] | None
    flight_recorder: Callable[[], Mapping[str, Any]]
    unwritten: WriteGuard

    def __post_init__(self) -> None:
        super().__init__(name="windlass heartbeat", daemon=True)
        self.period = min(SLOWEST_BEAT, (self.stall_seconds or 60.0) / 4)
        self.over = threading.Event()
        self.stacks = self.unwritten.open(self.folder / STACKS.format(rank=self.rank), "w")
        self.about = {"rank": self.rank, "host": socket.gethostname(), "pid": os.getpid()}
        self.stalled_since = ""

    def run(self) -> None:
        last: Position | None = None
        since = time.monotonic()
        while not self.over.is_set():
            now = self.position()
            if last is None or now.progress != last.progress:
                last = now
                since = time.monotonic()
                self.stalled_since = ""
                if self.stall_seconds:
                    faulthandler.dump_traceback_later(self.stall_seconds + 2 * self.period, file=self.stacks)
            quiet = time.monotonic() - since
            if self.stall_seconds and quiet >= self.stall_seconds and not self.stalled_since:
                self.stalled_since = time.strftime("%H:%M:%S", time.localtime(time.time() - quiet))
                faulthandler.cancel_dump_traceback_later()
                with self.unwritten(Path(self.stacks.name)):
                    self.stacks.write(f"rank {self.rank}, no progress since {self.stalled_since}\n")
                    self.stacks.flush()
                faulthandler.dump_traceback(self.stacks, all_threads=True)
                self._beat(now, quiet, self.flight_recorder())
                self.over.wait(2 * self.period)  # lets the others notice and write
                self._report(now, quiet)
            elif not self.stalled_since:
                self._beat(now, quiet, {})
            self.over.wait(self.period)

    def close(self) -> None:
        self.over.set()
        if self.is_alive():
            self.join(10)
        faulthandler.cancel_dump_traceback_later()
        with self.unwritten(Path(self.stacks.name)):
            empty = self.stacks.tell() == 0
            self.stacks.close()
            if empty:
                (self.folder / STACKS.format(rank=self.rank)).unlink(missing_ok=True)

    def _beat(self, now: Position, quiet: float, collectives: Mapping[str, Any]) -> None:
        beat = {**self.about, "time": round(time.time(), 3), "step": now.step, "phase": now.phase}
        beat |= {"quiet_seconds": round(quiet, 1), "stalled": bool(self.stalled_since), "collectives": collectives}
        path = self.folder / BEAT.format(rank=self.rank)
        with self.unwritten(path):
            write_atomic(path, json.dumps(beat))

    def _report(self, now: Position, quiet: float) -> None:
        """Report on one rank; with action `stop` every rank then ends before the process group's timeout."""
        beats = {rank: beat for rank, beat in read_beats(self.folder).items() if rank < self.ranks}  # of this try
        alive = [rank for rank, beat in beats.items() if time.time() - beat["time"] < 4 * self.period]
        silent = [rank for rank in range(self.ranks) if rank not in alive]
        give_up = time.monotonic() + 2 * self.period  # a rank that is dead, or on a node that is, writes no stacks
        while any(not _read_stacks(self.folder, rank) for rank in silent) and time.monotonic() < give_up:
            if self.over.wait(self.period / 4):
                break
        parts = [f"no progress for {quiet:.0f} s"]
        if silent:
            parts.append(f"no sign of life from {format_ranks(silent)}")
            processes = [f"pid {beats[rank]['pid']} on {beats[rank]['host']}" for rank in silent if rank in beats]
            if processes:
                parts[-1] += f" ({', '.join(processes)})"
        for rank in range(self.ranks):
            place = find_gil_holder(self.folder, rank)
            if place:
                parts.append(f"rank {rank} holds Python's lock: {place}")
        stalled = [rank for rank in alive if beats[rank]["stalled"]]
        parts += find_absent_ranks({rank: beats[rank].get("collectives") or {} for rank in stalled})
        parts += [f"rank {rank} in {beat['phase']} of step {beat['step']}" for rank, beat in beats.items()][:8]
        message = "; ".join([*parts, f"stacks in {STACKS.format(rank='*')}"])
        if min(alive, default=self.rank) == self.rank:
            self.stalled(Alarm("stall", now.step, message))
        if self.leave is not None:
            self.leave(message)


def _read_stacks(folder: Path, rank: int) -> str:
    try:
        return (folder / STACKS.format(rank=rank)).read_text(errors="replace")
    except OSError:
        return ""


def find_gil_holder(folder: Path, rank: int) -> str:
    """Return where a rank is if only faulthandler's timer could write its stacks; empty for every other rank."""
    text = _read_stacks(folder, rank)
    lines = text.splitlines()
    threads = [at for at, line in enumerate(lines) if line.startswith("Thread ")]  # the main thread comes last
    by_timer = text.startswith("Timeout ") and threads and threads[-1] + 1 < len(lines)
    return lines[threads[-1] + 1].strip() if by_timer else ""


def read_beats(folder: Path) -> dict[int, dict[str, Any]]:
    """Return every rank's last sign of life."""
    beats = {}
    for path in sorted(folder.glob(BEAT.format(rank="*"))):
        with suppress(OSError, ValueError, TypeError, KeyError, OverflowError):
            beat = json.loads(path.read_bytes())
            seconds = float(beat["time"])
            if 0 <= seconds < LATEST_TIME:
                beats[int(beat["rank"])] = {**beat, "time": seconds}
    return dict(sorted(beats.items()))


def describe_start(folder: Path, signs: Iterable[Any]) -> str:
    """Return a sentence if a run was started, or resumed, after the times of all its signs of life; else nothing."""
    manifest = folder / run_folder.MANIFEST
    began = manifest.stat().st_mtime if manifest.is_file() else 0.0
    if began <= max(drop_nan(map(as_number, signs)), default=0.0):
        return ""
    at = time.strftime("%H:%M", time.localtime(began))
    return f"no heartbeat since it was started at {at}: it prepares or loads, or has died; its output says which"


# --- flight recorders of all ranks, compared ---

# One rank's collectives: group -> {"last": 17, "recent": {"17": "gloo:all_reduce of …"}}
Calls = Mapping[str, Mapping[str, Any]]


def read_recent_calls(trace: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return this rank's last collectives by process group, from the dump of torch's flight recorder."""
    groups: dict[str, dict[str, Any]] = {}
    for entry in trace.get("entries") or ():
        if entry.get("is_p2p"):
            continue
        name = " ".join(map(str, entry.get("process_group") or ["?"]))
        number = int(entry.get("collective_seq_id") or 0)
        group = groups.setdefault(name, {"last": 0, "recent": {}})
        group["last"] = max(group["last"], number)
        group["recent"][str(number)] = f"{entry.get('profiling_name', '?')} of {entry.get('input_sizes')}"
        if len(group["recent"]) > RECENT_CALLS:
            del group["recent"][min(group["recent"], key=int)]
    return groups


def find_absent_ranks(by_rank: Mapping[int, Calls]) -> list[str]:
    """Name for each group the ranks that lack the call for which others wait. A rank without any record lacks all."""
    messages = []
    for name in sorted({name for groups in by_rank.values() for name in groups}):
        last = {rank: int(groups[name]["last"]) for rank, groups in sorted(by_rank.items()) if name in groups}
        newest = max(last.values())
        waiting = [rank for rank in last if last[rank] == newest]
        behind = [rank for rank in last if last[rank] < newest]
        first = min((last[rank] for rank in behind), default=newest - 1) + 1
        behind += [rank for rank, groups in sorted(by_rank.items()) if not groups]
        if behind:
            call = by_rank[waiting[0]][name]["recent"].get(str(first), "a collective")
            place = f"{call} (number {first} of group {name})"
            messages.append(f"{format_ranks(behind)} absent from {place}, {format_ranks(waiting)} in it")
    return messages


def format_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
