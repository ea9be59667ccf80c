"""Checkpoints: the adapter and all that is needed to go on as if nothing had happened. Small, so saved whole.

`checkpoints/step-N/` holds the adapter in PEFT's format, optimizer.pt, scheduler.json, random.json (of every rank),
trainer_state.json (position in the data, log), and manifest.json with the SHA-256 of every other file.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file

from windlass.errors import RunError

MANIFEST = "manifest.json"
OPTIMIZER = "optimizer.pt"
SCHEDULER = "scheduler.json"
RANDOM = "random.json"
TRAINER_STATE = "trainer_state.json"  # the Trainer looks for this name itself
ADAPTER = "adapter_model.safetensors"


def save(
    folder: Path,
    *,
    model: PeftModel,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    trainer_state: str,
    manifest: dict[str, Any],
) -> None:
    """Write one checkpoint; a collective. It appears under its name only when it is whole and on disk."""
    states = gather(random_state())
    if rank() == 0:
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_adapter(model, partial)
        torch.save(optimizer.state_dict(), partial / OPTIMIZER)
        (partial / SCHEDULER).write_text(json.dumps(scheduler.state_dict(), default=str))
        (partial / RANDOM).write_text(json.dumps(states))
        (partial / TRAINER_STATE).write_text(trainer_state)
        (partial / MANIFEST).write_text(json.dumps({**manifest, "sha256": hashes(partial)}, indent=2))
        flush(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    barrier()


def save_adapter(model: PeftModel, folder: Path) -> None:
    """PEFT's own format; plain PEFT opens it. One rank calls this, so it touches nothing that ranks hold in parts.

    (`save_pretrained` asks for the whole model's state, which under FSDP2 is a collective, and asks the hub whether
    the vocabulary has grown.)
    """
    folder.mkdir(parents=True, exist_ok=True)
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    state = get_peft_model_state_dict(model, state_dict=trained, save_embedding_layers=False)
    whole = {name: tensor.to("cpu").contiguous() for name, tensor in state.items()}
    save_file(whole, folder / ADAPTER, metadata={"format": "pt"})
    described = copy.copy(model.peft_config[model.active_adapter])
    described.inference_mode = True
    described.save_pretrained(str(folder))


def load_adapter(model: PeftModel, folder: Path) -> None:
    state = load_file(folder / ADAPTER)
    outcome = set_peft_model_state_dict(model, state)
    missing = [key for key in outcome.missing_keys if "lora_" in key]
    if missing or outcome.unexpected_keys:
        raise RunError(
            f"{folder} holds another adapter than this run's: {(missing + list(outcome.unexpected_keys))[0]}",
            str(folder),
            "train into a new folder, or put the lora section back as it was",
        )


def load_optimizer(optimizer: torch.optim.Optimizer, scheduler: Any, folder: Path) -> None:
    optimizer.load_state_dict(torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True))
    scheduler.load_state_dict(json.loads((folder / SCHEDULER).read_text()))


def load_random(folder: Path) -> None:
    """The random state of this rank. Another number of ranks than it was saved by: rank 0's state for the new ones."""
    states = json.loads((folder / RANDOM).read_text())
    restore_random(states[min(rank(), len(states) - 1)])


def random_state() -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    cuda = [state.tolist() for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else []
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state().tolist(),
        "cuda": cuda,
    }


def restore_random(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all([torch.tensor(each, dtype=torch.uint8) for each in state["cuda"]])


def hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def flush(folder: Path) -> None:
    """To disk, files first, then the folder that names them."""
    for path in (*folder.rglob("*"), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def damage(folder: Path) -> str:
    """Why this checkpoint can't be used; empty when it is whole."""
    try:
        expected = json.loads((folder / MANIFEST).read_text())["sha256"]
    except (OSError, ValueError, KeyError) as error:
        return f"its manifest can't be read ({error})"
    found = hashes(folder)
    wrong = sorted(name for name in expected if found.get(name) != expected[name])
    return f"{wrong[0]} is not what was written" if wrong else ""


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def saved(checkpoints: Path) -> list[Path]:
    """Oldest first."""
    return sorted(checkpoints.glob("step-*"), key=step_of)


def newest(checkpoints: Path) -> Iterator[tuple[Path, str]]:
    """Newest first, each with its damage."""
    for folder in reversed(saved(checkpoints)):
        yield folder, damage(folder)


def prune(checkpoints: Path, limit: int | None, best: Path | None) -> None:
    """Keep the newest `limit`, and the best one besides."""
    if limit and rank() == 0:
        for folder in saved(checkpoints)[:-limit]:
            if folder != best:
                shutil.rmtree(folder, ignore_errors=True)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def gather(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
