"""The run folder's manifest and lock, as far as they need no torch: which run the folder holds, and its state."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

from windlass.errors import UserError
from windlass.observe import steps

FINISHED, RUNNING, STOPPED, FAILED = "finished", "running", "stopped by a signal", "failed"
UNLOCKABLE: Final = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}


@contextlib.contextmanager
def held(folder: Path, where: str) -> Iterator[None]:
    """Made, and kept from a second run."""
    made(folder, where)
    with lock(folder, where):
        yield


def lock(folder: Path, where: str) -> IO[str]:
    """Keeps a second run out until it is closed; the system closes it when the process ends, however that ends.

    Storage without locks is no reason not to run.
    """
    with _writing(folder, where):
        file = (folder / ".lock").open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise UserError(f"another run is using {folder}", where, "wait for it, or name another folder") from None
        except OSError as error:
            if error.errno not in UNLOCKABLE:
                raise
            said = f"{folder} is on storage without locks: nothing keeps a second run out of it"
            print(said, file=sys.stderr, flush=True)
    return file


def made(folder: Path, where: str) -> None:
    with _writing(folder, where):
        folder.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def _writing(folder: Path, where: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{folder} can't be written: {error.strerror}", where, "name a folder you may write") from None


def read(folder: Path) -> dict[str, Any]:
    return steps.read(folder / steps.MANIFEST)


def write(folder: Path, name: str, value: Any) -> None:
    """One JSON file, whole or not at all."""
    part = folder / f".{name}.partial"
    part.write_text(json.dumps(value, indent=2, default=str))
    part.replace(folder / name)


def note(folder: Path, **found: Any) -> None:
    """Add to the manifest what became known later."""
    write(folder, steps.MANIFEST, {**read(folder), **found})


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
