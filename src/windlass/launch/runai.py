"""Run:ai: the one command that submits the run, or the same as a request to its REST API."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from windlass import __version__
from windlass.errors import Problem, RunError, UserError
from windlass.launch.job import (
    Job,
    Record,
    Submission,
    ignored_keys,
    one_line,
    pod_problems,
    quote,
    words,
    write_files,
)
from windlass.launch.script import launch_sh
from windlass.runfile.machines import Secret

PRIORITIES = ("very-low", "low", "medium-low", "medium", "medium-high", "high", "very-high")
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
URL, TOKEN = "RUNAI_BASE_URL", "RUNAI_TOKEN"
SECONDS = 60  # for one answer
PROJECT_ID, CLUSTER_ID = "PROJECT_ID", "CLUSTER_ID"  # placeholders if no control plane was asked
STATUS_HINTS = {
    401: f"{TOKEN} is wrong or has expired: `runai auth get-token` prints a new one",
    403: "the token's owner may not do this in the project: ask who assigns roles in Run:ai",
    404: f"is {URL} the address of Run:ai's user interface, without a path?",
    409: "the name is taken: windlass stop RUN, or give the run another name",
}

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


@dataclass(frozen=True, slots=True)
class Setting:
    """One property of the job: why it is set, its options on the command line, its part of the API's body."""

    why: str
    options: list[str]
    body: dict[str, Any] = field(default_factory=dict)


def settings(job: Job) -> Iterator[Setting]:
    cluster = job.cluster

    def each(option: str, value: str) -> list[str]:
        """For the workers, and for the master, which the command line's reference gives options of its own."""
        return [f"--{option}", value, *([f"--master-{option}", value] if job.nodes > 1 else [])]

    if cluster.project:
        yield Setting("", ["--project", cluster.project])
    if cluster.image:
        yield Setting("", ["--image", cluster.image], {"image": cluster.image})
    if job.nodes > 1:
        why = f"{job.nodes} nodes: a master, which has options of its own, and {job.nodes - 1} workers"
        body: dict[str, Any] = {"numWorkers": job.nodes - 1, "distributedFramework": "PyTorch"}
        yield Setting(why, ["--workers", str(job.nodes - 1)], body)
    if job.gpu:
        count = job.ranks_per_node
        body = {"compute": {"gpuDevicesRequest": count}}
        yield Setting("of each node", each("gpu-devices-request", str(count)), body)
    cores = f"{int(job.cpu[:-1]) / 1000:g}" if job.cpu.endswith("m") else job.cpu  # plain numbers: 500m is 0.5
    number = int(float(cores)) if float(cores).is_integer() else float(cores)
    yield Setting("", each("cpu-core-request", cores), {"compute": {"cpuCoreRequest": number}})
    why = f"The plan needs {job.memory_gib} GiB with /dev/shm"
    yield Setting(
        f"with units: a bare number would be bytes. {'Set by the run file' if job.is_script else why}",
        [*each("cpu-memory-request", job.memory_request), *each("cpu-memory-limit", job.memory_limit)],
        {"compute": {"cpuMemoryRequest": job.memory_request, "cpuMemoryLimit": job.memory_limit}},
    )
    shm = ["--large-shm"] if cluster.large_shm else []
    body = {"compute": {"largeShmRequest": cluster.large_shm}}
    yield Setting("ranks of one node exchange data through /dev/shm", shm, body)
    for volume in cluster.volumes:
        body = {"storage": {"pvc": [{"claimName": volume.claim, "path": volume.path, "existingPvc": True}]}}
        yield Setting("", ["--existing-pvc", f"claimname={volume.claim},path={volume.path}"], body)
    networks = {"k8s.v1.cni.cncf.io/networks": ",".join(cluster.networks)} if cluster.networks else {}
    for name, value in {**networks, **cluster.annotations}.items():
        why = "a second network card in each pod" if name in networks else ""
        yield Setting(why, ["--annotation", f"{name}={value}"], {"annotations": [{"name": name, "value": value}]})
    for name, amount in cluster.extended_resources.items():
        body = {"compute": {"extendedResources": [{"resource": name, "quantity": str(amount)}]}}
        yield Setting("", each("extended-resource", f"{name}={amount}"), body)
    for index, one in enumerate(cluster.tolerations):
        parts = {"operator": "Exists" if one.value is None else "Equal", "key": one.key, "value": one.value}
        parts = {key: value for key, value in {**parts, "effect": one.effect}.items() if value is not None}
        options = ["--toleration", ",".join(f"{key}={value}" for key, value in parts.items())]
        yield Setting("", options, {"tolerations": [{"name": f"toleration-{index}", **parts}]})
    if cluster.user is not None:
        body = {"security": {"uidGidSource": "custom", "runAsUid": cluster.user.uid}}
        yield Setting("set by cluster.user", ["--run-as-uid", str(cluster.user.uid)], body)
        if cluster.user.gid is not None:
            yield Setting("", ["--run-as-gid", str(cluster.user.gid)], {"security": {"runAsGid": cluster.user.gid}})
    if cluster.working_dir:
        yield Setting("", ["--working-dir", cluster.working_dir], {"workingDir": cluster.working_dir})
    yield Setting(
        f"to end a step and save after a stop signal; {job.grace_reason}",
        ["--termination-grace-period", f"{job.grace_seconds}s"],
        {"terminationGracePeriodSeconds": job.grace_seconds},
    )
    yield Setting(
        "a run that was lost is started again, and resumes from its newest checkpoint",
        ["--backoff-limit", str(cluster.max_restarts), *each("restart-policy", "OnFailure")],
        {"backoffLimit": cluster.max_restarts, "restartPolicy": "OnFailure"},
    )
    if job.nodes > 1:
        why = "workers that still run when the master has ended are of no use"
        yield Setting(why, ["--clean-pod-policy", "Running"], {"cleanPodPolicy": "Running"})
    if cluster.preemptible is not None:
        kind = "preemptible" if cluster.preemptible else "non-preemptible"
        yield Setting("", ["--preemptibility", kind], {"preemptibility": kind})
    if cluster.priority_class:
        yield Setting("", ["--priority", cluster.priority_class], {"priorityClass": cluster.priority_class})
    for variable in job.environment:
        name, content = variable.name, variable.value
        if isinstance(content, Secret):
            options = ["--env-secret", f"{name}={content.secret},key={content.key}"]
            body = {"name": name, "secret": {"name": content.secret, "key": content.key}}
        else:
            options, body = ["-e", f"{name}={content}"], {"name": name, "value": content}  # -e: in old and new clients
        yield Setting(variable.reason, options, {"environmentVariables": [body]})


# --- the command line -------------------------------------------------------------------------------------------------


def client(name: str, nodes: int, project: str | None, verb: str, *more: str) -> list[str]:
    """One node needs no operator: `--workers` 0 is not defined."""
    kind = "pytorch" if nodes > 1 else "standard"
    return ["runai", "training", kind, verb, name, *(["--project", project] if project else []), *more]


def command(job: Job) -> list[str]:
    """What submits the run, word by word."""
    options = [word for setting in settings(job) for word in setting.options]
    return [*client(job.name, job.nodes, None, "submit"), *options, "--command", "--", *inner(job)]


def inner(job: Job) -> list[str]:
    return ["bash", f"{job.folder}/launch.sh"]


def submit_sh(job: Job) -> str:
    lines = []
    for setting in settings(job):
        if setting.options:
            lines += [f"  # {one_line(setting.why)}"] if setting.why else []
            lines.append(f"  {words(setting.options)}")
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


# --- the REST API -----------------------------------------------------------------------------------------------------


def payload(job: Job, project_id: str = PROJECT_ID, cluster_id: str = CLUSTER_ID) -> dict[str, Any]:
    """The body of POST /api/v1/workloads/distributed (of …/trainings for one node)."""
    program, script = inner(job)
    spec: dict[str, Any] = {"command": program, "args": quote(script)}
    for setting in settings(job):
        merge(spec, setting.body)
    master = {"masterSpecSameAsWorker": True} if job.nodes > 1 else {}
    return {"name": job.name, "projectId": project_id, "clusterId": cluster_id, **master, "spec": spec}


def merge(into: dict[str, Any], part: Mapping[str, Any]) -> None:
    for key, value in part.items():
        if isinstance(value, dict):
            merge(into.setdefault(key, {}), value)
        elif isinstance(value, list):
            into.setdefault(key, []).extend(value)
        else:
            into[key] = value


def payload_text(body: Mapping[str, Any]) -> str:
    return json.dumps(body, indent=2, ensure_ascii=False) + "\n"


def api_path(nodes: int) -> str:
    return f"/api/v1/workloads/{'distributed' if nodes > 1 else 'trainings'}"


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """Where Run:ai is, and the right to use it. The token is in no message and no file."""

    url: str
    token: str = field(repr=False)

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        local = parts.hostname in ("localhost", "127.0.0.1", "::1")
        if not parts.hostname or (parts.scheme != "https" and not (parts.scheme == "http" and local)):
            hint = "such as https://company.run.ai: a token is sent there, so it must be https"
            raise UserError(f"{self.url!r} is no address of a control plane", URL, hint)

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """One call. What the server replies to a call that it refuses is shown as it is."""
        import urllib.error  # heavy, and needed only here
        import urllib.request
        from http.client import HTTPException

        class NoRedirect(urllib.request.HTTPRedirectHandler):
            """A token is for the address it was given for, and for none that this one names."""

            def redirect_request(self, *_: Any, **__: Any) -> None:
                return None

        where = f"{method} {self.url.rstrip('/')}{path.partition('?')[0]}"
        request = urllib.request.Request(
            self.url.rstrip("/") + path,
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.build_opener(NoRedirect).open(request, timeout=SECONDS) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            reply = error.read().decode(errors="replace").strip() or str(error.reason)
            hint = STATUS_HINTS.get(error.code, "the control plane's reply is above; --dry-run writes payload.json")
            raise RunError(f"{error.code}: {reply}", where, hint) from None
        except ValueError:
            raise RunError("the answer is no JSON", where, STATUS_HINTS[404]) from None
        except (OSError, HTTPException) as error:
            why = getattr(error, "reason", None) or error
            raise RunError(f"no answer: {why}", where, f"is {URL} right, and reachable from here?") from None

    def project(self, name: str, where: str) -> dict[str, Any]:
        answer = self.ask("GET", "/api/v1/org-unit/projects?" + urllib.parse.urlencode({"filterBy": f"name=={name}"}))
        projects = answer.get("projects") if isinstance(answer, dict) else None
        found = [one for one in projects or () if one.get("name") == name]
        if len(found) > 1:
            clusters = ", ".join(str(one.get("clusterId")) for one in found)
            hint = "submit with the runai command line, which uses one cluster, or send payload.json yourself"
            raise UserError(f"{name} is a project on several clusters: {clusters}", where, hint)
        if not found:
            raise UserError(f"Run:ai has no project {name!r} that this token may see", where, "name another")
        return dict(found[0])


def control_plane(environ: Mapping[str, str]) -> ControlPlane | None:
    """From the environment; None if nothing is set. Half of it is a mistake."""
    url, token = environ.get(URL, ""), environ.get(TOKEN, "")
    if bool(url) != bool(token):
        missing, there = (TOKEN, URL) if url else (URL, TOKEN)
        raise UserError(f"{there} is set and {missing} is not", "--api", f"export both, or unset {there}")
    return ControlPlane(url, token) if url else None


# --- the platform -----------------------------------------------------------------------------------------------------


def problems(submission: Submission) -> Iterator[Problem]:
    cluster, where = submission.job.cluster, submission.where
    yield from pod_problems(submission.plan, submission.job)
    if not cluster.project:
        hint = "set cluster.project: without it the job goes to whatever project was used last"
        yield Problem("no Run:ai project", where("cluster.project"), hint)
    for index, volume in enumerate(cluster.volumes):
        if "," in volume.path:
            what = f"{volume.path} holds a comma, which ends a value in Run:ai's options"
            yield Problem(what, where(f"cluster.volumes[{index}].path"), "mount it elsewhere")
    if cluster.priority_class and cluster.priority_class not in PRIORITIES:
        hint = f"one of {', '.join(PRIORITIES)}"
        yield Problem(f"{cluster.priority_class!r} is no priority of Run:ai", where("cluster.priority_class"), hint)


def notes(submission: Submission) -> Iterator[str]:
    yield from ignored_keys(submission.job.cluster, IGNORED, "Run:ai")


def files(submission: Submission) -> dict[str, str]:
    job = submission.job
    made = {"launch.sh": launch_sh(job, exports=False), **job.files, "submit.sh": submit_sh(job)}
    return {**made, "payload.json": payload_text(payload(job))} if submission.api else made


def start(submission: Submission) -> bool:
    job, say = submission.job, submission.say
    if not submission.api:
        by_hand = f"bash {submission.folder / 'submit.sh'}"
        if not submission.is_in_place(by_hand):
            return False
        if shutil.which("runai") is None:
            say(f"runai is not installed here; on a machine that has it: {by_hand}")
            return False
        if code := subprocess.run(command(job), check=False).returncode:
            hint = "not logged in: runai login; the name is taken: windlass stop RUN, or another name"
            raise RunError(f"runai ended with {code}: its own message is above", by_hand, hint)
        submission.keep_record()
        return True
    plane, path = submission.control_plane, api_path(job.nodes)
    if plane is None:
        file = submission.folder / "payload.json"
        say(f"{URL} and {TOKEN} are not set: export them and submit again; or fill {PROJECT_ID} and {CLUSTER_ID} in")
        say(f"{file}, and POST it to {path}")
        return False
    if not submission.is_in_place("submit again where that folder is"):
        return False
    project = plane.project(str(job.cluster.project), submission.where("cluster.project"))
    body = payload(job, str(project["id"]), str(project["clusterId"]))
    write_files(submission.folder, {"payload.json": payload_text(body)})  # the very request
    answer = plane.ask("POST", path, body)
    number = str(answer.get("workloadId", "")) if isinstance(answer, dict) else ""
    say(f"{job.name} is created{f', workload {number}' if number else ''}")
    submission.keep_record(workload=number)
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
