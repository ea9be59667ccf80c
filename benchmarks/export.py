"""Merging an adapter into a sharded model: tensor by tensor, against PEFT's merge_and_unload and saving.

    python benchmarks/export.py [--gib 2] [--repeat 1] [--workers 2]

Merges a synthetic dense model in BF16 shards with an adapter of rank 16 on all its linear layers, both written one
tensor at a time. Each way runs in a fresh process on the same files, after they are dropped from the page cache. Memory
is the process's peak of resident memory, with the peak after importing its libraries in brackets. windlass's proof
reads everything a second time; PEFT's way has none. Logits are left out: they need the model in memory.
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
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from windlass.model import read_base
from windlass.model.config import describe
from windlass.train.load import read_peak_rss, reset_peak_rss

GIB = 2**30
WAYS = {
    "written": "windlass, merged and written",
    "proven": "windlass, merged, written and proven",
    "peft": "PEFT: load, merge_and_unload, save_pretrained",
}
WIDTH, RANK = 2048, 16
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the model in BF16")
    parser.add_argument("--shard-gib", type=float, default=0.5, help="size of its files")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2, help="files that windlass writes at a time")
    parser.add_argument("--dir", help="where to make it; three times its size is needed there")
    parser.add_argument("--way", choices=list(WAYS), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.way:
        run(asked.way, Path(asked.dir), asked.workers, asked.shard_gib)
        return
    with tempfile.TemporaryDirectory(dir=asked.dir) as directory:
        folder = Path(directory)
        size = write(folder, asked.gib, asked.shard_gib)
        turns: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(asked.repeat):
            for way, done in turns.items():
                forget(folder / "base")
                done.append(measure(way, folder, asked.workers, asked.shard_gib))
    show(turns, size, asked)


def write(folder: Path, gib: float, shard_gib: float) -> int:
    """Write base and adapter, one tensor at a time. Returns the bytes of the base."""
    layer = (4 * WIDTH + 3 * 4 * WIDTH) * WIDTH * 2
    config: dict[str, Any] = {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], "dtype": "bfloat16", "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH, "num_hidden_layers": max(1, round(gib * GIB / layer)),
        "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": WIDTH // 16, "vocab_size": 4096,
        "tie_word_embeddings": False, "sliding_window": None, "max_position_embeddings": 4096,
    }  # fmt: skip
    base = folder / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(config))
    shards: list[dict[str, torch.Tensor]] = [{}]
    where: dict[str, str] = {}
    filled = total = 0

    def close() -> None:
        name = f"model-{len(shards):05}.safetensors"
        save_file(shards[-1], base / name, metadata={"format": "pt"})
        where.update(dict.fromkeys(shards[-1], name))
        shards[-1] = {}

    for parameter in describe(config, "benchmark").parameters:
        tensor = (torch.randn(parameter.shape) * 0.02).bfloat16()
        if filled + tensor.nbytes > shard_gib * GIB:
            close()
            shards.append({})
            filled = 0
        shards[-1][parameter.name] = tensor
        filled, total = filled + tensor.nbytes, total + tensor.nbytes
    close()
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    _write_adapter(folder / "adapter", base)
    return total


def _write_adapter(adapter: Path, base: Path) -> None:
    adapter.mkdir()
    factors = {}
    for parameter in read_base(base).parameters:
        if parameter.name.split(".")[-2] in LINEAR:
            outputs, inputs = parameter.shape
            key = f"base_model.model.{parameter.name.removesuffix('.weight')}"
            factors[f"{key}.lora_A.weight"] = torch.randn(RANK, inputs) / inputs**0.5
            factors[f"{key}.lora_B.weight"] = torch.randn(outputs, RANK) * 0.01
    save_file(factors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": list(LINEAR)}
    config |= {"task_type": "CAUSAL_LM", "base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))


def forget(base: Path) -> None:
    """Drop the files from the page cache: a first merge reads from the disk."""
    for file in base.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(way: str, folder: Path, workers: int, shard_gib: float) -> dict[str, float]:
    options = ["--dir", str(folder), "--workers", str(workers), "--shard-gib", str(shard_gib)]
    done = subprocess.run(
        [sys.executable, __file__, "--way", way, *options],
        capture_output=True, text=True, timeout=3600, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{way}: {done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    for path in (folder / "out").rglob("*"):
        path.unlink()
    (folder / "out").rmdir()
    return found


def run(way: str, folder: Path, workers: int, shard_gib: float) -> None:
    """Run one way in this process."""
    import peft  # noqa: F401, before the clock: both need it
    import transformers

    transformers.logging.disable_progress_bar()
    assert transformers.AutoModelForCausalLM
    before, started = reset_peak_rss(), time.perf_counter()
    if way == "peft":
        with_peft(folder, shard_gib)
    else:
        with_windlass(folder, workers, proven=way == "proven")
    found = {"seconds": time.perf_counter() - started, "peak": read_peak_rss(), "before": before}
    print(json.dumps(found))


def with_peft(folder: Path, shard_gib: float) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16)
    merged = PeftModel.from_pretrained(model, str(folder / "adapter")).merge_and_unload()
    merged.save_pretrained(folder / "out", max_shard_size=int(shard_gib * GIB))
    for path in (folder / "out").iterdir():  # windlass flushes its files too
        with path.open("rb") as opened:
            os.fsync(opened.fileno())


def with_windlass(folder: Path, workers: int, *, proven: bool) -> None:

    from windlass.export.deltas import read_deltas
    from windlass.export.merged_files import OWN, plan_merge, write_merge
    from windlass.export.proof import prove_files
    from windlass.export.source import choose_adapter, require_local_base

    source, to = choose_adapter(folder / "adapter"), folder / "out"
    base = require_local_base(source)
    deltas = read_deltas(source, base)
    plan = plan_merge(base, deltas, to, OWN)
    to.mkdir()
    write_merge(plan, base, deltas, to, lambda _: None, workers)
    if proven:
        deviations = prove_files(base, deltas, plan, to, source.weights, lambda _: None).deviations
        assert not deviations, deviations


def show(turns: dict[str, list[dict[str, float]]], size: int, asked: argparse.Namespace) -> None:
    cores = len(os.sched_getaffinity(0))
    print(
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {cores} cores, torch {torch.__version__}; "
        f"{size / GIB:.2f} GiB in BF16, files of {asked.shard_gib} GiB, rank {RANK} on every linear layer"
    )
    print(f"largest tensor {4 * WIDTH * WIDTH * 2 / 2**20:.0f} MiB; {asked.workers} files at a time\n")
    print("| way | seconds | peak memory, GiB | of it before the merge |\n|---|---|---|---|")
    for way, done in turns.items():
        best = min(done, key=lambda each: each["seconds"])
        peak, before = max(each["peak"] for each in done) / GIB, best["before"] / GIB
        print(f"| {WAYS[way]} | {best['seconds']:.1f} | {peak:.2f} | {before:.2f} |")


if __name__ == "__main__":
    main()
