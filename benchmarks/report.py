"""The report of a long run: size of the step files, time to make the report, and its size.

python benchmarks/report.py                        # 300,000 steps of 24 ranks
python benchmarks/report.py --steps 3000 --ranks 2
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import tempfile
import time
from pathlib import Path

from windlass import run_folder
from windlass.files import Table
from windlass.observe import report
from windlass.observe.recorder import drop_noise_digits
from windlass.observe.steps import derived_fields


def record(step: int, steps: int, draw: random.Random, *, first: bool) -> dict[str, object]:
    """Return a rank's measurements of a step, as the recorder writes them."""
    means = {"data": 0.004, "forward": 0.9, "backward": 1.9, "optimizer": 0.06, "communication": 0.55, "other": 0.0003}
    phases = {f"{name}_seconds": mean * (0.95 + 0.1 * draw.random()) for name, mean in means.items()}
    tokens = draw.randint(13000, 16384)
    supervised = tokens - draw.randint(0, 5000)
    made: dict[str, object] = {
        "step": step,
        "time": round(1.79e9 + 3.42 * step, 3),
        **phases,
        "pause_seconds": 0.0,
        "meter_seconds": 0.00012,
        "micro_batches": 4,
        "sequences": 8,
        "rows": [draw.randrange(1_000_000) for _ in range(8)],
        "tokens": tokens,
        "padded_tokens": 16384 - tokens,
        "supervised_tokens": supervised,
        "model_tflops": 270 + draw.random(),
        "mfu": 0.27 + 0.01 * draw.random(),
    }
    if first:  # what is equal on all ranks
        made |= {
            "epoch": 3 * step / steps,
            "loss": 0.9 + 1.3 * math.exp(-5 * step / steps) + 0.06 * draw.gauss(0, 1),
            "grad_norm": 0.4 + 0.1 * abs(draw.gauss(0, 1)),
            "learning_rate": 1e-4 * (1 + math.cos(math.pi * step / steps)),
            "job_tokens": tokens * 24,
        }
    if step % 4 == 0:  # as often as sampling may take half a percent of the time
        made |= {
            "gpu_allocated_gib": 90 + draw.random(),
            "gpu_reserved_gib": 112.25,
            "gpu_peak_gib": 98 + draw.random(),
            "gpu_utilization": 0.86 + 0.12 * draw.random(),
            "gpu_power_watts": 560 + 60 * draw.random(),
            "gpu_temperature_celsius": 64,
            "rss_gib": 12 + draw.random() / 4,
            "cpu_cores": 1.2 + draw.random() / 4,
        }
    return made


def make(folder: Path, steps: int, ranks: int) -> int:
    """Write the run folder; returns the bytes of its step files."""
    size = 0
    for rank in range(ranks):
        path = folder / run_folder.STEPS.format(rank=rank)
        if rank >= 2:  # what is random need not be drawn anew for each rank
            path.write_bytes((folder / run_folder.STEPS.format(rank=1)).read_bytes())
        else:
            draw, table = random.Random(rank), Table(derived_fields("tokens"))
            with path.open("w", encoding="utf-8") as file:
                for step in range(1, steps + 1):
                    fields = record(step, steps, draw, first=rank == 0)
                    file.write(
                        table.encode({name: drop_noise_digits(name, value, 4) for name, value in fields.items()})
                    )
        size += path.stat().st_size
    (folder / run_folder.MANIFEST).write_text(json.dumps({"state": "finished", "ranks": ranks}))
    return size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--ranks", type=int, default=24)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = make(folder, wanted.steps, wanted.ranks)
        began, used = time.perf_counter(), time.process_time()
        made = report.make_report([folder])
        took, used = time.perf_counter() - began, time.process_time() - used
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        each = size / wanted.steps / wanted.ranks
        print(f"{wanted.steps:,} steps x {wanted.ranks} ranks: {each:.0f} bytes a step and rank, {size / 1e9:.2f} GB")
        size_mb = made.html.stat().st_size / 1e6
        print(f"report: {took:.1f} s, {used:.1f} s of processor, {size_mb:.2f} MB, {peak:.2f} GiB of memory")


if __name__ == "__main__":
    main()
