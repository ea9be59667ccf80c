"""`windlass calibrate` with real ranks, and the machine file: who uses it, and errors in it."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import warm

from windlass import calibrate, hardware
from windlass import plan as planning
from windlass.errors import UserError
from windlass.hardware import KINDS, Machine
from windlass.plan import Plan
from windlass.plan.machine import own_machine_file, read_machine, write_machine
from windlass.runfile import read_run_file

RUN = """
model: {model_name_or_path: Qwen3-30B-A3B}
lora: {target_modules: [q_proj]}
cluster: {gpu: cpu, host_memory_gib: 1000, gpus_per_node: 2}
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path / "run.yaml"


def planned(run: Path, *overrides: str) -> Plan:
    return planning.make_plan(read_run_file(run, overrides))


def written(path: Path, kind: str = "cpu", ranks: int = 2) -> dict[str, Any]:
    """Write a valid machine file without measuring."""
    gpu = hardware.GPUS[kind]
    link = hardware.find_fabric(gpu.link)
    rates = Machine(gpu, link, link, hardware.find_fabric(gpu.host_link), 1, None).rates
    return write_machine(path, kind, ranks, {}, replace(rates, basis=f"calibrated on {ranks} x {kind}"))


def test_plan_uses_the_calibration_of_two_ranks(run: Path, tmp_path: Path) -> None:
    environ = {**os.environ, "HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    command = [warm.python(), "-m", "windlass", "calibrate", "--ranks", "2", "--json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    path, content = own_machine_file("cpu", 2), json.loads(done.stdout)
    assert json.loads(path.read_text()) == content
    rates = read_machine(path, hardware.GPUS["cpu"], 2, str(path))
    assert rates.basis.startswith("calibrated on 2 x cpu, ")
    assert rates.low < 1 < rates.high
    over_two = {(c.kind, c.fabric): c for c in rates.collectives if c.ranks == 2}
    sheet = {
        (c.kind, c.fabric): c for c in replace(planned(run).machine, measured=None).rates.collectives if c.ranks == 2
    }
    for kind in KINDS:  # measured between the two, and of a network as data sheets imply it
        assert over_two[kind, "link"].gb_per_second not in (0.0, sheet[kind, "link"].gb_per_second)
        assert (kind, "network") in over_two
    for points in (rates.grouped, rates.attention, *rates.products.values(), *rates.narrow.values()):
        assert all(rate > 0 for *_, rate in points)
    backward = zip(rates.attention, rates.attention_backward, strict=True)
    assert all(after[2] < before[2] for before, after in backward), (
        "the backward has the forward's operations, and more"
    )
    wide, few = (
        {(rows, width): rate for rows, width, rate in points}
        for points in (rates.products["float32"], rates.narrow["float32"])
    )
    assert few[512, 256] < wide[512, 256], "an adapter's products have few columns, which are slower"
    large, small = (max(rate for rows, _, rate in rates.products["float32"] if rows == n) for n in (512, 1))
    assert large > small
    assert {"host", "processor", "torch", "threads", "load", "spread", "seconds"} <= content["conditions"].keys()
    # Found for this host, for as many ranks as were measured; not for runs over several hosts, which would disagree.
    assert planned(run).machine.measured == rates
    assert planned(run, "cluster.gpus_per_node=3").machine.measured is None
    assert planned(run, "cluster.nodes=2", "cluster.network=ethernet-10").machine.measured is None
    moved = path.rename(tmp_path / "machine.json")
    assert planned(run).machine.measured is None
    assert planned(run, f"cluster.machine={moved}").machine.measured == rates


def test_failed_rank_ends_the_others_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", warm.python())
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "nowhere0"}
    with pytest.raises(UserError, match=r"rank \d failed: .*nowhere0"):
        calibrate.calibrate(2, tmp_path / "machine.json", environ, lambda _: None)
    assert not (tmp_path / "machine.json").exists()


# Where in the file something else is written, what, the place that the error names, and what it says.
WRONG: dict[str, tuple[tuple[str | int, ...], Any, str, str]] = {
    "another version": (("windlass",), "0.0.9", "windlass", "was written by windlass 0.0.9"),
    "another kind": (("kind",), "h100", "kind", "was measured on h100, the run is planned for cpu"),
    "other ranks": (("ranks",), 7, "ranks", "with 7 ranks on the processor, the run has 2"),
    "no rates": (("rates",), {}, "digest", "was edited"),
    "edited": (("rates", "module_seconds"), 1e-6, "digest", "was edited"),
    "conditions": (("conditions",), {"load": 0}, "digest", "was edited"),
}


@pytest.mark.parametrize("case", WRONG)
def test_machine_file_errors_name_their_place(case: str, run: Path, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    content = written(path)
    assert planned(run, f"cluster.machine={path}").machine.measured is not None
    (*steps, last), value, place, text = WRONG[case]
    inner: Any = content
    for step in steps:
        inner = inner[step]
    inner[last] = value
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"{path.name}: {place}.*{text}") as caught:
        planned(run, f"cluster.machine={path}")
    assert all(problem.hint for problem in caught.value.problems)


def test_missing_machine_file_is_reported_with_its_key(run: Path, tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "text.json").write_text("fast")
    for name, text in {
        "nowhere.json": "No such file",
        "text.json": "can't be read",
        "list.json": "machine file",
    }.items():
        with pytest.raises(UserError, match=text) as caught:
            planned(run, f"cluster.machine={tmp_path / name}")
        assert "cluster.machine" in str(caught.value) or name in caught.value.problems[0].where
    written(tmp_path / "h200.json", "h200", 8)
    on_gpus = ("cluster.gpu=h200", "cluster.gpus_per_node=4", "cluster.host_memory_gib=null")
    assert planned(run, *on_gpus, f"cluster.machine={tmp_path / 'h200.json'}").machine.measured is not None
    with pytest.raises(UserError, match="was measured on h200, the run is planned for a100-80gb"):
        planned(run, *on_gpus, "cluster.gpu=a100", f"cluster.machine={tmp_path / 'h200.json'}")
