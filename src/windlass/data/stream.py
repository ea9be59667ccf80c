"""Train on sets larger than memory: read, tokenize and pack a window at a time, for as long as the run needs rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from windlass.data.formats import Format
from windlass.data.packing import group_documents, list_row_columns, shuffle
from windlass.data.reading import locate_row, read_rows, split_into_batches
from windlass.data.select import RowSet
from windlass.data.tokenize import tokenize
from windlass.errors import UserError

if TYPE_CHECKING:
    from datasets import IterableDataset
    from transformers import PreTrainedTokenizerBase

# Rows that are shuffled and packed together: from a few hundred on, best-fit packing fills all but a per mille.
WINDOW_ROWS = 4096


def stream_rows(
    sets: Sequence[tuple[RowSet, Format]],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    capacity: int | None,
    seed: int,
) -> IterableDataset:
    """Repeat the sets endlessly, in an order that depends only on the files and the seed.

    Every rank iterates over all of it and keeps its own batches: no row goes to two ranks, global batches are equal for
    any number of ranks, and a resumed run skips to its place.
    """
    from datasets import Features, IterableDataset, List, Value
    from torch.utils.data import get_worker_info

    names = list_row_columns(partial=True, packed=capacity is not None)

    def rows_of(selection: RowSet, format_: Format) -> Iterator[dict[str, Any]]:
        threads = get_worker_info() is None  # a data loader's worker is forked and has one thread only
        for epoch in itertools.count():
            rows = 0
            for number, window in enumerate(split_into_batches(read_rows(selection.train), WINDOW_ROWS)):

                def place(*rows: int, before: int = number * WINDOW_ROWS) -> str:
                    return locate_row(selection.train, *(before + row for row in rows))

                documents = tokenize(window, format_, tokenizer, max_length, threads=threads, place=place)
                members, edges = group_documents(documents, capacity)
                for chosen in shuffle(len(edges) - 1, seed + epoch, number).tolist():
                    rows += 1
                    row = documents.take(members[edges[chosen] : edges[chosen + 1]])
                    yield {name: row.column(name).tolist() for name in names}
            if not rows:
                problem = "the stream has no row with a supervised token"
                raise UserError(problem, "data", "see `windlass data RUN`", "nothing-supervised")

    def generate() -> Iterator[dict[str, Any]]:
        streams = [rows_of(selection, format_) for selection, format_ in sets]
        if len(streams) == 1:
            yield from streams[0]
        weights = [(selection.part and selection.part.weight) or 1 for selection, _ in sets]
        taken = [0] * len(sets)
        while True:  # next, the set furthest behind its share: every stretch of the mix follows the weights
            source = min(range(len(sets)), key=lambda i: ((taken[i] + 1) / weights[i], i))
            taken[source] += 1
            yield {**next(streams[source]), "source": [source]}

    columns = [*names, "source"] if len(sets) > 1 else names
    features = Features({name: List(Value("int32")) for name in columns})
    return IterableDataset.from_generator(generate, features=features)
