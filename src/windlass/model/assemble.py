"""Stored tensors put in the place of the model's parameters. Every stored tensor must have a use or a reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, prod
from pathlib import Path

from windlass.errors import Problem, raise_all
from windlass.model.config import Described, list_parameters
from windlass.model.family import TIED, UNREAD, VISION
from windlass.model.parameters import Base, Parameter, Piece, Stored, block_of

WEIGHT_DTYPES = ("F64", "F32", "F16", "BF16")
CODED_DTYPES = ("F8_E4M3", "F8_E5M2")  # codes that mean nothing without their scale
HEAD = "lm_head.weight"
SCALE = "_scale_inv"
SHOWN = 3
_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(\w+)\.(weight(?:_scale_inv)?)")


@dataclass(slots=True)
class Found:
    """The stored tensors by the model's names, and what is wrong with them, by kind."""

    named: dict[str, Stored]
    experts: dict[str, dict[tuple[int, int], tuple[Stored, Stored | None]]]  # parameter -> (expert, half) -> stored
    used: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    other_shape: list[str] = field(default_factory=list)
    no_scale: list[str] = field(default_factory=list)
    odd_scale: list[str] = field(default_factory=list)
    odd_dtype: list[str] = field(default_factory=list)


def assemble(path: Path, described: Described, stored: Mapping[str, Stored]) -> Base:
    """The checkpoint, or one error that says everything that does not fit, each kind in one line."""
    found = _by_name(described, stored)
    tied = described.tied or (described.wrapper_tied and HEAD not in found.named)
    block = block_of(described.quantization)
    filled = [_fill(parameter, found, block) for parameter in list_parameters(described, tied=tied)]
    unread, unknown, notes = _rest(described, stored, found, tied)
    raise_all(list(_problems(path, described, found, unknown, stored)))
    config = described.config
    if tied and not described.tied:
        config = {**config, "tie_word_embeddings": True}
        notes.append("the head is the embedding: config.json's outer part ties them, and no head is stored")
    return Base(
        name=_name(path),
        path=path,
        family=described.family,
        config=config,
        dims=described.dims,
        parameters=tuple(filled),
        wrapper=described.wrapper.architecture if described.wrapper else None,
        unread=unread,
        quantization=described.quantization,
        notes=tuple(notes),
    )


def _name(path: Path) -> str:
    """What the user calls the model: the folder's name, or the model's where the hub's cache has it under a hash."""
    path = path if path.name not in ("", "..") else path.resolve()
    if path.parent.name == "snapshots":
        return path.parent.parent.name.rpartition("--")[2]
    return path.name


def _by_name(described: Described, stored: Mapping[str, Stored]) -> Found:
    """Names on disk turned into the model's; routed experts that are stored one by one gathered."""
    rename = _renaming(described)
    named: dict[str, Stored] = {}
    for key, tensor in stored.items():
        name = rename(key)
        if name is not None:
            named.setdefault(name, tensor)  # a second spelling of the same name stays unused, and is reported
    experts: dict[str, dict[tuple[int, int], tuple[Stored, Stored | None]]] = {}
    places = described.family.experts_on_disk
    for name, tensor in named.items() if places else ():
        match = _EXPERT.fullmatch(name)
        if match and match[3] in places and match[4] == "weight" and len(match[2]) < 8:
            leaf, half = places[match[3]]
            scale = named.get(f"{name}{SCALE}")
            experts.setdefault(f"{match[1]}.{leaf}", {})[int(match[2]), half] = (tensor, scale)
    return Found(named, experts)


def _renaming(described: Described) -> Callable[[str], str | None]:
    """What a key on disk is called in the language model; None where it belongs to another part of the wrapper."""
    spellings = described.family.spellings
    prefixes = described.wrapper.prefixes if described.wrapper else None

    def rename(key: str) -> str | None:
        if prefixes is not None:
            for ours, theirs in prefixes:
                if key.startswith(ours):
                    key = theirs + key[len(ours) :]
                    break
            else:
                return None
        for ours, theirs in spellings:
            key = key.replace(ours, theirs)
        return key

    return rename


def _fill(parameter: Parameter, found: Found, block: Sequence[int]) -> Parameter:
    """The parameter with its pieces; faults go to `found`."""
    stored = found.named.get(parameter.name)
    if stored is not None:
        scale = found.named.get(f"{parameter.name}{SCALE}")
        piece = _piece(stored, scale, parameter.shape, (0,) * len(parameter.shape), found, block)
        return replace(parameter, pieces=(piece,))
    if parameter.part == "experts":
        return replace(parameter, pieces=tuple(_one_by_one(parameter, found, block)))
    found.missing.append(parameter.name)
    return parameter


def _one_by_one(parameter: Parameter, found: Found, block: Sequence[int]) -> Iterator[Piece]:
    """A fused parameter of routed experts from matrices that are stored for each expert."""
    own = found.experts.get(parameter.name)
    if not own:
        found.missing.append(parameter.name)
        return
    experts, rows, columns = parameter.shape
    halves = 2 if parameter.name.endswith("gate_up_proj") else 1
    shape = (rows // halves, columns)
    for expert in range(experts):
        for half in range(halves):
            held = own.get((expert, half))
            if held is None:
                found.missing.append(f"expert {expert} of {parameter.name}")
            else:
                yield _piece(*held, shape, (expert, half * shape[0], 0), found, block)


def _piece(
    stored: Stored,
    scale: Stored | None,
    shape: tuple[int, ...],
    offset: tuple[int, ...],
    found: Found,
    block: Sequence[int],
) -> Piece:
    found.used.add(stored.key)
    if stored.shape != shape:
        found.other_shape.append(f"{stored.key} is {list(stored.shape)}, not {list(shape)}")
    if stored.dtype not in (*WEIGHT_DTYPES, *CODED_DTYPES):
        found.odd_dtype.append(f"{stored.key} is {stored.dtype}")
    if scale is not None:
        found.used.add(scale.key)
        if stored.dtype not in CODED_DTYPES:
            found.odd_scale.append(f"{scale.key} beside {stored.dtype} weights")
        elif scale.dtype not in WEIGHT_DTYPES:
            found.odd_scale.append(f"{scale.key} is {scale.dtype}")
        elif not _scale_fits(scale.shape, stored.shape, block):
            found.odd_scale.append(f"{scale.key} {list(scale.shape)} for {list(stored.shape)}")
    elif stored.dtype in CODED_DTYPES:
        found.no_scale.append(stored.key)
    return Piece(stored, offset, scale)


def _scale_fits(scale: Sequence[int], shape: Sequence[int], block: Sequence[int]) -> bool:
    """One scale for all, or per dimension: one, one an element, or (in the last two) one a block."""
    if prod(scale) == 1:
        return True
    if len(scale) != len(shape):
        return False
    sides = (*(1,) * (len(shape) - 2), *block)[-len(shape) :]
    return all(count in (1, size, ceil(size / side)) for count, size, side in zip(scale, shape, sides, strict=True))


def _rest(
    described: Described, stored: Mapping[str, Stored], found: Found, tied: bool
) -> tuple[dict[Stored, str], list[str], list[str]]:
    """The tensors without a use: those with a stated reason, those without, and what to say of them."""
    stated = {**UNREAD, **({described.wrapper.skipped: VISION} if described.wrapper else {})}
    reasons = [(re.compile(pattern), reason) for pattern, reason in stated.items()]
    head = found.named.get(HEAD) if tied else None
    unread: dict[Stored, str] = {}
    unknown: list[str] = []
    for key, tensor in stored.items():
        if key in found.used:
            continue
        why = TIED if tensor is head else next((why for pattern, why in reasons if pattern.fullmatch(key)), None)
        if why:
            unread[tensor] = why
        else:
            unknown.append(key)
    notes = [f"{head.key} is stored and not read: {TIED}"] if head else []
    return unread, unknown, notes


def _problems(
    path: Path, described: Described, found: Found, unknown: Sequence[str], stored: Mapping[str, Stored]
) -> Iterator[Problem]:
    fetch = "fetch the folder again; config.json and weights must be of the same model"
    quantised = "an FP8 weight is its code x its scale: fetch the folder again, or a 16-bit version of the model"
    known = ", ".join((*WEIGHT_DTYPES, *CODED_DTYPES))
    expected = "model."
    if described.wrapper:
        expected = " or ".join(dict.fromkeys(ours for ours, theirs in described.wrapper.prefixes if theirs == "model."))
    foreign = f"names must begin with {expected} for {described.family.causal_lm}; {fetch}"
    alien = found.missing and unknown and not any(key.startswith(tuple(expected.split(" or "))) for key in stored)
    kinds: tuple[tuple[str, Sequence[str], str], ...] = (
        ("weights are missing", found.missing, foreign if alien else fetch),
        ("stored tensors belong to no part of the model (unknown key)", unknown, foreign if alien else fetch),
        ("weights have another shape than config.json says", found.other_shape, fetch),
        (
            "weights have a dtype that is none of weights",
            found.odd_dtype,
            f"known: {known}",
        ),
        ("FP8 weights have no scale", found.no_scale, quantised),
        ("scales do not fit their weight", found.odd_scale, quantised),
    )
    for what, names, hint in kinds:
        if names:
            some = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
            yield Problem(f"{len(names)} {what}: {some}", str(path), hint)
