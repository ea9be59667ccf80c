"""Attention of packed rows on a GPU: by document, with torch's flash attention for sequences of any length.

A mask of documents is a square for every row, and a kernel that reads one computes all of it: at 4,096 tokens a layer
of Mistral Small 4 takes 1.5 times as long. Here the mask that transformers passes to its layers is only where documents
begin. Registered as an attention implementation of transformers; the plan says where it is used
(plan/split_rows.py, `needs_mask`). Rows without several documents are left to transformers' own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from windlass.compat import GROUPED
from windlass.train.kernels.compare import compute_values

NAME: Final = "windlass-documents"  # of this implementation among transformers' own
WIDEST: Final = 256  # head that flash attention can compute
ALIGNED: Final = 8  # the kernel wants heads of multiples of so many numbers, queries', keys' and values' alike
CLOSE: Final = 0.02  # relative, to attention of each document by itself
ABSENT: Final = (RuntimeError, ValueError)  # what torch raises on a GPU before Ampere, or without the kernel


class DocumentMask(NamedTuple):
    """Which tokens see each other: what transformers passes to attention as its mask."""

    edges: Tensor  # where each document begins in all rows laid end to end, then where the last one ends
    longest: int
    window: int | None = None


CURRENT: ContextVar[DocumentMask | None] = ContextVar("documents", default=None)


@contextmanager
def separate(edges: Tensor | None, longest: int) -> Iterator[None]:
    """Let masks that are made here be these documents. Layers that are recomputed in the backward keep theirs."""
    token = CURRENT.set(None if edges is None else DocumentMask(edges, longest))
    try:
        yield
    finally:
        CURRENT.reset(token)


def make_mask(*given: Any, local_size: int | None = None, **others: Any) -> DocumentMask | Tensor | None:
    """Return this forward's documents; `local_size`: the sliding window. For transformers' registry."""
    current = CURRENT.get()
    if current is None:
        mask: Tensor | None = sdpa_mask(*given, local_size=local_size, **others)
        return mask
    return current._replace(window=local_size)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: DocumentMask | Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return [rows, tokens, heads, width]. For transformers' registry."""
    if not isinstance(attention_mask, DocumentMask):
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return output
    unknown = [name for name in ("s_aux", "softcap", "position_bias") if options.get(name) is not None]
    assert not unknown, f"attention by document has no {unknown}"
    assert not options.get("dropout"), "attention by document has no dropout"
    device = query.device.type
    if torch.is_autocast_enabled(device):
        query, key, value = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (query, key, value))
    rows, _, tokens, width = query.shape
    own = value.shape[-1]
    wide = -(-max(width, own) // ALIGNED) * ALIGNED
    assert wide <= WIDEST, f"attention by document computes heads of at most {WIDEST}, not {wide}"
    scaling = scaling or width**-0.5

    def lay_flat(heads: Tensor) -> Tensor:
        narrower = heads.shape[-1] < wide
        padded = nn.functional.pad(heads, (0, wide - heads.shape[-1])) if narrower else heads
        return padded.transpose(1, 2).flatten(0, 1)

    attended = attend_flat(lay_flat(query), lay_flat(key), lay_flat(value), attention_mask, scaling)
    return attended[..., :own].reshape(rows, tokens, -1, own), None


def attend_flat(query: Tensor, key: Tensor, value: Tensor, documents: DocumentMask, scaling: float | None) -> Tensor:
    """Return [tokens, heads, width] of rows laid end to end."""
    edges, longest, window = documents
    seen = -1 if window is None or window >= longest else window - 1
    grouped = GROUPED if query.shape[1] != key.shape[1] else {}
    attended = varlen_attn(
        query, key, value, edges, edges, longest, longest, scale=scaling, window_size=(seen, 0), **grouped
    )
    assert isinstance(attended, Tensor)
    return attended


def check_documents(device: torch.device) -> bool:
    """Return whether this device computes attention by document: values and gradients, with heads that share keys."""
    try:
        return compare_documents(device) < CLOSE
    except ABSENT:
        return False


@torch.enable_grad()
def compare_documents(device: torch.device) -> float:
    """Return how far values and gradients are from those of each document by itself, in float32, relative."""
    lengths = [5, 1, 130, 56]
    dice = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), heads, 64) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape, generator=dice).to(device, torch.bfloat16) for shape in shapes]
    edges = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend_flat(query, key, value, DocumentMask(edges, max(lengths)), None)

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = (torch.split(tensor.transpose(0, 1), lengths, 1) for tensor in (query, key, value))
        sdpa = nn.functional.scaled_dot_product_attention
        each = [sdpa(q, k, v, is_causal=True, enable_gqa=True) for q, k, v in zip(*parts, strict=True)]
        return torch.cat(each, 1).transpose(0, 1)

    with torch.autocast(device.type, enabled=False):
        found = compute_values(ours, inputs)
        expected = compute_values(plain, [tensor.float() for tensor in inputs])
    both = [(a.detach(), b.detach()) for a, b in zip(found, expected, strict=True)]
    return max(float((a - b).norm() / b.norm()) for a, b in both)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, make_mask)
