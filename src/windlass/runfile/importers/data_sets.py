"""Data sets as the tools describe them, and as keys of windlass's `data`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from windlass.runfile.importers.imported import ImportedRun

MEDIA = ("images", "videos", "audios")


def translate_columns(imported: ImportedRun, place: str, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the messages' names of fields, if they aren't usual ones."""
    usual = {"role": ("role", "from"), "content": ("content", "value"), "training": ("train", "weight")}
    renamed = {name: column for name, column in columns.items() if column not in usual.get(name, (name,))}
    for name in renamed.keys() - {*usual, *MEDIA, "tools", "system", "chosen", "rejected"}:
        imported.refuse(place, f"windlass reads {name!r} of a message by that name", "rename it in the rows")
    for name in columns.keys() & {*MEDIA}:
        imported.refuse(place, f"these rows have {name}, and windlass trains on text alone", "name other rows")
    if not renamed:
        return {}
    return {"columns": {"train" if name == "training" else name: str(column) for name, column in renamed.items()}}


def set_eval_sets(imported: ImportedRun, key: str, sets: list[dict[str, Any]]) -> None:
    """Set data sets that are only evaluated on, named by the last part of their path, repeated ones with a number."""
    by_name = dict[str, Any]()
    for data in sets:
        stem = Path(str(data["dataset_name_or_path"])).stem
        names = (stem, *(f"{stem}-{number}" for number in range(2, len(sets) + 1)))
        by_name[next(name for name in names if name not in by_name)] = _to_mixed_set(data)
    if by_name:
        imported.set("data.eval", by_name, key)


def set_data_sets(imported: ImportedRun, key: str, sets: list[dict[str, Any]]) -> None:
    """Set the data that is trained on. Each set has keys of `data`."""
    if not sets:
        imported.refuse(key, "names no data set", "set data.dataset_name_or_path in the run file")
    imported.set("data.dataset_config_name", None, key)
    if len(sets) == 1:
        for name, value in sets[0].items():
            if value is not None:
                imported.settings.pop(f"data.{name}", None)  # a set's own comes before the one of all sets
                imported.set(f"data.{name}", value, key)
    if len(sets) > 1:
        paths = [str(data["dataset_name_or_path"]) for data in sets]
        for i, path in enumerate(paths):
            before = paths[:i].count(path)
            if before:  # the same file again: each needs a name
                sets[i]["name"] = f"{Path(path).stem}-{before + 1}"
        imported.set("data.mix", [_to_mixed_set(data) for data in sets], key)


def _to_mixed_set(data: Mapping[str, Any]) -> dict[str, Any]:
    """Convert keys of `data` to those of one of several sets."""
    short = {"dataset_name_or_path": "path", "train_split": "split"}
    return {short.get(name, name): value for name, value in data.items() if value is not None}
