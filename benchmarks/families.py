"""Try every model family on tiny random models, and record what works.

python benchmarks/families.py            every family, those without a row in docs/families.md first
python benchmarks/families.py FAMILY …   these

Each family runs in its own processes, and its row is written as soon as it is known; a failure costs only its own row.
Rows measured with other versions of the libraries are dropped.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import transformers
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file

from windlass import plan as planning
from windlass import runfile, tiny
from windlass.errors import UserError
from windlass.model import Base, read_base

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
tests: Any = importlib.import_module("test_families")
runs: Any = importlib.import_module("test_train")

COLUMNS = (
    *("family", "plan", "trained on 2 ranks", "equal to TRL", "on an FP8 base", "opens in PEFT", "experts", "merge"),
    "packing",
)
PAGE = Path(__file__).parents[1] / "docs" / "families.md"
MARK = "<!-- benchmarks/families.py -->"
LIBRARIES = ", ".join(f"{each} {version(each)}" for each in ("torch", "transformers", "peft", "trl"))
LIMIT = 900  # seconds of a family


def try_family(folder: Path, name: str, tell: Callable[[str, str], None]) -> None:
    """Report each column as soon as it is known."""
    path = tiny.write_family(folder / name, name, config=tests.FAMILIES[name], tokenizer=True)
    tests.write_fp8(path)  # whose true values the plain one has from here on
    base = read_base(path)
    adapts = "experts" in base.dims and base.family.expert_adapters
    tell("experts", "yes" if adapts else "no" if "experts" in base.dims else "-")
    tell("packing", "yes" if base.family.isolates else "refused")
    given: dict[str, Any] = {"model__model_name_or_path": str(path)} | (runs.EXPERTS if adapts else {})
    fp8 = given | {"model__model_name_or_path": str(folder / in_fp8(name)), "layout__base_dtype": "fp8"}
    planning.make_plan(runfile.read_run_file(folder / "run.yaml", runs.case(2, **given)["overrides"]))
    tell("plan", "yes")
    cases = {name: runs.case(2, **given), in_fp8(name): runs.case(2, **fp8)}
    try:
        planning.make_plan(runfile.read_run_file(folder / "run.yaml", cases[in_fp8(name)]["overrides"]))
    except UserError:  # experts of a form that can't be computed with in codes
        tell("on an FP8 base", "refused")
        del cases[in_fp8(name)]
    one = runs.launched(folder, 1, {name: runs.case(1, plain=True, **given)})
    two = runs.launched(folder, 2, cases)
    tell("trained on 2 ranks", "yes" if not (error := two[name].get("error")) else f"failed: {error}")
    tell("equal to TRL", compare(two, name, one.steps(name)))
    if in_fp8(name) in cases:
        tell("on an FP8 base", compare(two, in_fp8(name), one.steps(name)))
    exported = folder / f"{name} exported"
    export(two.folder / name, exported)
    tell("opens in PEFT", opens(base, exported))
    export(two.folder / name, folder / f"{name} merged", "--merge")
    tell("merge", "yes")


def in_fp8(name: str) -> str:
    return f"{name} in FP8"  # as write_fp8 calls its folder


def compare(trained: Any, name: str, reference: Sequence[dict[str, Any]]) -> str:
    """Return the largest relative difference of loss and gradient norm."""
    if error := trained[name].get("error"):
        return "refused" if error.startswith("layout.base_dtype: ") else f"failed: {error}"
    pairs = zip(trained.steps(name), reference, strict=True)
    return f"{max(abs(a[key] / b[key] - 1) for a, b in pairs for key in ('loss', 'grad_norm')):.0e}"


def export(run: Path, to: Path, *more: str) -> None:
    command = [sys.executable, "-m", "windlass", "export", str(run), "--to", str(to), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout)[-600:])


def opens(base: Base, adapter: Path) -> str:
    """Return whether plain transformers and PEFT find a place for every tensor of the file."""
    name = base.wrapper.architecture if base.wrapper else base.family.causal_lm
    model = getattr(transformers, name).from_pretrained(base.path)
    with warnings.catch_warnings(record=True) as caught:
        opened = PeftModel.from_pretrained(model, str(adapter))
    here, there = get_peft_model_state_dict(opened), load_file(adapter / "adapter_model.safetensors")
    if missing := [str(each.message) for each in caught if "missing" in str(each.message)]:
        return f"no: {missing[0]}"
    values = {each.float().sum().item() for each in there.values()}
    same = {each.float().sum().item() for each in here.values()} == values
    return "yes" if same else f"no: {len(here)} tensors for {len(there)} saved"


def try_alone(name: str, results: Path) -> None:
    """Try it in its own process, which prints a line per column."""
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as place, results.open("a") as file:
        folder = Path(place)
        (folder / "data").mkdir()
        chance = random.Random(0)
        rows = [" ".join(chance.choices(runs.WORDS.split(), k=chance.randint(3, 12))) for _ in range(96)]
        (folder / "data" / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        (folder / "run.yaml").write_text(runs.RUN.format(folder=folder, steps=tests.STEPS))
        try_family(folder, name, lambda *pair: print(json.dumps(pair), file=file, flush=True))


def row_of(name: str) -> str:
    """Return the family's row; the first column that was not reached has the reason."""
    with tempfile.TemporaryDirectory() as place:
        results = Path(place, "results")
        results.touch()
        program = f"import families, pathlib; families.try_alone({name!r}, pathlib.Path({str(results)!r}))"
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=Path(__file__).parent,
            env=os.environ | {"TMPDIR": place},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            text = process.communicate(timeout=LIMIT)[1].strip()
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text = f"not ready after {LIMIT} seconds"
        row = {"family": name} | dict(json.loads(line) for line in results.read_text().splitlines())
    if len(row) < len(COLUMNS):
        print(f"{name}: {text}", file=sys.stderr, flush=True)
        why = " ".join(text.splitlines()[-1:])[:200].replace("|", "/")
        row[next(each for each in COLUMNS if each not in row)] = f"failed: {why}"
    return "| " + " | ".join(row.get(each, "-") for each in COLUMNS) + " |"


def main(names: list[str]) -> None:
    text = PAGE.read_text()
    table = text.partition(MARK)[2].partition("<!-- end -->")[0]
    lines = table.splitlines() if LIBRARIES in table else []
    rows = {match[1]: line for line in lines if (match := re.match(r"\| (\w+) \| (?!plan)", line))}
    rows = {name: rows[name] for name in tests.FAMILIES if name in rows}
    head = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    print("\n".join(head))
    for name in names or sorted(tests.FAMILIES, key=lambda each: each in rows):
        rows[name] = row_of(name)
        print(rows[name], flush=True)
        lines = [*head, *(rows[each] for each in tests.FAMILIES if each in rows)]
        table = "\n".join(lines) + f"\n\nWith {LIBRARIES}; last row of {datetime.now(UTC):%Y-%m-%d}."
        before, _, rest = PAGE.read_text().partition(MARK)
        PAGE.write_text(f"{before}{MARK}\n{table}\n{rest[rest.index('<!-- end -->') :]}")


if __name__ == "__main__":
    if unknown := {*sys.argv[1:]} - {*tests.FAMILIES}:
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(tests.FAMILIES)}")
    main(sys.argv[1:])
