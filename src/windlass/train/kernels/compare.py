"""Compare two ways to compute something, values and gradients, before one replaces the other on this device."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import torch
from torch import Tensor, nn

CLOSE: Final = 1e-5


def are_equal(ours: Callable[..., Any], theirs: Callable[..., Any], *inputs: Tensor) -> bool:
    """Return whether two functions have the same values and gradients."""
    with suppress(Exception), torch.enable_grad(), torch.autocast(inputs[0].device.type, enabled=False):
        values = compute_values(ours, inputs)
        expected = compute_values(theirs, inputs)
        return len(values) == len(expected) and all(map(_are_close, values, expected))
    return False


def compute_values(function: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return a function's outputs, then the gradients of its inputs."""
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    answer = function(*inputs)
    outputs = [answer] if isinstance(answer, Tensor) else list(answer)
    smooth = [output for output in outputs if output.is_floating_point()]
    gradients = [make_numbers(output.device, *output.shape).to(output.dtype) for output in smooth]
    return [*outputs, *torch.autograd.grad(smooth, inputs, gradients)]


def _are_close(one: Tensor, other: Tensor) -> bool:
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and torch.allclose(one.double(), other.double(), rtol=CLOSE, atol=CLOSE)
    )


def make_numbers(device: torch.device, *shape: int) -> Tensor:
    """Return fixed random numbers, without drawing from the run's generators."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)


def copy_module(module: nn.Module, weight: Tensor) -> nn.Module:
    """Return a copy of a module with a small weight."""
    copied: nn.Module = object.__new__(type(module))  # copy.copy would make FSDP2's classes build a new one
    copied.__dict__ = {**module.__dict__, "_parameters": {"weight": weight}, "_modules": {}, "training": False}
    return copied
