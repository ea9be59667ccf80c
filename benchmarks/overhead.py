"""What windlass's loop costs over plain TRL, and two ranks against DDP and full sharding.

    python benchmarks/overhead.py [--hidden 512 --layers 8 …] [--pairs 12]

One process: the same model, rows and seed trained by TRL's SFTTrainer and by windlass's loop in turn, pair by pair
in one process, on one thread and in processor time, which other work on the machine disturbs least. The overhead is
the median of the pairs' ratios, with the interval of order statistics that covers the true median with 95 %.
Two ranks: each engine in processes of its own, median step time and peak memory per rank.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ENGINES = {
    "windlass full-shard": "each rank holds a part, gathered layer by layer",
    "windlass resident": "each rank holds all, adapter averaged in one call",
    "TRL + PEFT, DDP": "each rank holds all, Accelerate wraps DDP",
    "TRL + PEFT, FSDP2 after load": "each rank reads all, then fully_shard as Accelerate does it on GPUs",
}


def model_of(folder: Path, sizes: argparse.Namespace) -> Path:
    from windlass import tiny

    return tiny.write(
        folder,
        quantization="none",
        wrapper=False,
        dtype="float32",
        hidden=sizes.hidden,
        layers=sizes.layers,
        heads=8,
        experts=sizes.experts,
        intermediate=2 * sizes.hidden,
        moe_intermediate=sizes.hidden,
        vocab=4096,
    )


def base(folder: Path, **how: Any) -> Any:
    import torch
    from transformers import Mistral4ForCausalLM

    return Mistral4ForCausalLM.from_pretrained(folder, dtype=torch.float32, **how).requires_grad_(False)


def rows(count: int, length: int) -> Any:
    from datasets import Dataset

    chance = random.Random(0)
    return Dataset.from_dict({"input_ids": [[chance.randrange(20, 4000) for _ in range(length)] for _ in range(count)]})


def peft(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    names = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=names, task_type="CAUSAL_LM"))


class Clock:
    """Seconds of every optimizer step: of the wall clock, or of the processor."""

    def __new__(cls, now: Callable[[], float]) -> Any:
        from transformers import TrainerCallback

        class Timer(TrainerCallback):  # type: ignore[misc]
            seconds: list[float]

            def on_train_begin(self, *_: Any, **__: Any) -> None:
                self.seconds = []

            def on_step_begin(self, *_: Any, **__: Any) -> None:
                self.began = now()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                self.seconds.append(now() - self.began)

        return Timer()


def arguments(folder: Path, sizes: argparse.Namespace, steps: int) -> Any:
    from trl import SFTConfig

    return SFTConfig(
        output_dir=str(folder / "out"),
        max_steps=steps,
        per_device_train_batch_size=sizes.micro,
        gradient_accumulation_steps=sizes.accumulation,
        learning_rate=1e-4,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
        max_length=None,
        activation_checkpointing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        log_level="error",
    )


def trainer_of(kind: str, model: Any, folder: Path, sizes: argparse.Namespace, now: Callable[[], float]) -> Any:
    """`plain` or `windlass`, over the same rows."""
    from transformers import AutoTokenizer
    from transformers.trainer_callback import PrinterCallback
    from trl import SFTTrainer

    from windlass.train.liveness import Liveness
    from windlass.train.loop import Loop
    from windlass.train.order import numbered
    from windlass.train.parallel import keep_out_of_ddp
    from windlass.train.saving import Saving
    from windlass.train.sync import Replicas

    clock = Clock(now)
    data = rows(4 * sizes.micro * sizes.accumulation * (sizes.steps + 1), sizes.length)
    given: dict[str, Any] = {
        "model": model,
        "args": arguments(folder, sizes, sizes.steps),
        "processing_class": AutoTokenizer.from_pretrained(folder / "model"),
        "callbacks": [clock],
    }
    if kind == "plain":
        trainer = SFTTrainer(train_dataset=data, **given)
    else:
        replicas = Replicas(model)
        keep_out_of_ddp(model)
        trainer = Loop(
            train_dataset=numbered(data),
            replicas=replicas,
            liveness=Liveness(model, replicas, "benchmark"),
            order=None,
            non_finite="stop",
            saving=Saving(folder, None, {}, print),
            **given,
        )
    trainer.remove_callback(PrinterCallback)
    trainer.clock = clock
    return trainer


def pairs(folder: Path, sizes: argparse.Namespace) -> list[tuple[float, float]]:
    """Median step seconds of plain and windlass, pair by pair, the order of the two alternating."""
    import torch

    torch.set_num_threads(sizes.threads)
    model = peft(base(folder / "model"))
    found = []
    for turn in range(sizes.pairs + 1):
        kinds = ["plain", "windlass"] if turn % 2 else ["windlass", "plain"]
        seconds = {}
        for kind in kinds:
            model.get_base_model()._is_distributed_loading_by_transformers = False
            trainer = trainer_of(kind, model, folder, sizes, time.process_time)
            trainer.train()
            seconds[kind] = statistics.median(trainer.clock.seconds[3:])  # liveness is proven in the first two
        if turn:  # the first pair warms up
            found.append((seconds["plain"], seconds["windlass"]))
            print(f"pair {turn:2}: {seconds['plain'] * 1e3:8.1f} ms  {seconds['windlass'] * 1e3:8.1f} ms", flush=True)
    return found


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Order statistics between which the median lies with at least this probability (binomial, no distribution)."""
    ordered, n = sorted(values), len(values)
    k = 0
    while sum(math.comb(n, i) for i in range(k + 2)) / 2**n * 2 <= 1 - confidence:
        k += 1
    return ordered[k], ordered[n - 1 - k]


def wrapped(model: Any) -> Any:
    """Sharded layer by layer, adapter included. (Accelerate itself, on a CPU, runs DDP instead and says nothing.)"""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from transformers.distributed import DistributedConfig

    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    base_model = model.get_base_model()
    base_model._is_distributed_loading_by_transformers = base_model._is_fsdp_managed_module = True
    base_model.config.distributed_config = DistributedConfig(fsdp_size=2)
    return model


def rank_of(engine: str, folder: Path, sizes: argparse.Namespace) -> dict[str, float]:
    """One rank of one engine: median step seconds and peak resident memory."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    world = dist.get_world_size()
    if engine.startswith("windlass"):
        from windlass.model import read_base
        from windlass.plan.layout import Layout
        from windlass.train.load import load

        spread = {"shard": world, "replicate": 1} if engine.endswith("full-shard") else {"shard": 1, "replicate": world}
        layout = Layout(engine.split()[1], "benchmark", 1, world, spread["shard"], spread["replicate"], precision="no")
        model, _ = load(read_base(folder / "model"), layout, dtype=torch.float32)
    else:
        model = base(folder / "model")
    torch.manual_seed(0)
    model = wrapped(peft(model)) if engine.endswith("after load") else peft(model)
    trainer = trainer_of(
        "windlass" if engine.startswith("windlass") else "plain", model, folder, sizes, time.perf_counter
    )
    trainer.train()
    seconds = statistics.median(trainer.clock.seconds[3:])
    return {"seconds": seconds, "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def two_ranks(engine: str, folder: Path, sizes: argparse.Namespace) -> list[dict[str, float]]:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    shared = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, "--rank-of", engine, "--folder", str(folder), *_given(sizes)]
    crew = [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outcomes = [process.communicate(timeout=1800) for process in crew]
    for process, (_, errors) in zip(crew, outcomes, strict=True):
        if process.returncode:
            raise RuntimeError(f"{engine}: {errors[-3000:]}")
    return [json.loads(out.splitlines()[-1]) for out, _ in outcomes]


SIZES = {"hidden": 512, "layers": 8, "experts": 16, "length": 128, "micro": 2, "accumulation": 2, "steps": 10}


def _given(sizes: argparse.Namespace) -> list[str]:
    return [word for name in SIZES for word in (f"--{name}", str(getattr(sizes, name)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=["pairs", "ranks"])
    parser.add_argument("--rank-of", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    sizes = parser.parse_args()
    if sizes.rank_of:
        print(json.dumps(rank_of(sizes.rank_of, sizes.folder, sizes)))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        checkpoint = model_of(folder / "model", sizes)
        count = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors")) / 4e6
        import torch
        import transformers
        import trl

        print(f"{time.strftime('%Y-%m-%d')}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores")
        print(f"torch {torch.__version__}, transformers {transformers.__version__}, trl {trl.__version__}")
        print(f"{count:,.0f} M parameters, {sizes.micro} x {sizes.length} tokens x {sizes.accumulation} accumulated\n")
        if sizes.only != "ranks":
            _print_pairs(pairs(folder, sizes))
        if sizes.only != "pairs":
            _print_ranks({engine: two_ranks(engine, folder, sizes) for engine in ENGINES})


def _print_pairs(found: Sequence[tuple[float, float]]) -> None:
    ratios = [ours / plain for plain, ours in found]
    low, high = interval(ratios)
    print(
        f"\none process: windlass / plain TRL = {statistics.median(ratios):.4f}"
        f"  (median of {len(ratios)} interleaved pairs, 95 % interval {low:.4f} to {high:.4f})\n"
    )


def _print_ranks(found: dict[str, list[dict[str, float]]]) -> None:
    print(f"{'two ranks':32} {'s a step':>9} {'of DDP':>7} {'peak GiB a rank':>16}")
    plain = found["TRL + PEFT, DDP"][0]["seconds"]
    for engine, each in found.items():
        seconds, peak = each[0]["seconds"], max(rank["peak_gib"] for rank in each)
        print(f"{engine:32} {seconds:9.3f} {seconds / plain:7.2f} {peak:16.2f}   {ENGINES[engine]}")


if __name__ == "__main__":
    main()
