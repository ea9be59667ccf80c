"""Runs in a process of its own in tests/test_retinanet.py, where torchvision is visible: the parts of the example."""

from __future__ import annotations

import csv
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from windlass import run_folder
from windlass.errors import RunError, UserError
from windlass.files import read_json_lines

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "retinanet"))

import images
import openimages
import retinanet_train_factory as factory
import synthetic
from ranks import Place, init_ranks

SIZE = 64
CLASSES = len(synthetic.SHAPES)


@pytest.fixture
def drawn(tmp_path: Path) -> Path:
    """Return a data set that a test may damage."""
    synthetic.write(tmp_path / "set", {"train": 40, "validation": 4}, SIZE)
    return tmp_path / "set"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("set")
    synthetic.write(folder, {"train": 12, "validation": 3}, SIZE)
    return folder


@pytest.fixture(scope="module")
def here() -> Any:
    place = init_ranks("cpu")
    yield place
    dist.destroy_process_group()


def origin(folder: Path, part: str = "train", limit: int | None = None) -> openimages.Source:
    return openimages.find_source(folder / "images", folder, part, limit)


def rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as handle:
        return list(csv.reader(handle))


def add_rows(path: Path, *more: list[str]) -> None:
    with path.open("a", newline="") as handle:
        csv.writer(handle).writerows(more)


def box(image: str, *place: object, label: str = "/m/disc", group: int = 0) -> list[str]:
    """Return `place` in the file's order: left, right, top, bottom."""
    return [image, "test", label, "1", *map(str, place), str(group)]


# The data set.


def test_bad_images_are_counted_and_skipped(drawn: Path) -> None:
    files, table = sorted((drawn / "images" / "train").iterdir()), drawn / "train-annotations-bbox.csv"
    names = [path.stem for path in files]
    before = openimages.check(origin(drawn))
    assert before.counts["images"] == 40
    assert before.counts["images without boxes"] == 40 // synthetic.EMPTY
    files[3].unlink()
    files[7].write_bytes(files[7].read_bytes()[:-200])  # its header is whole
    empty = next(name for name in names if not any(row[0] == name for row in rows(table)))
    add_rows(
        table,
        box(empty, -0.5, 0.5, 0.25, 1.75),  # clipped
        box(empty, 0.5, 0.5, 0.1, 0.9),  # no width
        box(empty, 0.6, 0.4, 0.1, 0.9),  # the wrong way round
        box(empty, 0.5, 0.501, 0.1, 0.9),  # less than a pixel
        box(empty, 1.2, 1.5, 0.1, 0.9),  # beside the image
        box(empty, "nan", 0.5, 0.1, 0.9),
        box(empty, 0.1, 0.9, 0.1, 0.9, group=1),
        box("0000000000000000", 0.1, 0.9, 0.1, 0.9),
        box("0000000000000000", 0.1, 0.9, 0.1, 0.9),
    )
    after = openimages.check(origin(drawn))
    lost = sum(row[0] in (names[3], names[7]) for row in rows(table))
    assert after.counts == before.counts | {
        "images missing": 1,
        "images broken": 1,
        "annotations without an image": 2,
        "boxes clipped": 1,
        "boxes dropped": 5,
        "images": 38,
        "boxes": before.counts["boxes"] - lost + 2,
        "images without boxes": after.counts["images without boxes"],
    }
    assert [Path(path).stem for path in after.paths] == [name for name in names if name not in (names[3], names[7])]
    index = [Path(path).stem for path in after.paths].index(empty)
    start, end = after.starts[index : index + 2].tolist()
    torch.testing.assert_close(after.boxes[start:end], torch.tensor([[0.0, 0.25, 0.5, 1.0], [0.1, 0.1, 0.9, 0.9]]))
    assert after.groups[start:end].tolist() == [False, True]


def test_too_many_bad_images_are_an_error(drawn: Path) -> None:
    for path in sorted((drawn / "images" / "train").iterdir())[:3]:
        path.write_bytes(b"")
    with pytest.raises(UserError, match=r"3 of 40 images are missing or broken: .*\.jpg") as caught:
        openimages.check(origin(drawn))
    assert caught.value.problems[0].hint == "up to 5% are left out"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (box("x", 0, 1, 0, 1, label="/m/unicorn"), "label '/m/unicorn' is in no class"),
        (["x", "test"], "2 columns where the header has 9"),
    ],
)
def test_meaningless_rows_are_errors_with_their_line(drawn: Path, row: list[str], problem: str) -> None:
    table = drawn / "train-annotations-bbox.csv"
    line = len(rows(table)) + 1
    add_rows(table, row)
    with pytest.raises(UserError, match=problem) as caught:
        openimages.check(origin(drawn))
    assert caught.value.problems[0].where == f"{table}:{line}"


def test_missing_and_ambiguous_tables_are_errors(drawn: Path) -> None:
    table, classes = drawn / "train-annotations-bbox.csv", drawn / "class-descriptions-boxable.csv"
    (drawn / "oidv6-train-annotations-bbox.csv").write_bytes(table.read_bytes())
    with pytest.raises(UserError, match=r"several files are \*train-annotations-bbox.csv"):
        origin(drawn)
    (drawn / "oidv6-train-annotations-bbox.csv").unlink()
    table.write_text(table.read_text().replace("XMin", "X", 1))
    with pytest.raises(UserError, match="has no column XMin"):
        openimages.check(origin(drawn))
    table.unlink()
    classes.unlink()
    with pytest.raises(UserError) as caught:
        origin(drawn)
    assert len(caught.value.problems) == 2
    with pytest.raises(UserError, match="is not a folder"):
        openimages.find_source(drawn / "nowhere", drawn, "train", None)


def test_the_cache_is_used_while_nothing_changes(drawn: Path) -> None:
    first = openimages.prepare(origin(drawn, limit=10), drawn)
    stamp = first.stat().st_mtime_ns
    assert first.stat().st_mode & 0o777 == 0o644, "the ranks of other nodes may have another user"
    assert openimages.prepare(origin(drawn, limit=10), drawn) == first
    assert first.stat().st_mtime_ns == stamp
    read, checked = openimages.read(first), openimages.check(origin(drawn, limit=10))
    for name in openimages.Part.__slots__:
        one, other = getattr(read, name), getattr(checked, name)
        assert one.equal(other) if isinstance(one, Tensor) else one == other
    assert len(read.paths) == 10
    add_rows(drawn / "train-annotations-bbox.csv", box(Path(read.paths[0]).stem, 0.1, 0.9, 0.1, 0.9))
    second = openimages.prepare(origin(drawn, limit=10), drawn)
    assert second != first
    assert openimages.read(second).counts["boxes"] == read.counts["boxes"] + 1


# Images on their way to the model.


def view(folder: Path, size: int = SIZE, seed: int | None = 0, *, decode: bool = True) -> images.Images:
    return images.Images(openimages.check(origin(folder)), folder / "images", size, decode=decode, seed=seed)


def test_boxes_follow_their_shapes(sound: Path) -> None:
    colours = [torch.tensor(colour) for _, colour in synthetic.SHAPES.values()]
    flipped = 0
    for size in (SIZE, 100):
        data, plain = view(sound, size), view(sound, size, seed=None)
        for index in range(len(data)):
            pixels, target = data[0, index]
            assert pixels.shape == (3, size, size)
            flipped += not pixels.equal(plain[0, index][0])
            for (left, top, right, bottom), label in zip(target["boxes"], target["labels"], strict=True):
                x, y = int((left + right) / 2), int((top + 3 * bottom) / 4)  # of all shapes, inside
                assert (pixels[:, y, x] - colours[label]).abs().max() < 60
    assert 0 < flipped < 2 * len(data)


def test_an_image_that_broke_after_the_check_is_named(drawn: Path) -> None:
    data = view(drawn)
    path = drawn / "images" / data.part.paths[0]
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(RunError, match=r"it was sound when the cache was made") as caught:
        data[0, 0]
    assert caught.value.problems[0].where == str(path)


# The loop.


def arguments(folder: Path, out: Path, *more: str) -> list[str]:
    fixed = "--image-size 32 --batch-size 2 --accum-steps 2 --epochs 2 --num-workers 0 --max-val 0 --debug-freq 1"
    return [*fixed.split(), "--local-image-dir", str(folder / "images"), "--output-dir", str(out), *more]


def stop_after(step: int, folder: Path) -> threading.Thread:
    """Send SIGTERM to this process once the step is written."""

    def watch() -> None:
        path = folder / run_folder.STEPS.format(rank=0)
        while not path.exists() or sum(1 for _ in read_json_lines(path)) < step:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_resumed_run_ends_like_an_uninterrupted_one(
    here: Place, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert factory.train(factory.options(arguments(sound, whole)), here) == 0
    watcher = stop_after(1, parts)
    assert factory.train(factory.options(arguments(sound, parts)), here) == factory.SAVED
    watcher.join(5)
    stopped = torch.load(parts / "checkpoint.pt", weights_only=True)["steps"]
    assert 0 < stopped < 6
    with pytest.raises(UserError, match="a run has been here"):
        factory.train(factory.options(arguments(sound, parts)), here)
    with pytest.raises(UserError, match="seed was 0 and is 1"):
        factory.train(factory.options(arguments(sound, parts, "--resume", "--seed", "1")), here)
    assert factory.train(factory.options(arguments(sound, parts, "--resume")), here) == 0
    one, other = (torch.load(run / "model.pth", weights_only=True) for run in (whole, parts))
    assert all(value.equal(other[name]) for name, value in one.items())
    losses = [
        [line["loss"] for line in read_json_lines(run / run_folder.STEPS.format(rank=0))] for run in (whole, parts)
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6
    printed = capsys.readouterr().out
    assert f"stopped by a signal after step {stopped}" in printed
    assert f"{stopped} of 6 steps are made" in printed
