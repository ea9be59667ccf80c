"""How each key of `cluster.kubernetes` maps to a field of a pod or to an object next to the job."""

from typing import Any

from windlass.launch.job import Job
from windlass.runfile.machines import MANAGED_BY, RUN_LABEL, Kubernetes, Volume

FIELDS = {  # keys that are copied to the pod's spec unchanged
    "service_account": "serviceAccountName",
    "priority_class": "priorityClassName",
    "runtime_class": "runtimeClassName",
    "scheduler_name": "schedulerName",
}
SOURCES = {  # key of a volume -> its kind in a pod, and the field for its value
    "claim": ("persistentVolumeClaim", "claimName"),
    "secret": ("secret", "secretName"),
    "config_map": ("configMap", "name"),
    "empty_dir": ("emptyDir", "sizeLimit"),
}
KUEUE = "kueue.x-k8s.io"
GROUPS = {  # by `gang`: the scheduler's usual name, its PodGroup's API, how a pod names its group
    "volcano": ("volcano", "scheduling.volcano.sh/v1beta1", "annotations", "scheduling.k8s.io/group-name"),
    "coscheduling": (
        "scheduler-plugins-scheduler",
        "scheduling.x-k8s.io/v1alpha1",
        "labels",
        "scheduling.x-k8s.io/pod-group",
    ),
}
FIRST_NODE = {  # by engine: the label of the pod that is node 0
    "job": {"batch.kubernetes.io/job-completion-index": "0"},
    "jobset": {"batch.kubernetes.io/job-completion-index": "0"},
    "pytorchjob": {"training.kubeflow.org/replica-type": "master"},
}
_RUNTIME = "its runtime has to: use cluster.kubernetes.engine: jobset, which every Kubeflow Trainer comes with"
_OF_RUNTIME = (
    *("priority_class", "runtime_class", "scheduler_name", "gang", "image_pull_policy", "ttl_seconds", "pod_monitor"),
)
REFUSED = {"trainer": dict.fromkeys(_OF_RUNTIME, _RUNTIME)}  # by engine: keys without a field there


def gang_scheduler(section: Kubernetes) -> str | None:
    """Return the scheduler that needs a PodGroup."""
    names = {scheduler: name for name, (scheduler, *_) in GROUPS.items()}
    return section.gang or names.get(section.scheduler_name or "")


def kueue_queue(section: Kubernetes) -> str | None:
    """Return the queue if it is Kueue's."""
    return None if gang_scheduler(section) == "volcano" else section.queue


def pod_fields(section: Kubernetes) -> dict[str, str]:
    values = {key: getattr(section, key) for key in FIELDS}
    group = gang_scheduler(section)
    if group and not values["scheduler_name"]:
        values["scheduler_name"] = GROUPS[group][0]
    return {FIELDS[key]: value for key, value in values.items() if value}


def labels_and_annotations(job: Job, of: str, engine: str = "") -> dict[str, dict[str, str]]:
    """Return labels and annotations for the job (`of` is "job"), its pods ("pod") or other objects ("other")."""
    section = job.cluster.kubernetes
    queue = kueue_queue(section)
    labels = {RUN_LABEL: job.name, MANAGED_BY: "windlass", **section.labels}
    annotations = dict(section.annotations) if of in ("job", "pod") else {}
    if of == "job" and queue:
        labels[f"{KUEUE}/queue-name"] = queue  # starts all nodes of the run together, or none
        labels |= {f"{KUEUE}/priority-class": section.queue_priority} if section.queue_priority else {}
    if of == "pod" and section.networks:
        annotations["k8s.v1.cni.cncf.io/networks"] = ",".join(section.networks)
    if of == "pod" and queue and section.topology_key:
        annotations[f"{KUEUE}/podset-{section.topology}-topology"] = section.topology_key
        if engine == "pytorchjob" and job.nodes > 1:  # one domain for master and workers; Kueue would use two
            annotations[f"{KUEUE}/podset-group-name"] = "nodes"
    found = {"labels": labels, "annotations": annotations}
    group = gang_scheduler(section)
    if of == "pod" and group:
        _, _, kind, name = GROUPS[group]
        found[kind][name] = job.name
    return found


def resources(job: Job) -> dict[str, dict[str, str]]:
    section = job.cluster.kubernetes
    devices = {section.gpu_resource: job.ranks_per_node} if job.gpu else {}
    both = {name: str(count) for name, count in {**devices, **section.extended_resources}.items()}
    both |= {f"hugepages-{size}": amount for size, amount in section.hugepages.items()}
    both |= {"ephemeral-storage": section.ephemeral_storage} if section.ephemeral_storage else {}
    limit = {"cpu": job.cluster.cpu_limit} if job.cluster.cpu_limit else {}
    return {
        "requests": {"cpu": job.cpu, "memory": job.memory_request, **both},
        "limits": {**limit, "memory": job.memory_limit, **both},
    }


def volume_source(volume: Volume) -> dict[str, Any]:
    (key, value), *_ = volume.sources.items()
    kind, name = SOURCES[key]
    return {kind: {name: value, **({"medium": volume.medium} if volume.medium else {})}}


def volume_mount(volume: Volume, name: str) -> dict[str, Any]:
    more = {"subPath": volume.sub_path, "readOnly": volume.read_only}
    return {"name": name, "mountPath": volume.path, **{key: value for key, value in more.items() if value}}


def affinity(job: Job) -> dict[str, Any]:
    """Return the configured affinity; adds one topology domain if that is configured and no queue handles it."""
    section = job.cluster.kubernetes
    if not section.topology_key or kueue_queue(section):
        return dict(section.affinity)
    domain: dict[str, Any] = {
        "labelSelector": {"matchLabels": {RUN_LABEL: job.name}},
        "topologyKey": section.topology_key,
    }
    if section.topology == "preferred":
        domain = {"weight": 100, "podAffinityTerm": domain}
    pods = dict(section.affinity.get("podAffinity") or {})
    key = f"{section.topology}DuringSchedulingIgnoredDuringExecution"
    return {**section.affinity, "podAffinity": {**pods, key: [*(pods.get(key) or []), domain]}}


def companion_objects(job: Job, engine: str) -> dict[str, dict[str, Any]]:
    """Return the configured objects to create next to the job: reason -> object."""
    section = job.cluster.kubernetes
    port = job.plan.run.watch.prometheus_port
    namespace = {"namespace": section.namespace} if section.namespace else {}
    head = {"metadata": {"name": job.name, **namespace, "labels": labels_and_annotations(job, "other")["labels"]}}
    ours = {"matchLabels": {RUN_LABEL: job.name, MANAGED_BY: "windlass"}}
    found: dict[str, dict[str, Any]] = {}
    if group := gang_scheduler(section):
        spec: dict[str, Any] = {"minMember": job.nodes}
        if group == "volcano":
            more = {"queue": section.queue, "priorityClassName": section.priority_class}
            spec |= {key: value for key, value in more.items() if value}
        why = "all nodes of the run are started together, or none"
        found[why] = {"apiVersion": GROUPS[group][1], "kind": "PodGroup", **head, "spec": spec}
    if section.network_policy:
        ingress: list[dict[str, Any]] = [{"from": [{"podSelector": ours}]}]
        if section.pod_monitor:
            ingress.append({"ports": [{"port": port}]})
        rules: dict[str, Any] = {"podSelector": ours, "policyTypes": ["Ingress"], "ingress": ingress}
        if section.network_policy == "all":
            dns = [{"port": port, "protocol": kind} for port in (53, 5353) for kind in ("UDP", "TCP")]
            rules["policyTypes"] = ["Ingress", "Egress"]
            rules["egress"] = [{"to": [{"podSelector": ours}]}, {"ports": dns}]
        why = "ranks connect to each other, whatever the namespace forbids"
        found[why] = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", **head, "spec": rules}
    if section.pod_monitor:
        selector = {"matchLabels": {**ours["matchLabels"], **FIRST_NODE.get(engine, {})}}
        spec = {"selector": selector, "podMetricsEndpoints": [{"port": "metrics"}]}
        why = "node 0 has the latest step of every rank"
        found[why] = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PodMonitor", **head, "spec": spec}
    return found
