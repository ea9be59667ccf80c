"""The header of one safetensors file, read and held against the file's own length.

Eight bytes give the header's length, then comes JSON: name -> dtype, shape, byte offsets. The format allows neither
gaps nor overlaps between tensors, so damage to the header or the file nearly always shows here, before a byte of
weights is read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from windlass.errors import UserError
from windlass.model.parameters import Stored

LENGTH = 8
LONGEST = 100_000_000  # the format's own limit on headers
MOST_DIMENSIONS = 8
LONGEST_NAME = 300
LFS_POINTER = b"version "  # how a file begins that Git LFS has not fetched yet
FETCH = "the file is damaged: fetch it again and compare its checksum with the publisher's"

# Bits per element of every dtype of the format, by its own spelling.
BITS: dict[str, int] = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of one file by name. Anything wrong with the file is an error that names it."""
    try:
        text, size = _header_text(file)
    except OSError as error:
        raise UserError(f"the file can't be read: {error.strerror}", str(file), "check its owner and mode") from None
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"its header is not JSON: {error}", str(file), FETCH) from None
    if not isinstance(header, dict):
        raise UserError("its header is not a table of tensors", str(file), FETCH)
    header.pop("__metadata__", None)
    begin = LENGTH + len(text)
    stored = {key: _stored(key, entry, file, begin) for key, entry in header.items()}
    _contiguous(stored, file, begin, size)
    return stored


def _header_text(file: Path) -> tuple[bytes, int]:
    """The header as it stands in the file, and the file's length."""
    with file.open("rb") as opened:
        size = opened.seek(0, 2)
        opened.seek(0)
        first = opened.read(LENGTH)
        if first == LFS_POINTER:
            raise UserError("it is a Git LFS pointer, not the weights", str(file), "run: git lfs pull")
        if len(first) < LENGTH:
            raise UserError(f"it has only {size} bytes: no safetensors file", str(file), FETCH)
        (length,) = struct.unpack("<Q", first)
        if length > size - LENGTH:
            said = f"its header is said to have {length} bytes, and the file has {size}"
            raise UserError(said, str(file), FETCH)
        if length > LONGEST:
            raise UserError(f"its header has {length} bytes, and the format allows {LONGEST}", str(file), FETCH)
        text = opened.read(length)
    if len(text) < length:
        raise UserError("it became shorter while it was read", str(file), "is it still being downloaded or copied?")
    return text, size


def _stored(key: str, entry: Any, file: Path, begin: int) -> Stored:
    """One entry of the header, with its offsets counted from the beginning of the file."""
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"the header's entry for {key[:LONGEST_NAME]!r} lacks dtype, shape or offsets", str(file), FETCH
        ) from None
    numbers = (*shape[: MOST_DIMENSIONS + 1], start, end)
    sizes = all(type(number) is int and 0 <= number < 2**63 for number in numbers)
    if not sizes or len(shape) > MOST_DIMENSIONS or len(key) > LONGEST_NAME:
        raise UserError(f"{key[:LONGEST_NAME]!r} has a name, a shape or offsets that can't be", str(file), FETCH)
    bits = BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        known = ", ".join(BITS)
        raise UserError(f"{key!r} has the unknown dtype {str(dtype)[:40]!r}", str(file), f"known dtypes: {known}")
    needs = prod(shape) * bits
    if (end - start) * 8 != needs:
        said = f"{key!r}: {list(shape)} of {dtype} is {needs // 8} bytes, and its offsets span {end - start}"
        raise UserError(said, str(file), FETCH)
    return Stored(key, dtype, shape, file, begin + start, begin + end)


def _contiguous(stored: Mapping[str, Stored], file: Path, begin: int, size: int) -> None:
    """Tensors follow one another from the header's end to the file's end."""
    reached = begin
    for tensor in sorted(stored.values(), key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.start != reached:
            what = "overlaps the tensor before it" if tensor.start < reached else "lies behind a gap"
            raise UserError(f"{tensor.key!r} {what}: it starts at {tensor.start}, not {reached}", str(file), FETCH)
        reached = tensor.end
    if reached == size:
        return
    if reached < size:
        raise UserError(f"{size - reached} bytes at its end belong to no tensor", str(file), FETCH)
    cut = list(_cut(stored, size))
    said = f"it is truncated: {size} of {reached} bytes, {len(cut)} tensors are cut off from {cut[0]!r} on"
    raise UserError(said, str(file), "the download or copy did not finish: fetch the file again")


def _cut(stored: Mapping[str, Stored], size: int) -> Iterator[str]:
    return (t.key for t in sorted(stored.values(), key=lambda t: t.start) if t.end > size)
