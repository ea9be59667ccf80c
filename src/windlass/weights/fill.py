"""Fill a rank's parts of parameters from the pieces that they are stored in, in bounded chunks, by several threads.

There is one function for what a part's memory holds:

| memory                                                | function         |
|-------------------------------------------------------|------------------|
| values, scaled in float32 and rounded once            | `fill_values`    |
| codes as published, FP8 or with scales in 4 bits      | `fill_codes`     |
| codes in 4 bits, quantized here                       | `fill_quantized` |
| scales of FP8 codes                                   | `fill_scale`     |
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from windlass.model import Parameter, Piece
from windlass.settings import CONVERTED_VALUES, FOUR_BITS
from windlass.weights import four_bits
from windlass.weights.blanks import Blanks
from windlass.weights.digest import MODULUS, digest_box
from windlass.weights.reading import (
    DTYPES,
    UNCONVERTED,
    Box,
    DamagedError,
    Files,
    digest_tensor,
    expand_scale,
    intersect,
    locate_piece,
    read_box,
    read_scale,
    read_tensor,
    require_finite,
    require_no_erased,
    require_scales,
    split_box,
    to_float32,
    to_stored_box,
)

ScaleDecoder = Callable[[Tensor, Box], Tensor]  # (stored scales, their place) -> what is kept behind the codes
FillJob = Callable[[], int]  # fills one chunk and returns the digest of what was read


class LocalPart(NamedTuple):
    """This rank's part of a parameter."""

    memory: Tensor
    box: Box  # of the parameter's values

    def region(self, box: Box) -> Tensor:
        """Return the memory of a box inside this part."""
        return self.memory[tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(box, self.box, strict=True))]

    def rows(self, box: Box) -> Tensor:
        """Return the memory of a box of whole rows, which hold other things than values."""
        return self.memory[tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(box[:-1], self.box, strict=False))]


class FillSource(NamedTuple):
    """What parts are filled with."""

    files: Files
    block: Sequence[int]  # rows and columns that share an FP8 scale
    pool: ThreadPoolExecutor
    blanks: Blanks | None = None  # collects rows of zeros


def fill_values(part: LocalPart, pieces: Sequence[Piece], source: FillSource) -> tuple[int, int]:
    """Fill a part with values. Returns the number of values filled and the digest of what was read."""

    def plan_chunks(piece: Piece, shared: Box) -> tuple[Iterable[FillJob], int]:
        if piece.packed:
            return plan_packed(piece, shared, source, partial(write_decoded, part, piece))
        scale, digest = read_own_scale(piece, source)
        limit = CONVERTED_VALUES
        if scale is None and part.memory.dtype == DTYPES[piece.stored.dtype]:
            limit *= UNCONVERTED
        zeros = keep_zeros(scale)
        factor = None if scale is None else scale.to(part.memory.device)
        return [partial(fill_chunk, piece, box, factor, zeros) for box in split_box(shared, limit)], digest

    def fill_chunk(piece: Piece, box: Box, factor: Tensor | None, zeros: Tensor | None) -> int:
        region = part.region(box)
        if factor is None:
            return copy_chunk(piece, box, region, zeros, source)
        values, digest = read_chunk(piece, box, zeros, source)
        region.copy_(multiply_scale(values.to(region.device), piece, box, factor, source))
        return digest

    return fill_from_pieces(part, pieces, source, plan_chunks)


def fill_codes(part: LocalPart, pieces: Sequence[Piece], source: FillSource) -> tuple[int, int]:
    """Fill a part with codes as they are stored, and in 4 bits with the scales behind them; those of FP8 have their own
    memory. Returns the number of codes filled and the digest of what was read."""

    def plan_chunks(piece: Piece, shared: Box) -> tuple[Iterable[FillJob], int]:
        if piece.packed:
            return plan_packed(piece, shared, source, partial(write_packed, part, piece))
        scale, digest = read_own_scale(piece, source)
        zeros = keep_zeros(scale)
        limit = CONVERTED_VALUES
        if part.memory.dtype == DTYPES[piece.stored.dtype]:
            limit *= UNCONVERTED
        boxes = split_box(shared, limit)
        return [partial(copy_chunk, piece, box, part.region(box), zeros, source) for box in boxes], digest

    return fill_from_pieces(part, pieces, source, plan_chunks)


def fill_quantized(
    part: LocalPart, pieces: Sequence[Piece], source: FillSource, kind: str, errors: list[Tensor]
) -> tuple[int, int]:
    """Fill a part with 4-bit codes of its values, and their scales. Appends each chunk's sums of squares of the errors
    and of the values to `errors`. Returns the number of values quantized and the digest of what was read."""

    def plan_chunks(piece: Piece, shared: Box) -> tuple[Iterable[FillJob], int]:
        scale, digest = read_own_scale(piece, source)
        zeros = keep_zeros(scale)
        factor = None if scale is None else scale.to(part.memory.device)
        return [partial(fill_chunk, piece, box, factor, zeros) for box in split_box(shared, CONVERTED_VALUES)], digest

    def fill_chunk(piece: Piece, box: Box, factor: Tensor | None, zeros: Tensor | None) -> int:
        rows = part.rows(box)
        values, digest = read_chunk(piece, box, zeros, source)
        values = values.to(rows.device)
        if factor is not None:
            values = multiply_scale(values, piece, box, factor, source)
        if box[-1] != part.box[-1]:
            raise DamagedError(f"{piece.stored.key!r} contains parts of rows, and 4 bits need whole ones")
        errors.append(four_bits.quantize(values.float(), kind, rows))  # by several threads: appending is atomic
        return digest

    return fill_from_pieces(part, pieces, source, plan_chunks)


def fill_from_pieces(
    part: LocalPart,
    pieces: Sequence[Piece],
    source: FillSource,
    plan_chunks: Callable[[Piece, Box], tuple[Iterable[FillJob], int]],
) -> tuple[int, int]:
    """Run the jobs that `plan_chunks` returns, with the digest of the scales, for each piece that overlaps this part.

    Returns the number of values filled and the digest of what was read; a piece's scales are counted on the rank where
    the piece begins.
    """
    jobs = []
    filled = 0
    digest = 0
    for piece in pieces:
        shared = intersect(part.box, locate_piece(piece))
        if shared is None:
            continue
        filled += math.prod(stop - start for start, stop in shared)
        chunks, digest_of_scales = plan_chunks(piece, shared)
        jobs += [source.pool.submit(chunk) for chunk in chunks]
        if all(start <= first < stop for (start, stop), first in zip(part.box, piece.offset, strict=True)):
            digest += digest_of_scales
    return filled, (digest + sum(job.result() for job in jobs)) % MODULUS


# --- chunks of values and FP8 codes ---


def read_own_scale(piece: Piece, source: FillSource) -> tuple[Tensor | None, int]:
    """Return the scale of an FP8 piece in float32, and its digest."""
    return read_scale(piece.scale, source.files) if piece.scale else (None, 0)


def keep_zeros(scale: Tensor | None) -> Tensor | None:
    """Return a scale if it has zeros, which would erase weights."""
    return scale if scale is not None and bool((scale == 0).any()) else None


def read_chunk(piece: Piece, box: Box, zeros: Tensor | None, source: FillSource) -> tuple[Tensor, int]:
    """Return a chunk as it is stored, and its digest. `box` has the parameter's coordinates."""
    values = torch.empty([stop - start for start, stop in box], dtype=DTYPES[piece.stored.dtype])
    return values, read_into(piece, box, values, zeros, source)


def multiply_scale(codes: Tensor, piece: Piece, box: Box, factor: Tensor, source: FillSource) -> Tensor:
    """Return the true values of FP8 codes in float32."""
    values = to_float32(codes)
    values *= expand_scale(factor, piece.stored.shape, to_stored_box(piece, box), source.block)
    return values


def copy_chunk(piece: Piece, box: Box, region: Tensor, zeros: Tensor | None, source: FillSource) -> int:
    """Fill `region` with a chunk as it is stored, or as its dtype has it, and return the chunk's digest."""
    if region.device.type == "cpu" and region.is_contiguous() and region.dtype == DTYPES[piece.stored.dtype]:
        return read_into(piece, box, region, zeros, source)
    values, digest = read_chunk(piece, box, zeros, source)
    region.copy_(values.to(region.device))
    return digest


def read_into(piece: Piece, box: Box, values: Tensor, zeros: Tensor | None, source: FillSource) -> int:
    """Read a chunk, refuse what can't be weights, and return its digest."""
    read = partial(read_box, files=source.files)
    stored_box = to_stored_box(piece, box)
    read(piece.stored, stored_box, values)
    require_finite(values, piece.stored.key)
    if source.blanks is not None:
        source.blanks.add(piece.stored, stored_box, values)
    if zeros is not None:
        scale = expand_scale(zeros, piece.stored.shape, stored_box, source.block)
        require_no_erased(values.view(torch.uint8) & 127 == 0, scale, piece.stored.key)
    return digest_box(piece.stored, stored_box, values, read)


# --- chunks of published 4-bit weights ---


def plan_packed(
    piece: Piece, shared: Box, source: FillSource, write: Callable[[Box, Tensor, Tensor], None]
) -> tuple[Iterable[FillJob], int]:
    """Return jobs that read full rows of the file and give `write` their box, codes and scales; and the scales'
    digest."""
    assert piece.packed is not None
    decode, digest = read_scale_decoder(piece, source.files)
    rows = to_file_order(piece, shared)
    if rows[-1] != (0, 2 * piece.stored.shape[-1]):
        raise DamagedError(f"{piece.stored.key!r} is needed in parts of rows, and 4 bits are whole ones")
    return [
        partial(read_packed, piece, box, decode, source, write) for box in split_box(rows, CONVERTED_VALUES)
    ], digest


def to_file_order(piece: Piece, box: Box) -> Box:
    """Return a parameter's box with its columns as rows, if the file has them so."""
    assert piece.packed is not None
    return (*box[:-2], box[-1], box[-2]) if piece.packed.transposed else box


def read_packed(
    piece: Piece,
    box: Box,
    decode: ScaleDecoder,
    source: FillSource,
    write: Callable[[Box, Tensor, Tensor], None],
) -> int:
    """Read one chunk, full rows of its file, and return its digest. `box` is in the file's order."""
    assert piece.packed is not None
    assert piece.scale is not None
    read = partial(read_box, files=source.files)
    there = to_stored_box(piece, box)
    tensors = []
    digest = 0
    for stored in (piece.stored, piece.scale):
        rows = (*there[:-1], (0, stored.shape[-1]))
        tensor = torch.empty([stop - start for start, stop in rows], dtype=DTYPES[stored.dtype])
        read(stored, rows, tensor)
        digest += digest_box(stored, rows, tensor, read)
        tensors.append(tensor)
    codes, scales = tensors
    if source.blanks is not None:
        source.blanks.add(piece.stored, (*there[:-1], (0, piece.stored.shape[-1])), codes)
    if not FOUR_BITS[piece.packed.kind].first_is_upper:
        codes = codes << 4 | codes >> 4
    kept = decode(scales, there)
    require_sound_scales(piece, codes, kept)
    write(box, codes, kept)
    return digest


def require_sound_scales(piece: Piece, codes: Tensor, kept: Tensor) -> None:
    """Refuse scales of codes, two per byte, that no publisher of their format writes."""
    assert piece.packed is not None
    assert piece.scale is not None
    kind = piece.packed.kind
    place = (0, 0, codes.shape[-2], 2 * codes.shape[-1])
    scales, zeros, _ = four_bits.read_scales(kept, kind, piece.packed.block, place)
    require_scales(scales, piece.scale.key, signed=FOUR_BITS[kind].is_signed)
    if bool((scales == 0).any()):
        units = four_bits.code_pair_table(kind, codes.device)[codes.int()].view(*scales.shape, -1)
        units = units if zeros is None else units - zeros[..., None]
        empty = units.new_tensor(FOUR_BITS[kind].empty)
        require_no_erased(torch.isin(units, empty), scales[..., None], piece.stored.key)


def write_packed(part: LocalPart, piece: Piece, box: Box, codes: Tensor, scales: Tensor) -> None:
    """Copy codes, and scales behind them, to rows of bytes."""
    assert piece.packed is not None
    rows = LocalPart(part.memory, to_file_order(piece, part.box)).rows(box)
    own_codes, own_scales = four_bits.split_rows(rows, 2 * codes.shape[-1], kept_scales(piece))
    own_codes.copy_(codes)
    own_scales.copy_(scales)


def kept_scales(piece: Piece) -> torch.dtype:
    """Return the dtype of what is behind the codes of a packed piece's rows."""
    assert piece.packed is not None
    assert piece.scale is not None
    return DTYPES[FOUR_BITS[piece.packed.kind].kept or piece.scale.dtype]


def write_decoded(part: LocalPart, piece: Piece, box: Box, codes: Tensor, scales: Tensor) -> None:
    """Write the values of codes."""
    assert piece.packed is not None
    memory = part.memory.transpose(-1, -2) if piece.packed.transposed else part.memory
    rows = LocalPart(memory, to_file_order(piece, part.box)).rows(box)
    codes = codes.to(memory.device)
    scales = scales.to(memory.device)
    rows.copy_(four_bits.decode_codes(codes, scales, piece.packed.block, piece.packed.kind))


# --- scales ---


def fill_scale(
    target: Tensor, first: int, parameter: Parameter, files: Files, block: Sequence[int], every: Sequence[int]
) -> None:
    """Fill the scales of a parameter that stays in FP8, one per `every` block; of a stack, those of experts from
    `first`.

    A piece's scale is repeated for each of these blocks that it covers.
    """
    stack = target if target.ndim == 3 else target[None]
    own = ((first, first + len(stack)), *((0, size) for size in parameter.shape[-2:]))[-len(parameter.shape) :]
    for piece in parameter.pieces:
        shared = intersect(own, locate_piece(piece))
        if shared is None or piece.scale is None:
            continue
        there = to_stored_box(piece, shared)
        scale = expand_scale(read_scale(piece.scale, files)[0], piece.stored.shape, there, block, every)
        experts = slice(shared[0][0] - first, shared[0][1] - first) if len(shared) == 3 else slice(None)
        rows, columns = (slice(a // side, -(-b // side)) for (a, b), side in zip(shared[-2:], every, strict=True))
        stack[experts, rows, columns] = scale.to(stack.device)


def read_scale_decoder(piece: Piece, files: Files) -> tuple[ScaleDecoder, int]:
    """Return a function from stored scales of a 4-bit piece to those that are kept, and the digest of the tensors
    behind it."""
    assert piece.packed is not None
    more = piece.packed.more
    tensors = [read_tensor(stored, files) for stored in more]
    digest = sum(digest_tensor(stored, values, files) for stored, values in zip(more, tensors, strict=True))
    return DECODERS[piece.packed.kind](piece, tensors), digest


def decode_powers(_piece: Piece, _more: Sequence[Tensor]) -> ScaleDecoder:
    powers = torch.tensor([*(2.0 ** (exponent - 127) for exponent in range(255)), math.nan])
    return lambda scales, _: powers[scales.int()]


def keep_factor(piece: Piece, more: Sequence[Tensor]) -> ScaleDecoder:
    assert piece.packed is not None
    factor = more[0].reshape(1)
    require_scales(1 / factor, piece.packed.more[0].key)
    return lambda scales, _: four_bits.join_factor(scales, factor)


def keep_scales(_piece: Piece, _more: Sequence[Tensor]) -> ScaleDecoder:
    return lambda scales, _: scales


def unpack_zero_points(_piece: Piece, more: Sequence[Tensor]) -> ScaleDecoder:
    words = more[0][:, None] >> torch.arange(0, 32, 4, dtype=torch.int32)[:, None]
    zeros = (words & 15).flatten(0, 1) - 8  # packed down the rows
    return lambda scales, box: torch.cat([scales, zeros[slice(*box[-2])].to(scales.dtype)], -1)


def decode_nested(piece: Piece, more: Sequence[Tensor]) -> ScaleDecoder:
    """Decode as bitsandbytes: blocks of scales run through all rows, each with its own scale, all with one mean."""
    assert piece.packed is not None
    assert piece.scale is not None
    key = piece.scale.key
    groups = piece.scale.shape[-1]
    state, table, *nested = more
    numbers_of_nf4 = four_bits.code_table("nf4", table.device).tolist()
    try:
        description = json.loads(bytes(state.tolist()))
        block = description.get("nested_blocksize", 1)
        mean = float(description.get("nested_offset", 0))
        facts = (description["quant_type"], description["blocksize"], tuple(description["shape"]), table.tolist())
        if facts != ("nf4", piece.packed.block, piece.shape, numbers_of_nf4):
            raise ValueError(facts)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DamagedError(f"{piece.packed.more[0].key!r} does not describe its weight") from None
    if not nested:
        return lambda scales, _: require_scales(scales, key)
    largest, numbers = nested
    require_scales(largest, piece.packed.more[2].key)

    def scale(codes: Tensor, box: Box) -> Tensor:
        first = box[-2][0] * groups
        places = torch.arange(first, first + codes.numel()).view(codes.shape) // block
        return numbers[codes.int()] * largest[places] + mean

    return scale


DECODERS: Final = {
    "nf4": decode_nested,
    "mxfp4": decode_powers,
    "nvfp4": keep_factor,
    "int4": keep_scales,
    "uint4": unpack_zero_points,
}
