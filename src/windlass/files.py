"""Files and folders that are there in full or not at all: atomic writes, JSON lines, locks."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, TextIO

# Storage that offers no locks at all: some NFS and FUSE mounts.
NO_LOCKS: Final = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}

SAMPLES, SAMPLE_BYTES = 9, 4096  # of a file, the first at its start
FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def unwritable(path: Path, error: OSError) -> str:
    """Which file, why, and how much room there is."""
    there = next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))
    free = f"{shutil.disk_usage(there).free:,} bytes are free there"
    return f"{path} can't be written: {error.strerror or error} ({free})"


class Unwritten:
    """Around what a run writes while it trains: a file that can't be written is reported once, and left out.

    `with unwritten(path): …`. say: what to do with the report; whoever raises alarms replaces it.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.names = say, set[str]()

    @contextmanager
    def __call__(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.report(path, error)

    def open(self, path: Path, mode: str) -> TextIO:
        """To write lines to; what can't be opened is reported, and its lines are lost."""
        with self(path):
            return path.open(mode, buffering=1, encoding="utf-8")  # type: ignore[return-value]
        return Path(os.devnull).open(mode, encoding="utf-8")

    def report(self, path: Path, error: OSError) -> None:
        if path.name not in self.names:
            self.names.add(path.name)
            self.say(f"{unwritable(path, error)}; training continues without it")


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write through a temporary file in the same folder, so that no reader ever sees half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        error.filename = str(path)  # a failing write doesn't name its file
        raise


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=2, default=str))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file's object; an empty one if the file is absent, damaged or holds something else."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def append_json_line(path: Path, value: dict[str, Any]) -> None:
    """One write per line: lines of several threads or processes don't mix."""
    line = json.dumps(value, default=str) + "\n"
    with path.open("a+b") as file:
        if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            line = f"\n{line}"  # a full disk, or a kill, has cut the last one short
        file.write(line.encode())


def read_json_lines(path: Path, damaged: list[int] | None = None) -> Iterator[dict[str, Any]]:
    """Each line's object. A last line cut short by a kill is skipped; numbers of other bad lines go to `damaged`."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict):
                yield value
            elif damaged is not None and line.endswith(b"\n"):
                damaged.append(number)


def flush(path: Path) -> None:
    """Bring a file, or a folder with all it holds, to the disk: contents first, then the names."""
    for one in (*path.rglob("*"), path):
        _fsync(one)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def commit_dir(partial: Path, final: Path) -> None:
    """Give a finished folder its name, replacing what had it. A crash leaves the old one, the new one or none."""
    flush(partial)
    if final.exists():  # rename() does not replace a folder that has files
        discard_dir(final)
    partial.rename(final)
    _fsync(final.parent)


def discard_dir(folder: Path) -> None:
    """Delete a folder; a crash half-way leaves nothing under its name."""
    aside = folder.with_name(f".{folder.name}.discarded")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def file_sample(path: Path) -> bytes:
    """Name, size and nine places of a large file: read at once, and other for nearly any other file."""
    size = path.stat().st_size
    with path.open("rb") as file:

        def place(number: int) -> bytes:
            file.seek(max(size - SAMPLE_BYTES, 0) * number // (SAMPLES - 1))
            return file.read(SAMPLE_BYTES)

        return f"{path.name} {size}".encode() + b"".join(map(place, range(SAMPLES)))


def lock_file(path: Path, *, wait: bool = True) -> IO[str] | None:
    """Lock `path` until the returned file is closed; the system closes it when the process ends, however it ends.

    None if the storage has no locks. Raises BlockingIOError if `wait` is false and another process holds it.
    """
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        file.close()
        if error.errno in NO_LOCKS:
            return None
        raise
    return file
