"""What a data section names: files, splits, slices, row counts, and errors when it names nothing."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, ReadInstruction
from hypothesis import given
from hypothesis import strategies as st

from windlass.data import reading
from windlass.data.sources import count_rows, parse_split, resolve_source
from windlass.errors import Problem, UserError
from windlass.plan.rows import ROWS, sample_data
from windlass.runfile import Data

SOURCE = reading.Source("", None, "", "", {"train": (), "extra": ()})


def data(name: str | Path, **more: Any) -> Data:
    return Data(dataset_name_or_path=str(name), **more)


def lines(path: Path, rows: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row}\n" for row in rows))
    return path


def parquet(path: Path, rows: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": ["a"] * rows}), path, row_group_size=100)
    return path


# Files of a folder -> what is named -> the files of each split.
FOLDERS: tuple[tuple[tuple[str, ...], str, dict[str, int]], ...] = (
    (("train-0-of-2.jsonl", "train-1-of-2.jsonl", "wiki.valid.jsonl"), "", {"train": 2, "validation": 1}),
    (("train/one.csv", "dev/one.csv"), "", {"train": 1, "validation": 1}),
    (("rows.jsonl", "notes.parquet.txt", "dataset_infos.json"), "", {"train": 1}),
    (("test.txt",), "test.txt", {"train": 1}),  # alone it is the training set, whatever its name
    (("a/x.jsonl", "eval/y.jsonl", "b/z.txt"), "**/*.jsonl", {"train": 1, "test": 1}),
    (("eval/rows.jsonl",), "eval", {"train": 1}),  # the folder that is named does not name a split
)


@pytest.mark.parametrize(("files", "named", "splits"), FOLDERS)
def test_files_are_split_by_names(tmp_path: Path, files: tuple[str, ...], named: str, splits: dict[str, int]) -> None:
    for name in files:
        lines(tmp_path / name, ['{"text": "a"}'])
    assert {split: len(found) for split, found in resolve_source(data(tmp_path / named)).splits.items()} == splits


def test_published_folders_with_configs(tmp_path: Path) -> None:
    root = tmp_path / "Salesforce" / "wikitext"
    for config in ("wikitext-2-raw-v1", "wikitext-103-raw-v1"):
        for split in ("train", "validation", "test"):
            parquet(root / config / f"{split}-00000-of-00001.parquet", 7)
    found = resolve_source(data(root, dataset_config_name="wikitext-2-raw-v1"))
    assert set(found.splits) == {"train", "validation", "test"}
    assert {path.parent.name for files in found.splits.values() for path in files} == {"wikitext-2-raw-v1"}
    assert (
        resolve_source(data(root / "wikitext-2-raw-v1", dataset_config_name="wikitext-2-raw-v1")).splits == found.splits
    )
    with pytest.raises(UserError, match="several configs: wikitext-103-raw-v1, wikitext-2-raw-v1"):
        resolve_source(data(root, dataset_config_name=None))
    with pytest.raises(UserError, match=r"no config 'wikitext-2'.*wikitext-103-raw-v1"):
        resolve_source(data(root, dataset_config_name="wikitext-2"))
    # The default config belongs to its own set.
    assert resolve_source(data(root)).config == "wikitext-2-raw-v1"
    lines(tmp_path / "mine" / "train.jsonl", ["{}"])
    assert resolve_source(data(tmp_path / "mine")).config is None
    with pytest.raises(UserError, match="no config 'wikitext-2-raw-v1'"):
        resolve_source(data(tmp_path / "mine", dataset_config_name="wikitext-2-raw-v1"))


def test_the_card_says_where_a_configs_files_are_and_how_many_rows_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "datasets--a--b"
    lines(cache / "refs" / "main", []).write_text("abc")
    root = cache / "snapshots" / "abc"
    for name in ("a", "b"):
        lines(root / "deep" / f"{name}.csv", ["text", "x"])
    (root / "README.md").write_text(
        "---\nconfigs:\n- config_name: tiny\n  data_files:\n  - {split: train, path: deep/a.csv}\n"
        "  - {split: held, path: [deep/b*]}\n- {config_name: other, data_dir: deep}\n- {config_name: plain}\n"
        "dataset_info:\n- config_name: tiny\n  splits:\n  - {name: train, num_examples: 11, num_bytes: 99}\n"
        "---\n# A set\n"
    )
    source = resolve_source(data(cache, dataset_config_name="tiny"))
    files = {split: [path.name for path in paths] for split, paths in source.splits.items()}
    assert files == {"train": ["a.csv"], "held": ["b.csv"]}
    assert len(resolve_source(data(cache, dataset_config_name="other")).splits["train"]) == 2
    assert count_rows(data(cache, dataset_config_name="tiny"), "train").count == 1
    monkeypatch.setattr(reading, "PARSED_BYTES", 3)  # the card's word is taken if counting takes too long
    found = count_rows(data(cache, dataset_config_name="tiny"), "train")
    assert (found.count, found.text_bytes, found.how) == (11, 99, "as its README says")
    for config, words in ((None, "several configs"), ("plain", "none of the files that its README lists")):
        with pytest.raises(UserError, match=words):
            resolve_source(data(cache, dataset_config_name=config))


def test_missing_paths_and_hub_names_are_reported(tmp_path: Path) -> None:
    lines(tmp_path / "wikitext" / "train.txt", ["a"])
    lines(tmp_path / "wikitext" / "train.jsonl", ["{}"])
    (tmp_path / "empty").mkdir()
    for named, words in (
        (str(tmp_path / "wikitex"), "wikitex does not exist\n\nhint: did you mean .*/wikitext\\?"),
        ("/no-such-volume/data/set", "volume mounted"),
        (str(tmp_path / "empty"), "no data file"),
        (f"{tmp_path}/wikitext/*", "mixes formats: jsonl, text"),
        (f"{tmp_path}/*.parquet", "no file matches"),
        ("missing.jsonl", "does not exist"),
        ("data/missing.jsonl", "does not exist"),  # not a set of the hub's user `data`
        ("./Salesforce/wikitext", "does not exist"),
    ):
        with pytest.raises(UserError, match=words) as caught:
            resolve_source(data(named), lambda key: f"run.yaml:7: {key}")
        assert str(caught.value).startswith("run.yaml:7: data.dataset_name_or_path")
    with pytest.raises(UserError, match="has no config 'x'"):
        resolve_source(data(tmp_path / "wikitext" / "train.txt", dataset_config_name="x"))
    for name in ("Salesforce/wikitext", "imdb"):
        assert resolve_source(data(name)).format == "hub"


def test_slices_are_parsed(tmp_path: Path) -> None:
    parts = (reading.SplitPart(SOURCE, "train", "", "5%"), reading.SplitPart(SOURCE, "extra"))
    assert parse_split("train[:5%]+extra", SOURCE, "x") == parts
    assert reading.SplitPart(SOURCE, "train", "40", "10").bounds(50) == (40, 40)
    for wrong in ("train[5%]", "train[a:b]", "", "train[:5%", "train[1:2:3]"):
        with pytest.raises(UserError, match="is not a split"):
            parse_split(wrong, SOURCE, "x")
    with pytest.raises(UserError, match="no split 'validation'; it has 'train', 'extra'"):
        parse_split("validation", SOURCE, "x")
    lines(tmp_path / "train.txt", ["a"])
    lines(tmp_path / "dev.txt", ["a", "b"])
    assert count_rows(data(tmp_path), "valid+train").count == 3


@given(rows=st.integers(1, 10_000), start=st.integers(-100, 100), stop=st.integers(-100, 100), percent=st.booleans())
def test_slices_equal_those_of_datasets(rows: int, start: int, stop: int, percent: bool) -> None:
    unit = "%" if percent else ""
    if not percent and max(abs(start), abs(stop)) > rows:
        return  # refused by datasets
    spec = f"train[{start}{unit}:{stop}{unit}]"
    (expected,) = ReadInstruction.from_spec(spec).to_absolute({"train": rows})
    bounds = parse_split(spec, SOURCE, "")[0].bounds(rows)
    assert range(*bounds) == range(expected.from_, expected.to)


def test_rows_are_counted_without_reading_more_than_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b.txt").write_text("x\ny")  # no newline at the end
    (tmp_path / "d.json").write_text(json.dumps([{"a": 1}] * 4))
    with (tmp_path / "f.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text"], ["one\nline"], ["two, three"]])
    with gzip.open(tmp_path / "g.jsonl.gz", "wt") as packed:
        packed.write("{}\n{}\n")
    saved = Dataset.from_dict({"text": ["a"] * 3000})
    DatasetDict({"train": saved, "val": saved.select([0, 5])}).save_to_disk(str(tmp_path / "saved"))
    for path, split, count in (
        (lines(tmp_path / "a.txt", ["x", "", "y"]), "train", 3),
        (tmp_path / "b.txt", "train", 2),
        (lines(tmp_path / "c.jsonl", ["{}", "", "{}"]), "train", 2),
        (tmp_path / "d.json", "train", 4),
        (lines(tmp_path / "e.json", ["{}"] * 5), "train", 5),
        (tmp_path / "f.csv", "train", 2),
        (tmp_path / "g.jsonl.gz", "train", 2),
        (parquet(tmp_path / "h.parquet", 12345), "train[:10%]", 1234),
        (tmp_path / "saved", "train", 3000),
        (tmp_path / "saved", "validation", 2),
    ):
        assert count_rows(data(path), split).count == count, path
    # Blank lines are rows that training leaves out.
    blank = data(lines(tmp_path / "i.txt", ["a", "", " ", "b"]))
    for split, expected in (("train", (4, 2)), ("train[:50%]", (2, 1))):
        rows = count_rows(blank, split)
        assert (rows.count, rows.blank) == expected
    monkeypatch.setattr(reading, "LINES_BYTES", 3)
    found = count_rows(data(tmp_path / "a.txt"), "train")
    assert (found.count, found.text_bytes) == (None, 5)
    assert "not read to be counted" in found.how
    assert count_rows(data(tmp_path / "h.parquet"), "train").count == 12345  # a footer costs nothing


def test_empty_shards_are_passed_over_by_the_sample_that_plan_is_made_from(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    table = pa.table({"text": ["anchor"] * 50})
    for name, slices in (("a", []), ("b", [0]), ("c", [50]), ("d", [0, 50, 0])):  # by rows of each row group
        with pq.ParquetWriter(folder / f"{name}.parquet", table.schema) as file:
            for rows in slices:
                file.write_table(table.slice(0, rows))
    for name, count in (("a", 0), ("b", 0), ("c", 50), ("d", 50), ("*", 100)):
        named = data(folder / f"{name}.parquet")
        parts = parse_split("train", resolve_source(named), "")
        assert len([*reading.read_rows(parts)]) == count
        sampled = [*reading.sample_rows(parts, count, 20)]
        assert bool(sampled) == bool(count)
        assert {row["text"] for *_, row in sampled} <= {"anchor"}
        planned = sample_data(named, None, str)
        assert planned.train[0].sampled == len([*reading.sample_rows(parts, count, ROWS)])


@pytest.mark.fault(
    "one broken line among the rows", "`windlass plan`", "not JSON: Invalid control character, column 13"
)
@pytest.mark.parametrize(
    ("name", "good", "bad", "place", "problem"),
    [
        ("a.jsonl", b'{"text": "a"}', b'{"text": "a ', ":2603", "not JSON: Invalid control character, column 13"),
        ("a.jsonl", b'{"text": "a"}', b"[1, 2]", ":2603", "a list, not an object"),
        ("a.txt", b"anchor", b"p\xe4hp", "", "not UTF-8: "),
    ],
)
def test_one_broken_line_is_named_by_the_plan(
    name: str, good: bytes, bad: bytes, place: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In small files wherever it is, in large ones within the sample."""
    path = tmp_path / name

    def plan(broken: int) -> list[Problem]:
        path.write_bytes(b"".join((bad if number == broken else good) + b"\n\n" for number in range(1 + 2 * ROWS)))
        return sample_data(data(path), None, str).problems

    (found,) = plan(1301)
    assert found.where == f"{path}{place}"
    assert found.problem.startswith(problem)
    monkeypatch.setattr(reading, "CHECKED_BYTES", 0)
    assert (plan(1301), len(plan(1300))) == ([], 1)


@pytest.mark.fault("rows that can't be decompressed", "`windlass plan`", "no rows can be read: ")
def test_a_sample_that_can_not_be_read_is_named_and_one_that_is_elsewhere_is_not(tmp_path: Path) -> None:
    spoilt = tmp_path / "spoilt.parquet"
    pq.write_table(pa.table({"text": [f"anchor {number * number}" for number in range(500)]}), spoilt)
    contents = bytearray(spoilt.read_bytes())
    contents[40:1500] = bytes(1460)  # the footer still counts the rows
    spoilt.write_bytes(contents)
    (problem,) = sample_data(data(spoilt), None, str).problems
    assert problem.problem.startswith("no rows can be read: ")
    for name, words in (("/mnt/none/x.jsonl", "does not exist"), ("somebody/something", "known once fetched")):
        assert not sample_data(data(name), None, str).problems
        assert words in count_rows(data(name), "train").how


def test_wikitext_is_resolved_without_its_files() -> None:
    section = data("/data/input/Datasets/Salesforce/wikitext", dataset_config_name="wikitext-2-raw-v1")
    train, held_out = count_rows(section, "train"), count_rows(section, "validation")
    assert (train.count, count_rows(section, "train[:50%]").count) == (36_718, 18_359)
    assert train.blank == pytest.approx(36_718 * (1_299 + 1_467) / (3_760 + 4_358), abs=1)
    assert (train.how, train.blank_how) == ("as published: wikitext", " (34%, as in its other parts)")
    assert (held_out.count, held_out.blank, held_out.blank_how) == (3_760, 1_299, "")
    with pytest.raises(UserError, match="no split 'dev2'"):
        count_rows(section, "dev2")
