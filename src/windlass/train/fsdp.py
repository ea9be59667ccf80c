"""Modules that FSDP2 gathers and shards, and the device that they compute on."""

from collections.abc import Iterable, Mapping

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from windlass.compat import WAITS_FOR_GROUPS, TrainingState


def get_device() -> torch.device:
    """Return the device on which parameters compute."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def list_fsdp_modules(model: torch.nn.Module) -> list[FSDPModule]:
    """Return the modules that FSDP2 gathers one by one; none if nothing is sharded."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: torch.nn.Module) -> None:
    """Reshard every parameter: after a forward without a backward the head is still gathered."""
    for module in list_fsdp_modules(model):
        if WAITS_FOR_GROUPS:  # no forward of the head runs, so its group would be in a forward that doesn't end
            state = module._get_fsdp_state()
            state._modules_to_run_forward.clear()
            if state._fsdp_param_group:
                state._fsdp_param_group._training_state = TrainingState.IDLE
        module.reshard()


def shard_like(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return this rank's shards of tensors that belong to sharded parameters, by name; all others unchanged."""
    parameters = dict(model.named_parameters())
    shards = dict(tensors)
    for name, tensor in tensors.items():
        parameter = parameters.get(name)
        if isinstance(parameter, DTensor) and tensor.ndim:
            shards[name] = distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return shards


def keep_gathered(modules: Iterable[FSDPModule], keep: bool) -> None:
    """Keep the weights gathered after a backward for the next micro-batch, or free them (on the last one of a step)."""
    for module in modules:
        module.set_reshard_after_backward(not keep, recurse=False)
