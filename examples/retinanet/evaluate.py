"""Box quality: COCO's mean average precision, by torchmetrics."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from images import Batch, Target, to_device
from torch import nn
from torchmetrics.detection import MeanAveragePrecision

SHOWN = ("map", "map_50", "map_75")
Found = list[tuple[list[Target], list[Target]]]  # boxes found by the model, and true boxes, by batch


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Batch], device: torch.device, waiting: dist.ProcessGroup
) -> dict[str, float]:
    """Return the figures over all ranks' images on rank 0; nothing on the others.

    `model` is without its DDP wrapper: ranks may have different numbers of batches, and no image is seen twice.
    """
    model.eval()
    found: Found = []
    for batch in batches:
        images, targets = to_device(batch, device)
        found.append((_on_host(model(images)), _on_host(targets)))
    model.train()
    rank = dist.get_rank()
    gathered = [found] * dist.get_world_size() if rank == 0 else None
    dist.gather_object(found, gathered, group=waiting)
    values = {} if gathered is None else compute_precision(gathered)
    dist.barrier(group=waiting)  # otherwise ranks would wait in their next step, where NCCL's timeout is shorter
    return values


def compute_precision(gathered: list[Found]) -> dict[str, float]:
    """Compare the boxes that all ranks found with the true ones."""
    # Only this rank has the figures: a metric that gathers from other ranks would hang.
    metric = MeanAveragePrecision(backend="faster_coco_eval", sync_on_compute=False)
    metric.warn_on_many_detections = False  # RetinaNet returns up to 300 boxes, COCO counts the best 100
    for each in gathered:
        for predicted, targets in each:
            metric.update(predicted, targets)
    values = metric.compute()
    return {name: float(values[name]) for name in SHOWN}


def _on_host(results: list[Target]) -> list[Target]:
    return [{name: value.cpu() for name, value in result.items()} for result in results]
