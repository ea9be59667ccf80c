"""The run file's `train` section: the published recipe's keys, and the arguments people set every day."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from windlass.runfile.kinds import Count, Natural, Section, Share, Text, Whole


def _off(value: Any) -> Any:
    """YAML 1.1 reads a bare `no` as false."""
    return "no" if value is False else value


def _nobody(value: Any) -> Any:
    return "none" if value is None or value is False or value == [] else value


def _resume(value: Any) -> Any:
    return {True: "auto", False: "never"}.get(value, value) if isinstance(value, bool) else value


def _steps(value: int) -> int:
    if value == 0 or value < -1:
        raise ValueError(f"must be a number of steps above 0, or -1 for whole epochs, not {value}")
    return value


_When = Annotated[
    Literal["no", "steps", "epoch"],
    BeforeValidator(_off, json_schema_input_type=Literal["no", "steps", "epoch", False]),
]


class Train(Section):
    """The training: the names of transformers' and TRL's arguments."""

    output_dir: Text = "/data/output/Models/mistral4small-lora-fsdp"
    """The run folder: everything that the run writes goes there."""
    num_train_epochs: Annotated[float, Field(gt=0)] = 1
    """Passes over the training data; a fraction is taken as well."""
    max_steps: Annotated[Whole, AfterValidator(_steps)] = -1
    """Stop after so many optimizer steps, whatever num_train_epochs says; -1: by epochs."""
    per_device_train_batch_size: Count | Literal["auto"] = 1
    """Sequences per GPU in one forward and backward pass. auto: the plan divides the sequences of an optimizer step,
    which stay gradient_accumulation_steps per GPU (or global_batch_size in all), into the fastest passes that fit."""
    per_device_eval_batch_size: Count = 1
    """Sequences per GPU in one evaluation pass."""
    gradient_accumulation_steps: Count = 16
    """Passes whose gradients are summed for one optimizer step."""
    global_batch_size: Count | None = None
    """Sequences per optimizer step over all GPUs; gradient_accumulation_steps follows from it and must be whole."""
    gradient_checkpointing: bool = False
    """Compute activations again in backward instead of keeping them: far less memory, about a third more work."""
    optim: Text = "adamw_torch"
    """Optimizer, by transformers' name."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    """Peak learning rate."""
    lr_scheduler_type: Text = "cosine"
    """Schedule of the learning rate, by transformers' name."""
    lr_scheduler_kwargs: dict[str, int | float | str | bool] | None = None
    """Further arguments of that schedule, such as min_lr for cosine_with_min_lr."""
    warmup_ratio: Share = 0.05
    """Share of all steps in which the rate rises from 0 to its peak. 0 where warmup_steps is given instead."""
    warmup_steps: Natural | None = None
    """Steps in which the rate rises, instead of a share."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decay of the adapter's weights."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Adam's decay of the first moment."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Adam's decay of the second moment."""
    adam_epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Adam's guard against division by zero."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradients are scaled down to this norm; 0: never."""
    bf16: bool = True
    """Compute in bfloat16."""
    fp16: bool = False
    """Only false is taken: float16 overflows now and then, and here such a step ends a run."""
    logging_steps: Count = 25
    """Optimizer steps between two logged values."""
    eval_strategy: _When = "steps"
    """Evaluate never (no), every eval_steps (steps), or after each epoch. Also written `evaluation_strategy`."""
    eval_steps: Count = 200
    """Optimizer steps between two evaluations."""
    save_strategy: _When = "steps"
    """Save checkpoints never (no), every save_steps (steps), or after each epoch."""
    save_steps: Count = 200
    """Optimizer steps between two checkpoints."""
    save_total_limit: Count | None = 3
    """Checkpoints to keep, the newest and the best; null: all."""
    load_best_model_at_end: bool = False
    """End with the adapter of the checkpoint that evaluated best."""
    report_to: Annotated[
        Text | list[Text],
        BeforeValidator(_nobody, json_schema_input_type=str | list[str] | None),
    ] = "none"
    """Trackers that get the metrics, by transformers' names; none for none."""
    run_name: Text | None = None
    """Name of the run in those trackers."""
    seed: Natural = 42
    """Seed of the adapter's initialisation, of dropout and of the data's order."""
    data_seed: Natural | None = None
    """Seed of the data's order alone; null: `seed`."""
    dataloader_num_workers: Natural = 0
    """Processes per rank that prepare batches."""
    dataloader_pin_memory: bool = True
    """Keep batches in page-locked host memory, from which GPUs copy faster."""
    ddp_find_unused_parameters: bool = False
    """Accepted as in the published recipe, without effect: the model is not wrapped in DistributedDataParallel."""
    ddp_timeout: Count = 600
    """Seconds after which a collective that does not complete ends the run."""
    resume: Annotated[
        Literal["never", "auto"],
        BeforeValidator(_resume, json_schema_input_type=Literal["never", "auto", True, False]),
    ] = "never"
    """auto: resume from the newest whole checkpoint in output_dir; never: refuse a folder that holds one."""

    @model_validator(mode="before")
    @classmethod
    def _one_warm_up(cls, section: Any) -> Any:
        """Given steps replace the default share; 0 steps beside a given share are transformers' default."""
        if not isinstance(section, dict) or section.get("warmup_steps") is None:
            return section
        if "warmup_ratio" not in section:
            return {**section, "warmup_ratio": 0.0}
        return {**section, "warmup_steps": None} if section["warmup_steps"] == 0 else section

    @property
    def least_batch(self) -> int:
        """per_device_train_batch_size; where the plan chooses it, the least that it may choose."""
        return 1 if self.per_device_train_batch_size == "auto" else self.per_device_train_batch_size

    @property
    def order_seed(self) -> int:
        """Seed of the data's order."""
        return self.seed if self.data_seed is None else self.data_seed

    def warmup(self, steps: int) -> int:
        """Steps of warm-up in a run of so many; a share is rounded up, as transformers does."""
        return self.warmup_steps if self.warmup_steps is not None else math.ceil(self.warmup_ratio * steps)
