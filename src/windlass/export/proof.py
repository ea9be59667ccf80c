"""The merged checkpoint opened again and held against base and adapter, by another way than the one that wrote it.

Untouched tensors are compared byte for byte, all of them. Of those that the adapter touched, sampled rows are read
through safetensors' own reader and W + s BA is computed again, in float64 and in PEFT's terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from windlass.errors import UserError
from windlass.export.recipe import COPIED, Recipe
from windlass.export.update import Update, Updates
from windlass.export.values import FORMATS
from windlass.model import Base, Parameter, Piece, Stored, read_base
from windlass.train.certificate import Disk, sampled
from windlass.train.reading import DTYPES, Box, Files, intersection, piece_box

AT_ONCE = 2**23  # bytes compared at a time
SHOWN = 8
SLACK = 1e-5  # of the sizes that were added: float32 sums in another order
# How far a value may lie from the exact one: half the distance to its neighbour, as a share of it.
NEAREST = {torch.float64: 2.0**-24, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
LOST = 0.9  # below this share of the adapter it is said


@dataclass
class Proof:
    """What was compared and what came out."""

    tensors: int = 0
    untouched: int = 0
    untouched_bytes: int = 0
    touched: int = 0
    elements: int = 0  # of touched tensors, computed again
    kept: float | None = None  # share of the adapter that the merged weights hold; 1: all of it
    least_kept: tuple[str, float] | None = None  # the parameter that holds the least of it
    deviations: list[str] = field(default_factory=list)
    logits: dict[str, Any] | None = None

    @property
    def passed(self) -> bool:
        return not self.deviations


@dataclass
class Sums:
    """Of one parameter's samples: what says whether the adapter is in there."""

    wanted: float = 0.0  # sum of delta squared
    found: float = 0.0  # sum of (merged - base) x delta
    noise: float = 0.0  # what rounding by the pattern may add to `found`, as a variance
    elements: int = 0

    def add(self, delta: Tensor, change: Tensor, variance: Tensor) -> None:
        self.wanted += float((delta * delta).sum())
        self.found += float((change * delta).sum())
        self.noise += float((delta * delta * variance).sum())
        self.elements += delta.numel()


def prove(
    checkpoint: Base, updates: Updates, recipe: Recipe, to: Path, adapter: Path, advance: Callable[[int], None]
) -> Proof:
    proof = Proof()
    try:
        opened = read_base(to)
    except UserError as error:
        proof.deviations = [problem.problem for problem in error.problems]
        return proof
    held = _stored(opened)
    proof.deviations += list(_headers(recipe, held))
    proof.deviations += list(_files(checkpoint, recipe, to))
    proof.tensors = len(held)
    _untouched(proof, recipe, held, advance)
    _touched(proof, checkpoint, updates, opened, adapter)
    return proof


def _stored(checkpoint: Base) -> dict[str, Stored]:
    found = {stored.key: stored for stored in checkpoint.unread}
    for parameter in checkpoint.parameters:
        for piece in parameter.pieces:
            found |= {stored.key: stored for stored in (piece.stored, piece.scale) if stored is not None}
    return found


def _headers(recipe: Recipe, held: Mapping[str, Stored]) -> Iterator[str]:
    expected = {entry.out.key: entry.out for entry in recipe.entries()}
    for key in expected.keys() - held.keys():
        yield f"{key} is missing"
    for key in held.keys() - expected.keys():
        yield f"{key} is there, and the base has none"
    for key, stored in held.items():
        wanted = expected.get(key, stored)
        if (stored.dtype, stored.shape) != (wanted.dtype, wanted.shape):
            yield f"{key} is {stored.dtype} {list(stored.shape)}, not {wanted.dtype} {list(wanted.shape)}"
        elif stored.file.name != wanted.file.name:
            yield f"{key} is in {stored.file.name}, not in {wanted.file.name}"


def _files(checkpoint: Base, recipe: Recipe, to: Path) -> Iterator[str]:
    assert checkpoint.path is not None
    for path in recipe.others:
        if not (to / path.name).is_file() or (to / path.name).read_bytes() != path.read_bytes():
            yield f"{path.name} is not the base's"


def _untouched(proof: Proof, recipe: Recipe, held: Mapping[str, Stored], advance: Callable[[int], None]) -> None:
    entries = [entry for entry in recipe.entries() if entry.how == COPIED and entry.out.key in held]

    with Files() as files, ThreadPoolExecutor(2) as pool:

        def same(index: int) -> bool:
            entry = entries[index]
            equal = _same_bytes(entry.source, held[entry.out.key], files)
            advance(entry.source.end - entry.source.start)
            return equal

        for entry, equal in zip(entries, pool.map(same, range(len(entries))), strict=True):
            proof.untouched += 1
            proof.untouched_bytes += entry.source.end - entry.source.start
            if not equal:
                proof.deviations.append(f"{entry.out.key} is not byte-equal to the base's, and the adapter has no part")


def _same_bytes(one: Stored, other: Stored, files: Files) -> bool:
    size = one.end - one.start
    if other.end - other.start != size:
        return False
    for skip in range(0, size, AT_ONCE):
        pair = [bytearray(min(AT_ONCE, size - skip)) for _ in range(2)]
        for stored, into in zip((one, other), pair, strict=True):
            files.read(stored, skip, memoryview(into))
        if pair[0] != pair[1]:
            return False
    return True


def _touched(proof: Proof, checkpoint: Base, updates: Updates, opened: Base, adapter: Path) -> None:
    """Sampled rows of every tensor that was rounded anew, whether the adapter changed it or only the dtype."""
    merged = {parameter.name: parameter for parameter in opened.parameters}
    wheres = [{key: stored.file for key, stored in _stored(each).items()} for each in (checkpoint, opened)]
    side = checkpoint.block
    total = Sums()
    for parameter in checkpoint.parameters:
        update = updates.by_name.get(parameter.name)
        other = merged[parameter.name]
        if update is None and _dtypes(parameter) == _dtypes(other):
            continue
        proof.touched += 1
        sums = Sums()
        disks = [Disk(where, side) for where in wheres]
        with safe_open(adapter, framework="pt") as opened_adapter:
            again = Again(update, opened_adapter)
            for box in sampled(parameter.shape, parameter.name):
                differs = _compare(parameter, other, again, box, disks, sums)
                if differs:
                    proof.deviations.append(differs)
                    break
        proof.elements += sums.elements
        proof.deviations += _judge(parameter.name, sums, proof)
        for name in ("wanted", "found", "noise"):
            setattr(total, name, getattr(total, name) + getattr(sums, name))
    proof.kept = total.found / total.wanted if total.wanted else None


def _dtypes(parameter: Parameter) -> set[str]:
    return {piece.stored.dtype for piece in parameter.pieces}


class Again:
    """An update computed a second time, from safetensors' reader, by the indices that PEFT's einsum names."""

    def __init__(self, update: Update | None, opened: Any) -> None:
        self.update = update
        if update is None:
            return
        pairs = (("a", update.a), ("b", update.b), ("magnitude", update.magnitude), ("replaced", update.replaced))
        self.held = {name: opened.get_tensor(stored.key).double() for name, stored in pairs if stored is not None}

    def delta(self, box: Box) -> tuple[Tensor, Tensor]:
        """s BA inside a box, and the size of the sums behind it."""
        assert self.update is not None
        a, b = self.held["a"], self.held["b"]
        (top, bottom), (left, right) = box[-2:]
        if len(box) == 3:  # "o r e, e r i -> e o i"
            expert, experts = box[0][0], self.update.experts
            rank = a.shape[0] // experts
            b = b[:, [r * experts + expert for r in range(rank)]]
            a = a[expert * rank : (expert + 1) * rank]
        b, a = b[top:bottom], a[:, left:right]
        shape = [stop - start for start, stop in box]
        return (b @ a * self.update.scale).view(shape), (b.abs() @ a.abs() * abs(self.update.scale)).view(shape)

    def exact(self, base: Tensor, box: Box, row: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """What the merged values are before rounding, and the size of what was added up."""
        if self.update is None:
            return base, base.abs()
        if "replaced" in self.held:
            given = self.held["replaced"][tuple(slice(*extent) for extent in box)].reshape(base.shape)
            return given, given.abs()
        delta, size = self.delta(box)
        value, size = base + delta, base.abs() + size
        if "magnitude" in self.held:
            wide = (*box[:-1], (0, self.update.parameter.shape[-1]))
            length = torch.linalg.norm(row() + self.delta(wide)[0])
            factor = self.held["magnitude"].reshape(-1)[box[-2][0]] / length
            value, size = value * factor, size * factor
        return value, size


def _compare(parameter: Parameter, other: Parameter, again: Again, box: Box, disks: Sequence[Disk], sums: Sums) -> str:
    """One sampled row; says what differs."""
    for piece, new in zip(parameter.pieces, other.pieces, strict=True):
        shared = intersection(box, piece_box(piece))
        if shared is None:
            continue
        shape = [stop - start for start, stop in shared]
        base = disks[0].values(piece, shared)[0].double().reshape(shape)
        got = disks[1].values(new, shared)[0].double().reshape(shape)
        whole_row = (*shared[:-1], (0, parameter.shape[-1]))

        def row(piece: Piece = piece, wide: Box = whole_row) -> Tensor:
            return disks[0].values(piece, wide)[0].double()

        exact, size = again.exact(base, shared, row)
        step = spacing(exact, new.stored.dtype, disks[1], new, shared)
        allowed = step + SLACK * size
        delta = exact - base
        between = (exact - got).abs()
        if again.update is not None:
            coded = DTYPES[new.stored.dtype] in FORMATS
            sums.add(delta, got - base, step * step / 4 if coded else torch.zeros_like(step))
        else:
            sums.elements += base.numel()
        over = between > allowed
        if bool(over.any()) or not bool(got.isfinite().all()):
            worst = float((between / allowed).max())
            return (
                f"{parameter.name} is not W + s BA: {int(over.sum())} of {over.numel()} values, {worst:.3g} x allowed"
            )
    return ""


def spacing(exact: Tensor, dtype: str, disk: Disk, piece: Piece, box: Box) -> Tensor:
    """How far rounding may go: half a step to the nearest of a float, a whole step between FP8 codes."""
    kind = DTYPES[dtype]
    if kind not in FORMATS:
        return exact.abs() * NEAREST[kind] + torch.finfo(kind).tiny
    mantissa, least, _ = FORMATS[kind]
    scale = _scales(disk, piece, box).reshape(exact.shape)
    exponent = torch.frexp(exact / torch.where(scale == 0, 1.0, scale)).exponent - 1
    return torch.ldexp(torch.ones_like(exact), exponent.clamp(min=least) - mantissa) * scale


def _scales(disk: Disk, piece: Piece, box: Box) -> Tensor:
    """The scale of every element of a box; zero where a block of zeros has none."""
    assert piece.scale is not None
    scale: Tensor = disk.handle(piece.scale.key).get_tensor(piece.scale.key).double()
    there = [(a - o, b - o) for (a, b), o in zip(box, piece.offset, strict=True)][-len(piece.stored.shape) :]
    if scale.numel() == 1:
        return scale.reshape(()).expand([stop - start for start, stop in there])
    for axis, ((start, stop), size) in enumerate(zip(there, piece.stored.shape, strict=True)):
        count = scale.shape[axis]
        index = torch.arange(start, stop)
        if count == 1:
            index = torch.zeros_like(index)
        elif count != size:
            index = index // disk.block[axis - len(there)]
        scale = scale.index_select(axis, index)
    return scale


def _judge(name: str, sums: Sums, proof: Proof) -> list[str]:
    """Whether the adapter is in a parameter's rounded values: FP8 steps are larger than what an adapter adds."""
    if not sums.wanted:
        return []
    kept = sums.found / sums.wanted
    if proof.least_kept is None or kept < proof.least_kept[1]:
        proof.least_kept = (name, kept)
    noise = math.sqrt(sums.noise) / sums.wanted
    if sums.noise and abs(kept - 1) > 0.05 + 6 * noise:
        least, most = 1 - 6 * noise, 1 + 6 * noise
        return [f"{name} holds {kept:.2f} of its adapter, and rounding explains {least:.2f} to {most:.2f}"]
    return []
