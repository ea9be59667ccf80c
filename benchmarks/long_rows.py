"""Rows split over ranks: memory of activations per rank, bytes sent against the plan's, and time per token.

    python benchmarks/long_rows.py [--json] [--lengths 2048,4096,8192]

Processes over gloo run a training step on one row with the code of training, each with its pieces of the row, and
torch's tracker counts allocations. Activations are what the peak has above the step's beginning. Times are of a CPU
that all ranks share, for comparing lengths on one number of ranks, not numbers of ranks.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode

from windlass import tiny
from windlass.data.collate import PaddedCollator, PaddedPackingCollator
from windlass.hardware import Machine, find_fabric, find_gpu
from windlass.model import find_base
from windlass.model.targets import resolve_adapter
from windlass.plan.cost import BatchSize, Workload, read_shape
from windlass.plan.layout import Layout
from windlass.plan.step_time import estimate_traffic
from windlass.ranks.collectives import get_rank, get_world_size
from windlass.runfile import Lora
from windlass.train.collate import Collate
from windlass.train.head import Head
from windlass.train.load import load_base
from windlass.train.long_rows import RowGroup
from windlass.train.lora import attach_adapter
from windlass.train.patches import ModelPatches

MIB = 2**20
SIZES = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 2}
LORA = Lora(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear")
CPU = torch.device("cpu")
BOUND = 1.15  # of an equal share of one rank's activations


class Sent(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what this rank receives of others in gathers, or sends them in reductions."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func.__name__.startswith(("_allgather_base", "_reduce_scatter_base")):
            self.bytes += abs(args[0].nbytes - args[1].nbytes)
        return func(*args, **kwargs or {})


def measure(folder: Path, length: int, packed: bool, checkpointing: bool) -> dict[str, Any]:
    """Run the second step of this rank under the tracker, and a third one by the clock."""
    ranks = get_world_size()
    base = find_base(str(folder), "benchmark")
    adapter = resolve_adapter(LORA, base, lambda key: key)
    layout = Layout(
        "resident",
        "given",
        1,
        ranks,
        shard=1,
        replicate=ranks,
        context_parallel=ranks,
        activation_checkpointing=checkpointing,
        precision="no",
    )
    peft = attach_adapter(load_base(base, layout, dtype=torch.float32)[0], LORA, adapter, 0)
    model = peft.get_base_model()
    group = RowGroup.create(ranks, 600)
    ModelPatches(model, dtype=None, group=group)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    peft.train()
    ids = np.random.default_rng(0).integers(0, 500, length)
    lengths = [length // 8] * 8 if packed else [length]
    collate = Collate((PaddedPackingCollator if packed else PaddedCollator)(0), cut=group.cut if group else None)
    batch = collate([{"input_ids": ids, "labels": ids, "seq_lengths": lengths, "row": 0}])

    def train() -> None:
        Head(model).loss(model(**batch.inputs).last_hidden_state, batch.targets)[0].backward()  # type: ignore[no-untyped-call]

    train()
    gc.collect()
    tracker = MemTracker()
    tracker.track_external(model)
    track = tracker._track_module_params_and_buffers
    # It would also hook the gradients of frozen parameters, which have none.
    tracker._track_module_params_and_buffers = lambda module, **_: track(module, install_grad_hooks=False)
    with Sent() as sent, tracker:
        before = tracker.get_tracker_snapshot("current")[CPU]["Total"]
        train()
        peak = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
    began = time.perf_counter()
    train()
    seconds = time.perf_counter() - began
    processor = Machine(
        find_gpu("cpu"), find_fabric("loopback"), find_fabric("loopback"), find_fabric("memory"), 1, None
    )
    planned = 0.0
    if group:
        work = Workload(read_shape(base, adapter), layout, BatchSize(1, 1, length), processor, "adamw_torch", 4)
        planned = sum(flow.bytes * flow.per_step for flow in estimate_traffic(work).keys)
    return {
        "length": length,
        "ranks": ranks,
        "packed": packed,
        "checkpointing": checkpointing,
        "activations_mib": (peak - before) / MIB,
        "sent_mib": sent.bytes / MIB,
        "planned_mib": planned / MIB,
        "microseconds_per_token": seconds / length * 1e6,
    }


def launch(ranks: int, folder: Path, lengths: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
    done = subprocess.run(
        [*command, "--model", str(folder), "--lengths", lengths],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
    )
    if done.returncode:
        sys.exit(done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def run_rank(folder: Path, lengths: list[int]) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for length in lengths:
        for packed in (False, True):
            for checkpointing in (False, True):
                row = measure(folder, length, packed, checkpointing)
                largest = torch.tensor([row["activations_mib"]])
                dist.all_reduce(largest, op=dist.ReduceOp.MAX)
                if get_rank() == 0:
                    print(json.dumps({**row, "activations_mib": float(largest)}), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--lengths", default="2048,4096,8192", help="tokens of the row")
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model:
        run_rank(options.model, [int(length) for length in options.lengths.split(",")])
        return
    failed = False
    alone: dict[Any, float] = {}
    print("ranks  tokens  activations  of an equal share  sent / planned MiB    us/token  rows")
    with tempfile.TemporaryDirectory() as name:
        tiny.write_family(Path(name) / "model", "llama", config=SIZES, layers=4)
        for ranks in (1, 2, 4):
            for row in launch(ranks, Path(name) / "model", options.lengths):
                case = row["length"], row["packed"], row["checkpointing"]
                alone.setdefault(case, row["activations_mib"])
                share = row["share"] = row["activations_mib"] * ranks / alone[case]
                failed |= share > BOUND or abs(row["sent_mib"] - row["planned_mib"]) > 0.1 * row["planned_mib"]
                words = f"{'packed' if row['packed'] else 'one document'}{', checkpointing' * row['checkpointing']}"
                sent = f"{row['sent_mib']:8.1f} / {row['planned_mib']:7.1f}"
                line = f"{ranks:5}  {row['length']:6}  {row['activations_mib']:7.1f} MiB  {share:16.2f}  {sent}"
                line += f"  {row['microseconds_per_token']:10.1f}  {words}"
                print(json.dumps(row) if options.json else line, flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
