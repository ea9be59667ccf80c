"""The plan as text and tables, for people: the verdict first, details after."""

from __future__ import annotations

import shlex
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from windlass.hardware import GIB, Machine
from windlass.plan import Plan
from windlass.plan.choose import Contender, same, undominated
from windlass.plan.cost import HEADROOM, Cost
from windlass.plan.layout import Layout
from windlass.plan.script import AnyPlan, ScriptPlan, Spread

WIDE = 100  # columns of a terminal from which on every column of the comparison is shown


Row = tuple[list[str], bool]  # cells, and whether they are bold


def show(plan: AnyPlan, *, formulas: bool = False, compare: bool = False) -> None:
    """Print it to stdout. `formulas`: every row of every table, with the formula behind it."""
    console = Console(highlight=False, emoji=False, markup=False)
    if isinstance(plan, Plan):
        console.print(_verdict(plan))
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(overflow="fold")
    for name, value in _header_lines(plan) if isinstance(plan, Plan) else _script_lines(plan):
        grid.add_row(Text(name, style="bold"), value)
    console.print(grid)
    if isinstance(plan, Plan):
        console.print()
        for table in _tables(plan, formulas, compare, console.width):
            console.print(table)
    for note in plan.notes:
        console.print(Text("note: ", style="cyan") + Text(note))


def _tables(plan: Plan, formulas: bool, compare: bool, width: int) -> Iterator[Table | Text]:
    hide = () if formulas else ("formula",)
    rows: list[Row]
    if plan.advice:  # by the same arithmetic as the rest: what is gained is what this table says, if the rest is right
        rows = [([a.change, f"{a.tokens_per_second:,.0f}", f"{a.gain:,.1f} x", a.remark], False) for a in plan.advice]
        table = _table("What would make it faster (useful tokens, estimate)", "change >tok/s >gain how", rows)
        table.columns[0].no_wrap = True
        yield table
    if compare:
        yield from _comparison(plan, width)
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
            ([f.kind, f.fabric, size(f.bytes), f"{f.per_step:,}", size(f.bytes * f.per_step)], False)
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
    disk = "" if plan.disk_bytes is None else f"{size(plan.disk_bytes)} on disk"
    rows.append((["total", f"{plan.total:,}", disk], True))
    yield _table("Parameters", "part >parameters >share", rows)


def _table(title: str, columns: str, rows: Iterable[Row], hide: Container[str] = ()) -> Table:
    """Column names that begin with `>` are right-aligned and never wrapped: no digit is lost."""
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


def _figures(cost: Cost) -> list[str]:
    figures = f"{cost.gpu_gib:,.1f} {cost.wire_gb_per_step:,.1f} {cost.step_seconds:,.2f} {cost.tokens_per_second:,.0f}"
    return figures.split()


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
    last, free = plan.tried[-1], f"{HEADROOM:.0%} of the GPU free"
    if not plan.tried[0].has_headroom:
        return f"even micro-batches of 1 leave less than {free}"
    sizes = ", ".join(str(each.batch.micro) for each in plan.tried)
    text = f"micro-batches of {plan.batch.micro} chosen: the fastest of {sizes}"
    if last.has_headroom:
        return f"{text}, which all leave {free}"
    limit = plan.machine.gpu.memory_gib * (1 - HEADROOM)
    return f"{text} that leave {free}; {last.batch.micro} would need {last.gpu_gib:,.1f} of {limit:,.1f} GiB"


def _length(plan: Plan) -> str:
    s = plan.schedule
    if s.steps is None:
        return f"unknown ({s.rows_reason}): train.max_steps sets it"
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


def _comparison(plan: Plan, width: int) -> Iterator[Table | Text]:
    """The run's own nodes, then the best layout of each other number of nodes, then what is impossible."""
    shown = undominated(plan.contenders, plan.layout)
    here = [c for c in shown if c.here]
    nodes = _count(plan.layout.nodes, "node")
    yield _contenders(plan, f"The same run under other layouts, best on top ({nodes})", here, width)
    if others := sorted((c for c in shown if not c.here), key=lambda c: c.layout.ranks):
        yield _contenders(plan, "The best layout on other numbers of nodes", others, width)
    if hidden := sum(not c.why_not for c in plan.contenders) - len(shown):
        yield Text(f"{hidden} more are slower and no smaller: --json has them all\n")
    reasons = {why: name for name, why in reversed(plan.impossible.items())}
    reasons |= {c.why_not: c.name for c in reversed(plan.contenders) if c.why_not}
    if reasons:
        yield _table("Not possible", "layout why", [([name, why], False) for why, name in reasons.items()])


def _contenders(plan: Plan, title: str, shown: Sequence[Contender], width: int) -> Table:
    rows: list[Row] = []
    for c in shown:
        name = c.name if c.here else f"{_count(c.layout.nodes, 'node')}: {c.name.rpartition(', on ')[0]}"
        batch, hours = f"{c.cost.batch.micro}x{c.cost.batch.accumulation}", plan.gpu_hours_of(c)
        cells = [
            name,
            batch,
            "yes" if c.cost.fits else "no",
            *_figures(c.cost),
            "" if hours is None else f"{hours:,.1f}",
        ]
        rows.append((cells, same(c.layout, plan.layout)))
    columns = "layout >batch fits >GiB/GPU >GB/step >s/step >tok/s >GPU-h"
    return _table(title, columns, rows, (">GB/step",) if width < WIDE else ())  # `--json` has it


def _memory(plan: Plan, formulas: bool) -> Iterator[Row]:
    """The GPU's fullest phase row by row; of the others the totals alone, unless formulas are asked for."""
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
    how = f"{plan.batch.tokens:,} tokens at {gpu.achieved_tflops:,.0f} TFLOP/s sustained"
    yield ["compute a micro-batch", f"{cost.compute_seconds:,.3f} s", how], False
    step = f"{cost.step_seconds:,.2f} s (to {cost.step_seconds_serial:,.2f} s if nothing overlaps)"
    how = "the slowest of compute, memory, network and host link; in brackets their sum"
    yield ["optimizer step", step, how], False
    rate = f"{cost.tokens_per_second:,.0f} tokens/s, MFU {cost.mfu:.2%}"
    yield ["throughput", rate, f"of {gpu.bf16_tflops:,.0f} TFLOP/s peak a GPU"], False
    if plan.hours is not None:
        run, how = f"{plan.hours:,.2f} h, {plan.gpu_hours:,.2f} GPU-hours", "without loading, evaluation and saving"
        yield ["the run", run, f"steps x seconds a step; {how}"], False


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
