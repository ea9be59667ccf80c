"""Checkpoints: the adapter and all that is needed to resume as if nothing had happened.

`checkpoints/step-N/` holds the adapter in PEFT's format, optimizer.pt, scheduler.json, random.json (of every rank),
trainer_state.json (counters, log) and manifest.json: what the run was, where it was, how well it evaluated, and the
SHA-256 of every other file. A folder without a manifest that fits is no checkpoint. Files hold the adapters of all
experts whatever part of them each rank has, so that any layout and number of ranks can resume.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import io
import json
import math
import os
import random
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from peft import PeftConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from windlass.errors import RunError
from windlass.files import discard_dir
from windlass.model.targets import ExpertShard, ExpertShards, by_expert
from windlass.train.group import from_rank_0, gather, rank

ADAPTER: Final = "adapter_model.safetensors"
MANIFEST: Final = "manifest.json"
OPTIMIZER, SCHEDULER, RANDOM = "optimizer.pt", "scheduler.json", "random.json"
STATE: Final = "trainer_state.json"  # the name that other tools look for
SEAL: Final = "seal"  # of the manifest itself: it holds the hashes of everything else


# --- a snapshot: copied to host memory at once, written while training goes on ---


@dataclass(frozen=True)
class Snapshot:
    """In host memory of its own: training may go on changing the tensors that it was made from."""

    step: int
    adapter: dict[str, Tensor]
    config: PeftConfig
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    random: list[dict[str, Any]]  # by rank
    state: dict[str, Any]
    manifest: dict[str, Any]

    def write(self, partial: Path) -> None:
        """Into an empty folder, the manifest last."""
        write_adapter(self.adapter, self.config, partial)
        saved = io.BytesIO()  # to a file, torch.save turns a full disk into an error of its own
        torch.save({"optimizer": self.optimizer}, saved)
        (partial / OPTIMIZER).write_bytes(saved.getbuffer())
        (partial / SCHEDULER).write_text(json.dumps(self.scheduler, default=str))
        (partial / RANDOM).write_text(json.dumps(self.random))
        (partial / STATE).write_text(json.dumps(self.state, indent=2, sort_keys=True))
        seal(partial, {**self.manifest, "step": self.step})


def snapshot(
    step: int,
    *,
    model: PeftModel,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    state: dict[str, Any],
    manifest: dict[str, Any],
) -> Snapshot | None:
    """Copy everything to host memory: all that training waits for. A collective; rank 0 gets the copy."""
    generators = gather(random_state())
    parts = ExpertShards(model)
    adapter, of_optimizer = full_adapter(model), full_optimizer_state(optimizer, model, parts)
    if rank():
        return None
    config = adapter_config(model)
    return Snapshot(step, adapter, config, of_optimizer, scheduler.state_dict(), generators, state, manifest)


# --- the adapter's file ---


def adapter_state(model: PeftModel) -> dict[str, Tensor]:
    """The trained tensors by the names of PEFT's files, as they are on this rank.

    (`save_pretrained` asks for the whole model's state, which under FSDP2 is a collective, and asks the hub whether
    the vocabulary has grown.)
    """
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return dict(get_peft_model_state_dict(model, state_dict=trained, save_embedding_layers=False))


def adapter_config(model: PeftModel) -> PeftConfig:
    """As whoever opens the file wants it."""
    config = copy.copy(model.peft_config[model.active_adapter])
    config.inference_mode = True
    return config


def full_adapter(model: PeftModel) -> dict[str, Tensor]:
    """The adapter with the parts of all ranks put together, on rank 0. A collective."""
    state = adapter_state(model)
    return dict(zip(state, gather_parts(ExpertShards(model), state.items()), strict=True))


def save_adapter(model: PeftModel, folder: Path) -> None:
    """Plain PEFT opens it. A collective; rank 0 writes."""
    state = full_adapter(model)
    if rank() == 0:
        write_adapter(state, adapter_config(model), folder)


def write_adapter(state: dict[str, Tensor], config: PeftConfig, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(state, folder / ADAPTER, {"format": "pt"})
    config.save_pretrained(str(folder))


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """safetensors wraps the system's error, a full disk among them: raised by its number as any other."""
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code), str(path)) from None
    path.chmod(0o644)  # the library makes it readable for its owner alone, whatever the umask says


def load_adapter(model: PeftModel, folder: Path) -> None:
    """Of split experts' adapters, every rank takes its own part."""
    parts = ExpertShards(model)
    with safe_open(folder / ADAPTER, "pt") as file:  # one tensor at a time: every rank of a node reads them all
        state = {name: parts.own(name, file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    outcome = set_peft_model_state_dict(model, state)
    missing = [key for key in outcome.missing_keys if "lora_" in key]
    if missing or outcome.unexpected_keys:
        raise RunError(
            f"{folder} holds another adapter than this run's: {(missing + list(outcome.unexpected_keys))[0]}",
            str(folder),
            "train into a new folder, or put the lora section back as it was",
        )


def read_back(model: PeftModel, folder: Path) -> None:
    """Compare the file that was just written with the tensors of all ranks, bit by bit. A collective."""
    parts = ExpertShards(model)
    firsts = [*holders(parts)] or [0]
    written: dict[tuple[str, int], str] = {}
    for name, tensor in (load_file(folder / ADAPTER) if rank() == 0 else {}).items():
        part = parts.of(name)
        for first in firsts if part else [0]:
            written[name, first] = _fingerprint(replace(part, first=first).own(name, tensor) if part else tensor)
    written = from_rank_0(written)
    own: dict[tuple[str, int], str] = {}
    for name, tensor in adapter_state(model).items():
        part = parts.of(name)
        own[name, part.first if part else 0] = _fingerprint(tensor)
    lacking = {name for name, _ in written} ^ {name for name, _ in own}
    wrong = gather(
        sorted(lacking | {name for (name, first), bits in own.items() if written.get((name, first)) != bits})
    )
    if found := {number: names for number, names in enumerate(wrong) if names}:
        first = min(found)
        raise RunError(
            f"{len(found[first])} tensors in {folder / ADAPTER} are not those of rank {first}: {found[first][0]}",
            str(folder),
            "the file was written and read again: the storage, its driver or this rank's memory changed it",
        )


def _fingerprint(tensor: Tensor) -> str:
    bits = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8)
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(bits.numpy().data).hexdigest()}"


# --- split experts: each rank has the adapters of its own experts, files have all ---


def holders(parts: ExpertShards) -> dict[int, int]:
    """First expert of a part -> the first rank that has it; empty if nothing is split. A collective."""
    if not parts.held:
        return {}
    firsts = gather(next(iter(parts.held.values())).first)
    return {first: firsts.index(first) for first in sorted(firsts)}


def gather_parts(parts: ExpertShards, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Tensor]:
    """Each tensor with all ranks' parts, in host memory of its own, on rank 0; elsewhere this rank's. A collective.

    One tensor at a time: the adapter of many experts fits the host, not beside the model on its GPU. By way of the
    host, too: NCCL would open a channel, with buffers on the GPU, between rank 0 and every other at the first save.
    """
    rank_of = holders(parts)
    for name, tensor in tensors:
        part = parts.of(name)
        if part is not None and rank() == 0:
            yield _put_together(name, tensor, part, rank_of)
        else:
            if part is not None and rank_of[part.first] == rank():
                dist.send(tensor.detach().contiguous().cpu(), 0)
            yield tensor if rank() else copied(tensor)


def _put_together(name: str, tensor: Tensor, part: ExpertShard, rank_of: dict[int, int]) -> Tensor:
    ways = part.total // part.count
    rows, columns = tensor.shape
    shape = (ways * rows, columns) if ".lora_A." in name else (rows, ways * columns)
    full = torch.empty(shape, dtype=tensor.dtype)
    for first, holder in rank_of.items():
        piece = tensor.detach()
        if holder:
            piece = torch.empty_like(piece, device="cpu", memory_format=torch.contiguous_format)
            dist.recv(piece, holder)
        by_expert(name, full, part.total)[first : first + part.count] = by_expert(name, piece, part.count).cpu()
    return full


def copied(value: Any) -> Any:
    """The same structure with its tensors in host memory of their own."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(each) for each in value)
    return value


def full_optimizer_state(optimizer: torch.optim.Optimizer, model: PeftModel, parts: ExpertShards) -> dict[str, Any]:
    """With the parts of all ranks put together, in host memory of its own, on rank 0. A collective."""
    state = optimizer.state_dict()
    split = list(_split_tensors(optimizer, model, parts, state))
    full = list(gather_parts(parts, ((name, state["state"][index][key]) for name, index, key in split)))
    if rank():
        return state
    taken = {(index, key) for _, index, key in split}
    rest = {
        index: {key: value for key, value in each.items() if (index, key) not in taken}
        for index, each in state["state"].items()
    }
    copy: dict[str, Any] = copied({**state, "state": rest})
    for (_, index, key), tensor in zip(split, full, strict=True):
        copy["state"][index][key] = tensor
    return copy


def load_optimizer(optimizer: torch.optim.Optimizer, scheduler: Any, folder: Path, model: PeftModel) -> None:
    saved = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)["optimizer"]
    parts, own = ExpertShards(model), dict(saved["state"])
    for name, index, key in _split_tensors(optimizer, model, parts, saved):
        own[index] = {**own[index], key: parts.own(name, own[index][key])}
    optimizer.load_state_dict({**saved, "state": own})
    scheduler.load_state_dict(json.loads((folder / SCHEDULER).read_text()))


def _split_tensors(
    optimizer: torch.optim.Optimizer, model: PeftModel, parts: ExpertShards, state: dict[str, Any]
) -> Iterator[tuple[str, Any, str]]:
    """Name, number and key of every tensor of the optimizer's state that goes with a split parameter."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [index for group in state["param_groups"] for index in group["params"]]
    for parameter, index in zip(held, numbers, strict=True):
        name = names[id(parameter)]
        part = parts.of(name)
        for key, value in state["state"].get(index, {}).items() if part else ():
            if not isinstance(value, Tensor) or value.ndim == 0:
                continue
            if part is None or value.numel() not in (parameter.numel(), parameter.numel() * part.total // part.count):
                raise RunError(
                    f"the optimizer's {key} of {name} is not of its shape: split experts' can't be put together",
                    "train.optim",
                    "use adamw_torch",
                )
            yield name, index, key


# --- random numbers: every generator that training draws from ---


def random_state() -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state().tolist(),
        # This rank's own GPU alone: how many others its node has may differ where a run goes on.
        "cuda": torch.cuda.get_rng_state().tolist() if torch.cuda.is_available() else [],
    }


def restore_random(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))


def load_random(folder: Path) -> None:
    """The random state of this rank. With more ranks than it was saved by, the last one's for the new ones."""
    states = json.loads((folder / RANDOM).read_text())
    restore_random(states[min(rank(), len(states) - 1)])


# --- folders: sealed with hashes; found by their step, never by the clock ---


def seal(partial: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, with the hash of every other file and of itself."""
    full = json.loads(json.dumps({**manifest, "sha256": _hashes(partial)}, default=str))
    (partial / MANIFEST).write_text(json.dumps({**full, SEAL: _seal(full)}, indent=2))


def damage(folder: Path) -> str:
    """Why this folder can't be used; empty if it is as it was written."""
    try:
        manifest = read_manifest(folder)
        given, expected = manifest.pop(SEAL, None), manifest["sha256"]
        if given != _seal(manifest):
            return f"{MANIFEST} is not what was written"
        found = _hashes(folder)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return f"its manifest can't be read ({error})"
    wrong = sorted(name for name in expected if found.get(name) != expected[name])
    return f"{wrong[0]} is {'not what was written' if wrong[0] in found else 'missing'}" if wrong else ""


def _hashes(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST):
        with path.open("rb") as file:
            found[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    return manifest


def read_state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / STATE).read_text())
    return state


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def saved(checkpoints: Path) -> list[Path]:
    """Oldest first."""
    named = (path for path in checkpoints.glob("step-*") if path.name.removeprefix("step-").isdigit())
    return sorted(named, key=step_of)


def best_of(folders: Iterable[Path]) -> Path | None:
    """The checkpoint with the lowest evaluation loss; of equal ones the earliest. None: none was evaluated."""
    scored = [(loss, step_of(folder), folder) for folder in folders if (loss := evaluated(folder)) < math.inf]
    return min(scored)[2] if scored else None


def evaluated(folder: Path) -> float:
    """The evaluation loss at this checkpoint's step; infinite if there was none."""
    try:
        loss = read_manifest(folder).get("eval_loss")
    except (OSError, ValueError):
        return math.inf
    return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else math.inf


def prune(checkpoints: Path, limit: int | None) -> None:
    """Keep the newest `limit`, and the best one."""
    if limit:
        best = best_of(saved(checkpoints))
        for folder in saved(checkpoints)[:-limit]:
            if folder != best:
                discard_dir(folder)


def point_to_best(run_folder: Path) -> None:
    """Let `best` in the run folder lead to the best checkpoint; readers see the old one or the new one."""
    if best := best_of(saved(run_folder / "checkpoints")):
        link = run_folder / ".best.partial"
        link.unlink(missing_ok=True)
        link.symlink_to(best.relative_to(run_folder), target_is_directory=True)
        link.replace(run_folder / "best")


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that it is neither resumed from nor counted; its files are kept."""
    aside = folder.with_name(f"damaged-{folder.name}")
    if aside.exists():
        discard_dir(aside)
    folder.rename(aside)
    return aside


def sweep(checkpoints: Path) -> None:
    """Delete what crashes left half written or half deleted."""
    for left in (*checkpoints.glob(".*.partial"), *checkpoints.glob(".*.discarded")):
        shutil.rmtree(left, ignore_errors=True)
