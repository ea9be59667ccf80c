"""Environment variables: what they do, what windlass does with them, and misspelt ones. The table is variables.toml."""

import difflib
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

NOT_SET = "windlass doesn't set it"
WINDLASS = {
    "site": "windlass sets it if cluster.env or cluster.network does: the right value depends on the site",
    "writable": "windlass sets a writable path on OpenShift, whose HOME is not; elsewhere only if cluster.env does",
}
CHECKED = ("NCCL_", "TORCH_NCCL_", "GLOO_")  # beginnings of names that are all in the table, under `names` or as rows
# Their plugins' own, which are many and change.
PLUGINS = ("NCCL_OFI_", "NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX_", "NCCL_INSPECTOR_", "NCCL_PROFILE_", "NCCL_RESHARD_")
DOES_NOT_EXIST = "does not exist"

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
def _read_table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@cache
def list_other_names() -> frozenset[str]:
    """Return variables of NCCL, gloo and torch that exist but have no row in the table."""
    return frozenset(_read_table()["names"].split())


@cache
def variables() -> dict[str, Variable]:
    rows = {}
    for name, row in _read_table().items():
        if name != "names":
            by_launcher = "the platform or the launcher sets it, and windlass reads it"
            windlass = row.get("windlass", by_launcher if is_set_by_launcher(name) else NOT_SET)
            rows[name] = Variable(**{**row, "windlass": WINDLASS.get(windlass, windlass)})
    return rows


def find_unread(names: Iterable[str]) -> dict[str, str]:
    """Return names that look like variables of NCCL, gloo or torch for them but are none, and what to do instead."""
    table = variables()
    known = [name for name in (*table, *sorted(list_other_names())) if name.startswith(CHECKED)]
    problems = {}
    for name in sorted(names):
        row = table.get(name)
        if name.startswith(CHECKED) and not name.startswith(PLUGINS) and name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.7)
            problems[name] = f"nothing reads it; did you mean {near[0]}?" if near else "nothing reads it: remove it"
        elif row and row.status == DOES_NOT_EXIST:
            problems[name] = f"{row.about}; {row.verdict if row.windlass == NOT_SET else row.windlass}"
    return problems
