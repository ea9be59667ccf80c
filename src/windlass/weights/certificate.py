"""Proof that the model in memory is the one on disk: every parameter accounted for, sampled values read a second way.

The second reading shares no code with the loader: transformers' shard-on-read says which rows this rank has,
safetensors reads the bytes, the scale is found by the key's name, and the product is taken in float64.

Weights published in 4 bits are decoded here by their publisher's rules. Weights that windlass quantizes to 4 bits are
checked by properties: each block's scale is its largest value, and each code is the nearest of the 16 numbers.
"""

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from transformers.distributed.sharding_utils import DtensorShardOperation

from windlass.model import Base, Parameter, Piece
from windlass.ranks.collectives import all_gather
from windlass.settings import (
    FOUR_BITS,
)
from windlass.weights.four_bits import TABLES
from windlass.weights.quantized import Format, QuantizedParam
from windlass.weights.reading import Box, intersect, locate_piece, to_stored_box

ROW = 4096  # elements compared per sampled row
ROWS = 8  # rows sampled per matrix


def make_certificate(
    base: Base,
    layout: str,
    base_dtype: str,
    dtypes: Mapping[str, torch.dtype | str],
    digest: str,
    checked: dict[str, int],
    measured: dict[str, Any],
    errors: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """Return load.json for the whole run, equal on all ranks, from what each rank `checked` and `measured`. A
    collective."""
    everyones: list[Any] = all_gather((measured, checked, dict(errors)))
    ranks: list[tuple[dict[str, Any], dict[str, int]]] = [each[:2] for each in everyones]
    parameters = []
    for parameter in base.parameters:
        sources = [  # one source per expert if experts are stored one by one
            {
                "file": piece.stored.file.name,
                "key": piece.stored.key,
                "dtype": piece.stored.dtype,
                "scale": piece.scale.key if piece.scale else None,
            }
            for piece in parameter.pieces
        ]
        dtype = str(dtypes[parameter.name]).removeprefix("torch.")
        own = {"name": parameter.name, "shape": list(parameter.shape), "part": parameter.part, "dtype": dtype}
        parameters.append({**own, "sources": sources})
    return {
        "checkpoint": str(base.path or base.name),
        "base_digest": digest,
        "layout": layout,
        "base_dtype": base_dtype,
        "quantisation": summarize_quantization(base_dtype, base, [each[2] for each in everyones]),
        "parameters": parameters,
        "loaded": min(own["parameters"] for own, _ in ranks),  # parameters of which every rank has read its part
        "unread": [
            {"key": stored.key, "file": stored.file.name, "bytes": stored.end - stored.start, "why": why}
            for stored, why in base.unread.items()
        ],
        "checked": {  # parameters: compared on every rank; slices and elements: over all ranks
            "parameters": min(counts["parameters"] for _, counts in ranks),
            "slices": sum(counts["slices"] for _, counts in ranks),
            "elements": sum(counts["elements"] for _, counts in ranks),
        },
        "ranks": [own for own, _ in ranks],
    }


def summarize_quantization(
    kind: str, base: Base, ranks: Sequence[Mapping[str, Sequence[float]]]
) -> dict[str, Any] | None:
    """Return how far the 4-bit base is from the published one, over all ranks; None if windlass did not quantize it."""
    sums: dict[str, Tensor] = {}
    parts = {parameter.name: parameter.part for parameter in base.parameters}
    for name, own in ((name, torch.tensor(own)) for each in ranks for name, own in each.items()):
        for key in ("", parts[name], name):
            sums[key] = sums.get(key, 0) + own
    if not sums:
        return None
    errors = {key: math.sqrt(float(changed / max(all, 1e-300))) for key, (changed, all) in sums.items()}
    worst = max(parts.keys() & errors.keys(), key=lambda name: (errors[name], name))
    by_part = {part: round(errors[part], 5) for part in sorted({*parts.values()} & errors.keys())}
    found = {"format": kind, "block": FOUR_BITS[kind].block, "relative_rms": round(errors[""], 5), "parts": by_part}
    return {**found, "worst": {"name": worst, "relative_rms": round(errors[worst], 5)}}


def check_parameters(
    targets: Mapping[str, Tensor], base: Base, rank: int, quantized: Mapping[str, QuantizedParam]
) -> tuple[list[str], dict[str, int]]:
    """Compare sampled rows of every parameter with the files. Returns the differences, and how much was compared.

    For FP8 weights the codes, the true values and all scales are compared.
    """
    where: dict[str, Path] = {}
    for file in sorted({stored.file for stored in base.stored()}):
        with safe_open(file, framework="pt") as opened:
            where |= dict.fromkeys(opened.keys(), file)
    counts = {"parameters": len(base.parameters), "slices": 0, "elements": 0}
    wrong: list[str] = []
    for parameter in base.parameters:
        disk, weight = Disk(where, base.block), quantized.get(parameter.name)
        rows = _check_four_bits if weight and weight.format.kind else _check_rows
        differs = rows(parameter, targets[parameter.name], disk, rank, weight, counts)
        if weight and not weight.format.kind and not differs:
            differs = _check_scales(parameter, weight, disk)
        wrong += [differs] if differs else []
    return wrong, counts


def _check_rows(
    parameter: Parameter, tensor: Tensor, disk: "Disk", rank: int, weight: QuantizedParam | None, counts: dict[str, int]
) -> str:
    """Compare one parameter's sampled rows and add to `counts`. Returns the first difference."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    own = list_own_indices(tensor)
    for box in sample_boxes(tuple(local.shape), f"{parameter.name}:{rank}"):
        place = tuple((index[a], index[b - 1] + 1) for index, (a, b) in zip(own, box, strict=True))
        got = local[tuple(slice(*span) for span in box)].cpu()
        if got.shape != tuple(b - a for a, b in place):  # no layout cuts a row in pieces
            raise AssertionError(f"a row of {parameter.name} is not in one piece: {place}")
        for piece in parameter.pieces:
            shared = intersect(place, locate_piece(piece))
            if shared is None:
                continue
            expected, source = disk.values(piece, shared)
            found = got[tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(shared, place, strict=True))]
            counts["slices"] += 1
            counts["elements"] += found.numel()
            true = found
            if weight:
                axes = [torch.arange(*span) for span in shared]
                true = found.view(weight.format.codes).float() * expand_own_scale(weight, axes)
            same = torch.equal(true, expected.to(true.dtype).reshape(true.shape))
            if weight and same:
                same = torch.equal(found, disk.codes(piece, shared).view(found.dtype).view(found.shape))
            if not same:
                return f"{parameter.name} is not what {source} holds"
    return ""


def _check_four_bits(
    parameter: Parameter, tensor: Tensor, disk: "Disk", rank: int, weight: QuantizedParam | None, counts: dict[str, int]
) -> str:
    """Compare whole sampled rows of a 4-bit parameter: scales belong to blocks of a row."""
    assert weight
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    own, columns = list_own_indices(tensor), weight.format.columns
    for box in sample_boxes((*local.shape[:-1], 1), f"{parameter.name}:{rank}"):
        rows = [(index[a], index[a] + 1) for index, (a, _) in zip(own, box[:-1], strict=False)]
        place = [*rows[:-1], (0, columns), rows[-1]] if weight.format.transposed else [*rows, (0, columns)]
        places = [(piece, intersect(tuple(place), locate_piece(piece))) for piece in parameter.pieces]
        found = [disk.values(piece, shared) for piece, shared in places if shared]
        counts["slices"] += 1
        counts["elements"] += columns
        row = local[tuple(a for a, _ in box[:-1])].cpu()
        true = torch.cat([values.double().flatten() for values, _ in found])
        if not (is_same if parameter.pieces[0].packed else is_nearest)(row, true, weight.format):
            return f"{parameter.name} is not what {found[0][1]} holds, in {weight.format.kind}"
    return ""


def is_same(row: Tensor, true: Tensor, coding: Format) -> bool:
    """Return whether a row's bytes, as published, decode to these true values."""
    got, scale = decode_row(row, coding)
    return torch.equal((got * scale[:, None]).float().flatten(), true.float())


def decode_row(row: Tensor, coding: Format) -> tuple[Tensor, Tensor]:
    """Return the numbers and the scale of each block of a row."""
    numbers, side = torch.tensor(TABLES[coding.kind], dtype=torch.float64), coding.block[1]
    codes, scale = row[: coding.columns // 2], row[coding.columns // 2 :].view(coding.scales).double()
    units = numbers[torch.stack([codes // 16, codes % 16], -1).flatten().long()]
    return pad(units, (0, -coding.columns % side)).view(-1, side), scale


def is_nearest(row: Tensor, true: Tensor, coding: Format) -> bool:
    """Return whether a row's bytes encode these true values as closely as 4 bits allow."""
    numbers, side = torch.tensor(TABLES[coding.kind], dtype=torch.float64), coding.block[1]
    got, scale = decode_row(row, coding)
    blocks = pad(true, (0, -coding.columns % side)).view(-1, side)
    largest = blocks.abs().amax(-1)
    if not torch.equal(scale, largest.float().bfloat16().double()):
        return False
    units = blocks / torch.where(largest == 0, 1.0, largest)[:, None]
    best = (units[..., None] - numbers).abs().amin(-1)
    return bool(((units - got).abs() <= best + 1e-6).all())


def expand_own_scale(weight: QuantizedParam, axes: Sequence[Tensor]) -> Tensor:
    """Return this rank's scales of the elements at the crossings of these indices of the parameter."""
    blocks = [axis // side for axis, side in zip(axes[-2:], weight.format.block, strict=True)]
    outer = [axis - weight.first for axis in axes[:-2]]
    return weight.scale.cpu()[torch.meshgrid(*outer, *blocks, indexing="ij")]


def _check_scales(parameter: Parameter, weight: QuantizedParam, disk: "Disk") -> str:
    """Compare all scales that this rank has, at the first element of each block. Returns the first difference."""
    for piece in parameter.pieces:
        box = locate_piece(piece)
        axes = [torch.arange(*span) for span in box]
        axes[-2:] = [axis[::side] for axis, side in zip(axes[-2:], weight.format.block, strict=True)]
        if len(box) == 3:
            axes[0] = axes[0][(axes[0] >= weight.first) & (axes[0] < weight.first + len(weight.scale))]
        there = [axis - start for axis, (start, _) in zip(axes, box, strict=True)][-len(piece.stored.shape) :]
        got, name = expand_own_scale(weight, axes), f"{piece.stored.key}_scale_inv"
        if got.numel() and not torch.equal(got, disk.scale(piece, there).float().expand(got.shape)):
            return f"the scales of {parameter.name} are not what {name!r} of {disk.where[name].name} holds"
    return ""


def sample_boxes(shape: tuple[int, ...], seed: str) -> Iterator[Box]:
    """Yield boxes to compare: the first, the last and random rows of a matrix; two rows of each expert of a stack.

    An expert's two rows come from its two halves: gate and up are stacked that way, each with its own scale.
    """
    if 0 in shape:
        return
    dice = random.Random(seed)
    if len(shape) < 2:
        rows: list[tuple[int, ...]] = [()]
    elif len(shape) == 2:
        rows = [(row,) for row in sorted({0, shape[0] - 1, *(dice.randrange(shape[0]) for _ in range(ROWS - 2))})]
    elif len(shape) > 3:
        rows = [tuple(dice.randrange(size) for size in shape[:-1]) for _ in range(ROWS)]
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


def list_own_indices(tensor: Tensor) -> list[list[int]]:
    """Return, per dimension of this rank's part, the index of each element in the full parameter.

    The answer is what transformers' shard-on-read would fetch, not the offsets that the loader computed.
    """
    probe = Probe(list(tensor.shape))
    if isinstance(tensor, DTensor):
        DtensorShardOperation(tensor).shard_tensor(probe)
    asked = probe.asked or [tuple(slice(0, size) for size in tensor.shape)]
    spans = [dict.fromkeys((part[axis].start, part[axis].stop) for part in asked) for axis in range(tensor.ndim)]
    return [[index for span in own for index in range(*span)] for own in spans]


class Probe:
    """Stands in for a stored tensor and records which slices are read."""

    def __init__(self, shape: list[int]) -> None:
        self.asked: list[tuple[slice, ...]] = []
        self.get_shape = lambda: shape

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, tuple):  # an Ellipsis reads everything
            self.asked.append(index)
        return torch.empty(0)


class Disk:
    """Reads stored values with safetensors' own reader. Create one per parameter, so that mapped pages are released
    with it."""

    def __init__(self, where: Mapping[str, Path], block: Sequence[int]) -> None:
        self.where, self.block = where, block
        self.open: dict[Path, Any] = {}

    def handle(self, key: str) -> Any:
        file = self.where[key]
        self.open[file] = self.open.get(file) or safe_open(file, framework="pt")
        return self.open[file]

    def values(self, piece: Piece, box: Box) -> tuple[Tensor, str]:
        """Return the true values of a box inside this piece, and the name of their source."""
        key = piece.stored.key
        if piece.packed:
            there = [slice(a - o, b - o) for (a, b), o in zip(box, piece.offset, strict=True)][-len(piece.shape) :]
            decoded = self.mxfp4(key, there) if piece.packed.kind == "mxfp4" else self.nf4(key, piece.shape, there)
            return decoded, f"{key!r} of {self.where[key].name}"
        codes = self.codes(piece, box)
        name = f"{key}_scale_inv"
        if name not in self.where:
            return codes, f"{key!r} of {self.where[key].name}"
        scale = self.scale(piece, [torch.arange(*span) for span in to_stored_box(piece, box)])
        # e4m3 x bf16 is exact in float64; rounded to float32, then to the model's dtype, as the loader has to.
        return (codes.double() * scale).float(), f"{key!r} x {name!r} of {self.where[key].name}"

    def nf4(self, key: str, shape: Sequence[int], there: Sequence[slice]) -> Tensor:
        """Decode with the tables that bitsandbytes stores with the weight, indexed by position in the full matrix."""

        def part(name: str) -> Tensor:
            tensor: Tensor = self.handle(f"{key}.{name}").get_tensor(f"{key}.{name}")
            return tensor.flatten()

        state = json.loads(bytes(part("quant_state.bitsandbytes__nf4").tolist()))
        rows, columns = (torch.arange(size)[part] for size, part in zip(shape, there, strict=True))
        places = rows[:, None] * shape[-1] + columns
        scale = part("absmax")[places // state["blocksize"]]
        if "nested_offset" in state:
            own = part("nested_absmax")[places // state["blocksize"] // state["nested_blocksize"]]
            scale = part("nested_quant_map")[scale.long()] * own + state["nested_offset"]
        codes = self.handle(key).get_tensor(key).flatten().view(torch.uint8)[places // 2]
        return part("quant_map")[torch.where(places % 2 == 0, codes // 16, codes % 16).long()] * scale

    def mxfp4(self, key: str, there: Sequence[slice]) -> Tensor:
        """Decode a stack of experts [expert, in, out] from the bits: one of sign, two of exponent, one of mantissa."""
        name = f"{key.removesuffix('_blocks')}_scales"
        blocks: Tensor = self.handle(key).get_slice(key)[there[0], there[2]].flatten(2)
        power: Tensor = self.handle(name).get_slice(name)[there[0], there[2]].repeat_interleave(32, -1).double() - 127
        bits = torch.stack([blocks % 16, blocks // 16], -1).flatten(2).double()
        size, sign = bits % 8, torch.where(bits < 8, 1.0, -1.0)
        whole = torch.where(size < 2, size / 2, (1 + size % 2 / 2) * 2 ** (size // 2 - 1))
        return (sign * whole * 2**power).float().transpose(1, 2)[:, there[1]]

    def codes(self, piece: Piece, box: Box) -> Tensor:
        """Return the stored bytes of a box."""
        key = piece.stored.key
        there = tuple(slice(*span) for span in to_stored_box(piece, box))
        stored: Tensor = self.handle(key).get_slice(key)[there] if there else self.handle(key).get_tensor(key)
        return stored

    def scale(self, piece: Piece, indices: Sequence[Tensor]) -> Tensor:
        """Return the scales of a stored tensor's elements at the crossings of these indices."""
        name = f"{piece.stored.key}_scale_inv"
        scale: Tensor = self.handle(name).get_tensor(name).double()
        if scale.numel() == 1:
            return scale
        shape = self.handle(piece.stored.key).get_slice(piece.stored.key).get_shape()
        axes = []
        for axis, (index, size, count) in enumerate(zip(indices, shape, scale.shape, strict=True)):
            axes.append(index // (size if count == 1 else 1 if count == size else self.block[axis - len(shape)]))
        return scale[torch.meshgrid(*axes, indexing="ij")]
