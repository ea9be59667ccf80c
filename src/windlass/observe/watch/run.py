"""The watch inside a training run: each rank's heartbeat, and on rank 0 the detectors and the Prometheus page."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import torch.distributed as dist

from windlass.errors import Problem, RunError
from windlass.observe.recorder import Recorder
from windlass.observe.watch import alarms, prometheus
from windlass.observe.watch.alarms import Alarm, AlarmError
from windlass.observe.watch.heartbeat import Heartbeat
from windlass.observe.watch.patrol import CHECKPOINT, OFF, STOP, Patrol
from windlass.observe.watch.pulse import recorder as flight_recorder
from windlass.runfile import Watch

EVERY_SECONDS: Final = 1.0
REQUESTS: Final = {CHECKPOINT: 1, STOP: 1000}  # what rank 0 adds to a step's all-reduce


class RunWatch:
    """Around the training loop: `with RunWatch(...) as watch`. Alarms are logged, printed, and acted on by all ranks.

        watch.start(done, max_steps)
        for ...:
            total = all_reduce(watch.request)   # summed over the ranks, with the step's other sums
            save = watch.act(total)             # all ranks alike; raises AlarmError if the run must stop

    say: prints, on rank 0. on_stall: called on each rank before a stall ends it. report: writes the run's page.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        ranks: int,
        limits: Watch,
        recorder: Recorder,
        *,
        name: str,
        network: str = "",
        stall_seconds: float,
        say: Callable[[str], None],
        on_stall: Callable[[Problem], None] = lambda _: None,
        report: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder, self.rank, self.ranks, self.limits, self.recorder = folder, rank, ranks, limits, recorder
        self.name, self.say, self.on_stall, self.report = name, say, on_stall, report
        self.request = 0  # what rank 0 asks of all; elsewhere nothing
        self.stopped_by = ""
        self.over = threading.Event()
        self.patrol = Patrol(folder, limits, ranks, network=network, raised=self._raised)
        self.thread = threading.Thread(target=self._patrol, name="windlass watch", daemon=True)
        self.heartbeat = Heartbeat(
            folder,
            rank,
            ranks,
            None if limits.stall == OFF else stall_seconds,
            recorder.position,
            self._stalled,
            self._leave if limits.stall == STOP else None,
            flight_recorder,
        )
        self.page: prometheus.Page | None = None

    def __enter__(self) -> Self:
        if self.rank == 0 and self.limits.prometheus_port is not None:
            self.page = prometheus.Page(self.limits.prometheus_address, self.limits.prometheus_port, self._metrics)
        return self

    def start(self, step: int, max_steps: int) -> None:
        """The loop begins after `step`."""
        self.patrol.from_step, self.patrol.past.max_steps = step, max_steps
        self.heartbeat.start()
        if self.rank == 0:
            self.thread.start()

    def act(self, total: float) -> bool:
        """After the step's all-reduce of `request`: whether to save a checkpoint. Raises AlarmError to stop."""
        if total >= REQUESTS[STOP]:
            why = [self.stopped_by]
            if self.ranks > 1:
                dist.broadcast_object_list(why, src=0)
            hint = "see alarms.jsonl and the report; nothing of these last steps was saved"
            raise AlarmError("", why[0], "watch", hint, logged=True)
        if total and self.request < REQUESTS[STOP]:
            self.request = 0
        return total > 0

    def __exit__(self, _kind: type | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        self.over.set()
        self.heartbeat.close()
        if self.thread.is_alive():
            self.thread.join(10)
        if self.rank == 0:
            self.patrol.round()
            if isinstance(error, RunError) and not (isinstance(error, AlarmError) and error.logged):
                kind = error.kind if isinstance(error, AlarmError) else "failed"
                self.patrol.tell(Alarm(kind, self.recorder.position().step, error.problems[0].problem, level=STOP))
            self.report()
        if self.page is not None:
            self.page.close()

    def _raised(self, alarm: Alarm) -> None:
        """On rank 0, from the patrol's thread or the heartbeat's."""
        alarms.append(self.folder, alarm)
        self.say(f"alarm: {alarm}")
        if alarm.kind not in ("stall", "non_finite", "failed") and alarm.level in REQUESTS:
            self.stopped_by = self.stopped_by if self.request >= REQUESTS[STOP] else str(alarm)
            self.request = max(self.request, REQUESTS[alarm.level])

    def _stalled(self, alarm: Alarm) -> None:
        """On the lowest rank that lives, which need not be rank 0."""
        self.patrol.tell(alarm)
        if self.limits.stall == STOP:
            self.report()

    def _leave(self, message: str) -> None:
        """In a stall no rank can be asked to stop: each ends itself."""
        hint = f"the stacks of all ranks are in {self.folder}; continue with --resume"
        self.on_stall(Problem(message, "watch.stall", hint))
        os._exit(1)

    def _patrol(self) -> None:
        while not self.over.wait(EVERY_SECONDS):
            self.patrol.round()

    def _metrics(self) -> str:
        with self.patrol.lock:
            return prometheus.exposition(self.name, self.patrol.joined.latest, self.patrol.counts)
