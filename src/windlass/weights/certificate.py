"""Proof that the model in memory is the one on disk: every parameter accounted for, sampled values read a second way.

The second reading shares no code with the loader: transformers' shard-on-read says which rows this rank has,
safetensors reads the bytes, the scale is found by the key's name, and the product is taken in float64.

Weights published in 4 bits are decoded here by their publisher's rules. Weights that windlass quantizes to 4 bits are
checked by properties: each block's scale is its largest value, and each code is the nearest of the 16 numbers.
"""

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from windlass.settings import FOUR_BITS
from windlass.weights.quantized import QuantizedParam, StoredFormat
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
    ranks: list[Any] = all_gather((measured, checked, dict(errors)))
    counts = [checked for _, checked, _ in ranks]
    return {
        "checkpoint": str(base.path or base.name),
        "base_digest": digest,
        "layout": layout,
        "base_dtype": base_dtype,
        "quantisation": summarize_quantization(base_dtype, base, [errors for _, _, errors in ranks]),
        "parameters": [describe_parameter(parameter, dtypes[parameter.name]) for parameter in base.parameters],
        "loaded": min(measured["parameters"] for measured, _, _ in ranks),  # of which every rank has read its part
        "unread": [
            {"key": stored.key, "file": stored.file.name, "bytes": stored.end - stored.start, "why": why}
            for stored, why in base.unread.items()
        ],
        "checked": {  # parameters and buffers: compared on every rank; slices and elements: over all ranks
            "parameters": min(count["parameters"] for count in counts),
            "buffers": min(count["buffers"] for count in counts),
            "slices": sum(count["slices"] for count in counts),
            "elements": sum(count["elements"] for count in counts),
        },
        "ranks": [measured for measured, _, _ in ranks],
    }


def describe_parameter(parameter: Parameter, dtype: torch.dtype | str) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "shape": list(parameter.shape),
        "part": parameter.part,
        "dtype": str(dtype).removeprefix("torch."),
        "sources": [  # one source per expert if experts are stored one by one
            {
                "file": piece.stored.file.name,
                "key": piece.stored.key,
                "dtype": piece.stored.dtype,
                "scale": piece.scale.key if piece.scale else None,
            }
            for piece in parameter.pieces
        ],
    }


def summarize_quantization(
    kind: str, base: Base, ranks: Sequence[Mapping[str, Sequence[float]]]
) -> dict[str, Any] | None:
    """Return how far the 4-bit base is from the published one, over all ranks; None if windlass did not quantize it."""
    parts = {parameter.name: parameter.part for parameter in base.parameters}
    sums: dict[str, Tensor] = {}  # squares of errors and values: of all, of each part, of each parameter
    for errors in ranks:
        for name, squares in errors.items():
            for key in ("", parts[name], name):
                sums[key] = sums.get(key, 0) + torch.tensor(squares)
    if not sums:
        return None
    rms = {key: math.sqrt(float(error / max(value, 1e-300))) for key, (error, value) in sums.items()}
    worst = max(parts.keys() & rms.keys(), key=lambda name: (rms[name], name))
    return {
        "format": kind,
        "block": FOUR_BITS[kind].block,
        "relative_rms": round(rms[""], 5),
        "parts": {part: round(rms[part], 5) for part in sorted({*parts.values()} & rms.keys())},
        "worst": {"name": worst, "relative_rms": round(rms[worst], 5)},
    }


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
    differences: list[str] = []
    for parameter in base.parameters:
        disk = Disk(where, base.block)
        weight = quantized.get(parameter.name)
        target = targets[parameter.name]
        local = (target.to_local() if isinstance(target, DTensor) else target).detach()
        indices = list_own_indices(target)
        seed = f"{parameter.name}:{rank}"
        if weight and weight.format.kind:
            difference = _check_four_bits(parameter, local, indices, disk, seed, weight, counts)
        else:
            difference = _check_rows(parameter, local, indices, disk, seed, weight, counts)
            if weight and not difference:
                difference = _check_scales(parameter, weight, disk)
        if difference:
            differences.append(difference)
    return differences, counts


def check_buffers(model: torch.nn.Module, true: Mapping[str, Tensor]) -> list[str]:
    """Compare every buffer that no checkpoint stores, bit by bit, with transformers' own. Returns the differences."""
    own = dict(model.named_buffers())
    differences = []
    for name, expected in true.items():
        buffer = own[name].detach().cpu() if name in own else None
        if buffer is None or buffer.dtype != expected.dtype or not torch.equal(buffer, expected):
            differences.append(f"the buffer {name} is not what transformers computes")
    for name, module in model.named_modules():
        tensors = [key for key, value in vars(module).items() if isinstance(value, Tensor) and value.is_meta]
        differences += [f"{name}.{key} is a tensor that transformers neither loads nor computes" for key in tensors]
    return differences


def _check_rows(
    parameter: Parameter,
    local: Tensor,
    indices: list[list[int]],
    disk: "Disk",
    seed: str,
    weight: QuantizedParam | None,
    counts: dict[str, int],
) -> str:
    """Compare one parameter's sampled rows and add to `counts`. Returns the first difference."""
    for box in sample_boxes(tuple(local.shape), seed):
        place = tuple((index[start], index[stop - 1] + 1) for index, (start, stop) in zip(indices, box, strict=True))
        row = local[tuple(slice(*span) for span in box)].cpu()
        if row.shape != tuple(stop - start for start, stop in place):  # no layout cuts a row in pieces
            raise AssertionError(f"a row of {parameter.name} is not in one piece: {place}")
        for piece in parameter.pieces:
            shared = intersect(place, locate_piece(piece))
            if shared is None:
                continue
            expected, source = disk.values(piece, shared)
            stored = row[tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(shared, place, strict=True))]
            counts["slices"] += 1
            counts["elements"] += stored.numel()
            values = stored
            if weight:
                axes = [torch.arange(*span) for span in shared]
                values = stored.view(weight.format.codes).float() * expand_own_scale(weight, axes)
            same = torch.equal(values, expected.to(values.dtype).reshape(values.shape))
            if weight and same:
                same = torch.equal(stored, disk.codes(piece, shared).view(stored.dtype).view(stored.shape))
            if not same:
                return f"{parameter.name} is not what {source} holds"
    return ""


def _check_four_bits(
    parameter: Parameter,
    local: Tensor,
    indices: list[list[int]],
    disk: "Disk",
    seed: str,
    weight: QuantizedParam,
    counts: dict[str, int],
) -> str:
    """Compare whole sampled rows of a 4-bit parameter: scales belong to blocks of a row."""
    is_right = is_same if parameter.pieces[0].packed else is_nearest
    columns = weight.format.columns
    for box in sample_boxes((*local.shape[:-1], 1), seed):
        rows = [(index[start], index[start] + 1) for index, (start, _) in zip(indices, box[:-1], strict=False)]
        place = [*rows[:-1], (0, columns), rows[-1]] if weight.format.transposed else [*rows, (0, columns)]
        shares = [(piece, intersect(tuple(place), locate_piece(piece))) for piece in parameter.pieces]
        read = [disk.values(piece, shared) for piece, shared in shares if shared]
        counts["slices"] += 1
        counts["elements"] += columns
        row = local[tuple(start for start, _ in box[:-1])].cpu()
        expected = torch.cat([values.double().flatten() for values, _ in read])
        if not is_right(row, expected, weight.format):
            return f"{parameter.name} is not what {read[0][1]} holds, in {weight.format.kind}"
    return ""


def is_same(row: Tensor, expected: Tensor, coding: StoredFormat) -> bool:
    """Return whether a row's bytes, as published, decode to these true values."""
    units, scale = decode_row(row, coding)
    return torch.equal((units * scale[:, None]).float().flatten(), expected.float())


def decode_row(row: Tensor, coding: StoredFormat) -> tuple[Tensor, Tensor]:
    """Return the numbers and the scale of each block of a row."""
    numbers = torch.tensor(FOUR_BITS[coding.kind].numbers, dtype=torch.float64)
    codes = row[: coding.columns // 2]
    behind = row[coding.columns // 2 :].view(coding.scales)
    units = split_blocks(numbers[torch.stack([codes // 16, codes % 16], -1).flatten().long()], coding)
    if FOUR_BITS[coding.kind].is_divided:
        behind = behind[: len(units)].view(torch.float8_e4m3fn).float() / behind[-4:].view(torch.float32)
    if FOUR_BITS[coding.kind].has_zero_points:
        units = units - behind[len(units) :].double()[:, None]
    return units, behind[: len(units)].double()


def split_blocks(row: Tensor, coding: StoredFormat) -> Tensor:
    width = coding.block[1]
    return pad(row, (0, -coding.columns % width)).view(-1, width)


def is_nearest(row: Tensor, expected: Tensor, coding: StoredFormat) -> bool:
    """Return whether a row's bytes encode these true values as closely as 4 bits allow."""
    units, scale = decode_row(row, coding)
    blocks = split_blocks(expected, coding)
    largest = blocks.abs().amax(-1)
    if not torch.equal(scale, largest.float().bfloat16().double()):
        return False
    numbers = torch.tensor(FOUR_BITS[coding.kind].numbers, dtype=torch.float64)
    true_units = blocks / torch.where(largest == 0, 1.0, largest)[:, None]
    least_error = (true_units[..., None] - numbers).abs().amin(-1)
    return bool(((true_units - units).abs() <= least_error + 1e-6).all())


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
        scale = expand_own_scale(weight, axes)
        name = disk.scale_name(piece.stored.key)
        if scale.numel() and not torch.equal(scale, disk.scale(piece, there).float().expand(scale.shape)):
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
    return [[index for span in spans_of_axis for index in range(*span)] for spans_of_axis in spans]


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

    def __init__(
        self, where: Mapping[str, Path], block: Sequence[int], name_in_file: Callable[[str], str] = str
    ) -> None:
        self.where = where
        self.block = block
        self.name_in_file = name_in_file
        self.open: dict[Path, Any] = {}

    def handle(self, key: str) -> Any:
        file = self.where[key]
        self.open[file] = self.open.get(file) or safe_open(file, framework="pt")
        return self.open[file]

    def values(self, piece: Piece, box: Box) -> tuple[Tensor, str]:
        """Return the true values of a box inside this piece, and the name of their source."""
        key = piece.stored.key
        if piece.packed:
            numbers, scale = self.unpack(piece, box)
            return (numbers * scale).float(), f"{key!r} of {self.where[key].name}"
        codes = self.codes(piece, box)
        name = self.scale_name(key)
        if name not in self.where:
            return codes, f"{key!r} of {self.where[key].name}"
        scale = self.scale(piece, [torch.arange(*span) for span in to_stored_box(piece, box)])
        # e4m3 x bf16 is exact in float64; rounded to float32, then to the model's dtype, as the loader has to.
        return (codes.double() * scale).float(), f"{key!r} x {name!r} of {self.where[key].name}"

    def unpack(self, piece: Piece, box: Box) -> tuple[Tensor, Tensor]:
        """Return the numbers that the 4-bit codes of a box stand for, and their scales."""
        assert piece.packed is not None
        key = piece.stored.key
        there = [slice(a - o, b - o) for (a, b), o in zip(box, piece.offset, strict=True)][-len(piece.shape) :]
        if piece.packed.kind == "mxfp4":
            return self.mxfp4(key, there)
        if piece.packed.kind == "nf4":
            return self.nf4(key, piece.shape, there)
        return self.compressed(piece.packed.kind, key.removesuffix("_packed"), *there)

    def nf4(self, key: str, shape: Sequence[int], there: Sequence[slice]) -> tuple[Tensor, Tensor]:
        """Decode with the tables that bitsandbytes stores with the weight, indexed by position in the full matrix."""

        def read(name: str) -> Tensor:
            tensor: Tensor = self.handle(f"{key}.{name}").get_tensor(f"{key}.{name}")
            return tensor.flatten()

        state = json.loads(bytes(read("quant_state.bitsandbytes__nf4").tolist()))
        rows, columns = (torch.arange(size)[box] for size, box in zip(shape, there, strict=True))
        places = rows[:, None] * shape[-1] + columns
        scale = read("absmax")[places // state["blocksize"]]
        if "nested_offset" in state:
            nested_scale = read("nested_absmax")[places // state["blocksize"] // state["nested_blocksize"]]
            scale = read("nested_quant_map")[scale.long()] * nested_scale + state["nested_offset"]
        codes = self.handle(key).get_tensor(key).flatten().view(torch.uint8)[places // 2]
        return read("quant_map")[torch.where(places % 2 == 0, codes // 16, codes % 16).long()], scale

    def mxfp4(self, key: str, there: Sequence[slice]) -> tuple[Tensor, Tensor]:
        """Decode a stack of experts [expert, in, out] from the bits: one of sign, two of exponent, one of mantissa."""
        name = f"{key.removesuffix('_blocks')}_scales"
        blocks: Tensor = self.handle(key).get_slice(key)[there[0], there[2]].flatten(2)
        power: Tensor = self.handle(name).get_slice(name)[there[0], there[2]].repeat_interleave(32, -1).double() - 127
        bits = torch.stack([blocks % 16, blocks // 16], -1).flatten(2).double()
        size = bits % 8
        sign = torch.where(bits < 8, 1.0, -1.0)
        whole = torch.where(size < 2, size / 2, (1 + size % 2 / 2) * 2 ** (size // 2 - 1))
        return (sign * whole).transpose(1, 2)[:, there[1]], (2**power).transpose(1, 2)[:, there[1]]

    def compressed(self, kind: str, name: str, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """Decode a part of compressed-tensors' matrix, element by element from the stored words."""

        def read(end: str, *part: slice) -> Tensor:
            key = f"{name}{end}"
            tensor: Tensor = self.handle(key).get_slice(key)[part] if part else self.handle(key).get_tensor(key)
            return tensor

        words = read("_packed", rows)
        scale = read("_scale", rows).float()
        bits = 8 * words.element_size()
        places = torch.arange(words.shape[1] * bits // 4)
        codes = (words.long()[:, places // (bits // 4)] >> (4 * (places % (bits // 4)))) % 16
        groups = places // (len(places) // scale.shape[1])
        if kind == "nvfp4":
            sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
            values = sizes[codes % 8] * torch.where(codes < 8, 1.0, -1.0)
            scale = scale / read("_global_scale").float()
        else:
            values = codes.float() - 8
        if kind == "uint4":
            row = torch.arange(rows.start, rows.stop)
            zeros = (read("_zero_point").long()[row // 8] >> (4 * (row % 8))[:, None]) % 16 - 8
            values -= zeros[:, groups]
        return values[:, columns], scale[:, groups][:, columns]

    def scale_name(self, key: str) -> str:
        """Return the name of an FP8 weight's scale: compressed-tensors' own, or everyone else's."""
        return f"{key}_scale" if f"{key}_scale" in self.where else f"{key}_scale_inv"

    def codes(self, piece: Piece, box: Box) -> Tensor:
        """Return the stored bytes of a box."""
        key = piece.stored.key
        there = tuple(slice(*span) for span in to_stored_box(piece, box))
        stored: Tensor = self.handle(key).get_slice(key)[there] if there else self.handle(key).get_tensor(key)
        return stored

    def scale(self, piece: Piece, indices: Sequence[Tensor]) -> Tensor:
        """Return the scales of a stored tensor's elements at the crossings of these indices."""
        name = self.scale_name(piece.stored.key)
        scale: Tensor = self.handle(name).get_tensor(self.name_in_file(name)).double()
        if scale.numel() == 1:
            return scale
        shape = self.handle(piece.stored.key).get_slice(piece.stored.key).get_shape()
        axes = []
        for axis, (index, size, count) in enumerate(zip(indices, shape, scale.shape, strict=True)):
            side = size // count if count in (1, size) else self.block[axis - len(shape)]
            axes.append(index // side)
        return scale[torch.meshgrid(*axes, indexing="ij")]
