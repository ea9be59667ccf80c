"""Make run files from the configurations of Axolotl, LLaMA-Factory, TRL and ms-swift.

Each key of the other tool is carried over, translated, or listed with the reason why it has no effect; one that changes
training and has no counterpart is an error. The tool's defaults are written out, because ours differ. The tables are in
importing.toml; the functions here translate what depends on several keys.
"""

from __future__ import annotations

import json
import re
import shlex
import tempfile
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from windlass.errors import Problem, UserError, raise_all
from windlass.runfile.document import join_steps, load_document, parse_scalar
from windlass.runfile.fields import Train
from windlass.runfile.names import IMPORTING as TABLES
from windlass.runfile.names import ROLES, TOOLS, group_by_name
from windlass.runfile.read import read_run_file
from windlass.runfile.reference import format_value, render_settings

# What starts each tool on a command line; the options follow.
COMMANDS: Final = {
    "swift": r"swift (?:sft|pt)\b|swift/cli/(?:sft|pt)\.py",
    "llamafactory": r"llamafactory-cli train\b|lmf train\b|src/train\.py",
    "trl": r"trl sft\b|sft\w*\.py",
    "axolotl": r"axolotl train\b|axolotl\.cli\.train",
}
OFF: Final[tuple[Any, ...]] = (None, False, 0, "", [], {}, "none", "no", "false", "null")
BITS: Final = ("quantization_bit", "quant_bits")  # of 4: as load_in_4bit
OWN: Final = ("warmup_ratio", "global_batch_size", "resume")  # of `train`, and not transformers'


TEMPLATES: Final = ("chatml", "llama3", "alpaca")  # of the same name here
TOKENIZERS_OWN: Final = "the tokenizer's own is used; compare with `windlass data run.yaml --sample 3`"


@dataclass
class Import:
    """A run file under construction."""

    tool: str
    file: str
    theirs: dict[str, Any]  # their keys that are not handled yet
    lines: Mapping[str, int]  # of their keys
    settings: dict[str, Any] = field(default_factory=dict)  # our key -> value
    remarks: dict[str, str] = field(default_factory=dict)  # our key -> where it is from
    no_effect: dict[str, str] = field(default_factory=dict)  # their key -> why
    problems: list[Problem] = field(default_factory=list)

    def take(self, key: str, otherwise: Any = None, kind: Any = object) -> Any:
        """Return the tool's value and mark the key as handled; refuse a value of another kind."""
        value = self.theirs.pop(key, otherwise)
        entries = kind is list and isinstance(value, list) and not all(isinstance(each, dict) for each in value)
        if value is None or (isinstance(value, kind) and not entries):
            return value
        self.refuse(key, f"is {value!r:.40}, which {TOOLS[self.tool]} does not take", "correct it, then import again")
        return otherwise

    def set(self, key: str, value: Any, remark: str) -> None:
        values = TABLES[self.tool].get("values", {}).get(key, {})
        value = values.get(str(value).lower() if isinstance(value, bool) else str(value), value)
        if value == "":
            return
        before = self.settings.get(key)
        if before not in (None, value):
            problem = f"makes {key} {format_value(value)}, and {self.remarks[key]} makes it {format_value(before)}"
            self.refuse(remark, problem, "keep one of them, then import again")
        self.settings[key], self.remarks[key] = value, remark

    def drop(self, key: str, why: str) -> None:
        """Drop one of our settings that another one rules out."""
        value, remark = self.settings.pop(key, None), self.remarks.pop(key, "")
        if value is not None and "default" not in remark and remark:
            self.no_effect[remark] = why

    def judge(self, key: str, value: Any, place: str = "") -> None:
        """Handle a key that is not carried over: it has no effect, with a reason, or it is refused."""
        table, common, place = TABLES[self.tool], TABLES["common"], place or key
        same = table.get("same", {})
        no_effect, refused = (
            {**group_by_name(common[kind]), **group_by_name(table.get(kind, {}))} for kind in ("no_effect", "refused")
        )
        if key in no_effect:
            self.no_effect[place] = no_effect[key]
        elif value in same.get(key, ()):
            self.no_effect[place] = "windlass does just that"
        elif value is None or (value in OFF and key not in same):
            self.no_effect[place] = "it is switched off or empty"
        elif key in refused:
            self.refuse(place, refused[key], "remove it if you can train without it, then import again")
        else:
            hint = "remove it if it doesn't change what is trained, then import again"
            self.refuse(place, f"windlass knows no such key of {TOOLS[self.tool]}", hint)

    def judge_others(self, place: str, entry: Mapping[str, Any], read: str) -> None:
        """Handle the unread keys of a data set's entry."""
        for key, value in entry.items():
            if key not in read.split():
                self.judge(str(key), value, f"{place}.{key}")

    def require_roles(self, place: str, roles: Mapping[str, Any]) -> None:
        """Require usual role names: the run file can't set them."""
        for role, names in roles.items():
            known = ROLES.get(str(role), ())
            if unusual := [name for name in _as_list(names) if str(name) not in known]:
                hint = f"rename it in the rows; windlass reads {', '.join(known or ROLES)}"
                self.refuse(place, f"windlass doesn't read {unusual[0]!r} as {role}", hint)

    def as_dict(self) -> dict[str, Any]:
        problems = [problem.as_dict() for problem in self.problems]
        return {"tool": self.tool, "settings": self.settings, "no_effect": self.no_effect, "problems": problems}

    def refuse(self, key: str, why: str, hint: str) -> None:
        line = f":{self.lines[key]}" if key in self.lines else ""
        self.problems.append(Problem(why, f"{self.file}{line}: {key}", hint))


def import_file(path: Path, tool: str = "") -> Import:
    """Translate another tool's configuration, a YAML or JSON file or a shell script that starts the tool."""
    if tool and tool not in TOOLS:
        raise UserError(f"windlass imports from {', '.join(TOOLS)}, not from {tool!r}", "--from", "choose one of them")
    named, theirs, lines = _read_theirs(path)
    marks = {each: sum(key in theirs for key in TABLES[each]["marks"].split()) for each in TOOLS}
    likely = [each for each in TOOLS if marks[each] == max(marks.values())]
    if not (tool := tool or named or ("" if likely[1:] else likely[0])):
        hint = f"name it: `windlass import {path} --from axolotl`, or another: {', '.join(TOOLS)}"
        raise UserError("is not clearly a configuration of one tool", str(path), hint)
    made = Import(tool, str(path), dict(theirs), lines)
    table = TABLES[tool]
    _translate_common(made)
    for key, rule in table.get("needs", {}).items():
        if (value := made.take(key, rule["without"])) not in rule["is"]:
            made.refuse(key, f"is {value!r}: windlass trains LoRA adapters", f"write {rule['write']}")
    for key, ours in table.get("if_set", {}).items():
        for name, value in ours.items() if made.take(key) else ():
            made.set(name, value, key)
    if experts := made.take(table.get("experts", "")):
        names = [str(name).rpartition(".")[2] for name in _as_list(experts)]
        made.set("lora.experts", {"targets": names}, table["experts"])
    if held_out := table.get("held_out"):
        _set_held_out(made, made.take(held_out, kind=int | float) or 0, held_out)
    SPECIAL[tool](made)
    for key, value in made.theirs.items():
        ours = table["keys"].get(key) or (f"train.{key}" if key in Train.model_fields and key not in OWN else "")
        if ours and value is not None:
            made.set(ours, value, key)
        else:
            made.judge(key, value)
    for key, value in table["defaults"].items():
        if key not in made.settings:
            made.settings[key], made.remarks[key] = (None if value == "null" else value), f"{TOOLS[tool]}'s default"
    _resolve_conflicts(made)
    _validate(made)
    return made


# --- reading ------------------


def _read_theirs(path: Path) -> tuple[str, dict[str, Any], dict[str, int]]:
    """Return the tool if the file names it, its settings, and their lines."""
    if path.suffix in (".sh", ".bash") and path.is_file():
        return _read_script(path, path.read_text(encoding="utf-8", errors="replace"))
    document = load_document(path)
    if not isinstance(document.value, dict):
        raise UserError(
            "contains no `key: value` settings", str(path), "give another tool's YAML, JSON or shell script"
        )
    raise_all(document.problems)
    return "", document.value, {join_steps(steps): line for steps, line in document.lines.items()}


def _read_script(path: Path, text: str) -> tuple[str, dict[str, Any], dict[str, int]]:
    """Return the options of the command that starts a tool."""
    joined = re.sub(r"\\\s*\n", " ", "\n".join(re.sub(r"^\s*#.*", "", line) for line in text.splitlines()))
    for line in joined.splitlines():
        for tool, pattern in COMMANDS.items():
            if not (found := re.search(pattern, line)):
                continue
            options: dict[str, Any] = {"loss_scale": "all"} if re.search(r"\bpt\b", found[0]) else {}
            key = ""
            try:
                words = shlex.split(line[found.end() :], comments=True)
            except ValueError as error:
                where = f"{path}:{_find_line(text, found[0])}"
                raise UserError(f"is not a shell command: {error}", where, "close the quotes") from None
            for word in words:
                if word.startswith("--"):
                    key, equals, value = word[2:].partition("=")
                    options[key] = parse_scalar(value) if equals else True
                elif not key:
                    hint = f"import that file: `windlass import {word} --from {tool}`"
                    raise UserError(f"takes its settings from {word}", str(path), hint)
                else:
                    before = options[key]
                    options[key] = parse_scalar(word) if before is True else [*_as_list(before), parse_scalar(word)]
            lines = {key: _find_line(text, f"--{key}") for key in options}
            for key, value in options.items():
                if any("$" in str(item) for item in _as_list(value)):
                    raise UserError("is a shell expression", f"{path}:{lines[key]}: {key}", "write its value instead")
            return tool, options, lines
    hint = "windlass reads `swift sft`, `llamafactory-cli train` and `trl sft` with their options"
    raise UserError("starts no training tool that windlass knows", str(path), hint)


def _find_line(text: str, key: str) -> int:
    return next((n for n, line in enumerate(text.splitlines(), 1) if key in line), 1)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


# --- what depends on several keys ------------------


def _translate_common(made: Import) -> None:
    for key in ("warmup_steps", "warmup_ratio"):
        if (value := made.take(key)) is not None:
            share = key == "warmup_ratio" or (isinstance(value, float) and value < 1)
            made.set("train.warmup_ratio" if share else "train.warmup_steps", value, key)
    for what in ("eval", "save"):
        strategy, each = made.take(f"{what}_strategy"), made.take(f"{what}_steps")
        if what == "eval":
            strategy = strategy or made.take("evaluation_strategy")
        count = made.take(f"{what}s_per_epoch")
        if (isinstance(each, float) and each < 1) or count not in (None, 0, 1):
            asked = f"{what}_steps: {each}" if count is None else f"{what}s_per_epoch: {count}"
            made.set(f"train.{what}_strategy", "epoch", f"{asked}; for more, strategy steps and {what}_steps: N")
            continue
        if count is not None:
            strategy = "epoch" if count else "no"
        if strategy is not None or each:
            made.set(f"train.{what}_strategy", strategy or "steps", f"{what}_strategy")
        if each:
            made.set(f"train.{what}_steps", each, f"{what}_steps")
    _translate_four_bits(made)
    if (compiled := made.take("torch_compile")) is not None:
        made.set("train.compile", compiled in (True, "auto"), "torch_compile")
    given = [key for key in ("bf16", "bfloat16") if key in made.theirs]
    for key in given or ["bf16"]:
        made.set("train.bf16", made.take(key, True) in (True, "auto", "full"), key)
    if made.take("fp16"):
        made.refuse("fp16", "float16 overflows, and windlass stops at a step that isn't finite", "write bf16: true")
    if resume := made.take("auto_resume_from_checkpoints") or made.take("resume_from_checkpoint"):
        made.set("train.resume", "auto", f"resume_from_checkpoint: {resume}")
    for name in ("metric_for_best_model", "greater_is_better"):
        if (value := made.take(name)) not in (None, False, "loss", "eval_loss"):
            made.refuse(name, "the best checkpoint is the one with the lowest evaluation loss", "remove it")
    reports = [name for name in ("wandb", "mlflow", "tensorboard", "trackio") if made.take(f"use_{name}")]
    if project := made.take("wandb_project"):
        reports.append("wandb")
        made.no_effect["wandb_project"] = (
            f"set it where the run starts: export WANDB_PROJECT={shlex.quote(str(project))}"
        )
    if reports:
        made.set("train.report_to", list(dict.fromkeys(reports)), "its trackers")


def _translate_four_bits(made: Import) -> None:
    """Translate each tool's way to request QLoRA: bitsandbytes' NF4. Other methods and 8 bits are refused with the
    other keys."""
    theirs = made.theirs
    asked = [key for key, value in (("load_in_4bit", True), *((key, 4) for key in BITS)) if theirs.get(key) == value]
    if theirs.get("adapter") == "qlora" and theirs.get("load_in_4bit") is None:
        asked.append("adapter")
    methods = {theirs.get(key) for key in ("quantization_method", "quant_method")}
    if not asked or methods - {None, "bnb", "bitsandbytes"}:
        return
    for key in (*asked, "quantization_method", "quant_method"):
        if key != "adapter":
            made.take(key)
    for key in ("bnb_4bit_quant_type", "quantization_type"):
        if (kind := theirs.get(key)) not in (None, "nf4"):
            made.refuse(key, f"is {kind}: windlass has nf4", "write nf4, then import again")
    made.set("layout.base_dtype", "nf4", asked[0])


def _translate_axolotl(made: Import) -> None:
    if "lora.target_modules" in made.settings and made.take("lora_target_modules"):
        made.no_effect["lora_target_modules"] = "lora_target_linear adapts all linear layers"
    if isinstance(ratio := made.take("cosine_min_lr_ratio"), float):
        made.take("lr_scheduler")
        made.set("train.lr_scheduler_type", "cosine_with_min_lr", "lr_scheduler, cosine_min_lr_ratio")
        made.set("train.lr_scheduler_kwargs", {"min_lr_rate": ratio}, "cosine_min_lr_ratio")
    special = made.take("special_tokens", kind=dict) or {}
    if others := [name for name in special if name != "pad_token"]:
        hint = "if they differ from the tokenizer's own, change them in its files; then remove the key"
        made.refuse("special_tokens", f"windlass changes no tokenizer: {', '.join(others)}", hint)
    elif special:
        made.no_effect["special_tokens"] = "padding never counts in the loss"
    tests = made.take("test_datasets", kind=list)
    tests = [_translate_axolotl_data(made, entry, f"test_datasets[{i}]") for i, entry in enumerate(tests or [])]
    _set_eval_sets(made, "test_datasets", tests)
    plugins = _as_list(made.take("plugins"))
    if others := [each for each in plugins if not re.search(r"\b(liger|cut_cross_entropy|kernels)\b", str(each))]:
        hint = "remove it if you can train without it, then import again"
        made.refuse("plugins", f"windlass has nothing like {others[0]}", hint)
    elif plugins:
        made.no_effect["plugins"] = "the same plugin's speed-up is built in"
    template, text = made.take("chat_template"), made.take("chat_template_jinja")
    if template in TEMPLATES or (template == "jinja" and text):
        made.set("data.chat_template", text or template, "chat_template")
    elif template not in (None, "tokenizer_default"):
        made.no_effect["chat_template"] = TOKENIZERS_OWN
    on_prompt = made.take("train_on_inputs")
    entries = made.take("datasets", kind=list) or _as_list(made.take("pretraining_dataset"))
    for entry in entries:
        kind = entry.get("type") if isinstance(entry, dict) else None
        if kind != "completion":
            made.set("data.completion_only_loss", not on_prompt, "train_on_inputs")
    sets = [
        _translate_axolotl_data(made, each, f"datasets[{i}]")
        for i, each in enumerate(entries)
        if isinstance(each, dict)
    ]
    _set_data_sets(made, "datasets", sets)


AXOLOTL_DATA: Final = (
    "path data_files name split type field_messages field text_column chat_template chat_template_jinja roles "
    "message_property_mappings message_field_role message_field_content message_field_training field_tools field_system"
)


def _translate_axolotl_data(made: Import, entry: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return keys of our `data` for one of its data sets."""
    kind = entry.get("type", "completion")
    found: dict[str, Any] = {
        "dataset_name_or_path": entry.get("data_files") or entry.get("path"),
        "dataset_config_name": entry.get("name"),
        "train_split": entry.get("split", "train"),
    }
    made.judge_others(place, entry, AXOLOTL_DATA)
    if isinstance(kind, dict):
        prompt = str(kind.get("format") or "{instruction} {input}")
        for name, default in (("instruction", "instruction"), ("input", "input")):
            prompt = prompt.replace(f"{{{name}}}", f"{{{kind.get(f'field_{name}') or default}}}")
        return {**found, "prompt_template": f"{prompt}[[{{{kind.get('field_output') or 'output'}}}]]"}
    if kind == "chat_template" or str(kind).startswith("sharegpt"):
        mapped = entry.get("message_property_mappings")
        columns = {name: entry[f"message_field_{name}"] for name in FIELDS if entry.get(f"message_field_{name}")}
        columns |= mapped if isinstance(mapped, dict) else {}
        columns |= {name: entry[f"field_{name}"] for name in ("tools", "system") if entry.get(f"field_{name}")}
        found |= _translate_columns(made, f"{place}.message_property_mappings", columns)
        made.require_roles(f"{place}.roles", entry["roles"] if isinstance(entry.get("roles"), dict) else {})
        template, text = entry.get("chat_template"), entry.get("chat_template_jinja")
        if template in TEMPLATES or (template == "jinja" and text):
            found["chat_template"] = text or template
        elif template not in (None, "tokenizer_default"):
            made.no_effect[f"{place}.chat_template"] = TOKENIZERS_OWN
        return {**found, "messages_field": entry.get("field_messages") or "messages"}
    if str(kind).startswith(("completion", "pretrain")):
        return {**found, "text_field": entry.get("field") or entry.get("text_column") or "text"}
    if str(kind) == "alpaca":
        return {**found, "format": "alpaca"}
    made.refuse(
        "datasets", f"windlass has no prompt style {kind!r}", "see data.prompt_template and data.messages_field"
    )
    return found


FIELDS: Final = ("role", "content", "training")  # of a message, as Axolotl names them


def _translate_columns(made: Import, place: str, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the messages' names of fields, if they aren't usual ones."""
    own = {"role": ("role", "from"), "content": ("content", "value"), "training": ("train", "weight")}
    renamed = {name: column for name, column in columns.items() if column not in own.get(name, (name,))}
    for name in renamed.keys() - {*own, "tools", "system"}:
        made.refuse(place, f"windlass reads {name!r} of a message by that name", "rename it in the rows")
    if not renamed:
        return {}
    return {"columns": {"train" if name == "training" else name: str(column) for name, column in renamed.items()}}


def _translate_llamafactory(made: Import) -> None:
    if (stage := made.take("stage", "sft")) not in ("sft", "pt"):
        made.refuse("stage", f"is {stage}: windlass does supervised fine-tuning on text", "write stage: sft")
    rank = made.theirs.get("lora_rank", 8)
    if made.theirs.get("lora_alpha") is None and isinstance(rank, int):
        made.take("lora_alpha")
        made.set("lora.lora_alpha", 2 * rank, "LLaMA-Factory's default: 2 x lora_rank")
    target = made.take("lora_target", "all")
    names = [name.strip() for name in str(target).split(",")] if not isinstance(target, list) else target
    made.set("lora.target_modules", "all-linear" if "all" in names else names, "lora_target")
    if isinstance(in_full := made.take("additional_target"), str):
        made.set("lora.modules_to_save", [name.strip() for name in in_full.split(",")], "additional_target")
    neat, packing = made.take("neat_packing"), made.take("packing")
    if neat or packing or (packing is None and stage == "pt"):
        remark = "neat_packing" if neat else "packing; windlass isolates packed documents"
        made.set("data.packing", True, remark)
    if stage == "sft":
        made.set("data.completion_only_loss", not made.take("train_on_prompt"), "train_on_prompt")
    if made.take("enable_thinking") is False:
        made.set("data.template_kwargs", {"enable_thinking": False}, "enable_thinking")
    folder, rows = Path(str(made.take("dataset_dir", "data"))), made.take("max_samples")
    names = [name.strip() for name in str(made.take("dataset") or "").split(",") if name.strip()]
    known = _read_dataset_info(Path(made.file).parent, folder)
    entries = [_translate_llamafactory_data(made, name, known.get(name), folder, rows) for name in names]
    evaluated = [name.strip() for name in str(made.take("eval_dataset") or "").split(",") if name.strip()]
    tests = [_translate_llamafactory_data(made, name, known.get(name), folder, rows) for name in evaluated]
    _set_eval_sets(made, "eval_dataset", tests)
    _set_data_sets(made, "dataset", entries)


def _read_dataset_info(beside: Path, folder: Path) -> dict[str, Any]:
    for parent in (Path(), beside):
        file = parent / folder / "dataset_info.json"
        if file.is_file():
            try:
                return dict(json.loads(file.read_text(encoding="utf-8")))
            except (ValueError, TypeError) as error:
                raise UserError(f"is not valid JSON: {error}", str(file), "correct it, then import again") from None
    return {}


LLAMAFACTORY_DATA: Final = (
    "hf_hub_url ms_hub_url om_hub_url script_url file_name formatting subset split num_samples columns tags"
)
TAGS: Final = {"user": "user", "assistant": "assistant", "observation": "tool", "function": "call", "system": "system"}


def _translate_llamafactory_data(made: Import, name: str, known: Any, folder: Path, rows: Any) -> dict[str, Any]:
    """Return a data set by its entry in dataset_info.json, else by its path."""
    entry = known if isinstance(known, dict) else {}
    split, counts = entry.get("split") or "train", [n for n in (rows, entry.get("num_samples")) if isinstance(n, int)]
    found = {"train_split": f"{split}[:{min(counts)}]" if counts else split}
    if not entry:
        return {**found, "dataset_name_or_path": name}
    made.judge_others(f"dataset_info.json: {name}", entry, LLAMAFACTORY_DATA)
    source = entry.get("hf_hub_url") or entry.get("script_url") or str(folder / str(entry.get("file_name", name)))
    found |= {"dataset_name_or_path": source, "dataset_config_name": entry.get("subset")}
    columns, tags = ({**each} if isinstance(each, dict) else {} for each in (entry.get("columns"), entry.get("tags")))
    place = f"dataset_info.json: {name}.columns"
    if entry.get("formatting") in ("sharegpt", "openai"):
        field = columns.pop("messages", "conversations")
        made.require_roles(
            f"dataset_info.json: {name}.tags", {TAGS[t]: tags[f"{t}_tag"] for t in TAGS if f"{t}_tag" in tags}
        )
        columns |= {field: tags[f"{field}_tag"] for field in ("role", "content") if f"{field}_tag" in tags}
        return {**found, **_translate_columns(made, place, columns), "messages_field": field}
    own = {"prompt": "instruction", "query": "input", "response": "output", "system": "system", "history": "history"}
    for column in columns.keys() - own.keys():
        made.refuse(place, f"windlass has no {column!r} of such rows", "remove it if you can train without it")
    renamed = {own[name]: column for name, column in columns.items() if name in own and column != own[name]}
    return {**found, "format": "alpaca", **({"columns": renamed} if renamed else {})}


def _translate_trl(made: Import) -> None:
    split = made.take("dataset_test_split")
    if made.settings.get("train.eval_strategy", "no") != "no":
        made.set("data.val_split", split or "test", "dataset_test_split")
    marks = [made.take(key) for key in ("assistant_only_loss", "completion_only_loss")]  # of chats, of completions
    if any(marks) or marks[1] is False:
        made.set("data.completion_only_loss", any(marks), "assistant_only_loss, completion_only_loss")
    else:
        whole = "not set: TRL's loss is on all of a chat, here on what the assistant says; with "
        made.no_effect["assistant_only_loss"] = f"{whole}data.completion_only_loss: false it is on all"
    if (template := made.take("chat_template_path")) and str(template).endswith((".jinja", ".jinja2")):
        made.set("data.chat_template", template, "chat_template_path")
    elif template:
        hint = "export that tokenizer's template to a file, and name it: chat_template_path: FILE.jinja"
        made.refuse("chat_template_path", "windlass takes a template from a file, not from another tokenizer", hint)
    if entries := made.take("datasets", kind=list):
        for number, entry in enumerate(entries):
            made.judge_others(f"datasets[{number}]", entry, "path data_files name split")
        found = [
            {
                "dataset_name_or_path": entry.get("data_files") or entry.get("path"),
                "dataset_config_name": entry.get("name"),
                "train_split": entry.get("split", "train"),
            }
            for entry in entries
        ]
        _set_data_sets(made, "datasets", found)


def _translate_swift(made: Import) -> None:
    if (targets := made.take("target_modules")) is not None:
        names = _as_list(targets)
        made.set("lora.target_modules", "all-linear" if "all-linear" in names else names, "target_modules")
    if system := made.take("system"):
        made.refuse("system", "windlass adds no system message to rows", f"put {str(system)!r:.40} into the data")
    if made.theirs.get("gradient_accumulation_steps") is not None:
        made.settings["train.global_batch_size"] = None
    trained, evaluated = (
        [
            {"dataset_name_or_path": path, "train_split": f"train[:{rows}]" if rows else "train"}
            for path, _, rows in (str(name).partition("#") for name in _as_list(made.take(key)))
        ]
        for key in ("dataset", "val_dataset")
    )
    _set_eval_sets(made, "val_dataset", evaluated)
    if (scale := made.take("loss_scale", "default")) == "last_round":
        made.set("data.turns", "last", "loss_scale")
    elif scale not in ("default", "all"):
        made.refuse("loss_scale", f"is {scale}: windlass has no such weights", "write default, last_round or all")
    made.set("data.completion_only_loss", scale != "all", f"loss_scale: {scale}")
    _set_data_sets(made, "dataset", trained)


SPECIAL: Final[dict[str, Callable[[Import], None]]] = {
    "axolotl": _translate_axolotl,
    "llamafactory": _translate_llamafactory,
    "trl": _translate_trl,
    "swift": _translate_swift,
}


def _set_held_out(made: Import, share: Any, key: str) -> None:
    if not share:
        made.set("data.val_split", None, f"{key}: 0")
    elif share < 1:
        made.set("data.val_fraction", share, key)
    else:
        made.refuse(key, f"{share} rows: windlass holds out a share of the rows", f"write {key}: 0.01 or the like")


def _set_eval_sets(made: Import, key: str, found: list[dict[str, Any]]) -> None:
    """Add data sets that are only evaluated on, named by the last part of their path."""
    if found:
        sets = {Path(str(each["dataset_name_or_path"])).stem: _to_mixed_set(each) for each in found}
        made.set("data.eval", sets, key)


def _set_data_sets(made: Import, key: str, found: list[dict[str, Any]]) -> None:
    if not found:
        made.refuse(key, "names no data set", "set data.dataset_name_or_path in the run file")
    made.set("data.dataset_config_name", None, key)
    if len(found) > 1:
        paths = [str(each["dataset_name_or_path"]) for each in found]
        for i, path in enumerate(paths):  # twice the same file: each needs a name
            if path in paths[:i]:
                found[i]["name"] = f"{Path(path).stem}-{paths[:i].count(path) + 1}"
        made.set("data.mix", [_to_mixed_set(each) for each in found], key)
    for name, value in (found[0] if len(found) == 1 else {}).items():
        if value is not None:
            made.settings.pop(f"data.{name}", None)  # a set's own comes before the one of all sets
            made.set(f"data.{name}", value, key)


def _to_mixed_set(found: Mapping[str, Any]) -> dict[str, Any]:
    """Convert keys of `data` to those of one of several sets."""
    short = {"dataset_name_or_path": "path", "train_split": "split"}
    return {short.get(name, name): value for name, value in found.items() if value is not None}


def _resolve_conflicts(made: Import) -> None:
    """Resolve settings that rule each other out."""
    if made.settings.get("train.global_batch_size"):
        made.drop("train.gradient_accumulation_steps", "the whole batch is set as well")
    else:
        made.settings.pop("train.global_batch_size", None)
    if made.settings.get("train.warmup_steps") is not None:
        made.drop("train.warmup_ratio", "warmup_steps is set as well")
    if "data.val_fraction" in made.settings:
        made.settings.pop("data.val_split", None)
    for what in ("eval", "save"):
        if made.settings.get(f"train.{what}_strategy", "steps") != "steps":
            made.drop(f"train.{what}_steps", f"{what}_strategy isn't steps")
    if (
        "data.val_fraction" not in made.settings
        and not made.settings.get("data.val_split")
        and "data.eval" not in made.settings
    ):
        made.settings["train.eval_strategy"] = "no"
        made.remarks["train.eval_strategy"] = "nothing is held out to evaluate on"
        made.settings.pop("train.eval_steps", None)
    if made.settings.get("train.eval_strategy") == "no":
        made.settings.pop("train.load_best_model_at_end", None)


# --- writing ------------------


def render_run_file(made: Import) -> str:
    """Return the run file's text, each line with the key it comes from."""
    head = f"From {Path(made.file).name} of {TOOLS[made.tool]}. Next step: windlass plan run.yaml"
    if made.problems:
        head = f"INCOMPLETE: from {Path(made.file).name} of {TOOLS[made.tool]}: some keys have no counterpart."
    settings, remarks = (
        {**made.settings, "layout.name": "auto"},
        {**made.remarks, "layout.name": "the fastest that fits"},
    )
    return render_settings(settings, remarks, head)


def list_no_effect(made: Import) -> str:
    """Return their keys that have no effect here, by reason."""
    by_reason: dict[str, list[str]] = {}
    for key, why in made.no_effect.items():
        by_reason.setdefault(why, []).append(key)
    wrap = textwrap.TextWrapper(78, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
    paragraphs = [f"  {why}:\n{wrap.fill(', '.join(names))}" for why, names in by_reason.items()]
    return "\n".join([f"keys of {made.file} without effect here: {len(made.no_effect) or 'none'}", *paragraphs])


def _validate(made: Import) -> None:
    """Check the values with the run file's own rules."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(render_run_file(made), encoding="utf-8")
        try:
            read_run_file(path)
        except UserError as error:
            for problem in error.problems:
                key = problem.where.rpartition(": ")[2]
                theirs = made.remarks.get(key, "")
                line = f":{made.lines[theirs]}" if theirs in made.lines else ""
                where = f"{made.file}{line}: {theirs or key}"
                made.problems.append(Problem(f"as {key}, it {problem.problem}", where, problem.hint))
