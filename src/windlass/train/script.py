"""`windlass train` for a run of kind: script: its ranks are started as torchrun would, watched, and told of.

Plain processes, as for a language model's ranks and for the same reasons (see `ranks.start`), with the environment
that torchrun gives. Where torchrun or `accelerate launch` started this process, it is one rank: the script runs below
it, so that its exit code is known and signals reach it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from windlass import __version__
from windlass.errors import RANK_USER_INPUT, SAVED, RunError, UserError
from windlass.observe import steps
from windlass.observe.watch import patrol
from windlass.observe.watch.patrol import ScriptWatch
from windlass.plan.script import ScriptPlan
from windlass.runfile.machines import GRACE_SECONDS
from windlass.train import manifest, ranks
from windlass.train.machines import require_all_nodes
from windlass.train.rank import PARENT_SPEAKS, await_others, inside, place

LIBRARIES: Final = ("torch", "torchvision", "transformers", "accelerate", "lightning")
STOP_SIGNALS: Final = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGUSR1)


def train(
    make_plan: Callable[[], ScriptPlan], *, environ: Mapping[str, str], resume: bool, say: Callable[[UserError], None]
) -> int:
    """Start this machine's ranks of the script, or be one. Returns the exit code."""
    here = place(environ)
    if here is None:
        plan = make_plan()
        return run(plan, _all_of_this_machine(plan, environ), resume=resume)

    # An operator's pod with one rank is told no more than its number.
    own = {"LOCAL_RANK": str(here.local_rank), "LOCAL_WORLD_SIZE": "1", **environ}
    grace = float(GRACE_SECONDS)

    def one() -> int:
        nonlocal grace
        plan = make_plan()
        grace = _grace(plan)
        return run(plan, [own], resume=resume)

    code = inside(here, one, say=say)
    if code == SAVED:
        await_others(here, int(own["LOCAL_WORLD_SIZE"]), grace)
    return code


def run(plan: ScriptPlan, environs: Sequence[Mapping[str, str]], *, resume: bool) -> int:
    """The script once for each environment, until all have ended. Rank 0's side keeps the run folder and the watch."""
    _require_here(plan)
    job, leads = plan.loaded.run, any(environ["RANK"] == "0" for environ in environs)
    command = [sys.executable, *job.command]
    grace, launched = _grace(plan), PARENT_SPEAKS not in environs[0]
    # To a script whose windlass was killed. Below a launcher that means that its time to save is over.
    farewell = signal.SIGKILL if launched else signal.SIGTERM
    # Every rank makes it, for below a launcher one may come before rank 0.
    manifest.made(Path(job.folder), plan.loaded.where("script.output_dir"))
    with _folder(plan, resume=resume) if leads else contextlib.nullcontext():
        more = _told_to_the_script(plan, environs[0])
        processes: list[subprocess.Popen[bytes]] = []
        stop = threading.Event()
        guard = ScriptWatch(job, plan.layout.ranks, stop.set, _say) if leads else None
        with contextlib.ExitStack() as stack:

            def beginning() -> Iterator[subprocess.Popen[bytes]]:
                for environ in environs:
                    yield ranks.begin(command, {**environ, **more}, farewell=farewell)
                if guard:  # last, for it is a thread, and processes are better begun without
                    stack.enter_context(guard)

            first, cut_short = ranks.wait(
                processes, beginning(), grace, ranks.PATIENCE_SECONDS, hurries=not launched, stop=stop
            )
        if guard and guard.why:
            raise RunError(guard.why, "watch", f"look at alarms.jsonl in {job.folder} and at the report")
        numbered = {
            int(environ["RANK"]): process.returncode for environ, process in zip(environs, processes, strict=True)
        }
        return _verdict(plan, numbered, None if first is None else int(environs[first]["RANK"]), cut_short)


def _all_of_this_machine(plan: ScriptPlan, environ: Mapping[str, str]) -> list[dict[str, str]]:
    require_all_nodes(plan.layout.nodes, plan.loaded.where, environ)
    return [as_torchrun(made) for made in ranks.environments(plan.layout.gpus_per_node, environ)]


def as_torchrun(environ: Mapping[str, str]) -> dict[str, str]:
    """The rest of what torchrun tells a rank. Its own store and its error file are its launcher's, and not here."""
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


def _require_here(plan: ScriptPlan) -> None:
    path = plan.loaded.run.script.path
    if path is not None and not Path(path).is_file():
        hint = f"a path is looked for from the folder that the run is started in, here {Path.cwd()}"
        raise UserError(f"there is no file {path}", plan.loaded.where("script.path"), hint)


def _told_to_the_script(plan: ScriptPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """Where the meter writes, and what is to be kept for the watch."""
    folder = Path(plan.loaded.run.folder).absolute()
    return {steps.OUTPUT_DIR: str(folder), **patrol.environment(environ, plan.loaded.run, folder)}


def _grace(plan: ScriptPlan) -> float:
    return plan.loaded.run.cluster.grace_seconds or GRACE_SECONDS


# --- the run folder -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _folder(plan: ScriptPlan, *, resume: bool) -> Iterator[None]:
    """Taken for this run, and told how it ended."""
    folder, where = Path(plan.loaded.run.folder), plan.loaded.where("script.output_dir")
    with manifest.held(folder, where):
        before = manifest.read(folder)
        state = before.get("state")
        if state == manifest.FINISHED:
            hint = "name another script.output_dir, or remove the folder to run anew"
            raise UserError(f"{folder} holds a finished run", where, hint)
        if state and not resume:
            hint = "add --resume to start the script in it again, or name another script.output_dir"
            raise UserError(f"{folder} holds an unfinished run ({state} {before.get('began', '')})", where, hint)
        manifest.write(folder, "plan.json", plan.as_dict())
        began = before.get("began") or time.strftime("%Y-%m-%d %H:%M:%S")
        manifest.write(folder, steps.MANIFEST, {"state": manifest.RUNNING, "began": began, **_facts(plan)})
        try:
            yield
        except BaseException:
            manifest.note(folder, state=manifest.FAILED)
            raise


def _facts(plan: ScriptPlan) -> dict[str, Any]:
    """What went into this run."""
    found = {}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return {
        "kind": "script",
        "run": plan.loaded.run.model_dump(mode="json"),
        "command": plan.command,
        "versions": {"windlass": __version__, "python": sys.version.split()[0], **found},
        "ranks": plan.layout.ranks,
        "layout": plan.as_dict()["layout"],
        "git": manifest.git_state(),
    }


# --- how it ended ---------------------------------------------------------------------------------------------------


def _verdict(plan: ScriptPlan, codes: Mapping[int, int], first: int | None, cut_short: str) -> int:
    """The exit code, or the error that says which rank ended how. By rank; `first` is the one that ended first."""
    folder, where = Path(plan.loaded.run.folder), plan.loaded.where("script.module" if _module(plan) else "script.path")
    leads = 0 in codes
    if cut_short and not set(codes.values()) <= {0, SAVED}:
        hint = "cluster.grace_seconds is the time that a script gets to save in after SIGTERM"
        raise RunError(cut_short, where, hint)
    if first is None or codes[first] == SAVED:
        if leads:
            manifest.note(folder, state=manifest.FINISHED if first is None else manifest.STOPPED)
        return 0 if first is None else SAVED
    code = codes[first]
    others = [f"rank {rank} with {told(other)}" for rank, other in codes.items() if other and rank != first]
    then = f"; then {', '.join(others[:4])}{' …' if len(others) > 4 else ''}" if others else ""
    if code == RANK_USER_INPUT:
        raise UserError(f"rank {first} says that its input is wrong (exit code {code})", where, "see its own words")
    hint = f"its own words stand above; it was: {shlex.join(plan.command)}"
    if code in STOP_SIGNALS:
        hint = f"a script that saves on SIGTERM and exits with {SAVED} is recorded as saved"
    elif code == -signal.SIGKILL:
        hint = "a SIGKILL that nobody sent is most often the kernel out of memory (see dmesg)"
    raise RunError(f"rank {first} ended with {told(code)}{then}", where, hint)


def told(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _module(plan: ScriptPlan) -> bool:
    return plan.loaded.run.script.module is not None


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace"))
