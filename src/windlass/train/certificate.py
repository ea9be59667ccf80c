"""Proof that the model in memory is the one on disk: every parameter accounted for, values read again another way.

The second reading goes another way than the first: which rows are this rank's comes from transformers' own
shard-on-read, the bytes from safetensors, the scale from the key's name, the product is taken in float64.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.distributed.sharding_utils import DtensorShardOperation

from windlass.model import Base, Parameter, Piece
from windlass.train.fp8 import Held
from windlass.train.reading import Box, intersection, piece_box

ROW = 4096  # elements compared of a sampled row
ROWS = 8  # rows sampled of a matrix


@dataclass(frozen=True)
class Certificate:
    """What load.json holds."""

    checkpoint: str
    layout: str
    parameters: list[dict[str, Any]]  # name, shape, part, and the stored tensors it came from
    loaded: int  # parameters that every rank has read its part of
    unread: list[dict[str, Any]]  # stored tensors that the language model does not need, and why
    checked: dict[str, int]  # parameters compared on every rank; slices and elements over all ranks
    ranks: list[dict[str, Any]]  # rank, parameters and bytes_read, peak_rss_bytes, seconds


def parameter_record(parameter: Parameter, dtype: torch.dtype) -> dict[str, Any]:
    """Where a parameter's values came from. Experts stored one by one have one source each."""
    return {
        "name": parameter.name,
        "shape": list(parameter.shape),
        "part": parameter.part,
        "dtype": str(dtype).removeprefix("torch."),
        "sources": [
            {
                "file": piece.stored.file.name,
                "key": piece.stored.key,
                "dtype": piece.stored.dtype,
                "scale": piece.scale.key if piece.scale else None,
            }
            for piece in parameter.pieces
        ],
    }


def unread_records(checkpoint: Base) -> list[dict[str, Any]]:
    """Stored tensors that were not read. What a scale or weight of the language model is can't be among them."""
    return [
        {
            "key": stored.key,
            "file": stored.file.name,
            "bytes": stored.end - stored.start,
            "why": why,
        }
        for stored, why in checkpoint.unread.items()
    ]


def check(
    targets: Mapping[str, Tensor], checkpoint: Base, rank: int, held: Mapping[str, Held] = MappingProxyType({})
) -> tuple[list[str], dict[str, int]]:
    """Compare sampled rows of every parameter with the disk. Returns what differs, and how much was compared.

    Of those that are `held` in FP8: codes with codes, true values with true values, and all scales.
    """
    block = checkpoint.block
    files = {source.file for source in checkpoint.unread}
    for parameter in checkpoint.parameters:
        for piece in parameter.pieces:
            files |= {piece.stored.file, *([piece.scale.file] if piece.scale else [])}
    where = {key: file for file in sorted(files) for key in _keys(file)}
    counts = {"parameters": 0, "slices": 0, "elements": 0}
    wrong: list[str] = []
    for parameter in checkpoint.parameters:
        disk, stays = Disk(where, block), held.get(parameter.name)
        differs, slices, elements = _check_one(parameter, targets[parameter.name], disk, rank, stays)
        if stays and not differs:
            differs = _check_scales(parameter, stays, disk)
        counts = {
            "parameters": counts["parameters"] + 1,
            "slices": counts["slices"] + slices,
            "elements": counts["elements"] + elements,
        }
        wrong.extend(differs)
    return wrong, counts


def _check_one(
    parameter: Parameter, tensor: Tensor, disk: Disk, rank: int, held: Held | None
) -> tuple[list[str], int, int]:
    """One parameter's sampled rows: the first that differs is enough to say so."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    intervals = own_intervals(tensor)
    slices = elements = 0
    for box in sampled(tuple(local.shape), f"{parameter.name}:{rank}"):
        place, box = global_box(box, intervals)
        got = local[tuple(slice(*extent) for extent in box)].detach().cpu()
        for piece in parameter.pieces:
            shared = intersection(place, piece_box(piece))
            if shared is None:
                continue
            expected, source = disk.values(piece, shared)
            part = got[tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(shared, place, strict=True))]
            slices, elements = slices + 1, elements + part.numel()
            true = part if held is None else true_values(part, held, shared)
            if not torch.equal(true, expected.to(true.dtype).reshape(true.shape)) or (
                held is not None and not torch.equal(part, disk.codes(piece, shared).view(part.dtype).view(part.shape))
            ):
                return [f"{parameter.name} is not what {source} holds"], slices, elements
    return [], slices, elements


def true_values(codes: Tensor, held: Held, box: Box) -> Tensor:
    """Codes x scales in float32, each element with the scale that its place in the parameter has."""
    rows, columns = (torch.arange(*span) // side for span, side in zip(box[-2:], held.coding.sides, strict=True))
    outer = [torch.arange(*span) - held.first for span in box[:-2]]
    scale = held.scale.cpu()[torch.meshgrid(*outer, rows, columns, indexing="ij")]
    return codes.view(held.coding.codes).float() * scale


def _check_scales(parameter: Parameter, held: Held, disk: Disk) -> list[str]:
    """All scales that this rank holds, at the first element of each block."""
    mine = held.scale.cpu()
    for piece in parameter.pieces:
        box = piece_box(piece)
        axes = [torch.arange(*span) for span in box]
        if len(box) == 3:
            axes[0] = axes[0][(axes[0] >= held.first) & (axes[0] < held.first + len(mine))]
        axes[-2:] = [axis[::side] for axis, side in zip(axes[-2:], held.coding.sides, strict=True)]
        if not all(len(axis) for axis in axes):
            continue
        there = [axis - start for axis, (start, _) in zip(axes, box, strict=True)][-len(piece.stored.shape) :]
        places = [axes[0] - held.first] if len(box) == 3 else []
        places += [axis // side for axis, side in zip(axes[-2:], held.coding.sides, strict=True)]
        got = mine[torch.meshgrid(*places, indexing="ij")]
        name = f"{piece.stored.key}_scale_inv"
        if not torch.equal(got, disk.scale(piece, there).float().expand(got.shape)):
            return [f"the scales of {parameter.name} are not what {name!r} of {disk.where[name].name} holds"]
    return []


def sampled(shape: tuple[int, ...], seed: str) -> Iterator[Box]:
    """Boxes to compare: rows (the last dimension) at the ends and between; of a stack of experts, two rows of each.

    An expert's two rows lie in its two halves: gate and up are stacked so, and each expert has its own scale.
    """
    if 0 in shape:
        return
    dice = random.Random(seed)
    if len(shape) < 2:
        rows: list[tuple[int, ...]] = [()]
    elif len(shape) == 2:
        rows = [(row,) for row in sorted({0, shape[0] - 1, *(dice.randrange(shape[0]) for _ in range(ROWS - 2))})]
    else:
        half = (shape[1] + 1) // 2
        rows = [
            (expert, min(shape[1] - 1, first + dice.randrange(half)))
            for expert in range(shape[0])
            for first in (0, half)
        ]
    for row in rows:
        width = min(shape[-1], ROW)
        first = dice.randrange(shape[-1] - width + 1)
        yield (*((i, i + 1) for i in row), (first, first + width))


def own_intervals(tensor: Tensor) -> list[list[tuple[int, int]]]:
    """Which ranges of each dimension of the whole parameter are this rank's, in the order they lie in its part.

    Answered by what transformers' shard-on-read would fetch, not by the offsets that the loader computed.
    """
    probe = Probe(list(tensor.shape))
    if isinstance(tensor, DTensor):
        DtensorShardOperation(tensor).shard_tensor(probe)
    asked = probe.asked or [tuple(slice(0, size) for size in tensor.shape)]
    return [list(dict.fromkeys((part[axis].start, part[axis].stop) for part in asked)) for axis in range(tensor.ndim)]


class Probe:
    """Stands where a stored tensor would be and notes which slices are asked of it."""

    def __init__(self, shape: list[int]) -> None:
        self.shape = shape
        self.asked: list[tuple[slice, ...]] = []

    def get_shape(self) -> list[int]:
        return self.shape

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, tuple):  # an Ellipsis asks for everything
            self.asked.append(index)
        return torch.empty(0)


def global_box(box: Box, intervals: Sequence[Sequence[tuple[int, int]]]) -> tuple[Box, Box]:
    """A box of the local part in the whole parameter's coordinates, and the box cut to where it is contiguous."""
    place, cut = [], []
    for (start, stop), own in zip(box, intervals, strict=True):
        before = 0
        for first, last in own:
            if start < before + last - first:
                stop = min(stop, before + last - first)
                place.append((first + start - before, first + stop - before))
                cut.append((start, stop))
                break
            before += last - first
        else:
            raise IndexError(f"row {start} of a part that has {before}")
    return tuple(place), tuple(cut)


class Disk:
    """Stored values through safetensors' own reader. One per parameter: the pages that it mapped go with it."""

    def __init__(self, where: Mapping[str, Path], block: Sequence[int]) -> None:
        self.where, self.block = where, block
        self.open: dict[Path, Any] = {}

    def handle(self, key: str) -> Any:
        file = self.where[key]
        if file not in self.open:
            self.open[file] = safe_open(file, framework="pt")
        return self.open[file]

    def values(self, piece: Piece, box: Box) -> tuple[Tensor, str]:
        """True values of a box of the parameter that this piece fills, and what to call their source."""
        key = piece.stored.key
        codes = self.codes(piece, box)
        name = f"{key}_scale_inv"
        if name not in self.where:
            return codes, f"{key!r} of {self.where[key].name}"
        scale = self.scale(piece, [torch.arange(*span) for span in self._there(piece, box)])
        # e4m3 x bf16 is exact in float64; rounded to float32, then to the model's dtype, as the loader has to.
        return (codes.double() * scale).float(), f"{key!r} x {name!r} of {self.where[key].name}"

    def codes(self, piece: Piece, box: Box) -> Tensor:
        """What is stored, as it is."""
        key = piece.stored.key
        there = tuple(slice(*span) for span in self._there(piece, box))
        stored: Tensor = self.handle(key).get_slice(key)[there] if there else self.handle(key).get_tensor(key)
        return stored

    def scale(self, piece: Piece, indices: Sequence[Tensor]) -> Tensor:
        """The scales of a stored tensor's elements at the crossings of these indices along its dimensions."""
        name = f"{piece.stored.key}_scale_inv"
        scale: Tensor = self.handle(name).get_tensor(name).double()
        if scale.numel() == 1:
            return scale
        shape = self.handle(piece.stored.key).get_slice(piece.stored.key).get_shape()
        axes = [self._scale_index(i, scale.shape[i], shape, index) for i, index in enumerate(indices)]
        return scale[torch.meshgrid(*axes, indexing="ij")]

    def _there(self, piece: Piece, box: Box) -> Box:
        """A box of the parameter in the coordinates of the stored tensor that fills it there."""
        outer = len(piece.offset) - len(piece.stored.shape)
        return tuple((a - o, b - o) for (a, b), o in zip(box, piece.offset, strict=True))[outer:]

    def _scale_index(self, axis: int, count: int, shape: Sequence[int], index: Tensor) -> Tensor:
        """Which scale each index along an axis has."""
        if count == 1:
            return torch.zeros_like(index)
        return index if count == shape[axis] else index.div(self.block[axis - len(shape)], rounding_mode="floor")


def _keys(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())
