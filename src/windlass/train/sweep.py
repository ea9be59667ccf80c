"""Train the trials of a sweep one after the other on one base. Each is an ordinary run in a folder of its own."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console

from windlass import run_folder
from windlass.errors import SAVED, Problem, RunError, UserError, raise_all
from windlass.files import write_atomic, write_json
from windlass.observe.background import BackgroundReport
from windlass.observe.watch.detectors import AlarmError
from windlass.plan import Plan
from windlass.ranks import collectives
from windlass.run_folder import FAILED, FINISHED, RUNNING, STOPPED, TRIAL_FILE, TRIALS, WAITING
from windlass.train.checkpoint.folder import list_checkpoints
from windlass.train.checkpoint.resume import describe_run, require_same_data, require_same_run
from windlass.train.session import Session

Work = Callable[[Plan, Session], int]
CheckData = Callable[[Plan, Session], dict[str, str]]
LENGTH = ("num_train_epochs", "max_steps")  # which a resumed run may change, and a finished trial has had


def train_trials(plan: Plan, session: Session, train_run: Work, check_data: CheckData) -> int:
    """Train the trials that have not ended. Returns 0, or 75 if a signal stopped one; an alarm ends only its trial."""
    folder = plan.folder
    console = session.console
    names = [name_trial(trial) for trial in plan.trials]
    with contextlib.ExitStack() as held:
        states: dict[str, str] = collectives.run_on_rank_0(lambda: claim_sweep(plan, session, held))

        def record(name: str, state: str) -> None:
            states[name] = state
            if session.here.rank == 0:
                run_folder.update_manifest(folder, trials=states)

        quiet = replace(session, console=Console(quiet=True), tokens=folder / "tokens")
        for name, trial in zip(names, plan.trials, strict=True):
            checkpoints = list_checkpoints(trial.folder / run_folder.CHECKPOINTS)
            with naming(name):
                fingerprints = check_data(trial, quiet)
                require_same_data(checkpoints[-1] if checkpoints else None, fingerprints, trial)

        for number, (name, trial) in enumerate(zip(names, plan.trials, strict=True), 1):
            if states[name] in (FINISHED, FAILED):
                continue
            console.print(f"trial {number} of {len(names)}: {name}", style="bold")
            record(name, RUNNING)
            own = replace(session, report=BackgroundReport(trial.folder), tokens=folder / "tokens")
            try:
                code = train_run(trial, own)
                record(name, FINISHED if code == 0 else STOPPED)
            except AlarmError as error:  # raised on all ranks
                code = 0
                record(name, FAILED)
                console.print(f"trial {name} was ended by an alarm: {error.problems[0].problem}", style="yellow")
            session.stop_signal.training = False
            if code == 0:
                session.base.restore(f"{folder}: trial {name}")
            is_stopped = code == SAVED or any(collectives.all_gather(session.stop_signal.received))
            if is_stopped and not all(state in (FINISHED, FAILED) for state in states.values()):
                if session.here.rank == 0:
                    run_folder.update_manifest(folder, state=STOPPED)
                collectives.barrier()
                return SAVED
        if session.here.rank == 0:
            run_folder.update_manifest(folder, state=FINISHED)
    failed = [name for name in names if states[name] == FAILED]
    console.print(
        f"{len(names) - len(failed)} of {len(names)} trials finished; `windlass report {folder}` compares them"
    )
    if failed:
        problem = f"{len(failed)} of {len(names)} trials were ended by an alarm: {', '.join(failed)}"
        raise RunError(
            problem, str(folder), "see their alarms.jsonl and reports; the others have finished", "trials-failed"
        )
    return 0


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
    facts = describe_run(plan, session.identity)
    run_folder.begin_manifest(folder, {**facts, TRIALS: {**before.get(TRIALS, {}), **states}})
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
