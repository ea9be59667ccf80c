"""Preparing data in tokens per second: windlass, `datasets.map` and TRL on the same rows of each format, in one run.

    python benchmarks/data.py
    python benchmarks/data.py --kind "3 turns" "40 turns"   40 s of CPU time
    python benchmarks/data.py --large                       6 minutes on two quiet cores

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

`--large` prepares 200 MB of made-up chats (or `--megabytes`) as a run does: tokenized, 2 % held out, near duplicates
found, packed, audited, digested and written. Beside it `datasets.map` with two processes renders and tokenizes them and
does nothing else: for the ids, or for the ids and the assistant's mask. Time includes that processes start, CPU time
is that of all of them, memory the largest proportional set size (Pss) of all of them together.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

os.environ["HF_HUB_OFFLINE"] = "1"
MAX_LENGTH = 1024
EVERY = {"3 turns": 4, "40 turns": 24}  # one of so many rows is written: they are longer
ROUNDS = 6
LARGE_ROUNDS = 3
OURS = "windlass, all of it"


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


def windlass_way(rows: Path, tokenizer: Any, folder: Path, **section: Any) -> tuple[float, Any]:
    from windlass.data.prepare import prepare_data
    from windlass.runfile import RunFile

    run = RunFile.model_validate(
        {
            "model": {"model_name_or_path": "unused"},
            "data": {"dataset_name_or_path": str(rows), "max_length": MAX_LENGTH, "packing": False, **section},
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


def map_large_way(rows: Path, tokenizer: Any, folder: Path, *, masks: bool = False) -> tuple[float, Any]:
    from datasets import load_dataset

    found = load_dataset("json", data_files=str(rows), split="train", cache_dir=str(folder / "cache"))
    names = ("input_ids", "assistant_masks") if masks else ("input_ids",)

    def tokenized(batch: dict[str, list[Any]]) -> dict[str, Any]:
        options = {"return_dict": True, "return_assistant_tokens_mask": masks}
        done = tokenizer.apply_chat_template(batch["messages"], **options)
        return {name: done[name] for name in names}

    start = time.perf_counter()
    found = found.map(tokenized, batched=True, num_proc=2, remove_columns=found.column_names)
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


LARGE: dict[str, Callable[[Path, Any, Path], tuple[float, Any]]] = {
    OURS: partial(windlass_way, packing=True, val_fraction=0.02),
    "datasets.map(num_proc=2), ids": map_large_way,
    "datasets.map(num_proc=2), ids and masks": partial(map_large_way, masks=True),
}


def write_chats(path: Path, megabytes: float) -> None:
    """Write chats of one to three turns, of pieces of a few words each; one in a hundred is equal to the one before it,
    and one nearly so."""
    from pydoc_data.topics import topics

    words = " ".join(topics[name] for name in sorted(topics)).split()
    rng = random.Random(0)

    def write_text(most: int) -> str:
        pieces = [(rng.randrange(len(words)), rng.randint(2, 7)) for _ in range(rng.randint(1, most))]
        return " ".join(word for start, size in pieces for word in words[start : start + size])

    messages: list[dict[str, str]] = []
    with path.open("w") as file:
        while file.tell() < megabytes * 1e6:
            kind = rng.random()
            if kind < 0.98 or not messages:
                roles = ("user", "assistant") * rng.choice((1, 1, 1, 2, 3))
                messages = [{"role": role, "content": write_text(4 if role == "user" else 40)} for role in roles]
            elif kind < 0.99:
                messages[-1]["content"] += f" {rng.choice(words)}"
            file.write(json.dumps({"messages": messages}) + "\n")


def list_ways(kind: str) -> list[str]:
    turns = kind.endswith("turns")
    return [name for name, way in WAYS.items() if way is not (map_way if turns else bare_way)]


def serve(way: str, tokenizer: Path) -> None:
    """Measure one way, in this process, on each file named on stdin."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    opened = AutoTokenizer.from_pretrained(tokenizer)
    ways = {**WAYS, **LARGE}
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
                ways[way](few, opened, folder / "warm")
            before = measure_cpu()
            seconds, found = ways[way](rows, opened, folder / "out")
            taken = {"seconds": seconds, "cpu": measure_cpu() - before, "tokens": 0}
            if way in WAYS:
                taken["tokens"] = sum(len(row) for row in found["input_ids"])
        print(json.dumps(taken), file=sys.__stdout__, flush=True)


def measure_cpu() -> float:
    """Return the CPU time of this process and of those that it started and that have ended."""
    own, others = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime


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


def watch_memory(pid: int, ended: threading.Event, peak: list[float]) -> None:
    """Keep the largest memory of a process and of all that it started, in MiB."""
    process = psutil.Process(pid)
    while not ended.wait(0.2):
        total = 0
        for each in (process, *process.children(recursive=True)):
            with suppress(OSError, ValueError, IndexError):  # it has ended
                text = Path(f"/proc/{each.pid}/smaps_rollup").read_text()
                total += int(text.split("Pss:")[1].split()[0])
        peak[0] = max(peak[0], total / 1024)


def run_large(folder: Path, tokenizer: Path, megabytes: float, rounds: int, ways: list[str]) -> None:
    rows = folder / "chats.jsonl"
    write_chats(rows, megabytes)
    with rows.open("rb") as file:
        count = sum(1 for _ in file)
    taken: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    peaks = {way: [0.0] for way in ways}
    for number in range(rounds):
        for way in ways[:: -1 if number % 2 else 1]:
            print(f"round {number + 1} of {rounds}: {way}", file=sys.stderr, flush=True)
            served = Served(way, tokenizer)
            ended = threading.Event()
            watch = threading.Thread(target=watch_memory, args=(served.process.pid, ended, peaks[way]))
            watch.start()
            taken[way].append(served.measure(rows))
            ended.set()
            watch.join()
            served.process.communicate()
    ours = taken[OURS]
    print(f"{count:,} chats, {megabytes:g} MB\n")
    print("| way | s | CPU s | rows/s | memory, MiB | windlass's time / its | windlass's CPU time / its |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for way, measured in taken.items():
        seconds, cpu = (statistics.median(one[key] for one in measured) for key in ("seconds", "cpu"))
        pairs = [*zip(ours, measured, strict=True)]
        ratios = [show_ratio([own[key] / one[key] for own, one in pairs]) for key in ("seconds", "cpu")]
        figures = f"{seconds:.1f} | {cpu:.1f} | {count / seconds:,.0f} | {peaks[way][0]:,.0f}"
        print(f"| {way} | {figures} | {' | '.join(ratios)} |", flush=True)


def show_ratio(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=3, help="of the text")
    parser.add_argument("--rounds", type=int, help=f"{ROUNDS}, or {LARGE_ROUNDS} with --large")
    parser.add_argument("--large", action="store_true", help="prepare made-up chats as a run does")
    parser.add_argument("--megabytes", type=float, default=200, help="of chats, with --large")
    parser.add_argument("--alone", action="store_true", help="windlass alone, with --large: for its memory")
    parser.add_argument("--kind", nargs="*", choices=FORMATS, default=[*FORMATS], help="formats to measure")
    parser.add_argument("--serve", choices=(*WAYS, *LARGE), help=argparse.SUPPRESS)
    parser.add_argument("--tokenizer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.tokenizer)
        return
    from windlass import tiny

    versions = ", ".join(f"{name} {version(name)}" for name in ("datasets", "tokenizers", "trl", "transformers"))
    print(f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} cores; {versions}\n")
    if options.large:
        with tempfile.TemporaryDirectory() as name:
            tokenizer = tiny.write_tokenizer(Path(name) / "tokenizer", vocab=4096)
            ways = [OURS] if options.alone else [*LARGE]
            run_large(Path(name), tokenizer, options.megabytes, options.rounds or LARGE_ROUNDS, ways)
        return
    options.rounds = options.rounds or ROUNDS
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
