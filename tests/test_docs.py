"""The generated pages are what the program prints today."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
sys.path.insert(0, str(DOCS))

import generate  # noqa: E402 (docs/ is no package)


@pytest.fixture(scope="module")
def pages() -> dict[Path, str]:
    return generate.pages()


def test_generated_pages_are_up_to_date(pages: dict[Path, str]) -> None:
    stale = [str(path) for path, text in pages.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    assert not stale, f"run `make docs`: {', '.join(stale)} differ from what the program says"


def test_no_page_is_left_of_a_command_that_is_gone(pages: dict[Path, str]) -> None:
    assert set(generate.COMMANDS.glob("*.md")) <= set(pages)


def test_every_command_teaches_by_example(pages: dict[Path, str]) -> None:
    without = [path.stem for path in pages if path.parent == generate.COMMANDS and "windlass" not in path.read_text()]
    assert not without
    for name in generate.commands():
        assert f"windlass {name}" in pages[generate.COMMANDS / f"{name}.md"].split("```")[1], name
