"""Run folders made from a few formulas, so that tests know every number in them."""

import json
import math
import random
from pathlib import Path
from typing import Any

BEGAN = 1_795_250_000.0
PHASES = {"data": 0.06, "forward": 0.9, "backward": 1.9, "optimizer": 0.06, "communication": 0.55, "other": 0.02}
SPIKE = 3  # in one step of every run, a third of the way


def write(
    folder: Path,
    *,
    ranks: int = 3,
    count: int = 400,
    gpu: bool = True,
    stages: bool = True,
    seed: int = 0,
    pairs: bool = False,
) -> Path:
    """Write what a run of `count` steps leaves behind; `stages`: also what the other stages write. pairs: of DPO."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        draw = random.Random(seed * 1000 + rank)
        with (folder / f"steps-rank{rank}.jsonl").open("w") as lines:
            clock = BEGAN
            for step in range(1, count + 1):
                record = one_step(step, count, rank, draw, gpu=gpu)
                if pairs and rank == 0:
                    record["preference"] = preference(step, count, 0.3 * draw.gauss(0, 1))
                    record["loss"] = math.log1p(math.exp(-record["preference"]["rewards/margins"]))
                clock += record["step_seconds"]
                lines.write(json.dumps({**record, "time": round(clock, 3)}) + "\n")
        (folder / f"meter-rank{rank}.json").write_text(json.dumps(meter(rank, ranks, gpu=gpu)))
    made = events(count)
    for event in made:
        if pairs and event["kind"] == "eval":
            figures = preference(event["step"], count, 0.0)
            event |= {f"eval_{name}": value for name, value in figures.items()}
            event["eval_loss"] = math.log1p(math.exp(-figures["rewards/margins"]))
    write_lines(folder / "events.jsonl", made)
    if stages:
        write_lines(folder / "alarms.jsonl", alarms(count))
        left = others(count, ranks)
        if pairs:
            left["data.json"]["sequences"] = {"train": 4000, "validation": 200}
        for name, value in left.items():
            (folder / name).write_text(json.dumps(value))
    return folder


def one_step(step: int, count: int, rank: int, draw: random.Random, *, gpu: bool) -> dict[str, Any]:
    spike = SPIKE if step == max(1, count // 3) else 0
    phases = {name: mean * (0.95 + 0.1 * draw.random()) for name, mean in PHASES.items()}
    if count // 2 < step < count // 2 + count // 30:
        phases["communication"] += 0.6
    record: dict[str, Any] = {
        "step": step,
        "epoch": 3 * step / count,
        "loss": 0.9 + 1.3 * math.exp(-5 * step / count) + 0.06 * draw.gauss(0, 1) + spike / 4,
        "grad_norm": 0.4 + 0.1 * abs(draw.gauss(0, 1)) + spike,
        "learning_rate": 1e-4 * min(1, 20 * step / count) * (1 + math.cos(math.pi * step / count)),
        "step_seconds": sum(phases.values()),
        **{f"{name}_seconds": seconds for name, seconds in phases.items()},
        "pause_seconds": 0.0,
        "meter_seconds": 0.002,
        "micro_batches": 4,
        "sequences": 8,
        "tokens": 14000,
        "padded_tokens": 1000,
        "supervised_tokens": 9000,
        "masked_tokens": 5000,
        "tokens_per_second": 14000 / sum(phases.values()),
        "rss_gib": 12 + rank / 4,
        "page_faults": 0,
        "cpu_cores": 1.2,
    }
    if gpu:
        record |= {
            "mfu": 0.27 + 0.01 * draw.random(),
            "gpu_reserved_gib": 112,
            "gpu_peak_gib": 98 + draw.random() + rank % 3,
            "gpu_utilization": 0.86 + 0.12 * draw.random(),
            "gpu_power_watts": 560 + 60 * draw.random(),
            "gpu_temperature_celsius": 64,
            "gpu_throttle": [],
        }
    if step % 25 == 1:
        busiest = [1.4 + 1.4 * draw.random() for _ in range(36)]
        record["experts"] = {"experts": 128, "busiest": busiest, "idlest": [0.1] * 36, "unused": [0] * 36}
    return record


def preference(step: int, count: int, noise: float) -> dict[str, float]:
    learned = 1 - math.exp(-3 * step / count)
    chosen, rejected = 0.4 * learned + noise / 3, -1.4 * learned - noise / 3
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": min(1.0, max(0.0, 0.5 + 0.35 * learned + noise / 3)),
        "logps/chosen": -220 + 10 * chosen + 30 * noise,
        "logps/rejected": -260 + 10 * rejected + 30 * noise,
    }


def meter(rank: int, ranks: int, *, gpu: bool) -> dict[str, Any]:
    return {
        "script_name": "finetune_mistral4small",
        "report_meta": {"model": {"name": "Mistral-Small-4"}},
        "rank": rank,
        "ranks": ranks,
        "hardware": {
            "host": f"node-{rank}",
            "processor": "Xeon x 96",
            "memory_gib": 1007.5,
            "gpus": [{"name": "NVIDIA H200", "memory_gib": 140.4}] if gpu else [],
            "driver": "570.86" if gpu else None,
            "cuda": "12.9" if gpu else None,
            "infiniband": ["mlx5_0/ports/1"] if gpu else [],
        },
        "arithmetic": {},
        "unmeasured": {} if gpu else {"gpu_*, pcie_*, nvlink_*": "the run is on cpu"},
    }


def events(count: int) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = [{"time": BEGAN, "step": 0, "kind": "start"}]
    for step in range(max(1, count // 10), count + 1, max(1, count // 10)):
        loss = 1.0 + 1.2 * math.exp(-5 * step / count)
        made.append({"time": BEGAN + 3.5 * step, "step": step, "kind": "eval", "eval_loss": loss})
        saved = {"seconds": 2.5, "bytes": 330_000_000, "ok": True}
        made.append({"time": BEGAN + 3.5 * step, "step": step, "kind": "save", **saved})
    return [*made, {"time": BEGAN + 3.5 * count, "step": count, "kind": "end"}]


def alarms(count: int) -> list[dict[str, Any]]:
    spike = {"kind": "gradient-norm spike", "rank": None, "message": "6 times its median; rows 1312, 77, 401"}
    slow = {"kind": "straggler", "rank": 1, "message": "18 % slower than the median, in backward"}
    return [
        {"time": BEGAN, "step": max(1, count // 3), "level": "warn", **spike},
        {"time": BEGAN, "step": max(1, count // 2), "level": "warn", **slow},
    ]


def others(count: int, ranks: int) -> dict[str, Any]:
    """Write what plan, load, data and train write, as far as the report reads it."""
    rates = {"tokens_per_second": 14100, "tokens_per_second_low": 11000, "tokens_per_second_high": 16000}
    target = {"pattern": "o_proj", "part": "attention", "modules": 36, "parameters": 4718592, "note": ""}
    lengths = {"median": 122, "percentile_95": 408, "most": 2048}
    split = {"documents": 28910, "tokens": 4193890, "supervised_fraction": 0.62, "truncated_share": 0.012}
    parts = [
        {"trained": False, "text": "[INST]What lifts an anchor?[/INST]"},
        {"trained": True, "text": "A windlass.</s>"},
    ]
    return {
        "plan.json": {
            "batch": {"steps": count},
            "memory": {"gpu_gib": 104.2, "host_gib": 18, "gpu_memory_gib": 140.4},
            "estimate": {**rates, "step_seconds": 3.1, "mfu": 0.31, "hours": 1.05},
            "layout": {"name": "expert-parallel", "ranks": ranks},
            "adapter": {"r": 16, "alpha": 32, "trainable": 27463680, "percent": 0.0231, "targets": [target]},
        },
        "load.json": {
            "checkpoint": "/data/Mistral-Small-4-119B-2603",
            "layout": "expert-parallel",
            "parameters": [{}] * 759,
            "loaded": 759,
            "unread": [{}] * 412,
            "checked": {"parameters": 759, "slices": 3036},
        },
        "data.json": {
            "source": {"name": "wikitext-2"},
            "shape": {"name": "chat"},
            "batching": {"configured": "packed", "padding_waste": 0.031},
            "splits": {"train": {**split, "dropped": 3, "duplicates": 2, "lengths": lengths}},
            "notes": ["347 rows (1.2%) are cut at max_length"],
            "samples": [{"split": "train", "document": 0, "tokens": 10, "parts": parts}],
        },
        "manifest.json": {
            "state": "finished",
            "ranks": ranks,
            "run": {
                "name": "m4",
                "model": {"model_name_or_path": "/data/Mistral-Small-4-119B-2603", "torch_dtype": "bfloat16"},
                "train": {"max_grad_norm": 0.5},
            },
            "versions": {"windlass": "0.1.0", "torch": "2.13.0"},
            "git": None,
        },
    }


def write_lines(path: Path, values: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
