"""Other names of our keys, and the names of optimizers, schedules and trackers. The tables are in names.toml."""

import difflib
import importlib.util
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def _read_table(name: str) -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))


def group_by_name(table: dict[str, str]) -> dict[str, str]:
    return {name: key for key, names in table.items() for name in names.split()}


TOOLS = {"axolotl": "Axolotl", "llamafactory": "LLaMA-Factory", "trl": "TRL", "swift": "ms-swift"}
IMPORTED = {name: _read_table(f"importers/{name}.toml") for name in ("all_tools", *TOOLS)}
_TABLES = _read_table("names.toml")


RENAMED: dict[str, str] = _TABLES["renamed"]  # accepted spelling -> key
# Name in other tools -> our key, and key of other tools -> what to do instead: what `windlass import` goes by too.
OTHER_NAMES = {
    name: key for tool in TOOLS for name, key in IMPORTED[tool]["keys"].items() if name != key.rpartition(".")[2]
} | group_by_name(_TABLES["other_names"])
NOT_TAKEN: dict[str, str] = {
    **{name: f"remove it: {why}" for name, why in group_by_name(IMPORTED["all_tools"]["no_effect"]).items()},
    **{name: f"remove it: {why}" for name, why in group_by_name(IMPORTED["all_tools"]["refused"]).items()},
    **_TABLES["not_taken"],
    **group_by_name(_TABLES["not_taken_alike"]),
}
NOT_VALUES = {(key, value): hint for key, hints in _TABLES["not_values"].items() for value, hint in hints.items()}
# (platform's section, key of another platform's section) -> what to do instead.
INSTEAD = {
    (section, name): hint
    for section, hints in _TABLES["instead"].items()
    for name, hint in group_by_name(hints).items()
}
OPTIMIZERS = group_by_name(_TABLES["optimizers"])  # name -> package it needs
OPTIMIZERS_REFUSED = group_by_name(_TABLES["optimizers_refused"])  # name -> why
SCHEDULES = {name: tuple(needs.split()) for name, needs in group_by_name(_TABLES["schedules"]).items()}
EVALUATED_SCHEDULES = ("reduce_lr_on_plateau", "greedy")  # that go by the evaluation loss
ROLES = {role: tuple(names.split()) for role, names in _TABLES["roles"].items()}
TRACKERS = {name: tuple(modules.split()) for name, modules in _TABLES["trackers"].items()}

# transformers 5.23, modeling_utils.ALL_ATTENTION_FUNCTIONS, and eager, which every model has.
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")


def find_close_names(word: str, among: Iterable[str], count: int = 3) -> list[str]:
    by_fold = {name.lower().replace("-", "_"): name for name in among}
    found = difflib.get_close_matches(word[:100].lower().replace("-", "_"), list(by_fold), n=count, cutoff=0.6)
    return [by_fold[name] for name in found]


def find_absent_trackers(report_to: str | list[str]) -> dict[str, str]:
    """Return trackers of `train.report_to` that are not installed here, and how to install each."""
    names = [report_to] if isinstance(report_to, str) else report_to
    absent = [n for n in names if TRACKERS[n] and not any(map(importlib.util.find_spec, TRACKERS[n]))]
    return {name: f"pip install {TRACKERS[name][0]}" for name in absent}
