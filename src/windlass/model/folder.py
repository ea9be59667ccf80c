"""A model folder: which of its files are the weights, and every stored tensor by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from windlass.errors import Problem, UserError, raise_all
from windlass.model.assemble import assemble
from windlass.model.config import describe
from windlass.model.headers import read_header
from windlass.model.parameters import Base, Stored

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
LARGEST = {CONFIG: 2**24, INDEX: 2**28}  # bytes; real ones have kilobytes and a few megabytes
SHOWN = 3

# What lies there instead of the weights, and what to do about it.
INSTEAD: tuple[tuple[str, str, str], ...] = (
    (
        "adapter_model.safetensors",
        "it holds an adapter, not a model",
        "name the base model's folder here, and this one in lora.adapter",
    ),
    (
        "consolidated*.safetensors",
        "it holds only the publisher's own format (consolidated*.safetensors)",
        "fetch the model-*.safetensors files and their index too",
    ),
    (
        "model-*-of-*.safetensors",
        f"it has shards but no {INDEX}",
        f"fetch {INDEX} from where the model was published",
    ),
    (
        "*.bin",
        "its weights are pickled (*.bin), which can run code when opened",
        "fetch or convert them to safetensors",
    ),
    ("*.gguf", "its weights are in GGUF", "fetch the safetensors version of the model"),
    ("*.safetensors", f"none of its safetensors files is named {SINGLE}", f"name it {SINGLE}, or give an index"),
)


def read_base(path: Path) -> Base:
    """Names, shapes, dtypes and places of all weights in a folder. Only headers are read."""
    names = _names(path)
    if CONFIG not in names:
        raise UserError(
            f"the model folder has no {CONFIG}",
            str(path),
            "fetch it from where the model was published" if names else "the folder is empty: is its volume mounted?",
        )
    described = describe(_read_json(path / CONFIG), str(path / CONFIG))
    return assemble(path, described, _tensors(path, names))


def _names(path: Path) -> frozenset[str]:
    try:
        return frozenset(entry.name for entry in path.iterdir())
    except NotADirectoryError:
        raise UserError("it is a file, not a folder", str(path), "name the folder with config.json in it") from None
    except FileNotFoundError:
        raise UserError(
            "there is no such folder", str(path), "check the path, and that its volume is mounted"
        ) from None
    except OSError as error:
        raise UserError(f"the folder can't be read: {error.strerror}", str(path), "check its owner and mode") from None


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON file that holds an object."""
    most = LARGEST[file.name]
    try:
        with file.open("rb") as opened:
            text = opened.read(most + 1)
        if len(text) > most:
            raise UserError(f"it has more than {most} bytes: not a model's {file.name}", str(file), "fetch it again")
        said = json.loads(text)
    except OSError as error:
        raise UserError(f"it can't be read: {error.strerror}", str(file), "check its owner and mode") from None
    except (ValueError, RecursionError) as error:
        lfs = text.startswith(b"version https://git-lfs")
        hint = "it is a Git LFS pointer: run git lfs pull" if lfs else "fetch it again from the publisher"
        raise UserError(f"it is not JSON: {error}", str(file), hint) from None
    if not isinstance(said, dict):
        raise UserError("it is JSON, but not an object", str(file), "fetch it again from the publisher")
    return said


def _tensors(path: Path, names: frozenset[str]) -> dict[str, Stored]:
    """Every stored tensor. As transformers does: one whole file goes before an index."""
    if SINGLE in names:
        return read_header(path / SINGLE)
    if INDEX in names:
        return _sharded(path, names)
    for pattern, problem, hint in INSTEAD:
        if any(Path(name).match(pattern) for name in names):
            raise UserError(f"the model folder has no weights that can be read: {problem}", str(path), hint)
    raise UserError(
        "the model folder has no weights",
        str(path),
        f"it must hold {SINGLE}, or {INDEX} and the files it names",
    )


def _sharded(path: Path, names: frozenset[str]) -> dict[str, Stored]:
    index = path / INDEX
    where = _read_json(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise UserError("it has no weight_map", str(index), "fetch it again from the publisher")
    files = dict.fromkeys(where.values())
    raise_all(list(_bad_files(files, names, index)))
    stored: dict[str, Stored] = {}
    problems: list[Problem] = []
    unlisted: list[str] = []
    for file in files:
        try:
            header = read_header(path / file)
        except UserError as error:
            problems += error.problems
            continue
        stored |= {key: tensor for key, tensor in header.items() if where.get(key) == file}
        unlisted += [f"{key} in {file}" for key in header if key not in where]
    raise_all(problems)
    problems += _disagreements(where, stored, unlisted, index)
    raise_all(problems)
    return stored


def _bad_files(files: Mapping[Any, None], names: frozenset[str], index: Path) -> Iterator[Problem]:
    odd = [str(file)[:80] for file in files if not isinstance(file, str) or Path(file).name != file]
    if odd:
        yield Problem(f"it names what is no file of its folder: {_some(odd)}", str(index), "fetch it again")
        return
    missing = [file for file in files if file not in names]
    if missing:
        yield Problem(
            f"it names {len(missing)} of {len(files)} files that are not there: {_some(missing)}",
            str(index),
            "the download or copy did not finish: fetch the missing files",
        )


def _disagreements(
    where: Mapping[str, str], stored: Mapping[str, Stored], unlisted: Sequence[str], index: Path
) -> Iterator[Problem]:
    absent = [f"{key} in {file}" for key, file in where.items() if key not in stored]
    hint = "index and files are of different versions: fetch the whole folder again"
    if absent:
        yield Problem(
            f"it names {len(absent)} tensors that their file does not hold: {_some(absent)}", str(index), hint
        )
    if unlisted:
        yield Problem(
            f"the files hold {len(unlisted)} tensors that it does not name: {_some(unlisted)}", str(index), hint
        )


def _some(names: Sequence[str]) -> str:
    """A few of many."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
