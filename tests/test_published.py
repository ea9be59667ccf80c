"""Planned against published runs: the goals on rows that nothing was fitted to, and unreadable rows."""

import csv
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
published: Any = importlib.import_module("published")


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    monkeypatch.setattr(sys, "argv", ["published.py", *arguments])
    published.main()
    return capsys.readouterr()


@pytest.mark.takes("plans all published runs")
def test_plan_agrees_with_published_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answer = json.loads(run(monkeypatch, capsys, "--json")[0])
    assert {"rows", "skipped", "memory", "speed", "by_source", "bounds"} <= answer.keys()
    assert answer["rows"] + sum(answer["skipped"].values()) == len(published.ROWS.read_text().splitlines()) - 1
    for part in (answer, answer["held_out"]):
        assert part["memory"]["median"] <= 0.07
        assert part["memory"]["p90"] <= 0.15
        assert part["speed"]["median"] <= 0.15
        assert part["speed"]["p90"] <= 0.35
    fitted = [one["fitted"] for one in answer["by_source"].values()]
    assert 3 * sum(fitted) <= 2 * len(fitted)
    assert answer["memory"]["rows"] >= 60
    text, _ = run(monkeypatch, capsys)
    assert max(map(len, text.splitlines())) <= 80


def test_unreadable_published_rows_are_skipped_with_their_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with published.ROWS.open() as file:
        header, *rows = list(csv.reader(file))
    good = next(row for row in rows if "Qwen-7B" in row and "none" in row)

    def changed(**cells: str) -> list[str]:
        return [cells.get(name, cell) for name, cell in zip(header, good, strict=True)]

    made = [
        good,
        changed(model="org/Phi-3-mini-4k-instruct"),
        good[:5],
        changed(tok_s_gpu="fast"),
        changed(micro_batch="-3"),
        changed(gpu="RTX4090"),
        changed(model="nobody/knows-7x"),
        changed(method="QLoRA", base_dtype="fp8"),
        changed(parallelism="TP4/PP2"),
        changed(seq_len="2k", peak_gib="~22 GB", gpu="1x A100 80GB", gpus_per_node=""),
        changed(method="QLoRA", base_dtype="nf4"),
        changed(model="somebody's-13b", params_b="13", active_b="13"),
        changed(seq_len="<=4096, of 9,0", tok_s_gpu="\u0662", nodes="two", accum="GBS 0"),
    ]
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *made])
    out, err = run(monkeypatch, capsys, "--json", "--csv", str(path))
    answer = json.loads(out)
    assert answer["rows"] == 5
    assert f"{path}:4: 5 cells, not {len(header)}" in err
    assert f"{path}:5: " in err
    assert answer["skipped"]["it can't be read"] == 2
    assert sum(answer["skipped"].values()) == 8
    path.write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit, match=r"rows\.csv:1: no column source"):
        run(monkeypatch, capsys, "--csv", str(path))
