"""Run:ai: the one command that submits the run, and the same as a request to its REST API."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from windlass import __version__
from windlass.errors import Problem, RunError, UserError
from windlass.launch.job import Job, Record, ignored_keys, keep_record, one_line, pod_problems, quote, words
from windlass.launch.script import launch_sh
from windlass.runfile.machines import Secret

# What Run:ai's command line has no option for, and what does it there.
IGNORED = {
    "namespace": "the project has its own",
    "queue": "the project is the queue",
    "service_account": "the project's is used",
    "image_pull_secrets": "register the credential in Run:ai",
    "node_selector": "use the project's node pools",
    "affinity": "use the project's node pools",
    "topology_key": "set it on the node pool",
    "deadline_seconds": "the project's policy has time limits",
    "gpu_resource": "Run:ai counts GPUs in its own way, and the project's node pools decide the kind",
}
# A key of `cluster` that is sent as it is, its option on the command line, its key in the REST API's body.
PLAIN = (
    ("project", "project", ""),
    ("image", "image", "image"),
    ("working_dir", "working-dir", "workingDir"),
    ("priority_class", "priority", "priorityClass"),
)
# The command line's reference gives the master options of its own for these: it gets what the workers get.
MASTERS = (
    *("gpu-devices-request", "cpu-core-request", "cpu-memory-request", "cpu-memory-limit"),
    *("extended-resource", "restart-policy"),
)

SUBMIT = """\
#!/usr/bin/env bash
# {title}
# Written by windlass {version} from {source}: submits the run to Run:ai. \
launch.sh must be, with {files},
# in {folder} on the volume that the pods mount.
# Run it again with the same run folder to resume from the last checkpoint, once the ended job is deleted:
#   {delete}
set -euo pipefail

# Git Bash on Windows would turn /data into C:/Program Files/Git/data; elsewhere nothing reads these.
export MSYS_NO_PATHCONV=1 MSYS2_ARG_CONV_EXCL='*'

options=(
{options}
)
exec {command} "${{options[@]}}" \\
  --command -- {inner}
"""


def options(job: Job) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Rows: why it is set, option of the command line and its value, its part of the REST API's body, where a dot leads
    into a section."""
    cluster, workers = job.cluster, job.nodes - 1
    for key, option, path in PLAIN:
        if value := getattr(cluster, key):
            yield "", option, value, {path: value} if path else {}
    if workers:
        why = f"{job.nodes} nodes: a master, which has options of its own, and {workers} workers"
        yield why, "workers", str(workers), {"numWorkers": workers, "distributedFramework": "PyTorch"}
        why = "workers that still run when the master has ended are of no use"
        yield why, "clean-pod-policy", "Running", {"cleanPodPolicy": "Running"}
    if job.gpu:
        count = job.ranks_per_node
        yield "of each node", "gpu-devices-request", str(count), {"compute.gpuDevicesRequest": count}
    cores = int(job.cpu[:-1]) / 1000 if job.cpu.endswith("m") else float(job.cpu)  # plain numbers: 500m is 0.5
    number = int(cores) if cores.is_integer() else cores
    yield "", "cpu-core-request", f"{cores:g}", {"compute.cpuCoreRequest": number}
    why = "set by the run file" if job.is_script else f"the plan needs {job.memory_gib} GiB with /dev/shm"
    why = f"with units: a bare number would be bytes; {why}"
    yield why, "cpu-memory-request", job.memory_request, {"compute.cpuMemoryRequest": job.memory_request}
    yield "", "cpu-memory-limit", job.memory_limit, {"compute.cpuMemoryLimit": job.memory_limit}
    if cluster.large_shm:
        why = "ranks of one node exchange data through /dev/shm"
        yield why, "large-shm", "", {"compute.largeShmRequest": True}
    for volume in cluster.volumes:
        body: dict[str, Any] = {"claimName": volume.claim, "path": volume.path, "existingPvc": True}
        yield "", "existing-pvc", f"claimname={volume.claim},path={volume.path}", {"storage.pvc": [body]}
    networks = {"k8s.v1.cni.cncf.io/networks": ",".join(cluster.networks)} if cluster.networks else {}
    for name, value in {**networks, **cluster.annotations}.items():
        why = "a second network card in each pod" if name in networks else ""
        yield why, "annotation", f"{name}={value}", {"annotations": [{"name": name, "value": value}]}
    for name, amount in cluster.extended_resources.items():
        body = {"resource": name, "quantity": str(amount)}
        yield "", "extended-resource", f"{name}={amount}", {"compute.extendedResources": [body]}
    for index, one in enumerate(cluster.tolerations):
        parts = {"operator": "Exists" if one.value is None else "Equal", **one.model_dump(exclude_none=True)}
        text = ",".join(f"{key}={value}" for key, value in parts.items())
        yield "", "toleration", text, {"tolerations": [{"name": f"toleration-{index}", **parts}]}
    if cluster.user is not None:
        uid, gid = cluster.user.uid, cluster.user.gid
        body = {"security.uidGidSource": "custom", "security.runAsUid": uid}
        yield "set by cluster.user", "run-as-uid", str(uid), body
        if gid is not None:
            yield "", "run-as-gid", str(gid), {"security.runAsGid": gid}
    why, seconds = f"to end a step and save after a stop signal; {job.grace_reason}", job.grace_seconds
    yield why, "termination-grace-period", f"{seconds}s", {"terminationGracePeriodSeconds": seconds}
    why, limit = "a run that was lost is started again, and resumes from its newest checkpoint", cluster.max_restarts
    if workers:
        why, limit = f"{limit} restarts of the run are {limit * job.nodes} of pods, which are counted", job.pod_restarts
    yield why, "backoff-limit", str(limit), {"backoffLimit": limit}
    yield "", "restart-policy", "OnFailure", {"restartPolicy": "OnFailure"}
    if cluster.preemptible is not None:
        kind = "preemptible" if cluster.preemptible else "non-preemptible"
        yield "", "preemptibility", kind, {"preemptibility": kind}
    for variable in job.environment:
        name, content = variable.name, variable.value
        if isinstance(content, Secret):
            body = {"name": name, "secret": {"name": content.secret, "key": content.key}}
            text = f"{name}={content.secret},key={content.key}"
            yield variable.reason, "env-secret", text, {"environmentVariables": [body]}
        else:
            body = {"name": name, "value": content}
            # -e: in old and new clients
            yield variable.reason, "e", f"{name}={content}", {"environmentVariables": [body]}


def flags(job: Job) -> Iterator[tuple[str, list[str]]]:
    """Why, and words of the command line."""
    for why, option, value, _ in options(job):
        names = [option, f"master-{option}"] if job.nodes > 1 and option in MASTERS else [option]
        yield why, [word for name in names for word in (f"{'--' if name[1:] else '-'}{name}", value) if word]


def client(name: str, nodes: int, project: str | None, verb: str, *more: str) -> list[str]:
    """One node needs no operator: `--workers` 0 is not defined."""
    kind = "pytorch" if nodes > 1 else "standard"
    return ["runai", "training", kind, verb, name, *(["--project", project] if project else []), *more]


def inner(job: Job) -> list[str]:
    return ["bash", f"{job.folder}/launch.sh"]


def command(job: Job) -> list[str]:
    """What submits the run, word by word."""
    words = [word for _, flag in flags(job) for word in flag]
    return [*client(job.name, job.nodes, None, "submit"), *words, "--command", "--", *inner(job)]


def submit_sh(job: Job) -> str:
    lines = []
    for why, flag in flags(job):
        lines += [f"  # {one_line(why)}"] if why else []
        lines.append(f"  {words(flag)}")
    return SUBMIT.format(
        title=job.title,
        version=__version__,
        source=one_line(job.source),
        folder=one_line(job.folder),
        files=" and ".join(job.files),
        delete=one_line(words(client(job.name, job.nodes, job.cluster.project, "delete"))),
        options="\n".join(lines),
        command=words(client(job.name, job.nodes, None, "submit")),
        inner=words(inner(job)),
    )


def payload(job: Job) -> dict[str, Any]:
    """The body of POST /api/v1/workloads/distributed (of …/trainings for one node), the IDs left to be filled in."""
    program, script = inner(job)
    spec: dict[str, Any] = {"command": program, "args": quote(script)}
    for *_, body in options(job):
        for path, value in body.items():
            section, _, key = path.rpartition(".")
            into = spec.setdefault(section, {}) if section else spec
            into[key] = [*into.get(key, []), *value] if isinstance(value, list) else value
    master = {"masterSpecSameAsWorker": True} if job.nodes > 1 else {}
    return {"name": job.name, "projectId": "PROJECT_ID", "clusterId": "CLUSTER_ID", **master, "spec": spec}


def review(job: Job) -> Iterator[Problem | str]:
    cluster = job.cluster
    yield from pod_problems(job)
    if not cluster.project:
        hint = "set cluster.project: without it the job goes to whatever project was used last"
        yield Problem("no Run:ai project", job.where("cluster.project"), hint)
    yield from ignored_keys(cluster, IGNORED, "Run:ai")


def files(job: Job) -> dict[str, str]:
    body = json.dumps(payload(job), indent=2, ensure_ascii=False) + "\n"
    scripts = {"launch.sh": launch_sh(job, exports=False), "submit.sh": submit_sh(job)}
    return {**scripts, **job.files, "payload.json": body}


def start(job: Job, folder: Path, say: Callable[[str], None]) -> bool:
    by_hand = f"bash {folder / 'submit.sh'}"
    if folder != Path(job.folder):
        there = f"copy {', '.join(('launch.sh', *job.files))} there"
        say(f"{job.folder} is not here: {there}, onto the pods' volume; then: {by_hand}")
        return False
    if shutil.which("runai") is None:
        say(f"runai is not installed here; on a machine that has it: {by_hand}")
        return False
    if code := subprocess.run(command(job), check=False).returncode:
        hint = "not logged in: runai login; the name is taken: windlass stop RUN, or another name"
        raise RunError(f"runai ended with {code}: its own message is above", by_hand, hint)
    keep_record(job, "runai", folder)
    return True


def status(record: Record) -> int:
    return _pass_on(record, "describe")


def logs(record: Record, *, follow: bool) -> int:
    return _pass_on(record, "logs", *(["--follow"] if follow else []))


def stop(record: Record) -> int:
    return _pass_on(record, "delete")


def _pass_on(record: Record, verb: str, *more: str) -> int:
    facts = record.facts
    try:
        words = client(facts["name"], facts["nodes"], facts["project"], verb, *more)
        return subprocess.run(words, check=False).returncode
    except OSError as error:
        raise UserError(f"runai can't be run: {error.strerror}", "PATH", "install it") from None
