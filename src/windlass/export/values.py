"""Merged values, a block of rows at a time, in float32; and FP8 codes of them on the base's own grid.

Published FP8 weights lie on a coarse grid: neighbours are 6-12 % apart. What an adapter adds is mostly less than half
of that, so rounding W + s BA to the nearest code gives W back, and the adapter is gone. Two things keep it:
- the scale stays the base's (doubled where the peak no longer fits, which keeps the grid), so what the adapter leaves
  alone keeps its code exactly;
- a value between two codes goes up with the probability of its place between them, so what is added is right on
  average over the many weights of an output. The "dice" are a fixed pattern (a two-dimensional golden-ratio
  sequence), the same each time: a merge can be repeated, resumed and checked.
`windlass export` prints the share of the adapter that survived, whatever the rounding.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from windlass.export.update import Factors
from windlass.model import Piece
from windlass.train.reading import (
    DTYPES,
    Box,
    Files,
    block_side,
    decode,
    read_box,
    spread,
    whole,
)

AT_ONCE: Final = 2**20  # elements: 4 MiB in float32, a few of them alive per worker

# (bits of the mantissa, exponent of the smallest normal value, largest value)
FORMATS: Final = {
    torch.float8_e4m3fn: (3, -6, 448.0),
    torch.float8_e5m2: (2, -14, 57344.0),
}
# Powers of 1 / plastic number: the additive sequence that fills a square most evenly (R2, Roberts 2018).
ROW, COLUMN = 0.7548776662466927, 0.5698402909980532


def blocks(shape: Sequence[int], side: int = 1) -> Iterator[Box]:
    """A stored tensor in blocks of whole rows of one matrix; their height is a multiple of a scale's block."""
    if len(shape) < 2:
        yield tuple((0, size) for size in shape)
        return
    rows, columns = shape[-2:]
    step = max(1, AT_ONCE // max(1, columns) // side) * side
    for outer in range(shape[0]) if len(shape) == 3 else (None,):
        for start in range(0, rows, step):
            box = ((start, min(rows, start + step)), (0, columns))
            yield box if outer is None else ((outer, outer + 1), *box)


def base(piece: Piece, box: Box, files: Files) -> Tensor:
    """Stored values of a block, without their scale, in float32."""
    values = torch.empty([stop - start for start, stop in box], dtype=DTYPES[piece.stored.dtype])
    read_box(piece.stored, box, values, files)
    return decode(values)


def scale_of(piece: Piece, files: Files) -> Tensor | None:
    return None if piece.scale is None else whole(piece.scale, files).float()


def merged(
    piece: Piece,
    box: Box,
    factors: Factors | None,
    files: Files,
    block: Sequence[int],
    scale: Tensor | None,
    unit: Tensor | None = None,
) -> Tensor:
    """The block's new values in float32; divided by `unit`, a scale, where it is given."""
    values = base(piece, box, files)
    own = None if scale is None else spread(scale, piece.stored.shape, box, block)
    per = None if unit is None else spread(unit, piece.stored.shape, box, block)
    if own is not None and per is not None:
        values = values * torch.where(own == 0, 0.0, own / per)  # a power of two: exact
    elif own is not None:
        values = values * own
    if factors is None:
        return values
    if factors.update.replaced is not None:
        whole_value = factors.a[tuple(slice(*extent) for extent in inside(piece, box))].reshape(values.shape)
        return whole_value if per is None else _per(whole_value, per)
    expert, rows = matrix(piece, box)
    delta = factors.rows(expert, *rows).view(values.shape)
    values += delta if per is None else _per(delta, per)
    if factors.magnitude is not None:  # the ratio of two lengths: the length is taken in true units
        true = values if per is None else values * per
        length = torch.linalg.norm(true, dim=-1, keepdim=True)
        values *= factors.magnitude[slice(*rows)].unsqueeze(-1) / length
    return values


def _per(values: Tensor, unit: Tensor) -> Tensor:
    """Where nothing is but zeros, the scale is zero as well."""
    return torch.where(unit == 0, 0.0, values / unit)


def inside(piece: Piece, box: Box) -> Box:
    """A block of the stored tensor in its parameter's coordinates."""
    outer = len(piece.offset) - len(box)
    there = (*((0, 1) for _ in range(outer)), *box)
    return tuple((start + at, stop + at) for (start, stop), at in zip(there, piece.offset, strict=True))


def matrix(piece: Piece, box: Box) -> tuple[int, tuple[int, int]]:
    """Which expert's matrix a block lies in, and its rows there."""
    place = inside(piece, box)
    return (place[0][0] if len(place) == 3 else 0), place[-2]


def new_scale(piece: Piece, factors: Factors, files: Files, block: Sequence[int]) -> Tensor:
    """The scale for the merged weight: the base's, doubled as often as the peak of what it covers needs."""
    assert piece.scale is not None
    old = scale_of(piece, files)
    assert old is not None
    most = FORMATS[DTYPES[piece.stored.dtype]][2]
    unit = torch.where(old == 0, 1.0, old)
    peaks = torch.zeros_like(unit)
    for box in blocks(piece.stored.shape, block[0]):
        values = merged(piece, box, factors, files, block, old, unit).abs_()
        _raise_peaks(peaks, values, piece.stored.shape, box, block)
    doublings = torch.ceil(torch.log2((peaks / most).clamp(min=1)))
    grown = unit * torch.exp2(doublings)
    small = torch.where(peaks == 0, 0.0, torch.exp2(torch.ceil(torch.log2(peaks.clamp(min=1e-30) / most))))
    return torch.where(old == 0, small, grown).to(DTYPES[piece.scale.dtype])


def _raise_peaks(peaks: Tensor, values: Tensor, shape: Sequence[int], box: Box, block: Sequence[int]) -> None:
    """The largest value under each scale, in place."""
    if peaks.numel() == 1:
        peaks.copy_(torch.maximum(peaks, values.max().reshape(peaks.shape)))
        return
    view = peaks
    for axis, ((start, stop), size) in enumerate(zip(box, shape, strict=True)):
        count = peaks.shape[axis]
        if count == 1:
            values = values.amax(axis, keepdim=True)
            continue
        side = 1 if count == size else block_side(axis, len(shape), block)
        first, last = start // side, math.ceil(stop / side)
        parts = torch.split(values, side, axis)  # a block of rows begins where a scale's block does
        values = torch.cat([part.amax(axis, keepdim=True) for part in parts], axis)
        view = view.narrow(axis, first, last - first)
    view.copy_(torch.maximum(view, values))


def stored_as(values: Tensor, dtype: torch.dtype, key: str, box: Box) -> Tensor:
    """Rounded once, to the nearest; FP8 codes by the pattern."""
    if dtype not in FORMATS:
        return values.to(dtype)
    return encode(values, dtype, pattern(key, box))


def encode(units: Tensor, dtype: torch.dtype, dice: Tensor) -> Tensor:
    """Codes of values given in units of their scale; a value that is a code stays it."""
    mantissa, least, most = FORMATS[dtype]
    # The exponent's bits alone are the power of two at or below the value: 6 times as fast as frexp and exp2.
    power = (units.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(min=2.0**least)
    step = power.mul_(2.0**-mantissa)
    codes = (units / step).add_(dice).floor_().mul_(step)
    return codes.clamp_(-most, most).to(dtype)


def pattern(key: str, box: Box) -> Tensor:
    """Numbers in [0, 1) by the tensor's name and the element's place."""
    outer = box[0][0] if len(box) == 3 else 0
    digest = hashlib.sha256(f"{key}:{outer}".encode()).digest()
    start = int.from_bytes(digest[:6], "big") / 2**48
    (top, bottom), (left, right) = box[-2:] if len(box) > 1 else ((0, 1), box[0])
    rows = (torch.arange(top, bottom, dtype=torch.float64) * ROW + start).frac().float()
    columns = (torch.arange(left, right, dtype=torch.float64) * COLUMN).frac().float()
    dice = (rows.unsqueeze(-1) + columns).frac_()
    return dice.reshape([stop - start for start, stop in box])
