"""Axolotl's keys that depend on one another, and its data sets."""

import re
from collections.abc import Mapping
from typing import Any, Final

from windlass.runfile.importers.imported import ImportedRun, as_list
from windlass.runfile.importers.keys import set_data_sets, set_eval_sets, set_objective, translate_columns

TEMPLATES: Final = ("chatml", "llama3", "alpaca")  # chat templates that windlass has by the same name
TOKENIZERS_TEMPLATE: Final = "the tokenizer's own is used; compare with `windlass data run.yaml --sample 3`"
BUILT_IN_PLUGINS: Final = r"\b(liger|cut_cross_entropy|kernels)\b"
FIELDS: Final = ("role", "content", "training")  # of a message
DATA_KEYS: Final = (
    "path data_files name split type field_messages field text_column chat_template chat_template_jinja roles "
    "message_property_mappings message_field_role message_field_content message_field_training field_tools field_system"
)


# A style of pairs through chatml or llama3 -> its column of the prompt; none where both answers are whole chats.
PAIR_STYLES: Final = {"intel": "question", "icr": "input", "prompt_pairs": "prompt", "ultra": "", "argilla_chat": ""}


def translate(imported: ImportedRun) -> None:
    if imported.theirs.get("rl") in ("dpo", "ipo", "orpo"):
        rl = imported.take("rl")
        if rl == "ipo":
            imported.theirs["dpo_loss_type"] = "ipo"
        betas = ("orpo_alpha", "rl_beta") if rl == "orpo" else ("rl_beta", "dpo_beta")
        options = {"loss": "dpo_loss_type", "smoothing": "dpo_label_smoothing"}
        set_objective(imported, "rl", "orpo" if rl == "orpo" else "dpo", betas=betas, **options)
    if "lora.target_modules" in imported.settings and imported.take("lora_target_modules"):
        imported.no_effect["lora_target_modules"] = "lora_target_linear adapts all linear layers"
    batch, micro = imported.take("batch_size", kind=int), imported.theirs.get("micro_batch_size", 1)
    if batch is not None and isinstance(micro, int) and micro > 0 and batch % micro == 0:  # of each process
        imported.set("train.gradient_accumulation_steps", batch // micro, "batch_size // micro_batch_size")
    elif batch is not None:
        hint = "write train.gradient_accumulation_steps yourself"
        imported.refuse("batch_size", f"{batch} rows of a process are no multiple of micro_batch_size: {micro}", hint)
    ratio = imported.take("cosine_min_lr_ratio")
    if isinstance(ratio, float):
        imported.take("lr_scheduler")
        imported.set("train.lr_scheduler_type", "cosine_with_min_lr", "lr_scheduler, cosine_min_lr_ratio")
        imported.set("train.lr_scheduler_kwargs", {"min_lr_rate": ratio}, "cosine_min_lr_ratio")
    special = imported.take("special_tokens", kind=dict) or {}
    if others := [name for name in special if name != "pad_token"]:
        hint = "if they differ from the tokenizer's own, change them in its files; then remove the key"
        imported.refuse("special_tokens", f"windlass changes no tokenizer: {', '.join(others)}", hint)
    elif special:
        imported.no_effect["special_tokens"] = "padding never counts in the loss"
    plugins = as_list(imported.take("plugins"))
    if others := [plugin for plugin in plugins if not re.search(BUILT_IN_PLUGINS, str(plugin))]:
        hint = "remove it if you can train without it, then import again"
        imported.refuse("plugins", f"windlass has nothing like {others[0]}", hint)
    elif plugins:
        imported.no_effect["plugins"] = "the same plugin's speed-up is built in"
    template, no_effect = _read_template(imported.take("chat_template"), imported.take("chat_template_jinja"))
    if template:
        imported.set("data.chat_template", template, "chat_template")
    if no_effect:
        imported.no_effect["chat_template"] = no_effect
    evaluated = imported.take("test_datasets", kind=list) or []
    sets = [_translate_data(imported, entry, f"test_datasets[{i}]") for i, entry in enumerate(evaluated)]
    set_eval_sets(imported, "test_datasets", sets)
    on_prompt = imported.take("train_on_inputs")
    entries = imported.take("datasets", kind=list) or as_list(imported.take("pretraining_dataset"))
    sets = []
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict) or entry.get("type") != "completion":
            imported.set("data.completion_only_loss", not on_prompt, "train_on_inputs")
        if isinstance(entry, dict):
            sets.append(_translate_data(imported, entry, f"datasets[{i}]"))
    set_data_sets(imported, "datasets", sets)


def _read_template(template: Any, text: Any) -> tuple[str, str]:
    """Return data.chat_template, or why a template has no effect."""
    if template in TEMPLATES or (template == "jinja" and text):
        return text or template, ""
    return "", "" if template in (None, "tokenizer_default") else TOKENIZERS_TEMPLATE


def _translate_data(imported: ImportedRun, entry: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return keys of windlass's `data` for a data set."""
    style = entry.get("type", "completion")
    pairs = "train.objective" in imported.settings
    data: dict[str, Any] = {
        "dataset_name_or_path": entry.get("data_files") or entry.get("path"),
        "dataset_config_name": entry.get("name"),
        "train_split": entry.get("split", "train"),
    }
    imported.judge_others(place, entry, f"{DATA_KEYS} field_chosen field_rejected" if pairs else DATA_KEYS)
    if pairs:
        return {**data, **_translate_pairs(imported, entry, place, str(style))}
    if isinstance(style, dict):
        used = {key: value for key, value in style.items() if value}
        if used.get("no_input_format") == used.get("format"):
            used.pop("no_input_format", None)
        imported.judge_others(f"{place}.type", used, "format field_instruction field_input field_output")
        return {**data, "prompt_template": _join_prompt(style)}
    if style == "chat_template" or str(style).startswith("sharegpt"):
        return {**data, **_translate_chat(imported, entry, place)}
    if str(style).startswith(("completion", "pretrain")):
        return {**data, "text_field": entry.get("field") or entry.get("text_column") or "text"}
    if str(style) == "alpaca":
        return {**data, "format": "alpaca", "chat_template": "alpaca"}  # whatever template the chats have
    hint = "see data.prompt_template and data.messages_field"
    imported.refuse("datasets", f"windlass has no prompt style {style!r}", hint)
    return data


def _translate_pairs(imported: ImportedRun, entry: Mapping[str, Any], place: str, style: str) -> dict[str, Any]:
    template, _, form = style.partition(".")
    named = {side: entry[f"field_{side}"] for side in ("chosen", "rejected") if entry.get(f"field_{side}")}
    if template == "chat_template" and form in ("", "default", "argilla", "argilla_chat"):
        data = _translate_chat(imported, entry, place)
        if form.startswith("argilla") or (not form and imported.settings["train.objective"] == "orpo"):
            data = {key: value for key, value in data.items() if key != "messages_field"} | {"format": "preference"}
        columns = {**data.get("columns", {}), **named}
        return {**data, **({"columns": columns} if columns else {})}
    if template not in TEMPLATES or form not in PAIR_STYLES:
        imported.refuse("datasets", f"windlass has no style of pairs {style!r}", "see docs/data.md, `preference`")
        return {}
    data = {"format": "preference", "chat_template": template}
    if prompt := PAIR_STYLES[form]:
        data |= {"format": "messages", "columns": {"messages": prompt}}
    return data


def _join_prompt(style: Mapping[str, Any]) -> str:
    prompt = str(style.get("format") or "{instruction} {input}")
    for name in ("instruction", "input"):
        prompt = prompt.replace(f"{{{name}}}", f"{{{style.get(f'field_{name}') or name}}}")
    answer = style.get("field_output") or "output"
    return f"{prompt}[[{{{answer}}}]]"


def _translate_chat(imported: ImportedRun, entry: Mapping[str, Any], place: str) -> dict[str, Any]:
    mapped = entry.get("message_property_mappings")
    columns = {name: entry[f"message_field_{name}"] for name in FIELDS if entry.get(f"message_field_{name}")}
    columns |= mapped if isinstance(mapped, dict) else {}
    columns |= {name: entry[f"field_{name}"] for name in ("tools", "system") if entry.get(f"field_{name}")}
    data = translate_columns(imported, f"{place}.message_property_mappings", columns)
    roles = entry.get("roles")
    imported.require_roles(f"{place}.roles", roles if isinstance(roles, dict) else {})
    template, no_effect = _read_template(entry.get("chat_template"), entry.get("chat_template_jinja"))
    if template:
        data["chat_template"] = template
    if no_effect:
        imported.no_effect[f"{place}.chat_template"] = no_effect
    return {**data, "messages_field": entry.get("field_messages") or "messages"}
