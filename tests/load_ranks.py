"""What tests/test_load.py runs in every rank: many cases in one start of the processes, results as JSON."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from windlass import tiny
from windlass.errors import UserError
from windlass.model import read_base
from windlass.plan.layout import Layout
from windlass.train import certificate, fp8, parallel
from windlass.train.group import raise_together
from windlass.train.load import load, own_part, unique_tensors

PREFIXES = {r"^language_model\.model\.": "model.", r"^language_model\.lm_head": "lm_head"}
TOKENS = torch.arange(24)[None] % 200

# Every layout in which such a model comes. Sizes that no number of ranks divides are there on purpose.
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "published": {"decoys": True},
    "blocks": {"quantization": "block128", "hidden": 256, "moe_intermediate": 160, "files": 3},
    "tied": {"files": 2, "tied": True, "dtype": "float32", "quantization": "none"},
    "uneven": {"family": "mistral", "vocab": 515, "hidden": 60, "heads": 3, "intermediate": 130, "wrapper": True},
    "llama": {"family": "llama", "tied": True},
    "mixtral": {"family": "mixtral", "quantization": "tensor", "experts": 12},
    # Blocks of 128 in matrices of 160 rows, two of which are fused: the second one's begin at row 160.
    "qwen3_moe": {"family": "qwen3_moe", "quantization": "block128", "hidden": 192, "moe_intermediate": 160},
}
IN_FP8 = ("published", "blocks", "mixtral", "qwen3_moe")
FOUR = ("published", "uneven", "mixtral")  # what four ranks are tried on
DTYPE = {"tied": torch.float32}


def layouts(ranks: int, experts: bool) -> dict[str, Layout]:
    def layout(name: str, **rest: Any) -> Layout:
        return Layout(name=name, reason="test", nodes=1, gpus_per_node=ranks, precision="no", **rest)

    named = {
        "full-shard": layout("full-shard", shard=ranks),
        "no-reshard": layout("no-reshard", shard=ranks, reshard_after_forward=False),
        "hybrid": layout("hybrid", shard=ranks // 2, replicate=2),
        "resident": layout("resident", shard=1, replicate=ranks),
    }
    if experts:
        named["expert-parallel"] = layout("expert-parallel", shard=ranks, expert_parallel=2)
        kept = {"expert_parallel": 2, "reshard_after_forward": False}
        named["expert-parallel-kept"] = layout("expert-parallel", shard=ranks, **kept)
        if ranks == 4:
            named["expert-parallel-hybrid"] = layout("expert-parallel", shard=2, replicate=2, expert_parallel=2)
            named["expert-parallel-whole"] = layout("expert-parallel", shard=4, expert_parallel=4)
    return named


def dequantise(directory: Path, target: Path, dtype: torch.dtype) -> Path:
    """The same checkpoint without FP8, by arithmetic of this file's own: what the true weights are."""
    stored: dict[str, Tensor] = {}
    for file in directory.glob("model*.safetensors"):
        stored.update(load_file(file))
    true: dict[str, Tensor] = {}
    for key, weight in stored.items():
        if key.endswith(("_scale_inv", "activation_scale")) or "vision" in key or "multi_modal" in key:
            continue
        scale = stored.get(f"{key}_scale_inv")
        wide = weight.float()
        if scale is not None and scale.shape[-1:] == (1,) and scale.ndim == 3:
            wide = torch.stack([one * float(s) for one, s in zip(wide, scale.flatten(), strict=True)])
        elif scale is not None and scale.ndim == 0:
            wide = wide * float(scale)
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
    return target


def truth(directory: Path, dtype: torch.dtype) -> Any:
    """The true model, loaded by transformers alone, whole."""
    family = json.loads((directory / "config.json").read_text())["model_type"]
    model_class = getattr(transformers, f"{tiny.CLASSES[family]}ForCausalLM")
    model, info = model_class.from_pretrained(directory, dtype=dtype, key_mapping=PREFIXES, output_loading_info=True)
    assert not any(info.values()), info
    return model


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def equality(root: Path, name: str, layout: Layout, reference: Any, logits: Tensor) -> dict[str, Any]:
    """One checkpoint under one layout against the truth, bit for bit."""
    model, made = load(read_base(root / name), layout, dtype=reference.dtype)
    parallel.assert_sharded(model, layout)
    true = dict(reference.named_parameters())
    mine = dict(model.named_parameters())
    with Wire() as wire, torch.enable_grad():  # type: ignore[no-untyped-call]
        passed(model)
    return {
        "wire": wire.bytes,
        "names": mine.keys() == true.keys(),
        "differ": [key for key in true if not torch.equal(whole(mine[key]), true[key])],
        "plain": [key for key, tensor in mine.items() if not isinstance(tensor, DTensor)],
        "trainable": [key for key, tensor in mine.items() if tensor.requires_grad],
        "logits": float((model(TOKENS).logits - logits).abs().max()),
        "again": float((model(TOKENS).logits - logits).abs().max()),
        "bytes_read": [each["bytes_read"] for each in made.ranks],
        "checked": made.checked,
    }


def in_fp8(root: Path, name: str, layout: Layout, reference: Any) -> dict[str, Any]:
    """The base held in FP8 under one layout: true values, loss and gradient of the input against the truth."""
    layout = replace(layout, base_dtype="fp8")
    model, made = load(read_base(root / name), layout, dtype=reference.dtype)
    parallel.assert_sharded(model, layout)
    held, true = fp8.fp8_weights(model), dict(reference.named_parameters())
    differ = []
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            part, offset = own_part(tensor)
            wanted = true[key][tuple(slice(o, o + size) for o, size in zip(offset, part.shape, strict=True))]
            if key in held:
                scale = held[key].scale
                if part.ndim == 3:
                    scale = scale[offset[0] - held[key].first :][: len(part)]
                part = fp8.dequantise(part, scale, held[key].format, reference.dtype, (offset[-2], offset[-1]))
            if not torch.equal(part, wanted):
                differ.append(key)
    parts = {key: own_part(tensor)[0] for key, tensor in model.named_parameters()}
    own_bytes = sum(part.untyped_storage().nbytes() for part in parts.values())
    with Wire() as wire:  # type: ignore[no-untyped-call]
        outcome, gradient = passed(model)
    wanted_outcome, wanted_gradient = passed(reference)
    return {
        "differ": differ,
        "held": len(held),
        "codes": sum(math.prod(true[key].shape) for key in held),
        "own_codes": sum(parts[key].numel() for key in held),
        "own_numbers": sum(part.numel() for part in parts.values()),
        "own_bytes": own_bytes,
        "wire": wire.bytes,
        "logits": float((outcome - wanted_outcome).abs().max()),
        "gradient": float((gradient - wanted_gradient).abs().max() / wanted_gradient.abs().max()),
        "dtypes": sorted({each["dtype"] for each in made.parameters}),
    }


def passed(model: Any) -> tuple[Tensor, Tensor]:
    """Logits, and the gradient that reaches the embedded tokens."""
    dice = torch.Generator().manual_seed(dist.get_rank())
    embedded = torch.randn(1, 24, model.config.hidden_size, generator=dice).to(model.dtype).requires_grad_()
    logits = model(inputs_embeds=embedded).logits.float()
    (gradient,) = torch.autograd.grad(logits.square().mean(), embedded)
    return logits.detach(), gradient


class Wire(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes that all-gathers hand to this rank."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather" in str(func):
            self.bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def mixed_up(root: Path, name: str, ranks: int, change: str) -> str:
    """Codes or scales of one rank that are another's, held in FP8."""
    checkpoint = read_base(root / name)
    layout = replace(layouts(ranks, True)["expert-parallel" if "expert" in change else "full-shard"], base_dtype="fp8")
    model, _ = load(checkpoint, layout)
    targets, held = unique_tensors(model), fp8.fp8_weights(model)
    victim = "model.layers.1.mlp.experts.down_proj"
    local = own_part(targets[victim])[0]
    mine = held[victim].scale if "scale" in change else local
    parts = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(parts, mine.contiguous())
    if change == "one rank's scale":
        mine[-1] *= 1.0 if dist.get_rank() else 1.0078125
    else:
        mine.copy_(parts[(dist.get_rank() + 1) % ranks])
    return verdict(targets, checkpoint, held)


def swapped(root: Path, name: str, ranks: int) -> str:
    """Ranks hold each other's part of one tensor: the certificate has to name it, on every rank."""
    checkpoint = read_base(root / name)
    model, _ = load(checkpoint, layouts(ranks, False)["full-shard"])
    targets = unique_tensors(model)
    victim = "model.layers.1.mlp.experts.down_proj"
    part = targets[victim]
    assert isinstance(part, DTensor)
    parts = [torch.empty_like(part.to_local()) for _ in range(ranks)]
    dist.all_gather(parts, part.to_local().contiguous())
    part.to_local().copy_(parts[(dist.get_rank() + 1) % ranks])
    return verdict(targets, checkpoint)


def one_wrong(root: Path, name: str, ranks: int) -> str:
    """One rank's part of one tensor is off by a little: all ranks have to stop."""
    checkpoint = read_base(root / name)
    model, _ = load(checkpoint, layouts(ranks, False)["full-shard"])
    targets = unique_tensors(model)
    if dist.get_rank() == 1:
        part = targets["model.layers.0.self_attn.o_proj.weight"]
        assert isinstance(part, DTensor)
        part.to_local().mul_(1.0078125)  # one unit in the last place of BF16
    return verdict(targets, checkpoint)


def verdict(targets: dict[str, Tensor], checkpoint: Any, held: Any = MappingProxyType({})) -> str:
    wrong, _ = certificate.check(targets, checkpoint, dist.get_rank(), held)
    try:
        raise_together(wrong, "check", "")
    except UserError as error:
        return str(error)
    return ""


def unsharded(root: Path, name: str, ranks: int) -> str:
    """A run that claims to be sharded and is not."""
    model, _ = load(read_base(root / name), layouts(ranks, False)["resident"])
    try:
        parallel.assert_sharded(model, layouts(ranks, False)["full-shard"])
    except UserError as error:
        return str(error)
    return ""


def kept(root: Path, name: str, ranks: int) -> list[bool]:
    """Whether a layer's weights are whole after a backward: between micro-batches, and after the last one."""
    model, _ = load(read_base(root / name), layouts(ranks, False)["no-reshard"])
    said = []
    for keep in (True, False):
        parallel.keep_gathered(parallel.fsdp_modules(model), keep)
        embedded = torch.zeros(1, 4, model.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        model(inputs_embeds=embedded).logits.float().sum().backward()
        said.append(not isinstance(model.model.layers[0].self_attn.o_proj.weight, DTensor))
    return said


def bounds(root: Path, ranks: int, base_dtype: str) -> list[dict[str, Any]]:
    """A model large enough for its bytes and memory to be told from everything else's."""
    checkpoint = read_base(root / "large")
    _, made = load(checkpoint, replace(layouts(ranks, False)["full-shard"], base_dtype=base_dtype))
    stored = sum(each.end - each.start for p in checkpoint.parameters for piece in p.pieces for each in [piece.stored])
    elements = [math.prod(parameter.shape) for parameter in checkpoint.parameters]
    return [{**each, "stored": stored, "bytes": 2 * sum(elements), "largest": 2 * max(elements)} for each in made.ranks]


def refused(root: Path, ranks: int) -> list[str]:
    """What a Layout may ask for and the engine can't do."""
    said = []
    for name, wrong in {
        "published": Layout("expert-parallel", "", 1, ranks, shard=ranks, expert_parallel=3),
        "llama": Layout("expert-parallel", "", 1, ranks, shard=ranks, expert_parallel=2),
        "mixtral": Layout("full-shard", "", 1, ranks + 1, shard=ranks + 1),
        "tied": Layout("full-shard", "", 1, ranks, shard=ranks, offload=True),
    }.items():
        try:
            load(read_base(root / name), wrong)
            said.append("")
        except UserError as error:
            said.append(str(error))
    return said


def main(root: Path, out: Path) -> None:
    dist.init_process_group("gloo")
    transformers.utils.logging.disable_progress_bar()
    ranks = dist.get_world_size()
    results: dict[str, Any] = {}
    if ranks == 2:
        results["bounds"] = bounds(root, ranks, "bf16")
        results["bounds in FP8"] = bounds(root, ranks, "fp8")
    for name in CHECKPOINTS if ranks == 2 else FOUR:
        reference = truth(root / f"{name}-true", DTYPE.get(name, torch.bfloat16))
        with torch.no_grad():
            logits = reference(TOKENS).logits
        experts = CHECKPOINTS[name].get("family", "mistral4") in ("mistral4", "mixtral", "qwen3_moe")
        for which, layout in layouts(ranks, experts).items():
            results[f"{name}/{which}"] = equality(root, name, layout, reference, logits)
            if name in IN_FP8 and (ranks == 2 or name == "published"):
                results[f"fp8 {name} {which}"] = in_fp8(root, name, layout, reference)
    results["swapped"] = swapped(root, "published", ranks)
    for change in ("codes", "experts' codes", "experts' scales", "one rank's scale"):
        results[change] = mixed_up(root, "published", ranks, change)
    results["one_wrong"] = one_wrong(root, "published", ranks)
    results["unsharded"] = unsharded(root, "published", ranks)
    results["kept"] = kept(root, "published", ranks)
    results["refused"] = refused(root, ranks)
    (out / f"{ranks}-{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
