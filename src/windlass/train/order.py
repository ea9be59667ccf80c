"""Which rows come when: by seed and epoch alone, the same on every number of ranks, each known by its number."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from datasets import Dataset, IterableDataset, concatenate_datasets
from torch.utils.data import Sampler

from windlass.observe.steps import IGNORED

ROW = "row"  # the column that carries each row's number in the data set into its batch
FILL = -1  # in its place, for the row that fills a short last step


class Order(Sampler[int]):
    """The rows of an epoch as `rows(epoch)` gives them, filled up to whole steps with the number after the last row.

    That row is learnt nothing from, so a short last step has the same loss on every number of ranks. (Accelerate
    would give each rank as many rows by taking some twice.)
    """

    def __init__(self, rows: Callable[[int], Any], count: int, step: int) -> None:
        self.rows = rows
        self.count = count
        self.filled = math.ceil(count / step) * step
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from self.rows(self.epoch).tolist()
        yield from [self.count] * (self.filled - self.count)

    def __len__(self) -> int:
        return self.filled


def numbered(rows: Any) -> Any:
    """With a column of row numbers, for messages about a batch, and the row that fills a short last step."""
    if isinstance(rows, IterableDataset):  # no last step that is known to be one
        return rows.map(lambda _, number: {ROW: number}, with_indices=True)
    two = {"input_ids": rows[0]["input_ids"][:2], "seq_lengths": [2], "labels": [IGNORED] * 2}
    fill = Dataset.from_dict({name: [two[name]] for name in rows.column_names}, features=rows.features)
    return concatenate_datasets([rows, fill]).add_column(ROW, [*range(len(rows)), FILL])


class Rows:
    """A collator that hands the row numbers on beside the batch of the one that it wraps."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        if ROW not in examples[0]:  # a set that is evaluated on
            batch: dict[str, Any] = self.collator(examples)
            return batch
        rows = [example.pop(ROW) for example in examples]
        for row, example in zip(rows, examples, strict=True):
            if row == FILL:
                example["labels"] = [IGNORED] * len(example["input_ids"])
        return {**self.collator(examples), ROW: [row for row in rows if row != FILL]}
