"""A finished run's run file, from its folder, as it is to be evaluated again. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from windlass.errors import UserError
from windlass.runfile import Loaded, RunFile


def again(run_folder: Path, *, eval_data: Path | None, ranks: int | None) -> Loaded:
    """The run as its manifest has it, on these ranks, with rows to evaluate on that are not packed."""
    manifest = run_folder / "manifest.json"
    try:
        tree: dict[str, Any] = json.loads(manifest.read_text())["run"]
        tree["data"] |= _rows(tree["data"], eval_data)
    except (OSError, ValueError, KeyError, TypeError):
        hint = "name the folder that train.output_dir named"
        raise UserError("it is no run folder: manifest.json can't be read", str(run_folder), hint) from None
    if ranks is not None:
        tree["cluster"] |= {"nodes": 1, "gpus_per_node": ranks}
        tree["layout"] = {"name": "auto", "base_dtype": (tree.get("layout") or {}).get("base_dtype")}
    try:
        run = RunFile.model_validate(tree)
    except ValueError as error:
        hint = "it was written by another version of windlass"
        raise UserError(f"the run in it can't be read: {error}", str(manifest), hint) from None
    places = {
        f"{section}.{key}": f"{manifest}: run.{section}.{key}" for section in tree for key in _keys(tree[section])
    }
    return Loaded(run_folder / "manifest.json", (), places, run)


def _rows(data: dict[str, Any], eval_data: Path | None) -> dict[str, Any]:
    """Keys of `data` that differ. Where validation rows are a split, nothing else is tokenised."""
    plain: dict[str, Any] = {"packing": False, "streaming": False}
    if eval_data is not None:
        if not eval_data.exists():
            raise UserError("there is no such file or folder", str(eval_data), "name rows with --eval-data")
        return {
            **plain,
            "dataset_name_or_path": str(eval_data),
            "dataset_config_name": None,
            "train_split": "train",
            "val_split": "train",
            "val_fraction": None,
        }
    return (
        plain if data.get("val_fraction") or not data.get("val_split") else {**plain, "train_split": data["val_split"]}
    )


def _keys(section: Any) -> list[str]:
    return list(section) if isinstance(section, dict) else []
