"""Make a batch of rows: padded, or packed rows one below the other, or everything end to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from windlass.observe.steps import IGNORED

Row = dict[str, Any]
Collator = Callable[[list[Row]], dict[str, Any]]


class PaddedCollator:
    """Each row by itself, padded to the longest; an attention mask says what is padding."""

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, rows: list[Row]) -> dict[str, Any]:
        return {
            "input_ids": _pad([row["input_ids"] for row in rows], self.pad_token_id),
            "labels": _pad([_labels(row) for row in rows], IGNORED),
            "attention_mask": _pad([[1] * len(row["input_ids"]) for row in rows], 0),
        }


class PaddedPackingCollator(PaddedCollator):
    """Packed rows one below the other, padded to the longest: attention masks are then length x length per row.

    End to end, a mask would be one square over all rows, most of it computed in vain. Documents are separated by their
    positions, which begin anew at 0; each position of padding is a document of its own that no loss is computed on.
    (A router's balancing loss counts it as any other token.)
    """

    def __call__(self, rows: list[Row]) -> dict[str, Any]:
        batch = super().__call__(rows)
        del batch["attention_mask"]
        batch["position_ids"] = _pad([_positions(row) for row in rows], 0)
        batch["labels"][batch["position_ids"] == 0] = IGNORED
        return batch


class PaddingFreeCollator:
    """All rows end to end in one, for attention kernels that are given where documents begin.

    There is no attention mask: flash attention would take a mask of ones for one long document.
    """

    def __call__(self, rows: list[Row]) -> dict[str, Any]:
        positions = torch.cat([_positions(row) for row in rows])
        labels = torch.tensor([label for row in rows for label in _labels(row)])
        labels[positions == 0] = IGNORED  # a document's first token would be predicted from another document
        # Computed here, on the CPU: every layer would derive them from the positions and wait for the GPU.
        edges = torch.cat([(positions == 0).nonzero().flatten(), torch.tensor([len(positions)])]).to(torch.int32)
        lengths = edges.diff()
        return {
            "input_ids": torch.tensor([[token for row in rows for token in row["input_ids"]]]),
            "labels": labels[None],
            "position_ids": positions[None],
            **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), edges),
            **dict.fromkeys(("max_length_q", "max_length_k"), int(lengths.max())),
            "seq_idx": torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), lengths)[None],
        }


def _labels(row: Row) -> Any:
    return row.get("labels", row["input_ids"])


def _positions(row: Row) -> Tensor:
    """Counted from 0 in every document of the row."""
    return torch.cat([torch.arange(length) for length in row.get("seq_lengths", [len(row["input_ids"])])])


def _pad(rows: Sequence[Any], padding: int) -> Tensor:
    tensors = [torch.as_tensor(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=padding)
