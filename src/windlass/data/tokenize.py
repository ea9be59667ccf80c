"""Turn rows into token ids and mark the supervised ones, some rows at a time."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from windlass.data.answers import RenderedRow
from windlass.data.documents import COUNTS, LEFT_OUT, PART_BITS, REMARK, UNFIT, Documents, Flags, Found, assemble
from windlass.data.formats import Format, render_rows
from windlass.data.reading import Row, split_into_batches
from windlass.data.words import Ids, encode_texts
from windlass.errors import UserError, Where

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from windlass.model import Base
    from windlass.runfile import Loaded, Model

# Token ids; supervised flags, None for all; whether a token crosses the edge of a supervised part.
Encoded = tuple[list[int] | npt.NDArray[np.integer[Any]], Flags | None, bool]

# A process with another id was forked from the one that imported this module, perhaps after threads had started.
IMPORTED_BY = os.getpid()
EQUAL = "chosen equals rejected"  # why a pair is left out


def tokenize(
    rows: Iterable[Row],
    kind: Format,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    *,
    threads: bool = True,
    place: Callable[..., str] = lambda *numbers: f"row {numbers[0] + 1}",
) -> Documents:
    """Tokenize all rows that have a supervised token. `counts` records what became of each row; `place`: where rows
    are."""
    with allow_rust_threads(threads):
        rendered = (render_rows(batch, kind) for batch in split_into_batches(iter(rows)))
        return assemble(
            (tokenize_rows(*each, kind, tokenizer, max_length) for each in rendered), kind, max_length, place=place
        )


def tokenize_rows(
    rows: Sequence[Sequence[RenderedRow]], left_out: Mapping[str, list[int]], kind: Format, tokenizer: Any, length: int
) -> tuple[Documents, Found]:
    """Return the documents of rendered rows, cut to a length, and what a user should know of the rows."""
    found: Found = {(LEFT_OUT, why): ("", numbers) for why, numbers in left_out.items()}
    for number, row in enumerate(rows):
        for name, example in dict(itertools.chain(*(one.remarks.items() for one in row))).items():
            found.setdefault((REMARK, name), (example, []))[1].append(number)
    filled = [number for number, row in enumerate(rows) if row]
    split = [len(row) for row in rows if len(row) > 1 and not kind.pairs]
    counts = dict.fromkeys(COUNTS, 0)
    counts |= {"rows": len(rows), "empty": len(rows) - len(filled), "split": len(split), "split_into": sum(split)}
    rendered = [*itertools.chain(*rows)]
    encoded = encode_batch(rendered, tokenizer)
    documents = collect_documents(rendered, encoded, tokenizer.eos_token_id, None if kind.pairs else length, counts)
    if kind.pairs:
        documents, unfit, longest = join_pairs(documents, length, tokenizer.bos_token_id, counts, kind.cuts_prompts)
        equal = unfit.pop(EQUAL, [])
        if equal:  # no gradient comes of them
            documents = documents.take(np.delete(np.arange(len(filled)), equal))
            counts["unsupervised"] += len(equal)
            found[LEFT_OUT, EQUAL] = ("", [filled[pair] for pair in equal])
        found |= {(UNFIT, code): (str(longest), [filled[pair] for pair in pairs]) for code, pairs in unfit.items()}
        documents.counts = counts
    return documents, found


def collect_documents(
    rendered: Sequence[RenderedRow],
    encoded: Sequence[Encoded],
    eos: int | None,
    max_length: int | None,
    counts: dict[str, int],
) -> Documents:
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
                last = any(end == len(one.text) for _, end in one.spans)
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
    return Documents(
        np.frombuffer(flat, np.int32),
        np.frombuffer(supervised, np.bool_),
        np.array(lengths, np.int64),
        np.array(hashes, np.uint64),
        counts,
    )


def join_pairs(
    sequences: Documents, max_length: int, bos: int | None, counts: dict[str, int], cuts_prompts: bool
) -> tuple[Documents, dict[str, list[int]], int]:
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
    documents = Documents(
        sequences.ids[kept], supervised[kept], lengths.sum(1), hashes, chosen_lengths=lengths[:, 0].copy()
    )
    unfit = {"empty-answer": empty, EQUAL: equal, "too-long": long}
    return documents, {code: pairs for code, pairs in unfit.items() if pairs}, most


def encode_batch(rendered: Sequence[RenderedRow], tokenizer: Any) -> list[Encoded]:
    if not tokenizer.is_fast:
        return [encode_slowly(one, tokenizer) if one.ids is None else wrap_tokens(one, one.ids) for one in rendered]
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    encoded: list[Encoded] = [([], None, False) if one.ids is None else wrap_tokens(one, one.ids) for one in rendered]
    for closed, partial in itertools.product((False, True), repeat=2):
        wanted = (closed, not partial)
        chosen = [i for i, one in enumerate(rendered) if one.ids is None and (one.closed, one.everything) == wanted]
        markers = read_markers(tokenizer, len(tokenizer)) if closed and partial else None
        if closed and (markers is not None or not partial):
            plain = dict(zip(chosen, encode_texts([rendered[i].text for i in chosen], tokenizer), strict=True))
            for i, ids in plain.items():
                flags = flag_between_markers(ids, rendered[i], markers) if markers else None
                encoded[i] = (ids, flags, False)
            chosen = [i for i in chosen if partial and encoded[i][1] is None]
        # Offsets take time: requested only if parts are supervised.
        call = backend.encode_batch if partial else backend.encode_batch_fast
        results = call([rendered[i].text for i in chosen], add_special_tokens=not closed)
        for i, done in zip(chosen, results, strict=True):
            encoded[i] = (done.ids, None, False)
            if partial:
                spans, text = rendered[i].spans, rendered[i].text
                found = find_supervised_tokens(done, spans, text, closed=closed, tokenizer=tokenizer)
                encoded[i] = (done.ids, *found)
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
    for start, end in one.spans:
        ends = one.text[start : start + 1] + one.text[end - 1 : end]
        if start >= end or ends != "".join(ends.split()) or start not in edges or end not in edges:
            return None
        flags[edges[start] : edges[end]] = True
    return flags


def wrap_tokens(one: RenderedRow, ids: npt.NDArray[np.int64]) -> Encoded:
    """Wrap a row that consists of tokens already."""
    flags = np.zeros(len(ids), np.bool_)
    for start, end in one.spans:
        flags[start:end] = True
    return ids, None if one.everything else flags, False


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
    spans = ((0, len(one.text)),) if one.everything else one.spans
    bare = [] if one.closed else tokenizer.build_inputs_with_special_tokens([])
    ids = [token for token in bare if token == tokenizer.bos_token_id]
    flags = [one.everything] * len(ids)
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


def open_model_tokenizer(loaded: Loaded) -> tuple[Any, int]:
    """Return the model's tokenizer and the number of rows of its embedding."""
    from windlass.model import find_base

    base = find_base(loaded.run.model.model_name_or_path, loaded.where("model.model_name_or_path"))
    return open_tokenizer(base, loaded.run.model, loaded.where), base.dims["vocab"]


def open_tokenizer(base: Base, model: Model, where: Where) -> Any:
    """Open the tokenizer in the model's folder."""
    from transformers import AutoTokenizer

    place = where("model.model_name_or_path")
    named = Path(model.model_name_or_path)
    folder = base.path or (named if (named / "tokenizer_config.json").is_file() else None)
    if folder is None:
        hint = "name the model's folder, or download it with `windlass fetch RUN`"
        raise UserError(f"no tokenizer at {model.model_name_or_path}", place, hint, "no-tokenizer")
    hint = "copy tokenizer.json and tokenizer_config.json there"
    try:
        # With mistral-common installed and a tekken.json, it would be a tokenizer that renders no template.
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=model.trust_remote_code, mistral_format=False
        )
    except Exception as error:  # a damaged file makes the library raise any kind of error
        why = (str(error).splitlines() or [type(error).__name__])[0][:200]
        problem = f"{folder} has no tokenizer that can be opened: {why}"
        raise UserError(problem, place, hint, "unreadable-tokenizer") from None
    # Without files, transformers makes some families' tokenizers of their special tokens, and at most a word boundary.
    if len(tokenizer) - len(tokenizer.get_added_vocab()) < 2:
        problem = f"{folder} has no tokenizer: transformers makes one of {len(tokenizer)} special tokens alone"
        raise UserError(problem, place, hint, "no-tokenizer")
    return tokenizer
