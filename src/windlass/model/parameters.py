"""A base model's parameters, and the stored tensors that fill them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

from windlass.model.family import Family, Wrapper

BLOCK: Final = (128, 128)  # if config.json gives none: the block of every published block-scaled FP8 model


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor in a safetensors file. `start` and `end` are byte offsets in that file."""

    key: str
    dtype: str  # safetensors' spelling: BF16, F8_E4M3, F32 …
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Packed:
    """The encoding of a weight that is stored in 4 bits, two codes per byte."""

    kind: str  # a name of settings.FOUR_BITS
    block: int  # columns that share a scale
    transposed: bool  # the file's rows are the parameter's columns
    # nf4: state, table, and the tensors that decode quantized scales; nvfp4: what divides scales; uint4: zero points
    more: tuple[Stored, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of one parameter and the stored tensor that fills it.

    Most parameters are one piece. Fused experts that are stored one expert at a time have many: `offset` is the index
    of the stored tensor's first element in the parameter, per dimension.
    True value = stored value x scale (if `scale` names a stored scale), rounded once to the model's dtype.
    """

    stored: Stored
    offset: tuple[int, ...]
    scale: Stored | None = None
    packed: Packed | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the values, in the parameter's orientation."""
        if self.packed is None:
            return self.stored.shape
        *outer, rows, half = self.stored.shape
        return (*outer, 2 * half, rows) if self.packed.transposed else (*outer, rows, 2 * half)

    @property
    def tensors(self) -> tuple[Stored, ...]:
        """Return all stored tensors that the values are computed from."""
        more = self.packed.more if self.packed else ()
        return (self.stored, *((self.scale,) if self.scale else ()), *more)


class Spelling(NamedTuple):
    """One stored tensor's name, its shape, and the offset of its first element in the parameter that it fills.

    A `#` in the name stands for the index in the parameter's first dimension: experts that are stored one by one.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the causal language model, with the name and shape it has in transformers."""

    name: str  # model.layers.0.self_attn.q_a_proj.weight
    shape: tuple[int, ...]
    part: str  # one of PARTS
    # Empty if there are no weights here. Not hashed: experts that are stored one by one have thousands.
    pieces: tuple[Piece, ...] = field(default=(), hash=False)
    linear: bool = False  # the weight of an nn.Linear, which PEFT adapts by its module's name
    buffer: bool = False  # stored, but not counted as a parameter
    transposed: bool = False  # experts as [E, in, out], where most have [E, out, in]
    # Ways in which files store it other than under its own name.
    spellings: tuple[tuple[Spelling, ...], ...] = field(default=(), hash=False, repr=False)

    @property
    def count(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Base:
    """The model that an adapter is trained on, as described by config.json and headers.

    A tied head is counted once, with the embedding.
    """

    name: str  # display name: Mistral-Small-4-119B-2603
    path: Path | None  # None: a published config, without weights
    family: Family
    config: dict[str, Any]  # the text model's config.json
    dims: dict[str, int]  # the sizes that shapes and costs are computed from (documented in family.py)
    parameters: tuple[Parameter, ...]
    wrapper: Wrapper | None = None  # the multimodal model around it, if any
    unread: Mapping[Stored, str] = field(default_factory=dict)  # tensors that the language model does not need, and why
    quantization: dict[str, Any] | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def block(self) -> Sequence[int]:
        """Return the rows and columns that share a scale in block-scaled FP8 weights."""
        return (self.quantization or {}).get("weight_block_size") or BLOCK

    @property
    def method(self) -> str:
        """Return how the checkpoint is quantized: fp8, mxfp4, bitsandbytes, nvfp4, int4, uint4; empty if it isn't."""
        return "" if self.quantization is None else self.quantization.get("quant_method", "nf4")

    @property
    def scale_suffix(self) -> str:
        """Return what follows an FP8 weight's name in that of its scale."""
        return "_scale" if "published" in (self.quantization or {}) else "_scale_inv"

    @property
    def positions(self) -> int | None:
        """Return the tokens of the longest row that the model supports, if config.json has them."""
        values = [self.config.get(key) for key in ("max_position_embeddings", "n_positions", "max_seq_len")]
        return next((value for value in values if isinstance(value, int) and value > 0), None)

    @property
    def total(self) -> int:
        return sum(parameter.count for parameter in self.parameters if not parameter.buffer)

    def stored(self) -> Iterator[Stored]:
        """Yield every tensor of the model's files: weights, scales, and those that are not read."""
        for parameter in self.parameters:
            for piece in parameter.pieces:
                yield from piece.tensors
        yield from self.unread
