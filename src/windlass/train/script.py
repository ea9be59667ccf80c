"""`windlass train` for a run of kind: script: its ranks are started as torchrun would, and watched.

Plain processes, as for a language model's ranks and for the same reasons (see `ranks.start`), with the environment
that torchrun gives. If torchrun or `accelerate launch` started this process, it is one rank: the script runs below it,
so that its exit code is known and signals reach it.
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

from windlass.errors import RANK_USER_INPUT, SAVED, RunError, UserError
from windlass.files import write_json
from windlass.observe.watch import patrol
from windlass.observe.watch.patrol import ScriptWatch
from windlass.plan.script import ScriptPlan
from windlass.run_folder import (
    FAILED,
    FINISHED,
    OUTPUT_DIR,
    PLAN,
    STOPPED,
    begin_manifest,
    ensure_dir,
    git_state,
    lock_run,
    read_manifest,
    update_manifest,
    versions,
)
from windlass.runfile.machines import GRACE_SECONDS
from windlass.train import ranks
from windlass.train.rank import SUPERVISED, read_rank, run_rank, wait_for_peers

LIBRARIES: Final = ("torch", "torchvision", "transformers", "accelerate", "lightning")
STOP_SIGNALS: Final = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGUSR1)


def train(
    make_plan: Callable[[], ScriptPlan], *, environ: Mapping[str, str], resume: bool, say: Callable[[UserError], None]
) -> int:
    """Start this machine's ranks of the script, or be one. Returns the exit code."""
    here = read_rank(environ)
    if here is None:
        plan = make_plan()
        ranks.require_all_nodes(plan.layout.nodes, plan.loaded.where, environ)
        with ranks.reserved_port() as port:
            started = ranks.environments(plan.layout.gpus_per_node, environ, port)
            return run(plan, [as_torchrun(each) for each in started], resume=resume)

    # An operator's pod with one rank gives no more than its number.
    own = {"LOCAL_RANK": str(here.local_rank), "LOCAL_WORLD_SIZE": "1", **environ}
    grace = float(GRACE_SECONDS)

    def one() -> int:
        nonlocal grace
        plan = make_plan()
        grace = _grace(plan)
        return run(plan, [own], resume=resume)

    code = run_rank(here, one, print_error=say)
    if code == SAVED:
        wait_for_peers(here, int(own["LOCAL_WORLD_SIZE"]), grace)
    return code


def run(plan: ScriptPlan, environs: Sequence[Mapping[str, str]], *, resume: bool) -> int:
    """The script once for each environment, until all have ended. Rank 0's side has the run folder and the watch."""
    job, path = plan.loaded.run, plan.loaded.run.script.path
    if path is not None and not Path(path).is_file():
        hint = f"the path is relative to the folder that the run is started in, here {Path.cwd()}"
        raise UserError(f"there is no file {path}", plan.loaded.where("script.path"), hint)
    folder, command, grace = Path(job.folder), [sys.executable, *job.command], _grace(plan)
    is_leader, launched = any(environ["RANK"] == "0" for environ in environs), SUPERVISED not in environs[0]
    # Should this process be killed: below a launcher that means that the script's time to save is over.
    parent_death = signal.SIGKILL if launched else signal.SIGTERM
    ensure_dir(folder, plan.loaded.where("script.output_dir"))  # below a launcher one may come before rank 0
    # Where the recorder writes, and what is to be kept for the watch.
    more = {OUTPUT_DIR: str(folder.absolute()), **patrol.environment(environs[0], job, folder.absolute())}
    with _claimed(plan, folder, resume=resume) if is_leader else contextlib.nullcontext():
        processes: list[subprocess.Popen[bytes]] = []
        stop = threading.Event()
        watch = ScriptWatch(job, plan.layout.ranks, stop.set, _say) if is_leader else None
        with contextlib.ExitStack() as stack:

            def starting() -> Iterator[subprocess.Popen[bytes]]:
                for environ in environs:
                    yield ranks.start_process(command, {**environ, **more}, parent_death_signal=parent_death)
                if watch:  # last, for it is a thread, and processes are better started without
                    stack.enter_context(watch)

            first, cut_short = ranks.wait(
                processes, starting(), grace, ranks.PATIENCE_SECONDS, second_kills=not launched, stop=stop
            )
        if watch and watch.why:
            raise RunError(watch.why, "watch", f"see alarms.jsonl in {job.folder} and the report")
        codes = {int(environ["RANK"]): process.returncode for environ, process in zip(environs, processes, strict=True)}
        code = _explain_end(plan, codes, None if first is None else int(environs[first]["RANK"]), cut_short)
        if is_leader:
            update_manifest(folder, state=STOPPED if code == SAVED else FINISHED)
        return code


def as_torchrun(environ: Mapping[str, str]) -> dict[str, str]:
    """What torchrun sets besides. Its own store and its error file are its launcher's, and not here."""
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


def _grace(plan: ScriptPlan) -> float:
    return plan.loaded.run.cluster.grace_seconds or GRACE_SECONDS


@contextlib.contextmanager
def _claimed(plan: ScriptPlan, folder: Path, *, resume: bool) -> Iterator[None]:
    where = plan.loaded.where("script.output_dir")
    lock = lock_run(folder, where)
    with lock if lock is not None else contextlib.nullcontext():
        before = read_manifest(folder)
        state = before.get("state")
        if state == FINISHED:
            hint = "name another script.output_dir, or remove the folder to run anew"
            raise UserError(f"{folder} holds a finished run", where, hint)
        if state and not resume:
            hint = "add --resume to start the script in it again, or name another script.output_dir"
            raise UserError(f"{folder} holds an unfinished run ({state} {before.get('began', '')})", where, hint)
        write_json(folder / PLAN, plan.as_dict())
        facts = {
            "kind": "script",
            "run": plan.loaded.run.model_dump(mode="json"),
            "command": plan.command,
            "versions": versions(LIBRARIES),
            "ranks": plan.layout.ranks,
            "layout": plan.as_dict()["layout"],
            "git": git_state(),
        }
        begin_manifest(folder, facts)
        try:
            yield
        except BaseException:
            update_manifest(folder, state=FAILED)
            raise


def _explain_end(plan: ScriptPlan, codes: Mapping[int, int], first: int | None, cut_short: str) -> int:
    """The exit code, or the error that says which rank ended how. By rank; `first` is the one that ended first."""
    script = plan.loaded.run.script
    where = plan.loaded.where("script.path" if script.module is None else "script.module")
    if cut_short and not set(codes.values()) <= {0, SAVED}:
        hint = "cluster.grace_seconds is the time that a script gets to save in after SIGTERM"
        raise RunError(cut_short, where, hint)
    if first is None:
        return 0
    code = codes[first]
    if code == SAVED:
        return SAVED
    if code == RANK_USER_INPUT:
        raise UserError(f"rank {first} reports wrong input (exit code {code})", where, "see its output above")
    others = [f"rank {rank} with {how_ended(other)}" for rank, other in codes.items() if other and rank != first]
    then = f"; then {', '.join(others[:4])}{' …' if len(others) > 4 else ''}" if others else ""
    hint = f"see its output above; it was: {shlex.join(plan.command)}"
    if code in STOP_SIGNALS:
        hint = f"a script that saves on SIGTERM and exits with {SAVED} is recorded as saved"
    elif code == -signal.SIGKILL:
        hint = "a SIGKILL that nobody sent is most often the kernel out of memory (see dmesg)"
    raise RunError(f"rank {first} ended with {how_ended(code)}{then}", where, hint)


def how_ended(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace"))
