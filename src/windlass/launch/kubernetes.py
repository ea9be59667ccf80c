"""Kubernetes: a ConfigMap with the run, and a job of whichever kind the cluster has."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from windlass import __version__
from windlass.errors import RANK_USER_INPUT, SAVED, Problem
from windlass.launch import kubectl
from windlass.launch.job import Job, Record, Submission, ignored_keys, name_letters, one_line, pod_problems
from windlass.launch.kubectl import MANAGED_BY, RUN_LABEL, KubernetesJob
from windlass.launch.script import launch_sh
from windlass.runfile.machines import Secret

FILES = "/etc/windlass"  # where run.yaml, launch.sh and accelerate.yaml are mounted
NODE = "node"  # Kubeflow Trainer's name of the container that trains; ours where the name is free
DEFAULT_ENGINE = "job"  # it needs nothing but Kubernetes itself
IGNORED = {
    "project": "it is Run:ai's; here it is cluster.namespace and cluster.queue",
    "preemptible": "set cluster.priority_class",
}


@dataclass(frozen=True, slots=True)
class Note:
    """A value and why it is there: a comment above it in the file."""

    value: Any
    why: str


# --- the pod that every engine starts once per node -------------------------------------------------------------------


def metadata(job: Job, name: str = "", *, queued: bool = False) -> dict[str, Any]:
    """`queued`: of the object that Kueue admits, not of its pods."""
    labels: dict[str, Any] = {RUN_LABEL: job.name, MANAGED_BY: "windlass"}
    if queued and job.cluster.queue:
        labels["kueue.x-k8s.io/queue-name"] = Note(
            job.cluster.queue, "Kueue starts all nodes of the run together, or none"
        )
    namespace = {"namespace": job.cluster.namespace} if job.cluster.namespace else {}
    return {"name": name or job.name, **namespace, "labels": labels}


def config_map(job: Job) -> dict[str, Any]:
    """Named by its exact content: a ConfigMap that a running job uses is never changed."""
    data = {**job.files, "launch.sh": launch_sh(job, exports=False)}
    text = "\0".join(word for file in data.items() for word in file)
    name = f"{job.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(job, name), "immutable": True, "data": data}


def template(job: Job, container: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """metadata and spec of the pods; `env` is what the engine does not set by itself."""
    cluster = job.cluster
    annotations: dict[str, Any] = {}
    if cluster.networks:
        networks = Note(",".join(cluster.networks), "a second network card in each pod, usually net1")
        annotations["k8s.v1.cni.cncf.io/networks"] = networks
    if cluster.topology_key and cluster.queue:
        topology = Note(cluster.topology_key, "all nodes within one such domain")
        annotations["kueue.x-k8s.io/podset-required-topology"] = topology
    annotations |= cluster.annotations
    grace = Note(job.grace_seconds, f"to end a step and save after a stop signal; {job.grace_reason}")
    spec: dict[str, Any] = {"terminationGracePeriodSeconds": grace, "securityContext": security(job)}
    if cluster.service_account:
        spec["serviceAccountName"] = cluster.service_account
    else:
        spec["automountServiceAccountToken"] = Note(False, "training needs nothing from the cluster")
    spec |= {
        "imagePullSecrets": [{"name": name} for name in cluster.image_pull_secrets],
        "priorityClassName": cluster.priority_class,
        "nodeSelector": dict(cluster.node_selector),
        "affinity": affinity(job),
        "tolerations": [
            {"key": one.key, "operator": "Exists" if one.value is None else "Equal"}
            | ({} if one.value is None else {"value": one.value})
            | ({"effect": one.effect} if one.effect else {})
            for one in cluster.tolerations
        ],
    }
    volumes: list[Any] = [{"name": "windlass", "configMap": {"name": config_map(job)["metadata"]["name"]}}]
    mounts: list[Any] = [{"name": "windlass", "mountPath": FILES, "readOnly": True}]
    if cluster.large_shm:
        shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{job.shm_gib}Gi"}}
        volumes.append(Note(shm, "ranks of one node exchange data here; the default of 64 MiB is too little"))
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    for index, volume in enumerate(cluster.volumes):
        volumes.append({"name": f"volume-{index}", "persistentVolumeClaim": {"claimName": volume.claim}})
        mounts.append({"name": f"volume-{index}", "mountPath": volume.path})
    run = {
        "name": container,
        "image": cluster.image,
        "command": ["bash", f"{FILES}/launch.sh"],
        **({"workingDir": cluster.working_dir} if cluster.working_dir else {}),
        "env": environment(job, env),
        "resources": resources(job),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": mounts,
    }
    spec = {key: value for key, value in spec.items() if value} | {"containers": [run], "volumes": volumes}
    labels = metadata(job)["labels"]
    return {"metadata": {"labels": labels, **({"annotations": annotations} if annotations else {})}, "spec": spec}


def environment(job: Job, more: dict[str, str] | None = None) -> list[Any]:
    entries: list[Any] = [{"name": name, "value": value} for name, value in (more or {}).items()]
    for variable in job.environment:
        value = variable.value
        if isinstance(value, Secret):
            entry: dict[str, Any] = {"valueFrom": {"secretKeyRef": {"name": value.secret, "key": value.key}}}
        else:
            entry = {"value": escape(value)}
        entries.append(Note({"name": variable.name, **entry}, one_line(variable.reason)))
    return entries


def escape(value: str) -> str:
    """Kubernetes replaces $(NAME) by other variables, and reads $$ as $."""
    return value.replace("$", "$$") if "$(" in value or "$$" in value else value


def resources(job: Job) -> dict[str, Any]:
    cluster = job.cluster
    devices = {cluster.gpu_resource: job.ranks_per_node} if job.gpu else {}
    counts = {name: str(count) for name, count in {**devices, **cluster.extended_resources}.items()}
    why = f"the plan's host memory and half as much again, and {job.shm_gib} GiB of /dev/shm, which counts"
    if cluster.memory_request:
        why = "cluster.memory_request"
    elif job.is_script:
        why = f"as cluster.memory_limit, in which {job.shm_gib} GiB of /dev/shm count"
    return {
        "requests": {"cpu": job.cpu, "memory": Note(job.memory_request, why), **counts},
        "limits": {"memory": job.memory_limit, **counts},
    }


def security(job: Job) -> dict[str, Any]:
    """No user ID unless configured: OpenShift gives each namespace its own, and refuses others."""
    context: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
    user = job.cluster.user
    if user is None or user.uid:
        context["runAsNonRoot"] = Note(True, "required by the Pod Security level `restricted`")
    if user is not None:
        context["runAsUser"] = Note(user.uid, "set by cluster.user")
        if user.gid is not None:
            context["runAsGroup"] = user.gid
    return context


def affinity(job: Job) -> dict[str, Any]:
    """The site's own, and all nodes of the run in one domain if that is configured and no queue does it."""
    cluster = job.cluster
    if not cluster.topology_key or cluster.queue:
        return dict(cluster.affinity)
    domain = {"labelSelector": {"matchLabels": {RUN_LABEL: job.name}}, "topologyKey": cluster.topology_key}
    pods = dict(cluster.affinity.get("podAffinity") or {})
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    return {**cluster.affinity, "podAffinity": {**pods, key: [*(pods.get(key) or []), domain]}}


# --- engines ----------------------------------------------------------------------------------------------------------


def indexed_job(job: Job, _: str = "") -> list[dict[str, Any]]:
    """A plain Job; a headless Service gives its pods names."""
    tries = job.cluster.max_restarts * job.nodes
    why = f"counts pods: {job.cluster.max_restarts} tries of {job.nodes} each"
    subdomain = {"subdomain": job.name} if job.nodes > 1 else {}
    spec = _job_spec(job, Note(tries, why), f"{job.name}-0.{job.name}", **subdomain)
    body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata(job, queued=True), "spec": spec}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job),
        "spec": {
            "clusterIP": Note("None", "no address of its own: it only gives the pods names"),
            "selector": {"batch.kubernetes.io/job-name": job.name},
            "publishNotReadyAddresses": Note(True, "nodes look for node 0 before it is ready"),
        },
    }
    return [service, body] if job.nodes > 1 else [body]


def jobset(job: Job, _: str = "") -> list[dict[str, Any]]:
    rules = [("wrongInput", "PodFailurePolicy", "exit code 13, see below: no restart")]
    if job.cluster.deadline_seconds:
        rules.append(("outOfTime", "DeadlineExceeded", "cluster.deadline_seconds is over: no restart"))
    inner = _job_spec(
        job, Note(0, "one node lost is the run lost: all start again together"), f"{job.name}-{NODE}-0-0.{job.name}"
    )
    spec = {
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
    }
    meta = metadata(job, queued=True)
    return [{"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": meta, "spec": spec}]


def _job_spec(job: Job, backoff_limit: Note, master: str, **more: str) -> dict[str, Any]:
    """Of a plain Job, whose pods learn from nobody else where node 0 is. Failure rules are tried in order."""
    env = {"MASTER_ADDR": master, "MASTER_PORT": str(job.port)} if job.nodes > 1 else None
    pods = template(job, NODE, env)
    never = Note("Never", "each try is a new pod, whose log stays")
    pods["spec"] = {"restartPolicy": never, **more, **pods["spec"]}
    codes = {"containerName": NODE, "operator": "In"}
    disrupted = [{"type": "DisruptionTarget", "status": "True"}]
    rules = [
        Note(
            {"action": "FailJob", "onExitCodes": {**codes, "values": [RANK_USER_INPUT]}},
            "the input is wrong: a retry would not help",
        ),
        Note(
            {"action": "Ignore", "onPodConditions": disrupted},
            "the node was taken away: not the run's fault, and not counted",
        ),
        Note(
            {"action": "Ignore", "onExitCodes": {**codes, "values": [SAVED]}},
            "stopped by a signal, and saved: it resumes from there, and that is not counted either",
        ),
    ]
    return {
        "completionMode": Note("Indexed", "a pod's number is its node's"),
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": backoff_limit,
        "podFailurePolicy": {"rules": rules},
        **_deadline(job),
        "template": pods,
    }


def _deadline(job: Job) -> dict[str, Any]:
    seconds = job.cluster.deadline_seconds
    return {"activeDeadlineSeconds": Note(seconds, "cluster.deadline_seconds")} if seconds else {}


def pytorchjob(job: Job, _: str = "") -> list[dict[str, Any]]:
    """Training Operator v1: node 0 is its Master.

    The operator adds up what its pods have restarted, and fails a job whose sum reaches the limit; 0 allows none.
    """
    why = "the operator knows no exit code of our own: 13 is retried up to backoffLimit"
    counts = {"Master": 1, "Worker": job.nodes - 1}
    restarts = job.cluster.max_restarts
    limit = f"at so many restarts of pods the job fails: {restarts} of the run are {restarts * job.nodes} of pods"
    spec = {
        "nprocPerNode": str(job.ranks_per_node),
        "runPolicy": {
            "cleanPodPolicy": Note("Running", "what still runs when the master has ended is of no use"),
            "backoffLimit": Note(restarts * job.nodes + 1 if restarts else 0, limit),
            **_deadline(job),
        },
        "pytorchReplicaSpecs": {
            name: {
                "replicas": count,
                "restartPolicy": Note("OnFailure", why),
                "template": template(job, "pytorch"),
            }
            for name, count in counts.items()
            if count
        },
    }
    meta = metadata(job, queued=True)
    return [{"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": meta, "spec": spec}]


@dataclass(frozen=True, slots=True)
class Trainer:
    """A version of Kubeflow Trainer: how its TrainJob changes the runtime's pods, and which of their fields."""

    style: str
    fields: tuple[str, ...]


_FIRST = ("serviceAccountName", "nodeSelector", "tolerations", "volumes", "containers")
_SECOND = (*_FIRST, "affinity", "imagePullSecrets")
_THIRD = (*_SECOND, "securityContext")
OVERRIDES, TEMPLATES, PATCHES = "podSpecOverrides", "podTemplateOverrides", "runtimePatches"
TRAINERS = {
    "2.0": Trainer(OVERRIDES, _FIRST),
    "2.1": Trainer(TEMPLATES, _SECOND),
    "2.2": Trainer(PATCHES, _THIRD),
    "2.3": Trainer(PATCHES, (*_THIRD, "terminationGracePeriodSeconds")),
}
DEFAULT_TRAINER = "2.3"  # if no version is given and no cluster can be asked


def trainjob(job: Job, version: str = DEFAULT_TRAINER) -> list[dict[str, Any]]:
    """Kubeflow Trainer v2: the runtime is the cluster's; what a TrainJob may change of it depends on the version."""
    trainer, pods = TRAINERS[version], template(job, NODE)
    whole = pods["spec"]["containers"][0]
    container = {"name": NODE, "volumeMounts": whole["volumeMounts"]}
    if "securityContext" in trainer.fields:
        container["securityContext"] = whole["securityContext"]
    pods["spec"] = {key: value for key, value in pods["spec"].items() if key in trainer.fields}
    pods["spec"]["containers"] = [container]
    target = {"targetJobs": [{"name": NODE}]}
    replicated = {"replicatedJobs": [{"name": NODE, "template": {"spec": {"template": pods}}}]}
    patch = {
        OVERRIDES: {**target, **pods["spec"]},
        TEMPLATES: {**target, **pods},
        # Who wrote the patch: the API wants a domain and a path.
        PATCHES: {"manager": "windlass.dev/submit", "trainingRuntimeSpec": {"template": {"spec": replicated}}},
    }[trainer.style]
    spec = {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "ClusterTrainingRuntime",
            "name": Note(job.cluster.runtime, "decides how often a lost run is started again"),
        },
        **(_deadline(job) if trainer.style == PATCHES else {}),
        "trainer": {
            "image": job.cluster.image,
            "command": whole["command"],
            "numNodes": job.nodes,
            "numProcPerNode": job.ranks_per_node,
            "resourcesPerNode": whole["resources"],
            "env": whole["env"],
        },
        trainer.style: [Note(patch, f"for Kubeflow Trainer {version}")],
    }
    meta = metadata(job, queued=True)
    return [{"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": meta, "spec": spec}]


def trainjob_problems(job: Job, version: str, where: Callable[[str], str]) -> Iterator[Problem]:
    """What the run file sets and a TrainJob of this version can't express: an error, never dropped."""
    if version not in TRAINERS:
        hint = f"known are {', '.join(TRAINERS)}"
        yield Problem(f"Kubeflow Trainer {version} is not known", where("cluster.trainer_version"), hint)
        return
    cluster, style, fields = job.cluster, TRAINERS[version].style, TRAINERS[version].fields
    topology = style != OVERRIDES if cluster.queue else "affinity" in fields
    possible = {
        "priority_class": False,
        "affinity": "affinity" in fields,
        "topology_key": topology,
        "image_pull_secrets": "imagePullSecrets" in fields,
        "user": "securityContext" in fields,
        "networks": style != OVERRIDES,
        "annotations": style != OVERRIDES,
        "grace_seconds": "terminationGracePeriodSeconds" in fields,
        "deadline_seconds": style == PATCHES,
    }
    for key, can in possible.items():
        if getattr(cluster, key) and not can:
            what = f"a TrainJob of Kubeflow Trainer {version} can't express it: its runtime has to"
            yield Problem(what, where(f"cluster.{key}"), "use cluster.engine: jobset, or leave it to the runtime")


ENGINES: dict[str, Callable[[Job, str], list[dict[str, Any]]]] = {
    "job": indexed_job,
    "jobset": jobset,
    "pytorchjob": pytorchjob,
    "trainer": trainjob,
}


# --- as text ----------------------------------------------------------------------------------------------------------


def documents(job: Job, engine: str = DEFAULT_ENGINE, version: str = DEFAULT_TRAINER) -> list[dict[str, Any]]:
    """All objects of the run, in the order in which they are created."""
    return [config_map(job), *ENGINES[engine](job, version)]


def manifests(job: Job, engine: str = DEFAULT_ENGINE, version: str = DEFAULT_TRAINER) -> list[dict[str, Any]]:
    """The same as plain data, without comments."""
    return [plain(document) for document in documents(job, engine, version)]


def job_yaml(job: Job, engine: str = DEFAULT_ENGINE, version: str = DEFAULT_TRAINER) -> str:
    heading = (
        f"# {job.title}\n"
        f"# Written by windlass {__version__} from {one_line(job.source)}; kubectl apply -f job.yaml\n"
        "# Apply it again with the same run folder to resume from the last checkpoint.\n"
    )
    return heading + to_yaml(documents(job, engine, version))


def plain(tree: Any) -> Any:
    if isinstance(tree, Note):
        return plain(tree.value)
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    return [plain(value) for value in tree] if isinstance(tree, list) else tree


class _Dumper(yaml.SafeDumper):
    """Text of several lines as a block that can be read."""


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    if set(value) & set("\x85\u2028\u2029"):  # the library writes them plain, and reads them back as a space
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _represent_text)


def to_yaml(trees: Sequence[Any]) -> str:
    """Scalars by the library, comments in between by us: it writes none."""
    return "---\n".join("\n".join(_lines(tree, 0)) + "\n" for tree in trees)


def _lines(tree: dict[str, Any] | list[Any], indent: int) -> list[str]:
    pad = " " * indent
    lines: list[str] = []
    for key, value in tree.items() if isinstance(tree, dict) else ((None, item) for item in tree):
        while isinstance(value, Note):
            lines += [f"{pad}# {line}" for line in value.why.splitlines()]
            value = value.value
        name = "-" if key is None else f"{_scalar(key)}:"
        if isinstance(value, dict | list) and value:
            inner = _lines(value, indent + 2)
            if key is None and not inner[0].lstrip().startswith("#"):
                lines += [f"{pad}- {inner[0].lstrip()}", *inner[1:]]
            else:
                lines += [f"{pad}{name}", *inner]
        else:
            first, *rest = _scalar(value).split("\n")
            # Only "\n" separates lines here: other breaks that Unicode knows are escaped by the library.
            lines += [f"{pad}{name} {first}", *(f"{pad}{line}" if line else "" for line in rest)]
    return lines


def _scalar(value: Any) -> str:
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=1 << 30)
    return text.removesuffix("\n").removesuffix("\n...")


# --- the platform -----------------------------------------------------------------------------------------------------


def problems(submission: Submission) -> Iterator[Problem]:
    job, where = submission.job, submission.where
    yield from pod_problems(submission.plan, job)
    if len(job.name) > (limit := name_letters(job.nodes)):
        what = f"{job.name} has {len(job.name)} letters, and with {job.nodes} nodes at most {limit} are possible"
        yield Problem(what, where("name"), "pods' names are made from it and the node's number: up to 63 together")
    if submission.engine == "trainer":
        yield from trainjob_problems(job, submission.version, where)


def choose_engine(submission: Submission, *, ask: bool) -> tuple[Submission, bool]:
    """The run file's engine and Trainer version, or the cluster's if it may be asked; and whether it was."""
    section = submission.job.cluster
    engine = DEFAULT_ENGINE if section.engine == "auto" else section.engine
    version = section.trainer_version or DEFAULT_TRAINER
    asked = ask and kubectl.find() is not None
    if asked:
        engine = kubectl.installed_engine() if section.engine == "auto" else engine
        version = kubectl.trainer_version() if engine == "trainer" and not section.trainer_version else version
    return replace(submission, engine=engine, version=version), asked


def notes(submission: Submission, *, asked: bool = False) -> Iterator[str]:
    """What should be known before it is sent: keys without effect, policies that are needed, defaults."""
    section, where, version = submission.job.cluster, submission.where, submission.version
    trainer = TRAINERS[version] if submission.engine == "trainer" else None
    yield from ignored_keys(section, IGNORED, "Kubernetes")
    if section.engine == "auto" and not asked:
        yield f"{where('cluster.engine')}: auto, and no cluster was asked: an indexed Job, which all have"
    if section.user is None and (trainer is None or "securityContext" in trainer.fields):
        yield f"{where('cluster.user')}: not set: the image's own user, which must not be root (runAsNonRoot)"
    if trainer:
        if section.trainer_version is None and not asked:
            yield f"{where('cluster.trainer_version')}: no cluster was asked: written for {DEFAULT_TRAINER}"
        yield f"restarts are the runtime's ({section.runtime}): cluster.max_restarts has no effect"
        if "terminationGracePeriodSeconds" not in trainer.fields:
            yield f"{section.runtime} has to set terminationGracePeriodSeconds: Trainer {version}'s jobs can't"


def files(submission: Submission) -> dict[str, str]:
    return {"job.yaml": job_yaml(submission.job, submission.engine, submission.version)}


def start(submission: Submission) -> bool:
    path = submission.folder / "job.yaml"
    if kubectl.find() is None:
        submission.say(f"kubectl is not installed here; on a machine that has it: kubectl apply -f {path}")
        return False
    job, engine, version = submission.job, submission.engine, submission.version
    # The server would compare a job of the same name with the one that is to be replaced: it validates another name.
    trial = replace(job, name=f"{job.name[: name_letters(job.nodes) - 7]}-{secrets.token_hex(3)}")
    target = KubernetesJob(job.name, engine, job.cluster.namespace)
    target.create(job, job_yaml(job, engine, version), job_yaml(trial, engine, version), submission)
    submission.keep_record()
    return True


def _target(record: Record) -> KubernetesJob:
    return KubernetesJob(record.facts["name"], record.facts["engine"], record.facts["namespace"])


def status(record: Record) -> int:
    print(_target(record).status())
    return 0


def logs(record: Record, *, follow: bool) -> int:
    target = _target(record)
    return target.follow(record.facts["nodes"], record.say) if follow else target.logs()


def stop(record: Record) -> int:
    """Pods get their time to save; submitting again resumes from there."""
    record.say(_target(record).delete())
    return 0
