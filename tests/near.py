"""Which test files are near a module: those that import it, then those that import what imports it.

python tests/near.py [FILE ...]    by default the files that differ from the last commit
"""

import ast
import functools
import itertools
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE, TESTS = ROOT / "src", ROOT / "tests"
# Test files that take longest.
LONGEST = (
    *("test_preference_ranks", "test_sweep", "test_together", "test_export", "test_train", "test_load"),
    *("test_families", "test_watch_run", "test_checkpoint_resume", "test_long_rows", "test_verify", "test_pairs"),
    *("test_halving", "test_one_gpu", "test_launch_node", "test_train_ranks", "test_rehearse"),
)
STEPS = 2  # from module to test: more, and most tests are near most modules


def name_module(path: Path) -> str:
    """Return what a file is called in imports."""
    folder = SOURCE if path.is_relative_to(SOURCE) else TESTS
    return ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def read_imports() -> dict[str, set[str]]:
    """Return the files, by module, that import each module of the source and the tests, inside functions too."""
    paths = {name_module(path): path for path in itertools.chain(SOURCE.rglob("*.py"), TESTS.glob("*.py"))}
    importers: dict[str, set[str]] = {name: set() for name in paths}
    for importer, path in paths.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
            elif isinstance(node, ast.Import):
                names = [each.name for each in node.names]
            for name in names:
                importers.get(name, set()).add(importer)
    return importers


def list_near(paths: Iterable[Path], steps: int = STEPS) -> list[str]:
    """Return the test files near to these files: nearest first, then those named like them, those that take long last.
    A test file is the nearest to itself."""
    importers = read_imports()
    reached = {name: 0 for path in paths if (name := name_module(path.resolve())) in importers}
    words = set(re.findall("[a-z]+", " ".join(reached)))
    edge = [*reached]
    for step in range(1, steps + 1):
        edge = [name for name in sorted({*itertools.chain(*(importers[each] for each in edge))}) if name not in reached]
        reached |= dict.fromkeys(edge, step)

    def place(name: str) -> tuple[int, bool, bool]:
        return reached[name], name in LONGEST, not words.intersection(name.split("_"))

    return [f"tests/{name}.py" for name in sorted(reached, key=place) if name.startswith("test_")]


def list_changed() -> list[Path]:
    """Return the Python files that differ from the last commit, new ones too."""
    listed = [["git", "diff", "--name-only", "HEAD"], ["git", "ls-files", "--others", "--exclude-standard"]]
    names = [subprocess.run(each, cwd=ROOT, capture_output=True, text=True, check=True).stdout for each in listed]
    paths = [ROOT / name for name in "".join(names).split("\n") if name.endswith(".py")]
    return [path for path in paths if path.is_relative_to(SOURCE) or path.is_relative_to(TESTS)]


if __name__ == "__main__":
    found = list_near(map(Path, sys.argv[1:]) if sys.argv[1:] else list_changed())
    print(*found or sys.exit("no file of src or tests differs from the last commit, or no test is near: `make test`"))
