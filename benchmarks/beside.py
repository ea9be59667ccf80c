"""Can one environment hold windlass and another tool? Each tool's newest release, resolved by pip in a dry run.

    python benchmarks/beside.py        a Markdown table; downloads metadata, or the wheels of an index without it
    python benchmarks/beside.py vllm   one tool

Nothing is installed. A tool that the index can't resolve even alone is shown so.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WINDLASS = f"{Path(__file__).resolve().parent.parent}[train]"
TOOLS = ("vllm", "unsloth", "nemo_automodel", "trl", "ms-swift", "axolotl")
SHOWN = ("torch", "transformers", "datasets", "peft")
SECONDS = 600  # for each dry run: of an index without metadata pip downloads wheels
PIP = (sys.executable, "-m", "pip")


def find_newest(tool: str) -> str:
    done = subprocess.run([*PIP, "index", "versions", tool], capture_output=True, text=True, timeout=SECONDS)
    found = re.match(r"\S+ \(([^)]+)\)", done.stdout)
    return found[1] if found else ""


def resolve(*wanted: str) -> tuple[dict[str, str], str]:
    """Return the versions that pip would install, by name; or why it can't."""
    report = Path(tempfile.mkdtemp()) / "report.json"
    command = [*PIP, "install", "--dry-run", "--ignore-installed", "--prefer-binary", "--report", str(report)]
    try:
        done = subprocess.run([*command, *wanted], capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {}, f"pip hasn't found out within {SECONDS // 60} minutes"
    if done.returncode == 0:
        chosen = (entry["metadata"] for entry in json.loads(report.read_text())["install"])
        return {one["name"].lower(): one["version"] for one in chosen}, ""
    needs = re.search(r"The conflict is caused by:\n(.*?)\n\n", done.stdout, re.DOTALL)
    missing = re.search(r"No matching distribution found for (.*)", done.stderr)
    if needs:
        return {}, "; ".join(line.strip() for line in needs[1].splitlines() if "==" in line)
    return {}, missing[0] if missing else done.stderr.strip().splitlines()[-1]


def main() -> None:
    print(f"{time.strftime('%Y-%m-%d')}, Python {sys.version.split()[0]}\n")
    print(f"| beside | {' | '.join(SHOWN)} |\n|---{'|---' * len(SHOWN)}|")
    for tool in sys.argv[1:] or TOOLS:
        newest = f"{tool}=={find_newest(tool)}"
        chosen, why = resolve(WINDLASS, newest)
        if why and (alone := resolve(newest)[1]):
            why = f"not resolved alone: {alone}"
        print(f"| {newest} | {why or ' | '.join(chosen.get(name, '-') for name in SHOWN)} |", flush=True)


if __name__ == "__main__":
    main()
