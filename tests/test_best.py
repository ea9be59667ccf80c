"""Ranking adapters: the interval is right, rows are shared out evenly, and what is no run folder is said."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from windlass.errors import UserError
from windlass.train import load_finished_run
from windlass.train.best import BASE, Rows, interval, mean, quantile, ranking


@pytest.mark.parametrize(("freedom", "t"), [(4, 2.776), (9, 2.262), (30, 2.042), (1000, 1.962)])
def test_quantiles_are_students(freedom: int, t: float) -> None:
    assert quantile(freedom) == pytest.approx(t, rel=0.005)


def drawn(chance: random.Random, better: float, count: int = 40) -> tuple[Rows, Rows]:
    """Rows hard and easy for both alike; the second adapter is `better` by so much a token."""
    one, other = [], []
    for _ in range(count):
        tokens, hard = chance.randint(5, 50), chance.gauss(3, 1)
        one.append((tokens * (hard + chance.gauss(0, 0.05)), tokens))
        other.append((tokens * (hard - better + chance.gauss(0, 0.05)), tokens))
    return one, other


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    chance, held = random.Random(1), 0
    for _ in range(1000):
        low, high = interval(*drawn(chance, 0.02))
        held += low <= 0.02 <= high
    assert 0.92 <= held / 1000 <= 0.98


def test_pairing_sees_a_difference_far_below_the_spread_of_rows() -> None:
    one, other = drawn(random.Random(2), 0.05)
    ranked = ranking({"step-1": one, "step-2": other, BASE: [(2 * loss, n) for loss, n in one]}, {}).candidates
    assert [candidate.name for candidate in ranked] == ["step-2", "step-1", BASE]
    assert ranked[1].apart
    assert ranked[1].difference == pytest.approx(mean(one) - mean(other))
    assert not ranking({"step-1": one, "step-2": list(one)}, {}).candidates[1].apart


def test_what_is_no_run_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="it is no run folder"):
        load_finished_run(tmp_path, eval_data=None, ranks=None)
    (tmp_path / "manifest.json").write_text(json.dumps({"run": {"data": {}, "cluster": {}, "nope": 1}}))
    with pytest.raises(UserError, match="there is no such file or folder"):
        load_finished_run(tmp_path, eval_data=tmp_path / "nope", ranks=1)
    with pytest.raises(UserError, match="the run in it can't be read"):
        load_finished_run(tmp_path, eval_data=None, ranks=1)


def test_losses_are_per_token() -> None:
    assert mean([(1.0, 1), (9.0, 9)]) == 1.0
    assert math.isclose(mean([(4.0, 1), (0.0, 3)]), 1.0)
