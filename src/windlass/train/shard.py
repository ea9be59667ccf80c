"""A Layout applied by transformers' own machinery: FSDP2, hybrid, expert parallel. Every such call is in this file.

transformers says of this machinery that it still moves; windlass pins its version and keeps the calls together.
The model is built without storage (on the meta device) and sharded, then given storage for this rank's part alone:
the order in which `from_pretrained(distributed_config=...)` does it, with the reading of weights taken out.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
import transformers
from peft import PeftModel
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from transformers.distributed import DistributedConfig

from windlass.errors import Problem, UserError, raise_all
from windlass.model import Base
from windlass.plan.layout import Layout
from windlass.train import experts, fp8, group


def is_sharded(layout: Layout) -> bool:
    """Whether ranks hold parts. Resident bases and single ranks hold everything in plain tensors."""
    return bool(layout.name != "resident" and layout.ranks > 1)


def distributed_config(layout: Layout, dtype: torch.dtype) -> DistributedConfig | None:
    """The Layout in transformers' words; None where nothing is sharded."""
    if not is_sharded(layout):
        return None
    return DistributedConfig(
        fsdp_size=layout.shard,
        dp_replicate_size=layout.replicate,
        ep_size=layout.expert_parallel,
        fsdp_cpu_offload=layout.offload,
        # Gather in BF16 what is stored in FP32 only if compute runs in BF16: the policy's dtype is fixed upstream.
        fsdp_mixed_precision=layout.precision == "bf16" and dtype == torch.float32,
    )


def device_of_this_rank() -> torch.device:
    """Where parameters live while they compute."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def build(
    checkpoint: Base, layout: Layout, dtype: torch.dtype, attn_implementation: str = "sdpa"
) -> transformers.PreTrainedModel:
    """The causal language model with `layout` applied: DTensors of the planned placements, without storage yet."""
    # torch's first choice on Hopper makes a plan for every new shape of a micro-batch, about a second each, and its
    # gradients can be NaN under a mask (pytorch#196678). Remove when that is fixed in every torch that we allow, and
    # benchmarks/one_gpu.py's `layers` finds cuDNN's attention the faster one.
    torch.backends.cuda.enable_cudnn_sdp(False)
    config = text_config(checkpoint, dtype, attn_implementation)
    model_class = getattr(transformers, checkpoint.family.causal_lm)
    raise_all(refusals(checkpoint, layout, config))
    wanted, _, mesh = model_class.prepare_distribute_model(distributed_config(layout, dtype))
    with contextlib.ExitStack() as stack:
        for context in model_class.get_init_context(dtype, False, False, False):
            stack.enter_context(context)
        model = model_class(config)
    if kept := model._get_dtype_plan(dtype):
        raise UserError(
            f"{checkpoint.family.causal_lm} keeps {', '.join(kept)} in float32: the loader can't beside {dtype}",
            "model.torch_dtype",
            "set model.torch_dtype: float32",
        )
    if layout.base_dtype == "fp8":
        fp8.install(model, fp8.published(checkpoint, dtype))
    model = model_class.maybe_distribute_model(model, wanted, mesh)
    if mesh is not None and not layout.reshard_after_forward:
        # After the plan, not in it: with every layer kept by the plan, upstream no longer puts the final norm and the
        # head in one group, and a head that is a group of its own is gathered anew for each fused loss.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_reshard_after_forward(False, recurse=False)
    return model


def text_config(checkpoint: Base, dtype: torch.dtype, attn_implementation: str) -> Any:
    """The text model's config, unquantised: what is stored in FP8 is loaded as `dtype`, or held so by us."""
    replaced = ("quantization_config", "dtype", "torch_dtype")
    described = {key: value for key, value in checkpoint.config.items() if key not in replaced}
    tied = all(parameter.name != "lm_head.weight" for parameter in checkpoint.parameters)  # a wrapper's config may rule
    described |= {"dtype": str(dtype).removeprefix("torch."), "use_cache": False, "tie_word_embeddings": tied}
    config_class = transformers.CONFIG_MAPPING[checkpoint.family.model_type]
    config = config_class.from_dict(described, attn_implementation=attn_implementation)
    config._experts_implementation = experts.NAME
    config.name_or_path = str(checkpoint.path or checkpoint.name)  # a saved adapter names its base by it
    return config


def refusals(checkpoint: Base, layout: Layout, config: Any) -> list[Problem]:
    """What this Layout asks for and transformers would refuse in the middle of building, or do differently."""
    problems: list[Problem] = []
    world = group.world()
    if layout.ranks != world:
        problems.append(
            Problem(
                f"the layout is for {layout.ranks} ranks ({layout.nodes} nodes x {layout.gpus_per_node} GPUs), "
                f"but {world} were started",
                "layout",
                "start one process per rank, or change cluster.nodes and cluster.gpus_per_node",
            )
        )
    if is_sharded(layout) and layout.shard * layout.replicate != layout.ranks:
        problems.append(
            Problem(
                f"shard {layout.shard} x replicate {layout.replicate} is not {layout.ranks} ranks",
                "layout.shard",
                "shard x replicate must be nodes x gpus_per_node",
            )
        )
    if layout.offload and not torch.cuda.is_available():
        problems.append(
            Problem(
                "nothing can be offloaded where ranks compute in the host's memory",
                "layout.offload",
                "set layout.offload: false on a machine without a GPU",
            )
        )
    # Tried: 2.11 gives every parameter that it shards a gradient for a moment, which bytes can't have; 2.13 does not.
    if is_sharded(layout) and layout.base_dtype == "fp8" and torch.__version__ < "2.13":
        what = f"torch {torch.__version__} can't shard a base that is held in FP8: 2.13 can"
        problems.append(Problem(what, fp8.WHERE, f"{fp8.HINT}, keep it resident, or install a newer torch"))
    if layout.expert_parallel > 1:
        problems.extend(_expert_refusals(checkpoint, layout, config))
    return problems


def _expert_refusals(checkpoint: Base, layout: Layout, config: Any) -> list[Problem]:
    where = "layout.expert_parallel"
    ways = layout.expert_parallel
    experts = next((getattr(config, key) for key in ("num_experts", "num_local_experts") if hasattr(config, key)), 0)
    if not config.base_model_ep_plan or not experts:
        return [
            Problem(f"{checkpoint.family.causal_lm} has no experts to split over {ways} ranks", where, "set it to 1")
        ]
    problems = []
    if experts % ways:
        fitting = [n for n in range(2, layout.ranks + 1) if experts % n == 0 and layout.shard % n == 0]
        hint = f"use one of {', '.join(map(str, fitting))}" if fitting else "use full-shard or hybrid on so many ranks"
        problems.append(Problem(f"{experts} experts can't be split evenly over {ways} ranks", where, hint))
    if layout.shard % ways:
        problems.append(
            Problem(f"{ways} does not divide layout.shard = {layout.shard}", where, "expert_parallel must divide shard")
        )
    return problems


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


def keep_gathered(model: torch.nn.Module, keep: bool) -> None:
    """Keep what a backward gathered for the next micro-batch, or give it up as usual (on the last one of a step)."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_backward(not keep, recurse=False)


def keep_out_of_ddp(model: PeftModel) -> None:
    """Keep Accelerate from wrapping the model in DDP, whose part `Replicas` plays, also where nothing is sharded.

    It asks this mark, which transformers gives to a model that it has sharded while loading.
    """
    model.get_base_model()._is_distributed_loading_by_transformers = True


def assert_sharded(model: torch.nn.Module, layout: Layout) -> None:
    """Stop unless every parameter is spread as planned. Ask before the first forward: that leaves some gathered."""
    if not is_sharded(layout):
        return
    wrong = [
        f"{name} ({placed})"
        for name, tensor in model.named_parameters()
        if (placed := _misplaced(name, tensor, layout))
    ]
    if wrong:
        raise UserError(
            f"the base is not sharded as {layout.name} plans it: {'; '.join(wrong[:8])}"
            + (f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""),
            "layout",
            "nothing may move parameters between loading and the first step",
        )


def _misplaced(name: str, tensor: torch.Tensor, layout: Layout) -> str:
    """What is wrong with one parameter's placement; nothing when it is as planned. Adapters are not the base."""
    if "lora_" in name or "modules_to_save" in name:
        return ""
    if not isinstance(tensor, DTensor):
        return "a plain tensor on every rank"
    mesh = tensor.device_mesh
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    split = math.prod(size for size, place in zip(mesh.shape, tensor.placements, strict=True) if place != Replicate())
    if split != layout.shard or mesh.size() != layout.shard * layout.replicate:
        return f"split over {split} of {mesh.size()} ranks instead of {layout.shard} of {layout.ranks}"
    if layout.expert_parallel > 1 and tensor.ndim == 3 and sizes.get("ep") != layout.expert_parallel:
        return f"experts split over {sizes.get('ep', 1)} ranks instead of {layout.expert_parallel}"
    return ""
