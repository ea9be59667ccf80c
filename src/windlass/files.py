"""Files and folders that exist in full or not at all: atomic writes, JSON lines, locks."""

import errno
import fcntl
import functools
import json
import operator
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, TextIO

# Storage that offers no locks at all: some NFS and FUSE mounts.
NO_LOCKS: Final = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}

SAMPLES = 9  # of a file, the first at its start
SAMPLE_BYTES = 4096
WAYS: Final[dict[str, Callable[[Any, Any], Any]]] = {"+": operator.add, "-": operator.sub, "/": operator.truediv}
FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def find_cache_folder() -> Path:
    """Return where windlass keeps what it would otherwise compute again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "windlass"


def explain_write_error(path: Path, error: OSError) -> str:
    """Return which file can't be written, why, and how much space is free."""
    there = next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))
    free = f"{shutil.disk_usage(there).free:,} bytes are free there"
    return f"{path} can't be written: {error.strerror or error} ({free})"


class WriteGuard:
    """Guards writes during training: a file that can't be written is reported once and skipped.

    `with unwritten(path): …`. say: receives the report; the watch replaces it with an alarm.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.names = set[str]()

    @contextmanager
    def __call__(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.report(path, error)

    def open(self, path: Path, mode: str) -> TextIO:
        """Open a file to write lines to; if that fails, it is reported and its lines are lost."""
        with self(path):
            file: TextIO = path.open(mode, buffering=1, encoding="utf-8")  # type: ignore[assignment]
            with path.open("rb") as written:
                if _is_cut_short(written):
                    file.write("\n")
            return file
        return Path(os.devnull).open(mode, encoding="utf-8")

    def report(self, path: Path, error: OSError) -> None:
        if path.name not in self.names:
            self.names.add(path.name)
            self.say(f"{explain_write_error(path, error)}; training continues without it")


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


def refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's keys and values: a hook of json.loads, with which the last value would silently win."""
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return table


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON file's object; an empty one if the file is absent, damaged or not an object."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def append_json_line(path: Path, value: dict[str, Any]) -> None:
    """Append a line with a single write, so that lines of several threads or processes don't mix."""
    line = json.dumps(value, default=str) + "\n"
    with path.open("a+b") as file:
        if _is_cut_short(file):
            line = "\n" + line
        file.write(line.encode())


def _is_cut_short(file: IO[bytes]) -> bool:
    """Return whether the file ends with half a line, left by a full disk or a kill."""
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


class Table:
    """JSON lines of similar objects: `[form, value, ...]`, after a line that names the columns of that form.

    derived: fields that are not written because the reader computes them: name -> (+, - or /, fields …).
    """

    def __init__(self, derived: Mapping[str, Sequence[str]] | None = None) -> None:
        self.derived = dict(derived or {})
        self.columns: dict[int, list[str]] = {}  # by form: a hash of them, so that it means the same in the whole file

    def encode(self, record: Mapping[str, Any]) -> str:
        """Return the text to append: a row, preceded by a header if it is the first of its form."""
        columns = [name for name in record if name not in self.derived]
        header = ""
        form = zlib.crc32("/".join(columns).encode()) & 0xFFFF
        if self.columns.get(form) != columns:
            self.columns[form] = columns
            header = json.dumps({"form": form, "columns": columns, "derived": self.derived}) + "\n"
        return header + json.dumps([form, *map(record.get, columns)], separators=(",", ":")) + "\n"

    def decode(self, value: Any) -> dict[str, Any] | None:
        """Return a line's object; empty for a header; None if it is neither."""
        match value:
            case {"form": int(form), "columns": list(columns), "derived": dict(derived)}:
                self.columns[form] = [*map(str, columns)]
                self.derived = derived
                return {}
            case dict():
                return value
            case [int(form), *values] if form in self.columns and len(self.columns[form]) == len(values):
                return self.derive(dict(zip(self.columns[form], values, strict=True)))
        return None

    def derive(self, record: dict[str, Any]) -> dict[str, Any]:
        """Add the derived fields whose inputs all exist."""
        for name, formula in self.derived.items():
            try:
                record[name] = functools.reduce(WAYS[formula[0]], [record[field] for field in formula[1:]])
            except (LookupError, TypeError, ValueError, ArithmeticError):
                continue
        return record


def read_table_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each line with its object. Lines that are damaged or cut short by a kill are skipped."""
    table = Table()
    with path.open("rb") as file:
        for line in file:
            try:
                value = table.decode(json.loads(line))
            except (ValueError, RecursionError):
                continue
            if value is not None:
                yield line, value


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    return (value for _, value in read_table_lines(path) if value)


def flush_to_disk(path: Path) -> None:
    """Flush a file, or a folder with everything in it, to the disk: contents first, then names."""
    for inner in (*path.rglob("*"), path):
        _fsync(inner)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def commit_dir(partial: Path, final: Path) -> None:
    """Give a finished folder its name, replacing what had it. After a crash there is the old one, the new one or, for
    the moment between two renames, none."""
    flush_to_disk(partial)
    aside = final.with_name(f".{final.name}.discarded")
    if final.exists():  # rename() does not replace a folder that has files
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    partial.rename(final)
    _fsync(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def discard_dir(folder: Path) -> None:
    """Delete a folder; a crash half-way leaves nothing under its name."""
    aside = folder.with_name(f".{folder.name}.discarded")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def sample_file(path: Path) -> bytes:
    """Return name, size and nine samples of a large file: quick to read, and different for nearly any other file."""
    size = path.stat().st_size
    with path.open("rb") as file:

        def place(number: int) -> bytes:
            file.seek(max(size - SAMPLE_BYTES, 0) * number // (SAMPLES - 1))
            return file.read(SAMPLE_BYTES)

        return f"{path.name} {size}".encode() + b"".join(map(place, range(SAMPLES)))


def lock_file(path: Path, *, wait: bool = True) -> IO[str] | None:
    """Lock `path` until the returned file is closed; the system closes it however the process ends.

    None if the storage has no locks. Raises BlockingIOError if `wait` is false and another process has the lock.
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
