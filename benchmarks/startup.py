"""How long a user waits: commands, the first optimizer step of a run by phase, and the tokens per second after it.

    python benchmarks/startup.py [--commands] [--train]      default: both

Commands: `--help`, the plan of a 119 B checkpoint, `submit --dry-run`, and `check --here` of a small run. The
checkpoint consists of sparse files with headers of the published layout and size (wrapper, FP8, 48 shards).

Training: ranks record their current phase in every run, for the message if they are killed; this reads it every 5 ms.
The model is a tiny replica of a few MB, so "load" is the cost of loading without reading.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from windlass import model as weights
from windlass.files import read_json_lines

RUNS = 9
BYTES = {"BF16": 2, "F8_E4M3": 1}
SHARDS = 48
WINDLASS = [sys.executable, "-m", "windlass"]
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


def time_commands(folder: Path) -> dict[str, list[Usage]]:
    size = write_base(folder)
    run = folder / "run.yaml"
    run.write_text(
        f"model: {{model_name_or_path: {json.dumps(str(folder))}}}\n"
        "lora: {target_modules: [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]}\n"
        "cluster: {nodes: 3, gpus_per_node: 1, gpu: h200, network: infiniband-400}\n"
    )
    pods = ["cluster.image=a/b", "cluster.volumes=[{claim: data, path: /data}]", "train.output_dir=/data/run"]
    submit = [*WINDLASS, "submit", str(run), "--dry-run", "--out", f"{folder}/job", "--to"]
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "windlass --help": [*WINDLASS, "--help"],
        f"windlass plan, {size / 1e9:.0f} GB in {SHARDS} shards": [*WINDLASS, "plan", str(run), "--json"],
        "windlass submit --to script --dry-run": [*submit, "script"],
        "windlass submit --to kubernetes --dry-run": [
            *(*submit, "kubernetes"),
            *(word for override in pods for word in ("--override", override)),
        ],
    }
    measure([*WINDLASS, "demo", "--make-only", "--dir", f"{folder}/demo"])
    here = [*WINDLASS, "check", f"{folder}/demo/run.yaml", "--here"]
    usage: dict[str, list[Usage]] = {title: [] for title in commands}
    for turn in range(RUNS + 1):  # in turns, so that noise affects all commands alike; the first turn is a warm-up
        for title, command in commands.items():
            once = measure(command)
            if turn:
                usage[title].append(once)
    measure(here, (0, 1))  # 1: a check failed
    usage["windlass check --here, a small run"] = [measure(here, (0, 1)) for _ in range(3)]
    return usage


def show_commands(usage: dict[str, list[Usage]]) -> None:
    bare = statistics.median(once.seconds for once in next(iter(usage.values())))
    print(f"{'command':44} {'median s':>9} {'worst s':>9} {'cpu s':>9} {'x python':>9} {'MB':>6}")
    for title, runs in usage.items():
        median = statistics.median(once.seconds for once in runs)
        worst, memory = max(once.seconds for once in runs), max(once.memory_mb for once in runs)
        processor = statistics.median(once.processor_seconds for once in runs)
        print(f"{title:44} {median:9.3f} {worst:9.3f} {processor:9.3f} {median / bare:9.1f} {memory:6.0f}")


# --- training ------------------

RUN = """\
model: {{model_name_or_path: {folder}/model}}
lora: {{r: 4, lora_alpha: 8, target_modules: [q_proj, o_proj, up_proj]}}
data: {{dataset_name_or_path: {folder}/rows.jsonl, dataset_config_name: null, val_split: null, max_length: 128}}
train: {{output_dir: OUT, max_steps: 20, bf16: false, per_device_train_batch_size: 2, gradient_accumulation_steps: 1,
        save_strategy: "no", eval_strategy: "no", report_to: none}}
cluster: {{nodes: 1, gpu: cpu}}
"""
START, FIRST_STEP, TOTAL, RATE = "interpreter, command line, plan", "first step", "total", "then, tokens/s"


def prepare(folder: Path) -> None:
    """Write a small model and some text in its own process: this one imports nothing that it times."""
    script = (
        "import sys; from pathlib import Path; from windlass import tiny; tiny.write_model(Path(sys.argv[1]) / 'model')"
    )
    subprocess.run([sys.executable, "-c", script, str(folder)], check=True, capture_output=True, timeout=300)
    row = json.dumps({"text": "The anchor came up slowly, and the crew leaned on the bars of the windlass. " * 3})
    (folder / "rows.jsonl").write_text(f"{row}\n" * 2000)
    (folder / "run.yaml").write_text(RUN.format(folder=folder))


def train(folder: Path, out: Path, ranks: int) -> dict[str, float]:
    """Return the seconds of each phase until the first step has ended, as rank 0 recorded them, and the rate after."""
    status = Path(tempfile.mkdtemp(dir=folder))
    environ = {**os.environ, "TMPDIR": str(status), "HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    command = [*WINDLASS, "train", str(folder / "run.yaml"), "--ranks", str(ranks)]
    command += ["--override", f"train.output_dir={out}"]
    steps = out / "steps-rank0.jsonl"
    began = time.perf_counter()
    process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    seconds: dict[str, float] = defaultdict(float)
    phase, since = START, began
    while process.poll() is None and not (steps.is_file() and b"\n" in steps.read_bytes()):
        now = time.perf_counter()
        if (new := read_phase(status) or phase) != phase:
            seconds[phase] += now - since
            phase, since = new, now
        time.sleep(0.005)
    seconds[FIRST_STEP] += time.perf_counter() - since
    seconds[TOTAL] = time.perf_counter() - began
    errors = process.communicate(timeout=300)[1].decode(errors="replace")
    if process.returncode:
        raise SystemExit(f"the run ended with {process.returncode}:\n{errors[-3000:]}")
    rates = [step["job_tokens"] / step["step_seconds"] for step in read_json_lines(steps)]
    return {**seconds, RATE: statistics.median(rates[len(rates) // 4 :])}


def read_phase(status: Path) -> str:
    try:
        return next(status.glob("windlass-*/phase-0")).read_text()
    except (StopIteration, OSError):
        return "the ranks' interpreters" if list(status.glob("windlass-*")) else ""


def time_training(folder: Path) -> dict[str, dict[str, float]]:
    """Return the medians of one rank and of two, with tokens made anew and found in the cache."""
    prepare(folder)
    runs: dict[str, list[dict[str, float]]] = defaultdict(list)
    for turn in range(3):
        for ranks, name in ((1, "1 rank"), (2, "2 ranks")):
            for cache in ("cold", "warm"):
                out = folder / f"{turn}-{ranks}" / cache
                if cache == "warm":
                    shutil.copytree(out.with_name("cold") / "tokens", out / "tokens")
                runs[f"{name}, {cache} tokens"].append(train(folder, out, ranks))
    return {
        name: {part: statistics.median(run.get(part, 0.0) for run in taken) for part in taken[0]}
        for name, taken in runs.items()
    }


def show_training(columns: dict[str, dict[str, float]]) -> None:
    print("\n| seconds | " + " | ".join(columns) + " |")
    print("|" + " --- |" * (len(columns) + 1))
    for name in next(iter(columns.values())):
        digits = 0 if name == RATE else 2
        cells = (f"{column.get(name, 0.0):,.{digits}f}" for column in columns.values())
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commands", action="store_true", help="only the commands")
    parser.add_argument("--train", action="store_true", help="only the training")
    options = parser.parse_args()
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft"))
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{time.strftime('%Y-%m-%d')}, {machine}; Python {platform.python_version()}, {versions}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not options.train:
            show_commands(time_commands(folder))
        if not options.commands:
            show_training(time_training(folder))


if __name__ == "__main__":
    main()
