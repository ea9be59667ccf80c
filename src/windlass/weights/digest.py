"""A digest of weights that is independent of which rank reads which rows: hashes of small groups of rows, added up.

Each hash covers a group of consecutive rows and is seeded with the tensor's name, dtype and shape and the group's
index; hashes are added modulo 2^64. The grouping depends only on the tensor: the rank that has a group's first row
reads the group to its end. The digest finds damage, swaps and other versions of a model; it is no defence against a
forged model.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from windlass.model import Stored

MODULUS: Final = 2**64
TOGETHER: Final = 2**15  # largest group in bytes, unless a single row is larger
hash_rows: Callable[[Any, int], int] = xxh3_64_intdigest

Box = Sequence[tuple[int, int]]


def rows_per_group(rows: int, width: int) -> int:
    """Return the number of rows in a group: one call per row would cost half as much as the hashing itself.

    A group is small compared with a tensor's rows (1/256 at most): each rank reads half a group more on average.
    """
    return max(1, min(TOGETHER // width, rows // 256))


def digest_box(stored: Stored, box: Box, values: Tensor, read: Callable[[Stored, Box, Tensor], None]) -> int:
    """Return the digest of the groups of rows that begin inside `box`; `values` are its stored bytes.

    `read` reads rows behind the box that complete the last group. Thread-safe.
    """
    vector = len(stored.shape) < 2
    shape = (*(1,) * (1 - len(stored.shape)), *stored.shape, *(1,) * vector)  # each element of a vector is a row
    wide = (*((0, 1),) * (1 - len(stored.shape)), *box, *((0, 1),) * vector)
    if wide[-1] != (0, shape[-1]):
        raise AssertionError(f"a row of {stored.key!r} is not in one piece: {box}")
    if not values.numel():
        return 0
    start, stop = wide[-2]
    rows = shape[-2]
    width = shape[-1] * values.element_size()
    together = rows_per_group(rows, width)
    first = -(-start // together)  # groups
    last = -(-stop // together)
    if first == last:
        return 0
    numbers = [0]  # numbers of the matrices in the box
    for (begin, close), size in zip(wide[:-2], shape[:-2], strict=True):
        numbers = [number * size + index for number in numbers for index in range(begin, close)]
    own = _view_bytes(values).reshape(len(numbers), -1)[:, (first * together - start) * width :]
    full = own.shape[1] // (together * width)
    rest = own[:, full * together * width :]
    end = min(last * together, rows)
    if end > stop:
        beyond = (*wide[:-2], (stop, end), wide[-1])[: len(stored.shape)]
        behind = torch.empty([b - a for a, b in beyond], dtype=values.dtype)
        read(stored, beyond, behind)
        rest = np.concatenate([rest, _view_bytes(behind).reshape(len(own), -1)], axis=1)
    total = 0
    for number, matrix, remaining in zip(numbers, own, rest, strict=True):
        seed = _hash_name(stored) + number * -(-rows // together) + first  # a group's index seeds its hash
        groups = matrix[: full * together * width].reshape(full, together * width)
        total += sum(map(hash_rows, groups, range(seed, seed + full)))
        total += hash_rows(remaining, seed + full) if full < last - first else 0
    return total % MODULUS


def _view_bytes(values: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return values.detach().reshape(-1).view(torch.uint8).numpy()


def format_digest(total: int) -> str:
    return f"{total % MODULUS:016x}"


@functools.lru_cache(maxsize=4096)
def _hash_name(stored: Stored) -> int:
    text = f"{stored.key} {stored.dtype} {list(stored.shape)}".encode()
    return hash_rows(text, 0) // 2  # leaves room for the groups' indices
