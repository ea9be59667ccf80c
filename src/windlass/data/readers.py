"""Read rows out of files, one after another and always in the same order, for training and streaming alike."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from windlass.data.sources import Part, Source, count_files, is_json_array, open_file
from windlass.errors import UserError

Row = dict[str, Any]
BATCH = 1000


def read_rows(source: Source, parts: Sequence[Part]) -> Iterator[Row]:
    """Every row of the parts, in the order of the files."""
    for part in parts:
        if not (part.start or part.stop):
            yield from read_split(source, part.split)
            continue
        count = count_files(source.format, source.splits[part.split]).count
        if count is None:
            count = sum(1 for _ in read_split(source, part.split))
        yield from islice(read_split(source, part.split), *part.bounds(count))


def read_split(source: Source, split: str) -> Iterator[Row]:
    for path in source.splits[split]:
        try:
            yield from READERS[source.format](path)
        except UnicodeDecodeError as error:
            raise UserError(f"not UTF-8: {error}", str(path), "convert it: iconv -f latin1 -t utf-8") from None
        except (OSError, csv.Error) as error:
            raise UserError(f"can't be read: {error}", str(path), "check the path and its permissions") from None


def batches(items: Iterator[Row], size: int = BATCH) -> Iterator[list[Row]]:
    while batch := list(islice(items, size)):
        yield batch


def read_text(path: Path) -> Iterator[Row]:
    """A row for every line, as `datasets` reads text; only a newline ends a line, not U+2028 and its like."""
    with open_file(path) as file:
        for line in file:
            yield {"text": line.decode().rstrip("\r\n")}


def read_json_lines(path: Path) -> Iterator[Row]:
    with open_file(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                row = parse_json(line, path, "every line must be one JSON object; correct this one", number)
                yield as_row(row, f"{path}:{number}")


def read_json(path: Path) -> Iterator[Row]:
    if not is_json_array(path):
        yield from read_json_lines(path)
        return
    with open_file(path) as file:
        found = parse_json(file.read(), path, "the file must be one list of JSON objects; correct it there")
    for number, row in enumerate(found):
        yield as_row(row, f"{path}: element {number}")


def parse_json(text: bytes, path: Path, hint: str, line: int | None = None) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"not JSON: {error.msg}", f"{path}:{line or error.lineno}", hint) from None


def as_row(value: Any, place: str) -> Row:
    if not isinstance(value, dict):
        raise UserError(f"a {type(value).__name__}, not an object", place, 'write {"text": …} for every row')
    return value


def read_table(path: Path, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)
    with open_file(path) as raw:
        reader = csv.DictReader(io.TextIOWrapper(raw, "utf-8-sig", newline=""), delimiter=delimiter, strict=True)
        for row in reader:
            if None in row:
                raise UserError("more fields than the header names", f"{path}:{reader.line_num}", "quote the field")
            yield dict(row)


def read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH):
                yield from batch.to_pylist()
    except pa.ArrowInvalid as error:
        hint = "a git-lfs pointer: fetch the file itself" if path.stat().st_size < 1000 else "copy the file again"
        raise UserError(f"not Parquet: {error}", str(path), hint) from None


def read_arrow(path: Path) -> Iterator[Row]:
    """A file of `datasets`' own cache, or a folder that save_to_disk wrote."""
    from datasets import Dataset

    try:
        found = Dataset.load_from_disk(str(path)) if path.is_dir() else Dataset.from_file(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"can't be read: {error}", str(path), "write it again with save_to_disk") from None
    for batch in found.with_format("arrow").iter(BATCH):
        yield from batch.to_pylist()


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    "text": read_text,
    "jsonl": read_json_lines,
    "json": read_json,
    "csv": lambda path: read_table(path, ","),
    "tsv": lambda path: read_table(path, "\t"),
    "parquet": read_parquet,
    "arrow": read_arrow,
    "saved": read_arrow,
}
