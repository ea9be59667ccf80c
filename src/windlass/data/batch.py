"""Packed rows as the batch that a model is given, where a mask keeps their documents apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from windlass.observe.steps import IGNORED


class Apart:
    """Packed rows one below the other, filled up to the longest: a mask is then length x length for each of them.

    TRL's collator lays a micro-batch's rows end to end, for kernels that are told where documents begin. Under a mask
    that makes one square over all rows, of which all but the rows' own squares is computed in vain. Documents are told
    apart by their positions, which begin anew at 0; what fills up a row is a document of its own at each position, and
    nobody learns it. (A router's balancing loss counts it as any other token.)
    """

    def __init__(self, padding: int) -> None:
        self.padding = padding

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        shape = (len(rows), longest)
        ids, labels = torch.full(shape, self.padding), torch.full(shape, IGNORED)
        positions = torch.zeros(shape, dtype=torch.long)
        for i, row in enumerate(rows):
            length = len(row["input_ids"])
            ids[i, :length] = torch.tensor(row["input_ids"])
            labels[i, :length] = torch.tensor(row.get("labels", row["input_ids"]))
            positions[i, :length] = torch.cat([torch.arange(count) for count in row["seq_lengths"]])
        labels[positions == 0] = IGNORED
        return {"input_ids": ids, "labels": labels, "position_ids": positions}
