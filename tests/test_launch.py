"""Submission: each platform's files, the clients that are called, and status, logs and stop."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import warm
import yaml
from launch_jobs import EXAMPLES, FULL, GOLDEN, ROOT, SITE, calls, compared, environ, example, plan_of, program, render
from refusals import refused
from text_run import make_text_run

from windlass import run_folder, versions
from windlass.errors import RunError, UserError
from windlass.launch import submit as submitting
from windlass.launch.job import build_job
from windlass.launch.platforms import kubectl, local
from windlass.launch.submit import open_record
from windlass.plan import Plan
from windlass.ranks.rank import read_start_time
from windlass.runfile import machines, read_run_file
from windlass.runfile.recorded import record_run
from windlass.runfile.reference import describe, list_keys


def test_golden_launch_script() -> None:
    plan, overrides, _ = example("train")
    made = render(plan, "script", overrides=overrides)
    for name in ("launch.sh", "accelerate.yaml"):
        compared(f"train/script/{name}", made[name])


def test_an_accelerate_file_is_passed_on() -> None:
    plan, overrides, accelerate = example("train-with-fsdp")
    assert accelerate is not None
    made = render(plan, "script", overrides=overrides, accelerate=accelerate)
    assert made["accelerate.yaml"] == accelerate.read_text()


def test_golden_files_are_all_used() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_launch*.py"))
    for path in GOLDEN.rglob("*.*"):
        run, to, _ = path.relative_to(GOLDEN).parts
        assert f'"{run}/' in tests, path
        assert to in ("script", "runai", "kubernetes", "openshift", "slurm", "skypilot"), path
        assert to == "kubernetes" or f'"{path.name}"' in tests, path


def test_rendering_needs_no_torch(tmp_path: Path) -> None:
    words = [word for one in FULL for word in ("--override", one)]
    command = f"submit {EXAMPLES}/train.yaml --to kubernetes --dry-run --out {tmp_path}/out".split()
    python = [sys.executable, "-X", "importtime", "-m", "windlass"]
    done = subprocess.run([*python, *command, *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert not {"torch", "transformers", "numpy", "accelerate", "urllib.request"} & names
    assert "windlass.launch.platforms.kubernetes" in names
    assert (tmp_path / "out" / "job.yaml").exists()


# Keys whose documented example is the default or SITE's, or needs another key: other values.
OTHER = {
    "gpu": "b200", "link": "pcie-5", "network": "ethernet-25", "nics_per_node": "2", "host_memory_gib": "1",
    "install": "[a]", "max_restarts": "7", "grace_seconds": "777", "cpu": "3", "sbatch": "{exclusive: ''}",
    "labels": "{a: b}", "annotations": "{a: b}", "supplemental_groups": "[7]", "image_pull_secrets": "[a]",
    "node_pools": "[a]", "node_selector": "{a: b}", "affinity": "{nodeAffinity: {}}", "hugepages": "{2Mi: 4Gi}",
    "gpu_resource": "rdma/nic", "runtime": "other", "trainer_version": "'2.2'",
}  # fmt: skip
NEEDS = {
    "container": ("cluster.volumes=[{host: /data, path: /data}]",),
    "runtime": ("cluster.kubernetes.engine=trainer",),
    "trainer_version": ("cluster.kubernetes.engine=trainer",),
}
PLANNED = ("nodes", "gpus_per_node", "gpu", "machine", "link", "network", "nics_per_node", "host_memory_gib")


def seen(to: str, plan: Plan, overrides: tuple[str, ...]) -> tuple[Any, str]:
    """Return what is written, and what is reported, of a run on a platform with these overrides."""
    loaded = read_run_file(EXAMPLES / "train.yaml", overrides)
    try:
        if overrides[-1].partition("=")[0].removeprefix("cluster.") in PLANNED:
            plan = plan_of(EXAMPLES / "train.yaml", overrides)
        job = build_job(replace(plan, loaded=loaded))  # the overrides themselves are in no file
        return (submitting.PLATFORMS[to].files(job), plan.cost, job.grace_seconds), "\n".join(
            submitting.review(job, to)
        )
    except UserError as error:
        return None, str(error)


def list_settings(key: str) -> tuple[str, ...]:
    """Return overrides that set the key, last, as its documentation does."""
    name = key.rpartition(".")[2]
    (example,) = (line.partition(": ")[2] for line in describe(key) if line.startswith("example: "))
    words = [f"{key}={OTHER[name]}"] if name in OTHER else shlex.split(example)
    return *NEEDS.get(name, ()), *(word for word in words if word != "--override")


@pytest.mark.parametrize("to", submitting.PLATFORMS)
@pytest.mark.takes("starts runs, or renders every key")
def test_every_key_has_an_effect_or_is_reported(to: str) -> None:
    """Set alone, a key changes the plan or the platform's files, or is named in a note or an error."""
    section = machines.PLATFORM_SECTIONS.get(to, "")
    parts = ("cluster", f"cluster.{section}")
    sections = {"cluster.platform", *(f"cluster.{name}" for name in machines.PLATFORM_SECTIONS.values())}
    site = (*SITE, "cluster.nodes=1", "cluster.network=null") if to == "local" else SITE
    plan = plan_of(EXAMPLES / "train.yaml", site)
    silent = []
    for key in [key for key in list_keys() if key.rpartition(".")[0] in parts and key not in sections]:
        *needs, setting = list_settings(key)
        files, _ = seen(to, plan, (*site, *needs))
        changed, report = seen(to, plan, (*site, *needs, setting))
        if changed in (None, files) and not re.search(rf"\b{key.rpartition('.')[2]}\b", report):
            silent.append(key)
    # Nothing is between the nodes of one machine.
    assert silent == (["cluster.network", "cluster.nics_per_node"] if to == "local" else [])


def test_keys_without_effect_on_the_platform_are_reported() -> None:
    def notes(to: str, *overrides: str) -> str:
        return "\n".join(submitting.review(build_job(example("train", overrides)[0]), to))

    printed = notes("runai", *FULL)
    own = "affinity, extended_resources, image_pull_secrets, namespace, networks, node_selector, queue, service_account"
    assert f"cluster.kubernetes has no effect on platform runai: {own}" in printed
    assert "cluster.runai has no effect" not in printed
    assert "SCC nonroot-v2" in printed, "which may run on OpenShift"
    env = "cluster.env={NCCL_TIMEOUT: '1', RDMAV_FORK_SAFE: '1', NCCL_IB_HCA: mlx5_0, OURS: x}"
    root = "cluster.kubernetes.user={uid: 0}"
    printed = notes("kubernetes", *FULL, root, "cluster.image=a/b:1", env, "cluster.kubernetes.engine=trainer")
    for part in (
        "a tag may change",
        "NCCL_TIMEOUT: no effect",
        "RDMAV_FORK_SAFE: redundant",
        "restarts are the runtime",
    ):
        assert part in printed
    for part in ("NCCL_IB_HCA", "OURS", "SCC"):
        assert part not in printed
    assert "yunikorn is given no PodGroup" in notes("kubernetes", *SITE, "cluster.kubernetes.scheduler_name=yunikorn")
    # anyuid itself refuses every pod that names a profile.
    assert "a copy of the SCC anyuid with seccompProfiles" in notes("openshift", *SITE, root)
    assert "restricted-v2 refuses group 7" in notes("openshift", *SITE, "cluster.kubernetes.fs_group=7")
    # OpenShift's admission gives that container a user of the namespace too.
    as_root = "runs as root (alpine:3.10)"
    operator = (*SITE, "cluster.kubernetes.engine=pytorchjob")
    assert [as_root in notes(to, *operator) for to in ("kubernetes", "openshift")] == [True, False]
    plain = notes("kubernetes", *SITE)
    assert (as_root in plain, "must not be root (runAsNonRoot)" in plain) == (False, True)


def test_grace_uses_the_plan_then_measured_saves(here: Path) -> None:
    overrides = volume(here)
    plan = plan_of(EXAMPLES / "train.yaml", overrides)
    before = build_job(plan)
    assert before.grace_seconds >= plan.cost.step_seconds_serial + 60
    assert "estimated" in before.grace_reason
    (here / "run").mkdir()
    for step, seconds, ok in ((10, 95.0, True), (20, 402.5, True), (30, 4000.0, False), (40, 90.0, True)):
        run_folder.log_event(here / "run", "save", step, seconds=seconds, ok=ok)
    run_folder.log_event(here / "run", "eval", 40, seconds=9000.0)
    after = build_job(plan).grace_seconds
    assert 9000 > after > max(before.grace_seconds, 2 * 402.5)
    text = "\n".join(render(plan, "script", overrides=overrides).values())
    assert "the slowest save in this run folder, 402.5 s" in text
    assert str(after) in text
    job = build_job(example("train", FULL)[0])
    assert (job.grace_seconds, job.grace_reason) == (300, "set by cluster.grace_seconds")


def test_grace_of_a_sweep_is_for_all_trials_that_train_together(here: Path) -> None:
    overrides = (*volume(here), "sweep.lora.r=[8,16]")
    for together in (1, 2):
        plan = plan_of(EXAMPLES / "train.yaml", (*overrides, f"sweep.together={together}"))
        for trial, seconds in zip(plan.trials, (95.0, 402.5), strict=True):
            trial.folder.mkdir(parents=True, exist_ok=True)
            run_folder.log_event(trial.folder, "save", 10, seconds=seconds, ok=True)
        job = build_job(plan)
        assert "the slowest save in this run folder, 402.5 s" in job.grace_reason
        assert job.grace_seconds > together * 2 * 402.5


# --- a cluster that answers as it is told -----------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, with stand-ins first on the path."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kubectl, "PAUSE_SECONDS", 0.01)
    return tmp_path


def volume(here: Path) -> tuple[str, ...]:
    """Mount the pods' volume on this machine too."""
    words = [word for word in SITE if not word.startswith("cluster.volumes")]
    return (
        *words,
        "cluster.kubernetes.tolerations=[{key: team}]",
        f"cluster.volumes=[{{claim: project-001, path: {here}}}]",
        f"train.output_dir={here}/run",
    )


KUBECTL = r"""
printf '%s\n' "$*" >>"$ASKED"
case " $* " in
  *" api-resources "*) printf '%s\n' $KINDS ;;
  *" get nodes "*) if [[ -e "$NODES" ]]; then cat "$NODES"; else echo 'Error: nodes is forbidden' >&2; exit 1; fi ;;
  *" can-i create $DENIED "*) echo no; exit 1 ;;
  *" explain "*"$DENIED"*) echo "error: field \"$DENIED\" does not exist" >&2; exit 1 ;;
  *" get $DENIED "*|*" get "*" $DENIED "*) echo "Error from server (Forbidden): $DENIED is forbidden" >&2; exit 1 ;;
  *"jsonpath={.metadata.uid}"*) echo 1234-5678 ;;
  *" patch "*) cat >"$OWNED"; if [[ -e no-patch ]]; then echo 'Error: forbidden' >&2; exit 1; fi ;;
  *" get $MISSING "*) echo 'Error from server (NotFound): it was not found' >&2; exit 1 ;;
  *" get clustertrainingruntime"*" json "*) echo "$RUNTIME" ;;
  *" get events "*) cat events 2>/dev/null || echo '{"items": []}' ;;
  *" get "*"jobs"*" json "*)
    if [[ -e "$APPLIED" ]]; then if [[ -e over ]]; then echo "$OVER"; else echo "$AFTER"; fi
    else cat "$STATE" 2>/dev/null || true; fi ;;
  *" logs "*) if [[ "$*" == *--since-time=* ]]; then touch over; fi; echo "[pod/x-0] step 1" ;;
  *creationTimestamp*) echo 2026-11-22T10:00:00Z ;;
  *"jsonpath"*)
    if [[ -e "$PODS" ]]; then head -n 1 "$PODS"; (($(wc -l <"$PODS") == 1)) || sed -i 1d "$PODS"
    elif [[ -e "$APPLIED" ]]; then echo Running Running Running; fi ;;
  *" delete "*) rm -f "$STATE"; echo deleted ;;
  *" diff "*) cat >/dev/null; [[ -e same ]] || { ((DIFF == 1)) || echo "$DIFF_SAYS" >&2; exit "$DIFF"; } ;;
  *" create --dry-run=server "*)
    cat >>pods-tried; if [[ -n "${REFUSES_POD:-}" ]]; then echo "$REFUSES_POD" >&2; exit 1; fi ;;
  *" --dry-run=server "*) if [[ -n "${REFUSES:-}" ]]; then echo "$REFUSES" >&2; exit 1; fi; cat >"$TRIED" ;;
  *" apply "*) cat >"$APPLIED"; echo "${WARNS:-}" >&2; echo "job.batch/x created" ;;
  *) echo ok ;;
esac
"""


def ended(how: str) -> str:
    """Return a job as the server reports it."""
    return json.dumps({"status": {"conditions": [{"type": how, "status": "True"}]}})


class Cluster:
    """kubectl's stand-in: records its calls and answers them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._monkeypatch = folder, monkeypatch
        self.printed: list[str] = []
        program(folder / "bin", "kubectl", KUBECTL)
        files = {
            name: str(folder / name.lower())
            for name in ("STATE", "APPLIED", "TRIED", "PODS", "NODES", "OWNED", "ASKED")
        }
        self.answer(
            KINDS="jobs.batch",
            MISSING="-",
            DENIED="nobody",
            RUNTIME=STOCK,
            AFTER=ended("Complete"),
            OVER="",
            DIFF="1",
            DIFF_SAYS="field is immutable",
            **files,
        )

    def answer(self, **variables: str) -> None:
        for name, value in variables.items():
            self._monkeypatch.setenv(name, value)

    def has(self, **files: str) -> None:
        for name, text in files.items():
            (self.folder / name).write_text(text)

    def submit(self, *more: str, to: str = "kubernetes", **options: Any) -> int:
        overrides = (*volume(self.folder), *more)
        plan = plan_of(EXAMPLES / "train.yaml", overrides)
        self.printed.clear()
        return submitting.submit(plan, to, overrides=overrides, say=self.printed.append, **options)

    @property
    def words(self) -> list[str]:
        return calls(self.folder / "bin", "kubectl")

    @property
    def applied(self) -> str | None:
        path = self.folder / "applied"
        return path.read_text() if path.exists() else None


@pytest.fixture
def cluster(here: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(here, monkeypatch)


def test_submit_dry_runs_then_creates_the_same_file(cluster: Cluster) -> None:
    warning = 'Warning: would violate PodSecurity "restricted:latest": runAsNonRoot != true'
    cluster.answer(WARNS=warning)
    assert cluster.submit() == 0
    folder = cluster.folder / "run"
    assert cluster.applied == (folder / "job.yaml").read_text()
    words = cluster.words
    assert words.index("--dry-run=server") < len(words) - words[::-1].index("apply")
    assert words.count("--namespace") == words.count("ml")
    assert {"persistentvolumeclaim", "secret"} <= set(words)
    record = json.loads((folder / "submitted.json").read_text())
    assert (record["platform"], record["engine"], record["namespace"]) == ("kubernetes", "job", "ml")
    assert "created" in "\n".join(cluster.printed)
    assert warning in cluster.printed


@pytest.mark.takes("starts runs, or renders every key")
def test_cluster_problems_are_found_before_creation(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = f"cluster.volumes=[{{claim: a, path: {cluster.folder}}}, {{config_map: ca, path: /etc/ssl/ca}}]"
    for more, missing in (
        ("cluster.kubernetes.engine=auto", "persistentvolumeclaim project-001"),
        (mount, "configmap ca"),
        ("cluster.kubernetes.networks=[ssa]", "network-attachment-definitions.k8s.cni.cncf.io ssa"),
        ("cluster.kubernetes.runtime_class=nvidia", "runtimeclass.node.k8s.io nvidia"),
        ("cluster.kubernetes.queue=gpus", "localqueue.kueue.x-k8s.io gpus"),
        ("cluster.kubernetes.engine=trainer", "clustertrainingruntime.trainer.kubeflow.org torch-distributed"),
    ):
        cluster.answer(MISSING=missing)
        with refused("not-in-cluster") as problems:
            cluster.submit(more)
        assert [problem.problem for problem in problems] == [f"the cluster has no {missing}"]
        assert cluster.applied is None
        cluster.answer(MISSING="-", DENIED=missing)
        assert cluster.submit(more) == 0, "whoever may not look may still submit"
        assert f"note: {missing} could not be looked up: Error from server (Forbidden)" in "\n".join(cluster.printed)
        (cluster.folder / "applied").unlink()
        cluster.answer(DENIED="nobody")
    cluster.answer(MISSING="queue.scheduling.volcano.sh gpus")
    with refused("not-in-cluster", "cluster.kubernetes.queue=gpus"):
        cluster.submit("cluster.kubernetes.queue=gpus", "cluster.kubernetes.gang=volcano")
    cluster.answer(MISSING="-", REFUSES='error: strict decoding error: unknown field "spec.foo"')
    with pytest.raises(RunError, match=r"spec.foo(.|\n)*name another cluster.kubernetes.engine"):
        cluster.submit()
    # kubectl logs each of its tries before it prints what is wrong.
    logged = 'E1121 16:29:24.069138 28924 memcache.go:265] "Unhandled Error" err="no API group list"\n'
    text = "The connection to the server localhost:8080 was refused - did you specify the right host or port?"
    cluster.has(words=f"{logged}{text}\n")
    program(cluster.folder / "bin", "kubectl", f"cat {cluster.folder}/words >&2; exit 1")
    with pytest.raises(RunError, match="kubectl config get-contexts") as caught:
        cluster.submit()
    assert caught.value.problems[0].problem == text
    assert cluster.applied is None
    with pytest.raises(RunError) as caught:  # no look-up whose failure is a note goes on without a cluster
        kubectl.run("get", "nodes", check=False)
    assert caught.value.problems[0].problem == text
    monkeypatch.setenv("PATH", str(cluster.folder / "empty"))
    with refused("no-client", "PATH"):
        kubectl.KubernetesJob("run", "job", None).logs()
    program(cluster.folder / "empty", "oc", "exit 0")
    assert kubectl.find_client() == "oc", "OpenShift's own"


@pytest.mark.parametrize("to", submitting.CLIENTS)
def test_nothing_is_written_where_nothing_can_be_submitted(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    overrides = (*volume(tmp_path), "cluster.runai.project=research", f"cluster.skypilot.mounts={{{tmp_path}: s3://a}}")
    plan = plan_of(EXAMPLES / "train.yaml", overrides)
    with refused("no-client", "PATH"):
        submitting.submit(plan, to, overrides=overrides, say=print)
    assert list(tmp_path.iterdir()) == []


def test_pod_refusals_are_found_before_creation(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers of JobSet, PyTorchJob and TrainJob accept any pod template."""
    invalid = 'The Pod "run-" is invalid: spec.tolerations[0].effect: Invalid value: "NoSchedule"'
    forbidden = 'pods is forbidden: User "ann" cannot create resource "pods" in API group "" in the namespace "ml"'
    quota = 'pods "run-x" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=1, used: 8, limited: 8'
    limits = 'pods "run-x" is forbidden: failed quota: cpus: must specify limits.cpu for: node'
    tried = cluster.folder / "pods-tried"
    for engine, text in (("jobset", limits), ("pytorchjob", invalid), ("trainer", invalid)):
        cluster.answer(REFUSES_POD=text)
        with refused("pod-refused", "run: its pods", RunError) as problems:
            cluster.submit(f"cluster.kubernetes.engine={engine}")
        assert problems[0].problem == text
        assert cluster.applied is None
        pod = json.loads(tried.read_text())
        kubernetes_validate.validate({**pod, "metadata": {**pod["metadata"], "name": "x"}}, "1.36", strict=True)
        assert pod["spec"]["tolerations"] == [{"key": "team", "operator": "Exists"}]
        tried.unlink()
    cluster.answer(REFUSES_POD=quota)
    assert cluster.submit() == 0, "a queue may wait for it"
    assert f"note: {quota}" in cluster.printed
    assert json.loads(tried.read_text())["kind"] == "Pod"
    for path in (tried, cluster.folder / "applied"):
        path.unlink()
    cluster.answer(REFUSES_POD=forbidden)
    assert cluster.submit() == 0, "the server can't be asked"
    assert [line for line in cluster.printed if forbidden in line]
    job = tried.read_text().partition("}{")[2]
    kubernetes_validate.validate({**json.loads("{" + job), "metadata": {"name": "x"}}, "1.36", strict=True)


def rights(asked: str, others: set[str], workload: str) -> set[tuple[str, str]]:
    """Return the verbs and resources that one call of kubectl needs, by its sources."""

    def plural(kind: str) -> str:
        name = kind.partition(".")[0].lower()
        return name if name.endswith("s") else f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"

    words = asked.removeprefix("--namespace ml ").split()
    what, found = words[0], set[tuple[str, str]]()
    if what == "get":
        found = {("get" if len(words) > 2 and words[2][0] != "-" else "list", plural(words[1]))}
    elif what in ("delete", "patch") and words[1] == "--filename":
        found = {(what, plural(kind)) for kind in others}
    elif what == "delete":
        found = {(verb, plural(words[1])) for verb in ("list", "delete")[words[2] != "--selector" :]}
    elif what in ("apply", "diff"):
        found = {(verb, plural(kind)) for verb in ("get", "create", "patch") for kind in (*others, workload)}
    elif what == "create":
        found = {("create", "pods")}
    elif what == "logs":
        found = {("list", "pods"), ("get", "pods/log")}
    else:
        assert what in ("api-resources", "auth", "explain"), "everybody may"
    return found


def test_documented_role_is_sufficient(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    """Sufficient for everything that is called, and nothing more."""
    text = (ROOT / "docs" / "submit.md").read_text()
    role = next(block for block in text.split("```yaml\n") if "kind: Role\n" in block).partition("```")[0]
    allowed = {
        (verb, resource)
        for rule in yaml.safe_load(role)["rules"]
        for verb in rule["verbs"]
        for resource in rule["resources"]
    }
    used: set[tuple[str, str]] = set()
    for engine, kind in (("jobset", "JobSet"), ("job", "Job")):
        cluster.has(asked="", state=ended("Failed"), pods="\n\nRunning Running Running\n")
        cluster.answer(AFTER=ended("Suspended"), OVER=ended("Complete"))
        options = (
            f"cluster.kubernetes.engine={engine}",
            "cluster.kubernetes.queue=gpus",
            "cluster.kubernetes.network_policy=ingress",
        )
        assert cluster.submit(*options, follow=True) == 0
        platform, record = open_record(cluster.folder / "run", cluster.folder / "run", cluster.printed.append)
        assert platform.status(record) == platform.stop(record) == platform.logs(record, follow=False) == 0
        documents = list(yaml.safe_load_all(cluster.applied or ""))
        others = {document["kind"] for document in documents[:-1]}
        for line in (cluster.folder / "asked").read_text().splitlines():
            used |= rights(line, others, kind)
        for name in ("applied", "over"):
            (cluster.folder / name).unlink()
    capfd.readouterr()
    assert used - allowed == {("get", "secrets"), ("list", "nodes")}, "what is a note if it is forbidden"
    assert allowed - used == set()


def test_nodes_without_the_gpus_are_a_note(cluster: Cluster) -> None:
    """No error: nodes may join while pods wait."""

    def notes(*nodes: tuple[str, int], more: str = "cluster.cpu=16") -> list[str]:
        items = [
            {"metadata": {"labels": {kubectl.PRODUCT: name}}, "status": {"allocatable": {"nvidia.com/gpu": str(count)}}}
            for name, count in nodes
        ]
        cluster.has(nodes=json.dumps({"items": items}))
        assert cluster.submit(more) == 0
        (cluster.folder / "applied").unlink()
        return [line for line in cluster.printed if "nodes have" in line or "planned for" in line]

    assert notes(*[("NVIDIA-H200", 8)] * 3) == []
    (few,) = notes(("NVIDIA-H200", 8), ("NVIDIA-H200", 0), ("NVIDIA-H200", 8))
    assert "2 of 3 nodes have 1 nvidia.com/gpu each; the run needs 3: pods wait until others join" in few
    assert (
        "planned for h200, but pods may get NVIDIA-A100-SXM4-80GB"
        in notes(*[("NVIDIA-H200", 8)] * 3, ("NVIDIA-A100-SXM4-80GB", 8))[0]
    )
    chosen = f"cluster.kubernetes.node_selector={{{kubectl.PRODUCT}: NVIDIA-H200}}"
    assert notes(*[("NVIDIA-H200", 8)] * 3, ("NVIDIA-A100-SXM4-80GB", 8), more=chosen) == []
    (cluster.folder / "nodes").unlink()
    assert cluster.submit() == 0
    assert "could not be looked up: Error: nodes is forbidden" in "\n".join(cluster.printed)


def test_companion_objects_are_deleted_with_the_job(cluster: Cluster) -> None:
    """Deleted by hand, by its time to live or by windlass stop."""
    assert cluster.submit("cluster.kubernetes.network_policy=ingress") == 0
    owned = {
        (one["kind"], one["metadata"]["name"]) for one in yaml.safe_load_all((cluster.folder / "owned").read_text())
    }
    applied = list(yaml.safe_load_all(cluster.applied or ""))
    assert owned == {(one["kind"], one["metadata"]["name"]) for one in applied[:-1]}
    assert {kind for kind, _ in owned} == {"ConfigMap", "Service", "NetworkPolicy"}
    patch = json.loads(cluster.words[cluster.words.index("--patch") + 1])
    (owner,) = patch["metadata"]["ownerReferences"]
    assert owner == {"apiVersion": "batch/v1", "kind": "Job", "name": "run", "uid": "1234-5678"}
    (cluster.folder / "applied").unlink()
    cluster.has(**{"no-patch": ""})
    assert cluster.submit() == 0
    assert "note: only `windlass stop RUN` deletes what belongs to the job: Error: forbidden" in cluster.printed


def test_a_running_job_is_left_alone_and_an_ended_one_replaced(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.has(state=ended("Suspended"))
    with refused("already-running", "name"):
        cluster.submit()
    assert "delete" not in cluster.words
    cluster.has(state=ended("Failed"))
    cluster.answer(REFUSES="error: it would not be admitted")
    with pytest.raises(RunError, match="would not be admitted"):
        cluster.submit()
    assert (cluster.folder / "state").exists(), "what the server refuses costs no job"
    monkeypatch.delenv("REFUSES")
    assert cluster.submit() == 0
    words = cluster.words
    assert words[words.index("delete") + 1] == "jobs.batch"
    assert words.index("--dry-run=server") < words.index("delete")
    assert "resumes from its last checkpoint" in "\n".join(cluster.printed)
    texts = ((cluster.folder / "tried").read_text(), cluster.applied or "")
    tried, kept = ([one["metadata"]["name"] for one in yaml.safe_load_all(text)] for text in texts)
    assert not set(tried) & set(kept), "the server compares with no job that is to go"
    assert kept[1:] == ["run", "run"]


@pytest.mark.fault(
    "a job that has finished another run",
    "`windlass submit`",
    "its manifest differs from this one",
)
@pytest.mark.takes("plans and submits four times")
def test_a_job_that_finished_this_run_is_left_as_it_is(cluster: Cluster) -> None:
    cluster.has(state=ended("Complete"), same="")
    assert cluster.submit() == 0
    said = "run has finished this run (Complete) and is left as it is; `windlass stop RUN` deletes it"
    assert said in cluster.printed
    (cluster.folder / "same").unlink()
    cluster.has(state=ended("Complete"))
    differs, unknown = "its manifest differs from this one", "`kubectl diff` can't compare it: Forbidden"
    for code, says, why in (("1", "", differs), ("2", "field is immutable", differs), ("2", "Forbidden", unknown)):
        cluster.answer(DIFF=code, DIFF_SAYS=says)
        with refused("finished-job", "name") as problems:
            cluster.submit()
        assert problems[0].problem == f"jobs.batch run has finished (Complete), and {why}"
        assert problems[0].hint == "`windlass stop RUN` deletes it, or give another name"
        assert (cluster.folder / "state").exists()
        assert (cluster.applied, "delete" in cluster.words) == (None, False)
    cluster.has(state=ended("Failed"), same="")
    assert cluster.submit() == 0
    assert cluster.applied is not None
    assert not (cluster.folder / "state").exists()
    assert said not in cluster.printed


@pytest.mark.fault(
    "a job that would go on with a finished run", "`windlass submit`", "was 16 when this run began, is 64 now"
)
def test_a_finished_run_gets_no_pods(cluster: Cluster) -> None:
    """They would end as soon as they have planned."""
    folder = cluster.folder / "run"
    folder.mkdir()
    recorded = record_run(plan_of(EXAMPLES / "train.yaml", volume(cluster.folder)).run)
    (folder / "manifest.json").write_text(json.dumps({"state": run_folder.FINISHED, "run": recorded}))
    assert cluster.submit() == 0
    assert cluster.printed == [f"{folder} contains this run, finished: nothing is left to train"]
    with refused("changed-setting", "lora.r=64") as problems:
        cluster.submit("lora.r=64")
    assert problems[0].problem == "was 16 when this run began, is 64 now"
    assert [path.name for path in folder.iterdir()] == ["manifest.json"]
    assert cluster.submit("lora.r=64", dry_run=True) == 0
    (folder / "manifest.json").unlink()
    assert cluster.submit("lora.r=64") == 0, "the folder is somewhere else"


def test_submit_waits_for_the_previous_jobs_pods(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """`stop` deletes the job at once, but its pods have minutes to save."""
    cluster.has(pods="Running Running\nRunning\nFailed Succeeded\n")
    assert cluster.submit() == 0
    waiting = [line for line in cluster.printed if "waiting" in line]
    assert waiting == ["the job before has 2 pods left, which may be saving: waiting for the end"]
    assert (cluster.folder / "pods").read_text() == "Failed Succeeded\n", "every answer was read"
    (cluster.folder / "applied").unlink()
    cluster.has(pods="Running\n")
    monkeypatch.setattr(kubectl, "OVER_GRACE_SECONDS", 0.2)
    with pytest.raises(RunError, match=r"the job before has 1 pod left after (.|\n)*kubectl delete pod --force"):
        cluster.submit("cluster.grace_seconds=1")
    assert cluster.applied is None, "nothing is started next to them"


def runtime(policy: dict[str, Any] | None = None, **job: Any) -> str:
    """Return a ClusterTrainingRuntime as the server reports it."""
    spec: dict[str, Any] = {"replicatedJobs": [{"name": "node", "template": {"spec": job}}]}
    return json.dumps({"spec": {"template": {"spec": {**spec, "failurePolicy": policy} if policy else spec}}})


ON_75 = {"onExitCodes": {"operator": "In", "values": [75]}}
ON_13 = {"onExitCodes": {"operator": "In", "values": [13]}, "action": "FailJob"}
STOCK = runtime()  # what Kubeflow Trainer ships as torch-distributed


def test_first_suitable_engine_is_chosen(cluster: Cluster) -> None:
    every = "pytorchjobs.kubeflow.org trainjobs.trainer.kubeflow.org jobs.batch jobsets.jobset.x-k8s.io"
    several = every.replace(" jobsets.jobset.x-k8s.io", "")
    fine = runtime(podFailurePolicy={"rules": [ON_13, {**ON_75, "action": "Ignore"}]})
    free = runtime({"rules": [{"action": "RestartJobSetAndIgnoreMaxRestarts", "onJobFailureReasons": []}]})
    over = runtime(
        {"maxRestarts": 2, "rules": [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]},
        podFailurePolicy={"rules": [ON_13, {**ON_75, "action": "FailJob"}]},
    )
    for kinds, denied, shipped, engine, why in (
        ("pods jobs.batch", "", STOCK, "job", ""),
        (every, "", STOCK, "jobset", ""),
        (every, "onJobFailureMessagePatterns", STOCK, "job", "jobsets.jobset.x-k8s.io is installed and not used: it"),
        (several, "", STOCK, "job", "its runtime torch-distributed counts each node that is stopped as one of 6"),
        (several, "", over, "job", "starts no run again"),
        (several, "", fine, "trainer", ""),
        (several, "", free, "trainer", ""),
        (several, "torch-distributed", fine, "job", "its runtime can't be read: Error from server (Forbidden)"),
        ("jobs.batch pytorchjobs.kubeflow.org", "jobs.batch", "", "pytorchjob", "you may not create it here"),
    ):
        cluster.answer(KINDS=kinds, DENIED=denied or "nobody", RUNTIME=shipped)
        cluster.printed.clear()
        section = plan_of(EXAMPLES / "train.yaml", volume(cluster.folder)).run.cluster.kubernetes
        assert kubectl.find_engine(section, cluster.printed.append) == engine, (kinds, denied, shipped)
        assert why in "\n".join(cluster.printed)
        assert bool(why) == bool(cluster.printed), cluster.printed
    cluster.answer(KINDS=every, DENIED="nobody", RUNTIME=STOCK)
    assert cluster.submit() == 0
    assert "kind: JobSet" in (cluster.applied or "")
    assert "no cluster was asked" not in "\n".join(cluster.printed)
    (cluster.folder / "applied").unlink()
    assert cluster.submit("cluster.kubernetes.engine=trainer") == 0, "it was asked for"
    assert "counts each node that is stopped as one of 6 failures" in "\n".join(cluster.printed)
    assert cluster.submit(dry_run=True) == 0
    assert "auto, and no cluster was asked: an indexed Job" in "\n".join(cluster.printed)


def test_events_say_why_there_is_no_pod(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    """Only of this run and this job, whatever else is in the namespace."""
    quota = 'Error creating: pods "run-0-" is forbidden: failed quota: cpus: must specify limits.cpu'
    rows = (
        ("Job", "run", "FailedCreate", quota, "10:00:05"),
        ("Job", "run", "FailedCreate", quota, "10:00:15"),
        ("JobSet", "run", "JobCreationFailed", "admission webhook denied\n it", "10:00:01"),
        ("Pod", "run-node-0-2-abcde", "FailedScheduling", "0/8 nodes are available", "10:00:20"),
        ("Workload", "job-run-1a2b3", "Pending", "insufficient quota for nvidia.com/gpu", "10:00:20"),
        ("Pod", "run-1-abcde", "Failed", "of the job before", "09:59:59"),
        ("Pod", "run-2-0-abcde", "Failed", "of job run-2", "10:00:20"),
        ("Pod", "other-0-abcde", "Failed", "of another", "10:00:20"),
    )
    items = [
        {
            "involvedObject": {"kind": kind, "name": name},
            "reason": reason,
            "message": message,
            "metadata": {"creationTimestamp": f"2026-11-22T{when}Z"},
            # Newer kinds of events have a time of their own, with fractions of seconds.
            **({"eventTime": f"2026-11-22T{when}.123456Z"} if kind == "Pod" else {"lastTimestamp": None}),
        }
        for kind, name, reason, message, when in rows
    ]
    cluster.has(events=json.dumps({"items": items}), pods="\n\nPending\nRunning Running Running\n")
    cluster.answer(AFTER=ended("Suspended"), OVER=ended("Complete"))
    assert cluster.submit(follow=True) == 0
    complaints = [
        f"job run: FailedCreate: {quota}",
        "jobset run: JobCreationFailed: admission webhook denied it",
        "pod run-node-0-2-abcde: FailedScheduling: 0/8 nodes are available",
        "workload job-run-1a2b3: Pending: insufficient quota for nvidia.com/gpu",
    ]
    shown = [line for line in cluster.printed if line.startswith("waiting") or line in complaints]
    assert shown == ["waiting: no pod yet", *complaints, "waiting: Pending"], "each once"
    assert "of " not in "".join(line for line in cluster.printed if "Failed:" in line)
    (cluster.folder / "over").unlink()
    cluster.has(pods="Running Pending Running\n")
    platform, record = open_record(cluster.folder / "run", cluster.folder / "run", cluster.printed.append)
    capfd.readouterr()
    assert platform.status(record) == 0
    printed = capfd.readouterr().out
    assert [line for line in printed.splitlines() if line.startswith("warning: ")] == [
        f"warning: {c}" for c in complaints
    ]
    cluster.answer(DENIED="events")
    assert platform.status(record) == 0
    assert "events can't be read: Error from server (Forbidden)" in capfd.readouterr().out
    cluster.has(pods="Running Running Running\n")
    assert platform.status(record) == 0
    assert "events" not in capfd.readouterr().out, "what was is over"


def test_run_file_errors_are_reported_before_asking_the_cluster(cluster: Cluster) -> None:
    with refused("relative-path", "train.output_dir=out"):
        cluster.submit("train.output_dir=out")
    with refused("does-not-fit"):
        cluster.submit("train.per_device_train_batch_size=4096")
    assert cluster.submit("train.per_device_train_batch_size=4096", dry_run=True) == 0
    asked = {word for word in cluster.words if not word.startswith("-")}
    assert asked == {"ml", "api-resources", "name", "auth", "can-i", "create", "jobs.batch"}
    assert not (cluster.folder / "run" / "submitted.json").exists()


def test_a_dry_run_writes_to_its_own_folder_alone(cluster: Cluster) -> None:
    for to in ("script", "runai", "kubernetes"):
        assert cluster.submit(to=to, dry_run=True) == 0
        assert not (cluster.folder / "run").exists()
    names = {path.name for path in (cluster.folder / "run-job").iterdir()}
    assert names == {"launch.sh", "accelerate.yaml", "run.yaml", "submit.sh", "payload.json", "job.yaml"}
    assert not cluster.words


def test_submit_follow_survives_restarts_and_returns_the_jobs_code(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    phases = ("", "", "Running Pending Running", "Running Running Running", "Failed Pending Failed")
    cluster.has(pods="\n".join((*phases, "Running Running Running")) + "\n")
    # The logs of the first try end with all of its pods; those of the second when the job has.
    cluster.answer(AFTER=ended("Suspended"), OVER=ended("Failed"))
    assert cluster.submit(follow=True) == 1
    waited = [line for line in cluster.printed if line.startswith("waiting")]
    assert waited == ["waiting: no pod yet", "waiting: Running, Pending, Running", "waiting: Failed, Pending, Failed"]
    assert "run: Failed" in cluster.printed
    assert "app.kubernetes.io/instance=run,app.kubernetes.io/managed-by=windlass" in cluster.words
    assert capfd.readouterr().out.count("step 1") == 3, "both tries, and the last words"
    assert sum(word.startswith("--since-time=") for word in cluster.words) == 2, "nothing is shown twice"
    most = {word for word in cluster.words if word.startswith("--max-log-requests=")}
    assert most == {"--max-log-requests=6"}, "its three pods, and as many created anew"


# --- on this machine --------------------------------------------------------------------------------------------------


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    made = subprocess.Popen(["sleep", "60"])
    yield made
    made.kill()
    made.wait(120)


def recorded(folder: Path, process: subprocess.Popen[bytes], state: str = "running", **other: Any) -> Path:
    """Write a run folder as `submit --to local` and training leave it."""
    folder.mkdir(exist_ok=True)
    facts = {
        **local.describe_process(),
        "platform": "local",
        "pid": process.pid,
        "began": read_start_time(process.pid),
    }
    (folder / "submitted.json").write_text(json.dumps({**facts, **other}))
    if state:
        (folder / "manifest.json").write_text(json.dumps({"state": state}))
        (folder / "plan.json").write_text(json.dumps({"batch": {"steps": 300}}))
        (folder / "steps-rank0.jsonl").write_text('{"step": 1}\n{"step": 12}\n{"st')
    return folder


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Callable[[Path], str]:
    def status(folder: Path) -> str:
        platform, record = open_record(folder, folder, print)
        assert platform.status(record) == 0
        return capsys.readouterr().out

    return status


def test_status_of_a_run_on_this_machine(
    tmp_path: Path, process: subprocess.Popen[bytes], shown: Callable[[Path], str]
) -> None:
    run = tmp_path / "run"
    assert f"starting (process {process.pid})" in shown(recorded(run, process, state=""))
    text = shown(recorded(run, process))
    assert f"running, step 12 of 300 (process {process.pid})" in text
    assert f"windlass watch {run}" in text
    assert "ended without finishing" in shown(recorded(run, process, began="1")), "a number that was reused"
    recorded(run, process)
    process.kill()
    process.wait(120)
    assert "ended without finishing after step 12 of 300" in shown(run)
    for state, expected in (
        (run_folder.STOPPED, "stopped by a signal after step 12 of 300, and saved"),
        (run_folder.FAILED, "failed after step 12 of 300: its output has the cause"),
        (run_folder.FINISHED, "finished"),
    ):
        assert expected in shown(recorded(run, process, state))
    figures = {"margins": 0.25, "accuracies": 0.75, "chosen": 0.125, "rejected": -0.125}
    last = {"step": 13, "preference": {f"rewards/{name}": value for name, value in figures.items()}}
    recorded(run, process, run_folder.STOPPED)
    (run / "steps-rank0.jsonl").write_text(json.dumps(last) + "\n")
    of_pairs = "margin 0.250, accuracy 75%, rewards 0.125 chosen, -0.125 rejected"
    assert f"stopped by a signal after step 13 of 300, {of_pairs}, and saved" in shown(run)
    (run / "steps-rank0.jsonl").write_text('{"step": 12}\n{"step": 5}\n')  # a script that was resumed
    assert "after step 5 of 300, and saved" in shown(run)
    (run / "manifest.json").unlink()
    assert "no heartbeat yet" in shown(run)


def test_a_damaged_or_missing_record_is_reported(tmp_path: Path) -> None:
    for text in ("{broken", "[]", "{}", '{"platform": "moon"}'):
        (tmp_path / "submitted.json").write_text(text)
        with refused("unreadable", "submitted.json"):
            open_record(tmp_path, tmp_path, print)
    (tmp_path / "submitted.json").unlink()
    with refused("nothing-submitted", "submitted.json"):
        open_record(tmp_path, tmp_path, print)


def test_stop_signals_the_recorded_process_and_no_other(
    here: Path, process: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    def stop() -> str:
        platform, record = open_record(here / "run", here / "run", print)
        assert platform.stop(record) == 0
        return capsys.readouterr().out

    recorded(here / "run", process, began="1")  # its number was reused
    assert "has ended already" in stop()
    assert process.poll() is None
    recorded(here / "run", process, host="another")
    with refused("started-elsewhere", "submitted.json"):
        stop()
    recorded(here / "run", process)
    plan = plan_of(EXAMPLES / "train.yaml", ("cluster.nodes=1", "cluster.gpus_per_node=2", *volume(here)))
    with refused("already-running", "submitted.json"):
        submitting.submit(plan, "local", say=print)
    assert f"process {process.pid} is stopping" in stop()
    assert process.wait(120) == -signal.SIGTERM


def test_a_run_that_was_started_by_hand_is_observed_by_its_heartbeats(here: Path, shown: Callable[[Path], str]) -> None:
    folder = here / "run"
    with refused("too-many-nodes", "cluster.nodes"):
        render(plan_of(EXAMPLES / "train.yaml", volume(here)), "local")
    assert submitting.submit(plan_of(EXAMPLES / "train.yaml", volume(here)), "script", say=print) == 0
    assert "no heartbeat yet" in shown(folder)
    platform, record = open_record(folder, folder, print)
    with refused("started-elsewhere", "submitted.json"):
        platform.logs(record, follow=False)
    with refused("started-elsewhere", "submitted.json"):
        platform.stop(record)
    (folder / "manifest.json").write_text('{"state": "running"}')
    (folder / "steps-rank0.jsonl").write_text('{"step": 3}\n')
    beat = {"rank": 1, "host": "node-7", "pid": 5, "time": time.time() - 4, "step": 3, "phase": "forward"}
    (folder / "heartbeat-rank1.json").write_text(json.dumps(beat))
    assert "running, step 3 (last heartbeat" in shown(folder)
    (folder / "heartbeat-rank1.json").write_text(json.dumps({**beat, "time": time.time() - 400}))
    assert "no heartbeat since it was started at" in shown(folder)  # it may load
    os.utime(folder / "manifest.json", (time.time() - 500,) * 2)
    assert "ended without finishing after step 3" in shown(folder)
    (folder / "submitted.json").unlink()  # `windlass train`
    assert "ended without finishing after step 3" in shown(folder)


@pytest.mark.takes("starts runs, or renders every key")
def test_a_local_run_is_started_observed_and_stopped(tmp_path: Path) -> None:
    """The commands as typed, and real training."""
    file, log = make_text_run(tmp_path / "a"), tmp_path / "log"
    settings = ("cluster.gpus_per_node=1", "train.max_steps=100000", "train.eval_strategy=no", "train.save_steps=50000")
    options = [word for setting in settings for word in ("--override", setting)]
    env = {**environ(tmp_path), "OMP_NUM_THREADS": "1"}

    def command(*words: str) -> str:
        done = subprocess.run(
            [warm.python(), "-m", "windlass", *words], capture_output=True, text=True, timeout=60, cwd=tmp_path, env=env
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    assert "nothing is written; it would start: windlass train" in command("submit", str(file), "--dry-run", *options)
    assert not (tmp_path / "a" / "run").exists()
    submit = [warm.python(), "-m", "windlass", "submit", str(file), *options]
    with log.open("w") as output:
        process = subprocess.Popen(submit, stdout=output, stderr=output, cwd=tmp_path, env=env)
    try:
        deadline = time.monotonic() + 120
        path = tmp_path / "a" / "run" / run_folder.STEPS.format(rank=0)
        while not (path.exists() and path.stat().st_size):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        pid = json.loads((tmp_path / "a" / "run" / "submitted.json").read_text())["pid"]
        assert f"(process {pid})" in command("status", str(file))
        assert "is stopping" in command("stop", str(file))
        assert process.wait(200) == 75, log.read_text()
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(120)
    assert "stopped by a signal after step" in command("status", str(file))
    assert list((tmp_path / "a" / "run" / "checkpoints").iterdir())


def test_image_runs_as_any_user_with_tested_versions(tmp_path: Path) -> None:
    text = (ROOT / "Containerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if line.startswith("USER")][-1] == "USER 1001:0"
    assert "--constraint" in text
    assert ":latest" not in text
    assert "chmod -R g=u" in text
    needed = {word.lstrip("!") for word in (ROOT / ".containerignore").read_text().split() if word.startswith("!")}
    copied = {word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]}
    assert copied == needed, "what is copied is not ignored, and nothing else is sent"
    ignored = [(ROOT / name).read_text() for name in (".containerignore", ".dockerignore")]
    assert ignored[0] == ignored[1], "Docker reads only its own"
    # A site without the internet: each is declared after FROM, and used.
    for name in ("APT_MIRROR", "PIP_INDEX_URL", "CA_CERT"):
        assert f"ARG {name}" in lines[lines.index("FROM ${BASE}") :]
        assert text.count(name) > 2 or name == "PIP_INDEX_URL", "pip itself reads that one"
    # The base's own packages, such as setuptools, can't be replaced; its launchers would start the base's Python.
    assert "-m venv --without-pip --system-site-packages /opt/venv" in text
    assert "PIP_BREAK_SYSTEM_PACKAGES" not in text
    steps = [line.partition("RUN ")[2] for line in "\n".join(lines).replace("\\\n", "").splitlines() if "RUN " in line]
    for step in steps:
        assert subprocess.run(["sh", "-n", "-c", step], timeout=120, check=False).returncode == 0, step
    # NVIDIA's torch is an alpha, which to pip is older than its release.
    (tmp_path / "torch.dist-info").mkdir()
    (tmp_path / "torch.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.11.0a0+nv26.02\n")
    begin, end = (steps[1].index(f"&& python3 -{word}") for word in ("c 'from importlib", "m venv"))
    listed = steps[1][begin:end].removeprefix("&&").replace("/tmp/", f"{tmp_path}/")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run(["sh", "-e", "-c", listed], cwd=ROOT, env=environ, timeout=120, check=True)
    requirements = (tmp_path / "requirements.txt").read_text().splitlines()
    assert [line for line in requirements if line.startswith("torch")] == ["torch==2.11.0a0+nv26.02"]
    assert {"transformers>=5.17,<5.25", "pydantic>=2.10,<3"} <= {*requirements}
    assert not versions.is_too_old("torch", "2.11.0a0+nv26.02")
    assert "require_libraries(errors.TRAINING" in steps[1]
    launchers = steps[1][steps[1].index("for command in") : steps[1].index("done") + 4]
    for name, module in (("torchrun", "torch.distributed.run"), ("accelerate", "accelerate.commands.accelerate_cli")):
        assert f"{name}={module}" in launchers
        assert find_spec(module) is not None
