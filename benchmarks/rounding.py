"""FP8 merges: rounding to the nearest code against dithered rounding. Trains an adapter first; prints a table.

    python benchmarks/rounding.py [--run RUN_DIR]

The model is a small Mistral 4, wide enough that an output sums a thousand weights. Compared are logits on the run's own
rows in float32, of the merged model and of base + adapter, for the trained adapter and a weaker one.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from windlass import demo, tiny
from windlass.export import rounding
from windlass.export.deltas import read_deltas
from windlass.export.merged_files import FP8, plan_merge, write_merge
from windlass.export.proof import load_float32
from windlass.export.source import choose_adapter, require_local_base
from windlass.model import read_base
from windlass.train.logits import compute_both_logits, compute_logits, kl_divergence, open_adapter, sample_rows
from windlass.weights.reading import Box

WIDE = {"q_lora_rank": 512, "kv_lora_rank": 256, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64}
CHANGES = {"gpus_per_node": "1", "learning_rate": "0.0005", "max_steps": "40", "layout": "resident"}
Dice = Callable[[str, Box], Tensor]
ROUNDINGS: dict[str, Dice] = {"nearest": lambda _key, _box: torch.tensor(0.5), "dithered": rounding.make_dither}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a finished run on an FP8 base; default: train one")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        run = asked.run or train(folder / "wide")
        print("| adapter | its own KL | rounding | KL to base + adapter | of its change of the logits, kept |")
        print("|---|---|---|---|---|")
        for strength in (1.0, 0.25):
            compare(run, folder, strength)


def train(folder: Path) -> Path:
    run_file = demo.make_demo(folder)
    shutil.rmtree(folder / "model")
    tiny.write_model(
        folder / "model", hidden=1024, layers=2, heads=8, experts=4, moe_intermediate=512, vocab=1024, config=WIDE
    )
    text = run_file.read_text()
    for key, value in CHANGES.items():
        text, count = re.subn(rf"(?m)^( *{key}:) .*", rf"\1 {value}", text)
        assert count == 1, key
    run_file.write_text(text)
    subprocess.run([sys.executable, "-m", "windlass", "train", str(run_file)], check=True, timeout=3600)
    return folder / "run"


def compare(run: Path, folder: Path, strength: float) -> None:
    source = choose_adapter(run)
    weak = folder / "adapter"
    shutil.rmtree(weak, ignore_errors=True)
    weak.mkdir()
    factors = load_file(source.weights)
    scaled = {key: tensor * strength if "lora_B" in key else tensor for key, tensor in factors.items()}
    save_file(scaled, weak / source.weights.name, metadata={"format": "pt"})
    (weak / "adapter_config.json").write_text(json.dumps(source.config))
    weaker = choose_adapter(weak)
    base = require_local_base(weaker, None)
    rows = sample_rows(source.run_folder, base.dims["vocab"])
    plain, adapted = compute_both_logits(open_adapter(load_float32(base), weak), rows)
    change = adapted - plain
    for name, dice in ROUNDINGS.items():
        rounding.make_dither = dice  # type: ignore[assignment]
        to = folder / "out"
        shutil.rmtree(to, ignore_errors=True)
        deltas = read_deltas(weaker, base)
        plan = plan_merge(base, deltas, to, FP8)
        to.mkdir()
        write_merge(plan, base, deltas, to, lambda _: None, 1)
        merged = compute_logits(load_float32(read_base(to)), rows)
        kept = float(((merged - plain) * change).sum() / (change * change).sum())
        own, left = kl_divergence(adapted, plain), kl_divergence(adapted, merged)
        print(f"| x {strength} | {own:.3g} | {name} | {left:.2g} | {kept:.0%} |", flush=True)


if __name__ == "__main__":
    main()
