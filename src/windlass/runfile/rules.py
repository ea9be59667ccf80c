"""Settings that contradict each other, and settings without effect."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePosixPath

from windlass.errors import DEFAULT, Problem, UserError, Where, is_written
from windlass.runfile import names
from windlass.runfile.fields import Run, RunFile, ScriptRun, Train, Watch
from windlass.runfile.machines import MANAGED_BY, RUN_LABEL, Kubernetes, Pods, Volume
from windlass.runfile.rows import Data
from windlass.variables import find_unread, is_set_by_launcher

Clash = tuple[str, str, str]  # keys, separated by spaces; what is wrong; a hint

_SECRET = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "API_KEY", "ACCESS_KEY", "PRIVATE_KEY")


def find_contradictions(run: RunFile | ScriptRun, where: Where, is_valid: Callable[[str], bool]) -> list[Problem]:
    """Return all contradictions among the valid keys; those of sizes and ranks are the plan's to find."""
    clashes = [*_check_machines(run), *_check_folder(run.folder, run.folder_key, run.cluster.volumes)]
    if isinstance(run, ScriptRun):
        clashes += _check_script(run)
    else:
        clashes += [*_check_training(run), *_check_evaluation(run), *_check_model(run)]
        clashes += _check_objective(run, where)
    problems = []
    for keys, what, hint in clashes:
        if all(map(is_valid, keys.split())):
            first, *others = sorted(map(where, keys.split()), key=lambda place: place.startswith(DEFAULT))
            others = [place for place in others if not place.startswith(DEFAULT)]
            what = f"{what} ({'; '.join(others)})" if others else what
            problems.append(Problem(what, first, hint, "broken-rule"))
    batch = ("per_device_train_batch_size", "global_batch_size", "gradient_accumulation_steps")
    if isinstance(run, RunFile) and all(map(is_valid, ("train", "cluster", *(f"train.{key}" for key in batch)))):
        try:
            resolve_accumulation(run.train, run.readers, where, run.layout.context_parallel or 1)
        except UserError as error:
            problems += error.problems
    return problems


def resolve_accumulation(train: Train, readers: int, where: Where, split: int = 1) -> int:
    """Return micro-batches per optimizer step: as set, or computed from global_batch_size; an error if that isn't
    whole. With per_device_train_batch_size: auto, micro-batches of one sequence, which the plan may merge. `readers`:
    groups of `split` ranks that read rows of their own."""
    if train.global_batch_size is None:
        return train.micro_batches
    at_once = train.least_batch * readers
    steps, rest = divmod(train.global_batch_size, at_once)
    place = where("train.global_batch_size")
    product = f"{_describe_at_once(train, readers, split)} = {at_once}"
    if rest:
        below = f"{steps * at_once} or " if steps else ""
        hint = f"set it to {below}{(steps + 1) * at_once}, or change train.per_device_train_batch_size"
        what = f"{train.global_batch_size} {train.unit}s can't be divided by {product}"
        raise UserError(what, place, hint, "broken-rule")
    if train.gradient_accumulation_steps not in ("auto", steps):
        what = f"{train.global_batch_size} {train.unit}s are {steps} micro-batches of {product}, but"
        what += f" {train.gradient_accumulation_steps} are configured ({where('train.gradient_accumulation_steps')})"
        hint = f"remove one of them, or set train.gradient_accumulation_steps to {steps}"
        raise UserError(what, place, hint, "broken-rule")
    return steps


def _describe_at_once(train: Train, readers: int, split: int) -> str:
    """Return the rows of a micro-batch on all GPUs as a product."""
    if split == 1:
        return f"{train.least_batch} per GPU x {readers} GPUs"
    return f"{train.least_batch} per {split} GPUs that split rows x {readers}"


def _unknown(key: str, noun: str, name: str, known: list[str]) -> Clash:
    return key, f"there is no {noun} {name!r}", f"choose {', '.join(names.find_close_names(name, known) or known)}"


def _check_training(run: RunFile) -> Iterator[Clash]:
    train = run.train
    if train.bf16 and train.fp16:
        hint = "remove train.fp16: bf16 has float32's range; windlass doesn't train in float16, which overflows"
        yield "train.fp16 train.bf16", "bf16 and fp16 are both on", hint
    if train.optim in names.OPTIMIZERS_REFUSED:
        yield "train.optim", f"{train.optim} {names.OPTIMIZERS_REFUSED[train.optim]}", "use adamw_torch"
    elif train.optim not in names.OPTIMIZERS:
        yield _unknown("train.optim", "optimizer", train.optim, list(names.OPTIMIZERS))
    elif names.OPTIMIZERS[train.optim] == "bitsandbytes" and run.ranks > 1:
        what = f"{train.optim} is from bitsandbytes, which doesn't support weights sharded over {run.ranks} ranks"
        yield "train.optim", what, "--override train.optim=adamw_torch: an adapter's optimizer is small anyway"
    schedule = train.lr_scheduler_type
    needs = names.SCHEDULES.get(schedule, ())
    if schedule not in names.SCHEDULES:
        yield _unknown("train.lr_scheduler_type", "schedule", schedule, list(names.SCHEDULES))
    elif needs and not set(needs) & set(train.lr_scheduler_kwargs or ()):
        hint = f"such as train.lr_scheduler_kwargs: {{{needs[0]}: …}}"
        yield "train.lr_scheduler_type train.lr_scheduler_kwargs", f"{schedule} needs {' or '.join(needs)}", hint
    elif schedule in names.EVALUATED_SCHEDULES and train.eval_strategy == "no":
        what = f"{schedule} needs the evaluation loss, but evaluation is off"
        yield "train.lr_scheduler_type train.eval_strategy", what, "set train.eval_strategy: steps, or use cosine"
    if train.warmup_steps and train.warmup_ratio:
        hint = "remove one; with an override: train.warmup_ratio=0 or train.warmup_steps=0"
        yield "train.warmup_steps train.warmup_ratio", "warm-up is set both as steps and as a share", hint
    if train.warmup_steps and 0 < train.max_steps <= train.warmup_steps:
        what = f"a warm-up of {train.warmup_steps} steps takes the whole run of {train.max_steps}"
        yield "train.warmup_steps train.max_steps", what, "use fewer warm-up steps"
    recompute = (train.gradient_checkpointing, run.layout.activation_checkpointing)
    if "auto" not in recompute and bool(recompute[0]) != recompute[1]:  # other true values say what is kept
        what = "activation checkpointing is switched on by one and off by the other"
        yield "layout.activation_checkpointing train.gradient_checkpointing", what, "keep one of them"
    for name in [train.report_to] if isinstance(train.report_to, str) else train.report_to:
        if name not in names.TRACKERS:
            yield _unknown("train.report_to", "tracker", name, sorted(names.TRACKERS))
    seconds = run.watch.stall_seconds
    timeout = train.ddp_timeout
    if seconds is not None and seconds > timeout / 2 and run.watch.stall != "off":
        what = f"{seconds} s is too long to find a stall: collectives time out after {timeout} s"
        yield "watch.stall_seconds train.ddp_timeout", what, f"set it to {timeout // 2} or less"


def _check_objective(run: RunFile, where: Where) -> Iterator[Clash]:
    objective = run.train.objective
    for name, section in (("dpo", run.dpo), ("orpo", run.orpo)):
        unused = [f"{name}.{key}" for key in type(section).model_fields if is_written(where, f"{name}.{key}")]
        if unused and objective != name:
            hint = f"set train.objective: {name}, or remove it"
            yield f"{unused[0]} train.objective", f"no effect: train.objective is {objective}", hint
    if run.dpo.loss == "ipo":
        for key in {"label_smoothing", "length_normalized"}.intersection(run.dpo.changed):
            what = "loss: ipo is always per token" if key == "length_normalized" else "loss: ipo has none"
            yield f"dpo.{key} dpo.loss", f"no effect: {what}", "remove it, or set dpo.loss: sigmoid"
    if run.data.packing is True and not run.objective.may_pack:
        what = "pairs aren't packed: both sequences of a pair stay in one row, and no other pair's"
        yield "data.packing train.objective", what, "remove it, or set data.packing: false"
    if run.objective.of_pairs and run.data.streaming:
        what = "pairs can't be streamed: the reference's log-probabilities are computed of all rows before step 1"
        yield "data.streaming train.objective", what, "remove it, and name a slice if the set is too large"
    if not run.objective.of_pairs and run.data.truncation != "refuse":
        what = "no effect: only pairs (train.objective: dpo, orpo) are refused or cut by it"
        yield "data.truncation train.objective", what, "remove it: other rows are cut at their end"
    if run.objective.of_pairs and run.train.neftune_noise_alpha:
        what = f"noise would shift every answer's log-probability, which {objective} compares"
        yield "train.neftune_noise_alpha train.objective", what, "remove it"


def _check_evaluation(run: RunFile) -> Iterator[Clash]:
    train = run.train
    data = run.data
    if train.sample is not None:
        if sum(way is not None for way in (train.sample.prompts, train.sample.file, train.sample.from_eval)) != 1:
            yield "train.sample", "needs one of prompts, file and from_eval", "write train.sample: {from_eval: 4}"
        if train.eval_strategy == "no":
            what = "prompts are continued at evaluations, and train.eval_strategy is no"
            yield "train.sample train.eval_strategy", what, "set train.eval_strategy: steps, or leave train.sample out"
    if train.eval_strategy != "no" and data.validation_split is None and data.val_fraction is None and not data.eval:
        hint = "set data.val_split, or data.val_fraction: 0.05, or train.eval_strategy: no"
        yield "train.eval_strategy data.val_split", "evaluation is on, but there is nothing to evaluate on", hint
    if data.keep and train.eval_strategy == "no":
        what = "kept sets are measured at evaluations, and train.eval_strategy is no"
        yield "data.keep train.eval_strategy", what, "set train.eval_strategy: steps, or leave data.keep out"
    if data.val_split not in (None, "auto") and data.val_fraction is not None:
        what = "both a validation split and a held-out share are set"
        yield "data.val_fraction data.val_split", what, "keep one, and set the other to null"
    if data.streaming and train.max_steps < 1:
        what = "a streamed set has no length, so epochs can't be counted"
        yield "train.max_steps data.streaming", what, "set train.max_steps"
    if data.streaming and data.val_fraction is not None:
        what = "rows can only be held out of a set that is read in full, not of a stream"
        hint = "give a validation split, or a slice: val_split: train[:1%] and train_split: train[1%:]"
        yield "data.val_fraction data.streaming", what, hint
    yield from _check_mix(data)
    best = "train.load_best_model_at_end"
    strategies = (train.evaluation, train.save_strategy)
    if train.load_best_model_at_end and ("no" in strategies or len(set(strategies)) > 1):
        what = "the best checkpoint is wanted, but evaluation is {} and saving is {}"
        words = ["off" if strategy == "no" else f"by {strategy}" for strategy in strategies]
        hint = "set train.eval_strategy and train.save_strategy to the same: steps or epoch"
        yield f"{best} train.eval_strategy train.save_strategy", what.format(*words), hint
    elif train.load_best_model_at_end and train.save_strategy == "steps" and train.save_steps % train.eval_steps:
        near = max(train.eval_steps, round(train.save_steps / train.eval_steps) * train.eval_steps)
        what = f"the best checkpoint is wanted, but {train.save_steps} is not a multiple of {train.eval_steps}"
        hint = f"every checkpoint must be evaluated: set train.save_steps to {near}"
        yield f"train.save_steps train.eval_steps {best}", what, hint


def _check_mix(data: Data) -> Iterator[Clash]:
    parts = [(f"data.mix[{i}]", part) for i, part in enumerate(data.mix)]
    taken = dict.fromkeys(data.eval, "data.eval")
    for name in data.keep:
        of_run = () if parts else ("train", "validation")
        if name in taken or name in of_run:
            yield f"data.keep.{name}", f"has the name {name!r}, as another set has", "choose another name"
        taken[name] = "data.keep"
    if parts and "dataset_name_or_path" in data.model_fields_set:
        hint = "remove it, or make it one of the mix"
        yield "data.dataset_name_or_path data.mix", "is not trained on when there is a mix", hint
    if not parts and "validation" in data.eval and (data.validation_split or data.val_fraction):
        yield "data.eval.validation", "is what the rows of data.val_split are called", "choose another name"
    for place, part in parts:
        if other := taken.get(part.title):
            yield place, f"has the name {part.title!r}, as {other} has", "give it another `name`"
        taken[part.title] = place
        ways = [way for way in ("weight", "rows", "epochs") if getattr(part, way) is not None]
        if len(ways) > 1:
            yield f"{place}.{ways[1]}", f"has both {ways[0]} and {ways[1]}", "keep one"
        elif data.streaming and ways and ways != ["weight"]:
            yield f"{place}.{ways[0]}", "a streamed set has no length to count by", "give every set a weight"
    if 0 < sum(part.weight is not None for _, part in parts) < len(parts):
        place = next(place for place, part in parts if part.weight is None)
        yield place, "has no weight, and others have one", "give every set a weight, or none"


def _check_model(run: RunFile) -> Iterator[Clash]:
    model = run.model
    data = run.data
    for given, missing in (("prompt", "completion"), ("completion", "prompt")):
        if getattr(data, f"{given}_field") is not None and getattr(data, f"{missing}_field") is None:
            hint = f"name the column that holds the {missing}"
            yield f"data.{given}_field", f"needs data.{missing}_field too", hint
    formats = ("prompt_template", "prompt_field", "messages_field")
    if len(given_formats := [f"data.{key}" for key in formats if getattr(data, key) is not None]) > 1:
        what = f"{' and '.join(given_formats)} are different formats"
        yield " ".join(given_formats), what, "keep the one that fits the data"
    attention = model.attn_implementation
    if attention is not None and attention not in names.ATTENTION and "/" not in attention:
        yield _unknown("model.attn_implementation", "attention implementation", attention, list(names.ATTENTION))
    if model.device_map not in ("auto", None) and run.ranks > 1:
        what = f"places the model by hand, but {run.ranks} ranks each load their own part"
        yield "model.device_map", what, "remove it: `layout` decides how the model is sharded"
    if run.lora.starts_from_weights:
        what = f"init_lora_weights: {run.lora.init_lora_weights} subtracts a part of the base's weights, which"
        if run.lora.lora_dropout:
            yield "lora.lora_dropout", f"{what} dropout would drop as well", "set lora.lora_dropout: 0"
        if run.lora.use_dora:
            yield "lora.use_dora", f"{what} DoRA would rescale", "set lora.use_dora: false"
    if run.lora.use_dora and run.lora.dtype == "bfloat16":
        what = "DoRA's magnitudes are norms of weights, of which bfloat16 rounds updates away: they would not train"
        yield "lora.dtype lora.use_dora", what, "set lora.dtype: float32"
    if run.lora.use_dora and run.lora.experts is not None:
        hint = "set lora.use_dora: false, or remove lora.experts"
        yield "lora.use_dora lora.experts", "DoRA doesn't work on routed experts", hint


def _check_machines(run: Run) -> Iterator[Clash]:
    cluster = run.cluster
    ranks = run.layout.ranks
    nodes, gpus_per_node = cluster.size
    gpus = nodes * gpus_per_node
    is_set = cluster.nodes != "auto" or cluster.gpus_per_node != "auto"
    if ranks is not None and is_set and ranks != gpus:
        what = f"{ranks} ranks, but the cluster has {nodes} x {gpus_per_node} = {gpus} GPUs"
        yield "layout.ranks cluster.nodes cluster.gpus_per_node", what, "remove layout.ranks: the cluster determines it"
    for index, volume in enumerate(cluster.volumes):
        key = f"cluster.volumes[{index}]"
        sources = volume.sources
        if len(sources) != 1:
            what = f"{' and '.join(sources) or 'nothing'} to mount at {volume.path}"
            yield key, what, "set one of claim, secret, config_map, empty_dir and host"
        elif volume.medium and "empty_dir" not in sources:
            yield key, "only an empty_dir has a medium", "remove medium"
        if any(volume.path.rstrip("/") == other.path.rstrip("/") for other in cluster.volumes[:index]):
            yield key, f"two volumes at {volume.path}", "mount one of them elsewhere"
    yield from _check_pods("cluster.runai", cluster.runai)
    yield from _check_pods("cluster.kubernetes", cluster.kubernetes)
    yield from _check_kubernetes(cluster.kubernetes, run.watch)
    for name, value in cluster.env.items():
        if is_set_by_launcher(name):
            yield f"cluster.env.{name}", "is set by the launcher", "remove it"
        elif isinstance(value, str) and value and name.upper().endswith(_SECRET):
            hint = f"keep it in a secret: {name}: {{secret: NAME, key: KEY}}"
            yield f"cluster.env.{name}", "looks like a secret, but a run file is copied into the run folder", hint


def _check_folder(folder: str, key: str, volumes: Iterable[Volume]) -> Iterator[Clash]:
    """Yield a clash if the run folder's volume can't be written, or is gone with its pod."""
    around = [volume for volume in volumes if PurePosixPath(folder).is_relative_to(volume.path)]
    innermost = max(around, key=lambda volume: len(volume.path.rstrip("/")), default=None)
    if innermost is None or len(innermost.sources) != 1:
        return
    if innermost.empty_dir:
        what = f"{folder} is in an empty_dir, which is gone with its pod: all that the run writes would be lost"
        yield key, what, "name a folder of a claim"
    elif innermost.read_only or innermost.secret or innermost.config_map:
        yield key, f"{folder} is on a volume that can't be written", "name a folder of a claim"


def _check_pods(name: str, pods: Pods) -> Iterator[Clash]:
    """Yield clashes in a section whose pods have labels, annotations and a topology."""
    if "topology" in pods.model_fields_set and not pods.topology_key:
        hint = f"set {name}.topology_key, such as topology.kubernetes.io/zone"
        yield f"{name}.topology {name}.topology_key", "there is no label for the nodes to share", hint
    for label in sorted({RUN_LABEL, MANAGED_BY} & set(pods.labels)):
        yield f"{name}.labels.{label}", "windlass finds the run's objects by it", "remove it"
    annotation = "k8s.v1.cni.cncf.io/networks"
    if annotation in pods.annotations:
        yield f"{name}.annotations.{annotation}", f"{name}.networks sets it", f"set {name}.networks instead"


def _check_kubernetes(section: Kubernetes, watch: Watch) -> Iterator[Clash]:
    name = "cluster.kubernetes"
    for key, label in (("queue", "kueue.x-k8s.io/queue-name"), ("queue_priority", "kueue.x-k8s.io/priority-class")):
        if label in section.labels:
            yield f"{name}.labels.{label}", f"{name}.{key} sets it", f"set {name}.{key} instead"
    if section.queue_priority and not section.queue:
        keys = f"{name}.queue_priority {name}.queue"
        yield keys, "there is no queue to have a place in", f"set {name}.queue"
    if section.pod_monitor and watch.prometheus_port is None:
        yield f"{name}.pod_monitor watch.prometheus_port", "nothing to scrape", "set watch.prometheus_port: 9400"
    elif section.pod_monitor and watch.prometheus_address == "127.0.0.1":
        hint = "set watch.prometheus_address: 0.0.0.0"
        yield f"{name}.pod_monitor watch.prometheus_address", "only the pod itself could scrape it", hint


def _check_script(run: ScriptRun) -> Iterator[Clash]:
    if bool(run.script.path) == bool(run.script.module):
        what = "both a file and a module are set" if run.script.path else "no script is set"
        yield "script.path script.module kind", what, "write script.path: train.py, or script.module: package.train"
    for name in Watch.model_fields:
        if getattr(run.watch, name) == "checkpoint":
            hint = "use warn or stop; on stop the script gets SIGTERM, and may save then"
            yield f"watch.{name}", "only the script itself can save a checkpoint", hint
    if run.watch.non_finite == "skip":
        yield "watch.non_finite", "only the script itself can skip a step", "use stop"


def list_remarks(run: RunFile | ScriptRun, where: Where) -> list[str]:
    """Return settings that have no effect, or another effect than expected."""
    notes = [f"{where(f'cluster.env.{name}')}: {problem}" for name, problem in find_unread(run.cluster.env).items()]
    if isinstance(run, ScriptRun):
        of_tokens = ("min_supervised_fraction", "dead_experts", "dead_adapter", "falling_likelihood")
        ignored = [f"watch.{key}" for key in of_tokens]
        return [*notes, *(f"{where(key)}: no effect on a script" for key in ignored if is_written(where, key))]
    train = run.train
    constant = train.lr_scheduler_type == "constant" and bool(train.warmup_ratio or train.warmup_steps)
    twice = run.layout.activation_checkpointing is True and train.gradient_checkpointing in (True, "selective")
    unused = "no effect unless train.{0}_strategy is `steps`"
    table = {
        "model.device_map": (True, f"{run.model.device_map or 'null'}: windlass places the model itself"),
        "model.use_cache": (run.model.use_cache, "training doesn't use it: it stays off"),
        "train.ddp_find_unused_parameters": (
            train.ddp_find_unused_parameters,
            "no effect: windlass doesn't use DistributedDataParallel",
        ),
        "train.max_steps": (
            train.max_steps > 0 and is_written(where, "train.num_train_epochs"),
            "overrides train.num_train_epochs",
        ),
        "train.eval_steps": (train.evaluation != "steps", unused.format("eval")),
        "train.eval_on_start": (train.evaluation == "no", "no effect while train.eval_strategy is `no`"),
        "train.save_steps": (train.save_strategy != "steps", unused.format("save")),
        "train.lr_scheduler_type": (constant, "constant has no warm-up; constant_with_warmup has one"),
        "watch.falling_likelihood": (not run.objective.has_reference, "no effect unless train.objective is dpo"),
        "watch.keep_tolerance": (not run.data.keep, "no effect without data.keep"),
        "layout.activation_checkpointing": (twice, "same as train.gradient_checkpointing, which is set too"),
    }
    notes += [f"{where(key)}: {text}" for key, (applies, text) in table.items() if applies and is_written(where, key)]
    fixed = not train.plan_cuts_batches  # otherwise the plan prints it
    if fixed and train.global_batch_size and train.gradient_accumulation_steps == "auto":
        split = run.layout.context_parallel or 1
        steps = resolve_accumulation(train, run.readers, where, split)
        product = f"{_describe_at_once(train, run.readers, split)} x {steps} micro-batch{'es' if steps > 1 else ''}"
        notes.append(f"{where('train.global_batch_size')}: {train.global_batch_size} = {product}")
    return notes
