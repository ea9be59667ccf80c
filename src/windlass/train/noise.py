"""NEFTune: uniform noise on the input embeddings while training (Jain et al., 2023)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def add_noise(alpha: float, ranks_per_row: int = 1) -> Callable[..., Tensor]:
    """Return a forward hook that adds noise of up to alpha / sqrt(length x width) to every value, except in
    evaluations."""

    def add(module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        if not module.training:
            return output
        most = alpha / (ranks_per_row * output.size(1) * output.size(2)) ** 0.5
        return output + torch.empty_like(output).uniform_(-most, most)

    return add
