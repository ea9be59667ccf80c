"""Settings to the text of a run file, each line with where it is from or why it was chosen."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from windlass.runfile.document import scalar
from windlass.runfile.fields import RunFile
from windlass.runfile.reference import SECTIONS, keys


def text_of(settings: Mapping[str, Any], remarks: Mapping[str, str], head: str) -> str:
    """`settings`: key -> value; `remarks` by key, for a comment behind the line."""
    lines, section = [f"# {head}"], ""
    ordered = [key for key in keys(RunFile) if key in settings]
    for key in sorted(ordered, key=lambda key: SECTIONS.index(key.partition(".")[0])):
        top, _, name = key.partition(".")
        lines += ["", f"{top}:"] if top != section else []
        section = top
        text, remark = f"  {name}: {as_yaml(settings[key])}", remarks.get(key, "")
        lines.append(text if remark in ("", name) else f"{text}  # {remark}")
    return "\n".join([*lines, ""])


def as_yaml(value: Any) -> str:
    """A value on one line, as `document.scalar` reads it."""
    if isinstance(value, list):
        return f"[{', '.join(map(as_yaml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {as_yaml(inner)}" for key, inner in value.items()) + "}"
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    plain = re.fullmatch(r"[A-Za-z0-9_./~][-A-Za-z0-9_./~+ ]*", value) and scalar(value) == value
    return str(value) if plain else json.dumps(value, ensure_ascii=False)
