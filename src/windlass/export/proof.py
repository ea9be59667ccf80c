"""Proof that a merged model is base + adapter: open it again and compare it by a different route than the merge took.

1. Every tensor exists with the planned shape, dtype and place; untouched ones are byte-equal.

2. For touched tensors, sampled rows, read with safetensors' own reader, are compared with W + s BA recomputed in
float64 and in PEFT's terms; for FP8 weights also the share of the adapter that they contain.

3. Logits of base + adapter (PEFT's own forward) against the merged model, if it fits into memory in float32.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
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
from windlass.export.source import AdapterSource
from windlass.model import Base, Piece, Stored, read_base
from windlass.plan.layout import Layout
from windlass.train.logits import compute_both_logits, compute_logits, kl_divergence, open_adapter, sample_rows
from windlass.weights.certificate import Disk, sample_boxes
from windlass.weights.reading import DTYPES, Box, Files, intersect, locate_piece, to_stored_box

GIB: Final = 2**30
AT_ONCE: Final = 2**23  # bytes compared at a time
SLACK: Final = 1e-5  # relative to the terms: float32 sums in another order
# Allowed relative distance from the exact value: half the distance to its neighbour.
NEAREST: Final = {torch.float64: 2.0**-24, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SHARE_OF_MEMORY: Final = 0.6  # share of free memory that float32 weights may take
# Bounds of KL (mean, nats per token) and of the difference of a token's logits: absolute, or relative to what the
# adapter itself changes, whichever is larger. From the finest dtype to the coarsest. Set from trained adapters on wide
# and narrow tiny models: about ten times what a correct merge shows there.
BOUNDS: Final = {
    "F64": ((1e-6, 1e-4), (0.01, 0.01)),
    "F32": ((1e-6, 1e-4), (0.01, 0.01)),
    "F16": ((1e-4, 0.01), (0.1, 0.1)),
    "BF16": ((5e-3, 0.01), (0.5, 0.2)),
    "F8_E4M3": ((0.05, 0.1), (1.0, 0.5)),
    "F8_E5M2": ((0.1, 0.2), (2.0, 0.5)),
}


@dataclass
class Proof:
    """What was compared, and the result."""

    tensors: int = 0
    untouched: int = 0
    untouched_bytes: int = 0
    touched: int = 0
    elements: int = 0  # elements of touched tensors that were recomputed
    kept: float | None = None  # share of the adapter that the merged weights contain; 1: all of it
    least_kept: tuple[str, float] | None = None  # the parameter with the smallest share
    deviations: list[str] = field(default_factory=list)
    logits: dict[str, Any] | None = None


def prove_files(
    base: Base, deltas: Deltas, plan: MergePlan, to: Path, adapter: Path, advance: Callable[[int], None]
) -> Proof:
    try:
        merged = read_base(to)
    except UserError as error:
        return Proof(deviations=[problem.problem for problem in error.problems])
    found, planned = (
        {s.key: (s.dtype, s.shape, s.file.name, s.start, s.end) for s in each}
        for each in (merged.stored(), (entry.out for entry in plan.entries))
    )
    proof = Proof(tensors=len(found))
    for key in sorted(found.keys() | planned.keys()):
        if found.get(key) != planned.get(key):
            proof.deviations.append(f"{key} is {found.get(key, 'missing')}, planned {planned.get(key, 'not at all')}")
    for path in plan.others:
        if not (to / path.name).is_file() or (to / path.name).read_bytes() != path.read_bytes():
            proof.deviations.append(f"{path.name} is not the base's")
    if proof.deviations:
        return proof
    untouched = [entry for entry in plan.entries if entry.how == COPIED]
    with Files() as files, ThreadPoolExecutor(2) as pool:
        equal = pool.map(lambda entry: _are_bytes_equal(entry.source, entry.out, files), untouched)
        for entry, same in zip(untouched, equal, strict=True):
            size = entry.source.end - entry.source.start
            proof.untouched, proof.untouched_bytes = proof.untouched + 1, proof.untouched_bytes + size
            advance(size)
            if not same:
                proof.deviations.append(f"{entry.out.key} is not byte-equal to the base's, though not adapted")
    _prove_touched(proof, base, deltas, merged, adapter)
    return proof


def _are_bytes_equal(one: Stored, other: Stored, files: Files) -> bool:
    size = one.end - one.start
    for skip in range(0, size, AT_ONCE):
        pair = [bytearray(min(AT_ONCE, size - skip)) for _ in range(2)]
        for stored, into in zip((one, other), pair, strict=True):
            files.read(stored, skip, memoryview(into))
        if pair[0] != pair[1]:
            return False
    return True


def _prove_touched(proof: Proof, base: Base, deltas: Deltas, merged: Base, adapter: Path) -> None:
    """Compare sampled rows of every tensor that was rounded anew, because of the adapter or of a new dtype."""
    others = {parameter.name: parameter for parameter in merged.parameters}
    places = [{stored.key: stored.file for stored in each.stored()} for each in (base, merged)]
    all_wanted = all_found = 0.0
    for parameter in base.parameters:
        name, delta, other = parameter.name, deltas.by_name.get(parameter.name), others[parameter.name]
        if delta is None and {p.stored.dtype for p in parameter.pieces} == {p.stored.dtype for p in other.pieces}:
            continue
        proof.touched += 1
        disk, disk_merged = Disk(places[0], base.block), Disk(places[1], base.block)
        # Sums of delta squared, of (merged - base) x delta, and of the variance that dithered rounding may add to the
        # latter.
        wanted = found = noise = 0.0
        over, worst = 0, 0.0
        with safe_open(adapter, framework="pt") as opened:
            expected = Expected(delta, opened)
        for sample in sample_boxes(parameter.shape, name):
            row = (*sample[:-1], (0, parameter.shape[-1])) if sample else sample  # full rows: DoRA needs their length
            for piece, new in zip(parameter.pieces, other.pieces, strict=True):
                shared = intersect(row, locate_piece(piece))
                if shared is None:
                    continue
                shape = [stop - start for start, stop in shared]
                before = disk.values(piece, shared)[0].double().reshape(shape)
                got = disk_merged.values(new, shared)[0].double().reshape(shape)
                exact, size = expected.values(before, shared)
                step = allowed_rounding_error(exact, new.stored.dtype, disk_merged, new, shared)
                off, allowed = (exact - got).abs(), step + SLACK * size
                bad = (off > allowed) | ~got.isfinite()
                over += int(bad.sum())
                worst = max(worst, *(off / allowed)[bad].tolist(), 0.0)
                proof.elements += got.numel()
                if delta is not None:
                    change = exact - before
                    wanted += float((change * change).sum())
                    found += float(((got - before) * change).sum())
                    noise += float((change * step).square().sum()) / 4 if DTYPES[new.stored.dtype] in FORMATS else 0.0
        if over:
            proof.deviations.append(f"{name} is not W + s BA: {over} sampled values, {worst:.3g} x allowed")
        if not wanted:
            continue
        # FP8 steps are larger than an adapter's changes: only sums over many values show whether it is there.
        kept, explained = found / wanted, 6 * math.sqrt(noise) / wanted
        if proof.least_kept is None or kept < proof.least_kept[1]:
            proof.least_kept = (name, kept)
        if noise and not abs(kept - 1) <= 0.05 + explained:
            least, most = 1 - explained, 1 + explained
            problem = f"{name} holds {kept:.2f} of its adapter, and rounding explains {least:.2f} to {most:.2f}"
            proof.deviations.append(problem)
        all_wanted, all_found = all_wanted + wanted, all_found + found
    proof.kept = all_found / all_wanted if all_wanted else None


class Expected:
    """W + s BA recomputed from safetensors' reader, with the indices of PEFT's einsum."""

    def __init__(self, delta: Delta | None, opened: Any) -> None:
        self.delta = delta
        stored = {name: getattr(delta, name, None) for name in ("a", "b", "magnitude", "replaced")}
        self.factors = {name: opened.get_tensor(each.key).double() for name, each in stored.items() if each is not None}

    def values(self, base: Tensor, box: Box) -> tuple[Tensor, Tensor]:
        """Return the merged values of full rows before rounding, and the size of the terms."""
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
        if self.delta.parameter.transposed:  # "o r e, e r i -> e i o"
            a, b = b.T, a.T
        (top, bottom), (left, right) = box[-2:]
        a, b = a[:, left:right], b[top:bottom]
        value = base + (b @ a * scale).view(base.shape)
        size = base.abs() + (b.abs() @ a.abs() * abs(scale)).view(base.shape)
        if "magnitude" in self.factors:
            factor = self.factors["magnitude"].reshape(-1)[top] / torch.linalg.norm(value)
            value, size = value * factor, size * factor
        return value, size


def allowed_rounding_error(exact: Tensor, dtype: str, disk: Disk, piece: Piece, box: Box) -> Tensor:
    """Return the allowed rounding error: half a step for floats, a full step between FP8 codes."""
    kind = DTYPES[dtype]
    if kind not in FORMATS:
        return exact.abs() * NEAREST[kind] + torch.finfo(kind).tiny
    mantissa, least, _ = FORMATS[kind]
    scale = disk.scale(piece, [torch.arange(*span) for span in to_stored_box(piece, box)])
    scale = scale.reshape(()) if scale.numel() == 1 else scale.reshape(exact.shape)
    exponent = torch.frexp(exact / torch.where(scale == 0, 1.0, scale)).exponent - 1
    return torch.ldexp(torch.ones_like(exact), exponent.clamp(min=least) - mantissa) * scale


def read_free_memory() -> int:
    """Return the free bytes where a model is loaded: on the GPU, if there is one."""
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    import psutil  # type: ignore[import-untyped]

    return int(psutil.virtual_memory().available)


def compare_logits(base: Base, source: AdapterSource, to: Path) -> dict[str, Any]:
    """Return step 3 as a record; `skipped` says why it was not done, `deviation` what exceeds its bound.

    Everything runs in float32 on exactly the stored values, so the difference is the merge's alone. Rounding is
    harmless while it is small compared with what the adapter itself changes.
    """
    needed, free = 4 * base.total, read_free_memory()
    if needed > SHARE_OF_MEMORY * free:
        return {"skipped": f"the model needs {needed / GIB:.1f} GiB in float32, and {free / GIB:.1f} GiB are free"}
    rows = sample_rows(source.run_folder, base.dims["vocab"])
    plain, adapted = compute_both_logits(open_adapter(load_float32(base), source.folder), rows)
    gc.collect()
    merged_base = read_base(to)
    merged = compute_logits(load_float32(merged_base), rows)
    record: dict[str, Any] = {"same_top_token": float((adapted.argmax(-1) == merged.argmax(-1)).float().mean())}
    for prefix, other in (("", merged), ("adapter_", plain)):  # the adapter's own change, for comparison
        worst = (adapted - other).abs().amax(-1)
        record[f"{prefix}kl"] = kl_divergence(adapted, other)
        record |= {f"{prefix}max_difference": float(worst.max()), f"{prefix}median_difference": float(worst.median())}
    # At a tie between two experts the last bit of a weight decides where a token goes, and its logits jump: with
    # experts the median token is judged, not the worst.
    judged, name = ("median_difference", "median token") if "experts" in base.dims else ("max_difference", "largest")
    dtype = max({p.stored.dtype for each in merged_base.parameters for p in each.pieces}, key=list(BOUNDS).index)
    over = []
    for key, bound, what, (least, share) in (
        ("kl", "bound_kl", "KL", BOUNDS[dtype][0]),
        (judged, "bound_difference", f"the difference of the {name}", BOUNDS[dtype][1]),
    ):
        record[bound] = max(least, share * record[f"adapter_{key}"])
        if not record[key] <= record[bound]:
            over.append(f"{what} is {record[key]:.3g}, over {record[bound]:.3g}")
    record |= {"judged": name, "dtype": dtype, "rows": list(rows.shape)}
    if over:
        record["deviation"] = (
            f"the logits of base + adapter and merged differ: {', '.join(over)}; "
            f"if nothing else is wrong, {dtype} is too coarse for it: merge with another --dtype, or serve it unmerged"
        )
    return record


def load_float32(base: Base) -> Any:
    from windlass.train.load import load_base

    return load_base(base, Layout("resident", "compared", 1, 1, shard=1), dtype=torch.float32)[0].eval()
