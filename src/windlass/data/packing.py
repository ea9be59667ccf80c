"""The order in which rows are trained on; documents packed into rows of a fixed length, and written."""

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from windlass.data.documents import Documents
from windlass.observe.steps import IGNORED
from windlass.settings import WINDOW_BATCHES

Order = npt.NDArray[np.int64]


def shuffle(count: int, seed: int, epoch: int) -> Order:
    """Return a permutation of the rows for this epoch."""
    return np.random.default_rng((seed, epoch)).permutation(count)


def choose_epoch_rows(count: int, wanted: int, seed: int, epoch: int) -> Order:
    """Return which of a set's rows an epoch has: no row repeats before all have been used."""
    first = epoch * wanted
    stop = (epoch + 1) * wanted
    passes = [shuffle(count, seed, number) for number in range(first // count, -(-stop // count))]
    return np.concatenate(passes)[first % count :][:wanted] if wanted else np.zeros(0, np.int64)


def group_by_length(lengths: npt.NDArray[np.int64], batch: int, seed: int, epoch: int) -> Order:
    """Return a permutation whose global batches have rows of similar length; the batch with the longest row comes
    first.

    Batches are cut by the global batch, which ranks and accumulation divide, so the order does not depend on the number
    of ranks. The longest comes first so that a run that will exceed its memory does so at step one.
    """
    order = shuffle(len(lengths), seed, epoch)
    window = max(1, batch * WINDOW_BATCHES)
    full = len(order) - len(order) % batch  # the short last batch stays last: elsewhere it would shift all others
    batches: list[Order] = []
    for start in range(0, full, window):
        part = order[start : min(start + window, full)]
        part = part[np.argsort(-lengths[part], kind="stable")]
        batches += [part[i : i + batch] for i in range(0, len(part), batch)]
    turn = np.random.default_rng((seed, epoch, 1)).permutation(len(batches)).tolist()
    if turn:
        longest = max(turn, key=lambda i: (int(lengths[batches[i]].max()), -i))
        turn.remove(longest)
        turn.insert(0, longest)
    return np.concatenate([*(batches[i] for i in turn), order[full:]]) if len(order) else order


ROWS_PER_BLOCK = 1000
PAIRS = {"rows": "pairs"}  # metadata of a table whose rows are a chosen sequence and the rejected one


def pack_rows(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Assign documents to rows: best-fit decreasing, none cut. Deterministic; rows are ordered by their first document.

    Documents go, longest first, into the fullest row with enough room. Open rows are kept in buckets by remaining room,
    and a single integer has a bit for each nonempty bucket: the tightest fit is its lowest bit at or above the
    document's length.
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
            room = capacity
            row = len(rows)
            rows.append([document])
        if room > length:
            open_rows[room - length].append(row)
            rooms |= 1 << (room - length)
    for members in rows:
        members.sort()
    rows.sort(key=lambda members: members[0])
    return rows


def group_documents(documents: Documents, capacity: int | None) -> tuple[Order, Order]:
    """Return the documents of all rows, row after row, and where each row begins and the last one ends: packed if there
    is a capacity, else one per row."""
    count = len(documents.lengths)
    if capacity is None:
        return np.arange(count), np.arange(count + 1)
    rows = pack_rows(documents.lengths.tolist(), capacity)
    members = np.fromiter(itertools.chain.from_iterable(rows), np.int64, count)
    return members, np.cumsum([0, *map(len, rows)])


def list_row_columns(*, partial: bool, packed: bool, mixed: bool = False) -> list[str]:
    """Return the rows' columns. There are no `labels` if everything is supervised: the collator uses the ids."""
    wanted = {"input_ids": True, "labels": partial, "seq_lengths": packed, "source": mixed}
    return [name for name, there in wanted.items() if there]


def to_arrow(numbers: npt.NDArray[Any]) -> pa.Array:
    """Convert without `pa.array`, which imports pandas and takes half a second of start-up; `to_numpy` does the
    same."""
    assert not len(numbers) or numbers.max() < 2**31
    buffer = pa.py_buffer(np.ascontiguousarray(numbers, np.int32))
    return pa.Array.from_buffers(pa.int32(), len(numbers), [None, buffer])


def to_numpy(array: pa.Array) -> npt.NDArray[np.int32]:
    """Return a view of Arrow's memory."""
    return np.frombuffer(array.buffers()[1], np.int32)[array.offset :][: len(array)]


def open_rows(path: Path) -> pa.Table:
    """Map what `write_rows` wrote into memory. Importing `datasets` would take a second."""
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_stream(file).read_all()


def iter_documents(table: pa.Table) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]]:
    """Yield the tokens of each document, of pairs the chosen sequence, and which of them are supervised."""
    of_pairs = (table.schema.metadata or {}).get(b"rows") == b"pairs"
    for row in itertools.chain.from_iterable(block.to_pylist() for block in table.to_batches(max_chunksize=16)):
        ids = np.asarray(row["input_ids"])
        supervised = np.asarray(row["labels"]) != IGNORED if "labels" in row else np.ones(len(ids), np.bool_)
        sizes = row.get("seq_lengths") or [len(ids)]
        for end, size in [*zip(np.cumsum(sizes), sizes, strict=True)][: 1 if of_pairs else None]:
            yield ids[end - size : end], supervised[end - size : end]


def hash_rows(path: Path) -> str:
    """Hash what is in an Arrow file of rows: ids, labels, and where rows and their documents end."""
    digest = hashlib.blake2b(digest_size=16)
    with pa.OSFile(str(path)) as file:  # read, because mapped pages would stay in memory
        for batch in pa.ipc.open_stream(file):
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                digest.update(name.encode())
                digest.update(to_numpy(column.offsets).data)
                digest.update(to_numpy(column.values).data)
    return digest.hexdigest()


def write_rows(
    sets: Sequence[Documents], path: Path, *, capacity: int | None, progress: Callable[[int], None] = lambda _: None
) -> list[npt.NDArray[np.int64]]:
    """Write an Arrow file of rows, set after set; `source` is a row's set. Returns the tokens of each row, of a pair
    padded: what it costs in a batch."""
    pairs = sets[0].chosen_lengths is not None
    partial = pairs or not all(block.supervised.all() for documents in sets for _, block in documents.blocks())
    names = list_row_columns(partial=partial, packed=pairs or capacity is not None, mixed=len(sets) > 1)
    schema = pa.schema([(name, pa.list_(pa.int32())) for name in names], PAIRS if pairs else None)
    lengths = []
    written = 0
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for number, documents in enumerate(sets):
            members, row_edges = group_documents(documents, capacity)
            padded = documents.sides.max(1) * documents.sides.shape[1]  # the sequences of pairs to the longer one
            lengths.append(np.add.reduceat(padded[members], row_edges[:-1], dtype=np.int64))
            for start in range(0, len(row_edges) - 1, ROWS_PER_BLOCK):
                block = row_edges[start : start + ROWS_PER_BLOCK + 1]
                taken = documents.take(members[block[0] : block[-1]])
                block = block - block[0]
                rows = len(block) - 1
                tokens = np.concatenate(([0], np.cumsum(taken.lengths)))[block]
                edges = {"seq_lengths": block * taken.sides.shape[1], "source": np.arange(rows + 1)}
                values = {"source": np.full(rows, number, np.int32)}
                columns = [
                    pa.ListArray.from_arrays(
                        to_arrow(edges.get(name, tokens)),
                        to_arrow(values[name] if name in values else taken.column(name)),
                    )
                    for name in names
                ]
                writer.write_batch(pa.record_batch(columns, schema=schema))
                written += len(taken.lengths)
                progress(written)
    return lengths
