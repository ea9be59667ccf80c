"""Trained tokens per second, unpacked against packed, on a WikiText-like mix of lengths: one model, one run.

    python benchmarks/packing.py                 rows like WikiText-2's: a third empty, 110 tokens on average
    python benchmarks/packing.py --file rows.txt another file, one row per line
    python benchmarks/packing.py --json          one JSON object

A tiny Llama with random weights runs forward, backward and AdamW on the batches that training makes of prepared rows. A
CPU is bound by arithmetic, so this shows the cost of padding; GPUs that spend their time gathering weights for every
micro-batch are bound by the number of micro-batches, which is shown too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from windlass import tiny
from windlass.data.collate import PaddedCollator, PaddingFreeCollator
from windlass.data.packing import shuffle
from windlass.data.prepare import PreparedData, prepare_data
from windlass.runfile import RunFile

MAX_LENGTH, VOCABULARY, WARM_STEPS = 1024, 4096, 2


def wikitext_like(path: Path, rows: int) -> None:
    """Return rows with the lengths of WikiText-2: 34 % empty, headings, paragraphs; the words are from Python's own
    texts."""
    words = " ".join(topics[name] for name in sorted(topics)).split()
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(rows):
            kind = draw.random()
            count = 0 if kind < 0.34 else draw.randint(2, 8) if kind < 0.55 else int(draw.gammavariate(2.6, 32))
            start = draw.randrange(len(words) - 1000)
            file.write(" ".join(words[start : start + min(count, 400)]) + "\n")


def prepared(rows: Path, tokenizer: Any, folder: Path, packing: bool) -> PreparedData:
    run = RunFile.model_validate(
        {
            "model": {"model_name_or_path": "unused"},
            "data": {"dataset_name_or_path": str(rows), "max_length": MAX_LENGTH, "packing": packing},
            "train": {"output_dir": str(folder / "out"), "max_steps": 1, "per_device_train_batch_size": 8},
        }
    )
    return prepare_data(run, tokenizer)


def batches(found: PreparedData, batch: int, grouped: bool, padding_free: bool) -> Iterator[dict[str, Any]]:
    collate = PaddingFreeCollator() if padding_free else PaddedCollator(0)
    order = found.order(seed=0, epoch=0, global_batch=batch) if grouped else shuffle(len(found.train), 0, 0)
    if grouped:  # the longest batch comes first: measured here is the mix
        order = np.concatenate([order[batch:], order[:batch]])
    for start in range(0, len(order), batch):
        yield collate([found.train.slice(int(i), 1).to_pylist()[0] for i in order[start : start + batch]])


def measure(found: PreparedData, batch: int, grouped: bool, packed: bool, seconds: float) -> dict[str, Any]:
    """Train for this many seconds, after two steps that are not counted."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, attn_implementation="sdpa"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = positions = steps = 0
    start = 0.0
    for number, inputs in enumerate(batches(found, batch, grouped, packed)):
        if number == WARM_STEPS:
            start = time.perf_counter()
        model(**{key: inputs[key] for key in KEYS if key in inputs}, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number >= WARM_STEPS:
            steps += 1
            positions += inputs["input_ids"].numel()
            tokens += int(inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).sum())
            if time.perf_counter() - start > seconds:
                break
    taken = time.perf_counter() - start
    return {
        "tokens_per_second": tokens / taken,
        "useful_share": tokens / positions,
        "tokens_per_micro_batch": tokens / steps,
        "micro_batches_an_epoch": -(-len(found.train) // batch),
        "steps_measured": steps,
    }


KEYS = ("input_ids", "attention_mask", "position_ids", "labels")
# way: rows in a micro-batch, sorted by length, packed
WAYS = {
    "one row": (1, False, False),
    "8 random rows, padded": (8, False, False),
    "8 rows of like length": (8, True, False),
    "packed to 1024": (1, False, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, help="text, a row a line")
    parser.add_argument("--rows", type=int, default=4000, help="of the built-in mix")
    parser.add_argument("--seconds", type=float, default=20, help="for each way")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = asked.file or folder / "rows.txt"
        if not asked.file:
            wikitext_like(rows, asked.rows)
        tokenizer = AutoTokenizer.from_pretrained(tiny.write_tokenizer(folder / "tokenizer", vocab=VOCABULARY))
        sets = {packing: prepared(rows, tokenizer, folder, packing) for packing in (False, True)}
        found = {
            way: measure(sets[packed], batch, grouped, packed, asked.seconds)
            for way, (batch, grouped, packed) in WAYS.items()
        }
        lengths = sets[False].audit["splits"]["train"]["lengths"]
    machine = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "lengths": lengths,
    }
    if asked.json:
        print(json.dumps({**machine, "results": found}))
        return
    print(machine)
    print(f"{'':24} {'tokens/s':>10} {'useful':>8} {'tokens/micro-batch':>19} {'micro-batches/epoch':>20}")
    for way, one in found.items():
        print(
            f"{way:24} {one['tokens_per_second']:10,.0f} {one['useful_share']:8.1%} "
            f"{one['tokens_per_micro_batch']:19,.0f} {one['micro_batches_an_epoch']:20,}"
        )


if __name__ == "__main__":
    main()
