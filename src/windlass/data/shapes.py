"""Chats of one shape, that is with the same roles in the same order: what the template writes between their contents
is found once, on a chat of placeholders; later chats are rendered and compared with that."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from windlass.data.answers import Span

Place = tuple[int, int]  # a piece, and the characters before it there


class RowShape(NamedTuple):
    """A row of such chats: how many turns it has, the pieces between their contents, and where answers are."""

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
