"""A digest of weights that does not depend on who read which rows of them: a hash of every row, added up.

Of a row by its tensor's name, dtype and shape and by its place, modulo 2^64. It finds damage, swaps and other versions
of a model; it is no defence against somebody who wants two models to have the same one.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from windlass.model import Stored

WORD: Final = 8  # bytes
MODULUS: Final = 2**64

Words = np.ndarray[Any, np.dtype[np.uint64]]


def digest_box(stored: Stored, box: Sequence[tuple[int, int]], values: Tensor) -> int:
    """Of the rows of `stored` inside `box`, of which `values` are the stored bytes. Any thread may call it.

    einsum multiplies and adds up a row's words in one pass, for all rows at once.
    """
    shape = stored.shape if len(stored.shape) > 1 else (*stored.shape, 1)  # a vector's rows are its elements
    box = box if len(stored.shape) > 1 else (*box, (0, 1))
    if box[-1] != (0, shape[-1]):
        raise AssertionError(f"a row of {stored.key!r} is not in one piece: {box}")
    if not values.numel():
        return 0
    width = shape[-1] * values.element_size()
    data = values.detach().reshape(-1).view(torch.uint8).numpy().reshape(-1, width)
    if width % WORD:
        data = np.pad(data, ((0, 0), (0, -width % WORD)))
    keys = _keys(data.shape[1] // WORD)
    sums: Words = np.einsum("ij,j->i", data.view(np.uint64), keys)
    # Again by words that begin in the middle of the first ones: alone, two of their highest bits would cancel out.
    sums ^= _mixed(np.einsum("ij,j->i", data[:, WORD // 2 : -WORD // 2].view(np.uint64), keys[1:]))
    place = np.zeros(1, np.uint64)
    for (start, stop), size in zip(box[:-1], shape[:-1], strict=True):
        place = np.add.outer(place * np.uint64(size), np.arange(start, stop, dtype=np.uint64)).reshape(-1)
    return int(_mixed(sums ^ _mixed(place ^ _name_key(stored))).sum(dtype=np.uint64))


def digest_text(total: int) -> str:
    return f"{total % MODULUS:016x}"


@functools.lru_cache(maxsize=64)
def _keys(count: int) -> Words:
    """One odd number for each word of a row."""
    return _mixed(np.arange(1, count + 1, dtype=np.uint64)) | np.uint64(1)


@functools.lru_cache(maxsize=4096)
def _name_key(stored: Stored) -> np.uint64:
    text = f"{stored.key} {stored.dtype} {list(stored.shape)}".encode()
    return np.uint64(int.from_bytes(hashlib.blake2b(text, digest_size=WORD).digest(), "little"))


def _mixed(words: Words) -> Words:
    """Every bit of a word into every other (the finaliser of SplitMix64)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
