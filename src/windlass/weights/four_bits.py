"""Weights in 4 bits: rows are divided into blocks with one scale each; two codes per byte, a row's scales behind its
codes.

nf4 is bitsandbytes' format: the same codes, bit for bit, for blocks of 64, and the same scales, which are exact in BF16
for weights in BF16. Nothing else is quantized here; a merge changes codes under published scales. Published nf4 scales
are quantized themselves, so they are exact only in float32. Of compressed-tensors' formats, behind the codes of nvfp4
come scales in 8 bits and, padded to four bytes, the number that divides them; behind those of uint4 scales and as many
zero points. Blocks begin where their row begins, so a row's bytes depend on nothing else.
"""

import functools
import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from windlass.settings import FOUR_BITS

LEAST: Final = 1e-38  # smallest scale: the reciprocal of a smaller one is infinite


@functools.cache
def code_table(kind: str, device: torch.device) -> Tensor:
    return torch.tensor(FOUR_BITS[kind].numbers, device=device)


@functools.cache
def code_levels(kind: str, device: torch.device) -> Tensor:
    """Return the different numbers in order; two codes of NVFP4 and MXFP4 are zero."""
    return torch.tensor(sorted(set(FOUR_BITS[kind].numbers)), device=device)


@functools.cache
def code_pair_table(kind: str, device: torch.device) -> Tensor:
    """Return the two numbers of each byte; the upper half comes first."""
    numbers = code_table(kind, device)
    return torch.cartesian_prod(numbers, numbers)


def row_bytes(columns: int, block: int, scale: torch.dtype = torch.bfloat16, kind: str = "") -> int:
    groups = math.ceil(columns / block)
    if kind and FOUR_BITS[kind].is_divided:
        groups += -groups % 4 + 4
    if kind and FOUR_BITS[kind].has_zero_points:
        groups *= 2
    return columns // 2 + scale.itemsize * groups


def join_factor(scales: Tensor, factor: Tensor) -> Tensor:
    """Return what is behind the codes of rows: their scales in 8 bits, and the number that divides them."""
    groups = scales.shape[-1]
    behind = torch.zeros((*scales.shape[:-1], groups + -groups % 4 + 4), dtype=torch.uint8, device=scales.device)
    behind[..., :groups] = scales.view(torch.uint8)
    behind[..., -4:] = factor.reshape(1).view(torch.uint8)
    return behind


def make_behind(scales: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Return what would be behind the codes of rows with about these scales."""
    if FOUR_BITS[kind].is_divided:
        factor = torch.tensor(37.1, device=scales.device)
        return join_factor((scales * factor).to(torch.float8_e4m3fn), factor)
    if FOUR_BITS[kind].has_zero_points:
        scales = torch.cat([scales, torch.arange(scales.numel(), device=scales.device).view(scales.shape) % 16 - 8], -1)
    return scales.to(dtype)


def read_scales(behind: Tensor, kind: str, block: int, place: Sequence[int]) -> tuple[Tensor, Tensor | None, int]:
    """Return the scales of the blocks that a part of rows lies in, from what is stored behind all their codes; zero
    points if there are some; and the column of the first block where the part begins. place: the part's first row and
    column, its rows and columns."""
    top, left, rows, columns = place
    behind = behind[..., top : top + rows, :]
    groups = slice(left // block, math.ceil((left + columns) / block))
    if FOUR_BITS[kind].is_divided:
        scales = behind[..., :-4][..., groups].view(torch.float8_e4m3fn).float()
        return scales.div_(behind[..., -4:].view(torch.float32)), None, left % block
    if FOUR_BITS[kind].has_zero_points:
        scales, zeros = behind.chunk(2, -1)
        return scales[..., groups], zeros[..., groups], left % block
    return behind[..., groups], None, left % block


def split_rows(rows: Tensor, columns: int, scale: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Return views of stored rows: codes and scales."""
    return rows[..., : columns // 2], rows[..., columns // 2 :].view(scale)


def encode_rows(values: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return codes, one per byte, and float32 scales of float32 rows."""
    block = FOUR_BITS[kind].block
    columns = values.shape[-1]
    blocks = pad(values, (0, -columns % block)).view(*values.shape[:-1], -1, block)
    scale = torch.maximum(blocks.amax(-1, keepdim=True), -blocks.amin(-1, keepdim=True))
    numbers = code_table(kind, values.device)
    units = (blocks * (1.0 / torch.where(scale < LEAST, LEAST, scale))).clamp_(-1, 1)
    codes = torch.bucketize(units, (numbers[1:] + numbers[:-1]) / 2, out_int32=True).to(torch.uint8)
    return codes.flatten(-2)[..., :columns], scale.squeeze(-1)


def quantize(values: Tensor, kind: str, rows: Tensor) -> Tensor:
    """Write the quantized values into `rows`. Returns in float64 the sums of squares of the errors and of the
    values."""
    codes, scale = encode_rows(values, kind)
    bytes_of, scales = split_rows(rows, values.shape[-1])
    bytes_of.copy_(codes[..., ::2] << 4 | codes[..., 1::2])
    scales.copy_(scale)
    changed = decode_codes(bytes_of, scales, FOUR_BITS[kind].block, kind) - values
    return torch.stack([tensor.square().sum(dtype=torch.float64) for tensor in (changed, values)])


def decode_codes(codes: Tensor, scale: Tensor, block: int, kind: str, origin: Sequence[int] = (0, 0)) -> Tensor:
    """Decode codes, two per byte, to float32: the part of a parameter that begins at row and column `origin`."""
    read = code_pair_table(kind, codes.device).index_select(0, codes.reshape(-1).int())
    values = read.view(*codes.shape[:-1], 2 * codes.shape[-1])
    scales, zeros, left = read_scales(scale, kind, block, (*origin, *values.shape[-2:]))
    for j in range(scales.shape[-1]):
        of_block = values[..., max(0, j * block - left) : (j + 1) * block - left]
        if zeros is not None:
            of_block.sub_(zeros[..., j : j + 1].float())
        of_block.mul_(scales[..., j : j + 1].float())
    return values


def change_codes(codes: Tensor, scale: Tensor, block: int, kind: str, change: Tensor, dither: Tensor) -> Tensor:
    """Return codes, two per byte, of values that change by so much on the scales that they have. Of a value's two
    neighbours its place between them and the dither, from 0 to 1, choose one; a value that doesn't change keeps its
    code."""
    table, levels = code_table(kind, codes.device), code_levels(kind, codes.device)
    numbers = code_pair_table(kind, codes.device)[codes.int()].flatten(-2)
    scales = read_scales(scale, kind, block, (0, 0, *change.shape[-2:]))[0].float().repeat_interleave(block, -1)
    scales = scales[..., : change.shape[-1]]
    units = torch.where(scales == 0, 0.0, change / scales)
    # A block's largest values can't grow: the row's others take over what they leave.
    room = (numbers + units).clamp_(levels[0], levels[-1]).sub_(numbers).mul_(scales)
    asked, left = (each.mul(change).sum(-1, keepdim=True) for each in (change, room))
    moved = units.mul_(torch.where(asked < 2 * left, asked / left, 1.0)).add_(numbers)
    above = torch.bucketize(moved, levels).clamp_(1, len(levels) - 1)
    low = levels[above - 1]
    high = levels[above]
    levels_after = torch.where(moved - low > dither * (high - low), above, above - 1)
    own = torch.stack([codes >> 4, codes & 15], -1).flatten(-2)
    after = (table == levels[:, None]).byte().argmax(1).byte()[levels_after]
    after = torch.where(levels[levels_after] == numbers, own, after)  # there are two zeros
    return after[..., ::2] << 4 | after[..., 1::2]
