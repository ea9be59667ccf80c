"""Start-up time of `--help`, the plan of a 119 B checkpoint, `submit --dry-run`, and `check --here` of a small run.

    python benchmarks/startup.py

The checkpoint consists of sparse files with headers of the published layout and size (wrapper, FP8, 48 shards).
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass import model as weights

RUNS = 9
BYTES = {"BF16": 2, "F8_E4M3": 1}
SHARDS = 48
# As after `pip install`, which compiles the modules: otherwise Python would compile them at every start.
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}


@dataclass(frozen=True)
class Usage:
    seconds: float
    processor_seconds: float
    memory_mb: float


def measure(command: list[str], codes: tuple[int, ...] = (0,)) -> Usage:
    """Run one process and return the kernel's measurements of it."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT)
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status) not in codes:
        raise SystemExit(f"{command} failed")
    return Usage(time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def write_base(folder: Path) -> int:
    """Write Mistral Small 4 as published, in sparse files. Returns their nominal size in bytes."""
    model = weights.find_published_base("Mistral-Small-4-119B-2603")
    assert model is not None
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {"vision_tower.patch_conv.weight": ("BF16", (1024, 3, 14, 14))}
    for parameter in model.parameters:
        key = f"language_model.{parameter.name}"
        quantized = parameter.part in ("attention", "shared_experts", "experts") and len(parameter.shape) > 1
        tensors[key] = ("F8_E4M3" if quantized else "BF16", parameter.shape)
        if quantized and parameter.part == "experts":
            tensors[f"{key}_scale_inv"] = ("BF16", (parameter.shape[0], 1, 1))
            tensors[f"{key}_activation_scale"] = ("BF16", (parameter.shape[0],))
        elif quantized:
            tensors[f"{key}_scale_inv"] = ("BF16", ())
            tensors[f"{key.removesuffix('weight')}activation_scale"] = ("BF16", ())
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": model.config,
        "vision_config": {"model_type": "pixtral"},
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
    }
    (folder / "config.json").write_text(json.dumps(config))
    names, index, total = list(tensors), {}, 0
    for shard in range(SHARDS):
        name = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        own = {key: tensors[key] for key in names[shard::SHARDS]}
        total += write_shard(folder / name, own)
        index.update(dict.fromkeys(own, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return total


def write_shard(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> int:
    header: dict[str, Any] = {}
    end = 0
    for key, (dtype, shape) in tensors.items():
        size = BYTES[dtype] * math.prod(shape)
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return end


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_base(folder)
        run = folder / "run.yaml"
        run.write_text(
            f"model: {{model_name_or_path: {json.dumps(name)}}}\n"
            "lora: {target_modules: [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]}\n"
            "cluster: {nodes: 3, gpus_per_node: 1, gpu: h200, network: infiniband-400}\n"
        )
        windlass = [sys.executable, "-m", "windlass"]
        pods = ["cluster.image=a/b", "cluster.volumes=[{claim: data, path: /data}]", "train.output_dir=/data/run"]
        submit = [*windlass, "submit", str(run), "--dry-run", "--out", f"{name}/job", "--to"]
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "windlass --help": [*windlass, "--help"],
            f"windlass plan, {size / 1e9:.0f} GB in {SHARDS} shards": [*windlass, "plan", str(run), "--json"],
            "windlass submit --to script --dry-run": [*submit, "script"],
            "windlass submit --to kubernetes --dry-run": [
                *(*submit, "kubernetes"),
                *(word for override in pods for word in ("--override", override)),
            ],
        }
        demo = [*windlass, "demo", "--make-only", "--dir", f"{name}/demo"]
        measure(demo)
        here = [*windlass, "check", f"{name}/demo/run.yaml", "--here"]
        usage: dict[str, list[Usage]] = {title: [] for title in commands}
        for turn in range(RUNS + 1):  # in turns, so that noise affects all commands alike; the first turn is a warm-up
            for title, command in commands.items():
                one = measure(command)
                if turn:
                    usage[title].append(one)
        measure(here, (0, 1))  # 1: a check failed
        usage["windlass check --here, a small run"] = [measure(here, (0, 1)) for _ in range(3)]
    show(usage)


def show(usage: dict[str, list[Usage]]) -> None:
    print(
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    )
    bare = statistics.median(one.seconds for one in next(iter(usage.values())))
    print(f"load average {os.getloadavg()[0]:.1f}")
    print(f"{'command':44} {'median s':>9} {'worst s':>9} {'cpu s':>9} {'x python':>9} {'MB':>6}")
    for title, runs in usage.items():
        median = statistics.median(one.seconds for one in runs)
        worst, memory = max(one.seconds for one in runs), max(one.memory_mb for one in runs)
        processor = statistics.median(one.processor_seconds for one in runs)
        print(f"{title:44} {median:9.3f} {worst:9.3f} {processor:9.3f} {median / bare:9.1f} {memory:6.0f}")


if __name__ == "__main__":
    main()
