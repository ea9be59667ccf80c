"""Print a plan as text: a summary of fifteen lines and, on request, detailed tables."""

import math
import shlex
import textwrap
from collections.abc import Container, Iterable, Iterator
from typing import Final, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from windlass.hardware import GIB, Machine
from windlass.model.quantization import published_dtype
from windlass.observe.format import format_count, format_duration, format_plural
from windlass.plan.advice import OF_ALL
from windlass.plan.cost import HEADROOM, BatchSize, Cost
from windlass.plan.layout import Layout
from windlass.plan.longest import find_planned_longest_row
from windlass.plan.plan import Plan
from windlass.plan.rows import NO_DATA, Schedule
from windlass.plan.script import AnyPlan, ScriptPlan
from windlass.plan.search import Candidate, drop_dominated, is_same_layout, list_overrides

LINES = 15  # of the plan without options, at 80 columns
MILLIONS = 10  # million tokens, whose time is shown if the run's length is unknown
LABEL = 9  # columns of the names on the left

TableRow = tuple[list[str], bool]  # cells, and whether they are bold
Named = tuple[str, str]  # a paragraph's label and text


def print_plan(plan: AnyPlan, *, details: bool = False, formulas: bool = False, compare: bool = False) -> None:
    """Print a plan to stdout. `details`: tables; `formulas`: all rows with their formula; `compare`: other layouts."""
    console = Console(highlight=False, emoji=False, markup=False)
    for part in _list_parts(plan, console.width, details or formulas, formulas, compare):
        console.print(part)


def _list_parts(plan: AnyPlan, width: int, details: bool, formulas: bool, compare: bool) -> Iterator[Table | Text]:
    notes = [("note", note) for note in plan.notes]
    if not isinstance(plan, Plan):
        yield from _paragraphs([*_script_lines(plan), *notes], width)
        return
    yield from _summary(plan, width, detailed=details)
    if compare or details or plan.trials:
        yield Text()
    if plan.trials:
        yield _list_trials(plan)
        if any(len(group.names) > 1 for group in plan.groups):
            yield _list_groups(plan)
    if compare:
        yield from _comparison(plan, width)
    if details:
        yield from _tables(plan, formulas)
        if not plan.trials:
            row = find_planned_longest_row(plan)
            longest = f"{row.longest:,} tokens{' recomputed' if row.recomputed_tokens > row.tokens else ''}"
            notes.insert(0, ("longest", f"row that fits: {'; '.join([longest, *row.longer])}"))
        yield from _paragraphs(notes, width)


def _summary(plan: Plan, width: int, *, detailed: bool) -> list[Text]:
    """Return the summary, verdict first. Warnings include their override, in full if the others keep a line each."""
    lines = [*_paragraphs(_lines(plan), width)]
    paragraphs = [
        ("warning", f"{caution.text}: --override {caution.override}" if caution.override else caution.text)
        for caution in plan.warnings
    ]
    for best in plan.advice[:1]:
        change = best.remark if best.change == OF_ALL else best.change.replace(": ", "=")
        paragraphs.append(("faster", f"{best.gain:,.1f} x with {change}"))
    details = f"{format_plural(len(plan.notes), 'note')}, tables"
    for number, (name, text) in enumerate(paragraphs, 1):
        more = [*_paragraphs([(name, text)], width)]
        if len(lines) + len(more) + len(paragraphs) - number < LINES:
            lines += more
        elif name == "warning":
            lines += _paragraphs([(name, textwrap.shorten(text, width - LABEL, placeholder=" …"))], width)
            details = f"warnings in full, {format_plural(len(plan.notes), 'note')}, tables"
    further = "--explain: every row, with its formula" if detailed else f"--details: {details}"
    return [*lines, *_paragraphs([("more", f"{further}; --compare: other layouts")], width)]


def _paragraphs(named: Iterable[Named], width: int) -> Iterator[Text]:
    """Yield each paragraph's lines, with its name on the left; no word is split."""
    for name, text in named:
        first = f"{name:{LABEL}}"
        lines = textwrap.wrap(
            text,
            width,
            initial_indent=first,
            subsequent_indent=" " * LABEL,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in lines or [first]:
            shown = Text(line)
            if line.startswith(name):
                shown.stylize(STYLES.get(name, "bold"), 0, len(name))
            yield shown


NARROW: Final = 72  # columns that the comparison needs in full
STYLES = {"fits": "bold green", "does not fit": "bold red", "warning": "yellow", "hint": "cyan", "note": "cyan"}


def _gpu_or_rank(plan: Plan) -> str:
    return "rank" if plan.machine.gpu.name == "cpu" else "GPU"


def _lines(plan: Plan) -> Iterator[Named]:
    cost = plan.cost
    layout = plan.layout
    batch = plan.batch
    need = f"{cost.gpu_gib:,.1f} GiB of {plan.machine.gpu.memory_gib:,.1f} GiB a {_gpu_or_rank(plan)}"
    need += f", {cost.host_gib:,.1f} GiB of host memory a node"
    yield ("fits", need) if cost.fits else ("does not fit", f" {need}")
    if not cost.fits:
        yield "hint", cost.remedy
    rate = f"{format_rough(cost.tokens_per_second_low)} to {format_rough(cost.tokens_per_second_high)} tokens/s"
    step = f"{format_duration(cost.step_seconds_low)} to {format_duration(cost.step_seconds_high)} a step"
    yield "speed", f"{rate}, {step} (estimated, {cost.basis})"
    yield "time", _describe_length(plan)
    if plan.trials:
        largest = max(plan.trials, key=lambda trial: (trial.cost.gpu_gib, trial.adapter.trainable))
        if plan.halvings:
            yield "halving", _describe_halvings(plan)
        yield "figures", f"of the largest trial, {largest.loaded.trial.name if largest.loaded.trial else ''}"
    if plan.run.objective.has_reference:
        text = "of an unknown number of pairs,"
        if plan.seconds is not None and plan.schedule.rows is not None:
            pairs = format_plural(plan.schedule.rows + (plan.evaluated or 0), "pair")
            text = f"{pairs}, {format_duration(plan.seconds['reference'])}"
        yield "reference", f"  {text} before step 1"
    yield "layout", f"{layout.name}: {layout.reason}"
    yield "limit", LIMITS[cost.bound]
    here = "" if plan.run.cluster.gpu else "; this machine, for the run file names none: --gpus 8xh100 plans for others"
    yield "machine", describe_machines(layout, plan.machine) + here
    base = "" if plan.base.path else "; no weights here"
    yield "model", f"{plan.base.name}, {format_count(plan.total)}, trained: {plan.adapter.trainable:,}{base}"
    rows = format_plural(plan.schedule.global_sequences, plan.run.objective.row)
    gpus = format_plural(layout.ranks, _gpu_or_rank(plan))
    if layout.context_parallel > 1:
        group = f"{layout.context_parallel} {_gpu_or_rank(plan)}s that split rows"
        gpus = group if layout.readers == 1 else f"{layout.readers} groups of {group}"
    length = f"{batch.sides} x {batch.length:,}" if batch.sides > 1 else f"{batch.length:,}"
    micro = "micro-batch" if batch.accumulation == 1 else "micro-batches"
    text = f"{rows} a step of up to {length} tokens: {batch.micro} x {batch.accumulation} {micro} x {gpus}"
    yield "batch", f"{text}; {_explain_batch(plan)}" if plan.tried else text
    if plan.chosen:  # each begins with its key and value
        settings = [" ".join(choice.split()[:2]).strip(",:").partition(".")[2] for choice in plan.chosen]
        yield "not set", f"chosen: {', '.join(settings)}"


LIMITS = {
    "compute": "compute: arithmetic",
    "memory": "memory: elementwise operators, decoding and copying weights",
    "wire": "wire: what the ranks send each other",
    "host": "host: Python and the operators that it dispatches",
    "host link": "host link: what comes from host memory and goes there",
}


def _explain_batch(plan: Plan) -> str:
    if not plan.tried[0].has_headroom:
        return f"even micro-batches of 1 leave less than {HEADROOM:.0%} of the GPU free"
    text = f"{plan.batch.micro} chosen of {', '.join(str(cost.batch.micro) for cost in plan.tried)}"
    last = plan.tried[-1]
    if last.has_headroom:
        return text
    limit = plan.machine.gpu.memory_gib * (1 - HEADROOM)
    return f"{text}; {last.batch.micro} would need {last.gpu_gib:,.1f} of {limit:,.1f} GiB"


def _format_known(seconds: float | None) -> str:
    return "unknown" if seconds is None else format_duration(seconds)


def _list_trials(plan: Plan) -> Table:
    rows = []
    for trial in plan.trials:
        hours = trial.hours
        seconds = None if hours is None or trial.seconds is None else hours * 3600 - trial.seconds["load"]
        steps = "unknown" if trial.schedule.steps is None else f"{trial.schedule.steps:,}"
        time = _format_known(seconds)
        name = trial.loaded.trial.name if trial.loaded.trial else ""
        cells = [name, f"{trial.adapter.trainable:,}", steps, f"{trial.cost.gpu_gib:,.1f}", time]
        rows.append(([*cells, _yes_or_no(trial.cost.fits)], False))
    return make_table("Trials", f"trial >trained >steps >GiB/{_gpu_or_rank(plan)} >time fits", rows)


def _describe_halvings(plan: Plan) -> str:
    """Return how many trials go on after which step. Their time assumes that each is as likely to."""
    steps = ", ".join(f"{halving.trials} after step {halving.step:,}" for halving in plan.halvings)
    words = f"{len(plan.trials)} trials, {steps}"
    full = [None if trial.seconds is None else sum(trial.seconds.values()) for trial in plan.trials]
    if plan.hours is None or None in full:
        return words
    load = plan.trials[0].cost.load_seconds
    unhalved = sum(seconds - load for seconds in full if seconds is not None) + load
    return f"{words}: about {format_duration(plan.hours * 3600)} instead of {format_duration(unhalved)}"


def _list_groups(plan: Plan) -> Table:
    rows = []
    for group in plan.groups:
        times = [_format_known(group.seconds), _format_known(group.seconds_alone), _yes_or_no(group.fits)]
        names = f"{', '.join(group.names)}{f' (alone: {group.reason})' if group.reason else ''}"
        rows.append(([names, f"{group.gpu_gib:,.1f}", *times], False))
    columns = f"trials >GiB/{_gpu_or_rank(plan)} >together >alone fits"
    return make_table("Time of the steps: together in one micro-batch, and one after the other", columns, rows)


def _describe_length(plan: Plan) -> str:
    schedule = plan.schedule
    on_gpus = plan.machine.gpu.name != "cpu"
    if schedule.steps is None and not plan.trials:
        seconds = estimate_millions(plan.cost)
        text = f"{format_duration(seconds)} for {MILLIONS} M tokens"
        text += f", {seconds * plan.layout.ranks / 3600:,.2f} GPU-hours" if on_gpus else ""
        if schedule.rows_reason == NO_DATA:
            return f"{text}; --data FILE plans an epoch of it"
        return f"{text}; of the run unknown ({schedule.rows_reason}): train.max_steps sets it"
    events = _format_events(schedule.evaluations, "evaluation"), _format_events(schedule.checkpoints, "checkpoint")
    text = ", ".join([_format_steps(schedule), *events])
    if plan.trials:
        most = max(len(group.names) for group in plan.groups)
        how = "one after the other" if most == 1 else f"up to {most} together"
        text = f"{format_plural(len(plan.trials), 'trial')}, {how}, on one loaded base"
    if plan.hours is None:
        return f"unknown: {text}"
    hours = f"; {plan.gpu_hours:,.2f} GPU-hours" if on_gpus else ""
    return f"{format_duration(plan.hours * 3600)}: {text}{hours}"


def estimate_millions(cost: Cost) -> float:
    """Return the seconds that training on MILLIONS million tokens takes."""
    return MILLIONS * 1e6 / cost.tokens_per_second


def _format_steps(schedule: Schedule) -> str:
    """Return the number of steps and by how much it may be off; it is off by at most one if it was counted."""
    steps = format_plural(schedule.steps or 0, "step")
    if schedule.tolerance == 0:
        return steps
    if schedule.tolerance is None:
        return f"about {steps}"
    return f"about {steps} (± {max(1, math.ceil(100 * schedule.tolerance))} %)"


def _format_events(number: int | None, noun: str) -> str:
    return f"an unknown number of {noun}s" if number is None else format_plural(number, noun)


def describe_machines(layout: Layout, machine: Machine) -> str:
    """Describe nodes, GPUs and, if there are several, the links between them."""
    text = f"{format_plural(layout.nodes, 'node')} x {layout.gpus_per_node} {machine.gpu.name}"
    if layout.nodes > 1:
        text += f"; {machine.network.name} between nodes"
    if layout.gpus_per_node > 1:
        text += f"; {machine.link.name} inside"
    return text


def _script_lines(plan: ScriptPlan) -> Iterator[Named]:
    script = plan.run.script
    yield "script", script.path or f"module {script.module}"
    yield "arguments", shlex.join(script.args) or "none"
    yield "machine", describe_machines(plan.layout, plan.machine)
    yield "ranks", f"{plan.layout.ranks}, each with torchrun's environment"
    yield "folder", plan.run.folder


TERMS = """\
batch: rows of a micro-batch x micro-batches of a step, on each GPU
rows/step: of all GPUs; GiB/GPU: its peak; GB/step: sent by each GPU
tok/s: useful tokens of all GPUs, estimated; GPU-h: GPU-hours of the run
FP8, NF4, MXFP4: the base stays as published, and is decoded as it is used
gathered once: weights stay unsharded through all micro-batches of a step
expert-parallel N: each of N GPUs stores its part of the experts
context_parallel N: the tokens of each row are split over N GPUs"""


def _comparison(plan: Plan, width: int) -> Iterator[Table | Text]:
    """Yield layouts on the run's own nodes, then the best on other numbers of nodes, then impossible layouts."""
    shown = drop_dominated(plan.contenders, plan.layout)
    here = sorted((c for c in shown if c.here), key=lambda c: (not c.cost.fits, -c.cost.tokens_per_second))
    elsewhere = sorted((c for c in shown if not c.here), key=lambda c: (c.layout.ranks, -c.cost.tokens_per_second))
    step = format_plural(plan.schedule.global_sequences, plan.run.train.unit)
    title = f"Layouts of this run ({format_plural(plan.layout.nodes, 'node')}, {step} a step)"
    columns = "layout >batch fits >GiB/GPU >GB/step >s/step >tok/s"
    is_narrow = width < NARROW
    rows = [
        (
            [c.name, _format_batch(c.cost.batch), _yes_or_no(c.cost.fits), *_figures(c.cost)],
            is_same_layout(c.layout, plan.layout),
        )
        for c in here
    ]
    tables = [make_table(title, columns, rows)]
    if elsewhere:
        columns = ">nodes layout >batch >rows/step fits >GiB/GPU >tok/s >GPU-h"
        rows = [(_cells_elsewhere(plan, c), False) for c in elsewhere]
        hide = (">rows/step", ">GPU-h") if is_narrow else ()
        tables.append(make_table("The best layout on other numbers of nodes", columns, rows, hide))
    for table in tables:
        if is_narrow:
            table.padding = 0
        next(column for column in table.columns if column.header == "layout").min_width = len("expert-parallel")
        yield table
    hidden = sum(not c.why_not for c in plan.contenders) - len(shown)
    if hidden:
        yield Text(f"{hidden} more are slower and no smaller: --json has them all\n")
    yield Text(f"{TERMS}\n")
    yield Text("What makes plan take a row:", style="bold")
    for c in (*here, *elsewhere):
        overrides = list_overrides(c, plan.loaded, published_dtype(plan.base))
        words = " ".join(f"--override={shlex.quote(override)}" for override in overrides)
        lines = textwrap.wrap(words, width - 6, break_on_hyphens=False)
        name = c.name if c.here else f"{format_plural(c.layout.nodes, 'node')}: {_name_without_nodes(c)}"
        yield Text(f" {name}\n   " + " \\\n   ".join(lines))
    yield Text()
    reasons = {why_not: name for name, why_not in reversed([*plan.impossible.items()])}
    reasons |= {c.why_not: c.name for c in reversed(plan.contenders) if c.why_not}
    if reasons:
        yield make_table("Not possible", "layout why", [([name, why_not], False) for why_not, name in reasons.items()])


def _cells_elsewhere(plan: Plan, c: Candidate) -> list[str]:
    batch = c.cost.batch
    rows = batch.micro * batch.accumulation * c.layout.readers
    gib, _, _, tokens_per_second = _figures(c.cost)
    hours = plan.estimate_gpu_hours(c)
    return [
        str(c.layout.nodes),
        _name_without_nodes(c),
        _format_batch(batch),
        f"{rows:,}",
        _yes_or_no(c.cost.fits),
        gib,
        tokens_per_second,
        "" if hours is None else f"{hours:,.1f}",
    ]


def _name_without_nodes(c: Candidate) -> str:
    return c.name.rpartition(", on ")[0]


def _format_batch(batch: BatchSize) -> str:
    return f"{batch.micro}x{batch.accumulation}"


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"


def _figures(cost: Cost) -> list[str]:
    return [
        f"{cost.gpu_gib:,.1f}",
        f"{cost.wire_gb_per_step:,.1f}",
        f"{cost.step_seconds:,.2f}",
        f"{cost.tokens_per_second:,.0f}",
    ]


def _tables(plan: Plan, formulas: bool) -> Iterator[Table]:
    hide = () if formulas else ("formula",)
    if plan.advice:  # estimated by the same formulas as the rest: these gains are right if the rest is
        rows = [
            ([advice.change, f"{advice.tokens_per_second:,.0f}", f"{advice.gain:,.1f} x", advice.remark], False)
            for advice in plan.advice
        ]
        table = make_table("What would make it faster (useful tokens, estimate)", "change >tok/s >gain how", rows)
        table.columns[0].no_wrap = True
        yield table
    if plan.tried:
        tried = [
            ([_format_batch(cost.batch), _yes_or_no(cost.has_headroom), *_figures(cost)], cost.batch == plan.batch)
            for cost in plan.tried
        ]
        yield make_table("Micro-batches, by memory and time", ">batch fits >GiB/GPU >GB/step >s/step >tok/s", tried)
    title = "Memory" if formulas else "Memory at the peak"
    yield make_table(title, "phase where what >GiB formula", _memory(plan, formulas), hide)
    yield make_table("Time (estimate)", "what >value formula", _time(plan), hide)
    if plan.cost.flows:
        columns = "what over >each >times >total >s/step formula"
        yield make_table("Network traffic of each GPU in a step", columns, _traffic(plan), hide)
    yield make_table("Adapter", "pattern matches part >modules >trainable", _targets(plan))
    yield make_table("Parameters", "part >parameters >share", _parameters(plan))


def _traffic(plan: Plan) -> Iterator[TableRow]:
    for flow in plan.cost.flows:
        cells = [
            flow.kind,
            flow.fabric,
            format_bytes(flow.bytes),
            f"{flow.per_step:,}",
            format_bytes(flow.bytes * flow.per_step),
            f"{flow.seconds * flow.per_step:,.3f}",
            flow.formula,
        ]
        yield cells, False


def _targets(plan: Plan) -> Iterator[TableRow]:
    for target in plan.adapter.targets:
        counts = [f"{len(target.modules):,}", f"{target.parameters:,}"]
        yield [target.pattern, ", ".join(target.names), target.part, *counts], False
    share = f"{plan.adapter.trainable / plan.total:.3%} of the model"
    yield ["total", share, "", "", f"{plan.adapter.trainable:,}"], True


def _parameters(plan: Plan) -> Iterator[TableRow]:
    for part, count in sorted(plan.by_part.items(), key=lambda item: -item[1]):
        yield [part, f"{count:,}", f"{count / plan.total:.2%}"], False
    disk = "" if plan.disk_bytes is None else f"{format_bytes(plan.disk_bytes)} on disk"
    yield ["total", f"{plan.total:,}", disk], True


def make_table(title: str, columns: str, rows: Iterable[TableRow], hide: Container[str] = ()) -> Table:
    """Build a table. Columns whose names begin with `>` are right-aligned and never wrapped, nor are GPUs: no digit is
    lost, and no name is split."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    table.padding = (0, 1, 0, 0)
    names = columns.split()
    for column in names:
        if column not in hide:
            side: Literal["right", "left"] = "right" if column.startswith(">") else "left"
            table.add_column(
                column.lstrip(">"), justify=side, no_wrap=side == "right" or column == "GPUs", overflow="fold"
            )
    for cells, is_bold in rows:
        shown = [cell for name, cell in zip(names, cells, strict=True) if name not in hide]
        table.add_row(*shown, style="bold" if is_bold else "")
    return table


def _memory(plan: Plan, formulas: bool) -> Iterator[TableRow]:
    """Yield the GPU's step row by row, and only totals for other phases unless formulas are requested."""
    for place in ("gpu", "host"):
        for phase in ("load", "step", "save"):
            rows = [row for row in plan.cost.rows if (row.place, row.phase) == (place, phase)]
            if rows:
                yield [phase, place, "total", f"{sum(row.bytes for row in rows) / GIB:,.2f}", ""], True
            if formulas or (place, phase) == ("gpu", "step"):
                for row in rows:
                    yield ["", "", row.item, f"{row.bytes / GIB:,.2f}", row.formula], False


def _time(plan: Plan) -> Iterator[TableRow]:
    cost = plan.cost
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
    yield ["throughput", rate, f"of {plan.machine.gpu.bf16_tflops:,.0f} TFLOP/s peak a GPU"], False
    if plan.seconds is not None:
        parts = [(name.replace("_", " "), seconds) for name, seconds in plan.seconds.items() if seconds]
        how = ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in parts)
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
