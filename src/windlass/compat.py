"""What differs between the supported versions of torch and transformers, each with the version from which it can go."""

import inspect
from dataclasses import fields
from typing import Any, Final

import torch
import transformers
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers.distributed import DistributedConfig

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
