"""Kubernetes: a ConfigMap with the run, and a job of whichever kind the cluster has."""

from __future__ import annotations

import functools
import hashlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.resources import files as resources
from typing import Any

import yaml

from windlass import __version__
from windlass.errors import RANK_USER_INPUT, SAVED, Problem
from windlass.launch import kubectl
from windlass.launch.job import Job, Record, Submission, ignored_keys, name_letters, one_line, pod_problems
from windlass.launch.kubectl import RUN_LABEL, KubernetesJob
from windlass.launch.script import launch_sh

FILES = "/etc/windlass"  # where run.yaml, launch.sh and accelerate.yaml are mounted
ENGINES = ("job", "jobset", "pytorchjob", "trainer")
DEFAULT_ENGINE = "job"  # it needs nothing but Kubernetes itself
IGNORED = {
    "project": "it is Run:ai's; here it is cluster.namespace and cluster.queue",
    "preemptible": "set cluster.priority_class",
}


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


# --- as text ----------------------------------------------------------------------------------------------------------


def config_map_name(job: Job) -> str:
    """Made from its exact content: a ConfigMap that a running job uses is never changed."""
    text = "\0".join(word for file in config_files(job).items() for word in file)
    return f"{job.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def config_files(job: Job) -> dict[str, str]:
    return {**job.files, "launch.sh": launch_sh(job, exports=False)}


def job_yaml(job: Job, engine: str = DEFAULT_ENGINE, version: str = DEFAULT_TRAINER) -> str:
    """All objects of the run, in the order in which they are created."""
    cluster = job.cluster
    devices = {cluster.gpu_resource: job.ranks_per_node} if job.gpu else {}
    text: str = _template().render(
        job=job,
        cluster=cluster,
        restarts=cluster.max_restarts,
        engine=engine,
        trainer=TRAINERS.get(version),
        trainer_version=version,
        version=__version__,
        folder=FILES,
        files=config_files(job),
        config_map=config_map_name(job),
        devices={**devices, **cluster.extended_resources},
        affinity=affinity(job),
        exit_input=RANK_USER_INPUT,
        exit_saved=SAVED,
    )
    return text.lstrip()


@functools.cache
def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {
        "yaml": to_yaml,
        "indent": indent,
        "nest": lambda text, columns: indent(text.removesuffix("\n"), columns),
        "one_line": one_line,
        "escape_variables": escape_variables,
    }
    return environment.from_string(resources("windlass.launch").joinpath("job.yaml.j2").read_text(encoding="utf-8"))


def affinity(job: Job) -> dict[str, Any]:
    """The site's own, and all nodes of the run in one domain if that is configured and no queue does it."""
    cluster = job.cluster
    if not cluster.topology_key or cluster.queue:
        return dict(cluster.affinity)
    domain = {"labelSelector": {"matchLabels": {RUN_LABEL: job.name}}, "topologyKey": cluster.topology_key}
    pods = dict(cluster.affinity.get("podAffinity") or {})
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    return {**cluster.affinity, "podAffinity": {**pods, key: [*(pods.get(key) or []), domain]}}


class _Dumper(yaml.SafeDumper):
    """Text of several lines as a block that can be read."""


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    if set(value) & set("\x85\u2028\u2029"):  # the library writes them plain, and reads them back as a space
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _represent_text)


def to_yaml(value: Any) -> str:
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=1 << 30)
    return text.removesuffix("\n").removesuffix("\n...")


def indent(text: str, columns: int) -> str:
    """All lines but the first. Only "\\n" separates lines here: others that Unicode knows belong to the values."""
    first, *rest = text.split("\n")
    return "\n".join((first, *(" " * columns + line if line else "" for line in rest)))


def escape_variables(value: str) -> str:
    """Kubernetes replaces $(NAME) by other variables, and reads $$ as $."""
    return value.replace("$", "$$") if "$(" in value or "$$" in value else value


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
