"""launch.sh under bash, with stand-ins for the programs it calls, and with any text users may write."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from launch_jobs import EXAMPLES, calls, environ, example, plan_of, program

from windlass.launch.submit import render
from windlass.ranks.rendezvous import PORT

pytestmark = pytest.mark.long

PET = {"PET_NODE_RANK": "0", "PET_NNODES": "2", "PET_MASTER_ADDR": "localhost"}
SLURM = {"SLURM_JOB_ID": "123", "SLURM_NODEID": "0", "SLURM_NNODES": "2"}
CPU = ("cluster.gpu=cpu", "cluster.nodes=1", "cluster.gpus_per_node=1", "cluster.host_memory_gib=4000")
TWO = (*CPU[:1], "cluster.nodes=2", *CPU[2:], "cluster.network=ethernet-25")
NASTY = "a b'c\"d`e$(touch pwned)$HOME\\f;g&h|i\tä€\U0001f409 #*?"
# What a rank does: leave its number and its code in the status directory.
RANK = 'echo $$ >"$WINDLASS_STATUS_DIR/pid-0"; echo {} >"$WINDLASS_STATUS_DIR/code-0"; exit 1'
SAVER = """
import os, signal, sys, time
from pathlib import Path
folder, late, status_dir = Path(sys.argv[1]), float(sys.argv[2]), Path(os.environ["WINDLASS_STATUS_DIR"])
def save(*_):
    time.sleep(0.3)
    (status_dir / "code-0").write_text("75")
    (folder / "saved").touch()
    os._exit(75)
(folder / "began").touch()
time.sleep(late)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, save)
(status_dir / "pid-0").write_text(str(os.getpid()))
(folder / "listens").touch()
time.sleep(60)
"""


def written(folder: Path, overrides: tuple[str, ...] = CPU) -> Path:
    folder.mkdir(exist_ok=True)
    plan = plan_of(EXAMPLES / "train.yaml", overrides)
    for name, text in render(plan, "script", overrides=overrides).items():
        (folder / name).write_text(text)
    return folder / "launch.sh"


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("one") / "a run")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("two") / "a run", TWO)


class Launch:
    """launch.sh in its own session, with stand-ins for accelerate and for Python's first answers."""

    def __init__(self, folder: Path, script: Path, accelerate: str = "", python: str = "", **more: str) -> None:
        folder.mkdir()
        self.folder, self.log_file = folder, folder / "log"
        program(folder / "bin", "accelerate", accelerate.replace("FOLDER", str(folder)))
        versions = 'if [[ "$1" == - ]]; then exec cat >/dev/null; fi'  # slow, and looked at in one test
        body = f'{python.replace("FOLDER", str(folder))}\n{versions}\nexec {sys.executable} "$@"'
        program(folder / "bin", "python3", body)
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen(
                ["bash", script],
                env={**environ(folder / "bin"), "TMPDIR": str(folder), **more},
                stdout=log,
                stderr=log,
                cwd=folder,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # bash can't trap what it is deaf to
            )

    @property
    def code(self) -> int:
        return self.process.wait(200)

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def words(self) -> list[str]:
        """Return how accelerate was called."""
        return calls(self.folder / "bin", "accelerate")

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    started: list[Launch] = []

    def start(*words: Any, **options: Any) -> Launch:
        started.append(Launch(tmp_path / f"launch-{len(started)}", *words, **options))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            os.killpg(each.process.pid, signal.SIGKILL)
            each.process.wait(120)


def wait_for(condition: Callable[[], Any], seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def clean(script: Path, *options: str) -> str:
    shellcheck = [str(Path(sys.executable).parent / "shellcheck"), "--shell=bash", *options, str(script)]
    done = subprocess.run(shellcheck, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def test_ranks_start_with_any_user_text(tmp_path: Path) -> None:
    """With Python's own answers, for a user without a home, from the site's mirror."""
    work, folder, fakes = tmp_path / f"wd {NASTY}".replace("/", "_"), tmp_path / f"run {NASTY}", tmp_path / "bin"
    work.mkdir()
    lines = f"first\n{NASTY}\n\n\nEOF\nlast\n"
    env = {"ODD": NASTY, "LINES_OF_IT": lines, "PIP_INDEX_URL": "https://mirror.example/simple"}
    overrides = (
        *(*CPU, "cluster.gpus_per_node=2", "cluster.install=['odd name>=1', b]"),
        f"cluster.env={json.dumps({**env, 'HF_TOKEN': {'secret': 'hub', 'key': 'token'}}, ensure_ascii=False)}",
        f"cluster.working_dir={json.dumps(str(work), ensure_ascii=False)}",
        f"data.prompt_template={json.dumps('[[' + NASTY + '{text}]]', ensure_ascii=False)}",
        "train.run_name=@@HEAD@@ @@SETTINGS@@",
    )
    script = written(folder, overrides)
    assert clean(script, "--exclude=SC2016") == ""  # users' words are meant to stand as they are
    shown = f"""printf '%s' "$ODD" >{tmp_path}/odd; printf '%s' "$LINES_OF_IT" >{tmp_path}/lines; pwd >{tmp_path}/cwd
    echo "$HOME $LOGNAME $HF_HOME" >{tmp_path}/home; env >{tmp_path}/env"""
    program(fakes, "accelerate", shown)
    program(
        fakes, "id", 'case $1 in -un) echo "id: cannot find name for user ID 1000660000" >&2; exit 1;; esac; echo 0'
    )
    pip = f'printf "%s\\n" "$PIP_INDEX_URL" "$@" >{tmp_path}/pip; exit ${{PIP_FAILS:-0}}'
    program(fakes, "python3", f'if [[ "$1 $2" == "-m pip" ]]; then {pip}; fi\nexec {sys.executable} "$@"')
    environment = environ(fakes, HOME="/", TMPDIR=str(tmp_path), HF_TOKEN="hf_x")
    environment.pop("LOGNAME", None)

    def launched(**more: str) -> subprocess.CompletedProcess[str]:
        env = {**environment, **more}
        return subprocess.run(["bash", script], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    done = launched(HF_TOKEN="")
    assert (done.returncode, "HF_TOKEN is a secret (hub, key token)" in done.stderr) == (13, True)
    done = launched(PIP_FAILS="1")
    assert (done.returncode, "from https://mirror.example/simple" in done.stderr) == (1, True)
    assert not calls(fakes, "accelerate")
    done = launched()
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "odd").read_text() == NASTY
    assert (tmp_path / "lines").read_text() == lines
    assert (tmp_path / "cwd").read_text() == f"{work}\n"
    assert not list(tmp_path.rglob("pwned"))
    home = tmp_path / f"windlass-home-{os.getuid()}"
    assert (tmp_path / "home").read_text().split() == [str(home), "windlass", str(home / "huggingface")]
    assert (tmp_path / "pip").read_text().splitlines()[-2:] == ["odd name>=1", "b"]
    seen = (tmp_path / "env").read_text()
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in seen
    assert "NCCL_DEBUG=WARN" in seen
    words = calls(fakes, "accelerate")
    assert words[:5] == ["launch", "--config_file", f"{folder}/accelerate.yaml", "--num_machines", "1"]
    assert words[5:9] == ["--num_processes", "2", "--machine_rank", "0"]
    port = int(words[words.index("--main_process_port") + 1])
    assert port != PORT, "another run on this machine may have the usual one"
    socket.create_server(("localhost", port)).close()
    options = [word for override in overrides for word in ("--override", override)]
    assert words[-len(options) - 5 :] == ["-m", "windlass", "train", f"{folder}/run.yaml", *options, "--resume"]
    assert "1 x 2 cpu" in done.stdout
    assert "versions python" in done.stdout


@pytest.mark.parametrize(
    ("set_by", "port"),
    [
        ({**PET, "PET_MASTER_PORT": "23456"}, 23456),
        ({**PET, "PET_NNODES": "2:2", "RANK": "1", "WORLD_SIZE": "9"}, 29500),
        ({"RANK": "0", "WORLD_SIZE": "16", "MASTER_ADDR": "localhost", "MASTER_PORT": "23457"}, 23457),
        ({"JOB_COMPLETION_INDEX": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "23458"}, 23458),
        ({**SLURM, "SLURM_JOB_NODELIST": "n[1-2]"}, 20246),
    ],
    ids=["kubeflow", "kubeflow-range", "operator", "indexed-job", "slurm"],
)
def test_node_number_comes_from_any_platforms_variables(
    launch: Callable[..., Launch], tmp_path: Path, two: Path, set_by: dict[str, str], port: int
) -> None:
    joins = 'if [[ "$2" == windlass.ranks.rendezvous ]]; then touch "${@: -1}/ready"; exit; fi'
    program(tmp_path / "slurm", "scontrol", "printf '%s\\n' localhost n2")
    path = environ(tmp_path / "launch-0" / "bin")["PATH"]
    run = launch(two, "env >FOLDER/env", joins, **set_by, PATH=f"{path}:{tmp_path}/slurm")
    assert run.code == 0, run.log
    options = dict(zip(run.words[1:15:2], run.words[2:16:2], strict=True))
    assert options["--machine_rank"] == "0"
    assert options["--main_process_ip"] == "localhost"
    assert options["--main_process_port"] == str(port)
    assert options["--num_machines"] == options["--num_processes"] == "2"
    seen = {line.partition("=")[0] for line in (run.folder / "env").read_text().splitlines()}
    assert not {"RANK", "WORLD_SIZE", "PET_NNODES", "PET_NODE_RANK", "MASTER_ADDR"} & seen


def test_a_platform_that_disagrees_with_the_plan_is_not_tried_again(launch: Callable[..., Launch], two: Path) -> None:
    known = {"PET_NNODES": "2", "PET_MASTER_ADDR": "x"}
    for set_by, text in (
        ({}, "planned for 2 nodes, and the platform started 1"),
        ({**PET, "PET_NNODES": "3"}, "planned for 2 nodes, and the platform started 3"),
        ({**known, "PET_NODE_RANK": "2"}, "no node '2' among 2"),
        ({**known, "PET_NODE_RANK": "$(id)"}, "no node '$(id)' among 2"),
        ({"PET_NODE_RANK": "1", "PET_NNODES": "2"}, "the address of node 0 is unknown"),
        ({**SLURM, "MASTER_ADDR": "x", "SLURM_NTASKS_PER_NODE": "4"}, "one task per node"),
    ):
        run = launch(two, **set_by)
        assert (run.code, text in run.log, run.words) == (13, True, []), run.log


def test_exit_code_of_the_rank_is_kept(launch: Callable[..., Launch], one: Path) -> None:
    first = 'echo {} >"$WINDLASS_STATUS_DIR/code-1"; sleep 0.05; echo {} >"$WINDLASS_STATUS_DIR/code-0"; exit 1'
    killed = """for rank in 0 3; do echo 999999 >"$WINDLASS_STATUS_DIR/pid-$rank"; done
    echo 0 >"$WINDLASS_STATUS_DIR/code-0"; echo "loading the model" >"$WINDLASS_STATUS_DIR/phase-3"; exit 1"""
    # bash reads a script as it goes: what a second submission writes would be taken for the rest of this one.
    anew = written(one.parent.parent / "written anew")
    rewritten = f"for ((i = 0; i < {len(anew.read_bytes()) // 8 + 100}; i++)); do echo 'exit 99'; done >'{anew}'"
    cases: list[tuple[str, int, str]] = [
        ("exit 0", 0, ""),
        ("exit 7", 1, "ended with 1"),
        *((RANK.format(code), ends, "") for code, ends in ((13, 13), (75, 75), (1, 1), (2, 13), (137, 1))),
        (first.format(13, 1), 13, ""),  # the first that failed is the cause; the others only lost it
        (first.format(1, 75), 1, ""),
        (killed, 1, "rank 3 was killed while loading the model"),
        (rewritten, 0, ""),
    ]
    runs = [launch(anew if body == rewritten else one, body) for body, _, _ in cases]
    for run, (body, code, text) in zip(runs, cases, strict=True):
        assert (run.code, text in run.log) == (code, True), body
        assert not list(run.folder.glob("windlass-??????")), "the status directory is removed"
        assert "rank 0 was killed" not in run.log


def test_stop_signal_makes_ranks_save(launch: Callable[..., Launch], tmp_path: Path, one: Path) -> None:
    """Ranks that handle it, and one still starting; sent to the script, or to its process group like Slurm does."""
    (tmp_path / "saver.py").write_text(SAVER)
    cases = ((signal.SIGTERM, 0, os.kill), (signal.SIGUSR1, 1, os.kill), (signal.SIGINT, 0, os.kill))
    runs = []
    for number, late, send in (*cases, (signal.SIGUSR1, 0, os.killpg)):
        run = launch(one, f"{sys.executable} {tmp_path}/saver.py FOLDER {late}; exit 1")
        runs.append((run, number, "began" if late else "listens", send))
    for run, number, mark, send in runs:
        wait_for(lambda run=run, mark=mark: run.has(mark))  # type: ignore[misc]
        send(run.process.pid, number)
    for run, *_ in runs:
        assert (run.code, run.has("saved")) == (75, True), run.log


def test_ranks_that_exceed_the_grace_are_killed(launch: Callable[..., Launch], tmp_path: Path) -> None:
    script = written(tmp_path / "run", (*CPU, "cluster.grace_seconds=1"))
    body = 'trap "" TERM; echo $$ >"$WINDLASS_STATUS_DIR/pid-0"; touch FOLDER/ready; while :; do sleep 0.1; done'
    runs = [launch(script, other + body) for other in ("", 'echo 75 >"$WINDLASS_STATUS_DIR/code-1"; ')]
    for run in runs:
        wait_for(lambda run=run: run.has("ready"))  # type: ignore[misc]
        run.process.terminate()
    for run in runs:
        assert run.code == 1
        assert "rank 0 was killed while starting; the 1 s to save had passed" in run.log
    # Ranks that wait for a node that is gone are ended after 40 s, whatever time they have to save.
    hasty = script.with_name("hasty.sh")
    hasty.write_text(script.read_text().replace("lost_at + 20", "lost_at").replace("SECONDS + 20", "SECONDS + 1"))
    run = launch(hasty, f'echo 1 >"$WINDLASS_STATUS_DIR/lost"; {body}')
    assert run.code == 1
    assert "rank 0 was killed while starting; another node was lost 40 s before" in run.log


@pytest.mark.parametrize("name", ["train", "two-gpus"])
def test_scripts_pass_shellcheck(name: str, tmp_path: Path) -> None:
    plan, overrides, _ = example(name)
    (tmp_path / "launch.sh").write_text(render(plan, "script", overrides=overrides)["launch.sh"])
    assert clean(tmp_path / "launch.sh") == ""
    (tmp_path / "bad.sh").write_text("#!/usr/bin/env bash\nrm -rf $1/*\n")
    assert "SC2086" in clean(tmp_path / "bad.sh"), "it would say something"


def test_a_log_of_json_has_every_line_with_its_node(launch: Callable[..., Launch], tmp_path: Path) -> None:
    """Including the last ones, and the exit code is the script's own."""
    script = written(tmp_path / "json", (*CPU, "cluster.log_format=json"))
    run = launch(script, "printf 'a \"b\" ä\\n' >&2; echo last; exit 1")
    assert run.code == 1
    lines = [json.loads(line) for line in run.log.splitlines()]
    assert {(line["node"], line["host"]) for line in lines} == {(0, socket.gethostname())}
    assert {line["run"] for line in lines} == {"mistral4small-lora-fsdp-2xh200"}
    messages = [line["message"] for line in lines]
    assert {'a "b" ä', "last"} <= set(messages)
    assert messages[-1].endswith("ended with 1")


def test_gpus_are_counted_before_anything_is_started(launch: Callable[..., Launch], tmp_path: Path) -> None:
    settings = ("train.output_dir=/tmp/out", "cluster.nodes=1", "cluster.gpus_per_node=2")
    plan, overrides, _ = example("two-gpus", settings)
    (tmp_path / "launch.sh").write_text(render(plan, "script", overrides=overrides)["launch.sh"])
    case = 'case $1 in --query*) printf "%s\\n" {};; *) echo "26.562 GB/s";; esac'
    for index, (body, code, text) in enumerate(
        (
            (case.format('"0, H200"'), 1, "2 GPUs are needed; this node has 1"),
            ("echo 'Failed to initialize NVML'; exit 18", 1, "nvidia-smi failed: Failed to initialize NVML"),
            (case.format('"0, H200" "1, H200"'), 0, "nvlink   1 links active"),
        )
    ):
        program(tmp_path / f"gpus-{index}", "nvidia-smi", body)
        path = environ(tmp_path / f"launch-{index}" / "bin")["PATH"]
        run = launch(tmp_path / "launch.sh", PATH=f"{tmp_path}/gpus-{index}:{path}")
        assert (run.code, text in run.log, bool(run.words)) == (code, True, code == 0), run.log


def test_only_invalid_input_prevents_a_retry_after_failed_checks(launch: Callable[..., Launch], one: Path) -> None:
    """After a traceback, a kill for memory or a lost node a retry may succeed. A stop signal ends the checks at
    once."""
    body = 'if [[ "$3" == check ]]; then echo "$PET_NODE_RANK $PET_NNODES" "$@" >FOLDER/check; {}; fi'
    stopped = launch(one, python=body.format("echo $$ >FOLDER/pid; exec sleep 60"), WINDLASS_CHECK="yes")
    for code, ends in ((13, 13), (1, 1), (2, 1), (137, 1), (75, 1)):
        run = launch(one, python=body.format(f"exit {code}"), WINDLASS_CHECK="yes")
        assert (run.code, run.words) == (ends, [])
        called = (run.folder / "check").read_text()
        assert called.startswith(f"0 1 -m windlass check {one.parent}/run.yaml --accelerate")
    wait_for(lambda: stopped.has("pid"))
    pid = (stopped.folder / "pid").read_text().strip()
    stopped.process.terminate()
    assert (stopped.code, stopped.words) == (75, [])
    wait_for(lambda: not Path(f"/proc/{pid}").exists())


# --- two nodes ------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_nodes(launch: Callable[..., Launch], two: Path) -> Callable[..., list[Launch]]:
    """Run launch.sh as two machines would; arguments for one node first, then for the other."""

    def start(accelerate: str, python: tuple[str, str] = ("", ""), script: Path = two, **more: str) -> list[Launch]:
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        places = [{**PET, "PET_NODE_RANK": str(node), "PET_MASTER_PORT": str(port), **more} for node in range(2)]
        return [launch(script, accelerate, python[node], **places[node]) for node in range(2)]

    return start


@pytest.mark.parametrize("first", [0, 1])
def test_sigterm_to_every_process_of_two_nodes_saves_on_both(
    two_nodes: Callable[..., list[Launch]], tmp_path: Path, first: int
) -> None:
    """As scancel sends it. A node whose ranks are still saving must not be taken for lost."""
    (tmp_path / "saver.py").write_text(SAVER)
    nodes = two_nodes(f"{sys.executable} {tmp_path}/saver.py FOLDER 0; exit 1")
    wait_for(lambda: all(node.has("listens") for node in nodes))
    os.killpg(nodes[first].process.pid, signal.SIGTERM)
    time.sleep(0.1)
    os.killpg(nodes[1 - first].process.pid, signal.SIGTERM)
    assert [(node.code, node.has("saved"), "gone" in node.log) for node in nodes] == [(75, True, False)] * 2


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_is_stopped_before_all_have_come_ends_at_once(
    launch: Callable[..., Launch], two: Path, node: int, group: bool
) -> None:
    master = "localhost" if node == 0 else "no-such-name.invalid"
    with socket.create_server(("", 0)) as free:
        port = str(free.getsockname()[1])
    joins = 'if [[ "$2" == windlass.ranks.rendezvous ]]; then touch FOLDER/joins; fi'
    place = {**PET, "PET_NODE_RANK": str(node), "PET_MASTER_ADDR": master, "PET_MASTER_PORT": port}
    run = launch(two, "", joins, **place)
    wait_for(lambda: run.has("joins"))
    time.sleep(0.5)  # it has begun, or will hear of it
    (os.killpg if group else os.kill)(run.process.pid, signal.SIGTERM)
    began = time.monotonic()
    assert run.code == 75, run.log
    assert time.monotonic() - began < 100


@pytest.mark.parametrize("node", [0, 1])
def test_node_stopped_before_its_ranks_is_not_awaited(two_nodes: Callable[..., list[Launch]], node: int) -> None:
    """It ends with 75 like one that has saved, and the others' ranks would wait for it."""
    body = 'if [[ "$3" == check ]]; then {}; fi'
    python = [body.format("exit 0")] * 2
    python[node] = body.format("touch FOLDER/checks; exec sleep 60")
    ranks = 'until [[ -e "$WINDLASS_STATUS_DIR/lost" ]]; do sleep 0.05; done; exit 1'
    nodes = two_nodes(ranks, tuple(python), WINDLASS_CHECK="yes")
    wait_for(lambda: nodes[node].has("checks") and "all 2 nodes have joined" in nodes[1 - node].log)
    nodes[node].process.terminate()
    assert nodes[node].code == 75
    assert nodes[1 - node].code == 1, "it did not save, and may be tried again"
    assert f"node {node} (" in nodes[1 - node].log
    assert "was stopped before its ranks began" in nodes[1 - node].log


@pytest.mark.parametrize("node", [0, 1])
def test_all_nodes_log_why_one_cannot_start(two_nodes: Callable[..., list[Launch]], two: Path, node: int) -> None:
    """Before they have connected, and while they check."""
    hasty = two.with_name(f"hasty-{node}.sh")  # it waits a second for a check whose node is gone
    assert two.read_text().count(" + 30))") == 1
    hasty.write_text(two.read_text().replace(" + 30))", " + 1))"))
    python = ["", ""]
    python[node] = 'if [[ "$1" == - ]]; then exit 1; fi'
    nodes = two_nodes("", tuple(python))
    assert [each.code for each in nodes] == [13, 13]
    assert f"node {node} ({socket.gethostname()}): windlass is not installed in this image" in nodes[1 - node].log
    assert "did not join" not in nodes[1 - node].log
    body = 'if [[ "$3" == check ]]; then {}; fi'
    waits, text = body.format("exec sleep 60"), '{"time": 1, "problems": [{"where": "data", "problem": "not here"}]}'
    python = [waits, waits]  # for the other, which is gone
    python[node] = body.format(f"echo '{text}' >$WINDLASS_STATUS_DIR/error-check; exit 13")
    nodes = two_nodes("", tuple(python), hasty, WINDLASS_CHECK="yes")
    assert [each.process.wait(200) for each in nodes] == [13, 13]
    assert f"node {node} ({socket.gethostname()}) ended with 13: data: not here" in nodes[1 - node].log


def test_the_accelerate_file_is_read_back_as_the_same_layout(tmp_path: Path) -> None:
    for index, overrides in enumerate((CPU, TWO, (*CPU, "cluster.gpus_per_node=2"))):
        path = written(tmp_path / str(index), overrides).with_name("accelerate.yaml")
        plan, again = (plan_of(EXAMPLES / "train.yaml", overrides, file) for file in (None, path))
        for key in ("name", "shard", "nodes", "ranks", "precision"):
            assert getattr(again.layout, key) == getattr(plan.layout, key)
        assert yaml.safe_load(path.read_text())["num_processes"] == plan.layout.ranks
