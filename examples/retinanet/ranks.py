"""This process as one of torchrun's ranks, or alone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from windlass.errors import UserError

NAMES = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}  # set by torchrun; the defaults without it
PATIENCE = timedelta(hours=4)  # for one process to read the data set or compute the average precision


@dataclass(frozen=True, slots=True)
class Place:
    rank: int
    ranks: int
    device: torch.device
    waiting: dist.ProcessGroup  # in which the others wait for one process's work: on the host, with a long timeout

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)


def init_ranks(backend: str) -> Place:
    """Connect the ranks: NCCL between GPUs, gloo between CPUs."""
    gpu = torch.cuda.is_available()
    if backend == "gpu" and not gpu:
        raise UserError("there is no GPU to decode images on", "--backend gpu", "--backend cpu")
    rank, ranks, local = (int(os.environ.get(name, alone)) for name, alone in NAMES.items())
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    store = None if "RANK" in os.environ else dist.HashStore()  # type: ignore[attr-defined]  # no other process
    dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=rank, world_size=ranks)
    return Place(rank, ranks, device, dist.new_group(backend="gloo", timeout=PATIENCE))
