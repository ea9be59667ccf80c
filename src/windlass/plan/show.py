"""Print a plan as text: a summary of fifteen lines and, on request, detailed tables."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Container, Iterable, Iterator
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from windlass.hardware import GIB, Machine
from windlass.model.quantization import (
    published_dtype,
)
from windlass.observe.format import format_count, format_duration
from windlass.plan.advice import OF_ALL
from windlass.plan.cost import (
    HEADROOM,
    Cost,
)
from windlass.plan.layout import Layout
from windlass.plan.plan import Plan
from windlass.plan.script import AnyPlan, RankGrid, ScriptPlan
from windlass.plan.search import Candidate, drop_dominated, is_same_layout, list_overrides

LINES = 15  # of the plan without options, at 80 columns
LABEL = 9  # columns of the names on the left

Row = tuple[list[str], bool]  # cells, and whether they are bold
Named = tuple[str, str]  # a paragraph's label and text


def print_plan(plan: AnyPlan, *, details: bool = False, formulas: bool = False, compare: bool = False) -> None:
    """Print a plan to stdout. `details`: tables; `formulas`: all rows with their formula; `compare`: other layouts."""
    console = Console(highlight=False, emoji=False, markup=False)
    if not isinstance(plan, Plan):
        for line in _paragraphs([*_script_lines(plan), *(("note", note) for note in plan.notes)], console.width):
            console.print(line)
        return
    details = details or formulas
    for line in _summary(plan, console.width, LINES):
        console.print(line)
    if compare or details:
        console.print()
    for part in (*(_comparison(plan, console.width) if compare else ()), *(_tables(plan, formulas) if details else ())):
        console.print(part)
    for line in _paragraphs([("note", note) for note in plan.notes], console.width) if details else ():
        console.print(line)


# --- fifteen lines ------------------


def _summary(plan: Plan, width: int, most: int) -> list[Text]:
    """Return the summary, verdict first. Warnings include their override, in full if the others keep a line each."""
    lines = [*_paragraphs([_verdict(plan), *_lines(plan)], width)]
    texts = [w.text + (f": --override {w.override}" if w.override else "") for w in plan.warnings]
    named = [*(("warning", text) for text in texts), *(("faster", _describe_faster(plan)) for _ in plan.advice[:1])]
    cut = False
    for number, (name, text) in enumerate(named, 1):
        more = [*_paragraphs([(name, text)], width)]
        if len(lines) + len(more) + max(0, len(texts) - number) < most:
            lines += more
        elif name == "warning":
            lines += [*_paragraphs([(name, textwrap.shorten(text, width - LABEL, placeholder=" …"))], width)]
            cut = True
    rest = ["warnings in full"] * cut + [_format_count(len(plan.notes), "note"), "tables"]
    return [*lines, *_paragraphs([("more", f"--details: {', '.join(rest)}; --compare: other layouts")], width)]


def _describe_faster(plan: Plan) -> str:
    best = plan.advice[0]
    return f"{best.gain:,.1f} x with " + (best.remark if best.change == OF_ALL else best.change.replace(": ", "="))


def _paragraphs(named: Iterable[Named], width: int) -> Iterator[Text]:
    """Yield each paragraph's lines, with its name on the left; no word is split."""
    for name, text in named:
        first = f"{name:{LABEL}}"
        for line in textwrap.wrap(
            text,
            width,
            initial_indent=first,
            subsequent_indent=" " * LABEL,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [first]:
            shown = Text(line)
            if line.startswith(name):
                shown.stylize(STYLES.get(name, "bold"), 0, len(name))
            yield shown


STYLES = {"fits:": "bold green", "does not fit:": "bold red", "warning": "yellow", "hint:": "cyan", "note": "cyan"}


def _verdict(plan: Plan) -> Named:
    cost, each = plan.cost, "rank" if plan.machine.gpu.name == "cpu" else "GPU"
    need = f"{cost.gpu_gib:,.1f} GiB of {plan.machine.gpu.memory_gib:,.1f} GiB a {each}"
    need += f", {cost.host_gib:,.1f} GiB of host memory a node"
    return ("fits:", need) if cost.fits else ("does not fit:", f" {need}")


def _lines(plan: Plan) -> Iterator[Named]:
    cost, layout, batch, length, gpu = plan.cost, plan.layout, plan.batch, plan.schedule, plan.machine.gpu
    if not cost.fits:
        yield "hint:", cost.remedy
    low, high = format_duration(cost.step_seconds_low), format_duration(cost.step_seconds_high)
    rate = f"{format_rough(cost.tokens_per_second_low)} to {format_rough(cost.tokens_per_second_high)} tokens/s"
    yield "speed", f"{rate}, {low} to {high} a step (estimated, {cost.basis})"
    yield "time", _describe_length(plan)
    yield "layout", f"{layout.name}: {layout.reason}"
    yield "limit", LIMITS[cost.bound]
    yield "machine", describe_machines(layout, plan.machine)
    base = "" if plan.base.path else "; no weights here"
    yield "model", f"{plan.base.name}, {format_count(plan.total)}, trained: {plan.adapter.trainable:,}{base}"
    ranks = _format_count(layout.ranks, "rank" if gpu.name == "cpu" else "GPU")
    text = f"{_format_count(length.global_sequences, 'row')} a step of up to {batch.length:,} tokens: "
    text += f"{batch.micro} x {batch.accumulation} micro-batches x {ranks}"
    yield "batch", f"{text}; {_explain_batch(plan)}" if plan.tried else text
    if plan.chosen:  # each begins with its key and value
        unset = (" ".join(each.split()[:2]).strip(",:").partition(".")[2] for each in plan.chosen)
        yield "not set", f"chosen: {', '.join(unset)}"


LIMITS = {
    "compute": "compute: arithmetic",
    "memory": "memory: elementwise operators, decoding and copying weights",
    "wire": "wire: what the ranks send each other",
    "host": "host: Python and the operators that it dispatches",
    "host link": "host link: weights that come from host memory",
}


def _explain_batch(plan: Plan) -> str:
    """Return why the plan chose this micro-batch."""
    last, free = plan.tried[-1], f"{HEADROOM:.0%} of the GPU free"
    if not plan.tried[0].has_headroom:
        return f"even micro-batches of 1 leave less than {free}"
    text = f"{plan.batch.micro} chosen of {', '.join(str(each.batch.micro) for each in plan.tried)}"
    if last.has_headroom:
        return text
    limit = plan.machine.gpu.memory_gib * (1 - HEADROOM)
    return f"{text}; {last.batch.micro} would need {last.gpu_gib:,.1f} of {limit:,.1f} GiB"


def _describe_length(plan: Plan) -> str:
    s = plan.schedule
    if s.steps is None:
        return f"unknown ({s.rows_reason}): train.max_steps sets it"
    text = f"{format_duration((plan.hours or 0) * 3600)}: {_format_count(s.steps, 'step')}, "
    text += f"{_format_count(s.evaluations, 'evaluation')}, {_format_count(s.checkpoints, 'checkpoint')}"
    return text + (f"; {plan.gpu_hours:,.2f} GPU-hours" if plan.machine.gpu.name != "cpu" else "")


def _format_count(number: int | None, noun: str) -> str:
    return f"an unknown number of {noun}s" if number is None else f"{number:,} {noun}{'s' * (number != 1)}"


def describe_machines(layout: Layout | RankGrid, machine: Machine) -> str:
    """Describe nodes, GPUs and, if there are several, the links between them."""
    text = f"{_format_count(layout.nodes, 'node')} x {layout.gpus_per_node} {machine.gpu.name}"
    text += f"; {machine.network.name} between nodes" if layout.nodes > 1 else ""
    return f"{text}; {machine.link.name} inside" if layout.gpus_per_node > 1 else text


def _script_lines(plan: ScriptPlan) -> Iterator[Named]:
    script = plan.run.script
    yield "script", script.path or f"module {script.module}"
    yield "arguments", shlex.join(script.args) or "none"
    yield "machine", describe_machines(plan.layout, plan.machine)
    yield "ranks", f"{plan.layout.ranks}, each with torchrun's environment"
    yield "folder", plan.run.folder


# --- the comparison ------------------

TERMS = """\
batch: rows of a micro-batch x micro-batches of a step, on each GPU
rows/step: of all GPUs; GiB/GPU: its peak; GB/step: sent by each GPU
tok/s: useful tokens of all GPUs, estimated; GPU-h: GPU-hours of the run
FP8, NF4, MXFP4: the base stays as published, and is decoded as it is used
gathered once: weights stay unsharded through all micro-batches of a step
expert-parallel N: each of N GPUs stores its part of the experts"""


def _comparison(plan: Plan, width: int) -> Iterator[Table | Text]:
    """Yield layouts on the run's own nodes, then the best on other numbers of nodes, then impossible layouts."""
    shown = sorted(drop_dominated(plan.contenders, plan.layout), key=lambda c: -c.cost.tokens_per_second)
    fitting = [c for c in shown if c.cost.fits]
    nodes, sequences = plan.layout.nodes, plan.schedule.global_sequences
    here = f"{_format_count(nodes, 'node')}, {_format_count(sequences, 'sequence')} a step"
    rows = [c for c in (*fitting, *(c for c in shown if not c.cost.fits)) if c.here]
    columns = "layout >batch fits >GiB/GPU >GB/step >s/step >tok/s"
    yield _table(f"Layouts of this run ({here})", columns, [_cells(plan, c) for c in rows])
    others = sorted((c for c in shown if not c.here), key=lambda c: c.layout.ranks)
    if others:
        columns = ">nodes layout >batch >rows/step fits >GiB/GPU >tok/s >GPU-h"
        yield _table("The best layout on other numbers of nodes", columns, [_cells(plan, c) for c in others])
    if hidden := sum(not c.why_not for c in plan.contenders) - len(shown):
        yield Text(f"{hidden} more are slower and no smaller: --json has them all\n")
    yield Text(f"{TERMS}\n")
    yield Text("What makes plan take a row:", style="bold")
    for c in (*rows, *others):
        words = " ".join(
            f"--override {shlex.quote(word)}" for word in list_overrides(c, plan.loaded, published_dtype(plan.base))
        )
        lines = textwrap.wrap(words.replace("--override ", "--override="), width - 6, break_on_hyphens=False)
        name = c.name if c.here else f"{_format_count(c.layout.nodes, 'node')}: {c.name.rpartition(', on ')[0]}"
        yield Text(f" {name}\n   " + " \\\n   ".join(lines))
    yield Text()
    reasons = {why: name for name, why in reversed([*plan.impossible.items()])}
    reasons |= {c.why_not: c.name for c in reversed(plan.contenders) if c.why_not}
    if reasons:
        yield _table("Not possible", "layout why", [([name, why], False) for why, name in reasons.items()])


def _cells(plan: Plan, c: Candidate) -> Row:
    batch, (gib, wire, seconds, rate) = c.cost.batch, _figures(c.cost)
    ways, fits = f"{batch.micro}x{batch.accumulation}", "yes" if c.cost.fits else "no"
    if c.here:
        return [c.name, ways, fits, gib, wire, seconds, rate], is_same_layout(c.layout, plan.layout)
    hours, rows = plan.estimate_gpu_hours(c), batch.micro * batch.accumulation * c.layout.ranks
    gpu_hours = "" if hours is None else f"{hours:,.1f}"
    return [str(c.layout.nodes), c.name.rpartition(", on ")[0], ways, f"{rows:,}", fits, gib, rate, gpu_hours], False


def _figures(cost: Cost) -> list[str]:
    figures = f"{cost.gpu_gib:,.1f} {cost.wire_gb_per_step:,.1f} {cost.step_seconds:,.2f} {cost.tokens_per_second:,.0f}"
    return figures.split()


# --- the tables ------------------


def _tables(plan: Plan, formulas: bool) -> Iterator[Table]:
    hide = () if formulas else ("formula",)
    rows: list[Row]
    if plan.advice:  # estimated by the same formulas as the rest: these gains are right if the rest is
        rows = [([a.change, f"{a.tokens_per_second:,.0f}", f"{a.gain:,.1f} x", a.remark], False) for a in plan.advice]
        table = _table("What would make it faster (useful tokens, estimate)", "change >tok/s >gain how", rows)
        table.columns[0].no_wrap = True
        yield table
    if plan.tried:
        rows = [
            (
                [f"{c.batch.micro}x{c.batch.accumulation}", "yes" if c.has_headroom else "no", *_figures(c)],
                c.batch == plan.batch,
            )
            for c in plan.tried
        ]
        yield _table("Micro-batches, by memory and time", ">batch fits >GiB/GPU >GB/step >s/step >tok/s", rows)
    title = "Memory" if formulas else "Memory at the peak (--explain for the rest)"
    yield _table(title, "phase where what >GiB formula", _memory(plan, formulas), hide)
    yield _table("Time (estimate)", "what >value formula", _time(plan), hide)
    if plan.cost.flows:
        rows = [
            ([f.kind, f.fabric, format_bytes(f.bytes), f"{f.per_step:,}", format_bytes(f.bytes * f.per_step)], False)
            for f in plan.cost.flows
        ]
        for (cells, _), f in zip(rows, plan.cost.flows, strict=True):
            cells += [f"{f.seconds * f.per_step:,.3f}", f.formula]
        columns = "what over >each >times >total >s/step formula"
        yield _table("Network traffic of each GPU in a step", columns, rows, hide)
    rows = [
        ([t.pattern, ", ".join(t.names), t.part, f"{len(t.modules):,}", f"{t.parameters:,}"], False)
        for t in plan.adapter.targets
    ]
    share = f"{plan.adapter.trainable / plan.total:.3%} of the model"
    rows.append((["total", share, "", "", f"{plan.adapter.trainable:,}"], True))
    yield _table("Adapter", "pattern matches part >modules >trainable", rows)
    parts = sorted(plan.by_part.items(), key=lambda item: -item[1])
    rows = [([part, f"{count:,}", f"{count / plan.total:.2%}"], False) for part, count in parts]
    disk = "" if plan.disk_bytes is None else f"{format_bytes(plan.disk_bytes)} on disk"
    rows.append((["total", f"{plan.total:,}", disk], True))
    yield _table("Parameters", "part >parameters >share", rows)


def _table(title: str, columns: str, rows: Iterable[Row], hide: Container[str] = ()) -> Table:
    """Build a table. Columns whose names begin with `>` are right-aligned and never wrapped: no digit is lost."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    table.padding = (0, 1, 0, 0)
    names = columns.split()
    for column in names:
        if column not in hide:
            side: Literal["right", "left"] = "right" if column.startswith(">") else "left"
            table.add_column(column.lstrip(">"), justify=side, no_wrap=side == "right", overflow="fold")
    for cells, is_bold in rows:
        shown = [cell for name, cell in zip(names, cells, strict=True) if name not in hide]
        table.add_row(*shown, style="bold" if is_bold else "")
    return table


def _memory(plan: Plan, formulas: bool) -> Iterator[Row]:
    """Yield the GPU's step row by row, and only totals for other phases unless formulas are requested."""
    for place in ("gpu", "host"):
        for phase in ("load", "step", "save"):
            rows = [row for row in plan.cost.rows if (row.place, row.phase) == (place, phase)]
            if rows:
                yield [phase, place, "total", f"{sum(row.bytes for row in rows) / GIB:,.2f}", ""], True
            for row in rows if formulas or (place, phase) == ("gpu", "step") else ():
                yield ["", "", row.item, f"{row.bytes / GIB:,.2f}", row.formula], False


def _time(plan: Plan) -> Iterator[Row]:
    cost, gpu = plan.cost, plan.machine.gpu
    flops = f"{cost.flops_per_token / 1e9:,.2f} G + {cost.recompute_flops_per_token / 1e9:,.2f} G recomputed"
    how = "forward + activation gradients of active parameters, attention, adapter"
    yield ["FLOPs a token", flops, how], False
    how = f"{plan.batch.tokens:,} tokens, matrix products and attention at the rates of {cost.basis}"
    yield ["compute a micro-batch", f"{cost.compute_seconds:,.3f} s", how], False
    how = "elementwise operators, FP8 decoded, gathered weights copied"
    yield ["memory", f"{cost.memory_seconds:,.3f} s", how], False
    yield ["host", f"{cost.host_seconds:,.3f} s", "operators and modules dispatched, counted from the model"], False
    step = f"{cost.step_seconds:,.2f} s (to {cost.step_seconds_serial:,.2f} s if nothing overlaps)"
    how = "the slowest of GPU (compute + memory), host, network and host link; in brackets their sum"
    yield ["optimizer step", step, how], False
    rate = f"{cost.tokens_per_second:,.0f} tokens/s, MFU {cost.mfu:.2%}"
    yield ["throughput", rate, f"of {gpu.bf16_tflops:,.0f} TFLOP/s peak a GPU"], False
    if plan.seconds is not None:
        how = ", ".join(
            f"{name.replace('_', ' ')} {format_duration(part)}" for name, part in plan.seconds.items() if part
        )
        yield ["the run", f"{plan.hours:,.2f} h, {plan.gpu_hours:,.2f} GPU-hours", how], False


def format_rough(value: float) -> str:
    """Format with two significant digits, which is all that an estimate has."""
    return f"{float(f'{value:.2g}'):,.0f}" if value >= 10 else f"{value:.2g}"


def format_bytes(count: float) -> str:
    """Format bytes in the most readable unit, decimal as for networks and disks."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:,.1f} {unit}"
    return f"{count:,.0f} B"
