"""Loading: each rank reads its own part, against rank 0 loading everything and broadcasting. Prints its own table.

    python benchmarks/load.py [--gib 1] [--ranks 2] [--repeat 3] [--warm]

Both fill the same sharded model from the same FP8 checkpoint, in fresh processes, taking turns; files are dropped from
the page cache before each turn unless --warm. Time is the slowest rank's, from the start of loading to a filled model;
ours includes the certificate's second reading. Memory is a rank's growth since before loading.
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

from windlass import tiny
from windlass.model import read_base
from windlass.plan.layout import Layout
from windlass.train import parallel
from windlass.train.load import list_unique_tensors, load_base, read_all, read_peak_rss, reset_peak_rss, view_own_part

GIB = 2**30
WAYS = {"own part": "every rank reads its own part", "broadcast": "rank 0 reads all and broadcasts"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the FP8 checkpoint (in BF16 twice that)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--warm", action="store_true", help="leave the files in the page cache")
    parser.add_argument("--way", choices=list(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.way:
        run_rank(asked.way, asked.checkpoint)
        return
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = write(Path(directory), asked.gib)
        size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
        turns: dict[str, list[list[dict[str, Any]]]] = {way: [] for way in WAYS}
        for _ in range(asked.repeat):
            for way, done in turns.items():
                if not asked.warm:
                    forget(checkpoint)
                done.append(measure(way, checkpoint, asked.ranks))
    show(turns, size, asked)


def write(directory: Path, gib: float) -> Path:
    """Write a mixture of experts in the published layout and widths: 4 experts of 3 x 4096 x 2048 per layer."""
    sizes: dict[str, Any] = {"hidden": 4096, "heads": 8, "experts": 4, "moe_intermediate": 2048}
    layers = max(1, round(gib * GIB / (5 * 3 * 4096 * 2048)))
    return tiny.write_model(directory, layers=layers, files=4, tokenizer=False, **sizes)


def forget(checkpoint: Path) -> None:
    """Drop the files from the page cache: a first start reads from the disk."""
    for file in checkpoint.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(way: str, checkpoint: Path, ranks: int) -> list[dict[str, Any]]:
    """Run one turn in fresh processes; return each rank's figures."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, __file__, "--way", way, "--checkpoint", str(checkpoint)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=1800,
        check=True,
    )
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def run_rank(way: str, path: Path) -> None:
    """Run one rank of one turn."""
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    layout = Layout("full-shard", "benchmark", 1, ranks, shard=ranks, precision="no")
    dist.barrier()
    started, before = time.perf_counter(), reset_peak_rss()
    read, sent = own(path, layout) if way == "own part" else broadcast(path, layout)
    dist.barrier()
    mine = {
        "seconds": time.perf_counter() - started,
        "read": read,
        "wire": sent,
        "grown": read_peak_rss() - before,
    }
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, mine)
    if dist.get_rank() == 0:
        print(json.dumps(everyone), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may outlive the group, and an interpreter that ends before them aborts


def own(path: Path, layout: Layout) -> tuple[int, int]:
    """Load with the certified loader. Returns bytes read by this rank and received from others."""
    _, made = load_base(read_base(path), layout)
    return int(made["ranks"][dist.get_rank()]["bytes_read"]), 0


@torch.no_grad()
def broadcast(path: Path, layout: Layout) -> tuple[int, int]:
    """Load the full model on rank 0 and send it tensor by tensor, as `fsdp_cpu_ram_efficient_loading` does."""
    checkpoint = read_base(path)
    model = parallel.build_model(checkpoint, layout, torch.bfloat16)
    parallel.allocate(model, layout)
    targets = list_unique_tensors(model)
    whole: dict[str, torch.Tensor] = {}
    read = received = 0
    if dist.get_rank() == 0:
        whole = {
            parameter.name: torch.empty(parameter.shape, dtype=torch.bfloat16) for parameter in checkpoint.parameters
        }
        problems, read, _ = read_all(whole, checkpoint)
        if problems:
            raise RuntimeError(problems[0])
    for parameter in checkpoint.parameters:
        tensor = whole.get(parameter.name, torch.empty(0))
        if dist.get_rank() != 0:
            tensor = torch.empty(parameter.shape, dtype=torch.bfloat16)
            received += tensor.nbytes
        dist.broadcast(tensor, 0)
        local, offset = view_own_part(targets[parameter.name])
        local.copy_(tensor[tuple(slice(o, o + size) for o, size in zip(offset, local.shape, strict=True))])
    return read, received


def show(turns: dict[str, list[list[dict[str, Any]]]], size: int, asked: argparse.Namespace) -> None:
    """Print the table, and the ratios of medians with their range over the turns."""
    print(
        f"checkpoint {size / GIB:.2f} GiB FP8 ({2 * size / GIB:.2f} GiB in BF16), {asked.ranks} ranks over gloo, "
        f"{asked.repeat} turns each, page cache {'warm' if asked.warm else 'cold'}\n"
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}\n"
    )
    print(f"{'':34} {'seconds':>16} {'read by a rank':>15} {'received':>9} {'grown, worst rank':>18}")
    seconds: dict[str, list[float]] = {}
    for way, done in turns.items():
        seconds[way] = [max(rank["seconds"] for rank in turn) for turn in done]
        most = {key: max(rank[key] for turn in done for rank in turn) / GIB for key in ("read", "wire", "grown")}
        span = f"{statistics.median(seconds[way]):.1f} ({min(seconds[way]):.1f}-{max(seconds[way]):.1f})"
        print(
            f"{WAYS[way]:34} {span:>16} {most['read']:>11.2f} GiB {most['wire']:>5.2f} GiB {most['grown']:>14.2f} GiB"
        )
    ratios = [slow / fast for slow, fast in zip(seconds["broadcast"], seconds["own part"], strict=True)]
    print(f"\n{statistics.median(ratios):.1f} times as fast ({min(ratios):.1f}-{max(ratios):.1f})")


if __name__ == "__main__":
    main()
