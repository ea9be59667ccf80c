"""OpenShift: the same jobs as on Kubernetes, and what its default policy says of them."""

from __future__ import annotations

from collections.abc import Iterator

from windlass.errors import Problem
from windlass.launch import kubernetes
from windlass.launch.job import Job

files, start, status, logs, stop = (
    *(kubernetes.files, kubernetes.start),
    *(kubernetes.status, kubernetes.logs, kubernetes.stop),
)


def review(job: Job) -> Iterator[Problem | str]:
    yield from kubernetes.findings(job)
    cluster = job.cluster
    if cluster.user is None:
        yield f"{job.where('cluster.user')}: not set: the policy restricted-v2 gives the pods the namespace's own user"
    if cluster.fs_group is not None:
        what = f"restricted-v2 refuses group {cluster.fs_group} unless it is in the namespace's range"
        yield f"{job.where('cluster.fs_group')}: {what}: give the service account the SCC nonroot-v2, or remove it"
