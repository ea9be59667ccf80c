"""LLaMA-Factory's keys that depend on one another, and its data sets, which data/dataset_info.json describes."""

import difflib
import json
from pathlib import Path
from typing import Any, Final

from windlass.errors import UserError
from windlass.runfile.importers.imported import ImportedRun, split_names
from windlass.runfile.importers.keys import set_data_sets, set_eval_sets, set_objective, translate_columns

DATA_KEYS: Final = (
    "hf_hub_url ms_hub_url om_hub_url script_url file_name formatting subset split num_samples columns tags"
)
# Prompts that LLaMA-Factory writes itself, and that no model's tokenizer has.
OWN_TEMPLATES: Final = ("alpaca", "default", "empty", "fewshot", "vicuna", "belle", "ziya")
# Their tag of a role -> windlass's name of the role.
TAGS: Final = {"user": "user", "assistant": "assistant", "observation": "tool", "function": "call", "system": "system"}
# Their name of an Alpaca row's column -> the usual one.
COLUMNS: Final = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "system": "system",
    "history": "history",
}


def translate(imported: ImportedRun) -> None:
    stage = imported.take("stage", "sft")
    if stage == "dpo":
        _set_objective(imported)
    elif stage not in ("sft", "pt"):
        problem = f"is {stage}: windlass does pretraining, supervised fine-tuning and DPO (pt, sft, dpo)"
        imported.refuse("stage", problem, "train this with LLaMA-Factory: its rows are not answers to train on")
    r = imported.theirs.get("lora_rank", 8)
    if imported.theirs.get("lora_alpha") is None and isinstance(r, int):
        imported.take("lora_alpha")
        imported.set("lora.lora_alpha", 2 * r, "LLaMA-Factory's default: 2 x lora_rank")
    names = split_names(imported.take("lora_target", "all"))
    imported.set("lora.target_modules", "all-linear" if "all" in names else names, "lora_target")
    if in_full := split_names(imported.take("additional_target")):
        imported.set("lora.modules_to_save", in_full, "additional_target")
    neat = imported.take("neat_packing")
    packing = imported.take("packing")
    if neat or packing or (packing is None and stage == "pt"):
        remark = "neat_packing" if neat else "packing; windlass isolates packed documents"
        imported.set("data.packing", True, remark)
    if stage == "sft":
        imported.set("data.completion_only_loss", not imported.take("train_on_prompt"), "train_on_prompt")
    template = imported.theirs.get("template")
    if template == "chatml":
        imported.set("data.chat_template", imported.take("template"), "template")
    elif template in OWN_TEMPLATES:
        imported.take("template")
        hint = "write it as a Jinja file and name that in data.chat_template; or remove it to use the tokenizer's own"
        imported.refuse("template", f"windlass has no {template!r} as LLaMA-Factory writes it", hint)
    if imported.take("enable_thinking") is False:
        imported.set("data.template_kwargs", {"enable_thinking": False}, "enable_thinking")
    folder = Path(str(imported.take("dataset_dir", "data")))
    rows = imported.take("max_samples")
    described = _read_dataset_info(Path(imported.file).parent, folder)
    for key, set_sets in (("eval_dataset", set_eval_sets), ("dataset", set_data_sets)):
        names = split_names(imported.take(key))
        sets = []
        for name in names:
            _require_described(imported, key, name, described, folder)
            sets.append(_translate_data(imported, name, described.get(name), folder, rows))
        set_sets(imported, key, sets)


def _set_objective(imported: ImportedRun) -> None:
    objective = "dpo"
    if imported.theirs.get("pref_loss") == "orpo":
        objective = str(imported.take("pref_loss"))
    options = {"loss": "pref_loss", "smoothing": "dpo_label_smoothing"}
    set_objective(imported, "stage", objective, betas=["pref_beta"], **options)
    weight = imported.take("pref_ftx") if objective == "dpo" else None
    if weight:
        imported.set("dpo.sft_weight", weight, "pref_ftx")


def _read_dataset_info(beside: Path, folder: Path) -> dict[str, Any]:
    for parent in (Path(), beside):
        file = parent / folder / "dataset_info.json"
        if file.is_file():
            try:
                return dict(json.loads(file.read_text(encoding="utf-8")))
            except (ValueError, TypeError) as error:
                hint = "correct it, then import again"
                raise UserError(f"is not valid JSON: {error}", str(file), hint, "not-json") from None
    return {}


def _require_described(imported: ImportedRun, key: str, name: str, described: dict[str, Any], folder: Path) -> None:
    """Refuse a data set that dataset_info.json doesn't describe, unless it is a file or LLaMA-Factory fetches it."""
    if name in described or folder == Path("ONLINE") or Path(name).suffix or Path(name).exists():
        return
    file = folder / "dataset_info.json"
    if not described:
        hint = f"import where {file} is, or set dataset_dir to its folder; or name the rows' file: {key}: {name}.jsonl"
        imported.refuse(key, f"{name!r} is described in {file}, which isn't here", hint)
        return
    close = difflib.get_close_matches(name, described, n=1)
    hint = f"did you mean {close[0]}?" if close else f"describe it there; it has {', '.join(described)}"
    imported.refuse(key, f"{file} describes no {name!r}", hint)


def _translate_data(imported: ImportedRun, name: str, described: Any, folder: Path, rows: Any) -> dict[str, Any]:
    """Return a data set by its entry in dataset_info.json, else by its path."""
    entry = described if isinstance(described, dict) else {}
    split = entry.get("split") or "train"
    counts = [count for count in (rows, entry.get("num_samples")) if isinstance(count, int)]
    data: dict[str, Any] = {"train_split": f"{split}[:{min(counts)}]" if counts else split}
    if not entry:
        return {**data, "dataset_name_or_path": name}
    place = f"dataset_info.json: {name}"
    pairs = "train.objective" in imported.settings
    imported.judge_others(place, entry, f"{DATA_KEYS} ranking" if pairs else DATA_KEYS)
    if pairs and not entry.get("ranking"):
        hint = "set train.objective: sft for such rows, or `ranking: true` if they are pairs"
        imported.refuse(place, "has no pairs, and stage is dpo", hint)
    file = folder / str(entry.get("file_name", name))
    data["dataset_name_or_path"] = entry.get("hf_hub_url") or entry.get("script_url") or str(file)
    data["dataset_config_name"] = entry.get("subset")
    columns = {**entry["columns"]} if isinstance(entry.get("columns"), dict) else {}
    if entry.get("formatting") in ("sharegpt", "openai"):
        tags = entry["tags"] if isinstance(entry.get("tags"), dict) else {}
        roles = {role: tags[f"{tag}_tag"] for tag, role in TAGS.items() if f"{tag}_tag" in tags}
        imported.require_roles(f"{place}.tags", roles)
        messages = columns.pop("messages", "conversations")
        columns |= {field: tags[f"{field}_tag"] for field in ("role", "content") if f"{field}_tag" in tags}
        return {**data, **translate_columns(imported, f"{place}.columns", columns), "messages_field": messages}
    known = COLUMNS | ({"chosen": "chosen", "rejected": "rejected"} if pairs else {})
    for column in columns.keys() - known.keys():
        hint = "remove it if you can train without it"
        imported.refuse(f"{place}.columns", f"windlass has no {column!r} of such rows", hint)
    renamed = {known[key]: column for key, column in columns.items() if known.get(key) not in (None, column)}
    if renamed:
        data["columns"] = renamed
    return {**data, "format": "alpaca"}
