"""A digest of weights that does not depend on who read which rows of them: a hash of every few rows, added up.

Of a few rows by their tensor's name, dtype and shape and by their place, modulo 2^64. Which rows go together follows
from the tensor alone: whoever has the first of them reads on to their last. It finds damage, swaps and other versions
of a model; it is no defence against somebody who wants two models to have the same one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from windlass.model import Stored

MODULUS: Final = 2**64
TOGETHER: Final = 2**15  # bytes that one hash is of, at most, where a row is no longer
hash_rows: Callable[[Any], int] = xxh3_64_intdigest

Box = Sequence[tuple[int, int]]
Words = np.ndarray[Any, np.dtype[np.uint64]]


def rows_together(rows: int, width: int) -> int:
    """How many rows of so many bytes have one hash: a call for each would cost half as much as its hash.

    Of many ranks each reads half as many more, so they are few beside its rows.
    """
    return max(1, min(TOGETHER // width, rows // 256))


def digest_box(stored: Stored, box: Box, values: Tensor, read: Callable[[Stored, Box, Tensor], None]) -> int:
    """Of the groups of rows of `stored` that begin inside `box`, of which `values` are the stored bytes.

    `read` gets the rows behind the box that the last group lacks. Any thread may call it.
    """
    vector = len(stored.shape) < 2
    shape = (*(1,) * (1 - len(stored.shape)), *stored.shape, *(1,) * vector)  # a vector's rows are its elements
    wide = (*((0, 1),) * (1 - len(stored.shape)), *box, *((0, 1),) * vector)
    if wide[-1] != (0, shape[-1]):
        raise AssertionError(f"a row of {stored.key!r} is not in one piece: {box}")
    if not values.numel():
        return 0
    (start, stop), rows, width = wide[-2], shape[-2], shape[-1] * values.element_size()
    together = rows_together(rows, width)
    first, last = -(-start // together), -(-stop // together)  # groups
    if first == last:
        return 0
    own = _bytes(values).reshape(-1, (stop - start) * width)[:, (first * together - start) * width :]
    full = own.shape[1] // (together * width)
    whole, rest = np.split(own, [full * together * width], axis=1)
    if (end := min(last * together, rows)) > stop:
        beyond = (*wide[:-2], (stop, end), wide[-1])[: len(stored.shape)]
        behind = torch.empty([b - a for a, b in beyond], dtype=values.dtype)
        read(stored, beyond, behind)
        rest = np.concatenate([rest, _bytes(behind).reshape(len(own), -1)], axis=1)
    hashes = np.empty((len(own), last - first), np.uint64)
    hashes[:, :full] = np.fromiter(map(hash_rows, whole.reshape(-1, together * width)), np.uint64).reshape(
        len(own), full
    )
    if full < last - first:
        hashes[:, full] = [hash_rows(each) for each in rest]
    place = np.zeros(1, np.uint64)
    for (begin, close), size in zip((*wide[:-2], (first, last)), (*shape[:-2], -(-rows // together)), strict=True):
        place = np.add.outer(place * np.uint64(size), np.arange(begin, close, dtype=np.uint64)).reshape(-1)
    return int(_mixed(hashes.reshape(-1) ^ _mixed(place ^ _name_key(stored))).sum(dtype=np.uint64))


def _bytes(values: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return values.detach().reshape(-1).view(torch.uint8).numpy()


def digest_text(total: int) -> str:
    return f"{total % MODULUS:016x}"


@functools.lru_cache(maxsize=4096)
def _name_key(stored: Stored) -> np.uint64:
    text = f"{stored.key} {stored.dtype} {list(stored.shape)}".encode()
    return np.uint64(hash_rows(text))


def _mixed(words: Words) -> Words:
    """Every bit of a word into every other (the finaliser of SplitMix64)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
