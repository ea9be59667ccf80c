"""Find a data set's files, format, splits and number of rows without reading it. Imports neither torch nor pyarrow."""

from __future__ import annotations

import csv
import difflib
import glob
import gzip
import io
import json
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import yaml

from windlass.errors import UserError

if TYPE_CHECKING:
    from windlass.runfile import Data

Where = Callable[[str], str]

FILE_FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "text",
    ".text": "text",
    ".raw": "text",
    ".tokens": "text",
    ".arrow": "arrow",
}
SUFFIXES = f"windlass reads {', '.join(FILE_FORMATS)}"
# Where a folder has the same rows in several formats, the first of these is read.
PREFERENCE = ("parquet", "arrow", "jsonl", "json", "csv", "tsv", "text")
SIDE_FILES = {"dataset_infos.json", "dataset_info.json", "state.json", "dataset_dict.json", "requirements.txt"}
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# How published folders name one and the same split.
ALIASES = {"training": "train", "valid": "validation", "val": "validation", "dev": "validation"}
ALIASES |= {"testing": "test", "eval": "test"}
SLICE = re.compile(r"(?P<name>[^\[\]+]+)(\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?")

# Above this an array of JSON is not parsed just to be counted.
JSON_ARRAY_LIMIT_BYTES = 256 << 20
# Above this no file is read just to be counted: some seconds from a local disk, a minute from a slow volume.
COUNTED_BYTES = 4 << 30

# Rows and bytes of text of a published set, so that `plan` can count steps where the data are not mounted: num_examples
# and num_bytes on the card of huggingface.co/datasets/Salesforce/wikitext. Blank rows were counted in the texts of
# validation and test; for the training parts, the share in these two is assumed.
BLANK = {"validation": 1_299, "test": 1_467}
BLANK_SHARE = sum(BLANK.values()) / (3_760 + 4_358)
WIKITEXT = {  # config -> rows of train; bytes of train, validation, test
    "wikitext-2-raw-v1": (36_718, 11_061_717, 1_159_288, 1_305_088),
    "wikitext-2-v1": (36_718, 10_918_118, 1_134_123, 1_270_947),
    "wikitext-103-raw-v1": (1_801_350, 546_500_949, 1_159_288, 1_305_088),
    "wikitext-103-v1": (1_801_350, 545_141_915, 1_154_751, 1_295_575),
}


@dataclass(frozen=True, slots=True)
class Rows:
    """A number of rows, or None; `how` says where the number comes from, or why there is none."""

    count: int | None
    how: str
    text_bytes: int | None = None
    """Size of the rows' text where it is known: about four bytes make a token of English."""
    blank: int = 0
    """How many of them are known to be empty: training leaves those out."""
    blank_how: str = ""
    """Where that number comes from, if it isn't counted."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where rows are. `format` is `hub` for a set that still has to be fetched by its name."""

    name: str
    config: str | None
    format: str
    how: str
    splits: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    published: Mapping[str, Rows] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Part:
    """A split, or a slice of it. Bounds are rows, or per cent where `%` was written."""

    split: str
    start: str = ""
    stop: str = ""

    def bounds(self, rows: int) -> tuple[int, int]:
        """The requested rows out of so many: as a Python slice, per cents rounded to the nearest row."""

        def edge(text: str, absent: int) -> int:
            number = round(rows * int(text[:-1]) / 100) if text.endswith("%") else int(text or absent)
            return min(max(number + rows if number < 0 else number, 0), rows)

        start = edge(self.start, 0)
        return start, max(start, edge(self.stop, rows))


def parse_split(spec: str, where: str) -> tuple[Part, ...]:
    """Every part of a split's specification, in the order written: `train[:5%]+extra`."""
    found = [SLICE.fullmatch(piece.strip()) for piece in spec.split("+")]
    if None in found:
        hint = "write a split's name, or a slice of it: train, train[:5%], train[100:200], train[:90%]+extra"
        raise UserError(f"{spec!r} is not a split", where, hint)
    return tuple(Part(one["name"].strip(), one["start"] or "", one["stop"] or "") for one in found if one)


def locate_split(name: str, splits: Collection[str]) -> str | None:
    """The split of that name, or the one split that goes by another of its usual names."""
    if name in splits:
        return name
    alike = [split for split in splits if _canonical(split) == _canonical(name)]
    return alike[0] if len(alike) == 1 else None


def find_split(name: str, splits: Sequence[str], where: str) -> str:
    found = locate_split(name, splits)
    if found is None:
        hint = "name one of these, or hold rows out of the training split with data.val_fraction"
        raise UserError(f"the data has no split {name!r}; it has {', '.join(map(repr, splits))}", where, hint)
    return found


def _canonical(name: str) -> str:
    return ALIASES.get(name.lower(), name.lower())


def split_in_name(name: str) -> str | None:
    """The split in a file's or folder's name: `train-00000-of-00002`, `wiki.valid`, `dev`."""
    words = re.split(r"[^A-Za-z]+", name.lower())
    named = {_canonical(word) for word in words} & {"train", "validation", "test"}
    return named.pop() if len(named) == 1 else None


# --- from data.dataset_name_or_path to files ---


def resolve(data: Data, where: Where = str) -> Source:
    """The files behind `data.dataset_name_or_path`, or a hub name; UserError when it is neither."""
    name, config = data.dataset_name_or_path, requested_config(data)
    place, path = where("data.dataset_name_or_path"), Path(name).expanduser()
    pattern = any(character in name for character in "*?[")
    if pattern or path.is_file():
        # Path.glob takes no absolute pattern.
        matches = sorted(glob.glob(name, recursive=True)) if pattern else [path]  # noqa: PTH207
        paths = [Path(match) for match in matches if Path(match).is_file()]
        if not paths:
            raise UserError(f"no file matches {name!r}", place, "** matches folders at any depth")
        if config is not None:
            hint = "leave data.dataset_config_name out"
            raise UserError(f"{name} is a file and has no config {config!r}", where("data.dataset_config_name"), hint)
        return _resolve_files(name, paths, place)
    if path.is_dir():
        return _resolve_folder(path, data, config, where)
    is_name = path.suffix not in FILE_FORMATS if path.parent == Path() else not path.parent.is_dir()
    if HUB_NAME.fullmatch(name) and is_name:
        return Source(name, config, "hub", f"{name!r} is no path here: the name of a set on the hub")
    parent = next((p for p in path.parents if p.is_dir()), Path())
    missing = path.relative_to(parent).parts[0]
    try:
        close = difflib.get_close_matches(missing, sorted(entry.name for entry in parent.iterdir()), n=3)
    except OSError:
        close = []
    hint = f"{parent} has {', '.join(close)}" if close else f"{parent} has no {missing}: is the volume mounted?"
    raise UserError(f"{name} does not exist", place, hint)


def requested_config(data: Data) -> str | None:
    """The config that the run file names. The default config belongs to the default set, not to others."""
    asked = data.model_fields_set
    by_default = "dataset_name_or_path" in asked and "dataset_config_name" not in asked
    return None if by_default else data.dataset_config_name


def _resolve_files(name: str, paths: list[Path], place: str) -> Source:
    """Files by themselves: of one format, split by their names, `train` where names tell nothing."""
    kinds = {path: file_format(path) for path in paths}
    if unknown := next((path for path, kind in kinds.items() if kind is None), None):
        raise UserError(f"{unknown} has no format that windlass reads", place, SUFFIXES)
    kind, *others = sorted({str(kind) for kind in kinds.values()})
    if others:
        hint = "name the files of one format, for instance with *.jsonl"
        raise UserError(f"{name} mixes formats: {', '.join([kind, *others])}", place, hint)
    # One file alone is the training set, whatever it is called.
    splits = _by_split(paths) if len(paths) > 1 else {"train": tuple(paths)}
    return Source(name, None, kind, f"{len(paths)} {kind} file{'s' * (len(paths) > 1)}", splits)


def _by_split(files: Sequence[Path], root: Path | None = None) -> dict[str, tuple[Path, ...]]:
    splits: dict[str, tuple[Path, ...]] = {}
    for file in files:
        above = "" if file.parent == root else file.parent.name
        split = split_in_name(file.name) or split_in_name(above) or "train"
        splits[split] = (*splits.get(split, ()), file)
    return splits


def file_format(path: Path) -> str | None:
    packed = path.suffix == ".gz"
    suffix = path.suffixes[-2] if packed and len(path.suffixes) > 1 else path.suffix
    kind = FILE_FORMATS.get(suffix.lower())
    return None if packed and kind in ("parquet", "arrow") else kind


def _resolve_folder(path: Path, data: Data, config: str | None, where: Where) -> Source:
    """A folder: written by save_to_disk, published with configs, or plain files."""
    name, place, config_place = (
        data.dataset_name_or_path,
        where("data.dataset_name_or_path"),
        "data.dataset_config_name",
    )
    main = path / "refs" / "main"  # a hub cache folder stands for the revision that refs/main names
    if main.is_file() and (path / "snapshots" / main.read_text().strip()).is_dir():
        path = path / "snapshots" / main.read_text().strip()
    card = read_card(path)
    configs = card_configs(card)
    default = data.dataset_config_name
    if config is None and default and (default in configs or (path / default).is_dir()):
        config = default
    if _is_saved(path):
        return _saved(path, name, config)
    if config is None and configs:
        preferred = [key for key, entry in configs.items() if entry.get("default") or key == "default"]
        if not preferred and len(configs) > 1:
            hint = "set data.dataset_config_name to one of them"
            raise UserError(f"{name} has several configs: {', '.join(configs)}", where(config_place), hint)
        config = (preferred or list(configs))[0]
    if config in configs:
        return _from_card(path, name, config, card, place)
    if config is None:
        if (below := _config_folders(path)) and not data_files(path):
            hint = "set data.dataset_config_name to one of them, or name the subfolder"
            raise UserError(f"{name} has data only in subfolders: {', '.join(below)}", where(config_place), hint)
        return _plain_folder(path, name, None, {}, place)
    # The config's own folder, also where that very folder was named.
    for folder in (path / config, path) if path.name == config else (path / config,):
        if folder.is_dir() and _is_saved(folder):
            return _saved(folder, name, config)
        if folder.is_dir() and data_files(folder):
            return _plain_folder(folder, name, config, _published_rows(card, config), place)
    known = sorted({*configs, *_config_folders(path)})
    hint = "name one of these" if known else "leave data.dataset_config_name out: the folder has plain files"
    listed = f"; it has {', '.join(known)}" if known else ""
    raise UserError(f"{name} has no config {config!r}{listed}", where(config_place), hint)


def _from_card(path: Path, name: str, config: str, card: Mapping[str, Any], place: str) -> Source:
    """The files that a published set's card lists for a config: a pattern, a list, or an entry per split."""
    entry, published = card_configs(card)[config], _published_rows(card, config)
    given = entry.get("data_files")
    entries = [one for one in (given if isinstance(given, list) else [given]) if one is not None]
    if not entries:
        return _plain_folder(path / (entry.get("data_dir") or ""), name, config, published, place)
    splits: dict[str, tuple[Path, ...]] = {}
    for one in entries:
        split, patterns = (one.get("split"), one["path"]) if isinstance(one, dict) else (None, one)
        patterns = patterns if isinstance(patterns, list) else [patterns]
        for file in sorted({file for pattern in patterns for file in path.glob(pattern) if file.is_file()}):
            chosen = split or split_in_name(file.name) or "train"
            splits[chosen] = (*splits.get(chosen, ()), file)
    if not splits:
        hint = "the copy is incomplete: copy the data files too (git-lfs?), or fetch the set again"
        raise UserError(f"{name}: none of the files that its README lists for {config!r} is here", place, hint)
    kinds = {file_format(file) for files in splits.values() for file in files}
    kind = next((kind for kind in PREFERENCE if kind in kinds), "")
    return Source(name, config, kind, f"a published set, config {config}", splits, published)


def _plain_folder(path: Path, name: str, config: str | None, published: Mapping[str, Rows], place: str) -> Source:
    """A folder's files of its preferred format, by split."""
    files = data_files(path)
    if not files:
        raise UserError(f"{name} holds no data file", place, SUFFIXES)
    kind = next(kind for kind in PREFERENCE if kind in map(file_format, files))
    chosen = [file for file in files if file_format(file) == kind]
    left = len(files) - len(chosen)
    how = f"{len(chosen)} {kind} file{'s' * (len(chosen) > 1)} in {path}"
    how += f", {left} of other formats not read" if left else ""
    return Source(name, config, kind, how, _by_split(chosen, path), published)


def data_files(path: Path) -> list[Path]:
    """Data directly in the folder, in its `data` folder, or in folders named after splits."""
    if not path.is_dir():
        return []
    split_folders = [folder for folder in sorted(path.iterdir()) if folder.is_dir() and split_in_name(folder.name)]
    for places in ([path], [path / "data"], split_folders):
        found = [file for place in places if place.is_dir() for file in sorted(place.iterdir()) if file.is_file()]
        if files := [f for f in found if file_format(f) and f.name not in SIDE_FILES and not f.name.startswith(".")]:
            return files
    return []


def _config_folders(path: Path) -> list[str]:
    folders = [folder for folder in sorted(path.iterdir()) if folder.is_dir()]
    return [folder.name for folder in folders if _is_saved(folder) or data_files(folder)]


def _is_saved(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _saved(path: Path, name: str, config: str | None) -> Source:
    """What `save_to_disk` wrote: one set, or a folder for each split."""
    splits = {folder.name: (folder,) for folder in sorted(path.iterdir()) if (folder / "state.json").is_file()}
    if (path / "state.json").is_file():
        splits = {"train": (path,)}
    return Source(name, config, "saved", f"written by save_to_disk in {path}", splits)


def read_card(path: Path) -> dict[str, Any]:
    """The YAML between the first two `---` lines of a README, if there is one."""
    readme = path / "README.md"
    if not readme.is_file():
        return {}
    head = re.match(r"\ufeff?---\r?\n(.*?)\r?\n---", readme.read_text("utf-8", "replace"), re.DOTALL)
    try:
        card = yaml.safe_load(head[1]) if head else {}
    except yaml.YAMLError:
        return {}  # a README is prose: what can't be read there is found by the files' names
    return card if isinstance(card, dict) else {}


def card_configs(card: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    entries = card.get("configs") or []
    return {str(e["config_name"]): e for e in entries if isinstance(e, dict) and "config_name" in e}


def _published_rows(card: Mapping[str, Any], config: str | None) -> dict[str, Rows]:
    """What a published set's card says about its splits."""
    infos = card.get("dataset_info") or []
    for info in [infos] if isinstance(infos, dict) else infos:
        if isinstance(info, dict) and (config is None or info.get("config_name", "default") == config):
            splits = [split for split in info.get("splits") or [] if isinstance(split.get("num_examples"), int)]
            return {s["name"]: Rows(s["num_examples"], "as its README says", s.get("num_bytes")) for s in splits}
    return {}


# --- how many rows ---


def count_rows(data: Data, split: str, where: Where = str) -> Rows:
    """Rows of a split, or of slices, where they can be counted without reading the set; else None and why."""
    name, place = data.dataset_name_or_path, where("data.train_split")
    files: Mapping[str, tuple[Path, ...]] = {}
    published: Mapping[str, Rows] = _known_rows(data)
    try:
        source = resolve(data, where)
        files, published = source.splits, source.published or published
        unknown = f"{name} is on the hub: rows are known once fetched"
    except UserError as error:
        unknown = error.problems[0].problem
    if not files and not published:
        return Rows(None, unknown)
    total, size, blank, how = 0, 0, 0.0, []
    for part in parse_split(split, place):
        name = find_split(part.split, list(files or published), place)
        rows = count_files(source.format, files[name]) if files else published[name]
        rows = published.get(name, rows) if rows.count is None else rows
        if rows.count is None:
            return rows
        start, stop = part.bounds(rows.count)
        share = (stop - start) / max(rows.count, 1)
        total += stop - start
        size += round((rows.text_bytes or 0) * share)
        blank += rows.blank * share
        how.append(rows.how)
    return Rows(total, "; ".join(dict.fromkeys(how)), size or None, round(blank), rows.blank_how)


def _known_rows(data: Data) -> dict[str, Rows]:
    """The figures of wikitext, wherever a folder of that name would be."""
    config, how = data.dataset_config_name or "", "as published: wikitext"
    if Path(data.dataset_name_or_path).name != "wikitext" or config not in WIKITEXT:
        return {}
    rows, *sizes = WIKITEXT[config]
    guess = f" ({BLANK_SHARE:.0%}, as in its other parts)"
    return {
        "train": Rows(rows, how, sizes[0], round(rows * BLANK_SHARE), guess),
        "validation": Rows(3_760, how, sizes[1], BLANK["validation"]),
        "test": Rows(4_358, how, sizes[2], BLANK["test"]),
    }


def count_files(kind: str, paths: Sequence[Path]) -> Rows:
    """The rows of these files together."""
    counter = COUNTERS.get(kind)
    if counter is None:
        return Rows(None, f"{kind} files are counted by `windlass data`, not from their headers")
    size = sum(path.stat().st_size for path in paths)
    if kind != "parquet" and size > COUNTED_BYTES:
        return Rows(None, f"{size / 2**30:.0f} GiB of {kind} are not read to be counted", size)
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
    known_size = kind != "parquet" and all(path.suffix != ".gz" for path in paths)
    files = paths[0].name if len(paths) == 1 else f"{len(paths)} files"
    return Rows(total, f"counted in {files}", size if known_size else None, blank)


def open_file(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def is_json_array(path: Path) -> bool:
    with open_file(path) as file:
        return file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["


def _count_text(path: Path) -> tuple[int, int]:
    """Lines, the last with or without its newline, and how many of them are blank."""
    lines = blank = 0
    with open_file(path) as file:
        for line in file:
            lines += 1
            blank += line.isspace()
    return lines, blank


def _count_json_lines(path: Path) -> int:
    with open_file(path) as file:
        return sum(1 for line in file if line.strip())


def _count_json(path: Path) -> int | None:
    """A JSON file is an array of rows or, as often as not, lines."""
    if not is_json_array(path):
        return _count_json_lines(path)
    if path.stat().st_size > JSON_ARRAY_LIMIT_BYTES:
        return None
    with open_file(path) as file:
        return len(json.load(file))


def _count_csv(path: Path) -> int:
    """Records below the header; a quoted field may hold newlines."""
    csv.field_size_limit(sys.maxsize)
    with open_file(path) as raw:
        lines = (line.decode("utf-8-sig", "replace") for line in raw)
        return max(0, sum(1 for record in csv.reader(lines) if record) - 1)


def count_parquet(path: Path) -> int | None:
    """`num_rows` of the footer, the third field of Thrift's FileMetaData, read without pyarrow: login nodes lack it."""
    with path.open("rb") as file:
        file.seek(-8, 2)
        tail = file.read(8)
        if tail[4:] != b"PAR1":
            return None
        length = int.from_bytes(tail[:4], "little")
        file.seek(-8 - length, 2)
        footer = io.BytesIO(file.read(length))
    number = 0
    while header := footer.read(1)[0]:
        number = number + (header >> 4) if header >> 4 else _zigzag(footer)
        if number == 3:
            return _zigzag(footer)
        _skip(footer, header & 15)
    return None


def _varint(stream: IO[bytes]) -> int:
    value = shift = 0
    while (byte := stream.read(1)[0]) & 128:
        value |= (byte & 127) << shift
        shift += 7
    return value | byte << shift


def _zigzag(stream: IO[bytes]) -> int:
    value = _varint(stream)
    return (value >> 1) ^ -(value & 1)


def _skip(stream: IO[bytes], kind: int) -> None:
    """Step over a value of Thrift's compact protocol."""
    if kind in (4, 5, 6):
        _varint(stream)
    elif kind in (3, 7, 8):
        stream.read({3: 1, 7: 8}.get(kind) or _varint(stream))
    elif kind in (9, 10):
        header = stream.read(1)[0]
        for _ in range(header >> 4 if header >> 4 < 15 else _varint(stream)):
            _skip(stream, 3 if header & 15 in (1, 2) else header & 15)  # inside a list a boolean takes a byte
    elif kind == 12:
        while header := stream.read(1)[0]:
            if not header >> 4:
                _zigzag(stream)
            _skip(stream, header & 15)
    elif kind not in (1, 2):  # a boolean field lives in its header
        raise ValueError(f"a Thrift field of kind {kind}")


COUNTERS: dict[str, Callable[[Path], int | tuple[int, int] | None]] = {
    "text": _count_text,
    "jsonl": _count_json_lines,
    "json": _count_json,
    "csv": _count_csv,
    "tsv": _count_csv,
    "parquet": count_parquet,
}
