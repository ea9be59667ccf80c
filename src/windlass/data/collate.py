"""Collate rows into a batch: padded, packed rows stacked, or all rows laid end to end."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import from_numpy

from windlass.observe.steps import IGNORED

Row = dict[str, Any]
Array = np.ndarray[Any, Any]  # torch's functions take microseconds per call, numpy's a tenth of that
Collator = Callable[[list[Row]], dict[str, Any]]


class PaddedCollator:
    """Pads each row to the longest or further; an attention mask marks padding."""

    def __init__(self, pad_token_id: int, multiple: int = 1) -> None:
        self.pad_token_id = pad_token_id
        self.multiple = multiple

    def __call__(self, rows: list[Row]) -> dict[str, Any]:
        ids = _pad([row["input_ids"] for row in rows], self.pad_token_id, self.multiple)
        labels = _pad([_labels(row) for row in rows], IGNORED, self.multiple)
        lengths = np.array([len(row["input_ids"]) for row in rows])
        mask = (np.arange(ids.shape[1]) < lengths[:, None]).astype(np.int64)
        return {"input_ids": from_numpy(ids), "labels": from_numpy(labels), "attention_mask": from_numpy(mask)}


class PairCollator(PaddedCollator):
    """Pads the sequences of each pair as rows of their own: chosen and rejected of the first pair, then of the next."""

    def __call__(self, rows: list[Row]) -> dict[str, Any]:
        sequences: list[Row] = []
        for row in rows:
            edges = np.cumsum(row["seq_lengths"])[:-1]
            parts = zip(np.split(row["input_ids"], edges), np.split(_labels(row), edges), strict=True)
            sequences += [{"input_ids": ids, "labels": labels} for ids, labels in parts]
        return super().__call__(sequences)


class PaddedPackingCollator(PaddedCollator):
    """Stacks packed rows, padded to the longest or further: attention masks are then length x length per row.

    End to end, one mask would be a square over all rows, most of it computed in vain. Positions that restart at 0
    separate documents; each padding position is a document of its own without loss.
    """

    def __call__(self, rows: list[Row]) -> dict[str, Any]:
        batch = super().__call__(rows)
        positions = _pad([_positions(row) for row in rows], 0, self.multiple)
        starts = positions == 0
        batch["labels"].numpy()[starts] = IGNORED
        # Where attention is computed by document, all of a row's padding is one.
        padding = batch["attention_mask"].numpy() == 0
        starts[:, 1:] &= ~(padding[:, 1:] & padding[:, :-1])
        edges = np.append(np.flatnonzero(starts), starts.size).astype(np.int32)
        documents = {"document_edges": from_numpy(edges), "longest_document": int(np.diff(edges).max())}
        return {**batch, "position_ids": from_numpy(positions), **documents}


class PaddingFreeCollator:
    """Lays all rows end to end, for attention kernels that are given the documents' boundaries.

    There is no attention mask: flash attention would take a mask of ones for one long document.
    """

    def __call__(self, rows: list[Row]) -> dict[str, Any]:
        positions = np.concatenate([_positions(row) for row in rows])
        labels = np.concatenate([_labels(row) for row in rows]).astype(np.int64)
        labels[positions == 0] = IGNORED  # a document's first token must not be predicted from another document
        # Computed here on the CPU: otherwise every layer derives them from the positions and waits for the GPU.
        edges = np.append(np.flatnonzero(positions == 0), len(positions)).astype(np.int32)
        lengths = np.diff(edges)
        return {
            "input_ids": from_numpy(np.concatenate([row["input_ids"] for row in rows]).astype(np.int64)[None]),
            "labels": from_numpy(labels[None]),
            "position_ids": from_numpy(positions[None]),
            **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), from_numpy(edges)),
            **dict.fromkeys(("max_length_q", "max_length_k"), int(lengths.max())),
            "seq_idx": from_numpy(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None]),
        }


def _labels(row: Row) -> Any:
    return row.get("labels", row["input_ids"])


def _positions(row: Row) -> Array:
    """Return positions counted from 0 in every document of the row."""
    return np.concatenate([np.arange(length) for length in row.get("seq_lengths", [len(row["input_ids"])])])


def _pad(rows: Sequence[Any], padding: int, multiple: int = 1) -> Array:
    longest = max(map(len, rows))
    padded = np.full((len(rows), longest + -longest % multiple), padding, np.int64)
    for into, row in zip(padded, rows, strict=True):
        into[: len(row)] = row
    return padded
