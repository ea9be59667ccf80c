"""Apply a Layout to a model through transformers: FSDP2, hybrid sharding, expert parallelism.

transformers says that this machinery may still change: such calls are here, what differs by version is in compat.py.
The model is built on the meta device, sharded, and then given storage for this rank's part only: the order in which
`from_pretrained(distributed_config=...)` works, without reading weights.
"""

import contextlib
import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from windlass.compat import make_distributed_config
from windlass.errors import UserError
from windlass.model import Base
from windlass.plan.layout import Layout
from windlass.ranks import collectives
from windlass.train.experts import exchange, experts
from windlass.train.fsdp import get_device, list_fsdp_modules
from windlass.train.kernels import products
from windlass.versions import find_lacking

FIRST_LAYER: Final = re.compile(r"\blayers\.0(\.|$)")


def build_model(
    base: Base,
    layout: Layout,
    dtype: torch.dtype,
    attn_implementation: str = "sdpa",
    dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> transformers.PreTrainedModel:
    """Return the causal LM with `layout` applied: DTensors with the planned placements, without storage yet."""
    # On Hopper torch prefers cuDNN's attention, which makes a plan for every new micro-batch shape, about a second
    # each, and whose gradients can be NaN under a mask (pytorch#196678). Remove when every torch that we allow has the
    # fix and `layers` of benchmarks/one_gpu.py finds cuDNN's attention faster.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if layout.ranks != collectives.get_world_size():
        raise UserError(
            f"the layout is for {layout.ranks} ranks ({layout.nodes} nodes x {layout.gpus_per_node} GPUs), "
            f"but {collectives.get_world_size()} were started",
            "layout",
            "start one process per rank, or change cluster.nodes and cluster.gpus_per_node",
            "other-ranks",
        )
    have = {"torch": torch.__version__, "transformers": transformers.__version__}
    if lacks := find_lacking(layout.needs, have):
        problem, hint = lacks
        raise UserError(problem, "layout.name", hint, "too-old")
    config = make_config(base, dtype, attn_implementation)
    model_class = getattr(transformers, base.family.causal_lm)
    distributed = make_distributed_config(
        fsdp_size=layout.shard,
        dp_replicate_size=layout.replicate,
        ep_size=layout.expert_parallel,
        ep_implementation=exchange.NAME,
        fsdp_cpu_offload=layout.offload,
        # Gather FP32 parameters in BF16 only if compute is in BF16: upstream fixes the policy's dtype.
        fsdp_mixed_precision=layout.precision == "bf16" and dtype == torch.float32,
    )
    distributed, _, mesh = model_class.prepare_distribute_model(distributed if layout.is_sharded else None)
    if layout.expert_parallel > 1:
        create_expert_communicator(mesh)
    model = build_on_meta(model_class, config, dtype)
    compute_buffers(model, 0)
    restore_float32(model, dtype)
    for name, dtype_of_parameter in dtypes.items():
        model.get_parameter(name).data = model.get_parameter(name).data.to(dtype_of_parameter)
    if layout.base_dtype != "bf16":
        products.convert_model(model, base, layout.base_dtype, dtype)
    model = model_class.maybe_distribute_model(model, distributed, mesh)
    # In the backward, FSDP2 prefetches the module that the forward used before: for the first layer that is the
    # embedding, which the backward never uses. A module set to prefetch itself prefetches nothing.
    first = [
        layer for name, layer in model.named_modules() if FIRST_LAYER.search(name) and isinstance(layer, FSDPModule)
    ]
    for module in first[-1:]:  # the layer's experts, if they are a separate group
        module.set_modules_to_backward_prefetch([module])
    if not layout.reshard_after_forward:
        # Set after the plan instead of in it: if the plan keeps every layer gathered, upstream no longer groups the
        # final norm with the head, and a head in its own group is gathered again for each fused loss.
        for module in list_fsdp_modules(model):
            module.set_reshard_after_forward(False, recurse=False)
    return model


def create_expert_communicator(mesh: Any) -> None:
    """Give the tokens' exchange its own communicator: a communicator is serial, and transformers lets experts that
    are split over all ranks share FSDP's."""
    experts_mesh = mesh._expert_mesh
    backend = dist.distributed_c10d.get_backend_config()
    if experts_mesh["ep"].size() == dist.get_world_size():
        override: Any = {"ep": backend}
        mesh._expert_mesh = init_device_mesh(
            experts_mesh.device_type,
            tuple(experts_mesh.shape),
            mesh_dim_names=experts_mesh.mesh_dim_names,
            backend_override=override,
        )


def restore_float32(model: transformers.PreTrainedModel, dtype: torch.dtype) -> None:
    """Keep in float32 what transformers keeps in float32 in narrower models, such as a router's correction."""
    kept = model._get_dtype_plan(dtype)
    if kept:
        pattern = re.compile("|".join(name.replace("*", ".*") for name in kept))
        for name, tensor in model.state_dict(keep_vars=True).items():
            if tensor.is_floating_point() and pattern.search(name):
                tensor.data = tensor.data.float()


def make_config(base: Base, dtype: torch.dtype, attn_implementation: str) -> transformers.PreTrainedConfig:
    """Return the text model's config without quantization: FP8 weights are loaded as `dtype` or converted by
    windlass."""
    described = {key: value for key, value in base.config.items() if key not in ("quantization_config", "torch_dtype")}
    tied = all(parameter.name != "lm_head.weight" for parameter in base.parameters)  # a wrapper's config may decide it
    described |= {"dtype": str(dtype).removeprefix("torch."), "use_cache": False, "tie_word_embeddings": tied}
    config_class = transformers.CONFIG_MAPPING[base.family.model_type]
    described = config_class._decode_special_floats(described)
    config = config_class.from_dict(described, attn_implementation=attn_implementation)
    for part in filter(None, (getattr(config, name) for name in config.sub_configs)):
        part.dtype = dtype  # whatever a tower's own config says, as `from_pretrained` does
    config._experts_implementation = experts.NAME
    config.name_or_path = str(base.path or base.name)  # saved adapters name their base by it
    return config


def build_on_meta(model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    with contextlib.ExitStack() as stack:
        for context in model_class.get_init_context(dtype, False, False, False):
            stack.enter_context(context)
        return model_class(config)


def compute_buffers(model: transformers.PreTrainedModel, fill: int) -> None:
    """Compute the buffers that no checkpoint stores (rotary frequencies, scales) as `from_pretrained` does: by the
    class's own initialization, with everything stored marked as read. Bytes that this leaves as they were are `fill`.

    Before sharding: FSDP2 gives a sharded model a class of torch's own module, which transformers takes for a
    checkpoint's code, and then skips modules without states of their own.
    """
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    for name, buffer in [*model.named_non_persistent_buffers()]:
        computed = torch.empty_like(buffer, device="cpu", memory_format=torch.contiguous_format)
        computed.view(-1).view(torch.uint8).fill_(fill)
        set_buffer(model, name, computed)
    model.initialize_weights()


def set_buffer(model: torch.nn.Module, name: str, buffer: torch.Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, buffer)


def list_true_buffers(base: Base, dtype: torch.dtype, attn_implementation: str) -> dict[str, torch.Tensor]:
    """Return all buffers that no checkpoint stores, of an unsharded model; what is never computed is NaN."""
    model = build_on_meta(
        getattr(transformers, base.family.causal_lm), make_config(base, dtype, attn_implementation), dtype
    )
    compute_buffers(model, 255)
    return dict(model.named_non_persistent_buffers())


def allocate(model: transformers.PreTrainedModel, layout: Layout) -> None:
    """Allocate this rank's part of every parameter. Buffers that were computed move to the compute device.

    Parameters then hold uninitialized memory: the caller fills every one of them.
    """
    offloaded = layout.is_sharded and layout.offload
    computed = {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}
    model.to_empty(device=torch.device("cpu") if offloaded else get_device())
    model.tie_weights(recompute_mapping=False)
    for name, buffer in [*model.named_buffers()]:  # needed on the compute device, if parameters are not
        set_buffer(model, name, computed.get(name, buffer).to(get_device()))
    model.eval()


def assert_sharded(model: torch.nn.Module, layout: Layout) -> None:
    """Stop unless every parameter is sharded as planned. Call before the first forward, which leaves some gathered."""
    if not layout.is_sharded:
        return
    wrong = []
    for name, tensor in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            continue
        if not isinstance(tensor, DTensor):
            wrong.append(f"{name} (a plain tensor on every rank)")
            continue
        mesh = tensor.device_mesh
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        split = math.prod(
            size for size, place in zip(mesh.shape, tensor.placements, strict=True) if place != Replicate()
        )
        experts_over = (
            sizes.get("ep", 1) if layout.expert_parallel > 1 and ".experts." in name else layout.expert_parallel
        )
        if split != layout.shard or mesh.size() != layout.shard * layout.replicate:
            wrong.append(f"{name} (split over {split} of {mesh.size()} ranks, not {layout.shard} of {layout.ranks})")
        elif experts_over != layout.expert_parallel:
            wrong.append(f"{name} (experts split over {experts_over} ranks, not {layout.expert_parallel})")
    if wrong:
        raise UserError(
            f"the base is not sharded as {layout.name} plans it: {collectives.list_first(wrong)}",
            "layout",
            "nothing may move parameters between loading and the first step",
            "plan-disagrees",
        )
