"""What a run costs under one layout: memory, traffic and time, and if it does not fit, what would make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from windlass.hardware import GIB
from windlass.plan.layout import why_not_expert_parallel
from windlass.plan.memory import Row, estimate_memory, total
from windlass.plan.time import Flow, estimate_time
from windlass.plan.work import Batch, Work, in_fp8

__all__ = ["Batch", "Cost", "Flow", "Row", "Work", "cost", "in_fp8"]

MOST_NODES = 64  # where the search for enough of them ends


@dataclass(frozen=True, slots=True)
class Cost:
    rows: tuple[Row, ...]
    flows: tuple[Flow, ...]
    gpu_gib: float  # peak over the phases
    host_gib: float  # per node, peak over the phases
    fits: bool
    remedy: str  # what would make it fit; empty when it fits
    flops_per_token: float  # model FLOPs: forward + backward, without recomputation
    recompute_flops_per_token: float
    compute_seconds: float  # per micro-batch
    step_seconds: float
    step_seconds_serial: float  # when nothing overlaps
    tokens_per_second: float  # of all ranks together
    mfu: float
    wire_gb_per_step: float  # per GPU
    wire_seconds: float  # per micro-batch
    host_seconds: float  # per micro-batch: between host and GPU memory
    bound: str  # what the step waits for: compute, memory, wire or host
    peak: str  # the moment of the step when the GPU needs most


def cost(work: Work, usual: int | None = None, *, advise: bool = True) -> Cost:
    """Memory, traffic and time of this run. Pure: the same work costs the same.

    Memory is counted as when every row is full, for some will be; with `usual`, traffic and time are those of rows
    of that many tokens. `advise`: if it does not fit, find out what would.
    """
    rows, peak = estimate_memory(work)
    gpu_gib, host_gib = total(rows, "gpu") / GIB, total(rows, "host") / GIB
    fits = _fits(work, gpu_gib, host_gib)
    remedy = _find_remedy(work, gpu_gib, host_gib) if advise and not fits else ""
    if usual is not None:
        work = replace(work, batch=replace(work.batch, length=usual))
    time = estimate_time(work)
    tokens = work.batch.tokens * work.batch.accumulation * work.layout.ranks
    peak_flops = work.machine.gpu.bf16_tflops * 1e12 * work.layout.ranks
    return Cost(
        rows=rows,
        flows=time.flows,
        gpu_gib=gpu_gib,
        host_gib=host_gib,
        fits=fits,
        remedy=remedy,
        flops_per_token=time.flops_per_token,
        recompute_flops_per_token=time.recompute_flops_per_token,
        compute_seconds=time.compute,
        step_seconds=time.step,
        step_seconds_serial=time.serial,
        tokens_per_second=tokens / time.step,
        mfu=time.flops_per_token * tokens / time.step / peak_flops,
        wire_gb_per_step=sum(f.bytes * f.per_step for f in time.flows if f.kind != "host transfer") / 1e9,
        wire_seconds=time.wire,
        host_seconds=time.host,
        bound=time.bound,
        peak=peak,
    )


def _fits(work: Work, gpu_gib: float, host_gib: float) -> bool:
    machine = work.machine
    return gpu_gib <= machine.gpu.memory_gib and (
        machine.host_memory_gib is None or host_gib <= machine.host_memory_gib
    )


def _sizes(work: Work) -> tuple[float, float]:
    rows, _ = estimate_memory(work)
    return total(rows, "gpu") / GIB, total(rows, "host") / GIB


def _find_remedy(work: Work, gpu_gib: float, host_gib: float) -> str:
    """The mildest change that fits; else how many GPUs would do; else how much is missing."""
    have, host = work.machine.gpu.memory_gib, work.machine.host_memory_gib
    short = f"{gpu_gib:.1f} GiB of {have:.1f} a GPU"
    if host is not None and host_gib > host and gpu_gib <= have:
        short = f"{host_gib:.1f} GiB of {host:.1f} a host"
    tried: list[str] = []
    for changes, changed in _changes(work):
        gpu_gib, host_gib = _sizes(changed)
        if _fits(changed, gpu_gib, host_gib):
            return f"needs {short}: with {', '.join(changes)} it needs {gpu_gib:.1f} GiB and fits"
        tried.append(f"{changes[-1]} ({gpu_gib:.1f} GiB a GPU)")
    per_node = work.layout.gpus_per_node
    for nodes in range(work.layout.nodes + 1, MOST_NODES + 1):
        layout = replace(work.layout, nodes=nodes, shard=nodes * per_node, replicate=1, expert_parallel=1)
        layout = replace(layout, name="full-shard", reshard_after_forward=True, activation_checkpointing=True)
        smallest = replace(work, layout=layout, batch=replace(work.batch, micro=1), evaluated=min(work.evaluated, 1))
        if _fits(smallest, *_sizes(smallest)):
            enough = f"{nodes} nodes ({nodes * per_node} GPUs) fit"
            return f"needs {short}: {enough}, full-shard with checkpointing, one sequence at a time"
    failed = f"{'; '.join(tried)} do not suffice: " if tried else ""
    return f"needs {short}: {failed}no number of such nodes up to {MOST_NODES} is enough, take GPUs with more memory"


def _changes(work: Work) -> Iterator[tuple[list[str], Work]]:
    """What a user could change, mildest first: keys that add up, then with all of them one layout or another."""
    layout, batch, ranks = work.layout, work.batch, work.layout.ranks
    recompute = replace(layout, activation_checkpointing=True)
    keys: list[str] = []
    if work.evaluated > batch.micro:
        work = replace(work, evaluated=batch.micro)
        keys.append(f"train.per_device_eval_batch_size: {batch.micro}")
        yield [*keys], work
    work = replace(work, layout=recompute)
    if not layout.activation_checkpointing:
        keys.append("train.gradient_checkpointing: true")
        yield [*keys], work
    if batch.micro > 1:
        smaller = replace(batch, micro=1, accumulation=batch.accumulation * batch.micro)
        work = replace(work, batch=smaller, evaluated=min(work.evaluated, 1))
        keys.append("train.per_device_train_batch_size: 1")
        yield [*keys], work
    full = replace(recompute, name="full-shard", shard=ranks, replicate=1, expert_parallel=1)
    layouts = {}
    if layout.shard == 1 and ranks > 1:
        layouts["layout.name: full-shard"] = replace(full, reshard_after_forward=True)
    if layout.expert_parallel == 1 and not why_not_expert_parallel(work.base.dims.get("experts", 0), ranks, ranks):
        split = replace(full, name="expert-parallel", expert_parallel=ranks, offload=False)
        layouts["layout.name: expert-parallel"] = replace(split, reshard_after_forward=True)
    if not layout.reshard_after_forward and layout.shard > 1:
        name = "full-shard" if layout.name == "no-reshard" else layout.name
        layouts["layout.reshard_after_forward: true"] = replace(recompute, name=name, reshard_after_forward=True)
    if layout.replicate > 1 and layout.shard > 1:
        layouts["layout.name: full-shard over all ranks"] = full
    if layout.offload:
        layouts["layout.offload: false"] = replace(recompute, offload=False)
    elif layout.shard > 1 and not work.on_cpu:
        layouts["layout.offload: true"] = replace(recompute, offload=True, base_dtype="bf16")
    for key, other in layouts.items():
        yield [*keys, key], replace(work, layout=other)
