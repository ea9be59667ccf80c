"""Weights that a publisher stored in 4 bits: find the tensors that store each one and interpret them.

nf4 is bitsandbytes' format: a matrix as a row of bytes, with the first code in a byte's upper half; a scale per block,
itself in 8 bits if quantized twice. mxfp4 is gpt_oss's format: experts with one row per output, the first code in the
lower half; a power of two per 32 columns. nvfp4, int4 and uint4 are compressed-tensors' formats: a matrix with the
first code in the lower half, a scale for some columns of a row (of nvfp4 in 8 bits, divided by one number for all), and
for uint4 a zero point beside each scale, packed down the rows.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil, prod
from typing import Final

from windlass.model.parameters import Packed, Piece, Stored
from windlass.settings import FOUR_BITS

BLOCKS = "_blocks"
PACKED = "_packed"
SCALES = "_scales"
STATE: Final = ".quant_state.bitsandbytes__nf4"
NESTED: Final = (".nested_absmax", ".nested_quant_map")  # present if the scales are quantized themselves


def list_beside(method: str) -> tuple[str, ...]:
    """Return how the names of tensors end that compressed-tensors stores beside the codes of 4 bits."""
    return FOUR_BITS[method].beside if method in FOUR_BITS else ()


def find_packed(stored: Mapping[str, Stored], method: str) -> dict[str, tuple[Stored, ...]]:
    """Return the name of every 4-bit weight, with its tensors: codes, scales, and any others needed to decode them.

    Of compressed-tensors' weights those that are missing are left out.
    """
    packed: dict[str, tuple[Stored, ...]] = {}
    beside = list_beside(method)
    for key, tensor in stored.items():
        if beside and key.endswith(PACKED):
            name = key.removesuffix(PACKED)
            found = (stored.get(f"{name}{end}") for end in beside)
            packed[name] = tensor, *(part for part in found if part)
            continue
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


def make_compressed_piece(
    kind: str, parts: tuple[Stored, ...], shape: tuple[int, ...], offset: tuple[int, ...], group: int
) -> Piece | None:
    """Do the same for a matrix of compressed-tensors' format `kind`, with a scale per `group` columns (0: per row)."""
    form = FOUR_BITS[kind]
    codes, scales, *more = parts
    if len(shape) != 2 or not shape[1]:
        return None
    rows, columns = shape
    block = group or columns
    groups = columns // block
    width = {"U8": 2, "I32": 8}.get(codes.dtype, columns)
    fits = (
        (codes.dtype == "U8") == form.is_divided
        and codes.shape == (rows, columns // width)
        and scales.shape == (rows, groups)
        and (columns % width, columns % block, block % 2) == (0, 0, 0)
        and scales.dtype in (("F8_E4M3",) if form.is_divided else ("BF16", "F16", "F32"))
    )
    if form.is_divided:
        fits = fits and (more[0].dtype, prod(more[0].shape)) == ("F32", 1)
    if form.has_zero_points:
        fits = fits and (more[0].dtype, more[0].shape) == ("I32", (ceil(rows / 8), groups))
    if not fits:
        return None
    stored = replace(codes, dtype="U8", shape=(rows, columns // 2))
    return Piece(stored, offset, scales, Packed(kind, block, transposed=False, more=tuple(more)))
