"""Draw a small data set in OpenImages' layout: coloured shapes on noise, to try things out without data."""

from __future__ import annotations

import csv
import random
from pathlib import Path

from PIL import Image, ImageDraw

SHAPES = {
    "/m/disc": ("Disc", (220, 50, 40)),
    "/m/square": ("Square", (40, 190, 60)),
    "/m/wedge": ("Wedge", (50, 80, 230)),
}
HEADER = ["ImageID", "Source", "LabelName", "Confidence", "XMin", "XMax", "YMin", "YMax", "IsGroupOf"]
EMPTY = 10  # one image in ten has no box

Box = tuple[int, int, int, int]


def write(folder: Path, counts: dict[str, int], size: int, seed: int = 0) -> None:
    """Write a data set. `counts`: images per part, `train` and `validation`; each is a square of `size` pixels."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "class-descriptions-boxable.csv").open("w", newline="", encoding="utf-8") as handle:
        csv.writer(handle).writerows((label, name) for label, (name, _) in SHAPES.items())
    for part, count in counts.items():
        draw = random.Random(f"{seed} {part}")
        (folder / "images" / part).mkdir(parents=True, exist_ok=True)
        with (
            (folder / f"{part}-annotations-bbox.csv").open("w", newline="", encoding="utf-8") as boxes,
            (folder / f"{part}-images-boxable.csv").open("w", newline="", encoding="utf-8") as listed,
        ):
            annotations, images = csv.writer(boxes), csv.writer(listed)
            annotations.writerow(HEADER)
            images.writerow(["ImageID", "Subset"])
            for number in range(count):
                name = f"{draw.getrandbits(64):016x}"
                picture, drawn = paint(draw, size, shapes=0 if number % EMPTY == EMPTY - 1 else draw.choice((1, 1, 2)))
                picture.save(folder / "images" / part / f"{name}.jpg", quality=92)
                images.writerow([name, part])
                for label, (left, top, right, bottom) in drawn:
                    place = [f"{value / size:.6f}" for value in (left, right, top, bottom)]
                    annotations.writerow([name, "drawn", label, 1, *place, 0])


def paint(draw: random.Random, size: int, shapes: int) -> tuple[Image.Image, list[tuple[str, Box]]]:
    """Return an image and its boxes. Two shapes take a half each, so that none hides another."""
    noise = Image.frombytes("RGB", (8, 8), bytes(draw.randrange(90, 160) for _ in range(8 * 8 * 3)))
    picture = noise.resize((size, size), Image.Resampling.BILINEAR)
    pen = ImageDraw.Draw(picture)
    drawn = []
    for number in range(shapes):
        label = draw.choice(list(SHAPES))
        room = size // shapes  # the width of this shape's part of the picture
        side = round(min(room, size * 0.75) * draw.uniform(0.7, 1.0))
        left, top = number * room + draw.randint(0, room - side), draw.randint(0, size - side)
        box = (left, top, left + side, top + side)
        colour = SHAPES[label][1]
        if label == "/m/disc":
            pen.ellipse(box, fill=colour)
        elif label == "/m/square":
            pen.rectangle(box, fill=colour)
        else:
            pen.polygon([(left, box[3]), (box[2], box[3]), (left + side / 2, top)], fill=colour)
        drawn.append((label, box))
    return picture, drawn
