"""Successive halving of a sweep: compare its trials at an evaluation, and drop the worse ones."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass import run_folder
from windlass.errors import Problem, RunError, raise_all
from windlass.files import read_json_lines
from windlass.observe.background import BackgroundReport
from windlass.plan import Plan
from windlass.plan.finished import describe_halving
from windlass.run_folder import CHECKPOINTS, DROPPED, EVENTS, FAILED, HALVED, TRIALS, has_ended
from windlass.runfile.sweep import Halving, describe_other_rows, find_step_problems
from windlass.train.batches import RunLength
from windlass.train.checkpoint.folder import list_checkpoints, read_step


@dataclass(frozen=True, slots=True)
class CheckedData:
    """What the data of a trial decide before the base is loaded."""

    fingerprints: dict[str, str]
    template: Mapping[str, str]
    length: RunLength
    evaluated: str  # hash of the validation rows; empty without any


def require_halvings(plan: Plan, checked: Mapping[str, CheckedData]) -> None:
    """Refuse steps and rows that are seen to be wrong only now that the data are prepared."""
    problems: list[Problem] = []
    rows = {data.evaluated for data in checked.values()}
    if "" in rows:
        hint = "hold some out with data.val_fraction: 0.05, or leave out `keep` and `at`"
        what = "halving compares evaluations, and there are no validation rows"
        problems.append(Problem(what, plan.where("sweep.at"), hint, "not-evaluated"))
    elif len(rows) > 1:
        problems.append(describe_other_rows(plan.where))
    train = plan.run.train
    for name, data in checked.items():
        per_epoch = data.length.steps_per_epoch or data.length.total
        every = train.eval_steps if train.evaluation == "steps" else per_epoch
        problems += find_step_problems(plan.run.sweep.at, name, data.length.total, every, plan.where)
    raise_all([*dict.fromkeys(problems)])


def has_reached(trial: Plan, halving: Halving) -> bool:
    """Return whether a trial is evaluated and saved at this step, or later."""
    saved = [read_step(folder) for folder in list_checkpoints(trial.folder / CHECKPOINTS)]
    return max(saved, default=0) >= halving.step and read_loss(trial.folder, halving.step) is not None


def read_loss(folder: Path, step: int) -> float | None:
    """Return a trial's evaluation loss at this step, infinite if it is not finite; None if there is none."""
    path = folder / EVENTS
    events = [event for event in read_json_lines(path) if event.get("kind") == "eval"] if path.is_file() else []
    found = [event.get("eval_loss") for event in events if event.get("step") == step]
    if not found:
        return None
    return float(found[-1]) if isinstance(found[-1], int | float) and math.isfinite(found[-1]) else math.inf


def halve(plan: Plan, halving: Halving, going: Sequence[str], states: Mapping[str, str]) -> dict[str, Any]:
    """Decide which trials go on, and record it. Returns the decision. Doing it again decides the same."""
    losses = {}
    for name in going:
        loss = math.inf if states[name] == FAILED else read_loss(find_folder(plan, name), halving.step)
        if loss is None:
            where = str(find_folder(plan, name))
            hint = "remove the folder to train it again with --resume"
            raise RunError(f"trial {name} was not evaluated at step {halving.step}", where, hint, "not-evaluated")
        losses[name] = loss
    ranked = sorted(losses, key=lambda name: losses[name])  # of equals, the first of the run file
    kept = [name for name in ranked if losses[name] < math.inf][: halving.trials]
    measured = {name: None if loss == math.inf else loss for name, loss in losses.items()}
    decision = {"step": halving.step, "losses": measured, "kept": kept}
    manifest = run_folder.read_manifest(plan.folder)
    dropped = {name: DROPPED.format(halving.step) for name in going if name not in kept and not has_ended(states[name])}
    for name, state in dropped.items():
        run_folder.update_manifest(find_folder(plan, name), state=state)
        BackgroundReport(find_folder(plan, name)).start()
    halved = manifest.get(HALVED) or {**describe_halving(plan), "decisions": []}
    halved["decisions"] = [*halved["decisions"], decision]
    run_folder.update_manifest(plan.folder, **{HALVED: halved, TRIALS: {**manifest[TRIALS], **dropped}})
    return decision | {"dropped": dropped}


def find_folder(plan: Plan, name: str) -> Path:
    return plan.folder / TRIALS / name


def describe_decision(decision: Mapping[str, Any]) -> str:
    losses = decision["losses"]
    shown = {name: "diverged" if loss is None else f"{loss:.4f}" for name, loss in losses.items()}
    kept = [f"{name} ({shown.pop(name)})" for name in decision["kept"]]
    dropped = [f"{name} ({loss})" for name, loss in shown.items()]
    return f"step {decision['step']}: kept {', '.join(kept) or 'none'}; dropped {', '.join(dropped)}"
