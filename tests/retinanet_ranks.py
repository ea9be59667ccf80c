"""What tests/test_retinanet.py runs in two ranks under torchrun: several cases in one start, outcomes as JSON."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from windlass import run_folder
from windlass.files import read_json_lines
from windlass.meter import StepProfiler

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "retinanet"))

import detector
import images
import openimages
import retinanet_train_factory as factory
from evaluate import evaluate
from ranks import Place, meet
from torchmetrics.detection import MeanAveragePrecision
from training import Steps, Training

SIZE, CLASSES = 64, 3


def precise() -> nn.Module:
    """In float64: in float32 a ReLU's input within rounding of 0 may be either, and its gradient with it."""
    model, _ = detector.build(CLASSES, SIZE, None)
    model.register_forward_pre_hook(lambda _module, given: ([picture.double() for picture in given[0]], given[1]))
    return model.double()  # type: ignore[no-any-return]


def whole_gradient(data: images.Images, indices: list[int]) -> tuple[dict[str, Tensor], float]:
    """Of all images in one batch, in one process, without DDP and without the loop."""
    torch.manual_seed(0)
    model = precise()
    pictures, targets = images.to_device(images.collate([data[0, index] for index in indices]), torch.device("cpu"))
    loss = sum(model(pictures, targets).values())
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return grads, loss.item()


class Counted:
    """DDP's own all-reduce, and how often it was asked for."""

    def __init__(self) -> None:
        self.buckets = 0

    def __call__(self, group: dist.ProcessGroup | None, bucket: Any) -> Any:
        self.buckets += 1
        return allreduce_hook(group, bucket)  # type: ignore[arg-type]


def gradients(here: Place, data: images.Images, folder: Path) -> dict[str, Any]:
    """One and two ranks, one and two micro-batches: the same images, the same gradient, sent around once."""
    empty = [index for index in range(len(data)) if not len(data.target(index, flip=False)["boxes"])]
    full = [index for index in range(len(data)) if index not in empty]
    cases = {
        "mixed": [full[0], empty[0], full[1], full[2]],
        "no boxes on rank 1": [full[0], empty[0], full[1], empty[1]],
    }
    torch.manual_seed(here.rank)  # ranks that drew different weights have the first one's
    if here.rank == 0:
        torch.manual_seed(0)
    model = precise()
    said = argparse.Namespace(batch_size=2, accum_steps=1, weights_path=None)
    training, counted = Training(said, here, model, Steps(1, 1, 1)), Counted()
    training.ranks.register_comm_hook(None, lambda group, bucket: counted(group, bucket))
    outcome: dict[str, Any] = {}
    for name, indices in cases.items():
        own = [data[0, index] for index in indices[here.rank :: here.ranks]]
        whole, loss = whole_gradient(data, indices) if here.rank == 0 else ({}, 0.0)
        for size in (2, 1):  # the rank's two images in one micro-batch, or in two
            batches: Iterator[images.Batch] = iter(
                [images.collate(own[start : start + size]) for start in range(0, 2, size)]
            )
            before, count = counted.buckets, 2 // size
            with StepProfiler(folder / f"{name}-{size}", "images", 0, report=False) as meter:
                mean = training.gradients(batches, count, meter)
            dist.all_reduce(mean)
            found = {key: parameter.grad for key, parameter in model.named_parameters()}
            outcome[f"{name}, {count} micro-batches"] = {
                "buckets": counted.buckets - before,
                "without_gradient": [key for key, value in found.items() if value is None],
                "worst": max(((difference(value, found[key]), key) for key, value in whole.items()), default=(0.0, "")),
                "loss": [loss, mean.item() / here.ranks],
            }
            training.optimizer.zero_grad()
            nn.Module.zero_grad(model)
    return outcome


def difference(one: Tensor, other: Tensor | None) -> float:
    """As a share of the whole."""
    assert other is not None
    return float((one - other).norm() / one.norm().clamp(min=1e-8))


def few_images(here: Place, data: images.Images) -> dict[str, Any]:
    """One image to judge between two ranks: one of them has none, and none of them waits."""
    torch.manual_seed(0)
    model, _ = detector.build(CLASSES, SIZE, None)
    share = [(0, index) for index in range(here.rank, 1, here.ranks)]
    computed: list[float] = []
    compute = MeanAveragePrecision.compute

    def slowly(metric: MeanAveragePrecision) -> Any:
        time.sleep(1)
        values = compute(metric)
        computed.append(time.monotonic())
        return values

    MeanAveragePrecision.compute = slowly
    found = evaluate(model, images.loader(data, share, 2, 0, pin=False), here.device, here.waiting)
    left = time.monotonic()
    MeanAveragePrecision.compute = compute
    return {"found": found, "images": len(share), "computed": computed, "left": left}


def stopped(here: Place, folder: Path) -> dict[str, Any]:
    """SIGTERM reaches one rank alone: both stop after the same step."""
    given = f"--image-size 32 --batch-size 2 --epochs 50 --num-workers 0 --max-val 0 --debug-freq 2 --seed {SIZE}"
    out = folder / "stopped"
    said = factory.options([*given.split(), "--local-image-dir", str(folder / "images"), "--output-dir", str(out)])

    def watch() -> None:
        path = out / run_folder.STEPS.format(rank=1)
        while not path.exists() or not any(read_json_lines(path)):
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)

    if here.rank == 1:
        threading.Thread(target=watch, daemon=True).start()
    code = factory.train(said, here)
    dist.barrier()
    made = [sum(1 for _ in read_json_lines(out / run_folder.STEPS.format(rank=rank))) for rank in range(here.ranks)]
    return {"code": code, "steps": made, "saved": torch.load(out / "checkpoint.pt", weights_only=True)["steps"]}


def train_two_epochs(here: Place, folder: Path, given: list[str]) -> dict[str, Any]:
    said = factory.options(
        [*given, "--local-image-dir", str(folder / "images"), "--output-dir", str(folder / "trained")]
    )
    return {"code": factory.train(said, here)}


def main(folder: Path, given: list[str]) -> None:
    here = meet("cpu")
    train = openimages.check(openimages.source(folder / "images", folder, "train", None))
    data = images.Images(train, folder / "images", SIZE, decode=True, seed=None)
    outcomes: dict[str, Any] = {"gradients": gradients(here, data, folder)}
    outcomes["few"] = few_images(here, data)
    outcomes["stopped"] = stopped(here, folder)
    outcomes["trained"] = train_two_epochs(here, folder, given)
    (folder / f"outcome-{here.rank}.json").write_text(json.dumps(outcomes))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
