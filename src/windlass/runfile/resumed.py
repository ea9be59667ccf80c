"""What a resumed run may change of its run file."""

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from windlass.errors import Problem

# What may change when a run is resumed, and why: sections, and keys of others. All other keys must be as they were.
FREE: Final[dict[str, str]] = {
    "kind": "a script's run has no checkpoints of windlass",
    "name": "it names the job",
    "sweep": "every trial is a run of its own, which is compared",
    "layout": "every layout computes the same, within rounding; base_dtype is compared by itself",
    "cluster": "any machines compute the same, within rounding",
    "watch": "alarms change no step, and whoever resumes after one may have to change it",
    "model.model_name_or_path": "the base's weights and config.json are compared",
    "model.device_map": "it has no effect",
    "model.use_cache": "it has no effect",
    "lora.adapter": "the checkpoint has the adapter",
    "data.dataset_name_or_path": "the tokens are compared",
    "train.output_dir": "it is the folder that is resumed, which may have been moved",
    "train.num_train_epochs": "a run may be made longer or shorter, which is reported",
    "train.max_steps": "a run may be made longer or shorter, which is reported",
    "train.per_device_train_batch_size": "the sequences of a step are compared",
    "train.gradient_accumulation_steps": "the sequences of a step are compared",
    "train.global_batch_size": "the sequences of a step are compared",
    "train.per_device_eval_batch_size": "an evaluation is a mean over tokens",
    "train.gradient_checkpointing": "what is computed again is the same",
    "train.offload_activations": "what comes back is the same",
    "train.compile": "compiled layers are proven equal to eager ones",
    "train.sample": "continuing prompts changes no step",
    "train.logging_steps": "it changes no step",
    "train.eval_strategy": "evaluations change no step, unless the schedule follows them",
    "train.eval_steps": "evaluations change no step, unless the schedule follows them",
    "train.eval_on_start": "it changes no step",
    "train.save_strategy": "it changes no step",
    "train.save_steps": "it changes no step",
    "train.save_total_limit": "it changes no step",
    "train.load_best_model_at_end": "it is decided at the end",
    "train.report_to": "it changes no step",
    "train.run_name": "it changes no step",
    "train.dataloader_num_workers": "it changes no batch",
    "train.dataloader_pin_memory": "it changes no batch",
    "train.ddp_find_unused_parameters": "it has no effect",
    "train.ddp_timeout": "it changes no step",
    "train.resume": "it says whether to resume",
}


def find_changes(
    then: Mapping[str, Any], now: Mapping[str, Any], where: Callable[[str], str], hint: str, also: Collection[str] = ()
) -> list[Problem]:
    """Return a problem for each setting that a run, as recorded, began with and that is another now. `also`: keys of
    those that may change which may not here."""
    return [
        Problem(
            f"was {json.dumps(then[section][key])} when this run began, is {json.dumps(value)} now",
            where(f"{section}.{key}"),
            hint,
            "changed-setting",
        )
        for section, values in now.items()
        if section not in FREE
        for key, value in values.items()
        if (f"{section}.{key}" not in FREE or f"{section}.{key}" in also)
        and key in then.get(section, {})
        and then[section][key] != value
    ]
