"""A script for each node, started by hand or by a scheduler that windlass doesn't know."""

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from windlass.errors import Problem, UserError
from windlass.launch.job import Job, JobRecord, keep_record, render_launch_sh
from windlass.launch.platforms import local


def review(job: Job) -> Iterator[Problem | str]:
    yield from local.list_scheduler_keys(job)


def files(job: Job) -> dict[str, str]:
    return {"launch.sh": render_launch_sh(job, exports=True), **job.files}


def start(job: Job, folder: Path, say: Callable[[str], None]) -> bool:
    keep_record(job, "script", folder)
    say(f"on each node: bash {shlex.quote(str(folder / 'launch.sh'))} (its first lines show how)")
    return False


status = local.status


def logs(record: JobRecord, *, follow: bool) -> int:  # noqa: ARG001
    hint = f"look there, or in Slurm's output file; `windlass watch {shlex.quote(str(record.run))}` shows its progress"
    raise UserError("its nodes print where they were started", str(record.path), hint, "started-elsewhere")


def stop(record: JobRecord) -> int:
    hint = "scancel, or kill -TERM the process of launch.sh or windlass train on any one node: all save and end"
    hint += f"; `windlass watch {shlex.quote(str(record.run))}` shows its progress"
    raise UserError("it is stopped where it was started", str(record.path), hint, "started-elsewhere")
