"""Writes the pages that are generated: one per command from its help, and the published recipe's claims
held against the plan. `make docs` writes them; a test fails when a committed page differs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
COMMANDS = ROOT / "docs" / "commands"


def windlass(*arguments: str) -> str:
    """What the command prints, at a fixed width and without colour."""
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-m", "windlass", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return "\n".join(line.rstrip() for line in (done.stdout + done.stderr).strip().splitlines())


def commands() -> list[str]:
    from windlass.cli import app

    return sorted(command.name or command.callback.__name__ for command in app.registered_commands if command.callback)


def command_page(name: str) -> str:
    origin = f"Generated from `windlass {name} --help` by `make docs`."
    return f"# windlass {name}\n\n{origin}\n\n```\n{windlass(name, '--help')}\n```\n"


def index_page() -> str:
    links = "".join(f"- [windlass {name}]({name}.md)\n" for name in commands())
    return f"# Commands\n\n{links}\n```\n{windlass('--help')}\n```\n"


def with_output(text: str) -> str:
    """The page with what each `<!-- windlass … -->` in it prints, in the block that follows.

    `<!-- windlass …: TITLE -->` takes only the table of that title, or the lines that begin so, out of the output.
    """

    def block(match: re.Match[str]) -> str:
        command, title = match["command"], match["title"]
        shown = windlass(*shlex.split(command)[1:])
        marked = f"{command}: {title}" if title else command
        printed = table(shown, title) if title else shown
        return f"<!-- {marked} -->\n```\n$ {command}\n{printed}\n```\n<!-- end -->"

    pattern = r"<!-- (?P<command>windlass [^:\n]*?)(: (?P<title>[^\n]*?))? -->\n.*?<!-- end -->"
    return re.sub(pattern, block, text, flags=re.DOTALL)


def table(shown: str, title: str) -> str:
    """From the title to the blank line below the rows; a line that is no title stands alone."""
    lines = shown.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(title))
    if start + 1 < len(lines) and lines[start + 1]:
        return lines[start]
    blanks = [number for number in range(start, len(lines)) if not lines[number]] + [len(lines)] * 2
    return "\n".join(lines[start : blanks[1]])


def pages() -> dict[Path, str]:
    """Every generated page and its text."""
    sys.path.insert(0, str(ROOT / "docs"))
    from claims import page

    made = {COMMANDS / f"{name}.md": command_page(name) for name in commands()}
    for page_with_output in (ROOT / "README.md", ROOT / "docs" / "layouts.md"):
        made[page_with_output] = with_output(page_with_output.read_text(encoding="utf-8"))
    return {**made, COMMANDS / "README.md": index_page(), ROOT / "docs" / "recipe-claims.md": page()}


def main() -> None:
    COMMANDS.mkdir(parents=True, exist_ok=True)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
