"""Rules of the source: sizes, names in docstrings, light imports, one place for exit codes."""

import ast
import builtins
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from report_runs import write

from windlass.runfile import Train

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py")) + sorted((ROOT / "examples").rglob("*.py"))
PACKAGE = ROOT / "src" / "windlass"
CODE = r"[a-z0-9]+(-[a-z0-9]+)*"  # of an error
parse = functools.cache(lambda path: ast.parse(path.read_text(encoding="utf-8")))
EXIT_CODES = {"FAILED", "USER_INPUT", "RANK_USER_INPUT", "SAVED"}


@pytest.mark.takes("reads all of the source")
def test_files_and_functions_stay_small_and_exit_codes_are_in_one_place() -> None:
    numbered = []
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 700, f"{path} has {len(text.splitlines())} lines: split it by its nouns"
        tree = parse(path)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= 120, f"{path}:{node.lineno}: {node.name} has {length} lines"
        for node in tree.body:  # an exit code that gets a number of its own
            names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
            if isinstance(node, ast.Assign) and names & EXIT_CODES and path.is_relative_to(ROOT / "src"):
                constants = (one for one in ast.walk(node.value) if isinstance(one, ast.Constant))
                numbered += [path.name for one in constants if type(one.value) is int]
    assert numbered == ["errors.py"] * 4


def test_the_training_package_has_no_imports_for_types_only() -> None:
    """Such an import hides a circle: a guest of the loop that knows the loop."""
    modules = (ROOT / "src" / "windlass" / "train").rglob("*.py")
    assert [path.name for path in modules if "TYPE_CHECKING" in path.read_text(encoding="utf-8")] == []


def test_every_proof_is_in_one_part_of_make_prove() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    parts = re.findall(r"^PROVE_\w+ := (.*)$", makefile, re.MULTILINE)
    listed = sorted(name for part in parts for name in part.split())
    marked = sorted(path.stem for path in (ROOT / "tests").glob("test_*.py") if "mark.prove" in path.read_text())
    assert listed == [name for name in marked if name != Path(__file__).stem]


def find_codes(tree: ast.AST) -> Iterator[tuple[int, ast.expr | None]]:
    """Yield the line and the code of every error that a file makes; None if it has none."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            copied = any(keyword.arg is None for keyword in node.keywords)  # Problem(**problem)
            if node.func.id in ("UserError", "RunError", "Problem") and not copied:
                named = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
                yield node.lineno, next(iter([*node.args[3:4], *named]), None)


def test_every_error_has_a_code() -> None:
    """The words may change; tests and readers of `--json` compare the code."""
    planted = ast.parse('Problem("wrong", "a", "b")\nUserError("wrong", code="no-such-file")\nProblem(**given)')
    assert [line for line, code in find_codes(planted) if code is None] == [1]
    without, odd = [], []
    for path in sorted(PACKAGE.rglob("*.py")):
        for line, code in find_codes(parse(path)):
            place = f"{path.relative_to(ROOT)}:{line}"
            if code is None:
                without.append(place)
                continue
            words = [str(part.value) for part in ast.walk(code) if isinstance(part, ast.Constant)]
            odd += [f"{place}: {word!r}" for word in words if not re.fullmatch(CODE, word)]
    assert not without
    assert not odd


LIBRARIES = {"datasets", "distributed_config", "from_pretrained", "key_mapping", "context_fn"}  # and their arguments


def find_names(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Return the names that a file's text contains, and those of them that it defines for others."""
    named, defined = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined.add(node.name)
        if isinstance(node, ast.Module | ast.ClassDef):
            targets = [target for part in node.body if isinstance(part, ast.Assign) for target in part.targets]
            targets += [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
            defined |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            defined |= {*re.findall(r"\w+", node.value)}
        for field in ("id", "attr", "arg", "name"):
            named.add(str(getattr(node, field, "")))
        if isinstance(node, ast.Import | ast.ImportFrom):
            named |= {step for alias in node.names for step in alias.name.split(".")}
    return named | defined, defined


@pytest.mark.takes("reads all of the source")
def test_names_in_docstrings_exist() -> None:
    """A word in backticks is a name of the same file, or one that another file defines: a rename leaves none behind."""
    paths = sorted((ROOT / "src").rglob("*.py"))
    trees = {path: parse(path) for path in paths}
    everywhere = {*dir(builtins), *LIBRARIES}
    everywhere |= {step for path in paths for step in path.relative_to(ROOT / "src").with_suffix("").parts}
    everywhere |= {name for tree in trees.values() for name in find_names(tree)[1]}
    assert "no_such_name" not in everywhere
    stale = []
    for path, tree in trees.items():
        known = everywhere | find_names(tree)[0]
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                words = re.findall(r"`([A-Za-z_]\w*(?:\.\w+)*)`", ast.get_docstring(node) or "")
                unknown = [word for word in words if not known.issuperset(word.split("."))]
                stale += [f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {word}" for word in unknown]
    assert not stale


SCRIPT = """
import contextlib, io, json, sys
from windlass.cli import main
heavy = ("torch", "transformers", "peft", "trl", "accelerate", "datasets", "numpy", "pandas", "pyarrow")
found = {}
for command in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main(command)
    found[" ".join(command)] = [name for name in heavy if name in sys.modules]
assert {"rich", "jinja2"} <= {*sys.modules}
import numpy
print(json.dumps({**found, "all": [name for name in heavy if name in sys.modules]}))
"""


def test_login_node_commands_import_no_torch(tmp_path: Path) -> None:
    """The guard must be able to fail: it notices numpy once that is imported."""
    run = "examples/mistral-small-4/train.yaml"
    commands = [["--help"], ["init"], ["schema"], ["explain", "fsdp_use_orig_params"], ["plan", run, "--json"]]
    commands += [["plan", "Qwen/Qwen3-8B", "--gpus", "2xh100", *more] for more in ([], ["--longest"])]
    folder = str(write(tmp_path / "run", ranks=1, count=3))
    commands += [["watch", folder, "--once"], ["report", folder]]
    started = [sys.executable, "-c", SCRIPT, json.dumps(commands)]
    done = subprocess.run(started, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == {**{" ".join(command): [] for command in commands}, "all": ["numpy"]}


# --- replacements of other libraries' code ---

# Settings of torch, not code: each with its reason where it is made.
SETTINGS = {"torch._dynamo.config", "torch._functorch.config", "torch._inductor.config"}


def foreign_names(tree: ast.Module) -> set[str]:
    """Return the names that a file imports from other libraries."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module.partition(".")[0] not in {*sys.stdlib_module_names, "windlass"}:
                names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            tops = {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            names |= tops - {*sys.stdlib_module_names, "windlass"}
    return names


def find_replacements(tree: ast.Module) -> Iterator[str]:
    """Yield assignments that replace code of others: a forward, a class, an attribute of an imported name."""
    foreign = foreign_names(tree)
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = [*node.targets]  # the tree is shared
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            owner, name = node.args[:2]
            if ast.unparse(name) in ("'forward'", "'__class__'") or ast.unparse(owner).partition(".")[0] in foreign:
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("FunctionType"):
            yield ast.unparse(node)
        while targets:
            target = targets.pop()
            if isinstance(target, ast.Tuple):
                targets += target.elts
            elif isinstance(target, ast.Attribute):
                owner_text = ast.unparse(target.value)
                is_setting = owner_text in SETTINGS
                if target.attr in ("forward", "__class__") or (
                    owner_text.partition(".")[0] in foreign and not is_setting
                ):
                    yield ast.unparse(target)


@pytest.mark.takes("reads all of the source")
def test_nothing_is_replaced_outside_of_patches() -> None:
    for fault in (
        *("a, module.forward = 1, f", "wrapper.__class__ = C", "setattr(module, 'forward', f)"),
        *("import torch\ntorch.Tensor.item = g", "types.FunctionType(code, {})"),
    ):
        assert [*find_replacements(ast.parse(fault))], fault
    found = {
        f"{path.relative_to(PACKAGE)}: {text}"
        for path in PACKAGE.rglob("*.py")
        if path != PACKAGE / "train/patches.py"
        for text in find_replacements(parse(path))
    }
    assert not found


@pytest.mark.takes("reads all of the source")
def test_every_key_of_train_is_read_somewhere() -> None:
    nodes = (node for path in PACKAGE.rglob("*.py") for node in ast.walk(parse(path)))
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert set(Train.model_fields) <= read
