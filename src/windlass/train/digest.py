"""A digest of weights that does not depend on who read which rows of them: a hash of every row, added up.

Of a row by its tensor's name, dtype and shape and by its place, modulo 2^64. It finds damage, swaps and other versions
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
hash_row: Callable[[Any], int] = xxh3_64_intdigest

Words = np.ndarray[Any, np.dtype[np.uint64]]


def digest_box(stored: Stored, box: Sequence[tuple[int, int]], values: Tensor) -> int:
    """Of the rows of `stored` inside `box`, of which `values` are the stored bytes. Any thread may call it."""
    shape = stored.shape if len(stored.shape) > 1 else (*stored.shape, 1)  # a vector's rows are its elements
    box = box if len(stored.shape) > 1 else (*box, (0, 1))
    if box[-1] != (0, shape[-1]):
        raise AssertionError(f"a row of {stored.key!r} is not in one piece: {box}")
    if not values.numel():
        return 0
    width = shape[-1] * values.element_size()
    rows = values.detach().reshape(-1).view(torch.uint8).numpy().reshape(-1, width)
    hashes: Words = np.fromiter(map(hash_row, rows), np.uint64, len(rows))
    place = np.zeros(1, np.uint64)
    for (start, stop), size in zip(box[:-1], shape[:-1], strict=True):
        place = np.add.outer(place * np.uint64(size), np.arange(start, stop, dtype=np.uint64)).reshape(-1)
    return int(_mixed(hashes ^ _mixed(place ^ _name_key(stored))).sum(dtype=np.uint64))


def digest_text(total: int) -> str:
    return f"{total % MODULUS:016x}"


@functools.lru_cache(maxsize=4096)
def _name_key(stored: Stored) -> np.uint64:
    text = f"{stored.key} {stored.dtype} {list(stored.shape)}".encode()
    return np.uint64(hash_row(text))


def _mixed(words: Words) -> Words:
    """Every bit of a word into every other (the finaliser of SplitMix64)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
