"""What the forward keeps for the backward, per layer, and what the backward needs on top of it.

Every figure follows from which tensors autograd saves in transformers' layers with a frozen base: a frozen linear
keeps nothing but its (already held) weight; only norms, activation functions, attention, routing and the adapters keep
inputs. The benchmark of the memory model prints these against torch's own tracker.
"""

from __future__ import annotations

from dataclasses import dataclass

from windlass.plan.cost.shape import Layer, Lora, Shape
from windlass.plan.cost.work import Work

INDEX = 8  # bytes of an int64 index
FLOAT = 4
# TRL 1.16's fused head projects tiles of this many tokens by this many vocabulary entries.
TILE_TOKENS, TILE_VOCABULARY = 4096, 32768
# Families whose router hands its weights on in the width of compute; elsewhere softmax leaves them in float32, and the
# experts' weighted rows with them.
NARROW_ROUTING = {"qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "olmoe", "ernie4_5_moe", "hunyuan_v1_moe"}
# Ranks do not receive equal shares of tokens: the fullest one's surplus over the mean, an assumption.
IMBALANCE = 1.2


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a byte count per layer depends on besides the layer."""

    count: int  # per GPU and micro-batch
    width: int  # bytes of a value in compute
    cast: bool  # adapters in a wider dtype than compute: autocast makes each module its own copy of its input
    mask: float  # bytes that dropout keeps per input value
    heads: int
    top_k: int
    routed: int  # bytes of a weighted value on its way from the experts
    surplus: float  # of tokens at the fullest rank's experts
    merged: bool  # expert adapters are merged into a copy of the weights
    masked: int  # tokens that each one's mask is over; 0: there is no mask


def tokens(work: Work, shape: Shape) -> Tokens:
    width = 2 if work.layout.precision == "bf16" else max(work.base_bytes, 2)
    on_cpu = work.machine.gpu.name == "cpu"
    return Tokens(
        count=work.batch.tokens,
        width=width,
        cast=work.adapter.dtype_bytes > width,
        mask=0.0 if not work.dropout else (FLOAT if on_cpu else 1.0),
        heads=shape.heads,
        top_k=shape.top_k,
        routed=width if work.base.family.model_type in NARROW_ROUTING else FLOAT,
        surplus=IMBALANCE if work.layout.expert_parallel > 1 else 1.0,
        merged=work.expert_path == "merged",
        masked=work.batch.length if work.masked else 0,
    )


def layer_bytes(layer: Layer, t: Tokens) -> float:
    """All that one layer keeps until its backward."""
    per_token = _norms(layer) + _attention(layer, t) + 3 * layer.mlp * t.width + _adapters(layer, t)
    if layer.expert:
        per_token += _experts(layer, t)
    return t.count * per_token + _adapter_casts(layer, t) + _merged(layer, t)


def forward_bytes(layer: Layer, hidden: int, t: Tokens) -> float:
    """The most that a layer's forward holds at once where nothing is kept for a backward."""
    stream = hidden * (2 * t.width + FLOAT)  # the residual, the branch, and the norm's float32
    adapted = any(lora.leaf == "up_proj" for lora in layer.lora)
    # An adapted up_proj has its own product, the adapter's, that scaled, and their sum, beside the gate.
    options = [_attention(layer, t) + 2 * layer.query * t.width, (5 if adapted else 3) * layer.mlp * t.width]
    if layer.expert:
        rows = t.top_k * t.surplus
        # rows in expert order, gate and up, activated gate, product; or the rows, results, their weighted, unsorted
        options.append(rows * (hidden + 4 * layer.expert) * t.width)
        options.append(rows * hidden * 2 * (t.width + t.routed))
    return t.count * (stream + max(options) + t.masked)


def _norms(layer: Layer) -> float:
    """Each norm keeps its input in float32, and one reciprocal a token."""
    return FLOAT * layer.norms + 2 * FLOAT


def _attention(layer: Layer, t: Tokens) -> float:
    """Query, key, value and result, and the log-sum-exp of each head. No score matrix: the kernels are fused.

    Under a mask keys and values are repeated for every head, and the mask is kept as each layer's kernel takes it,
    in the width of compute.
    """
    key, value = layer.key, layer.value
    if t.masked:
        key, value = max(key, layer.query), max(value, layer.attended)
    return (layer.query + key + value + layer.attended + t.masked) * t.width + FLOAT * t.heads


def _experts(layer: Layer, t: Tokens) -> float:
    """Per token: router's scores, indices, and for each chosen expert gate, up, activated gate and result."""
    routing = layer.experts * FLOAT + t.top_k * 5 * INDEX
    hidden = next(p.shape[1] for p in layer.parameters if p.part == "experts" and "down_proj" in p.name)
    return routing + t.top_k * t.surplus * (3 * layer.expert + hidden) * t.width


def _adapters(layer: Layer, t: Tokens) -> float:
    """Inputs of the adapted modules: their own copies where they are cast or dropped out, else what is there anyway."""
    plain = [lora for lora in layer.lora if not lora.experts]
    kept = sum((t.width + t.mask) * lora.inputs for lora in plain) if t.cast or t.mask else _shared(plain, t)
    small = sum(lora.r * t.width for lora in plain)
    return kept + small + sum(_expert_adapter(lora, t) for lora in layer.lora if lora.experts)


def _shared(plain: list[Lora], t: Tokens) -> float:
    """Modules that read the same tensor keep it once; o_proj's input is the attention's result, kept already."""
    return sum(width * t.width for _, width in {(lora.part, lora.inputs) for lora in plain if lora.leaf != "o_proj"})


def _expert_adapter(lora: Lora, t: Tokens) -> float:
    """Merged, the weight needs its input rows in expert order. Beside it the low-rank rows are kept, and those that
    dropout made; other input rows are made again, of gate and up (kept anyway) or of each token's hidden state."""
    rows = t.top_k * t.surplus
    if t.merged:
        return rows * lora.inputs * t.width
    hidden = lora.inputs * t.width if lora.leaf == "gate_up_proj" else 0
    return rows * lora.r * t.width + (rows * (t.width + t.mask) * lora.inputs if t.mask else hidden)


def _adapter_casts(layer: Layer, t: Tokens) -> float:
    cast = [lora for lora in layer.lora if t.merged or not lora.experts]  # beside experts they are cast anew
    return sum(lora.parameters for lora in cast) * t.width if t.cast else 0.0


def _merged(layer: Layer, t: Tokens) -> float:
    """The merged path holds W + s B A of every expert until the backward."""
    if not t.merged:
        return 0.0
    return sum(lora.inputs * lora.outputs * lora.experts for lora in layer.lora if lora.experts) * t.width


def backward_bytes(layer: Layer, hidden: int, t: Tokens) -> float:
    """What the deepest moment of a layer's backward holds on top of what the forward kept."""
    stream = t.count * hidden * 2 * t.width  # gradient of the residual stream and of the branch
    options = [_dense_backward(layer, hidden, t)]
    if layer.expert:
        rows = t.count * t.top_k * t.surplus * hidden
        # gradient of the weighted rows, its product with the weights, and with the rows (for the router); by then the
        # shared expert, which ran last, is done
        options.append(rows * 3 * t.routed - _shared_expert(layer, t))
        options.append(merged_backward_bytes(layer, t))
    return stream + max(options)


def _shared_expert(layer: Layer, t: Tokens) -> float:
    """What a shared expert and its adapters keep."""
    adapted = [lora for lora in layer.lora if lora.part == "shared_experts"]
    copies = sum((t.width + t.mask) * lora.inputs for lora in adapted) if t.cast or t.mask else _shared(adapted, t)
    return t.count * (3 * layer.mlp * t.width + copies)


def _dense_backward(layer: Layer, hidden: int, t: Tokens) -> float:
    """The widest linear: gradient of its input from the base and from the adapter, the latter also in float32."""
    adapted = [lora.inputs for lora in layer.lora if not lora.experts]
    widest = max([*adapted, layer.mlp, hidden], default=hidden)
    return t.count * widest * (2 * t.width + (FLOAT if t.cast else 0))


def merged_backward_bytes(layer: Layer, t: Tokens) -> float:
    """The merged path's backward forms each stack's whole gradient; the smaller stacks' copies are gone by then."""
    if not t.merged:
        return 0.0
    sizes = [lora.inputs * lora.outputs * lora.experts for lora in layer.lora if lora.experts]
    return (2 * max(sizes, default=0) - sum(sizes)) * t.width


def loss_bytes(shape: Shape, t: Tokens, full_logits: bool) -> tuple[float, str]:
    """What the loss needs on top of the hidden states, forward; its backward adds the states' gradient."""
    if full_logits:
        total = 3.0 * t.count * shape.vocab * FLOAT
        return total, f"all logits: 3 x {t.count} tokens x {shape.vocab} vocabulary x 4"
    tile = min(t.count, TILE_TOKENS) * TILE_VOCABULARY * t.width
    words = f"fused head: a tile of {min(t.count, TILE_TOKENS)} tokens x {TILE_VOCABULARY} x {t.width}, and its input"
    return tile + t.count * shape.hidden * t.width, words
