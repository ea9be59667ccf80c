"""The training loop: read `Loop.run` and `Loop.train_step` from top to bottom."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor

from windlass.ranks import collectives as group
from windlass.train.batches import Batch, Batches, RowError
from windlass.train.checkpoint.snapshot import restore_checkpoint
from windlass.train.evaluate import evaluate
from windlass.train.experts.exchange import overlap_shared_experts
from windlass.train.initial import FixedHalves
from windlass.train.kernels import kept
from windlass.train.kernels.compiled import Compiled
from windlass.train.kernels.lora_linear import FusedAdapters, fuse_layers
from windlass.train.liveness import stop_non_finite
from windlass.train.loss import SourceLosses, patch_forward, router_loss_weight
from windlass.train.noise import add_embedding_noise
from windlass.train.optimizer import create_optimizer, create_scheduler, is_metric_scheduler
from windlass.train.parallel import get_device, is_sharded, keep_gathered, list_fsdp_modules
from windlass.train.sync import WaitTimer

if TYPE_CHECKING:
    from windlass.observe.recorder import Recorder
    from windlass.observe.watch.run import RunWatch
    from windlass.plan import Plan
    from windlass.ranks.rank import StopSignal
    from windlass.train.checkpoint.saver import Saver
    from windlass.train.console import Progress
    from windlass.train.liveness import Liveness
    from windlass.train.samples import Samples
    from windlass.train.sync import ReplicaGroups
    from windlass.train.trackers import Trackers


@dataclass(slots=True)
class Step:
    """What one optimizer step did, over all ranks."""

    step: int
    loss: float  # mean per supervised token
    grad_norm: float  # before clipping
    learning_rate: float
    job_tokens: int  # over all ranks, without padding
    skipped: bool = False


@dataclass(eq=False)
class Loop:
    """Trains the adapter of `model` on `batches`. Everything else that it uses is passed in."""

    plan: Plan
    model: PeftModel
    batches: Batches
    validation: Batches | None
    replicas: ReplicaGroups  # the adapter's gradients: one reduction, equal results on all ranks
    liveness: Liveness  # proves in the first steps that all of the adapter trains
    stop_signal: StopSignal
    recorder: Recorder  # measures each step
    watch: RunWatch  # stalls, alarms
    saver: Saver  # checkpoints
    progress: Progress  # the terminal
    trackers: Trackers  # TensorBoard, W&B …
    samples: Samples | None = None  # prompts continued at evaluations
    halves: FixedHalves | None = None  # fixed halves of adapters initialized from weights

    step: int = 0  # optimizer steps done
    tokens: int = 0  # tokens trained on by all ranks since the run began
    stopped: bool = False  # stopped by a signal, with everything saved
    evaluation_due: bool = False  # an evaluation was skipped to stop in time; the resumed run does it
    eval_loss: float | None = None  # evaluation loss at this step
    log_history: list[dict[str, Any]] = field(default_factory=list)
    unlogged: list[float] = field(default_factory=list)  # losses of the steps since the last log

    def __post_init__(self) -> None:
        self.train, layout = self.plan.run.train, self.plan.layout
        self.causal_lm = self.model.get_base_model()
        self.accumulation = self.plan.batch.accumulation
        self.steps_per_epoch = None if self.batches.order is None else len(self.batches)  # unknown for a stream
        epochs = math.ceil(self.train.num_train_epochs * (self.steps_per_epoch or 1))
        self.total = self.train.max_steps if self.train.max_steps > 0 else epochs
        self.device = get_device()
        self.autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.train.bf16)
        self.router_weight = router_loss_weight(self.causal_lm, self.train.router_aux_loss_coef)
        # Weights can stay gathered through a step's micro-batches. Collected once: walking all modules takes
        # milliseconds.
        gather_once = is_sharded(layout) and not layout.reshard_after_forward
        self.kept_gathered = list_fsdp_modules(self.model) if gather_once else []
        self.waits = WaitTimer(self.model, self.recorder.now, split_experts=layout.expert_parallel > 1)
        self.sources = SourceLosses(self.batches.names, self.device)  # per data set of a mix
        patch_forward(self.causal_lm, self.sources)
        self.compiled = Compiled(self.causal_lm) if self.train.compile else None
        self._fuse()
        if self.train.neftune_noise_alpha:
            add_embedding_noise(self.causal_lm.get_input_embeddings(), self.train.neftune_noise_alpha)
        if self.train.gradient_checkpointing or layout.activation_checkpointing:
            keeps = {} if self.compiled else {"context_fn": kept.checkpoint_contexts(self.train.keeps_products)}
            self.causal_lm.activation_checkpointing_enable({"use_reentrant": False, **keeps})
        self.optimizer = create_optimizer(self.train, self.model.named_parameters(), self.total)
        self.scheduler = create_scheduler(self.train, self.optimizer, self.total)

    @property
    def epoch(self) -> float:
        return self.step / (self.steps_per_epoch or self.total)

    # --- the run ---

    def run(self, resume: Path | None = None) -> None:
        """Train to the end or until a signal; after every step log, evaluate and save as configured."""
        if resume is not None:
            restore_checkpoint(self, resume)
        if self.plan.run.lora.starts_from_weights:
            self.halves = FixedHalves(self.causal_lm)
        self.causal_lm.train()
        if self.compiled and (why := self.compiled.prove(self)):
            self._disable_compiled(self.compiled, why)
        self.recorder.start(self.step)
        self.watch.start(self.step, self.total)
        self.progress.start(self.total)
        self.stop_signal.training = True  # until now a signal ended the rank at once: nothing to save
        if self.evaluation_due and evaluate(self):
            self.save()  # its loss belongs to the checkpoint that was resumed from
        began_at, micro_batches = self.step, self.batches.train(self.step, self.accumulation, self.steps_per_epoch)
        while self.step < self.total and not self.stopped:
            self.progress.start_step(self.step + 1)
            try:
                step, requested, interrupted = self.train_step(micro_batches)
            except RowError as error:
                raise self.saver.save_before(self, error, began_at) from None
            self.progress.end_step(step)

            save_requested = self.watch.act(requested)  # an alarm saves, or stops the run
            evaluate_now = self.validation is not None and self._is_due(self.train.eval_strategy, self.train.eval_steps)
            save = self._is_due(self.train.save_strategy, self.train.save_steps)
            self._log_step(step)
            if interrupted and self.step < self.total:
                self.stopped, self.evaluation_due = True, evaluate_now
            elif evaluate_now:
                evaluate(self)
            if save or save_requested or self.stopped:
                self.save()
        self.set_optimizer_mode("eval")
        if self.compiled:
            self.progress.console.print(f"compiled  {self.compiled.graphs} graphs in all")
        self.saver.close()
        self.recorder.event("end", self.step)
        self.recorder.close()
        self.trackers.log_steps()

    def _is_due(self, strategy: str, every_steps: int) -> bool:
        last = self.step == self.total
        epoch_ends = last or (self.steps_per_epoch is not None and self.step % self.steps_per_epoch == 0)
        return {"no": False, "steps": last or self.step % every_steps == 0, "epoch": epoch_ends}[strategy]

    # --- compiled layers ---

    def _fuse(self) -> None:
        """Fuse the operations of layers that aren't compiled; a compiler does that itself."""
        dtype = torch.bfloat16 if self.train.bf16 else None
        self.adapters = FusedAdapters([], dtype) if self.compiled else fuse_layers(self.causal_lm, dtype)
        overlap_shared_experts(self.causal_lm)

    def _disable_compiled(self, compiled: Compiled, why: str) -> None:
        compiled.remove()
        self.compiled = None
        self._fuse()
        self.progress.console.print(
            f"warning: train.compile: layers run eagerly on all ranks: {why}\n"
            "hint: compiling needs `c++` on CPUs and triton on GPUs; or set train.compile: false",
            style="yellow",
        )

    # --- one optimizer step ---

    def train_step(self, micro_batches: Iterator[Batch]) -> tuple[Step, int, bool]:
        """Run the micro-batches of one optimizer step, one collective, one wait for the device, and the update.

        Returns what the step did, the action that rank 0's watch requests, and whether any rank received a signal.
        """
        self.set_optimizer_mode("train")
        rows: list[int] = []
        tokens = supervised = 0
        loss, balance = torch.zeros(2, device=self.device)
        of_step: Iterator[Batch] = islice(micro_batches, self.accumulation)
        balance_share = None
        if self.router_weight:  # the balancing loss is a mean per micro-batch; its share of the step is needed first
            of_step = iter(all_of_step := list(of_step))
            balance_share = self.balance_share(all_of_step)

        # Forward and backward.
        with self.adapters.unchanged():
            for number, host_batch in enumerate(of_step, 1):
                self.recorder.count_tokens(host_batch.collated)
                batch = host_batch.to(self.device)
                self.recorder.mark("data")
                if self.kept_gathered:
                    keep_gathered(self.kept_gathered, keep=number < self.accumulation)
                self.waits.on = number == 1
                with self.autocast:
                    outcome = self.causal_lm(**batch.inputs, balance_share=balance_share)
                of_batch, of_router = outcome if self.router_weight else (outcome, None)
                self.waits.on = False
                self.recorder.mark("forward")
                of_batch.backward()
                self.recorder.mark("backward")
                loss += of_batch.detach()
                if of_router is not None:
                    balance += of_router
                rows, tokens, supervised = rows + batch.rows, tokens + batch.tokens, supervised + batch.supervised

        # One collective: gradients, and with them loss, tokens, faults, signals and the watch's request.
        if self.halves:
            self.halves.clear_gradients()
        sums = self.replicas.average(self._local_sums(loss, balance, supervised, tokens))
        self.recorder.mark("communication")

        # Gradients of the summed loss, averaged over ranks, become those of the mean loss, and are clipped, in one
        # pass.
        scale = self.replicas.world / sums[2].clamp(min=1)
        norm = self.replicas.norm() * scale
        if self.train.max_grad_norm:
            scale = scale * (self.train.max_grad_norm / (norm + 1e-6)).clamp(max=1)
        if gradients := self.replicas.gradients():
            torch._foreach_mul_(gradients, scale)

        # The one wait for the device, and the checks.
        figures: list[float] = torch.cat([sums, norm[None]]).tolist()
        total, balanced, counted, job_tokens, interrupted, requested, failed, *each, grad_norm = figures
        if failed and self.compiled:  # on any rank: a shape that fails to compile, or too many shapes
            self._disable_compiled(self.compiled, self.compiled.reason())
        faults, of_sources = each[: self.replicas.world], each[self.replicas.world :]
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        step = Step(self.step + 1, total / max(counted, 1), grad_norm, learning_rate, int(job_tokens))
        if any(faults) or not math.isfinite(grad_norm):
            faulty = [rank for rank, fault in enumerate(faults) if fault]
            step.loss, step.skipped = math.nan if faulty else step.loss, True
            stop_non_finite(self.plan.run.watch.non_finite, step.step, faulty, rows)
            self.optimizer.zero_grad()  # to None, so that the optimizer skips the parameters
            self.liveness.skip_update()
        else:
            self.liveness.before_update(learning_rate)

        # Update.
        self.optimizer.step()
        if self.halves:
            self.halves.restore()
        self.recorder.mark("optimizer")
        self.liveness.after_update()
        unchanged = "" if step.skipped else self.liveness.find_unchanged(learning_rate / self.train.learning_rate)
        if not is_metric_scheduler(self.train):
            self.scheduler.step()
        self.optimizer.zero_grad()

        self.step, self.eval_loss = step.step, None
        self.tokens += step.job_tokens
        waited = self.waits.seconds()
        of_job: dict[str, Any] = {
            "epoch": self.epoch,
            "loss": step.loss,
            "grad_norm": step.grad_norm,
            "router_aux_loss": balanced / (self.accumulation * self.replicas.world) if self.router_weight else None,
            "source_loss": self.sources.means(of_sources) or None,
            "learning_rate": learning_rate,
            "job_tokens": step.job_tokens,
            "skipped": step.skipped or None,
            "unchanged": unchanged or None,
        }
        wait_seconds = waited and waited * self.accumulation
        self.recorder.end_step(
            step.step, rows=rows, wait_seconds=wait_seconds, **(of_job if group.get_rank() == 0 else {})
        )
        return step, round(requested), interrupted > 0

    def _local_sums(self, loss: Tensor, balance: Tensor, supervised: int, tokens: int) -> Tensor:
        """Return what is summed over the ranks: seven numbers, a non-finite flag per rank, and losses by data set."""
        gradients = self.replicas.gradients()
        largest = torch.stack(torch._foreach_norm(gradients, torch.inf)) if gradients else loss.new_zeros(1)
        finite = torch.isfinite(loss) & torch.isfinite(largest).all()
        failed = bool(self.compiled and self.compiled.problem)
        own = [supervised, tokens, self.stop_signal.received, self.watch.request, failed, *[0] * self.replicas.world]
        counts = torch.tensor(own, dtype=torch.float32, pin_memory=self.device.type == "cuda")
        counted = counts.to(self.device, non_blocking=True)
        sums = torch.cat([torch.stack([loss, balance]), counted, self.sources.take()])
        sums[7 + group.get_rank()] = (~finite).float()
        return torch.nan_to_num(sums)

    def balance_share(self, batches: list[Batch]) -> Tensor:
        """Return the factor that scales a micro-batch's balancing loss to the summed loss of the tokens.

        The step's loss is the mean over its tokens plus the mean of the balancing loss over its micro-batches. This is
        the only other collective of a step, and only mixtures whose config has such a loss need it.
        """
        total = torch.tensor(float(sum(batch.supervised for batch in batches)), device=self.device)
        if self.replicas.world > 1:
            dist.all_reduce(total)
        return self.router_weight * total.clamp(min=1) / (self.accumulation * self.replicas.world)

    def set_optimizer_mode(self, mode: str) -> None:
        """Switch schedule-free optimizers between the weights to train with and those to evaluate and save."""
        if callable(switch := getattr(self.optimizer, mode, None)):
            switch()

    # --- evaluate, save, log ---

    def save(self) -> None:
        self.set_optimizer_mode("eval")
        self.saver.save(self, wait=self.stopped)
        self.recorder.mark("pause")

    def _log_step(self, step: Step) -> None:
        """Send every step to the trackers, and every train.logging_steps the means since the last time."""
        self.unlogged.append(step.loss)
        if self.step % self.train.logging_steps == 0:
            loss, self.unlogged = sum(self.unlogged) / len(self.unlogged), []
            values = {"loss": loss, "grad_norm": step.grad_norm, "learning_rate": step.learning_rate}
            self.log({**values, "num_tokens": float(self.tokens)})
        self.trackers.log_steps()

    def log(self, values: dict[str, float]) -> None:
        self.log_history.append({**values, "epoch": self.epoch, "step": self.step})
        self.trackers.log({**values, "epoch": self.epoch}, self.step)
