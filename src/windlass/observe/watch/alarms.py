"""One finding of the watch, the file that stores them, and the error that ends a run because of one."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from windlass import run_folder
from windlass.errors import RunError
from windlass.files import append_json_line


@dataclass(frozen=True, slots=True)
class Alarm:
    kind: str
    step: int
    message: str
    rank: int | None = None  # None: of the whole run
    level: str = "warn"  # the action it led to; `stop` makes the report's verdict bad
    broken: bool = False  # the loss itself is not finite: nothing trained after it is any good; not in the file
    time: float = field(default_factory=lambda: round(time.time(), 3))

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" rank {self.rank}"
        return f"{self.kind.replace('_', ' ')} at step {self.step}{rank}: {self.message}"


class AlarmError(RunError):
    """An alarm ends the run. `logged`: it is in alarms.jsonl already."""

    def __init__(self, kind: str, problem: str, where: str, hint: str, *, logged: bool = False) -> None:
        super().__init__(problem, where, hint)
        self.kind, self.logged = kind, logged


def append(folder: Path, alarm: Alarm) -> None:
    line = asdict(alarm)
    del line["broken"]
    append_json_line(folder / run_folder.ALARMS, line)
