"""The training loop: read `Loop.run` and `Loop.train_step` from top to bottom."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from windlass.errors import UserError
from windlass.observe.recorder import Recorder
from windlass.observe.watch.run import RunWatch
from windlass.plan import Plan
from windlass.ranks import collectives
from windlass.ranks.rank import StopSignal
from windlass.train.batches import Batches, RowError, RunLength
from windlass.train.checkpoint.saver import Saver
from windlass.train.checkpoint.snapshot import TrainerState, restore_checkpoint
from windlass.train.collate import Batch
from windlass.train.console import Progress
from windlass.train.evaluate import Evaluator
from windlass.train.fsdp import keep_gathered
from windlass.train.kernels.compiled import Compiled
from windlass.train.liveness import stop_non_finite
from windlass.train.model import TrainedModel
from windlass.train.samples import Samples
from windlass.train.step import Step, StepSums
from windlass.train.trackers import Trackers
from windlass.train.updater import Updater


@dataclass(eq=False)
class Loop:
    """Trains the adapter of `model` on `batches`. Everything else that it uses is passed in."""

    plan: Plan
    model: TrainedModel
    updater: Updater  # gradients, optimizer, schedule
    batches: Batches
    length: RunLength
    evaluator: Evaluator | None
    stop_signal: StopSignal
    recorder: Recorder  # measures each step
    watch: RunWatch  # stalls, alarms
    saver: Saver  # checkpoints
    progress: Progress  # the terminal
    trackers: Trackers  # TensorBoard, W&B …
    samples: Samples | None = None  # prompts continued after an evaluation
    pause_at: int | None = None  # step

    step: int = 0  # optimizer steps done
    tokens: int = 0  # tokens trained on by all ranks since the run began
    stopped: bool = False  # stopped by a signal, with everything saved
    evaluation_due: bool = False  # an evaluation was skipped to stop in time; the resumed run does it
    eval_loss: float | None = None  # evaluation loss at this step
    log_history: list[dict[str, Any]] = field(default_factory=list)
    unlogged: list[float] = field(default_factory=list)  # losses of the steps since the last log

    def __post_init__(self) -> None:
        self.train = self.plan.run.train
        self.balanced = torch.ones(())  # micro-batches of the step whose router is balanced

    @property
    def epoch(self) -> float:
        return self.length.epoch(self.step)

    @property
    def paused(self) -> bool:
        """Whether the run is left here, to be continued."""
        return self.step == self.pause_at

    # --- the run ---

    def run(self, resume: Path | None = None) -> None:
        """Train to the end or until a signal; after every step log, evaluate and save as configured."""
        if resume is not None:
            self._restore(resume)
        if self.plan.run.lora.starts_from_weights:
            self.updater.fix_halves()
        self.model.causal_lm.train()
        if self.model.compiled:
            self._prove_compiled(self.model.compiled)
        self.recorder.start(self.step, self.length.total)
        self.watch.start(self.step, self.length.total)
        self.progress.start(self.length.total)
        if resume is None and self.train.eval_on_start and self.evaluator is not None:
            self.evaluate()
        self.stop_signal.training = True  # until now a signal ended the rank at once: nothing to save
        if self.evaluation_due and self.evaluate():
            self.save()  # its loss belongs to the checkpoint that was resumed from
        began_at = self.step
        micro_batches = self.batches.train(self.step, self.length)
        while self.step < self.length.total and not (self.stopped or self.paused):
            self.progress.start_step(self.step + 1)
            try:
                step = self.train_step(micro_batches)
            except RowError as error:
                raise self._save_before(error, began_at) from None
            self.progress.end_step(step)

            save_requested = self.watch.act(step.requested)  # an alarm saves, or stops the run
            is_due = partial(self.length.is_due, self.step)
            evaluate = self.evaluator is not None and is_due(self.train.evaluation, self.train.eval_steps)
            save = is_due(self.train.save_strategy, self.train.save_steps)
            self._log_step(step)
            if step.interrupted and self.step < self.length.total:
                self.stopped = True
                self.evaluation_due = evaluate
            elif evaluate:
                self.evaluate()
            if save or save_requested or self.stopped or self.paused:
                self.save()
        self.updater.set_mode("eval")
        if self.evaluator is not None and self.step == self.length.total and not self.stopped:
            share = self.evaluator.measure_share()
            if share is not None:
                self.recorder.event("served", self.step, share=share[0], error=share[1])
                self.progress.end_share(*share)
        if self.model.compiled:
            self.progress.console.print(f"compiled  {self.model.compiled.graphs} graphs in all")
        self.saver.close()
        self.recorder.event("end", self.step)
        self.recorder.close()

    # --- one optimizer step ---

    def train_step(self, micro_batches: Iterator[Batch]) -> Step:
        """Run the micro-batches of one optimizer step, reduce over the ranks, wait once for the device, and update.

        The reduction is one collective if all ranks have the same adapter; split experts and shards add theirs.
        """
        model = self.model
        updater = self.updater
        updater.set_mode("train")
        rows: list[int] = []
        tokens = 0
        supervised = 0
        loss, balance = torch.zeros(2, device=model.device)
        batches: Iterator[Batch] = islice(micro_batches, self.length.accumulation)
        balance_share = None
        if model.router_weight:  # the balancing loss is a mean per micro-batch; its share of the step is needed first
            all_batches = list(batches)
            balance_share = self._balance_share(all_batches)
            batches = iter(all_batches)

        # Forward and backward.
        with model.adapters.unchanged():
            for number, host_batch in enumerate(batches, 1):
                self.recorder.count_tokens(host_batch.collated)
                batch = host_batch.to(model.device)
                self.recorder.mark("data")
                if model.kept_gathered:
                    keep_gathered(model.kept_gathered, keep=number < self.length.accumulation)
                model.waits.on = number == 1 or bool(model.kept_gathered)
                batch_loss, batch_balance = model.compute_loss(batch, balance_share if batch.rows else None)
                model.waits.on = False
                self.recorder.mark("forward")
                batch_loss.backward()  # type: ignore[no-untyped-call]  # of a sum: divided once all ranks have counted
                self.recorder.mark("backward")
                loss += batch_loss.detach()
                if batch_balance is not None:
                    balance += batch_balance
                rows += batch.rows
                tokens += batch.tokens
                supervised += batch.supervised

        # The reduction: gradients, and with them loss, tokens, faults, signals and the watch's request.
        updater.clear_fixed()
        local = StepSums(
            loss=loss,
            balance=balance,
            supervised=supervised,
            tokens=tokens,
            interrupted=self.stop_signal.received,
            requested=self.watch.request,
            not_compiled=bool(model.compiled and model.compiled.problem),
            non_finite=~updater.is_finite(loss),
            figures=model.figures.take(),
        )
        world = updater.replicas.world
        reduced = updater.replicas.reduce(local.pack(collectives.get_rank(), world))
        self.recorder.mark("communication")
        norm = updater.scale_and_clip(StepSums.unpack(reduced, world).supervised)

        # The one wait for the device, and the checks.
        *values, grad_norm = torch.cat([reduced, norm[None]]).tolist()
        sums = StepSums.unpack(values, world)
        if sums.not_compiled and model.compiled:  # on any rank: a shape that fails to compile, or too many shapes
            self._disable_compiled(model.compiled.reason())
        step = Step(
            self.step + 1,
            loss=sums.loss / max(sums.supervised, 1),
            grad_norm=grad_norm,
            learning_rate=updater.learning_rate,
            job_tokens=int(sums.tokens),
            requested=round(sums.requested),
            interrupted=sums.interrupted > 0,
            figures=model.figures.describe(sums.figures, sums.supervised),
        )
        faulty = [rank for rank, non_finite in enumerate(sums.non_finite) if non_finite]
        if faulty:
            step.loss = math.nan
        if faulty or not math.isfinite(grad_norm):
            step.skipped = True
            stop_non_finite(self.plan.run.watch.non_finite, step.step, faulty, rows)

        # Update.
        updater.update(skip=step.skipped)
        self.recorder.mark("optimizer")
        stalled = updater.finish(skipped=step.skipped)

        self.step = step.step
        self.eval_loss = None
        self.tokens += step.job_tokens
        self._record(step, sums, rows, stalled)
        return step

    def _balance_share(self, batches: list[Batch]) -> Tensor:
        """Return the factor that scales a micro-batch's balancing loss to the summed loss of the tokens.

        The step's loss is the mean over its tokens plus the mean of the balancing loss over its micro-batches that have
        rows: others are only there to be as many on each rank. Only mixtures whose config has such a loss need this
        collective.
        """
        counts = [sum(batch.supervised for batch in batches), sum(bool(batch.rows) for batch in batches)]
        totals = torch.tensor(counts, dtype=torch.float32, device=self.model.device)
        world = self.updater.replicas.world
        if world > 1:
            dist.all_reduce(totals)
        supervised, filled = totals.clamp(min=1).unbind()
        self.balanced = filled * self.batches.readers / world  # ranks that share a row count it each
        return self.model.router_weight * supervised / self.balanced

    def _record(self, step: Step, sums: StepSums, rows: list[int], stalled: str) -> None:
        """Write the step's line: rank 0 with the values of all ranks, the others with their own only."""
        waited = self.model.waits.seconds()
        of_job: dict[str, Any] = {}
        if collectives.get_rank() == 0:
            of_job = {
                "epoch": self.epoch,
                "loss": step.loss,
                "grad_norm": step.grad_norm,
                "router_aux_loss": sums.balance / float(self.balanced) if self.model.router_weight else None,
                **step.figures,
                "learning_rate": step.learning_rate,
                "job_tokens": step.job_tokens,
                "skipped": step.skipped or None,
                "unchanged": stalled or None,
            }
        if waited and not self.model.kept_gathered:  # measured in the first micro-batch, and the others wait as long
            waited *= self.length.accumulation
        self.recorder.end_step(step.step, rows=rows, wait_seconds=waited, **of_job)

    # --- compiled layers ---

    def _prove_compiled(self, compiled: Compiled) -> None:
        """Run one micro-batch eager and compiled, without training on it; disable what differs. A collective.

        It is always the data's first micro-batch, so a resumed run compiles for the same shapes.
        """
        began = time.monotonic()
        host_batch = next(self.batches.train(0, self.length))
        batch = host_batch.to(self.model.device)
        balance_share = self._balance_share([host_batch]) if self.model.router_weight else None

        def compute() -> tuple[Tensor, list[Tensor]]:
            with torch.random.fork_rng():
                loss, _ = self.model.compute_loss(batch, balance_share)
                loss.backward()  # type: ignore[no-untyped-call]
            gradients = self.updater.replicas.gradients()
            self.updater.optimizer.zero_grad()
            self.updater.liveness.skip_update()  # nothing of this micro-batch is trained on
            self.model.figures.take()
            return loss.detach(), gradients

        narrow = self.train.in_bf16 or self.model.causal_lm.dtype != torch.float32
        reason = compiled.prove(compute, narrow=narrow, timeout_seconds=self.train.ddp_timeout)
        if reason:
            self._disable_compiled(reason)
        else:
            took = f"{compiled.graphs} graphs in {time.monotonic() - began:.0f} s"
            parts = f"{len(compiled.parts)} parts of layers"
            self.progress.console.print(f"compiled  {parts}, {took}; proven equal to eager")

    def _disable_compiled(self, reason: str) -> None:
        self.model.patches.disable_compiled()
        self.progress.console.print(
            f"warning: train.compile: layers run eagerly on all ranks: {reason}\n"
            "hint: compiling needs `c++` on CPUs and triton on GPUs; or set train.compile: false",
            style="yellow",
        )

    # --- evaluate, save, log ---

    def evaluate(self) -> bool:
        """Evaluate, and continue the prompts. A stop signal interrupts it; the evaluation then stays due."""
        assert self.evaluator is not None
        self.updater.set_mode("eval")
        metrics = self.evaluator.evaluate(self.step, self.tokens)
        self.stopped = metrics is None
        self.evaluation_due = metrics is None
        if metrics is None:
            return False
        self.eval_loss = metrics["eval_loss"]
        if self.step:  # as in transformers, a schedule follows only evaluations of trained adapters
            self.updater.follow(self.eval_loss)
        self.recorder.event("eval", self.step, **metrics)
        self.progress.end_evaluation(self.step, metrics)
        self._log(metrics)
        if self.samples is not None:
            evaluations = sum("eval_loss" in values for values in self.log_history)
            self.samples.generate(self.step, evaluations)
        return True

    def save(self, *, wait: bool = False) -> None:
        """Save a checkpoint, in the background unless `wait` is set or the run stops. A collective."""
        self.updater.set_mode("eval")
        state = TrainerState(
            step=self.step,
            epoch=self.epoch,
            max_steps=self.length.total,
            tokens=self.tokens,
            log_history=tuple(self.log_history),
            eval_loss=self.eval_loss,
            evaluation_due=self.evaluation_due,
            unlogged=tuple(self.unlogged),
        )
        self.saver.save(state, self.updater, wait=wait or self.stopped or self.paused)
        self.recorder.mark("pause")

    def _save_before(self, error: RowError, began_at: int) -> UserError:
        """Save what was trained before a faulty row; return the error with what to do about both. A collective."""
        if self.step > began_at and self.saver.step != self.step:
            self.save(wait=True)
        return self.saver.explain_row_error(error, self.step)

    def _restore(self, folder: Path) -> None:
        restored = restore_checkpoint(folder, self.updater.model, self.updater.optimizer, self.updater.scheduler)
        self.step = restored.step
        self.tokens = restored.tokens
        self.log_history = list(restored.log_history)
        self.unlogged = list(restored.unlogged)
        self.evaluation_due = restored.evaluation_due and self.evaluator is not None

    def _log_step(self, step: Step) -> None:
        """Send every step to the trackers, and every train.logging_steps the means since the last time."""
        self.unlogged.append(step.loss)
        if self.step % self.train.logging_steps == 0:
            finite = [loss for loss in self.unlogged if not math.isnan(loss)]  # a step that was left out has none
            loss = sum(finite) / len(finite) if finite else math.nan
            self.unlogged = []
            values = {"loss": loss, "grad_norm": step.grad_norm, "learning_rate": step.learning_rate}
            self._log({**values, "num_tokens": float(self.tokens)})
        self.trackers.log_steps()

    def _log(self, values: dict[str, float]) -> None:
        self.log_history.append({**values, "epoch": self.epoch, "step": self.step})
        self.trackers.log({**values, "epoch": self.epoch}, self.step)
