"""How evenly a mixture's routers spread tokens over the experts, counted in sampled steps only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def routers(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """Every module that chooses experts, in the order of the layers, with the number of experts.

    transformers' routers all return (logits, weights, indices) and have `num_experts` and `top_k`.
    """
    found = []
    for module in model.modules():
        experts, top_k, weight = (getattr(module, name, None) for name in ("num_experts", "top_k", "weight"))
        if isinstance(experts, int) and isinstance(top_k, int) and isinstance(weight, Tensor):
            found.append((module, experts))
    return found


class ExpertBalance:
    """Between `start` and `stop`, counts on the device how often each expert of each layer is chosen."""

    def __init__(self, model: nn.Module) -> None:
        self.routers = routers(model)
        self.counts: dict[int, Tensor] = {}
        self.hooks: list[RemovableHandle] = []

    def start(self) -> None:
        self.stop()
        for layer, (router, experts) in enumerate(self.routers):

            def count(_module: Any, _inputs: Any, output: Any, layer: int = layer, experts: int = experts) -> None:
                chosen = output[-1] if isinstance(output, tuple) else output
                # No gradients: an evaluation between two steps.
                if torch.is_grad_enabled() and isinstance(chosen, Tensor) and not chosen.is_floating_point():
                    flat = chosen.detach().reshape(-1).long()
                    # scatter_add and not bincount, which reads the largest value and so waits for the GPU.
                    total = self.counts.setdefault(layer, torch.zeros(experts, device=flat.device))
                    total.scatter_add_(0, flat.clamp(0, experts - 1), torch.ones(flat.shape, device=flat.device))

            # Before all other hooks: expert parallelism appends one that renumbers the experts for its own rank.
            self.hooks.append(router.register_forward_hook(count, prepend=True))

    def stop(self) -> dict[str, Any] | None:
        """The balance, or None if no router ran. 1.0 is an even share; `busiest` 2.0 is twice an even share."""
        while self.hooks:
            self.hooks.pop().remove()
        counts = [self.counts[layer].tolist() for layer in sorted(self.counts)]
        self.counts = {}
        if not counts:
            return None
        even = [max(sum(layer) / len(layer), 1e-9) for layer in counts]
        return {
            "experts": len(counts[0]),
            "busiest": [round(max(layer) / share, 4) for layer, share in zip(counts, even, strict=True)],
            "idlest": [round(min(layer) / share, 4) for layer, share in zip(counts, even, strict=True)],
            "unused": [layer.count(0) for layer in counts],
        }
