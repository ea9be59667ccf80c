"""Tokens on disk: made once for a fingerprint, by one process while others wait, and never half there."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from windlass.errors import UserError

Say = Callable[[str], None]

SEAL = "complete.json"
# For so long a process trusts another's full check of a cache, as long as sizes and times of change are the same:
# the eight ranks of a node start together and need not each read every byte.
CHECKED_SECONDS = 600
UNLOCKABLE = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}


def made_once(cache: Path, fingerprint: str, make: Callable[[Path], None], say: Say) -> Path:
    """The folder of this fingerprint, whole: found and checked, or made now. A damaged one is made again, and said."""
    try:
        return found_or_made(cache, fingerprint, make, say)
    except OSError as error:
        raise UserError(
            f"tokens can't be kept in {cache}: {error.strerror or error}",
            error.filename or str(cache),
            "they take 4 to 8 bytes a token: make room, or let train.output_dir be on a volume that can be written",
        ) from None


def found_or_made(cache: Path, fingerprint: str, make: Callable[[Path], None], say: Say) -> Path:
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / fingerprint
    with locked(cache / f"{fingerprint}.lock", say, f"waiting for another process that is tokenising into {folder}"):
        fault = damage(folder) if folder.exists() else "absent"
        if fault is None:
            return folder
        if folder.exists():
            say(f"the tokens cached in {folder} are damaged ({fault}): made again")
            aside = cache / f"{fingerprint}.damaged-{socket.gethostname()}-{os.getpid()}"
            folder.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
        sweep(cache, fingerprint)
        temporary = cache / f"{fingerprint}.part-{socket.gethostname()}-{os.getpid()}"
        temporary.mkdir()
        try:
            make(temporary)
            seal(temporary)
            settle(temporary, folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return folder


def settle(temporary: Path, folder: Path) -> None:
    try:
        temporary.rename(folder)
    except OSError:
        # Without locks another process may have been first: its folder has the same content.
        if damage(folder) is not None:
            raise
        shutil.rmtree(temporary, ignore_errors=True)
    parent = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


@contextmanager
def locked(path: Path, say: Say, waiting: str) -> Iterator[None]:
    """One process at a time; `waiting` is said where another is at it.

    The kernel holds the lock, so it falls with its owner, however that one ends.
    """
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(waiting)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in UNLOCKABLE:
                raise
            say(f"{path.parent} takes no locks: every process works for itself, the first to finish is kept")
            yield
            return
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def sweep(cache: Path, fingerprint: str) -> None:
    """What processes of this machine left half done; nobody else is at it while the lock is held."""
    for left in cache.glob(f"{fingerprint}.*-{socket.gethostname()}-*"):
        shutil.rmtree(left, ignore_errors=True)


def seal(folder: Path) -> None:
    """Flush every file, then write down what they are: the mark of a whole folder, written last."""
    files: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[path.name] = {"bytes": path.stat().st_size, "hash": file_hash(path)}
    mark = folder / SEAL
    with mark.open("w") as file:
        json.dump({"files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def damage(folder: Path) -> str | None:
    """What is wrong with a cached folder, or None."""
    try:
        files: Mapping[str, Any] = json.loads((folder / SEAL).read_text())["files"]
        stats = {name: (folder / name).stat() for name in files}
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{SEAL} can't be read"
    for name, entry in files.items():
        if stats[name].st_size != entry["bytes"]:
            return f"{name} has {stats[name].st_size} bytes of {entry['bytes']}"
    state = json.dumps({name: [s.st_size, s.st_mtime_ns, s.st_ino] for name, s in stats.items()})
    memo = folder.with_name(f"{folder.name}.checked-{socket.gethostname()}.json")
    if seen_lately(memo, state):
        return None
    for name, entry in files.items():
        if file_hash(folder / name) != entry["hash"]:
            return f"{name} is not what was written"
    memo.write_text(state)
    return None


def seen_lately(memo: Path, state: str) -> bool:
    try:
        return 0 <= time.time() - memo.stat().st_mtime < CHECKED_SECONDS and memo.read_text() == state
    except OSError:
        return False


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
