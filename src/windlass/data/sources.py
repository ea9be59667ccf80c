"""Find a data set's files, splits and number of rows. Imports no torch."""

from __future__ import annotations

import difflib
import glob
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from windlass.data.reading import FILE_FORMATS, SUFFIXES, RowCount, Source, SplitPart, count_files, detect_format
from windlass.errors import UserError, Where
from windlass.files import read_json
from windlass.model.files import HEADERS, PUBLISHED
from windlass.observe.format import format_plural
from windlass.runfile import Data
from windlass.runfile.rows import RECIPE_CONFIG

SIDE_FILES = {"dataset_infos.json", "dataset_info.json", "state.json", "dataset_dict.json", "requirements.txt"}
SIDE_FILES |= {HEADERS, PUBLISHED}
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# Names of each split in published folders.
ALIASES = {"training": "train", "valid": "validation", "val": "validation", "dev": "validation"}
ALIASES |= {"testing": "test", "eval": "test"}
SLICE = re.compile(r"(?P<name>[^\[\]+]+)(\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?")


def parse_split(spec: str, source: Source, where: str) -> tuple[SplitPart, ...]:
    """Return each part of a split's specification, in the order written: `train[:5%]+extra`. `dev` finds
    `validation`."""
    parts = []
    splits = list(source.splits or source.published)
    for piece in spec.split("+"):
        match = SLICE.fullmatch(piece.strip())
        if match is None:
            hint = "write a split's name, or a slice of it: train, train[:5%], train[100:200], train[:90%]+extra"
            raise UserError(f"{spec!r} is not a split", where, hint, "not-a-split")
        name = match["name"].strip()
        alike = [split for split in splits if canonical_split(split) == canonical_split(name)]
        if name not in splits and len(alike) != 1:
            hint = "name one of these, or hold rows out of the training split with data.val_fraction"
            problem = f"the data has no split {name!r}; it has {', '.join(map(repr, splits))}"
            raise UserError(problem, where, hint, "no-such-split")
        parts.append(SplitPart(source, name if name in splits else alike[0], match["start"] or "", match["stop"] or ""))
    return tuple(parts)


def canonical_split(split: str) -> str:
    return ALIASES.get(split.lower(), split.lower())


def parse_split_name(name: str) -> str | None:
    """Return the split in the name of a file or folder: train-00000-of-00002, wiki.valid, dev."""
    named = {canonical_split(word) for word in re.split(r"[^A-Za-z]+", name)} & {"train", "validation", "test"}
    return named.pop() if len(named) == 1 else None


# --- from data.dataset_name_or_path to files ---


def resolve_source(data: Data, where: Where = str) -> Source:
    """Return the files behind `data.dataset_name_or_path`, or a hub name; raise a UserError if it is neither."""
    name = data.dataset_name_or_path
    config = get_config_name(data)
    place = where("data.dataset_name_or_path")
    path = Path(name).expanduser()
    if path.is_dir():
        return _resolve_folder(path, data, config, where)
    if path.is_file() or any(character in name for character in "*?["):
        # Path.glob takes no absolute pattern.
        found = [str(path)] if path.is_file() else sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207
        files = [file for file in map(Path, found) if file.is_file()]
        kinds = list(dict.fromkeys(detect_format(file) for file in files))
        if len(kinds) != 1 or None in kinds:
            problem = f"{name} mixes formats: {', '.join(map(str, kinds))}" if len(kinds) > 1 else f"{name}: no format"
            code = "not-one-format" if files else "no-such-file"
            hint = f"name files of one format, for instance with *.jsonl; windlass reads {', '.join(SUFFIXES)}"
            raise UserError(problem if files else f"no file matches {name!r}", place, hint, code)
        if config is not None:
            hint = "leave data.dataset_config_name out"
            problem = f"{name} is a file and has no config {config!r}"
            raise UserError(problem, where("data.dataset_config_name"), hint, "no-such-config")
        # A single file is the training set, whatever its name.
        splits = [parse_split_name(file.name) or parse_split_name(file.parent.name) for file in files]
        return _source(name, None, "", list(zip(splits if len(files) > 1 else ["train"], files, strict=True)))
    is_file_name = detect_format(path) is not None
    is_name = not is_file_name and (path.parent == Path() or not path.parent.is_dir())
    if HUB_NAME.fullmatch(name) and is_name:
        return Source(name, config, "hub", f"{name!r} is not a path here: taken as a data set on the hub")
    parent = next((p for p in path.parents if p.is_dir()), Path())
    missing = path.relative_to(parent).parts[0]
    close = difflib.get_close_matches(missing, sorted(file.name for file in parent.glob("*")), n=3)
    hint = f"{parent} has no {missing}: is the volume mounted?"
    if parent == Path():
        hint = "give its path from this folder, or from /"
    if close:
        hint = f"did you mean {', '.join(str(parent / file) for file in close)}?"
    raise UserError(f"{name} does not exist", place, hint, "no-such-file")


def get_config_name(data: Data) -> str | None:
    """Return the config that the run file names. The default config belongs to the default set only."""
    if data.dataset_config_name == "auto" and "dataset_name_or_path" in data.changed:
        return None
    return preferred_config(data)


def preferred_config(data: Data) -> str | None:
    """Return the config that the run file names, else the default one, which the set need not have."""
    return RECIPE_CONFIG if data.dataset_config_name == "auto" else data.dataset_config_name


def _resolve_folder(path: Path, data: Data, config: str | None, where: Where) -> Source:
    """Resolve a folder: with a card that lists configs, with a folder per config, or plain."""
    name = data.dataset_name_or_path
    default = preferred_config(data)
    main = path / "refs" / "main"  # a hub cache folder stands for the revision that refs/main names
    if main.is_file() and (path / "snapshots" / main.read_text().strip()).is_dir():
        path = path / "snapshots" / main.read_text().strip()
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        hint = "model.model_name_or_path names the model; data.dataset_name_or_path a file or folder of rows"
        raise UserError(f"{name} is the folder of a model", where("data.dataset_name_or_path"), hint, "model-folder")
    card = read_card(path)
    configs = {str(entry.get("config_name")): entry for entry in card.get("configs") or []}
    if config is None and default and (default in configs or (path / default).is_dir()):
        config = default
    if config is None:
        preferred = [key for key, entry in configs.items() if entry.get("default") or key == "default"]
        config = next(iter(preferred or (configs if len(configs) == 1 else ())), None)
    if config in configs:
        files = [(split, file) for split, glob in list_card_files(card, config) for file in sorted(path.glob(glob))]
        if files := [(split, file) for split, file in files if detect_format(file) and file.name not in SIDE_FILES]:
            return _source(name, config, " that the README lists", files, card)
        hint = "the copy is incomplete: copy the data files too (git-lfs?), or fetch the set again"
        problem = f"{name}: none of the files that its README lists for {config!r} is here"
        raise UserError(problem, where("data.dataset_name_or_path"), hint, "incomplete-copy")
    if config or not configs:
        # The config's own folder, also if the path is that folder already; without a config, the folder itself.
        for folder in (path / (config or ""), *([path] if path.name == config else [])):
            if files := _data_files(folder):
                return _source(name, config, f" in {folder}", files, card)
    known = sorted({*configs, *(folder.name for folder in path.iterdir() if folder.is_dir() and _data_files(folder))})
    if config is None and not known:
        hint = f"windlass reads {', '.join(SUFFIXES)}"
        raise UserError(f"{name} contains no data file", where("data.dataset_name_or_path"), hint, "no-data-file")
    code = "no-such-config" if config else "several-configs"
    problem = f"{name} has no config {config!r}; it has" if config else f"{name} has several configs:"
    hint = "set data.dataset_config_name to one of them" if known else "leave data.dataset_config_name out"
    raise UserError(f"{problem} {', '.join(known) or 'none'}", where("data.dataset_config_name"), hint, code)


def _source(
    name: str, config: str | None, how: str, files: Sequence[tuple[str | None, Path]], card: Mapping[str, Any] = {}
) -> Source:
    """Return the files of the preferred format, by their given split or the split in their name."""
    kinds = [detect_format(file) for _, file in files]
    kind = next(kind for kind in FILE_FORMATS if kind in kinds)
    splits: dict[str, tuple[Path, ...]] = {}
    for (split, file), own in zip(files, kinds, strict=True):
        chosen = split or parse_split_name(file.name) or "train"
        if own == kind and file not in splits.get(chosen, ()):
            splits[chosen] = (*splits.get(chosen, ()), file)
    count = kinds.count(kind)
    how = f"{format_plural(count, f'{kind} file')}{how}"
    if count < len(kinds):
        how += f", {len(kinds) - count} of other formats not read"
    return Source(name, config, kind, how, splits, read_published_rows(card, config))


def _data_files(path: Path) -> list[tuple[str | None, Path]]:
    """Return what save_to_disk wrote; else data in the folder, in its `data` folder, or in folders named after
    splits."""
    if not path.is_dir():
        return []
    below = [folder for folder in sorted(path.iterdir()) if folder.is_dir()]
    saved = below if (path / "dataset_dict.json").is_file() else [path]
    if any((folder / "state.json").is_file() for folder in saved):
        return [
            ("train" if folder == path else folder.name, folder / file["filename"])
            for folder in saved
            for file in read_json(folder / "state.json").get("_data_files", ())
        ]
    for places in ([path], [path / "data"], [folder for folder in below if parse_split_name(folder.name)]):
        found = [file for place in places for file in sorted(place.glob("[!.]*")) if file.is_file()]
        if files := [file for file in found if detect_format(file) and file.name not in SIDE_FILES]:
            return [
                (parse_split_name(f.name) or (parse_split_name(f.parent.name) if f.parent in below else None), f)
                for f in files
            ]
    return []


def read_card(path: Path) -> dict[str, Any]:
    """Return the YAML between the first two `---` lines of a README, if any."""
    readme = path / "README.md"
    if not readme.is_file():
        return {}
    head = re.match(r"\ufeff?---\r?\n(.*?)\r?\n---", readme.read_text("utf-8", "replace"), re.DOTALL)
    try:
        card = yaml.safe_load(head[1]) if head else {}
    except yaml.YAMLError:
        return {}  # a README is prose; if its YAML can't be read, file names decide
    return card if isinstance(card, dict) else {}


def list_card_files(card: Mapping[str, Any], config: str | None) -> list[tuple[str | None, str]]:
    """Return splits and patterns of a config's files; a card gives a pattern, a list, or an entry per split."""
    entry = next((e for e in card.get("configs") or [] if config and str(e.get("config_name")) == config), None)
    if entry is None:
        return []
    folder = entry.get("data_dir")
    files = entry.get("data_files") or ([f"{folder}/*"] if folder else ["*", "data/*"])
    found: list[tuple[str | None, str]] = []
    for one in files if isinstance(files, list) else [files]:
        split, patterns = (one.get("split"), one["path"]) if isinstance(one, dict) else (None, one)
        found += [(split, pattern) for pattern in (patterns if isinstance(patterns, list) else [patterns])]
    return found


def read_published_rows(card: Mapping[str, Any], config: str | None) -> dict[str, RowCount]:
    """Return the numbers of rows per split from a published set's card."""
    infos = card.get("dataset_info") or []
    how = card.get("how", "as its README says")
    for info in [infos] if isinstance(infos, dict) else infos:
        if isinstance(info, dict) and (config is None or info.get("config_name", "default") == config):
            keys = {"count": "num_examples", "text_bytes": "num_bytes", "blank": "blank", "blank_how": "blank_how"}
            rows = {s["name"]: {ours: s[key] for ours, key in keys.items() if key in s} for s in info["splits"]}
            return {split: RowCount(**{"count": None, **known}, how=how) for split, known in rows.items()}
    return {}


# --- how many rows ---


def count_rows(data: Data, split: str, where: Where = str, key: str = "data.train_split") -> RowCount:
    """Count the rows of a split or of slices, if that is possible without reading the set; else None and why."""
    name = data.dataset_name_or_path
    try:
        source = resolve_source(data, where)
        unknown = f"{name} is on the hub: rows are known once fetched"
    except UserError as error:
        source = Source(name, None, "", "")
        unknown = error.problems[0].problem
    if not source.splits:
        cards = yaml.safe_load(Path(__file__).with_name("cards.yaml").read_text())
        published = read_published_rows(cards.get(Path(name).name, {}), preferred_config(data))
        source = replace(source, published=published)
        if not source.published:
            return RowCount(None, unknown)
    total = size = blank = 0.0
    for part in parse_split(split, source, where(key)):
        known = source.published.get(part.split, RowCount(None, ""))
        rows = count_files(source.format, part.files) if source.splits else known
        rows = known if rows.count is None and known.count is not None else rows
        if rows.count is None:
            return rows
        start, stop = part.bounds(rows.count)
        share = (stop - start) / max(rows.count, 1)
        total = total + stop - start
        blank = blank + rows.blank * share
        size = size + (rows.text_bytes or 0) * share
    return RowCount(round(total), rows.how, round(size) or None, round(blank), rows.blank_how)
