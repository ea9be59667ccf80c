"""The model card: what was trained, on what, and how."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import jinja2

from windlass.export.source import AdapterSource
from windlass.files import read_json, read_json_lines
from windlass.model import Base
from windlass.run_folder import DATA, EVENTS
from windlass.weights.same_base import CHAT_TEMPLATE, describe_quantization, read_recorded_base

SETTINGS: Final = {
    "lora": ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "target_modules"),
    "data": ("dataset_name_or_path", "dataset_config_name", "train_split", "max_length", "packing"),
    "train": (
        *("learning_rate", "lr_scheduler_type", "warmup_ratio", "warmup_steps", "optim", "weight_decay"),
        *("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "seed"),
    ),
}
LM_EVAL: Final = "0.4.13"  # the version that was tried
TRAINED: Final = "## How it was trained"
MOST_CHARACTERS: Final = 200  # of a setting's value


def write_card(
    source: AdapterSource,
    to: Path,
    base: str,
    *,
    dtype: str | None,
    merged: bool = False,
    other_base: str = "",
    openers: Sequence[str] = (),
    place: str = "",
    commands: Sequence[str] = (),
    evaluation: str = "",
) -> None:
    """Write the card. The head of its template, card.md.j2, describes what is given."""
    evaluations: dict[int, tuple[float, float | None]] = {}  # loss, and share of pairs whose chosen answer is preferred
    if source.run_folder and (source.run_folder / EVENTS).is_file():
        for event in read_json_lines(source.run_folder / EVENTS):
            if isinstance(event.get("eval_loss"), float):
                evaluations[event["step"]] = event["eval_loss"], event.get("eval_rewards/accuracies")
    run: dict[str, Any] = source.manifest.get("run", {})
    objective = (run.get("train") or {}).get("objective", "sft").replace("sft", "")
    settings: dict[str, Any] = {}
    if run:
        for section, keys in SETTINGS.items():
            settings |= {f"{section}.{key}": (run.get(section) or {}).get(key) for key in keys}
        if objective:
            settings["train.objective"] = objective
            settings |= {f"{objective}.{key}": value for key, value in run[objective].items()}
    else:  # an adapter from another tool has only its own config
        settings = {key: source.config.get(key) for key in ("r", "lora_alpha", "target_modules")}
    recorded = read_recorded_base(source.folder)
    settings["chat template"] = recorded.get(CHAT_TEMPLATE, {}).get("source")
    settings["data.template_kwargs"] = (run.get("data") or {}).get("template_kwargs")
    settings["versions"] = [f"{name} {version}" for name, version in (source.manifest.get("versions") or {}).items()]
    template = jinja2.Template(Path(__file__).with_name("card.md.j2").read_text("utf-8"), keep_trailing_newline=True)
    text = template.render(
        base=base,
        dtype=dtype,
        merged=merged,
        other_base=other_base,
        openers=openers,
        place=place,
        commands=commands,
        evaluation=evaluation,
        trained_on=describe_quantization(recorded.get("base_quantisation", {})),
        data=public_name((run.get("data") or {}).get("dataset_name_or_path")),
        name=run.get("name") or source.folder.name,
        why=source.why,
        evaluations=sorted(evaluations.items()),
        objective=objective,
        began_with="/".join(Path((run.get("lora") or {}).get("adapter") or "").parts[-2:]),
        pairs=(read_json(source.run_folder / DATA).get("sequences") or {}).get("train") if source.run_folder else None,
        settings={key: _format_cell(key, value) for key, value in settings.items() if value not in (None, [], {})},
    )
    (to / "README.md").write_text(text, encoding="utf-8")


def add_note(to: Path, note: str) -> None:
    """Add a sentence to a card that is written."""
    card = (to / "README.md").read_text(encoding="utf-8")
    note = f"{note[0].upper()}{note[1:]}.\n\n"
    (to / "README.md").write_text(card.replace(TRAINED, note + TRAINED, 1), encoding="utf-8")


def describe_evaluation(source: AdapterSource, base: Base | None, arguments: str) -> str:
    """Return the command of lm-evaluation-harness, with prompts as trained on, or that it doesn't open this model."""
    if base is None or base.wrapper is None:
        command = f"lm_eval --model hf --model_args {arguments} --tasks hellaswag"
        if CHAT_TEMPLATE not in read_recorded_base(source.folder):
            return command
        return f"{command} --apply_chat_template".replace("peft=.", "peft=.,tokenizer=.")
    architecture = base.wrapper.architecture
    return f"lm-eval {LM_EVAL} doesn't open it: it uses `AutoModelForCausalLM`, which has no `{architecture}`."


def _format_cell(key: str, value: Any) -> str:
    if key.endswith("name_or_path"):
        value = public_name(value)
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    if len(text) > MOST_CHARACTERS:
        text = f"{text[:MOST_CHARACTERS]}…"
    return text.replace("|", "\\|")


def public_name(path: str | None) -> str:
    """Return the name of a data set or model; of a local path, its last part."""
    text = path or ""
    return Path(text).name if Path(text).is_absolute() or text.startswith(("~", ".")) else text
