"""Successive halving of a sweep: after which steps how many of its trials go on."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from windlass.errors import Problem
from windlass.runfile.fields import RunFile, Sweep

Where = Callable[[str], str]
# Of rows that are held out of these a trial that differs in them has others.
SOURCES: Final = ("dataset_name_or_path", "dataset_config_name", "train_split", "mix")


class Halving(NamedTuple):
    """After this step so many trials go on."""

    step: int
    trials: int


def list_halvings(sweep: Sweep, trials: int) -> tuple[Halving, ...]:
    """Return the steps that drop trials: each leaves half, rounded up, but `keep` at least, and the last one `keep`."""
    keep = sweep.keep or trials
    halvings = []
    for step in sweep.at:
        left = keep if step == sweep.at[-1] else max(keep, math.ceil(trials / 2))
        if left < trials:
            halvings.append(Halving(step, left))
        trials = left
    return tuple(halvings)


def find_halving_problems(trials: Mapping[str, RunFile], run: RunFile, where: Where) -> Iterator[Problem]:
    """Yield why these trials can't be halved as `keep` and `at` say."""
    keep = run.sweep.keep
    at = run.sweep.at
    if keep is None or not at:
        if keep or at:
            given, missing = ("keep", "at") if keep else ("at", "keep")
            hint = "set both, such as `keep: 2` and `at: [50, 100]`, or neither"
            yield Problem(f"halving needs `{missing}`, too", where(f"sweep.{given}"), hint, "half-a-halving")
        return
    if at != sorted(set(at)):
        yield Problem("the steps must ascend", where("sweep.at"), f"write `at: {sorted(set(at))}`", "halving-order")
    if keep >= len(trials):
        problem = f"{keep} of {len(trials)} trials are kept: none is dropped"
        yield Problem(problem, where("sweep.keep"), "keep fewer, or leave out `keep` and `at`", "halving-keeps-all")
    if run.train.evaluation == "no":
        hint = "set train.eval_strategy: steps, or leave out `keep` and `at`"
        yield Problem("halving compares evaluations, and there are none", where("sweep.at"), hint, "not-evaluated")
    shortest = min(trials, key=lambda name: trials[name].train.max_steps)
    total = trials[shortest].train.max_steps  # negative where epochs count
    every = run.train.eval_steps if run.train.evaluation == "steps" else None
    yield from find_step_problems(at, shortest, total if total > 0 else None, every, where)
    losses = [getattr(trial, run.train.objective, None) for trial in trials.values()]
    if any(loss != losses[0] for loss in losses):
        problem = f"trials differ in {run.train.objective}, where another value is another loss: none is the better one"
        hint = "leave out `keep` and `at`; `windlass best RUN_DIR --by accuracy` compares such trials"
        yield Problem(problem, where("sweep.keep"), hint, "not-comparable")
    sources = [[getattr(trial.data, key) for key in SOURCES] for trial in trials.values()]
    if run.data.val_fraction is not None and any(source != sources[0] for source in sources):
        yield describe_other_rows(where)


def find_step_problems(
    at: Sequence[int], trial: str, total: int | None, every: int | None, where: Where
) -> Iterator[Problem]:
    """Yield which steps have no evaluation, or are not before the end of a trial that has `total` steps. `every`: the
    steps from one evaluation to the next. None: not known yet."""
    late = [step for step in at if total is not None and step >= total]
    between = [step for step in at if every and step % every]
    if not late and not between:
        return
    every = every or 1
    last = None if total is None else (total - 1) // every * every
    near = {max(every, round(step / every) * every) for step in at}
    near = {step if last is None else min(step, last) for step in near} - {0}
    hint = f"write `at: {sorted(near)}`" if near else "make the trials longer"
    if between:
        hint += f", or set train.eval_steps: {math.gcd(*at)}"
        problem = f"no evaluation at step {between[0]}: trials are evaluated every {every} steps"
        yield Problem(problem, where("sweep.at"), hint, "between-evaluations")
    else:
        problem = f"trial {trial} ends with step {total}, so nothing is saved by halving at step {late[0]}"
        yield Problem(problem, where("sweep.at"), hint, "halving-at-end")


def describe_other_rows(where: Where) -> Problem:
    problem = "trials would be compared on different validation rows: those held out of their own data"
    hint = "name rows for all with data.eval or data.val_split, or leave out `keep` and `at`"
    return Problem(problem, where("sweep.keep"), hint, "not-comparable")


def share_of_steps(halvings: Sequence[Halving], trials: int, total: int) -> float:
    """Return the share of its steps that a trial is trained for, if each is as likely to go on."""
    edges = [0, *(min(halving.step, total) for halving in halvings), total]
    going = [trials, *(halving.trials for halving in halvings)]
    return sum(count * (edges[i + 1] - edges[i]) for i, count in enumerate(going)) / (trials * total)
