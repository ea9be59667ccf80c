"""The watch inside the ranks of a windlass training run, and of a script that uses StepProfiler."""

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self

import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from windlass import run_folder
from windlass.errors import Problem, RunError
from windlass.files import WriteGuard, read_json
from windlass.observe.recorder import Recorder
from windlass.observe.watch.detectors import Alarm, AlarmError
from windlass.observe.watch.heartbeat import Heartbeat, Position, read_recent_calls
from windlass.observe.watch.monitor import CHECKPOINT, OFF, STOP, Monitor, report_alarm
from windlass.runfile import RunFile, ScriptRun

REQUESTS: Final = {CHECKPOINT: 1, STOP: 1000}  # what rank 0 adds to a step's all-reduce
SCRIPT_STALL_SECONDS: Final = 300.0  # for a script that sets none: half of torch's own timeout with NCCL


class RunWatch:
    """Watches a training loop: `with RunWatch(...) as watch`. Alarms are logged, printed, and acted on by all ranks.

    Each step sums `request` over the ranks, and passes the sum to `act`.

    say: prints, on rank 0. report: writes the run's page. on_stall: called on each rank before a stall ends it.
    """

    def __init__(
        self,
        run: RunFile,
        recorder: Recorder,
        *,
        vocabulary: int,
        unigram_loss: float | None,
        say: Callable[[str], None],
        report: Callable[[], None],
        on_stall: Callable[[Problem], None],
    ) -> None:
        self.folder = recorder.folder
        self.rank = recorder.rank
        self.ranks = recorder.ranks
        self.limits = run.watch
        self.recorder = recorder
        name = run.name or ""
        if name and run_folder.find_sweep(self.folder):  # else all trials of a sweep have one name
            name += f"-{self.folder.name}"
        self.name = name or self.folder.resolve().name
        self.say = say
        self.report = report
        self.on_stall = on_stall
        self.request = 0  # rank 0's request to all ranks; 0 on the others
        self.stopped_by = ""
        network = str(run.cluster.network)
        self.monitor = Monitor(self.folder, self.limits, self.ranks, network=network, raised=self._on_alarm)
        history = self.monitor.history
        history.vocabulary = vocabulary
        history.unigram_loss = None if run.objective.of_pairs else unigram_loss
        history.pairs = run.objective.of_pairs
        history.beta = run.dpo.beta if run.objective.has_reference else None
        recorder.unwritten.say = self._on_write_error
        self.heartbeat = Heartbeat(
            self.folder,
            self.rank,
            self.ranks,
            None if self.limits.stall == OFF else self.limits.stall_seconds or run.train.ddp_timeout / 2,
            recorder.position,
            self._on_stall,
            self._leave if self.limits.stall == STOP else None,
            read_flight_recorder,
            recorder.unwritten,
        )

    def serve(self) -> None:
        """Serve the page for Prometheus, on rank 0."""
        self.monitor.serve(self.name)

    def __enter__(self) -> Self:
        return self

    def start(self, step: int, max_steps: int) -> None:
        """Start watching a loop that begins after `step`."""
        self.monitor.from_step = step
        self.monitor.history.max_steps = max_steps
        self.heartbeat.start()
        if self.rank == 0:
            self.monitor.thread.start()

    def act(self, total: float) -> bool:
        """Act on the all-reduced `request`; return whether to save a checkpoint. Raise AlarmError to stop."""
        if total >= REQUESTS[STOP]:
            why = [self.stopped_by]
            if self.ranks > 1:
                dist.broadcast_object_list(why, src=0)
            hint = "see alarms.jsonl and the report; nothing of these last steps was saved"
            raise AlarmError("", why[0], "watch", hint, logged=True)
        if total and self.request < REQUESTS[STOP]:
            self.request = 0
        return total > 0

    def finish(self) -> None:
        """Check once more after the last step, on all ranks. Raise AlarmError if the run failed at its end."""
        if self.ranks > 1:
            dist.barrier()  # all have written their last step
        if self.rank == 0:
            self.monitor.close()
        requests = [self.request]
        if self.ranks > 1:
            dist.broadcast_object_list(requests, src=0)
        self.act(requests[0])

    def __exit__(self, _kind: type | None, error: BaseException | None, *_: Any) -> None:
        self.heartbeat.close()
        if self.rank == 0:
            self.monitor.close()
            if isinstance(error, RunError) and not (isinstance(error, AlarmError) and error.logged):
                kind = error.kind if isinstance(error, AlarmError) else "failed"
                self.monitor.raise_alarm(
                    Alarm(kind, self.recorder.position().step, error.problems[0].problem, level=STOP)
                )
            self.report()

    def _on_alarm(self, alarm: Alarm) -> None:
        """Handle an alarm on rank 0, in the monitor's thread or the heartbeat's."""
        report_alarm(self.folder, alarm, self.say)
        if alarm.kind not in ("stall", "non_finite", "failed") and alarm.level in REQUESTS:
            if self.request < REQUESTS[STOP]:
                self.stopped_by = str(alarm)
            self.request = max(self.request, REQUESTS[alarm.level])

    def _on_write_error(self, message: str) -> None:
        """Report a failed write on its own rank, whose console may be quiet."""
        alarm = Alarm("disk", self.recorder.position().step, message, self.rank)
        self.monitor.counts[alarm.kind] += 1
        report_alarm(self.folder, alarm, self.say if self.rank == 0 else _print)

    def _on_stall(self, alarm: Alarm) -> None:
        """Report a stall on the lowest live rank, which need not be rank 0."""
        self.monitor.raise_alarm(alarm)
        if self.limits.stall == STOP:
            self.report()

    def _leave(self, message: str) -> None:
        """End this rank: in a stall ranks can't be asked to stop."""
        hint = f"the stacks of all ranks are in {self.folder}; continue with --resume"
        self.on_stall(Problem(message, "watch.stall", hint, "stopped-by-watch"))
        os._exit(1)


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def script_heartbeat(folder: Path, rank: int, ranks: int, position: Callable[[], Position]) -> Heartbeat | None:
    """Return a script rank's heartbeat as configured by the run file that started it; None if none did."""
    try:
        limits = ScriptRun.model_validate(read_json(folder / run_folder.MANIFEST)["run"]).watch
    except (ValueError, KeyError):
        return None

    def stalled(alarm: Alarm) -> None:
        report_alarm(folder, replace(alarm, level=limits.stall), _print)

    def leave(message: str) -> None:
        _print(f"rank {rank} exits: {message}")
        os._exit(1)

    seconds = None if limits.stall == OFF else float(limits.stall_seconds or SCRIPT_STALL_SECONDS)
    exit_ = leave if limits.stall == STOP else None
    heartbeat = Heartbeat(
        folder, rank, ranks, seconds, position, stalled, exit_, read_flight_recorder, WriteGuard(_print)
    )
    heartbeat.start()
    return heartbeat


def read_flight_recorder() -> dict[str, Any]:
    """Return this rank's last collectives. NCCL has its own recorder, which numbers its calls separately."""
    found: dict[str, Any] = {}
    for prefix, dump in (("", "_dump_fr_trace_json"), ("NCCL ", "_dump_nccl_trace_json")):
        with suppress(AttributeError, ValueError, RuntimeError):  # this torch has no recorder
            calls = read_recent_calls(json.loads(getattr(c10d, dump)()))
            found |= {f"{prefix}{group}": about for group, about in calls.items()}
    return found
