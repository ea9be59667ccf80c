"""Measure how fast this process computes, copies and exchanges: short measurements with torch, each a median."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from windlass.hardware import KINDS, Collective, Points

TURNS = 5  # turns of a measurement; the median counts
TURN_SECONDS = 2e-3  # minimum duration of a turn
MOST_FLOPS = 4e12  # most operations of one call
EXPERTS = 8
SMALL_BYTES = 1 << 10  # bytes per rank at which only latency counts


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_call(call: Callable[[], Any], device: torch.device, turns: int = TURNS) -> float:
    """Return the duration of one call, the median of some turns."""
    began = time.perf_counter()
    call()  # kernels are loaded, memory is allocated
    synchronize(device)
    first = time.perf_counter() - began
    if first > 0.2:
        turns = 2
    calls = max(1, round(TURN_SECONDS / max(first, 1e-7)))
    times = []
    for _ in range(turns):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize(device)
        times.append((time.perf_counter() - began) / calls)
    return statistics.median(times)


def measure_rates(
    device: torch.device,
    sizes: Iterable[tuple[int, int]],
    flops: Callable[[int, int], float],
    prepare: Callable[[int, int], Callable[[], Any]],
) -> Points:
    """Return TFLOP/s at each pair of sizes that isn't too large for this device."""
    return tuple(
        (float(first), float(second), flops(first, second) / time_call(prepare(first, second), device) / 1e12)
        for first, second in sizes
        if flops(first, second) <= MOST_FLOPS
    )


def measure_products(device: torch.device, dtype: torch.dtype, sizes: Iterable[tuple[int, int]]) -> Points:
    """Measure x W^T with a square W, by rows and width."""

    def prepare(rows: int, width: int) -> Callable[[], Any]:
        x = torch.randn(rows, width, device=device).to(dtype)
        w = torch.randn(width, width, device=device).to(dtype)
        return partial(torch.mm, x, w.T)

    return measure_rates(device, sizes, lambda rows, width: 2.0 * rows * width**2, prepare)


def measure_grouped(
    device: torch.device,
    dtype: torch.dtype,
    sizes: Iterable[tuple[int, int]],
    product: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Points:
    """Measure products of all experts at once: product(x, weights, offsets), with equally many rows for each."""

    def prepare(rows: int, width: int) -> Callable[[], Any]:
        x = torch.randn(EXPERTS * rows, width, device=device).to(dtype)
        w = torch.randn(EXPERTS, width, width, device=device).to(dtype)
        return partial(product, x, w, torch.arange(rows, EXPERTS * rows + 1, rows, device=device, dtype=torch.int32))

    return measure_rates(device, sizes, lambda rows, width: 2.0 * EXPERTS * rows * width**2, prepare)


def measure_attention(
    device: torch.device, dtype: torch.dtype, sizes: Iterable[tuple[int, int]], tokens: int, *, backward: bool
) -> Points:
    """Measure the forward's operations in the unmasked half, for `tokens` tokens, by length and head width."""

    def prepare(length: int, width: int) -> Callable[[], Any]:
        shape = (max(1, tokens // length), 4, length, width)
        q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_(backward) for _ in range(3))
        forward = partial(nn.functional.scaled_dot_product_attention, q, k, v, is_causal=True)
        if not backward:
            return forward
        out = forward()
        return partial(torch.autograd.grad, out, (q, k, v), torch.ones_like(out), retain_graph=True)

    flops = lambda length, width: 2.0 * max(1, tokens // length) * 4 * length**2 * width  # noqa: E731
    return measure_rates(device, sizes, flops, prepare)


def measure_memory(device: torch.device, elements: int) -> float:
    """Return GB/s read and written by an addition; a GPU's other operators are as fast."""
    a = torch.randn(elements, device=device)
    b = torch.randn(elements, device=device)
    return 3 * a.nbytes / time_call(lambda: torch.add(a, b, out=b), device) / 1e9


def measure_copy(device: torch.device, size: int) -> float:
    source = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(size, dtype=torch.uint8, device=device)
    return size / time_call(lambda: target.copy_(source, non_blocking=True), device) / 1e9


def measure_collectives(
    device: torch.device, group: ProcessGroup | None, fabric: str, per_node: int, large_bytes: int
) -> list[Collective]:
    """Measure all kinds over one group, with all of its ranks; the slowest rank counts. `per_node`: how many of its
    ranks are on a node, for a fabric between nodes."""
    ranks = dist.get_world_size(group)
    collectives = []
    for kind in KINDS:
        taken: list[float] = []
        for size in (SMALL_BYTES, large_bytes):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # not every backend has every kind
                taken.append(_time_collective(kind, device, group, size))
        if len(taken) < 2:
            continue
        latency = min(taken)
        sent = float(large_bytes) * (ranks - 1) * (2 if kind == "all-reduce" else 1)
        if kind == "all-to-all":
            sent /= ranks  # each rank sends its own part only
            sent *= per_node * (ranks - per_node) / (ranks - 1) if fabric == "network" else 1
        rate = sent / max(max(taken) - latency, 1e-6) / 1e9
        collectives.append(Collective(kind, fabric, ranks, latency, rate))
    return collectives


def _time_collective(kind: str, device: torch.device, group: ProcessGroup | None, size: int) -> float:
    """Return the duration of a collective. `size`: bytes of one rank's part."""
    ranks = dist.get_world_size(group)
    part = torch.zeros(size // 4, device=device)
    whole = torch.zeros(ranks * part.numel(), device=device)
    sendable = part[: part.numel() // ranks * ranks]
    calls: dict[str, Callable[[], Any]] = {
        "all-gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all-reduce": lambda: dist.all_reduce(whole, group=group),
        "all-to-all": lambda: dist.all_to_all_single(torch.empty_like(sendable), sendable, group=group),
    }
    times = []
    for _ in range(1 + TURNS):
        dist.barrier(group=group)
        synchronize(device)
        began = time.perf_counter()
        calls[kind]()
        synchronize(device)
        times.append(time.perf_counter() - began)
    taken = torch.tensor(statistics.median(times[1:]), device=device)  # the first connects
    dist.all_reduce(taken, dist.ReduceOp.MAX, group=group)
    return float(taken)
