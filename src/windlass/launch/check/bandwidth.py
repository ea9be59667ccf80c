"""How fast the nodes exchange data: a short all-reduce of each pair and of all, over the backend that training uses."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.launch.check.machine import RDMA
from windlass.launch.check.results import Result, failed, passed, skipped, warned
from windlass.launch.rendezvous import Rendezvous

if TYPE_CHECKING:
    from windlass.plan.script import AnyPlan

GROUP_SECONDS = 30.0  # after which a collective that hangs is given up
BYTES = {"gloo": 8 << 20, "nccl": 256 << 20}  # enough that latency does not count
REPEATS = 3  # after one that opens the connection; the quickest counts
MAX_ROUNDS = 31  # every pair of up to 32 nodes; of more, as many rounds as this
WARN_SHARE, FAIL_SHARE = 0.5, 0.1  # of the fabric's rate
SLOW_SHARE = 0.5  # of the other pairs' median
# NCCL's log: `Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA`.
VIA = re.compile(r" via (NET/\w+|P2P|SHM|COLLNET)\S*?(/GDRDMA)?(?=[\s(]|$)")
NETWORK = re.compile(r"NCCL INFO (?:Using network|NET/)\s*(\w+)")


@dataclass(slots=True)
class Measured:
    """GB/s by pair of ranks; None if the pair did not get through."""

    backend: str
    pairs: dict[tuple[int, int], float | None] = field(default_factory=dict)
    overall: float | None = None
    error: str = ""
    log: str = ""  # NCCL's
    left_out: int = 0  # pairs that there was no round for


def rounds(world: int) -> list[list[tuple[int, int]]]:
    """Every pair once, in rounds in which no rank has two: the circle method of tournaments."""
    ring: list[int] = list(range(world + world % 2))
    found = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in pairs if max(a, b) < world])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return found


def measure(rendezvous: Rendezvous, local_rank: int = 0) -> Measured:
    """Every node calls it, and every node gets all figures. What fails is reported, not raised."""
    import torch
    import torch.distributed as dist

    rank, world = rendezvous.node.rank, rendezvous.node.world
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(local_rank)
    backends = rendezvous.gather(backend)
    if len(set(backends)) > 1:
        return Measured(backend, error=f"nodes have different backends: {', '.join(map(str, backends))}")
    found = Measured(backend)
    with nccl_log(backend) as log:
        error = ""
        try:
            store = open_store(rendezvous, dist)
            timeout = datetime.timedelta(seconds=GROUP_SECONDS)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
        except Exception as failure:  # torch raises RuntimeError, DistError, ValueError …
            error = first_line(failure)
        opened = rendezvous.gather(error, 3 * GROUP_SECONDS)
        if any(opened) or None in opened:
            wrong = "; ".join(f"node {i}: {word or 'gone'}" for i, word in enumerate(opened) if word != "")
            return Measured(backend, error=wrong)
        all_rounds = rounds(world)
        found.left_out = sum(map(len, all_rounds[MAX_ROUNDS:]))
        for pairs in all_rounds[:MAX_ROUNDS]:  # the pairs of a round at once
            mine = next((pair for pair in pairs if rank in pair), None)
            speed = None
            if mine:
                with contextlib.suppress(Exception):  # a peer that is cut off shows as whatever the backend makes of it
                    group = dist.new_group(list(mine), use_local_synchronization=True)
                    speed = bandwidth(torch, dist, backend, group)
                    dist.destroy_process_group(group)
            speeds = rendezvous.gather(speed, 3 * GROUP_SECONDS)
            found.pairs |= {(a, b): slowest((speeds[a], speeds[b])) for a, b in pairs}
        speed = None
        with contextlib.suppress(Exception):
            speed = bandwidth(torch, dist, backend, None)
        found.overall = slowest(rendezvous.gather(speed, 3 * GROUP_SECONDS))
        if found.overall is not None and None not in found.pairs.values():
            dist.destroy_process_group()  # one that is broken would be waited for
        found.log = log()
    return found


def open_store(rendezvous: Rendezvous, dist: Any) -> Any:
    """torch's store on a free port of node 0: the launcher's own port is taken by the rendezvous."""
    timeout, world = datetime.timedelta(seconds=GROUP_SECONDS), rendezvous.node.world
    store, port, error = None, 0, ""
    if rendezvous.node.rank == 0:
        try:
            store = dist.TCPStore("localhost", 0, world, True, timeout, wait_for_workers=False)
            port = store.port
        except Exception as failure:
            error = first_line(failure)
    first = rendezvous.gather({"port": port, "address": rendezvous.address, "error": error})[0]
    if first is None or first["error"]:
        raise RuntimeError(f"node 0 opened no store: {first['error'] if first else 'it is gone'}")
    return store or dist.TCPStore(first["address"], first["port"], world, False, timeout)


def slowest(speeds: Sequence[float | None]) -> float | None:
    known = [speed for speed in speeds if speed is not None]
    return min(known) if len(known) == len(speeds) else None


def bandwidth(torch: Any, dist: Any, backend: str, group: Any) -> float:
    """GB/s per direction of an all-reduce of this group: 2 (n - 1) / n of the bytes leave each rank."""
    tensor = torch.ones(BYTES[backend] // 4, device="cuda" if backend == "nccl" else "cpu")
    wait = torch.cuda.synchronize if backend == "nccl" else lambda: None
    world = dist.get_world_size(group)
    best = float("inf")
    for turn in range(1 + REPEATS):
        tensor.fill_(1.0)
        wait()
        began = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        wait()
        took = time.perf_counter() - began
        best = min(best, took) if turn else best
    if not bool((tensor == world).all()):
        raise ArithmeticError(f"the sum over {world} ranks is wrong")
    return float(2 * (world - 1) / world * tensor.nbytes / best / 1e9)


@contextlib.contextmanager
def nccl_log(backend: str) -> Iterator[Callable[[], str]]:
    """NCCL writes what it chose into a file of its own; settings are read when a group is made.

    Waiting blocks, so that a collective that hangs raises here after GROUP_SECONDS. Without, the wait is the GPU's,
    and torch's watchdog ends the process.
    """
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
        before = {name: os.environ[name] for name in ours if name in os.environ}
        os.environ |= ours
        try:
            yield lambda: "".join(path.read_text(errors="replace") for path in sorted(Path(folder).iterdir()))
        finally:
            for name in ours:
                os.environ.pop(name, None)
            os.environ |= before


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def check_speed(plan: AnyPlan, measured: Measured, names: Sequence[str]) -> list[Result]:
    """The figures against the fabric's, and the pairs against each other."""
    if measured.error:
        hint = "set GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME) to the interface that the nodes share"
        return [failed("all-reduce", f"{measured.backend} does not start: {measured.error}", hint)]
    network, incomparable = plan.machine.network, ""
    if plan.layout.nodes < 2:
        incomparable = "the run has one node"
    elif measured.backend == "gloo" and not network.name.startswith(("ethernet", "loopback")):
        incomparable = f"gloo uses TCP: not comparable with {network.name}"
    return [check_pairs(plan, measured, names, incomparable), check_overall(plan, measured, incomparable)]


def check_pairs(plan: AnyPlan, measured: Measured, names: Sequence[str], incomparable: str) -> Result:
    title, fabric = "all-reduce of pairs", plan.machine.network
    if dead := [f"{names[a]} and {names[b]}" for (a, b), speed in measured.pairs.items() if speed is None]:
        hint = "these two don't get through to each other: interface, firewall, or the cards between them"
        return failed(title, f"no result between {', '.join(dead)}", hint)
    speeds = {pair: speed for pair, speed in measured.pairs.items() if speed is not None}
    if not speeds:
        return skipped(title, "no pair was measured")
    (a, b), least = min(speeds.items(), key=lambda item: item[1])
    median = statistics.median(speeds.values())
    seen = f"{measured.backend}: {least:.2f} to {max(speeds.values()):.2f} GB/s over {len(speeds)} pairs"
    seen += f", {measured.left_out} pairs not measured" * bool(measured.left_out)
    pair = f"slowest is {names[a]} with {names[b]} at {least:.2f} GB/s"
    if not incomparable and least < FAIL_SHARE * fabric.gb_per_second:
        hint = "sockets instead of RDMA, or one lane of many: see the transport and the ports of both nodes"
        return failed(title, f"{pair}; {fabric.name} gets {fabric.gb_per_second:g}. {seen}", hint)
    if least < SLOW_SHARE * median:
        others = Counter(rank for (i, j), speed in speeds.items() if speed < SLOW_SHARE * median for rank in (i, j))
        rank, count = others.most_common(1)[0]
        suspect = f"; {names[rank]} is in {count} of the slow ones" if count > 1 else ""
        hint = "check the cards and cables of these two; a step is as slow as its slowest pair"
        return warned(title, f"{pair}, the median is {median:.2f}{suspect}. {seen}", hint)
    return passed(title, seen)


def check_overall(plan: AnyPlan, measured: Measured, incomparable: str) -> Result:
    title, fabric, speed = "all-reduce of all", plan.machine.network, measured.overall
    if speed is None:
        return failed(title, f"{measured.backend} gives no result over all nodes", "see the pairs")
    seen = f"{measured.backend}: {speed:.2f} GB/s per direction"
    if incomparable:
        return passed(title, f"{seen} ({incomparable})")
    share, rate = speed / fabric.gb_per_second, f"{fabric.gb_per_second:g}"
    seen += f", {share:.0%} of {fabric.name}'s {rate}"
    if share >= WARN_SHARE:
        return passed(title, seen)
    hint = f"state the real rate in cluster.network, or fix the fabric: the plan counts on {rate} GB/s"
    return (failed if share < FAIL_SHARE else warned)(title, seen, hint, plan.loaded.where("cluster.network"))


def transports(log: str) -> Counter[str]:
    """What NCCL's channels use: NET/IB, NET/IB/GDRDMA, NET/Socket, P2P, SHM …"""
    found = Counter(name + direct for name, direct in VIA.findall(log))
    return found or Counter(f"NET/{name}" for name in NETWORK.findall(log))


def check_transport(plan: AnyPlan, log: str) -> Result:
    """Sockets although InfiniBand is planned: the fault that costs most and shows least."""
    title, used = "NCCL transport", transports(log)
    if not log:
        return skipped(title, "NCCL did not run here")
    between = [name for name in used if name.startswith("NET/")]
    seen = ", ".join(f"{count} x {name}" for name, count in used.items())
    if not between:
        return skipped(title, f"its log names no network: {seen or 'nothing at all'}")
    network, where = plan.machine.network.name, plan.loaded.where("cluster.network")
    if network.startswith(RDMA) and any(name.startswith("NET/Socket") for name in between):
        hint = "the pod lacks RDMA devices, memlock is low, or NCCL_IB_HCA / NCCL_IB_DISABLE keeps it from the cards"
        return failed(title, f"sockets, and {network} is planned: {seen}", hint, where)
    if network.startswith(RDMA) and not any(name.endswith("GDRDMA") for name in between):
        hint = "nvidia_peermem or DMA-BUF on the node: transfers go through host memory"
        return warned(title, f"InfiniBand without GPUDirect: {seen}", hint)
    return passed(title, seen)
