"""The cluster, through kubectl or oc: check what is installed and what is missing; create, observe and delete a job."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from windlass.errors import SAVED, Problem, RunError, raise_all
from windlass.launch.job import NAME_LETTERS, Job, call_client
from windlass.launch.platforms.pod import kueue_queue
from windlass.runfile.machines import MANAGED_BY, RUN_LABEL, Kubernetes

PAUSE_SECONDS = 2.0  # between two polls
OVER_GRACE_SECONDS = 60  # stopping pods are gone this long after their grace period
RESOURCES = {  # by engine; `auto` takes the first that supports the run
    "jobset": "jobsets.jobset.x-k8s.io",
    "trainer": "trainjobs.trainer.kubeflow.org",
    "job": "jobs.batch",
    "pytorchjob": "pytorchjobs.kubeflow.org",  # the only one that counts stops of the run as failures
}
RUNTIME = "clustertrainingruntime.trainer.kubeflow.org"
JOBSET_FIELD = "jobsets.spec.failurePolicy.rules.onJobFailureMessagePatterns"  # since JobSet 0.10
VOLUMES = {"claim": "persistentvolumeclaim", "secret": "secret", "config_map": "configmap"}
REFERENCES = {  # key of `cluster.kubernetes` that names an object -> the object's kind
    "queue_priority": "workloadpriorityclass.kueue.x-k8s.io",
    "service_account": "serviceaccount",
    "priority_class": "priorityclass",
    "runtime_class": "runtimeclass.node.k8s.io",
}
ABSENT = re.compile(r"not ?found|doesn't have a resource type", re.IGNORECASE)
PRODUCT = "nvidia.com/gpu.product"  # a node label set by NVIDIA's GPU feature discovery
LOG = re.compile(r"^[EWIF]\d{4} .*\n?", re.MULTILINE)  # kubectl logs each attempt before it prints the error
UNREACHABLE = re.compile(r"^(The connection to the server|Unable to connect to the server).*", re.MULTILINE)
HINT = "is it the right cluster (kubectl config get-contexts), are you logged in, may you do that? --dry-run needs none"
OTHER_VERSION = (
    "that operator is older than JobSet 0.10 or Kubeflow Trainer 2.3: name another cluster.kubernetes.engine"
)
POD_HINT = "the values come from `cluster` in the run file: `windlass explain cluster` prints its keys"
SUCCEEDED = ("Complete", "Completed", "Succeeded")
ENDED = (*SUCCEEDED, "Failed", "FailureTarget")
PHASES = "jsonpath={.items[*].status.phase}"
EVENTS = {  # kind of object -> pattern of the run's names: its pods, its Kueue workload; else the job's and its Job's
    "Pod": r"{0}(-node-0|-master|-worker)?-\d+(-[a-z0-9]{{5}})?",
    "Workload": r"[a-z]+-{0}-[a-z0-9]{{5}}",
}


def find_client() -> str | None:
    """Return the client's command, kubectl or OpenShift's oc, which takes the same commands; None without either."""
    return next((name for name in ("kubectl", "oc") if shutil.which(name)), None)


def run(
    *words: str, namespace: str | None = None, feed: str | None = None, check: bool = True, show: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run kubectl and capture its output, or show it here. `check`: raise with kubectl's own message if it fails."""
    command = [find_client() or "kubectl", *(["--namespace", namespace] if namespace else []), *words]
    done = call_client(*command, hint="is the cluster reachable?", feed=feed, show=show)
    if show:
        return done
    done.stderr = LOG.sub("", done.stderr).strip() or done.stderr.strip()
    unreachable = UNREACHABLE.search(done.stderr)
    if done.returncode and (check or unreachable):
        text = unreachable[0] if unreachable else done.stderr or f"ended with {done.returncode}"
        raise RunError(text, " ".join(command[:6]), OTHER_VERSION if "unknown field" in text else HINT, "client-failed")
    return done


def find_engine(section: Kubernetes, say: Callable[[str], None]) -> str:
    """Return the first engine that is installed, that the user may use here, and that resumes a stopped run. Any
    logged-in user may query what is installed and what they may do."""
    done = run("api-resources", "--output", "name", check=False)  # also fails if only one API group doesn't answer
    kinds = set((done.stdout or run("api-resources", "--output", "name").stdout).split())
    for engine, resource in RESOURCES.items():
        if resource in kinds:
            may = run("auth", "can-i", "create", resource, namespace=section.namespace, check=False)
            why = "you may not create it here" if may.stdout.strip() == "no" else ""
            if engine == "jobset" and not why:
                explained = run("explain", JOBSET_FIELD, "--api-version=jobset.x-k8s.io/v1alpha2", check=False)
                why = "it is older than 0.10" if "does not exist" in explained.stderr else ""
            if engine == "trainer" and not why:
                why = find_runtime_problem(section.runtime)
            if not why:
                return engine
            say(f"note: {resource} is installed and not used: {why}")
    return "job"


def find_runtime_problem(name: str) -> str:
    """Return why a TrainJob would end after its nodes stopped with exit code 75; empty if it would resume."""
    done = run("get", RUNTIME, name, "--output", "json", check=False)
    if done.returncode:
        return f"its runtime can't be read: {done.stderr.strip()}"
    spec = json.loads(done.stdout)["spec"]["template"]["spec"]
    jobs = {job["name"]: job["template"]["spec"] for job in spec["replicatedJobs"]}
    node: dict[str, Any] = jobs.get("node", {})
    action = "Count"
    for rule in node.get("podFailurePolicy", {}).get("rules", []):
        codes = rule.get("onExitCodes")
        if codes and (SAVED in codes["values"]) == (codes["operator"] == "In"):
            action = rule["action"]
            break
    reason = "BackoffLimitExceeded" if action == "Count" else "PodFailurePolicy"
    policy = spec.get("failurePolicy", {})
    rules = (rule for rule in policy.get("rules", []) if reason in (rule.get("onJobFailureReasons") or [reason]))
    answer = next((rule["action"] for rule in rules), "RestartJobSet")
    restarts = answer == "RestartJobSet" and policy.get("maxRestarts")
    if action == "Ignore" or "IgnoreMaxRestarts" in answer or restarts:
        return ""
    limit = node.get("backoffLimit", 6)
    return f"its runtime {name} counts each node that is stopped as one of {limit} failures, and starts no run again"


@dataclass(frozen=True, slots=True)
class KubernetesJob:
    name: str
    engine: str
    namespace: str | None

    @property
    def selector(self) -> str:
        return f"{RUN_LABEL}={self.name},{MANAGED_BY}=windlass"

    def run(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return run(*words, namespace=self.namespace, **options)

    def get(self, *words: str) -> str:
        return self.run("get", RESOURCES[self.engine], self.name, "--ignore-not-found", *words).stdout.strip()

    def state(self) -> str | None:
        """Return `running` or how the job ended; None if it doesn't exist."""
        text = self.get("--output", "json")
        if not text:
            return None
        conditions = json.loads(text).get("status", {}).get("conditions", [])
        for condition in conditions:
            if condition.get("type") in ENDED and condition.get("status") == "True":
                return str(condition["type"])
        return "running"

    def pods(self, output: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return self.run("get", "pods", "--selector", self.selector, "--output", output, **options)

    def create(self, job: Job, manifest: str, trial: str, pod: dict[str, Any], say: Callable[[str], None]) -> None:
        """Check everything, then create the job. A failed job is replaced; a running one is refused, and so is one that
        has finished, which is left as it is if it did what would be created again. `trial`: the manifest under another
        name; `pod`: the pods' template."""
        problems = []
        for kind, name, key, *where in list_references(job):
            done = self.run("get", kind, name, "--output", "name", *where, check=False)
            if done.returncode and ABSENT.search(done.stderr):
                hint = f"kubectl get {kind} prints those that it has"
                what = f"the cluster has no {kind} {name}"
                problems.append(Problem(what, job.where(f"cluster.{key}"), hint, "not-in-cluster"))
            elif done.returncode:
                say(f"note: {kind} {name} could not be looked up: {done.stderr.strip()}")
        for note in list_node_notes(job):
            say(f"note: {note}")
        before = self.state()
        if before == "running":
            hint = "wait for it, `windlass stop RUN`, or give another name"
            what = f"{RESOURCES[self.engine]} {self.name} exists and has not ended"
            problems.append(Problem(what, job.where("name"), hint, "already-running"))
        compared = self.run("diff", "--filename", "-", feed=manifest, check=False) if before in SUCCEEDED else None
        if compared and compared.returncode:
            why = "its manifest differs from this one"
            if compared.returncode != 1 and "immutable" not in compared.stderr:  # a job's pods can't be changed
                why = f"`kubectl diff` can't compare it: {compared.stderr.strip()[:300]}"
            what = f"{RESOURCES[self.engine]} {self.name} has finished ({before}), and {why}"
            hint = "`windlass stop RUN` deletes it, or give another name"
            problems.append(Problem(what, job.where("name"), hint, "finished-job"))
        raise_all(problems)
        if compared:
            say(f"{self.name} has finished this run ({before}) and is left as it is; `windlass stop RUN` deletes it")
            return
        self._try_pod(pod, say)
        words = ("apply", "--validate=strict", "--filename", "-")
        self.run(*words, "--dry-run=server", feed=manifest if before is None else trial)
        if before is not None:
            say(f"{self.name} has ended ({before}): it is replaced, and the run resumes from its last checkpoint")
            self.run("delete", RESOURCES[self.engine], self.name, "--wait=false")
        self._wait_until_gone(job.grace_seconds + OVER_GRACE_SECONDS, say)
        # The previous job's objects are deleted with it at some point: delete them now, so that the new ones aren't.
        others = manifest.rpartition("\n---\n")[0]
        self.run("delete", "--filename", "-", "--ignore-not-found", "--wait=false", feed=others)
        done = self.run(*words, feed=manifest)
        if warnings := done.stderr:  # for example: would violate PodSecurity
            say(warnings)
        say(done.stdout.strip())
        self._set_owner(manifest, others, say)

    def _set_owner(self, manifest: str, others: str, say: Callable[[str], None]) -> None:
        """Make the job own its objects, so that they are deleted with it however it is deleted."""
        workload = yaml.safe_load(manifest.rpartition("\n---\n")[2])
        owner = {key: workload[key] for key in ("apiVersion", "kind")} | {"name": self.name}
        owner["uid"] = self.get("--output", "jsonpath={.metadata.uid}")
        patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
        try:
            self.run("patch", "--filename", "-", "--type=merge", "--patch", patch, feed=others)
        except RunError as error:
            say(f"note: only `windlass stop RUN` deletes what belongs to the job: {error.problems[0].problem}")

    def _try_pod(self, template: dict[str, Any], say: Callable[[str], None]) -> None:
        """Dry-run a pod: operators' servers don't validate pods, so a refusal would only show after hours in a queue.
        If the user may not create pods, a Job is tried instead."""
        named = {"metadata": {"generateName": f"{self.name[:NAME_LETTERS]}-"}}
        pod = {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {**template["metadata"], **named["metadata"]}}
        job = {"apiVersion": "batch/v1", "kind": "Job", **named, "spec": {"template": template}}
        for tried in (pod, job):
            words = ("create", "--dry-run=server", "--validate=strict", "--filename", "-")
            done = self.run(*words, feed=json.dumps(tried), check=False)
            if not done.returncode:
                return
            text = done.stderr
            if "exceeded quota" in text:  # the quota is exceeded now; a queue may wait for it
                say(f"note: {text}")
                return
            if "cannot create resource" not in text:
                raise RunError(text, f"{self.name}: its pods", POD_HINT, "pod-refused")
        say(f"note: whether its pods would be admitted is not known: {text}")

    def _wait_until_gone(self, seconds: float, say: Callable[[str], None]) -> None:
        """Wait until the previous job and its pods are gone: they may be saving where the new ones would write."""
        deadline = time.monotonic() + seconds
        reported = False
        while True:
            done = self.pods(PHASES, check=False)
            if done.returncode:
                say(f"whether pods of a job before are left could not be looked up: {done.stderr.strip()}")
                return
            left = sum(phase not in ("Succeeded", "Failed") for phase in done.stdout.split())
            if not left and self.state() is None:
                return
            what = f"the job before has {left} {'pod' if left == 1 else 'pods'} left"
            if time.monotonic() > deadline:
                hint = "one whose node is lost stays: kubectl delete pod --force, once that machine is surely off"
                raise RunError(f"{what} after {seconds} s", self.name, hint, "pods-left")
            if not reported:
                say(f"{what}, which may be saving: waiting for the end")
            reported = True
            time.sleep(PAUSE_SECONDS)

    def warnings(self) -> list[str]:
        """Return the cluster's warnings since this job was created, without repeats: about the job, its pods and its
        place in a queue. Only these explain why a pod can't be created."""
        done = self.run("get", "events", "--field-selector=type=Warning", "--output=json", check=False)
        if done.returncode:
            return [f"events can't be read: {done.stderr.strip()}"]
        created = self.get("--output=jsonpath={.metadata.creationTimestamp}")
        warnings: dict[str, str] = {}
        for event in json.loads(done.stdout)["items"]:
            kind = event["involvedObject"]["kind"]
            name = event["involvedObject"]["name"]
            pattern = EVENTS.get(kind, "{0}(-node-0)?").format(re.escape(self.name))
            when = event.get("lastTimestamp") or event.get("eventTime") or event["metadata"]["creationTimestamp"]
            if re.fullmatch(pattern, name) and when[:19] >= created[:19]:
                text = f"{event['reason']}: {' '.join(event['message'].split())}"
                warnings.setdefault(text, f"{kind.lower()} {name}: {text}")
        return list(warnings.values())

    def logs(self, *more: str) -> int:
        return self.run("logs", "--selector", self.selector, "--prefix", "--tail=-1", *more, show=True).returncode

    def follow(self, nodes: int, say: Callable[[str], None]) -> int:
        """Follow the logs of all nodes until the job has ended, across restarts. Its end decides the exit code."""
        since = list[str]()
        last = list[str]()
        while True:
            how = self.state()
            phases = self.pods(PHASES).stdout.split()
            if how == "running" and (len(phases) < nodes or "Pending" in phases):
                now = [f"waiting: {', '.join(phases) or 'no pod yet'}", *self.warnings()]
                for line in now:
                    if line not in last:
                        say(line)
                last = now
            else:
                # Includes pods of earlier attempts; meanwhile as many pods as one attempt has may be created.
                self.logs("--follow", f"--max-log-requests={len(phases) + nodes}", *since)
                if how != "running":
                    say(f"{self.name}: {how or 'it no longer exists'}")
                    return 0 if how in SUCCEEDED else 1
                # All have ended, or the connection broke: read only what is new next time.
                since = [f"--since-time={time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}"]
                last = []
            time.sleep(PAUSE_SECONDS)


def list_node_notes(job: Job) -> Iterator[str]:
    """Yield notes if nodes lack what the pods request. These are no errors: nodes may join when pods wait."""
    done = run("get", "nodes", "--output", "json", check=False)
    if done.returncode:
        yield f"whether nodes have the GPUs could not be looked up: {done.stderr.strip()}"
        return
    selector = job.cluster.kubernetes.node_selector
    resource = job.cluster.kubernetes.gpu_resource
    count = job.ranks_per_node
    nodes = json.loads(done.stdout)["items"]
    fit = []
    for node in nodes:
        labels = node["metadata"].get("labels", {})
        has_gpus = not job.gpu or int(node["status"]["allocatable"].get(resource, 0)) >= count
        fit += [labels] if has_gpus and selector.items() <= labels.items() else []
    if len(fit) < job.nodes:
        what = f"{count} {resource} each" if job.gpu else "room"
        if selector:
            what += f" and the labels {', '.join(f'{key}={value}' for key, value in selector.items())}"
        yield f"{len(fit)} of {len(nodes)} nodes have {what}; the run needs {job.nodes}: pods wait until others join"
    products = {labels[PRODUCT] for labels in fit if PRODUCT in labels}
    words = job.plan.machine.gpu.name.split("-")
    wrong = sorted(name for name in products if not all(word in name.lower() for word in words))
    if wrong and job.gpu:
        where = job.where("cluster.gpu")
        hint = f"cluster.kubernetes.node_selector: {{{PRODUCT}: NAME}} chooses"
        yield f"{where}: planned for {'-'.join(words)}, but pods may get {', '.join(wrong)}; {hint}"


def list_references(job: Job) -> Iterator[tuple[str, ...]]:
    """Yield the objects that must exist: kind, name, key of `cluster`, and the namespace if it isn't the job's."""
    section = job.cluster.kubernetes
    for index, volume in enumerate(job.cluster.volumes):
        for key, name in volume.sources.items():
            if key in VOLUMES:
                yield VOLUMES[key], name, f"volumes[{index}].{key}"
    for index, network in enumerate(section.networks):  # Multus' format: NAMESPACE/NAME@INTERFACE
        namespace, _, name = network.partition("@")[0].rpartition("/")
        where = (f"--namespace={namespace}",) if namespace else ()
        yield "network-attachment-definitions.k8s.cni.cncf.io", name, f"kubernetes.networks[{index}]", *where
    if section.queue:
        kind = "localqueue.kueue.x-k8s.io" if kueue_queue(section) else "queue.scheduling.volcano.sh"
        yield kind, section.queue, "kubernetes.queue"
    if job.engine == "trainer":
        yield RUNTIME, section.runtime, "kubernetes.runtime"
    for key, kind in REFERENCES.items():
        if name := getattr(section, key):
            yield kind, name, f"kubernetes.{key}"
    for name in section.image_pull_secrets:
        yield "secret", name, "kubernetes.image_pull_secrets"
    for variable, value in job.cluster.env.items():
        if not isinstance(value, str):
            yield "secret", value.secret, f"env.{variable}"
