"""Read an Accelerate FSDP YAML or `accelerate launch`'s environment, judge each of its keys, and translate those that
windlass uses into values of the run file's keys."""

import difflib
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from windlass import hardware
from windlass.errors import Problem, UserError, Where, raise_all
from windlass.runfile.document import load_document
from windlass.runfile.fields import RunFile
from windlass.runfile.reference import format_value

HONOURED = "honoured"
TRANSLATED = "translated"
NO_EFFECT = "no effect"
REFUSED = "refused"
ANY = "*"  # in Key.verdicts: every value without its own row; in Verdict.sets: the value as read
# Accelerate's own lists
TRUE = ("true", "yes", "y", "t", "on", "1")
FALSE = ("false", "no", "n", "f", "off", "0")
PREFIXES = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_"}  # added by Accelerate to keys that lack it
# What refines a layout means nothing in another one, which the command line names.
REFINING = ("layout.reshard_after_forward", "layout.shard", "layout.replicate", "layout.offload")
NAMING = ("layout.name", "layout.expert_parallel", "layout.replicate")  # others refine what a file names
# The layout that the run file may name although an FSDP file names one of these: FSDP files have no keys for experts,
# and under expert parallelism they set how the dense rest is sharded.
ALONGSIDE = dict.fromkeys(("full-shard", "no-reshard", "hybrid"), ("expert-parallel",))
# Two names of one setting. True values other than true say what is kept.
CHECKPOINTING = ("train.gradient_checkpointing", "layout.activation_checkpointing")


@dataclass(frozen=True, slots=True)
class KeyVerdict:
    """How a value is treated. `because` completes: honoured: …, translated to …, no effect: …, refused: …"""

    word: str
    because: str
    hint: str = ""
    sets: Mapping[str, object] = field(default_factory=dict)  # keys of the run file, and `sharded`, `ranks`, `cpu`


@dataclass(frozen=True, slots=True)
class AccelerateKey:
    """A key that Accelerate knows, or one that users often write although Accelerate doesn't know it."""

    name: str  # fsdp_offload_params; ending in *: every key with this prefix
    section: str  # the mapping it belongs in: fsdp_config; empty at the top level
    about: str
    kind: str  # bool, int, word, text, names, section, any
    verdicts: Mapping[str, KeyVerdict]  # by upper-case value: TRUE, FULL_SHARD, 2; ANY for all others

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}" if self.section else self.name


class KeyTable(NamedTuple):
    every: list[AccelerateKey]
    spelled: dict[str, dict[str, AccelerateKey]]  # by section, then by every spelling
    launcher: dict[str, tuple[AccelerateKey, str]]  # by variable: its key, and the launcher's default


@lru_cache
def load_key_table() -> KeyTable:
    """Read accelerate_keys.toml, which documents its own format."""
    table = KeyTable([], {}, {})
    rows = tomllib.loads(Path(__file__).with_name("accelerate_keys.toml").read_text(encoding="utf-8"))
    for section_title, section_rows in rows.items():
        section = section_title.removeprefix("top")
        spellings = table.spelled.setdefault(section, {})
        for title, row in section_rows.items():
            names = row.pop("names", title).split()
            about = row.pop("about")
            kind = row.pop("kind", "any")
            variable, is_launched, default = row.pop("variable", "").partition("=")
            verdicts: dict[str, KeyVerdict] = {}
            for values, cells in row.items():
                verdicts |= dict.fromkeys(values.split(", "), _read_verdict(*cells))
            for name in names:
                key = AccelerateKey(name, section, about, kind, verdicts)
                table.every.append(key)
                if not name.endswith("*"):
                    spellings[name] = key
                    spellings[name.removeprefix(PREFIXES.get(section, ""))] = key
                if is_launched:
                    table.launcher[variable or name.upper()] = key, default
    return table


def _read_verdict(text: str, more: str | Mapping[str, object] = "") -> KeyVerdict:
    """Return the verdict in a cell. A hint or the settings may follow it."""
    word, _, because = text.partition(": ")
    return KeyVerdict(word, because, hint=more) if isinstance(more, str) else KeyVerdict(word, because, sets=more)


def find_key(section: str, name: str) -> AccelerateKey | None:
    table = load_key_table()
    alike = (key for key in table.every if key.section == section and key.name.endswith("*"))
    prefixed = next((key for key in alike if name.startswith(key.name[:-1])), None)
    return table.spelled.get(section, {}).get(name) or prefixed


@dataclass(frozen=True, slots=True)
class Entry:
    key: AccelerateKey
    value: object
    where: str  # fsdp.yaml:12: fsdp_config.fsdp_version
    path: str  # the key as written there
    verdict: KeyVerdict


class Setting(NamedTuple):
    value: Any
    where: str
    text: object  # what is written there
    is_default: bool = False  # only implied there, so another value is no disagreement

    @property
    def is_override(self) -> bool:
        return self.where.startswith("--override ")


Find = Callable[[str], Setting | None]  # what the run file or the command line sets: neither null nor auto


@dataclass(frozen=True, slots=True)
class AccelerateFile:
    """Accelerate's settings. An error names their places, as those of `--override`."""

    path: Path | None  # None: only the launcher's environment
    entries: tuple[Entry, ...]
    settings: Mapping[str, Setting]  # keys of the run file, and `sharded`, `ranks`, `cpu`
    notes: tuple[str, ...] = ()


def load_accelerate(path: Path | None, environ: Mapping[str, str] = MappingProxyType({})) -> AccelerateFile | None:
    """Return this run's Accelerate settings, from `--accelerate`'s file, the launcher's environment, both or neither.
    `accelerate launch` passes no file to its ranks, only variables: its file, overridden by its command line."""
    return read_accelerate(path, environ) if path or any(read_launcher_settings(environ)) else None


def read_accelerate(
    path: Path | None, environ: Mapping[str, str] = MappingProxyType({}), *, refuse: bool = True
) -> AccelerateFile:
    """Read Accelerate settings. `refuse=False` keeps refused keys as entries, so that they can be explained."""
    problems: list[Problem] = []
    entries = _read_file(path, problems) if path else []
    launched = []
    for key, text, variable in read_launcher_settings(environ):
        entry = _read_value(key, text, f"accelerate launch: {variable}", variable, problems)
        launched += [entry] if entry else []
    for entry in (*entries, *launched):
        if refuse and entry.verdict.word == REFUSED:
            text = f"{entry.value} is refused: {entry.verdict.because}"
            problems.append(Problem(text, entry.where, entry.verdict.hint, "refused-setting"))
    settings = _collect_settings(entries, problems)
    overriding = _collect_settings(launched, problems)
    raise_all(problems)
    notes = [
        f"{settings[name].where}: {settings[name].text} is overridden by {flag.where}={flag.text}: its flags win"
        for name, flag in overriding.items()
        if name in settings and settings[name].value != flag.value
    ]
    if path is None and "sharded" in overriding:
        text = "layout taken from the launcher's variables, which lack misspelt keys of its file"
        notes.append(f"{overriding['sharded'].where}: {text}: --accelerate FILE checks those too")
    settings |= overriding
    shard, split = settings.get("layout.shard"), settings.get("layout.context_parallel")
    if shard and split:  # Accelerate shards weights over both
        settings["layout.shard"] = shard._replace(value=shard.value * split.value)
    return AccelerateFile(path, (*entries, *launched), MappingProxyType(settings), tuple(notes))


def _collect_settings(entries: Sequence[Entry], problems: list[Problem]) -> dict[str, Setting]:
    """Collect the value of each field; two keys that disagree are a problem."""
    settings: dict[str, Setting] = {}
    for entry in entries:
        for name, value in entry.verdict.sets.items():
            setting = Setting(entry.value if value == ANY else value, entry.where, entry.value)
            earlier = settings.setdefault(name, setting)
            if earlier.value != setting.value:
                problems.append(_disagree(name, setting, earlier))
    return settings


def _disagree(key: str, setting: Setting, other: Setting) -> Problem:
    text = f"asks for {key} {format_value(setting.value)}, but it is {format_value(other.value)} at {other.where}"
    return Problem(text, setting.where, "make the two agree, or keep one of them", "disagreement")


def translate(file: AccelerateFile, run: RunFile, where: Where) -> tuple[dict[str, Setting], list[str], list[Problem]]:
    """Return the values that a run file gets, notes on those that the command line sets otherwise, and a problem for
    each that the run file sets otherwise."""

    def find(key: str) -> Setting | None:
        section, _, name = key.partition(".")
        value = getattr(getattr(run, section), name)
        return None if value in (None, "auto") else Setting(value, where(key), value)

    settings = {**file.settings}
    notes = [*file.notes]
    problems = [*_check_cpu(settings.pop("cpu", None), run), *_spread_ranks(settings, find)]
    notes += _name_layout(settings, find)
    theirs = settings.get("layout.name")
    name, naming = run.layout.named
    layout = Setting(name, where(naming), name) if naming in NAMING else None
    by_name = naming == "layout.name"
    is_other = theirs and layout and layout.is_override and by_name and name != theirs.value
    for key, setting in [*settings.items()]:
        written = next(filter(None, map(find, CHECKPOINTING if key in CHECKPOINTING else (key,))), None)
        if key == "layout.name" or (is_other and key in REFINING and not (written and written.is_override)):
            written = layout
        if written is None:
            continue
        del settings[key]
        value = bool(written.value) if key in CHECKPOINTING else written.value
        value = ",".join(value) if isinstance(value, list) else value
        if value == setting.value:
            continue
        may_differ = setting.is_default or value in ALONGSIDE.get(setting.value, ())
        if written.is_override and (by_name or not may_differ):
            notes.append(f"{setting.where}: {setting.text} is overridden by {written.where}")
        elif not (written.is_override or may_differ):
            problems.append(_disagree(key, setting, written))
    return settings, [*dict.fromkeys(notes)], problems  # one key may set two


def _name_layout(settings: dict[str, Setting], find: Find) -> Iterator[str]:
    """Set the layout's name by all keys that tell it: an FSDP file is never `auto`. Yield a note if the command line
    tells another than the file does."""
    sharded = settings.pop("sharded", None)
    if sharded is None or not sharded.value:
        return
    named = name = settings.get("layout.name")
    keys = ("layout.reshard_after_forward", "layout.replicate")
    overriding = [setting if setting and setting.is_override else None for setting in map(find, keys)]
    reshard, replicas = (ours or settings.get(key) for ours, key in zip(overriding, keys, strict=True))
    if reshard and (name is None or name.value == "full-shard"):
        written = find("layout.name")
        agrees = reshard.is_override or (reshard.value and written and written.value == "hybrid")
        is_default = named is None and bool(agrees)
        name = reshard._replace(value="full-shard" if reshard.value else "no-reshard", is_default=is_default)
    if replicas and replicas.value > 1:
        name = replicas._replace(value="hybrid", is_default=named is None)
        if named and replicas.is_override and named.value != "hybrid":
            yield f"{named.where}: {named.text} is overridden by {replicas.where}"
    settings["layout.name"] = name or sharded._replace(value="full-shard", is_default=True)


def _check_cpu(cpu: Setting | None, run: RunFile) -> Iterator[Problem]:
    if cpu is None or not cpu.value:
        return
    gpu = run.cluster.gpu or hardware.read_gpu_name()
    kind = gpu if isinstance(gpu, str) else gpu.name
    if hardware.ALIASES.get(kind.strip().lower(), kind.strip().lower()) != "cpu":
        hint = "write use_cpu: false; for a CPU machine write cluster.gpu: cpu"
        yield Problem(f"use_cpu: true, but the run is planned for {kind}", cpu.where, hint, "cpu-for-gpu")


def _spread_ranks(settings: dict[str, Setting], find: Find) -> Iterator[Problem]:
    """Replace the ranks of all nodes by each node's. If the command line sets the nodes, each has as many as before."""
    ranks = settings.pop("ranks", None)
    own = settings.get("cluster.nodes")
    written = find("cluster.nodes")
    gpus = find("cluster.gpus_per_node")
    if ranks is None:
        return
    if written and own and written.value != own.value and not written.is_override:
        return  # the nodes disagree
    nodes = written.value if written else own.value if own else 1
    if written and written.is_override and own and own.value > 0 and ranks.value % own.value == 0:
        nodes = own.value
    if nodes > 0 and ranks.value % nodes == 0:  # else the nodes are refused
        settings["cluster.gpus_per_node"] = ranks._replace(value=ranks.value // nodes)
    elif nodes > 0 and not (gpus and gpus.is_override):
        hint = f"give a multiple of {nodes}, or change the number of nodes"
        yield Problem(f"{ranks.value} ranks do not spread evenly over {nodes} nodes", ranks.where, hint, "uneven-ranks")


def read_launcher_settings(environ: Mapping[str, str]) -> Iterator[tuple[AccelerateKey, str, str]]:
    """Yield key, value and variable of each setting of `accelerate launch` (1.15), if it started this process."""
    if "ACCELERATE_MIXED_PRECISION" not in environ:
        return
    top = load_key_table().spelled[""]
    for engine in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if environ.get(f"ACCELERATE_USE_{engine}", "").lower() == "true":
            yield top["distributed_type"], engine, f"ACCELERATE_USE_{engine}"
    for variable, (key, default) in load_key_table().launcher.items():
        value = environ.get(variable, "")
        if value and value.lower() != default.lower():
            yield key, value, variable
    world = environ.get("WORLD_SIZE", "")
    local = environ.get("LOCAL_WORLD_SIZE", "")
    if world.isdigit() and local.isdigit() and int(local):
        yield top["num_machines"], str(max(1, int(world) // int(local))), "WORLD_SIZE"
        yield top["num_processes"], world, "WORLD_SIZE"


def _read_file(path: Path, problems: list[Problem]) -> list[Entry]:
    """Return every key of the file and of its sections; Accelerate has no deeper levels."""
    hint = "give an Accelerate YAML, as `accelerate config` writes it"
    try:
        document = load_document(path)
    except UserError as error:
        raise UserError.of([replace(error.problems[0], hint=hint)]) from None
    problems += document.problems
    if not isinstance(document.value, dict):
        raise_all([*problems, Problem("is not a mapping of keys to values", f"{path}:1", hint, "not-a-mapping")])
    entries: list[Entry] = []
    rows: list[tuple[tuple[str, ...], object]] = [((name,), value) for name, value in document.value.items()]
    while rows:
        steps, value = rows.pop(0)
        where = document.place(document.lines[steps], steps)
        section = "".join(steps[:-1])
        name = steps[-1]
        key = find_key(section, name)
        if key is None:
            problems.append(_explain_unknown(name, section, where))
        elif key.kind != "section":
            entry = _read_value(key, value, where, ".".join(steps), problems)
            if entry:
                entries.append(entry)
        elif value is not None and not isinstance(value, dict):
            hint = "indent its keys below it"
            problems.append(Problem(f"is {value!r}, not keys and values", where, hint, "wrong-value"))
        else:
            entries.append(Entry(key, None, where, name, key.verdicts[ANY]))
            rows[:0] = [((name, inner), item) for inner, item in (value or {}).items()]
    kind = next((str(entry.value).upper() for entry in entries if entry.key.name == "distributed_type"), "")
    if not kind and not problems:
        hint = "write distributed_type: FSDP: Accelerate requires it"
        problems.append(Problem("distributed_type is missing", str(path), hint, "no-distributed-type"))
    if kind in ("", "FSDP"):
        return entries
    unread = KeyVerdict(NO_EFFECT, f"read only with distributed_type: FSDP, and it is {kind}")
    about_fsdp = ("fsdp_config", "parallelism_config")
    return [replace(entry, verdict=unread) if entry.key.section in about_fsdp else entry for entry in entries]


def _read_value(key: AccelerateKey, raw: object, where: str, path: str, problems: list[Problem]) -> Entry | None:
    """Parse a value as its key requires and judge it; append a problem if it is invalid."""
    nothing = raw is None and key.name != "compute_environment"  # there Accelerate reads null as SageMaker
    if nothing or (key.kind == "names" and not str(raw).strip("[] ")):
        return Entry(key, None, where, path, KeyVerdict(NO_EFFECT, "null is the same as leaving the key out"))
    value, expected = _parse_value(key, raw)
    if expected:
        problems.append(Problem(f"is {raw!r}, not {expected}", where, f"{key.name}: {key.about}", "wrong-value"))
        return None
    verdict = key.verdicts.get(str(value).strip().upper()) or key.verdicts.get(ANY)
    if verdict is None:
        near = difflib.get_close_matches(str(raw).strip().upper(), list(key.verdicts), 1, 0.6)
        meant = f"did you mean {near[0]}? " if near else ""
        hint = f"{meant}it takes {', '.join(key.verdicts)}"
        problems.append(Problem(f"{raw!r} is none of its values", where, hint, "wrong-value"))
        return None
    return Entry(key, value, where, path, verdict)


def _parse_value(key: AccelerateKey, raw: object) -> tuple[object, str]:
    """Return the value, and what was expected if it is of another kind."""
    text = str(raw).strip()
    if key.kind == "any":
        return raw, ""
    if key.kind == "names" and isinstance(raw, list):
        return ",".join(map(str, raw)), ""
    if isinstance(raw, list | dict):
        return raw, "a single value"
    if key.kind == "bool":
        return text.lower() in TRUE, "" if text.lower() in TRUE + FALSE else "true or false"
    if key.kind == "int":
        return (int(text), "") if re.fullmatch(r"-?\d{1,9}", text) else (raw, "a whole number")
    if raw is False and "NO" in key.verdicts:  # YAML 1.1 reads a bare `no` as false
        return "no", ""
    return text, ""


def _explain_unknown(name: str, section: str, where: str) -> Problem:
    """Return the problem of an unknown key: misspelt, or in the wrong place."""
    spelled = load_key_table().spelled
    homes = [home for home, names in spelled.items() if name in names and home != section]
    if not homes and not section and f"fsdp_{name}" in spelled["fsdp_config"]:
        homes = ["fsdp_config"]
    if homes:
        place = f"below {homes[0]}:, indented" if homes[0] else "at the top, not indented"
        return Problem("is in the wrong place", where, f"write it {place}", "misplaced-key")
    hint = f"`windlass explain` knows the keys of {section or 'such a file'}"
    everywhere = [spelling for names in spelled.values() for spelling in names]
    for among in (spelled.get(section, {}), everywhere):
        near = difflib.get_close_matches(name, among, 1, 0.7)
        if near:
            hint = f"did you mean {near[0]}?"
            break
    what = "no such key: Accelerate would ignore it silently" if section else "no such key"
    return Problem(what, where, hint, "unknown-key")
