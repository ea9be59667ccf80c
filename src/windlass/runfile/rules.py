"""What can't be together in a run file, as small rules; and what is worth a remark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal

from windlass.errors import Problem, UserError
from windlass.runfile import script
from windlass.runfile.fields import RunFile
from windlass.runfile.names import ATTENTION, OPTIMIZERS, OPTIMIZERS_REFUSED, SCHEDULES, TRACKERS, close_names
from windlass.runfile.script import ScriptRun
from windlass.runfile.training import Train
from windlass.variables import started

Where = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Clash:
    """Keys that can't stay as they are; the first is the one to open."""

    keys: tuple[str, ...]
    problem: str
    hint: str


def contradictions(
    run: RunFile | ScriptRun, where: Where, *, ranks: int | None = None, sound: Callable[[str], bool] = lambda _: True
) -> list[Problem]:
    """All contradictions of a run, for so many ranks (default: the run file's own)."""
    ranks = ranks or run.ranks
    if isinstance(run, ScriptRun):
        found = [*(Clash(*said) for said in script.contradictions(run)), *_machines(run), *_cluster(run, ranks)]
        return [_problem(clash, where) for clash in found if all(map(sound, clash.keys))]
    found = [clash for rule in _RULES for clash in rule(run, ranks)]
    problems = [_problem(clash, where) for clash in found if all(map(sound, clash.keys))]
    if run.train.global_batch_size and sound("train") and sound("cluster") and not wrong_batch(sound):
        try:
            accumulation(run.train, ranks, where)
        except UserError as error:
            problems += error.problems
    return problems


def wrong_batch(sound: Callable[[str], bool]) -> bool:
    keys = ("per_device_train_batch_size", "global_batch_size", "gradient_accumulation_steps")
    return not all(sound(f"train.{key}") for key in keys)


def _problem(clash: Clash, where: Where) -> Problem:
    """The first key that somebody wrote is the place; the others are named in the sentence."""
    said = sorted(clash.keys, key=lambda key: where(key).startswith("default: "))
    others = [where(key) for key in said[1:] if not where(key).startswith("default: ")]
    problem = f"{clash.problem} ({'; '.join(others)})" if others else clash.problem
    return Problem(problem, where(said[0]), clash.hint)


def accumulation(train: Train, ranks: int, where: Where) -> int:
    """Passes per optimizer step: as said, or what global_batch_size leaves; an error where that isn't whole.

    With per_device_train_batch_size: auto, of one sequence each: what the plan may put together.
    """
    said = not where("train.gradient_accumulation_steps").startswith("default: ")
    if train.global_batch_size is None:
        return train.gradient_accumulation_steps
    at_once = train.least_batch * ranks
    steps, rest = divmod(train.global_batch_size, at_once)
    place = where("train.global_batch_size")
    product = f"{train.least_batch} per GPU x {ranks} GPUs = {at_once}"
    if rest:
        below = f"{steps * at_once} or " if steps else ""
        hint = f"take {below}{(steps + 1) * at_once}, or change train.per_device_train_batch_size"
        raise UserError(f"{train.global_batch_size} sequences don't divide by {product}", place, hint)
    if said and steps != train.gradient_accumulation_steps:
        what = f"{train.global_batch_size} sequences are {steps} passes of {product}, but"
        what += f" {train.gradient_accumulation_steps} are asked for ({where('train.gradient_accumulation_steps')})"
        hint = f"take one of them out, or set train.gradient_accumulation_steps to {steps}"
        raise UserError(what, place, hint)
    return steps


def _precision(run: RunFile, _ranks: int) -> Iterator[Clash]:
    if run.train.bf16 and run.train.fp16:
        hint = "set train.fp16: false"
        yield Clash(("train.fp16", "train.bf16"), "bf16 and fp16 are both on", hint)


def _evaluation(run: RunFile, _ranks: int) -> Iterator[Clash]:
    train, data = run.train, run.data
    if train.eval_strategy != "no" and data.val_split is None and data.val_fraction is None:
        hint = "name data.val_split, hold out data.val_fraction: 0.05, or set train.eval_strategy: no"
        yield Clash(("train.eval_strategy", "data.val_split"), "evaluation is on, but nothing to evaluate on", hint)
    if data.val_split is not None and data.val_fraction is not None:
        what = "a validation split is named and a share is to be held out too"
        yield Clash(("data.val_fraction", "data.val_split"), what, "keep one; the other null")
    if not train.load_best_model_at_end:
        return
    best = "train.load_best_model_at_end"
    if train.eval_strategy == "no":
        yield Clash((best, "train.eval_strategy"), "the best is wanted, but nothing is evaluated", "evaluate by steps")
    elif train.save_strategy == "no":
        yield Clash((best, "train.save_strategy"), "the best is wanted, but nothing is saved", "save by steps")
    elif train.save_strategy != train.eval_strategy:
        what = f"the best is wanted, but evaluation goes by {train.eval_strategy} and saving by {train.save_strategy}"
        yield Clash((best, "train.eval_strategy", "train.save_strategy"), what, "let both go by the same")
    elif train.save_strategy == "steps" and train.save_steps % train.eval_steps:
        what = f"the best is wanted, but {train.save_steps} is no multiple of {train.eval_steps}"
        near = max(train.eval_steps, round(train.save_steps / train.eval_steps) * train.eval_steps)
        hint = f"a checkpoint can be judged only where it was evaluated: set train.save_steps to {near}"
        yield Clash(("train.save_steps", "train.eval_steps", best), what, hint)


def _optimizer(run: RunFile, ranks: int) -> Iterator[Clash]:
    name = run.train.optim
    if name in OPTIMIZERS_REFUSED:
        yield Clash(("train.optim",), f"{name} {OPTIMIZERS_REFUSED[name]}", "take adamw_torch")
    elif name not in OPTIMIZERS:
        near = close_names(name, OPTIMIZERS) or ["adamw_torch", "adamw_torch_fused"]
        yield Clash(("train.optim",), f"there is no optimizer {name!r}", f"nearest: {', '.join(near)}")
    elif OPTIMIZERS[name] == "bitsandbytes" and ranks > 1:
        what = f"{name} is of bitsandbytes, which does not go with weights sharded over {ranks} ranks"
        yield Clash(("train.optim",), what, "take adamw_torch: an adapter's optimizer is small anyway")


def _schedule(run: RunFile, _ranks: int) -> Iterator[Clash]:
    train, name = run.train, run.train.lr_scheduler_type
    if name not in SCHEDULES:
        near = close_names(name, SCHEDULES) or ["cosine", "linear", "constant_with_warmup"]
        yield Clash(("train.lr_scheduler_type",), f"there is no schedule {name!r}", f"nearest: {', '.join(near)}")
        return
    needs = SCHEDULES[name]
    if needs and not set(needs) & set(train.lr_scheduler_kwargs or ()):
        hint = f"such as train.lr_scheduler_kwargs: {{{needs[0]}: …}}"
        yield Clash(("train.lr_scheduler_type", "train.lr_scheduler_kwargs"), f"needs {' or '.join(needs)}", hint)
    if name == "reduce_lr_on_plateau" and train.eval_strategy == "no":
        what = "follows the evaluation loss, but nothing is evaluated"
        yield Clash(("train.lr_scheduler_type", "train.eval_strategy"), what, "evaluate by steps, or take cosine")
    if train.warmup_steps and train.warmup_ratio:
        hint = "keep one; with an override: train.warmup_ratio=0 or train.warmup_steps=0"
        yield Clash(("train.warmup_steps", "train.warmup_ratio"), "warm-up is given as steps and as a share", hint)
    if train.warmup_steps and 0 < train.max_steps <= train.warmup_steps:
        what = f"the warm-up of {train.warmup_steps} steps would fill the whole run of {train.max_steps}"
        yield Clash(("train.warmup_steps", "train.max_steps"), what, "warm up for less")


def _stall(run: RunFile, _ranks: int) -> Iterator[Clash]:
    seconds, timeout = run.watch.stall_seconds, run.train.ddp_timeout
    if seconds is not None and seconds > timeout / 2 and run.watch.stall != "off":
        what = f"{seconds} s leave no time to look at a stall: collectives give up after {timeout} s"
        yield Clash(("watch.stall_seconds", "train.ddp_timeout"), what, f"set it to {timeout // 2} or less")


def _names(run: RunFile, _ranks: int) -> Iterator[Clash]:
    attention = run.model.attn_implementation
    if attention is not None and attention not in ATTENTION and "/" not in attention:
        near = close_names(attention, ATTENTION) or list(ATTENTION)
        what = f"there is no attention implementation {attention!r}"
        yield Clash(("model.attn_implementation",), what, f"nearest: {', '.join(near)}")
    trackers = [run.train.report_to] if isinstance(run.train.report_to, str) else run.train.report_to
    for name in trackers:
        if name not in TRACKERS:
            near = close_names(name, TRACKERS) or sorted(TRACKERS)
            yield Clash(("train.report_to",), f"there is no tracker {name!r}", f"nearest: {', '.join(near)}")
    if "none" in trackers and len(trackers) > 1:
        yield Clash(("train.report_to",), "names trackers and none", "take `none` out")


def _placement(run: RunFile, ranks: int) -> Iterator[Clash]:
    if run.model.device_map not in ("auto", None) and ranks > 1:
        what = f"places the model by hand, but {ranks} ranks each load their own part"
        yield Clash(("model.device_map",), what, "set it to auto, or take it out; `layout` says how it is sharded")
    if run.model.use_cache and (run.train.gradient_checkpointing or run.layout.activation_checkpointing):
        keys = ("model.use_cache", "train.gradient_checkpointing", "layout.activation_checkpointing")
        yield Clash(keys, "can't keep keys and values that are computed again in backward", "set it to false")
    if run.model.use_cache and run.data.packing:
        what = "with it, packed documents would see each other"
        yield Clash(("model.use_cache", "data.packing"), what, "set it to false: training has no use for it")


def _adapter(run: RunFile, _ranks: int) -> Iterator[Clash]:
    if run.lora.use_dora and run.lora.experts is not None:
        what = "DoRA has no form for routed experts"
        yield Clash(("lora.use_dora", "lora.experts"), what, "set lora.use_dora: false, or leave the experts out")


def _shapes(run: RunFile, _ranks: int) -> Iterator[Clash]:
    data = run.data
    if (data.prompt_field is None) != (data.completion_field is None):
        given, missing = ("prompt", "completion") if data.prompt_field else ("completion", "prompt")
        keys = (f"data.{given}_field",)
        yield Clash(keys, f"needs data.{missing}_field beside it", f"name the column that holds the {missing}")
    shapes = {
        "data.prompt_template": data.prompt_template,
        "data.prompt_field": data.prompt_field,
        "data.messages_field": data.messages_field,
    }
    named = tuple(key for key, value in shapes.items() if value is not None)
    if len(named) > 1:
        yield Clash(named, f"{' and '.join(named)} each say what a row is", "keep the one that fits the data")


def _machines(run: RunFile | ScriptRun) -> Iterator[Clash]:
    layout, cluster = run.layout, run.cluster
    there = cluster.nodes * cluster.gpus_per_node
    if layout.ranks is not None and {"nodes", "gpus_per_node"} & cluster.model_fields_set and layout.ranks != there:
        what = f"{layout.ranks} ranks, but the cluster has {cluster.nodes} x {cluster.gpus_per_node} = {there} GPUs"
        keys = ("layout.ranks", "cluster.nodes", "cluster.gpus_per_node")
        yield Clash(keys, what, "take layout.ranks out: it follows from the cluster")


def _spread(run: RunFile, ranks: int) -> Iterator[Clash]:
    layout = run.layout
    yield from _machines(run)
    shard, replicate = layout.shard, layout.replicate
    product = (shard or 1) * (replicate or 1)
    if ranks % product or (shard and replicate and product != ranks):
        what = f"{shard or 1} x {replicate or 1} = {product} does not make {ranks} ranks"
        named = tuple(f"layout.{key}" for key, value in (("shard", shard), ("replicate", replicate)) if value)
        yield Clash(named, what, f"shard x replicate must be {ranks}")
    split = layout.expert_parallel or 1
    if (shard or ranks) % split:
        what = f"{split} does not divide the {shard or ranks} ranks that weights are split over"
        yield Clash(("layout.expert_parallel", "layout.shard"), what, "choose a divisor")


_UNITS = {"m": Decimal("0.001"), "k": Decimal(1000)}
_UNITS |= {unit: Decimal(1000) ** power for power, unit in enumerate("MGTPE", 2)}
_UNITS |= {f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", 1)}


def _bytes(quantity: str) -> Decimal:
    number = quantity.rstrip("mkKMGTPEi")
    return Decimal(number) * _UNITS[quantity[len(number) :]]


def _cluster(run: RunFile | ScriptRun, _ranks: int) -> Iterator[Clash]:
    cluster = run.cluster
    if (
        cluster.memory_request
        and cluster.memory_limit
        and _bytes(cluster.memory_request) > _bytes(cluster.memory_limit)
    ):
        what = f"asks for {cluster.memory_request} but may take only {cluster.memory_limit}"
        yield Clash(("cluster.memory_request", "cluster.memory_limit"), what, "raise the limit")
    paths = [volume.path.rstrip("/") for volume in cluster.volumes]
    for index, path in enumerate(paths):
        if path in paths[:index]:
            yield Clash((f"cluster.volumes[{index}].path",), f"{path or '/'} is mounted twice", "mount it once")
    for name, value in cluster.env.items():
        key = f"cluster.env.{name}"
        if started(name):
            yield Clash((key,), "is set by what starts the ranks", "take it out")
        elif isinstance(value, str) and value and name.upper().endswith(_SECRET):
            hint = f"keep it in a secret: {name}: {{secret: NAME, key: KEY}}"
            yield Clash((key,), "looks like a secret, and a run file is copied into the run folder", hint)


_SECRET = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "API_KEY", "ACCESS_KEY", "PRIVATE_KEY")

_RULES: tuple[Callable[[RunFile, int], Iterator[Clash]], ...] = (
    *(_precision, _evaluation, _optimizer, _schedule, _stall, _names),
    *(_placement, _adapter, _shapes, _spread, _cluster),
)


def remarks(run: RunFile | ScriptRun, where: Where) -> list[str]:
    """What was said and does something else than one may think, or nothing."""
    if isinstance(run, ScriptRun):
        return script.remarks(where)

    def said(key: str) -> bool:
        return not where(key).startswith("default: ")

    train = run.train
    table = {
        "model.device_map": (
            f"{run.model.device_map or 'null'}: windlass places the model itself",
            said("model.device_map"),
        ),
        "train.ddp_find_unused_parameters": (
            "no effect: no DistributedDataParallel is wrapped around the model",
            said("train.ddp_find_unused_parameters") and train.ddp_find_unused_parameters,
        ),
        "train.max_steps": (
            f"the run ends after {train.max_steps} steps; num_train_epochs has no say",
            train.max_steps > 0 and said("train.num_train_epochs"),
        ),
        "train.eval_steps": ("no effect while train.eval_strategy is not `steps`", train.eval_strategy != "steps"),
        "train.save_steps": ("no effect while train.save_strategy is not `steps`", train.save_strategy != "steps"),
        "train.lr_scheduler_type": (
            "constant knows no warm-up: it is left out; constant_with_warmup has one",
            train.lr_scheduler_type == "constant" and bool(train.warmup_ratio or train.warmup_steps),
        ),
        "layout.activation_checkpointing": (
            "train.gradient_checkpointing asks for the same; it is done once",
            run.layout.activation_checkpointing and train.gradient_checkpointing,
        ),
        "model.use_cache": ("training has no use for it: it is left off", run.model.use_cache),
    }
    found = [f"{where(key)}: {text}" for key, (text, applies) in table.items() if applies and said(key)]
    cut = train.per_device_train_batch_size != "auto"  # else the plan says how
    if cut and train.global_batch_size and not said("train.gradient_accumulation_steps"):
        steps = accumulation(train, run.ranks, where)
        product = f"{train.least_batch} per GPU x {run.ranks} GPUs"
        found.append(f"{where('train.global_batch_size')}: {train.global_batch_size} = {product} x {steps} passes")
    return found
