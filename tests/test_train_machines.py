"""Where nobody wrote how many GPUs: what a launcher says, or what this machine shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from windlass.runfile import Loaded, read
from windlass.train.ranks import started_on, visible_gpus

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2"}


def loaded(tmp_path: Path, text: str = "lora: {r: 8}\n") -> Loaded:
    (tmp_path / "run.yaml").write_text(text)
    return read(tmp_path / "run.yaml")


def test_a_launcher_says_nodes_and_ranks(tmp_path: Path) -> None:
    assert started_on(loaded(tmp_path), TORCHRUN, 0) == ["cluster.nodes=3", "cluster.gpus_per_node=2"]


@pytest.mark.parametrize("text", ["cluster: {gpus_per_node: 4}\n", "cluster: {nodes: 2, network: infiniband-400}\n"])
def test_what_is_written_is_left_alone(tmp_path: Path, text: str) -> None:
    assert started_on(loaded(tmp_path, text), TORCHRUN, 0) == []


def test_this_machines_gpus_as_far_as_they_are_visible(tmp_path: Path) -> None:
    assert visible_gpus({}, 4) == 4
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, 4) == 2
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, 1) == 1
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, 4) == 0
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, 4) == 0
    assert started_on(loaded(tmp_path), {"CUDA_VISIBLE_DEVICES": "0,1"}, 4) == ["cluster.gpus_per_node=2"]
    assert started_on(loaded(tmp_path), {"CUDA_VISIBLE_DEVICES": "1"}, 4) == []
