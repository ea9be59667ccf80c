"""A model folder's config.json and safetensors headers, checked against each other and the files' lengths.

A safetensors file is eight bytes with the header's length, a JSON header (name -> dtype, shape, byte offsets), and the
tensors. The format allows neither gaps nor overlaps, so damage to the header or the file nearly always shows here,
before a byte of weights is read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Sequence
from math import prod
from pathlib import Path
from typing import Any, Final

from windlass.errors import Problem, UserError, raise_all
from windlass.model.parameters import Stored

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MAX_BYTES: Final = {CONFIG: 2**24, INDEX: 2**28}  # real ones have kilobytes and a few megabytes
LENGTH: Final = 8  # bytes of a header's length
MAX_HEADER: Final = 100_000_000  # the format's own limit
MAX_DIMENSIONS: Final = 8
MAX_NAME: Final = 300
FETCH: Final = "fetch it again from the publisher"
DAMAGED: Final = "the file is damaged: fetch it again and compare its checksum with the publisher's"

# Bits per element of every dtype of the format, by its own spelling.
BITS: Final[dict[str, int]] = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}

# Files that are there instead of the weights: what that means, and what to do about it.
INSTEAD: Final = {
    "adapter_model.safetensors": ("it holds an adapter", "name the base model here, and this folder in lora.adapter"),
    "consolidated*.safetensors": (
        "it holds only the publisher's own format (consolidated*.safetensors)",
        "fetch the model-*.safetensors files and their index too",
    ),
    "model-*-of-*.safetensors": (f"it has shards but no {INDEX}", f"fetch {INDEX} too"),
    "*.bin": ("its weights are pickled (*.bin), which can run code when opened", "convert them to safetensors"),
    "*.gguf": ("its weights are in GGUF", "fetch the safetensors version of the model"),
    "*.safetensors": (f"no safetensors file is named {SINGLE}", f"name it {SINGLE}, or give an index"),
}


def list_names(folder: Path) -> frozenset[str]:
    try:
        return frozenset(entry.name for entry in folder.iterdir())
    except NotADirectoryError:
        raise UserError("it is a file, not a folder", str(folder), f"name the folder with {CONFIG} in it") from None
    except FileNotFoundError:
        raise UserError("no such folder", str(folder), "check the path, and that its volume is mounted") from None
    except OSError as error:
        hint = "check its owner and mode"
        raise UserError(f"the folder can't be read: {error.strerror}", str(folder), hint) from None


def read_table(file: Path) -> dict[str, Any]:
    """The JSON object in config.json or an index."""
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_BYTES[file.name] + 1)
        if len(text) > MAX_BYTES[file.name]:
            problem = f"it has more than {MAX_BYTES[file.name]} bytes: not a model's {file.name}"
            raise UserError(problem, str(file), FETCH)
        table = json.loads(text, object_pairs_hook=_unique)
    except OSError as error:
        raise UserError(f"it can't be read: {error.strerror}", str(file), "check its owner and mode") from None
    except (ValueError, RecursionError) as error:
        lfs = text.startswith(b"version https://git-lfs")
        raise UserError(
            f"it is not JSON: {error}", str(file), "it is a Git LFS pointer: run git lfs pull" if lfs else FETCH
        ) from None
    if not isinstance(table, dict):
        raise UserError("it is JSON, but not an object", str(file), FETCH)
    return table


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return table


def read_tensors(folder: Path, names: Collection[str]) -> dict[str, Stored]:
    """Every stored tensor of a folder. As in transformers, a single file takes precedence over an index."""
    if SINGLE in names:
        return read_header(folder / SINGLE)
    if INDEX in names:
        return _read_shards(folder, names)
    for pattern, (problem, hint) in INSTEAD.items():
        if any(Path(name).match(pattern) for name in names):
            raise UserError(f"the model folder has no readable weights: {problem}", str(folder), hint)
    hint = f"it must hold {SINGLE}, or {INDEX} and the files it names"
    raise UserError("the model folder has no weights", str(folder), hint)


def _read_shards(folder: Path, names: Collection[str]) -> dict[str, Stored]:
    index = folder / INDEX
    weight_map = read_table(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError("it has no weight_map", str(index), FETCH)
    files = dict.fromkeys(str(file) for file in weight_map.values())
    foreign = [file[:80] for file in files if Path(file).name != file]
    foreign += [str(file)[:80] for file in weight_map.values() if not isinstance(file, str)]
    if foreign:
        raise UserError(f"weight_map names what is not a file of this folder: {some(foreign)}", str(index), FETCH)
    if missing := [file for file in files if file not in names]:
        raise UserError(
            f"it names {len(files)} files, {len(missing)} of them are missing: {some(missing)}",
            str(index),
            "the download or copy did not finish: fetch the missing files",
        )
    stored: dict[str, Stored] = {}
    problems: list[Problem] = []
    unlisted: list[str] = []
    twice: list[str] = []
    for file in files:
        try:
            header = read_header(folder / file)
        except UserError as error:
            problems += error.problems
            continue
        for key, tensor in header.items():
            if weight_map.get(key) == file:
                stored[key] = tensor
            else:
                (twice if key in weight_map else unlisted).append(f"{key} in {file}")
    raise_all(problems)
    absent = [f"{key} in {file}" for key, file in weight_map.items() if key not in stored]
    for problem, keys in (
        ("it names tensors that their file does not hold", absent),
        ("the files hold tensors that it does not name", unlisted),
        ("tensors are in another file than it names", twice),
    ):
        if keys:
            hint = "index and files are of different versions: fetch the whole folder again"
            problems.append(Problem(f"{problem} ({len(keys)}): {some(keys)}", str(index), hint))
    raise_all(problems)
    return stored


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of one safetensors file by name. Anything wrong with the file is an error that names it."""
    where = str(file)
    try:
        text, size = _header_text(file)
    except OSError as error:
        raise UserError(f"the file can't be read: {error.strerror}", where, "check its owner and mode") from None
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"its header is not JSON: {error}", where, DAMAGED) from None
    if not isinstance(header, dict):
        raise UserError("its header is not a table of tensors", where, DAMAGED)
    header.pop("__metadata__", None)
    begin = LENGTH + len(text)
    stored = {key: _stored(key, entry, file, begin) for key, entry in header.items()}

    end = begin  # tensors follow one another from the header's end to the file's end
    for tensor in sorted(stored.values(), key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.start != end:
            what = "overlaps the tensor before it" if tensor.start < end else "comes after a gap"
            raise UserError(f"{tensor.key!r} {what}: it starts at {tensor.start}, not {end}", where, DAMAGED)
        end = tensor.end
    if end < size:
        raise UserError(f"the last {size - end} bytes belong to no tensor", where, DAMAGED)
    if end > size:
        lost = [tensor.key for tensor in sorted(stored.values(), key=lambda t: t.start) if tensor.end > size]
        problem = f"it is truncated: {size} of {end} bytes, {len(lost)} tensors lost from {lost[0]!r} on"
        raise UserError(problem, where, "the download or copy did not finish: fetch the file again")
    return stored


def _header_text(file: Path) -> tuple[bytes, int]:
    """The header as it is in the file, and the file's length."""
    with file.open("rb") as opened:
        size = opened.seek(0, 2)
        opened.seek(0)
        first = opened.read(LENGTH)
        if first == b"version ":
            raise UserError("it is a Git LFS pointer, not the weights", str(file), "run: git lfs pull")
        if len(first) < LENGTH:
            raise UserError(f"not a safetensors file: it has only {size} bytes", str(file), DAMAGED)
        (length,) = struct.unpack("<Q", first)
        if length > size - LENGTH:
            problem = f"its header should have {length} bytes, and the whole file has {size}"
            raise UserError(problem, str(file), DAMAGED)
        if length > MAX_HEADER:
            raise UserError(f"its header has {length} bytes; the format allows {MAX_HEADER}", str(file), DAMAGED)
        text = opened.read(length)
    if len(text) < length:
        hint = "is it still being downloaded or copied?"
        raise UserError("it became shorter while it was read", str(file), hint)
    return text, size


def _stored(key: str, entry: Any, file: Path, begin: int) -> Stored:
    """One entry of the header, with its offsets counted from the beginning of the file."""
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        problem = f"the header's entry for {key[:MAX_NAME]!r} lacks dtype, shape or offsets"
        raise UserError(problem, str(file), DAMAGED) from None
    numbers = (*shape[: MAX_DIMENSIONS + 1], start, end)
    if (
        {*map(type, numbers)} != {int}
        or min(numbers) < 0
        or max(numbers) >= 2**63
        or len(shape) > MAX_DIMENSIONS
        or len(key) > MAX_NAME
    ):
        raise UserError(f"{key[:MAX_NAME]!r} has an impossible name, shape or offsets", str(file), DAMAGED)
    bits = BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        hint = f"known dtypes: {', '.join(BITS)}"
        raise UserError(f"{key!r} has the unknown dtype {str(dtype)[:40]!r}", str(file), hint)
    needs = prod(shape) * bits
    if (end - start) * 8 != needs:
        problem = f"{key!r}: {list(shape)} of {dtype} is {needs // 8} bytes, and its offsets span {end - start}"
        raise UserError(problem, str(file), DAMAGED)
    return Stored(key, dtype, shape, file, begin + start, begin + end)


def some(names: Sequence[str], shown: int = 3) -> str:
    """The first few of many names."""
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")
