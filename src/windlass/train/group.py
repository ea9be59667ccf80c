"""The ranks of a run as one: told apart, waited for, asked, agreed. One process alone is a group of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch.distributed as dist

from windlass.errors import UserError

SHOWN: Final = 8  # problems in a message


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def gather(value: Any) -> list[Any]:
    """Every rank's value, by rank, on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def from_rank_0(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def raise_together(problems: Sequence[str], where: str, hint: str, error: type[UserError] = UserError) -> None:
    """Raise on every rank when any rank found something wrong: nobody is left waiting for the others."""
    found: dict[str, list[int]] = {}
    for number, said in enumerate(gather(list(problems))):
        for problem in said:
            found.setdefault(problem, []).append(number)
    if not found:
        return
    lines = [
        problem if len(ranks) == world() else f"{problem} (rank {', '.join(map(str, ranks))})"
        for problem, ranks in found.items()
    ]
    more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    raise error(f"{'; '.join(lines[:SHOWN])}{more}", where, hint)
