"""Which checkpoints there are: by their step, never by the clock; the newest, the best, and those to be deleted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from windlass.train.checkpoint.contents import read_manifest
from windlass.train.checkpoint.disk import damage, discard


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def saved(checkpoints: Path) -> list[Path]:
    """Oldest first."""
    named = (path for path in checkpoints.glob("step-*") if path.name.removeprefix("step-").isdigit())
    return sorted(named, key=step_of)


def newest(checkpoints: Path) -> Iterator[tuple[Path, str]]:
    """Newest first, each with its damage."""
    for folder in reversed(saved(checkpoints)):
        yield folder, damage(folder)


def best(checkpoints: Path) -> Path | None:
    """The checkpoint with the lowest evaluation loss; of equal ones the earliest. None: none was evaluated."""
    return best_of(saved(checkpoints))


def best_of(folders: Iterable[Path]) -> Path | None:
    """The same of these."""
    scored = [(loss, step_of(folder), folder) for folder in folders if (loss := evaluated(folder)) < math.inf]
    return min(scored)[2] if scored else None


def evaluated(folder: Path) -> float:
    """The evaluation loss at this checkpoint's step; infinite where there was none."""
    try:
        loss = read_manifest(folder).get("eval_loss")
    except (OSError, ValueError):
        return math.inf
    return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else math.inf


def prune(checkpoints: Path, limit: int | None) -> None:
    """Keep the newest `limit`, and the best one besides."""
    if limit:
        lowest = best(checkpoints)
        for folder in saved(checkpoints)[:-limit]:
            if folder != lowest:
                discard(folder)


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that it is neither resumed from nor counted; its files are kept."""
    aside = folder.with_name(f"damaged-{folder.name}")
    if aside.exists():
        discard(aside)
    folder.rename(aside)
    return aside


def point(run_folder: Path, checkpoints: Path) -> None:
    """Let `best` in the run folder lead to the best checkpoint; readers see the old one or the new one."""
    lowest = best(checkpoints)
    if lowest is not None:
        link = run_folder / ".best.partial"
        link.unlink(missing_ok=True)
        link.symlink_to(lowest.relative_to(run_folder), target_is_directory=True)
        link.replace(run_folder / "best")
