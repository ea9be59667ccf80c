"""Arithmetic of one token, counted on the live model: what `model_tflops` and `mfu` are computed from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from windlass.observe.meter.experts import routers


@dataclass(frozen=True, slots=True)
class Flops:
    """Of forward and backward for one token; what recomputation adds is apart."""

    model: float
    recompute: float
    formula: str


def count(model: nn.Module, sequence: int, *, recomputes: bool) -> Flops:
    """2 per weight in forward, 2 for the gradient of the input, 2 more only for weights that learn.

    A token passes through top_k of its layer's experts; looking up an embedding multiplies nothing; causal attention
    reads half the sequence on average. Shapes are the whole model's, also where a rank holds a shard.
    """
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    head = _head(model)
    chosen = [(module.top_k, experts) for module, experts in routers(model)]
    active = learning = 0.0
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or (id(parameter) in embeddings and id(parameter) != head):
            continue
        numbers = math.prod(parameter.shape) * _share(name, parameter, chosen)
        active += numbers
        learning += numbers if parameter.requires_grad else 0.0
    attention = attention_flops(model, sequence)
    forward = 2 * active + attention
    formula = f"4 x {active:.4g} active weights + 2 x {learning:.4g} that learn + 3 x {attention:.4g} attention"
    return Flops(2 * forward + 2 * learning + attention, forward if recomputes else 0.0, formula)


def _share(name: str, parameter: Tensor, chosen: Sequence[tuple[Any, int]]) -> float:
    """The share of a weight that one token uses: all of it, unless experts are stacked in it.

    Experts are stacked in the first dimension (of which a rank may hold a part), their adapters in the rows.
    """
    if ".experts." not in name:
        return 1.0
    for top_k, experts in chosen:
        if parameter.dim() == 3 and experts % parameter.shape[0] == 0:
            return float(top_k) / int(parameter.shape[0])
        if "lora_" in name and parameter.dim() == 2:
            return float(top_k) / experts
    return 1.0


def attention_flops(model: nn.Module, sequence: int) -> float:
    """Scores and values of all layers for one token in forward, half the sequence on average."""
    config: Any = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    layers, heads = getattr(config, "num_hidden_layers", 0), getattr(config, "num_attention_heads", 0)
    if not layers or not heads:
        return 0.0
    width = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    key = getattr(config, "qk_head_dim", None) or width
    value = getattr(config, "v_head_dim", None) or width
    return 2.0 * layers * heads * (key + value) * sequence / 2


def _head(model: nn.Module) -> int | None:
    """The output projection counts even where it is tied to the embedding."""
    getter = getattr(model, "get_output_embeddings", None)
    module = getter() if callable(getter) else None
    weight = getattr(module, "weight", None)
    return id(weight) if isinstance(weight, Tensor) else None
