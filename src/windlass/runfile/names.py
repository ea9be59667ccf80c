"""Names as data: old spellings, what upstream takes but windlass does not, optimizers, schedules, trackers."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable

# Old or upstream spellings that keep working, and the key of the run file that they mean. TRL's trainer takes data
# settings among its training arguments; here they belong to `data`.
RENAMED = {
    "model.dtype": "model.torch_dtype",
    "data.max_seq_length": "data.max_length",
    "data.dataset_text_field": "data.text_field",
    "train.max_seq_length": "data.max_length",
    "train.max_length": "data.max_length",
    "train.packing": "data.packing",
    "train.dataset_text_field": "data.text_field",
    "train.completion_only_loss": "data.completion_only_loss",
    "train.evaluation_strategy": "train.eval_strategy",
    "train.activation_checkpointing": "train.gradient_checkpointing",
    "train.per_gpu_train_batch_size": "train.per_device_train_batch_size",
    "train.per_gpu_eval_batch_size": "train.per_device_eval_batch_size",
    "train.resume_from_checkpoint": "train.resume",
}

# What people may bring along from other trainers' files, and where it went.
NOT_TAKEN = {
    "fsdp": "sharding is the `layout` section, or an Accelerate file given with --accelerate",
    "fsdp_config": "sharding is the `layout` section, or an Accelerate file given with --accelerate",
    "deepspeed": "sharding is the `layout` section: full-shard does what ZeRO-3 does",
    "local_rank": "ranks are numbered by what starts them",
    "use_cpu": "say cluster.gpu: cpu",
    "no_cuda": "say cluster.gpu: cpu",
    "load_in_4bit": "the base is held as published or in model.torch_dtype; there is no 4-bit base",
    "load_in_8bit": "the base is held as published or in model.torch_dtype; layout: resident keeps FP8 as published",
    "quantization_config": "the base is held as published or in model.torch_dtype; its own config.json says how",
    "gradient_checkpointing_kwargs": "checkpointing is always the non-reentrant kind, which sharding needs",
    "modules_to_save": "only adapters are trained; the base stays as certified at load",
    "target_parameters": "say lora.experts: the routed experts' parameters follow from it",
    "push_to_hub": "say `windlass export RUN_DIR --to DIR --push ORG/NAME` after the run",
    "remove_unused_columns": "columns are chosen by the `data` section",
    "do_eval": "say train.eval_strategy",
    "do_train": "the command says it: windlass train",
    "overwrite_output_dir": "a folder that holds a run is never overwritten; see train.resume",
    "num_machines": "say cluster.nodes",
    "num_processes": "say cluster.nodes and cluster.gpus_per_node",
    "mixed_precision": "say train.bf16",
    "torch_compile": "nothing is compiled: untested with sharded weights, adapters and rows of changing length",
    "metric_for_best_model": "the best checkpoint is the one with the lowest evaluation loss",
    "greater_is_better": "the best checkpoint is the one with the lowest evaluation loss",
    "logging_strategy": "values are logged every train.logging_steps",
}

# Values that people look for and that a key does not have: why not, and what to write.
NOT_VALUES = {
    ("layout.base_dtype", "nf4"): "bitsandbytes makes 4 bits of linear layers and silently leaves fused experts, nearly"
    " all of a mixture, in 16: write fp8 for a checkpoint that is published so, or null and the plan chooses",
    ("cluster.platform", "slurm"): "write script: its launch.sh runs on every node as a Slurm step (srun)",
    ("cluster.platform", "openshift"): "write kubernetes: OpenShift takes the same jobs",
    ("cluster.platform", "k8s"): "write kubernetes",
    ("cluster.platform", "run:ai"): "write runai",
}

# transformers 5.23, training_args.OptimizerNames; what each needs besides torch, by its trainer's optimizer code.
OPTIMIZERS = {
    **dict.fromkeys(
        ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop"),
        "",
    ),
    **dict.fromkeys(
        (
            *("adamw_bnb_8bit", "adamw_8bit", "ademamix", "ademamix_8bit", "lion_8bit", "lion_32bit"),
            *("paged_adamw_32bit", "paged_adamw_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit"),
            *("paged_lion_32bit", "paged_lion_8bit", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"),
        ),
        "bitsandbytes",
    ),
    **dict.fromkeys(("adamw_torch_4bit", "adamw_torch_8bit"), "torchao"),
    **dict.fromkeys(("grokadamw",), "grokadamw"),
    **dict.fromkeys(("stable_adamw",), "torch-optimi"),
    "adamw_anyprecision": "torchdistx",
    **dict.fromkeys(("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"), "schedulefree"),
}

# The same list's names that can't do what they are for here, and why.
OPTIMIZERS_REFUSED = {
    **dict.fromkeys(
        (
            *("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "galore_adamw_layerwise"),
            *("galore_adamw_8bit_layerwise", "galore_adafactor_layerwise", "apollo_adamw", "apollo_adamw_layerwise"),
        ),
        "projects gradients of full weights; an adapter's are low-rank already",
    ),
    **dict.fromkeys(("lomo", "adalomo"), "updates full weights inside backward, before gradients are averaged"),
    "adamw_torch_xla": "is for TPUs",
    "adamw_torch_npu_fused": "is for Ascend NPUs",
}

# transformers 5.23, trainer_utils.SchedulerType, with the arguments that each can't do without.
SCHEDULES: dict[str, tuple[str, ...]] = {
    "linear": (),
    "cosine": (),
    "cosine_with_restarts": (),
    "polynomial": (),
    "constant": (),
    "constant_with_warmup": (),
    "inverse_sqrt": (),
    "reduce_lr_on_plateau": (),
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
    "greedy": (),
}

# transformers 5.23, integrations.integration_utils.INTEGRATION_TO_CALLBACK, and the modules of which each needs one.
TRACKERS: dict[str, tuple[str, ...]] = {
    "none": (),
    "azure_ml": ("azureml",),
    "comet_ml": ("comet_ml",),
    "mlflow": ("mlflow",),
    "neptune": ("neptune",),
    "tensorboard": ("tensorboard", "tensorboardX"),
    "trackio": ("trackio",),
    "wandb": ("wandb",),
    "codecarbon": ("codecarbon",),
    "clearml": ("clearml",),
    "dagshub": ("dagshub",),
    "flyte": ("flytekit",),
    "dvclive": ("dvclive",),
    "swanlab": ("swanlab",),
}
TRACKER_EXTRAS = ("tensorboard", "wandb", "mlflow", "trackio")  # those of pyproject, which the tests run with

# transformers 5.23, modeling_utils.ALL_ATTENTION_FUNCTIONS, and eager, which every model has.
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")


def close_names(word: str, among: Iterable[str], count: int = 3) -> list[str]:
    """The names that a misspelt one may have meant, nearest first."""
    names = list(among)
    by_fold = {name.lower().replace("-", "_"): name for name in names}
    found = difflib.get_close_matches(word[:100].lower().replace("-", "_"), list(by_fold), n=count, cutoff=0.6)
    return [by_fold[name] for name in found]


def absent_trackers(report_to: str | list[str]) -> dict[str, str]:
    """Trackers of `train.report_to` that are not installed here -> how to install each."""
    names = [report_to] if isinstance(report_to, str) else report_to
    lacking = [n for n in names if TRACKERS[n] and not any(map(importlib.util.find_spec, TRACKERS[n]))]
    packages = {n: f"'windlass[{n}]'" if n in TRACKER_EXTRAS else TRACKERS[n][0] for n in lacking}
    return {name: f"pip install {package}" for name, package in packages.items()}
