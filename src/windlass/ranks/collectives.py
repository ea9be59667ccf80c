"""Collectives over Python objects, and errors that all ranks raise together. A single process is a group of one."""

import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from windlass.errors import LOST_RANK, RunError, UserError

SHOWN: Final = 8  # most items listed in a message


def get_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def get_world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def set_timeout(seconds: float) -> None:
    """Set the timeout of all collectives, including those of a mesh's dimensions."""
    if dist.is_initialized():
        for each in list(dist.distributed_c10d._world.pg_map):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), each)


def check_links(device: torch.device) -> None:
    """Run one all-reduce before minutes of loading, so that links that fail or lose data show here."""
    total = torch.ones((), device=device)
    if dist.is_initialized():
        dist.all_reduce(total)
    if total.item() != get_world_size():
        what = f"{get_world_size()} ranks added up 1 each, and got {total.item():g}"
        hint = "the links between GPUs or nodes lose data: run `windlass check RUN --here`"
        raise RunError(what, "windlass train", hint, "faulty-links")


def all_gather(value: Any) -> list[Any]:
    """Return every rank's value, by rank, on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def broadcast(value: Any) -> Any:
    """Return rank 0's value on every rank."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0)
    return values[0]


def run_on_rank_0(work: Callable[[], Any]) -> Any:
    """Run `work` on rank 0 and return its result, or raise its UserError, on every rank."""
    outcome: Any = None
    if get_rank() == 0:
        try:
            outcome = work()
        except UserError as error:
            outcome = error
    outcome = broadcast(outcome)
    if isinstance(outcome, UserError):
        raise outcome
    return outcome


def explain_lost_rank(error: BaseException) -> RunError | None:
    """Return what to print for an error of a collective because another rank ended or no longer answers; None if it is
    another error."""
    text = str(error).partition("\n")[0]
    if not (isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in text)):
        return None
    why = re.sub(r"^[^\[]*\[[^\]]*/gloo/[^\]]*\] *", "", text)[:200]  # gloo's source file and line
    hint = "its own output has the cause, or an alarm before this names it; go on with --resume"
    return RunError(f"rank {get_rank()} lost another rank: {why}", "windlass train", hint, LOST_RANK)


def list_first(items: Sequence[str], separator: str = "; ") -> str:
    """Return the first SHOWN items as text, and how many more there are."""
    more = f"{separator}and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return separator.join(items[:SHOWN]) + more


def raise_together(
    problems: Sequence[str], where: str, hint: str, code: str, error: type[UserError] = UserError
) -> None:
    """Raise on every rank if any rank has a problem, so that no rank waits for the others."""
    ranks_of: dict[str, list[int]] = {}
    for number, own in enumerate(all_gather(list(problems))):
        for problem in own:
            ranks_of.setdefault(problem, []).append(number)
    if ranks_of:
        lines = [
            problem if len(ranks) == get_world_size() else f"{problem} (rank {', '.join(map(str, ranks))})"
            for problem, ranks in ranks_of.items()
        ]
        raise error(list_first(lines), where, hint, code)
