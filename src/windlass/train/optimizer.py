"""Optimizers and schedules by transformers' names, with the settings that its trainer gives them."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

if TYPE_CHECKING:
    from windlass.runfile import Train

# Parameters that no weight decay is applied to: transformers' trainer, get_decay_parameter_names.
UNDECAYED: Final = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
BITS8: Final = {"optim_bits": 8}
BITS32: Final = {"optim_bits": 32}


@dataclass(frozen=True, slots=True)
class Optimizer:
    """Where a class is, which of train's settings it takes besides the learning rate, and what it is always given."""

    path: str
    takes: tuple[str, ...] = ("betas", "eps")
    given: dict[str, Any] = field(default_factory=dict)


def _bitsandbytes(name: str, bits: dict[str, int], takes: tuple[str, ...], *, paged: bool = False) -> Optimizer:
    more: dict[str, Any] = {} if name == "RMSprop" else {"is_paged": paged}
    more |= {"alpha": 5.0} if name == "AdEMAMix" else {}
    return Optimizer(f"bitsandbytes.optim.{name}", takes, {**bits, **more})


_ADAM, _LION = ("betas", "eps"), ("betas",)
_MIX = ("three_betas", "eps")
_BLOCKS = {"block_size": 256, "bf16_stochastic_round": False}
_FREE = {"weight_lr_power": 2.0, "r": 0.0}
# transformers 5.23, trainer_optimizer.py. runfile.names says which names are taken, and what has to be installed.
OPTIMIZERS: Final[dict[str, Optimizer]] = {
    "adamw_torch": Optimizer("torch.optim.AdamW"),
    "adamw_torch_fused": Optimizer("torch.optim.AdamW", given={"fused": True}),
    "adafactor": Optimizer(
        "transformers.optimization.Adafactor", (), {"scale_parameter": False, "relative_step": False}
    ),
    "sgd": Optimizer("torch.optim.SGD", ()),
    "adagrad": Optimizer("torch.optim.Adagrad", ()),
    "rmsprop": Optimizer("torch.optim.RMSprop", ()),
    "adamw_bnb_8bit": _bitsandbytes("AdamW", BITS8, _ADAM),
    "adamw_8bit": _bitsandbytes("AdamW", BITS8, _ADAM),
    "paged_adamw_32bit": _bitsandbytes("AdamW", BITS32, _ADAM, paged=True),
    "paged_adamw_8bit": _bitsandbytes("AdamW", BITS8, _ADAM, paged=True),
    "ademamix": _bitsandbytes("AdEMAMix", BITS32, _MIX),
    "ademamix_8bit": _bitsandbytes("AdEMAMix", BITS8, _MIX),
    "paged_ademamix_32bit": _bitsandbytes("AdEMAMix", BITS32, _MIX, paged=True),
    "paged_ademamix_8bit": _bitsandbytes("AdEMAMix", BITS8, _MIX, paged=True),
    "lion_32bit": _bitsandbytes("Lion", BITS32, _LION),
    "lion_8bit": _bitsandbytes("Lion", BITS8, _LION),
    "paged_lion_32bit": _bitsandbytes("Lion", BITS32, _LION, paged=True),
    "paged_lion_8bit": _bitsandbytes("Lion", BITS8, _LION, paged=True),
    "rmsprop_bnb": _bitsandbytes("RMSprop", BITS32, ()),
    "rmsprop_bnb_8bit": _bitsandbytes("RMSprop", BITS8, ()),
    "rmsprop_bnb_32bit": _bitsandbytes("RMSprop", BITS32, ()),
    "adamw_torch_4bit": Optimizer("torchao.optim.AdamW4bit", _ADAM, _BLOCKS),
    "adamw_torch_8bit": Optimizer("torchao.optim.AdamW8bit", _ADAM, _BLOCKS),
    "grokadamw": Optimizer(
        "grokadamw.GrokAdamW",
        (),
        {"alpha_init": 0.98, "lamb": 2.0, "gamma": 0.1, "grokking_signal_decay_rate": 0.1, "gradient_clipping": 1.0},
    ),
    "stable_adamw": Optimizer(
        "optimi.StableAdamW", (*_ADAM, "weight_decay"), {"decouple_lr": False, "max_lr": None, "kahan_sum": None}
    ),
    "adamw_anyprecision": Optimizer(
        "torchdistx.optimizers.AnyPrecisionAdamW",
        _ADAM,
        {
            "use_kahan_summation": False,
            "momentum_dtype": torch.float32,
            "variance_dtype": torch.float32,
            "compensation_buffer_dtype": torch.bfloat16,
        },
    ),
    "schedule_free_radam": Optimizer("schedulefree.RAdamScheduleFree", (*_ADAM, "weight_decay"), _FREE),
    "schedule_free_adamw": Optimizer("schedulefree.AdamWScheduleFree", (*_ADAM, "weight_decay", "warmup_steps"), _FREE),
    "schedule_free_sgd": Optimizer("schedulefree.SGDScheduleFree", ("weight_decay", "warmup_steps"), _FREE),
}


def create_optimizer(train: Train, named: Iterable[tuple[str, nn.Parameter]], steps: int) -> torch.optim.Optimizer:
    """Over the trainable parameters, in two groups: with weight decay and without."""
    trainable = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    decayed = [parameter for name, parameter in trainable if not UNDECAYED.search(name.lower())]
    undecayed = [parameter for name, parameter in trainable if UNDECAYED.search(name.lower())]
    groups = [
        {"params": decayed, "weight_decay": train.weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    chosen = OPTIMIZERS[train.optim]
    settings = {
        "betas": (train.adam_beta1, train.adam_beta2),
        "three_betas": (train.adam_beta1, train.adam_beta2, 0.9999),  # transformers' default for AdEMAMix
        "eps": train.adam_epsilon,
        "weight_decay": train.weight_decay,
        "warmup_steps": train.warmup(steps),
    }
    taken = {name.removeprefix("three_"): settings[name] for name in chosen.takes}
    module, _, name = chosen.path.rpartition(".")
    optimizer: torch.optim.Optimizer = getattr(importlib.import_module(module), name)(
        groups, lr=train.learning_rate, **taken, **chosen.given
    )
    return optimizer


def create_scheduler(train: Train, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    from transformers import get_scheduler

    return get_scheduler(
        train.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=train.warmup(steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=train.lr_scheduler_kwargs,
    )


def follows_evaluation(scheduler: Any) -> bool:
    """Whether this schedule goes by the evaluation loss (reduce_lr_on_plateau, greedy), not by steps."""
    return isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) or type(scheduler).__name__ == "GreedyLR"
