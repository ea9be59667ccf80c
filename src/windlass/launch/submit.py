"""Files into the run folder, then one call of the platform's own client; and what became of it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.errors import Problem, RunError, UserError, raise_all
from windlass.launch import PLATFORMS, kubernetes, local, pods, runai, script
from windlass.launch.job import Job, environment_notes, job_of, name_letters
from windlass.launch.job import words as words_of
from windlass.launch.kubernetes import checks, cluster, engines
from windlass.observe import steps
from windlass.plan.script import AnyPlan, ScriptPlan
from windlass.runfile import Loaded, LoadedScript
from windlass.runfile.machines import admission

if TYPE_CHECKING:
    from windlass.launch.runai_api import ControlPlane

RECORD = "submitted.json"
START_SECONDS = 24 * 3600  # --follow waits so long for all pods: queues may be long
Say = Callable[[str], None]


def texts(
    plan: AnyPlan,
    to: str,
    *,
    overrides: Sequence[str] = (),
    accelerate: Path | None = None,
    engine: str | None = None,
    version: str | None = None,
    api: bool = False,
) -> dict[str, str]:
    """All files of one platform, or everything that is wrong."""
    job = job_of(plan, overrides=overrides, accelerate=accelerate)
    engine, version = _engine(job, engine), _version(job, version)
    if api and to != "runai":
        raise UserError(f"{to} has no API that windlass speaks", "--api", "it is for --to runai")
    raise_all([*_problems(plan, job, to, engine, version)])
    if to == "local":
        return {}
    if to == "script":
        return script.texts(job)
    if to == "runai":
        return runai.texts(job) | (_payload(job) if api else {})
    raise_all(checks.problems(kubernetes.manifests(job, engine, version)))
    return kubernetes.texts(job, engine, version)


def _payload(job: Job) -> dict[str, str]:
    from windlass.launch import runai_api  # it brings what speaks HTTP, which nobody else waits for

    return {"payload.json": runai_api.text(runai_api.payload(job))}


def _engine(job: Job, found: str | None) -> str:
    asked = job.cluster.engine
    return found or (kubernetes.DEFAULT_ENGINE if asked == "auto" else asked)


def _version(job: Job, found: str | None) -> str:
    return found or job.cluster.trainer_version or engines.TRAINER


def _problems(plan: AnyPlan, job: Job, to: str, engine: str, version: str) -> Iterator[Problem]:
    where = plan.loaded.where
    if to == "local" and job.nodes > 1:
        hint = "--to script makes a script for each node; --to runai and --to kubernetes start them"
        yield Problem(f"{job.nodes} nodes, and this is one", where("cluster.nodes"), hint)
    if to in ("runai", "kubernetes"):
        yield from pods.problems(plan, job)
    if to == "runai":
        yield from runai.problems(job, where)
    if to == "kubernetes" and len(job.name) > (most := name_letters(job.nodes)):
        what = f"{job.name} has {len(job.name)} letters, and with {job.nodes} nodes at most {most} are possible"
        yield Problem(what, where("name"), "pods' names are made from it and the node's number: up to 63 together")
    if to == "kubernetes" and engine == "trainer":
        if version not in engines.STYLES:
            hint = f"known are {', '.join(engines.STYLES)}"
            yield Problem(f"Kubeflow Trainer {version} is not known", where("cluster.trainer_version"), hint)
            return
        for key, why in engines.not_said(job, version).items():
            yield Problem(why, where(key), "take cluster.engine: jobset, or leave it to the runtime")


def notes(plan: AnyPlan, to: str, *, engine: str | None = None, version: str | None = None) -> tuple[str, ...]:
    """What should be known before it is sent: keys without effect there, policies that are needed, defaults taken."""
    section, where = plan.loaded.run.cluster, plan.loaded.where
    found = [*environment_notes(section)]
    if to == "runai":
        found += pods.notes(section, runai.NOT_TAKEN, "Run:ai")
    if to == "kubernetes":
        found += pods.notes(section, kubernetes.NOT_TAKEN, "Kubernetes")
        if section.engine == "auto" and engine is None:
            found.append(f"{where('cluster.engine')}: auto, and no cluster was asked: an indexed Job, which all have")
        chosen, spoken = engine or section.engine, version or section.trainer_version or engines.TRAINER
        if section.user is None and (chosen != "trainer" or "securityContext" in engines.POD_FIELDS.get(spoken, ())):
            found.append(
                f"{where('cluster.user')}: none is named: the image's own, which must not be root (runAsNonRoot)"
            )
        if chosen == "trainer" and section.trainer_version is None and version is None:
            found.append(f"{where('cluster.trainer_version')}: no cluster was asked: written for {engines.TRAINER}")
        if chosen == "trainer":
            found.append(f"restarts are the runtime's ({section.runtime}): cluster.max_restarts has no effect")
            if "terminationGracePeriodSeconds" not in engines.POD_FIELDS.get(spoken, ()):
                found.append(
                    f"{section.runtime} has to say terminationGracePeriodSeconds: Trainer {spoken}'s jobs can't"
                )
    if to in ("runai", "kubernetes"):
        found += admission(section, where)
        if section.image and "@sha256:" not in section.image:
            found.append(f"{where('cluster.image')}: a tag may change between two starts of one run; name a digest")
    if remedy := _does_not_fit(plan):
        found.append(f"it does not fit: {remedy}")
    return tuple(found)


def _does_not_fit(plan: AnyPlan) -> str:
    """The remedy, where the plan knows that it doesn't; of a script nobody knows."""
    return "" if isinstance(plan, ScriptPlan) or plan.cost.fits else plan.cost.remedy


def folder_of(loaded: Loaded | LoadedScript, to: str, out: Path | None = None) -> Path:
    """Where the files go: the run folder, unless that lies on a volume that this machine does not have."""
    run = loaded.run
    folder = Path(run.folder)
    if out is not None or to in ("local", "script"):
        return out or folder
    here = folder.exists() or any(
        folder.is_relative_to(volume.path) and Path(volume.path).is_dir() for volume in run.cluster.volumes
    )
    return folder if here else Path(f"{run.name or folder.name}-job")


def submit(
    plan: AnyPlan,
    to: str,
    *,
    overrides: Sequence[str] = (),
    accelerate: Path | None = None,
    out: Path | None = None,
    dry_run: bool = False,
    follow: bool = False,
    api: bool = False,
    plane: ControlPlane | None = None,
    say: Say,
) -> int:
    """Write the files and start the run. Returns an exit code.

    api: Run:ai over REST, by `plane` where the environment names one.
    """
    # What the run file alone tells is told before a cluster is asked.
    raise_all([*_problems(plan, job_of(plan, overrides=overrides, accelerate=accelerate), to, "", "")])
    engine, version = _look(plan, to, dry_run=dry_run)
    made = texts(plan, to, overrides=overrides, accelerate=accelerate, engine=engine, version=version, api=api)
    for note in notes(plan, to, engine=engine, version=version):
        say(f"note: {note}")
    job = job_of(plan, overrides=overrides, accelerate=accelerate)
    folder = folder_of(plan.loaded, to, out)
    order = Order(plan, job, to, folder, _engine(job, engine), _version(job, version), made, follow, say)
    if made:
        write(order.folder, made)
        say(f"written to {order.folder}: {', '.join(made)}")
    train = [str(plan.loaded.path), *(word for one in overrides for word in ("--override", one))]
    train += ["--accelerate", str(accelerate)] if accelerate else []
    if dry_run:
        if to == "local":
            say(f"nothing is written; it would start: windlass train {words_of(train)} --resume")
        return 0
    if remedy := _does_not_fit(plan):
        raise UserError("the plan says that it does not fit", str(plan.loaded.path), remedy)
    if to == "local":
        local.refuse_two(order.folder / RECORD)
        order.keep(**local.about())
        local.begin(train)
    if to == "script":
        order.keep()
        say(f"on each node: bash {order.folder / 'launch.sh'} (its first lines say how)")
        return 0
    if to == "kubernetes":
        return _kubernetes(order)
    return _runai_api(order, plane) if api else _runai(order)


@dataclass(frozen=True, slots=True)
class Order:
    """One submission: what every platform's own part of it needs."""

    plan: AnyPlan
    job: Job
    to: str
    folder: Path  # where the files are
    engine: str
    version: str
    made: dict[str, str]
    follow: bool
    say: Say

    def keep(self, **more: Any) -> None:
        """The record by which status, logs and stop find it again."""
        facts = {
            "platform": self.to,
            "name": self.job.name,
            "engine": self.engine if self.to == "kubernetes" else None,
            "namespace": self.job.cluster.namespace,
            "project": self.job.cluster.project,
            "nodes": self.job.nodes,
            "submitted": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        }
        write(self.folder, {RECORD: json.dumps(facts | more, indent=2) + "\n"})

    def sent(self, **more: Any) -> int:
        self.keep(**more)
        return logs(self.folder, Path(self.job.folder), follow=True, say=self.say) if self.follow else 0

    def reachable(self, then: str) -> bool:
        """Whether the files lie where the pods will look; else what is to be done."""
        if self.folder != Path(self.job.folder):
            there = f"{self.job.folder} is not here: copy launch.sh, run.yaml and accelerate.yaml there"
            self.say(f"{there}, onto the pods' volume; then: {then}")
        return self.folder == Path(self.job.folder)


def _look(plan: AnyPlan, to: str, *, dry_run: bool) -> tuple[str | None, str | None]:
    """Engine and version by what the cluster has, where one may be asked."""
    section = plan.loaded.run.cluster
    if to != "kubernetes" or dry_run or cluster.client() is None:
        return None, None
    engine = cluster.found_engine(section.engine)
    ask = engine == "trainer" and section.trainer_version is None
    return engine, cluster.found_version() if ask else None


def _kubernetes(order: Order) -> int:
    if cluster.client() is None:
        order.say(f"kubectl is not here; where it is: kubectl apply -f {order.folder / 'job.yaml'}")
        return 0
    job = order.job
    free = f"{job.name[: name_letters(job.nodes) - 7]}-{secrets.token_hex(3)}"
    trial = kubernetes.texts(replace(job, name=free), order.engine, order.version)["job.yaml"]
    cluster.create(job, order.engine, order.made["job.yaml"], trial, order.plan.loaded.where, order.say)
    return order.sent()


def _runai(order: Order) -> int:
    by_hand = f"bash {order.folder / 'submit.sh'}"
    if not order.reachable(by_hand):
        return 0
    if shutil.which("runai") is None:
        order.say(f"runai is not here; where it is: {by_hand}")
        return 0
    code = subprocess.run(runai.command(order.job), check=False).returncode
    if code:
        hint = "not logged in: runai login; the name is taken: windlass stop RUN, or another name"
        raise RunError(f"runai ended with {code}: its own words stand above", by_hand, hint)
    return order.sent()


def _runai_api(order: Order, plane: ControlPlane | None) -> int:
    from windlass.launch import runai_api

    payload = order.folder / "payload.json"
    if plane is None:
        order.say(
            f"{runai_api.URL} and {runai_api.TOKEN} are not set: export them and submit again; or put the numbers of "
            f"project and cluster into {payload}, and POST it to {runai_api.path(order.job.nodes)}"
        )
        return 0
    if not order.reachable("submit again where that folder is"):
        return 0
    number = runai_api.create(
        order.job, plane, order.plan.loaded.where, lambda text: write(order.folder, {payload.name: text})
    )
    order.say(f"{order.job.name} is created{f', number {number}' if number else ''}")
    return order.sent(workload=number)


def write(folder: Path, named: dict[str, str]) -> None:
    """Each whole or not at all: nodes of a run may be reading what is replaced."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in named.items():
            part = folder / f".{name}.{os.getpid()}"
            try:
                part.write_text(text, encoding="utf-8", newline="\n")  # bash reads no \r\n, wherever this is written
                if name.endswith(".sh"):
                    part.chmod(0o755)
                part.replace(folder / name)
            finally:
                part.unlink(missing_ok=True)
    except OSError as error:
        hint = "set output_dir to a folder that can be, or give another --out DIR"
        raise UserError(f"can't be written: {error.strerror}", str(folder), hint) from None


# --- what was submitted ---------------------------------------------------------------------------------------------


def find(loaded: Loaded | LoadedScript, out: Path | None = None) -> Path:
    """Where this run's job left its record."""
    folders = [folder_of(loaded, to, out) for to in ("script", "runai")]
    return next((folder for folder in folders if (folder / RECORD).exists()), folders[0])


def submitted(folder: Path) -> dict[str, Any]:
    path = folder / RECORD
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.get("platform") not in PLATFORMS:
            raise ValueError("it names no platform")
        return found
    except FileNotFoundError:
        if (folder / steps.MANIFEST).exists():  # `windlass train`, or launch.sh that was carried here
            return {"platform": "script"}
        raise UserError(
            "nothing was submitted from here", str(path), "windlass submit RUN; or the --out that it was given"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"can't be read: {error}", str(path), "windlass submit writes it anew") from None


def _runai_words(facts: dict[str, Any], *words: str) -> list[str]:
    return runai.verb(facts["name"], facts["nodes"], facts["project"], *words)


def status(folder: Path, run: Path) -> int:
    """`folder`: where the record is; `run`: the run folder."""
    facts = submitted(folder)
    if facts["platform"] == "runai":
        return _pass_on(_runai_words(facts, "describe"))
    if facts["platform"] == "kubernetes":
        print(cluster.status(facts["name"], facts["engine"], facts["namespace"]))
    else:
        print(local.status(run, facts))
    return 0


def logs(folder: Path, run: Path, *, follow: bool, say: Say) -> int:
    facts = submitted(folder)
    if facts["platform"] == "runai":
        return _pass_on(_runai_words(facts, "logs", *(["--follow"] if follow else [])))
    if facts["platform"] != "kubernetes":
        raise local.by_hand("logs", run, folder / RECORD)
    name, engine, namespace = facts["name"], facts["engine"], facts["namespace"]
    if follow:
        return cluster.follow(name, engine, namespace, facts["nodes"], say, START_SECONDS)
    return cluster.logs(name, engine, namespace)


def stop(folder: Path, run: Path, say: Say) -> int:
    """Pods are given their grace to save; submitting again resumes from there."""
    facts = submitted(folder)
    if facts["platform"] == "runai":
        return _pass_on(_runai_words(facts, "delete"))
    if facts["platform"] == "kubernetes":
        say(cluster.delete(facts["name"], facts["engine"], facts["namespace"]))
    elif facts["platform"] == "local":
        say(local.stop(run, facts, folder / RECORD))
    else:
        raise local.by_hand("stop", run, folder / RECORD)
    return 0


def _pass_on(command: list[str]) -> int:
    try:
        return subprocess.run(command, check=False).returncode
    except OSError as error:
        raise UserError(f"{command[0]} can't be run: {error.strerror}", command[0], "install it") from None
