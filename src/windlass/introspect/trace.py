"""Measure a layer on the fake device: bytes that it keeps, operators, matrix products. Nothing is computed."""

import re
import weakref
from collections import Counter
from collections.abc import Collection
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from windlass.compat import FakeTensorMode, TorchDispatchMode, tree_leaves, tree_map_only

LENGTHS: Final = (256, 512, 768)  # tokens: what is between and beyond follows a parabola through these
MOST: Final = 4000  # operators: a layer that computes token after token would take minutes to trace
LINEAR: Final = ("mm", "addmm")  # of linear layers, which have formulas; products of tokens with tokens are batched
EXPERTS: Final = re.compile(r"Experts$")


class _Tracing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators, and the bytes of their results that exist at the same time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = Counter[str]()
        self.live = 0
        self.peak = 0
        self.known = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        name = func.overloadpacket.__name__
        if func.namespace == "prim":
            return answer
        if name.endswith("flash_attention_for_cpu"):
            packet = torch.ops.aten._scaled_dot_product_flash_attention
        outputs = [leaf for leaf in tree_leaves(answer) if isinstance(leaf, Tensor)]
        if func.is_view or name in ("_unsafe_view", "detach", "lift_fresh") or "empty" in name:
            self.count["views"] += 1
            return answer
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.count["operators"] += 1
        if self.count["operators"] > MOST:
            raise RuntimeError(f"more than {MOST} operators")
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **(kwargs or {}), out_val=answer)
            if "attention" in name:
                names = [argument.name for argument in func._schema.arguments]
                by_name = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
                self.count["attention"] += flops / (2 if by_name.get("is_causal") else 1)
            elif name not in LINEAR:
                self.count["products"] += flops
        elif "attention" not in name:  # its backward, which is priced by its forward
            self.count["bytes"] += sum(tensor.numel() * tensor.element_size() for tensor in (*inputs, *outputs))
        given = {tensor.untyped_storage()._cdata for tensor in inputs}
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.known | given:
                self.known.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return answer

    def _free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


class LeftOut(nn.Module):
    """Stands in for routed experts, which have formulas."""

    def forward(self, states: Tensor, *_: Any, **__: Any) -> Tensor:
        return states


class Recorded(nn.Module):
    """Stands in for a layer, and records what it is called with."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.call: Any = None

    def __getattr__(self, name: str) -> Any:  # some models read their layers' attributes
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.call = (states, args, kwargs)
        return states


def trace_layers(model: Any, numbers: Collection[int]) -> dict[int, dict[str, list[float]]]:
    """Return what one pass of each of these decoder layers keeps and does, at each of LENGTHS tokens in 16 bits.

    `model` is on the meta device and must not be used afterwards. Routed experts are left out: they have formulas.
    """
    backbone = model.model
    backbone.layers = backbone.layers[: max(numbers) + 1]  # those after it would compute for nothing
    backbone.config.num_hidden_layers = len(backbone.layers)
    backbone.to(torch.bfloat16).train().requires_grad_(False)
    for name, module in list(backbone.named_modules()):
        if EXPERTS.search(type(module).__name__):
            backbone.set_submodule(name, LeftOut())
    traced: dict[int, dict[str, list[float]]] = {number: {} for number in numbers}
    with FakeTensorMode(allow_non_fake_inputs=True):
        backbone.to_empty(device="cpu")
        for length in LENGTHS:
            layers = backbone.layers
            backbone.layers = nn.ModuleList(map(Recorded, layers))
            with torch.no_grad():
                backbone(input_ids=torch.zeros(1, length, dtype=torch.long), use_cache=False)
            calls = [recorded.call for recorded in backbone.layers]
            backbone.layers = layers
            for number in numbers:
                for key, value in _trace_layer(layers[number], *calls[number]).items():
                    traced[number].setdefault(key, []).append(value)
    return traced


def _trace_layer(layer: nn.Module, states: Tensor, args: Any, kwargs: Any) -> dict[str, float]:
    """Trace one forward and backward."""
    args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.detach(), (args, kwargs))
    states = states.detach().requires_grad_()
    with _Tracing() as tracing:
        with torch.autocast("cpu", torch.bfloat16):
            output = layer(states, *args, **kwargs)
        output = output[0] if isinstance(output, tuple) else output
        forward = tracing.count.copy()
        kept = tracing.live - output.nbytes
        inside = tracing.peak
        tracing.peak = tracing.live
        output.backward(torch.ones_like(output))
    backward = tracing.count - forward
    return {
        "kept": kept,
        "forward_peak": inside,
        "backward_peak": tracing.peak - kept,
        "attention": forward["attention"],  # its kernel's operations: half of the square if it computes no more
        **{f"forward_{key}": forward[key] for key in ("operators", "views", "products", "bytes")},
        **{f"backward_{key}": backward[key] for key in ("operators", "views", "products", "bytes")},
    }
