"""The ranks of a run of kind: script, started as torchrun would start them, and watched.

They are plain processes, as for language models and for the same reasons (see `run_ranks`), in the environment that
torchrun provides. A rank that torchrun or `accelerate launch` started runs the script as its child, so that the
script's exit code is known and signals reach it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from windlass import run_folder
from windlass.errors import RANK_USER_INPUT, SAVED, RunError, UserError
from windlass.files import write_json
from windlass.observe.watch.monitor import ScriptWatch, make_environment
from windlass.plan.finished import require_own_folder
from windlass.plan.script import ScriptPlan
from windlass.ranks import supervisor
from windlass.ranks.rank import SUPERVISED, Rank, wait_for_peers
from windlass.runfile.machines import GRACE_SECONDS

LIBRARIES: Final = ("torch", "torchvision", "transformers", "accelerate", "lightning")


def run_script_rank(plan: ScriptPlan, here: Rank, environ: Mapping[str, str], *, resume: bool) -> int:
    """Run the script as the rank that a launcher started. Returns the exit code."""
    # A pod with one rank has no other variables than its number.
    environ = {"LOCAL_RANK": str(here.local_rank), "LOCAL_WORLD_SIZE": "1", **environ}
    grace_seconds = float(plan.run.cluster.grace_seconds or GRACE_SECONDS)
    code = run_script(plan, [environ], grace_seconds, resume=resume)
    if code == SAVED and environ["LOCAL_WORLD_SIZE"] != "1":
        wait_for_peers(grace_seconds)
    return code


def run_script(
    plan: ScriptPlan,
    environs: Sequence[Mapping[str, str]],
    grace_seconds: float,
    *,
    resume: bool,
    scheduled: bool = False,
    lost: Path | None = None,
) -> int:
    """Run the script once per environment until all have ended. Rank 0's side has the run folder and the watch.

    scheduled, lost: see `run_ranks` and `wait_for_ranks`.
    """
    folder = plan.folder
    launched = SUPERVISED not in environs[0]
    # Under a launcher another rank may come before rank 0.
    run_folder.ensure_dir(folder, plan.where("script.output_dir"))
    # Where the recorder writes, and what the watch needs.
    variables = {
        run_folder.OUTPUT_DIR: str(folder.absolute()),
        **make_environment(environs[0], plan.run, folder.absolute()),
    }
    # If this process is killed by a launcher, the script's time to save is over.
    parent_death = signal.SIGKILL if launched else signal.SIGTERM
    stop = threading.Event()
    watch = None
    with contextlib.ExitStack() as stack:
        if environs[0]["RANK"] == "0":
            stack.enter_context(_claim_run_folder(plan, resume=resume))
            watch = ScriptWatch(plan.run, plan.layout.ranks, stop.set, _say)

        def start() -> Iterator[subprocess.Popen[bytes]]:
            command = [sys.executable, *plan.run.command]
            for environ in environs:
                inherited = environ if launched else add_torchrun_variables(environ)
                yield supervisor.start_process(command, {**inherited, **variables}, parent_death_signal=parent_death)
            if watch:  # last: the watch is a thread, and processes should be started before threads
                stack.enter_context(watch)

        end = supervisor.wait_for_ranks(
            start(),
            grace_seconds,
            supervisor.PATIENCE_SECONDS,
            second_kills=not (launched or scheduled),
            stop=stop,
            lost=lost,
        )
        if watch and watch.why:
            raise RunError(watch.why, "watch", f"see alarms.jsonl in {folder} and the report", "stopped-by-watch")
        code = _explain_end(plan, end, environs)
        if watch:
            run_folder.update_manifest(folder, state=run_folder.STOPPED if code == SAVED else run_folder.FINISHED)
        return code


def add_torchrun_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Add the variables that torchrun sets, except its store's and its error file's, which belong to its launcher."""
    per_node = int(environ["LOCAL_WORLD_SIZE"])
    return {
        **environ,
        "GROUP_RANK": str(int(environ["RANK"]) // per_node),
        "GROUP_WORLD_SIZE": str(int(environ["WORLD_SIZE"]) // per_node),
        "ROLE_NAME": "default",
        "ROLE_RANK": environ["RANK"],
        "ROLE_WORLD_SIZE": environ["WORLD_SIZE"],
        "TORCHELASTIC_RUN_ID": "windlass",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


@contextlib.contextmanager
def _claim_run_folder(plan: ScriptPlan, *, resume: bool) -> Iterator[None]:
    """Keep other runs out of the folder and record this one in it."""
    folder = plan.folder
    where = plan.where("script.output_dir")
    with run_folder.lock_run(folder, where) or contextlib.nullcontext():
        require_own_folder(plan, unfinished=resume or not run_folder.read_manifest(folder))
        described = plan.as_dict()
        write_json(folder / run_folder.PLAN, described)
        facts = {
            "kind": "script",
            "run": plan.run.model_dump(mode="json"),
            "command": plan.command,
            "versions": run_folder.read_versions(LIBRARIES),
            "ranks": plan.layout.ranks,
            "layout": described["layout"],
            "git": run_folder.read_git_state(),
        }
        run_folder.begin_manifest(folder, facts)
        try:
            yield
        except BaseException:
            run_folder.update_manifest(folder, state=run_folder.FAILED)
            raise


def _explain_end(plan: ScriptPlan, end: supervisor.End, environs: Sequence[Mapping[str, str]]) -> int:
    """Return the exit code, or raise the error that says which rank ended how."""
    where = plan.where("script.path" if plan.run.script.path else "script.module")
    if end.interrupted_save:
        hint = "cluster.grace_seconds is the time that a script gets to save in after SIGTERM"
        raise RunError(end.cut_short, where, hint, "interrupted-save")
    if end.first is None:
        return 0
    code = end.codes[end.first]
    rank = environs[end.first]["RANK"]
    if code == SAVED:
        return SAVED
    if code == RANK_USER_INPUT:
        raise UserError(
            f"rank {rank} reports wrong input (exit code {code})", where, "see its output above", "rank-refused"
        )
    if code < 0:
        hint = f"a script that saves on SIGTERM and exits with {SAVED} is recorded as saved; "
        hint += "a SIGKILL that nobody sent is most often the kernel out of memory (see dmesg)"
        raise RunError(f"rank {rank} ended with {signal.Signals(-code).name}", where, hint, "killed-rank")
    hint = f"see its output above; it was: {shlex.join(plan.command)}"
    raise RunError(f"rank {rank} ended with exit code {code}", where, hint, "rank-failed")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace"))
