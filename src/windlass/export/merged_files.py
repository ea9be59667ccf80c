"""The files of a merged model: planned from headers alone, then written in small blocks, several files at a time.

config.json is written last, so an interrupted merge does not open as a model; the same command starts it over.
"""

import itertools
import json
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from threading import Event
from typing import Any, Final

import torch
from torch import Tensor

from windlass.errors import Problem, UserError, raise_all
from windlass.export.deltas import Deltas
from windlass.export.rounding import MergedTensor, round_to
from windlass.export.screen import Advance
from windlass.export.source import EXPORT
from windlass.files import flush_to_disk, write_atomic
from windlass.hardware import count_usable_cpus
from windlass.model import Base, Piece, Stored, read_base
from windlass.model.family import ACTIVATIONS, CACHE, SHAPES
from windlass.model.files import BITS, CONFIG, HEADERS, INDEX, LENGTH, PARAMS, PUBLISHED, SINGLE
from windlass.model.mistral_layout import CONSOLIDATED, CONSOLIDATED_INDEX, has_separate_experts, name_in_file
from windlass.model.packed import BLOCKS, PACKED
from windlass.run_folder import PROBE
from windlass.weights.reading import DTYPES, NEEDS_SCALE, DamagedError, Files, read_tensor

# Dtypes of a merged model.
OWN: Final = "own"
FP8: Final = "fp8"
UNQUANTIZED: Final = {"bf16": "BF16", "bfloat16": "BF16", "fp32": "F32", "float32": "F32"}  # safetensors' names
# How a tensor of a merged model is made.
COPIED: Final = "copied"
MERGED: Final = "merged"
CONVERTED: Final = "converted"
RESCALED: Final = "rescaled"
ROTATED: Final = "rotated"
ALIGNMENT: Final = 8  # alignment of a header, as safetensors writes it
COPIED_BYTES: Final = 2**22  # copied at a time
OF_BASE: Final = (PUBLISHED, HEADERS, EXPORT, PROBE)  # said of the base's own weights
# Not copied: weights in any other form, into which the adapter is not merged, and what points servers to them.
LEFT_OUT: Final = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx*", "*.index.json"),
    *("params.json", "README.md", ".*"),
)


@dataclass(frozen=True, slots=True)
class LayoutFiles:
    """Names of the files of a layout, and what else differs between layouts."""

    config: str
    single: str
    index: str
    drop_quantization: Callable[[dict[str, Any], str], Any]  # changes its config to that of the model in that dtype
    name_in_file: Callable[[str], str] = str


def _drop_quantization(settings: dict[str, Any], dtype: str) -> None:
    for section in (settings, settings.get("text_config") or {}):
        section.pop("quantization_config", None)
        section.update({name: dtype for name in ("dtype", "torch_dtype") if name in section})


HUGGING_FACE: Final = LayoutFiles(CONFIG, SINGLE, INDEX, _drop_quantization)
MISTRAL: Final = LayoutFiles(
    PARAMS, CONSOLIDATED, CONSOLIDATED_INDEX, lambda params, _: params.pop("quantization", None), name_in_file
)


@dataclass(frozen=True, slots=True)
class MergedEntry:
    """One tensor of the merged model."""

    out: Stored
    source: Stored  # its tensor in the base
    how: str  # COPIED, MERGED, CONVERTED, RESCALED or ROTATED
    parameter: str = ""
    pieces: tuple[Piece, ...] = ()  # what it is computed from; several if they become one tensor
    heads: int = 0  # of an attention whose rows are reordered


@dataclass(frozen=True, slots=True)
class MergePlan:
    """All files to write, and what happens to the rest of the base's folder."""

    dtype: str
    names: LayoutFiles
    headers: dict[Path, bytes]  # headers of the files to write, with their eight bytes of length
    entries: tuple[MergedEntry, ...]
    config: bytes
    index: bytes | None
    dropped: tuple[str, ...] = ()  # tensors of the base that the new dtype does not need
    others: tuple[Path, ...] = ()  # files that are copied unchanged
    more: Mapping[str, bytes] = field(default_factory=dict)  # files that are written besides, by name
    left_out: tuple[str, ...] = ()
    read: Callable[[Path], Base] = read_base  # opens the result

    @property
    def size(self) -> int:
        return sum(map(len, self.headers.values())) + sum(entry.out.end - entry.out.start for entry in self.entries)


def plan_merge(base: Base, deltas: Deltas, to: Path, dtype: str, names: LayoutFiles = HUGGING_FACE) -> MergePlan:
    """Plan what is written, or raise if the base can't be written in that dtype. Files keep their names."""
    assert base.path is not None
    sources = sorted({s.key: s for s in base.stored()}.values(), key=lambda s: (s.file.name, s.start, s.key))
    raise_all(list(_find_unsupported(base, dtype)))

    # 1. Each tensor: copied, merged, converted, rescaled or dropped.
    entries, dropped = _plan_tensors(base, sources, deltas, dtype)
    if names == HUGGING_FACE and dtype in UNQUANTIZED and has_separate_experts(base):
        entries = fuse_experts(base, entries)

    # 2. The files: headers, config.json and index are byte-equal to the base's, unless a tensor's dtype changes.
    headers = {to / file.name: _read_header(file) for file in {entry.source.file: None for entry in entries}}
    entries = [replace(entry, out=replace(entry.out, file=to / entry.source.file.name)) for entry in entries]
    config = (base.path / names.config).read_bytes()
    index = None
    if not (base.path / names.single).is_file() and (base.path / names.index).is_file():
        index = (base.path / names.index).read_bytes()
    more: dict[str, bytes] = {}
    if names == MISTRAL:  # whose folder has transformers' config.json as well
        more[CONFIG] = (base.path / CONFIG).read_bytes()
    if dropped or any(entry.out.dtype != entry.source.dtype for entry in entries):
        headers, entries = lay_out(entries, names)
        torch_name = str(DTYPES[UNQUANTIZED[dtype]]).removeprefix("torch.")
        config = _rewrite(config, names.drop_quantization, torch_name)
        more = {name: _rewrite(text, _drop_quantization, torch_name) for name, text in more.items()}
        if index is not None:
            index = make_index(entries, names)

    # 3. The rest of the base's folder.
    others = [path for path in sorted(base.path.iterdir()) if path.name not in (CONFIG, SINGLE, INDEX, *OF_BASE)]
    others = [path for path in others if path.is_file()]
    left_out = [path for path in others if any(path.match(pattern) for pattern in LEFT_OUT)]
    return MergePlan(
        dtype=OWN if dtype == FP8 else dtype,
        names=names,
        headers=headers,
        entries=tuple(entries),
        dropped=tuple(dropped),
        config=config,
        index=index,
        others=tuple(path for path in others if path not in left_out),
        more=more,
        left_out=tuple(p.name for p in left_out if not p.match("model*.safetensors") and p.name[0] != "."),
    )


def _rewrite(text: bytes, change: Callable[[dict[str, Any], str], Any], dtype: str) -> bytes:
    settings = json.loads(text)
    change(settings, dtype)
    return (json.dumps(settings, indent=2) + "\n").encode()


def _plan_tensors(
    base: Base, sources: Sequence[Stored], deltas: Deltas, dtype: str
) -> tuple[list[MergedEntry], list[str]]:
    """Return what becomes of each of the base's tensors, and the names of those that are dropped."""
    weights: dict[str, tuple[str, Piece]] = {}
    scales: dict[str, tuple[str, Piece]] = {}
    for parameter in base.parameters:
        for piece in parameter.pieces:
            weights[piece.stored.key] = (parameter.name, piece)
            scales |= {scale.key: (parameter.name, piece) for scale in piece.tensors[1:]}
    entries: list[MergedEntry] = []
    dropped: list[str] = []
    for stored in sources:
        key = stored.key
        if key in weights:
            name, piece = weights[key]
            out = stored
            if dtype in UNQUANTIZED:
                out_key = key.removesuffix(BLOCKS).removesuffix(PACKED) if piece.packed else key
                out = replace(stored, key=out_key, dtype=UNQUANTIZED[dtype], shape=piece.shape)
            how = COPIED if out.dtype == stored.dtype else CONVERTED
            if name in deltas.by_name:
                how = MERGED
            entries.append(MergedEntry(out, stored, how, name, (piece,)))
        elif dtype in UNQUANTIZED and (
            key in scales or (scales and base.unread.get(stored) in (ACTIVATIONS, CACHE, SHAPES))
        ):
            dropped.append(key)
        elif key in scales and scales[key][0] in deltas.by_name and not scales[key][1].packed:
            name, piece = scales[key]
            entries.append(MergedEntry(stored, stored, RESCALED, name, (piece,)))
        else:
            entries.append(MergedEntry(stored, stored, COPIED))
    return entries, dropped


def fuse_experts(base: Base, entries: Sequence[MergedEntry]) -> list[MergedEntry]:
    """Return the entries with one tensor for all of a layer's experts, as transformers opens Mistral 4 in 16 bits.

    The matrices of experts follow each other in it, whole, so its bytes are theirs, one after the other.
    """
    separate = {p.name: p for p in base.parameters if p.part == "experts" and len(p.pieces) > 1}
    fused: list[MergedEntry] = []
    done: set[str] = set()
    for entry in entries:
        parameter = separate.get(entry.parameter)
        if parameter is None:
            fused.append(entry)
        elif parameter.name not in done:
            done.add(parameter.name)
            module = entry.out.key.partition(".experts.")[0]
            key = f"{module}.experts.{parameter.name.rpartition('.')[2]}"
            pieces = sorted(parameter.pieces, key=lambda piece: piece.offset)
            out = replace(entry.out, key=key, shape=parameter.shape)
            how = CONVERTED if entry.how == COPIED else entry.how  # of several tensors, some in 16 bits already
            fused.append(replace(entry, out=out, how=how, pieces=tuple(pieces)))
    return fused


def _read_header(file: Path) -> bytes:
    """Return a file's header with its eight bytes of length."""
    with file.open("rb") as opened:
        length = opened.read(LENGTH)
        return length + opened.read(struct.unpack("<Q", length)[0])


def make_index(entries: Sequence[MergedEntry], names: LayoutFiles) -> bytes:
    table = {
        "metadata": {"total_size": sum(entry.out.end - entry.out.start for entry in entries)},
        "weight_map": {names.name_in_file(entry.out.key): entry.out.file.name for entry in entries},
    }
    return (json.dumps(table, indent=2, sort_keys=True) + "\n").encode()


def _find_unsupported(base: Base, dtype: str) -> Iterator[Problem]:
    if dtype not in (OWN, FP8, *UNQUANTIZED):
        hint = "bf16, float32 or fp8"
        yield Problem(f"a merged model can't be written as {dtype!r}", "--dtype", hint, "no-such-dtype")
    stored_in = {piece.stored.dtype for parameter in base.parameters for piece in parameter.pieces}
    if dtype == FP8 and stored_in.isdisjoint(NEEDS_SCALE):
        problem = f"{base.name} is not in FP8, and --dtype fp8 re-applies the base's own quantization"
        hint = "leave --dtype out: its own dtype stays"
        yield Problem(problem, "--dtype", hint, "base-not-quantized")
    vision = [stored.key for stored in base.unread if stored.dtype in NEEDS_SCALE]
    if dtype in UNQUANTIZED and vision:
        problem = f"quantized tensors outside of the language model ({len(vision)}): {vision[0]}"
        yield Problem(problem, "--dtype", "leave --dtype out, and they are kept as they are", "quantized-vision")


def lay_out(entries: Sequence[MergedEntry], names: LayoutFiles) -> tuple[dict[Path, bytes], list[MergedEntry]]:
    """Return new headers, and the entries at their new places in the files."""
    headers: dict[Path, bytes] = {}
    placed: list[MergedEntry] = []
    for file, group in itertools.groupby(entries, key=lambda entry: entry.out.file):
        in_file = list(group)
        table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for out in (entry.out for entry in in_file):
            start = end
            end += prod(out.shape) * BITS[out.dtype] // 8
            about = {"dtype": out.dtype, "shape": list(out.shape), "data_offsets": [start, end]}
            table[names.name_in_file(out.key)] = about
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        headers[file] = struct.pack("<Q", len(text)) + text
        for entry in in_file:
            start, end = table[names.name_in_file(entry.out.key)]["data_offsets"]
            head = len(headers[file])
            placed.append(replace(entry, out=replace(entry.out, start=head + start, end=head + end)))
    return headers, placed


def write_merge(
    plan: MergePlan, base: Base, deltas: Deltas, to: Path, advance: Advance, workers: int | None = None
) -> None:
    """Write everything that is planned; config.json, which makes it a model, is last."""
    files = Files()
    stop = Event()
    scales: dict[str, Tensor] = {}  # new scales of FP8 weights: a scale may be in another file than its weight

    def write_file(path: Path) -> None:
        """Write tensors one after another, without gaps, as the format requires."""
        with path.open("wb") as opened:
            opened.write(plan.headers[path])
            for entry in plan.entries:
                if entry.out.file != path:
                    continue
                for block in _iter_bytes(entry, base, deltas, files, scales):
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
            hint = "fetch the base model again, then repeat the command"
            raise UserError(str(error), str(to), hint, "damaged-weights") from None
        finally:
            stop.set()  # after an error or a signal the others end at their next block
    for path in plan.others:
        shutil.copyfile(path, to / path.name)
    for name, text in plan.more.items():
        write_atomic(to / name, text)
    if plan.index is not None:
        write_atomic(to / plan.names.index, plan.index)
    flush_to_disk(to)
    write_atomic(to / plan.names.config, plan.config)
    flush_to_disk(to / plan.names.config)


def iter_stored_bytes(stored: Stored, files: Files) -> Iterator[memoryview]:
    size = stored.end - stored.start
    for skip in range(0, size, COPIED_BYTES):
        block = memoryview(bytearray(min(COPIED_BYTES, size - skip)))
        files.read(stored, skip, block)
        yield block


def _iter_bytes(
    entry: MergedEntry, base: Base, deltas: Deltas, files: Files, scales: dict[str, Tensor]
) -> Iterator[memoryview]:
    """Yield a tensor's bytes in order. `scales`: the new scales by weight, which are added as they are computed."""
    if entry.how == COPIED:
        yield from iter_stored_bytes(entry.source, files)
        return
    if entry.how == ROTATED:
        yield _view_bytes(rotate_rows(read_tensor(entry.source, files), entry.heads))
        return
    for piece in entry.pieces:
        yield from _iter_merged(entry, piece, base, deltas, files, scales)


def _iter_merged(
    entry: MergedEntry, piece: Piece, base: Base, deltas: Deltas, files: Files, scales: dict[str, Tensor]
) -> Iterator[memoryview]:
    factors = None if entry.how == CONVERTED else deltas.factors(entry.parameter)
    tensor = MergedTensor(piece, factors, files, base.block)
    scale: Tensor | None = None
    if entry.how == RESCALED or entry.out.dtype in NEEDS_SCALE:
        key = piece.stored.key
        if key not in scales:
            scales[key] = tensor.new_scale()
        scale = scales[key]
    if entry.how == RESCALED:
        assert scale is not None
        yield _view_bytes(scale.reshape(entry.out.shape))
        return
    unit = None if scale is None else scale.float()
    dtype = DTYPES[entry.out.dtype]
    for box in tensor.blocks():
        if dtype == torch.uint8:
            yield _view_bytes(tensor.codes(box, entry.parameter))
            continue
        values = tensor.values(box, unit)
        if factors is None:  # nothing is added that rounding to the nearest value could lose
            yield _view_bytes(values.to(dtype))
        else:
            yield _view_bytes(round_to(values, dtype, entry.parameter, tensor.place(box)))


def rotate_rows(values: Tensor, heads: int) -> Tensor:
    """Reorder each head's rows from two halves, as transformers rotates them, to Mistral's neighbouring pairs."""
    rows, columns = values.shape
    return values.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def _view_bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
