"""Run:ai: the command and the REST body say the same and are what its own models take; a real server answers."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from launch_jobs import EXAMPLES, FULL, SITE, calls, environ, example, lost, plan_of, program
from runai.models.distributed_creation_request import DistributedCreationRequest
from runai.models.training_creation_request import TrainingCreationRequest

from windlass.errors import RunError, UserError
from windlass.launch import runai
from windlass.launch import submit as submitting
from windlass.launch.job import job_of
from windlass.launch.runai import ControlPlane, control_plane
from windlass.launch.submit import render


@pytest.mark.parametrize("site", [SITE, FULL], ids=["site", "full"])
def test_the_rest_body_is_what_runais_own_models_take(site: tuple[str, ...]) -> None:
    plan, overrides, _ = example("train", site)
    body = runai.payload(job_of(plan, overrides=overrides))
    made = DistributedCreationRequest.from_dict(body)
    assert made is not None
    assert made.spec is not None
    made.spec.slots_per_worker = made.spec.ssh_auth_mount_path = None  # put there by the client, for MPI
    assert lost(body, json.loads(made.to_json())) == []
    body["spec"]["gpuDevices"] = 1
    made = DistributedCreationRequest.from_dict(body)
    assert made is not None
    assert lost(body, json.loads(made.to_json())) == [".spec.gpuDevices: 1 -> None"], "it would be noticed"


def test_one_node_is_a_standard_training() -> None:
    plan, overrides, _ = example("two-gpus", (*SITE, "cluster.nodes=1", "cluster.gpus_per_node=2"))
    job = job_of(plan, overrides=overrides)
    words = runai.command(job)
    assert words[:4] == ["runai", "training", "standard", "submit"]
    assert not {"--workers", "--clean-pod-policy"} & set(words)
    assert not any(word.startswith("--master-") for word in words)
    body = runai.payload(job)
    assert "numWorkers" not in body["spec"]
    made = TrainingCreationRequest.from_dict(body)
    assert made is not None
    assert lost(body, json.loads(made.to_json())) == []
    assert runai.api_path(1) == "/api/v1/workloads/trainings"


def test_the_script_runs_the_very_command(tmp_path: Path) -> None:
    odd = "a b'c\"$(x)`y`\nä,€"
    plan, overrides, _ = example(
        "train", (*SITE, f"cluster.annotations={{odd: {json.dumps(odd, ensure_ascii=False)}}}")
    )
    fakes, script = tmp_path / "bin", tmp_path / "submit.sh"
    program(fakes, "runai", f'echo "$MSYS_NO_PATHCONV $MSYS2_ARG_CONV_EXCL" >{tmp_path}/msys')
    script.write_text(render(plan, "runai", overrides=overrides)["submit.sh"])
    subprocess.run(["bash", script], env=environ(fakes), check=True, timeout=30)
    words = runai.command(job_of(plan, overrides=overrides))
    assert calls(fakes, "runai") == words[1:]
    assert f"odd={odd}" in words
    assert (tmp_path / "msys").read_text() == "1 *\n", "Git Bash leaves paths alone"
    assert words[words.index("--workers") + 1] == "2", "a master and two workers"
    for option in ("gpu-devices-request", "cpu-memory-limit", "restart-policy", "extended-resource"):
        assert words[words.index(f"--{option}") + 1] == words[words.index(f"--master-{option}") + 1]
    shellcheck = [str(Path(sys.executable).parent / "shellcheck"), "--exclude=SC2016", str(script)]
    assert subprocess.run(shellcheck, capture_output=True, text=True, check=False, timeout=60).stdout == ""


@pytest.mark.parametrize(
    ("without", "more", "what"),
    [
        ("cluster.project", (), "no Run:ai project"),
        ("cluster.image", (), "no container image"),
        ("cluster.volumes", ("cluster.volumes=[{claim: a, path: '/data,b'}]",), "holds a comma"),
        ("", ("cluster.priority_class=gold",), "'gold' is no priority of Run:ai"),
    ],
)
def test_what_runai_cannot_take_is_refused(without: str, more: tuple[str, ...], what: str) -> None:
    overrides = (*(word for word in SITE if not (without and word.startswith(without))), *more)
    plan, _, _ = example("train", overrides)
    with pytest.raises(UserError) as caught:
        render(plan, "runai", overrides=overrides)
    assert what in str(caught.value)
    assert all(problem.hint for problem in caught.value.problems)


def sent(folder: Path, *more: str, **options: Any) -> list[str]:
    """Everything that a submission from a machine with the pods' volume reported."""
    words = [word for word in SITE if not word.startswith("cluster.volumes")]
    overrides = (*words, f"cluster.volumes=[{{claim: a, path: {folder}}}]", f"train.output_dir={folder}/run", *more)
    said: list[str] = []
    plan = plan_of(EXAMPLES / "train.yaml", overrides)
    assert submitting.submit(plan, "runai", overrides=overrides, say=said.append, **options) == 0
    return said


def test_the_client_is_called_if_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes, run = tmp_path / "bin", tmp_path / "run"
    monkeypatch.setenv("PATH", f"{fakes}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    assert "runai is not installed here" in "\n".join(sent(tmp_path))
    program(fakes, "runai", "exit 0")
    plan, overrides, _ = example("train")  # whose /data is not on this machine
    said: list[str] = []
    if not Path("/data").exists():
        assert submitting.submit(plan, "runai", overrides=overrides, say=said.append) == 0
        assert "is not here: copy launch.sh, accelerate.yaml, run.yaml there" in "\n".join(said)
        assert (tmp_path / "mistral4small-lora-fsdp-2xH200-job" / "submit.sh").stat().st_mode & 0o111
        assert not calls(fakes, "runai")
    sent(tmp_path, follow=True)
    words = calls(fakes, "runai")
    assert words[:3] == ["training", "pytorch", "submit"]
    assert words[words.index("--") : words.index("--") + 3] == ["--", "bash", f"{run}/launch.sh"]
    assert words[-5:] == ["logs", "run", "--project", "research", "--follow"]
    assert submitting.status(run, run) == 0
    assert calls(fakes, "runai")[-4:] == ["describe", "run", "--project", "research"]
    assert submitting.logs(run, run, follow=False, say=said.append) == 0
    assert calls(fakes, "runai")[-4:] == ["logs", "run", "--project", "research"]
    assert submitting.stop(run, run, said.append) == 0
    assert calls(fakes, "runai")[-4:] == ["delete", "run", "--project", "research"]
    program(fakes, "runai", "echo 'not logged in' >&2; exit 3")
    with pytest.raises(RunError, match="runai ended with 3"):
        sent(tmp_path)


# --- the REST API -----------------------------------------------------------------------------------------------------

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
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        if self.is_allowed(asked.path):
            assert asked.path == "/api/v1/org-unit/projects"
            name = parse_qs(asked.query)["filterBy"][0].removeprefix("name==")
            self.answer(200, {"projects": [one for one in self.server.projects if one["name"].startswith(name)]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.is_allowed(self.path):
            assert self.path == "/api/v1/workloads/distributed"
            assert self.headers["Content-Type"] == "application/json"
            # raises for a type or a value that Run:ai does not take
            assert DistributedCreationRequest.from_dict(body) is not None
            self.server.bodies.append(body)
            self.answer(202, {"workloadId": "w-1", "name": body["name"]})

    def is_allowed(self, path: str) -> bool:
        self.server.asked.append(path)
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.answer(401, {"message": "who are you?"})
        elif self.server.refusal and path.startswith("/api/v1/workloads"):
            self.answer(self.server.refusal[0], {"message": self.server.refusal[1]})
        else:
            return True
        return False

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


def test_the_api_gets_the_payload_with_the_projects_numbers(tmp_path: Path, server: Server) -> None:
    plane = ControlPlane(server.url, TOKEN)
    assert "run is created, workload w-1" in (said := sent(tmp_path, api=True, plane=plane))
    (body,) = server.bodies
    assert (body["projectId"], body["clusterId"]) == ("17", "c-1")
    assert body["spec"]["numWorkers"] == 2
    assert body["spec"]["args"] == f"{tmp_path}/run/launch.sh"
    assert {"name": "HF_TOKEN", "secret": {"name": "hub", "key": "token"}} in body["spec"]["environmentVariables"]
    assert json.loads((tmp_path / "run" / "payload.json").read_text()) == body
    record = json.loads((tmp_path / "run" / "submitted.json").read_text())
    assert (record["platform"], record["workload"], record["project"]) == ("runai", "w-1", "research")
    written = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert TOKEN not in written + "".join(said) + repr(plane)


def test_without_a_control_plane_the_payload_is_left_with_the_next_step(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = " ".join(sent(tmp_path, api=True))
    for part in ("RUNAI_BASE_URL and RUNAI_TOKEN are not set", "POST it to /api/v1/workloads/distributed"):
        assert part in said
    assert json.loads((tmp_path / "run" / "payload.json").read_text())["projectId"] == "PROJECT_ID"
    sent(tmp_path, api=True, plane=ControlPlane(server.url, TOKEN), dry_run=True)
    assert not server.asked, "a dry run asks nobody"
    plan, overrides, _ = example("train")
    assert "payload.json" not in render(plan, "runai", overrides=overrides)
    with pytest.raises(UserError, match="kubernetes has no API that windlass can use"):
        render(plan, "kubernetes", overrides=overrides, api=True)


@pytest.mark.parametrize(
    ("code", "message", "hint"),
    [
        (409, "a workload of this name exists", "windlass stop RUN"),
        (403, "no role", "who assigns roles"),
        (500, "", ""),
    ],
)
def test_what_the_server_refuses_is_shown_verbatim(
    tmp_path: Path, server: Server, code: int, message: str, hint: str
) -> None:
    server.refusal = (code, message)
    with pytest.raises(RunError) as caught:
        sent(tmp_path, api=True, plane=ControlPlane(server.url, TOKEN))
    assert f'{code}: {{"message": "{message}"}}' in str(caught.value)
    assert f"POST {server.url}/api/v1/workloads/distributed" in str(caught.value)
    assert hint in caught.value.problems[0].hint
    assert TOKEN not in str(caught.value)
    assert not (tmp_path / "run" / "submitted.json").exists()


def test_a_wrong_token_or_project_and_a_server_that_is_elsewhere_or_gone(tmp_path: Path, server: Server) -> None:
    plane = ControlPlane(server.url, TOKEN)
    with pytest.raises(RunError, match=r"401: .*who are you(.|\n)*runai auth get-token"):
        sent(tmp_path, api=True, plane=ControlPlane(server.url, "wrong"))
    with pytest.raises(UserError, match="no project 'resea' that this token may see") as caught:
        sent(tmp_path, "cluster.project=resea", api=True, plane=plane)
    assert "cluster.project" in caught.value.problems[0].where
    server.projects.append({**PROJECT, "clusterId": "c-2"})
    with pytest.raises(UserError, match="on several clusters: c-1, c-2"):
        sent(tmp_path, api=True, plane=plane)
    server.projects.pop()
    server.refusal = (302, "elsewhere")  # the token goes to no other address
    with pytest.raises(RunError, match="302"):
        sent(tmp_path, api=True, plane=plane)
    assert not server.bodies
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(RunError, match=r"no answer: (.|\n)*Connection refused(.|\n)*is RUNAI_BASE_URL right"):
        sent(tmp_path, api=True, plane=ControlPlane(f"http://127.0.0.1:{port}", TOKEN))


def test_the_environment_sets_both_or_nothing_and_https() -> None:
    assert control_plane({}) is None
    assert control_plane({"RUNAI_BASE_URL": "https://a.b", "RUNAI_TOKEN": TOKEN}) is not None
    for there, missing in (("RUNAI_BASE_URL", "RUNAI_TOKEN"), ("RUNAI_TOKEN", "RUNAI_BASE_URL")):
        with pytest.raises(UserError, match=f"{there} is set and {missing} is not"):
            control_plane({there: "https://a.b"})
    for url in ("http://company.run.ai", "company.run.ai", "file:///etc/passwd", "https://"):
        with pytest.raises(UserError, match="no address of a control plane"):
            ControlPlane(url, TOKEN)
