"""The cost of a run under one layout: memory, traffic and time, and if it does not fit, which change would help."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from windlass.hardware import GIB
from windlass.plan.layout import why_not_expert_parallel
from windlass.plan.memory import MemoryRow, estimate_memory, total_bytes
from windlass.plan.rows import RowLengths
from windlass.plan.step_time import StepTime, estimate_time
from windlass.plan.workload import BatchSize, Workload, read_shape
from windlass.settings import FOUR_BITS
from windlass.versions import find_lacking

__all__ = ["BatchSize", "Cost", "Workload", "estimate_cost", "read_shape"]

MOST_NODES = 64  # where the search for enough nodes ends
# Fraction of a GPU's memory that a micro-batch or layout chosen by the plan leaves free: the memory model agreed with
# torch's tracker to within this fraction.
HEADROOM = 0.05
OFFLOADING = "train.offload_activations"
# Changes with one of these are mentioned only if they make the run fit.
IF_IT_HELPS = ("nf4", "context_parallel", OFFLOADING)


@dataclass(frozen=True)
class Cost(StepTime):
    """The cost of a run: memory for full rows, since some will be; traffic and time for rows of the usual length, as
    they are padded. Rates count tokens without padding."""

    batch: BatchSize
    rows: tuple[MemoryRow, ...]
    gpu_gib: float  # peak over the phases
    host_gib: float  # per node, peak over the phases
    fits: bool
    has_headroom: bool  # it fits and leaves the fraction HEADROOM of the GPU free
    remedy: str  # the change that would make it fit; empty if it fits
    peak: str  # the moment of the step with the highest GPU memory use


def estimate_cost(work: Workload, lengths: RowLengths | None = None, *, advise: bool = True) -> Cost:
    """Return memory, traffic and time of this run. Pure: the same work always has the same cost. `lengths`: of the
    rows; None: all are full. `advise`: if the run does not fit, search for a change that makes it fit."""
    gpu_gib, host_gib, rows, peak = _estimate_sizes(work)
    fits = _fits(work, gpu_gib, host_gib)
    time = estimate_time(work) if lengths is None else _estimate_padded_time(work, lengths)
    return Cost(
        **vars(time),
        batch=work.batch,
        rows=rows,
        gpu_gib=gpu_gib,
        host_gib=host_gib,
        fits=fits,
        has_headroom=fits and gpu_gib <= work.machine.gpu.memory_gib * (1 - HEADROOM),
        remedy=_find_remedy(work, gpu_gib, host_gib) if advise and not fits else "",
        peak=peak,
    )


def _estimate_padded_time(work: Workload, lengths: RowLengths) -> StepTime:
    """Return the time with rows padded to the longest of their micro-batch."""
    batch = work.batch
    padded = lengths.pad(batch.micro, batch.micro * batch.accumulation * work.layout.readers)
    time = estimate_time(replace(work, batch=replace(batch, length=math.ceil(padded))))
    useful = min(1.0, lengths.usual / padded)
    return replace(
        time,
        tokens_per_second=time.tokens_per_second * useful,
        tokens_per_second_low=time.tokens_per_second_low * useful,
        tokens_per_second_high=time.tokens_per_second_high * useful,
        mfu=time.mfu * useful,
    )


def _estimate_sizes(work: Workload) -> tuple[float, float, tuple[MemoryRow, ...], str]:
    rows, peak = estimate_memory(work)
    return total_bytes(rows, "gpu") / GIB, total_bytes(rows, "host") / GIB, rows, peak


def _fits(work: Workload, gpu_gib: float, host_gib: float) -> bool:
    host = work.machine.host_memory_gib
    return gpu_gib <= work.machine.gpu.memory_gib and (host is None or host_gib <= host)


def _find_remedy(work: Workload, gpu_gib: float, host_gib: float) -> str:
    """Describe the mildest change that makes the run fit; else the number of nodes that would; else the shortage."""
    have = work.machine.gpu.memory_gib
    host = work.machine.host_memory_gib
    short = f"{gpu_gib:.1f} GiB of {have:.1f} a GPU"
    if host is not None and host_gib > host and gpu_gib <= have:
        short = f"{host_gib:.1f} GiB of {host:.1f} a host"
    tried: list[str] = []
    for changes, changed in _list_changes(work):
        gpu_gib, host_gib, *_ = _estimate_sizes(changed)
        if _fits(changed, gpu_gib, host_gib):
            remark = ""
            if "nf4" in changes[-1]:
                speed = f"{estimate_time(changed).tokens_per_second:,.0f} tokens/s"
                error = f"change each weight by about {FOUR_BITS['nf4'].error:.0%} (relative RMS error)"
                remark = f"; about {speed} with full rows, and 4 bits {error}"
            return f"needs {short}: with {', '.join(changes)} it needs {gpu_gib:.1f} GiB and fits{remark}"
        if not any(word in changes[-1] for word in IF_IT_HELPS):
            tried.append(f"{changes[-1]} ({gpu_gib:.1f} GiB a GPU)")
    failed = f"{'; '.join(tried)} do not suffice: " if tried else ""
    if "full-shard" in work.barred:
        return f"needs {short}: {failed}this run needs the whole base on each GPU, take GPUs with more memory"
    per_node = work.layout.gpus_per_node
    for nodes in range(work.layout.nodes + 1, MOST_NODES + 1):
        layout = replace(work.layout, nodes=nodes, shard=nodes * per_node, replicate=1, expert_parallel=1)
        layout = replace(layout, name="full-shard", reshard_after_forward=True, activation_checkpointing=True)
        smallest = replace(work, layout=layout, batch=replace(work.batch, micro=1), evaluated=min(work.evaluated, 1))
        gpu_gib, host_gib, *_ = _estimate_sizes(smallest)
        if _fits(smallest, gpu_gib, host_gib):
            enough = f"{nodes} nodes ({nodes * per_node} GPUs) fit"
            return f"needs {short}: {enough}, full-shard with checkpointing, one sequence at a time"
    return f"needs {short}: {failed}no number of such nodes up to {MOST_NODES} is enough, take GPUs with more memory"


def _list_changes(work: Workload) -> Iterator[tuple[list[str], Workload]]:
    """Yield what a user could change, mildest first: cumulative keys, then all of them with each possible layout."""
    layout = work.layout
    batch = work.batch
    ranks = work.layout.ranks
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
    if work.may_offload and not layout.offload_activations:
        yield [*keys, f"{OFFLOADING}: true"], replace(work, layout=replace(recompute, offload_activations=True))
    full = replace(recompute, name="full-shard", shard=ranks, replicate=1, expert_parallel=1)
    full = replace(full, reshard_after_forward=True)
    layouts = {}
    experts = work.shape.base.dims.get("experts", 0)
    if layout.name == "resident" and ranks > 1:
        layouts["layout.name: full-shard"] = full
    if layout.expert_parallel == 1 and not why_not_expert_parallel(experts, ranks, ranks):
        split = replace(full, name="expert-parallel", expert_parallel=ranks, offload=False)
        layouts["layout.name: expert-parallel"] = split
    if layout.name in ("hybrid", "expert-parallel") and not layout.reshard_after_forward:
        layouts["layout.reshard_after_forward: true"] = replace(recompute, reshard_after_forward=True)
    if layout.name in ("no-reshard", "hybrid"):
        layouts["layout.name: full-shard"] = full
    if layout.context_parallel == 1:
        named = {"": recompute, **{f"{key}, ": other for key, other in layouts.items()}}
        for name, other in named.items():
            layouts |= {f"{name}layout.context_parallel: {n}": replace(other, context_parallel=n) for n in work.splits}
    if layout.offload:
        layouts["layout.offload: false"] = replace(recompute, offload=False)
    elif layout.shard > 1 and not work.on_cpu and not work.trains_base:
        layouts["layout.offload: true"] = replace(recompute, offload=True, base_dtype="bf16")
    if work.four_bits and layout.base_dtype not in FOUR_BITS:
        smallest = full if layout.name == "resident" and ranks > 1 and "full-shard" not in work.barred else recompute
        name = f"layout.name: {smallest.name}, " if smallest is full else ""
        layouts[f"{name}layout.base_dtype: nf4"] = replace(smallest, base_dtype="nf4", offload=False)
    for key, other in layouts.items():
        if other.name not in work.barred and not find_lacking(other.needs, work.versions):
            yield [*keys, key], replace(work, layout=other)
