"""The merged files written: several at a time, a block at a time, each under its name only when it is whole.

What a stopped merge leaves: the files that are finished, and `.windlass/` with what it was about. The same command
goes on from there; another command in the same folder is refused.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION as FIRST
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from windlass.errors import RunError, UserError
from windlass.export import values
from windlass.export.recipe import COPIED, MERGED, SCALE, Entry, OutFile, Recipe
from windlass.export.update import Updates
from windlass.model import Base
from windlass.model.files import CONFIG, INDEX
from windlass.train.checkpoint import flush_one, save_tensors
from windlass.train.reading import DTYPES, NEEDS_SCALE, Files, TruncatedError

WORK, JOURNAL, SCALES = ".windlass", "merge.json", "scales.safetensors"
RECORD = "export.json"
AT_ONCE = 2**22  # bytes copied at a time
SPARE = 2**26  # bytes left free beside the weights: tokenizer, config, journal
Advance = Callable[[int], None]


class Writer:
    """One merge into one folder."""

    def __init__(self, recipe: Recipe, checkpoint: Base, updates: Updates, to: Path, advance: Advance) -> None:
        self.recipe, self.updates, self.to, self.advance = recipe, updates, to, advance
        self.block = checkpoint.block
        self.work = to / WORK
        self.stop = Event()
        self.scales: dict[str, Tensor] = {}
        self.reading = Files()

    def write(self, workers: int) -> list[str]:
        """Everything that is not there yet. Returns the files that an earlier attempt had finished."""
        kept = [file for file in self.recipe.files if (self.to / file.name).is_file()]
        try:
            with self.reading, self.updates.files:
                self._scales(workers)
                for file in kept:
                    self.advance(file.size)
                self._each(self._file, [file for file in self.recipe.files if file not in kept], workers)
            self._rest()
        except TruncatedError as error:
            raise UserError(str(error), str(self.to), "fetch the base model again, then repeat the command") from None
        except OSError as error:
            raise _told(error, self.to, self.recipe) from None
        return [file.name for file in kept]

    def _each(self, act: Callable[[Any], None], items: Sequence[Any], workers: int) -> None:
        """In parallel; the first failure stops the others at their next block."""
        with ThreadPoolExecutor(workers) as pool:
            jobs: list[Future[None]] = [pool.submit(act, item) for item in items]
            try:
                done, _ = wait(jobs, return_when=FIRST)
                for job in done:
                    job.result()
            except BaseException:
                self.stop.set()
                for job in jobs:
                    job.cancel()
                raise

    def _scales(self, workers: int) -> None:
        """New scales of what is written as FP8, before any of it: a scale may lie in another file than its weight."""
        coded = [e for e in self.recipe.entries() if e.how == MERGED and e.out.dtype in NEEDS_SCALE]
        path = self.work / SCALES
        if path.is_file():
            with contextlib.suppress(SafetensorError):  # unreadable: computed again
                self.scales = load_file(path)
        if {entry.out.key for entry in coded} <= self.scales.keys():
            self.advance(sum(entry.source.end - entry.source.start for entry in coded))
            return

        def one(entry: Entry) -> None:
            self._halt()
            assert entry.piece is not None
            factors = self.updates.factors(entry.parameter)
            self.scales[entry.out.key] = values.new_scale(entry.piece, factors, self.reading, self.block)
            self.advance(entry.source.end - entry.source.start)

        self._each(one, coded, workers)
        save_tensors(self.scales, path)

    def _halt(self) -> None:
        if self.stop.is_set():
            raise RunError("stopped by a signal", str(self.to), "repeat the command: finished files are kept")

    def _file(self, file: OutFile) -> None:
        partial = self.work / f"{file.name}.partial"
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _write(descriptor, memoryview(file.header), 0)
            for entry in file.entries:
                at = entry.out.start
                for data in self._data(entry):
                    self._halt()
                    _write(descriptor, data, at)
                    at += len(data)
                    self.advance(len(data))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        partial.replace(self.to / file.name)
        flush_one(self.to)

    def _data(self, entry: Entry) -> Iterator[memoryview]:
        """A tensor's bytes in order."""
        if entry.how == COPIED:
            yield from self._bytes(entry)
            return
        assert entry.piece is not None
        if entry.how == SCALE:
            yield _view(self.scales[entry.piece.stored.key].reshape(entry.out.shape))
            return
        scale = values.scale_of(entry.piece, self.reading)
        factors = self.updates.factors(entry.parameter) if entry.how == MERGED else None
        new = self.scales.get(entry.out.key) if entry.out.dtype in NEEDS_SCALE else None
        unit = None if new is None else new.float()
        dtype = DTYPES[entry.out.dtype]
        for box in values.blocks(entry.piece.stored.shape, self.block[0]):
            block = values.merged(entry.piece, box, factors, self.reading, self.block, scale, unit)
            yield _view(values.stored_as(block, dtype, entry.out.key, box))

    def _bytes(self, entry: Entry) -> Iterator[memoryview]:
        source = entry.source
        for skip in range(0, source.end - source.start, AT_ONCE):
            held = memoryview(bytearray(min(AT_ONCE, source.end - source.start - skip)))
            self.reading.read(source, skip, held)
            yield held

    def _rest(self) -> None:
        """Everything beside the weights."""
        for path in self.recipe.others:
            shutil.copyfile(path, self.to / path.name)
        if self.recipe.index is not None:
            (self.to / INDEX).write_bytes(self.recipe.index)
        (self.to / CONFIG).write_bytes(self.recipe.config)
        flush_one(self.to)


def begin(to: Path, recipe: Recipe, checkpoint: Base, adapter: Path) -> bool:
    """Take the folder. True: an earlier attempt at this very merge is there to go on with."""
    mark = fingerprint(recipe, checkpoint, adapter)
    try:
        to.mkdir(parents=True, exist_ok=True)
        held = sorted(path.name for path in to.iterdir())
        before = _journal(to)
        if held and before.get("fingerprint") != mark:
            what = "an unfinished export of something else" if before else f"{len(held)} other files ({held[0]} …)"
            raise UserError(f"the folder holds {what}", f"--to {to}", "name a new folder, or empty this one")
        (to / WORK).mkdir(exist_ok=True)
        if not held:
            _room(to, recipe)
        (to / WORK / JOURNAL).write_text(json.dumps({"fingerprint": mark}, indent=2))
    except OSError as error:
        raise _told(error, to, recipe) from None
    return bool(held)


def finish(to: Path) -> None:
    shutil.rmtree(to / WORK, ignore_errors=True)


def fingerprint(recipe: Recipe, checkpoint: Base, adapter: Path) -> str:
    """Which base, which adapter, which dtype: what makes two merges the same."""
    digest = hashlib.sha256(recipe.dtype.encode())
    digest.update(adapter.read_bytes() if adapter.stat().st_size < 2**30 else _stamp(adapter).encode())
    digest.update((adapter.parent / "adapter_config.json").read_bytes())
    for path in sorted({entry.source.file for entry in recipe.entries()}):
        digest.update(_stamp(path).encode())
    digest.update(str(checkpoint.path).encode())
    return digest.hexdigest()


def _stamp(path: Path) -> str:
    status = path.stat()
    return f"{path}:{status.st_size}:{status.st_mtime_ns}"


def _journal(to: Path) -> dict[str, Any]:
    for path in (to / WORK / JOURNAL, to / RECORD):
        try:
            found: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        return found
    return {}


def _room(to: Path, recipe: Recipe) -> None:
    free = shutil.disk_usage(to).free
    needs = recipe.size + SPARE
    if free < needs:
        gib = 2**30
        raise UserError(
            f"the merged model needs {needs / gib:.1f} GiB, and {free / gib:.1f} GiB are free there",
            f"--to {to}",
            "free some, or name a folder on a larger volume",
        )


def _told(error: OSError, to: Path, recipe: Recipe) -> UserError:
    """A full disk and the like, in words. What was finished stays."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        done = sum((to / file.name).is_file() for file in recipe.files)
        return RunError(
            f"{error.strerror}: {done} of {len(recipe.files)} files are finished",
            f"--to {to}",
            "make room and repeat the command: it resumes after the finished files",
        )
    what = f"{error.filename or to} can't be written: {error.strerror}"
    return UserError(what, f"--to {to}", "check that the folder can be written, and has room")


def _write(descriptor: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], at + done)


def _view(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
