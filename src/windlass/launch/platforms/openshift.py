"""OpenShift: the same jobs as on Kubernetes, and warnings about its default policy."""

from collections.abc import Iterator
from typing import Literal

from windlass.errors import Problem
from windlass.launch.job import Job
from windlass.launch.platforms import kubernetes

files = kubernetes.files
start = kubernetes.start
status = kubernetes.status
logs = kubernetes.logs
stop = kubernetes.stop


def review(job: Job) -> Iterator[Problem | str]:
    section = job.cluster.kubernetes
    yield from kubernetes.find_problems(job)
    yield from find_scc_problems(job, "kubernetes")
    if section.user is None:
        where = job.where("cluster.kubernetes.user")
        yield f"{where}: not set: the policy restricted-v2 gives the pods the namespace's own user"
    if section.fs_group is not None:
        what = f"restricted-v2 refuses group {section.fs_group} unless it is in the namespace's range"
        remedy = "give the service account the SCC nonroot-v2, or remove it"
        yield f"{job.where('cluster.kubernetes.fs_group')}: {what}: {remedy}"


def find_scc_problems(job: Job, name: Literal["kubernetes", "runai"]) -> Iterator[str]:
    """Yield a warning if OpenShift's default policy would refuse the user that this section of `cluster` sets, with
    the policy that allows it."""
    user = getattr(job.cluster, name).user
    if user is None:
        return
    remedy = "give the service account the SCC nonroot-v2"
    if user.uid == 0:  # `anyuid` refuses pods with a seccomp profile, which `restricted` requires
        remedy = "give the service account a copy of the SCC anyuid with seccompProfiles: [runtime/default]"
    what = f"OpenShift's restricted-v2 policy refuses user {user.uid} unless it is in the namespace's range"
    yield f"{job.where(f'cluster.{name}.user.uid')}: {what}: {remedy}, or remove cluster.{name}.user"
