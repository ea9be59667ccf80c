"""The training loop. Read `Loop.run` and `Loop.train_step` from top to bottom; nothing is called from elsewhere."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor

from windlass.observe.watch.alarms import AlarmError
from windlass.train import checkpoint, group
from windlass.train.batches import Batch, Batches
from windlass.train.loss import patch_forward, router_loss_weight
from windlass.train.optimizer import create_optimizer, create_scheduler, follows_evaluation
from windlass.train.parallel import device_of_this_rank, fsdp_modules, keep_gathered
from windlass.train.sync import local

if TYPE_CHECKING:
    from windlass.observe.recorder import Recorder
    from windlass.observe.watch.run import RunWatch
    from windlass.runfile import RunFile
    from windlass.train.console import Progress
    from windlass.train.liveness import Liveness
    from windlass.train.rank import StopSignal
    from windlass.train.saver import Saver
    from windlass.train.sync import Replicas
    from windlass.train.trackers import Trackers


@dataclass(slots=True)
class Step:
    """What one optimizer step did, over all ranks."""

    step: int
    loss: float  # mean per supervised token
    grad_norm: float  # before clipping
    learning_rate: float
    job_tokens: int  # of all ranks, without padding
    skipped: bool = False


class Loop:
    """Trains the adapter of `model` on `batches`. What it calls besides is handed to it, and none of that calls it."""

    def __init__(
        self,
        job: RunFile,
        model: PeftModel,
        batches: Batches,
        validation: Batches | None,
        *,
        accumulation: int,
        checkpointing: bool = False,
        gather_once: bool = False,
        replicas: Replicas,  # the adapter's gradients: one reduction, equal on all ranks
        liveness: Liveness,  # the first steps prove that the whole adapter trains
        stop_signal: StopSignal,
        recorder: Recorder,  # measures each step
        watch: RunWatch,  # stalls, alarms
        saver: Saver,  # checkpoints
        progress: Progress,  # the terminal
        trackers: Trackers,  # TensorBoard, W&B …
    ) -> None:
        train, streamed = job.train, batches.order is None
        self.train, self.non_finite = train, job.watch.non_finite
        self.model, self.causal_lm = model, model.get_base_model()
        self.batches, self.validation = batches, validation
        self.replicas, self.liveness, self.stop_signal = replicas, liveness, stop_signal
        self.recorder, self.watch, self.saver = recorder, watch, saver
        self.progress, self.trackers = progress, trackers
        self.accumulation = accumulation
        self.steps_per_epoch = None if streamed else len(batches)
        epochs = math.ceil(train.num_train_epochs * (self.steps_per_epoch or 1))
        self.total = train.max_steps if train.max_steps > 0 else epochs
        self.device = device_of_this_rank()
        self.router_weight = router_loss_weight(self.causal_lm)
        # Weights stay gathered from a step's first micro-batch to its last. Found once: a walk over thousands of
        # modules takes milliseconds.
        self.kept_gathered = fsdp_modules(model) if gather_once else []

        patch_forward(self.causal_lm)
        if checkpointing:
            self.causal_lm.activation_checkpointing_enable()
        trainable = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        self.trained = [*replicas.parameters, *replicas.sharded]
        assert trainable == {id(parameter) for parameter in self.trained}
        self.optimizer = create_optimizer(train, model.named_parameters(), self.total)
        self.scheduler = create_scheduler(train, self.optimizer, self.total)

        self.step = 0  # optimizer steps done
        self.latest: Step | None = None
        self.tokens = 0  # trained on by all ranks since the run began
        self.stopped = False  # by a signal, with everything saved
        self.evaluation_due = False  # an evaluation was left out, to stop in time: whoever resumes makes up for it
        self.eval_loss: float | None = None  # of this very step
        self.log_history: list[dict[str, Any]] = []
        self.unlogged: list[float] = []  # losses of the steps since the last log
        self.loss_sum = 0.0  # of this process's steps

    @property
    def epoch(self) -> float:
        return self.step / (self.steps_per_epoch or self.total)

    # --- the run ---

    def run(self, resume: Path | None = None) -> None:
        """Train to the end, or until a signal; with every step: train, log, evaluate, save."""
        if resume is not None:
            self._load(resume)
        first, began = self.step, time.monotonic()
        self.causal_lm.train()
        self.recorder.start(self.step)
        self.watch.start(self.step, self.total)
        self.progress.start(self.total)
        self.stop_signal.training = True  # until now a signal ended the rank at once: there was nothing to save
        if self.evaluation_due:
            self._make_up_evaluation()
        micro_batches = self.batches.train(self.step, self.accumulation, self.steps_per_epoch)
        while self.step < self.total and not self.stopped:
            self.progress.start_step(self.step + 1)
            step, requested, interrupted = self.train_step(micro_batches)
            self.progress.end_step(step)

            save_requested = self.watch.act(requested)  # an alarm saves, or stops the run
            evaluate, save = self._due()
            self._log_step()
            if interrupted and self.step < self.total:
                self.stopped, self.evaluation_due = True, evaluate
            elif evaluate:
                self.evaluate()
            if save or save_requested or self.stopped:
                self.save()
        self._schedule_free("eval")
        self.saver.close()
        if not self.stopped:
            self._log_totals(first, time.monotonic() - began)
        self.recorder.event("end", self.step)
        self.recorder.close()
        self.trackers.log_steps()

    def _due(self) -> tuple[bool, bool]:
        """Whether this step is followed by an evaluation, and by a checkpoint."""
        last = self.step == self.total
        epoch_ends = last or (self.steps_per_epoch is not None and self.step % self.steps_per_epoch == 0)
        train = self.train
        evaluate = {"no": False, "steps": last or self.step % train.eval_steps == 0, "epoch": epoch_ends}
        save = {"no": False, "steps": last or self.step % train.save_steps == 0, "epoch": epoch_ends}
        return self.validation is not None and evaluate[train.eval_strategy], save[train.save_strategy]

    # --- one optimizer step ---

    def train_step(self, micro_batches: Iterator[Batch]) -> tuple[Step, int, bool]:
        """Micro-batches, one collective, one wait for the device, update.

        Returns what the step did, what the watch of rank 0 requests, and whether a signal has reached any rank.
        """
        self._schedule_free("train")
        rows: list[int] = []
        tokens = supervised = 0
        loss = torch.zeros((), device=self.device)
        of_step: Iterator[Batch] = islice(micro_batches, self.accumulation)
        share = None
        if self.router_weight:  # a mean per micro-batch: how it compares with the tokens' sum has to be known before
            all_of_step = list(of_step)
            share = self._balance_share(sum(batch.supervised for batch in all_of_step))
            of_step = iter(all_of_step)

        for number, host_batch in enumerate(of_step, 1):
            self.recorder.count_tokens(host_batch.collated)
            batch = host_batch.to(self.device)
            self.recorder.mark("data")
            if self.kept_gathered:
                keep_gathered(self.kept_gathered, keep=number < self.accumulation)
            with self._autocast():
                sums = self.causal_lm(**batch.inputs, balance=bool(self.router_weight))
            self.recorder.mark("forward")
            of_batch = sums.loss if share is None else sums.loss + share * sums.balance
            of_batch.backward()
            self.recorder.mark("backward")

            loss += of_batch.detach()
            rows, tokens, supervised = rows + batch.rows, tokens + batch.tokens, supervised + batch.supervised

        # The step's one collective: gradients, and with them loss, tokens, faults, signals, and what the watch asks.
        sums = self.replicas.average(self._own_sums(loss, supervised, tokens))
        self.recorder.mark("communication")
        # Gradients are of the tokens' sum, averaged over ranks: made those of the mean, and clipped, in one pass.
        gradients = self._gradients()
        scale = self.replicas.world / sums[1].clamp(min=1)
        norm = self.replicas.norm() * scale
        if self.train.max_grad_norm:
            scale = scale * (self.train.max_grad_norm / (norm + 1e-6)).clamp(max=1)
        if gradients:
            torch._foreach_mul_(gradients, scale)
        # The step's one wait for the device.
        total, counted, job_tokens, interrupted, requested, *faults, grad_norm = torch.cat([sums, norm[None]]).tolist()

        faulty = [rank for rank, fault in enumerate(faults) if fault]
        step = Step(self.step + 1, total / max(counted, 1), grad_norm, self._learning_rate(), int(job_tokens))
        if faulty or not math.isfinite(grad_norm):
            step.loss, step.skipped = math.nan if faulty else step.loss, True
            self._report_non_finite(step, faulty, rows)
            self.optimizer.zero_grad()  # to None: the optimizer passes over such parameters
            self.liveness.skip_update()
        else:
            self.liveness.before_update(step.learning_rate)
        self.optimizer.step()
        self.recorder.mark("optimizer")
        self.liveness.after_update(step.learning_rate)
        if not follows_evaluation(self.scheduler):
            self.scheduler.step()
        self.optimizer.zero_grad()

        self.step, self.latest, self.eval_loss = step.step, step, None
        self.tokens += step.job_tokens
        self.recorder.end_step(
            step.step,
            epoch=self.epoch,
            loss=step.loss,
            grad_norm=step.grad_norm,
            learning_rate=step.learning_rate,
            job_tokens=step.job_tokens,
            rows=rows,
            skipped=step.skipped or None,
        )
        return step, round(requested), interrupted > 0

    def _gradients(self) -> list[Tensor]:
        return [local(p.grad) for p in self.trained if p.grad is not None]

    def _own_sums(self, loss: Tensor, supervised: int, tokens: int) -> Tensor:
        """What is added up over the ranks: five numbers, and for every rank whether it saw something non-finite."""
        gradients = self._gradients()
        largest = torch.stack(torch._foreach_norm(gradients, torch.inf)) if gradients else loss.new_zeros(1)
        finite = torch.isfinite(loss) & torch.isfinite(largest).all()
        own = [supervised, tokens, self.stop_signal.received, self.watch.request, *[0] * self.replicas.world]
        counts = torch.tensor(own, dtype=torch.float32, pin_memory=self.device.type == "cuda")
        sums = torch.cat([loss.reshape(1), counts.to(self.device, non_blocking=True)])
        sums[5 + group.rank()] = (~finite).float()
        return torch.nan_to_num(sums)

    def _balance_share(self, supervised: int) -> Tensor:
        """What a micro-batch's balancing loss counts beside the sum of the tokens' losses.

        The step's loss is the mean over its tokens, and the mean of this over its micro-batches. The one other
        collective of a step, in mixtures whose config has such a loss alone.
        """
        total = torch.tensor(float(supervised), device=self.device)
        if self.replicas.world > 1:
            dist.all_reduce(total)
        return self.router_weight * total.clamp(min=1) / (self.accumulation * self.replicas.world)

    def _report_non_finite(self, step: Step, faulty: list[int], rows: list[int]) -> None:
        """Name the ranks and rows, and stop, unless watch.non_finite says to skip such steps. A collective."""
        everyones: list[list[int]] = group.gather(rows)
        where = "; ".join(f"rank {rank}, rows {', '.join(map(str, everyones[rank]))}" for rank in faulty)
        if self.non_finite == "stop":
            raise AlarmError(
                "non_finite",
                f"non-finite loss or gradient at step {step.step}: "
                f"{where or 'on no single rank: the sum over all ranks overflowed'}",
                "watch.non_finite",
                "nothing of this step was saved; look at these rows, lower train.learning_rate, "
                "or set watch.non_finite: skip to leave such steps out",
            )

    def _learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.train.bf16 else contextlib.nullcontext()

    # --- evaluate ---

    def evaluate(self) -> None:
        """The mean loss of the validation rows. A signal interrupts it: then the run stops, and it stays due."""
        assert self.validation is not None
        began, count = time.monotonic(), len(self.validation.rows)
        self.causal_lm.eval()
        self._schedule_free("eval")
        sums = torch.zeros(5, dtype=torch.float64)  # loss, right first choices, entropy, tokens; interruptions
        batches = 0
        for host_batch in self.validation.epoch(0):
            self.recorder.mark("pause")
            self.progress.evaluating(self.step)
            sums += self._evaluate_batch(host_batch.to(self.device))
            batches += 1
            if sums[4]:
                break
        self.causal_lm.train()
        if sums[4]:
            self.stopped = self.evaluation_due = True
            return
        loss, right, entropy, tokens = sums[:4].tolist()
        seconds = time.monotonic() - began
        self.eval_loss, self.evaluation_due = loss / max(tokens, 1), False
        if follows_evaluation(self.scheduler):
            self.scheduler.step(self.eval_loss)
        metrics = {
            "eval_loss": self.eval_loss,
            "eval_mean_token_accuracy": right / max(tokens, 1),
            "eval_entropy": entropy / max(tokens, 1),
            "eval_num_tokens": self.tokens,
            "eval_runtime": seconds,
            "eval_samples_per_second": count / seconds,
            "eval_steps_per_second": batches / seconds,
        }
        self.recorder.event("eval", self.step, **metrics)
        self.progress.end_evaluation(self.step, self.eval_loss)
        self._log(metrics)

    @torch.no_grad()
    def _evaluate_batch(self, batch: Batch) -> Tensor:
        """Over all ranks; the signals too, for an evaluation can take longer than the time to save after one."""
        with self._autocast():
            figures = self.causal_lm(**batch.inputs, per_token=True)
        counts = figures.new_tensor([batch.supervised, self.stop_signal.received])
        sums = torch.cat([figures.double().sum(1), counts.double()])
        if self.replicas.world > 1:
            dist.all_reduce(sums)
        return sums.cpu()

    def _make_up_evaluation(self) -> None:
        """The evaluation that an interrupted run left out; its loss belongs to the checkpoint it was resumed from."""
        self.evaluate()
        if not self.stopped:
            self.save()

    def _schedule_free(self, mode: str) -> None:
        """Optimizers of that kind keep two sets of weights: to train, and to evaluate and to save."""
        if callable(switch := getattr(self.optimizer, mode, None)):
            switch()

    # --- save and resume ---

    def save(self) -> None:
        state = {
            "global_step": self.step,
            "epoch": self.epoch,
            "max_steps": self.total,
            "num_input_tokens_seen": self.tokens,
            "log_history": list(self.log_history),  # as it is now: it is written while training goes on
        }
        self._schedule_free("eval")
        self.saver.save(self, state, wait=self.stopped)
        self.recorder.mark("pause")

    def _load(self, folder: Path) -> None:
        manifest = checkpoint.read_manifest(folder)
        self.step = int(manifest["step"])
        self.evaluation_due = bool(manifest.get("evaluation_due")) and self.validation is not None
        state = checkpoint.read_state(folder)
        self.log_history = list(state.get("log_history", []))
        self.tokens = int(state.get("num_input_tokens_seen") or 0)
        checkpoint.load_adapter(self.model, folder)
        checkpoint.load_optimizer(self.optimizer, self.scheduler, folder, self.model)
        checkpoint.load_random(folder)

    # --- log ---

    def _log_step(self) -> None:
        """Every step's line to the trackers, and every train.logging_steps the means since the last time."""
        assert self.latest is not None
        self.unlogged.append(self.latest.loss)
        self.loss_sum += self.latest.loss
        if self.step % self.train.logging_steps == 0:
            means = {"loss": sum(self.unlogged) / len(self.unlogged), "grad_norm": self.latest.grad_norm}
            self._log({**means, "learning_rate": self.latest.learning_rate, "num_tokens": float(self.tokens)})
            self.unlogged = []
        self.trackers.log_steps()

    def _log_totals(self, first: int, seconds: float) -> None:
        steps = self.step - first
        sequences = steps * self.batches.round_rows
        self._log(
            {
                "train_runtime": seconds,
                "train_samples_per_second": sequences / max(seconds, 1e-9),
                "train_steps_per_second": steps / max(seconds, 1e-9),
                "train_loss": self.loss_sum / max(steps, 1),
            }
        )

    def _log(self, values: dict[str, float]) -> None:
        self.log_history.append({**values, "epoch": self.epoch, "step": self.step})
        self.trackers.log({**values, "epoch": self.epoch}, self.step)
