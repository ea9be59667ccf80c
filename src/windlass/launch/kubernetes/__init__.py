"""Kubernetes: a ConfigMap with the run, and a job of whichever kind the cluster has.

engines   TrainJob, PyTorchJob, JobSet, or an indexed Job with a Service
pod       what all of them start on each node
write     manifests as text, with comments
checks    what a server would refuse, and what none would see; pod_checks: inside pods; fields: the known names
cluster   the cluster's own client: what is installed, what is missing, create, look, stop
"""

from __future__ import annotations

from typing import Any

from windlass import __version__
from windlass.launch.job import Job
from windlass.launch.kubernetes.engines import TRAINER, documents
from windlass.launch.kubernetes.write import plain, write
from windlass.launch.script import one_line

DEFAULT_ENGINE = "job"  # it needs nothing but Kubernetes itself
NOT_TAKEN = {
    "project": "it is Run:ai's; here it is cluster.namespace and cluster.queue",
    "preemptible": "say cluster.priority_class",
}


def texts(job: Job, engine: str = DEFAULT_ENGINE, version: str = TRAINER) -> dict[str, str]:
    head = (
        f"{job.title}\n"
        f"Written by windlass {__version__} from {one_line(job.source)}; kubectl apply -f job.yaml\n"
        "Again with the same run folder: it resumes from the last checkpoint."
    )
    return {"job.yaml": write(documents(job, engine, version), head)}


def manifests(job: Job, engine: str = DEFAULT_ENGINE, version: str = TRAINER) -> list[dict[str, Any]]:
    """The same as data."""
    return [plain(document) for document in documents(job, engine, version)]
