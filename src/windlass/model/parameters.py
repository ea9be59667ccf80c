"""What is known of a checkpoint from its headers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final

from windlass.model.family import Family

BLOCK: Final = (128, 128)  # where config.json doesn't say: the block of every published block-scaled FP8 model


def block_of(quantization: Mapping[str, Any] | None) -> Sequence[int]:
    """Rows and columns that share a scale, where the weights are in FP8 with a scale for each block."""
    return (quantization or {}).get("weight_block_size") or BLOCK


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor as it lies in a safetensors file. `start` and `end` are byte offsets in that file."""

    key: str
    dtype: str  # safetensors' spelling: BF16, F8_E4M3, F32 …
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of one parameter and the stored tensor that fills it.

    Most parameters are one piece. Fused experts that are stored one expert at a time are many:
    `offset` is where the stored tensor's first element lies in the parameter, per dimension.
    True value = stored value x scale (where `scale` names a stored scale), rounded once to the model's dtype.
    """

    stored: Stored
    offset: tuple[int, ...]
    scale: Stored | None = None


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the causal language model, named and shaped as transformers has it once loaded."""

    name: str  # model.layers.0.self_attn.q_a_proj.weight
    shape: tuple[int, ...]
    part: str  # one of PARTS
    # Empty where no weights are at hand. Left out of the hash: experts that are stored one by one are thousands.
    pieces: tuple[Piece, ...] = field(default=(), hash=False)

    @property
    def count(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Base:
    """What the headers say. Tied heads are counted once, with the embedding."""

    name: str  # what to call it: Mistral-Small-4-119B-2603
    path: Path | None  # None: a published config, no weights at hand
    family: Family
    config: dict[str, Any]  # the text model's config.json
    dims: dict[str, int]  # the sizes that shapes and costs are made of (documented in family.py)
    parameters: tuple[Parameter, ...]
    wrapper: str | None = None  # architecture of the multimodal wrapper around it, if any
    unread: Mapping[Stored, str] = field(default_factory=dict)  # what the language model does not need, and why
    quantization: dict[str, Any] | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def block(self) -> Sequence[int]:
        return block_of(self.quantization)

    @property
    def total(self) -> int:
        return sum(parameter.count for parameter in self.parameters)
