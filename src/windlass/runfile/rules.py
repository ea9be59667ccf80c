"""Settings that contradict each other, and settings without effect."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from decimal import Decimal

from windlass.errors import Problem, UserError
from windlass.runfile.fields import RunFile, ScriptRun, Train, Watch
from windlass.runfile.machines import Cluster
from windlass.runfile.names import (
    ATTENTION,
    EVALUATED_SCHEDULES,
    OPTIMIZERS,
    OPTIMIZERS_REFUSED,
    SCHEDULES,
    TRACKERS,
    close_names,
)
from windlass.variables import started, variables

Where = Callable[[str], str]
Clash = tuple[str, str, str]  # keys, separated by spaces; what is wrong; a hint


def contradictions(
    run: RunFile | ScriptRun,
    where: Where,
    *,
    ranks: int | None = None,
    is_valid: Callable[[str], bool] = lambda _: True,
) -> list[Problem]:
    """All contradictions of a run with so many ranks (default: the run file's own), among the valid keys."""
    ranks = ranks or run.ranks
    if isinstance(run, ScriptRun):
        clashes = [*_script(run), *_rank_count(run), *_cluster(run.cluster)]
    else:
        clashes = [*_training(run, ranks), *_data(run), *_model(run, ranks), *_layout(run, ranks)]
        clashes += [*_rank_count(run), *_cluster(run.cluster)]
    problems = []
    for keys, what, hint in clashes:
        if all(map(is_valid, keys.split())):
            given = sorted(map(where, keys.split()), key=lambda place: place.startswith("default: "))
            others = [place for place in given[1:] if not place.startswith("default: ")]
            problems.append(Problem(f"{what} ({'; '.join(others)})" if others else what, given[0], hint))
    batch = ("per_device_train_batch_size", "global_batch_size", "gradient_accumulation_steps")
    valid = all(map(is_valid, ("train", "cluster", *(f"train.{key}" for key in batch))))
    if isinstance(run, RunFile) and run.train.global_batch_size and valid:
        try:
            accumulation(run.train, ranks, where)
        except UserError as error:
            problems += error.problems
    return problems


def accumulation(train: Train, ranks: int, where: Where) -> int:
    """Micro-batches per optimizer step: as set, or computed from global_batch_size; an error if that isn't whole.

    With per_device_train_batch_size: auto, micro-batches of one sequence, which the plan may merge.
    """
    if train.global_batch_size is None:
        return train.gradient_accumulation_steps
    at_once = train.least_batch * ranks
    steps, rest = divmod(train.global_batch_size, at_once)
    place = where("train.global_batch_size")
    product = f"{train.least_batch} per GPU x {ranks} GPUs = {at_once}"
    if rest:
        below = f"{steps * at_once} or " if steps else ""
        hint = f"set it to {below}{(steps + 1) * at_once}, or change train.per_device_train_batch_size"
        raise UserError(f"{train.global_batch_size} sequences can't be divided by {product}", place, hint)
    set_at = where("train.gradient_accumulation_steps")
    if steps != train.gradient_accumulation_steps and not set_at.startswith("default: "):
        what = f"{train.global_batch_size} sequences are {steps} micro-batches of {product}, but"
        what += f" {train.gradient_accumulation_steps} are configured ({set_at})"
        hint = f"remove one of them, or set train.gradient_accumulation_steps to {steps}"
        raise UserError(what, place, hint)
    return steps


def _unknown(key: str, kind: str, name: str, known: list[str]) -> Clash:
    return key, f"there is no {kind} {name!r}", f"choose {', '.join(close_names(name, known) or known)}"


def _training(run: RunFile, ranks: int) -> Iterator[Clash]:
    train = run.train
    if train.bf16 and train.fp16:
        yield "train.fp16 train.bf16", "bf16 and fp16 are both on", "set train.fp16: false"
    if train.optim in OPTIMIZERS_REFUSED:
        yield "train.optim", f"{train.optim} {OPTIMIZERS_REFUSED[train.optim]}", "use adamw_torch"
    elif train.optim not in OPTIMIZERS:
        yield _unknown("train.optim", "optimizer", train.optim, list(OPTIMIZERS))
    elif OPTIMIZERS[train.optim] == "bitsandbytes" and ranks > 1:
        what = f"{train.optim} is from bitsandbytes, which doesn't support weights sharded over {ranks} ranks"
        yield "train.optim", what, "use adamw_torch: an adapter's optimizer is small anyway"
    schedule = train.lr_scheduler_type
    needs = SCHEDULES.get(schedule, ())
    if schedule not in SCHEDULES:
        yield _unknown("train.lr_scheduler_type", "schedule", schedule, list(SCHEDULES))
    elif needs and not set(needs) & set(train.lr_scheduler_kwargs or ()):
        hint = f"such as train.lr_scheduler_kwargs: {{{needs[0]}: …}}"
        yield "train.lr_scheduler_type train.lr_scheduler_kwargs", f"{schedule} needs {' or '.join(needs)}", hint
    elif schedule in EVALUATED_SCHEDULES and train.eval_strategy == "no":
        what = f"{schedule} needs the evaluation loss, but evaluation is off"
        yield "train.lr_scheduler_type train.eval_strategy", what, "set train.eval_strategy: steps, or use cosine"
    if train.warmup_steps and train.warmup_ratio:
        hint = "remove one; with an override: train.warmup_ratio=0 or train.warmup_steps=0"
        yield "train.warmup_steps train.warmup_ratio", "warm-up is set both as steps and as a share", hint
    if train.warmup_steps and 0 < train.max_steps <= train.warmup_steps:
        what = f"a warm-up of {train.warmup_steps} steps takes the whole run of {train.max_steps}"
        yield "train.warmup_steps train.max_steps", what, "use fewer warm-up steps"
    trackers = [train.report_to] if isinstance(train.report_to, str) else train.report_to
    yield from (
        _unknown("train.report_to", "tracker", name, sorted(TRACKERS)) for name in trackers if name not in TRACKERS
    )
    if "none" in trackers and len(trackers) > 1:
        yield "train.report_to", "lists trackers and none", "remove `none`"
    seconds, timeout = run.watch.stall_seconds, train.ddp_timeout
    if seconds is not None and seconds > timeout / 2 and run.watch.stall != "off":
        what = f"{seconds} s is too long to find a stall: collectives time out after {timeout} s"
        yield "watch.stall_seconds train.ddp_timeout", what, f"set it to {timeout // 2} or less"


def _data(run: RunFile) -> Iterator[Clash]:
    train, data = run.train, run.data
    if train.eval_strategy != "no" and data.val_split is None and data.val_fraction is None:
        hint = "set data.val_split, or data.val_fraction: 0.05, or train.eval_strategy: no"
        yield "train.eval_strategy data.val_split", "evaluation is on, but there is nothing to evaluate on", hint
    if data.val_split is not None and data.val_fraction is not None:
        what = "both a validation split and a held-out share are set"
        yield "data.val_fraction data.val_split", what, "keep one, and set the other to null"
    best, every = "train.load_best_model_at_end", train.eval_steps
    if train.load_best_model_at_end:
        if train.eval_strategy == "no":
            what = "the best checkpoint is wanted, but evaluation is off"
            yield f"{best} train.eval_strategy", what, "set train.eval_strategy: steps"
        elif train.save_strategy == "no":
            what = "the best checkpoint is wanted, but saving is off"
            yield f"{best} train.save_strategy", what, "set train.save_strategy: steps"
        elif train.save_strategy != train.eval_strategy:
            what = f"the best checkpoint is wanted, but evaluation is by {train.eval_strategy}"
            what += f" and saving by {train.save_strategy}"
            yield f"{best} train.eval_strategy train.save_strategy", what, "set both to the same"
        elif train.save_strategy == "steps" and train.save_steps % every:
            what = f"the best checkpoint is wanted, but {train.save_steps} is not a multiple of {every}"
            near = max(every, round(train.save_steps / every) * every)
            hint = f"every checkpoint must be evaluated: set train.save_steps to {near}"
            yield f"train.save_steps train.eval_steps {best}", what, hint
    for given, missing in (("prompt", "completion"), ("completion", "prompt")):
        if getattr(data, f"{given}_field") is not None and getattr(data, f"{missing}_field") is None:
            hint = f"name the column that holds the {missing}"
            yield f"data.{given}_field", f"needs data.{missing}_field too", hint
    formats = [key for key in ("prompt_template", "prompt_field", "messages_field") if getattr(data, key) is not None]
    if len(formats) > 1:
        names = [f"data.{key}" for key in formats]
        yield " ".join(names), f"{' and '.join(names)} are different formats", "keep the one that fits the data"


def _model(run: RunFile, ranks: int) -> Iterator[Clash]:
    model = run.model
    attention = model.attn_implementation
    if attention is not None and attention not in ATTENTION and "/" not in attention:
        yield _unknown("model.attn_implementation", "attention implementation", attention, list(ATTENTION))
    if model.device_map not in ("auto", None) and ranks > 1:
        what = f"places the model by hand, but {ranks} ranks each load their own part"
        yield "model.device_map", what, "remove it: `layout` decides how the model is sharded"
    if model.use_cache and (run.train.gradient_checkpointing or run.layout.activation_checkpointing):
        keys = "model.use_cache train.gradient_checkpointing layout.activation_checkpointing"
        yield keys, "keys and values can't be kept when they are computed again in backward", "set it to false"
    if model.use_cache and run.data.packing:
        what = "with it, packed documents would see each other"
        yield "model.use_cache data.packing", what, "set it to false: training has no use for it"
    if run.lora.use_dora and run.lora.experts is not None:
        hint = "set lora.use_dora: false, or remove lora.experts"
        yield "lora.use_dora lora.experts", "DoRA doesn't work on routed experts", hint


def _layout(run: RunFile, ranks: int) -> Iterator[Clash]:
    shard, replicate, split = run.layout.shard, run.layout.replicate, run.layout.expert_parallel or 1
    product = (shard or 1) * (replicate or 1)
    if ranks % product or (shard and replicate and product != ranks):
        keys = [f"layout.{key}" for key, value in (("shard", shard), ("replicate", replicate)) if value]
        what = f"{shard or 1} x {replicate or 1} = {product} does not make {ranks} ranks"
        yield " ".join(keys), what, f"shard x replicate must be {ranks}"
    if (shard or ranks) % split:
        what = f"{split} does not divide the {shard or ranks} ranks that the weights are sharded over"
        yield "layout.expert_parallel layout.shard", what, "choose a divisor"


def _rank_count(run: RunFile | ScriptRun) -> Iterator[Clash]:
    cluster, ranks = run.cluster, run.layout.ranks
    gpus = cluster.nodes * cluster.gpus_per_node
    if ranks is not None and {"nodes", "gpus_per_node"} & cluster.model_fields_set and ranks != gpus:
        what = f"{ranks} ranks, but the cluster has {cluster.nodes} x {cluster.gpus_per_node} = {gpus} GPUs"
        yield "layout.ranks cluster.nodes cluster.gpus_per_node", what, "remove layout.ranks: the cluster determines it"


_UNITS = {"m": Decimal("0.001"), "k": Decimal(1000)}
_UNITS |= {unit: Decimal(1000) ** power for power, unit in enumerate("MGTPE", 2)}
_UNITS |= {f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", 1)}
_SECRET = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "API_KEY", "ACCESS_KEY", "PRIVATE_KEY")


def _bytes(quantity: str) -> Decimal:
    number = quantity.rstrip("mkKMGTPEi")
    return Decimal(number) * _UNITS[quantity[len(number) :]]


def _cluster(cluster: Cluster) -> Iterator[Clash]:
    request, limit = cluster.memory_request, cluster.memory_limit
    if request and limit and _bytes(request) > _bytes(limit):
        what = f"requests {request}, but the limit is {limit}"
        yield "cluster.memory_request cluster.memory_limit", what, "raise the limit"
    paths = [volume.path.rstrip("/") for volume in cluster.volumes]
    for index, path in enumerate(paths):
        if path in paths[:index]:
            yield f"cluster.volumes[{index}].path", f"{path or '/'} is mounted twice", "mount it once"
    for name, value in cluster.env.items():
        if started(name):
            yield f"cluster.env.{name}", "is set by the launcher", "remove it"
        elif isinstance(value, str) and value and name.upper().endswith(_SECRET):
            hint = f"keep it in a secret: {name}: {{secret: NAME, key: KEY}}"
            yield f"cluster.env.{name}", "looks like a secret, but a run file is copied into the run folder", hint


def _script(run: ScriptRun) -> Iterator[Clash]:
    script = run.script
    if script.path and script.module:
        yield "script.path script.module", "both a file and a module are set", "keep the one to run"
    if not script.path and not script.module:
        yield "script.path kind", "no script is set", "write script.path: train.py, or script.module: package.train"
    for name in Watch.model_fields:
        if getattr(run.watch, name) == "checkpoint":
            hint = "use warn or stop; on stop the script gets SIGTERM, and may save then"
            yield f"watch.{name}", "only the script itself can save a checkpoint", hint
    if run.watch.non_finite == "skip":
        yield "watch.non_finite", "only the script itself can skip a step", "use stop"


def remarks(run: RunFile | ScriptRun, where: Where) -> list[str]:
    """Settings without effect, or with another one than one may think."""

    def given(key: str) -> bool:
        return not where(key).startswith("default: ")

    notes = []
    for name in (name for name in run.cluster.env if name.startswith(("NCCL_", "TORCH_NCCL_", "GLOO_"))):
        near = difflib.get_close_matches(name, variables(), 1, cutoff=0.9)  # our table doesn't have all variables
        if near and name not in variables():
            notes.append(f"{where(f'cluster.env.{name}')}: nothing reads it; did you mean {near[0]}?")
    if isinstance(run, ScriptRun):
        keys = ("watch.min_supervised_fraction", "watch.dead_experts")
        return [*notes, *(f"{where(key)}: no effect on a script" for key in keys if given(key))]
    train, epochs = run.train, given("train.num_train_epochs")
    table = [
        ("model.device_map", True, f"{run.model.device_map or 'null'}: windlass places the model itself"),
        (
            "train.ddp_find_unused_parameters",
            train.ddp_find_unused_parameters,
            "no effect: windlass doesn't use DistributedDataParallel",
        ),
        ("train.max_steps", train.max_steps > 0 and epochs, "overrides train.num_train_epochs"),
        ("train.eval_steps", train.eval_strategy != "steps", "no effect unless train.eval_strategy is `steps`"),
        ("train.save_steps", train.save_strategy != "steps", "no effect unless train.save_strategy is `steps`"),
        (
            "train.lr_scheduler_type",
            train.lr_scheduler_type == "constant" and bool(train.warmup_ratio or train.warmup_steps),
            "constant has no warm-up; constant_with_warmup has one",
        ),
        (
            "layout.activation_checkpointing",
            run.layout.activation_checkpointing and train.gradient_checkpointing,
            "same as train.gradient_checkpointing, which is set too",
        ),
        ("model.use_cache", run.model.use_cache, "training has no use for it: it is left off"),
    ]
    notes += [f"{where(key)}: {text}" for key, applies, text in table if applies and given(key)]
    fixed = train.per_device_train_batch_size != "auto"  # otherwise the plan prints it
    if fixed and train.global_batch_size and not given("train.gradient_accumulation_steps"):
        product = f"{train.least_batch} per GPU x {run.ranks} GPUs"
        steps = accumulation(train, run.ranks, where)
        micro = f"{steps} micro-batch{'es' if steps > 1 else ''}"
        notes.append(f"{where('train.global_batch_size')}: {train.global_batch_size} = {product} x {micro}")
    return notes
