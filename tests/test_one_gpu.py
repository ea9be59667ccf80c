"""benchmarks/one_gpu.py at toy size: every part gives its rows, and what ends early loses nothing."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
pytestmark = [
    pytest.mark.xdist_group("one gpu"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # PEFT's of transformers
]


@pytest.fixture(scope="module")
def parts() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("one_gpu_parts")
    sys.path.remove(str(BENCHMARKS))


def rows(parts: Any, name: str) -> list[dict[str, Any]]:
    """A part's rows, which a file can hold."""
    found: list[dict[str, Any]] = list(
        parts.PARTS[name](importlib.import_module("one_gpu_model").Sizes(tiny=True), time.time() + 100)
    )
    return [json.loads(json.dumps(row)) for row in found if "note" not in row]


def test_the_paths_of_a_gpu_compute_what_they_should(parts: Any) -> None:
    """On a CPU too: the grouped products over codes, and adapters beside experts against PEFT's."""
    errors = [row["value"] for row in rows(parts, "ground") if row["unit"] == "relative"]
    assert len(errors) == 7
    assert max(errors) < 0.03


@pytest.mark.parametrize(("name", "layers", "count"), [("whole", 3, 2), ("whole-experts", 3, 2), ("layers", 2, 7)])
def test_steps_learn_from_a_model_without_files(parts: Any, name: str, layers: int, count: int) -> None:
    found = rows(parts, name)
    assert len(found) == count
    for row in found:
        assert row["model"].startswith(f"{layers} layers")
        assert row["loss"] == pytest.approx(math.log(512), abs=0.3)  # random weights know nothing
        assert min(row[third] for third in ("forward", "backward", "update")) > 0
        assert row["plan_gib"] > 0
    if name == "layers":
        masked = [row["rows"] for row in found if "masked" in row["rows"]]
        assert masked == ["4 x 32, masked", "2 x 64, masked"]
        assert [row["rows"] for row in found if "cuDNN" in row["rows"]] == ["2 x 64, cuDNN"]
    assert {row["base"] for row in found} == ({"bf16", "fp8"} if name == "layers" else {"fp8"})


def test_experts_ways_and_the_profile(parts: Any) -> None:
    table = rows(parts, "peft")
    assert [row["per_expert"] for row in table] == [2, 16]
    profile = rows(parts, "profile")
    assert len(profile) == 15
    assert 0.5 < sum(row["share"] for row in profile) <= 1.0


def test_the_whole_models_headers_are_the_published_ones(parts: Any) -> None:
    """At full size, as far as there is anything without a GPU: 119 B parameters, held in 112 GiB."""
    model = importlib.import_module("one_gpu_model")
    found = model.headers(model.Sizes(tiny=False), 36)
    assert found.total == pytest.approx(118.973e9, rel=1e-4)
    codes = sum(each.count for each in found.parameters if each.pieces[0].stored.dtype == "F8_E4M3")
    assert (codes + 2 * (found.total - codes)) / 2**30 == pytest.approx(111.9, abs=0.2)


def test_what_was_measured_is_shown_of_a_run_that_was_killed(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    row = {"part": "profile", "name": "a|b", "calls": 3, "ms": 1.5, "share": 0.25}
    file.write_text(json.dumps(row) + "\n" + '{"part": "whole", "tok')
    command = [sys.executable, str(BENCHMARKS / "one_gpu.py"), "--show", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "| a\\|b | 3 | 1.50 | 25.0% |" in done.stdout
    assert "broken off" in done.stdout


def ended(tmp_path: Path, *more: str, **environ: str) -> tuple[list[dict[str, Any]], subprocess.CompletedProcess[str]]:
    out = tmp_path / "run.jsonl"
    command = [sys.executable, str(BENCHMARKS / "one_gpu.py"), "--tiny", "--out", str(out), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environ})
    return [json.loads(line) for line in out.read_text().splitlines()], done


def test_what_cannot_be_imported_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "trl.py").write_text("raise ImportError('no such thing here')\n")
    own, done = ended(tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert [row["part"] for row in own] == ["facts", "facts"]
    assert own[1]["skipped"].startswith("every part. Needed: trl (ImportError: no such thing here)")


def test_a_part_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "peft.py").touch()
    own, done = ended(tmp_path, "--part", "peft", PYTHONPATH=str(tmp_path))  # an empty one before PEFT's
    assert done.returncode == 1
    (row,) = own
    assert row["part"] == "peft"
    assert "Error: " in row["skipped"]
    assert "Traceback" in done.stderr


def test_masked_rows_are_documents_apart(parts: Any) -> None:
    model = importlib.import_module("one_gpu_model")
    trainee: Any = type("Trainee", (), {"vocabulary": 512, "device": "cpu"})
    batch = model.Trainee.batch(trainee, model.Cell(64, 32, masked=True), 12)
    assert batch["position_ids"][1].tolist() == [*range(12), *range(12), *range(8)]
    assert (batch["labels"] == -100).sum() == 2 * 3
    assert model.Trainee.batch(trainee, model.Cell(64, 32), 12).keys() == {"input_ids", "labels"}


def test_a_part_that_runs_out_of_time_is_named(tmp_path: Path) -> None:
    own, done = ended(tmp_path, "--parts", "profile", "--seconds", "0.5")  # less than it takes to import torch
    assert own[0]["versions"]["torch"]
    assert {"part": "profile", "skipped": "out of time"} in own
    assert done.returncode == 1
    assert "skipped: out of time" in done.stdout
