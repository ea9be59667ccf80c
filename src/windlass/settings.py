"""Constants that the engine runs with and the planner computes with. No torch."""

from __future__ import annotations

from typing import Final, NamedTuple


class FourBits(NamedTuple):
    """A way to store weights in 4 bits, with one scale per block of a row."""

    block: int
    error: float  # relative RMS error of normally distributed weights
    scale: int = 2  # bytes per scale

    @property
    def bytes(self) -> float:
        """Return the bytes per weight."""
        return 0.5 + self.scale / self.block


# --- dtypes of the base ---

# nf4 in blocks of 64 is bitsandbytes' format. windlass reads the others but never makes them. nvfp4, int4 (symmetric)
# and uint4 (with zero points, which take as many bytes as scales) are compressed-tensors', whose config has the block.
FOUR_BITS: Final = {
    "nf4": FourBits(64, 0.092),
    "mxfp4": FourBits(32, 0),
    "nvfp4": FourBits(16, 0, 1),
    "int4": FourBits(128, 0),
    "uint4": FourBits(128, 0, 4),
}
PUBLISHED_NF4: Final = FourBits(64, 0, 4)  # bitsandbytes' scales are exact in float32 alone
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
