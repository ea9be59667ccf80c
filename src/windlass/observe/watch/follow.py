"""Files that still grow, read from where the reading stopped; the steps of all ranks joined."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from windlass.observe import steps

LATE = 200  # steps that wait for a rank before they are given up


class Tail:
    """New whole lines of one file, each an object. A file that became shorter is read anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.at = 0

    def skip(self) -> None:
        """Past what is there already."""
        with suppress(OSError):
            self.at = self.path.stat().st_size

    def text(self) -> Iterator[bytes]:
        try:
            with self.path.open("rb") as handle:
                size = handle.seek(0, 2)
                self.at = 0 if size < self.at else self.at
                handle.seek(self.at)
                for line in handle:
                    if not line.endswith(b"\n"):
                        return
                    self.at += len(line)
                    yield line
        except OSError:
            return

    def objects(self) -> Iterator[dict[str, Any]]:
        for line in self.text():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                yield value


class Joined:
    """Steps of which every rank has written its line."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.tails = {rank: Tail(folder / steps.STEPS.format(rank=rank)) for rank in range(ranks)}
        self.open: dict[int, dict[int, dict[str, Any]]] = {}
        self.latest: dict[int, dict[str, Any]] = {}  # by rank, fields of earlier steps kept

    def new(self) -> list[tuple[int, dict[int, dict[str, Any]]]]:
        for rank, tail in self.tails.items():
            for record in tail.objects():
                if isinstance(step := record.get("step"), int):
                    self.open.setdefault(step, {})[rank] = record
                    self.latest[rank] = {**self.latest.get(rank, {}), **record}
        whole = sorted(step for step, records in self.open.items() if len(records) == len(self.tails))
        done = [(step, dict(sorted(self.open.pop(step).items()))) for step in whole]
        for step in sorted(self.open)[:-LATE]:
            del self.open[step]
        return done
