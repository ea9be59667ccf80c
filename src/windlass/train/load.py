"""The certified loader: every rank reads its own part of every weight, exactly, and proves it before step 1.

Why not `from_pretrained(distributed_config=...)`, which also reads by shards. With transformers 5.23:
- the causal LM class finds none of a wrapper's `language_model.` keys: every weight random, a line in a log;
- with a `key_mapping` for them, FP8 weights stay raw codes, because the scales' keys are not mapped along;
- through the wrapper class the linears come out right, but the fused experts' `*_scale_inv` are dropped;
- block scales are taken to divide a matrix evenly: wrong where its sides are no multiples of 128.
Unquantised checkpoints load exactly, but nothing stops a run whose keys are missing.
What is right is used: the model on the meta device, the sharding (shard.py), the order of tying and of computing
buffers, and the shard-on-read arithmetic as second opinion of the certificate. When upstream converts FP8 experts
exactly under `distributed_config` and can be made to fail on missing keys, reading.py can go.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from windlass.errors import RunError
from windlass.model import Base, Parameter
from windlass.plan.layout import Layout
from windlass.train import fp8, shard
from windlass.train.certificate import Certificate, check, parameter_record, unread_records
from windlass.train.fp8 import Held
from windlass.train.group import gather, raise_together, rank
from windlass.train.reading import (
    DTYPES,
    NEEDS_SCALE,
    Box,
    Files,
    TruncatedError,
    fill,
    fill_codes,
    fill_scale,
    piece_box,
    scale_fits,
)

DAMAGED = "nothing was trained; compare the files with their publisher's checksums, or fetch them again"
ANOTHER = "nothing was trained; config.json and the weights must be of the same model: fetch the folder again"
FAULTY = "nothing was trained; the files changed while they were read, or a node's memory or storage is at fault"


def load(
    checkpoint: Base,
    layout: Layout,
    *,
    dtype: torch.dtype = torch.bfloat16,
    attn_implementation: str = "sdpa",
) -> tuple[transformers.PreTrainedModel, Certificate]:
    """The causal language model of `checkpoint`, sharded as `layout` says and filled, with its certificate.

    Every rank of the run calls it. It returns on all ranks or raises on all ranks.
    """
    started, before = time.perf_counter(), reset_peak_rss()
    where = str(checkpoint.path or checkpoint.name)
    raise_together(stored_problems(checkpoint), where, DAMAGED)
    model = shard.build(checkpoint, layout, dtype, attn_implementation)
    shard.assert_sharded(model, layout)
    shard.allocate(model, layout)
    targets, held = unique_tensors(model), fp8.held(model)
    raise_together(model_problems(targets, checkpoint), where, ANOTHER)
    problems, filled, bytes_read = read_all(targets, checkpoint, held)
    raise_together([*problems, *not_filled(targets, filled)], where, DAMAGED)
    wrong, checked = check(targets, checkpoint, rank(), held)
    raise_together(wrong, where, FAULTY, RunError)
    model.requires_grad_(False)
    mine = {
        "rank": rank(),
        "parameters": len(filled),
        "bytes_read": bytes_read,
        "peak_rss_bytes": peak_rss(),
        "rss_before_bytes": before,
        "seconds": round(time.perf_counter() - started, 3),
    }
    dtypes = {name: held[name].coding.codes if name in held else tensor.dtype for name, tensor in targets.items()}
    return model, _certificate(checkpoint, layout, dtypes, checked, mine)


def unique_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Everything that a checkpoint has to fill, a tied tensor once: parameters and persistent buffers by name."""
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            named[name] = tensor
    return named


def stored_problems(checkpoint: Base) -> list[str]:
    """What is wrong with the stored tensors and the way they make up parameters. Headers only."""
    block = checkpoint.block
    problems: list[str] = []
    sizes: dict[Path, int] = {}
    for parameter in checkpoint.parameters:
        if not parameter.pieces:
            problems.append(f"{parameter.name} has no stored tensor")
            continue
        if not tiles([piece_box(piece) for piece in parameter.pieces], parameter.shape):
            keys = ", ".join(repr(piece.stored.key) for piece in parameter.pieces[:3])
            problems.append(f"{parameter.name} {list(parameter.shape)} is not filled exactly by {keys}")
        for piece in parameter.pieces:
            for stored in (piece.stored, *([piece.scale] if piece.scale else [])):
                if stored.file not in sizes:
                    sizes[stored.file] = stored.file.stat().st_size if stored.file.is_file() else -1
                if stored.dtype not in DTYPES:
                    problems.append(f"{stored.key!r} has the dtype {stored.dtype}, which is no dtype of weights")
                elif stored.end - stored.start != math.prod(stored.shape) * DTYPES[stored.dtype].itemsize:
                    problems.append(f"{stored.key!r} has {stored.end - stored.start} bytes for {list(stored.shape)}")
                if sizes[stored.file] < stored.end:
                    problems.append(f"{stored.file.name} is missing or ends within {stored.key!r}")
            if piece.stored.dtype in NEEDS_SCALE and piece.scale is None:
                problems.append(f"{piece.stored.key!r} is FP8 and has no scale")
            elif piece.scale is not None and not scale_fits(piece.scale.shape, piece.stored.shape, block):
                problems.append(
                    f"{piece.scale.key!r} {list(piece.scale.shape)} does not fit {list(piece.stored.shape)}"
                )
    return problems


def tiles(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Whether boxes cover a shape without gap or overlap, as stacks of stacks: rows of experts, halves of each."""
    if not shape:
        return len(boxes) == 1
    groups: dict[tuple[int, int], list[Box]] = {}
    for box in boxes:
        groups.setdefault(box[0], []).append(box[1:])
    reached = 0
    for start, stop in sorted(groups):
        if start != reached or stop <= start:
            return False
        reached = stop
    return reached == shape[0] and all(tiles(group, shape[1:]) for group in groups.values())


def model_problems(targets: dict[str, Tensor], checkpoint: Base) -> list[str]:
    """Names and shapes: what the model has and the checkpoint lacks, and the other way round."""
    held = {parameter.name: parameter for parameter in checkpoint.parameters}
    problems = [f"{name} is missing from the checkpoint" for name in targets if name not in held]
    for name, parameter in held.items():
        if name not in targets:
            problems.append(f"{name} is no parameter of {checkpoint.family.causal_lm}")
        elif tuple(targets[name].shape) != tuple(parameter.shape):
            problems.append(f"{name} is {list(targets[name].shape)} in the model, {list(parameter.shape)} on disk")
    return problems


def own_part(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The memory of this rank's part of a parameter, and where it begins in the whole."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), (0,) * tensor.ndim
    local: Tensor = tensor.to_local().detach()
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(shape) != tuple(local.shape):
        raise AssertionError(f"a part of {tuple(local.shape)} where {shape} was computed")
    return local, tuple(offset)


@torch.no_grad()
def read_all(
    targets: dict[str, Tensor], checkpoint: Base, held: Mapping[str, Held] = MappingProxyType({})
) -> tuple[list[str], set[str], int]:
    """Fill this rank's part of every parameter. Returns what went wrong, the names filled, the bytes asked of files.

    `held` are those that stay in FP8: they get their codes as they are, and every rank their scales whole.
    """
    block = checkpoint.block
    problems: list[str] = []
    filled: set[str] = set()
    with Files() as files:
        for parameter in checkpoint.parameters:
            local, offset = own_part(targets[parameter.name])
            try:
                if stays := held.get(parameter.name):
                    fill_codes(local.view(stays.coding.codes), offset, parameter.pieces, files)
                    fill_scale(stays.scale, stays.first, parameter, files, block, stays.coding.sides)
                else:
                    fill(local, offset, parameter.pieces, files, block)
                filled.add(parameter.name)
            except (OSError, TruncatedError) as error:
                problems.append(f"{parameter.name}: {error}")
        return problems, filled, files.bytes_read


def not_filled(targets: Iterable[str], filled: Collection[str]) -> list[str]:
    """Whatever the headers promised: memory that nothing was read into would train as random numbers."""
    return [f"{name} was not read" for name in targets if name not in filled]


def _certificate(
    checkpoint: Base,
    layout: Layout,
    dtypes: dict[str, torch.dtype],
    checked: dict[str, int],
    mine: dict[str, Any],
) -> Certificate:
    """The whole run's certificate, the same on every rank."""
    ranks: list[tuple[dict[str, Any], dict[str, int]]] = gather((mine, checked))
    parameters: tuple[Parameter, ...] = checkpoint.parameters
    return Certificate(
        checkpoint=str(checkpoint.path or checkpoint.name),
        layout=layout.name,
        parameters=[parameter_record(parameter, dtypes[parameter.name]) for parameter in parameters],
        loaded=min(each["parameters"] for each, _ in ranks),
        unread=unread_records(checkpoint),
        checked={
            "parameters": min(counts["parameters"] for _, counts in ranks),
            "slices": sum(counts["slices"] for _, counts in ranks),
            "elements": sum(counts["elements"] for _, counts in ranks),
        },
        ranks=[each for each, _ in ranks],
    )


def reset_peak_rss() -> int:
    """Resident memory now; where the kernel allows it, the peak is counted from here on."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return peak_rss()
    return _status_bytes("VmRSS")


def peak_rss() -> int:
    """The most resident memory since `reset_peak_rss`, or of the whole process where that can't be reset."""
    if Path("/proc/self/status").exists():
        return _status_bytes("VmHWM")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _status_bytes(field: str) -> int:
    with Path("/proc/self/status").open() as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(f"{field}:"))
