"""Start a command's ranks on this machine or on this node of a job, or be one of them. No torch."""

from __future__ import annotations

import hashlib
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from windlass import __version__
from windlass.errors import SAVED, Problem, UserError, raise_all
from windlass.plan import Plan
from windlass.plan.script import AnyPlan
from windlass.ranks.job import USUAL_WAIT_SECONDS, LaunchedJob
from windlass.ranks.node import Start, print_log_head, report, require_gpus, run_node, tell_other_nodes, to_node_code
from windlass.ranks.place import PORT, Node, read_node, require_one_process_per_node, translate_launcher
from windlass.ranks.rank import Rank, read_rank, run_rank
from windlass.ranks.supervisor import make_environments, require_all_nodes, reserve_port, run_ranks
from windlass.runfile.machines import GRACE_SECONDS
from windlass.runfile.names import find_absent_trackers
from windlass.train.ranking import Ranking

PLAN = "plan"  # in the status directory: the plan that this machine's ranks share
AnyPlanT = TypeVar("AnyPlanT", bound=AnyPlan)


@dataclass(frozen=True, slots=True)
class Command:
    """A command that runs in ranks: its words, and what launch.sh tells of the job that it is part of."""

    arguments: Sequence[str]  # `python -m windlass ARGUMENTS` is one rank
    environ: MutableMapping[str, str]
    print_error: Callable[[UserError], None]
    job: LaunchedJob | None = None
    check: Sequence[str] = ()  # what checks all nodes of a job before its ranks start
    fingerprint: str = ""  # of run file and options: the same on every node
    wait_seconds: float = USUAL_WAIT_SECONDS  # for all nodes to start

    def read_rank(self) -> Rank | None:
        """Return this process's rank if a launcher has started it as one. launch.sh starts nodes."""
        if self.job is not None:
            require_one_process_per_node(self.environ)
            return None
        self.environ.update(translate_launcher(self.environ))
        return read_rank(self.environ)


# With the plan, its ranks' environments, the status directory, and the seconds that they get to save.
RunRanks = Callable[[AnyPlanT, Sequence[Mapping[str, str]], Path, float], int]


def train(
    make_plan: Callable[[], Plan],
    command: Command,
    *,
    resume: bool,
    debug_freq: int | None = None,
    allow_other_base: bool = False,
) -> int:
    """Train in this machine's ranks, or as one of them. Returns the exit code."""

    def make_checked_plan() -> Plan:
        plan = make_plan()
        require_inputs(plan)
        return plan

    def work(plan: Plan, here: Rank) -> int:
        here.phase("importing the training libraries")
        from windlass.train.run import train_rank

        return train_rank(plan, here, resume=resume, debug_freq=debug_freq, allow_other_base=allow_other_base)

    return run_in_ranks(make_checked_plan, work, command)


def require_inputs(plan: Plan) -> None:
    """Refuse what would be missed only once the model is loaded: trackers, data and other files."""
    from windlass.data.inputs import find_absent_data, find_absent_files

    where = plan.where("train.report_to")
    absent = find_absent_trackers(plan.run.train.report_to)
    trackers = [Problem(f"{name} is not installed", where, f"{how}, or take it out") for name, how in absent.items()]
    files = [
        problem
        for _, problem in (*find_absent_data(plan.run.data, plan.where), *find_absent_files(plan.run, plan.where))
    ]
    raise_all([*trackers, *files])


def best(
    make_plan: Callable[[], Plan],
    run_folder: Path,
    command: Command,
    *,
    base_dtypes: Sequence[str] = (),
    allow_other_base: bool = False,
    show: Callable[[Ranking], None],
) -> int:
    """Evaluate every saved adapter of a run, in as many ranks as its layout has. Returns the exit code."""

    def work(plan: Plan, here: Rank) -> int:
        from windlass.train.best import rank_checkpoints

        return rank_checkpoints(
            plan, here, run_folder, show, base_dtypes=base_dtypes, allow_other_base=allow_other_base
        )

    return run_in_ranks(make_plan, work, command)


def run_in_ranks(make_plan: Callable[[], Plan], work: Callable[[Plan, Rank], int], command: Command) -> int:
    """Start ranks with the same command, or do one rank's work. Returns the exit code.

    One plan serves all ranks that are started here; those of another launcher make it themselves, and `train_rank`
    refuses plans that differ.
    """
    exit_when_signalled()
    here = command.read_rank()
    if here is None:

        def start(plan: Plan, environs: Sequence[Mapping[str, str]], status_dir: Path, grace_seconds: float) -> int:
            (status_dir / PLAN).write_bytes(pickle.dumps(plan))
            words = [sys.executable, "-m", "windlass", *command.arguments]
            job = command.job is not None
            return run_ranks(words, environs, status_dir, grace_seconds=grace_seconds, job=job)

        return start_ranks_here(make_plan, start, command)

    def work_with_plan() -> int:
        here.phase("planning")
        shared = here.status_dir / PLAN if here.supervised and here.status_dir else None
        if shared is not None and shared.exists():
            plan: Plan = pickle.loads(shared.read_bytes())  # written by this process's parent
        else:
            plan = make_plan()
        return work(plan, here)

    code = run_rank(here, work_with_plan, print_error=command.print_error)
    if code:  # ranks that are gone would make a clean shutdown hang
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def exit_when_signalled() -> None:
    """Exit at a stop signal with the code for that: until the ranks run there is nothing to save."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGUSR1):  # Ctrl-C raises KeyboardInterrupt
            signal.signal(number, lambda *_: sys.exit(SAVED))


def start_ranks_here(make_plan: Callable[[], AnyPlanT], run: RunRanks[AnyPlanT], command: Command) -> int:
    """Plan, and start this machine's ranks; on several nodes once all have joined. Returns the exit code."""
    plan = make_plan()  # here first: input errors show in one process, before torch is imported
    raise_all(getattr(plan, "missing_weights", ()))
    layout = plan.layout
    require_all_nodes(layout.nodes, plan.where, command.environ)
    node = read_node(command.environ, layout.nodes)
    if command.job is not None and plan.machine.gpu.name != "cpu":
        require_gpus(layout.gpus_per_node)
    job = command.job
    grace_seconds = job.grace_seconds if job else float(plan.run.cluster.grace_seconds or GRACE_SECONDS)
    with reserve_port() as port:
        if node.world == 1:
            node = Node(0, 1, "localhost", port)  # no other machine needs to know the port
        environs = make_environments(layout.gpus_per_node, command.environ, node)
        if job is None and node.world == 1:
            with tempfile.TemporaryDirectory(prefix="windlass-") as folder:
                return run(plan, environs, Path(folder), grace_seconds)
        if job is not None:
            title = f"{layout.nodes} x {layout.gpus_per_node} {plan.machine.gpu.name}, {layout.name}"
            print_log_head(node, f"{job.name}: {title}", plan.loaded.path)
        start = Start(
            environ=command.environ,
            node=node,
            fingerprint=command.fingerprint,
            wait_seconds=command.wait_seconds,
            check=command.check if job and job.check else (),
            run_ranks=lambda status_dir: run(plan, environs, status_dir, grace_seconds),
        )
        return run_node(start, command.print_error)


def compute_fingerprint(files: Sequence[Path], words: Sequence[str]) -> str:
    """Return a hash that is the same on all nodes of a run and differs between run files, options and versions."""
    texts = [path.read_bytes() for path in files if path.is_file()]  # a missing one is reported elsewhere
    digest = hashlib.sha256(b"\0".join([*texts, *(word.encode() for word in words), __version__.encode()]))
    return digest.hexdigest()[:12]


def fail_on_node(error: UserError, command: Command) -> int:
    """Print why this node of several can't start, tell the others, and return its exit code. A single machine raises
    the error."""
    try:
        node = read_node(command.environ, command.job.nodes if command.job else None)
    except UserError:  # without a place among others
        node = Node(0, 1, "localhost", PORT)
    if command.job is None and node.world == 1:
        raise error
    command.print_error(error)
    code = to_node_code(error)
    tell_other_nodes(node, f"{error.problems[0].where}: {error.problems[0].problem}", code)
    report(node, f"ended with {code}")
    return code
