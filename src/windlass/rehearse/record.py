"""What a rehearsal found, stage by stage. The keys of rehearsal.json are an interface: add, never rename."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from windlass import __version__
from windlass.errors import RANK_USER_INPUT, USER_INPUT
from windlass.files import write_atomic
from windlass.rehearse.scale import Change

RECORD = "rehearsal.json"


class Failed(Exception):  # noqa: N818  (it is no error of the rehearsal)
    """A stage that found a fault: the command's own words, its exit code, and where its log is."""

    def __init__(self, text: str, code: int, log: Path | None = None) -> None:
        super().__init__(text)
        self.text, self.log = text, log
        self.code = USER_INPUT if code in (USER_INPUT, RANK_USER_INPUT) else 1


@dataclass
class Phase:
    """One stage of the rehearsal: how long it took, and what it proved."""

    name: str
    seconds: float = 0.0
    passed: bool = False
    proved: list[str] = field(default_factory=list)


@dataclass
class Record:
    """All of it."""

    run: str
    ranks: dict[str, Any] = field(default_factory=dict)
    twin: dict[str, Any] = field(default_factory=dict)  # the tiny replica
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

    def fail(self, phase: Phase, failed: Failed) -> None:
        log = str(failed.log) if failed.log else None
        self.failure = {"phase": phase.name, "exit_code": failed.code, "text": failed.text, "log": log}

    def write(self, folder: Path) -> None:
        text = json.dumps(self.as_dict(), indent=2, ensure_ascii=False, default=str) + "\n"
        write_atomic(folder / RECORD, text)
