"""Evaluate pairs in float32: what a small adapter adds to a margin is less than the noise of bfloat16."""

import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from windlass.train.fsdp import list_fsdp_modules
from windlass.weights.quantized import get_formats

LAYER: Final = re.compile(r"\blayers\.\d+$")
NARROW: Final = (torch.bfloat16, torch.float16)


def compare_precisely(model: nn.Module, autocast: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """Return a context in which pairs are evaluated. Sharded, they stay in 16 bits: FSDP2 casts what it gathers."""
    return autocast if list_fsdp_modules(model) else in_float32(model)


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Compute in float32, whatever the weights are stored in: each layer's are cast while it runs. Codes stay codes."""
    layers = [module for name, module in model.named_modules() if LAYER.search(name)]
    inside = {part for layer in layers for part in layer.modules()}
    casts = [Cast(layer, layer.modules()) for layer in layers]
    casts += [Cast(module, [module]) for module in model.modules() if module not in inside]
    device = next(model.parameters()).device.type
    with ExitStack() as stack, torch.autocast(device, enabled=False):
        for cast in casts:
            if cast.parameters:
                stack.enter_context(cast.module.register_forward_pre_hook(cast.widen))
                stack.enter_context(cast.module.register_forward_hook(cast.restore, always_call=True))
        yield


class Cast:
    """A module whose weights are in float32 while it runs."""

    def __init__(self, module: nn.Module, owners: Iterable[nn.Module]) -> None:
        self.module = module
        of_owners = [owner.parameters(recurse=False) for owner in owners if not get_formats(owner)]
        self.parameters = [parameter for each in of_owners for parameter in each if parameter.dtype in NARROW]
        self.stored: list[Tensor] = []

    def widen(self, *_: Any) -> None:
        self.stored = [parameter.data for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.data = parameter.data.float()

    def restore(self, *_: Any) -> None:
        for parameter, stored in zip(self.parameters, self.stored, strict=True):
            parameter.data = stored
        self.stored = []
