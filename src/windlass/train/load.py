"""The certified loader: every rank reads its own part of every weight, exactly, and proves it before step 1.

`from_pretrained(distributed_config=...)` also reads by shards, but with transformers 5.23:

- the causal LM class finds none of a wrapper's `language_model.` keys: every weight stays random, with one log line;
- with a `key_mapping` for them, FP8 weights stay raw codes, because the scales' keys are not mapped along;
- through the wrapper class linears load correctly, but the fused experts' `*_scale_inv` are dropped;
- block scales are assumed to divide a matrix evenly: wrong if its sides are no multiples of 128.

Unquantized models load exactly, but nothing stops a run with missing keys.

What works is reused: the model on the meta device, the sharding (parallel.py), the order of tying weights and computing
buffers, and shard-on-read as the certificate's second opinion. When upstream converts FP8 experts exactly under
`distributed_config` and can fail on missing keys, reading.py can go.
"""

import contextlib
import math
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from windlass.compat import find_local_part
from windlass.data.tokenize import open_tokenizer
from windlass.errors import RunError
from windlass.model import Base
from windlass.model.stored import UNTIE, find_untied_heads
from windlass.plan import Plan
from windlass.plan.layout import Layout
from windlass.ranks.collectives import all_gather, get_rank, get_world_size, raise_together
from windlass.settings import LOADER_THREADS
from windlass.train import parallel
from windlass.weights.blanks import Blanks, judge_blanks
from windlass.weights.certificate import check_buffers, check_parameters, make_certificate
from windlass.weights.fill import FillSource, LocalPart, fill_codes, fill_quantized, fill_scale, fill_values
from windlass.weights.quantized import QuantizedParam, list_quantized_params
from windlass.weights.reading import NEEDS_SCALE, DamagedError, Files
from windlass.weights.same_base import (
    FETCH_AGAIN,
    Part,
    combine_digests,
    find_fetch_differences,
    find_other_copies,
    has_published_digest,
)

NOTHING: Mapping[str, QuantizedParam] = MappingProxyType({})
DAMAGED = "nothing was trained; compare the files with their publisher's checksums, or fetch them again"
ANOTHER = "nothing was trained; config.json and the weights must be of the same model: fetch the folder again"
UNEQUAL = "nothing was trained; give all nodes the same copy of the base model"
UNSET = "nothing was trained; report it with the output of `windlass bug-report RUN`, and train a model that was tried"
FAULTY = "nothing was trained; the files changed while they were read, or a node's memory or storage is at fault"


def describe_precision(plan: Plan) -> dict[str, Any]:
    """Return in what precision the base is loaded, as arguments of `load_base`."""
    model = plan.run.model
    return {
        "dtype": getattr(torch, model.torch_dtype),
        "attn_implementation": model.attn_implementation or plan.base.family.usual_attention,
        "dtypes": dict.fromkeys((*plan.adapter.in_full, *plan.adapter.biases), getattr(torch, plan.run.lora.dtype)),
    }


def open_base_tokenizer(plan: Plan) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = open_tokenizer(plan.base, plan.run.model, plan.where)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def load_base(
    base: Base,
    layout: Layout,
    *,
    dtype: torch.dtype = torch.bfloat16,
    attn_implementation: str = "",
    dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
    tokens: int = 0,
) -> tuple[transformers.PreTrainedModel, dict[str, Any]]:
    """Return the causal LM of `base`, sharded by `layout` and filled, and its certificate (load.json).

    `dtypes`: parameters with another dtype, by name; `tokens`: how many ids the tokenizer has. Called on every rank;
    returns on all ranks or raises on all ranks.
    """
    started = time.perf_counter()
    before = reset_peak_rss()
    where = str(base.path or base.name)
    attn_implementation = attn_implementation or base.family.usual_attention
    model = parallel.build_model(base, layout, dtype, attn_implementation, dtypes)
    parallel.assert_sharded(model, layout)
    parallel.allocate(model, layout)
    targets = list_unique_tensors(model)
    quantized = list_quantized_params(model)

    stored = {parameter.name: parameter for parameter in base.parameters}
    unlike = [f"{name} is missing from the checkpoint" for name in targets if name not in stored]
    for name, parameter in stored.items():
        if name not in targets:
            unlike.append(f"{name} is not a parameter of {base.family.causal_lm}")
        elif unquantized_shape(name, targets[name].shape, quantized) != tuple(parameter.shape):
            unlike.append(f"{name} is {list(targets[name].shape)} in the model, {list(parameter.shape)} on disk")
    raise_together(unlike, where, ANOTHER, "unlike-checkpoint")
    raise_together(find_untied_heads(base, get_rank(), get_world_size()), where, UNTIE, "untied-head")
    if layout.is_sharded and layout.shard > layout.gpus_per_node:  # else each node reads everything
        raise_together(find_other_copies(base), where, UNEQUAL, "copies-differ")
    errors: dict[str, list[float]] = {}
    blanks = Blanks()
    problems, bytes_read, parts = read_all(targets, base, quantized, errors, blanks)
    raise_together(problems, where, DAMAGED, "damaged-weights")
    digest, problems = combine_digests(all_gather(parts))
    raise_together(problems, where, UNEQUAL, "copies-differ")
    raise_together(find_fetch_differences(base, digest), where, FETCH_AGAIN.format(folder=where), "not-as-fetched")
    damage, notes = judge_blanks(base, all_gather(blanks.rows()), tokens)
    if has_published_digest(base):  # the publisher's own
        notes = [*damage, *notes]
        damage = []
    raise_together(damage, where, DAMAGED, "damaged-weights")
    wrong, checked = check_parameters(targets, base, get_rank(), quantized)
    raise_together(wrong, where, FAULTY, "loaded-wrong", RunError)
    buffers = parallel.list_true_buffers(base, dtype, attn_implementation)
    raise_together(check_buffers(model, buffers), where, UNSET, "loaded-wrong", RunError)
    checked["buffers"] = len(buffers)
    model.requires_grad_(False)
    measured = {
        "rank": get_rank(),
        "parameters": len(targets),
        "bytes_read": bytes_read,
        "peak_rss_bytes": read_peak_rss(),
        "rss_before_bytes": before,
        "seconds": round(time.perf_counter() - started, 3),
    }
    stored_as: dict[str, torch.dtype | str] = {name: tensor.dtype for name, tensor in targets.items()}
    stored_as |= {name: weight.format.kind or weight.format.codes for name, weight in quantized.items()}
    certificate = make_certificate(base, layout.name, layout.base_dtype, stored_as, digest, checked, measured, errors)
    return model, certificate | {"notes": notes}


def list_unique_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers that the base model must fill, by name, tied tensors once."""
    named: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        named.setdefault(id(tensor), (name, tensor))
    return dict(named.values())


def view_own_part(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return the memory of this rank's part of a parameter, and where the part begins in the parameter."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), (0,) * tensor.ndim
    local: Tensor = tensor.to_local().detach()
    shape, offset = find_local_part(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(shape) != tuple(local.shape):
        raise AssertionError(f"a part of {tuple(local.shape)} where {shape} was computed")
    return local, tuple(offset)


@torch.no_grad()
def read_all(
    targets: Mapping[str, Tensor],
    base: Base,
    quantized: Mapping[str, QuantizedParam] = NOTHING,
    errors: dict[str, list[float]] | None = None,
    blanks: Blanks | None = None,
) -> tuple[list[str], int, dict[str, Part]]:
    """Fill this rank's part of every parameter. Returns problems, the bytes read from files, and each part's digest.

    `errors`: filled, for each parameter quantized to 4 bits here, with the sums of squares of the errors and of the
    values. `blanks`: collects rows of zeros.

    FP8 parameters get their codes as stored, and scales: all of a matrix's, or of a stack those of this rank's experts.

    Whatever the headers promise, memory that nothing was read into is a problem: it would train as random numbers.
    """
    problems: list[str] = []
    unread = dict.fromkeys(targets)
    parts = dict[str, Part]()
    with Files() as files, ThreadPoolExecutor(LOADER_THREADS) as pool:
        source = FillSource(files, base.block, pool, blanks)
        for parameter in base.parameters:
            memory, offset = view_own_part(targets[parameter.name])
            weight = quantized.get(parameter.name)
            shape = unquantized_shape(parameter.name, memory.shape, quantized)
            box = tuple((start, start + size) for start, size in zip(offset, shape, strict=True))
            sums = list[Tensor]()
            bare = [p.stored.key for p in parameter.pieces if p.stored.dtype in NEEDS_SCALE and p.scale is None]
            problems += [f"{key!r} is FP8 and has no scale" for key in bare]
            try:
                if weight is None:
                    filled, digest = fill_values(LocalPart(memory, box), parameter.pieces, source)
                elif not weight.format.kind:
                    fill_scale(weight.scale, weight.first, parameter, files, base.block, weight.format.block)
                    codes = LocalPart(memory.view(weight.format.codes), box)
                    filled, digest = fill_codes(codes, parameter.pieces, source)
                elif parameter.pieces[0].packed:
                    filled, digest = fill_codes(LocalPart(memory, box), parameter.pieces, source)
                else:
                    part = LocalPart(memory, box)
                    filled, digest = fill_quantized(part, parameter.pieces, source, weight.format.kind, sums)
                if filled != math.prod(shape):
                    continue
                parts[parameter.name] = offset, shape, digest
                if sums and errors is not None:
                    errors[parameter.name] = torch.stack(sums).sum(0).tolist()
            except (OSError, DamagedError) as error:
                problems.append(f"{parameter.name}: {error}")
            del unread[parameter.name]
        return [*problems, *(f"{name} was not read" for name in unread)], files.bytes_read, parts


def unquantized_shape(name: str, stored: Sequence[int], quantized: Mapping[str, QuantizedParam]) -> tuple[int, ...]:
    """Return the shape of a parameter's values (or of a part's): stored rows of 4-bit weights are bytes."""
    return quantized[name].format.shape(stored) if name in quantized else tuple(stored)


def reset_peak_rss() -> int:
    """Return resident memory now, and restart the count of its peak if the kernel allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    resident: int = psutil.Process().memory_info().rss
    return resident


def read_peak_rss() -> int:
    """Return the peak of resident memory since `reset_peak_rss`, or since the process began."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
