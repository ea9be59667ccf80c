"""Constants that the engine runs with and the planner computes with. No torch."""

from __future__ import annotations

from typing import Final, NamedTuple


class FourBits(NamedTuple):
    """A way to store weights in 4 bits: codes, two in a byte, with a scale per block of a row.

    All that is particular to a format is here, but how its tensors are found (model/packed.py), its scales decoded
    (weights/fill.py), and both a second time (weights/certificate.py).
    """

    block: int  # columns that share a scale, if nothing in a checkpoint says how many
    numbers: tuple[float, ...]  # what the 16 codes stand for
    scale: int = 2  # bytes kept for each block: its scale, its zero point
    error: float = 0.0  # relative RMS error of normally distributed weights, where windlass quantizes them
    beside: tuple[str, ...] = ()  # how names of stored tensors beside `_packed` end: compressed-tensors' formats
    kept: str = ""  # dtype of what is kept behind the codes of published rows, as safetensors spells it; "": as stored
    first_is_upper: bool = False  # in a byte, as stored
    is_signed: bool = False  # scales may be below zero
    is_divided: bool = False  # scales are in 8 bits, and one number of each matrix divides them
    has_zero_points: bool = False  # which are subtracted from the codes' numbers
    empty: tuple[float, ...] = (0.0,)  # numbers of a block of zeros

    @property
    def bytes(self) -> float:
        """Return the bytes per weight."""
        return 0.5 + self.scale / self.block


# --- dtypes of the base ---

NORMAL: Final = (  # quantiles of the normal distribution (QLoRA, appendix E), as bitsandbytes has them in float32
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
FLOATS: Final = tuple(sign * size for sign in (1, -1) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
INTEGERS: Final = tuple(map(float, range(-8, 8)))
# nf4 is bitsandbytes' format; its scales may be below zero, since it rounds them, and it writes the lowest number for
# zeros on a GPU. windlass reads the others but never makes them: gpt_oss's, and compressed-tensors', whose config has
# the block. AutoRound's int4 has the sign of a block's largest value in its scale.
FOUR_BITS: Final = {
    "nf4": FourBits(64, NORMAL, error=0.092, kept="F32", first_is_upper=True, is_signed=True, empty=(0.0, -1.0)),
    "mxfp4": FourBits(32, FLOATS, kept="BF16"),
    "nvfp4": FourBits(16, FLOATS, 1, beside=("_scale", "_global_scale"), kept="U8", is_divided=True),
    "int4": FourBits(128, INTEGERS, beside=("_scale",), is_signed=True),
    "uint4": FourBits(128, INTEGERS, 4, beside=("_scale", "_zero_point"), has_zero_points=True),
}
PUBLISHED_NF4: Final = FOUR_BITS["nf4"]._replace(scale=4, error=0.0)  # its scales are exact in float32 alone
PUBLISHED: Final = ("fp8", "mxfp4", "nvfp4", "int4", "uint4")  # only for checkpoints published in this dtype
# Suffix of a layout's name for the dtype of its base.
IN_NAMES: Final = {name: f", {name.upper()}" for name in ("fp8", *FOUR_BITS)}

# --- loading ---

# The loader converts so many values at a time (4 MiB in float32) in each of its threads: network file systems answer
# concurrent reads faster than sequential ones.
LOADER_THREADS: Final = 4
CONVERTED_VALUES: Final = 2**20

# --- products and loss ---

# Most bytes of a quantized stack of experts that are dequantized at once, but at least so many columns of each expert.
DEQUANTIZED_BYTES: Final = 2**30
DEQUANTIZED_COLUMNS: Final = 128
# TRL 1.16's fused head projects tiles of this many tokens by this many vocabulary entries.
TILE_TOKENS: Final = 4096
TILE_VOCABULARY: Final = 32768
# Linear layers of one module with the same input: when fused, their adapters share the product with it.
FUSED_INPUTS: Final = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("q_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
)

# --- recomputed layers ---

# Layer inputs on a GPU at once while all others are in host memory: the one that a layer computes with, and the one on
# its way.
INPUTS_ON_DEVICE: Final = 2

# --- attention on a CPU ---

# Elements in a packed row's query from which a CPU computes attention by document: for fewer, the full square takes no
# longer than a call per document.
BY_DOCUMENT_ELEMENTS: Final = 2**16
# Documents are padded to multiples of this many tokens: torch keeps about 4 MiB of code for each length it has seen.
DOCUMENT_TOKENS: Final = 64
# Queries of split rows that are computed at once under an explicit mask, of a window or of all heads that share keys.
SPLIT_QUERIES: Final = 256

# Global batches that are sorted by length together: more of them pad less, fewer shuffle better. Transformers' own
# length-grouped sampler uses fifty, too.
WINDOW_BATCHES: Final = 50
