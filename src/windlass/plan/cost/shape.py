"""The widths that costs are made of, read off the parameters' shapes: no family needs a formula of its own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import ceil, prod

from windlass.model import Base, Parameter
from windlass.model.targets import Adapter

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")
# Tokens' width of what each projection makes. Latent attention: keys are as wide as queries, and the values stay a
# view into what kv_b_proj made, which is therefore kept whole.
_QUERY = ("q_b_proj", "q_proj")
_OUTPUT = ("o_proj", "out_proj", "dense")
# Where no weights are at hand to say it: what publishers store in FP8.
_IN_FP8 = ("attention", "mlp", "shared_experts", "experts")


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one element: of most parameters, and of those that are kept as the checkpoint has them in FP8."""

    size: int
    fp8: float

    def bytes(self, count: Count) -> float:
        return (count.all - count.fp8) * self.size + count.fp8 * self.fp8


@dataclass(frozen=True, slots=True)
class Count:
    """Elements, and how many of them the checkpoint stores in FP8."""

    all: int = 0
    fp8: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.all + other.all, self.fp8 + other.fp8)

    def __mul__(self, times: int) -> Count:
        return Count(self.all * times, self.fp8 * times)

    def __floordiv__(self, ranks: int) -> Count:
        return Count(self.all // ranks, self.fp8 // ranks)


@dataclass(frozen=True, slots=True)
class Lora:
    """One adapted linear module, or one adapted stack of experts."""

    leaf: str
    part: str
    inputs: int
    outputs: int
    r: int
    experts: int = 0  # 0: a plain linear

    @property
    def parameters(self) -> int:
        return self.r * (self.inputs + self.outputs) * max(self.experts, 1)


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    parameters: tuple[Parameter, ...]
    fp8: frozenset[str] = field(repr=False)  # names of those that are stored in FP8
    norms: int  # summed widths that norms run over
    query: int
    key: int
    value: int  # what is kept for the values
    attended: int  # width that o_proj reads
    mlp: int  # width of a dense or shared feed-forward
    expert: int  # width of one routed expert, 0: dense layer
    experts: int
    lora: tuple[Lora, ...]

    @cached_property
    def dense(self) -> Count:
        """All but the routed experts."""
        return counted((p for p in self.parameters if p.part != "experts"), self.fp8)

    @cached_property
    def routed(self) -> Count:
        return counted((p for p in self.parameters if p.part == "experts"), self.fp8)

    @cached_property
    def whole(self) -> Count:
        return self.dense + self.routed

    @cached_property
    def likeness(self) -> tuple[object, ...]:
        """Equal for layers that cost the same."""
        widths = (self.norms, self.query, self.key, self.value, self.attended, self.mlp, self.expert, self.experts)
        return *widths, self.lora, tuple((p.part, p.shape, p.name in self.fp8) for p in self.parameters)


@dataclass(frozen=True)
class Shape:
    hidden: int
    vocab: int
    heads: int
    top_k: int
    tied: bool
    layers: tuple[Layer, ...]
    outside: tuple[Parameter, ...] = field(repr=False)  # embedding, final norm, head

    fp8: frozenset[str] = field(repr=False)  # names of the parameters that are stored in FP8

    @cached_property
    def kinds(self) -> tuple[tuple[Layer, int], ...]:
        """One layer of each kind, and how many there are: most models are one layer many times over."""
        found: dict[tuple[object, ...], list[Layer]] = {}
        for layer in self.layers:
            found.setdefault(layer.likeness, []).append(layer)
        return tuple((same[0], len(same)) for same in found.values())

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        return (*self.outside, *(p for layer in self.layers for p in layer.parameters))

    @cached_property
    def whole(self) -> Count:
        return self.rest + self.inside

    @cached_property
    def inside(self) -> Count:
        """All layers."""
        return sum((layer.whole * times for layer, times in self.kinds), Count())

    @cached_property
    def routed(self) -> Count:
        """Of all routed experts."""
        return sum((layer.routed * times for layer, times in self.kinds), Count())

    @cached_property
    def rest(self) -> Count:
        """Embedding, final norm, head."""
        return counted(self.outside, self.fp8)

    @property
    def total(self) -> int:
        return self.whole.all

    @property
    def experts(self) -> int:
        """Parameters of all routed experts."""
        return self.routed.all

    @cached_property
    def widest(self) -> int:
        """Elements of the largest parameter."""
        return max(prod(p.shape) for p in self.parameters)

    @cached_property
    def embedding(self) -> Count:
        return counted((p for p in self.outside if p.part == "embedding"), self.fp8)

    @property
    def head(self) -> int:
        return self.hidden * self.vocab

    @cached_property
    def tail(self) -> tuple[Parameter, ...]:
        """The group kept whole from the end of the forward to the start of the backward: final norm and head.

        transformers' plans name both `keep_full_weight`; a tied head is the embedding.
        """
        return tuple(p for p in self.outside if p.part in ("norm", "head") or (self.tied and p.part == "embedding"))

    @cached_property
    def active(self) -> float:
        """Parameters that multiply each token: the embedding is looked up, of the routed experts top_k of all."""
        per_layer = sum(
            times
            * (
                sum(prod(p.shape) for p in layer.parameters if p.part != "experts" and len(p.shape) > 1)
                + (layer.routed.all * self.top_k / layer.experts if layer.experts else 0)
            )
            for layer, times in self.kinds
        )
        return per_layer + self.head

    def sharded(self, ranks: int, *, experts: bool | None = None) -> Count:
        """What the fullest rank holds; of the routed experts alone, or of all but them."""

        def share(parameters: Iterable[Parameter]) -> Count:
            chosen = (p for p in parameters if experts is None or experts == (p.part == "experts"))
            return sharded(chosen, ranks, self.fp8)

        return sum((share(layer.parameters) * times for layer, times in self.kinds), share(self.outside))


def counted(parameters: Iterable[Parameter], fp8: frozenset[str]) -> Count:
    return sharded(parameters, 1, fp8)


def sharded(parameters: Iterable[Parameter], ranks: int, fp8: frozenset[str]) -> Count:
    """Elements that the fullest rank holds: the first dimension is cut into equal pieces, rounded up."""
    sizes: Counter[bool] = Counter()
    for p in parameters:
        sizes[p.name in fp8] += ceil(p.shape[0] / ranks) * prod(p.shape[1:])
    return Count(sizes[True] + sizes[False], sizes[True])


def in_fp8(checkpoint: Base) -> frozenset[str]:
    """Names of the parameters that the checkpoint stores in FP8; by the publisher's habit where no weights are here."""
    if checkpoint.quantization is None:
        return frozenset()
    return frozenset(p.name for p in checkpoint.parameters if _is_fp8(p))


def _is_fp8(parameter: Parameter) -> bool:
    if parameter.pieces:
        return all(piece.stored.dtype.startswith("F8") for piece in parameter.pieces)
    return parameter.part in _IN_FP8 and len(parameter.shape) > 1


class _Same:
    """A key that is equal for the very same objects: hashing thousands of parameters takes longer than using them."""

    def __init__(self, *things: object) -> None:
        self.things = things

    def __hash__(self) -> int:
        return hash(tuple(map(id, self.things)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and all(a is b for a, b in zip(self.things, other.things, strict=True))


def _layers(parameters: tuple[Parameter, ...]) -> dict[int, dict[str, Parameter]]:
    layers: dict[int, dict[str, Parameter]] = {}
    for parameter in parameters:
        match = _LAYER.search(parameter.name)
        if match:
            layers.setdefault(int(match[1]), {})[match[2]] = parameter
    return layers


def read(checkpoint: Base, adapter: Adapter) -> Shape:
    """The shape of this model with this adapter."""
    return _read(_Same(checkpoint, adapter))


@lru_cache(maxsize=4)
def _read(key: _Same) -> Shape:
    base: Base
    adapter: Adapter
    base, adapter = key.things  # type: ignore[assignment]
    fp8 = in_fp8(base)
    own = {target.part: target.r for target in adapter.targets if target.r}  # experts may have a rank of their own
    ranks = {part: own.get(part, adapter.r) for part in {p.part for p in base.parameters}}
    by_layer = _layers(base.parameters)
    adapted = _adapted((*adapter.target_modules, *adapter.target_parameters))
    dims = base.dims
    layers = tuple(_layer(by_layer[i], adapted.get(i, ()), fp8, ranks) for i in sorted(by_layer))
    outside = tuple(p for p in base.parameters if not _LAYER.search(p.name))
    embedding = next(p for p in outside if p.part == "embedding")
    return Shape(
        hidden=embedding.shape[1],
        vocab=embedding.shape[0],
        heads=dims.get("heads", 1),
        top_k=dims.get("top_k", 0),
        tied=not any(p.part == "head" for p in outside),
        layers=layers,
        outside=outside,
        fp8=fp8,
    )


def _adapted(targets: Iterable[str]) -> dict[int, tuple[str, ...]]:
    found: dict[int, list[str]] = {}
    for name in targets:
        match = _LAYER.search(name)
        if match:
            found.setdefault(int(match[1]), []).append(match[2])
    return {index: tuple(names) for index, names in found.items()}


def _layer(own: dict[str, Parameter], adapted: tuple[str, ...], fp8: frozenset[str], ranks: dict[str, int]) -> Layer:
    linear = {name.removesuffix(".weight").rpartition(".")[2]: p for name, p in own.items() if len(p.shape) == 2}

    def out(names: Iterable[str], otherwise: int) -> int:
        return next((linear[name].shape[0] for name in names if name in linear), otherwise)

    hidden = next(iter(p.shape[0] for name, p in own.items() if name.startswith("input_layernorm")), 0)
    attended = next((linear[name].shape[1] for name in _OUTPUT if name in linear), hidden)
    query = out(_QUERY, attended)
    latent = "kv_b_proj" in linear
    key = query if latent else out(("k_proj",), attended)
    value = out(("kv_b_proj", "v_proj"), attended)
    stacks = [p for p in own.values() if p.part == "experts" and len(p.shape) == 3]
    expert = next((p.shape[2] for name, p in own.items() if p.part == "experts" and "down_proj" in name), 0)
    mlp = next((p.shape[1] for p in own.values() if p.part in ("mlp", "shared_experts") and "down_proj" in p.name), 0)
    norms = sum(_norm_width(name, p, query, key) for name, p in own.items() if p.part == "norm")
    return Layer(
        parameters=tuple(own.values()),
        fp8=fp8,
        norms=norms,
        query=query,
        key=key,
        value=value,
        attended=attended,
        mlp=mlp,
        expert=expert,
        experts=stacks[0].shape[0] if stacks else 0,
        lora=tuple(filter(None, (_lora(name, own, ranks) for name in adapted))),
    )


def _norm_width(name: str, parameter: Parameter, query: int, key: int) -> int:
    """A norm over each head sees all heads: `q_norm` of one head's width runs over the whole query."""
    if re.search(r"\b(q_norm|query_norm)\b", name):
        return query
    if re.search(r"\b(k_norm|key_norm)\b", name):
        return key
    return parameter.shape[0] if name.endswith("weight") else 0


def _lora(name: str, own: dict[str, Parameter], ranks: dict[str, int]) -> Lora | None:
    parameter = own.get(f"{name}.weight") or own.get(name)
    if parameter is None or len(parameter.shape) < 2:
        return None
    leaf = name.rpartition(".")[2]
    *experts, outputs, inputs = parameter.shape
    return Lora(leaf, parameter.part, inputs, outputs, ranks[parameter.part], experts[0] if experts else 0)
