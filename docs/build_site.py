"""Build the documentation's site: copy the Markdown files and what they link to side by side, then call mkdocs.

python docs/build_site.py   # site/index.html, which needs neither network nor server
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "build" / "site"


def pages() -> list[Path]:
    """Return every page, as links refer to it."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


def linked(page: Path) -> Iterator[Path]:
    """Return the repository's files that a page links to or shows."""
    for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text(encoding="utf-8")):
        target = (page.parent / link).resolve()
        if target.suffix != ".md" and target.exists():
            yield target


def stage() -> None:
    shutil.rmtree(SOURCE, ignore_errors=True)
    for path in {*pages(), ROOT / "docs/iframe-worker.js", *(target for page in pages() for target in linked(page))}:
        copy = SOURCE / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "*.md"))
            listing = "".join(f"- [{each.name}]({each.name})\n" for each in sorted(copy.iterdir()) if each.is_file())
            (copy / "index.md").write_text(f"# {path.relative_to(ROOT)}\n\n{listing}", encoding="utf-8")
        else:
            shutil.copyfile(path, copy)
    for page in SOURCE.rglob("*.md"):
        parts = re.split(r"(\]\((?!https?:|#)[^)#\s]+\))", page.read_text(encoding="utf-8"))
        for number, part in enumerate(parts):  # a link to a folder: to its index, which lists it
            if number % 2 and (page.parent / part[2:-1]).is_dir():
                parts[number] = f"{part[:-1].rstrip('/')}/index.md)"
        page.write_text("".join(parts), encoding="utf-8")


if __name__ == "__main__":
    stage()
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--config-file",
        str(ROOT / "mkdocs.yml"),
    ]
    sys.exit(subprocess.run(command, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}).returncode)
