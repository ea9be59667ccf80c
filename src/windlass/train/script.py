"""`windlass train` for a run of kind: script: start its ranks as torchrun would, and watch them.

Ranks are plain processes, as for language models and for the same reasons (see `ranks.start_ranks`), in the environment
that torchrun provides. If torchrun or `accelerate launch` started this process, it is one rank and runs the script as
its child, so that the script's exit code is known and signals reach it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from windlass import run_folder
from windlass.errors import RANK_USER_INPUT, SAVED, RunError, UserError
from windlass.files import write_json
from windlass.observe.watch.monitor import ScriptWatch, make_environment
from windlass.plan.script import ScriptPlan
from windlass.ranks import supervisor as ranks
from windlass.ranks.rank import SUPERVISED, run_rank, wait_for_peers
from windlass.ranks.rendezvous import LOST
from windlass.runfile.machines import GRACE_SECONDS
from windlass.train.start import Command, start_ranks_here

LIBRARIES: Final = ("torch", "torchvision", "transformers", "accelerate", "lightning")


def train_script(make_plan: Callable[[], ScriptPlan], command: Command, *, resume: bool) -> int:
    """Start this machine's ranks of the script, or be one. Returns the exit code."""
    here = command.read_rank()
    if here is None:

        def start(
            plan: ScriptPlan, environs: Sequence[Mapping[str, str]], status_dir: Path, grace_seconds: float
        ) -> int:
            job = command.job is not None
            return run_script(plan, environs, grace_seconds, resume=resume, job=job, lost=status_dir / LOST)

        return start_ranks_here(make_plan, start, command)

    # A pod with one rank has no other variables than its number.
    environ = {"LOCAL_RANK": str(here.local_rank), "LOCAL_WORLD_SIZE": "1", **command.environ}
    grace_seconds = float(GRACE_SECONDS)

    def work() -> int:
        nonlocal grace_seconds
        plan = make_plan()
        grace_seconds = plan.run.cluster.grace_seconds or grace_seconds
        return run_script(plan, [environ], grace_seconds, resume=resume)

    code = run_rank(here, work, print_error=command.print_error)
    if code == SAVED:
        wait_for_peers(here, int(environ["LOCAL_WORLD_SIZE"]), grace_seconds)
    return code


def run_script(
    plan: ScriptPlan,
    environs: Sequence[Mapping[str, str]],
    grace_seconds: float,
    *,
    resume: bool,
    job: bool = False,
    lost: Path | None = None,
) -> int:
    """Run the script once per environment until all have ended. Rank 0's side has the run folder and the watch.

    job, lost: see `run_ranks` and `wait_for_ranks`.
    """
    path = plan.run.script.path
    if path is not None and not Path(path).is_file():
        hint = f"the path is relative to the folder that the run is started in, here {Path.cwd()}"
        raise UserError(f"there is no file {path}", plan.where("script.path"), hint)
    folder = plan.folder
    command = [sys.executable, *plan.run.command]
    is_leader = any(environ["RANK"] == "0" for environ in environs)
    launched = SUPERVISED not in environs[0]
    # If this process is killed by a launcher, the script's time to save is over.
    parent_death = signal.SIGKILL if launched else signal.SIGTERM
    # Under a launcher another rank may come before rank 0.
    run_folder.ensure_dir(folder, plan.where("script.output_dir"))
    # Where the recorder writes, and what the watch needs.
    more = {
        run_folder.OUTPUT_DIR: str(folder.absolute()),
        **make_environment(environs[0], plan.run, folder.absolute()),
    }
    with contextlib.ExitStack() as stack:
        if is_leader:
            stack.enter_context(_claim_and_watch(plan, folder, resume=resume))
        processes: list[subprocess.Popen[bytes]] = []
        stop = threading.Event()
        watch = ScriptWatch(plan.run, plan.layout.ranks, stop.set, _say) if is_leader else None

        def starting() -> Iterator[subprocess.Popen[bytes]]:
            for environ in environs:
                variables = environ if launched else add_torchrun_variables(environ)
                yield ranks.start_process(command, {**variables, **more}, parent_death_signal=parent_death)
            if watch:  # last: the watch is a thread, and processes should be started before threads
                stack.enter_context(watch)

        first, cut_short = ranks.wait_for_ranks(
            processes,
            starting(),
            grace_seconds,
            ranks.PATIENCE_SECONDS,
            second_kills=not (launched or job),
            stop=stop,
            lost=lost,
        )
        if watch and watch.why:
            raise RunError(watch.why, "watch", f"see alarms.jsonl in {folder} and the report")
        codes = [process.returncode for process in processes]
        code = _explain_end(plan, codes, first, [environ["RANK"] for environ in environs], cut_short)
        if is_leader:
            run_folder.update_manifest(folder, state=run_folder.STOPPED if code == SAVED else run_folder.FINISHED)
        return code


def add_torchrun_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Add the variables that torchrun sets, except its store's and its error file's, which belong to its launcher."""
    per_node, world = int(environ["LOCAL_WORLD_SIZE"]), environ["WORLD_SIZE"]
    return {
        **environ,
        "GROUP_RANK": str(int(environ["RANK"]) // per_node),
        "GROUP_WORLD_SIZE": str(int(world) // per_node),
        "ROLE_NAME": "default",
        "ROLE_RANK": environ["RANK"],
        "ROLE_WORLD_SIZE": world,
        "TORCHELASTIC_RUN_ID": "windlass",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


@contextlib.contextmanager
def _claim_and_watch(plan: ScriptPlan, folder: Path, *, resume: bool) -> Iterator[None]:
    where = plan.where("script.output_dir")
    with run_folder.lock_run(folder, where) or contextlib.nullcontext():
        before = run_folder.read_manifest(folder)
        state = before.get("state")
        if state == run_folder.FINISHED:
            hint = "name another script.output_dir, or remove the folder to start over"
            raise UserError(f"{folder} contains a finished run", where, hint)
        if state and not resume:
            hint = "add --resume to start the script in it again, or name another script.output_dir"
            raise UserError(f"{folder} contains an unfinished run ({state} {before.get('began', '')})", where, hint)
        write_json(folder / run_folder.PLAN, plan.as_dict())
        facts = {
            "kind": "script",
            "run": plan.run.model_dump(mode="json"),
            "command": plan.command,
            "versions": run_folder.read_versions(LIBRARIES),
            "ranks": plan.layout.ranks,
            "layout": plan.as_dict()["layout"],
            "git": run_folder.read_git_state(),
        }
        run_folder.begin_manifest(folder, facts)
        try:
            yield
        except BaseException:
            run_folder.update_manifest(folder, state=run_folder.FAILED)
            raise


def _explain_end(
    plan: ScriptPlan, codes: Sequence[int], first: int | None, names: Sequence[str], cut_short: str
) -> int:
    """Return the exit code, or raise the error that says which rank ended how. `first` ended first."""
    where = plan.where("script.path" if plan.run.script.path else "script.module")
    if cut_short and not set(codes) <= {0, SAVED}:
        hint = "cluster.grace_seconds is the time that a script gets to save in after SIGTERM"
        raise RunError(cut_short, where, hint)
    if first is None or codes[first] == SAVED:
        return 0 if first is None else SAVED
    code, rank = codes[first], names[first]
    if code == RANK_USER_INPUT:
        raise UserError(f"rank {rank} reports wrong input (exit code {code})", where, "see its output above")
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    hint = f"see its output above; it was: {shlex.join(plan.command)}"
    if code < 0:
        hint = f"a script that saves on SIGTERM and exits with {SAVED} is recorded as saved; "
        hint += "a SIGKILL that nobody sent is most often the kernel out of memory (see dmesg)"
    raise RunError(f"rank {rank} ended with {how}", where, hint)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace"))
