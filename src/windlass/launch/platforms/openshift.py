"""OpenShift: the same jobs as on Kubernetes, and warnings about its default policy."""

from __future__ import annotations

from collections.abc import Iterator

from windlass.errors import Problem
from windlass.launch.job import Job
from windlass.launch.platforms import kubernetes

files, start, status, logs, stop = (
    *(kubernetes.files, kubernetes.start),
    *(kubernetes.status, kubernetes.logs, kubernetes.stop),
)


def review(job: Job) -> Iterator[Problem | str]:
    yield from kubernetes.find_problems(job)
    yield from find_scc_problems(job)
    if job.cluster.user is None:
        yield f"{job.where('cluster.user')}: not set: the policy restricted-v2 gives the pods the namespace's own user"
    if job.cluster.fs_group is not None:
        what = f"restricted-v2 refuses group {job.cluster.fs_group} unless it is in the namespace's range"
        yield f"{job.where('cluster.fs_group')}: {what}: give the service account the SCC nonroot-v2, or remove it"


def find_scc_problems(job: Job) -> Iterator[str]:
    """Yield a warning if OpenShift's default policy would refuse the user, with the policy that allows it."""
    if user := job.cluster.user:
        remedy = "give the service account the SCC nonroot-v2"
        if user.uid == 0:  # `anyuid` refuses pods with a seccomp profile, which `restricted` requires
            remedy = "give the service account a copy of the SCC anyuid with seccompProfiles: [runtime/default]"
        what = f"OpenShift's restricted-v2 policy refuses user {user.uid} unless it is in the namespace's range"
        yield f"{job.where('cluster.user.uid')}: {what}: {remedy}, or remove cluster.user"
