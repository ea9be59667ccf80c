"""The cluster, through its own client: what is installed, what is missing, create, look, stop."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from windlass.errors import Problem, RunError, UserError
from windlass.launch.job import Job
from windlass.launch.kubernetes.engines import TRAINER
from windlass.launch.kubernetes.pod import RUN_LABEL

KUBECTL = "kubectl"
OURS = "app.kubernetes.io/managed-by=windlass"
SECONDS = 60  # for one answer
PAUSE_SECONDS = 2.0  # between two questions for the same thing
OVER_GRACE_SECONDS = 60  # pods that were told to end are gone by then
RESOURCES = {
    "trainer": "trainjobs.trainer.kubeflow.org",
    "pytorchjob": "pytorchjobs.kubeflow.org",
    "jobset": "jobsets.jobset.x-k8s.io",
    "job": "jobs.batch",
}
LOG = re.compile(r"^[EWIF]\d{4} .*\n?", re.MULTILINE)  # kubectl logs each of its tries before it says what is wrong
HINTS = {
    r"refused|no such host|unable to connect|timeout|timed out|context .* does not exist|no configuration": (
        "kubectl config get-contexts shows which cluster is meant; --dry-run writes the files without one"
    ),
    r"unauthorized|logged in|provide credentials": "log in to the cluster again, or --dry-run",
    r"forbidden": "ask for that right in the namespace, or name another cluster.namespace",
}
WELL = ("Complete", "Completed", "Succeeded")
ENDED = (*WELL, "Failed", "FailureTarget")


def client() -> str | None:
    return shutil.which(KUBECTL)


def kubectl(*words: str, namespace: str | None = None, feed: str | None = None) -> subprocess.CompletedProcess[str]:
    """One call; whatever it says is kept."""
    command = _command(words, namespace)
    try:
        return subprocess.run(command, input=feed, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise RunError(f"no answer within {SECONDS} s", " ".join(command), "is the cluster reachable?") from None
    except OSError as error:
        raise _not_here(error) from None


def _command(words: Sequence[str], namespace: str | None) -> list[str]:
    return [KUBECTL, *(["--namespace", namespace] if namespace else []), *words]


def _not_here(error: OSError) -> UserError:
    return UserError(f"{KUBECTL} can't be run: {error.strerror}", "PATH", "install it; submit --dry-run needs none")


def must(done: subprocess.CompletedProcess[str]) -> str:
    """Its output; its own words where it failed, without its log."""
    if done.returncode:
        said = LOG.sub("", done.stderr).strip() or done.stderr.strip() or f"ended with {done.returncode}"
        hint = next((hint for words, hint in HINTS.items() if re.search(words, said, re.IGNORECASE)), "")
        raise RunError(said, " ".join(done.args[:6]), hint)
    return done.stdout


def found_engine(asked: str) -> str:
    """cluster.engine, or the first that is installed. Everybody who is logged in may ask what kinds there are."""
    if asked != "auto":
        return asked
    done = kubectl("api-resources", "--output", "name")  # fails for one group that does not answer, and names the rest
    there = set((done.stdout or must(done)).split())
    return next((engine for engine, resource in RESOURCES.items() if resource in there), "job")


def found_version() -> str:
    """Kubeflow Trainer's version, told by the fields of its TrainJob: definitions themselves are not for everybody."""
    return version_of(json.loads(must(kubectl("get", "--raw", "/openapi/v3/apis/trainer.kubeflow.org/v1alpha1"))))


def version_of(document: dict[str, Any]) -> str:
    schemas = document.get("components", {}).get("schemas", {})
    schema = json.dumps([one for name, one in schemas.items() if name.endswith(".TrainJob")])
    if '"runtimePatches"' in schema:
        return "2.3" if '"terminationGracePeriodSeconds"' in schema else "2.2"
    for name, version in (('"podTemplateOverrides"', "2.1"), ('"podSpecOverrides"', "2.0")):
        if name in schema:
            return version
    return TRAINER


def missing(job: Job, engine: str, where: Callable[[str], str]) -> tuple[list[Problem], list[str]]:
    """What the run refers to and the cluster lacks; and what could not be looked at."""
    problems, unknown = [], []
    for kind, name, key in _references(job, engine):
        done = kubectl("get", kind, name, "--output", "name", namespace=job.cluster.namespace)
        if done.returncode == 0:
            continue
        if "NotFound" in done.stderr or "not found" in done.stderr:
            problems.append(Problem(f"the cluster has no {kind} {name}", where(key), _there(kind, job)))
        else:
            unknown.append(f"{kind} {name} could not be looked at: {done.stderr.strip()}")
    return problems, unknown


def _there(kind: str, job: Job) -> str:
    """What there is instead, where we may see it."""
    done = kubectl("get", kind, "--output", "name", namespace=job.cluster.namespace)
    names = [line.partition("/")[2] for line in done.stdout.split()] if done.returncode == 0 else []
    return f"it has {', '.join(names[:10])}" if names else f"kubectl get {kind}"


def _references(job: Job, engine: str) -> Iterator[tuple[str, str, str]]:
    cluster = job.cluster
    for index, volume in enumerate(cluster.volumes):
        yield "persistentvolumeclaim", volume.claim, f"cluster.volumes[{index}].claim"
    if cluster.queue:
        yield "localqueue.kueue.x-k8s.io", cluster.queue, "cluster.queue"
    if engine == "trainer":
        yield "clustertrainingruntime.trainer.kubeflow.org", cluster.runtime, "cluster.runtime"
    if cluster.service_account:
        yield "serviceaccount", cluster.service_account, "cluster.service_account"
    if cluster.priority_class:
        yield "priorityclass", cluster.priority_class, "cluster.priority_class"
    for name in dict.fromkeys(cluster.image_pull_secrets):
        yield "secret", name, "cluster.image_pull_secrets"
    for name, value in cluster.env.items():
        if not isinstance(value, str):
            yield "secret", value.secret, f"cluster.env.{name}"


def state(name: str, engine: str, namespace: str | None) -> str | None:
    """None: there is no such job; else `running` or how it ended."""
    done = kubectl("get", RESOURCES[engine], name, "--ignore-not-found", "--output", "json", namespace=namespace)
    text = must(done).strip()
    if not text:
        return None
    conditions = json.loads(text).get("status", {}).get("conditions", [])
    ended = [one["type"] for one in conditions if one.get("type") in ENDED and one.get("status") == "True"]
    return str(ended[0]) if ended else "running"


def create(
    job: Job, engine: str, manifest: str, trial: str, where: Callable[[str], str], say: Callable[[str], None]
) -> None:
    """Everything is asked before anything is made or deleted. A job that has ended is replaced, one that runs is not.

    trial: the same under another name. The server would compare `manifest` with the job that it is to replace.
    """
    problems, unknown = missing(job, engine, where)
    for line in unknown:
        say(line)
    namespace = job.cluster.namespace
    before = state(job.name, engine, namespace)
    if before == "running":
        hint = "wait for it, windlass stop RUN, or give another name"
        problems.append(Problem(f"{RESOURCES[engine]} {job.name} is there and has not ended", where("name"), hint))
    if problems:
        raise UserError.of(problems)
    words = ("apply", "--validate=strict", "--filename", "-")
    must(kubectl(*words, "--dry-run=server", namespace=namespace, feed=manifest if before is None else trial))
    if before is not None:
        say(f"{job.name} has ended ({before}): it is replaced, and the run resumes from its last checkpoint")
        must(kubectl("delete", RESOURCES[engine], job.name, "--wait=false", namespace=namespace))
    _until_gone(job, engine, say)
    done = kubectl(*words, namespace=namespace, feed=manifest)
    said = must(done).strip()
    if warnings := LOG.sub("", done.stderr).strip():  # such as: would violate PodSecurity
        say(warnings)
    say(said)


def _until_gone(job: Job, engine: str, say: Callable[[str], None]) -> None:
    """The job before and its pods, which may still be saving where the new ones would write."""
    seconds = job.grace_seconds + OVER_GRACE_SECONDS
    deadline, told = time.monotonic() + seconds, False
    while True:
        done = _phases(job.name, engine, job.cluster.namespace)
        if done.returncode:
            say(f"whether pods of a job before are left could not be looked at: {done.stderr.strip()}")
            return
        left = [phase for phase in done.stdout.split() if phase not in ("Succeeded", "Failed")]
        if not left and state(job.name, engine, job.cluster.namespace) is None:
            return
        what = f"the job before has {len(left)} {'pod' if len(left) == 1 else 'pods'} left"
        if time.monotonic() > deadline:
            hint = "one whose node is lost stays: kubectl delete pod --force, once that machine is surely off"
            raise RunError(f"{what} after {seconds} s", job.name, hint)
        if not told:
            say(f"{what}, which may be saving: waiting for the end")
            told = True
        time.sleep(PAUSE_SECONDS)


def _phases(name: str, engine: str, namespace: str | None) -> subprocess.CompletedProcess[str]:
    words = ("get", "pods", "--selector", selector(name, engine), "--output", "jsonpath={.items[*].status.phase}")
    return kubectl(*words, namespace=namespace)


def selector(name: str, engine: str) -> str:
    """Kubeflow Trainer's pods are a JobSet's, and its first versions give them no labels of ours."""
    return f"jobset.sigs.k8s.io/jobset-name={name}" if engine == "trainer" else f"{RUN_LABEL}={name},{OURS}"


def status(name: str, engine: str, namespace: str | None) -> str:
    job = kubectl("get", RESOURCES[engine], name, "--ignore-not-found", namespace=namespace)
    pods = kubectl("get", "pods", "--selector", selector(name, engine), "--output", "wide", namespace=namespace)
    return "\n".join(part for part in (must(job).strip(), must(pods).strip()) if part) or f"{name}: not there any more"


def logs(name: str, engine: str, namespace: str | None, *more: str) -> int:
    """Straight to this terminal."""
    words = ("logs", "--selector", selector(name, engine), "--prefix", "--tail=-1", *more)
    try:
        return subprocess.run(_command(words, namespace), check=False).returncode
    except OSError as error:
        raise _not_here(error) from None


def follow(
    name: str, engine: str, namespace: str | None, nodes: int, say: Callable[[str], None], seconds: float
) -> int:
    """Logs of all nodes until the job has ended, over its restarts too; how it ended is the exit code.

    seconds: for all pods to come, each time.
    """
    since: tuple[str, ...] = ()
    while True:
        how, pods = _until_started(name, engine, namespace, nodes, say, seconds)
        # Pods of earlier tries are read too, and as many as a try has may be made anew meanwhile.
        logs(name, engine, namespace, "--follow", f"--max-log-requests={pods + nodes}", *since)
        if how != "running":
            say(f"{name}: {how or 'not there any more'}")
            return 0 if how in WELL else 1
        # All of them have ended, or the connection broke: what is new is read, and nothing twice.
        since = (f"--since-time={time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}",)
        time.sleep(PAUSE_SECONDS)


def _until_started(
    name: str, engine: str, namespace: str | None, nodes: int, say: Callable[[str], None], seconds: float
) -> tuple[str | None, int]:
    """The job's state and how many pods it has, once none is waited for. What it waits for is said when it changes."""
    deadline, last = time.monotonic() + seconds, ""
    while time.monotonic() < deadline:
        how = state(name, engine, namespace)
        phases = must(_phases(name, engine, namespace)).split()
        if how != "running" or (len(phases) >= nodes and "Pending" not in phases):
            return how, len(phases)
        now = ", ".join(phases) or "no pod yet"
        if now != last:
            say(f"waiting: {now}")
        last = now
        time.sleep(PAUSE_SECONDS)
    raise RunError(f"not all pods have started within {seconds:.0f} s", name, "windlass status RUN")


def delete(name: str, engine: str, namespace: str | None) -> str:
    """The job, then its files; pods get their grace to save."""
    said = [must(kubectl("delete", RESOURCES[engine], name, "--ignore-not-found", "--wait=false", namespace=namespace))]
    kinds: Sequence[str] = ("service", "configmap")
    selected = ("--selector", f"{RUN_LABEL}={name},{OURS}")
    said += [must(kubectl("delete", kind, *selected, "--ignore-not-found", namespace=namespace)) for kind in kinds]
    return "".join(said).strip()
