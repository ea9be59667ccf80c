"""The memory and operation models against torch's own trackers. The whole tables: benchmarks/memory_model.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
Rows = list[dict[str, Any]]


def table(*arguments: str) -> Rows:
    """A benchmark in a process of its own: it takes torch's process group and patches its softmax."""
    command = [sys.executable, str(ROOT / "benchmarks" / arguments[0]), *arguments[1:], "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False, env=environment)
    assert done.stdout, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def memory() -> Rows:
    return table("memory_model.py", "--quick")


@pytest.fixture(scope="module")
def operations() -> Rows:
    return table("flops_model.py")


def test_predicted_peaks_are_within_a_tenth_of_what_torch_tracks(memory: Rows) -> None:
    assert len(memory) >= 7
    off = {row["case"]: round(row["ratio"], 3) for row in memory if not 0.9 < row["ratio"] < 1.1}
    assert not off


def test_the_cases_differ_in_all_that_matters(memory: Rows) -> None:
    settings = [row["settings"] for row in memory]
    wanted: dict[str, set[Any]] = {
        "family": {"llama", "mistral4"},
        "ranks": {2, 3, 8},
        "checkpointing": {True, False},
        "reshard": {True, False},
        "targets": {"all", "attention"},
    }
    for key, values in wanted.items():
        assert {one[key] for one in settings} >= values
    assert {row["peak"] for row in memory} >= {"loss", "backward of a layer", "last layer's gather"}


@pytest.mark.parametrize("part", ["base weights", "activations", "gathered layers", "backward of a layer"])
def test_the_tenth_would_notice_a_missing_part(memory: Rows, part: str) -> None:
    """Without the row, some case is off by more than the tenth: the comparison above is not blind to it."""
    assert any((row["predicted_mib"] - row["rows_mib"].get(part, 0)) / row["measured_mib"] < 0.9 for row in memory)


def test_predicted_operations_are_those_that_torch_counts(operations: Rows) -> None:
    assert {row["case"].split()[0] for row in operations} >= {"llama", "mistral4", "mixtral"}
    assert all(row["ratio"] == pytest.approx(1, abs=0.005) for row in operations), operations


@pytest.mark.prove
@pytest.mark.timeout(700)
def test_the_whole_memory_table() -> None:
    rows = table("memory_model.py")
    assert len(rows) >= 25
    off = {row["case"]: round(row["ratio"], 3) for row in rows if not 0.9 < row["ratio"] < 1.1}
    assert not off


@pytest.mark.prove
@pytest.mark.timeout(1300)
def test_real_ranks_with_split_experts_and_a_base_in_fp8() -> None:
    rows = table("memory_on_ranks.py")
    words = {word for row in rows for word in row["case"].split(", ")}
    assert words >= {"full-shard", "no-reshard", "expert-parallel", "resident", "FP8", "expert adapters"}
    off = {row["case"]: round(row["ratio"], 3) for row in rows if not 0.9 < row["ratio"] < 1.1}
    assert not off
