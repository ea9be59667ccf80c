"""OpenImages as published (images by id, boxes in CSV files), checked once and cached for every rank.

    <images>/train/<ImageID>.jpg …      or <images>/<ImageID>.jpg for all parts
    *train-annotations-bbox.csv         ImageID, LabelName, XMin, XMax, YMin, YMax (relative to the image), IsGroupOf
    *class-descriptions-boxable.csv     label, name
    train-images*.csv                   ImageID: the images of the part; optional

The CSV files are in the cache folder, next to the image folder, or in it. Without a list of images, a part consists of
the files in its folder or, if parts have no folders, of the files named in its annotations.
"""

from __future__ import annotations

import array
import csv
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from windlass.errors import Problem, UserError, raise_all

MOST_BAD = 0.05  # share of the images that may be missing or broken: they are left out
VERSION = 1  # of the cache's contents
SUFFIXES = (".jpg", ".jpeg", ".png")
COLUMNS = ("ImageID", "LabelName", "XMin", "YMin", "XMax", "YMax")
CHUNK = 512  # images that are checked together


@dataclass(frozen=True, slots=True)
class Part:
    """The images of one part and their boxes. Image i has the boxes from starts[i] up to starts[i + 1]."""

    paths: list[str]  # relative to the image folder
    sizes: Tensor  # [images, 2]: width, height
    starts: Tensor  # [images + 1]
    boxes: Tensor  # [boxes, 4]: left, top, right, bottom, relative to the image
    labels: Tensor  # [boxes]: index into `classes`
    groups: Tensor  # one box around many objects: not trained on
    classes: list[str]
    counts: dict[str, int]  # counts for the log


@dataclass(frozen=True, slots=True)
class Source:
    """Where a part of the data set is."""

    images: Path
    part: str
    limit: int | None  # number of images, the first by id
    annotations: Path
    classes: Path
    listing: Path | None
    files: dict[str, str]  # image id -> path relative to `images`

    def key(self) -> str:
        """Return a key that differs for other files, so that no stale cache is read."""
        found = hashlib.sha256(repr((VERSION, self.part, self.limit)).encode())
        for table in filter(None, (self.annotations, self.classes, self.listing)):
            found.update(repr((table.name, table.stat().st_size, table.stat().st_mtime_ns)).encode())
        for path in self.files.values():
            found.update(path.encode() + b"\n")
        return found.hexdigest()[:16]


def find_source(images: Path, cache: Path, part: str, limit: int | None) -> Source:
    if not images.is_dir():
        raise UserError("is not a folder", str(images), "--local-image-dir names the folder of the images")
    places = list(dict.fromkeys((cache.resolve(), images.resolve().parent, images.resolve())))
    annotations = _table(places, f"*{part}-annotations-bbox.csv")
    classes = _table(places, "*class-descriptions-boxable.csv")
    raise_all([found for found in (annotations, classes) if isinstance(found, Problem)])
    listing = _table(places, f"{part}-images*.csv")
    if isinstance(listing, Problem) and "several" in listing.problem:
        raise_all([listing])
    assert isinstance(annotations, Path)
    assert isinstance(classes, Path)
    files = _files(images, part)
    return Source(images, part, limit, annotations, classes, listing if isinstance(listing, Path) else None, files)


def _table(places: Iterable[Path], pattern: str) -> Path | Problem:
    for place in places:
        found = sorted(place.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            return Problem(f"several files are {pattern}: {', '.join(path.name for path in found)}", str(place))
    looked = ", ".join(map(str, places))
    return Problem(f"no {pattern}", looked, "the annotations as published: storage.googleapis.com/openimages")


def _files(images: Path, part: str) -> dict[str, str]:
    """Return the images of a part's own folder, or of the image folder if parts have none, in the order of their
    ids."""
    top = images / part if (images / part).is_dir() else images
    found: dict[str, str] = {}
    for folder, _, names in os.walk(top):  # walk needs no call per file, of which there are millions
        inner = Path(folder).relative_to(images)
        for path in (inner / name for name in names):
            if path.suffix.lower() in SUFFIXES:
                if path.stem in found:
                    raise UserError(f"{found[path.stem]} and {path} have the same id", str(images))
                found[path.stem] = str(path)
    return dict(sorted(found.items()))


def cache_path(origin: Source, cache: Path) -> Path:
    return cache / f"openimages-{origin.part}-{origin.key()}.safetensors"


def prepare(origin: Source, cache: Path) -> Path:
    """Read, check and cache the part, unless that is done. One process does this while the others wait."""
    path = cache_path(origin, cache)
    if path.exists():
        return path
    part = check(origin)
    tensors = {name: getattr(part, name) for name in ("sizes", "starts", "boxes", "labels", "groups")}
    words = {name: json.dumps(getattr(part, name)) for name in ("paths", "classes", "counts")}
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    save_file(tensors, unfinished, words)
    unfinished.chmod(0o644)  # the library makes it readable only for its owner, whatever the umask
    unfinished.replace(path)  # completely or not at all
    return path


def read(path: Path) -> Part:
    with safe_open(path, framework="pt") as handle:
        words = {name: json.loads(text) for name, text in handle.metadata().items()}
        return Part(**words, **{name: handle.get_tensor(name) for name in handle.keys()})  # noqa: SIM118


def check(origin: Source) -> Part:
    """Find everything that can be wrong with the data, before the first step, and the same for all ranks."""
    labels, classes = _classes(origin.classes)
    known = dict.fromkeys(_read_listing(origin.listing)) if origin.listing is not None else origin.files
    numbers = {name: number for number, name in enumerate(sorted(known))}
    images, kinds, groups, places, nameless = _annotations(origin.annotations, labels, numbers)
    names = list(numbers)
    if origin.listing is None and not (origin.images / origin.part).is_dir():
        names = [names[number] for number in sorted(set(images.tolist()))]  # the other files belong to other parts
    sizes, counts = _find_readable(origin, names)
    counts["annotations without an image"] = nameless

    old = torch.tensor([numbers[name] for name in sizes])
    new = torch.full((len(numbers) + 1,), -1).index_put_((old,), torch.arange(len(old)))
    images = new[images]  # -1: of an image that is not used
    clipped = places.clamp(0, 1)
    pixels = (clipped[:, 2:] - clipped[:, :2]) * torch.tensor([*sizes.values(), (1, 1)])[images]
    used, solid = images >= 0, (pixels >= 1).all(dim=1)  # also false for NaN
    counts["boxes clipped"] = int((used & solid & (clipped != places).any(dim=1)).sum())
    counts["boxes dropped"] = int((used & ~solid).sum())
    order = images[used & solid].argsort(stable=True)
    boxes, labels_, grouped = (column[used & solid][order] for column in (clipped, kinds, groups))
    per_image = torch.bincount(images[used & solid], minlength=len(sizes))
    counts |= {"images": len(sizes), "boxes": len(boxes), "images without boxes": int((per_image == 0).sum())}
    return Part(
        paths=[origin.files[name] for name in sizes],
        sizes=torch.tensor(list(sizes.values())),
        starts=torch.cat([torch.zeros(1, dtype=torch.int64), per_image.cumsum(0)]),
        boxes=boxes.contiguous(),
        labels=labels_.contiguous(),
        groups=grouped.contiguous(),
        classes=classes,
        counts=counts,
    )


def _rows(path: Path, wanted: Iterable[str]) -> Iterator[list[str]]:
    """Return these columns of a CSV file with a header; a missing column is an error."""
    with path.open(newline="", encoding="utf-8") as handle:
        rows = csv.reader(handle)
        header = next(rows, [])
        raise_all([Problem(f"has no column {name}", str(path)) for name in wanted if name not in header])
        places = [header.index(name) for name in wanted]
        for row in rows:
            if len(row) != len(header):
                raise UserError(f"{len(row)} columns where the header has {len(header)}", f"{path}:{rows.line_num}")
            yield [row[place] for place in places]


def _read_listing(path: Path) -> list[str]:
    return [name for (name,) in _rows(path, ["ImageID"])]


def _classes(path: Path) -> tuple[dict[str, int], list[str]]:
    with path.open(newline="", encoding="utf-8") as handle:
        rows = [row for row in csv.reader(handle) if row and row[0] != "LabelName"]  # some editions have a header
    if not rows or any(len(row) != 2 for row in rows) or len({row[0] for row in rows}) != len(rows):
        raise UserError("is no table of labels and names, each label once", str(path))
    return {label: number for number, (label, _) in enumerate(rows)}, [name for _, name in rows]


def _annotations(
    path: Path, labels: dict[str, int], images: dict[str, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Return image, label, group flag and box of every annotation of these images, and how many name another image."""
    numbers, kinds, groups, places = array.array("q"), array.array("q"), array.array("b"), array.array("f")
    strange: dict[str, int] = {}
    nameless = 0
    with path.open(encoding="utf-8") as handle:
        grouped = "IsGroupOf" in handle.readline()
    for line, row in enumerate(_rows(path, [*COLUMNS, *(["IsGroupOf"] if grouped else [])]), start=2):
        if row[1] not in labels:
            strange.setdefault(row[1], line)
        elif row[0] not in images:
            nameless += 1
        else:
            try:
                places.extend([float(value) for value in row[2:6]])
            except ValueError as error:
                raise UserError(str(error), f"{path}:{line}") from None
            numbers.append(images[row[0]])
            kinds.append(labels[row[1]])
            groups.append(grouped and row[6] == "1")
    shown = list(strange.items())[:5]
    hint = f"{len(strange)} labels are not in the table of classes" if strange else ""
    raise_all([Problem(f"label {label!r} is in no class", f"{path}:{line}", hint) for label, line in shown])
    columns = [torch.tensor(numbers, dtype=torch.int64), torch.tensor(kinds, dtype=torch.int64)]
    return (*columns, torch.tensor(groups, dtype=torch.bool), torch.tensor(places).reshape(-1, 4), nameless)  # type: ignore[return-value]


def _find_readable(origin: Source, names: list[str]) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """Return width and height of the first `limit` readable images, and how many are not."""
    sizes: dict[str, tuple[int, int]] = {}
    counts = {"images missing": 0, "images broken": 0}
    bad: list[str] = []
    limit = len(names) if origin.limit is None else origin.limit
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        seen = 0
        while len(sizes) < limit and seen < len(names):
            chunk = names[seen : seen + min(CHUNK, limit - len(sizes))]
            seen += len(chunk)
            paths = [origin.images / origin.files[name] if name in origin.files else None for name in chunk]
            for name, path, size in zip(chunk, paths, pool.map(_measure, paths), strict=True):
                if size is not None:
                    sizes[name] = size
                else:
                    counts["images missing" if path is None else "images broken"] += 1
                    bad.append(name if path is None else str(path))
    share = len(bad) / max(1, len(bad) + len(sizes))
    if share > MOST_BAD or not sizes:
        problem = f"{len(bad)} of {len(bad) + len(sizes)} images are missing or broken: {', '.join(bad[:3])} …"
        hint = f"up to {MOST_BAD:.0%} are left out"
        raise UserError(problem if bad else f"no image of the part {origin.part}", str(origin.images), hint)
    return sizes, counts


def _measure(path: Path | None) -> tuple[int, int] | None:
    try:
        if path is not None:
            with Image.open(path) as image:
                image.load()
                width, height = image.size
                return width, height
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        pass
    return None
