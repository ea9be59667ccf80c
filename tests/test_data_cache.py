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
import warm
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from windlass import tiny
from windlass.data.cache import SEAL, cached_folder
from windlass.data.prepare import prepare
from windlass.errors import UserError
from windlass.runfile import RunFile

# What a process of its own does in these tests: make a cache, wait for `go`, and write down that it did.
MAKER = """
import sys, time
from pathlib import Path
from windlass.data.cache import cached_folder
cache = Path(sys.argv[1])
def make(into):
    with (cache / "log").open("a") as log:
        log.write("made\\n")
    (into / "half").write_text("begun")
    while not (cache / "go").exists():
        time.sleep(0.02)
    (into / "tokens").write_text("all")
print((cached_folder(cache, "key", make, lambda said: print(said, flush=True)) / "tokens").read_text())
"""


def start_maker(cache: Path) -> subprocess.Popen[str]:
    cache.mkdir(exist_ok=True)
    return subprocess.Popen([warm.python(), "-c", MAKER, str(cache)], stdout=subprocess.PIPE, text=True)


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


def test_one_process_makes_and_the_others_wait_even_if_it_is_killed(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    owner = start_maker(cache)
    wait_for(cache / "log")
    others = [start_maker(cache) for _ in range(2)]
    for other in others:
        assert other.stdout is not None
        assert "waiting for another process" in other.stdout.readline()
    owner.send_signal(signal.SIGKILL)
    owner.communicate(timeout=30)
    (cache / "go").touch()
    assert all(other.communicate(timeout=60)[0].endswith("all\n") for other in others)
    assert (cache / "log").read_text() == "made\n" * 2  # by the owner, and by one of the others
    assert not list(cache.glob("*.part-*"))  # what the owner left is gone


def test_a_failure_leaves_nothing_and_a_place_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    def fail(into: Path) -> None:
        (into / "half").write_text("begun")
        raise UserError("bad row")

    with pytest.raises(UserError, match="bad row"):
        cached_folder(tmp_path, "key", fail, print)
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]
    with pytest.raises(UserError, match="tokens can't be kept"):
        cached_folder(tmp_path / "key.lock" / "tokens", "key", fail, print)


@pytest.mark.parametrize("harm", ["flip", "cut", "unseal", "lose", "garble"])
def test_tokens_come_from_the_cache_and_are_made_again_if_damaged(text: Path, tokenizer: Any, harm: str) -> None:
    said: list[str] = []
    first = prepare(run_file(text, packing=True), tokenizer, say=said.append)
    expected, audit = first.train[:], first.audit
    folder = text.parent / "out" / "tokens" / first.fingerprint
    del first
    arrow = folder / "train.arrow"
    times = arrow.stat()
    again = prepare(run_file(text, packing=True), tokenizer, say=said.append)
    assert (again.train[:], again.audit, arrow.stat().st_mtime_ns, said) == (expected, audit, times.st_mtime_ns, [])
    del again
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
    for _ in range(2):
        assert prepare(run_file(text, packing=True), tokenizer, say=said.append).train[:] == expected
        assert len(said) == 1
        assert "damaged" in said[0]


def test_the_fingerprint_follows_what_the_tokens_depend_on(text: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    seen = {prepare(run_file(text), tokenizer).fingerprint}
    os.utime(text, (0, 0))
    assert prepare(run_file(text), tokenizer).fingerprint in seen  # a copy with another date is the same data
    other = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    other.add_special_tokens({"eos_token": "<stop>"})
    sections: list[dict[str, Any]] = [{"max_length": 32}, {"packing": True}, {"val_fraction": 0.1}]
    sections += [{"train_split": "train[:50%]"}, {"prompt_template": "{text}!"}]
    found = [prepare(run_file(text, **section), tokenizer).fingerprint for section in sections]
    found.append(prepare(run_file(text), other).fingerprint)
    text.write_text(text.read_text().replace("the", "thy", 1))
    found.append(prepare(run_file(text), tokenizer).fingerprint)
    assert len({*seen, *found}) == 1 + len(found)


def test_a_volume_without_locks_still_gets_one_complete_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    said: list[str] = []

    def quick(into: Path) -> None:
        (into / "tokens").write_text("first")

    def make(into: Path) -> None:
        with monkeypatch.context() as patch:  # a process on another machine comes in between and is first
            patch.setattr(socket, "gethostname", lambda: "another")
            cached_folder(tmp_path, "key", quick, said.append)
        (into / "tokens").write_text("second")

    assert (cached_folder(tmp_path, "key", make, said.append) / "tokens").read_text() == "first"
    assert "takes no locks" in said[0]


FORKED = """
import itertools, sys
from pathlib import Path
from torch.utils.data import DataLoader
from transformers import AutoTokenizer
from windlass.data.prepare import prepare
from windlass.runfile import RunFile
run = RunFile.model_validate(%s)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tokenizer(["start the threads"] * 1000)  # as TOKENIZERS_PARALLELISM says
prepared = prepare(run, tokenizer)
loader = DataLoader(prepared.train, batch_size=None, num_workers=1, multiprocessing_context="fork")
print(sum(1 for _ in itertools.islice(loader, 20)))
"""


def test_no_deadlock_in_forked_workers(text: Path, tokenizer: Any) -> None:
    script = FORKED % repr(json.loads(run_file(text, streaming=True).model_dump_json(exclude_unset=True)))
    command = [sys.executable, "-c", script, tokenizer.name_or_path]  # a fork of the warm one starts no threads
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.strip() == "20", done.stderr[-2000:]
