"""Adapters of routed experts: unmerged (windlass) against PEFT's, which builds W + B A; one run, one table.

    python benchmarks/experts.py            time from 2 to 1024 tokens per expert, and memory, on this CPU
    python benchmarks/experts.py --quick    8 to 32 tokens per expert, fewer rounds
    python benchmarks/experts.py --json     one JSON object

Measures one layer's experts under gradient checkpointing: forward, recomputation, backward. All ways alternate in one
process, and the medians of their rounds are compared: ratios hold on a busy machine, absolute times don't. Memory is
the process's peak above weights, adapters and the adapters' gradients, for several layers under checkpointing, each way
in its own process (resident memory as counted by the system, with the allocator set to return freed memory).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Mistral4Config
from transformers.models.mistral4.modeling_mistral4 import Mistral4Experts

from windlass.train.load import read_peak_rss, reset_peak_rss
from windlass.train.patches import Patches

EXPERTS, TOP_K, RANK = 32, 4, 16
TIMED = (512, 256)  # hidden size, width of an expert
WEIGHED, LAYERS, WEIGHED_TOKENS = (1024, 512), 4, 16
SWEEP = (2, 8, 16, 32, 128, 512, 1024)
GOALS = {"extra memory": 0.15, "time at 8 to 32 tokens per expert": 0.35}
PEFT, UNMERGED, NONE = "PEFT", "unmerged", "no adapter"
Step = Callable[[], None]


class Layer(nn.Module):
    def __init__(self, config: Mistral4Config) -> None:
        super().__init__()
        self.experts = Mistral4Experts(config)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out: Tensor = x + self.experts(x, index, weights)
        return out


def layers(way: str, count: int, sizes: tuple[int, int], dtype: torch.dtype) -> list[Any]:
    """Return frozen layers whose adapters `way` computes, with the same values for every way."""
    torch.manual_seed(0)
    hidden, width = sizes
    config = Mistral4Config(
        hidden_size=hidden, moe_intermediate_size=width, n_routed_experts=EXPERTS, num_experts_per_tok=TOP_K,
        experts_implementation="grouped_mm",
    )  # fmt: skip
    made = []
    for _ in range(count):
        layer = Layer(config)
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.02)
        layer = layer.to(dtype).requires_grad_(False)
        if way != NONE:
            names = ["experts.gate_up_proj", "experts.down_proj"]
            model = get_peft_model(layer, LoraConfig(r=RANK, target_modules=[], target_parameters=names))
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    nn.init.normal_(parameter, std=0.02)
            if way == UNMERGED:
                Patches().patch_experts(model)
        made.append(layer)
    return made


def step_of(made: list[Any], per_expert: int, hidden: int, dtype: torch.dtype) -> Step:
    """Run forward, recomputation and backward on tokens that choose their experts at random."""
    dice = torch.Generator().manual_seed(1)
    tokens = per_expert * EXPERTS // TOP_K
    x = torch.randn(tokens, hidden, generator=dice).to(dtype).requires_grad_()
    index = torch.rand(tokens, EXPERTS, generator=dice).topk(TOP_K).indices
    weights = torch.rand(tokens, TOP_K, generator=dice).to(dtype)

    def step() -> None:
        y = x
        for layer in made:
            y = checkpoint(layer, y, index, weights, use_reentrant=False)
        y.square().mean().backward()  # type: ignore[no-untyped-call]
        x.grad = None  # the adapters' gradients stay, as between the micro-batches of a step

    return step


def timed(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Return the median seconds of each, taking turns."""
    found: dict[str, list[float]] = {way: [] for way in steps}
    for number in range(rounds + 1):
        for way, step in steps.items():
            began = time.perf_counter()
            step()
            if number:  # the first warms up
                found[way].append(time.perf_counter() - began)
    return {way: statistics.median(seconds) for way, seconds in found.items()}


def sweep(tokens_per_expert: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    hidden, _ = TIMED
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        made = {way: layers(way, 1, TIMED, dtype) for way in (NONE, PEFT, UNMERGED)}
        for each in tokens_per_expert:
            steps = {way: step_of(made[way], each, hidden, dtype) for way in made}
            seconds = timed(steps, max(3, rounds if each < 512 else rounds // 3))
            ratio = seconds[UNMERGED] / seconds[PEFT]
            row = {"dtype": str(dtype)[6:], "tokens_per_expert": each, "seconds": seconds, "unmerged_to_peft": ratio}
            rows.append(row)
    return rows


def weigh(way: str, dtype: torch.dtype) -> int:
    """Return the bytes at the peak of a step above what is kept between steps, measured in its own process."""
    step = step_of(layers(way, LAYERS, WEIGHED, dtype), WEIGHED_TOKENS, WEIGHED[0], dtype)
    step()
    gc.collect()
    before = reset_peak_rss()
    step()
    return read_peak_rss() - before


def weighed() -> list[dict[str, Any]]:
    rows = []
    environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    for dtype in ("float32", "bfloat16"):
        found = {}
        for way in (NONE, PEFT, UNMERGED):
            command = [sys.executable, __file__, "--weigh", way, dtype]
            done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=600)
            found[way] = int(done.stdout.split()[-1])
        rows.append({"dtype": dtype, "bytes": found, "unmerged_to_peft": found[UNMERGED] / found[PEFT]})
    return rows


def verdicts(times: list[dict[str, Any]], memory: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the worst figure per goal and dtype; for time also the ratio without any adapter."""
    found = []
    for weight in memory:
        few = [row for row in times if row["dtype"] == weight["dtype"] and 8 <= row["tokens_per_expert"] <= 32]
        least = max(row["seconds"][NONE] / row["seconds"][PEFT] for row in few)
        worst = (weight["unmerged_to_peft"], None), (max(row["unmerged_to_peft"] for row in few), least)
        for goal, (figure, floor) in zip(GOALS, worst, strict=True):
            found.append({"goal": goal, "dtype": weight["dtype"], "worst": figure, "without adapter": floor})
    return found


def show(found: dict[str, Any]) -> None:
    print(f"{found['date']}  {found['machine']}  {found['versions']}")
    print(f"{EXPERTS} experts, top {TOP_K}, rank {RANK}; time of one layer {TIMED}, checkpointed; milliseconds")
    print(f"{'':10}{'tokens/expert':>14}{NONE:>12}{PEFT:>10}{UNMERGED:>10}{'unmerged/PEFT':>15}")
    for row in found["time"]:
        times = "".join(
            f"{1e3 * row['seconds'][way]:{size}.1f}" for way, size in ((NONE, 12), (PEFT, 10), (UNMERGED, 10))
        )
        print(f"{row['dtype']:10}{row['tokens_per_expert']:14}{times}{row['unmerged_to_peft']:15.2f}")
    print(f"\nMB at the peak above weights, adapters and their gradients: {LAYERS} layers {WEIGHED},", end=" ")
    print(f"{WEIGHED_TOKENS} tokens/expert")
    for row in found["memory"]:
        widths = ((NONE, 26), (PEFT, 10), (UNMERGED, 10))
        sizes = "".join(f"{row['bytes'][way] / 1e6:{size}.0f}" for way, size in widths)
        print(f"{row['dtype']:10}{sizes}{row['unmerged_to_peft']:15.2f}")
    print()
    for row in found["worst"]:
        limit, floor = GOALS[row["goal"]], row["without adapter"]
        missed = "" if row["worst"] <= limit else "  MISSED"
        least = f" (without any adapter {floor:.2f})" if floor and missed else ""
        print(f"{row['goal']}, {row['dtype']}: {row['worst']:.2f}, wanted {limit} at most{missed}{least}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--weigh", nargs=2, metavar=("WAY", "DTYPE"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)  # PEFT's of transformers
    if asked.weigh:
        print(weigh(asked.weigh[0], getattr(torch, asked.weigh[1])))
        return
    times = sweep((8, 16, 32) if asked.quick else SWEEP, 5 if asked.quick else asked.rounds)
    memory = weighed()
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} of {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
        "time": times,
        "memory": memory,
        "worst": verdicts(times, memory),
    }
    if asked.json:
        print(json.dumps(found))
    else:
        show(found)


if __name__ == "__main__":
    main()
