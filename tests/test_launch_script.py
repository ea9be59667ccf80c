"""launch.sh under bash, with a stand-in for python3, and with any text users may write."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from launch_jobs import EXAMPLES, calls, environ, example, plan_of, program, render, wait_for

CPU = ("cluster.gpu=cpu", "cluster.nodes=1", "cluster.gpus_per_node=1", "cluster.host_memory_gib=4000")
TWO = (*CPU[:1], "cluster.nodes=2", *CPU[2:], "cluster.network=ethernet-25")
NASTY = "a b'c\"d`e$(touch pwned)$HOME\\f;g&h|i\tä€\U0001f409 #*?"


def written(folder: Path, overrides: tuple[str, ...] = CPU) -> Path:
    folder.mkdir(exist_ok=True)
    plan = plan_of(EXAMPLES / "train.yaml", overrides)
    for name, text in render(plan, "script", overrides=overrides).items():
        (folder / name).write_text(text)
    return folder / "launch.sh"


def clean(script: Path, *options: str) -> str:
    shellcheck = [str(Path(sys.executable).parent / "shellcheck"), "--shell=bash", *options, str(script)]
    done = subprocess.run(shellcheck, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def test_windlass_train_starts_with_any_user_text(tmp_path: Path) -> None:
    """For a user without a home, from the site's mirror."""
    work, folder, fakes = tmp_path / f"wd {NASTY}".replace("/", "_"), tmp_path / f"run {NASTY}", tmp_path / "bin"
    work.mkdir()
    lines = f"first\n{NASTY}\n\n\nEOF\nlast\n"
    env = {"ODD": NASTY, "LINES_OF_IT": lines, "PIP_INDEX_URL": "https://mirror.example/simple"}
    overrides = (
        *(*CPU, "cluster.gpus_per_node=2", "cluster.install=['odd name>=1', b]", "cluster.grace_seconds=77"),
        f"cluster.env={json.dumps({**env, 'HF_TOKEN': {'secret': 'hub', 'key': 'token'}}, ensure_ascii=False)}",
        f"cluster.working_dir={json.dumps(str(work), ensure_ascii=False)}",
        f"data.prompt_template={json.dumps('[[' + NASTY + '{text}]]', ensure_ascii=False)}",
        "train.run_name=@@HEAD@@ @@SETTINGS@@",
    )
    script = written(folder, overrides)
    assert clean(script, "--exclude=SC2016") == ""  # users' words are meant to stand as they are
    shown = f"""printf '%s' "$ODD" >{tmp_path}/odd; printf '%s' "$LINES_OF_IT" >{tmp_path}/lines; pwd >{tmp_path}/cwd
    echo "$HOME $LOGNAME $HF_HOME" >{tmp_path}/home; env >{tmp_path}/env"""
    nobody = 'case $1 in -un) echo "id: cannot find name for user ID 1000660000" >&2; exit 1;; esac; echo 0'
    program(fakes, "id", nobody)
    pip = f'printf "%s\\n" "$PIP_INDEX_URL" "$@" >{tmp_path}/pip; exit ${{PIP_FAILS:-0}}'
    program(fakes, "python3", f'if [[ "$1 $2" == "-m pip" ]]; then {pip}; fi\n{shown}')
    environment = environ(fakes, HOME="/", TMPDIR=str(tmp_path), HF_TOKEN="hf_x")
    environment.pop("LOGNAME", None)

    def launched(**more: str) -> subprocess.CompletedProcess[str]:
        env = {**environment, **more}
        return subprocess.run(["bash", script], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    done = launched(HF_TOKEN="")
    assert (done.returncode, "HF_TOKEN is a secret (hub, key token)" in done.stderr) == (13, True)
    assert not calls(fakes, "python3")
    done = launched(PIP_FAILS="1")
    assert (done.returncode, "from https://mirror.example/simple" in done.stderr) == (1, True)
    assert "train" not in calls(fakes, "python3")
    done = launched()
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "odd").read_text() == NASTY
    assert (tmp_path / "lines").read_text() == lines
    assert (tmp_path / "cwd").read_text() == f"{work}\n"
    assert not list(tmp_path.rglob("pwned"))
    home = tmp_path / f"windlass-home-{os.getuid()}"
    assert (tmp_path / "home").read_text().split() == [str(home), "windlass", str(home / "huggingface")]
    assert (tmp_path / "pip").read_text().splitlines()[-2:] == ["odd name>=1", "b"]
    seen = (tmp_path / "env").read_text().splitlines()
    for variable in (
        "PYTORCH_ALLOC_CONF=expandable_segments:True",
        "NCCL_DEBUG=WARN",
        "WINDLASS_NODES=1",
        "WINDLASS_RANKS_PER_NODE=2",
        "WINDLASS_GRACE_SECONDS=77",
        "WINDLASS_LOG_FORMAT=text",
    ):
        assert variable in seen
    options = [word for override in overrides for word in ("--override", override)]
    train = ["-m", "windlass", "train", f"{folder}/run.yaml", "--accelerate", f"{folder}/accelerate.yaml"]
    assert calls(fakes, "python3")[-len(options) - 7 :] == [*train, *options, "--resume"]


@pytest.mark.parametrize(
    ("override", "python", "code", "text"),
    [
        ("cluster.working_dir=/nix", "", 13, "the working folder is missing: /nix"),
        ("cluster.install=[b]", 'if [[ "$2" == pip ]]; then exit 1; fi', 1, "pip could not install b"),
        ("cluster.gpu=cpu", 'if [[ "$1" == -c ]]; then exit 1; fi', 13, "windlass is not installed in this image"),
    ],
)
def test_other_nodes_are_told_why_one_cannot_start(
    tmp_path: Path, override: str, python: str, code: int, text: str
) -> None:
    program(tmp_path / "bin", "python3", python)
    script = written(tmp_path / "run", (*TWO, override))
    done = subprocess.run(["bash", script], env=environ(tmp_path / "bin"), capture_output=True, text=True, check=False)
    assert (done.returncode, text in done.stderr) == (code, True)
    told = calls(tmp_path / "bin", "python3")[-5:]
    assert told[:4] == ["-m", "windlass.ranks.node", "2", str(code)]
    assert text in told[4]


def test_script_survives_rewriting_and_a_stop_signal(tmp_path: Path) -> None:
    """bash reads a script as it goes: what a second submission writes would be taken for the rest of this one."""
    script = written(tmp_path / "run")
    again = f"for ((i = 0; i < {len(script.read_bytes()) // 8 + 100}; i++)); do echo 'exit 99'; done >'{script}'"
    program(tmp_path / "bin", "python3", f'if [[ "$1" == -c ]]; then {again}; fi')
    done = subprocess.run(["bash", script], env=environ(tmp_path / "bin"), timeout=60, check=False)
    assert done.returncode == 0
    script = written(tmp_path / "run", (*CPU, "cluster.install=[b]"))
    program(tmp_path / "bin", "python3", f"touch {tmp_path}/installs; sleep 1")
    process = subprocess.Popen(["bash", script], env=environ(tmp_path / "bin"))
    wait_for((tmp_path / "installs").exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75


def test_scripts_pass_shellcheck(tmp_path: Path) -> None:
    plan, overrides, _ = example("train")
    (tmp_path / "launch.sh").write_text(render(plan, "script", overrides=overrides)["launch.sh"])
    assert clean(tmp_path / "launch.sh") == ""
    (tmp_path / "bad.sh").write_text("#!/usr/bin/env bash\nrm -rf $1/*\n")
    assert "SC2086" in clean(tmp_path / "bad.sh"), "it would say something"


def test_the_accelerate_file_is_read_back_as_the_same_layout(tmp_path: Path) -> None:
    for index, overrides in enumerate((CPU, TWO, (*CPU, "cluster.gpus_per_node=2"))):
        path = written(tmp_path / str(index), overrides).with_name("accelerate.yaml")
        plan, again = (plan_of(EXAMPLES / "train.yaml", overrides, file) for file in (None, path))
        for key in ("name", "shard", "nodes", "ranks", "precision"):
            assert getattr(again.layout, key) == getattr(plan.layout, key)
        assert yaml.safe_load(path.read_text())["num_processes"] == plan.layout.ranks
