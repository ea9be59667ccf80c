"""How many nodes and GPUs, where the run file and the Accelerate file leave it to whatever starts the run. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from windlass.runfile import Said


def started_on(loaded: Said, environ: Mapping[str, str], cards: int) -> list[str]:
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
