"""Replacements for torchvision's compiled operators if they can't be loaded.

torchvision's wheel is compiled against CUDA's libraries. With a CPU build of torch its operators are missing, and
`import torchvision` fails when it declares their results. RetinaNet needs one of them: non-maximum suppression. Call
`provide()` before importing torchvision. Not needed if torchvision was built for this torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
library: Any = None  # keeps the operators registered


def provide() -> bool:
    """Return whether the operators are ours. Repeated calls have the same result."""
    global library
    if library is None and not _compiled():
        library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        library.define(f"nms{SCHEMA}")
        library.define(f"qnms{SCHEMA}")  # for quantized boxes: declared in torchvision's import, never called here
        library.impl("nms", nms, "CPU")
        extension: Any = importlib.import_module("torchvision.extension")
        extension._has_ops = lambda: True  # torchvision asks this before it calls nms
    return library is not None


def _compiled() -> bool:
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        hint = "pip install '../..[train,retinanet]'; without CUDA: make, and PYTHONPATH=.venv/vision (see README.md)"
        raise SystemExit(f"error: torchvision is not installed\n\nhint: {hint}")
    try:
        for path in Path(found.origin).parent.glob("_C*.so"):
            torch.ops.load_library(path)  # type: ignore[no-untyped-call]
            return True
    except OSError:  # a library that it needs is not on this machine
        pass
    return False


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Return the indices of the boxes to keep, best first: each drops all that overlap it by more than the
    threshold."""
    area = (boxes[:, 2:] - boxes[:, :2]).prod(dim=1)
    left = scores.argsort(descending=True, stable=True)
    kept = []
    while len(left):
        best, left = left[0], left[1:]
        kept.append(best)
        corner = torch.maximum(boxes[best, :2], boxes[left, :2])
        overlap = (torch.minimum(boxes[best, 2:], boxes[left, 2:]) - corner).clamp(min=0).prod(dim=1)
        left = left[~(overlap / (area[best] + area[left] - overlap) > iou_threshold)]
    return torch.stack(kept) if kept else left
