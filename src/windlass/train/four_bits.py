"""Numbers in 4 bits: rows in blocks, each block with its scale; two codes a byte, scales behind the codes.

nf4 is bitsandbytes' own: bit for bit its codes of blocks of 64, and its scales, which of weights in BF16 are exact in
BF16. int4 has even steps: a block's largest value is -1 of 16 multiples of 1/8, so its scale may be negative.
mxfp4, and nf4 as published, are read and never made: the scales of the latter were quantised again, so they are exact
in float32 alone. A block begins where its row does, so a row's bytes depend on nothing but the row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from windlass.plan.layout import FOUR_BITS

TABLES: Final[dict[str, tuple[float, ...]]] = {
    "int4": tuple(code / 8 for code in range(-8, 8)),
    "nf4": (  # quantiles of the normal distribution: QLoRA, appendix E, in float32 as bitsandbytes has them
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
}
TABLES["mxfp4"] = tuple(sign * size for sign in (1, -1) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
LEAST: Final = 1e-38  # of a scale: the reciprocal of a smaller one is infinite


@functools.cache
def table(kind: str, device: torch.device) -> Tensor:
    return torch.tensor(TABLES[kind], device=device)


@functools.cache
def pairs(kind: str, device: torch.device) -> Tensor:
    """The two numbers of each byte: the first one is its upper half."""
    numbers = table(kind, device)
    return torch.cartesian_prod(numbers, numbers)


def row_bytes(columns: int, block: int, scale: torch.dtype = torch.bfloat16) -> int:
    return columns // 2 + scale.itemsize * math.ceil(columns / block)


def split(rows: Tensor, columns: int, scale: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Codes and scales, views of stored rows."""
    return rows[..., : columns // 2], rows[..., columns // 2 :].view(scale)


def encode(values: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Codes, one a byte, and scales in float32, of rows of float32."""
    block, columns = FOUR_BITS[kind].block, values.shape[-1]
    blocks = pad(values, (0, -columns % block)).view(*values.shape[:-1], -1, block)
    top, bottom = blocks.amax(-1, keepdim=True), blocks.amin(-1, keepdim=True)
    scale = torch.maximum(top, -bottom)
    if kind == "int4":
        scale = torch.where(top > -bottom, -top, -bottom)
    numbers = table(kind, values.device)
    units = (blocks * (1.0 / torch.where(scale.abs() < LEAST, LEAST, scale))).clamp_(-1, 1)
    codes = torch.bucketize(units, (numbers[1:] + numbers[:-1]) / 2, out_int32=True).to(torch.uint8)
    return codes.flatten(-2)[..., :columns], scale.squeeze(-1)


def quantise(values: Tensor, kind: str, rows: Tensor) -> Tensor:
    """Fill `rows` with these values. Returns the sums of squares of what it changed, and of the values, in float64."""
    codes, scale = encode(values, kind)
    bytes_of, scales = split(rows, values.shape[-1])
    bytes_of.copy_(codes[..., ::2] << 4 | codes[..., 1::2])
    scales.copy_(scale)
    changed = decode(bytes_of, scales, FOUR_BITS[kind].block, kind) - values
    return torch.stack([each.square().sum(dtype=torch.float64) for each in (changed, values)])


def decode(codes: Tensor, scale: Tensor, block: int, kind: str, origin: Sequence[int] = (0, 0)) -> Tensor:
    """Numbers in float32 of codes, two a byte, the part of a parameter that begins at row and column `origin`."""
    read = pairs(kind, codes.device).index_select(0, codes.reshape(-1).int())
    values = read.view(*codes.shape[:-1], 2 * codes.shape[-1])
    (top, left), (rows, columns) = origin, values.shape[-2:]
    for j in range(left // block, math.ceil((left + columns) / block)):
        of_block = scale[..., top : top + rows, j : j + 1].float()
        values[..., max(0, j * block - left) : (j + 1) * block - left].mul_(of_block)
    return values
