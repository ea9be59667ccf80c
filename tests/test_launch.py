"""What is written for each platform: golden files, what is refused, what is said, and the clients that are called."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from launch_jobs import (
    EXAMPLES,
    FULL,
    ROOT,
    RUNS,
    SITE,
    calls,
    environ,
    example,
    plan_of,
    program,
)
from runai.models.distributed_creation_request import DistributedCreationRequest
from runai.models.training_creation_request import TrainingCreationRequest

from windlass.errors import RunError, UserError
from windlass.launch import runai as launcher
from windlass.launch import runai_api
from windlass.launch import submit as submitting
from windlass.launch.job import job_of
from windlass.launch.kubernetes import cluster, pod
from windlass.launch.submit import texts as render
from windlass.observe import steps

GOLDEN = ROOT / "tests" / "golden" / "launch"
ENGINES = [
    ("job", ""),
    ("jobset", ""),
    ("pytorchjob", ""),
    *(("trainer", version) for version in ("2.0", "2.1", "2.2", "2.3")),
]
# The first version's TrainJob has no word for a network annotation: refused, see below.
BARE = tuple(word for word in SITE if not word.startswith("cluster.networks"))


def compared(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.exists(), f"{path} is missing: UPDATE_GOLDEN=1 pytest tests/test_launch.py"
    assert text == path.read_text(), f"{path} differs: if that is meant, UPDATE_GOLDEN=1 pytest tests/test_launch.py"


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("to", ["script", "runai"])
def test_scripts_and_commands_are_what_a_careful_human_wrote(run: str, to: str) -> None:
    plan, overrides, accelerate = example(run)
    made = render(plan, to, overrides=overrides, accelerate=accelerate, api=to == "runai")
    for name in ("launch.sh", "accelerate.yaml", "submit.sh", "payload.json"):
        if name in made:
            compared(f"{run}/{to}/{name}", made[name])


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("engine", "version"), ENGINES, ids=[f"{e}{v}" for e, v in ENGINES])
def test_manifests_are_what_a_careful_human_wrote(run: str, engine: str, version: str) -> None:
    plan, overrides, accelerate = example(run, BARE if version == "2.0" else SITE)
    made = render(
        plan, "kubernetes", overrides=overrides, accelerate=accelerate, engine=engine, version=version or None
    )
    # The ConfigMap's files have golden files of their own.
    workload = made["job.yaml"].partition("\n---\n")[2]
    compared(f"{run}/kubernetes/{engine}{version}.yaml", workload)


def test_golden_files_are_all_in_use() -> None:
    written = {str(path.relative_to(GOLDEN)) for path in GOLDEN.rglob("*") if path.is_file()}
    kinds = [f"script/{name}" for name in ("launch.sh", "accelerate.yaml")]
    kinds += [f"runai/{name}" for name in ("launch.sh", "accelerate.yaml", "submit.sh", "payload.json")]
    kinds += [f"kubernetes/{engine}{version}.yaml" for engine, version in ENGINES]
    assert written == {f"{run}/{kind}" for run in RUNS for kind in kinds}


def test_rendering_is_quick_and_needs_no_torch(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-X",
                "importtime",
                "-m",
                "windlass",
                "submit",
                EXAMPLES / "train.yaml",
                "--to",
                "kubernetes",
            ),
            *("--dry-run", "--out", str(tmp_path / "out"), *(word for one in FULL for word in ("--override", one))),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of a processor, whatever else this machine does; with Python's own measuring, and modules compiled anew.
    assert after.ru_utime - before.ru_utime < 4
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert not {"torch", "transformers", "numpy", "accelerate"} & names
    assert "windlass.launch.kubernetes" in names
    assert (tmp_path / "out" / "job.yaml").exists()


# --- refused before anything is written -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("to", "without", "more", "says"),
    [
        ("runai", "cluster.project", (), "no Run:ai project"),
        ("runai", "cluster.image", (), "no container image"),
        ("kubernetes", "cluster.image", (), "no container image"),
        ("kubernetes", "cluster.volumes", (), "is on no volume"),
        ("runai", "cluster.volumes", ("cluster.volumes=[{claim: a, path: '/data,b'}]",), "holds a comma"),
        ("runai", "", ("cluster.priority_class=gold",), "'gold' is no priority of Run:ai"),
        ("kubernetes", "", ("train.output_dir=out",), "out is a path of this machine's working folder"),
        ("kubernetes", "", ("cluster.memory_request=1Gi",), "1Gi of memory, and the plan needs"),
        ("kubernetes", "", ("train.save_strategy=no",), "would begin anew"),
        ("local", "", (), "3 nodes, and this is one"),
    ],
)  # fmt: skip
def test_what_cannot_start_or_would_be_lost_is_refused(to: str, without: str, more: tuple[str, ...], says: str) -> None:
    overrides = (*(word for word in SITE if not (without and word.startswith(without))), *more)
    plan, _, _ = example("train", overrides)
    with pytest.raises(UserError) as caught:
        render(plan, to, overrides=overrides)
    assert says in str(caught.value)
    assert all(problem.hint for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("version", "more", "key"),
    [
        ("2.0", "cluster.networks=[ssa]", "cluster.networks"),
        ("2.0", "cluster.affinity={nodeAffinity: {}}", "cluster.affinity"),
        ("2.0", "cluster.image_pull_secrets=[a]", "cluster.image_pull_secrets"),
        ("2.0", "cluster.annotations={team.example/name: c}", "cluster.annotations"),
        ("2.1", "cluster.user={uid: 2000}", "cluster.user"),
        ("2.1", "cluster.deadline_seconds=60", "cluster.deadline_seconds"),
        ("2.2", "cluster.grace_seconds=600", "cluster.grace_seconds"),
        ("2.3", "cluster.priority_class=high", "cluster.priority_class"),
    ],
)
def test_what_a_trainjob_cannot_say_is_never_dropped(version: str, more: str, key: str) -> None:
    plan, overrides, _ = example("train", (*BARE, more))
    with pytest.raises(UserError, match=f"Kubeflow Trainer {version} can't say it") as caught:
        render(plan, "kubernetes", overrides=overrides, engine="trainer", version=version)
    assert key in caught.value.problems[0].where


def test_an_unknown_trainer_is_refused() -> None:
    plan, overrides, _ = example("train", (*SITE, "cluster.engine=trainer", "cluster.trainer_version='3.1'"))
    with pytest.raises(UserError, match=r"Trainer 3\.1 is not known"):
        render(plan, "kubernetes", overrides=overrides)


def test_what_has_no_effect_there_is_said() -> None:
    plan, _, _ = example("train", (*FULL, "cluster.gpu_resource=nvidia.com/mig-7g.141gb"))
    said = "\n".join(submitting.notes(plan, "runai"))
    for key in ("queue", "node_selector", "topology_key", "deadline_seconds", "service_account", "gpu_resource"):
        assert f"cluster.{key} has no effect on Run:ai" in said
    said = "\n".join(submitting.notes(plan, "kubernetes"))
    assert "cluster.project has no effect on Kubernetes" in said
    assert "the service account needs the SCC nonroot-v2" in said
    assert "auto, and no cluster was asked" in said
    assert "needs the SCC nonroot-v2" in "\n".join(plan.notes), "the plan says it too"
    root, _, _ = example("train", (*SITE, "cluster.user={uid: 0}"))
    assert "SCC anyuid" in "\n".join(submitting.notes(root, "kubernetes"))
    plain, _, _ = example("train")
    assert "SCC" not in "\n".join(submitting.notes(plain, "kubernetes"))
    for one, version, told in ((plain, "2.3", True), (plain, "2.1", False), (root, "2.3", False)):
        said = "\n".join(submitting.notes(one, "kubernetes", engine="trainer", version=version))
        assert ("must not be root (runAsNonRoot)" in said) is told


def test_a_name_that_pods_cannot_have_is_refused() -> None:
    overrides = (*SITE, "cluster.nodes=101", "name=" + "a" * 47)
    plan, _, _ = example("train", overrides)
    with pytest.raises(UserError, match="has 47 letters, and with 101 nodes at most 46 are possible"):
        render(plan, "kubernetes", overrides=overrides)
    assert render(plan, "script", overrides=overrides)


def test_time_to_save_follows_from_the_plan() -> None:
    plan, _, _ = example("train")
    job = job_of(plan)
    assert job.grace_seconds >= plan.cost.step_seconds_serial + 60
    assert "estimated" in job.grace_reason
    asked, _, _ = example("train", FULL)
    assert job_of(asked).grace_seconds == 300
    assert "cluster.grace_seconds" in render(asked, "kubernetes", overrides=FULL)["job.yaml"]


def test_time_to_save_is_what_saving_took_once_that_is_known(tmp_path: Path) -> None:
    overrides = (*volume(tmp_path), "train.output_dir=" + str(tmp_path / "run"))
    plan = plan_of(EXAMPLES / "train.yaml", overrides)
    before = job_of(plan).grace_seconds
    (tmp_path / "run").mkdir()
    for step, seconds, ok in ((10, 95.0, True), (20, 402.5, True), (30, 4000.0, False), (40, 90.0, True)):
        steps.event(tmp_path / "run", "save", step, seconds=seconds, ok=ok)
    steps.event(tmp_path / "run", "eval", 40, seconds=9000.0)
    for to in ("script", "runai", "kubernetes"):
        made = render(plan, to, overrides=overrides)
        text = "\n".join(made.values())
        assert "the slowest save in this run folder, 402.5 s" in text, to
        assert str(job_of(plan).grace_seconds) in text
    assert job_of(plan).grace_seconds > max(before, 2 * 402.5)


def test_another_run_file_is_another_config_map() -> None:
    plan, overrides, _ = example("train")
    names = {pod.files_name(job_of(plan, overrides=more)) for more in (overrides, (), ("lora.r=8",))}
    assert len(names) == 3


def test_another_launch_sh_is_another_config_map_and_still_the_same_run(tmp_path: Path) -> None:
    """The first save changes the time that is left to save in: an immutable ConfigMap would refuse it."""
    overrides = (*volume(tmp_path), "train.output_dir=" + str(tmp_path / "run"))
    plan = plan_of(EXAMPLES / "train.yaml", overrides)
    before = job_of(plan, overrides=overrides)
    (tmp_path / "run").mkdir()
    steps.event(tmp_path / "run", "save", 10, seconds=95.0, ok=True)
    after = job_of(plan, overrides=overrides)
    assert pod.config_map(before)["data"] != pod.config_map(after)["data"]
    assert pod.files_name(before) != pod.files_name(after)
    assert pod.files_name(after) == pod.files_name(job_of(plan, overrides=overrides))
    assert before.fingerprint == after.fingerprint, "nodes of both may meet"


# --- Run:ai ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("site", [SITE, FULL], ids=["site", "full"])
def test_the_rest_body_is_what_runais_own_models_take(site: tuple[str, ...]) -> None:
    plan, overrides, _ = example("train", site)
    body = runai_api.payload(job_of(plan, overrides=overrides))
    made = DistributedCreationRequest.from_dict(body)
    assert made is not None
    assert made.spec is not None
    made.spec.slots_per_worker = made.spec.ssh_auth_mount_path = None  # put there by the client, for MPI
    assert lost(body, json.loads(made.to_json())) == []


def lost(before: Any, after: Any, path: str = "") -> list[str]:
    """What did not come back from a round trip."""
    if isinstance(before, dict):
        after = after if isinstance(after, dict) else {}
        return [word for key, value in before.items() for word in lost(value, after.get(key), f"{path}.{key}")]
    if isinstance(before, list):
        after = after if isinstance(after, list) and len(after) == len(before) else [None] * len(before)
        return [word for i, (a, b) in enumerate(zip(before, after, strict=True)) for word in lost(a, b, f"{path}[{i}]")]
    return [] if before == after else [f"{path}: {before!r} -> {after!r}"]


def test_a_field_that_runai_does_not_know_would_be_noticed() -> None:
    plan, _, _ = example("train")
    body = runai_api.payload(job_of(plan))
    body["spec"]["gpuDevices"] = 1
    made = DistributedCreationRequest.from_dict(body)
    assert made is not None
    assert lost(body, json.loads(made.to_json())) == [".spec.gpuDevices: 1 -> None"]


def test_one_node_is_a_standard_training() -> None:
    plan, overrides, _ = example("two-gpus", (*SITE, "cluster.nodes=1", "cluster.gpus_per_node=2"))
    job = job_of(plan, overrides=overrides)
    words = launcher.command(job)
    assert words[:4] == ["runai", "training", "standard", "submit"]
    assert not {"--workers", "--clean-pod-policy"} & set(words)
    assert not any(word.startswith("--master-") for word in words)
    body = runai_api.payload(job)
    assert "numWorkers" not in body["spec"]
    made = TrainingCreationRequest.from_dict(body)
    assert made is not None
    assert lost(body, json.loads(made.to_json())) == []
    assert runai_api.path(1) == "/api/v1/workloads/trainings"


def test_the_script_and_the_words_say_the_same(tmp_path: Path) -> None:
    odd = "a b'c\"$(x)`y`\nä,€"
    plan, overrides, _ = example(
        "train", (*SITE, f"cluster.annotations={{odd: {json.dumps(odd, ensure_ascii=False)}}}")
    )
    fakes = tmp_path / "bin"
    program(fakes, "runai", f'echo "$MSYS_NO_PATHCONV $MSYS2_ARG_CONV_EXCL" >{tmp_path}/msys')
    (tmp_path / "submit.sh").write_text(render(plan, "runai", overrides=overrides)["submit.sh"])
    subprocess.run(["bash", tmp_path / "submit.sh"], env=environ(fakes), check=True, timeout=30)
    words = launcher.command(job_of(plan, overrides=overrides))
    assert calls(fakes, "runai") == words[1:]
    assert f"odd={odd}" in words
    assert (tmp_path / "msys").read_text() == "1 *\n", "Git Bash leaves paths alone"
    assert words[words.index("--workers") + 1] == "2", "a master and two workers"
    for option in ("gpu-devices-request", "cpu-memory-limit", "restart-policy", "extended-resource"):
        assert words[words.index(f"--{option}") + 1] == words[words.index(f"--master-{option}") + 1]
    done = subprocess.run(
        [Path(sys.executable).parent / "shellcheck", "--exclude=SC2016", tmp_path / "submit.sh"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.stdout == ""


# --- clients --------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, and stand-ins first on the path."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def volume(here: Path) -> tuple[str, ...]:
    """The pods' volume is mounted on this machine too."""
    words = [word for word in SITE if not word.startswith("cluster.volumes")]
    return (*words, f"cluster.volumes=[{{claim: project-001, path: {here}}}]", f"train.output_dir={here}/run")


KUBECTL = r"""
case " $* " in
  *" api-resources "*) printf '%s\n' $KINDS ;;
  *" get --raw /openapi/v3/apis/trainer.kubeflow.org/"*) cat "$SCHEMA" ;;
  *" get $MISSING "*) echo 'Error from server (NotFound): it was not found' >&2; exit 1 ;;
  *" get jobs.batch "*" json "*|*" get trainjobs"*" json "*)
    if [[ -e "$APPLIED" ]]; then echo "$AFTER"; else cat "$STATE" 2>/dev/null || true; fi ;;
  *" logs "*) echo "[pod/x-0] step 1" ;;
  *"jsonpath"*)
    if [[ -e "$PODS" ]]; then head -n 1 "$PODS"; (($(wc -l <"$PODS") == 1)) || sed -i 1d "$PODS"
    elif [[ -e "$APPLIED" ]]; then echo Running Running Running; fi ;;
  *" delete "*) rm -f "$STATE"; echo deleted ;;
  *" --dry-run=server "*) if [[ -n "${REFUSES:-}" ]]; then echo "$REFUSES" >&2; exit 1; fi; cat >"$TRIED" ;;
  *" apply "*) cat >"$APPLIED"; echo "${WARNS:-}" >&2; echo "job.batch/x created" ;;
  *) echo ok ;;
esac
"""


def ended(how: str) -> str:
    """A job as the server tells of it."""
    return json.dumps({"status": {"conditions": [{"type": how, "status": "True"}]}})


@pytest.fixture
def kubectl(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program(here / "bin", "kubectl", KUBECTL)
    for name, value in {
        "KINDS": "jobs.batch",
        "SCHEMA": "",
        "MISSING": "-",
        "STATE": "/none",
        "APPLIED": str(here / "applied"),
        "TRIED": str(here / "tried"),
        "PODS": "/none",
        "AFTER": ended("Complete"),
    }.items():
        monkeypatch.setenv(name, value)
    return here / "bin"


def sent(here: Path, to: str, say: Callable[[str], None] = lambda _: None, *more: str, **options: Any) -> int:
    overrides = (*volume(here), *more)
    plan = plan_of(EXAMPLES / "train.yaml", overrides)
    return submitting.submit(plan, to, overrides=overrides, say=say, **options)


def test_kubernetes_is_asked_first_and_then_given_the_very_file(here: Path, kubectl: Path) -> None:
    said: list[str] = []
    assert sent(here, "kubernetes", said.append) == 0
    text = (here / "run" / "job.yaml").read_text()
    assert (here / "applied").read_text() == text
    words = calls(kubectl, "kubectl")
    assert words.index("--dry-run=server") < len(words) - words[::-1].index("apply")
    assert words.count("--namespace") == words.count("ml")
    assert "persistentvolumeclaim" in words
    assert "secret" in words
    record = json.loads((here / "run" / "submitted.json").read_text())
    assert (record["platform"], record["engine"], record["namespace"]) == ("kubernetes", "job", "ml")
    assert "created" in "\n".join(said)


def test_a_missing_claim_is_found_before_anything_is_created(
    here: Path, kubectl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MISSING", "persistentvolumeclaim project-001")
    with pytest.raises(UserError, match="the cluster has no persistentvolumeclaim project-001"):
        sent(here, "kubernetes")
    assert not (here / "applied").exists()


def test_a_missing_queue_and_runtime_are_found(here: Path, kubectl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MISSING", "localqueue.kueue.x-k8s.io gpus")
    with pytest.raises(UserError, match=r"no localqueue\.kueue\.x-k8s\.io gpus"):
        sent(here, "kubernetes", lambda _: None, "cluster.queue=gpus")
    monkeypatch.setenv("MISSING", "clustertrainingruntime.trainer.kubeflow.org torch-distributed")
    with pytest.raises(UserError, match="clustertrainingruntime"):
        sent(here, "kubernetes", lambda _: None, "cluster.engine=trainer", "cluster.trainer_version='2.3'")


def test_a_running_job_is_left_alone_and_an_ended_one_replaced(
    here: Path, kubectl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = here / "state"
    monkeypatch.setenv("STATE", str(state))
    state.write_text(ended("Suspended"))
    with pytest.raises(UserError, match="is there and has not ended"):
        sent(here, "kubernetes")
    assert "delete" not in calls(kubectl, "kubectl")
    state.write_text(ended("Failed"))
    monkeypatch.setenv("REFUSES", "error: it would not be admitted")
    with pytest.raises(RunError, match="would not be admitted"):
        sent(here, "kubernetes")
    assert state.exists(), "what the server refuses costs no job"
    monkeypatch.delenv("REFUSES")
    said: list[str] = []
    assert sent(here, "kubernetes", said.append) == 0
    words = calls(kubectl, "kubectl")
    assert words[words.index("delete") + 1] == "jobs.batch"
    assert words.index("--dry-run=server") < words.index("delete")
    assert "resumes from its last checkpoint" in "\n".join(said)
    tried, kept = (here / "tried").read_text(), (here / "applied").read_text()
    names = [[one["metadata"]["name"] for one in yaml.safe_load_all(text)] for text in (tried, kept)]
    assert not set(names[0]) & set(names[1]), "the server compares with no job that is to go"
    assert names[1][1:] == ["run", "run"]


def test_pods_of_the_job_before_are_waited_for(here: Path, kubectl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`stop` takes the job at once, and its pods have minutes to save in."""
    monkeypatch.setattr(cluster, "PAUSE_SECONDS", 0.01)
    monkeypatch.setenv("PODS", str(here / "pods"))
    (here / "pods").write_text("Running Running\nRunning\nFailed Succeeded\n")
    said: list[str] = []
    assert sent(here, "kubernetes", said.append) == 0
    assert [line for line in said if "waiting" in line] == [
        "the job before has 2 pods left, which may be saving: waiting for the end"
    ]
    assert (here / "pods").read_text() == "Failed Succeeded\n", "every answer was heard"


def test_pods_that_do_not_end_are_no_reason_to_start_beside_them(
    here: Path, kubectl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(cluster, "OVER_GRACE_SECONDS", 0.2)
    monkeypatch.setenv("PODS", str(here / "pods"))
    (here / "pods").write_text("Running\n")
    with pytest.raises(RunError, match=r"the job before has 1 pod left after (.|\n)*kubectl delete pod --force"):
        sent(here, "kubernetes", lambda _: None, "cluster.grace_seconds=1")
    assert not (here / "applied").exists()


def test_what_the_server_warns_of_is_said(here: Path, kubectl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warning = 'Warning: would violate PodSecurity "restricted:latest": runAsNonRoot != true'
    monkeypatch.setenv("WARNS", warning)
    said: list[str] = []
    assert sent(here, "kubernetes", said.append) == 0
    assert warning in said


def test_the_servers_own_words_are_shown(here: Path, kubectl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFUSES", 'error: strict decoding error: unknown field "spec.foo"')
    with pytest.raises(RunError, match=r'unknown field "spec\.foo"'):
        sent(here, "kubernetes")
    assert not (here / "applied").exists()


@pytest.mark.parametrize(
    ("kinds", "engine"),
    [
        ("pods jobs.batch", "job"),
        ("jobs.batch jobsets.jobset.x-k8s.io", "jobset"),
        ("jobsets.jobset.x-k8s.io pytorchjobs.kubeflow.org", "pytorchjob"),
        ("jobsets.jobset.x-k8s.io trainjobs.trainer.kubeflow.org", "trainer"),
    ],
)
def test_the_engine_is_the_first_that_is_installed(
    here: Path, kubectl: Path, monkeypatch: pytest.MonkeyPatch, kinds: str, engine: str
) -> None:
    monkeypatch.setenv("KINDS", kinds)
    assert cluster.found_engine("auto") == engine
    assert cluster.found_engine("jobset") == "jobset"


@pytest.mark.parametrize(
    ("fields", "version"),
    [
        ({"podSpecOverrides": {}}, "2.0"),
        ({"podTemplateOverrides": {"podSpecOverrides": {}}}, "2.1"),
        ({"runtimePatches": {}}, "2.2"),
        ({"runtimePatches": {"terminationGracePeriodSeconds": {}}}, "2.3"),
    ],
)
def test_the_trainers_version_is_read_from_its_fields(fields: dict[str, Any], version: str) -> None:
    other: dict[str, Any] = {"runtimePatches": {"terminationGracePeriodSeconds": {}}}  # a runtime has whole pods
    schemas = {"com.x.v1alpha1.TrainJob": {"properties": fields}, "com.x.v1alpha1.TrainingRuntime": other}
    assert cluster.version_of({"components": {"schemas": schemas}}) == version


def test_the_version_is_asked_of_the_cluster_and_written_for(
    here: Path, kubectl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = here / "schema.json"
    schema.write_text(json.dumps({"components": {"schemas": {"com.x.TrainJob": {"runtimePatches": {}}}}}))
    monkeypatch.setenv("SCHEMA", str(schema))
    monkeypatch.setenv("KINDS", "trainjobs.trainer.kubeflow.org")
    said: list[str] = []
    assert sent(here, "kubernetes", said.append) == 0
    assert "as Kubeflow Trainer 2.2 wants it" in (here / "applied").read_text()
    assert "torch-distributed has to say terminationGracePeriodSeconds: Trainer 2.2's jobs can't" in "\n".join(said)


REFUSED = """\
E1121 16:29:24.069138 28924 memcache.go:265] "Unhandled Error" err="couldn't get current server API group list"
The connection to the server localhost:8080 was refused - did you specify the right host or port?
"""


@pytest.mark.parametrize(
    ("words", "says", "hint"),
    [
        (REFUSED, "The connection to the server localhost:8080 was refused", "kubectl config get-contexts"),
        ('error: context "gone" does not exist\n', 'context "gone" does not exist', "kubectl config get-contexts"),
        ("error: You must be logged in to the server (Unauthorized)\n", "must be logged in", "log in to the cluster"),
        ("Error from server (Forbidden): jobs is forbidden\n", "jobs is forbidden", "ask for that right"),
    ],
)
def test_a_cluster_that_can_not_be_asked_is_said_with_the_next_step(
    here: Path, words: str, says: str, hint: str
) -> None:
    (here / "words").write_text(words)
    program(here / "bin", "kubectl", f"cat {here}/words >&2; exit 1")
    with pytest.raises(RunError) as caught:
        sent(here, "kubernetes")
    (problem,) = caught.value.problems
    assert problem.problem.startswith(says) or says in problem.problem
    assert "memcache" not in problem.problem
    assert hint in problem.hint


def test_what_the_run_file_lacks_is_said_before_a_cluster_is_asked(here: Path, kubectl: Path) -> None:
    with pytest.raises(UserError, match="is a path of this machine's working folder"):
        sent(here, "kubernetes", lambda _: None, "train.output_dir=out")
    assert not calls(kubectl, "kubectl")


def test_status_logs_and_stop_go_through_the_platforms_client(
    here: Path, kubectl: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sent(here, "kubernetes")
    folder = here / "run"
    assert submitting.status(folder, folder) == 0
    assert submitting.logs(folder, folder, follow=True, say=lambda _: None) == 0
    assert "step 1" in capfd.readouterr().out
    assert submitting.stop(folder, folder, lambda _: None) == 0
    words = calls(kubectl, "kubectl")
    assert "--follow" in words
    assert "app.kubernetes.io/instance=run,app.kubernetes.io/managed-by=windlass" in words
    with pytest.raises(UserError, match="nothing was submitted from here"):
        submitting.status(here, here)


@pytest.mark.parametrize(("how", "code"), [("Complete", 0), ("Failed", 1)])
def test_submit_follows_all_pods_through_restarts_and_ends_as_the_job_does(
    here: Path, kubectl: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], how: str, code: int
) -> None:
    monkeypatch.setattr(cluster, "PAUSE_SECONDS", 0.01)
    monkeypatch.setenv("PODS", str(here / "pods"))
    monkeypatch.setenv("AFTER", ended("Suspended"))
    phases = ("", "", "Running Pending Running", "Running Running Running", "Failed Pending Failed")
    (here / "pods").write_text("\n".join((*phases, "Running Running Running")) + "\n")
    # The logs of the first try end with all of its pods; those of the second when the job has.
    ends = f'if [[ "$*" == *--since-time=* ]]; then touch {here}/over; fi; echo "[pod/x-0] step 1" ;;'
    body = KUBECTL.replace('echo "[pod/x-0] step 1" ;;', ends)
    body = body.replace('echo "$AFTER"', f'if [[ -e {here}/over ]]; then echo "$OVER"; else echo "$AFTER"; fi')
    program(here / "bin", "kubectl", body)
    monkeypatch.setenv("OVER", ended(how))
    said: list[str] = []
    assert sent(here, "kubernetes", said.append, follow=True) == code
    waited = [line for line in said if line.startswith("waiting")]
    assert waited == ["waiting: no pod yet", "waiting: Running, Pending, Running", "waiting: Failed, Pending, Failed"]
    assert f"run: {how}" in said
    assert capfd.readouterr().out.count("step 1") == 3, "both tries, and the last words"
    assert sum(word.startswith("--since-time=") for word in calls(kubectl, "kubectl")) == 2, "nothing is shown twice"
    most = [word for word in calls(kubectl, "kubectl") if word.startswith("--max-log-requests=")]
    assert set(most) == {"--max-log-requests=6"}, "its three pods, and as many made anew"


def test_runai_follows_by_its_own_client(here: Path) -> None:
    program(here / "bin", "runai", "exit 0")
    assert sent(here, "runai", follow=True) == 0
    assert calls(here / "bin", "runai")[-4:] == ["run", "--project", "research", "--follow"]


def test_without_a_client_the_files_are_left_with_the_next_step(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(here / "bin"))
    said: list[str] = []
    assert sent(here, "kubernetes", said.append) == 0
    assert f"kubectl apply -f {here}/run/job.yaml" in "\n".join(said)
    facts = {"platform": "kubernetes", "name": "run", "engine": "job", "namespace": None, "nodes": 3}
    (here / "run" / "submitted.json").write_text(json.dumps(facts))
    for following in (False, True):
        with pytest.raises(UserError, match="kubectl can't be run"):
            submitting.logs(here / "run", here / "run", follow=following, say=said.append)


def test_files_are_replaced_whole_or_not_at_all(here: Path) -> None:
    submitting.write(here / "run", {"launch.sh": "old\n"})
    with (here / "run" / "launch.sh").open() as running:
        submitting.write(here / "run", {"launch.sh": "new\n"})
        assert running.read() == "old\n", "who reads it goes on with what it began"
    assert (here / "run" / "launch.sh").read_text() == "new\n"
    (here / "run" / "submitted.json").mkdir()  # can't be replaced by a file
    with pytest.raises(UserError, match="can't be written"):
        submitting.write(here / "run", {"submitted.json": "{}"})
    assert [path.name for path in (here / "run").glob(".*")] == [], "nothing half-done is left"


def test_runai_is_run_where_it_is_and_its_failure_is_ours(here: Path) -> None:
    said: list[str] = []
    assert sent(here, "runai", said.append) == 0
    assert "runai is not here" in "\n".join(said)
    program(here / "bin", "runai", "exit 0")
    assert sent(here, "runai") == 0
    words = calls(here / "bin", "runai")
    assert words[:3] == ["training", "pytorch", "submit"]
    assert words[-3:] == ["--", "bash", f"{here}/run/launch.sh"]
    assert submitting.logs(here / "run", here / "run", follow=False, say=lambda _: None) == 0
    assert submitting.stop(here / "run", here / "run", lambda _: None) == 0
    assert calls(here / "bin", "runai")[-4:] == ["delete", "run", "--project", "research"]
    program(here / "bin", "runai", "echo 'not logged in' >&2; exit 3")
    with pytest.raises(RunError, match="runai ended with 3"):
        sent(here, "runai")


def test_a_volume_that_is_not_here_gets_its_files_copied_there(here: Path) -> None:
    program(here / "bin", "runai", "exit 0")
    plan, overrides, _ = example("train", tuple(word.replace("path: /data", "path: /data") for word in SITE))
    if Path("/data").exists():
        pytest.skip("this machine has a /data")
    said: list[str] = []
    assert submitting.submit(plan, "runai", overrides=overrides, say=said.append) == 0
    assert "is not here: copy launch.sh, run.yaml and accelerate.yaml there" in "\n".join(said)
    assert (here / "mistral4small-lora-fsdp-2xH200-job" / "submit.sh").stat().st_mode & 0o111
    assert not calls(here / "bin", "runai")


def test_what_does_not_fit_is_not_started(here: Path) -> None:
    program(here / "bin", "runai", "exit 0")
    with pytest.raises(UserError, match="does not fit"):
        sent(here, "runai", lambda _: None, "train.per_device_train_batch_size=4096")
    assert not calls(here / "bin", "runai")
    assert sent(here, "runai", lambda _: None, "train.per_device_train_batch_size=4096", dry_run=True) == 0


def test_the_image_is_for_any_user_and_holds_what_was_tested() -> None:
    text = (ROOT / "Containerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if line.startswith("USER")][-1] == "USER 1001:0"
    assert "--constraint" in text
    assert ":latest" not in text
    assert "chmod -R g=u" in text
    needed = {word.lstrip("!") for word in (ROOT / ".containerignore").read_text().split() if word.startswith("!")}
    copied = {word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]}
    assert copied == needed, "what is copied is not ignored, and nothing else is sent"
