"""Routed experts for the rows of several trials: sorted by expert and trial, one product with the base for all, and
each trial's adapter on its own rows."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from windlass.train.experts.experts import add_low_rank, low_rank_gradients, pack_grad_b, stack_by_expert
from windlass.train.kernels import kept
from windlass.train.kernels.products import grouped_linear
from windlass.train.kernels.slices import Slices, draw_factors
from windlass.weights.expert_shards import pack_experts


class Slot(NamedTuple):
    """One trial's adapter of a stack of experts."""

    number: int  # of its rows among those of an expert
    scaling: float
    r: int


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
        base = grouped_linear(rows, experts, name, edges[self.groups :: self.groups])
        found = [
            (number, wrapper)
            for number, wrapper in enumerate(self.adapters.get(name, ()))
            if wrapper is not None and self.slices.parts[number] is not None
        ]
        if not found:
            return base
        slots = []
        weights = []
        for number, wrapper in found:
            (adapter,) = wrapper.active_adapters
            a = wrapper.lora_A[adapter].weight
            weights += [a, wrapper.lora_B[adapter].weight]
            slots.append(Slot(number, wrapper.scaling[adapter], len(a) * self.groups // (len(edges) - 1)))
        factors = self.draw_factors(dict(found), rows, edges)
        dropped = rows
        if factors is not None:
            dropped = rows * factors
            source = dropped
            rows_of = Tensor.detach  # these are the rows themselves
        added: Tensor = AddLowRank.apply(  # type: ignore[no-untyped-call]
            base, dropped, source.detach(), rows_of, edges, self.groups, slots, *weights
        )
        return added

    def draw_factors(self, wrappers: Mapping[int, Any], rows: Tensor, edges: Tensor) -> Tensor | None:
        """Return what dropout multiplies rows by: in each trial's, the numbers that it would draw for them alone."""
        group = torch.repeat_interleave(torch.diff(edges), output_size=len(rows)) % self.groups
        factors = None
        for number, wrapper in wrappers.items():
            (adapter,) = wrapper.active_adapters
            part = self.slices.parts[number]
            dropout = wrapper.lora_dropout[adapter]
            if part is not None and isinstance(dropout, nn.Dropout) and dropout.p:
                own = (group == number).nonzero().squeeze(1)
                factors = torch.ones_like(rows) if factors is None else factors
                factors[own] = draw_factors(dropout, factors[own], part.random)
        return factors


class AddLowRank(torch.autograd.Function):
    """base + s (x A) B, with the A and B of each group's expert and trial, written into base's memory."""

    @staticmethod
    def forward(
        ctx: Any,
        base: Tensor,
        x: Tensor,
        source: Tensor,
        rows_of: Callable[[Tensor], Tensor],
        edges: Tensor,
        groups: int,
        slots: Sequence[Slot],
        *weights: Tensor,
    ) -> Tensor:
        def add() -> Tensor:
            down, up = stack_groups(weights, slots, len(edges) - 1, groups, base.dtype)
            return add_low_rank(base, x, down, up, edges)

        narrow = kept.keep_expert_product(add)
        ctx.mark_dirty(base)
        ctx.save_for_backward(source, edges, narrow, *weights)
        ctx.rows_of = rows_of
        ctx.groups = groups
        ctx.slots = slots
        ctx.dtype = x.dtype
        return base

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        source, edges, narrow, *weights = ctx.saved_tensors
        down, up = stack_groups(weights, ctx.slots, len(edges) - 1, ctx.groups, narrow.dtype)
        grad_x, grad_a, grad_b = low_rank_gradients(
            gradient, ctx.rows_of(source), narrow, down, up, edges, ctx.dtype if ctx.needs_input_grad[1] else None
        )
        grads: list[Tensor] = []
        for slot, a, b in zip(ctx.slots, weights[::2], weights[1::2], strict=True):
            own_a = grad_a[slot.number :: ctx.groups, : slot.r]
            own_b = grad_b[slot.number :: ctx.groups, : slot.r]
            grads += [pack_experts(".lora_A.", own_a).to(a.dtype), pack_grad_b(own_b, b, slot.scaling)]
        return gradient, grad_x, None, None, None, None, None, *grads


def stack_groups(
    weights: Sequence[Tensor], slots: Sequence[Slot], count: int, groups: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return A as [groups of all experts, r, in] and s B as [groups of all experts, r, out], zeros where a trial has
    no adapter or a smaller r."""
    pairs = [
        stack_by_expert(a, b, count // groups, slot.scaling, dtype)
        for slot, a, b in zip(slots, weights[::2], weights[1::2], strict=True)
    ]
    stacked = []
    for matrices in zip(*pairs, strict=True):
        r = max(matrix.shape[1] for matrix in matrices)
        whole = matrices[0].new_zeros(count // groups, groups, r, matrices[0].shape[2])
        for slot, matrix in zip(slots, matrices, strict=True):
            whole[:, slot.number, : matrix.shape[1]] = matrix
        stacked.append(whole.flatten(0, 1))
    return stacked[0], stacked[1]
