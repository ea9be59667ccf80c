"""What one layer dispatches in a training step: counted from the real model by benchmarks/dispatched.py."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from windlass.plan.work import Layer, Shape

# A view costs the host so much of what an operator costs that launches something.
VIEW = 0.3

# What the operators of a layer are counted by; its bytes are linear in all features.
COUNTED = ("layer", "adapters", "expert_adapters")
ADAPTED = ("adapted_in", "adapted_out", "adapted_r")


def features(layer: Layer, hidden: int, top_k: int) -> dict[str, float]:
    """Of one layer."""
    plain, stacks = layer.plain_lora, layer.expert_lora
    return {
        "layer": 1.0,
        "adapters": float(len(plain)),
        "expert_adapters": float(len(stacks)),
        "hidden": hidden,
        "norms": layer.norms,
        "query": layer.query,
        "key": layer.key,
        "attended": layer.attended,
        "mlp": layer.mlp,
        "routed_hidden": top_k * hidden * bool(layer.expert),
        "routed_width": top_k * layer.expert,
        "experts": layer.experts,
        "adapted_in": sum(lora.inputs for lora in plain),
        "adapted_out": sum(lora.outputs for lora in plain),
        "adapted_r": sum(lora.r for lora in plain),
        "routed_in": top_k * sum(lora.inputs for lora in stacks),
        "routed_out": top_k * sum(lora.outputs for lora in stacks),
    }


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Of one pass through one layer."""

    operators: float  # with views, as so many that launch
    modules: float
    bytes: float  # a token, read and written by the layer's operators that are no matrix product
    adapter_bytes: float  # the same of its adapters


@cache
def table() -> dict[str, Any]:
    return dict(json.loads(Path(__file__).with_name("operators.json").read_text()))


def dispatched(shape: Shape, layer: Layer, phase: str) -> Dispatched:
    """Forward or backward. A family that nobody counted dispatches what the one most like it does."""
    rows, name = table(), shape.base.family.model_type
    if not layer.experts and f"{name}, dense" in rows:
        name = f"{name}, dense"
    row = rows.get(name, rows["mixtral" if layer.experts else "qwen3"])[phase]
    size = features(layer, shape.hidden, shape.top_k)

    def of(what: str, names: Collection[str] = size) -> float:
        return float(sum(size[name] * value for name, value in row[what].items() if name in names))

    adapters = of("bytes", ADAPTED)
    return Dispatched(of("operators") + VIEW * of("views"), of("modules"), of("bytes") - adapters, adapters)
