"""What the estimates are made from: the run, and the widths of its model, read off the parameters' shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import ceil, prod

from windlass.hardware import Machine
from windlass.model import Base, Parameter
from windlass.model.targets import Adapter, expert_path
from windlass.plan.layout import Layout

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")
# Names of the projections that make the queries, and of those that read what attention returns.
_QUERY = ("q_b_proj", "q_proj")
_OUTPUT = ("o_proj", "out_proj", "dense")
# What publishers store in FP8, for a config without weights to say it.
_FP8_PARTS = ("attention", "mlp", "shared_experts", "experts")


@dataclass(frozen=True, slots=True)
class Batch:
    micro: int  # sequences per GPU and micro-batch
    accumulation: int
    length: int  # tokens per sequence

    @property
    def tokens(self) -> int:
        """Tokens per GPU and micro-batch."""
        return self.micro * self.length


@dataclass(frozen=True, slots=True)
class Work:
    """Everything about a run that its memory, traffic and time depend on."""

    base: Base
    adapter: Adapter
    layout: Layout
    batch: Batch
    machine: Machine
    optim: str  # transformers' name: adamw_torch
    base_bytes: int  # bytes per base parameter once loaded: 2 for bfloat16
    dropout: float = 0.0  # lora.lora_dropout
    expert_path: str = (
        "split"  # expert adapters: computed separately from the experts (split) or merged into them first
    )
    masked: bool = False  # packed rows whose documents a mask separates
    document: int | None = None  # usual tokens of what packed rows are made of, if attention is within each
    full_logits: bool = False  # a loss that needs every logit at once, as label smoothing does
    evaluated: int = 0  # sequences per GPU in one batch of an evaluation; 0: there is none

    @property
    def on_cpu(self) -> bool:
        return self.machine.gpu.name == "cpu"

    @property
    def shape(self) -> Shape:
        return read_shape(self.base, self.adapter)

    def under(self, layout: Layout) -> Work:
        """The same run under another layout, which also decides how adapters of experts can be computed."""
        mergeable = not self.dropout and layout.expert_parallel == 1 and layout.base_dtype != "fp8"
        stacks = [
            (lora.experts, lora.outputs, lora.inputs) for layer in self.shape.layers for lora in layer.expert_lora
        ]
        path = expert_path(stacks, self.base.dims.get("top_k", 0), self.batch.tokens, mergeable=mergeable)
        return replace(self, layout=layout, expert_path=path)


# --- elements and their bytes ------------------


@dataclass(frozen=True, slots=True)
class Count:
    """Elements, and how many of them the checkpoint stores in FP8."""

    all: int = 0
    fp8: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.all + other.all, self.fp8 + other.fp8)

    def __sub__(self, other: Count) -> Count:
        return Count(self.all - other.all, self.fp8 - other.fp8)

    def __mul__(self, times: int) -> Count:
        return Count(self.all * times, self.fp8 * times)

    def __floordiv__(self, ranks: int) -> Count:
        return Count(self.all // ranks, self.fp8 // ranks)


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """Bytes of one element: of most parameters, and of those that stay as the checkpoint has them in FP8."""

    most: int
    fp8: float

    def of(self, count: Count) -> float:
        return (count.all - count.fp8) * self.most + count.fp8 * self.fp8

    def describe(self, count: Count) -> str:
        if self.fp8 == self.most or not count.fp8:
            return f"{count.all} parameters x {self.most}"
        return f"{count.fp8} parameters in FP8 x {self.fp8:.6g} + {count.all - count.fp8} x {self.most}"


def count(parameters: Iterable[Parameter], fp8: frozenset[str], ranks: int = 1) -> Count:
    """Elements that the fullest of so many ranks has: the first dimension is cut into equal pieces, rounded up."""
    total = narrow = 0
    for p in parameters:
        size = ceil(p.shape[0] / ranks) * prod(p.shape[1:])
        total += size
        narrow += size if p.name in fp8 else 0
    return Count(total, narrow)


def in_fp8(base: Base) -> frozenset[str]:
    """Names of the parameters that the checkpoint stores in FP8; by the publishers' habit if no weights are here."""

    def is_fp8(parameter: Parameter) -> bool:
        if parameter.pieces:
            return all(piece.stored.dtype.startswith("F8") for piece in parameter.pieces)
        return parameter.part in _FP8_PARTS and len(parameter.shape) > 1

    return frozenset(p.name for p in base.parameters if base.quantization is not None and is_fp8(p))


# --- the model ------------------


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
        return count((p for p in self.parameters if p.part != "experts"), self.fp8)

    @cached_property
    def routed(self) -> Count:
        return count((p for p in self.parameters if p.part == "experts"), self.fp8)

    @cached_property
    def all(self) -> Count:
        return self.dense + self.routed

    @cached_property
    def plain_lora(self) -> tuple[Lora, ...]:
        return tuple(lora for lora in self.lora if not lora.experts)

    @cached_property
    def expert_lora(self) -> tuple[Lora, ...]:
        return tuple(lora for lora in self.lora if lora.experts)


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
            widths = (layer.norms, layer.query, layer.key, layer.value, layer.attended, layer.mlp, layer.expert)
            parameters = tuple((p.part, p.shape, p.name in self.fp8) for p in layer.parameters)
            found.setdefault((*widths, layer.experts, layer.lora, parameters), []).append(layer)
        return tuple((same[0], len(same)) for same in found.values())

    @cached_property
    def inside(self) -> Count:
        """All layers."""
        return sum((layer.all * times for layer, times in self.kinds), Count())

    @cached_property
    def routed(self) -> Count:
        """All routed experts."""
        return sum((layer.routed * times for layer, times in self.kinds), Count())

    @cached_property
    def rest(self) -> Count:
        """Embedding, final norm, head."""
        return count(self.outside, self.fp8)

    @cached_property
    def all(self) -> Count:
        return self.rest + self.inside

    @cached_property
    def embedding(self) -> Count:
        return count((p for p in self.outside if p.part == "embedding"), self.fp8)

    @property
    def head(self) -> int:
        return self.hidden * self.vocab

    @cached_property
    def tail(self) -> Count:
        """The group that stays gathered from the end of the forward to the start of the backward: final norm and head.

        transformers' plans name both `keep_full_weight`; a tied head is the embedding.
        """
        return count((p for p in self.outside if self._in_tail(p)), self.fp8)

    @cached_property
    def before_tail(self) -> Count:
        return count((p for p in self.outside if not self._in_tail(p)), self.fp8)

    def _in_tail(self, parameter: Parameter) -> bool:
        return parameter.part in ("norm", "head") or (self.tied and parameter.part == "embedding")

    @cached_property
    def active(self) -> float:
        """Parameters that multiply each token: the embedding is looked up, of the routed experts top_k of all."""
        total = 0.0
        for layer, times in self.kinds:
            own = sum(p.count for p in layer.parameters if p.part != "experts" and len(p.shape) > 1)
            total += times * (own + (layer.routed.all * self.top_k / layer.experts if layer.experts else 0))
        return total + self.head

    @cached_property
    def expert_adapter_parameters(self) -> int:
        """Trained parameters of the routed experts."""
        return sum(lora.parameters * times for layer, times in self.kinds for lora in layer.expert_lora)

    def sharded(self, ranks: int, *, experts: bool) -> Count:
        """What the fullest rank has of everything, with or without the routed experts."""

        def share(parameters: Iterable[Parameter]) -> Count:
            return count((p for p in parameters if experts or p.part != "experts"), self.fp8, ranks)

        return sum((share(layer.parameters) * times for layer, times in self.kinds), share(self.outside))


class _Identity:
    """A key that is equal for the very same objects: hashing thousands of parameters takes longer than using them."""

    def __init__(self, *things: object) -> None:
        self.things = things

    def __hash__(self) -> int:
        return hash(tuple(map(id, self.things)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and all(a is b for a, b in zip(self.things, other.things, strict=True))


def read_shape(base: Base, adapter: Adapter) -> Shape:
    """The shape of this model with this adapter."""
    return _read_shape(_Identity(base, adapter))


@lru_cache(maxsize=4)
def _read_shape(key: _Identity) -> Shape:
    base: Base
    adapter: Adapter
    base, adapter = key.things  # type: ignore[assignment]
    fp8 = in_fp8(base)
    own = {target.part: target.r for target in adapter.targets if target.r}  # experts may have a rank of their own
    ranks = {part: own.get(part, adapter.r) for part in {p.part for p in base.parameters}}
    by_layer: dict[int, dict[str, Parameter]] = {}
    outside = []
    for parameter in base.parameters:
        if match := _LAYER.search(parameter.name):
            by_layer.setdefault(int(match[1]), {})[match[2]] = parameter
        else:
            outside.append(parameter)
    adapted: dict[int, list[str]] = {}
    for name in (*adapter.target_modules, *adapter.target_parameters):
        if match := _LAYER.search(name):
            adapted.setdefault(int(match[1]), []).append(match[2])
    embedding = next(p for p in outside if p.part == "embedding")
    return Shape(
        hidden=embedding.shape[1],
        vocab=embedding.shape[0],
        heads=base.dims.get("heads", 1),
        top_k=base.dims.get("top_k", 0),
        tied=not any(p.part == "head" for p in outside),
        layers=tuple(_read_layer(by_layer[i], adapted.get(i, []), fp8, ranks) for i in sorted(by_layer)),
        outside=tuple(outside),
        fp8=fp8,
    )


def _read_layer(own: dict[str, Parameter], adapted: list[str], fp8: frozenset[str], ranks: dict[str, int]) -> Layer:
    """No family needs a formula of its own: the names of linear modules and their shapes say it all."""
    linear = {name.removesuffix(".weight").rpartition(".")[2]: p for name, p in own.items() if len(p.shape) == 2}

    def out(names: Iterable[str], otherwise: int) -> int:
        return next((linear[name].shape[0] for name in names if name in linear), otherwise)

    hidden = next((p.shape[0] for name, p in own.items() if name.startswith("input_layernorm")), 0)
    attended = next((linear[name].shape[1] for name in _OUTPUT if name in linear), hidden)
    query = out(_QUERY, attended)
    # Latent attention: keys are as wide as queries, and the values stay a view into what kv_b_proj made, which is
    # therefore kept as it is.
    key = query if "kv_b_proj" in linear else out(("k_proj",), attended)
    norms = 0
    for name, p in own.items():  # a norm over each head sees all heads: `q_norm` of one head runs over the full query
        if p.part == "norm":
            wide = re.search(r"\b(?:(q_norm|query_norm)|(k_norm|key_norm))\b", name)
            norms += (query if wide[1] else key) if wide else p.shape[0] if name.endswith("weight") else 0
    lora = []
    for name in adapted:
        weight = own.get(f"{name}.weight") or own.get(name)
        if weight is not None and len(weight.shape) >= 2:
            *stack, outputs, inputs = weight.shape
            leaf = name.rpartition(".")[2]
            lora.append(Lora(leaf, weight.part, inputs, outputs, ranks[weight.part], stack[0] if stack else 0))
    experts = [(name, p) for name, p in own.items() if p.part == "experts"]
    return Layer(
        parameters=tuple(own.values()),
        fp8=fp8,
        norms=norms,
        query=query,
        key=key,
        value=out(("kv_b_proj", "v_proj"), attended),
        attended=attended,
        mlp=next(
            (p.shape[1] for p in own.values() if p.part in ("mlp", "shared_experts") and "down_proj" in p.name), 0
        ),
        expert=next((p.shape[2] for name, p in experts if "down_proj" in name), 0),
        experts=next((p.shape[0] for _, p in experts if len(p.shape) == 3), 0),
        lora=tuple(lora),
    )
