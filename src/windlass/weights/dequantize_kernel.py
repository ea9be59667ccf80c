"""Dequantize codes on a GPU in one pass. Needs Triton, which comes with torch's CUDA builds: import where there is a
GPU.

torch takes two passes: the first writes 16-bit values that the second reads again.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 4
COLUMNS = 1024  # tile of one program: 32 codes per thread, read 16 at a time


# Only Triton's own annotations: with any other, Triton compiles no kernel that reads the variable.
@triton.jit  # type: ignore[untyped-decorator]
def _fp8_kernel(  # type: ignore[no-untyped-def]
    codes, scale, values, rows, columns, expert_stride, row_stride, scale_rows, scale_columns, side_down, side_across,
    first_row, first_column, one: tl.constexpr, exponent: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(columns, wide)
    tile = tl.program_id(0)
    expert = tl.program_id(1).to(tl.int64)  # a stack's elements exceed 32-bit offsets
    row = ((tile // tiles) * high + tl.arange(0, high))[:, None]
    column = ((tile % tiles) * wide + tl.arange(0, wide))[None, :]
    inside = (row < rows) & (column < columns)
    read = tl.load(codes + expert * expert_stride + row.to(tl.int64) * row_stride + column, mask=inside)
    if one:
        factor = tl.load(scale + expert)
    else:
        down = (first_row + row) // side_down
        across = (first_column + column) // side_across
        factor = tl.load(scale + (expert * scale_rows + down) * scale_columns + across, mask=inside)
    if exponent == 0:
        value = read.to(tl.float32)
    elif exponent == 5:  # e5m2 is the upper half of float16
        value = (read.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:  # e4m3 is float16's exponent less 8, and has no infinity
        bits = read.to(tl.int16)
        half = ((bits & 128) << 8) | ((bits & 127) << 7)
        value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256
        value = tl.where((bits & 127) == 127, float("nan"), value)
    value = value * factor
    tl.store(values + (expert * rows + row) * columns + column, value.to(values.dtype.element_ty), mask=inside)


def has_float8(device: torch.device) -> bool:
    """Return whether this GPU has float8 (Ada, Hopper and later). On others the kernel decodes the bits."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)


def dequantize_fp8(
    codes: Tensor, scale: Tensor, read: torch.dtype, sides: tuple[int, int], dtype: torch.dtype, origin: Sequence[int]
) -> Tensor:
    """Return codes [experts, rows, columns], a part that begins at `origin`, times their blocks' scales, in `dtype`.

    The bytes are of dtype `read` and each row is contiguous. Products are taken in float32 and rounded once. A single
    matrix needs no first dimension.
    """
    *stack, rows, columns = codes.shape
    *expert_strides, row_stride, column_stride = codes.stride()
    experts = stack[0] if stack else 1
    expert_stride = expert_strides[0] if stack else 0
    assert column_stride == 1 or columns == 1
    assert scale.is_contiguous()
    values = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    if not values.numel():
        return values
    exponent = 0 if has_float8(codes.device) else {torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}[read]
    codes = codes if exponent else codes.view(read)
    grid = (triton.cdiv(rows, ROWS) * triton.cdiv(columns, COLUMNS), experts)
    one = scale.shape[-2:].numel() == 1
    with torch.cuda.device_of(codes):  # type: ignore[no-untyped-call]
        _fp8_kernel[grid](
            codes, scale, values, rows, columns, expert_stride, row_stride, *scale.shape[-2:], *sides, *origin,
            one=one, exponent=exponent, high=ROWS, wide=COLUMNS, num_warps=4,
        )  # fmt: skip
    return values


@triton.jit  # type: ignore[untyped-decorator]
def _four_bits_kernel(  # type: ignore[no-untyped-def]
    codes, scale, zeros, table, values, rows, columns, expert_stride, row_stride, scale_expert_stride,
    scale_row_stride, first_column, shifted: tl.constexpr, side: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(columns, wide)
    tile = tl.program_id(0)
    expert = tl.program_id(1).to(tl.int64)
    row = ((tile // tiles) * high + tl.arange(0, high))[:, None]
    column = ((tile % tiles) * wide + tl.arange(0, wide))[None, :]
    inside = (row < rows) & (column < columns)
    both = tl.load(codes + expert * expert_stride + row.to(tl.int64) * row_stride + column // 2, mask=inside, other=0)
    code = tl.where(column % 2 == 0, both >> 4, both & 15).to(tl.int32)
    block = expert * scale_expert_stride + scale_row_stride * row.to(tl.int64) + (first_column + column) // side
    factor = tl.load(scale + block, mask=inside).to(tl.float32)
    number = tl.load(table + code)
    if shifted:
        number -= tl.load(zeros + block, mask=inside).to(tl.float32)
    value = number * factor
    tl.store(values + (expert * rows + row) * columns + column, value.to(values.dtype.element_ty), mask=inside)


def dequantize_four_bits(
    codes: Tensor, scale: Tensor, zeros: Tensor | None, table: Tensor, side: int, dtype: torch.dtype, left: int
) -> Tensor:
    """Do the same for 4-bit codes, two per byte, that begin at column `left`. `scale` and `zeros` (if there are zero
    points) are of the full rows, one per `side` columns, in memory alike."""
    *stack, rows, half = codes.shape
    *expert_strides, row_stride, column_stride = codes.stride()
    *scale_expert_strides, scale_row_stride, scale_column_stride = scale.stride()
    experts = stack[0] if stack else 1
    columns = 2 * half
    expert_stride = expert_strides[0] if stack else 0
    scale_expert_stride = scale_expert_strides[0] if scale_expert_strides else 0
    assert column_stride == scale_column_stride == 1
    values = torch.empty((*stack, rows, columns), dtype=dtype, device=codes.device)
    if not values.numel():
        return values
    grid = (triton.cdiv(rows, ROWS) * triton.cdiv(columns, COLUMNS), experts)
    with torch.cuda.device_of(codes):  # type: ignore[no-untyped-call]
        _four_bits_kernel[grid](
            codes, scale, scale if zeros is None else zeros, table, values, rows, columns, expert_stride, row_stride,
            scale_expert_stride, scale_row_stride, left, shifted=zeros is not None, side=side, high=ROWS, wide=COLUMNS,
            num_warps=4,
        )  # fmt: skip
    return values
