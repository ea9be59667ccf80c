"""How many rows a file holds, at the least cost: lines, records, or what a file's own footer says. No pyarrow."""

from __future__ import annotations

import csv
import gzip
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

# Above this an array of JSON is not parsed just to be counted.
JSON_ARRAY_LIMIT_BYTES = 256 << 20
# Above this no file is read just to be counted: some seconds from a local disk, a minute from a slow volume.
COUNTED_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Rows:
    """A number of rows, or None; `how` says where the number comes from, or why there is none."""

    count: int | None
    how: str
    text_bytes: int | None = None
    """Size of the rows' text where it is known: about four bytes make a token of English."""
    blank: int = 0
    """How many of them are known to hold nothing: training leaves those out."""
    blank_how: str = ""
    """Where that number comes from, if it isn't counted."""


def opened(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def text_lines(path: Path) -> tuple[int, int]:
    """Lines, the last with or without its newline, and how many of them are blank."""
    lines = blank = 0
    with opened(path) as file:
        for line in file:
            lines += 1
            blank += line.isspace()
    return lines, blank


def json_lines(path: Path) -> int:
    with opened(path) as file:
        return sum(1 for line in file if line.strip())


def json_rows(path: Path) -> int | None:
    """A JSON file is an array of rows or, as often as not, lines."""
    if not is_array(path):
        return json_lines(path)
    if path.stat().st_size > JSON_ARRAY_LIMIT_BYTES:
        return None
    with opened(path) as file:
        return len(json.load(file))


def is_array(path: Path) -> bool:
    with opened(path) as file:
        return file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["


def csv_rows(path: Path) -> int:
    """Records below the header; a quoted field may hold newlines."""
    csv.field_size_limit(sys.maxsize)
    with opened(path) as raw:
        lines = (line.decode("utf-8-sig", "replace") for line in raw)
        return max(0, sum(1 for record in csv.reader(lines) if record) - 1)


def parquet_rows(path: Path) -> int | None:
    """`num_rows` of the footer: the third field of Thrift's FileMetaData, read without a library."""
    with path.open("rb") as file:
        file.seek(-8, 2)
        tail = file.read(8)
        if tail[4:] != b"PAR1":
            return None
        length = int.from_bytes(tail[:4], "little")
        file.seek(-8 - length, 2)
        footer = Compact(file.read(length))
    field = 0
    while header := footer.byte():
        kind = header & 15
        field = field + (header >> 4) if header >> 4 else footer.zigzag()
        if field == 3:
            return footer.zigzag()
        footer.skip(kind)
    return None


class Compact:
    """As much of Thrift's compact protocol as it takes to step over fields."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    def zigzag(self) -> int:
        value = self.varint()
        return (value >> 1) ^ -(value & 1)

    def skip(self, kind: int) -> None:
        if kind in (1, 2):  # a boolean field lives in its header
            return
        if kind == 3:
            self.at += 1
        elif kind in (4, 5, 6):
            self.varint()
        elif kind == 7:
            self.at += 8
        elif kind == 8:
            length = self.varint()
            self.at += length
        elif kind in (9, 10):
            self.skip_list()
        elif kind == 12:
            while header := self.byte():
                if not header >> 4:
                    self.zigzag()
                self.skip(header & 15)
        else:
            raise ValueError(f"a Thrift field of kind {kind}")

    def skip_list(self) -> None:
        header = self.byte()
        size = header >> 4 if header >> 4 < 15 else self.varint()
        for _ in range(size):
            if header & 15 in (1, 2):  # inside a list a boolean takes a byte
                self.at += 1
            else:
                self.skip(header & 15)


COUNTERS: dict[str, Callable[[Path], int | tuple[int, int] | None]] = {
    "text": text_lines,
    "jsonl": json_lines,
    "json": json_rows,
    "csv": csv_rows,
    "tsv": csv_rows,
    "parquet": parquet_rows,
}


def rows_of(kind: str, paths: tuple[Path, ...]) -> Rows:
    """The rows of these files together."""
    counter = COUNTERS.get(kind)
    if counter is None:
        return Rows(None, f"{kind} files are counted by `windlass data`, not from their headers")
    bytes_to_read = 0 if kind == "parquet" else sum(path.stat().st_size for path in paths)
    if bytes_to_read > COUNTED_BYTES:
        return Rows(None, f"{bytes_to_read / 2**30:.0f} GiB of {kind} are not read to be counted", bytes_to_read)
    total = blank = 0
    for path in paths:
        try:
            found = counter(path)
        except (OSError, ValueError, IndexError, csv.Error) as error:
            return Rows(None, f"{path} can't be counted: {error}")
        if found is None:
            return Rows(None, f"{path} is not counted before it is read")
        count, empty = found if isinstance(found, tuple) else (found, 0)
        total, blank = total + count, blank + empty
    files = paths[0].name if len(paths) == 1 else f"{len(paths)} files"
    size: int | None = None
    if kind in ("text", "jsonl", "json", "csv", "tsv") and all(path.suffix != ".gz" for path in paths):
        size = sum(path.stat().st_size for path in paths)
    return Rows(total, f"counted in {files}", size, blank)


def published(card: dict[str, Any], config: str | None) -> dict[str, Rows]:
    """What a published set's card (the front matter of its README) says about its splits."""
    infos = card.get("dataset_info") or []
    infos = [infos] if isinstance(infos, dict) else infos
    for info in infos:
        if isinstance(info, dict) and (config is None or info.get("config_name", "default") == config):
            return {
                split["name"]: Rows(split["num_examples"], "said by its README", split.get("num_bytes"))
                for split in info.get("splits") or []
                if isinstance(split.get("num_examples"), int)
            }
    return {}
