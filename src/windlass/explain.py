"""What one setting does here: of the run file, of an Accelerate file, or of the environment."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.errors import UserError
from windlass.plan.accelerate import ANY, FATES, Entry, Key, find, read_accelerate
from windlass.plan.layout import LAYOUTS
from windlass.variables import VARIABLES

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

__all__ = ["Row", "file", "show", "topic"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of an explanation. `verdict` is empty where there is nothing to judge."""

    kind: str  # accelerate, run file, environment, layout
    name: str
    value: str  # the value that the line is about; empty: any
    verdict: str
    text: str
    where: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def topic(name: str) -> tuple[Row, ...]:
    """Everything that goes by that name."""
    wanted = name.strip()
    rows = [*_run_file(wanted), *_accelerate(wanted), *_variable(wanted), *_layout(wanted)]
    if not rows:
        near = nearest(wanted)
        raise UserError(
            f"there is no setting {wanted!r}",
            "windlass explain",
            f"did you mean {', '.join(near)}?"
            if near
            else "give an Accelerate key, a run-file key such as lora.r, "
            "an environment variable such as NCCL_DEBUG, or a layout such as full-shard",
        )
    return tuple(rows)


def file(path: Path) -> tuple[Row, ...]:
    """Every key of an Accelerate file, in its order, with its fate. Refused keys are rows too; misspelt ones errors."""
    return tuple(_entry(entry) for entry in read_accelerate(path, refuse=False).entries)


def show(rows: Sequence[Row]) -> None:
    """On stdout: a table for a file, whose rows are many and alike; paragraphs for one setting."""
    from rich.console import Console

    Console().print(_table(rows) if any(row.where for row in rows) else _paragraphs(rows))


def _table(rows: Sequence[Row]) -> RenderableType:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False)
    for heading in ("setting", "value", "verdict", "why"):
        table.add_column(heading, no_wrap=heading in ("setting", "verdict"), overflow="fold")
    for row in rows:  # the section that a key stands in is told by the order of the rows
        table.add_row(_text(row.name.rpartition(".")[2]), _text(row.value), _verdict(row.verdict), _text(row.text))
    return table


def _paragraphs(rows: Sequence[Row]) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    parts: list[RenderableType] = []
    last = ("", "")
    for row in rows:
        if (row.kind, row.name) != last:
            parts.append(Text.assemble("\n" if parts else "", (row.name, "bold"), f"  ({KINDS[row.kind]})"))
            last = (row.kind, row.name)
        head = [part for part in (_text(row.value), _verdict(row.verdict)) if part.plain]
        parts.append(Padding(Text(": ").join([*head, _text(row.text)]), (0, 0, 0, 2)))
    return Group(*parts)


def _text(text: str) -> Text:
    from rich.text import Text

    return Text(text)  # never markup: it may be what a user wrote


def _verdict(verdict: str) -> Text:
    from rich.text import Text

    return Text(verdict, style=STYLES.get(verdict, ""))


KINDS = {
    "accelerate": "in an Accelerate file",
    "run file": "in the run file",
    "environment": "environment variable",
    "layout": "a layout",
}
STYLES = {"honoured": "green", "translated": "cyan", "no effect": "yellow", "refused": "red", "does not exist": "red"}


def nearest(name: str) -> list[str]:
    """What was probably meant, over all kinds, best first."""
    known = {known.lower(): known for known in _names()}
    close = difflib.get_close_matches(name.lower(), list(known), 4, 0.6)
    inside = [known[low] for low in known if len(name) > 2 and name.lower() in low]
    return list(dict.fromkeys([*(known[low] for low in close), *inside]))[:4]


def _names() -> list[str]:
    keys = [spelling for names in FATES.values() for spelling in names]
    return [*dict.fromkeys(keys), *_run_file_names(), *VARIABLES, *LAYOUTS]


# --- Accelerate -----------------------------------------------------------------------------------------------------


def _accelerate(name: str) -> list[Row]:
    """A key by its name, by another spelling, or with its section: fsdp_config.fsdp_version."""
    section, _, last = name.rpartition(".")
    sections = [section] if section else list(FATES)
    found = {key.path: key for home in sections if (key := find(home, last))}
    return [row for key in found.values() for row in _key(key)]


def _key(key: Key) -> list[Row]:
    """One row per fate, with all values that share it."""
    shared: dict[int, list[str]] = {}
    for value, fate in key.fates.items():
        shared.setdefault(id(fate), []).append(value)
    rows = []
    for fate in {id(fate): fate for fate in key.fates.values()}.values():
        values = ", ".join("any other" if value == ANY and len(key.fates) > 1 else value for value in shared[id(fate)])
        text = f"{fate.because}. {fate.hint}" if fate.hint else fate.because
        rows.append(Row("accelerate", key.path, _value(values), fate.verdict, _to(fate.verdict, text)))
    about = Row("accelerate", key.path, "", "", f"asks for: {key.about}")
    return [about, *rows]


def _value(values: str) -> str:
    return {ANY: "", "TRUE": "true", "FALSE": "false"}.get(values, values)


def _entry(entry: Entry) -> Row:
    text = _to(entry.fate.verdict, entry.fate.because)
    return Row("accelerate", entry.path, _written(entry), entry.fate.verdict, text, entry.where)


def _written(entry: Entry) -> str:
    """The value as YAML spells it."""
    if entry.key.kind == "section":
        return ""
    return _yaml(entry.value)


def _to(verdict: str, text: str) -> str:
    return f"to {text}" if verdict == "translated" else text


# --- the rest -------------------------------------------------------------------------------------------------------


def _run_file_names() -> list[str]:
    from windlass.runfile import ScriptRun, keys
    from windlass.runfile.names import NOT_TAKEN, RENAMED

    paths = (*keys(), *(path for path in keys(ScriptRun) if path.startswith("script")))
    return [*paths, *(path.rpartition(".")[2] for path in (*paths, *RENAMED)), *NOT_TAKEN]


def _run_file(name: str) -> list[Row]:
    """A key by its path, lora.r, or by its last name, learning_rate; older spellings, and what is not taken."""
    from windlass.runfile import describe
    from windlass.runfile.names import NOT_TAKEN

    rows = []
    for block in (describe(name) or "").split("\n\n"):
        path, *lines = block.split("\n")
        if not lines and path:  # `old` is another spelling of `new`
            rows.append(Row("run file", name, "", "translated", f"to {path.rpartition(' ')[2]}, its name here"))
        rows += [Row("run file", path, "", "", line.strip()) for line in lines]
    if name in NOT_TAKEN and not rows:
        rows.append(Row("run file", name, "", "refused", NOT_TAKEN[name]))
    return rows


def _yaml(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _variable(name: str) -> list[Row]:
    variable = VARIABLES.get(name) or VARIABLES.get(name.upper())
    if variable is None:
        return []
    rows = [Row("environment", variable.name, variable.value, _existing(variable.exists), variable.about)]
    rows.append(Row("environment", variable.name, variable.value, "", variable.windlass))
    if variable.published:
        text = f"in the published recipe: {variable.verdict}"
        rows.append(Row("environment", variable.name, variable.published, "", text))
    elif variable.verdict:
        rows.append(Row("environment", variable.name, "", "", variable.verdict))
    return rows


def _existing(exists: bool) -> str:
    return "" if exists else "does not exist"


def _layout(name: str) -> list[Row]:
    return [Row("layout", name, "", "", LAYOUTS[name])] if name in LAYOUTS else []
