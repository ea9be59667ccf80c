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
hash_rows: Callable[[Any, int], int] = xxh3_64_intdigest

Box = Sequence[tuple[int, int]]


def rows_together(rows: int, width: int) -> int:
    """How many rows of so many bytes have one hash: a call for each would cost half as much as its hash.

    Of many ranks each reads half as many more, so they are few compared with its rows.
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
    numbers = [0]  # of the matrices that the box is in
    for (begin, close), size in zip(wide[:-2], shape[:-2], strict=True):
        numbers = [number * size + index for number in numbers for index in range(begin, close)]
    own = _bytes(values).reshape(len(numbers), -1)[:, (first * together - start) * width :]
    full = own.shape[1] // (together * width)
    rest = own[:, full * together * width :]
    if (end := min(last * together, rows)) > stop:
        beyond = (*wide[:-2], (stop, end), wide[-1])[: len(stored.shape)]
        behind = torch.empty([b - a for a, b in beyond], dtype=values.dtype)
        read(stored, beyond, behind)
        rest = np.concatenate([rest, _bytes(behind).reshape(len(own), -1)], axis=1)
    total = 0
    for number, matrix, remaining in zip(numbers, own, rest, strict=True):
        seed = _name_key(stored) + number * -(-rows // together) + first  # a group's place is a part of its hash
        groups = matrix[: full * together * width].reshape(full, together * width)
        total += sum(map(hash_rows, groups, range(seed, seed + full)))
        total += hash_rows(remaining, seed + full) if full < last - first else 0
    return total % MODULUS


def _bytes(values: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return values.detach().reshape(-1).view(torch.uint8).numpy()


def digest_text(total: int) -> str:
    return f"{total % MODULUS:016x}"


@functools.lru_cache(maxsize=4096)
def _name_key(stored: Stored) -> int:
    text = f"{stored.key} {stored.dtype} {list(stored.shape)}".encode()
    return hash_rows(text, 0) // 2  # leaves room for places
