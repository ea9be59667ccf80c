"""The published recipe, its peers and windlass over two gloo ranks of this machine: same model, rows, seed, targets.

    python benchmarks/recipe.py [--model FOLDER] [--text wiki.txt] [--targets q_proj v_proj] [--adapt-experts]
                                [--only recipe windlass] [--peer llamafactory=/venv/bin/python] [--rounds 6]
                                [--rows-a-step 32] [--gbit 1.0]

Every engine trains one epoch over the same rows, and is measured from outside in the same way: the time between the
ends of the first and last optimizer steps, peak resident memory of the ranks, and bytes that left a rank's network
interface (in its own network namespace, so nothing else is counted). The held-out loss of every engine's final adapter
is computed by plain transformers + PEFT, in one process. With rounds, engines take turns: each is compared with the
first within its round, and the smallest, median and largest of these ratios are printed (of six rounds, smallest to
largest is a 97 % interval of the median). Rows are lines of real text: --text FILE, such as WikiText's validation file,
else Python's own help pages. The model is random and of these sizes, or a pretrained one: --model FOLDER.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import pydoc_data.topics
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import peers
from race import Measured, race

from windlass.files import read_json_lines

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
FILLED = 0.95  # of the last packed sequences
LENGTH, R, ALPHA, RATE, SEED = 1024, 16, 32, 1e-3, 42


@dataclass(frozen=True)
class Engine:
    kind: str  # who trains: trl, windlass, or a peer
    what: str
    ranks: int = 2
    settings: Mapping[str, Any] = field(default_factory=dict)  # where they differ from the recipe's


ALIKE = "{as many tokens}"  # sequences that hold, packed, as many tokens as a rank's rows of one optimizer step
WHOLE = "{a rank's rows}"  # of one optimizer step
PACKED = {"data.packing": True, "train.gradient_accumulation_steps": ALIKE}
LARGER = {"train.per_device_train_batch_size": WHOLE, "train.gradient_accumulation_steps": 1}
PLANNED = {**PACKED, "layout.name": "auto", "train.per_device_train_batch_size": "auto"}
RESIDENT = {"layout.name": "resident"}
ENGINES = {
    "recipe": Engine("trl", "TRL + PEFT, full shard, batch 1 x 16, a row a sequence", settings={"shard": True}),
    "TRL, one process": Engine("trl", "the same on one rank with all cores, batch 1 x 32", ranks=1),
    "TRL, DDP": Engine("trl", "the recipe with the base whole on each rank"),
    "TRL, DDP, batch of 4": Engine("trl", "4 padded rows at once", settings={"batch": 4}),
    "TRL, DDP, packed": Engine("trl", "rows laid end to end to 1024, which see each other", settings={"packs": True}),
    "TRL, DDP, seed 43": Engine("trl", "another adapter drawn, another order", settings={"seed": 43}),
    "TRL, DDP, seed 44": Engine("trl", "and another: what chance does to the held-out loss", settings={"seed": 44}),
    "llamafactory": Engine("llamafactory", "its DDP, the same batch and rows"),
    "llamafactory, batch of 4": Engine("llamafactory", "4 padded rows at once", settings={"batch": 4}),
    "llamafactory, packed": Engine("llamafactory", "as TRL's, packed", settings={"packs": True}),
    "swift": Engine("swift", "its DDP, the same batch and rows"),
    "swift, batch of 4": Engine("swift", "4 padded rows at once", settings={"batch": 4}),
    # With more ranks it asks for a GPU of the rank's number.
    "axolotl, one process": Engine("axolotl", "one rank with all cores, batch 1 x 32, the same rows", ranks=1),
    "windlass, one process": Engine("windlass", "as TRL, one process", ranks=1, settings=RESIDENT),
    "windlass, same settings": Engine("windlass", "full shard, batch 1 x 16: no lever"),
    "windlass, packed": Engine("windlass", "full shard, rows packed to 1024", settings=PACKED),
    "windlass, gathered once": Engine("windlass", "kept through accumulation", settings={"layout.name": "no-reshard"}),
    "windlass, larger batch": Engine("windlass", "full shard, a rank's rows of like length at once", settings=LARGER),
    "windlass, resident": Engine("windlass", "base whole on each rank", settings=RESIDENT),
    "windlass": Engine("windlass", "as its plan recommends: layout auto, batch auto, packed", settings=PLANNED),
}


@dataclass
class Sizes:
    hidden: int = 512
    layers: int = 4
    experts: int = 32  # 0: a dense Llama
    rows: int = 256
    held_out: int = 64


@dataclass
class Setting:
    folder: Path
    adapt_experts: bool = False
    targets: Sequence[str] = TARGETS
    rows_a_step: int = 32  # two ranks x batch 1 x 16 accumulated, as the recipe has it on two GPUs
    tokens_a_row: float = 1
    peers: Mapping[str, str] = field(default_factory=dict)
    gbit: float | None = None

    def of(self, name: str) -> Path:
        """Return the folder of an engine."""
        return self.folder / re.sub(r"\W+", "-", name)

    def accumulated(self, engine: Engine) -> int:
        """Return how often a peer's rank computes a batch in an optimizer step."""
        rows = self.rows_a_step // engine.ranks
        if engine.settings.get("packs"):
            return self.packed(engine)
        return rows // int(engine.settings.get("batch", 1))

    def packed(self, engine: Engine) -> int:
        return max(1, round(self.rows_a_step / engine.ranks * self.tokens_a_row / LENGTH))


def make(folder: Path, sizes: Sizes, text: Path | None, model: Path | None = None) -> int:
    """Write the model, rows and held-out rows, equal for all; returns the tokens of all rows."""
    from transformers import AutoTokenizer

    if model:  # stored in float32, in which all engines compute: some compute in what they find
        load_model(folder, model).save_pretrained(folder / "model")
        AutoTokenizer.from_pretrained(model).save_pretrained(folder / "model")
    else:
        make_model(folder, sizes)
    lines = text.read_text().splitlines() if text else "\n\n".join(pydoc_data.topics.topics.values()).split("\n\n")
    lines = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if len(lines) < sizes.rows + sizes.held_out:
        raise SystemExit(f"the text has {len(lines)} rows; give --rows {len(lines) - sizes.held_out}")
    random.Random(SEED).shuffle(lines)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    counts = [min(len(ids) + 1, LENGTH) for ids in tokenizer(lines)["input_ids"]]
    first, tokens = choose_rows(counts, sizes)
    lines = lines[first:] + lines[:first]
    splits = {"train": lines[: sizes.rows], "validation": lines[sizes.rows : sizes.rows + sizes.held_out]}
    (folder / "data").mkdir()
    for split, rows in splits.items():
        (folder / "data" / f"{split}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return tokens


def choose_rows(counts: Sequence[int], sizes: Sizes) -> tuple[int, int]:
    """Return where to begin and the tokens of the rows from there: packed, they nearly fill a whole number of sequences
    on both ranks. Of so few rows, a last step of half as many tokens would count as one."""
    edges = list(itertools.accumulate(counts, initial=0))
    totals = [
        edges[first + sizes.rows] - edges[first] for first in range(len(counts) - sizes.rows - sizes.held_out + 1)
    ]
    distances = [abs(total / (2 * LENGTH) % 1 - FILLED) for total in totals]
    first = distances.index(min(distances))
    return first, totals[first]


def make_model(folder: Path, sizes: Sizes) -> None:
    from windlass import tiny

    experts: dict[str, Any] = {"experts": sizes.experts, "top_k": 4, "moe_intermediate": sizes.hidden // 2}
    tiny.write_model(
        folder / "model",
        "qwen3_moe" if sizes.experts else "llama",
        quantization="none",
        wrapper=False,
        dtype="float32",
        hidden=sizes.hidden,
        layers=sizes.layers,
        heads=8,
        intermediate=sizes.hidden if sizes.experts else sizes.hidden * 8 // 3,
        vocab=4096,
        config={"initializer_range": 0.05},
        **(experts if sizes.experts else {}),
    )


def command(name: str, setting: Setting) -> list[str]:
    """Return the command of every rank of an engine."""
    engine, out = ENGINES[name], setting.of(name)
    shutil.rmtree(out, ignore_errors=True)  # of the round before
    out.mkdir()
    if engine.kind == "windlass":
        return [sys.executable, "-m", "windlass", "train", str(run_file(engine, setting, out))]
    if engine.kind == "trl":
        (out / "setting.json").write_text(json.dumps(asdict(setting), default=str))
        return [sys.executable, __file__, "--rank-of", name, "--folder", str(setting.folder)]
    batch, packs = engine.settings.get("batch", 1), engine.settings.get("packs", False)
    asked = peers.Asked(setting.targets, LENGTH, R, ALPHA, RATE, SEED, batch, setting.accumulated(engine), packs)
    return peers.command(engine.kind, setting.peers[engine.kind], setting.folder, out, asked)


def run_file(engine: Engine, setting: Setting, out: Path) -> Path:
    """Write the recipe as windlass's run file, with this engine's settings."""
    rows = setting.rows_a_step // engine.ranks
    document: dict[str, Any] = {
        "model": {"model_name_or_path": str(setting.folder / "model"), "torch_dtype": "float32"},
        "lora": {"r": R, "lora_alpha": ALPHA, "lora_dropout": 0.0, "target_modules": list(setting.targets)},
        "data": {"dataset_name_or_path": str(setting.folder / "data"), "dataset_config_name": None},
        "train": {"output_dir": str(out), "num_train_epochs": 1, "per_device_train_batch_size": 1, "seed": SEED},
        "layout": {"name": "full-shard"},
        "cluster": {"nodes": 1, "gpus_per_node": engine.ranks, "gpu": "cpu"},
    }
    document["lora"] |= {"experts": True} if setting.adapt_experts else {}
    document["data"] |= {"text_field": "text", "max_length": LENGTH, "packing": False}
    document["train"] |= {"gradient_accumulation_steps": rows, "bf16": False, "weight_decay": 0.0}
    document["train"] |= {"learning_rate": RATE, "lr_scheduler_type": "constant", "logging_steps": 1}
    document["train"] |= {"eval_strategy": "no", "save_strategy": "no", "output_dir": str(out / "run")}
    for key, value in engine.settings.items():
        section, name = key.split(".")
        document[section][name] = {ALIKE: setting.packed(engine), WHOLE: rows}.get(value, value)
    if setting.gbit:
        document["cluster"]["link"] = {"name": "throttled", "gb_per_second": setting.gbit / 8}
    path = out / "run.yaml"
    path.write_text(json.dumps(document, indent=2))
    return path


def wrapped(model: Any) -> Any:
    """Shard layer by layer, including the adapter. (On a CPU Accelerate itself silently runs DDP instead.)"""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from transformers.distributed import DistributedConfig

    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    base_model = model.get_base_model()
    base_model._is_distributed_loading_by_transformers = base_model._is_fsdp_managed_module = True
    base_model.config.distributed_config = DistributedConfig(fsdp_size=2)
    return model


def rank_of(name: str, folder: Path) -> None:
    """Run one rank of TRL + PEFT: the recipe with only the repairs it needs to run (renamed keys, real sharding)."""
    import torch
    from datasets import load_dataset
    from peft import get_peft_model
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    engine, out = ENGINES[name], Setting(folder).of(name)
    setting = Setting(**{**json.loads((out / "setting.json").read_text()), "folder": folder})
    if engine.ranks > 1:
        torch.distributed.init_process_group("gloo")
    seed = engine.settings.get("seed", SEED)
    torch.manual_seed(seed)
    model = get_peft_model(load_model(folder), lora_config(setting.adapt_experts, setting.targets))
    settings = trl_settings(out, setting.accumulated(engine), seed)
    settings["per_device_train_batch_size"] = engine.settings.get("batch", 1)
    if engine.settings.get("packs"):
        settings |= {"packing": True, "packing_strategy": "wrapped"}
    trainer = SFTTrainer(
        model=wrapped(model) if engine.settings.get("shard") else model,
        args=SFTConfig(**settings),
        train_dataset=load_dataset("json", data_files=str(folder / "data" / "train.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )
    train(trainer)
    keep(trainer.accelerator.unwrap_model(trainer.model), out / "final")


def load_model(folder: Path, model: Path | None = None) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model or folder / "model", dtype=torch.float32).requires_grad_(False)


def lora_config(adapt_experts: bool, targets: Sequence[str] = TARGETS) -> Any:
    from peft import LoraConfig

    experts = EXPERTS if adapt_experts else None
    return LoraConfig(
        r=R, lora_alpha=ALPHA, target_modules=list(targets), target_parameters=experts, task_type="CAUSAL_LM"
    )


def trl_settings(out: Path, accumulation: int, seed: int = SEED) -> dict[str, Any]:
    """Return the recipe as a configuration of TRL's trainers."""
    return {
        "output_dir": str(out / "trainer"),
        "num_train_epochs": 1,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": accumulation,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_length": LENGTH,
        "seed": seed,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "log_level": "error",
    }


def train(trainer: Any) -> None:
    """Train by TRL, with a line at the end of each step."""
    from transformers.trainer_callback import PrinterCallback, TrainerCallback

    class Speak(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            print(STEP, flush=True)

    trainer.add_callback(Speak())
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def keep(model: Any, folder: Path) -> None:
    """Save the adapter in PEFT's format, its shards gathered."""
    from safetensors.torch import save_file
    from torch.distributed.tensor import DTensor

    trained = {key.replace(".default", ""): p.detach() for key, p in model.named_parameters() if p.requires_grad}
    whole = {key: p.full_tensor() if isinstance(p, DTensor) else p for key, p in trained.items()}
    if int(os.environ["RANK"]) == 0:
        folder.mkdir()
        save_file({key: value.contiguous() for key, value in whole.items()}, folder / "adapter_model.safetensors")
        model.peft_config["default"].save_pretrained(folder)


STEP = "'loss'"  # what ends a step in the logs of all but windlass, whose steps are lines of a file


def steps_done(name: str, setting: Setting) -> int:
    if ENGINES[name].kind == "windlass":
        path = setting.of(name) / "run" / "steps-rank0.jsonl"
        return sum(1 for _ in read_json_lines(path)) if path.exists() else 0
    return (setting.of(name) / "rank0.log").read_text(errors="replace").count(STEP)


def held_out(setting: Setting, names: list[str]) -> dict[str, float]:
    """Return the mean loss per token on the held-out rows, of the base and every adapter, by plain transformers +
    PEFT."""
    import torch
    from peft import PeftModel
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(setting.folder / "model")
    rows = (setting.folder / "data" / "validation.jsonl").read_text().splitlines()
    texts = [tokenizer(json.loads(row)["text"], return_tensors="pt").input_ids[:, :LENGTH] for row in rows]

    @torch.no_grad()
    def loss(model: Any) -> float:
        counts = [text.shape[1] - 1 for text in texts]
        losses = [model(input_ids=text, labels=text).loss.item() for text in texts]
        return float(sum(a * b for a, b in zip(losses, counts, strict=True)) / sum(counts))

    found = {"bare base": loss(load_model(setting.folder).eval())}
    for name in names:
        adapter = next(setting.of(name).rglob("final/**/adapter_model.safetensors"))
        found[name] = loss(PeftModel.from_pretrained(load_model(setting.folder), adapter.parent).eval())
    return found


def main() -> None:
    given = arguments()
    if given.rank_of:
        rank_of(given.rank_of, given.folder)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that networks are taken down
    installed = dict(pair.split("=", 1) for pair in given.peer)
    sizes = Sizes(**{name: getattr(given, name) for name in vars(Sizes())})
    names = given.only or [name for name, engine in ENGINES.items() if engine.kind in {"trl", "windlass", *installed}]
    with tempfile.TemporaryDirectory() as made:
        tokens = make(Path(made), sizes, given.text, given.model)
        a_row = tokens / sizes.rows
        experts, targets, rows = given.adapt_experts, given.targets, given.rows_a_step
        setting = Setting(Path(made), experts, targets, rows, a_row, installed, given.gbit)
        print_setting(setting, sizes, tokens, given)
        found: dict[str, list[Measured]] = {name: [] for name in names}
        for turn, name in itertools.product(range(given.rounds), names):
            words = command(name, setting)

            def done(name: str = name) -> int:
                return steps_done(name, setting)

            ranks = ENGINES[name].ranks
            one = race(words, setting.of(name), done, ranks=ranks, gbit=given.gbit, environ=peers.ENVIRON)
            found[name].append(one)
            state = f"{one.step_seconds:.2f} s a step" if one.ok else f"failed:\n{one.why}"
            print(f"  {turn + 1}/{given.rounds} {name}: {state}", file=sys.stderr, flush=True)
        print_table(found, tokens, held_out(setting, [name for name in names if found[name][-1].ok]))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in vars(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=1, help="how often each engine runs")
    parser.add_argument("--model", type=Path, help="a model's folder, in place of a random one")
    parser.add_argument("--text", type=Path, help="real text, a row a line")
    parser.add_argument("--adapt-experts", action="store_true", help="adapters on the routed experts too")
    parser.add_argument("--targets", nargs="+", default=TARGETS, help="names of layers with adapters")
    parser.add_argument("--rows-a-step", type=int, default=Setting.rows_a_step, help="of all ranks, by one row a batch")
    parser.add_argument("--gbit", type=float, help="throttle the link between the two ranks")
    parser.add_argument("--only", nargs="+", choices=ENGINES, help="others are compared with the first of them")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=PYTHON", help=f"{'=…, '.join(peers.SETTINGS)}=…"
    )
    parser.add_argument("--rank-of", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def print_setting(setting: Setting, sizes: Sizes, tokens: int, given: argparse.Namespace) -> None:
    import torch
    import transformers
    import trl

    model = load_model(setting.folder)
    what = f"{sizes.layers} layers of {sizes.experts} experts, random"
    if given.model:
        what = f"{given.model.name}: {type(model).__name__}"
    where = ", ".join(setting.targets) + (" and routed experts" if setting.adapt_experts else "")
    print(f"{time.strftime('%Y-%m-%d')}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, trl {trl.__version__}")
    print(f"{model.num_parameters() / 1e6:,.0f} M parameters in float32, {what}, r={R} on {where}")
    link = f"{given.gbit} Gbit/s" if given.gbit else "unthrottled"
    print(f"{sizes.rows} rows of {tokens / sizes.rows:.0f} tokens; link {link}\n")


def print_table(found: Mapping[str, Sequence[Measured]], tokens: int, losses: Mapping[str, float]) -> None:
    heads = ("", "tokens/s", "x", "s a step", "steps", "GiB a rank", "MB sent", "first step", "held out")
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    print("| bare base |" + " |" * 7 + f" {losses['bare base']:.4f} |")
    first = next(iter(found.values()))
    for name, runs in found.items():
        if not all(m.ok for m in runs):
            print(f"| {name} |" + " |" * 7 + " did not run |")
            continue
        # LLaMA-Factory leaves out what doesn't fill a sequence.
        drops = ENGINES[name].kind == "llamafactory" and ENGINES[name].settings.get("packs")
        trained = tokens // LENGTH * LENGTH if drops else tokens
        rates = [trained / m.steps / m.step_seconds for m in runs]
        # Within a round: what slows the machine down for a while slows both.
        ratios = [
            rate * one.steps * one.step_seconds / tokens for rate, one in zip(rates, first, strict=True) if one.ok
        ]
        times = f"{median(ratios):.2f}" if ratios else ""
        if len(ratios) > 1:
            times += f" ({min(ratios):.2f} to {max(ratios):.2f})"
        seconds, last = median(m.step_seconds for m in runs), runs[-1]
        sent = "" if last.sent_mb is None else f"{last.sent_mb:,.1f}"
        output = (f"{median(rates):,.0f}", times, f"{seconds:.2f}", f"{last.steps}")
        start = median(m.first_step_seconds for m in runs)
        more = (f"{max(m.peak_gib for m in runs):.2f}", sent, f"{start:.0f} s", f"{losses[name]:.4f}")
        print(f"| {name} | " + " | ".join(output + more) + " |")
    for name in found:
        print(f"\n{name}: {ENGINES[name].what}", end="")
    print()


if __name__ == "__main__":
    main()
