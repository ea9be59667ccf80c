"""Run:ai: the command, its script and the REST body, read by Run:ai's own models; the client is a stand-in."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from launch_jobs import (
    EVERY,
    EXAMPLES,
    FULL,
    SITE,
    calls,
    client_model,
    environ,
    example,
    lost,
    plan_of,
    program,
    render,
)
from refusals import refused

from windlass.errors import RunError, UserError
from windlass.launch import submit as submitting
from windlass.launch.job import build_job
from windlass.launch.platforms import runai

DISTRIBUTED = "runai.models.distributed_creation_request.DistributedCreationRequest"
TRAINING = "runai.models.training_creation_request.TrainingCreationRequest"


def read_back(model: str, body: dict[str, Any]) -> list[str]:
    made = client_model(model).from_dict(body)
    if model == DISTRIBUTED:
        made.spec.slots_per_worker = made.spec.ssh_auth_mount_path = None  # put there by the client, for MPI
    return lost(body, json.loads(made.to_json()))


@pytest.mark.takes("builds models from a large schema")
def test_rest_body_is_accepted_by_runais_models() -> None:
    for site in (SITE, FULL):
        body = runai.make_payload(build_job(example("train", site)[0]))
        assert read_back(DISTRIBUTED, body) == []
    body["spec"]["gpuDevices"] = 1
    assert read_back(DISTRIBUTED, body) == [".spec.gpuDevices: 1 -> None"], "it would be noticed"
    job = build_job(example("two-gpus", (*SITE, "cluster.nodes=1", "cluster.gpus_per_node=2"))[0])
    words = runai.submit_command(job)
    assert words[:4] == ["runai", "training", "standard", "submit"]
    assert not {"--workers", "--clean-pod-policy"} & set(words)
    assert not any(word.startswith("--master-") for word in words)
    body = runai.make_payload(job)
    assert "numWorkers" not in body["spec"]
    assert read_back(TRAINING, body) == []


def test_every_option_is_on_the_command_line_and_in_the_body(tmp_path: Path) -> None:
    """Volumes that Run:ai can't mount are refused; variables are expanded as by Kubernetes."""
    mounted = (
        "cluster.volumes=[{claim: project-001, path: /data}, {config_map: ca, path: /etc/ssl/ca.crt, sub_path: ca.crt},"
        " {secret: netrc, path: /secrets}, {empty_dir: 200Gi, path: /scratch}]"
    )
    more = (mounted, "cluster.runai.node_pools=[h200, any]", "cluster.env={A: '$(B) $$'}")
    plan, overrides, _ = example("train", (*EVERY, *more))
    submit_sh = render(plan, "runai", overrides=overrides)["submit.sh"]
    job = build_job(plan, overrides=overrides)
    assert read_back(DISTRIBUTED, runai.make_payload(job)) == []
    words = runai.submit_command(job)
    for option, value in (
        ("--node-pools", "h200"),
        ("--preferred-pod-topology-key", "topology.kubernetes.io/zone"),
        ("--master-cpu-core-limit", "16"),
        ("--auto-deletion-time-after-completion", "86400s"),
        ("--configmap-map-volume", "name=ca,path=/etc/ssl/ca.crt,subpath=ca.crt"),
        ("--secret-volume", "path=/secrets,name=netrc"),
        ("--empty-dir-volume", "path=/scratch,size-limit=200Gi"),
        ("-e", "A=$$(B) $$$$"),
    ):
        assert (option, value) in set(pairwise(words)), option
    older = submit_sh.partition("older ones may lack")[2].partition("set -euo")[0]
    assert "--secret-volume" in older
    assert "--preemptibility" not in older, "only what is used"
    with pytest.raises(UserError, match="mounts no part of a volume, and none read-only"):
        render(example("train", EVERY)[0], "runai")


def test_the_script_runs_the_very_command(tmp_path: Path) -> None:
    odd = "a b'c\"$(x)`y`\nä,€"
    annotation = f"cluster.runai.annotations={{odd: {json.dumps(odd, ensure_ascii=False)}}}"
    plan, overrides, _ = example("train", (*SITE, annotation))
    fakes, script = tmp_path / "bin", tmp_path / "submit.sh"
    program(fakes, "runai", f'echo "$MSYS_NO_PATHCONV $MSYS2_ARG_CONV_EXCL" >{tmp_path}/msys')
    script.write_text(render(plan, "runai", overrides=overrides)["submit.sh"])
    subprocess.run(["bash", script], env=environ(fakes), check=True, timeout=200)
    words = runai.submit_command(build_job(plan, overrides=overrides))
    assert calls(fakes, "runai") == words[1:]
    assert f"odd={odd}" in words
    assert (tmp_path / "msys").read_text() == "1 *\n", "Git Bash leaves paths alone"
    assert words[words.index("--workers") + 1] == "2", "a master and two workers"
    for option in ("gpu-devices-request", "cpu-memory-limit", "restart-policy", "extended-resource"):
        assert words[words.index(f"--{option}") + 1] == words[words.index(f"--master-{option}") + 1]
    shellcheck = [str(Path(sys.executable).parent / "shellcheck"), "--exclude=SC2016", str(script)]
    assert subprocess.run(shellcheck, capture_output=True, text=True, check=False, timeout=60).stdout == ""


def test_unsupported_runai_settings_are_refused() -> None:
    """All at once."""
    plan = example("train", (*SITE, "cluster.runai.project=null", "cluster.image=null"))[0]
    with refused("no-project") as problems:
        render(plan, "runai")
    assert {problem.code for problem in problems} == {"no-project", "no-image"}
    assert all(problem.hint for problem in problems)


@pytest.mark.fault(
    "a run that Run:ai has already", "`windlass submit`", "Run:ai has a job run already, in project research"
)
@pytest.mark.takes("plans and submits four times")
def test_a_refused_submit_leaves_what_the_running_job_is_restarted_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes, run, table = tmp_path / "bin", tmp_path / "run", tmp_path / "jobs"
    monkeypatch.setenv("PATH", f"{fakes}:/usr/bin:/bin")
    words = [word for word in SITE if not word.startswith("cluster.volumes")]
    overrides = (*words, f"cluster.volumes=[{{claim: a, path: {tmp_path}}}]", f"train.output_dir={run}")
    list_jobs = f"if [[ $2 == list ]]; then cat {table}; exit $?; fi"
    program(fakes, "runai", f"{list_jobs}; echo ' run  Distributed  Running  research' >>{table}")
    table.write_text(" another  Distributed  Running  run\n\n")

    def send(*more: str) -> int:
        settings = (*overrides, *more)
        return submitting.submit(plan_of(EXAMPLES / "train.yaml", settings), "runai", overrides=settings, say=print)

    assert send() == 0
    assert calls(fakes, "runai")[:5] == ["training", "list", "--project", "research", "--no-headers"]
    before = {path.name: path.read_text() for path in run.iterdir()}
    with refused("already-running", "name") as problems:
        send("lora.r=2")
    assert problems[0].problem == "Run:ai has a job run already, in project research"
    table.unlink()  # as without a login
    with refused("client-failed", "runai training list --project research --no-headers", error=RunError):
        send("lora.r=2")
    assert {path.name: path.read_text() for path in run.iterdir()} == before
    table.write_text("")  # deleted
    assert send("lora.r=2") == 0
    assert {path.name: path.read_text() for path in run.iterdir()} != before


def test_installed_client_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes, run, printed = tmp_path / "bin", tmp_path / "run", list[str]()
    monkeypatch.setenv("PATH", f"{fakes}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    words = [word for word in SITE if not word.startswith("cluster.volumes")]
    overrides = (*words, f"cluster.volumes=[{{claim: a, path: {tmp_path}}}]", f"train.output_dir={run}")
    plan = plan_of(EXAMPLES / "train.yaml", overrides)  # on a machine with the pods' volume

    def send(**options: Any) -> None:
        assert submitting.submit(plan, "runai", overrides=overrides, say=printed.append, **options) == 0

    program(fakes, "runai", "exit 0")
    other, overrides_there, _ = example("train")  # whose /data is not on this machine
    if not Path("/data").exists():
        assert submitting.submit(other, "runai", overrides=overrides_there, say=printed.append) == 1
        assert "is not here: copy launch.sh, accelerate.yaml, run.yaml there" in printed[-1]
        assert (tmp_path / "mistral4small-lora-fsdp-2xH200-job" / "submit.sh").stat().st_mode & 0o111
        assert not calls(fakes, "runai")
    send(follow=True)
    assert calls(fakes, "runai")[5:8] == ["training", "pytorch", "submit"]
    assert calls(fakes, "runai")[-5:] == ["logs", "run", "--project", "research", "--follow"]
    platform, record = submitting.open_record(run, run, printed.append)
    for verb, ask in (("describe", platform.status), ("delete", platform.stop)):
        assert ask(record) == 0
        assert calls(fakes, "runai")[-4:] == [verb, "run", "--project", "research"]
    program(fakes, "runai", "echo 'not logged in' >&2; exit 3")
    with refused("client-failed", error=RunError):
        send()
