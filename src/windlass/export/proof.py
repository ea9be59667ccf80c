"""Proof that a merged model is base + adapter, by a different route than the merge took: docs/export.md has its steps.

An adapter alone is opened with plain PEFT on its base's class without memory: every tensor must find its place.
"""

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
from windlass.export.merged_files import COPIED, ROTATED, MergedEntry, MergePlan, iter_stored_bytes
from windlass.export.rounding import FORMATS
from windlass.export.screen import Advance
from windlass.export.source import AdapterSource
from windlass.hardware import GIB
from windlass.model import Base, Parameter, Piece, Stored, read_base
from windlass.train.logits import (
    compute_both_logits,
    compute_logits,
    kl_by_token,
    load_float32,
    open_adapter,
    sample_rows,
)
from windlass.weights.certificate import Disk, sample_boxes
from windlass.weights.four_bits import code_levels
from windlass.weights.reading import DTYPES, Box, Files, intersect, locate_piece, to_stored_box

SLACK: Final = 1e-5  # relative to the terms: float32 sums in another order
# Allowed relative distance from the exact value: half the distance to its neighbour.
NEAREST: Final = {torch.float64: 2.0**-24, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
FLOAT32_SHARE: Final = 0.6  # of free memory, that float32 weights may take
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
    "U8": ((0.1, 0.2), (10.0, 1.0)),
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
    explained: float = 0.0  # by how much rounding may make that share another
    least_kept: tuple[str, float] | None = None  # the parameter with the smallest share
    deviations: list[str] = field(default_factory=list)
    logits: dict[str, Any] | None = None


def prove_files(base: Base, deltas: Deltas, plan: MergePlan, to: Path, adapter: Path, advance: Advance) -> Proof:
    """Compare every file and tensor of the merged model with what was planned."""
    try:
        merged = plan.read(to)
    except UserError as error:
        return Proof(deviations=[problem.problem for problem in error.problems])
    proof = Proof()
    _prove_places(proof, merged, plan, to)
    if proof.deviations:
        return proof
    _prove_untouched(proof, plan, advance)
    _prove_touched(proof, base, deltas, merged, adapter, plan.names.name_in_file)
    return proof


def _prove_places(proof: Proof, merged: Base, plan: MergePlan, to: Path) -> None:
    """Compare each tensor's dtype, shape and place with the plan, and the other files with the base's."""
    written = {stored.key: _describe_stored(stored) for stored in merged.stored()}
    planned = {entry.out.key: _describe_stored(entry.out) for entry in plan.entries}
    proof.tensors = len(written)
    for key in sorted(written.keys() | planned.keys()):
        if written.get(key) != planned.get(key):
            text = f"{key} is {written.get(key, 'missing')}, planned {planned.get(key, 'not at all')}"
            proof.deviations.append(text)
    for path in plan.others:
        if not (to / path.name).is_file() or (to / path.name).read_bytes() != path.read_bytes():
            proof.deviations.append(f"{path.name} is not the base's")


def _describe_stored(stored: Stored) -> tuple[Any, ...]:
    return stored.dtype, stored.shape, stored.file.name, stored.start, stored.end


def _prove_untouched(proof: Proof, plan: MergePlan, advance: Advance) -> None:
    """Compare the bytes of every copied tensor with the base's."""
    untouched = [entry for entry in plan.entries if entry.how == COPIED]
    for entry in plan.entries:
        if entry.how == ROTATED:
            _prove_rotated(proof, entry)
    with Files() as files, ThreadPoolExecutor(2) as pool:
        equal = pool.map(lambda entry: _are_bytes_equal(entry, files), untouched)
        for entry, is_equal in zip(untouched, equal, strict=True):
            size = entry.source.end - entry.source.start
            proof.untouched += 1
            proof.untouched_bytes += size
            advance(size)
            if not is_equal:
                proof.deviations.append(f"{entry.out.key} is not byte-equal to the base's, though not adapted")


def _prove_rotated(proof: Proof, entry: MergedEntry) -> None:
    """Compare row by row: row 2 i + j of a head is row i of its half j in transformers' layout."""
    with safe_open(entry.source.file, "pt") as before, safe_open(entry.out.file, "pt") as after:
        expected = before.get_tensor(entry.source.key)
        written = after.get_tensor(entry.out.key)
    side = len(expected) // entry.heads
    for row in range(len(expected)):
        head, place = divmod(row, side)
        if not torch.equal(written[row], expected[head * side + place % 2 * (side // 2) + place // 2]):
            proof.deviations.append(f"{entry.out.key} is not the base's, in the order of Mistral's rows")
            return


def _are_bytes_equal(entry: MergedEntry, files: Files) -> bool:
    blocks = zip(iter_stored_bytes(entry.source, files), iter_stored_bytes(entry.out, files), strict=True)
    return all(before.obj == after.obj for before, after in blocks)  # views are compared byte by byte


class Expected:
    """W + s BA recomputed from safetensors' reader, with the indices of PEFT's einsum."""

    def __init__(self, delta: Delta | None, opened: Any) -> None:
        self.delta = delta
        self.factors: dict[str, Tensor] = {}
        for name in ("a", "b", "magnitude", "replaced"):
            stored = getattr(delta, name, None)
            if stored is not None:
                self.factors[name] = opened.get_tensor(stored.key).double()

    def values(self, base: Tensor, box: Box) -> tuple[Tensor, Tensor]:
        """Return the merged values of full rows before rounding, and the size of the terms."""
        if self.delta is None:
            return base, base.abs()
        if "replaced" in self.factors:
            new = self.factors["replaced"][tuple(slice(*extent) for extent in box)].reshape(base.shape)
            return new, new.abs()
        a = self.factors["a"]
        b = self.factors["b"]
        if len(box) == 3:  # "o r e, e r i -> e o i"
            expert = box[0][0]
            experts = self.delta.experts
            r = a.shape[0] // experts
            b = b[:, [index * experts + expert for index in range(r)]]
            a = a[expert * r : (expert + 1) * r]
        if self.delta.parameter.transposed:  # "o r e, e r i -> e i o"
            a, b = b.T, a.T
        (top, bottom), (left, right) = box[-2:]
        a = a[:, left:right]
        b = b[top:bottom]
        scale = self.delta.scale
        value = base + (b @ a * scale).view(base.shape)
        size = base.abs() + (b.abs() @ a.abs() * abs(scale)).view(base.shape)
        if "magnitude" in self.factors:
            factor = self.factors["magnitude"].reshape(-1)[top] / torch.linalg.norm(value)
            value = value * factor
            size = size * factor
        return value, size


@dataclass
class Sums:
    """Sums over the sampled values of one parameter."""

    elements: int = 0
    over: int = 0  # values further from W + s BA than allowed
    worst: float = 0.0  # the largest distance, in units of what is allowed
    change: float = 0.0  # (s BA) squared
    kept: float = 0.0  # (merged - base) x s BA
    noise: float = 0.0  # the variance that dithered rounding adds to `kept`
    noise_limit: float = 0.0  # the largest that it could be, whatever the values
    largest: float = 0.0  # what one value may add to `kept` by a step
    lost: float = 0.0  # what float32's own rounding of W + s BA may take from it


def _prove_touched(
    proof: Proof, base: Base, deltas: Deltas, merged: Base, adapter: Path, name_in_file: Callable[[str], str]
) -> None:
    """Compare sampled rows of every tensor that was rounded anew, because of the adapter or of a new dtype."""
    merged_parameters = {parameter.name: parameter for parameter in merged.parameters}
    files_before = {stored.key: stored.file for stored in base.stored()}
    files_after = {stored.key: stored.file for stored in merged.stored()}
    total = Sums()
    for parameter in base.parameters:
        delta = deltas.by_name.get(parameter.name)
        after = merged_parameters[parameter.name]
        if delta is None and _list_dtypes(parameter) == _list_dtypes(after):
            continue
        disk_before = Disk(files_before, base.block, name_in_file)
        disk_after = Disk(files_after, base.block, name_in_file)
        with safe_open(adapter, framework="pt") as opened:
            expected = Expected(delta, opened)
        sums = _sum_samples(parameter, after, expected, disk_before, disk_after)
        proof.touched += 1
        proof.elements += sums.elements
        if sums.over:
            text = f"{parameter.name} is not W + s BA: {sums.over} sampled values, {sums.worst:.3g} x allowed"
            proof.deviations.append(text)
        if sums.change:
            kept = _prove_kept(proof, parameter.name, sums)
            if proof.least_kept is None or kept < proof.least_kept[1]:
                proof.least_kept = (parameter.name, kept)
            for name in ("change", "kept", "noise", "noise_limit", "lost"):
                setattr(total, name, getattr(total, name) + getattr(sums, name))
            total.largest = max(total.largest, sums.largest)
    if total.change:
        proof.kept = total.kept / total.change
        proof.explained = explain_share(total)
    if total.change and not proof.deviations:  # noise that hides a parameter's share hides the model's less
        _prove_kept(proof, "the model", total)


def _list_dtypes(parameter: Parameter) -> set[str]:
    return {piece.stored.dtype for piece in parameter.pieces}


def _sum_samples(parameter: Parameter, after: Parameter, expected: Expected, disk: Disk, disk_after: Disk) -> Sums:
    """Compare sampled rows of one parameter with the expected values."""
    sums = Sums()
    for sample in sample_boxes(parameter.shape, parameter.name):
        row = (*sample[:-1], (0, parameter.shape[-1])) if sample else sample  # full rows: DoRA needs their length
        for piece in parameter.pieces:
            box = intersect(row, locate_piece(piece))
            if box is None:
                continue
            # Experts that are stored one by one may become one tensor, never more than they were.
            merged_piece = next(other for other in after.pieces if intersect(box, locate_piece(other)) == box)
            shape = [stop - start for start, stop in box]
            before = disk.values(piece, box)[0].double().reshape(shape)
            merged = disk_after.values(merged_piece, box)[0].double().reshape(shape)
            exact, size = expected.values(before, box)
            kind = DTYPES[merged_piece.stored.dtype]
            is_dithered = expected.delta is not None and (kind in FORMATS or merged_piece.packed is not None)
            if is_dithered:
                step = measure_step(exact, kind, disk_after, merged_piece, box)
            else:
                step = exact.abs() * NEAREST[kind] + torch.finfo(kind).tiny  # half of one
            error = (exact - merged).abs()
            allowed = step + SLACK * size
            if merged_piece.packed:  # a block's largest values can't grow, and the row's others take that over
                allowed += step + (exact - before).abs()
            over = (error > allowed) | ~merged.isfinite()
            sums.elements += merged.numel()
            sums.over += int(over.sum())
            sums.worst = max(sums.worst, *(error / allowed)[over].tolist(), 0.0)
            if expected.delta is None:
                continue
            change = exact - before
            sums.change += float((change * change).sum())
            sums.kept += float(((merged - before) * change).sum())
            if is_dithered:
                place = change if merged_piece.packed else exact  # in 4 bits the base is where steps begin
                position = (place / torch.where(step == 0, 1.0, step)).frac().abs()
                moved = (change * step).abs()
                sums.noise += float((moved.square() * position * (1 - position)).sum())
                sums.noise_limit += float(moved.square().sum()) / 4
                sums.largest = max(sums.largest, float(moved.max()))
                sums.lost += float((change * size).abs().sum()) * NEAREST[torch.float32]
    return sums


def _prove_kept(proof: Proof, name: str, sums: Sums) -> float:
    """Check that a parameter holds its adapter, and return its share. Steps may be larger than an adapter's changes:
    only sums over many values show whether it is there."""
    kept = sums.kept / sums.change
    explained = explain_share(sums)
    if sums.noise and not abs(kept - 1) <= 0.05 + explained:
        explained_range = f"{1 - explained:.2f} to {1 + explained:.2f}"
        proof.deviations.append(f"{name} holds {kept:.2f} of its adapter, and rounding explains {explained_range}")
    return kept


def explain_share(sums: Sums) -> float:
    """Return by how much rounding may make the share of an adapter that is kept another than 1: six standard
    deviations, by Bernstein's inequality, because few values may move, or Hoeffding's."""
    noise = min(sums.largest + math.sqrt(sums.largest**2 + sums.noise), math.sqrt(sums.noise_limit))
    return (6 * noise + sums.lost) / sums.change


def measure_step(exact: Tensor, kind: torch.dtype, disk: Disk, piece: Piece, box: Box) -> Tensor:
    """Return the distances between the neighbours of values, which dithered rounding chooses from."""
    if piece.packed:
        scale = disk.unpack(piece, box)[1].double().abs().reshape(exact.shape)
        levels = code_levels(piece.packed.kind, exact.device).double()
        above = torch.bucketize(exact / torch.where(scale == 0, 1.0, scale), levels).clamp(1, len(levels) - 1)
        step: Tensor = (levels[above] - levels[above - 1]) * scale
        return step
    mantissa, least, _ = FORMATS[kind]
    scale = torch.ones(())
    if piece.scale is not None:
        scale = disk.scale(piece, [torch.arange(*span) for span in to_stored_box(piece, box)])
        scale = scale.reshape(()) if scale.numel() == 1 else scale.reshape(exact.shape)
    exponent = torch.frexp(exact / torch.where(scale == 0, 1.0, scale)).exponent - 1
    return torch.ldexp(torch.ones_like(exact), exponent.clamp(min=least) - mantissa) * scale


def list_unplaced(base: Base, model_class: str, folder: Path) -> list[str]:
    """Return the tensors of an exported adapter that plain PEFT finds no place for, and the places that stay empty."""
    import transformers
    from peft import PeftConfig, PeftModel, load_peft_weights, set_peft_model_state_dict

    from windlass.train.lora import ignore_peft_warnings
    from windlass.train.parallel import build_on_meta, make_config

    config: Any = make_config(base, torch.float32, "eager")
    if model_class != base.family.causal_lm:
        config = transformers.AutoConfig.from_pretrained(base.path)
    model = build_on_meta(getattr(transformers, model_class), config, torch.float32)
    saved = load_peft_weights(str(folder), "cpu")
    try:
        with ignore_peft_warnings():
            opened = PeftModel(model, PeftConfig.from_pretrained(str(folder)), low_cpu_mem_usage=True)
        outcome = set_peft_model_state_dict(opened, saved, low_cpu_mem_usage=True)
    except (ValueError, RuntimeError, KeyError) as error:  # no such module, another shape, no weight to train in full
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return [f"PEFT can't open it on {model_class}: {why[:300]}"]
    unplaced = [f"{name} has no place in {model_class}" for name in outcome.unexpected_keys]
    places = {name: p for name, p in opened.named_parameters() if "lora_" in name or ".modules_to_save." in name}
    unplaced += [f"{name} of {model_class} gets no tensor" for name in outcome.missing_keys if name in places]
    elements = sum(p.numel() for name, p in places.items() if "lora_" in name)
    stored = sum(tensor.numel() for name, tensor in saved.items() if "lora_" in name)
    if not unplaced and elements != stored:
        unplaced.append(f"{stored:,} values are saved, and {model_class} has place for {elements:,}")
    return unplaced


def read_free_memory() -> int:
    """Return the free bytes where a model is loaded: on the GPU, if there is one."""
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    import psutil  # type: ignore[import-untyped]

    return int(psutil.virtual_memory().available)


def compare_logits(base: Base, source: AdapterSource, to: Path) -> dict[str, Any]:
    """Compare logits; return a record: `skipped` says why it was not done, `deviation` what exceeds its bound.

    Everything runs in float32 on exactly the stored values, so the difference is the merge's alone. Rounding is
    harmless while it is small compared with what the adapter itself changes.
    """
    needed = 4 * base.total
    free = read_free_memory()
    if needed > FLOAT32_SHARE * free:
        return {"skipped": f"the model needs {needed / GIB:.1f} GiB in float32, and {free / GIB:.1f} GiB are free"}
    rows = sample_rows(source.run_folder, base.dims["vocab"])
    plain, adapted = compute_both_logits(open_adapter(load_float32(base), source.folder), rows)
    gc.collect()
    merged_base = read_base(to)
    merged = compute_logits(load_float32(merged_base), rows)
    record: dict[str, Any] = {"same_top_token": float((adapted.argmax(-1) == merged.argmax(-1)).float().mean())}
    for prefix, logits in (("", merged), ("adapter_", plain)):  # the adapter's own change, for comparison
        by_token, kl = (adapted - logits).abs().amax(-1), kl_by_token(adapted, logits)
        record[f"{prefix}kl"] = max(0.0, float(kl.mean()))
        record[f"{prefix}median_kl"] = max(0.0, float(kl.median()))
        record[f"{prefix}max_difference"] = float(by_token.max())
        record[f"{prefix}median_difference"] = float(by_token.median())
    # At a tie between two experts the last bit of a weight decides where a token goes, and its logits jump: with
    # experts the median token is judged, not the worst.
    judged, kl_key, judged_key = "largest", "kl", "max_difference"
    if "experts" in base.dims:
        judged, kl_key, judged_key = "median token", "median_kl", "median_difference"
    dtypes = {piece.stored.dtype for parameter in merged_base.parameters for piece in parameter.pieces}
    dtype = max(dtypes, key=list(BOUNDS).index)
    kl_bound, difference_bound = BOUNDS[dtype]
    over = []
    for key, bound_key, title, (least, share) in (
        (kl_key, "bound_kl", "KL", kl_bound),
        (judged_key, "bound_difference", f"the difference of the {judged}", difference_bound),
    ):
        bound = max(least, share * record[f"adapter_{key}"])
        record[bound_key] = bound
        if not record[key] <= bound:
            over.append(f"{title} is {record[key]:.3g}, over {bound:.3g}")
    record |= {"judged": judged, "dtype": dtype, "rows": list(rows.shape)}
    if over:
        record["deviation"] = f"the logits of base + adapter and merged differ: {', '.join(over)}"
        if dtype not in ("F32", "F64"):
            finer = "float32" if dtype in ("F16", "BF16") else "bf16"
            record["deviation"] += (
                f"; if nothing else is wrong, {dtype.replace('U8', '4 bits')} is too coarse for it: "
                f"merge with --dtype {finer}, or serve the adapter unmerged, in float32"
            )
    return record
