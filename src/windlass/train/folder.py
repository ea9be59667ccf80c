"""The run folder: taken by one run at a time, finished once, and told what happened in it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

from windlass import __version__
from windlass.errors import Problem, UserError
from windlass.observe import steps
from windlass.train import checkpoint, group, manifest

if TYPE_CHECKING:
    from windlass.plan import Plan

LIBRARIES = ("torch", "transformers", "peft", "accelerate", "datasets", "safetensors", "tokenizers")

# What a run can't change and go on as the same run: whole sections, and of `train` what the update is made by. The
# optimizer's and the schedule's settings come out of the checkpoint: a change would be silently without effect.
MATTERS: dict[str, set[str] | None] = {
    "model": None,
    "lora": None,
    "data": None,
    "train": {
        "optim",
        "learning_rate",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_ratio",
        "warmup_steps",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "max_grad_norm",
        "bf16",
        "fp16",
        "seed",
        "data_seed",
    },
}

_lock: IO[str] | None = None  # held for the life of rank 0's process; the system lets go of it when the process ends


def take(folder: Path, plan: Plan, *, resume: bool) -> Path | None:
    """Claim the folder for this run, on all ranks alike. Returns the checkpoint to go on from, if any."""
    answer: Path | tuple[Problem, ...] | None = None
    if group.rank() == 0:
        try:
            answer = _take(folder, plan, resume=resume)
        except UserError as error:
            answer = error.problems
    answer = group.from_rank_0(answer)
    if isinstance(answer, tuple):
        raise UserError.of(answer)
    return answer


def hold(folder: Path, where: str) -> None:
    """Keep a second run out of it until this process ends."""
    global _lock
    if _lock is not None:
        _lock.close()
    _lock = manifest.lock(folder, where)


def _take(folder: Path, plan: Plan, *, resume: bool) -> Path | None:
    where = plan.loaded.where("train.output_dir")
    manifest.made(folder / "checkpoints", where)
    hold(folder, where)
    checkpoint.sweep(folder / "checkpoints")
    before = manifest.read(folder)
    state = before.get("state")
    if state == manifest.FINISHED:
        raise UserError(
            f"{folder} holds a finished run", where, "name another train.output_dir, or remove the folder to train anew"
        )
    begun = bool(checkpoint.saved(folder / "checkpoints")) or (bool(state) and any(_stepped(folder)))
    if begun and not resume:
        raise UserError(
            f"{folder} holds an unfinished run ({state or 'begun'} {before.get('began', '')})",
            where,
            "add --resume to continue it, name another train.output_dir, or remove the folder to train anew",
        )
    usable = _usable(folder / "checkpoints", where) if begun else None
    if begun:  # one that failed before its first step left nothing to be true to
        _same(checkpoint.read_manifest(usable) if usable else before, plan, folder)
    write(folder, "plan.json", plan.as_dict())
    began = before.get("began") or time.strftime("%Y-%m-%d %H:%M:%S")
    write(folder, steps.MANIFEST, {"state": manifest.RUNNING, "began": began, **facts(plan)})
    _forget_after(folder, checkpoint.step_of(usable) if usable else 0)
    return usable


def _stepped(folder: Path) -> Iterator[bool]:
    """Whether any step was written, file by file."""
    return (path.stat().st_size > 0 for path in steps.files(folder).values())


def _forget_after(folder: Path, step: int) -> None:
    """Drop what an interrupted run wrote of the steps that will be run again."""
    events = folder / steps.EVENTS
    for path in (*steps.files(folder).values(), *([events] if events.exists() else [])):
        part = path.with_name(f".{path.name}.partial")
        part.write_text("".join(json.dumps(line) + "\n" for line in steps.lines(path) if line.get("step", 0) <= step))
        part.replace(path)


def _same(before: Mapping[str, Any], plan: Plan, folder: Path) -> None:
    """A resumed run is the same run: what decides the weights may not have changed."""
    now = facts(plan)
    then = before.get("run", {})
    problems = [
        Problem(
            f"was {json.dumps(then[section][key])} when this run began, is {json.dumps(value)} now",
            plan.loaded.where(f"{section}.{key}"),
            f"put it back, or train into another folder than {folder}",
        )
        for section, keys in MATTERS.items()
        for key, value in now["run"].get(section, {}).items()
        if (keys is None or key in keys) and key in then.get(section, {}) and then[section][key] != value
    ]
    was, sequences = before.get("sequences"), now["sequences"]
    if was and was != sequences:
        problem = f"an optimizer step had {was} sequences when this run began, and would have {sequences} now"
        where = plan.loaded.where("train.global_batch_size")
        problems.append(
            Problem(problem, where, f"set train.global_batch_size: {was}, which holds on any number of ranks")
        )
    if problems:
        raise UserError.of(problems)


def require_same_data(resumed: Path | None, fingerprint: str, plan: Plan) -> None:
    """Rows changed under the same name would be other rows at the same place."""
    if resumed is not None and checkpoint.read_manifest(resumed).get("data") != fingerprint:
        raise UserError(
            "the data are not those that this run began with, though the run file names the same",
            plan.loaded.where("data.dataset_name_or_path"),
            "put the files (and the tokenizer) back as they were, or train into another folder",
        )


def _usable(checkpoints: Path, where: str) -> Path | None:
    """The newest whole checkpoint. What is passed over is said, and set aside: it would count as the newest."""
    found = list(checkpoint.newest(checkpoints))
    whole = next((folder for folder, damage in found if not damage), None)
    if found and whole is None:
        raise UserError(
            f"none of {len(found)} checkpoints in {checkpoints} is whole; {found[0][0].name}: {found[0][1]}",
            where,
            "remove the folder to train anew",
        )
    for folder, damage in found:
        if folder == whole:
            break
        aside = checkpoint.set_aside(folder)
        _say(f"passed over {folder}: {damage}; kept as {aside.name}")
    if whole is None:
        _say("no checkpoint was saved: beginning with the first step")
    return whole


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def facts(plan: Plan) -> dict[str, Any]:
    """What went into this run: enough to know later what it was."""
    return {
        "run": resolved(plan),
        "versions": {"windlass": __version__, "python": sys.version.split()[0], **versions()},
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "ranks": plan.layout.ranks,
        "layout": plan.as_dict()["layout"],
        "sequences": plan.schedule.global_sequences,  # of an optimizer step
        "git": manifest.git_state(),
    }


def resolved(plan: Plan) -> dict[str, Any]:
    """The run file with the micro-batch and the passes that the plan chose or derived in their places."""
    run = plan.loaded.run.model_dump(mode="json")
    batch = {
        "per_device_train_batch_size": plan.batch.micro,
        "gradient_accumulation_steps": plan.batch.accumulation,
    }
    return {**run, "train": {**run["train"], **batch}}


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in LIBRARIES}


def write(folder: Path, name: str, value: Any) -> None:
    """One JSON file, by rank 0, whole or not at all."""
    if group.rank() == 0:
        manifest.write(folder, name, value)


def note(folder: Path, **found: Any) -> None:
    """Add to the manifest what became known later."""
    if group.rank() == 0:
        manifest.note(folder, **found)


@contextlib.contextmanager
def failing(folder: Path) -> Iterator[None]:
    """A run that an error ends says so: its manifest would go on calling it running."""
    try:
        yield
    except Exception:
        note(folder, state=manifest.FAILED)
        raise
