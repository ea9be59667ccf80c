"""Weights stored in 8 or 4 bits: how a parameter's bytes are decoded. The products are in train/kernels/products.py.

Such a parameter is bytes: whatever casts a model's floating-point parameters (PEFT, FSDP2's mixed precision,
`.to(dtype)`) leaves bytes alone, and every backend can gather them. The true value is code x scale in float32, rounded
once.

FP8, as published: one byte per code; scales are a small float32 buffer of the same module, unsharded on every rank.
Values, products and gradients are bit for bit those of the same file loaded in 16 or 32 bits.

4 bits, quantized at load or as published (four_bits.py): each row carries its own scales, so sharding by rows never
separates codes from scales.

float8 products are not used: published activation scales are static, which transformers' grouped FP8 path refuses, and
8-bit activations would change the gradients.

To add a format:

| step                                           | place                                                     |
|------------------------------------------------|-----------------------------------------------------------|
| its name, its block, its numbers and scales    | `FOUR_BITS`, or `PUBLISHED`, in settings.py               |
| its keys in a checkpoint: codes, scales        | `scale_suffix` in model/parameters.py, model/packed.py    |
| its method in config.json, and that it is read | `_check_quantization`, `READS` in model/config.py         |
| its kind, of a checkpoint's tensors            | `make_packed_piece` in model/packed.py                    |
| which weights have it, and its name            | model/quantization.py                                     |
| its name in a run file and in a layout         | `base_dtype` in runfile/machines.py, `IN_NAMES`           |
| its scales as published                        | `DECODERS` in fill.py                                     |
| scales that no column of `FOUR_BITS` describes | `row_bytes`, `read_scales`, `make_behind` in four_bits.py |
| `StoredFormat` of a parameter                  | `choose_format` in train/kernels/products.py              |
| decoding in one pass on a GPU                  | dequantize_kernel.py, `kernel_is_exact`                   |
| decoding a second way, as its publisher does   | `Disk`, `decode_row` in certificate.py                    |
| a merge into it                                | export/rounding.py, export/merged_files.py                |
| writing it in a test's checkpoint, on a GPU    | tiny.py, `PACKED` in self_test.py                         |
"""

import functools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from windlass.errors import SlowerWarning
from windlass.settings import FOUR_BITS
from windlass.weights import four_bits
from windlass.weights.expert_shards import get_expert_shard
from windlass.weights.reading import to_float32


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """The meaning of one parameter's bytes."""

    codes: torch.dtype  # float8_e4m3fn, float8_e5m2, or uint8 for two 4-bit codes each
    block: tuple[int, int]  # rows and columns that share a scale; the last blocks may be smaller
    dtype: torch.dtype  # the parameter's dtype without quantization
    kind: str = ""  # a name of settings.FOUR_BITS
    columns: int = 0  # 4 bits: columns of values; the stored rows are bytes
    scales: torch.dtype = torch.bfloat16  # in 4 bits; uint8: bytes of several dtypes
    transposed: bool = False  # 4 bits: the parameter's columns are stored as rows

    @property
    def per_byte(self) -> int:
        return 2 if self.kind else 1

    def shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the values of a parameter stored in this shape."""
        *outer, rows, columns = *stored[:-1], self.columns or stored[-1]
        return (*outer, columns, rows) if self.transposed else (*outer, rows, columns)

    def parts(self, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and scales of a parameter."""
        return four_bits.split_rows(weight, self.columns, self.scales) if self.kind else (weight, scale)


@dataclass(frozen=True, slots=True)
class QuantizedParam:
    """A quantized parameter as this rank has it."""

    scale: Tensor  # empty for 4 bits, whose scales are in the parameter's own rows
    format: StoredFormat
    first: int  # first expert in `scale`: with expert parallelism a rank has its own experts' scales


# --- dequantization


def dequantize(
    codes: Tensor, scale: Tensor, coding: StoredFormat, dtype: torch.dtype, origin: tuple[int, int] = (0, 0)
) -> Tensor:
    """Return the true values of codes [..., rows, columns], the part of a parameter that begins at row and column
    `origin`."""
    values: Tensor = _DEQUANTIZE(codes, scale, coding.codes, coding.kind, *coding.block, dtype, *origin)
    return values


# The next functions take the operator's arguments: codes and scales; dtype of FP8 codes, or a kind of 4 bits; rows and
# columns of a block; dtype of the values; first row, first column.


def dequantize_on_gpu(codes: Tensor, scale: Tensor, read: torch.dtype, kind: str, *given: Any) -> Tensor:
    exact = codes.stride(-1) == 1 and kernel_is_exact(codes.device, read, given[2], kind, scale.dtype)
    return (dequantize_by_kernel if exact else dequantize_by_torch)(codes, scale, read, kind, *given)


def dequantize_by_kernel(
    codes: Tensor, scale: Tensor, read: torch.dtype, kind: str, down: int, across: int, dtype: torch.dtype, *origin: int
) -> Tensor:
    """Dequantize in one pass over memory."""
    from windlass.weights import dequantize_kernel  # needs Triton

    if kind:
        table = four_bits.code_table(kind, codes.device)
        place = (*origin, codes.shape[-2], 2 * codes.shape[-1])
        scale, zeros, left = four_bits.read_scales(scale, kind, across, place)
        return dequantize_kernel.dequantize_four_bits(codes, scale, zeros, table, across, dtype, left)
    return dequantize_kernel.dequantize_fp8(codes, scale, read, (down, across), dtype, origin)


@functools.cache
def kernel_is_exact(
    device: torch.device, read: torch.dtype, dtype: torch.dtype, kind: str = "", scales: torch.dtype = torch.float32
) -> bool:
    """Return whether the kernel gives the same bits as torch for all codes; warn if not. Runs once per process.

    It covers part of a stack, with one scale per expert and with one per block. Draws no random numbers.
    """
    stack = torch.arange(3 * 40 * 2048, device=device).to(torch.uint8).view(3, 40, 2048)
    experts, rows, columns = stack.shape
    per_byte = 2 if kind else 1
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    try:
        for block in ((1, min(32, FOUR_BITS[kind].block)), (1, 64)) if kind else ((rows, columns), (16, 128)):
            shape = (experts, math.ceil(rows / block[0]), math.ceil(per_byte * columns / block[1]))
            scale = (torch.arange(math.prod(shape), device=device) + 1.1).mul_(1.3e-4).view(shape)
            scale = four_bits.make_behind(scale, kind, scales) if kind else scale.to(scales)
            given = stack[:, 5:37, 136:1900], scale, read, kind, *block, dtype, 5, 136 * per_byte
            ours = dequantize_by_kernel(*given).nan_to_num().view(bits)
            torchs = dequantize_by_torch(*given).nan_to_num().view(bits)
            if not torch.equal(ours, torchs):
                raise ArithmeticError(f"{int((ours != torchs).sum())} of {ours.numel()} values differ from torch's")
    except Exception as error:  # no Triton, no C compiler, a GPU without float8 in Triton, a bug of ours
        why = f"{type(error).__name__}: {error}".strip()[-300:]
        text = f"weights in {kind.upper() or 'FP8'} take two passes to read instead of one: {why}"
        warnings.warn(text, SlowerWarning, stacklevel=2)
        return False
    return True


def dequantize_by_torch(
    codes: Tensor, scale: Tensor, read: torch.dtype, kind: str, down: int, across: int, dtype: torch.dtype, *origin: int
) -> Tensor:
    """Dequantize in two passes over memory, a few more for 4 bits; on any device.

    FP8 codes are exact in every dtype, so multiplying in place (torch computes a product with float32 in float32)
    rounds once.
    """
    if kind:
        return four_bits.decode_codes(codes, scale, across, kind, origin).to(dtype)
    top, left = origin
    eight = codes.view(read)
    # A CPU multiplies 16-bit values through float32 copies anyway.
    values = to_float32(eight) if codes.device.type == "cpu" else eight.to(dtype, memory_format=torch.contiguous_format)
    rows = codes.shape[-2]
    if down == 1 and scale.shape[-1] == 1:  # one scale for each row
        return values.mul_(scale[..., top : top + rows, :]).to(dtype)
    columns = torch.arange(left, left + codes.shape[-1], device=codes.device) // across
    for i in range(top // down, math.ceil((top + rows) / down)):
        values[..., max(0, i * down - top) : (i + 1) * down - top, :].mul_(scale[..., i, :][..., None, columns])
    return values.to(dtype)


def empty_result(codes: Tensor, *given: Any) -> Tensor:
    """Return an empty result, for fake tensors and compilers."""
    _, _, kind, _, _, dtype, *_ = given
    return codes.new_empty((*codes.shape[:-1], codes.shape[-1] * (2 if kind else 1)), dtype=dtype)


# One operator for all devices, which compilers need not trace. Calls of torch.library.custom_op take the host four
# times as long.
_LIBRARY: Final[Any] = torch.library.Library("windlass", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "dequantize(Tensor codes, Tensor scale, ScalarType read, str kind, int down, int across, ScalarType dtype, "
    "SymInt first_row, SymInt first_column) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.impl("dequantize", lambda *given: dequantize_by_torch(*given), "CPU")
_LIBRARY.impl("dequantize", dequantize_on_gpu, "CUDA")
torch.library.register_fake("windlass::dequantize", empty_result, lib=_LIBRARY)
_DEQUANTIZE: Final[Any] = torch.ops.windlass.dequantize.default


def to_quantized_param(module: nn.Module, name: str, weight: Tensor, coding: StoredFormat) -> None:
    """Replace `module.name` by codes of that weight, and FP8 scales by a buffer. The loader fills both."""
    rows, columns = (math.ceil(size / side) for size, side in zip(weight.shape[-2:], coding.block, strict=True))
    shape = tuple(weight.shape)
    scales = (*weight.shape[:-2], rows, columns)
    if coding.kind:
        rows = weight.shape[-1 if coding.transposed else -2]
        row = four_bits.row_bytes(coding.columns, coding.block[1], coding.scales, coding.kind)
        shape = (*shape[:-2], rows, row)
        scales = (0,)
    codes = torch.empty(shape, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(scales, dtype=torch.float32, device=weight.device)
    setattr(module, name, nn.Parameter(codes, requires_grad=False))
    module.register_buffer(f"{name}_scale", scale, persistent=False)  # not part of the model's state
    module.__dict__.setdefault("formats", {})[name] = coding


def get_formats(module: nn.Module) -> dict[str, StoredFormat]:
    """Return the module's own quantized parameters."""
    formats: dict[str, StoredFormat] = getattr(module, "formats", {})
    return formats


def list_quantized_params(model: nn.Module) -> dict[str, QuantizedParam]:
    """Return the model's quantized parameters by name, with FP8 scales cut to this rank's experts. Not filled yet."""
    quantized: dict[str, QuantizedParam] = {}
    for prefix, module in model.named_modules():
        for leaf, coding in get_formats(module).items():
            part = get_expert_shard(module.get_parameter(leaf))
            scale = module.get_buffer(f"{leaf}_scale")
            if part and scale.ndim == 3 and len(scale) != part.count:
                scale = torch.empty_like(scale[: part.count])
                setattr(module, f"{leaf}_scale", scale)
            quantized[f"{prefix}.{leaf}"] = QuantizedParam(scale, coding, part.first if part else 0)
    return quantized
