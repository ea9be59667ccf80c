"""Evaluate pairs in float32: what a small adapter adds to a margin is less than the noise of bfloat16."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from windlass.weights.quantized import get_formats

LAYER: Final = re.compile(r"\blayers\.\d+$")
NARROW: Final = (torch.bfloat16, torch.float16)


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Compute in float32, whatever the weights are stored or gathered in: each layer's are cast while it runs. Codes
    stay codes.

    FSDP2 gathers a layer's weights before its hooks here run, a layer's split experts by themselves.
    """
    casts: dict[nn.Module, Cast] = {}  # of each module that owns weights
    for name, module in model.named_modules():
        is_whole = LAYER.search(name) or (name and isinstance(module, FSDPModule))
        cast = Cast(module)
        casts |= dict.fromkeys(module.modules(), cast) if is_whole else {}
        casts.setdefault(module, cast)
    for owner, cast in casts.items():
        if owner._parameters and not get_formats(owner):
            cast.owners.append(owner)
    device = next(model.parameters()).device.type
    with ExitStack() as stack, torch.autocast(device, enabled=False):
        for cast in {*casts.values()}:
            if isinstance(cast.module, FSDPModule):
                stack.enter_context(cast.module.register_forward_pre_hook(cast.keep, prepend=True, with_kwargs=True))
            if cast.owners or isinstance(cast.module, FSDPModule):
                stack.enter_context(cast.module.register_forward_pre_hook(cast.widen, with_kwargs=True))
                stack.enter_context(cast.module.register_forward_hook(cast.restore, always_call=True))
        yield


class Cast:
    """A module whose weights are in float32 while it runs."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.owners: list[nn.Module] = []
        self.inputs: Any = None  # before FSDP2 casts them
        self.stored: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []

    def keep(self, _: nn.Module, *inputs: Any) -> None:
        self.inputs = inputs

    def widen(self, *_: Any) -> Any:
        for owner in self.owners:
            for name, parameter in [*owner.named_parameters(recurse=False)]:
                if parameter.dtype in NARROW:
                    wide = nn.Parameter(parameter.detach().float(), parameter.requires_grad)
                    setattr(owner, name, wide)
                    self.stored.append((owner, name, parameter, wide))
        inputs = self.inputs
        self.inputs = None
        return inputs

    def restore(self, *_: Any) -> None:
        for owner, name, parameter, wide in self.stored:
            if getattr(owner, name) is wide:  # else FSDP2 has put its shard there
                setattr(owner, name, parameter)
        self.stored.clear()
