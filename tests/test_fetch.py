"""Fetching from a hub on this machine: once for any number of processes, resumed after a cut, errors without
network."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import warm
from refusals import refused
from test_compressed import write_native

from windlass import cli, tiny
from windlass.data.hub import require_room
from windlass.data.sources import resolve_source
from windlass.errors import UserError
from windlass.fetch import record_digest
from windlass.model.base import find_base, find_fetched_folder, read_base, read_published_configs
from windlass.model.files import HEADERS, PUBLISHED, read_headers
from windlass.runfile import Data
from windlass.weights.same_base import digest_files

SHA = "a" * 40
LARGE = (".safetensors", ".csv", "rows.json", "tokenizer.json")  # with a published SHA-256
CARD = "---\nconfigs:\n- config_name: small\n  data_files: [{split: train, path: small/*}]\n---\n"
FILES = {
    "datasets/org/set": {
        "README.md": CARD.encode(),
        "small/train.jsonl": b'{"text": "one"}\n{"text": "two"}\n',
        "large/train.jsonl": b'{"text": "not asked for"}\n',
    },
    "org/model": {
        "config.json": b"{}",
        "model.safetensors": bytes(range(256)) * 100_000,  # the client writes what it has in blocks of 10 MB
        "consolidated.safetensors": b"a second time",
    },
}


class Hub(ThreadingHTTPServer):
    """The part of the hub's interface that its client uses. The transfer of the file `cut` ends half-way.

    `spoilt` is sent with one byte changed.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.gets: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.ranges: list[str] = []
        self.cut = self.spoilt = ""
        self.delay = 0.0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self.do_GET(body=False)

    def do_GET(self, *, body: bool = True) -> None:
        path = urlsplit(self.path).path.lstrip("/")
        if path.startswith("api/"):
            self.send_api(path.removeprefix("api/").removeprefix("models/"))
            return
        repository, _, rest = path.partition("/resolve/")
        name = rest.partition("/")[2]
        content = FILES.get(repository, {}).get(name)
        if content is None:
            self.send(404, {"X-Error-Code": "EntryNotFound"}, b"")
            return
        head = {"ETag": f'"{name}-1"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
        if not body:
            self.send(200, head, content, body=False)
            return
        self.server.gets[name] += 1
        time.sleep(self.server.delay)
        wanted = self.headers.get("Range")
        first, _, last = wanted.removeprefix("bytes=").partition("-") if wanted else ("0", "", "")
        start, content = int(first), content[: int(last) + 1 if last else None]
        if wanted:
            self.server.ranges.append(wanted)
            head["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cut = self.server.cut == name and not start
        content = content[:-1] + b"?" if self.server.spoilt == name else content
        self.server.sent[name] += len(content) - start
        self.send(206 if wanted else 200, head, content[start:], cut=cut)

    def send_api(self, path: str) -> None:
        repository, _, revision = path.partition("/tree/")
        repository = repository.partition("/revision/")[0]
        files = FILES.get(repository)
        if files is None:
            self.send(404, {"X-Error-Code": "RepoNotFound"}, b"{}")
            return
        tree = [{"type": "file", "path": n, "size": len(c), "oid": f"{n}-1"} for n, c in files.items()]
        siblings: list[dict[str, Any]] = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
        for one in siblings:
            if one["rfilename"].endswith(LARGE):
                digest = hashlib.sha256(files[one["rfilename"]]).hexdigest()
                one["lfs"] = {"sha256": digest, "size": one["size"], "pointerSize": 130}
        info = {"id": repository, "sha": SHA, "siblings": siblings, "private": False, "tags": []}
        self.send(200, {"Content-Type": "application/json"}, json.dumps(tree if revision else info).encode())

    def send(self, status: int, head: dict[str, str], content: bytes, *, body: bool = True, cut: bool = False) -> None:
        self.send_response(status)
        for key, value in {**head, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content[: len(content) // 2] if cut else content)
        self.close_connection = cut


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    yield server
    server.shutdown()
    server.server_close()


SCRIPT = """
import json, sys
from windlass.errors import UserError
from windlass.fetch import fetch_run
from windlass.runfile import RunFile
run = RunFile.model_validate(json.loads(sys.argv[1]))
try:
    found = fetch_run(run, lambda key: f"run.yaml:1: {key}", lambda line: print(line, file=sys.stderr, flush=True))
except UserError as error:
    sys.exit(f"USER {error}")
print(json.dumps({part: str(folder) for part, folder in found.items()}))
"""


def fetch(hub: Hub, folder: Path, *, model: str = "org/model", data: str = "org/set", **more: str) -> Any:
    run = {
        "model": {"model_name_or_path": model},
        "data": {"dataset_name_or_path": data, "dataset_config_name": "small" if data == "org/set" else None},
        "train": {"output_dir": str(folder / "out")},
    }
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, json.dumps(run)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(hub, folder) | more,
    )


def environment(hub: Hub, folder: Path) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    hub_of_test = {"HF_HOME": str(folder / "hf"), "HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_XET": "1"}
    return inherited | hub_of_test | {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def result(process: Any) -> tuple[dict[str, Path], str]:
    out, err = process.communicate(timeout=200)
    return ({part: Path(path) for part, path in json.loads(out).items()} if process.returncode == 0 else {}), err


@pytest.mark.takes("fetches from a server of its own")
def test_several_processes_fetch_once_and_only_what_the_run_reads(hub: Hub, tmp_path: Path) -> None:
    hub.delay = 0.5
    processes = [fetch(hub, tmp_path) for _ in range(2)]
    found = [result(process) for process in processes]
    assert all(folders for folders, _ in found), found[0][1]
    assert set(hub.gets) == {"README.md", "small/train.jsonl", "config.json", "model.safetensors"}
    assert set(hub.gets.values()) == {1}
    folders = found[0][0]
    assert (folders["model"] / "model.safetensors").read_bytes() == FILES["org/model"]["model.safetensors"]
    assert not (folders["model"] / "consolidated.safetensors").exists()
    assert sum("waiting for another process" in printed for _, printed in found) >= 1
    # Afterwards no network is needed.
    offline, printed = result(fetch(hub, tmp_path, HF_HUB_OFFLINE="1"))
    assert offline == folders, printed


@pytest.mark.takes("fetches from a server of its own")
def test_interrupted_transfer_resumes(hub: Hub, tmp_path: Path) -> None:
    hub.cut = "model.safetensors"
    folders, printed = result(fetch(hub, tmp_path))
    if not folders:  # the client gave up: the next run goes on
        hub.cut = ""
        folders, printed = result(fetch(hub, tmp_path))
    assert folders, printed
    assert (folders["model"] / "model.safetensors").read_bytes() == FILES["org/model"]["model.safetensors"]
    assert hub.ranges
    assert hub.gets["small/train.jsonl"] == 1


@pytest.mark.fault("a file that is not what the hub publishes", "`windlass fetch`", "the hub publishes ")
def test_a_file_without_its_published_hash_is_removed_and_fetched_again(hub: Hub, tmp_path: Path) -> None:
    hub.spoilt = "model.safetensors"
    folders, printed = result(fetch(hub, tmp_path))
    assert not folders
    assert "model.safetensors: has SHA-256 " in printed
    assert "the hub publishes " in printed
    hub.spoilt = ""
    folders, printed = result(fetch(hub, tmp_path))
    assert folders, printed
    known = json.loads((folders["model"] / "windlass-published.json").read_text())
    assert list(known) == ["model.safetensors"]


def test_checksums_of_a_data_set_are_not_taken_for_rows(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FILES, "datasets/org/table", {"README.md": b"", "rows.json": b'[{"text": "one"}]'})
    folders, printed = result(fetch(hub, tmp_path, model=str(tmp_path), data="org/table"))
    assert folders, printed
    assert (folders["data"] / PUBLISHED).is_file()
    source = resolve_source(Data(dataset_name_or_path=str(folders["data"]), dataset_config_name=None))
    assert source.splits == {"train": (folders["data"] / "rows.json",)}


def test_room_is_needed_for_what_is_not_there(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.txt").write_text("a\n")
    rows = str(tmp_path / "rows.txt")
    folders, printed = result(fetch(hub, tmp_path, data=rows))
    assert set(folders) == {"model"}
    assert "nothing to fetch" in printed
    full = "import shutil, types\nshutil.disk_usage = lambda _: types.SimpleNamespace(free=1000)\n"
    monkeypatch.setattr(sys.modules[__name__], "SCRIPT", full + SCRIPT)
    (mark,) = (tmp_path / "hf" / "hub").glob(".windlass-model-*.json")
    mark.unlink()  # as if it had been interrupted
    again, printed = result(fetch(hub, tmp_path, data=rows))
    assert again == folders, printed
    mark.unlink()
    (folders["model"] / "model.safetensors").unlink()
    assert "org/model takes 0.0 GiB" in result(fetch(hub, tmp_path, data=rows))[1]


def test_headers_alone_have_no_digest(tmp_path: Path) -> None:
    """Though another large file, as a tokenizer's, was fetched and compared."""
    (tmp_path / "config.json").write_text(json.dumps(next(iter(read_published_configs().values()))))
    (tmp_path / PUBLISHED).write_text('{"tokenizer.json": "a"}')
    record_digest(tmp_path, print)
    assert json.loads((tmp_path / PUBLISHED).read_text()) == {"tokenizer.json": "a"}


def test_what_can_not_be_fetched_is_named_with_the_next_step(hub: Hub, tmp_path: Path) -> None:
    offline, unreachable = {"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}
    unknown = fetch(hub, tmp_path / "unknown", model="org/none")
    for process in [fetch(hub, tmp_path, **more) for more in (offline, unreachable)]:
        folders, printed = result(process)
        assert not folders
        assert "USER run.yaml:1: model.model_name_or_path: org/model is not on this machine and the hub" in printed
        assert "hint: run `windlass fetch RUN` where there is a network" in printed
    assert "the hub has no model 'org/none'" in result(unknown)[1]


def run_windlass(hub: Hub, folder: Path, *arguments: str, code: int = 0) -> str:
    command, environ = [warm.python(), "-m", "windlass", *arguments], environment(hub, folder)
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.long
def test_headers_alone_are_enough_for_the_plan(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tiny.write_family(tmp_path / "source", "qwen2", tokenizer=True)
    files = {file.name: file.read_bytes() for file in source.iterdir()}
    monkeypatch.setitem(FILES, "org/tiny", files)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("model: {model_name_or_path: org/tiny}\ncluster: {gpu: h100}\n")

    def planned(*more: str) -> tuple[dict[str, Any], str]:
        with pytest.raises(SystemExit, match=r"^0$"):
            cli.main(["plan", "run.yaml", "--json", *more])
        out, err = capsys.readouterr()
        plan = json.loads(out)
        return {"parameters": plan["parameters"], "memory": plan["memory"]}, out + err

    run_windlass(hub, tmp_path, "fetch", "run.yaml", "--headers-only")
    weights = [name for name in files if name.endswith(".safetensors")]
    assert weights, files
    assert all(hub.sent[name] <= 100_001 < len(files[name]) for name in weights), hub.sent
    expected, _ = planned("--override", f"model.model_name_or_path={source}")
    plan, out = planned()
    assert plan == expected
    assert "no weights in" in out
    run_windlass(hub, tmp_path, "train", "run.yaml", code=2)
    (tmp_path / "rows.txt").write_text("a\n")
    run_windlass(hub, tmp_path, "fetch", "run.yaml", "--override", f"data.dataset_name_or_path={tmp_path}/rows.txt")
    plan, out = planned()
    assert plan == expected
    assert "no weights in" not in out
    (published,) = (tmp_path / "hf").rglob("windlass-published.json")
    assert json.loads(published.read_text())["digest of all weights"] == digest_files(read_base(source))


@pytest.mark.long
def test_weights_in_mistrals_own_layout_are_fetched_if_there_are_no_others(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized = tiny.make_compressed_config("nvfp4") | {"quant_method": "compressed_tensors"}
    source = write_native(tmp_path / "theirs", tmp_path / "native", quantized)
    files = {file.name: file.read_bytes() for file in source.iterdir()}
    monkeypatch.setitem(FILES, "org/native", files)
    (tmp_path / "run.yaml").write_text("model: {model_name_or_path: org/native}\n")
    weights = "consolidated-00001-of-00001.safetensors"

    def fetch_model(*arguments: str) -> Path:
        found = re.search(r"model: (/.+)", run_windlass(hub, tmp_path, "fetch", "run.yaml", *arguments))
        assert found
        return Path(found[1])

    expected = read_base(source)
    folder = fetch_model("--headers-only")
    assert not (folder / weights).exists()
    assert 0 < hub.sent[weights] <= 100_001
    base = read_base(folder)
    assert base.path is None
    assert "config.json and the headers of its files" in base.notes[0]
    assert [one.shape for one in base.stored()] == [one.shape for one in expected.stored()]
    (tmp_path / "rows.txt").write_text("a\n")
    folder = fetch_model("--override", f"data.dataset_name_or_path={tmp_path / 'rows.txt'}")
    assert (folder / weights).read_bytes() == files[weights]
    assert read_base(folder).path == folder
    (folder / "config.json").unlink()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with refused("no-config"):  # which says where to take it from
        find_base("org/native", "model")


def test_a_model_whose_name_begins_alike_is_not_taken_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    hub = tmp_path / "hub"
    other, own = (hub / f"models--org--{name}" / "snapshots" / SHA for name in ("tiny-chat", "tiny"))
    for folder in (other, own):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    (hub / ".windlass-model-org--tiny-chat-0123456789abcdef.json").write_text(json.dumps({"folder": str(other)}))
    assert find_fetched_folder("org/tiny") is None
    assert find_fetched_folder("org/tiny-chat") == other
    (hub / ".windlass-model-org--tiny-0123456789abcdef.json").write_text(json.dumps({"folder": str(own)}))
    assert find_fetched_folder("org/tiny") == own
    (own / HEADERS).write_text('{"model.safetensors": {"size": 8}}')
    with pytest.raises(UserError, match="no header: KeyError"):
        read_headers(own)


@pytest.mark.fault("a volume that is too small for the model", "`windlass fetch`", "takes 8796093022208.0 GiB")
def test_too_small_volume_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"takes 8796093022208.0 GiB, .* GiB free"):
        require_room(2**73, tmp_path, "org/model", "model")
    require_room(1, tmp_path, "org/model", "model")
