"""Expert parallelism: send tokens to the ranks that have their experts, and back.

While tokens are exchanged, the rank computes its shared experts: the exchange is started, the shared experts run, then
it is waited for. In the backward their gradients overlap with the exchange of gradients in the same way.
"""

from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from windlass.compat import AllToAllEP, EPImplementationInterface
from windlass.train.experts.experts import (
    SortedRows,
    is_unsupported,
    number_groups,
    run_sorted_experts,
    sort_rows,
    sum_weighted,
    take_rows,
)
from windlass.train.experts.shared import SharedExperts
from windlass.train.kernels import kept

NAME: Final = "windlass"  # of this implementation among transformers' own


class Exchange(AllToAllEP):  # type: ignore[misc]
    """The exchange of one layer. The host waits once, for the number of tokens each rank sends: NCCL takes sizes from
    the host. With checkpointing, the recomputation reuses these numbers."""

    def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts: Any = experts
        self.shared: SharedExperts | None = None
        self.experts.exchange = self

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if is_unsupported(self.experts):  # these are never adapted: see `Patches.patch_experts`
            kept.refuse_experts(self.experts)
            plain: Tensor = super().__call__(hidden_states, top_k_index, top_k_weights)
            return plain
        ranks = self.ep_mesh.size()
        group = self.ep_mesh.get_group()
        index, groups = number_groups(self.experts, top_k_index)
        own = self.num_local_experts * groups
        by_expert = sort_rows(index.flatten(), ranks * own)

        # For each rank's experts, where each expert's rows begin and end, on this rank and on the ranks that send.
        def exchange_edges() -> list[list[list[int]]]:
            edges = by_expert.edges.new_empty(2, ranks, own + 1)
            edges[0] = by_expert.edges.unfold(0, own + 1, own)
            dist.all_to_all_single(edges[1], edges[0], group=group)
            return edges.tolist()

        ours, theirs = kept.keep_value(exchange_edges)
        top_k_weights = kept.require_same_routing(top_k_weights, by_expert.order)
        sent = [edges[-1] - edges[0] for edges in ours]
        received = [edges[-1] - edges[0] for edges in theirs]
        there = RowExchange(sent, received, group)
        back = RowExchange(received, sent, group, self.shared)

        rows = take_rows(hidden_states, by_expert.order // top_k_index.shape[-1], by_expert.back)
        arriving = StartExchange.apply(rows, there)  # type: ignore[no-untyped-call]
        here = sort_received(theirs, hidden_states.device)
        if self.shared:
            self.shared.compute(hidden_states)
        rows = WaitForExchange.apply(arriving, there)  # type: ignore[no-untyped-call]
        # One row of zeros, so that gradients go through the same collectives on every rank.
        empty = not sum(received)
        if empty:
            rows = rows.sum(dim=0, keepdim=True)
            here = sort_rows(here.order.new_zeros(1), own)
        result = take_rows(run_sorted_experts(self.experts, rows, here.order, here), here.back, here.order)
        answers = WaitForExchange.apply(StartExchange.apply(result[:0] if empty else result, back), back)  # type: ignore[no-untyped-call]
        return sum_weighted(take_rows(answers, by_expert.back, by_expert.order), top_k_weights)


if EPImplementationInterface is not None:
    EPImplementationInterface.register(NAME, Exchange)


def sort_received(edges: list[list[int]], device: torch.device) -> SortedRows:
    """Sort rows that arrive from each rank in expert order by expert, given the edges of each rank's rows."""
    counts = np.diff(np.array(edges))  # [ranks, experts]
    first = (np.cumsum(counts) - counts.ravel()).reshape(counts.shape)  # position at which each block arrives
    lengths = counts.T.ravel()
    ends = np.cumsum(counts.T)
    shifts = first.T.ravel() - (ends - lengths)
    known = [*shifts.tolist(), *lengths.tolist(), 0, *ends[len(edges) - 1 :: len(edges)].tolist()]
    copied = torch.tensor(known, dtype=torch.int32, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    shift, length, by_expert = torch.split(copied, [len(shifts), len(shifts), counts.shape[1] + 1])
    numbers = torch.arange(int(ends[-1]), device=device)
    order = torch.repeat_interleave(shift, length, output_size=len(numbers)) + numbers
    return SortedRows(order, torch.empty_like(order).scatter_(0, order, numbers), by_expert)


class RowExchange:
    """One exchange of rows, and of their gradients in the opposite direction."""

    def __init__(
        self, sent: list[int], received: list[int], group: dist.ProcessGroup, shared: SharedExperts | None = None
    ) -> None:
        self.sent = sent
        self.received = received
        self.group = group
        self.shared = shared
        self.pending: Any = None
        self.gradient: Tensor | None = None

    def start(self, rows: Tensor, *, back: bool) -> Tensor:
        sizes = (self.sent, self.received) if back else (self.received, self.sent)
        arriving = rows.new_empty(sum(sizes[0]), *rows.shape[1:])
        self.pending = dist.all_to_all_single(arriving, rows.contiguous(), *sizes, group=self.group, async_op=True)
        return arriving

    def wait(self) -> None:
        if self.pending is not None:  # None if the rows were kept for the recomputation
            self.pending.wait()
            self.pending = None


class StartExchange(torch.autograd.Function):
    """Starts an exchange. Its output is valid only after `WaitForExchange`, whose backward starts that of gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: RowExchange) -> Tensor:
        ctx.way = way
        return kept.keep_expert_product(lambda: way.start(rows, back=False))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:
        ctx.way.wait()
        gradient = ctx.way.gradient
        ctx.way.gradient = None
        return gradient, None


class WaitForExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arriving: Tensor, way: RowExchange) -> Tensor:
        ctx.way = way
        way.wait()
        return arriving

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.way.shared:  # a recomputation stops before the layer takes them
            ctx.way.shared.computed = None
        ctx.way.gradient = ctx.way.start(gradient, back=True)
        return gradient, None  # has the right shape; its values are never read
