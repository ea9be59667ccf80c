"""Micro-batches of pairs: each row is a chosen and a rejected answer to the same prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from windlass.data.collate import Row
from windlass.data.prepare import PreparedData
from windlass.observe.steps import IGNORED
from windlass.train.collate import FILL, ROW, Batch, Collate, Pairs, read_sources
from windlass.train.fsdp import get_device


@dataclass(frozen=True)
class PairCollate(Collate):
    """Collates pairs."""

    reference: Tensor | None = None  # by row number: log-probabilities of chosen and rejected answer
    fill: ClassVar[Row] = {"input_ids": [0] * 4, "labels": [IGNORED] * 4, "seq_lengths": [2, 2], ROW: FILL}

    def list_lengths(self, rows: Sequence[Row]) -> list[int]:
        return list(chain.from_iterable(row["seq_lengths"] for row in rows))

    def __call__(self, rows: Sequence[Row]) -> Batch:
        assert self.cut is None, "pairs are not cut"
        batch = super().__call__(rows)
        lengths = np.bincount(batch.sequences.numpy(), minlength=2 * len(rows))
        for row, of_pair in zip(rows, lengths.reshape(-1, 2), strict=True):
            assert len(row["seq_lengths"]) == 2, f"row {row[ROW]} is no pair"
            assert row[ROW] == FILL or of_pair.all(), f"row {row[ROW]} has an answer without a token"
            assert row[ROW] == FILL or begins_behind_prompt(row), f"row {row[ROW]} has loss on tokens of its prompt"
        reference = torch.zeros(0)
        if self.reference is not None:
            numbers = torch.tensor([row[ROW] for row in rows])
            reference = self.reference[numbers].flatten()  # a filler's is the last row's, and counts nowhere
        pairs = Pairs(batch.sequences, torch.from_numpy(lengths), reference, read_sources(rows))
        return replace(batch, pairs=pairs, supervised=len(batch.rows), sources=None)


def begins_behind_prompt(row: dict[str, Any]) -> bool:
    """Return whether the loss of both sequences of a pair begins behind the same tokens. The first token, which nothing
    precedes, may be an answer's."""
    edges = [int(row["seq_lengths"][0])]
    labels = np.split(row.get("labels", row["input_ids"]), edges)
    ids = np.split(row["input_ids"], edges)
    chosen, rejected = (int((part != IGNORED).argmax()) for part in labels)
    return chosen == rejected > 0 and bool((ids[0][1:chosen] == ids[1][1:rejected]).all())


def make_collate(data: PreparedData, pad_token_id: int, *, kept: bool = False, **options: Any) -> Collate:
    """Return what collates the rows of a run. kept: of a kept set, which are no pairs."""
    pairs = data.pairs and not kept
    collator = data.collator(pad_token_id, on_cpu=get_device().type == "cpu", pairs=pairs)
    return (PairCollate if pairs else Collate)(collator, **options)
