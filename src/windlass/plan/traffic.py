"""What a run sends: bytes and seconds on each link, once per micro-batch or per optimizer step."""

from collections.abc import Iterator
from dataclasses import dataclass

from windlass.hardware import Fabric
from windlass.plan.memory import FLOAT, adapter_share, base_bytes, gathered_bytes, input_bytes, inputs_on_host
from windlass.plan.workload import Workload

INPUTS = ("layer inputs to host", "layer inputs from host")
KEYS = ("keys all-gather forward", "keys reduce-scatter")  # of split rows


@dataclass(frozen=True, slots=True)
class Flow:
    """The bytes that one GPU sends, and the same number it receives, once per micro-batch or per optimizer step."""

    kind: str  # all-gather forward, all-gather backward, expert dispatch, adapter all-reduce, host transfer
    fabric: str
    bytes: float
    per_step: int  # times per optimizer step
    seconds: float  # of one transfer
    formula: str


@dataclass(frozen=True, slots=True)
class Traffic:
    """All flows of a run."""

    gathers: tuple[Flow, ...]  # sharded weights
    dispatches: tuple[Flow, ...]  # tokens to their experts' ranks and back
    keys: tuple[Flow, ...]  # keys and values of split rows, and their gradients
    reductions: tuple[Flow, ...]  # gradients of the adapter
    transfers: tuple[Flow, ...]  # offloaded weights and layer inputs, between host and GPU

    @property
    def sent(self) -> tuple[Flow, ...]:
        """Return the flows between ranks."""
        return (*self.gathers, *self.dispatches, *self.keys, *self.reductions)


def estimate_traffic(work: Workload) -> Traffic:
    return Traffic(
        gathers=tuple(_list_gathers(work)),
        dispatches=tuple(_list_dispatches(work)),
        keys=tuple(_list_keys(work)),
        reductions=tuple(_list_reductions(work)),
        transfers=tuple(_list_transfers(work)),
    )


def _ring_seconds(
    work: Workload, kind: str, size: float, ranks: int, groups: int = 1, calls: int = 1
) -> tuple[Fabric, float, float]:
    """Return the slowest link of a ring over consecutive ranks, its rate, and its seconds for `size` bytes per GPU.

    A ring that spans nodes enters and leaves each node once, so all of `size` crosses the node's NICs for each of the
    `groups` concurrent rings; inside the node it runs over the GPUs' own links.
    """
    layout = work.layout
    machine = work.machine
    near = machine.rates.collective(kind, "link", min(ranks, layout.gpus_per_node))
    inside = size / (near.gb_per_second * 1e9)
    if layout.gpus_per_node % min(ranks, layout.gpus_per_node) == 0 and ranks <= layout.gpus_per_node:
        return machine.link, near.gb_per_second, inside + calls * near.latency_seconds
    far = machine.rates.collective(kind, "network", ranks)
    outside = groups * size / (far.gb_per_second * 1e9)
    if layout.gpus_per_node == 1 or outside >= inside:
        return machine.network, far.gb_per_second, outside + calls * far.latency_seconds
    return machine.link, near.gb_per_second, inside + calls * far.latency_seconds


def _list_gathers(work: Workload) -> Iterator[Flow]:
    """Yield the all-gathers of the sharded weights: in the forward, and again in the backward if resharded."""
    layout = work.layout
    shape = work.shape
    width = gathered_bytes(work)
    if layout.shard == 1:
        return
    times = work.batch.accumulation if layout.reshard_after_forward else 1
    rings = max(1, layout.gpus_per_node // layout.shard)

    def gather(kind: str, size: float, weights: str, outside: int = 0) -> Flow:
        calls = len(shape.layers) + outside
        fabric, rate, seconds = _ring_seconds(work, "all-gather", size, layout.shard, rings, calls)
        formula = f"{weights}: {size / 1e9:.3g} GB in a ring of {layout.shard} ranks at {rate:g} GB/s"
        return Flow(kind, fabric.name, size, times, seconds, formula)

    split = layout.expert_parallel > 1
    dense = sum(width.of((layer.dense if split else layer.elements) * count) for layer, count in shape.kinds)
    share = (layout.shard - 1) / layout.shard
    # Plus the embedding, and the group of final norm and head, which stays gathered for the backward.
    yield gather("all-gather forward", (dense + width.of(shape.rest)) * share, "dense weights", 2)
    if layout.reshard_after_forward:
        yield gather("all-gather backward", dense * share, "layers")
    replicas = layout.shard // layout.expert_parallel
    if split and replicas > 1:
        experts = width.of(shape.routed) / layout.expert_parallel * (replicas - 1) / replicas
        yield gather("all-gather forward, experts", experts, "own experts")
        if layout.reshard_after_forward:
            yield gather("all-gather backward, experts", experts, "own experts")


def _list_dispatches(work: Workload) -> Iterator[Flow]:
    """Yield the traffic of tokens to their experts' rank and back, in forward, recomputation and backward."""
    layout = work.layout
    machine = work.machine
    shape = work.shape
    ranks = layout.expert_parallel
    if ranks == 1:
        return
    passes = work.expert_passes
    layers = sum(times for layer, times in shape.kinds if layer.expert)
    size = work.tokens * shape.top_k * shape.hidden * work.width * 2 * passes * layers
    ranks_inside = min(ranks, layout.gpus_per_node)
    inside = size * (ranks_inside - 1) / ranks
    outside = size * (ranks - ranks_inside) / ranks
    near = machine.rates.collective("all-to-all", "link", ranks)
    far = machine.rates.collective("all-to-all", "network", ranks)
    seconds_inside = inside / (near.gb_per_second * 1e9)
    seconds_outside = outside * layout.gpus_per_node / (far.gb_per_second * 1e9)
    slowest = machine.network
    latency = far.latency_seconds
    if seconds_outside <= seconds_inside:
        slowest = machine.link
        latency = near.latency_seconds
    formula = (
        f"{work.tokens} x top {shape.top_k} x {shape.hidden} x {work.width} bytes x 2 ways x {passes} passes"
        f" x {layers} layers, {(ranks - 1) / ranks:.0%} of it to other ranks"
    )
    seconds = max(seconds_inside, seconds_outside) + 2 * passes * layers * latency
    yield Flow("expert dispatch", slowest.name, inside + outside, work.batch.accumulation, seconds, formula)


def _list_keys(work: Workload) -> Iterator[Flow]:
    """Yield the all-gathers of keys and values over a group that splits rows, in each layer's forward and when it is
    recomputed, and the reduce-scatters of their gradients."""
    layout = work.layout
    split = layout.context_parallel
    if split == 1:
        return
    gathered = sum(times * layer.gathered for layer, times in work.shape.kinds)
    size = (split - 1) * work.tokens * gathered * work.width
    layers = len(work.shape.layers)
    formula = f"({split} - 1) x {work.tokens} tokens x {gathered} values of {layers} layers x {work.width} bytes"
    forwards = 1 + bool(layout.activation_checkpointing)
    for kind, times in zip(KEYS, (forwards, 1), strict=True):
        fabric, _, seconds = _ring_seconds(work, "all-gather", size, split, calls=layers)
        yield Flow(kind, fabric.name, size, times * work.batch.accumulation, seconds, formula)


def _list_reductions(work: Workload) -> Iterator[Flow]:
    """Yield the all-reduce of the adapter's gradients, one per optimizer step, in float32 for any adapter dtype.

    Adapters of experts that are split over ranks are reduced only among ranks with the same experts.
    """
    layout = work.layout
    if layout.ranks == 1:
        return

    def reduce(kind: str, count: int, ranks: int, groups: int) -> Flow:
        size = 2 * (ranks - 1) / ranks * count * FLOAT
        fabric, _, seconds = _ring_seconds(work, "all-reduce", size, layout.ranks, groups)
        return Flow(kind, fabric.name, size, 1, seconds, f"2 x ({ranks} - 1) / {ranks} x {count} parameters x {FLOAT}")

    trained, _ = adapter_share(work)
    experts = 0
    if layout.expert_parallel > 1:
        experts = work.shape.expert_adapter_parameters // layout.expert_parallel
    yield reduce("adapter all-reduce", trained - experts, layout.ranks, 1)
    alike = layout.ranks // layout.expert_parallel
    if experts and alike > 1:  # one concurrent ring per different set of experts on a node
        groups = min(layout.expert_parallel, layout.gpus_per_node)
        yield reduce("adapter all-reduce, experts", experts, alike, groups)


def _list_transfers(work: Workload) -> Iterator[Flow]:
    """Yield the host transfers of offloading: each gather first copies the rank's shard from the host; inputs of
    recomputed layers go there in the forward, and come back in the backward."""
    layout = work.layout
    rate = work.machine.rates.host_link_gb_per_second
    if inputs_on_host(work):
        size = float(len(work.shape.layers) * input_bytes(work))
        words = f"inputs of {len(work.shape.layers)} layers: {work.tokens} x {work.shape.hidden} x {work.width}"
        for kind in INPUTS:
            yield Flow(kind, work.machine.host_link.name, size, work.batch.accumulation, size / (rate * 1e9), words)
    if not layout.offload:
        return
    base, formula = base_bytes(work)
    times = 2 if layout.reshard_after_forward else 1
    runs = work.batch.accumulation if layout.reshard_after_forward else 1
    seconds = times * base / (rate * 1e9)
    yield Flow("host transfer", work.machine.host_link.name, times * base, runs, seconds, f"{times} x {formula}")
