"""The trials of a sweep side by side: their settings and results, lowest evaluation loss first."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from windlass import run_folder
from windlass.observe.format import NONE, format_duration, format_figure, shorten
from windlass.observe.reader import as_dict, get_path
from windlass.observe.report.facts import Facts
from windlass.runfile.objectives import explain_other_losses

MAX_LETTERS: Final = 40  # of a setting's value in a table
FIGURES: Final = ("final_loss", "gain", "kept_worse", "steps", "seconds")  # of a run's headline, as they are
OTHER_ROWS: Final = "evaluated on other rows than most"
# Of an evaluated set: what is equal only for the same rows.
SAME_ROWS: Final = ("rows", "tokens", "supervised_tokens", "unigram_loss", "lowest_id", "highest_id")


@dataclass(frozen=True, slots=True)
class TrialResult:
    """A trial's settings and what came of them."""

    name: str
    state: str
    settings: Mapping[str, Any]
    eval_loss: float | None  # the lowest
    final_loss: float | None  # of training
    gain: float | None  # the largest over the base without an adapter
    kept_worse: float | None  # loss above the base's of the kept set that got worse most, at the last evaluation
    steps: int | None
    seconds: float | None
    note: str


@dataclass(frozen=True, slots=True)
class SweepResult:
    """All trials, the best first; and for each key's value the mean and the lowest evaluation loss of its trials."""

    folder: Path
    trials: tuple[TrialResult, ...]
    effects: tuple[tuple[str, str, int, float, float], ...]
    compared_at: int | None = None  # step: of a halved sweep, the first halving, which all trials have reached

    def as_dict(self) -> dict[str, Any]:
        names = ("key", "value", "trials", "mean_eval_loss", "least_eval_loss")
        effects = [dict(zip(names, effect, strict=True)) for effect in self.effects]
        at = {} if self.compared_at is None else {"effects_at_step": self.compared_at}
        return {"trials": [asdict(trial) for trial in self.trials], "effects": effects, **at}

    @property
    def keys(self) -> list[str]:
        return list(dict.fromkeys(key for trial in self.trials for key in trial.settings))

    @property
    def measured(self) -> dict[str, str]:
        """Return what else was measured of at least one trial: the column's name, and the field."""
        fields = {"gain over the base": "gain", "kept sets: worse by": "kept_worse"}
        present = {field for trial in self.trials for field in fields.values() if getattr(trial, field) is not None}
        return {name: field for name, field in fields.items() if field in present}

    @property
    def caution(self) -> str:
        """Why the losses can't be compared: keys of the objective change what they measure. Empty if they can."""
        return explain_other_losses((key for key, *_ in self.effects), self.folder)

    def trial_rows(self, *, wide: bool) -> list[list[str]]:
        """Return the table of trials as text; its first row is its head. wide: with a column for each key, instead of
        lines below the trial's name."""
        measured = self.measured
        head = ["trial", "evaluation loss", "final loss", "steps", "time", "state"]
        rows = [[*head, *measured, *self.keys] if wide else head]
        for trial in self.trials:
            figures = [format_figure(getattr(trial, field), digits=4) for field in measured.values()]
            shown = {key: shorten(write_value(value), MAX_LETTERS) for key, value in trial.settings.items()}
            losses = [format_figure(loss, digits=5) for loss in (trial.eval_loss, trial.final_loss)]
            state = f"{trial.state}; {trial.note}" if trial.note else trial.state
            cells = [*losses, format_figure(trial.steps), format_duration(trial.seconds), state]
            if wide:
                rows.append([trial.name, *cells, *figures, *(shown.get(key, NONE) for key in self.keys)])
                continue
            below = [f"  {key} {value}" for key, value in shown.items()]
            below += [f"  {name} {figure}" for name, figure in zip(measured, figures, strict=True)]
            rows.append(["\n".join([trial.name, *below]), *cells])
        return rows

    def effect_rows(self) -> list[list[str]]:
        """Return what each setting did as text; the first row is the head. None if no key has two values measured."""
        rows = [
            [key, shorten(value, MAX_LETTERS), str(count), *(format_figure(loss, digits=5) for loss in losses)]
            for key, value, count, *losses in self.effects
        ]
        at = "" if self.compared_at is None else f" at step {self.compared_at}"
        return [["setting", "value", "trials", f"mean evaluation loss{at}", "lowest"], *rows] if rows else []


def collect_trials(folder: Path, runs: Mapping[Path, Facts]) -> SweepResult:
    """Compare a sweep's trials. `runs`: the facts of those that have begun, by folder, as strict JSON."""
    manifest = run_folder.read_manifest(folder)
    settings = manifest.get(run_folder.SWEEP_SETTINGS) or {}
    halved = next(iter(as_dict(manifest.get(run_folder.HALVED)).get("decisions") or []), None)
    rows_of = {path: identify_rows(facts) for path, facts in runs.items()}
    seen = [rows for rows in rows_of.values() if rows]
    usual = max(seen, key=seen.count) if seen else None
    trials = []
    for path, recorded in run_folder.list_trials(folder).items():
        facts = runs.get(path)
        head = facts["headline"] if facts else {}
        differs = facts is not None and rows_of[path] is not None and rows_of[path] != usual
        state = facts["state"] if facts else recorded
        figures: dict[str, Any] = {name: head.get(name) for name in FIGURES}
        figures |= {"eval_loss": head.get("least_eval_loss"), "note": OTHER_ROWS if differs else ""}
        trials.append(TrialResult(path.name, state, settings.get(path.name) or {}, **figures))
    trials.sort(key=lambda trial: (bool(trial.note), math.inf if trial.eval_loss is None else trial.eval_loss))
    losses = {trial.name: trial.eval_loss for trial in trials if not trial.note} if halved is None else halved["losses"]
    at = None if halved is None else halved["step"]
    return SweepResult(folder, tuple(trials), tuple(list_effects(trials, losses)), at)


def identify_rows(facts: Facts) -> tuple[Any, ...] | None:
    """Return what tells one set of evaluated rows from another; None if nothing was evaluated."""
    validation = get_path(facts["data"], "splits", "validation")
    return tuple(validation.get(name) for name in SAME_ROWS) if isinstance(validation, dict) else None


def list_effects(
    trials: Sequence[TrialResult], losses_of: Mapping[str, float | None]
) -> list[tuple[str, str, int, float, float]]:
    """Return for each value of each key the number of trials and their evaluation losses, on the same rows."""
    losses: dict[str, dict[str, list[float]]] = {}
    for trial in trials:
        for key, value in trial.settings.items():
            loss = losses_of.get(trial.name)
            if loss is not None:
                losses.setdefault(key, {}).setdefault(write_value(value), []).append(loss)
    return [
        (key, value, len(found), fmean(found), min(found))
        for key, by_value in losses.items()
        if len(by_value) > 1
        for value, found in by_value.items()
    ]


def write_value(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
