"""What is added to a step's loss or recorded beside it: the router's balancing loss, losses per data set."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from windlass.errors import UserError


class SourceLosses:
    """The loss per data set, accumulated along with the total and reduced in the same collective."""

    def __init__(self, names: Sequence[str], device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.names = names if len(names) > 1 else ()
        self.sums = torch.zeros(2 * len(self.names), dtype=dtype, device=device)  # losses per data set, then tokens

    def add(self, sources: Tensor, losses: Tensor) -> None:
        if not self.names:
            return
        losses = losses.to(self.sums.dtype)
        self.sums.index_add_(0, sources, losses)
        self.sums.index_add_(0, sources + len(self.names), torch.ones_like(losses))

    def take(self) -> Tensor:
        """Return the sums since the last call."""
        sums = self.sums
        self.sums = torch.zeros_like(sums)
        return sums

    def means(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the mean loss of each data set that had a token, from all ranks' sums."""
        losses = sums[: len(self.names)]
        tokens = sums[len(self.names) :]
        return {name: loss / n for name, loss, n in zip(self.names, losses, tokens, strict=True) if n}

    def describe(self, sums: Sequence[float], _: float) -> dict[str, Any]:
        """Return what is recorded of a step, by name."""
        return {"source_loss": self.means(sums) or None}


def balance_router(logits: Sequence[Tensor], config: Any, mask: Tensor | None) -> Tensor:
    """Return the balancing loss: Mixtral's, which every mixture in transformers uses. mask: 1 for each token that
    counts."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    experts = getattr(config, "num_experts", None) or config.num_local_experts
    loss: Tensor = load_balancing_loss_func(tuple(logits), experts, config.num_experts_per_tok, mask)
    return loss


def router_loss_weight(model: PreTrainedModel, coefficient: float | None = None) -> float:
    """Return the weight of the balancing loss: the run file's, else config.json's if it enables this loss, else 0.

    TRL's SFTTrainer adds it to every mixture, whatever config.json says.
    """
    config = model.config.get_text_config()
    if coefficient and not hasattr(config, "output_router_logits"):
        problem = f"{type(model).__name__} has no balancing loss of its router to weight"
        raise UserError(problem, "train.router_aux_loss_coef", "leave it out", "no-balancing-loss")
    if coefficient is not None or not getattr(config, "output_router_logits", False):
        return coefficient or 0.0
    return float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0)
