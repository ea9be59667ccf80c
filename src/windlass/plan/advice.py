"""Advice on a plan: changes that would make the run faster, and settings that are probably not intended."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote

from windlass import hardware
from windlass.data.inputs import find_absent_data, find_absent_files
from windlass.errors import Problem
from windlass.observe.format import format_plural
from windlass.plan.cost import Cost, Workload, estimate_cost
from windlass.plan.plan import Advice, Caution, Plan
from windlass.plan.resolve import FEW_STEPS
from windlass.plan.rows import RowLengths
from windlass.plan.search import Candidate, Search, choose_layout, list_micro_batches, try_batches
from windlass.plan.split_rows import needs_mask
from windlass.plan.workload import ModelShape
from windlass.runfile import RunFile
from windlass.serve.servers import judge_adapter, list_ways_on

WORTH = 1.05  # smaller gains are within the error of the estimate
OF_ALL = "all of these"
SLOW_STEP_SECONDS = 60
SHORT = 0.5  # fraction of max_length: shorter rows are mostly padding, or make small matrix products
# Trained parameters per token of data: an adapter stores about two bits per parameter, text has about one per token.
LARGE = 100
USUAL_RANK = 16  # that `windlass init` writes: nobody is warned of it
HIGH_RATE = 0.1  # adapters train at 1e-5 to 1e-2, by optimizers whose steps don't grow with the gradient
HIGH_RATE_OF_PAIRS = 1e-4
SLOW = 1.2  # smallest gain from larger micro-batches that is worth a warning


def advise_faster_layout(
    work: Workload,
    search: Search,
    contenders: Sequence[Candidate],
    run: RunFile,
    *,
    batch_is_set: bool,
    layout_is_set: bool,
) -> tuple[Advice, ...]:
    """Return the gain of each change alone and of all together, the best first."""
    lengths = search.lengths
    full = work.batch.length
    automatic = run.train.model_copy(update={"per_device_train_batch_size": "auto"})
    batches = list_micro_batches(automatic, work.batch.micro * work.batch.accumulation, full)
    changes: list[tuple[str, Cost, str]] = []
    packed = work
    filled = lengths
    may_pack = work.shape.base.family.isolates and run.objective.may_pack
    if not run.data.packs and lengths.usual < full and may_pack:
        as_packed = run.model_copy(update={"data": run.data.model_copy(update={"packing": True})})
        masked = needs_mask(as_packed, work.shape.base, work.machine.gpu)
        packed = replace(work, masked=masked, document=lengths.usual)
        filled = RowLengths(full)
        remark = f"a sequence then holds {full / lengths.usual:.1f} rows; a step trains on as many times the tokens"
        changes.append(("data.packing: true", estimate_cost(packed, filled, advise=False), remark))
    if batch_is_set and len(batches) > 1:
        best, _ = try_batches(work, work.layout, lengths, batches)
        changes.append(("train.per_device_train_batch_size: auto", best, f"micro-batches of {best.batch.micro}"))
    if not work.layout.activation_checkpointing:
        recomputed = replace(work.layout, activation_checkpointing=True)
        best, _ = try_batches(work, recomputed, lengths, [work.batch] if batch_is_set else batches)
        remark = f"{best.gpu_gib:,.1f} GiB a GPU, micro-batches of {best.batch.micro}"
        changes.append(("train.gradient_checkpointing: true", best, remark))
    other = choose_layout(contenders) if layout_is_set else None
    if other:
        changes.append(("layout: auto", other.cost, f"takes {other.name}"))
    if len(changes) > 1:
        layouts = [
            (candidate.name, replace(candidate.layout, activation_checkpointing=recompute))
            for candidate in contenders
            for recompute in (False, True)
            if candidate.here and not candidate.why_not
        ]
        other = choose_layout(replace(search, work=packed, lengths=filled, batches=lambda _: batches).compare(layouts))
        if other:
            recompute = "checkpointing" if other.layout.activation_checkpointing else "no checkpointing"
            remark = f"{other.name}, micro-batches of {other.cost.batch.micro}, {recompute}"
            changes.append((OF_ALL, other.cost, remark))
    now = estimate_cost(work, lengths, advise=False).tokens_per_second
    advice = [
        Advice(change, cost.tokens_per_second, cost.tokens_per_second / now, remark)
        for change, cost, remark in changes
        if cost.fits and cost.tokens_per_second >= WORTH * now
    ]
    return tuple(sorted(advice, key=lambda advice: -advice.gain))


def find_cautions(plan: Plan, problems: Iterable[Problem], shape: ModelShape) -> Iterator[Caution]:
    """Yield cautions, the most serious first."""
    is_local = plan.run.cluster.platform == "local" and plan.base.path is not None
    for path, problem in (*find_absent_data(plan.run.data, plan.where), *find_absent_files(plan.run, plan.where)):
        parent = Path(path).expanduser().parent
        # A path should be on this machine, not another, if its folder is, or if it is relative to this one.
        if is_local or parent.is_dir() or not parent.is_absolute():
            yield Caution(f"{problem.where}: {problem.problem} ({problem.hint})")
    yield from (Caution(f"{each.where}: {each.problem} ({each.hint})") for each in problems)  # of the rows
    on_cpu = plan.machine.gpu.name == "cpu"
    if on_cpu and not plan.run.cluster.changed and plan.cost.step_seconds > SLOW_STEP_SECONDS:
        yield Caution("no machine is set: planned for this one, which has no GPU", "cluster.gpu=h100")
    if on_cpu and plan.run.in_16_bits and not hardware.has_bf16_products():
        text = "this processor has no instructions for bfloat16: steps take many times as long as in float32"
        yield Caution(text, "train.bf16=false --override model.torch_dtype=float32")
    gpu = plan.machine.gpu
    if gpu.link.startswith("xgmi"):
        yield Caution(f"{gpu.name}: windlass trains on NVIDIA's GPUs; this is an estimate by its data sheet")
    if not gpu.has_bf16 and (plan.run.train.in_bf16 or plan.run.model.torch_dtype == "bfloat16"):
        text = f"{gpu.name} has no bfloat16 arithmetic: PyTorch computes it in float32, at {gpu.bf16_tflops:g} TFLOP/s"
        yield Caution(f"{text} at most, which the plan counts with (windlass doesn't train in float16)")
    yield from (Caution(f"lora.target_modules {text}") for text in plan.adapter.warnings)
    yield from _find_unserved(plan)
    family = shape.base.family
    if family.without_formula and not family.traced:
        layers = f"{family.without_formula} of {len(shape.layers)} layers"
        text = f"{layers} are linear attention or the like, which no formula is known for: memory and time are"
        yield Caution(f"{text} estimated as attention of the same widths")
    rate = plan.run.train.learning_rate
    if rate >= HIGH_RATE and "sgd" not in plan.run.train.optim:
        yield Caution(f"train.learning_rate {rate:g} is far above what adapters train at", "train.learning_rate=0.0002")
    elif plan.run.objective.of_pairs and rate >= HIGH_RATE_OF_PAIRS:
        text = f"train.learning_rate {rate:g} is high for pairs, whose two answers may both become unlikely"
        yield Caution(text, "train.learning_rate=1e-5")
    yield from _find_short_schedule(plan)
    gains = {advice.change.replace(": ", "="): advice.gain for advice in plan.advice}
    yield from _find_unfit_length(plan, plan.counts.document, shape, gains.get("data.packing=true"))
    yield from _find_shared_rope(plan)
    key = "train.per_device_train_batch_size=auto"
    gain = gains.get(key, 0.0)
    if gain >= SLOW and not on_cpu:
        text = f"micro-batches of {plan.batch.micro} are too small for the GPU; larger ones are {gain:.1f} x as fast"
        yield Caution(text, key)
    yield from _find_large_adapter(plan, shape, plan.counts.document)


def _find_unserved(plan: Plan) -> Iterator[Caution]:
    """Yield what the server of `export.server` doesn't apply of the adapter."""
    lora = plan.run.lora
    adapter = plan.adapter
    present = {
        "rslora": lora.use_rslora,
        "patterns": adapter.alphas or len(set(adapter.r_by_module.values())) > 1,
        "dora": lora.use_dora,
        "modules_to_save": adapter.in_full,
        "bias": lora.bias != "none",
    }
    features = [feature for feature, is_present in present.items() if is_present]
    adapted = [f"{module}.weight" for module in adapter.target_modules]
    adapted += adapter.target_parameters
    for verdict in judge_adapter(plan.run.export.server, plan.base, adapted, features, {}):
        if verdict.is_refused:
            yield Caution(f"export.server: {verdict}; {list_ways_on(verdict, plan.base, quote(plan.run.folder))}")


def _find_short_schedule(plan: Plan) -> Iterator[Caution]:
    train = plan.run.train
    steps = plan.schedule.steps
    if steps is None or steps >= FEW_STEPS or train.max_steps > 0:
        return
    at_once = train.least_batch * plan.layout.readers
    fewer = int((plan.schedule.rows or 0) * train.epochs) // (FEW_STEPS * at_once)
    override = f"train.gradient_accumulation_steps={fewer}"
    if train.global_batch_size is not None:
        override = f"train.global_batch_size={fewer * at_once}"
    is_set = train.global_batch_size and train.gradient_accumulation_steps != "auto"
    length = f"{format_plural(steps, 'optimizer step')} of {format_plural(plan.schedule.global_sequences, train.unit)}"
    yield Caution(f"only {length}: hardly any training", override if fewer and not is_set else "")


def _find_unfit_length(
    plan: Plan, tokens: int | None, shape: ModelShape, packing_gain: float | None
) -> Iterator[Caution]:
    """Yield cautions about data.max_length: beyond the model's positions, or far from the tokens of a usual row."""
    limit = plan.batch.length
    positions = shape.base.positions
    if positions and limit > positions:
        text = f"data.max_length {limit:,} is beyond the {positions:,} positions that the model was made for"
        yield Caution(text, f"data.max_length={positions}")
    if tokens and tokens > limit:
        longer = 1 << (tokens - 1).bit_length()
        longer = min(longer, positions or longer)
        text = f"rows have about {tokens:,} tokens and are cut at data.max_length {limit:,}"
        yield Caution(text, f"data.max_length={longer}" if longer > limit else "")
    elif tokens and tokens <= SHORT * limit and not plan.run.data.packs:
        text = f"rows have about {tokens:,} tokens, {tokens / limit:.0%} of data.max_length"
        text += f"; packed, {packing_gain:.1f} x as many tokens/s" if packing_gain else ""
        may_pack = shape.base.family.isolates and plan.run.objective.may_pack
        yield Caution(text, "data.packing=true" if may_pack else "")


def _find_shared_rope(plan: Plan) -> Iterator[Caution]:
    """Yield a caution if the longest row of a micro-batch decides how the positions of all its rows are computed."""
    config = plan.base.config
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    positions = config.get("max_position_embeddings")
    for table in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = str(table.get("rope_type", table.get("type")))
        original = table.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
        limit = {"longrope": original or positions, "dynamic": positions}.get(kind)
        if limit and plan.batch.length > limit and (plan.batch.micro > 1 or plan.run.data.packs):
            text = f"rope type {kind}: a row longer than {limit:,} tokens changes the positions of all rows beside it"
            override = "data.packing=false" if plan.run.data.packs else "train.per_device_train_batch_size=1"
            yield Caution(f"{text}, so a row's loss depends on its micro-batch", override)
            return


def _find_large_adapter(plan: Plan, shape: ModelShape, tokens: int | None) -> Iterator[Caution]:
    modules = [
        lora for layer, _ in shape.kinds for lora in (*layer.plain_lora, *layer.expert_lora) if lora.part != "router"
    ]
    break_even = {lora: lora.inputs * lora.outputs // (lora.inputs + lora.outputs) for lora in modules}
    if modules:
        least = min(modules, key=lambda lora: break_even[lora] / lora.r)
        if least.r > break_even[least]:
            weight = f"{least.outputs} x {least.inputs} weight"
            text = f"at rank {least.r} the adapter of {least.leaf} is larger than its {weight}"
            yield Caution(text, f"lora.r={max(1, break_even[least] // 2)}")
            return
    seen = min(tokens or 0, plan.batch.length) * plan.batch.sides * (plan.schedule.rows or 0)
    if plan.run.data.packs:
        seen = plan.batch.length * (plan.schedule.rows or 0)
    trained = plan.adapter.trainable - sum(plan.adapter.in_full.values())  # only those that a smaller rank reduces
    seen = int(seen * max(1, plan.run.train.num_train_epochs))
    if seen and trained > LARGE * seen and (plan.adapter.r > USUAL_RANK or plan.run.lora.experts):
        text = f"{trained:,} trained parameters for {seen:,} tokens to train on"
        smaller = 1 << max(0, int(plan.adapter.r * LARGE * seen / trained).bit_length() - 1)  # as ranks usually are
        yield Caution(f"{text}: a smaller rank does as well", f"lora.r={smaller}")
