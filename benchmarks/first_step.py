"""Measure the time from `windlass train` to the end of the first optimizer step, by phase.

    python benchmarks/first_step.py             one rank and two, tokens made anew and found in the cache
    python benchmarks/first_step.py --imports   what importing the training libraries takes, by package

Ranks record their current phase in every run, for the message if they are killed; this reads it every 5 ms. The model
is a tiny replica of a few MB, so "load" is the cost of loading without reading.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

RUN = """\
model: {{model_name_or_path: {folder}/model}}
lora: {{r: 4, lora_alpha: 8, target_modules: [q_proj, o_proj, up_proj]}}
data: {{dataset_name_or_path: {folder}/rows.jsonl, dataset_config_name: null, val_split: null, max_length: 128}}
train: {{output_dir: OUT, max_steps: 1, bf16: false, per_device_train_batch_size: 2, gradient_accumulation_steps: 1,
        save_strategy: "no", eval_strategy: "no", report_to: none}}
cluster: {{nodes: 1, gpu: cpu}}
"""
START, STEP = "interpreter, command line, plan", "first step"
OFTEN = 0.005


def prepare(folder: Path) -> None:
    """Write a small model and some text in its own process: this one imports nothing that it times."""
    script = (
        "import sys; from pathlib import Path; from windlass import tiny; tiny.write_model(Path(sys.argv[1]) / 'model')"
    )
    subprocess.run([sys.executable, "-c", script, str(folder)], check=True, capture_output=True, timeout=300)
    row = json.dumps({"text": "The anchor came up slowly, and the crew leaned on the bars of the windlass. " * 3})
    (folder / "rows.jsonl").write_text(f"{row}\n" * 2000)
    (folder / "run.yaml").write_text(RUN.format(folder=folder))


def first_step(folder: Path, out: Path, ranks: int) -> dict[str, float]:
    """Return the seconds of each phase of one run, as rank 0 recorded them."""
    folders = Path(tempfile.mkdtemp(dir=folder))
    environ = {**os.environ, "TMPDIR": str(folders), "HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "windlass", "train", str(folder / "run.yaml"), "--ranks", str(ranks)]
    began = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--override", f"train.output_dir={out}"],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    found: dict[str, float] = defaultdict(float)
    doing, since = START, began
    try:
        while process.poll() is None and doing:
            now = time.perf_counter()
            printed = "" if stepped(out) else (read_phase(folders) or doing)
            if printed != doing:
                found[STEP if not printed else doing] += now - since
                doing, since = printed, now
            time.sleep(OFTEN)
        output = process.communicate(timeout=300)[0].decode(errors="replace")
    finally:
        process.kill()
        process.wait()
    if process.returncode or doing:
        raise SystemExit(f"the run ended with {process.returncode}:\n{output[-3000:]}")
    return {**found, "total": since - began}


def read_phase(folders: Path) -> str:
    try:
        return next(folders.glob("windlass-*/phase-0")).read_text()
    except (StopIteration, OSError):
        return "the ranks' interpreters" if list(folders.glob("windlass-*")) else ""


def stepped(out: Path) -> bool:
    steps = out / "steps-rank0.jsonl"
    return steps.is_file() and b"\n" in steps.read_bytes()


def imports() -> dict[str, float]:
    """Return the seconds by package, each without what it imports from others."""
    command = [sys.executable, "-X", "importtime", "-c", "import windlass.train.run"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    found: dict[str, float] = defaultdict(float)
    for line in done.stderr.splitlines():
        own, _, name = line.removeprefix("import time:").split("|") if line.count("|") == 2 else ("", "", "")
        if own.strip().isdigit():
            found[name.strip().split(".")[0]] += int(own) / 1e6
    return found


def show(title: str, columns: dict[str, dict[str, float]]) -> None:
    print(f"\n| {title} | " + " | ".join(columns) + " |")
    print("|" + " --- |" * (len(columns) + 1))
    for name in dict.fromkeys(name for column in columns.values() for name in column):
        cells = (f"{column[name]:.2f}" if name in column else "-" for column in columns.values())
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--imports", action="store_true")
    parser.add_argument("--runs", type=int, default=3, help="of each; their medians are shown")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    asked = parser.parse_args()
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft", "datasets"))
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}"
    print(f"{time.strftime('%Y-%m-%d')}, {machine}; {versions}")
    if asked.imports:
        taken = [imports() for _ in range(asked.runs)]
        names = sorted(taken[0], key=lambda name: -taken[0][name])[:15]
        medians = {name: statistics.median(one[name] for one in taken) for name in names}
        show("seconds", {"imports": {**medians, "total": statistics.median(sum(one.values()) for one in taken)}})
        return
    columns: dict[str, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        for turn in range(asked.runs):
            for ranks in asked.ranks:
                for cache in ("cold", "warm"):
                    out = Path(name) / f"{turn}-{ranks}" / cache
                    if cache == "warm":
                        shutil.copytree(out.with_name("cold") / "tokens", out / "tokens")
                    words = f"{ranks} rank{'s' * (ranks > 1)}, {cache} tokens"
                    columns[words].append(first_step(Path(name), out, ranks))
    shown = {
        words: {part: statistics.median(one.get(part, 0.0) for one in taken) for part in taken[0]}
        for words, taken in columns.items()
    }
    show("seconds", shown)


if __name__ == "__main__":
    main()
