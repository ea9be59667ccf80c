"""Measure how fast this process computes, copies and exchanges: short measurements with torch, each a median."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from windlass.hardware import KINDS, Collective, Points

TURNS = 5  # turns of a measurement; the median counts
TURN_SECONDS = 2e-3  # minimum duration of a turn
CACHED = 16 << 20  # bytes of other tensors that a layer reads before it returns to the same one
MOST_FLOPS = {"cpu": 1e9, "cuda": 4e12}  # most operations of one call
EXPERTS = 8
SMALL_BYTES = 1 << 10  # bytes per rank at which only latency counts
LARGE_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}  # bytes per rank at which it doesn't count


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def choose_clock(device: torch.device) -> Callable[[], float]:
    """Return the clock to measure with: on one CPU thread the processor's time, which other work doesn't affect."""
    return time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def time_call(call: Callable[[], Any], device: torch.device, turns: int = TURNS) -> float:
    """Return the duration of one call, the median of some turns."""
    now = choose_clock(device)
    began = now()
    call()  # kernels are loaded, memory is allocated
    synchronize(device)
    first = now() - began
    if first > 0.2:
        turns = 2
    each, times = max(1, round(TURN_SECONDS / max(first, 1e-7))), []
    for _ in range(turns):
        began = now()
        for _ in range(each):
            call()
        synchronize(device)
        times.append((now() - began) / each)
    return statistics.median(times)


def measure_rates(
    device: torch.device,
    sizes: Iterable[tuple[int, int]],
    flops: Callable[[int, int], float],
    prepare: Callable[[int, int], Callable[[], Any]],
) -> Points:
    """Return TFLOP/s at each pair of sizes that isn't too large for this device."""
    small = [pair for pair in sizes if flops(*pair) <= MOST_FLOPS[device.type]]
    if device.type == "cuda":
        times = [time_call(prepare(*pair), device) for pair in small]
    else:
        times = time_in_turn([prepare(*pair) for pair in small], device)
    return tuple((float(a), float(b), flops(a, b) / took / 1e12) for (a, b), took in zip(small, times, strict=True))


def time_in_turn(calls: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
    """Return the duration of each call when called after others, as in a layer: on a CPU small products take twice
    as long as when repeated with their tensors in the cache."""
    now, times = choose_clock(device), [list[float]() for _ in calls]
    other = torch.zeros(CACHED // 4)
    for _ in range(TURNS + 1):  # the first prepares
        for call, taken in zip(calls, times, strict=True):
            other.sum()
            began = now()
            call()
            taken.append(now() - began)
    return [statistics.median(taken[1:]) for taken in times]


def measure_products(
    device: torch.device, dtype: torch.dtype, sizes: Iterable[tuple[int, int]], columns: int | None = None
) -> Points:
    """Measure x W^T with a square W, or with `columns` columns there and back, by rows and width."""

    def prepare(rows: int, width: int) -> Callable[[], Any]:
        x, w = (torch.randn(size, width, device=device).to(dtype) for size in (rows, columns or width))
        return partial(torch.mm, x, w.T) if columns is None else lambda: torch.mm(torch.mm(x, w.T), w)

    return measure_rates(
        device,
        sizes,
        lambda rows, width: (2.0 if columns is None else 4.0) * rows * width * (columns or width),
        prepare,
    )


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
    """Return GB/s read and written: of an addition on a GPU, whose other operators are as fast; on a CPU, whose
    others are mostly slower, of a mix from layers in 16 bits, with results kept as a forward keeps them."""
    if device.type != "cpu":
        a, b = torch.randn(elements, device=device), torch.randn(elements, device=device)
        return 3 * a.nbytes / time_call(lambda: torch.add(a, b, out=b), device) / 1e9
    inputs = itertools.cycle([torch.randn(elements // 128, 128).bfloat16() for _ in range(8)])
    kept = deque[Any](maxlen=16)  # 100 MB of 2^18 elements

    def operators() -> None:  # casts, products, sums and slower ones, in about the shares that they have in layers
        x = next(inputs)
        wide = x.float()
        scaled = (squared := wide * wide).bfloat16() * x
        added = (again := scaled.float()) + wide
        total = scaled + x
        total.pow(2).sum(-1)
        kept.append((wide, squared, scaled, again, added, total, nn.functional.silu(added)))

    for _ in range(2 * 16):
        operators()
    moved = 6 + 12 + 6 + 6 + 6 + 12 + 6 + 4 + 2 + 8  # bytes an element, in their order
    return moved * elements / time_call(operators, device) / 1e9


def measure_copy(device: torch.device, size: int) -> float:
    """Return GB/s from pinned host memory to the GPU; on a CPU, of a copy."""
    source = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(size, dtype=torch.uint8, device=device)
    return size / time_call(lambda: target.copy_(source, non_blocking=True), device) / 1e9


# --- the host ------------------


def measure_sync(device: torch.device) -> float:
    if device.type == "cpu":
        return 0.0
    x = torch.zeros(1, device=device)
    return time_call(x.item, device)


# --- between ranks ------------------


def measure_collectives(
    device: torch.device, group: ProcessGroup | None, fabric: str, per_node: int, turns: int = TURNS
) -> list[Collective]:
    """Measure all kinds over one group, with all of its ranks; the slowest rank counts.

    `per_node`: how many of its ranks are on a node, for a fabric between nodes.
    """
    ranks, found = dist.get_world_size(group), []
    for kind in KINDS:
        taken: list[float] = []
        for size in (SMALL_BYTES, LARGE_BYTES[device.type]):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # not every backend has every kind
                taken.append(_time_collective(kind, device, group, size, turns))
        if len(taken) == 2:
            latency, whole = min(taken), LARGE_BYTES[device.type] * ranks
            sent = whole * (ranks - 1) / ranks * (2 if kind == "all-reduce" else 1)
            if kind == "all-to-all":
                sent /= ranks  # each rank sends its own part only
                sent *= per_node * (ranks - per_node) / (ranks - 1) if fabric == "network" else 1
            found.append(Collective(kind, fabric, ranks, latency, sent / max(max(taken) - latency, 1e-6) / 1e9))
    return found


def _time_collective(kind: str, device: torch.device, group: ProcessGroup | None, size: int, turns: int) -> float:
    """Return the duration of a collective. `size`: bytes of one rank's part."""
    ranks, part = dist.get_world_size(group), torch.zeros(size // 4, device=device)
    whole = torch.zeros(ranks * part.numel(), device=device)
    calls: dict[str, Callable[[], Any]] = {
        "all-gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all-reduce": lambda: dist.all_reduce(whole, group=group),
        "all-to-all": lambda: dist.all_to_all_single(
            torch.empty_like(part).resize_(part.numel() // ranks * ranks),
            part[: part.numel() // ranks * ranks],
            group=group,
        ),
    }
    x, cpu = torch.randn(512, 256), device.type == "cpu"
    times = []
    for turn in range(1 + turns * (4 if cpu else 1)):
        if cpu:  # ranks that share a processor wait for each other, and their messages for what they compute
            for _ in range(10):
                nn.functional.silu(x @ x.T).sum()
        else:
            dist.barrier(group=group)
        synchronize(device)
        began = time.perf_counter()
        calls[kind]()
        synchronize(device)
        times += [time.perf_counter() - began] * bool(turn)
    taken = torch.tensor(statistics.fmean(times) if cpu else statistics.median(times), device=device)
    dist.all_reduce(taken, dist.ReduceOp.SUM if cpu else dist.ReduceOp.MAX, group=group)
    return float(taken) / (ranks if cpu else 1)
