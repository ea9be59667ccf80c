"""Read a model's `Base` from its folder or name: match each stored tensor with a parameter or a reason to skip it."""

import difflib
import glob
import os
import re
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache
from math import ceil, prod
from pathlib import Path
from typing import Any, Final

from windlass.errors import Problem, UserError, raise_all
from windlass.files import read_json
from windlass.model.compressed import is_compressed
from windlass.model.config import describe
from windlass.model.family import IGNORED, TIED, UNREAD, VISION
from windlass.model.files import (
    COMPARED_BYTES,
    CONFIG,
    HEADERS,
    INDEX,
    PARAMS,
    SINGLE,
    abbreviate,
    have_equal_bytes,
    list_names,
    read_headers,
    read_table,
    read_tensors,
)
from windlass.model.packed import BESIDE, PACKED, find_packed, make_compressed_piece, make_packed_piece
from windlass.model.parameters import Base, Parameter, Piece, Spelling, Stored

WEIGHT_DTYPES: Final = ("F64", "F32", "F16", "BF16")
FP8_DTYPES: Final = ("F8_E4M3", "F8_E5M2")  # codes that mean nothing without their scale
WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")  # suffixes of weight files
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
# Kinds of faults, and a hint for each.
FETCH_FOLDER: Final = "fetch the folder again; config.json and weights must be of the same model"
FETCH_SCALES: Final = (
    "a quantized weight is its code x its scale: fetch the folder again, or a 16-bit version of the model"
)
MISSING = "missing weights"
UNKNOWN = "unknown tensors, which belong to no part of the model"
SHAPE = "weights of another shape than config.json gives"
DTYPE = "weights of an unknown dtype"
NO_SCALE = "quantized weights without a scale"
ODD_SCALE = "scales that do not fit their weight"
UNTIED = "a stored head that is not the embedding, to which config.json ties it"
ODD_PACKED = "weights in 4 bits that do not fit config.json, or whose blocks run over the ends of rows"
UNTIE: Final = (
    "set tie_word_embeddings: false in config.json to train with the stored head, as transformers would; "
    "most servers tie it: if they are right, remove it from the files"
)
FAULTS: Final = {  # kinds of fault, in the order they are printed: hint, code
    UNTIED: (UNTIE, "untied-head"),
    MISSING: (FETCH_FOLDER, "missing-weights"),
    UNKNOWN: (FETCH_FOLDER, "unknown-tensors"),
    SHAPE: (FETCH_FOLDER, "other-shape"),
    DTYPE: (f"known: {', '.join((*WEIGHT_DTYPES, *FP8_DTYPES))}", "unknown-dtype"),
    NO_SCALE: (FETCH_SCALES, "no-scale"),
    ODD_SCALE: (FETCH_SCALES, "odd-scale"),
    ODD_PACKED: ("fetch the folder again, or a 16-bit version of the model", "odd-packed"),
}


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
    from windlass.model.mistral_layout import MODEL_TYPE, read_mistral_layout  # which assigns stored tensors, too

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


def assign_stored(base: Base, config: Mapping[str, Any], stored: Mapping[str, Stored], where: str) -> Base:
    """Assign a stored tensor to every piece of every parameter, and a reason to every tensor that is not read."""
    notes = [*base.notes]
    if base.wrapper and config.get("tie_word_embeddings") is True and not any(_is_head(key) for key in stored):
        untied = [parameter for parameter in base.parameters if parameter.name != HEAD]
        if len(untied) < len(base.parameters):
            notes.append("the head is the embedding: config.json's outer part ties them, and no head is stored")
        base = replace(base, parameters=tuple(untied), config={**base.config, "tie_word_embeddings": True})

    faults: dict[str, list[str]] = defaultdict(list)
    packed = find_packed(stored, base.method) if base.quantization else {}
    parameters = [
        replace(parameter, pieces=tuple(_find_pieces(parameter, stored, packed, base, faults)))
        for parameter in base.parameters
    ]
    used = {tensor.key for parameter in parameters for piece in parameter.pieces for tensor in piece.tensors}
    used |= {tensor.key for name in faults[ODD_PACKED] for tensor in packed[name]}
    bare = {key.removesuffix(PACKED) for key in faults[NO_SCALE]} & packed.keys()
    used |= {tensor.key for name in bare for tensor in packed[name]}
    has_head = any(parameter.name == HEAD for parameter in parameters)
    reasons = {**UNREAD, **dict.fromkeys((f"{name}.*" for name in base.family.ignored), IGNORED)}
    if base.wrapper:
        reasons[base.wrapper.skipped] = VISION
    unread: dict[Stored, str] = {}
    for key, tensor in stored.items():
        if key in used:
            continue
        why = next((why for pattern, why in reasons.items() if re.fullmatch(pattern, key)), None)
        if _is_head(key) and not has_head:
            why = TIED
            notes.append(f"{key} is stored and not read: {TIED}")
            if not is_tied(parameters, tensor, sampled=16):
                faults[UNTIED].append(key)
        if why is None:
            faults[UNKNOWN].append(key)
        else:
            unread[tensor] = why
    raise_all(
        [
            Problem(f"{kind} ({len(faults[kind])}): {abbreviate(faults[kind])}", where, hint, code)
            for kind, (hint, code) in FAULTS.items()
            if faults[kind]
        ]
    )
    return replace(base, parameters=tuple(parameters), unread=unread, notes=tuple(notes))


def _find_pieces(
    parameter: Parameter,
    stored: Mapping[str, Stored],
    packed: Mapping[str, tuple[Stored, ...]],
    base: Base,
    faults: dict[str, list[str]],
) -> Iterator[Piece]:
    """Yield the pieces of a parameter; add what is wrong with them to `faults`, by kind."""
    for name, shape, offset in _list_stored_parts(parameter, stored.keys() | packed.keys()):
        if name in packed and len(packed[name]) <= len(BESIDE.get(base.method, ())):
            faults[NO_SCALE].append(packed[name][0].key)
        elif name in packed:
            piece = _make_piece(base, packed[name], shape, offset, transposed=parameter.transposed)
            if piece:
                yield piece
            else:
                faults[ODD_PACKED].append(name)
        elif name in stored:
            tensor = stored[name]
            scale = stored.get(f"{name}{base.scale_suffix}")
            if tensor.shape != shape:
                faults[SHAPE].append(f"{tensor.key} is {list(tensor.shape)}, not {list(shape)}")
            _check_dtype(tensor, scale, base, faults)
            yield Piece(tensor, offset, scale)
        else:
            faults[MISSING].append(name)


def _make_piece(
    base: Base, parts: tuple[Stored, ...], shape: tuple[int, ...], offset: tuple[int, ...], *, transposed: bool
) -> Piece | None:
    if base.method not in BESIDE:
        return make_packed_piece(parts, shape, offset, transposed=transposed)
    group = (base.quantization or {})["group_size"]
    return None if transposed else make_compressed_piece(base.method, parts, shape, offset, group)


def _check_dtype(tensor: Stored, scale: Stored | None, base: Base, faults: dict[str, list[str]]) -> None:
    """Add to `faults` an unknown dtype, an FP8 weight without a scale, and a scale that does not fit its weight."""
    in_fp8 = tensor.dtype in FP8_DTYPES
    if not in_fp8 and tensor.dtype not in WEIGHT_DTYPES:
        faults[DTYPE].append(f"{tensor.key} is {tensor.dtype}")
    if in_fp8 and scale is None:
        faults[NO_SCALE].append(tensor.key)
    if scale is None:
        return
    fits = _is_scale_shape_valid(scale.shape, tensor.shape, base.block)
    if "published" in (base.quantization or {}) and len(tensor.shape) > 1:  # compressed-tensors' channels
        fits |= scale.shape == (*tensor.shape[:-1], 1)
    if not in_fp8 or scale.dtype not in WEIGHT_DTYPES or not fits:
        kinds = f"{scale.dtype} {list(scale.shape)} for {tensor.dtype} {list(tensor.shape)}"
        faults[ODD_SCALE].append(f"{scale.key} is {kinds}")


def find_untied_heads(base: Base, first: int = 0, step: int = 1) -> list[str]:
    """Return stored heads that are not the embedding, though config.json ties them, comparing all bytes or a rank's."""
    heads = [stored for stored, why in base.unread.items() if why == TIED]
    return [f"{UNTIED}: {head.key}" for head in heads if not is_tied(base.parameters, head, first, step)]


def is_tied(parameters: Sequence[Parameter], head: Stored, first: int = 0, step: int = 1, sampled: int = 0) -> bool:
    """Return whether a stored head is the embedding, by all its blocks, a rank's, or some evenly spaced ones."""
    pieces = [piece for p in parameters if p.name == EMBEDDING for piece in p.pieces]
    if len(pieces) != 1 or not head.file.exists():  # reported elsewhere; or headers alone are here
        return True
    if sampled:
        step = max(1, (head.end - head.start) // COMPARED_BYTES // sampled)
    return have_equal_bytes(pieces[0].stored, head, first, step)


def _is_head(key: str) -> bool:
    return key == HEAD or key.endswith(f".{HEAD}")


def _list_stored_parts(
    parameter: Parameter, stored: Collection[str]
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Yield names, shapes and offsets of the tensors that store a parameter: one tensor, or one per expert."""
    under_its_name: tuple[Spelling, ...] = (Spelling(parameter.name, parameter.shape, (0,) * len(parameter.shape)),)
    way = under_its_name
    for spellings in (under_its_name, *parameter.spellings):
        if any(spelling.name.replace("#", "0") in stored for spelling in spellings):
            way = spellings
            break
    one_by_one = any("#" in spelling.name for spelling in way)
    for number in range(parameter.shape[0] if one_by_one else 1):
        for name, shape, offset in way:
            yield name.replace("#", str(number)), shape, (number, *offset[1:]) if one_by_one else offset


def _is_scale_shape_valid(scale: Sequence[int], shape: Sequence[int], block: Sequence[int]) -> bool:
    """Return whether there is one scale, or per dimension one or one per block (one element, but in the last two)."""
    if prod(scale) == 1:
        return True
    if len(scale) != len(shape):
        return False
    sides = (*(1,) * (len(shape) - 2), *block)[-len(shape) :]
    return all(count in (1, ceil(size / side)) for count, size, side in zip(scale, shape, sides, strict=True))
