"""Train the trials of a sweep one after the other on one base. Each is an ordinary run in a folder of its own."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from windlass import run_folder
from windlass.errors import SAVED, Problem, RunError, UserError, raise_all
from windlass.files import write_atomic, write_json
from windlass.observe.background import BackgroundReport
from windlass.observe.watch.detectors import AlarmError
from windlass.plan import Plan
from windlass.ranks import collectives
from windlass.run_folder import FAILED, FINISHED, RUNNING, STOPPED, SWEEP_SETTINGS, TRIAL_FILE, TRIALS, WAITING
from windlass.train.checkpoint.folder import find_damage, list_checkpoints
from windlass.train.checkpoint.resume import describe_run, record_failure, require_same_data, require_same_run
from windlass.train.session import Session

Work = Callable[[Plan, Session], int]
CheckData = Callable[[Plan, Session], dict[str, str]]
ENDED = (FINISHED, FAILED)
FAILED_BY_ALARM = -1
LENGTH = ("num_train_epochs", "max_steps")  # which a resumed run may change, and a finished trial has had


def train_trials(plan: Plan, session: Session, train_run: Work, check_data: CheckData) -> int:
    """Train the trials that have not ended. Returns 0, or 75 if a signal stopped one; an alarm ends only its trial."""
    folder = plan.folder
    with contextlib.ExitStack() as held:
        states: dict[str, str] = collectives.run_on_rank_0(lambda: claim_sweep(plan, session, held))
        with record_failure(folder):
            check_all_data(plan, session, states, check_data)
            for number, trial in enumerate(plan.trials, 1):
                name = name_trial(trial)
                if states[name] in ENDED:
                    continue
                session.console.print(f"trial {number} of {len(states)}: {name}", style="bold")
                write_state(folder, name, RUNNING)
                states[name] = train_trial(trial, session, folder, train_run)
                write_state(folder, name, states[name])
                is_stopped = any(collectives.all_gather(session.stop_signal.received))
                if states[name] == STOPPED or (is_stopped and not set(states.values()) <= set(ENDED)):
                    if session.here.rank == 0:
                        run_folder.update_manifest(folder, state=STOPPED)
                    collectives.barrier()  # as at the end of a stopped run
                    return SAVED
            if session.here.rank == 0:
                session.report.finish()
                run_folder.update_manifest(folder, state=FINISHED)
    failed = [name for name, state in states.items() if state == FAILED]
    finished = len(states) - len(failed)
    session.console.print(f"{finished} of {len(states)} trials finished; `windlass report {folder}` compares them")
    if failed:
        problem = f"an alarm ended {len(failed)} of {len(states)} trials: {', '.join(failed)}"
        hint = "see their alarms.jsonl and reports; the others have finished"
        raise RunError(problem, str(folder), hint, "trials-failed")
    return 0


def train_trial(trial: Plan, session: Session, folder: Path, train_run: Work) -> str:
    """Train one trial, and put the base back as it was. Returns the trial's state."""
    name = name_trial(trial)
    try:
        code = train_run(trial, replace(session, report=BackgroundReport(trial.folder), tokens=folder / "tokens"))
    except AlarmError as error:  # raised on all ranks
        code = FAILED_BY_ALARM
        session.console.print(f"an alarm ended trial {name}: {error.problems[0].problem}", style="yellow")
    if code == SAVED:
        return STOPPED
    session.stop_signal.training = False
    session.base.restore(f"{folder}: trial {name}")
    return FAILED if code == FAILED_BY_ALARM else FINISHED


def write_state(folder: Path, name: str, state: str) -> None:
    if collectives.get_rank() == 0:
        states = {**run_folder.read_manifest(folder)[TRIALS], name: state}
        run_folder.update_manifest(folder, **{TRIALS: states})


def check_all_data(plan: Plan, session: Session, states: Mapping[str, str], check_data: CheckData) -> None:
    """Prepare all trials' data before the base is loaded. Those of trials that have ended must be as they were."""
    quiet = replace(session, console=Console(quiet=True), tokens=plan.folder / "tokens")
    for trial in plan.trials:
        with naming(name_trial(trial)):
            fingerprints = check_data(trial, quiet)
            if states[name_trial(trial)] in ENDED:
                collectives.run_on_rank_0(partial(require_trained_data, trial, fingerprints))


def require_trained_data(trial: Plan, fingerprints: Mapping[str, str]) -> None:
    """Refuse other data than a trial that has ended was trained on: others would not be comparable with it."""
    saved = list_checkpoints(trial.folder / run_folder.CHECKPOINTS)[::-1]
    intact = next((folder for folder in saved if not find_damage(folder)), None)
    require_same_data(intact, fingerprints, trial)


def get_settings(trial: Plan) -> dict[str, Any]:
    assert trial.loaded.trial is not None
    return dict(trial.loaded.trial.settings)


def name_trial(trial: Plan) -> str:
    assert trial.loaded.trial is not None
    return trial.loaded.trial.name


@contextlib.contextmanager
def naming(name: str) -> Any:
    """Name the trial in errors."""
    try:
        yield
    except UserError as error:
        error.problems = tuple(replace(one, problem=f"trial {name}: {one.problem}") for one in error.problems)
        raise


def claim_sweep(plan: Plan, session: Session, held: contextlib.ExitStack) -> dict[str, str]:
    """Claim the sweep's folder on rank 0, and write the run files of its trials. Return the trials' states."""
    folder = plan.folder
    where = plan.where("train.output_dir")
    run_folder.ensure_dir(folder, where)
    held.enter_context(run_folder.lock_run(folder, where) or contextlib.nullcontext())
    before = run_folder.read_manifest(folder)
    if before.get("state") and TRIALS not in before:
        hint = "name another train.output_dir for the sweep"
        raise UserError(f"{folder} contains a run, and no sweep", where, hint, "unlike-folder")
    states = {}
    problems: list[Problem] = []
    for trial in plan.trials:
        name = name_trial(trial)
        manifest = run_folder.read_manifest(trial.folder)
        state = manifest.get("state", WAITING)
        # A trial that was killed or failed otherwise goes on; one that an alarm ended would be ended again.
        ended_by_alarm = state == FAILED and before.get(TRIALS, {}).get(name) == FAILED
        states[name] = state if state == FINISHED or ended_by_alarm else WAITING
        if manifest:
            problems += find_changes(trial, manifest, session, ended=states[name] != WAITING)
    if before and all(state != WAITING for state in states.values()):
        hint = "name another train.output_dir, or remove the folder to start over"
        raise UserError(f"{folder} contains a finished sweep", where, hint, "finished-run")
    if before and not session.options.resume:
        problem = f"{folder} contains an unfinished sweep ({before.get('state')} {before.get('began', '')})"
        hint = "add --resume to continue it, name another train.output_dir, or remove the folder to start over"
        raise UserError(problem, where, hint, "unfinished-run")
    raise_all(problems)
    of_trials = {
        TRIALS: {**before.get(TRIALS, {}), **states},
        SWEEP_SETTINGS: {
            **before.get(SWEEP_SETTINGS, {}),
            **{name_trial(trial): get_settings(trial) for trial in plan.trials},
        },
    }
    run_folder.begin_manifest(folder, describe_run(plan, session.identity) | of_trials)
    with session.unwritten(folder / run_folder.PLAN):
        write_json(folder / run_folder.PLAN, plan.as_dict())
    for trial in plan.trials:
        run_folder.ensure_dir(trial.folder, where)
        if states[name_trial(trial)] == WAITING and trial.loaded.trial is not None:
            write_atomic(trial.folder / TRIAL_FILE, trial.loaded.trial.file)
    return states


def find_changes(trial: Plan, manifest: Mapping[str, Any], session: Session, *, ended: bool) -> list[Problem]:
    """Return what is no longer as it was when a trial began."""
    now = describe_run(trial, session.identity)
    found: list[Problem] = []
    try:
        with naming(name_trial(trial)):
            allow = session.options.allow_other_base
            require_same_run(manifest, now, trial, trial.folder, allow_other_base=allow)
    except UserError as error:
        found += error.problems
    for key in LENGTH:
        then = manifest.get("run", {}).get("train", {}).get(key)
        if ended and then is not None and then != now["run"]["train"][key]:
            problem = f"trial {name_trial(trial)} ended with {then}, and others would have {now['run']['train'][key]}"
            hint = "put it back, or name another train.output_dir"
            found.append(Problem(problem, trial.where(f"train.{key}"), hint, "changed-setting"))
    return found
