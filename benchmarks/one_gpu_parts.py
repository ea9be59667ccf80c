"""The parts of benchmarks/one_gpu.py: each yields rows, and runs in its own process."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from one_gpu_dense import dense
from one_gpu_model import (
    CODE_SPREAD,
    GIB,
    GPU,
    SPREAD,
    Built,
    Cell,
    Row,
    Sizes,
    Trainee,
    begin_peak,
    build,
    card,
    fill,
    free,
    headers,
    layout_of,
    lora_of,
    make_machine,
    plan_gib,
    seconds_of,
    sync,
)
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.utils.checkpoint import checkpoint as checkpointed

from windlass.model import Base
from windlass.model import targets as adapters
from windlass.plan.cost import BatchSize, Workload, estimate_cost, read_shape
from windlass.train import fsdp, parallel
from windlass.train.kernels import documents, products
from windlass.train.lora import attach_adapter
from windlass.train.patches import PARTS as FUSED
from windlass.train.patches import Patches
from windlass.weights import quantized

OURS, PEFTS = "ours", "PEFT's"  # ways to compute the adapters of experts


def error(found: Tensor, wanted: Tensor) -> float:
    """Return ||found - wanted|| / ||wanted||."""
    difference = torch.linalg.vector_norm(found.float() - wanted.float())
    return float(difference / torch.linalg.vector_norm(wanted.float()))


# --- steps ---


@contextmanager
def cudnn(wanted: bool) -> Iterator[None]:
    """Use cuDNN's attention, which parallel.py disables."""
    torch.backends.cuda.enable_cudnn_sdp(wanted)
    yield
    torch.backends.cuda.enable_cudnn_sdp(False)


def measured(built: Built, trainee: Trainee, sizes: Sizes, cell: Cell, times: int) -> Row:
    """Run a warm-up step, then return the median of some steps, and their peak."""
    free()
    inputs, tokens = trainee.batch(cell, sizes.document), cell.tokens
    with cudnn(cell.cudnn), Patches() as patches:
        if cell.by_document:
            patches.patch_attention(trainee.model, documents.NAME)
        first = trainee.step(inputs)
        begin_peak()
        steps = [trainee.step(inputs) for _ in range(times)]
    document = sizes.document if cell.by_document else None
    batch = BatchSize(tokens // cell.length, 1, cell.length)
    work = replace(built.work, batch=batch, masked=cell.masked, document=document)
    planned = estimate_cost(work, advise=False)
    middle = {key: statistics.median(step[key] for step in steps) for key in steps[0]}
    peak_flops = work.machine.gpu.bf16_tflops * 1e12
    layers = len(work.shape.layers)
    row: Row = {
        "model": f"{layers} layers, {work.shape.base.total / 1e9:.1f} B", "base": work.layout.base_dtype,
        "adapters": built.words, "tokens": tokens, "rows": cell.words, **middle,
        "tokens_per_second": tokens / middle["seconds"],
        "mfu": planned.flops_per_token * tokens / middle["seconds"] / peak_flops if GPU else None,
        "plan_gib": plan_gib(planned), "plan_seconds": planned.step_seconds,
        "plan_rows_gib": {r.item: r.bytes / GIB for r in planned.rows if (r.phase, r.place) == ("step", "gpu")},
        "first_seconds": first["seconds"], "repeated": [step["seconds"] for step in steps],
    }  # fmt: skip
    if GPU:
        peak, (unused, all_of_it) = torch.cuda.max_memory_allocated() / GIB, torch.cuda.mem_get_info()
        row |= {"peak_gib": peak, "peak_to_plan": peak / row["plan_gib"]}
        row |= {"reserved_gib": torch.cuda.max_memory_reserved() / GIB, "card_gib": all_of_it / GIB}
        row |= {"unused_gib": unused / GIB, "plan_with_all_gib": planned.gpu_gib}
    return row


def attempt(cell: Callable[[], Row], words: str) -> Row:
    """Return a row, or one with the reason why there is none: not fitting is a result too."""
    try:
        return cell()
    except torch.OutOfMemoryError as full:
        printed = f"{words}: does not fit ({str(full).split('.')[0]})"
    free()
    return {"skipped": printed}


def unmeasured() -> Iterator[Row]:
    if not GPU:
        yield {"note": "no GPU here: skipped memory and MFU; the plan's figures are for this processor"}


def whole(base: str, routed: bool, sizes: Sizes, until: float) -> Iterator[Row]:
    """All layers with a quantized base, optimizer steps; further sizes if the last one fits and time is left."""
    began = time.time()
    if GPU and (least := weights_gib(sizes, base)) > torch.cuda.mem_get_info()[1] / GIB:
        yield {"skipped": f"its weights alone take {least:.0f} GiB"}
        return
    built = build(sizes, sizes.layers, base, routed)
    sync()
    card = f", {torch.cuda.memory_allocated() / GIB:.1f} GiB" if GPU else ""
    yield {"note": f"built and filled in {time.time() - began:.1f} s{card}; {built.words}"}
    yield from unmeasured()
    trainee = Trainee(built)
    for rows in sizes.rows:
        started, tokens = time.time(), rows * sizes.length
        row = attempt(partial(measured, built, trainee, sizes, Cell(tokens, sizes.length), 2), f"{tokens} tokens")
        yield row
        if "skipped" in row or until - time.time() < 3 * (time.time() - started):
            return


def weights_gib(sizes: Sizes, base: str) -> float:
    """Return what the plan counts for the weights of all layers."""
    found = headers(sizes, sizes.layers)
    shape = read_shape(found, adapters.resolve_adapter(lora_of(sizes, routed=False), found, str))
    batch = BatchSize(1, 1, sizes.length)
    planned = estimate_cost(Workload(shape, layout_of(base), batch, make_machine(), "adamw_torch", 2), advise=False)
    return sum(r.bytes for r in planned.rows if (r.phase, r.place, r.item) == ("step", "gpu", "base weights")) / GIB


def layers(sizes: Sizes, until: float) -> Iterator[Row]:
    """A few full-width layers in 16 bits and FP8, from few tokens to many; in 16 bits with other attention kernels."""
    begins = time.time()
    yield from unmeasured()
    for number, base in enumerate(("bf16", "fp8")):
        latest = begins + (until - begins) * (number + 1) / 2
        built = build(sizes, sizes.some, base, routed=False)
        trainee, longest = Trainee(built), 0.0
        cells = [Cell(tokens, sizes.length) for tokens in sizes.sweep]
        if base == "bf16":
            few = sizes.sweep[1]
            others = [Cell(few, sizes.length, cudnn=True), *(Cell(few, each, masked=True) for each in sizes.masked)]
            others += [Cell(few, each, by_document=True) for each in sizes.masked if GPU]
            cells[2:2] = others
        for cell in cells:
            if time.time() + 2.5 * longest > latest:
                yield {"skipped": f"{base} with {cell.words} and what follows: no time left"}
                break
            started = time.time()
            row = attempt(partial(measured, built, trainee, sizes, cell, 3), f"{base}, {cell.words}")
            longest = time.time() - started
            yield row
        del built, trainee
        free()


def fused(sizes: Sizes, until: float) -> Iterator[Row]:
    """A few layers with few tokens, where the host is slower than the GPU: all parts fused, none, and all but one."""
    built = build(sizes, sizes.some, "bf16", routed=True)
    cell = Cell(sizes.sweep[0], min(sizes.sweep[0], sizes.length))
    cases: dict[str, Collection[str]] = {"all parts": FUSED, "none": ()}
    cases |= {f"without {part}": [other for other in FUSED if other != part] for part in FUSED}
    for words, parts in cases.items():
        if time.time() > until - 5:
            yield {"skipped": f"{words}: no time left"}
            continue
        trainee = Trainee(built, parts, always=True)
        batch = trainee.batch(cell, sizes.document)
        first = trainee.step(batch)
        steps = [trainee.step(batch) for _ in range(5)]
        trainee.patches.close()
        medians = {key: statistics.median(step[key] for step in steps) for key in first}
        yield {"fused": words, "tokens": cell.tokens, **medians}


# --- the card itself, and our paths on it ---


def ground(sizes: Sizes, until: float) -> Iterator[Row]:
    """Reference rates for everything else, and whether the code paths used only on GPUs compute the right values."""
    del until
    device, side = fsdp.get_device(), sizes.square
    gpu = card()
    a, b = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
    a @ b
    product = min(seconds_of(lambda: a @ b) for _ in range(5))
    yield {"what": f"BF16 product of {side} x {side}", "value": 2 * side**3 / product / 1e12, "unit": "TFLOP/s",
           "expected": f"{gpu.bf16_tflops:g} by the table" if GPU else "-"}  # fmt: skip
    source = torch.empty(sizes.copied, dtype=torch.uint8, device=device)
    source.clone()
    copy = min(seconds_of(source.clone) for _ in range(3))
    yield {"what": "copy within the memory, read and written", "value": 2 * sizes.copied / copy / 1e9, "unit": "GB/s",
           "expected": f"{gpu.memory_gb_per_second:g} by the table" if GPU else "-"}  # fmt: skip
    del source
    free()
    yield from eight_bits(sizes)
    yield from unmerged_is_right(sizes)


def eight_bits(sizes: Sizes) -> Iterator[Row]:
    """Decode with the kernel and with torch; compare grouped products in chunks with those computed one by one."""
    device = fsdp.get_device()
    experts, wide, narrow, block = (4, 48, 32, 16) if sizes.tiny else (128, 4096, 2048, 128)
    codes = torch.empty(experts, wide, narrow, dtype=torch.uint8, device=device)
    for one in codes:
        one.copy_((torch.randn(wide, narrow, device=device) * CODE_SPREAD).to(torch.float8_e4m3fn).view(torch.uint8))
    counts = torch.arange(experts, device=device) * 5  # the first expert has no tokens
    offsets = counts.cumsum(0).to(torch.int32)
    for words, (high, across) in (("one scale an expert", (wide, narrow)), ("blocks", (block, block))):
        coding = quantized.StoredFormat(torch.float8_e4m3fn, (high, across), torch.bfloat16)
        scale = torch.rand(experts, wide // high, narrow // across, device=device) / 1000 + 0.0005
        yield from by_kernel(codes, scale, coding, words)
        for transposed, width in ((True, narrow), (False, wide)):
            x = torch.randn(int(offsets[-1]), width, device=device).to(torch.bfloat16)
            at_once = partial(products.multiply_all, x, codes, scale, offsets, coding, transposed=transposed)
            one_by_one = products.multiply_one_by_one(x, codes, scale, offsets, coding, transposed=transposed)
            direction = "x W^T" if transposed else "dy W"
            yield {"what": f"FP8 grouped product {direction}, {words}: error", "value": error(at_once(), one_by_one),
                   "unit": "relative", "expected": "below 0.01"}  # fmt: skip
            rate = codes.numel() / seconds_of(at_once) / 1e9
            yield {"what": f"the same: weights through it, {experts} experts", "value": rate, "unit": "G values/s",
                   "expected": "-"}  # fmt: skip


def by_kernel(codes: Tensor, scale: Tensor, coding: quantized.StoredFormat, words: str) -> Iterator[Row]:
    """Decode a full stack, and some of its columns: values that differ from torch's, and both rates."""
    if not GPU or not quantized.kernel_is_exact(codes.device, coding.codes, coding.dtype):
        yield {"note": f"{words}: no kernel is used here, torch's two passes are"}
        return
    half = codes.shape[2] // 2
    for part, first in ((codes, 0), (codes[:, :, half:], half)):
        given = coding.codes, coding.kind, *coding.block, coding.dtype, 0, first
        one, other = (
            way(part, scale, *given) for way in (quantized.dequantize_by_kernel, quantized.dequantize_by_torch)
        )
        differing = sum(
            int((a.view(torch.int16) != b.view(torch.int16)).sum()) for a, b in zip(one, other, strict=True)
        )
        yield {"what": f"FP8 by kernel, {words}, columns from {first}: values unlike torch's", "value": differing,
               "unit": f"of {part.numel():.3g}", "expected": "0"}  # fmt: skip
        del one, other
    most = card().memory_gb_per_second / 3
    for name, way in (("kernel", quantized.dequantize_by_kernel), ("torch", quantized.dequantize_by_torch)):
        given = coding.codes, coding.kind, *coding.block, coding.dtype, 0, 0
        seconds = min(seconds_of(partial(way, codes, scale, *given)) for _ in range(3))
        yield {"what": f"FP8 by {name}, {words}", "value": codes.numel() / seconds / 1e9, "unit": "G values/s",
               "expected": f"{most:.3g} at most: a byte read, two written"}  # fmt: skip


def unmerged_is_right(sizes: Sizes) -> Iterator[Row]:
    """Compare outputs and gradients of adapted experts with PEFT's, on the same values."""
    found = {}
    for way in (OURS, PEFTS):
        experts, trained, x, route = one_layer(sizes, way, 4)
        for index, parameter in enumerate(trained):
            dice = torch.Generator().manual_seed(index)
            parameter.data = (torch.randn(parameter.shape, generator=dice) * SPREAD).to(parameter.device)
        y = experts(x, *route)
        y.float().square().mean().backward()
        found[way] = [y.detach(), x.grad, *(parameter.grad for parameter in trained)]
        del experts, trained, x, route, y
        free()
    errors = [error(ours, theirs) for ours, theirs in zip(found[OURS], found[PEFTS], strict=True)]
    for what, worst in (("output", errors[0]), ("gradient of x", errors[1]), ("adapters' gradients", max(errors[2:]))):
        yield {"what": f"unmerged adapters of experts against PEFT's: {what}", "value": worst, "unit": "relative",
               "expected": "below 0.03 (BF16)"}  # fmt: skip


# --- PEFT's way of experts' adapters, and ours ---


def one_layer(sizes: Sizes, way: str, per_expert: int) -> tuple[nn.Module, list[Tensor], Tensor, tuple[Tensor, Tensor]]:
    """Return one layer's experts in BF16 with their adapters, and tokens that choose them at random."""
    found, layout = headers(sizes, 1), layout_of("bf16")
    lora = lora_of(sizes, routed=True)
    model = parallel.build_model(found, layout, torch.bfloat16)
    parallel.allocate(model, layout)
    torch.manual_seed(0)
    fill(model)
    model.requires_grad_(False)
    with mock.patch.object(Patches, "patch_experts") if way == PEFTS else nullcontext():
        peft = attach_adapter(model, lora, adapters.resolve_adapter(lora, found, str), 0)
    experts = peft.get_base_model().model.layers[0].mlp.experts
    trained = [p for p in experts.parameters() if p.requires_grad]
    return experts, trained, *tokens_of(found, per_expert)


def tokens_of(found: Base, per_expert: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    device, dims = fsdp.get_device(), found.dims
    count = max(1, per_expert * dims["experts"] // dims["top_k"])
    dice = torch.Generator().manual_seed(per_expert)
    x = torch.randn(count, dims["hidden"], generator=dice).to(device, torch.bfloat16).requires_grad_()
    chosen = torch.rand(count, dims["experts"], generator=dice).topk(dims["top_k"]).indices.to(device)
    return x, (chosen, torch.rand(count, dims["top_k"], generator=dice).to(device, torch.bfloat16))


def peft(sizes: Sizes, until: float) -> Iterator[Row]:
    """Time forward, recomputation and backward of one layer's experts, and measure the memory on top."""
    yield from unmeasured()
    found = headers(sizes, 1)
    table: dict[int, dict[str, tuple[float, float]]] = {each: {} for each in sizes.per_expert}
    for way in (OURS, PEFTS):
        experts, _, _, _ = one_layer(sizes, way, 1)
        for per_expert, ways in table.items():
            if time.time() > until - 5:
                yield {"skipped": f"{way}, {per_expert} tokens per expert: no time left"}
                continue
            ways[way] = timed(experts, *tokens_of(found, per_expert))
            if way == OURS:
                with bare(experts):
                    ways["none"] = timed(experts, *tokens_of(found, per_expert))
        del experts
        free()
    for per_expert, ways in table.items():
        if len(ways) < 3:
            continue
        (ours, ours_gib), (theirs, theirs_gib) = ways[OURS], ways[PEFTS]
        row = {"per_expert": per_expert, "peft_ms": 1e3 * theirs, "unmerged_ms": 1e3 * ours,
               "none_ms": 1e3 * ways["none"][0], "time_ratio": ours / theirs}  # fmt: skip
        if GPU:
            row |= {"peft_gib": theirs_gib, "unmerged_gib": ours_gib, "memory_ratio": ours_gib / theirs_gib}
        yield row


@contextmanager
def bare(experts: nn.Module) -> Iterator[None]:
    """Disable the adapters."""
    innermost: Any = next(module for module in experts.modules() if "adapters" in vars(module))
    kept, innermost.adapters = innermost.adapters, {}
    yield
    innermost.adapters = kept


def timed(experts: nn.Module, x: Tensor, route: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Return median seconds, and the GiB on top of what was allocated before."""

    def step() -> None:
        y = checkpointed(experts, x, *route, use_reentrant=False)
        y.float().square().mean().backward()
        x.grad = None

    step()
    begin_peak()
    before = torch.cuda.memory_allocated() if GPU else 0
    seconds = statistics.median(seconds_of(step) for _ in range(5))
    above = (torch.cuda.max_memory_allocated() - before) / GIB if GPU else math.nan
    return seconds, above


# --- where time goes ---


def profile(sizes: Sizes, until: float) -> Iterator[Row]:
    """Return the operators that take most of a step of FP8 layers."""
    del until
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recording

    built = build(sizes, sizes.some, "fp8", routed=True)
    trainee = Trainee(built)
    batch = trainee.batch(Cell(sizes.whole, sizes.length), sizes.document)
    for _ in range(2):
        trainee.step(batch)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if GPU else [])]
    with recording(activities=activities, acc_events=True) as recorded:  # torch 2.11 warns without
        taken = trainee.step(batch)
    key = "self_device_time_total" if GPU else "self_cpu_time_total"
    # On a GPU the kernels alone: torch counts their time once more at the operation that started them.
    kernels = [e for e in recorded.key_averages() if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    events = sorted(kernels if GPU else recorded.key_averages(), key=lambda event: -float(getattr(event, key)))
    everything = sum(float(getattr(event, key)) for event in events)
    words = f"{sizes.some} layers in FP8, {built.words}, {sizes.whole} tokens"
    found = f"{everything / 1e3:.1f} ms in {len(events)} kinds of operations"
    yield {"note": f"{words}: {1e3 * taken['seconds']:.1f} ms of a step while recording, {found}"}
    for event in events[: sizes.top]:
        spent = float(getattr(event, key))
        yield {"name": event.key[:90], "calls": event.count, "ms": spent / 1e3, "share": spent / everything}


warnings.filterwarnings("ignore", category=FutureWarning)  # PEFT's of transformers
PARTS: dict[str, Callable[[Sizes, float], Iterator[Row]]] = {
    "ground": ground,
    "whole": partial(whole, "fp8", False),
    "whole-experts": partial(whole, "fp8", True),
    "whole-nf4": partial(whole, "nf4", False),
    "layers": layers,
    "dense": dense,
    "fused": fused,
    "peft": peft,
    "profile": profile,
}
