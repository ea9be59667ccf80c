"""Planned against published: every LoRA run that others publish and windlass can represent, planned again.

    python benchmarks/published.py                 the table, by source
    python benchmarks/published.py --json          one JSON object
    python benchmarks/published.py --csv FILE      other rows, with the columns of benchmarks/published_runs.csv
    python benchmarks/published.py --rows          each row
    python benchmarks/published.py --write         write docs/accuracy.md and its picture

Rows of eager transformers with PEFT are what windlass should hit; other engines are slower or faster by their own
kernels and bound it. Constants were fitted on FITTED alone.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from published_models import config_of

from windlass import hardware
from windlass.errors import UserError
from windlass.hardware import GIB, Machine
from windlass.model import config
from windlass.model import targets as adapters
from windlass.plan.cost import Batch, Cost, Work, cost, read_shape
from windlass.plan.layout import Layout
from windlass.runfile import Lora

ROWS = Path(__file__).with_name("published_runs.csv")
# Sources whose rows the constants of the time and memory models were chosen with.
FITTED = ("refs/a100_80gb.csv", "QwenLM/Qwen ")
# PEFT's policy for FSDP1 makes every adapter matrix a unit of its own, gathered and reduced by itself, and FSDP1 waits
# before each gather. windlass has no such units: rows of FSDP1 are planned with so many seconds for each.
FSDP1_UNIT = 0.25e-3
# What an engine has beside transformers and PEFT: kernels, compilation, offloading, another trainer.
OTHER_ENGINE = (
    "foak|liger|triton|unsloth|megatron|transformerengine|nemo|litgpt|torchtune|torchtitan|scattermoe|fused lora|"
    "axolotl|deepspeed|zero-?[123]|atorch|mosaic|llm-foundry|swift|compile|lora kernels|offload|padding-free"
)
EAGER = "transformers|peft|hugging ?face|\\btrl\\b|eager|hf trainer|framework_config=none"
GPUS = {  # by what a name contains
    "h200": "h200",
    "h100|h800": "h100",
    "a100.*40": "a100-40gb",
    "a100|a800": "a100-80gb",
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
FUSED_TARGETS = ("c_attn", "qkv")


class SkipError(Exception):
    """Why a row is not planned."""


@dataclass(frozen=True)
class Replay:
    """One row, planned."""

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


def number(text: str, what: str, *, empty: float | None = None) -> float:
    text = text.strip().replace(",", "")
    if not text and empty is not None:
        return empty
    if not text:
        raise SkipError(f"{what} is not stated")
    try:
        value = float(text)
    except ValueError:
        raise SkipError(f"{what} is not a number") from None
    if not 0 < value < 1e12:
        raise SkipError(f"{what} is not a positive number")
    return value


def replay(row: dict[str, str], line: int) -> Replay:
    """Raises SkipError for what windlass has no equivalent of."""
    words = " ".join(row[key] for key in ("source", "notes", "attn", "compile", "parallelism")).lower()
    if not row["method"].strip().lower().startswith("lora"):
        kind = "4-bit base: windlass has none" if "qlora" in row["method"].lower() else "not LoRA"
        raise SkipError(kind)
    name = next((gpu for pattern, gpu in GPUS.items() if re.search(pattern, row["gpu"].lower())), None)
    if name is None:
        raise SkipError("another GPU than A100, H100 or H200")
    nodes, per_node = int(number(row["nodes"], "nodes")), int(number(row["gpus_per_node"], "gpus_per_node"))
    described = config_of(row["model"])
    if described is None:
        raise SkipError("a model whose config is not known here")
    base_dtype = row["base_dtype"].strip().lower()
    if re.search("int4|nf4|4bit|4-bit|gptq|int8|fp8|mxfp4", base_dtype):
        raise SkipError("a quantised base")
    length = int(number(row["seq_len"], "seq_len"))
    micro = int(number(row["micro_batch"], "micro_batch", empty=1))
    recompute = row["checkpointing"].strip().lower()
    if not re.match("full|yes|true|none|no\\b|off", recompute):
        raise SkipError("whether activations are recomputed is not stated")
    base = config.describe(described, row["model"], row["model"])
    layout = replace(
        layout_of(row["parallelism"].strip(), nodes, per_node, base.dims.get("experts", 0)),
        activation_checkpointing=bool(re.match("full|yes|true", recompute)),
        precision="no" if "no autocast" in words else "bf16",
    )
    accumulation = row["accum"].strip()
    if in_all := re.fullmatch(r"GBS (\d+)", accumulation):
        accumulation = str(max(1, int(in_all[1]) // (layout.ranks * micro)))
    batch = Batch(micro, int(number(accumulation, "accum", empty=1)), length)

    old = "2023 stack" in words  # before PEFT 0.12 adapters had the base's dtype
    asked, routed = targets_of(row)
    lora = {
        "r": int(number(row["lora_r"], "lora_r")),
        "target_modules": asked,
        "dtype": "bfloat16" if old else "float32",
    }
    given = Lora.model_validate(lora | {"lora_dropout": 0.0} | ({"experts": {"r": lora["r"]}} if routed else {}))
    try:
        shape = read_shape(base, adapters.resolve(given, base, str))
    except UserError as error:
        raise SkipError(f"targets: {str(error).splitlines()[0]}") from None
    gpu = hardware.gpu(name)
    network = hardware.fabric(network_of(row["network"]))
    machine = Machine(gpu, hardware.fabric(gpu.link), network, hardware.fabric(gpu.host_link), per_node, None)
    kernels = re.search(r"framework_config=([^;\s]+)", words)  # of one source, which names its acceleration
    other = kernels[1] != "none" if kernels else bool(re.search(OTHER_ENGINE, words))
    eager = bool(re.search(EAGER, words)) and not other and "yes" not in row["compile"]
    work = Work(
        shape=shape,
        layout=layout,
        batch=batch,
        machine=machine,
        optim="adamw_torch",
        base_bytes=4 if base_dtype.startswith("fp32") else 2,
        full_logits="liger" not in row["notes"],
    )
    planned = cost(work, advise=False)
    gib = memory_of(planned, words)
    units = sum(2 * len(layer.plain_lora) * times for layer, times in shape.kinds) if "fsdp1" in words else 0
    step = planned.step_seconds + 3 * units * FSDP1_UNIT * batch.accumulation
    tokens = batch.tokens * batch.accumulation / step
    published_gib = float(row["peak_gib"]) if row["peak_gib"].strip() else None
    published = float(row["tok_s_gpu"]) if row["tok_s_gpu"].strip() else None
    if published is None and row["step_s"].strip():
        published = batch.tokens * batch.accumulation / float(row["step_s"])
    if not published and not published_gib:
        raise SkipError("neither speed nor memory is stated")
    return Replay(
        line=line,
        source=row["source"],
        model=row["model"],
        eager=eager,
        fitted=any(name in row["source"] for name in FITTED),
        words=f"{layout.name} {layout.ranks} {batch.micro}x{batch.length}x{batch.accumulation} {name} r{lora['r']}",
        memory=gib / published_gib if published_gib else None,
        speed=tokens / published if published else None,
        planned_gib=gib,
        planned_tokens=tokens,
        published_gib=published_gib,
        published_tokens=published,
    )


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
    letters = {
        "q": "q_proj",
        "k": "k_proj",
        "v": "v_proj",
        "o": "o_proj",
        "gate": "gate_proj",
        "up": "up_proj",
        "down": "down_proj",
    }
    if text and all(part in letters for part in text.split(",")):
        return [letters[part] for part in text.split(",")], False
    raise SkipError("the adapter's targets are not stated")


def network_of(words: str) -> str:
    lower = words.lower()
    if found := re.search(r"roce (\d+) gb", lower):
        return "roce-200" if int(found[1]) <= 1600 else "roce-400"
    return "infiniband-200" if "hdr" in lower or "800" in lower else "infiniband-400"


def memory_of(planned: Cost, words: str) -> float:
    """In the publisher's way of counting: what torch allocated, what it reserved, or what the driver reports."""
    without: set[str] = set()
    if "allocated" in words:
        without = {"reserve", "fragmentation"}
    elif "reserved" in words:
        without = {"reserve"}
    rows = [row for row in planned.rows if (row.phase, row.place) == ("step", "gpu") and row.item not in without]
    return sum(row.bytes for row in rows) / GIB


# --- all rows ------------------


def read_rows(path: Path) -> tuple[list[Replay], Counter[str], list[str]]:
    """The rows that were planned, how many were skipped and why, and what could not be read, with its line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(
            f"{path}: it can't be read: {error}\nhint: give a CSV file with the columns of {ROWS}"
        ) from None
    lines = csv.reader(text.splitlines())
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
        except (ValueError, UserError) as error:
            skipped["it can't be read"] += 1
            unread.append(f"{path}:{line}: {str(error).splitlines()[0]}")
    return found, skipped, unread


def errors(ratios: Iterable[float | None]) -> dict[str, Any]:
    """How far planned is from published, either way."""
    off = sorted(abs(ratio - 1) for ratio in ratios if ratio is not None)
    return {"rows": len(off), "median": quantile(off, 0.5), "p90": quantile(off, 0.9)}


def quantile(values: Sequence[float], share: float) -> float | None:
    """Linear between neighbours."""
    ordered = sorted(values)
    if not ordered:
        return None
    at = share * (len(ordered) - 1)
    low = int(at)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (at - low)


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
page from [benchmarks/published_runs.csv](../benchmarks/published_runs.csv), whose rows name their sources. **Estimated,
not measured by us: no GPU has run windlass yet.**

![Planned against published speed](accuracy.svg)

Rows of eager transformers with PEFT on A100 are what windlass should hit. Constants of the time model were chosen with
the sources that are marked as fitted. The others were looked at too while it was made, so they are no blind
test. Figures are of |planned / published - 1|.

{table}

Other engines bound it: fused kernels, compilation and other trainers are faster, DeepSpeed over an unnamed network is
slower. Planned / published:

{bounds}

{planned} rows are planned, {skipped} are skipped:

{reasons}

## What the time model is made of

- **Host**: what a layer dispatches in its forward and backward is counted from transformers' own model by family
  (`python benchmarks/dispatched.py` writes the table), times the host's time for an operator and for a module's call.
  Layers are counted as a CPU trains them. On a GPU windlass fuses them, to [about half as many
  kernels](benchmarks.md#kernels-of-a-layer); until a GPU has shown what that saves, the plan doesn't count on it.
- **Products**: by rows, width and dtype: the operations at the sustained rate, and the matrices' way through memory.
- **Elementwise operators**: the bytes that they read and write, counted by the same trace, at the memory's rate.
- **Attention** by length; recomputation; FP8 decoded; loss, head, optimizer.
- **Links**: latency and bytes by kind of collective and group. Weights are gathered while others compute; tokens are
  sent to experts between two products that wait for each other.
- **The range** is what measured steps were of the planned ones: from these rows, or from `windlass calibrate`.

Assumed, not fitted: loading at {storage:g} GB/s a node, the first step's extra seconds, FSDP2's operators for a layer.
Rows of FSDP1 are planned with {unit:g} ms for each adapter matrix and gather: PEFT makes each a unit of its own there,
which windlass does not.
"""


def write_page(found: Sequence[Replay], skipped: Counter[str]) -> None:
    whole = answer(found, skipped)

    def share(part: dict[str, Any]) -> str:
        return f"{part['median']:.1%} | {part['p90']:.1%}" if part["rows"] else " | "

    def line(name: str, part: dict[str, Any]) -> str:
        memory, speed = part["memory"], part["speed"]
        return f"| {name} | {memory['rows']} | {share(memory)} | {speed['rows']} | {share(speed)} |"

    def bound(name: str, part: dict[str, Any], what: str) -> str:
        cells = " | ".join(f"{part[what][f'p{p}']:.2f}" for p in (50, 10, 90)) if what in part else " | | "
        return f"| {name} | {what} | {part[what]['rows'] if what in part else 0} | {cells} |"

    head = "| source | rows | memory, median | p90 | rows | speed, median | p90 |\n|---|---|---|---|---|---|---|"
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
    )
    (DOCS / "accuracy.md").write_text(text)
    (DOCS / "accuracy.svg").write_text(picture([row for row in found if row.published_tokens]))


def picture(rows: Sequence[Replay]) -> str:
    """Planned over published tokens a second of a GPU, on logarithmic axes from 100 to 20,000."""
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
