"""Linear layers for the rows of several trials: one product with the base, and each trial's adapter on its own rows."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from windlass.train.kernels import kept
from windlass.train.kernels.products import add_linear, choose_dtype, linear_with_added


class Random:
    """A trial's random numbers: what torch's generators draw from in its rows, and nowhere else."""

    def __init__(self) -> None:
        self.state = read_state()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Draw from this trial's. A recomputed layer draws what its forward drew."""
        recomputes = kept.KeptValues.current is not None and kept.KeptValues.current.replaying
        outside = read_state()
        set_state(kept.keep_value(lambda: self.state))
        try:
            yield
        finally:
            if not recomputes:
                self.state = read_state()
            set_state(outside)


State = tuple[Tensor, Tensor | None]


def read_state() -> State:
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None


def set_state(state: State) -> None:
    of_cpu, of_gpu = state
    torch.set_rng_state(of_cpu)
    if of_gpu is not None:
        torch.cuda.set_rng_state(of_gpu)


@dataclass(eq=False)
class TrialSlice:
    """Where the rows of one trial are in a micro-batch [rows, columns]."""

    rows: slice
    columns: slice
    random: Random

    def of(self, tensor: Tensor) -> Tensor:
        """Return the trial's part of a tensor [rows, columns, …], as it would be alone."""
        return tensor[self.rows, self.columns]


class Slices:
    """The parts of the micro-batch that is being computed, by trial. All layers look here."""

    def __init__(self, trials: int) -> None:
        self.trials = trials
        self.shape = (0, 0)  # rows and columns of the micro-batch
        self.parts: list[TrialSlice | None] = [None] * trials  # None: a trial without rows in it

    def set(self, shape: tuple[int, int], parts: Sequence[TrialSlice | None]) -> None:
        self.shape = shape
        self.parts = list(parts)
        self.numbers: Tensor | None = None

    def count_tokens(self) -> list[int]:
        """Return how many tokens each trial has, then how many are padding to another trial's width."""
        places = range(self.shape[0]), range(self.shape[1])
        sizes = [0 if part is None else len(places[0][part.rows]) * len(places[1][part.columns]) for part in self.parts]
        return [*sizes, self.shape[0] * self.shape[1] - sum(sizes)]

    def number_tokens(self, device: torch.device) -> Tensor:
        """Return the trial of each token; padding to another trial's width has the number after the last."""
        if self.numbers is None:
            numbers = torch.full(self.shape, self.trials, device=device)
            for number, part in enumerate(self.parts):
                if part is not None:
                    part.of(numbers).fill_(number)
            self.numbers = numbers.flatten()
        return self.numbers


class TrialAdapter(NamedTuple):
    """One trial's adapter of a layer, with its part of the micro-batch."""

    part: TrialSlice
    scaling: float
    dropout: nn.Module
    a: Tensor
    b: Tensor


class SlicedLinear(nn.Module):
    """A frozen linear layer with the adapters that trials have put on it; None for one that has not."""

    def __init__(self, base: nn.Linear, layers: Sequence[Linear | None], slices: Slices) -> None:
        super().__init__()
        self.base = base
        self.layers = list(layers)  # a list hides them: they belong to the trials' own models
        self.slices = slices

    def forward(self, x: Tensor) -> Tensor:
        adapters = list(self.list_adapters())
        if not adapters:
            product: Tensor = self.base(x)
            return product
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None  # None: each its own
        x = x.to(choose_dtype(x))
        if self.base.bias is not None:
            return self.compute_one_by_one(x, adapters, dtype)
        shape = self.slices.shape
        weights = [adapter.a for adapter in adapters] + [adapter.b for adapter in adapters]
        function = LowRankOfEqualParts if are_equal_parts(adapters, shape) else LowRank
        added: Tensor = function.apply(x, shape, adapters, dtype, *weights)
        return add_linear(self.base, x, added)

    def compute_one_by_one(self, x: Tensor, adapters: Sequence[TrialAdapter], dtype: torch.dtype | None) -> Tensor:
        """Compute each trial's rows in a product of its own, as it does alone: a bias is part of that sum."""
        output = self.base(x).clone()
        outputs = output.view(*self.slices.shape, -1)
        inputs = x.reshape(*self.slices.shape, -1)
        for adapter in adapters:
            own = adapter.part.of(inputs)
            own_dtype = dtype or adapter.a.dtype
            with adapter.part.random.use():
                dropped = adapter.dropout(own)
            narrow = nn.functional.linear(dropped.to(own_dtype), adapter.a.to(own_dtype)) * adapter.scaling
            adapter.part.of(outputs).copy_(linear_with_added(self.base, own, narrow, adapter.b))
        return output  # type: ignore[no-any-return]

    def list_adapters(self) -> Iterator[TrialAdapter]:
        for part, layer in zip(self.slices.parts, self.layers, strict=True):
            if part is not None and layer is not None:
                (name,) = layer.active_adapters
                a = layer.lora_A[name].weight
                b = layer.lora_B[name].weight
                yield TrialAdapter(part, layer.scaling[name], layer.lora_dropout[name], a, b)


class LowRank(torch.autograd.Function):
    """s (drop(x) A^T) B^T, in each trial's part with its own s, A, B and random numbers; zero in others' parts.

    The backward keeps x, which all adapters of this input share, x A^T, and dropout's factors.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shape: tuple[int, int],
        adapters: Sequence[TrialAdapter],
        dtype: torch.dtype | None,
        *weights: Tensor,
    ) -> Tensor:
        inputs = x.reshape(*shape, -1)
        y = x.new_zeros(*x.shape[:-1], len(adapters[0].b))
        outputs = y.view(*shape, -1)
        factors = [draw_for(adapter, inputs) for adapter in adapters]
        narrow = []
        for adapter, factor in zip(adapters, factors, strict=True):
            own_dtype = dtype or adapter.a.dtype
            rows = take_rows(adapter.part, inputs, factor, own_dtype)
            narrow.append(rows @ adapter.a.t().to(own_dtype))
            wide = (narrow[-1] * adapter.scaling) @ adapter.b.t().to(own_dtype)
            own = adapter.part.of(outputs)
            own.copy_(wide.view(own.shape))
        ctx.shape = shape
        ctx.adapters = adapters
        ctx.save_for_backward(x, *weights, *narrow, *(factor for factor in factors if factor is not None))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        count = len(ctx.adapters)
        x, *saved = ctx.saved_tensors
        a_of, b_of, narrow_of = (saved[start * count : (start + 1) * count] for start in range(3))
        drawn = iter(saved[3 * count :])
        inputs = x.reshape(*ctx.shape, -1)
        gradients = grad_y.reshape(*ctx.shape, -1)
        grad_x = torch.zeros_like(inputs) if ctx.needs_input_grad[0] else None
        grads_a = []
        grads_b = []
        for adapter, a, b, narrow in zip(ctx.adapters, a_of, b_of, narrow_of, strict=True):
            factor = next(drawn) if has_dropout(adapter) else None
            rows = take_rows(adapter.part, inputs, factor, narrow.dtype)
            grad_rows = take_rows(adapter.part, gradients, None, narrow.dtype) * adapter.scaling
            grad_narrow = grad_rows @ b.to(narrow.dtype)
            grads_b.append((grad_rows.t() @ narrow).to(b.dtype))
            grads_a.append((grad_narrow.t() @ rows).to(a.dtype))
            if grad_x is not None:
                own = adapter.part.of(grad_x)
                grad_own = (grad_narrow @ a.to(narrow.dtype)).view(own.shape)
                own.copy_(grad_own if factor is None else grad_own * factor)
        grad_x = None if grad_x is None else grad_x.view(x.shape)
        return grad_x, None, None, None, *grads_a, *grads_b


def are_equal_parts(adapters: Sequence[TrialAdapter], shape: tuple[int, int]) -> bool:
    """Return whether the micro-batch is as many equal parts, one after the other; not if it has others' parts, too.

    Parts of different width have as many rows: padding to another trial's width has a gradient of zero.
    """
    rows, columns = shape
    parts = [adapter.part for adapter in adapters]
    starts = [part.rows.start * columns + part.columns.start for part in parts]
    ends = [part.columns.stop if rows == 1 else part.rows.stop * columns for part in parts]
    each, left = divmod(rows * columns, len(adapters))
    places = enumerate(zip(starts, ends, strict=True))
    equal = all(place == (number * each, (number + 1) * each) for number, place in places)
    return equal and not left and len({adapter.a.dtype for adapter in adapters}) == 1


class LowRankOfEqualParts(torch.autograd.Function):
    """What `LowRank` computes, for equal parts: as many kernels for all trials as for one."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shape: tuple[int, int],
        adapters: Sequence[TrialAdapter],
        dtype: torch.dtype | None,
        *weights: Tensor,
    ) -> Tensor:
        dtype = dtype or weights[0].dtype
        count = len(adapters)
        down = stack(weights[:count], dtype)
        up = stack(weights[count:], dtype)
        factors = draw_for_all(adapters, x.reshape(*shape, -1))
        dropped = x if factors is None else x * factors.view(x.shape)
        rows = dropped.reshape(count, -1, x.shape[-1]).to(dtype)
        narrow = torch.bmm(rows, down.transpose(1, 2))
        torch._foreach_mul_(list(narrow), [adapter.scaling for adapter in adapters])
        ctx.adapters = adapters
        ctx.save_for_backward(x, factors, narrow, down, up)
        y = x.new_empty(*x.shape[:-1], up.shape[1])
        y.view(count, -1, y.shape[-1]).copy_(torch.bmm(narrow, up.transpose(1, 2)))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        x, factors, narrow, down, up = ctx.saved_tensors
        count = len(down)
        dropped = x if factors is None else x * factors.view(x.shape)
        rows = dropped.reshape(count, -1, x.shape[-1]).to(down.dtype)
        grad_rows = grad_y.reshape(count, -1, grad_y.shape[-1]).to(down.dtype)
        grad_narrow = torch.bmm(grad_rows, up)
        torch._foreach_mul_(list(grad_narrow), [adapter.scaling for adapter in ctx.adapters])
        grad_x = torch.bmm(grad_narrow, down).to(x.dtype).view(x.shape) if ctx.needs_input_grad[0] else None
        if grad_x is not None and factors is not None:
            grad_x *= factors.view(x.shape)
        dtype = ctx.adapters[0].a.dtype
        grads_a = torch.bmm(grad_narrow.transpose(1, 2), rows).to(dtype)
        grads_b = torch.bmm(grad_rows.transpose(1, 2), narrow).to(dtype)
        own_a = [grad[: len(one.a)] for grad, one in zip(grads_a, ctx.adapters, strict=True)]
        own_b = [grad[:, : len(one.a)] for grad, one in zip(grads_b, ctx.adapters, strict=True)]
        return grad_x, None, None, None, *own_a, *own_b


def stack(matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return matrices as one tensor of this dtype, with zeros where one has a smaller r."""
    rows, columns = (max(matrix.shape[i] for matrix in matrices) for i in range(2))
    stacked = matrices[0].new_zeros(len(matrices), rows, columns, dtype=dtype)
    places = [own[: len(one), : one.shape[1]] for own, one in zip(stacked, matrices, strict=True)]
    torch._foreach_copy_(places, list(matrices))
    return stacked


def has_dropout(adapter: TrialAdapter) -> bool:
    return isinstance(adapter.dropout, nn.Dropout) and adapter.dropout.p > 0


def draw_for(adapter: TrialAdapter, x: Tensor) -> Tensor | None:
    """Return what dropout multiplies a trial's rows by."""
    if not has_dropout(adapter):
        return None
    ones = torch.ones_like(adapter.part.of(x), memory_format=torch.contiguous_format)
    return draw_factors(adapter.dropout, ones, adapter.part.random)


def draw_for_all(adapters: Sequence[TrialAdapter], x: Tensor) -> Tensor | None:
    """Return what dropout multiplies all trials' rows by: 1 where a trial has none."""
    factors = None
    for adapter in adapters:
        own = draw_for(adapter, x)
        if own is not None:
            factors = torch.ones_like(x) if factors is None else factors
            adapter.part.of(factors).copy_(own)
    return factors


def draw_factors(dropout: nn.Module, ones: Tensor, random: Random) -> Tensor:
    """Return dropout's factors in the shape of `ones`, as the trial would draw them alone."""
    with random.use():
        factors: Tensor = dropout(ones)
        return factors


def take_rows(part: TrialSlice, x: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return a trial's rows [tokens, width], times dropout's factors."""
    own = part.of(x)
    dropped = own if factor is None else own * factor
    return dropped.reshape(-1, x.shape[-1]).to(dtype)


def combine(inputs: Sequence[dict[str, Any]], starts: Sequence[TrialSlice], shape: tuple[int, int]) -> dict[str, Any]:
    """Return the arguments of one forward for the rows of several micro-batches, padded to one width or laid end to
    end."""
    rows, columns = shape
    names = ("input_ids", "position_ids") if any("position_ids" in one for one in inputs) else ("input_ids",)
    combined: dict[str, Any] = {"several": any(one["several"] for one in inputs)}
    for name in names:
        whole = inputs[0]["input_ids"].new_zeros(rows, columns)
        for one, part in zip(inputs, starts, strict=True):
            own = part.of(whole)
            own.copy_(one[name] if name in one else torch.arange(own.shape[1], device=own.device))
        combined[name] = whole
    if "cu_seq_lens_q" in inputs[0]:  # laid end to end
        combined |= combine_documents(inputs)
    elif all("document_edges" in one for one in inputs):
        combined |= combine_edges(inputs, columns)
    supervised = []
    for one, part in zip(inputs, starts, strict=True):
        width = one["input_ids"].shape[1]
        row = one["supervised"] // width + part.rows.start
        supervised.append(row * columns + one["supervised"] % width + part.columns.start)
    combined["supervised"] = torch.cat(supervised)
    return combined


def combine_documents(inputs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the boundaries of all documents of rows that are laid end to end."""
    edges: list[Tensor] = []
    numbers: list[Tensor] = []
    tokens = documents = 0
    for one in inputs:
        edges.append(one["cu_seq_lens_q"][bool(edges) :] + tokens)
        numbers.append(one["seq_idx"] + documents)
        tokens += one["input_ids"].shape[1]
        documents += len(one["cu_seq_lens_q"]) - 1
    longest = max(one["max_length_q"] for one in inputs)
    return {
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.cat(edges)),
        **dict.fromkeys(("max_length_q", "max_length_k"), longest),
        "seq_idx": torch.cat(numbers, 1),
    }


def combine_edges(inputs: Sequence[dict[str, Any]], columns: int) -> dict[str, Any]:
    """Return the boundaries of all documents of rows below each other. What fills up a row is a document too."""
    edges: list[Tensor] = []
    above = 0
    longest = 0
    for one in inputs:
        rows, width = one["input_ids"].shape
        own = one["document_edges"]
        starts = own[:-1] // width * columns + own[:-1] % width
        if width < columns:
            fillers = torch.arange(rows, dtype=own.dtype, device=own.device) * columns + width
            starts = torch.cat([starts, fillers]).sort().values
        edges.append(starts + above)
        above += rows * columns
        longest = max(longest, one["longest_document"], columns - width)
    edges.append(edges[0].new_full((1,), above))
    return {"document_edges": torch.cat(edges), "longest_document": longest}


def place_parts(
    inputs: Sequence[dict[str, Any]], randoms: Sequence[Random]
) -> tuple[tuple[int, int], list[TrialSlice]]:
    """Return the shape of the common micro-batch, and where each trial's rows are in it."""
    shapes = [tuple(one["input_ids"].shape) for one in inputs]
    parts = []
    if all("cu_seq_lens_q" in one for one in inputs):
        start = 0
        for (_, width), random in zip(shapes, randoms, strict=True):
            parts.append(TrialSlice(slice(0, 1), slice(start, start + width), random))
            start += width
        return (1, start), parts
    first = 0
    for (rows, width), random in zip(shapes, randoms, strict=True):
        parts.append(TrialSlice(slice(first, first + rows), slice(0, width), random))
        first += rows
    return (first, max(width for _, width in shapes)), parts
