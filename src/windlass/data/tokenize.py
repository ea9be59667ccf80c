"""Turn rows into token ids and mark the supervised ones, some rows at a time."""

from __future__ import annotations

import hashlib
import itertools
import json
import mmap
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from windlass.data.formats import Format, RenderedRow
from windlass.data.reading import Row, split_into_batches
from windlass.data.words import Ids, encode_texts
from windlass.errors import Problem, UserError, Where, raise_all
from windlass.observe.format import format_plural
from windlass.observe.steps import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Flags = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]
# Token ids; supervised flags, None for all; whether a token crosses the edge of a supervised part.
Encoded = tuple[list[int] | npt.NDArray[np.integer[Any]], Flags | None, bool]

# A process with another id was forked from the one that imported this module, perhaps after threads had started.
IMPORTED_BY = os.getpid()
EQUAL = "chosen equals rejected"  # why a pair is left out
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

    def append(self, documents: TokenizedRows) -> None:
        for file, values in zip(self.files, (documents.ids, documents.supervised), strict=True):
            file.write(values.data)
        self.size += len(documents.ids)

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
class TokenizedRows:
    """Tokenized rows in flat arrays: a billion tokens take 5 GB, without an object per token."""

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

    @property
    def padded_lengths(self) -> Indices:
        """Tokens of each document where the sequences of pairs are padded to the longer one."""
        padded: Indices = self.sides.max(1) * self.sides.shape[1]
        return padded

    def select(self, which: Indices) -> TokenizedRows:
        """Return these documents, in this order, where they are."""
        chosen = None if self.chosen_lengths is None else self.chosen_lengths[which]
        found = replace(self, lengths=self.lengths[which], starts=self.starts[which])
        found.hashes = self.hashes[which]
        found.chosen_lengths = chosen
        return found

    def take(self, which: Indices) -> TokenizedRows:
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

    def blocks(self, tokens: int = BLOCK_TOKENS) -> Iterator[tuple[int, TokenizedRows]]:
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
    def concatenate(cls, parts: Sequence[TokenizedRows]) -> TokenizedRows:
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

    def spans(self) -> Iterator[slice]:
        """Yield each document's slice of the flat arrays."""
        return slice_end_to_end(self.lengths)

    def side_spans(self) -> Iterator[slice]:
        """Yield each sequence's, of documents that are end to end: of pairs two for every document."""
        return slice_end_to_end(self.sides.ravel())


def slice_end_to_end(lengths: Indices) -> Iterator[slice]:
    """Yield slices of these lengths, end to end."""
    for end, length in zip(np.cumsum(lengths).tolist(), lengths.tolist(), strict=True):
        yield slice(end - length, end)


@dataclass
class Tokenized:
    """What became of some rows, which are numbered from 0."""

    documents: TokenizedRows
    left_out: dict[str, list[int]]
    """Rows without a document, by the reason."""
    remarks: dict[str, tuple[str, list[int]]]
    """By kinds of remarks: an example, and the rows."""
    unfit: dict[str, list[int]] = field(default_factory=dict)
    """Pairs that can't be trained on, by the code of the problem."""
    longest: int = 0
    """The `max_length` that the pairs which are too long need."""


class NumberedRowError(Exception):
    """An error in a row, whose number is counted from 0."""

    def __init__(self, number: int, error: UserError) -> None:
        super().__init__(number, error)
        self.number = number
        self.error = error


def tokenize(
    rows: Iterable[Row],
    kind: Format,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    *,
    threads: bool = True,
    place: Callable[..., str] = lambda *numbers: f"row {numbers[0] + 1}",
) -> TokenizedRows:
    """Tokenize all rows that have a supervised token. `counts` records what became of each row; `place`: where rows
    are."""
    with allow_rust_threads(threads):
        done = (tokenize_rows(batch, kind, tokenizer, max_length) for batch in split_into_batches(iter(rows)))
        return assemble(done, kind, max_length, place=place)


def tokenize_rows(rows: Iterable[Row], kind: Format, tokenizer: Any, max_length: int) -> Tokenized:
    """Tokenize some rows. Raises the error of the first row that has one."""
    counts = dict.fromkeys(COUNTS, 0)
    left_out: dict[str, list[int]] = {}
    remarks: dict[str, tuple[str, list[int]]] = {}
    rendered: list[RenderedRow] = []
    filled: list[int] = []
    number = -1
    for number, row in enumerate(rows):
        try:
            kind.require_columns(row)
            found = [one for one in kind.render(row) if one.ids is not None or one.text.strip()]
            for one in found:
                require_utf8(one.text)
        except UserError as error:
            raise NumberedRowError(number, error) from None
        for kind_of, example in dict(itertools.chain(*(one.remarks.items() for one in found))).items():
            remarks.setdefault(kind_of, (example, []))[1].append(number)
        rendered += found
        if found:
            filled.append(number)
        else:
            counts["empty"] += 1
            null = next((name for name in kind.needs if row.get(name) is None), None)
            left_out.setdefault(f"{null!r} is null" if null else "empty", []).append(number)
        if len(found) > 1 and not kind.pairs:
            counts["split"] += 1
            counts["split_into"] += len(found)
    counts["rows"] = number + 1
    limit = None if kind.pairs else max_length
    encoded = encode_batch(rendered, tokenizer)
    documents = collect_documents(rendered, encoded, tokenizer.eos_token_id, limit, counts)
    done = Tokenized(documents, left_out, remarks)
    if kind.pairs:
        done.documents, unfit, done.longest = join_pairs(
            documents, max_length, tokenizer.bos_token_id, counts, kind.cuts_prompts
        )
        equal = unfit.pop(EQUAL, [])
        if equal:  # no gradient comes of them
            done.documents = done.documents.take(np.delete(np.arange(len(filled)), equal))
            counts["unsupervised"] += len(equal)
            left_out[EQUAL] = [filled[pair] for pair in equal]
        done.unfit = {code: [filled[pair] for pair in pairs] for code, pairs in unfit.items()}
    done.documents.counts = counts
    return done


def assemble(
    results: Iterable[Tokenized],
    kind: Format,
    max_length: int,
    *,
    place: Callable[..., str],
    where: Where = str,
    progress: Callable[[int], None] = lambda _: None,
    file: TokenFile | None = None,
) -> TokenizedRows:
    """Return the documents of all rows from what became of some after the other; their tokens go to a file if there is
    one. `progress` is called with the number of rows so far."""
    counts = dict.fromkeys(COUNTS, 0)
    parts: list[TokenizedRows] = []
    left_out: dict[str, list[int]] = {}
    remarks: dict[str, tuple[str, list[int]]] = {}
    unfit: dict[str, list[int]] = {}
    longest = 0
    try:
        for done in results:
            before = counts["rows"]
            for reasons, numbers_of in ((left_out, done.left_out), (unfit, done.unfit)):
                for reason, numbers in numbers_of.items():
                    reasons.setdefault(reason, []).extend(before + number for number in numbers)
            for name, (example, numbers) in done.remarks.items():
                remarks.setdefault(name, (example, []))[1].extend(before + number for number in numbers)
            longest = max(longest, done.longest)
            counts = {name: count + done.documents.counts[name] for name, count in counts.items()}
            documents = done.documents
            if file is not None:
                starts = documents.starts + file.size
                file.append(documents)
                documents = replace(documents, ids=NONE, supervised=NONE, starts=starts, file=file)
            parts.append(documents)
            progress(counts["rows"])
    except NumberedRowError as error:
        first = error.error.problems[0]
        at = place(counts["rows"] + error.number)
        if first.where == "data":
            raise UserError(first.problem, at, first.hint, first.code) from None
        key = where(first.where) if first.where.startswith("data.") else first.where
        raise UserError(f"{at}: {first.problem}", key, first.hint, first.code) from None
    none = replace(collect_documents([], [], None, max_length, counts), file=file)
    documents = TokenizedRows.concatenate(parts or [none])

    def locate(numbers: Sequence[int]) -> str:
        return f"{place(*numbers[:FIRST])}{', …' if len(numbers) > FIRST else ''}"

    pairs = counts["rows"] - counts["empty"]
    problems = describe_unfit_pairs(unfit, pairs, longest, max_length, kind.cuts_prompts)
    raise_all([Problem(problem, locate(unfit[code]), hint, code) for code, problem, hint in problems])
    documents.counts = counts
    documents.left_out = tuple(
        f"{format_plural(len(numbers), 'row')} left out ({why}): {locate(numbers)}" for why, numbers in left_out.items()
    )
    documents.remarks = tuple(
        {"kind": name, "example": example, "rows": len(numbers), "where": locate(numbers)}
        for name, (example, numbers) in remarks.items()
    )
    return documents


def collect_documents(
    rendered: Sequence[RenderedRow],
    encoded: Sequence[Encoded],
    eos: int | None,
    max_length: int | None,
    counts: dict[str, int],
) -> TokenizedRows:
    """Return a batch's documents with their end of sequence, cut to length; documents without supervision are only
    counted. Without a length nothing is cut or left out: these are sequences of pairs."""
    flat = array("i")
    supervised = bytearray()
    lengths: list[int] = []
    hashes: list[int] = []
    for one, (ids, flags, straddles) in zip(rendered, encoded, strict=True):
        counts["straddling"] += straddles
        if not one.closed and eos is not None:
            # An appended end of sequence is supervised if the token before it is.
            present = len(ids) > 0 and ids[-1] == eos
            ids = ids if present else [*ids, eos]
            if flags is not None:
                last = any(end == len(one.text) for _, end in one.supervised or ())
                flags = np.append(flags[:-1] if present else flags, last)
        if max_length is not None and len(ids) > max_length:
            counts["truncated"] += 1
            counts["tokens_cut"] += len(ids) - max_length
            ids = ids[:max_length]
        row = b"\1" * len(ids) if flags is None else flags[: len(ids)].tobytes()
        # A document's first token is never predicted: nothing precedes it.
        if max_length is not None and 1 not in row[1:]:
            counts["unsupervised"] += 1
            continue
        flat.frombytes(np.asarray(ids, np.int32).tobytes())
        supervised += row
        lengths.append(len(ids))
        content = (one.whole or one.text).encode() if one.ids is None else one.ids.tobytes()
        hashed = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
        hashes.append(hashed >> PART_BITS << PART_BITS | one.part % (1 << PART_BITS))
    return TokenizedRows(
        np.frombuffer(flat, np.int32),
        np.frombuffer(supervised, np.bool_),
        np.array(lengths, np.int64),
        np.array(hashes, np.uint64),
    )


def join_pairs(
    sequences: TokenizedRows, max_length: int, bos: int | None, counts: dict[str, int], cuts_prompts: bool
) -> tuple[TokenizedRows, dict[str, list[int]], int]:
    """Join every two sequences, a row's chosen and rejected one, to a document. Also return the pairs that can't be
    trained on, by the code of the problem, and the `max_length` that those which are too long need.

    Both keep the same tokens of the prompt: loss begins at the first token in which either has some of its answer. If
    one is too long, the prompt's beginning is cut off both, but for the token that begins a sequence.
    """
    supervised = sequences.supervised.copy()
    kept = np.ones(len(sequences.ids), np.bool_)
    spans = [*sequences.spans()]
    empty: list[int] = []
    equal: list[int] = []
    long: list[int] = []
    most = 0
    for number, sides in enumerate(zip(spans[::2], spans[1::2], strict=True)):
        chosen, rejected = (sequences.ids[side] for side in sides)
        shortest = min(len(chosen), len(rejected))
        longest = max(len(chosen), len(rejected))
        same = chosen[:shortest] == rejected[:shortest]
        shared = shortest if same.all() else int(same.argmin())
        answers = [int(supervised[side].argmax()) for side in sides]
        begin = min(shared, *answers)
        for side, answer in zip(sides, answers, strict=True):
            supervised[side.start + begin : side.start + answer] = True
            supervised[side.start] = False  # nothing precedes it
        head = int(chosen[0] == bos)
        cut = max(0, longest - max_length)
        room = max(0, begin - head - 1) if cuts_prompts else 0  # a token of the prompt stays
        if not all(supervised[side].any() for side in sides):
            empty.append(number)
        elif shared == longest:
            equal.append(number)
        elif cut > room:
            long.append(number)
            most = max(most, longest - room)
        elif cut:
            counts["truncated"] += 1
            counts["tokens_cut"] += 2 * cut
            for side in sides:
                kept[side.start + head : side.start + head + cut] = False
    edges = np.append(sequences.starts, len(kept))
    lengths = np.diff(np.append(0, np.cumsum(kept))[edges]).reshape(-1, 2)
    mixed = sequences.hashes[::2] * np.uint64(0x9E3779B97F4A7C15) + sequences.hashes[1::2]  # in this order
    hashes = mixed >> np.uint64(PART_BITS) << np.uint64(PART_BITS)
    documents = TokenizedRows(
        sequences.ids[kept], supervised[kept], lengths.sum(1), hashes, chosen_lengths=lengths[:, 0].copy()
    )
    unfit = {"empty-answer": empty, EQUAL: equal, "too-long": long}
    return documents, {code: pairs for code, pairs in unfit.items() if pairs}, most


def describe_unfit_pairs(
    unfit: Mapping[str, Sequence[int]], pairs: int, longest: int, max_length: int, cuts_prompts: bool
) -> list[tuple[str, str, str]]:
    """Return the code, the problem and a hint for pairs that can't be trained on."""
    limit = f"longer than data.max_length {max_length:,}"
    too_long = f"a sequence {limit}: up to {longest:,} tokens"
    hint = f"set data.max_length: {longest}, or data.truncation: prompt"
    if cuts_prompts:
        too_long = f"an answer that is, with a token of its prompt, {limit}: up to {longest:,} tokens"
        hint = f"set data.max_length: {longest}, or leave out such rows"
    wrong = {
        "empty-answer": ("an answer without a token that loss is computed on", "fix or leave out such rows"),
        "too-long": (too_long, hint),
    }
    count = format_plural(pairs, "pair")
    found = [(code, *wrong[code]) for code in wrong if code in unfit]
    return [(code, f"{len(unfit[code]):,} of {count} with {what}", hint) for code, what, hint in found]


def encode_batch(rendered: Sequence[RenderedRow], tokenizer: Any) -> list[Encoded]:
    if not tokenizer.is_fast:
        return [encode_slowly(one, tokenizer) if one.ids is None else wrap_tokens(one, one.ids) for one in rendered]
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    encoded: list[Encoded] = [([], None, False) if one.ids is None else wrap_tokens(one, one.ids) for one in rendered]
    for closed, partial in itertools.product((False, True), repeat=2):
        chosen = [
            i
            for i, one in enumerate(rendered)
            if one.ids is None and (one.closed, one.supervised is not None) == (closed, partial)
        ]
        markers = read_markers(tokenizer, len(tokenizer)) if closed and partial else None
        if closed and (markers is not None or not partial):
            plain = dict(zip(chosen, encode_texts([rendered[i].text for i in chosen], tokenizer), strict=True))
            for i, ids in plain.items():
                flags = flag_between_markers(ids, rendered[i], markers) if markers else None
                encoded[i] = (ids, flags, False)
            chosen = [i for i in chosen if partial and encoded[i][1] is None]
        # Offsets take time: requested only if parts are supervised.
        call = backend.encode_batch if partial else backend.encode_batch_fast
        for i, done in zip(
            chosen, call([rendered[i].text for i in chosen], add_special_tokens=not closed), strict=True
        ):
            spans = rendered[i].supervised
            flags, straddles = None, False
            if spans is not None:
                flags, straddles = find_supervised_tokens(
                    done, spans, rendered[i].text, closed=closed, tokenizer=tokenizer
                )
            encoded[i] = (done.ids, flags, straddles)
    return encoded


class Markers(NamedTuple):
    """A tokenizer's added tokens, which part texts before anything else: their texts, by their ids."""

    texts: dict[int, str]
    added: Flags
    """Of each token, whether it is one of them."""


@lru_cache(maxsize=8)
def list_rstripping(tokenizer: Any, _size: int) -> frozenset[int]:
    """Return the added tokens with `rstrip`: the white space behind them becomes part of them."""
    return frozenset(number for number, token in tokenizer.added_tokens_decoder.items() if token.rstrip)


@lru_cache(maxsize=8)
def read_markers(tokenizer: Any, _size: int) -> Markers | None:
    """Return the added tokens of a tokenizer of bytes, whose tokens cover all of a text; None for others, which may
    drop or add characters beside them."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    before = json.dumps(state["pre_tokenizer"])
    added = state["added_tokens"]
    plain = state["normalizer"] in (None, {"type": "NFC"}) and "ByteLevel" in before and "Metaspace" not in before
    odd = any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in added)
    if not plain or odd or not added or '"add_prefix_space": true' in before:
        return None
    texts = {token["id"]: token["content"] for token in added}
    flags = np.zeros(max(tokenizer.get_vocab().values()) + 1, np.bool_)
    flags[[*texts]] = True
    return Markers(texts, flags)


def flag_between_markers(ids: Ids, one: RenderedRow, markers: Markers) -> Flags | None:
    """Return which tokens are supervised if all supervised parts begin and end at added tokens, without white space
    there; else None: that takes offsets, which take a fifth of the tokenizer's time."""
    places = np.flatnonzero(markers.added[ids])
    edges = {0: 0, len(one.text): len(ids)}
    stop = 0
    for place, token in zip(places.tolist(), ids[places].tolist(), strict=True):
        # The first from there on: of two that overlap, the tokenizer takes the one that begins first.
        start = one.text.find(markers.texts[token], stop)
        if start < 0:
            return None
        stop = start + len(markers.texts[token])
        edges[start] = place
        edges[stop] = place + 1
    flags = np.zeros(len(ids), np.bool_)
    for start, end in one.supervised or ():
        ends = one.text[start : start + 1] + one.text[end - 1 : end]
        if start >= end or ends != "".join(ends.split()) or start not in edges or end not in edges:
            return None
        flags[edges[start] : edges[end]] = True
    return flags


def require_utf8(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        piece = text[max(0, error.start - 20) :][:40]
        problem = f"a row contains an unpaired surrogate, which is not text: {piece!r}"
        raise UserError(problem, "data", "rewrite it as valid UTF-8", "not-utf8") from None


def wrap_tokens(one: RenderedRow, ids: npt.NDArray[np.int64]) -> Encoded:
    """Wrap a row that consists of tokens already."""
    flags = None
    if one.supervised is not None:
        flags = np.zeros(len(ids), np.bool_)
        for start, end in one.supervised:
            flags[start:end] = True
    return ids, flags, False


def find_supervised_tokens(
    done: Any,
    supervised: Sequence[tuple[int, int]],
    text: str,
    *,
    closed: bool = False,
    tokenizer: Any = None,
) -> tuple[Flags, bool]:
    """Return which tokens have a supervised character, and whether one of them also has unsupervised characters.

    White space that a chat template writes before an answer (`closed`) doesn't count: nobody can move it.
    """
    flags = np.zeros(len(done), np.bool_)
    straddles = False
    for start, end in supervised:
        first = done.char_to_token(start)
        last = done.char_to_token(end - 1)
        if first is None or last is None:  # no token has the character; fetching all offsets takes far longer
            edges = np.array(done.offsets, np.int64).reshape(-1, 2)
            inside = np.flatnonzero((edges[:, 1] > start) & (edges[:, 0] < end))
            flags[inside] = True
            first = int(inside[0]) if len(inside) else None
        else:  # a character may span several tokens
            while last + 1 < len(done):
                first_char, after_char = done.token_to_chars(last + 1)
                if after_char <= start or first_char >= end:
                    break
                last += 1
            flags[first : last + 1] = True
            has_blank = closed and tokenizer is not None and text[start].isspace()
            if has_blank and done.ids[first] in list_rstripping(tokenizer, len(tokenizer)):
                first_char, after_char = done.token_to_chars(first)
                if first_char < start and not text[start:after_char].strip():  # a header, with white space behind it
                    flags[first] = False
                    first = first + 1 if first < last else None
            if closed and text[end - 1].isspace():
                first_char, after_char = done.token_to_chars(last)
                if after_char > end and not text[first_char:end].strip():  # the next header, with a blank before it
                    flags[last] = False
        begun = start if first is None else done.token_to_chars(first)[0]
        straddles = straddles or bool(text[begun:start].strip() if closed else begun < start)
    return flags, straddles


def encode_slowly(one: RenderedRow, tokenizer: Any) -> Encoded:
    """Encode with a tokenizer that gives no offsets: each part separately, which keeps edges exact."""
    spans = ((0, len(one.text)),) if one.supervised is None else one.supervised
    bare = [] if one.closed else tokenizer.build_inputs_with_special_tokens([])
    ids = [token for token in bare if token == tokenizer.bos_token_id]
    flags = [one.supervised is None] * len(ids)
    for start, end in itertools.pairwise(sorted({0, len(one.text), *itertools.chain(*spans)})):
        part = tokenizer.encode(one.text[start:end], add_special_tokens=False)
        ids += part
        flags += [any(first <= start and end <= last for first, last in spans)] * len(part)
    return ids, np.array(flags, np.bool_), False


@contextmanager
def allow_rust_threads(wanted: bool = True) -> Iterator[None]:
    """Enable Rust's threads while this process tokenizes, and disable them afterwards.

    A worker forked later inherits the thread pool's locks but not its threads: with parallelism still enabled, whatever
    the environment says, its first batch would hang.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if wanted and os.getpid() == IMPORTED_BY else "false"
    try:
        yield
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
