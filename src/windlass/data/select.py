"""Choose the rows of each data set: what is trained on, what is held out, and what the run requires of them."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from windlass.data.cache import Say
from windlass.data.mix import RowSet, list_evaluation_sets, list_kept_sets, list_training_sets
from windlass.data.sources import Source, SplitPart, parse_split, read_rows, resolve_source
from windlass.errors import Problem, UserError, Where
from windlass.runfile import Data, RunFile
from windlass.runfile.names import EVALUATED_SCHEDULES

# Rows whose keys together form the columns: JSON lines need not all have the same keys.
HEAD_ROWS = 100


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows are trained on and which are held out."""

    of: RowSet
    train: tuple[SplitPart, ...]
    validation: tuple[SplitPart, ...]
    fraction: float | None
    columns: tuple[str, ...]
    evaluated: bool = False
    """The rows are an evaluation set or a kept one, and not trained on."""
    kept: bool = False
    """The rows should not get worse."""

    @property
    def source(self) -> Source:
        return self.train[0].source

    @property
    def validated(self) -> bool:
        return not self.kept and bool(self.validation or self.fraction or self.evaluated)


def select_all(data: Data, where: Where, say: Say) -> list[Selection]:
    """Return the training sets, then the named evaluation sets, then the kept ones."""
    train = [select_rows(rows, say) for rows in list_training_sets(data, where)]
    evaluation = [replace(select_rows(rows, say), evaluated=True) for rows in list_evaluation_sets(data, where)]
    kept = [replace(select_rows(rows, say), evaluated=True, kept=True) for rows in list_kept_sets(data, where)]
    return [*train, *evaluation, *kept]


def select_rows(of: RowSet, say: Say) -> Selection:
    """Determine the source's splits and columns."""
    data = of.data
    where = of.where
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
            if data.val_split != "auto" and not of.part:
                raise
    columns = dict.fromkeys(key for row in itertools.islice(read_rows(train), HEAD_ROWS) for key in row)
    if not columns:
        raise find_no_rows(of)
    return Selection(of, train, validation, fraction, tuple(columns))


def find_no_rows(of: RowSet) -> UserError:
    """Return the error about a training split without rows: of an empty file, or of a slice that has none."""
    place = of.where("data.train_split")
    source = resolve_source(of.data, of.where)
    paths = [path for part in parse_split(of.data.train_split, source, place) for path in part.files]
    if not any(path.stat().st_size for path in paths):
        listed = ", ".join(map(str, paths))
        return UserError("is empty", listed, "copy the data again, or name another file", "empty-file")
    hint = f"name a split or a slice that has rows; the set has {', '.join(source.splits)}"
    return UserError(f"{source.name}: {of.data.train_split} has no rows", place, hint, "no-rows")


def check_selection(run: RunFile, selections: Sequence[Selection], where: Where) -> list[Problem]:
    """Return what the run requires of its rows and can't have: evaluation without validation rows."""
    train = run.train
    problems = []
    # Without any of these keys, data without validation rows are not evaluated.
    keys = ("eval_strategy", "eval_steps", "load_best_model_at_end")
    evaluating = [f"train.{key}" for key in keys if key in train.changed]
    if train.lr_scheduler_type in EVALUATED_SCHEDULES:
        evaluating.append("train.lr_scheduler_type")
    has_validation = any(selection.validated for selection in selections)
    evaluating += ["data.keep"] if run.data.keep else []
    if evaluating and train.eval_strategy != "no" and not has_validation:
        splits = ", ".join(selections[0].source.splits)
        problem = f"{evaluating[0]} wants evaluation, and the data have no validation rows; their splits: {splits}"
        hint = "hold some out with data.val_fraction: 0.05, name data.val_split, or set train.eval_strategy: no"
        problems.append(Problem(problem, where(evaluating[0]), hint, "no-validation-rows"))
    return problems
