"""The examples of every data format: planned, prepared and trained on the tiny model, and rehearsed."""

import json
import subprocess
from pathlib import Path

import pytest
import warm
from text_run import make_text_run

from windlass import plan as planning
from windlass import runfile
from windlass.data.prepare import audit_data

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples" / "data").glob("*.yaml"))
FORMATS = {"messages", "sharegpt", "alpaca", "prompt-completion", "text", "input_ids"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("examples")
    (made / "examples").symlink_to(ROOT / "examples")
    make_text_run(made / "demo")
    return made


def windlass(folder: Path, *arguments: str, code: int = 0) -> str:
    command = [warm.python(), "-m", "windlass", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_every_format_has_an_example_that_is_planned_and_prepared(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert {path.stem for path in EXAMPLES} == {*FORMATS, "preference", "mix"}
    for path in EXAMPLES:
        loaded = runfile.read_run_file(path.relative_to(ROOT), [])
        assert planning.make_plan(loaded).schedule.global_sequences == 4
        audits: list[dict[str, object]] = []
        audit_data(planning.fill_in_choices(loaded), say=lambda _: None, audited=audits.append)
        assert audits[0]["shape"]["name"] == (path.stem if path.stem != "mix" else "messages")  # type: ignore[index]


@pytest.mark.takes("trains on every format")
def test_the_mix_of_every_format_is_trained_and_its_rows_are_shown(folder: Path) -> None:
    windlass(folder, "train", "examples/data/mix.yaml")
    audit = json.loads((folder / "demo" / "mix" / "data.json").read_text())
    assert set(audit["sources"]) == FORMATS
    assert {name: each["in_epoch"] for name, each in audit["sources"].items()} == {
        "messages": 12,
        "sharegpt": 4,
        "alpaca": 12,
        "prompt-completion": 24,
        "text": 20,
        "input_ids": 12,
    }
    report = json.loads((folder / "demo" / "mix" / "report.json").read_text())["runs"][0]
    loss = next(chart for chart in report["charts"] if chart["id"] == "loss")
    assert {"evaluation", "evaluation hanging", "evaluation spelling"} <= {each["label"] for each in loss["series"]}
    assert any(chart["id"] == "source_loss" for chart in report["charts"])
    shown = windlass(folder, "data", "examples/data/mix.yaml")
    assert "in an epoch" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    rows = json.loads(windlass(folder, "data", "examples/data/mix.yaml", "--sample", "2", "--json"))
    assert [row["source"] for row in rows] == [
        name for name in [*audit["sources"], "hanging", "spelling"] for _ in "12"
    ]
    assert all(any(token["loss"] for token in row["tokens"]) for row in rows)

    def show(row: int, source: str, *more: str, code: int = 0) -> str:
        return windlass(
            folder, "data", "examples/data/mix.yaml", "--row", str(row), "--source", source, *more, code=code
        )

    one = show(3, "sharegpt", "--tokens")
    assert one.strip().startswith("sharegpt, row 3: ")
    assert one.count(" loss ") == int(one.split(" tokens, ")[1].split(" ")[0])
    (facts,) = json.loads(show(3, "sharegpt", "--json"))
    third = (folder / "examples/data/sharegpt.jsonl").read_text().splitlines()[4 + 2]  # the split is train[4:]
    answer = [turn["value"] for turn in json.loads(third)["conversations"] if turn["from"] == "gpt"][-1]
    assert answer in "".join(part["text"] for part in facts["parts"] if part["trained"])
    text = show(3, "sharegpt")
    assert f"[[{answer}<|im_end|>]]" in text.replace("\n", " ")
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "sharegpt has 8 rows" in show(9, "sharegpt", code=2)
    assert show(8, "sharegpt")
    assert "rows are counted from 1" in show(0, "sharegpt", code=2)
    assert "there is no set 'x'" in show(8, "x", code=2)


def test_a_pair_is_shown_with_both_answers(folder: Path) -> None:
    shown = windlass(folder, "data", "examples/data/preference.yaml", "--row", "1")
    chosen, rejected = shown.split("train, row 1: ")[1:]
    assert chosen.startswith("chosen, ")
    assert "How many letters has anchor?" in chosen
    assert "[[6</s>]]" in chosen
    assert rejected.startswith("rejected, ")
    assert "[[Anchor has about 7 letters.</s>]]" in rejected.replace("\n", " ")
    page = folder / "rows.html"
    windlass(folder, "data", "examples/data/preference.yaml", "--html", str(page), "--sample", "1")
    assert "rejected, " in page.read_text()
    assert "pairs whose chosen answer is longer" in windlass(folder, "data", "examples/data/preference.yaml")


@pytest.mark.prove
def test_the_example_of_pairs_is_trained(folder: Path) -> None:
    """Each of the others is a set of the mix."""
    windlass(folder, "train", "examples/data/preference.yaml")
