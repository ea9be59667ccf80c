"""Mixes: how many rows of each set, in which order, and errors in a mix."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from windlass import tiny
from windlass.data.packing import choose_epoch_rows
from windlass.data.prepare import prepare_data
from windlass.data.select import RowSet, count_per_epoch
from windlass.errors import UserError
from windlass.plan.resolve import choose_length
from windlass.plan.rows import sample_data
from windlass.runfile import Data, RunFile, read_run_file
from windlass.runfile.rows import CHAT_KEYS, MixedSet


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 90), st.integers(0, 5))
def test_no_row_repeats_before_all_were_used(count: int, wanted: int, seed: int) -> None:
    epochs = [choose_epoch_rows(count, wanted, seed, epoch) for epoch in range(4)]
    assert all(len(rows) == wanted for rows in epochs)
    seen = np.concatenate(epochs)
    for start in range(0, len(seen) - count + 1, count):
        assert sorted(seen[start : start + count]) == list(range(count))


def counts(*parts: dict[str, Any], rows: list[int], sequences: list[int]) -> list[int]:
    sets = [RowSet("x", RunFile().data, str, MixedSet(path="p", **part)) for part in parts]
    return count_per_epoch(sets, rows, sequences)


def test_sequences_per_epoch_of_each_set() -> None:
    assert counts({}, {"epochs": 0.25}, {"epochs": 3}, rows=[9, 8, 2], sequences=[9, 8, 2]) == [9, 2, 6]
    assert counts({"rows": 30}, {"rows": 30}, rows=[10, 100], sequences=[10, 25]) == [30, 8]  # packed by four
    # By weight, until the scarcest has been seen once: here the second.
    assert counts({"weight": 3}, {"weight": 1}, rows=[900, 100], sequences=[900, 100]) == [300, 100]
    assert counts({"weight": 3}, {"weight": 1}, rows=[90, 100], sequences=[90, 100]) == [90, 30]
    assert counts({"epochs": 0.001}, rows=[9], sequences=[9]) == [1]


def write(folder: Path, **section: Any) -> Path:
    for name in ("a", "b"):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": f"{name} {i} words"}) + "\n" for i in range(8))
        )
    (folder / "empty.jsonl").write_text('{"text": " "}\n')
    (folder / "chat.jsonl").write_text('{"conversations": [{"from": "human", "value": "a"}]}\n')
    mix = [{"path": f"{folder}/a.jsonl"}, {"path": f"{folder}/b.jsonl", "epochs": 0.5}]
    data = {"mix": mix, "max_length": 64, "packing": False, **section}
    train = {"output_dir": str(folder / "out"), "eval_strategy": "no", "max_steps": 4}
    (folder / "run.yaml").write_text(yaml.safe_dump({"data": data, "train": train}, sort_keys=False))
    return folder / "run.yaml"


def test_an_epochs_rows_are_counted_for_the_plan(tmp_path: Path) -> None:
    data = read_run_file(write(tmp_path), []).run.data
    counts = sample_data(data, None, str).estimate(data)
    assert (counts.sequences, counts.reason, counts.tolerance) == (12, "8 of a, 4 of b", None)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"path": "{folder}/c.jsonl"}, r"data.mix\[0\].path: .*c.jsonl does not exist"),
        ({"path": "{folder}/a.jsonl", "split": "test"}, r"data.mix\[0\].split: the data has no split 'test'"),
        ({"path": "{folder}/a.jsonl", "turns": "last"}, r"data.mix\[0\].turns: no effect on text rows"),
        ({"path": "{folder}/empty.jsonl"}, r"data.mix: no row of empty has a supervised token"),
        ({"path": "{folder}/chat.jsonl", "columns": {"form": "a"}}, r"columns.form: the format sharegpt has no"),
    ],
)  # fmt: skip
def test_error_in_one_set_names_its_key(tmp_path: Path, part: dict[str, Any], words: str) -> None:
    part = {**part, "path": part["path"].format(folder=tmp_path)}
    loaded = read_run_file(write(tmp_path, mix=[part, {"path": f"{tmp_path}/b.jsonl"}], turns="all"), [])
    tokenizer = AutoTokenizer.from_pretrained(tiny.write_tokenizer(tmp_path / "tokenizer", vocab=600))
    with pytest.raises(UserError, match=words):
        prepare_data(loaded.run, tokenizer, where=loaded.where, say=print)


@pytest.mark.fault(
    "a validation split that no set of a mix has", "`windlass train`, `check`", "no data set has a split"
)
def test_a_split_that_no_set_has_is_refused(tmp_path: Path) -> None:
    """Sets without a split that another has are trained on as they are."""
    loaded = read_run_file(write(tmp_path, val_split="validaton"), ["train.eval_strategy=epoch"])
    tokenizer = AutoTokenizer.from_pretrained(tiny.write_tokenizer(tmp_path / "tokenizer", vocab=600))
    with pytest.raises(UserError, match=r"data.val_split: no data set has a split 'validaton'; a: train; b: train"):
        prepare_data(loaded.run, tokenizer, where=loaded.where, say=print)


def test_sets_inherit_unset_keys_from_the_section(tmp_path: Path) -> None:
    tree = {"mix": [{"path": "x", "turns": "last"}, {"path": "y", "format": "text"}], "format": "sharegpt"}
    data = RunFile.model_validate({"data": {**tree, "dataset_config_name": None, "val_fraction": 0.1}}).data
    first, second = map(data.of, data.mix)
    assert (first.format, first.turns, first.dataset_name_or_path, first.val_fraction) == ("sharegpt", "last", "x", 0.1)
    assert (second.format, second.turns, second.mix) == ("text", "auto", [])
    whole = RunFile.model_validate({"data": {**tree, "reasoning": "drop"}}).data
    own = [set(whole.of(part).own_changes) & CHAT_KEYS for part in whole.mix]
    assert own == [{"turns"}, set()]  # of a text set, `reasoning` is no error: it is meant for the chats of the mix


def test_a_mix_of_one_and_one_evaluation_set_have_figures_of_their_own(tmp_path: Path) -> None:
    parts = {"mix": [{"path": f"{tmp_path}/a.jsonl", "epochs": 2}], "eval": {"held": {"path": f"{tmp_path}/b.jsonl"}}}
    loaded = read_run_file(write(tmp_path, **parts, val_split=None), [])
    tokenizer = AutoTokenizer.from_pretrained(tiny.write_tokenizer(tmp_path / "tokenizer", vocab=600))
    made = prepare_data(loaded.run, tokenizer, where=loaded.where, say=print)
    assert (made.sources, made.shares, made.evaluated) == (("a",), ((8, 16),), ("held",))
    assert made.audit["evaluated"]["held"]["overlap"]["documents"] == 0


def test_max_length_is_chosen_by_tokens_wherever_they_are_known(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": "☃" * 400}) + "\n")  # many tokens, few bytes
    folder = tiny.write_tokenizer(tmp_path / "tokenizer")
    data = Data(dataset_name_or_path=f"{tmp_path}/long.jsonl")
    (tokens,) = [len(ids) for ids in [AutoTokenizer.from_pretrained(folder)("☃" * 400)["input_ids"]]]
    length, why = choose_length(sample_data(data, folder, str), None, 99.5)
    assert tokens <= length < tokens + 258
    assert "by their bytes" not in why[-1]
    assert choose_length(sample_data(data, None, str), None, 99.5)[0] < tokens
    # A set whose rows can't be tokenized puts no margin on the others.
    mixed = Data.model_validate({"mix": [{"path": f"{tmp_path}/{name}.jsonl"} for name in ("long", "chat")]})
    lengths = [tokens for tokens, _ in sample_data(mixed, folder, str).lengths()]
    assert max(lengths) - tokens in (0, 1)
