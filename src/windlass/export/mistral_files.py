"""A merged model's files in Mistral's own layout: merged beside transformers' layout where the base has both, else
written from that, tensor by tensor, without a change of values."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Final

import torch

from windlass.errors import UserError
from windlass.export.deltas import Deltas
from windlass.export.merged_files import (
    COPIED,
    MISTRAL,
    OWN,
    ROTATED,
    MergedEntry,
    MergePlan,
    lay_out,
    make_index,
    plan_merge,
)
from windlass.model import Base, Piece, Stored, mistral_layout
from windlass.model.family import VISION
from windlass.model.files import BITS, CONFIG, abbreviate, read_table
from windlass.weights.certificate import sample_boxes
from windlass.weights.fill import FillSource, LocalPart, fill_values
from windlass.weights.reading import Files

HF: Final = "hf"
BOTH: Final = "mistral"
LAYOUTS: Final = (HF, BOTH)
FP8_STEP: Final = 2.0**-3  # one layout rounds what the other stores, under a common scale
NEAR_ZERO: Final = 1e-4  # of the largest value: there codes are as far apart as their scale says


def choose_layout(base: Base, layout: str | None) -> bool:
    """Return whether Mistral's layout is to be written beside transformers': by default if the base has both."""
    if layout not in (None, *LAYOUTS):
        raise UserError(f"there is no layout {layout!r}", "--layout", f"one of {', '.join(LAYOUTS)}", "no-such-layout")
    if layout == BOTH and base.family.model_type != mistral_layout.MODEL_TYPE:
        problem = f"{base.name} is not published in Mistral's layout that servers read: only Mistral 4 is"
        raise UserError(problem, "--layout", "leave it out", "no-such-layout")
    if mistral_layout.has_mistral_layout_alone(base):  # and is merged in it
        if layout == HF:
            problem = f"{base.name} has its weights in Mistral's own layout alone, and is merged in that"
            raise UserError(problem, "--layout", "leave it out", "base-in-mistral-layout")
        return False
    return layout == BOTH or (layout is None and mistral_layout.has_mistral_layout(base))


def read_beside(base: Base) -> Base | None:
    """Return the base's own files in Mistral's layout, if they have the same weights as transformers'."""
    if not mistral_layout.has_mistral_layout(base):
        return None
    assert base.path is not None
    beside = mistral_layout.read_mistral_layout(base.path, base)
    differing = []
    with Files() as files, ThreadPoolExecutor(1) as pool:
        source = FillSource(files, base.block, pool)
        for parameter, own in zip(base.parameters, beside.parameters, strict=True):
            for box in sample_boxes(parameter.shape, parameter.name):
                values = torch.empty(2, *(stop - start for start, stop in box))
                for row, pieces in zip(values, (parameter.pieces, own.pieces), strict=True):
                    fill_values(LocalPart(row, box), pieces, source)
                near_zero = float(values.abs().max()) * NEAR_ZERO
                if not torch.allclose(values[0], values[1], rtol=FP8_STEP, atol=near_zero):
                    differing.append(parameter.name)
    if differing:
        names = abbreviate(list(dict.fromkeys(differing)))
        problem = f"params.json and config.json belong to different weights ({len(set(differing))}): {names}"
        hint = "fetch the base again; or merge transformers' layout alone: --layout hf"
        raise UserError(problem, str(base.path), hint, "layouts-differ")
    return beside


def plan_beside(base: Base, beside: Base, deltas: Deltas, to: Path, dtype: str) -> MergePlan:
    """Plan the merge of Mistral's own files."""
    plan = plan_merge(beside, deltas, to, dtype, MISTRAL)
    return replace(
        plan, others=(), more={}, left_out=(), read=lambda folder: mistral_layout.read_mistral_layout(folder, base)
    )


def plan_conversion(base: Base, to: Path) -> MergePlan:
    """Plan Mistral's layout of a model in transformers' layout, whose files are complete."""
    assert base.path is not None
    entries = sorted(_list_entries(base, to), key=lambda entry: entry.out.file.name)
    headers, entries = lay_out(entries, MISTRAL)
    params = mistral_layout.make_params(read_table(base.path / CONFIG))
    return MergePlan(
        dtype=OWN,
        names=MISTRAL,
        headers=headers,
        entries=tuple(entries),
        config=(json.dumps(params, indent=2) + "\n").encode(),
        index=make_index(entries, MISTRAL) if len(headers) > 1 else None,
        read=lambda folder: mistral_layout.read_mistral_layout(folder, base),
    )


def _list_entries(base: Base, to: Path) -> Iterator[MergedEntry]:
    """Yield every tensor of Mistral's layout, with its bytes in transformers' layout."""
    stored = {tensor.key: tensor for tensor in base.stored()}
    for parameter in base.parameters:
        for spelling in mistral_layout.list_spellings(parameter):
            for number in range(parameter.shape[0] if "#" in spelling.name else 1):
                name = spelling.name.replace("#", str(number))
                offset = (number, *spelling.offset[1:]) if "#" in spelling.name else spelling.offset
                piece = next(piece for piece in parameter.pieces if _contains(piece, offset))
                source = _slice(piece.stored, piece, offset, spelling.shape)
                yield _copy(name, source, spelling.shape, to)
                stem = piece.stored.key.removesuffix("weight")
                activation = stored.get(f"{stem}activation_scale") or stored.get(f"{stem}_activation_scale")
                for suffix, scale in (("weight_scale_inv", piece.scale), ("activation_scale", activation)):
                    if scale is not None:
                        one = _slice_scale(scale, offset[0] - piece.offset[0])
                        yield _copy(name.removesuffix("weight") + suffix, one, (), to)
    vision = read_table(base.path / CONFIG).get("vision_config") if base.path else None
    for tensor, reason in base.unread.items():
        if reason == VISION:
            entry = _copy(mistral_layout.rename_vision(tensor.key), tensor, tensor.shape, to)
            if mistral_layout.ROTATED_ROWS.fullmatch(entry.out.key):
                assert vision is not None
                entry = replace(entry, how=ROTATED, heads=vision["num_attention_heads"])
            yield entry


def _contains(piece: Piece, offset: tuple[int, ...]) -> bool:
    sizes = (*(1,) * (len(offset) - len(piece.shape)), *piece.shape)
    return all(first <= at < first + size for at, first, size in zip(offset, piece.offset, sizes, strict=True))


def _slice(stored: Stored, piece: Piece, offset: tuple[int, ...], shape: tuple[int, ...]) -> Stored:
    """Return whole rows of a stored tensor, which are contiguous in its file."""
    inside = [at - first for at, first in zip(offset, piece.offset, strict=True)][-len(stored.shape) :]
    skipped = 0
    for at, size in zip(inside, stored.shape, strict=True):
        skipped = skipped * size + at
    width = BITS[stored.dtype] // 8
    start = stored.start + skipped * width
    return replace(stored, shape=shape, start=start, end=start + prod(shape) * width)


def _slice_scale(scale: Stored, expert: int) -> Stored:
    count = prod(scale.shape)
    if count > 1 and count != scale.shape[0]:
        problem = f"{scale.key} has {count} scales, and Mistral's layout has one for a matrix"
        raise UserError(problem, "--layout", "add --dtype bf16", "layout-needs-one-scale")
    width = BITS[scale.dtype] // 8
    start = scale.start + (expert * width if count > 1 else 0)
    return replace(scale, shape=(), start=start, end=start + width)


def _copy(key: str, source: Stored, shape: tuple[int, ...], to: Path) -> MergedEntry:
    file = to / source.file.name.replace("model", "consolidated", 1)
    return MergedEntry(replace(source, key=key, shape=shape, file=file), source, COPIED)
