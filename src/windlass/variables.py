"""Environment variables: what each does, and what windlass does with it. The table is variables.toml."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

WINDLASS = {
    "never": "windlass doesn't set it",
    "site": "windlass sets it if cluster.env or cluster.network does: the right value depends on the site",
    "platform": "the platform or the launcher sets it, and windlass reads it",
    "writable": "windlass sets a writable path on OpenShift, whose HOME is not; elsewhere only if cluster.env does",
}
CHECKED = ("NCCL_", "TORCH_NCCL_", "GLOO_")  # beginnings of names that are all in the table, under `names` or as rows
# Their plugins' own, which are many and change.
PLUGINS = ("NCCL_OFI_", "NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX_", "NCCL_INSPECTOR_", "NCCL_PROFILE_", "NCCL_RESHARD_")
DOES_NOT_EXIST, NO_EFFECT = "does not exist", "no effect"

# What every job gets. What depends on the platform or the site is added by the launchers.
DEFAULTS = {
    "NCCL_DEBUG": "WARN",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}

# What a launcher gives each rank; torchrun's own settings are PET_*.
STARTED = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"),
)


def is_set_by_launcher(name: str) -> bool:
    """Return whether only a launcher may set it."""
    return name.startswith("PET_") or name in STARTED


@dataclass(frozen=True, slots=True)
class Variable:
    """A row of the table in variables.toml, whose head describes the columns."""

    about: str
    windlass: str
    published: str = ""
    verdict: str = ""
    status: str = ""


@cache
def _table() -> dict[str, Any]:
    found = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {**found, "names": found["names"].split()}


@cache
def variables() -> dict[str, Variable]:
    rows = {name: dict(row) for name, row in _table().items() if name != "names"}
    for row in rows.values():
        word = row.get("windlass", "never")
        row["windlass"] = WINDLASS.get(word, word)
    return {name: Variable(**row) for name, row in rows.items()}


def find_unread(names: Iterable[str]) -> dict[str, str]:
    """Return names that look like variables of NCCL, gloo or torch for them but are none, and what to do instead."""
    table, found = variables(), {}
    known = [name for name in (*table, *_table()["names"]) if name.startswith(CHECKED)]
    for name in sorted(names):
        if name.startswith(CHECKED) and not name.startswith(PLUGINS) and name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.7)
            found[name] = f"nothing reads it; did you mean {near[0]}?" if near else "nothing reads it: remove it"
        elif name in table and table[name].status == DOES_NOT_EXIST:
            row = table[name]
            found[name] = f"{row.about}; {row.verdict if row.windlass == WINDLASS['never'] else row.windlass}"
    return found
