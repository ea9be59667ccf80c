"""`windlass calibrate` with real ranks, and the machine file: who uses it, and errors in it."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import warm
from refusals import refused

from windlass import calibrate, hardware
from windlass import plan as planning
from windlass.errors import UserError
from windlass.hardware import KINDS, Machine
from windlass.plan import Plan
from windlass.plan.machine import own_machine_file, read_machine, write_machine
from windlass.ranks.place import Node
from windlass.ranks.supervisor import make_environments, reserve_port
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


def sheet_rates(kind: str) -> hardware.Rates:
    gpu = hardware.GPUS[kind]
    link = hardware.find_fabric(gpu.link)
    return Machine(gpu, link, link, hardware.find_fabric(gpu.host_link), 1, None).rates


def written(path: Path, kind: str = "cpu", ranks: int = 2) -> dict[str, Any]:
    """Write a valid machine file without measuring."""
    rates = sheet_rates(kind)
    return write_machine(path, kind, ranks, {}, replace(rates, basis=f"calibrated on {ranks} x {kind}"))


@pytest.mark.long
def test_plan_uses_the_calibration_of_two_ranks(run: Path, tmp_path: Path) -> None:
    environ = {**os.environ, "HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    command = [warm.python(), "-m", "windlass", "calibrate", "--ranks", "2", "--json"]
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:  # keeps a processor busy
        try:
            done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        finally:
            other.kill()
    assert done.returncode == 0, done.stderr
    path, content = own_machine_file("cpu", 2), json.loads(done.stdout)
    assert json.loads(path.read_text()) == content
    rates = read_machine(path, hardware.GPUS["cpu"], 2, str(path))
    assert rates.basis.startswith("calibrated on 2 x cpu, ")
    assert rates.low < 1 < rates.high
    conditions = content["conditions"]
    assert {"host", "processor", "torch", "threads", "load", "spread", "seconds"} <= conditions.keys()
    if (os.cpu_count() or 1) <= 2:
        assert conditions["busy"] > calibrate.BUSY
        assert rates.high > calibrate.RANGES["cpu"][1] * (1 + calibrate.BUSY)  # as long as it stays busy
        assert f"other processes used {conditions['busy']:.0%}" in done.stderr
    # Found for this host, for as many ranks as were measured; not for runs over several hosts, which would disagree.
    plan = planned(run)
    assert plan.machine.measured == rates
    # All seconds on the node are those of the hardware table times one factor.
    sheet = hardware.slow_down(replace(plan.machine, measured=None).rates, conditions["factor"])
    assert conditions["factor"] > 0.05
    for name in ("memory_gb_per_second", "operator_seconds", "module_seconds"):
        assert getattr(rates, name) == pytest.approx(getattr(sheet, name), rel=0.01)
    for kind in KINDS:
        measured, table = rates.collective(kind, "link", 2), sheet.collective(kind, "link", 2)
        assert measured.gb_per_second == pytest.approx(table.gb_per_second, rel=0.01)
    assert planned(run, "cluster.gpus_per_node=3").machine.measured is None
    assert planned(run, "cluster.nodes=2", "cluster.network=ethernet-10").machine.measured is None
    moved = path.rename(tmp_path / "machine.json")
    assert planned(run).machine.measured is None
    assert planned(run, f"cluster.machine={moved}").machine.measured == rates


def test_one_factor_slows_every_step_down(run: Path, tmp_path: Path) -> None:
    write_machine(tmp_path / "slow.json", "cpu", 2, {}, hardware.slow_down(sheet_rates("cpu"), 3.0))
    before, after = planned(run).cost, planned(run, f"cluster.machine={tmp_path / 'slow.json'}").cost
    assert after.step_seconds == pytest.approx(3 * before.step_seconds, rel=1e-6)
    assert after.rows == before.rows


MEASURE = """
import json, pathlib, sys
from windlass.calibrate import Sizes, measure_on_rank
sizes = Sizes((1, 8, 64, 512), (32, 64, 128, 256), (32, 128), (16, 64), 256, 128, 1 << 16, 1 << 16, 1 << 20)
found = measure_on_rank(pathlib.Path(sys.argv[1]).parent, sizes)
if found:
    pathlib.Path(sys.argv[1]).write_text(json.dumps(found))
"""


@pytest.mark.long
def test_rates_of_gpus_are_measured_on_two_ranks(tmp_path: Path) -> None:
    """The measurements of a GPU, on processors and with small sizes."""
    command = [warm.python(), "-W", "ignore", "-c", MEASURE, str(tmp_path / "rates.json")]
    with reserve_port() as port:
        ranks = [
            subprocess.Popen(command, env=environ)
            for environ in make_environments(2, {**os.environ, "OMP_NUM_THREADS": "1"}, Node(0, 1, "localhost", port))
        ]
        assert [rank.wait(200) for rank in ranks] == [0, 0]
    measured = json.loads((tmp_path / "rates.json").read_text())
    rates = calibrate._combine_rates(measured, "h100", 2)
    sheet = {(c.kind, c.fabric): c for c in sheet_rates("h100").collectives if c.ranks == 2}
    over_two = {(c.kind, c.fabric): c for c in rates.collectives if c.ranks == 2}
    for kind in KINDS:  # measured between the two, and nothing of a network
        assert over_two[kind, "link"].gb_per_second not in (0.0, sheet[kind, "link"].gb_per_second)
        assert (kind, "network") not in over_two
    for points in (rates.grouped, rates.attention, rates.attention_backward, *rates.products.values()):
        assert points
        assert all(rate > 0 for *_, rate in points)
    large, small = (max(rate for rows, _, rate in rates.products["float32"] if rows == n) for n in (512, 1))
    assert large > small
    assert min(rates.operator_seconds, rates.module_seconds, rates.decode_gb_per_second) > 0
    write_machine(tmp_path / "machine.json", "h100", 2, measured["conditions"], rates)
    assert read_machine(tmp_path / "machine.json", hardware.GPUS["h100"], 8, "") == rates


def test_one_nodes_measurements_say_nothing_of_the_network(run: Path, tmp_path: Path) -> None:
    sheet = asdict(sheet_rates("h100"))
    links = [{**one, "gb_per_second": 77.0} for one in sheet.pop("collectives") if one["fabric"] == "link"]
    rates = {name: value for name, value in sheet.items() if name not in ("basis", "low", "high")}
    measured = {"rates": {**rates, "collectives": links}, "conditions": {"date": "today", "spread": 0.1}}
    path = tmp_path / "machine.json"
    write_machine(path, "h100", 8, {}, calibrate._combine_rates(measured, "h100", 8))
    on_gpus = ("cluster.gpu=h100", "cluster.gpus_per_node=8", "cluster.host_memory_gib=null", "cluster.nodes=4")
    for network in ("ethernet-25", "infiniband-400"):
        plan = planned(run, *on_gpus, f"cluster.network={network}", f"cluster.machine={path}")
        for kind in KINDS:
            assert (
                plan.machine.rates.collective(kind, "network", 32).gb_per_second == plan.machine.network.gb_per_second
            )
            assert plan.machine.rates.collective(kind, "link", 8).gb_per_second == 77.0
    slower = hardware.slow_down(sheet_rates("cpu"), 2.0)
    assert {one.fabric for one in slower.collectives} == {"link"}


def test_gpus_that_torch_cannot_use_are_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = hardware.GpuReading(0, "NVIDIA H200", 140.0, 140.0)
    monkeypatch.setattr(hardware, "read_gpus", lambda **_: hardware.Gpus((gpu,)))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with refused("no-usable-gpu", "windlass calibrate"):
        calibrate.calibrate(None, tmp_path / "machine.json", {}, print)


def test_own_machine_file_of_another_version_is_left_out_with_a_note(run: Path) -> None:
    path = own_machine_file("cpu", 2)
    content = written(path)
    plan = planned(run)
    assert (plan.machine.measured is not None, plan.machine.notes) == (True, ())
    path.write_text(json.dumps({**content, "windlass": "0.0.9"}))
    plan = planned(run)
    assert plan.machine.measured is None
    (note,) = (note for note in plan.notes if str(path) in note)
    assert "was written by windlass 0.0.9" in note
    assert "`windlass calibrate --ranks 2` renews it" in note


def test_failed_training_is_reported_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", warm.python())
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "nowhere0"}
    with pytest.raises(UserError, match=r"training run failed: .*nowhere0"):
        calibrate.calibrate(2, tmp_path / "machine.json", environ, lambda _: None)
    assert not (tmp_path / "machine.json").exists()


# Where in the file something else is written, what, the place that the error names, and what it says.
WRONG: dict[str, tuple[tuple[str | int, ...], Any, str, str]] = {
    "another version": (("windlass",), "0.0.9", "windlass", "was written by windlass 0.0.9"),
    "another kind": (("kind",), "h100", "kind", "was measured on h100, the run is planned for cpu"),
    "other ranks": (("ranks",), 7, "ranks", "with 7 ranks on the processor, the run has 2"),
    "edited": (("rates", "module_seconds"), 1e-6, "digest", "was edited"),
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
    texts = {"nowhere.json": "No such file", "text.json": "can't be read", "list.json": "machine file"}
    for name, text in texts.items():
        with pytest.raises(UserError, match=text) as caught:
            planned(run, f"cluster.machine={tmp_path / name}")
        assert "cluster.machine" in str(caught.value) or name in caught.value.problems[0].where
