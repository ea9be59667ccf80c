"""Weights stored in 8 or 4 bits: dequantized just before each use and freed right after.

Such a parameter is bytes: whatever casts a model's floating-point parameters (PEFT, FSDP2's mixed precision,
`.to(dtype)`) leaves bytes alone, and every backend can gather them. The true value is code x scale in float32, rounded
once. Only codes are kept for the backward.

FP8, as published: one byte per code; scales are a small float32 buffer of the same module, unsharded on every rank.
Values, products and gradients are bit for bit those of the same file loaded in 16 or 32 bits.

4 bits, quantized at load or as published (four_bits.py): rows of codes with their scales behind them, so a rank that
has a row has all of it. The sharding of rows changes no bit.

float8 products are not used: published activation scales are static, which transformers' grouped FP8 path refuses, and
8-bit activations would change the gradients.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from transformers.integrations.moe import _grouped_linear, _grouped_mm

from windlass import settings
from windlass.errors import Problem, UserError, raise_all
from windlass.model import Base
from windlass.model.quantization import (
    published_dtype,
    quantizable_names,
)
from windlass.model.targets import ExpertShard
from windlass.settings import FOUR_BITS, PUBLISHED
from windlass.train.kernels import kept
from windlass.weights import four_bits
from windlass.weights.reading import DTYPES, NEEDS_SCALE, scale_block, to_float32

# On a CPU, oneDNN prepares each 16-bit product for its number of rows, which takes half a millisecond, and caches 1,024
# of them.
ALIGN = 16
WHERE, HINT = "layout.base_dtype", "set layout.base_dtype: bf16"


@dataclass(frozen=True, slots=True)
class Format:
    """The meaning of one parameter's bytes."""

    codes: torch.dtype  # float8_e4m3fn, float8_e5m2, or uint8 for two 4-bit codes each
    block: tuple[int, int]  # rows and columns that share a scale; the last blocks may be smaller
    dtype: torch.dtype  # the parameter's dtype without quantization
    kind: str = ""  # a name of plan.layout.FOUR_BITS
    columns: int = 0  # 4 bits: columns of values; the stored rows are bytes
    scales: torch.dtype = torch.bfloat16  # in 4 bits
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
    format: Format
    first: int  # first expert in `scale`: with expert parallelism a rank has its own experts' scales


# --- dequantization


def dequantize(
    codes: Tensor, scale: Tensor, coding: Format, dtype: torch.dtype, origin: tuple[int, int] = (0, 0)
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
        return dequantize_kernel.dequantize_four_bits(codes, scale, table, across, dtype, origin)
    return dequantize_kernel.dequantize_fp8(codes, scale, read, (down, across), dtype, origin)


@functools.cache
def kernel_is_exact(
    device: torch.device, read: torch.dtype, dtype: torch.dtype, kind: str = "", scales: torch.dtype = torch.float32
) -> bool:
    """Return whether the kernel gives the same bits as torch for all codes; warn if not. Runs once per process.

    It covers part of a stack, with one scale per expert and with one per block. Draws no random numbers.
    """
    experts, rows, columns = 3, 40, 2048
    per_byte = 2 if kind else 1
    stack = torch.arange(experts * rows * columns, device=device).to(torch.uint8).view(experts, rows, columns)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    try:
        for block in ((1, 32), (1, 64)) if kind else ((rows, columns), (16, 128)):
            shape = (experts, math.ceil(rows / block[0]), math.ceil(per_byte * columns / block[1]))
            scale = (torch.arange(math.prod(shape), device=device) + 1.1).mul_(1.3e-4).view(shape).to(scales)
            given = stack[:, 5:37, 136:1900], scale, read, kind, *block, dtype, 5, 136 * per_byte
            one, other = (way(*given).nan_to_num().view(bits) for way in (dequantize_by_kernel, dequantize_by_torch))
            if not torch.equal(one, other):
                raise ArithmeticError(f"{int((one != other).sum())} of {one.numel()} values differ from torch's")
    except Exception as error:  # no Triton, no C compiler, a GPU without float8 in Triton, a bug of ours
        why = f"{type(error).__name__}: {error}".strip()[-300:]
        warnings.warn(f"weights in {kind.upper() or 'FP8'} take two passes to read instead of one: {why}", stacklevel=2)
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


# --- a model whose parameters are quantized ---


class QuantizedLinear(nn.Linear):
    """A linear layer over codes. The weight is frozen: only the input (and the bias) get gradients."""

    weight_scale: Tensor
    formats: dict[str, Format]

    def __init__(self, linear: nn.Linear, coding: Format) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        to_quantized_param(self, "weight", linear.weight, coding)
        # PEFT 0.21 first gives an adapter this dtype; with the weight's, A would be rounded to bytes.
        self.compute_dtype = coding.dtype

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Dequantize the matrix, for each product anew."""
        coding = self.formats["weight"]
        return dequantize(*coding.parts(self.weight, self.weight_scale), coding, dtype)

    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        product: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            input.to(dtype), self.weight, self.weight_scale, bias, None, self.formats["weight"]
        )
        return product


class _Product(torch.autograd.Function):
    """x W^T + b and dy W for one matrix or (with `offsets`) each expert's own, dequantized for each product."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        offsets: Tensor | None,
        coding: Format,
    ) -> Tensor:
        ctx.save_for_backward(weight, scale, offsets)
        ctx.coding = coding
        codes, scale = coding.parts(weight, scale)
        if offsets is not None:
            return kept.keep_expert_product(lambda: expert_products(x, codes, scale, offsets, coding, transposed=True))
        return nn.functional.linear(x, dequantize(codes, scale, coding, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale, offsets = ctx.saved_tensors
        codes, scale = ctx.coding.parts(weight, scale)
        dx = None
        if offsets is not None:
            dx = expert_products(dy.contiguous(), codes, scale, offsets, ctx.coding, transposed=False)
        elif ctx.needs_input_grad[0]:
            dx = dy @ dequantize(codes, scale, ctx.coding, dy.dtype)
        db = dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
        return dx, None, None, db, None, None


def to_quantized_param(module: nn.Module, name: str, weight: Tensor, coding: Format) -> None:
    """Replace `module.name` by codes of that weight, and FP8 scales by a buffer. The loader fills both."""
    rows, columns = (math.ceil(size / side) for size, side in zip(weight.shape[-2:], coding.block, strict=True))
    shape, scales = tuple(weight.shape), (*weight.shape[:-2], rows, columns)
    if coding.kind:
        rows = weight.shape[-1 if coding.transposed else -2]
        row = four_bits.row_bytes(coding.columns, coding.block[1], coding.scales)
        shape, scales = (*shape[:-2], rows, row), (0,)
    codes = torch.empty(shape, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(scales, dtype=torch.float32, device=weight.device)
    setattr(module, name, nn.Parameter(codes, requires_grad=False))
    module.register_buffer(f"{name}_scale", scale, persistent=False)  # not part of the model's state
    module.__dict__.setdefault("formats", {})[name] = coding


def get_formats(module: nn.Module) -> dict[str, Format]:
    """Return the module's own quantized parameters."""
    found: dict[str, Format] = getattr(module, "formats", {})
    return found


def convert_model(model: nn.Module, base: Base, base_dtype: str, dtype: torch.dtype) -> None:
    """Convert a model on the meta device: parameters that are stored in codes, or are to be quantized to 4 bits,
    become codes."""
    problems = []
    kept = base_dtype == published_dtype(base)
    names = quantizable_names(base) if kept or base_dtype not in PUBLISHED else frozenset()
    for parameter in base.parameters:
        kinds = {p.packed.kind if p.packed else p.stored.dtype: p.stored.key for p in parameter.pieces}
        in_part = kept and kinds.keys() & {*NEEDS_SCALE, base_dtype}
        if parameter.name not in names and not in_part:
            continue
        owner, _, leaf = parameter.name.rpartition(".")
        module, packed = model.get_submodule(owner), parameter.pieces[0].packed
        if packed and kept:
            columns = parameter.shape[-2 if packed.transposed else -1]
            scales = torch.float32 if packed.kind == "nf4" else torch.bfloat16
            coding = Format(
                torch.uint8, (1, packed.block), dtype, packed.kind, columns, scales, transposed=packed.transposed
            )
        elif base_dtype in FOUR_BITS:
            coding = Format(torch.uint8, (1, FOUR_BITS[base_dtype].block), dtype, base_dtype, parameter.shape[-1])
        else:
            coding = Format(DTYPES[next(iter(kinds))], scale_block(parameter, base.block), dtype)
        if len(kinds) > 1:
            what = "; ".join(f"{key!r} is {kind}" for kind, key in sorted(kinds.items()))
            problems.append(Problem(f"{parameter.name} is stored in more than one dtype: {what}", WHERE, HINT))
        elif coding.columns % 4:
            what = f"{parameter.name} has {coding.columns} columns: 4 bits take a multiple of 4"
            problems.append(Problem(what, WHERE, HINT))
        elif type(module) is nn.Linear:
            model.set_submodule(owner, QuantizedLinear(module, coding))
        elif getattr(module, "is_transposed", None) is coding.transposed:
            to_quantized_param(module, leaf, module.get_parameter(leaf), coding)
        else:
            what = f"{parameter.name} belongs to {type(module).__name__}, which can't compute with "
            problems.append(Problem(f"{what}{base_dtype.upper()} weights", WHERE, HINT))
    if not names:
        what = f"is not stored in {base_dtype.upper()}, so it can't be kept in it"
        what = what if base_dtype in PUBLISHED else "has nothing to quantize"
        problems.append(Problem(f"{base.name} {what}", WHERE, HINT))
    raise_all(problems)


def list_quantized_params(model: nn.Module) -> dict[str, QuantizedParam]:
    """Return the model's quantized parameters by name, with FP8 scales cut to this rank's experts. Not filled yet."""
    found: dict[str, QuantizedParam] = {}
    for prefix, module in model.named_modules():
        for leaf, coding in get_formats(module).items():
            part = get_expert_shard(module.get_parameter(leaf))
            scale = module.get_buffer(f"{leaf}_scale")
            if part and scale.ndim == 3 and len(scale) != part.count:
                scale = torch.empty_like(scale[: part.count])
                setattr(module, f"{leaf}_scale", scale)
            found[f"{prefix}.{leaf}"] = QuantizedParam(scale, coding, part.first if part else 0)
    return found


def get_expert_shard(parameter: Tensor) -> ExpertShard | None:
    """Return the experts of a stack that this rank has under expert parallelism; None if they are not split."""
    mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
    if mesh is None or "ep" not in (mesh.mesh_dim_names or ()):
        return None
    count = parameter.shape[0] // mesh["ep"].size()
    return ExpertShard(mesh.get_local_rank("ep") * count, count, parameter.shape[0])


# --- products of all experts ---


def grouped_linear(x: Tensor, experts: nn.Module, name: str, offsets: Tensor) -> Tensor:
    """Multiply each expert's rows of x [tokens, in] (sorted by expert, `offsets` are their ends) by its own matrix.

    `name` is the parameter [experts, out, in]: gate_up_proj or down_proj. Rows after the last offset belong to no
    expert; their results are undefined.
    """
    weight: Tensor = getattr(experts, name)
    coding = get_formats(experts).get(name)
    product: Tensor
    if coding is None:
        transposed = not getattr(experts, "is_transposed", False)
        if x.dtype == weight.dtype and not weight.requires_grad:
            product = _Frozen.apply(x, weight, offsets, transposed)  # type: ignore[no-untyped-call]
            return product
        if kept.keeps_products():
            what = f"experts' weights are in {weight.dtype}, what they are given in {x.dtype}: products can't be kept"
            hint = "set model.torch_dtype: bfloat16, or train.gradient_checkpointing: true"
            raise UserError(what.replace("torch.", ""), "train.gradient_checkpointing", hint)
        product = _grouped_linear(x, weight, offsets, is_transposed=not transposed)
        return product
    # As in transformers: products have the weight's dtype, or the input's under mixed precision.
    dtype = x.dtype if x.element_size() < coding.dtype.itemsize else coding.dtype
    scale = getattr(experts, f"{name}_scale")
    product = _Product.apply(x.to(dtype), weight, scale, None, offsets, coding)  # type: ignore[no-untyped-call]
    return product


def expert_products(
    x: Tensor, codes: Tensor, scale: Tensor, offsets: Tensor, coding: Format, *, transposed: bool
) -> Tensor:
    """Return x_e W_e^T (transposed) or x_e W_e for all experts.

    One expert at a time if there are fewer rows than experts, as in generation, or if torch itself would copy the
    offsets to the host: its grouped kernels need Hopper or later (pytorch's Blas.cpp loops over experts otherwise, here
    once per chunk).
    """
    few = x.shape[0] < codes.shape[0]
    at_once = x.is_cuda and torch.cuda.get_device_capability(x.device)[0] >= 9
    way = multiply_all if at_once and not few else multiply_one_by_one
    return way(x, codes, scale, offsets, coding, transposed=transposed)


class _Frozen(torch.autograd.Function):
    """Each expert's product with its own frozen matrix."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
        ctx.save_for_backward(weight, offsets)
        ctx.transposed = transposed
        return kept.keep_expert_product(lambda: multiply_frozen(x, weight, offsets, transposed=transposed))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, offsets = ctx.saved_tensors
        return multiply_frozen(dy.contiguous(), weight, offsets, transposed=not ctx.transposed), None, None, None


def multiply_frozen(x: Tensor, weight: Tensor, offsets: Tensor, *, transposed: bool) -> Tensor:
    """Return x_e W_e^T (transposed) or x_e W_e for all experts; on a CPU in 16 bits, one expert at a time."""
    if x.device.type == "cpu" and x.element_size() == 2 and ALIGN > 1:
        return multiply_one_by_one(x, weight, None, offsets, None, transposed=transposed)
    found: Tensor = _grouped_linear(x, weight, offsets, is_transposed=not transposed)
    return found


def multiply_one_by_one(
    x: Tensor, codes: Tensor, scale: Tensor | None, offsets: Tensor, coding: Format | None, *, transposed: bool
) -> Tensor:
    """Multiply one expert at a time, skipping those without tokens. Needs the offsets on the host.

    On a CPU in 16 bits, a product includes some rows of the next experts, so that only few shapes occur; those rows are
    overwritten by their own expert's product.
    """
    columns = codes.shape[1] if transposed else codes.shape[2] * (coding.per_byte if coding else 1)
    product = x.new_zeros(x.shape[0], columns)
    align = ALIGN if x.device.type == "cpu" and x.element_size() == 2 else 1
    start = 0
    for expert, stop in enumerate(offsets.tolist()):
        if stop > start:
            weight = codes[expert]
            if coding is not None and scale is not None:
                weight = dequantize(weight, scale[expert], coding, x.dtype)
            weight, along = weight.T if transposed else weight, start + math.ceil((stop - start) / align) * align
            if along <= len(x):
                torch.mm(x[start:along], weight, out=product[start:along])
            else:  # at the end, include preceding rows instead
                first = max(stop - (along - start), 0)
                product[start:stop] = (x[first:stop] @ weight)[start - first :]
            del weight  # or it would live on while the next one is made
        start = stop
    return product


def multiply_all(
    x: Tensor, codes: Tensor, scale: Tensor, offsets: Tensor, coding: Format, *, transposed: bool
) -> Tensor:
    """Multiply all experts together, some columns of the product at a time.

    Nothing waits for the host, nothing is summed over chunks (each column is one product), and weights never exist in
    more bytes than planned (`memory.dequantized_bytes`). Experts without tokens are dequantized in vain, but with
    thousands of tokens per micro-batch there are none.
    """
    experts, rows, columns = codes.shape[0], codes.shape[1], codes.shape[2] * coding.per_byte
    width, other = (rows, columns) if transposed else (columns, rows)
    in_chunk = settings.DEQUANTIZED_BYTES // (experts * other * x.element_size())
    step = max(
        settings.DEQUANTIZED_COLUMNS, in_chunk // settings.DEQUANTIZED_COLUMNS * settings.DEQUANTIZED_COLUMNS
    )  # full tiles, and 16-byte strides
    product = x.new_empty(x.shape[0], width)
    for first in range(0, width, step):
        per = 1 if transposed else coding.per_byte  # a chunk begins with a byte: 128 columns at least
        part = codes.narrow(-2 if transposed else -1, first // per, min(step, width - first) // per)
        weight = dequantize(part, scale, coding, x.dtype, (first, 0) if transposed else (0, first))
        product[:, first : first + step] = _grouped_mm(x, weight.transpose(-2, -1) if transposed else weight, offsets)
        del weight  # or it would live on while the next one is made
    return product
