"""TRL's SFTTrainer with what a sharded run needs added: every method here overrides one of its or the Trainer's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import TrainerCallback
from trl import SFTTrainer

from windlass.data.collate import PaddedPackingCollator
from windlass.errors import RunError
from windlass.observe.meter import LLMStepProfiler
from windlass.observe.meter.batch import counts
from windlass.train import checkpoint, group
from windlass.train.liveness import Liveness
from windlass.train.order import ROW, Order, Rows
from windlass.train.parallel import fsdp_modules, keep_gathered
from windlass.train.rank import Interruption
from windlass.train.saving import Interrupted, Saving
from windlass.train.sync import Replicas


@dataclass
class Step:
    """What one optimizer step did, over all ranks."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    job_tokens: int  # padding not counted
    skipped: bool = False

    def known(self) -> dict[str, Any]:
        """What the meter's hooks can't know, by the names of its step file."""
        named = {name: getattr(self, name) for name in ("loss", "grad_norm", "learning_rate", "job_tokens")}
        return {**named, "skipped": True} if self.skipped else named


@dataclass
class Micro:
    """What this rank's micro-batches of the current step did, kept on the device until the step ends."""

    loss: float | Tensor = 0.0
    tokens: int | Tensor = 0
    rows: list[int] = field(default_factory=list)


class Loop(SFTTrainer):  # type: ignore[misc]
    """One optimizer step = micro-batches, one all-reduce of the adapter's gradients, clip, checks, update.

    In the order in which the Trainer calls:
    on_step_begin             the callbacks; from the first step on there is something to save after a signal
    training_step             once for each micro-batch: forward and backward (`compute_loss`); after the last one of
      _end_of_step            the step's collective: gradients averaged; loss, tokens, faults and signals of all ranks
    _clip_grad_norm           the gradient's norm, and the gradient scaled down to train.max_grad_norm
    _get_grad_norm            `judge`: what is not finite stops the run or the step; the first steps prove liveness
    on_optimizer_step         after the update: what was to move has moved, the same on all ranks
    on_step_end               progress, the watch; after a signal, stop
    _evaluate, _save_checkpoint   where they are due
    """

    def __init__(
        self,
        *,
        replicas: Replicas,
        liveness: Liveness,
        order: Order | None,
        non_finite: str,
        saving: Saving,
        gather_once: bool = False,
        rows_apart: bool = False,
        interruption: Interruption | None = None,
        meter: LLMStepProfiler | None = None,
        **trainer: Any,
    ) -> None:
        super().__init__(**trainer)
        collator = self.data_collator  # type: ignore[has-type]
        self.data_collator = Rows(PaddedPackingCollator(collator.pad_token_id) if rows_apart else collator)
        self.replicas = replicas
        self.liveness = liveness
        self.order = order
        self.non_finite = non_finite
        self.saving = saving
        self.interruption = interruption
        self.gather_once = gather_once  # weights stay whole from a step's first micro-batch to its last
        self.fsdp_modules = fsdp_modules(self.model)
        self.meter = meter
        self.micro = Micro()
        self.culprits: list[int] = []  # ranks with something non-finite in this step
        self.latest: Step | None = None
        self.asked: Callable[[], int] = int  # what the watch asks all ranks for, on rank 0; elsewhere nothing
        self.agreed = 0  # what all ranks have heard of it
        self.signalled = False  # whether a signal has reached any rank, as far as all of them know
        self.stopped = False  # whether all ranks have agreed to save and stop
        self.evaluation_due = False  # the evaluation of this step was left out, to stop in time
        self.add_callback(LoopCallbacks(self))

    # --- data ---

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        """Rows in the run's own order, the same for every number of ranks."""
        return self.order if self.order is not None else super()._get_train_sampler(train_dataset)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if ROW not in self._signature_columns:
            self._signature_columns.append(ROW)

    # --- one step ---

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Replaces a broadcast (the replicas are equal, and proven so) and a hook that reduces tensor by tensor."""

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one micro-batch; the last one of a step also averages the gradients."""
        self.micro.rows += inputs.pop(ROW, [])
        counted = counts(inputs)
        assert counted is not None
        self.micro.tokens += counted[0]
        if self.gather_once:
            keep_gathered(self.fsdp_modules, keep=not self.accelerator.sync_gradients)
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        self.micro.loss += loss.detach()
        if self.accelerator.sync_gradients:
            self._end_of_step(loss.device)
        return loss

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """TRL's loss without its figures, for which ranks would wait on one another four times a micro-batch."""
        if not self.model.training or self.label_smoother is not None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        asked = {"output_router_logits": True} if self.aux_loss_enabled else {}
        outputs = model(**inputs, **asked, use_cache=False, fused_lm_head=True)
        tokens = outputs.label_mask.sum() if num_items_in_batch is None else num_items_in_batch
        loss = -outputs.log_probs.sum() / torch.as_tensor(tokens).clamp(min=1)
        if num_items_in_batch is not None:  # of all ranks, over which gradients are averaged
            loss = loss * self.replicas.world
        if self.aux_loss_enabled:  # a mean of each micro-batch
            steps = self.current_gradient_accumulation_steps if num_items_in_batch is not None else 1
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss / steps
        return loss

    def _end_of_step(self, device: torch.device) -> None:
        """One collective: gradients averaged, and with them the loss, the tokens, and who saw something non-finite."""
        micro, world = self.micro, self.replicas.world
        bad = torch.zeros(world, device=device)
        gradients = [p.grad.detach() for p in self.replicas.parameters if p.grad is not None]
        largest = torch.stack(torch._foreach_norm(gradients, torch.inf)) if gradients else torch.zeros(1, device=device)
        healthy = torch.isfinite(torch.as_tensor(micro.loss)) & torch.isfinite(largest).all()
        bad[group.rank()] = (~healthy).float()
        own = (micro.loss, micro.tokens, self.interrupted(), self.asked())
        sums = torch.cat([torch.stack([torch.as_tensor(value, device=device).float() for value in own]), bad])
        loss, tokens, interrupted, asked, *flags = self.replicas.average(torch.nan_to_num(sums)).tolist()
        self.culprits = [rank for rank, flag in enumerate(flags) if flag]
        self.signalled = self.signalled or interrupted > 0
        self.agreed = round(asked)
        self.latest = Step(
            step=self.state.global_step + 1,
            loss=loss / world if not self.culprits else math.nan,
            grad_norm=math.nan,
            learning_rate=self._get_learning_rate(),
            job_tokens=int(tokens),
        )
        self._total_train_tokens += self.latest.job_tokens
        self._metrics["train"]["num_tokens"] = [self._total_train_tokens]

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """The Trainer takes what a rank holds for the whole gradient."""
        if not self.replicas.split:
            return super()._clip_grad_norm(model)
        self.accelerator.unscale_gradients()
        return self.replicas.clip(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The last that the Trainer calls before the update, and on every rank."""
        if grad_norm is None and self.replicas.split:
            grad_norm = self.replicas.norm()
        return self.judge(model, super()._get_grad_norm(model, grad_norm))

    def judge(self, model: nn.Module, norm: Any) -> Any:
        """Let the step through to its update, or not. Returns the norm of its gradient."""
        step = self.latest
        assert step is not None
        step.grad_norm = float(norm)
        if self.culprits or not math.isfinite(step.grad_norm):
            self._poisoned(step)
            model.zero_grad()  # to None: the optimizer passes over such parameters
        else:
            self.liveness.before_update(step.learning_rate)
        if self.meter is not None:
            self.meter.note(**step.known(), rows=self.micro.rows)
        self.micro = Micro()
        return norm

    def _poisoned(self, step: Step) -> None:
        """Say which rank and which rows, then stop, or leave this step out."""
        rows: list[list[int]] = group.gather(self.micro.rows)
        where = "; ".join(f"rank {rank}, rows {', '.join(map(str, rows[rank]))}" for rank in self.culprits)
        where = where or "on no single rank: the sum over all ranks overflowed"
        if self.non_finite == "stop":
            raise RunError(
                f"non-finite loss or gradient at step {step.step}: {where}",
                "watch.non_finite",
                "nothing of this step was saved; look at these rows, lower train.learning_rate, "
                "or set watch.non_finite: skip to leave such steps out",
            )
        step.skipped = True

    # --- signals ---

    def interrupted(self) -> bool:
        """Whether a signal has reached this rank."""
        return self.interruption is not None and self.interruption()

    def stop(self) -> None:
        """Save and end, without the evaluation that may be due: whoever resumes makes up for it."""
        self.stopped = True
        self.evaluation_due = self.evaluation_due or self.control.should_evaluate
        self.control.should_evaluate = False
        self.control.should_save = self.control.should_training_stop = True

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Not a step more than asked for: the Trainer would take one when it resumes from the last checkpoint."""
        if self.stopped or self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """An evaluation takes nothing from training, and gives way to a signal."""
        with checkpoint.preserved():
            try:
                metrics: dict[str, float] = super()._evaluate(*args, **kwargs)
            except Interrupted:
                self.stop()
                return {"eval_loss": math.inf}  # never the best
        return metrics

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """One batch of an evaluation. An evaluation can take longer than the time to save after a signal."""
        interrupted = torch.tensor(float(self.interrupted()), device=self.args.device)
        if self.replicas.world > 1:
            dist.all_reduce(interrupted)
        if interrupted:
            raise Interrupted
        return super().prediction_step(*args, **kwargs)

    # --- checkpoints: the Trainer has none for a model sharded at load time ---

    def _save_checkpoint(self, *_: Any) -> None:
        self.saving.save(self, evaluation_due=self.evaluation_due, wait=self.stopped)

    def _load_from_checkpoint(self, from_checkpoint: str, *_: Any) -> None:
        checkpoint.load_adapter(self.model, Path(from_checkpoint))
        self.evaluation_due = bool(checkpoint.read_manifest(Path(from_checkpoint)).get("evaluation_due"))

    def _load_optimizer_and_scheduler(self, from_checkpoint: str | None) -> None:
        if from_checkpoint is not None:
            checkpoint.load_optimizer(self.optimizer, self.lr_scheduler, Path(from_checkpoint), self.model)

    def _load_rng_state(self, from_checkpoint: str | None) -> None:
        if from_checkpoint is not None:
            checkpoint.load_random(Path(from_checkpoint))

    def make_up_evaluation(self) -> None:
        """The evaluation that an interrupted run left out; its loss belongs to the checkpoint it was resumed from."""
        self._load_rng_state(str(self.saving.checkpoints / f"step-{self.state.global_step}"))
        self._determine_best_metric(self._evaluate(None, None), None)
        if not self.stopped:
            self.evaluation_due = False
            self._save_checkpoint()


class LoopCallbacks(TrainerCallback):  # type: ignore[misc]
    """The loop's work at moments for which the Trainer has no method to override."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if self.loop.evaluation_due:
            self._take_signals()
            self.loop.make_up_evaluation()

    def on_epoch_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Accelerate tells the sampler its epoch too, but not through the wrapper that skips batches on resume."""
        if self.loop.order is not None:
            self.loop.order.set_epoch(int(state.epoch or 0))

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._take_signals()

    def _take_signals(self) -> None:
        """From now on there is something to save; until now a signal ended the rank at once."""
        if self.loop.interruption is not None:
            self.loop.interruption.training = True

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        assert self.loop.latest is not None
        self.loop.liveness.after_update(self.loop.latest.learning_rate)

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if self.loop.signalled and state.global_step < state.max_steps:  # else it is done, and ends by itself
            self.loop.stop()

    def on_epoch_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        """What is done per epoch is not done for the part of one before a stop."""
        if self.loop.stopped and state.epoch == int(state.epoch):
            self.loop.stop()
        elif self.loop.stopped:
            control.should_evaluate = control.should_save = False
