"""Routed experts for the rows of several trials: sorted by expert and trial, one product with the base for all, and
each trial's adapter on its own rows, with the products that it has alone."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from windlass.sweep.slices import Slices, draw_factors
from windlass.train.experts.experts import low_rank, low_rank_gradients, pack_gradients, stack_by_expert
from windlass.train.kernels import kept
from windlass.train.kernels.products import grouped_linear


class Slot(NamedTuple):
    """One trial's adapter of a stack of experts, and its rows."""

    places: Tensor  # of its rows among all
    edges: Tensor  # 0, then where each expert's rows end among its own
    scaling: float


class SlicedExperts:
    """The trials' adapters of a layer's experts. The rows of an expert are those of each trial, then padding."""

    def __init__(self, adapters: Mapping[str, Sequence[Any]], slices: Slices) -> None:
        self.adapters = adapters  # by parameter: PEFT's container of each trial, or None
        self.slices = slices

    @property
    def groups(self) -> int:
        """Return how many groups of rows an expert has, on every rank: padding to another trial's width is one."""
        return self.slices.trials + 1

    def number(self, top_k_index: Tensor) -> Tensor:
        """Return the group of each token and expert."""
        return top_k_index * self.groups + self.slices.number_tokens(top_k_index.device)[:, None]

    def product(
        self, experts: nn.Module, name: str, source: Tensor, rows_of: Callable[[Tensor], Tensor], edges: Tensor
    ) -> Tensor:
        """Return what `expert_product` returns, for all trials."""
        rows = rows_of(source)
        ends = edges[self.groups :: self.groups].contiguous()  # as torch 2.15 requires of offsets
        found = [
            (number, wrapper)
            for number, wrapper in enumerate(self.adapters.get(name, ()))
            if wrapper is not None and self.slices.parts[number] is not None
        ]
        if not found:
            return grouped_linear(rows, experts, name, ends)
        split = self.split(edges, len(rows), waits=hasattr(experts, "exchange"))
        slots = []
        weights = []
        factors = None  # what dropout multiplies rows by
        for number, wrapper in found:
            (adapter,) = wrapper.active_adapters
            slots.append(Slot(*split[number], wrapper.scaling[adapter]))
            weights += [wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight]
            dropout = wrapper.lora_dropout[adapter]
            part = self.slices.parts[number]
            if part is not None and isinstance(dropout, nn.Dropout) and dropout.p:
                factors = torch.ones_like(rows) if factors is None else factors
                places = slots[-1].places
                factors[places] = draw_factors(dropout, factors[places], part.random)
        dropped = rows
        if factors is not None:
            dropped = rows * factors
            source = dropped
            rows_of = Tensor.detach  # these are the rows themselves
        added: Tensor = ExpertLowRank.apply(dropped, source.detach(), rows_of, slots, *weights)  # type: ignore[no-untyped-call]
        return grouped_linear(rows, experts, name, ends, added)

    def split(self, edges: Tensor, rows: int, *, waits: bool) -> list[tuple[Tensor, Tensor]]:
        """Return the places of each trial's rows, and their edges by expert.

        waits: the host reads from the device how many rows each trial has, because other ranks have sent them.
        """
        sizes = torch.diff(edges)
        group = torch.repeat_interleave(sizes, output_size=rows) % self.groups
        of_groups = sizes.view(-1, self.groups)
        if waits:
            counts = of_groups.sum(0).tolist()
        else:
            tokens = self.slices.count_tokens()
            counts = [count * rows // sum(tokens) for count in tokens]
        places = torch.split(torch.sort(group, stable=True).indices, counts)
        ends = nn.functional.pad(of_groups.cumsum(0), (0, 0, 1, 0)).int().t().contiguous()
        return list(zip(places, ends, strict=True))


class ExpertLowRank(torch.autograd.Function):
    """s (x A) B, with each trial's A and B on its own rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        source: Tensor,
        rows_of: Callable[[Tensor], Tensor],
        slots: Sequence[Slot],
        *weights: Tensor,
    ) -> Tensor:
        product = x.new_zeros(len(x), weights[1].shape[0])

        def multiply(slot: Slot, a: Tensor, b: Tensor) -> Tensor:
            if not len(slot.places):
                return x.new_empty(0)
            down, up = stack_by_expert(a, b, len(slot.edges) - 1, slot.scaling, x.dtype)
            product[slot.places], narrow = low_rank(x[slot.places], down, up, slot.edges)
            return narrow

        trials = zip(slots, weights[::2], weights[1::2], strict=True)
        narrow = [kept.keep_expert_product(partial(multiply, *trial)) for trial in trials]
        ctx.save_for_backward(source, *narrow, *weights)
        ctx.rows_of = rows_of
        ctx.slots = slots
        ctx.dtype = x.dtype
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        source, *saved = ctx.saved_tensors
        count = len(ctx.slots)
        weights = saved[count:]
        x = ctx.rows_of(source)
        grad_x = torch.zeros_like(x) if ctx.needs_input_grad[0] else None
        grads: list[Tensor] = []
        for slot, narrow, a, b in zip(ctx.slots, saved[:count], weights[::2], weights[1::2], strict=True):
            if not len(slot.places):  # other ranks have its rows
                grads += [torch.zeros_like(a), torch.zeros_like(b)]
                continue
            experts = len(slot.edges) - 1
            down, up = stack_by_expert(a, b, experts, slot.scaling, narrow.dtype)
            dtype = None if grad_x is None else ctx.dtype
            rows = gradient[slot.places], x[slot.places], narrow
            grad_rows, grad_a, grad_b = low_rank_gradients(*rows, down, up, slot.edges, dtype)
            if grad_x is not None and grad_rows is not None:
                grad_x[slot.places] = grad_rows
            grads += pack_gradients(grad_a, grad_b, a, b, slot.scaling)
        return grad_x, None, None, None, *grads
