"""Read rows out of files, one after another and always in the same order. Imports pyarrow only if a file needs it."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

from windlass.errors import UserError

Row = dict[str, Any]
BATCH = 1000


def read_file(path: Path, kind: str) -> Iterator[Row]:
    try:
        yield from FORMATS[kind][1](path)
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8: {error}", str(path), "convert it: iconv -f latin1 -t utf-8") from None
    except (OSError, ValueError, csv.Error) as error:  # pyarrow's errors are ValueErrors
        pointer = path.is_file() and path.stat().st_size < 1000 and b"git-lfs" in path.read_bytes()
        hint = "it is a git-lfs pointer: fetch the file itself" if pointer else "check the file, or copy it again"
        raise UserError(f"can't be read as {kind}: {error}", str(path), hint) from None


def count_file(path: Path, kind: str) -> tuple[int, int]:
    """Rows, and how many of them are blank lines of text."""
    if kind == "parquet":
        import pyarrow.parquet as pq

        return pq.read_metadata(path).num_rows, 0
    if kind == "arrow":
        return sum(batch.num_rows for batch in arrow_batches(path)), 0
    if kind not in ("text", "jsonl"):
        return sum(1 for _ in read_file(path, kind)), 0
    lines = blank = 0
    with open_file(path) as file:
        for line in file:
            lines += 1
            blank += line.isspace()
    return (lines, blank) if kind == "text" else (lines - blank, 0)


def batches(items: Iterator[Row], size: int = BATCH) -> Iterator[list[Row]]:
    while batch := list(islice(items, size)):
        yield batch


def open_file(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def read_text(path: Path) -> Iterator[Row]:
    """A row for every line, as `datasets` reads text; only a newline ends a line, not U+2028 and its like."""
    with open_file(path) as file:
        for line in file:
            yield {"text": line.decode().rstrip("\r\n")}


def read_json(path: Path, *, lines: bool = False) -> Iterator[Row]:
    """An object on every line or, as often as not in a file that is called .json, one list of objects."""
    with open_file(path) as file:
        is_list = not lines and file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["
        file.seek(0)
        for number, text in enumerate([file.read()] if is_list else file, 1):
            if not text.strip():
                continue
            try:
                value = json.loads(text)
            except json.JSONDecodeError as error:
                hint = "every line must be one JSON object, or the .json file one list of them"
                raise UserError(
                    f"not JSON: {error.msg}", f"{path}:{error.lineno if is_list else number}", hint
                ) from None
            for element, row in enumerate(value if is_list else [value]):
                if not isinstance(row, dict):
                    place = f"{path}: element {element}" if is_list else f"{path}:{number}"
                    hint = 'write {"text": …} for every row'
                    raise UserError(f"a {type(row).__name__}, not an object", place, hint)
                yield row


def read_table(path: Path, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)
    with open_file(path) as raw:
        reader = csv.DictReader(io.TextIOWrapper(raw, "utf-8-sig", newline=""), delimiter=delimiter, strict=True)
        for row in reader:
            if None in row:
                raise UserError("more fields than the header names", f"{path}:{reader.line_num}", "quote the field")
            yield dict(row)


def read_batches(path: Path) -> Iterator[Row]:
    for batch in arrow_batches(path):
        yield from batch.to_pylist()


def arrow_batches(path: Path) -> Iterator[Any]:
    """Record batches of a Parquet file, or of an Arrow file as `datasets` caches and saves it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as file:
            yield from file.iter_batches(BATCH)
    else:
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
            yield from stream


# Suffixes and reader of each. If a folder has the same rows in several formats, the first of these is read.
FORMATS: dict[str, tuple[tuple[str, ...], Callable[[Path], Iterator[Row]]]] = {
    "parquet": ((".parquet",), read_batches),
    "arrow": ((".arrow",), read_batches),
    "jsonl": ((".jsonl", ".ndjson"), partial(read_json, lines=True)),
    "json": ((".json",), read_json),
    "csv": ((".csv",), partial(read_table, delimiter=",")),
    "tsv": ((".tsv",), partial(read_table, delimiter="\t")),
    "text": ((".txt", ".text", ".raw", ".tokens"), read_text),
}
SUFFIXES = {suffix: kind for kind, (suffixes, _) in FORMATS.items() for suffix in suffixes}


def file_format(path: Path) -> str | None:
    packed = path.suffix == ".gz"
    kind = SUFFIXES.get(Path(path.stem if packed else path.name).suffix.lower())
    return None if packed and kind in ("parquet", "arrow") else kind
