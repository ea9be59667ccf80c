"""The published recipe's claims, each held against what the plan computes. Text of docs/recipe-claims.md."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from windlass import plan as planning
from windlass.cost import cost
from windlass.plan import GIB, Plan
from windlass.runfile import read

EXAMPLES = Path(__file__).parent.parent / "examples" / "mistral-small-4"


def planned(file: str, *overrides: str, accelerate: str | None = None) -> Plan:
    return planning.make(read(EXAMPLES / file, overrides), EXAMPLES / accelerate if accelerate else None)
