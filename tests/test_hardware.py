"""The hardware table, the figures a user gives instead of it, and what this machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from windlass import hardware
from windlass.errors import UserError


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("h200", "h200"),
        ("nvidia-h200", "h200"),
        ("NVIDIA H200", "h200"),
        ("H200 NVL", "h200-nvl"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("A100", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("AMD Instinct MI300X", "mi300x"),
        ("CPU", "cpu"),
    ],
)
def test_every_usual_spelling_finds_its_row(spelling: str, name: str) -> None:
    assert hardware.gpu(spelling).name == name


def test_h200_memory_is_what_the_driver_reports_not_what_the_box_says() -> None:
    h200 = hardware.gpu("h200")
    assert h200.memory_gib == pytest.approx(140.4, abs=0.05)
    assert h200.memory_gib < 141e9 / 2**30 * 1.1
    assert h200.achieved_tflops == pytest.approx(250, rel=0.02)
    assert h200.memory_gb_per_second == pytest.approx(4300, rel=0.01)


def test_every_row_names_its_source_and_links_that_exist() -> None:
    for name, row in hardware.GPUS.items():
        assert row.name == name
        assert row.source
        assert row.link in hardware.FABRICS
        assert row.host_link in hardware.FABRICS
        assert 0 < row.achieved_tflops < row.bf16_tflops
    for name, fabric in hardware.FABRICS.items():
        assert fabric.name == name
        assert fabric.source
        assert fabric.gb_per_second > 0
    assert set(hardware.ALIASES.values()) <= set(hardware.GPUS)
    assert set(hardware.FABRIC_ALIASES.values()) <= set(hardware.FABRICS)


def test_unknown_gpu_names_the_nearest_and_asks_for_figures() -> None:
    with pytest.raises(UserError) as caught:
        hardware.gpu("h20", "run.yaml:3: cluster.gpu")
    problem = caught.value.problems[0]
    assert problem.where == "run.yaml:3: cluster.gpu"
    assert "h200" in problem.hint
    for figure in hardware.FIGURES:
        assert figure in problem.hint


def test_unknown_fabric_names_the_nearest() -> None:
    assert hardware.fabric("InfiniBand 400").gb_per_second == 45
    assert hardware.fabric("nvlink").name == "nvlink4"
    with pytest.raises(UserError, match="infinband-400") as caught:
        hardware.fabric("infinband-400", "run.yaml: cluster.network")
    assert "infiniband-400" in caught.value.problems[0].hint


def test_given_figures_make_a_row() -> None:
    row = hardware.gpu({"name": "x1", "memory_gib": 64, "bf16_tflops": 400, "memory_gb_per_second": 2000})
    assert (row.name, row.memory_gib, row.bf16_tflops) == ("x1", 64.0, 400.0)
    assert row.achieved_tflops == 100
    assert row.memory_gb_per_second == 1800


@pytest.mark.parametrize("bad", [0, -1, "fast", True, float("inf"), float("nan"), None])
def test_bad_figures_are_all_reported_at_once(bad: object) -> None:
    with pytest.raises(UserError) as caught:
        hardware.gpu({"memory_gib": bad, "bf16_tflops": 1, "memory_gb_per_second": 1, "colour": "red"}, "w")
    assert {problem.where for problem in caught.value.problems} == {"w.memory_gib", "w.name", "w.colour"}


def test_this_machine_has_processors_and_memory() -> None:
    here = hardware.this_machine()
    assert here.cpus >= 1
    assert here.memory_gib > 0.1
    assert here.gpus or here.notes  # no GPU is never silent


def test_control_group_limits_are_read(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{3 * 2**30}\n")
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert hardware.memory_limit_gib(tmp_path) == 3
    assert hardware.usable_cpus(tmp_path) == 1
    (tmp_path / "memory.max").write_text("max\n")
    assert hardware.memory_limit_gib(tmp_path) is None
    old = tmp_path / "memory"
    old.mkdir()
    (old / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert hardware.memory_limit_gib(tmp_path) is None
