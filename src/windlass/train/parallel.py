"""Apply a Layout to a model through transformers: FSDP2, hybrid sharding, expert parallelism.

transformers says that this machinery still moves; windlass pins its version and keeps all such calls in this file.
The model is built without storage (on the meta device) and sharded, then given storage for this rank's part alone:
the order in which `from_pretrained(distributed_config=...)` does it, without the reading of weights.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from transformers.distributed import DistributedConfig

from windlass.errors import UserError
from windlass.model import Base
from windlass.plan.layout import Layout
from windlass.train import exchange, experts, group, quantised

FIRST_LAYER: Final = re.compile(r"\blayers\.0(\.|$)")


def is_sharded(layout: Layout) -> bool:
    """Whether ranks store parts. A resident base and a single rank store everything in plain tensors."""
    return layout.name != "resident" and layout.ranks > 1


def device_of_this_rank() -> torch.device:
    """Where parameters are when they compute."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def build(
    base: Base,
    layout: Layout,
    dtype: torch.dtype,
    attn_implementation: str = "sdpa",
    dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> transformers.PreTrainedModel:
    """The causal language model with `layout` applied: DTensors of the planned placements, without storage yet."""
    # torch's first choice on Hopper makes a plan for every new shape of a micro-batch, about a second each, and its
    # gradients can be NaN under a mask (pytorch#196678). Remove when that is fixed in every torch that we allow, and
    # benchmarks/one_gpu.py's `layers` finds cuDNN's attention the faster one.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if layout.ranks != group.world():
        raise UserError(
            f"the layout is for {layout.ranks} ranks ({layout.nodes} nodes x {layout.gpus_per_node} GPUs), "
            f"but {group.world()} were started",
            "layout",
            "start one process per rank, or change cluster.nodes and cluster.gpus_per_node",
        )
    # Tried: 2.12 gives every parameter that it shards a gradient for a moment, which bytes can't have; 2.13 does not.
    if is_sharded(layout) and layout.base_dtype != "bf16" and torch.__version__ < "2.13":
        what = f"torch {torch.__version__} can't shard a base that is stored in {layout.base_dtype.upper()}: 2.13 can"
        raise UserError(what, quantised.WHERE, f"{quantised.HINT}, set layout.name: resident, or install a newer torch")
    # The text model's config, unquantised: what is stored in FP8 is loaded as `dtype`, or converted by us.
    described = {key: value for key, value in base.config.items() if key not in ("quantization_config", "torch_dtype")}
    tied = all(parameter.name != "lm_head.weight" for parameter in base.parameters)  # a wrapper's config may rule
    described |= {"dtype": str(dtype).removeprefix("torch."), "use_cache": False, "tie_word_embeddings": tied}
    config_class = transformers.CONFIG_MAPPING[base.family.model_type]
    config = config_class.from_dict(described, attn_implementation=attn_implementation)
    config._experts_implementation = experts.NAME
    config.name_or_path = str(base.path or base.name)  # a saved adapter names its base by it

    model_class = getattr(transformers, base.family.causal_lm)
    distributed = DistributedConfig(
        fsdp_size=layout.shard,
        dp_replicate_size=layout.replicate,
        ep_size=layout.expert_parallel,
        ep_implementation=exchange.NAME,
        fsdp_cpu_offload=layout.offload,
        # Gather in BF16 what is stored in FP32 only if compute runs in BF16: the policy's dtype is fixed upstream.
        fsdp_mixed_precision=layout.precision == "bf16" and dtype == torch.float32,
    )
    distributed, _, mesh = model_class.prepare_distribute_model(distributed if is_sharded(layout) else None)
    if layout.expert_parallel > 1:
        separate_experts(mesh)
    with contextlib.ExitStack() as stack:
        for context in model_class.get_init_context(dtype, False, False, False):
            stack.enter_context(context)
        model = model_class(config)
    keep_in_float32(model, dtype)
    for name, own in dtypes.items():
        model.get_parameter(name).data = model.get_parameter(name).data.to(own)
    if layout.base_dtype != "bf16":
        quantised.convert(model, base, layout.base_dtype, dtype)
    model = model_class.maybe_distribute_model(model, distributed, mesh)
    # FSDP2 gathers ahead of the backward what the forward used before: for the first layer the embedding, which is
    # then never used. A module that is to be gathered ahead of itself is gathered already.
    first = [
        layer for name, layer in model.named_modules() if FIRST_LAYER.search(name) and isinstance(layer, FSDPModule)
    ]
    for module in first[-1:]:  # its experts, if they are a group of their own
        module.set_modules_to_backward_prefetch([module])
    if not layout.reshard_after_forward:
        # After the plan, not in it: with every layer kept by the plan, upstream no longer puts the final norm and the
        # head in one group, and a head that is a group of its own is gathered anew for each fused loss.
        for module in fsdp_modules(model):
            module.set_reshard_after_forward(False, recurse=False)
    return model


def separate_experts(mesh: Any) -> None:
    """Give the tokens' exchange a communicator of its own: one is serial, and transformers has experts that are split
    over all ranks share theirs with FSDP's gathers."""
    experts_mesh, backend = mesh._expert_mesh, dist.distributed_c10d.get_backend_config()
    if experts_mesh["ep"].size() == dist.get_world_size():
        shape, names = tuple(experts_mesh.shape), experts_mesh.mesh_dim_names
        own: Any = {"ep": backend}
        mesh._expert_mesh = init_device_mesh(
            experts_mesh.device_type, shape, mesh_dim_names=names, backend_override=own
        )


def keep_in_float32(model: transformers.PreTrainedModel, dtype: torch.dtype) -> None:
    """What transformers keeps in float32 in a model of a narrower dtype, such as a router's correction."""
    if kept := model._get_dtype_plan(dtype):
        pattern = re.compile("|".join(each.replace("*", ".*") for each in kept))
        for name, tensor in model.state_dict(keep_vars=True).items():
            if tensor.is_floating_point() and pattern.search(name):
                tensor.data = tensor.data.float()


def allocate(model: transformers.PreTrainedModel, layout: Layout) -> None:
    """Storage for this rank's part of every parameter, and buffers with their computed values.

    Parameters hold whatever was in that memory: the caller fills every one of them.
    """
    offloaded = is_sharded(layout) and layout.offload
    model.to_empty(device=torch.device("cpu") if offloaded else device_of_this_rank())
    model.tie_weights(recompute_mapping=False)
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True  # what the checkpoint holds; the rest, rotary frequencies, is computed now
    model.initialize_weights()
    if offloaded:
        for name, buffer in list(model.named_buffers()):  # buffers take part in compute where compute runs
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, buffer.to(device_of_this_rank()))
    model.eval()


def fsdp_modules(model: torch.nn.Module) -> list[FSDPModule]:
    """The modules that FSDP2 gathers one by one; none where nothing is sharded."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: torch.nn.Module) -> None:
    """Every parameter is this rank's shard again: after a forward without a backward the head is still gathered."""
    for module in fsdp_modules(model):
        module.reshard()


def shard_like(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's shards of those that belong to a sharded parameter, by their names; all others as they are."""
    parameters, found = dict(model.named_parameters()), dict(tensors)
    for name, tensor in tensors.items():
        if isinstance(own := parameters.get(name), DTensor) and tensor.ndim:
            found[name] = distribute_tensor(tensor, own.device_mesh, own.placements, src_data_rank=None)
    return found


def keep_gathered(modules: Iterable[FSDPModule], keep: bool) -> None:
    """Keep what a backward gathered for the next micro-batch, or free it as usual (on the last one of a step)."""
    for module in modules:
        module.set_reshard_after_backward(not keep, recurse=False)


def assert_sharded(model: torch.nn.Module, layout: Layout) -> None:
    """Stop unless every parameter is sharded as planned. Call before the first forward: that leaves some gathered."""
    if not is_sharded(layout):
        return
    wrong = []
    for name, tensor in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            continue
        if not isinstance(tensor, DTensor):
            wrong.append(f"{name} (a plain tensor on every rank)")
            continue
        mesh, placements = tensor.device_mesh, tensor.placements
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        split = math.prod(size for size, place in zip(mesh.shape, placements, strict=True) if place != Replicate())
        experts_over = (
            sizes.get("ep", 1) if layout.expert_parallel > 1 and ".experts." in name else layout.expert_parallel
        )
        if split != layout.shard or mesh.size() != layout.shard * layout.replicate:
            wrong.append(f"{name} (split over {split} of {mesh.size()} ranks, not {layout.shard} of {layout.ranks})")
        elif experts_over != layout.expert_parallel:
            wrong.append(f"{name} (experts split over {experts_over} ranks, not {layout.expert_parallel})")
    if wrong:
        raise UserError(
            f"the base is not sharded as {layout.name} plans it: {group.first_few(wrong)}",
            "layout",
            "nothing may move parameters between loading and the first step",
        )
