"""The plan of a run, and its JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from windlass import __version__
from windlass.errors import Problem, Where
from windlass.hardware import GIB, Machine
from windlass.model import Base
from windlass.model.targets import Adapter
from windlass.plan.cost import BatchSize, Cost
from windlass.plan.layout import Layout
from windlass.plan.rows import Counts, Schedule, make_schedule
from windlass.plan.search import Candidate, Contenders, Search
from windlass.plan.split_rows import needs_mask
from windlass.plan.together import Group
from windlass.runfile import Loaded, RunFile
from windlass.runfile.sweep import Halving, Trial, list_halvings, share_of_steps

BY_STEP = ("steps", "evaluations", "checkpoints")  # of a run's seconds
CANDIDATE_FIGURES = (
    "fits gpu_gib wire_gb_per_step step_seconds tokens_per_second tokens_per_second_low tokens_per_second_high"
)


@dataclass(frozen=True, slots=True)
class Advice:
    """One change, or all of them together, and the useful tokens per second with it."""

    change: str  # data.packing: true
    tokens_per_second: float
    gain: float  # against the run as planned
    remark: str


@dataclass(frozen=True, slots=True)
class Caution:
    """A setting that is possible but probably not intended."""

    text: str
    override: str = ""  # KEY=VALUE that changes it


@dataclass(frozen=True)
class Plan:
    """The plan of a run. Scripts and later stages read its `as_dict`."""

    loaded: Loaded
    base: Base
    adapter: Adapter
    machine: Machine
    layout: Layout
    schedule: Schedule
    cost: Cost
    contenders: Contenders
    impossible: Mapping[str, str]  # impossible layouts, and why
    counts: Counts
    evaluated: int | None  # sequences of an evaluation; None: unknown
    kept: int | None  # those of kept sets
    tried: tuple[Cost, ...]  # the cost of each micro-batch, if the plan chooses one
    advice: tuple[Advice, ...]  # changes that would make the run faster
    warnings: tuple[Caution, ...]  # settings that are probably not intended
    notes: tuple[str, ...]
    search: Search = field(repr=False)  # what the layout was chosen by
    request: Layout
    chosen: tuple[str, ...] = ()  # choices for settings that the run file leaves open
    trials: tuple[Plan, ...] = ()  # of a sweep, whose plan is otherwise that of its largest trial
    groups: tuple[Group, ...] = ()  # of a sweep: its trials, those that train together side by side

    @property
    def run(self) -> RunFile:
        return self.loaded.run

    @property
    def by_document(self) -> bool:
        """Whether attention of packed rows is computed by document on a GPU, without a mask."""
        return self.run.masked and not needs_mask(self.run, self.base, self.machine.gpu)

    @property
    def trial(self) -> Trial | None:
        return self.loaded.trial

    @property
    def where(self) -> Where:
        return self.loaded.where

    @property
    def file(self) -> Path:
        return self.loaded.path

    @property
    def folder(self) -> Path:
        return Path(self.run.folder)

    @property
    def batch(self) -> BatchSize:
        return self.cost.batch

    @cached_property
    def by_part(self) -> Mapping[str, int]:
        count: Counter[str] = Counter()
        for parameter in self.base.parameters:
            count[parameter.part] += parameter.count
        return count

    @property
    def total(self) -> int:
        return sum(self.by_part.values())

    @property
    def missing_weights(self) -> list[Problem]:
        """Return a problem if there are no weights: a published config is enough for a plan, but not for a run."""
        if self.base.path and self.disk_bytes is not None:
            return []
        hint = "mount the volume, name the model's folder, or download it with `windlass fetch RUN`"
        text = f"{self.run.model.model_name_or_path} contains no weights"
        return [Problem(text, self.where("model.model_name_or_path"), hint, "no-weights")]

    @property
    def disk_bytes(self) -> int | None:
        """Return the bytes of the tensors that the run reads; None if there are neither weights nor their headers."""
        return sum(piece.stored.end - piece.stored.start for p in self.base.parameters for piece in p.pieces) or None

    @property
    def halvings(self) -> tuple[Halving, ...]:
        """Return at which steps of a sweep trials are dropped."""
        return list_halvings(self.run.sweep, len(self.trials))

    @property
    def seconds(self) -> dict[str, float] | None:
        """Return the run's seconds by activity; None if its length is unknown. A sweep loads once."""
        of_trials = [trial.seconds for trial in self.trials]
        known = [seconds for seconds in of_trials if seconds is not None]
        if len(known) < len(of_trials):
            return None
        if known:
            totals = dict.fromkeys(known[0], 0.0)
            for trial, seconds in zip(self.trials, known, strict=True):
                share = share_of_steps(self.halvings, len(known), trial.schedule.steps or 1)
                group = next(group for group in self.groups if trial.trial and trial.trial.name in group.names)
                together = {"steps": group.share}
                for part, value in seconds.items():
                    totals[part] += value * (share if part in BY_STEP else 1) * together.get(part, 1.0)
            return totals | {"load": known[0]["load"]}
        return self._seconds(self.cost, self.layout.readers, self.schedule)

    def _seconds(self, cost: Cost, readers: int, schedule: Schedule) -> dict[str, float] | None:
        if schedule.steps is None:
            return None
        evaluated = math.ceil((self.evaluated or 0) / readers)
        # Kept sets with the adapter and without it; of the others the base alone once.
        rows = (schedule.evaluations or 0) * (evaluated + 2 * math.ceil((self.kept or 0) / readers))
        rows += evaluated if schedule.evaluations and not self.run.objective.has_reference else 0
        trained = math.ceil((schedule.rows or 0) / readers)
        saving = schedule.checkpoint_bytes / self.machine.rates.storage_gb_per_second / 1e9
        return {
            "load": cost.load_seconds,
            "reference": (trained + evaluated) * cost.forward_seconds if self.run.objective.has_reference else 0.0,
            "first_step": cost.first_step_seconds,
            "steps": schedule.steps * cost.step_seconds,
            "evaluations": rows * cost.evaluation_seconds,
            "checkpoints": (schedule.checkpoints or 0) * saving,
        }

    @property
    def hours(self) -> float | None:
        return None if self.seconds is None else sum(self.seconds.values()) / 3600

    @property
    def gpu_hours(self) -> float | None:
        return None if self.hours is None else self.hours * self.layout.ranks

    def estimate_gpu_hours(self, other: Candidate) -> float | None:
        readers = other.layout.readers
        schedule = make_schedule(self.run.train, other.cost.batch, readers, self.adapter, self.counts)
        seconds = self._seconds(other.cost, readers, schedule)
        return None if seconds is None else sum(seconds.values()) * other.layout.ranks / 3600

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of `windlass plan --json` and plan.json. Its keys are an interface: add, never rename."""
        base = self.base
        cost = self.cost
        return {
            "windlass": __version__,
            "model": {
                "name": base.name,
                "path": str(base.path) if base.path else None,
                "class": base.family.causal_lm,
                "wrapper": base.wrapper.architecture if base.wrapper else None,
            },
            "parameters": {"total": self.total, "by_part": dict(self.by_part), "disk_bytes": self.disk_bytes},
            "adapter": {
                **_pick(self.adapter, "r alpha trainable"),
                "percent": 100 * self.adapter.trainable / self.total,
                "targets": [
                    {
                        **_pick(target, "pattern names part"),
                        "modules": len(target.modules),
                        **_pick(target, "parameters note"),
                        "matched": list(target.modules),
                    }
                    for target in self.adapter.targets
                ],
            },
            "batch": {
                **_pick(self.batch, "micro accumulation"),
                "max_length": self.batch.length,
                "sides": self.batch.sides,
                **asdict(self.schedule),
                "tried": [
                    {
                        **_pick(tried.batch, "micro accumulation"),
                        "fits": tried.has_headroom,
                        **_pick(tried, "gpu_gib step_seconds tokens_per_second"),
                    }
                    for tried in self.tried
                ],
            },
            "memory": {
                **_pick(cost, "gpu_gib host_gib fits remedy"),
                "gpu_memory_gib": self.machine.gpu.memory_gib,
                "rows": [{**_pick(row, "phase place item formula"), "gib": row.bytes / GIB} for row in cost.rows],
            },
            "traffic": [asdict(flow) for flow in cost.flows],
            "layout": {**asdict(self.layout), "ranks": self.layout.ranks},
            "layouts": [*_describe_layouts(self)],
            "estimate": {
                **_pick(cost, "step_seconds step_seconds_serial tokens_per_second mfu wire_gb_per_step"),
                **_pick(cost, "flops_per_token recompute_flops_per_token"),
                **_pick(cost, "step_seconds_low step_seconds_high tokens_per_second_low tokens_per_second_high basis"),
                **_pick(cost, "bound"),
                **{
                    f"{part}_seconds_per_micro_batch": getattr(cost, f"{part}_seconds")
                    for part in ("compute", "memory", "wire", "transfer", "host", "sync")
                },
                "seconds": self.seconds,
                **_pick(self, "hours gpu_hours"),
            },
            **({"trials": describe_trials(self.trials)} if self.trials else {}),
            **({"halvings": [halving._asdict() for halving in self.halvings]} if self.halvings else {}),
            **({"groups": [asdict(group) for group in self.groups]} if self.groups else {}),
            "advice": [asdict(advice) for advice in self.advice],
            "warnings": [asdict(warning) for warning in self.warnings],
            "notes": list(self.notes),
        }


def describe_trials(trials: tuple[Plan, ...]) -> list[dict[str, Any]]:
    return [
        {
            "name": trial.trial.name if trial.trial else "",
            "settings": dict(trial.trial.settings) if trial.trial else {},
            "folder": str(trial.folder),
            "trainable": trial.adapter.trainable,
            "steps": trial.schedule.steps,
            **_pick(trial.cost, "gpu_gib fits step_seconds"),
            "hours": trial.hours,
        }
        for trial in trials
    ]


def _describe_layouts(plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield possible layouts with their figures, then impossible ones, whose figures are None."""
    for candidate in plan.contenders:
        yield {
            "name": candidate.name,
            "ranks": candidate.layout.ranks,
            "possible": not candidate.why_not,
            "why_not": candidate.why_not,
            "base_dtype": candidate.layout.base_dtype,
            **_pick(candidate.cost.batch, "micro accumulation"),
            **_pick(candidate.cost, CANDIDATE_FIGURES),
            "gpu_hours": plan.estimate_gpu_hours(candidate),
        }
    for name, why_not in plan.impossible.items():
        yield {
            "name": name,
            "ranks": plan.layout.ranks,
            "possible": False,
            "why_not": why_not,
            **dict.fromkeys(["base_dtype", "micro", "accumulation", *CANDIDATE_FIGURES.split(), "gpu_hours"]),
        }


def _pick(source: Any, names: str) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names.split()}
