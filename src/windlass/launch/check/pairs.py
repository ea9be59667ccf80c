"""How fast the nodes talk: a short all-reduce of each pair and of all, over the backend that training will use."""

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
from windlass.launch.check.meeting import Meeting
from windlass.launch.check.result import Result, failed, passed, unseen, warned

if TYPE_CHECKING:
    from windlass.plan.script import AnyPlan

GROUP_SECONDS = 30.0  # after which a collective that hangs is given up
BYTES = {"gloo": 8 << 20, "nccl": 256 << 20}  # long enough that latency does not count
REPEATS = 3  # after one that opens the connection; the quickest counts
ROUNDS_MOST = 31  # every pair of up to 32 nodes; of more, as many rounds as this
WARN_SHARE, FAIL_SHARE = 0.5, 0.1  # of the fabric's rate
SLOW_SHARE = 0.5  # of the other pairs' median
# NCCL's log: `Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA`.
VIA = re.compile(r" via (NET/\w+|P2P|SHM|COLLNET)\S*?(/GDRDMA)?(?=[\s(]|$)")
NETWORK = re.compile(r"NCCL INFO (?:Using network|NET/)\s*(\w+)")


@dataclass(slots=True)
class Measured:
    """GB/s by pair of ranks; None where the pair did not get through."""

    backend: str
    pairs: dict[tuple[int, int], float | None] = field(default_factory=dict)
    overall: float | None = None
    trouble: str = ""
    log: str = ""  # NCCL's
    left_out: int = 0  # pairs that there was no round for


def rounds(world: int) -> list[list[tuple[int, int]]]:
    """Every pair once, in rounds in which no rank has two: the circle of a chess tournament."""
    ring: list[int] = list(range(world + world % 2))
    found = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        games = zip(ring[:half], reversed(ring[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in games if max(a, b) < world])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return found


def measure(meeting: Meeting, local_rank: int = 0) -> Measured:
    """Every node calls it, and every node gets all figures. What fails is told, not raised."""
    import torch
    import torch.distributed as dist

    rank, world = meeting.place.rank, meeting.place.world
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(local_rank)
    backends = meeting.gather(backend)
    if len(set(backends)) > 1:
        return Measured(backend, trouble=f"nodes have different backends: {', '.join(map(str, backends))}")
    found = Measured(backend)
    with nccl_log(backend) as log:
        trouble = ""
        try:
            store = open_store(meeting, dist)
            patience = datetime.timedelta(seconds=GROUP_SECONDS)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=patience)
        except Exception as error:  # torch raises RuntimeError, DistError, ValueError …
            trouble = first_line(error)
        opened = meeting.gather(trouble, 3 * GROUP_SECONDS)
        if any(opened) or None in opened:
            wrong = "; ".join(f"node {i}: {said or 'gone'}" for i, said in enumerate(opened) if said != "")
            return Measured(backend, trouble=wrong)
        all_rounds = rounds(world)
        found.left_out = sum(map(len, all_rounds[ROUNDS_MOST:]))
        for games in all_rounds[:ROUNDS_MOST]:
            play(meeting, games, found, lambda group: bandwidth(torch, dist, backend, group))
        whole = attempted(lambda: bandwidth(torch, dist, backend, None))
        speeds = meeting.gather(whole, 3 * GROUP_SECONDS)
        found.overall = slowest(speeds)
        if found.overall is not None and None not in found.pairs.values():
            dist.destroy_process_group()  # one that is broken would be waited for
        found.log = log()
    return found


def open_store(meeting: Meeting, dist: Any) -> Any:
    """torch's store on a free port of node 0: the launcher's own port is the meeting's."""
    patience = datetime.timedelta(seconds=GROUP_SECONDS)
    world = meeting.place.world
    store, port, wrong = None, 0, ""
    if meeting.place.rank == 0:
        try:
            store = dist.TCPStore("localhost", 0, world, True, patience, wait_for_workers=False)
            port = store.port
        except Exception as error:
            wrong = first_line(error)
    first = meeting.gather({"port": port, "address": meeting.address, "wrong": wrong})[0]
    if first is None or first["wrong"]:
        raise RuntimeError(f"node 0 opened no store: {first['wrong'] if first else 'it is gone'}")
    return store or dist.TCPStore(first["address"], first["port"], world, False, patience)


def play(meeting: Meeting, games: Sequence[tuple[int, int]], found: Measured, run: Callable[[Any], float]) -> None:
    """One round: the pairs of it at once, the rest waits."""
    import torch.distributed as dist

    rank, said = meeting.place.rank, {}
    for game in games:
        if rank in game:

            def pair(ranks: tuple[int, int] = game) -> float:
                group = dist.new_group(list(ranks), use_local_synchronization=True)
                speed = run(group)
                dist.destroy_process_group(group)
                return speed

            said["-".join(map(str, game))] = attempted(pair)
    everything = meeting.gather(said, 3 * GROUP_SECONDS)
    for a, b in games:
        speeds = [(everything[rank] or {}).get(f"{a}-{b}") for rank in (a, b)]
        found.pairs[a, b] = slowest(speeds)


def slowest(speeds: Sequence[float | None]) -> float | None:
    known = [speed for speed in speeds if speed is not None]
    return min(known) if len(known) == len(speeds) else None


def attempted(work: Callable[[], float]) -> float | None:
    try:
        return work()
    except Exception:  # a peer that is cut off shows as whatever the backend makes of it
        return None


def bandwidth(torch: Any, dist: Any, backend: str, group: Any) -> float:
    """GB/s per direction that an all-reduce of this group gets: 2 (n - 1) / n of the bytes leave each rank."""
    device = "cuda" if backend == "nccl" else "cpu"
    tensor = torch.ones(BYTES[backend] // 4, device=device)
    world = dist.get_world_size(group)
    best = float("inf")
    for turn in range(1 + REPEATS):
        tensor.fill_(1.0)
        settle(torch, backend)
        began = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        settle(torch, backend)
        took = time.perf_counter() - began
        best = min(best, took) if turn else best
    if not bool((tensor == world).all()):
        raise ArithmeticError(f"the sum over {world} ranks is wrong")
    return float(2 * (world - 1) / world * tensor.nbytes / best / 1e9)


def settle(torch: Any, backend: str) -> None:
    if backend == "nccl":
        torch.cuda.synchronize()


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


def judge(plan: AnyPlan, measured: Measured, names: Sequence[str]) -> list[Result]:
    """The figures against the fabric's, and the pairs against each other."""
    if measured.trouble:
        hint = "set GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME) to the interface that the nodes share"
        return [failed("all-reduce", f"{measured.backend} does not start: {measured.trouble}", hint)]
    return [pairs(plan, measured, names), overall(plan, measured)]


def comparable(plan: AnyPlan, backend: str) -> str:
    """Why these figures say nothing of the planned fabric; empty where they do."""
    network = plan.machine.network.name
    if plan.layout.nodes < 2:
        return "the run has one node"
    if backend == "gloo" and not network.startswith(("ethernet", "loopback")):
        return f"gloo uses TCP: not comparable with {network}"
    return ""


def pairs(plan: AnyPlan, measured: Measured, names: Sequence[str]) -> Result:
    title = "all-reduce of pairs"
    dead = [f"{names[a]} and {names[b]}" for (a, b), speed in measured.pairs.items() if speed is None]
    if dead:
        hint = "these two do not get through to each other: interface, firewall, or the cards between them"
        return failed(title, f"no result between {', '.join(dead)}", hint)
    speeds = {pair: speed for pair, speed in measured.pairs.items() if speed is not None}
    if not speeds:
        return unseen(title, "no pair was measured")
    (a, b), least = min(speeds.items(), key=lambda item: item[1])
    usual = statistics.median(speeds.values())
    said = f"{measured.backend}: {least:.2f} to {max(speeds.values()):.2f} GB/s over {len(speeds)} pairs"
    said += f", {measured.left_out} pairs not measured" * bool(measured.left_out)
    pair = f"slowest is {names[a]} with {names[b]} at {least:.2f} GB/s"
    fabric = plan.machine.network
    if not comparable(plan, measured.backend) and least < FAIL_SHARE * fabric.gb_per_second:
        hint = "sockets in place of RDMA, or one lane of many: see the transport and the ports of both nodes"
        return failed(title, f"{pair}; {fabric.name} gets {fabric.gb_per_second:g}. {said}", hint)
    if least < SLOW_SHARE * usual:
        others = Counter(rank for (i, j), speed in speeds.items() if speed < SLOW_SHARE * usual for rank in (i, j))
        rank, count = others.most_common(1)[0]
        suspect = f"; {names[rank]} is in {count} of the slow ones" if count > 1 else ""
        hint = "look at the cards and cables of these two; a step is as slow as its slowest pair"
        return warned(title, f"{pair}, the median is {usual:.2f}{suspect}. {said}", hint)
    return passed(title, said)


def overall(plan: AnyPlan, measured: Measured) -> Result:
    title, fabric, speed = "all-reduce of all", plan.machine.network, measured.overall
    if speed is None:
        return failed(title, f"{measured.backend} gives no result over all nodes", "see the pairs")
    why = comparable(plan, measured.backend)
    said = f"{measured.backend}: {speed:.2f} GB/s a direction"
    if why:
        return passed(title, f"{said} ({why})")
    said += f", {speed / fabric.gb_per_second:.0%} of {fabric.name}'s {fabric.gb_per_second:g}"
    hint = (
        f"state the real rate in cluster.network, or fix the fabric: the plan counts on {fabric.gb_per_second:g} GB/s"
    )
    if speed < FAIL_SHARE * fabric.gb_per_second:
        return failed(title, said, hint, plan.loaded.where("cluster.network"))
    if speed < WARN_SHARE * fabric.gb_per_second:
        return warned(title, said, hint, plan.loaded.where("cluster.network"))
    return passed(title, said)


def transports(log: str) -> Counter[str]:
    """What NCCL's channels go over: NET/IB, NET/IB/GDRDMA, NET/Socket, P2P, SHM …"""
    found = Counter(name + direct for name, direct in VIA.findall(log))
    if not found:
        found.update(f"NET/{name}" for name in NETWORK.findall(log))
    return found


def transport(plan: AnyPlan, log: str) -> Result:
    """Sockets where InfiniBand was asked for are the fault that costs most and shows least."""
    title = "NCCL transport"
    if not log:
        return unseen(title, "NCCL did not run here")
    used = transports(log)
    between = {name: count for name, count in used.items() if name.startswith("NET/")}
    said = ", ".join(f"{count} x {name}" for name, count in used.items())
    if not between:
        return unseen(title, f"its log names no network: {said or 'nothing at all'}")
    network = plan.machine.network.name
    if network.startswith(RDMA) and any(name.startswith("NET/Socket") for name in between):
        hint = "the pod lacks RDMA devices, memlock is low, or NCCL_IB_HCA / NCCL_IB_DISABLE keeps it from the cards"
        return failed(title, f"sockets, and {network} is planned: {said}", hint, plan.loaded.where("cluster.network"))
    if network.startswith(RDMA) and not any(name.endswith("GDRDMA") for name in between):
        hint = "nvidia_peermem or DMA-BUF on the node: transfers go through host memory"
        return warned(title, f"InfiniBand without GPUDirect: {said}", hint)
    return passed(title, said)
