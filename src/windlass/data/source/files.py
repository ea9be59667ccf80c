"""From what `data.dataset_name_or_path` says to the files of each split and their format."""

from __future__ import annotations

import difflib
import glob
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from windlass.data.source.count import Rows, published
from windlass.data.source.splits import of_file
from windlass.errors import UserError

if TYPE_CHECKING:
    from windlass.runfile import Data

FORMATS = {
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
# Where a folder holds several formats of the same rows, the first of these is read.
PREFERENCE = ("parquet", "arrow", "jsonl", "json", "csv", "tsv", "text")
SIDE_FILES = {"dataset_infos.json", "dataset_info.json", "state.json", "dataset_dict.json", "requirements.txt"}
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True, slots=True)
class Source:
    """Where rows are. `format` is `hub` for a set that still has to be fetched by its name."""

    name: str
    config: str | None
    format: str
    how: str
    splits: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    said: Mapping[str, Rows] = field(default_factory=dict)


def resolve(data: Data, where: Callable[[str], str] = str) -> Source:
    """The files behind `data.dataset_name_or_path`, or a hub name; UserError when it is neither."""
    name = data.dataset_name_or_path
    config = config_of(data)
    place = where("data.dataset_name_or_path")
    if any(character in name for character in "*?["):
        # Path.glob takes no absolute pattern.
        paths = [Path(path) for path in sorted(glob.glob(name, recursive=True)) if Path(path).is_file()]  # noqa: PTH207
        if not paths:
            raise UserError(f"no file matches {name!r}", place, "** matches folders at any depth")
        no_config(name, config, where)
        return of_files(name, paths, place)
    path = Path(name).expanduser()
    if path.is_file():
        no_config(name, config, where)
        return of_files(name, [path], place)
    if path.is_dir():
        path = snapshot(path)
        meant = data.dataset_config_name
        if config is None and meant and (meant in card_configs(read_card(path)) or (path / meant).is_dir()):
            config = meant
        return of_folder(path, name, config, where)
    if HUB_NAME.fullmatch(name) and not path.parent.is_dir() | name.startswith((".", "~", "/")):
        return Source(name, config, "hub", f"{name!r} is no path here: the name of a set on the hub")
    if HUB_NAME.fullmatch(name) and path.suffix not in FORMATS and path.parent == Path():
        return Source(name, config, "hub", f"{name!r} is no path here: the name of a set on the hub")
    raise UserError(f"{name} does not exist", place, nearest(path))


def config_of(data: Data) -> str | None:
    """The config that is asked for. The one that stands by default belongs to the set that does, not to others."""
    asked = data.model_fields_set
    if "dataset_config_name" in asked or "dataset_name_or_path" not in asked:
        return data.dataset_config_name
    return None


def no_config(name: str, config: str | None, where: Callable[[str], str]) -> None:
    if config is not None:
        raise UserError(
            f"{name} is a file and has no config {config!r}",
            where("data.dataset_config_name"),
            "leave data.dataset_config_name out",
        )


def nearest(path: Path) -> str:
    """The deepest folder of the path that exists, and what in it comes closest."""
    parent = next((p for p in path.parents if p.is_dir()), Path())
    missing = path.relative_to(parent).parts[0]
    try:
        names = sorted(entry.name for entry in parent.iterdir())
    except OSError:
        names = []
    close = difflib.get_close_matches(missing, names, n=3)
    if close:
        return f"{parent} has {', '.join(close)}"
    return f"{parent} exists and holds no {missing}: is the volume mounted?"


def snapshot(path: Path) -> Path:
    """A hub cache folder stands for the revision its refs/main names."""
    main = path / "refs" / "main"
    if main.is_file() and (path / "snapshots" / main.read_text().strip()).is_dir():
        return path / "snapshots" / main.read_text().strip()
    return path


def of_files(name: str, paths: Iterable[Path], place: str) -> Source:
    """Files by themselves: one format, split by their names, all of it `train` where names tell nothing."""
    kinds = {path: kind(path) for path in paths}
    unknown = [path for path, found in kinds.items() if found is None]
    if unknown:
        raise UserError(
            f"{unknown[0]} has no format that is read", place, f"formats are told by suffix: {', '.join(FORMATS)}"
        )
    if len(set(kinds.values())) > 1:
        raise UserError(
            f"{name} mixes formats: {', '.join(sorted(str(found) for found in set(kinds.values())))}",
            place,
            "name the files of one format, for instance with *.jsonl",
        )
    files = list(kinds)
    found = {path: of_file(path.name) or of_file(path.parent.name) for path in files}
    splits: dict[str, tuple[Path, ...]] = {}
    for path in files:
        # One file alone is the training set, whatever it is called.
        split = found[path] if len(files) > 1 else "train"
        splits[split or "train"] = (*splits.get(split or "train", ()), path)
    shown = kinds[files[0]] or ""
    return Source(name, None, shown, f"{len(files)} {shown} file{'s' * (len(files) > 1)}", splits)


def kind(path: Path) -> str | None:
    suffix = path.suffixes[-2] if path.suffix == ".gz" and len(path.suffixes) > 1 else path.suffix
    found = FORMATS.get(suffix.lower())
    return None if path.suffix == ".gz" and found in ("parquet", "arrow") else found


def of_folder(path: Path, name: str, config: str | None, where: Callable[[str], str]) -> Source:
    """A folder: written by save_to_disk, published with configs, or plain files."""
    place = where("data.dataset_name_or_path")
    if config is not None and not is_saved(path):
        return of_config(path, name, config, where)
    if is_saved(path):
        return saved(path, name, config)
    card = read_card(path)
    configs = card_configs(card)
    if len(configs) == 1 or any(c.get("default") or c.get("config_name") == "default" for c in configs.values()):
        chosen = next((key for key, c in configs.items() if c.get("default") or key == "default"), None)
        return of_card(path, name, chosen or next(iter(configs)), card, where)
    if configs:
        raise UserError(
            f"{name} has several configs: {', '.join(configs)}",
            where("data.dataset_config_name"),
            "set data.dataset_config_name to one of them",
        )
    files = data_files(path)
    if files:
        return splits_of(path, name, None, files, {})
    below = config_folders(path)
    if len(below) > 1 or (below and of_file(below[0]) is None):
        raise UserError(
            f"{name} holds data only in subfolders: {', '.join(below)}",
            where("data.dataset_config_name"),
            "set data.dataset_config_name to one of them, or name the subfolder",
        )
    raise UserError(f"{name} holds no data file", place, f"formats are told by suffix: {', '.join(FORMATS)}")


def of_config(path: Path, name: str, config: str, where: Callable[[str], str]) -> Source:
    """One config of a published set: what its card lists, or the folder of that name."""
    card = read_card(path)
    if config in card_configs(card):
        return of_card(path, name, config, card, where)
    folder = path / config
    if folder.is_dir():
        if is_saved(folder):
            return saved(folder, name, config)
        files = data_files(folder)
        if files:
            return splits_of(folder, name, config, files, published(card, config))
    if path.name == config and data_files(path):  # the folder of the config itself was named
        return splits_of(path, name, config, data_files(path), {})
    known = sorted({*card_configs(card), *config_folders(path)})
    raise UserError(
        f"{name} has no config {config!r}" + (f"; it has {', '.join(known)}" if known else ""),
        where("data.dataset_config_name"),
        "name one of these" if known else "leave data.dataset_config_name out: the folder holds plain files",
    )


def of_card(path: Path, name: str, config: str, card: Mapping[str, Any], where: Callable[[str], str]) -> Source:
    """The files which the card gives for a config: a pattern, a list, or one entry per split."""
    given = card_configs(card)[config].get("data_files")
    entries = given if isinstance(given, list) else [given]
    patterns = [e if isinstance(e, dict) else {"split": None, "path": e} for e in entries if e is not None]
    folder = card_configs(card)[config].get("data_dir")
    if not patterns:
        files = data_files(path / folder if folder else path)
        return splits_of(path, name, config, files, published(dict(card), config))
    splits: dict[str, tuple[Path, ...]] = {}
    for entry in patterns:
        wanted = entry["path"] if isinstance(entry["path"], list) else [entry["path"]]
        for found in sorted({file for pattern in wanted for file in path.glob(pattern) if file.is_file()}):
            split = entry.get("split") or of_file(found.name) or "train"
            splits[split] = (*splits.get(split, ()), found)
    if not splits:
        raise UserError(
            f"{name}: none of the files that its README lists for {config!r} is here",
            where("data.dataset_name_or_path"),
            "the copy is incomplete: copy the data files too (git-lfs?), or fetch the set again",
        )
    kinds = {kind(file) for files in splits.values() for file in files}
    shown = next((k for k in PREFERENCE if k in kinds), "")
    return Source(name, config, shown, f"a published set, config {config}", splits, published(dict(card), config))


def splits_of(path: Path, name: str, config: str | None, files: list[Path], said: Mapping[str, Rows]) -> Source:
    """A folder's files of its preferred format, by split."""
    kinds = {kind(file) for file in files}
    shown = next(k for k in PREFERENCE if k in kinds)
    chosen = [file for file in files if kind(file) == shown]
    splits: dict[str, tuple[Path, ...]] = {}
    for file in chosen:
        split = of_file(file.name) or of_file(file.parent.name if file.parent != path else "") or "train"
        splits[split] = (*splits.get(split, ()), file)
    left = len(files) - len(chosen)
    how = f"{len(chosen)} {shown} file{'s' * (len(chosen) > 1)} in {path}" + (
        f", {left} of other formats not read" if left else ""
    )
    return Source(name, config, shown, how, splits, said)


def data_files(path: Path) -> list[Path]:
    """Data directly in the folder, in its `data` folder, or in folders named after splits."""
    places = [path, path / "data", *(d for d in sorted(path.iterdir()) if d.is_dir() and of_file(d.name))]
    for group in ([places[0]], [places[1]], places[2:]):
        files = [
            file
            for place in group
            if place.is_dir()
            for file in sorted(place.iterdir())
            if file.is_file() and kind(file) and file.name not in SIDE_FILES and not file.name.startswith(".")
        ]
        if files:
            return files
    return []


def config_folders(path: Path) -> list[str]:
    return [d.name for d in sorted(path.iterdir()) if d.is_dir() and (is_saved(d) or data_files(d))]


def read_card(path: Path) -> dict[str, Any]:
    """The YAML between the first two `---` lines of a README, if there is one."""
    readme = path / "README.md"
    if not readme.is_file():
        return {}
    text = readme.read_text("utf-8", "replace")
    head = re.match(r"\ufeff?---\r?\n(.*?)\r?\n---", text, re.DOTALL)
    try:
        card = yaml.safe_load(head[1]) if head else {}
    except yaml.YAMLError:
        return {}  # a README is prose: what can't be read there is found by the files' names
    return card if isinstance(card, dict) else {}


def card_configs(card: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    entries = card.get("configs") or []
    return {str(e["config_name"]): e for e in entries if isinstance(e, dict) and "config_name" in e}


def is_saved(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def saved(path: Path, name: str, config: str | None) -> Source:
    """What `save_to_disk` wrote: one set, or a folder for each split."""
    if (path / "state.json").is_file():
        splits: dict[str, tuple[Path, ...]] = {"train": (path,)}
    else:
        splits = {d.name: (d,) for d in sorted(path.iterdir()) if (d / "state.json").is_file()}
    return Source(name, config, "saved", f"written by save_to_disk in {path}", splits)
