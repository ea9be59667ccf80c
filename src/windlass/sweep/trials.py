"""Train the trials of a sweep on one base, some together. Each is an ordinary run in a folder of its own."""

import contextlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from windlass import run_folder
from windlass.data.packing import hash_rows
from windlass.errors import SAVED, Problem, UserError, raise_all
from windlass.files import write_atomic, write_json
from windlass.observe.background import BackgroundReport
from windlass.observe.watch.detectors import AlarmError
from windlass.plan import Plan
from windlass.plan.finished import require_own_folder, require_same_halving, require_trained
from windlass.ranks import collectives
from windlass.ranks.rank import Rank
from windlass.run_folder import (
    FAILED,
    FINISHED,
    HALVED,
    RUNNING,
    STOPPED,
    SWEEP_SETTINGS,
    TRIAL_FILE,
    TRIALS,
    WAITING,
    has_ended,
    read_manifest,
)
from windlass.runfile.sweep import Halving
from windlass.sweep.halving import (
    CheckedData,
    describe_decision,
    halve,
    has_reached,
    require_halvings,
)
from windlass.sweep.together import TrialGroup
from windlass.train.batches import count_steps
from windlass.train.checkpoint.folder import find_damage, list_checkpoints
from windlass.train.checkpoint.resume import (
    describe_run,
    record_failure,
    require_same_data,
    require_same_run,
    warn_of_unshared,
)
from windlass.train.connect import require_same_plan
from windlass.train.load import open_base_tokenizer
from windlass.train.run import connect, load_model, prepare_on_all_ranks, train_run
from windlass.train.session import PAUSED, Session
from windlass.train.shared_base import SharedBase
from windlass.weights.same_base import require_same_base

FAILED_BY_ALARM = -2
LENGTH = ("train.num_train_epochs", "train.max_steps")  # which a resumed run may change, and a finished trial has had


def train_sweep(
    plan: Plan, here: Rank, *, resume: bool = False, debug_freq: int | None = None, allow_other_base: bool = False
) -> int:
    """Do one rank's part of a sweep. Returns as `train_trials`."""
    session = connect(plan, here, resume=resume, debug_freq=debug_freq, allow_other_base=allow_other_base)
    given = {"the sweep's trials": [trial.folder.name for trial in plan.trials], "its halvings": list(plan.halvings)}
    chosen = {"sweep.together": [list(group.names) for group in plan.groups]}
    require_same_plan(plan, session.identity, given, chosen)
    for trial in plan.trials:
        require_same_plan(trial, session.identity)
    return train_trials(plan, replace(session, base=SharedBase(keeps=True), around=plan.folder))


def train_trials(plan: Plan, session: Session) -> int:
    """Train the trials that have not ended. Returns 0, or 75 if a signal stopped one; an alarm ends only its trial."""
    folder = plan.folder
    with contextlib.ExitStack() as held:
        states: dict[str, str] = collectives.run_on_rank_0(lambda: claim_sweep(plan, session, held))
        warn_of_unshared(plan, session.console)
        with record_failure(folder):
            check_all_data(plan, session)
            if not all(map(has_ended, states.values())):  # until the base is accepted, what is recorded holds
                digest = load_shared(plan.trials[0], session)
                collectives.run_on_rank_0(lambda: require_base_of_trials(plan, session, digest))
            decisions = collectives.run_on_rank_0(lambda: begin_sweep(plan, session, states))
            going = decisions[-1]["kept"] if decisions else [*states]
            for halving in (*plan.halvings[len(decisions) :], None):
                if train_until(plan, halving, going, states, session):
                    if session.here.rank == 0:
                        run_folder.update_manifest(folder, state=STOPPED)
                    collectives.barrier()  # as at the end of a stopped run
                    return SAVED
                if halving is not None:
                    decision = collectives.run_on_rank_0(partial(halve, plan, halving, going, states))
                    going = decision["kept"]
                    states |= decision["dropped"]
                    session.console.print(describe_decision(decision), style="bold")
            if session.here.rank == 0:
                session.report.finish()
                run_folder.update_manifest(folder, state=FINISHED)
    finished = [*states.values()].count(FINISHED)
    failed = [*states.values()].count(FAILED)
    dropped = f", {len(states) - failed - finished} were dropped" if plan.halvings else ""
    compare = f"`windlass report {shlex.quote(str(folder))}` compares them"
    session.console.print(f"{finished} of {len(states)} trials finished{dropped}; {compare}")
    require_trained(folder, states)
    return 0


def train_until(
    plan: Plan,
    halving: Halving | None,
    going: Sequence[str],
    states: dict[str, str],
    session: Session,
) -> bool:
    """Train the trials that go on, to the next halving or to their end. Returns whether a signal stopped one."""
    by_name = {name_trial(trial): trial for trial in plan.trials}
    for group in plan.groups:
        left = [by_name[name] for name in group.names if name in going and not has_ended(states[name])]
        if halving:
            left = [trial for trial in left if not collectives.run_on_rank_0(partial(has_reached, trial, halving))]
        if not left:
            continue
        names = [name_trial(trial) for trial in left]
        numbers = ", ".join(str(plan.trials.index(trial) + 1) for trial in left)
        which = f"trials {numbers} of {len(states)} together" if len(left) > 1 else f"trial {numbers} of {len(states)}"
        until = f", to step {halving.step}" if halving else ""
        session.console.print(f"{which}: {', '.join(names)}{until}", style="bold")
        resumes = {name: session.options.resume or states[name] != WAITING for name in names}
        write_states(plan.folder, dict.fromkeys(names, RUNNING))
        pauses = tuple(each.step for each in plan.halvings)
        own = replace(session, pauses=pauses, pause_at=halving and halving.step)
        ended = train_group(left, resumes, own, plan.folder)
        states |= ended
        write_states(plan.folder, ended)
        is_stopped = any(collectives.all_gather(session.stop_signal.received))
        if STOPPED in ended.values() or (is_stopped and not all(map(has_ended, states.values()))):
            return True
    return False


def train_group(trials: Sequence[Plan], resumes: Mapping[str, bool], session: Session, folder: Path) -> dict[str, str]:
    """Train a trial, or some together, to their end or the next halving, and put the base back as it was. Returns the
    trials' states."""
    names = [name_trial(trial) for trial in trials]
    group = TrialGroup(trials, names, session) if len(trials) > 1 else None
    works = []
    for number, (name, trial) in enumerate(zip(names, trials, strict=True)):
        own = group.make_session(number) if group else session
        options = replace(session.options, resume=resumes[name])
        own = replace(own, report=BackgroundReport(trial.folder), options=options)
        works.append(partial(train_trial, trial, own))
    codes = group.train(works) if group else [works[0]()]
    paused = run_folder.PAUSED.format(session.pause_at)
    by_code = {0: FINISHED, SAVED: STOPPED, PAUSED: paused, FAILED_BY_ALARM: FAILED}
    if SAVED not in codes:
        session.stop_signal.training = False
        session.base.restore(f"{folder}: trial {', '.join(names)}")
    return {name: by_code[code] for name, code in zip(names, codes, strict=True)}


def train_trial(trial: Plan, session: Session) -> int:
    """Train one trial to its end or the next halving. Returns 0, 75, PAUSED or FAILED_BY_ALARM."""
    try:
        return train_run(trial, session)
    except AlarmError as error:  # raised on all ranks
        problem = error.problems[0].problem
        session.console.print(f"an alarm ended trial {name_trial(trial)}: {problem}", style="yellow")
        return FAILED_BY_ALARM


def write_states(folder: Path, states: Mapping[str, str]) -> None:
    if collectives.get_rank() == 0:
        run_folder.update_manifest(folder, **{TRIALS: {**run_folder.read_manifest(folder)[TRIALS], **states}})


def check_data(plan: Plan, session: Session) -> CheckedData:
    """Prepare a run's data to see whether they can be trained on."""
    session.here.phase("preparing the data")
    tokenizer = open_base_tokenizer(plan)
    data = prepare_on_all_ranks(plan, tokenizer, session)
    length = count_steps(plan, data, tokenizer.pad_token_id)
    evaluated = hash_rows(data.validation_file) if data.validation_file else ""
    return CheckedData({"data": data.fingerprint, "inputs": data.inputs}, data.template, length, evaluated)


def load_shared(plan: Plan, session: Session) -> str:
    """Load the base that the trials of a sweep share. Returns its digest."""
    _, certificate = load_model(plan, session, open_base_tokenizer(plan))
    return str(certificate["base_digest"])


def check_all_data(plan: Plan, session: Session) -> None:
    """Prepare all trials' data before the base is loaded. Those of trials that have begun must be as they were."""
    quiet = replace(session, console=Console(quiet=True))
    checked = {}
    for trial in plan.trials:
        name = name_trial(trial)
        with naming(name):
            checked[name] = check_data(trial, quiet)
            collectives.run_on_rank_0(partial(require_trained_data, trial, checked[name]))
    if plan.halvings:
        require_halvings(plan, checked)


def require_trained_data(trial: Plan, data: CheckedData) -> None:
    """Refuse other data than a trial that has begun is trained on: others would not be comparable with it."""
    require_same_data(find_intact(trial), data.fingerprints, trial, data.template)


def find_intact(trial: Plan) -> Path | None:
    """Return a trial's newest undamaged checkpoint."""
    saved = list_checkpoints(trial.folder / run_folder.CHECKPOINTS)[::-1]
    return next((folder for folder in saved if not find_damage(folder)), None)


def require_base_of_trials(plan: Plan, session: Session, digest: str) -> None:
    """Refuse another base than a trial was trained on: its figures would not be comparable with the others'."""
    where = plan.where("model.model_name_or_path")
    allow = session.options.allow_other_base
    for trial in plan.trials:
        final = trial.folder / run_folder.FINAL
        adapter = final if final.is_dir() else find_intact(trial)
        with naming(name_trial(trial)):
            if adapter:
                require_same_base(adapter, plan.base, digest, where, allow_other=allow, say=session.console.print)


def get_settings(trial: Plan) -> dict[str, Any]:
    assert trial.trial is not None
    return dict(trial.trial.settings)


def name_trial(trial: Plan) -> str:
    assert trial.trial is not None
    return trial.trial.name


@contextlib.contextmanager
def naming(name: str) -> Any:
    """Name the trial in errors."""
    try:
        yield
    except UserError as error:
        error.problems = tuple(replace(one, problem=f"trial {name}: {one.problem}") for one in error.problems)
        raise


def claim_sweep(plan: Plan, session: Session, held: contextlib.ExitStack) -> dict[str, str]:
    """Claim the sweep's folder on rank 0, and record a new one in it. Return the trials' states."""
    folder = plan.folder
    where = plan.where("train.output_dir")
    run_folder.ensure_dir(folder, where)
    held.enter_context(run_folder.lock_run(folder, where) or contextlib.nullcontext())
    before = run_folder.read_manifest(folder)
    states = run_folder.read_trial_states(folder, map(name_trial, plan.trials))
    problems: list[Problem] = []
    for trial in plan.trials:
        name = name_trial(trial)
        manifest = read_manifest(trial.folder)
        if not manifest:
            continue
        also = LENGTH if has_ended(states[name]) else ()
        now = describe_run(trial, session.identity)
        try:
            with naming(name):
                require_same_run(manifest, now, trial, allow_other_base=session.options.allow_other_base, also=also)
        except UserError as error:
            problems += error.problems
    require_own_folder(plan, finished=True, unfinished=session.options.resume or not before)
    raise_all(problems)
    require_same_halving(plan, before)
    removed = [name for name in before.get(TRIALS, {}) if name not in states]
    if removed:  # nothing compares them with the run file as it is now
        are = "is" if len(removed) == 1 else "are"
        session.console.print(f"{', '.join(removed)} {are} no longer in the run file: left out of the sweep's table")
    if TRIALS in before:  # the trials' data may yet be refused, and then what is recorded holds
        run_folder.update_manifest(folder, state=RUNNING, failure=None)
    else:
        begin_sweep(plan, session, states)
    return states


def begin_sweep(plan: Plan, session: Session, states: Mapping[str, str]) -> list[Mapping[str, Any]]:
    """Record on rank 0 that the sweep begins or goes on, and write the run files of its trials. Return what was decided
    at its halvings."""
    folder = plan.folder
    before = read_manifest(folder)
    of_trials = {TRIALS: states, SWEEP_SETTINGS: {name_trial(trial): get_settings(trial) for trial in plan.trials}}
    halved = {HALVED: before[HALVED]} if HALVED in before else {}
    run_folder.begin_manifest(folder, describe_run(plan, session.identity) | of_trials | halved)
    with session.unwritten(folder / run_folder.PLAN):
        write_json(folder / run_folder.PLAN, plan.as_dict())
    for trial in plan.trials:
        run_folder.ensure_dir(trial.folder, plan.where("train.output_dir"))
        if states[name_trial(trial)] == WAITING and trial.trial is not None:
            write_atomic(trial.folder / TRIAL_FILE, trial.trial.file)
    return require_same_halving(plan, before)
