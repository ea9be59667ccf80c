"""What is wrong with manifests: what a server refuses, and what none looks at, such as pods inside custom resources."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from windlass.errors import Problem
from windlass.launch.job import name_letters
from windlass.launch.kubernetes.fields import KINDS, LISTS, MAPPINGS, NAMES, NUMBERS, TEXTS, allowed
from windlass.launch.kubernetes.pod_checks import Place, pod_problems
from windlass.runfile.kinds import LABEL, SUBDOMAIN

OVERRIDES = ("podSpecOverrides", "podTemplateOverrides", "runtimePatches")
MANAGER = re.compile(rf"{SUBDOMAIN}/[A-Za-z0-9/._~%!$&'()*+,;=:-]+")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
RULE = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]{0,126}[A-Za-z0-9_])?")  # JobSet's webhook: ruleNameFmt
REASONS = ("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy")
OURS = "windlass wrote this: report it, with the file"
KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


def problems(documents: Sequence[Any], file: str = "job.yaml") -> list[Problem]:
    """All of them, each with its place and the next step: where that is not the user's, windlass is at fault."""
    found: list[Problem] = []
    sound = [one for one in documents if isinstance(one, dict)]
    if len(sound) != len(documents) or not sound:
        found.append(Problem("holds something that is no object", file, "each document has apiVersion, kind, metadata"))
    for document in sound:
        place = Place(file, str(document.get("kind", "?")))
        found += _object(document, place)
        body = _BODIES.get(str(document.get("kind")))
        if body and not found_shape(document, place):
            found += body(document, place)
    return [one if one.hint else replace(one, hint=OURS) for one in (*found, *_together(sound, file))]


def found_shape(document: dict[str, Any], place: Place) -> list[Problem]:
    """Lists, mappings, numbers and texts where they belong: else nothing further in can be looked at."""
    return list(_shapes(document, place, ""))


def _shapes(value: Any, place: Place, name: str) -> Iterator[Problem]:
    wanted: tuple[type, str] | None = None
    if name in LISTS:
        wanted = (list, "a list")
    elif name in MAPPINGS:
        wanted = (dict, "a mapping")
    elif name in NUMBERS:
        wanted = (int, "a whole number")
    elif name in TEXTS:
        wanted = (str, "text, in quotes where it looks like something else")
    if wanted and (not isinstance(value, wanted[0]) or (wanted[0] is int and isinstance(value, bool))):
        yield place.problem(f"is {value!r}, and must be {wanted[1]}")
        return
    if isinstance(value, dict):
        keys = allowed(name)
        for key, inner in value.items():
            if keys is not None and key not in keys:
                yield place.at(str(key)).problem("no such field", f"known are {', '.join(sorted(keys))}")
            yield from _shapes(inner, place.at(str(key)), _role(name, str(key)))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _shapes(inner, place.at(index), f"{name}[]")


def _role(parent: str, key: str) -> str:
    """A key's meaning; inside free mappings keys are the user's own."""
    return f"{parent}.*" if parent in NAMES else key


def _object(document: dict[str, Any], place: Place) -> Iterator[Problem]:
    kind, version = document.get("kind"), document.get("apiVersion")
    if kind not in KINDS:
        yield place.problem(f"unknown kind {kind!r}", f"one of {', '.join(KINDS)}")
    elif version != KINDS[kind]:
        yield place.at("apiVersion").problem(f"is {version!r}", f"{kind} is of {KINDS[kind]}")
    yield from found_shape(document, place)
    metadata = document.get("metadata")
    if not isinstance(metadata, dict) or "name" not in metadata:
        yield place.at("metadata").problem("has no name")
        return
    name = metadata["name"]
    form = LABEL if kind == "Service" else SUBDOMAIN
    if not isinstance(name, str) or not re.fullmatch(form, name) or (kind == "Service" and name[:1].isdigit()):
        yield place.at("metadata", "name").problem(f"{name!r} is no name", "small letters, digits and dashes")
    elif kind != "ConfigMap" and len(name) > (most := name_letters(_count(document))):
        hint = "pods' names are made from it, up to 63"
        yield place.at("metadata", "name").problem(f"has more than {most} letters", hint)
    if "namespace" in metadata and not re.fullmatch(LABEL, str(metadata["namespace"])):
        yield place.at("metadata", "namespace").problem(
            f"{metadata['namespace']!r} is no namespace", "change cluster.namespace"
        )
    yield from labels(metadata, place.at("metadata"))


def _count(value: Any) -> int:
    """How many pods there are, wherever a kind says that."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    said = value if isinstance(value, dict) else {}
    counts = [said.get(name) for name in ("completions", "numNodes", "replicas")]
    return max([1, *(one for one in counts if isinstance(one, int)), *map(_count, inner)])


def labels(metadata: Any, place: Place) -> Iterator[Problem]:
    for kind in ("labels", "annotations"):
        found = metadata.get(kind) if isinstance(metadata, dict) else None
        for key, value in found.items() if isinstance(found, dict) else ():
            here = place.at(kind, str(key))
            if not KEY.fullmatch(str(key)):
                yield here.problem("is no key of a label or annotation", f"change cluster.{kind}")
            if not isinstance(value, str):
                yield here.problem(f"is {value!r}, and must be text", "put it in quotes")
            elif kind == "labels" and not LABEL_VALUE.fullmatch(value):
                yield here.problem(f"{value!r} is no label", "at most 63 letters, digits, dashes, dots, underscores")


def _config_map(document: dict[str, Any], place: Place) -> Iterator[Problem]:
    data = document.get("data", {})
    for key, value in data.items():
        if not re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", str(key)):
            yield place.at("data", str(key)).problem("is no file name of a ConfigMap")
        if not isinstance(value, str):
            yield place.at("data", str(key)).problem("must be text")
    if sum(len(str(value).encode()) for value in data.values()) > 1024 * 1024:
        yield place.at("data").problem("has more than 1 MiB", "a server takes no larger ConfigMap")


def _service(document: dict[str, Any], place: Place) -> Iterator[Problem]:
    spec = document.get("spec", {})
    if spec.get("clusterIP") != "None":
        yield place.at("spec", "clusterIP").problem("must be None", "only a headless Service names single pods")
    if not spec.get("selector"):
        yield place.at("spec", "selector").problem("selects nothing")
    if spec.get("publishNotReadyAddresses") is not True:
        yield place.at("spec").problem("publishNotReadyAddresses must be true", "nodes look for node 0 at once")


def _job(document: dict[str, Any], place: Place) -> Iterator[Problem]:
    yield from _job_spec(document.get("spec", {}), place.at("spec"))


def _job_spec(spec: dict[str, Any], place: Place) -> Iterator[Problem]:
    count, width = spec.get("completions"), spec.get("parallelism")
    if spec.get("completionMode") != "Indexed":
        yield place.at("completionMode").problem("must be Indexed", "a pod's number is its node's")
    if not isinstance(count, int) or count < 1 or count != width:
        yield place.problem(f"completions {count} and parallelism {width}", "both are the number of nodes")
    for name, least in (("backoffLimit", 0), ("activeDeadlineSeconds", 1)):
        if name in spec and spec[name] < least:
            yield place.at(name).problem(f"is {spec[name]}, and must be at least {least}")
    template = spec.get("template", {})
    yield from labels(template.get("metadata", {}), place.at("template", "metadata"))
    pod = template.get("spec", {})
    yield from pod_problems(pod, place.at("template", "spec"), whole=True)
    if pod.get("restartPolicy") not in ("Never", "OnFailure"):
        yield place.at("template", "spec", "restartPolicy").problem("must be Never or OnFailure", "write Never")
    yield from _failure_policy(spec, pod, place)


def _failure_policy(spec: dict[str, Any], pod: dict[str, Any], place: Place) -> Iterator[Problem]:
    if "podFailurePolicy" not in spec:
        return
    place = place.at("podFailurePolicy")
    if pod.get("restartPolicy") != "Never":
        yield place.problem("works only with restartPolicy: Never")
    containers = {container.get("name") for container in pod.get("containers", ())}
    for index, rule in enumerate(spec["podFailurePolicy"].get("rules", ())):
        here = place.at("rules", index)
        codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions")
        if rule.get("action") not in ("FailJob", "FailIndex", "Ignore", "Count"):
            yield here.at("action").problem(f"unknown action {rule.get('action')!r}")
        if (codes is None) == (conditions is None):
            yield here.problem("must have either onExitCodes or onPodConditions")
        if codes:
            if codes.get("containerName", NODE_ANY) not in {NODE_ANY, *containers}:
                yield here.problem(f"no container is called {codes['containerName']}")
            if codes.get("operator") not in ("In", "NotIn") or not codes.get("values"):
                yield here.problem("onExitCodes needs operator In or NotIn, and values")
            elif codes["operator"] == "In" and 0 in codes["values"]:
                yield here.problem("0 is no failure", "take it out of values")


NODE_ANY = object()


def _jobset(document: dict[str, Any], place: Place) -> Iterator[Problem]:
    spec = document.get("spec", {})
    jobs = spec.get("replicatedJobs") or []
    if not jobs:
        yield place.at("spec", "replicatedJobs").problem("is empty")
    for index, job in enumerate(jobs):
        here = place.at("spec", "replicatedJobs", index)
        if not re.fullmatch(LABEL, str(job.get("name", ""))):
            yield here.at("name").problem(f"{job.get('name')!r} is no name")
        yield from _job_spec(job.get("template", {}).get("spec", {}), here.at("template", "spec"))
    for index, rule in enumerate(spec.get("failurePolicy", {}).get("rules", ())):
        here = place.at("spec", "failurePolicy", "rules", index)
        if rule.get("action") not in ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"):
            yield here.at("action").problem(f"unknown action {rule.get('action')!r}")
        if not RULE.fullmatch(str(rule.get("name", "rule"))):
            hint = "letters, digits, underscores, commas and colons, beginning with a letter"
            yield here.at("name").problem(f"{rule['name']!r} is no name of a rule", hint)
        for reason in set(map(str, rule.get("onJobFailureReasons") or ())) - set(REASONS):
            yield here.at("onJobFailureReasons").problem(f"{reason!r} is no reason", f"one of {', '.join(REASONS)}")


def _pytorchjob(document: dict[str, Any], place: Place) -> Iterator[Problem]:
    spec = document.get("spec", {})
    replicas = spec.get("pytorchReplicaSpecs", {})
    if replicas.get("Master", {}).get("replicas") != 1:
        yield place.at("spec", "pytorchReplicaSpecs").problem("there must be one Master")
    for name, replica in replicas.items():
        here = place.at("spec", "pytorchReplicaSpecs", name)
        if name not in ("Master", "Worker"):
            yield here.problem("no such replica", "Master and Worker")
        if not isinstance(replica.get("replicas"), int) or replica["replicas"] < 1:
            yield here.at("replicas").problem(f"is {replica.get('replicas')}, and must be at least 1")
        if replica.get("restartPolicy") not in ("Always", "OnFailure", "Never", "ExitCode"):
            yield here.at("restartPolicy").problem(f"unknown policy {replica.get('restartPolicy')!r}")
        template = replica.get("template", {})
        pod = template.get("spec", {})
        yield from labels(template.get("metadata", {}), here.at("template", "metadata"))
        yield from pod_problems(pod, here.at("template", "spec"), whole=True)
        if "pytorch" not in {container.get("name") for container in pod.get("containers", ())}:
            yield here.problem("no container is called pytorch", "the operator looks for that name")


def _trainjob(document: dict[str, Any], place: Place) -> Iterator[Problem]:
    spec, place = document.get("spec", {}), place.at("spec")
    if not spec.get("runtimeRef", {}).get("name"):
        yield place.at("runtimeRef").problem("names no runtime")
    styles = [name for name in OVERRIDES if name in spec]
    if len(styles) > 1:
        yield place.problem(f"{' and '.join(styles)} are of different versions of Kubeflow Trainer", "keep one")
    trainer = spec.get("trainer", {})
    here = place.at("trainer")
    if not trainer.get("image") or re.search(r"\s", str(trainer["image"])):
        yield here.at("image").problem("no image")
    for name in ("numNodes", "numProcPerNode"):
        if not isinstance(trainer.get(name), int) or trainer[name] < 1:
            yield here.at(name).problem(f"is {trainer.get(name)!r}, and must be a number of at least 1")
    container = {**trainer, "name": "node", "resources": trainer.get("resourcesPerNode", {})}
    yield from pod_problems({"containers": [container]}, here, whole=False)
    for entry in trainer.get("env", ()):
        if str(entry.get("name", "")).startswith("PET_"):
            yield here.at("env").problem(f"{entry['name']} is the runtime's to set", "take it out")
    for style in styles:
        for index, patch in enumerate(spec[style]):
            yield from _patch(patch, style, place.at(style, index))


def _patch(patch: dict[str, Any], style: str, place: Place) -> Iterator[Problem]:
    if style == "runtimePatches":
        if not MANAGER.fullmatch(str(patch.get("manager", ""))):
            yield place.at("manager").problem(
                f"{patch.get('manager')!r} is no domain with a path", "windlass.dev/submit"
            )
        inner = patch.get("trainingRuntimeSpec", {}).get("template", {}).get("spec", {}).get("replicatedJobs", [])
        pods = [job.get("template", {}).get("spec", {}).get("template", {}) for job in inner]
        if not pods:
            yield place.problem("changes nothing", "trainingRuntimeSpec.template.spec.replicatedJobs")
    else:
        if not patch.get("targetJobs"):
            yield place.at("targetJobs").problem("names no job")
        pods = [patch if style == "podTemplateOverrides" else {"spec": patch}]
    for template in pods:
        yield from labels(template.get("metadata", {}), place.at("metadata"))
        yield from pod_problems(template.get("spec", {}), place, whole=False)
        for container in template.get("spec", {}).get("containers", ()):
            for name in ("env", "resources"):
                if name in container and container.get("name") == "node":
                    yield place.problem(f"{name} of container node can't be patched", f"say it in trainer.{name}")


_BODIES: dict[str, Callable[[dict[str, Any], Place], Iterator[Problem]]] = {
    "ConfigMap": _config_map,
    "Service": _service,
    "Job": _job,
    "JobSet": _jobset,
    "PyTorchJob": _pytorchjob,
    "TrainJob": _trainjob,
}


def _together(documents: Sequence[dict[str, Any]], file: str) -> Iterator[Problem]:
    """What one object says of another."""
    names = [(one.get("kind"), _name(one)) for one in documents]
    for pair in {pair for pair in names if names.count(pair) > 1}:
        yield Problem(f"{pair[0]} {pair[1]} is there twice", file, "keep one")
    spaces = {str((one.get("metadata") or {}).get("namespace")) for one in documents}
    if len(spaces) > 1:
        yield Problem(f"objects are in different namespaces: {', '.join(sorted(spaces))}", file, "put them in one")
    maps = {name for kind, name in names if kind == "ConfigMap"}
    for name in _named(documents, "configMap"):
        if name not in maps:
            yield Problem(f"the ConfigMap {name} is mounted, and is not here", file, "create it with the job")
    services = {name: one for one, (kind, name) in zip(documents, names, strict=True) if kind == "Service"}
    for one in documents:
        if one.get("kind") == "Job" and isinstance(one.get("spec"), dict):
            yield from _subdomain(one, services, file)


def _subdomain(job: dict[str, Any], services: dict[str, Any], file: str) -> Iterator[Problem]:
    """Pods of an indexed Job have names only by way of a Service."""
    pod = ((job["spec"].get("template") or {}).get("spec")) or {}
    subdomain, place = pod.get("subdomain"), Place(file, "Job").at("spec", "template", "spec", "subdomain")
    if (job["spec"].get("completions") or 1) != 1 and subdomain not in services:
        yield place.problem(f"{subdomain!r} is no Service of these", "node 0 would have no name")
    selector = services.get(str(subdomain), {}).get("spec", {}).get("selector") or {}
    if selector and selector != {"batch.kubernetes.io/job-name": _name(job)}:
        yield Problem(f"the Service {subdomain} does not select the pods of {_name(job)}", file, "by job-name")


def _name(document: dict[str, Any]) -> str:
    metadata = document.get("metadata")
    return str(metadata.get("name")) if isinstance(metadata, dict) else "?"


def _named(value: Any, kind: str) -> Iterator[str]:
    """Names of all objects of a kind that are referred to, at whatever depth."""
    if isinstance(value, dict):
        inner = value.get(kind)
        if isinstance(inner, dict) and "name" in inner:
            yield str(inner["name"])
        for one in value.values():
            yield from _named(one, kind)
    elif isinstance(value, list):
        for one in value:
            yield from _named(one, kind)
