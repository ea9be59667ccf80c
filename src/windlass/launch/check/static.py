"""What the run file, the checkpoint's headers and the folders say, before any machine or network is looked at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass import plan as planning
from windlass.data import sources
from windlass.errors import UserError
from windlass.hardware import GIB
from windlass.launch.check.result import Result, failed, passed, refused, unseen, warned

if TYPE_CHECKING:
    from windlass.plan import Plan
    from windlass.plan.layout import AccelerateFile
    from windlass.runfile import Loaded

IN_POD = "`windlass check RUN --in-pod` looks, where the run starts"


def planned(loaded: Loaded, accelerate: Callable[[], AccelerateFile | None]) -> tuple[Plan | None, list[Result]]:
    """The plan, whose making is the check of targets, layout, classes and batch; each refusal is a failed check."""
    try:
        plan = planning.make(loaded, accelerate())
    except UserError as error:
        return None, refused("plan", error.problems)
    targets = sum(len(target.modules) for target in plan.adapter.targets)
    sequences = plan.schedule.global_sequences
    return plan, [
        passed("model", f"{plan.base.name}: {plan.base.family.causal_lm}, {plan.total:,} parameters"),
        passed("adapter", f"{targets:,} modules, {plan.adapter.trainable:,} trainable parameters"),
        passed("layout", f"{plan.layout.name} over {plan.layout.ranks} ranks, by {plan.base.family.layer}"),
        passed("batch", f"{sequences} sequences a step"),
        memory(plan),
    ]


def memory(plan: Plan) -> Result:
    """Whether it fits by the plan's arithmetic: on each GPU, and into the host's memory where that is stated."""
    cost, gpu = plan.cost, plan.machine.gpu
    said = f"{cost.gpu_gib:.1f} of {gpu.memory_gib:.1f} GiB on each {gpu.name}, {cost.host_gib:.1f} GiB of host memory"
    if cost.fits:
        return passed("memory", said)
    return failed("memory", f"does not fit: {said}", cost.remedy, plan.loaded.where("cluster.gpu"))


def weights(plan: Plan, *, elsewhere: bool) -> Result:
    """That the weights are here: a plan can be made from a published config, a run cannot."""
    name, place = plan.loaded.run.model.model_name_or_path, plan.loaded.where("model.model_name_or_path")
    if plan.disk_bytes is not None:
        return passed("weights", f"{size(plan.disk_bytes)} in {plan.base.path}")
    if elsewhere:
        return unseen("weights", f"{name} is not on this machine", IN_POD)
    hint = "mount the volume, name the model's folder, or bring it with `windlass fetch`"
    return failed("weights", f"{name} holds no weights", hint, place)


def data(loaded: Loaded, tokenizer: Any, *, elsewhere: bool) -> Result:
    """That the training rows can be read and have the columns that the run asks for: the first rows are."""
    run = loaded.run
    name = run.data.dataset_name_or_path
    if elsewhere and not Path(name).expanduser().exists():
        return unseen("data", f"{name} is not on this machine", IN_POD)
    try:
        from windlass.data.formats import choose_format
        from windlass.data.prepare import check_selection, select_rows
    except ImportError as error:
        return unseen("data", f"{error.name} is not installed")
    try:
        if sources.resolve(run.data, loaded.where).format == "hub":
            return unseen("data", f"{name} is fetched from the hub", "bring it ahead with `windlass fetch RUN`")
        chosen = select_rows(run.data, loaded.where, lambda _: None)
        talk = bool(run.data.messages_field) or {"messages", "conversations"} & set(chosen.columns)
        if tokenizer is None and talk:
            return unseen(
                "data", f"{', '.join(chosen.columns)}: chats are rendered by the tokenizer, which is not here"
            )
        shape = choose_format(run.data, chosen.columns, tokenizer, loaded.where)
    except UserError as error:
        return refused("data", error.problems)[0]
    except ImportError as error:
        return unseen("data", f"{error.name} is not installed")
    if problems := check_selection(run, chosen, loaded.where):
        return refused("data", problems)[0]
    validation = f", validation {run.data.val_split}" if chosen.validation else ", no validation rows"
    said = f"{chosen.source.how}: {shape.description}; train {run.data.train_split}{validation}"
    if not (chosen.validation or chosen.fraction) and run.train.eval_strategy != "no":
        hint = "hold some out with data.val_fraction: 0.05, or set train.eval_strategy: no"
        return warned("data", f"{said}, so nothing is evaluated", hint, loaded.where("data.val_split"))
    return passed("data", said)


def tokenizer(plan: Plan) -> tuple[Any, Result]:
    """The tokenizer beside the weights, opened as training does, and its ids against the embedding's rows."""
    path = plan.base.path
    if path is None:
        return None, unseen("tokenizer", "there is no model folder on this machine")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        return None, unseen("tokenizer", f"transformers cannot be imported: {error}")
    try:
        found = AutoTokenizer.from_pretrained(path, trust_remote_code=plan.loaded.run.model.trust_remote_code)
    except Exception as error:  # the library raises whatever a damaged file makes it stumble on
        said = f"{path} holds no tokenizer that opens: {(str(error).splitlines() or [type(error).__name__])[0][:200]}"
        place = plan.loaded.where("model.model_name_or_path")
        return None, failed(
            "tokenizer", said, "copy tokenizer.json and tokenizer_config.json beside the weights", place
        )
    rows = plan.base.dims["vocab"]
    if len(found) > rows:
        hint = "these files are of another model: copy the tokenizer that was published with it"
        return found, failed("tokenizer", f"{len(found):,} tokens, and the embedding has {rows:,} rows", hint)
    return found, passed("tokenizer", f"{type(found).__name__}, {len(found):,} of {rows:,} ids")


def size(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"
