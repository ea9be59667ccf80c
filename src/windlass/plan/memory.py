"""Estimate the bytes on one GPU and on one host, by phase and by moment of a step, each with its formula.

The forward keeps what autograd saves in transformers' layers with a frozen base: inputs of norms, activation functions,
attention, routing and adapters. benchmarks/memory_model.py compares these estimates with torch's own tracker.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, prod

from windlass import settings
from windlass.hardware import GIB
from windlass.model import Parameter
from windlass.plan.operators import load_operators
from windlass.plan.workload import AdaptedModule, ElementCount, Layer, ModelShape, Traced, Workload, count_elements
from windlass.settings import CONVERTED_VALUES, FOUR_BITS, LOADER_THREADS, PUBLISHED_NF4, TILE_TOKENS, TILE_VOCABULARY

FLOAT = 4  # bytes of a float32 value
INDEX = 8  # bytes of an int64 index
# Driver context, cuBLAS workspace and NCCL's channels: 0.5 + 0.1 + 1.0-1.4 GiB on Hopper; an assumption. Plus memory
# that CUDA withholds: an H100 has 79.65 GiB according to nvidia-smi, 79.11 according to torch (vllm#27508).
RESERVE_GPU = 2.6 * GIB
# A process that has imported torch, transformers and PEFT: 0.46 GiB. Plus the products that oneDNN has prepared, one
# per shape: 0.03 to 0.2 GiB after 60 to 120 steps of small models.
RESERVE_CPU = 0.6 * GIB
# Memory that the caching allocator cannot use, as a fraction of all temporary tensors; an assumption.
FRAGMENTATION = 0.05
# Resident memory of one training process on the host: interpreter, libraries, CUDA's and NCCL's host side, pinned
# batches; a generous assumption, because a pod that runs out of memory is killed without a message.
HOST_PROCESS = 8.0 * GIB
# Tokens of the fullest rank relative to the mean, since ranks do not receive equal shares; an assumption.
IMBALANCE = 1.2
# Bytes of optimizer state per trained parameter: states in the adapter's own dtype, fixed bytes, words.
OPTIMIZERS: dict[str, tuple[float, float, str]] = {
    "adamw": (2, 0, "two moments"),
    "adam": (2, 0, "two moments"),
    "nadamw": (2, 0, "two moments"),
    "radam": (2, 0, "two moments"),
    "adamw_8bit": (0, 2.03, "two moments in 8 bits and their block scales"),
    "sgd": (0, 0, "no state: transformers' sgd has no momentum"),
    "rmsprop": (1, 0, "one moment"),
    "adagrad": (1, 0, "one sum of squares"),
    "adafactor": (0, 0.1, "row and column sums"),
    "lion": (1, 0, "one moment"),
    "lomo": (0, 0, "no state"),
}


@dataclass(frozen=True, slots=True)
class MemoryRow:
    item: str
    bytes: float
    formula: str
    phase: str = "step"  # load, step, save
    place: str = "gpu"  # gpu, host


def estimate_memory(work: Workload) -> tuple[tuple[MemoryRow, ...], str]:
    """Return the memory table at the peak, and the moment of the step that has the peak."""
    weights, formula = base_bytes(work)
    if full := full_weights_share(work):
        weights -= full * work.base_bytes
        formula += f"; without {full} that are trained"
    mine, words = adapter_share(work)
    size = work.shape.adapter.dtype_bytes
    states, fixed, kind = find_optimizer_states(work.optim)
    base = MemoryRow("base weights", 0.0 if work.layout.offload else weights, formula)
    adapter = MemoryRow("adapter", mine * size, f"{words}, x {size}")
    fused = work.shape.adapter.trainable - sum(work.shape.adapter.in_full.values())
    fused -= work.shape.expert_adapter_parameters
    fused *= size > work.width and not work.casts_inputs
    copies = MemoryRow("adapter copies", fused * work.width, f"{fused} x {work.width}: what fused layers compute with")
    gradients = MemoryRow("adapter gradients", mine * size, f"{mine} x {size}")
    optimizer = MemoryRow("optimizer", mine * (states * size + fixed), f"{mine} x {states * size + fixed:g}: {kind}")
    reserve = MemoryRow("reserve", RESERVE_GPU, "driver and its context, cuBLAS workspace, NCCL channels, assumed")
    if work.on_cpu:
        reserve = MemoryRow("reserve", RESERVE_CPU, "a process with the training libraries, assumed")
    permanent = [base, adapter, copies, optimizer, reserve]
    training = [base, adapter, copies, gradients, optimizer, reserve]
    moments = {name: [*training, *rows] for name, rows in list_training_moments(work).items()}
    moments |= {name: [*permanent, *rows] for name, rows in _list_evaluation_moments(work).items()}
    peak = max(moments, key=lambda name: sum(row.bytes for row in moments[name]))
    moving = sum(row.bytes for row in moments[peak] if row not in permanent)
    slack = MemoryRow("fragmentation", FRAGMENTATION * moving, f"{FRAGMENTATION:.0%} of what comes and goes, assumed")
    words = f"{LOADER_THREADS} chunks of {CONVERTED_VALUES} values: as stored, in float32, and their scales"
    chunks = MemoryRow("chunks being read", LOADER_THREADS * CONVERTED_VALUES * (2 + FLOAT + FLOAT), words)
    gpu = {"load": [base, reserve, chunks], "step": [*moments[peak], slack], "save": training}
    table = [replace(row, phase=phase) for phase, rows in gpu.items() for row in rows]
    table += _host_rows(work, {phase: sum(row.bytes for row in rows) for phase, rows in gpu.items()})
    return tuple(row for row in table if row.bytes > 0), peak


def total_bytes(table: Iterable[MemoryRow], place: str) -> float:
    """Return the bytes of a place in its fullest phase."""
    sums: dict[str, float] = defaultdict(float)
    for row in table:
        if row.place == place:
            sums[row.phase] += row.bytes
    return max(sums.values(), default=0.0)


def find_optimizer_states(name: str) -> tuple[float, float, str]:
    """Return the states of the longest known prefix of transformers' name; unknown optimizers are treated as Adam."""
    known = max((key for key in OPTIMIZERS if name.startswith(key)), key=len, default="adamw")
    return OPTIMIZERS["adamw_8bit" if "8bit" in name else known]


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """The bytes of one element: for most parameters, and for those stored in fewer bits."""

    most: int
    narrow: float
    name: str = ""  # the dtype with fewer bits

    def of(self, count: ElementCount) -> float:
        return (count.total - count.narrow) * self.most + count.narrow * self.narrow

    def describe(self, count: ElementCount) -> str:
        if self.narrow == self.most or not count.narrow:
            return f"{count.total} parameters x {self.most}"
        rest = count.total - count.narrow
        return f"{count.narrow} parameters in {self.name} x {self.narrow:.6g} + {rest} x {self.most}"


def stored_bytes(work: Workload) -> ElementBytes:
    """Return the bytes per element of the base as this run stores it."""
    name = work.layout.base_dtype.upper()
    quantization = work.shape.base.quantization or {}
    if four := FOUR_BITS.get(work.layout.base_dtype):
        four = PUBLISHED_NF4 if name == "NF4" and work.shape.published == "nf4" else four
        if "group_size" in quantization:
            four = four._replace(block=quantization["group_size"] or work.shape.hidden)
        of_rows = FLOAT / work.shape.hidden if four.is_divided else 0.0
        return ElementBytes(work.base_bytes, four.bytes + of_rows, name)
    if name != "FP8" or work.shape.base.quantization is None:
        return ElementBytes(work.base_bytes, work.base_bytes)
    block = quantization.get("weight_block_size")
    size = 1 + FLOAT / prod(block) if block else 1.0
    if quantization.get("group_size") == 0 and not block:  # at most a scale for each row
        size += FLOAT / work.shape.hidden
    return ElementBytes(work.base_bytes, size, name)


def gathered_bytes(work: Workload) -> ElementBytes:
    """Return the bytes per element of the gathered base: FSDP2 casts float32 to the compute dtype before sending."""
    size = stored_bytes(work)
    narrow = work.layout.shard > 1 and work.layout.precision == "bf16" and work.base_bytes > 2
    return ElementBytes(2, min(size.narrow, 2), size.name) if narrow else size  # codes are not cast


def base_bytes(work: Workload) -> tuple[float, str]:
    """Return the bytes of the frozen base on one rank, with the formula."""
    layout = work.layout
    size = stored_bytes(work)
    shape = work.shape
    if layout.shard == 1:
        return size.of(shape.elements), f"{size.describe(shape.elements)}, unsharded on every rank"
    if layout.expert_parallel == 1:
        mine = shape.sharded(layout.shard, experts=True)
        return size.of(mine), f"({size.describe(shape.elements)}) / {layout.shard}, rows rounded up"
    experts = shape.routed // layout.expert_parallel
    mine = shape.sharded(layout.shard, experts=False) + experts // (layout.shard // layout.expert_parallel)
    dense = shape.elements.total - shape.routed.total
    words = f"({dense} dense + {shape.routed.total} of the experts) / {layout.shard}: {size.describe(mine)}"
    return size.of(mine), words


def adapter_share(work: Workload) -> tuple[int, str]:
    """Count the trained parameters on one rank. Experts' adapters stay with their expert; all others are replicated."""
    ranks = work.layout.expert_parallel
    experts = work.shape.expert_adapter_parameters
    trainable = work.shape.adapter.trainable
    trainable -= sum(work.shape.adapter.in_full.values())
    full = full_weights_share(work)
    words = f" + {full} of the base" if full else ""
    if ranks == 1 or not experts:
        return trainable + full, f"{trainable} parameters, all on every rank{words}"
    plain = trainable - experts
    return plain + experts // ranks + full, f"{plain} replicated + {experts} of the experts / {ranks}{words}"


def full_weights_share(work: Workload) -> int:
    """Count the parameters of the base itself that are trained on one rank: they are sharded like the base."""
    return ceil(sum(work.shape.adapter.in_full.values()) / work.layout.shard)


def list_training_moments(work: Workload) -> dict[str, list[MemoryRow]]:
    """Return the rows of each moment of training that can be the peak."""
    shape = work.shape
    t = Tokens.of(work)
    g = _gathered_rows(work)
    layers = len(shape.layers)
    kept, words = _kept_bytes(work, t)
    saved = MemoryRow("activations", kept, words)
    early = MemoryRow("activations", kept * (layers - 1) / layers, words)
    first = MemoryRow("activations", kept / layers, words)
    if inputs_on_host(work):  # as many are on the GPU at any time
        inputs = min(layers, settings.INPUTS_ON_DEVICE) * input_bytes(work)
        early = saved
        first = replace(first, bytes=inputs + (kept - inputs) / layers)
    loss, loss_words = loss_bytes(shape, t)
    states = t.count * shape.hidden * (FLOAT + t.width)
    gradient = f"{loss_words}; gradient of {t.count} x {shape.hidden} in float32 and {t.width}"
    words = "gradients within the widest layer"
    recompute = work.layout.activation_checkpointing
    words += ", and all that its forward keeps, computed again" if recompute else ""
    dequantized = _dequantized_rows(work, t)
    worst = worst_backward(work, t)
    # No weight is dequantized while the routed rows' gradient is made.
    dequantized = [replace(row, bytes=worst_backward(work, t, row.bytes) - worst) for row in dequantized]
    backward = [MemoryRow("backward of a layer", worst, words), *dequantized]
    again = max(layer_bytes(layer, t) for layer, _ in shape.kinds) if recompute else 0.0
    forward = {}
    if t.dora:
        forward["norms of a layer"] = [saved, *g["always"], *g["layers"], *dora_norm_rows(work, t, again)]
    temporaries = MemoryRow("optimizer's temporaries", adapter_share(work)[0] * 4.0, "one float32 copy of the adapter")
    if in_full := sum(shape.adapter.in_full.values()):
        size = shape.adapter.dtype_bytes
        bytes_each = 2 * size
        if work.layout.shard > 1:
            bytes_each -= gathered_bytes(work).most
        words = f"{in_full} x {bytes_each}: unsharded, what is trained of the base and its gradient"
        g["always"] = [*g["always"], MemoryRow("trained weights, gathered", in_full * bytes_each, words)]
    return {
        "last layer's gather": [early, *g["always"], *g["last"]],
        "head's gather": [saved, *g["always"], *g["head"]],
        "loss's backward": [saved, *g["always"], *g["tail"], MemoryRow("loss", loss + states, gradient)],
        "backward of a layer": [saved, *g["always"], *g["layers"], *backward],
        **forward,
        "backward of the first layer": [first, *g["always"], *g["first"], *backward],
        "optimizer": [temporaries],
    }


def _list_evaluation_moments(work: Workload) -> dict[str, list[MemoryRow]]:
    """Return the rows of an evaluation's fullest moments: no backward, but perhaps larger batches than in training."""
    if not work.evaluated:
        return {}
    shape = work.shape
    g = _gathered_rows(work)
    evaluated = replace(work, batch=replace(work.batch, micro=work.evaluated))
    widened = []
    embedding = []
    if work.of_narrow_pairs:
        evaluated = replace(evaluated, layout=replace(work.layout, precision="no"), base_bytes=FLOAT)
        in_codes = work.layout.base_dtype != "bf16"  # these stay as they are
        experts = work.layout.expert_parallel
        counts = [layer.dense + layer.routed // experts if experts > 1 else layer.elements for layer, _ in shape.kinds]
        largest = max(count.total - count.narrow * in_codes for count in counts)
        if (size := gathered_bytes(work).most) < FLOAT:
            words = f"{largest} x {FLOAT}: pairs are evaluated in it"
            widened = [MemoryRow("a layer in float32", FLOAT * largest, words)]
            size = FLOAT + 2 * size * (work.layout.shard > 1)
            words = f"{shape.embedding.total} x {size}: in float32, and gathered"
            embedding = [MemoryRow("embedding", size * shape.embedding.total, words)]
    t = Tokens.of(evaluated)
    worst = max(forward_bytes(layer, shape.hidden, t) for layer, _ in shape.kinds)
    words = f"an evaluation batch of {t.count} tokens, within the widest layer"
    forward = [MemoryRow("forward of a layer", worst, words), *_dequantized_rows(work, t), *dora_norm_rows(work, t)]
    words = f"2 x {t.count} x {shape.hidden} x {t.width}"
    hidden = MemoryRow("hidden states", 2.0 * t.count * shape.hidden * t.width, words)
    loss, words = loss_bytes(shape, t)
    if embedding:  # the head's blocks are cast, and their logits joined
        block = min(shape.vocab, TILE_VOCABULARY) * shape.hidden * FLOAT
        loss += min(t.count, TILE_TOKENS) * min(shape.vocab * 4 // 3, TILE_VOCABULARY) * FLOAT + block
        words += f", twice; a block of the head x {FLOAT}"
    words = f"an evaluation's; {words}; hidden states, and the final norm's in float32"
    states = t.count * shape.hidden * (FLOAT + t.width)
    if work.keeps:  # the adapted model's hidden states and logits, beside the base's
        words = f"{words}; of kept sets both, with the adapter and without it"
        kept = t.count * shape.hidden * t.width
        forward = [*forward, MemoryRow("adapted hidden states", kept, f"{t.count} x {shape.hidden} x {t.width}")]
        loss += loss + kept
    return {
        "evaluation": [*g["always"], *g["layers"], *widened, *forward],
        "evaluation's embedding": [*g["always"], *embedding],
        "evaluation's gather": [*g["always"], *g["last"], hidden],
        "evaluation's loss": [*g["always"], *g["tail"], MemoryRow("loss", loss + states, words)],
    }


def _kept_bytes(work: Workload, t: Tokens) -> tuple[float, str]:
    """Return the bytes of all layers' saved tensors, or with checkpointing of each layer's input."""
    shape = work.shape
    count = len(shape.layers)
    final = t.count * shape.hidden * (FLOAT + t.width)  # final norm's float32 input, and its result
    final += t.count * t.masked  # one mask for all layers, a byte per pair, from which each layer makes its own
    if inputs_on_host(work):
        count = min(count, settings.INPUTS_ON_DEVICE)
    stream = float(count * t.count * shape.hidden * t.width)
    if work.layout.activation_checkpointing:
        words = f"{count} layer inputs of {t.count} tokens x {shape.hidden} x {t.width}, and the final norm's"
        if work.keeps_products:
            # Gate with up, and down; tokens that arrive from other ranks, and results that come back.
            sent = 2 * shape.hidden * (work.layout.expert_parallel > 1)
            wide = sum(times * (2 * layer.expert + shape.hidden + sent) for layer, times in shape.kinds if layer.expert)
            narrow = sum(times * lora.r for layer, times in shape.kinds for lora in layer.expert_lora)
            stream += t.count * t.top_k * t.surplus * (wide + narrow) * t.width
            words += "; products of routed experts, and tokens sent to them"
        return stream + final, words
    layers = sum(layer_bytes(layer, t) * times for layer, times in shape.kinds)
    per_token = layers / t.count / count
    words = f"{count} layers x {t.count} tokens x {per_token:.0f} bytes of norms, attention, feed-forward, adapters"
    if any(layer.traced for layer, _ in shape.kinds):
        words += "; measured by tracing, where no formula is known"
    return stream + layers + final, words


def inputs_on_host(work: Workload) -> bool:
    """Return whether inputs of recomputed layers leave the device. On a CPU they are copied within its memory."""
    return bool(work.layout.offload_activations) and not work.on_cpu


def input_bytes(work: Workload) -> int:
    """Return the bytes of one layer's input on one rank."""
    return work.tokens * work.shape.hidden * work.width


def _gathered_rows(work: Workload) -> dict[str, list[MemoryRow]]:
    """Return the weights that FSDP2 has gathered: always, in the middle of a pass, and at its other moments."""
    layout = work.layout
    shape = work.shape
    size = gathered_bytes(work)
    rows: dict[str, list[MemoryRow]] = defaultdict(list)
    if layout.shard == 1:
        return rows
    split = layout.expert_parallel > 1
    reshards = layout.reshard_after_forward

    def padded(layer: Layer) -> ElementCount:
        """Count what FSDP2 gathers of a layer: it pads first dimensions to a multiple of the ranks."""
        sharded = (p for p in layer.parameters if not (split and p.part == "experts"))
        return count_elements(sharded, shape.narrow, layout.shard) * layout.shard

    kinds = {id(layer): padded(layer) for layer, _ in shape.kinds}
    counts = [kinds[id(layer)] for layer in shape.layers]
    # In the forward FSDP2 keeps the previous layer's buffer until the next is copied out: three layers in memory.
    now = size.of(counts[-1])
    before = size.of(counts[-2]) if len(counts) > 1 else 0.0
    if reshards:
        last = before + 2 * now
        words = f"the layer's {size.describe(counts[-1])}, its buffer, and the previous layer's"
    else:  # the layer itself counts as permanently gathered
        last = before + now
        words = f"buffers of the layer, {size.describe(counts[-1])}, and of the previous one"
    tail = size.of(shape.tail)
    head = MemoryRow("head and final norm, gathered", tail, "kept gathered from the end of the forward to the backward")
    buffers = MemoryRow("all-gather buffers", tail + last / 3, "the head's own and the last layer's")
    rows |= {"last": [MemoryRow("gathered layers", last, words)], "head": [head, buffers], "tail": [head]}
    if not reshards:
        every = shape.rest - shape.tail
        for layer, times in shape.kinds:
            every += (kinds[id(layer)] + (layer.routed // layout.expert_parallel if split else ElementCount())) * times
        rows["always"] = [MemoryRow("gathered weights", size.of(every), f"{size.describe(every)}, not resharded")]
        return rows
    # FSDP2 copies gathered weights out of the buffer while it already fills the next layer's buffer.
    most = max([size.of(a) + size.of(b) for a, b in pairwise(counts)] or [size.of(counts[0])])
    words = f"a layer of {size.describe(max(counts, key=size.of))}, and the next one's buffer"
    if split:
        experts = max((layer.routed for layer in shape.layers), key=size.of) // layout.expert_parallel
        most += size.of(experts) * (2 if layout.shard > layout.expert_parallel else 1)
        words += f"; the rank's own experts of a layer, which FSDP2 copies even unsent: {size.describe(experts)}"
    rows["layers"] = [MemoryRow("gathered layers", most, words)]
    if layout.activation_checkpointing:
        # With checkpointing the embedding's output requires a gradient, so its weights are gathered once more.
        words = f"a layer of {counts[0].total} parameters and the embedding's {shape.embedding.total}"
        rows["first"] = [MemoryRow("gathered layers", size.of(counts[0] + shape.embedding), words)]
    return rows


def dora_norm_rows(work: Workload, t: Tokens, kept: float = 0.0) -> list[MemoryRow]:
    """Return the memory for DoRA's norm of the widest adapted weight, plus `kept`, the bytes that its layer keeps."""
    widest = max((dora_bytes(lora, t) for layer, _ in work.shape.kinds for lora in layer.plain_lora), default=0.0)
    return [MemoryRow("norms for DoRA", widest + kept, "the widest adapted weight, built in full")] if work.dora else []


def _dequantized_rows(work: Workload, t: Tokens) -> list[MemoryRow]:
    """Return the dequantized values of the widest quantized parameter, as far as they exist at once."""
    if work.layout.base_dtype == "bf16":
        return []
    shape = work.shape
    narrow = [p for layer, _ in shape.kinds for p in layer.parameters if p.name in shape.narrow]
    four = FOUR_BITS.get(work.layout.base_dtype)
    scales = FLOAT / four.block if four and four.is_divided else 0.0  # themselves decoded
    if work.on_cpu:  # one expert at a time, in float32 and then in the products' dtype
        widest = max((prod(p.shape[-2:]) for p in narrow), default=0)
        bytes_each = FLOAT + (t.width if t.width < FLOAT else 0) + scales
        return [MemoryRow("dequantized weights", widest * bytes_each, f"the widest matrix: {widest} x {bytes_each}")]
    most = max((dequantized_bytes(p.shape, work.layout.expert_parallel, t.width) for p in narrow), default=0)
    most_bytes = settings.DEQUANTIZED_BYTES
    with_scales = most * (1 + scales / t.width)
    return [MemoryRow("dequantized weights", with_scales, f"of the widest stack at most {most_bytes} bytes at once")]


def dequantized_bytes(shape: Sequence[int], expert_parallel: int, width: int) -> int:
    """Return the most bytes of one parameter's dequantized values: all of a matrix, some columns of a stack."""
    if len(shape) < 3:
        return prod(shape) * width
    experts = shape[0] // expert_parallel
    most = 0
    tile = settings.DEQUANTIZED_COLUMNS
    for side, other in (shape[1:], reversed(shape[1:])):
        columns = settings.DEQUANTIZED_BYTES // (experts * other * width) // tile * tile
        most = max(most, experts * other * width * min(side, max(tile, columns)))
    return most


@dataclass(frozen=True, slots=True)
class Tokens:
    """The inputs that a layer's bytes depend on, besides the layer."""

    count: int  # per GPU and micro-batch
    width: int  # bytes of a value in compute
    cast: bool  # autocast copies the input for each adapted module
    inputs: int  # bytes per value of these copies
    norm: int  # bytes of a value that a norm keeps
    mask: float  # bytes that dropout keeps per input value
    dora: bool
    heads: int
    top_k: int
    routed: int  # bytes of a weighted value in the experts' result
    weighted: int  # copies of the routed rows' gradient in that width at once
    surplus: float  # tokens at the fullest rank's experts, relative to the mean
    masked: int  # tokens that each token's mask covers; 0: no mask
    scores: int = 0  # tokens that each token has scores for, if they are kept
    length: int = 1  # tokens per sequence
    split: int = 1  # ranks that rows are split over
    keys: float = 1.0  # of split rows, whose gradients exist at once, per token
    copied: float = 0.0  # of them, copied for attention sinks

    @classmethod
    def of(cls, work: Workload) -> Tokens:
        # Fused norms keep their input as it comes. Those of families without counts may not be fused.
        fused = not work.separate and work.shape.base.family.model_type in load_operators()["fused"]
        return cls(
            count=work.tokens,
            width=work.width,
            cast=work.casts_inputs,
            inputs=work.input_width,
            norm=max(work.base_bytes, work.width) if fused else FLOAT,
            mask=1.0 if work.dropout else 0.0,
            dora=work.dora,
            heads=work.shape.heads,
            top_k=work.shape.top_k,
            routed=work.width if work.shape.base.family.narrow_routing else FLOAT,
            weighted=2 if work.shape.base.family.expert_adapters else 3,  # train/experts: else transformers' own
            surplus=IMBALANCE if work.layout.expert_parallel > 1 else 1.0,
            masked=work.batch.length if work.has_mask else 0,
            scores=work.batch.length if work.scores else 0,
            length=work.batch.length,
            split=work.layout.context_parallel,
            keys=work.keys_per_token,
            copied=work.copied_keys,
        )

    def traced(self, traced: Traced, what: str) -> float:
        """Return the bytes per token of a traced layer, scaled from its measurement in 16 bits."""
        return traced.at(what, self.length) / self.length * self.width / 2

    @property
    def rows(self) -> float:
        """Return the rows per token at the experts."""
        return self.top_k * self.surplus


def layer_bytes(layer: Layer, t: Tokens) -> float:
    """Return the bytes that one layer keeps until its backward."""
    norms = t.norm * layer.norms + 2 * FLOAT  # each norm's input, and one reciprocal per token
    per_token = norms + _attention_bytes(layer, t) + 3 * layer.mlp * t.width
    if layer.traced:
        per_token = t.traced(layer.traced, "kept")
    # Inputs of the adapted modules, and their low-rank results.
    per_token += _adapter_input_bytes(layer.plain_lora, t) + sum(lora.r * t.width for lora in layer.plain_lora)
    # Experts' adapters keep their low-rank rows, and input rows after dropout; other input rows are recomputed from
    # gate and up (kept anyway) or from each token's hidden state.
    for lora in layer.expert_lora:
        states = lora.inputs * t.width if lora.leaf == "gate_up_proj" else 0
        per_token += t.rows * lora.r * t.width + (t.rows * (t.width + t.mask) * lora.inputs if t.mask else states)
    if layer.expert:  # router's scores, indices, and for each chosen expert gate, up, activated gate and result
        per_token += layer.experts * FLOAT + t.top_k * 5 * INDEX + t.rows * (3 * layer.expert + layer.hidden) * t.width
    # Copies of the adapters in the compute dtype; those of experts are cast again.
    copies = sum(lora.parameters for lora in layer.plain_lora) * t.width if t.cast else 0
    if t.dora:  # the frozen product and the adapter's; with dropout autocast's own copy of the frozen weight
        per_token += 2 * t.width * sum(lora.outputs for lora in layer.plain_lora)
        if t.cast and t.mask:
            copies += sum(lora.inputs * lora.outputs for lora in layer.plain_lora) * t.width
    return t.count * per_token + copies


def dora_bytes(lora: AdaptedModule, t: Tokens) -> float:
    """Return the bytes that one linear layer's forward needs at once to compute the norm of its adapted weight. These
    are the adapter's product, the scaled product, its sum with the weight, the weight in the input's dtype if autocast
    widened the input, and the identity matrix that went through A."""
    weight = lora.inputs * lora.outputs
    width = FLOAT if t.cast else t.width
    return (4 if t.cast else 3) * width * weight + t.width * lora.inputs**2


def forward_bytes(layer: Layer, hidden: int, t: Tokens) -> float:
    """Return the most bytes that a layer's forward needs at once if nothing is kept for a backward."""
    fused = t.norm < FLOAT
    stream = hidden * (2 * t.width + (0 if fused else FLOAT))  # the residual, the branch, and the norm's float32
    adapted = any(lora.leaf == "up_proj" for lora in layer.plain_lora)
    # An adapted up_proj has its own product, the adapter's, the scaled one, and their sum, besides the gate; fused, the
    # first is added to the adapter's in place.
    mlps = (4 if fused else 5) if adapted else 3
    options = [_attention_bytes(layer, t) + 2 * layer.query * t.width, mlps * layer.mlp * t.width]
    if t.split > 1:
        options[0] += t.split * layer.gathered * t.width  # as received, and put in order
    if layer.traced:
        options.append(t.traced(layer.traced, "forward_peak"))
    if layer.expert:
        # rows in expert order, gate and up, activated gate, product; or the rows, results, weighted, and unsorted
        options.append(t.rows * (hidden + 4 * layer.expert) * t.width)
        options.append(t.rows * hidden * 2 * (t.width + t.routed))
    return t.count * (stream + max(options) + t.masked)


def worst_backward(work: Workload, t: Tokens, dequantized: float = 0.0) -> float:
    """Return the bytes of the widest layer's backward, with what checkpointing computes again."""
    again = work.layout.activation_checkpointing
    return max(
        backward_bytes(layer, work.shape.hidden, t, dequantized) + (layer_bytes(layer, t) if again else 0)
        for layer, _ in work.shape.kinds
    )


def backward_bytes(layer: Layer, hidden: int, t: Tokens, dequantized: float = 0.0) -> float:
    """Return the bytes that a layer's backward needs at its peak, on top of the tensors that the forward kept.
    `dequantized`: bytes of a weight's values during its product."""
    stream = t.count * hidden * 2 * t.width  # gradient of the residual stream and of the branch
    # The widest linear: gradient of its input from the base and from the adapter, the latter also in float32.
    widest = max(layer.mlp, hidden, *(lora.inputs for lora in layer.plain_lora))
    options: list[float] = [t.count * widest * (2 * t.width + (FLOAT if t.cast else 0))]
    if layer.traced:
        options.append(t.count * t.traced(layer.traced, "backward_peak"))
    options = [option + dequantized for option in options]
    if t.split > 1:
        # of keys and values: those of each part of a piece, their sum over full rows for one of the two, and what is
        # sent; of queries and results
        per_token = (t.keys + 1.5 * t.split) * layer.gathered + layer.query + 2 * layer.attended
        # By then what the feed-forward kept is freed.
        per_token -= 3 * layer.mlp
        if layer.expert:
            per_token -= t.rows * (3 * layer.expert + layer.hidden)
        options.append(t.count * per_token * t.width)
    if layer.expert:
        # gradient of the weighted sum, its product with the weights, and with the rows (for the router); by then the
        # shared expert, which ran last, has finished, and tensors kept by it and its adapters are freed
        shared = [lora for lora in layer.plain_lora if lora.part == "shared_experts"]
        freed = t.count * (3 * layer.mlp * t.width + _adapter_input_bytes(shared, t))
        options.append(t.count * (t.rows * t.weighted + 1) * hidden * t.routed - freed)
    return stream + max(options)


def loss_bytes(shape: ModelShape, t: Tokens) -> tuple[float, str]:
    """Return the bytes of the loss's forward on top of the hidden states; its backward adds the states' gradient."""
    rows = min(t.count, TILE_TOKENS)
    columns = min(shape.vocab * 4 // 3, TILE_VOCABULARY)
    words = f"fused head: a tile of {rows} tokens x {columns} x {t.width}, and its input"
    return rows * columns * t.width + t.count * shape.hidden * t.width, words


def _attention_bytes(layer: Layer, t: Tokens) -> float:
    """Return the bytes per token of query, key, value, result and log-sum-exps. Fused kernels keep no score matrix.
    Under a mask keys and values are repeated for every head, and each layer keeps the mask in the compute dtype."""
    if t.split > 1:  # keys and values of full rows, and their copies with a span's mask; results of the pieces, and all
        keys = t.split * layer.gathered + t.copied * (layer.gathered + t.heads + settings.SPLIT_QUERIES)
        return (layer.query + 2 * layer.attended + keys) * t.width + FLOAT * t.heads
    key = layer.key
    value = layer.value
    if t.masked:
        key = max(key, layer.query)
        value = max(value, layer.attended)
    kept = (layer.query + key + value + layer.attended + t.masked) * t.width + FLOAT * t.heads
    return kept + t.scores * t.heads * (FLOAT + t.width)  # the softmax of every pair in float32, and as it is used


def _adapter_input_bytes(adapted: Sequence[AdaptedModule], t: Tokens) -> float:
    """Return the bytes per token of adapted modules' inputs. Cast or dropout gives each module its own copy; else
    modules with the same input keep it once, and o_proj's input is the attention's result, which is kept anyway."""
    if t.cast or t.mask:
        width = t.inputs if t.cast else t.width
        return sum((width + t.mask) * lora.inputs for lora in adapted)
    return sum(width * t.width for _, width in {(lora.part, lora.inputs) for lora in adapted if lora.leaf != "o_proj"})


def _host_rows(work: Workload, on_rank: Mapping[str, float]) -> list[MemoryRow]:
    """Return the rows of one node's host memory. `on_rank`: bytes that a rank on a CPU needs in each phase."""
    ranks = work.layout.gpus_per_node
    count = work.shape.adapter.trainable
    size = work.shape.adapter.dtype_bytes
    # Rank 0 alone writes the full adapter, even if other ranks train parts of it.
    states, fixed, _ = find_optimizer_states(work.optim)
    moments = states * size + fixed
    words = f"rank 0: {count} x ({size} + optimizer {moments:g}), and the optimizer's file of {moments:g} more"
    written = MemoryRow("adapter being written", count * (size + 2 * moments), words, "save", "host")
    if work.on_cpu:
        words = f"{ranks} x what a rank needs"
        return [*(MemoryRow("ranks", ranks * need, words, phase, "host") for phase, need in on_rank.items()), written]
    processes = ranks * HOST_PROCESS
    words = f"{ranks} x {HOST_PROCESS / GIB:g} GiB, assumed"
    rows = [*(MemoryRow("processes", processes, words, phase, "host") for phase in on_rank), written]
    words = f"{ranks} x {LOADER_THREADS} of {CONVERTED_VALUES} values as stored"
    rows.append(MemoryRow("chunks being read", ranks * LOADER_THREADS * CONVERTED_VALUES * 2, words, "load", "host"))
    if work.layout.offload:
        words = f"{ranks} x {base_bytes(work)[1]}, pinned: each parameter's part takes a power of two"
        pinned = ranks * _pinned_bytes(work)
        rows += [MemoryRow("offloaded base weights", pinned, words, phase, "host") for phase in on_rank]
    if inputs_on_host(work):
        layers = len(work.shape.layers)
        size = input_bytes(work)
        words = f"{ranks} x {layers} of {size} bytes, pinned: each takes a power of two"
        rows.append(MemoryRow("layer inputs", ranks * layers * _pin(size), words, "step", "host"))
    return rows


def _pin(size: int) -> int:
    """Round up to a power of two, as torch's pinned-memory allocator does."""
    return 1 << (size - 1).bit_length()


def _pinned_bytes(work: Workload) -> float:
    shard = work.layout.shard
    split = work.layout.expert_parallel

    def pinned(parameter: Parameter) -> int:
        rows, *rest = parameter.shape or (1,)
        for ways in [split, shard // split] if parameter.part == "experts" else [shard]:
            rows = ceil(rows / ways)
        return _pin(rows * prod(rest) * work.base_bytes)

    layers = sum(times * sum(map(pinned, layer.parameters)) for layer, times in work.shape.kinds)
    return float(layers + sum(map(pinned, work.shape.outside)))
