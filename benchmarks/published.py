"""Planned against published: plan every published LoRA run that windlass can represent.

    python benchmarks/published.py                 the table, by source
    python benchmarks/published.py --json          one JSON object
    python benchmarks/published.py --csv FILE      other rows, with the columns of benchmarks/published_runs.csv
    python benchmarks/published.py --rows          each row
    python benchmarks/published.py --write         write docs/accuracy.md and its picture

Rows of eager transformers with PEFT are what windlass should predict; other engines are slower or faster because of
their own kernels, and bound it. Constants were fitted to FITTED only.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent))

from published_models import config_of

from windlass import hardware
from windlass.errors import UserError
from windlass.hardware import GIB, Machine
from windlass.model import config
from windlass.model import targets as adapters
from windlass.plan import memory
from windlass.plan.cost import BatchSize, Cost, Workload, estimate_cost, read_shape
from windlass.plan.layout import Layout
from windlass.plan.rows import RowLengths
from windlass.plan.step_time import AHEAD, StepTime, estimate_time
from windlass.plan.workload import ModelShape
from windlass.runfile import Lora
from windlass.settings import FOUR_BITS

ROWS = Path(__file__).with_name("published_runs.csv")
# Sources whose rows the constants of the time and memory models were chosen with.
FITTED = ("refs/a100_80gb.csv", "QwenLM/Qwen ")
# PEFT's policy for FSDP1 makes every adapter matrix a unit of its own, gathered and reduced by itself, and FSDP1 waits
# before each gather. windlass has no such units: rows of FSDP1 are planned with so many seconds for each.
FSDP1_UNIT = 0.25e-3
# Bytes that the memory moves to decode a weight of 4 bits: a kernel reads half a byte and writes two at about half the
# memory's rate; AutoGPTQ of 2023 shifts and masks int32 copies with torch's own operators.
DECODE_KERNEL, DECODE_TORCH = 5.0, 22.0
# Of AutoGPTQ's torch operators: how many for each matrix, and the bytes of their copies a weight.
TORCH_OPERATORS = 14
TORCH_BYTES = 24
GPTQ_BYTES = 0.52  # of a weight: 4 bits, a scale in 16 and a zero in 4 for 128 of them
# What an engine has besides transformers and PEFT: kernels, compilation, offloading, another trainer.
OTHER_ENGINE = (
    "foak|liger|triton|unsloth|megatron|transformerengine|nemo|litgpt|torchtune|torchtitan|scattermoe|fused lora|"
    "axolotl|deepspeed|zero-?[123]|atorch|mosaic|llm-foundry|swift|compile|lora kernels|offload|padding-free|"
    "answerdotai|fsdp_qlora|\\bhqq"
)
EAGER = "transformers|peft|hugging ?face|\\btrl\\b|eager|hf trainer"
# One source names its acceleration. These leave the model's operators alone: bases in 4 bits are decoded by
# bitsandbytes or AutoGPTQ, then multiplied by torch.
PLAIN_CONFIGS = ("none", "baseline-peft-bnb", "accelerated-peft-bnb", "accelerated-peft-autogptq")
# Seconds that are not of steps alone: PEFT's comparison has the generation for its test set in its train_time.
MORE_THAN_STEPS = r"\btrain_time\b|includ\w+ (evaluation|loading|start-?up|compilation|generation)"
GPUS = {  # by what a name contains, in this order
    r"h200.*nvl": "h200-nvl",
    r"h200": "h200",
    r"h100.*(nvl|94)": "h100-nvl",
    r"h100.*pcie": "h100-pcie",
    r"h100.*(96|64)\s*gb|a100.*pcie|a100x|h20\b": None,  # other cards than their name's first part says
    r"\b(h100|h800)": "h100",
    r"\b(a100|a800).*40": "a100-40gb",
    r"\b(a100|a800)": "a100-80gb",
    r"\bg?b200": "b200",
    r"\bl40s": "l40s",
    r"\bl4\b": "l4",
    r"\ba10\b": "a10",
    r"\bmi300": "mi300x",
}
UNITS: dict[str, dict[str, float]] = {  # what a figure is multiplied with, by what is written behind it
    "memory": {"gib": 1, "mib": 1 / 1024, "gb": 1e9 / 2**30, "mb": 1e6 / 2**30, "g": 1, "": 1},
    "seconds": {"s": 1, "sec": 1, "seconds": 1, "ms": 1e-3, "min": 60, "": 1},
    "rate": {"tok/s": 1, "tokens/s": 1, "t/s": 1, "k": 1e3, "k tok/s": 1e3, "": 1},
    "tokens": {"k": 1024, "tokens": 1, "": 1},
    "count": {"": 1},
}
TARGETS = {  # what sources call them; a fused projection is one adapter
    "q,k,v,o": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "qkv,proj": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "q,v": ["q_proj", "v_proj"],
    "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "c_attn,attn.c_proj,w1,w2": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"],
    "mlp": ["gate_proj", "up_proj", "down_proj"],
    "all": "all",
}
LETTERS = {name.removesuffix("_proj"): name for name in (*TARGETS["q,k,v,o"], *TARGETS["mlp"])}


class SkipError(Exception):
    """The reason why a row is not planned."""


@dataclass(frozen=True)
class Replay:
    """One planned row."""

    line: int
    source: str
    model: str
    eager: bool
    fitted: bool
    words: str
    memory: float | None  # planned / published
    speed: float | None
    planned_gib: float
    planned_tokens: float  # per GPU and second
    published_gib: float | None
    published_tokens: float | None
    timed: tuple[Workload, Engine] = field(repr=False)  # what its speed is planned of


def number(text: str, what: str, kind: str = "count", *, empty: float | None = None) -> float:
    """Return a positive number from text such as `~62 GB`, `4k`, `1,024`, `8 (inferred)`."""
    text = re.sub(r"\([^)]*\)|(?<=\d),(?=\d{3})", "", text).strip().lower().lstrip("~≈ ")
    if text in ("", "-", "?", "n/a", "na", "nan", "none", "not stated", "unknown"):
        if empty is None:
            raise SkipError(f"{what} is not stated")
        return empty
    found = re.fullmatch(r"(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+)\s*([a-z/ ]*)", text)
    if not found or (unit := UNITS[kind].get(found[2].strip())) is None:
        raise SkipError(f"{what} is not a number")
    value = float(found[1]) * unit
    if not 0 < value < 1e12:
        raise SkipError(f"{what} is not a positive number")
    return value


def whole(text: str, what: str, *, empty: float | None = None) -> int:
    value = number(text, what, empty=empty)
    if value != int(value) or value > 1e6:
        raise SkipError(f"{what} is not a whole number of reasonable size")
    return int(value)


@dataclass(frozen=True)
class Engine:
    """How a row's engine differs from windlass."""

    eager: bool  # transformers' own operators, and PEFT
    four_bits: str  # empty or nf4
    gptq: bool  # in another 4-bit format: GPTQ_BYTES
    upcast: bool  # all that isn't in 4 bits is in float32, and so is what the layers hand on
    old: bool  # of 2023: before PEFT 0.12 adapters had the base's dtype
    autocast: bool
    fsdp1: bool

    @property
    def torch_decodes(self) -> bool:
        """Return whether it is AutoGPTQ of 2023, which trains in float16 under DeepSpeed, without autocast for the
        loss."""
        return self.gptq and self.old

    @classmethod
    def of(cls, row: dict[str, str]) -> Engine:
        words = " ".join(row[key] for key in ("source", "notes", "attn", "compile", "parallelism")).lower()
        words = re.sub(r"\b(no|not|without) (torch[. ]?)?(compile|offload\w*)", "", words)
        dtype, qlora = row["base_dtype"].strip().lower(), "qlora" in row["method"].lower()
        if re.search("8[- ]?bit|int8|fp8|mxfp4|nvfp4|hqq only", dtype):
            raise SkipError("a base in 8 bits, or multiplied as it is quantized")
        narrow = qlora or bool(re.search("int4|nf4|fp4|4[- ]?bit|gptq|awq", dtype))
        gptq = narrow and bool(re.search("gptq|int4|awq", dtype))
        config = re.search(r"framework_config=([^;\s]+)", words)
        other = config[1] not in PLAIN_CONFIGS if config else bool(re.search(OTHER_ENGINE, words))
        eager = bool(config or re.search(EAGER, words)) and not other and not row["compile"].lower().startswith("yes")
        return cls(
            eager=eager,
            four_bits="nf4" if narrow else "",
            gptq=gptq,
            # PEFT's prepare_model_for_kbit_training does so, but not to GPTQ's models, and sharded ones are left alone
            upcast=narrow and eager and not re.search(r"gptq|accelerated-|fsdp|zero-?3", words + dtype),
            old="2023 stack" in words,
            autocast="no autocast" not in words,
            fsdp1="fsdp1" in words,
        )


def lengths_of(text: str) -> tuple[int, int | None]:
    """Return the tokens of the longest row, and of a usual one if known."""
    text = text.strip().lower()
    longest = re.search(r"(?:<=|≤|max(?:imum)?|up to)\s*(\d[\d,]*\d\b|\d+k\b)", text)
    if not longest:
        length = int(number(text, "seq_len", "tokens"))
        return length, length
    mean = re.search(r"(?:mean|average|avg)\s*[~≈]?\s*(\d[\d,]*\d)", text)
    return int(number(longest[1], "seq_len", "tokens")), int(number(mean[1], "seq_len")) if mean else None


def gpu_of(text: str) -> hardware.Gpu:
    words = text.lower()
    for pattern, name in GPUS.items():
        if re.search(pattern, words) and name:
            return hardware.find_gpu(name)
        if re.search(pattern, words):
            break
    named = re.search(r"[a-z]+ ?\d{2,}|\d{4}|[a-z]\d+", re.sub(r"\d+ ?(x|gb)\b\+?", "", words))
    raise SkipError("a GPU that windlass has no data sheet of" if named else "the GPU is not stated")


def ranks_of(row: dict[str, str]) -> tuple[int, int]:
    """Return the nodes, and the GPUs of each."""
    times, per_node = re.match(r"\s*(\d+) ?x\b", row["gpu"].lower()), row["gpus_per_node"]
    if not per_node.strip():
        per_node = times[1] if times else "1" if row["parallelism"].strip().lower() == "none" else ""
    return whole(row["nodes"], "nodes", empty=1), whole(per_node, "gpus_per_node")


def published_of(row: dict[str, str], column: str, kind: str) -> float | None:
    """Return the row's published figures, if they can be read."""
    try:
        return number(row[column], column, kind)
    except SkipError as why:
        if str(why).endswith("not stated"):
            return None
        raise ValueError(str(why)) from None


def replay(row: dict[str, str], line: int) -> Replay:
    """Plan a row. Raises SkipError for settings without an equivalent."""
    if "lora" not in row["method"].lower():
        raise SkipError("not LoRA")
    work, engine, usual = work_of(row)
    with patch.object(memory, "loss_bytes", loss_bytes if work.full_logits else memory.loss_bytes):
        lengths = RowLengths(usual) if usual else None
        planned = estimate_cost(work, lengths, advise=False)
        gib = memory_of(work, planned, engine, row)
    batch, layout = work.batch, work.layout
    step = seconds_of(work, planned, engine)
    published_gib = published_of(row, "peak_gib", "memory")
    published, seconds = published_of(row, "tok_s_gpu", "rate"), published_of(row, "step_s", "seconds")
    tokens = (usual or batch.length) * batch.micro * batch.accumulation / step
    if published is None and seconds:
        published = tokens * step / seconds
    if not published and not published_gib:
        raise SkipError("neither speed nor memory is stated")
    if usual is None or re.search(MORE_THAN_STEPS, row["notes"].lower()):
        published = None
        if not published_gib:
            raise SkipError("a speed of rows of unknown length, or of more than steps")
    dtype = "gptq" if engine.gptq else engine.four_bits
    words = f"{layout.name} {layout.ranks} {batch.micro}x{batch.length}x{batch.accumulation} {work.machine.gpu.name}"
    return Replay(
        line=line,
        source=row["source"],
        model=row["model"],
        eager=engine.eager,
        fitted=any(name in row["source"] for name in FITTED),
        words=f"{words} r{work.shape.adapter.r} {dtype}".strip(),
        memory=gib / published_gib if published_gib else None,
        speed=tokens / published if published else None,
        planned_gib=gib,
        planned_tokens=tokens,
        published_gib=published_gib,
        published_tokens=published,
        timed=(replace(work, batch=replace(batch, length=usual or batch.length)), engine),
    )


@dataclass(frozen=True, slots=True)
class OtherWorkload(Workload):
    """The work of an engine with the operators of transformers and PEFT, one by one."""

    full_logits: bool = False  # its loss needs all logits at once

    @property
    def separate(self) -> bool:
        return True


def loss_bytes(shape: ModelShape, t: memory.Tokens) -> tuple[float, str]:
    """Return the bytes of all logits, their copy and their gradient, in float32."""
    return 3.0 * t.count * shape.vocab * memory.FLOAT, "all logits"


def work_of(row: dict[str, str]) -> tuple[OtherWorkload, Engine, int | None]:
    """Return the planned work of a row, its engine, and the usual length of its rows."""
    engine = Engine.of(row)
    gpu, (nodes, per_node) = gpu_of(row["gpu"]), ranks_of(row)
    described = config_of(row["model"]) or by_size(row)
    length, usual = lengths_of(row["seq_len"])
    micro = whole(row["micro_batch"], "micro_batch")
    recompute = row["checkpointing"].strip().lower()
    if not recompute and engine.four_bits and engine.eager:
        recompute = "full"  # as prepare_model_for_kbit_training does
    if not re.match(r"full|yes|true|none|no\b|off|false", recompute):
        raise SkipError("whether activations are recomputed is not stated, or in part")
    base = config.describe(described, row["model"], row["model"])
    layout = replace(
        layout_of(row["parallelism"].strip(), nodes, per_node, base.dims.get("experts", 0)),
        activation_checkpointing=bool(re.match("full|yes|true", recompute)),
        precision="bf16" if engine.autocast and not engine.upcast else "no",
        base_dtype=engine.four_bits or "bf16",
    )
    accumulation = row["accum"].strip()
    if in_all := re.fullmatch(r"GBS (\d+)", accumulation):
        accumulation = str(max(1, int(in_all[1]) // (layout.ranks * micro)))
    asked, routed = targets_of(row)
    lora = {
        "r": whole(row["lora_r"], "lora_r", empty=16),
        "target_modules": asked,
        "dtype": "bfloat16" if engine.old and not engine.four_bits else "float32",
    }
    given = Lora.model_validate(lora | {"lora_dropout": 0.0} | ({"experts": {"r": lora["r"]}} if routed else {}))
    try:
        shape = read_shape(base, adapters.resolve_adapter(given, base, str))
    except UserError as error:
        raise SkipError(f"targets: {str(error).splitlines()[0]}") from None
    network = hardware.find_fabric(network_of(row["network"]))
    machine = Machine(gpu, hardware.find_fabric(gpu.link), network, hardware.find_fabric(gpu.host_link), per_node, None)
    rates = machine.rates
    if engine.four_bits:
        decoded = DECODE_TORCH if engine.torch_decodes else DECODE_KERNEL
        rates = replace(rates, decode_gb_per_second=rates.memory_gb_per_second / decoded)
    if engine.upcast:  # products are made in 16 bits all the same
        rates = replace(rates, products={**rates.products, "float32": rates.products["bfloat16"]})
    work = OtherWorkload(
        shape=shape,
        layout=layout,
        batch=BatchSize(micro, whole(accumulation, "accum", empty=1), length),
        machine=replace(machine, measured=rates),
        optim="adamw_8bit" if "8-bit" in row["notes"].lower() or "8bit" in row["notes"].lower() else "adamw_torch",
        base_bytes=4 if engine.upcast or row["base_dtype"].strip().lower().startswith("fp32") else 2,
        scores=row["attn"].strip().lower() == "eager",
        full_logits=not re.search("liger|fused cross|cut cross|chunked", row["notes"].lower()),
    )
    return work, engine, usual


def by_size(row: dict[str, str]) -> dict[str, Any]:
    """Return the shape of a dense model of which only the parameter count is known: the known one closest in size,
    with its number of layers changed to match."""
    try:
        size, active = number(row["params_b"], "params_b"), number(row["active_b"], "active_b")
    except SkipError:
        raise SkipError("a model whose config is not known here") from None
    if not 0.9 < active / size < 1.1 or not 0.1 < size < 500 or not re.search(r"\d\s*b\b", row["model"].lower()):
        raise SkipError("a model whose config is not known here")
    described, counted = min(ladder(), key=lambda known: abs(math.log(known[1] / size)))
    layers = max(1, round(described["num_hidden_layers"] * size / counted))
    return {**described, "num_hidden_layers": layers}


@cache
def ladder() -> list[tuple[dict[str, Any], float]]:
    """Return dense models by billions of parameters."""
    names = ["TinyLlama", "Llama-3.2-3B", "Mistral-7B-v0.1", "Llama-2-13b", "Llama-1-30b", "Llama-2-70b"]
    known = [found for name in names if (found := config_of(name))]
    return [(each, sum(p.count for p in config.describe(each, "x", "x").parameters) / 1e9) for each in known]


def layout_of(words: str, nodes: int, per_node: int, experts: int) -> Layout:
    ranks, lower = nodes * per_node, words.lower()
    if re.search(r"\b[tpc]p[ =]?([2-9]|\d\d)", lower) or "pipeline" in lower or "tensor" in lower or "offload" in lower:
        raise SkipError("tensor, pipeline or context parallelism, or offloading")
    common: dict[str, Any] = {"reason": "published", "nodes": nodes, "gpus_per_node": per_node}
    if ranks == 1:
        return Layout("resident", shard=1, **common)
    if (found := re.search(r"\bep[ =]?(\d+)", lower)) and int(found[1]) > 1:
        size = int(found[1])
        if not experts or ranks % size or experts % size:
            raise SkipError("expert parallelism that windlass refuses")
        shard = ranks if "fsdp" in lower else size
        return Layout("expert-parallel", shard=shard, replicate=ranks // shard, expert_parallel=size, **common)
    if re.search(r"hsdp|hybrid_shard|hybrid", lower) and nodes > 1 and per_node > 1:
        return Layout("hybrid", shard=per_node, replicate=nodes, **common)
    if re.search(r"shard_grad_op", lower):
        return Layout("no-reshard", shard=ranks, reshard_after_forward=False, **common)
    if re.search(r"fsdp|zero-?3", lower):
        return Layout("full-shard", shard=ranks, **common)
    if re.search(r"ddp|zero-?[12]|\bdp ?\d*|data parallel|none", lower):
        return Layout("resident", shard=1, replicate=ranks, **common)
    raise SkipError("how the ranks share the work is not stated")


def targets_of(row: dict[str, str]) -> tuple[Sequence[str], bool]:
    text = row["targets"].strip().lower()
    for name, modules in TARGETS.items():
        if text == name or text.startswith((f"{name} ", f"{name}(")):
            return modules, name == "all" and row["experts_adapted"].strip().lower().startswith("yes")
    if re.fullmatch(r"all[- ]linear.*|all \*_proj", text):
        return "all", row["experts_adapted"].strip().lower().startswith("yes")
    if re.fullmatch(r"[a-z_]+_proj([, ]+[a-z_]+_proj)*", text):
        return re.split(r"[, ]+", text), False
    if text and all(part in LETTERS for part in text.split(",")):
        return [LETTERS[part] for part in text.split(",")], False
    raise SkipError("the adapter's targets are not stated")


def network_of(words: str) -> str:
    lower = words.lower()
    if found := re.search(r"roce (\d+) gb", lower):
        return "roce-200" if int(found[1]) <= 1600 else "roce-400"
    return "infiniband-200" if "hdr" in lower or "800" in lower else "infiniband-400"


def seconds_of(work: Workload, planned: StepTime, engine: Engine) -> float:
    """Return the seconds of a step, with this engine's additional host work."""
    batch, layers = work.batch, work.shape.kinds
    if engine.fsdp1:
        units = sum(2 * len(layer.plain_lora) * times for layer, times in layers)
        return planned.step_seconds + 3 * units * FSDP1_UNIT * batch.accumulation
    if not engine.torch_decodes:
        return planned.step_seconds
    linears = sum(times * sum(p.name in work.shape.narrow for p in layer.parameters) for layer, times in layers)
    passes = 3 if work.layout.activation_checkpointing else 2
    more = passes * linears * TORCH_OPERATORS * work.machine.rates.operator_seconds
    each, host = planned.step_seconds / batch.accumulation, planned.host_seconds
    gpu = max(each**AHEAD - host**AHEAD, 0)
    return float((gpu + (host + more) ** AHEAD) ** (1 / AHEAD)) * batch.accumulation


def memory_of(work: Workload, planned: Cost, engine: Engine, row: dict[str, str]) -> float:
    """Return the memory as the publisher counts it: allocated by torch, reserved, or reported by the driver."""
    words, without = row["notes"].lower(), set[str]()
    if "allocated" in words:
        without = {"reserve", "fragmentation"}
    elif "reserved" in words:
        without = {"reserve"}
    rows = [row for row in planned.rows if (row.phase, row.place) == ("step", "gpu") and row.item not in without]
    moments = {name: {row.item: row.bytes for row in each} for name, each in memory.list_training_moments(work).items()}
    always = sum(row.bytes for row in rows) - sum(moments[planned.peak].values())
    if engine.gptq:
        always -= work.shape.elements.narrow / work.layout.shard * (FOUR_BITS["nf4"].bytes - GPTQ_BYTES)
    if engine.fsdp1 and work.layout.activation_checkpointing:
        # Layers' inputs stay allocated until the backward is over, and so do their gradients.
        stream = (len(work.shape.layers) - 1) * work.batch.tokens * work.shape.hidden * work.width
        moments["backward of a layer"]["gradients"] = stream
    for each in moments.values() if engine.torch_decodes else ():
        each["dequantized weights"] = each.get("dequantized weights", 0) * TORCH_BYTES / 2
        each["loss"] = each.get("loss", 0) * 2 / 3  # logits, their shifted copy, softmax and gradient, in 16 bits
    return (always + max(sum(each.values()) for each in moments.values())) / GIB


# --- all rows ------------------


def read_rows(path: Path) -> tuple[list[Replay], Counter[str], list[str]]:
    """Return the planned rows, how many were skipped and why, and unreadable ones with their line."""
    try:
        text = path.read_bytes().decode("utf-8-sig", errors="replace")
    except OSError as error:
        raise SystemExit(
            f"{path}: it can't be read: {error}\nhint: give a CSV file with the columns of {ROWS}"
        ) from None
    csv.field_size_limit(1 << 30)
    lines = csv.reader(io.StringIO(text.replace("\0", ""), newline=""))
    header = next(lines, [])
    with ROWS.open() as known:
        expected = next(csv.reader(known))
    if missing := [name for name in expected if name not in header]:
        raise SystemExit(f"{path}:1: no column {', '.join(missing)}\nhint: give a CSV file with the columns of {ROWS}")
    found, skipped, unread = [], Counter[str](), []
    for cells in lines:
        line = lines.line_num
        if not any(cells):
            continue
        try:
            if len(cells) != len(header):
                raise ValueError(f"{len(cells)} cells, not {len(header)}")
            found.append(replay(dict(zip(header, cells, strict=True)), line))
        except SkipError as why:
            skipped[str(why)] += 1
        except Exception as error:  # rows of others: whatever is odd about one, the rest is planned
            skipped["it can't be read"] += 1
            words = str(error).splitlines() or [""]
            unread.append(f"{path}:{line}: {words[0] or type(error).__name__}")
    return found, skipped, unread


def errors(ratios: Iterable[float | None]) -> dict[str, Any]:
    """Return how far planned is from published, in either direction."""
    off = sorted(abs(ratio - 1) for ratio in ratios if ratio is not None)
    return {"rows": len(off), "median": quantile(off, 0.5), "p90": quantile(off, 0.9)}


def quantile(values: Sequence[float], share: float) -> float | None:
    """Interpolate linearly between neighbours."""
    ordered = sorted(values)
    if not ordered:
        return None
    at = share * (len(ordered) - 1)
    low = int(at)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (at - low)


# What of the time model is fitted again without a source: each is multiplied with one of these.
SCALED, FACTORS = ("products", "memory", "host"), (0.7, 0.77, 0.85, 0.92, 1.0, 1.08, 1.17, 1.3, 1.43)


def scaled(row: Replay, scale: dict[str, float]) -> float:
    """Return planned / published speed with other constants."""
    work, engine = row.timed
    rates = work.machine.rates
    points = {
        name: tuple((a, b, rate * scale["products"]) for a, b, rate in each) for name, each in rates.products.items()
    }
    rates = replace(
        rates,
        products=points,
        memory_gb_per_second=rates.memory_gb_per_second * scale["memory"],
        decode_gb_per_second=rates.decode_gb_per_second * scale["memory"],
        operator_seconds=rates.operator_seconds * scale["host"],
        module_seconds=rates.module_seconds * scale["host"],
    )
    work = replace(work, machine=replace(work.machine, measured=rates))
    tokens = work.batch.tokens * work.batch.accumulation
    return tokens / seconds_of(work, estimate_time(work), engine) / (row.published_tokens or math.nan)


def left_out(rows: Sequence[Replay]) -> dict[str, Any]:
    """Return each source's speed with constants fitted to the other sources only."""
    timed, found = [row for row in rows if row.speed], {}
    for source in dict.fromkeys(row.source for row in timed):
        others = [row for row in timed if row.source != source]
        best, least = dict.fromkeys(SCALED, 1.0), math.inf
        for name in (*SCALED, *SCALED) if others else ():
            for factor in FACTORS:
                tried = {**best, name: factor}
                off = sum(abs(math.log(scaled(row, tried))) for row in others)
                if off < least:
                    best, least = tried, off
        found[source] = {
            **errors(scaled(row, best) for row in timed if row.source == source),
            "constants": {name: best[name] for name in SCALED},
        }
    return found


def summary(rows: Sequence[Replay]) -> dict[str, Any]:
    return {"memory": errors(r.memory for r in rows), "speed": errors(r.speed for r in rows)}


def answer(found: Sequence[Replay], skipped: Counter[str]) -> dict[str, Any]:
    eager = [row for row in found if row.eager]
    sources = dict.fromkeys(row.source for row in eager)
    others = dict.fromkeys(row.source for row in found if not row.eager)
    return {
        "rows": len(found),
        "skipped": dict(skipped.most_common()),
        **summary(eager),
        "held_out": summary([row for row in eager if not row.fitted]),
        "by_source": {
            source: {"fitted": any(r.fitted for r in rows), **summary(rows)}
            for source in sources
            if (rows := [r for r in eager if r.source == source])
        },
        "bounds": {
            source: {
                what: {"rows": len(ratios), **{f"p{share}": quantile(ratios, share / 100) for share in (10, 50, 90)}}
                for what in ("memory", "speed")
                if (ratios := [v for r in found if not r.eager and r.source == source and (v := getattr(r, what))])
            }
            for source in others
        },
    }


def show(found: Sequence[Replay], skipped: Counter[str], unread: Sequence[str]) -> None:
    def cells(rows: Sequence[Replay], what: str) -> str:
        ratios = [value for row in rows if (value := getattr(row, what)) is not None]
        if not ratios:
            return f"{0:4}" + 3 * f"{'':6}"
        return f"{len(ratios):4}" + "".join(f"{quantile(ratios, share):6.2f}" for share in (0.5, 0.1, 0.9))

    def table(rows: Sequence[Replay]) -> None:
        for source in dict.fromkeys(row.source for row in rows):
            own = [row for row in rows if row.source == source]
            short = source.removeprefix("github ").split(" (")[0]
            print(f"{short if len(short) <= 30 else '…' + short[-29:]:30} {cells(own, 'memory')} {cells(own, 'speed')}")

    eager = [row for row in found if row.eager]
    head = f"{'planned / published':30} {'memory':>13} p10   p90 {'speed':>13} p10   p90"
    print(head)
    print("eager transformers + PEFT")
    table(eager)
    for title, rows in (("all", eager), ("not fitted", [row for row in eager if not row.fitted])):
        print(f"{title:30} {cells(rows, 'memory')} {cells(rows, 'speed')}")
        for what in ("memory", "speed"):
            off = errors(getattr(row, what) for row in rows)
            if off["rows"]:
                print(f"  {what}: off by {off['median']:.1%} (median), {off['p90']:.1%} (p90), {off['rows']} rows")
    print("other engines: they bound it")
    table([row for row in found if not row.eager])
    print(f"{len(found)} rows planned, {sum(skipped.values())} skipped:")
    for why, count in skipped.most_common():
        print(f"{count:5}  {why}")
    for problem in unread:
        print(problem)


# --- the page ------------------

DOCS = Path(__file__).parent.parent / "docs"
PAGE = """\
# Accuracy

How the plan's estimates compare with runs that others published: `python benchmarks/published.py --write` makes this
page from [benchmarks/published_runs.csv](../benchmarks/published_runs.csv), whose rows name their sources. What we
measured ourselves, on one GPU, is in [benchmarks](benchmarks.md#on-one-h100-and-one-h200).

![Planned against published speed](accuracy.svg)

Rows of eager transformers with PEFT are what windlass should hit, with a base in 16 bits or, by bitsandbytes or
AutoGPTQ, in 4. Constants were chosen with the sources that are marked as fitted. The others were looked at too while
the model was made, so they are no blind test. "Left out": the rates of products, memory and host were fitted again, to
all other sources alone. Figures are of |planned / published - 1|.

{table}

Other engines bound it: fused kernels, compilation and other trainers are faster, DeepSpeed over an unnamed network is
slower. Planned / published:

{bounds}

{planned} rows are planned, {skipped} are skipped:

{reasons}

## What the time model is made of

- **Host**: what a layer dispatches in its forward and backward is counted from transformers' own model by family
  (`python benchmarks/dispatched.py` writes the table), times the host's time for an operator and for a module's call.
  Rows of other engines, and CPUs, dispatch operator by operator. On a GPU windlass fuses them, to [about half as many
  kernels](benchmarks.md#kernels-of-a-layer): its plans count those, and no published run has tested that count.
- **Products**: by rows, width and dtype: the operations at the sustained rate, and the matrices' way through memory.
- **Elementwise operators**: the bytes that they read and write, counted by the same trace, at the memory's rate;
  those on the rows of routed experts at 1,250 GB/s at most, [measured](benchmarks.md#on-one-h100-and-one-h200).
- **Attention** by length; recomputation; FP8 decoded; loss, head, optimizer.
- **Links**: latency and bytes by kind of collective and group. Weights are gathered while others compute; tokens are
  sent to experts between two products that wait for each other.
- **The range** is what measured steps were of the planned ones: from these rows, or from `windlass calibrate`.

Assumed, not fitted: loading at {storage:g} GB/s a node, the first step's extra seconds, FSDP2's operators for a layer.
PEFT's own comparison has its generation for the test set in its training time, so that only its memory counts here.

## What other engines do in another way

So much is added to a row's plan, and nothing of it to a plan of windlass:

- **FSDP1**: {unit:g} ms for each adapter matrix and gather, since PEFT makes each a unit of its own; with
  checkpointing, each layer's gradient stays until the backward is over.
- **PEFT's preparation of a base in 4 bits**, on one GPU: all that isn't quantized is in float32, and so is what layers
  hand on.
- **AutoGPTQ of 2023** under DeepSpeed: weights are decoded by {operators} of torch's operators, which move {decode:g}
  bytes for each; copies of {copies} bytes for each weight of a matrix; the loss in 16 bits.
"""


def write_page(found: Sequence[Replay], skipped: Counter[str]) -> None:
    whole, without = answer(found, skipped), left_out([row for row in found if row.eager])

    def share(part: dict[str, Any]) -> str:
        return f"{part['median']:.1%} | {part['p90']:.1%}" if part["rows"] else " | "

    def line(name: str, part: dict[str, Any]) -> str:
        memory, speed = part["memory"], part["speed"]
        refitted = share(without.get(name.removesuffix(" (fitted)"), {"rows": 0}))
        return f"| {name} | {memory['rows']} | {share(memory)} | {speed['rows']} | {share(speed)} | {refitted} |"

    def bound(name: str, part: dict[str, Any], what: str) -> str:
        cells = " | ".join(f"{part[what][f'p{p}']:.2f}" for p in (50, 10, 90)) if what in part else " | | "
        return f"| {name} | {what} | {part[what]['rows'] if what in part else 0} | {cells} |"

    head = "| source | rows | memory, median | p90 | rows | speed, median | p90 | left out: median | p90 |\n"
    head += "|---|---|---|---|---|---|---|---|---|"
    rows = [line(f"{name}{' (fitted)' * one['fitted']}", one) for name, one in whole["by_source"].items()]
    rows += [line("**all**", whole), line("**not fitted**", whole["held_out"])]
    bounds = [bound(name, one, what) for name, one in whole["bounds"].items() for what in one]
    text = PAGE.format(
        table="\n".join([head, *rows]),
        bounds="\n".join(["| source | | rows | median | p10 | p90 |\n|---|---|---|---|---|---|", *bounds]),
        planned=len(found),
        skipped=sum(skipped.values()),
        reasons="\n".join(f"- {count}: {why}" for why, count in skipped.most_common()),
        storage=hardware.STORAGE,
        unit=FSDP1_UNIT * 1e3,
        operators=TORCH_OPERATORS,
        decode=DECODE_TORCH,
        copies=TORCH_BYTES,
    )
    (DOCS / "accuracy.md").write_text(text)
    (DOCS / "accuracy.svg").write_text(picture([row for row in found if row.published_tokens]))


def picture(rows: Sequence[Replay]) -> str:
    """Draw planned over published tokens per second of a GPU, on logarithmic axes from 100 to 20,000."""
    side, margin, low, high = 420, 60, math.log(100), math.log(20000)

    def at(value: float) -> float:
        return side * (math.log(min(max(value, 100), 20000)) - low) / (high - low)

    def text(x: float, y: float, words: str, anchor: str = "middle", more: str = "") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"{more}>{words}</text>'

    full = side + 2 * margin
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {full} {full}" font-family="sans-serif" font-size="12">',
        f'<rect width="{full}" height="{full}" fill="white"/>',
        f'<g transform="translate({margin},{margin})"><rect width="{side}" height="{side}" fill="none" stroke="#888"/>',
    ]
    for value in (100, 200, 500, 1000, 2000, 5000, 10000, 20000):
        parts += [text(at(value), side + 18, f"{value:,}"), text(-6, side - at(value) + 4, f"{value:,}", "end")]
    for factor, dash in ((1.0, ""), (1.15, "4 3"), (1 / 1.15, "4 3")):
        ends = [(value, value * factor) for value in (100.0 * max(1, 1 / factor), 20000 / max(1, factor))]
        (x1, y1), (x2, y2) = [(at(x), side - at(y)) for x, y in ends]
        line = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        parts.append(f'<line {line} stroke="#888" stroke-dasharray="{dash}"/>')
    for row in sorted(rows, key=lambda each: each.eager):
        colour = ("#1f77b4" if row.fitted else "#d62728") if row.eager else "#cccccc"
        place = f'cx="{at(row.published_tokens or 0):.1f}" cy="{side - at(row.planned_tokens):.1f}"'
        words = f"{row.model}, {row.words}: {row.planned_tokens:,.0f} planned, {row.published_tokens:,.0f} published"
        parts.append(f'<circle {place} r="4" fill="{colour}"><title>{words}</title></circle>')
    legend = (("#1f77b4", "eager, fitted"), ("#d62728", "eager, not fitted"), ("#cccccc", "other engines"))
    for number, (colour, words) in enumerate(legend):
        parts.append(f'<circle cx="16" cy="{16 + 18 * number}" r="4" fill="{colour}"/>')
        parts.append(text(26, 20 + 18 * number, words, "start"))
    parts.append(text(side / 2, side + 42, "published tokens/s of a GPU"))
    parts.append(text(-side / 2, -44, "planned (estimated); dashed: 15 %", more=' transform="rotate(-90)"'))
    return "\n".join([*parts, "</g></svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--csv", type=Path, default=ROWS, help="the rows (default: those of this repository)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--rows", action="store_true", help="each row")
    parser.add_argument("--write", action="store_true", help="write docs/accuracy.md and its picture")
    options = parser.parse_args()
    found, skipped, unread = read_rows(options.csv)
    if options.write:
        write_page(found, skipped)
        return
    if options.json:
        for problem in unread:
            print(problem, file=sys.stderr)
        print(json.dumps(answer(found, skipped)))
        return
    if options.rows:
        for r in found:
            memory, speed = (f"{value:5.2f}" if value else "     " for value in (r.memory, r.speed))
            print(f"{r.line:4} {'eager' if r.eager else 'other'} {memory} {speed}  {r.model[:28]:28} {r.words}")
    show(found, skipped, unread)


if __name__ == "__main__":
    main()
