"""Kubernetes: a ConfigMap with the run's files, and a job of a kind that the cluster supports."""

import functools
import hashlib
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

import yaml

from windlass import __version__
from windlass.errors import RANK_USER_INPUT, SAVED, Problem
from windlass.launch.job import (
    NAME_LETTERS,
    Job,
    JobRecord,
    escape_variables,
    find_pod_problems,
    keep_record,
    list_refused_keys,
    render_launch_sh,
    to_one_line,
)
from windlass.launch.platforms import kubectl, pod
from windlass.launch.platforms.kubectl import KubernetesJob
from windlass.ranks.place import PORT

FILES = "/etc/windlass"  # where run.yaml, launch.sh and accelerate.yaml are mounted
OLDEST_TRAINER = "2.3"  # the first Kubeflow Trainer whose TrainJob can set what a run needs


def render_job_yaml(job: Job, engine: str) -> str:
    """Render all objects of the run, in the order in which they are created."""
    cluster = job.cluster
    files = {**job.files, "launch.sh": render_launch_sh(job, exports=False)}
    # Named after its exact content: a ConfigMap that a running job uses is never changed.
    content = hashlib.sha256("\0".join(word for file in files.items() for word in file).encode()).hexdigest()
    watch = job.plan.run.watch
    text: str = _template().render(
        job=job,
        cluster=cluster,
        kubernetes=cluster.kubernetes,
        restarts=cluster.max_restarts,
        engine=engine,
        version=__version__,
        folder=FILES,
        files=files,
        config_map=f"{job.name}-{content[:12]}",
        marks={of: pod.labels_and_annotations(job, of, engine) for of in ("job", "pod", "other")},
        fields=pod.pod_fields(cluster.kubernetes),
        resources=pod.resources(job),
        affinity=pod.affinity(job),
        volumes=[(f"volume-{index}", volume) for index, volume in enumerate(cluster.volumes)],
        companions=pod.companion_objects(job, engine),
        metrics_port=watch.prometheus_port if cluster.kubernetes.pod_monitor else None,
        port=str(PORT),
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
        "one_line": to_one_line,
        "escape_variables": escape_variables,
        "block": to_block,
        "source": pod.volume_source,
        "mount": pod.volume_mount,
    }
    template = resources("windlass.launch.platforms").joinpath("job.yaml.j2").read_text(encoding="utf-8")
    return environment.from_string(template)


# Texts that kubectl's YAML takes for a truth value or a number, and PyYAML does not.
READ_OTHERWISE = re.compile(r"[yYnN]|(?=[-+]?\.?\d)[-+]?[\d_]*\.?[\d_]*([eE][-+]?\d+)?|[-+]?0o[0-7_]+")


class _Dumper(yaml.SafeDumper):
    """Writes multi-line text as a readable block, and repeats values instead of using aliases."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    text = "tag:yaml.org,2002:str"
    style = "|" if "\n" in value else None
    unquoted = dumper.resolve(yaml.ScalarNode, value, (True, False)) == text  # type: ignore[no-untyped-call]
    if set(value) & set("\x85\u2028\u2029") or (unquoted and READ_OTHERWISE.fullmatch(value)):
        style = '"'
    return dumper.represent_scalar(text, value, style=style)


_Dumper.add_representer(str, _represent_text)


def to_yaml(value: Any) -> str:
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=1 << 30)
    return text.removesuffix("\n").removesuffix("\n...")


def to_block(value: Any) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 30)


def indent(text: str, columns: int) -> str:
    """Indent all lines but the first. Only "\\n" separates lines: Unicode's other line breaks belong to the values."""
    first, *rest = text.split("\n")
    return "\n".join((first, *(" " * columns + line if line else "" for line in rest)))


def review(job: Job) -> Iterator[Problem | str]:
    yield from find_problems(job)
    if job.cluster.kubernetes.user is None:
        where = job.where("cluster.kubernetes.user")
        yield f"{where}: not set: the image's own user, which must not be root (runAsNonRoot)"
    if job.engine == "pytorchjob" and job.nodes > 1:
        what = "the Training Operator adds a container to workers that runs as root (alpine:3.10)"
        yield f"{job.where('cluster.kubernetes.engine')}: {what}: a namespace with Pod Security `restricted` refuses it"


def find_problems(job: Job) -> Iterator[Problem | str]:
    """Yield the findings that apply to OpenShift too."""
    section = job.cluster.kubernetes
    yield from find_pod_problems(job)
    yield from list_refused_keys(job, "kubernetes", pod.REFUSED.get(job.engine, {}), f"engine {job.engine}")
    if section.scheduler_name and not pod.gang_scheduler(section) and not section.queue and job.nodes > 1:
        where = job.where("cluster.kubernetes.scheduler_name")
        what = f"{section.scheduler_name} is given no PodGroup: nodes may start one by one, and wait for each other"
        yield f"{where}: {what}; cluster.kubernetes.gang or .queue start them together"
    if job.engine == "trainer":
        version = section.trainer_version or OLDEST_TRAINER
        if tuple(map(int, version.split("."))) < tuple(map(int, OLDEST_TRAINER.split("."))):
            what = f"Kubeflow Trainer {version} is too old: its TrainJob can't set all that a run needs"
            hint = "use cluster.kubernetes.engine: jobset, which every Kubeflow Trainer comes with"
            yield Problem(what, job.where("cluster.kubernetes.trainer_version"), hint, "too-old")
        yield f"restarts are the runtime's ({section.runtime}): cluster.max_restarts has no effect"


def choose_engine(job: Job, *, ask: bool, say: Callable[[str], None] = lambda _: None) -> Job:
    """Choose the run file's engine, or the first that the cluster supports, if `ask` allows a query."""
    section = job.cluster.kubernetes
    where = job.where("cluster.kubernetes.engine")
    why = kubectl.find_runtime_problem(section.runtime) if section.engine == "trainer" and ask else ""
    if why:
        say(f"note: {where}: {why}; cluster.kubernetes.engine: jobset would")
    if section.engine != "auto":
        return job
    if ask:
        return replace(job, engine=kubectl.find_engine(section, say))
    say(f"note: {where}: auto, and no cluster was asked: an indexed Job, which all have")
    return job


def files(job: Job) -> dict[str, str]:
    return {"job.yaml": render_job_yaml(job, job.engine)}


def render_kustomize(job: Job) -> dict[str, str]:
    """Render the same objects as one file each, as a base for GitOps."""
    parts = render_job_yaml(job, job.engine).removesuffix("\n").split("\n---\n")
    found = {f"{yaml.safe_load(part)['kind'].lower()}.yaml": f"{part}\n" for part in parts}
    base = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": list(found)}
    return {**found, "kustomization.yaml": to_block(base)}


def start(job: Job, folder: Path, say: Callable[[str], None]) -> bool:
    # The server would compare the manifest with the existing job of that name, so it validates another name.
    trial = replace(job, name=f"{job.name[: NAME_LETTERS - 7]}-{secrets.token_hex(3)}")
    target = KubernetesJob(job.name, job.engine, job.cluster.kubernetes.namespace)
    pod = [*yaml.safe_load_all(render_job_yaml(job, "job"))][-1]["spec"]["template"]
    target.create(job, render_job_yaml(job, job.engine), render_job_yaml(trial, job.engine), pod, say)
    keep_record(job, "kubernetes", folder, engine=job.engine, namespace=target.namespace)
    return True


def _find_job(record: JobRecord) -> KubernetesJob:
    return KubernetesJob(record.facts["name"], record.facts["engine"], record.facts["namespace"])


def status(record: JobRecord) -> int:
    job = _find_job(record)
    pods = job.pods("wide").stdout.strip()
    print("\n".join(table for table in (job.get(), pods) if table) or f"{job.name}: it no longer exists")
    phases = job.pods(kubectl.PHASES).stdout.split()
    if (len(phases) < record.facts["nodes"] or "Pending" in phases) and job.state() == "running":
        print(
            "\n".join(f"warning: {line}" for line in job.warnings())
            or "not all of its pods run yet, and the cluster has no warning about it"
        )
    if " Terminating " in pods:
        namespace = f"--namespace {job.namespace} " if job.namespace else ""
        print(
            f"hint: a pod whose node is lost stays, and holds up the restart: once that machine is surely off, "
            f"kubectl {namespace}delete pod NAME --force"
        )
    return 0


def logs(record: JobRecord, *, follow: bool) -> int:
    job = _find_job(record)
    return job.follow(record.facts["nodes"], record.say) if follow else job.logs()


def stop(record: JobRecord) -> int:
    """Delete the job, then its files. Pods get their time to save; submitting again resumes from there."""
    job = _find_job(record)
    words = ("--ignore-not-found", "--wait=false")
    done = [job.run("delete", kubectl.RESOURCES[job.engine], job.name, *words)]
    done += [job.run("delete", kind, "--selector", job.selector, *words) for kind in ("service", "configmap")]
    record.say("".join(one.stdout for one in done).strip())
    return 0
