"""Environment variables: what each does, and what windlass does with it. The table is variables.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

WINDLASS = {
    "never": "windlass doesn't set it",
    "site": "windlass sets it if cluster.env or cluster.network does: the right value depends on the site",
    "platform": "the platform or the launcher sets it, and windlass reads it",
    "writable": "windlass sets a writable path on OpenShift, whose HOME is not; elsewhere only if cluster.env does",
}
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


def started(name: str) -> bool:
    """Whether only a launcher may set it."""
    return name.startswith("PET_") or name in STARTED


@dataclass(frozen=True, slots=True)
class Variable:
    """A row of the table, whose head says what its columns mean."""

    about: str
    windlass: str
    published: str = ""
    verdict: str = ""
    status: str = ""


@cache
def variables() -> dict[str, Variable]:
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    for row in rows.values():
        word = row.get("windlass", "never")
        row["windlass"] = WINDLASS.get(word, word)
    return {name: Variable(**row) for name, row in rows.items()}
