"""Predicted against measured peaks of real ranks, for what fake tensors can't express: expert parallelism, adapters of
experts, rows split over ranks, and a base as published: in FP8, NVFP4 or integers of 4 bits.

    python benchmarks/memory_on_ranks.py [--json] [--quick] [--only WORDS]

Two processes over gloo store real tensors, loaded, sharded and adapted by the code of training, and torch's tracker
counts their allocations. A random router sends nearly equally many tokens to both ranks' experts, so the plan's assumed
surplus of the fullest rank is left out. Offloading needs a GPU and is not measured here.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import memory_model as model_of
import torch
import torch.distributed as dist
import transformers
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, _FSDPModMemStats, _FSDPRefType
from torch.distributed._tools.mem_tracker import MemTracker

from windlass import model as weights
from windlass import tiny
from windlass.hardware import Machine, find_fabric, find_gpu
from windlass.model import targets as adapters
from windlass.plan import memory
from windlass.plan.cost import BatchSize, Workload, estimate_cost, read_shape
from windlass.plan.layout import Layout
from windlass.runfile import ExpertLora, Lora
from windlass.train import fsdp
from windlass.train.head import Head
from windlass.train.load import load_base
from windlass.train.long_rows import RowGroup
from windlass.train.lora import attach_adapter
from windlass.train.patches import Patches

RANKS, MICRO, LENGTH = 2, 2, 512
SPLIT_LENGTH, LONG = 2048, 4096  # of rows split over the ranks; attention needs most in a single long one
SIZES = {"hidden": 1024, "layers": 2, "heads": 8, "experts": 32, "top_k": 4, "moe_intermediate": 512, "vocab": 8192}
LATENT = {"q_lora_rank": 256, "kv_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 128}
TARGETS = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = (
    "full-shard",
    "full-shard, FP8",
    "full-shard, FP8, checkpointing",
    "no-reshard",
    "no-reshard, FP8",
    "expert-parallel",
    "expert-parallel, checkpointing",
    "expert-parallel, FP8, checkpointing",
    "expert-parallel, gathered once",
    "expert-parallel, gathered once, FP8, checkpointing",
    "resident, FP8",
    "resident, FP8, checkpointing",
    "full-shard, expert adapters",
    "expert-parallel, expert adapters",
    "expert-parallel, FP8, expert adapters, checkpointing",
    "resident, NVFP4, checkpointing",
    "full-shard, NVFP4",
    "expert-parallel, NVFP4, expert adapters, checkpointing",
    "full-shard, UINT4, checkpointing",
    "expert-parallel, UINT4",
    "full-shard, split rows",
    "resident, split rows, long, checkpointing",
    "expert-parallel, split rows, checkpointing",
    "resident, split rows",
    "resident, split rows, packed, checkpointing",
)
QUICK = {
    *("full-shard", "no-reshard, FP8", "expert-parallel, gathered once, FP8, checkpointing", "resident, FP8"),
    *("full-shard, expert adapters", "expert-parallel, FP8, expert adapters, checkpointing"),
    *("resident, NVFP4, checkpointing", "expert-parallel, UINT4"),
    *("expert-parallel, split rows, checkpointing", "resident, split rows, long, checkpointing"),
}
# How the model of a case is stored, by a word of it.
STORED = {"": "tensor", "NVFP4": "nvfp4", "UINT4": "uint4"}


def layout_of(name: str) -> Layout:
    kind, _, words = name.partition(", ")
    return Layout(
        kind,
        "given",
        1,
        RANKS,
        shard=1 if kind == "resident" else RANKS,
        replicate=RANKS if kind == "resident" else 1,
        expert_parallel=RANKS if kind == "expert-parallel" else 1,
        context_parallel=RANKS if "split rows" in words else 1,
        reshard_after_forward=kind not in ("no-reshard", "resident") and "gathered once" not in words,
        activation_checkpointing="checkpointing" in words,
        base_dtype=next((word.lower() for word in ("NVFP4", "UINT4", "FP8") if word in words), "bf16"),
    )


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Run the second step's micro-batches in every rank, as in memory_model.py."""
    found = weights.find_base(str(folder), "benchmark")
    experts = ExpertLora(r=4, lora_alpha=8) if "expert adapters" in name else None
    lora = Lora(r=model_of.RANK, lora_alpha=32, lora_dropout=0.0, target_modules=TARGETS, experts=experts)
    adapter = adapters.resolve_adapter(lora, found, lambda key: key)
    layout = layout_of(name)
    processor = Machine(
        find_gpu("cpu"), find_fabric("loopback"), find_fabric("loopback"), find_fabric("memory"), 1, None
    )
    is_long = "long" in name
    micro = 1 if is_long else MICRO
    length = LONG if is_long else SPLIT_LENGTH if layout.context_parallel > 1 else LENGTH
    document = length // 4 if "packed" in name else None
    work = Workload(
        read_shape(found, adapter),
        layout,
        BatchSize(micro, 2, length),
        processor,
        "adamw_torch",
        2,
        masked=document is not None,
        document=document,
    )
    model, _ = load_base(found, layout, dtype=torch.bfloat16)
    peft = attach_adapter(model, lora, adapter, 0)
    group = RowGroup.create(layout.context_parallel, 300)
    if layout.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    peft.train()
    once = layout.shard > 1 and not layout.reshard_after_forward
    inputs = _make_inputs(micro, length, document or length, group)
    with Patches() as patches:
        patches.patch_forward(model, group=group)
        measured = _peak(peft, model, inputs, once=once)
    memory.IMBALANCE = 1.0
    answer = estimate_cost(work)
    rows = {
        r.item: r.bytes for r in answer.rows if (r.phase, r.place) == ("step", "gpu") and r.item not in model_of.ASSUMED
    }
    total = sum(rows.values())
    return {
        "case": name,
        "predicted_mib": total / model_of.MIB,
        "measured_mib": measured / model_of.MIB,
        "ratio": total / measured,
        "peak": answer.peak,
        "rows_mib": {item: size / model_of.MIB for item, size in rows.items()},
    }


def _make_inputs(micro: int, length: int, document: int, group: RowGroup | None) -> dict[str, Any]:
    """Return a micro-batch, or this rank's part of it."""
    ids = torch.randint(0, 8000, (micro, length))
    places = (torch.arange(micro)[:, None] * length + torch.arange(length - 1)).flatten()
    inputs = {"input_ids": ids, "supervised": places, "targets": ids[:, 1:].flatten()}
    if group is None:
        return inputs
    inputs["position_ids"] = (torch.arange(length) % document).repeat(micro, 1)
    return group.cut(inputs, [length] * micro).inputs


def _pass(peft: Any, inputs: dict[str, Any]) -> None:
    causal_lm = peft.get_base_model()
    targets = inputs["targets"]
    inputs = {name: value for name, value in inputs.items() if name != "targets"}
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = Head(causal_lm).loss(causal_lm(**inputs).last_hidden_state, targets)
    loss.backward()  # type: ignore[no-untyped-call]


def _peak(peft: Any, model: Any, inputs: dict[str, Any], *, once: bool) -> float:
    """Return the second step's peak. `once`: its first micro-batch's gathered weights are kept for the second, as in
    training."""
    trained = [p for p in peft.parameters() if p.requires_grad]
    tensors = tuple(value for value in inputs.values() if isinstance(value, torch.Tensor))
    for parameter in trained:
        if parameter.device.type == "meta":
            raise RuntimeError("an adapter without storage")
    optimizer = torch.optim.AdamW(trained, lr=1e-3, foreach=True)
    with model_of.as_on_cuda():
        _pass(peft, inputs)
        optimizer.step()
        optimizer.zero_grad()
        _pass(peft, inputs)
        gc.collect()
        tracker: Any
        if fsdp.list_fsdp_modules(model):
            tracker = FSDPMemTracker(model, optimizer)
            tracker.track_inputs(tensors)
            for parameter in trained:
                for tensor in (parameter, parameter.grad):
                    tracker._update_and_maybe_create_winfos(tensor, _FSDPRefType.SHARDED_PARAM)
            for module in model.modules():
                tracker.memory_tracking[module] = _FSDPModMemStats("")
        else:  # resident: plain tensors
            tracker = MemTracker()
            tracker.track_external(model, optimizer, *tensors)
            track = tracker._track_module_params_and_buffers
            # It would also hook the gradients of frozen parameters, which have none.
            tracker._track_module_params_and_buffers = lambda module, **_: track(module, install_grad_hooks=False)
        with tracker:
            if once:
                fsdp.keep_gathered(fsdp.list_fsdp_modules(model), keep=True)
                _pass(peft, inputs)
                fsdp.keep_gathered(fsdp.list_fsdp_modules(model), keep=False)
            _pass(peft, inputs)
            optimizer.step()
    return float(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def launch(cases: list[str], folder: Path) -> Iterator[dict[str, Any]]:
    """Measure cases of one model, one after the other, in the same ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [*command, "--rank", json.dumps(cases), "--model", str(folder)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env=environment,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if len(lines) < len(cases):
        sys.exit(done.stderr)
    yield from map(json.loads, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--only", default="", help="only cases whose words contain this")
    parser.add_argument("--quick", action="store_true", help="only the cases that the tests check")
    parser.add_argument("--rank", default="", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        for case in json.loads(options.rank):
            row = measure(case, options.model)
            if dist.get_rank() == 0:
                print(json.dumps(row), flush=True)
            gc.collect()
        dist.destroy_process_group()
        return
    cases: dict[str, list[str]] = {}
    for case in CASES:
        if options.only in case and (case in QUICK or not options.quick):
            cases.setdefault(next((word for word in STORED if word and word in case), ""), []).append(case)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for word, chosen in cases.items():
            folder = Path(name) / STORED[word]
            given: Any = {"config": LATENT, "quantization": STORED[word], **SIZES}
            tiny.write_model(folder, "mistral4", tokenizer=False, **given)
            for row in launch(chosen, folder):
                rows.append(row)
                line = f"{row['predicted_mib']:10.1f} {row['measured_mib']:10.1f}  {row['ratio']:.3f}  {row['case']}"
                print(json.dumps(row) if options.json else line, flush=True)
    sys.exit(any(abs(row["ratio"] - 1) > 0.1 for row in rows))


if __name__ == "__main__":
    main()
