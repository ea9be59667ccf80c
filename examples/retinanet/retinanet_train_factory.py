#!/usr/bin/env python3
"""Train RetinaNet on OpenImages with plain PyTorch: DistributedDataParallel under torchrun, on GPUs or CPUs.

    torchrun --nnodes=2 --nproc_per_node=1 --node_rank=$RANK --master_addr=$MASTER_ADDR --master_port=$MASTER_PORT \
        retinanet_train_factory.py --batch-size 16 --image-size 800 --max-train 200 --max-val 500 --epochs 2 \
        --weights-path retinanet_resnet50_fpn_coco.pth --local-image-dir openimages/images --cache-dir openimages

Without data: `--make-synthetic DIR` draws some. Without torchrun: one process on one device.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import checkpoint
import detector
import openimages
import synthetic
import torch
import torch.distributed as dist
from evaluate import evaluate
from images import EpochSampler, Images, loader
from ranks import Place, init_ranks
from training import Steps, Training

from windlass.errors import RunError, UserError
from windlass.meter import StepProfiler

# Exit codes: stopped by a signal with everything saved; wrong input, reported by a rank so that nobody starts it again.
SAVED, USER_INPUT, RANK_USER_INPUT = 75, 2, 13
DECIDING = ("batch_size", "accum_steps", "image_size", "max_train", "epochs", "weights_path", "local_image_dir", "seed")


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
    add("--debug-freq", type=at_least(1), default=10, metavar="N", help="steps between args, closely measured steps")
    add("--epochs", type=at_least(1), default=2, metavar="N")
    add("--weights-path", type=Path, metavar="FILE", help="state dict to start from; default: fresh weights")
    add("--local-image-dir", type=Path, metavar="DIR", help="the images")
    add("--cache-dir", type=Path, metavar="DIR", help="annotations, and the cache; default: beside the images")
    folder = Path(os.environ.get("WINDLASS_OUTPUT_DIR", "retinanet-run"))
    add("--output-dir", type=Path, default=folder, metavar="DIR", help="checkpoint, model, report")
    add("--seed", type=int, default=0, metavar="N", help="of fresh weights, of the order and the flips of images")
    add("--resume", action="store_true", help="resume from the output folder's checkpoint, to the same end")
    add("--make-synthetic", type=Path, metavar="DIR", help="draw a small data set there, and end")
    args = parser.parse_args(given)
    if args.local_image_dir is None and args.make_synthetic is None:
        parser.error("--local-image-dir is missing (--make-synthetic DIR draws a data set)")
    args.cache_dir = args.cache_dir or (args.local_image_dir and args.local_image_dir.resolve().parent)
    return args


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return int(text)

    return number


def part(args: argparse.Namespace, here: Place, name: str, limit: int | None, seed: int | None) -> Images:
    """Return one part of the data set: read and checked by one process, the same for all."""
    paths: list[Path | None] = [None]
    if here.rank == 0:
        origin = openimages.find_source(args.local_image_dir, args.cache_dir, name, limit)
        paths = [openimages.prepare(origin, args.cache_dir)]
    dist.broadcast_object_list(paths, group=here.waiting)
    path = paths[0]
    if path is None or not path.exists():
        raise UserError("is not to be seen here", str(path), "--cache-dir has to be a folder that all nodes share")
    found = openimages.read(path)
    here.say(f"{name}: " + ", ".join(f"{count} {what}" for what, count in found.counts.items()))
    return Images(found, args.local_image_dir, args.image_size, decode=args.backend == "cpu", seed=seed)


def score(images: Images, epoch: int, args: argparse.Namespace, training: Training, meter: StepProfiler) -> None:
    """Return the average precision on the validation part; each rank evaluates its share."""
    here = training.here
    share = [(epoch, index) for index in range(here.rank, len(images), here.ranks)]
    batches = loader(images, share, args.batch_size, args.num_workers, pin=here.device.type == "cuda")
    with training.precision():
        found = evaluate(training.model, batches, here.device, here.waiting)
    meter.event("eval", **found)
    here.say(f"epoch {epoch + 1}: " + ", ".join(f"{name} {value:.4f}" for name, value in found.items()))


def train(args: argparse.Namespace, here: Place) -> int:
    # 1. The data, read and checked before anything else.
    images = part(args, here, "train", args.max_train, args.seed)
    held_out = None if args.max_val == 0 else part(args, here, "validation", args.max_val, None)
    sampler = EpochSampler(images, here.ranks, here.rank, shuffle=True, seed=args.seed, drop_last=True)
    batches = loader(images, sampler, args.batch_size, args.num_workers, pin=here.device.type == "cuda")
    if not len(batches):
        short = f"{len(images)} images are fewer than one batch of {args.batch_size} on {here.ranks} ranks"
        raise UserError(short, str(args.local_image_dir), "a smaller --batch-size")

    # 2. The model, equal on all ranks.
    torch.manual_seed(args.seed)
    classes = images.part.classes
    model, words = detector.build(len(classes), args.image_size, args.weights_path)
    here.say("\n".join(words))
    steps = Steps(len(batches), args.accum_steps, args.epochs)
    training = Training(args, here, model.to(here.device), steps)

    # 3. The checkpoint, if there is one.
    folder = args.output_dir
    settings = {name: str(getattr(args, name)) for name in DECIDING} | {"ranks": here.ranks, "images": len(images)}
    done = training.done = checkpoint.begin(folder, model, training.optimizer, settings, resume=args.resume)
    steps_done = [done] * here.ranks
    dist.all_gather_object(steps_done, done, group=here.waiting)
    if len(set(steps_done)) > 1:
        raise UserError(f"ranks stand at steps {sorted(set(steps_done))}", str(folder), "a folder that all nodes share")
    here.say(f"{done} of {steps.all} steps are made")

    # 4. Epoch by epoch, beginning with the last step's: it may not have been evaluated.
    about = {"classes": len(classes), "images": len(images), "image size": args.image_size}
    with StepProfiler(folder, "images", args.debug_freq, about, Path(__file__).name, from_step=done) as meter:
        for epoch in range(max(0, done - 1) // steps.per_epoch, args.epochs):
            sampler.set_epoch(epoch)
            sampler.skip = (training.done - epoch * steps.per_epoch) * args.accum_steps * args.batch_size
            finished = training.epoch(epoch, iter(meter.batches(batches)), meter)
            if here.rank == 0:
                checkpoint.save(folder, model, training.optimizer, training.done, settings)
            meter.event("save")
            if not finished:
                here.say(f"stopped by a signal after step {training.done}; --resume continues")
                return SAVED
            if held_out is not None:
                score(held_out, epoch, args, training, meter)

    # 5. The result.
    if here.rank == 0:
        checkpoint.write(folder / checkpoint.FINAL, model.state_dict())
        (folder / "classes.txt").write_text("\n".join(classes) + "\n", encoding="utf-8")
    here.say(f"{folder / checkpoint.FINAL}: the weights, as --weights-path takes them; classes.txt: their classes")
    return 0


def main() -> int:
    args = options()
    if args.make_synthetic is not None:
        counts = {"train": args.max_train or 64, "validation": 16 if args.max_val is None else args.max_val}
        synthetic.write(args.make_synthetic, counts, args.image_size, args.seed)
        print(f"{counts} images: --local-image-dir {args.make_synthetic / 'images'}")
        return 0
    try:
        here = init_ranks(args.backend)
        code = train(args, here)
        dist.barrier(group=here.waiting)
        dist.destroy_process_group()
        return code
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0" or isinstance(error, RunError):  # each node has its own log
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 1 if isinstance(error, RunError) else (RANK_USER_INPUT if "RANK" in os.environ else USER_INPUT)


if __name__ == "__main__":
    sys.exit(main())
