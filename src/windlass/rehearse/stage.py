"""Where a rehearsal happens: its folder, its record, what is shown, and the commands that it starts."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from windlass.errors import Problem, RunError
from windlass.rehearse import process
from windlass.rehearse.record import Failed, Phase, Record, fail

# What is shown while a phase goes on, until it knows better.
DOING = {
    "plan": "your run file against the model's config and headers",
    "check": "windlass check, on this machine",
    "submit": "your job, rendered",
    "data": "your first rows, tokenised",
    "twin": "the model in small, onto disk",
    "launch": "the launch script, rendered and started",
    "load": "preparing the data, loading the model",
    "train": "the first steps",
    "stop": "SIGTERM was sent, the ranks save",
    "resume": "the same script again",
    "finish": "the last steps",
    "best": "every saved adapter, evaluated again",
    "export": "the best adapter, in PEFT's format",
    "merge": "the adapter merged into the twin",
    "reload": "plain transformers and PEFT open both",
}
LAST_LINES = 40  # of a log, where a command that failed said nothing shorter


class Screen(Protocol):
    """Who watches."""

    def begin(self, name: str) -> None: ...
    def tick(self, doing: str) -> None: ...
    def end(self, phase: Phase) -> None: ...


@dataclass
class Stage:
    """One rehearsal as it goes on."""

    run: Path
    options: list[str]  # --override and --accelerate, as they were given
    folder: Path
    environ: Mapping[str, str]
    record: Record
    screen: Screen
    doing: str = ""
    plan: dict[str, Any] = field(default_factory=dict)

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def rehearsal(self) -> Path:
        """The run folder of the run in small."""
        return self.folder / "run"

    def tick(self) -> None:
        self.screen.tick(self.doing)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Timed, shown, recorded; a fault ends the rehearsal."""
        phase, began, self.doing = Phase(name), time.monotonic(), DOING[name]
        self.record.phases.append(phase)
        self.screen.begin(name)
        try:
            yield phase
            phase.passed = True
        except RunError as error:  # the rehearsal's own: a command that does not end
            failed = Failed(str(error), 1)
            fail(self.record, phase, failed)
            raise failed from None
        except Failed as failed:
            fail(self.record, phase, failed)
            raise
        finally:
            phase.seconds = round(time.monotonic() - began, 2)
            self.screen.end(phase)

    @contextlib.contextmanager
    def started(self, name: str, command: Sequence[str], **more: str) -> Iterator[process.Running]:
        with process.started(name, command, self.logs, {**self.environ, **more}) as running:
            yield running

    @contextlib.contextmanager
    def launched(self, name: str, **more: str) -> Iterator[process.Running]:
        """The launch script of the run in small, on every node that this machine plays."""
        command = ["bash", str(self.rehearsal / "launch.sh")]
        nodes = process.places(self.record.ranks["nodes"])
        with process.started(name, command, self.logs, {**self.environ, **more}, nodes) as running:
            yield running

    def call(self, name: str, command: Sequence[str], **more: str) -> process.Ended:
        """Run a command to its end; a failure is a `Failed` with the command's own words."""
        with self.started(name, command, **more) as running:
            ended = running.ended(self.tick)
        require(ended)
        return ended

    def windlass(self, name: str, *arguments: str) -> Any:
        """One of windlass's commands with --json: what it printed, read."""
        return json.loads(self.call(name, process.windlass(*arguments, "--json")).out)


def require(ended: process.Ended, code: int = 0) -> None:
    if ended.code != code:
        raise Failed(said(ended) or f"it ended with {ended.code} and said nothing", ended.code, ended.log)


def faults(results: Sequence[Mapping[str, Any]]) -> str:
    """Failed checks as errors: what `windlass check` shows as a table."""
    bad = [Problem(r["seen"], r["where"] or r["name"], r["hint"]) for r in results if r["verdict"] == "fail"]
    return "\n\n".join(f"{process.ERROR}{problem}" for problem in bad)


def said(ended: process.Ended) -> str:
    """What a command that failed told: from its first `error:` on, else its last lines."""
    lines = ended.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith(process.ERROR)), None)
    return "\n".join(lines[first:] if first is not None else lines[-LAST_LINES:])
