"""Merged values, a block of rows at a time, in float32; and rounded with dither to the dtype that they are stored in.

Rounded to the nearest value most weights would be the base's: docs/export.md, "Rounding keeps the adapter".
"""

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch
from torch import Tensor

from windlass.export.deltas import Factors
from windlass.model import Piece
from windlass.settings import FOUR_BITS
from windlass.weights import four_bits
from windlass.weights.fill import FillSource, LocalPart, fill_codes, fill_values, kept_scales, to_file_order
from windlass.weights.reading import DTYPES, Box, Files, block_side, expand_scale, read_box, read_scale, to_float32

BLOCK_VALUES: Final = 2**20  # merged at a time: 4 MiB in float32, a few of them alive per worker

# (bits of the mantissa, exponent of the smallest normal value, largest value)
FORMATS: Final = {
    torch.float8_e4m3fn: (3, -6, 448.0),
    torch.float8_e5m2: (2, -14, 57344.0),
    torch.float16: (10, -14, 65504.0),
    torch.bfloat16: (7, -126, torch.finfo(torch.bfloat16).max),
}
FLOAT32_BITS: Final = 23  # of its mantissa
# Powers of 1 / plastic number: the additive sequence that fills a square most evenly (R2, Roberts 2018).
ROW: Final = 0.7548776662466927
COLUMN: Final = 0.5698402909980532


class MergedTensor:
    """The merged values of one stored tensor."""

    def __init__(self, piece: Piece, factors: Factors | None, files: Files, block: Sequence[int]) -> None:
        self.piece = piece
        self.factors = factors
        self.files = files
        self.block = block
        self.scale: Tensor | None = None
        if piece.scale is not None and not piece.packed:
            self.scale, _ = read_scale(piece.scale, files)

    def blocks(self) -> Iterator[Box]:
        """Yield blocks of full rows of one matrix; their height is a multiple of a scale's block."""
        shape = self.piece.shape
        if len(shape) < 2:
            yield tuple((0, size) for size in shape)
            return
        rows, columns = shape[-2:]
        side = self.block[0]
        if self.piece.packed and self.piece.packed.transposed:
            side = rows  # whole rows of its file
        step = max(1, BLOCK_VALUES // max(1, columns) // side) * side
        for outer in itertools.product(*([(i, i + 1) for i in range(count)] for count in shape[:-2])):
            for start in range(0, rows, step):
                yield (*outer, (start, min(rows, start + step)), (0, columns))

    def place(self, box: Box) -> Box:
        """Return the block's place in the parameter."""
        outer = len(self.piece.offset) - len(box)  # an expert's matrix is a slice of the fused parameter
        inside = (*((0, 1),) * outer, *box)
        return tuple((start + at, stop + at) for (start, stop), at in zip(inside, self.piece.offset, strict=True))

    def values(self, box: Box, unit: Tensor | None = None) -> Tensor:
        """Return a block's values in float32, divided by `unit`, a scale, if given."""
        shape = self.piece.stored.shape
        place = self.place(box)
        scale = None if self.scale is None else expand_scale(self.scale, shape, box, self.block)
        if unit is not None:
            unit = expand_scale(unit, shape, box, self.block)
        values = self._read_base(box, place)
        if scale is not None and unit is not None:  # their ratio is a power of two: exact
            values = values * torch.where(scale == 0, 0.0, scale / unit)
        elif scale is not None:
            values = values * scale
        return self._add_change(values, place, unit)

    def _add_change(self, values: Tensor, place: Box, unit: Tensor | None = None) -> Tensor:
        """Return the base's values with the adapter's change, which may be in place."""
        factors = self.factors
        if factors is None:
            return values
        if factors.delta.replaced is not None:
            new = factors.a[tuple(slice(*extent) for extent in place)].reshape(values.shape)
            return _in_units(new, unit)
        expert = place[0][0] if len(place) == 3 else 0
        rows = place[-2]
        values += _in_units(factors.rows(expert, *rows).view(values.shape), unit)
        if factors.magnitude is not None:  # a ratio of two lengths, taken in true units
            true = values if unit is None else values * unit
            values *= factors.magnitude[slice(*rows)].unsqueeze(-1) / torch.linalg.norm(true, dim=-1, keepdim=True)
        return values

    def _read_base(self, box: Box, place: Box) -> Tensor:
        """Return the base's values; those in 8 bits without their scale. `place`: the box in the whole parameter."""
        size = [stop - start for start, stop in box]
        if not self.piece.packed:
            codes = torch.empty(size, dtype=DTYPES[self.piece.stored.dtype])
            read_box(self.piece.stored, box, codes, self.files)
            return to_float32(codes)
        values = torch.empty([stop - start for start, stop in place])
        with ThreadPoolExecutor(1) as pool:
            fill_values(LocalPart(values, place), [self.piece], FillSource(self.files, self.block, pool))
        return values.view(size)

    def codes(self, box: Box, parameter: str) -> Tensor:
        """Return a block's bytes as its file has them, two codes each: 4 bits keep the base's scales."""
        packed = self.piece.packed
        assert packed is not None
        place = self.place(box)
        columns = 2 * self.piece.stored.shape[-1]
        kept = kept_scales(self.piece)
        rows = [stop - start for start, stop in to_file_order(self.piece, place)[:-1]]
        stored = torch.empty(*rows, four_bits.row_bytes(columns, packed.block, kept, packed.kind), dtype=torch.uint8)
        with ThreadPoolExecutor(1) as pool:
            fill_codes(LocalPart(stored, place), [self.piece], FillSource(self.files, self.block, pool))
        codes, scales = four_bits.split_rows(stored, columns, kept)
        base = four_bits.decode_codes(codes, scales, packed.block, packed.kind)
        merged = self._add_change(base.mT.clone() if packed.transposed else base.clone(), place)
        dither = make_dither(parameter, place, FLOAT32_BITS).view(merged.shape) * 2.0**-FLOAT32_BITS
        if packed.transposed:
            merged = merged.mT
            dither = dither.mT
        codes = four_bits.change_codes(codes, scales, packed.block, packed.kind, merged - base, dither)
        return codes if FOUR_BITS[packed.kind].first_is_upper else codes << 4 | codes >> 4

    def new_scale(self) -> Tensor:
        """Return the base's scale, doubled as often as the peak of its block needs."""
        assert self.piece.scale is not None
        assert self.scale is not None
        _, _, largest = FORMATS[DTYPES[self.piece.stored.dtype]]
        unit = torch.where(self.scale == 0, 1.0, self.scale)
        peaks = torch.zeros_like(unit)
        for box in self.blocks():
            self._raise_peaks(peaks, self.values(box, unit).abs_(), box)
        grown = unit * torch.exp2(torch.ceil(torch.log2((peaks / largest).clamp(min=1))))
        small = torch.exp2(torch.ceil(torch.log2(peaks.clamp(min=1e-30) / largest)))
        small = torch.where(peaks == 0, 0.0, small)
        return torch.where(self.scale == 0, small, grown).to(DTYPES[self.piece.scale.dtype])

    def _raise_peaks(self, peaks: Tensor, values: Tensor, box: Box) -> None:
        """Update the largest value under each scale, in place."""
        if peaks.numel() == 1:
            peaks.copy_(torch.maximum(peaks, values.max().reshape(peaks.shape)))
            return
        shape = self.piece.stored.shape
        for axis, ((start, stop), size) in enumerate(zip(box, shape, strict=True)):
            if peaks.shape[axis] == 1:
                values = values.amax(axis, keepdim=True)
                continue
            side = 1 if peaks.shape[axis] == size else block_side(axis, len(shape), self.block)
            parts = torch.split(values, side, axis)  # a block of rows begins at the edge of a scale's block
            values = torch.cat([part.amax(axis, keepdim=True) for part in parts], axis)
            first = start // side
            last = math.ceil(stop / side)
            peaks = peaks.narrow(axis, first, last - first)
        peaks.copy_(torch.maximum(peaks, values))


def _in_units(values: Tensor, unit: Tensor | None) -> Tensor:
    """Divide by a scale, if there is one: a block of zeros has the scale 0."""
    return values if unit is None else torch.where(unit == 0, 0.0, values / unit)


def round_to(values: Tensor, dtype: torch.dtype, parameter: str, place: Box) -> Tensor:
    """Round float32 once: with dither, which is the same in each layout of the model, to the dtypes of `FORMATS`.

    FP8 values are in units of their scale. A value that equals one of the dtype keeps its bits; none becomes infinite.
    """
    if dtype not in FORMATS:
        return values.to(dtype)
    mantissa, least, largest = FORMATS[dtype]
    spare = FLOAT32_BITS - mantissa
    # Scaled so that the dtype's subnormal values are float32's: a step is then the same bit of every value, and adding
    # dither below that bit carries into it with the probability of the value's place between its neighbours.
    bits = (values * 2.0 ** (-126 - least)).view(torch.int32)
    bits.add_(make_dither(parameter, place, spare).reshape(values.shape)).bitwise_and_(-1 << spare)
    return bits.view(torch.float32).mul_(2.0 ** (126 + least)).clamp_(-largest, largest).to(dtype)


def make_dither(key: str, box: Box, bits: int) -> Tensor:
    """Return integers of that many bits that depend only on the parameter's name and the element's place in it."""
    outer = box[0][0] if len(box) == 3 else 0
    digest = hashlib.sha256(f"{key}:{outer}".encode()).digest()
    start = int.from_bytes(digest[:6], "big") / 2**48
    (top, bottom), (left, right) = ((0, 1), *box)[-2:]
    rows = (torch.arange(top, bottom, dtype=torch.float64) * ROW + start).frac() * 2**bits
    columns = (torch.arange(left, right, dtype=torch.float64) * COLUMN).frac() * 2**bits
    dither: Tensor = (rows.int().unsqueeze(-1) + columns.int()).bitwise_and_(2**bits - 1)
    return dither.reshape([stop - start for start, stop in box])
