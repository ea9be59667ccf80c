"""Merge an adapter into its base's files: planned from headers alone, then written in small blocks, several files at a
time.

config.json is written last, so an interrupted merge does not open as a model; the same command starts it over.
"""

from __future__ import annotations

import itertools
import json
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from threading import Event
from typing import Any, Final

import torch
from torch import Tensor

from windlass.errors import Problem, UserError, raise_all
from windlass.export.deltas import Deltas
from windlass.export.rounding import MergedTensor, round_to
from windlass.files import flush_to_disk, write_atomic
from windlass.hardware import count_usable_cpus
from windlass.model import Base, Piece, Stored
from windlass.model.family import ACTIVATIONS
from windlass.model.files import BITS, CONFIG, INDEX, LENGTH, SINGLE
from windlass.model.packed import BLOCKS
from windlass.weights.reading import DTYPES, NEEDS_SCALE, DamagedError, Files

OWN, BF16, FP8 = "own", "bf16", "fp8"
COPIED, MERGED, CONVERTED, SCALE = "copied", "merged", "converted", "rescaled"
ALIGNMENT: Final = 8  # alignment of a header, as safetensors writes it
AT_ONCE: Final = 2**22  # bytes copied at a time
# Not copied: weights in any other form, into which the adapter is not merged, and what points servers to them.
LEFT_OUT: Final = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx*", "*.index.json"),
    *("params.json", "README.md", ".*"),
)
Advance = Callable[[int], None]  # bytes done


@dataclass(frozen=True, slots=True)
class MergedEntry:
    """One tensor of the merged model."""

    out: Stored
    source: Stored  # its tensor in the base
    how: str
    parameter: str = ""
    piece: Piece | None = None


@dataclass(frozen=True, slots=True)
class MergePlan:
    """All files to write, and what happens to the rest of the base's folder."""

    dtype: str
    headers: dict[Path, bytes]  # headers of the files to write, with their eight bytes of length
    entries: tuple[MergedEntry, ...]
    dropped: tuple[str, ...]  # tensors of the base that the new dtype does not need
    config: bytes
    index: bytes | None
    others: tuple[Path, ...]  # files that are copied unchanged
    left_out: tuple[str, ...]

    @property
    def size(self) -> int:
        return sum(map(len, self.headers.values())) + sum(entry.out.end - entry.out.start for entry in self.entries)


def plan_merge(base: Base, deltas: Deltas, to: Path, dtype: str) -> MergePlan:
    """Plan what is written, or raise if the base can't be written in that dtype. Files keep their names."""
    assert base.path is not None
    sources = sorted({s.key: s for s in base.stored()}.values(), key=lambda s: (s.file.name, s.start, s.key))
    raise_all(list(_find_unsupported(base, sources, dtype)))
    weights = {piece.stored.key: (p.name, piece) for p in base.parameters for piece in p.pieces}
    scales = {each.key: (p.name, piece) for p in base.parameters for piece in p.pieces for each in piece.tensors[1:]}
    entries: list[MergedEntry] = []
    dropped: list[str] = []
    for stored in sources:
        if stored.key in weights:
            name, piece = weights[stored.key]
            key = stored.key.removesuffix(BLOCKS) if piece.packed else stored.key
            out = replace(stored, key=key, dtype="BF16", shape=piece.shape) if dtype == BF16 else stored
            how = MERGED if name in deltas.by_name else COPIED if out.dtype == stored.dtype else CONVERTED
            entries.append(MergedEntry(out, stored, how, name, piece))
        elif dtype == BF16 and (stored.key in scales or (scales and base.unread.get(stored) == ACTIVATIONS)):
            dropped.append(stored.key)
        elif stored.key in scales and scales[stored.key][0] in deltas.by_name:
            entries.append(MergedEntry(stored, stored, SCALE, *scales[stored.key]))
        else:
            entries.append(MergedEntry(stored, stored, COPIED))

    # Byte-equal to the base's, unless a tensor's dtype changes.
    config = (base.path / CONFIG).read_bytes()
    index = None if (base.path / SINGLE).is_file() else (base.path / INDEX).read_bytes()
    converted = bool(dropped) or any(entry.out.dtype != entry.source.dtype for entry in entries)
    headers: dict[Path, bytes] = {}
    placed: list[MergedEntry] = []
    for file, group in itertools.groupby(entries, key=lambda entry: entry.source.file):
        own, path = list(group), to / file.name
        with file.open("rb") as opened:
            length = opened.read(LENGTH)
            headers[path] = length + opened.read(struct.unpack("<Q", length)[0])
        outs = [replace(entry.out, file=path) for entry in own]
        if converted:
            headers[path], outs = _lay_out(outs)
        placed += [replace(entry, out=out) for entry, out in zip(own, outs, strict=True)]
    if converted:
        settings: dict[str, Any] = json.loads(config)
        for part in (settings, settings.get("text_config") or {}):
            part.pop("quantization_config", None)
            part.update({name: "bfloat16" for name in ("dtype", "torch_dtype") if name in part})
        config = (json.dumps(settings, indent=2) + "\n").encode()
        total = {"total_size": sum(entry.out.end - entry.out.start for entry in placed)}
        table = {"metadata": total, "weight_map": {entry.out.key: entry.out.file.name for entry in placed}}
        index = index and (json.dumps(table, indent=2, sort_keys=True) + "\n").encode()
    others = [p for p in sorted(base.path.iterdir()) if p.name not in (CONFIG, SINGLE, INDEX) and p.is_file()]
    left = [path for path in others if any(path.match(pattern) for pattern in LEFT_OUT)]
    return MergePlan(
        dtype=OWN if dtype == FP8 else dtype,
        headers=headers,
        entries=tuple(placed),
        dropped=tuple(dropped),
        config=config,
        index=index,
        others=tuple(path for path in others if path not in left),
        left_out=tuple(p.name for p in left if not p.match("model*.safetensors") and p.name[0] != "."),
    )


def _find_unsupported(base: Base, sources: Sequence[Stored], dtype: str) -> Iterator[Problem]:
    if dtype not in (OWN, BF16, FP8):
        yield Problem(f"a merged model can't be written as {dtype!r}", "--dtype", "bf16, or fp8")
    packed = next((piece for p in base.parameters for piece in p.pieces if piece.packed), None)
    if packed and dtype != BF16:
        problem = f"{base.name} is stored in 4 bits ({packed.stored.key}): what an adapter adds would be rounded away"
        yield Problem(problem, "--merge", "add --dtype bf16: the merged model has 16 bits; or leave --merge out")
    elif dtype == FP8 and not any(stored.dtype in NEEDS_SCALE for stored in sources):
        problem = f"{base.name} is not quantized, and --dtype fp8 re-applies the base's own quantization"
        yield Problem(problem, "--dtype", "leave --dtype out, and quantize it afterwards with a server's own tool")
    vision = [stored.key for stored in base.unread if stored.dtype in NEEDS_SCALE]
    if dtype == BF16 and vision:
        problem = f"quantized tensors outside of the language model ({len(vision)}): {vision[0]}"
        yield Problem(problem, "--dtype", "leave --dtype out, and they are kept as they are")


def _lay_out(outs: Sequence[Stored]) -> tuple[bytes, list[Stored]]:
    """Return a file's header, and its tensors' places in the file."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for out in outs:
        offsets = [at, at + prod(out.shape) * BITS[out.dtype] // 8]
        table[out.key] = {"dtype": out.dtype, "shape": list(out.shape), "data_offsets": offsets}
        at = offsets[1]
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    spans = [[LENGTH + len(text) + offset for offset in table[out.key]["data_offsets"]] for out in outs]
    placed = [replace(out, start=start, end=end) for out, (start, end) in zip(outs, spans, strict=True)]
    return struct.pack("<Q", len(text)) + text, placed


def write_merge(
    plan: MergePlan, base: Base, deltas: Deltas, to: Path, advance: Advance, workers: int | None = None
) -> None:
    files, stop = Files(), Event()
    scales: dict[str, Tensor] = {}  # new scales of FP8 weights: a scale may be in another file than its weight

    def data(entry: MergedEntry) -> Iterator[memoryview]:
        """Yield a tensor's bytes in order."""
        if entry.how == COPIED:
            size = entry.source.end - entry.source.start
            for skip in range(0, size, AT_ONCE):
                copied = memoryview(bytearray(min(AT_ONCE, size - skip)))
                files.read(entry.source, skip, copied)
                yield copied
            return
        assert entry.piece is not None
        factors = None if entry.how == CONVERTED else deltas.factors(entry.parameter)
        tensor, key, scale = MergedTensor(entry.piece, factors, files, base.block), entry.piece.stored.key, None
        if entry.how == SCALE or entry.out.dtype in NEEDS_SCALE:
            if key not in scales:
                scales[key] = tensor.new_scale()
            scale = scales[key]
        if entry.how == SCALE:
            assert scale is not None
            yield _view_bytes(scale.reshape(entry.out.shape))
            return
        for box in tensor.blocks():
            values = tensor.values(box, None if scale is None else scale.float())
            yield _view_bytes(round_to(values, DTYPES[entry.out.dtype], entry.out.key, box))

    def write_file(path: Path) -> None:
        """Write tensors one after another, without gaps, as the format requires."""
        with path.open("wb") as opened:
            opened.write(plan.headers[path])
            for entry in plan.entries:
                for block in data(entry) if entry.out.file == path else ():
                    if stop.is_set():
                        return
                    opened.write(block)
                    advance(len(block))

    # Writing more than a few files at a time only makes the disk seek.
    workers = workers or max(1, min(len(plan.headers), count_usable_cpus(), 4))
    with files, deltas.files, ThreadPoolExecutor(workers) as pool:
        try:
            for _ in pool.map(write_file, plan.headers):
                pass
        except DamagedError as error:
            raise UserError(str(error), str(to), "fetch the base model again, then repeat the command") from None
        finally:
            stop.set()  # after an error or a signal the others end at their next block
    for path in plan.others:
        shutil.copyfile(path, to / path.name)
    if plan.index is not None:
        write_atomic(to / INDEX, plan.index)
    flush_to_disk(to)
    write_atomic(to / CONFIG, plan.config)
    flush_to_disk(to / CONFIG)


def _view_bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
