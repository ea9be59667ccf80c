"""What works for which family of models, tried on tiny random ones: the table of docs/families.md.

python benchmarks/families.py [FAMILY …]
"""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
import tempfile
import warnings
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

COLUMNS = ("family", "plan", "trained on 2 ranks", "equal to TRL", "opens in PEFT", "experts", "merge", "packing")


def try_family(folder: Path, name: str) -> list[str]:
    base = read_base(tiny.write_family(folder / name, name, config=tests.FAMILIES[name], tokenizer=True))
    given: dict[str, Any] = {"model__model_name_or_path": str(folder / name)}
    adapts = "experts" in base.dims and base.family.expert_adapters
    given |= runs.EXPERTS if adapts else {}
    row = dict.fromkeys(COLUMNS, "-") | {"family": name}
    row["experts"] = "yes" if adapts else "no" if "experts" in base.dims else "-"
    row["packing"] = "yes" if base.family.isolates else "refused"
    try:
        planning.make(runfile.read(folder / "run.yaml", runs.case(2, **given)["overrides"]))
        row["plan"] = "yes"
    except UserError as error:
        row["plan"] = str(error).splitlines()[0]
        return list(row.values())
    one = runs.launched(folder, 1, {name: runs.case(1, plain=True, **given)}, f"{name} ")
    two = runs.launched(folder, 2, {name: runs.case(2, **given)}, f"{name} ")
    row["trained on 2 ranks"] = "yes" if two[name].get("error") is None else "no"
    pairs = zip(two.steps(name), one.steps(name), strict=True)
    worst = max(abs(a[key] / b[key] - 1) for a, b in pairs for key in ("loss", "grad_norm"))
    row["equal to TRL"] = f"{worst:.0e}"
    run = two.folder / name
    exported = folder / f"{name} exported"
    row["opens in PEFT"] = "yes" if export(run, exported) and opens(base, exported) else "no"
    row["merge"] = "yes" if export(run, folder / f"{name} merged", "--merge") else "no"
    return list(row.values())


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
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "data").mkdir()
        chance = random.Random(0)
        rows = [" ".join(chance.choices(runs.WORDS.split(), k=chance.randint(3, 12))) for _ in range(96)]
        (folder / "data" / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        (folder / "run.yaml").write_text(runs.RUN.format(folder=folder, steps=tests.STEPS))
        for name in names or tests.FAMILIES:
            try:
                print("| " + " | ".join(try_family(folder, name)) + " |", flush=True)
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}"[-600:], file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
