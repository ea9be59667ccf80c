"""Merge an adapter into its base's files: planned from headers alone, then written several at a time in small blocks.

A stopped merge leaves the files that are finished, and `.windlass/` with what it was about. The same command continues
from there; another command in the same folder is refused.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from threading import Event
from typing import Any, Final

import torch
from torch import Tensor

from windlass.errors import Problem, RunError, UserError, raise_all
from windlass.export.deltas import Deltas
from windlass.export.rounding import MergedTensor, round_to
from windlass.export.source import CONFIG as ADAPTER_CONFIG
from windlass.export.source import Source
from windlass.files import flush, read_json, write_atomic, write_json
from windlass.hardware import usable_cpus
from windlass.model import Base, Piece, Stored
from windlass.model.family import ACTIVATIONS
from windlass.model.files import BITS, CONFIG, INDEX, LENGTH, SINGLE
from windlass.train.reading import DTYPES, NEEDS_SCALE, Files, TruncatedError

OWN, BF16, FP8 = "own", "bf16", "fp8"
COPIED, MERGED, CONVERTED, SCALE = "copied", "merged", "converted", "rescaled"
WORK, JOURNAL, RECORD = ".windlass", "merge.json", "export.json"
GIB: Final = 2**30
ALIGNMENT: Final = 8  # of a header, as safetensors writes it
AT_ONCE: Final = 2**22  # bytes copied at a time
RESERVE: Final = 2**26  # bytes of disk left for tokenizer, config, journal
# Left behind: weights in any other form, which the adapter is not merged into, and what points servers to them.
LEFT_OUT: Final = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx*", "*.index.json"),
    *("params.json", "README.md", ".*"),
)
Advance = Callable[[int], None]  # bytes done


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the merged model."""

    out: Stored
    source: Stored  # in the base
    how: str
    parameter: str = ""
    piece: Piece | None = None


@dataclass(frozen=True, slots=True)
class OutFile:
    name: str
    header: bytes  # with its eight bytes of length
    entries: tuple[Entry, ...]

    @property
    def size(self) -> int:
        return max((entry.out.end for entry in self.entries), default=len(self.header))


@dataclass(frozen=True, slots=True)
class MergePlan:
    """All files to write, and what becomes of the rest of the base's folder."""

    dtype: str
    files: tuple[OutFile, ...]
    dropped: tuple[str, ...]  # tensors of the base that have no meaning in the new dtype
    config: bytes
    index: bytes | None
    others: tuple[Path, ...]  # copied as they are
    left_out: tuple[str, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def entries(self) -> Iterator[Entry]:
        for file in self.files:
            yield from file.entries


def plan_merge(base: Base, deltas: Deltas, to: Path, dtype: str) -> MergePlan:
    """What is written, or why the base can't be written in that dtype."""
    assert base.path is not None
    sources = sorted({s.key: s for s in base.stored()}.values(), key=lambda s: (s.file.name, s.start, s.key))
    raise_all(list(_unsupported(base, sources, dtype)))
    weights = {piece.stored.key: (p.name, piece) for p in base.parameters for piece in p.pieces}
    scales = {piece.scale.key: (p.name, piece) for p in base.parameters for piece in p.pieces if piece.scale}
    entries: list[Entry] = []
    dropped: list[str] = []
    for stored in sources:
        if stored.key in weights:
            name, piece = weights[stored.key]
            out = replace(stored, dtype="BF16") if dtype == BF16 else stored
            how = MERGED if name in deltas.by_name else COPIED if out.dtype == stored.dtype else CONVERTED
            entries.append(Entry(out, stored, how, name, piece))
        elif dtype == BF16 and (stored.key in scales or (scales and base.unread.get(stored) == ACTIVATIONS)):
            dropped.append(stored.key)
        elif stored.key in scales and scales[stored.key][0] in deltas.by_name:
            entries.append(Entry(stored, stored, SCALE, *scales[stored.key]))
        else:
            entries.append(Entry(stored, stored, COPIED))

    others = [p for p in sorted(base.path.iterdir()) if p.name not in (CONFIG, SINGLE, INDEX) and p.is_file()]
    left = [path for path in others if any(path.match(pattern) for pattern in LEFT_OUT)]
    if not dropped and all(entry.out.dtype == entry.source.dtype for entry in entries):
        files = tuple(_same_files(entries, to))
        config = (base.path / CONFIG).read_bytes()
        index = None if (base.path / SINGLE).is_file() else (base.path / INDEX).read_bytes()
    else:
        files, index = _packed_files(entries, to)
        config = _config_without_quantization(base.path / CONFIG)
    return MergePlan(
        dtype=OWN if dtype == FP8 else dtype,
        files=files,
        dropped=tuple(dropped),
        config=config,
        index=index,
        others=tuple(path for path in others if path not in left),
        left_out=tuple(p.name for p in left if not p.match("model*.safetensors") and p.name[0] != "."),
    )


def _unsupported(base: Base, sources: Sequence[Stored], dtype: str) -> Iterator[Problem]:
    if dtype not in (OWN, BF16, FP8):
        yield Problem(f"a merged model can't be written as {dtype!r}", "--dtype", "bf16, or fp8")
    if dtype == FP8 and not any(stored.dtype in NEEDS_SCALE for stored in sources):
        yield Problem(
            f"{base.name} is not quantised, and --dtype fp8 re-applies the base's own quantisation",
            "--dtype",
            "leave --dtype out: the merged model has the base's dtype; quantise it afterwards with a server's own tool",
        )
    vision = [stored.key for stored in base.unread if stored.dtype in NEEDS_SCALE]
    if dtype == BF16 and vision:
        problem = f"quantised tensors outside of the language model ({len(vision)}): {vision[0]}"
        yield Problem(problem, "--dtype", "leave --dtype out, and they are kept as they are")


def _same_files(entries: Sequence[Entry], to: Path) -> Iterator[OutFile]:
    """The base's own files: headers byte for byte, every tensor where it was."""
    by_file: dict[Path, list[Entry]] = {}
    for entry in entries:
        by_file.setdefault(entry.source.file, []).append(entry)
    for path, own in by_file.items():
        with path.open("rb") as opened:
            length = opened.read(LENGTH)
            header = length + opened.read(struct.unpack("<Q", length)[0])
        yield OutFile(path.name, header, tuple(replace(e, out=replace(e.out, file=to / path.name)) for e in own))


def _packed_files(entries: Sequence[Entry], to: Path) -> tuple[tuple[OutFile, ...], bytes | None]:
    """New files in the base's order, none larger than the base's largest; one if the base was one. And their index."""
    ends: dict[Path, int] = {}
    for entry in entries:
        ends[entry.source.file] = max(ends.get(entry.source.file, 0), entry.source.end)
    sizes = {entry.out.key: prod(entry.out.shape) * BITS[entry.out.dtype] // 8 for entry in entries}
    groups: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if groups[-1] and len(ends) > 1 and filled + sizes[entry.out.key] > max(ends.values()):
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += sizes[entry.out.key]
    files = []
    for number, group in enumerate(groups, 1):
        name = SINGLE if len(ends) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for out in (entry.out for entry in group):
            offsets = [at, at + sizes[out.key]]
            table[out.key] = {"dtype": out.dtype, "shape": list(out.shape), "data_offsets": offsets}
            at = offsets[1]
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        placed = []
        for entry in group:
            start, end = (LENGTH + len(text) + offset for offset in table[entry.out.key]["data_offsets"])
            placed.append(replace(entry, out=replace(entry.out, file=to / name, start=start, end=end)))
        files.append(OutFile(name, struct.pack("<Q", len(text)) + text, tuple(placed)))
    if len(ends) == 1:
        return tuple(files), None
    weight_map = dict(sorted((entry.out.key, file.name) for file in files for entry in file.entries))
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    return tuple(files), (json.dumps(index, indent=2) + "\n").encode()


def _config_without_quantization(path: Path) -> bytes:
    config: dict[str, Any] = json.loads(path.read_text())
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part.pop("quantization_config", None)
            part.update({name: "bfloat16" for name in ("dtype", "torch_dtype") if name in part})
    return (json.dumps(config, indent=2) + "\n").encode()


def claim_folder(to: Path, plan: MergePlan, base: Base, source: Source) -> bool:
    """Take the folder for this merge. True: an earlier attempt at this very merge is there to continue."""
    for taken, what in ((base.path, "the base model's folder"), (source.folder, "the adapter's folder")):
        if taken is not None and to.resolve() == taken.resolve():
            raise UserError(f"it is {what}", f"--to {to}", "name a new folder")
    mark = fingerprint(plan, base, source)
    try:
        to.mkdir(parents=True, exist_ok=True)
        there = sorted(path.name for path in to.iterdir())
        earlier = read_json(to / WORK / JOURNAL) or read_json(to / RECORD)
        if there and earlier.get("fingerprint") != mark:
            what = "an unfinished export of something else" if earlier else f"{len(there)} other files ({there[0]} …)"
            raise UserError(f"the folder holds {what}", f"--to {to}", "name a new folder, or empty this one")
        free, needed = shutil.disk_usage(to).free, plan.size + RESERVE
        if not there and free < needed:
            raise UserError(
                f"the merged model needs {needed / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free there",
                f"--to {to}",
                "free some, or name a folder on a larger volume",
            )
        (to / WORK).mkdir(exist_ok=True)
        write_json(to / WORK / JOURNAL, {"fingerprint": mark})
    except OSError as error:
        raise explain_os_error(error, to, plan) from None
    return bool(there)


def fingerprint(plan: MergePlan, base: Base, source: Source) -> str:
    """Which base, which adapter, which dtype: what makes two merges the same."""

    def stamp(path: Path) -> bytes:
        status = path.stat()
        return f"{path}:{status.st_size}:{status.st_mtime_ns}".encode()

    weights = source.weights
    digest = hashlib.sha256(plan.dtype.encode())
    digest.update(weights.read_bytes() if weights.stat().st_size < 2**30 else stamp(weights))
    digest.update((source.folder / ADAPTER_CONFIG).read_bytes())
    for path in sorted({entry.source.file for entry in plan.entries()}):
        digest.update(stamp(path))
    digest.update(str(base.path).encode())
    return digest.hexdigest()


def explain_os_error(error: OSError, to: Path, plan: MergePlan | None = None) -> UserError:
    """A full disk and the like. What was finished stays."""
    if plan is not None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        done = sum((to / file.name).is_file() for file in plan.files)
        return RunError(
            f"{error.strerror}: {done} of {len(plan.files)} files are finished",
            f"--to {to}",
            "make room and repeat the command: it resumes after the finished files",
        )
    problem = f"{error.filename or to} can't be written: {error.strerror}"
    return UserError(problem, f"--to {to}", "check that the folder can be written, and has room")


class Merger:
    """Writes the files of one plan."""

    def __init__(self, plan: MergePlan, base: Base, deltas: Deltas, to: Path, advance: Advance) -> None:
        self.plan, self.deltas, self.to, self.advance = plan, deltas, to, advance
        self.block = base.block
        self.files = Files()
        self.stop = Event()
        self.scales: dict[str, Tensor] = {}  # of FP8 weights that the adapter changes

    def write(self, workers: int | None = None) -> list[str]:
        """Everything that is not there yet. Returns the files that an earlier attempt had finished."""
        finished = [file for file in self.plan.files if (self.to / file.name).is_file()]
        self.advance(sum(file.size for file in finished))
        # More than a few files at a time only make the disk seek.
        workers = workers or max(1, min(len(self.plan.files), usable_cpus(), 4))
        try:
            with self.files, self.deltas.files, ThreadPoolExecutor(workers) as pool:
                jobs: list[Future[None]] = []
                try:
                    jobs += [pool.submit(self._file, file) for file in self.plan.files if file not in finished]
                    for job in wait(jobs, return_when=FIRST_EXCEPTION).done:
                        job.result()
                except BaseException:
                    self.stop.set()  # the others end at their next block
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
            for path in self.plan.others:
                shutil.copyfile(path, self.to / path.name)
            if self.plan.index is not None:
                write_atomic(self.to / INDEX, self.plan.index)
            write_atomic(self.to / CONFIG, self.plan.config)
            flush(self.to)
        except TruncatedError as error:
            raise UserError(str(error), str(self.to), "fetch the base model again, then repeat the command") from None
        except OSError as error:
            raise explain_os_error(error, self.to, self.plan) from None
        return [file.name for file in finished]

    def _file(self, file: OutFile) -> None:
        """One file, under its name only when it is complete. Its tensors follow one another, as the format demands."""
        partial = self.to / WORK / f"{file.name}.partial"
        with partial.open("wb") as opened:
            opened.write(file.header)
            for entry in file.entries:
                for data in self._data(entry):
                    if self.stop.is_set():
                        hint = "repeat the command: finished files are kept"
                        raise RunError("stopped by a signal", str(self.to), hint)
                    opened.write(data)
                    self.advance(len(data))
        flush(partial)
        partial.replace(self.to / file.name)

    def _data(self, entry: Entry) -> Iterator[memoryview]:
        """A tensor's bytes in order."""
        if entry.how == COPIED:
            source = entry.source
            for skip in range(0, source.end - source.start, AT_ONCE):
                data = memoryview(bytearray(min(AT_ONCE, source.end - source.start - skip)))
                self.files.read(source, skip, data)
                yield data
            return
        assert entry.piece is not None
        factors = None if entry.how == CONVERTED else self.deltas.factors(entry.parameter)
        tensor = MergedTensor(entry.piece, factors, self.files, self.block)
        scale = None
        if entry.how == SCALE or entry.out.dtype in NEEDS_SCALE:  # a scale may be in another file than its weight
            scale = self.scales.get(entry.piece.stored.key)
            if scale is None:
                scale = self.scales[entry.piece.stored.key] = tensor.new_scale()
        if entry.how == SCALE:
            assert scale is not None
            yield _bytes(scale.reshape(entry.out.shape))
            return
        for box in tensor.blocks():
            values = tensor.values(box, None if scale is None else scale.float())
            yield _bytes(round_to(values, DTYPES[entry.out.dtype], entry.out.key, box))


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
