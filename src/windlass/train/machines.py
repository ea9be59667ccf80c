"""How many nodes and GPUs: what the files leave to whatever starts the run, and whether it fits the plan. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from windlass.errors import UserError
from windlass.runfile import LoadedFile


def started_on(loaded: LoadedFile, environ: Mapping[str, str], cards: int) -> list[str]:
    """Overrides for what nobody wrote: by the launcher that started this rank, else by this machine's GPUs, `cards`."""
    if loaded.given("cluster.nodes") or loaded.given("cluster.gpus_per_node") or loaded.given("layout.ranks"):
        return []
    world, local = environ.get("WORLD_SIZE", ""), environ.get("LOCAL_WORLD_SIZE", "")
    if "RANK" in environ and world.isdigit() and local.isdigit() and int(local):
        return [f"cluster.nodes={max(1, int(world) // int(local))}", f"cluster.gpus_per_node={local}"]
    count = visible_gpus(environ, cards)
    return [f"cluster.gpus_per_node={count}"] if count > 1 else []


def visible_gpus(environ: Mapping[str, str], cards: int) -> int:
    """GPUs that a process started here may use."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return cards
    named = [name for name in listed.split(",") if name.strip() and name.strip() != "-1"]
    return min(len(named), cards)


def require_all_nodes(planned: int, where: Callable[[str], str], environ: Mapping[str, str]) -> None:
    """One machine of several would wait for the others, and one too few would train another run."""
    nodes = int(environ.get("PET_NNODES", "1"))
    if planned != nodes:
        raise UserError(
            f"the run is laid out on {planned} nodes, and this is {nodes}",
            where("cluster.nodes"),
            "add --ranks N to use this machine alone, or start it with windlass submit",
        )
