"""The fields of the objects that are written, and what each must be. From the API reference of Kubernetes 1.36,
JobSet v1alpha2, Training Operator 1.9 and Kubeflow Trainer 2.0 to 2.3."""

from __future__ import annotations

KINDS = {
    "ConfigMap": "v1",
    "Service": "v1",
    "Job": "batch/v1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "PyTorchJob": "kubeflow.org/v1",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
}
LISTS = {
    *("containers", "volumes", "volumeMounts", "env", "command", "args", "tolerations", "imagePullSecrets", "rules"),
    *("replicatedJobs", "podSpecOverrides", "podTemplateOverrides", "runtimePatches", "targetJobs", "values"),
    *("onPodConditions", "onJobFailureReasons", "drop", "add"),
}
MAPPINGS = {
    *("", "metadata", "spec", "template", "resources", "resourcesPerNode", "requests", "limits", "securityContext"),
    *("emptyDir", "configMap", "persistentVolumeClaim", "valueFrom", "secretKeyRef", "podFailurePolicy", "runPolicy"),
    *("pytorchReplicaSpecs", "runtimeRef", "trainer", "trainingRuntimeSpec", "labels", "annotations", "nodeSelector"),
    *("affinity", "failurePolicy", "network", "capabilities", "seccompProfile", "onExitCodes", "selector", "data"),
    *("containers[]", "env[]", "volumes[]", "volumeMounts[]", "tolerations[]", "rules[]", "replicatedJobs[]"),
    *("runtimePatches[]", "podTemplateOverrides[]", "podSpecOverrides[]", "pytorchReplicaSpecs.*", "targetJobs[]"),
    *("imagePullSecrets[]", "onPodConditions[]"),
}
NUMBERS = {
    *("completions", "parallelism", "backoffLimit", "activeDeadlineSeconds", "terminationGracePeriodSeconds"),
    *("replicas", "maxRestarts", "numNodes", "runAsUser", "runAsGroup", "values[]"),
}
TEXTS = {"image", "workingDir", "value", "mountPath", "claimName", "nprocPerNode", "command[]", "args[]", "data.*"}
# Mappings whose keys are the user's own.
NAMES = {
    *("labels", "annotations", "nodeSelector", "requests", "limits", "data", "selector", "pytorchReplicaSpecs"),
    *("affinity", "matchLabels"),
}
_METADATA = {"name", "namespace", "labels", "annotations"}
# A mapping that stands under one name in several objects has the fields of all of them.
_FIELDS: dict[str, set[str]] = {
    "": {"apiVersion", "kind", "metadata", "spec", "data", "immutable"},
    "metadata": _METADATA,
    "spec": {
        # Job
        *("completionMode", "completions", "parallelism", "backoffLimit", "podFailurePolicy", "activeDeadlineSeconds"),
        *("template", "suspend", "ttlSecondsAfterFinished"),
        # Service
        *("clusterIP", "selector", "publishNotReadyAddresses", "ports"),
        # JobSet
        *("network", "failurePolicy", "replicatedJobs", "successPolicy", "startupPolicy"),
        # PyTorchJob
        *("nprocPerNode", "runPolicy", "pytorchReplicaSpecs"),
        # TrainJob
        *("runtimeRef", "trainer", "runtimePatches", "podSpecOverrides", "podTemplateOverrides"),
        # Pod
        *("restartPolicy", "subdomain", "hostname", "terminationGracePeriodSeconds", "securityContext", "affinity"),
        *("serviceAccountName", "automountServiceAccountToken", "imagePullSecrets", "priorityClassName"),
        *("nodeSelector", "tolerations", "containers", "initContainers", "volumes", "schedulerName"),
        *("hostNetwork", "hostIPC", "hostPID", "schedulingGates", "runtimeClassName", "topologySpreadConstraints"),
    },
    "template": {"metadata", "spec"},
    "containers[]": {
        *("name", "image", "command", "args", "workingDir", "env", "envFrom", "resources", "securityContext"),
        *("volumeMounts", "imagePullPolicy", "ports", "livenessProbe", "readinessProbe", "startupProbe", "lifecycle"),
        *("terminationMessagePolicy", "terminationMessagePath", "stdin", "tty"),
    },
    "env[]": {"name", "value", "valueFrom"},
    "valueFrom": {"secretKeyRef", "configMapKeyRef", "fieldRef", "resourceFieldRef"},
    "resources": {"requests", "limits", "claims"},
    "resourcesPerNode": {"requests", "limits", "claims"},
    "volumeMounts[]": {"name", "mountPath", "readOnly", "subPath", "mountPropagation", "subPathExpr"},
    "tolerations[]": {"key", "operator", "value", "effect", "tolerationSeconds"},
    "emptyDir": {"medium", "sizeLimit"},
    "podFailurePolicy": {"rules"},
    "onExitCodes": {"containerName", "operator", "values"},
    "runPolicy": {
        *("cleanPodPolicy", "backoffLimit", "activeDeadlineSeconds", "ttlSecondsAfterFinished"),
        *("schedulingPolicy", "suspend", "managedBy"),
    },
    "pytorchReplicaSpecs.*": {"replicas", "restartPolicy", "template"},
    "runtimeRef": {"apiGroup", "kind", "name"},
    "trainer": {"image", "command", "args", "env", "numNodes", "numProcPerNode", "resourcesPerNode"},
    "runtimePatches[]": {"manager", "time", "trainingRuntimeSpec"},
    "podTemplateOverrides[]": {"targetJobs", "metadata", "spec"},
    "podSpecOverrides[]": {
        *("targetJobs", "serviceAccountName", "nodeSelector", "tolerations", "volumes", "containers"),
        *("initContainers", "schedulingGates"),
    },
    "failurePolicy": {"maxRestarts", "restartStrategy", "rules"},
    "network": {"enableDNSHostnames", "publishNotReadyAddresses", "subdomain"},
    "replicatedJobs[]": {"name", "replicas", "template", "dependsOn", "groupName"},
}


def allowed(name: str) -> set[str] | None:
    """The fields of a mapping; None where they are not known, or are the user's own."""
    return _FIELDS.get(name)
