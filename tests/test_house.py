"""Rules of the source, as tests: sizes, light imports, one place for exit codes."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py")) + sorted((ROOT / "examples").rglob("*.py"))
HEAVY = ("torch", "transformers", "peft", "trl", "accelerate", "datasets", "numpy", "pandas")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 700, f"{path} has {len(text.splitlines())} lines: split it by its nouns"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= 120, f"{path}:{node.lineno}: {node.name} has {length} lines"


def imported_by(*arguments: str) -> set[str]:
    """The heavy packages that a command really imports, read from the interpreter itself."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "windlass", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    names = {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    return {name for name in names if name.split(".")[0] in HEAVY}


@pytest.mark.parametrize(
    "command",
    [
        ("--help",),
        ("init",),
        ("schema",),
        ("explain", "fsdp_use_orig_params"),
        ("plan", "examples/mistral-small-4/train.yaml", "--json"),
    ],
    ids=lambda command: command[0],
)
def test_login_node_commands_import_no_torch(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert imported_by(*command) == set()


def test_the_import_guard_sees_torch() -> None:
    """The guard above must be able to fail."""
    script = "import torch"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert any(line.rsplit("|", 1)[-1].strip() == "torch" for line in done.stderr.splitlines())


def exit_codes(source: str) -> set[str]:
    """Exit codes that a module gives numbers of its own, by name."""
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(one, ast.Constant) and type(one.value) is int for one in ast.walk(node.value)
        ):
            found |= {one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)}
    return found & {"FAILED", "USER_INPUT", "RANK_USER_INPUT", "SAVED"}


def test_exit_codes_have_their_numbers_in_one_place() -> None:
    where = [path for path in (ROOT / "src").rglob("*.py") if exit_codes(path.read_text(encoding="utf-8"))]
    assert where == [ROOT / "src" / "windlass" / "errors.py"]
    assert exit_codes("OTHER, SAVED = 1, 75") == {"SAVED"}
    assert exit_codes("FAILED = 'failed'") == set()
