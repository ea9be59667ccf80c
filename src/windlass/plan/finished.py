"""The run file of a finished run, changed so that its adapters can be evaluated again. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from windlass.errors import UserError
from windlass.plan import Plan, make_plan
from windlass.run_folder import MANIFEST, list_trials, read_manifest
from windlass.runfile import Loaded, RunFile
from windlass.runfile.recorded import read_recorded_data
from windlass.settings import IN_NAMES


def plan_finished_run(
    run_folder: Path, *, eval_data: Path | None, ranks: int | None, base_dtypes: Sequence[str]
) -> Plan:
    """Plan the evaluation of a finished run, after checking that its model can be stored in each of these dtypes."""
    known = ("bf16", *IN_NAMES)
    if unknown := [kind for kind in base_dtypes if kind not in known]:
        raise UserError(
            f"no such dtype: {', '.join(unknown)}", "--base-dtype", f"known: {', '.join(known)}", "no-such-dtype"
        )
    plans = [
        make_plan(load_finished_run(run_folder, eval_data=eval_data, ranks=ranks, base_dtype=kind), None)
        for kind in (*base_dtypes, None)
    ]
    trials = [folder for folder in list_trials(run_folder) if "run" in read_manifest(folder)]
    if not trials:
        return plans[-1]
    loaded = [load_finished_run(folder, eval_data=eval_data, ranks=ranks) for folder in trials]
    return replace(plans[-1], trials=tuple(make_plan(trial, None, compare=False) for trial in loaded))


def load_finished_run(
    run_folder: Path, *, eval_data: Path | None, ranks: int | None, base_dtype: str | None = None
) -> Loaded:
    """Load a run's file from its manifest, changed to evaluate it again: on these ranks, with unpacked rows."""
    manifest = run_folder / MANIFEST
    if not run_folder.is_dir():
        raise UserError(
            "no such folder", str(run_folder), "name the folder that train.output_dir named", "no-such-folder"
        )
    try:
        tree: dict[str, Any] = read_manifest(run_folder)["run"]
        data = tree["data"]
        data |= {"packing": False, "streaming": False}
        if eval_data is not None:
            if not eval_data.exists():
                raise UserError(
                    "there is no such file or folder", str(eval_data), "name rows with --eval-data", "no-such-file"
                )
            data |= {"dataset_name_or_path": str(eval_data), "dataset_config_name": None, "val_fraction": None}
            data |= {"train_split": "train", "val_split": "train", "mix": [], "eval": {}}
        elif data.get("val_split") and not data.get("val_fraction"):
            data["train_split"] = data["val_split"]  # only these rows are tokenized
        tree["data"] = read_recorded_data(data)
        if "lora" in tree:
            tree["lora"]["adapter"] = None  # its keys are recorded, and its folder may be gone
    except (KeyError, TypeError):
        hint = "name the folder that train.output_dir named"
        raise UserError(
            "it is not a run folder: manifest.json can't be read", str(run_folder), hint, "not-a-run"
        ) from None
    if ranks is not None:
        tree["cluster"] |= {"nodes": 1, "gpus_per_node": ranks}
        tree["layout"] = {"name": "auto", "base_dtype": (tree.get("layout") or {}).get("base_dtype")}
        tree.get("train", {}).pop("global_batch_size", None)  # it fits the run's ranks, and nothing is trained here
    if base_dtype is not None:
        tree["layout"] = (tree.get("layout") or {}) | {"base_dtype": base_dtype}
    try:
        run = RunFile.model_validate(tree)
    except ValueError as error:
        hint = "it was written by another version of windlass"
        raise UserError(f"the run in it can't be read: {error}", str(manifest), hint, "unreadable") from None
    sections = {name: section for name, section in tree.items() if isinstance(section, dict)}
    places = {f"{name}.{key}": f"{manifest}: run.{name}.{key}" for name, section in sections.items() for key in section}
    return Loaded(manifest, (), places, run)
