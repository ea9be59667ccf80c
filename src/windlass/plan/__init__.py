"""Run file + checkpoint headers -> Plan: all that can be known of the run before a GPU is reserved."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from windlass import hardware
from windlass import model as weights
from windlass.data import sources
from windlass.data.sources import Rows
from windlass.errors import UserError
from windlass.hardware import Machine
from windlass.model import Base
from windlass.model import targets as adapters
from windlass.model.targets import Adapter
from windlass.plan.advice import Advice, advise
from windlass.plan.batch import batches_of
from windlass.plan.compare import Contender, Trial, chosen, contend
from windlass.plan.cost import Batch, Cost, Work, cost, in_fp8
from windlass.plan.layout import AccelerateFile, Demand, Layout, candidates, demand, named, needs_weights
from windlass.plan.schedule import Schedule, schedule
from windlass.runfile import Cluster, Loaded, RunFile, accumulation
from windlass.runfile.machines import admission

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# Bytes of English text per token: WikiText-2 has 11.06 MB in 24,200 rows that are not blank, 110 tokens each.
BYTES_PER_TOKEN = 4.15


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole run, computed. `as_dict` is what scripts and later stages read."""

    loaded: Loaded
    base: Base
    adapter: Adapter
    machine: Machine
    layout: Layout
    batch: Batch
    schedule: Schedule
    cost: Cost  # memory when rows are full, time when they are as long as they are known to be
    expert_path: str  # how adapters of experts are computed: split or merged
    contenders: tuple[Contender, ...]
    tried: tuple[Trial, ...]  # micro-batches, where the plan chooses one
    advice: tuple[Advice, ...]  # what would make the run faster
    notes: tuple[str, ...]

    @property
    def by_part(self) -> Mapping[str, int]:
        count: Counter[str] = Counter()
        for parameter in self.base.parameters:
            count[parameter.part] += math.prod(parameter.shape)
        return count

    @property
    def total(self) -> int:
        return sum(self.by_part.values())

    @property
    def disk_bytes(self) -> int | None:
        """Bytes of the tensors that the run reads; None where no weights are at hand."""
        if self.base.path is None:
            return None
        return sum(piece.stored.end - piece.stored.start for p in self.base.parameters for piece in p.pieces)

    @property
    def hours(self) -> float | None:
        steps = self.schedule.steps
        return None if steps is None else steps * self.cost.step_seconds / 3600

    @property
    def gpu_hours(self) -> float | None:
        return None if self.hours is None else self.hours * self.layout.ranks

    def as_dict(self) -> dict[str, Any]:
        """The JSON of `windlass plan --json`; its keys are an interface and stay."""
        from windlass.plan.record import record

        return record(self)

    def write(self, out: Path | None = None) -> Path | None:
        """plan.json into `out`, or into the run folder where that exists already."""
        return write(self.as_dict(), Path(self.loaded.run.folder), out)


def write(record: dict[str, Any], run_folder: Path, out: Path | None) -> Path | None:
    """A plan's JSON, on its way to whoever reads it later."""
    folder = out or run_folder
    if out is not None:
        _make(out)
    if not folder.is_dir():
        return None
    path = folder / "plan.json"
    try:
        path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"the plan cannot be written: {error.strerror}", str(path), "give another --out DIR") from None
    return path


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the folder cannot be made: {error.strerror}", str(folder), "give another --out DIR") from None


def make(loaded: Loaded, accelerate: AccelerateFile | None = None) -> Plan:
    """Everything that is wrong with the run file against the model and the machine is an error here."""
    run, where = loaded.run, loaded.where
    checkpoint = weights.find_base(run.model.model_name_or_path, where("model.model_name_or_path"))
    adapter = adapters.resolve(run.lora, checkpoint, where)
    wanted = demand(run, where, checkpoint.family, accelerate, experts_adapted=bool(adapter.target_parameters))
    _refuse_float16(wanted, where)
    sized = {"nodes": wanted.nodes, "gpus_per_node": wanted.gpus_per_node}  # an Accelerate file may say them too
    machine = machine_of(run.cluster.model_copy(update=sized), where)
    wanted = _on_this_kind(wanted, machine, accelerate, where)
    rows = sources.count_rows(run.data, run.data.train_split, where)
    batches = batches_of(run.train, accumulation(run.train, wanted.ranks, where), run.data.max_length)
    full = _work(run, checkpoint, adapter, wanted, machine, batches[0], rows)
    sequences, length, told = rows_as_sequences(rows, run.data.max_length, packing=run.data.packing)

    def gpu_hours(layout: Layout, batch: Batch, cost: Cost) -> float | None:
        steps = schedule(run.train, batch, layout.ranks, adapter, sequences, rows.how).steps
        return None if steps is None else steps * cost.step_seconds * layout.ranks / 3600

    experts, fp8 = checkpoint.dims.get("experts", 0), _in_fp8(checkpoint, needs_weights(run.lora), wanted, where)
    contenders = contend(full, length, candidates(wanted, experts, fp8), batches, gpu_hours)
    asked = wanted.name != "auto"
    best = chosen(contend(full, length, named(wanted, experts, fp8), batches) if asked else contenders)
    if best is None or best.layout is None:
        hint = "leave keys of `layout` out: no layout that the run can have is as they say"
        raise UserError("no layout is possible", where("layout"), hint)
    layout = best.layout if not asked else _as_asked(best.layout, wanted)
    work = replace(full, batch=best.batch).under(layout)
    return Plan(
        loaded=loaded,
        base=checkpoint,
        adapter=adapter,
        machine=machine,
        layout=layout,
        batch=best.batch,
        schedule=schedule(run.train, best.batch, layout.ranks, adapter, sequences, rows.how),
        cost=cost(work, length),
        expert_path=work.expert_path,
        contenders=contenders,
        tried=best.tried if len(batches) > 1 else (),
        advice=advise(work, length, contenders, run, fixed=len(batches) == 1),
        notes=(*loaded.notes, *checkpoint.notes, *adapter.notes, *_way(work), *told, *admission(run.cluster, where)),
    )


def _way(work: Work) -> tuple[str, ...]:
    """How adapters of experts are computed."""
    if not work.adapter.target_parameters:
        return ()
    ways = {
        adapters.SPLIT: "beside their weights: two narrow products for each token's experts",
        adapters.MERGED: f"in their weights, W + BA: for {work.batch.tokens:,} tokens a micro-batch that is less work",
    }
    return (f"adapters of routed experts are computed {ways[work.expert_path]}",)


def _in_fp8(checkpoint: Base, why_not: str, wanted: Demand, where: Callable[[str], str]) -> bool:
    """Whether the base can be held as published, in FP8. `why_not`: what of the run speaks against it."""
    if not in_fp8(checkpoint):
        why_not = f"{checkpoint.name} is not published in FP8, and windlass does not quantise"
    if wanted.base_dtype == "fp8" and why_not:
        raise UserError(f"base_dtype: fp8, but {why_not}", where("layout.base_dtype"), "leave it out, or write bf16")
    return not why_not


def _as_asked(layout: Layout, wanted: Demand) -> Layout:
    """Named by the user; said too where the plan filled in how the base is held."""
    held = "" if wanted.base_dtype or layout.base_dtype != "fp8" else "; base kept in FP8 as published, by the plan"
    return replace(layout, reason=f"demanded by {wanted.where}{held}")


def rows_as_sequences(rows: Rows, limit: int, *, packing: bool) -> tuple[int | None, int, tuple[str, ...]]:
    """How many sequences the rows make, their usual length, and what to say about it. Blank rows make none."""
    if not rows.count or not rows.text_bytes:
        return rows.count, limit, ()
    filled = max(1, rows.count - rows.blank)
    mean = _usual(rows, limit) or limit
    told = (f"{rows.blank:,} of {rows.count:,} rows are blank{rows.blank_how} and left out",) if rows.blank else ()
    if packing:
        packed = math.ceil(filled * mean / limit)
        return packed, limit, (*told, f"packing: {filled:,} rows of about {mean} tokens make {packed:,} full sequences")
    if mean > limit // 2:
        return filled, mean, told
    words = (
        f"rows have about {mean} tokens ({rows.how}, {BYTES_PER_TOKEN} bytes a token), so a sequence of {limit} is"
        f" {mean / limit:.0%} full and time is estimated for that"
    )
    return filled, mean, (*told, words)


def _usual(rows: Rows, limit: int) -> int | None:
    """Tokens of a row as the data have it, cut at `limit`; None where nobody knows."""
    if not rows.count or not rows.text_bytes:
        return None
    return min(limit, math.ceil(rows.text_bytes / max(1, rows.count - rows.blank) / BYTES_PER_TOKEN))


def _work(
    run: RunFile, checkpoint: Base, adapter: Adapter, wanted: Demand, machine: Machine, batch: Batch, rows: Rows
) -> Work:
    """The run as the run file has it, before a layout and a micro-batch are chosen."""
    return Work(
        base=checkpoint,
        adapter=adapter,
        layout=_first_layout(wanted),
        batch=batch,
        machine=machine,
        optim=run.train.optim,
        base_bytes=BYTES[run.model.torch_dtype],
        dropout=run.lora.lora_dropout,
        masked=run.masked,
        document=_usual(rows, run.data.max_length) if run.data.packing and not run.masked else None,
        evaluated=run.train.per_device_eval_batch_size if run.train.eval_strategy != "no" else 0,
    )


def _refuse_float16(wanted: Demand, where: Callable[[str], str]) -> None:
    if wanted.precision == "fp16":
        what = "float16 overflows now and then, its loss scaler leaves such steps out, and here they end a run"
        hint = "set train.fp16: false and train.bf16: true (mixed_precision: bf16), which reaches as far as float32"
        raise UserError(what, where("train.fp16"), hint)


def _on_this_kind(
    wanted: Demand, machine: Machine, accelerate: AccelerateFile | None, where: Callable[[str], str]
) -> Demand:
    """A demand that suits the kind of machine: what is asked of a CPU, and what would be done without one."""
    on_cpu = machine.gpu.name == "cpu"
    cpu = accelerate.wishes.get("cpu") if accelerate else None
    if cpu and cpu.value and not on_cpu:
        hint = "write use_cpu: false; for a CPU machine say cluster.gpu: cpu"
        raise UserError(f"use_cpu: true, but the run is planned for {machine.gpu.name}", cpu.where, hint)
    if on_cpu and wanted.offload:
        wish = accelerate.wishes.get("offload") if accelerate else None
        what = "offload on a CPU: the base rests in host memory already, and nothing would be moved"
        raise UserError(what, wish.where if wish else where("layout.offload"), "leave it out, or write false")
    return replace(wanted, offload=False) if on_cpu else wanted


def _first_layout(wanted: Demand) -> Layout:
    """A stand-in until one is chosen: the costs of every candidate are computed with its own."""
    return Layout("resident", "", wanted.nodes, wanted.gpus_per_node, shard=1, replicate=wanted.ranks)


def machine_of(cluster: Cluster, where: Callable[[str], str]) -> Machine:
    """The run file's names looked up in the hardware table; what it leaves out is what this machine has."""
    if cluster.nodes > 1 and cluster.network is None:
        raise UserError(
            f"{cluster.nodes} nodes, and nothing said of the network between them",
            where("cluster.nodes"),
            f"give cluster.network: one of {', '.join(hardware.FABRICS)}, or {{name, gb_per_second}}",
        )
    gpu = hardware.gpu(_given(cluster.gpu) or hardware.this_gpu(), where("cluster.gpu"))
    host_memory_gib = cluster.host_memory_gib
    if gpu.name == "cpu":  # its ranks share the memory of their machine
        if not isinstance(cluster.gpu, BaseModel):
            host_memory_gib = host_memory_gib or hardware.this_machine().memory_gib
            gpu = replace(gpu, memory_gib=host_memory_gib / cluster.gpus_per_node)
        host_memory_gib = host_memory_gib or gpu.memory_gib * cluster.gpus_per_node
    return Machine(
        gpu=gpu,
        link=hardware.fabric(_given(cluster.link) or gpu.link, where("cluster.link")),
        network=hardware.fabric(_given(cluster.network) or gpu.link, where("cluster.network")),
        host_link=hardware.fabric(gpu.host_link, where("cluster.gpu")),
        nics_per_node=cluster.nics_per_node,
        host_memory_gib=host_memory_gib,
    )


def _given(value: str | BaseModel | None) -> Any:
    return value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value
