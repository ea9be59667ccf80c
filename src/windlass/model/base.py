"""From a model's folder or name to its `Base`: every stored tensor gets a parameter or a reason why it has none."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil, prod
from pathlib import Path
from typing import Final

from windlass.errors import Problem, UserError, raise_all
from windlass.model.config import Described, describe, list_parameters
from windlass.model.family import TIED, UNREAD, VISION
from windlass.model.files import CONFIG, list_names, read_table, read_tensors, some
from windlass.model.parameters import Base, Parameter, Piece, Stored, block_of
from windlass.model.published import CONFIGS

WEIGHT_DTYPES: Final = ("F64", "F32", "F16", "BF16")
FP8_DTYPES: Final = ("F8_E4M3", "F8_E5M2")  # codes that mean nothing without their scale
HEAD, SCALE = "lm_head.weight", "_scale_inv"
_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d{1,7})\.(\w+)\.weight")


def find_base(model_name_or_path: str, where: str) -> Base:
    """The model in a folder; if there is no such folder, a known model's published config."""
    shown = repr(model_name_or_path if len(model_name_or_path) <= 120 else f"{model_name_or_path[:120]}…")
    try:
        path = Path(model_name_or_path).expanduser()
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{shown} can't be opened: {why}", where, "name a model folder") from None
    if is_folder:
        return read_base(path)
    if exists:
        hint = f"name the folder that holds {CONFIG} and the safetensors files"
        raise UserError(f"{shown} is a file, not a folder", where, hint)
    base = published_base(path.name)
    if base is None:
        names = {key.lower(): key for key in CONFIGS}
        close = difflib.get_close_matches(path.name.lower()[:120], names, 3, 0.4)
        known = f"nearest known: {', '.join(names[key] for key in close)}" if close else f"known: {', '.join(CONFIGS)}"
        raise UserError(
            f"no folder {shown}, and no published model of that name is known",
            where,
            f"name the folder that holds the model, or a model that windlass can plan without weights; {known}",
        )
    note = (
        f"no weights at {model_name_or_path[:200]}: planned from the published config of {base.name}; "
        "check and train will refuse this path"
    )
    return replace(base, notes=(note, *base.notes))


def published_base(name: str) -> Base | None:
    """A known model without its weights, or None."""
    known = next((key for key in CONFIGS if key.lower() == name.lower()), None)
    if known is None:
        return None
    described = describe(CONFIGS[known], f"published config of {known}")
    return Base(
        name=known,
        path=None,
        family=described.family,
        config=described.config,
        dims=described.dims,
        parameters=tuple(list_parameters(described, tied=described.tied)),
        wrapper=described.wrapper.architecture if described.wrapper else None,
        quantization=described.quantization,
    )


def read_base(path: Path) -> Base:
    """Names, shapes, dtypes and places of all weights in a folder. Only headers are read."""
    names = list_names(path)
    if CONFIG not in names:
        hint = "fetch it from where the model was published" if names else "the folder is empty: is its volume mounted?"
        raise UserError(f"the model folder has no {CONFIG}", str(path), hint)
    described = describe(read_table(path / CONFIG), str(path / CONFIG))
    tensors = read_tensors(path, names)

    assigned = _Assignment(described, tensors)
    tied = described.tied or (described.wrapper_tied and HEAD not in assigned.named)
    parameters = tuple(assigned.fill(parameter) for parameter in list_parameters(described, tied=tied))
    unread, unknown = assigned.rest(tied)
    raise_all(list(assigned.problems(str(path), unknown)))

    config, notes = described.config, []
    if TIED in unread.values():
        notes.append(f"{assigned.named[HEAD].key} is stored and not read: {TIED}")
    if tied and not described.tied:
        config = {**config, "tie_word_embeddings": True}
        notes.append("the head is the embedding: config.json's outer part ties them, and no head is stored")
    folder = path if path.name not in ("", "..") else path.resolve()
    hub = folder.parent.name == "snapshots"  # the hub's cache has the model under a hash: models--org--name/snapshots/…
    return Base(
        name=folder.parent.parent.name.rpartition("--")[2] if hub else folder.name,
        path=path,
        family=described.family,
        config=config,
        dims=described.dims,
        parameters=parameters,
        wrapper=described.wrapper.architecture if described.wrapper else None,
        unread=unread,
        quantization=described.quantization,
        notes=tuple(notes),
    )


class _Assignment:
    """Stored tensors by the model's names, and what is wrong with them, by kind."""

    def __init__(self, described: Described, tensors: Mapping[str, Stored]) -> None:
        self.described, self.tensors = described, tensors
        self.block = block_of(described.quantization)
        self.used: set[str] = set()
        self.missing: list[str] = []
        self.misshapen: list[str] = []
        self.odd_dtype: list[str] = []
        self.no_scale: list[str] = []
        self.odd_scale: list[str] = []

        self.named: dict[str, Stored] = {}
        for key, tensor in tensors.items():
            if (name := self._rename(key)) is not None:
                self.named.setdefault(name, tensor)  # a second spelling of the same name stays unused, and is reported
        # Routed experts stored one by one: fused parameter -> (expert, half) -> name
        self.experts: dict[str, dict[tuple[int, int], str]] = {}
        on_disk = described.family.experts_on_disk
        for name in self.named if on_disk else ():
            if (match := _EXPERT.fullmatch(name)) and match[3] in on_disk:
                leaf, half = on_disk[match[3]]
                self.experts.setdefault(f"{match[1]}.{leaf}", {})[int(match[2]), half] = name

    def _rename(self, key: str) -> str | None:
        """A key on disk as the language model spells it; None if it belongs to another part of the wrapper."""
        if self.described.wrapper:
            for ours, theirs in self.described.wrapper.prefixes:
                if key.startswith(ours):
                    key = theirs + key[len(ours) :]
                    break
            else:
                return None
        for ours, theirs in self.described.family.spellings:
            key = key.replace(ours, theirs)
        return key

    def fill(self, parameter: Parameter) -> Parameter:
        """The parameter with the tensors that fill it."""
        if parameter.name in self.named:
            piece = self._piece(parameter.name, parameter.shape, (0,) * len(parameter.shape))
            return replace(parameter, pieces=(piece,))
        stored = self.experts.get(parameter.name)
        if stored is None:
            self.missing.append(parameter.name)
            return parameter
        experts, rows, columns = parameter.shape
        leaf = parameter.name.rpartition(".")[2]
        halves = sum(fused == leaf for fused, _ in self.described.family.experts_on_disk.values())
        rows //= halves
        pieces = []
        for place in ((expert, half) for expert in range(experts) for half in range(halves)):
            if place in stored:
                pieces.append(self._piece(stored[place], (rows, columns), (place[0], place[1] * rows, 0)))
            else:
                self.missing.append(f"expert {place[0]} of {parameter.name}")
        return replace(parameter, pieces=tuple(pieces))

    def _piece(self, name: str, shape: tuple[int, ...], offset: tuple[int, ...]) -> Piece:
        stored, scale = self.named[name], self.named.get(f"{name}{SCALE}")
        self.used.add(stored.key)
        if stored.shape != shape:
            self.misshapen.append(f"{stored.key} is {list(stored.shape)}, not {list(shape)}")
        if stored.dtype not in WEIGHT_DTYPES and stored.dtype not in FP8_DTYPES:
            self.odd_dtype.append(f"{stored.key} is {stored.dtype}")
        if scale is None:
            if stored.dtype in FP8_DTYPES:
                self.no_scale.append(stored.key)
            return Piece(stored, offset)
        self.used.add(scale.key)
        if stored.dtype not in FP8_DTYPES:
            self.odd_scale.append(f"{scale.key} for {stored.dtype} weights")
        elif scale.dtype not in WEIGHT_DTYPES:
            self.odd_scale.append(f"{scale.key} is {scale.dtype}")
        elif not scale_fits(scale.shape, stored.shape, self.block):
            self.odd_scale.append(f"{scale.key} {list(scale.shape)} for {list(stored.shape)}")
        return Piece(stored, offset, scale)

    def rest(self, tied: bool) -> tuple[dict[Stored, str], list[str]]:
        """The tensors without a use: those with a reason, and those without."""
        wrapper = self.described.wrapper
        stated = {**UNREAD, **({wrapper.skipped: VISION} if wrapper else {})}
        reasons = [(re.compile(pattern), reason) for pattern, reason in stated.items()]
        head = self.named.get(HEAD) if tied else None
        unread: dict[Stored, str] = {}
        unknown: list[str] = []
        for key, tensor in self.tensors.items():
            if key in self.used:
                continue
            why = TIED if tensor is head else next((why for pattern, why in reasons if pattern.fullmatch(key)), None)
            if why:
                unread[tensor] = why
            else:
                unknown.append(key)
        return unread, unknown

    def problems(self, where: str, unknown: Sequence[str]) -> Iterator[Problem]:
        """Each kind of fault in one line."""
        fetch = "fetch the folder again; config.json and weights must be of the same model"
        prefixes = self.described.wrapper.prefixes if self.described.wrapper else (("model.", "model."),)
        expected = tuple(ours for ours, theirs in prefixes if theirs == "model.")
        if self.missing and unknown and not any(key.startswith(expected) for key in self.tensors):
            fetch = f"names must begin with {' or '.join(expected)} for {self.described.family.causal_lm}; {fetch}"
        scales = "an FP8 weight is its code x its scale: fetch the folder again, or a 16-bit version of the model"
        for what, names, hint in (
            ("missing weights", self.missing, fetch),
            ("unknown tensors, which belong to no part of the model", unknown, fetch),
            ("weights of another shape than config.json gives", self.misshapen, fetch),
            ("weights of an unknown dtype", self.odd_dtype, f"known: {', '.join((*WEIGHT_DTYPES, *FP8_DTYPES))}"),
            ("FP8 weights without a scale", self.no_scale, scales),
            ("scales that do not fit their weight", self.odd_scale, scales),
        ):
            if names:
                yield Problem(f"{what} ({len(names)}): {some(names)}", where, hint)


def scale_fits(scale: Sequence[int], shape: Sequence[int], block: Sequence[int]) -> bool:
    """One scale for all, or per dimension: one, one an element, or (in the last two) one a block."""
    if prod(scale) == 1:
        return True
    if len(scale) != len(shape):
        return False
    sides = (*(1,) * (len(shape) - 2), *block)[-len(shape) :]
    return all(count in (1, size, ceil(size / side)) for count, size, side in zip(scale, shape, sides, strict=True))
