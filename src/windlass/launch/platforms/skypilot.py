"""SkyPilot: a task file that rents the plan's machines, and the managed job that resumes the run on new ones."""

import json
import math
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from windlass import __version__
from windlass.data.sources import HUB_NAME
from windlass.errors import SAVED, Problem, RunError, UserError
from windlass.launch.job import (
    Job,
    JobRecord,
    call_client,
    find_restart_problems,
    keep_record,
    list_inputs,
    parse_cores,
    parse_gib,
    quote_words,
    render_launch_sh,
    to_one_line,
)
from windlass.launch.platforms.kubernetes import to_block
from windlass.runfile.machines import Secret

TASK = "task.yaml"
SECONDS = 600  # timeout of a query: the first one starts SkyPilot's server
WORKDIR = PurePosixPath("~/sky_workdir")  # where SkyPilot copies the files next to the task, and starts it
# SkyPilot's names of GPUs that are not those of the hardware table in capitals (`sky show-gpus`).
ACCELERATORS = {
    "a100-80gb": "A100-80GB",
    "a100-40gb": "A100",
    "h100-pcie": "H100",
    "rtx-3090": "RTX3090",
    "rtx-4090": "RTX4090",
    "rtx-5090": "RTX5090",
    "rtx-a6000": "RTXA6000",
    "rtx-pro-6000": "RTXPRO6000",
    "rtx-pro-6000-server": "RTXPRO6000",
}
IGNORED = {
    "volumes": "cluster.skypilot.mounts names what its nodes mount",
    "cpu_limit": "a node's processors are the run's",
    "large_shm": "/dev/shm is the machine's",
    "deadline_seconds": "its jobs have no time limit",
}
NO_JOBS = "No in-progress managed jobs"  # what `sky jobs queue` fails with as long as nothing was ever submitted
PYTHON = """\
export PATH="$HOME/.local/bin:$PATH" # where SkyPilot has installed uv
[ -x ~/windlass/bin/pip ] || uv venv --quiet --seed --python 3.12 ~/windlass
~/windlass/bin/python3 -m pip install --quiet --disable-pip-version-check """
PATH = 'export PATH="$HOME/windlass/bin:$PATH"\n'
HEAD = """\
# {title}
# Written by windlass {version} from {source}: rents the machines and runs launch.sh on each. By hand, in this folder:
#   {command}
# Submit it again with the same run folder to resume from the last checkpoint.
"""


def submit_command(job: Job) -> list[str]:
    secrets = [word for name in list_secrets(job) for word in ("--secret", name)]
    return ["sky", "jobs", "launch", "--yes", "--detach-run", *secrets, TASK]


def list_secrets(job: Job) -> list[str]:
    return [variable.name for variable in job.environment if isinstance(variable.value, Secret)]


def is_bucket(source: str) -> bool:
    return "://" in source


def find_mount(job: Job, path: str) -> str | None:
    mounts = [mount for mount in job.cluster.skypilot.mounts if PurePosixPath(path).is_relative_to(mount)]
    return max(mounts, key=len, default=None)


def list_uploads(job: Job) -> dict[str, str]:
    """Return path on the nodes -> path of this machine, for what the run reads from here or installs."""
    names = [path for path in list_inputs(job).values() if find_mount(job, path) is None]
    names += [requirement.partition("[")[0] for requirement in job.cluster.install]
    here = {name: Path(name).expanduser() for name in names}
    return {
        name if name.startswith(("/", "~")) else str(WORKDIR / name): str(path.absolute())
        for name, path in here.items()
        if path.exists()
    }


def make_task(job: Job) -> dict[str, Any]:
    cluster = job.cluster
    section = cluster.skypilot
    gpu = job.plan.machine.gpu.name
    known = not job.is_script or cluster.memory_request  # a script's needs are unknown
    is_rdma = job.nodes > 1 and job.plan.machine.network.name.startswith(("infiniband", "roce"))
    resources = {
        "infra": section.infra,
        "accelerators": {section.accelerator or ACCELERATORS.get(gpu, gpu.upper()): job.ranks_per_node},
        "cpus": f"{math.ceil(parse_cores(job.cpu))}+",
        "memory": f"{math.ceil(parse_gib(job.memory_request))}+" if known else None,
        "disk_size": section.disk_gb,
        "network_tier": "best" if is_rdma else None,
        "image_id": f"docker:{cluster.image}" if cluster.image else None,
        "use_spot": section.spot,
        # stopped by a signal, and saved: it resumes, and that is not counted
        "job_recovery": {"max_restarts_on_errors": cluster.max_restarts, "recover_on_exit_codes": [SAVED]},
    }
    if not job.gpu:
        del resources["accelerators"]
    kept = find_mount(job, job.folder)
    mounts: dict[str, Any] = {path: source for path, source in section.mounts.items() if is_bucket(source)}
    if kept in mounts:
        # The only mode that appends to files and renames folders; it uploads a file once it is closed.
        mounts[kept] = {"source": mounts[kept], "mode": "MOUNT_CACHED"}
    options = [word for override in job.overrides for word in ("--override", override)]
    fetch = f"python3 -m windlass fetch {quote_words(['run.yaml', *options])}\n"
    install = f"{PYTHON}{quote_words(cluster.install)}\n{PATH}"
    task = {
        "name": job.name,
        "num_nodes": job.nodes,
        "workdir": ".",
        "resources": {key: value for key, value in resources.items() if value is not None},
        "envs": {one.name: one.value for one in job.environment if not isinstance(one.value, Secret)},
        "secrets": dict.fromkeys(list_secrets(job)),
        "file_mounts": mounts | list_uploads(job),
        "volumes": {path: source for path, source in section.mounts.items() if not is_bucket(source)},
        "setup": "set -e\n" + ("" if cluster.image else install) + ("" if job.is_script else fetch),
        "run": ("" if cluster.image else PATH) + "exec bash launch.sh\n",
    }
    return {key: value for key, value in task.items() if value not in ({}, "set -e\n")}


def review(job: Job) -> Iterator[Problem | str]:
    cluster = job.cluster
    for key, why in IGNORED.items():
        if key in cluster.changed:
            yield f"cluster.{key} has no effect on SkyPilot: {why}"
    if cluster.memory_limit and cluster.memory_request:
        yield "cluster.memory_limit has no effect on SkyPilot: memory_request chooses the machine"
    if not cluster.image and not cluster.install:
        hint = f"cluster.install: ['dist/windlass-{__version__}-py3-none-any.whl[train,gpu]']; `make package` builds it"
        what = "its nodes have no windlass: neither cluster.install nor cluster.image"
        yield Problem(what, job.where("cluster.install"), hint, "no-windlass")
    yield from find_restart_problems(job)
    folder = job.folder
    if find_mount(job, folder) is None:
        hint = (
            f"give an absolute path, and cluster.skypilot.mounts: {{{Path(folder).absolute().parent}: s3://my-bucket}}"
        )
        what = f"{folder} is on no mount: what the run writes would vanish with its machines"
        yield Problem(what, job.where(job.plan.run.folder_key), hint, "not-mounted")
    for place, name in list_inputs(job).items():
        here = Path(name).expanduser()
        if find_mount(job, name) is not None:
            continue
        if ".." in PurePosixPath(name).parts:
            hint = "give the absolute path"
            yield Problem(f"{name} leads out of the run's folder on the nodes", place, hint, "relative-path")
        elif here.is_dir() and any(path.is_symlink() for path in here.rglob("*")):
            hint = "copy it with `cp -rL`, or name the model's or data set's hub id, which the nodes fetch"
            yield Problem(f"{name} has links, which are not uploaded", place, hint, "links")
        elif not here.exists() and not HUB_NAME.fullmatch(name):
            hint = "cluster.skypilot.mounts: {PATH: s3://my-bucket/folder}"
            yield Problem(f"{name} is neither here nor on a mount", place, hint, "not-mounted")


def files(job: Job) -> dict[str, str]:
    head = HEAD.format(
        title=job.title,
        version=__version__,
        source=to_one_line(job.source),
        command=to_one_line(quote_words(submit_command(job))),
    )
    # Without an image the setup installs, into an environment of windlass' own.
    installs = job.cluster.install if job.cluster.image else []
    there = replace(job, cluster=job.cluster.model_copy(update={"install": installs}))
    return {TASK: head + to_block(make_task(job)), "launch.sh": render_launch_sh(there, exports=False), **job.files}


def require_free(job: Job, _: Path) -> None:
    """Refuse to submit what SkyPilot has: it would queue a second job of the same run."""
    for found in query_jobs(job.name, "--skip-finished"):
        hint = "`windlass status RUN`; `windlass stop RUN`; or another name"
        what = f"SkyPilot has it already, as job {found['job_id']} ({found['status']})"
        raise UserError(what, job.where("name"), hint, "already-running")


def start(job: Job, folder: Path, say: Callable[[str], None]) -> bool:  # noqa: ARG001
    code = subprocess.run(submit_command(job), cwd=folder, check=False).returncode
    if code:
        hint = "`sky check` prints the clouds that it may use"
        by_hand = f"{folder}: {quote_words(submit_command(job))}"
        raise RunError(f"sky ended with {code}: its own message is above", by_hand, hint, "client-failed")
    keep_record(job, "skypilot", folder)
    return True


def query_jobs(name: str, *more: str) -> list[dict[str, Any]]:
    """Return the managed jobs of this name, newest first."""
    command = ["sky", "jobs", "queue", "--output", "json", *more]
    hint = "`sky api status` shows whether its server answers"
    done = call_client(*command, hint=hint, seconds=SECONDS)
    if done.returncode and NO_JOBS in done.stderr:
        return []
    table = re.search(r"^\[.*", done.stdout, re.MULTILINE | re.DOTALL)  # its server may say before that it starts
    if done.returncode or table is None:
        *_, last = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
        raise RunError(last, " ".join(command), hint, "client-failed")
    jobs = [row for row in json.loads(table[0]) if row["job_name"] == name]
    return sorted(jobs, key=lambda row: int(row["job_id"]), reverse=True)


def status(record: JobRecord) -> int:
    name = record.facts["name"]
    rows = query_jobs(name, "--all")
    for row in rows[:1]:
        print(f"job {row['job_id']}: {row['status']}, restarted {row['recovery_count'] or 0} times")
        if row.get("failure_reason"):
            print(f"warning: {row['failure_reason']}")
    if not rows:
        print(f"{name}: SkyPilot has no such job any more")
    return 0


def logs(record: JobRecord, *, follow: bool) -> int:
    return _pass_on(record, "logs", "--follow" if follow else "--no-follow")


def stop(record: JobRecord) -> int:
    """Cancel the job. SkyPilot leaves its processes 30 s to save, and then uploads what they wrote."""
    return _pass_on(record, "cancel", "--yes", "--graceful")


def _pass_on(record: JobRecord, verb: str, *more: str) -> int:
    return call_client("sky", "jobs", verb, *more, "--name", record.facts["name"], show=True).returncode
