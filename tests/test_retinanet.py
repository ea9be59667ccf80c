"""The RetinaNet example in its own processes: torchvision is in a folder that no other test sees (see Makefile)."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from windlass import run_folder
from windlass.files import read_json_lines

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "retinanet" / "retinanet_train_factory.py"
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
VISION = Path(sys.prefix) / "vision"
SETTINGS = {"--image-size": 64, "--batch-size": 8, "--accum-steps": 1, "--num-workers": 0, "--debug-freq": 4}
STEPS = 6  # per epoch: two ranks, 96 images


def run(*command: str, seconds: float = 280) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    if VISION.is_dir():
        environ["PYTHONPATH"] = str(VISION)
    return subprocess.run(
        [sys.executable, *command], env=environ, capture_output=True, text=True, timeout=seconds, check=False, cwd=ROOT
    )


def test_one_gpu_parts_run_on_a_cpu(tmp_path: Path) -> None:
    """Runs every test of tests/retinanet_parts.py."""
    inner = ("-m", "pytest", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "inner"))
    done = run(*inner, str(ROOT / "tests" / "retinanet_parts.py"))
    shutil.rmtree(tmp_path / "inner", ignore_errors=True)  # several models and optimizers
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def words(options: dict[str, Any]) -> list[str]:
    return [str(word) for pair in options.items() for word in pair]


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_two_ranks_train_the_detector(tmp_path: Path) -> None:
    """Eight epochs under torchrun, as a user starts it: the profiler in a training script that isn't windlass's."""
    folder, options = tmp_path / "run", words({"--make-synthetic": tmp_path, "--image-size": 64})
    done = run(str(SCRIPT), *options, "--max-train", "96", "--max-val", "24")
    assert done.returncode == 0, done.stderr
    options = words(SETTINGS | {"--epochs": 8, "--local-image-dir": tmp_path / "images", "--output-dir": folder})
    done = run(*LAUNCH, str(SCRIPT), *options, seconds=600)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [list(read_json_lines(folder / run_folder.STEPS.format(rank=rank))) for rank in range(2)]
    assert [len(each) for each in lines] == [8 * STEPS] * 2
    for line in lines[0] + lines[1]:
        assert line["images"] == 8
        assert line["images_per_second"] == pytest.approx(8 / line["step_seconds"], rel=1e-5)
        assert min(line[f"{phase}_seconds"] for phase in ("data", "forward", "backward")) > 0
    losses = [fmean((one["loss"], other["loss"])) for one, other in zip(*lines, strict=True)]
    assert fmean(losses[-8:]) < 0.6 * fmean(losses[:8])
    scores = [event for event in read_json_lines(folder / run_folder.EVENTS) if event["kind"] == "eval"]
    assert [event["step"] for event in scores] == [STEPS * (epoch + 1) for epoch in range(8)]
    assert scores[-1]["map_50"] > 0.25
    assert {path.name for path in folder.iterdir()} >= {"checkpoint.pt", "model.pth", "classes.txt", "report.html"}
    shutil.rmtree(tmp_path)  # several models and optimizers


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed here")
def test_a_missing_torchvision_is_reported_with_a_hint() -> None:
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, str(SCRIPT), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)
    assert done.returncode == 1
    assert done.stderr.startswith("error: torchvision is not installed\n\nhint: pip install")


def test_wrong_input_is_reported_without_a_traceback(tmp_path: Path) -> None:
    done = run(str(SCRIPT), "--local-image-dir", str(tmp_path / "nowhere"))
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path / 'nowhere'}: is not a folder")
    assert "Traceback" not in done.stderr
