"""What a data section names: files, splits, slices, numbers of rows, and the errors when it names nothing."""

from __future__ import annotations

import csv
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ReadInstruction
from hypothesis import given
from hypothesis import strategies as st

from windlass.data.sources import Part, count_parquet, count_rows, parse_split, resolve
from windlass.errors import UserError
from windlass.runfile import Data


def data(name: str | Path, **more: Any) -> Data:
    return Data(dataset_name_or_path=str(name), **more)


def lines(path: Path, rows: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row}\n" for row in rows))
    return path


def parquet(path: Path, rows: int, columns: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({f"text{i}": ["a"] * rows for i in range(columns)}), path, row_group_size=100)
    return path


def test_imports_nothing_heavy() -> None:
    heavy = ["torch", "transformers", "datasets", "numpy", "pandas", "pyarrow", "trl", "peft"]
    code = f"import sys, windlass.data.sources; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "[]"


# --- files and splits

# Files of a folder -> the files of each split.
FOLDERS: tuple[tuple[tuple[str, ...], dict[str, int]], ...] = (
    (
        ("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "wiki.valid.jsonl", "test.jsonl"),
        {"train": 2, "validation": 1, "test": 1},
    ),
    (("train/one.csv", "dev/one.csv"), {"train": 1, "validation": 1}),
    (("data/train-0.csv",), {"train": 1}),
    (("rows.jsonl", "notes.parquet.txt", "dataset_infos.json"), {"train": 1}),
)


@pytest.mark.parametrize(("files", "splits"), FOLDERS)
def test_a_folder_is_split_by_names(tmp_path: Path, files: tuple[str, ...], splits: dict[str, int]) -> None:
    for name in files:
        lines(tmp_path / name, ['{"text": "a"}'])
    assert {split: len(found) for split, found in resolve(data(tmp_path)).splits.items()} == splits


def test_single_files_and_globs(tmp_path: Path) -> None:
    for name in ("a/x.jsonl", "b/y.jsonl", "b/z.txt", "test.txt"):
        lines(tmp_path / name, ["{}"])
    source = resolve(data(tmp_path / "test.txt"))  # alone it is the training set, whatever its name
    assert (source.format, dict(source.splits)) == ("text", {"train": (tmp_path / "test.txt",)})
    assert len(resolve(data(f"{tmp_path}/**/*.jsonl")).splits["train"]) == 2
    with pytest.raises(UserError, match="mixes formats: jsonl, text"):
        resolve(data(f"{tmp_path}/b/*"))
    with pytest.raises(UserError, match="no file matches"):
        resolve(data(f"{tmp_path}/*.parquet"))
    with pytest.raises(UserError, match="has no config 'x'"):
        resolve(data(tmp_path / "test.txt", dataset_config_name="x"))


def test_published_folders_with_configs(tmp_path: Path) -> None:
    root = tmp_path / "Salesforce" / "wikitext"
    for config in ("wikitext-2-raw-v1", "wikitext-103-raw-v1"):
        for split in ("train", "validation", "test"):
            parquet(root / config / f"{split}-00000-of-00001.parquet", 7)
    found = resolve(data(root, dataset_config_name="wikitext-2-raw-v1"))
    assert set(found.splits) == {"train", "validation", "test"}
    assert {path.parent.name for files in found.splits.values() for path in files} == {"wikitext-2-raw-v1"}
    with pytest.raises(UserError, match="wikitext-103-raw-v1, wikitext-2-raw-v1"):
        resolve(data(root, dataset_config_name=None))
    with pytest.raises(UserError, match=r"no config 'wikitext-2'.*wikitext-103-raw-v1"):
        resolve(data(root, dataset_config_name="wikitext-2"))
    # The default config belongs to its own set.
    assert Data().dataset_config_name == resolve(data(root)).config == "wikitext-2-raw-v1"
    lines(tmp_path / "mine" / "train.jsonl", ["{}"])
    assert resolve(data(tmp_path / "mine")).config is None
    with pytest.raises(UserError, match="no config 'wikitext-2-raw-v1'"):
        resolve(data(tmp_path / "mine", dataset_config_name="wikitext-2-raw-v1"))


def test_the_card_says_where_a_configs_files_are_and_how_many_rows_it_has(tmp_path: Path) -> None:
    parquet(tmp_path / "deep" / "a.parquet", 5)
    parquet(tmp_path / "deep" / "b.parquet", 5)
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: tiny\n  data_files:\n  - {split: train, path: deep/a.parquet}\n"
        "  - {split: held, path: deep/b*}\n"
        "dataset_info:\n- config_name: tiny\n  splits:\n  - {name: train, num_examples: 11, num_bytes: 99}\n"
        "---\n# A set\n"
    )
    source = resolve(data(tmp_path))
    files = {split: [path.name for path in paths] for split, paths in source.splits.items()}
    assert files == {"train": ["a.parquet"], "held": ["b.parquet"]}
    assert source.published["train"].count == 11
    for name in ("a", "b"):
        (tmp_path / "deep" / f"{name}.parquet").unlink()
    with pytest.raises(UserError, match="none of the files that its README lists"):
        resolve(data(tmp_path))


def test_hub_cache_and_save_to_disk_folders(tmp_path: Path) -> None:
    cache = tmp_path / "datasets--a--b"
    lines(cache / "snapshots" / "abc" / "train.jsonl", ["{}"])
    lines(cache / "refs" / "main", []).write_text("abc")
    assert resolve(data(cache)).format == "jsonl"
    saved = tmp_path / "saved"
    for split in ("train", "val"):
        lines(saved / split / "state.json", ["{}"])
    lines(saved / "dataset_dict.json", ["{}"])
    assert set(resolve(data(saved)).splits) == {"train", "val"}


def test_a_path_that_is_not_there_and_names_on_the_hub(tmp_path: Path) -> None:
    lines(tmp_path / "wikitext" / "train.txt", ["a"])
    with pytest.raises(UserError) as caught:
        resolve(data(tmp_path / "wikitex"), lambda key: f"run.yaml:7: {key}")
    assert "run.yaml:7: data.dataset_name_or_path" in str(caught.value)
    assert "has wikitext" in caught.value.problems[0].hint
    with pytest.raises(UserError, match="volume mounted"):
        resolve(data("/no-such-volume/data/set"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no data file"):
        resolve(data(tmp_path / "empty"))
    for name in ("Salesforce/wikitext", "imdb"):
        assert resolve(data(name)).format == "hub"
    for name in ("missing.jsonl", "./Salesforce/wikitext"):
        with pytest.raises(UserError, match="does not exist"):
            resolve(data(name))


def test_an_unknown_split_lists_those_there_are(tmp_path: Path) -> None:
    for split in ("train", "test"):
        lines(tmp_path / f"{split}.txt", ["a"])
    with pytest.raises(UserError, match="no split 'validation'; it has 'test', 'train'"):
        count_rows(data(tmp_path), "validation")
    lines(tmp_path / "dev.txt", ["a", "b"])
    assert count_rows(data(tmp_path), "valid").count == 2


# --- slices


def test_slices_are_parsed() -> None:
    assert parse_split("train[:5%]+extra", "x") == (Part("train", "", "5%"), Part("extra"))
    assert Part("train", "40", "10").bounds(50) == (40, 40)
    for wrong in ("train[5%]", "train[a:b]", "", "train[:5%", "train[1:2:3]"):
        with pytest.raises(UserError, match="is not a split"):
            parse_split(wrong, "data.train_split")


@given(rows=st.integers(1, 10_000), start=st.integers(-100, 100), stop=st.integers(-100, 100), percent=st.booleans())
def test_slices_are_those_of_datasets(rows: int, start: int, stop: int, percent: bool) -> None:
    unit = "%" if percent else ""
    if not percent and max(abs(start), abs(stop)) > rows:
        return  # refused by datasets
    spec = f"train[{start}{unit}:{stop}{unit}]"
    (expected,) = ReadInstruction.from_spec(spec).to_absolute({"train": rows})
    bounds = parse_split(spec, "")[0].bounds(rows)
    assert range(*bounds) == range(expected.from_, expected.to)


# --- numbers of rows


def test_rows_are_counted_without_reading_more_than_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b.txt").write_text("x\ny")  # no newline at the end
    (tmp_path / "d.json").write_text(json.dumps([{"a": 1}] * 4))
    with (tmp_path / "f.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text"], ["one\nline"], ["two, three"]])
    with gzip.open(tmp_path / "g.jsonl.gz", "wt") as packed:
        packed.write("{}\n{}\n")
    for path, count in (
        (lines(tmp_path / "a.txt", ["x", "", "y"]), 3),
        (tmp_path / "b.txt", 2),
        (lines(tmp_path / "c.jsonl", ["{}", "", "{}"]), 2),
        (tmp_path / "d.json", 4),
        (lines(tmp_path / "e.json", ["{}"] * 5), 5),
        (tmp_path / "f.csv", 2),
        (tmp_path / "g.jsonl.gz", 2),
    ):
        assert count_rows(data(path), "train").count == count, path
    assert count_rows(data(parquet(tmp_path / "h.parquet", 12345)), "train[:10%]").count == 1234
    # Blank lines are rows that training leaves out.
    blank = data(lines(tmp_path / "i.txt", ["a", "", " ", "b"]))
    for split, expected in (("train", (4, 2)), ("train[:50%]", (2, 1))):
        rows = count_rows(blank, split)
        assert (rows.count, rows.blank) == expected
    monkeypatch.setattr("windlass.data.sources.COUNTED_BYTES", 3)
    found = count_rows(data(tmp_path / "a.txt"), "train")
    assert (found.count, found.text_bytes) == (None, 5)
    assert "not read to be counted" in found.how
    assert count_rows(data(tmp_path / "h.parquet"), "train").count == 12345  # a footer costs nothing


@pytest.mark.parametrize(("rows", "columns"), [(0, 1), (1, 1), (129, 40), (70000, 3)])
def test_the_parquet_footer_is_read_as_pyarrow_reads_it(tmp_path: Path, rows: int, columns: int) -> None:
    path = parquet(tmp_path / "x.parquet", rows, columns)
    assert count_parquet(path) == pq.read_metadata(path).num_rows == rows


def test_a_count_that_is_unknown_says_why(tmp_path: Path) -> None:
    (tmp_path / "pointer.parquet").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    for name, words in (
        (str(tmp_path / "pointer.parquet"), "not counted"),
        ("somebody/something", "known once fetched"),
        ("/mnt/none/x.jsonl", "does not exist"),
    ):
        found = count_rows(data(name), "train")
        assert found.count is None
        assert words in found.how


def test_wikitext_is_known_where_it_is_not_mounted() -> None:
    section = data("/data/input/Datasets/Salesforce/wikitext", dataset_config_name="wikitext-2-raw-v1")
    train = count_rows(section, "train")
    assert (train.count, count_rows(section, "train[:50%]").count) == (36_718, 18_359)
    assert train.blank == pytest.approx(36_718 * (1_299 + 1_467) / (3_760 + 4_358), abs=1)
    assert "published" in train.how
    assert "as in its other parts" in train.blank_how
    held_out = count_rows(section, "validation")
    assert (held_out.count, held_out.blank, held_out.blank_how) == (3_760, 1_299, "")
    with pytest.raises(UserError, match="no split 'dev2'"):
        count_rows(section, "dev2")
