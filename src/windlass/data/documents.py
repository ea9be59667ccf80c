"""Documents: tokenized rows in flat arrays, joined, selected, and held out."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from windlass.data.formats import Format, NumberedRowError
from windlass.errors import Problem, UserError, Where, raise_all
from windlass.observe.format import format_plural
from windlass.observe.steps import IGNORED

Flags = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]
# Rows by what becomes of them, a kind of left-out row, remark or unfit pair, with an example.
Found = dict[tuple[str, str], tuple[str, list[int]]]
LEFT_OUT = "left out"
REMARK = "remark"
UNFIT = "unfit"
TOO_LONG = (UNFIT, "too-long")  # its example is the `max_length` that these pairs need
COUNTS = ("rows", "split", "split_into", "empty", "unsupervised", "truncated", "tokens_cut", "straddling")
PART_BITS = 12  # of a hash, that number the rows of one chat
FIRST = 3  # rows named in a message if more are left out
BLOCK_TOKENS = 1 << 20  # copied from a file at a time
NONE: Any = np.zeros(0)


class TokenFile:
    """Token ids and their supervised flags, appended to two files: they take no memory of their own."""

    def __init__(self, folder: Path) -> None:
        self.paths = (folder / "ids.part", folder / "supervised.part")
        self.files = [path.open("wb") for path in self.paths]
        self.size = 0
        self.maps: list[mmap.mmap] = []

    def append(self, documents: Documents) -> Documents:
        """Return the documents where they now are."""
        starts = documents.starts + self.size
        for file, values in zip(self.files, (documents.ids, documents.supervised), strict=True):
            file.write(values.data)
        self.size += len(documents.ids)
        return replace(documents, ids=NONE, supervised=NONE, starts=starts, file=self)

    def map(self) -> tuple[npt.NDArray[np.int32], Flags]:
        """Return all that has been written."""
        for file in self.files:
            file.flush()
        if not self.size:
            return np.zeros(0, np.int32), np.zeros(0, np.bool_)
        maps = []
        for path in self.paths:
            with path.open("rb") as written:
                maps.append(mmap.mmap(written.fileno(), 0, access=mmap.ACCESS_READ))
        self.maps += maps
        return np.frombuffer(maps[0], np.int32), np.frombuffer(maps[1], np.bool_)

    def release(self) -> None:
        """Let go of the pages that have been read."""
        for mapped in self.maps:
            mapped.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Remove the files."""
        for file, path in zip(self.files, self.paths, strict=True):
            file.close()
            path.unlink()


@dataclass
class Documents:
    """Tokenized rows, of a chat one or several, in flat arrays: a billion tokens take 5 GB, without an object each."""

    ids: npt.NDArray[np.int32]
    supervised: Flags
    lengths: Indices
    hashes: npt.NDArray[np.uint64]
    """Of the rendered text: equal rows have equal hashes. Rows of one chat differ in their last bits (PART_BITS)."""
    counts: dict[str, int] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    """Why rows are not among them, how many, and where the first are."""
    remarks: tuple[dict[str, Any], ...] = ()
    """What a user should know of rows: the kind, an example, how many, and where the first are."""
    chosen_lengths: Indices | None = None
    """Of pairs: the tokens of each chosen sequence, which the rejected one follows in the same document."""
    starts: Indices = field(default_factory=lambda: np.zeros(0, np.int64))
    """Where each is in the flat arrays: end to end if it isn't given."""
    file: TokenFile | None = None
    """What the flat arrays are mapped from, with all other rows of the run."""

    def __post_init__(self) -> None:
        if len(self.starts) < len(self.lengths):
            self.starts = np.cumsum(self.lengths, dtype=np.int64) - self.lengths

    @property
    def sides(self) -> Indices:
        """Tokens of each document's sequences: a row for each, of two columns for pairs and one for others."""
        if self.chosen_lengths is None:
            return self.lengths[:, None]
        return np.stack([self.chosen_lengths, self.lengths - self.chosen_lengths], 1)

    def select(self, which: Indices) -> Documents:
        """Return these documents, in this order, where they are."""
        chosen = None if self.chosen_lengths is None else self.chosen_lengths[which]
        found = replace(self, lengths=self.lengths[which], starts=self.starts[which])
        found.hashes = self.hashes[which]
        found.chosen_lengths = chosen
        return found

    def take(self, which: Indices) -> Documents:
        """Return a copy of these documents, in this order and end to end."""
        found = self.select(which)
        stops = found.starts + found.lengths
        begins = np.append(True, found.starts[1:] != stops[:-1])[: len(stops)]  # not where the one before it ends
        runs = [*zip(found.starts[begins].tolist(), stops[np.roll(begins, -1)].tolist(), strict=True)]
        found.ids = np.concatenate([self.ids[:0], *(self.ids[start:stop] for start, stop in runs)])
        found.supervised = np.concatenate([self.supervised[:0], *(self.supervised[start:stop] for start, stop in runs)])
        found.starts = np.cumsum(found.lengths) - found.lengths
        found.file = None
        if self.file is not None:
            self.file.release()
        return found

    def blocks(self, tokens: int = BLOCK_TOKENS) -> Iterator[tuple[int, Documents]]:
        """Yield copies of the documents in their order, about so many tokens at a time, and the number of the first."""
        numbers = (np.cumsum(self.lengths) - 1) // tokens
        edges = [0, *np.flatnonzero(np.diff(numbers)) + 1, len(numbers)]
        for low, high in itertools.pairwise(edges):
            yield low, self.take(np.arange(low, high))

    def column(self, name: str) -> npt.NDArray[np.int32]:
        """Return a column of the rows that are trained on, by name."""
        if name == "labels":
            return np.where(self.supervised, self.ids, np.int32(IGNORED))
        return self.ids if name == "input_ids" else self.sides.ravel().astype(np.int32)

    @classmethod
    def concatenate(cls, parts: Sequence[Documents]) -> Documents:
        """Concatenate documents and add up their counts."""
        names = ["lengths", "hashes"]
        names += [] if parts[0].chosen_lengths is None else ["chosen_lengths"]
        file = parts[0].file
        names += ["ids", "supervised"] if file is None else ["starts"]
        counts = {name: sum(part.counts[name] for part in parts) for name in parts[0].counts}
        left_out = tuple(itertools.chain(*(part.left_out for part in parts)))
        remarks = tuple(itertools.chain(*(part.remarks for part in parts)))
        arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        if file is not None:
            arrays["ids"], arrays["supervised"] = file.map()
        return cls(**arrays, counts=counts, left_out=left_out, remarks=remarks, file=file)

    def spans(self, *, sides: bool = False) -> Iterator[slice]:
        """Yield the slice of each document, or of each of its sequences, if they are end to end."""
        lengths = self.sides.ravel() if sides else self.lengths
        for end, length in zip(np.cumsum(lengths).tolist(), lengths.tolist(), strict=True):
            yield slice(end - length, end)


def assemble(
    results: Iterable[tuple[Documents, Found]],
    kind: Format,
    max_length: int,
    *,
    place: Callable[..., str],
    where: Where = str,
    progress: Callable[[int], None] = lambda _: None,
    file: TokenFile | None = None,
) -> Documents:
    """Return the documents of all rows from those of some after the other; their tokens go to a file if there is one.
    `progress` is called with the number of rows so far, `place` tells where rows are."""
    parts: list[Documents] = []
    found: Found = {}
    rows = longest = 0
    try:
        for documents, notes in results:
            for key, (example, numbers) in notes.items():
                found.setdefault(key, (example, []))[1].extend(rows + number for number in numbers)
            longest = max(longest, int(notes.get(TOO_LONG, ("0", []))[0]))
            rows += documents.counts["rows"]
            parts.append(documents if file is None else file.append(documents))
            progress(rows)
    except NumberedRowError as error:
        first = error.error.problems[0]
        at = place(rows + error.number)
        if first.where == "data":
            raise UserError(first.problem, at, first.hint, first.code) from None
        key_place = where(first.where) if first.where.startswith("data.") else first.where
        raise UserError(f"{at}: {first.problem}", key_place, first.hint, first.code) from None
    flat = (np.zeros(0, np.int32), np.zeros(0, np.bool_), np.zeros(0, np.int64), np.zeros(0, np.uint64))
    documents = Documents.concatenate(parts or [Documents(*flat, dict.fromkeys(COUNTS, 0), file=file)])

    def locate(numbers: Sequence[int]) -> str:
        return f"{place(*numbers[:FIRST])}{', …' if len(numbers) > FIRST else ''}"

    pairs = format_plural(rows - documents.counts["empty"], "pair")
    too_long = f"a sequence longer than data.max_length {max_length:,}: up to {longest:,} tokens"
    hint = f"set data.max_length: {longest}, or data.truncation: prompt"
    if kind.cuts_prompts:
        too_long = f"an answer that is, with a token of its prompt, longer than data.max_length {max_length:,}: "
        too_long += f"up to {longest:,} tokens"
        hint = f"set data.max_length: {longest}, or leave out such rows"
    wrong = {
        "empty-answer": ("an answer without a token that loss is computed on", "fix or leave out such rows"),
        "too-long": (too_long, hint),
    }
    unfit = [(code, found[UNFIT, code][1], *wrong[code]) for code in wrong if (UNFIT, code) in found]
    raise_all([Problem(f"{len(n):,} of {pairs} with {what}", locate(n), do, code) for code, n, what, do in unfit])
    documents.left_out = tuple(
        f"{format_plural(len(numbers), 'row')} left out ({why}): {locate(numbers)}"
        for (what, why), (_, numbers) in found.items()
        if what == LEFT_OUT
    )
    documents.remarks = tuple(
        {"kind": name, "example": example, "rows": len(numbers), "where": locate(numbers)}
        for (what, name), (example, numbers) in found.items()
        if what == REMARK
    )
    return documents


def hold_out(documents: Documents, fraction: float, place: str) -> tuple[Documents, Documents]:
    """Split into training and validation rows by hashes of the rows: no seed, and duplicates and chats stay together.

    Rows that occur more often than rows are wanted are trained on, if there are others.
    """
    hashes = documents.hashes >> np.uint64(PART_BITS)
    count = len(hashes)
    wanted = min(max(1, round(fraction * count)), count - 1) if count > 1 else 0
    values, counts = np.unique(hashes, return_counts=True)
    if wanted and len(values) == 1:
        hint = "remove the duplicates, or train without evaluation: data.val_fraction: null"
        problem = f"all {count:,} rows are equal or of one chat: none can be held out of the others"
        raise UserError(problem, place, hint, "nothing-to-hold-out")
    held = []
    missing = wanted
    for value, occurrences in zip(values, counts.tolist(), strict=True):
        if occurrences <= missing:
            held.append(value)
            missing -= occurrences
        if not missing:
            break
    if wanted and not held:
        held = [values[counts.argmin()]]
    chosen = np.isin(hashes, np.array(held, hashes.dtype))
    train = documents.select(np.flatnonzero(~chosen))
    validation = documents.select(np.flatnonzero(chosen))
    kept = int((validation.hashes % np.uint64(1 << PART_BITS) == 0).sum())  # once for all rows of a chat
    # Rows were dropped before the split.
    train.counts = {**documents.counts, "rows": documents.counts["rows"] - kept}
    train.left_out = documents.left_out
    train.remarks = documents.remarks
    validation.counts = {**dict.fromkeys(documents.counts, 0), "rows": kept}
    return train, validation
