"""Linear layers with their LoRA adapters in fewer, larger operations: the same values from less than half as many
kernels.

With a small micro-batch a GPU waits for the host, which needs about as long to launch a small kernel as a large one.
The `forward` of single module instances is replaced after PEFT has built the adapter (train/patches.py); no class is
changed, and files, hooks and names stay as they are. On the device that trains, the replacement is first compared with
plain operations, forward and backward.

Everywhere else `LoraLinear` computes an adapted layer. Both round an output once: see kernels/products.py.
"""

import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from windlass.settings import FUSED_INPUTS
from windlass.train.kernels.compare import are_equal, make_numbers
from windlass.train.kernels.products import QuantizedLinear, Rounding, add_linear, choose_dtype, linear_with_added

BASES: Final = (nn.Linear, QuantizedLinear)


class LoraLinear(Linear):  # type: ignore[misc]
    """PEFT's adapted linear layer, whose output is rounded once: base and adapter are summed in float32.

    The rest is PEFT's: what it stores, saves and switches. DoRA rescales the base's product as well, which takes a
    second one to round once: in evaluations, where no gradient is needed.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        names = [name for name in self.active_adapters if name in self.lora_A]
        if args or kwargs or self.disable_adapters or self.merged or len(names) != 1 or Rounding.twice:
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        (name,) = names
        base = self.get_base_layer()
        up = self.lora_B[name]
        if up.bias is not None or type(base) not in BASES or self.fan_in_fan_out:
            return super().forward(x)  # type: ignore[no-any-return]
        rows = x.to(choose_dtype(x))
        down = self.lora_A[name]
        if name in self.lora_variant:
            if self.training or torch.is_grad_enabled() or base.bias is not None:
                return super().forward(x)  # type: ignore[no-any-return]
            product = base(rows)
            with torch.autocast(x.device.type, enabled=False):
                given = {"lora_A": down, "lora_B": up, "scaling": self.scaling[name], "base_layer": base}
                added = self.lora_magnitude_vector[name](rows.float(), base_result=product.float(), **given)
            return add_linear(base, rows, added.to(rows.dtype))
        is_cast = torch.is_autocast_enabled(x.device.type)
        source = rows if is_cast else self._cast_input_dtype(rows, down.weight.dtype)
        narrow = down(self.lora_dropout[name](source)) * self.scaling[name]
        return linear_with_added(base, rows, narrow, up.weight)


class FusedAdapters:
    """The fused adapters of a model. Inside `unchanged` their weights are cast and concatenated once."""

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype | None, *, share_inputs: bool = True) -> None:
        self.valid = False  # within `unchanged`: the copies are the weights
        self.groups: list[LoraGroup] = []
        for parent in modules:
            layers = {name: child for name, child in parent.named_children() if is_fusible(child)}
            for names in FUSED_INPUTS if share_inputs else ():
                if all(name in layers for name in names):
                    self.groups.append(LoraGroup([layers.pop(name) for name in names], self, dtype))
            self.groups += [LoraGroup([layer], self, dtype) for layer in layers.values()]
        copies = [each for group in self.groups for each in group.iter_copies()]
        self.copies = [copied for copied, _ in copies]
        self.originals = [original for _, original in copies]

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

    def forwards(self) -> Iterator[tuple[nn.Module, Callable[..., Tensor]]]:
        """Yield each layer with the method that replaces its forward."""
        for group in self.groups:
            for i, layer in enumerate(group.layers):
                yield layer, types.MethodType(group.make_forward(i), layer)


def is_fusible(module: Any) -> bool:
    """Return whether this is a linear layer with one plain LoRA: no DoRA or other variant, no bias in B."""
    if not isinstance(module, Linear) or type(module.get_base_layer()) not in BASES:
        return False
    if len(module.lora_A) != 1 or module.lora_variant or module.fan_in_fan_out:
        return False
    (name,) = module.lora_A
    return module.lora_B[name].bias is None


class LoraGroup:
    """Adapted linear layers that share an input. The first call computes all products; the others fetch theirs."""

    def __init__(self, layers: Sequence[Any], adapters: FusedAdapters, dtype: torch.dtype | None) -> None:
        (self.name,) = layers[0].lora_A
        self.layers = list(layers)
        self.adapters = adapters
        self.waiting: tuple[Tensor, dict[int, Tensor]] | None = None  # the input, and products not fetched yet
        a_of, b_of = self.weights(range(len(layers)))
        self.r_of = [len(a) for a in a_of]
        self.dtype = dtype or a_of[0].dtype
        cast = self.dtype != a_of[0].dtype
        self.a = concatenate(a_of, self.dtype) if cast or len(a_of) > 1 else None
        self.b_of = [b.detach().to(self.dtype) for b in b_of] if cast else None

    def weights(self, members: Sequence[int]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters A and B of some of the layers."""
        layers = [self.layers[i] for i in members]
        return [layer.lora_A[self.name].weight for layer in layers], [
            layer.lora_B[self.name].weight for layer in layers
        ]

    def iter_copies(self) -> Iterator[tuple[Tensor, nn.Parameter]]:
        """Yield each copy that `unchanged` fills, with its original."""
        a_of, b_of = self.weights(range(len(self.layers)))
        if self.a is not None:
            yield from zip(torch.split(self.a, self.r_of), a_of, strict=True)
        if self.b_of is not None:
            yield from zip(self.b_of, b_of, strict=True)

    def make_forward(self, i: int) -> Callable[..., Tensor]:
        def forward(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            waiting = self.waiting
            if waiting is not None:
                input_of_all, products = waiting
                if input_of_all is x and i in products:
                    output = products.pop(i)
                    self.waiting = waiting if products else None
                    return output
                self.waiting = None
            device = x.device.type
            adapter_dtype = layer.lora_A[self.name].weight.dtype
            mixed = torch.is_autocast_enabled(device)
            if args or kwargs or not self.is_unmodified(layer) or not (mixed or x.dtype == adapter_dtype):
                by_peft: Tensor = type(layer).forward(layer, x, *args, **kwargs)
                return by_peft
            dropped = layer.lora_dropout[self.name](x)
            alone = dropped is not x or not all(map(self.is_unmodified, self.layers))
            members = [i] if alone else list(range(len(self.layers)))
            outputs = self.compute(x, dropped, members, torch.get_autocast_dtype(device) if mixed else adapter_dtype)
            if len(members) > 1:
                self.waiting = x, {j: output for j, output in enumerate(outputs) if j != i}
            return outputs[members.index(i)]

        return forward

    def is_unmodified(self, layer: Any) -> bool:
        return not (layer.disable_adapters or layer.merged or Rounding.twice) and layer.active_adapters == [self.name]

    def compute(self, x: Tensor, dropped: Tensor, members: list[int], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the outputs of these layers."""
        a_of, b_of = self.weights(members)
        has_copies = self.adapters.valid and dtype == self.dtype
        if not has_copies or self.a is None:
            a = concatenate(a_of, dtype)
        elif len(members) < len(self.layers):
            a = torch.split(self.a, self.r_of)[members[0]]
        else:
            a = self.a
        if has_copies and self.b_of is not None:
            b_used = [self.b_of[i] for i in members]
        else:
            b_used = [b.detach().to(dtype) for b in b_of]
        layers = [self.layers[i] for i in members]
        bases = [layer.get_base_layer() for layer in layers]
        outputs: tuple[Tensor, ...] = LoraLinears.apply(  # type: ignore[no-untyped-call]
            x.to(dtype),
            None if dropped is x else dropped.to(dtype),
            bases,
            [layer.scaling[self.name] for layer in layers],
            a,
            b_used,
            *a_of,
            *b_of,
            *(base.bias for base in bases),
        )
        return outputs


def concatenate(a_of: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the matrices A of several layers, one below the other, without a graph."""
    cast = [a.detach().to(dtype) for a in a_of]
    return torch.cat(cast) if len(cast) > 1 else cast[0]


def dense_weight(linear: Any, dtype: torch.dtype) -> Tensor:
    """Return the matrix of a frozen linear layer, dequantized if it is stored in codes."""
    weight: Tensor = linear.dense(dtype) if hasattr(linear, "dense") else linear.weight.to(dtype)
    return weight


class LoraLinears(torch.autograd.Function):
    """x W^T + b + s x A^T B^T of several layers with one x: three forward kernels for one layer, two more per further
    layer.

    The backward keeps x (or what dropout left of it) and x A^T. Frozen matrices are read from their modules again,
    where FSDP2 has gathered them or codes are decoded.

    `a` has the A of all layers below each other, `b_of` each layer's B, both in the dtype to compute in. `trained` are
    the parameters themselves, which get the gradients: all A, all B, all biases.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropped: Tensor | None,
        bases: Sequence[Any],
        scalings: Sequence[float],
        a: Tensor,
        b_of: Sequence[Tensor],
        *trained: Tensor | None,
    ) -> tuple[Tensor, ...]:
        n = len(bases)
        biases = trained[2 * n :]
        rows = x.reshape(-1, x.shape[-1])
        source = rows if dropped is None else dropped.reshape(rows.shape)
        xa = source @ a.t()
        xa_of = torch.split(xa, [b.shape[1] for b in b_of], 1)
        outputs = []
        for base, bias, scaling, b, xa_part in zip(bases, biases, scalings, b_of, xa_of, strict=True):
            weight = dense_weight(base, x.dtype)
            output = x.new_empty(len(rows), len(b))
            if bias is None:
                torch.addmm(output, xa_part, b.t(), beta=0, alpha=scaling, out=output)
                output.addmm_(rows, weight.t())
            else:
                wide = torch.cat([weight, b * scaling], 1)
                torch.addmm(bias.to(x.dtype), torch.cat([rows, xa_part], 1), wide.t(), out=output)
                del wide
            del weight  # or the next layer's would be decoded beside it
            outputs.append(output.view(*x.shape[:-1], len(b)))
        ctx.save_for_backward(source, xa, a, *b_of)
        ctx.bases = bases
        ctx.scalings = scalings
        ctx.shape = x.shape
        ctx.dropped = dropped is not None
        ctx.dtypes = [None if parameter is None else parameter.dtype for parameter in trained]
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        source, xa, a, *b_of = ctx.saved_tensors
        n = len(b_of)
        r_of = [b.shape[1] for b in b_of]
        sizes = [a.numel(), *(b.numel() for b in b_of)]
        grad_y_of = [gradient.reshape(len(xa), -1) for gradient in gradients]

        # One buffer for the gradients of A and B, so that one cast converts all to the adapter's dtype.
        buffer = a.new_empty(sum(sizes))
        grad_a, *grad_b_of = torch.split(buffer, sizes)
        grad_xa = torch.empty_like(xa)
        grad_x = None
        parts = zip(
            ctx.bases,
            ctx.scalings,
            b_of,
            grad_y_of,
            grad_b_of,
            torch.split(xa, r_of, 1),
            torch.split(grad_xa, r_of, 1),
            strict=True,
        )
        for base, scaling, b, grad_y, grad_b, xa_part, grad_xa_part in parts:
            torch.addmm(grad_xa_part, grad_y, b, beta=0, alpha=scaling, out=grad_xa_part)
            grad_b = grad_b.view(b.shape)
            torch.addmm(grad_b, grad_y.t(), xa_part, beta=0, alpha=scaling, out=grad_b)
            if ctx.needs_input_grad[0]:
                weight = dense_weight(base, grad_y.dtype)
                grad_x = grad_y @ weight if grad_x is None else grad_x.addmm_(grad_y, weight)
        torch.mm(grad_xa.t(), source, out=grad_a.view(a.shape))
        grad_dropped = None
        if ctx.dropped and ctx.needs_input_grad[1]:
            grad_dropped = (grad_xa @ a).view(ctx.shape)
        elif grad_x is not None:
            grad_x.addmm_(grad_xa, a)

        buffer = buffer.to(ctx.dtypes[0])
        grad_a, *grad_b_of = torch.split(buffer, sizes)
        grads_a = torch.split(grad_a.view(a.shape), r_of)
        grads_b = [grad_b.view(b.shape) for grad_b, b in zip(grad_b_of, b_of, strict=True)]
        grads_bias = [
            grad_y.sum(0).to(dtype) if wanted else None
            for grad_y, wanted, dtype in zip(
                grad_y_of, ctx.needs_input_grad[6 + 2 * n :], ctx.dtypes[2 * n :], strict=True
            )
        ]
        if grad_x is not None:
            grad_x = grad_x.view(ctx.shape)
        return grad_x, grad_dropped, None, None, None, None, *grads_a, *grads_b, *grads_bias


def check_lora_linears(device: torch.device) -> bool:
    """Return whether `LoraLinears` equals plain operations on this device, for two layers of different r with one x."""
    bases = [types.SimpleNamespace(weight=make_numbers(device, rows, 8), bias=None) for rows in (6, 4)]
    scalings = (0.5, 2.0)

    def ours(x: Tensor, a1: Tensor, a2: Tensor, b1: Tensor, b2: Tensor) -> Any:
        a = torch.cat((a1, a2)).detach()
        return LoraLinears.apply(x, None, bases, scalings, a, [b1.detach(), b2.detach()], a1, a2, b1, b2, None, None)  # type: ignore[no-untyped-call]

    def plain(x: Tensor, a1: Tensor, a2: Tensor, b1: Tensor, b2: Tensor) -> Any:
        layers = zip(bases, scalings, (a1, a2), (b1, b2), strict=True)
        return [x @ base.weight.t() + scaling * (x @ a.t() @ b.t()) for base, scaling, a, b in layers]

    shapes = ((5, 8), (2, 8), (3, 8), (6, 2), (4, 3))
    return are_equal(ours, plain, *(make_numbers(device, *shape) for shape in shapes))
