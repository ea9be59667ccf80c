"""The Trainer callback that measures every step of a language model's training."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback

from windlass.observe.meter import batch
from windlass.observe.meter.experts import Balance
from windlass.observe.meter.rates import Rates
from windlass.observe.meter.step import Pending, StepProfiler, metered

TOKENS = batch.SUMS[1:]


class LLMStepProfiler(StepProfiler, TrainerCallback):  # type: ignore[misc]
    """Measures every optimizer step of any transformers or TRL Trainer and appends it to `steps-rank*.jsonl`.

    debug_freq: every that many steps, also wait for the GPU, sample every counter and look at the experts.
    seq_len: tokens per sequence, for the arithmetic of attention; default: the longest row of each batch.
    output_dir: the run folder; default: the Trainer's own.
    report_meta, script_name: shown in the report as they are.
    flops_per_token, recompute_flops_per_token: default: counted on the model.
    report: write report.html at every save and at the end, also where an exception ends the script.
    saves: write down the Trainer's saves; False where the loop saves in the background, and itself says when one ended.
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
        saves: bool = True,
    ) -> None:
        super().__init__(output_dir, "tokens", debug_freq, report_meta, script_name, report=report)
        self.rates = Rates(seq_len, flops_per_token, recompute_flops_per_token)
        self.saves = saves
        self.handles: list[RemovableHandle] = []
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
        folder, rank, ranks = self.folder or Path(args.output_dir), int(args.process_index), int(args.world_size)
        self._begin(folder, rank, torch.device(args.device))
        self.rates.measure(model, self.device, recomputes=bool(args.gradient_checkpointing))
        self.balance = Balance(model)
        self._attach(model, compiled=bool(args.torch_compile))
        self._describe(folder, rank, ranks, arithmetic=self.rates.as_dict())
        self._event("start", int(state.global_step))
        self.logged = int(state.global_step)
        self._go()

    @metered
    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self.spans.marks.append(("data", self.now()))
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
        self.spans.marks.append(("data", self.now()))

    @metered
    def _after_forward(self, module: nn.Module, _arguments: Any, _inputs: Any, output: Any) -> None:
        if not module.training or torch.compiler.is_compiling():
            return
        loss = batch.loss_of(output)
        if loss is not None:
            self.losses.append(loss)
        self.spans.marks.append(("forward", self.now()))

    @metered
    def on_substep_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        self.spans.marks.append(("backward", self.now()))

    @metered
    def on_pre_optimizer_step(self, _args: Any, _state: Any, _control: Any, optimizer: Any = None, **_: Any) -> None:
        self.spans.marks.append(("backward", self.now()))
        if optimizer is not None:
            rate = optimizer.param_groups[0]["lr"]
            self.noted.setdefault("learning_rate", rate)

    @metered
    def on_optimizer_step(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        self.spans.marks.append(("optimizer", self.now()))

    @metered
    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        self.spans.marks.append(("other", self.now()))
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
        names = ("loss" if self.losses else "", *TOKENS)
        sums = self._on_its_way(self._sums())
        self._queue(
            Pending(record, self.spans, sums, names, bool(control.should_log)), last=bool(control.should_training_stop)
        )
        self._fresh()

    @metered
    def on_log(self, _args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self.pending and self.pending[-1].log_follows:
            last = self.pending[-1]
            last.log_follows = False
            for name in ("loss", "grad_norm"):
                # The Trainer's loss is the mean since it last logged: this step's only if that was one step ago.
                single = name != "loss" or state.global_step == self.logged + 1
                if single and name in (logs or {}):
                    last.record.setdefault(name, logs[name])
            self.logged = int(state.global_step)
            self._flush(wait=bool(control.should_training_stop))  # trackers close before `on_train_end` comes here
        self._pause()

    @metered
    def on_evaluate(self, _args: Any, state: Any, _control: Any, metrics: Any = None, **_: Any) -> None:
        numbers = {name: value for name, value in (metrics or {}).items() if isinstance(value, int | float)}
        self._event("eval", int(state.global_step), **numbers)
        self._pause()

    @metered
    def on_save(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        if self.saves and self.events is not None:
            written = Path(args.output_dir, f"checkpoint-{state.global_step}").rglob("*")
            size = sum(path.stat().st_size for path in written if path.is_file())
            seconds = round(time.perf_counter() - self.idle, 3)
            self._event("save", int(state.global_step), seconds=seconds, bytes=size, ok=True)
        if self.page is not None:
            self.page.start()
        self._pause()

    @metered
    def on_train_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._event("end", int(state.global_step))
        self.close()
        self._last_page()

    def close(self) -> None:
        """Write what is still under way and let go of the model. Safe to call twice; for a loop's `finally`."""
        while self.handles:
            self.handles.pop().remove()
        super().close()

    def _attach(self, model: nn.Module, *, compiled: bool) -> None:
        if compiled:  # a hook would break the compiled graph in two
            self.sampler.unmeasured["forward_seconds, tokens"] = "torch_compile: hooks would split the graph"
        elif model is not None:
            before = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
            after = model.register_forward_hook(self._after_forward, with_kwargs=True)
            self.handles += [before, after]

    def _counters(self) -> dict[str, Any]:
        fields = super()._counters()
        if self.debugging:
            balance = self.balance.stop()
            if balance is not None:
                fields["experts"] = balance
        return fields

    def _sums(self) -> Tensor | None:
        """This step's counts in one small tensor."""
        if not self.counts:
            return None
        counts = torch.stack(self.counts)
        loss = batch.step_loss(self.losses, counts, summed=self.summed)
        return torch.cat([loss.reshape(1), counts.sum(0)])

    def _complete(self, record: dict[str, Any]) -> None:
        counted = {name: int(record[name]) for name in TOKENS if name in record}
        if counted:
            counted["masked_tokens"] = counted["tokens"] - counted["supervised_tokens"]
        record |= counted
        record |= self.rates.of(record)
