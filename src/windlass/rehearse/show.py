"""Show a rehearsal in the terminal: each stage as it goes on, then what was proven, changed, and left unproven."""

from __future__ import annotations

import sys
import time

from rich import box
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from windlass.rehearse.record import Phase, Record
from windlass.rehearse.scale import Change, shown

SLOW_SECONDS = 10.0  # between lines of one stage where nobody watches a terminal
NAME = 8
SECTIONS = ("model", "lora", "data", "train", "layout", "cluster", "watch")


class Terminal:
    """A spinner with what is being done where somebody watches; plain lines in a log. All of it on stderr."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False, emoji=False, markup=False, soft_wrap=True)
        self.status: Status | None = None
        self.name, self.began, self.printed = "", 0.0, 0.0

    def begin(self, name: str) -> None:
        self.name, self.began = name, time.monotonic()
        self.printed = self.began
        if sys.stderr.isatty():
            self.status = self.console.status(Text(name))
            self.status.start()

    def tick(self, doing: str) -> None:
        now = time.monotonic()
        line = f"{self.name:{NAME}} {now - self.began:5.0f} s  {doing}"
        if self.status is not None:
            self.status.update(Text(line))
        elif now - self.printed > SLOW_SECONDS:
            self.printed = now
            self.console.print(Text(f"{line} …"))

    def end(self, phase: Phase) -> None:
        if self.status is not None:
            self.status.stop()
            self.status = None
        verdict = Text("passed", "green") if phase.passed else Text("failed", "bold red")
        self.console.print(Text(f"{phase.name:{NAME}} {phase.seconds:5.1f} s  ") + verdict)


def show(record: Record) -> None:
    """What was found, on stdout; what failed in its own words."""
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
    if record.stand_ins:
        show_list(console, "stood in for what is not on this machine", record.stand_ins)
    if record.failure is not None:
        name = record.failure["phase"]
        console.print(
            Text.assemble(("failed: ", "bold red"), f"the stage {name} found a fault ({record.seconds:.0f} s)\n")
        )
        console.print(Text(record.failure["text"]), soft_wrap=True)
        if record.failure["log"]:
            console.print(Text(f"\nits whole log: {record.failure['log']}", "dim"), soft_wrap=True)
        return
    if record.changes:
        console.print(changes_table(record.changes))
    show_list(console, "not proven here", [f"{each['what']}: {each['why']}" for each in record.not_proved])
    ranks = record.ranks
    if not ranks["here"]:
        console.print(Text.assemble(("planned and rendered, not rehearsed: ", "yellow"), ranks["why"]))
        return
    few = "" if ranks["here"] == ranks["yours"] else f" of your {ranks['yours']}, as {ranks['why']}"
    kept = f"; everything is in {record.folder}" if record.folder else ""
    summary = f"rehearsed with {ranks['here']} ranks{few}, {ranks['layout']}, in {record.seconds:.0f} s{kept}"
    console.print(Text.assemble(("passed: ", "green"), summary))


def changes_table(changes: list[Change]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="changed for the rehearsal", title_justify="left")
    table.add_column("key", no_wrap=True)
    table.add_column("yours -> here", overflow="fold")
    table.add_column("why")
    for section in SECTIONS:
        own = [change for change in changes if change.key.startswith(f"{section}.")]
        added, dropped = ([c for c in own if c.yours is None], [c for c in own if c.here is None])
        for change in own:
            if change not in added and change not in dropped:
                table.add_row(change.key, f"{shown(change.yours)} -> {shown(change.here)}", change.why)
        if added:
            here = ", ".join(f"{c.key.removeprefix(f'{section}.')}: {shown(c.here)}" for c in added)
            table.add_row(section, here, added[0].why)
        if dropped:
            names = ", ".join(c.key.removeprefix(f"{section}.") for c in dropped)
            table.add_row(section, f"without {names}", dropped[0].why)
    return table


def show_list(console: Console, title: str, lines: list[str]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False, title=title, title_justify="left")
    table.add_column()
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row("-", line)
    console.print(table)
    console.print()
