"""Where a step's time goes, without making the GPU wait for the clock.

On the CPU a mark is a time. On a GPU it is an event in the stream: its time is known only once the work before it
has been done, so a step's times are read later, when its last event has passed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


class Mark(Protocol):
    """A point in the stream of work."""

    def passed(self) -> bool: ...
    def until(self, later: Any) -> float: ...


@dataclass(frozen=True, slots=True)
class HostMark:
    seconds: float

    def passed(self) -> bool:
        return True

    def until(self, later: HostMark) -> float:
        return later.seconds - self.seconds


@dataclass(frozen=True, slots=True)
class GpuMark:
    event: torch.cuda.Event

    def passed(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def until(self, later: GpuMark) -> float:
        return float(self.event.elapsed_time(later.event)) / 1000  # milliseconds


def host_mark() -> Mark:
    return HostMark(time.perf_counter())


def gpu_mark() -> Mark:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return GpuMark(event)


@dataclass(slots=True)
class Spans:
    """The phases of one step in order, and the waits for other ranks that fell into each."""

    marks: list[tuple[str, Mark]] = field(default_factory=list)  # a phase and where it ended
    waits: list[tuple[int, Mark, Mark]] = field(default_factory=list)  # index of the phase, start, end

    def passed(self) -> bool:
        return not self.marks or self.marks[-1][1].passed()

    def seconds(self) -> dict[str, float]:
        """By phase; waits are taken out of the phase in which they fell and counted as communication.

        Those of a pause stay there: ranks that wait for a save or an evaluation are not waiting in a step.
        """
        total: dict[str, float] = {}
        for (_, start), (phase, end) in zip(self.marks, self.marks[1:], strict=False):
            total[phase] = total.get(phase, 0.0) + start.until(end)
        for index, start, end in self.waits:
            if 0 < index < len(self.marks) and self.marks[index][0] != "pause":
                waited = start.until(end)
                phase = self.marks[index][0]
                total[phase] = total.get(phase, 0.0) - waited
                total["communication"] = total.get("communication", 0.0) + waited
        return {phase: max(seconds, 0.0) for phase, seconds in total.items()}


# NCCL does a blocking collective in the stream that it is called in, so its time passes where it is issued; others
# (gloo) do it elsewhere, and it passes in `Work.wait`.
ISSUED = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "gather", "scatter", "alltoall"),
    *("allgather", "allgather_coalesced", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    # the same in torch before 2.13
    *("_allgather_base", "_reduce_scatter_base", "alltoall_base", "allgather_into_tensor_coalesced"),
    "reduce_scatter_tensor_coalesced",
)


class Waits:
    """Marks every wait for a collective while it is in place.

    torch's collectives are issued by methods of the process group and end in `Work.wait`, the functional ones (expert
    parallelism) in `wait_tensor`, and FSDP's in `wait_for_unshard`, which also unpacks what came. On a GPU these make
    the stream wait, not the host: marks before and after enclose just the time that did not overlap, so only what is
    done in the loop's own stream counts. Waits inside autograd's own C++ nodes are not seen; they count as backward.
    """

    def __init__(
        self, mark: Callable[[], Mark], seen: Callable[[Mark, Mark], None], stream: Callable[[], Any] = lambda: None
    ) -> None:
        self.mark, self.seen, self.stream = mark, seen, stream
        self.inside = False
        self.home: Any = None
        self.replaced: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and not self.replaced:
            self.home = self.stream()
            ends = ((dist.Work, "wait"), (functional, "wait_tensor"), (FSDPParamGroup, "wait_for_unshard"))
            issued = ((dist.ProcessGroup, name) for name in ISSUED if hasattr(dist.ProcessGroup, name))
            for owner, name in (*ends, *issued):
                self.replaced.append((owner, name, vars(owner)[name]))  # as it lies there: getattr would unbind it
                setattr(owner, name, self._timed(getattr(owner, name)))

    def remove(self) -> None:
        while self.replaced:
            setattr(*self.replaced.pop())

    def _timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            if self.inside or torch.compiler.is_compiling() or self.stream() != self.home:
                return wait(*arguments, **named)
            self.inside = True
            start = self.mark()
            try:
                return wait(*arguments, **named)
            finally:
                self.inside = False
                self.seen(start, self.mark())

        return timed
