"""The training loop: micro-batches to gradients, gradients to steps."""

from __future__ import annotations

import argparse
import math
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist
from images import Batch, to_device
from ranks import Place
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from windlass.errors import RunError
from windlass.meter import StepProfiler

FRESH_RATE, TUNING_RATE = 2e-4, 1e-4  # learning rate at a global batch of 16 images; others by the square root
WEIGHT_DECAY = 0.05  # of weights, not of norms and biases
WARM_UP = 0.1  # share of the steps, at most 1000
GRADIENT_NORM = 10.0  # at most


@dataclass(frozen=True, slots=True)
class Steps:
    """Divides an epoch's micro-batches into optimizer steps. The last step of an epoch may have fewer."""

    batches: int  # per epoch
    accum: int
    epochs: int

    @property
    def per_epoch(self) -> int:
        return math.ceil(self.batches / self.accum)

    @property
    def all(self) -> int:
        return self.per_epoch * self.epochs

    def micro_batches(self, step: int) -> int:
        return min(self.accum, self.batches - step % self.per_epoch * self.accum)


class Training:
    """The model, its optimizer and the loop."""

    def __init__(self, args: argparse.Namespace, here: Place, model: nn.Module, steps: Steps) -> None:
        self.args, self.here, self.model, self.steps = args, here, model, steps
        self.done = 0  # steps
        self.told_to_stop = False
        signal.signal(signal.SIGTERM, self.stop)
        global_batch = args.batch_size * args.accum_steps * here.ranks
        self.peak = (TUNING_RATE if args.weights_path else FRESH_RATE) * math.sqrt(global_batch / 16)
        self.optimizer = optimizer_for(model)
        # No buffers are broadcast: the norms are frozen or have none.
        self.ranks = DistributedDataParallel(model, forward_sync_buffers=False, gradient_as_bucket_view=True)
        self.bf16 = here.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        here.say(
            f"{steps.all} steps of {global_batch} images ({args.batch_size} x {args.accum_steps} x {here.ranks} ranks) "
            f"on {here.device.type} in {'bfloat16' if self.bf16 else 'float32'}, learning rate up to {self.peak:.3g}"
        )

    def stop(self, _number: int, _frame: FrameType | None) -> None:
        self.told_to_stop = True

    def precision(self) -> torch.autocast:
        return torch.autocast(self.here.device.type, torch.bfloat16, enabled=self.bf16)

    def epoch(self, number: int, batches: Iterator[Batch], meter: StepProfiler) -> bool:
        """Train an epoch. Returns whether it ended: a signal may stop it."""
        per_epoch, stopped = self.steps.per_epoch, False
        while self.done < (number + 1) * per_epoch and not stopped:
            count, rate = self.steps.micro_batches(self.done), rate_at(self.done, self.steps.all, self.peak)
            loss = self.gradients(batches, count, meter)
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.optimizer.zero_grad()
            meter.mark("optimizer")
            self.done += 1
            if self.done % self.args.debug_freq == 0 or self.done % per_epoch == 0:
                stopped = self.check(loss, norm, meter)
            items = count * self.args.batch_size
            meter.step(items, loss=loss, grad_norm=norm, learning_rate=rate, epoch=self.done / per_epoch)
        return not stopped

    def gradients(self, batches: Iterator[Batch], count: int, meter: StepProfiler) -> Tensor:
        """Compute the mean gradient of `count` micro-batches, reduced once, in the last backward. Returns their
        loss."""
        total = torch.zeros((), device=self.here.device)
        for number in range(count):
            images, targets = to_device(next(batches), self.here.device)
            meter.mark("data")
            with nullcontext() if number == count - 1 else self.ranks.no_sync():
                with self.precision():
                    loss = sum(self.ranks(images, targets).values()) / count
                meter.mark("forward")
                loss.backward()
                meter.mark("backward")
            total += loss.detach()
        return total

    def check(self, loss: Tensor, norm: Tensor, meter: StepProfiler) -> bool:
        """Log all ranks' loss, raise if it is not finite, and return whether any rank got a stop signal: then all stop.

        This waits for the GPU and the other ranks, so it isn't done in every step.
        """
        together = torch.stack([loss, torch.tensor(float(self.told_to_stop), device=loss.device)])
        dist.all_reduce(together)
        mean, stop = together[0].item() / self.here.ranks, bool(together[1])
        if not math.isfinite(mean + norm.item()):
            raise RunError(f"loss {mean}, gradient norm {norm.item()}", f"step {self.done}", "no checkpoint has it")
        rate = meter.latest.get("images_per_second", math.nan) * self.here.ranks
        where = f"step {self.done}/{self.steps.all}"
        self.here.say(f"{where}: loss {mean:.4f}, gradient {norm.item():.3g}, {rate:.4g} images/s")
        return stop


def optimizer_for(model: nn.Module) -> Optimizer:
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = [parameter for parameter in learning if parameter.dim() > 1]
    others = [parameter for parameter in learning if parameter.dim() <= 1]
    groups = [{"params": weights, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return AdamW(groups, fused=True)


def rate_at(step: int, steps: int, peak: float) -> float:
    """Return the learning rate: linear warm-up, then a cosine."""
    rising = min(1000, max(1, round(steps * WARM_UP)))
    falling = (step - rising) / max(1, steps - rising)
    return peak * min((step + 1) / rising, 0.5 * (1 + math.cos(math.pi * max(0.0, falling))))
