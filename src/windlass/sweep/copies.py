"""Copies of a model that share its weights: each can be given an adapter, hooks and replacements of its own."""

import types
from typing import Any, Final

import transformers
from torch import nn

from windlass.compat import ALL_PARALLEL_STYLES, get_fsdp_state, set_fsdp_state
from windlass.train.experts import exchange

SHARED: Final = "_parameters"  # the mapping itself, in which FSDP2 exchanges gathered weights and shards


def copy_model(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Return a copy of the modules, with the same parameters and buffers, and under the same states of FSDP2."""
    copies: dict[int, nn.Module] = {id(module): object.__new__(type(module)) for module in model.modules()}
    for module in model.modules():
        copied = copies[id(module)]
        for name, value in vars(module).items():
            vars(copied)[name] = value if name == SHARED else copy_value(value, copies)
        state = get_fsdp_state(module)
        if state is not None:
            set_fsdp_state(copied, state)
        if "exchange" in vars(module):  # under expert parallelism, it computes the experts that it was made for
            give_exchange(copied)
    result = copies[id(model)]
    assert isinstance(result, transformers.PreTrainedModel)
    return result


def copy_value(value: Any, copies: dict[int, nn.Module]) -> Any:
    """Copy a container, and let what refers to a module refer to its copy."""
    if isinstance(value, nn.Module):
        return copies.get(id(value), value)
    if isinstance(value, types.MethodType) and id(value.__self__) in copies:
        return types.MethodType(value.__func__, copies[id(value.__self__)])
    if type(value).__name__ in ("dict", "OrderedDict"):
        copied = value.copy()
        copied.update({key: copy_value(item, copies) for key, item in value.items()})
        return copied
    if isinstance(value, list | set):
        return type(value)(copy_value(item, copies) for item in value)
    return value


def give_exchange(experts: nn.Module) -> None:
    """Give copied experts an exchange of tokens of their own."""
    before = vars(experts).pop("exchange")
    vars(experts).pop("forward")
    ALL_PARALLEL_STYLES["ep_dispatch_experts"].install_forward(
        experts, before.ep_mesh, tp_mesh=before.tp_mesh, ep_implementation=exchange.NAME
    )
