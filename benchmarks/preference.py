"""DPO by TRL and by windlass over two gloo ranks of this machine: same model, pairs, seed, targets.

    python benchmarks/preference.py [--rounds 6] [--adapt-experts] [--only "TRL, separate reference" windlass]

TRL runs with a second model as its reference, with the base as its reference (adapters off), and with precomputed
log-probabilities. Engines take turns; each is measured from outside: the time from the start of its processes to the
end of the last step, everything included, the time between the ends of the first and last steps, and peak resident
memory of a rank. Ratios are taken within a round; of six, smallest to largest is a 97 % interval of the median.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import peers
import recipe
from race import Measured, race

from windlass.files import read_json_lines

TRL = {
    "TRL, separate reference": {"separate": True},
    "TRL, adapters off": {},
    "TRL, precomputed": {"precompute_ref_log_probs": True},
}
PLANNED = {"layout.name": "auto", "train.per_device_train_batch_size": "auto"}
WINDLASS: dict[str, dict[str, Any]] = {
    "windlass, same settings": {"layout.name": "resident"},
    "windlass": PLANNED,
}
ACCUMULATION = 8  # pairs of a rank and step
BETA = 0.1


def make(folder: Path, sizes: recipe.Sizes) -> None:
    """Write the recipe's model, and pairs: how a text goes on against how another one does."""
    recipe.make(folder, sizes, None)
    texts = [json.loads(line)["text"] for line in (folder / "data" / "train.jsonl").read_text().splitlines()]
    others = random.Random(recipe.SEED).sample(texts, len(texts))
    rows = []
    for text, other in zip(texts, others, strict=True):
        words, wrong = text.split(" "), other.split(" ")
        middle = max(1, len(words) // 3)
        sides = {"chosen": words[middle:], "rejected": wrong[len(wrong) // 3 :]}
        answers = {side: " " + " ".join(part) for side, part in sides.items()}
        if answers["chosen"] != answers["rejected"] and all(answer.strip() for answer in answers.values()):
            rows.append({"prompt": " ".join(words[:middle]), **answers})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[: len(rows) // 16 * 16]))


def run_file(name: str, folder: Path, adapt_experts: bool) -> Path:
    """Write the run with this engine's settings."""
    engine = recipe.Engine("windlass", "", settings={})
    setting = recipe.Setting(folder, adapt_experts)
    path = recipe.run_file(engine, setting, out_of(folder, name))
    document = json.loads(path.read_text())
    document["data"] = {"dataset_name_or_path": str(folder / "pairs.jsonl"), "max_length": recipe.LENGTH}
    document["data"] |= {"val_split": None, "dataset_config_name": None}
    document["train"] |= {"objective": "dpo", "gradient_accumulation_steps": ACCUMULATION}
    document["dpo"] = {"beta": BETA}
    for key, value in WINDLASS[name].items():
        section, leaf = key.split(".")
        document[section][leaf] = value
    path.write_text(json.dumps(document, indent=2))
    return path


def out_of(folder: Path, name: str) -> Path:
    return folder / name.replace(" ", "-").replace(",", "")


def train_with_trl(name: str, folder: Path, adapt_experts: bool) -> None:
    """Run one rank of TRL + PEFT."""
    import torch
    from datasets import load_dataset
    from peft import get_peft_model
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    torch.distributed.init_process_group("gloo")
    torch.manual_seed(recipe.SEED)
    settings = dict(TRL[name])
    reference = recipe.load_model(folder) if settings.pop("separate", False) else None
    settings |= recipe.trl_settings(out_of(folder, name), ACCUMULATION)
    trainer = DPOTrainer(
        model=get_peft_model(recipe.load_model(folder), recipe.lora_config(adapt_experts)),
        ref_model=reference,
        args=DPOConfig(**settings, beta=BETA),
        train_dataset=load_dataset("json", data_files=str(folder / "pairs.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )
    recipe.train(trainer)


def steps_done(name: str, folder: Path) -> int:
    if name in TRL:
        return (out_of(folder, name) / "rank0.log").read_text(errors="replace").count(recipe.STEP)
    path = out_of(folder, name) / "run" / "steps-rank0.jsonl"
    return sum(1 for _ in read_json_lines(path)) if path.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="how often each engine runs")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--adapt-experts", action="store_true", help="adapters on the routed experts too")
    parser.add_argument("--only", nargs="+", choices=[*TRL, *WINDLASS], default=[*TRL, *WINDLASS])
    parser.add_argument("--rank-of", choices=TRL, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of:
        train_with_trl(given.rank_of, given.folder, given.adapt_experts)
        return
    found: dict[str, list[Measured]] = {name: [] for name in given.only}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make(folder, recipe.Sizes(hidden=given.hidden, rows=given.rows))
        pairs = len((folder / "pairs.jsonl").read_text().splitlines())
        print(f"{pairs} pairs of help texts, {2 * ACCUMULATION} a step; {os.cpu_count()} cores", file=sys.stderr)
        for turn, name in itertools.product(range(given.rounds), given.only):
            out = out_of(folder, name)
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            if name in TRL:
                words = [sys.executable, __file__, "--rank-of", name, "--folder", str(folder)]
                words += ["--adapt-experts"] if given.adapt_experts else []
            else:
                words = [sys.executable, "-m", "windlass", "train", str(run_file(name, folder, given.adapt_experts))]
            one = race(words, out, lambda name=name: steps_done(name, folder), environ=peers.ENVIRON)  # type: ignore[misc]
            found[name].append(one)
            print(f"  {turn + 1}/{given.rounds} {name}: {one.why or describe(one, pairs)}", file=sys.stderr, flush=True)
        show(found, pairs)


def whole_seconds(one: Measured) -> float:
    """Return the time from the start to the end of the last step."""
    return one.first_step_seconds + one.step_seconds * (one.steps - 1)


def describe(one: Measured, pairs: int) -> str:
    return f"{pairs / whole_seconds(one):.2f} pairs/s, {one.step_seconds:.2f} s a step, {one.peak_gib:.2f} GiB"


def show(found: Mapping[str, Sequence[Measured]], pairs: int) -> None:
    first = next(iter(found.values()))
    heads = ("", "pairs/s, all included", "x", "s a step", "x", "GiB a rank", "x")
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for name, runs in found.items():
        both = list(zip(first, runs, strict=True))
        if not all(a.ok and b.ok for a, b in both):
            print(f"| {name} | did not run |" + " |" * 5)
            continue
        rates = median(pairs / whole_seconds(run) for run in runs)
        whole = [whole_seconds(a) / whole_seconds(b) for a, b in both]
        steps = [a.step_seconds / b.step_seconds for a, b in both]
        memory = [b.peak_gib / a.peak_gib for a, b in both]
        columns = [
            (f"{rates:.2f}", whole),
            (f"{median(run.step_seconds for run in runs):.2f}", steps),
            (f"{median(run.peak_gib for run in runs):.2f}", memory),
        ]
        texts = [f"{value} | {median(r):.2f} ({min(r):.2f} to {max(r):.2f})" for value, r in columns]
        print(f"| {name} | " + " | ".join(texts) + " |")


if __name__ == "__main__":
    main()
