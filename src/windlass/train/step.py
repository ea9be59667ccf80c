"""What an optimizer step works with: the model as it is trained, its updates, and the sums over the ranks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import torch
from peft import PeftModel
from torch import Tensor

from windlass.plan import Plan
from windlass.runfile import Train
from windlass.train.batches import Batch
from windlass.train.fsdp import get_device, list_fsdp_modules
from windlass.train.head import Head
from windlass.train.initial import FixedHalves
from windlass.train.kernels.compiled import Compiled
from windlass.train.kernels.lora_linear import FusedAdapters
from windlass.train.liveness import Liveness
from windlass.train.long_rows import RowGroup, balance_over
from windlass.train.loss import SourceLosses, balance_router, router_loss_weight
from windlass.train.optimizer import create_optimizer, create_scheduler, is_metric_scheduler
from windlass.train.patches import ModelPatches
from windlass.train.precision import compare_precisely
from windlass.train.preference import Preference
from windlass.train.recompute import recompute_layers
from windlass.train.sync import ReplicaGroups, WaitTimer


@dataclass(slots=True)
class Step:
    """What one optimizer step did, over all ranks."""

    step: int
    loss: float  # mean per supervised token, or pair
    grad_norm: float  # before clipping
    learning_rate: float
    job_tokens: int  # over all ranks, without padding
    requested: int  # what rank 0's watch requests of all ranks
    interrupted: bool  # any rank received a signal
    figures: dict[str, Any]  # what else is recorded: rewards of pairs, losses per data set of a mix
    skipped: bool = False


RADIX: Final = 4096  # of the tokens' two digits: float32 alone would count to 16.7 M only
Scalar = Any  # a Python number, or a value on the device before the host has read it


class StepSums(NamedTuple):
    """One rank's part of what a step adds up over the ranks, or the sum."""

    loss: Scalar  # summed over supervised tokens, or pairs
    balance: Scalar  # the router's balancing loss, summed over micro-batches
    supervised: Scalar  # tokens, or pairs
    tokens: Scalar  # without padding
    interrupted: Scalar  # a signal was received
    requested: Scalar  # by the watch
    not_compiled: Scalar  # a layer did not compile
    non_finite: Any  # loss or gradient; summed: a flag per rank
    figures: Any  # what else is recorded: rewards of pairs, losses per data set of a mix

    def pack(self, rank: int, world: int) -> Tensor:
        """Return the vector that is reduced, in float32, on the device of the loss."""
        device = self.loss.device
        flags = torch.zeros(world, device=device)
        flags[rank] = self.non_finite.float()
        known = [self.supervised, *divmod(self.tokens, RADIX), self.interrupted, self.requested, self.not_compiled]
        counts = torch.tensor(known, dtype=torch.float32, pin_memory=device.type == "cuda")
        losses = torch.stack([self.loss, self.balance])
        sums = torch.cat([losses, counts.to(device, non_blocking=True), flags, self.figures])
        # One rank's NaN would hide the other ranks' losses; its flag is what reports it.
        return torch.nan_to_num(sums)

    @classmethod
    def unpack(cls, sums: Tensor | Sequence[float], world: int) -> Self:
        """Name the parts of the reduced vector: still on the device, or as it was read."""
        flags = cls._fields.index("non_finite") + 1
        parts = [*sums[:flags], sums[flags : flags + world], sums[flags + world :]]
        loss, balance, supervised, high, low, *others = parts
        return cls(loss, balance, supervised, high * RADIX + low, *others)


ROUTED: Final = {"output_router_logits": True}  # what a forward returns for the balancing loss
SharedForward = Callable[["TrainedModel", Batch, Tensor | None], tuple[Tensor, Tensor | None]]


class TrainedModel:
    """The model as it is trained: its forward computes the loss, its layers are fused or compiled."""

    def __init__(
        self,
        plan: Plan,
        model: PeftModel,
        sources: Sequence[str],
        now: Callable[[], Any],
        group: RowGroup | None = None,
    ) -> None:
        train = plan.run.train
        layout = plan.layout
        self.peft = model
        self.causal_lm = model.get_base_model()
        self.head = Head(self.causal_lm)
        self.device = get_device()
        self.autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=train.in_bf16)
        self.router_weight = router_loss_weight(self.causal_lm, train.router_aux_loss_coef)
        # Weights can stay gathered through a step's micro-batches. Collected once: walking all modules takes
        # milliseconds.
        gather_once = layout.is_sharded and not layout.reshard_after_forward
        self.kept_gathered = list_fsdp_modules(model) if gather_once else []
        self.waits = WaitTimer(model, now, split_experts=layout.expert_parallel > 1)
        self.group = group
        if group:
            group.waits = self.waits
        self.sources = SourceLosses(sources, self.device)  # per data set of a mix
        self.preference = Preference(plan.run, self.sources) if plan.run.objective.of_pairs else None
        self.shared: SharedForward | None = None  # computes the losses of trials that train together
        self.patches = ModelPatches(
            self.causal_lm,
            dtype=torch.bfloat16 if train.in_bf16 else None,
            compiles=train.compile,
            noise_alpha=train.neftune_noise_alpha,
            group=group,
            by_document=plan.by_document,
        )
        recompute_layers(self.causal_lm, plan, compiled=bool(self.compiled))

    @property
    def compiled(self) -> Compiled | None:
        """The compiled parts of layers, if they are compiled."""
        return self.patches.compiled

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Within this, compiled layers run eagerly."""
        compiled = self.compiled
        if compiled:
            compiled.on = False
        try:
            yield
        finally:
            if compiled:
                compiled.on = True

    def evaluating(self) -> AbstractContextManager[Any]:
        """Return a context for evaluations: of pairs in float32, if that can be."""
        return self.autocast if self.preference is None else compare_precisely(self.causal_lm, self.autocast)

    @property
    def adapters(self) -> FusedAdapters:
        return self.patches.adapters

    @property
    def figures(self) -> SourceLosses | Preference:
        """What is added up along with the loss, and recorded."""
        return self.preference or self.sources

    def compute_loss(self, batch: Batch, balance_share: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the summed loss of a micro-batch, and the router's balancing loss in it if there is one."""
        if self.shared is not None:
            return self.shared(self, batch, balance_share)
        with self.autocast:
            outputs = self.causal_lm(**batch.inputs, **({} if balance_share is None else ROUTED))
            loss = self.sum_losses(outputs.last_hidden_state, batch)
            if balance_share is None:
                return loss, None
            balance = self.balance_router(outputs.router_logits, batch.mask)
        return loss + balance_share * balance, balance.detach()

    def sum_losses(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Return the summed loss of the targets, or of their pairs, and add up what is recorded of them."""
        if self.preference is not None:
            assert batch.pairs is not None
            return self.preference.compute(self.head.log_probs(hidden, batch.targets), batch.pairs)
        loss, losses = self.head.loss(hidden, batch.targets)
        if batch.sources is not None:
            self.sources.add(batch.sources, losses)
        return loss

    def balance_router(self, router_logits: Sequence[Tensor], mask: Tensor | None) -> Tensor:
        """Return the router's balancing loss of a micro-batch, or this rank's part of rows that ranks share."""
        config = self.causal_lm.config.get_text_config()
        if self.group is None:
            return balance_router(router_logits, config, mask)
        assert mask is not None
        return balance_over(self.group, router_logits, config.num_experts_per_tok, mask)


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
