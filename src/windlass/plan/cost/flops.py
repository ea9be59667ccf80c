"""Floating-point operations per token. A frozen weight is multiplied forward and for the gradient of its input only."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.plan.cost.shape import Shape
from windlass.plan.cost.work import Work


@dataclass(frozen=True, slots=True)
class Flops:
    """Per token, except `fixed`: per micro-batch, however many tokens it has."""

    model: float  # forward and backward
    again: float  # recomputation
    fixed: float


def flops(work: Work, shape: Shape) -> Flops:
    """4 per active frozen parameter, 6 per active adapter parameter, attention; recomputation apart."""
    adapter, fixed = _adapter(work, shape)
    attention = causal_attention(shape, work.document or work.batch.length)
    if work.masked:  # kernels pass over the upper half of the square only if told that it is all there is to mask
        attention *= 2
    model = 4 * shape.active + 6 * adapter + 3 * attention
    again = 0.0 if work.full_logits else 2.0 * shape.head  # the fused head projects again in its backward
    if work.layout.activation_checkpointing:
        again += 2 * (shape.active - shape.head) + 2 * adapter + attention
        fixed *= 4 / 3
    return Flops(model, again, fixed)


def causal_attention(shape: Shape, length: int) -> float:
    """Of one forward, per token: scores and their product with the values, over the unmasked half of the square."""
    return float(sum((layer.query + layer.attended) * length for layer in shape.layers))


def _adapter(work: Work, shape: Shape) -> tuple[float, float]:
    """Adapter parameters that multiply each token, and operations that merging expert adapters costs per batch."""
    active = fixed = 0.0
    for layer in shape.layers:
        for lora in layer.lora:
            parameters = lora.parameters
            if not lora.experts:
                active += parameters
            elif work.expert_path == "split":
                active += parameters * shape.top_k / lora.experts
            else:
                # forward: B A for all experts; backward: the weight's whole gradient, then its two projections
                fixed += 3 * 2.0 * lora.experts * lora.r * lora.inputs * lora.outputs
                fixed += 2.0 * work.batch.tokens * shape.top_k * lora.inputs * lora.outputs
    return active, fixed
