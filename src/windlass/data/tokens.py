"""Rendered rows into token ids with the learnt part marked: batched, on Rust's threads, never in forked workers."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from windlass.data.read import BATCH, Row, batches
from windlass.data.shapes import Rendered, Shape
from windlass.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]
Coded = tuple[list[int], Flags | None, bool]


# A process with another id was forked from the one that imported this, perhaps after its threads had started.
BORN = os.getpid()


@dataclass
class Documents:
    """Tokenised rows, one after another in flat arrays: a thousand million tokens take 5 GB, no object for each."""

    ids: Ids
    learnt: Flags
    lengths: npt.NDArray[np.int64]
    hashes: npt.NDArray[np.uint64]
    """Of the rendered text: equal rows have equal hashes."""
    counts: dict[str, int] = field(default_factory=dict)

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        starts: npt.NDArray[np.int64] = np.cumsum(self.lengths, dtype=np.int64)
        starts -= self.lengths
        return starts

    def take(self, which: npt.NDArray[np.int64]) -> Documents:
        """These documents, in this order."""
        index = spread(self.starts[which], self.lengths[which])
        return Documents(self.ids[index], self.learnt[index], self.lengths[which], self.hashes[which])


def spread(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The indices of runs laid end to end: starts 5, 0 and lengths 2, 3 give 5 6 0 1 2."""
    ends = np.cumsum(lengths)
    index: npt.NDArray[np.int64] = np.arange(int(lengths.sum()), dtype=np.int64)
    index += np.repeat(starts - (ends - lengths), lengths)
    return index


def tokenise(
    rows: Iterable[Row], shape: Shape, tokenizer: PreTrainedTokenizerBase, max_length: int, *, threads: bool = True
) -> Documents:
    """All rows that have something to learn. `counts` says what became of every row."""
    counts = dict.fromkeys(("rows", "empty", "unsupervised", "truncated", "tokens_cut", "straddling"), 0)
    chunks: list[Documents] = []
    with rust_threads(threads), ThreadPoolExecutor(1) as other:
        pending: tuple[list[Rendered], Future[list[Coded]]] | None = None
        for batch in itertools.chain(batches(iter(rows), BATCH), [[]]):  # the empty one collects the last
            rendered = [one for one in map(shape.render, batch) if one is not None and one.text.strip()]
            counts["rows"] += len(batch)
            counts["empty"] += len(batch) - len(rendered)
            # Rust encodes without holding Python's lock: meanwhile this thread reads, renders and collects.
            coming = (rendered, other.submit(code, rendered, tokenizer)) if rendered else None
            if pending is not None:
                chunks.append(collect(pending[0], pending[1].result(), tokenizer.eos_token_id, max_length, counts))
            pending = coming
    return joined(chunks, counts)


def joined(chunks: Sequence[Documents], counts: dict[str, int]) -> Documents:
    empty = Documents(np.zeros(0, np.int32), np.zeros(0, np.bool_), np.zeros(0, np.int64), np.zeros(0, np.uint64))
    parts = chunks or [empty]
    return Documents(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.learnt for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([part.hashes for part in parts]),
        counts,
    )


def collect(
    rendered: Sequence[Rendered], coded: Sequence[Coded], eos: int | None, max_length: int, counts: dict[str, int]
) -> Documents:
    """A batch's documents with their end of sequence, cut to length; those with nothing to learn only counted."""
    flat: list[int] = []
    learnt = bytearray()
    lengths: list[int] = []
    hashes: list[int] = []
    for one, (ids, flags, straddles) in zip(rendered, coded, strict=True):
        counts["straddling"] += straddles
        if not one.closed and eos is not None:
            flags = ended(one, ids, flags, eos)
        if len(ids) > max_length:
            counts["truncated"] += 1
            counts["tokens_cut"] += len(ids) - max_length
            ids = ids[:max_length]
        row = b"\1" * len(ids) if flags is None else flags[: len(ids)].tobytes()
        # The first token of a document is never predicted: nothing comes before it.
        if 1 not in row[1:]:
            counts["unsupervised"] += 1
            continue
        flat += ids
        learnt += row
        lengths.append(len(ids))
        hashes.append(digest_of(one.text))
    return Documents(
        np.array(flat, np.int32),
        np.frombuffer(learnt, np.bool_),
        np.array(lengths, np.int64),
        np.array(hashes, np.uint64),
    )


def ended(one: Rendered, ids: list[int], flags: Flags | None, eos: int) -> Flags | None:
    """Adds the end of sequence unless it is there; it is learnt when what comes before it is."""
    there = bool(ids) and ids[-1] == eos
    if not there:
        ids.append(eos)
    if flags is None:
        return None
    last = any(end == len(one.text) for _, end in one.learnt or ())
    return np.append(flags[:-1] if there else flags, last)


def digest_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def code(rendered: Sequence[Rendered], tokenizer: Any) -> list[Coded]:
    """Ids and learnt flags of each text, None for all; and whether a token lies across a learnt part's edge."""
    for one in rendered:
        try:
            one.text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"a row holds half a surrogate pair, which is no text: {one.text[max(0, error.start - 20) :][:40]!r}",
                "data",
                "write it again as proper UTF-8",
            ) from None
    return fast(rendered, tokenizer) if tokenizer.is_fast else [slow(one, tokenizer) for one in rendered]


def fast(rendered: Sequence[Rendered], tokenizer: Any) -> list[Coded]:
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    coded: list[Coded] = [([], None, False)] * len(rendered)
    for closed, partial in itertools.product((False, True), repeat=2):
        chosen = [i for i, one in enumerate(rendered) if (one.closed, one.learnt is not None) == (closed, partial)]
        if not chosen:
            continue
        # Offsets cost time: they are only asked for where a part is learnt.
        call = backend.encode_batch if partial else backend.encode_batch_fast
        done = call([rendered[i].text for i in chosen], add_special_tokens=not closed)
        for i, encoding in zip(chosen, done, strict=True):
            flags, straddles = flags_of(encoding.offsets, rendered[i].learnt or ()) if partial else (None, False)
            coded[i] = (encoding.ids, flags, straddles)
    return coded


def flags_of(offsets: Sequence[tuple[int, int]], learnt: Sequence[tuple[int, int]]) -> tuple[Flags, bool]:
    """A token is learnt when any of its characters is; `straddles` when one also has characters that are not."""
    places = np.array(offsets, np.int64).reshape(-1, 2)
    flags = np.zeros(len(places), np.bool_)
    straddles = False
    for start, end in learnt:
        inside = (places[:, 1] > start) & (places[:, 0] < end)
        flags |= inside
        straddles = straddles or bool(inside.any() and places[inside][0, 0] < start)
    return flags, straddles


def slow(one: Rendered, tokenizer: Any) -> Coded:
    """A tokenizer that can't tell offsets: each part by itself, which keeps the edges exact."""
    edges = sorted({0, len(one.text), *(edge for span in one.learnt or () for edge in span)})
    ids: list[int] = []
    flags: list[bool] = []
    for start, end in itertools.pairwise(edges):
        part = tokenizer.encode(one.text[start:end], add_special_tokens=False)
        inside = one.learnt is None or any(first <= start and end <= last for first, last in one.learnt)
        ids += part
        flags += [inside] * len(part)
    if not one.closed:
        whole = (
            tokenizer.build_inputs_with_special_tokens([])
            if hasattr(tokenizer, "build_inputs_with_special_tokens")
            else []
        )
        head = [token for token in whole if token == tokenizer.bos_token_id]
        ids, flags = head + ids, [one.learnt is None] * len(head) + flags
    return ids, np.array(flags, np.bool_), False


@contextmanager
def rust_threads(wanted: bool) -> Iterator[None]:
    """Rust's threads while this process tokenises, none afterwards.

    A worker forked later inherits the thread pool's locks but not its threads: were parallelism still on there,
    whatever the environment says, its first batch would wait for ever.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if wanted and os.getpid() == BORN else "false"
    try:
        yield
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
