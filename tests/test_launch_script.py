"""launch.sh under bash: with stand-ins for the programs it calls, and whatever users may write."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from launch_jobs import (
    calls,
    environ,
    example,
    plan_of,
    program,
)

from windlass import demo
from windlass.launch.rendezvous import PORT
from windlass.launch.submit import render
from windlass.plan import Plan
from windlass.plan.accelerate import read_accelerate

PET = {"PET_NODE_RANK": "0", "PET_NNODES": "2", "PET_MASTER_ADDR": "localhost"}
SLURM = {"SLURM_JOB_ID": "123", "SLURM_NODEID": "0", "SLURM_NNODES": "2"}
CPU = ("cluster.gpus_per_node=1",)
TWO = ("cluster.nodes=2", "cluster.gpus_per_node=1", "cluster.network=ethernet-25")
NASTY = "a b'c\"d`e$(touch pwned)$HOME\\f;g&h|i\tä€\U0001f409 #*?"
SHELLCHECK = Path(sys.executable).parent / "shellcheck"
# What a rank does: leave its number and its code in the status directory.
RANK = 'echo $$ >"$WINDLASS_STATUS_DIR/pid-0"; echo {code} >"$WINDLASS_STATUS_DIR/code-0"; exit 1'


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run file of a small model on this machine's CPU, in a folder with a space."""
    return demo.make(tmp_path_factory.mktemp("tiny run"))


def written(folder: Path, plan: Plan, to: str = "script", overrides: tuple[str, ...] = ()) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in render(plan, to, overrides=overrides).items():
        (folder / name).write_text(text)
    return folder / "launch.sh"


def launched(script: Path, fakes: Path, **more: str) -> subprocess.CompletedProcess[str]:
    env = environ(fakes, **more)
    return subprocess.run(["bash", script], env=env, capture_output=True, text=True, timeout=30, check=False)


def test_one_node_starts_its_ranks_through_accelerate(tiny: Path, tmp_path: Path) -> None:
    fakes = tmp_path / "bin"
    program(fakes, "accelerate", "env >" + str(tmp_path / "env"))
    overrides = ("cluster.gpus_per_node=2", "train.seed=7")
    script = written(tmp_path / "run dir", plan_of(tiny, overrides), overrides=overrides)
    done = launched(script, fakes)
    assert done.returncode == 0, done.stderr
    words = calls(fakes, "accelerate")
    where = str(tmp_path / "run dir")
    assert words[:5] == ["launch", "--config_file", f"{where}/accelerate.yaml", "--num_machines", "1"]
    assert words[5:9] == ["--num_processes", "2", "--machine_rank", "0"]
    port = int(words[words.index("--main_process_port") + 1])
    assert port != PORT, "another run on this machine may have the usual one"
    socket.create_server(("localhost", port)).close()
    assert words[-9:] == [
        *("-m", "windlass", "train", f"{where}/run.yaml"),
        *("--override", "cluster.gpus_per_node=2", "--override", "train.seed=7", "--resume"),
    ]
    assert "demo: 1 x 2 cpu" in done.stdout
    assert "versions python" in done.stdout
    seen = (tmp_path / "env").read_text()
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in seen
    assert "NCCL_DEBUG=WARN" in seen


@pytest.mark.parametrize(
    ("told", "port"),
    [
        ({**PET, "PET_MASTER_PORT": "23456"}, 23456),
        ({**PET, "PET_NNODES": "2:2", "RANK": "1", "WORLD_SIZE": "9"}, 29500),
        ({"RANK": "0", "WORLD_SIZE": "16", "MASTER_ADDR": "localhost", "MASTER_PORT": "23457"}, 23457),
        ({"JOB_COMPLETION_INDEX": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "23458"}, 23458),
        ({**SLURM, "SLURM_JOB_NODELIST": "n[1-2]"}, 20246),
    ],
    ids=["kubeflow", "kubeflow-range", "operator", "indexed-job", "slurm"],
)  # fmt: skip
def test_a_node_learns_its_place_from_whatever_the_platform_sets(
    tiny: Path, tmp_path: Path, told: dict[str, str], port: int
) -> None:
    fakes = tmp_path / "bin"
    program(fakes, "accelerate", "env >" + str(tmp_path / "env"))
    program(fakes, "scontrol", "printf '%s\\n' localhost n2")
    # The meeting is not what this looks at.
    program(
        fakes,
        "python3",
        f'[[ "$2" == windlass.launch.rendezvous ]] || exec {sys.executable} "$@"; touch "${{@: -1}}/ready"',
    )
    done = launched(written(tmp_path / "run", plan_of(tiny, TWO)), fakes, **told)
    assert done.returncode == 0, done.stderr
    words = calls(fakes, "accelerate")
    options = dict(zip(words[1:15:2], words[2:16:2], strict=True))
    assert options["--machine_rank"] == "0"
    assert options["--main_process_ip"] == "localhost"
    assert options["--main_process_port"] == str(port)
    assert options["--num_machines"] == options["--num_processes"] == "2"
    seen = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line)
    assert not {"RANK", "WORLD_SIZE", "PET_NNODES", "PET_NODE_RANK", "MASTER_ADDR"} & seen.keys()


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({}, "planned for 2 nodes, and the platform started 1"),
        ({**PET, "PET_NNODES": "3"}, "planned for 2 nodes, and the platform started 3"),
        ({"PET_NODE_RANK": "2", "PET_NNODES": "2", "PET_MASTER_ADDR": "x"}, "no node '2' among 2"),
        ({"PET_NODE_RANK": "$(id)", "PET_NNODES": "2", "PET_MASTER_ADDR": "x"}, "no node '$(id)' among 2"),
        ({"PET_NODE_RANK": "1", "PET_NNODES": "2"}, "the address of node 0 is unknown"),
        ({**SLURM, "MASTER_ADDR": "x", "SLURM_NTASKS_PER_NODE": "4"}, "one task per node"),
    ],
)  # fmt: skip
def test_a_platform_that_disagrees_with_the_plan_is_not_tried_again(
    tiny: Path, tmp_path: Path, told: dict[str, str], says: str
) -> None:
    fakes = tmp_path / "bin"
    program(fakes, "accelerate", "")
    done = launched(written(tmp_path / "run", plan_of(tiny, TWO)), fakes, **told)
    assert done.returncode == 13
    assert says in done.stderr
    assert not calls(fakes, "accelerate")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("exit 0", 0),
        (RANK.format(code=13), 13),
        (RANK.format(code=75), 75),
        (RANK.format(code=1), 1),
        (RANK.format(code=2), 13),
        (RANK.format(code=137), 1),
        ("exit 7", 1),
        # The first that failed is the cause; the others only lost it.
        ('echo 13 >"$WINDLASS_STATUS_DIR/code-1"; sleep 0.05; echo 1 >"$WINDLASS_STATUS_DIR/code-0"; exit 1', 13),
        ('echo 1 >"$WINDLASS_STATUS_DIR/code-0"; sleep 0.05; echo 75 >"$WINDLASS_STATUS_DIR/code-1"; exit 1', 1),
    ],
)
def test_the_ranks_own_exit_code_comes_through(tiny: Path, tmp_path: Path, body: str, code: int) -> None:
    fakes = tmp_path / "bin"
    program(fakes, "accelerate", body)
    script = written(tmp_path / "run", plan_of(tiny, CPU))
    assert launched(script, fakes, TMPDIR=str(tmp_path)).returncode == code
    assert not list(tmp_path.glob("windlass-??????")), "the status directory is removed"


def test_a_rank_that_was_killed_is_named_with_what_it_was_doing(tiny: Path, tmp_path: Path) -> None:
    fakes = tmp_path / "bin"
    body = """for rank in 0 3; do echo 999999 >"$WINDLASS_STATUS_DIR/pid-$rank"; done
    echo 0 >"$WINDLASS_STATUS_DIR/code-0"
    echo "loading the model" >"$WINDLASS_STATUS_DIR/phase-3"
    exit 1"""
    program(fakes, "accelerate", body)
    done = launched(written(tmp_path / "run", plan_of(tiny, CPU)), fakes)
    assert done.returncode == 1
    assert "rank 3 was killed while loading the model" in done.stderr
    assert "rank 0 was killed" not in done.stderr


SAVER = """
import os, signal, sys, time
from pathlib import Path
status_dir = Path(os.environ["WINDLASS_STATUS_DIR"])
def save(*_):
    time.sleep(0.3)
    (status_dir / "code-0").write_text("75")
    Path(sys.argv[1]).write_text("saved")
    os._exit(75)
time.sleep(float(sys.argv[2]))
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, save)
(status_dir / "pid-0").write_text(str(os.getpid()))
Path(sys.argv[1] + ".ready").touch()
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
@pytest.mark.parametrize("late", [0.0, 1.0], ids=["listening", "still starting"])
def test_a_stop_signal_reaches_the_ranks_and_they_save(
    tiny: Path, tmp_path: Path, number: signal.Signals, late: float
) -> None:
    fakes = tmp_path / "bin"
    (tmp_path / "saver.py").write_text(SAVER)
    mark = tmp_path / "mark"
    program(fakes, "accelerate", f"touch {mark}.began; {sys.executable} {tmp_path}/saver.py {mark} {late}; exit 1")
    script = written(tmp_path / "run", plan_of(tiny, CPU))
    process = subprocess.Popen(
        ["bash", script],
        env=environ(fakes),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # bash can't trap what it was started deaf to
    )
    wait_for(Path(f"{mark}.began" if late else f"{mark}.ready"))
    process.send_signal(number)
    assert process.wait(20) == 75
    assert mark.read_text() == "saved"


def test_a_signal_to_the_whole_group_is_taken_once(tiny: Path, tmp_path: Path) -> None:
    """As Slurm sends it: to the script, the launcher and the ranks alike."""
    fakes = tmp_path / "bin"
    (tmp_path / "saver.py").write_text(SAVER)
    mark = tmp_path / "mark"
    program(fakes, "accelerate", f"{sys.executable} {tmp_path}/saver.py {mark} 0; exit 1")
    script = written(tmp_path / "run", plan_of(tiny, CPU))
    process = subprocess.Popen(["bash", script], env=environ(fakes), stdout=subprocess.DEVNULL, start_new_session=True)
    wait_for(Path(f"{mark}.ready"))
    os.killpg(process.pid, signal.SIGUSR1)
    assert process.wait(20) == 75
    assert mark.read_text() == "saved"


@pytest.mark.parametrize("other", ["", 'echo 75 >"$WINDLASS_STATUS_DIR/code-1"; '], ids=["alone", "another has saved"])
def test_ranks_that_do_not_save_in_time_are_ended(tiny: Path, tmp_path: Path, other: str) -> None:
    fakes = tmp_path / "bin"
    body = other + 'trap "" TERM; echo $$ >"$WINDLASS_STATUS_DIR/pid-0"; touch ready; while :; do sleep 0.1; done'
    program(fakes, "accelerate", body.replace("ready", str(tmp_path / "ready")))
    script = written(tmp_path / "run", plan_of(tiny, (*CPU, "cluster.grace_seconds=1")))
    process = subprocess.Popen(
        ["bash", script], env=environ(fakes), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    wait_for(tmp_path / "ready")
    process.terminate()
    assert process.wait(15) == 1
    assert process.stderr is not None
    assert b"rank 0 was killed while starting; the 1 s to save had passed" in process.stderr.read()
    process.stderr.close()


def wait_for(path: Path, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)


def test_whatever_users_write_reaches_the_ranks_unchanged(tiny: Path, tmp_path: Path) -> None:
    fakes = tmp_path / "bin"
    program(
        fakes,
        "accelerate",
        f"printf '%s' \"$ODD\" >{tmp_path}/odd; printf '%s' \"$LINES_OF_IT\" >{tmp_path}/lines; pwd >{tmp_path}/cwd",
    )
    program(fakes, "pip", "")
    work = tmp_path / f"wd {NASTY.replace('/', '_')}"
    work.mkdir()
    lines = f"first\n{NASTY}\n\n\nEOF\nlast\n"
    overrides = (
        *CPU,
        f"cluster.env={quoted({'ODD': NASTY, 'LINES_OF_IT': lines})}",
        f"cluster.working_dir={quoted(str(work))}",
        f"data.prompt_template={quoted('[[' + NASTY + '{text}]]')}",
        "train.run_name=@@HEAD@@ @@SETTINGS@@",
    )
    folder = tmp_path / f"run {NASTY.replace('/', '_')}"
    script = written(folder, plan_of(tiny, overrides), overrides=overrides)
    done = subprocess.run(
        ["bash", script], env=environ(fakes), capture_output=True, text=True, timeout=30, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "odd").read_text() == NASTY
    assert (tmp_path / "lines").read_text() == lines
    assert (tmp_path / "cwd").read_text() == f"{work}\n"
    words = calls(fakes, "accelerate")
    assert [words[i + 1] for i, word in enumerate(words) if word == "--override"] == list(overrides)
    assert f"{folder}/run.yaml" in words
    assert not list(tmp_path.rglob("pwned"))
    assert clean(script, "--exclude=SC2016") == ""  # users' words are meant to stand as they are


def quoted(value: object) -> str:
    """As YAML reads it too."""
    return json.dumps(value, ensure_ascii=False)


def clean(script: Path, *options: str) -> str:
    done = subprocess.run(
        [SHELLCHECK, "--shell=bash", *options, script], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", ["train", "two-gpus"])
def test_shellcheck_has_nothing_to_say(name: str, tmp_path: Path) -> None:
    plan, overrides, _ = example(name)
    assert clean(written(tmp_path / "run", plan, overrides=overrides)) == ""


def test_shellcheck_would_say_something(tmp_path: Path) -> None:
    (tmp_path / "bad.sh").write_text("#!/usr/bin/env bash\nrm -rf $1/*\n")
    assert "SC2086" in clean(tmp_path / "bad.sh")


def test_gpus_are_counted_before_anything_is_started(tmp_path: Path) -> None:
    plan, overrides, _ = example(
        "two-gpus", ("train.output_dir=/tmp/out", "cluster.nodes=1", "cluster.gpus_per_node=2")
    )
    fakes = tmp_path / "bin"
    program(fakes, "accelerate", "")
    program(
        fakes,
        "nvidia-smi",
        'case $1 in --query*) echo "0, NVIDIA H200 NVL, 143771 MiB, 570.1";; *) echo "26.562 GB/s";; esac',
    )
    done = launched(written(tmp_path / "run", plan, overrides=overrides), fakes)
    assert done.returncode == 1
    assert "2 GPUs are needed; this node has 1" in done.stderr
    program(fakes, "nvidia-smi", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    done = launched(tmp_path / "run" / "launch.sh", fakes)
    assert done.returncode == 1
    assert "nvidia-smi failed: Failed to initialize NVML" in done.stderr
    assert not calls(fakes, "accelerate")
    program(
        fakes, "nvidia-smi", 'case $1 in --query*) printf "%s\\n" "0, H200" "1, H200";; *) echo "26.562 GB/s";; esac'
    )
    done = launched(tmp_path / "run" / "launch.sh", fakes)
    assert done.returncode == 0, done.stderr
    assert "nvlink   1 links active" in done.stdout


def test_secrets_are_demanded_never_written(tiny: Path, tmp_path: Path) -> None:
    fakes = tmp_path / "bin"
    program(fakes, "accelerate", "")
    script = written(tmp_path / "run", plan_of(tiny, (*CPU, "cluster.env={HF_TOKEN: {secret: hub, key: token}}")))
    env = {"HF_TOKEN": ""}
    done = launched(script, fakes, **env)
    assert done.returncode == 13
    assert "HF_TOKEN is a secret (hub, key token)" in done.stderr
    assert launched(script, fakes, HF_TOKEN="hf_x").returncode == 0


def test_a_user_without_a_home_gets_one(tiny: Path, tmp_path: Path) -> None:
    fakes = tmp_path / "bin"
    program(fakes, "accelerate", f'echo "$HOME $LOGNAME $HF_HOME" >{tmp_path}/home')
    program(
        fakes, "id", 'case $1 in -un) echo "id: cannot find name for user ID 1000660000" >&2; exit 1;; esac; echo 0'
    )
    script = written(tmp_path / "run", plan_of(tiny, CPU))
    env = environ(fakes, HOME="/", TMPDIR=str(tmp_path))
    env.pop("LOGNAME", None)
    done = subprocess.run(["bash", script], env=env, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    home = tmp_path / f"windlass-home-{os.getuid()}"
    assert (tmp_path / "home").read_text().split() == [str(home), "windlass", str(home / "huggingface")]
    # The image has a home for everybody, and still no name.
    env["HOME"] = str(home)
    subprocess.run(["bash", script], env=env, capture_output=True, text=True, timeout=30, check=True)
    assert (tmp_path / "home").read_text().split() == [str(home), "windlass"]


def test_what_the_image_lacks_is_installed_from_the_sites_mirror(tiny: Path, tmp_path: Path) -> None:
    fakes = tmp_path / "bin"
    program(fakes, "accelerate", "")
    body = f"""if [[ "$1 $2" == "-m pip" ]]; then
      printf "%s\\n" "$PIP_INDEX_URL" "$@" >{tmp_path}/pip
      exit ${{PIP_FAILS:-0}}
    fi
    exec {sys.executable} "$@\""""
    program(fakes, "python3", body)
    overrides = (
        *CPU,
        "cluster.install=['odd name>=1', b]",
        "cluster.env={PIP_INDEX_URL: 'https://mirror.example/simple'}",
    )
    script = written(tmp_path / "run", plan_of(tiny, overrides))
    done = launched(script, fakes)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "pip").read_text().splitlines()
    assert lines[0] == "https://mirror.example/simple"
    assert lines[-2:] == ["odd name>=1", "b"]
    done = launched(script, fakes, PIP_FAILS="1")
    assert done.returncode == 1
    assert "from https://mirror.example/simple" in done.stderr


def checking(fakes: Path, body: str) -> None:
    """Checks that do as `body` says; everything else that Python is started for is real."""
    program(fakes, "python3", f'if [[ "$3" == check ]]; then\n{body}\nfi\nexec {sys.executable} "$@"')


@pytest.mark.parametrize(("code", "ends"), [("13", 13), ("1", 1), ("2", 1), ("137", 1), ("75", 1)])
def test_failed_checks_end_the_node_and_only_their_own_word_keeps_it_from_another_try(
    tiny: Path, tmp_path: Path, code: str, ends: int
) -> None:
    """A traceback, a kill for memory, a lost node: the next try may do."""
    fakes = tmp_path / "bin"
    program(fakes, "accelerate", "")
    checking(fakes, f'echo "$PET_NODE_RANK $PET_NNODES" "$@" >{tmp_path}/check; exit {code}')
    done = launched(written(tmp_path / "run", plan_of(tiny, CPU)), fakes, WINDLASS_CHECK="yes")
    assert done.returncode == ends
    assert not calls(fakes, "accelerate")
    assert (tmp_path / "check").read_text().startswith(f"0 1 -m windlass check {tmp_path}/run/run.yaml --accelerate")


def test_a_stop_signal_ends_the_checks_at_once(tiny: Path, tmp_path: Path) -> None:
    fakes = tmp_path / "bin"
    program(fakes, "accelerate", "")
    checking(fakes, f"echo $$ >{tmp_path}/check; exec sleep 60")
    script = written(tmp_path / "run", plan_of(tiny, CPU))
    process = subprocess.Popen(
        ["bash", script], env=environ(fakes, WINDLASS_CHECK="yes"), stdout=subprocess.DEVNULL, start_new_session=True
    )
    wait_for(tmp_path / "check")
    process.terminate()
    assert process.wait(10) == 75
    assert not calls(fakes, "accelerate")
    gone(int((tmp_path / "check").read_text()))


def gone(pid: int, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"process {pid} was left"
        time.sleep(0.02)


def test_the_script_may_be_written_anew_while_it_runs(tiny: Path, tmp_path: Path) -> None:
    """bash reads a script as it goes: what a second submission writes would be taken for the rest of this one."""
    fakes = tmp_path / "bin"
    script = written(tmp_path / "run", plan_of(tiny, CPU))
    length = len(script.read_bytes())
    program(fakes, "accelerate", f"for ((i = 0; i < {length // 8 + 100}; i++)); do echo 'exit 99'; done >{script}")
    done = launched(script, fakes)
    assert (done.returncode, done.stderr) == (0, "")


# --- two nodes ------------------------------------------------------------------------------------------------------


def two_ports() -> int:
    """The first of two that are free: ranks meet on it, and nodes on the next."""
    while True:
        with socket.create_server(("", 0)) as first:
            port = int(first.getsockname()[1])
            try:
                socket.create_server(("", port + 1)).close()
            except OSError:
                continue
            return port


def two_nodes(tiny: Path, tmp_path: Path, **more: str) -> list[subprocess.Popen[str]]:
    """launch.sh as two machines would run it, each in a session of its own, with the stand-ins of its own folder."""
    script, port, crew = written(tmp_path / "run", plan_of(tiny, TWO)), two_ports(), []
    for node in range(2):
        told = {**PET, "PET_NODE_RANK": str(node), "PET_MASTER_PORT": str(port), **more}
        log = (tmp_path / f"log-{node}").open("w")
        crew.append(
            subprocess.Popen(
                ["bash", script],
                env=environ(tmp_path / f"bin-{node}", **told),
                stdout=log, stderr=log, start_new_session=True, text=True,
            )
        )  # fmt: skip
        log.close()
    return crew


def until_said(path: Path, text: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while text not in path.read_text():
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.02)


def end_all(crew: list[subprocess.Popen[str]]) -> None:
    for process in crew:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


@pytest.mark.parametrize("first", [0, 1])
def test_sigterm_to_every_process_of_two_nodes_saves_on_both(tiny: Path, tmp_path: Path, first: int) -> None:
    """As scancel sends it. Nobody may take a node for lost whose ranks are still saving."""
    (tmp_path / "saver.py").write_text(SAVER)
    marks = [tmp_path / "mark-0", tmp_path / "mark-1"]
    for node, mark in enumerate(marks):
        program(tmp_path / f"bin-{node}", "accelerate", f"{sys.executable} {tmp_path}/saver.py {mark} 0; exit 1")
    crew = two_nodes(tiny, tmp_path)
    try:
        for mark in marks:
            wait_for(Path(f"{mark}.ready"))
        os.killpg(crew[first].pid, signal.SIGTERM)
        time.sleep(0.1)
        os.killpg(crew[1 - first].pid, signal.SIGTERM)
        assert [process.wait(20) for process in crew] == [75, 75], (tmp_path / "log-0").read_text()
    finally:
        end_all(crew)
    assert [mark.read_text() for mark in marks] == ["saved", "saved"]
    for node in range(2):
        assert "gone" not in (tmp_path / f"log-{node}").read_text()


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_is_stopped_before_all_have_come_ends_at_once(tiny: Path, tmp_path: Path, node: int) -> None:
    for one in range(2):
        program(tmp_path / f"bin-{one}", "accelerate", "")
    crew = two_nodes(tiny, tmp_path, PET_MASTER_ADDR="localhost" if node == 0 else "no-such-name.invalid")
    try:
        if node == 0:
            os.killpg(crew[1].pid, signal.SIGKILL)
        until_said(tmp_path / f"log-{node}", "versions python")
        time.sleep(0.5)  # the meeting has begun, or will hear of it
        crew[node].terminate()
        began = time.monotonic()
        assert crew[node].wait(15) == 75
        assert time.monotonic() - began < 10
    finally:
        end_all(crew)


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_is_stopped_before_its_ranks_is_not_waited_for(tiny: Path, tmp_path: Path, node: int) -> None:
    """It ends with 75 as one does that has saved, and the others' ranks would wait for it."""
    other = 1 - node
    for one in range(2):
        program(
            tmp_path / f"bin-{one}",
            "accelerate",
            'until [[ -e "$WINDLASS_STATUS_DIR/lost" ]]; do sleep 0.05; done; exit 1',
        )
    checking(tmp_path / f"bin-{node}", f"touch {tmp_path}/checks; exec sleep 60")
    checking(tmp_path / f"bin-{other}", "exit 0")
    crew = two_nodes(tiny, tmp_path, WINDLASS_CHECK="yes")
    try:
        wait_for(tmp_path / "checks")
        until_said(tmp_path / f"log-{other}", "all 2 nodes have joined")
        crew[node].terminate()
        assert crew[node].wait(20) == 75
        assert crew[other].wait(20) == 1, "it did not save, and may be tried again"
    finally:
        end_all(crew)
    assert f"node {node} (" in (tmp_path / f"log-{other}").read_text()
    assert "was stopped before its ranks began" in (tmp_path / f"log-{other}").read_text()


def test_the_accelerate_file_is_read_back_as_the_same_layout(tiny: Path) -> None:
    for overrides in (CPU, TWO, ("cluster.gpus_per_node=2",)):
        plan = plan_of(tiny, overrides)
        path = tiny.parent / "accelerate-back.yaml"
        path.write_text(render(plan, "script")["accelerate.yaml"])
        again = plan_of(tiny, overrides, path)
        assert (
            again.layout.name,
            again.layout.shard,
            again.layout.nodes,
            again.layout.ranks,
            again.layout.precision,
        ) == (*(plan.layout.name, plan.layout.shard, plan.layout.nodes, plan.layout.ranks, plan.layout.precision),)
        read_accelerate(path)
        assert yaml.safe_load(path.read_text())["num_processes"] == plan.layout.ranks
        path.unlink()
