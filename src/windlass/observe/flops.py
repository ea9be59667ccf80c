"""FLOPs of one token, counted on the live model, and the rates computed from them: tokens/s, TFLOP/s, MFU."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from windlass import hardware
from windlass.errors import UserError


def find_routers(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """Return every module that chooses experts, in the order of the layers, with the number of experts.

    transformers' routers all return (logits, weights, indices) and have `num_experts` and `top_k`.
    """
    kinds = {"num_experts": int, "top_k": int, "weight": Tensor}
    modules: list[Any] = list(model.modules())
    routers = [m for m in modules if all(isinstance(getattr(m, name, None), kind) for name, kind in kinds.items())]
    return [(router, router.num_experts) for router in routers]


@dataclass(frozen=True, slots=True)
class Flops:
    """Forward and backward FLOPs of one token; recomputation is separate. Attention adds more for longer sequences."""

    weights: float = 0.0
    attention: float = 0.0
    recompute_weights: float = 0.0
    recompute_attention: float = 0.0
    formula: str = "given by the plan"

    def model(self, length: int) -> float:
        return self.weights + self.attention * length

    def recompute(self, length: int) -> float:
        return self.recompute_weights + self.recompute_attention * length


def count_flops(model: nn.Module, *, recomputes: bool) -> Flops:
    """Count 2 per weight in forward, 2 for the gradient of the input, 2 more only for trainable weights.

    A token passes through top_k of its layer's experts; an embedding lookup multiplies nothing; causal attention
    reads half the sequence on average. Shapes are the unsharded model's, also where a rank stores a shard.
    """
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    get_head = getattr(model, "get_output_embeddings", None)
    head = getattr(get_head() if callable(get_head) else None, "weight", None)  # counts even if tied to the embedding
    chosen: list[tuple[int, int]] = [(router.top_k, experts) for router, experts in find_routers(model)]  # type: ignore[misc]
    active = trainable = 0.0
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or (id(parameter) in embeddings and parameter is not head):
            continue
        weights = math.prod(parameter.shape) * _share_of_a_token(name, parameter, chosen)
        active += weights
        trainable += weights if parameter.requires_grad else 0.0

    config: Any = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    layers = getattr(config, "num_hidden_layers", 0)
    heads = getattr(config, "num_attention_heads", 0)
    attention = 0.0  # scores and values of all layers in forward, for each token of the sequence
    if layers and heads:
        width = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
        key = getattr(config, "qk_head_dim", None) or width
        value = getattr(config, "v_head_dim", None) or width
        attention = 2.0 * layers * heads * (key + value) / 2
    formula = f"4 x {active:.4g} active weights + 2 x {trainable:.4g} trainable + 3 x {attention:.4g} x sequence"
    recompute = (2 * active, attention) if recomputes else (0.0, 0.0)
    return Flops(4 * active + 2 * trainable, 3 * attention, *recompute, formula)


def _share_of_a_token(name: str, parameter: Tensor, chosen: list[tuple[int, int]]) -> float:
    """Return the share of a weight that one token uses: all of it, unless it stacks experts.

    Experts are stacked in the first dimension (of which a rank may store a part), their adapters in the rows.
    """
    if ".experts." in name:
        for top_k, experts in chosen:
            if parameter.dim() == 3 and experts % parameter.shape[0] == 0:
                return top_k / int(parameter.shape[0])
            if "lora_" in name and parameter.dim() == 2:
                return top_k / experts
    return 1.0


class RateMeter:
    """Converts a step's tokens and seconds to rates."""

    def __init__(self, device: torch.device, flops: Flops, seq_len: int | None) -> None:
        self.flops = flops
        self.seq_len = seq_len
        self.peak_tflops: float | None = None
        self.why_no_peak = f"no peak is known for {device.type}"
        if device.type == "cuda":
            try:
                self.peak_tflops = hardware.find_gpu(torch.cuda.get_device_name(device)).bf16_tflops
                self.why_no_peak = ""
            except UserError as error:
                self.why_no_peak = error.problems[0].problem

    def of(self, tokens: float, seconds: float, length: int) -> dict[str, float]:
        if not seconds or not tokens:
            return {}
        length = self.seq_len or length
        model = self.flops.model(length)
        rates = {}
        if model:
            rates["model_tflops"] = model * tokens / seconds / 1e12
            if self.peak_tflops:
                rates["mfu"] = rates["model_tflops"] / self.peak_tflops
                rates["hfu"] = rates["mfu"] * (1 + self.flops.recompute(length) / model)
        return rates

    def as_dict(self) -> dict[str, Any]:
        length = self.seq_len or 0
        flops = self.flops
        counted = {"flops_per_token": flops.model(length), "recompute_flops_per_token": flops.recompute(length)}
        peak = {"peak_tflops": self.peak_tflops, "why_no_peak": self.why_no_peak}
        return {"sequence": length, **counted, "formula": flops.formula, **peak}
