"""How fast each GPU computes, and how fast the nodes exchange data: pairs and all of them, as training does."""

import contextlib
import datetime
import os
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from windlass.hardware import Fabric, interpolate
from windlass.launch.check.machine import OTHER_NODE, RDMA
from windlass.launch.check.results import Context, Result, failed, passed, skipped, warned
from windlass.plan import Plan
from windlass.plan.script import AnyPlan
from windlass.plan.split_rows import KEY
from windlass.plan.step_time import KEYS
from windlass.ranks.rendezvous import Rendezvous

Speeds = Mapping[str, Mapping[str, float] | str]  # GPU of a node -> measurement -> rate, or why there is none
SLOW_GPU_SHARE = 0.75  # of its kind's or the other GPUs' rate: lowered clocks, a bad slot, another process
SIDE = 4096  # of the product
ELEMENTS = 1 << 27  # of the addition
COPIED = 256 << 20  # bytes of the copy
UNITS = {"products": "TFLOP/s", "memory": "GB/s", "host link": "GB/s"}
GPU_TITLE = "GPU speed"
GROUP_SECONDS = 30.0  # timeout of a collective
BYTES = {"gloo": 8 << 20, "nccl": 256 << 20}  # large enough that latency is negligible
REPEATS = 3  # after one that opens the connection; the fastest counts
MAX_ROUNDS = 31  # every pair of up to 32 nodes; with more nodes, the first rounds only
WARN_SHARE = 0.7  # of the fabric's rate
POOR_SHARE = 0.1
SLOW_SHARE = 0.7  # of the other pairs' median
# NCCL's log: `Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA`.
VIA = re.compile(r" via (NET/\w+|P2P|SHM|COLLNET)\S*?(/GDRDMA)?(?=[\s(]|$)")
NETWORK = re.compile(r"NCCL INFO (?:Using network|NET/)\s*(\w+)")


@dataclass(slots=True)
class BandwidthResult:
    """GB/s by pair of ranks; None if the pair failed."""

    backend: str
    pairs: dict[tuple[int, int], float | None] = field(default_factory=dict)
    overall: float | None = None
    error: str = ""
    log: str = ""  # NCCL's
    left_out: int = 0  # pairs that were not measured: too many rounds


def make_rounds(world: int) -> list[list[tuple[int, int]]]:
    """Return every pair once, in rounds in which each rank has at most one pair: the circle method of tournaments."""
    ring: list[int] = list(range(world + world % 2))
    rounds = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if max(a, b) < world])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def measure_bandwidth(rendezvous: Rendezvous, local_rank: int = 0) -> BandwidthResult:
    """Measure the bandwidth. Every node calls it and gets all figures. Failures are reported, not raised."""
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not among the names it declares

    rank = rendezvous.node.number
    world = rendezvous.node.count
    timeout = datetime.timedelta(seconds=GROUP_SECONDS)
    backend, device = ("nccl", "cuda") if torch.cuda.is_available() else ("gloo", "cpu")
    if backend == "nccl":
        torch.cuda.set_device(local_rank)
    backends = rendezvous.gather(backend)
    if len(set(backends)) > 1:
        return BandwidthResult(backend, error=f"nodes have different backends: {', '.join(map(str, backends))}")

    def speed(ranks: list[int]) -> float | None:
        """Return GB/s per direction of an all-reduce: 2 (n - 1) / n of the bytes leave each rank. None: wrong sum."""
        tensor = torch.ones(BYTES[backend] // 4, device=device)
        wait = getattr(torch, device).synchronize
        best = float("inf")
        with contextlib.suppress(Exception):  # each backend raises something else for a lost peer
            group = dist.new_group(ranks, use_local_synchronization=True) if len(ranks) < world else None
            for turn in range(1 + REPEATS):
                tensor.fill_(1.0)
                wait()
                began = time.perf_counter()
                dist.all_reduce(tensor, group=group)
                wait()
                best = min(best, time.perf_counter() - began) if turn else best
            if group is not None:
                dist.destroy_process_group(group)
            if bool((tensor == len(ranks)).all()):
                return float(2 * (len(ranks) - 1) / len(ranks) * tensor.nbytes / best / 1e9)
        return None

    def slowest(speeds: Sequence[float | None]) -> float | None:
        known = [speed for speed in speeds if speed is not None]
        return min(known) if len(known) == len(speeds) else None

    result = BandwidthResult(backend)
    error = ""
    store = None
    with capture_nccl_log(backend) as log:
        try:  # torch's store on a free port of node 0: the launcher's own port is taken by the rendezvous
            if rank == 0:
                store = TCPStore("localhost", 0, world, True, timeout, wait_for_workers=False)
        except Exception as failure:
            error = first_line(failure)
        address, port = rendezvous.gather([rendezvous.address, store.port if store else 0])[0]
        try:
            if not error:
                store = store or TCPStore(address, port, world, False, timeout)
                dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
        except Exception as failure:  # torch raises RuntimeError, DistError, ValueError …
            error = first_line(failure)
        opened = rendezvous.gather(error, 3 * GROUP_SECONDS)
        if any(opened) or None in opened:
            wrong = "; ".join(f"node {i}: {word or 'gone'}" for i, word in enumerate(opened) if word != "")
            return BandwidthResult(backend, error=wrong)
        all_rounds = make_rounds(world)
        result.left_out = sum(map(len, all_rounds[MAX_ROUNDS:]))
        for pairs in all_rounds[:MAX_ROUNDS]:  # the pairs of a round at once
            mine = next((pair for pair in pairs if rank in pair), None)
            speeds = rendezvous.gather(speed(list(mine)) if mine else None, 3 * GROUP_SECONDS)
            result.pairs |= {(a, b): slowest((speeds[a], speeds[b])) for a, b in pairs}
        result.overall = slowest(rendezvous.gather(speed(list(range(world))), 3 * GROUP_SECONDS))
        if result.overall is not None and None not in result.pairs.values():
            dist.destroy_process_group()  # a broken group would be waited for
        result.log = log()
    return result


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


@contextlib.contextmanager
def capture_nccl_log(backend: str) -> Iterator[Callable[[], str]]:
    """Let NCCL log its choices to a separate file; it reads its settings when a group is created. Waits block the host,
    so that a hanging collective raises here after GROUP_SECONDS. Otherwise the GPU would wait, and torch's watchdog
    would end the process."""
    if backend != "nccl":
        yield lambda: ""
        return
    with tempfile.TemporaryDirectory(prefix="windlass-nccl-") as folder:
        ours = {
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH,ENV",
            "NCCL_DEBUG_FILE": f"{folder}/%h.%p",
            "TORCH_NCCL_BLOCKING_WAIT": "1",
        }
        before = {name: os.environ.pop(name) for name in ours if name in os.environ}
        os.environ |= ours
        try:
            yield lambda: "".join(path.read_text(errors="replace") for path in sorted(Path(folder).iterdir()))
        finally:
            for name in ours:
                os.environ.pop(name, None)
            os.environ |= before


def check_speed(plan: AnyPlan, measured: BandwidthResult, names: Sequence[str]) -> list[Result]:
    """Compare the pairs with each other and the fabric's rate, and all nodes with that rate. A slow network only gives
    a warning: it may just be busy."""
    backend = measured.backend
    if measured.error:
        hint = "set GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME) to the interface that the nodes share"
        return [failed("all-reduce", f"{backend} does not start: {measured.error}", hint)]
    fabric = plan.machine.network
    incomparable = ""
    if plan.layout.nodes < 2:
        incomparable = "the run has one node"
    elif backend == "gloo" and not fabric.name.startswith(("ethernet", "loopback")):
        incomparable = f"gloo uses TCP: not comparable with {fabric.name}"
    pairs = _compare_pairs(measured, names, fabric, comparable=not incomparable)

    title = "all-reduce of all"
    if measured.overall is None:
        return [pairs, failed(title, f"{backend} gives no result over all nodes", "see the pairs")]
    seen = f"{backend}: {measured.overall:.2f} GB/s per direction"
    if incomparable:
        return [pairs, passed(title, f"{seen} ({incomparable})")]
    share = measured.overall / fabric.gb_per_second
    seen += f", {share:.0%} of {fabric.name}'s {fabric.gb_per_second:g}"
    if share >= WARN_SHARE:
        return [pairs, passed(title, seen)]
    hint = "state the real rate in cluster.network, or fix the fabric: "
    hint += f"the plan counts on {fabric.gb_per_second:g} GB/s"
    return [pairs, warned(title, seen, hint, plan.where("cluster.network"))]


def _compare_pairs(measured: BandwidthResult, names: Sequence[str], fabric: Fabric, *, comparable: bool) -> Result:
    title = "all-reduce of pairs"
    speeds = {pair: speed for pair, speed in measured.pairs.items() if speed is not None}
    dead = [f"{names[a]} and {names[b]}" for a, b in measured.pairs.keys() - speeds.keys()]
    if dead:
        hint = "these two can't reach each other: interface, firewall, or the cards between them"
        return failed(title, f"no result between {', '.join(sorted(dead))}", hint)
    (a, b), least = min(speeds.items(), key=lambda item: item[1])
    median = statistics.median(speeds.values())
    seen = f"{measured.backend}: {least:.2f} to {max(speeds.values()):.2f} GB/s over {len(speeds)} pairs"
    if measured.left_out:
        seen += f", {measured.left_out} not measured"
    slowest = f"slowest is {names[a]} with {names[b]} at {least:.2f} GB/s"
    slow = [pair for pair, speed in speeds.items() if speed < SLOW_SHARE * median]
    if comparable and least < POOR_SHARE * fabric.gb_per_second:
        hint = "sockets instead of RDMA, or one lane of many: see the transport and the ports of both nodes"
        return warned(title, f"{slowest}; {fabric.name} gets {fabric.gb_per_second:g}. {seen}", hint)
    if slow:
        rank, count = Counter(rank for pair in slow for rank in pair).most_common(1)[0]
        suspect = f"; {names[rank]} is in {count} of the slow ones" if count > 1 else ""
        hint = "check the cards and cables of these two; a step is as slow as its slowest pair"
        return warned(title, f"{slowest}, the median is {median:.2f}{suspect}. {seen}", hint)
    return passed(title, seen)


def check_groups(plan: AnyPlan, measured: BandwidthResult, names: Sequence[str]) -> list[Result]:
    """Check the links between the ranks that split rows: every layer waits for keys and values."""
    if not isinstance(plan, Plan) or plan.layout.context_parallel == 1 or measured.error:
        return []
    title = "split rows"
    split = plan.layout.context_parallel
    starts = range(0, plan.layout.ranks, split)
    groups = [{rank // plan.layout.gpus_per_node for rank in range(first, first + split)} for first in starts]
    crossed = [pair for pair in measured.pairs if any(set(pair) <= nodes for nodes in groups)]
    if not crossed:
        return [passed(title, f"each group of {split} ranks is on one node: keys and values cross no network")]
    speeds = {pair: speed for pair in crossed if (speed := measured.pairs[pair])}
    if len(speeds) < len(crossed):
        return []  # the pairs' own result names them
    (a, b), least = min(speeds.items(), key=lambda item: item[1])
    sent = sum(flow.bytes * flow.per_step for flow in plan.cost.flows if flow.kind in KEYS) / 1e9
    seen = (
        f"groups of {split} ranks cross nodes; {names[a]} with {names[b]} is slowest, {least:.2f} GB/s: {sent:,.1f} GB"
    )
    seen += f" of keys and values of a step take about {sent / least:,.1f} s"
    if least >= WARN_SHARE * plan.machine.network.gb_per_second:
        return [passed(title, seen)]
    inside = plan.layout.gpus_per_node
    hint = f"set layout.context_parallel: {inside} or less, so that a group is on one node" if inside > 1 else ""
    return [warned(title, seen, hint or "fix the fabric, or use nodes with several GPUs", plan.where(KEY))]


def check_transport(plan: AnyPlan, log: str) -> Result:
    """Check whether NCCL uses sockets although InfiniBand is planned: a costly fault that is hard to notice."""
    title = "NCCL transport"
    network = plan.machine.network.name
    where = plan.where("cluster.network")
    used = Counter(name + direct for name, direct in VIA.findall(log))
    used = used or Counter(f"NET/{name}" for name in NETWORK.findall(log))  # NCCL ended before it opened a channel
    seen = ", ".join(f"{n} x {name}" for name, n in used.items())
    between = [n for n in used if n.startswith("NET/")]
    if not between:
        return skipped(title, f"its log names no network: {seen}" if log else "NCCL did not run here")
    if network.startswith(RDMA) and any(name.startswith("NET/Socket") for name in between):
        hint = "the pod lacks RDMA devices, memlock is low, or NCCL_IB_HCA / NCCL_IB_DISABLE keeps it from the cards"
        return failed(title, f"sockets, and {network} is planned: {seen}", hint, where)
    if network.startswith(RDMA) and not any(name.endswith("GDRDMA") for name in between):
        hint = "nvidia_peermem or DMA-BUF on the node: transfers go through host memory"
        return warned(title, f"InfiniBand without GPUDirect: {seen}", hint)
    return passed(title, seen)


def measure_gpus(local_rank: str | None = None) -> Speeds:
    """Measure the GPUs, about a second each. `local_rank`: only that one, if each rank checks for itself."""
    import torch

    from windlass import measure

    if not torch.cuda.is_available():
        return {}
    measured = dict[str, Mapping[str, float] | str]()
    own = [int(local_rank)] if local_rank and local_rank.isdigit() else range(torch.cuda.device_count())
    for index in own:
        device = torch.device("cuda", index)
        try:
            ((*_, products),) = measure.measure_products(device, torch.bfloat16, [(SIDE, SIDE)])
            memory = measure.measure_memory(device, ELEMENTS)
            copied = measure.measure_copy(device, COPIED)
            measured[f"GPU {index}"] = {"products": products, "memory": memory, "host link": copied}
            torch.cuda.empty_cache()
        except RuntimeError as error:  # it is full, or broken
            measured[f"GPU {index}"] = str(error).partition("\n")[0]
    return measured


def check_here(c: Context) -> list[Result]:
    """Measure the only node's GPUs if possible."""
    if c.plan is None or "torch" not in c.have or c.plan.machine.gpu.name == "cpu":
        return []
    return [check_gpu_speed(c.plan, [measure_gpus(c.environ.get("LOCAL_RANK"))], [""])]


def check_gpu_speed(plan: AnyPlan, by_node: Sequence[Speeds | None], names: Sequence[str]) -> Result:
    """Compare each rate of each GPU with the plan's figure for such a GPU and the median of all."""
    rates = plan.machine.rates
    basis = plan.machine.rates.basis
    kind = {
        "products": interpolate(rates.products["bfloat16"], SIDE, SIDE),
        "memory": rates.memory_gb_per_second,
        "host link": rates.host_link_gb_per_second,
    }
    found = {
        f"{name} {gpu}".strip(): speeds
        for name, node in zip(names, by_node, strict=True)
        for gpu, speeds in (node or {}).items()
    }
    if failures := "; ".join(f"{gpu}: {why}" for gpu, why in found.items() if isinstance(why, str)):
        return failed(GPU_TITLE, failures, f"end what else runs on it; {OTHER_NODE}")
    every = {gpu: speeds for gpu, speeds in found.items() if not isinstance(speeds, str)}
    if not every:
        return skipped(GPU_TITLE, "torch sees no GPU here")
    slow = []
    for name, unit in UNITS.items():
        median = statistics.median(speeds[name] for speeds in every.values())
        for gpu, speeds in every.items():
            expected, whose = max((kind[name], f"{plan.machine.gpu.name} by {basis}"), (median, "the median GPU"))
            if speeds[name] < SLOW_GPU_SHARE * expected:
                share = f"{speeds[name] / expected:.0%} of {whose}'s {expected:,.4g}"
                slow.append(f"{gpu}: {name} {speeds[name]:,.4g} {unit}, {share}")
    products = [speeds["products"] for speeds in every.values()]
    count = "1 GPU" if len(every) == 1 else f"{len(every)} GPUs"
    seen = f"{count}: products {min(products):,.4g} to {max(products):,.4g} TFLOP/s"
    if slow:
        hint = f"other processes, power or heat: nvidia-smi -q -d PERFORMANCE; {OTHER_NODE}"
        return warned(GPU_TITLE, "; ".join(slow) + f". {seen}", hint)
    return passed(GPU_TITLE, f"{seen}, as {plan.machine.gpu.name} by {basis}")
