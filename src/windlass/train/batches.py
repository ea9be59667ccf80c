"""Which rows come when, and the micro-batches of this rank: the same steps on every number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from windlass.data.collate import Collator
from windlass.data.packing import to_numpy
from windlass.errors import UserError
from windlass.observe.steps import IGNORED
from windlass.train import group

FILL: Final = -1  # the number of a row without supervised tokens, which fills up a short last step
ROW: Final = "row"
SOURCE: Final = "source"  # of a row, which set of a mix, or of those evaluated
FILL_ROW: Final[dict[str, Any]] = {"input_ids": [0, 0], "labels": [IGNORED] * 2, "seq_lengths": [2], ROW: FILL}


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch."""

    inputs: dict[str, Any]  # what the model's forward takes
    collated: dict[str, Any]  # with labels and mask, in host memory: for counting without asking the device
    rows: list[int]  # their numbers in the data set
    tokens: int  # without padding

    @property
    def supervised(self) -> int:
        return len(self.inputs["targets"])

    def pin_memory(self) -> Self:
        return self._each(Tensor.pin_memory)

    def to(self, device: torch.device) -> Self:
        return self if device.type == "cpu" else self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def _each(self, move: Callable[[Tensor], Tensor]) -> Self:
        inputs = {name: move(value) if isinstance(value, Tensor) else value for name, value in self.inputs.items()}
        return replace(self, inputs=inputs)


@dataclass(frozen=True, slots=True)
class Collate:
    """Rows to a batch whose supervised positions are known.

    The attention mask of padded rows is left out: padding stands behind a row's tokens, and none of these looks ahead,
    so that attention without a mask (and its faster kernels) gives them the same values.
    """

    collator: Collator
    mark_tokens: bool = False  # keep the mask, for a router's balancing loss

    def __call__(self, rows: Sequence[dict[str, Any]]) -> Batch:
        collated = self.collator(list(rows))
        inputs = {name: value for name, value in collated.items() if name not in ("labels", "attention_mask")}
        if self.mark_tokens:
            inputs["tokens"] = collated.get("attention_mask")
        positions = collated.get("position_ids")
        inputs["several"] = positions is not None and bool((np.diff(positions.numpy()) != 1).any())
        labels = collated["labels"].numpy()
        following = np.full_like(labels, IGNORED)
        following[:, :-1] = labels[:, 1:]  # position i predicts the token at i + 1
        supervised = np.flatnonzero(following != IGNORED)
        inputs["supervised"] = torch.from_numpy(supervised)
        inputs["targets"] = torch.from_numpy(following.ravel()[supervised])
        if any(SOURCE in row for row in rows):
            of_rows = np.array([row.get(SOURCE, [0])[0] for row in rows], np.int64)
            if len(labels) == len(rows):
                which = supervised // labels.shape[1]
            else:  # end to end
                ends = np.cumsum([len(row["input_ids"]) for row in rows])
                which = np.searchsorted(ends, supervised, side="right")
            inputs["sources"] = torch.from_numpy(of_rows[which])
        tokens = sum(len(row["input_ids"]) for row in rows)
        counts = (tokens, inputs["input_ids"].numel() - tokens, len(supervised))  # as the recorder would count them
        collated["counts"] = torch.tensor(counts, dtype=torch.float64)
        known = [row[ROW] for row in rows if row[ROW] != FILL]
        tokens -= (len(rows) - len(known)) * len(FILL_ROW["input_ids"])
        return Batch(inputs, collated, known, tokens)


class Batches:
    """Micro-batches of this rank. `round_rows` is what every rank together takes at a time: filled up to that.

    order: the rows of an epoch. The micro-batch k of rank r is the rows from (k x ranks + r) x micro on, so that a
    step has the same rows on every number of ranks.
    """

    def __init__(
        self,
        rows: Any,
        collate: Collate,
        micro: int,
        *,
        order: Callable[[int], np.ndarray[Any, Any]] | None,
        round_rows: int,
        workers: int = 0,
        pin: bool = False,
        names: Sequence[str] = (),
    ) -> None:
        self.names = names  # of the sets that rows may be of
        self.rows, self.collate, self.micro, self.order, self.round_rows = rows, collate, micro, order, round_rows
        self.rank, self.world = group.rank(), group.world()
        self.workers = workers
        # A generator of its own: torch's loader draws a seed at every start, which would else be training's.
        self.options: dict[str, Any] = {"pin_memory": pin and torch.cuda.is_available(), "generator": torch.Generator()}

    def __len__(self) -> int:
        """Rounds of an epoch."""
        assert self.order is not None  # a stream's are not known
        return -(-len(self.order(0)) // self.round_rows)

    def epoch(self, number: int, rounds_done: int = 0) -> Iterator[Batch]:
        """From the round on that comes after those done. A stream has one epoch, without end."""
        micro_batches = rounds_done * self.round_rows // (self.micro * self.world)
        if self.order is None:
            # Of more than one worker, a set of one generator would give the others nothing.
            stream = _Stream(self, micro_batches)
            return _raised(DataLoader(stream, batch_size=None, num_workers=min(1, self.workers), **self.options))
        order = self.order(number)
        fill = np.full(-len(order) % self.round_rows, FILL, dtype=order.dtype)
        dealt = np.concatenate([order, fill]).reshape(-1, self.world, self.micro)[micro_batches:, self.rank]
        rows = _Rows(self.rows)
        if not self.workers and not self.options["pin_memory"]:  # a loader takes longer than making the batch
            return (self.collate(rows.__getitems__(numbers)) for numbers in dealt.tolist())
        options = {"collate_fn": self.collate, "num_workers": self.workers, **self.options}
        return iter(DataLoader(rows, batch_sampler=dealt.tolist(), **options))

    def train(self, step: int, accumulation: int, steps_per_epoch: int | None) -> Iterator[Batch]:
        """Epoch after epoch, from the micro-batch on that follows optimizer step `step`."""
        first, done = (0, step) if steps_per_epoch is None else divmod(step, steps_per_epoch)
        assert self.round_rows == accumulation * self.micro * self.world
        for number in itertools.count(first):
            yield from self.epoch(number, done)
            done = 0


class RowError(UserError):
    """A row of a stream that can't be trained on. All ranks read all rows: all of them meet it in the same step."""


class _Rows(Dataset[Any]):
    """Rows with their numbers, and the row that fills: views of Arrow's memory. `datasets` takes 20 times as long."""

    def __init__(self, rows: pa.Table) -> None:
        self.columns: dict[str, list[tuple[Any, Any]]] = {}
        for name in rows.column_names:
            chunks = rows.column(name).chunks
            self.columns[name] = [(to_numpy(chunk.offsets), to_numpy(chunk.values)) for chunk in chunks]
        self.starts = np.cumsum([0, *(len(chunk) for chunk in chunks)])

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Any]]:
        return [FILL_ROW if number == FILL else self._row(number) for number in numbers]

    def _row(self, number: int) -> dict[str, Any]:
        chunk = int(np.searchsorted(self.starts, number, side="right")) - 1
        place, row = number - int(self.starts[chunk]), {ROW: number}
        for name, chunks in self.columns.items():
            offsets, values = chunks[chunk]
            row[name] = values[offsets[place] : offsets[place + 1]]
        return row


class _Stream(IterableDataset[Batch | UserError]):
    """This rank's micro-batches of a stream that every rank reads in full."""

    def __init__(self, batches: Batches, first: int) -> None:
        self.batches, self.first = batches, first

    def __iter__(self) -> Iterator[Batch | UserError]:
        of = self.batches
        numbered = ({**row, ROW: number} for number, row in enumerate(of.rows))
        rows = itertools.islice(numbered, self.first * of.micro * of.world, None)
        try:
            while everyones := list(itertools.islice(rows, of.micro * of.world)):
                yield of.collate(everyones[of.rank * of.micro :][: of.micro])
        except UserError as error:  # raised here, a loader's worker would print its traceback
            yield RowError.of(error.problems)


def _raised(batches: Iterable[Batch | UserError]) -> Iterator[Batch]:
    for batch in batches:
        if isinstance(batch, UserError):
            raise batch
        yield batch
