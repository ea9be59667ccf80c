"""`windlass train`: called once by a user, and once in every rank that it starts. `rank.place` tells which it is.

In the user's process `ranks` starts this command again for each rank of this machine. In a rank, `run` is the whole
training run, from top to bottom. `windlass best` goes the same way.

ranks      processes of this machine: started, signalled, waited for; no torch
rank       one of them: its place, what it leaves word of, how signals and errors end it; no torch
run        what every rank does, in numbered steps: read this one first
settings   the run file in TRL's words
loop       TRL's loop with one all-reduce a step, checks, and our checkpoints
order      which rows come when, the same on every number of ranks
progress   what is shown and written at every step
saving     checkpoints as the run goes, and when it is stopped
best       the saved adapters of a run, evaluated again and ranked
folder     the run folder: taken, resumed, described, finished; manifest: its state and lock, which need no torch
again      a finished run's file, read from its manifest
machines   how many nodes and GPUs, and whether they are those that the run is laid out on
script     the ranks of a run of kind: script
screen     what the user sees before the first step
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from windlass.errors import Problem, UserError, raise_all
from windlass.runfile.machines import GRACE_SECONDS
from windlass.runfile.names import absent_trackers
from windlass.train import ranks
from windlass.train.machines import require_all_nodes
from windlass.train.rank import Place, inside, place

if TYPE_CHECKING:
    from pathlib import Path

    from windlass.plan import Plan
    from windlass.train.best import Ranking


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

    def work(here: Place) -> int:
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

    def work(here: Place) -> int:
        from windlass.train.best import best as evaluate

        return evaluate(make_plan(), here, run_folder, show)

    return in_ranks(make_plan, work, arguments=arguments, environ=environ, say=say)


def in_ranks(
    make_plan: Callable[[], Plan],
    work: Callable[[Place], int],
    *,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    say: Callable[[UserError], None],
) -> int:
    """Start this machine's ranks with the same command, or do one rank's work.

    Each rank plans again: it is quick beside importing torch, and needs no copy of the plan's objects in a file.
    """
    here = place(environ)
    if here is None:
        plan = make_plan()  # here first: the user's mistakes are found in one process, and before torch is imported
        require_all_nodes(plan.layout.nodes, plan.loaded.where, environ)
        return ranks.start(
            [sys.executable, "-m", "windlass", *arguments],
            plan.layout.gpus_per_node,
            environ,
            grace_seconds=plan.loaded.run.cluster.grace_seconds or GRACE_SECONDS,
        )
    code = inside(here, lambda: work(here), say=say)
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
