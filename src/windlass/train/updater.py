"""The second half of an optimizer step: gradients averaged, clipped and applied."""

import torch
from peft import PeftModel
from torch import Tensor

from windlass.runfile import Train
from windlass.train.fsdp import reshard
from windlass.train.initial import FixedHalves
from windlass.train.liveness import Liveness
from windlass.train.optimizer import create_optimizer, create_scheduler, is_metric_scheduler
from windlass.train.sync import ReplicaGroups


class Updater:
    """Averages, clips and applies the adapter's gradients, and proves in the first steps that all of it trains."""

    def __init__(self, model: PeftModel, train: Train, steps: int) -> None:
        self.model = model
        self.train = train
        self.replicas = ReplicaGroups(model)
        self.liveness = Liveness(model, self.replicas, train.output_dir)
        self.optimizer = create_optimizer(train, model.named_parameters(), steps)
        self.scheduler = create_scheduler(train, self.optimizer, steps)
        self.halves: FixedHalves | None = None  # fixed halves of adapters initialized from weights

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def set_mode(self, mode: str) -> None:
        """Switch schedule-free optimizers between the weights to train with and those to evaluate and save."""
        switch = getattr(self.optimizer, mode, None)
        if callable(switch):
            switch()
            if self.replicas.sharded:  # what is trained of the base may be gathered as it was
                reshard(self.model)

    def fix_halves(self) -> None:
        """Keep the halves of adapters that subtract their initial values as they are now."""
        self.halves = FixedHalves(self.model.get_base_model())

    def clear_fixed(self) -> None:
        """Clear the gradients of fixed halves: nothing of them may count, nor change."""
        if self.halves:
            self.halves.clear_gradients()

    def is_finite(self, loss: Tensor) -> Tensor:
        """Return on the device whether the loss and all of this rank's gradients are finite."""
        gradients = self.replicas.gradients()
        largest = torch.stack(torch._foreach_norm(gradients, torch.inf)) if gradients else loss.new_zeros(1)
        return torch.isfinite(loss) & torch.isfinite(largest).all()

    def scale_and_clip(self, supervised: Tensor) -> Tensor:
        """Turn gradients of the summed loss, averaged over ranks, into those of the mean loss, and clip them, in one
        pass. Returns their norm before clipping."""
        scale = self.replicas.world / supervised.clamp(min=1)
        norm = self.replicas.norm() * scale
        if self.train.max_grad_norm:
            scale = scale * (self.train.max_grad_norm / (norm + 1e-6)).clamp(max=1)
        gradients = self.replicas.gradients()
        if gradients:
            torch._foreach_mul_(gradients, scale)
        return norm

    def update(self, *, skip: bool) -> None:
        """Apply the gradients, unless this step is skipped."""
        if skip:
            self.optimizer.zero_grad()  # to None, so that the optimizer skips the parameters
            self.liveness.skip_update()
        else:
            self.liveness.before_update(self.learning_rate)
        self.optimizer.step()
        if self.halves:
            self.halves.restore()

    def finish(self, *, skipped: bool) -> str:
        """Check the update and prepare the next one. Returns the tensors that have stopped changing, if many have."""
        share = self.learning_rate / self.train.learning_rate
        self.liveness.after_update(share)
        unchanged = "" if skipped else self.liveness.find_unchanged(share)
        if not is_metric_scheduler(self.train):
            self.scheduler.step()
        self.optimizer.zero_grad()
        return unchanged

    def follow(self, eval_loss: float) -> None:
        """Lower the learning rate if the schedule follows the evaluation loss."""
        if is_metric_scheduler(self.train):
            self.scheduler.step(eval_loss)
