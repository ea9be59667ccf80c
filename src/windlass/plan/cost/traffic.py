"""Bytes that cross a link, which link, and how long that takes."""

from __future__ import annotations

from windlass.hardware import Fabric
from windlass.plan.cost.activations import FLOAT, tokens
from windlass.plan.cost.memory import adapter_share, base_bytes, expert_adapters, gathered
from windlass.plan.cost.shape import Shape
from windlass.plan.cost.work import Flow, Work


def flows(work: Work, shape: Shape) -> tuple[Flow, ...]:
    """Everything that moves in one optimizer step."""
    found = [*_gathers(work, shape), *_dispatch(work, shape), *_reduce(work, shape), *_offload(work, shape)]
    return tuple(flow for flow in found if flow.bytes > 0)


def ring(work: Work, size: float, ranks: int, groups: int = 1) -> tuple[Fabric, float]:
    """The slowest link of a ring over consecutive ranks, and its seconds for `size` bytes per GPU.

    A ring that spans nodes enters and leaves each node once, so the whole of `size` crosses the node's NICs for each
    of the `groups` rings that run side by side; inside the node it runs over the GPUs' own links.
    """
    layout, machine = work.layout, work.machine
    inside = size / (machine.link.gb_per_second * 1e9)
    if ranks <= layout.gpus_per_node:
        return machine.link, inside
    outside = groups * size / (machine.nics_per_node * machine.network.gb_per_second * 1e9)
    if layout.gpus_per_node == 1 or outside >= inside:
        return machine.network, outside
    return machine.link, inside


def _gathers(work: Work, shape: Shape) -> list[Flow]:
    """All-gather of the sharded weights: forward, and once more for the backward where they were resharded."""
    layout, size = work.layout, gathered(work)
    if layout.shard == 1:
        return []
    split = layout.expert_parallel > 1
    parts = ((layer.dense if split else layer.whole) * times for layer, times in shape.kinds)
    dense = sum(size.bytes(part) for part in parts)
    outside = size.bytes(shape.rest)
    share = (layout.shard - 1) / layout.shard
    times = work.batch.accumulation if layout.reshard_after_forward else 1
    found = [_flow(work, "all-gather forward", (dense + outside) * share, layout.shard, times, "dense weights")]
    if layout.reshard_after_forward:
        found.append(_flow(work, "all-gather backward", dense * share, layout.shard, times, "layers"))
    replicas = layout.shard // layout.expert_parallel
    if split and replicas > 1:
        own = size.bytes(shape.routed) / layout.expert_parallel * (replicas - 1) / replicas
        kinds = ("forward", "backward") if layout.reshard_after_forward else ("forward",)
        found += [_flow(work, f"all-gather {kind}, experts", own, layout.shard, times, "own experts") for kind in kinds]
    return found


def _flow(work: Work, kind: str, size: float, ranks: int, times: int, what: str) -> Flow:
    groups = max(1, work.layout.gpus_per_node // ranks)
    fabric, seconds = ring(work, size, ranks, groups)
    words = f"{what}: {size / 1e9:.3g} GB in a ring of {ranks} ranks at {fabric.gb_per_second:g} GB/s"
    if fabric is work.machine.network:
        words += f" x {work.machine.nics_per_node} NICs"
    return Flow(kind, fabric.name, size, times, seconds, words)


def _dispatch(work: Work, shape: Shape) -> list[Flow]:
    """Tokens to their experts' rank and back, in the forward, in its recomputation, and in the backward."""
    layout, machine = work.layout, work.machine
    ranks = layout.expert_parallel
    if ranks == 1:
        return []
    t = tokens(work, shape)
    passes = 3 if layout.activation_checkpointing else 2
    moe = sum(1 for layer in shape.layers if layer.expert)
    pairs = t.count * t.top_k * shape.hidden * t.width * 2 * passes * moe
    inside_ranks = min(ranks, layout.gpus_per_node)
    inside, outside = pairs * (inside_ranks - 1) / ranks, pairs * (ranks - inside_ranks) / ranks
    seconds_inside = inside / (machine.link.gb_per_second * 1e9)
    seconds_outside = outside * layout.gpus_per_node / (machine.nics_per_node * machine.network.gb_per_second * 1e9)
    slow = machine.network if seconds_outside > seconds_inside else machine.link
    words = (
        f"{t.count} x top {t.top_k} x {shape.hidden} x {t.width} bytes x 2 ways x {passes} passes x {moe} layers"
        f", {(ranks - 1) / ranks:.0%} of it to other ranks"
    )
    seconds = max(seconds_inside, seconds_outside)
    return [Flow("expert dispatch", slow.name, inside + outside, work.batch.accumulation, seconds, words)]


def _reduce(work: Work, shape: Shape) -> list[Flow]:
    """One all-reduce of the adapter's gradients per optimizer step, in float32 whatever the adapter's dtype.

    Adapters of experts that are split over ranks are reduced among the ranks that hold the same experts only.
    """
    layout = work.layout
    if layout.ranks == 1:
        return []
    mine, _ = adapter_share(work, shape)
    own = expert_adapters(shape) // layout.expert_parallel if layout.expert_parallel > 1 else 0
    found = [_all_reduce(work, "adapter all-reduce", mine - own, layout.ranks, 1)]
    alike = layout.ranks // layout.expert_parallel
    if own and alike > 1:  # as many rings side by side as there are different experts on a node
        groups = min(layout.expert_parallel, layout.gpus_per_node)
        found.append(_all_reduce(work, "adapter all-reduce, experts", own, alike, groups))
    return found


def _all_reduce(work: Work, kind: str, count: int, ranks: int, groups: int) -> Flow:
    size = 2 * (ranks - 1) / ranks * count * FLOAT
    fabric, seconds = ring(work, size, work.layout.ranks, groups)
    return Flow(kind, fabric.name, size, 1, seconds, f"2 x ({ranks} - 1) / {ranks} x {count} parameters x {FLOAT}")


def _offload(work: Work, shape: Shape) -> list[Flow]:
    """Each gather first brings the rank's shard up from the host."""
    if not work.layout.offload:
        return []
    base, words = base_bytes(work, shape)
    times = 2 if work.layout.reshard_after_forward else 1
    fabric = work.machine.host_link
    seconds = times * base / (fabric.gb_per_second * 1e9)
    runs = work.batch.accumulation if work.layout.reshard_after_forward else 1
    return [Flow("host transfer", fabric.name, times * base, runs, seconds, f"{times} x {words}")]
