"""An FP8 base against a BF16 base: memory, traffic, time, and equal losses. Prints its own table.

    python benchmarks/fp8.py [--rounds 3] [--hidden 512] [--layers 4] [--experts 16] [--tokens 512]

Two ranks over gloo alternate within one run: BF16 resident, FP8 resident, BF16 full shard, FP8 full shard. A turn is
one optimizer step's forward and backward with adapters on attention and shared experts, and the gradients' reduction.
Time is the median of the turns and its ratio to BF16 resident. It is a CPU's, which decodes by table: on a GPU decoding
costs a pass over memory. Bytes are counted, not modelled.
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from windlass import tiny
from windlass.model import read_base
from windlass.model.targets import resolve_adapter
from windlass.plan.layout import Layout
from windlass.runfile import Lora
from windlass.train.load import load_base, view_own_part
from windlass.train.lora import attach_adapter
from windlass.train.sync import ReplicaGroups

RANKS = 2
MIB = 2**20
TURNS = {
    "BF16 resident": ("resident", "bf16"),
    "FP8 resident": ("resident", "fp8"),
    "BF16 full shard": ("full-shard", "bf16"),
    "FP8 full shard": ("full-shard", "fp8"),
}


class Wire(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that all-gathers give to this rank."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather" in str(func):
            self.bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("rounds", 3), ("hidden", 512), ("layers", 4), ("experts", 16), ("tokens", 512)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.checkpoint:
        run_rank(asked)
        return
    with tempfile.TemporaryDirectory() as directory:
        sizes = {"hidden": asked.hidden, "layers": asked.layers, "experts": asked.experts}
        tiny.write_model(Path(directory), heads=8, moe_intermediate=asked.hidden // 2, tokenizer=False, **sizes)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(
            [*command, __file__, *sys.argv[1:], "--checkpoint", directory],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            timeout=1800,
            check=True,
        )
    show(json.loads(done.stdout.splitlines()[-1]), asked)


def run_rank(asked: argparse.Namespace) -> None:
    """Run all four models in one rank, taking turns."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    checkpoint = read_base(asked.checkpoint)
    lora = Lora.model_validate({"r": 16, "lora_dropout": 0, "target_modules": "all-linear"})
    adapter = resolve_adapter(lora, checkpoint, lambda key: key)
    models, found = {}, {}
    for name, (layout, kept) in TURNS.items():
        shard = 1 if layout == "resident" else RANKS
        spread = Layout(layout, "benchmark", 1, RANKS, shard, RANKS // shard, base_dtype=kept)
        base, made = load_base(checkpoint, spread)
        base_bytes = sum(view_own_part(p)[0].nbytes for p in base.parameters()) + sum(b.nbytes for b in base.buffers())
        model = attach_adapter(base, lora, adapter, seed=1).train()
        rank = made["ranks"][dist.get_rank()]
        grown = rank["peak_rss_bytes"] - rank["rss_before_bytes"]
        models[name] = (
            model,
            ReplicaGroups(model),
            torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]),
        )
        found[name] = {"bytes": base_bytes, "grown": grown, "wire": 0, "seconds": [], "losses": []}
    for turn in range(asked.rounds + 1):
        for name, (model, replicas, optimizer) in models.items():
            dice = torch.Generator().manual_seed(turn * RANKS + dist.get_rank())
            ids = torch.randint(20, 500, (1, asked.tokens), generator=dice)
            dist.barrier()
            began = time.perf_counter()
            with Wire() as wire:  # type: ignore[no-untyped-call]
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
            sums = replicas.average(loss.detach().float().reshape(1))
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            found[name]["losses"].append(float(sums) / RANKS)
            found[name]["wire"] = wire.bytes
            if turn:  # the first is for warming up
                found[name]["seconds"].append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may outlive the group, and an interpreter that ends before them aborts


def show(found: dict[str, dict[str, Any]], asked: argparse.Namespace) -> None:
    first = found["BF16 resident"]
    load_average = os.getloadavg()[0]
    print(
        f"hidden {asked.hidden}, {asked.layers} layers, {asked.experts} experts, {asked.tokens} tokens a rank, "
        f"{RANKS} ranks over gloo, {asked.rounds} rounds\n"
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores (load {load_average:.1f}), "
        f"torch {torch.__version__}\n"
    )
    heads = ("base, MiB a rank", "grown by loading", "gathered a step", "seconds", "x BF16 resident", "last loss")
    print(f"{'':16}" + "".join(f"{head:>18}" for head in heads))
    for name, each in found.items():
        ratios = [mine / other for mine, other in zip(each["seconds"], first["seconds"], strict=True)]
        cells = (
            f"{each['bytes'] / MIB:.1f}",
            f"{each['grown'] / MIB:.1f}",
            f"{each['wire'] / MIB:.1f}",
            f"{statistics.median(each['seconds']):.2f}",
            f"{statistics.median(ratios):.2f}",
            f"{each['losses'][-1]:.6f}",
        )
        print(f"{name:16}" + "".join(f"{cell:>18}" for cell in cells))
    for layout in ("resident", "full shard"):
        pairs = zip(found[f"FP8 {layout}"]["losses"], found[f"BF16 {layout}"]["losses"], strict=True)
        print(f"\n{layout}: losses of FP8 and BF16 differ by at most {max(abs(a - b) for a, b in pairs):.2g}", end="")
    print()


if __name__ == "__main__":
    main()
