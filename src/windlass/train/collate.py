"""A micro-batch: rows collated, with the positions whose next token counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from windlass.data.collate import Collator, Row
from windlass.observe.steps import IGNORED
from windlass.train.long_rows import Cut

FILL: Final = -1  # row number of the filler that completes the last step; it has no supervised tokens
ROW: Final = "row"
SOURCE: Final = "source"  # the number of the data set that a row comes from, in mixes and evaluations


class Pairs(NamedTuple):
    """What a micro-batch compares. Sequence 2i is the chosen answer of pair i, 2i + 1 the rejected one."""

    sequences: Tensor  # of each target
    lengths: Tensor  # targets of each sequence; 0 of pairs that complete the last step
    reference: Tensor  # log-probability of each sequence under the reference; empty without one
    sources: Tensor | None  # data set of each pair, in mixes and evaluations


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch."""

    inputs: dict[str, Any]  # arguments of the model's forward
    targets: Tensor  # the tokens after the supervised positions
    collated: dict[str, Any]  # with labels and mask, in host memory, to count tokens without a device sync
    rows: list[int]  # row numbers in the data set
    tokens: int  # without padding
    sequences: Tensor  # of each target, in host memory
    supervised: int  # what the loss is a mean over: supervised tokens, or pairs
    sources: Tensor | None = None  # data set of each target, in mixes and evaluations
    mask: Tensor | None = None  # 1 for each token that the router's balancing loss counts; None: all
    pairs: Pairs | None = None  # of a preference objective

    def pin_memory(self) -> Self:
        return self._each(Tensor.pin_memory)

    def to(self, device: torch.device) -> Self:
        return self if device.type == "cpu" else self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def _each(self, move: Callable[[Tensor], Tensor]) -> Self:
        def move_any(value: Any) -> Any:
            return move(value) if isinstance(value, Tensor) else value

        return replace(
            self,
            inputs={name: move_any(value) for name, value in self.inputs.items()},
            targets=move(self.targets),
            sources=move_any(self.sources),
            mask=move_any(self.mask),
            pairs=self.pairs and Pairs._make(map(move_any, self.pairs)),
        )


@dataclass(frozen=True)
class Collate:
    """Collates rows into a `Batch` with its supervised positions.

    The attention mask of padded rows is dropped: padding follows a row's tokens and causal attention never looks ahead,
    so attention without a mask gives the same values with faster kernels.
    """

    collator: Collator
    mark_tokens: bool = False  # keep the mask, which a router's balancing loss needs
    cut: Cut | None = None  # to this rank's tokens of rows that several ranks share
    fill: ClassVar[Row] = {"input_ids": [0, 0], "labels": [IGNORED] * 2, "seq_lengths": [2], ROW: FILL}

    def list_lengths(self, rows: Sequence[Row]) -> list[int]:
        """Return the tokens of each sequence."""
        return [len(row["input_ids"]) for row in rows]

    def __call__(self, rows: Sequence[Row]) -> Batch:
        collated = self.collator(list(rows))
        inputs = {name: value for name, value in collated.items() if name not in ("labels", "attention_mask")}
        if self.mark_tokens:
            inputs["mask"] = mask = collated.get("attention_mask")
            fills = torch.tensor([row[ROW] == FILL for row in rows])
            if fills.any() and not fills.all():  # which would be balanced, too
                if mask is not None:
                    inputs["mask"] = mask * ~fills.repeat_interleave(len(mask) // len(rows))[:, None]
                else:
                    of_rows = torch.tensor([len(row["input_ids"]) for row in rows])
                    inputs["mask"] = (~fills).long().repeat_interleave(of_rows)[None]
        positions = collated.get("position_ids")
        inputs["several"] = positions is not None and bool((np.diff(positions.numpy()) != 1).any())
        labels = collated["labels"].numpy()
        following = np.full_like(labels, IGNORED)
        following[:, :-1] = labels[:, 1:]  # position i predicts the token at i + 1
        supervised = np.flatnonzero(following != IGNORED)
        inputs["supervised"] = torch.from_numpy(supervised)
        inputs["targets"] = torch.from_numpy(following.ravel()[supervised])
        lengths = self.list_lengths(rows)
        if len(labels) == len(lengths):
            which = supervised // labels.shape[1]
        else:  # laid end to end
            which = np.searchsorted(np.cumsum(lengths), supervised, side="right")
        sources = read_sources(rows)
        if sources is not None:
            inputs["sources"] = sources.repeat_interleave(len(lengths) // len(rows))[which]
        if self.cut:
            inputs, tokens_of_rows, here = self.cut(inputs, lengths)
            which = which[here.numpy()]
            collated["longest"] = labels.shape[1]
            collated["sequences"] = 0 if self.cut.rank else len(rows)  # counted once for the ranks that share them
            collated["input_ids"] = inputs["input_ids"]
        else:
            tokens_of_rows = torch.tensor([len(row["input_ids"]) for row in rows])
        tokens = int(tokens_of_rows.sum())
        targets = inputs.pop("targets")
        counts = (tokens, inputs["input_ids"].numel() - tokens, len(targets))  # what the recorder would count
        collated["counts"] = torch.tensor(counts, dtype=torch.float64)
        is_known = torch.tensor([row[ROW] != FILL for row in rows])
        known = [row[ROW] for row in rows if row[ROW] != FILL]
        return Batch(
            sources=inputs.pop("sources", None),
            mask=inputs.pop("mask", None),
            inputs=inputs,
            targets=targets,
            collated=collated,
            rows=known,
            tokens=int(tokens_of_rows[is_known].sum()),
            sequences=torch.from_numpy(which),
            supervised=len(targets),
        )


def read_sources(rows: Sequence[Row]) -> Tensor | None:
    """Return the data set of each row, if they say."""
    if not any(SOURCE in row for row in rows):
        return None
    return torch.from_numpy(np.array([row.get(SOURCE, [0])[0] for row in rows], np.int64))
