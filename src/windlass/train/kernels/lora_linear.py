"""Fewer, larger operations: the same values from less than half as many kernels.

With a small micro-batch a GPU waits for the host, which needs about as long to launch a small kernel as a large one.
`fuse` replaces the `forward` of single module instances after PEFT has built the adapter; no class is patched, and
files, hooks and names stay as they are. Each replacement for a family's code (norms, rotary positions, routers) is
first compared with that code, and fused adapters with plain operations, forward and backward, on the device that
trains. What differs is not replaced.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from windlass.settings import (
    FUSED_INPUTS,
)
from windlass.train.kernels.products import QuantizedLinear

CLOSE: Final = 1e-5


def fuse_layers(model: nn.Module, dtype: torch.dtype | None = None, *, always: bool = False) -> FusedAdapters:
    """Patch what can be patched and return the fused adapters, whose products run in `dtype` or their own dtype.

    Only on a GPU, or if `always`: a CPU runs each operation as it comes, so fewer operations are no faster.
    """
    adapted = next((each for each in model.parameters() if each.requires_grad), None)
    if adapted is None or not (always or adapted.is_cuda):
        return FusedAdapters([], dtype)
    if not check_lora_linears(adapted.device):
        warnings.warn("layers are not fused: this device computes fused adapters differently", stacklevel=2)
        return FusedAdapters([], dtype)
    attempts = (fuse_norm, fuse_router, fuse_positions)
    for module in list(model.modules()):
        for attempt in attempts:
            if replacement := attempt(module, adapted.device):
                module.forward = types.MethodType(replacement, module)
                break
    return FusedAdapters(model.modules(), dtype)


# --- LoRA on linear layers ---


class FusedAdapters:
    """The fused adapters of a model. Inside `unchanged` their weights are cast and concatenated once."""

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype | None) -> None:
        self.valid = False
        self.groups: list[LoraGroup] = []
        for parent in modules:
            children = {name: child for name, child in parent.named_children() if is_fusible(child)}
            for names in FUSED_INPUTS:
                if all(name in children for name in names):
                    self.groups.append(LoraGroup([children.pop(name) for name in names], self, dtype))
            self.groups += [LoraGroup([child], self, dtype) for child in children.values()]
        pairs = [pair for group in self.groups for pair in group.iter_copies()]
        self.copies, self.originals = [copied for copied, _ in pairs], [original for _, original in pairs]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Mark a section in which adapters' weights don't change: the micro-batches of a step, an evaluation."""
        if self.copies:
            torch._foreach_copy_(self.copies, [original.data for original in self.originals])
        self.valid = True
        try:
            yield
        finally:
            self.valid = False


def is_fusible(module: Any) -> bool:
    """Return whether this is a linear layer with one plain LoRA: no DoRA or other variant, no bias in B."""
    if type(module) is not Linear or type(module.get_base_layer()) not in (nn.Linear, QuantizedLinear):
        return False
    if len(module.lora_A) != 1 or module.lora_variant or module.fan_in_fan_out:
        return False
    (name,) = module.lora_A
    return module.lora_B[name].bias is None


class LoraGroup:
    """Adapted linear layers that share an input. The first call computes all products; the others fetch theirs."""

    def __init__(self, modules: Sequence[Any], adapters: FusedAdapters, dtype: torch.dtype | None) -> None:
        (self.name,) = modules[0].lora_A
        self.modules, self.adapters = list(modules), adapters
        self.waiting: tuple[Tensor, dict[int, Tensor]] | None = None
        downs, ups = self.weights(range(len(modules)))
        self.ranks = [len(down) for down in downs]
        self.dtype = dtype or downs[0].dtype
        self.cast = self.dtype != downs[0].dtype
        self.down = self.concatenate(downs, self.dtype) if self.cast or len(downs) > 1 else None
        self.ups = [up.detach().to(self.dtype) for up in ups] if self.cast else None
        for i, module in enumerate(modules):
            module.forward = types.MethodType(self.make_forward(i), module)

    def weights(self, members: Sequence[int]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        of = [self.modules[i] for i in members]
        return [each.lora_A[self.name].weight for each in of], [each.lora_B[self.name].weight for each in of]

    @staticmethod
    def concatenate(downs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        downs = [each.detach().to(dtype) for each in downs]
        return torch.cat(downs) if len(downs) > 1 else downs[0]

    def iter_copies(self) -> Iterator[tuple[Tensor, nn.Parameter]]:
        """Yield each copy that `unchanged` fills, with its original."""
        downs, ups = self.weights(range(len(self.modules)))
        if self.down is not None:
            yield from zip(torch.split(self.down, self.ranks), downs, strict=True)
        if self.ups is not None:
            yield from zip(self.ups, ups, strict=True)

    def make_forward(self, i: int) -> Callable[..., Tensor]:
        def forward(module: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if (waiting := self.waiting) is not None:
                if waiting[0] is x and i in waiting[1]:
                    output = waiting[1].pop(i)
                    self.waiting = waiting if waiting[1] else None
                    return output
                self.waiting = None
            kind, own = x.device.type, module.lora_A[self.name].weight.dtype
            mixed = torch.is_autocast_enabled(kind)
            if args or kwargs or not self.is_unmodified(module) or not (mixed or x.dtype == own):
                by_peft: Tensor = type(module).forward(module, x, *args, **kwargs)
                return by_peft
            dropped = module.lora_dropout[self.name](x)
            alone = dropped is not x or not all(map(self.is_unmodified, self.modules))
            members = [i] if alone else list(range(len(self.modules)))
            outputs = self.compute(x, dropped, members, torch.get_autocast_dtype(kind) if mixed else own)
            if len(members) > 1:
                self.waiting = x, {j: out for j, out in enumerate(outputs) if j != i}
            return outputs[members.index(i)]

        return forward

    def is_unmodified(self, module: Any) -> bool:
        return not (module.disable_adapters or module.merged) and module.active_adapters == [self.name]

    def compute(self, x: Tensor, dropped: Tensor, members: list[int], dtype: torch.dtype) -> tuple[Tensor, ...]:
        downs, ups = self.weights(members)
        valid, down, cast = self.adapters.valid and dtype == self.dtype, self.down, self.ups
        if not valid or down is None:
            down = self.concatenate(downs, dtype)
        elif len(members) < len(self.modules):
            down = torch.split(down, self.ranks)[members[0]]
        used = [cast[i] for i in members] if valid and cast is not None else [up.detach().to(dtype) for up in ups]
        of = [self.modules[i] for i in members]
        bases = [module.get_base_layer() for module in of]
        outputs: tuple[Tensor, ...] = LoraLinears.apply(  # type: ignore[no-untyped-call]
            x.to(dtype),
            None if dropped is x else dropped.to(dtype),
            bases,
            [module.scaling[self.name] for module in of],
            down,
            used,
            *downs,
            *ups,
            *(base.bias for base in bases),
        )
        return outputs


def dense_weight(linear: Any, dtype: torch.dtype) -> Tensor:
    """Return the matrix of a frozen linear layer, dequantized if it is stored in codes."""
    weight: Tensor = linear.dense(dtype) if hasattr(linear, "dense") else linear.weight.to(dtype)
    return weight


class LoraLinears(torch.autograd.Function):
    """x W^T + b + s x A^T B^T of several layers with one x: three forward kernels for one layer, two more per further
    layer.

    The backward keeps x (or what dropout left of it) and x A^T. Frozen matrices are read from their modules again,
    where FSDP2 has gathered them or codes are decoded.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropped: Tensor | None,
        bases: Sequence[Any],
        scalings: Sequence[float],
        down: Tensor,
        ups: Sequence[Tensor],
        *trained: Tensor | None,
    ) -> tuple[Tensor, ...]:
        n, rows = len(bases), x.reshape(-1, x.shape[-1])
        source = rows if dropped is None else dropped.reshape(rows.shape)
        narrow = source @ down.t()
        outputs = []
        for base, bias, scaling, up, low in zip(
            bases, trained[2 * n :], scalings, ups, torch.split(narrow, [up.shape[1] for up in ups], 1), strict=True
        ):
            product = nn.functional.linear(
                rows, dense_weight(base, x.dtype), None if bias is None else bias.to(x.dtype)
            )
            outputs.append(product.addmm_(low, up.t(), alpha=scaling).view(*x.shape[:-1], len(up)))
        ctx.save_for_backward(source, narrow, down, *ups)
        ctx.bases, ctx.scalings, ctx.shape, ctx.dropped = bases, scalings, x.shape, dropped is not None
        ctx.dtypes = [None if each is None else each.dtype for each in trained]
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        source, narrow, down, *ups = ctx.saved_tensors
        n, ranks = len(ups), [up.shape[1] for up in ups]
        through = torch.empty_like(narrow)
        # One buffer, so that one cast converts all to the adapter's dtype.
        flat = down.new_empty(down.numel() + sum(up.numel() for up in ups))
        for_down, *for_ups = torch.split(flat, [down.numel(), *(up.numel() for up in ups)])
        for_x = None
        sent = [gradient.reshape(len(narrow), -1) for gradient in gradients]
        parts = (torch.split(each, ranks, 1) for each in (narrow, through))
        for base, scaling, up, dy, into, low, part in zip(
            ctx.bases, ctx.scalings, ups, sent, for_ups, *parts, strict=True
        ):
            torch.addmm(part, dy, up, beta=0, alpha=scaling, out=part)
            into = into.view(up.shape)
            torch.addmm(into, dy.t(), low, beta=0, alpha=scaling, out=into)
            if ctx.needs_input_grad[0]:
                weight = dense_weight(base, dy.dtype)
                for_x = dy @ weight if for_x is None else for_x.addmm_(dy, weight)
        torch.mm(through.t(), source, out=for_down.view(down.shape))
        for_dropped = None
        if ctx.dropped and ctx.needs_input_grad[1]:
            for_dropped = (through @ down).view(ctx.shape)
        elif for_x is not None:
            for_x.addmm_(through, down)
        flat = flat.to(ctx.dtypes[0])
        for_down, *for_ups = torch.split(flat, [down.numel(), *(up.numel() for up in ups)])
        for_downs = torch.split(for_down.view(down.shape), ranks)
        of_ups = [each.view(up.shape) for each, up in zip(for_ups, ups, strict=True)]
        biases = [
            dy.sum(0).to(dtype) if wanted else None
            for dy, wanted, dtype in zip(sent, ctx.needs_input_grad[6 + 2 * n :], ctx.dtypes[2 * n :], strict=True)
        ]
        for_x = None if for_x is None else for_x.view(ctx.shape)
        return for_x, for_dropped, None, None, None, None, *for_downs, *of_ups, *biases


def check_lora_linears(device: torch.device) -> bool:
    """Return whether `LoraLinears` equals plain operations on this device, for two layers of different rank with one
    x."""
    bases = [types.SimpleNamespace(weight=make_numbers(device, rows, 8), bias=None) for rows in (6, 4)]
    scalings, pair = (0.5, 2.0), (make_numbers(device, 2, 8), make_numbers(device, 3, 8))

    def ours(x: Tensor, *trained: Tensor) -> Any:
        down, ups = torch.cat(trained[:2]).detach(), [each.detach() for each in trained[2:]]
        return LoraLinears.apply(x, None, bases, scalings, down, ups, *trained, None, None)  # type: ignore[no-untyped-call]

    def plain(x: Tensor, *trained: Tensor) -> Any:
        each = zip(bases, scalings, trained[:2], trained[2:], strict=True)
        return [x @ base.weight.t() + scaling * (x @ a.t() @ b.t()) for base, scaling, a, b in each]

    return are_equal(
        ours, plain, make_numbers(device, 5, 8), *pair, make_numbers(device, 6, 2), make_numbers(device, 4, 3)
    )


# --- norms, routers: compared with the family's own code ---


def are_equal(one: Callable[..., Any], other: Callable[..., Any], *inputs: Tensor) -> bool:
    """Return whether two functions have the same values and gradients."""
    with suppress(Exception), torch.enable_grad(), torch.autocast(inputs[0].device.type, enabled=False):
        found, wanted = compute_values(one, inputs), compute_values(other, inputs)
        return len(found) == len(wanted) and all(map(_are_close, found, wanted))
    return False


def copy_module(module: nn.Module, weight: Tensor) -> nn.Module:
    """Return a copy of a module with a small weight."""
    twin: nn.Module = object.__new__(type(module))  # copy.copy would make FSDP2's classes build a new one
    twin.__dict__ = {**module.__dict__, "_parameters": {"weight": weight}, "_modules": {}, "training": False}
    return twin


def compute_values(function: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    inputs = [each.detach().requires_grad_() for each in inputs]
    answer = function(*inputs)
    outputs = [answer] if isinstance(answer, Tensor) else list(answer)
    smooth = [each for each in outputs if each.is_floating_point()]
    sent = [make_numbers(each.device, *each.shape).to(each.dtype) for each in smooth]
    return [*outputs, *torch.autograd.grad(smooth, inputs, sent)]


def _are_close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one.double(), other.double(), rtol=CLOSE, atol=CLOSE)


def make_numbers(device: torch.device, *shape: int) -> Tensor:
    """Return fixed random numbers, without drawing from the run's generators."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)


def fuse_norm(module: nn.Module, device: torch.device) -> Callable[..., Tensor] | None:
    """Replace RMS norms whose frozen weight is a plain factor."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if not isinstance(eps, float) or list(module._parameters) != ["weight"] or weight is None or weight.ndim != 1:
        return None

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        weight: Tensor = self.weight  # type: ignore[assignment]
        if weight.requires_grad or weight.dtype != x.dtype:
            plain: Tensor = type(self).forward(self, x)
            return plain
        product: Tensor = RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
        return product

    twin = copy_module(module, make_numbers(device, 8))
    ours, theirs = functools.partial(forward, twin), functools.partial(type(module).forward, twin)
    return forward if are_equal(ours, theirs, make_numbers(device, 3, 8)) else None


class RmsNorm(torch.autograd.Function):
    """One kernel forward and one backward on a GPU, where autograd needs nine and sixteen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        product: Tensor
        product, scale = torch.ops.windlass.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, scale)
        ctx.weight = weight
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, scale = ctx.saved_tensors
        for_x: Tensor = torch.ops.windlass.rms_norm_backward(gradient, x, scale, ctx.weight)
        return for_x, None, None


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    product: Tensor = weight * (wide * scale).to(x.dtype)
    return product, scale


def _rms_norm_backward(gradient: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    normed, sent = x.float() * scale, (gradient * weight).float()
    into: Tensor = (sent - normed * (sent * normed).mean(-1, keepdim=True)).mul_(scale).to(x.dtype)
    return into


def _rms_norm_on_gpu(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    product, scale = torch.ops.aten._fused_rms_norm(x.contiguous(), weight.shape, weight, eps)
    return product, scale


def _rms_norm_backward_on_gpu(gradient: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    into: Tensor = torch.ops.aten._fused_rms_norm_backward(
        gradient.contiguous(), x.contiguous(), weight.shape, scale, weight, [True, False]
    )[0]
    return into


_LIBRARY: Final[Any] = torch.library.Library("windlass", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)")
_LIBRARY.define("rms_norm_backward(Tensor gradient, Tensor x, Tensor scale, Tensor weight) -> Tensor")
_LIBRARY.impl("rms_norm", _rms_norm, "CPU")
_LIBRARY.impl("rms_norm", _rms_norm_on_gpu, "CUDA")
_LIBRARY.impl("rms_norm_backward", _rms_norm_backward, "CPU")
_LIBRARY.impl("rms_norm_backward", _rms_norm_backward_on_gpu, "CUDA")


def fuse_router(module: nn.Module, device: torch.device) -> Callable[..., Any] | None:
    """Replace DeepSeek-style routers with a single group, in which choosing among groups has no effect."""
    names = ("top_k", "num_experts", "hidden_dim", "num_group", "norm_topk_prob", "routed_scaling_factor")
    if list(module._parameters) != ["weight"] or not all(hasattr(module, name) for name in names):
        return None
    gate: Any = module
    if gate.num_group != 1:
        return None

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(hidden_states.view(-1, self.hidden_dim), self.weight)
        if self.norm_topk_prob:  # normalized over the chosen experts: a softmax of their logits alone
            chosen, indices = torch.topk(logits, k=self.top_k, dim=-1, sorted=False)
            weights = chosen.softmax(-1)
        else:
            weights, indices = torch.topk(logits.softmax(-1), k=self.top_k, dim=-1, sorted=False)
        return logits, weights if self.routed_scaling_factor == 1 else weights * self.routed_scaling_factor, indices

    twin = copy_module(module, make_numbers(device, gate.num_experts, gate.hidden_dim))
    ours, theirs = functools.partial(forward, twin), functools.partial(type(module).forward, twin)
    return forward if are_equal(ours, theirs, make_numbers(device, 5, gate.hidden_dim) / 8) else None


# --- attention ---


def fuse_positions(module: nn.Module, device: torch.device) -> Callable[..., Any] | None:
    """Return an attention layer's own forward with the position functions it calls replaced by ours."""
    if hasattr(module, "expand_kv") and check_keys(module, device):
        module.__dict__["expand_kv"] = types.MethodType(expand_kv, module)
    plain: Any = type(module).forward
    return _with_positions(plain, device) if isinstance(plain, types.FunctionType) else None


@functools.cache
def _with_positions(plain: Any, device: torch.device) -> Callable[..., Any] | None:
    found = {
        name: other
        for name, other in POSITIONS.items()
        if name in plain.__code__.co_names and check_rotation(plain.__globals__.get(name), other, device)
    }
    if "get_llama_4_attn_scale" in plain.__code__.co_names:
        found["get_llama_4_attn_scale"] = cache_last(plain.__globals__["get_llama_4_attn_scale"])
    if not found:
        return None
    names = {**plain.__globals__, **found}
    bound = types.FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    bound.__kwdefaults__ = plain.__kwdefaults__
    return bound


def check_rotation(theirs: Any, ours: Callable[..., Any], device: torch.device) -> bool:
    cos, sin = make_numbers(device, 2, 2, 4, 4).repeat(1, 1, 1, 2)
    one, other = (functools.partial(_call_rotation, way, cos, sin) for way in (ours, theirs))
    return are_equal(one, other, make_numbers(device, 2, 3, 4, 8), make_numbers(device, 2, 1, 4, 8))


def _call_rotation(way: Callable[..., Any], cos: Tensor, sin: Tensor, q: Tensor, k: Tensor) -> Any:
    return way(q, k, cos, sin)


def expand_kv(self: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """Build keys and values of latent attention with one concatenation; copying into slices has a slow gradient."""
    rows, _, length, _ = kv_nope.shape
    heads = self.kv_b_proj(kv_nope).view(rows, length, -1, self.qk_nope_head_dim + self.v_head_dim).transpose(1, 2)
    keys, values = torch.split(heads, [self.qk_nope_head_dim, self.v_head_dim], dim=-1)
    return torch.cat((keys, k_rot.expand(-1, keys.shape[1], -1, -1)), dim=-1), values


def check_keys(module: Any, device: torch.device) -> bool:
    twin = types.SimpleNamespace(
        qk_nope_head_dim=4, v_head_dim=6, qk_rope_head_dim=2, kv_lora_rank=20, kv_b_proj=nn.Identity()
    )
    ours, theirs = (functools.partial(way, twin) for way in (expand_kv, type(module).expand_kv))
    return are_equal(ours, theirs, make_numbers(device, 2, 1, 3, 20), make_numbers(device, 2, 1, 3, 2))


def rotate_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    return Rotate.apply(q, k, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim), unsqueeze_dim, 1)  # type: ignore[no-untyped-call]


def rotate_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any, unsqueeze_dim: int = 1) -> Any:
    """Rotate neighbours (x0, x1), (x2, x3), … and write the results to halves."""
    return Rotate.apply(q, k, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim), unsqueeze_dim, 2)  # type: ignore[no-untyped-call]


POSITIONS: Final[dict[str, Callable[..., Any]]] = {
    "apply_rotary_pos_emb": rotate_halves,
    "apply_rotary_pos_emb_interleave": rotate_pairs,
}


class Rotate(torch.autograd.Function):
    """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) for queries and keys together, with results in halves of the last
    dimension.

    x1 and x2 are halves as well, or every second number (`step` 2). One kernel concatenates queries and keys and three
    rotate them; in the backward, four write each number to its place.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dim: int, step: int) -> tuple[Tensor, Tensor]:
        heads = [q.shape[dim], k.shape[dim]]
        if step == 2:
            pairs = [each.view(*each.shape[:-1], -1, 2).transpose(-1, -2) for each in (q, k)]
            joined = torch.cat(pairs, dim).flatten(-2)
        else:
            joined = torch.cat((q, k), dim)
        turned = joined * cos
        (one, other), (first, second) = joined.chunk(2, -1), sin.chunk(2, -1)
        into, beside = turned.chunk(2, -1)
        into.addcmul_(other, first, value=-1)
        beside.addcmul_(one, second)
        ctx.save_for_backward(cos, sin)
        ctx.heads, ctx.dim, ctx.step = heads, dim, step
        return torch.split(turned, heads, dim)  # type: ignore[return-value]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        cos, sin = (each.chunk(2, -1) for each in ctx.saved_tensors)
        joined = torch.cat(gradients, ctx.dim)
        one, other = joined.chunk(2, -1)
        turned = torch.empty_like(joined)
        into, beside = (turned[..., 0::2], turned[..., 1::2]) if ctx.step == 2 else turned.chunk(2, -1)
        torch.mul(one, cos[0], out=into).addcmul_(other, sin[1])
        torch.mul(other, cos[1], out=beside).addcmul_(one, sin[0], value=-1)
        return *torch.split(turned, ctx.heads, ctx.dim), None, None, None, None


def cache_last(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return the function with its latest answer cached: every layer asks for the scale of the same positions.

    Under autocast the answer is cast once, instead of in every layer. Up to `original` positions are unscaled; in
    training, where rows have no past, a row has at most as many positions as tokens.
    """
    latest: list[Any] = [None, None, None]

    def asked(positions: Tensor, beta: float, original: int) -> Any:
        if torch.is_grad_enabled() and positions.shape[-1] <= original:
            return Unscaled()
        if latest[0] is not positions or latest[1] != (beta, original):
            answer, kind = function(positions, beta, original), positions.device.type
            mixed = torch.is_autocast_enabled(kind)
            latest[:] = positions, (beta, original), answer.to(torch.get_autocast_dtype(kind)) if mixed else answer
        return latest[2]

    return asked


class Unscaled:
    """A scale of 1."""

    def to(self, _: torch.dtype) -> Unscaled:
        return self

    def __rmul__(self, scaled: Tensor) -> Tensor:
        return scaled
