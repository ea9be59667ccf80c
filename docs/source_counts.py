"""Print the source's size and the counts of forms that make it hard to read: `make counts`."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Modules of train/ that are about an extra.
TRIALS = ("shared_base",)
PAIRS = ("pairs", "preference", "reference", "noise", "precision")


def list_files(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split()]


def count_lines(files: list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def is_unrelated_pair(node: ast.AST) -> bool:
    """Return whether one line assigns several values to several names: `a, b = 1, 2`."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return isinstance(node.targets[0], ast.Tuple)


def is_string_times_flag(node: ast.AST) -> bool:
    """Return whether a string is multiplied by a condition (`"s" * (count > 1)`), or is longer than a character."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    sides = (node.left, node.right)
    strings = [side for side in sides if isinstance(side, ast.JoinedStr) or is_string(side)]
    repeated = [side for side in strings if isinstance(side, ast.Constant) and len(str(side.value)) == 1]
    return bool(strings) and (not repeated or any(is_condition(side) for side in sides))


def is_condition(node: ast.AST) -> bool:
    is_bool = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "bool"
    return is_bool or is_negation(node) or isinstance(node, ast.Compare | ast.BoolOp)


def is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def is_negation(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def is_asked_whether_set(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "model_fields_set"


def is_plan_loaded(node: ast.AST) -> bool:
    """Return whether a node reads `plan.loaded`, on a plan of any owner: `job.plan.loaded`."""
    if not isinstance(node, ast.Attribute) or node.attr != "loaded":
        return False
    owner = node.value
    return (isinstance(owner, ast.Name) and owner.id == "plan") or (
        isinstance(owner, ast.Attribute) and owner.attr == "plan"
    )


def is_other_plan_import(node: ast.AST) -> bool:
    """Return whether a node imports more of the planner than what a plan and a layout are."""
    if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("windlass.plan"):
        return False
    return any(not name.name.endswith(("Plan", "Layout")) for name in node.names)


def is_module_alias(node: ast.AST) -> bool:
    """Return whether a module of the package is imported under another name."""
    if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("windlass"):
        return False
    folder = ROOT / "src" / (node.module or "").replace(".", "/")
    return any(
        name.asname and ((folder / f"{name.name}.py").exists() or (folder / name.name).is_dir()) for name in node.names
    )


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def count_nodes(files: list[Path], holds: Callable[[ast.AST], bool]) -> int:
    return sum(1 for _ in find_nodes(files, holds))


def find_nodes(files: list[Path], holds: Callable[[ast.AST], bool]) -> Iterator[tuple[Path, int]]:
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if holds(node):
                yield path, getattr(node, "lineno", 0)


# --- how the packages hang together ---


def list_names(path: Path) -> Iterator[str]:
    """Yield the classes and aliases that a module defines."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name[0].isupper() and not name.isupper() and len(name) > 1:
                yield name


def count_shared_names(files: list[Path]) -> int:
    """Return how many classes and aliases have the name of another module's."""
    modules = Counter(name for path in files for name in set(list_names(path)))
    return sum(times > 1 for times in modules.values())


def read_imports(files: list[Path]) -> dict[str, set[str]]:
    """Return which modules of the package each module imports, wherever it does."""
    names = {
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__"): path for path in files
    }
    imports: dict[str, set[str]] = {}
    for name, path in names.items():
        found: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {full if (full := f"{node.module}.{one.name}") in names else node.module for one in node.names}
        imports[name] = (found & names.keys()) - {name}
    return imports


def measure_package(imports: dict[str, set[str]], package: str) -> tuple[int, int]:
    """Return the levels of imports inside a package, and how many of its modules are in a circle."""
    inside = {name: {one for one in imports[name] if one.startswith(f"{package}.")} for name in imports}
    inside = {name: below for name, below in inside.items() if name.startswith(f"{package}.")}
    levels: dict[str, int] = {}
    while ready := {name for name in inside.keys() - levels if inside[name] <= levels.keys()}:
        levels |= {name: 1 + max((levels[one] for one in inside[name]), default=0) for name in ready}
    return max(levels.values(), default=0), len(inside) - len(levels)


LIBRARIES = ("torch", "transformers", "huggingface_hub", "peft", "accelerate", "datasets")


def is_private_import(node: ast.AST) -> bool:
    """Return whether a node imports a private name, or from a private module, of a library."""
    if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] not in LIBRARIES:
        return False
    parts = [*(node.module or "").split("."), *(name.name for name in node.names)]
    return any(part.startswith("_") and part != "_dynamo" for part in parts)  # torch documents the errors of _dynamo


def count_mentions(files: list[Path], words: str, own: Sequence[str]) -> int:
    """Return the lines that name an extra outside the modules that are about it."""
    lines = [line for path in files if path.stem not in own for line in path.read_text(encoding="utf-8").splitlines()]
    return sum(re.search(words, line) is not None for line in lines)


def count() -> dict[str, tuple[int, int | None]]:
    """Return each count with its bound, if it has one."""
    source = list_files("src/*.py")
    outside_runfile = [path for path in source if "runfile" not in path.parts]
    outside_plan = [path for path in source if "plan" not in path.parts]
    train = [path for path in source if "train" in path.parts]
    but_compat = [path for path in source if path.name != "compat.py"]
    imports = read_imports(source)
    packages = sorted({".".join(name.split(".")[:2]) for name in imports if name.count(".") > 1})
    test_data = [path for path in list_files("tests") if path.suffix != ".py"]
    return {
        "lines of src": (count_lines(source), 31_500),
        "lines of tests": (count_lines(list_files("tests/*.py")), 22_500),
        "lines of test data": (count_lines(test_data), 4_500),
        "lines of benchmarks": (count_lines(list_files("benchmarks/*.py")), 4_500),
        "assignments of unrelated values in one line": (count_nodes(source, is_unrelated_pair), 120),
        "strings times a condition": (count_nodes(source, is_string_times_flag), 0),
        "walruses": (count_nodes(source, lambda node: isinstance(node, ast.NamedExpr)), 120),
        "model_fields_set outside runfile/": (count_nodes(outside_runfile, is_asked_whether_set), 0),
        "plan.loaded outside plan/": (count_nodes(outside_plan, is_plan_loaded), 0),
        "imports of the planner in train/, but plans and layouts": (count_nodes(train, is_other_plan_import), 0),
        "TYPE_CHECKING in train/": (count_nodes(train, is_type_checking), 0),
        "modules imported under another name": (count_nodes(source, is_module_alias), 0),
        "modules": (len(source), None),
        "classes and aliases with the name of another": (count_shared_names(source), 15),
        "levels of imports in train/": (measure_package(imports, "windlass.train")[0], 8),
        "modules in a circle of imports": (sum(measure_package(imports, package)[1] for package in packages), 0),
        "imports of libraries' private names, but in compat.py": (count_nodes(but_compat, is_private_import), 0),
        "lines of train/ that name trials, but in their modules": (count_mentions(train, r"\btrials?\b", TRIALS), 5),
        "lines of train/ that name pairs, but in their modules": (count_mentions(train, r"\bpairs?\b", PAIRS), 15),
        "lines of train/ that name context_parallel, but in its module": (
            count_mentions(train, "context_parallel|RowGroup", ("long_rows",)),
            20,
        ),
    }


if __name__ == "__main__":
    for name, (number, bound) in count().items():
        limit = "" if bound is None else f"at most {bound:,}"
        print(f"{number:8,}  {name:60} {limit}")
