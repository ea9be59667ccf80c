"""Tokenizing in tokens per second: windlass, `datasets.map` and TRL on the same rows of each format, in one run.

    python benchmarks/data.py [--copies 3] [--rounds 2]     some 6 minutes

The rows are text that every Python carries. TRL runs SFTTrainer's own preparation, from rows to labels. Each way starts
from the same file with nothing cached, in its own process, and is timed after its imports. The ways alternate, and the
fastest round of each is shown. With `map`, chats and completions get the labels that a careful script would make, from
the character offsets of what follows the prompt. TRL computes its loss on whole chats here, which is less work, except
those of 3 and 40 turns, which it masks by the template's marks; it has no counterpart to alpaca rows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
MAX_LENGTH = 1024
EVERY = {"3 turns": 4, "40 turns": 24}  # one of so many rows is written: they are longer


FORMATS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "text": lambda asked, answer: {"text": f"{asked} {answer}"},
    "messages": lambda asked, answer: {"messages": chat(asked, answer)},
    "3 turns": lambda asked, answer: {"messages": chat(asked, answer, 3)},
    "40 turns": lambda asked, answer: {"messages": chat(asked, answer, 40)},
    "sharegpt": lambda asked, answer: {
        "conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": answer}]
    },
    "alpaca": lambda asked, answer: {"instruction": asked, "input": "", "output": answer},
    "prompt-completion": lambda asked, answer: {"prompt": asked, "completion": f" {answer}"},
    "input_ids": lambda asked, answer: {"input_ids": [*f"{asked} {answer}".encode()]},
}


def chat(asked: str, answer: str, turns: int = 1) -> list[dict[str, str]]:
    """Return a chat of so many turns, each with a part of the answer."""
    words = answer.split()
    size = -(-len(words) // turns)
    parts = [" ".join(words[size * i : size * (i + 1)]) or "Yes." for i in range(turns)] if turns > 1 else [answer]
    return [
        {"role": role, "content": text}
        for i, part in enumerate(parts)
        for role, text in (("user", f"{asked} {i}" if i else asked), ("assistant", part))
    ]


def write_rows(path: Path, copies: int, kind: str = "text") -> None:
    """Write paragraphs of many lengths, each copy made different; as text, some are empty."""
    from pydoc_data.topics import topics

    with path.open("w") as file:
        for copy in range(copies):
            for name in sorted(topics):
                for part in topics[name].split("\n\n")[:: EVERY.get(kind, 1)]:
                    row = FORMATS[kind](f"What is {name}?", f"{part} {copy}")
                    if kind == "text":
                        row = {"text": f"{part} {copy}" if part.strip() else ""}
                    file.write(json.dumps(row) + "\n")


def windlass_way(rows: Path, tokenizer: Any, folder: Path) -> tuple[float, Any]:
    from windlass.data.prepare import prepare_data
    from windlass.runfile import RunFile

    run = RunFile.model_validate(
        {
            "model": {"model_name_or_path": "unused"},
            "data": {"dataset_name_or_path": str(rows), "max_length": MAX_LENGTH, "packing": False},
            "train": {"output_dir": str(folder), "max_steps": 1},
        }
    )
    start = time.perf_counter()
    found = prepare_data(run, tokenizer, say=print).train
    return time.perf_counter() - start, found


def trl_way(rows: Path, tokenizer: Any, folder: Path) -> tuple[float, Any]:
    """Run SFTTrainer's preparation without a model: the method reads only these attributes of the trainer."""
    from types import SimpleNamespace

    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    settings = SFTConfig(
        output_dir=str(folder), max_length=MAX_LENGTH, packing=False, use_cpu=True, bf16=False, report_to=[],
        assistant_only_loss="turns" in rows.name,
    )  # fmt: skip
    trainer = SimpleNamespace(
        _tokenizer=tokenizer, completion_only_loss=True, chat_template=None, _is_vision_dataset=False
    )
    start = time.perf_counter()
    found = load_dataset("json", data_files=str(rows), split="train", cache_dir=str(folder / "cache"))
    if "text" in found.column_names:
        found = found.filter(lambda row: bool(row["text"].strip()))
    if "instruction" in found.column_names:  # as a formatting function would
        found = found.map(lambda row: {"messages": chat(row["instruction"], row["output"])})
    found = SFTTrainer._prepare_dataset(trainer, found, tokenizer, settings, False, None, "train")
    return time.perf_counter() - start, found


def map_way(rows: Path, tokenizer: Any, folder: Path) -> tuple[float, Any]:
    """Run the batched `map` that a careful script would write."""
    from datasets import load_dataset

    start = time.perf_counter()
    found = load_dataset("json", data_files=str(rows), split="train", cache_dir=str(folder / "cache"))
    if "text" in found.column_names:
        found = found.filter(lambda row: bool(row["text"].strip()))
    roles = {"human": "user", "gpt": "assistant"}

    def chats(batch: dict[str, list[Any]]) -> list[list[dict[str, str]]]:
        if "instruction" in batch:
            return [chat(*both) for both in zip(batch["instruction"], batch["output"], strict=True)]
        if "conversations" in batch:
            return [[{"role": roles[m["from"]], "content": m["value"]} for m in c] for c in batch["conversations"]]
        return batch["messages"]

    def tokenized(batch: dict[str, list[Any]]) -> dict[str, Any]:
        if "input_ids" in batch:
            return {"input_ids": [one[:MAX_LENGTH] for one in batch["input_ids"]]}
        options: dict[str, Any] = {"return_attention_mask": False}
        if "text" in batch:
            ids = tokenizer([text + tokenizer.eos_token for text in batch["text"]], **options)["input_ids"]
            return {"input_ids": [one[:MAX_LENGTH] for one in ids]}
        if "prompt" in batch:
            heads, tails = batch["prompt"], [text + tokenizer.eos_token for text in batch["completion"]]
            texts = [head + tail for head, tail in zip(heads, tails, strict=True)]
        else:
            asked = chats(batch)
            texts = tokenizer.apply_chat_template(asked, tokenize=False)
            heads = tokenizer.apply_chat_template([c[:-1] for c in asked], tokenize=False, add_generation_prompt=True)
            options["add_special_tokens"] = False
        done = tokenizer(texts, return_offsets_mapping=True, **options)
        labels = [
            [token if end > len(head) else -100 for token, (_, end) in zip(ids, offsets, strict=True)]
            for ids, offsets, head in zip(done["input_ids"], done["offset_mapping"], heads, strict=True)
        ]
        return {
            "input_ids": [one[:MAX_LENGTH] for one in done["input_ids"]],
            "labels": [one[:MAX_LENGTH] for one in labels],
        }

    found = found.map(tokenized, batched=True, remove_columns=[c for c in found.column_names if c != "input_ids"])
    return time.perf_counter() - start, found


WAYS: dict[str, Callable[[Path, Any, Path], tuple[float, Any]]] = {
    "windlass": windlass_way,
    "datasets.map, batched": map_way,
    "TRL SFTTrainer": trl_way,
}


def measure(way: str, rows: Path, tokenizer: Path) -> dict[str, Any]:
    """Measure one way in this process, which does nothing else."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        opened = AutoTokenizer.from_pretrained(tokenizer)
        few = folder / f"few {rows.name}"
        with rows.open() as file:
            few.write_text("".join(next(file) for _ in range(50)))
        WAYS[way](few, opened, folder / "warm")  # imports and first calls
        seconds, found = WAYS[way](rows, opened, folder / "out")
        return {"seconds": seconds, "tokens": sum(len(row) for row in found["input_ids"])}


def measure_apart(way: str, rows: Path, tokenizer: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", way, "--file", str(rows), "--tokenizer", str(tokenizer)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=3, help="of the text")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kind", nargs="*", choices=FORMATS, default=[*FORMATS], help="formats to measure")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tokenizer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.file, options.tokenizer)))
        return
    from windlass import tiny

    best: dict[tuple[str, str], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        tokenizer = tiny.write_tokenizer(Path(name) / "tokenizer", vocab=4096)
        for kind in options.kind:
            rows = Path(name) / f"{kind}.jsonl"
            write_rows(rows, options.copies, kind)
            for number in range(options.rounds):
                for way in [*WAYS][:: -1 if number % 2 else 1]:
                    print(f"round {number + 1} of {options.rounds}: {way}, {kind}", file=sys.stderr, flush=True)
                    taken = measure_apart(way, rows, tokenizer)
                    best[kind, way] = min(best.get((kind, way), taken), taken, key=lambda once: once["seconds"])
        with rows.open("rb") as file:
            count = sum(1 for _ in file)
    versions = ", ".join(f"{name} {version(name)}" for name in ("datasets", "tokenizers", "trl", "transformers"))
    print(f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} cores; {versions}; {count:,} rows\n")
    print("| format | engine | s | rows/s | tokens/s | time, windlass = 1 |")
    print("| --- | --- | --- | --- | --- | --- |")
    for (kind, way), taken in best.items():
        seconds, tokens, ours = taken["seconds"], taken["tokens"], best[kind, "windlass"]
        ratio = seconds / tokens * ours["tokens"] / ours["seconds"]
        rates = f"{count / seconds:,.0f} | {tokens / seconds:,.0f}"
        print(f"| {kind} | {way} | {seconds:.2f} | {rates} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
