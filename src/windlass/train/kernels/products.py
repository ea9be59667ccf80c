"""Products with frozen weights, quantized or not: linear layers, and stacks of experts on their own tokens.

Quantized weights are dequantized just before each product and freed right after it. Only codes are kept for the
backward.

What an adapter adds goes into the product, which adds it to its float32 sums (`added`): the output is rounded once. In
16 bits a product that is rounded first swallows what is smaller than half a step of it, and always towards the base.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from windlass import settings
from windlass.compat import grouped_mm, grouped_product
from windlass.errors import Problem, UserError, raise_all
from windlass.hardware import has_bf16_products
from windlass.model import Base, Parameter
from windlass.model.quantization import published_dtype, quantizable_names
from windlass.settings import FOUR_BITS, PUBLISHED
from windlass.train.kernels import kept, on_cpu
from windlass.weights.fill import kept_scales
from windlass.weights.quantized import StoredFormat, dequantize, get_formats, to_quantized_param
from windlass.weights.reading import DTYPES, NEEDS_SCALE, scale_block

WHERE: Final = "layout.base_dtype"
HINT: Final = "set layout.base_dtype: bf16"


class Rounding:
    """How often an adapted output is rounded: once, or as PEFT and servers do, to measure what that takes."""

    twice: ClassVar[bool] = False


@contextmanager
def as_served(device: torch.device) -> Iterator[None]:
    """Compute as servers in bfloat16 do: a product with the base is rounded before the adapter is added."""
    Rounding.twice = True
    emulated = device.type == "cpu" and not has_bf16_products()
    products = on_cpu.RoundedProducts() if emulated else nullcontext()
    try:
        with torch.autocast(device.type, torch.bfloat16), products:
            yield
    finally:
        Rounding.twice = False


# --- a model whose parameters are quantized ---


def convert_model(model: nn.Module, base: Base, base_dtype: str, dtype: torch.dtype) -> None:
    """Convert a model on the meta device: parameters that are stored in codes, or are to be quantized to 4 bits,
    become codes."""
    problems = []
    as_published = base_dtype == published_dtype(base)
    names = quantizable_names(base) if as_published or base_dtype not in PUBLISHED else frozenset()
    for parameter in base.parameters:
        kinds = list_stored_kinds(parameter)
        stored_in_codes = as_published and kinds.keys() & {*NEEDS_SCALE, base_dtype}
        if parameter.name not in names and not stored_in_codes:
            continue
        owner, _, leaf = parameter.name.rpartition(".")
        module = model.get_submodule(owner)
        coding = choose_format(parameter, base, base_dtype, dtype, as_published=as_published)
        if len(kinds) > 1:
            stored = "; ".join(f"{key!r} is {kind}" for kind, key in sorted(kinds.items()))
            problems.append(
                Problem(f"{parameter.name} is stored in more than one dtype: {stored}", WHERE, HINT, "mixed-dtypes")
            )
        elif coding.columns % 4:
            columns = f"{parameter.name} has {coding.columns} columns: 4 bits take a multiple of 4"
            problems.append(Problem(columns, WHERE, HINT, "columns-of-four"))
        elif type(module) is nn.Linear and owner.rpartition(".")[2] not in base.family.bare:
            model.set_submodule(owner, QuantizedLinear(module, coding))
        elif getattr(module, "is_transposed", None) is coding.transposed:
            to_quantized_param(module, leaf, module.get_parameter(leaf), coding)
        else:
            reader = module
            if type(module) is nn.Linear:
                reader = model.get_submodule(owner.rpartition(".")[0])
            belongs = f"{parameter.name} belongs to {type(reader).__name__}"
            problem = f"{belongs}, which can't compute with {base_dtype.upper()} weights"
            problems.append(Problem(problem, WHERE, HINT, "unsupported-module"))
    if not names:
        problem = f"{base.name} has nothing to quantize"
        if base_dtype in PUBLISHED:
            problem = f"{base.name} is not stored in {base_dtype.upper()}, so it can't be kept in it"
        problems.append(Problem(problem, WHERE, HINT, "nothing-to-quantize"))
    raise_all(problems)


def list_stored_kinds(parameter: Parameter) -> dict[str, str]:
    """Return the dtypes and packed formats that a parameter is stored in, each with a key of the checkpoint."""
    return {piece.packed.kind if piece.packed else piece.stored.dtype: piece.stored.key for piece in parameter.pieces}


def choose_format(
    parameter: Parameter, base: Base, base_dtype: str, dtype: torch.dtype, *, as_published: bool
) -> StoredFormat:
    """Return the meaning of a parameter's bytes: the published one, or 4 bits that the loader quantizes to."""
    packed = parameter.pieces[0].packed
    if packed and as_published:
        columns = parameter.shape[-2 if packed.transposed else -1]
        scales = kept_scales(parameter.pieces[0])
        block = (1, packed.block)
        return StoredFormat(torch.uint8, block, dtype, packed.kind, columns, scales, transposed=packed.transposed)
    if base_dtype in FOUR_BITS:
        block = (1, FOUR_BITS[base_dtype].block)
        return StoredFormat(torch.uint8, block, dtype, base_dtype, parameter.shape[-1])
    codes = DTYPES[next(iter(list_stored_kinds(parameter)))]
    return StoredFormat(codes, scale_block(parameter, base.block), dtype)


class QuantizedLinear(nn.Linear):
    """A linear layer over codes. The weight is frozen: only the input (and the bias) get gradients."""

    weight_scale: Tensor
    formats: dict[str, StoredFormat]

    def __init__(self, linear: nn.Linear, coding: StoredFormat) -> None:
        nn.Module.__init__(self)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        to_quantized_param(self, "weight", linear.weight, coding)
        # PEFT first gives an adapter this dtype; with the weight's, A would be rounded to bytes.
        self.compute_dtype = coding.dtype

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Dequantize the matrix, for each product anew."""
        return _decode(self.weight, self.weight_scale, self.formats["weight"], dtype)

    def forward(self, input: Tensor, added: Tensor | None = None) -> Tensor:
        dtype = choose_dtype(input)
        bias = None if self.bias is None else self.bias.to(dtype)
        if not torch.is_grad_enabled():  # compilers know no `mark_dirty` of a function that no gradient goes through
            return multiply_one(input.to(dtype), self.dense(dtype), bias, added)
        product: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            input.to(dtype), self.weight, self.weight_scale, bias, None, self.formats["weight"], added
        )
        return product


def choose_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that a linear layer computes in: autocast's, or its input's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def linear_with_added(base: nn.Linear, x: Tensor, narrow: Tensor, up: Tensor) -> Tensor:
    """Return x W^T + b + narrow up^T of a frozen linear layer, rounded once."""
    x = x.to(choose_dtype(x))
    if base.bias is not None:  # a sum of three: two would be rounded before the third
        codes, scale, coding = base.weight, None, None
        if isinstance(base, QuantizedLinear):
            scale = base.weight_scale
            coding = base.formats["weight"]
        wide: Tensor = _WideProduct.apply(x, narrow.to(x.dtype), codes, scale, coding, up, base.bias)  # type: ignore[no-untyped-call]
        return wide
    return add_linear(base, x, nn.functional.linear(narrow, up.to(narrow.dtype)).to(x.dtype))


def add_linear(base: nn.Linear, x: Tensor, added: Tensor) -> Tensor:
    """Return x W^T + added of a frozen linear layer without a bias, rounded once."""
    if isinstance(base, QuantizedLinear):
        return base.forward(x, added)
    weight = base.weight.to(x.dtype).t()
    return torch.addmm(added.flatten(0, -2), x.flatten(0, -2), weight).view(added.shape)


class _WideProduct(torch.autograd.Function):
    """[x, narrow] [W, up]^T + b, where only W is frozen: the bias is added to the same float32 sums."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        narrow: Tensor,
        codes: Tensor,
        scale: Tensor | None,
        coding: StoredFormat | None,
        *own: Tensor,
    ) -> Tensor:
        up, bias = own
        ctx.save_for_backward(narrow, codes, scale, up)
        ctx.coding = coding
        ctx.bias_dtype = bias.dtype
        weight = torch.cat([_decode(codes, scale, coding, x.dtype), up.to(x.dtype)], 1)
        rows = torch.cat([x.flatten(0, -2), narrow.flatten(0, -2)], 1)
        return torch.addmm(bias.to(x.dtype), rows, weight.t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        narrow, codes, scale, up = ctx.saved_tensors
        dx = dy @ _decode(codes, scale, ctx.coding, dy.dtype) if ctx.needs_input_grad[0] else None
        rows = dy.flatten(0, -2)
        d_up = (rows.t() @ narrow.flatten(0, -2)).to(up.dtype)
        db = rows.sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[6] else None
        return dx, dy @ up.to(dy.dtype), None, None, None, d_up, db


def _decode(codes: Tensor, scale: Tensor | None, coding: StoredFormat | None, dtype: torch.dtype) -> Tensor:
    if coding is None or scale is None:
        return codes.to(dtype)
    return dequantize(*coding.parts(codes, scale), coding, dtype)


def multiply_one(x: Tensor, dense: Tensor, bias: Tensor | None, added: Tensor | None) -> Tensor:
    """Return x W^T + b of one matrix, or x W^T + added in the memory of `added`."""
    if added is None:
        return nn.functional.linear(x, dense, bias)
    assert bias is None
    added.flatten(0, -2).addmm_(x.flatten(0, -2), dense.t())
    return added


class _Product(torch.autograd.Function):
    """x W^T + b and dy W for one matrix or (with `offsets`) each expert's own, dequantized for each product; into
    `added`, if there is something to add to."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        offsets: Tensor | None,
        coding: StoredFormat,
        added: Tensor | None = None,
    ) -> Tensor:
        ctx.save_for_backward(weight, scale, offsets)
        ctx.coding = coding
        codes, scale = coding.parts(weight, scale)
        if offsets is None:
            product = multiply_one(x, dequantize(codes, scale, coding, x.dtype), bias, added)
        else:
            product = kept.keep_expert_product(
                lambda: expert_products(x, codes, scale, offsets, coding, added, transposed=True)
            )
        if product is added:
            ctx.mark_dirty(added)
        return product

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
        return dx, None, None, db, None, None, dy if ctx.needs_input_grad[6] else None


# --- products of all experts ---


def grouped_linear(x: Tensor, experts: nn.Module, name: str, offsets: Tensor, added: Tensor | None = None) -> Tensor:
    """Multiply each expert's rows of x [tokens, in] (sorted by expert, `offsets` are their ends) by its own matrix, and
    add the products to `added`, in its memory if possible.

    `name` is the parameter [experts, out, in]: gate_up_proj or down_proj. Rows after the last offset belong to no
    expert; their results are undefined.
    """
    if added is not None and Rounding.twice:  # weights in float32 have values of bfloat16
        rounded = grouped_linear(x.bfloat16().to(x.dtype), experts, name, offsets).bfloat16()
        return (rounded + added.bfloat16()).to(x.dtype)
    weight: Tensor = getattr(experts, name)
    coding = get_formats(experts).get(name)
    product: Tensor
    transposed = coding is not None or not getattr(experts, "is_transposed", False)
    narrow = weight.dtype if coding is None else coding.dtype
    if added is not None and x.dtype == narrow and x.element_size() == 2 and not torch.is_grad_enabled():
        # Grouped kernels can't add to what is there, but an evaluation can wait for the host.
        scale = getattr(experts, f"{name}_scale", None)
        if coding is not None and scale is not None:
            weight, scale = coding.parts(weight, scale)
        return multiply_one_by_one(x, weight, scale, offsets, coding, added, transposed=transposed)
    if coding is None:
        if x.dtype == weight.dtype and not weight.requires_grad:
            product = _FrozenProduct.apply(x, weight, offsets, transposed, added)  # type: ignore[no-untyped-call]
            return product
        if kept.keeps_products():
            problem = (
                f"experts' weights are in {weight.dtype}, what they are given in {x.dtype}: products can't be kept"
            )
            hint = "set model.torch_dtype: bfloat16, or train.gradient_checkpointing: true"
            raise UserError(problem.replace("torch.", ""), "train.gradient_checkpointing", hint, "kept-products")
        product = grouped_product(x, weight, offsets, is_transposed=not transposed)
        return product if added is None else product + added
    # As in transformers: products have the weight's dtype, or the input's under mixed precision.
    dtype = x.dtype if x.element_size() < coding.dtype.itemsize else coding.dtype
    scale = getattr(experts, f"{name}_scale")
    added = None if added is None else added.to(dtype)
    product = _Product.apply(x.to(dtype), weight, scale, None, offsets, coding, added)  # type: ignore[no-untyped-call]
    return product


def expert_products(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    offsets: Tensor,
    coding: StoredFormat,
    added: Tensor | None = None,
    *,
    transposed: bool,
) -> Tensor:
    """Return x_e W_e^T (transposed) or x_e W_e for all experts.

    One expert at a time if there are fewer rows than experts, as in generation, or if torch itself would copy the
    offsets to the host: its grouped kernels need Hopper or later (pytorch's Blas.cpp loops over experts otherwise, here
    once per chunk).
    """
    few_rows = x.shape[0] < codes.shape[0]
    has_grouped_kernels = x.is_cuda and torch.cuda.get_device_capability(x.device)[0] >= 9
    if has_grouped_kernels and not few_rows:
        return multiply_all(x, codes, scale, offsets, coding, added, transposed=transposed)
    return multiply_one_by_one(x, codes, scale, offsets, coding, added, transposed=transposed)


class _FrozenProduct(torch.autograd.Function):
    """Each expert's product with its own frozen matrix."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor, transposed: bool, added: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, offsets)
        ctx.transposed = transposed
        product = kept.keep_expert_product(lambda: multiply_frozen(x, weight, offsets, added, transposed=transposed))
        if product is added:
            ctx.mark_dirty(added)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, offsets = ctx.saved_tensors
        dx = multiply_frozen(dy.contiguous(), weight, offsets, transposed=not ctx.transposed)
        return dx, None, None, None, dy if ctx.needs_input_grad[4] else None


def multiply_frozen(
    x: Tensor, weight: Tensor, offsets: Tensor, added: Tensor | None = None, *, transposed: bool
) -> Tensor:
    """Return x_e W_e^T (transposed) or x_e W_e for all experts."""
    if on_cpu.rounds_rows(x):
        return multiply_one_by_one(x, weight, None, offsets, None, added, transposed=transposed)
    product: Tensor = grouped_product(x, weight, offsets, is_transposed=not transposed)
    return product if added is None else added.add_(product)


def multiply_one_by_one(
    x: Tensor,
    codes: Tensor,
    scale: Tensor | None,
    offsets: Tensor,
    coding: StoredFormat | None,
    added: Tensor | None = None,
    *,
    transposed: bool,
) -> Tensor:
    """Multiply one expert at a time, skipping those without tokens. Needs the offsets on the host.

    Where rows are rounded (`on_cpu.rounds_rows`), a product includes some rows of the next experts; those rows are
    overwritten by their own expert's product, or keep what theirs is added to.
    """
    columns = codes.shape[1] if transposed else codes.shape[2] * (coding.per_byte if coding else 1)
    product = x.new_zeros(x.shape[0], columns) if added is None else added
    beta = 0 if added is None else 1
    align = on_cpu.ROWS if on_cpu.rounds_rows(x) else 1
    start = 0
    for expert, stop in enumerate(offsets.tolist()):
        if stop > start:
            weight = codes[expert]
            if coding is not None and scale is not None:
                weight = dequantize(weight, scale[expert], coding, x.dtype)
            weight = weight.T if transposed else weight
            rounded = start + math.ceil((stop - start) / align) * align
            if rounded <= len(x):
                of_next = product[stop:rounded].clone()
                product[start:rounded].addmm_(x[start:rounded], weight, beta=beta)
                product[stop:rounded] = of_next
            else:  # at the end, include preceding rows instead
                first = max(stop - (rounded - start), 0)
                of_all = torch.addmm(product[first:stop], x[first:stop], weight, beta=beta)
                product[start:stop] = of_all[start - first :]
            del weight  # or it would live on while the next one is made
        start = stop
    return product


def multiply_all(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    offsets: Tensor,
    coding: StoredFormat,
    added: Tensor | None = None,
    *,
    transposed: bool,
) -> Tensor:
    """Multiply all experts together, some columns of the product at a time.

    Nothing waits for the host, nothing is summed over chunks (each column is one product), and weights never exist in
    more bytes than the plan counts (`plan.memory`). Experts without tokens are dequantized in vain, but with thousands
    of tokens per micro-batch there are none.
    """
    experts = codes.shape[0]
    rows = codes.shape[1]
    columns = codes.shape[2] * coding.per_byte
    width, other = (rows, columns) if transposed else (columns, rows)
    in_chunk = settings.DEQUANTIZED_BYTES // (experts * other * x.element_size())
    full_tiles = in_chunk // settings.DEQUANTIZED_COLUMNS * settings.DEQUANTIZED_COLUMNS  # and 16-byte strides
    step = max(settings.DEQUANTIZED_COLUMNS, full_tiles)
    product = x.new_empty(x.shape[0], width)
    for first in range(0, width, step):
        per = 1 if transposed else coding.per_byte  # a chunk begins with a byte: 128 columns at least
        part = codes.narrow(-2 if transposed else -1, first // per, min(step, width - first) // per)
        weight = dequantize(part, scale, coding, x.dtype, (first, 0) if transposed else (0, first))
        product[:, first : first + step] = grouped_mm(x, weight.transpose(-2, -1) if transposed else weight, offsets)
        del weight  # or it would live on while the next one is made
    return product if added is None else added.add_(product)
