"""Layout and shapes -> bytes per GPU and host, bytes on the wire, seconds per step. Pure arithmetic."""

from __future__ import annotations

from windlass.plan.cost.shape import in_fp8
from windlass.plan.cost.verdict import cost
from windlass.plan.cost.work import Batch, Cost, Flow, Row, Work

__all__ = ["Batch", "Cost", "Flow", "Row", "Work", "cost", "in_fp8"]
