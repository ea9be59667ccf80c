"""The plan as one JSON object. Its keys are an interface: add, never rename."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from windlass import __version__
from windlass.hardware import GIB
from windlass.plan import Plan
from windlass.plan.compare import Contender, Trial


def record(plan: Plan) -> dict[str, Any]:
    cost, length = plan.cost, plan.schedule
    return {
        "windlass": __version__,
        "model": {
            "name": plan.base.name,
            "path": str(plan.base.path) if plan.base.path else None,
            "class": plan.base.family.causal_lm,
            "wrapper": plan.base.wrapper,
        },
        "parameters": {"total": plan.total, "by_part": dict(plan.by_part), "disk_bytes": plan.disk_bytes},
        "adapter": _adapter(plan),
        "batch": {
            "micro": plan.batch.micro,
            "accumulation": plan.batch.accumulation,
            "max_length": plan.batch.length,
            **asdict(length),
            "tried": [_trial(trial) for trial in plan.tried],
        },
        "memory": {
            "gpu_gib": cost.gpu_gib,
            "host_gib": cost.host_gib,
            "gpu_memory_gib": plan.machine.gpu.memory_gib,
            "rows": [
                {"phase": r.phase, "place": r.place, "item": r.item, "gib": r.bytes / GIB, "formula": r.formula}
                for r in cost.rows
            ],
            "fits": cost.fits,
            "remedy": cost.remedy,
        },
        "traffic": [asdict(flow) for flow in cost.flows],
        "layout": {**asdict(plan.layout), "ranks": plan.layout.ranks},
        "layouts": [_contender(contender) for contender in plan.contenders],
        "estimate": {
            "step_seconds": cost.step_seconds,
            "step_seconds_serial": cost.step_seconds_serial,
            "compute_seconds_per_micro_batch": cost.compute_seconds,
            "tokens_per_second": cost.tokens_per_second,
            "mfu": cost.mfu,
            "flops_per_token": cost.flops_per_token,
            "recompute_flops_per_token": cost.recompute_flops_per_token,
            "wire_gb_per_step": cost.wire_gb_per_step,
            "hours": plan.hours,
            "gpu_hours": plan.gpu_hours,
        },
        "advice": [asdict(advice) for advice in plan.advice],
        "notes": list(plan.notes),
    }


def _trial(trial: Trial) -> dict[str, Any]:
    return {
        "micro": trial.batch.micro,
        "accumulation": trial.batch.accumulation,
        "gpu_gib": trial.cost.gpu_gib,
        "fits": trial.fits,
        "step_seconds": trial.cost.step_seconds,
        "tokens_per_second": trial.cost.tokens_per_second,
    }


def _adapter(plan: Plan) -> dict[str, Any]:
    adapter = plan.adapter
    return {
        "r": adapter.r,
        "alpha": adapter.alpha,
        "trainable": adapter.trainable,
        "percent": 100 * adapter.trainable / plan.total,
        "targets": [
            {
                "pattern": target.pattern,
                "names": list(target.names),
                "part": target.part,
                "modules": len(target.modules),
                "parameters": target.parameters,
                "matched": list(target.modules),
                "note": target.note,
            }
            for target in adapter.targets
        ],
    }


def _contender(contender: Contender) -> dict[str, Any]:
    cost, candidate = contender.cost, contender.candidate
    return {
        "name": contender.name,
        "ranks": contender.ranks,
        "possible": candidate.possible,
        "why_not": candidate.why_not,
        "fits": cost.fits if cost else None,
        "base_dtype": candidate.layout.base_dtype if candidate.layout else None,
        "micro": contender.batch.micro if cost else None,
        "accumulation": contender.batch.accumulation if cost else None,
        "gpu_gib": cost.gpu_gib if cost else None,
        "wire_gb_per_step": cost.wire_gb_per_step if cost else None,
        "step_seconds": cost.step_seconds if cost else None,
        "tokens_per_second": cost.tokens_per_second if cost else None,
        "gpu_hours": contender.gpu_hours,
    }
