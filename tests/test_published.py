"""Planned against published runs: the goals on rows that nothing was fitted to."""

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
