"""benchmarks/one_gpu.py at toy size: every part returns its rows, and an interrupted run loses nothing."""

import importlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import warm

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
pytestmark = [
    pytest.mark.long,
    pytest.mark.xdist_group("one gpu"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # PEFT's of transformers
]


@pytest.fixture(scope="module")
def model() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("one_gpu_model")
    sys.path.remove(str(BENCHMARKS))


def rows(model: Any, name: str) -> list[dict[str, Any]]:
    """Return a part's rows, which a file can store."""
    part = importlib.import_module("one_gpu_parts").PARTS[name]
    found: list[dict[str, Any]] = list(part(model.Sizes(tiny=True), time.time() + 1000))
    return [json.loads(json.dumps(row)) for row in found if "note" not in row]


def test_gpu_code_paths_compute_the_same_values(model: Any) -> None:
    """On a CPU too: grouped products over codes, and unmerged adapters against PEFT's."""
    errors = [row["value"] for row in rows(model, "ground") if row["unit"] == "relative"]
    assert len(errors) == 7
    assert max(errors) < 0.03


@pytest.mark.parametrize(("name", "layers", "count"), [("whole-nf4", 3, 2), ("layers", 2, 7)])
def test_steps_learn_from_a_model_without_files(model: Any, name: str, layers: int, count: int) -> None:
    found = rows(model, name)
    assert len(found) == count
    for row in found:
        assert row["model"].startswith(f"{layers} layers")
        assert row["loss"] == pytest.approx(math.log(512), abs=0.3)  # random weights know nothing
        assert min(row[third] for third in ("forward", "backward", "update", "plan_gib")) > 0
    if name == "layers":
        odd = [row["rows"] for row in found if "masked" in row["rows"] or "cuDNN" in row["rows"]]
        assert odd == ["2 x 64, cuDNN", "4 x 32, masked", "2 x 64, masked"]
    assert {row["base"] for row in found} == ({"nf4"} if name == "whole-nf4" else {"bf16", "fp8"})


def test_a_dense_model_learns_alike_by_windlass_and_by_peft(model: Any) -> None:
    ours, pefts = rows(model, "dense")
    assert (ours["way"], pefts["way"]) == ("windlass", "transformers + PEFT")
    assert ours["losses"] == pytest.approx(pefts["losses"], abs=0.02)
    assert ours["losses"][0] == pytest.approx(math.log(512), abs=0.3)
    assert min(row[key] for row in (ours, pefts) for key in ("seconds", "tokens_per_second")) > 0
    assert ours["plan_gib"] > 0


def test_profile_and_expert_implementations(model: Any) -> None:
    assert [row["per_expert"] for row in rows(model, "peft")] == [2, 16]
    profile = rows(model, "profile")
    assert len(profile) == 15
    assert 0.5 < sum(row["share"] for row in profile) <= 1.0
    # The whole model at full size, as far as there is anything of it without a GPU: 119 B parameters, in 112 GiB.
    found = model.headers(model.Sizes(tiny=False), 36)
    assert found.total == pytest.approx(118.973e9, rel=1e-4)
    codes = sum(each.count for each in found.parameters if each.pieces[0].stored.dtype == "F8_E4M3")
    assert (codes + 2 * (found.total - codes)) / 2**30 == pytest.approx(111.9, abs=0.2)


def test_planned_memory_is_what_gpus_needed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four layers and of the whole model, by rows that were measured: not less, and 3 % more at most."""
    monkeypatch.setattr(model, "card", model.card)  # replan's is that of the rows
    ratios = {}
    for file in sorted((BENCHMARKS / "gpu").glob("*/*.jsonl")):
        found = [row for line in file.read_text().splitlines() if "part" in (row := json.loads(line))]
        for row in model.replan(found) if found else ():
            if "peak_to_plan" in row:
                ratios[file.parent.name, row["part"], row["base"], row["rows"]] = row["peak_to_plan"]
    assert len(ratios) >= 25
    assert {base for _, _, base, _ in ratios} == {"bf16", "fp8", "nf4"}
    assert min(ratios.values()) > 0.97, ratios
    assert max(ratios.values()) <= 1.0, ratios


def test_no_token_predicts_across_documents(model: Any) -> None:
    trainee: Any = type("Trainee", (), {"vocabulary": 512, "device": "cpu"})
    batch = model.Trainee.batch(trainee, model.Cell(64, 32, masked=True), 12)
    assert batch["position_ids"][1].tolist() == [*range(12), *range(12), *range(8)]
    assert batch["supervised"].tolist() == [i for i in range(64) if i % 32 not in (11, 23, 31)]
    assert batch["targets"].equal(batch["input_ids"].flatten()[batch["supervised"] + 1])
    assert "position_ids" not in model.Trainee.batch(trainee, model.Cell(64, 32), 12)


def ended(tmp_path: Path, *more: str, **environ: str) -> tuple[list[dict[str, Any]], subprocess.CompletedProcess[str]]:
    out = tmp_path / "run"
    out.mkdir(exist_ok=True)
    python = sys.executable if "PYTHONPATH" in environ else warm.python()
    command = [python, str(BENCHMARKS / "one_gpu.py"), "--tiny", "--out", str(out), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, **environ})
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()], done


def test_failing_imports_and_timeouts_are_named(tmp_path: Path) -> None:
    (tmp_path / "pydantic.py").write_text("raise ImportError('no such thing here')\n")
    info = tmp_path / "transformers-5.16.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.16.1\n")
    own, done = ended(tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert [row["part"] for row in own] == ["facts", "facts"]
    lacking = "transformers >=5.17,<5.25 (here: 5.16.1); pydantic (ImportError: no such thing here)"
    assert own[1]["skipped"].startswith(f"every part. Needed: {lacking}")
    shutil.rmtree(tmp_path / "run")
    own, done = ended(tmp_path, "--parts", "profile", "--minutes", "0.0001")  # less than any part takes
    assert own[0]["versions"]["torch"]
    assert {"part": "profile", "skipped": "out of time"} in own
    assert done.returncode == 1


def test_a_part_that_ended_is_not_measured_again(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    share = {"part": "profile", "name": "product", "calls": 3, "ms": 1.5, "share": 0.25}
    late = [{"part": "facts", "begins": "peft"}, {"part": "peft", "skipped": "out of time"}]
    rows = [share, {"part": "facts", "ended": "profile"}, *late]
    (tmp_path / "run" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own, done = ended(tmp_path, "--parts", "profile,peft", "--minutes", "2")
    assert [row["begins"] for row in own if "begins" in row] == ["peft", "peft"]
    page = (tmp_path / "run" / "README.md").read_text()
    assert done.stdout in page
    assert "| product | 3 | 1.50 | 25.0% |" in page
    assert "out of time" not in page
    assert page.count("| 2 |") == page.count("| 16 |") == 1
    (tmp_path / "run" / "rows.jsonl").write_text(json.dumps({"part": "facts", "gpu": "another card"}) + "\n")
    _, done = ended(tmp_path)
    assert "run has rows of another card: name another folder with --out" in done.stderr


def test_killed_run_shows_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    row = {"part": "profile", "name": "a|b", "calls": 3, "ms": 1.5, "share": 0.25}
    file.write_text(json.dumps(row) + "\n" + '{"part": "whole", "tok')
    command = [warm.python(), str(BENCHMARKS / "one_gpu.py"), "--show", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "| a\\|b | 3 | 1.50 | 25.0% |" in done.stdout
    assert "a line that was cut off" in done.stdout
