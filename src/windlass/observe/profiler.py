"""Step profilers for users' own scripts: `StepProfiler` for any PyTorch loop, `LLMStepProfiler` for a Trainer."""

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from windlass import run_folder
from windlass.errors import UserError
from windlass.observe import steps
from windlass.observe.background import BackgroundReport
from windlass.observe.flops import Flops, RateMeter, count_flops
from windlass.observe.recorder import PAUSE, Recorder, mean_loss
from windlass.observe.watch.heartbeat import Heartbeat
from windlass.observe.watch.run import script_heartbeat

BatchType = TypeVar("BatchType")


class _Profiler:
    """The base of both profilers: settings, the recorder during a training run, and the report."""

    def __init__(
        self,
        output_dir: str | Path | None,
        debug_freq: int | None,
        report_meta: Mapping[str, Any] | None,
        script_name: str | None,
        report: bool,
    ) -> None:
        self.folder = Path(output_dir) if output_dir is not None else None
        self.debug_freq = max(int(debug_freq or 0), 0)
        self.about = {"script_name": script_name or "", "report_meta": dict(report_meta or {})}
        self.report = report
        self.recorder: Recorder | None = None
        self.background: BackgroundReport | None = None

    def _record(self, folder: Path, rank: int, ranks: int, device: torch.device | str, **options: Any) -> Recorder:
        """Create the recorder, not started yet."""
        if self.report and rank == 0:
            self.background = BackgroundReport(folder, at_exit=True)
        options |= {"sample_every": self.debug_freq, "about": self.about}
        self.recorder = Recorder(folder, rank, ranks, device, **options)
        return self.recorder

    def close(self) -> None:
        """Write what is still under way. Safe to call twice."""
        if self.recorder is not None:
            self.recorder.close()

    def _write_report(self) -> None:
        if self.background is not None:
            self.background.finish()


class StepProfiler(_Profiler):
    """Measures every optimizer step of any PyTorch loop into `steps-rank*.jsonl`; docs/scripts.md shows a loop.

    output_dir: the run folder; default: that of the run file that started the script.
    unit: what is counted, in the plural: "images" counts images and images_per_second of every step.
    debug_freq: every that many steps, also wait for the GPU and sample every counter; 0: never.
    report_meta, script_name: shown in the report as they are.
    from_step: steps that were trained before, if the loop continues from a checkpoint.
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
            problem = f"{unit!r} can't name what is counted"
            raise UserError(problem, "StepProfiler", "small letters: images, clips", "wrong-value")
        super().__init__(output_dir, debug_freq, report_meta, script_name, report)
        self.unit = unit
        self.steps_done = from_step
        self.heartbeat: Heartbeat | None = None

    def __enter__(self) -> Self:
        folder = self.folder or Path(os.environ.get(run_folder.OUTPUT_DIR, ""))
        if folder == Path():
            hint = "pass output_dir, or start the script with `windlass train run.yaml`"
            raise UserError("no folder to write into", "StepProfiler", hint, "no-folder")
        connected = dist.is_available() and dist.is_initialized()
        if not connected and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            problem = "the ranks are not connected yet, so the number of this one is unknown"
            hint = "enter it after torch.distributed.init_process_group"
            raise UserError(problem, "StepProfiler", hint, "not-connected")
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if connected else (0, 1)
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        recorder = self._record(folder, rank, ranks, device, unit=self.unit)
        recorder.start(self.steps_done)
        self.heartbeat = script_heartbeat(folder, rank, ranks, recorder.position)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self._running().event("end", self.steps_done)
        if self.heartbeat is not None:
            self.heartbeat.close()
        self.close()
        self._write_report()

    @property
    def latest(self) -> dict[str, Any]:
        """Return the last record that was written."""
        return self.recorder.latest if self.recorder is not None else {}

    def batches(self, loader: Iterable[BatchType]) -> Iterator[BatchType]:
        """Yield the loader's batches. Time between two passes over a loader (setup, evaluation) is a pause."""
        if self._running().between_steps:
            self.mark(PAUSE)
        for batch in loader:
            self.mark("data")
            yield batch

    def mark(self, phase: str) -> None:
        """Count the time since the last mark as `phase`, one of steps.PHASES."""
        self._running().mark(phase)

    def step(
        self,
        items: int,
        *,
        loss: float | Tensor | None = None,
        grad_norm: float | Tensor | None = None,
        learning_rate: float | None = None,
        epoch: float | None = None,
    ) -> None:
        """End the optimizer step: its line is written as soon as its times are known."""
        self.steps_done += 1
        values: dict[str, Any] = {"loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate, "epoch": epoch}
        values[self.unit] = int(items)
        self._running().end_step(self.steps_done, **values)

    def event(self, kind: str, **numbers: float) -> None:
        """Log an evaluation (`eval`, best with `eval_loss`), a `save`, or another event of the script's."""
        self._running().event(kind, self.steps_done, **numbers)
        if kind == "save" and self.background is not None:
            self.background.start()

    def _running(self) -> Recorder:
        if self.recorder is None:
            hint = "write `with meter:` around the loop"
            raise UserError("nothing is measured yet", "StepProfiler", hint, "nothing-measured")
        return self.recorder


class LLMStepProfiler(_Profiler):
    """Callback of any transformers or TRL Trainer: measures every optimizer step into `steps-rank*.jsonl`.

    debug_freq: every that many steps, also wait for the GPU, sample every counter and the expert balance.
    seq_len: tokens per sequence, for the arithmetic of attention; default: the longest row of each batch.
    output_dir: the run folder; default: the Trainer's own.
    report_meta, script_name: shown in the report as they are.
    flops_per_token, recompute_flops_per_token: default: counted on the model.
    report: write report.html at every save and at the end, also if an exception ends the script.
    """

    # Events of the Trainer that only end a phase.
    ENDS: Final = {"on_step_begin": "data", "on_substep_end": "backward", "on_optimizer_step": "optimizer"}

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
        super().__init__(output_dir, debug_freq, report_meta, script_name, report)
        self.seq_len = seq_len
        self.flops: Flops | None = None
        if flops_per_token is not None:
            self.flops = Flops(flops_per_token, recompute_weights=recompute_flops_per_token or 0.0)
        self.hooks: list[RemovableHandle] = []
        self.idle = 0.0  # when the Trainer stopped training for something else
        self.logged = 0
        self._new_step()

    def _new_step(self) -> None:
        self.values: dict[str, Any] = {}
        self.counts: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.summed = False  # the losses are shares of the step's loss, not means of their own

    def note(self, **values: Any) -> None:
        """Note values of the running step that a training loop knows better than hooks do: loss, grad_norm …"""
        self.values.update(values)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Handle the Trainer's other events: it calls all of TrainerCallback's. They end a phase or do nothing."""
        if not name.startswith("on_"):
            raise AttributeError(name)
        phase = self.ENDS.get(name)
        return lambda *_, **__: self._mark(phase) if phase else None

    def on_train_begin(self, args: Any, state: Any, _control: Any, model: Any = None, **_: Any) -> None:
        self.close()
        device = torch.device(args.device)
        flops = self.flops or Flops()
        if self.flops is None and model is not None:
            flops = count_flops(model, recomputes=bool(args.gradient_checkpointing))
        rates = RateMeter(device, flops, self.seq_len)
        folder = self.folder or Path(args.output_dir)
        recorder = self._record(folder, int(args.process_index), int(args.world_size), device, model=model, rates=rates)
        if args.torch_compile:
            recorder.counters.unmeasured["forward_seconds, tokens"] = "torch_compile: hooks would split the graph"
        elif model is not None:
            self.hooks.append(model.register_forward_pre_hook(self._before_forward, with_kwargs=True))
            self.hooks.append(model.register_forward_hook(self._after_forward, with_kwargs=True))
        self.logged = int(state.global_step)
        recorder.start(self.logged)

    def _before_forward(self, module: nn.Module, _arguments: Any, inputs: dict[str, Any]) -> None:
        if not module.training or torch.compiler.is_compiling() or self.recorder is None:
            return
        counts = self.recorder.count_tokens(inputs)
        if counts is not None:
            self.counts.append(counts)
        self.summed = inputs.get("num_items_in_batch") is not None
        self._mark("data")

    def _after_forward(self, module: nn.Module, _arguments: Any, _inputs: Any, output: Any) -> None:
        if not module.training or torch.compiler.is_compiling():
            return
        first = output[0] if isinstance(output, tuple) and output else None
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", first)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self.losses.append(loss.detach().double())
        self._mark("forward")

    def on_pre_optimizer_step(self, _args: Any, _state: Any, _control: Any, optimizer: Any = None, **_: Any) -> None:
        self._mark("backward")
        if optimizer is not None:
            self.values.setdefault("learning_rate", optimizer.param_groups[0]["lr"])

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.recorder is not None:
            loss = mean_loss(self.losses, self.counts, summed=self.summed)
            values = {"epoch": state.epoch, "loss": loss, **self.values}
            self.recorder.end_step(int(state.global_step), hold=bool(control.should_log), **values)
        self._new_step()
        self.idle = time.perf_counter()

    def on_log(self, _args: Any, state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
        if self.recorder is not None:
            known = {name: logs[name] for name in ("loss", "grad_norm") if name in (logs or {})}
            if state.global_step != self.logged + 1:  # the Trainer's loss is the mean since it last logged
                known.pop("loss", None)
            self.recorder.add_values(**known)
        self.logged = int(state.global_step)
        self._mark(PAUSE)

    def on_evaluate(self, _args: Any, state: Any, _control: Any, metrics: Any = None, **_: Any) -> None:
        numbers = {name: value for name, value in (metrics or {}).items() if isinstance(value, int | float)}
        self._event("eval", state, **numbers)

    def on_save(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        written = Path(args.output_dir, f"checkpoint-{state.global_step}").rglob("*")
        size = sum(path.stat().st_size for path in written if path.is_file())
        self._event("save", state, seconds=round(time.perf_counter() - self.idle, 3), bytes=size, ok=True)
        if self.background is not None:
            self.background.start()

    def on_train_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._event("end", state)
        self.close()
        self._write_report()

    def close(self) -> None:
        """Write what is still under way and let go of the model. Safe to call twice."""
        while self.hooks:
            self.hooks.pop().remove()
        super().close()
        self.recorder = None

    def _mark(self, phase: str) -> None:
        if self.recorder is not None:
            self.recorder.mark(phase)
        if phase == PAUSE:
            self.idle = time.perf_counter()

    def _event(self, kind: str, state: Any, **fields: Any) -> None:
        if self.recorder is not None:
            self.recorder.event(kind, int(state.global_step), **fields)
            self.idle = time.perf_counter()
