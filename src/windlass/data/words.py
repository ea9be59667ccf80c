"""Tokenize texts word by word, so that the tokenizer sees each word once: a third of its time for common text."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]

# A space behind a printable character of ASCII. No alternative of PATTERNS has one but at its start, and none looks
# back: so they split the text there, and alike whatever is on the other side.
SPACE = re.compile(r" (?<=[!-~] )")
LETTERS = (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]")
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
BEFORE = r"[^\r\n\p{L}\p{N}]?"
BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {  # by which tokenizers split texts into words, of which each becomes tokens by itself
    # Llama 3, Qwen 2 and 3, Qwen 3.5
    rf"{CONTRACTIONS}|{BEFORE}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{BLANKS}",
    rf"{CONTRACTIONS}|{BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{BLANKS}",
    rf"{CONTRACTIONS}|{BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{BLANKS}",
    # Mistral's Tekken, gpt-oss
    rf"{BEFORE}{LETTERS[0]}*{LETTERS[1]}+|{BEFORE}{LETTERS[0]}+{LETTERS[1]}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*"
    rf"|{BLANKS}",
    rf"{BEFORE}{LETTERS[0]}*{LETTERS[1]}+{CONTRACTIONS}?|{BEFORE}{LETTERS[0]}+{LETTERS[1]}*{CONTRACTIONS}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{BLANKS}",
}
MOST_WORDS = 200_000  # kept at a time: about 40 MB
LONGEST_WORD = 64  # characters; longer ones hardly occur again


class Words:
    """The tokens of words that have occurred, each with the space before it."""

    def __init__(self, backend: Any, added: dict[str, int]) -> None:
        self.backend = backend
        self.added = added
        self.known: dict[str, bytes] = {}

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the tokens of each text, without those that a tokenizer puts around it."""
        if len(self.known) > MOST_WORDS:
            self.known.clear()
        split = [SPACE.split(text) for text in texts]
        firsts = [words.pop(0) for words in split]
        missing = [*set().union(*split).difference(self.known)]
        tokens = [*self.encode_apart([*firsts, *(f" {word}" for word in missing)])]
        self.known.update(zip(missing, tokens[len(firsts) :], strict=True))
        found = [
            np.frombuffer(first + b"".join(map(self.known.__getitem__, words)), np.int32)
            for first, words in zip(tokens, split, strict=False)
        ]
        for word in missing:
            if len(word) > LONGEST_WORD:
                del self.known[word]
        return found

    def encode_apart(self, pieces: Sequence[str]) -> Iterator[bytes]:
        """Yield the tokens of each piece. One text of all takes a tenth of the time of as many short texts: the
        tokenizer parts it at added tokens before anything else."""
        everything = "".join(pieces)
        separators = (token for token in self.added if token not in everything)
        for separator in itertools.islice(separators, 1):
            done = self.backend.encode_batch_fast([separator.join(pieces)], add_special_tokens=False)[0]
            ids = np.array(done.ids, np.int32)
            edges = np.flatnonzero(ids == self.added[separator]).tolist()
            if len(edges) == len(pieces) - 1:  # else one of them begins in a piece, or a longer one is found
                tokens = ids.tobytes()
                for low, high in itertools.pairwise((-1, *edges, len(ids))):
                    yield tokens[4 * low + 4 : 4 * high]
                return
        for done in self.backend.encode_batch_fast(pieces, add_special_tokens=False):
            yield np.array(done.ids, np.int32).tobytes()


def encode_texts(texts: Sequence[str], tokenizer: Any) -> list[Ids]:
    """Return the tokens of each text, without those that a tokenizer puts around it."""
    words = read_words(tokenizer, len(tokenizer))
    if words is not None and texts:
        return words.encode(texts)
    done = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array(one.ids, np.int32) for one in done]


@lru_cache(maxsize=8)
def read_words(tokenizer: Any, _size: int) -> Words | None:
    """Return None for a tokenizer of which it isn't known that it splits texts at each SPACE."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    stages = state["pre_tokenizer"] or {}
    stages = stages.get("pretokenizers", [stages])
    added = state["added_tokens"]
    splits = any(map(splits_words, stages)) and all(map(is_known_stage, stages))
    # Canonical composition never joins a space with what is before it.
    known_normalizer = (state["normalizer"] or {"type": "NFC"})["type"] == "NFC"
    odd = any(one["lstrip"] or one["rstrip"] or one["single_word"] or " " in one["content"] for one in added)
    if not splits or not known_normalizer or odd or state["model"]["type"] != "BPE" or state["model"]["dropout"]:
        return None
    return Words(tokenizer.backend_tokenizer, {one["content"]: one["id"] for one in added})


def splits_words(stage: dict[str, Any]) -> bool:
    """Return whether a stage of a pre-tokenizer splits at each SPACE."""
    if stage.get("type") == "Split":
        kept = (stage["behavior"], stage["invert"]) in (("Isolated", False), ("Removed", True))
        return kept and stage["pattern"].get("Regex") in PATTERNS
    return stage.get("type") == "ByteLevel" and bool(stage.get("use_regex", True))


def is_known_stage(stage: dict[str, Any]) -> bool:
    plain = stage.get("type") == "Digits" or (stage.get("type") == "ByteLevel" and not stage["add_prefix_space"])
    return plain or splits_words(stage)
