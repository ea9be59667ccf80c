"""Weights that a publisher stored in 4 bits: find the tensors that store each one and interpret them.

nf4 is bitsandbytes' format: a matrix as a row of bytes, with the first code in a byte's upper half; a scale per block,
itself in 8 bits if quantized twice. mxfp4 is gpt_oss's format: experts with one row per output, the first code in the
lower half; a power of two per 32 columns.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Final

from windlass.model.parameters import Packed, Piece, Stored

BLOCKS = "_blocks"
SCALES = "_scales"
STATE: Final = ".quant_state.bitsandbytes__nf4"
NESTED: Final = (".nested_absmax", ".nested_quant_map")  # present if the scales are quantized themselves


def find_packed(stored: Mapping[str, Stored]) -> dict[str, tuple[Stored, ...]]:
    """Return the name of every 4-bit weight, with its tensors: codes, scales, and any others needed to decode them."""
    packed: dict[str, tuple[Stored, ...]] = {}
    for key, tensor in stored.items():
        if key.endswith(STATE):
            name = key.removesuffix(STATE)
            parts = (name, f"{name}.absmax", key, f"{name}.quant_map", *(f"{name}{end}" for end in NESTED))
            tensors = tuple(stored[part] for part in parts if part in stored)
            if len(tensors) in (4, 6):
                packed[name] = tensors
        elif key.endswith(BLOCKS):
            name = key.removesuffix(BLOCKS)
            scales = stored.get(f"{name}{SCALES}")
            if scales:
                packed[name] = tensor, scales
    return packed


def make_packed_piece(
    parts: tuple[Stored, ...], shape: tuple[int, ...], offset: tuple[int, ...], *, transposed: bool
) -> Piece | None:
    """Build a piece from these tensors, with one row of codes per row of values; None if they don't fit the shape."""
    codes, scales, *more = parts
    kind = "nf4" if more else "mxfp4"
    if len(shape) != (2 if more else 3) or transposed == bool(more):
        return None
    *outer, rows, columns = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
    count = prod(outer) * rows
    groups = prod(scales.shape) // count
    known = ("U8", 4) if len(more) > 2 else ("F32", 2) if more else ("U8", 0)
    if (
        2 * (codes.end - codes.start) != prod(shape)
        or not groups
        or groups * count != prod(scales.shape)
        or columns % (2 * groups)
        or (scales.dtype, len(more)) != known
        or (kind == "mxfp4" and columns != 32 * groups)
    ):
        return None
    return Piece(
        replace(codes, dtype="U8", shape=(*outer, rows, columns // 2)),
        offset,
        replace(scales, shape=(*outer, rows, groups)),
        Packed(kind, columns // groups, transposed, tuple(more)),
    )
