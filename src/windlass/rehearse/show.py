"""A rehearsal on the terminal: each phase as it goes on, then what was proven, changed, and left unproven."""

from __future__ import annotations

import sys
import time

from rich import box
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from windlass.rehearse.derived import Change, shown
from windlass.rehearse.record import Phase, Record

SLOW_SECONDS = 10.0  # between lines of one phase where nobody watches a terminal
NAME = 8
SECTIONS = ("model", "lora", "data", "train", "layout", "cluster", "watch")


class Terminal:
    """A spinner with what is being done where somebody watches; plain lines in a log. All of it on stderr."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False, emoji=False, markup=False, soft_wrap=True)
        self.status: Status | None = None
        self.name, self.began, self.told = "", 0.0, 0.0

    def begin(self, name: str) -> None:
        self.name, self.began = name, time.monotonic()
        self.told = self.began
        if sys.stderr.isatty():
            self.status = self.console.status(Text(name))
            self.status.start()

    def tick(self, doing: str) -> None:
        seconds = time.monotonic() - self.began
        words = f"{self.name:{NAME}} {seconds:5.0f} s  {doing}"
        if self.status is not None:
            self.status.update(Text(words))
        elif time.monotonic() - self.told > SLOW_SECONDS:
            self.told = time.monotonic()
            self.console.print(Text(f"{words} …"))

    def end(self, phase: Phase) -> None:
        if self.status is not None:
            self.status.stop()
            self.status = None
        verdict = Text("passed", "green") if phase.passed else Text("failed", "bold red")
        self.console.print(Text(f"{phase.name:{NAME}} {phase.seconds:5.1f} s  ") + verdict)


def show(record: Record) -> None:
    """What was found, on stdout; what failed in its own words."""
    console = Console(highlight=False, emoji=False, markup=False)
    console.print(phases(record))
    if record.stand_ins:
        listed(console, "stood in for what is not on this machine", record.stand_ins)
    if record.failure is None:
        if record.changes:
            console.print(changes(record))
        listed(console, "not proven here", [f"{each['what']}: {each['why']}" for each in record.not_proved])
        console.print(verdict(record))
        return
    console.print(verdict(record))
    console.print()
    console.print(Text(record.failure["text"]), soft_wrap=True)
    if record.failure["log"]:
        console.print(Text(f"\nits whole log: {record.failure['log']}", "dim"), soft_wrap=True)


def phases(record: Record) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("phase", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("what it proved", overflow="fold")
    for phase in record.phases:
        said = Text("\n".join(phase.proved))
        if not phase.passed:
            before = f"; before that: {said}" if phase.proved else ""
            said = Text.assemble(("failed", "bold red"), before)
        table.add_row(phase.name, f"{phase.seconds:.1f}", said)
    return table


def changes(record: Record) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="changed for the rehearsal", title_justify="left")
    for name in ("key", "yours -> here", "why"):
        table.add_column(name, overflow="fold")
    for section in SECTIONS:
        own = [change for change in record.changes if change.key.partition(".")[0] == section]
        added, dropped = ([c for c in own if c.yours is None], [c for c in own if c.here is None])
        for change in own:
            if change not in added and change not in dropped:
                table.add_row(change.key, f"{shown(change.yours)} -> {shown(change.here)}", change.why)
        if added:
            table.add_row(section, ", ".join(f"{last(c)}: {shown(c.here)}" for c in added), added[0].why)
        if dropped:
            table.add_row(section, f"without {', '.join(map(last, dropped))}", dropped[0].why)
    return table


def last(change: Change) -> str:
    return change.key.partition(".")[2]


def listed(console: Console, title: str, lines: list[str]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False, title=title, title_justify="left")
    table.add_column()
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row("-", line)
    console.print(table)
    console.print()


def verdict(record: Record) -> Text:
    ranks = record.ranks
    if record.failure:
        name = record.failure["phase"]
        return Text.assemble(("failed: ", "bold red"), f"the phase {name} found a fault ({record.seconds:.0f} s)")
    if not ranks["here"]:
        return Text.assemble(("planned and rendered, not rehearsed: ", "yellow"), ranks["why"])
    few = "" if ranks["here"] == ranks["yours"] else f" of your {ranks['yours']}, as {ranks['why']}"
    where = f"; everything lies in {record.folder}" if record.folder else ""
    said = f"rehearsed with {ranks['here']} ranks{few}, {ranks['layout']}, in {record.seconds:.0f} s{where}"
    return Text.assemble(("passed: ", "green"), said)
