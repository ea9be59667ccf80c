"""Rows out of files, one after another and always in the same order: the same readers for training and streaming."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from windlass.data.source import Part, Source
from windlass.data.source.count import is_array, opened, rows_of
from windlass.errors import UserError

Row = dict[str, Any]
BATCH = 1000


def rows(source: Source, parts: Sequence[Part]) -> Iterator[Row]:
    """Every row that the parts ask for, in the order of the files."""
    for part in parts:
        found = split_rows(source, part.split)
        if part.whole:
            yield from found
        else:
            start, stop = part.bounds(total(source, part.split))
            yield from islice(found, start, stop)


def split_rows(source: Source, split: str) -> Iterator[Row]:
    for path in source.splits[split]:
        try:
            yield from READERS[source.format](path)
        except UnicodeDecodeError as error:
            raise UserError(f"not UTF-8: {error}", str(path), "convert it: iconv -f latin1 -t utf-8") from None
        except (OSError, csv.Error) as error:
            raise UserError(f"can't be read: {error}", str(path), "check the path and its permissions") from None


def total(source: Source, split: str) -> int:
    """Rows of a split: what the files say of themselves, else counted by reading them."""
    count = rows_of(source.format, source.splits[split]).count
    return sum(1 for _ in split_rows(source, split)) if count is None else count


def batches(items: Iterator[Row], size: int = BATCH) -> Iterator[list[Row]]:
    while batch := list(islice(items, size)):
        yield batch


def text(path: Path) -> Iterator[Row]:
    """A row for every line, as `datasets` reads text; only a newline ends a line, not U+2028 and its like."""
    with opened(path) as file:
        for line in file:
            yield {"text": line.decode().rstrip("\r\n")}


def jsonl(path: Path) -> Iterator[Row]:
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield row_of(line, path, number)


def row_of(line: bytes, path: Path, number: int) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(
            f"not JSON: {error.msg}",
            f"{path}:{number}",
            "every line must be one JSON object; remove or correct this one",
        ) from None
    if not isinstance(row, dict):
        raise UserError(f"a {type(row).__name__}, not an object", f"{path}:{number}", 'write {"text": …} on every line')
    return row


def json_file(path: Path) -> Iterator[Row]:
    if not is_array(path):
        yield from jsonl(path)
        return
    with opened(path) as file:
        try:
            found = json.load(file)
        except json.JSONDecodeError as error:
            hint = "the file must be one list of JSON objects; correct it there"
            raise UserError(f"not JSON: {error.msg}", f"{path}:{error.lineno}", hint) from None
    for number, row in enumerate(found):
        if not isinstance(row, dict):
            hint = "every element must be one JSON object; remove or correct this one"
            raise UserError(f"element {number} is a {type(row).__name__}, not an object", str(path), hint)
        yield row


def table(path: Path, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)
    with opened(path) as raw:
        reader = csv.DictReader(io.TextIOWrapper(raw, "utf-8-sig", newline=""), delimiter=delimiter, strict=True)
        for row in reader:
            if None in row:
                raise UserError("more fields than the header names", f"{path}:{reader.line_num}", "quote the field")
            yield dict(row)


def parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH):
                yield from batch.to_pylist()
    except pa.ArrowInvalid as error:
        hint = "a git-lfs pointer: fetch the file itself" if path.stat().st_size < 1000 else "copy the file again"
        raise UserError(f"not Parquet: {error}", str(path), hint) from None


def arrow(path: Path) -> Iterator[Row]:
    """A file of `datasets`' own cache, or a whole folder that save_to_disk wrote."""
    from datasets import Dataset

    try:
        found = Dataset.load_from_disk(str(path)) if path.is_dir() else Dataset.from_file(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"can't be read: {error}", str(path), "write it again with save_to_disk") from None
    for batch in found.with_format("arrow").iter(BATCH):
        yield from batch.to_pylist()


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    "text": text,
    "jsonl": jsonl,
    "json": json_file,
    "csv": lambda path: table(path, ","),
    "tsv": lambda path: table(path, "\t"),
    "parquet": parquet,
    "arrow": arrow,
    "saved": arrow,
}
