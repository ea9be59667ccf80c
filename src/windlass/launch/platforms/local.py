"""A run on this machine without a platform: it replaces this process, is observed by its run folder, and is
stopped by a signal."""

import math
import os
import shlex
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from windlass import run_folder
from windlass.errors import Problem, UserError, make_pasteable
from windlass.files import read_json, read_json_lines
from windlass.launch.job import RECORD, Job, JobRecord, keep_record
from windlass.observe.format import describe_gain
from windlass.observe.reader import as_dict, as_number, find_total_steps
from windlass.observe.watch.heartbeat import describe_start, read_beats
from windlass.ranks.rank import read_start_time

ALIVE_SECONDS = 30  # a rank writes a heartbeat every 5 s


# Keys of `cluster` that only a scheduler can apply.
SCHEDULED = (
    *("image", "volumes", "cpu", "cpu_limit", "memory_request", "memory_limit", "large_shm", "max_restarts"),
    "deadline_seconds",
)
IGNORED = {
    "working_dir": "the run starts in this folder",
    "env": "export the variables before",
    "install": "install it in this environment",
    "log_format": "nothing collects these lines",
}


def list_scheduler_keys(job: Job) -> Iterator[str]:
    if keys := [key for key in SCHEDULED if key in job.cluster.changed]:
        yield f"no effect without a scheduler (--to kubernetes, runai or slurm): cluster's {', '.join(keys)}"


def review(job: Job) -> Iterator[Problem | str]:
    yield from list_scheduler_keys(job)
    for key, why in IGNORED.items():
        if key in job.cluster.changed:
            yield f"cluster.{key} has no effect on this machine: {why}"
    if job.nodes > 1:
        hint = "--to script writes a script for each node; --to runai and --to kubernetes start them"
        yield Problem(f"{job.nodes} nodes, and this is one", job.where("cluster.nodes"), hint, "too-many-nodes")


def files(_: Job) -> dict[str, str]:
    return {}


def start(job: Job, folder: Path, _: Callable[[str], None]) -> bool:
    """Replace this process by the run, so that signals and the exit code are the run's own."""
    facts = read_json(folder / RECORD)
    if facts.get("host") == socket.gethostname() and is_running(facts):
        # A second run would wait for the folder's lock, and its record would replace the first one's.
        what = f"it is already running, as process {facts['pid']}"
        hint = "`windlass status RUN`; `windlass stop RUN`; or another train.output_dir"
        raise UserError(what, str(folder / RECORD), hint, "already-running")
    keep_record(job, "local", folder, **describe_process())
    sys.stdout.flush()
    sys.stderr.flush()
    # --resume starts from the beginning if there is nothing to resume.
    os.execv(sys.executable, [sys.executable, "-m", "windlass", "train", *job.arguments, "--resume"])


def describe_process() -> dict[str, Any]:
    return {"pid": os.getpid(), "began": read_start_time(os.getpid()), "host": socket.gethostname()}


def is_running(facts: Mapping[str, Any]) -> bool:
    """Return whether this very process still runs: process ids are reused."""
    try:
        os.kill(facts["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process
        pass
    return bool(read_start_time(facts["pid"]) == facts["began"])


def status(record: JobRecord) -> int:
    """Print the run's state in one line, and where to see more."""
    facts = record.facts
    run = run_folder.find_current_trial(record.run)
    manifest = run_folder.read_manifest(record.run)
    state = manifest.get("state")
    path = run / run_folder.EVENTS
    events = list(read_json_lines(path)) if path.is_file() else []
    starting = ""
    if facts.get("host") == socket.gethostname():
        running, sign = is_running(facts), f" (process {facts['pid']})"
    else:
        newest = max(read_beats(run).values(), key=lambda beat: beat["time"], default=None)
        age = max(0.0, time.time() - newest["time"]) if newest else math.inf
        running = age < ALIVE_SECONDS
        signs = [newest["time"], *(event.get("time") for event in events)] if newest else []  # a callback beats never
        starting = "" if running else describe_start(record.run, signs)
        sign = f" (last heartbeat {age:.0f} s ago, from {newest['host']})" if newest else ""
    steps = run_folder.find_step_files(run).get(0)
    last = next(iter(deque(read_json_lines(steps) if steps else (), maxlen=1)), {})  # a resumed script goes back
    number = int(last.get("step", 0))
    planned = find_total_steps(events, read_json(run / run_folder.PLAN))
    step = f"step {number:,} of {planned:,.0f}" if planned > 0 else f"step {number:,}"
    step += describe_pairs(as_dict(last.get("preference")))
    gain = next((said for event in reversed(events) if (said := describe_gain(event.get("eval_gain")))), "")
    step += f", evaluation loss {gain}" if gain else ""
    progress = run_folder.describe_progress(record.run)
    step = f"{progress}, {step}" if progress else step
    again = "windlass submit RUN" if record.path.exists() else "windlass train RUN --resume"
    if state == run_folder.FINISHED:
        text = "finished"
    elif running:
        text = f"running, {step}{sign}" if state else f"starting{sign}"
    elif state == run_folder.RUNNING and starting:
        text = starting
    elif state in (run_folder.RUNNING, run_folder.FAILED):
        how = "failed" if state == run_folder.FAILED else "ended without finishing"
        why = manifest.get("failure") or "its output has the cause"
        text = f"{how} after {step}: {why}; `{again}` resumes from its last checkpoint"
    elif state:
        text = f"{state} after {step}, and saved: `{again}` resumes from there"
    else:
        text = "no heartbeat yet: it has not started, or died before the first one; its output has the cause"
    print(make_pasteable(f"{record.run}: {text}"))
    if state:
        print(f"`windlass watch {shlex.quote(str(record.run))}` shows curves, ranks and alarms")
    return 0


def describe_pairs(figures: Mapping[str, Any]) -> str:
    """Return what the last step recorded of its pairs; empty for other runs."""
    if not figures:
        return ""
    margin, accuracy, chosen, rejected = (
        as_number(figures.get(f"rewards/{name}")) for name in ("margins", "accuracies", "chosen", "rejected")
    )
    return f", margin {margin:.3f}, accuracy {accuracy:.0%}, rewards {chosen:.3f} chosen, {rejected:.3f} rejected"


def logs(record: JobRecord, *, follow: bool) -> int:  # noqa: ARG001
    hint = f"look there; `windlass watch {shlex.quote(str(record.run))}` shows its progress"
    raise UserError("its output is in the terminal where it was started", str(record.path), hint, "no-log")


def stop(record: JobRecord) -> int:
    """Send SIGTERM to the run's process: its ranks save, and it exits with 75."""
    facts, here = record.facts, socket.gethostname()
    if facts["host"] != here:
        hint = f"there: `windlass stop RUN`, or kill -TERM {facts['pid']}"
        what = f"it was started on {facts['host']}, and this is {here}"
        raise UserError(what, str(record.path), hint, "started-elsewhere")
    if is_running(facts):
        os.kill(facts["pid"], signal.SIGTERM)
        text = f"process {facts['pid']} is stopping: its ranks save, and `windlass submit RUN` resumes from there"
    else:
        text = "its process has ended already"
    record.say(f"{record.run}: {text}")
    return 0
