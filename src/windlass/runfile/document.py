"""YAML text -> plain values with the line of every path. Only what a run file needs; everything else is an error.

PyYAML's scanner and parser do the reading; the values are put together here because its constructor drops line
numbers, lets the last of two equal keys win, expands aliases without limit, and takes 1e-4 for text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from windlass.errors import Problem, UserError
from windlass.runfile.names import close_names

MAX_BYTES = 1 << 20
MAX_NODES = 20_000
MAX_DEPTH = 32

Steps = tuple[str | int, ...]

# YAML 1.2's numbers with 1.1's underscores. A leading zero (octal once) and a number of hundreds of digits are text.
_INT = re.compile(r"[-+]?(0|[1-9][0-9_]{0,17})|0x[0-9a-fA-F]{1,15}|0o[0-7]{1,20}")
_FLOAT = re.compile(r"(?=.*[.eE])[-+]?(\.[0-9][0-9_]*|(0|[1-9][0-9_]*)(\.[0-9_]*)?)([eE][-+]?[0-9]{1,4})?")
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_TRUE, _FALSE = {"true", "yes", "on"}, {"false", "no", "off"}  # YAML 1.1: transformers' users write eval_strategy: no
# Control characters and lone surrogates can't be in a path, an argument or a report.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")
_CORE = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map")}


def scalar(text: str) -> Any:
    """What plain, unquoted text means."""
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in (text.lower(), text.capitalize(), text.upper()) and text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    if _INT.fullmatch(text):
        return int(text, 0) if "x" in text or "o" in text else int(text)
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return float(text.replace(".", "").lower()) if _SPECIAL.fullmatch(text) else text


def unprintable(text: str) -> str:
    """The first character that no setting may hold, as an escape; empty if there is none."""
    found = _UNPRINTABLE.search(text)
    return ascii(found.group())[1:-1] if found else ""


def dotted(steps: Steps) -> str:
    """('lora', 'target_modules', 1) -> lora.target_modules[1]"""
    text = ""
    for step in steps:
        text += f"[{step}]" if isinstance(step, int) else f".{step}"
    return text.removeprefix(".")


@dataclass
class Document:
    """The values of a YAML file, the line of each path, and what is wrong with its form."""

    file: str
    value: Any = None
    lines: dict[Steps, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def place(self, line: int, steps: Steps = ()) -> str:
        return f"{self.file}:{line}: {dotted(steps)}" if steps else f"{self.file}:{line}"


def load(path: Path) -> Document:
    return parse(_text(path), str(path))


def parse(text: str, file: str) -> Document:
    """Values and lines of YAML text. Raises where there are none; problems of form are collected in the document."""
    document = Document(file)
    try:
        composer = _Composer(yaml.parse(text, Loader=yaml.SafeLoader), document)
        document.value = composer.whole()
    except yaml.YAMLError as error:
        raise _syntax(error, file, text) from error
    except (ValueError, OverflowError) as error:  # escapes and directives with numbers beyond what Python takes
        raise UserError(f"is not YAML: {error}", file, "look for unusual escapes or % lines") from error
    return document


def _text(path: Path) -> str:
    try:
        if path.is_dir():
            raise UserError("is a folder, not a run file", str(path), _inside(path))
        if path.exists() and not path.is_file():
            raise UserError("is not a regular file", str(path), "save the run file first, then give its path")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise UserError("no such file", str(path), _neighbours(path)) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(f"can't be read: {reason}", ascii(str(path))[1:-1], "check the path and its rights") from error
    return _decoded(raw, str(path))


def _decoded(raw: bytes, file: str) -> str:
    if len(raw) > MAX_BYTES:
        raise UserError("is larger than 1 MiB", file, "a run file has some hundred lines; is this a data file?")
    if not raw.strip():
        raise UserError("is empty", file, "`windlass init > run.yaml` writes a commented one to start from")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        hint = "save it as UTF-8" if b"\0" not in raw[:4096] else "this looks like a binary file, not a run file"
        raise UserError(f"is not UTF-8 text (byte {raw[error.start]:#04x})", f"{file}:{line}", hint) from error
    if "\0" in text:
        raise UserError("is a binary file, not YAML", file, "give the path of the run file")
    return text


def _inside(folder: Path) -> str:
    files = sorted(path.name for path in folder.glob("*.y*ml"))[:5]
    return f"in it there is {', '.join(files)}" if files else "give the path of a YAML file"


def _neighbours(path: Path) -> str:
    try:
        there = [str(other.name) for other in path.parent.iterdir() if other.suffix in (".yaml", ".yml")]
    except (OSError, ValueError):
        return f"the folder {path.parent} isn't there either"
    close = close_names(path.name, there) or sorted(there)[:3]
    return f"nearest: {', '.join(close)}" if close else "`windlass init > run.yaml` writes one to start from"


def _syntax(error: yaml.YAMLError, file: str, text: str) -> UserError:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    position = getattr(error, "position", None)
    line = mark.line + 1 if mark else text[:position].count("\n") + 1 if isinstance(position, int) else None
    hint = "YAML wants `key: value` lines, indented alike, and quotes around text with `: `, `#` or brackets"
    if "\\t" in repr(what) or (mark and "\t" in _line(text, mark.line).split("#")[0]):
        what, hint = "a tab where YAML wants spaces", "indent with spaces"
    return UserError(f"is not YAML: {what}", f"{file}:{line}" if line else file, hint)


def _line(text: str, number: int) -> str:
    lines = text.splitlines()
    return lines[number] if number < len(lines) else ""


@dataclass
class _Anchor:
    value: Any
    size: int


class _Composer:
    """Builds values from parser events. Recursion is bounded by MAX_DEPTH, work by MAX_NODES."""

    def __init__(self, events: Iterator[Any], document: Document) -> None:
        self.events = events
        self.document = document
        self.anchors: dict[str, _Anchor] = {}
        self.nodes = 0

    def whole(self) -> Any:
        next(self.events)  # the stream begins
        event = next(self.events)
        if isinstance(event, yaml.StreamEndEvent):
            raise UserError("holds nothing but comments", self.document.file, "`windlass init` writes a full one")
        value = self.node(next(self.events), ())
        next(self.events)  # the document ends
        event = next(self.events)
        if not isinstance(event, yaml.StreamEndEvent):
            place = self.document.place(event.start_mark.line + 1)
            raise UserError("a second document begins here", place, "one run per file: take out the `---` line")
        return value

    def node(self, event: Any, steps: Steps) -> Any:
        line = event.start_mark.line + 1
        self.document.lines.setdefault(steps, line)
        self._count(1, line)
        if len(steps) > MAX_DEPTH:
            raise UserError(f"is nested more than {MAX_DEPTH} deep", self.document.place(line), "flatten it")
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, steps, line)
        self._tag(event, steps, line)
        before = self.nodes
        if isinstance(event, yaml.ScalarEvent):
            value = self._scalar(event, steps, line)
        else:
            value = self._list(steps) if isinstance(event, yaml.SequenceStartEvent) else self._mapping(steps)
        if event.anchor:
            self.anchors[event.anchor] = _Anchor(value, self.nodes - before + 1)
        return value

    def _count(self, size: int, line: int) -> None:
        self.nodes += size
        if self.nodes > MAX_NODES:
            what = f"holds more than {MAX_NODES:,} values once its aliases are written out"
            raise UserError(what, self.document.place(line), "a run file has some hundred; take the aliases out")

    def _alias(self, event: Any, steps: Steps, line: int) -> Any:
        anchor = self.anchors.get(event.anchor)
        if anchor is None:
            place = self.document.place(line, steps)
            raise UserError(f"the alias *{event.anchor} names nothing that stands before it", place, "write it out")
        self._count(anchor.size, line)
        self._lines(anchor.value, steps, line)
        return anchor.value

    def _lines(self, value: Any, steps: Steps, line: int) -> None:
        self.document.lines.setdefault(steps, line)
        if len(steps) > MAX_DEPTH:
            raise UserError(f"is nested more than {MAX_DEPTH} deep", self.document.place(line), "flatten it")
        inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in inside:
            self._lines(item, (*steps, key), line)

    def _tag(self, event: Any, steps: Steps, line: int) -> None:
        if event.tag not in (None, "!") and event.tag not in _CORE:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            self._problem(f"the tag {tag} has no meaning in a run file", line, steps, "take it out")

    def _scalar(self, event: Any, steps: Steps, line: int) -> Any:
        bad = unprintable(event.value)
        if bad:
            self._problem(f"holds the character {bad}, which can't be printed", line, steps, "take it out")
            return ""
        return scalar(event.value) if event.implicit[0] and event.style is None else event.value

    def _list(self, steps: Steps) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            items.append(self.node(event, (*steps, len(items))))
        return items

    def _mapping(self, steps: Steps) -> dict[str, Any]:
        items: dict[str, Any] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key, line = self._key(event, steps), event.start_mark.line + 1
            if key in items:
                first = self.document.place(self.document.lines[(*steps, key)])
                what = f"stands there twice, first at {first}"
                self._problem(what, line, (*steps, key), "YAML would let the last one win; keep one of them")
            else:
                self.document.lines[(*steps, key)] = line
            items[key] = self.node(next(self.events), (*steps, key))
        return items

    def _key(self, event: Any, steps: Steps) -> str:
        line = event.start_mark.line + 1
        if not isinstance(event, yaml.ScalarEvent):
            raise UserError("a key must be plain text", self.document.place(line, steps), "write `key: value`")
        self._count(1, line)
        if event.anchor:
            self.anchors[event.anchor] = _Anchor(event.value, 1)
        if event.value == "<<" and event.style is None:
            self._problem("merge keys (<<) are not taken", line, steps, "write the keys out where they belong")
        key = self._scalar(event, steps, line)
        if not isinstance(key, str):
            what = f"the key {event.value or 'null'} is not text to YAML"
            self._problem(what, line, steps, f'write it as "{event.value}"')
        return str(event.value)

    def _problem(self, what: str, line: int, steps: Steps, hint: str) -> None:
        self.document.problems.append(Problem(what, self.document.place(line, steps), hint))
