"""Where answers begin and end in rendered chats: comparisons of texts, with the tokens that are never split, and the
shapes of chats with the same roles in the same order."""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Span = tuple[int, int]
Place = tuple[int, int]  # a piece, and the characters before it there
THOUGHT = re.compile("think|thought|reason", re.IGNORECASE)  # in what opens a thought


class RenderedRow(NamedTuple):
    """Text of one row, and the spans that the loss is computed on: of a chat the answers', by the turn's number.

    `closed` text has its own first and last tokens, as chat templates write them. A row of tokens has `ids` instead of
    text, and spans of ids.
    """

    text: str
    answers: Mapping[int, Span] = {}
    length: int = 0
    """Turns of a chat that were rendered."""
    remarks: Mapping[str, str] = {}
    """What a user should know of it, by kinds of audit.FACTS and WARNINGS, with an example."""
    everything: bool = False
    """Whether the loss is computed on all of it."""
    closed: bool = False
    ids: npt.NDArray[np.int64] | None = None
    whole: str = ""
    """Of a chat that became several rows: the text of all of them."""
    part: int = 0
    """And the number of this one."""

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(self.answers.values())


class Answer(NamedTuple):
    """An answer in the rendering of the chat that ends with it: `body` is where its own words end."""

    text: str
    start: int
    end: int
    body: int
    after_prompt: bool = True
    """Whether it begins behind the prompt that the template writes for it."""


class Pieces:
    """Texts as pieces: added tokens of a tokenizer, white space, and what is between them."""

    def __init__(self, tokens: Iterable[str], stops: Iterable[str] = ()) -> None:
        self.tokens = tuple(sorted(filter(str.strip, tokens), key=len, reverse=True))
        self.stops = tuple(stops)

    @cached_property
    def token(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.tokens)) or r"(?!)")

    @cached_property
    def closing(self) -> re.Pattern[str]:
        """Tokens and white space only, but for the name of a channel between two tokens."""
        token = rf"(?:{self.token.pattern})"
        return re.compile(rf"(?:{token}\w+\s*{token}|{token}|\s)*")

    def edges(self, text: str) -> list[int]:
        """Return where pieces begin and end."""
        found = re.finditer(rf"(?:{self.token.pattern})|\s+", text)
        return sorted({0, len(text), *(edge for match in found for edge in match.span())})

    def find_opener(self, header: str) -> str:
        """Return the last token of a header but for the thought that it may open."""
        return next((token for token in reversed(self.token.findall(header)) if not THOUGHT.search(token)), "")

    def find_change(self, text: str, other: str) -> int:
        """Return how far a text begins as another one, in whole pieces."""
        same = common_prefix_length(text, other)
        return same if same == len(other) else max(edge for edge in self.edges(text) if edge <= same)

    def find_start(self, text: str, prompt: str, before: Callable[[], str], header: str) -> tuple[int, bool] | None:
        """Return where an answer begins in `text`, and whether that is behind the prompt that is written for it.

        White space may differ. Reasoning templates open a thought in the prompt, which a finished answer may lack: of
        the prompt, whole tokens and white space may be absent behind the header, or words in a line of their own.
        `before`: the prompt without header.
        """
        at, matched = (len(prompt), len(prompt)) if text.startswith(prompt) else match(text, prompt)
        behind = True
        if matched < len(prompt):
            begin = self.find_change(prompt, before())
            edge = max(edge for edge in (*self.edges(prompt), begin) if edge <= matched)
            at = match(text, prompt[:edge])[0]
            line = prompt.rfind("\n", begin, edge) + 1
            if self.token.search(prompt, begin, line) and not self.token.search(prompt, line):
                edge = line
                at = match(text, prompt[:edge])[0]
            elif not self.closing.fullmatch(prompt, edge) or (edge == begin and self.token.match(text, at)):
                return None
            if edge < begin:
                return None
            behind = edge > begin or THOUGHT.search(prompt, edge) is not None
        elif not prompt.rstrip().endswith(header.strip()):
            found = self.skip_header(text, at, header)
            at, behind = found, found == at
        elif not text.startswith(prompt) and prompt[-1].isspace():
            at = len(text) - len(text[at:].lstrip())  # the header's own white space, which differs
        return at, behind

    def skip_header(self, text: str, at: int, header: str) -> int:
        """Return the end of the header, or of its last pieces, if it follows: prompts may lack it behind answers."""
        for edge in self.edges(header):
            left = header[edge:]
            named = edge == 0 or (self.token.match(left) and not THOUGHT.search(left))  # a thought is the answer's own
            if left.strip() and named:
                rest = text[at : at + 2 * len(left) + 8]
                after, matched = match(rest, left)
                if matched == len(left):
                    return at + after
        return at

    def find_header(self, text: str, header: str) -> int | None:
        """Return the end of the last header in `text`, without the thought that it may open."""
        for edge in reversed(self.edges(header)):
            head = header[:edge].strip()
            worded = self.token.search(head) and not self.token.search(header, edge)  # a thought that words open
            at = text.rfind(head) if head and (worded or self.closing.fullmatch(header, edge)) else -1
            if at >= 0:
                return at + match(text[at:], header[:edge])[0]
        return None

    def find_unclosed(self, text: str) -> str | None:
        """Return the token that would close what another one has begun."""
        written = self.token.findall(text)
        pairs = [(token, token.replace("begin", "end")) for token in written if "begin" in token]
        return next((end for token, end in pairs if written.count(end) < written.count(token)), None)

    def trim_mark(self, text: str, start: int, end: int, header: str, *, close: bool) -> Span:
        """Return a template's own mark without pieces of the header, up to the token that closes the turn."""
        for edge in self.edges(header)[:-1]:
            if text.startswith(header[edge:], start) and text.endswith(header[:edge], 0, start):
                start += len(header) - edge
                break
        else:
            heads = [edge for edge in self.edges(header) if text.startswith(header[:edge], start)]
            first = self.token.match(header)
            start += max(heads, default=0) if first and not THOUGHT.search(first[0]) else 0
        bare = len(text[:start].rstrip())
        if header and text.endswith(header, 0, bare):
            start = bare  # white space that no prompt has is the model's to write
        stop = len(text[:end].rstrip())
        end = stop if text.endswith(self.stops, start, stop) else end
        return start, self.close(text, start, end, self.find_opener(header)) if close and start < end else end

    def close(self, text: str, start: int, end: int, opener: str) -> int:
        """Return an answer's end with the token that follows it, if that is one to stop at and the answer has none, or
        if the answer ends in no token at all; the opener of another answer ends none."""
        follows = re.compile(rf"\s*({self.token.pattern})").match(text, end)
        if not follows or follows[1] == opener:
            return end
        ends = self.stops if follows[1] in self.stops else self.tokens
        return end if text.endswith(ends, start, start + len(text[start:end].rstrip())) else follows.end()

    def find_last(self, text: str, words: str) -> int:
        """Return where the words begin last, before the tokens that the text ends with if they can; -1 without any."""
        end = len(text.rstrip())
        while closing := next((token for token in self.tokens if text.endswith(token, 0, end)), None):
            end = len(text[: end - len(closing)].rstrip())
        found = text.rfind(words, 0, end) if words else -1
        return found if found >= 0 or not words else text.rfind(words)

    def find_end(self, text: str, start: int) -> int:
        """Return where an answer that `text` ends with ends: with the token that closes it, if there is one."""
        end = len(text.rstrip())
        return end if end > start and text.endswith(self.tokens, start, end) else len(text)

    def find_in(self, text: str, answer: Answer, opener: str) -> int | None:
        """Return the answer's end in a rendering of a longer chat, or None if that differs from the answer's own.

        The tokens that close it may be fewer, or missing from its own rendering: then it takes the one that follows,
        unless that opens another answer.
        """
        own, _, end, body, _ = answer
        same = common_prefix_length(text, own)
        if same >= end:
            return self.close(text, body, end, opener)
        if same < body or not self.closing.fullmatch(own, body, end):
            return None
        closed_at = [token.end() for token in self.token.finditer(own, body, end) if token.end() <= same]
        return closed_at[-1] if closed_at else None


def join_spans(text: str, spans: Iterable[Span]) -> list[Span]:
    """Return spans with those joined that only white space is between."""
    joined: list[Span] = []
    for start, end in spans:
        if joined and not text[joined[-1][1] : start].strip():
            start, _ = joined.pop()
        joined.append((start, end))
    return joined


def match(text: str, prompt: str) -> Span:
    """Return how many characters of either agree from the start on, white space aside."""
    at = matched = common_prefix_length(text, prompt)
    while matched < len(prompt):
        if at < len(text) and text[at] == prompt[matched]:
            at += 1
            matched += 1
        elif prompt[matched].isspace():
            matched += 1
        elif at < len(text) and text[at].isspace():
            at += 1
        else:
            break
    return at, matched


def common_prefix_length(one: str, other: str) -> int:
    """Return the length of the longest common prefix of two texts."""
    low = 0
    high = min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # one[:low] is common, one[:high] is not
        middle = (low + high) // 2
        if one.startswith(other[low:middle], low):
            low = middle
        else:
            high = middle
    return low


class RowShape(NamedTuple):
    """What a template writes between the contents of chats of one shape, found once, on a chat of placeholders: how
    many turns a row has, the pieces between their contents, and where answers are."""

    length: int
    order: tuple[int, ...]
    """Whose contents follow each piece but the last."""
    pieces: tuple[str, ...]
    answers: Mapping[int, tuple[Place, Place]]

    def find_answers(self, text: str, contents: Sequence[str]) -> dict[int, Span] | None:
        """Return the answers' spans if this text is what the template should write for these contents."""
        pairs = zip(self.pieces, map(contents.__getitem__, self.order), strict=False)
        parts = [*itertools.chain.from_iterable(pairs), self.pieces[-1]]
        if text != "".join(parts):
            return None
        starts = [0, *itertools.accumulate(map(len, parts))][::2]
        return {i: (starts[a] + before, starts[b] + after) for i, ((a, before), (b, after)) in self.answers.items()}


def make_placeholders(count: int) -> list[str]:
    return [f"qz{number:05}zq" for number in range(count)]


def find_shape(text: str, answers: Mapping[int, Span], count: int) -> RowShape | None:
    """Return the shape of a row of placeholders, or None unless all up to the last answer occur once."""
    last = max(answers, default=count - 1)
    found = sorted((text.find(word), i) for i, word in enumerate(make_placeholders(count)) if word in text)
    order = [i for _, i in found]
    words = make_placeholders(count)
    if not {*range(last + 1)} <= {*order} or any(text.count(words[i]) != 1 for i in order):
        return None
    edges = [0, *itertools.chain(*((at, at + len(words[i])) for at, i in found)), len(text)]
    starts = edges[::2]
    pieces = tuple(text[a:b] for a, b in zip(starts, edges[1::2], strict=True))

    def locate(at: int) -> Place:
        piece = bisect_right(starts, at) - 1
        return piece, at - starts[piece]

    places = {i: (locate(start), locate(end)) for i, (start, end) in answers.items()}
    if any(offset > len(pieces[piece]) for place in places.values() for piece, offset in place):
        return None  # an edge within a content
    return RowShape(count, tuple(order), pieces, places)
