"""What has finished: refused to be trained again, or its run file changed to evaluate its adapters again. No torch."""

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from windlass.data.inputs import fingerprint_rows
from windlass.errors import Problem, RunError, UserError, raise_all
from windlass.files import read_json
from windlass.model.quantization import published_dtype
from windlass.observe.format import format_plural
from windlass.plan import Plan, make_plan
from windlass.plan.script import AnyPlan, ScriptPlan
from windlass.run_folder import (
    DATA,
    FAILED,
    FINAL,
    FINISHED,
    HALVED,
    MANIFEST,
    TRIALS,
    has_ended,
    is_finished,
    list_trials,
    read_manifest,
    read_trial_states,
)
from windlass.runfile import Loaded, LoadedScript, RunFile
from windlass.runfile.recorded import find_changes, read_recorded_data, record_run
from windlass.settings import IN_NAMES

# What a finished run must have as well to be the one that is asked for; an unfinished one proves it later.
ASKED: Final = (
    *("train.max_steps", "train.num_train_epochs", "data.dataset_name_or_path", "model.model_name_or_path"),
    "lora.adapter",
)


def require_own_folder(
    asked: AnyPlan | Loaded | LoadedScript, *, finished: bool = False, unfinished: bool = True
) -> None:
    """Refuse a run folder with another kind of run, or with one that has finished or is unfinished, unless allowed."""
    folder = Path(asked.run.folder)
    key = asked.run.folder_key
    hint = f"name another {key}, or remove the folder to start over"
    kind = "script's run" if isinstance(asked, ScriptPlan | LoadedScript) else "sweep" if asked.trials else "run"
    manifest = read_manifest(folder)
    there = "sweep" if TRIALS in manifest else "script's run" if manifest.get("kind") == "script" else "run"
    if manifest and there != kind:
        raise UserError(f"{folder} contains a {there}, and no {kind}", asked.where(key), hint, "unlike-folder")
    if is_finished(folder) and not finished:
        raise UserError(f"{folder} contains a finished {kind}", asked.where(key), hint, "finished-run")
    if not unfinished:
        begun = f"{manifest.get('state', 'begun')} {manifest.get('began', '')}"
        problem, hint = f"{folder} contains an unfinished {kind} ({begun})", f"add --resume to continue it, {hint}"
        raise UserError(problem, asked.where(key), hint, "unfinished-run")


def has_finished(plan: AnyPlan) -> bool:
    """Return whether the plan's run has finished, or its sweep with all of its trials; the folder is its own."""
    states = read_trial_states(plan.folder, _name_trials(plan))
    return is_finished(plan.folder) and all(map(has_ended, states.values()))


def describe_finished(plan: AnyPlan) -> str:
    """Return that nothing is left to train. Refuse another run than has finished, and a sweep with failed trials."""
    trials = _name_trials(plan)
    hint = f"name another {plan.run.folder_key}"
    if isinstance(plan, Plan) and not trials:
        hint += f"; lora.adapter: {plan.folder / FINAL} goes on from there"
    problems: list[Problem] = []
    if isinstance(plan, ScriptPlan):
        command = {"script": plan.run.script.model_dump(mode="json", include={"path", "module", "args"})}
        problems += find_changes(read_manifest(plan.folder).get("run", {}), command, plan.where, hint)
    for run in (plan.trials or (plan,)) if isinstance(plan, Plan) else ():
        problems += find_differences(read_manifest(run.folder), run, hint, ASKED)
        trained = (read_json(run.folder / DATA).get("sequences") or {}).get("files")
        with suppress(UserError, OSError):  # the files may be gone by now
            if trained and trained != fingerprint_rows(run.run.data, run.where):
                text = "the files of rows have changed since this run was trained on them"
                problems.append(Problem(text, run.where("data.dataset_name_or_path"), hint, "other-rows"))
    raise_all([*dict.fromkeys(problems)])  # trials share most settings
    if isinstance(plan, Plan) and trials:
        require_same_halving(plan, read_manifest(plan.folder))
        require_trained(plan.folder, read_trial_states(plan.folder, trials))
    return f"{plan.folder} contains this {'sweep' if trials else 'run'}, finished: nothing is left to train"


def find_differences(
    before: Mapping[str, Any], plan: Plan, elsewhere: str, also: Collection[str] = ()
) -> list[Problem]:
    """Return a problem for each difference between the steps that a run, as recorded, began with and the plan's.
    `elsewhere`: the hint that keeps both; `also`: keys that a resumed run may change, and not this one."""
    recorded = before.get("run", {})
    problems = find_changes(recorded, record_run(plan.run), plan.where, f"put it back, or {elsewhere}", also)
    had, now = before.get("sequences"), plan.schedule.global_sequences
    if had and had != now:
        problem = (
            f"an optimizer step had {format_plural(had, 'sequence')} when this run began, and would have {now} now"
        )
        hint = f"set train.global_batch_size: {had}, which holds on any number of ranks"
        chosen = {"data.packing": "packing", "train.num_train_epochs": "num_train_epochs"}
        if not plan.run.train.sets_batch:  # then these were chosen with it
            was = {key: recorded.get(key.partition(".")[0], {}).get(name) for key, name in chosen.items()}
            hint += "".join(f"; and {key}: {json.dumps(value)}" for key, value in was.items() if value is not None)
        place = plan.where("train.global_batch_size")
        problems.append(Problem(problem, place, f"{hint}; or {elsewhere}", "other-batch-size"))
    dtypes = [(before.get("layout") or {}).get("base_dtype", plan.layout.base_dtype), plan.layout.base_dtype]
    same = {"bf16", "fp8", published_dtype(plan.base)}  # of the same weights
    if dtypes[0] != dtypes[1] and not same >= {*dtypes}:
        problem = "the base was stored in {} when this run began, and would be in {} now: other weights"
        hint = f"set layout.base_dtype: {dtypes[0]}, or {elsewhere}"
        problems.append(Problem(problem.format(*dtypes), plan.where("layout.base_dtype"), hint, "other-base-dtype"))
    return problems


def _name_trials(plan: AnyPlan) -> list[str]:
    return [trial.folder.name for trial in plan.trials] if isinstance(plan, Plan) else []


def describe_halving(plan: Plan) -> dict[str, Any]:
    sweep = plan.run.sweep
    return {"keep": sweep.keep, "at": list(sweep.at), "trials": _name_trials(plan)}


def require_same_halving(plan: Plan, before: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what was decided before, or refuse other trials and steps than it was decided for."""
    halved = before.get(HALVED)
    if not halved:
        return []
    for key, value in describe_halving(plan).items():
        if halved[key] != value:
            words = "other trials" if key == "trials" else f"was {halved[key]} when trials were dropped, is {value} now"
            place = plan.where("sweep" if key == "trials" else f"sweep.{key}")
            raise UserError(words, place, "put it back, or name another train.output_dir", "changed-halving")
    return list(halved["decisions"])


def require_trained(folder: Path, states: Mapping[str, str]) -> None:
    """Refuse a sweep of which trials failed, or none was left: its end is no success, however often it is started."""
    failed = [name for name, state in states.items() if state == FAILED]
    if failed:
        problem = f"an alarm ended {len(failed)} of {len(states)} trials: {', '.join(failed)}"
        hint = "see their alarms.jsonl and reports; the others have finished"
        raise RunError(problem, str(folder), hint, "trials-failed")
    if FINISHED not in states.values():
        problem = "no trial was left: none had a finite evaluation loss"
        raise RunError(problem, str(folder), "look at their reports; lower train.learning_rate", "trials-failed")


def plan_finished_run(
    run_folder: Path, *, eval_data: Path | None, ranks: int | None, base_dtypes: Sequence[str]
) -> Plan:
    """Plan the evaluation of a finished run, after checking that its model can be stored in each of these dtypes."""
    known = ("bf16", *IN_NAMES)
    if unknown := [kind for kind in base_dtypes if kind not in known]:
        what = f"no such dtype: {', '.join(unknown)}"
        raise UserError(what, "--base-dtype", f"known: {', '.join(known)}", "no-such-dtype")
    plans = [
        make_plan(load_finished_run(run_folder, eval_data=eval_data, ranks=ranks, base_dtype=kind))
        for kind in (*base_dtypes, None)
    ]
    trials = [folder for folder in list_trials(run_folder) if "run" in read_manifest(folder)]
    if not trials:
        return plans[-1]
    loaded = [load_finished_run(folder, eval_data=eval_data, ranks=ranks) for folder in trials]
    return replace(plans[-1], trials=tuple(make_plan(trial, compare=False) for trial in loaded))


def load_finished_run(
    run_folder: Path, *, eval_data: Path | None, ranks: int | None, base_dtype: str | None = None
) -> Loaded:
    """Load a run's file from its manifest, changed to evaluate it again: on these ranks, with unpacked rows."""
    manifest = run_folder / MANIFEST
    if not run_folder.is_dir():
        what = "no such folder"
        raise UserError(what, str(run_folder), "name the folder that train.output_dir named", "no-such-folder")
    try:
        tree: dict[str, Any] = read_manifest(run_folder)["run"]
        data = tree["data"]
        data |= {"packing": False, "streaming": False}
        if eval_data is not None:
            if not eval_data.exists():
                problem = "there is no such file or folder"
                raise UserError(problem, str(eval_data), "name rows with --eval-data", "no-such-file")
            data |= {"dataset_name_or_path": str(eval_data), "dataset_config_name": None, "val_fraction": None}
            data |= {"train_split": "train", "val_split": "train", "mix": [], "eval": {}}
        elif data.get("val_split") and not data.get("val_fraction") and not data.get("eval"):
            data["train_split"] = data["val_split"]  # only these rows are tokenized
        tree["data"] = read_recorded_data(data)
        if "lora" in tree:
            tree["lora"]["adapter"] = None  # its keys are recorded, and its folder may be gone
    except (KeyError, TypeError):
        hint = "name the folder that train.output_dir named"
        text = "it is not a run folder: manifest.json can't be read"
        raise UserError(text, str(run_folder), hint, "not-a-run") from None
    if ranks is not None:
        tree["cluster"] |= {"nodes": 1, "gpus_per_node": ranks}
        tree["layout"] = {"name": "auto", "base_dtype": (tree.get("layout") or {}).get("base_dtype")}
        tree.get("train", {}).pop("global_batch_size", None)  # it fits the run's ranks, and nothing is trained here
    if base_dtype is not None:
        tree["layout"] = (tree.get("layout") or {}) | {"base_dtype": base_dtype}
    try:
        run = RunFile.model_validate(tree)
    except ValueError as error:
        hint = "it was written by another version of windlass"
        raise UserError(f"the run in it can't be read: {error}", str(manifest), hint, "unreadable") from None
    sections = {name: section for name, section in tree.items() if isinstance(section, dict)}
    places = {f"{name}.{key}": f"{manifest}: run.{name}.{key}" for name, section in sections.items() for key in section}
    return Loaded(manifest, (), places, run)
