"""Preparing data in tokens per second: windlass, `datasets.map` and TRL on the same rows of each format, in one run.

    python benchmarks/data.py
    python benchmarks/data.py --kind "3 turns" "40 turns"   40 s of CPU time

Each way is one process, timed after its imports and a first call; it starts from the same file each time with nothing
cached. The ways take turns: a ratio is that of two measurements of one round, shown as their median and, in brackets,
the least and the largest, which enclose the true median with 97 % if there are six rounds. CPU time counts all threads:
it depends less on what else the machine does, while time shows that windlass tokenizes in threads.

TRL runs SFTTrainer's own preparation, from rows to labels, with the template that chats have here, which marks answers.
It renders, tokenizes and masks chats of 3 and 40 turns with `assistant_only_loss`, as windlass does; on the other chats
it computes its loss on everything, which is less work, and it has no counterpart to alpaca rows. *bare* is less than
either: the rows through `apply_chat_template` with the assistant's mask, one after the other, kept nowhere; no labels,
no check, no cut, no audit. With `map`, chats and completions get the labels that a careful script would make, from the
character offsets of what follows the prompt. The rows are text that every Python carries.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
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
ROUNDS = 6


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


def bare_way(rows: Path, tokenizer: Any, _: Path) -> tuple[float, Any]:
    start = time.perf_counter()
    ids = []
    with rows.open() as file:
        for line in file:
            messages = json.loads(line)["messages"]
            done = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
            ids.append(done["input_ids"][:MAX_LENGTH])
    return time.perf_counter() - start, {"input_ids": ids}


WAYS: dict[str, Callable[[Path, Any, Path], tuple[float, Any]]] = {
    "windlass": windlass_way,
    "TRL SFTTrainer": trl_way,
    "datasets.map, batched": map_way,
    "bare": bare_way,
}


def list_ways(kind: str) -> list[str]:
    turns = kind.endswith("turns")
    return [name for name, way in WAYS.items() if way is not (map_way if turns else bare_way)]


def serve(way: str, tokenizer: Path) -> None:
    """Measure one way, in this process, on each file named on stdin."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    opened = AutoTokenizer.from_pretrained(tokenizer)
    seen = set()
    for line in sys.stdin:
        rows = Path(line.rstrip("\n"))
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if rows not in seen:  # imports and first calls
                seen.add(rows)
                few = folder / f"few {rows.name}"
                with rows.open() as file:
                    few.write_text("".join(next(file) for _ in range(50)))
                WAYS[way](few, opened, folder / "warm")
            before = time.process_time()
            seconds, found = WAYS[way](rows, opened, folder / "out")
            cpu = time.process_time() - before
            taken = {"seconds": seconds, "cpu": cpu, "tokens": sum(len(row) for row in found["input_ids"])}
        print(json.dumps(taken), file=sys.__stdout__, flush=True)


class Served:
    """A process that measures one way."""

    def __init__(self, way: str, tokenizer: Path) -> None:
        command = [sys.executable, __file__, "--serve", way, "--tokenizer", str(tokenizer)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def measure(self, rows: Path) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        print(rows, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith('{"seconds"'):
                return dict(json.loads(line))
        raise SystemExit("a measuring process ended: its error is above")


def show_ratio(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=3, help="of the text")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--kind", nargs="*", choices=FORMATS, default=[*FORMATS], help="formats to measure")
    parser.add_argument("--serve", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--tokenizer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.tokenizer)
        return
    from windlass import tiny

    versions = ", ".join(f"{name} {version(name)}" for name in ("datasets", "tokenizers", "trl", "transformers"))
    print(f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} cores; {versions}\n")
    print(
        "| format | engine | s | CPU s | rows/s | answers/s | tokens/s | time, windlass = 1 | CPU time, windlass = 1 |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name:
        tokenizer = tiny.write_tokenizer(Path(name) / "tokenizer", vocab=4096)
        needed = dict.fromkeys(way for kind in options.kind for way in list_ways(kind))
        served = {way: Served(way, tokenizer) for way in needed}
        for kind in options.kind:
            rows = Path(name) / f"{kind}.jsonl"
            write_rows(rows, options.copies, kind)
            taken: dict[str, list[dict[str, Any]]] = {way: [] for way in list_ways(kind)}
            for number in range(options.rounds):
                for way in [*taken][:: -1 if number % 2 else 1]:
                    print(f"round {number + 1} of {options.rounds}: {way}, {kind}", file=sys.stderr, flush=True)
                    taken[way].append(served[way].measure(rows))
            show(kind, rows, taken)
        for one in served.values():
            one.process.communicate()


def show(kind: str, rows: Path, taken: dict[str, list[dict[str, Any]]]) -> None:
    with rows.open("rb") as file:
        count = sum(1 for _ in file)
    answers = count * int(kind.split()[0]) if kind.endswith("turns") else count
    for way, rounds in taken.items():
        seconds, cpu, tokens = (statistics.median(one[key] for one in rounds) for key in ("seconds", "cpu", "tokens"))
        pairs = [*zip(rounds, taken["windlass"], strict=True)]
        ratios = [
            show_ratio([one[key] / one["tokens"] * ours["tokens"] / ours[key] for one, ours in pairs])
            for key in ("seconds", "cpu")
        ]
        rates = " | ".join(f"{each / seconds:,.0f}" for each in (count, answers, tokens))
        print(f"| {kind} | {way} | {seconds:.2f} | {cpu:.2f} | {rates} | {' | '.join(ratios)} |", flush=True)


if __name__ == "__main__":
    main()
