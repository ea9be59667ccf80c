"""The run file's `train` and `data` sections in TRL's words: one table, so that no key is lost on the way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trl import SFTConfig

if TYPE_CHECKING:
    from windlass.plan import Plan
    from windlass.runfile import Train

# Keys of `train` that SFTConfig takes under the same name and with the same meaning.
SAME = (
    "num_train_epochs",
    "max_steps",
    "per_device_eval_batch_size",
    "optim",
    "learning_rate",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "bf16",
    "fp16",
    "logging_steps",
    "eval_strategy",
    "eval_steps",
    "save_strategy",
    "save_steps",
    "save_total_limit",
    "load_best_model_at_end",
    "report_to",
    "seed",
    "ddp_timeout",
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "run_name",
)

# Keys that are ours: where each is used instead.
OURS = {
    "output_dir": "the run folder",
    "per_device_train_batch_size": "plan.batch.micro, which global_batch_size may decide",
    "gradient_accumulation_steps": "plan.batch.accumulation, which global_batch_size may decide",
    "global_batch_size": "plan.batch",
    "gradient_checkpointing": "activation_checkpointing, its present name, or the layout asks for it",
    "warmup_ratio": "warmup_steps below 1, as SFTConfig spells a share now",
    "warmup_steps": "takes precedence over warmup_ratio",
    "data_seed": "the order of the rows, which is ours",
    "ddp_find_unused_parameters": "every rank reduces the same tensors whatever its batch used",
    "resume": "whether an unfinished run in the folder is resumed",
}


def settings(plan: Plan, data: Mapping[str, Any], *, cpu: bool) -> SFTConfig:
    """SFTConfig for this run. `data` is what the prepared rows ask for. The rest keeps the library's default."""
    train = plan.loaded.run.train
    given = {name: value for name in SAME if (value := getattr(train, name)) is not None}
    evaluated = {"metric_for_best_model": "loss", "greater_is_better": False} if train.eval_strategy != "no" else {}
    return SFTConfig(
        **{**given, **ALWAYS, **evaluated, **data},
        output_dir=train.output_dir,
        per_device_train_batch_size=plan.batch.micro,
        gradient_accumulation_steps=plan.batch.accumulation,
        warmup_steps=warmup(train),
        activation_checkpointing=train.gradient_checkpointing or plan.layout.activation_checkpointing,
        use_cpu=cpu,
    )


ALWAYS: dict[str, Any] = {
    "disable_tqdm": True,  # progress is ours
    "log_level": "error",
    "save_only_model": True,  # the Trainer can't checkpoint a model sharded at load time; `checkpoint` does
    "logging_nan_inf_filter": False,  # it would put the last loss in place of a non-finite one
}


def warmup(train: Train) -> float:
    """Steps, or below 1 a share of all steps: SFTConfig takes both here, and 1 is a step, so a share stays below."""
    return float(train.warmup_steps) if train.warmup_steps is not None else min(train.warmup_ratio, 1 - 1e-9)
