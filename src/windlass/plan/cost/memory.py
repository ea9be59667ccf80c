"""Bytes on one GPU and on one host, by phase and by moment, each with the formula that it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, prod

from windlass.model import Parameter
from windlass.plan.cost import activations
from windlass.plan.cost.shape import Count, Held, Shape, counted
from windlass.plan.cost.work import Row, Work

GIB = 2**30
# Driver context, cuBLAS workspace and NCCL's channels: 0.5 + 0.1 + 1.0-1.4 GiB on Hopper; an assumption. And what
# CUDA does not give of the driver's total: an H100 has 79.65 GiB for nvidia-smi, 79.11 for torch (vllm#27508).
RESERVE_GPU = 2.6 * GIB
RESERVE_CPU = 0.6 * GIB  # a process that has imported torch, transformers, peft and trl
# What the caching allocator cannot use of what it holds, of everything that comes and goes; an assumption.
FRAGMENTATION = 0.05
# Of a stack of experts in FP8, so many bytes are in 16 bits at once, but at least so many columns of each.
DEQUANTISED, COLUMNS = 2**30, 128
# Resident memory of one training process on the host: interpreter, libraries, CUDA's and NCCL's host side, pinned
# batches; an assumption, and a generous one: a pod that runs out of it is killed without a word.
HOST_PROCESS = 8.0 * GIB

# The loader reads so many values at a time in each of so many threads (model/reading.py).
THREADS, AT_ONCE = 4, 2**20

# Bytes of optimizer state per trained parameter, where b is the bytes of the adapter's own dtype.
FLOAT = activations.FLOAT
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
    stays = _held(work, shape)
    moments = {name: [*stays, *items] for name, items in _moments(work, shape).items()}
    quiet = [item for item in stays if item.item != "adapter gradients"]
    moments |= {name: [*quiet, *items] for name, items in _evaluation(work, shape).items()}
    peak = max(moments, key=lambda name: sum(item.bytes for item in moments[name]))
    table: list[Row] = [Row("load", "gpu", i.item, i.bytes, i.formula) for i in _load(work, shape)]
    table += [Row("step", "gpu", i.item, i.bytes, i.formula) for i in (*moments[peak], _fragmentation(moments[peak]))]
    table += [Row("save", "gpu", i.item, i.bytes, i.formula) for i in stays]
    own = {phase: total(tuple(r for r in table if r.phase == phase), "gpu") for phase in ("load", "step", "save")}
    table += [Row(phase, "host", i.item, i.bytes, i.formula) for phase, i in _host(work, shape, own)]
    return tuple(row for row in table if row.bytes > 0), peak


def total(table: tuple[Row, ...], place: str) -> float:
    """Bytes at the fullest phase."""
    phases = {row.phase for row in table if row.place == place}
    return max((sum(r.bytes for r in table if (r.phase, r.place) == (phase, place)) for phase in phases), default=0.0)


def expert_adapters(shape: Shape) -> int:
    """Trained parameters of the routed experts."""
    own = ((layer, times) for layer, times in shape.kinds if layer.experts)
    return sum(lora.parameters * times for layer, times in own for lora in layer.lora if lora.experts)


def adapter_share(work: Work, shape: Shape) -> tuple[int, str]:
    """Trained parameters on one rank. Adapters of experts stay with their expert; all others are replicated."""
    ranks = work.layout.expert_parallel
    experts = expert_adapters(shape)
    if ranks == 1 or not experts:
        return work.adapter.trainable, f"{work.adapter.trainable} parameters, whole on every rank"
    share = work.adapter.trainable - experts + experts // ranks
    return share, f"{work.adapter.trainable - experts} replicated + {experts} of the experts / {ranks}"


def held(work: Work) -> Held:
    """Bytes of an element of the base, as this run holds and moves it."""
    if work.layout.base_dtype != "fp8":
        return Held(work.base_bytes, work.base_bytes)
    block = (work.base.quantization or {}).get("weight_block_size")
    return Held(work.base_bytes, 1 + FLOAT / prod(block) if block else 1)


def gathered(work: Work) -> Held:
    """The same once it is gathered: FSDP2 casts float32 to the dtype of compute before it travels."""
    size = held(work)
    narrow = work.layout.shard > 1 and work.layout.precision == "bf16" and work.base_bytes > 2
    return Held(2, min(size.fp8, 2)) if narrow else size  # bytes of codes are left alone


def words(count: Count, size: Held) -> str:
    """A number of elements in words."""
    if size.fp8 == size.size or not count.fp8:
        return f"{count.all} parameters x {size.size}"
    return f"{count.fp8} parameters in FP8 x {size.fp8:.6g} + {count.all - count.fp8} x {size.size}"


def base_bytes(work: Work, shape: Shape) -> tuple[float, str]:
    """The frozen base on one rank."""
    layout, size = work.layout, held(work)
    if layout.shard == 1:
        return size.bytes(shape.whole), f"{words(shape.whole, size)}, whole on every rank"
    if layout.expert_parallel == 1:
        return size.bytes(
            shape.sharded(layout.shard)
        ), f"({words(shape.whole, size)}) / {layout.shard}, rows rounded up"
    own = shape.routed // layout.expert_parallel
    mine = shape.sharded(layout.shard, experts=False) + own // (layout.shard // layout.expert_parallel)
    return size.bytes(mine), (
        f"({shape.total - shape.experts} dense + {shape.experts} of the experts) / {layout.shard}: {words(mine, size)}"
    )


def _held(work: Work, shape: Shape) -> list[Item]:
    """What stays from step to step."""
    base, formula = base_bytes(work, shape)
    mine, told = adapter_share(work, shape)
    size = work.adapter.dtype_bytes
    state, fixed, kind = optimizer(work.optim)
    on_cpu = work.machine.gpu.name == "cpu"
    return [
        Item("base weights", 0.0 if work.layout.offload else base, formula),
        Item("adapter", mine * size, f"{told}, x {size}"),
        Item("adapter gradients", mine * size, f"{mine} x {size}"),
        Item("optimizer", mine * (state * size + fixed), f"{mine} x {state * size + fixed:g}: {kind}"),
        Item("reserve", RESERVE_CPU, "a process with the training libraries, assumed")
        if on_cpu
        else Item("reserve", RESERVE_GPU, "driver and its context, cuBLAS workspace, NCCL channels, assumed"),
    ]


def optimizer(name: str) -> tuple[float, float, str]:
    """States per parameter: the longest known prefix of transformers' name; an unknown one is taken for Adam."""
    known = max((key for key in OPTIMIZERS if name.startswith(key)), key=len, default="adamw")
    return OPTIMIZERS["adamw_8bit" if "8bit" in name else known]


def _moments(work: Work, shape: Shape) -> dict[str, list[Item]]:
    """What comes and goes, at each moment that can be the peak."""
    t = activations.tokens(work, shape)
    kept, told = _kept(work, shape, t)
    saved = Item("activations", kept, told)
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
        "last layer's gather": [Item("activations", early, told), *whole, Item("gathered layers", last, last_words)],
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
            Item("activations", kept / len(shape.layers), told),
            *whole,
            Item("gathered layers", first, first_words),
            Item("backward of a layer", worst, inside),
        ],
        "optimizer": [Item("optimizer's temporaries", mine * 4.0, "one float32 copy of the adapter")],
    }
    if work.layout.base_dtype == "fp8":
        for name in ("backward of a layer", "backward of the first layer"):
            moments[name].append(_dequantised(work, shape, t))
    return moments


def _evaluation(work: Work, shape: Shape) -> dict[str, list[Item]]:
    """Its fullest moments: nothing is kept for a backward, but a pass may have more sequences than one of training."""
    if not work.evaluated:
        return {}
    t = activations.tokens(replace(work, batch=replace(work.batch, micro=work.evaluated)), shape)
    worst = max(activations.forward_bytes(layer, shape.hidden, t) for layer, _ in shape.kinds)
    loss, loss_words = activations.loss_bytes(shape, t, work.full_logits)
    head, whole = _tail(work, shape), _whole(work, shape)
    layers, layer_words = _gathered_layers(work, shape)
    last, last_words = _last_gather(work, shape)
    stream = Item(
        "hidden states", 2.0 * t.count * shape.hidden * t.width, f"2 x {t.count} x {shape.hidden} x {t.width}"
    )
    told = f"an evaluation's pass of {t.count} tokens, within the widest layer"
    inside = [*whole, Item("gathered layers", layers, layer_words), Item("forward of a layer", worst, told)]
    if work.layout.base_dtype == "fp8":
        inside.append(_dequantised(work, shape, t))
    states = t.count * shape.hidden * (activations.FLOAT + t.width)
    tail = Item("head and final norm, gathered", head, "from the end of the forward on")
    end = Item("loss", loss + states, f"an evaluation's; {loss_words}; hidden states, and the final norm's in float32")
    return {
        "evaluation": inside,
        "evaluation's gather": [*whole, Item("gathered layers", last, last_words), stream],
        "evaluation's loss": [*whole, tail, Item("all-gather buffers", head, "the head's"), end],
    }


def _kept(work: Work, shape: Shape, t: activations.Tokens) -> tuple[float, str]:
    """All layers' saved tensors, or with checkpointing each layer's input."""
    final = t.count * shape.hidden * (activations.FLOAT + t.width)  # final norm's float32 input, and its result
    final += t.count * t.masked  # one mask for all layers, a byte a pair, before each makes its own of it
    stream = len(shape.layers) * t.count * shape.hidden * t.width
    if work.layout.activation_checkpointing:
        return stream + final, (
            f"{len(shape.layers)} layer inputs of {t.count} tokens x {shape.hidden} x {t.width}, and the final norm's"
        )
    layers = sum(activations.layer_bytes(layer, t) * times for layer, times in shape.kinds)
    each = layers / t.count / len(shape.layers)
    return stream + layers + final, (
        f"{len(shape.layers)} layers x {t.count} tokens x {each:.0f} bytes of norms, attention, feed-forward, adapters"
    )


def _backward(work: Work, shape: Shape, t: activations.Tokens) -> tuple[float, str]:
    again = work.layout.activation_checkpointing
    worst = max(
        activations.backward_bytes(layer, shape.hidden, t) + (activations.layer_bytes(layer, t) if again else 0)
        for layer, _ in shape.kinds
    )
    told = "gradients within the widest layer" + (", and all that its forward keeps, computed again" if again else "")
    return worst, told


def _gathered_layers(work: Work, shape: Shape) -> tuple[float, str]:
    """FSDP2 copies what it gathers out of the buffer, and has the next layer's buffer on its way meanwhile."""
    layout, size = work.layout, gathered(work)
    if layout.shard == 1 or not layout.reshard_after_forward:
        return 0.0, ""
    split = layout.expert_parallel > 1
    counts = [layer.dense if split else layer.whole for layer in shape.layers]
    sizes = [size.bytes(count) for count in counts]
    pairs = [a + b for a, b in pairwise(sizes)] or [sizes[0]]
    told = f"a layer of {words(max(counts, key=size.bytes), size)}, and the next one's buffer"
    total_bytes = max(pairs)
    if split:
        own = max((layer.routed for layer in shape.layers), key=size.bytes) // layout.expert_parallel
        buffers = 2 if layout.shard > layout.expert_parallel else 1
        total_bytes += size.bytes(own) * buffers
        told += f"; the rank's own experts of a layer, copied by FSDP2 even when they do not travel: {words(own, size)}"
    return total_bytes, told


def _last_gather(work: Work, shape: Shape) -> tuple[float, str]:
    """In the forward FSDP2 holds the previous layer's buffer until the next is copied out: three layers at once."""
    if work.layout.shard == 1:
        return 0.0, ""
    size, split = gathered(work), work.layout.expert_parallel > 1
    counts = [layer.dense if split else layer.whole for layer in shape.layers[-2:]]
    now = size.bytes(counts[-1])
    before = size.bytes(counts[-2]) if len(counts) > 1 else 0.0
    if not work.layout.reshard_after_forward:  # the layer itself is among those that stay
        return before + now, f"buffers of the layer, {words(counts[-1], size)}, and of the previous one"
    return before + 2 * now, f"the layer's {words(counts[-1], size)}, its buffer, and the previous layer's"


def _first_backward(work: Work, shape: Shape) -> tuple[float, str]:
    """With checkpointing the embedding's output asks for a gradient, so its weights are fetched once more."""
    if not work.layout.activation_checkpointing or work.layout.shard == 1 or not work.layout.reshard_after_forward:
        return 0.0, ""
    size, first = gathered(work), shape.layers[0]
    layer = first.dense if work.layout.expert_parallel > 1 else first.whole
    told = f"a layer of {layer.all} parameters and the embedding's {shape.embedding.all}"
    return size.bytes(layer + shape.embedding), told


def _whole(work: Work, shape: Shape) -> list[Item]:
    """Without resharding, all layers are whole beside their shards."""
    layout, size = work.layout, gathered(work)
    if layout.shard == 1 or layout.reshard_after_forward:
        return []
    whole = counted((p for p in shape.outside if p not in shape.tail), shape.fp8)
    for layer, times in shape.kinds:
        whole += (layer.dense + layer.routed // layout.expert_parallel) * times
    return [Item("gathered weights", size.bytes(whole), f"{words(whole, size)}, not resharded")]


def _tail(work: Work, shape: Shape) -> float:
    return 0.0 if work.layout.shard == 1 else gathered(work).bytes(counted(shape.tail, shape.fp8))


def _dequantised(work: Work, shape: Shape, t: activations.Tokens) -> Item:
    """The true values of the widest parameter, as far as they exist at once."""
    eight = [p for layer, _ in shape.kinds for p in layer.parameters if p.name in shape.fp8]
    if work.machine.gpu.name == "cpu":  # one expert after the other, in float32 and then in the products' dtype
        widest = max((prod(p.shape[-2:]) for p in eight), default=0)
        each = FLOAT + (t.width if t.width < FLOAT else 0)
        return Item("dequantised weights", widest * each, f"the widest matrix: {widest} x {each}")
    sizes = [temporary(p.shape, work.layout.expert_parallel, t.width) for p in eight]
    return Item(
        "dequantised weights", max(sizes, default=0), f"of the widest stack at most {DEQUANTISED} bytes at once"
    )


def temporary(shape: tuple[int, ...], expert_parallel: int, width: int) -> int:
    """Bytes of one parameter's true values at their fullest: a matrix whole, a stack some columns at a time."""
    if len(shape) < 3:
        return prod(shape) * width
    experts = shape[0] // expert_parallel
    return max(
        experts * other * width * min(side, max(COLUMNS, DEQUANTISED // (experts * other * width) // COLUMNS * COLUMNS))
        for side, other in (shape[1:], shape[:0:-1])
    )


def _fragmentation(items: list[Item]) -> Item:
    moving = sum(i.bytes for i in items if i.item not in ("base weights", "adapter", "optimizer", "reserve"))
    return Item("fragmentation", FRAGMENTATION * moving, f"{FRAGMENTATION:.0%} of what comes and goes, assumed")


def _load(work: Work, shape: Shape) -> list[Item]:
    """Each rank reads its own rows, in chunks."""
    stays = [item for item in _held(work, shape) if item.item in ("base weights", "reserve")]
    told = f"{THREADS} chunks of {AT_ONCE} values: as stored, in float32, and their scales"
    return [*stays, Item("chunks being read", THREADS * AT_ONCE * (2 + FLOAT + FLOAT), told)]


def _host(work: Work, shape: Shape, own: Mapping[str, float]) -> list[tuple[str, Item]]:
    """Per node. `own`: what a rank on a CPU holds, by phase, which is memory of the host."""
    ranks = work.layout.gpus_per_node
    written = ("save", _written(work))
    if work.machine.gpu.name == "cpu":
        told = f"{ranks} x what a rank holds"
        return [*((phase, Item("ranks", ranks * size, told)) for phase, size in own.items()), written]
    _, formula = base_bytes(work, shape)
    process = Item("processes", ranks * HOST_PROCESS, f"{ranks} x {HOST_PROCESS / GIB:g} GiB, assumed")
    items = [("load", process), ("step", process), ("save", process), written]
    read = ranks * THREADS * AT_ONCE * 2
    items.append(("load", Item("chunks being read", read, f"{ranks} x {THREADS} of {AT_ONCE} values as stored")))
    if work.layout.offload:
        told = f"{ranks} x {formula}, pinned: each parameter's part takes a power of two"
        there = Item("offloaded base weights", ranks * _pinned(work, shape), told)
        items += [(phase, there) for phase in ("load", "step", "save")]
    return items


def _written(work: Work) -> Item:
    """On rank 0 alone, and there the whole adapter, whoever trains parts of it."""
    count, size = work.adapter.trainable, work.adapter.dtype_bytes
    state, fixed, _ = optimizer(work.optim)
    states = state * size + fixed
    told = f"rank 0: {count} x ({size} + optimizer {states:g}), and the optimizer's file of {states:g} more"
    return Item("adapter being written", count * (size + 2 * states), told)


def _pinned(work: Work, shape: Shape) -> float:
    """Bytes that one rank pins: torch's allocator of pinned memory rounds each request up to a power of two."""
    shard, split = work.layout.shard, work.layout.expert_parallel

    def pinned(parameter: Parameter) -> int:
        rows, *rest = parameter.shape
        for ways in [split, shard // split] if parameter.part == "experts" else [shard]:
            rows = ceil(rows / ways)
        return 1 << (rows * prod(rest) * work.base_bytes - 1).bit_length()

    layers = sum(times * sum(map(pinned, layer.parameters)) for layer, times in shape.kinds)
    return float(layers + sum(map(pinned, shape.outside)))
