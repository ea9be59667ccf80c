"""The pod that every engine starts once per node."""

from __future__ import annotations

import hashlib
from typing import Any

from windlass.launch.job import Job
from windlass.launch.kubernetes.write import Note
from windlass.launch.script import launch_sh, one_line
from windlass.runfile.machines import Secret, Toleration

FILES = "/etc/windlass"  # where run.yaml, launch.sh and accelerate.yaml are mounted
NETWORKS = "k8s.v1.cni.cncf.io/networks"
QUEUE = "kueue.x-k8s.io/queue-name"
TOPOLOGY = "kueue.x-k8s.io/podset-required-topology"
RUN_LABEL = "app.kubernetes.io/instance"


def labels(job: Job, *, queue: bool = False) -> dict[str, Any]:
    """`queue`: of the object that is queued, not of its pods."""
    found: dict[str, Any] = {RUN_LABEL: job.name, "app.kubernetes.io/managed-by": "windlass"}
    if queue and job.cluster.queue:
        found[QUEUE] = Note(job.cluster.queue, "Kueue starts all nodes of the run together, or none")
    return found


def metadata(job: Job, name: str | None = None, *, queue: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name or job.name}
    if job.cluster.namespace:
        found["namespace"] = job.cluster.namespace
    return found | {"labels": labels(job, queue=queue)}


def files_name(job: Job) -> str:
    """Named by what is in it, to the letter: a ConfigMap that a running job has is never another's."""
    text = "\0".join(word for file in files(job).items() for word in file)
    return f"{job.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def files(job: Job) -> dict[str, str]:
    return {"run.yaml": job.run_text, **job.accelerate_file, "launch.sh": launch_sh(job, exports=False)}


def config_map(job: Job) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, files_name(job)),
        "immutable": True,
        "data": files(job),
    }


def template(job: Job, container: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """metadata and spec of the pods; `env` is what the engine does not set by itself."""
    return {"metadata": pod_metadata(job), "spec": spec(job, container, env)}


def pod_metadata(job: Job) -> dict[str, Any]:
    cluster = job.cluster
    annotations: dict[str, Any] = {}
    if cluster.networks:
        annotations[NETWORKS] = Note(",".join(cluster.networks), "a second network card in each pod, usually net1")
    if cluster.topology_key and cluster.queue:
        annotations[TOPOLOGY] = Note(cluster.topology_key, "all nodes within one such domain")
    annotations |= cluster.annotations
    return {"labels": labels(job)} | ({"annotations": annotations} if annotations else {})


def spec(job: Job, container: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    cluster = job.cluster
    found: dict[str, Any] = {
        "terminationGracePeriodSeconds": Note(
            job.grace_seconds, f"to end a step and save after a stop signal; {job.grace_reason}"
        ),
        "securityContext": security(job),
    }
    if cluster.service_account:
        found["serviceAccountName"] = cluster.service_account
    else:
        found["automountServiceAccountToken"] = Note(False, "training asks the cluster for nothing")
    if cluster.image_pull_secrets:
        found["imagePullSecrets"] = [{"name": name} for name in cluster.image_pull_secrets]
    if cluster.priority_class:
        found["priorityClassName"] = cluster.priority_class
    if cluster.node_selector:
        found["nodeSelector"] = dict(cluster.node_selector)
    if affinity(job):
        found["affinity"] = affinity(job)
    if cluster.tolerations:
        found["tolerations"] = [toleration(one) for one in cluster.tolerations]
    found["containers"] = [
        {
            "name": container,
            "image": cluster.image,
            "command": command(),
            **({"workingDir": cluster.working_dir} if cluster.working_dir else {}),
            "env": environment(job, env),
            "resources": resources(job),
            "securityContext": container_security(),
            "volumeMounts": mounts(job),
        }
    ]
    found["volumes"] = volumes(job)
    return found


def command() -> list[str]:
    return ["bash", f"{FILES}/launch.sh"]


def environment(job: Job, more: dict[str, str] | None = None) -> list[Any]:
    found: list[Any] = [{"name": name, "value": value} for name, value in (more or {}).items()]
    for variable in job.environment:
        entry: dict[str, Any] = {"name": variable.name}
        if isinstance(variable.value, Secret):
            entry["valueFrom"] = {"secretKeyRef": {"name": variable.value.secret, "key": variable.value.key}}
        else:
            entry["value"] = literally(variable.value)
        found.append(Note(entry, one_line(variable.reason)))
    return found


def literally(value: str) -> str:
    """Kubernetes puts other variables in for $(NAME), and reads $$ as $."""
    return value.replace("$", "$$") if "$(" in value or "$$" in value else value


def resources(job: Job) -> dict[str, Any]:
    cluster = job.cluster
    devices = {cluster.gpu_resource: job.ranks_per_node} if job.gpu else {}
    devices |= cluster.extended_resources
    counted = {name: str(count) for name, count in devices.items()}
    why = f"the plan's host memory and half as much again, and {job.shm_gib} GiB of /dev/shm, which counts"
    why = f"as cluster.memory_limit, in which {job.shm_gib} GiB of /dev/shm count" if job.is_script else why
    return {
        "requests": {
            "cpu": job.cpu,
            "memory": Note(job.memory_request, "cluster.memory_request" if cluster.memory_request else why),
            **counted,
        },
        "limits": {"memory": job.memory_limit, **counted},
    }


def security(job: Job) -> dict[str, Any]:
    """No user ID unless asked for: OpenShift gives each namespace its own, and refuses others."""
    found: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
    user = job.cluster.user
    if user is None or user.uid:
        found["runAsNonRoot"] = Note(True, "the Pod Security level `restricted` wants it said")
    if user is not None:
        found["runAsUser"] = Note(user.uid, "asked for by cluster.user")
        if user.gid is not None:
            found["runAsGroup"] = user.gid
    return found


def container_security() -> dict[str, Any]:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def volumes(job: Job) -> list[Any]:
    found: list[Any] = [{"name": "windlass", "configMap": {"name": files_name(job)}}]
    if job.cluster.large_shm:
        shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{job.shm_gib}Gi"}}
        found.append(Note(shm, "ranks of one node exchange data here; the default of 64 MiB is too little"))
    for index, volume in enumerate(job.cluster.volumes):
        found.append({"name": f"volume-{index}", "persistentVolumeClaim": {"claimName": volume.claim}})
    return found


def mounts(job: Job) -> list[Any]:
    found: list[Any] = [{"name": "windlass", "mountPath": FILES, "readOnly": True}]
    if job.cluster.large_shm:
        found.append({"name": "shm", "mountPath": "/dev/shm"})
    return found + [
        {"name": f"volume-{index}", "mountPath": volume.path} for index, volume in enumerate(job.cluster.volumes)
    ]


def toleration(one: Toleration) -> dict[str, Any]:
    operator = {"operator": "Exists"} if one.value is None else {"operator": "Equal", "value": one.value}
    return {"key": one.key, **operator, **({"effect": one.effect} if one.effect else {})}


def affinity(job: Job) -> dict[str, Any]:
    """The site's own, and all nodes of the run in one domain where that is asked for and no queue sees to it."""
    cluster = job.cluster
    if not cluster.topology_key or cluster.queue:
        return dict(cluster.affinity)
    together = {
        "labelSelector": {"matchLabels": {RUN_LABEL: job.name}},
        "topologyKey": cluster.topology_key,
    }
    pods = dict(cluster.affinity.get("podAffinity") or {})
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    pods[key] = [*(pods.get(key) or []), together]
    return {**cluster.affinity, "podAffinity": pods}
