"""Run:ai: the one command that submits the run, as a script for a human and as words for a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from windlass import __version__
from windlass.errors import Problem
from windlass.launch.job import Job, words
from windlass.launch.script import launch_sh, one_line
from windlass.runfile.machines import Secret

PRIORITIES = ("very-low", "low", "medium-low", "medium", "medium-high", "high", "very-high")
# What Run:ai's command line has no word for, and what says it there.
NOT_TAKEN = {
    "namespace": "the project has its own",
    "queue": "the project is the queue",
    "service_account": "the project's is taken",
    "image_pull_secrets": "register the credential in Run:ai",
    "node_selector": "use the project's node pools",
    "affinity": "use the project's node pools",
    "topology_key": "set it on the node pool",
    "deadline_seconds": "the project's policy has time limits",
    "gpu_resource": "Run:ai counts GPUs by a word of its own, and the project's node pools say of which kind",
}

SUBMIT = """\
#!/usr/bin/env bash
# {title}
# Written by windlass {version} from {source}: submits the run to Run:ai. \
launch.sh must lie, with {beside} beside it, in {folder} on the volume that the pods mount.
# Again with the same run folder: it resumes from the last checkpoint, once the ended job is deleted:
#   {delete}
set -euo pipefail

# Git Bash on Windows would turn /data into C:/Program Files/Git/data; elsewhere nobody reads these.
export MSYS_NO_PATHCONV=1 MSYS2_ARG_CONV_EXCL='*'

options=(
{options}
)
exec {command} "${{options[@]}}" \\
  --command -- {inner}
"""


def texts(job: Job) -> dict[str, str]:
    return {
        "launch.sh": launch_sh(job, exports=False),
        **job.accelerate_file,
        "run.yaml": job.run_text,
        "submit.sh": submit_sh(job),
    }


def kind(nodes: int) -> list[str]:
    """One node needs no operator: `--workers` 0 is not defined."""
    return ["runai", "training", "pytorch" if nodes > 1 else "standard"]


def command(job: Job) -> list[str]:
    """What is run, word by word."""
    arguments = [word for _, group in _options(job) for word in group]
    return [*kind(job.nodes), "submit", job.name, *arguments, "--command", "--", *inner(job)]


def verb(name: str, nodes: int, project: str | None, *words: str) -> list[str]:
    """describe, logs, delete of a job that was submitted."""
    return [*kind(nodes), words[0], name, *(["--project", project] if project else []), *words[1:]]


def inner(job: Job) -> list[str]:
    return ["bash", f"{job.folder}/launch.sh"]


def submit_sh(job: Job) -> str:
    lines = []
    for comment, group in _options(job):
        if comment:
            lines.append(f"  # {one_line(comment)}")
        lines.append(f"  {words(group)}")
    return SUBMIT.format(
        title=job.title,
        version=__version__,
        source=one_line(job.source),
        folder=one_line(job.folder),
        beside="run.yaml" if job.is_script else "run.yaml and\n# accelerate.yaml",
        delete=one_line(words(verb(job.name, job.nodes, job.cluster.project, "delete"))),
        options="\n".join(lines),
        command=words([*kind(job.nodes), "submit", job.name]),
        inner=words(inner(job)),
    )


def _options(job: Job) -> Iterator[tuple[str, list[str]]]:
    """Groups of words, each with the reason why they are there."""
    cluster = job.cluster
    if cluster.project:
        yield "", ["--project", cluster.project]
    if cluster.image:
        yield "", ["--image", cluster.image]
    if job.nodes > 1:
        what = f"{job.nodes} nodes: a master, which has options of its own, and {job.nodes - 1} workers"
        yield what, ["--workers", str(job.nodes - 1)]
    if job.gpu:
        yield "of each node", _each(job, "gpu-devices-request", str(job.ranks_per_node))
    yield "", _each(job, "cpu-core-request", cores(job.cpu))
    yield (
        "with units: a bare number would be bytes. "
        + (
            "What a script needs, the run file says"
            if job.is_script
            else f"The plan needs {job.memory_gib} GiB with /dev/shm"
        ),
        [
            *_each(job, "cpu-memory-request", job.memory_request),
            *_each(job, "cpu-memory-limit", job.memory_limit),
        ],
    )
    if cluster.large_shm:
        yield "ranks of one node exchange data through /dev/shm", ["--large-shm"]
    for volume in cluster.volumes:
        yield "", ["--existing-pvc", f"claimname={volume.claim},path={volume.path}"]
    yield from _devices(job)
    if cluster.user is not None:
        yield "asked for by cluster.user", ["--run-as-uid", str(cluster.user.uid)]
        if cluster.user.gid is not None:
            yield "", ["--run-as-gid", str(cluster.user.gid)]
    if cluster.working_dir:
        yield "", ["--working-dir", cluster.working_dir]
    yield from _lifetime(job)
    for variable in job.environment:
        if isinstance(variable.value, Secret):
            secret = variable.value
            yield variable.reason, ["--env-secret", f"{variable.name}={secret.secret},key={secret.key}"]
        else:
            # -e is the one spelling that old and new command lines share.
            yield variable.reason, ["-e", f"{variable.name}={variable.value}"]


def _each(job: Job, option: str, value: str) -> list[str]:
    """For the workers, and for the master, which the command line's reference gives options of its own."""
    return [f"--{option}", value, *([f"--master-{option}", value] if job.nodes > 1 else [])]


def _devices(job: Job) -> Iterator[tuple[str, list[str]]]:
    cluster = job.cluster
    if cluster.networks:
        networks = f"k8s.v1.cni.cncf.io/networks={','.join(cluster.networks)}"
        yield "a second network card in each pod", ["--annotation", networks]
    for name, value in cluster.annotations.items():
        yield "", ["--annotation", f"{name}={value}"]
    for name, count in cluster.extended_resources.items():
        yield "", _each(job, "extended-resource", f"{name}={count}")
    for toleration in cluster.tolerations:
        parts = {
            "operator": "Exists" if toleration.value is None else "Equal",
            "key": toleration.key,
            "value": toleration.value,
            "effect": toleration.effect,
        }
        yield "", ["--toleration", ",".join(f"{name}={value}" for name, value in parts.items() if value is not None)]


def _lifetime(job: Job) -> Iterator[tuple[str, list[str]]]:
    cluster = job.cluster
    yield (
        f"to end a step and save after a stop signal; {job.grace_reason}",
        ["--termination-grace-period", f"{job.grace_seconds}s"],
    )
    yield (
        "a run that was lost is started again, and resumes from its newest checkpoint",
        ["--backoff-limit", str(cluster.max_restarts), *_each(job, "restart-policy", "OnFailure")],
    )
    if job.nodes > 1:
        yield "workers that still run when the master has ended are of no use", ["--clean-pod-policy", "Running"]
    if cluster.preemptible is not None:
        yield "", ["--preemptibility", "preemptible" if cluster.preemptible else "non-preemptible"]
    if cluster.priority_class:
        yield "", ["--priority", cluster.priority_class]


def cores(amount: str) -> str:
    """Run:ai takes plain numbers: 500m is 0.5."""
    return f"{int(amount[:-1]) / 1000:g}" if amount.endswith("m") else amount


def problems(job: Job, where: Callable[[str], str]) -> Iterator[Problem]:
    """What Run:ai's own rules forbid."""
    cluster = job.cluster
    if not cluster.project:
        hint = "give cluster.project: without it the job lands in whatever project was used last"
        yield Problem("no Run:ai project", where("cluster.project"), hint)
    for index, volume in enumerate(cluster.volumes):
        if "," in volume.path:
            why = "holds a comma, which ends a value in Run:ai's options"
            yield Problem(f"{volume.path} {why}", where(f"cluster.volumes[{index}].path"), "mount it elsewhere")
    if cluster.priority_class and cluster.priority_class not in PRIORITIES:
        hint = f"one of {', '.join(PRIORITIES)}"
        yield Problem(f"{cluster.priority_class!r} is no priority of Run:ai", where("cluster.priority_class"), hint)
