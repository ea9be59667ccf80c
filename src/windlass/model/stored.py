"""Match each stored tensor with a parameter of the model, or with a reason to skip it."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil, prod
from typing import Any, Final

from windlass.errors import Problem, raise_all
from windlass.model.family import IGNORED, TIED, UNREAD, VISION
from windlass.model.files import (
    COMPARED_BYTES,
    abbreviate,
    have_equal_bytes,
)
from windlass.model.packed import PACKED, find_packed, list_beside, make_compressed_piece, make_packed_piece
from windlass.model.parameters import Base, Parameter, Piece, Spelling, Stored

WEIGHT_DTYPES: Final = ("F64", "F32", "F16", "BF16")
FP8_DTYPES: Final = ("F8_E4M3", "F8_E5M2")  # codes that mean nothing without their scale
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
        if name in packed and len(packed[name]) <= len(list_beside(base.method)):
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
    if not list_beside(base.method):
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
