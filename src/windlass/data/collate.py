"""Rows of tokens into the batch a model is given: padded, end to end, or packed rows one below the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from windlass.observe.steps import IGNORED

Row = dict[str, Any]
Batch = dict[str, Any]
Collator = Callable[[list[Row]], Batch]


class PaddedCollator:
    """Each row by itself, padded to the longest; an attention mask says what is padding."""

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, rows: list[Row]) -> Batch:
        return {
            "input_ids": _stack([row["input_ids"] for row in rows], self.pad_token_id),
            "labels": _stack([_labels(row) for row in rows], IGNORED),
            "attention_mask": _stack([[1] * len(row["input_ids"]) for row in rows], 0),
        }


class PaddingFreeCollator:
    """All rows end to end in one, for attention kernels that are given where documents begin.

    There is no attention mask: flash attention would take a mask of ones for one long document.
    """

    def __call__(self, rows: list[Row]) -> Batch:
        positions = torch.cat([_positions(row) for row in rows])
        labels = torch.tensor([label for row in rows for label in _labels(row)])
        labels[positions == 0] = IGNORED  # a document's first token would be predicted from another document
        starts = (positions == 0).nonzero().flatten()
        edges = torch.cat([starts, torch.tensor([len(positions)])]).to(torch.int32)
        lengths = edges.diff()
        longest = int(lengths.max())
        documents = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), lengths)
        return {
            "input_ids": torch.tensor([[token for row in rows for token in row["input_ids"]]]),
            "labels": labels[None],
            "position_ids": positions[None],
            # Computed here, on the CPU: every layer would derive them from the positions and wait for the GPU.
            "cu_seq_lens_q": edges,
            "cu_seq_lens_k": edges,
            "max_length_q": longest,
            "max_length_k": longest,
            "seq_idx": documents[None],
        }


class PaddedPackingCollator:
    """Packed rows one below the other, padded to the longest: attention masks are then length x length per row.

    End to end, a mask would be one square over all rows, most of it computed in vain. Documents are separated by their
    positions, which begin anew at 0; each position of padding is a document of its own that no loss is computed on.
    (A router's balancing loss counts it as any other token.)
    """

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, rows: list[Row]) -> Batch:
        positions = _stack([_positions(row) for row in rows], 0)
        labels = _stack([_labels(row) for row in rows], IGNORED)
        labels[positions == 0] = IGNORED
        return {
            "input_ids": _stack([row["input_ids"] for row in rows], self.pad_token_id),
            "labels": labels,
            "position_ids": positions,
        }


def _labels(row: Row) -> Sequence[int]:
    labels: Sequence[int] = row["labels"] if "labels" in row else row["input_ids"]
    return labels


def _positions(row: Row) -> Tensor:
    """Counted from 0 in every document of the row."""
    return torch.cat([torch.arange(length) for length in row.get("seq_lengths", [len(row["input_ids"])])])


def _stack(rows: Sequence[Any], padding: int) -> Tensor:
    tensors = [torch.as_tensor(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=padding)
