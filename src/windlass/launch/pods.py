"""What is wrong, or worth a word, with any run that goes into pods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from windlass.errors import Problem
from windlass.launch.job import Job
from windlass.plan.script import AnyPlan, ScriptPlan
from windlass.runfile import ScriptRun
from windlass.runfile.machines import Cluster

GIB = 1024**3
UNITS = {"": 1, "m": 0.001, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("KMGTPE", 1)}


def quantity(text: str) -> float:
    """A Kubernetes quantity as a number: 500m is 0.5, 1Gi is 1073741824."""
    number = text.rstrip("mkKMGTPEi")
    return float(number) * UNITS[text[len(number) :]]


def problems(plan: AnyPlan, job: Job) -> Iterator[Problem]:
    """What would end in pods that can't start, or whose work is lost."""
    cluster, where, key_of_folder = job.cluster, plan.loaded.where, plan.loaded.run.folder_key
    if not cluster.image:
        yield Problem("no container image", where("cluster.image"), "give cluster.image; see Containerfile")
    for key, path in _paths(plan):
        if not path.startswith("/") and (key == key_of_folder or Path(path).exists()):
            hint = "give the absolute path that the pods see"
            yield Problem(f"{path} is a path of this machine's working folder", where(key), hint)
    folder = PurePosixPath(job.folder)
    if folder.is_absolute() and not any(folder.is_relative_to(volume.path) for volume in cluster.volumes):
        hint = f"mount a volume there: cluster.volumes: [{{claim: NAME, path: /{folder.parts[1]}}}]"
        what = f"{folder} is on no volume: what the run writes would vanish with its pods"
        yield Problem(what, where(key_of_folder), hint)
    if isinstance(plan, ScriptPlan):
        if not (cluster.memory_request or cluster.memory_limit):
            hint = f"give cluster.memory_limit, such as 64Gi; {job.shm_gib} GiB of /dev/shm count in it"
            yield Problem("what a script needs of host memory can't be planned", where("cluster.memory_limit"), hint)
        return
    needed = plan.cost.host_gib + (job.shm_gib if cluster.large_shm else 0)
    for key, given in (("memory_request", cluster.memory_request), ("memory_limit", cluster.memory_limit)):
        if given and quantity(given) < needed * GIB:
            what = f"{given} of memory, and the plan needs {needed:.1f} GiB on each node with /dev/shm"
            yield Problem(what, where(f"cluster.{key}"), f"give at least {job.memory_gib}Gi")
    if cluster.max_restarts and plan.loaded.run.train.save_strategy == "no":
        what = "a run that is started again would begin anew: nothing is saved on the way"
        yield Problem(what, where("train.save_strategy"), "save by steps, or set cluster.max_restarts: 0")


def _paths(plan: AnyPlan) -> Iterator[tuple[str, str]]:
    run = plan.loaded.run
    if isinstance(run, ScriptRun):
        yield "script.output_dir", run.folder
        if run.script.path and not run.cluster.working_dir:
            yield "script.path", run.script.path
        return
    yield "train.output_dir", run.train.output_dir
    yield "model.model_name_or_path", run.model.model_name_or_path
    yield "data.dataset_name_or_path", run.data.dataset_name_or_path
    if run.lora.adapter:
        yield "lora.adapter", run.lora.adapter


def notes(cluster: Cluster, not_taken: Mapping[str, str], platform: str) -> tuple[str, ...]:
    """Keys that were given and that this platform does not take: nothing is dropped in silence."""
    given = cluster.model_fields_set
    return tuple(
        f"cluster.{key} has no effect on {platform}: {why}"
        for key, why in not_taken.items()
        if key in given and getattr(cluster, key)
    )
