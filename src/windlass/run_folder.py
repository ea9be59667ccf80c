"""The run folder (`train.output_dir`): names of its files, its manifest and state, its lock."""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, Final

from windlass import __version__
from windlass.errors import UserError, require_writable
from windlass.files import append_json_line, lock_file, read_json, write_json

MANIFEST: Final = "manifest.json"  # the resolved run, versions, state
PLAN: Final = "plan.json"  # the plan that the run was started with
DATA: Final = "data.json"  # the data audit
DATA_PAGE: Final = "data.html"  # the page that `windlass data --html` may have written there
LOAD: Final = "load.json"  # the certificate: every weight proven against the files
STEPS: Final = "steps-rank{rank}.jsonl"  # one line per optimizer step, below lines that name its columns
METER: Final = "meter-rank{rank}.json"  # facts about this rank's whole run
EVENTS: Final = "events.jsonl"  # evaluations, saves, starts and ends, written by rank 0
SAMPLES: Final = "samples.jsonl"  # step, prompt, text: continuations of fixed prompts at evaluations
ALARMS: Final = "alarms.jsonl"  # time, step, rank, kind, level, message
CHECKPOINTS: Final = "checkpoints"  # step-N: adapter, optimizer, random numbers, position in the data
FINAL: Final = "final"  # the adapter
# In `final` and in every checkpoint, as PEFT names them.
ADAPTER: Final = "adapter_model.safetensors"
ADAPTER_CONFIG: Final = "adapter_config.json"
BASE_MODEL: Final = "base_model.json"  # next to it: the base that the adapter was trained on; PEFT ignores it
PROBE: Final = "probe.json"  # what answers of a server are compared with: in an export, and in a run of a large model
REFERENCE: Final = "reference.safetensors"  # log-probabilities of a preference run's pairs before step 1
TRIALS: Final = "trials"  # of a sweep: their folders, each a run folder; in its manifest: their states
SWEEP_SETTINGS: Final = "settings"  # in a sweep's manifest: of each trial
TRIAL_FILE: Final = "run.yaml"  # in a trial's folder: the run file that it is
BASE_FIGURES: Final = "base-evaluation.json"  # of the base alone: what evaluations are compared with; a sweep has one
BASES: Final = "bases.json"  # held-out losses with the base in other dtypes, by `windlass best --base-dtype`

# Keys of an adapter's configuration that users may change.
RENAMED: Final = ("base_model_name_or_path", "inference_mode", "revision", "auto_mapping", "peft_version")

# Libraries whose versions are recorded with a run.
LIBRARIES: Final = ("torch", "transformers", "peft", "accelerate", "datasets", "safetensors", "tokenizers")

OUTPUT_DIR: Final = "WINDLASS_OUTPUT_DIR"  # where a script that windlass started finds the run folder

FINISHED = "finished"
RUNNING = "running"
STOPPED = "stopped by a signal"
FAILED = "failed"
WAITING = "waiting"  # a trial that has not begun, or goes on
PAUSED = "waits at step {}"  # a trial that goes on if it is among the better ones
DROPPED = "dropped at step {}"  # a trial that was not among them
HALVED: Final = "halved"  # in the manifest of a sweep that is halved: what was decided at which step


def describe_files(folder: Path) -> dict[str, dict[str, str]]:
    """Return hashes of the adapter's files; of its configuration, only what changes the forward."""
    config = {key: value for key, value in read_json(folder / ADAPTER_CONFIG).items() if key not in RENAMED}
    contents = {ADAPTER_CONFIG: json.dumps(config, sort_keys=True).encode(), ADAPTER: (folder / ADAPTER).read_bytes()}
    return {"files": {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}}


def list_trials(folder: Path) -> dict[Path, str]:
    """Return the folders of a sweep's trials and their states; none if the folder is no sweep's."""
    return {folder / TRIALS / name: str(state) for name, state in (read_manifest(folder).get(TRIALS) or {}).items()}


def read_trial_states(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the states of trials of a sweep. One that an alarm ended would be ended again; one that was killed or
    failed otherwise waits to go on."""
    recorded = read_manifest(folder).get(TRIALS) or {}
    states = {}
    for name in names:
        state = read_manifest(folder / TRIALS / name).get("state")
        then = recorded.get(name, WAITING)
        is_dropped = has_ended(then) and then not in (FINISHED, FAILED)
        states[name] = FINISHED if state == FINISHED else then if is_dropped or state == then == FAILED else WAITING
    return states


def find_sweep(folder: Path) -> Path | None:
    """Return the folder of the sweep that this folder is a trial of; None if it is a run's."""
    sweep = folder.parent.parent
    return sweep if folder in list_trials(sweep) else None


def has_ended(state: str) -> bool:
    """Return whether the sweep is done with a trial."""
    return state in (FINISHED, FAILED) or state.startswith(DROPPED.format(""))


def find_current_trial(folder: Path) -> Path:
    """Return the folder of a sweep's trial that runs, or ran last; the folder itself if it is a run's or none began."""
    trials = list_trials(folder)
    begun = sorted((trial for trial, state in trials.items() if state != WAITING), key=_find_last_write)
    running = [trial for trial in begun if trials[trial] == RUNNING]
    return [folder, *begun, *running][-1]


def _find_last_write(folder: Path) -> float:
    """Return when a run's first rank wrote its last step; 0 without any."""
    try:
        return (folder / STEPS.format(rank=0)).stat().st_mtime
    except OSError:
        return 0.0


def describe_progress(folder: Path) -> str:
    """Return which trials of a sweep run, or which ran last, and how many have ended; empty for a run."""
    trials = list_trials(folder)
    ended = sum(map(has_ended, trials.values()))
    current = find_current_trial(folder)
    names = [trial.name for trial, state in trials.items() if state == RUNNING] or [current.name]
    which = f"trial{'s' if len(names) > 1 else ''} {', '.join(names)}, " if current != folder else ""
    return f"{which}{ended} of {len(trials)} trials ended" if trials else ""


def find_step_files(folder: Path) -> dict[int, Path]:
    """Return the step files of a run folder by rank."""
    names = {path: path.stem.removeprefix("steps-rank") for path in folder.glob("steps-rank*.jsonl")}
    return dict(sorted((int(rank), path) for path, rank in names.items() if re.fullmatch(r"\d+", rank)))


def is_free(folder: Path) -> bool:
    """Return whether the folder exists and no run has begun there: a run's own files are left alone."""
    return folder.is_dir() and not (folder / MANIFEST).exists()


def read_manifest(folder: Path) -> dict[str, Any]:
    return read_json(folder / MANIFEST)


def update_manifest(folder: Path, **values: Any) -> None:
    """Update the manifest. Works on a full disk too: rewriting a file that doesn't grow needs no space."""
    path = folder / MANIFEST
    manifest = {**read_manifest(folder), **values}
    try:
        write_json(path, manifest)
    except OSError:
        text = json.dumps(manifest, default=str).encode()
        if len(text) > path.stat().st_size:
            raise
        with path.open("r+b") as file:
            file.write(text)
            file.truncate()


def is_finished(folder: Path) -> bool:
    return read_manifest(folder).get("state") == FINISHED


def log_event(folder: Path, kind: str, step: int, **fields: Any) -> None:
    """Append a line to events.jsonl; safe from a background thread."""
    append_json_line(folder / EVENTS, {"time": round(time.time(), 3), "step": step, "kind": kind, **fields})


def ensure_dir(folder: Path, where: str) -> None:
    with require_writable(folder, f"name a folder that you may write: {where}"):
        folder.mkdir(parents=True, exist_ok=True)


def lock_run(folder: Path, where: str) -> IO[str] | None:
    """Keep a second run out of `folder` until the returned file is closed or the process ends.

    On storage without locks this is reported, and None is returned.
    """
    with require_writable(folder, f"name a folder that you may write: {where}"):
        try:
            lock = lock_file(folder / ".lock", wait=False)
        except BlockingIOError:
            raise UserError(
                f"another run is using {folder}", where, "wait for it, or name another folder", "folder-in-use"
            ) from None
    if lock is None:
        remark = f"{folder} is on storage without locks: nothing keeps a second run out of it"
        print(remark, file=sys.stderr, flush=True)
    return lock


def begin_manifest(folder: Path, facts: dict[str, Any]) -> None:
    """Record that the run is running; its first start time is kept across resumes."""
    began = read_manifest(folder).get("began") or time.strftime("%Y-%m-%d %H:%M:%S")
    write_json(folder / MANIFEST, {"state": RUNNING, "began": began, **facts})


def read_versions(libraries: Iterable[str]) -> dict[str, str]:
    """Return the versions of windlass, Python and those of these libraries that are installed."""
    versions = {"windlass": __version__, "python": sys.version.split()[0]}
    return versions | {name: version for name in libraries if (version := _read_version(name))}


@functools.cache  # milliseconds each, asked for several times a run
def _read_version(name: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def read_git_state() -> dict[str, Any] | None:
    """Return the commit of the directory the run was started in and whether it was modified; None outside of a
    repository."""
    command = ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        status = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    commit = re.search(r"^# branch\.oid ([0-9a-f]+)$", status, re.MULTILINE)
    changed = any(not line.startswith("#") for line in status.splitlines())
    return {"commit": commit[1], "changed": changed} if commit else None
