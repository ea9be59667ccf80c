"""The inputs of the estimates: the run, and the widths of its model, read from the parameters' shapes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, prod

from windlass.hardware import Machine
from windlass.model import Base, Parameter
from windlass.model.quantization import published_dtype, quantizable_names
from windlass.model.targets import Adapter
from windlass.plan.layout import Layout
from windlass.plan.split_rows import pad_to_pieces
from windlass.settings import SPLIT_QUERIES

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")
# Names of the projections that make the queries, and of those that read attention's result.
_QUERY = ("q_b_proj", "q_proj")
_OUTPUT = ("o_proj", "out_proj", "dense")
_FUSED = ("qkv_proj", "query_key_value", "Wqkv", "c_attn")  # queries, then keys and values
TRACED_LENGTHS = (256, 512, 768)  # trace.py's


@dataclass(frozen=True, slots=True)
class BatchSize:
    micro: int  # rows per reader and micro-batch: sequences, or pairs of them
    accumulation: int
    length: int  # tokens per sequence
    sides: int = 1  # sequences per row: 2 of a pair

    @property
    def tokens(self) -> int:
        return self.micro * self.sides * self.length


@dataclass(frozen=True, slots=True)
class Workload:
    """A run, as far as its memory, traffic and time depend on it."""

    shape: ModelShape
    layout: Layout
    batch: BatchSize
    machine: Machine
    optim: str  # transformers' name: adamw_torch
    base_bytes: int  # bytes per base parameter once loaded: 2 for bfloat16
    dropout: float = 0.0  # lora.lora_dropout
    dora: bool = False  # lora.use_dora
    scores: bool = False  # attention keeps each head's score matrix, as `eager` does
    masked: bool = False  # a mask separates the documents of packed rows
    document: int | None = None  # usual tokens of a document in packed rows
    four_bits: bool = False  # the base could be stored in 4 bits: see settings.FOUR_BITS
    keeps_products: bool = False  # recomputed layers keep routed experts' products and the tokens sent to them
    may_offload: bool = False  # inputs of recomputed layers could be stored in host memory
    splits: tuple[int, ...] = ()  # numbers of GPUs that rows could be split over
    evaluated: int = 0  # sequences per GPU in one evaluation batch; 0: no evaluation
    of_narrow_pairs: bool = False  # rows are pairs, evaluated in float32, and steps compute in 16 bits
    barred: frozenset[str] = frozenset()  # layouts that the rest of the run rules out on several GPUs
    versions: Mapping[str, str] = field(default_factory=dict, hash=False)  # of libraries, where the run's are known
    trains_base: bool = False  # modules or biases of the base are trained, so it can't be offloaded
    keeps: bool = False  # evaluations measure kept sets: with the adapter and without it

    @property
    def on_cpu(self) -> bool:
        return self.machine.gpu.name == "cpu"

    @property
    def tokens(self) -> int:
        """Return the tokens per GPU and micro-batch: a row's own, or the GPU's pieces of it."""
        split = self.layout.context_parallel
        return self.batch.micro * self.batch.sides * pad_to_pieces(self.batch.length, split) // split

    @property
    def separate(self) -> bool:
        """Return whether operators stay separate, as in transformers and PEFT. On GPUs they are fused."""
        return self.on_cpu

    @property
    def casts_inputs(self) -> bool:
        """Return whether each adapted module casts its own input. Fused ones share it, and copies of their weights, but
        not without autocast, where inputs are cast to the adapter's dtype."""
        fused = not (self.separate or self.dora) and self.layout.precision == "bf16"
        return self.shape.adapter.dtype_bytes > self.width and not fused

    @property
    def input_width(self) -> int:
        """Return the bytes per value of an adapted module's input: autocast's, or without it the adapter's."""
        return self.width if self.layout.precision == "bf16" else max(self.width, self.shape.adapter.dtype_bytes)

    @property
    def attention_length(self) -> int:
        """Return the tokens that attention covers: a document's, or under a mask the whole row's."""
        return self.batch.length if self.document is None or self.has_mask else self.document

    @property
    def has_mask(self) -> bool:
        """Return whether a square mask separates packed documents. Split rows have none: each is computed by itself."""
        return self.masked and self.layout.context_parallel == 1

    @property
    def keys_per_token(self) -> float:
        """Return the keys, per token of a GPU, whose gradients exist at once in split rows. A document's part in a
        piece is computed against all of the document up to there; on a CPU in spans of SPLIT_QUERIES."""
        own = self.batch.length / self.layout.context_parallel
        if copied := self.copied_keys:
            return max(1.0, copied)
        if self.on_cpu:
            return max(1.0, (self.attention_length / SPLIT_QUERIES + 1) / 2)
        return min(self.layout.context_parallel + 0.5, 1 + self.attention_length / own)

    @property
    def copied_keys(self) -> float:
        """Return the keys, per token of a GPU, of which split rows keep copies for attention sinks, one with each span
        of queries. Of the widest layer: sliding windows copy less."""
        if self.layout.context_parallel == 1:
            return 0.0
        folds = max(layer.folds for layer, _ in self.shape.kinds)
        if not folds:
            return 0.0
        return (self.attention_length * folds / SPLIT_QUERIES + 1) / 2

    @property
    def passes(self) -> int:
        """Return how often a micro-batch goes through the layers: forward, backward, and recomputation."""
        return 2 + bool(self.layout.activation_checkpointing)

    @property
    def expert_passes(self) -> int:
        """Return how often a micro-batch goes through the routed experts."""
        return self.passes - bool(self.layout.activation_checkpointing and self.keeps_products)

    @property
    def width(self) -> int:
        """Return the bytes of a value in the compute dtype."""
        return 2 if self.layout.precision == "bf16" else max(self.base_bytes, 2)


@dataclass(frozen=True, slots=True)
class ElementCount:
    """A number of elements, and how many of them `layout.base_dtype` applies to."""

    total: int = 0
    narrow: int = 0

    def __add__(self, other: ElementCount) -> ElementCount:
        return ElementCount(self.total + other.total, self.narrow + other.narrow)

    def __sub__(self, other: ElementCount) -> ElementCount:
        return ElementCount(self.total - other.total, self.narrow - other.narrow)

    def __mul__(self, times: int) -> ElementCount:
        return ElementCount(self.total * times, self.narrow * times)

    def __floordiv__(self, ranks: int) -> ElementCount:
        return ElementCount(self.total // ranks, self.narrow // ranks)


@dataclass(frozen=True, slots=True)
class AdaptedModule:
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


@dataclass(frozen=True, slots=True)
class Traced:
    """Measurements of a layer without a formula, by trace.py, in 16 bits and without its routed experts."""

    points: Mapping[str, Sequence[float]]

    def at(self, what: str, length: int) -> float:
        """Return the value for one sequence of this length, on the parabola through the measured points."""
        total = 0.0
        for x, y in zip(TRACED_LENGTHS, self.points[what], strict=True):
            others = [other for other in TRACED_LENGTHS if other != x]
            total += y * prod(length - other for other in others) / prod(x - other for other in others)
        return max(total, 0.0)


@dataclass(frozen=True, eq=False, slots=True)
class Layer:
    """One decoder layer. Identical layers share one object."""

    parameters: tuple[Parameter, ...]
    dense: ElementCount  # all but the routed experts
    routed: ElementCount
    norms: int  # summed widths that norms run over
    query: int
    key: int
    value: int  # width that is kept for the values
    gathered: int  # width of keys and values that attention reads
    attended: int  # width that o_proj reads
    mlp: int  # width of a dense or shared feed-forward
    expert: int  # width of one routed expert, 0: dense layer
    experts: int
    hidden: int
    plain_lora: tuple[AdaptedModule, ...]
    expert_lora: tuple[AdaptedModule, ...]
    traced: Traced | None = None

    @property
    def elements(self) -> ElementCount:
        return self.dense + self.routed

    @property
    def folds(self) -> int:
        """Return how many heads share keys in attention with sinks; 0 without them."""
        has_sinks = any(parameter.name.endswith(".sinks") for parameter in self.parameters)
        return self.query // max(self.key, 1) if has_sinks else 0


@dataclass(frozen=True, eq=False)
class ModelShape:
    """The counts and widths of a model with its adapter."""

    base: Base = field(repr=False)
    adapter: Adapter = field(repr=False)
    narrow: frozenset[str] = field(repr=False)  # names of the parameters that `layout.base_dtype` applies to
    published: str  # the checkpoint's quantized dtype, as layout.base_dtype names it; empty if not quantized
    outside: tuple[Parameter, ...] = field(repr=False)  # embedding, final norm, head
    layers: tuple[Layer, ...]
    kinds: tuple[tuple[Layer, int], ...]  # one layer of each kind, and their number
    hidden: int
    vocab: int
    heads: int
    top_k: int
    embedding: ElementCount
    # The group that stays gathered from the end of the forward to the start of the backward: final norm and head.
    # transformers' plans mark both `keep_full_weight`; a tied head is the embedding.
    tail: ElementCount
    rest: ElementCount  # all outside the layers
    elements: ElementCount
    routed: ElementCount  # all routed experts
    active: float  # parameters that multiply each token: without the embedding lookup, with top_k experts per layer
    expert_adapter_parameters: int

    @property
    def head(self) -> int:
        return self.hidden * self.vocab

    def sharded(self, ranks: int, *, experts: bool) -> ElementCount:
        """Count the elements on the fullest rank, with or without the routed experts."""
        total = count_elements(self.outside, self.narrow, ranks)
        for layer, times in self.kinds:
            kept = (p for p in layer.parameters if experts or p.part != "experts")
            total += count_elements(kept, self.narrow, ranks) * times
        return total


def count_elements(parameters: Iterable[Parameter], names: frozenset[str], ranks: int = 1) -> ElementCount:
    """Count the elements on the fullest rank: the first dimension is split evenly over the ranks, rounded up."""
    total = 0
    narrow = 0
    for p in parameters:
        rows, *rest = p.shape or (1,)
        size = ceil(rows / ranks) * prod(rest)
        total += size
        if p.name in names:
            narrow += size
    return ElementCount(total, narrow)


def read_shape(base: Base, adapter: Adapter) -> ModelShape:
    names = quantizable_names(base)
    top_k = base.dims.get("top_k", 0)
    by_layer: dict[int, dict[str, Parameter]] = {}
    outside = []
    for parameter in base.parameters:
        if match := _LAYER.search(parameter.name):
            by_layer.setdefault(int(match[1]), {})[match[2]] = parameter
        else:
            outside.append(parameter)
    adapted: dict[int, dict[str, int]] = {}  # by layer, each adapter's r
    for name in (*adapter.target_modules, *adapter.target_parameters):
        if match := _LAYER.search(name):
            adapted.setdefault(int(match[1]), {})[match[2]] = adapter.r_by_module.get(name, adapter.r)
    embedding = next(p for p in outside if p.part == "embedding")
    vocab, hidden = embedding.shape
    alike: dict[object, Layer] = {}
    layers = []
    for number, parameters in sorted(by_layer.items()):
        r_of = adapted.get(number, {})
        key = (*((name, p.shape, p.name in names) for name, p in parameters.items()), *r_of.items())
        if key not in alike:
            points = base.family.traced.get(number)
            layer = _read_layer(parameters, r_of, names, hidden)
            alike[key] = replace(layer, traced=Traced(points)) if points else layer
        layers.append(alike[key])
    kinds = tuple(Counter(layers).items())
    tied = not any(p.part == "head" for p in outside)
    tail = [p for p in outside if p.part in ("norm", "head") or (tied and p.part == "embedding")]
    active = float(hidden * vocab)
    routed = ElementCount()
    for layer, times in kinds:
        matrices = sum(p.count for p in layer.parameters if p.part != "experts" and len(p.shape) > 1)
        active += times * (matrices + (layer.routed.total * top_k / layer.experts if layer.experts else 0))
        routed += layer.routed * times
    rest = count_elements(outside, names)
    return ModelShape(
        base=base,
        adapter=adapter,
        narrow=names,
        published=published_dtype(base),
        outside=tuple(outside),
        layers=tuple(layers),
        kinds=kinds,
        hidden=hidden,
        vocab=vocab,
        heads=base.dims.get("heads", 1),
        top_k=top_k,
        embedding=count_elements([embedding], names),
        tail=count_elements(tail, names),
        rest=rest,
        elements=sum((layer.elements * times for layer, times in kinds), rest),
        routed=routed,
        active=active,
        expert_adapter_parameters=sum(lora.parameters * n for layer, n in kinds for lora in layer.expert_lora),
    )


def _read_layer(parameters: dict[str, Parameter], r_of: dict[str, int], names: frozenset[str], hidden: int) -> Layer:
    """Read one layer from the names and shapes of its linear modules, which suffice for every family."""
    linear = {name.removesuffix(".weight").rpartition(".")[2]: p for name, p in parameters.items() if len(p.shape) == 2}

    def out(names: Iterable[str], otherwise: int) -> int:
        return next((linear[name].shape[0] for name in names if name in linear), otherwise)

    attended = next((linear[name].shape[1] for name in _OUTPUT if name in linear), hidden)
    query = out(_QUERY, attended)
    # Latent attention: keys are as wide as queries, and the values are a view into kv_b_proj's result, which is
    # therefore kept in full.
    fused = out(_FUSED, 3 * attended) - attended
    key = query if "kv_b_proj" in linear else out(("k_proj",), fused // 2)
    norms = 0
    # A norm over each head sees all heads: `q_norm` of one head runs over the full query.
    for name, p in parameters.items():
        if p.part != "norm":
            continue
        if over_heads := re.search(r"\b(?:(q_norm|query_norm)|(k_norm|key_norm))\b", name):
            norms += query if over_heads[1] else key
        elif name.endswith("weight"):
            norms += p.shape[0]
    plain: list[AdaptedModule] = []
    stacks: list[AdaptedModule] = []
    for name, r in r_of.items():
        weight = parameters.get(f"{name}.weight") or parameters.get(name)
        if weight is not None and len(weight.shape) >= 2:
            *stack, outputs, inputs = weight.shape
            if weight.transposed:
                inputs, outputs = outputs, inputs
            lora = AdaptedModule(name.rpartition(".")[2], weight.part, inputs, outputs, r, *stack[:1])
            (stacks if stack else plain).append(lora)
    experts = {name: p for name, p in parameters.items() if p.part == "experts"}
    # Matrices from the width of the feed-forward back to the residual stream.
    feed_forward = [p for p in parameters.values() if p.part in ("mlp", "shared_experts") and len(p.shape) == 2]
    back = [p for p in feed_forward if p.shape[0] == hidden]
    stacks_of = [p for p in experts.values() if len(p.shape) == 3]
    return Layer(
        parameters=tuple(parameters.values()),
        dense=count_elements((p for p in parameters.values() if p.part != "experts"), names),
        routed=count_elements(experts.values(), names),
        norms=norms,
        query=query,
        key=key,
        value=out(("kv_b_proj", "v_proj"), fused // 2),
        gathered=key + (attended if "kv_b_proj" in linear else out(("v_proj",), fused // 2)),
        attended=attended,
        mlp=max((p.shape[1] for p in back), default=0),
        expert=min((p.count // p.shape[0] // hidden for p in stacks_of), default=0),
        experts=next((p.shape[0] for p in stacks_of), 0),
        hidden=hidden,
        plain_lora=tuple(plain),
        expert_lora=tuple(stacks),
    )
