"""Sets that are not held: read, tokenised and packed a window at a time, for as long as the run asks for rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from windlass.data.order import shuffled
from windlass.data.pack import pack
from windlass.data.read import Row, batches
from windlass.data.shapes import Shape
from windlass.data.tokens import tokenise
from windlass.errors import UserError
from windlass.observe.steps import IGNORED

if TYPE_CHECKING:
    from datasets import IterableDataset
    from transformers import PreTrainedTokenizerBase

# Rows that are shuffled and packed together: best-fit packing is full to the last per mille from a few hundred on.
WINDOW_ROWS = 4096


def endless(
    source: Callable[[], Iterator[Row]],
    shape: Shape,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    packed_to: int | None,
    seed: int,
) -> IterableDataset:
    """The set over and over, in one order that depends on nothing but the files and the seed.

    Every rank iterates the whole of it and Accelerate leaves each its own batches, so no row goes to two ranks, the
    global batches are the same for any number of them, and a resumed run skips to its place.
    """
    from datasets import Features, IterableDataset, List, Value

    names = ["input_ids", "labels", *(["seq_lengths"] if packed_to is not None else [])]

    def generate() -> Iterator[dict[str, Any]]:
        for epoch in itertools.count():
            empty = True
            for number, window in enumerate(batches(source(), WINDOW_ROWS)):
                for row in packed(window, shape, tokenizer, max_length, packed_to, (seed + epoch, number)):
                    empty = False
                    yield row
            if empty:
                raise UserError("the stream has no row with a supervised token", "data", "see `windlass data`")

    return IterableDataset.from_generator(generate, features=Features({name: List(Value("int32")) for name in names}))


def packed(
    window: list[Row],
    shape: Shape,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    packed_to: int | None,
    turn: tuple[int, int],
) -> Iterator[dict[str, Any]]:
    """The rows to train on that one window makes, shuffled."""
    from torch.utils.data import get_worker_info

    # In a loader's worker, which is forked, only this one thread.
    documents = tokenise(window, shape, tokenizer, max_length, threads=get_worker_info() is None)
    lengths, starts = documents.lengths, documents.starts
    labels = np.where(documents.learnt, documents.ids, np.int32(IGNORED))
    rows = [[i] for i in range(len(lengths))] if packed_to is None else pack(lengths.tolist(), packed_to)
    for chosen in shuffled(len(rows), *turn).tolist():
        members = rows[chosen]
        spans = [slice(int(starts[i]), int(starts[i] + lengths[i])) for i in members]
        row: dict[str, Any] = {
            "input_ids": np.concatenate([documents.ids[span] for span in spans]).tolist(),
            "labels": np.concatenate([labels[span] for span in spans]).tolist(),
        }
        if packed_to is not None:
            row["seq_lengths"] = lengths[members].tolist()
        yield row
