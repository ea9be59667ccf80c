"""The RetinaNet example, in processes of its own: torchvision is in a folder that no other test sees (see Makefile)."""

from __future__ import annotations

import importlib.util
import json
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
from windlass.observe import steps
from windlass.observe.report.facts import facts
from windlass.observe.report.read import read

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


def test_the_parts(tmp_path: Path) -> None:
    """Every test of tests/retinanet_parts.py."""
    inner = ("-m", "pytest", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "inner"))
    done = run(*inner, str(ROOT / "tests" / "retinanet_parts.py"))
    shutil.rmtree(tmp_path / "inner", ignore_errors=True)  # several models and optimizers
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def words(options: dict[str, Any]) -> list[str]:
    return [str(word) for pair in options.items() for word in pair]


def draw(folder: Path) -> None:
    options = {"--make-synthetic": folder, "--max-train": 96, "--max-val": 24, "--image-size": 64}
    done = run(str(SCRIPT), *words(options))
    assert done.returncode == 0, done.stderr


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_two_ranks(tmp_path: Path) -> None:
    """Gradients, evaluation, a stop signal and two epochs of training, in one start of two ranks."""
    draw(tmp_path)
    done = run(*LAUNCH, str(ROOT / "tests" / "retinanet_ranks.py"), str(tmp_path), *words(SETTINGS | {"--epochs": 2}))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    first, second = (json.loads((tmp_path / f"outcome-{rank}.json").read_text()) for rank in range(2))
    # Two ranks have the gradient of one, and images without boxes leave no parameter without a gradient.
    assert len(first["gradients"]) == 4
    for name, case in first["gradients"].items():
        assert case["worst"][0] < 1e-5, (name, case["worst"])
        assert case["loss"][0] == pytest.approx(case["loss"][1], rel=1e-6), name
        assert case["without_gradient"] == second["gradients"][name]["without_gradient"] == []
    # Micro-batches are reduced once. (DDP makes its buckets anew after the first backward.)
    one, two = (second["gradients"][f"no boxes on rank 1, {count} micro-batches"]["buckets"] for count in (1, 2))
    assert one == two > 1
    # A rank without images to evaluate delays nobody, and waits until the first rank has computed the precision.
    assert (first["few"]["images"], second["few"]["images"]) == (1, 0)
    assert set(first["few"]["found"]) == {"map", "map_50", "map_75"}
    assert second["few"]["found"] == {}
    assert second["few"]["left"] >= first["few"]["computed"][0]
    # A signal to one rank stops both after the same step.
    for outcome in (first, second):
        assert outcome["stopped"]["code"] == 75
        assert outcome["stopped"]["steps"] == [outcome["stopped"]["saved"]] * 2
        assert outcome["stopped"]["saved"] < 50 * 32
    losses, scores = read_training(tmp_path / "trained", epochs=2)
    assert fmean(losses[-4:]) < 0.85 * fmean(losses[:4])
    assert scores[-1]["map_50"] > 0.05  # a fresh model has less than 0.001
    files = {path.name for path in (tmp_path / "trained").iterdir()}
    assert files >= {"checkpoint.pt", "model.pth", "classes.txt", "report.html"}
    assert (tmp_path / "trained" / "classes.txt").read_text().split() == ["Disc", "Square", "Wedge"]
    for rank in range(2):
        for line in read_json_lines(tmp_path / "trained" / run_folder.STEPS.format(rank=rank)):
            assert line["images"] == 8
            assert line["images_per_second"] == pytest.approx(8 / line["step_seconds"], rel=1e-6)
            assert line["data_seconds"] > 0
            assert line["forward_seconds"] > 0 < line["backward_seconds"]
    shutil.rmtree(tmp_path)  # several models and optimizers


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_two_ranks_learn_the_shapes(tmp_path: Path) -> None:
    """Eight epochs under torchrun, as a user starts it."""
    draw(tmp_path)
    options = words(SETTINGS | {"--epochs": 8, "--local-image-dir": tmp_path / "images"})
    done = run(*LAUNCH, str(SCRIPT), *options, "--output-dir", str(tmp_path / "run"), seconds=600)
    assert done.returncode == 0, done.stderr[-4000:]
    losses, scores = read_training(tmp_path / "run", epochs=8)
    assert fmean(losses[-8:]) < 0.6 * fmean(losses[:8])
    assert scores[-1]["map_50"] > 0.25
    shutil.rmtree(tmp_path)


def read_training(folder: Path, epochs: int) -> tuple[list[float], list[dict[str, Any]]]:
    """The loss of every step, over both ranks, and every evaluation."""
    lines = [list(read_json_lines(folder / run_folder.STEPS.format(rank=rank))) for rank in range(2)]
    assert [len(each) for each in lines] == [epochs * STEPS] * 2
    losses = [fmean(pair) for pair in zip(*([line["loss"] for line in each] for each in lines), strict=True)]
    scores = [event for event in read_json_lines(folder / run_folder.EVENTS) if event["kind"] == "eval"]
    assert [event["step"] for event in scores] == [STEPS * (epoch + 1) for epoch in range(epochs)]
    return losses, scores


@pytest.mark.parametrize(("waits", "level"), [(0.05, "good"), (1.5, "warn")])
def test_the_report_tells_when_loading_is_the_bottleneck(tmp_path: Path, waits: float, level: str) -> None:
    with (tmp_path / run_folder.STEPS.format(rank=0)).open("w") as lines:
        for step in range(1, 31):
            phases = {f"{phase}_seconds": 0.0 for phase in steps.PHASES}
            phases |= {"data_seconds": waits, "backward_seconds": 2.0, "step_seconds": waits + 2}
            lines.write(json.dumps({"step": step, "time": step, "loss": 1 / step, **phases}) + "\n")
    verdict = facts(read(tmp_path))["verdict"]
    reason = "43% of the step time is waiting for data: loading is the bottleneck"
    assert (verdict["level"], reason in verdict["against"]) == (level, level == "warn")


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
    assert done.stderr.startswith(f"error: {tmp_path / 'nowhere'}: is no folder")
    assert "Traceback" not in done.stderr
