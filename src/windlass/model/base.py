"""Read a model's `Base` from its folder or name."""

import difflib
import glob
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, Final

from windlass.errors import UserError
from windlass.files import read_json
from windlass.model.compressed import is_compressed
from windlass.model.config import describe
from windlass.model.files import (
    CONFIG,
    HEADERS,
    INDEX,
    PARAMS,
    SINGLE,
    list_names,
    read_headers,
    read_table,
    read_tensors,
)
from windlass.model.mistral_layout import MODEL_TYPE, read_mistral_layout
from windlass.model.parameters import Base
from windlass.model.stored import assign_stored

WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")  # suffixes of weight files


def find_base(model_name_or_path: str, where: str) -> Base:
    """Read the model in a folder; if there is no such folder, use a known model's published config."""
    shown = repr(model_name_or_path[:120])
    try:
        path = Path(model_name_or_path).expanduser()
        if path.exists():
            return read_base(path)
        fetched = find_fetched_folder(model_name_or_path)
        if fetched is not None:
            return read_base(fetched)
    except (OSError, RuntimeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{shown} can't be opened: {why}", where, "name a model folder", "unreadable") from None
    base = find_published_base(path.name)
    if base is None:
        names = {key.lower(): key for key in read_published_configs()}
        close = [names[key] for key in difflib.get_close_matches(path.name.lower()[:120], names, 3, 0.4)]
        alike = difflib.get_close_matches(path.name, [folder.name for folder in path.parent.glob("*/")], 3)
        known = f"{'nearest ' if close else ''}known: {', '.join(close or names.values())}"
        hint = f"name its folder (for a plan, one with its config.json alone), or a model that windlass knows; {known}"
        if alike:
            hint = f"{path.parent} has {', '.join(alike)}"
        elif re.fullmatch(r"\w[\w.-]*/[\w.-]+", model_name_or_path):
            hint = f"fetch it from the hub: `windlass fetch RUN` (with --headers-only for a plan); else {hint}"
        raise UserError(
            f"no folder {shown}, and no published model of that name is known", where, hint, "unknown-model"
        )
    note = (
        f"no weights at {model_name_or_path[:200]}: planned from the published config of {base.name}; "
        "check and train will refuse this path"
    )
    return replace(base, notes=(note, *base.notes))


def find_fetched_folder(name: str) -> Path | None:
    """Return the model's newest snapshot in the hub's cache, from `windlass fetch`'s mark or other tools' refs/main."""
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    flat = name.replace("/", "--")
    marks = sorted(cache.glob(f".windlass-model-{glob.escape(flat)}-*.json"), key=lambda mark: mark.stat().st_mtime)
    folders = [Path(str(read_json(mark).get("folder"))) for mark in reversed(marks)]
    main = cache / f"models--{flat}" / "refs" / "main"
    if main.is_file():
        folders.append(main.parents[1] / "snapshots" / main.read_text().strip())
    # The pattern also matches marks of longer names: org/model-chat for org/model.
    own = (folder for folder in folders if folder.parents[1:2] and folder.parents[1].name == f"models--{flat}")
    return next((folder for folder in own if any((folder / name).is_file() for name in (CONFIG, PARAMS))), None)


@cache
def read_published_configs() -> dict[str, dict[str, Any]]:
    """Return config.json of well-known models, by name."""
    table = tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))
    return {name: config for names, config in table.items() for name in names.split()}


def find_published_base(name: str) -> Base | None:
    """Return a known model without its weights, or None."""
    for known, config in read_published_configs().items():
        if known.lower() == name.lower():
            return describe(config, f"published config of {known}", known)
    return None


def read_base(path: Path) -> Base:
    """Read names, shapes, dtypes and places of all weights in a folder, from headers only."""
    names = list_names(path)
    if CONFIG not in names:
        hint = "fetch it from where the model was published" if names else "the folder is empty: is its volume mounted?"
        if PARAMS in names:  # as Mistral publishes NVFP4
            hint = (
                f"it has Mistral's own layout alone: copy {CONFIG} and the tokenizer's files of the same model into it"
            )
        raise UserError(f"the model folder has no {CONFIG}", str(path), hint, "no-config")
    folder = path if path.name not in ("", "..") else path.resolve()
    hub = folder.parent.name == "snapshots"  # the hub's cache names folders by hash: models--org--name/snapshots/…
    config = read_table(path / CONFIG)
    name = folder.parent.parent.name.rpartition("--")[2] if hub else folder.name
    if PARAMS in names and not {SINGLE, INDEX} & names:
        base = _read_mistral_layout(path, config, name)
        if base:
            return base
    base = describe(config, str(path / CONFIG), name, path)
    if not any(Path(name).suffix in WEIGHTS for name in names):
        if HEADERS in names:
            base = assign_stored(base, config, read_headers(path), str(path))
        return replace(base, notes=(note_no_weights(path), *base.notes))
    return replace(assign_stored(base, config, read_tensors(path, names), str(path)), path=path)


def _read_mistral_layout(path: Path, config: Mapping[str, Any], name: str) -> Base | None:
    """Read weights that are in Mistral's own layout alone, in 16 bits or by compressed-tensors, beside a config.json of
    the same model; None if they are stored otherwise."""
    quantized = read_table(path / PARAMS).get("quantization")
    files = {file.name for file in path.iterdir()} | read_json(path / HEADERS).keys()
    there = any(fnmatch(file, "consolidated*.safetensors") for file in files)
    if not there or not (quantized is None or (isinstance(quantized, dict) and is_compressed(quantized))):
        return None
    own = {**config, "quantization_config": quantized}  # config.json's may be of the model in another layout
    described = describe(own, str(path / PARAMS), name, path)
    if described.family.model_type != MODEL_TYPE:
        return None
    base = read_mistral_layout(path, described)
    notes = [f"the weights are in Mistral's own layout ({PARAMS}, consolidated*.safetensors)", *described.notes]
    return replace(base, notes=(*(() if base.path else (note_no_weights(path),)), *notes, *base.notes))


def note_no_weights(path: Path) -> str:
    known = "config.json and the headers of its files" if (path / HEADERS).is_file() else "its config.json"
    return f"no weights in {str(path)[:200]}: planned from {known}; check and train will refuse it"
