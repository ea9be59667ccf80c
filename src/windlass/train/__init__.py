"""`windlass train`: the ranks are started, or joined, and each runs the numbered steps of `run`.

ranks      processes of this machine: started, signalled, waited for; no torch
run        what every rank does, from top to bottom
settings   the run file in TRL's words
loop       TRL's loop with one all-reduce a step, checks, and our checkpoints
progress   what is shown and written at every step
folder     the run folder: taken, described, finished
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from windlass.errors import UserError
from windlass.train import ranks

if TYPE_CHECKING:
    from windlass.plan import Plan

GRACE_SECONDS = 120.0  # to save in after a signal, where the run file says nothing (cluster.grace_seconds)


def train(
    make_plan: Callable[[], Plan],
    *,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    resume: bool,
    debug_freq: int | None = None,
    say: Callable[[UserError], None],
) -> int:
    """Start this machine's ranks, which run `python -m windlass ARGUMENTS`, or be one. Returns the exit code."""
    here = ranks.place(environ)
    if here is None:
        plan = make_plan()  # here first: the user's mistakes are found in one process, and before torch is imported
        nodes = int(environ.get("PET_NNODES", "1"))
        if plan.layout.nodes != nodes:
            raise UserError(
                f"the run is laid out on {plan.layout.nodes} nodes, and this is {nodes}",
                plan.loaded.where("cluster.nodes"),
                "add --ranks N to train on this machine alone, or start it with windlass launch",
            )
        return ranks.start(
            [sys.executable, "-m", "windlass", *arguments],
            plan.layout.gpus_per_node,
            environ,
            grace_seconds=plan.loaded.run.cluster.grace_seconds or GRACE_SECONDS,
        )

    def work() -> int:
        from windlass.train.run import run

        return run(make_plan(), here, resume=resume, debug_freq=debug_freq)

    code = ranks.inside(here, work, say=say)
    leave(code)
    return code


def leave(code: int) -> None:
    """Part from the other ranks. After a failure they may be gone already, and a polite goodbye would hang."""
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
