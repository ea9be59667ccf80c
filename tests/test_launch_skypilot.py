"""SkyPilot: the task file by SkyPilot's own package, its commands under bash, and a stand-in for `sky`."""

import contextlib
import functools
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from launch_jobs import EXAMPLES, calls, environ, plan_of, program, render, wait_for
from ports import free_port
from refusals import refused
from text_run import make_text_run

from windlass import run_folder
from windlass.errors import RunError
from windlass.files import read_json_lines
from windlass.launch import submit as submitting
from windlass.launch.submit import open_record

SKYPILOT = Path(os.environ.get("WINDLASS_SKYPILOT", ".venv/skypilot")).absolute()
READ = """
import inspect, json, sys
import sky
from sky import backends
from sky.jobs.recovery_strategy import StrategyExecutor
from sky.utils import dag_utils
task = sky.Task.from_yaml(sys.argv[1])
[resources] = task.resources

def recovery():  # by what a managed job's controller makes of it
    unknown = dict.fromkeys(name for name in inspect.signature(StrategyExecutor.make).parameters)
    dag = dag_utils.load_chain_dag_from_yaml(sys.argv[1])
    dag_utils.fill_default_config_in_dag_for_job_launch(dag)
    made = StrategyExecutor.make(**{**unknown, "task": dag.tasks[0], "backend": backends.CloudVmRayBackend()})
    return {"max_restarts_on_errors": made.max_restarts_on_errors, "recover_on_exit_codes": made.recover_on_exit_codes}

storage = {path: [one.source, one.mode.value] for path, one in task.storage_mounts.items()}
print(json.dumps({
    "name": task.name, "nodes": task.num_nodes, "files": task.file_mounts, "storage": storage,
    "volumes": task.volumes, "envs": task.envs, "secrets": [str(one) for one in task.managed_secret_refs],
    "resources": resources.to_yaml_config(),
    "recovery": recovery(),
}))
"""


NO_EVAL = ("train.eval_strategy=no", "data.val_split=null")


def settings(here: Path, *more: str) -> tuple[str, ...]:
    """Return the overrides of a run of files on this machine, with its folder on a bucket."""
    mounts = "cluster.skypilot.mounts={/runs: s3://team/runs, /more: gs://team/data, /claim: a-volume}"
    wheel = here / "windlass-1-py3-none-any.whl"
    wheel.touch()
    install = f"cluster.install=['{wheel}[train,gpu]']"
    return ("train.output_dir=/runs/a", mounts, install, *more)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the run file of a run whose model and data are folders next to it."""
    file = make_text_run(tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    return file


def task_of(file: Path, *overrides: str) -> dict[str, Any]:
    made = render(plan_of(file, overrides), "skypilot", overrides=overrides)
    return dict(yaml.safe_load(made["task.yaml"]))


def test_what_is_here_is_uploaded_and_what_is_on_a_mount_is_not(file: Path, tmp_path: Path) -> None:
    wheel, model, data = (str(tmp_path / name) for name in ("windlass-1-py3-none-any.whl", "demo/model", "demo/data"))
    task = task_of(file, *settings(tmp_path, "cluster.gpu=a100-40gb", "cluster.skypilot.spot=true"))
    buckets = {"/runs": {"source": "s3://team/runs", "mode": "MOUNT_CACHED"}, "/more": "gs://team/data"}
    assert task["file_mounts"] == buckets | {path: path for path in (model, data, wheel)}
    assert task["volumes"] == {"/claim": "a-volume"}
    assert task["resources"]["accelerators"] == {"A100": 2}
    assert task["resources"]["job_recovery"] == {"max_restarts_on_errors": 3, "recover_on_exit_codes": [75]}
    assert "network_tier" not in task["resources"]
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}')
    image = "a/b@sha256:" + "0" * 64
    more = ("cluster.nodes=2", "cluster.network=infiniband", f"cluster.image={image}", "cluster.gpu=h100")
    task = task_of(file, *settings(tmp_path, *more, "data.dataset_name_or_path=rows.jsonl", *NO_EVAL))
    assert task["file_mounts"]["~/sky_workdir/rows.jsonl"] == str(tmp_path / "rows.jsonl"), "where the run starts"
    assert data not in task["file_mounts"]
    assert task["resources"]["network_tier"] == "best"
    assert task["resources"]["image_id"] == f"docker:{image}"
    assert "uv" not in task["setup"], "the image has windlass"
    for name in ("prompts.txt", "of-set.jinja"):
        (tmp_path / name).write_text("{{ messages }}")
    read = ("data.eval={a: {path: rows.jsonl, chat_template: of-set.jinja}}", "train.sample={file: prompts.txt}")
    template = f"data.chat_template='{{{{ messages }}}}{'a' * 300}'"  # no path, though as long as no file's name
    task = task_of(file, *settings(tmp_path, *read, template))
    assert {f"~/sky_workdir/{name}" for name in ("prompts.txt", "of-set.jinja")} < task["file_mounts"].keys()
    task = task_of(file, *settings(tmp_path, f"cluster.skypilot.mounts={{/runs: s3://runs, {tmp_path}: s3://all}}"))
    assert model not in task["file_mounts"], "it is on a bucket"


@pytest.mark.parametrize(
    ("code", "where", "more"),
    [
        ("not-mounted", "train.output_dir=/elsewhere/a", ["train.output_dir=/elsewhere/a"]),
        ("not-mounted", "chat_template=/gone.jinja", ["data.chat_template=/gone.jinja"]),
        ("not-mounted", "train.output_dir=/runs-of-mine", ["train.output_dir=/runs-of-mine"]),
        ("links", "model.model_name_or_path", []),
        ("relative-path", "model.model_name_or_path=../x", ["model.model_name_or_path=../x"]),
        ("no-windlass", "cluster.install=[]", ["cluster.install=[]"]),
        ("restarts-without-saves", "train.save_strategy=no", ["train.save_strategy=no"]),
    ],
)
def test_what_would_fail_on_rented_machines_is_refused_here(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, where: str, more: list[str]
) -> None:
    if code == "links":
        config = tmp_path / "demo" / "model" / "config.json"
        config.rename(tmp_path / "config.json")
        config.symlink_to(tmp_path / "config.json")
    if code == "relative-path":
        (tmp_path / "demo" / "model").rename(tmp_path / "x")
        (tmp_path / "sub").mkdir()
        monkeypatch.chdir(tmp_path / "sub")
    with refused(code, where):
        task_of(file, *settings(tmp_path, *more))


SKY = r"""
case "$1 $2" in
  "jobs queue") if [[ -e $FAKE/jobs ]]; then echo server started; cat "$FAKE/jobs"; else
    echo 'sky.exceptions.ClusterNotUpError: No in-progress managed jobs.' >&2; exit 1; fi ;;
  "jobs launch") [[ ! -e $FAKE/broken ]] && cp task.yaml "$FAKE/launched" ;;
esac
"""


def test_a_job_is_launched_once_and_found_again(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the stand-in prints is what sky 0.14.1 does, without jobs and with one."""
    program(tmp_path / "bin", "sky", SKY)
    for name, value in environ(tmp_path / "bin", FAKE=str(tmp_path)).items():
        monkeypatch.setenv(name, value)
    overrides = settings(tmp_path, "cluster.env={HF_TOKEN: {secret: hub, key: token}, A: '$(b) c'}")
    plan = plan_of(file, overrides)
    (tmp_path / "broken").touch()
    with refused("client-failed", "HF_TOKEN task.yaml", RunError):
        submitting.submit(plan, "skypilot", overrides=overrides, say=print)
    (tmp_path / "broken").unlink()
    assert not (tmp_path / "demo-job" / "submitted.json").exists()
    assert submitting.submit(plan, "skypilot", overrides=overrides, say=print) == 0
    words = calls(tmp_path / "bin", "sky")
    assert words[-7:] == [*["jobs", "launch", "--yes", "--detach-run", "--secret", "HF_TOKEN", "task.yaml"]]
    task = yaml.safe_load((tmp_path / "launched").read_text())
    assert task["secrets"] == {"HF_TOKEN": None}
    assert task["envs"]["A"] == "$(b) c"
    row = {"job_name": "demo", "job_id": 3, "status": "RUNNING", "recovery_count": 2, "failure_reason": None}
    rows = [{**row, "job_id": 2, "status": "FAILED"}, row, {**row, "job_name": "another", "job_id": 9}]
    (tmp_path / "jobs").write_text(json.dumps(rows, indent=2))
    with refused("already-running", "name"):
        submitting.submit(plan, "skypilot", overrides=overrides, say=print)
    platform, record = open_record(tmp_path / "demo-job", Path("/runs/a"), print)
    capsys.readouterr()
    assert platform.status(record) == 0
    assert capsys.readouterr().out == "job 3: RUNNING, restarted 2 times\n"
    assert platform.logs(record, follow=False) == 0
    assert " ".join(calls(tmp_path / "bin", "sky")).endswith("jobs logs --no-follow --name demo")
    assert platform.stop(record) == 0
    assert " ".join(calls(tmp_path / "bin", "sky")).endswith("jobs cancel --yes --graceful --name demo")
    (tmp_path / "jobs").write_text("nothing that is JSON")
    with refused("client-failed", error=RunError):
        platform.status(record)


def test_the_setup_installs_windlass_and_fetches(file: Path, tmp_path: Path) -> None:
    """With a stand-in for uv, whose environment has a stand-in for Python."""
    overrides = settings(tmp_path, "cluster.env={PIP_INDEX_URL: 'https://mirror'}")
    task = task_of(file, *overrides)
    home = tmp_path / "home"
    python = program(home, "python3", "exit 0")
    uv = f'cd "$HOME"; mkdir -p windlass/bin; cp {python} windlass/bin/python3; cp {python} windlass/bin/pip'
    program(home / ".local", "x", "")
    program(home / ".local" / "bin", "uv", uv)
    for _ in range(2):  # a job that is started again on the same machine keeps the environment
        subprocess.run(["bash", "-c", task["setup"]], env={**environ(home), "HOME": str(home)}, check=True)
    wheel = f"{tmp_path}/windlass-1-py3-none-any.whl[train,gpu]"
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel]
    fetch = ["-m", "windlass", "fetch", "run.yaml", *(word for one in overrides for word in ("--override", one))]
    assert calls(home, "python3") == [*install, *fetch] * 2
    assert len(calls(home / ".local" / "bin", "uv")) == 6, "made once"
    program(home, "python3", "exit 7")
    (home / "windlass" / "bin" / "python3").write_text((home / "python3").read_text())
    assert subprocess.run(["bash", "-c", task["setup"]], env={**environ(home), "HOME": str(home)}).returncode == 7


@pytest.mark.prove
@pytest.mark.timeout(600)
def test_two_nodes_train_save_when_stopped_and_resume(file: Path, tmp_path: Path) -> None:
    """The task's `run`, with SkyPilot's variables, as it is started on each node."""
    kept = f"cluster.skypilot.mounts={{{tmp_path}: s3://team/runs}}"
    sizes = ("cluster.nodes=2", "cluster.gpus_per_node=1", "cluster.network=ethernet-25", "cluster.gpu=cpu")
    folder = tmp_path / "demo" / "run"
    more = ("train.max_steps=100000", "train.eval_strategy=no", "train.save_steps=50000", f"train.output_dir={folder}")
    overrides = settings(tmp_path, *sizes, *more, kept)
    job = tmp_path / "sky_workdir"
    assert (
        submitting.submit(plan_of(file, overrides), "skypilot", overrides=overrides, out=job, dry_run=True, say=print)
        == 0
    )
    task = yaml.safe_load((job / "task.yaml").read_text())
    port = str(free_port())

    def last() -> int:
        steps = folder / run_folder.STEPS.format(rank=0)
        return max((line["step"] for line in read_json_lines(steps)), default=0) if steps.exists() else 0

    def has_trained(steps: int) -> bool:
        return last() >= steps

    before = 0
    for _ in range(2):
        nodes = []
        for rank in range(2):
            place = {"SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NUM_NODES": "2", "MASTER_PORT": port}
            place["SKYPILOT_NODE_IPS"] = "127.0.0.1\n127.0.0.2"
            env = environ(tmp_path, **task["envs"], **place, OMP_NUM_THREADS="1")
            nodes.append(subprocess.Popen(["bash", "-c", task["run"]], cwd=job, env=env, start_new_session=True))
        try:
            wait_for(functools.partial(has_trained, before + 2))
            nodes[1].send_signal(signal.SIGTERM)
            assert [node.wait(120) for node in nodes] == [75, 75]
        finally:
            for node in nodes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(node.pid, signal.SIGKILL)
        assert last() > before, "it goes on where it was"
        before = last()


@pytest.mark.skipif(not (SKYPILOT / "bin" / "python").exists(), reason="make prove-skypilot installs SkyPilot")
def test_skypilot_reads_every_task(file: Path, tmp_path: Path) -> None:
    """Nothing is lost on the way through SkyPilot's own classes, and a key that it lacks would be noticed."""
    here = settings(tmp_path, "cluster.gpu=cpu", "cluster.env={A: 'b c', T: {secret: hub, key: token}}")
    example = EXAMPLES / "platforms" / "skypilot.yaml"
    for number, (run, overrides) in enumerate({file: here, example: ()}.items()):
        out = tmp_path / f"job-{number}"
        plan = plan_of(run, overrides)
        submitting.submit(plan, "skypilot", overrides=overrides, out=out, dry_run=True, say=print)
        task = yaml.safe_load((out / "task.yaml").read_text())
        read = json.loads(sky(out, tmp_path).stdout)
        assert (read["name"], read["nodes"]) == (task["name"], task["num_nodes"])
        assert read["envs"] == task["envs"]
        assert len(read["secrets"]) == len(task["secrets"]) == 1
        assert read["volumes"] == task.get("volumes", {})
        mounted = {path: one for path, one in task["file_mounts"].items() if isinstance(one, dict)}
        assert read["storage"] == {path: [one["source"], one["mode"]] for path, one in mounted.items()}
        assert read["files"] == {path: one for path, one in task["file_mounts"].items() if path not in mounted}
        for key, value in task["resources"].items():
            if key == "job_recovery":
                assert value.items() <= read["resources"][key].items()
            elif key == "image_id":
                assert value in str(read["resources"][key])
            else:
                assert read["resources"].get(key, False) == value, key
    text = (out / "task.yaml").read_text()
    (out / "task.yaml").write_text(text.replace("use_spot", "use_spots"))
    assert "use_spots" in sky(out, tmp_path).stderr
    (out / "task.yaml").write_text(text.replace("recover_on_exit_codes", "recover_on"))
    assert json.loads(sky(out, tmp_path).stdout)["recovery"]["recover_on_exit_codes"] != [75]


def sky(folder: Path, home: Path) -> subprocess.CompletedProcess[str]:
    command = [str(SKYPILOT / "bin" / "python"), "-c", READ, "task.yaml"]
    env = {**os.environ, "HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)
