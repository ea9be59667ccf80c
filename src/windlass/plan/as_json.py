"""The JSON of a plan: `windlass plan --json` and plan.json."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass import __version__
from windlass.errors import UserError
from windlass.files import write_json
from windlass.hardware import GIB
from windlass.run_folder import PLAN, is_free

if TYPE_CHECKING:
    from windlass.plan.plan import Plan
    from windlass.plan.script import AnyPlan

CANDIDATE_FIGURES = (
    "fits gpu_gib wire_gb_per_step step_seconds tokens_per_second tokens_per_second_low tokens_per_second_high"
)


def write_plan(plan: AnyPlan, out: Path | None) -> Path | None:
    """Write plan.json into `out`, or into the run folder if that already exists, unless a run has begun there."""
    folder = out or plan.folder
    hint = "give another --out DIR"
    try:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        if not is_free(folder):
            if out is not None:
                raise UserError("a run has begun there: its plan.json stays as it is", str(out), hint, "has-run")
            return None
        write_json(folder / PLAN, plan.as_dict())
    except OSError as error:
        text = f"cannot write {PLAN}: {error.strerror}"
        raise UserError(text, str(error.filename or folder), hint, "unwritable") from None
    return folder / PLAN


def describe_plan(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON. Its keys are an interface: add, never rename."""
    base = plan.base
    cost = plan.cost
    return {
        "windlass": __version__,
        "model": {
            "name": base.name,
            "path": str(base.path) if base.path else None,
            "class": base.family.causal_lm,
            "wrapper": base.wrapper.architecture if base.wrapper else None,
        },
        "parameters": {"total": plan.total, "by_part": dict(plan.by_part), "disk_bytes": plan.disk_bytes},
        "adapter": {
            **_pick(plan.adapter, "r alpha trainable"),
            "percent": 100 * plan.adapter.trainable / plan.total,
            "targets": [
                {
                    **_pick(target, "pattern names part"),
                    "modules": len(target.modules),
                    **_pick(target, "parameters note"),
                    "matched": list(target.modules),
                }
                for target in plan.adapter.targets
            ],
        },
        "batch": {
            **_pick(plan.batch, "micro accumulation"),
            "max_length": plan.batch.length,
            "sides": plan.batch.sides,
            **asdict(plan.schedule),
            "tried": [
                {
                    **_pick(tried.batch, "micro accumulation"),
                    "fits": tried.has_headroom,
                    **_pick(tried, "gpu_gib step_seconds tokens_per_second"),
                }
                for tried in plan.tried
            ],
        },
        "memory": {
            **_pick(cost, "gpu_gib host_gib fits remedy"),
            "gpu_memory_gib": plan.machine.gpu.memory_gib,
            "rows": [{**_pick(row, "phase place item formula"), "gib": row.bytes / GIB} for row in cost.rows],
        },
        "traffic": [asdict(flow) for flow in cost.flows],
        "layout": {**asdict(plan.layout), "ranks": plan.layout.ranks},
        "layouts": [*_describe_layouts(plan)],
        "estimate": {
            **_pick(cost, "step_seconds step_seconds_serial tokens_per_second mfu wire_gb_per_step"),
            **_pick(cost, "flops_per_token recompute_flops_per_token"),
            **_pick(cost, "step_seconds_low step_seconds_high tokens_per_second_low tokens_per_second_high basis"),
            **_pick(cost, "bound"),
            **{
                f"{part}_seconds_per_micro_batch": getattr(cost, f"{part}_seconds")
                for part in ("compute", "memory", "wire", "transfer", "host", "sync")
            },
            "seconds": plan.seconds,
            **_pick(plan, "hours gpu_hours"),
        },
        **({"trials": describe_trials(plan.trials)} if plan.trials else {}),
        **({"halvings": [halving._asdict() for halving in plan.halvings]} if plan.halvings else {}),
        **({"groups": [asdict(group) for group in plan.groups]} if plan.groups else {}),
        "advice": [asdict(advice) for advice in plan.advice],
        "warnings": [asdict(warning) for warning in plan.warnings],
        "notes": list(plan.notes),
    }


def describe_trials(trials: tuple[Plan, ...]) -> list[dict[str, Any]]:
    """Return the trials of a sweep with their figures."""
    return [
        {
            "name": trial.loaded.trial.name if trial.loaded.trial else "",
            "settings": dict(trial.loaded.trial.settings) if trial.loaded.trial else {},
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
