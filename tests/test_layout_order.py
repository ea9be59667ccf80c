"""The plan's order of layouts against the measured one, over a throttled link. The table: benchmarks/layouts.py."""

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launch_hosts import why_not

ROOT = Path(__file__).parent.parent
BENCHMARK = ROOT / "benchmarks" / "layouts.py"
sys.path.insert(0, str(ROOT))
layouts: Any = importlib.import_module("benchmarks.layouts")
TIE, Outcome, wrong_pairs = layouts.TIE, layouts.Outcome, layouts.wrong_pairs

MISSING = why_not() or ("" if shutil.which("tc") else "tc (iproute2) throttles the link, and is not installed")


def outcomes(*times: tuple[float, float]) -> list[Any]:
    return [Outcome(str(i), predicted, measured, 0.0, 0.0) for i, (predicted, measured) in enumerate(times)]


def test_order_check_finds_wrong_pairs_and_ignores_ties() -> None:
    assert wrong_pairs(outcomes((1.0, 5.0), (2.0, 9.0), (4.0, 9.5))) == (3, [])
    assert wrong_pairs(outcomes((1.0, 5.0), (1.0 + TIE - 0.01, 4.0))) == (0, [])
    pairs, wrong = wrong_pairs(outcomes((1.0, 5.0), (2.0, 4.0), (4.0, 9.5)))
    assert (pairs, [(one.way, other.way) for one, other in wrong]) == (3, [("0", "1")])


@pytest.mark.prove
@pytest.mark.timeout(1600)
@pytest.mark.skipif(bool(MISSING), reason=MISSING or "-")
def test_measured_layout_order_equals_the_plans() -> None:
    command = [sys.executable, str(BENCHMARK), "--json", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.stdout, done.stderr[-3000:]
    proof: dict[str, Any] = json.loads(done.stdout)
    assert proof["pairs"] >= 30, proof["rows"]  # of 55: the ways really differ
    assert proof["wrong"] == [], proof["rows"]
    measured = {row["way"]: row["measured"] for row in proof["rows"]}
    assert measured[proof["auto"]] <= min(measured.values()) * (1 + TIE)
    # Bytes on the wire: what rendezvous, start and TCP's own words add is small beside a step that moves weights.
    moved = [row for row in proof["rows"] if row["predicted_mb"] > 5]
    assert len(moved) >= 6
    for row in moved:
        assert 0.95 < row["sent_mb"] / row["predicted_mb"] < 1.15, row
