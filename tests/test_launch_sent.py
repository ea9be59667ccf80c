"""Runs that were sent: to Run:ai's API on a real server, or begun here, and then looked at and stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from launch_jobs import EXAMPLES, SITE, environ, plan_of
from runai.models.distributed_creation_request import DistributedCreationRequest

from windlass import demo
from windlass.errors import RunError, UserError
from windlass.launch import local, runai_api
from windlass.launch import submit as submitting
from windlass.observe import steps

TOKEN = "token-that-nobody-may-see"
PROJECT = {"id": "17", "clusterId": "c-1", "name": "research"}


class Server(ThreadingHTTPServer):
    """Run:ai's control plane, as far as a submission sees it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.projects: list[dict[str, str]] = [PROJECT, {**PROJECT, "name": "research-2", "id": "18"}]
        self.refusal: tuple[int, str] | None = None
        self.bodies: list[dict[str, Any]] = []
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        if not self.known(asked.path):
            return
        assert asked.path == "/api/v1/org-unit/projects"
        name = parse_qs(asked.query)["filterBy"][0].removeprefix("name==")
        self.answer(200, {"projects": [one for one in self.server.projects if one["name"].startswith(name)]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.known(self.path):
            return
        assert self.path == "/api/v1/workloads/distributed"
        assert self.headers["Content-Type"] == "application/json"
        made = DistributedCreationRequest.from_dict(body)  # raises for a type or a value that Run:ai does not take
        assert made is not None
        self.server.bodies.append(body)
        self.answer(202, {"workloadId": "w-1", "name": body["name"]})

    def known(self, path: str) -> bool:
        self.server.asked.append(path)
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.answer(401, {"message": "who are you?"})
            return False
        if self.server.refusal and path.startswith("/api/v1/workloads"):
            self.answer(self.server.refusal[0], {"message": self.server.refusal[1]})
            return False
        return True

    def answer(self, code: int, body: Any) -> None:
        text = json.dumps(body).encode()
        self.send_response(code)
        if code == 302:
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join(5)


def sent(folder: Path, plane: runai_api.ControlPlane | None, *more: str, dry_run: bool = False) -> list[str]:
    """Everything that a submission over the API said."""
    words = [word for word in SITE if not word.startswith("cluster.volumes")]
    overrides = (*words, f"cluster.volumes=[{{claim: a, path: {folder}}}]", f"train.output_dir={folder}/run", *more)
    said: list[str] = []
    plan = plan_of(EXAMPLES / "train.yaml", overrides)
    code = submitting.submit(
        plan, "runai", overrides=overrides, api=True, plane=plane, dry_run=dry_run, say=said.append
    )
    assert code == 0
    return said


def files(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.rglob("*")) if path.is_file())


def test_the_api_gets_the_very_payload_with_the_projects_numbers(tmp_path: Path, server: Server) -> None:
    said = sent(tmp_path, runai_api.ControlPlane(server.url, TOKEN))
    assert "run is created, number w-1" in said
    (body,) = server.bodies
    assert (body["projectId"], body["clusterId"]) == ("17", "c-1")
    assert body["spec"]["numWorkers"] == 2
    assert body["spec"]["args"] == f"{tmp_path}/run/launch.sh"
    assert {"name": "HF_TOKEN", "secret": {"name": "hub", "key": "token"}} in body["spec"]["environmentVariables"]
    assert json.loads((tmp_path / "run" / "payload.json").read_text()) == body
    record = json.loads((tmp_path / "run" / "submitted.json").read_text())
    assert (record["platform"], record["workload"], record["project"]) == ("runai", "w-1", "research")
    assert TOKEN not in files(tmp_path) + "".join(said) + repr(runai_api.ControlPlane(server.url, TOKEN))


def test_without_a_control_plane_the_payload_is_left_with_the_next_step(tmp_path: Path, server: Server) -> None:
    (said,) = [line for line in sent(tmp_path, None) if "RUNAI_BASE_URL" in line]
    assert "RUNAI_TOKEN" in said
    assert "POST it to /api/v1/workloads/distributed" in said
    assert json.loads((tmp_path / "run" / "payload.json").read_text())["projectId"] == "PROJECT_ID"
    sent(tmp_path, runai_api.ControlPlane(server.url, TOKEN), dry_run=True)
    assert not server.asked, "a dry run asks nobody"


def test_the_payload_is_written_only_where_it_is_asked_for(tmp_path: Path) -> None:
    overrides = (*SITE, f"train.output_dir={tmp_path}/run", f"cluster.volumes=[{{claim: a, path: {tmp_path}}}]")
    plan = plan_of(EXAMPLES / "train.yaml", overrides)
    assert "payload.json" not in submitting.texts(plan, "runai", overrides=overrides)
    with pytest.raises(UserError, match="kubernetes has no API that windlass speaks"):
        submitting.texts(plan, "kubernetes", overrides=overrides, api=True)


@pytest.mark.parametrize(
    ("code", "message", "hint"),
    [
        (409, "a workload of this name exists", "windlass stop RUN"),
        (403, "no role", "who gives out roles"),
        (500, "", ""),
    ],
)
def test_what_the_server_refuses_is_shown_as_it_says_it(
    tmp_path: Path, server: Server, code: int, message: str, hint: str
) -> None:
    server.refusal = (code, message)
    with pytest.raises(RunError) as caught:
        sent(tmp_path, runai_api.ControlPlane(server.url, TOKEN))
    assert f'{code}: {{"message": "{message}"}}' in str(caught.value)
    assert f"POST {server.url}/api/v1/workloads/distributed" in str(caught.value)
    assert hint in caught.value.problems[0].hint
    assert TOKEN not in str(caught.value)
    assert not (tmp_path / "run" / "submitted.json").exists()


def test_a_wrong_token_an_unknown_project_and_one_on_two_clusters(tmp_path: Path, server: Server) -> None:
    with pytest.raises(RunError, match=r"401: .*who are you(.|\n)*runai auth get-token"):
        sent(tmp_path, runai_api.ControlPlane(server.url, "wrong"))
    plane = runai_api.ControlPlane(server.url, TOKEN)
    with pytest.raises(UserError, match="no project 'resea' that this token may see") as caught:
        sent(tmp_path, plane, "cluster.project=resea")
    assert "cluster.project" in caught.value.problems[0].where
    server.projects.append({**PROJECT, "clusterId": "c-2"})
    with pytest.raises(UserError, match="on several clusters: c-1, c-2"):
        sent(tmp_path, plane)
    assert not server.bodies


def test_a_token_goes_to_no_other_address_and_never_unencrypted(tmp_path: Path, server: Server) -> None:
    server.refusal = (302, "elsewhere")
    with pytest.raises(RunError, match="302"):
        sent(tmp_path, runai_api.ControlPlane(server.url, TOKEN))
    for url in ("http://company.run.ai", "company.run.ai", "file:///etc/passwd", "https://"):
        with pytest.raises(UserError, match="no address of a control plane"):
            runai_api.ControlPlane(url, TOKEN)


def test_nobody_answers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(RunError, match=r"no answer: (.|\n)*Connection refused(.|\n)*is RUNAI_BASE_URL right"):
        sent(tmp_path, runai_api.ControlPlane(f"http://127.0.0.1:{port}", TOKEN))


def test_the_environment_says_both_or_nothing() -> None:
    assert runai_api.control_plane({}) is None
    assert runai_api.control_plane({"RUNAI_BASE_URL": "https://a.b", "RUNAI_TOKEN": TOKEN}) is not None
    with pytest.raises(UserError, match="RUNAI_TOKEN is not"):
        runai_api.control_plane({"RUNAI_BASE_URL": "https://a.b"})
    with pytest.raises(UserError, match="RUNAI_TOKEN is set and RUNAI_BASE_URL is not"):
        runai_api.control_plane({"RUNAI_TOKEN": TOKEN})


# --- begun here -----------------------------------------------------------------------------------------------------


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    made = subprocess.Popen(["sleep", "60"])
    yield made
    made.kill()
    made.wait(10)


def recorded(folder: Path, process: subprocess.Popen[bytes], state: str = "running", **other: Any) -> Path:
    """A run folder as `submit --to local` and training leave it."""
    folder.mkdir(exist_ok=True)
    facts = {**local.about(), "platform": "local", "pid": process.pid, "began": local._began(process.pid), **other}
    (folder / "submitted.json").write_text(json.dumps(facts))
    if state:
        (folder / "manifest.json").write_text(json.dumps({"state": state}))
        (folder / "plan.json").write_text(json.dumps({"batch": {"steps": 300}}))
        (folder / "steps-rank0.jsonl").write_text('{"step": 1}\n{"step": 12}\n{"st')
    return folder


def shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert submitting.status(folder, folder) == 0
    return capsys.readouterr().out


def test_status_of_a_run_on_this_machine(
    tmp_path: Path, process: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert f"starting (process {process.pid})" in shown(recorded(run, process, state=""), capsys)
    said = shown(recorded(run, process), capsys)
    assert f"running, step 12 of 300 (process {process.pid})" in said
    assert f"windlass watch {run}" in said
    process.kill()
    process.wait(10)
    assert "ended without finishing after step 12 of 300" in shown(run, capsys)
    assert "stopped by a signal after step 12 of 300, and saved" in shown(
        recorded(run, process, "stopped by a signal"), capsys
    )
    assert "finished" in shown(recorded(run, process, "finished"), capsys)
    (run / "manifest.json").unlink()
    assert "no sign of life yet" in shown(run, capsys)


@pytest.mark.parametrize("text", ["{broken", "[]", "{}", '{"platform": "moon"}'])
def test_a_record_that_is_none_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "submitted.json").write_text(text)
    with pytest.raises(UserError, match=r"submitted\.json: can't be read(.|\n)*windlass submit writes it anew"):
        submitting.status(tmp_path, tmp_path)


def test_a_number_that_was_given_again_is_another_process(
    tmp_path: Path, process: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    run = recorded(tmp_path / "run", process, began="1")
    assert "ended without finishing" in shown(run, capsys)
    said: list[str] = []
    assert submitting.stop(run, run, said.append) == 0
    assert "has ended already" in said[0]
    assert process.poll() is None, "nobody else's process is signalled"


def test_stop_sends_sigterm_to_the_recorded_process(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    run = recorded(tmp_path / "run", process)
    said: list[str] = []
    assert submitting.stop(run, run, said.append) == 0
    assert process.wait(10) == -signal.SIGTERM
    assert f"process {process.pid} is told to stop" in said[0]
    elsewhere = recorded(tmp_path / "run", process, host="another")
    with pytest.raises(UserError, match=f"started on another, and this is {socket.gethostname()}"):
        submitting.stop(elsewhere, elsewhere, said.append)


def test_a_second_run_is_refused_while_the_first_lives(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    run = demo.make(tmp_path / "a")
    recorded(tmp_path / "a" / "run", process)
    with pytest.raises(UserError, match=f"it runs already, as process {process.pid}"):
        submitting.submit(plan_of(run), "local", say=lambda _: None)


def test_a_run_that_was_started_by_hand_is_told_of_by_its_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = demo.make(tmp_path / "a")
    folder = tmp_path / "a" / "run"
    assert submitting.submit(plan_of(file), "script", say=lambda _: None) == 0
    assert "no sign of life yet" in shown(folder, capsys)
    for verb, options in (("logs", {"follow": False}), ("stop", {})):
        with pytest.raises(UserError) as caught:
            getattr(submitting, verb)(folder, folder, say=lambda _: None, **options)
        assert "started" in str(caught.value)
        assert f"windlass watch {folder}" in caught.value.problems[0].hint
    (folder / "manifest.json").write_text('{"state": "running"}')
    (folder / "steps-rank0.jsonl").write_text('{"step": 3}\n')
    word = {"rank": 1, "host": "node-7", "pid": 5, "time": time.time() - 4, "step": 3, "phase": "forward"}
    (folder / "heartbeat-rank1.json").write_text(json.dumps(word))
    assert "running, step 3 (node-7 showed a sign of life 4 s ago)" in shown(folder, capsys)
    (folder / "heartbeat-rank1.json").write_text(json.dumps({**word, "time": time.time() - 400}))
    assert "ended without finishing after step 3" in shown(folder, capsys)
    (folder / "submitted.json").unlink()  # `windlass train`
    assert "ended without finishing after step 3" in shown(folder, capsys)


def command(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "windlass", *words],
        capture_output=True, text=True, timeout=60, check=False, cwd=folder, env=environ(folder),
    )  # fmt: skip


def test_a_local_run_is_begun_looked_at_and_stopped(tmp_path: Path) -> None:
    """The commands as they are typed, and real training."""
    file = demo.make(tmp_path / "a")
    options: tuple[str, ...] = ("--override", "cluster.gpus_per_node=1", "--override", "train.max_steps=100000")
    options = (*options, "--override", "train.eval_strategy=no", "--override", "train.save_steps=50000")
    begun = command("submit", str(file), "--dry-run", *options, folder=tmp_path)
    assert "nothing is written; it would start: windlass train" in begun.stderr
    assert not (tmp_path / "a" / "run").exists()
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen(
        [sys.executable, "-m", "windlass", "submit", str(file), *options],
        stdout=log, stderr=log, cwd=tmp_path, env={**environ(tmp_path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        path = tmp_path / "a" / "run" / steps.STEPS.format(rank=0)
        while not (path.exists() and path.stat().st_size):
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.1)
        said = command("status", str(file), folder=tmp_path)
        assert f"(process {process.pid})" in said.stdout, said
        stopped = command("stop", str(file), folder=tmp_path)
        assert (stopped.returncode, "is told to stop" in stopped.stderr) == (0, True), stopped
        assert process.wait(60) == 75, (tmp_path / "log").read_text()
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(10)
        log.close()
    said = command("status", str(file), folder=tmp_path)
    assert "stopped by a signal after step" in said.stdout
    assert list((tmp_path / "a" / "run" / "checkpoints").iterdir())
