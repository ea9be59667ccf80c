"""This process among the ranks that torchrun started, or alone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from windlass.errors import UserError

NAMES = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}  # as torchrun sets them; as it is without
PATIENCE = timedelta(hours=4)  # while one process reads the data set or works out the average precision


@dataclass(frozen=True, slots=True)
class Place:
    rank: int
    ranks: int
    device: torch.device
    waiting: dist.ProcessGroup  # where the others wait for one process's work: on the host, and with patience

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)


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
    return Place(rank, ranks, device, dist.new_group(backend="gloo", timeout=PATIENCE))
