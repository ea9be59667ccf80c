"""What is wrong with the pods inside a job."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from windlass.errors import Problem
from windlass.launch.pods import quantity
from windlass.runfile.kinds import LABEL, SUBDOMAIN
from windlass.variables import started

QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|[MGTPE]|[KMGTPE]i)?")
PLAIN = ("cpu", "memory", "ephemeral-storage")
MEETING = ("MASTER_ADDR", "MASTER_PORT")  # windlass writes them where no operator does; the run file can't
VOLUME_PATH = "change cluster.volumes[].path"


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a manifest: `job.yaml: Job spec.template.spec.containers[0]`."""

    file: str
    kind: str
    path: str = ""

    def at(self, *steps: str | int) -> Place:
        path = self.path
        for step in steps:
            path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
        return Place(self.file, self.kind, path)

    def problem(self, what: str, hint: str = "") -> Problem:
        return Problem(what, f"{self.file}: {self.kind} {self.path}".strip(), hint)


def pod_problems(pod: dict[str, Any], place: Place, *, whole: bool) -> Iterator[Problem]:
    """`whole`: a pod of our own; else what is changed of a runtime's."""
    containers = pod.get("containers") or []
    if not containers:
        yield place.at("containers").problem("there is none")
    volumes = pod.get("volumes") or []
    yield from _volumes(volumes, place.at("volumes"))
    names = {volume.get("name") for volume in volumes}
    mounted: set[Any] = set()
    for index, container in enumerate(containers):
        here = place.at("containers", index)
        yield from _container(container, here, whole=whole)
        mounts = container.get("volumeMounts") or []
        mounted |= {mount.get("name") for mount in mounts}
        yield from _mounts(mounts, names, here.at("volumeMounts"))
    for name in sorted(map(str, names - mounted)):
        yield place.at("volumes").problem(f"{name} is mounted nowhere", "mount it, or take it out")
    if pod.get("terminationGracePeriodSeconds", 1) < 1:
        yield place.at("terminationGracePeriodSeconds").problem("leaves no time to save", "raise cluster.grace_seconds")
    for index, one in enumerate(pod.get("tolerations") or []):
        yield from _toleration(one, place.at("tolerations", index))
    yield from _shared_memory(volumes, containers, place)
    yield from _security(pod, containers, volumes, place)
    for key, said in (("serviceAccountName", "service_account"), ("priorityClassName", "priority_class")):
        if key in pod and not re.fullmatch(SUBDOMAIN, str(pod[key])):
            yield place.at(key).problem(f"{pod[key]!r} is no name", f"change cluster.{said}")


def _container(container: dict[str, Any], place: Place, *, whole: bool) -> Iterator[Problem]:
    if not re.fullmatch(LABEL, str(container.get("name", ""))):
        yield place.at("name").problem(f"{container.get('name')!r} is no name")
    if whole and (not container.get("image") or re.search(r"\s", str(container["image"]))):
        yield place.at("image").problem("no image", "give cluster.image")
    if whole and not container.get("command"):
        yield place.at("command").problem("nothing is started")
    if "workingDir" in container and not str(container["workingDir"]).startswith("/"):
        yield place.at("workingDir").problem("must be an absolute path", "change cluster.working_dir")
    yield from _env(container.get("env") or [], place.at("env"))
    yield from _resources(container.get("resources") or {}, place.at("resources"))


def _env(entries: list[dict[str, Any]], place: Place) -> Iterator[Problem]:
    names = [entry.get("name") for entry in entries]
    for index, entry in enumerate(entries):
        name, here = str(entry.get("name", "")), place.at(index)
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield here.problem(f"{name!r} is no variable", "change cluster.env")
        if names.index(entry.get("name")) != index:
            yield here.problem(f"{name} is set twice", "the last one would count, in silence")
        if started(name) and name not in MEETING:
            yield here.problem(f"{name} is set by what starts the ranks", "take it out of cluster.env")
        if ("value" in entry) == ("valueFrom" in entry):
            yield here.problem(f"{name} must have either value or valueFrom")
        reference = (entry.get("valueFrom") or {}).get("secretKeyRef")
        if reference is not None and not (reference.get("name") and reference.get("key")):
            what = f"{name} needs the name of a secret and a key in it"
            yield here.problem(what, f"cluster.env.{name}: {{secret: NAME, key: KEY}}")


def _resources(resources: dict[str, Any], place: Place) -> Iterator[Problem]:
    requests, limits = resources.get("requests") or {}, resources.get("limits") or {}
    sound = True
    for kind, amounts in (("requests", requests), ("limits", limits)):
        for name, amount in amounts.items():
            if isinstance(amount, bool) or not QUANTITY.fullmatch(str(amount)):
                sound = False
                yield place.at(kind, name).problem(
                    f"{amount!r} is no quantity", f"such as 500m, 8, 64Gi, in cluster.{_said(kind, name)}"
                )
            elif name == "memory" and quantity(str(amount)) < 1024**2:
                yield place.at(kind, name).problem(
                    f"{amount} is less than 1 MiB", f"give a unit, such as Gi, in cluster.{_said(kind, name)}"
                )
            elif name not in PLAIN and "/" in name and not re.fullmatch(r"\d+", str(amount)):
                hint = f"write a whole number in cluster.{_said(kind, name)}"
                yield place.at(kind, name).problem(f"{amount!r} is no whole number of devices", hint)
            elif name not in PLAIN and "/" not in name:
                yield place.at(kind, name).problem(
                    "no such resource", f"devices are called domain/name in cluster.{_said(kind, name)}"
                )
    for name in {*requests, *limits} if sound else ():
        asked, most = requests.get(name), limits.get(name)
        if "/" in name and (most is None or quantity(str(asked if asked is not None else most)) != quantity(str(most))):
            yield place.problem(
                f"{name}: request {asked} and limit {most}", "devices are asked for as they are limited"
            )
        elif asked is not None and most is not None and quantity(str(asked)) > quantity(str(most)):
            yield place.problem(
                f"{name}: {asked} is asked for, and {most} is the limit", f"raise cluster.{_said('limits', name)}"
            )


def _said(kind: str, name: str) -> str:
    """The run file's key for an amount."""
    return {"cpu": "cpu", "memory": f"memory_{kind[:-1]}"}.get(name, f"extended_resources.{name}")


def _volumes(volumes: list[dict[str, Any]], place: Place) -> Iterator[Problem]:
    names = [volume.get("name") for volume in volumes]
    for index, volume in enumerate(volumes):
        here, name = place.at(index), volume.get("name")
        if not re.fullmatch(LABEL, str(name)):
            yield here.problem(f"{name!r} is no name")
        if names.index(name) != index:
            yield here.problem(f"{name} is there twice")
        kinds = [key for key in volume if key != "name"]
        if len(kinds) != 1:
            yield here.problem(f"{name} must be of one kind, and is of {len(kinds)}")
        claim = (volume.get("persistentVolumeClaim") or {}).get("claimName")
        if "persistentVolumeClaim" in volume and not re.fullmatch(SUBDOMAIN, str(claim)):
            yield here.problem(f"{claim!r} is no name of a claim", "change cluster.volumes[].claim")
        size = (volume.get("emptyDir") or {}).get("sizeLimit")
        if size is not None and not QUANTITY.fullmatch(str(size)):
            yield here.problem(f"{size!r} is no quantity")


def _mounts(mounts: list[dict[str, Any]], names: set[Any], place: Place) -> Iterator[Problem]:
    paths = [str(mount.get("mountPath", "")).rstrip("/") for mount in mounts]
    for index, mount in enumerate(mounts):
        path = str(mount.get("mountPath", ""))
        if mount.get("name") not in names:
            yield place.at(index).problem(f"there is no volume {mount.get('name')!r}")
        if not path.startswith("/") or ":" in path:
            yield place.at(index).problem(f"{path!r} is no absolute path (without colons)", VOLUME_PATH)
        elif paths.index(path.rstrip("/")) != index:
            yield place.at(index).problem(f"{path} is mounted twice", VOLUME_PATH)


def _toleration(one: dict[str, Any], place: Place) -> Iterator[Problem]:
    operator = one.get("operator", "Equal")
    if operator not in ("Exists", "Equal") or (operator == "Exists" and one.get("value")):
        yield place.problem("operator is Equal with a value, or Exists without one", "change cluster.tolerations")
    if one.get("effect") not in (None, "NoSchedule", "PreferNoSchedule", "NoExecute"):
        yield place.at("effect").problem(f"unknown effect {one['effect']!r}", "change cluster.tolerations")


def _shared_memory(volumes: list[Any], containers: list[Any], place: Place) -> Iterator[Problem]:
    sizes = [(one.get("emptyDir") or {}).get("sizeLimit") for one in volumes if _in_memory(one)]
    for container in containers:
        limit = ((container.get("resources") or {}).get("limits") or {}).get("memory")
        if limit is None or not QUANTITY.fullmatch(str(limit)):
            continue
        for size in sizes:
            if size is not None and QUANTITY.fullmatch(str(size)) and quantity(str(size)) >= quantity(str(limit)):
                what = f"memory is limited to {limit}, and {size} of /dev/shm counts in it"
                yield place.problem(what, "raise cluster.memory_limit")


def _in_memory(volume: dict[str, Any]) -> bool:
    return (volume.get("emptyDir") or {}).get("medium") == "Memory"


def _security(pod: dict[str, Any], containers: list[Any], volumes: list[Any], place: Place) -> Iterator[Problem]:
    """What OpenShift's restricted-v2 and the Pod Security level `restricted` refuse."""
    for key in ("hostNetwork", "hostIPC", "hostPID"):
        if pod.get(key):
            yield place.at(key).problem("is not admitted", "take it out")
    for volume in volumes:
        if "hostPath" in volume:
            yield place.at("volumes").problem(f"{volume.get('name')}: hostPath is not admitted", "use a claim")
    for index, container in enumerate(containers):
        context, here = container.get("securityContext") or {}, place.at("containers", index, "securityContext")
        for key in ("privileged", "allowPrivilegeEscalation"):
            if context.get(key):
                yield here.at(key).problem("is not admitted", "write false")
        added = (context.get("capabilities") or {}).get("add") or []
        if added:
            what = f"capabilities {', '.join(map(str, added))} are not admitted"
            yield here.problem(what, "IPC_LOCK does nothing for a user other than root: raise memlock on the node")
