"""Keep tokens on disk: made once per fingerprint by one process while others wait, and verified before use."""

import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from windlass.errors import UserError
from windlass.files import commit_dir, discard_dir, lock_file, read_json, write_json

Say = Callable[[str], None]

SEAL = "complete.json"
# How long a process trusts another's full check of a cache if sizes and modification times are unchanged: a node's
# eight ranks start together and need not each read every byte.
CHECKED_SECONDS = 600
BLOCK_BYTES = 1 << 20
SILENT_SECONDS = 2.0  # waiting for the ranks of one node is reported only after this


def get_or_create(
    cache: Path, fingerprint: str, make: Callable[[Path], None], say: Say, checks: Path | None = None
) -> Path:
    """Return the folder of this fingerprint: found and verified, or created. A damaged one is reported and created
    again. `checks`: where it is noted that it was verified, if not in the cache."""
    folder = cache / fingerprint
    ours = f"{fingerprint}.part-{socket.gethostname()}-"
    partial = cache / f"{ours}{os.getpid()}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        waiting = f"waiting: another rank of this run, or another run, is tokenizing into {folder}"
        with hold_lock(cache / f"{fingerprint}.lock", say, waiting, SILENT_SECONDS) as alone:
            if folder.exists():
                damage = find_cache_damage(folder, checks)
                if damage is None:
                    return folder
                say(f"the tokens cached in {folder} are damaged ({damage}): they are made again")
                discard_dir(folder)
            for left in cache.glob(f"{ours}*") if alone else ():
                shutil.rmtree(left, ignore_errors=True)  # left by a process that was killed
            partial.mkdir()
            try:
                make(partial)
                files = sorted(partial.iterdir())
                sealed = {path.name: {"bytes": path.stat().st_size, "hash": hash_file(path)} for path in files}
                write_json(partial / SEAL, {"files": sealed})
                if find_cache_damage(folder) is not None:  # without locks, another process may have finished first
                    commit_dir(partial, folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        problem = f"tokens can't be stored in {cache}: {error.strerror or error}"
        hint = "they take 4 to 8 bytes a token, and 5 until they are made: make room, or set train.output_dir to a "
        hint += "folder on a writable volume"
        raise UserError(problem, error.filename or str(cache), hint, "unwritable") from None
    return folder


@contextmanager
def hold_lock(path: Path, say: Say, waiting: str, silent_seconds: float = 0.0) -> Iterator[bool]:
    """Hold a lock; report `waiting` after `silent_seconds`. Yields False if the storage has no locks."""
    silent_until = time.monotonic() + silent_seconds
    wait = False
    while True:
        try:
            lock = lock_file(path, wait=wait)
            break
        except BlockingIOError:
            time.sleep(0.05)
            if wait := time.monotonic() > silent_until:
                say(waiting)
    if lock is None:
        say(f"{path.parent} has no locks: every process does the work itself, and the first result is kept")
    with lock or nullcontext():
        yield lock is not None


def find_cache_damage(folder: Path, checks: Path | None = None) -> str | None:
    """Return what is wrong with a cached folder, or None."""
    files = read_json(folder / SEAL).get("files")
    if not files:
        return f"{SEAL} is missing, or can't be read"
    try:
        stats = {name: (folder / name).stat() for name in files}
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    state = json.dumps({name: [s.st_size, s.st_mtime_ns, s.st_ino] for name, s in stats.items()})
    checked = (checks or folder.parent) / f"{folder.name}.checked-{socket.gethostname()}.json"
    with suppress(OSError):  # not checked yet
        if 0 <= time.time() - checked.stat().st_mtime < CHECKED_SECONDS and checked.read_text() == state:
            return None
    for name, entry in files.items():
        if stats[name].st_size != entry["bytes"] or hash_file(folder / name) != entry["hash"]:
            return f"{name} is not what was written"
    checked.parent.mkdir(parents=True, exist_ok=True)
    checked.write_text(state)
    return None


def hash_file(path: Path, most: int | None = None) -> str:
    """Hash a file; of one larger than `most` bytes, that many in blocks evenly spaced from start to end."""
    with path.open("rb") as file:
        size = path.stat().st_size
        if most is None or size <= most:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        digest = hashlib.blake2b(digest_size=16)
        blocks = most // BLOCK_BYTES
        for block in range(blocks):
            file.seek((size - BLOCK_BYTES) * block // (blocks - 1))
            digest.update(file.read(BLOCK_BYTES))
        return digest.hexdigest()
