"""All detectors over one run folder, from its files alone; each alarm is told once until it has been quiet a while."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from windlass.observe import steps
from windlass.observe.watch import nccl
from windlass.observe.watch.alarm import Alarm
from windlass.observe.watch.detect import OF_EVALUATIONS, OF_STEPS, Memory, Past
from windlass.observe.watch.follow import Joined, Tail
from windlass.runfile import RunFile, ScriptRun, Watch

QUIET: Final = 100  # steps after which the same alarm of the same rank is told again
OFF, WARN, CHECKPOINT, STOP = "off", "warn", "checkpoint", "stop"


def environment(environ: Mapping[str, str], job: RunFile | ScriptRun, folder: Path) -> dict[str, str]:
    """What torch and NCCL are to keep for the watch, unless the user said otherwise; read when the ranks meet."""
    theirs = {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"} & environ.keys()
    recorder = {} if theirs or job.watch.stall == OFF else {"TORCH_FR_BUFFER_SIZE": "2000"}
    looked_at = job.watch.sockets != OFF and job.cluster.nodes > 1
    return {**recorder, **(nccl.environment(environ, folder) if looked_at else {})}


class Patrol:
    """`round` reads what is new and raises what it finds."""

    def __init__(
        self,
        folder: Path,
        limits: Watch,
        ranks: int,
        *,
        network: str = "",
        from_step: int = 0,
        raised: Callable[[Alarm], None],
    ) -> None:
        self.folder, self.limits, self.raised = folder, limits, raised
        self.network = network if network.startswith("infiniband") else ""
        self.past = Past(limits)
        self.joined = Joined(folder, ranks)
        self.events = Tail(folder / steps.EVENTS)
        self.logs: dict[Path, Tail] = {}
        self.channels: dict[str, int] = {}
        self.told: dict[tuple[str, int | None], int] = {}
        self.from_step = from_step  # steps up to here were judged before the run was resumed
        self.counts: dict[str, int] = {}
        self.lock = threading.Lock()

    def round(self) -> None:
        with self.lock:
            for alarm in self.found():
                self.tell(alarm)

    def tell(self, alarm: Alarm) -> None:
        """With the action of its kind, unless it is off or was told a short while ago."""
        action = alarm.level if alarm.kind in ("non_finite", "failed") else getattr(self.limits, alarm.kind)
        before = self.told.get((alarm.kind, alarm.rank))
        if action == OFF or (before is not None and alarm.step < before + QUIET and alarm.kind not in EACH):
            return
        self.told[alarm.kind, alarm.rank] = alarm.step
        self.counts[alarm.kind] = self.counts.get(alarm.kind, 0) + 1
        self.raised(dataclasses.replace(alarm, level=action))

    def found(self) -> Iterator[Alarm]:
        for step, records in self.joined.new():
            if step > self.from_step:
                yield from self.judged(step, records)
        for event in self.events.objects():
            loss = event.get("eval_loss")
            if event.get("kind") == "eval" and isinstance(loss, int | float):
                self.past.evaluations.append((int(event.get("step") or 0), float(loss)))
                if self.past.evaluations[-1][0] > self.from_step:
                    yield from self.by(OF_EVALUATIONS)
        if self.network and self.limits.sockets != OFF:
            yield from self.fabric()

    def judged(self, step: int, records: dict[int, dict[str, Any]]) -> Iterable[Alarm]:
        if not self.past.memory:
            self.past.memory = capacities(self.folder, records)
        self.past.add(step, records)
        return self.by(OF_STEPS)

    def by(self, detectors: dict[str, Any]) -> Iterator[Alarm]:
        for kind, detector in detectors.items():
            if getattr(self.limits, kind) != OFF:  # of non_finite: stop or skip
                yield from detector(self.past)

    def fabric(self) -> Iterator[Alarm]:
        for path in self.folder.glob(nccl.PATTERN):
            tail = self.logs.setdefault(path, Tail(path))
            for name, number in nccl.transports(tail.text()).items():
                self.channels[name] = self.channels.get(name, 0) + number
        if ("sockets", None) not in self.told and (message := nccl.fell_back(self.channels, self.network)):
            step = max((record["step"] for record in self.joined.latest.values()), default=0)
            yield Alarm("sockets", step, message)


EACH: Final = ("non_finite", "gradient_spike", "stall", "failed")  # each occurrence is news


def capacities(folder: Path, ranks: Iterable[int]) -> dict[int, Memory]:
    """What each rank may hold: its GPU's memory, or its part of its host's."""
    about = {rank: meter(folder, rank).get("hardware", {}) for rank in ranks}
    hosts = [facts.get("host") for facts in about.values()]
    found = {}
    for rank, facts in about.items():
        gpus = [gpu.get("memory_gib") for gpu in facts.get("gpus") or () if gpu.get("name") == facts.get("gpu")]
        gib = gpus[0] if gpus else (facts.get("memory_gib") or 0) / hosts.count(facts.get("host"))
        if gib and (gpus or not facts.get("gpu")):
            found[rank] = Memory(gib)
    return found


def meter(folder: Path, rank: int) -> dict[str, Any]:
    return steps.read(folder / steps.METER.format(rank=rank))
