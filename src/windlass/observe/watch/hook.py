"""The watch inside a training run: a callback on every rank, and on rank 0 the patrol of the run folder."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist
from transformers import TrainerCallback

from windlass.errors import Problem, RunError
from windlass.observe.watch import alarm as alarms
from windlass.observe.watch import prometheus
from windlass.observe.watch.alarm import Alarm
from windlass.observe.watch.heartbeat import Heartbeat, Position
from windlass.observe.watch.patrol import CHECKPOINT, OFF, STOP, Patrol
from windlass.observe.watch.patrol import environment as environment
from windlass.observe.watch.pulse import NEXT, recorder
from windlass.observe.watch.trackers import Trackers

if TYPE_CHECKING:
    from windlass.runfile import RunFile

EVERY_SECONDS: Final = 1.0
WEIGHT: Final = {CHECKPOINT: 1, STOP: 1000}  # what rank 0 adds to a step's collective sum, read by all alike


class Watchman(TrainerCallback):  # type: ignore[misc]
    """Around the training: `with Watchman(…):`. Its alarms are written, shown, and acted on by all ranks at once."""

    def __init__(
        self,
        job: RunFile,
        loop: Any,
        note: Callable[[str, str], None],
        say: Callable[[str], None],
        ranks: int,
        report: Callable[[], None] = lambda: None,
    ) -> None:
        self.report = report  # makes the run's page: when all is told, however the training ended
        self.limits, self.loop, self.note, self.say, self.ranks = job.watch, loop, note, say, ranks
        self.folder = Path(job.train.output_dir)
        self.rank = int(loop.args.process_index)
        self.name = job.name or self.folder.resolve().name
        self.asked = 0
        self.why = ""
        self.moved = 0
        self.over = threading.Event()
        self.patrol = Patrol(self.folder, job.watch, ranks, network=str(job.cluster.network), raised=self.raised)
        self.thread = threading.Thread(target=self._walk, name="windlass watch", daemon=True)
        stall = job.watch.stall_seconds or job.train.ddp_timeout / 2
        leave = self._leave if job.watch.stall == STOP else None
        told = None if job.watch.stall == OFF else stall
        self.heart = Heartbeat(self.folder, self.rank, ranks, told, self.position, self._stalled, leave, recorder)
        self.page: prometheus.Page | None = None
        loop.asked = lambda: self.asked
        loop.add_callback(self)
        if self.rank == 0:
            loop.add_callback(Trackers(self.folder, loop))

    def __enter__(self) -> Watchman:
        if self.rank == 0 and self.limits.prometheus_port is not None:
            self.page = prometheus.Page(self.limits.prometheus_address, self.limits.prometheus_port, self._metrics)
        return self

    def __exit__(self, _kind: type | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        self.over.set()
        self.heart.close()
        if self.thread.is_alive():
            self.thread.join(10)
        if self.rank == 0:
            self.patrol.round()
            if isinstance(error, RunError) and error.problems[0].where != "watch":
                kind = "non_finite" if error.problems[0].where == "watch.non_finite" else "failed"
                self.patrol.tell(Alarm(kind, self.position().step, error.problems[0].problem, level=STOP))
            self.report()
        if self.page is not None:
            self.page.close()

    # What the Trainer calls.

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self.patrol.from_step, self.patrol.past.max_steps = int(state.global_step), int(state.max_steps)
        self.heart.start()
        if self.rank == 0:
            self.thread.start()

    def on_step_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
        """After the step's collective: all ranks have read the same sum."""
        self.moved += 1
        if self.loop.agreed >= WEIGHT[STOP]:
            said = [self.why]
            if self.ranks > 1:
                dist.broadcast_object_list(said, src=0)
            hint = "look at alarms.jsonl and the report; nothing of these last steps was saved"
            raise RunError(said[0], "watch", hint)
        if self.loop.agreed:
            control.should_save = True
            self.asked = self.asked if self.asked >= WEIGHT[STOP] else 0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.moved += 1

    on_substep_end = on_prediction_step = on_log = on_save = on_evaluate = on_step_begin

    def position(self) -> Position:
        """From another thread: what the meter marked last is what this rank has behind it."""
        marks = self.loop.meter.spans.marks if self.loop.meter is not None else []
        phase = NEXT.get(marks[-1][0], "the end of it") if marks else "the beginning"
        step = int(self.loop.state.global_step)
        return Position(step + 1, phase, (self.moved, step, len(marks)))

    # What is found.

    def raised(self, alarm: Alarm) -> None:
        """On rank 0, from the patrol's thread or the heart's."""
        alarms.append(self.folder, alarm)
        self.say(f"alarm: {alarm}")
        if alarm.kind not in ("stall", "non_finite", "failed") and alarm.level in WEIGHT:
            self.why = self.why if self.asked >= WEIGHT[STOP] else str(alarm)
            self.asked = max(self.asked, WEIGHT[alarm.level])

    def _stalled(self, alarm: Alarm) -> None:
        """On the lowest rank that lives, which need not be rank 0."""
        self.patrol.tell(alarm)
        if self.limits.stall == STOP:
            self.report()

    def _leave(self, message: str) -> None:
        """Nobody can be asked to stop in a stall: each rank ends itself, once it has said why."""
        problem = Problem(message, "watch.stall", f"the stacks of all ranks are in {self.folder}; resume with --resume")
        self.note("error", json.dumps({"problems": [problem.as_dict()], "code": 1, "time": 0}))
        self.note("code", "1")
        os._exit(1)

    def _walk(self) -> None:
        while not self.over.wait(EVERY_SECONDS):
            self.patrol.round()

    def _metrics(self) -> str:
        with self.patrol.lock:
            return prometheus.exposition(self.name, self.patrol.joined.latest, self.patrol.counts)
