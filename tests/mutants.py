"""`make mutants`: plant faults in the source at random, one at a time, and see which the tests near them catch.

    python tests/mutants.py [--count 60] [--seed N] [--only src/windlass/plan]

A fault is one operator, condition, constant or call changed in a copy of the source. It is caught if a test of `make
test` in a file near it (tests/near.py) fails. One that survives needs an assertion, or changes nothing: read it.
"""

import argparse
import ast
import itertools
import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import near

SECONDS = 420  # for the tests of one fault
COMPARED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "in": "not in", "not in": "in"}
OTHERS = {"is": "is not", "is not": "is", "and": "or", "or": "and", "+": "-", "-": "+", "*": "/", "/": "*", "//": "*"}
SWAPPED = COMPARED | OTHERS
ON_GPUS = "triton"  # files with this word have code that no CPU runs: `make prove-cuda`


@dataclass(frozen=True)
class Fault:
    """Bytes of a file that are replaced."""

    path: Path
    line: int
    start: int
    end: int
    text: bytes

    def describe(self, source: bytes) -> str:
        before = source[self.start : self.end].decode()
        shown = " ".join(f"{before} -> {self.text.decode()}".split())
        return f"{self.path.relative_to(near.ROOT)}:{self.line}: {shown[:90]}"


def list_faults(path: Path) -> Iterator[Fault]:
    source = path.read_bytes()
    starts = [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def replace(node: ast.expr | ast.stmt, text: str) -> Fault:
        return Fault(path, node.lineno, *span(node), text.encode())

    def swap(left: ast.expr, right: ast.expr) -> Iterator[Fault]:
        start, end = span(left)[1], span(right)[0]
        written = source[start:end].decode()
        operator = " ".join(written.strip("() \n").split())
        if operator in SWAPPED:
            yield Fault(path, left.lineno, start, end, written.replace(operator, SWAPPED[operator]).encode())

    tree = ast.parse(source)
    # Python 3.11 doesn't say where in an f-string an expression is.
    formatted = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in formatted:
            continue
        match node:
            case ast.Compare(left=left, comparators=[right]):
                yield from swap(left, right)
            case ast.BoolOp(values=[left, right, *_]) | ast.BinOp(left=left, right=right):
                yield from swap(left, right)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield replace(node, source[slice(*span(operand))].decode())
            case ast.If(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.Name):
                yield replace(test, f"not ({source[slice(*span(test))].decode()})")
            case ast.Constant(value=bool(value)):
                yield replace(node, str(not value))
            case ast.Constant(value=int(value)):
                yield replace(node, str(value + 1))
            case ast.Expr(value=ast.Call()):
                yield replace(node, "None")


def run_tests(fault: Fault) -> tuple[Fault, str, float]:
    """Return the fault, the test that caught it or "", and the seconds that this took."""
    began = time.monotonic()
    files = near.list_near([fault.path])
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copied = Path(folder) / "src"
        shutil.copytree(near.SOURCE, copied, ignore=shutil.ignore_patterns("__pycache__"))
        changed = copied / fault.path.relative_to(near.SOURCE)
        source = changed.read_bytes()
        changed.write_bytes(source[: fault.start] + fault.text + source[fault.end :])
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not long and not prove", "-p", "no:cacheprovider"]
        command += ["-p", "no:randomly", "--basetemp", str(Path(folder) / "temp"), *files]
        try:
            done = subprocess.run(
                command,
                cwd=near.ROOT,
                env={**os.environ, "PYTHONPATH": str(copied)},
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            return fault, "", SECONDS
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    caught = "" if done.returncode in (0, 5) else "collection"
    if failed:
        caught = failed[0].split(" - ")[0]
    return fault, caught, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--only", type=Path, default=near.SOURCE)
    parser.add_argument("--at-once", type=int, default=2)
    asked = parser.parse_args()
    only = asked.only.resolve()
    paths = sorted(only.rglob("*.py")) if only.is_dir() else [only]
    faults = [
        fault
        for path in paths
        if ON_GPUS not in path.read_text(encoding="utf-8") and near.list_near([path])
        for fault in list_faults(path)
    ]
    chosen = random.Random(asked.seed).sample(faults, min(asked.count, len(faults)))
    print(f"{len(chosen)} of {len(faults):,} faults, --seed {asked.seed}", flush=True)
    survivors = []
    with ThreadPoolExecutor(asked.at_once) as threads:
        for fault, caught, seconds in threads.map(run_tests, chosen):
            said = fault.describe(fault.path.read_bytes())
            verdict = caught or ("SURVIVED" if seconds < SECONDS else "NOT CAUGHT IN TIME")
            print(f"{said}\n    {seconds:.0f} s  {verdict}", flush=True)
            survivors += [] if caught else [said]
    print(f"\n{len(chosen) - len(survivors)} of {len(chosen)} caught; not caught:", *survivors, sep="\n")


if __name__ == "__main__":
    main()
