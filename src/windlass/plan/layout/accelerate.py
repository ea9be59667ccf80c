"""An Accelerate YAML, read key by key. It is an input: every key has a fate, and no key is dropped in silence."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from windlass.errors import Problem, UserError, raise_all
from windlass.plan.layout.fate import ANY, AS_READ, REFUSED, Fate, Key, no_effect
from windlass.plan.layout.keys import FATES, find
from windlass.runfile.document import Document, parse

LIMIT_BYTES = 256 * 1024  # such files have about 1 kB; a parser in Python needs a second for a quarter of a MB
TRUE = ("true", "yes", "y", "t", "on", "1")  # Accelerate's own lists
FALSE = ("false", "no", "n", "f", "off", "0")


@dataclass(frozen=True, slots=True)
class Entry:
    """One key as it stands in the file."""

    key: Key
    value: object
    where: str  # fsdp.yaml:12: fsdp_config.fsdp_version
    fate: Fate

    @property
    def path(self) -> str:
        """The key as it was written there."""
        return self.where.rpartition(" ")[2].removeprefix("--")


@dataclass(frozen=True, slots=True)
class Wish:
    """What the file asks of one field of the demand."""

    value: Any
    where: str


@dataclass(frozen=True, slots=True)
class AccelerateFile:
    """`wishes` are the settings that matter here: nodes, ranks, precision, name, wrap, offload …"""

    path: Path | None  # None: only the launcher's command line
    entries: tuple[Entry, ...]
    wishes: Mapping[str, Wish]


@dataclass(frozen=True, slots=True)
class _Item:
    """One key and value of a mapping node. `children` where the value is a mapping."""

    name: str
    where: str
    value: object
    children: tuple[_Item, ...] = ()


def read_accelerate(path: Path, options: Sequence[tuple[str, str]] = (), *, refuse: bool = True) -> AccelerateFile:
    """The file, and what the launcher's command line said besides: `("num_machines", "2")`.

    `refuse=False` keeps refused keys as entries, to be explained.
    """
    document = _document(path)
    return _judge(path, _items(document), options, refuse, document.problems)


def read_options(options: Sequence[tuple[str, str]]) -> AccelerateFile:
    """A launcher that was given no file, only options."""
    return _judge(None, (), options, True, [])


def _judge(
    path: Path | None, items: tuple[_Item, ...], options: Sequence[tuple[str, str]], refuse: bool, form: list[Problem]
) -> AccelerateFile:
    problems = [*form]
    entries: list[Entry] = []
    for item in items:
        _enter(item, "", entries, problems)
    for name, text in options:
        _option(name, text, entries, problems)
    entries = _idle(entries)
    if refuse:
        _refuse(entries, problems)
    wishes = _wishes(entries, problems)
    if path is not None and not problems and "distributed_type" not in {entry.key.name for entry in entries}:
        problems.append(
            Problem("distributed_type is missing", str(path), "write distributed_type: FSDP: Accelerate demands it")
        )
    raise_all(problems)
    return AccelerateFile(path, tuple(entries), MappingProxyType(wishes))


# --- the file as keys with lines ------------------------------------------------------------------------------------


def _document(path: Path) -> Document:
    where = str(path)
    try:
        with path.open("rb") as stream:
            content = stream.read(LIMIT_BYTES + 1)  # not the size: a device or a pipe has none
        if len(content) > LIMIT_BYTES:
            raise UserError(f"larger than {LIMIT_BYTES // 1024} kB: not an Accelerate file", where, "give fsdp.yaml")
        text = content.decode("utf-8")
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where, "give the path of an Accelerate YAML") from None
    except UnicodeDecodeError:
        raise UserError("is not text", where, "give the path of an Accelerate YAML") from None
    if not re.search(r"^\s*[^#\s]", text, re.MULTILINE):
        raise UserError("is empty", where, "`accelerate config` writes such a file")
    document = parse(text, where)
    if not isinstance(document.value, dict):
        raise_all(document.problems)
        raise UserError("is not a mapping of keys to values", f"{where}:1", "write key: value")
    return document


def _items(document: Document) -> tuple[_Item, ...]:
    """Two levels are all that Accelerate knows; what lies deeper is a value of the wrong kind."""
    items = []
    for name, value in document.value.items():
        inner = value.items() if isinstance(value, dict) else ()
        children = tuple(_Item(key, document.place(_line(document, name, key), (name, key)), v) for key, v in inner)
        items.append(_Item(name, document.place(_line(document, name), (name,)), value, children))
    return tuple(items)


def _line(document: Document, *steps: str) -> int:
    return document.lines.get(steps, 1)


# --- keys to fates --------------------------------------------------------------------------------------------------


def _enter(item: _Item, section: str, entries: list[Entry], problems: list[Problem]) -> None:
    key = find(section, item.name)
    if key is None:
        problems.append(_unknown(item.name, section, item.where))
        return
    if key.kind == "section":
        if item.value is not None and not isinstance(item.value, dict):
            problems.append(Problem(f"is {item.value!r}, not keys and values", item.where, "indent its keys below it"))
            return
        entries.append(Entry(key, None, item.where, key.fates[ANY]))
        for child in item.children:
            _enter(child, key.name, entries, problems)
        return
    _settle(key, item.value, item.where, entries, problems)


def _settle(key: Key, raw: object, where: str, entries: list[Entry], problems: list[Problem]) -> None:
    value, wrong = _typed(raw, key)
    fate = None if wrong else key.fate(value)
    if wrong:
        problems.append(Problem(f"is {raw!r}, not {wrong}", where, f"{key.name}: {key.about}"))
    elif fate is None:
        words = [word for word in key.fates if word != ANY]
        near = difflib.get_close_matches(str(value).upper(), words, 1, 0.6)
        meant = f"did you mean {near[0]}? " if near else ""
        problems.append(Problem(f"{raw!r} is none of its values", where, f"{meant}it takes {', '.join(words)}"))
    else:
        entries.append(Entry(key, value, where, fate))


def _typed(value: object, key: Key) -> tuple[object, str]:
    """The value as its key means it, or what it should have been."""
    if value is None or key.kind == "any":
        return value, ""
    if key.kind == "names" and isinstance(value, list):
        return ",".join(map(str, value)), ""
    if isinstance(value, list | dict):
        return value, "a single value"
    text = str(value).strip()
    if key.kind == "bool":
        word = text.lower()
        return (word in TRUE, "") if word in TRUE or word in FALSE else (value, "true or false")
    if key.kind == "int":
        return (int(text), "") if re.fullmatch(r"-?\d{1,9}", text) else (value, "a whole number")
    if value is False and "NO" in key.fates:
        return "no", ""  # YAML 1.1 reads a bare `no` as false
    return text, ""


def _unknown(name: str, section: str, where: str) -> Problem:
    """Misspelt, or in the wrong place."""
    homes = [home for home, names in FATES.items() if name in names and home != section]
    if homes:
        place = f"below {homes[0]}:, indented" if homes[0] else "at the top, not indented"
        return Problem("stands in the wrong place", where, f"write it {place}")
    if section == "" and (key := find("fsdp_config", f"fsdp_{name.removeprefix('fsdp_')}")):
        return Problem("stands in the wrong place", where, f"write {key.name} below fsdp_config:, indented")
    near = nearest(name, section)
    hint = f"did you mean {near}?" if near else f"`windlass explain` knows the keys of {section or 'such a file'}"
    return Problem("no such key: Accelerate would ignore it in silence" if section else "no such key", where, hint)


def nearest(name: str, section: str) -> str:
    """The key that was probably meant, its own section first."""
    for names in (list(FATES.get(section, {})), [n for home in FATES.values() for n in home]):
        if close := difflib.get_close_matches(name, names, 1, 0.7):
            return close[0]
    return ""


def _option(name: str, text: str, entries: list[Entry], problems: list[Problem]) -> None:
    """One option of `accelerate launch`. Those that are not keys of a file concern the launcher alone."""
    where = f"accelerate launch --{name}"
    key = next((names[name] for names in FATES.values() if name in names and names[name].name == name), None)
    if key is not None and key.kind != "section":
        _settle(key, text, where, entries, problems)


def _idle(entries: list[Entry]) -> list[Entry]:
    """Where the file does not say FSDP, Accelerate never looks at what it says about FSDP."""
    kind = next((str(entry.value).upper() for entry in entries if entry.key.name == "distributed_type"), "FSDP")
    if kind == "FSDP":
        return entries
    idle = no_effect(f"read only with distributed_type: FSDP, and it is {kind}")
    return [
        replace(entry, fate=idle) if entry.key.section in ("fsdp_config", "parallelism_config") else entry
        for entry in entries
    ]


def _refuse(entries: Sequence[Entry], problems: list[Problem]) -> None:
    for entry in entries:
        if entry.fate.verdict == REFUSED:
            hint = entry.fate.hint or f"write in the run file: {deepspeed_equal(entries)}"
            problems.append(Problem(f"{entry.value} is refused: {entry.fate.because}", entry.where, hint))


def deepspeed_equal(entries: Sequence[Entry]) -> str:
    """The layout that does what the DeepSpeed settings of the file ask for."""
    settings = {
        entry.key.name: str(entry.value).lower() for entry in entries if entry.key.section == "deepspeed_config"
    }
    # Accelerate's own default is stage 2.
    name = "full-shard" if settings.get("zero_stage", "2") == "3" else "resident"
    offload = name == "full-shard" and settings.get("offload_param_device", "none") not in ("none", "nvme")
    return f"layout: {{name: {name}, offload: true}}" if offload else f"layout: {name}"


def _wishes(entries: Sequence[Entry], problems: list[Problem]) -> dict[str, Wish]:
    """Every field once. Two keys, or the file and the command line, that want different things are a problem."""
    wishes: dict[str, Wish] = {}
    for entry in entries:
        for name, value in entry.fate.sets:
            wish = Wish(entry.value if value is AS_READ else value, entry.where)
            earlier = wishes.setdefault(name, wish)
            if earlier.value != wish.value:
                problems.append(
                    Problem(
                        f"asks for {name} {wish.value}, but {earlier.where} asks for {earlier.value}",
                        wish.where,
                        "make the two agree, or keep one of them",
                    )
                )
    return wishes
