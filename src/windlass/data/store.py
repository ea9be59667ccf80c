"""Documents to the Arrow files that are trained from, and back: the columns that SFTTrainer takes as tokenised."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from windlass.data.pack import pack
from windlass.data.tokens import Documents
from windlass.observe.steps import IGNORED

if TYPE_CHECKING:
    from datasets import Dataset

ROWS_PER_BLOCK = 1000


def write(documents: Documents, path: Path, *, capacity: int | None) -> npt.NDArray[np.int64]:
    """One row per document, or per pack of documents when there is a capacity. Gives the tokens of each row.

    `labels` is written only where something is not learnt: without it the collator takes the ids themselves.
    """
    lengths = documents.lengths.tolist()
    rows = [[i] for i in range(len(lengths))] if capacity is None else pack(lengths, capacity)
    partial = not documents.learnt.all()
    names = ["input_ids", *(["labels"] if partial else []), *(["seq_lengths"] if capacity is not None else [])]
    schema = pa.schema([(name, pa.list_(pa.int32())) for name in names])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for start in range(0, len(rows), ROWS_PER_BLOCK):
            writer.write_batch(block(documents, rows[start : start + ROWS_PER_BLOCK], schema))
    return np.array([sum(lengths[i] for i in row) for row in rows], np.int64)


def block(documents: Documents, rows: list[list[int]], schema: pa.Schema) -> pa.RecordBatch:
    members = np.fromiter((i for row in rows for i in row), np.int64)
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    taken = documents.take(members)
    ends = np.cumsum(taken.lengths)[np.cumsum(counts) - 1]
    columns: dict[str, pa.Array] = {"input_ids": lists(taken.ids, ends)}
    if "labels" in schema.names:
        columns["labels"] = lists(np.where(taken.learnt, taken.ids, np.int32(IGNORED)), ends)
    if "seq_lengths" in schema.names:
        columns["seq_lengths"] = lists(taken.lengths.astype(np.int32), np.cumsum(counts))
    return pa.record_batch([columns[name] for name in schema.names], schema=schema)


def lists(values: npt.NDArray[np.int32], ends: npt.NDArray[np.int64]) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(np.concatenate(([0], ends)), pa.int32()), pa.array(values, pa.int32()))


def load(path: Path) -> Dataset:
    """The rows of a file, mapped into memory rather than read."""
    from datasets import Dataset

    return Dataset.from_file(str(path))
