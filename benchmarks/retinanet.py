"""Images per second of the RetinaNet example against torchvision's own way of training it, on the same data.

    make && PYTHONPATH=.venv/vision .venv/bin/python benchmarks/retinanet.py [--image-size 128] [--rounds 5] [--json]

One process, one run, both taking turns: the machine's other work meets both. Same images, same weights (frozen batch
norms, three of the backbone's stages learning), same number of loading processes. torchvision's reference loop is not
in its wheel; what stands here has its structure: float images from the loader, resizing in the model, a loss that the
host waits for in every step, SGD. Also said: whether loading images keeps either of them waiting.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "retinanet"))

import detector
import images
import openimages
import synthetic
import torch
from PIL import Image
from ranks import Place, meet
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.ops import FrozenBatchNorm2d
from torchvision.ops.feature_pyramid_network import LastLevelP6P7
from torchvision.transforms.functional import hflip, to_tensor
from training import Steps, Training

from windlass import run_folder
from windlass.files import read_json_lines
from windlass.meter import StepProfiler

CLASSES = len(synthetic.SHAPES)
WAITING = 0.1  # more than this share of the time: loading is a bottleneck


class Pictures(Dataset[tuple[Tensor, dict[str, Tensor]]]):
    """The same images as torchvision's loop takes them: floats in their own size."""

    def __init__(self, part: openimages.Part, folder: Path) -> None:
        self.part, self.folder = part, folder

    def __len__(self) -> int:
        return len(self.part.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        with Image.open(self.folder / self.part.paths[index]) as opened:
            picture = to_tensor(opened.convert("RGB"))
        start, end = self.part.starts[index : index + 2].tolist()
        width = picture.shape[-1]
        boxes = self.part.boxes[start:end] * torch.tensor([*self.part.sizes[index].tolist()] * 2)
        if torch.rand(1) < 0.5:
            picture = hflip(picture)
            boxes = torch.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], dim=1)
        return picture, {"boxes": boxes, "labels": self.part.labels[start:end]}


def collate(samples: list[tuple[Tensor, dict[str, Tensor]]]) -> tuple[Any, ...]:
    return tuple(zip(*samples, strict=True))


class Reference:
    """torchvision's training, some steps at a time."""

    def __init__(self, part: openimages.Part, folder: Path, said: argparse.Namespace, state: dict[str, Tensor]) -> None:
        self.said, self.device = said, torch.device("cuda" if torch.cuda.is_available() else "cpu")
        backbone = resnet_fpn_backbone(
            backbone_name="resnet50",
            weights=None,
            norm_layer=FrozenBatchNorm2d,
            trainable_layers=3,
            returned_layers=[2, 3, 4],
            extra_blocks=LastLevelP6P7(256, 256),
        )
        self.model = RetinaNet(backbone, CLASSES, said.image_size, round(said.image_size * detector.LONGEST))
        self.model.load_state_dict(state)
        self.model.to(self.device).train()
        learning = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(learning, lr=1e-4, momentum=0.9, weight_decay=1e-4)
        data = Pictures(part, folder)
        everything = RandomSampler(data, num_samples=said.steps * said.rounds * said.batch_size * 2)
        pin, workers = self.device.type == "cuda", said.num_workers
        loader = DataLoader(
            data, said.batch_size, sampler=everything, num_workers=workers, collate_fn=collate, pin_memory=pin
        )
        self.batches = iter(loader)

    def train(self, count: int) -> tuple[float, float]:
        """Seconds of the steps, and of the wait for images."""
        begun, waited = time.perf_counter(), 0.0
        for _ in range(count):
            start = time.perf_counter()
            batch = next(self.batches)
            waited += time.perf_counter() - start
            pictures = [picture.to(self.device) for picture in batch[0]]
            targets = [{name: value.to(self.device) for name, value in target.items()} for target in batch[1]]
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                loss = sum(self.model(pictures, targets).values())
            if not math.isfinite(loss.item()):
                raise SystemExit("the reference's loss is no number")
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun, waited


class Example:
    """The example's own loop, some steps at a time."""

    def __init__(
        self, part: openimages.Part, folder: Path, said: argparse.Namespace, here: Place, weights: Path
    ) -> None:
        model, _ = detector.build(CLASSES, said.image_size, weights)
        self.training = Training(said, here, model.to(here.device), Steps(said.steps, 1, said.rounds + 1))
        data = images.Images(part, folder, said.image_size, decode=True, seed=0)
        order = torch.randint(len(data), [said.steps * (said.rounds + 1) * said.batch_size * 2]).tolist()
        pin = here.device.type == "cuda"
        self.loader = images.loader(data, [(0, i) for i in order], said.batch_size, said.num_workers, pin=pin)

    def batches(self, meter: StepProfiler) -> Iterator[images.Batch]:
        return iter(meter.batches(self.loader))

    def train(self, round_: int, batches: Iterator[images.Batch], meter: StepProfiler) -> float:
        begun = time.perf_counter()
        self.training.epoch(round_, batches, meter)
        if self.training.here.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun


def measure(folder: Path, said: argparse.Namespace) -> dict[str, Any]:
    synthetic.write(folder, {"train": 64}, said.image_size * 2)
    part = openimages.check(openimages.source(folder / "images", folder, "train", None))
    torch.manual_seed(0)
    norms = detector.empty(CLASSES, said.image_size, FrozenBatchNorm2d, detector.TUNED_STAGES)
    torch.save(norms.state_dict(), folder / "weights.pth")
    here = meet("cpu")
    example = Example(part, folder / "images", said, here, folder / "weights.pth")
    reference = Reference(part, folder / "images", said, norms.state_dict())
    pairs, waited, wall = [], 0.0, 0.0
    run = folder / "run"
    with StepProfiler(run, "images", 0, report=False) as meter:
        batches = example.batches(meter)
        for number in range(said.rounds + 1):
            ours, (theirs, waits) = example.train(number, batches, meter), reference.train(said.steps)
            meter.event("pause")  # the reference's turn is no part of the example's step
            if number:  # the first turn is to warm up
                pairs.append((ours, theirs))
                waited, wall = waited + waits, wall + theirs
    lines = [line for line in read_json_lines(run / run_folder.STEPS.format(rank=0)) if line["step"] > said.steps]
    count = said.steps * said.batch_size
    return {
        "example_images_per_second": count / median(ours for ours, _ in pairs),
        "reference_images_per_second": count / median(theirs for _, theirs in pairs),
        "example_over_reference": median(theirs / ours for ours, theirs in pairs),
        "by_round": [round(theirs / ours, 3) for ours, theirs in pairs],
        "example_waits_for_images": sum(line["data_seconds"] for line in lines)
        / sum(line["step_seconds"] for line in lines),
        "reference_waits_for_images": waited / wall,
        "loader_images_per_second": alone(example.loader, said),
    }


def alone(loader: Any, said: argparse.Namespace) -> float:
    """The example's loader with nobody training beside it, from its second batch on."""
    batches = iter(loader)
    next(batches)
    start = time.perf_counter()
    count = sum(len(next(batches)[0]) for _ in range(min(len(loader) - 1, 4 * said.steps)))
    return count / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description="RetinaNet: the example against torchvision's reference loop.")
    parser.add_argument("--image-size", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="per turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each")
    parser.add_argument("--json", action="store_true")
    said = parser.parse_args()
    said.accum_steps, said.weights_path, said.debug_freq = 1, "given", 10**9
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), said)
    told = {name: getattr(said, name) for name in ("image_size", "batch_size", "num_workers", "steps", "rounds")}
    machine = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "machine": platform.machine()}
    versions = {name: version(name) for name in ("torch", "torchvision")}
    if said.json:
        print(json.dumps({**found, **told, **machine, **versions}, indent=2))
        return
    for name, value in {**told, **machine, **versions}.items():
        print(f"{name:>28}  {value}")
    for name, value in found.items():
        print(f"{name:>28}  {value:.4g}" if isinstance(value, float) else f"{name:>28}  {value}")
    for who in ("example", "reference"):
        share = found[f"{who}_waits_for_images"]
        bottleneck = "LOADING IMAGES IS A BOTTLENECK" if share > WAITING else "loading images is no bottleneck"
        print(f"{who}: {bottleneck}: {share:.1%} of the time is spent waiting for them")


if __name__ == "__main__":
    main()
