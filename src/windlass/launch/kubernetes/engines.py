"""One function per engine: the job and its pods in that engine's own words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from windlass.errors import RANK_USER_INPUT, SAVED
from windlass.launch.job import Job
from windlass.launch.kubernetes import pod
from windlass.launch.kubernetes.write import Note

NODE = "node"  # Kubeflow Trainer's name of the container that trains; ours where the name is free
MANAGER = "windlass.dev/submit"  # who wrote a patch; the API wants a domain and a path
TRAINER = "2.3"  # what is written for where no version is given and no cluster can be asked
# What a TrainJob may say of its pods, by version. The rest is the runtime's.
_FIRST = ("serviceAccountName", "nodeSelector", "tolerations", "volumes", "containers")
_SECOND = (*_FIRST, "affinity", "imagePullSecrets")
_THIRD = (*_SECOND, "securityContext")
POD_FIELDS = {"2.0": _FIRST, "2.1": _SECOND, "2.2": _THIRD, "2.3": (*_THIRD, "terminationGracePeriodSeconds")}
OVERRIDES, TEMPLATES, PATCHES = "podSpecOverrides", "podTemplateOverrides", "runtimePatches"
STYLES = {"2.0": OVERRIDES, "2.1": TEMPLATES, "2.2": PATCHES, "2.3": PATCHES}


def documents(job: Job, engine: str, version: str = TRAINER) -> list[dict[str, Any]]:
    """All objects of the run, in the order in which they are created."""
    build: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "job": lambda: indexed_job(job),
        "jobset": lambda: [jobset(job)],
        "pytorchjob": lambda: [pytorchjob(job)],
        "trainer": lambda: [trainjob(job, version)],
    }
    return [pod.config_map(job), *build[engine]()]


def failure_policy() -> Any:
    """Rules are tried in order."""
    rules = [
        Note(
            {
                "action": "FailJob",
                "onExitCodes": {"containerName": NODE, "operator": "In", "values": [RANK_USER_INPUT]},
            },
            "the input is wrong: trying again would not help",
        ),
        Note(
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            "the node was taken away: not the run's fault, and not counted",
        ),
        Note(
            {
                "action": "Ignore",
                "onExitCodes": {"containerName": NODE, "operator": "In", "values": [SAVED]},
            },
            "stopped by a signal, and saved: it resumes from there, and that is not counted either",
        ),
    ]
    return {"rules": rules}


def _pods(job: Job, master: str, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """Pods of a plain Job: nobody tells them where node 0 is but we."""
    env = {"MASTER_ADDR": master, "MASTER_PORT": str(job.port)} if job.nodes > 1 else None
    template = pod.template(job, NODE, env)
    template["spec"] = {
        "restartPolicy": Note("Never", "each try is a new pod, whose log stays"),
        **(more or {}),
        **template["spec"],
    }
    return template


def _deadline(job: Job) -> dict[str, Any]:
    seconds = job.cluster.deadline_seconds
    return {"activeDeadlineSeconds": Note(seconds, "cluster.deadline_seconds")} if seconds else {}


def indexed_job(job: Job) -> list[dict[str, Any]]:
    """A plain Job; a headless Service gives its pods names."""
    tries = job.cluster.max_restarts * job.nodes
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": pod.metadata(job),
        "spec": {
            "clusterIP": Note("None", "no address of its own: it only gives the pods names"),
            "selector": {"batch.kubernetes.io/job-name": job.name},
            "publishNotReadyAddresses": Note(True, "nodes look for node 0 before it is ready"),
        },
    }
    body = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": pod.metadata(job, queue=True),
        "spec": {
            "completionMode": Note("Indexed", "a pod's number is its node's"),
            "completions": job.nodes,
            "parallelism": job.nodes,
            "backoffLimit": Note(tries, f"counts pods: {job.cluster.max_restarts} tries of {job.nodes} each"),
            "podFailurePolicy": failure_policy(),
            **_deadline(job),
            "template": _pods(job, f"{job.name}-0.{job.name}", {"subdomain": job.name} if job.nodes > 1 else None),
        },
    }
    return [service, body] if job.nodes > 1 else [body]


def jobset(job: Job) -> dict[str, Any]:
    inner = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": Note(0, "one node lost is the run lost: all start again together"),
        "podFailurePolicy": failure_policy(),
        **_deadline(job),
        "template": _pods(job, f"{job.name}-{NODE}-0-0.{job.name}"),
    }
    rules = [("wrongInput", "PodFailurePolicy", "exit code 13, see below: no restart")]
    if job.cluster.deadline_seconds:
        rules.append(("outOfTime", "DeadlineExceeded", "cluster.deadline_seconds is over: no restart"))
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": pod.metadata(job, queue=True),
        "spec": {
            "network": {
                "enableDNSHostnames": True,
                "publishNotReadyAddresses": Note(True, "nodes look for node 0 before it is ready"),
            },
            "failurePolicy": {
                "maxRestarts": Note(job.cluster.max_restarts, "each resumes from the newest checkpoint"),
                "rules": [
                    Note({"name": name, "action": "FailJobSet", "onJobFailureReasons": [reason]}, why)
                    for name, reason, why in rules
                ],
            },
            "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": inner}}],
        },
    }


def pytorchjob(job: Job) -> dict[str, Any]:
    """Training Operator v1: node 0 is its Master."""

    def replica(count: int) -> dict[str, Any]:
        return {
            "replicas": count,
            "restartPolicy": Note(
                "OnFailure", "the operator knows no exit code of our own: 13 is tried again up to backoffLimit"
            ),
            "template": pod.template(job, "pytorch"),
        }

    replicas = {"Master": replica(1)}
    if job.nodes > 1:
        replicas["Worker"] = replica(job.nodes - 1)
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": pod.metadata(job, queue=True),
        "spec": {
            "nprocPerNode": str(job.ranks_per_node),
            "runPolicy": {
                "cleanPodPolicy": Note("Running", "what still runs when the master has ended is of no use"),
                "backoffLimit": _restarts_of_pods(job),
                **_deadline(job),
            },
            "pytorchReplicaSpecs": replicas,
        },
    }


def _restarts_of_pods(job: Job) -> Note:
    """The operator adds up what its pods have restarted, and fails a job whose sum reaches the limit; 0 allows none."""
    restarts = job.cluster.max_restarts
    why = f"at so many restarts of pods the job fails: {restarts} of the run are {restarts * job.nodes} of pods"
    return Note(restarts * job.nodes + 1 if restarts else 0, why)


def trainjob(job: Job, version: str = TRAINER) -> dict[str, Any]:
    """Kubeflow Trainer v2: the runtime is the cluster's, and what we may change of it depends on the version."""
    style = STYLES[version]
    trainer = {
        "image": job.cluster.image,
        "command": pod.command(),
        "numNodes": job.nodes,
        "numProcPerNode": job.ranks_per_node,
        "resourcesPerNode": pod.resources(job),
        "env": pod.environment(job),
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": pod.metadata(job, queue=True),
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": Note(job.cluster.runtime, "says how often a lost run is started again"),
            },
            **(_deadline(job) if style == PATCHES else {}),
            "trainer": trainer,
            style: [Note(_patch(job, version), f"as Kubeflow Trainer {version} wants it")],
        },
    }


def _patch(job: Job, version: str) -> dict[str, Any]:
    spec = _patched_spec(job, version)
    style = STYLES[version]
    if style == OVERRIDES:
        return {"targetJobs": [{"name": NODE}], **spec}
    if style == TEMPLATES:
        return {"targetJobs": [{"name": NODE}], "metadata": pod.pod_metadata(job), "spec": spec}
    template = {"metadata": pod.pod_metadata(job), "spec": spec}
    replicated = {"name": NODE, "template": {"spec": {"template": template}}}
    return {"manager": MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}}}


def _patched_spec(job: Job, version: str) -> dict[str, Any]:
    """Of the whole pod, what this version lets a TrainJob say."""
    whole = pod.spec(job, NODE)
    kept = {key: value for key, value in whole.items() if key in POD_FIELDS[version]}
    container: dict[str, Any] = {"name": NODE, "volumeMounts": pod.mounts(job)}
    if "securityContext" in POD_FIELDS[version]:
        container["securityContext"] = pod.container_security()
    return kept | {"containers": [container]}


def not_said(job: Job, version: str) -> dict[str, str]:
    """What the run file asks for and a TrainJob of this version can't say: key of the run file -> why."""
    cluster, fields, style = job.cluster, POD_FIELDS[version], STYLES[version]
    asked = {
        "cluster.priority_class": bool(cluster.priority_class),
        "cluster.affinity": bool(cluster.affinity) and "affinity" not in fields,
        "cluster.topology_key": bool(cluster.topology_key)
        and ("affinity" not in fields if not cluster.queue else style == OVERRIDES),
        "cluster.image_pull_secrets": bool(cluster.image_pull_secrets) and "imagePullSecrets" not in fields,
        "cluster.user": cluster.user is not None and "securityContext" not in fields,
        "cluster.networks": bool(cluster.networks) and style == OVERRIDES,
        "cluster.annotations": bool(cluster.annotations) and style == OVERRIDES,
        "cluster.grace_seconds": cluster.grace_seconds is not None and "terminationGracePeriodSeconds" not in fields,
        "cluster.deadline_seconds": cluster.deadline_seconds is not None and style != PATCHES,
        "cluster.working_dir": False,  # launch.sh goes there by itself
    }
    why = f"a TrainJob of Kubeflow Trainer {version} can't say it: its runtime has to"
    return {key: why for key, lost in asked.items() if lost}
