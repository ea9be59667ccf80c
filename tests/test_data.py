"""Rows to text, tokens and sets: what is supervised, dropped, reported and cached."""

import copy
import csv
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import yaml
from datasets import Dataset, DatasetDict
from refusals import refused
from text_run import prepare_rows, write_rows
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from windlass import tiny
from windlass.data import audit, cache, chat, inputs, progress, tokenize
from windlass.data.cache import SEAL, get_or_create
from windlass.data.chat import ChatTemplate, choose_template
from windlass.data.documents import Documents
from windlass.data.prepare import PreparedData, prepare_data
from windlass.data.reading import read_table
from windlass.errors import UserError
from windlass.runfile import RunFile

PARAGRAPHS = [part for name in sorted(topics) for part in topics[name].split("\n\n")]
Prepare = Callable[..., PreparedData]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(tiny.write_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab=600))


def run_file(source: Path, **section: Any) -> RunFile:
    """Return a run file with this data section and everything else minimal."""
    folder = source.parent
    tree = {
        "model": {"model_name_or_path": str(folder / "model")},
        "data": {"dataset_name_or_path": str(source), "max_length": 128, "packing": False, **section},
        "train": {"output_dir": str(folder / "out"), "per_device_train_batch_size": 4, "max_steps": 5},
    }
    return RunFile.model_validate({**tree, "watch": {"min_supervised_fraction": 0}})


@pytest.fixture
def prepared(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Prepare:
    def make(rows: list[Any], tokenizer: Any = tokenizer, **more: Any) -> PreparedData:
        options = {"max_length": 128, "train": {"per_device_train_batch_size": 4}, **more}
        return prepare_rows(tmp_path, rows, tokenizer, **options)

    return make


def supervised(prepared: PreparedData, row: int = 0) -> list[int]:
    found = prepared.train.slice(row, 1).to_pylist()[0]
    return [token for token in found.get("labels", found["input_ids"]) if token != -100]


def test_tokens_equal_trls(prepared: Prepare, tokenizer: Any, tmp_path: Path) -> None:
    """SFTTrainer's own preparation is the oracle."""
    settings = SFTConfig(
        output_dir=str(tmp_path), max_length=128, use_cpu=True, bf16=False, report_to=[], activation_checkpointing=False
    )
    texts = [text for text in PARAGRAPHS[:80] if text.strip()]
    pairs = [{"prompt": f"{text.split()[0]}?", "completion": f" {text[:300]}"} for text in texts]
    for rows, partial in (([{"text": text} for text in texts], False), (pairs, True)):
        names = {"_tokenizer": tokenizer, "chat_template": None, "_is_vision_dataset": False}
        trainer = SimpleNamespace(completion_only_loss=partial, **names)
        data = Dataset.from_list(rows)
        expected = SFTTrainer._prepare_dataset(trainer, data, tokenizer, settings, False, None, "train")
        done = prepared(rows).train
        assert done["input_ids"].to_pylist() == expected["input_ids"]
        if partial:
            assert done["labels"].to_pylist() == expected["labels"]


@pytest.mark.fault(
    "text for a model that servers ask by its chat template", "`windlass data`", "without the chat template"
)
def test_text_beside_a_chat_template_is_warned_of(prepared: Prepare, tokenizer: Any, tmp_path: Path) -> None:
    """And the hint writes it through the template."""
    rows = [{"prompt": f"{name}?", "completion": f"{name}!"} for name in ("anchor", "bark", "cable")]
    asked = copy.deepcopy(tokenizer)
    asked.chat_template = tiny.CHAT_TEMPLATE
    for section, warned in (({}, 1), ({"format": "prompt-completion"}, 0)):
        notes = [note for note in prepared(rows, asked, **section).audit["notes"] if "chat template" in note]
        assert len(notes) == warned
    (note,) = [note for note in prepared(rows, asked).audit["notes"] if "without the chat template" in note]
    named = yaml.safe_load(note.partition("data.columns: ")[2].partition(" writes")[0])
    assert "[INST]" in asked.decode(prepared(rows, asked, columns=named).train["input_ids"][0].as_py())
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = None
    assert not [note for note in prepared(rows, tokenizer).audit["notes"] if "chat template" in note]


def test_a_system_prompt_that_is_not_read_is_named(prepared: Prepare) -> None:
    rows = [{"system_prompt": "Be brief.", "prompt": f"{name}?", "completion": "yes"} for name in ("anchor", "bark")]
    (note,) = (note for note in prepared(rows).audit["notes"] if "is not read" in note)
    assert note.startswith("the column system_prompt is not read: data.columns: {")
    named = {"instruction": "prompt", "output": "completion", "system": "system_prompt"}
    assert not [note for note in prepared(rows, columns=named).audit["notes"] if "is not read" in note]


def test_two_columns_of_unknown_names_are_asked_for(prepared: Prepare, tokenizer: Any) -> None:
    """And the hint, as it stands, trains on the second."""
    rows = [{"Frage": f"{name}?", "Antwort": f"{name}!"} for name in ("anchor", "bark")]
    with refused("no-such-column") as problems:
        prepared(rows)
    hint = problems[0].hint.partition("data.columns: ")[2].partition(";")[0]
    done = prepared(rows, columns=yaml.safe_load(hint))
    assert "bark!" in tokenizer.decode(supervised(done, 1))


def test_fields_that_a_spreadsheet_separates_by_semicolons(tmp_path: Path) -> None:
    for delimiter in ",;":
        text = f'\ufeffprompt{delimiter}completion\r\none{delimiter}"two, three; four"\r\n'
        (tmp_path / "a.csv").write_text(text)
        assert list(read_table(tmp_path / "a.csv", ",")) == [{"prompt": "one", "completion": "two, three; four"}]


def test_empty_rows_are_dropped_and_long_ones_cut_and_counted(prepared: Prepare, tokenizer: Any) -> None:
    texts = ["word " * 500, "short", "  \n\t", "", "x"]
    done = prepared([{"text": text} for text in texts])
    (note,) = (note for note in done.audit["notes"] if "left out" in note)
    assert note.startswith("2 rows left out (empty): ")
    assert note.endswith("a.jsonl: rows 3, 4")
    figures = done.audit["splits"]["train"]
    cut = len(tokenizer(texts[0])["input_ids"]) + 1 - 128
    assert [figures[key] for key in ("rows", "empty", "documents", "truncated", "tokens_cut")] == [5, 2, 3, 1, cut]
    assert figures["supervised_tokens"] == figures["tokens"] - 3  # a first token is never predicted
    assert figures["end_trained_share"] == pytest.approx(2 / 3)
    assert len(done.train["input_ids"][0].as_py()) == 128
    assert done.train["input_ids"][0].as_py()[-1] != tokenizer.eos_token_id == done.train["input_ids"][1].as_py()[-1]
    assert any("cut at max_length" in note for note in done.audit["notes"])


def test_the_share_of_cut_rows_counts_those_that_are_dropped(prepared: Prepare) -> None:
    rows = [{"prompt": "word " * 500, "completion": "x"}] * 9 + [{"prompt": "short", "completion": "word " * 500}]
    done = prepared(rows)
    assert done.audit["splits"]["train"]["truncated_share"] == 1.0
    assert any(note.startswith("10 rows (100.0%) cut at max_length: ") for note in done.audit["notes"])


def test_loss_is_on_the_completion(prepared: Prepare, tokenizer: Any) -> None:
    rows = [{"prompt": "What is a list?", "completion": " A sequence."}, {"prompt": "Nothing", "completion": " "}]
    done = prepared(rows)
    assert tokenizer.decode(supervised(done)) == " A sequence.</s>"
    assert (done.audit["shape"]["name"], done.audit["splits"]["train"]["empty"]) == ("prompt-completion", 1)
    everything = prepared(rows, completion_only_loss=False)
    assert tokenizer.decode(supervised(everything)) == "<s>What is a list? A sequence.</s>"
    halves = {"prompt": CHAT[1:4], "completion": CHAT[4:]}
    messages = prepared([*[{**halves, "completion": None}] * 5, halves, {**halves, "tools": []}, {**halves, "id": "x"}])
    assert messages.audit["splits"]["train"]["documents"] == 3  # rows may have more, or less that is optional
    assert any(
        note.startswith("5 rows left out ('completion' is null): ") and note.endswith("rows 1, 2, 3, …")
        for note in messages.audit["notes"]
    )
    assert tokenizer.decode(supervised(messages)) == "Because.</s>"
    edge = prepared([{"prompt": "the answer is th", "completion": "e"}])  # a token has characters of both
    assert tokenizer.decode(supervised(edge)).strip() == "the</s>"
    assert edge.audit["splits"]["train"]["straddling"] == 1
    assert any("spans the edge" in note for note in edge.audit["notes"])


def test_loss_is_on_spans_marked_by_the_template(prepared: Prepare, tokenizer: Any) -> None:
    rows = [{"q": "six times seven", "a": {"text": ["42"]}}, {"q": "who", "a": {"text": [""]}}]
    done = prepared(rows, prompt_template=r"\[[Q\]] {q}? {{}} A:[[ {a[text][0]}]]")
    assert tokenizer.decode(done.train["input_ids"][0].as_py()) == "<s>[[Q]] six times seven? {} A: 42</s>"
    assert tokenizer.decode(supervised(done)) == " 42</s>"
    assert done.audit["splits"]["train"]["empty"] == 1  # a row without an answer is no example
    *_, asked, answered = done.audit["samples"][0]["parts"]
    assert (asked["text"][-2:], asked["trained"], answered) == ("A:", False, {"text": " 42</s>", "trained": True})
    middle = prepared(rows, prompt_template="[[{q}]] and more")
    assert tokenizer.decode(supervised(middle)) == "six times seven"  # neither what follows nor the end
    assert any("not learn to stop" in note for note in middle.audit["notes"])
    assert "loss on every token" in prepared(rows, prompt_template="{q}").audit["shape"]["description"]
    for template, words in (
        ("{question}", r"no column 'question'; they have 'q', 'a'"),
        ("{q} [[{a}", "never closed"),
        ("{q}]] {a}", "without its other half"),
        ("[[{q} [[{a}]]]]", "without its other half"),
        ("{q", "not a template"),
        ("no column", "names no column"),
    ):
        with pytest.raises(UserError) as caught:
            prepared(rows, prompt_template=template)
        assert "run.yaml:9: data.prompt_template" in str(caught.value)
        assert words in str(caught.value)


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "Because."},
]


def test_loss_is_on_assistant_turns(prepared: Prepare, tokenizer: Any) -> None:
    bare = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    bare.chat_template = None
    for kind in (tokenizer, bare):
        done = prepared([{"messages": CHAT}], kind)
        assert kind.decode(supervised(done)).replace(" ", "") == "Hi.</s>Because.</s>"
        assert kind.decode(done.train["input_ids"][0].as_py()).count("<s>") == 1
        assert done.audit["splits"]["train"]["end_trained_share"] == 1
        assert any("Mistral's is used" in note for note in done.audit["notes"]) is (kind is bare)


@pytest.mark.parametrize("compiled", ["_compile_jinja_template", "_gone"])
def test_templates_are_rendered_by_every_version_of_transformers(
    tokenizer: Any, compiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a part of its renderer, or by its public function in versions that name the part differently."""
    monkeypatch.setattr(chat, "COMPILED", compiled)
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    for turns in (CHAT, [{"from": names[turn["role"]], "value": turn["content"]} for turn in CHAT]):
        (row,) = choose_template(tokenizer).render(turns)
        assert [row.text[slice(*span)].strip() for span in row.spans] == ["Hi.</s>", "Because.</s>"]
    for template, code in (
        ("{% for m in messages %}{{ loop.revindex }}{{ m.content }}{% endfor %}", "answer-not-found"),
        ("{{ raise_exception('no') }}", "template-refuses"),
    ):
        with refused(code):
            ChatTemplate(tokenizer, template).render(CHAT)


@pytest.mark.parametrize(
    ("section", "rows", "words"),
    [
        ({"text_field": "body"}, [{"text": "a"}], "no column 'body'; they have 'text'"),
        ({}, [{"text": "a"}, {"text": ""}, {"text": 3}], r"a.jsonl: row 3: column 'text' has a number, not text: 3"),
        ({}, [{"text": "a"}, {"messages": CHAT}], r"row 1: a row has no 'messages'; it has 'text' \(format text\)"),
        ({}, [{"messages": CHAT}, {"messages": None, "text": "a"}], r"'text' \(format text\)\n\n.*format: messages"),
        ({}, [{"messages": CHAT}, {"messages": 3}], "row 2: column 'messages' has a number, not a list of messages: 3"),
        ({}, [{"messages": '"Hello"'}], "column 'messages' has text, not a list of messages"),
        ({"prompt_template": "{a}: [[{b}{c}]]"}, [{"a": 1, "b": 2, "c": 3}, {"a": 1}], "row 2: a row has no 'b'"),
        ({"val_split": "held"}, [{"text": "a"}], "no split 'held'; it has 'train'"),
        ({"train_split": "train[5:]"}, [{"text": "a"}], "has no rows"),
        ({}, [{"text": " "}, {"text": ""}], "no row of train has a supervised token: of 2 rows 2 empty"),
        ({"max_length": 4}, [{"prompt": "a b c d e f g", "completion": "h"}], "1 with nothing supervised"),
        ({"messages_field": "a", "prompt_template": "{a}"}, [{"a": "b"}], "choose different formats"),
        ({"completion_only_loss": True}, [{"text": "a"}], "plain text has no completion part"),
    ],
)
def test_untrainable_data_is_refused(prepared: Prepare, section: dict[str, Any], rows: list[Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        prepared(rows, **section)


@pytest.mark.fault("tokens beyond the vocabulary", "`windlass data`", ", the model's vocabulary ends at 99")
def test_too_little_supervised_and_ids_beyond_the_vocabulary(prepared: Prepare, tokenizer: Any) -> None:
    audits: list[dict[str, Any]] = []
    rows = [{"prompt": "a long question " * 5, "completion": "yes"}]
    with pytest.raises(UserError) as caught:
        prepared(rows, least=0.5, more={"vocabulary": 100, "audited": audits.append})
    figures = audits[0]["splits"]["train"]
    assert [p.problem for p in caught.value.problems] == [
        f"train has token id {figures['highest_id']}, the model's vocabulary ends at 99",
        f"{figures['supervised_fraction']:.2%} of the training tokens are supervised, less than "
        "watch.min_supervised_fraction = 50.00%",
    ]
    prepared(rows, least=0.01, more={"vocabulary": len(tokenizer)})


def test_held_out_rows_are_the_same_every_time_and_no_duplicate_crosses(prepared: Prepare, tmp_path: Path) -> None:
    texts = [text for text in PARAGRAPHS[:300] if text.strip()]
    rows = [{"text": text} for text in texts + texts[:50]]
    one, two = prepared(rows, val_fraction=0.1), prepared(rows, val_fraction=0.1, more={"cache": tmp_path / "other"})
    assert one.validation is not None
    assert two.validation is not None
    assert one.validation["input_ids"] == two.validation["input_ids"]
    assert 0.09 < len(one.validation) / (len(one.train) + len(one.validation)) < 0.13
    assert one.audit["overlap"]["documents"] == 0
    assert one.audit["splits"]["train"]["duplicates"] > 0


def test_rows_that_are_mostly_alike_are_held_out_as_far_as_they_differ(prepared: Prepare, tmp_path: Path) -> None:
    """Ten of eleven equal rows went into the validation set, and training began with one."""

    def split(rows: list[str], cache: str) -> tuple[int, int, list[str]]:
        made = prepared([{"text": row} for row in rows], val_fraction=0.02, more={"cache": tmp_path / cache})
        counts = {name: figures["documents"] for name, figures in made.audit["splits"].items()}
        return counts["train"], counts["validation"], [note for note in made.audit["notes"] if "held out" in note]

    assert split(["the same"] * 10 + ["another"], "a") == (10, 1, [])
    train, validation, notes = split(["one"] * 6 + ["two"] * 5, "b")
    assert (train, validation) == (6, 5)
    assert notes[0].startswith("5 of 11 rows are held out, more than data.val_fraction 0.02")
    with pytest.raises(UserError, match=r"val_fraction: all 6 rows are equal.*\n\n.*val_fraction"):
        split(["the same"] * 6, "c")


def test_tokenizing_that_takes_long_says_how_long(
    prepared: Prepare, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def report() -> str:
        clock = iter([0.0, 0.9, 2.0, 4.0, 5.0, 8.0])
        with monkeypatch.context() as patched:
            patched.setattr("windlass.data.progress.time.monotonic", lambda: next(clock))
            with progress.show_progress("tokenizing train", lambda: 3000) as show:
                for done in (900, 0, 1000, 1500, 2000):
                    show(done)
        return capsys.readouterr().err

    assert report().splitlines() == [
        "tokenizing train: 1,000 of 3,000 rows, 250 rows/s, 0:08 left",
        "tokenizing train: 2,000 of 3,000 rows, 250 rows/s, 0:04 left",
    ]
    with monkeypatch.context() as patched:
        patched.setattr(sys.stderr, "isatty", lambda: True)
        drawn = [line.removesuffix("\x1b[K") for line in report().split("\r")]
    assert drawn[1] == f"tokenizing train {'━' * 8}{'─' * 16} 1,000 of 3,000 rows, 250 rows/s, 0:08 left"
    assert (len(drawn), drawn[-1]) == (5, ""), "it is removed at the end"
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.0)
    prepared([{"text": f"other {i}"} for i in range(2500)])
    lines = [line.split(",")[:3] for line in capsys.readouterr().err.splitlines()]
    assert lines[0][0].startswith("counting a.jsonl: ")
    assert ["tokenizing train: 2", "500 of 2", "500 rows"] in lines
    assert ["writing train: 2", "500 of 2", "500 rows"] in lines


def test_validation_rows_that_are_missing_or_also_trained_on(prepared: Prepare, tokenizer: Any, tmp_path: Path) -> None:
    assert any("nothing is evaluated" in note for note in prepared([{"text": "one two"}]).audit["notes"])
    run = run_file(tmp_path / "a.jsonl")
    for key, value in {"eval_steps": 5, "lr_scheduler_type": "greedy"}.items():
        asked = type(run.train).model_validate({**run.train.model_dump(exclude_unset=True), key: value})
        with pytest.raises(UserError, match=rf"train.{key} wants evaluation, .* their splits: train"):
            prepare_data(run.model_copy(update={"train": asked}), tokenizer, say=print)
    (tmp_path / "set").mkdir()
    write_rows(tmp_path / "set" / "train.jsonl", [{"text": t} for t in ("one two", "one two", "three four", "five")])
    write_rows(tmp_path / "set" / "validation.jsonl", [{"text": t} for t in ("three four", "seven eight")])
    done = prepare_data(run_file(tmp_path / "set"), tokenizer, say=print)
    assert done.audit["overlap"] == {"documents": 1, "share": 0.5, "near": 0}
    assert "1 validation row is in the training set as well (50.0%)" in done.audit["notes"]
    assert [done.audit["splits"][name]["duplicates"] for name in ("train", "validation")] == [1, 0]


def test_near_duplicates_of_evaluated_rows_are_found_and_templates_are_none(prepared: Prepare, tmp_path: Path) -> None:
    ask = "Below is an instruction that describes a task. Write a response that completes it. "
    texts = [*dict.fromkeys(" ".join(text.split())[:400] for text in PARAGRAPHS if len(text) > 400)][:120]
    evaluated = [f"{ask}{text}" for text in texts[:40]]
    near = [f"{ask}{text.replace(text.split()[5], 'changed', 1)}" for text in texts[:7]]  # a word of each
    write_rows(tmp_path / "e.jsonl", [{"text": text} for text in evaluated])
    rows = [{"text": text} for text in [*near, evaluated[10], *(f"{ask}{text}" for text in texts[40:])]]
    done = prepared(rows, max_length=512, eval={"asked": {"path": str(tmp_path / "e.jsonl")}})
    assert done.audit["overlap"] == {"documents": 1, "share": 1 / 40, "near": 7}
    assert any("7 validation rows are nearly the same" in note for note in done.audit["notes"])
    apart = prepared(rows[8:], max_length=512, eval={"asked": {"path": str(tmp_path / "e.jsonl")}})
    assert apart.audit["overlap"]["near"] == 0  # though every row begins alike


def test_near_duplicates_are_those_that_sets_of_runs_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "HASHED_TOKENS", 64)
    rng = np.random.default_rng(0)

    def documents(rows: list[list[int]]) -> Documents:
        ids = np.concatenate(rows).astype(np.int32)
        lengths = np.array([*map(len, rows)])
        return Documents(ids, np.ones(len(ids), np.bool_), lengths, np.arange(len(rows), dtype=np.uint64))

    def runs(row: list[int]) -> set[tuple[int, ...]]:
        return {tuple(row[i : i + audit.RUN]) for i in range(len(row) - audit.RUN + 1)}

    train = [rng.integers(0, 6, rng.integers(3, 40)).tolist() for _ in range(300)]
    evaluated = []
    for row in train[:120]:
        changed = list(row)
        for _ in range(rng.integers(0, 3)):
            changed[rng.integers(len(row))] = 7
        evaluated.append(changed + rng.integers(0, 6, rng.integers(1, 6)).tolist())
    evaluated += [[9] * 12 for _ in range(10)] + [[1, 2]]  # a template's, and one that is too short for a run
    train.append([9] * 12)
    counts = Counter(run for row in evaluated for run in runs(row))
    usual = {run for run, count in counts.items() if count > max(8, 0.01 * len(evaluated))}
    expected = []
    for row in evaluated:
        own = runs(row) - usual
        shares = [len(own & (runs(other) - usual)) / max(1, len(own | (runs(other) - usual))) for other in train]
        expected.append(max(shares) >= audit.NEAR)
    found = audit.find_near_duplicates(documents(train), documents(evaluated), lambda _: None)
    assert found.tolist() == expected
    assert 10 < sum(expected) < 110


def test_every_file_format_gives_the_same_rows(tmp_path: Path, tokenizer: Any) -> None:
    texts = [f"{text.splitlines()[0]} «é»" for text in PARAGRAPHS[:30] if text.strip()]
    rows = Dataset.from_dict({"text": texts})
    rows.to_parquet(str(tmp_path / "a.parquet"))
    (tmp_path / "a.json").write_text(json.dumps([{"text": text} for text in texts]))
    (tmp_path / "a.txt").write_text("\n".join(texts))
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        with (tmp_path / name).open("w", newline="") as file:
            csv.writer(file, delimiter=delimiter).writerows([["text"], *([text] for text in texts)])
    rows.save_to_disk(str(tmp_path / "one"))
    DatasetDict({"train": rows, "val": rows.select([0])}).save_to_disk(str(tmp_path / "dict"))
    write_rows(tmp_path / "a.jsonl", rows.to_list())
    expected = prepare_data(run_file(tmp_path / "a.jsonl"), tokenizer, say=print).train["input_ids"]
    for name in ("a.parquet", "a.json", "a.txt", "a.csv", "a.tsv", "one", "dict"):
        done = prepare_data(run_file(tmp_path / name), tokenizer, say=print)
        assert done.train["input_ids"] == expected, name
        assert (done.validation is not None) == (name == "dict")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a.jsonl:2: not JSON"),
        ("a.jsonl", b"[1]\n", "a.jsonl:1: a list, not an object"),
        ("a.json", b'[{"text": "a"}, 3]', "element 1: a number, not an object"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b", "text": "c"}\n', "a.jsonl:2: the key 'text' is there twice"),
        ("a.jsonl", b'{"text": "a\tb"}\n', r"a.jsonl:1: not JSON: Invalid control character, column 12\n\nhint: .*\\n"),
        ("a.csv", "text\na\n".encode("utf-16"), r"a.csv: is UTF-16, not UTF-8\n\nhint: convert it: iconv -f utf-16"),
        ("a.txt", b"caf\xe9\n", "not UTF-8"),
        ("a.csv", b"text\na,b\n", "more fields than the header"),
        ("a.csv", b'text\n"never closed\nb\n', "can't be read as csv: unexpected end of data"),
        ("a.jsonl", b'{"text": "\\ud800 x"}\n', "an unpaired surrogate"),
        (
            "a.parquet",
            b"version https://git-lfs.github.com/spec/v1\n",
            "can't be read as parquet: .*\n\nhint: it is a git-lfs pointer",
        ),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, tokenizer: Any, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        prepare_data(run_file(tmp_path / name), tokenizer, say=print)
    assert caught.value.problems[0].hint


def test_tokenizer_without_offsets_keeps_span_edges(prepared: Prepare, tokenizer: PreTrainedTokenizerFast) -> None:
    class Slow:
        """Like a Python tokenizer: ids without offsets."""

        is_fast = False
        init_kwargs: ClassVar[dict[str, Any]] = {}

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def build_inputs_with_special_tokens(self, ids: list[int]) -> list[int]:
            return [tokenizer.bos_token_id, *ids]

    rows = [{"prompt": "What is a list?", "completion": " A sequence."}]
    slow, quick = prepared(rows, Slow()), prepared(rows)
    assert slow.fingerprint == quick.fingerprint
    assert slow.train[:1] == quick.train[:1]


def test_all_tokens_of_a_spans_last_character_are_supervised(tokenizer: Any) -> None:
    text = "ahoy 🙂"
    encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    of_emoji = [end > text.index("🙂") for _, end in encoding.offsets]
    assert sum(of_emoji) > 1, "one character, several tokens"
    flags, _ = tokenize.find_supervised_tokens(encoding, [(5, 6)], text)
    assert flags.tolist() == of_emoji


def test_rows_are_batched_as_attention_needs(prepared: Prepare, tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"text": text} for text in PARAGRAPHS[:50]]
    grouped, packed = prepared(rows), prepared(rows, packing=True)
    run = run_file(tmp_path / "a.jsonl", packing=True)
    flash = run.model.model_copy(update={"attn_implementation": "flash_attention_2"})
    packed_flash = prepare_data(run.model_copy(update={"model": flash}), tokenizer, say=print)
    run = run_file(tmp_path / "a.jsonl")
    flat = prepare_data(run.model_copy(update={"model": flash}), tokenizer, say=print)
    # Of one row as well: a resumed run may have another micro-batch, and has the rows in the same order.
    single = prepare_data(run.model_copy(update={"model": flash}), tokenizer, batch=1, say=print)
    for done, batching, collator in (
        (grouped, "padded in batches of like length", "PaddedCollator"),
        (packed, "packed", "PaddedPackingCollator"),
        (packed_flash, "packed", "PaddingFreeCollator"),
        (flat, "padding-free", "PaddingFreeCollator"),
        (single, "padding-free", "PaddingFreeCollator"),
    ):
        assert done.audit["batching"]["configured"] == done.batching == batching
        assert type(done.collator(0)).__name__ == collator
    order = grouped.order(seed=3, epoch=0, global_batch=16)
    for done in (flat, single):
        assert np.array_equal(done.order(seed=3, epoch=0, global_batch=16), order)
    assert sorted(order.tolist()) == list(range(len(grouped.train)))
    assert grouped.lengths is not None
    assert grouped.lengths[order[:16]].max() == grouped.lengths.max()
    spread = [int(np.ptp(grouped.lengths[order[i : i + 16]])) for i in range(0, len(order) - 16, 16)]
    assert np.mean(spread) < 0.6 * np.ptp(grouped.lengths)  # at random it is near the whole range


# --- the cache: made once, by one process, and made again if damaged ---

# What a process of its own does in these tests: make a cache, wait for `go`, and write down that it did.
MAKER = """
import sys, time
from pathlib import Path
from windlass.data.cache import get_or_create
cache = Path(sys.argv[1])
def make(into):
    with (cache / "log").open("a") as log:
        log.write("made\\n")
    (into / "half").write_text("begun")
    while not (cache / "go").exists():
        time.sleep(0.02)
    (into / "tokens").write_text("all")
print((get_or_create(cache, "key", make, lambda line: print(line, flush=True)) / "tokens").read_text())
"""


def start_maker(cache: Path) -> subprocess.Popen[str]:
    cache.mkdir(exist_ok=True)
    return subprocess.Popen([sys.executable, "-c", MAKER, str(cache)], stdout=subprocess.PIPE, text=True)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 240
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.02)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(topics[name][:400].replace("\n", " ") for name in sorted(topics)))
    return path


@pytest.mark.takes("starts processes that prepare data")
def test_one_process_makes_and_the_others_wait_even_if_it_is_killed(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    owner = start_maker(cache)
    wait_for(cache / "log")
    others = [start_maker(cache) for _ in range(2)]
    for other in others:
        assert other.stdout is not None
        assert "waiting: another rank of this run, or another run" in other.stdout.readline()
    owner.send_signal(signal.SIGKILL)
    owner.communicate(timeout=200)
    (cache / "go").touch()
    assert all(other.communicate(timeout=60)[0].endswith("all\n") for other in others)
    assert (cache / "log").read_text() == "made\n" * 2  # by the owner, and by one of the others
    assert not list(cache.glob("*.part-*"))  # what the owner left is gone


def test_a_failure_leaves_nothing_and_a_place_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    def fail(into: Path) -> None:
        (into / "half").write_text("begun")
        raise UserError("bad row")

    with pytest.raises(UserError, match="bad row"):
        get_or_create(tmp_path, "key", fail, print)
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]
    with pytest.raises(UserError, match="tokens can't be stored"):
        get_or_create(tmp_path / "key.lock" / "tokens", "key", fail, print)


def test_tokens_come_from_the_cache_and_are_made_again_if_damaged(text: Path, tokenizer: Any) -> None:
    def prepare() -> tuple[Any, Any, list[str]]:
        printed: list[str] = []
        made = prepare_data(run_file(text, packing=True), tokenizer, say=printed.append)
        return made.train.to_pylist(), made.audit, printed

    expected = prepare()[:2]
    folder = next(path for path in (text.parent / "out" / "tokens").iterdir() if path.is_dir())
    arrow = folder / "train.arrow"
    for harm in ("", "flip", "cut", "unseal", "lose", "garble"):
        times = arrow.stat()
        match harm:
            case "flip":  # one bit, and the clock set back: nothing but the content tells
                content = bytearray(arrow.read_bytes())
                content[len(content) // 2] ^= 1
                arrow.write_bytes(content)
                os.utime(arrow, ns=(times.st_atime_ns, times.st_mtime_ns))
                for memo in folder.parent.glob("*.checked-*"):  # the full check is trusted for minutes only
                    memo.unlink()
            case "cut":
                arrow.write_bytes(arrow.read_bytes()[:-100])
            case "unseal":
                (folder / SEAL).unlink()
            case "lose":
                arrow.unlink()
            case "garble":
                (folder / SEAL).write_text("{")
        *made, printed = prepare()
        assert (tuple(made), len(printed)) == (expected, bool(harm)), harm
        assert not harm or "damaged" in printed[0]
        assert harm or arrow.stat().st_mtime_ns == times.st_mtime_ns


@pytest.mark.parametrize("sampled", [False, True])
def test_the_fingerprint_follows_what_the_tokens_depend_on(
    text: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, sampled: bool
) -> None:
    if sampled:  # as of a file over 1 GiB
        monkeypatch.setattr(cache, "BLOCK_BYTES", 16)
        monkeypatch.setattr(inputs, "HASHED_BYTES", 64)
    seen = []

    def prepare_again(tokenizer: Any = tokenizer, **section: Any) -> None:
        seen.append(prepare_data(run_file(text, **section), tokenizer, say=print).fingerprint)

    prepare_again()
    os.utime(text, (0, 0))
    prepare_again()  # a copy with another date is the same data
    assert seen[0] == seen.pop()
    other = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    other.add_special_tokens({"eos_token": "<stop>"})
    for section in ({"val_fraction": 0.1}, {"train_split": "train[:50%]"}):
        prepare_again(**section)
    prepare_again(other)
    content = text.read_text()
    # Begin the first, a middle and the last row otherwise: of a sampled file, only its date tells of the second.
    for start in (0, content.index("\n", len(content) // 2) + 1, content.rindex("\n", 0, -1) + 1):
        text.write_text(content[:start] + "~" + content[start + 1 :])
        prepare_again()
    assert len({*seen}) == len(seen) == 7


def test_a_volume_without_locks_still_gets_one_complete_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    printed: list[str] = []

    def quick(into: Path) -> None:
        (into / "tokens").write_text("first")

    def make(into: Path) -> None:
        with monkeypatch.context() as patch:  # a process on another machine comes in between and is first
            patch.setattr(socket, "gethostname", lambda: "another")
            get_or_create(tmp_path, "key", quick, printed.append)
        (into / "tokens").write_text("second")

    assert (get_or_create(tmp_path, "key", make, printed.append) / "tokens").read_text() == "first"
    assert "has no locks" in printed[0]


FORKED = """
import itertools, sys
from pathlib import Path
from torch.utils.data import DataLoader
from transformers import AutoTokenizer
from windlass.data.prepare import prepare_data
from windlass.runfile import RunFile
run = RunFile.model_validate(%s)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tokenizer(["start the threads"] * 1000)  # as TOKENIZERS_PARALLELISM says
prepared = prepare_data(run, tokenizer, say=print)
loader = DataLoader(prepared.train, batch_size=None, num_workers=1, multiprocessing_context="fork")
print(sum(1 for _ in itertools.islice(loader, 20)))
"""


@pytest.mark.long
def test_no_deadlock_in_forked_workers(text: Path, tokenizer: Any) -> None:
    script = FORKED % repr(json.loads(run_file(text, streaming=True).model_dump_json(exclude_unset=True)))
    command = [sys.executable, "-c", script, tokenizer.name_or_path]  # a fork of the warm one starts no threads
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.strip() == "20", done.stderr[-2000:]
