"""Routed experts with unmerged adapters: y = s (drop(x) A) B + x W for each expert, on its own tokens.

PEFT merges each expert's adapter into its weight: W + s B A of all experts, with a full gradient and without dropout.
Here W stays as it is. An adapter costs two narrow products and keeps one narrow activation for the backward. PEFT's
ParamWrapper remains the container, so files are PEFT's; only its forward is bypassed.

Registered as an experts implementation of transformers (`config._experts_implementation`), for every family with fused
experts. Products with the base go through `grouped_linear`, so the base may be quantized.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from windlass.compat import has_post_expert_norm
from windlass.train.kernels import kept, on_cpu
from windlass.train.kernels.products import grouped_linear
from windlass.weights.expert_shards import get_expert_shard, pack_experts, view_by_expert
from windlass.weights.quantized import get_formats

NAME: Final = "windlass"  # of this implementation among transformers' own
ALIGN: Final = 8  # grouped kernels want rows to begin at multiples of 16 bytes: 8 columns of 16 bits


def experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the experts. Under expert parallelism it gets this rank's experts and the tokens sent to them.

    Every token then belongs to one of these experts. transformers passes on tokens of other ranks' experts only where
    an expert group shares a batch, under tensor parallelism, which windlass does not have.
    """
    experts: Any = self
    if is_unsupported(experts):  # never adapted: see `Patches.patch_experts`
        kept.refuse_experts(experts)
        plain: Tensor = grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
        return plain
    index, groups = number_groups(experts, top_k_index)
    by_expert = sort_rows(index.flatten(), experts.num_experts * groups)
    if kept.keeps_products():
        top_k_weights = kept.require_same_routing(top_k_weights, by_expert.order)
    result = run_sorted_experts(experts, hidden_states, by_expert.order // top_k_index.shape[-1], by_expert)
    # Weighted after un-sorting: the weights are usually float32, and then so are the products.
    return sum_weighted(take_rows(result, by_expert.back, by_expert.order), top_k_weights).to(hidden_states.dtype)


def number_groups(experts: Any, top_k_index: Tensor) -> tuple[Tensor, int]:
    """Return the group of rows that each token is in, and how many an expert has: one, or more if adapters share it."""
    sliced = getattr(experts, "sliced", None)
    return (sliced.number(top_k_index), sliced.groups) if sliced else (top_k_index, 1)


class SortedRows(NamedTuple):
    """Rows sorted by expert."""

    order: Tensor  # row number at each sorted position
    back: Tensor  # sorted position of each row
    edges: Tensor  # 0, then where each expert's rows end

    @property
    def groups(self) -> Tensor:
        """Return the expert of each sorted position, or its group if an expert has several."""
        return torch.repeat_interleave(torch.diff(self.edges), output_size=len(self.order))


def sort_rows(experts: Tensor, count: int) -> SortedRows:
    # Stable: dropout then draws the same numbers for a token, whichever others are sorted along with it.
    chosen, order = torch.sort(experts, stable=True)
    numbers = torch.arange(-1, max(len(order), count), device=order.device)
    # Not bincount: it reads the largest number from the GPU and so waits for it.
    edges = torch.searchsorted(chosen, numbers[: count + 1], right=True, out_int32=True)
    back = torch.empty_like(order).scatter_(0, order, numbers[1 : len(order) + 1])
    return SortedRows(order, back, edges)


def run_sorted_experts(experts: Any, source: Tensor, row: Tensor, by_expert: SortedRows) -> Tensor:
    """Run the experts on rows sorted by expert; `row[i]` is the row of `source` at sorted position i."""
    gate_up = expert_product(
        experts, "gate_up_proj", source, lambda rows: take_rows(rows, row, by_expert.back), by_expert.edges
    )
    groups = experts.sliced.groups if hasattr(experts, "sliced") else 1
    if experts.has_bias:
        gate_up = gate_up + experts.gate_up_proj_bias[by_expert.groups // groups]
    result = expert_product(experts, "down_proj", gate_up, experts._apply_gate, by_expert.edges)
    return result + experts.down_proj_bias[by_expert.groups // groups] if experts.has_bias else result


def sum_weighted(rows: Tensor, weights: Tensor) -> Tensor:
    """Return each token's weighted sum over its slots, in slot order: deterministic, unlike adding into rows."""
    return (rows.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def is_unsupported(experts: Any) -> bool:
    """Return whether these experts are anything but two products on their own tokens, with gate and up fused."""
    return not getattr(experts, "has_gate", False) or has_post_expert_norm(experts)


class TakeRows(torch.autograd.Function):
    """rows[index], where every row is taken equally often: for the n-th time at position inverse[row, n].

    The gradient is a gather too, summed in slot order. Indexing's own gradient adds into rows, after a sort on a GPU
    and one by one on a CPU.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.shape = (len(rows), len(index) // max(len(rows), 1), *rows.shape[1:])
        return rows[index]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        rows = gradient[inverse]
        return (rows if ctx.shape[1] == 1 else rows.view(ctx.shape).sum(dim=1)), None, None


def take_rows(rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    taken: Tensor = TakeRows.apply(rows, index, inverse)  # type: ignore[no-untyped-call]
    return taken


def expert_product(
    experts: nn.Module, name: str, source: Tensor, rows_of: Callable[[Tensor], Tensor], edges: Tensor
) -> Tensor:
    """Return sorted rows times each expert's matrix, plus its adapter's output.

    The backward recomputes the rows from `source`, which is kept for another reason anyway.
    """
    sliced = getattr(experts, "sliced", None)
    if sliced:  # the rows of several adapters
        of_all: Tensor = sliced.product(experts, name, source, rows_of, edges)
        return of_all
    rows = rows_of(source)
    lora = getattr(experts, "adapters", {}).get(name)
    if lora is None or lora.disable_adapters or lora.merged:
        return grouped_linear(rows, experts, name, edges[1:])
    (adapter,) = lora.active_adapters
    a = lora.lora_A[adapter].weight
    b = lora.lora_B[adapter].weight
    dropped = lora.lora_dropout[adapter](rows)
    if dropped is not rows:
        source = dropped
        rows_of = Tensor.detach  # these are the rows themselves
    added: Tensor = _LowRank.apply(  # type: ignore[no-untyped-call]
        dropped, source.detach(), rows_of, edges, a, b, lora.scaling[adapter]
    )
    return grouped_linear(rows, experts, name, edges[1:], added)


class _LowRank(torch.autograd.Function):
    """s (x A) B. The backward keeps s x A in addition to what is kept anyway."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        source: Tensor,
        rows_of: Callable[[Tensor], Tensor],
        edges: Tensor,
        a: Tensor,
        b: Tensor,
        scaling: float,
    ) -> Tensor:
        product = x.new_empty(0)  # if x A is kept, so is the sum with the base's product

        def multiply() -> Tensor:
            nonlocal product
            down, up = stack_by_expert(a, b, len(edges) - 1, scaling, x.dtype)
            product, narrow = low_rank(x, down, up, edges)
            return narrow

        narrow = kept.keep_expert_product(multiply)
        ctx.save_for_backward(source, edges, a, b, narrow)
        ctx.rows_of = rows_of
        ctx.scaling = scaling
        ctx.dtype = x.dtype
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        source, edges, a, b, narrow = ctx.saved_tensors
        experts = len(edges) - 1
        down, up = stack_by_expert(a, b, experts, ctx.scaling, narrow.dtype)
        grad_x, grad_a, grad_b = low_rank_gradients(
            gradient, ctx.rows_of(source), narrow, down, up, edges, ctx.dtype if ctx.needs_input_grad[0] else None
        )
        return grad_x, None, None, None, *pack_gradients(grad_a, grad_b, a, b, ctx.scaling), None


def low_rank(x: Tensor, down: Tensor, up: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """Return (x A) B of each expert's rows, and x A."""
    products = []
    narrow = []
    for part in split_by_expert(x, up.shape[2], edges):
        rows = part.take(x).to(up.dtype)
        narrow.append(grouped_mm(rows, part.of(down).transpose(1, 2), offs=part.ends))
        products.append(grouped_mm(narrow[-1], part.of(up), offs=part.ends).to(x.dtype))
    return join(products), join_aligned(narrow)


def low_rank_gradients(
    gradient: Tensor, x: Tensor, narrow: Tensor, down: Tensor, up: Tensor, edges: Tensor, dtype: torch.dtype | None
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of x (in this dtype; None: it needs none), and of each expert's A and B."""
    grads_x: list[Tensor] = []
    grads_a: list[Tensor] = []
    grads_b: list[Tensor] = []
    for part in split_by_expert(gradient, gradient.shape[1], edges):
        grad_rows = part.take(gradient).to(narrow.dtype).contiguous()
        grad_narrow = grouped_mm(grad_rows, part.of(up).transpose(1, 2), offs=part.ends)
        if dtype:
            grads_x.append(grouped_mm(grad_narrow, part.of(down), offs=part.ends).to(dtype))
        grads_b.append(grouped_mm(part.take(narrow).t(), grad_rows, offs=part.ends))
        grads_a.append(grouped_mm(grad_narrow.t(), part.take(x).to(narrow.dtype), offs=part.ends))
    grad_x = join(grads_x) if grads_x else None
    grad_a = join(grads_a)
    grad_b = join(grads_b)
    # For an expert without tokens a kernel may write nothing (pytorch#172439) and leave uninitialized memory.
    without = (edges[1:] == edges[:-1])[:, None, None]
    return grad_x, grad_a.masked_fill_(without, 0), grad_b.masked_fill_(without, 0)


class ExpertRows(NamedTuple):
    """Some of the rows sorted by expert, and their experts. None: all of them."""

    rows: slice | None
    experts: slice | None
    ends: Tensor  # where each expert's rows end, within the part

    def take(self, rows: Tensor) -> Tensor:
        return rows if self.rows is None else rows[self.rows]

    def of(self, matrices: Tensor) -> Tensor:
        return matrices if self.experts is None else matrices[self.experts]


def split_by_expert(rows: Tensor, width: int, edges: Tensor) -> list[ExpertRows]:
    """Split sorted rows into the parts that are multiplied at once, with this width: 16-bit rows on a CPU; else all are
    one part."""
    if on_cpu.rounds_rows(rows):
        return [ExpertRows(*part) for part in on_cpu.split_by_expert(edges, width)]
    return [ExpertRows(None, None, edges[1:])]


def join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def join_aligned(parts: list[Tensor]) -> Tensor:
    """Join rows so that each begins where grouped kernels want it, as their results do."""
    if len(parts) == 1:
        return parts[0]
    columns = parts[0].shape[1]
    aligned = columns + -columns % (16 // parts[0].element_size())
    joined = parts[0].new_empty(sum(map(len, parts)), aligned)[:, :columns]
    return torch.cat(parts, out=joined)


def stack_by_expert(a: Tensor, b: Tensor, experts: int, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return A as [experts, r, in] and s B as [experts, r, out] in this dtype, r zero-padded for grouped kernels."""
    if on_cpu.is_on_cpu(a):
        return on_cpu.stack_adapters(a, b, experts, scaling)
    down = view_by_expert(".lora_A.", a, experts).to(dtype)
    r = down.shape[1]
    missing = -r % ALIGN
    up = b.new_empty(experts, r + missing, b.shape[0], dtype=dtype)
    torch.mul(view_by_expert(".lora_B.", b, experts), scaling, out=up[:, :r])
    if missing:
        down = nn.functional.pad(down, (0, 0, 0, missing))
        up[:, r:] = 0
    return down, up


def pack_gradients(grad_a: Tensor, grad_b: Tensor, a: Tensor, b: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of A and s B [experts, r, …], packed like a and b, without the padding of r."""
    r = b.shape[1] // len(grad_b)
    return pack_experts(".lora_A.", grad_a[:, :r]).to(a.dtype), pack_grad_b(grad_b[:, :r], b, scaling)


def pack_grad_b(grad_b: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Return s times the gradient [experts, r, out], packed like b."""
    if on_cpu.is_on_cpu(b):
        return on_cpu.pack_grad_b(grad_b, b, scaling)
    packed = torch.empty_like(b)
    torch.mul(grad_b, scaling, out=view_by_expert(".lora_B.", packed, len(grad_b)))
    return packed


# --- PEFT's containers ---


class UnmergedExpertLora(ParamWrapper):  # type: ignore[misc]
    """PEFT's container of one expert parameter's adapter, which `experts_forward` computes: its own only passes on."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = self.base_layer(x, *args, **kwargs)
        return output


def cut_adapter(wrapper: Any, adapter_name: str) -> None:
    """Keep only this rank's part of split experts' new adapter.

    PEFT draws the full adapter on the CPU, in the same order on every rank, so the parts are slices of the adapter that
    a single process would have drawn. One layer's exists at a time: it is cut before PEFT moves it to the device.
    """
    part = get_expert_shard(wrapper.get_param())
    if part is None:
        return
    for kind, linear in ((".lora_A.", wrapper.lora_A[adapter_name]), (".lora_B.", wrapper.lora_B[adapter_name])):
        linear.weight = nn.Parameter(part.cut(kind, linear.weight.detach()))
        linear.out_features, linear.in_features = linear.weight.shape
    wrapper.num_experts = part.count
    wrapper.part = part


def cast_adapter(wrapper: Any, adapter_name: str) -> None:
    """Give the adapter of a quantized stack a floating-point dtype: PEFT gives it its weight's, which is bytes."""
    coding = get_formats(wrapper.get_base_layer()).get(wrapper.parameter_name)
    if coding:
        wrapper.lora_A[adapter_name].to(coding.dtype)
        wrapper.lora_B[adapter_name].to(coding.dtype)
