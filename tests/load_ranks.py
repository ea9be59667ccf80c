"""Runs in every rank of tests/test_load.py: many cases in one start of the processes; each passes or returns why
not."""

import json
import math
import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from windlass.errors import UserError
from windlass.model import Base, read_base
from windlass.model.family import FAMILIES
from windlass.model.targets import resolve_adapter
from windlass.plan.layout import Layout
from windlass.ranks.collectives import all_gather, raise_together
from windlass.runfile import Lora
from windlass.settings import FOUR_BITS
from windlass.train import fsdp, parallel
from windlass.train.liveness import Liveness
from windlass.train.load import list_unique_tensors, load_base, view_own_part
from windlass.train.lora import attach_adapter
from windlass.train.sync import ReplicaGroups, to_local
from windlass.weights import certificate, quantized
from windlass.weights.same_base import digest_files, format_total

PREFIXES = {r"^language_model\.model\.": "model.", r"^language_model\.lm_head": "lm_head"}
TOKENS = torch.arange(24)[None] % 200
VICTIM = "model.layers.1.mlp.experts.down_proj"
MIB = 2**20
MIXED = "have copies of the base model that are not equal: model.safetensors differs"

# Every layout in which such a model comes. Sizes that no number of ranks divides are there on purpose.
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "published": {"both_layouts": True},
    "blocks": {"quantization": "block128", "hidden": 256, "moe_intermediate": 160, "files": 3},
    "tied": {"files": 2, "tied": True, "dtype": "float32", "quantization": "none"},
    "uneven": {"family": "mistral", "vocab": 515, "hidden": 60, "heads": 3, "intermediate": 130, "wrapper": True},
    "llama": {"family": "llama", "tied": True, "config": {"attention_bias": True}},
    "mixtral": {"family": "mixtral", "quantization": "tensor", "experts": 12},
    # Blocks of 128 in matrices of 160 rows, two of which are fused: the second one's begin at row 160.
    "qwen3_moe": {"family": "qwen3_moe", "quantization": "block128", "hidden": 192, "moe_intermediate": 160},
    "channels": {"family": "qwen3_moe", "quantization": "fp8-channel"},  # compressed-tensors'
}
LARGE: dict[str, Any] = {"hidden": 1024, "heads": 8, "experts": 16, "moe_intermediate": 1024, "layers": 6}
IN_FP8 = ("published", "blocks", "mixtral", "qwen3_moe", "channels")
QUANTIZED = ("published", "llama")  # to NF4, when loaded
# Stored in 4 bits, as others made them; compressed-tensors' in a family with fused experts, and without.
PUBLISHED = (("bnb", "nf4"), ("oss", "mxfp4"), ("nv", "nvfp4"), ("words", "int4"), ("shifted", "uint4"))
COMPRESSED = {"nv": ("mistral4", "nvfp4"), "words": ("qwen3_moe", "int4"), "shifted": ("llama", "uint4")}
TRAINING: tuple[tuple[str, dict[str, Any]], ...] = (
    ("published", {"layout": "full-shard"}),
    ("published", {"layout": "no-reshard", "micro": 2}),
    ("blocks", {"layout": "expert-parallel", "checkpointing": True}),
    ("llama", {"layout": "full-shard", "base_dtype": "bf16", "bias": "all"}),
    ("channels", {"layout": "full-shard"}),
    ("nv", {"layout": "expert-parallel", "base_dtype": "nvfp4", "checkpointing": True}),
    ("shifted", {"layout": "hybrid", "base_dtype": "uint4"}),
)
IN_TWO = (  # on two ranks alone
    ("bnb", {"layout": "expert-parallel", "base_dtype": "nf4", "checkpointing": True}),
    ("oss", {"layout": "full-shard", "base_dtype": "mxfp4", "checkpointing": True}),
)
# Run by `make prove`, on two ranks
LATER: tuple[tuple[str, dict[str, Any]], ...] = (
    ("published", {"layout": "resident", "count": 10}),
    ("published", {"layout": "resident", "base_dtype": "nf4", "count": 10}),
    ("published", {"layout": "full-shard", "base_dtype": "nf4"}),
    ("published", {"layout": "no-reshard", "base_dtype": "nf4", "micro": 2}),
    ("published", {"layout": "hybrid", "base_dtype": "nf4"}),
    ("published", {"layout": "expert-parallel", "base_dtype": "nf4", "checkpointing": True}),
    ("llama", {"layout": "full-shard", "base_dtype": "nf4"}),
)
USUAL = {"blocks": "expert-parallel", "qwen3_moe": "expert-parallel"}
FOUR = ("published", "uneven", "mixtral", "channels")  # what four ranks are tried on
DTYPE = {"tied": torch.float32}


def layouts(experts: bool = True) -> dict[str, Layout]:
    ranks = dist.get_world_size()
    layout = partial(Layout, reason="test", nodes=1, gpus_per_node=ranks, precision="no")
    named = {
        "full-shard": layout("full-shard", shard=ranks),
        "no-reshard": layout("no-reshard", shard=ranks, reshard_after_forward=False),
        "hybrid": layout("hybrid", shard=ranks // 2, replicate=2),
        "resident": layout("resident", shard=1, replicate=ranks),
    }
    if experts:
        split = partial(layout, "expert-parallel", shard=ranks, expert_parallel=2)
        named |= {"expert-parallel": split(), "expert-parallel-kept": split(reshard_after_forward=False)}
        if ranks == 4:
            named["expert-parallel-hybrid"] = split(shard=2, replicate=2)
            named["expert-parallel-whole"] = split(expert_parallel=4)
    return named


# --- the truth ---


def dequantize(directory: Path, target: Path, dtype: torch.dtype) -> None:
    """Return the same checkpoint without FP8, by this file's own arithmetic: the true weights."""
    stored: dict[str, Tensor] = {}
    for file in directory.glob("model*.safetensors"):
        stored.update(load_file(file))
    true: dict[str, Tensor] = {}
    for key, weight in stored.items():
        if key.endswith(("_scale_inv", "activation_scale", "weight_scale")) or "vision" in key or "multi_modal" in key:
            continue
        scale = stored.get(f"{key}_scale_inv", stored.get(f"{key}_scale"))
        wide = weight.float()
        if scale is not None and scale.shape[-1:] == (1,) and scale.ndim == 3:
            wide = torch.stack([one * float(s) for one, s in zip(wide, scale.flatten(), strict=True)])
        elif scale is not None and scale.ndim == 0:
            wide = wide * float(scale)
        elif scale is not None and scale.shape == (len(weight), 1):
            wide = torch.stack([row * float(s) for row, s in zip(wide, scale.flatten(), strict=True)])
        elif scale is not None:
            rows, columns = weight.shape[-2:]
            for i in range(math.ceil(rows / 128)):
                for j in range(math.ceil(columns / 128)):
                    square = wide[..., i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
                    square *= scale[..., i, j].float()[..., None, None]
        true[key] = wide.to(dtype)
    target.mkdir(parents=True)
    save_file(true, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    text = config.get("text_config", config)
    text.pop("quantization_config", None)
    (target / "config.json").write_text(json.dumps(text))


def write_decoded(directory: Path, target: Path, kind: str) -> None:
    """Write the float32 checkpoint that a 4-bit base represents, decoded by this file's own arithmetic."""
    base = read_base(directory)
    alone = Layout("resident", "test", 1, 1, shard=1, base_dtype=kind, precision="no")
    model, _ = load_base(base, alone, dtype=torch.float32)
    stored, true = list_unique_tensors(model), {}
    for name, weight in quantized.list_quantized_params(model).items():
        columns, block = weight.format.columns, weight.format.block[1]
        numbers = torch.tensor(FOUR_BITS[kind].numbers)
        rows = stored.pop(name).detach().flatten(0, -2)
        codes = torch.stack([rows[:, : columns // 2] >> 4, rows[:, : columns // 2] & 15], -1).flatten(1)
        scale = rows[:, columns // 2 :].contiguous().view(torch.bfloat16).float()
        values = numbers[codes.long()] * scale[:, torch.arange(columns) // block]
        true[name] = values.view(next(p.shape for p in base.parameters if p.name == name)).contiguous()
    target.mkdir(parents=True)
    save_file(
        {**{name: tensor.detach().float() for name, tensor in stored.items()}, **true}, target / "model.safetensors"
    )
    config = json.loads((directory / "config.json").read_text())
    text = config.get("text_config", config)
    text.pop("quantization_config", None)
    (target / "config.json").write_text(json.dumps(text))


def write_unpacked(directory: Path, target: Path, kind: str) -> None:
    """Write a checkpoint published in 4 bits in float32: read by transformers, and as bitsandbytes reads its own."""
    stored = load_file(directory / "model.safetensors")
    true = {key: tensor for key, tensor in stored.items() if key.endswith(("weight", "bias", "sinks"))}
    for key in [key for key in stored if key.endswith("_blocks")]:
        name = key.removesuffix("_blocks")
        true[name] = convert_moe_packed_tensors(stored[key], stored[f"{name}_scales"])
    for key in [key for key in stored if key.endswith(".absmax")]:
        name = key.removesuffix(".absmax")
        state = json.loads(stored[f"{name}.quant_state.bitsandbytes__nf4"].numpy().tobytes())
        own = stored[f"{name}.nested_absmax"].repeat_interleave(state["nested_blocksize"])[: stored[key].numel()]
        scales = stored[f"{name}.nested_quant_map"][stored[key].long()] * own + state["nested_offset"]
        codes = torch.cat([stored[name] >> 4, stored[name] & 15], -1).flatten()
        values = stored[f"{name}.quant_map"][codes.long()] * scales.repeat_interleave(state["blocksize"])
        true[name] = values.view(state["shape"])
    for key in [key for key in stored if key.endswith(".weight_packed")]:
        name = key.removesuffix("_packed")
        true[name] = unpack({end: stored.get(f"{name}{end}") for end in ENDS})
    target.mkdir(parents=True)
    save_file({name: tensor.float() for name, tensor in true.items()}, target / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config.pop("quantization_config", None) or config["text_config"].pop("quantization_config")
    assert len(true) < len(stored), kind
    (target / "config.json").write_text(json.dumps(config))


ENDS = ("_packed", "_scale", "_global_scale", "_zero_point")


def unpack(parts: Any) -> Tensor:
    """Return a matrix from compressed-tensors' tensors, one number after the other."""
    packed, scale, factor, zeros = (parts[end] for end in ENDS)
    data = packed.numpy().tobytes()
    columns = 2 * len(data) // len(packed)
    rows = [[0.0] * columns for _ in packed]
    scales = (scale.float() if factor is None else scale.float() / factor[0]).tolist()
    shifts = None if zeros is None else zeros.tolist()
    for i in range(len(packed)):
        for j in range(columns):
            code = data[(i * columns + j) // 2] >> 4 * (j % 2) & 15
            group = j * scale.shape[1] // columns
            if factor is not None:
                number = (0, 0.5, 1, 1.5, 2, 3, 4, 6)[code & 7] * (-1 if code & 8 else 1)
            else:
                zero = 0 if shifts is None else (int(shifts[i // 8][group]) >> 4 * (i % 8) & 15) - 8
                number = code - 8 - zero
            rows[i][j] = number * scales[i][group]
    return torch.tensor(rows)


def truth(directory: Path, dtype: torch.dtype) -> Any:
    """Return the true model, loaded by transformers only, unsharded."""
    family = json.loads((directory / "config.json").read_text())["model_type"]
    model_class = getattr(transformers, FAMILIES[family].causal_lm)
    model, info = model_class.from_pretrained(directory, dtype=dtype, key_mapping=PREFIXES, output_loading_info=True)
    assert not any(info.values()), info
    return model


class Wire(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that all-gathers give to this rank."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather" in str(func):
            self.bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def passed(model: Any) -> list[Tensor]:
    """Return logits of random inputs, the gradient that reaches the inputs, and logits of tokens, after a gather."""
    dice = torch.Generator().manual_seed(dist.get_rank())
    embedded = torch.randn(1, 24, model.config.hidden_size, generator=dice).to(model.dtype).requires_grad_()
    logits = model(inputs_embeds=embedded).logits.float()
    (gradient,) = torch.autograd.grad(logits.square().mean(), embedded)
    with torch.no_grad():
        return [logits.detach(), gradient, model(TOKENS).logits]


# --- every checkpoint under every layout ---


def equal(root: Path, name: str, reference: Any, outcome: list[Tensor], wires: dict[str, int], layout: Layout) -> None:
    """Require weights equal to the truth bit for bit, equal logits and gradient, and no unneeded byte read or sent."""
    base = read_base(root / name)
    model, made = load_base(base, layout, dtype=reference.dtype)
    parallel.assert_sharded(model, layout)
    true, mine, in_fp8 = (
        dict(reference.named_parameters()),
        dict(model.named_parameters()),
        quantized.list_quantized_params(model),
    )
    assert mine.keys() == true.keys()
    assert not any(tensor.requires_grad for tensor in mine.values())
    assert {isinstance(tensor, DTensor) for tensor in mine.values()} == {layout.name != "resident"}
    assert made["checked"]["slices"] >= dist.get_world_size() * made["checked"]["parameters"] / 2
    assert made["base_digest"] == digest_files(base)
    assert (len(in_fp8) > 10) == (layout.base_dtype == "fp8")
    pieces = [piece for parameter in base.parameters for piece in parameter.pieces]
    stored = sum(each.end - each.start for piece in pieces for each in (piece.stored, piece.scale) if each)
    for own in made["ranks"]:
        if not layout.expert_parallel > 1:
            # Scales are read by every rank: all of a matrix's.
            assert own["bytes_read"] <= 1.05 * stored / (layout.shard if layout.name != "resident" else 1)
    parts = {key: view_own_part(tensor) for key, tensor in mine.items()}
    with torch.no_grad():
        for key, (part, offset) in parts.items():
            wanted = true[key]
            if key in in_fp8:
                wanted = wanted[tuple(slice(o, o + size) for o, size in zip(offset, part.shape, strict=True))]
                scale = in_fp8[key].scale
                if part.ndim == 3:
                    scale = scale[offset[0] - in_fp8[key].first :][: len(part)]
                part = quantized.dequantize(part, scale, in_fp8[key].format, reference.dtype, (offset[-2], offset[-1]))
            else:
                tensor = mine[key]
                part = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(part, wanted), key
    with Wire() as wire:  # type: ignore[no-untyped-call]
        found = passed(model)
    # Expert parallelism adds the experts' outputs in another order; in float32 a CPU's sums go by where memory begins.
    slack = 0.02 if layout.expert_parallel > 1 else 1e-6 if reference.dtype == torch.float32 else 0.0
    for one, other in zip(found, outcome, strict=True):
        assert (one - other).abs().max() <= slack * max(1.0, float(other.abs().max()))
    case = f"{name} {layout}"
    wires[case] = wire.bytes
    if not in_fp8:
        return
    # A weight is one byte in memory and on the wire. Embeddings, head, norms and routers stay in 16 bits.
    assert "float8_e4m3fn" in {each["dtype"] for each in made["parameters"]}
    own_bytes = sum(part.untyped_storage().nbytes() for part, _ in parts.values())
    assert own_bytes == sum((1 if key in in_fp8 else 2) * part.numel() for key, (part, _) in parts.items())
    saved = wires[f"{name} {replace(layout, base_dtype='bf16')}"] - wire.bytes
    # Full shard gathers each layer for its forward, for its backward, and for the forward after that.
    gathers = {"full-shard": 3, "no-reshard": 2}.get(layout.name, 0)
    assert saved == gathers * sum(math.prod(true[key].shape) for key in in_fp8) if gathers else saved >= 0


def bounded(root: Path, base_dtype: str) -> None:
    """A model large enough for its bytes and memory to stand out."""
    base = read_base(root / "large")
    _, made = load_base(base, replace(layouts()["full-shard"], base_dtype=base_dtype))
    stored = sum(piece.stored.end - piece.stored.start for p in base.parameters for piece in p.pieces)
    sizes = [2 * math.prod(parameter.shape) for parameter in base.parameters]
    assert sum(sizes) > 500 * MIB  # else the constants below hide a whole model
    for own in made["ranks"]:
        assert own["bytes_read"] <= 1.05 * stored / 2
        grown = own["peak_rss_bytes"] - own["rss_before_bytes"]
        if base_dtype == "fp8":  # read straight to where it stays: no 16-bit copy, nothing converted
            assert grown <= sum(sizes) / 4 + 150 * MIB
        else:
            assert grown <= sum(sizes) / 2 + max(sizes) + 200 * MIB
            assert grown <= 0.9 * sum(sizes)


# --- faults ---


def spoilt(root: Path, what: str, base_dtype: str, layout: str, named: str) -> None:
    """Return the certificate's findings on every rank, of parts that ranks have swapped, or of one slightly wrong
    part."""
    base, number = read_base(root / "published"), dist.get_rank()
    model, _ = load_base(base, replace(layouts()[layout], base_dtype=base_dtype))
    targets, in_fp8 = list_unique_tensors(model), quantized.list_quantized_params(model)
    mine = in_fp8[VICTIM].scale if "scales" in what else view_own_part(targets[VICTIM])[0]
    if "swapped" in what:
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine.contiguous())
        mine.copy_(parts[(number + 1) % len(parts)])
    elif number == 1:
        mine.mul_(1.0078125)  # one unit in BF16's last place
    found = refused(
        lambda: raise_together(
            certificate.check_parameters(targets, base, number, in_fp8)[0], "check", "", "loaded-wrong"
        )
    )
    assert named in found


def refused(act: Callable[[], Any]) -> str:
    try:
        act()
    except UserError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def other_copy(root: Path) -> None:
    """Nodes whose copies of the base differ by one bit: each loads what its own files contain."""
    copy = root / f"copy for {dist.get_world_size()} ranks"
    if dist.get_rank() == 0:
        shutil.copytree(root / "published", copy)
        with (copy / "model.safetensors").open("r+b") as file:
            last = max(
                (p.stored for each in read_base(copy).parameters for p in each.pieces),
                key=lambda stored: stored.end,
            )
            file.seek(last.start)
            (byte,) = file.read(1)
            file.seek(last.start)
            file.write(bytes([byte ^ 1]))
    dist.barrier()
    base = read_base(copy if dist.get_rank() else root / "published")
    found = refused(partial(load_base, base, layouts()["resident"]))
    assert "rank 0 and rank 1 have read different values of " in found
    assert "give all nodes the same copy" in found


def mixed_copies(root: Path) -> None:
    """Nodes that each read a part of a copy of their own: a value differs that only one of them reads."""
    nodes = replace(layouts()["full-shard"], nodes=dist.get_world_size(), gpus_per_node=1)
    own = root / f"node {dist.get_rank()} of {dist.get_world_size()}"
    shutil.copytree(root / "published", own)
    base = read_base(own)
    digest = load_base(base, nodes)[1]["base_digest"]
    assert digest == digest_files(base)
    kept = [json.loads(file.read_text()) for file in (root / "cache" / "windlass" / "digests").iterdir()]
    (files,) = [one["files"] for one in kept if one["folder"] == str(own)]
    assert format_total(files) == digest  # the next run need not read it
    load_base(base, nodes)
    if dist.get_rank() == 0:  # rank 0 reads the first rows alone
        parameter = next(p for p in base.parameters if p.name == "model.layers.0.self_attn.o_proj.weight")
        stored = parameter.pieces[0].stored
        with (own / "model.safetensors").open("r+b") as file:
            file.seek(stored.start + 3)
            file.write(bytes([99]))
    dist.barrier()
    found = refused(partial(load_base, base, nodes))
    assert "rank 0 and rank 1" in found
    assert MIXED in found
    assert "give all nodes the same copy" in found


def poisoned_buffer(root: Path) -> None:
    """A buffer that transformers sets in the class of the whole model; then memory that one rank alone has wrong."""
    base = read_base(root / "falcon_h1")
    attention = base.family.usual_attention
    true = transformers.FalconH1ForCausalLM.from_pretrained(root / "falcon_h1", attn_implementation=attention)
    for layout in (layouts(experts=False)[name] for name in ("full-shard", "resident")):
        model, _ = load_base(base, layout, dtype=torch.float32)
        buffers = dict(true.named_buffers())
        assert len(buffers["model.layers.0.mamba.mup_vector"].unique()) == 5
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, buffers[name]), (layout.name, name)
    if dist.get_rank() == 1:
        model.get_buffer("model.layers.1.mamba.mup_vector")[0, 0, 7] = 7
    true_buffers = parallel.list_true_buffers(base, torch.float32, attention)
    found = refused(lambda: raise_together(certificate.check_buffers(model, true_buffers), "check", "", "loaded-wrong"))
    assert "the buffer model.layers.1.mamba.mup_vector is not what transformers computes" in found
    assert "(rank 1)" in found


def unsharded(root: Path) -> None:
    """A run that claims to be sharded but isn't."""
    model, _ = load_base(read_base(root / "published"), layouts()["resident"])
    found = refused(lambda: parallel.assert_sharded(model, layouts()["full-shard"]))
    assert "not sharded as full-shard plans it" in found
    assert "a plain tensor on every rank" in found


def other_ranks(root: Path) -> None:
    """Return a Layout for another number of ranks."""
    ranks = dist.get_world_size()
    layout = Layout("full-shard", "", 1, ranks + 1, shard=ranks + 1)
    assert f"the layout is for {ranks + 1} ranks" in refused(partial(load_base, read_base(root / "mixtral"), layout))


def kept_gathered(root: Path) -> None:
    """Require a layer's weights gathered after a backward between micro-batches, and resharded after the last one."""
    model, _ = load_base(read_base(root / "published"), layouts()["no-reshard"])
    modules = fsdp.list_fsdp_modules(model)
    for keep in (True, False):
        fsdp.keep_gathered(modules, keep)
        embedded = torch.zeros(1, 4, model.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        model(inputs_embeds=embedded).logits.float().sum().backward()
        assert isinstance(model.model.layers[0].self_attn.o_proj.weight, DTensor) is not keep


# --- training ---


def steps(
    base: Base,
    layout: Layout,
    *,
    experts: bool,
    bias: str,
    count: int = 4,
    micro: int = 1,
    checkpointing: bool = False,
) -> list[float]:
    """Return losses and norms of `count` optimizer steps of `micro` micro-batches; every rank has its own rows."""
    printed = {"r": 4, "lora_dropout": 0, "target_modules": "all-linear", "bias": bias}
    lora = Lora.model_validate({**printed, **({"experts": {"r": 2, "lora_alpha": 4}} if experts else {})})
    model = attach_adapter(
        load_base(base, layout, dtype=torch.float32)[0], lora, resolve_adapter(lora, base, str), seed=1
    ).train()
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    replicas = ReplicaGroups(model)
    liveness, modules = Liveness(model, replicas, "the run"), fsdp.list_fsdp_modules(model)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    found = []
    for step in range(count):
        loss = torch.zeros(1)
        for number in range(micro):
            if not layout.reshard_after_forward:
                fsdp.keep_gathered(modules, number < micro - 1)
            dice = torch.Generator().manual_seed((step * micro + number) * dist.get_world_size() + dist.get_rank())
            ids = torch.randint(20, 200, (2, 16), generator=dice)
            own = model(input_ids=ids, labels=ids).loss / micro
            own.backward()
            loss += own.detach()
        loss, norm = replicas.reduce(loss) / replicas.world, replicas.norm()
        gradients = [to_local(p.grad) for p in (*replicas.parameters, *replicas.sharded) if p.grad is not None]
        torch._foreach_mul_(gradients, 0.05 / norm)
        torch.testing.assert_close(replicas.norm(), torch.tensor(0.05), rtol=1e-4, atol=0)
        liveness.before_update(1e-3)
        optimizer.step()
        liveness.after_update(1.0)
        optimizer.zero_grad()
        found += [float(loss), float(norm)]
    assert liveness.is_done
    assert replicas.find_differing() == []
    assert bool(replicas.sharded) == (bias != "none" and layout.is_sharded)
    return found


def same_training(root: Path, name: str, layout: str, base_dtype: str = "fp8", bias: str = "none", **how: Any) -> None:
    """Compare with a 16-bit base on every rank: each product is equal bit for bit, sums are in another order."""
    base = read_base(root / name)
    same = read_base(root / f"{name}-{base_dtype}") if base_dtype in FOUR_BITS else base
    both = partial(steps, experts="experts" in base.dims and bias == "none", bias=bias)
    plain = {key: value for key, value in how.items() if key != "checkpointing"}
    wanted = both(same, layouts()["resident"], **plain)
    found = both(base, replace(layouts(bias == "none")[layout], base_dtype=base_dtype), **how)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-6, atol=0)


def same_bytes(root: Path, name: str, kind: str) -> None:
    """Require the same 4-bit codes from any ranks: each rank's rows are those of a rank that has all."""
    base, wanted = read_base(root / name), dict[str, Tensor]()
    for which, layout in layouts("experts" in base.dims).items():
        model, made = load_base(base, replace(layout, base_dtype=kind))
        weights = quantized.list_quantized_params(model)
        parts = {key: view_own_part(tensor) for key, tensor in list_unique_tensors(model).items() if key in weights}
        if not wanted:
            whole, _ = load_base(base, replace(layouts()["resident"], base_dtype=kind))
            wanted = {key: tensor for key, tensor in list_unique_tensors(whole).items() if key in weights}
            rms = made["quantisation"]["relative_rms"]
            assert 0.5 * FOUR_BITS[kind].error < rms < 1.1 * FOUR_BITS[kind].error
        assert made["quantisation"]["relative_rms"] == rms
        for key, (part, offset) in parts.items():
            own = tuple(slice(o, o + size) for o, size in zip(offset, part.shape, strict=True))
            assert torch.equal(part, wanted[key][own]), (which, key)


def cases(root: Path, later: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    ranks = dist.get_world_size()
    if later:
        yield from ((f"training {name} {how}", partial(same_training, root, name, **how)) for name, how in LATER)
        return
    if ranks == 2:
        yield from ((f"memory of loading {each}", partial(bounded, root, each)) for each in ("bf16", "fp8"))
    for name in CHECKPOINTS if ranks == 2 else FOUR:
        reference = truth(root / f"{name}-true", DTYPE.get(name, torch.bfloat16))
        case = partial(equal, root, name, reference, passed(reference), {})
        for which, layout in layouts("experts" in read_base(root / name).dims).items():
            if name == "published" or which == USUAL.get(name, "full-shard"):  # every layout for one checkpoint
                yield f"{name} under {which}", partial(case, layout)
                if name in IN_FP8:
                    yield f"{name} in FP8 under {which}", partial(case, replace(layout, base_dtype="fp8"))
    for what, base_dtype, split, named in (
        ("swapped parts", "fp8", "expert-parallel", f"{VICTIM} is not what"),
        ("swapped scales", "fp8", "expert-parallel", VICTIM),
        ("swapped parts", "nf4", "expert-parallel", f"{VICTIM} is not what"),
        ("one rank's part", "bf16", "full-shard", "(rank 1)"),
        ("one rank's scales", "fp8", "full-shard", f"{VICTIM} is not what"),
    ):
        yield f"{what} {base_dtype} {split}", partial(spoilt, root, what, base_dtype, split, named)
    yield "bytes", partial(same_bytes, root, "published", "nf4")
    for fault in (other_copy, mixed_copies, poisoned_buffer, unsharded, other_ranks, kept_gathered):
        yield fault.__name__, partial(fault, root)
    for name, how in (*TRAINING, *(IN_TWO if ranks == 2 else ())):
        yield f"training {name} {how}", partial(same_training, root, name, **how)


def main(root: Path, out: Path, later: bool) -> None:
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    dist.init_process_group("gloo")
    os.environ["XDG_CACHE_HOME"] = str(root / "cache")
    results: dict[str, str] = {}
    for name, case in cases(root, later):
        dist.barrier()
        try:
            case()
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
        everyones: list[str] = all_gather(results[name])
        results[name] = "\n".join(f"rank {rank}: {each}" for rank, each in enumerate(everyones) if each)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)  # gloo's threads may outlive the group, and an interpreter that ends beside them aborts


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] == ["later"])
