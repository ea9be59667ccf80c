"""A run's adapters compared on the same rows."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from windlass.best import BASE, rank_candidates, sum_rows
from windlass.data.collate import PaddedCollator, PaddingFreeCollator
from windlass.errors import UserError
from windlass.observe.format import describe_served
from windlass.plan.finished import load_finished_run
from windlass.ranking import RankedAdapter, Ranking, print_ranking
from windlass.runfile.rules import resolve_accumulation
from windlass.train.collate import ROW, Collate


def test_the_ranking_fits_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """No interval or verdict is broken into lines."""
    monkeypatch.setenv("COLUMNS", "80")
    ranked = (
        RankedAdapter("step-1060", 10.4298, 0.0, 0.0, 0.0, False, 1.0),
        RankedAdapter("step-1054", 10.4306, 0.0001, -0.0001, 0.0002, False, 1.0),
        RankedAdapter("as it began", 10.6931, 1.0, 1.0, 1.0, True, 0.0),
    )
    ranking = Ranking(ranked, 86, 86, {}, "accuracy", note=describe_served(0.63, 0.1))
    print_ranking(ranking)
    lines = capsys.readouterr().out.splitlines()
    noted = next(number for number, line in enumerate(lines) if line.startswith("bfloat16 keeps 63 %"))
    assert " ".join(map(str.strip, lines[noted:])) == ranking.as_dict()["note"]
    lines = lines[:noted]
    assert max(map(len, lines)) <= 80
    verdicts = [line.split()[-1] for line in lines if line.lstrip().startswith(("step-", "as it"))]
    assert verdicts == ["best", "unclear", "worse"]
    assert any("-0.0001 to +0.0002" in line for line in lines)
    assert lines[-1].startswith("unclear: ")


def test_paired_interval_separates_a_difference_from_noise() -> None:
    """Some rows are hard for all: unpaired losses could not show the difference."""
    chance = np.random.default_rng(0)
    tokens = chance.integers(5, 60, 200)
    hard = chance.gamma(2.0, 1.0, 200) * tokens
    noise = chance.normal(0, 0.02, (3, 200)) * tokens
    losses = {
        BASE: np.stack([hard + 0.5 * tokens, tokens], 1),
        "step-1": np.stack([hard + 0.02 * tokens + noise[1], tokens], 1),
        "step-2": np.stack([hard + noise[2], tokens], 1),
        "step-3": np.stack([hard + noise[0], tokens], 1),
    }
    ranking = rank_candidates(losses, {"step-4": "optimizer.pt is missing"}).as_dict()
    first, second, *worse = ranking["best"]
    assert {first["name"], second["name"]} == {"step-2", "step-3"}
    assert [each["name"] for each in worse] == ["step-1", BASE]
    assert [each["apart"] for each in ranking["best"]] == [False, False, True, True]
    assert first["loss"] == pytest.approx(losses[first["name"]][:, 0].sum() / tokens.sum())  # per token, not per row
    assert worse[0]["low"] < worse[0]["difference"] < worse[0]["high"]
    assert worse[0]["difference"] == pytest.approx(0.02, abs=0.004)
    assert (ranking["rows"], ranking["tokens"]) == (200, tokens.sum())
    assert ranking["passed_over"] == {"step-4": "optimizer.pt is missing"}
    json.dumps(ranking)


def test_pairs_are_ranked_by_loss_or_by_the_share_in_the_right_order() -> None:
    chance = np.random.default_rng(0)
    right = {"step-1": 0.9, "step-2": 0.6}  # of step 2 a few pairs have most of the loss
    loss = {"step-1": 0.5, "step-2": 0.3}
    measured = {
        name: np.stack([chance.normal(loss[name], 0.1, 300), np.ones(300), np.arange(300) < 300 * right[name]], 1)
        for name in right
    }
    measured["step-3"] = measured["step-1"] + [0.2, 0.0, 0.0]  # as many, with more loss
    by_loss, by_accuracy = (rank_candidates(measured, {}, by) for by in ("loss", "accuracy"))
    assert [each.name for each in by_loss.candidates] == ["step-2", "step-1", "step-3"]
    assert [each.name for each in by_accuracy.candidates] == ["step-1", "step-3", "step-2"]
    assert [each.accuracy for each in by_accuracy.candidates] == pytest.approx([0.9, 0.9, 0.6])
    assert [each.difference for each in by_accuracy.candidates] == pytest.approx([0.0, 0.0, 0.3])
    assert [each.apart for each in by_accuracy.candidates] == [False, False, True]
    assert by_accuracy.candidates[0].loss == by_loss.candidates[1].loss
    assert by_accuracy.as_dict()["by"] == "accuracy"


def test_each_row_has_its_own_loss_where_rows_are_laid_end_to_end() -> None:
    lengths = [3, 5, 2]
    rows = [
        {ROW: number, "input_ids": np.arange(length), "labels": np.arange(length), "seq_lengths": np.array([length])}
        for number, length in enumerate(lengths)
    ]
    for collator in (PaddedCollator(0), PaddingFreeCollator()):
        batch = Collate(collator)(rows)
        losses = torch.arange(len(batch.targets), dtype=torch.float32)
        figures = sum_rows(losses, batch)
        assert figures.tolist() == [[0 + 1, 2], [2 + 3 + 4 + 5, 4], [6, 1]]


def test_the_interval_covers_the_true_difference() -> None:
    chance, covered = np.random.default_rng(1), 0
    for _ in range(400):
        tokens = chance.integers(1, 50, 100)
        one, other = (chance.normal(2.0, 1.0, 100) * tokens for _ in range(2))  # equally good
        _, worse = rank_candidates({"a": np.stack([one, tokens], 1), "b": np.stack([other, tokens], 1)}, {}).candidates
        covered += worse.low <= 0
    assert 370 <= covered <= 395  # the better of two is known, so on one side


def test_unfinished_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="it is not a run folder"):
        load_finished_run(tmp_path, eval_data=None, ranks=None)
    (tmp_path / "manifest.json").write_text(json.dumps({"run": {"data": {}, "cluster": {}, "nope": 1}}))
    with pytest.raises(UserError, match="there is no such file or folder"):
        load_finished_run(tmp_path, eval_data=tmp_path / "nope", ranks=1)
    with pytest.raises(UserError, match="the run in it can't be read"):
        load_finished_run(tmp_path, eval_data=None, ranks=1)


def test_a_run_whose_only_held_out_rows_are_sets_of_their_own_is_evaluated(tmp_path: Path) -> None:
    """What `data.val_split: auto` is recorded as may not exist beside them."""
    run = {"model": {"model_name_or_path": "m"}, "train": {"output_dir": str(tmp_path)}, "cluster": {}}
    for sets, split in (({"math": {"path": "m.jsonl"}}, "train"), ({}, "validation")):
        data = {"dataset_name_or_path": "d", "val_split": "validation", "eval": sets}
        (tmp_path / "manifest.json").write_text(json.dumps({"run": {**run, "data": data}}))
        assert load_finished_run(tmp_path, eval_data=None, ranks=1).run.data.train_split == split


def test_a_run_is_evaluated_on_fewer_ranks_than_its_batch_was_spread_over(tmp_path: Path) -> None:
    cluster, batch = {"gpus_per_node": 2}, {"global_batch_size": 8, "gradient_accumulation_steps": 2}
    train = {**batch, "per_device_train_batch_size": 2, "output_dir": str(tmp_path)}
    run = {"model": {"model_name_or_path": "m"}, "data": {"dataset_name_or_path": "d"}}
    (tmp_path / "manifest.json").write_text(json.dumps({"run": {**run, "cluster": cluster, "train": train}}))
    for ranks in (1, 2, 3, None):
        loaded = load_finished_run(tmp_path, eval_data=None, ranks=ranks)
        assert resolve_accumulation(loaded.run.train, ranks or 2, loaded.where) == 2
