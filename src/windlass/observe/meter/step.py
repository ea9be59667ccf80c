"""Measures a training loop step by step and writes each step down at once. Needs torch, and no other library."""

from __future__ import annotations

import atexit
import functools
import json
import math
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TextIO, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from windlass.errors import UserError
from windlass.observe import steps
from windlass.observe.meter.clock import Mark, Spans, Waits, gpu_mark, host_mark
from windlass.observe.meter.page import Page
from windlass.observe.meter.sample import Sampler
from windlass.observe.meter.summary import hardware
from windlass.observe.watch.heartbeat import Heartbeat, Position
from windlass.observe.watch.pulse import NEXT, of_script

BUDGET: Final = 0.005  # share of the run's time that sampling counters may take
MOST_PENDING: Final = 64  # steps whose GPU times may be under way before the meter waits for them
MARKED: Final = ("data", "forward", "backward", "optimizer", "other")  # phases that a loop may name

Batch = TypeVar("Batch")


@dataclass(slots=True)
class Pending:
    """A step that is over for the host; its GPU times and `late` values may still be under way."""

    record: dict[str, Any]
    spans: Spans
    late: Tensor | None = None
    names: tuple[str, ...] = ()  # of the late values; an empty one is left out
    log_follows: bool = False  # the Trainer is about to tell its loss and gradient norm


def metered(handler: Callable[..., None]) -> Callable[..., None]:
    """Counts what the handler itself costs."""

    @functools.wraps(handler)
    def timed(self: StepProfiler, *arguments: Any, **named: Any) -> None:
        start = time.perf_counter()
        try:
            handler(self, *arguments, **named)
        finally:
            self.cost += time.perf_counter() - start

    return timed


class StepProfiler:
    """Measures every optimizer step of any loop in PyTorch and appends it to `steps-rank*.jsonl`.

        meter = StepProfiler(unit="images", debug_freq=10)
        with meter:                                       # once the ranks have met, right before the loop
            for epoch in range(epochs):
                for images, targets in meter.batches(loader):  # waiting for a batch is `data`
                    images = images.to(device)
                    meter.mark("data")                    # what was done since the last mark was that
                    loss = criterion(model(images), targets)
                    meter.mark("forward")
                    loss.backward()
                    meter.mark("backward")
                    optimizer.step()
                    optimizer.zero_grad()
                    meter.mark("optimizer")
                    meter.step(items=len(images), loss=loss, learning_rate=rate, epoch=epoch)
                meter.event("eval", eval_loss=…, map=…)   # what was done since the last step was no training
                meter.event("save")

    With accumulation, several rounds of data, forward and backward come before one `optimizer` and one `step`, whose
    `items` are those of all rounds. Loss and gradient norm may be tensors of the device: nobody waits for them.
    Time in collectives is found by itself and taken out of the phase in which it fell.

    output_dir: the run folder; default: that of the run file that started the script.
    unit: what is counted, in the plural: `images` becomes `images` and `images_per_second` of every step.
    debug_freq: every that many steps, also wait for the GPU and sample every counter; 0: never.
    report_meta, script_name: shown in the report as they are.
    from_step: steps that were made before, where the loop continues from a checkpoint.
    report: write report.html at every save and at the end.
    """

    def __init__(
        self,
        output_dir: str | Path | None = None,
        unit: str = "items",
        debug_freq: int = 25,
        report_meta: Mapping[str, Any] | None = None,
        script_name: str | None = None,
        *,
        from_step: int = 0,
        report: bool = True,
    ) -> None:
        if unit != "tokens" and (not re.fullmatch("[a-z][a-z_]{0,30}", unit) or f"{unit}_per_second" in steps.FIELDS):
            raise UserError(f"{unit!r} is no name for what is counted", "StepProfiler", "small letters: images, clips")
        self.debug_freq = max(int(debug_freq or 0), 0)
        self.folder = Path(output_dir) if output_dir is not None else None
        self.about = {"script_name": script_name or "", "report_meta": dict(report_meta or {})}
        self.unit, self.made = unit, from_step
        self.report = report
        self.page: Page | None = None
        self.steps: TextIO | None = None
        self.events: Path | None = None  # the folder, on rank 0 while it trains
        self.pending: deque[Pending] = deque()
        self.waits: Waits | None = None
        self.latest: dict[str, Any] = {}  # the last record written
        self.cost = self.sampling = 0.0
        self.debugging = False
        self.heart: Heartbeat | None = None
        self.told = 0  # events

    # What a loop calls.

    def __enter__(self) -> Self:
        folder = self.folder or Path(os.environ.get(steps.OUTPUT_DIR, ""))
        if folder == Path():
            hint = "give output_dir, or start the script with `windlass train`"
            raise UserError("no folder to write into", "StepProfiler", hint)
        met = dist.is_available() and dist.is_initialized()
        if not met and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            hint = "enter it after torch.distributed.init_process_group"
            raise UserError("the ranks have not met yet, so nobody knows which one this is", "StepProfiler", hint)
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if met else (0, 1)
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self._begin(folder, rank, device)
        self._describe(folder, rank, ranks)
        self._event("start", self.made)
        self._go()
        self.heart = of_script(folder, rank, ranks, self._position)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._event("end", self.made)
        if self.heart is not None:
            self.heart.close()
        self.close()
        self._last_page()

    def _position(self) -> Position:
        """Asked for by the heartbeat, from its own thread."""
        marks = self.spans.marks
        return Position(self.made + 1, NEXT.get(marks[-1][0], "the end of it"), (self.made, self.told, len(marks)))

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The loader's batches. What lies between two rounds over a loader (setting up, evaluating) is a pause."""
        if self._open().marks[-1][0] == "start":
            self._pause()
        for batch in loader:
            self.mark("data")
            yield batch

    @metered
    def mark(self, phase: str) -> None:
        """What was done since the mark before was `phase`."""
        if phase not in MARKED:
            raise UserError(f"{phase!r} is no phase of a step", "StepProfiler.mark", f"one of {', '.join(MARKED)}")
        self._open().marks.append((phase, self.now()))

    @metered
    def step(
        self,
        items: int,
        *,
        loss: float | Tensor | None = None,
        grad_norm: float | Tensor | None = None,
        learning_rate: float | None = None,
        epoch: float | None = None,
    ) -> None:
        """The optimizer step is over: its line is written as soon as its times are known."""
        self._open().marks.append(("other", self.now()))
        self.made += 1
        told = {"loss": loss, "grad_norm": grad_norm}
        late = {name: value.detach() for name, value in told.items() if isinstance(value, Tensor)}
        record: dict[str, Any] = {
            "step": self.made,
            "time": round(time.time(), 3),
            "epoch": epoch,
            "micro_batches": sum(1 for phase, _ in self.spans.marks if phase == "backward"),
            self.unit: int(items),
            "learning_rate": learning_rate,
            **{name: float(value) for name, value in told.items() if isinstance(value, int | float)},
            **self._sample(),
        }
        stacked = torch.stack([value.double().reshape(()) for value in late.values()]) if late else None
        self._queue(Pending(record, self.spans, self._on_its_way(stacked), tuple(late)))
        self.debugging = bool(self.debug_freq) and self.made % self.debug_freq == 0

    @metered
    def event(self, kind: str, **numbers: float) -> None:
        """An evaluation (`eval`, best with `eval_loss`), a `save`, or another word of the script's."""
        self.told += 1
        self._event(kind, self.made, **numbers)
        if kind == "save" and self.page is not None:
            self.page.start()
        self._pause()

    def close(self) -> None:
        """Write what is still under way. Safe to call twice."""
        for each in self.pending:
            each.log_follows = False
        if self.steps is not None:
            self._flush(wait=True)
        if self.waits is not None:
            self.waits.remove()
        if self.steps is not None:
            self.steps.close()
        self.steps = self.events = None

    # What every meter does.

    def _open(self) -> Spans:
        if self.steps is None:
            raise UserError(
                "nothing is measured yet, or no longer", "StepProfiler", "write `with meter:` around the loop"
            )
        return self.spans

    def _begin(self, folder: Path, rank: int, device: torch.device) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.steps = (folder / steps.STEPS.format(rank=rank)).open("a", buffering=1, encoding="utf-8")
        self.events = folder if rank == 0 else None
        self.device = device
        self.now: Callable[[], Mark] = gpu_mark if device.type == "cuda" else host_mark
        self.sampler = Sampler(device)
        if self.report and rank == 0:
            self.page = Page(folder)
            atexit.register(self._last_page)  # a script that an exception ends has a report too
        stream = torch.cuda.current_stream if device.type == "cuda" else lambda: None
        self.waits = Waits(self.now, self._waited, stream)
        self.waits.install()

    def _go(self) -> None:
        """From here on time counts."""
        self.debugging = bool(self.debug_freq)
        self.begun = self.idle = time.perf_counter()
        self.spans = Spans([("start", self.now())])

    def _waited(self, start: Mark, end: Mark) -> None:
        self.spans.waits.append((len(self.spans.marks), start, end))

    def _describe(self, folder: Path, rank: int, ranks: int, **more: Any) -> None:
        about = {
            **self.about,
            "unit": self.unit,
            "rank": rank,
            "ranks": ranks,
            "hardware": hardware(self.device),
            **more,
            "unmeasured": self.sampler.unmeasured,
        }
        text = json.dumps(about, indent=2, default=str, ensure_ascii=False)
        (folder / steps.METER.format(rank=rank)).write_text(text + "\n", encoding="utf-8")
        if rank == 0 and self.device.type == "cuda":
            for name, why in self.sampler.unmeasured.items():
                print(f"not measured: {name}: {why}", file=sys.stderr)

    def _event(self, kind: str, step: int, **fields: Any) -> None:
        if self.events is not None:
            steps.event(self.events, kind, step, **fields)

    def _last_page(self) -> None:
        if self.page is not None:
            page, self.page = self.page, None
            atexit.unregister(self._last_page)
            page.finish()

    def _pause(self) -> None:
        """Everything since the step ended was logging, evaluating or saving."""
        if self.steps is not None:
            self.spans.marks.append(("pause", self.now()))
            self.idle = time.perf_counter()  # what the loop does from here on is another evaluation or save

    def _sample(self) -> dict[str, Any]:
        """Counters, as often as the budget allows, and always in a step that is looked at closely."""
        start = time.perf_counter()
        if not self.debugging and self.sampling > BUDGET * (start - self.begun):
            return {}
        fields = self._counters()
        self.sampling += time.perf_counter() - start
        return fields

    def _counters(self) -> dict[str, Any]:
        return self.sampler.sample()

    def _on_its_way(self, values: Tensor | None) -> Tensor | None:
        """Small values of the device on their way to the host: nobody waits for them."""
        if values is None or values.device.type != "cuda":
            return values
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        self.spans.marks.append(("other", self.now()))  # passed only when the copy has arrived
        return host

    def _queue(self, done: Pending, *, last: bool = False) -> None:
        self.pending.append(done)
        self.spans = Spans([("start", self.now())])
        self.idle = time.perf_counter()
        if self.debugging and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._flush(wait=last or len(self.pending) > MOST_PENDING)

    def _flush(self, wait: bool = False) -> None:
        """Write every step, in order, whose times and values have arrived."""
        if wait and self.pending and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        while self.pending and not self.pending[0].log_follows and (wait or self.pending[0].spans.passed()):
            self._write(self.pending.popleft())

    def _write(self, done: Pending) -> None:
        record = done.record
        seconds = done.spans.seconds()
        pause = seconds.pop("pause", 0.0)
        record["step_seconds"] = sum(seconds.values())
        record |= {f"{phase}_seconds": seconds.get(phase, 0.0) for phase in steps.PHASES}
        record["pause_seconds"] = pause
        if done.late is not None:
            for name, value in zip(done.names, done.late.tolist(), strict=True):
                if name:
                    record.setdefault(name, value)
        self._complete(record)
        record["meter_seconds"], self.cost = self.cost, 0.0
        fields = (*steps.FIELDS, *steps.counted(self.unit))
        self.latest = {name: _short(record[name]) for name in fields if record.get(name) is not None}
        odd = [name for name in ("loss", "grad_norm") if not math.isfinite(record.get(name) or 0.0)]
        if odd:  # JSON has no NaN
            self.latest |= {"non_finite": odd, **dict.fromkeys(odd)}
        if self.steps is not None:
            self.steps.write(json.dumps(self.latest) + "\n")

    def _complete(self, record: dict[str, Any]) -> None:
        """What follows from the times."""
        if record["step_seconds"]:
            record[f"{self.unit}_per_second"] = record[self.unit] / record["step_seconds"]


def _short(value: Any) -> Any:
    """Measured floats to nine digits: more is noise, and half of the file. Dates need theirs."""
    return float(f"{value:.9g}") if isinstance(value, float) and abs(value) < 1e6 else value
