"""The generated pages equal what the program prints today."""

import re
import sys
from pathlib import Path

import pytest

from windlass import versions

ROOT = Path(__file__).parent.parent
DOCS = Path(__file__).parent.parent / "docs"
sys.path.insert(0, str(DOCS))

import generate  # noqa: E402 (docs/ is no package)


@pytest.fixture(scope="module")
def pages() -> dict[Path, str]:
    return generate.pages()


def test_generated_pages_are_up_to_date(pages: dict[Path, str]) -> None:
    stale = [str(path) for path, text in pages.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    assert not stale, f"run `make docs`: {', '.join(stale)} differ from what the program says"
    assert set(generate.COMMANDS.glob("*.md")) <= set(pages), "a command's page is left, the command is gone"


def test_every_command_has_examples(pages: dict[Path, str]) -> None:
    without = [path.stem for path in pages if path.parent == generate.COMMANDS and "windlass" not in path.read_text()]
    assert not without
    for name in generate.commands():
        assert f"windlass {name}" in pages[generate.COMMANDS / f"{name}.md"].split("```")[1], name


def test_every_kind_of_mark_is_used_and_closed() -> None:
    names = ("README.md", "CONTRIBUTING.md", "docs/plan-example.md", "docs/export.md", "docs/faq.md")
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in names)
    marks = re.findall(r"<!-- (\w+)", text)
    assert {*generate.MARKS, "demo", "end"} == set(marks)
    assert marks.count("end") * 2 == len(marks)


def test_versions_agree() -> None:
    """Of the table that docs, pyproject and checks have, the pins of the environments that tests run in."""
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    oldest, newest = (generate.read_pins(end) for end in ("OLDEST", "NEWEST"))
    assert oldest.keys() == newest.keys() == versions.TESTED.keys()
    for name, (supported, ran) in versions.TESTED.items():
        assert pins[name] == ran
        lowest = supported.partition(",")[0].removeprefix(">=")
        assert re.fullmatch(rf"{re.escape(lowest)}(\.0)*", oldest[name]), name
        assert not versions.is_newer(name, newest[name])
        assert not versions.is_older(newest[name], ran)


def test_prose_is_wrapped() -> None:
    """Within 120 columns, except tables and commands' output; and the README is readable in ten minutes."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
    for path in (*ROOT.glob("*.md"), *DOCS.glob("t*/*.md"), *DOCS.glob("*.md"), *(ROOT / "examples").rglob("*.md")):
        prose = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        long = [line for line in prose.splitlines() if len(line) > 120 and not line.startswith(("|", "<!--"))]
        assert not long, f"{path}: {long[0]}"


def test_links_lead_somewhere() -> None:
    for path in (*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md")):
        for link in re.findall(r"\]\((?!https?:)([^)]+)\)", path.read_text(encoding="utf-8")):
            name, _, anchor = link.partition("#")
            page = path.parent / name if name else path
            assert page.exists(), f"{path}: {link}"
            heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
            assert not anchor or anchor in [
                re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads
            ], link


def test_nothing_says_to_install_windlass_from_an_index() -> None:
    """The name is not this project's: a folder, a wheel or a URL follows."""
    wrong = re.compile(r"(pip|uv) (tool )?install (-\S+ )*['\"]?windlass(\[[\w,]+\])?['\"]?(?! ?@)(?=[\s'\",)`]|$)")
    assert wrong.search("pip install 'windlass[train]'")
    assert not wrong.search("pip install 'windlass[train] @ file:///here'")
    files = [file for top in ("docs", "src", "examples") for file in (ROOT / top).rglob("*")]
    texts = (file for file in files if file.suffix in (".md", ".py", ".toml", ".yaml", ".j2", ".sh"))
    assert [file for file in (ROOT / "README.md", *texts) if wrong.search(file.read_text())] == []


def test_readme_figures_of_accuracy_are_those_of_the_page() -> None:
    page, readme = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/accuracy.md", "README.md"))
    (row,) = re.findall(r"^\| \*\*not fitted\*\* \| (.*) \|$", page, re.MULTILINE)
    memory_rows, memory, _, speed_rows, speed, *_ = (cell.strip().replace("%", " %") for cell in row.split("|"))
    assert f"({memory_rows} rows) | off by {memory}, median" in readme
    assert f"({speed_rows} rows) | off by {speed}, median" in readme
