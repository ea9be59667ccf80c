"""The Trainer callback that measures every step and writes it down at once."""

from __future__ import annotations

import functools
import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback

from windlass import steps
from windlass.meter import batch
from windlass.meter.clock import Mark, Spans, Waits, gpu_mark, host_mark
from windlass.meter.experts import Balance
from windlass.meter.page import Page
from windlass.meter.rates import Rates
from windlass.meter.sample import Sampler
from windlass.meter.summary import hardware

BUDGET = 0.005  # share of the run's time that sampling counters may take
MOST_PENDING = 64  # steps whose GPU times may be under way before the meter waits for them


@dataclass(slots=True)
class Pending:
    """A step that is over for the host; its GPU times and sums may still be under way."""

    record: dict[str, Any]
    spans: Spans
    sums: Tensor | None  # as batch.SUMS names them
    has_loss: bool  # a model that returns none: the loss is known from the loop or the log, or not at all
    log_follows: bool = False  # the Trainer is about to tell its loss and gradient norm


def metered(handler: Callable[..., None]) -> Callable[..., None]:
    """Counts what the handler itself costs."""

    @functools.wraps(handler)
    def timed(self: LLMStepProfiler, *arguments: Any, **named: Any) -> None:
        start = time.perf_counter()
        try:
            handler(self, *arguments, **named)
        finally:
            self.cost += time.perf_counter() - start

    return timed


class LLMStepProfiler(TrainerCallback):  # type: ignore[misc]
    """Measures every optimizer step of any transformers or TRL Trainer and appends it to `steps-rank*.jsonl`.

    debug_freq: every that many steps, also wait for the GPU, sample every counter and look at the experts.
    seq_len: tokens per sequence, for the arithmetic of attention; default: the longest row of each batch.
    output_dir: the run folder; default: the Trainer's own.
    report_meta, script_name: shown in the report as they are.
    flops_per_token, recompute_flops_per_token: default: counted on the model.
    report: write report.html at every save and at the end.
    """

    def __init__(
        self,
        debug_freq: int = 25,
        seq_len: int | None = None,
        output_dir: str | Path | None = None,
        report_meta: Mapping[str, Any] | None = None,
        script_name: str | None = None,
        *,
        flops_per_token: float | None = None,
        recompute_flops_per_token: float | None = None,
        report: bool = True,
    ) -> None:
        self.debug_freq = max(int(debug_freq or 0), 0)
        self.folder = Path(output_dir) if output_dir is not None else None
        self.about = {"script_name": script_name or "", "report_meta": dict(report_meta or {})}
        self.rates = Rates(seq_len, flops_per_token, recompute_flops_per_token)
        self.report = report
        self.page: Page | None = None
        self.steps: TextIO | None = None
        self.events: TextIO | None = None
        self.pending: deque[Pending] = deque()
        self.handles: list[RemovableHandle] = []
        self.waits: Waits | None = None
        self.latest: dict[str, Any] = {}  # the last record written
        self.cost = self.sampling = 0.0
        self._fresh()

    def _fresh(self) -> None:
        self.noted: dict[str, Any] = {}
        self.counts: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.sequences = self.longest = 0
        self.summed = False  # the losses are shares of the step's loss, not means of their own

    def note(self, **fields: Any) -> None:
        """What the training loop knows better than hooks do, for the step that is running: loss, grad_norm …"""
        self.noted.update(fields)

    # What the Trainer calls, in the order of its loop.

    def on_train_begin(self, args: Any, state: Any, _control: Any, model: Any = None, **_: Any) -> None:
        self.close()
        folder = self.folder or Path(args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        rank = int(args.process_index)
        self.steps = (folder / steps.STEPS.format(rank=rank)).open("a", buffering=1, encoding="utf-8")
        self.events = (folder / steps.EVENTS).open("a", buffering=1, encoding="utf-8") if rank == 0 else None
        self.device = torch.device(args.device)
        self.mark: Callable[[], Mark] = gpu_mark if self.device.type == "cuda" else host_mark
        self.sampler = Sampler(self.device)
        self.rates.measure(model, self.device, recomputes=bool(args.gradient_checkpointing))
        self.balance = Balance(model)
        self.page = Page(folder) if self.report and rank == 0 else None
        self._attach(model, compiled=bool(args.torch_compile))
        self._describe(folder, rank, int(args.world_size))
        self._event("start", state)
        self.logged = int(state.global_step)
        self.begun = time.perf_counter()
        self.spans = Spans([("start", self.mark())])

    @metered
    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self.spans.marks.append(("data", self.mark()))
        self.debugging = bool(self.debug_freq) and int(state.global_step) % self.debug_freq == 0
        if self.debugging:
            self.balance.start()

    @metered
    def _before_forward(self, module: nn.Module, _arguments: Any, inputs: dict[str, Any]) -> None:
        if not module.training or torch.compiler.is_compiling():
            return
        counted = batch.counts(inputs)
        if counted is not None:
            self.counts.append(counted)
            ids = inputs["input_ids"]
            self.sequences += ids.shape[0] if ids.dim() > 1 else 1
            self.longest = max(self.longest, ids.shape[-1])
        self.summed = inputs.get("num_items_in_batch") is not None
        self.spans.marks.append(("data", self.mark()))

    @metered
    def _after_forward(self, module: nn.Module, _arguments: Any, _inputs: Any, output: Any) -> None:
        if not module.training or torch.compiler.is_compiling():
            return
        loss = batch.loss_of(output)
        if loss is not None:
            self.losses.append(loss)
        self.spans.marks.append(("forward", self.mark()))

    @metered
    def on_substep_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        self.spans.marks.append(("backward", self.mark()))

    @metered
    def on_pre_optimizer_step(self, _args: Any, _state: Any, _control: Any, optimizer: Any = None, **_: Any) -> None:
        self.spans.marks.append(("backward", self.mark()))
        if optimizer is not None:
            rate = optimizer.param_groups[0]["lr"]
            self.noted.setdefault("learning_rate", rate)

    @metered
    def on_optimizer_step(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        self.spans.marks.append(("optimizer", self.mark()))

    @metered
    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        self.spans.marks.append(("other", self.mark()))
        record: dict[str, Any] = {
            "step": int(state.global_step),
            "time": round(time.time(), 3),
            "epoch": state.epoch,
            "micro_batches": sum(1 for phase, _ in self.spans.marks if phase == "backward"),
            "sequences": self.sequences,
            **self._sample(),
            **self.noted,
            "longest": self.longest,
        }
        self.pending.append(Pending(record, self.spans, self._sums(), bool(self.losses), bool(control.should_log)))
        self._fresh()
        self.spans = Spans([("start", self.mark())])
        if self.debugging and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._flush(wait=len(self.pending) > MOST_PENDING)

    @metered
    def on_log(self, _args: Any, state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
        if self.pending and self.pending[-1].log_follows:
            last = self.pending[-1]
            last.log_follows = False
            for name in ("loss", "grad_norm"):
                # The Trainer's loss is the mean since it last logged: this step's only if that was one step ago.
                single = name != "loss" or state.global_step == self.logged + 1
                if single and name in (logs or {}):
                    last.record.setdefault(name, logs[name])
            self.logged = int(state.global_step)
            self._flush()
        self._pause()

    @metered
    def on_evaluate(self, _args: Any, state: Any, _control: Any, metrics: Any = None, **_: Any) -> None:
        numbers = {name: value for name, value in (metrics or {}).items() if isinstance(value, int | float)}
        self._event("eval", state, **numbers)
        self._pause()

    @metered
    def on_save(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._event("save", state)
        if self.page is not None:
            self.page.start()
        self._pause()

    @metered
    def on_train_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._event("end", state)
        page = self.page
        self.close()
        if page is not None:
            page.finish()

    def close(self) -> None:
        """Write what is still under way and let go of the model. Safe to call twice; for a loop's `finally`."""
        for each in self.pending:
            each.log_follows = False
        if self.steps is not None:
            self._flush(wait=True)
        while self.handles:
            self.handles.pop().remove()
        if self.waits is not None:
            self.waits.remove()
        for handle in (self.steps, self.events):
            if handle is not None:
                handle.close()
        self.steps = self.events = self.page = None

    def _attach(self, model: nn.Module, *, compiled: bool) -> None:
        if compiled:  # a hook would break the compiled graph in two
            self.sampler.unmeasured["forward_seconds, tokens"] = "train.torch_compile: hooks would split the graph"
        elif model is not None:
            before = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
            after = model.register_forward_hook(self._after_forward, with_kwargs=True)
            self.handles += [before, after]
        self.waits = Waits(self.mark, self._waited)
        self.waits.install()

    def _waited(self, start: Mark, end: Mark) -> None:
        self.spans.waits.append((len(self.spans.marks), start, end))

    def _describe(self, folder: Path, rank: int, world: int) -> None:
        about = {
            **self.about,
            "rank": rank,
            "ranks": world,
            "hardware": hardware(self.device),
            "arithmetic": self.rates.as_dict(),
            "unmeasured": self.sampler.unmeasured,
        }
        text = json.dumps(about, indent=2, default=str, ensure_ascii=False)
        (folder / steps.METER.format(rank=rank)).write_text(text + "\n", encoding="utf-8")
        if rank == 0 and self.device.type == "cuda":
            for name, why in self.sampler.unmeasured.items():
                print(f"not measured: {name}: {why}", file=sys.stderr)

    def _event(self, kind: str, state: Any, **fields: Any) -> None:
        if self.events is not None:
            event = {"time": round(time.time(), 3), "step": int(state.global_step), "kind": kind, **fields}
            self.events.write(json.dumps(event, default=str) + "\n")

    def _pause(self) -> None:
        """Everything since the step ended was logging, evaluating or saving."""
        if self.steps is not None:
            self.spans.marks.append(("pause", self.mark()))

    def _sample(self) -> dict[str, Any]:
        """Counters, as often as the budget allows, and always in a step that is looked at closely."""
        start = time.perf_counter()
        if not self.debugging and self.sampling > BUDGET * (start - self.begun):
            return {}
        fields = self.sampler.sample()
        if self.debugging:
            balance = self.balance.stop()
            if balance is not None:
                fields["experts"] = balance
        self.sampling += time.perf_counter() - start
        return fields

    def _sums(self) -> Tensor | None:
        """This step's counts in one small tensor on its way to the host."""
        if not self.counts:
            return None
        counts = torch.stack(self.counts)
        loss = batch.step_loss(self.losses, counts, summed=self.summed)
        sums = torch.cat([loss.reshape(1), counts.sum(0)])
        if sums.device.type != "cuda":
            return sums
        host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
        host.copy_(sums, non_blocking=True)
        self.spans.marks.append(("other", self.mark()))  # passed only when the copy has arrived
        return host

    def _flush(self, wait: bool = False) -> None:
        """Write every step, in order, whose times and sums have arrived."""
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
        if done.sums is not None:
            for name, value in zip(batch.SUMS, done.sums.tolist(), strict=True):
                if name != "loss" or done.has_loss:
                    record.setdefault(name, value if name == "loss" else int(value))
            record["masked_tokens"] = record["tokens"] - record["supervised_tokens"]
        record |= self.rates.of(record)
        record["meter_seconds"], self.cost = self.cost, 0.0
        self.latest = {name: _short(record[name]) for name in steps.FIELDS if record.get(name) is not None}
        odd = [name for name in ("loss", "grad_norm") if not math.isfinite(record.get(name) or 0.0)]
        if odd:  # JSON has no NaN
            self.latest |= {"non_finite": odd, **dict.fromkeys(odd)}
        if self.steps is not None:
            self.steps.write(json.dumps(self.latest) + "\n")


def _short(value: Any) -> Any:
    """Measured floats to nine digits: more is noise, and half of the file. Dates need theirs."""
    return float(f"{value:.9g}") if isinstance(value, float) and abs(value) < 1e6 else value
