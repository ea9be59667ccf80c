"""Count the operators that one layer dispatches in windlass's own training step, and find where the host waits.

    python benchmarks/operators.py [--json] [--only mistral4]

Tiny models of each family with two and with three layers: the difference is one layer's. The step is the training
loop's own, in bfloat16 over gloo ranks, with adapters on all linear layers and the routed experts, without
recomputation. Views are counted separately. An operator that windlass registers (torch.ops.windlass) is one kernel on a
GPU and several of torch's on a CPU. "separate" is what a CPU trains with, "fused" (train/patches.py) what a GPU does;
both are counted on this CPU, with the expert products of a Hopper GPU. The host waits where it reads a value, or a size
that depends on values, from the device; what the recorder reads is in host memory and no wait.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

FAMILIES = ("mistral4", "mixtral", "llama")
LAYOUTS = {  # ranks, and the layout
    "replicated": (2, "{name: resident}"),
    "full-shard": (2, "{name: full-shard}"),
    "expert-parallel": (2, "{name: expert-parallel}"),
    "base in FP8": (1, "{name: resident, base_dtype: fp8}"),
}
RUN = """\
model: {{model_name_or_path: {model}, torch_dtype: bfloat16}}
lora: {{r: 8, lora_alpha: 16, lora_dropout: 0, target_modules: all-linear{experts}}}
data: {{dataset_name_or_path: {folder}/rows.jsonl, dataset_config_name: null, val_split: null, max_length: 64}}
train: {{output_dir: {folder}/out, max_steps: 6, per_device_train_batch_size: 1, bf16: true,
        gradient_accumulation_steps: 1, gradient_checkpointing: false, save_strategy: "no", eval_strategy: "no",
        report_to: none}}
layout: {layout}
cluster: {{nodes: 1, gpus_per_node: {ranks}, gpu: cpu}}
"""
WAITS = ("_local_scalar_dense", "nonzero", "tolist")
ELSEWHERE = ("update", "recorder")  # a CPU's optimizer reads the step's number of each parameter


def has_experts(family: str) -> bool:
    from windlass.model.family import FAMILIES as KNOWN

    return "experts" in KNOWN[family].sizes


def count_step(run: Path, fused: bool) -> dict[str, int]:
    """Count the operators of the last optimizer step on this rank."""
    import torch
    from dispatched import Counting
    from rich.console import Console
    from torch.overrides import TorchFunctionMode

    from windlass import plan as planning
    from windlass import runfile
    from windlass.data.prepare import prepare_data
    from windlass.observe.background import BackgroundReport
    from windlass.ranks.rank import Rank, StopSignal
    from windlass.train.kernels import on_cpu
    from windlass.train.load import load_base
    from windlass.train.lora import attach_adapter
    from windlass.train.run import Session, make_loop, open_base_tokenizer

    plan = planning.make_plan(runfile.read_run_file(run))
    here = Rank(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]))
    tokenizer = open_base_tokenizer(plan)
    model, _ = load_base(plan.base, plan.layout, dtype=torch.bfloat16)
    peft = attach_adapter(model, plan.run.lora, plan.adapter, 0)
    data = prepare_data(plan.run, tokenizer)
    out = plan.folder
    session = Session(here, Console(quiet=True), StopSignal(), BackgroundReport(out))
    loop = make_loop(plan, session, peft, data, tokenizer, facts={}, debug_freq=0)
    patches = loop.model.patches
    patches.adapters = patches.of_layers.fuse_layers(loop.model.causal_lm, torch.bfloat16, always=fused)
    vars(on_cpu)["is_on_cpu"] = lambda _: not fused
    loop.watch.report = lambda: None
    counting = Counting()
    train_step, mark, update, end_step = (
        loop.train_step,
        loop.recorder.mark,
        loop.updater.optimizer.step,
        loop.recorder.end_step,
    )

    class Asked(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counting.names[counting.phase, getattr(func, "__name__", "")] += 1
            return func(*args, **(kwargs or {}))

    def marked(what: str) -> None:
        mark(what)
        counting.phase = {"data": "forward", "forward": "backward"}.get(what, "between")

    def updated() -> Any:
        counting.phase = "update"  # a CPU's optimizer goes from parameter to parameter, a GPU's takes all at once
        return update()

    def recorded(*given: Any, **values: Any) -> None:
        counting.phase = "recorder"
        end_step(*given, **values)

    def step(micro_batches: Any) -> Any:
        if loop.step != 5:  # the first ones prove that the adapter trains
            return train_step(micro_batches)
        counting.phase = "between"
        with Asked(), counting:
            return train_step(micro_batches)

    for owner, name, replacement in (
        (loop, "train_step", step),
        (loop.recorder, "mark", marked),
        (loop.recorder, "end_step", recorded),
        (loop.updater.optimizer, "step", updated),
    ):
        setattr(owner, name, replacement)
    with loop.watch:
        loop.run()
    found = {
        what: sum(counting.found[phase][what] for phase in ("forward", "backward")) for what in ("operators", "views")
    }
    waits = sum(count for (phase, name), count in counting.names.items() if name in WAITS and phase not in ELSEWHERE)
    return {**found, "host_syncs": waits}


def rank(folder: Path) -> None:
    """Run both numbers of layers one after the other in the same ranks."""
    import torch

    from windlass.ranks.rank import Rank
    from windlass.train.connect import create_process_group
    from windlass.train.kernels import on_cpu, products

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # One product of all experts, as on a GPU; a CPU takes one after the other.
    vars(on_cpu)["rounds_rows"] = lambda _: False
    vars(products)["expert_products"] = products.multiply_all
    create_process_group(
        Rank(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])), 600
    )
    found = [[count_step(folder / f"{layers}" / "run.yaml", fused) for layers in (2, 3)] for fused in (False, True)]
    if os.environ["RANK"] == "0":
        (folder / "found.json").write_text(json.dumps(found))


def count(family: str, layout: str) -> dict[str, Any]:
    from windlass import tiny
    from windlass.ranks import supervisor as ranks

    world, text = LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as made:
        for layers in (2, 3):
            folder = Path(made, f"{layers}")
            model = tiny.write_model(
                folder / "model",
                family,
                layers=layers,
                wrapper=False,
                quantization="tensor" if "fp8" in text else "none",
            )
            (folder / "rows.jsonl").write_text('{"text": "anchor bark cable deck eddy fathom galley"}\n' * 16)
            experts = ", experts: {r: 8}" if has_experts(family) else ""
            given = {"model": model, "folder": folder, "experts": experts, "layout": text, "ranks": world}
            (folder / "run.yaml").write_text(RUN.format(**given))
        if ranks.start_ranks([sys.executable, __file__, "--rank", made], world, dict(os.environ)):
            raise SystemExit(f"{family}, {layout}: a rank failed")
        (few, many), (few_fused, many_fused) = json.loads(Path(made, "found.json").read_text())
    return {
        "family": family,
        "layout": layout,
        "adapter": "linear and experts" if has_experts(family) else "linear",
        "kernels_per_layer": many_fused["operators"] - few_fused["operators"],
        "views_per_layer": many_fused["views"] - few_fused["views"],
        "host_syncs_per_step": few_fused["host_syncs"],
        "of_these_per_layer": many_fused["host_syncs"] - few_fused["host_syncs"],
        "kernels_separate": many["operators"] - few["operators"],
        "views_separate": many["views"] - few["views"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--only", choices=FAMILIES, help="this family alone")
    parser.add_argument("--layout", choices=LAYOUTS, help="this layout alone")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return rank(options.rank)
    rows = [
        count(family, layout)
        for family in FAMILIES
        for layout in LAYOUTS
        if options.only in (None, family) and options.layout in (None, layout)
        if layout != "expert-parallel" or has_experts(family)
    ]
    if options.json:
        print(json.dumps({"rows": rows}, indent=1))
        return None
    print(f"{'of one layer:':46} {'kernels':>14} {'views':>14}  waits of the host")
    ways = f"{'separate fused':>14} {'separate fused':>14}"
    print(f"{'family':8} {'layout':16} {'adapter':20} {ways}  a step, of them a layer")
    for row in rows:
        counts = [row[f"{what}_{way}"] for what in ("kernels", "views") for way in ("separate", "per_layer")]
        waits = [row["host_syncs_per_step"], row["of_these_per_layer"]]
        named = [row["family"], row["layout"], row["adapter"]]
        print("{:8} {:16} {:20} {:8} {:5} {:8} {:5}  {:6}, {:4}".format(*named, *counts, *waits))
    return None


if __name__ == "__main__":
    main()
