"""Start a command's ranks on this machine or on this node of a job, or be one of them. No torch."""

import contextlib
import hashlib
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from windlass import __version__
from windlass.errors import SAVED, Problem, UserError, raise_all
from windlass.plan import Plan
from windlass.plan.finished import describe_finished, has_finished, require_own_folder
from windlass.plan.script import AnyPlan, ScriptPlan
from windlass.ranking import Ranking
from windlass.ranks.job import USUAL_WAIT_SECONDS, LaunchedJob, log_as_json
from windlass.ranks.node import end_node, print_log_head, require_gpus, run_node, tell_other_nodes, to_node_code
from windlass.ranks.place import Node, read_node, require_one_process_per_node, translate_launcher
from windlass.ranks.rank import Rank, holding_stop_signals, ignore_signals, read_rank, read_start_time, run_rank
from windlass.ranks.rendezvous import LOST
from windlass.ranks.supervisor import make_environments, require_all_nodes, reserve_port, run_ranks
from windlass.run_folder import MANIFEST
from windlass.runfile.machines import GRACE_SECONDS
from windlass.runfile.names import find_absent_trackers
from windlass.train.script import run_script, run_script_rank

PLAN = "plan"  # in the status directory: the plan that this machine's ranks share


@dataclass(frozen=True, slots=True)
class RankCommand:
    """A command that runs in ranks: its words, and what launch.sh tells of the job that it is part of."""

    arguments: Sequence[str]  # `python -m windlass ARGUMENTS` is one rank
    environ: MutableMapping[str, str]
    print_error: Callable[[UserError], None]
    job: LaunchedJob | None = None
    check: Sequence[str] = ()  # what checks all nodes of a job before its ranks start
    fingerprint: str = ""  # of run file and options: the same on every node
    wait_seconds: float = USUAL_WAIT_SECONDS  # for all nodes to start


def train(
    make_plan: Callable[[], AnyPlan],
    command: RankCommand,
    *,
    resume: bool,
    debug_freq: int | None = None,
    allow_other_base: bool = False,
) -> int:
    """Train in this machine's ranks, or as one of them. Returns the exit code."""

    def make_checked_plan() -> AnyPlan:
        plan = make_plan()
        leave_finished(plan, resume=resume)
        require_inputs(plan)
        return plan

    def work(plan: AnyPlan, here: Rank) -> int:
        if isinstance(plan, ScriptPlan):
            return run_script_rank(plan, here, command.environ, resume=resume)
        here.phase("importing the training libraries")
        import_torch()
        if plan.trials:
            from windlass.sweep.trials import train_sweep as train_plan
        else:
            from windlass.train.run import train_rank as train_plan
        return train_plan(plan, here, resume=resume, debug_freq=debug_freq, allow_other_base=allow_other_base)

    return run_in_ranks(make_checked_plan, work, command, resume=resume)


def import_torch() -> None:
    with holding_stop_signals():
        import torch  # noqa: F401


def leave_finished(plan: AnyPlan, *, resume: bool) -> None:
    """Refuse to train where a run or sweep has finished. If it is this one and to be resumed, say so and exit."""
    require_own_folder(plan, finished=True)
    if not has_finished(plan):
        return
    if isinstance(plan, ScriptPlan) and os.environ.get("RANK", "0") != "0" and _ended_since_start(plan.folder):
        return  # rank 0 of the same launcher was faster, and its script is short
    if resume or (isinstance(plan, Plan) and plan.run.train.resume == "auto"):
        line = describe_finished(plan)
        if os.environ.get("RANK", "0") == "0":
            print(line, file=sys.stderr, flush=True)
        sys.exit(0)
    require_own_folder(plan)


def _ended_since_start(folder: Path) -> bool:
    """Return whether the folder's run has finished since this process began."""
    ticks = int(read_start_time(os.getpid()) or 0)
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return (folder / MANIFEST).stat().st_mtime > time.time() - age


def require_inputs(plan: AnyPlan) -> None:
    """Refuse what would be missed only once ranks run or the model is loaded: a script, trackers, data, other files."""
    if isinstance(plan, ScriptPlan):
        path = plan.run.script.path
        if path is not None and not Path(path).is_file():
            hint = f"the path is relative to the folder that the run is started in, here {Path.cwd()}"
            raise UserError(f"there is no file {path}", plan.where("script.path"), hint, "no-such-file")
        return
    from windlass.data.inputs import find_absent_data, find_absent_files

    if plan.trials:
        for trial in plan.trials:
            require_inputs(trial)
        return
    run = plan.run
    where = plan.where
    trackers = [
        Problem(f"{name} is not installed", where("train.report_to"), f"{how}, or take it out", "not-installed")
        for name, how in find_absent_trackers(run.train.report_to).items()
    ]
    absent = (*find_absent_data(run.data, where), *find_absent_files(run, where))
    raise_all([*trackers, *(problem for _, problem in absent)])


def best(
    make_plan: Callable[[], Plan],
    run_folder: Path,
    command: RankCommand,
    *,
    base_dtypes: Sequence[str] = (),
    allow_other_base: bool = False,
    by: str = "loss",
    keep: float | None = None,
    show: Callable[[Ranking], None],
) -> int:
    """Evaluate every saved adapter of a run, in as many ranks as its layout has. Returns the exit code."""

    def work(plan: AnyPlan, here: Rank) -> int:
        import_torch()
        from windlass.best import rank_checkpoints

        assert isinstance(plan, Plan)
        return rank_checkpoints(
            plan, here, run_folder, show, base_dtypes=base_dtypes, allow_other_base=allow_other_base, by=by, keep=keep
        )

    return run_in_ranks(make_plan, work, command)


def run_in_ranks(
    make_plan: Callable[[], AnyPlan],
    work: Callable[[AnyPlan, Rank], int],
    command: RankCommand,
    *,
    resume: bool = False,
) -> int:
    """Start ranks with the same command, or do the work of the rank that a launcher started. Returns the exit code."""
    exit_when_signalled()
    here = None
    if command.job is None:  # launch.sh starts nodes
        command.environ.update(translate_launcher(command.environ))
        here = read_rank(command.environ)
    if here is None:
        return start_here(make_plan, command, resume=resume)

    def plan_and_work() -> int:
        here.phase("planning")
        try:
            return work(read_shared_plan(here) or make_plan(), here)
        except Exception as error:
            collectives = sys.modules.get("windlass.ranks.collectives")  # torch is imported by work that needs it
            lost = collectives.explain_lost_rank(error) if collectives else None
            if lost is not None:
                raise lost from error
            raise

    code = run_rank(here, plan_and_work, print_error=command.print_error)
    dist = sys.modules.get("torch.distributed")
    if code == 0 and dist is not None and dist.is_initialized():  # with ranks that are gone, this would hang
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # At Python's own end, a library's thread that still runs can abort the process: "terminate called without an active
    # exception", and a finished run would have failed.
    os._exit(code)


def exit_when_signalled() -> None:
    """Exit at a stop signal with the code for that: until the ranks run there is nothing to save."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGUSR1):  # Ctrl-C raises KeyboardInterrupt
            signal.signal(number, lambda *_: sys.exit(SAVED))


def read_shared_plan(here: Rank) -> AnyPlan | None:
    """Return the plan that this rank's supervisor made, if it has one. Ranks of a foreign launcher plan by themselves,
    and `train_rank` refuses plans that differ."""
    if here.status_dir is None or not here.supervised or not (here.status_dir / PLAN).exists():
        return None
    # A pickle is safe here: its directory has mode 0700, so that only this user's processes can have written it.
    plan: AnyPlan = pickle.loads((here.status_dir / PLAN).read_bytes())
    return plan


def start_here(make_plan: Callable[[], AnyPlan], command: RankCommand, *, resume: bool) -> int:
    """Plan, and start this machine's ranks; on several nodes once all have joined. Returns the exit code."""
    job = command.job
    environ = command.environ
    node = Node()
    with contextlib.ExitStack() as stack:
        try:
            if job:
                require_one_process_per_node(environ)
            node = read_node(environ, job.nodes if job else None)
            if job and job.json_log:
                stack.enter_context(log_as_json(job.name, node.number))
            plan = make_plan()  # here first: input errors show in one process, before torch is imported
            raise_all(getattr(plan, "missing_weights", ()))
            layout = plan.layout
            require_all_nodes(layout.nodes, plan.where, environ)
            node = read_node(environ, layout.nodes)
            if job and plan.machine.gpu.name != "cpu":
                require_gpus(layout.gpus_per_node)
        except UserError as error:
            if job is None and node.count == 1:
                raise
            command.print_error(error)
            problem = error.problems[0]
            code = to_node_code(error)
            tell_other_nodes(node, f"{problem.where}: {problem.problem}", code, command.wait_seconds)
            return end_node(node, code, scheduled=job is not None)
        port = stack.enter_context(reserve_port())
        if node.count == 1:
            node = Node(port=port)  # no other machine needs to know the port
        grace_seconds = job.grace_seconds if job else float(plan.run.cluster.grace_seconds or GRACE_SECONDS)
        environs = make_environments(layout.gpus_per_node, environ, node)

        def run_here(status_dir: Path) -> int:
            scheduled = job is not None
            if isinstance(plan, ScriptPlan):
                lost = status_dir / LOST
                return run_script(plan, environs, grace_seconds, resume=resume, scheduled=scheduled, lost=lost)
            (status_dir / PLAN).write_bytes(pickle.dumps(plan))
            words = [sys.executable, "-m", "windlass", *command.arguments]
            return run_ranks(words, environs, status_dir, grace_seconds=grace_seconds, scheduled=scheduled)

        if job is None and node.count == 1:
            try:
                with tempfile.TemporaryDirectory(prefix="windlass-") as folder:
                    return run_here(Path(folder))
            finally:
                ignore_signals()
        if job:
            title = f"{layout.nodes} x {layout.gpus_per_node} {plan.machine.gpu.name}, {layout.name}"
            print_log_head(node, f"{job.name}: {title}", plan.file)
        code = run_node(
            node,
            run_here,
            environ,
            command.print_error,
            fingerprint=command.fingerprint,
            wait_seconds=command.wait_seconds,
            check=command.check if job and job.check else (),
        )
        return end_node(node, code, scheduled=job is not None)


def compute_fingerprint(files: Sequence[Path], words: Sequence[str]) -> str:
    """Return a hash that is the same on all nodes of a run and differs between run files, options and versions."""
    texts = [path.read_bytes() for path in files if path.is_file()]  # a missing one is reported elsewhere
    digest = hashlib.sha256(b"\0".join([*texts, *(word.encode() for word in words), __version__.encode()]))
    return digest.hexdigest()[:12]
