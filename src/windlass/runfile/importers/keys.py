"""Keys that several tools have and that depend on one another, and data sets as keys of windlass's `data`."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from windlass.runfile.importers.imported import ImportedRun, as_list
from windlass.runfile.names import TOOLS

# Ranks that a row is split over: Axolotl's key, its older one, ms-swift's.
SPLIT_ROWS: Final = ("context_parallel_size", "sequence_parallel_degree", "sequence_parallel_size")
# Inputs of recomputed layers in host memory: TRL's key and Axolotl's, ms-swift's; Axolotl's checkpointing, by value.
OFFLOADED_INPUTS: Final = ("activation_offloading", "activation_offload")
MEDIA: Final = ("images", "videos", "audios")
OFFLOADING: Final = ("offload", "offload_disk", "unsloth")
IN_FOUR_BITS: Final = {"load_in_4bit": True, "quantization_bit": 4, "quant_bits": 4}
# Their names of DPO's loss, and keys of `dpo` that make it.
LOSSES: Final[dict[str, dict[str, Any]]] = {
    "sigmoid": {},
    "robust": {},
    "sigmoid_norm": {"length_normalized": True},
    "ipo": {"loss": "ipo"},
}


def translate_common(imported: ImportedRun) -> None:
    for key in ("warmup_steps", "warmup_ratio"):
        value = imported.take(key)
        if value is not None:
            share = key == "warmup_ratio" or (isinstance(value, float) and value < 1)
            imported.set("train.warmup_ratio" if share else "train.warmup_steps", value, key)
    _translate_rhythm(imported, "eval")
    _translate_rhythm(imported, "save")
    _translate_four_bits(imported)
    compiled = imported.take("torch_compile")
    if compiled is not None:
        imported.set("train.compile", compiled in (True, "auto"), "torch_compile")
    for key in [key for key in ("bf16", "bfloat16") if key in imported.theirs] or ["bf16"]:
        imported.set("train.bf16", imported.take(key, True) in (True, "auto", "full"), key)
    if imported.take("fp16"):
        problem = "float16 overflows, and windlass stops at a step that isn't finite"
        imported.refuse("fp16", problem, "write bf16: true")
    resume = imported.take("auto_resume_from_checkpoints") or imported.take("resume_from_checkpoint")
    if isinstance(resume, str) and resume not in ("auto", "true", "True"):
        problem = f"names a checkpoint of the other tool, {resume}"
        imported.refuse("resume_from_checkpoint", problem, "set lora.adapter to it to go on from its adapter")
    elif resume:
        imported.set("train.resume", "auto", f"resume_from_checkpoint: {resume}")
    for key in SPLIT_ROWS:
        if (ranks := imported.take(key)) not in (None, 1):
            imported.set("layout.context_parallel", ranks, key)
    offloads = [key for key in OFFLOADED_INPUTS if imported.take(key)]
    if imported.theirs.get("gradient_checkpointing") in OFFLOADING:
        offloads.append("gradient_checkpointing")
    if offloads:
        imported.set("train.offload_activations", True, offloads[0])
    for key in ("metric_for_best_model", "greater_is_better"):
        if imported.take(key) not in (None, False, "loss", "eval_loss"):
            imported.refuse(key, "the best checkpoint is the one with the lowest evaluation loss", "remove it")
    trackers = [name for name in ("wandb", "mlflow", "tensorboard", "trackio") if imported.take(f"use_{name}")]
    if project := imported.take("wandb_project"):
        trackers.append("wandb")
        setting = f"export WANDB_PROJECT={shlex.quote(str(project))}"
        imported.no_effect["wandb_project"] = f"set it where the run starts: {setting}"
    if trackers:
        imported.set("train.report_to", list(dict.fromkeys(trackers)), "its trackers")


def _translate_rhythm(imported: ImportedRun, action: str) -> None:
    """Translate when to evaluate or save: at steps, epochs, or so many times an epoch."""
    strategy = imported.take(f"{action}_strategy")
    steps = imported.take(f"{action}_steps")
    if action == "eval":
        strategy = strategy or imported.take("evaluation_strategy")
    count = imported.take(f"{action}s_per_epoch")
    if (isinstance(steps, float) and steps < 1) or count not in (None, 0, 1):
        written = f"{action}_steps: {steps}" if count is None else f"{action}s_per_epoch: {count}"
        remark = f"{written}; for more, strategy steps and {action}_steps: N"
        imported.set(f"train.{action}_strategy", "epoch", remark)
        return
    if count is not None:
        strategy = "epoch" if count else "no"
    if strategy is not None or steps:
        imported.set(f"train.{action}_strategy", strategy or "steps", f"{action}_strategy")
    if steps:
        imported.set(f"train.{action}_steps", steps, f"{action}_steps")


def _translate_four_bits(imported: ImportedRun) -> None:
    """Translate each tool's way to request QLoRA: bitsandbytes' NF4. Other methods and 8 bits are refused with the
    other keys."""
    theirs = imported.theirs
    requests = [key for key, value in IN_FOUR_BITS.items() if theirs.get(key) == value]
    if theirs.get("adapter") == "qlora" and theirs.get("load_in_4bit") is None:
        requests.append("adapter")
    methods = [theirs.get(key) for key in ("quantization_method", "quant_method")]
    if not requests or any(method not in (None, "bnb", "bitsandbytes") for method in methods):
        return
    for key in (*requests, "quantization_method", "quant_method"):
        if key != "adapter":  # Axolotl's table needs it
            imported.take(key)
    for key in ("bnb_4bit_quant_type", "quantization_type"):
        kind = theirs.get(key)
        if kind not in (None, "nf4"):
            imported.refuse(key, f"is {kind}: windlass has nf4", "write nf4, then import again")
    imported.set("layout.base_dtype", "nf4", requests[0])


def set_objective(
    imported: ImportedRun, key: str, objective: str, *, loss: str = "", betas: Sequence[str], smoothing: str = ""
) -> None:
    """Set the objective that `key` chooses. The others are their keys: of the loss, of beta, and of the share of labels
    that are wrong, which only one loss counts as windlass does."""
    imported.set("train.objective", objective, key)
    given = [name for name in betas if imported.theirs.get(name) is not None]
    for name in given or [f"{TOOLS[imported.tool]}'s default"]:
        imported.set(f"{objective}.beta", float(imported.take(name, 0.1, int | float)), name)
    if objective == "orpo":
        return
    names = as_list(imported.take(loss, "sigmoid"))
    named = str(names[0]) if len(names) == 1 else ""
    if named not in LOSSES:
        problem = f"is {', '.join(map(str, names))}: windlass has {', '.join(LOSSES)}"
        imported.refuse(loss, problem, f"train this with {TOOLS[imported.tool]}: here it would be another run")
    for name, value in LOSSES.get(named, {}).items():
        imported.set(f"dpo.{name}", value, loss)
    if share := imported.take(smoothing):
        imported.set("dpo.label_smoothing", share, smoothing)
        if named != "robust":
            problem = f"goes with a loss {named} there: windlass has it as the loss `robust` of TRL does, which differs"
            imported.refuse(smoothing, problem, "remove it, or train this with the other tool")


def resolve_conflicts(imported: ImportedRun) -> None:
    settings = imported.settings
    if "train.objective" in settings:
        for key in ("data.packing", "data.turns", "data.completion_only_loss", "data.text_field"):
            imported.drop(key, "pairs are not packed, and their loss is on both answers")
    if settings.get("train.global_batch_size"):
        imported.drop("train.gradient_accumulation_steps", "the whole batch is set as well")
    else:
        settings.pop("train.global_batch_size", None)
    if settings.get("train.offload_activations"):
        if settings.get("train.compile"):
            imported.drop("train.offload_activations", "layers are compiled")
        elif settings.get("train.gradient_checkpointing") is False:
            settings["train.gradient_checkpointing"] = True
            imported.remarks["train.gradient_checkpointing"] = "what is offloaded are the inputs of recomputed layers"
    if settings.get("train.warmup_steps") is not None:
        imported.drop("train.warmup_ratio", "warmup_steps is set as well")
    if "data.val_fraction" in settings:
        settings.pop("data.val_split", None)
    for action in ("eval", "save"):
        if settings.get(f"train.{action}_strategy", "steps") != "steps":
            imported.drop(f"train.{action}_steps", f"{action}_strategy isn't steps")
    held_out = "data.val_fraction" in settings or settings.get("data.val_split") or "data.eval" in settings
    if not held_out:
        settings["train.eval_strategy"] = "no"
        imported.remarks["train.eval_strategy"] = "nothing is held out to evaluate on"
        settings.pop("train.eval_steps", None)
    if settings.get("train.eval_strategy") == "no":
        settings.pop("train.load_best_model_at_end", None)
        settings.pop("train.eval_on_start", None)


def translate_columns(imported: ImportedRun, place: str, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the messages' names of fields, if they aren't usual ones."""
    usual = {"role": ("role", "from"), "content": ("content", "value"), "training": ("train", "weight")}
    renamed = {name: column for name, column in columns.items() if column not in usual.get(name, (name,))}
    for name in renamed.keys() - {*usual, *MEDIA, "tools", "system", "chosen", "rejected"}:
        imported.refuse(place, f"windlass reads {name!r} of a message by that name", "rename it in the rows")
    for name in columns.keys() & {*MEDIA}:
        imported.refuse(place, f"these rows have {name}, and windlass trains on text alone", "name other rows")
    if not renamed:
        return {}
    return {"columns": {"train" if name == "training" else name: str(column) for name, column in renamed.items()}}


def set_eval_sets(imported: ImportedRun, key: str, sets: list[dict[str, Any]]) -> None:
    """Set data sets that are only evaluated on, named by the last part of their path, repeated ones with a number."""
    by_name = dict[str, Any]()
    for data in sets:
        stem = Path(str(data["dataset_name_or_path"])).stem
        names = (stem, *(f"{stem}-{number}" for number in range(2, len(sets) + 1)))
        by_name[next(name for name in names if name not in by_name)] = _to_mixed_set(data)
    if by_name:
        imported.set("data.eval", by_name, key)


def set_data_sets(imported: ImportedRun, key: str, sets: list[dict[str, Any]]) -> None:
    """Set the data that is trained on. Each set has keys of `data`."""
    if not sets:
        imported.refuse(key, "names no data set", "set data.dataset_name_or_path in the run file")
    imported.set("data.dataset_config_name", None, key)
    if len(sets) == 1:
        for name, value in sets[0].items():
            if value is not None:
                imported.settings.pop(f"data.{name}", None)  # a set's own comes before the one of all sets
                imported.set(f"data.{name}", value, key)
    if len(sets) > 1:
        paths = [str(data["dataset_name_or_path"]) for data in sets]
        for i, path in enumerate(paths):
            before = paths[:i].count(path)
            if before:  # the same file again: each needs a name
                sets[i]["name"] = f"{Path(path).stem}-{before + 1}"
        imported.set("data.mix", [_to_mixed_set(data) for data in sets], key)


def _to_mixed_set(data: Mapping[str, Any]) -> dict[str, Any]:
    short = {"dataset_name_or_path": "path", "train_split": "split"}
    return {short.get(name, name): value for name, value in data.items() if value is not None}
