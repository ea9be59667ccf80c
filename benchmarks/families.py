"""What works for which family of models, tried on tiny random ones.

python benchmarks/families.py            every family, and write the table of docs/families.md
python benchmarks/families.py FAMILY …   print the rows of these
"""

from __future__ import annotations

import importlib
import json
import random
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import islice
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
AT_ONCE = 4  # families of one start of the ranks


def try_families(folder: Path, names: Sequence[str]) -> Iterator[dict[str, str]]:
    """A row for each, of runs in the same processes."""
    given: dict[str, dict[str, Any]] = {}
    bases, rows = dict[str, Base](), dict[str, dict[str, str]]()
    for name in names:
        path = tiny.write_family(folder / name, name, config=tests.FAMILIES[name], tokenizer=True)
        tests.write_fp8(path)  # whose true values the plain one has from here on
        bases[name] = base = read_base(path)
        row = rows[name] = dict.fromkeys(COLUMNS, "-") | {"family": name}
        adapts = "experts" in base.dims and base.family.expert_adapters
        row["experts"] = "yes" if adapts else "no" if "experts" in base.dims else "-"
        row["packing"] = "yes" if base.family.isolates else "refused"
        for variant in (name, in_fp8(name)):
            given[variant] = {"model__model_name_or_path": str(folder / variant)}
            given[variant] |= runs.EXPERTS if adapts else {}
            given[variant] |= {"layout__base_dtype": "fp8"} if variant != name else {}
        try:
            planning.make(runfile.read(folder / "run.yaml", runs.case(2, **given[name])["overrides"]))
            row["plan"] = "yes"
        except UserError as error:
            row["plan"] = str(error).splitlines()[0]
    one = runs.launched(folder, 1, {name: runs.case(1, plain=True, **given[name]) for name in names}, f"{names[0]} ")
    two = runs.launched(folder, 2, {name: runs.case(2, **each) for name, each in given.items()}, f"{names[0]} ")
    for name, row in rows.items():
        row["trained on 2 ranks"] = "no" if two[name].get("error") else "yes"
        row["equal to TRL"], row["on an FP8 base"] = (
            compare(two, each, one.steps(name)) for each in (name, in_fp8(name))
        )
        run = two.folder / name
        exported = folder / f"{name} exported"
        row["opens in PEFT"] = "yes" if export(run, exported) and opens(bases[name], exported) else "no"
        row["merge"] = "yes" if export(run, folder / f"{name} merged", "--merge") else "no"
        yield row


def in_fp8(name: str) -> str:
    return f"{name} in FP8"  # as write_fp8 calls its folder


def compare(trained: Any, name: str, reference: Sequence[dict[str, Any]]) -> str:
    """The largest relative difference of loss and gradient norm."""
    if error := trained[name].get("error"):
        print(f"{name}: {error}", file=sys.stderr)
        return "no"
    pairs = zip(trained.steps(name), reference, strict=True)
    return f"{max(abs(a[key] / b[key] - 1) for a, b in pairs for key in ('loss', 'grad_norm')):.0e}"


def export(run: Path, to: Path, *more: str) -> bool:
    command = [sys.executable, "-m", "windlass", "export", str(run), "--to", str(to), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{run.name}: {(done.stderr or done.stdout)[-600:]}", file=sys.stderr)
    return done.returncode == 0


def opens(base: Base, adapter: Path) -> bool:
    """Whether plain transformers and PEFT have every tensor of the file in its place."""
    name = base.wrapper.architecture if base.wrapper else base.family.causal_lm
    model = getattr(transformers, name).from_pretrained(base.path)
    with warnings.catch_warnings(record=True) as said:
        opened = PeftModel.from_pretrained(model, str(adapter))
    here, there = get_peft_model_state_dict(opened), load_file(adapter / "adapter_model.safetensors")
    missing = [str(each.message) for each in said if "missing" in str(each.message)]
    values = {each.float().sum().item() for each in there.values()}
    same = {each.float().sum().item() for each in here.values()} == values
    if missing or not same:
        print(f"{base.name}: {missing[:1]}, {len(here)} tensors for {len(there)} saved", file=sys.stderr)
    return not missing and same


def main(names: list[str]) -> None:
    transformers.logging.set_verbosity_error()
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    print("\n".join(lines))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "data").mkdir()
        chance = random.Random(0)
        rows = [" ".join(chance.choices(runs.WORDS.split(), k=chance.randint(3, 12))) for _ in range(96)]
        (folder / "data" / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        (folder / "run.yaml").write_text(runs.RUN.format(folder=folder, steps=tests.STEPS))
        for some in batched(names or tests.FAMILIES, AT_ONCE):
            for row in try_families(folder, some):
                lines.append("| " + " | ".join(row.values()) + " |")
                print(lines[-1], flush=True)
    if not names:
        libraries = ", ".join(f"{each} {version(each)}" for each in ("torch", "transformers", "peft", "trl"))
        text = f"{MARK}\n" + "\n".join(lines) + f"\n\nOf {datetime.now(UTC):%Y-%m-%d}, with {libraries}.\n<!-- end -->"
        PAGE.write_text(re.sub(rf"{MARK}\n.*?<!-- end -->", lambda _: text, PAGE.read_text(), flags=re.DOTALL))


def batched(names: Iterable[str], count: int) -> Iterator[tuple[str, ...]]:
    rest = iter(names)
    while some := tuple(islice(rest, count)):
        yield some


if __name__ == "__main__":
    main(sys.argv[1:])
