"""The data sets of a run, of a mix and of evaluations: which rows each has, and how many of them are in an epoch."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from windlass.data.reading import Source, SplitPart, read_rows
from windlass.data.sources import parse_split, resolve_source
from windlass.errors import UserError, Where
from windlass.runfile import Data, RunFile
from windlass.runfile.names import EVALUATED_SCHEDULES
from windlass.runfile.rows import MixedSet

# Rows whose keys together form the columns: JSON lines need not all have the same keys.
HEAD_ROWS = 100


@dataclass(frozen=True, slots=True)
class RowSet:
    """One data set: its name, its data section, where its keys are set, its share of a mix, and what it is for; once
    selected, also its rows."""

    name: str
    data: Data
    where: Where
    part: MixedSet | None = None
    evaluated: bool = False
    """The rows are an evaluation set or a kept one, and not trained on."""
    kept: bool = False
    """The rows should not get worse."""
    train: tuple[SplitPart, ...] = ()
    validation: tuple[SplitPart, ...] = ()
    fraction: float | None = None
    """Of `train`, that is held out."""
    columns: tuple[str, ...] = ()

    @property
    def held_out_name(self) -> str:
        return self.name if self.part else "validation"

    @property
    def source(self) -> Source:
        return self.train[0].source

    @property
    def validated(self) -> bool:
        return not self.kept and bool(self.validation or self.fraction or self.evaluated)


def list_training_sets(data: Data, where: Where) -> list[RowSet]:
    """Return the sets of the mix, or the only one."""
    return [
        RowSet(part.title, data.of(part), locate_key(where, f"data.mix[{i}]"), part) for i, part in enumerate(data.mix)
    ] or [RowSet("train", data, where)]


def list_all_sets(data: Data, where: Where) -> list[RowSet]:
    """Return the training sets, then the named evaluation sets, then those that should not get worse."""
    named = [("eval", name, data.of(part)) for name, part in data.eval.items()]
    named += [("keep", name, data.of_kept(part)) for name, part in data.keep.items()]
    evaluated = [
        RowSet(name, section, locate_key(where, f"data.{key}.{name}"), evaluated=True, kept=key == "keep")
        for key, name, section in named
    ]
    return [*list_training_sets(data, where), *evaluated]


def locate_key(where: Where, prefix: str) -> Where:
    """Return where a key of one set is set: there or in the data section."""
    own = {"data.dataset_name_or_path": "path", "data.train_split": "split"}

    def place(key: str) -> str:
        place = where(f"{prefix}.{own.get(key, key.removeprefix('data.'))}")
        return where(key) if place.startswith("default: ") else place

    return place


def select_rows(rows: RowSet, say: Callable[[str], None]) -> RowSet:
    """Return the set with its splits and columns."""
    data = rows.data
    where = rows.where
    source = resolve_source(data, where)
    if source.format == "hub":
        from windlass.data.hub import fetch_source

        source = fetch_source(data, where, say)
    train = parse_split(data.train_split, source, where("data.train_split"))
    validation: tuple[SplitPart, ...] = ()
    fraction = data.val_fraction
    if data.validation_split:
        try:
            validation = parse_split(data.validation_split, source, where("data.val_split"))
            fraction = None
        except UserError:
            if data.val_split != "auto" and not rows.part:
                raise
    columns = dict.fromkeys(key for row in itertools.islice(read_rows(train), HEAD_ROWS) for key in row)
    if not columns:
        raise find_no_rows(rows)
    return replace(rows, train=train, validation=validation, fraction=fraction, columns=tuple(columns))


def find_no_rows(rows: RowSet) -> UserError:
    """Return the error about a training split without rows: of an empty file, or of a slice that has none."""
    place = rows.where("data.train_split")
    source = resolve_source(rows.data, rows.where)
    paths = [path for part in parse_split(rows.data.train_split, source, place) for path in part.files]
    if not any(path.stat().st_size for path in paths):
        listed = ", ".join(map(str, paths))
        return UserError("is empty", listed, "copy the data again, or name another file", "empty-file")
    hint = f"name a split or a slice that has rows; the set has {', '.join(source.splits)}"
    return UserError(f"{source.name}: {rows.data.train_split} has no rows", place, hint, "no-rows")


def require_validation(run: RunFile, sets: Sequence[RowSet], where: Where) -> None:
    """Refuse a run that wants evaluation and has no validation rows."""
    train = run.train
    # Without any of these keys, data without validation rows are not evaluated.
    keys = ("eval_strategy", "eval_steps", "load_best_model_at_end")
    evaluating = [f"train.{key}" for key in keys if key in train.changed]
    if train.lr_scheduler_type in EVALUATED_SCHEDULES:
        evaluating.append("train.lr_scheduler_type")
    evaluating += ["data.keep"] if run.data.keep else []
    split = run.data.val_split
    if train.eval_strategy != "no" and split not in ("auto", None) and not any(rows.validated for rows in sets):
        have = "; ".join(f"{rows.name}: {', '.join(rows.source.splits)}" for rows in sets if not rows.evaluated)
        hint = "name one of these, hold rows out with data.val_fraction: 0.05, or leave data.val_split out"
        raise UserError(f"no data set has a split {split!r}; {have}", where("data.val_split"), hint, "no-such-split")
    if evaluating and train.eval_strategy != "no" and not any(rows.validated for rows in sets):
        splits = ", ".join(sets[0].source.splits)
        problem = f"{evaluating[0]} wants evaluation, and the data have no validation rows; their splits: {splits}"
        hint = "hold some out with data.val_fraction: 0.05, name data.val_split, or set train.eval_strategy: no"
        raise UserError(problem, where(evaluating[0]), hint, "no-validation-rows")


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
