"""How a plan is made: read `make_plan` from top to bottom."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from windlass.errors import raise_all
from windlass.model import Base, find_base
from windlass.model.saved_adapter import continue_adapter
from windlass.model.targets import resolve_adapter
from windlass.plan.advice import advise_faster_layout, find_cautions
from windlass.plan.cost import Workload, estimate_cost, read_shape
from windlass.plan.layout import AUTO, LAYOUTS, Layout, read_request, rule_out_layouts
from windlass.plan.machine import find_machine
from windlass.plan.plan import Plan
from windlass.plan.resolve import resolve_auto
from windlass.plan.rows import DataSample, RowLengths, make_schedule, sample_data
from windlass.plan.search import Search, choose_fitting, divide_batch, list_impossible
from windlass.plan.split_rows import check_split_rows, list_splits, needs_mask
from windlass.plan.step_time import ONE_BY_ONE
from windlass.plan.sweep import plan_sweep
from windlass.plan.validate import check_expert_settings, check_family, check_request, check_rows, find_base_dtypes
from windlass.run_folder import read_versions
from windlass.runfile import Loaded, resolve_accumulation
from windlass.versions import TESTED

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def make_plan(
    loaded: Loaded,
    *,
    base: Base | None = None,
    sample: DataSample | None = None,
    compare: bool = True,
    is_here: bool = False,
) -> Plan:
    """Plan a run; raise an error with everything in the run file that does not fit the model or the machine. `base`,
    `sample`: of its model and rows, if they are read already. `compare`: also with other numbers of nodes, and find out
    what would make it faster. `is_here`: it is trained by the libraries of this process."""
    if loaded.trials:
        return plan_sweep(loaded, partial(make_plan, is_here=is_here), base, compare=compare)

    # 1. The model and the adapter, from headers alone.
    where = loaded.where
    base = base or find_base(loaded.run.model.model_name_or_path, where("model.model_name_or_path"))
    run, continued = continue_adapter(loaded.run, base, where)
    loaded = replace(loaded, run=run)
    adapter = resolve_adapter(run.lora, base, where)

    # 2. The layout that the file requests, and the settings that it leaves open.
    request = read_request(loaded)
    barred = rule_out_layouts(run, bool(adapter.target_parameters), bool(adapter.in_full or adapter.biases))
    raise_all([*check_expert_settings(run.train, base, where), *check_split_rows(request, loaded, base)])
    sample = sample or sample_data(loaded.run.data, base.path, where)
    raise_all(check_rows(sample))
    run, chosen = resolve_auto(loaded, base, request.readers, request.precision, sample)
    loaded = replace(loaded, run=run)
    raise_all([*check_family(run, base, where)])

    # 3. The machine, and whether it, the model and the adapter allow what is requested.
    machine = find_machine(run.cluster, where)
    on_cpu = machine.gpu.name == "cpu"
    dtypes = find_base_dtypes(run, base)
    raise_all([*check_request(request, barred, run, base, dtypes, machine.gpu.name, where)])
    if on_cpu or run.lora.trains_base:
        request = replace(request, offload=False)

    # 4. How many sequences the rows make, and the ways to cut those of a step into micro-batches.
    counts = sample.count(run.data, run.folder)
    lengths = counts.lengths if run.pads else RowLengths(counts.lengths.usual)
    accumulation = resolve_accumulation(run.train, request.readers, where, request.context_parallel or 1)
    batches = partial(divide_batch, run.train, accumulation * request.readers, run.data.length)
    batch_is_set = len(batches(request.readers)) == 1
    work = Workload(
        shape=read_shape(base, adapter),
        layout=Layout("resident", "", request.nodes, request.gpus_per_node, shard=1, replicate=request.ranks),
        batch=batches(request.readers)[0],
        machine=machine,
        optim=run.train.optim,
        base_bytes=BYTES[run.model.torch_dtype],
        dropout=run.lora.lora_dropout,
        dora=run.lora.use_dora,
        masked=needs_mask(run, base, machine.gpu),
        keeps_products=run.train.keeps_products,
        scores=(run.model.attn_implementation or base.family.usual_attention) == "eager",
        document=counts.document and min(counts.document, run.data.length) if run.data.packs else None,
        four_bits=not dtypes.why_not_four_bits,
        may_offload=not on_cpu and not run.train.compile,
        splits=list_splits(request, loaded, base),
        evaluated=run.train.per_device_eval_batch_size if run.train.eval_strategy != "no" else 0,
        of_narrow_pairs=run.objective.of_pairs and run.in_16_bits,
        barred=frozenset(barred if base.family.shards else LAYOUTS) - {"resident"},
        trains_base=run.lora.trains_base,
        keeps=bool(run.data.keep),
        versions=read_versions(TESTED) if is_here else {},
    )

    # 5. The layout and its micro-batch: as set, or the best.
    search = Search(
        work=work,
        lengths=lengths,
        batches=batches,
        experts=base.dims.get("experts", 0) if base.family.expert_parallel else 0,
        kept_dtype="" if dtypes.why_not_kept else dtypes.published,
        shards=base.family.shards,
        other_nodes=compare and run.cluster.network is not None,
        barred=barred,
    )
    best, contenders = choose_fitting(search, request, where("layout"))

    # 6. What follows from these: the schedule, the cost, and what to tell the user.
    are_set = {"batch_is_set": batch_is_set, "layout_is_set": request.name != AUTO}
    layout = best.layout
    work = replace(work, batch=best.cost.batch, layout=layout)
    plan = Plan(
        loaded=loaded,
        base=base,
        adapter=adapter,
        machine=machine,
        layout=layout,
        schedule=make_schedule(run.train, work.batch, layout.readers, adapter, counts),
        cost=estimate_cost(work, lengths),
        contenders=contenders,
        impossible=list_impossible(request, search.experts),
        counts=counts,
        evaluated=counts.evaluated if work.evaluated else 0,
        kept=counts.kept if work.evaluated else 0,
        tried=() if batch_is_set else best.tried,
        advice=advise_faster_layout(work, search, contenders, run, **are_set) if compare else (),
        warnings=(),
        notes=(),
        search=search,
        request=request,
        chosen=(continued, *chosen) if continued else chosen,
    )
    notes = (*_list_notes(plan), *counts.notes)
    return replace(plan, warnings=tuple(find_cautions(plan, sample.problems, work.shape)), notes=notes)


def _list_notes(plan: Plan) -> Iterator[str]:
    """Yield notes about the run file, the model and the choices made."""
    base = plan.base
    yield from (f"not set, chosen: {choice}" for choice in plan.chosen)
    if plan.run.train.compile:
        yield "layers compiled (train.compile): time and memory are estimated for layers that are not"
    if plan.layout.offload_activations and plan.machine.gpu.name == "cpu":
        yield "train.offload_activations: on a CPU it only copies, because layers compute in host memory"
    if plan.layout.is_sharded and plan.run.train.in_bf16 and plan.run.model.torch_dtype == "float32":
        text = "sharded weights in float32 are gathered in bfloat16, in which the sum between layers is then, too"
        yield f"{text}; a resident base keeps that in float32, so that losses differ a little"
    # What can't add an adapter inside the product that it is added to.
    layer = ""
    if plan.run.lora.use_dora:
        layer = "DoRA"
    elif plan.run.lora.experts and not plan.machine.gpu.name.startswith(ONE_BY_ONE):
        layer = f"the grouped product of experts on {plan.machine.gpu.name}"
    if layer and plan.run.in_16_bits:
        yield f"{layer} rounds its sum twice in training, as PEFT does: bfloat16 swallows part of a small adapter"
    yield from plan.loaded.notes
    yield from base.notes
    yield from plan.adapter.notes
    yield from plan.machine.notes
    if base.family.traced:
        layers = f"{base.family.without_formula} of {base.dims['layers']} layers"
        yield f"{layers} have no formula (linear attention or the like): their memory is measured by tracing"
