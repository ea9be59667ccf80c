"""`windlass train`: the ranks are started, or joined, and each runs the numbered steps of `run`; and `windlass best`.

ranks      processes of this machine: started, signalled, waited for; no torch
run        what every rank does, from top to bottom
settings   the run file in TRL's words
loop       TRL's loop with one all-reduce a step, checks, and our checkpoints
progress   what is shown and written at every step
saving     checkpoints as the run goes, and when it is stopped
best       the saved adapters of a run, evaluated again and ranked
folder     the run folder: taken, described, finished; manifest: the part of it that needs no torch
again      a finished run's file, read from its manifest
machines   how many, where the files leave it to whatever starts the run
script     the ranks of a run of kind: script
screen     what the user sees before the first step
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from windlass.errors import Problem, UserError, raise_all
from windlass.runfile.names import absent_trackers
from windlass.train import ranks

if TYPE_CHECKING:
    from pathlib import Path

    from windlass.plan import Plan
    from windlass.train.best import Ranking

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

    def planned() -> Plan:
        plan = make_plan()
        require_trackers(plan)
        return plan

    def work(here: ranks.Place) -> int:
        here.phase("importing the training libraries")
        from windlass.train.run import run

        here.phase("planning")
        return run(planned(), here, resume=resume, debug_freq=debug_freq)

    return in_ranks(planned, work, arguments=arguments, environ=environ, say=say)


def require_trackers(plan: Plan) -> None:
    """Before anything is loaded: the library that reports to them would fail only once the model is there."""
    where = plan.loaded.where("train.report_to")
    absent = absent_trackers(plan.loaded.run.train.report_to)
    raise_all([Problem(f"{name} is not installed", where, f"{cure}, or take it out") for name, cure in absent.items()])


def best(
    make_plan: Callable[[], Plan],
    run_folder: Path,
    *,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    show: Callable[[Ranking], None],
    say: Callable[[UserError], None],
) -> int:
    """Evaluate every saved adapter of a run, in as many ranks as its layout has. Returns the exit code."""

    def work(here: ranks.Place) -> int:
        from windlass.train.best import best as evaluate

        return evaluate(make_plan(), here, run_folder, show)

    return in_ranks(make_plan, work, arguments=arguments, environ=environ, say=say)


def in_ranks(
    make_plan: Callable[[], Plan],
    work: Callable[[ranks.Place], int],
    *,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    say: Callable[[UserError], None],
) -> int:
    """Start this machine's ranks with the same command, or do one rank's work."""
    here = ranks.place(environ)
    if here is None:
        plan = make_plan()  # here first: the user's mistakes are found in one process, and before torch is imported
        nodes = int(environ.get("PET_NNODES", "1"))
        if plan.layout.nodes != nodes:
            raise UserError(
                f"the run is laid out on {plan.layout.nodes} nodes, and this is {nodes}",
                plan.loaded.where("cluster.nodes"),
                "add --ranks N to use this machine alone, or start it with windlass submit",
            )
        return ranks.start(
            [sys.executable, "-m", "windlass", *arguments],
            plan.layout.gpus_per_node,
            environ,
            grace_seconds=plan.loaded.run.cluster.grace_seconds or GRACE_SECONDS,
        )
    code = ranks.inside(here, lambda: work(here), say=say)
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
