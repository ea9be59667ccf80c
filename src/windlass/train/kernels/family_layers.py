"""Parts of model families' layers in fewer, larger operations: norms, routers, attention around its kernel.

Each replacement is first compared with the family's own code, forward and backward, on the device that trains. What
differs is not replaced.
"""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from windlass.train.kernels.compare import are_equal, copy_module, make_numbers

NORMS: Final = "norms"
ROUTERS: Final = "routers"
KEYS: Final = "keys of latent attention"
ROTATIONS: Final = "rotations"
SCALES: Final = "scales of queries"
PARTS: Final = (NORMS, ROUTERS, KEYS, ROTATIONS, SCALES)
Replacement = tuple[Any, str, Any]  # owner, attribute, value


def find_replacements(model: nn.Module, device: torch.device, parts: Collection[str] = PARTS) -> Iterator[Replacement]:
    """Yield what of a model's layers is to be replaced, by what."""
    forwards: set[Callable[..., Any]] = set()
    for module in model.modules():
        forward = fuse_norm(module, device) if NORMS in parts else None
        if forward is None and ROUTERS in parts:
            forward = fuse_router(module, device)
        if forward is not None:
            yield module, "forward", types.MethodType(forward, module)
            continue
        if KEYS in parts and hasattr(module, "expand_kv") and check_keys(module, device):
            yield module, "expand_kv", types.MethodType(expand_kv, module)
        if isinstance(type(module).forward, types.FunctionType):
            forwards.add(type(module).forward)
    for name, ours in POSITIONS.items() if ROTATIONS in parts else ():
        for modeling in list_callers(forwards, name):
            if check_rotation(getattr(modeling, name, None), ours, device):
                yield modeling, name, ours
    if SCALES in parts:
        for modeling in list_callers(forwards, SCALE):
            yield modeling, SCALE, cache_last(getattr(modeling, SCALE))


def list_callers(forwards: Collection[Any], name: str) -> list[types.ModuleType]:
    """Return the modules of the family's code in which one of these methods calls a function of this name."""
    paths = {forward.__module__ for forward in map(inspect.unwrap, forwards) if name in forward.__code__.co_names}
    return [sys.modules[path] for path in sorted(paths)]


# --- norms ---


def fuse_norm(module: nn.Module, device: torch.device) -> Callable[..., Tensor] | None:
    """Return a forward for an RMS norm whose frozen weight is a plain factor."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if not isinstance(eps, float) or list(module._parameters) != ["weight"] or weight is None or weight.ndim != 1:
        return None
    if len(inspect.signature(type(module).forward).parameters) != 2:  # with a gate, for example
        return None

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        weight: Tensor = self.weight  # type: ignore[assignment]
        if weight.requires_grad or weight.dtype != x.dtype:
            by_family: Tensor = type(self).forward(self, x)
            return by_family
        output: Tensor = RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
        return output

    copied = copy_module(module, make_numbers(device, 8))
    ours = functools.partial(forward, copied)
    theirs = functools.partial(type(module).forward, copied)
    return forward if are_equal(ours, theirs, make_numbers(device, 3, 8)) else None


class RmsNorm(torch.autograd.Function):
    """One kernel forward and one backward on a GPU, where autograd needs nine and sixteen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        output: Tensor
        output, scale = torch.ops.windlass.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, scale)
        ctx.weight = weight
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, scale = ctx.saved_tensors
        grad_x: Tensor = torch.ops.windlass.rms_norm_backward(gradient, x, scale, ctx.weight)
        return grad_x, None, None


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    output: Tensor = weight * (wide * scale).to(x.dtype)
    return output, scale


def _rms_norm_backward(gradient: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    normed = x.float() * scale
    grad_normed = (gradient * weight).float()
    mean = (grad_normed * normed).mean(-1, keepdim=True)
    grad_x: Tensor = (grad_normed - normed * mean).mul_(scale).to(x.dtype)
    return grad_x


def _rms_norm_on_gpu(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    output, scale = torch.ops.aten._fused_rms_norm(x.contiguous(), weight.shape, weight, eps)
    return output, scale


def _rms_norm_backward_on_gpu(gradient: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    grad_x: Tensor = torch.ops.aten._fused_rms_norm_backward(
        gradient.contiguous(), x.contiguous(), weight.shape, scale, weight, [True, False]
    )[0]
    return grad_x


_LIBRARY: Final[Any] = torch.library.Library("windlass", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)")
_LIBRARY.define("rms_norm_backward(Tensor gradient, Tensor x, Tensor scale, Tensor weight) -> Tensor")
_LIBRARY.impl("rms_norm", _rms_norm, "CPU")
_LIBRARY.impl("rms_norm", _rms_norm_on_gpu, "CUDA")
_LIBRARY.impl("rms_norm_backward", _rms_norm_backward, "CPU")
_LIBRARY.impl("rms_norm_backward", _rms_norm_backward_on_gpu, "CUDA")


# --- routers ---


def fuse_router(module: nn.Module, device: torch.device) -> Callable[..., Any] | None:
    """Return a forward for DeepSeek-style routers with a single group, in which choosing among groups has no effect."""
    names = ("top_k", "num_experts", "hidden_dim", "num_group", "norm_topk_prob", "routed_scaling_factor")
    if list(module._parameters) != ["weight"] or not all(hasattr(module, name) for name in names):
        return None
    router: Any = module
    if router.num_group != 1:
        return None

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(hidden_states.view(-1, self.hidden_dim), self.weight)
        if self.norm_topk_prob:  # normalized over the chosen experts: a softmax of their logits alone
            chosen, indices = torch.topk(logits, k=self.top_k, dim=-1, sorted=False)
            weights = chosen.softmax(-1)
        else:
            weights, indices = torch.topk(logits.softmax(-1), k=self.top_k, dim=-1, sorted=False)
        if self.routed_scaling_factor != 1:
            weights = weights * self.routed_scaling_factor
        return logits, weights, indices

    copied = copy_module(module, make_numbers(device, router.num_experts, router.hidden_dim))
    ours = functools.partial(forward, copied)
    theirs = functools.partial(type(module).forward, copied)
    return forward if are_equal(ours, theirs, make_numbers(device, 5, router.hidden_dim) / 8) else None


# --- attention: keys of latent attention ---


def expand_kv(self: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """Build keys and values of latent attention with one concatenation; copying into slices has a slow gradient."""
    rows, _, length, _ = kv_nope.shape
    heads = self.kv_b_proj(kv_nope).view(rows, length, -1, self.qk_nope_head_dim + self.v_head_dim).transpose(1, 2)
    keys, values = torch.split(heads, [self.qk_nope_head_dim, self.v_head_dim], dim=-1)
    return torch.cat((keys, k_rot.expand(-1, keys.shape[1], -1, -1)), dim=-1), values


def check_keys(module: Any, device: torch.device) -> bool:
    """Return whether a layer's own `expand_kv` computes the same."""
    small = types.SimpleNamespace(
        qk_nope_head_dim=4, v_head_dim=6, qk_rope_head_dim=2, kv_lora_rank=20, kv_b_proj=nn.Identity()
    )
    ours = functools.partial(expand_kv, small)
    theirs = functools.partial(type(module).expand_kv, small)
    return are_equal(ours, theirs, make_numbers(device, 2, 1, 3, 20), make_numbers(device, 2, 1, 3, 2))


# --- attention: rotary positions ---


def rotate_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    width = cos.shape[-1]
    if width < q.shape[-1]:  # families that rotate a part of each head
        turned = rotate_halves(q[..., :width], k[..., :width], cos, sin, unsqueeze_dim)
        return tuple(torch.cat([part, whole[..., width:]], -1) for part, whole in zip(turned, (q, k), strict=True))
    return Rotate.apply(q, k, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim), unsqueeze_dim, 1)  # type: ignore[no-untyped-call]


def rotate_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any, unsqueeze_dim: int = 1) -> Any:
    """Rotate neighbours (x0, x1), (x2, x3), … and write the results to halves."""
    return Rotate.apply(q, k, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim), unsqueeze_dim, 2)  # type: ignore[no-untyped-call]


POSITIONS: Final[dict[str, Callable[..., Any]]] = {
    "apply_rotary_pos_emb": rotate_halves,
    "apply_rotary_pos_emb_interleave": rotate_pairs,
}


def check_rotation(theirs: Any, ours: Callable[..., Any], device: torch.device) -> bool:
    """Return whether a family's function computes the same rotation: of a part of each head as well, if it can."""
    return bool(_rotate_alike(theirs, ours, device, 8)) and _rotate_alike(theirs, ours, device, 4) is not False


def _rotate_alike(theirs: Any, ours: Callable[..., Any], device: torch.device, width: int) -> bool | None:
    """Return whether both rotate the first of 8 numbers alike, also into the same dtype beside positions in float32;
    None if theirs can't rotate so many."""
    cos, sin = make_numbers(device, 2, 2, 4, width // 2).repeat(1, 1, 1, 2)
    q = make_numbers(device, 2, 3, 4, 8)
    k = make_numbers(device, 2, 1, 4, 8)

    def find_dtypes(rotate: Callable[..., Any]) -> list[torch.dtype] | None:
        with suppress(Exception):
            return [turned.dtype for turned in rotate(q.bfloat16(), k.bfloat16(), cos, sin)]
        return None

    expected = find_dtypes(theirs)
    if expected is None:
        return None
    alike = are_equal(lambda q, k: ours(q, k, cos, sin), lambda q, k: theirs(q, k, cos, sin), q, k)
    return alike and find_dtypes(ours) == expected


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
            halves = [tensor.view(*tensor.shape[:-1], -1, 2).transpose(-1, -2) for tensor in (q, k)]
            joined = torch.cat(halves, dim).flatten(-2)
        else:
            joined = torch.cat((q, k), dim)
        rotated = joined * cos
        x1, x2 = joined.chunk(2, -1)
        sin1, sin2 = sin.chunk(2, -1)
        rotated1, rotated2 = rotated.chunk(2, -1)
        rotated1.addcmul_(x2, sin1, value=-1)
        rotated2.addcmul_(x1, sin2)
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        ctx.dim = dim
        ctx.step = step
        return torch.split(rotated, heads, dim)  # type: ignore[return-value]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (cos1, cos2), (sin1, sin2) = (tensor.chunk(2, -1) for tensor in ctx.saved_tensors)
        joined = torch.cat(gradients, ctx.dim)
        y1, y2 = joined.chunk(2, -1)
        grad = torch.empty_like(joined)
        grad1, grad2 = (grad[..., 0::2], grad[..., 1::2]) if ctx.step == 2 else grad.chunk(2, -1)
        torch.mul(y1, cos1, out=grad1).addcmul_(y2, sin2)
        torch.mul(y2, cos2, out=grad2).addcmul_(y1, sin1, value=-1)
        return *torch.split(grad, ctx.heads, ctx.dim), None, None, None, None


# --- attention: scales of queries by position ---

SCALE: Final = "get_llama_4_attn_scale"


def cache_last(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return the function with its latest answer cached: every layer asks for the scale of the same positions.

    Under autocast the answer is cast once, instead of in every layer. Up to `original` positions are unscaled; in
    training, where rows have no past, a row has at most as many positions as tokens.
    """
    known: list[Any] = [None, None, None]  # positions, other arguments, scale

    def scale_of(positions: Tensor, beta: float, original: int) -> Any:
        if torch.is_grad_enabled() and positions.shape[-1] <= original:
            return Unscaled()
        if known[0] is not positions or known[1] != (beta, original):
            scale = function(positions, beta, original)
            device = positions.device.type
            if torch.is_autocast_enabled(device):
                scale = scale.to(torch.get_autocast_dtype(device))
            known[:] = positions, (beta, original), scale
        return known[2]

    return scale_of


class Unscaled:
    """A scale of 1: queries times it are the queries.

    The family's attention multiplies by `get_llama_4_attn_scale(…).to(dtype)`, whatever the scale is. A number or a
    tensor of ones would cost every layer a kernel forward and one backward.
    """

    def to(self, _: torch.dtype) -> Self:
        return self

    def __rmul__(self, queries: Tensor) -> Tensor:
        return queries
