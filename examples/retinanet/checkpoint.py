"""Checkpoints: written completely or not at all, and read only by the run that wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from windlass.errors import Problem, UserError, raise_all

NAME = "checkpoint.pt"
FINAL = "model.pth"  # a plain state dict, for --weights-path


def write(path: Path, content: dict[str, Any]) -> None:
    unfinished = path.with_suffix(".part")
    torch.save(content, unfinished)
    unfinished.replace(path)


def save(folder: Path, model: nn.Module, optimizer: Optimizer, steps: int, settings: dict[str, Any]) -> None:
    """Save after this many steps. Training draws nothing from a random state, so none is kept."""
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": steps, "settings": settings}
    write(folder / NAME, content)


def begin(folder: Path, model: nn.Module, optimizer: Optimizer, settings: dict[str, Any], *, resume: bool) -> int:
    """Return the steps done, from the checkpoint if there is one."""
    path = folder / NAME
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return 0
    if not resume:
        raise UserError("a run has been here", str(path), "--resume continues it; or take another --output-dir")
    content = torch.load(path, map_location="cpu", weights_only=True)
    then = content["settings"]
    changed = [name for name, value in settings.items() if then.get(name) != value]
    raise_all([Problem(f"{name} was {then.get(name)} and is {settings[name]}", str(path)) for name in changed])
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    return int(content["steps"])
