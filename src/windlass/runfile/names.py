"""Names as data: other spellings of our keys, what windlass doesn't take, optimizers, schedules, trackers."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable

# Old or upstream spellings that are accepted, and our key. TRL's trainer takes data settings among its training
# arguments; here they belong to `data`.
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

# What other tools and people call our keys. These names are answered with ours, not accepted.
OTHER_NAMES = {
    name: key
    for key, names in {
        "model.model_name_or_path": "base_model model_name pretrained_model_name_or_path model_path",
        "model.torch_dtype": "model_dtype precision",
        "model.attn_implementation": "flash_attn flash_attention attn_impl sdp_attention",
        "lora.r": "rank lora_r lora_rank",
        "lora.lora_alpha": "alpha",
        "lora.lora_dropout": "dropout",
        "lora.target_modules": "lora_target lora_target_modules lora_target_linear targets",
        "lora.use_rslora": "rslora peft_use_rslora",
        "lora.use_dora": "dora peft_use_dora",
        "lora.adapter": "adapter_name_or_path lora_model_dir",
        "data.dataset_name_or_path": "dataset datasets dataset_name dataset_path dataset_dir train_file",
        "data.dataset_config_name": "dataset_config subset",
        "data.train_split": "split dataset_train_split max_samples",
        "data.val_split": "dataset_test_split test_datasets eval_dataset eval_split",
        "data.val_fraction": "val_size val_set_size test_size",
        "data.max_length": "sequence_len cutoff_len max_seq_len seq_length seq_len block_size context_length"
        " model_max_length",
        "data.packing": "sample_packing multipack neat_packing",
        "data.completion_only_loss": "train_on_inputs train_on_prompt assistant_only_loss",
        "data.messages_field": "field_messages",
        "train.num_train_epochs": "epochs num_epochs n_epochs",
        "train.max_steps": "steps num_steps",
        "train.per_device_train_batch_size": "micro_batch_size batch_size train_batch_size",
        "train.per_device_eval_batch_size": "eval_batch_size",
        "train.gradient_accumulation_steps": "grad_accum gradient_accumulation accumulation_steps",
        "train.gradient_checkpointing": "checkpoint_activations",
        "train.learning_rate": "lr",
        "train.lr_scheduler_type": "lr_scheduler scheduler",
        "train.lr_scheduler_kwargs": "lr_scheduler_args",
        "train.optim": "optimizer optimizer_type",
        "train.max_grad_norm": "gradient_clipping grad_clip clip_grad_norm max_norm",
        "train.eval_steps": "eval_every eval_freq",
        "train.save_steps": "save_every save_freq",
        "train.save_total_limit": "keep_last_n",
        "train.logging_steps": "log_every log_freq",
        "train.dataloader_num_workers": "num_workers",
        "train.ddp_timeout": "nccl_timeout",
        "cluster.nodes": "num_nodes nnodes num_machines",
        "cluster.gpus_per_node": "num_gpus gpus nproc_per_node n_gpu",
    }.items()
    for name in names.split()
}

# What other trainers' files have and windlass doesn't, and what to do instead.
NOT_TAKEN = {
    "fsdp": "sharding is the `layout` section, or an Accelerate file given with --accelerate",
    "fsdp_config": "sharding is the `layout` section, or an Accelerate file given with --accelerate",
    "deepspeed": "sharding is the `layout` section: full-shard does what ZeRO-3 does",
    "local_rank": "remove it: torchrun, accelerate or windlass number the ranks",
    "use_cpu": "write cluster.gpu: cpu",
    "no_cuda": "write cluster.gpu: cpu",
    "load_in_4bit": "remove it: the base model is stored as published or in model.torch_dtype, never in 4 bits",
    "load_in_8bit": "the base model is stored as published or in model.torch_dtype; layout: resident keeps FP8",
    "quantization_config": "remove it: the checkpoint's own config.json says how it is quantised",
    "gradient_checkpointing_kwargs": "remove it: checkpointing is always non-reentrant, which sharding needs",
    "modules_to_save": "remove it: only adapters are trained",
    "additional_target": "remove it: only adapters are trained",
    "finetuning_type": "remove it: windlass always trains LoRA adapters",
    "target_parameters": "write lora.experts: it finds the routed experts' parameters",
    "push_to_hub": "after the run: `windlass export RUN_DIR --to DIR --push ORG/NAME`",
    "remove_unused_columns": "remove it: the `data` section chooses the columns",
    "do_eval": "write train.eval_strategy",
    "do_train": "remove it: `windlass train` trains",
    "overwrite_output_dir": "remove it: a folder with a run is never overwritten; see train.resume",
    "num_processes": "write cluster.nodes and cluster.gpus_per_node",
    "mixed_precision": "write train.bf16",
    "torch_compile": "remove it: compiling sharded weights with adapters and varying lengths is untested",
    "metric_for_best_model": "remove it: the best checkpoint is the one with the lowest evaluation loss",
    "greater_is_better": "remove it: the best checkpoint is the one with the lowest evaluation loss",
    "logging_strategy": "write train.logging_steps",
}

# Values that people try and that a key doesn't have, and what to do instead.
NOT_VALUES = {
    ("layout.base_dtype", "nf4"): "write fp8 for a checkpoint published in FP8, or null: bitsandbytes would silently"
    " leave fused experts, nearly all of a mixture, in 16 bits",
    ("cluster.platform", "slurm"): "write script: its launch.sh runs on every node as a Slurm step (srun)",
    ("cluster.platform", "openshift"): "write kubernetes: OpenShift takes the same jobs",
    ("cluster.platform", "k8s"): "write kubernetes",
    ("cluster.platform", "run:ai"): "write runai",
}

# transformers 5.23, training_args.OptimizerNames; what each needs besides torch, by its trainer's optimizer code.
OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop"), ""),
    **dict.fromkeys(
        (
            *("adamw_bnb_8bit", "adamw_8bit", "ademamix", "ademamix_8bit", "lion_8bit", "lion_32bit"),
            *("paged_adamw_32bit", "paged_adamw_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit"),
            *("paged_lion_32bit", "paged_lion_8bit", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"),
        ),
        "bitsandbytes",
    ),
    **dict.fromkeys(("adamw_torch_4bit", "adamw_torch_8bit"), "torchao"),
    "grokadamw": "grokadamw",
    "stable_adamw": "torch-optimi",
    "adamw_anyprecision": "torchdistx",
    **dict.fromkeys(("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"), "schedulefree"),
}

# Names of the same list that don't work here, and why.
OPTIMIZERS_REFUSED = {
    **dict.fromkeys(
        (
            *("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "galore_adamw_layerwise"),
            *("galore_adamw_8bit_layerwise", "galore_adafactor_layerwise", "apollo_adamw", "apollo_adamw_layerwise"),
        ),
        "projects gradients of full weights, but an adapter's are already low-rank",
    ),
    **dict.fromkeys(("lomo", "adalomo"), "updates full weights inside backward, before gradients are averaged"),
    "adamw_torch_xla": "is for TPUs",
    "adamw_torch_npu_fused": "is for Ascend NPUs",
}

# transformers 5.23, trainer_utils.SchedulerType, with the arguments of which each needs one.
SCHEDULES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"), ()),
    **dict.fromkeys(("inverse_sqrt", "reduce_lr_on_plateau", "greedy"), ()),
    **dict.fromkeys(("cosine_with_min_lr", "cosine_warmup_with_min_lr"), ("min_lr", "min_lr_rate")),
    "warmup_stable_decay": ("num_decay_steps",),
}

# What train/trackers.py writes to, by transformers' names, and the modules of which each needs one.
TRACKERS: dict[str, tuple[str, ...]] = {
    "none": (),
    "mlflow": ("mlflow",),
    "tensorboard": ("tensorboard",),
    "trackio": ("trackio",),
    "wandb": ("wandb",),
}

# transformers 5.23, modeling_utils.ALL_ATTENTION_FUNCTIONS, and eager, which every model has.
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")


def close_names(word: str, among: Iterable[str], count: int = 3) -> list[str]:
    """The names that a misspelt one may have meant, nearest first."""
    names = list(among)
    by_fold = {name.lower().replace("-", "_"): name for name in names}
    found = difflib.get_close_matches(word[:100].lower().replace("-", "_"), list(by_fold), n=count, cutoff=0.6)
    return [by_fold[name] for name in found]


def absent_trackers(report_to: str | list[str]) -> dict[str, str]:
    """Trackers of `train.report_to` that are not installed here, and how to install each."""
    names = [report_to] if isinstance(report_to, str) else report_to
    lacking = [n for n in names if TRACKERS[n] and not any(map(importlib.util.find_spec, TRACKERS[n]))]
    return {name: f"pip install {TRACKERS[name][0]}" for name in lacking}
