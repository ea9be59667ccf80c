"""Read an Accelerate FSDP YAML or `accelerate launch`'s environment and decide how each of its keys is treated."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from windlass.errors import Problem, UserError, raise_all
from windlass.runfile.document import load_document

HONOURED, TRANSLATED, NO_EFFECT, REFUSED = "honoured", "translated", "no effect", "refused"
ANY = "*"  # in Key.fates: every value without its own row; in Fate.sets: the value as read
TRUE, FALSE = ("true", "yes", "y", "t", "on", "1"), ("false", "no", "n", "f", "off", "0")  # Accelerate's own lists


@dataclass(frozen=True, slots=True)
class Fate:
    """How a value is treated. `because` completes: honoured: …, translated to …, no effect: …, refused: …"""

    verdict: str
    because: str
    hint: str = ""
    sets: Mapping[str, object] = field(default_factory=dict)  # fields of the layout request


@dataclass(frozen=True, slots=True)
class Key:
    """A key that Accelerate knows, or one that users often write although Accelerate doesn't know it."""

    name: str  # fsdp_offload_params; ending in *: every key with this prefix
    section: str  # the mapping it belongs in: fsdp_config; empty at the top level
    about: str
    kind: str  # bool, int, word, text, names, section, any
    fates: Mapping[str, Fate]  # by upper-case value: TRUE, FULL_SHARD, 2; ANY for all others

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}" if self.section else self.name


class Keys(NamedTuple):
    every: list[Key]
    spelled: dict[str, dict[str, Key]]  # by section, then by every spelling
    launcher: dict[str, tuple[Key, str]]  # by variable: its key, and the launcher's default


@lru_cache
def load_key_table() -> Keys:
    """Read accelerate_keys.toml, which documents its own format."""
    found = Keys([], {}, {})
    table = tomllib.loads(Path(__file__).with_name("accelerate_keys.toml").read_text(encoding="utf-8"))
    for section, rows in table.items():
        section = section.removeprefix("top")
        spellings = found.spelled.setdefault(section, {})
        # In these two sections, Accelerate adds the prefix to keys that lack it.
        prefix = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_"}.get(section, "")
        for title, row in rows.items():
            names, about, kind = row.pop("names", title), row.pop("about"), row.pop("kind", "any")
            variable, is_launched, default = row.pop("variable", "").partition("=")
            fates: dict[str, Fate] = {}
            for values, (fate, *rest) in row.items():
                verdict, _, because = fate.partition(": ")
                sets = next((cell for cell in rest if isinstance(cell, dict)), {})
                hint = next((cell for cell in rest if isinstance(cell, str)), "")
                fates |= dict.fromkeys(values.split(", "), Fate(verdict, because, hint, sets))
            for name in names.split():
                key = Key(name, section, about, kind, fates)
                found.every.append(key)
                if not name.endswith("*"):
                    spellings |= {name: key, name.removeprefix(prefix): key}
                if is_launched:
                    found.launcher[variable or name.upper()] = key, default
    return found


def find_key(section: str, name: str) -> Key | None:
    """Return the key with this name in this section, or None."""
    alike = (
        k
        for k in load_key_table().every
        if k.section == section and k.name.endswith("*") and name.startswith(k.name[:-1])
    )
    return load_key_table().spelled.get(section, {}).get(name) or next(alike, None)


def read_launcher_settings(environ: Mapping[str, str]) -> Iterator[tuple[Key, str, str]]:
    """Yield key, value and variable of each setting of `accelerate launch` (1.15), if it started this process."""
    if "ACCELERATE_MIXED_PRECISION" not in environ:
        return
    for engine in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if environ.get(f"ACCELERATE_USE_{engine}", "").lower() == "true":
            yield load_key_table().spelled[""]["distributed_type"], engine, f"ACCELERATE_USE_{engine}"
    for variable, (key, default) in load_key_table().launcher.items():
        value = environ.get(variable, "")
        if value and value.lower() != default.lower():
            yield key, value, variable
    world, local = environ.get("WORLD_SIZE", ""), environ.get("LOCAL_WORLD_SIZE", "")
    if world.isdigit() and local.isdigit() and int(local):
        yield load_key_table().spelled[""]["num_machines"], str(max(1, int(world) // int(local))), "WORLD_SIZE"
        yield load_key_table().spelled[""]["num_processes"], world, "WORLD_SIZE"


@dataclass(frozen=True, slots=True)
class Entry:
    """One key with its value in the file or in the environment."""

    key: Key
    value: object
    where: str  # fsdp.yaml:12: fsdp_config.fsdp_version
    path: str  # the key as written there
    fate: Fate


@dataclass(frozen=True, slots=True)
class Wish:
    """The value that the file gives to one field of the layout request."""

    value: Any
    where: str


@dataclass(frozen=True, slots=True)
class AccelerateFile:
    """Accelerate's settings. `wishes` are those that windlass uses: nodes, ranks, precision, name, wrap, offload …"""

    path: Path | None  # None: only the launcher's environment
    entries: tuple[Entry, ...]
    wishes: Mapping[str, Wish]
    notes: tuple[str, ...] = ()


def load_accelerate(path: Path | None, environ: Mapping[str, str]) -> AccelerateFile | None:
    """Return this run's Accelerate settings, from `--accelerate`'s file, the launcher's environment, both or neither.

    `accelerate launch` passes no file to its ranks, only variables: its file, overridden by its command line.
    """
    return read_accelerate(path, environ) if path or any(read_launcher_settings(environ)) else None


def read_accelerate(
    path: Path | None, environ: Mapping[str, str] = MappingProxyType({}), *, refuse: bool = True
) -> AccelerateFile:
    """Read Accelerate settings. `refuse=False` keeps refused keys as entries, so that they can be explained."""
    problems: list[Problem] = []
    entries = _read_file(path, problems) if path else []
    launched = [
        entry
        for key, text, variable in read_launcher_settings(environ)
        if (entry := _read_value(key, text, f"accelerate launch: {variable}", variable, problems))
    ]
    problems += [
        Problem(f"{entry.value} is refused: {entry.fate.because}", entry.where, entry.fate.hint)
        for entry in (*entries, *launched)
        if refuse and entry.fate.verdict == REFUSED
    ]
    wishes, overriding = _read_wishes(entries, problems), _read_wishes(launched, problems)
    raise_all(problems)
    notes = [
        f"{wishes[name].where}: {wishes[name].value} is overridden by {wish.where}={wish.value}: its flags win"
        for name, wish in overriding.items()
        if name in wishes and wishes[name].value != wish.value
    ]
    if path is None and "sharded" in overriding:
        what = "layout taken from the launcher's variables, which lack misspelt keys of its file"
        notes.append(f"{overriding['sharded'].where}: {what}: --accelerate FILE checks those too")
    return AccelerateFile(path, (*entries, *launched), MappingProxyType(wishes | overriding), tuple(notes))


def _read_file(path: Path, problems: list[Problem]) -> list[Entry]:
    """Return every key of the file and of its sections; Accelerate has no deeper levels."""
    hint = "give an Accelerate YAML, as `accelerate config` writes it"
    try:
        document = load_document(path)
    except UserError as error:
        raise UserError(error.problems[0].problem, error.problems[0].where, hint) from None
    problems += document.problems
    if not isinstance(document.value, dict):
        raise_all([*problems, Problem("is not a mapping of keys to values", f"{path}:1", hint)])
    entries: list[Entry] = []
    rows: list[tuple[tuple[str, ...], object]] = [((name,), value) for name, value in document.value.items()]
    while rows:
        steps, value = rows.pop(0)
        where = document.place(document.lines[steps], steps)
        section, name = "".join(steps[:-1]), steps[-1]
        key = find_key(section, name)
        if key is None:
            problems.append(_explain_unknown(name, section, where))
        elif key.kind != "section":
            entry = _read_value(key, value, where, ".".join(steps), problems)
            entries += [entry] if entry else []
        elif value is not None and not isinstance(value, dict):
            problems.append(Problem(f"is {value!r}, not keys and values", where, "indent its keys below it"))
        else:
            entries.append(Entry(key, None, where, name, key.fates[ANY]))
            rows[:0] = [((name, inner), item) for inner, item in (value or {}).items()]
    kind = next((str(entry.value).upper() for entry in entries if entry.key.name == "distributed_type"), "")
    if not kind and not problems:
        hint = "write distributed_type: FSDP: Accelerate requires it"
        problems.append(Problem("distributed_type is missing", str(path), hint))
    if kind in ("", "FSDP"):
        return entries
    unread = Fate(NO_EFFECT, f"read only with distributed_type: FSDP, and it is {kind}")
    about_fsdp = ("fsdp_config", "parallelism_config")
    return [replace(entry, fate=unread) if entry.key.section in about_fsdp else entry for entry in entries]


def _read_value(key: Key, raw: object, where: str, path: str, problems: list[Problem]) -> Entry | None:
    """Parse a value as its key requires and find its fate; append a problem if it is invalid."""
    value, text, expected = raw, str(raw).strip(), ""
    if raw is None and key.name != "compute_environment":  # there Accelerate reads null as SageMaker
        return Entry(key, None, where, path, Fate(NO_EFFECT, "null is the same as leaving the key out"))
    if key.kind == "names" and isinstance(raw, list):
        value = ",".join(map(str, raw))
    elif key.kind != "any" and isinstance(raw, list | dict):
        expected = "a single value"
    elif key.kind == "bool":
        value, expected = text.lower() in TRUE, "" if text.lower() in TRUE + FALSE else "true or false"
    elif key.kind == "int" and re.fullmatch(r"-?\d{1,9}", text):
        value = int(text)
    elif key.kind == "int":
        expected = "a whole number"
    elif key.kind != "any":
        value = "no" if raw is False and "NO" in key.fates else text  # YAML 1.1 reads a bare `no` as false
    fate = key.fates.get(str(value).strip().upper()) or key.fates.get(ANY)
    if expected:
        problems.append(Problem(f"is {raw!r}, not {expected}", where, f"{key.name}: {key.about}"))
        return None
    if fate is None:
        near = difflib.get_close_matches(text.upper(), list(key.fates), 1, 0.6)
        meant = f"did you mean {near[0]}? " if near else ""
        problems.append(Problem(f"{raw!r} is none of its values", where, f"{meant}it takes {', '.join(key.fates)}"))
        return None
    return Entry(key, value, where, path, fate)


def _explain_unknown(name: str, section: str, where: str) -> Problem:
    """Return the problem of an unknown key: misspelt, or in the wrong place."""
    homes = [home for home, names in load_key_table().spelled.items() if name in names and home != section]
    if homes or (not section and f"fsdp_{name}" in load_key_table().spelled["fsdp_config"]):
        home = homes[0] if homes else "fsdp_config"
        place = f"below {home}:, indented" if home else "at the top, not indented"
        return Problem("is in the wrong place", where, f"write it {place}")
    everywhere = [spelling for names in load_key_table().spelled.values() for spelling in names]
    near = [
        difflib.get_close_matches(name, names, 1, 0.7)
        for names in (load_key_table().spelled.get(section, {}), everywhere)
    ]
    hint = f"`windlass explain` knows the keys of {section or 'such a file'}"
    hint = next((f"did you mean {close[0]}?" for close in near if close), hint)
    return Problem("no such key: Accelerate would ignore it silently" if section else "no such key", where, hint)


def _read_wishes(entries: Sequence[Entry], problems: list[Problem]) -> dict[str, Wish]:
    """Collect the value of each field; two keys that disagree are a problem."""
    wishes: dict[str, Wish] = {}
    for entry in entries:
        for name, value in entry.fate.sets.items():
            wish = Wish(entry.value if value == ANY else value, entry.where)
            earlier = wishes.setdefault(name, wish)
            if earlier.value != wish.value:
                what = f"asks for {name} {wish.value}, but {earlier.where} asks for {earlier.value}"
                problems.append(Problem(what, wish.where, "make the two agree, or keep one of them"))
    return wishes
