"""Pack documents into rows of a fixed length and write the rows that are trained on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from windlass.data.tokenize import Documents
from windlass.observe.steps import IGNORED

if TYPE_CHECKING:
    from datasets import Dataset

ROWS_PER_BLOCK = 1000


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Which documents share a row: best-fit decreasing, none cut. Deterministic; rows in the order of their first.

    Longest first, each into the fullest row that still takes it. The rows open at each remaining room are kept in
    buckets, and the rooms that have one are the bits of a single integer: the tightest fit is its lowest bit at or
    above the document's length.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    rows: list[list[int]] = []
    open_rows: defaultdict[int, list[int]] = defaultdict(list)
    rooms = 0
    for document in order:
        length = lengths[document]
        if not 0 < length <= capacity:
            raise ValueError(f"document {document} has {length} tokens, a row {capacity}")
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            bucket = open_rows[room]
            row = bucket.pop()
            if not bucket:
                rooms &= ~(1 << room)
            rows[row].append(document)
        else:
            room, row = capacity, len(rows)
            rows.append([document])
        if room > length:
            open_rows[room - length].append(row)
            rooms |= 1 << (room - length)
    for members in rows:
        members.sort()
    rows.sort(key=lambda members: members[0])
    return rows


def group_documents(documents: Documents, capacity: int | None) -> list[list[int]]:
    """The documents of each row: packs where there is a capacity, else one document."""
    lengths = documents.lengths.tolist()
    return [[i] for i in range(len(lengths))] if capacity is None else pack(lengths, capacity)


def write_rows(documents: Documents, path: Path, *, capacity: int | None) -> npt.NDArray[np.int64]:
    """Write an Arrow file of rows, with `seq_lengths` where they are packed. Returns the tokens of each row.

    `labels` is written only where something is not supervised: without it the collator takes the ids themselves.
    """
    rows = group_documents(documents, capacity)
    partial = not documents.supervised.all()
    names = ["input_ids", *(["labels"] if partial else []), *(["seq_lengths"] if capacity is not None else [])]
    schema = pa.schema([(name, pa.list_(pa.int32())) for name in names])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for start in range(0, len(rows), ROWS_PER_BLOCK):
            block = rows[start : start + ROWS_PER_BLOCK]
            counts = np.cumsum([len(row) for row in block])
            taken = documents.take(np.array([i for row in block for i in row], np.int64))
            ends = np.cumsum(taken.lengths)[counts - 1]
            columns: dict[str, Any] = {
                "input_ids": _lists(taken.ids, ends),
                "labels": _lists(np.where(taken.supervised, taken.ids, np.int32(IGNORED)), ends),
                "seq_lengths": _lists(taken.lengths.astype(np.int32), counts),
            }
            writer.write_batch(pa.record_batch([columns[name] for name in names], schema=schema))
    return np.array([sum(documents.lengths[row].tolist()) for row in rows], np.int64)


def _lists(values: npt.NDArray[np.int32], ends: npt.NDArray[np.int64]) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(np.concatenate(([0], ends)), pa.int32()), pa.array(values, pa.int32()))


def load_rows(path: Path) -> Dataset:
    """The rows of a file, mapped into memory rather than read."""
    from datasets import Dataset

    return Dataset.from_file(str(path))
