"""A run folder's files as they are, half written or damaged ones too: whatever is there is used, the rest is named."""

from __future__ import annotations

import json
import math
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windlass.errors import UserError
from windlass.observe import steps

NAN = math.nan
OPTIONAL = ("manifest.json", "plan.json", "load.json", "data.json", "check.json")
OF_MODELS = ("load.json", "data.json")  # a script's run has none
# Every numeric field is kept of the first rank; of the others what differs between ranks.
PER_RANK = (
    *("step", "time", "step_seconds", "tokens", "padded_tokens", "supervised_tokens", "tokens_per_second"),
    *(f"{phase}_seconds" for phase in steps.PHASES),
    *("mfu", "gpu_peak_gib", "gpu_reserved_gib", "gpu_utilization", "gpu_power_watts", "gpu_temperature_celsius"),
    *("rss_gib", "cpu_cores", "page_faults"),
)
NOT_NUMBERS = ("experts", "rows", "gpu_throttle", "skipped", "non_finite")


@dataclass
class Columns:
    """One rank's steps, field by field; NaN where a field was not measured in a step."""

    length: int = 0
    unit: str = steps.TOKENS
    fields: dict[str, array[float]] = field(default_factory=dict)
    experts: dict[int, dict[str, Any]] = field(default_factory=dict)  # by row
    throttled: dict[str, int] = field(default_factory=dict)  # reason -> samples
    skipped: list[int] = field(default_factory=list)  # steps
    non_finite: list[int] = field(default_factory=list)  # steps with a loss or gradient that is no number

    def __getitem__(self, name: str) -> Sequence[float]:
        return self.fields.get(name, ())

    def add(self, line: dict[str, Any], names: Iterable[str]) -> None:
        """One more step. A step that is there already was trained again: it and what came after it is replaced."""
        step = number(line.get("step"))
        if math.isnan(step) or step < 0:
            return
        while self.length and self.fields["step"][-1] >= step:
            self._drop()
        for name in names:
            value = number(line.get(name))
            if name not in self.fields and not math.isnan(value):
                self.fields[name] = array("d", [NAN] * self.length)
            if name in self.fields:
                self.fields[name].append(value)
        self._odd(line, int(step))
        self.length += 1

    def _odd(self, line: dict[str, Any], step: int) -> None:
        if isinstance(line.get("experts"), dict):
            self.experts[self.length] = line["experts"]
        for reason in listed(line.get("gpu_throttle")):
            self.throttled[str(reason)] = self.throttled.get(str(reason), 0) + 1
        if line.get("skipped") is True:
            self.skipped.append(step)
        values = (line.get("loss"), line.get("grad_norm"))
        if line.get("non_finite") or any(isinstance(v, float) and not math.isfinite(v) for v in values):
            self.non_finite.append(step)

    def _drop(self) -> None:
        self.length -= 1
        step = int(self.fields["step"][-1])
        for column in self.fields.values():
            column.pop()
        self.experts.pop(self.length, None)
        for found in (self.skipped, self.non_finite):
            if found and found[-1] == step:
                found.pop()


@dataclass
class Run:
    folder: Path
    name: str
    ranks: dict[int, Columns]
    meters: dict[int, dict[str, Any]]
    events: list[dict[str, Any]]
    alarms: list[dict[str, Any]]
    files: dict[str, dict[str, Any]]  # plan.json and the others, as far as they are there
    absent: list[str]  # and why
    unit: str  # what is counted: tokens, images …
    watched: bool  # by windlass: no alarm then means that there was none
    silent_seconds: float | None = None  # since the last heartbeat of any rank, where the run has some

    @property
    def first(self) -> Columns:
        return self.ranks[min(self.ranks)]

    def ask(self, file: str, *path: str) -> Any:
        return ask(self.files.get(file), *path)


def read(folder: Path) -> Run:
    """Everything the report needs. Only a folder without any step file is refused."""
    found = steps.files(folder) if folder.is_dir() else {}
    if not found:
        known_ = "holds no steps-rank*.jsonl" if folder.is_dir() else "is not a folder"
        problem = known_ if folder.exists() else "is not there"
        raise UserError(problem, str(folder), "give a run folder: the output_dir of a run that has begun")
    files: dict[str, dict[str, Any]] = {}
    absent: list[str] = []
    ranks = {rank: columns(path, absent, first=rank == min(found)) for rank, path in found.items()}
    for name in OPTIONAL:
        value, why = read_object(folder / name)
        if value is not None:
            files[name] = value
        elif name != "check.json" and not (name in OF_MODELS and ask(files.get("manifest.json"), "kind") == "script"):
            absent.append(f"{name} {why}")
    meters = {}
    for rank in found:
        value, why = read_object(folder / steps.METER.format(rank=rank))
        if value is not None:
            meters[rank] = value
    if not meters:
        absent.append("meter-rank0.json is absent")
    watched = (folder / steps.ALARMS).is_file() or any(folder.glob("heartbeat-rank*.json"))
    absent += [f"{steps.EVENTS} is absent"] if not (folder / steps.EVENTS).is_file() else []
    absent += [f"{steps.ALARMS} is absent"] if not watched else []
    return Run(
        folder=folder,
        name=folder.resolve().name or str(folder),
        ranks=ranks,
        meters=meters,
        events=list(read_lines(folder / steps.EVENTS)),
        alarms=list(read_lines(folder / steps.ALARMS)),
        files=files,
        absent=absent,
        unit=next((made.unit for made in ranks.values() if made.length), steps.TOKENS),
        watched=watched,
        silent_seconds=silent(folder),
    )


def silent(folder: Path) -> float | None:
    """By the files' own clock and this machine's."""
    times = [number(ask(read_object(path)[0], "time")) for path in folder.glob("heartbeat-rank*.json")]
    newest = max(known(times), default=NAN)
    return None if math.isnan(newest) else max(time.time() - newest, 0.0)


def columns(path: Path, absent: list[str], *, first: bool) -> Columns:
    """One rank's steps; what of its file can't be read is added to `absent`."""
    damaged: list[int] = []
    names = [name for name in steps.FIELDS if name not in NOT_NUMBERS] if first else [*PER_RANK]
    made = Columns()
    for line in steps.lines(path, damaged):
        if not made.length:
            made.unit = steps.unit(line)
            names = [*dict.fromkeys((*names, *steps.counted(made.unit)))]
        made.add(line, names)
    if damaged:
        count = "a line" if len(damaged) == 1 else f"{len(damaged)} lines"
        absent.append(f"{count} of {path.name} can't be read, the first is line {damaged[0]}")
    return made


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_file():
        yield from steps.lines(path)


def read_object(path: Path) -> tuple[dict[str, Any] | None, str]:
    """The file's JSON object, or why there is none."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None, "is absent"
    except OSError as error:
        return None, f"can't be read: {error.strerror}"
    except (ValueError, RecursionError):
        return None, "is not JSON"
    return (value, "") if isinstance(value, dict) else (None, "is not a JSON object")


def ask(value: Any, *path: str) -> Any:
    """value[a][b]…, or None as soon as there is nothing to go into."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def number(value: Any) -> float:
    """A float, or NaN for whatever is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return NAN
    try:
        value = float(value)
    except OverflowError:
        return NAN
    return value if math.isfinite(value) else NAN


def known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def mean(values: Iterable[float]) -> float | None:
    found = known(values)
    return math.fsum(found) / len(found) if found else None


def median(values: Iterable[float]) -> float | None:
    found = sorted(known(values))
    return found[len(found) // 2] if found else None
