"""What a data section names: files, splits, slices, numbers of rows, and the errors when it names nothing."""

from __future__ import annotations

import csv
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
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
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({f"text{i}": ["a"] * rows for i in range(columns)}), path, row_group_size=100)
    return path


def test_imports_nothing_heavy() -> None:
    heavy = ["torch", "transformers", "datasets", "numpy", "pandas", "pyarrow", "trl", "peft"]
    code = f"import sys, windlass.data.sources; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_single_file_is_the_training_set_whatever_its_name(tmp_path: Path) -> None:
    source = resolve(data(lines(tmp_path / "test.txt", ["a", "b"])))
    assert (source.format, dict(source.splits)) == ("text", {"train": (tmp_path / "test.txt",)})


def test_blank_lines_are_rows_that_training_leaves_out(tmp_path: Path) -> None:
    rows = count_rows(data(lines(tmp_path / "train.txt", ["a", "", " ", "b"])), "train")
    assert (rows.count, rows.blank) == (4, 2)
    part = count_rows(data(tmp_path / "train.txt"), "train[:50%]")
    assert (part.count, part.blank) == (2, 1)


def test_published_sets_say_how_many_of_their_rows_are_blank() -> None:
    wikitext = data("/not/here/wikitext", dataset_config_name="wikitext-2-raw-v1")
    held_out = count_rows(wikitext, "validation")
    assert (held_out.count, held_out.blank, held_out.blank_how) == (3_760, 1_299, "")
    train = count_rows(wikitext, "train")
    assert train.blank == pytest.approx(36_718 * (1_299 + 1_467) / (3_760 + 4_358), abs=1)
    assert "as in its other parts" in train.blank_how


def test_a_folder_is_split_by_its_files_names(tmp_path: Path) -> None:
    for name in ("train-00000-of-00002", "train-00001-of-00002", "wiki.valid", "test"):
        lines(tmp_path / f"{name}.jsonl", ['{"text": "a"}'])
    source = resolve(data(tmp_path))
    assert {split: len(files) for split, files in source.splits.items()} == {"train": 2, "validation": 1, "test": 1}


def test_split_folders_and_a_data_folder(tmp_path: Path) -> None:
    lines(tmp_path / "a" / "train" / "one.csv", ["text", "x"])
    lines(tmp_path / "a" / "dev" / "one.csv", ["text", "x"])
    assert set(resolve(data(tmp_path / "a")).splits) == {"train", "validation"}
    lines(tmp_path / "b" / "data" / "train-0.csv", ["text", "x"])
    assert set(resolve(data(tmp_path / "b")).splits) == {"train"}


def test_published_layout_with_configs(tmp_path: Path) -> None:
    root = tmp_path / "Salesforce" / "wikitext"
    for config in ("wikitext-2-raw-v1", "wikitext-103-raw-v1"):
        for split in ("train", "validation", "test"):
            parquet(root / config / f"{split}-00000-of-00001.parquet", 7)
    found = resolve(data(root, dataset_config_name="wikitext-2-raw-v1"))
    assert set(found.splits) == {"train", "validation", "test"}
    assert all(path.parent.name == "wikitext-2-raw-v1" for files in found.splits.values() for path in files)
    with pytest.raises(UserError, match="wikitext-103-raw-v1, wikitext-2-raw-v1"):
        resolve(data(root, dataset_config_name=None))
    with pytest.raises(UserError, match=r"no config 'wikitext-2'.*wikitext-103-raw-v1"):
        resolve(data(root, dataset_config_name="wikitext-2"))


def test_the_default_config_belongs_to_its_own_set(tmp_path: Path) -> None:
    for config in ("wikitext-2-raw-v1", "wikitext-103-raw-v1"):
        parquet(tmp_path / "wikitext" / config / "train.parquet", 3)
    assert Data().dataset_config_name == "wikitext-2-raw-v1"
    assert resolve(data(tmp_path / "wikitext")).config == "wikitext-2-raw-v1"
    lines(tmp_path / "mine" / "train.jsonl", ["{}"])
    assert resolve(data(tmp_path / "mine")).config is None
    with pytest.raises(UserError, match="no config 'wikitext-2-raw-v1'"):
        resolve(data(tmp_path / "mine", dataset_config_name="wikitext-2-raw-v1"))


def test_the_card_says_where_a_config_lies_and_how_many_rows_it_has(tmp_path: Path) -> None:
    parquet(tmp_path / "deep" / "a.parquet", 5)
    parquet(tmp_path / "deep" / "b.parquet", 5)
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: tiny\n  data_files:\n  - {split: train, path: deep/a.parquet}\n"
        "  - {split: held, path: deep/b*}\n"
        "dataset_info:\n- config_name: tiny\n  splits:\n  - {name: train, num_examples: 11, num_bytes: 99}\n"
        "---\n# A set\n"
    )
    source = resolve(data(tmp_path))
    assert {split: [p.name for p in files] for split, files in source.splits.items()} == {
        "train": ["a.parquet"],
        "held": ["b.parquet"],
    }
    assert source.published["train"].count == 11
    (tmp_path / "deep" / "a.parquet").unlink()
    (tmp_path / "deep" / "b.parquet").unlink()
    with pytest.raises(UserError, match="none of the files that its README lists"):
        resolve(data(tmp_path))


def test_hub_cache_and_save_to_disk_folders(tmp_path: Path) -> None:
    cache = tmp_path / "datasets--a--b"
    lines(cache / "refs" / "main", [])
    (cache / "refs" / "main").write_text("abc")
    lines(cache / "snapshots" / "abc" / "train.jsonl", ["{}"])
    assert resolve(data(cache)).format == "jsonl"
    saved = tmp_path / "saved"
    for split in ("train", "val"):
        lines(saved / split / "state.json", ["{}"])
    lines(saved / "dataset_dict.json", ["{}"])
    assert set(resolve(data(saved)).splits) == {"train", "val"}


def test_globs(tmp_path: Path) -> None:
    for name in ("a/x.jsonl", "b/y.jsonl", "b/z.txt"):
        lines(tmp_path / name, ["{}"])
    assert len(resolve(data(f"{tmp_path}/**/*.jsonl")).splits["train"]) == 2
    with pytest.raises(UserError, match="mixes formats: jsonl, text"):
        resolve(data(f"{tmp_path}/b/*"))
    with pytest.raises(UserError, match="no file matches"):
        resolve(data(f"{tmp_path}/*.parquet"))


def test_a_path_that_is_not_there_names_its_neighbours(tmp_path: Path) -> None:
    lines(tmp_path / "wikitext" / "train.txt", ["a"])
    with pytest.raises(UserError) as caught:
        resolve(data(tmp_path / "wikitex"), lambda key: f"run.yaml:7: {key}")
    assert "run.yaml:7: data.dataset_name_or_path" in str(caught.value)
    assert "has wikitext" in caught.value.problems[0].hint
    with pytest.raises(UserError, match="volume mounted"):
        resolve(data("/no-such-volume/data/set"))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match="no data file"):
        resolve(data(empty))


def test_a_hub_name_is_one_only_when_nothing_here_has_it() -> None:
    assert resolve(data("Salesforce/wikitext")).format == "hub"
    assert resolve(data("imdb")).format == "hub"
    with pytest.raises(UserError, match="does not exist"):
        resolve(data("missing.jsonl"))
    with pytest.raises(UserError, match="does not exist"):
        resolve(data("./Salesforce/wikitext"))


def test_rows_are_counted_without_reading_more_than_needed(tmp_path: Path) -> None:
    assert count_rows(data(lines(tmp_path / "a.txt", ["x", "", "y"])), "train").count == 3
    (tmp_path / "b.txt").write_text("x\ny")  # no newline at the end
    assert count_rows(data(tmp_path / "b.txt"), "train").count == 2
    assert count_rows(data(lines(tmp_path / "c.jsonl", ["{}", "", "{}"])), "train").count == 2
    (tmp_path / "d.json").write_text(json.dumps([{"a": 1}] * 4))
    assert count_rows(data(tmp_path / "d.json"), "train").count == 4
    assert count_rows(data(lines(tmp_path / "e.json", ["{}"] * 5)), "train").count == 5
    with (tmp_path / "f.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text"], ["one\nline"], ["two, three"]])
    assert count_rows(data(tmp_path / "f.csv"), "train").count == 2
    with gzip.open(tmp_path / "g.jsonl.gz", "wt") as packed:
        packed.write("{}\n{}\n")
    assert count_rows(data(tmp_path / "g.jsonl.gz"), "train").count == 2
    assert count_rows(data(parquet(tmp_path / "h.parquet", 12345)), "train[:10%]").count == 1234


@pytest.mark.parametrize(("rows", "columns"), [(0, 1), (1, 1), (129, 40), (70000, 3)])
def test_the_parquet_footer_is_read_as_pyarrow_reads_it(tmp_path: Path, rows: int, columns: int) -> None:
    import pyarrow.parquet as pq

    path = parquet(tmp_path / "x.parquet", rows, columns)
    assert count_parquet(path) == pq.read_metadata(path).num_rows == rows


def test_a_count_that_can_not_be_had_says_why(tmp_path: Path) -> None:
    (tmp_path / "pointer.parquet").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    found = count_rows(data(tmp_path / "pointer.parquet"), "train")
    assert found.count is None
    assert "not counted" in found.how
    assert count_rows(data("somebody/something"), "train").count is None
    assert "does not exist" in count_rows(data("/mnt/none/x.jsonl"), "train").how


def test_what_is_too_large_is_not_read_to_be_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.data.sources.COUNTED_BYTES", 3)
    found = count_rows(data(lines(tmp_path / "a.txt", ["x", "y"])), "train")
    assert (found.count, found.text_bytes) == (None, 4)
    assert "not read to be counted" in found.how
    assert count_rows(data(parquet(tmp_path / "h.parquet", 5)), "train").count == 5  # a footer costs nothing


def test_the_published_wikitext_is_known_where_it_is_not_mounted() -> None:
    section = data("/data/input/Datasets/Salesforce/wikitext", dataset_config_name="wikitext-2-raw-v1")
    assert count_rows(section, "train").count == 36718
    assert count_rows(section, "train[:50%]").count == 18359
    assert count_rows(section, "validation").count == 3760
    assert "published" in count_rows(section, "train").how
    with pytest.raises(UserError, match="no split 'dev2'"):
        count_rows(section, "dev2")


def test_an_unknown_split_lists_those_there_are(tmp_path: Path) -> None:
    for split in ("train", "test"):
        lines(tmp_path / f"{split}.txt", ["a"])
    with pytest.raises(UserError, match="no split 'validation'; it has 'test', 'train'"):
        count_rows(data(tmp_path), "validation")
    lines(tmp_path / "dev.txt", ["a", "b"])
    assert count_rows(data(tmp_path), "valid").count == 2


def test_slices() -> None:
    assert parse_split("train[:5%]+extra", "x") == (Part("train", "", "5%"), Part("extra"))
    assert Part("train", "-10%", "").bounds(50) == (45, 50)
    assert Part("train", "100", "200").bounds(150) == (100, 150)
    assert Part("train", "40", "10").bounds(50) == (40, 40)
    for wrong in ("train[5%]", "train[a:b]", "", "train[:5%", "train[1:2:3]"):
        with pytest.raises(UserError, match="is not a split"):
            parse_split(wrong, "data.train_split")


@given(rows=st.integers(0, 10_000), cut=st.integers(0, 100))
def test_two_slices_at_one_cut_are_the_whole_without_overlap(rows: int, cut: int) -> None:
    head = parse_split(f"train[:{cut}%]", "")[0].bounds(rows)
    tail = parse_split(f"train[{cut}%:]", "")[0].bounds(rows)
    assert (head[0], head[1], tail[1]) == (0, tail[0], rows)
