"""What a setting means: of the run file, of an Accelerate file, of the environment, or a layout."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from windlass.errors import UserError
from windlass.plan.accelerate import ANY, FATES, TRANSLATED, find, read_accelerate
from windlass.plan.layout import LAYOUTS
from windlass.runfile import describe
from windlass.runfile.names import NOT_TAKEN, OTHER_NAMES, RENAMED
from windlass.runfile.reference import documented
from windlass.variables import DOES_NOT_EXIST, variables

KINDS = {
    "accelerate": "in an Accelerate file",
    "run file": "in the run file",
    "environment": "environment variable",
    "layout": "a layout",
}
STYLES = {"honoured": "green", "translated": "cyan", "no effect": "yellow", "refused": "red", DOES_NOT_EXIST: "red"}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of an explanation."""

    kind: str  # of KINDS
    name: str
    value: str  # the value that the line is about; empty: any
    verdict: str  # of STYLES, or empty
    text: str
    where: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def topic(name: str) -> tuple[Row, ...]:
    """Everything of that name."""
    name = name.strip()
    rows = (*_run_file(name), *_accelerate(name), *_variable(name))
    if name in LAYOUTS:
        rows = (*rows, Row("layout", name, "", "", LAYOUTS[name]))
    if not rows:
        near = nearest(name)
        hint = "give a run-file key such as lora.r, an Accelerate key, a variable such as NCCL_DEBUG, or a layout"
        raise UserError(
            f"there is no setting {name!r}", "windlass explain", f"did you mean {', '.join(near)}?" if near else hint
        )
    return rows


def nearest(name: str) -> list[str]:
    """What was probably meant, over all kinds, best first."""
    names = [*(key for section in FATES.values() for key in section), *documented()]
    names += [*(path.rpartition(".")[2] for path in (*documented(), *RENAMED)), *NOT_TAKEN, *variables(), *LAYOUTS]
    known = {known.lower(): known for known in names}
    close = difflib.get_close_matches(name.lower(), list(known), 4, 0.6)
    inside = [low for low in known if len(name) > 2 and name.lower() in low]
    return [known[low] for low in dict.fromkeys([*close, *inside])][:4]


def _run_file(name: str) -> Iterator[Row]:
    last = name.rpartition(".")[2]
    for block in (describe(name) or "").split("\n\n"):
        path, *lines = block.split("\n")
        if not lines and path:  # `a is another name of b`
            accepted = name in RENAMED or any(old.rpartition(".")[2] == name for old in RENAMED)
            verdict = TRANSLATED if accepted and last not in OTHER_NAMES else ""
            to = path.rpartition(" ")[2]
            yield Row("run file", name, "", verdict, f"to {to}" if verdict else f"windlass calls it {to}")
        yield from (Row("run file", path, "", "", line.strip()) for line in lines)
    if last in NOT_TAKEN and describe(name) is None:
        yield Row("run file", name, "", "refused", NOT_TAKEN[last])


def _accelerate(name: str) -> Iterator[Row]:
    """A key by its name, another spelling, or with its section: fsdp_config.fsdp_version."""
    section, _, last = name.rpartition(".")
    found = {key.path: key for home in ([section] if section else FATES) if (key := find(home, last))}
    for key in found.values():
        yield Row("accelerate", key.path, "", "", f"meaning: {key.about}")
        for fate in {id(fate): fate for fate in key.fates.values()}.values():
            values = [value for value, other in key.fates.items() if other is fate]
            others = "any other" if len(key.fates) > 1 else ""
            shown = [{ANY: others, "TRUE": "true", "FALSE": "false"}.get(value, value) for value in values]
            text = f"{fate.because}. {fate.hint}" if fate.hint else fate.because
            yield Row("accelerate", key.path, ", ".join(shown), fate.verdict, _to(fate.verdict, text))


def _to(verdict: str, text: str) -> str:
    return f"to {text}" if verdict == TRANSLATED else text


def _variable(name: str) -> Iterator[Row]:
    name = name if name in variables() else name.upper()
    if known := variables().get(name):
        missing = known.status == DOES_NOT_EXIST
        yield Row("environment", name, "", known.status if missing else "", known.about)
        yield Row("environment", name, "", "", known.windlass)
        if known.verdict:
            published = f"{known.published} in the published recipe" if known.published else ""
            yield Row("environment", name, published, "" if missing else known.status, known.verdict)


def file(path: Path) -> tuple[Row, ...]:
    """Every key of an Accelerate file, in its order. Refused keys are rows too, misspelt ones are errors."""
    rows = []
    for entry in read_accelerate(path, refuse=False).entries:
        value = "null" if entry.value is None else str(entry.value)
        value = value.lower() if isinstance(entry.value, bool) else "" if entry.key.kind == "section" else value
        text = _to(entry.fate.verdict, entry.fate.because)
        rows.append(Row("accelerate", entry.path, value, entry.fate.verdict, text, entry.where))
    return tuple(rows)


def show(rows: Sequence[Row]) -> None:
    """On stdout, a paragraph for each setting. Values are never read as markup."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(highlight=False)
    last = ("", "")
    for row in rows:
        value, verdict = Text(row.value), Text(row.verdict, style=STYLES.get(row.verdict, ""))
        if row.where:  # a key of a file
            console.print(Text.assemble((row.name.rpartition(".")[2], "bold"), ": " if row.value else "", value))
            value = Text()
        elif (row.kind, row.name) != last:
            console.print(Text.assemble("\n" if last[0] else "", (row.name, "bold"), f"  ({KINDS[row.kind]})"))
            last = (row.kind, row.name)
        parts = [part for part in (value, verdict) if part.plain]
        console.print(Padding(Text(": ").join([*parts, Text(row.text)]), (0, 0, 0, 2), expand=False))
