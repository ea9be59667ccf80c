"""Several data sets trained on as one, and named evaluation sets: which rows, and how many of them per epoch."""

from collections.abc import Sequence
from dataclasses import dataclass

from windlass.errors import Where
from windlass.runfile import Data
from windlass.runfile.rows import MixedSet

VALIDATION = "validation"  # name of the evaluation set of a run with a single data set


@dataclass(frozen=True, slots=True)
class RowSet:
    """One data set: its name, its data section, where its keys are set, and its share of a mix."""

    name: str
    data: Data
    where: Where
    part: MixedSet | None = None

    @property
    def held_out_name(self) -> str:
        return self.name if self.part else VALIDATION


def list_training_sets(data: Data, where: Where) -> list[RowSet]:
    """Return the sets of the mix, or the only one."""
    return [
        RowSet(part.title, data.of(part), locate_key(where, f"data.mix[{i}]"), part) for i, part in enumerate(data.mix)
    ] or [RowSet("train", data, where)]


def list_evaluation_sets(data: Data, where: Where) -> list[RowSet]:
    """Return the named evaluation sets, without validation splits and held-out rows."""
    return [RowSet(name, data.of(part), locate_key(where, f"data.eval.{name}")) for name, part in data.eval.items()]


def list_kept_sets(data: Data, where: Where) -> list[RowSet]:
    """Return the sets that should not get worse."""
    kept = data.keep.items()
    return [RowSet(name, data.of_kept(part), locate_key(where, f"data.keep.{name}")) for name, part in kept]


def list_all_sets(data: Data, where: Where) -> list[RowSet]:
    return [*list_training_sets(data, where), *list_evaluation_sets(data, where), *list_kept_sets(data, where)]


def locate_key(where: Where, prefix: str) -> Where:
    """Return where a key of one set is set: there or in the data section."""
    own = {"data.dataset_name_or_path": "path", "data.train_split": "split"}

    def place(key: str) -> str:
        place = where(f"{prefix}.{own.get(key, key.removeprefix('data.'))}")
        return where(key) if place.startswith("default: ") else place

    return place


def count_per_epoch(sets: Sequence[RowSet], rows: Sequence[int], sequences: Sequence[int]) -> list[int]:
    """Return each set's sequences per epoch, at least one. With weights: until the scarcest has been seen once."""
    parts = [each.part for each in sets]
    weighted = [(n, part.weight) for n, part in zip(sequences, parts, strict=True) if part and part.weight]
    scale = min((n / weight for n, weight in weighted), default=0.0)

    def count(part: MixedSet | None, has_rows: int, has: int) -> float:
        if part is None:
            return has
        if part.weight:
            return part.weight * scale
        return part.rows * has / has_rows if part.rows else has * (part.epochs or 1)

    return [max(1, round(count(*each))) if each[2] else 0 for each in zip(parts, rows, sequences, strict=True)]
