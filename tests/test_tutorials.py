"""The documentation, run: every command parses, every page is on the site, and the tutorials' blocks work."""

import ast
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromium
import pytest
import typer.main
import warm
import yaml

from windlass import cli
from windlass.runfile.fields import ScriptRun
from windlass.runfile.names import RENAMED
from windlass.runfile.reference import list_keys

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import build_site  # noqa: E402 (docs/ is no package)
import run_tutorials  # noqa: E402

PLANS_ONLY = {"slurm.md"}  # the others train, or take longer than every test run should


def blocks(page: Path, languages: str) -> list[str]:
    """Return the code of a page: tests run ```bash; ```sh needs a cluster, a GPU or the network."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [code for language, code in found if language in languages.split("|")]


def commands(code: str) -> list[list[str]]:
    """Return the windlass commands of a block, without the shell's syntax."""
    found = []
    for line in re.findall(r"^ *(?:\$ )?windlass (.*)", code.replace("\\\n", " "), re.MULTILINE):
        words = shlex.split(re.split(r" \|\|? | && | > | 2?> |;", line)[0], comments=True)
        found.append(words)
    return found


GROUP: Any = typer.main.get_command(cli.app)


def parse(words: list[str], page: Path) -> None:
    """Parse with the command line's own parser; nothing is run."""
    top = typer.Context(GROUP, info_name="windlass")
    try:
        GROUP.get_command(top, words[0]).make_context(words[0], words[1:], parent=top)
    except Exception as error:
        raise AssertionError(f"{page.name}: windlass {shlex.join(words)}: {error}") from None


def test_every_command_of_the_documentation_parses() -> None:
    checked = 0
    for page in build_site.pages():
        if page.parent.name != "commands":
            for words in (w for block in blocks(page, "bash|sh|") for w in commands(block) if w and w[0][0] != "-"):
                parse(words, page)
                checked += 1
    assert checked > 80


def texts(module: Path) -> Iterator[str]:
    """Return what a module may print: its strings without docstrings, with 1 for placeholders."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    silent = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    silent |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "1" for part in node.values)


@pytest.mark.takes("parses every hint in the source")
def test_hints_name_existing_keys_and_commands() -> None:
    """Each command in a message parses as printed, and each key named in it is a key of the run file."""
    source, checked, seen = ROOT / "src" / "windlass", 0, 0
    known = {*list_keys(), *list_keys(ScriptRun), *RENAMED}
    names = "|".join(sorted({key.partition(".")[0] for key in list_keys(ScriptRun) + list_keys() if "." in key}))
    printed = [(path, text) for path in source.rglob("*.py") for text in texts(path)]
    printed += [(path, path.read_text(encoding="utf-8")) for path in (source / "runfile").glob("*.toml")]
    for path, text in printed:
        for command in re.findall(r"(?<!#) `windlass ([^`]+)`", f" {text}"):
            if "KEY" not in command and "…" not in command.split()[0]:
                parse(shlex.split(command.split(" > ")[0]), path)
                checked += 1
        for key in re.findall(rf"\b(?:set|write|raise|lower|give|remove|see) ((?:{names})\.[a-z_.]+[a-z_])\b", text):
            assert key in known, f"{path.name}: there is no key {key}: {text[:120]}"
            seen += 1
    assert checked > 60
    assert seen > 70


def test_site_menu_lists_every_page() -> None:
    """And each page of the menu exists."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    menu = re.findall(r": ([\w/.-]+\.md)$", text, re.MULTILINE)
    there = {str(path.relative_to(ROOT)) for path in build_site.pages()}
    assert set(menu) <= there
    left_out = {name for name in there - set(menu) if not name.startswith("docs/commands/")}
    assert not left_out, f"in no menu of mkdocs.yml: {sorted(left_out)}"
    assert yaml.safe_load(re.sub(r"!!python\S+", "", text))["theme"]["font"] is False, "nothing is fetched"


@pytest.mark.parametrize(
    "page",
    [
        page if page.name in PLANS_ONLY else pytest.param(page, marks=pytest.mark.prove)
        for page in run_tutorials.TUTORIALS
    ],
    ids=lambda page: page.stem,
)
def test_tutorials_run_as_written(page: Path, tmp_path: Path) -> None:
    """Its blocks run one after the other, and print what the page shows, except figures."""
    python = sys.executable if page.name in PLANS_ONLY else warm.python()
    outputs = run_tutorials.run_page(page, tmp_path, python)
    run_tutorials.show_output(page, outputs)


def test_output_that_a_tutorial_shows_and_no_command_prints_is_refused(tmp_path: Path) -> None:
    """Figures are those of the last run."""
    page = tmp_path / "page.md"
    page.write_text("```bash\necho loss 1.5; echo more; echo rank 3\n```\n\n```text\nloss 2.5\n…\nrank 4\n```\n")
    shown = run_tutorials.show_output(page, ["loss 1.5\nmore\nrank 3\n"])
    assert shown.endswith("```text\nloss 1.5\n…\nrank 3\n```\n")
    for printed in ("losses 1.5\nrank 3\n", "rank 3\nloss 1.5\n"):
        with pytest.raises(SystemExit, match=r"page.md: not printed: (loss|rank)"):
            run_tutorials.show_output(page, [printed])


@pytest.fixture(scope="module")
def _site() -> None:
    pytest.importorskip("mkdocs", reason="make site installs it")
    subprocess.run([sys.executable, ROOT / "docs/build_site.py"], check=True, timeout=200)


@pytest.mark.prove
@pytest.mark.usefixtures("_site")
def test_the_site_is_built_and_fetches_nothing() -> None:
    pages = list((ROOT / "site").rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        fetched = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="?(https?:[^" >]+)', page.read_text("utf-8"))
        assert not [url for url in fetched if "canonical" not in url], f"{page}: {fetched}"


@pytest.mark.prove
@pytest.mark.skipif(chromium.PROGRAM is None, reason="no Chromium on this machine (apt-get install chromium)")
@pytest.mark.usefixtures("_site")
def test_the_site_is_searched_from_the_disk() -> None:
    browser = chromium.Chromium()
    try:
        browser.open(ROOT / "site/docs/limits.html")
        browser.run("document.querySelector('.md-search__input').focus()")
        browser.send("Input.insertText", text="packing")
        results = "[...document.querySelectorAll('.md-search-result__link')].map(each => each.href)"
        until = time.monotonic() + 120
        while not (found := browser.run(results)) and time.monotonic() < until:
            time.sleep(0.2)
        assert any("docs/data.html" in link for link in found), found
        assert not [url for url in browser.requests if not url.startswith(("file:", "data:"))]
    finally:
        browser.close()
