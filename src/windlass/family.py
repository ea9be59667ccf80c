"""What differs per model family, as data. Everything else in windlass is the same for every family."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """One row per `model_type` of transformers' config.json."""

    model_type: str
    causal_lm: str  # class that is trained: Mistral4ForCausalLM
    layer: str  # class that is sharded layer by layer: Mistral4DecoderLayer
