"""Six trials in one sweep, in turns and together, against six runs: wall time of the commands, loading included.

    python benchmarks/sweep.py [--rounds 6] [--quick] [--steps 40] [--ranks 1]

The models are the demo's, a mixture of experts, and a dense one of its size; micro-batches have 1 and 8 rows. The ways
take turns, in one order and then in the other, and ratios are taken within a round: of six, smallest to largest is a
97 % interval of their median. --quick: one round, and few steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from windlass import tiny
from windlass.runfile import read_run_file

SWEEP = {"train.learning_rate": [1e-4, 5e-4, 2e-3], "lora.r": [4, 16]}
RUN = """\
model: {{model_name_or_path: {model}, torch_dtype: float32}}
lora: {{r: 8, lora_alpha: 16, target_modules: all-linear}}
data: {{dataset_name_or_path: {data}, max_length: 128, packing: false}}
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

WAYS = ("sweep", "together", "six runs")  # the last is what the others are compared with


def windlass(*words: str, cwd: Path) -> None:
    """Run a command; end with its output if it fails."""
    command = [sys.executable, "-m", "windlass", *words]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: {done.stdout}{done.stderr}")


def make(folder: Path) -> dict[str, tuple[Path, Path]]:
    """Write both models; return each with its rows."""
    windlass("demo", "--make-only", "--dir", "demo", cwd=folder)
    demo = read_run_file(folder / "demo" / "run.yaml").run
    model, data = (folder / path for path in (demo.model.model_name_or_path, demo.data.dataset_name_or_path))
    text = json.loads((model / "config.json").read_text())
    text = text.get("text_config", text)
    sizes = {key: text[key] for key in ("hidden_size", "intermediate_size") if key in text}
    layers, vocab = text["num_hidden_layers"], text["vocab_size"]
    dense = tiny.write_family(folder / "dense", "llama", config=sizes, layers=layers, vocab=vocab)
    for path in model.glob("token*"):
        shutil.copy(path, dense)
    return {"experts": (model, data), "dense": (dense, data)}


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
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=40, help="of each trial")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one round of 10 steps")
    options = parser.parse_args()
    rounds, steps = (1, 10) if options.quick else (options.rounds, options.steps)
    with tempfile.TemporaryDirectory() as scratch:
        models = make(Path(scratch))
        print("| model | rows | " + " | ".join([*(f"{way}, s" for way in WAYS), *WAYS[:-1]]) + " |", flush=True)
        print("|---" * (2 * len(WAYS) + 1) + "|", flush=True)
        for (name, (model, data)), rows in itertools.product(models.items(), (1, 8)):
            taken: dict[str, list[float]] = {way: [] for way in WAYS}
            for number in range(rounds):
                for way in WAYS if number % 2 else WAYS[::-1]:
                    folder = Path(tempfile.mkdtemp(dir=scratch))
                    text = RUN.format(
                        model=model, data=data, folder=folder / "run", steps=steps, rows=rows, ranks=options.ranks
                    )
                    taken[way].append(measure(way, text, folder))
                    shutil.rmtree(folder)
            shown = [f"{median(taken[way]):.1f}" for way in WAYS]
            for way in WAYS[:-1]:
                ratios = [one / other for one, other in zip(taken[way], taken[WAYS[-1]], strict=True)]
                shown.append(f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
            print(f"| {name} | {rows} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
