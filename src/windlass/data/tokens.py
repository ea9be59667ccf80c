"""Rendered rows into token ids with the learnt part marked: batched, on Rust's threads, never in forked workers."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from windlass.data.read import BATCH, Row, batches
from windlass.data.shapes import Rendered, Shape

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]


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
        starts: npt.NDArray[np.int64] = np.cumsum(self.lengths) - self.lengths
        return starts

    def take(self, which: npt.NDArray[np.int64]) -> Documents:
        """These documents, in this order."""
        index = spread(self.starts[which], self.lengths[which])
        return Documents(self.ids[index], self.learnt[index], self.lengths[which], self.hashes[which])


def spread(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The indices of runs laid end to end: starts 5, 0 and lengths 2, 3 give 5 6 0 1 2."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths)


def tokenise(
    rows: Iterable[Row], shape: Shape, tokenizer: PreTrainedTokenizerBase, max_length: int, *, threads: bool = True
) -> Documents:
    """All rows that have something to learn. `counts` says what became of every row."""
    counts = dict.fromkeys(("rows", "empty", "unsupervised", "truncated", "tokens_cut", "straddling"), 0)
    ids: list[Ids] = []
    learnt: list[Flags] = []
    hashes: list[int] = []
    with rust_threads(threads):
        for batch in batches(iter(rows), BATCH):
            for one, flags, digest in documents(batch, shape, tokenizer, max_length, counts):
                ids.append(one)
                learnt.append(flags)
                hashes.append(digest)
    return Documents(
        np.concatenate(ids) if ids else np.zeros(0, np.int32),
        np.concatenate(learnt) if learnt else np.zeros(0, np.bool_),
        np.fromiter(map(len, ids), np.int64, len(ids)),
        np.array(hashes, np.uint64),
        counts,
    )


def documents(
    batch: Sequence[Row], shape: Shape, tokenizer: PreTrainedTokenizerBase, max_length: int, counts: dict[str, int]
) -> Iterator[tuple[Ids, Flags, int]]:
    """Ids, learnt flags and hash of each row of a batch that keeps any; the others are counted."""
    found = [shape.render(row) for row in batch]
    rendered = [one for one in found if one is not None and one.text.strip()]
    counts["rows"] += len(batch)
    counts["empty"] += len(batch) - len(rendered)
    for one, (ids, flags, straddles) in zip(rendered, encode(rendered, tokenizer), strict=True):
        counts["straddling"] += straddles
        if len(ids) > max_length:
            counts["truncated"] += 1
            counts["tokens_cut"] += len(ids) - max_length
            ids, flags = ids[:max_length], flags[:max_length]
        # The first token of a document is never predicted: nothing comes before it.
        if not flags[1:].any():
            counts["unsupervised"] += 1
            continue
        yield ids, flags, digest_of(one.text)


def digest_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def encode(rendered: Sequence[Rendered], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[Ids, Flags, bool]]:
    """Ids and learnt flags of each text, end of sequence added; whether a token lies across a learnt part's edge."""
    eos = tokenizer.eos_token_id
    coded = fast(rendered, tokenizer) if tokenizer.is_fast else (slow(one, tokenizer) for one in rendered)
    for one, (ids, flags, straddles) in zip(rendered, coded, strict=True):
        if not one.closed and eos is not None and (not len(ids) or ids[-1] != eos):
            last = one.learnt is None or any(end == len(one.text) for _, end in one.learnt)
            ids, flags = np.append(ids, np.int32(eos)), np.append(flags, last)
        elif not one.closed and one.learnt is not None and len(ids) and ids[-1] == eos:
            flags[-1] = any(end == len(one.text) for _, end in one.learnt)
        yield ids, flags, straddles


def fast(rendered: Sequence[Rendered], tokenizer: Any) -> Iterator[tuple[Ids, Flags, bool]]:
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    coded: list[Any] = [None] * len(rendered)
    for closed in (False, True):
        for partial in (False, True):
            chosen = [
                i for i, one in enumerate(rendered) if one.closed == closed and (one.learnt is not None) == partial
            ]
            # Offsets cost time: they are only asked for where a part is learnt.
            call = backend.encode_batch if partial else backend.encode_batch_fast
            done = call([rendered[i].text for i in chosen], add_special_tokens=not closed) if chosen else []
            for i, encoding in zip(chosen, done, strict=True):
                coded[i] = encoding
    for one, encoding in zip(rendered, coded, strict=True):
        ids = np.array(encoding.ids, np.int32)
        if one.learnt is None:
            yield ids, np.ones(len(ids), np.bool_), False
        else:
            yield ids, *flags_of(encoding.offsets, one.learnt)


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


def slow(one: Rendered, tokenizer: Any) -> tuple[Ids, Flags, bool]:
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
    return np.array(ids, np.int32), np.array(flags, np.bool_), False


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
