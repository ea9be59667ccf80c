"""What the merged checkpoint's files will hold, tensor by tensor, before a byte of them is written."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from windlass.errors import Problem, UserError, raise_all
from windlass.export.update import Updates
from windlass.model import Base, Parameter, Piece, Stored
from windlass.model.family import ACTIVATIONS
from windlass.model.files import BITS, CONFIG, INDEX, LENGTH, SINGLE
from windlass.train.reading import NEEDS_SCALE

OWN, BF16, FP8 = "own", "bf16", "fp8"
COPIED, MERGED, CONVERTED, SCALE = "copied", "merged", "converted", "scale"
ALIGNMENT = 8  # of a header, as safetensors writes it

# Not taken along: weights in any other form, which the adapter is not in, and what points servers to them.
LEFT_OUT = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx*", "*.index.json"),
    *("params.json", "README.md", ".*"),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the merged checkpoint."""

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
class Recipe:
    """All files, and what becomes of the rest of the folder."""

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


def make(checkpoint: Base, updates: Updates, to: Path, dtype: str) -> Recipe:
    """The recipe, or why the base can't be written in that dtype."""
    assert checkpoint.path is not None
    raise_all(list(_refusals(checkpoint, dtype)))
    config = json.loads((checkpoint.path / CONFIG).read_text())
    sources = _sources(checkpoint)
    made, dropped = _entries(checkpoint, updates, sources, dtype)
    others, left_out = _others(checkpoint.path)
    same = all(entry.out.dtype == entry.source.dtype for entry in made) and not dropped
    index_path = checkpoint.path / INDEX
    if same:
        config_bytes = (checkpoint.path / CONFIG).read_bytes()
        index = index_path.read_bytes() if not (checkpoint.path / SINGLE).is_file() else None
        files = tuple(_as_before(made, to))
    else:
        config_bytes = _converted_config(config)
        files, index = _packed(made, to)
    return Recipe(OWN if dtype == FP8 else dtype, files, tuple(dropped), config_bytes, index, others, left_out)


def _refusals(checkpoint: Base, dtype: str) -> Iterator[Problem]:
    if dtype not in (OWN, BF16, FP8):
        yield Problem(f"a merged model can't be written as {dtype!r}", "--dtype", "bf16, or fp8")
    if dtype == FP8 and not any(s.dtype in NEEDS_SCALE for s in _sources(checkpoint)):
        yield Problem(
            f"{checkpoint.name} is not quantised, and --dtype fp8 re-applies the base's own quantisation",
            "--dtype",
            "leave --dtype out: the merged model has the base's dtype; quantise it afterwards with a server's own tool",
        )
    vision = [stored.key for stored in checkpoint.unread if stored.dtype in NEEDS_SCALE]
    if dtype == BF16 and vision:
        yield Problem(
            f"{len(vision)} quantised tensors lie outside of the language model: {vision[0]}",
            "--dtype",
            "leave --dtype out, and they are kept as they are",
        )


def _sources(checkpoint: Base) -> list[Stored]:
    """Every stored tensor of the base, file by file as they lie there."""
    found = {stored.key: stored for stored in checkpoint.unread}
    for parameter in checkpoint.parameters:
        for piece in parameter.pieces:
            for stored in (piece.stored, piece.scale):
                if stored is not None:
                    found[stored.key] = stored
    return sorted(found.values(), key=lambda stored: (stored.file.name, stored.start, stored.key))


def _entries(
    checkpoint: Base, updates: Updates, sources: Sequence[Stored], dtype: str
) -> tuple[list[Entry], list[str]]:
    """What becomes of every tensor of the base."""
    places: dict[str, tuple[Parameter, Piece]] = {}
    scales: dict[str, tuple[Parameter, Piece]] = {}
    for parameter in checkpoint.parameters:
        for piece in parameter.pieces:
            places[piece.stored.key] = (parameter, piece)
            if piece.scale is not None:
                scales[piece.scale.key] = (parameter, piece)
    quantised = bool(scales)
    entries: list[Entry] = []
    dropped: list[str] = []
    for stored in sources:
        if stored.key in places:
            parameter, piece = places[stored.key]
            touched = parameter.name in updates.by_name
            out = replace(stored, dtype="BF16") if dtype == BF16 else stored
            how = MERGED if touched else (COPIED if out.dtype == stored.dtype else CONVERTED)
            entries.append(Entry(out, stored, how, parameter.name, piece))
        elif dtype == BF16 and (stored.key in scales or (quantised and checkpoint.unread.get(stored) == ACTIVATIONS)):
            dropped.append(stored.key)
        elif stored.key in scales and scales[stored.key][0].name in updates.by_name:
            parameter, piece = scales[stored.key]
            entries.append(Entry(stored, stored, SCALE, parameter.name, piece))
        else:
            entries.append(Entry(stored, stored, COPIED))
    return entries, dropped


def _as_before(entries: Sequence[Entry], to: Path) -> Iterator[OutFile]:
    """The base's own files: headers byte for byte, every tensor where it was."""
    by_file: dict[Path, list[Entry]] = {}
    for entry in entries:
        by_file.setdefault(entry.source.file, []).append(entry)
    for path, own in by_file.items():
        with path.open("rb") as opened:
            length = opened.read(LENGTH)
            header = length + opened.read(struct.unpack("<Q", length)[0])
        yield OutFile(path.name, header, tuple(replace(e, out=replace(e.out, file=to / path.name)) for e in own))


def _packed(entries: Sequence[Entry], to: Path) -> tuple[tuple[OutFile, ...], bytes | None]:
    """New files in the base's order, none larger than the base's largest; one where the base was one."""
    largest: dict[Path, int] = {}
    for entry in entries:
        largest[entry.source.file] = max(largest.get(entry.source.file, 0), entry.source.end)
    groups: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        size = _size(entry.out)
        if groups[-1] and len(largest) > 1 and filled + size > max(largest.values()):
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += size
    names = [f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
    if len(largest) == 1:
        return (_laid_out(groups[0], to / SINGLE),), None
    files = tuple(_laid_out(group, to / name) for group, name in zip(groups, names, strict=True))
    where = {entry.out.key: file.name for file in files for entry in file.entries}
    total = sum(_size(entry.out) for entry in entries)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    return files, (json.dumps(index, indent=2) + "\n").encode()


def _laid_out(entries: Sequence[Entry], path: Path) -> OutFile:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    reached = 0
    for entry in entries:
        end = reached + _size(entry.out)
        out = entry.out
        table[out.key] = {"dtype": out.dtype, "shape": list(out.shape), "data_offsets": [reached, end]}
        reached = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    begin = LENGTH + len(text)
    placed = []
    for entry in entries:
        start, end = table[entry.out.key]["data_offsets"]
        placed.append(replace(entry, out=replace(entry.out, file=path, start=begin + start, end=begin + end)))
    return OutFile(path.name, struct.pack("<Q", len(text)) + text, tuple(placed))


def _size(stored: Stored) -> int:
    return prod(stored.shape) * BITS[stored.dtype] // 8


def _converted_config(config: Mapping[str, Any]) -> bytes:
    """config.json without the quantisation that is gone, with the dtype that is there."""
    config = dict(config)
    parts = [config]
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = dict(config["text_config"])
        parts.append(config["text_config"])
    for part in parts:
        part.pop("quantization_config", None)
        for name in ("dtype", "torch_dtype"):
            if name in part:
                part[name] = "bfloat16"
    return (json.dumps(config, indent=2) + "\n").encode()


def _others(folder: Path) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """The rest of the base's folder: what is copied, and what is left out because it holds other weights."""
    taken: list[Path] = []
    left: list[Path] = []
    for path in sorted(folder.iterdir()):
        if path.name in (CONFIG, SINGLE, INDEX) or not path.is_file():
            continue
        (left if any(path.match(pattern) for pattern in LEFT_OUT) else taken).append(path)
    shards = {path.name for path in left if path.match("model*.safetensors")}
    return tuple(taken), tuple(path.name for path in left if path.name not in shards and path.name[0] != ".")


def check_target(to: Path, checkpoint: Base, adapter: Path) -> None:
    """A merge never writes into what it reads."""
    for held, what in ((checkpoint.path, "the base model's folder"), (adapter, "the adapter's folder")):
        if held is not None and to.resolve() == held.resolve():
            raise UserError(f"it is {what}", f"--to {to}", "name a new folder")
