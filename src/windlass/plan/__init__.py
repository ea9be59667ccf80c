"""Compute a Plan from a run file and checkpoint headers: what can be known about a run before a GPU is reserved."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from windlass import __version__, hardware
from windlass import model as weights
from windlass.data import mix
from windlass.data.sources import Rows, count_rows
from windlass.errors import Problem, UserError, raise_all
from windlass.files import write_json
from windlass.hardware import GIB, Machine
from windlass.model import Base
from windlass.model import targets as adapters
from windlass.model.quantization import (
    published_dtype,
    quantizable_names,
)
from windlass.model.targets import Adapter
from windlass.plan.accelerate import AccelerateFile
from windlass.plan.cost import (
    Batch,
    Cost,
    Workload,
    estimate_cost,
    read_shape,
)
from windlass.plan.inputs import find_absent_data, find_absent_files, is_expected_here
from windlass.plan.layout import (
    AUTO,
    CHECKPOINTING,
    Layout,
    read_request,
    why_not_codes,
)
from windlass.plan.machine import own_machine_file, read_machine
from windlass.plan.search import (
    Advice,
    Candidate,
    advise_faster_layout,
    choose_layout,
    compare_layouts,
    list_layouts,
    list_micro_batches,
    list_named_layouts,
)
from windlass.plan.unset import BYTES_PER_TOKEN, FEW_STEPS, estimate_row_tokens, fill_in_unset
from windlass.plan.workload import ModelShape
from windlass.runfile import Cluster, Data, Loaded, RunFile, Train, resolve_accumulation
from windlass.runfile.names import ATTENTION
from windlass.settings import (
    FOUR_BITS,
    PUBLISHED,
)

SHORT = 0.5  # fraction of max_length: shorter rows are mostly padding, or make small matrix products
# Trained parameters per token of data: an adapter stores about two bits per parameter, text has about one per token.
LARGE = 100
SLOW = 1.2  # smallest gain from larger micro-batches that is worth a warning
Where = Callable[[str], str]
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
OPTIMIZER_BYTES = 8  # AdamW keeps two float32 moments per trainable parameter


@dataclass(frozen=True, slots=True)
class Warning:
    """A setting that is possible but probably not intended."""

    text: str
    override: str = ""  # KEY=VALUE that changes it


@dataclass(frozen=True, slots=True)
class Schedule:
    """The length of the run. Fields are None if the number of rows is unknown."""

    rows: int | None
    rows_reason: str  # how the rows were counted, or why they could not be
    global_sequences: int  # micro-batch x ranks x accumulation
    tokens_per_step: int  # when every row is full
    steps_per_epoch: int | None
    steps: int | None
    warmup_steps: int | None
    evaluations: int | None
    checkpoints: int | None  # written during the run
    checkpoints_kept: int | None
    checkpoint_bytes: int


@dataclass(frozen=True)
class Plan:
    """The plan of a run. Scripts and later stages read its `as_dict`."""

    loaded: Loaded
    base: Base
    adapter: Adapter
    machine: Machine
    layout: Layout
    schedule: Schedule
    cost: Cost
    contenders: tuple[Candidate, ...]
    impossible: dict[str, str]  # impossible layouts, and why
    evaluated: int | None  # sequences of an evaluation; None: unknown
    tried: tuple[Cost, ...]  # the cost of each micro-batch, if the plan chooses one
    advice: tuple[Advice, ...]  # changes that would make the run faster
    warnings: tuple[Warning, ...]  # settings that are probably not intended
    notes: tuple[str, ...]
    chosen: tuple[str, ...] = ()  # choices for settings that the run file leaves open

    @property
    def run(self) -> RunFile:
        return self.loaded.run

    @property
    def where(self) -> Where:
        """Return the function that names the place of a run file's key."""
        return self.loaded.where

    @property
    def folder(self) -> Path:
        """Return the run folder."""
        return Path(self.run.folder)

    @property
    def batch(self) -> Batch:
        return self.cost.batch

    @cached_property
    def by_part(self) -> Mapping[str, int]:
        count: Counter[str] = Counter()
        for parameter in self.base.parameters:
            count[parameter.part] += parameter.count
        return count

    @property
    def total(self) -> int:
        return sum(self.by_part.values())

    @property
    def missing_weights(self) -> list[Problem]:
        """Return a problem if there are no weights: a published config is enough for a plan, but not for a run."""
        if self.base.path and self.disk_bytes is not None:
            return []
        hint = "mount the volume, name the model's folder, or download it with `windlass fetch RUN`"
        what = f"{self.run.model.model_name_or_path} contains no weights"
        return [Problem(what, self.where("model.model_name_or_path"), hint)]

    @property
    def disk_bytes(self) -> int | None:
        """Return the bytes of the tensors that the run reads; None if there are neither weights nor their headers."""
        return sum(piece.stored.end - piece.stored.start for p in self.base.parameters for piece in p.pieces) or None

    @property
    def seconds(self) -> dict[str, float] | None:
        """Return the run's seconds by activity; None if its length is unknown."""
        return self._seconds(self.cost, self.layout.ranks, self.schedule)

    def _seconds(self, cost: Cost, ranks: int, schedule: Schedule) -> dict[str, float] | None:
        if schedule.steps is None:
            return None
        sequences = math.ceil((self.evaluated or 0) / ranks)
        saving = schedule.checkpoint_bytes / self.machine.rates.storage_gb_per_second / 1e9
        return {
            "load": cost.load_seconds,
            "first_step": cost.first_step_seconds,
            "steps": schedule.steps * cost.step_seconds,
            "evaluations": (schedule.evaluations or 0) * sequences * cost.evaluation_seconds,
            "checkpoints": (schedule.checkpoints or 0) * saving,
        }

    @property
    def hours(self) -> float | None:
        return None if self.seconds is None else sum(self.seconds.values()) / 3600

    @property
    def gpu_hours(self) -> float | None:
        return None if self.hours is None else self.hours * self.layout.ranks

    def estimate_gpu_hours(self, other: Candidate) -> float | None:
        """Return the GPU-hours of the same run under another layout."""
        s, ranks = self.schedule, other.layout.ranks
        length = make_schedule(self.run.train, other.cost.batch, ranks, self.adapter, s.rows, s.rows_reason)
        seconds = self._seconds(other.cost, ranks, length)
        return None if seconds is None else sum(seconds.values()) * ranks / 3600

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of `windlass plan --json` and plan.json. Its keys are an interface: add, never rename."""
        cost, base, adapter = self.cost, self.base, self.adapter
        figures = "fits gpu_gib wire_gb_per_step step_seconds tokens_per_second"
        figures += " tokens_per_second_low tokens_per_second_high"
        nothing = dict.fromkeys(("base_dtype", "micro", "accumulation", *figures.split(), "gpu_hours"))
        layouts: list[dict[str, Any]] = [
            {"name": c.name, "ranks": c.layout.ranks, "possible": not c.why_not, "why_not": c.why_not}
            | {
                "base_dtype": c.layout.base_dtype,
                **_pick(c.cost.batch, "micro accumulation"),
                **_pick(c.cost, figures),
            }
            | {"gpu_hours": self.estimate_gpu_hours(c)}
            for c in self.contenders
        ]
        for name, why in self.impossible.items():
            layouts.append({"name": name, "ranks": self.layout.ranks, "possible": False, "why_not": why} | nothing)
        return {
            "windlass": __version__,
            "model": {
                "name": base.name,
                "path": str(base.path) if base.path else None,
                "class": base.family.causal_lm,
                "wrapper": base.wrapper.architecture if base.wrapper else None,
            },
            "parameters": {"total": self.total, "by_part": dict(self.by_part), "disk_bytes": self.disk_bytes},
            "adapter": {
                **_pick(adapter, "r alpha trainable"),
                "percent": 100 * adapter.trainable / self.total,
                "targets": [
                    {**_pick(t, "pattern names part"), "modules": len(t.modules)}
                    | {**_pick(t, "parameters note"), "matched": list(t.modules)}
                    for t in adapter.targets
                ],
            },
            "batch": {
                **_pick(self.batch, "micro accumulation"),
                "max_length": self.batch.length,
                **asdict(self.schedule),
                "tried": [
                    {**_pick(tried.batch, "micro accumulation"), "fits": tried.has_headroom}
                    | _pick(tried, "gpu_gib step_seconds tokens_per_second")
                    for tried in self.tried
                ],
            },
            "memory": {
                **_pick(cost, "gpu_gib host_gib fits remedy"),
                "gpu_memory_gib": self.machine.gpu.memory_gib,
                "rows": [_pick(row, "phase place item formula") | {"gib": row.bytes / GIB} for row in cost.rows],
            },
            "traffic": [asdict(flow) for flow in cost.flows],
            "layout": {**asdict(self.layout), "ranks": self.layout.ranks},
            "layouts": layouts,
            "estimate": {
                **_pick(cost, "step_seconds step_seconds_serial tokens_per_second mfu wire_gb_per_step"),
                **_pick(cost, "flops_per_token recompute_flops_per_token"),
                **_pick(cost, "step_seconds_low step_seconds_high tokens_per_second_low tokens_per_second_high basis"),
                **_pick(cost, "bound"),
                **{
                    f"{part}_seconds_per_micro_batch": getattr(cost, f"{part}_seconds")
                    for part in ("compute", "memory", "wire", "transfer", "host", "sync")
                },
                "seconds": self.seconds,
                **_pick(self, "hours gpu_hours"),
            },
            "advice": [asdict(advice) for advice in self.advice],
            "warnings": [asdict(warning) for warning in self.warnings],
            "notes": list(self.notes),
        }


def _pick(source: Any, names: str) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names.split()}


def write_plan(plan: Any, out: Path | None) -> Path | None:
    """Write plan.json into `out`, or into the run folder if that already exists."""
    folder = out or Path(plan.run.folder)
    try:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        if not folder.is_dir():
            return None
        write_json(folder / "plan.json", plan.as_dict())
    except OSError as error:
        what = f"cannot write plan.json: {error.strerror}"
        raise UserError(what, str(error.filename or folder), "give another --out DIR") from None
    return folder / "plan.json"


def make_plan(loaded: Loaded, accelerate: AccelerateFile | None = None) -> Plan:
    """Plan a run; raise an error with everything in the run file that does not fit the model or the machine.

    If no setting says whether to recompute activations, they are recomputed only if the run does not fit otherwise.
    """
    plan = _make_plan(loaded, accelerate)
    is_set = any(map(loaded.is_set, CHECKPOINTING)) or bool(
        accelerate and accelerate.wishes.get("activation_checkpointing")
    )
    if not is_set and not plan.cost.fits and (other := _make_plan(loaded, accelerate, recompute=True)).cost.fits:
        reason = f"{other.layout.reason}; activations are recomputed, it doesn't fit without"
        return replace(other, layout=replace(other.layout, reason=reason))
    return plan


def _check_expert_settings(loaded: Loaded, base: Base) -> Iterator[Problem]:
    """Yield a problem for each setting of routed experts that the model lacks or that is not supported."""
    train, where = loaded.run.train, loaded.where("train.gradient_checkpointing")
    if train.keeps_products and "experts" not in base.dims:
        yield Problem(f"{base.name} has no routed experts, whose products could be kept", where, "write true")
    elif train.keeps_products and train.compile:
        yield Problem("compiled layers keep no products of experts", where, "write true, or train.compile: false")
    if train.router_aux_loss_coef and "experts" not in base.dims:
        what = f"{base.name} has no routed experts, and so no balancing loss to weight"
        yield Problem(what, loaded.where("train.router_aux_loss_coef"), "leave it out")


def _make_plan(loaded: Loaded, accelerate: AccelerateFile | None, *, recompute: bool = False) -> Plan:
    run, where = loaded.run, loaded.where

    # 1. The inputs: the model, the adapter, the requested layout, the machine.
    base = weights.find_base(run.model.model_name_or_path, where("model.model_name_or_path"))
    adapter = adapters.resolve_adapter(run.lora, base, where)
    request = read_request(loaded, base.family, accelerate, experts_adapted=bool(adapter.target_parameters))
    request = replace(request, activation_checkpointing=True) if recompute else request
    raise_all([*_check_expert_settings(loaded, base)])
    loaded, chosen = fill_in_unset(loaded, base, request.ranks)
    run = loaded.run
    raise_all(check_family(loaded, base))
    sizes = {"nodes": request.nodes, "gpus_per_node": request.gpus_per_node}  # an Accelerate file may set them too
    machine = find_machine(run.cluster.model_copy(update=sizes), where)
    kept, why_not_kept, why_not_narrow = _check_base_dtypes(run, base)
    wishes, on_cpu = accelerate.wishes if accelerate else {}, machine.gpu.name == "cpu"
    cpu, offload = wishes.get("cpu"), wishes.get("offload")
    if request.precision == "fp16":
        what = "float16 overflows now and then; its loss scaler skips such steps, and here they would end the run"
        hint = "set train.fp16: false and train.bf16: true (mixed_precision: bf16), which has float32's range"
        raise UserError(what, where("train.fp16"), hint)
    if cpu and cpu.value and not on_cpu:
        hint = "write use_cpu: false; for a CPU machine write cluster.gpu: cpu"
        raise UserError(f"use_cpu: true, but the run is planned for {machine.gpu.name}", cpu.where, hint)
    if on_cpu and request.offload:
        what = "offload on a CPU: the base is stored in host memory already, and nothing would be moved"
        raise UserError(what, offload.where if offload else where("layout.offload"), "leave it out, or write false")
    asked = request.base_dtype
    why_not = "" if asked in (None, "bf16") else why_not_kept if asked == kept else why_not_narrow
    if asked in PUBLISHED and asked != kept:
        why_not = f"{base.name} is not published in {asked.upper()}"
    if why_not:
        hint = "leave it out, or write bf16"
        hint += f", or {kept}, as published" if kept and not why_not_kept else ""
        hint += ", or nf4, which windlass quantizes to as it loads" if not why_not_narrow else ""
        hint += "; or set lora.use_dora: false" * run.lora.use_dora
        raise UserError(f"base_dtype: {asked}, but {why_not}", where("layout.base_dtype"), hint)
    if request.base_dtype in FOUR_BITS and request.offload:
        what = f"base_dtype: {request.base_dtype} with offload: in 4 bits the base stays on the GPU"
        raise UserError(what, where("layout.offload"), "leave it out, or write base_dtype: bf16")
    if run.lora.modules_to_save and request.offload:
        what = "modules_to_save with offload: what is trained stays on the GPU"
        raise UserError(what, where("lora.modules_to_save"), "leave it out, or set layout.offload: false")
    request = replace(request, offload=False) if on_cpu or run.lora.modules_to_save else request

    # 2. How many sequences the rows make, and the ways to cut them into micro-batches.
    rows = mix.count_all(run.data, where)
    sequences, length, row_notes = count_sequences(rows, run.data.max_length, packing=run.data.packing)

    count = resolve_accumulation(run.train, request.ranks, where)

    def batches(ranks: int) -> tuple[Batch, ...]:
        """Return the batches for a number of ranks: the nearest global batch that divides evenly over them."""
        return list_micro_batches(run.train, max(1, round(count * request.ranks / ranks)), run.data.max_length)

    ways = batches(request.ranks)
    work = Workload(
        shape=read_shape(base, adapter),
        layout=Layout("resident", "", request.nodes, request.gpus_per_node, shard=1, replicate=request.ranks),
        batch=ways[0],
        machine=machine,
        optim=run.train.optim,
        base_bytes=BYTES[run.model.torch_dtype],
        dropout=run.lora.lora_dropout,
        dora=run.lora.use_dora,
        masked=run.masked,
        keeps_products=run.train.keeps_products,
        scores=(run.model.attn_implementation or base.family.usual_attention) == "eager",
        document=_median_tokens(rows, run.data.max_length) if run.data.packing else None,
        four_bits=not why_not_narrow,
        evaluated=run.train.per_device_eval_batch_size if run.train.eval_strategy != "no" else 0,
    )

    # 3. The layout: as set, or the best one.
    experts = base.dims.get("experts", 0) if base.family.expert_parallel else 0
    kept, is_set = "" if why_not_kept else kept, request.name != AUTO
    set_layouts = list_named_layouts(request, experts, kept) if is_set else []
    layouts, impossible = list_layouts(request, experts, kept)
    if not base.family.shards:
        set_layouts, layouts = ([row for row in kind if row[1].shard == 1] for kind in (set_layouts, layouts))
    if run.cluster.network is None:  # more nodes would need one
        layouts = [row for row in layouts if row[1].nodes <= request.nodes]
    contenders = compare_layouts(work, length, layouts, batches, request.barred)
    best = choose_layout(compare_layouts(work, length, set_layouts, batches) if is_set else contenders)
    if best is None:
        what, hint = (
            "no layout is possible",
            "leave keys of `layout` out: no layout that the run can have agrees with them",
        )
        if not base.family.shards:
            what = f"{base.family.causal_lm} can't be sharded: it reads weights that FSDP2 would not have gathered"
            hint = "set layout.name: resident"
        raise UserError(what, where("layout"), hint)
    layout = best.layout
    if is_set:
        by_plan = layout.base_dtype != "bf16" and request.base_dtype is None
        reason = f"set by {request.where}" + f"; the plan keeps the base in {kept.upper()} as published" * by_plan
        layout = replace(layout, reason=reason)
    work = replace(work, batch=best.cost.batch, layout=layout)
    plan = Plan(
        loaded=loaded,
        base=base,
        adapter=adapter,
        machine=machine,
        layout=layout,
        schedule=make_schedule(run.train, work.batch, layout.ranks, adapter, sequences, rows.how),
        cost=estimate_cost(work, length),
        contenders=contenders,
        impossible=impossible,
        evaluated=_count_evaluated(run.data, where) if work.evaluated else 0,
        tried=best.tried if len(ways) > 1 else (),
        advice=advise_faster_layout(work, length, contenders, run, batch_is_set=len(ways) == 1, layout_is_set=is_set),
        warnings=(),
        notes=(),
        chosen=chosen,
    )
    notes = (*_notes(plan, accelerate), *row_notes)
    return replace(plan, warnings=tuple(find_warnings(plan, rows, work.shape)), notes=notes)


def _notes(plan: Plan, accelerate: AccelerateFile | None) -> Iterator[str]:
    """Yield notes about the files, the model and the choices made."""
    base, found = plan.base, accelerate.notes if accelerate else ()
    yield from (f"not set, chosen: {each}" for each in plan.chosen)
    if plan.run.train.compile:
        yield "layers compiled (train.compile): time and memory are estimated for layers that are not"
    yield from (*plan.loaded.notes, *found, *base.notes, *plan.adapter.notes)
    if base.family.traced:
        some = f"{base.family.without_formula} of {base.dims['layers']} layers"
        yield f"{some} have no formula (linear attention or the like): their memory is measured by tracing"


def fill_in_choices(loaded: Loaded, say: Callable[[str], None] = lambda _: None) -> Loaded:
    """Return the run file with its open settings filled in; `say` is called with each choice."""
    base = weights.find_base(loaded.run.model.model_name_or_path, loaded.where("model.model_name_or_path"))
    filled, chosen = fill_in_unset(loaded, base, loaded.run.ranks)
    for each in chosen:
        say(f"not set, chosen: {each}")
    return filled


def _check_base_dtypes(run: RunFile, base: Base) -> tuple[str, str, str]:
    """Return the checkpoint's published dtype, why the base can't keep it, and why it can't be quantized to 4 bits."""
    form = f"the experts of {base.family.causal_lm} are of a form that windlass can't compute with in codes"
    kept, why_not_kept = published_dtype(base), why_not_codes(run.lora) or ("" if base.family.expert_adapters else form)
    why_not_narrow = why_not_kept
    if not quantizable_names(base):
        why_not_narrow = f"{base.name} has neither linears nor experts that windlass could quantize"
    elif kept in FOUR_BITS:
        why_not_narrow = f"{base.name} is published in {kept.upper()}"
    elif any(p.transposed for p in base.parameters):
        why_not_narrow = form
    return kept, why_not_kept, why_not_narrow


def check_family(loaded: Loaded, base: Base) -> list[Problem]:
    """Return a problem for each setting of the run file that this model family does not support."""
    run, family, problems = loaded.run, base.family, list[Problem]()
    if family.logits is not True:
        what = f"the logits of {family.causal_lm} are not its head's product, which the loss is computed from"
        if family.logits is None:
            what = f"{family.causal_lm} could not be run as a tiny model, so it is unknown how its loss is computed"
        problems.append(Problem(what, loaded.where("model.model_name_or_path"), "use a model of another family"))
    if run.data.packing and family.isolates is not True:
        seen = "attend to each other (tried)" if family.isolates is False else "may attend to each other"
        what = f"packed documents would {seen} in {family.causal_lm}: packing is refused for it"
        problems.append(Problem(what, loaded.where("data.packing"), "set data.packing: false"))
    name = run.model.attn_implementation
    if name in ATTENTION and name not in family.attention:
        what = f"{family.causal_lm} does not take {name}"
        hint = f"leave it out, or write {' or '.join(family.attention)}"
        problems.append(Problem(what, loaded.where("model.attn_implementation"), hint))
    return problems


def _count_evaluated(data: Data, where: Where) -> int | None:
    """Count the sequences of one evaluation over all its sets, without a held-out fraction. None: unknown."""
    splits = [(each, "val_split") for each in mix.list_training_sets(data, where)]
    splits += [(each, "train_split") for each in mix.list_evaluation_sets(data, where)]
    total = 0
    for each, key in splits:
        split = getattr(each.data, key)
        if split is not None:
            rows = count_rows(each.data, split, each.where, f"data.{key}")
            count = count_sequences(rows, data.max_length, packing=data.packing)[0]
            if count is None:
                return None
            total += count
    return total


def count_sequences(rows: Rows, limit: int, *, packing: bool) -> tuple[int | None, int, tuple[str, ...]]:
    """Return the number of sequences that the rows make, their usual length, and notes. Blank rows make none."""
    mean = _median_tokens(rows, limit)
    if not rows.count or mean is None:
        return rows.count, limit, ()
    filled = max(1, rows.count - rows.blank)
    notes = [f"{rows.blank:,} of {rows.count:,} rows are blank{rows.blank_how} and left out"] * bool(rows.blank)
    if packing:
        packed = math.ceil(filled * mean / limit)
        notes.append(f"packing: {filled:,} rows of about {mean} tokens make {packed:,} full sequences")
        return packed, limit, tuple(notes)
    if mean < limit:
        how = f"{rows.how}, {BYTES_PER_TOKEN} bytes a token"
        notes.append(f"time is estimated for rows of {mean} tokens ({how}), memory for {limit}")
    return filled, mean, tuple(notes)


def _median_tokens(rows: Rows, limit: int) -> int | None:
    """Return the tokens of a usual row, truncated to `limit`; None if unknown."""
    tokens = estimate_row_tokens(rows)
    return None if tokens is None else min(limit, tokens)


def find_machine(cluster: Cluster, where: Where) -> Machine:
    """Look up the run file's hardware in the hardware table; settings left out are taken from this machine."""

    def given(value: str | BaseModel | None) -> Any:
        return value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value

    if cluster.nodes > 1 and cluster.network is None:
        hint = f"give cluster.network: one of {', '.join(hardware.FABRICS)}, or {{name, gb_per_second}}"
        raise UserError(f"{cluster.nodes} nodes, but no cluster.network between them", where("cluster.nodes"), hint)
    gpu = hardware.find_gpu(given(cluster.gpu) or hardware.read_gpu_name(), where("cluster.gpu"))
    host_memory_gib = cluster.host_memory_gib
    if gpu.name == "cpu":  # its ranks share the memory of their machine
        if not isinstance(cluster.gpu, BaseModel):
            host_memory_gib = host_memory_gib or hardware.read_this_machine().memory_gib
            gpu = replace(gpu, memory_gib=host_memory_gib / cluster.gpus_per_node)
        host_memory_gib = host_memory_gib or gpu.memory_gib * cluster.gpus_per_node
    named, ranks, measured = cluster.machine, cluster.gpus_per_node, None
    if named:
        measured = read_machine(Path(named), gpu, ranks, where("cluster.machine"))
    elif cluster.nodes == 1 and (own := own_machine_file(gpu.name, ranks)).is_file():  # several nodes might disagree
        measured = read_machine(own, gpu, ranks, str(own))
    return Machine(
        gpu=gpu,
        measured=measured,
        link=hardware.find_fabric(given(cluster.link) or gpu.link, where("cluster.link")),
        network=hardware.find_fabric(given(cluster.network) or gpu.link, where("cluster.network")),
        host_link=hardware.find_fabric(gpu.host_link, where("cluster.gpu")),
        nics_per_node=cluster.nics_per_node,
        host_memory_gib=host_memory_gib,
    )


def make_schedule(train: Train, batch: Batch, ranks: int, adapter: Adapter, rows: int | None, reason: str) -> Schedule:
    """Compute the schedule, rounded as in the Trainer: ceil(rows / ranks) rows per rank, a last short step counts."""
    global_sequences = batch.micro * ranks * batch.accumulation
    per_epoch = None
    if rows is not None:
        count = math.ceil(math.ceil(rows / ranks) / batch.micro)
        per_epoch = max(1, math.ceil(count / batch.accumulation))
    steps = train.max_steps if train.max_steps > 0 else per_epoch and math.ceil(per_epoch * train.num_train_epochs)

    def times(strategy: str, every: float | None) -> int | None:
        """Return how often an event with this `strategy` happens in the run."""
        if strategy == "no" or steps is None:
            return 0 if strategy == "no" else None
        if strategy == "epoch":
            return None if per_epoch is None else math.ceil(steps / per_epoch)
        return steps // (max(1, math.ceil(steps * every)) if every and every < 1 else int(every or 1))

    warmup: int | None = train.warmup_steps or 0
    if not warmup and train.warmup_ratio:
        warmup = None if steps is None else math.ceil(steps * train.warmup_ratio)
    saves = times(train.save_strategy, train.save_steps)
    kept = saves if train.save_total_limit is None or saves is None else min(saves, train.save_total_limit)
    return Schedule(
        rows=rows,
        rows_reason=reason,
        global_sequences=global_sequences,
        tokens_per_step=global_sequences * batch.length,
        steps_per_epoch=per_epoch,
        steps=steps,
        warmup_steps=warmup,
        evaluations=times(train.eval_strategy, train.eval_steps),
        checkpoints=saves,
        checkpoints_kept=kept,
        checkpoint_bytes=adapter.trainable * (adapter.dtype_bytes + OPTIMIZER_BYTES),
    )


# --- settings that are probably not intended ------------------


def find_warnings(plan: Plan, rows: Rows, shape: ModelShape) -> Iterator[Warning]:
    """Yield warnings, the most serious first."""
    for path, absent in (*find_absent_data(plan.loaded), *find_absent_files(plan.loaded)):
        if is_expected_here(plan.loaded, path, weights=plan.base.path is not None):
            yield Warning(f"{absent.where}: {absent.problem} ({absent.hint})")
    yield from (Warning(f"lora.target_modules {text}") for text in plan.adapter.warnings)
    if (count := shape.base.family.without_formula) and not shape.base.family.traced:
        text = f"{count} of {len(shape.layers)} layers are linear attention or the like, which no formula is known for:"
        yield Warning(f"{text} memory and time are estimated as attention of the same widths")
    run, schedule, limit, tokens = plan.run, plan.schedule, plan.batch.length, estimate_row_tokens(rows)
    gains = {advice.change.replace(": ", "="): advice.gain for advice in plan.advice}
    steps, train = schedule.steps, run.train
    if steps is not None and steps < FEW_STEPS and train.max_steps <= 0:
        at_once = train.least_batch * plan.layout.ranks
        fewer = int((schedule.rows or 0) * train.num_train_epochs) // (FEW_STEPS * at_once)
        key = f"train.gradient_accumulation_steps={fewer}"
        if train.global_batch_size is not None:
            key = f"train.global_batch_size={fewer * at_once}"
        sequences = schedule.global_sequences
        each = f"{steps} optimizer step{'s' * (steps != 1)} of {sequences} sequence{'s' * (sequences != 1)}"
        is_set = train.global_batch_size and plan.loaded.is_set("train.gradient_accumulation_steps")
        yield Warning(f"only {each}: hardly any training", key if fewer and not is_set else "")
    if shape.base.positions and limit > shape.base.positions:
        text = f"data.max_length {limit:,} is beyond the {shape.base.positions:,} positions that the model was made for"
        yield Warning(text, f"data.max_length={shape.base.positions}")
    if tokens and tokens > limit:
        longer = 1 << (tokens - 1).bit_length()
        longer = min(longer, shape.base.positions or longer)
        key = f"data.max_length={longer}" if longer > limit else ""
        yield Warning(f"rows have about {tokens:,} tokens and are cut at data.max_length {limit:,}", key)
    elif tokens and tokens <= SHORT * limit and not run.data.packing:
        text = f"rows have about {tokens:,} tokens, {tokens / limit:.0%} of data.max_length"
        if gain := gains.get("data.packing=true"):
            text += f"; packed, {gain:.1f} x as many tokens/s"
        yield Warning(text, "data.packing=true" if shape.base.family.isolates else "")
    key = "train.per_device_train_batch_size=auto"
    if gains.get(key, 0.0) >= SLOW and plan.machine.gpu.name != "cpu":
        text = (
            f"micro-batches of {plan.batch.micro} are too small for the GPU; larger ones are {gains[key]:.1f} x as fast"
        )
        yield Warning(text, key)
    yield from _warn_of_large_adapter(plan, shape, tokens)


def _warn_of_large_adapter(plan: Plan, shape: ModelShape, tokens: int | None) -> Iterator[Warning]:
    modules = [
        lora for layer, _ in shape.kinds for lora in (*layer.plain_lora, *layer.expert_lora) if lora.part != "router"
    ]
    break_even = {lora: lora.inputs * lora.outputs // (lora.inputs + lora.outputs) for lora in modules}
    if modules and (least := min(modules, key=lambda lora: break_even[lora] / lora.r)).r > break_even[least]:
        text = (
            f"at rank {least.r} the adapter of {least.leaf} is larger than its {least.outputs} x {least.inputs} weight"
        )
        yield Warning(text, f"lora.r={max(1, break_even[least] // 2)}")
        return
    seen = min(tokens or 0, plan.batch.length) * (plan.schedule.rows or 0)
    if plan.run.data.packing:
        seen = plan.batch.length * (plan.schedule.rows or 0)
    trained = plan.adapter.trainable - sum(plan.adapter.in_full.values())  # only those that a smaller rank reduces
    if seen and trained > LARGE * seen:
        text = f"{trained / 1e6:,.1f} M trained parameters for {seen / 1e6:,.1f} M tokens of data"
        smaller = max(1, int(plan.adapter.r * LARGE * seen / trained))
        yield Warning(f"{text}: a smaller rank does as well", f"lora.r={smaller}")
