"""Tokens are made once, by one process, and what is damaged is made again: with real processes, killed for real."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from windlass import tiny
from windlass.data.cache import SEAL, cached_folder
from windlass.data.prepare import Prepared, prepare
from windlass.errors import UserError
from windlass.runfile import RunFile

# What a process of its own does in these tests: make a cache slowly, and write down that it did.
MAKER = """
import sys, time
from pathlib import Path
from windlass.data.cache import cached_folder
cache, seconds = Path(sys.argv[1]), float(sys.argv[2])
def make(into):
    with (cache / "log").open("a") as log:
        log.write("made\\n")
    (into / "half").write_text("begun")
    time.sleep(seconds)
    (into / "tokens").write_text("whole")
print((cached_folder(cache, "key", make, lambda said: print(said, flush=True)) / "tokens").read_text())
"""


def maker(cache: Path, seconds: float) -> subprocess.Popen[str]:
    cache.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", MAKER, str(cache), str(seconds)], stdout=subprocess.PIPE, text=True, env=os.environ
    )


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(tiny.write_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab=400))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(topics[name][:400].replace("\n", " ") for name in sorted(topics)))
    return path


def run_file(text: Path, **section: Any) -> RunFile:
    return RunFile.model_validate(
        {
            "model": {"model_name_or_path": "unused"},
            "data": {"dataset_name_or_path": str(text), "max_length": 64, **section},
            "train": {"output_dir": str(text.parent / "out"), "max_steps": 3},
        }
    )


def folder_of(text: Path, prepared: Prepared) -> Path:
    return text.parent / "out" / "tokens" / prepared.fingerprint


def test_one_process_makes_and_the_others_wait(tmp_path: Path) -> None:
    makers = [maker(tmp_path / "cache", 1.0) for _ in range(3)]
    said = [process.communicate(timeout=60)[0] for process in makers]
    assert [process.returncode for process in makers] == [0, 0, 0]
    assert (tmp_path / "cache" / "log").read_text() == "made\n"
    assert all(text.endswith("whole\n") for text in said)
    assert sum("waiting for another process" in text for text in said) >= 1


def test_an_owner_that_is_killed_holds_nobody_up(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    owner = maker(cache, 600)
    wait_for(cache / "log")
    follower = maker(cache, 0)
    time.sleep(0.3)
    owner.send_signal(signal.SIGKILL)
    owner.communicate(timeout=30)
    assert follower.communicate(timeout=60)[0].endswith("whole\n")
    assert not list(cache.glob("*.part-*"))  # what the owner left is gone


def test_a_failed_making_leaves_nothing(tmp_path: Path) -> None:
    def fail(into: Path) -> None:
        (into / "half").write_text("begun")
        raise UserError("bad row")

    with pytest.raises(UserError, match="bad row"):
        cached_folder(tmp_path, "key", fail, print)
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]


def test_the_second_time_is_from_the_cache(text: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    first = prepare(run_file(text, packing=True), tokenizer)
    before = (folder_of(text, first) / "train.arrow").stat().st_mtime_ns
    second = prepare(run_file(text, packing=True), tokenizer)
    assert (folder_of(text, second) / "train.arrow").stat().st_mtime_ns == before
    assert second.audit == first.audit
    assert second.train[:] == first.train[:]


def flip(path: Path) -> None:
    """One bit, and the clock set back: nothing but the content tells."""
    times = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("harm", ["flip", "cut", "unseal", "lose", "garble"])
def test_a_damaged_cache_is_made_again_and_said(text: Path, tokenizer: Any, harm: str) -> None:
    first = prepare(run_file(text), tokenizer)
    expected = first.train[:]
    folder = folder_of(text, first)
    del first
    arrow = folder / "train.arrow"
    match harm:
        case "flip":
            flip(arrow)
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
    said: list[str] = []
    again = prepare(run_file(text), tokenizer, say=said.append)
    assert again.train[:] == expected
    assert len(said) == 1
    assert "damaged" in said[0]
    prepare(run_file(text), tokenizer, say=said.append)
    assert len(said) == 1


def test_the_fingerprint_follows_what_the_tokens_depend_on(text: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    seen = {prepare(run_file(text), tokenizer).fingerprint}
    os.utime(text, (0, 0))
    assert prepare(run_file(text), tokenizer).fingerprint in seen  # a copy with another date is the same data
    other = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    other.add_special_tokens({"eos_token": "<stop>"})
    for run, kind in (
        (run_file(text, max_length=32), tokenizer),
        (run_file(text, packing=True), tokenizer),
        (run_file(text, val_fraction=0.1), tokenizer),
        (run_file(text, train_split="train[:50%]"), tokenizer),
        (run_file(text, prompt_template="{text}!"), tokenizer),
        (run_file(text), other),
    ):
        found = prepare(run, kind).fingerprint
        assert found not in seen
        seen.add(found)
    text.write_text(text.read_text().replace("the", "thy", 1))
    assert prepare(run_file(text), tokenizer).fingerprint not in seen


def test_a_volume_without_locks_still_gets_one_whole_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    said: list[str] = []
    inner: list[Path] = []

    def quick(into: Path) -> None:
        (into / "tokens").write_text("whole")

    def make(into: Path) -> None:
        if not inner:  # another process comes in between and is first
            inner.append(into)
            monkeypatch.setattr(socket, "gethostname", lambda: "another")
            cached_folder(tmp_path, "key", quick, said.append)
        (into / "tokens").write_text("whole")

    assert (cached_folder(tmp_path, "key", make, said.append) / "tokens").read_text() == "whole"
    assert "takes no locks" in said[0]


def test_a_place_that_can_not_be_written_is_said(tmp_path: Path, text: Path, tokenizer: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="tokens can't be kept"):
        prepare(run_file(text), tokenizer, cache=tmp_path / "file" / "tokens")


FORKED = """
import itertools, sys
from pathlib import Path
from torch.utils.data import DataLoader
from transformers import AutoTokenizer
from windlass.data.prepare import prepare
from windlass.runfile import RunFile
run = RunFile.model_validate(%s)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tokenizer(["warm the threads"] * 1000)
prepared = prepare(run, tokenizer)
loader = DataLoader(prepared.train, batch_size=None, num_workers=1, multiprocessing_context="fork")
print(sum(1 for _ in itertools.islice(loader, 20)))
"""


@pytest.mark.parametrize("parallelism", ["true", "false", None])
def test_no_deadlock_in_forked_workers(text: Path, tokenizer: Any, parallelism: str | None) -> None:
    script = FORKED % repr(json.loads(run_file(text, streaming=True).model_dump_json(exclude_unset=True)))
    environment = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    environment |= {"TOKENIZERS_PARALLELISM": parallelism} if parallelism else {}
    done = subprocess.run(
        [sys.executable, "-c", script, tokenizer.name_or_path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == "20", done.stderr[-2000:]
