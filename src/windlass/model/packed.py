"""Weights that a publisher stored in 4 bits: which tensors of a file make one up, and what they mean.

nf4 is bitsandbytes': a matrix as a row of bytes, the first code in a byte's upper half; a scale for each block, itself
in 8 bits if it was quantised twice. mxfp4 is gpt_oss's: experts by their outputs, the first code in the lower half;
a power of two for each 32 columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Final

from windlass.model.parameters import Packed, Piece, Stored

BLOCKS, SCALES = "_blocks", "_scales"
STATE: Final = ".quant_state.bitsandbytes__nf4"
NESTED: Final = (".nested_absmax", ".nested_quant_map")  # of scales that are quantised themselves


def find_packed(stored: Mapping[str, Stored]) -> dict[str, tuple[Stored, ...]]:
    """The name of every weight in 4 bits, with its tensors: codes, scales, and what else gives them meaning."""
    found: dict[str, tuple[Stored, ...]] = {}
    for key, tensor in stored.items():
        if key.endswith(STATE):
            name = key.removesuffix(STATE)
            others = (f"{name}.absmax", key, f"{name}.quant_map", *(f"{name}{end}" for end in NESTED))
            parts = tuple(stored[each] for each in (name, *others) if each in stored)
            if len(parts) in (4, 6):
                found[name] = parts
        elif key.endswith(BLOCKS) and (scales := stored.get(f"{key.removesuffix(BLOCKS)}{SCALES}")):
            found[key.removesuffix(BLOCKS)] = tensor, scales
    return found


def packed_piece(
    parts: tuple[Stored, ...], shape: tuple[int, ...], offset: tuple[int, ...], *, transposed: bool
) -> Piece | None:
    """The piece of these tensors, each with a row of its own for a row of values; None if they don't fit the shape."""
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
