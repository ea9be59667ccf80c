"""Run:ai: the command that submits the run, and the same request for its REST API."""

import json
import shlex
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from windlass import __version__
from windlass.errors import Problem, RunError, UserError
from windlass.launch.job import (
    Job,
    JobRecord,
    call_client,
    escape_variables,
    find_pod_problems,
    keep_record,
    parse_cores,
    quote,
    quote_words,
    render_launch_sh,
    to_one_line,
)
from windlass.launch.platforms import openshift
from windlass.runfile.machines import Secret

# Keys that are sent unchanged: key, option of the command line, key in the REST API's body.
PLAIN = (
    ("runai.project", "project", ""),
    ("image", "image", "image"),
    ("working_dir", "working-dir", "workingDir"),
    ("runai.priority_class", "priority", "priorityClass"),
    ("runai.image_pull_policy", "image-pull-policy", "imagePullPolicy"),
)
# Options in the reference of Run:ai 3.0 that are missing in that of 2.18 and its neighbors.
LATER = (
    *("clean-pod-policy", "restart-policy", "master-restart-policy", "termination-grace-period", "preemptibility"),
    *("priority", "env-secret", "secret-volume", "empty-dir-volume"),
    *("master-cpu-core-request", "master-cpu-core-limit", "master-cpu-memory-request", "master-cpu-memory-limit"),
)
# Options that have a separate variant for the master in the command line's reference.
MASTERS = (
    *("gpu-devices-request", "cpu-core-request", "cpu-core-limit", "cpu-memory-request", "cpu-memory-limit"),
    *("extended-resource", "restart-policy"),
)

# Key of a volume -> its option, its list in the REST API's body, and how each names the volume's parts.
VOLUMES = {
    "claim": (*("existing-pvc", "pvc", {"claimname": "name", "path": "path"}), {"claimName": "name", "path": "path"}),
    "config_map": (
        *("configmap-map-volume", "configMapVolume", {"name": "name", "path": "path", "subpath": "subpath"}),
        {"configMap": "name", "mountPath": "path", "subPath": "subpath"},
    ),
    "secret": (
        *("secret-volume", "secretVolume", {"path": "path", "name": "name"}),
        {"secret": "name", "mountPath": "path"},
    ),
    "empty_dir": (
        *("empty-dir-volume", "emptyDirVolume", {"path": "path", "medium": "medium", "size-limit": "name"}),
        {"path": "path", "medium": "medium", "sizeLimit": "name"},
    ),
}

_COMMENT: Final[dict[str, Any]] = {"initial_indent": "#   ", "subsequent_indent": "#   ", "break_on_hyphens": False}

SUBMIT = """\
#!/usr/bin/env bash
# {title}
# Written by windlass {version} from {source}: submits the run to Run:ai. \
launch.sh must be, with {files},
# in {folder} on the volume that the pods mount.
# Run it again with the same run folder to resume from the last checkpoint, once the ended job is deleted:
#   {delete}
# For the command line of Run:ai 3.0, by its reference; older ones may lack
{later}
set -euo pipefail

# Git Bash on Windows would turn /data into C:/Program Files/Git/data; elsewhere nothing reads these.
export MSYS_NO_PATHCONV=1 MSYS2_ARG_CONV_EXCL='*'

options=(
{options}
)
exec {command} "${{options[@]}}" \\
  --command -- {inner}
"""


# For each setting the reason, the option and value of the command line, and its part of the REST API's body; a dot in a
# key leads into a section.
Option = tuple[str, str, str, dict[str, Any]]


def list_options(job: Job) -> Iterator[Option]:
    for key, option, path in PLAIN:
        value = attrgetter(key)(job.cluster)
        if value:
            yield "", option, value, {path: value} if path else {}
    yield from _list_resources(job)
    yield from _list_placement(job)
    yield from _list_lifetime(job)
    yield from _list_variables(job)


def _list_resources(job: Job) -> Iterator[Option]:
    workers = job.nodes - 1
    if workers:
        why = f"{job.nodes} nodes: a master, which has options of its own, and {workers} workers"
        yield why, "workers", str(workers), {"numWorkers": workers, "distributedFramework": "PyTorch"}
        why = "workers that still run when the master has ended are of no use"
        yield why, "clean-pod-policy", "Running", {"cleanPodPolicy": "Running"}
    if job.gpu:
        count = job.ranks_per_node
        yield "of each node", "gpu-devices-request", str(count), {"compute.gpuDevicesRequest": count}
    for kind, amount in (("Request", job.cpu), ("Limit", job.cluster.cpu_limit)):
        if amount:
            cores = parse_cores(amount)
            number = int(cores) if cores.is_integer() else cores
            yield "", f"cpu-core-{kind.lower()}", f"{cores:g}", {f"compute.cpuCore{kind}": number}
    why = "set by the run file" if job.is_script else f"the plan needs {job.memory_gib} GiB with /dev/shm"
    why = f"with units: a bare number would be bytes; {why}"
    yield why, "cpu-memory-request", job.memory_request, {"compute.cpuMemoryRequest": job.memory_request}
    yield "", "cpu-memory-limit", job.memory_limit, {"compute.cpuMemoryLimit": job.memory_limit}
    if job.cluster.large_shm:
        why = "ranks of one node exchange data through /dev/shm"
        yield why, "large-shm", "", {"compute.largeShmRequest": True}
    for volume in job.cluster.volumes:
        (key, name), *_ = volume.sources.items()
        option, section, parts, fields = VOLUMES[key]
        values: dict[str, Any] = {
            "name": name,
            "path": volume.path,
            "subpath": volume.sub_path,
            "medium": volume.medium,
        }
        text = ",".join(f"{word}={values[part]}" for word, part in parts.items() if values[part])
        body: dict[str, Any] = {word: values[part] for word, part in fields.items() if values[part]}
        if key == "claim":
            body["existingPvc"] = True
        yield "", option, text, {f"storage.{section}": [body]}


def _list_placement(job: Job) -> Iterator[Option]:
    """Yield what the pods are called and where they run: labels, node pools, devices, user."""
    section = job.cluster.runai
    networks = {"k8s.v1.cni.cncf.io/networks": ",".join(section.networks)} if section.networks else {}
    for name, value in {**networks, **section.annotations}.items():
        why = "a second network card in each pod" if name in networks else ""
        yield why, "annotation", f"{name}={value}", {"annotations": [{"name": name, "value": value}]}
    for name, value in section.labels.items():
        yield "", "label", f"{name}={value}", {"labels": [{"name": name, "value": value}]}
    for pool in section.node_pools:
        yield "", "node-pools", pool, {"nodePools": [pool]}
    if section.topology_key:
        option = f"{section.topology}-pod-topology-key"
        affinity = {"type": section.topology.capitalize(), "key": section.topology_key}
        yield "nodes that share the label's value", option, section.topology_key, {"podAffinity": affinity}
    for name, count in section.extended_resources.items():
        device = {"resource": name, "quantity": str(count)}
        yield "", "extended-resource", f"{name}={count}", {"compute.extendedResources": [device]}
    for index, toleration in enumerate(section.tolerations):
        operator = "Exists" if toleration.value is None else "Equal"
        parts = {"operator": operator, **toleration.model_dump(exclude_none=True)}
        text = ",".join(f"{key}={value}" for key, value in parts.items())
        yield "", "toleration", text, {"tolerations": [{"name": f"toleration-{index}", **parts}]}
    user = section.user
    if user is not None:
        body = {"security.uidGidSource": "custom", "security.runAsUid": user.uid}
        yield "set by cluster.runai.user", "run-as-uid", str(user.uid), body
        if user.gid is not None:
            yield "", "run-as-gid", str(user.gid), {"security.runAsGid": user.gid}
    groups = ",".join(map(str, section.supplemental_groups))
    if groups:
        yield "", "supplemental-groups", groups, {"security.supplementalGroups": groups}


def _list_lifetime(job: Job) -> Iterator[Option]:
    """Yield when the job ends, is started again, and is deleted."""
    section = job.cluster.runai
    seconds = section.ttl_seconds
    if seconds is not None:
        body: dict[str, Any] = {"autoDeletionTimeAfterCompletionSeconds": seconds}
        yield "deleted this long after its end", "auto-deletion-time-after-completion", f"{seconds}s", body
    why = f"to end a step and save after a stop signal; {job.grace_reason}"
    grace = job.grace_seconds
    yield why, "termination-grace-period", f"{grace}s", {"terminationGracePeriodSeconds": grace}
    limit = job.cluster.max_restarts
    why = "a run that was lost is started again, and resumes from its newest checkpoint"
    if job.nodes > 1:
        why = f"{limit} restarts of the run are {limit * job.nodes} of pods, which are counted"
        limit = job.pod_restarts
    yield why, "backoff-limit", str(limit), {"backoffLimit": limit}
    yield "", "restart-policy", "OnFailure", {"restartPolicy": "OnFailure"}
    if section.preemptible is not None:
        kind = "preemptible" if section.preemptible else "non-preemptible"
        yield "", "preemptibility", kind, {"preemptibility": kind}


def _list_variables(job: Job) -> Iterator[Option]:
    for variable in job.environment:
        name = variable.name
        content = variable.value
        body: dict[str, Any]
        if isinstance(content, Secret):
            body = {"name": name, "secret": {"name": content.secret, "key": content.key}}
            text = f"{name}={content.secret},key={content.key}"
            yield variable.reason, "env-secret", text, {"environmentVariables": [body]}
        else:
            text = escape_variables(content)  # it becomes part of a pod's env
            body = {"name": name, "value": text}
            # -e works in old and new clients
            yield variable.reason, "e", f"{name}={text}", {"environmentVariables": [body]}


def list_flags(job: Job) -> Iterator[tuple[str, list[str]]]:
    """Yield each setting's reason and its words of the command line."""
    for why, option, value, _ in list_options(job):
        names = [option, f"master-{option}"] if job.nodes > 1 and option in MASTERS else [option]
        yield why, [word for name in names for word in (f"{'--' if name[1:] else '-'}{name}", value) if word]


def client_command(name: str, nodes: int, project: str | None, verb: str, *more: str) -> list[str]:
    """Return a command of Run:ai's client. One node needs no operator: `--workers` 0 is not defined."""
    kind = "pytorch" if nodes > 1 else "standard"
    return ["runai", "training", kind, verb, name, *(["--project", project] if project else []), *more]


def container_command(job: Job) -> list[str]:
    return ["bash", f"{job.folder}/launch.sh"]


def submit_command(job: Job) -> list[str]:
    words = [word for _, flag in list_flags(job) for word in flag]
    return [*client_command(job.name, job.nodes, None, "submit"), *words, "--command", "--", *container_command(job)]


def render_submit_sh(job: Job) -> str:
    lines = []
    used = {word for _, flag in list_flags(job) for word in flag}
    for why, flag in list_flags(job):
        lines += [f"  # {to_one_line(why)}"] if why else []
        lines.append(f"  {quote_words(flag)}")
    return SUBMIT.format(
        title=job.title,
        version=__version__,
        source=to_one_line(job.source),
        folder=to_one_line(job.folder),
        files=" and ".join(job.files),
        later=textwrap.fill(" ".join(f"--{name}" for name in LATER if f"--{name}" in used), 118, **_COMMENT),
        delete=to_one_line(quote_words(client_command(job.name, job.nodes, job.cluster.runai.project, "delete"))),
        options="\n".join(lines),
        command=quote_words(client_command(job.name, job.nodes, None, "submit")),
        inner=quote_words(container_command(job)),
    )


def make_payload(job: Job) -> dict[str, Any]:
    """Return the body of POST /api/v1/workloads/distributed (…/trainings for one node), with placeholders for IDs."""
    program, script = container_command(job)
    spec: dict[str, Any] = {"command": program, "args": quote(script)}
    for *_, body in list_options(job):
        for path, value in body.items():
            section, _, key = path.rpartition(".")
            into = spec.setdefault(section, {}) if section else spec
            into[key] = [*into.get(key, []), *value] if isinstance(value, list) else value
    master = {"masterSpecSameAsWorker": True} if job.nodes > 1 else {}
    return {"name": job.name, "projectId": "PROJECT_ID", "clusterId": "CLUSTER_ID", **master, "spec": spec}


def review(job: Job) -> Iterator[Problem | str]:
    cluster = job.cluster
    yield from find_pod_problems(job)
    if not cluster.runai.project:
        hint = "set cluster.runai.project: without it the job goes to whatever project was used last"
        yield Problem("no Run:ai project", job.where("cluster.runai.project"), hint, "no-project")
    for index, volume in enumerate(cluster.volumes):
        if volume.read_only or (volume.sub_path and not volume.config_map):
            where = job.where(f"cluster.volumes[{index}]")
            hint = "mount the whole volume, read and write"
            what = "Run:ai's command line mounts no part of a volume, and none read-only"
            yield Problem(what, where, hint, "not-on-platform")
    yield from openshift.find_scc_problems(job, "runai")
    if cluster.deadline_seconds:
        yield "cluster.deadline_seconds has no effect on Run:ai: the project's policy has time limits"


def files(job: Job) -> dict[str, str]:
    body = json.dumps(make_payload(job), indent=2, ensure_ascii=False) + "\n"
    scripts = {"launch.sh": render_launch_sh(job, exports=False), "submit.sh": render_submit_sh(job)}
    return {**scripts, **job.files, "payload.json": body}


def require_free(job: Job, folder: Path) -> None:
    """Refuse to submit what Run:ai has, ended or not: it takes no name twice, and pods that are started again read the
    files of the run folder again."""
    if folder != Path(job.folder):
        return  # nothing is submitted, and nothing runs from there
    command = ("runai", "training", "list", "--project", str(job.cluster.runai.project), "--no-headers")
    done = call_client(*command, hint="ask Run:ai again later")
    if done.returncode:
        text = done.stderr.strip() or f"runai ended with {done.returncode}"
        raise RunError(text, " ".join(command), "not logged in: runai login", "client-failed")
    if job.name in (line.split()[0] for line in done.stdout.splitlines() if line.strip()):
        hint = "`windlass status RUN`; `windlass stop RUN` deletes it; or another name"
        what = f"Run:ai has a job {job.name} already, in project {job.cluster.runai.project}"
        raise UserError(what, job.where("name"), hint, "already-running")


def start(job: Job, folder: Path, say: Callable[[str], None]) -> bool:
    by_hand = f"bash {shlex.quote(str(folder / 'submit.sh'))}"
    if folder != Path(job.folder):
        there = f"copy {', '.join(('launch.sh', *job.files))} there"
        say(f"{job.folder} is not here: {there}, onto the pods' volume; then: {by_hand}")
        return False
    if code := subprocess.run(submit_command(job), check=False).returncode:
        hint = "is the name taken, by another kind of workload? The options come from `cluster` in the run file"
        raise RunError(f"runai ended with {code}: its own message is above", by_hand, hint, "client-failed")
    keep_record(job, "runai", folder, project=job.cluster.runai.project)
    return True


def status(record: JobRecord) -> int:
    return _pass_on(record, "describe")


def logs(record: JobRecord, *, follow: bool) -> int:
    return _pass_on(record, "logs", *(["--follow"] if follow else []))


def stop(record: JobRecord) -> int:
    return _pass_on(record, "delete")


def _pass_on(record: JobRecord, verb: str, *more: str) -> int:
    facts = record.facts
    words = client_command(facts["name"], facts["nodes"], facts["project"], verb, *more)
    return call_client(*words, show=True).returncode
