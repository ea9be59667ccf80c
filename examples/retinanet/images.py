"""Images for the model: decoded, resized and flipped by the loader's workers, or on the GPU."""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from detector import LONGEST
from openimages import Part
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision.io import ImageReadMode, decode_jpeg

from windlass.errors import RunError

Target = dict[str, Tensor]
Batch = tuple[tuple[Tensor, ...], tuple[Target, ...]]
Item = tuple[int, int]  # epoch, index


class Images(Dataset[tuple[Tensor, Target]]):
    """One part of the data set. An image is returned as pixels, or as the bytes of its file if the GPU decodes.

    `seed`: half of the images are flipped, others in every epoch; None: unchanged, with the boxes around groups.
    """

    def __init__(self, part: Part, folder: Path, image_size: int, *, decode: bool, seed: int | None) -> None:
        self.part, self.folder, self.image_size, self.decode, self.seed = part, folder, image_size, decode, seed

    def __len__(self) -> int:
        return len(self.part.paths)

    def __getitem__(self, item: Item) -> tuple[Tensor, Target]:
        epoch, index = item
        # Depends only on the image's place: the same with any number of workers, and after a resume.
        flip = self.seed is not None and random.Random(f"{self.seed} {epoch} {index}").random() < 0.5
        path = self.folder / self.part.paths[index]
        try:
            data = path.read_bytes()
            image = to_pixels(data, self.size(index), flip=flip) if self.decode else None
        except (OSError, SyntaxError, ValueError) as error:
            raise RunError(f"{error}; it was sound when the cache was made", str(path)) from None
        target = self.target(index, flip=flip)
        if image is None:
            target |= {"size": torch.tensor(self.size(index)), "flip": torch.tensor(flip)}
            image = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return image, target

    def size(self, index: int) -> tuple[int, int]:
        """Return width and height for the model: the shorter side as configured, unless the longer one gets too
        long."""
        width, height = self.part.sizes[index].tolist()
        longest = round(self.image_size * LONGEST)
        scale = min(self.image_size / min(width, height), longest / max(width, height))
        return max(1, round(width * scale)), max(1, round(height * scale))

    def target(self, index: int, *, flip: bool) -> Target:
        start, end = self.part.starts[index : index + 2].tolist()
        boxes, groups = self.part.boxes[start:end], self.part.groups[start:end]
        if flip:
            left, top, right, bottom = boxes.unbind(1)
            boxes = torch.stack([1 - right, top, 1 - left, bottom], dim=1)
        boxes = boxes * torch.tensor(self.size(index) * 2)
        labels = self.part.labels[start:end]
        if self.seed is None:
            return {"boxes": boxes, "labels": labels, "iscrowd": groups.to(torch.int64)}
        return {"boxes": boxes[~groups], "labels": labels[~groups]}


class EpochSampler(DistributedSampler[Item]):
    """This rank's share. Passes the epoch on to workers that live longer than one.

    `skip`: images of the epoch that were trained on before a stop.
    """

    skip = 0

    def __iter__(self) -> Iterator[Item]:
        indices = itertools.islice(super().__iter__(), self.skip, None)
        return ((self.epoch, index) for index in indices)  # type: ignore[misc]


def loader(
    images: Images, sampler: Sequence[Item] | EpochSampler, batch_size: int, workers: int, *, pin: bool
) -> DataLoader[tuple[Tensor, Target]]:
    training = isinstance(sampler, EpochSampler)
    return DataLoader(
        images,
        batch_size,
        sampler=sampler,
        num_workers=workers,
        collate_fn=collate,
        pin_memory=pin,
        drop_last=training,  # equal batches: a mean over ranks and micro-batches is the mean over images
        persistent_workers=training and workers > 0,
        generator=torch.Generator(),  # the loader's random numbers affect nothing else
    )


def collate(samples: Sequence[tuple[Tensor, Target]]) -> Batch:
    """Don't stack: images differ in size, and the model pads them."""
    images, targets = zip(*samples, strict=True)
    return images, targets


def to_pixels(data: bytes, size: tuple[int, int], *, flip: bool) -> Tensor:
    """Return colour, height, width."""
    with Image.open(io.BytesIO(data)) as opened:
        image = opened.convert("RGB").resize(size, Image.Resampling.BILINEAR)
    if flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.reshape(size[1], size[0], 3).permute(2, 0, 1).contiguous()


def to_device(batch: Batch, device: torch.device) -> tuple[list[Tensor], list[Target]]:
    """Move pixels from 0 to 1 and targets to the model's device."""
    images, targets = batch
    moved = [{name: value.to(device, non_blocking=True) for name, value in target.items()} for target in targets]
    if images[0].dim() == 3:
        return [image.to(device, non_blocking=True).float() / 255 for image in images], moved
    pixels = []
    for image, target, ready in zip(decode_all(images, device), targets, moved, strict=True):
        width, height = target["size"].tolist()
        resized = interpolate(image[None].float() / 255, (height, width), mode="bilinear", antialias=True)[0]
        pixels.append(resized.flip(-1) if target["flip"] else resized)
        del ready["size"], ready["flip"]
    return pixels, moved


def decode_all(files: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Decode JPEG files together; a batch with a file that the GPU's decoder doesn't support (CMYK, PNG) one by one."""
    try:
        return list(decode_jpeg(list(files), ImageReadMode.RGB, device=device))
    except RuntimeError:
        return [_decoded(data, device) for data in files]


def _decoded(data: Tensor, device: torch.device) -> Tensor:
    try:
        return decode_jpeg(data, ImageReadMode.RGB, device=device)  # type: ignore[no-any-return]
    except RuntimeError:
        with Image.open(io.BytesIO(data.numpy().tobytes())) as opened:
            return to_pixels(data.numpy().tobytes(), opened.size, flip=False).to(device)
