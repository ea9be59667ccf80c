"""One Layout: how many ranks, what is split over them, and what each of them keeps."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.errors import Problem
from windlass.model.family import Family

# Every name that `layout.name` may have, in the order from the most to the least traffic.
LAYOUTS = {
    "full-shard": "every layer's weights are gathered for its forward, dropped, and gathered again for its backward",
    "no-reshard": "weights are gathered once per optimizer step and kept whole until its last backward",
    "hybrid": "sharded inside a node, replicated across nodes: weights travel over the node's own links only",
    "expert-parallel": "experts stay on their rank and tokens travel to them; the dense rest is sharded",
    "resident": "every rank holds the whole base: no weight travels",
}


@dataclass(frozen=True, slots=True)
class Layout:
    """shard x replicate = ranks. `expert_parallel` divides `shard`: the ranks that experts are split over."""

    name: str  # one of LAYOUTS
    reason: str  # why this one: chosen, demanded by run.yaml:40, taken from fsdp.yaml …
    nodes: int
    gpus_per_node: int
    shard: int  # ranks that the dense weights are split over (transformers' fsdp_size)
    replicate: int = 1  # replicas of that (dp_replicate_size)
    expert_parallel: int = 1  # ep_size: experts stay on their rank, tokens travel
    reshard_after_forward: bool = True
    offload: bool = False  # the frozen base rests in host memory; the adapter and all of its own stay on the GPU
    activation_checkpointing: bool = False
    precision: str = "bf16"  # bf16 or no: the dtype that compute runs in
    base_dtype: str = "bf16"  # fp8: the frozen base stays as published, dequantised layer by layer as it is used

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node


def check_wrap(name: str, family: Family, where: str) -> Problem | None:
    """Whether every class of a comma-separated list is the one that this family is sharded by."""
    wrong = [part for part in (p.strip() for p in name.split(",")) if part and part != family.layer]
    if not wrong:
        return None
    return Problem(
        f"{family.causal_lm} has no layer class {', '.join(map(repr, wrong))}; it is sharded by '{family.layer}'",
        where,
        f"write {family.layer}, or leave the key out: windlass knows the layer of each model family",
    )
