"""The plan as text and tables, for people: the verdict first, details after."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from windlass.hardware import GIB, Machine
from windlass.plan import Plan
from windlass.plan.choose import HEADROOM, Contender, same, undominated
from windlass.plan.layout import Layout
from windlass.plan.script import AnyPlan, ScriptPlan, Spread

WIDE = 100  # columns of a terminal from which on every column of the comparison is shown


def show(plan: AnyPlan, *, formulas: bool = False, compare: bool = False) -> None:
    """Print it to stdout. `formulas`: every row of every table, with the formula behind it."""
    console = Console(highlight=False, emoji=False, markup=False)
    if isinstance(plan, ScriptPlan):
        console.print(_pairs(_script_lines(plan)))
    else:
        console.print(_verdict(plan))
        console.print(_pairs(_header_lines(plan)))
        console.print()
        for table in _tables(plan, formulas, compare, console.width):
            console.print(table)
    for note in plan.notes:
        console.print(Text("note: ", style="cyan") + Text(note))


def _tables(plan: Plan, formulas: bool, compare: bool, width: int) -> Iterator[Table | Text]:
    if plan.advice:
        yield _advice(plan)
    if compare:
        yield from _comparison(plan, width)
    if plan.tried:
        yield _tried(plan)
    yield _memory(plan, formulas)
    yield _time(plan, formulas)
    if plan.cost.flows:
        yield _traffic(plan, formulas)
    yield _adapter(plan)
    yield _parameters(plan)


def _table(title: str, *columns: str) -> Table:
    """Column names that begin with `>` are right-aligned and never wrapped: no digit is lost."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    table.padding = (0, 1, 0, 0)
    for column in columns:
        number = column.startswith(">")
        justify = "right" if number else "left"
        table.add_column(column.lstrip(">"), justify=justify, no_wrap=number, overflow="fold")  # type: ignore[arg-type]
    return table


def _pairs(lines: Iterable[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(overflow="fold")
    for name, value in lines:
        grid.add_row(Text(name, style="bold"), value)
    return grid


def _verdict(plan: Plan) -> Text:
    cost, each = plan.cost, "rank" if plan.machine.gpu.name == "cpu" else "GPU"
    need = f"{cost.gpu_gib:,.1f} GiB of {plan.machine.gpu.memory_gib:,.1f} GiB a {each}"
    need += f", {cost.host_gib:,.1f} GiB of host memory a node"
    if cost.fits:
        return Text("fits: ", style="bold green") + Text(need)
    return Text("does not fit: ", style="bold red") + Text(f"{need}\nhint: {cost.remedy}")


def _header_lines(plan: Plan) -> Iterator[tuple[str, str]]:
    cost, layout, batch, length = plan.cost, plan.layout, plan.batch, plan.schedule
    speed = f"{cost.step_seconds:,.2f} s a step, {cost.tokens_per_second:,.0f} tokens/s"
    if plan.hours is not None:
        speed += f"; {length.steps:,} steps in {plan.hours:,.2f} h, {plan.gpu_hours:,.2f} GPU-hours"
    yield "speed", f"{speed} (estimate)"
    yield "layout", f"{layout.name}: {layout.reason}"
    yield "machine", machines(layout, plan.machine)
    yield "model", f"{plan.base.name}: {plan.base.family.causal_lm}, {plan.total:,} parameters"
    share = plan.adapter.trainable / plan.total
    yield "adapter", f"{plan.adapter.trainable:,} trainable parameters, {share:.3%} of the model"
    yield (
        "batch",
        f"{batch.micro} x {layout.ranks} rank{'s' * (layout.ranks > 1)} x {batch.accumulation} accumulated = "
        f"{length.global_sequences:,} sequences, {length.tokens_per_step:,} tokens a step when rows are full",
    )
    if plan.tried:
        yield "", _batch_reason(plan)
    yield "length", _length(plan)


def _batch_reason(plan: Plan) -> str:
    """Why this micro-batch, if the plan chose it."""
    tried, last, gpu_gib = plan.tried, plan.tried[-1], plan.machine.gpu.memory_gib * (1 - HEADROOM)
    if not tried[0].fits:
        return f"even micro-batches of 1 leave less than {HEADROOM:.0%} of the GPU free"
    sizes = ", ".join(str(trial.batch.micro) for trial in tried)
    text = f"micro-batches of {plan.batch.micro} chosen: the fastest of {sizes}"
    if last.fits:
        return f"{text}, which all leave {HEADROOM:.0%} of the GPU free"
    need = f"{last.batch.micro} would need {last.cost.gpu_gib:,.1f} of {gpu_gib:,.1f} GiB"
    return f"{text} that leave {HEADROOM:.0%} of the GPU free; {need}"


def _length(plan: Plan) -> str:
    s = plan.schedule
    if s.steps is None:
        return f"unknown: {s.rows_reason}"
    rows = f"{s.rows:,} rows ({s.rows_reason}), " if s.rows is not None else ""
    text = f"{rows}{_count(s.steps, 'step')}, {s.warmup_steps:,} of warm-up, {_count(s.evaluations, 'evaluation')}"
    if s.checkpoints:
        text += f", {_count(s.checkpoints, 'checkpoint')} of {size(s.checkpoint_bytes)}"
    return text + (f" ({s.checkpoints_kept} kept)" if s.checkpoints_kept != s.checkpoints else "")


def _count(number: int | None, noun: str) -> str:
    return f"an unknown number of {noun}s" if number is None else f"{number:,} {noun}{'s' * (number != 1)}"


def machines(layout: Layout | Spread, machine: Machine) -> str:
    """How many of what, and the links between the GPUs, if there are several."""
    text = f"{_count(layout.nodes, 'node')} x {layout.gpus_per_node} {machine.gpu.name}"
    text += f"; {machine.network.name} between nodes" if layout.nodes > 1 else ""
    return f"{text}; {machine.link.name} inside" if layout.gpus_per_node > 1 else text


def _advice(plan: Plan) -> Table:
    """By the same arithmetic as the rest: what is gained is what this table says, if the rest is right."""
    table = _table("What would make it faster (useful tokens, estimate)", "change", ">tok/s", ">gain", "how")
    table.columns[0].no_wrap = True
    for advice in plan.advice:
        table.add_row(advice.change, f"{advice.tokens_per_second:,.0f}", f"{advice.gain:,.1f} x", advice.remark)
    return table


def _comparison(plan: Plan, width: int) -> Iterator[Table | Text]:
    """The run's own nodes, then the best layout of each other number of nodes, then what is impossible."""
    rows = undominated(plan.contenders, plan.layout)
    here = [c for c in rows if c.candidate.here]
    nodes = _count(plan.layout.nodes, "node")
    yield _contenders(plan, f"The same run under other layouts, best on top ({nodes})", here, width)
    others = sorted((c for c in rows if not c.candidate.here), key=lambda c: c.ranks)
    if others:
        yield _contenders(plan, "The best layout on other numbers of nodes", others, width)
    hidden = sum(c.candidate.possible and c.cost is not None for c in plan.contenders) - len(rows)
    if hidden:
        yield Text(f"{hidden} more are slower and no smaller: --json has them all\n")
    reasons = {c.candidate.why_not: c.name for c in reversed(plan.contenders) if c.candidate.here}
    reasons.pop("", None)
    if reasons:
        table = _table("Not possible", "layout", "why")
        for why, name in reasons.items():
            table.add_row(name, why)
        yield table


def _contenders(plan: Plan, title: str, rows: Iterable[Contender], width: int) -> Table:
    columns = ["layout", ">batch", "fits", ">GiB/GPU", ">GB/step", ">s/step", ">tok/s", ">GPU-h"]
    if width < WIDE:
        columns.remove(">GB/step")  # `--json` has it
    table = _table(title, *columns)
    for c in rows:
        assert c.cost
        assert c.layout
        gpus = "" if c.candidate.here else f"{_count(c.layout.nodes, 'node')}: "
        cells = {
            "layout": gpus + c.candidate.title,
            ">batch": f"{c.batch.micro}x{c.batch.accumulation}",
            "fits": "yes" if c.cost.fits else "no",
            ">GiB/GPU": f"{c.cost.gpu_gib:,.1f}",
            ">GB/step": f"{c.cost.wire_gb_per_step:,.1f}",
            ">s/step": f"{c.cost.step_seconds:,.2f}",
            ">tok/s": f"{c.cost.tokens_per_second:,.0f}",
            ">GPU-h": "" if c.gpu_hours is None else f"{c.gpu_hours:,.1f}",
        }
        table.add_row(*(cells[name] for name in columns), style="bold" if same(c.layout, plan.layout) else "")
    return table


def _tried(plan: Plan) -> Table:
    table = _table(
        "Micro-batches, by memory and time", ">sequences x micro-batches", "fits", ">GiB", ">s/step", ">tok/s"
    )
    for trial in plan.tried:
        cost, batch = trial.cost, trial.batch
        table.add_row(
            f"{batch.micro} x {batch.accumulation}",
            "yes" if trial.fits else "no",
            f"{cost.gpu_gib:,.1f}",
            f"{cost.step_seconds:,.2f}",
            f"{cost.tokens_per_second:,.0f}",
            style="bold" if batch == plan.batch else "",
        )
    return table


def _memory(plan: Plan, formulas: bool) -> Table:
    """The GPU's fullest phase row by row; of the others the totals alone, unless formulas are asked for."""
    title = "Memory" if formulas else "Memory at the peak (--explain for the rest)"
    table = _table(title, "phase", "where", "what", ">GiB", *(("formula",) if formulas else ()))
    groups = {(row.place, row.phase) for row in plan.cost.rows}
    order = {name: number for number, name in enumerate(("gpu", "host", "load", "step", "save"))}
    for place, phase in sorted(groups, key=lambda group: [order[name] for name in group]):
        rows = [row for row in plan.cost.rows if (row.place, row.phase) == (place, phase)]
        total = f"{sum(row.bytes for row in rows) / GIB:,.2f}"
        table.add_row(phase, place, "total", total, *(("",) if formulas else ()), style="bold")
        for row in rows if formulas or (place, phase) == ("gpu", "step") else ():
            table.add_row("", "", row.item, f"{row.bytes / GIB:,.2f}", *((row.formula,) if formulas else ()))
    return table


def _time(plan: Plan, formulas: bool) -> Table:
    cost, batch, gpu = plan.cost, plan.batch, plan.machine.gpu
    flops = f"{cost.flops_per_token / 1e9:,.2f} G + {cost.recompute_flops_per_token / 1e9:,.2f} G recomputed"
    step = f"{cost.step_seconds:,.2f} s (to {cost.step_seconds_serial:,.2f} s if nothing overlaps)"
    rows = [
        ("FLOPs a token", flops, "forward + activation gradients of active parameters, attention, adapter"),
        (
            "compute a micro-batch",
            f"{cost.compute_seconds:,.3f} s",
            f"{batch.tokens:,} tokens at {gpu.achieved_tflops:,.0f} TFLOP/s sustained",
        ),
        ("optimizer step", step, "the slowest of compute, memory, network and host link; in brackets their sum"),
        (
            "throughput",
            f"{cost.tokens_per_second:,.0f} tokens/s, MFU {cost.mfu:.2%}",
            f"of {gpu.bf16_tflops:,.0f} TFLOP/s peak a GPU",
        ),
    ]
    if plan.hours is not None:
        run = f"{plan.hours:,.2f} h, {plan.gpu_hours:,.2f} GPU-hours"
        rows.append(("the run", run, "steps x seconds a step; without loading, evaluation and saving"))
    table = _table("Time (estimate)", "what", ">value", *(("how",) if formulas else ()))
    for what, value, how in rows:
        table.add_row(what, value, *((how,) if formulas else ()))
    return table


def _traffic(plan: Plan, formulas: bool) -> Table:
    columns = ("what", "over", ">each", ">times", ">a step", ">s a step")
    table = _table("Network traffic of each GPU in a step", *columns, *(("formula",) if formulas else ()))
    for flow in plan.cost.flows:
        table.add_row(
            flow.kind,
            flow.fabric,
            size(flow.bytes),
            f"{flow.per_step:,}",
            size(flow.bytes * flow.per_step),
            f"{flow.seconds * flow.per_step:,.3f}",
            *((flow.formula,) if formulas else ()),
        )
    return table


def _adapter(plan: Plan) -> Table:
    table = _table("Adapter", "pattern", "matches", "part", ">modules", ">trainable")
    for target in plan.adapter.targets:
        counts = f"{len(target.modules):,}", f"{target.parameters:,}"
        table.add_row(target.pattern, ", ".join(target.names), target.part, *counts)
    share = plan.adapter.trainable / plan.total
    table.add_row("total", f"{share:.3%} of the model", "", "", f"{plan.adapter.trainable:,}", style="bold")
    return table


def _parameters(plan: Plan) -> Table:
    table = _table("Parameters", "part", ">parameters", ">share")
    for part, count in sorted(plan.by_part.items(), key=lambda item: -item[1]):
        table.add_row(part, f"{count:,}", f"{count / plan.total:.2%}")
    disk = "" if plan.disk_bytes is None else f"{size(plan.disk_bytes)} on disk"
    table.add_row("total", f"{plan.total:,}", disk, style="bold")
    return table


def _script_lines(plan: ScriptPlan) -> Iterator[tuple[str, str]]:
    script = plan.loaded.run.script
    yield "script", script.path or f"module {script.module}"
    yield "arguments", shlex.join(script.args) or "none"
    yield "machine", machines(plan.layout, plan.machine)
    yield "ranks", f"{plan.layout.ranks}, each with torchrun's environment"
    yield "folder", plan.loaded.run.folder


def size(count: float) -> str:
    """Bytes in the unit that reads best, decimal as networks and disks are sold."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:,.1f} {unit}"
    return f"{count:,.0f} B"
