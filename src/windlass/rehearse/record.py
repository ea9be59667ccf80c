"""What a rehearsal found, stage by stage, and how it is shown.

The keys of rehearsal.json are an interface: add, never rename.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from windlass import __version__
from windlass.errors import RANK_USER_INPUT, USER_INPUT
from windlass.observe.format import format_plural
from windlass.rehearse.scale import Change

RECORD = "rehearsal.json"


class Failed(Exception):  # noqa: N818  (it is no error of the rehearsal)
    """A stage that found a fault: the command's own words, its exit code, and where its log is."""

    def __init__(self, text: str, code: int, log: Path | None = None) -> None:
        super().__init__(text)
        self.text = text
        self.log = log
        self.code = USER_INPUT if code in (USER_INPUT, RANK_USER_INPUT) else 1


@dataclass
class Phase:
    """One stage of the rehearsal: how long it took, and what it proved."""

    name: str
    seconds: float = 0.0
    passed: bool = False
    proved: list[str] = field(default_factory=list)


@dataclass
class RehearsalRecord:
    """The result of a rehearsal."""

    run: str
    ranks: dict[str, Any] = field(default_factory=dict)
    replica: dict[str, Any] = field(default_factory=dict)
    phases: list[Phase] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    stand_ins: list[str] = field(default_factory=list)
    not_proved: list[dict[str, str]] = field(default_factory=list)
    failure: dict[str, Any] | None = None
    folder: str | None = None  # where everything is, if it was kept
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        return self.failure["exit_code"] if self.failure else 0

    def as_dict(self) -> dict[str, Any]:
        passed = self.failure is None
        return {"windlass": __version__, "passed": passed, "exit_code": self.exit_code, **asdict(self)}


def print_record(record: RehearsalRecord) -> None:
    """Print the findings on stdout; failures in their own words."""
    console = Console(highlight=False, emoji=False, markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("stage", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("what it proved", overflow="fold")
    for phase in record.phases:
        proved = Text("\n".join(phase.proved))
        if not phase.passed:
            proved = Text.assemble(("failed", "bold red"), f"; before that: {proved}" if phase.proved else "")
        table.add_row(phase.name, f"{phase.seconds:.1f}", proved)
    console.print(table)
    print_list(console, "stood in for what is not on this machine", record.stand_ins)
    if failure := record.failure:
        found = f"the stage {failure['phase']} found a fault ({record.seconds:.0f} s)\n"
        console.print(Text.assemble(("failed: ", "bold red"), found))
        console.print(Text(failure["text"]), soft_wrap=True)
        if failure["log"]:
            console.print(Text(f"\nits whole log: {failure['log']}", "dim"), soft_wrap=True)
        return
    changes = [f"{c.key}: {_format_value(c.yours)} -> {_format_value(c.here)}; {c.why}" for c in record.changes]
    print_list(console, "changed for the rehearsal", changes)
    print_list(console, "not proven here", [f"{each['what']}: {each['why']}" for each in record.not_proved])
    ranks = record.ranks
    if not ranks["here"]:
        console.print(Text.assemble(("planned and rendered, not rehearsed: ", "yellow"), ranks["why"]))
        return
    few = "" if ranks["here"] == ranks["yours"] else f" of your {ranks['yours']}, as {ranks['why']}"
    kept = f"; everything is in {record.folder}" if record.folder else ""
    here = format_plural(ranks["here"], "rank")
    summary = f"rehearsed with {here}{few}, {ranks['layout']}, in {record.seconds:.0f} s{kept}"
    console.print(Text.assemble(("passed: ", "green"), summary))


def _format_value(value: Any) -> str:
    return "unset" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def print_list(console: Console, title: str, lines: list[str]) -> None:
    if lines:
        console.print("\n".join([title, *(f"- {line}" for line in lines), ""]))
