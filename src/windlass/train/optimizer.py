"""Optimizers and schedules by transformers' names, with the settings that its Trainer gives them."""

import re
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import nn
from transformers import get_scheduler
from transformers.trainer_optimizer import OptimizerContext
from transformers.training_args import OptimizerNames

from windlass.compat import get_optimizers
from windlass.runfile import Train
from windlass.runfile.names import EVALUATED_SCHEDULES

# Parameters that no weight decay is applied to: transformers' trainer, get_decay_parameter_names.
UNDECAYED: Final = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def create_optimizer(train: Train, named: Iterable[tuple[str, nn.Parameter]], steps: int) -> torch.optim.Optimizer:
    """Create an optimizer over the trainable parameters, in groups with and without weight decay; the base's own are
    separate.

    An optimizer updates a group in one call only if all of it is sharded or none of it is.
    """
    trainable = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    adapter = [(name, parameter) for name, parameter in trainable if "lora_" in name]
    in_full = [(name, parameter) for name, parameter in trainable if "lora_" not in name]
    groups = []
    for parameters in (adapter, in_full):
        decayed = [parameter for name, parameter in parameters if not UNDECAYED.search(name.lower())]
        undecayed = [parameter for name, parameter in parameters if UNDECAYED.search(name.lower())]
        if parameters:
            groups.append({"params": decayed, "weight_decay": train.weight_decay})
            groups.append({"params": undecayed, "weight_decay": 0.0})
    settings: Any = SimpleNamespace(
        optim=OptimizerNames(train.optim),
        learning_rate=train.learning_rate,
        weight_decay=train.weight_decay,
        adam_beta1=train.adam_beta1,
        adam_beta2=train.adam_beta2,
        adam_epsilon=train.adam_epsilon,
        warmup_steps=train.warmup(steps),
    )
    adam = {"betas": (train.adam_beta1, train.adam_beta2), "eps": train.adam_epsilon}
    context = OptimizerContext(settings, None, {"lr": train.learning_rate}, adam, optim_args={})
    optimizer_class, arguments = get_optimizers()[settings.optim](context)
    optimizer: torch.optim.Optimizer = optimizer_class(groups, **arguments)
    return optimizer


def create_scheduler(train: Train, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    return get_scheduler(
        train.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=train.warmup(steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=train.lr_scheduler_kwargs,
    )


def is_metric_scheduler(train: Train) -> bool:
    """Return whether this schedule follows the evaluation loss instead of steps."""
    return train.lr_scheduler_type in EVALUATED_SCHEDULES
