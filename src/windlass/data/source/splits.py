"""Which rows a split's name asks for: `train`, `train[:5%]`, `train[100:200]+extra`."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from windlass.errors import UserError

# How published folders name one and the same split.
ALIASES = {
    "training": "train",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "testing": "test",
    "eval": "test",
}
SLICE = re.compile(r"(?P<name>[^\[\]+]+)(\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?")


@dataclass(frozen=True, slots=True)
class Part:
    """A split, or a run of its rows. Bounds are rows, or per cent where `%` was written."""

    split: str
    start: str = ""
    stop: str = ""

    @property
    def whole(self) -> bool:
        return not self.start and not self.stop

    def bounds(self, rows: int) -> tuple[int, int]:
        """The rows asked for, out of so many: as a Python slice, per cents rounded to the nearest row."""
        start = edge(self.start, rows, 0)
        stop = edge(self.stop, rows, rows)
        return start, max(start, stop)


def edge(text: str, rows: int, absent: int) -> int:
    if not text:
        return absent
    number = round(rows * int(text[:-1]) / 100) if text.endswith("%") else int(text)
    return min(max(number + rows if number < 0 else number, 0), rows)


def parse(spec: str, where: str) -> tuple[Part, ...]:
    """Every part of a split's specification, in the order written."""
    parts = []
    for piece in spec.split("+"):
        found = SLICE.fullmatch(piece.strip())
        if found is None:
            raise UserError(
                f"{spec!r} is not a split",
                where,
                "write a split's name, or a slice of it: train, train[:5%], train[100:200], train[:90%]+extra",
            )
        parts.append(Part(found["name"].strip(), found["start"] or "", found["stop"] or ""))
    return tuple(parts)


def canonical(name: str) -> str:
    return ALIASES.get(name.lower(), name.lower())


def locate(name: str, splits: Collection[str]) -> str | None:
    """The split of that name, or the one split that goes by another of its usual names."""
    if name in splits:
        return name
    alike = [split for split in splits if canonical(split) == canonical(name)]
    return alike[0] if len(alike) == 1 else None


def find(name: str, splits: Sequence[str], where: str) -> str:
    found = locate(name, splits)
    if found is None:
        raise UserError(
            f"the data has no split {name!r}; it has {', '.join(map(repr, splits))}",
            where,
            "name one of these, or hold rows out of the training split with data.val_fraction",
        )
    return found


def of_file(stem: str) -> str | None:
    """The split that a file's or folder's name tells of: `train-00000-of-00002`, `wiki.valid`, `dev`."""
    words = re.split(r"[^A-Za-z]+", stem.lower())
    named = {canonical(word) for word in words} & {"train", "validation", "test"}
    return named.pop() if len(named) == 1 else None
