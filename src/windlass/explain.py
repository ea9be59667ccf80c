"""What a setting means: of the run file, of an Accelerate file, of the environment, or a layout; how to do things."""

import difflib
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from windlass.errors import UserError
from windlass.plan.layout import LAYOUTS
from windlass.runfile.accelerate import ANY, TRANSLATED, find_key, load_key_table, read_accelerate
from windlass.runfile.names import NOT_TAKEN, OTHER_NAMES, RENAMED
from windlass.runfile.read import read_any
from windlass.runfile.reference import describe, find_item_annotation, format_value, list_documented
from windlass.variables import DOES_NOT_EXIST, list_other_names, variables

KINDS = {
    "accelerate": "in an Accelerate file",
    "run file": "in the run file",
    "environment": "environment variable",
    "layout": "a layout",
    "question": "how to",
}
# What people ask about that is no key -> the keys that it is about.
TOPICS = {topic: ["train.objective", "dpo", "orpo"] for topic in ("preference", "preferences", "pairs", "rlhf")}
STYLES = {"honoured": "green", "translated": "cyan", "no effect": "yellow", "refused": "red", DOES_NOT_EXIST: "red"}


@dataclass(frozen=True, slots=True)
class ExplainedKey:
    kind: str  # of KINDS
    name: str
    value: str  # the value that the line is about; empty: any
    verdict: str  # of STYLES, or empty
    text: str
    where: str = ""


def explain_topic(name: str, run: Path | None = None) -> tuple[ExplainedKey, ...]:
    """Return everything of that name, and where a run file sets it."""
    name = name.strip()
    rows = [*_explain_run_keys(name), *_explain_accelerate(name), *_explain_variable(name)]
    if run:
        rows += _find_in_run(run, rows)
    if name in LAYOUTS:
        rows.append(ExplainedKey("layout", name, "", "", LAYOUTS[name]))
    words = set(re.split(r"[\s?,]+", name.lower()))  # any word of a question
    for topic, question in load_questions().items():
        if words & {topic, *question["names"].split()}:
            rows += [ExplainedKey("question", topic, "", "", line) for line in question["answer"]]
    if not rows:
        raise UserError(f"unknown setting {name!r}", "windlass explain", _suggest(name), "unknown-key")
    return tuple(rows)


@cache
def load_questions() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _suggest(name: str) -> str:
    keys = [*list_documented(), *RENAMED]
    names = [*(key for section in load_key_table().spelled.values() for key in section), *list_documented()]
    names += [*(path.rpartition(".")[2] for path in keys), *NOT_TAKEN, *LAYOUTS]
    names += [*variables(), *sorted(list_other_names()), *load_questions()]
    known = {f"{key.rpartition('.')[0]}.{other}".lower(): key for other, key in OTHER_NAMES.items()}
    known |= {known.lower(): known for known in names}
    near = difflib.get_close_matches(name.lower(), list(known), 4, 0.6)
    if len(name) > 2:
        near += [folded for folded in known if name.lower() in folded]
    if not near:
        return "give a run-file key such as lora.r, an Accelerate key, a variable such as NCCL_DEBUG, or a layout"
    meant = list(dict.fromkeys(known[folded] for folded in near))
    if "." in name:  # a path: no variable or layout
        meant = [key for key in meant if "." in key] or meant
    return f"did you mean {', '.join(meant[:4])}?"


def _explain_run_keys(name: str) -> Iterator[ExplainedKey]:
    """Yield a key by its path, the last part of it, or another name."""
    path = re.sub(r"\[\d*\]", "", name)
    last = name.rpartition(".")[2]
    keys = _find_keys(path)
    accepted = RENAMED.get(name) or next((new for old, new in RENAMED.items() if old.rpartition(".")[2] == name), "")
    if not keys and accepted:
        yield ExplainedKey("run file", name, "", TRANSLATED, f"to {accepted}")
        keys = [accepted]
    elif not keys and last in OTHER_NAMES:
        yield ExplainedKey("run file", name, "", "", f"windlass calls it {OTHER_NAMES[last]}")
        keys = [OTHER_NAMES[last]]
    elif not keys and last in NOT_TAKEN:
        yield ExplainedKey("run file", name, "", "refused", NOT_TAKEN[last])
    for key in keys:
        yield from (ExplainedKey("run file", key, "", "", line) for line in describe(key))


def _find_keys(path: str) -> list[str]:
    """Return the key of this path, else all whose last part it is, else its mapping."""
    documented = list_documented()
    if path in documented:
        return [path]
    if path.lower() in TOPICS:
        return TOPICS[path.lower()]
    keys = [key for key in documented if key.rpartition(".")[2] == path]
    parent = path.rpartition(".")[0]
    if not keys and parent in documented and find_item_annotation(documented[parent][1].annotation, dict):
        return [parent]  # such as one variable of cluster.env
    return keys


def _find_in_run(path: Path, rows: Sequence[ExplainedKey]) -> Iterator[ExplainedKey]:
    """Yield where the run file sets these keys, and to what."""
    loaded = read_any(path)
    for key in dict.fromkeys(row.name for row in rows if row.kind == "run file"):
        for name, value in _find_values(loaded.run, "", key.split(".")):
            text = "a section" if isinstance(value, BaseModel) else format_value(value)
            yield ExplainedKey("run file", key, "", "", f"in this run: {text} ({loaded.where(name)})")


def _find_values(value: Any, path: str, parts: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield a key's values with their paths: of each entry, where a section on the way is a list or a mapping."""
    if not parts:
        yield path, value
    elif isinstance(value, list):
        for number, entry in enumerate(value):
            yield from _find_values(entry, f"{path}[{number}]", parts)
    elif isinstance(value, dict):
        for name, entry in value.items():
            yield from _find_values(entry, f"{path}.{name}", parts)
    elif isinstance(value, BaseModel) and hasattr(value, parts[0]):  # else this kind of run has no such section
        yield from _find_values(getattr(value, parts[0]), f"{path}.{parts[0]}".lstrip("."), parts[1:])


def _explain_accelerate(name: str) -> Iterator[ExplainedKey]:
    """Yield a key by its name, another spelling, or with its section: fsdp_config.fsdp_version."""
    section, _, last = name.rpartition(".")
    keys = [find_key(home, last) for home in ([section] if section else load_key_table().spelled)]
    for key in {key.path: key for key in keys if key}.values():
        yield ExplainedKey("accelerate", key.path, "", "", f"meaning: {key.about}")
        words = {ANY: "any other" if len(key.verdicts) > 1 else "", "TRUE": "true", "FALSE": "false"}
        for verdict in {id(verdict): verdict for verdict in key.verdicts.values()}.values():
            values = [words.get(value, value) for value, other in key.verdicts.items() if other is verdict]
            text = f"{verdict.because}. {verdict.hint}" if verdict.hint else verdict.because
            yield ExplainedKey("accelerate", key.path, ", ".join(values), verdict.word, _to(verdict.word, text))


def _to(verdict: str, text: str) -> str:
    return f"to {text}" if verdict == TRANSLATED else text


def _explain_variable(name: str) -> Iterator[ExplainedKey]:
    name = name.upper()
    row = variables().get(name)
    if name in list_other_names():
        about = "a variable of NCCL, gloo or torch that windlass neither sets nor reads: see their documentation"
        yield ExplainedKey("environment", name, "", "", about)
    if row:
        missing = row.status == DOES_NOT_EXIST
        yield ExplainedKey("environment", name, "", row.status if missing else "", row.about)
        yield ExplainedKey("environment", name, "", "", row.windlass)
        if row.verdict:
            published = f"{row.published} in the published recipe" if row.published else ""
            yield ExplainedKey("environment", name, published, "" if missing else row.status, row.verdict)


def explain_file(path: Path) -> tuple[ExplainedKey, ...]:
    """Return every key of an Accelerate file, in order. Refused keys are rows too; misspelt ones are errors."""
    rows = []
    for entry in read_accelerate(path, refuse=False).entries:
        value = "" if entry.key.kind == "section" else format_value(entry.value)
        text = _to(entry.verdict.word, entry.verdict.because)
        rows.append(ExplainedKey("accelerate", entry.path, value, entry.verdict.word, text, entry.where))
    return tuple(rows)


def print_rows(rows: Sequence[ExplainedKey]) -> None:
    """Print a paragraph for each setting. Values are never read as markup."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(highlight=False)
    last = ("", "")
    for row in rows:
        value = Text(row.value)
        verdict = Text(row.verdict, style=STYLES.get(row.verdict, ""))
        if row.where:  # a key of a file
            console.print(Text.assemble((row.name.rpartition(".")[2], "bold"), ": " if row.value else "", value))
            value = Text()
        elif (row.kind, row.name) != last:
            console.print(Text.assemble("\n" if last[0] else "", (row.name, "bold"), f"  ({KINDS[row.kind]})"))
            last = (row.kind, row.name)
        if row.kind == "question":  # commands stay on a line, to be pasted
            console.print(f"  {row.text}", soft_wrap=True, markup=False)
            continue
        parts = [part for part in (value, verdict) if part.plain]
        console.print(Padding(Text(": ").join([*parts, Text(row.text)]), (0, 0, 0, 2), expand=False))
