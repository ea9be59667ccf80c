"""Where the data are, before anything is read: files, format, splits and numbers of rows. No torch, no datasets."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from windlass.data.source.count import Rows, rows_of
from windlass.data.source.files import Source, resolve
from windlass.data.source.splits import Part, find, locate, parse
from windlass.errors import UserError

if TYPE_CHECKING:
    from windlass.runfile import Data

__all__ = ["KNOWN", "Part", "Rows", "Source", "count_rows", "find", "locate", "parse", "resolve"]

# Rows and bytes of text of published sets, which lets `plan` count steps where the data are not mounted: num_examples
# and num_bytes on the card of huggingface.co/datasets/Salesforce/wikitext.
# Of which so many are blank, counted in the texts; of the training parts, the share of these two is taken.
BLANK = {"validation": 1_299, "test": 1_467}
BLANK_SHARE = sum(BLANK.values()) / (3_760 + 4_358)
KNOWN: dict[tuple[str, str], dict[str, tuple[int, int]]] = {
    ("wikitext", "wikitext-2-raw-v1"): {
        "train": (36_718, 11_061_717),
        "validation": (3_760, 1_159_288),
        "test": (4_358, 1_305_088),
    },
    ("wikitext", "wikitext-2-v1"): {
        "train": (36_718, 10_918_118),
        "validation": (3_760, 1_134_123),
        "test": (4_358, 1_270_947),
    },
    ("wikitext", "wikitext-103-raw-v1"): {
        "train": (1_801_350, 546_500_949),
        "validation": (3_760, 1_159_288),
        "test": (4_358, 1_305_088),
    },
    ("wikitext", "wikitext-103-v1"): {
        "train": (1_801_350, 545_141_915),
        "validation": (3_760, 1_154_751),
        "test": (4_358, 1_295_575),
    },
}


def count_rows(data: Data, split: str, where: Callable[[str], str] = str) -> Rows:
    """Rows of a split (or slice of one) where they can be had without reading it; else None and why."""
    try:
        source = resolve(data, where)
    except UserError as error:
        known = known_rows(data)
        return known_slice(known, split, where) or Rows(None, error.problems[0].problem)
    said = dict(source.said) or known_rows(data)
    if source.format == "hub":
        return known_slice(said, split, where) or Rows(
            None, f"{source.name} is on the hub: rows are known once fetched"
        )
    total, size, blank, how = 0, 0, 0.0, []
    for part in parse(split, where("data.train_split")):
        name = find(part.split, list(source.splits), where("data.train_split"))
        rows = rows_of(source.format, source.splits[name])
        if rows.count is None:
            rows = said.get(name, rows)
        if rows.count is None:
            return rows
        taken = part.bounds(rows.count)
        total += taken[1] - taken[0]
        share = (taken[1] - taken[0]) / max(rows.count, 1)
        size += round((rows.text_bytes or 0) * share)
        blank += rows.blank * share
        how.append(rows.how)
    return Rows(total, "; ".join(dict.fromkeys(how)), size or None, round(blank), rows.blank_how)


def known_rows(data: Data) -> dict[str, Rows]:
    """The figures of a well-known published set, by the last part of its name and its config."""
    name = data.dataset_name_or_path.rstrip("/").split("/")[-1]
    table = KNOWN.get((name, data.dataset_config_name or ""), {})  # asked for, or the default of this very set
    return {
        split: Rows(
            count,
            f"as published: {name}",
            size,
            BLANK.get(split, round(count * BLANK_SHARE)),
            "" if split in BLANK else f" ({BLANK_SHARE:.0%}, as in its other parts)",
        )
        for split, (count, size) in table.items()
    }


def known_slice(known: dict[str, Rows], split: str, where: Callable[[str], str]) -> Rows | None:
    if not known:
        return None
    total, size, blank = 0, 0, 0.0
    for part in parse(split, where("data.train_split")):
        rows = known[find(part.split, list(known), where("data.train_split"))]
        start, stop = part.bounds(rows.count or 0)
        share = (stop - start) / max(rows.count or 0, 1)
        total += stop - start
        size += round((rows.text_bytes or 0) * share)
        blank += rows.blank * share
    return Rows(total, rows.how, size, round(blank), rows.blank_how)
