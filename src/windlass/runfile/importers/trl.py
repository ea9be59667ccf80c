"""TRL's keys that depend on one another, and its data sets."""

from windlass.runfile.importers.imported import ImportedRun, as_list
from windlass.runfile.importers.keys import LOSSES, set_data_sets, set_objective
from windlass.runfile.importers.read import OBJECTIVE


def translate(imported: ImportedRun) -> None:
    losses = as_list(imported.theirs.get("loss_type"))
    objective = imported.take(OBJECTIVE, "dpo" if losses and {*losses} <= {*LOSSES} else "")
    if objective:
        key = "loss_type" if losses else "beta"
        set_objective(imported, key, objective, loss="loss_type", betas=["beta"], smoothing="label_smoothing")
    elif "beta" in imported.theirs:
        hint = "for DPO add loss_type: sigmoid, its default, then import again"
        imported.refuse("beta", "several of TRL's trainers have it, and nothing says which this is", hint)
        imported.take("beta")
    split = imported.take("dataset_test_split")
    if imported.settings.get("train.eval_strategy", "no") != "no":
        imported.set("data.val_split", split or "test", "dataset_test_split")
    on_assistant = imported.take("assistant_only_loss")
    on_completion = imported.take("completion_only_loss")
    if on_assistant or on_completion or on_completion is False:
        only = bool(on_assistant or on_completion)
        imported.set("data.completion_only_loss", only, "assistant_only_loss, completion_only_loss")
    else:
        imported.no_effect["assistant_only_loss"] = (
            "not set: TRL's loss is on all of a chat, here on what the assistant says; "
            "with data.completion_only_loss: false it is on all"
        )
    template = imported.take("chat_template_path")
    if template and str(template).endswith((".jinja", ".jinja2")):
        imported.set("data.chat_template", template, "chat_template_path")
    elif template:
        problem = "windlass takes a template from a file, not from another tokenizer"
        hint = "export that tokenizer's template to a file, and name it: chat_template_path: FILE.jinja"
        imported.refuse("chat_template_path", problem, hint)
    entries = imported.take("datasets", kind=list) or []
    for i, entry in enumerate(entries):
        imported.judge_others(f"datasets[{i}]", entry, "path data_files name split")
    sets = [
        {
            "dataset_name_or_path": entry.get("data_files") or entry.get("path"),
            "dataset_config_name": entry.get("name"),
            "train_split": entry.get("split", "train"),
        }
        for entry in entries
    ]
    if sets:  # otherwise dataset_name names the one
        set_data_sets(imported, "datasets", sets)
