"""Run the tutorials as they are written, and write again the output that they show.

A ```text block shows lines that the ```bash block before it prints, in their order; … stands for others. Figures are of
the machine that ran this: they are written again, and not compared.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r"^```(bash|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
END = "\x1e"  # between the outputs of two blocks
LEFT_OUT = "…"


def run_page(page: Path, folder: Path, python: str = sys.executable) -> list[str]:
    """Run a page's commands in an empty folder with the repository's examples; return what each block printed."""
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "bin").mkdir()
    program = folder / "bin" / "windlass"
    program.write_text(f'#!/bin/sh\nexec {python} -m windlass "$@"\n')
    program.chmod(0o755)
    blocks = [code for language, code in BLOCK.findall(page.read_text(encoding="utf-8")) if language == "bash"]
    script = "set -euo pipefail\nexec 2>&1\n" + "".join(f"{code}printf '{END}'\n" for code in blocks)
    environ = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environ, capture_output=True, text=True, timeout=590, check=False
    )
    if done.returncode:
        raise SystemExit(f"{page.name}: exit code {done.returncode}\n{done.stdout[-3000:]}")
    return done.stdout.split(END)[:-1]


def show_output(page: Path, outputs: list[str]) -> str:
    """Return the page with the lines that its blocks printed; refuse a line that they don't print."""
    printed: list[str] = []
    remaining = iter(outputs)

    def replace(block: re.Match[str]) -> str:
        nonlocal printed
        language, text = block.groups()
        if language == "bash":
            printed = next(remaining).splitlines()
            return block[0]
        lines = [_find_line(line, printed, page) for line in text.splitlines()]
        return "```text\n" + "".join(f"{line}\n" for line in lines) + "```"

    return BLOCK.sub(replace, page.read_text(encoding="utf-8"))


def _find_line(line: str, printed: list[str], page: Path) -> str:
    """Return the next printed line that differs in figures only, and drop those before it."""
    if line == LEFT_OUT:
        return line
    alike = [number for number, other in enumerate(printed) if mask_figures(other) == mask_figures(line)]
    if not alike:
        raise SystemExit(f"{page.name}: not printed: {line}\n\n" + "\n".join(printed))
    found = printed[alike[0]].rstrip()
    del printed[: alike[0] + 1]
    return found


def mask_figures(line: str) -> str:
    """Replace figures, which depend on the machine, and the space around them."""
    return re.sub(r"\s+", " ", re.sub(r"\d[\d.,:e+%-]*", "#", line)).strip()


def main() -> None:
    for page in [ROOT / name for name in sys.argv[1:]] or TUTORIALS:
        with tempfile.TemporaryDirectory() as folder:
            outputs = run_page(page, Path(folder))
        page.write_text(show_output(page, outputs), encoding="utf-8")
        print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
