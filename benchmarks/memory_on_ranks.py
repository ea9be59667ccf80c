"""Predicted against measured peaks of real ranks: what the tracker's fake tensors can't express, expert parallelism.

    python benchmarks/memory_on_ranks.py [--json]

Two processes over gloo hold real tensors, sharded by the code that training uses, and torch's tracker counts what they
allocate. Experts receive the tokens that a random router sends them, near enough the same number on both ranks, so the
plan's assumed surplus of the fullest rank is left out. Offloading needs a GPU and is measured nowhere here.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
import transformers
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, _FSDPModMemStats, _FSDPRefType
from torch.distributed.tensor import DTensor
from trl.trainer.utils import add_fused_lm_head

from benchmarks import memory_model as model_of
from windlass.cost import activations, cost
from windlass.family import FAMILIES
from windlass.layout import Layout
from windlass.model import shard

RANKS = 2
SIZES = {"num_hidden_layers": 2}
# name: expert parallel, checkpointing
CASES = {"full-shard": (1, False), "expert-parallel": (2, False), "expert-parallel, checkpointing": (2, True)}


def measure(name: str) -> dict[str, Any]:
    """Runs in every rank. The second micro-batch of the second step, as in the other benchmark."""
    split, checkpointing = CASES[name]
    case = model_of.Case("mistral4", ranks=RANKS, micro=2, length=512, checkpointing=checkpointing, sizes=SIZES)
    bare = model_of.build(case)
    found = dataclasses.replace(model_of.checkpoint(bare), config=bare.config.to_dict(), family=FAMILIES[case.family])
    layout = Layout(name.partition(",")[0], "given", 1, RANKS, RANKS, expert_parallel=split)
    model = shard.build(found, layout, torch.bfloat16)
    shard.allocate(model, layout)
    model.set_experts_implementation("grouped_mm")
    for parameter in model.parameters():
        with torch.no_grad():
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).normal_(0, 0.02)
    peft, adapter = model_of.adapt(case, model)
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    peft.train()
    measured = _peak(peft, model, torch.randint(0, 8000, (case.micro, case.length)))
    work = model_of.work(case, found, adapter)
    work = dataclasses.replace(work, layout=dataclasses.replace(work.layout, expert_parallel=split))
    activations.IMBALANCE = 1.0
    rows = {
        r.item: r.bytes
        for r in cost(work).rows
        if (r.phase, r.place) == ("step", "gpu") and r.item not in model_of.ASSUMED
    }
    total = sum(rows.values())
    return {
        "case": name,
        "predicted_mib": total / model_of.MIB,
        "measured_mib": measured / model_of.MIB,
        "ratio": total / measured,
    }


def _peak(peft: Any, model: Any, ids: torch.Tensor) -> float:
    trained = [p for p in peft.parameters() if p.requires_grad]
    for parameter in trained:
        if parameter.device.type == "meta":
            raise RuntimeError("an adapter without storage")
    optimizer = torch.optim.AdamW(trained, lr=1e-3, foreach=True)
    with model_of.as_on_cuda():
        model_of._pass(peft, ids)
        optimizer.step()
        optimizer.zero_grad()
        model_of._pass(peft, ids)
        gc.collect()
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((ids,))
        for parameter in trained:
            for tensor in (parameter, parameter.grad):
                tracker._update_and_maybe_create_winfos(tensor, _FSDPRefType.SHARDED_PARAM)
        for module in model.modules():
            tracker.memory_tracking[module] = _FSDPModMemStats("")
        with tracker:
            model_of._pass(peft, ids)
            optimizer.step()
    return float(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def launch(name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [*command, "--rank", name], capture_output=True, text=True, timeout=180, check=False, env=environment
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        sys.exit(done.stderr)
    row: dict[str, Any] = json.loads(lines[-1])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--rank", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        transformers.logging.set_verbosity_error()
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        row = measure(options.rank)
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
        dist.destroy_process_group()
        return
    rows = [launch(name) for name in CASES]
    for row in rows:
        line = f"{row['predicted_mib']:10.1f} {row['measured_mib']:10.1f}  {row['ratio']:.3f}  {row['case']}"
        print(json.dumps(row) if options.json else line)
    sys.exit(any(abs(row["ratio"] - 1) > 0.1 for row in rows))


if __name__ == "__main__":
    main()
