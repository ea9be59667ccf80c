"""Experts that are split over ranks: which of them this rank has, and their part of an adapter's matrices."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from windlass.ranks.collectives import all_gather


@dataclass(frozen=True, slots=True)
class ExpertShard:
    """The experts of a layer that this rank has, under expert parallelism."""

    first: int
    count: int
    total: int

    def cut(self, name: str, matrix: Tensor) -> Tensor:
        """Return this shard of an adapter's matrix of all experts, packed in the same way."""
        stack = view_by_expert(name, matrix, self.total)[self.first : self.first + self.count]
        return pack_experts(name, stack).clone()


class AdapterShards:
    """The tensors of a model's adapter of which this rank has a shard."""

    def __init__(self, model: nn.Module) -> None:
        modules: Any = model.named_modules()
        self.by_module: dict[str, ExpertShard] = {
            name: module.part for name, module in modules if getattr(module, "part", None)
        }

    def of(self, name: str) -> ExpertShard | None:
        """Return the shard of a parameter or of a tensor in a file: both have their module's name before `.lora_`."""
        return self.by_module.get(name.partition(".lora_")[0])

    def cut(self, name: str, matrix: Tensor) -> Tensor:
        """Return this rank's part of a saved tensor."""
        shard = self.of(name)
        return shard.cut(name, matrix) if shard else matrix


def get_expert_shard(parameter: Tensor) -> ExpertShard | None:
    """Return the experts of a stack that this rank has; None if they are not split."""
    mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
    if mesh is None or "ep" not in (mesh.mesh_dim_names or ()):
        return None
    count = parameter.shape[0] // mesh["ep"].size()
    return ExpertShard(mesh.get_local_rank("ep") * count, count, parameter.shape[0])


def view_by_expert(name: str, matrix: Tensor, experts: int) -> Tensor:
    """View an expert adapter's matrix as [experts, r, features]: in PEFT, experts vary slowest in A, fastest in B."""
    if ".lora_A." in name:
        return matrix.view(experts, -1, matrix.shape[1])
    return matrix.view(matrix.shape[0], -1, experts).permute(2, 1, 0)


def pack_experts(name: str, stack: Tensor) -> Tensor:
    """Return the packed matrix whose view by expert is `stack`: the inverse of `view_by_expert`."""
    rows = stack.shape[0] * stack.shape[1]
    if ".lora_A." in name:
        return stack.reshape(rows, -1)
    return stack.permute(2, 1, 0).reshape(-1, rows)


def expert_peer_groups(model: nn.Module) -> list[ProcessGroup]:
    """Return process groups that together span the ranks with the same experts as this one."""
    modules: Any = model.modules()
    for module in modules:
        if getattr(module, "part", None):
            mesh = module.get_param().device_mesh
            return [mesh.get_group(name) for name in mesh.mesh_dim_names if name != "ep" and mesh[name].size() > 1]
    return []


def find_shard_holders(shards: AdapterShards) -> dict[int, int]:
    """Return the first rank that has each shard of the experts, by the shard's first expert. A collective if split."""
    if not shards.by_module:
        return {}
    firsts = all_gather(next(iter(shards.by_module.values())).first)
    return {first: firsts.index(first) for first in sorted(set(firsts))}
