"""All of a checkpoint: copied to host memory at once, written at leisure, read again on every rank."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from torch import Tensor

from windlass.model.targets import ExpertShards
from windlass.train.checkpoint.adapter import described, whole_adapter, write_adapter
from windlass.train.checkpoint.disk import MANIFEST, seal
from windlass.train.checkpoint.parts import own_state, whole_state
from windlass.train.checkpoint.random_state import random_state, restore_random
from windlass.train.group import gather, rank

OPTIMIZER = "optimizer.pt"
SCHEDULER = "scheduler.json"
RANDOM = "random.json"
TRAINER_STATE = "trainer_state.json"  # the name that other tools look for


@dataclass(frozen=True)
class Contents:
    """A copy in host memory: training may go on changing the tensors that it was made from."""

    step: int
    adapter: dict[str, Tensor]
    config: PeftConfig
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    random: list[dict[str, Any]]  # by rank
    trainer_state: str
    manifest: dict[str, Any]

    def write(self, partial: Path) -> None:
        """Into an empty folder, the manifest last."""
        write_adapter(self.adapter, self.config, partial)
        saved = io.BytesIO()  # to a file, torch.save turns a full disk into an error of its own
        torch.save(self.optimizer, saved)
        (partial / OPTIMIZER).write_bytes(saved.getbuffer())
        (partial / SCHEDULER).write_text(json.dumps(self.scheduler, default=str))
        (partial / RANDOM).write_text(json.dumps(self.random))
        (partial / TRAINER_STATE).write_text(self.trainer_state)
        seal(partial, {**self.manifest, "step": self.step})


def contents(
    step: int,
    *,
    model: PeftModel,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    trainer_state: str,
    manifest: dict[str, Any],
) -> Contents | None:
    """Copy everything to host memory: all that training waits for. A collective; rank 0 gets the copy."""
    random = gather(random_state())
    adapter, state = whole_adapter(model), whole_state(optimizer, model, ExpertShards(model))
    if rank():
        return None
    return Contents(
        step=step,
        adapter=adapter,
        config=described(model),
        optimizer={"optimizer": state},
        scheduler=scheduler.state_dict(),
        random=random,
        trainer_state=trainer_state,
        manifest=manifest,
    )


def load_optimizer(optimizer: torch.optim.Optimizer, scheduler: Any, folder: Path, model: PeftModel) -> None:
    state = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)
    optimizer.load_state_dict(own_state(optimizer, model, ExpertShards(model), state["optimizer"]))
    scheduler.load_state_dict(json.loads((folder / SCHEDULER).read_text()))


def load_random(folder: Path) -> None:
    """The random state of this rank. Another number of ranks than it was saved by: the last one's for the new ones."""
    states = json.loads((folder / RANDOM).read_text())
    restore_random(states[min(rank(), len(states) - 1)])


def load_state(folder: Path) -> dict[str, Any]:
    """Counters and the log, as they were."""
    state: dict[str, Any] = json.loads((folder / TRAINER_STATE).read_text())
    return state


def read_manifest(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    return manifest
