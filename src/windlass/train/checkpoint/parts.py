"""Adapters of experts that are split over ranks: every rank holds its own experts' part, files hold the whole.

What is saved is so the same for every number of ranks and every layout, and so is what can be resumed from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor

from windlass.errors import RunError
from windlass.model.targets import ExpertShard, ExpertShards, by_expert
from windlass.train.group import gather, rank


def holders(parts: ExpertShards) -> dict[int, int]:
    """First expert of a part -> the first rank that holds it; empty where nothing is split. A collective."""
    if not parts.held:
        return {}
    firsts = gather(next(iter(parts.held.values())).first)
    return {first: firsts.index(first) for first in sorted(firsts)}


def whole(parts: ExpertShards, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Tensor]:
    """The whole of each tensor, in host memory of its own, on rank 0; elsewhere this rank's. A collective.

    One tensor at a time: the whole adapter of many experts fits the host, not beside the model on its GPU. By way of
    the host, too: NCCL would open a channel, with buffers on the GPU, between rank 0 and every other at the first save.
    """
    held_by = holders(parts)
    for name, tensor in tensors:
        part = parts.of(name)
        if part is not None and rank() == 0:
            yield _assembled(name, tensor, part, held_by)
        else:
            if part is not None and held_by[part.first] == rank():
                dist.send(tensor.detach().contiguous().cpu(), 0)
            yield tensor if rank() else copied(tensor)


def _assembled(name: str, tensor: Tensor, part: ExpertShard, held_by: dict[int, int]) -> Tensor:
    ways = part.total // part.count
    rows, columns = tensor.shape
    shape = (ways * rows, columns) if ".lora_A." in name else (rows, ways * columns)
    whole = torch.empty(shape, dtype=tensor.dtype)
    for first, holder in held_by.items():
        piece = tensor.detach()
        if holder:
            piece = torch.empty_like(piece, device="cpu", memory_format=torch.contiguous_format)
            dist.recv(piece, holder)
        by_expert(name, whole, part.total)[first : first + part.count] = by_expert(name, piece, part.count).cpu()
    return whole


def copied(value: Any) -> Any:
    """The same structure with its tensors in host memory of their own."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(each) for each in value)
    return value


# --- the optimizer's state: for every parameter some numbers, and tensors that are of the parameter's shape ---


def whole_state(optimizer: torch.optim.Optimizer, model: PeftModel, parts: ExpertShards) -> dict[str, Any]:
    """The optimizer's state with whole tensors, in host memory of its own, on rank 0. A collective."""
    state = optimizer.state_dict()
    split = list(_split_keys(optimizer, model, parts, state))
    found = list(whole(parts, ((name, state["state"][index][key]) for name, index, key in split)))
    if rank():
        return state
    taken = {(index, key) for _, index, key in split}
    rest = {
        index: {key: value for key, value in each.items() if (index, key) not in taken}
        for index, each in state["state"].items()
    }
    copy: dict[str, Any] = copied({**state, "state": rest})
    for (_, index, key), tensor in zip(split, found, strict=True):
        copy["state"][index][key] = tensor
    return copy


def own_state(
    optimizer: torch.optim.Optimizer, model: PeftModel, parts: ExpertShards, state: dict[str, Any]
) -> dict[str, Any]:
    """Of a saved state, what belongs to this rank's parts."""
    own = dict(state["state"])
    for name, index, key in _split_keys(optimizer, model, parts, state):
        own[index] = {**own[index], key: parts.own(name, own[index][key])}
    return {**state, "state": own}


def _split_keys(
    optimizer: torch.optim.Optimizer, model: PeftModel, parts: ExpertShards, state: dict[str, Any]
) -> Iterator[tuple[str, Any, str]]:
    """Name, number and key of every tensor of the state that goes with a split parameter."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [index for group in state["param_groups"] for index in group["params"]]
    for parameter, index in zip(held, numbers, strict=True):
        name = names[id(parameter)]
        part = parts.of(name)
        for key, value in state["state"].get(index, {}).items() if part else ():
            if not isinstance(value, Tensor) or value.ndim == 0:
                continue
            if part is None or value.numel() not in (parameter.numel(), parameter.numel() * part.total // part.count):
                raise RunError(
                    f"the optimizer's {key} of {name} is not of its shape: it can't be put together of split experts'",
                    "train.optim",
                    "take adamw_torch",
                )
            yield name, index, key
