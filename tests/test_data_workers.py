"""Processes that tokenize beside each other: the same bytes for any number of them, errors in the order of the rows."""

import csv
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import warm
from refusals import refused
from text_run import write_rows
from tokenizers import trainers
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from windlass import tiny
from windlass.data import reading, tokenize, words, workers
from windlass.data.choose import choose_format
from windlass.data.prepare import PreparedData, prepare_data
from windlass.errors import RunError
from windlass.runfile import Data, RunFile

PARTS = [part for name in sorted(topics) for part in topics[name].split("\n\n")][:1200]
CHATS = [
    {"messages": [{"role": "user", "content": f"What is {number}?"}, {"role": "assistant", "content": part}]}
    for number, part in enumerate(PARTS)
    if part.strip()
]
CHATS[500:520] = [{"messages": []}] * 20
CHATS[700]["messages"][0]["content"] = "a </s> in it"
PAIRS = [
    {"prompt": f"{number}?", "chosen": f" {part} yes", "rejected": f" {part[:40]} no"}
    for number, part in enumerate(PARTS[:600])
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(tiny.write_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab=600))


def prepare(folder: Path, tokenizer: Any, data: dict[str, Any], **train: Any) -> PreparedData:
    sections = {"data": {"max_length": 256, "packing": False, **data}, "model": {"model_name_or_path": "unused"}}
    run = RunFile.model_validate({**sections, "train": {"output_dir": str(folder), "max_steps": 1, **train}})
    return prepare_data(run, tokenizer, say=print)


def start_warm() -> subprocess.Popen[bytes]:
    environ = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    command, pipe = [warm.python(), "-c", workers.COMMAND], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environ, process_group=0)


@pytest.fixture
def with_processes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let so many processes tokenize chunks of a few rows, however small the data are."""

    def use(count: int, *, as_users_start_them: bool = False) -> None:
        if not as_users_start_them:
            warm.python()  # the server ends with the thread that starts it
            monkeypatch.setattr(workers, "start_worker", start_warm)
        monkeypatch.setattr(workers, "count_usable_cpus", lambda: count)
        monkeypatch.setattr(workers, "WORKER_BYTES", 1)
        monkeypatch.setattr(reading, "CHUNK_BYTES", 1 << 14)
        monkeypatch.setattr(reading, "BATCH", 50)

    return use


Sections = dict[str, Any]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sections]:
    """Data sections by kinds of files and rows."""
    folder = tmp_path_factory.mktemp("sets")
    chats = write_rows(folder / "chats.jsonl", CHATS)
    texts = [{"text": part} for part in PARTS]
    pq.write_table(pa.Table.from_pylist(CHATS), folder / "chats.parquet", row_group_size=130)
    with (folder / "texts.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text"])
        writer.writeheader()
        writer.writerows(texts)
    (folder / "lines.txt").write_text("\n".join(PARTS))
    (folder / "list.json").write_text(json.dumps(texts))
    pairs = write_rows(folder / "pairs.jsonl", PAIRS)
    parquet = {"dataset_name_or_path": str(folder / "chats.parquet")}
    return {
        "slices": {"dataset_name_or_path": str(chats), "train_split": "train[11%:70%]", "val_split": "train[700:]"},
        "parquet slice": {**parquet, "train_split": "train[77:-99]", "val_split": None},
        "json": {"dataset_name_or_path": str(folder / "list.json")},
        "pairs": {"dataset_name_or_path": str(pairs), "val_fraction": 0.1, "max_length": 2000},
        "mix": {
            "mix": [{"path": str(chats), "epochs": 2}, {"path": str(folder / "texts.csv"), "rows": 300}],
            "val_fraction": 0.1,
            "eval": {"lines": {"path": str(folder / "lines.txt"), "split": "train[:200]"}},
            "packing": True,
        },
    }


def hash_prepared(folder: Path, made: PreparedData) -> dict[str, str]:
    (cached,) = (path for path in (folder / "tokens").iterdir() if path.is_dir())
    found = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in sorted(cached.iterdir())}
    audit = json.dumps({**made.audit, "sequences": None}, default=str)
    return {**found, "folder": cached.name, "tokens": made.fingerprint, "audit": audit}


@pytest.mark.parametrize("kind", ["slices", "parquet slice", "json", "pairs", "mix"])
def test_any_number_of_processes_makes_the_same_bytes(
    kind: str, sets: dict[str, Sections], with_processes: Callable[..., None], tokenizer: Any, tmp_path: Path
) -> None:
    train = {"objective": "dpo"} if kind == "pairs" else {}
    made = []
    for count in (1, 3):
        with_processes(count)
        folder = tmp_path / f"{count}"
        made.append(hash_prepared(folder, prepare(folder, tokenizer, sets[kind], **train)))
    assert made[0] == made[1]
    assert {"train.arrow", "audit.json", "complete.json"} <= made[0].keys()
    assert not any(name.endswith(".part") for name in made[0])


@pytest.mark.fault("a bad row among those of another process", "`windlass data`", "a.jsonl: row 302")
@pytest.mark.takes("starts processes that tokenize")
def test_the_first_bad_row_of_the_file_is_named_whichever_process_finds_it(
    with_processes: Callable[..., None], tokenizer: Any, tmp_path: Path
) -> None:
    rows: list[Any] = [dict(row) for row in CHATS]
    rows[900] = {"messages": "Hello"}
    rows[301] = {"messages": [{"role": "wizard", "content": "Abra"}, {"role": "assistant", "content": "c"}]}
    rows[310] = {"other": 1}
    path = write_rows(tmp_path / "a.jsonl", rows)
    lines = path.read_text().splitlines()
    for count in (1, 2):
        with_processes(count, as_users_start_them=True)
        with refused("unknown-role", "a.jsonl: row 302"):
            prepare(tmp_path / f"{count}", tokenizer, {"dataset_name_or_path": str(path)})
    path.write_text("\n".join([*lines[:280], '{"messages": [', *lines[280:]]))
    for count in (1, 3):
        with_processes(count)
        with refused("not-json", "a.jsonl:281"):
            prepare(tmp_path / f"{count}", tokenizer, {"dataset_name_or_path": str(path)})


def test_rows_before_a_damage_of_the_file_come_first(
    with_processes: Callable[..., None], tokenizer: Any, tmp_path: Path
) -> None:
    with_processes(2)
    path = tmp_path / "a.csv"
    path.write_text("text\n" + "a b\n" * 200 + "a,b\n")
    with refused("extra-fields", "a.csv:202"):
        prepare(tmp_path / "out", tokenizer, {"dataset_name_or_path": str(path)})
    path.write_text("text,more\n" + "a,b\n" * 110 + "a\na,b,c\n")  # a row that lacks a field, then one with another
    data = {"dataset_name_or_path": str(path), "prompt_template": "{text}: [[{more}]]"}
    with refused("incomplete-row", "a.csv: row 111"):
        prepare(tmp_path / "out", tokenizer, data)


@pytest.mark.fault(
    "a process that tokenizes is killed", "`windlass data`", "a process that tokenizes was killed by SIGKILL"
)
@pytest.mark.parametrize(
    "before", ["", "workers.pickle.load = lambda *_, load=workers.pickle.load: (load(*_), die())\n"]
)
def test_a_killed_process_is_an_error_that_says_so(
    before: str, with_processes: Callable[..., None], tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_processes(2)
    die = "import os, signal\ndef die(): os.kill(os.getpid(), signal.SIGKILL)\nfrom windlass.data import workers\n"
    monkeypatch.setattr(workers, "COMMAND", f"{die}{before or 'die()'}\nworkers.serve()")
    data = {"dataset_name_or_path": str(write_rows(tmp_path / "a.jsonl", CHATS))}
    with refused("lost-process", error=RunError) as problems:
        prepare(tmp_path / "out", tokenizer, data)
    assert "a process that tokenizes was killed by SIGKILL" in problems[0].problem
    assert "if memory ran out, give the job more of it" in problems[0].hint
    assert not list_workers(os.getpid())


PREPARE = """
import signal
import sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
from transformers import AutoTokenizer
from windlass.data import reading, workers
from windlass.data.prepare import prepare_data
from windlass.runfile import Data, RunFile
workers.count_usable_cpus = lambda: 2
workers.WORKER_BYTES = 1
reading.CHUNK_BYTES = 1 << 14
run = RunFile.model_validate({"model": {"model_name_or_path": "unused"}, "data": {"dataset_name_or_path": sys.argv[1],
    "max_length": 256, "packing": False}, "train": {"output_dir": sys.argv[2], "max_steps": 1}})
prepare_data(run, AutoTokenizer.from_pretrained(sys.argv[3]), say=print)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.takes("starts processes that tokenize")
def test_processes_end_with_the_one_that_started_them(number: int, tokenizer: Any, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "a.jsonl", CHATS * 20)
    command = [sys.executable, "-c", PREPARE, str(rows), str(tmp_path / "out"), tokenizer.name_or_path]
    with subprocess.Popen(command) as process:
        while len(started := list_workers(process.pid)) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(60) == (-signal.SIGINT if number == signal.SIGINT else -signal.SIGKILL)
    assert not psutil.wait_procs(started, timeout=60)[1]


def list_workers(pid: int) -> list[psutil.Process]:
    found = []
    for each in psutil.Process(pid).children():
        with suppress(psutil.NoSuchProcess):  # it ends just now, or is another test's that nobody waited for
            if workers.COMMAND in each.cmdline():
                found.append(each)
    return found


def test_answers_between_added_tokens_are_marked_as_offsets_mark_them(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = ["one", " led by a blank", "and followed ", "é 漢字 🙂", "🙂", "a </s> in it", "[/INST] b", "", "\n"]
    rows = [
        {"messages": [{"role": "user", "content": f"{answer} {number}?"}, {"role": "assistant", "content": answer}]}
        for number, answer in enumerate([*answers, *(row["messages"][1]["content"] for row in CHATS[:400])])
    ]
    rows += [{"messages": rows[number]["messages"] + rows[number + 1]["messages"]} for number in range(300)]
    kind = choose_format(Data(dataset_name_or_path="x"), ["messages"], tokenizer)
    rendered = [one for row in rows for one in kind.render(row)]
    markers = tokenize.read_markers(tokenizer, len(tokenizer))
    assert markers is not None
    fast = tokenize.encode_batch(rendered, tokenizer)
    pairs = zip(rendered, fast, strict=True)
    told = [tokenize.flag_between_markers(np.asarray(ids), one, markers) is not None for one, (ids, *_) in pairs]
    assert 0.5 < sum(told) / len(told) < 0.9
    monkeypatch.setattr(tokenize, "read_markers", lambda *_: None)
    for found, expected in zip(fast, tokenize.encode_batch(rendered, tokenizer), strict=True):
        assert [*found[0]] == [*expected[0]]
        assert np.array_equal(found[1], expected[1])  # type: ignore[arg-type]
        assert found[2] == expected[2]


# Letters, digits, marks, contractions, blanks of many kinds, and pieces of added tokens.
SYMBOLS = [*"abZ 1'.,-_/(<|[\n\t\ré漢😀²ǅʰ\u00a0\u3000\u2028\x85\x1c\0", "  ", "'s ", "'LL", " <", "</s>", "<s>"]
SYMBOLS += [" ", " ", "<|x|>", "<|x", "e\u0301", " \u0301", "ไทย", "12345", " word", "Word "]


def make_tokenizer(folder: Path, before: Any, normalizer: Any = None) -> Any:
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<s>", "</s>"], initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    made = tokenizers.Tokenizer(BPE())
    made.pre_tokenizer = before
    if normalizer:
        made.normalizer = normalizer
    made.train_from_iterator([*PARTS, "two words " * 500], trainer)
    made.add_tokens(["<|x|>"])
    made.save(str(folder / "tokenizer.json"))
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))


def split_by(pattern: str) -> Any:
    return Sequence([Split(tokenizers.Regex(pattern), "isolated"), ByteLevel(False, use_regex=False)])


@pytest.mark.parametrize("number", range(len(words.PATTERNS) + 1))
def test_words_become_the_tokens_that_they_are_in_their_text(number: int, tmp_path: Path) -> None:
    patterns = [*map(split_by, sorted(words.PATTERNS)), Sequence([Digits(True), ByteLevel(False)])]
    tokenizer = make_tokenizer(tmp_path, patterns[number], NFC() if number % 2 else None)
    found = words.read_words(tokenizer, len(tokenizer))
    assert found is not None
    rng = random.Random(0)
    texts = ["", " ", *("".join(rng.choices(SYMBOLS, k=rng.randint(1, 40))) for _ in range(2000))]
    texts += ["a word", "".join(found.added), "and more", *found.added]  # every added token in one text
    expected = [one.ids for one in tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    for some in (texts[:500], texts):  # of which a quarter has been seen
        assert [ids.tolist() for ids in found.encode(some)] == expected[: len(some)]
    assert max(map(len, found.known)) <= words.LONGEST_WORD


def test_tokenizers_whose_words_have_spaces_see_whole_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = r"\w+ \w+|\S|\s"
    tokenizer = make_tokenizer(tmp_path, split_by(pairs))
    assert words.read_words(tokenizer, len(tokenizer)) is None
    texts = ["of two words two words", *PARTS]
    expected = [one.ids for one in tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    assert [ids.tolist() for ids in words.encode_texts(texts, tokenizer)] == expected
    words.read_words.cache_clear()
    monkeypatch.setattr(words, "PATTERNS", {pairs})
    assert [ids.tolist() for ids in words.encode_texts(texts, tokenizer)] != expected
    words.read_words.cache_clear()
