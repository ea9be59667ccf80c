"""Six trials in one sweep, in turns and together, against six runs: wall time of the commands, loading included.

    python benchmarks/sweep.py [--only recipe "recipe, experts adapted"] [--rounds 3] [--text wiki.txt] [--quick]

"demo" is the demo's model, a mixture of experts, and "dense" one of its size; micro-batches have 1 and 8 rows.
"recipe" is the mixture of 207 M parameters of recipe.py, with 1 row. The ways take turns, in one order and then in the
other, and ratios are taken within a round. --quick: one round, and few steps.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import recipe

from windlass import tiny
from windlass.runfile import read_run_file

SWEEP = {"train.learning_rate": [1e-4, 5e-4, 2e-3], "lora.r": [4, 16]}
RUN = """\
model: {{model_name_or_path: {model}, torch_dtype: float32}}
lora: {{r: 8, lora_alpha: 16, {lora}}}
data: {{dataset_name_or_path: {data}, packing: false, {rows_of}}}
train:
  output_dir: {folder}
  max_steps: {steps}
  per_device_train_batch_size: {rows}
  gradient_accumulation_steps: 1
  bf16: false
  eval_strategy: "no"
  save_steps: {steps}
layout: resident
cluster: {{nodes: 1, gpus_per_node: {ranks}, gpu: cpu}}
"""

DEMO = {"lora": "target_modules: all-linear", "rows_of": "max_length: 128"}
RECIPE = {"lora": f"target_modules: {recipe.TARGETS}", "rows_of": f"max_length: {recipe.LENGTH}, text_field: text"}


@dataclass(frozen=True)
class Case:
    folder: str
    rows: int  # of a micro-batch
    steps: int
    settings: dict[str, str]


CASES = {
    "demo": [Case("demo", 1, 40, DEMO), Case("demo", 8, 40, DEMO)],
    "dense": [Case("dense", 1, 40, DEMO), Case("dense", 8, 40, DEMO)],
    "recipe": [Case("recipe", 1, 8, RECIPE)],
    "recipe, experts adapted": [Case("recipe", 1, 8, RECIPE | {"lora": f"{RECIPE['lora']}, experts: true"})],
}
WAYS = ("sweep", "together", "six runs")  # the last is what the others are compared with


def windlass(*words: str, cwd: Path) -> None:
    """Run a command; end with its output if it fails."""
    command = [sys.executable, "-m", "windlass", *words]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: {done.stdout}{done.stderr}")


def make(folder: Path, text: Path | None) -> dict[str, tuple[Path, Path]]:
    """Write the models; return each with its rows."""
    (folder / "recipe").mkdir()
    recipe.make(folder / "recipe", recipe.Sizes(experts=128, rows=96, held_out=32), text)
    windlass("demo", "--make-only", "--dir", "demo", cwd=folder)
    demo = read_run_file(folder / "demo" / "run.yaml").run
    model, data = (folder / path for path in (demo.model.model_name_or_path, demo.data.dataset_name_or_path))
    config = json.loads((model / "config.json").read_text())
    config = config.get("text_config", config)
    sizes = {key: config[key] for key in ("hidden_size", "intermediate_size") if key in config}
    layers, vocab = config["num_hidden_layers"], config["vocab_size"]
    dense = tiny.write_family(folder / "dense", "llama", config=sizes, layers=layers, vocab=vocab)
    for path in model.glob("token*"):
        shutil.copy(path, dense)
    of_recipe = folder / "recipe" / "model", folder / "recipe" / "data"
    return {"demo": (model, data), "dense": (dense, data), "recipe": of_recipe}


def measure(way: str, text: str, folder: Path) -> float:
    """Return the seconds of one way, into a new folder."""
    file = folder / "sweep.yaml"
    sweep = {**SWEEP, "together": 6} if way == "together" else SWEEP
    file.write_text(f"{text}sweep: {json.dumps(sweep)}\n")
    commands = [["train", str(file)]]
    if way == "six runs":
        commands = []
        for trial in read_run_file(file).trials:
            assert trial.trial is not None
            alone = folder / f"{trial.trial.name}.yaml"
            alone.write_text(trial.trial.file)
            commands.append(["train", str(alone)])
    began = time.monotonic()
    for words in commands:
        windlass(*words, cwd=folder)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--text", type=Path, help="real text for the recipe's rows, a row a line")
    parser.add_argument("--quick", action="store_true", help="one round of a quarter of the steps")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    with tempfile.TemporaryDirectory() as scratch:
        models = make(Path(scratch), options.text)
        heads = [*(f"{way}, s" for way in WAYS), *WAYS[:-1]]
        print("| model | rows | " + " | ".join(heads) + " |", flush=True)
        print("|---" * (len(heads) + 2) + "|", flush=True)
        for name, case in [(model, case) for model in options.only for case in CASES[model]]:
            model, data = models[case.folder]
            steps = case.steps // 4 if options.quick else case.steps
            taken: dict[str, list[float]] = {way: [] for way in WAYS}
            for number in range(rounds):
                for way in WAYS if number % 2 else WAYS[::-1]:
                    folder = Path(tempfile.mkdtemp(dir=scratch))
                    places = {"model": model, "data": data, "folder": folder / "run"}
                    text = RUN.format(steps=steps, rows=case.rows, ranks=options.ranks, **places, **case.settings)
                    taken[way].append(measure(way, text, folder))
                    shutil.rmtree(folder)
            shown = [f"{median(taken[way]):.1f}" for way in WAYS]
            for way in WAYS[:-1]:
                ratios = [one / other for one, other in zip(taken[way], taken[WAYS[-1]], strict=True)]
                shown.append(f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
            print(f"| {name} | {case.rows} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
