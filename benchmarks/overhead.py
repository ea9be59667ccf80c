"""The overhead of windlass's training loop: step time against plain TRL, and Python per micro-batch.

    python benchmarks/overhead.py [--pairs 12] [--hidden 512 --layers 8 …]

Step time: TRL's SFTTrainer and windlass's loop train the same model, rows and seed in turn, pair by pair in one
process, on one thread and in processor time, which other work on the machine affects least. The ratio is the median of
the pairs' ratios, with the order statistics that cover the true median with 95 % probability. Python: the cost of one
more micro-batch besides its forward and backward, on a model of 3,600 modules.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

RUN = """\
model: {{model_name_or_path: {folder}/model, torch_dtype: float32}}
lora: {{r: 16, lora_alpha: 32, lora_dropout: 0, target_modules: all-linear}}
data: {{dataset_name_or_path: {folder}/rows.jsonl, dataset_config_name: null, val_split: null, max_length: {length}}}
train: {{output_dir: {out}, max_steps: {steps}, per_device_train_batch_size: {micro}, bf16: false,
        gradient_accumulation_steps: {accumulation}, gradient_checkpointing: false, logging_steps: 1000,
        save_strategy: "no", eval_strategy: "no", report_to: none}}
layout: resident
cluster: {{nodes: 1, gpus_per_node: 1, gpu: cpu}}
"""
SIZES = {"hidden": 512, "layers": 8, "experts": 16, "length": 128, "micro": 2, "accumulation": 2, "steps": 10}
MODULES = 3600  # as many as Mistral Small 4 with an adapter has
WORDS = "anchor bark cable deck eddy fathom galley hull inlet jib keel lee mast north oar pier quay reef sail tide"


def write_model(folder: Path, hidden: int, layers: int, experts: int) -> None:
    from windlass import tiny

    tiny.write_model(
        folder / "model",
        quantization="none",
        wrapper=False,
        dtype="float32",
        hidden=hidden,
        layers=layers,
        heads=8,
        experts=experts,
        intermediate=2 * hidden,
        moe_intermediate=hidden,
        vocab=4096,
    )


class Bench:
    """One model and its rows, trained again and again by either engine."""

    def __init__(self, folder: Path, sizes: argparse.Namespace, steps: int, accumulation: int) -> None:
        from windlass import plan as planning
        from windlass import runfile
        from windlass.data.prepare import prepare_data
        from windlass.train.load import load_base
        from windlass.train.lora import attach_adapter
        from windlass.train.run import open_base_tokenizer

        self.folder, self.turn = folder, 0
        chance = random.Random(0)
        count = 2 * sizes.micro * accumulation * (steps + 1)
        texts = (" ".join(chance.choices(WORDS.split(), k=2 * sizes.length)) for _ in range(count))
        (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        shape = {"length": sizes.length, "micro": sizes.micro, "steps": steps, "accumulation": accumulation}
        (folder / "run.yaml").write_text(RUN.format(folder=folder, out=folder / "out", **shape))
        self.plan = planning.make_plan(runfile.read_run_file(folder / "run.yaml"))
        job = self.plan.run
        import torch

        self.tokenizer = open_base_tokenizer(self.plan)
        self.data = prepare_data(job, self.tokenizer)
        model, _ = load_base(self.plan.base, self.plan.layout, dtype=torch.float32)
        self.model = attach_adapter(model, job.lora, self.plan.adapter, job.train.seed)
        self.forward = self.model.get_base_model().forward

    def engine(self, kind: str) -> tuple[Callable[[], None], Any, str]:
        """Return the trainer, and the object and name of its method for the micro-batches of one optimizer step."""
        for module in self.model.modules():  # windlass's fused layers: each engine puts its own in their place
            for name in ("forward", "expand_kv"):
                module.__dict__.pop(name, None)
        return self._trl() if kind == "TRL" else self._windlass()

    def _windlass(self) -> tuple[Callable[[], None], Any, str]:
        from rich.console import Console

        from windlass.observe.background import BackgroundReport
        from windlass.ranks.rank import Rank, StopSignal
        from windlass.train.run import Session, make_loop

        self.turn += 1
        session = Session(Rank(), Console(quiet=True), StopSignal(), BackgroundReport(self.folder))
        self.plan.run.train.__dict__["output_dir"] = str(self.folder / f"out-{self.turn}")
        loop = make_loop(self.plan, session, self.model, self.data, self.tokenizer, facts={}, debug_freq=0)
        loop.watch.report = lambda: None

        def train() -> None:
            with loop.watch:
                loop.run()

        return train, loop, "train_step"

    def _trl(self) -> tuple[Callable[[], None], Any, str]:
        from transformers.trainer_callback import PrinterCallback
        from trl import SFTConfig, SFTTrainer

        train = self.plan.run.train
        arguments = SFTConfig(
            output_dir=train.output_dir,
            max_steps=train.max_steps,
            per_device_train_batch_size=self.plan.batch.micro,
            gradient_accumulation_steps=self.plan.batch.accumulation,
            learning_rate=train.learning_rate,
            bf16=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_steps=1000,
            disable_tqdm=True,
            max_length=None,
            activation_checkpointing=False,
            dataset_kwargs={"skip_prepare_dataset": True},
            log_level="error",
        )
        trainer = SFTTrainer(
            model=self.model, args=arguments, train_dataset=self.data.train, processing_class=self.tokenizer
        )
        trainer.remove_callback(PrinterCallback)
        return trainer.train, trainer, "get_batch_samples"

    def step_seconds(self, kind: str) -> list[float]:
        """Return the processor seconds of each optimizer step, from one step's start to the next one's."""
        train, owner, name = self.engine(kind)
        original, starts = getattr(owner, name), list[float]()

        def timed(*arguments: Any, **named: Any) -> Any:
            starts.append(time.process_time())
            return original(*arguments, **named)

        setattr(owner, name, timed)
        train()
        return [later - earlier for earlier, later in itertools.pairwise(starts)]


def pairs(bench: Bench, count: int) -> list[tuple[float, float]]:
    """Return median step seconds of TRL and windlass, pair by pair, in alternating order."""
    found = []
    for turn in range(count + 1):
        kinds = ["TRL", "windlass"] if turn % 2 else ["windlass", "TRL"]
        seconds = {kind: statistics.median(bench.step_seconds(kind)[3:]) for kind in kinds}  # after liveness's proof
        if turn:  # the first pair warms up
            found.append((seconds["TRL"], seconds["windlass"]))
            print(f"pair {turn:2}: {seconds['TRL'] * 1e3:8.1f} ms  {seconds['windlass'] * 1e3:8.1f} ms", flush=True)
    return found


def python_seconds(bench: Bench, kind: str) -> float:
    """Return the processor seconds per step outside of forward and backward."""
    import torch

    train, _, _ = bench.engine(kind)
    causal_lm, spent = bench.model.get_base_model(), [0.0]
    forward, backward = causal_lm.forward, torch.Tensor.backward

    @contextmanager
    def counted() -> Iterator[None]:
        began = time.process_time()
        yield
        spent[0] += time.process_time() - began

    def timed_forward(*arguments: Any, **named: Any) -> Any:
        with counted():
            return forward(*arguments, **named)

    def timed_backward(*arguments: Any, **named: Any) -> Any:
        with counted():
            return backward(*arguments, **named)  # type: ignore[no-untyped-call]

    causal_lm.forward = timed_forward
    torch.Tensor.backward = timed_backward  # type: ignore[method-assign]
    try:
        began = time.process_time()
        train()
        total = time.process_time() - began
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]
    return (total - spent[0]) / bench.plan.run.train.max_steps


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return the order statistics that contain the median with at least this probability (binomial,
    distribution-free)."""
    ordered, n = sorted(values), len(values)
    k = 0
    while sum(math.comb(n, i) for i in range(k + 2)) / 2**n * 2 <= 1 - confidence:
        k += 1
    return ordered[k], ordered[n - 1 - k]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--pairs", type=int, default=12)
    sizes = parser.parse_args()
    import torch
    from torch import nn

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # of the libraries' own deprecations
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl"))
    load = os.getloadavg()[0]
    print(f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} cores, load {load:.0f}; {versions}")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made, "large")
        folder.mkdir()
        write_model(folder, sizes.hidden, sizes.layers, sizes.experts)
        found = pairs(Bench(folder, sizes, sizes.steps, sizes.accumulation), sizes.pairs)
        ratios = [ours / theirs for theirs, ours in found]
        low, high = interval(ratios)
        print(
            f"step time: windlass / plain TRL = {statistics.median(ratios):.4f} "
            f"(median of {len(ratios)} interleaved pairs, 95 % interval {low:.4f} to {high:.4f})"
        )

        for accumulation in (1, 17):
            folder = Path(made, f"{accumulation}")
            folder.mkdir()
            write_model(folder, 64, 2, 4)
        benches = [Bench(Path(made, f"{accumulation}"), sizes, 6, accumulation) for accumulation in (1, 17)]
        for bench in benches:
            causal_lm = bench.model.get_base_model()
            lacking = MODULES - sum(1 for _ in bench.model.modules())
            causal_lm.more = nn.ModuleList(nn.Identity() for _ in range(lacking))
        for kind in ("TRL", "windlass"):
            rounds = [[python_seconds(each, kind) for each in benches] for _ in range(5)]
            taken = statistics.median((many - one) / 16 for one, many in rounds)
            print(f"Python per micro-batch, {MODULES:,} modules: {kind:8} {taken * 1e3:6.2f} ms")


if __name__ == "__main__":
    main()
