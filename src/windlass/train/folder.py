"""The run folder: taken by one run at a time, finished once, and told what happened in it."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from windlass import __version__, checkpoint, steps
from windlass.errors import Problem, UserError

if TYPE_CHECKING:
    from windlass.plan import Plan

MANIFEST = "manifest.json"
FINISHED, RUNNING, STOPPED = "finished", "running", "stopped by a signal"
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "safetensors", "tokenizers")
MATTERS = ("model", "lora", "data")  # sections that a run can't change and go on as the same run

_lock: IO[str] | None = None  # held for the life of rank 0's process; the system lets go of it when the process ends


def take(folder: Path, plan: Plan, *, resume: bool) -> Path | None:
    """Claim the folder for this run, on all ranks alike. Returns the checkpoint to go on from, if any."""
    answer: list[Any] = [None]
    if checkpoint.rank() == 0:
        try:
            answer = [_take(folder, plan, resume=resume)]
        except UserError as error:
            answer = [error.problems]
    if dist.is_initialized():
        dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], tuple):
        raise UserError.of(answer[0])
    return Path(answer[0]) if answer[0] else None


def _take(folder: Path, plan: Plan, *, resume: bool) -> str | None:
    where = plan.loaded.where("train.output_dir")
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        _hold(folder, where)
    except OSError as error:
        raise UserError(f"{folder} can't be written: {error.strerror}", where, "name a folder you may write") from None
    manifest = read(folder)
    state = manifest.get("state")
    if state == FINISHED:
        raise UserError(
            f"{folder} holds a finished run", where, "name another train.output_dir, or remove the folder to train anew"
        )
    begun = bool(state) and (checkpoint.saved(folder / "checkpoints") or any(_stepped(folder)))
    if begun and not resume:
        raise UserError(
            f"{folder} holds an unfinished run ({state} since {manifest.get('began')})",
            where,
            "add --resume to go on with it, name another train.output_dir, or remove the folder to train anew",
        )
    if begun:  # one that failed before its first step left nothing to be true to
        _same(manifest, plan, folder)
    write(folder, "plan.json", plan.as_dict())
    began = manifest.get("began") or time.strftime("%Y-%m-%d %H:%M:%S")
    write(folder, MANIFEST, {"state": RUNNING, "began": began, **facts(plan)})
    usable = _usable(folder / "checkpoints") if resume else None
    _forget_after(folder, checkpoint.step_of(Path(usable)) if usable else 0)
    return usable


def _stepped(folder: Path) -> Iterator[bool]:
    """Whether any step was written, file by file."""
    return (path.stat().st_size > 0 for path in steps.files(folder).values())


def _forget_after(folder: Path, step: int) -> None:
    """Drop what an interrupted run wrote of the steps that will be run again."""
    for path in steps.files(folder).values():
        kept = [line for line in steps.lines(path) if line.get("step", 0) <= step]
        path.write_text("".join(json.dumps(line) + "\n" for line in kept))


def _hold(folder: Path, where: str) -> None:
    global _lock
    _lock = (folder / ".lock").open("a")
    try:
        fcntl.flock(_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another run is using {folder}", where, "wait for it, or name another folder") from None


def _same(manifest: Mapping[str, Any], plan: Plan, folder: Path) -> None:
    """A resumed run is the same run: what decides the weights may not have changed."""
    now = facts(plan)["run"]
    before = manifest.get("run", {})
    problems = [
        Problem(
            f"was {json.dumps(before[section].get(key))} when this run began, is {json.dumps(value)} now",
            plan.loaded.where(f"{section}.{key}"),
            f"put it back, or train into another folder than {folder}",
        )
        for section in MATTERS
        for key, value in now.get(section, {}).items()
        if section in before and before[section].get(key) != value
    ]
    if problems:
        raise UserError.of(problems)


def _usable(checkpoints: Path) -> str | None:
    """The newest whole checkpoint; what is passed over is said."""
    for folder, damage in checkpoint.newest(checkpoints):
        if not damage:
            return str(folder)
        print(f"passed over {folder}: {damage}", file=sys.stderr, flush=True)
    return None


def facts(plan: Plan) -> dict[str, Any]:
    """What went into this run: enough to know later what it was."""
    return {
        "run": plan.loaded.run.model_dump(mode="json"),
        "versions": {"windlass": __version__, "python": sys.version.split()[0], **versions()},
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "ranks": plan.layout.ranks,
        "git": git_state(),
    }


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in LIBRARIES}


def git_state() -> dict[str, Any] | None:
    """Commit of the directory the run was started in, and whether it was changed; None outside of a repository."""
    try:
        said = [
            subprocess.run(["git", *words], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": said[0], "changed": bool(said[1])}


def read(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return found


def write(folder: Path, name: str, value: Any) -> None:
    """One JSON file, by rank 0, whole or not at all."""
    if checkpoint.rank() == 0:
        part = folder / f".{name}.partial"
        part.write_text(json.dumps(value, indent=2, default=str))
        part.replace(folder / name)


def note(folder: Path, **found: Any) -> None:
    """Add to the manifest what became known later."""
    if checkpoint.rank() == 0:
        write(folder, MANIFEST, {**read(folder), **found})
