"""The plan as tables, for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from windlass.hardware import GIB, Machine
from windlass.plan import Plan
from windlass.plan.compare import HEADROOM, Contender, readable, same
from windlass.plan.cost import Row
from windlass.plan.layout import Layout
from windlass.plan.script import Spread


def show(plan: Plan, *, formulas: bool = False, compare: bool = False) -> None:
    """Print it all to stdout, the verdict last, where the eye rests."""
    console = Console(highlight=False, emoji=False, markup=False)
    console.print(_header(plan))
    for table in _tables(plan, formulas, compare):
        console.print(table)
    for note in plan.notes:
        console.print(Text("note: ", style="cyan") + Text(note))
    console.print()
    console.print(_verdict(plan))


def _tables(plan: Plan, formulas: bool, compare: bool) -> Iterable[Table]:
    yield _parameters(plan)
    yield _adapter(plan)
    yield _memory(plan, formulas)
    if plan.cost.flows:
        yield _traffic(plan, formulas)
    yield _time(plan, formulas)
    if plan.tried:
        yield _tried(plan)
    if compare:
        yield from _contenders(plan, plan.contenders)
    if plan.advice:
        yield _advice(plan)


def _table(title: str, *columns: str) -> Table:
    """Column names that begin with `>` are right-aligned."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold")
    return table


def _header(plan: Plan) -> Table:
    layout, batch, length = plan.layout, plan.batch, plan.schedule
    lines = [
        ("model", f"{plan.base.name}: {plan.base.family.causal_lm}"),
        ("machine", machines(layout, plan.machine)),
        ("layout", f"{layout.name}: {layout.reason}"),
        (
            "batch",
            f"{batch.micro} x {layout.ranks} ranks x {batch.accumulation} accumulated = {length.global_sequences}"
            f" sequences, {length.tokens_per_step:,} tokens a step when rows are full",
        ),
        *([("", _batch_reason(plan))] if plan.tried else []),
        ("length", _length(plan)),
    ]
    grid = Table.grid(padding=(0, 2))
    for name, value in lines:
        grid.add_row(Text(name, style="bold"), value)
    return grid


def _batch_reason(plan: Plan) -> str:
    """Why this micro-batch, where the plan chose it."""
    sizes = ", ".join(str(trial.batch.micro) for trial in plan.tried)
    last = plan.tried[-1]
    if plan.tried[0].fits and not last.fits:
        room = plan.machine.gpu.memory_gib * (1 - HEADROOM)
        return (
            f"{plan.batch.micro} a pass chosen: the fastest of {sizes} that leave {HEADROOM:.0%} of the GPU free;"
            f" {last.batch.micro} would need {last.cost.gpu_gib:,.1f} of {room:,.1f} GiB"
        )
    if plan.tried[0].fits:
        return (
            f"{plan.batch.micro} a pass chosen: the fastest of {sizes}, which all leave {HEADROOM:.0%} of the GPU free"
        )
    return f"even 1 sequence per pass leaves less than {HEADROOM:.0%} of the GPU free"


def _tried(plan: Plan) -> Table:
    table = _table("Micro-batches, by memory and time", ">sequences x passes", "fits", ">GiB", ">s/step", ">tok/s")
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


def _advice(plan: Plan) -> Table:
    """By the same arithmetic as the rest: what is gained is what this table says, if the rest is right."""
    table = _table("What would make it faster (useful tokens, estimate)", "change", ">tok/s", ">gain", "how")
    for advice in plan.advice:
        table.add_row(advice.change, f"{advice.tokens_per_second:,.0f}", f"{advice.gain:,.1f} x", advice.remark)
    return table


def machines(layout: Layout | Spread, machine: Machine) -> str:
    """How many of what, and what lies between the GPUs, where there is anything between."""
    said = f"{layout.nodes} node{'s' * (layout.nodes != 1)} x {layout.gpus_per_node} {machine.gpu.name}"
    said += f"; {machine.network.name} between nodes" if layout.nodes > 1 else ""
    return f"{said}; {machine.link.name} inside" if layout.gpus_per_node > 1 else said


def _length(plan: Plan) -> str:
    s = plan.schedule
    if s.steps is None:
        return f"unknown: {s.rows_reason}"
    rows = f"{s.rows:,} rows ({s.rows_reason}), " if s.rows is not None else ""
    saved = f", {s.checkpoints} checkpoints of {size(s.checkpoint_bytes)}" if s.checkpoints else ""
    kept = f" ({s.checkpoints_kept} kept)" if s.checkpoints_kept != s.checkpoints else ""
    return f"{rows}{s.steps:,} steps, {s.warmup_steps:,} of warm-up, {s.evaluations} evaluations{saved}{kept}"


def _parameters(plan: Plan) -> Table:
    table = _table("Parameters", "part", ">parameters", ">share")
    total = plan.total
    for part, count in sorted(plan.by_part.items(), key=lambda item: -item[1]):
        table.add_row(part, f"{count:,}", f"{count / total:.2%}")
    disk = "" if plan.disk_bytes is None else f"{size(plan.disk_bytes)} on disk"
    table.add_row("total", f"{total:,}", disk, style="bold")
    return table


def _adapter(plan: Plan) -> Table:
    table = _table("Adapter", "pattern", "matches", "part", ">modules", ">trainable")
    for target in plan.adapter.targets:
        table.add_row(
            target.pattern, ", ".join(target.names), target.part, f"{len(target.modules):,}", f"{target.parameters:,}"
        )
    share = plan.adapter.trainable / plan.total
    table.add_row("total", f"{share:.3%} of the model", "", "", f"{plan.adapter.trainable:,}", style="bold")
    return table


def _memory(plan: Plan, formulas: bool) -> Table:
    columns = ("phase", "where", "what", ">GiB") + (("formula",) if formulas else ())
    table = _table("Memory", *columns)
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in plan.cost.rows:
        groups.setdefault((row.place, row.phase), []).append(row)
    for (place, phase), rows in groups.items():
        total = sum(row.bytes for row in rows) / GIB
        table.add_row(phase, place, "total", f"{total:,.2f}", *(("",) if formulas else ()), style="bold")
        for row in rows:
            table.add_row("", "", row.item, f"{row.bytes / GIB:,.2f}", *((row.formula,) if formulas else ()))
    return table


def _traffic(plan: Plan, formulas: bool) -> Table:
    columns = ("what", "over", ">each", ">times a step", ">a step", ">seconds a step")
    table = _table("Traffic, sent by each GPU", *columns, *(("formula",) if formulas else ()))
    for flow in plan.cost.flows:
        table.add_row(
            flow.kind,
            flow.fabric,
            size(flow.bytes),
            str(flow.per_step),
            size(flow.bytes * flow.per_step),
            f"{flow.seconds * flow.per_step:,.3f}",
            *((flow.formula,) if formulas else ()),
        )
    return table


def _time(plan: Plan, formulas: bool) -> Table:
    cost, work = plan.cost, plan.batch
    table = _table("Time (estimate)", "what", ">value", *(("how",) if formulas else ()))
    tflops = plan.machine.gpu.achieved_tflops
    rows = [
        (
            "FLOPs a token",
            f"{cost.flops_per_token / 1e9:,.2f} G + {cost.recompute_flops_per_token / 1e9:,.2f} G recomputed",
            "forward + activation gradients of active parameters, attention, adapter",
        ),
        (
            "compute a micro-batch",
            f"{cost.compute_seconds:,.3f} s",
            f"{work.micro * work.length:,} tokens at {tflops:,.0f} TFLOP/s sustained",
        ),
        (
            "optimizer step",
            f"{cost.step_seconds:,.2f} s (to {cost.step_seconds_serial:,.2f} s if nothing overlaps)",
            "the slowest of compute, memory, wire and host link; the bracket is their sum",
        ),
        (
            "throughput",
            f"{cost.tokens_per_second:,.0f} tokens/s, MFU {cost.mfu:.2%}",
            f"of {plan.machine.gpu.bf16_tflops:,.0f} TFLOP/s peak a GPU",
        ),
    ]
    if plan.hours is not None:
        rows.append(
            (
                "the run",
                f"{plan.hours:,.2f} h, {plan.gpu_hours:,.2f} GPU-hours",
                "steps x seconds a step; loading, evaluation and saving apart",
            )
        )
    for what, value, how in rows:
        table.add_row(what, value, *((how,) if formulas else ()))
    return table


def _contenders(plan: Plan, contenders: Sequence[Contender]) -> Iterable[Table]:
    """The comparison; below it, why some of the layouts can't be."""
    rows = readable(contenders, plan.layout)
    left = sum(c.cost is not None for c in contenders) - len(rows)
    table = _table(
        "The same run under other layouts, best on top",
        *("layout", ">on", ">batch", "fits", ">GiB", ">GB/step", ">s/step", ">tok/s", ">GPU-h"),
    )
    table.columns[0].min_width = 24
    table.padding = (0, 1, 0, 0)
    for column in table.columns[1:]:
        column.no_wrap = True
    for c in rows:
        if c.cost is not None and c.layout is not None:
            hours = "" if c.gpu_hours is None else f"{c.gpu_hours:,.1f}"
            figures = (f"{c.cost.gpu_gib:,.1f}", f"{c.cost.wire_gb_per_step:,.1f}", f"{c.cost.step_seconds:,.2f}")
            fits = "barred" if not c.candidate.possible else "yes" if c.cost.fits else "no"
            place, batch = f"{c.layout.nodes}x{c.layout.gpus_per_node}", f"{c.batch.micro}x{c.batch.accumulation}"
            rate = f"{c.cost.tokens_per_second:,.0f}"
            title = c.name.replace(f", on {c.layout.nodes} node{'s' * (c.layout.nodes > 1)}", "")
            table.add_row(title, place, batch, fits, *figures, rate, hours, style=_emphasis(plan, c.layout))
    if left:
        table.caption = f"{left} more are slower and no smaller, or of other numbers of nodes: --json has them all"
        table.caption_justify = "left"
    yield table
    without = {c.candidate.why_not: c for c in reversed(contenders) if not c.candidate.possible and c.candidate.here}
    if without:
        reasons = _table("Not possible", "layout", "why")
        reasons.columns[0].no_wrap = True
        for why, c in without.items():
            reasons.add_row(c.name, why)
        yield reasons


def _emphasis(plan: Plan, layout: Layout) -> str:
    """The row of the run as it is planned stands out."""
    return "bold" if same(layout, plan.layout) else ""


def _verdict(plan: Plan) -> Text:
    cost, each = plan.cost, "rank" if plan.machine.gpu.name == "cpu" else "GPU"
    place = (
        f"{cost.gpu_gib:,.1f} GiB of {plan.machine.gpu.memory_gib:,.1f} GiB a {each},"
        f" {cost.host_gib:,.1f} GiB of host memory a node"
    )
    if cost.fits:
        return Text("fits: ", style="bold green") + Text(place)
    return Text("does not fit: ", style="bold red") + Text(f"{place}\n\nhint: {cost.remedy}")


def size(count: float) -> str:
    """Bytes in the unit that reads best, decimal as networks and disks are sold."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:,.1f} {unit}"
    return f"{count:,.0f} B"
