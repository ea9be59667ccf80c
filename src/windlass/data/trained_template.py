"""The chat template that a run's rows were written by, for whoever asks the trained model later."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from windlass.data.chat import ChatTemplate
from windlass.files import read_json, write_json

JINJA: Final = "chat_template.jinja"
SETTINGS: Final = ("tokenizer_config.json", "chat_template.json")  # where older tools keep the template


def find_trained_template(templates: Iterable[tuple[str, ChatTemplate | None]]) -> tuple[dict[str, str], list[str]]:
    """Return the template of the first set that has one, with its variables' values, and what to say of the others."""
    texts: dict[str, str] = {}
    sources: dict[str, str] = {}
    for name, template in templates:
        if template is not None:
            text = write_defaults(template.template, template.kwargs)
            texts.setdefault(text, name)
            sources.setdefault(text, template.source)
    if not texts:
        return {}, []
    first, *others = texts
    notes = [
        f"{texts[text]} is written by {sources[text]}, and {texts[first]} by {sources[first]}: the adapter's tokenizer "
        f"gets that of {texts[first]}"
        for text in others
    ]
    return {"source": sources[first], "text": first}, notes


def write_defaults(template: str, variables: Mapping[str, Any]) -> str:
    """Return the template with the values of the variables that it was rendered with as their defaults."""
    values = json.loads(json.dumps(dict(variables), default=str))
    lines = [
        f"{{% if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}" for name, value in values.items()
    ]
    return "\n".join([*lines, template])  # transformers drops a line's end after a block


def set_template(tokenizer: Any, trained: Mapping[str, str]) -> None:
    """Make the tokenizer ask as it was trained."""
    if trained:
        own = tokenizer.chat_template
        tokenizer.chat_template = {**own, "default": trained["text"]} if isinstance(own, dict) else trained["text"]


def has_template(folder: Path, trained: Mapping[str, str]) -> bool:
    """Return whether a tokenizer's files have this template already."""
    if (folder / JINJA).is_file():
        return (folder / JINJA).read_text(encoding="utf-8") == trained["text"]
    return any(read_json(folder / name).get("chat_template") == trained["text"] for name in SETTINGS)


def write_template(folder: Path, trained: Mapping[str, str]) -> None:
    """Replace the template among a tokenizer's files."""
    if not trained:
        return
    (folder / JINJA).write_text(trained["text"], encoding="utf-8")
    for name in SETTINGS:
        settings = read_json(folder / name)
        if isinstance(settings.get("chat_template"), str):
            write_json(folder / name, settings | {"chat_template": trained["text"]})
