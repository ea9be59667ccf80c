"""Manifests as text: YAML by the library, comments in between by us."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

OTHER_LINE_ENDS = "\x85\u2028\u2029"  # the library writes them plain, and reads them back as a space


@dataclass(frozen=True, slots=True)
class Note:
    """A value and why it is there."""

    value: Any
    why: str


class _Dumper(yaml.SafeDumper):
    """Text of several lines as a block that can be read; as quoted text where a block can't hold it."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    if any(end in value for end in OTHER_LINE_ENDS):
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def plain(tree: Any) -> Any:
    """The manifest without its notes: what a server is given."""
    if isinstance(tree, Note):
        return plain(tree.value)
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    return [plain(value) for value in tree] if isinstance(tree, list) else tree


def write(documents: Sequence[Any], head: str = "") -> str:
    """All of them in one file."""
    heading = "".join(f"# {line}".rstrip() + "\n" for line in head.splitlines())
    return heading + "---\n".join("\n".join(_lines(document, 0)) + "\n" for document in documents)


def _lines(tree: dict[str, Any] | list[Any], indent: int) -> list[str]:
    pad = " " * indent
    lines: list[str] = []
    for key, value in tree.items() if isinstance(tree, dict) else ((None, item) for item in tree):
        while isinstance(value, Note):
            lines += [f"{pad}# {line}" for line in value.why.splitlines()]
            value = value.value
        name = "-" if key is None else f"{_scalar(key)}:"
        if isinstance(value, dict | list) and value:
            inner = _lines(value, indent + 2)
            if key is None and not inner[0].lstrip().startswith("#"):
                lines += [f"{pad}- {inner[0].lstrip()}", *inner[1:]]
            else:
                lines += [f"{pad}{name}", *inner]
        else:
            first, *rest = _scalar(value).split("\n")
            # Only "\n" parts lines here: other breaks that Unicode knows are escaped by the library.
            lines += [f"{pad}{name} {first}", *(f"{pad}{line}" if line else "" for line in rest)]
    return lines


def _scalar(value: Any) -> str:
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=1 << 30)
    return text.removesuffix("\n").removesuffix("\n...")
