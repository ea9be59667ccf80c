"""A new user's path: the wheel, the versions, the bug report without secrets."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from report_runs import write

import windlass
from windlass import cli

ROOT = Path(__file__).parent.parent
# Each planted where a user might have it; none may be in the archive.
SECRETS = {
    "hub": "hf_" + "AbCdEfGhIj" * 3,
    "wandb": "0123456789abcdef0123456789abcdef01234567",
    "variable": "correct-horse-battery",
    "site": "value-of-a-variable-of-the-site",
    "url": "user:pa55w0rd",
    "signed": "sv2026sig99",
    "bearer": "abcdefghijklmnop.qrstuv",
    "prompt": "Dear Mrs. Anders, your diagnosis",
    "row": "a row of the data set",
}


def test_versions_that_matter(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["version", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert {"windlass", "python", "torch", "transformers", "peft", "cuda", "driver", "gpus", "os"} <= found.keys()
    assert found["windlass"] == windlass.__version__
    assert platform.release() in found["os"]
    assert (found["cuda"] is None) == ("+cpu" in found["torch"])


def planted(folder: Path) -> Path:
    """A finished run with a secret in every place where one may be."""
    run = write(folder, ranks=1, count=30)
    manifest: dict[str, Any] = json.loads((run / "manifest.json").read_text())
    manifest["run"] |= {
        "cluster": {"env": {"HF_TOKEN": SECRETS["hub"], "SITE": SECRETS["site"], "NCCL_DEBUG": "WARN"}},
        "data": {"dataset_name_or_path": f"https://{SECRETS['url']}@host.example/rows.jsonl?sig={SECRETS['signed']}"},
        "tracking": {"api_key": SECRETS["wandb"]},
    }
    manifest["run"]["train"]["sample"] = {"prompts": [SECRETS["prompt"]]}
    (run / "manifest.json").write_text(json.dumps(manifest))
    audit = json.loads((run / "data.json").read_text())
    (run / "data.json").write_text(json.dumps({**audit, "samples": [SECRETS["row"]], "notes": [SECRETS["row"]]}))
    (run / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": SECRETS["prompt"], "text": SECRETS["row"]}))
    (run / "rank0.log").write_text(
        f"wandb login {SECRETS['wandb']}\nAuthorization: Bearer {SECRETS['bearer']}\nexport HF_TOKEN={SECRETS['hub']}\n"
        f"cloning https://{SECRETS['url']}@git.example/x.git\nGET /x?token={SECRETS['signed']}&a=1\n"
        f"the login failed for {SECRETS['variable']}\nNCCL WARN timeout after 600 s\n"
    )
    return run


def test_a_bug_report_has_no_secrets_and_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DATABASE_PASSWORD", SECRETS["variable"])
    run = planted(tmp_path / "run")
    before = "".join(path.read_text() for path in run.iterdir())
    assert not [name for name, secret in SECRETS.items() if secret not in before], "each is there to be found"
    monkeypatch.chdir(tmp_path)
    for other, what in ((tmp_path, "contains no files of a run"), (tmp_path / "none", "there is no such run folder")):
        with pytest.raises(SystemExit):
            cli.main(["bug-report", str(other)])
        assert f"{other}: {what}" in capsys.readouterr().err, "no list of somebody's files"
    with pytest.raises(SystemExit):
        cli.main(["bug-report", str(run)])
    done = capsys.readouterr()
    assert done.out == "bug-report-run.tar.gz\n"
    with tarfile.open("bug-report-run.tar.gz") as archive:
        files = {entry.name: archive.extractfile(entry).read().decode() for entry in archive}  # type: ignore[union-attr]
    assert all(name in done.err for name in files), "what is in it is printed"
    packed = "".join(files.values())
    assert [name for name, secret in SECRETS.items() if secret in packed] == []
    assert {"run/versions.json", "run/manifest.json", "run/plan.json", "run/load.json", "run/rank0.log"} <= files.keys()
    assert "run/samples.jsonl" not in files
    assert "NCCL WARN timeout after 600 s" in files["run/rank0.log"], "what explains the run is kept"
    kept = json.loads(files["run/manifest.json"])["run"]
    assert kept["cluster"]["env"]["NCCL_DEBUG"] == "WARN"
    assert kept["train"]["max_grad_norm"] == 0.5
    assert len(files["run/steps-rank0.jsonl"].splitlines()) == 30


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build it without the checkout's git and without network."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = "import setuptools.build_meta as b; print(b.build_wheel('dist'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder / "dist" / done.stdout.splitlines()[-1]


def test_the_wheel_has_every_file(wheel: Path) -> None:
    source = ROOT / "src"
    ours = {path for path in (source / "windlass").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path.suffix for path in ours} >= {".toml", ".json", ".jinja", ".css", ".js", ".sh", ".j2", ".yaml"}
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert sorted({str(path.relative_to(source)) for path in ours} - packed) == []
    assert f"windlass-{windlass.__version__}-py3-none-any.whl" == wheel.name


@pytest.mark.prove
def test_an_installed_wheel_runs_the_demo_in_an_empty_folder_as_the_readme_shows(wheel: Path, tmp_path: Path) -> None:
    """Nothing of the checkout is on the path. Word for word, except figures, which depend on the machine."""
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    install = ["pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run([sys.executable, "-m", *install], check=True, timeout=120)
    environ = {**os.environ, "PYTHONPATH": str(site), "HOME": str(tmp_path)}
    where = subprocess.run(
        [sys.executable, "-c", "import windlass; print(windlass.__file__)"],
        cwd=empty, env=environ, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert where.stdout.startswith(str(site))
    output = ""
    for arguments in (["demo"], ["report", "demo-run/run"]):
        command = [sys.executable, "-m", "windlass", *arguments]
        done = subprocess.run(command, cwd=empty, env=environ, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
        output += done.stderr + done.stdout
    assert (empty / "demo-run/run/final/adapter_model.safetensors").exists()
    first, *_, last = json.loads((empty / "demo-run/run/report.json").read_text())["runs"][0]["answers"]
    assert first == {"step": 0, "right": 0, "of": 32}
    assert last["right"] >= 28, "LoRA taught it to translate"
    shown = re.findall(r"<!-- demo -->\n```\n(.*?)\n```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    printed = [mask(line) for line in output.splitlines()]
    for line in (mask(line) for line in shown.splitlines() if line != "…"):
        assert line in printed, line
        printed = printed[printed.index(line) + 1 :]


def mask(line: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"\d[\d.,:e+-]*", "#", line)).strip()
