"""How many ranks this machine rehearses with, and how they share the model: as the run does it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from windlass.hardware import LocalMachine

LEAST_RANKS = 4  # so many processes share even two cores in bearable time
RANK_GIB = 1.5  # of host memory: Python, torch, transformers and TRL; a twin is next to nothing


@dataclass(frozen=True, slots=True)
class Spread:
    """shard x replicate = ranks; `expert_parallel` divides `shard`."""

    shard: int
    replicate: int
    expert_parallel: int

    @property
    def ranks(self) -> int:
        return self.shard * self.replicate


def spread(layout: Mapping[str, Any], here: LocalMachine) -> tuple[Spread, str]:
    """The run's own spread where this machine can hold it, else the largest of its kind; and why."""
    own = Spread(layout["shard"], layout["replicate"], layout["expert_parallel"])
    most = max(1, min(max(LEAST_RANKS, here.cpus), int(here.memory_gib / RANK_GIB)))
    if own.ranks <= most:
        return own, ""
    small = smallest(own)
    rest = max(1, most // small.ranks)
    # What is left of the machine goes where the run has more.
    if own.shard > small.shard:
        grown = Spread(min(own.shard, small.shard * rest), small.replicate, small.expert_parallel)
    else:
        grown = Spread(small.shard, min(own.replicate, small.replicate * rest), small.expert_parallel)
    parallel = grown.shard if own.expert_parallel == own.shard > 1 else grown.expert_parallel
    made = Spread(grown.shard, grown.replicate, parallel)
    return made, f"{here.cpus} cores and {here.memory_gib:.0f} GiB hold {made.ranks} of its kind"


def nodes(own: int, ranks: int) -> int:
    """As many as the run has, or fewer, so that each has as many ranks. This machine plays all of them."""
    return next(count for count in range(min(own, ranks), 0, -1) if ranks % count == 0)


def smallest(own: Spread) -> Spread:
    """The fewest ranks that still shard, replicate and split experts as the run does."""
    parallel = 1 if own.expert_parallel == 1 else 2
    shard = 1 if own.shard == 1 else 2 if own.expert_parallel in (1, own.shard) else 2 * parallel
    return Spread(shard, 1 if own.replicate == 1 else 2, parallel)
