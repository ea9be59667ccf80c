"""What a batch holds, counted on the device so that nobody waits for the count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from windlass.observe.steps import IGNORED

SUMS = ("loss", "tokens", "padded_tokens", "supervised_tokens")


def counts(inputs: Mapping[str, Any]) -> Tensor | None:
    """tokens, padded, supervised of one micro-batch; None when there are no token ids in it."""
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor):
        return None
    mask, labels = inputs.get("attention_mask"), inputs.get("labels")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        tokens = mask.count_nonzero().double()
    else:  # packed rows come without a mask: every position is a token, but for what fills up a row to the longest
        tokens = torch.full((), ids.numel(), dtype=torch.float64, device=ids.device) - _filled(inputs)
    # Position i is learned through position i + 1's label: the first label of a row is never used.
    supervised = (labels[..., 1:] != IGNORED).count_nonzero().double() if isinstance(labels, Tensor) else tokens
    return torch.stack([tokens, ids.numel() - tokens, supervised])


def _filled(inputs: Mapping[str, Any]) -> Tensor | int:
    """Where several packed rows are one below the other: each position at a row's end that is a document of its own."""
    positions = inputs.get("position_ids")
    if not isinstance(positions, Tensor) or positions.dim() != 2 or len(positions) == 1:
        return 0
    return positions.flip(-1).cumsum(-1).eq(0).count_nonzero()


def loss_of(output: Any) -> Tensor | None:
    """The loss in whatever a model's forward returned."""
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif isinstance(output, tuple) and output:
        loss = output[0]
    else:
        loss = getattr(output, "loss", None)
    return loss.detach().double() if isinstance(loss, Tensor) and loss.numel() == 1 else None


def step_loss(losses: Sequence[Tensor], counts: Tensor, *, summed: bool) -> Tensor:
    """A step's loss from its micro-batches': `summed` ones are shares of it, others means over supervised tokens."""
    if not losses:
        return counts.new_zeros(())
    each = torch.stack(list(losses)).to(counts.device)
    if summed:
        return each.sum()
    weights = counts[:, 2]
    if len(weights) != len(each):
        return each.mean()
    return (each * weights).sum() / weights.sum().clamp(min=1)
