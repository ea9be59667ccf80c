"""An Accelerate FSDP YAML, or `accelerate launch`'s environment, as an input: what becomes of each of its keys."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from windlass.errors import Problem, UserError, raise_all
from windlass.runfile.document import Document, parse

HONOURED, TRANSLATED, NO_EFFECT, REFUSED = "honoured", "translated", "no effect", "refused"
ANY = "*"  # in Key.fates: every value without a row of its own
AS_READ = "*"  # in Fate.sets: the value as it was read
LIMIT_BYTES = 256 * 1024  # such files have about 1 kB; a parser in Python needs a second for a quarter of a MB
TRUE, FALSE = ("true", "yes", "y", "t", "on", "1"), ("false", "no", "n", "f", "off", "0")  # Accelerate's own lists


@dataclass(frozen=True, slots=True)
class Fate:
    """`because` completes the sentence: honoured: …, translated to …, no effect: …, refused: …"""

    verdict: str
    because: str
    sets: tuple[tuple[str, object], ...] = ()  # fields of the layout request, with their value
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Key:
    """A key that Accelerate knows, or that is often written although it doesn't."""

    name: str  # fsdp_offload_params
    about: str  # what it asks for
    kind: str  # bool, int, word, text, names, section, any
    fates: Mapping[str, Fate]  # by value, in upper case: TRUE, FULL_SHARD, 2; ANY for the others
    section: str = ""  # the mapping it belongs in: fsdp_config; empty at the top
    spellings: tuple[str, ...] = ()  # other names that Accelerate accepts for it

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}" if self.section else self.name

    def fate(self, value: object) -> Fate | None:
        """None: the key doesn't take this value."""
        if value is None:
            return NOT_GIVEN
        return self.fates.get(str(value).strip().upper()) or self.fates.get(ANY)


NOT_GIVEN = Fate(NO_EFFECT, "null is the same as leaving the key out")


def _read_table() -> Iterator[Key]:
    """accelerate_keys.toml, which says how it is written."""
    table = tomllib.loads(Path(__file__).with_name("accelerate_keys.toml").read_text(encoding="utf-8"))
    for section, keys in table.items():
        section = section.removeprefix("top")
        # Accelerate puts the section's name before a key of these two that lacks it.
        prefix = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_"}.get(section, "")
        for title, row in keys.items():
            names, about, kind = row.pop("names", title), row.pop("about"), row.pop("kind", "any")
            fates = {value: fate for values, cells in row.items() for value, fate in _read_fates(values, cells)}
            for name in names.split():
                yield Key(name, about, kind, fates, section, (name.removeprefix(prefix),) if prefix else ())


def _read_fates(values: str, cells: list[Any]) -> Iterator[tuple[str, Fate]]:
    verdict, _, because = cells[0].partition(": ")
    sets = next((tuple(cell.items()) for cell in cells if isinstance(cell, dict)), ())
    hint = cells[-1] if len(cells) > 1 and isinstance(cells[-1], str) else ""
    fate = Fate(verdict, because, sets, hint)
    yield from ((value, fate) for value in values.split(", "))


KEYS = tuple(_read_table())
FATES: dict[str, dict[str, Key]] = {key.section: {} for key in KEYS}  # by section, then by every spelling
_FAMILIES = [key for key in KEYS if key.name.endswith("*")]  # each stands for every key of its section that begins so
for _key in KEYS:
    FATES[_key.section] |= {name: _key for name in (_key.name, *_key.spellings) if _key not in _FAMILIES}


def find(section: str, name: str) -> Key | None:
    """The key of that name in that section."""
    families = (key for key in _FAMILIES if key.section == section and name.startswith(key.name[:-1]))
    return FATES.get(section, {}).get(name) or next(families, None)


# --- what `accelerate launch` (1.15) leaves in a rank's environment ------------------

# The key behind each variable, and Accelerate's default, which says nothing: the launcher fills in every one of them.
LAUNCHER: dict[str, tuple[str, str]] = {
    "ACCELERATE_MIXED_PRECISION": ("mixed_precision", "no"),
    "ACCELERATE_DYNAMO_BACKEND": ("dynamo_backend", "NO"),
    "ACCELERATE_USE_CPU": ("use_cpu", "false"),
    "FSDP_VERSION": ("fsdp_version", ""),
    "FSDP_SHARDING_STRATEGY": ("fsdp_sharding_strategy", "FULL_SHARD"),
    "FSDP_RESHARD_AFTER_FORWARD": ("fsdp_reshard_after_forward", "true"),
    "FSDP_OFFLOAD_PARAMS": ("fsdp_offload_params", "false"),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": ("fsdp_transformer_layer_cls_to_wrap", ""),
    "FSDP_STATE_DICT_TYPE": ("fsdp_state_dict_type", ""),
    "FSDP_ACTIVATION_CHECKPOINTING": ("fsdp_activation_checkpointing", "false"),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": ("fsdp_activation_checkpointing_offload", "false"),
    "FSDP_IGNORED_MODULES": ("fsdp_ignored_modules", ""),
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": ("parallelism_config_dp_replicate_size", "1"),
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": ("parallelism_config_dp_shard_size", "1"),
    "PARALLELISM_CONFIG_TP_SIZE": ("parallelism_config_tp_size", "1"),
    "PARALLELISM_CONFIG_CP_SIZE": ("parallelism_config_cp_size", "1"),
    "PARALLELISM_CONFIG_SP_SIZE": ("parallelism_config_sp_size", "1"),
}
_BY_NAME = {key.name: key for key in reversed(KEYS)}


def launcher_settings(environ: Mapping[str, str]) -> Iterator[tuple[Key, str, str]]:
    """Key, value and variable of what `accelerate launch` was given; nothing in a rank that it didn't start."""
    if "ACCELERATE_MIXED_PRECISION" not in environ:
        return
    for engine in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if environ.get(f"ACCELERATE_USE_{engine}", "").lower() == "true":
            yield _BY_NAME["distributed_type"], engine, f"ACCELERATE_USE_{engine}"
    for variable, (name, default) in LAUNCHER.items():
        value = environ.get(variable, "")
        if value and value.lower() != default.lower():
            yield _BY_NAME[name], value, variable
    world, local = environ.get("WORLD_SIZE", ""), environ.get("LOCAL_WORLD_SIZE", "")
    if world.isdigit() and local.isdigit() and int(local):
        yield _BY_NAME["num_machines"], str(max(1, int(world) // int(local))), "WORLD_SIZE"
        yield _BY_NAME["num_processes"], world, "WORLD_SIZE"


# --- a file and the launcher's settings -> what they set ------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """One key as it is in the file or in the environment."""

    key: Key
    value: object
    where: str  # fsdp.yaml:12: fsdp_config.fsdp_version
    path: str  # the key as it was written there
    fate: Fate


@dataclass(frozen=True, slots=True)
class Wish:
    """What the file sets one field of the layout request to."""

    value: Any
    where: str


@dataclass(frozen=True, slots=True)
class AccelerateFile:
    """`wishes` are the settings that matter here: nodes, ranks, precision, name, wrap, offload …"""

    path: Path | None  # None: only the launcher's environment
    entries: tuple[Entry, ...]
    wishes: Mapping[str, Wish]
    notes: tuple[str, ...] = ()


def accelerate_file(path: Path | None, environ: Mapping[str, str]) -> AccelerateFile | None:
    """The Accelerate settings of this run: `--accelerate`'s file, the launcher's environment, both or none.

    `accelerate launch` gives its ranks no file, only variables in which its command line has overridden its file.
    """
    if path is None and not any(launcher_settings(environ)):
        return None
    return read_accelerate(path, environ)


def read_accelerate(
    path: Path | None, environ: Mapping[str, str] = MappingProxyType({}), *, refuse: bool = True
) -> AccelerateFile:
    """`refuse=False` keeps refused keys as entries, to be explained."""
    entries: list[Entry] = []
    problems: list[Problem] = []
    if path is not None:
        document = _document(path)
        problems += document.problems
        for name, value in document.value.items():
            _enter(document, "", name, value, entries, problems)
        if not problems and "distributed_type" not in {entry.key.name for entry in entries}:
            hint = "write distributed_type: FSDP: Accelerate requires it"
            problems.append(Problem("distributed_type is missing", str(path), hint))
    launched: list[Entry] = []
    for key, text, variable in launcher_settings(environ):
        _settle(key, text, f"accelerate launch: {variable}", variable, launched, problems)
    entries = _mark_unread(entries)
    if refuse:
        for entry in (*entries, *launched):
            if entry.fate.verdict == REFUSED:
                hint = entry.fate.hint or f"write in the run file: {deepspeed_equal(entries)}"
                problems.append(Problem(f"{entry.value} is refused: {entry.fate.because}", entry.where, hint))
    wishes, overriding = _wishes(entries, problems), _wishes(launched, problems)
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


def _document(path: Path) -> Document:
    where, hint = str(path), "give the path of an Accelerate YAML"
    try:
        with path.open("rb") as stream:
            content = stream.read(LIMIT_BYTES + 1)  # not the size: a device or a pipe has none
        if len(content) > LIMIT_BYTES:
            raise UserError(f"larger than {LIMIT_BYTES // 1024} kB: not an Accelerate file", where, "give fsdp.yaml")
        text = content.decode("utf-8")
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where, hint) from None
    except UnicodeDecodeError:
        raise UserError("is not text", where, hint) from None
    if not re.search(r"^\s*[^#\s]", text, re.MULTILINE):
        raise UserError("is empty", where, "`accelerate config` writes such a file")
    document = parse(text, where)
    if not isinstance(document.value, dict):
        raise_all(document.problems)
        raise UserError("is not a mapping of keys to values", f"{where}:1", "write key: value")
    return document


def _enter(
    document: Document, section: str, name: str, value: object, entries: list[Entry], problems: list[Problem]
) -> None:
    """One key of the file, or a section with its keys. Accelerate has no deeper levels."""
    steps = (section, name) if section else (name,)
    where = document.place(document.lines.get(steps, 1), steps)
    key = find(section, name)
    if key is None:
        problems.append(_unknown(name, section, where))
    elif key.kind != "section":
        _settle(key, value, where, ".".join(steps), entries, problems)
    elif value is not None and not isinstance(value, dict):
        problems.append(Problem(f"is {value!r}, not keys and values", where, "indent its keys below it"))
    else:
        entries.append(Entry(key, None, where, name, key.fates[ANY]))
        for inner, item in (value or {}).items():
            _enter(document, name, inner, item, entries, problems)


def _settle(key: Key, raw: object, where: str, path: str, entries: list[Entry], problems: list[Problem]) -> None:
    value, expected = _typed(raw, key)
    fate = key.fate(value)
    if expected:
        problems.append(Problem(f"is {raw!r}, not {expected}", where, f"{key.name}: {key.about}"))
    elif fate is None:
        words = [word for word in key.fates if word != ANY]
        near = difflib.get_close_matches(str(value).upper(), words, 1, 0.6)
        meant = f"did you mean {near[0]}? " if near else ""
        problems.append(Problem(f"{raw!r} is none of its values", where, f"{meant}it takes {', '.join(words)}"))
    else:
        entries.append(Entry(key, value, where, path, fate))


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
        return (word in TRUE, "") if word in TRUE + FALSE else (value, "true or false")
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
        return Problem("is in the wrong place", where, f"write it {place}")
    if section == "" and (key := find("fsdp_config", f"fsdp_{name.removeprefix('fsdp_')}")):
        return Problem("is in the wrong place", where, f"write {key.name} below fsdp_config:, indented")
    near = nearest(name, section)
    hint = f"did you mean {near}?" if near else f"`windlass explain` knows the keys of {section or 'such a file'}"
    return Problem("no such key: Accelerate would ignore it silently" if section else "no such key", where, hint)


def nearest(name: str, section: str) -> str:
    """The key that was probably meant, its own section first."""
    for names in (list(FATES.get(section, {})), [n for home in FATES.values() for n in home]):
        if close := difflib.get_close_matches(name, names, 1, 0.7):
            return close[0]
    return ""


def _mark_unread(entries: list[Entry]) -> list[Entry]:
    """If the file doesn't say FSDP, Accelerate never reads what it says about FSDP."""
    kind = next((str(entry.value).upper() for entry in entries if entry.key.name == "distributed_type"), "FSDP")
    unread = Fate(NO_EFFECT, f"read only with distributed_type: FSDP, and it is {kind}")
    return [
        replace(e, fate=unread) if kind != "FSDP" and e.key.section in ("fsdp_config", "parallelism_config") else e
        for e in entries
    ]


def deepspeed_equal(entries: Sequence[Entry]) -> str:
    """The layout that does what the DeepSpeed settings of the file ask for."""
    settings = {e.key.name: str(e.value).lower() for e in entries if e.key.section == "deepspeed_config"}
    name = "full-shard" if settings.get("zero_stage", "2") == "3" else "resident"  # Accelerate's default is stage 2
    offload = name == "full-shard" and settings.get("offload_param_device", "none") not in ("none", "nvme")
    return f"layout: {{name: {name}, offload: true}}" if offload else f"layout: {name}"


def _wishes(entries: Sequence[Entry], problems: list[Problem]) -> dict[str, Wish]:
    """Every field once. Two keys that want different things are a problem."""
    wishes: dict[str, Wish] = {}
    for entry in entries:
        for name, value in entry.fate.sets:
            wish = Wish(entry.value if value == AS_READ else value, entry.where)
            earlier = wishes.setdefault(name, wish)
            if earlier.value != wish.value:
                what = f"asks for {name} {wish.value}, but {earlier.where} asks for {earlier.value}"
                problems.append(Problem(what, wish.where, "make the two agree, or keep one of them"))
    return wishes
