"""Zeros where weights should be: the holes of an interrupted download into a file of full size.

A hole begins and ends at a page of the file, and weights don't: it leaves rows that are cut, zero in part among rows
that are not, or by chance rows that end where pages do. What is zero for a reason looks otherwise: padded columns cut
every row; rows of padding, of pruned neurons, of experts never used or of tokens never trained are zero in full, end
anywhere or in many matrices, and are warned of where that is odd; norms and biases have one dimension, and are not
looked at.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from math import prod
from typing import Any, Final, Literal

import numpy as np
from torch import Tensor, uint8

from windlass.model import Base, Stored
from windlass.model.files import abbreviate

WORD: Final = 8  # bytes that are looked at together
RUN: Final = 64  # zero words in a row that weights don't have by chance; in a short row, half of it
RARE: Final = 8  # one cut row, or matrix with a hole, in so many is no pattern
PAGE: Final = 4096  # bytes in a file of which what disks and downloads leave out is a multiple
BlankRows = dict[str, list[int]]  # by stored tensor
Kind = Literal["zero", "cut", "beside"]


class Blanks:
    """Rows that are zero, in part or in full, met while weights are read. Thread-safe: appending is atomic."""

    def __init__(self) -> None:
        self._found: list[tuple[Kind, str, Any]] = []

    def add(self, stored: Stored, box: Sequence[tuple[int, int]], values: Tensor) -> None:
        """Look at a chunk of full rows. A sampled word is zero in each run that counts: the rest is not touched."""
        width = stored.shape[-1] * values.element_size() if len(stored.shape) > 1 else 0
        run = min(RUN, width // WORD // 2)
        if run < 2 or width % WORD or not values.numel():
            return
        words = values.detach().reshape(-1).view(uint8).numpy().reshape(-1, width).view(np.uint64)
        suspects = np.flatnonzero((words[:, :: run // 2] == 0).any(1) | (words[:, -1] == 0))
        if not suspects.size:
            return
        places = np.unravel_index(suspects, [stop - start for start, stop in box[:-1]])
        starts = [start for start, _ in box[:-1]]
        rows = np.ravel_multi_index(
            [place + start for place, start in zip(places, starts, strict=True)], stored.shape[:-1]
        )
        is_zero = ~words[suspects].any(1)
        self._found.append(("zero", stored.key, rows[is_zero]))
        for row, number in zip(words[suspects[~is_zero]], rows[~is_zero], strict=True):
            gaps = np.diff(np.concatenate(([-1], np.flatnonzero(row), [len(row)])))
            if gaps.max() > run:
                self._found.append(("cut", stored.key, [number]))
            else:  # a hole would go on there
                if gaps[0] > 1:
                    self._found.append(("beside", stored.key, [number - 1]))
                if gaps[-1] > 1:
                    self._found.append(("beside", stored.key, [number + 1]))

    def rows(self) -> dict[Kind, BlankRows]:
        """Return the rows that are zero in full, those that are zero in part, and the neighbours of those that begin or
        end with a few zeros."""
        kinds: tuple[Kind, ...] = ("zero", "cut", "beside")
        by_kind: dict[Kind, BlankRows] = {kind: defaultdict(list) for kind in kinds}
        for kind, key, rows in self._found:
            if len(rows):
                by_kind[kind][key] += map(int, rows)
        return {kind: dict(rows) for kind, rows in by_kind.items()}


def judge_blanks(base: Base, by_rank: Sequence[Mapping[Kind, BlankRows]], tokens: int) -> tuple[list[str], list[str]]:
    """Return what can only be damage, and what a user should know. tokens: how many ids the tokenizer has."""
    found: dict[Kind, dict[str, set[int]]] = {kind: defaultdict(set) for kind in ("zero", "cut", "beside")}
    for kind, by_key in ((kind, rows) for of_rank in by_rank for kind, rows in of_rank.items()):
        for key, rows in by_key.items():
            found[kind][key].update(rows)
    zero, cut, beside = found.values()
    damage: list[str] = []
    holes: dict[str, str] = {}
    empty: list[str] = []
    notes: list[str] = []
    matrices = 0
    for parameter in base.parameters:
        is_vocab = parameter.part in ("embedding", "head") and parameter.shape[:1] == (base.dims["vocab"],)
        for piece in parameter.pieces:
            key = piece.stored.key
            count = prod(piece.stored.shape[:-1])
            matrices += count > 1
            is_rare = RARE * len(cut[key] | beside[key]) <= count - len(zero[key])
            begins = cut[key] | (beside[key] & zero[key])
            hole = find_hole(piece.stored, zero[key])
            if begins and is_rare:
                damage.append(f"{key!r} has zeros from within row {min(begins)} on, where weights should be")
            elif is_vocab:
                odd = sorted(row for row in zero[key] if row < tokens and row != base.config.get("pad_token_id"))
                if odd:
                    listed = abbreviate([*map(str, odd)])
                    notes.append(f"rows of zeros in {key} ({len(odd):,}): tokens {listed}, damaged or never trained")
            elif hole:
                holes[key] = hole
            elif 2 * len(zero[key]) > count > 1:
                empty.append(key)
    if RARE * len(holes) <= matrices:
        damage += [f"{key!r} has zeros in rows {rows}, where weights should be" for key, rows in holes.items()]
    else:
        notes.append(f"rows of zeros in weights ({len(holes):,}), damaged or pruned: {abbreviate([*holes])}")
    if empty:
        notes.append(f"weights of zeros, in full or for the most part ({len(empty):,}): {abbreviate(empty)}")
    return damage, notes


def find_hole(stored: Stored, zero: Set[int]) -> str:
    """Return the first rows of zeros that end where pages of the file do, within a matrix; empty without any."""
    rows = np.array(sorted(zero), np.int64)
    count = prod(stored.shape[:-1])
    for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1) if len(rows) else ():
        ends = [row for row in (int(run[0]), int(run[-1]) + 1) if 0 < row < count]
        places = [stored.start + row * (stored.end - stored.start) // count for row in ends]
        # Experts that were never used are whole matrices of a stack.
        if any(row % stored.shape[-2] for row in ends) and not any(place % PAGE for place in places):
            return f"{run[0]:,} to {run[-1]:,}"
    return ""
