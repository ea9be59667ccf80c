"""A run folder's files as they are, also half written or damaged: what is there is used, what is missing is named.

Step files can be hundreds of megabytes. Each is read once, in chunks of lines; of all ranks but the first only sums,
medians and thinned curves are kept.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from windlass import run_folder
from windlass.errors import UserError
from windlass.files import read_json_lines
from windlass.observe import steps

NAN: Final = math.nan
CHUNK: Final = 2048  # lines that are parsed together
OPTIONAL: Final = (run_folder.MANIFEST, run_folder.PLAN, run_folder.LOAD, run_folder.DATA)
NOT_OF_SCRIPTS: Final = (run_folder.LOAD, run_folder.DATA)
NOT_NUMBERS: Final = ("experts", "rows", "gpu_throttle", "skipped", "non_finite")
ALL: Final = tuple(name for name in steps.FIELDS if name not in NOT_NUMBERS)
PHASE_FIELDS: Final = tuple(f"{phase}_seconds" for phase in steps.PHASES)
# What is kept of every rank; of the first one, all fields.
CURVES: Final = (
    *("step_seconds", "mfu", "gpu_utilization", "gpu_power_watts", "gpu_peak_gib", "gpu_reserved_gib", "rss_gib"),
)
SUMS: Final = (*PHASE_FIELDS, *CURVES, "tokens", "padded_tokens", "supervised_tokens", "gpu_temperature_celsius")
MEDIANS: Final = ("step_seconds", "tokens_per_second")

Series = tuple[list[float | None], list[float | None], list[float | None]]  # mean, least and most of each stretch


class Columns:
    """One rank's steps, field by field; NaN where a field was not measured in a step."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.length = 0
        self.unit = steps.TOKENS
        self.fields: dict[str, array[float]] = {"step": array("d")}
        self.experts: dict[int, dict[str, Any]] = {}  # by row
        self.throttled: dict[str, int] = {}  # reason -> samples
        self.skipped: list[int] = []  # steps
        self.non_finite: list[int] = []  # steps with a loss or gradient that is not finite

    def __getitem__(self, name: str) -> Sequence[float]:
        return self.fields.get(name, ())

    def add(self, records: list[dict[str, Any]], *, constants: bool) -> None:
        """More lines. A step that is there already was trained again: it and what came after it is replaced.

        constants: there is a NaN or Infinity among the values, which JSON doesn't have.
        """
        numbered = [record for record in records if number(record.get("step")) >= 0]
        if not self.length and numbered:
            self.unit = steps.unit(numbered[0])
            self.names = [*dict.fromkeys((*self.names, *steps.counted(self.unit)))]
        at = [number(record["step"]) for record in numbered]
        if any(a >= b for a, b in itertools.pairwise([self.fields["step"][-1] if self.length else -1.0, *at])):
            if len(numbered) > 1:
                for record in numbered:
                    self.add([record], constants=constants)
                return
            while self.length and self.fields["step"][-1] >= at[0]:
                self._drop_last()
        for name in self.names:
            values = [record.get(name, NAN) for record in numbered]
            if name not in self.fields:
                if values.count(NAN) == len(values):  # compares by identity first
                    continue
                self.fields[name] = array("d", [NAN]) * self.length
            try:
                self.fields[name].extend(array("d", values))
            except (TypeError, OverflowError):  # null, text, or an integer too large
                self.fields[name].extend(map(number, values))
        for row, (record, step) in enumerate(zip(numbered, at, strict=True), self.length):
            if isinstance(record.get("experts"), dict):
                self.experts[row] = record["experts"]
            for reason in listed(record.get("gpu_throttle")):
                self.throttled[str(reason)] = self.throttled.get(str(reason), 0) + 1
            if record.get("skipped") is True:
                self.skipped.append(int(step))
            odd = constants and any(record.get(name) is NAN for name in ("loss", "grad_norm"))
            if odd or record.get("non_finite"):
                self.non_finite.append(int(step))
        self.length += len(numbered)

    def _drop_last(self) -> None:
        self.length -= 1
        step = int(self.fields["step"][-1])
        for column in self.fields.values():
            column.pop()
        self.experts.pop(self.length, None)
        for found in (self.skipped, self.non_finite):
            if found and found[-1] == step:
                found.pop()


def read_columns(path: Path, names: Sequence[str], damaged: list[int]) -> Columns:
    """One rank's steps. Numbers of lines that can't be read go to `damaged`; a last one cut by a kill does not."""
    columns = Columns(names)
    constants: list[str] = []

    def constant(name: str) -> float:
        constants.append(name)
        return NAN

    decode = json.JSONDecoder(parse_constant=constant).decode
    with path.open("rb") as file:
        first = 1
        while lines := list(itertools.islice(file, CHUNK)):
            try:
                records = decode(str(b"[%b]" % b",".join(lines), "utf-8"))
            except (ValueError, RecursionError):
                records = []
            if len(records) != len(lines) or {*map(type, records)} != {dict}:
                records = []
                for at, line in enumerate(lines, first):
                    try:
                        value = decode(str(line, "utf-8"))
                    except (ValueError, RecursionError):
                        value = None
                    if isinstance(value, dict):
                        records.append(value)
                    elif line.endswith(b"\n"):
                        damaged.append(at)
            columns.add(records, constants=bool(constants))
            constants.clear()
            first += len(lines)
    return columns


@dataclass(frozen=True, slots=True)
class Stats:
    """Of the steps in which a field was measured."""

    count: int
    total: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Stats:
        found = known(values)
        return cls(len(found), math.fsum(found), max(found, default=NAN))


@dataclass
class Rank:
    """What is kept of one rank."""

    length: int
    stats: dict[str, Stats]
    medians: dict[str, float | None]
    curves: dict[str, Series]
    throttled: dict[str, int]

    @classmethod
    def of(cls, columns: Columns, by: Sequence[float], cuts: Sequence[int]) -> Rank:
        """`by`: the first rank's steps, `cuts`: how they are thinned."""
        return cls(
            columns.length,
            {name: Stats.of(columns[name]) for name in (*SUMS, columns.unit)},
            {name: median(columns[name]) for name in (*MEDIANS, steps.counted(columns.unit)[1])},
            {name: thin(aligned(columns, name, by), cuts) for name in CURVES if len(columns[name])},
            columns.throttled,
        )


@dataclass
class Run:
    folder: Path
    name: str
    first: Columns  # of the lowest rank
    ranks: dict[int, Rank]
    cuts: list[int]  # rows of the first rank's steps where the points of a curve begin and end
    job_items: Sequence[float]  # tokens, or what else is counted, of all ranks per step
    meters: dict[int, dict[str, Any]]
    events: list[dict[str, Any]]
    alarms: list[dict[str, Any]]
    files: dict[str, dict[str, Any]]  # plan.json and the others, as far as they are there
    absent: list[str]  # what is missing, and why
    watched: bool  # then no alarm means that there was none
    silent_seconds: float | None  # since the last heartbeat of any rank, if there is one
    unit: str = field(init=False)

    def __post_init__(self) -> None:
        self.unit = self.first.unit

    def ask(self, file: str, *path: str) -> Any:
        return ask(self.files.get(file), *path)


def read(folder: Path, points: int = 480) -> Run:
    """Everything the report needs, with curves of at most `points`. A folder without any step file is refused."""
    paths = run_folder.step_files(folder) if folder.is_dir() else {}
    if not paths:
        problem = "holds no steps-rank*.jsonl" if folder.is_dir() else "is not a folder"
        hint = "give a run folder: the output_dir of a run that has begun"
        raise UserError(problem if folder.exists() else "is not there", str(folder), hint)

    absent: list[str] = []
    lead: Columns | None = None
    cuts: list[int] = []
    items: list[float] = []
    ranks: dict[int, Rank] = {}
    for rank, path in paths.items():
        damaged: list[int] = []
        columns = read_columns(path, ("step", *SUMS, *MEDIANS) if lead else ALL, damaged)
        if damaged:
            count = "a line" if len(damaged) == 1 else f"{len(damaged)} lines"
            absent.append(f"{count} of {path.name} can't be read, the first is line {damaged[0]}")
        if lead is None:
            lead, cuts = columns, edges(columns.length, points)
        ranks[rank] = Rank.of(columns, lead["step"], cuts)
        own = aligned(columns, lead.unit, lead["step"])
        items = [a + b for a, b in zip(items, own, strict=True)] if items else list(own)
    assert lead is not None

    files, meters = {}, {}
    for name in OPTIONAL:
        value, why = read_object(folder / name)
        if value is not None:
            files[name] = value
        elif not (name in NOT_OF_SCRIPTS and ask(files.get(run_folder.MANIFEST), "kind") == "script"):
            absent.append(f"{name} {why}")
    for rank in paths:
        if (value := read_object(folder / run_folder.METER.format(rank=rank))[0]) is not None:
            meters[rank] = value
    beats = [number(ask(read_object(path)[0], "time")) for path in folder.glob("heartbeat-rank*.json")]
    watched = bool(beats) or (folder / run_folder.ALARMS).is_file()
    absent += [] if meters else [f"{run_folder.METER.format(rank=0)} is absent"]
    absent += [] if (folder / run_folder.EVENTS).is_file() else [f"{run_folder.EVENTS} is absent"]
    absent += [] if watched else [f"{run_folder.ALARMS} is absent"]
    newest = max(known(beats), default=NAN)
    return Run(
        folder=folder,
        name=folder.resolve().name or str(folder),
        first=lead,
        ranks=ranks,
        cuts=cuts,
        job_items=lead["job_tokens"] if len(lead["job_tokens"]) else items,
        meters=meters,
        events=list(read_lines(folder / run_folder.EVENTS)),
        alarms=list(read_lines(folder / run_folder.ALARMS)),
        files=files,
        absent=absent,
        watched=watched,
        silent_seconds=None if math.isnan(newest) else max(time.time() - newest, 0.0),
    )


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_file():
        yield from read_json_lines(path)


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


# --- values that may be anything ---


def ask(value: Any, *path: str) -> Any:
    """value[a][b]…, or None as soon as there is nothing to go into."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def number(value: Any) -> float:
    """A float, or NaN for whatever is not a finite number."""
    if type(value) is float and value - value == 0:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return NAN
    try:
        value = float(value)
    except OverflowError:
        return NAN
    return value if math.isfinite(value) else NAN


# --- numbers ---


def known(values: Iterable[float]) -> list[float]:
    return [value for value in values if value == value]


def mean(values: Iterable[float]) -> float | None:
    found = known(values)
    return math.fsum(found) / len(found) if found else None


def median(values: Iterable[float]) -> float | None:
    found = sorted(known(values))
    return found[len(found) // 2] if found else None


def aligned(columns: Columns, name: str, by: Sequence[float]) -> Sequence[float]:
    """A rank's field at the first rank's steps: a killed rank may have fewer."""
    values, own = columns[name], columns["step"]
    if not len(values):
        return [NAN] * len(by)
    if len(own) >= len(by) and (not len(by) or (own[0] == by[0] and own[len(by) - 1] == by[-1])):
        return values[: len(by)]
    at = dict(zip(own, values, strict=True))
    return [at.get(step, NAN) for step in by]


def edges(length: int, points: int) -> list[int]:
    """Where the stretches of a thinned curve begin; the last entry is the end."""
    count = min(length, points)
    return [length * i // count for i in range(count)] + [length] if count else [0]


def thin(values: Sequence[float], cuts: Sequence[int]) -> Series:
    """Few points that still show every spike: each is a stretch's mean, with its least and most."""
    stretches = [known(values[start:end]) for start, end in itertools.pairwise(cuts)]
    return (
        [short(math.fsum(stretch) / len(stretch)) if stretch else None for stretch in stretches],
        [short(min(stretch)) if stretch else None for stretch in stretches],
        [short(max(stretch)) if stretch else None for stretch in stretches],
    )


def short(value: float) -> float | None:
    """Five digits: more than a screen shows."""
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
