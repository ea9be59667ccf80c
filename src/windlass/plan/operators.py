"""What a layer dispatches on the host, and the bytes that its operators move: linear in its features, by family.

benchmarks/dispatched.py counts both in transformers' own models and writes operators.json.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from windlass.plan.workload import Layer, ModelShape
from windlass.settings import FUSED_INPUTS

# Host cost of a view, as a fraction of an operator that launches a kernel.
VIEW = 0.3

# Features that a layer's operator count is linear in; its bytes are linear in all features.
COUNTED = ("layer", "adapters", "biased", "inputs", "expert_adapters")
ADAPTED = ("adapted_in", "adapted_out", "adapted_r")
OF_ADAPTERS = ("adapters", "biased", "inputs", *ADAPTED)
OF_ROUTED = ("routed_hidden", "routed_width", "routed_in", "routed_out")
OF_FUSED = ("inputs", "apart")  # no effect on layers that are not fused
OF_LINEAR = ("inputs", "outputs", "weight", "square", "rows", "columns")  # the bytes of options are linear in these


def layer_features(layer: Layer, hidden: int, top_k: int) -> dict[str, float]:
    """Return the features of one layer that its operators and bytes are linear in."""
    plain = layer.plain_lora
    stacks = layer.expert_lora
    shared = apart = 0
    matrices = [p for p in layer.parameters if len(p.shape) == 2]
    for part in {p.part for p in matrices}:
        widths = {p.name.split(".")[-2]: p.shape[1] for p in matrices if p.part == part}
        adapted = {lora.leaf for lora in plain if lora.part == part}
        for names in FUSED_INPUTS:
            if adapted.issuperset(names):
                shared += len(names) - 1
            elif widths.keys() >= set(names):  # their input gradients are added one by one
                apart += (len(names) - 1) * widths[names[0]]
    biases = {(p.part, p.name.split(".")[-2]) for p in layer.parameters if p.name.endswith(".bias")}
    biased = sum((lora.part, lora.leaf) in biases for lora in plain)  # whose adapter is computed in another way
    return {
        "layer": 1.0,
        "adapters": float(len(plain) - biased),
        "biased": float(biased),
        "inputs": float(len(plain) - shared),
        "expert_adapters": float(len(stacks)),
        "hidden": hidden,
        "apart": apart,
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


def linear_features(inputs: int, outputs: int, tokens: int) -> tuple[int, ...]:
    """Return the features of one adapted linear layer for a pass over `tokens` tokens, in the order of OF_LINEAR."""
    return tokens * inputs, tokens * outputs, inputs * outputs, inputs * inputs, outputs, inputs


@dataclass(frozen=True, slots=True)
class DispatchCounts:
    """The work of one pass through one layer."""

    operators: float  # including views, at their fraction of a launch
    modules: float
    bytes: float  # per token, read and written by operators other than matrix products
    routed: float  # of these, those of routed experts' rows


@cache
def load_operators() -> dict[str, Any]:
    return dict(json.loads(Path(__file__).with_suffix(".json").read_text()))


def count_dispatch(
    shape: ModelShape, layer: Layer, phase: str, length: int, *, separate: bool, dora: bool = False
) -> DispatchCounts:
    """Return the work of a forward or backward, with separate operators or fused as on GPUs (DoRA is never fused). A
    family without counts uses those of the most similar one."""
    if layer.traced:  # plus what the trace leaves out: adapters and routed experts
        rest = count_dispatch(shape, replace(layer, traced=None), phase, length, separate=separate, dora=dora)
        bare = replace(layer, traced=None, plain_lora=(), expert_lora=(), expert=0, experts=0)
        without = count_dispatch(shape, bare, phase, length, separate=separate)
        count = {what: layer.traced.at(f"{phase}_{what}", length) for what in ("operators", "views", "bytes")}
        operators = count["operators"] + VIEW * count["views"] + rest.operators - without.operators
        moved = count["bytes"] / length + rest.bytes - without.bytes
        return DispatchCounts(operators, rest.modules, moved, rest.routed)
    way = "separate" if separate else "fused"
    name = shape.base.family.model_type
    rows = load_operators()[way]
    if not layer.experts and f"{name}, dense" in rows:
        name = f"{name}, dense"
    if name not in rows:
        name = "mixtral" if layer.experts else "qwen3"
    row = rows[name][phase]
    of_adapters = load_operators()["separate" if dora else way][name][phase]
    size = layer_features(layer, shape.hidden, shape.top_k)

    def of(what: str, names: Collection[str] = size) -> float:
        every = row[what] | {name: of_adapters[what].get(name, 0.0) for name in OF_ADAPTERS}
        return float(sum(size[name] * value for name, value in every.items() if name in names))

    return DispatchCounts(of("operators") + VIEW * of("views"), of("modules"), of("bytes"), of("bytes", OF_ROUTED))
