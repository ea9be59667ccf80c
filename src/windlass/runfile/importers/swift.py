"""ms-swift's keys that depend on one another, and its data sets."""

from typing import Any

from windlass.runfile.importers.imported import ImportedRun, as_list
from windlass.runfile.importers.keys import set_data_sets, set_eval_sets, set_objective


def translate(imported: ImportedRun) -> None:
    pairs = imported.theirs.get("rlhf_type") in ("dpo", "orpo")
    if pairs:
        options = {"loss": "loss_type", "smoothing": "label_smoothing"}
        set_objective(imported, "rlhf_type", imported.take("rlhf_type"), betas=["beta"], **options)
    targets = imported.take("target_modules")
    if targets is not None:
        names = as_list(targets)
        imported.set("lora.target_modules", "all-linear" if "all-linear" in names else names, "target_modules")
    if system := imported.take("system"):
        hint = f"put {str(system)!r:.40} into the data"
        imported.refuse("system", "windlass adds no system message to rows", hint)
    if imported.theirs.get("gradient_accumulation_steps") is not None:
        imported.settings["train.global_batch_size"] = None
    scale = imported.take("loss_scale", "default")
    known = ["default", "last_round"] + ([] if pairs else ["all"])
    if scale not in known:
        imported.refuse("loss_scale", f"is {scale}: windlass has no such weights", f"write {' or '.join(known)}")
    if not pairs:  # pairs have loss on both answers, and on nothing else
        if scale == "last_round":
            imported.set("data.turns", "last", "loss_scale")
        imported.set("data.completion_only_loss", scale != "all", f"loss_scale: {scale}")
    for key, set_sets in (("val_dataset", set_eval_sets), ("dataset", set_data_sets)):
        set_sets(imported, key, [_translate_data(str(name)) for name in as_list(imported.take(key))])


def _translate_data(name: str) -> dict[str, Any]:
    """Return a data set's path and the number of rows that may follow it: rows.jsonl#500."""
    path, _, rows = name.partition("#")
    return {"dataset_name_or_path": path, "train_split": f"train[:{rows}]" if rows else "train"}
