"""The cluster, through its own client: what is installed, what is missing; create, observe and delete a job."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.errors import Problem, RunError, UserError, raise_all
from windlass.launch.job import Job, Submission

RUN_LABEL, MANAGED_BY = "app.kubernetes.io/instance", "app.kubernetes.io/managed-by"
SECONDS = 60  # for one answer
PAUSE_SECONDS = 2.0  # between two questions for the same thing
OVER_GRACE_SECONDS = 60  # pods that are stopping are gone by then
START_SECONDS = 24 * 3600  # --follow waits this long for all pods: queues may be long
RESOURCES = {  # by engine; `auto` takes the first that is installed
    "trainer": "trainjobs.trainer.kubeflow.org",
    "pytorchjob": "pytorchjobs.kubeflow.org",
    "jobset": "jobsets.jobset.x-k8s.io",
    "job": "jobs.batch",
}
# Fields of a TrainJob's schema by the version that introduced them, the newest first.
TRAINER_FIELDS = {"runtimePatches": "2.2", "podTemplateOverrides": "2.1", "podSpecOverrides": "2.0"}
LOG = re.compile(r"^[EWIF]\d{4} .*\n?", re.MULTILINE)  # kubectl logs each of its tries before it prints what is wrong
HINTS = {
    r"refused|no such host|unable to connect|timeout|timed out|context .* does not exist|no configuration": (
        "kubectl config get-contexts shows which cluster is used; --dry-run writes the files without one"
    ),
    r"unauthorized|logged in|provide credentials": "log in to the cluster again, or --dry-run",
    r"forbidden": "request that right in the namespace, or name another cluster.namespace",
}
SUCCEEDED = ("Complete", "Completed", "Succeeded")
ENDED = (*SUCCEEDED, "Failed", "FailureTarget")


def find() -> str | None:
    """OpenShift's oc takes the same commands."""
    return next((name for name in ("kubectl", "oc") if shutil.which(name)), None)


def run(*words: str, namespace: str | None = None, feed: str | None = None) -> subprocess.CompletedProcess[str]:
    """One call, with its output."""
    command = _command(words, namespace)
    try:
        return subprocess.run(command, input=feed, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise RunError(f"no answer within {SECONDS} s", " ".join(command), "is the cluster reachable?") from None
    except OSError as error:
        raise _not_here(error) from None


def _command(words: Sequence[str], namespace: str | None) -> list[str]:
    return [find() or "kubectl", *(["--namespace", namespace] if namespace else []), *words]


def _not_here(error: OSError) -> UserError:
    return UserError(f"kubectl can't be run: {error.strerror}", "PATH", "install it; submit --dry-run needs none")


def require(done: subprocess.CompletedProcess[str]) -> str:
    """Its output; if it failed its own message, without its log."""
    if done.returncode:
        text = LOG.sub("", done.stderr).strip() or done.stderr.strip() or f"ended with {done.returncode}"
        hint = next((hint for words, hint in HINTS.items() if re.search(words, text, re.IGNORECASE)), "")
        raise RunError(text, " ".join(done.args[:6]), hint)
    return done.stdout


def installed_engine() -> str:
    """Everybody who is logged in may ask what kinds there are."""
    done = run("api-resources", "--output", "name")  # fails for one group that does not answer, and names the rest
    kinds = set((done.stdout or require(done)).split())
    return next((engine for engine, resource in RESOURCES.items() if resource in kinds), "job")


def trainer_version() -> str:
    """Kubeflow Trainer's version, from the fields of its TrainJob: definitions themselves are not for everybody."""
    return version_of(json.loads(require(run("get", "--raw", "/openapi/v3/apis/trainer.kubeflow.org/v1alpha1"))))


def version_of(document: dict[str, Any]) -> str:
    schemas = document.get("components", {}).get("schemas", {})
    schema = json.dumps([one for name, one in schemas.items() if name.endswith(".TrainJob")])
    version = next((version for field, version in TRAINER_FIELDS.items() if f'"{field}"' in schema), "2.3")
    return "2.3" if version == "2.2" and '"terminationGracePeriodSeconds"' in schema else version


@dataclass(frozen=True, slots=True)
class KubernetesJob:
    """A job in the cluster, whether it is there or not."""

    name: str
    engine: str
    namespace: str | None

    @property
    def selector(self) -> str:
        """Kubeflow Trainer's pods are a JobSet's, and its first versions give them no labels of ours."""
        if self.engine == "trainer":
            return f"jobset.sigs.k8s.io/jobset-name={self.name}"
        return f"{RUN_LABEL}={self.name},{MANAGED_BY}=windlass"

    def run(self, *words: str, feed: str | None = None) -> subprocess.CompletedProcess[str]:
        return run(*words, namespace=self.namespace, feed=feed)

    def get(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run("get", RESOURCES[self.engine], self.name, "--ignore-not-found", *words)

    def state(self) -> str | None:
        """None: there is no such job; else `running` or how it ended."""
        text = require(self.get("--output", "json")).strip()
        if not text:
            return None
        conditions = json.loads(text).get("status", {}).get("conditions", [])
        ended = [one["type"] for one in conditions if one.get("type") in ENDED and one.get("status") == "True"]
        return str(ended[0]) if ended else "running"

    def pod_phases(self) -> subprocess.CompletedProcess[str]:
        phases = "jsonpath={.items[*].status.phase}"
        return self.run("get", "pods", "--selector", self.selector, "--output", phases)

    def create(self, job: Job, manifest: str, trial: str, submission: Submission) -> None:
        """Everything is checked before anything is created or deleted. A job that has ended is replaced, one that runs
        is not. `trial`: the manifest under another name."""
        say, where = submission.say, submission.where
        problems, unknown = self.missing(job, where)
        for line in unknown:
            say(line)
        before = self.state()
        if before == "running":
            hint = "wait for it, windlass stop RUN, or give another name"
            problems.append(
                Problem(f"{RESOURCES[self.engine]} {self.name} exists and has not ended", where("name"), hint)
            )
        raise_all(problems)
        words = ("apply", "--validate=strict", "--filename", "-")
        require(self.run(*words, "--dry-run=server", feed=manifest if before is None else trial))
        if before is not None:
            say(f"{self.name} has ended ({before}): it is replaced, and the run resumes from its last checkpoint")
            require(self.run("delete", RESOURCES[self.engine], self.name, "--wait=false"))
        self._wait_until_gone(job.grace_seconds + OVER_GRACE_SECONDS, say)
        done = self.run(*words, feed=manifest)
        text = require(done).strip()
        if warnings := LOG.sub("", done.stderr).strip():  # such as: would violate PodSecurity
            say(warnings)
        say(text)

    def missing(self, job: Job, where: Callable[[str], str]) -> tuple[list[Problem], list[str]]:
        """What the run refers to and the cluster lacks; and what could not be looked up."""
        problems, unknown = [], []
        for kind, name, key in references(job, self.engine):
            done = self.run("get", kind, name, "--output", "name")
            if done.returncode == 0:
                continue
            if "NotFound" in done.stderr or "not found" in done.stderr:
                listing = self.run("get", kind, "--output", "name")
                names = [] if listing.returncode else [line.partition("/")[2] for line in listing.stdout.split()]
                hint = f"it has {', '.join(names[:10])}" if names else f"kubectl get {kind}"
                problems.append(Problem(f"the cluster has no {kind} {name}", where(key), hint))
            else:
                unknown.append(f"{kind} {name} could not be looked up: {done.stderr.strip()}")
        return problems, unknown

    def _wait_until_gone(self, seconds: float, say: Callable[[str], None]) -> None:
        """The job before and its pods, which may still be saving where the new ones would write."""
        deadline, reported = time.monotonic() + seconds, False
        while True:
            done = self.pod_phases()
            if done.returncode:
                say(f"whether pods of a job before are left could not be looked up: {done.stderr.strip()}")
                return
            left = [phase for phase in done.stdout.split() if phase not in ("Succeeded", "Failed")]
            if not left and self.state() is None:
                return
            what = f"the job before has {len(left)} {'pod' if len(left) == 1 else 'pods'} left"
            if time.monotonic() > deadline:
                hint = "one whose node is lost stays: kubectl delete pod --force, once that machine is surely off"
                raise RunError(f"{what} after {seconds} s", self.name, hint)
            if not reported:
                say(f"{what}, which may be saving: waiting for the end")
                reported = True
            time.sleep(PAUSE_SECONDS)

    def status(self) -> str:
        pods = self.run("get", "pods", "--selector", self.selector, "--output", "wide")
        tables = (require(self.get()).strip(), require(pods).strip())
        return "\n".join(table for table in tables if table) or f"{self.name}: it no longer exists"

    def logs(self, *more: str) -> int:
        """Straight to this terminal."""
        words = ("logs", "--selector", self.selector, "--prefix", "--tail=-1", *more)
        try:
            return subprocess.run(_command(words, self.namespace), check=False).returncode
        except OSError as error:
            raise _not_here(error) from None

    def follow(self, nodes: int, say: Callable[[str], None]) -> int:
        """Logs of all nodes until the job has ended, over its restarts too; how it ended is the exit code."""
        since: tuple[str, ...] = ()
        while True:
            how, pods = self._wait_until_started(nodes, say)
            # Pods of earlier tries are read too, and as many as a try has may be created anew meanwhile.
            self.logs("--follow", f"--max-log-requests={pods + nodes}", *since)
            if how != "running":
                say(f"{self.name}: {how or 'it no longer exists'}")
                return 0 if how in SUCCEEDED else 1
            # All of them have ended, or the connection broke: what is new is read, and nothing twice.
            since = (f"--since-time={time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}",)
            time.sleep(PAUSE_SECONDS)

    def _wait_until_started(self, nodes: int, say: Callable[[str], None]) -> tuple[str | None, int]:
        """The job's state and how many pods it has, once none is pending. What it waits for is reported on change."""
        deadline, last = time.monotonic() + START_SECONDS, ""
        while time.monotonic() < deadline:
            how, phases = self.state(), require(self.pod_phases()).split()
            if how != "running" or (len(phases) >= nodes and "Pending" not in phases):
                return how, len(phases)
            now = ", ".join(phases) or "no pod yet"
            if now != last:
                say(f"waiting: {now}")
            last = now
            time.sleep(PAUSE_SECONDS)
        raise RunError(f"not all pods have started within {START_SECONDS} s", self.name, "windlass status RUN")

    def delete(self) -> str:
        """The job, then its files; pods get their grace to save."""
        text = require(self.run("delete", RESOURCES[self.engine], self.name, "--ignore-not-found", "--wait=false"))
        selected = ("--selector", f"{RUN_LABEL}={self.name},{MANAGED_BY}=windlass", "--ignore-not-found")
        return (
            text + "".join(require(self.run("delete", kind, *selected)) for kind in ("service", "configmap"))
        ).strip()


def references(job: Job, engine: str) -> Iterator[tuple[str, str, str]]:
    """Objects that must exist: kind, name, the run file's key."""
    cluster = job.cluster
    for index, volume in enumerate(cluster.volumes):
        yield "persistentvolumeclaim", volume.claim, f"cluster.volumes[{index}].claim"
    if engine == "trainer":
        yield "clustertrainingruntime.trainer.kubeflow.org", cluster.runtime, "cluster.runtime"
    for kind, key in (
        ("localqueue.kueue.x-k8s.io", "queue"),
        ("serviceaccount", "service_account"),
        ("priorityclass", "priority_class"),
    ):
        if name := getattr(cluster, key):
            yield kind, name, f"cluster.{key}"
    for name in dict.fromkeys(cluster.image_pull_secrets):
        yield "secret", name, "cluster.image_pull_secrets"
    for variable, value in cluster.env.items():
        if not isinstance(value, str):
            yield "secret", value.secret, f"cluster.env.{variable}"
