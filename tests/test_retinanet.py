"""The RetinaNet example, in processes of its own: torchvision is in a folder that no other test sees (see Makefile)."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

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


@dataclass
class Trained:
    folder: Path
    told: list[dict[str, Any]]
    out: str


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("two")
    draw(folder)
    done = run(*LAUNCH, str(ROOT / "tests" / "retinanet_ranks.py"), str(folder), *words(SETTINGS | {"--epochs": 2}))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    told = [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(2)]
    yield Trained(folder, told, done.stdout)
    shutil.rmtree(folder, ignore_errors=True)


def test_two_ranks_have_the_gradient_of_one(two_ranks: Trained) -> None:
    found = two_ranks.told[0]["gradients"]
    assert len(found) == 4
    for name, case in found.items():
        assert case["worst"][0] < 1e-5, (name, case["worst"])
        assert case["loss"][0] == pytest.approx(case["loss"][1], rel=1e-6), name
    for told in two_ranks.told:  # images without boxes leave no parameter out, which the other ranks would wait for
        assert [case["without_gradient"] for case in told["gradients"].values()] == [[]] * 4


def test_micro_batches_are_exchanged_once(two_ranks: Trained) -> None:
    found = two_ranks.told[1]["gradients"]  # DDP makes its buckets anew after the first backward
    one, two = (found[f"no boxes on rank 1, {count} micro-batches"]["buckets"] for count in (1, 2))
    assert one == two > 1


def test_a_rank_without_images_to_judge_keeps_nobody_waiting(two_ranks: Trained) -> None:
    assert [told["few"]["asked"] for told in two_ranks.told] == [1, 0]
    assert set(two_ranks.told[0]["few"]["found"]) == {"map", "map_50", "map_75"}
    assert two_ranks.told[1]["few"]["found"] == {}


def test_the_others_wait_where_there_is_patience(two_ranks: Trained) -> None:
    """Until the first rank has worked out the precision: not in the next step's exchange of gradients."""
    first, other = (told["few"] for told in two_ranks.told)
    assert other["left"] >= first["computed"][0]


def test_a_signal_to_one_rank_stops_all_after_the_same_step(two_ranks: Trained) -> None:
    for told in two_ranks.told:
        assert told["stopped"]["code"] == 75
        made = told["stopped"]["made"]
        assert made[0] == made[1] == told["stopped"]["saved"] < 50 * 32


def learned(folder: Path, epochs: int) -> tuple[list[float], list[dict[str, Any]]]:
    """The loss of every step, over both ranks, and every evaluation."""
    lines = [list(steps.lines(folder / steps.STEPS.format(rank=rank))) for rank in range(2)]
    assert [len(each) for each in lines] == [epochs * STEPS] * 2
    losses = [fmean(pair) for pair in zip(*([line["loss"] for line in each] for each in lines), strict=True)]
    scores = [event for event in steps.lines(folder / steps.EVENTS) if event["kind"] == "eval"]
    assert [event["step"] for event in scores] == [STEPS * (epoch + 1) for epoch in range(epochs)]
    return losses, scores


def test_two_ranks_begin_to_learn_the_shapes(two_ranks: Trained) -> None:
    losses, scores = learned(two_ranks.folder / "learned", epochs=2)
    assert fmean(losses[-4:]) < 0.85 * fmean(losses[:4])
    assert scores[-1]["map_50"] > 0.05  # a fresh model has less than 0.001
    files = {path.name for path in (two_ranks.folder / "learned").iterdir()}
    assert files >= {"checkpoint.pt", "model.pth", "classes.txt", "report.html"}
    assert (two_ranks.folder / "learned" / "classes.txt").read_text().split() == ["Disc", "Square", "Wedge"]


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_two_ranks_learn_the_shapes(tmp_path: Path) -> None:
    """Eight epochs under torchrun, as a user starts it."""
    draw(tmp_path)
    options = words(SETTINGS | {"--epochs": 8, "--local-image-dir": tmp_path / "images"})
    whole = run(*LAUNCH, str(SCRIPT), *options, "--output-dir", str(tmp_path / "whole"), seconds=600)
    assert whole.returncode == 0, whole.stderr[-4000:]
    losses, scores = learned(tmp_path / "whole", epochs=8)
    assert fmean(losses[-8:]) < 0.6 * fmean(losses[:8])
    assert scores[-1]["map_50"] > 0.25
    shutil.rmtree(tmp_path)


def test_the_meter_counts_images_and_the_wait_for_them(two_ranks: Trained) -> None:
    for rank in range(2):
        for line in steps.lines(two_ranks.folder / "learned" / steps.STEPS.format(rank=rank)):
            assert line["images"] == 8
            assert line["images_per_second"] == pytest.approx(8 / line["step_seconds"], rel=1e-6)
            assert line["data_seconds"] > 0
            assert line["forward_seconds"] > 0 < line["backward_seconds"]


@pytest.mark.parametrize(("waits", "level"), [(0.05, "good"), (1.5, "warn")])
def test_the_report_says_when_loading_is_the_bottleneck(tmp_path: Path, waits: float, level: str) -> None:
    with (tmp_path / steps.STEPS.format(rank=0)).open("w") as lines:
        for step in range(1, 31):
            phases = {f"{phase}_seconds": 0.0 for phase in steps.PHASES}
            phases |= {"data_seconds": waits, "backward_seconds": 2.0, "step_seconds": waits + 2}
            lines.write(json.dumps({"step": step, "time": step, "loss": 1 / step, **phases}) + "\n")
    verdict = facts(read(tmp_path))["verdict"]
    said = "43% of the step time is waiting for data: loading is the bottleneck"
    assert (verdict["level"], said in verdict["against"]) == (level, level == "warn")


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed here")
def test_a_missing_torchvision_is_said_with_what_to_do() -> None:
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, str(SCRIPT), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)
    assert done.returncode == 1
    assert done.stderr.startswith("error: torchvision is not installed\n\nhint: pip install")


def test_wrong_input_is_said_without_a_traceback(tmp_path: Path) -> None:
    done = run(str(SCRIPT), "--local-image-dir", str(tmp_path / "nowhere"))
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path / 'nowhere'}: is no folder")
    assert "Traceback" not in done.stderr
