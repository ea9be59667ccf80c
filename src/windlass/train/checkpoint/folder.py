"""Checkpoint folders: sealed with hashes; found by their step, never by the clock. No torch."""

import hashlib
import json
import math
import shlex
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Final

from windlass.errors import RunError
from windlass.files import discard_dir
from windlass.run_folder import CHECKPOINTS, MANIFEST, read_manifest

SEAL: Final = "seal"  # hash of the manifest itself, which has the hashes of all other files


def seal_checkpoint(partial: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest with the hashes of every other file and of itself."""
    full = json.loads(json.dumps({**manifest, "sha256": _hash_files(partial)}, default=str))
    (partial / MANIFEST).write_text(json.dumps({**full, SEAL: _hash_manifest(full)}, indent=2))


def find_damage(folder: Path) -> str:
    """Return why this checkpoint can't be used; empty if it is as it was written."""
    manifest = read_manifest(folder)
    if not manifest:
        return f"its manifest can't be read ({folder / MANIFEST})"
    if manifest.pop(SEAL, None) != _hash_manifest(manifest):
        return f"{MANIFEST} is not what was written"
    expected = manifest["sha256"]
    try:
        hashes = _hash_files(folder)
    except OSError as error:
        return f"it can't be read ({error})"
    for name in sorted(expected):
        if name not in hashes:
            return f"{name} is missing"
        if hashes[name] != expected[name]:
            return f"{name} is not what was written"
    return ""


def _hash_files(folder: Path) -> dict[str, str]:
    hashes = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST):
        with path.open("rb") as file:
            hashes[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def _hash_manifest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def name_checkpoint(step: int) -> str:
    return f"step-{step}"


def read_step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """Return the checkpoints, oldest first."""
    named = (path for path in checkpoints.glob("step-*") if path.name.removeprefix("step-").isdigit())
    return sorted(named, key=read_step)


def find_best(folders: Iterable[Path]) -> Path | None:
    """Return the checkpoint with the lowest evaluation loss, the earliest of equals; None if none was evaluated."""
    scored = [(read_eval_loss(folder), read_step(folder), folder) for folder in folders]
    evaluated = [scores for scores in scored if scores[0] < math.inf]
    return min(evaluated)[2] if evaluated else None


def read_eval_loss(folder: Path) -> float:
    """Return the evaluation loss at this checkpoint's step; infinity if there was no evaluation."""
    loss = read_manifest(folder).get("eval_loss")
    return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else math.inf


def find_intact_best(checkpoints: Path) -> Path | None:
    best = find_best(list_checkpoints(checkpoints))
    if best is None:
        return None
    damage = find_damage(best)
    if damage:
        run = shlex.quote(str(checkpoints.parent))
        hint = f"remove it, then add --resume to take the best that is left; `windlass best {run}` ranks them"
        raise RunError(f"the best checkpoint can't be used: {damage}", str(best), hint, "damaged-checkpoint")
    return best


def prune_checkpoints(checkpoints: Path, limit: int | None, passing: Collection[int] = ()) -> None:
    """Keep the newest `limit` checkpoints and the best one. Those of the steps `passing` don't count, and only the
    newest of all is kept of them."""
    for folder in list_checkpoints(checkpoints)[:-1]:
        if read_step(folder) in passing:
            discard_dir(folder)
    if limit:
        folders = [folder for folder in list_checkpoints(checkpoints) if read_step(folder) not in passing]
        best = find_best(folders)
        for folder in folders[:-limit]:
            if folder != best:
                discard_dir(folder)


def point_to_best(run_folder: Path, passing: Collection[int] = ()) -> None:
    """Link `best` in the run folder to the best checkpoint; readers see the old link or the new one. Those of the steps
    `passing` are about to be pruned, except the newest of all."""
    *older, newest = list_checkpoints(run_folder / CHECKPOINTS)
    best = find_best([*(folder for folder in older if read_step(folder) not in passing), newest])
    if best is not None:
        link = run_folder / ".best.partial"
        link.unlink(missing_ok=True)
        link.symlink_to(best.relative_to(run_folder), target_is_directory=True)
        link.replace(run_folder / "best")


def remove_partial_checkpoints(checkpoints: Path) -> None:
    """Delete what crashes left half written or half deleted."""
    for left in (*checkpoints.glob(".*.partial"), *checkpoints.glob(".*.discarded")):
        shutil.rmtree(left, ignore_errors=True)
