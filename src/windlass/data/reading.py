"""Read and count rows: of splits and their slices, of files by their format. Imports no torch."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import IO, Any

from windlass.data.messages import Structs, unfill_arguments
from windlass.data.progress import show_progress
from windlass.errors import UserError
from windlass.files import refuse_duplicate_keys

Row = dict[str, Any]
Parser = Callable[[Path, Any], Iterator[Row]]
JSON_KINDS: dict[type, str] = {dict: "an object", list: "a list", str: "text", int: "a number", float: "a number"}
JSON_KINDS |= {bool: "true or false", type(None): "null"}
BATCH = 1000
CHUNK_BYTES = 1 << 20  # of lines
# Larger files are not read only to count rows: counting lines takes seconds, parsing as long or longer.
LINES_BYTES = 4 << 30
PARSED_BYTES = 256 << 20
CHECKED_BYTES = 16 << 20  # of text, of which a sample's other lines are parsed too, in less than a second
ROW_GROUPS = 16  # of a Parquet file that a sample is read from


@dataclass(frozen=True, slots=True)
class RowCount:
    """A number of rows, or None; `how` says where the number comes from, or why it is unknown."""

    count: int | None
    how: str
    text_bytes: int | None = None  # size of the rows' text, if known: about four bytes per token of English
    blank: int = 0  # number of rows known to be empty, which training skips
    blank_how: str = ""  # where that number comes from, if it isn't counted


@dataclass(frozen=True, slots=True)
class Source:
    """Where rows are. `format` is `hub` for a set that must still be fetched."""

    name: str
    config: str | None
    format: str
    how: str
    splits: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    published: Mapping[str, RowCount] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SplitPart:
    """A source's split, or a slice of it. Bounds are rows, or per cent if written with `%`."""

    source: Source
    split: str
    start: str = ""
    stop: str = ""

    @property
    def files(self) -> tuple[Path, ...]:
        return self.source.splits[self.split]

    def bounds(self, rows: int) -> tuple[int, int]:
        """Return the requested range of rows: like a Python slice, per cents rounded to the nearest row."""

        def edge(text: str, absent: int) -> int:
            number = round(rows * int(text[:-1]) / 100) if text.endswith("%") else int(text or absent)
            return min(max(number + rows if number < 0 else number, 0), rows)

        start = edge(self.start, 0)
        return start, max(start, edge(self.stop, rows))


@dataclass(frozen=True)
class Chunk:
    """Rows of a file that are not parsed yet, so that any process can do it."""

    path: Path
    kind: str
    first: int
    """Number of its first row in the file, from 1."""
    items: Sequence[Any]
    """One for each row: a line, with its number if it is JSON, or a row; or a record batch."""

    def rows(self) -> Iterator[Row]:
        with explain_damage(self.path, self.kind):
            parse = FILE_FORMATS[self.kind][2]
            yield from parse(self.path, self.items) if parse else self.items

    def cut(self, start: int, stop: int) -> Chunk:
        start = max(0, start)
        return replace(self, first=self.first + start, items=self.items[start : max(start, stop)])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a record batch alone, without the table that it is a slice of."""
        items = self.items
        if FILE_FORMATS[self.kind][2] is parse_batch:
            import pyarrow as pa

            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, items.schema) as stream:  # type: ignore[attr-defined]
                stream.write_batch(items)
            items = sink.getvalue().to_pybytes()
        return _restore_chunk, (self.path, self.kind, self.first, items)


def _restore_chunk(path: Path, kind: str, first: int, items: Any) -> Chunk:
    if isinstance(items, bytes):
        import pyarrow as pa

        items = pa.ipc.open_stream(items).read_next_batch()
    return Chunk(path, kind, first, items)


def read_rows(parts: Iterable[SplitPart]) -> Iterator[Row]:
    """Yield every row of the parts, in the order of the files."""
    return chain.from_iterable(chunk.rows() for chunk in read_chunks(parts))


def locate_row(parts: Iterable[SplitPart], *numbers: int) -> str:
    """Return the file that has a row of the parts (counted from 0), and the row's number in it, from 1."""
    found: dict[Path, list[str]] = {}
    before = 0
    for chunk in read_chunks(parts):
        own = [str(chunk.first + number - before) for number in numbers if 0 <= number - before < len(chunk.items)]
        if own:
            found.setdefault(chunk.path, []).extend(own)
        before += len(chunk.items)
        if before > max(numbers):
            break
    return "; ".join(f"{path}: {'rows' if len(own) > 1 else 'row'} {', '.join(own)}" for path, own in found.items())


def read_chunks(parts: Iterable[SplitPart], most: int | None = None) -> Iterator[Chunk]:
    """Yield the rows of the parts unparsed, in the order of the files; at most so many."""

    def chunks(part: SplitPart) -> Iterator[Chunk]:
        for path in part.files:
            yield from read_file_chunks(path, part.source.format)

    def within(found: Iterator[Chunk], start: int, stop: int) -> Iterator[Chunk]:
        before = 0
        for chunk in found:
            wanted = chunk.cut(start - before, stop - before)
            before += len(chunk.items)
            if wanted.items:
                yield wanted
            if before >= stop:
                return

    def cut(part: SplitPart) -> Iterator[Chunk]:
        if not (part.start or part.stop):
            return chunks(part)
        count = count_files(part.source.format, part.files).count
        return within(chunks(part), *part.bounds(sum(len(c.items) for c in chunks(part)) if count is None else count))

    found = chain.from_iterable(map(cut, parts))
    yield from found if most is None else within(found, 0, most)


def sample_rows(parts: Sequence[SplitPart], total: int, wanted: int) -> Iterator[tuple[Path, int, Row]]:
    """Yield about `wanted` of `total` rows spread over the files, each with its file and its number there, from 1.

    Of large files and of Parquet, those between are not parsed. Of a slice the first rows are yielded.
    """
    stride = max(1, total // max(1, wanted))
    left = CHECKED_BYTES
    for part in parts:
        kind = part.source.format
        if part.start or part.stop:
            chunks = read_chunks([part])
            rows = ((c.path, number, row) for c in chunks for number, row in enumerate(c.rows(), c.first))
            yield from islice(rows, wanted)
            continue
        for path in part.files:
            if kind == "parquet":
                yield from _sample_row_groups(path, stride)
            elif kind in ("text", "jsonl"):
                left = yield from _sample_lines(path, kind, stride, left)
            else:
                numbered = enumerate(read_file(path, kind), 1)
                yield from ((path, number, row) for number, row in islice(numbered, 0, None, stride))


def _sample_lines(path: Path, kind: str, stride: int, left: int) -> Generator[tuple[Path, int, Row], None, int]:
    """Yield some of a file's rows, and parse all of the first `left` bytes. Returns what is left of these."""
    with open_file(path) as file, explain_damage(path, kind):
        filled = (numbered for numbered in enumerate(file, 1) if not numbered[1].isspace())
        for number, (line, text) in enumerate(filled):
            left -= len(text)
            if left >= 0 or not number % stride:
                (row,) = parse_json_lines(path, [(line, text)]) if kind == "jsonl" else parse_text(path, [text])
                if not number % stride:
                    yield path, number + 1, row
    return left


def _sample_row_groups(path: Path, stride: int) -> Iterator[tuple[Path, int, Row]]:
    """Yield the first rows of some row groups: what follows them is not decoded."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
        starts = [0, *accumulate(sizes)]
        filled = [group for group, size in enumerate(sizes) if size]
        chosen = filled[:: max(1, len(filled) // ROW_GROUPS)]
        for group in chosen:
            each = -(-file.metadata.num_rows // stride // len(chosen))
            batch = next(file.iter_batches(each, row_groups=[group]))
            yield from ((path, starts[group] + i, row) for i, row in enumerate(list_rows(batch), 1))


def read_file(path: Path, kind: str) -> Iterator[Row]:
    return chain.from_iterable(chunk.rows() for chunk in read_file_chunks(path, kind))


def read_file_chunks(path: Path, kind: str) -> Iterator[Chunk]:
    first = 1
    with explain_damage(path, kind):
        for items in FILE_FORMATS[kind][1](path):
            yield Chunk(path, kind, first, items)
            first += len(items)


@contextmanager
def explain_damage(path: Path, kind: str) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        what, encoding = f"not UTF-8: {error}", "latin1"
        with open_file(path) as file:
            if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                what, encoding = "is UTF-16, not UTF-8", "utf-16"
        raise UserError(what, str(path), f"convert it: iconv -f {encoding} -t utf-8", "not-utf8") from None
    except (OSError, EOFError, ValueError, csv.Error) as error:  # pyarrow's errors are ValueErrors
        pointer = path.is_file() and path.stat().st_size < 1000 and b"git-lfs" in path.read_bytes()
        hint = "it is a git-lfs pointer: fetch the file itself" if pointer else "check the file, or copy it again"
        raise UserError(f"can't be read as {kind}: {error}", str(path), hint, "unreadable") from None


def count_parts(parts: Iterable[SplitPart]) -> int | None:
    """Count the rows of splits or slices whose files are here; None if they are too large to be counted."""
    total = 0
    for part in parts:
        count = count_files(part.source.format, part.files).count
        if count is None:
            return None
        start, stop = part.bounds(count)
        total += stop - start
    return total


def count_files(kind: str, paths: Sequence[Path]) -> RowCount:
    """Count the rows of these files together."""
    size = sum(path.stat().st_size for path in paths)
    tables = kind in ("parquet", "arrow")
    if not tables and size > (LINES_BYTES if kind in ("text", "jsonl") else PARSED_BYTES):
        return RowCount(None, f"{size / 2**30:.1f} GiB of {kind} are not read to be counted", size)
    try:
        counts = [count_file(path, kind) for path in paths]
    except (ImportError, OSError, ValueError, csv.Error, UserError) as error:
        return RowCount(None, f"{kind} can't be counted here: {error}")
    files = paths[0].name if len(paths) == 1 else f"{len(paths)} files"
    known_size = None if tables or any(path.suffix == ".gz" for path in paths) else size
    return RowCount(sum(n for n, _ in counts), f"counted in {files}", known_size, sum(blank for _, blank in counts))


def count_file(path: Path, kind: str) -> tuple[int, int]:
    """Return the number of rows, and how many of them are blank lines of text."""
    if kind == "parquet":
        import pyarrow.parquet as pq

        return pq.read_metadata(path).num_rows, 0
    if kind == "arrow":
        return sum(batch.num_rows for batch in arrow_batches(path)), 0
    if kind not in ("text", "jsonl"):
        return sum(1 for _ in read_file(path, kind)), 0
    lines = blank = 0
    with open_file(path) as file, show_progress(f"counting {path.name}", lambda: None) as progress:
        for lines, line in enumerate(file, 1):
            blank += line.isspace()
            if not lines % BATCH:
                progress(lines)
    return (lines, blank) if kind == "text" else (lines - blank, 0)


def split_into_batches(items: Iterator[Row], size: int = BATCH) -> Iterator[list[Row]]:
    while batch := list(islice(items, size)):
        yield batch


def open_file(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def read_lines(path: Path) -> Iterator[list[bytes]]:
    """Yield lines as `datasets` reads text: only a newline ends one, not U+2028 and the like."""
    with open_file(path) as file:
        while lines := file.readlines(CHUNK_BYTES):
            yield lines


def parse_text(_: Path, lines: Sequence[bytes]) -> Iterator[Row]:
    for line in lines:
        yield {"text": line.decode().rstrip("\r\n")}


def read_json_lines(path: Path) -> Iterator[list[tuple[int, bytes]]]:
    number = 1
    for lines in read_lines(path):
        filled = [numbered for numbered in enumerate(lines, number) if numbered[1].strip()]
        number += len(lines)
        if filled:
            yield filled


def parse_json_lines(path: Path, lines: Sequence[tuple[int, bytes]]) -> Iterator[Row]:
    for number, text in lines:
        value = parse_json(text, path, number)
        if not isinstance(value, dict):
            hint = 'write {"text": …} for every row'
            raise UserError(f"{JSON_KINDS[type(value)]}, not an object", f"{path}:{number}", hint, "not-an-object")
        yield value


def parse_json(text: bytes, path: Path, line: int | None) -> Any:
    """Parse a line of a file, or all of it."""
    try:
        return json.loads(text, object_pairs_hook=refuse_duplicate_keys)
    except json.JSONDecodeError as error:
        hint = "every line must be one JSON object, or the .json file one list of them"
        if "control character" in error.msg:
            hint = r"within a text a line break is written \n, and a tab \t"
        what = f"not JSON: {error.msg.removesuffix(' at')}, column {error.colno}"
        raise UserError(what, f"{path}:{line or error.lineno}", hint, "not-json") from None
    except UnicodeDecodeError:
        raise
    except ValueError as error:
        place = f"{path}:{line}" if line else str(path)
        raise UserError(str(error), place, "keep one: only the last would be read", "key-twice") from None


def read_json_rows(path: Path) -> Iterator[Row]:
    """Yield the object on every line or, as often in files named .json, of a single list."""
    with open_file(path) as file:
        if file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] != b"[":
            for lines in read_json_lines(path):
                yield from parse_json_lines(path, lines)
            return
        file.seek(0)
        for element, row in enumerate(parse_json(file.read(), path, None)):
            if not isinstance(row, dict):
                hint = 'write {"text": …} for every row'
                place = f"{path}: element {element}"
                raise UserError(f"{JSON_KINDS[type(row)]}, not an object", place, hint, "not-an-object")
            yield row


def read_table(path: Path, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)
    with open_file(path) as raw:
        text = io.TextIOWrapper(raw, "utf-8-sig", newline="")
        header = text.readline()
        text.seek(0)
        if delimiter == "," and ";" in header and "," not in header:  # as spreadsheets write it in much of Europe
            delimiter = ";"
        reader = csv.DictReader(text, delimiter=delimiter, strict=True)
        for row in reader:
            if None in row:
                problem = "more fields than the header names"
                raise UserError(problem, f"{path}:{reader.line_num}", "quote the field", "extra-fields")
            yield {name: value for name, value in row.items() if value is not None}  # missing values of a short row


def read_batches(path: Path) -> Iterator[Any]:
    for batch in arrow_batches(path):
        yield from (batch.slice(start, BATCH) for start in range(0, len(batch), BATCH))


def parse_batch(_: Path, batch: Any) -> Iterator[Row]:
    yield from list_rows(batch)


def list_rows(batch: Any) -> list[Row]:
    rows: list[Row] = batch.to_pylist()
    kinds = {field.name: str(field.type) for field in batch.schema}
    if any("arguments: struct<" in kind for kind in kinds.values()):
        rows = [unfill_arguments(row) for row in rows]
    for name in (name for name, kind in kinds.items() if re.match(r"\w*list<\w+: struct<", kind)):
        for row in rows:
            row[name] = row[name] and Structs(row[name])
    return rows


def arrow_batches(path: Path) -> Iterator[Any]:
    """Yield record batches of a Parquet file, or of an Arrow file cached or saved by `datasets`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as file:
            yield from file.iter_batches(BATCH)
    else:
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
            yield from stream


def read_parsed(read: Callable[[Path], Iterator[Row]], path: Path) -> Iterator[list[Row]]:
    """Yield rows some at a time, those before an error first."""
    rows = read(path)
    error: Exception | None = None
    while error is None:
        batch: list[Row] = []
        try:
            batch.extend(islice(rows, BATCH))
        except Exception as damage:
            error = damage
        if batch:
            yield batch
        elif error is None:
            return
    raise error


# Suffixes of each format, what yields a chunk's items, and what makes rows of them (None: they are rows). If a folder
# has the same rows in several formats, the first is read.
FILE_FORMATS: dict[str, tuple[tuple[str, ...], Callable[[Path], Iterator[Any]], Parser | None]] = {
    "parquet": ((".parquet",), read_batches, parse_batch),
    "arrow": ((".arrow",), read_batches, parse_batch),
    "jsonl": ((".jsonl", ".ndjson"), read_json_lines, parse_json_lines),
    "json": ((".json",), partial(read_parsed, read_json_rows), None),
    "csv": ((".csv",), partial(read_parsed, partial(read_table, delimiter=",")), None),
    "tsv": ((".tsv",), partial(read_parsed, partial(read_table, delimiter="\t")), None),
    "text": ((".txt", ".text", ".raw", ".tokens"), read_lines, parse_text),
}
SUFFIXES = {suffix: kind for kind, (suffixes, *_) in FILE_FORMATS.items() for suffix in suffixes}


def detect_format(path: Path) -> str | None:
    packed = path.suffix == ".gz"
    kind = SUFFIXES.get(Path(path.stem if packed else path.name).suffix.lower())
    return None if packed and kind in ("parquet", "arrow") else kind
