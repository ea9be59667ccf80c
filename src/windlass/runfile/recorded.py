"""A run file as manifests record it: with what some null and `auto` values stand for."""

import copy
from typing import Any

from windlass.runfile.fields import RunFile
from windlass.runfile.rows import RECIPE_CONFIG, Data, RowFormat

# Keys of `data` and its sets that are recorded with these values instead of null and `auto`.
RECORDED = {"dataset_config_name": RECIPE_CONFIG, "text_field": "text"}


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
