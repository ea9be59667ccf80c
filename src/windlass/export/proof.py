"""Proof that a merged model is base + adapter: opened again and compared by another way than the one that wrote it.

1. Headers and files: every tensor there, its shape, dtype and file as planned.
2. Tensors that the adapter leaves alone: byte for byte, all of them.
3. Tensors that it changes: sampled rows, read through safetensors' own reader, against W + s BA computed again in
   float64 and in PEFT's terms; of FP8 weights also the share of the adapter that is in them.
4. Logits of base + adapter (PEFT's own forward) against merged, if the model fits into memory in float32.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor

from windlass.errors import UserError
from windlass.export.deltas import Delta, Deltas
from windlass.export.merge import COPIED, MergePlan
from windlass.export.rounding import FORMATS
from windlass.export.source import Source
from windlass.model import Base, Parameter, Piece, Stored, read_base
from windlass.plan.layout import Layout
from windlass.train.certificate import Disk, sampled
from windlass.train.logits import compute_logits, kl_divergence, logits_without_and_with, sample_rows
from windlass.train.reading import DTYPES, Box, Files, intersection, piece_box, stored_box

GIB: Final = 2**30
AT_ONCE: Final = 2**23  # bytes compared at a time
SLACK: Final = 1e-5  # of the sizes that were added: float32 sums in another order
# How far a value may be from the exact one: half the distance to its neighbour, as a share of it.
NEAREST: Final = {torch.float64: 2.0**-24, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SHARE_OF_MEMORY: Final = 0.6  # of what is free, for the weights in float32


@dataclass(frozen=True, slots=True)
class Bound:
    """What is allowed: so much, or so much of what the adapter itself changes, whichever is larger."""

    kl: float  # mean, nats a token
    kl_share: float
    difference: float  # of the logits of a token
    difference_share: float


# Set from trained adapters on wide and narrow tiny models: about ten times what a right merge shows there.
BOUNDS: Final = {
    "F64": Bound(1e-6, 1e-4, 0.01, 0.01),
    "F32": Bound(1e-6, 1e-4, 0.01, 0.01),
    "F16": Bound(1e-4, 0.01, 0.1, 0.1),
    "BF16": Bound(5e-3, 0.01, 0.5, 0.2),
    "F8_E4M3": Bound(0.05, 0.1, 1.0, 0.5),
    "F8_E5M2": Bound(0.1, 0.2, 2.0, 0.5),
}


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


def prove_files(
    base: Base, deltas: Deltas, plan: MergePlan, to: Path, adapter: Path, advance: Callable[[int], None]
) -> Proof:
    """Steps 1 to 3."""
    try:
        merged = read_base(to)
    except UserError as error:
        return Proof(deviations=[problem.problem for problem in error.problems])
    found = {stored.key: stored for stored in merged.stored()}
    proof = Proof(tensors=len(found), deviations=[*_headers(plan, found)])
    for path in plan.others:
        if not (to / path.name).is_file() or (to / path.name).read_bytes() != path.read_bytes():
            proof.deviations.append(f"{path.name} is not the base's")

    entries = [entry for entry in plan.entries() if entry.how == COPIED and entry.out.key in found]
    with Files() as files, ThreadPoolExecutor(2) as pool:
        equal = pool.map(lambda entry: _same_bytes(entry.source, found[entry.out.key], files), entries)
        for entry, same in zip(entries, equal, strict=True):
            size = entry.source.end - entry.source.start
            proof.untouched += 1
            proof.untouched_bytes += size
            advance(size)
            if not same:
                proof.deviations.append(f"{entry.out.key} is not byte-equal to the base's, though not adapted")
    _prove_touched(proof, base, deltas, merged, adapter)
    return proof


def _headers(plan: MergePlan, found: Mapping[str, Stored]) -> Iterator[str]:
    expected = {entry.out.key: entry.out for entry in plan.entries()}
    for key in expected.keys() - found.keys():
        yield f"{key} is missing"
    for key in found.keys() - expected.keys():
        yield f"{key} is there, and the base has none"
    for key, stored in found.items():
        wanted = expected.get(key, stored)
        if (stored.dtype, stored.shape) != (wanted.dtype, wanted.shape):
            yield f"{key} is {stored.dtype} {list(stored.shape)}, not {wanted.dtype} {list(wanted.shape)}"
        elif stored.file.name != wanted.file.name:
            yield f"{key} is in {stored.file.name}, not in {wanted.file.name}"


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


@dataclass
class Sums:
    """Over samples: what shows whether the adapter is in the merged values."""

    wanted: float = 0.0  # sum of delta squared
    found: float = 0.0  # sum of (merged - base) x delta
    noise: float = 0.0  # variance that dithered rounding may add to `found`

    def add(self, delta: Tensor, change: Tensor, variance: Tensor | float) -> None:
        self.wanted += float((delta * delta).sum())
        self.found += float((change * delta).sum())
        self.noise += float((delta * delta * variance).sum())


def _prove_touched(proof: Proof, base: Base, deltas: Deltas, merged: Base, adapter: Path) -> None:
    """Sampled rows of every tensor that was rounded anew, whether the adapter changed it or only the dtype."""
    others = {parameter.name: parameter for parameter in merged.parameters}
    where, where_merged = ({stored.key: stored.file for stored in each.stored()} for each in (base, merged))
    total = Sums()
    for parameter in base.parameters:
        delta, other = deltas.by_name.get(parameter.name), others[parameter.name]
        dtypes = [{piece.stored.dtype for piece in each.pieces} for each in (parameter, other)]
        if delta is None and dtypes[0] == dtypes[1]:
            continue
        proof.touched += 1
        sums = Sums()
        disk, disk_merged = Disk(where, base.block), Disk(where_merged, base.block)
        with safe_open(adapter, framework="pt") as opened:
            expected = Expected(delta, opened)
            for sample in sampled(parameter.shape, parameter.name):
                box = (
                    (*sample[:-1], (0, parameter.shape[-1])) if sample else sample
                )  # full rows: DoRA needs their length
                elements, deviation = _compare(parameter, other, expected, box, disk, disk_merged, sums)
                proof.elements += elements
                if deviation:
                    proof.deviations.append(deviation)
                    break
        if not sums.wanted:
            continue
        # FP8 steps are larger than what an adapter adds: only the sum over many values shows whether it is there.
        kept, noise = sums.found / sums.wanted, 6 * math.sqrt(sums.noise) / sums.wanted
        if proof.least_kept is None or kept < proof.least_kept[1]:
            proof.least_kept = (parameter.name, kept)
        if sums.noise and abs(kept - 1) > 0.05 + noise:
            proof.deviations.append(
                f"{parameter.name} holds {kept:.2f} of its adapter, and rounding explains "
                f"{1 - noise:.2f} to {1 + noise:.2f}"
            )
        total.wanted, total.found = total.wanted + sums.wanted, total.found + sums.found
    proof.kept = total.found / total.wanted if total.wanted else None


def _compare(
    parameter: Parameter, other: Parameter, expected: Expected, box: Box, disk: Disk, disk_merged: Disk, sums: Sums
) -> tuple[int, str]:
    """One row: how many values were compared, and how they differ."""
    elements = 0
    for piece, new in zip(parameter.pieces, other.pieces, strict=True):
        shared = intersection(box, piece_box(piece))
        if shared is None:
            continue
        shape = [stop - start for start, stop in shared]
        base = disk.values(piece, shared)[0].double().reshape(shape)
        got = disk_merged.values(new, shared)[0].double().reshape(shape)
        exact, size = expected.values(base, shared)
        step = spacing(exact, new.stored.dtype, disk_merged, new, shared)
        allowed = step + SLACK * size
        elements += base.numel()
        if expected.delta is not None:
            coded = DTYPES[new.stored.dtype] in FORMATS
            sums.add(exact - base, got - base, step * step / 4 if coded else 0.0)
        off = (exact - got).abs()
        over = off > allowed
        if bool(over.any()) or not bool(got.isfinite().all()):
            worst, name = float((off / allowed).max()), parameter.name
            return (
                elements,
                f"{name} is not W + s BA: {int(over.sum())} of {over.numel()} values, {worst:.3g} x allowed",
            )
    return elements, ""


class Expected:
    """W + s BA computed a second time, from safetensors' reader, by the indices that PEFT's einsum names."""

    def __init__(self, delta: Delta | None, opened: Any) -> None:
        self.delta = delta
        stored = {name: getattr(delta, name, None) for name in ("a", "b", "magnitude", "replaced")}
        self.factors = {name: opened.get_tensor(each.key).double() for name, each in stored.items() if each is not None}

    def values(self, base: Tensor, box: Box) -> tuple[Tensor, Tensor]:
        """The merged values of full rows before rounding, and the size of what was added up."""
        if self.delta is None:
            return base, base.abs()
        if "replaced" in self.factors:
            given = self.factors["replaced"][tuple(slice(*extent) for extent in box)].reshape(base.shape)
            return given, given.abs()
        a, b, scale = self.factors["a"], self.factors["b"], self.delta.scale
        if len(box) == 3:  # "o r e, e r i -> e o i"
            expert, experts = box[0][0], self.delta.experts
            rank = a.shape[0] // experts
            b = b[:, [r * experts + expert for r in range(rank)]]
            a = a[expert * rank : (expert + 1) * rank]
        (top, bottom), (left, right) = box[-2:]
        a, b = a[:, left:right], b[top:bottom]
        value = base + (b @ a * scale).view(base.shape)
        size = base.abs() + (b.abs() @ a.abs() * abs(scale)).view(base.shape)
        if "magnitude" in self.factors:
            factor = self.factors["magnitude"].reshape(-1)[top] / torch.linalg.norm(value)
            value, size = value * factor, size * factor
        return value, size


def spacing(exact: Tensor, dtype: str, disk: Disk, piece: Piece, box: Box) -> Tensor:
    """How far rounding may go: half a step to the nearest of a float, a whole step between FP8 codes."""
    kind = DTYPES[dtype]
    if kind not in FORMATS:
        return exact.abs() * NEAREST[kind] + torch.finfo(kind).tiny
    mantissa, least, _ = FORMATS[kind]
    scale = disk.scale(piece, [torch.arange(*span) for span in stored_box(piece, box)])
    scale = scale.reshape(()) if scale.numel() == 1 else scale.reshape(exact.shape)
    exponent = torch.frexp(exact / torch.where(scale == 0, 1.0, scale)).exponent - 1
    return torch.ldexp(torch.ones_like(exact), exponent.clamp(min=least) - mantissa) * scale


def free_memory() -> int:
    """Free bytes where a model is loaded: on the GPU, if there is one."""
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    import psutil  # type: ignore[import-untyped]

    return int(psutil.virtual_memory().available)


def compare_logits(base: Base, source: Source, to: Path) -> dict[str, Any]:
    """Step 4 as a record; `skipped` says why there is none, `deviation` what is out of bounds.

    All run in float32 from exactly the stored values, so the difference is the merge's alone. Rounding is harmless
    while it is small against what the adapter itself changes.
    """
    needed, free = 4 * base.total, free_memory()
    if needed > SHARE_OF_MEMORY * free:
        place = "on the GPU" if torch.cuda.is_available() else "here"
        return {
            "skipped": f"the model needs {needed / GIB:.1f} GiB in float32, and {free / GIB:.1f} GiB are free {place}"
        }
    rows = sample_rows(source.run_folder, base.dims["vocab"])
    plain, adapted = logits_without_and_with(load_float32(base), source.folder, rows)
    gc.collect()
    merged_base = read_base(to)
    merged = compute_logits(load_float32(merged_base), rows)
    record: dict[str, Any] = {"same_top_token": float((adapted.argmax(-1) == merged.argmax(-1)).float().mean())}
    for prefix, other in (("", merged), ("adapter_", plain)):  # what the adapter itself changes, for scale
        worst = (adapted - other).abs().amax(-1)
        record |= {
            f"{prefix}kl": kl_divergence(adapted, other),
            f"{prefix}max_difference": float(worst.max()),
            f"{prefix}median_difference": float(worst.median()),
        }
    # A token at a tie between two experts goes to the other one by the last bit of a weight, and its logits jump:
    # with experts the median token is judged, not the worst.
    judged, name = ("median", "median token") if "experts" in base.dims else ("max", "largest")
    dtype = max({p.stored.dtype for parameter in merged_base.parameters for p in parameter.pieces}, key=_coarseness)
    bound = BOUNDS[dtype]
    record |= {
        "judged": name,
        "dtype": dtype,
        "bound_kl": max(bound.kl, bound.kl_share * record["adapter_kl"]),
        "bound_difference": max(bound.difference, bound.difference_share * record[f"adapter_{judged}_difference"]),
        "rows": list(rows.shape),
    }
    over = [
        f"{what} is {value:.3g}, over {allowed:.3g}"
        for what, value, allowed in (
            ("KL", record["kl"], record["bound_kl"]),
            (f"the difference of the {name}", record[f"{judged}_difference"], record["bound_difference"]),
        )
        if not value <= allowed
    ]
    if over:
        record["deviation"] = (
            f"the logits of base + adapter and merged differ: {', '.join(over)}; "
            f"if nothing else is wrong, {dtype} is too coarse for it: merge with another --dtype, or serve it unmerged"
        )
    return record


def _coarseness(dtype: str) -> float:
    return BOUNDS[dtype].kl


def load_float32(base: Base) -> Any:
    from windlass.train.load import load

    return load(base, Layout("resident", "compared", 1, 1, shard=1), dtype=torch.float32)[0].eval()
