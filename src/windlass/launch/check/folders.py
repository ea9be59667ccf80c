"""Folders that a run writes to: whether it may, whether renames and locks hold there, and whether there is room."""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.launch.check.result import Result, failed, passed, unseen, warned
from windlass.launch.check.static import IN_POD, size

if TYPE_CHECKING:
    from windlass.plan import Plan
    from windlass.runfile import Loaded, LoadedScript

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
TOKEN_BYTES = 8  # of the token cache: an id and a mark of what is learnt, by `windlass.data.packing`
# Written by libraries during a run, and what they make of it where nothing is set.
CACHES = {"HF_HOME": ".cache/huggingface", "TRITON_CACHE_DIR": ".triton", "TORCHINDUCTOR_CACHE_DIR": ""}


def standing(path: Path) -> Path:
    """The deepest folder of a path that exists: where a missing one would be made."""
    return next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))


def fault(folder: Path) -> str:
    """Why files cannot be written, locked and renamed in a folder (or where it would be made); empty if they can."""
    place = standing(folder)
    if not place.is_dir():
        return f"{place} is a file"
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".windlass-check-", delete=False) as file:
            path = Path(file.name)
            try:
                file.write(b"windlass")
                file.flush()
                os.fsync(file.fileno())
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path = path.replace(path.with_suffix(".renamed"))
            finally:
                path.unlink(missing_ok=True)
    except OSError as error:
        return f"{place}: {error.strerror}"
    return ""


def output(loaded: Loaded | LoadedScript, *, elsewhere: bool) -> Result:
    """The run folder, which all nodes share."""
    folder, place = Path(loaded.run.folder), loaded.where(loaded.run.folder_key)
    if elsewhere and not folder.is_dir():
        return unseen("run folder", f"{folder} is not on this machine", IN_POD)
    wrong = fault(folder)
    if wrong:
        hint = "mount the volume writable, or name another folder; a read-only file system stays so for root"
        return failed("run folder", f"files cannot be written, locked and renamed: {wrong}", hint, place)
    made = "" if folder.is_dir() else ", where it will be made"
    return passed("run folder", f"written, locked and renamed in {standing(folder)}{made}")


def needed(plan: Plan) -> tuple[float, float, str]:
    """Bytes that the run has yet to write, bytes of a merged model besides, and the sum as words."""
    schedule, adapter = plan.schedule, plan.adapter
    kept = schedule.checkpoints_kept
    # One more than is kept: the newest is whole before the oldest goes.
    checkpoints = (math.inf if kept is None else kept + 1 if kept else 0) * schedule.checkpoint_bytes
    if kept is None:  # the number of rows is not known: the limit, or at least one
        checkpoints = ((plan.loaded.run.train.save_total_limit or 1) + 1) * schedule.checkpoint_bytes
    final = adapter.trainable * adapter.dtype_bytes
    tokens = (schedule.steps_per_epoch or 0) * schedule.tokens_per_step * TOKEN_BYTES
    merged = plan.total * BYTES[plan.loaded.run.model.torch_dtype]
    words = f"checkpoints {size(checkpoints)}, final adapter {size(final)}, tokens {size(tokens)}"
    folder = Path(plan.loaded.run.train.output_dir)
    saved, cached = min(checkpoints, held(folder / "checkpoints")), min(tokens, held(folder / "tokens"))
    if saved + cached:
        words += f", of which {size(saved + cached)} are there"
    return checkpoints + final + tokens - saved - cached, merged, words


def held(folder: Path) -> int:
    """Bytes that a folder takes on its disk."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # a checkpoint that is being dropped
                total += os.lstat(Path(parent) / name).st_blocks * 512  # man inode: in such units
    return total


def room(plan: Plan, *, elsewhere: bool) -> Result:
    """Space for what the run writes; for the merged model that an export may write, a warning."""
    folder = Path(plan.loaded.run.train.output_dir)
    if elsewhere and not folder.is_dir():
        return unseen("disk space", f"{folder} is not on this machine", IN_POD)
    return enough(shutil.disk_usage(standing(folder)).free, plan)


def enough(free: float, plan: Plan) -> Result:
    folder, place = plan.loaded.run.train.output_dir, plan.loaded.where("train.output_dir")
    run, merged, words = needed(plan)
    if free < run:
        hint = "make room, lower train.save_total_limit, or name a larger volume in train.output_dir"
        return failed("disk space", f"{size(free)} free in {folder}; the run needs {size(run)} ({words})", hint, place)
    if free < run + merged:
        said = f"{size(free)} free in {folder}: enough for the run ({words}), not for a merged model of {size(merged)}"
        return warned("disk space", said, "export the adapter alone, or the merged model to another volume", place)
    return passed("disk space", f"{size(free)} free in {folder}: {words}, merged model {size(merged)}")


def caches(environ: Mapping[str, str]) -> list[Result]:
    """HOME, temporary files and the libraries' caches."""
    home = environ.get("HOME", "")
    found = []
    for name, default in {"HOME": "", "TMPDIR": "", **CACHES}.items():
        given = environ.get(name, "")
        path = given or (tempfile.gettempdir() if name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR") else default)
        if not given and name in CACHES and default:
            path = str(Path(home or "/") / default)
        if not path:
            hint = "set HOME to a folder that can be written, as a variable in cluster.env"
            found.append(failed(f"folder {name}", "is not set", hint))
            continue
        wrong = fault(Path(path))
        found.append(
            failed(f"folder {name}", f"cannot be written: {wrong}", f"set {name} in cluster.env to a folder that can")
            if wrong
            else passed(f"folder {name}", path if given else f"{path}, by default")
        )
    return found
