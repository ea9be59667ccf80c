"""Tokenizing and packing in tokens per second: windlass, `datasets.map` and TRL on the same file, in one run.

    python benchmarks/data.py                       text that every Python carries, as JSON lines
    python benchmarks/data.py --formats             the same in every format, not packed: some 6 minutes
    python benchmarks/data.py --file rows.txt       another file
    python benchmarks/data.py --json                one JSON object

TRL runs SFTTrainer's own preparation, from rows to packed labels. Each way starts from the same file with nothing
cached, in its own process, and is timed after its imports. With several rounds the ways alternate, and the fastest
round of each is shown. With `map`, chats and completions get the labels that a careful script would make, from the
character offsets of what follows the prompt. TRL computes its loss on whole chats here, which is less work; it has no
counterpart to alpaca rows.
"""

from __future__ import annotations

import argparse
import itertools
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


FORMATS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "text": lambda asked, answer: {"text": f"{asked} {answer}"},
    "messages": lambda asked, answer: {"messages": chat(asked, answer)},
    "sharegpt": lambda asked, answer: {
        "conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": answer}]
    },
    "alpaca": lambda asked, answer: {"instruction": asked, "input": "", "output": answer},
    "prompt-completion": lambda asked, answer: {"prompt": asked, "completion": f" {answer}"},
    "input_ids": lambda asked, answer: {"input_ids": [*f"{asked} {answer}".encode()]},
}


def chat(asked: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def write_rows(path: Path, copies: int, kind: str = "text") -> None:
    """Write paragraphs of many lengths, each copy made different; as text, some are empty."""
    from pydoc_data.topics import topics

    with path.open("w") as file:
        for copy in range(copies):
            for name in sorted(topics):
                for part in topics[name].split("\n\n"):
                    row = FORMATS[kind](f"What is {name}?", f"{part} {copy}")
                    if kind == "text":
                        row = {"text": f"{part} {copy}" if part.strip() else ""}
                    file.write(json.dumps(row) + "\n")


def windlass_way(rows: Path, tokenizer: Any, folder: Path, packing: bool) -> tuple[float, Any]:
    from windlass.data.prepare import prepare_data
    from windlass.runfile import RunFile

    run = RunFile.model_validate(
        {
            "model": {"model_name_or_path": "unused"},
            "data": {"dataset_name_or_path": str(rows), "max_length": MAX_LENGTH, "packing": packing},
            "train": {"output_dir": str(folder), "max_steps": 1},
        }
    )
    start = time.perf_counter()
    found = prepare_data(run, tokenizer).train
    return time.perf_counter() - start, found


def trl_way(rows: Path, tokenizer: Any, folder: Path, packing: bool) -> tuple[float, Any]:
    """Run SFTTrainer's preparation without a model: the method reads only these attributes of the trainer."""
    from types import SimpleNamespace

    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    settings = SFTConfig(
        output_dir=str(folder), max_length=MAX_LENGTH, packing=packing, use_cpu=True, bf16=False, report_to=[]
    )
    trainer = SimpleNamespace(
        _tokenizer=tokenizer, completion_only_loss=True, chat_template=None, _is_vision_dataset=False
    )
    start = time.perf_counter()
    kind = "text" if rows.suffix == ".txt" else "json"
    found = load_dataset(kind, data_files=str(rows), split="train", cache_dir=str(folder / "cache"))
    if "text" in found.column_names:
        found = found.filter(lambda row: bool(row["text"].strip()))
    if "instruction" in found.column_names:  # as a formatting function would
        found = found.map(lambda row: {"messages": chat(row["instruction"], row["output"])})
    found = SFTTrainer._prepare_dataset(trainer, found, tokenizer, settings, packing, None, "train")
    return time.perf_counter() - start, found


def map_way(rows: Path, tokenizer: Any, folder: Path, packing: bool) -> tuple[float, Any]:
    """Run the batched `map` that a careful script would write, with TRL's packing."""
    from datasets import load_dataset
    from trl import pack_dataset

    start = time.perf_counter()
    kind = "text" if rows.suffix == ".txt" else "json"
    found = load_dataset(kind, data_files=str(rows), split="train", cache_dir=str(folder / "cache"))
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
    if packing:
        found = pack_dataset(found, MAX_LENGTH, "bfd")
    return time.perf_counter() - start, found


WAYS: dict[str, Callable[[Path, Any, Path, bool], tuple[float, Any]]] = {
    "windlass": windlass_way,
    "datasets.map, batched": map_way,
    "TRL SFTTrainer": trl_way,
}


def measure(way: str, rows: Path, tokenizer: Path, packing: bool) -> dict[str, Any]:
    """Measure one way in this process, which does nothing else."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        kind = AutoTokenizer.from_pretrained(tokenizer)
        WAYS[way](small(rows, Path(folder)), kind, Path(folder) / "warm", packing)  # imports and first calls
        seconds, found = WAYS[way](rows, kind, Path(folder) / "out", packing)
        tokens = sum(len(row) for row in found["input_ids"])
        return {"way": way, "packing": packing, "seconds": seconds, "rows_out": len(found), "tokens": tokens}


def small(rows: Path, folder: Path) -> Path:
    with rows.open() as file:
        head = [next(file, "") for _ in range(50)]
    path = folder / f"small{rows.suffix}"
    path.write_text("".join(head))
    return path


def apart(way: str, rows: Path, tokenizer: Path, packing: bool) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", way, "--file", str(rows), "--tokenizer", str(tokenizer)]
    done = subprocess.run([*command, *(["--packing"] if packing else [])], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, help="JSON lines with `text`, or text of a row a line")
    parser.add_argument("--copies", type=int, help="of the built-in text; default: 20, with --formats 3")
    parser.add_argument("--rounds", type=int, help="default: 1, with --formats 2")
    parser.add_argument("--formats", action="store_true", help="every format, not packed")
    parser.add_argument("--tokenizer", type=Path, help="a folder; else one is trained")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--packing", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure(asked.one, asked.file, asked.tokenizer, asked.packing)))
        return
    with tempfile.TemporaryDirectory() as folder:
        from windlass import tiny

        kinds = [*FORMATS] if asked.formats else [""]
        copies, rounds = asked.copies or (3 if asked.formats else 20), asked.rounds or (2 if asked.formats else 1)
        files = {kind: asked.file or Path(folder) / f"{kind or 'rows'}.jsonl" for kind in kinds}
        for kind, rows in files.items() if not asked.file else ():
            write_rows(rows, copies, kind or "text")
        tokenizer = asked.tokenizer or tiny.write_tokenizer(Path(folder) / "tokenizer", vocab=4096)
        with files[kinds[0]].open("rb") as file:
            count = sum(1 for _ in file)
        cases = [(kind, packing) for kind in kinds for packing in ((False,) if asked.formats else (False, True))]
        best: dict[tuple[str, bool, str], dict[str, Any]] = {}
        for number in range(rounds):
            for (kind, packing), way in itertools.product(cases, list(WAYS)[:: -1 if number % 2 else 1]):
                print(f"round {number + 1} of {rounds}: {way}, {kind or 'text'}", file=sys.stderr, flush=True)
                one, key = apart(way, files[kind], tokenizer, packing), (kind, packing, way)
                if key not in best or one["seconds"] < best[key]["seconds"]:
                    best[key] = one | ({"format": kind} if kind else {})
        found = [best[kind, packing, way] for kind, packing in cases for way in WAYS]
    report(found, count, as_json=asked.json)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether both were measured on the same rows, packed or not."""
    return (one.get("format"), one["packing"]) == (other.get("format"), other["packing"])


def report(found: list[dict[str, Any]], rows: int, *, as_json: bool) -> None:
    machine = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("datasets", "tokenizers", "trl", "transformers")},
        "rows": rows,
    }
    if as_json:
        print(json.dumps({**machine, "results": found}))
        return
    print(machine)
    print(f"{'':24} {'':17} {'seconds':>8} {'rows/s':>10} {'tokens/s':>12} {'rows out':>9} {'windlass':>9}")
    for one in found:
        rates = f"{rows / one['seconds']:10,.0f} {one['tokens'] / one['seconds']:12,.0f}"
        kind = one.get("format") or ("packed" if one["packing"] else "not packed")
        ours = next(each for each in found if each["way"] == "windlass" and same(each, one))
        ratio = one["seconds"] / one["tokens"] * ours["tokens"] / ours["seconds"]
        print(f"{one['way']:24} {kind:17} {one['seconds']:8.2f} {rates} {one['rows_out']:9,} {ratio:8.2f}x")


if __name__ == "__main__":
    main()
