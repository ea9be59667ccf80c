"""The documentation, run: every command in it parses, every page is in the site, and the tutorials' blocks work."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
import warm
import yaml

from windlass import cli

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import build_site  # noqa: E402 (docs/ is no package)

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
PLANS_ONLY = {"slurm.md"}  # the others train, or take longer than every test run should


def blocks(page: Path, languages: str) -> list[str]:
    """The code of a page: ```bash is run by the tests; ```sh needs a cluster, a GPU or the network."""
    return re.findall(rf"^```(?:{languages})\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands(code: str) -> list[list[str]]:
    """The windlass commands of a block, without what the shell does to them."""
    found = []
    for line in re.findall(r"^ *(?:\$ )?windlass (.*)", code.replace("\\\n", " "), re.MULTILINE):
        words = shlex.split(re.split(r" \|\|? | && | > | 2?> |;", line)[0], comments=True)
        found.append(words)
    return found


def test_every_command_of_the_documentation_parses() -> None:
    group: Any = typer.main.get_command(cli.app)
    top, checked = typer.Context(group, info_name="windlass"), 0
    for page in build_site.pages():
        if page.parent.name != "commands":
            for words in (w for block in blocks(page, "bash|sh|") for w in commands(block) if w and w[0][0] != "-"):
                try:
                    group.get_command(top, words[0]).make_context(words[0], words[1:], parent=top)
                except Exception as error:
                    raise AssertionError(f"{page.name}: windlass {shlex.join(words)}: {error}") from None
                checked += 1
    assert checked > 80


def test_the_sites_menu_has_every_page() -> None:
    """And each page of the menu is there."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    menu = re.findall(r": ([\w/.-]+\.md)$", text, re.MULTILINE)
    there = {str(path.relative_to(ROOT)) for path in build_site.pages()}
    assert set(menu) <= there
    left_out = {name for name in there - set(menu) if not name.startswith("docs/commands/")}
    assert not left_out, f"in no menu of mkdocs.yml: {sorted(left_out)}"
    assert yaml.safe_load(re.sub(r"!!python\S+", "", text))["theme"]["font"] is False, "nothing is fetched"


@pytest.mark.parametrize(
    "page", [page if page.name in PLANS_ONLY else pytest.param(page, marks=pytest.mark.prove) for page in TUTORIALS],
    ids=lambda page: page.stem,
)  # fmt: skip
def test_a_tutorial_works_as_it_is_written(page: Path, tmp_path: Path) -> None:
    """Its blocks, one after the other, in an empty folder with the repository's examples."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "bin").mkdir()
    python = sys.executable if page.name in PLANS_ONLY else warm.python()
    (tmp_path / "bin/windlass").write_text(f'#!/bin/sh\nexec {python} -m windlass "$@"\n')
    (tmp_path / "bin/windlass").chmod(0o755)
    script = "set -euo pipefail\n" + "\n".join(blocks(page, "bash"))
    environ = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=290, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


@pytest.mark.prove
def test_the_site_is_built_and_fetches_nothing() -> None:
    pytest.importorskip("mkdocs", reason="make site installs it")
    subprocess.run([sys.executable, ROOT / "docs/build_site.py"], check=True, timeout=200)
    pages = list((ROOT / "site").rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        fetched = re.findall(
            r'<(?:script|link|img)[^>]*(?:src|href)="?(https?:[^" >]+)', page.read_text(encoding="utf-8")
        )
        assert not [url for url in fetched if "canonical" not in url], f"{page}: {fetched}"
