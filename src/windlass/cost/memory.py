"""Bytes on one GPU and on one host, by phase and by moment, each with the formula that it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod

from windlass.cost import activations
from windlass.cost.shape import Shape, sharded
from windlass.cost.work import Row, Work

GIB = 2**30
# Driver context, cuBLAS workspace and NCCL's channels: 0.5 + 0.1 + 1.0-1.4 GiB on Hopper; an assumption.
RESERVE_GPU = 2.0 * GIB
RESERVE_CPU = 0.6 * GIB  # a process that has imported torch, transformers, peft and trl
# What the caching allocator cannot use of what it holds, of everything that comes and goes; an assumption.
FRAGMENTATION = 0.05
# Resident memory of one training process on the host: interpreter, libraries, CUDA's host side; an assumption.
HOST_PROCESS = 4.0 * GIB

# Bytes of optimizer state per trained parameter, where b is the bytes of the adapter's own dtype.
OPTIMIZERS: dict[str, tuple[float, float, str]] = {  # name -> (states in b, fixed bytes, words)
    "adamw": (2, 0, "two moments"),
    "adam": (2, 0, "two moments"),
    "nadamw": (2, 0, "two moments"),
    "radam": (2, 0, "two moments"),
    "adamw_8bit": (0, 2.03, "two moments in 8 bits and their block scales"),
    "adamw_bnb_8bit": (0, 2.03, "two moments in 8 bits and their block scales"),
    "sgd": (0, 0, "no state: transformers' sgd has no momentum"),
    "rmsprop": (1, 0, "one moment"),
    "adagrad": (1, 0, "one sum of squares"),
    "adafactor": (0, 0.1, "row and column sums"),
    "lion": (1, 0, "one moment"),
    "lomo": (0, 0, "no state"),
}


@dataclass(frozen=True, slots=True)
class Item:
    item: str
    bytes: float
    formula: str


def rows(work: Work, shape: Shape) -> tuple[tuple[Row, ...], str]:
    """The table of the peak, and the moment of the step that it belongs to."""
    held = _held(work, shape)
    moments = {name: [*held, *items] for name, items in _moments(work, shape).items()}
    peak = max(moments, key=lambda name: sum(item.bytes for item in moments[name]))
    table: list[Row] = [Row("load", "gpu", i.item, i.bytes, i.formula) for i in _load(work, shape)]
    table += [Row("step", "gpu", i.item, i.bytes, i.formula) for i in (*moments[peak], _fragmentation(moments[peak]))]
    table += [Row("save", "gpu", i.item, i.bytes, i.formula) for i in held]
    table += [Row(phase, "host", i.item, i.bytes, i.formula) for phase, i in _host(work, shape)]
    return tuple(row for row in table if row.bytes > 0), peak


def total(table: tuple[Row, ...], place: str) -> float:
    """Bytes at the fullest phase."""
    phases = {row.phase for row in table if row.place == place}
    return max((sum(r.bytes for r in table if (r.phase, r.place) == (phase, place)) for phase in phases), default=0.0)


def adapter_share(work: Work, shape: Shape) -> tuple[int, str]:
    """Trained parameters on one rank. Adapters of experts stay with their expert; all others are replicated."""
    ranks = work.layout.expert_parallel
    experts = sum(lora.parameters(work.adapter.r) for layer in shape.layers for lora in layer.lora if lora.experts)
    if ranks == 1 or not experts:
        return work.adapter.trainable, f"{work.adapter.trainable} parameters, whole on every rank"
    share = work.adapter.trainable - experts + experts // ranks
    return share, f"{work.adapter.trainable - experts} replicated + {experts} of the experts / {ranks}"


def base_bytes(work: Work, shape: Shape) -> tuple[float, str]:
    """The frozen base on one rank."""
    layout, size = work.layout, work.base_bytes
    if layout.shard == 1:
        return shape.total * size, f"{shape.total} parameters x {size}, whole on every rank"
    if layout.expert_parallel == 1:
        rows = sharded(shape.parameters, layout.shard)
        return rows * size, f"{shape.total} parameters x {size} / {layout.shard}, rows rounded up"
    routed = [p for p in shape.parameters if p.part == "experts"]
    dense = sharded((p for p in shape.parameters if p.part != "experts"), layout.shard)
    own = sum(p.shape[0] // layout.expert_parallel * prod(p.shape[1:]) for p in routed)
    held = dense + own * layout.expert_parallel / layout.shard
    return held * size, (
        f"({shape.total - shape.experts} dense + {shape.experts} of the experts) / {layout.shard} x {size}"
    )


def _held(work: Work, shape: Shape) -> list[Item]:
    """What stays from step to step."""
    base, formula = base_bytes(work, shape)
    mine, words = adapter_share(work, shape)
    size = work.adapter.dtype_bytes
    state, fixed, kind = optimizer(work.optim)
    on_cpu = work.machine.gpu.name == "cpu"
    return [
        Item("base weights", 0.0 if work.layout.offload else base, formula),
        Item("adapter", mine * size, f"{words}, x {size}"),
        Item("adapter gradients", mine * size, f"{mine} x {size}"),
        Item("optimizer", mine * (state * size + fixed), f"{mine} x {state * size + fixed:g}: {kind}"),
        Item("reserve", RESERVE_CPU, "a process with the training libraries, assumed")
        if on_cpu
        else Item("reserve", RESERVE_GPU, "driver context, cuBLAS workspace, NCCL channels, assumed"),
    ]


def optimizer(name: str) -> tuple[float, float, str]:
    """States per parameter: the longest known prefix of transformers' name; an unknown one is taken for Adam."""
    known = max((key for key in OPTIMIZERS if name.startswith(key)), key=len, default="adamw")
    for eight in ("8bit",):
        if eight in name:
            known = "adamw_8bit"
    return OPTIMIZERS[known]


def _moments(work: Work, shape: Shape) -> dict[str, list[Item]]:
    """What comes and goes, at each moment that can be the peak."""
    t = activations.tokens(work, shape)
    kept, words = _kept(work, shape, t)
    saved = Item("activations", kept, words)
    loss, loss_words = activations.loss_bytes(shape, t, work.full_logits)
    head, whole = _tail(work, shape), _whole(work, shape)
    layers, layer_words = _gathered_layers(work, shape)
    last, last_words = _last_gather(work, shape)
    first, first_words = _first_backward(work, shape)
    worst, inside = _backward(work, shape, t)
    mine, _ = adapter_share(work, shape)
    tail = Item("head and final norm, gathered", head, "kept whole from the end of the forward to the backward")
    states = t.count * shape.hidden * (activations.FLOAT + t.width)
    early = kept * (len(shape.layers) - 1) / len(shape.layers)
    moments = {
        "last layer's gather": [Item("activations", early, words), *whole, Item("gathered layers", last, last_words)],
        "head's gather": [
            saved,
            *whole,
            tail,
            Item("all-gather buffers", head + last / 3, "the head's own and the last layer's"),
        ],
        "loss": [saved, *whole, tail, Item("all-gather buffers", head, "the head's"), Item("loss", loss, loss_words)],
        "loss's backward": [
            saved,
            *whole,
            tail,
            Item(
                "loss", loss + states, f"{loss_words}; gradient of {t.count} x {shape.hidden} in float32 and {t.width}"
            ),
        ],
        "backward of a layer": [
            saved,
            *whole,
            Item("gathered layers", layers, layer_words),
            Item("backward of a layer", worst, inside),
        ],
        "backward of the first layer": [
            Item("activations", kept / len(shape.layers), words),
            *whole,
            Item("gathered layers", first, first_words),
            Item("backward of a layer", worst, inside),
        ],
        "optimizer": [Item("optimizer's temporaries", mine * 4.0, "one float32 copy of the adapter")],
    }
    if work.base_bytes == 1:
        moments["backward of a layer"].append(_dequantised(work, shape))
    return moments


def _kept(work: Work, shape: Shape, t: activations.Tokens) -> tuple[float, str]:
    """All layers' saved tensors, or with checkpointing each layer's input."""
    final = t.count * shape.hidden * (activations.FLOAT + t.width)  # final norm's float32 input, and its result
    stream = len(shape.layers) * t.count * shape.hidden * t.width
    if work.layout.activation_checkpointing:
        return stream + final, (
            f"{len(shape.layers)} layer inputs of {t.count} tokens x {shape.hidden} x {t.width}, and the final norm's"
        )
    layers = sum(activations.layer_bytes(layer, t) for layer in shape.layers)
    each = layers / t.count / len(shape.layers)
    return stream + layers + final, (
        f"{len(shape.layers)} layers x {t.count} tokens x {each:.0f} bytes of norms, attention, feed-forward, adapters"
    )


def _backward(work: Work, shape: Shape, t: activations.Tokens) -> tuple[float, str]:
    again = work.layout.activation_checkpointing
    worst = max(
        activations.backward_bytes(layer, shape.hidden, t) + (activations.layer_bytes(layer, t) if again else 0)
        for layer in shape.layers
    )
    words = "gradients within the widest layer" + (", and all that its forward keeps, computed again" if again else "")
    return worst, words


def _gathered_layers(work: Work, shape: Shape) -> tuple[float, str]:
    """FSDP2 copies what it gathers out of the buffer, and has the next layer's buffer on its way meanwhile."""
    layout, size = work.layout, work.base_bytes
    if layout.shard == 1 or not layout.reshard_after_forward:
        return 0.0, ""
    split = layout.expert_parallel > 1
    sizes = [layer.count(experts=False if split else None) for layer in shape.layers]
    pairs = [a + b for a, b in pairwise(sizes)] or [sizes[0]]
    words = f"a layer of {max(sizes)} parameters x {size}, and the next one's buffer"
    total_bytes = max(pairs) * size
    if split:
        copies = max(layer.count(experts=True) for layer in shape.layers) // layout.expert_parallel
        buffers = 2 if layout.shard > layout.expert_parallel else 1
        total_bytes += copies * buffers * size
        words += f"; the rank's own experts of a layer, copied by FSDP2 even when they do not travel: {copies} x {size}"
    return total_bytes, words


def _last_gather(work: Work, shape: Shape) -> tuple[float, str]:
    """In the forward FSDP2 holds the previous layer's buffer until the next is copied out: three layers at once."""
    if work.layout.shard == 1:
        return 0.0, ""
    split = work.layout.expert_parallel > 1
    sizes = [layer.count(experts=False if split else None) for layer in shape.layers]
    before, now = sizes[-2] if len(sizes) > 1 else 0, sizes[-1]
    words = f"the layer's {now} parameters x {work.base_bytes}, its buffer, and the previous layer's"
    return float(before + 2 * now) * work.base_bytes, words


def _first_backward(work: Work, shape: Shape) -> tuple[float, str]:
    """With checkpointing the embedding's output asks for a gradient, so its weights are fetched once more."""
    if not work.layout.activation_checkpointing or work.layout.shard == 1 or not work.layout.reshard_after_forward:
        return 0.0, ""
    split = work.layout.expert_parallel > 1
    layer = shape.layers[0].count(experts=False if split else None)
    embedding = sum(prod(p.shape) for p in shape.outside if p.part == "embedding")
    return float(layer + embedding) * work.base_bytes, f"a layer of {layer} parameters and the embedding's {embedding}"


def _whole(work: Work, shape: Shape) -> list[Item]:
    """Without resharding, all layers are whole beside their shards."""
    if work.layout.shard == 1 or work.layout.reshard_after_forward:
        return []
    split = work.layout.expert_parallel
    gathered = sum(layer.count(experts=False) + layer.count(experts=True) // split for layer in shape.layers) + sum(
        prod(p.shape) for p in shape.outside if p not in shape.tail
    )
    return [
        Item(
            "gathered weights", gathered * work.base_bytes, f"{gathered} parameters x {work.base_bytes}, not resharded"
        )
    ]


def _tail(work: Work, shape: Shape) -> float:
    if work.layout.shard == 1:
        return 0.0
    return float(sum(prod(p.shape) for p in shape.tail) * work.base_bytes)


def _dequantised(work: Work, shape: Shape) -> Item:
    widest = max((prod(p.shape) for p in shape.parameters if p.part == "experts"), default=0)
    widest = widest // work.layout.expert_parallel or max(prod(p.shape) for p in shape.parameters)
    return Item("dequantised weights", widest * 2.0, f"the widest stack in 16 bits: {widest} x 2")


def _fragmentation(items: list[Item]) -> Item:
    moving = sum(i.bytes for i in items if i.item not in ("base weights", "adapter", "optimizer", "reserve"))
    return Item("fragmentation", FRAGMENTATION * moving, f"{FRAGMENTATION:.0%} of what comes and goes, assumed")


def _load(work: Work, shape: Shape) -> list[Item]:
    """Each rank reads its own rows, one parameter at a time."""
    held = [item for item in _held(work, shape) if item.item in ("base weights", "reserve")]
    widest = max(prod(p.shape) for p in shape.parameters) / max(work.layout.shard, 1)
    return [*held, Item("parameter being read", widest * (work.base_bytes + 2), "rows as stored and as loaded")]


def _host(work: Work, shape: Shape) -> list[tuple[str, Item]]:
    """Per node."""
    ranks = work.layout.gpus_per_node
    base, formula = base_bytes(work, shape)
    widest = max(prod(p.shape) for p in shape.parameters) / max(work.layout.shard, 1) * (work.base_bytes + 2)
    mine, _ = adapter_share(work, shape)
    process = Item("processes", ranks * HOST_PROCESS, f"{ranks} x {HOST_PROCESS / GIB:g} GiB, assumed")
    saved = Item("adapter being written", ranks * mine * work.adapter.dtype_bytes * 3.0, "adapter and optimizer state")
    items = [("load", process), ("step", process), ("save", process), ("save", saved)]
    items.append(("load", Item("parameter being read", ranks * widest, f"{ranks} x rows as stored and as loaded")))
    if work.layout.offload:
        held = Item("offloaded base weights", ranks * base, f"{ranks} x {formula}, pinned")
        items += [(phase, held) for phase in ("load", "step", "save")]
    return items
