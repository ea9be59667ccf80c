"""Read a run folder's JSON lines while they grow or afterwards; damaged and incomplete ones are skipped."""

import itertools
import json
import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from windlass import run_folder
from windlass.files import Table
from windlass.observe import steps

NAN: Final = math.nan
DECODER: Final = json.JSONDecoder(parse_constant=lambda _: NAN)
CHUNK: Final = 2048  # lines
HEAD_BYTES: Final = 8 * 1024  # read at the start of a long file
SAMPLE_BYTES: Final = 2 * 1024  # read at each of its other places
MAX_WAITING: Final = 200  # steps that wait for a rank before they are given up
# Fields that are not numbers.
OBJECTS: Final = ("experts", "gpu_throttle", "skipped", "non_finite", "source_loss", "preference")

Record = dict[str, Any]  # a line


def is_as_in_the_data(line: Record) -> bool:
    """Return whether a continued prompt ended by itself and with the text that follows in the data."""
    reference = str(line.get("reference") or "").strip()
    return bool(reference) and line.get("ended") is not False and str(line.get("text", "")).strip() == reference


class Tail:
    """Reads the complete lines added to a file since the last reading. A file that became shorter is read anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.at = 0  # bytes read
        self.line = 0  # lines read
        self.table = Table()
        self.damaged: list[int] = []  # numbers of lines that are not JSON objects

    def skip(self) -> None:
        with suppress(OSError):
            self.at = self.path.stat().st_size

    def lines(self) -> Iterator[list[bytes]]:
        """Yield the new lines in chunks."""
        with suppress(OSError), self.path.open("rb") as file:
            if file.seek(0, 2) < self.at:
                self.at = self.line = 0
            file.seek(self.at)
            while True:
                lines = list(itertools.islice(file, CHUNK))
                if not lines:
                    return
                complete = lines if lines[-1].endswith(b"\n") else lines[:-1]
                self.at += sum(map(len, complete))
                self.line += len(complete)
                yield complete
                if complete is not lines:
                    return

    def sample_lines(self, places: int) -> list[bytes]:
        """Return some complete lines at each of `places` places, from the first to the last line of the file."""
        lines: list[bytes] = []
        with suppress(OSError), self.path.open("rb") as file:
            end = file.seek(0, 2)
            for place in range(places):
                size = SAMPLE_BYTES if place else HEAD_BYTES
                file.seek(max(0, min(end * place // (places - 1), end - size)))
                lines += file.read(size).split(b"\n")[1 if place else 0 : -1]  # the first and the last are incomplete
        return lines

    def chunks(self, lines_of: Iterable[list[bytes]] | None = None) -> Iterator[list[Record]]:
        """Yield the objects of all new lines, or of `lines_of`."""
        for lines in self.lines() if lines_of is None else lines_of:
            records = []
            for number, line in enumerate(lines, self.line - len(lines) + 1):
                try:
                    record = self.table.decode(DECODER.decode(str(line, "utf-8")))
                except (ValueError, RecursionError):
                    record = None
                if record:
                    records.append(record)
                elif record is None and lines_of is None:  # a sampled file's header may not have been read
                    self.damaged.append(number)
            yield records

    def objects(self) -> Iterator[Record]:
        return itertools.chain.from_iterable(self.chunks())


class JoinedSteps:
    """The steps that every rank has written."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.tails = {rank: Tail(folder / run_folder.STEPS.format(rank=rank)) for rank in range(ranks)}
        self.waiting: dict[int, dict[int, Record]] = {}
        self.latest: dict[int, Record] = {}  # by rank; fields of earlier steps are kept

    def read_new(self) -> list[tuple[int, dict[int, Record]]]:
        for rank, tail in self.tails.items():
            for record in tail.objects():
                step = record.get("step")
                if isinstance(step, int):
                    self.waiting.setdefault(step, {})[rank] = record
                    self.latest.setdefault(rank, {}).update(record)
        complete = sorted(step for step, records in self.waiting.items() if len(records) == len(self.tails))
        joined = [(step, dict(sorted(self.waiting.pop(step).items()))) for step in complete]
        for step in sorted(self.waiting)[:-MAX_WAITING]:
            del self.waiting[step]
        return joined


class Columns:
    """One rank's steps, field by field; NaN where a field was not measured in a step."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.length = 0
        self.unit = steps.TOKENS
        self.fields: dict[str, array[float]] = {"step": array("d")}
        self.objects: dict[str, dict[int, Any]] = {name: {} for name in OBJECTS}  # by row

    def __getitem__(self, name: str) -> Sequence[float]:
        return self.fields.get(name, ())

    def add(self, records: list[Record]) -> None:
        """Add records. A step that is already present was trained again: it replaces that step and all later ones."""
        numbered = [record for record in records if as_number(record.get("step")) >= 0]
        if not self.length and numbered:
            self.unit = steps.read_unit(numbered[0])
            self.names = [*dict.fromkeys((*self.names, *steps.unit_fields(self.unit)))]
        at = [as_number(record["step"]) for record in numbered]
        ends = [i for i in range(1, len(at)) if at[i] <= at[i - 1]]
        for start, end in itertools.pairwise([0, *ends, len(at)] if at else []):
            if self.length and at[start] <= self.fields["step"][-1]:
                self.length = bisect_left(self.fields["step"], at[start])
                for column in self.fields.values():
                    del column[self.length :]
                for name, by_row in self.objects.items():
                    self.objects[name] = {row: value for row, value in by_row.items() if row < self.length}
            self._extend(numbered[start:end])

    def _extend(self, records: list[Record]) -> None:
        present = set().union(*records)
        for name in self.names:
            if name not in present and name not in self.fields:
                continue
            values = [record.get(name, NAN) for record in records]
            self.fields.setdefault(name, array("d", [NAN]) * self.length)
            try:
                self.fields[name].extend(array("d", values))
            except (TypeError, OverflowError):  # null, text, or an integer too large
                self.fields[name].extend(map(as_number, values))
        for name in present & self.objects.keys():
            self.objects[name] |= {i: record[name] for i, record in enumerate(records, self.length) if record.get(name)}
        self.length += len(records)


# --- values of any type ---


def get_path(value: Any, *path: str) -> Any:
    """Return value[a][b]…, or None if a key is missing."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def find_total_steps(events: Iterable[Any], plan: Any) -> float:
    """Return the optimizer steps of a run as it counted them when it started, else as planned; NaN if unknown."""
    total = as_number(get_path(plan, "batch", "steps"))
    for event in events:
        started = event.get("kind") == "start"
        total = as_number(event["steps"]) if started and "steps" in event else total
    return total


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def as_number(value: Any) -> float:
    """Return a float; NaN for anything but a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return NAN
    try:
        value = float(value)
    except OverflowError:
        return NAN
    return value if math.isfinite(value) else NAN


def read_kept(evaluation: Mapping[str, Any], figure: str) -> dict[str, float]:
    """Return what an evaluation says of each kept set: its `loss`, how much `worse` than the base's, or `kl`."""
    ending = f"/{figure}"
    return {
        name.removeprefix(steps.KEPT).removesuffix(ending): as_number(value)
        for name, value in evaluation.items()
        if name.startswith(steps.KEPT) and name.endswith(ending)
    }


def drop_nan(values: Iterable[float]) -> list[float]:
    return [value for value in values if value == value]


def mean(values: Iterable[float]) -> float:
    known = drop_nan(values)
    return math.fsum(known) / len(known) if known else NAN


def median(values: Iterable[float]) -> float:
    known = sorted(drop_nan(values))
    return known[len(known) // 2] if known else NAN
