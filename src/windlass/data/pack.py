"""Documents into rows of a fixed length, none cut, as few rows as best-fit decreasing makes of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Which documents share a row. Deterministic; rows in the order of their first document.

    Longest first, each into the fullest row that still takes it. The rows open at each remaining room are kept in
    buckets, and the rooms that have one are the bits of a single integer: the tightest fit is its lowest bit at or
    above the document's length.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    rows: list[list[int]] = []
    open_rows: defaultdict[int, list[int]] = defaultdict(list)
    rooms = 0
    for document in order:
        length = lengths[document]
        if not 0 < length <= capacity:
            raise ValueError(f"document {document} has {length} tokens, a row {capacity}")
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            bucket = open_rows[room]
            row = bucket.pop()
            if not bucket:
                rooms &= ~(1 << room)
            rows[row].append(document)
        else:
            room, row = capacity, len(rows)
            rows.append([document])
        if room > length:
            open_rows[room - length].append(row)
            rooms |= 1 << (room - length)
    for members in rows:
        members.sort()
    rows.sort(key=lambda members: members[0])
    return rows
