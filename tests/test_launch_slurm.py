"""Slurm: its batch script under bash, with stand-ins for Slurm's programs that really start every node's processes."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from launch_jobs import EXAMPLES, calls, environ, example, plan_of, program, render, wait_for
from refusals import refused
from text_run import make_text_run

from windlass import run_folder
from windlass.errors import RunError, UserError
from windlass.files import read_json_lines
from windlass.launch import submit as submitting
from windlass.launch.platforms import slurm
from windlass.launch.submit import open_record
from windlass.plan import Plan

IMAGE = "cluster.image=registry.example/team/windlass:1"
# As the man pages say: sbatch's options are lines of the script, srun starts one process per node and ends with the
# highest exit code, scancel --signal reaches every process of every task, and requeue starts the script again.
PROGRAMS = {
    "sbatch": r"""
script=${!#}
option() { sed -n "s/^#SBATCH --$1=//p" "$script"; }
output=$(option output)
export SLURM_JOB_ID=4711 SLURM_JOB_NODELIST='n[1-2]' SLURM_NNODES=$(option nodes) SLURM_NTASKS_PER_NODE=1
export SLURM_CPUS_PER_TASK=$(option cpus-per-task) FAKE
cp "$script" "$FAKE/spooled"
rm -f "$FAKE/over" "$FAKE/fixed"
setsid bash -c 'while :; do
  rm -f "$FAKE/again"
  bash "$FAKE/spooled" >>"$0" 2>&1
  if [[ ! -e "$FAKE/again" ]]; then break; fi
  echo >>"$FAKE/requeued"
done; touch "$FAKE/over"' "${output/\%j/4711}" >/dev/null 2>&1 &
echo $! >"$FAKE/pid"
echo '4711;main'
""",
    "srun": r"""
while [[ $1 == -* ]]; do shift; done
for ((node = 0; node < SLURM_NNODES; node++)); do
  SLURM_NODEID=$node SLURM_STEP_NUM_NODES=$SLURM_NNODES setsid "$@" &
  echo $! >"$FAKE/task-$node"
done
highest=0
for file in "$FAKE"/task-*; do
  code=0
  wait "$(<"$file")" || code=$?
  if ((code > highest)); then highest=$code; fi
done
exit "$highest"
""",
    "apptainer": 'while [[ $1 != docker:* ]]; do shift; done\nshift\nexec "$@"',
    "scontrol": r"""
case "$1" in
  show) echo localhost; echo n2 ;;
  update) touch "$FAKE/fixed" ;;
  requeue) if [[ -e "$FAKE/fixed" ]]; then echo 'Requested operation is presently disabled' >&2; exit 1; fi
    touch "$FAKE/again" ;;
esac
""",
    "squeue": 'if [[ -e "$FAKE/over" || ! -e "$FAKE/pid" ]]; then exit; fi; echo "${STATE:-RUNNING}"',
    "scancel": r"""
for file in "$FAKE"/task-*; do kill "-${1#--signal=}" -- "-$(<"$file")"; done
""",
}


@dataclass
class Slurm:
    """Slurm's stand-in in a folder, and what was printed."""

    folder: Path
    printed: list[str] = field(default_factory=list)

    def submit(self, plan: Plan, overrides: tuple[str, ...] = ()) -> int:
        return submitting.submit(plan, "slurm", overrides=overrides, say=self.printed.append)

    @property
    def log(self) -> str:
        return next((path.read_text() for path in self.folder.rglob("slurm-*.log")), "no log")[-4000:]

    @property
    def is_over(self) -> bool:
        return (self.folder / "over").exists()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    for name, body in PROGRAMS.items():
        program(tmp_path / "bin", name, body)
    for name, value in environ(tmp_path / "bin", FAKE=str(tmp_path), OMP_NUM_THREADS="1").items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm, "PAUSE_SECONDS", 0.1)
    yield Slurm(tmp_path)
    for path in (tmp_path / "pid", *tmp_path.glob("task-*")):
        if path.exists():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(path.read_text()), signal.SIGKILL)


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_a_run_is_requeued_at_its_time_limit_resumes_and_is_stopped(
    cluster: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two nodes of real ranks, each in a container."""
    file, folder = make_text_run(cluster.folder / "demo"), cluster.folder / "demo" / "run"
    overrides = (
        *("cluster.nodes=2", "cluster.gpus_per_node=1", "cluster.network=ethernet-25", "cluster.gpu=cpu", IMAGE),
        *("train.max_steps=100000", "train.eval_strategy=no", "train.save_steps=50000", f"train.output_dir={folder}"),
        *("cluster.slurm.container=apptainer", f"cluster.volumes=[{{host: {cluster.folder}, path: {cluster.folder}}}]"),
        *("cluster.log_format=json", "cluster.grace_seconds=60"),
    )
    plan = plan_of(file, overrides)
    assert cluster.submit(plan, overrides) == 0
    assert f"submitted as job 4711; its log: {folder}/slurm-4711.log" in cluster.printed
    runs_from = (folder / "launch.sh").read_text()
    edited = (*overrides, "lora.r=2")
    with pytest.raises(UserError, match=r"Slurm has it already, as job 4711 \(RUNNING\)"):
        cluster.submit(plan_of(file, edited), edited)
    assert (folder / "launch.sh").read_text() == runs_from, "a requeued job reads it again"
    steps, log = folder / run_folder.STEPS.format(rank=0), folder / "slurm-4711.log"
    platform, record = open_record(folder, folder, cluster.printed.append)

    def last() -> int:
        return max((line["step"] for line in read_json_lines(steps)), default=0) if steps.exists() else 0

    wait_for(lambda: last() >= 2, [cluster])
    assert platform.status(record) == 0
    assert "job 4711: RUNNING\n" in (text := capsys.readouterr().out)
    assert "running, step" in text
    subprocess.run(["scancel", "--signal=USR1", "4711"], check=True)  # as Slurm does before the time limit
    wait_for(lambda: (cluster.folder / "requeued").exists(), [cluster])
    before = last()
    wait_for(lambda: last() > before, [cluster])
    assert not (folder / "slurm-4711.exit").exists(), "it goes on"
    assert platform.stop(record) == 0
    assert "job 4711 is stopping: its ranks save, and `windlass submit RUN` resumes from there" in cluster.printed
    wait_for(lambda: cluster.is_over, [cluster])
    assert (folder / "slurm-4711.exit").read_text() == "75\n"
    assert (cluster.folder / "requeued").read_text() == "\n", "not queued again"
    assert platform.logs(record, follow=True) == 1
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    assert capsys.readouterr().out == log.read_text()
    assert {line["node"] for line in lines} == {0, 1}
    assert sum("a signal; step" in line["message"] for line in lines) == 2, "both tries saved"
    assert any(f"step {before} is saved" in line["message"] for line in lines)
    assert platform.status(record) == 0
    assert "job 4711: ended with 75" in capsys.readouterr().out
    assert platform.stop(record) == 0
    assert "has ended already" in cluster.printed[-1]


@pytest.mark.parametrize(("code", "tries"), [(0, 1), (13, 1), (137, 3)])
def test_the_exit_code_decides_whether_it_is_queued_again(cluster: Slurm, code: int, tries: int) -> None:
    """13 never, a lost run as often as configured; nodes end with their worst code."""
    overrides = (f"train.output_dir={cluster.folder}/run", "cluster.max_restarts=2")
    plan = plan_of(EXAMPLES / "train.yaml", overrides)
    folder = cluster.folder / "run"
    stub = f"printf 'echo try\\nexit {code}\\n' >\"${{!#%/*}}/launch.sh\""
    program(cluster.folder / "bin", "sbatch", stub + PROGRAMS["sbatch"])
    assert cluster.submit(plan, overrides) == 0
    wait_for(lambda: cluster.is_over, [cluster])
    assert (folder / "slurm-4711.exit").read_text() == f"{code}\n"
    assert (folder / "slurm-4711.log").read_text().count("try\n") == 3 * tries, "on each of three nodes"
    words = calls(cluster.folder / "bin", "srun")
    assert words[:3] == ["--kill-on-bad-exit=0", "--label", "--cpus-per-task=2"]
    assert words[3:5] == ["bash", f"{folder}/launch.sh"]


def test_slurm_refusals_and_pending_jobs(cluster: Slurm, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("train.output_dir=run",)
    plan = plan_of(EXAMPLES / "train.yaml", overrides)
    text = render(plan, "slurm", overrides=overrides)["job.sbatch"]
    assert f"#SBATCH --chdir={cluster.folder}\n#SBATCH --output={cluster.folder}/run/slurm-%j.log\n" in text
    program(cluster.folder / "bin", "sbatch", "echo 'sbatch: error: invalid partition specified: gpus' >&2; exit 1")
    with pytest.raises(RunError, match="invalid partition specified"):
        cluster.submit(plan, overrides)
    program(cluster.folder / "bin", "sbatch", 'touch "$FAKE/pid"; echo 12')
    (cluster.folder / "pid").touch()
    assert cluster.submit(plan, overrides) == 0
    os.environ["STATE"] = "PENDING"
    try:
        platform, record = open_record(cluster.folder / "run", cluster.folder / "run", cluster.printed.append)
        with refused("no-log"):
            platform.logs(record, follow=False)
        program(cluster.folder / "bin", "scancel", 'touch "$FAKE/over"')
        assert platform.stop(record) == 0
    finally:
        del os.environ["STATE"]
    assert calls(cluster.folder / "bin", "scancel") == ["12"]
    assert "is taken from the queue" in cluster.printed[-1]
    assert platform.logs(record, follow=True) == 1, "it never ran"
    (cluster.folder / "pid").unlink()
    capsys.readouterr()


def test_times_and_words_are_written_as_slurm_reads_them() -> None:
    own = "cluster.slurm.sbatch={reservation: 'my nodes', exclusive: '', mem: '0'}"
    made = render(
        example("train", ("cluster.slurm.account=research", own, "cluster.deadline_seconds=90061"))[0], "slurm"
    )
    options = [line for line in made["job.sbatch"].splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --time=25:01:01", "#SBATCH --reservation='my nodes'", "#SBATCH --exclusive"} < {*options}
    assert [option for option in options if "--mem" in option] == ["#SBATCH --mem=0"]


def test_containers_use_the_runtimes_own_options() -> None:
    mounts = "cluster.volumes=[{host: /data, path: /data}, {host: /fast, path: /cache, sub_path: me, read_only: true}]"
    for image, pyxis, apptainer in (
        ("registry.example/a/b:1", "registry.example#a/b:1", "docker://registry.example/a/b:1"),
        ("/images/b.sqsh", "/images/b.sqsh", "/images/b.sqsh"),
    ):
        made = {
            name: render(
                example("train", (mounts, f"cluster.image={image}", f"cluster.slurm.container={name}"))[0], "slurm"
            )
            for name in ("pyxis", "apptainer")
        }
        text = made["pyxis"]["job.sbatch"]
        mounted = "'--container-mounts=/data:/data,/fast/me:/cache:ro'"
        assert f"{mounted} --no-container-mount-home --no-container-entrypoint --cpus-per-task" in text
        assert f"--label --container-image={pyxis} " in text.replace("'", "").replace(mounted.strip("'"), "")
        binds = "--bind /data:/data --bind /fast/me:/cache:ro"
        assert f'apptainer exec --nv {binds} {apptainer} bash "$folder/launch.sh"' in made["apptainer"]["job.sbatch"]


def test_unsupported_slurm_settings_are_refused() -> None:
    pyxis = "cluster.slurm.container=pyxis"
    for code, where, *more in (
        ("no-image", "cluster.image", pyxis),
        ("not-mounted", "train.output_dir", pyxis, IMAGE),
        ("not-on-platform", "path: /data}]", pyxis, IMAGE, "cluster.volumes=[{claim: a, path: /data}]"),
        ("deadline-within-grace", "deadline_seconds=60", "cluster.deadline_seconds=60"),
        ("not-on-platform", "cluster.cpu_limit=8", "cluster.cpu_limit=8"),
        ("set-by-windlass", "cluster.slurm.sbatch={output: /x/y.log}", "cluster.slurm.sbatch={output: /x/y.log}"),
        ("relative-path", "train.output_dir=out", pyxis, IMAGE, "train.output_dir=out"),
    ):
        with refused(code, where):
            render(example("train", tuple(more))[0], "slurm")
