"""Run:ai over its API: the same job as a request, and the control plane that takes it."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from windlass.errors import RunError, UserError
from windlass.launch.job import Job, quote
from windlass.launch.runai import cores
from windlass.runfile.machines import Cluster, Secret

URL, TOKEN = "RUNAI_BASE_URL", "RUNAI_TOKEN"
SECONDS = 60  # for one answer
PROJECT_ID, CLUSTER_ID = "PROJECT_ID", "CLUSTER_ID"  # stand where no control plane was asked
HINTS = {
    401: f"{TOKEN} is wrong or has run out: `runai auth get-token` prints a new one",
    403: "the token's owner may not do this in the project: ask who gives out roles in Run:ai",
    404: f"is {URL} the address of Run:ai's user interface, without a path?",
    409: "the name is taken: windlass stop RUN, or give the run another name",
}
OTHERWISE = "the control plane's reply is above; --dry-run writes payload.json to compare"


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """Where Run:ai is, and the right to speak to it. The token stands in no message and no file."""

    url: str
    token: str = field(repr=False)

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        local = parts.hostname in ("localhost", "127.0.0.1", "::1")
        if not parts.hostname or (parts.scheme != "https" and not (parts.scheme == "http" and local)):
            hint = "such as https://company.run.ai: a token is sent there, so nothing but https will do"
            raise UserError(f"{self.url!r} is no address of a control plane", URL, hint)

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """One call. What the server says to a call that it refuses is shown as it is."""
        where = f"{method} {self.url.rstrip('/')}{path.partition('?')[0]}"
        request = urllib.request.Request(
            self.url.rstrip("/") + path,
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.build_opener(_Stay).open(request, timeout=SECONDS) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace").strip() or str(error.reason)
            raise RunError(f"{error.code}: {said}", where, HINTS.get(error.code, OTHERWISE)) from None
        except ValueError:
            raise RunError("the answer is no JSON", where, HINTS[404]) from None
        except (OSError, HTTPException) as error:
            why = getattr(error, "reason", None) or error
            raise RunError(f"no answer: {why}", where, f"is {URL} right, and reachable from here?") from None


class _Stay(urllib.request.HTTPRedirectHandler):
    """A token is for the address it was given for, and for none that this one names."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def control_plane(environ: Mapping[str, str]) -> ControlPlane | None:
    """As the environment says; None where it says nothing. Half of it is a mistake."""
    url, token = environ.get(URL, ""), environ.get(TOKEN, "")
    if bool(url) != bool(token):
        missing, there = (TOKEN, URL) if url else (URL, TOKEN)
        raise UserError(f"{there} is set and {missing} is not", "--api", f"export both, or unset {there}")
    return ControlPlane(url, token) if url else None


def create(job: Job, plane: ControlPlane, where: Callable[[str], str], write: Callable[[str], None]) -> str:
    """Ask for the project, then for the job. `write` keeps the very request. Returns Run:ai's number of the job."""
    project = _project(plane, str(job.cluster.project), where)
    body = payload(job, str(project["id"]), str(project["clusterId"]))
    write(text(body))
    answer = plane.ask("POST", path(job.nodes), body)
    return str(answer.get("workloadId", "")) if isinstance(answer, dict) else ""


def _project(plane: ControlPlane, name: str, where: Callable[[str], str]) -> dict[str, Any]:
    answer = plane.ask("GET", "/api/v1/org-unit/projects?" + urllib.parse.urlencode({"filterBy": f"name=={name}"}))
    projects = answer.get("projects") if isinstance(answer, dict) else None
    found = [one for one in projects or () if one.get("name") == name]
    if len(found) == 1:
        return dict(found[0])
    if found:
        clusters = ", ".join(str(one.get("clusterId")) for one in found)
        hint = "submit with the runai command line, which is on one cluster, or with payload.json by hand"
        raise UserError(f"{name} is a project on several clusters: {clusters}", where("cluster.project"), hint)
    raise UserError(f"Run:ai has no project {name!r} that this token may see", where("cluster.project"), "name another")


def path(nodes: int) -> str:
    return f"/api/v1/workloads/{'distributed' if nodes > 1 else 'trainings'}"


def text(body: Mapping[str, Any]) -> str:
    return json.dumps(body, indent=2, ensure_ascii=False) + "\n"


def payload(job: Job, project_id: str = PROJECT_ID, cluster_id: str = CLUSTER_ID) -> dict[str, Any]:
    """The body of POST /api/v1/workloads/distributed (of …/trainings for one node)."""
    cluster = job.cluster
    spec: dict[str, Any] = {
        "image": cluster.image,
        "command": "bash",
        "args": quote(f"{job.folder}/launch.sh"),
        "workingDir": cluster.working_dir,
        "compute": _compute(job),
        "storage": {"pvc": [_pvc(v.claim, v.path) for v in cluster.volumes]} if cluster.volumes else None,
        "security": _security(cluster),
        "annotations": [{"name": n, "value": v} for n, v in _annotations(cluster).items()] or None,
        "environmentVariables": [_variable(v.name, v.value) for v in job.environment],
        "tolerations": [
            _toleration(f"toleration-{i}", t.key, t.value, t.effect) for i, t in enumerate(cluster.tolerations)
        ]
        or None,
        "backoffLimit": cluster.max_restarts,
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": job.grace_seconds,
        "preemptibility": _preemptibility(cluster),
        "priorityClass": cluster.priority_class,
    }
    body: dict[str, Any] = {"name": job.name, "projectId": project_id, "clusterId": cluster_id}
    if job.nodes > 1:
        spec |= {"numWorkers": job.nodes - 1, "distributedFramework": "PyTorch", "cleanPodPolicy": "Running"}
        body["masterSpecSameAsWorker"] = True
    return body | {"spec": {key: value for key, value in spec.items() if value is not None}}


def _preemptibility(cluster: Cluster) -> str | None:
    if cluster.preemptible is None:
        return None
    return "preemptible" if cluster.preemptible else "non-preemptible"


def _compute(job: Job) -> dict[str, Any]:
    amount = float(cores(job.cpu))
    compute: dict[str, Any] = {
        "cpuCoreRequest": int(amount) if amount.is_integer() else amount,
        "cpuMemoryRequest": job.memory_request,
        "cpuMemoryLimit": job.memory_limit,
        "largeShmRequest": job.cluster.large_shm,
    }
    if job.gpu:
        compute["gpuDevicesRequest"] = job.ranks_per_node
    if job.cluster.extended_resources:
        compute["extendedResources"] = [
            {"resource": name, "quantity": str(count)} for name, count in job.cluster.extended_resources.items()
        ]
    return compute


def _annotations(cluster: Cluster) -> dict[str, str]:
    networks = {"k8s.v1.cni.cncf.io/networks": ",".join(cluster.networks)} if cluster.networks else {}
    return networks | cluster.annotations


def _pvc(claim: str, path: str) -> dict[str, Any]:
    return {"claimName": claim, "path": path, "existingPvc": True}


def _security(cluster: Cluster) -> dict[str, Any] | None:
    if cluster.user is None:
        return None
    ids = {"runAsUid": cluster.user.uid, "runAsGid": cluster.user.gid}
    return {"uidGidSource": "custom"} | {key: value for key, value in ids.items() if value is not None}


def _variable(name: str, value: str | Secret) -> dict[str, Any]:
    if isinstance(value, Secret):
        return {"name": name, "secret": {"name": value.secret, "key": value.key}}
    return {"name": name, "value": value}


def _toleration(name: str, key: str, value: str | None, effect: str | None) -> dict[str, Any]:
    parts = {"value": value, "effect": effect}
    operator = "Exists" if value is None else "Equal"
    return {"name": name, "operator": operator, "key": key} | {k: v for k, v in parts.items() if v is not None}
