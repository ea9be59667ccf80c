"""The plan of a sweep: that of its largest trial, with the plans of all trials on one layout."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from windlass.errors import Problem, UserError, raise_all
from windlass.model import Base, find_base
from windlass.plan.layout import Layout, list_keys
from windlass.plan.plan import Plan
from windlass.plan.rows import DataSample, sample_data
from windlass.plan.together import Member, group_trials
from windlass.runfile import Data, Loaded


def plan_sweep(loaded: Loaded, make_plan: Callable[..., Plan], base: Base | None, *, compare: bool) -> Plan:
    """Plan every trial, all on one layout: the one on which all fit and are fastest. make_plan: of a trial."""
    where = loaded.where
    base = base or find_base(loaded.run.model.model_name_or_path, where("model.model_name_or_path"))
    samples: list[tuple[Data, DataSample]] = []

    def plan_trial(trial: Loaded, compare: bool = False) -> Plan:
        sample = next((sample for data, sample in samples if data == trial.run.data), None)
        if sample is None:
            sample = sample_data(trial.run.data, base.path, trial.where)
            samples.append((trial.run.data, sample))
        return make_plan(trial, base=base, sample=sample, compare=compare)

    plans = _plan_all(loaded.trials, plan_trial)
    layouts = dict.fromkeys(replace(plan.layout, reason="") for plan in plans)
    if len(layouts) > 1:
        alike: list[list[Plan]] = []
        for layout in layouts:
            with contextlib.suppress(UserError):  # a trial rules this layout out
                way = _plan_all([_set_layout(trial, layout) for trial in loaded.trials], plan_trial)
                alike += [way] if len({replace(plan.layout, reason="") for plan in way}) == 1 else []
        if not alike:
            problem = "its trials need different layouts, and there is one base"
            raise UserError(problem, where("sweep"), "set layout.name, or start separate runs", "layouts-differ")
        plans = min(alike, key=lambda way: (not all(plan.cost.fits for plan in way), _count_seconds(way)))
    largest = max(plans, key=lambda plan: (plan.cost.gpu_gib, plan.adapter.trainable))
    if compare:
        largest = plan_trial(largest.loaded, compare=True)
    train = largest.run.train.model_copy(
        update={"output_dir": loaded.run.folder, "run_name": loaded.run.train.run_name}
    )
    run = largest.run.model_copy(update={"train": train, "sweep": loaded.run.sweep})
    groups = group_trials([describe_member(plan) for plan in plans], loaded.run.sweep.together, where)
    plans = [
        replace(plan, groups=tuple(group for group in groups if _name(plan.loaded) in group.names)) for plan in plans
    ]
    return replace(largest, loaded=replace(loaded, run=run), trials=tuple(plans), groups=groups)


def describe_member(plan: Plan) -> Member:
    work = replace(plan.search.work, layout=plan.layout, batch=plan.batch)
    return Member(_name(plan.loaded), plan.run, work, plan.search.lengths, plan.schedule.steps, plan.cost)


def _count_seconds(plans: Sequence[Plan]) -> float:
    return sum(plan.cost.step_seconds * (plan.schedule.steps or 1) for plan in plans)


def _plan_all(trials: Sequence[Loaded], plan_trial: Any) -> list[Plan]:
    """Plan the trials; raise everything that is wrong with any, once, with the trials' names."""
    plans: list[Plan] = []
    problems: dict[tuple[str, str], list[tuple[Problem, str]]] = {}
    for trial in trials:
        try:
            plans.append(plan_trial(trial))
        except UserError as error:
            for problem in error.problems:
                problems.setdefault((problem.where, problem.problem), []).append((problem, _name(trial)))
    raise_all([*_name_trials(problems.values(), len(trials))])
    return plans


def _name_trials(problems: Any, count: int) -> Iterator[Problem]:
    for found in problems:
        problem = found[0][0]
        names = [name for _, name in found]
        if len(names) < count:
            of = f"trial {names[0]}" if len(names) == 1 else f"trials {', '.join(names)}"
            problem = replace(problem, problem=f"{of}: {problem.problem}")
        yield problem


def _name(trial: Loaded) -> str:
    return trial.trial.name if trial.trial else ""


def _set_layout(trial: Loaded, layout: Layout) -> Loaded:
    """Write a layout into a trial's run file, as far as the file leaves it open."""
    keys = list_keys(layout)
    if trial.run.train.gradient_checkpointing == "auto":
        keys["activation_checkpointing"] = layout.activation_checkpointing
    section = trial.run.layout
    left_open = {key: value for key, value in keys.items() if getattr(section, key) in (None, "auto")}
    train = {"offload_activations": layout.offload_activations}
    if trial.run.train.offload_activations != "auto":
        train = {}
    run = trial.run.model_copy(
        update={"layout": section.model_copy(update=left_open), "train": trial.run.train.model_copy(update=train)}
    )
    assert trial.trial is not None
    written = trial.trial.tree.get("layout", {})
    written = {"name": written} if isinstance(written, str) else written
    tree = {**trial.trial.tree, "layout": {**written, **left_open}}
    tree["train"] = {**tree.get("train", {}), **train}
    return replace(trial, run=run, trial=replace(trial.trial, tree=tree))
