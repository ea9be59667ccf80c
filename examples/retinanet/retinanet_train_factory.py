#!/usr/bin/env python3
"""Train RetinaNet on OpenImages with plain PyTorch: DistributedDataParallel under torchrun, on GPUs or CPUs.

    torchrun --nnodes=2 --nproc_per_node=1 --node_rank=$RANK --master_addr=$MASTER_ADDR --master_port=$MASTER_PORT \\
        retinanet_train_factory.py --batch-size 16 --image-size 800 --max-train 200 --max-val 500 --epochs 2 \\
        --weights-path retinanet_resnet50_fpn_coco.pth --local-image-dir openimages/images --cache-dir openimages

Without data: `--make-synthetic DIR` draws some. Without torchrun: one process on one device.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import checkpoint
import detector
import openimages
import synthetic
import torch
import torch.distributed as dist
from evaluate import evaluate
from images import Batch, EpochSampler, Images, loader, to_device
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from windlass.errors import RunError, UserError
from windlass.meter import StepProfiler

FRESH_RATE, TUNING_RATE = 3e-4, 1e-4  # learning rate at a global batch of 16 images; others by the square root
WEIGHT_DECAY = 0.05  # of the weights; not of norms and biases
DECIDING = ("batch_size", "accum_steps", "image_size", "max_train", "epochs", "weights_path", "local_image_dir", "seed")
WARM_UP = 0.1  # of the steps, but no more than 1000
GRADIENT_NORM = 10.0  # at most
NAMES = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}  # as torchrun sets them; as it is without
PATIENCE = timedelta(hours=4)  # while one process reads the data set or works out the average precision


@dataclass(frozen=True, slots=True)
class Place:
    """This process among the ranks."""

    rank: int
    local_rank: int
    ranks: int
    device: torch.device
    waiting: dist.ProcessGroup  # where the others wait for one process's work: on the host, and with patience

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)


def options(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train RetinaNet on OpenImages.")
    add = parser.add_argument
    add("--batch-size", type=at_least(1), default=16, metavar="N", help="images per rank and micro-batch")
    add("--accum-steps", type=at_least(1), default=1, metavar="N", help="micro-batches per optimizer step")
    add("--image-size", type=at_least(32), default=800, metavar="PIXELS", help="length of an image's shorter side")
    add("--max-train", type=at_least(1), metavar="N", help="images to train on; default: all")
    add("--max-val", type=at_least(0), metavar="N", help="images to validate on; default: all; 0: no validation")
    add("--backend", choices=("cpu", "gpu"), default="cpu", help="where images are decoded and resized")
    add("--num-workers", type=at_least(0), default=2, metavar="N", help="processes per rank that load images")
    add("--debug-freq", type=at_least(1), default=10, metavar="N", help="steps between printed, closely measured steps")
    add("--epochs", type=at_least(1), default=2, metavar="N")
    add("--weights-path", type=Path, metavar="FILE", help="state dict to start from; default: fresh weights")
    add("--local-image-dir", type=Path, metavar="DIR", help="the images")
    add("--cache-dir", type=Path, metavar="DIR", help="annotations, and the cache; default: beside the images")
    add("--output-dir", type=Path, default=Path("retinanet-run"), metavar="DIR", help="checkpoint, model, report")
    add("--seed", type=int, default=0, metavar="N", help="of fresh weights, of the order and the flips of images")
    add("--resume", action="store_true", help="go on from the output folder's checkpoint, to the same end")
    add("--make-synthetic", type=Path, metavar="DIR", help="draw a small data set there, and end")
    said = parser.parse_args(given)
    if said.local_image_dir is None and said.make_synthetic is None:
        parser.error("--local-image-dir is missing (--make-synthetic DIR draws a data set)")
    said.cache_dir = said.cache_dir or (said.local_image_dir and said.local_image_dir.resolve().parent)
    return said


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return int(text)

    return number


def meet(backend: str) -> Place:
    """The ranks find each other: NCCL between GPUs, gloo between CPUs."""
    gpu = torch.cuda.is_available()
    if backend == "gpu" and not gpu:
        raise UserError("there is no GPU to decode images on", "--backend gpu", "--backend cpu")
    rank, ranks, local = (int(os.environ.get(name, alone)) for name, alone in NAMES.items())
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    store = None if "RANK" in os.environ else dist.HashStore()  # type: ignore[attr-defined]  # nobody to look for
    dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=rank, world_size=ranks)
    return Place(rank, local, ranks, device, dist.new_group(backend="gloo", timeout=PATIENCE))


def data(said: argparse.Namespace, here: Place, part: str, limit: int | None, seed: int | None) -> Images:
    """One part, read and checked by one process; where nodes share no folder, by one of each."""
    origin = openimages.source(said.local_image_dir, said.cache_dir, part, limit)
    for builds in (here.rank == 0, here.local_rank == 0):
        if builds:
            openimages.prepare(origin, said.cache_dir)
        dist.barrier(group=here.waiting)
    found = openimages.read(openimages.cached(origin, said.cache_dir))
    here.say(f"{part}: " + ", ".join(f"{count} {name}" for name, count in found.counts.items()))
    return Images(found, said.local_image_dir, said.image_size, decode=said.backend == "cpu", seed=seed)


def optimizer_for(model: nn.Module) -> Optimizer:
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = [parameter for parameter in learning if parameter.dim() > 1]
    others = [parameter for parameter in learning if parameter.dim() <= 1]
    return AdamW([{"params": weights, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}])


def rate_at(step: int, steps: int, peak: float) -> float:
    """Up in a line, down along a cosine."""
    rising = min(1000, max(1, round(steps * WARM_UP)))
    falling = (step - rising) / max(1, steps - rising)
    return peak * min((step + 1) / rising, 0.5 * (1 + math.cos(math.pi * max(0.0, falling))))


@dataclass(frozen=True, slots=True)
class Steps:
    """How an epoch's micro-batches make optimizer steps. The last step of an epoch may have fewer."""

    batches: int  # per epoch
    accum: int
    epochs: int

    @property
    def per_epoch(self) -> int:
        return math.ceil(self.batches / self.accum)

    @property
    def all(self) -> int:
        return self.per_epoch * self.epochs

    def micro_batches(self, step: int) -> int:
        return min(self.accum, self.batches - step % self.per_epoch * self.accum)


class Training:
    """The model, and what makes it better step by step."""

    def __init__(self, said: argparse.Namespace, here: Place, model: nn.Module, steps: Steps) -> None:
        self.said, self.here, self.model, self.steps = said, here, model, steps
        global_batch = said.batch_size * said.accum_steps * here.ranks
        self.peak = (TUNING_RATE if said.weights_path else FRESH_RATE) * math.sqrt(global_batch / 16)
        self.optimizer = optimizer_for(model)
        # No buffers are sent around: the norms are frozen, or keep none.
        self.ranks = DistributedDataParallel(model, forward_sync_buffers=False, gradient_as_bucket_view=True)
        self.bf16 = here.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        here.say(
            f"{steps.all} steps of {global_batch} images ({said.batch_size} x {said.accum_steps} x {here.ranks} ranks) "
            f"on {here.device.type} in {'bfloat16' if self.bf16 else 'float32'}, learning rate up to {self.peak:.3g}"
        )

    def precision(self) -> torch.autocast:
        return torch.autocast(self.here.device.type, torch.bfloat16, enabled=self.bf16)

    def epoch(self, number: int, batches: Iterator[Batch], meter: StepProfiler) -> None:
        for step in range(number * self.steps.per_epoch, (number + 1) * self.steps.per_epoch):
            count, rate = self.steps.micro_batches(step), rate_at(step, self.steps.all, self.peak)
            loss = self.gradients(batches, count, meter)
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.optimizer.zero_grad()
            meter.mark("optimizer")
            if (step + 1) % self.said.debug_freq == 0 or (step + 1) % self.steps.per_epoch == 0:
                self.look(step + 1, loss, norm, meter)
            epoch = (step + 1) / self.steps.per_epoch
            items = count * self.said.batch_size
            meter.step(items, loss=loss, grad_norm=norm, learning_rate=rate, epoch=epoch)

    def gradients(self, batches: Iterator[Batch], count: int, meter: StepProfiler) -> Tensor:
        """The mean gradient of `count` micro-batches; the ranks exchange it once, in the last backward. Their loss."""
        total = torch.zeros((), device=self.here.device)
        for number in range(count):
            images, targets = to_device(next(batches), self.here.device)
            meter.mark("data")
            with nullcontext() if number == count - 1 else self.ranks.no_sync():
                with self.precision():
                    loss = sum(self.ranks(images, targets).values()) / count
                meter.mark("forward")
                loss.backward()
                meter.mark("backward")
            total += loss.detach()
        return total

    def look(self, step: int, loss: Tensor, norm: Tensor, meter: StepProfiler) -> None:
        """The loss of all ranks, and whether it still is a number. On a GPU this waits, so not every step does it."""
        mean = loss.clone()
        dist.all_reduce(mean)
        mean /= self.here.ranks
        if not (mean + norm).isfinite():
            raise RunError(f"loss {float(mean)}, gradient norm {float(norm)}", f"step {step}", "no checkpoint has it")
        rate = meter.latest.get("images_per_second", math.nan) * self.here.ranks
        self.here.say(f"step {step}/{self.steps.all}: loss {mean:.4f}, gradient {norm:.3g}, {rate:.4g} images/s")


def train(said: argparse.Namespace, here: Place) -> None:
    # 1. The data: read and checked before anything else, the same on all ranks.
    images = data(said, here, "train", said.max_train, said.seed)
    held_out = None if said.max_val == 0 else data(said, here, "validation", said.max_val, None)
    classes = images.part.classes
    if held_out is not None and held_out.part.classes != classes:
        raise UserError("the classes changed between the two parts", str(said.cache_dir))
    pin = here.device.type == "cuda"
    sampler = EpochSampler(images, here.ranks, here.rank, shuffle=True, seed=said.seed, drop_last=True)
    batches = loader(images, sampler, said.batch_size, said.num_workers, pin=pin)
    if not len(batches):
        short = f"{len(images)} images are fewer than one batch of {said.batch_size} on {here.ranks} ranks"
        raise UserError(short, str(said.local_image_dir), "a smaller --batch-size")

    # 2. The model: the same on all ranks, whatever each of them drew.
    torch.manual_seed(said.seed)
    model, words = detector.build(len(classes), said.image_size, said.weights_path)
    here.say("\n".join(words))
    steps = Steps(len(batches), said.accum_steps, said.epochs)
    training = Training(said, here, model.to(here.device), steps)

    # 3. Where it stands.
    folder = said.output_dir
    settings = {name: str(getattr(said, name)) for name in DECIDING} | {"ranks": here.ranks, "images": len(images)}
    done = checkpoint.begin(folder, model, training.optimizer, settings, resume=said.resume)
    here.say(f"{done} of {said.epochs} epochs are done")

    # 4. Epoch by epoch.
    about = {"classes": len(classes), "images": len(images), "global batch": said.batch_size * here.ranks}
    meter = StepProfiler(
        folder, "images", said.debug_freq, about, Path(__file__).name, from_step=done * steps.per_epoch
    )
    with meter:
        for number in range(done, said.epochs):
            sampler.set_epoch(number)
            training.epoch(number, iter(meter.batches(batches)), meter)
            if held_out is not None:
                shares = [(number, index) for index in range(here.rank, len(held_out), here.ranks)]
                with training.precision():
                    few = loader(held_out, shares, said.batch_size, said.num_workers, pin=pin)
                    scores = evaluate(model, few, here.device, here.waiting)
                meter.event("eval", **scores)
                here.say(f"epoch {number + 1}: " + ", ".join(f"{name} {score:.4f}" for name, score in scores.items()))
            if here.rank == 0:
                checkpoint.save(folder, model, training.optimizer, number + 1, settings)
            meter.event("save")

    # 5. The result.
    if here.rank == 0:
        checkpoint.write(folder / checkpoint.FINAL, model.state_dict())
        (folder / "classes.txt").write_text("\n".join(classes) + "\n", encoding="utf-8")
    here.say(f"{folder / checkpoint.FINAL}: the weights, as --weights-path takes them; classes.txt: their classes")


def main() -> int:
    said = options()
    if said.make_synthetic is not None:
        counts = {"train": said.max_train or 64, "validation": 16 if said.max_val is None else said.max_val}
        synthetic.write(said.make_synthetic, counts, said.image_size, said.seed)
        print(f"{counts} images: --local-image-dir {said.make_synthetic / 'images'}")
        return 0
    try:
        here = meet(said.backend)
        train(said, here)
        dist.barrier(group=here.waiting)
        dist.destroy_process_group()
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0" or isinstance(error, RunError):  # each node has its own log
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 1 if isinstance(error, RunError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
