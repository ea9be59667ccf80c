"""`windlass train` killed at random moments and resumed each time: the final adapter equals the uninterrupted run's."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import torch
import warm
from safetensors.torch import load_file
from test_checkpoint_resume import material  # noqa: F401

from windlass.errors import SAVED
from windlass.files import read_json
from windlass.observe.watch.heartbeat import BEAT
from windlass.observe.watch.live import View
from windlass.ranks import supervisor
from windlass.run_folder import ADAPTER, is_finished
from windlass.train.checkpoint.folder import find_damage, list_checkpoints

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("checkpoint kills")]

ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
WAIT_SECONDS = 280  # for a run of 12 steps; the machine may be crowded


def started(python: str, run: Path, folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [python, "-m", "windlass", "train", str(run), "--override", f"train.output_dir={folder}", *words]
    return subprocess.Popen(command, env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def crew(folder: Path) -> list[psutil.Process]:
    """Return the rank processes of a run, or their warm interpreter's clients, which pass signals on."""
    return [process for process in psutil.process_iter() if is_rank(process, f"train.output_dir={folder}")]


def is_rank(process: psutil.Process, word: str) -> bool:
    try:
        return word in process.cmdline() and "RANK" in process.environ()
    except psutil.Error:
        return False


def wait_for(what: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not what() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.fixture(scope="module")
def python(request: pytest.FixtureRequest) -> str:
    """Python's own in the long proof, where it is killed while it imports too."""
    return sys.executable if request.config.option.markexpr == "prove" else warm.python()


@pytest.fixture(scope="module")
def whole(python: str, material: Path) -> Path:  # noqa: F811
    """The uninterrupted run, which also shows how long each phase takes."""
    folder = material / "whole"
    began = time.monotonic()
    process = started(python, material / "run.yaml", folder)
    wait_for(lambda: (folder / "load.json").exists(), process)
    loaded = time.monotonic()
    _, printed = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0, printed
    (material / "load seconds").write_text(str(loaded - began))
    (material / "train seconds").write_text(str(time.monotonic() - loaded))
    return folder


def shoot(process: subprocess.Popen[str], folder: Path, how: str, chance: random.Random) -> str:
    """Kill a rank, or the launcher if there is none, wherever it is. Returns what was done."""
    targets = crew(folder)
    if how == "launcher" or not targets:
        process.send_signal(chance.choice([signal.SIGTERM, signal.SIGUSR1]))
        return "launcher"
    chance.choice(targets).send_signal(signal.SIGKILL if how == "kill" else signal.SIGTERM)
    return how


def survive(python: str, material: Path, whole: Path, seed: int, shots: list[str]) -> None:  # noqa: F811
    chance = random.Random(seed)
    folder = material / f"shot {seed}"
    load, train = (float((material / f"{name} seconds").read_text()) for name in ("load", "train"))
    for how in shots:
        process = started(python, material / "run.yaml", folder, "--resume")
        moment = chance.choice([0.6, 1, 1, 1]) * load + chance.random() * train  # now and then while it loads
        time.sleep(moment)
        running = process.poll() is None
        if running:
            how = shoot(process, folder, how, chance)
        _, printed = process.communicate(timeout=WAIT_SECONDS)
        whatever = f"seed {seed}: {how} after {moment:.1f} s: {process.returncode}\n{printed}"
        expected = {0, 1} if how == "kill" else {0, SAVED}
        if how == "launcher" and not printed:  # on a crowded machine, before it could have a handler
            expected |= {-signal.SIGTERM, -signal.SIGUSR1}
        assert process.returncode in expected, whatever
        assert "Traceback" not in printed, whatever
        assert "killed by SIGKILL while" in printed or process.returncode != 1, whatever
        assert all(not find_damage(f) for f in list_checkpoints(folder / "checkpoints")), whatever
        if process.returncode == 0 or is_finished(folder):
            break  # also where the shot came after the last word
    else:
        process = started(python, material / "run.yaml", folder, "--resume")
        _, printed = process.communicate(timeout=WAIT_SECONDS)
        assert process.returncode == 0, printed
    assert_same_adapter(whole, folder)
    shutil.rmtree(folder)


def assert_same_adapter(one: Path, other: Path) -> None:
    ours, theirs = (load_file(folder / "final" / ADAPTER) for folder in (one, other))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_two_kills_of_one_run(python: str, material: Path, whole: Path) -> None:  # noqa: F811
    survive(python, material, whole, 1, ["kill", "launcher"])


def test_a_stopped_rank_ends_the_run_with_words(material: Path) -> None:  # noqa: F811
    folder = material / "frozen"
    words = ("--override", "train.ddp_timeout=10", "--override", "train.max_steps=100000")
    process = started(warm.python(), material / "run.yaml", folder, *words)
    wait_for(lambda: "pid" in read_json(folder / BEAT.format(rank=1)), process)
    os.kill(read_json(folder / BEAT.format(rank=1))["pid"], signal.SIGSTOP)
    _, printed = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 1, printed
    assert "rank 0 lost another rank: Timed out" in printed
    assert "Traceback" not in printed
    view = View(folder)
    view.read_new()
    assert view.failure.startswith("rank 0 lost another rank")
    shutil.rmtree(folder)


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_kills_at_other_moments(python: str, material: Path, whole: Path) -> None:  # noqa: F811
    """Another seed each time, which a failure names."""
    seed = random.SystemRandom().randrange(100, 10**6)
    survive(python, material, whole, seed, ["kill", "term", "launcher", "kill"])


FSDP = "distributed_type: FSDP\nnum_machines: 1\nnum_processes: 2\nfsdp_config: {fsdp_version: 2}\n"


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_a_signal_to_another_launcher_is_saved_too(material: Path, whole: Path, tmp_path: Path) -> None:  # noqa: F811
    """The launcher, here torchrun's agent as `accelerate launch` starts it, forwards SIGTERM and waits 30 s. Its exit
    code is 1 whatever the ranks' own are."""
    file = tmp_path / "fsdp.yaml"
    file.write_text(FSDP)
    folder = tmp_path / "run"
    words = ("--resume", "--override", f"train.output_dir={folder}")
    for attempt, code in (("stopped", "75"), ("to the end", "0")):
        status_dir = tmp_path / attempt
        status_dir.mkdir()
        with supervisor.reserve_port() as port:
            launcher = ("accelerate.commands.launch", f"--config_file={file}", f"--main_process_port={port}")
            process = subprocess.Popen(
                [sys.executable, "-m", *launcher, "-m", "windlass", "train", str(material / "run.yaml"), *words],
                env={**ENVIRON, "WINDLASS_STATUS_DIR": str(status_dir)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            if attempt == "stopped":
                wait_for(lambda: "training step 3" in phases(tmp_path / "stopped"), process)
                process.send_signal(signal.SIGTERM)
            _, printed = process.communicate(timeout=WAIT_SECONDS)
        assert [(status_dir / f"code-{rank}").read_text() for rank in range(2)] == [code] * 2, printed
    assert_same_adapter(whole, folder)


def phases(status_dir: Path) -> str:
    return " ".join(path.read_text() for path in status_dir.glob("phase-*"))
