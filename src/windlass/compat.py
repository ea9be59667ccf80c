"""What differs between the supported versions of torch and transformers, each with the version from which it can go.

And the private names that are imported of libraries, each with its reason and when it can go.
"""

import inspect
from dataclasses import fields
from typing import Any, Final

import torch
import transformers
from torch import nn
from torch._subclasses import fake_tensor
from torch.distributed import _composable_state
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import _utils as tensor_utils
from torch.nn.attention.varlen import varlen_attn
from torch.utils import _python_dispatch, _pytree
from transformers.distributed import DistributedConfig
from transformers.integrations import moe

from windlass.versions import SINCE, is_older

# Until transformers >=5.23 is required: expert parallelism and hybrid sharding, which are refused before.
HAS_EXPERT_PARALLELISM: Final = not is_older(transformers.__version__, SINCE["expert parallelism"].version)
# Until transformers >=5.24 is required: the name of keys and values in arguments and outputs.
CACHE: Final = "past_key_values" if is_older(transformers.__version__, "5.24") else "cache"
# Until torch >=2.13 is required: 2.11 finds grouped heads by itself, and has no such argument.
GROUPED: Final[dict[str, Any]] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)
# Until torch >=2.13 is required: before, FSDP2 gathers a group again only once all its modules have run.
WAITS_FOR_GROUPS: Final = is_older(torch.__version__, "2.13")

if HAS_EXPERT_PARALLELISM:
    from transformers.distributed.expert_parallel import AllToAllEP as AllToAllEP
    from transformers.distributed.expert_parallel import EPImplementationInterface as EPImplementationInterface
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES as ALL_PARALLEL_STYLES
else:
    AllToAllEP = object
    EPImplementationInterface = ALL_PARALLEL_STYLES = None

# --- private names ---

# Products of rows sorted by expert. Until transformers has them without a module around them.
grouped_product = moe._grouped_linear
grouped_mm = moe._grouped_mm
# FSDP2's state of a module, which copies of the module share. Until torch copies sharded modules.
get_fsdp_state = _composable_state._get_module_state
set_fsdp_state = _composable_state._insert_module_state
# Of a group that FSDP2 gathers. Until torch >=2.13 is required: see WAITS_FOR_GROUPS.
TrainingState = _fsdp_common.TrainingState
# Where a rank's shard is in the full tensor. Until torch.distributed.tensor exports it.
find_local_part = tensor_utils.compute_local_shape_and_global_offset
# Layers traced without memory. Until torch names these publicly; they are as they were in 2.0.
FakeTensorMode = fake_tensor.FakeTensorMode
TorchDispatchMode = _python_dispatch.TorchDispatchMode
tree_leaves = _pytree.tree_leaves
tree_map_only = _pytree.tree_map_only


def get_optimizers() -> Any:
    """Return transformers' optimizers by name, without half a second of imports for the rest of its Trainer. Until they
    are public."""
    from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS

    return _OPTIMIZER_HANDLERS


def check_mamba_targets(*given: Any) -> None:
    """Let PEFT refuse adapters in Mamba layers. Until it says by data what it refuses."""
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    _check_lora_target_modules_mamba(*given)


def make_distributed_config(**sizes: Any) -> DistributedConfig:
    """Return the configuration without what an older version doesn't have. Until transformers >=5.23 is required."""
    known = {field.name for field in fields(DistributedConfig)}
    return DistributedConfig(**{name: size for name, size in sizes.items() if name in known})


def get_expert_plan(model: Any) -> Any:
    """Until transformers >=5.23 is required."""
    return model.ep_plan if HAS_EXPERT_PARALLELISM else model._ep_plan


def has_post_expert_norm(experts: nn.Module) -> bool:
    """Until transformers >=5.23 is required: no experts have one before."""
    return bool(getattr(experts, "has_post_expert_norm", False))


def enable_checkpointing(model: Any, options: dict[str, Any]) -> None:
    """Until transformers >=5.23 is required."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)
