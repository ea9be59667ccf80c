"""The widths that costs are made of, read off the parameters' shapes: no family needs a formula of its own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, prod

from windlass.adapter import Adapter
from windlass.weights import Checkpoint, Parameter

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")
# Tokens' width of what each projection makes. Latent attention: keys are as wide as queries, and the values stay a
# view into what kv_b_proj made, which is therefore kept whole.
_QUERY = ("q_b_proj", "q_proj")
_OUTPUT = ("o_proj", "out_proj", "dense")


@dataclass(frozen=True, slots=True)
class Lora:
    """One adapted linear module, or one adapted stack of experts."""

    leaf: str
    part: str
    inputs: int
    outputs: int
    experts: int = 0  # 0: a plain linear

    def parameters(self, r: int) -> int:
        return r * (self.inputs + self.outputs) * max(self.experts, 1)


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer."""

    parameters: tuple[Parameter, ...]
    norms: int  # summed widths that norms run over
    query: int
    key: int
    value: int  # what is kept for the values
    attended: int  # width that o_proj reads
    mlp: int  # width of a dense or shared feed-forward
    expert: int  # width of one routed expert, 0: dense layer
    experts: int
    lora: tuple[Lora, ...]

    def count(self, *, experts: bool | None = None) -> int:
        """Parameters; of the routed experts alone, or of all but them."""
        return sum(prod(p.shape) for p in self.parameters if experts is None or experts == (p.part == "experts"))


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    vocab: int
    heads: int
    top_k: int
    tied: bool
    layers: tuple[Layer, ...]
    outside: tuple[Parameter, ...] = field(repr=False)  # embedding, final norm, head

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (*self.outside, *(p for layer in self.layers for p in layer.parameters))

    @property
    def total(self) -> int:
        return sum(prod(p.shape) for p in self.parameters)

    @property
    def experts(self) -> int:
        """Parameters of all routed experts."""
        return sum(layer.count(experts=True) for layer in self.layers)

    @property
    def head(self) -> int:
        return self.hidden * self.vocab

    @property
    def tail(self) -> tuple[Parameter, ...]:
        """The group kept whole from the end of the forward to the start of the backward: final norm and head.

        transformers' plans name both `keep_full_weight`; a tied head is the embedding.
        """
        return tuple(p for p in self.outside if p.part in ("norm", "head") or (self.tied and p.part == "embedding"))

    @property
    def active(self) -> float:
        """Parameters that multiply each token: the embedding is looked up, of the routed experts top_k of all."""
        per_layer = sum(
            sum(prod(p.shape) for p in layer.parameters if p.part != "experts" and len(p.shape) > 1)
            + (layer.count(experts=True) * self.top_k / layer.experts if layer.experts else 0)
            for layer in self.layers
        )
        return per_layer + self.head


def sharded(parameters: Iterable[Parameter], ranks: int) -> int:
    """Elements that the fullest rank holds: the first dimension is cut into equal pieces, rounded up."""
    return sum(ceil(p.shape[0] / ranks) * prod(p.shape[1:]) for p in parameters)


@lru_cache(maxsize=32)
def _layers(parameters: tuple[Parameter, ...]) -> dict[int, dict[str, Parameter]]:
    layers: dict[int, dict[str, Parameter]] = {}
    for parameter in parameters:
        match = _LAYER.search(parameter.name)
        if match:
            layers.setdefault(int(match[1]), {})[match[2]] = parameter
    return layers


def read(checkpoint: Checkpoint, adapter: Adapter) -> Shape:
    """The shape of this model with this adapter."""
    targets = (*adapter.target_modules, *adapter.target_parameters)
    return _read(checkpoint.parameters, targets, checkpoint.dims.get("heads", 1), checkpoint.dims.get("top_k", 0))


@lru_cache(maxsize=32)  # a plan weighs dozens of layouts of one model
def _read(parameters: tuple[Parameter, ...], targets: tuple[str, ...], heads: int, top_k: int) -> Shape:
    by_layer = _layers(parameters)
    adapted = _adapted(targets)
    layers = tuple(_layer(by_layer[i], adapted.get(i, ())) for i in sorted(by_layer))
    outside = tuple(p for p in parameters if not _LAYER.search(p.name))
    embedding = next(p for p in outside if p.part == "embedding")
    return Shape(
        hidden=embedding.shape[1],
        vocab=embedding.shape[0],
        heads=heads,
        top_k=top_k,
        tied=not any(p.part == "head" for p in outside),
        layers=layers,
        outside=outside,
    )


def _adapted(targets: Iterable[str]) -> dict[int, tuple[str, ...]]:
    found: dict[int, list[str]] = {}
    for name in targets:
        match = _LAYER.search(name)
        if match:
            found.setdefault(int(match[1]), []).append(match[2])
    return {index: tuple(names) for index, names in found.items()}


def _layer(own: dict[str, Parameter], adapted: tuple[str, ...]) -> Layer:
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
        norms=norms,
        query=query,
        key=key,
        value=value,
        attended=attended,
        mlp=mlp,
        expert=expert,
        experts=stacks[0].shape[0] if stacks else 0,
        lora=tuple(filter(None, (_lora(name, own) for name in adapted))),
    )


def _norm_width(name: str, parameter: Parameter, query: int, key: int) -> int:
    """A norm over each head sees all heads: `q_norm` of one head's width runs over the whole query."""
    if re.search(r"\b(q_norm|query_norm)\b", name):
        return query
    if re.search(r"\b(k_norm|key_norm)\b", name):
        return key
    return parameter.shape[0] if name.endswith("weight") else 0


def _lora(name: str, own: dict[str, Parameter]) -> Lora | None:
    parameter = own.get(f"{name}.weight") or own.get(name)
    if parameter is None or len(parameter.shape) < 2:
        return None
    leaf = name.rpartition(".")[2]
    *experts, outputs, inputs = parameter.shape
    return Lora(leaf, parameter.part, inputs, outputs, experts[0] if experts else 0)
