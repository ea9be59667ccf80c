"""A run file as manifests record it, and what a resumed run may change of it."""

import copy
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from windlass.errors import Problem
from windlass.runfile.fields import RunFile
from windlass.runfile.names import group_by_name
from windlass.runfile.rows import RECIPE_CONFIG, Data, RowFormat

# Keys of `data` and its sets that are recorded with these values instead of null and `auto`.
RECORDED = {"dataset_config_name": RECIPE_CONFIG, "text_field": "text"}
# What may change when a run is resumed, by the reason: sections, and keys of others. All other keys must stay.
FREE: Final = group_by_name(
    {
        "a script's run has no checkpoints of windlass": "kind",
        "it names the job": "name",
        "every trial is a run of its own, which is compared": "sweep",
        "every layout computes the same, within rounding; base_dtype is compared by itself": "layout",
        "any machines compute the same, within rounding": "cluster",
        "alarms change no step, and whoever resumes after one may have to change it": "watch",
        "the base's weights and config.json are compared": "model.model_name_or_path",
        "it has no effect": "model.device_map model.use_cache train.ddp_find_unused_parameters",
        "the checkpoint has the adapter": "lora.adapter",
        "the tokens are compared": "data.dataset_name_or_path",
        "it is the folder that is resumed, which may have been moved": "train.output_dir",
        "a run may be made longer or shorter, which is reported": "train.num_train_epochs train.max_steps",
        "the sequences of a step are compared": (
            "train.per_device_train_batch_size train.gradient_accumulation_steps train.global_batch_size"
        ),
        "an evaluation is a mean over tokens": "train.per_device_eval_batch_size",
        "what is computed again is the same": "train.gradient_checkpointing",
        "what comes back is the same": "train.offload_activations",
        "compiled layers are proven equal to eager ones": "train.compile",
        "continuing prompts changes no step": "train.sample",
        "evaluations change no step, unless the schedule follows them": "train.eval_strategy train.eval_steps",
        "it changes no step": (
            "train.logging_steps train.eval_on_start train.save_strategy train.save_steps "
            "train.save_total_limit train.report_to train.run_name train.ddp_timeout"
        ),
        "it is decided at the end": "train.load_best_model_at_end",
        "it changes no batch": "train.dataloader_num_workers train.dataloader_pin_memory",
        "it says whether to resume": "train.resume",
    }
)


def record_run(run: RunFile) -> dict[str, Any]:
    """Return a run's sections as its manifest records them."""
    sections = run.model_dump(mode="json")
    data = sections["data"]
    data["val_split"] = run.data.validation_split
    for rows in (data, *data["mix"], *data["eval"].values(), *data["keep"].values()):
        for key, recorded in RECORDED.items():
            if rows[key] == RowFormat.model_fields[key].default:
                rows[key] = recorded
    sections["train"]["eval_strategy"] = run.train.evaluation
    return sections


def read_recorded_data(recorded: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest's `data` without defaults, which were not requested."""
    data: dict[str, Any] = copy.deepcopy(recorded)
    for rows in (data, *data.get("mix", ()), *data.get("eval", {}).values(), *data.get("keep", {}).values()):
        for key, default in {**RECORDED, "val_split": "validation"}.items():
            if rows.get(key) == default:
                del rows[key]
    return Data.model_validate(data).model_dump(exclude_defaults=True)


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
