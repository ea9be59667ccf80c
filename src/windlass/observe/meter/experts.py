"""How evenly a mixture's router spreads its tokens. Looked at in some steps only, so that the others pay nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def routers(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """Every module that chooses experts, in the order of the layers, and among how many it chooses.

    transformers' routers all return (logits, weights, indices) and know `num_experts` and `top_k`.
    """
    found = []
    for module in model.modules():
        experts = getattr(module, "num_experts", None)
        if isinstance(experts, int) and isinstance(getattr(module, "top_k", None), int) and _owns_weight(module):
            found.append((module, experts))
    return found


def _owns_weight(module: nn.Module) -> bool:
    return isinstance(getattr(module, "weight", None), Tensor)


class Balance:
    """Between `start` and `stop`, counts on the device how often each expert of each layer is chosen."""

    def __init__(self, model: nn.Module) -> None:
        self.routers = routers(model)
        self.counts: dict[int, Tensor] = {}
        self.handles: list[RemovableHandle] = []

    def start(self) -> None:
        self.counts = {}
        for layer, (module, experts) in enumerate(self.routers):
            # First of the hooks: expert parallelism appends one that renumbers the experts for its own rank.
            hook = self._hook(layer, experts)
            self.handles.append(module.register_forward_hook(hook, prepend=True))

    def stop(self) -> dict[str, Any] | None:
        """The balance, or None when no router ran."""
        while self.handles:
            self.handles.pop().remove()
        if not self.counts:
            return None
        counts = [self.counts[layer].tolist() for layer in sorted(self.counts)]
        self.counts = {}
        return summary(counts)

    def _hook(self, layer: int, experts: int) -> Any:
        def count(_module: nn.Module, _inputs: Any, output: Any) -> None:
            chosen = output[-1] if isinstance(output, tuple) else output
            if not isinstance(chosen, Tensor) or chosen.is_floating_point():
                return
            flat = chosen.detach().reshape(-1).long()
            # scatter_add and not bincount: bincount asks the GPU for the largest value and so waits for it.
            total = self.counts.setdefault(layer, torch.zeros(experts, device=flat.device))
            total.scatter_add_(0, flat.clamp(0, experts - 1), torch.ones(flat.shape, device=flat.device))

        return count


def summary(counts: list[list[float]]) -> dict[str, Any]:
    """1.0 is an even share. `busiest` 2.0: that expert got twice its even share."""
    busiest, idlest, unused = [], [], []
    for layer in counts:
        even = max(sum(layer) / len(layer), 1e-9)
        busiest.append(round(max(layer) / even, 4))
        idlest.append(round(min(layer) / even, 4))
        unused.append(sum(1 for n in layer if n == 0))
    return {"experts": len(counts[0]), "busiest": busiest, "idlest": idlest, "unused": unused}
