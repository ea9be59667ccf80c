"""What an optimizer step did, and what of it is added up over the ranks in one collective."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import torch
from torch import Tensor


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
    figures: dict[str, Any]  # what else is recorded: rewards, losses per data set of a mix
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
    figures: Any  # what else is recorded: rewards, losses per data set of a mix

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
