"""Which trials of a sweep train together, with their rows in one micro-batch, and what that takes and saves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from windlass.errors import UserError
from windlass.hardware import GIB
from windlass.plan.cost import HEADROOM, Cost, estimate_cost
from windlass.plan.rows import RowLengths
from windlass.plan.split_rows import find_rope_of_batch
from windlass.plan.workload import Workload
from windlass.runfile import RunFile

KEY: Final = "sweep.together"
OPERATORS: Final = 14  # of trials' adapters on one linear layer, forward and backward
WORTH: Final = 0.95  # of the time one after the other: together trials must take less
OF_TRIAL: Final = ("adapter", "adapter gradients", "optimizer")  # rows of the memory table that each trial has


@dataclass(frozen=True)
class Member:
    name: str
    run: RunFile
    work: Workload
    lengths: RowLengths
    steps: int | None
    cost: Cost

    @property
    def micro_batches(self) -> int | None:
        return None if self.steps is None else self.steps * self.cost.batch.accumulation


@dataclass(frozen=True)
class Group:
    """Trials that train together, or one that trains alone."""

    names: tuple[str, ...]
    seconds: float | None  # of all steps; None: their number is unknown
    seconds_alone: float | None  # of the same steps, one trial after the other
    gpu_gib: float
    fits: bool
    reason: str = ""  # why a trial trains alone, if others don't

    @property
    def share(self) -> float:
        """Return the time of the steps as a share of that of one trial after the other."""
        return self.seconds / self.seconds_alone if self.seconds and self.seconds_alone else 1.0


def why_alone(member: Member) -> str:
    """Return why a trial can't train together with others; empty if it can."""
    kind = find_rope_of_batch(member.work.shape.base)
    if kind:
        return f"rope type {kind} of the base depends on the longest row of a micro-batch"
    if member.run.lora.use_dora:
        return "lora.use_dora scales the base's products"
    if member.run.train.compile:
        return "its layers are compiled"
    if member.work.layout.offload:
        return "with an offloaded base it is not proven yet"
    odd = [target.pattern for target in member.work.shape.adapter.targets if target.part in ("embedding", "head")]
    return f"it adapts {odd[0]}, which is no layer's product" if odd else ""


def group_trials(
    members: Sequence[Member], together: int | Literal["auto"], where: Callable[[str], str]
) -> tuple[Group, ...]:
    """Return all trials in groups. `together`: how many to a group; auto: as many as are fastest and fit."""
    reasons = {member.name: why_alone(member) for member in members}
    able = [member for member in members if not reasons[member.name]]
    if together != "auto":
        if together > len(members):
            problem = f"is {together}, and there are {len(members)} trials"
            raise UserError(problem, where(KEY), f"set {KEY} to {len(members)} or less, or to auto", "few-trials")
        if together > 1 and len(able) < 2:
            problem = f"no two trials can train together: {next(filter(None, reasons.values()))}"
            raise UserError(problem, where(KEY), f"set {KEY}: 1, or change that", "not-together")
    sizes = [together] if together != "auto" else range(1, len(able) + 1)
    ways = [[price_group(chunk, reasons) for chunk in split(members, reasons, size)] for size in sizes]
    alone = ways[0]
    if together != "auto":
        return tuple(alone)

    def count(way: Sequence[Group]) -> float:
        return sum(group.seconds or 0.0 for group in way)

    best = min([way for way in ways if all(group.fits for group in way)] or [alone], key=count)
    return tuple(alone if count(best) > WORTH * count(alone) else best)


def split(members: Sequence[Member], reasons: dict[str, str], size: int) -> list[list[Member]]:
    """Return groups of so many trials, as the run file lists them. Packed rows and padded ones have groups apart."""
    groups: list[list[Member]] = []
    for member in members:
        for group in groups:
            alike = group[0].run.data.packing == member.run.data.packing
            if alike and len(group) < size and not reasons[member.name] and not reasons[group[0].name]:
                group.append(member)
                break
        else:
            groups.append([member])
    return groups


def price_group(members: Sequence[Member], reasons: dict[str, str]) -> Group:
    names = tuple(member.name for member in members)
    alone = [None if member.steps is None else member.steps * member.cost.step_seconds for member in members]
    seconds_alone = None if None in alone else sum(filter(None, alone))
    if len(members) == 1:
        cost = members[0].cost
        return Group(names, seconds_alone, seconds_alone, cost.gpu_gib, cost.fits, reasons[names[0]])
    gpu_gib = estimate_together(members).gpu_gib
    largest = max(members, key=lambda member: member.cost.gpu_gib)
    for member in members:
        if member is not largest:
            rows = (row for row in member.cost.rows if row.phase == "save" and row.item in OF_TRIAL)
            gpu_gib += sum(row.bytes for row in rows if row.place == "gpu") / GIB
    limit = largest.work.machine.gpu.memory_gib * (1 - HEADROOM)
    return Group(names, count_seconds(members), seconds_alone, gpu_gib, gpu_gib <= limit)


def count_seconds(members: Sequence[Member]) -> float | None:
    """Return the time of all steps together: when a trial ends, the others go on without it."""
    counts = [member.micro_batches for member in members]
    if None in counts:
        return None
    seconds = 0.0
    done = 0
    for count in sorted({count for count in counts if count is not None}):
        live = [member for member in members if (member.micro_batches or 0) >= count]
        cost = estimate_together(live)
        per_micro_batch = cost.step_seconds / cost.batch.accumulation
        rates = live[0].work.machine.rates
        more = count_linears(live) * OPERATORS * rates.operator_seconds
        host = cost.host_seconds + more
        per_micro_batch = per_micro_batch + more if live[0].work.on_cpu else max(per_micro_batch, host)
        seconds += (count - done) * per_micro_batch
        done = count
    return seconds


def count_linears(members: Sequence[Member]) -> int:
    """Return how many adapted linear layers are computed beside those of a trial alone. Equal parts of a micro-batch
    have theirs computed at once (sweep/slices.py)."""
    of_trials = [sum(len(target.modules) for target in member.work.shape.adapter.targets) for member in members]
    batches = {member.cost.batch.micro for member in members}
    at_once = len({*of_trials}) == len(batches) == 1
    return of_trials[0] if at_once and len(members) > 1 else sum(of_trials[1:])


def estimate_together(members: Sequence[Member]) -> Cost:
    """Return the cost of the largest trial's run with the rows of all in its micro-batches."""
    largest = max(members, key=lambda member: member.cost.gpu_gib)
    micro = sum(member.cost.batch.micro for member in members)
    work = replace(largest.work, batch=replace(largest.cost.batch, micro=micro))
    return estimate_cost(work, largest.lengths, advise=False)
