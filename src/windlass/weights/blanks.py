"""Zeros where weights should be: the holes of an interrupted download into a file of full size.

A hole begins and ends anywhere, so it leaves rows that are cut: zero in part, among rows that are not. What is zero for
a reason looks otherwise: padded columns cut every row; rows of padding, of experts never used or of tokens never
trained are zero in full, and are warned of where that is odd; norms and biases have one dimension, and are not looked
at.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final

import numpy as np
from torch import Tensor, uint8

from windlass.model import Base, Stored
from windlass.model.files import abbreviate

WORD: Final = 8  # bytes that are looked at together
RUN: Final = 64  # zero words in a row that weights don't have by chance; in a short row, half of it
RARE: Final = 8  # one cut row in so many is no pattern
Rows = dict[str, list[int]]  # by stored tensor


class Blanks:
    """Rows that are zero, in part or in full, met while weights are read. Thread-safe: appending is atomic."""

    def __init__(self) -> None:
        self._found: list[tuple[str, Any, bool]] = []

    def add(self, stored: Stored, box: Sequence[tuple[int, int]], values: Tensor) -> None:
        """Look at a chunk of full rows. A sampled word is zero in each run that counts: the rest is not touched."""
        width = stored.shape[-1] * values.element_size() if len(stored.shape) > 1 else 0
        run = min(RUN, width // WORD // 2)
        if run < 2 or width % WORD or not values.numel():
            return
        words = values.detach().reshape(-1).view(uint8).numpy().reshape(-1, width).view(np.uint64)
        suspects = np.flatnonzero((words[:, :: run // 2] == 0).any(1))
        if not suspects.size:
            return
        places = np.unravel_index(suspects, [stop - start for start, stop in box[:-1]])
        starts = [start for start, _ in box[:-1]]
        rows = np.ravel_multi_index(
            [place + start for place, start in zip(places, starts, strict=True)], stored.shape[:-1]
        )
        is_zero = ~words[suspects].any(1)
        self._found.append((stored.key, rows[is_zero], False))
        for row, number in zip(words[suspects[~is_zero]], rows[~is_zero], strict=True):
            edges = np.concatenate(([-1], np.flatnonzero(row), [len(row)]))
            if np.diff(edges).max() > run:
                self._found.append((stored.key, [number], True))

    def rows(self) -> tuple[Rows, Rows]:
        """Return the rows that are zero in part, and those that are zero in full."""
        by_kind: dict[bool, Rows] = {True: defaultdict(list), False: defaultdict(list)}
        for key, rows, is_cut in self._found:
            by_kind[is_cut][key] += map(int, rows)
        return dict(by_kind[True]), {key: rows for key, rows in by_kind[False].items() if rows}


def judge_blanks(base: Base, by_rank: Sequence[tuple[Rows, Rows]], tokens: int) -> tuple[list[str], list[str]]:
    """Return what can only be damage, and what a user should know. tokens: how many ids the tokenizer has."""
    cut: Mapping[str, set[int]] = defaultdict(set)
    zero: Mapping[str, set[int]] = defaultdict(set)
    for cut_of_rank, zero_of_rank in by_rank:
        for total, of_rank in ((cut, cut_of_rank), (zero, zero_of_rank)):
            for key, rows in of_rank.items():
                total[key].update(rows)
    damage: list[str] = []
    empty: list[str] = []
    notes: list[str] = []
    for parameter in base.parameters:
        for piece in parameter.pieces:
            key = piece.stored.key
            count = prod(piece.stored.shape[:-1])
            if 0 < RARE * len(cut[key]) <= count - len(zero[key]):
                damage.append(f"{key!r} has zeros from within row {min(cut[key])} on, where weights should be")
            elif parameter.part in ("embedding", "head") and parameter.shape[:1] == (base.dims["vocab"],):
                odd = sorted(row for row in zero[key] if row < tokens and row != base.config.get("pad_token_id"))
                if odd:
                    listed = abbreviate([*map(str, odd)])
                    notes.append(f"rows of zeros in {key} ({len(odd):,}): tokens {listed}, damaged or never trained")
            elif 2 * len(zero[key]) > count > 1:
                empty.append(key)
    if empty:
        notes.append(f"weights of zeros, in full or for the most part ({len(empty):,}): {abbreviate(empty)}")
    return damage, notes
