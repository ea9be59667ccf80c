"""Compare the plan with real runs on this machine's processor: seconds per step and memory, after calibrating.

    python benchmarks/cpu_plan.py [--steps 60] [--only TEXT ...] [--json]

Cases are the demo, two dense models and two mixtures of experts with random weights, packed and unpacked, on one rank
and on two over gloo. Calibrations and runs alternate because other work on the machine comes and goes: each case is
planned with the calibrations before and after it, and its measured step is the median after the first quarter.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from windlass import demo, tiny
from windlass.files import read_json_lines

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"hidden": 256, "layers": 4, "intermediate": 512, "vocab": 2048},
    "qwen3": {"hidden": 128, "layers": 6, "intermediate": 384, "vocab": 1024},
    "mixtral": {"hidden": 128, "layers": 2, "experts": 8, "intermediate": 256, "vocab": 1024},
    "qwen3_moe": {"hidden": 192, "layers": 3, "experts": 16, "top_k": 4, "moe_intermediate": 96, "vocab": 2048},
}
SECONDS, GIB = "seconds per step", "peak memory, GiB"


def windlass(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "windlass", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"windlass {' '.join(arguments)}\n{done.stderr[-2000:]}")
    return done.stdout


def cases(folder: Path) -> dict[str, tuple[Path, list[str], int]]:
    """Return name -> run file, overrides and ranks."""
    run = demo.make_demo(folder / "demo")
    found = {"demo, 2 ranks": (run, list[str](), 2)}
    for family, sizes in MODELS.items():
        model = tiny.write_model(folder / family, family, **sizes)
        for packing in ("true", "false"):
            for ranks in (1, 2):
                keys = [
                    f"model.model_name_or_path={model}",
                    f"data.packing={packing}",
                    f"cluster.gpus_per_node={ranks}",
                ]
                keys += ["lora.target_modules=all-linear", "layout=auto", "train.eval_strategy=no"]
                name = f"{family}, {'packed' if packing == 'true' else 'rows'}, {ranks} rank{'s' * (ranks > 1)}"
                found[name] = (run, keys, ranks)
    return found


def measure(name: str, run: Path, keys: list[str], steps: int) -> dict[str, float]:
    """Train, and return what the report measured."""
    out = run.parent / "runs" / name.replace(", ", "-").replace(" ", "")
    keys = [*keys, f"train.output_dir={out}", f"train.max_steps={steps}", "train.save_strategy=no"]
    windlass("train", str(run), *(word for key in keys for word in ("--override", key)))
    rows = list(read_json_lines(out / "steps-rank0.jsonl"))
    seconds = [row["step_seconds"] for row in rows[steps // 4 :]]
    computing = [row["step_seconds"] * row["cpu_cores"] for row in rows[steps // 4 :] if row.get("cpu_cores")]
    report = json.loads((out / "report.json").read_text())["runs"][0]
    peak = max(rank["peak_gib"] for rank in report["memory"]["per_rank"])
    return {
        "seconds": statistics.median(seconds),
        "processor_seconds": statistics.median(computing),
        "gib": peak,
        "planned_gib": report["memory"]["planned_gib"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name has one of these texts")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks and calibrations alike
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder, machines = Path(name), dict[int, Path]()
        os.environ["HOME"] = name  # no machine file but ours
        for case, (run, keys, ranks) in cases(folder).items():
            if not any(text in case for text in options.only):
                continue

            def plan(path: Path, run: Path = run, keys: list[str] = keys) -> float:
                overrides = [*keys, f"cluster.machine={path}"]
                text = windlass(
                    "plan", str(run), "--json", *(word for key in overrides for word in ("--override", key))
                )
                return float(json.loads(text)["estimate"]["step_seconds"])

            def calibrated(ranks: int, turn: str) -> Path:
                path = folder / f"machine-{turn}.json"
                windlass("calibrate", "--ranks", str(ranks), "--out", str(path))
                return path

            before = machines.pop(ranks, None) or calibrated(ranks, f"{len(found)}-before")
            measured = measure(case, run, keys, options.steps)
            after = machines[ranks] = calibrated(ranks, f"{len(found)}-after")
            planned = (plan(before) * plan(after)) ** 0.5
            row = {"case": case, **measured, "planned_seconds": planned}
            row |= {"time": measured["seconds"] / planned, "memory": measured["gib"] / measured["planned_gib"]}
            found.append(row)
            if not options.json:
                print(
                    f"{case:28} {row['seconds']:7.3f} s, planned {planned:7.3f}: {row['time']:5.2f}   "
                    f"{row['gib']:5.2f} GiB, planned {row['planned_gib']:5.2f}: {row['memory']:5.2f}",
                    flush=True,
                )
    inside = {
        key: sum(low <= row[key] <= high for row in found)
        for key, low, high in (("time", 0.8, 1.25), ("memory", 0.9, 1.1))
    }
    if options.json:
        print(json.dumps({"rows": found, "within": inside, "of": len(found)}, indent=1))
    else:
        print(
            f"{inside['time']} of {len(found)} steps within 0.8 to 1.25 of the plan, "
            f"{inside['memory']} peaks within 0.9 to 1.1"
        )


if __name__ == "__main__":
    main()
