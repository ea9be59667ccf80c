"""How the run is spread over ranks: an Accelerate FSDP YAML or the run file's `layout` section -> one Layout."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """shard x replicate = ranks. `expert_parallel` divides `shard`: the ranks that experts are split over."""

    name: str  # full-shard, no-reshard, hybrid, expert-parallel, resident (every rank holds the whole base)
    reason: str  # why this one: chosen, demanded by run.yaml:40, taken from fsdp.yaml …
    nodes: int
    gpus_per_node: int
    shard: int  # ranks that the dense weights are split over (transformers' fsdp_size)
    replicate: int = 1  # replicas of that (dp_replicate_size)
    expert_parallel: int = 1  # ep_size: experts stay on their rank, tokens travel
    reshard_after_forward: bool = True
    offload: bool = False  # parameters, and with them their gradients and optimizer, in host memory
    activation_checkpointing: bool = False
    precision: str = "bf16"  # bf16, fp16 or no: the dtype that compute runs in

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node
