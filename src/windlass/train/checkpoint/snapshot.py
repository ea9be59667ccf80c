"""Checkpoints: the adapter and everything needed to resume as if nothing had happened.

`checkpoints/step-N/` holds the adapter in PEFT's format, optimizer.pt, scheduler.json, random.json (for every rank),
trainer_state.json (counters, log) and manifest.json: the run, the step, the evaluation loss, and the SHA-256 of every
other file. A folder without a matching manifest is no checkpoint. Files hold the adapters of all experts however these
are split over ranks, so any layout and number of ranks can resume.
"""

import copy
import errno
import io
import json
import os
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from peft import PeftConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from windlass.errors import RunError, UserError
from windlass.files import read_json
from windlass.ranks.collectives import all_gather, get_rank
from windlass.run_folder import ADAPTER, BASE_MODEL, MANIFEST, describe_files, read_manifest
from windlass.train.checkpoint.folder import find_damage, seal_checkpoint
from windlass.train.fsdp import reshard, shard_like
from windlass.weights.expert_shards import AdapterShards, ExpertShard, find_shard_holders, view_by_expert

OPTIMIZER: Final = "optimizer.pt"
SCHEDULER: Final = "scheduler.json"
RANDOM: Final = "random.json"
STATE: Final = "trainer_state.json"  # the name that other tools look for


# --- saved: copied to host memory at once, written while training goes on ---


@dataclass(frozen=True)
class Snapshot:
    """A copy in host memory: training may go on changing the tensors it was made from."""

    step: int
    adapter: dict[str, Tensor]
    config: PeftConfig
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    random: list[dict[str, Any]]  # by rank
    state: dict[str, Any]
    manifest: dict[str, Any]

    def write(self, partial: Path) -> None:
        """Write into an empty folder, the manifest last."""
        write_adapter(self.adapter, self.config, partial)
        saved = io.BytesIO()  # writing to a file, torch.save hides a full disk behind an error of its own
        torch.save({"optimizer": self.optimizer}, saved)
        (partial / OPTIMIZER).write_bytes(saved.getbuffer())
        (partial / SCHEDULER).write_text(json.dumps(self.scheduler, default=str))
        (partial / RANDOM).write_text(json.dumps(self.random))
        (partial / STATE).write_text(json.dumps(self.state, indent=2, sort_keys=True))
        seal_checkpoint(partial, {**self.manifest, "step": self.step})


@dataclass(frozen=True, slots=True)
class TrainerState:
    """A run's counters and log after a step."""

    step: int
    epoch: float
    max_steps: int
    tokens: int  # trained on by all ranks since the run began
    log_history: tuple[dict[str, Any], ...]
    eval_loss: float | None  # at this step
    evaluation_due: bool  # it was skipped to stop in time
    unlogged: tuple[float, ...] = ()  # losses of the steps since the last log

    def as_dict(self) -> dict[str, Any]:
        """Return trainer_state.json, with the names that other tools look for."""
        return {
            "global_step": self.step,
            "epoch": self.epoch,
            "max_steps": self.max_steps,
            "num_input_tokens_seen": self.tokens,
            "log_history": list(self.log_history),
        }


def take_snapshot(
    step: int,
    *,
    model: PeftModel,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    state: dict[str, Any],
    manifest: dict[str, Any],
) -> Snapshot | None:
    """Copy everything to host memory, which is all that training waits for. A collective; rank 0 gets the copy."""
    generators = all_gather(get_random_state())
    experts = ExpertGatherer(model)
    adapter = {name: experts.gather(name, tensor) for name, tensor in adapter_state(model).items()}
    optimizer_state = optimizer.state_dict()
    names = _parameter_names(optimizer, model)
    parameter_states = {
        index: {key: experts.gather(names[index], value, key) for key, value in values.items()}
        for index, values in optimizer_state["state"].items()
    }
    if get_rank():
        return None
    optimizer_state = {**copy.deepcopy({**optimizer_state, "state": {}}), "state": parameter_states}
    return Snapshot(
        step, adapter, adapter_config(model), optimizer_state, scheduler.state_dict(), generators, state, manifest
    )


def restore_checkpoint(
    folder: Path, model: PeftModel, optimizer: torch.optim.Optimizer, scheduler: Any
) -> TrainerState:
    """Load a checkpoint, to continue after its step."""
    manifest = read_manifest(folder)
    state = read_json(folder / STATE)
    load_adapter(model, folder)
    load_optimizer(optimizer, scheduler, folder, model)
    generators = json.loads((folder / RANDOM).read_text())
    set_random_state(generators[min(get_rank(), len(generators) - 1)])  # ranks beyond those that saved: the last one's
    return TrainerState(
        manifest["step"],
        state["epoch"],
        state["max_steps"],
        state["num_input_tokens_seen"],
        tuple(state["log_history"]),
        manifest.get("eval_loss"),
        manifest["evaluation_due"],
        tuple(manifest.get("unlogged", ())),
    )


def load_optimizer(optimizer: torch.optim.Optimizer, scheduler: Any, folder: Path, model: PeftModel) -> None:
    saved = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)["optimizer"]
    reshard(model)
    names = _parameter_names(optimizer, model)
    experts = ExpertGatherer(model)
    for index, values in saved["state"].items():
        name = names[index]
        for key, value in values.items():
            part = experts.own_part(name, value, key)
            if part:
                values[key] = part.cut(name, value)
            elif isinstance(value, Tensor):
                values[key] = shard_like(model, {name: value})[name]
    optimizer.load_state_dict(saved)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in saved["state"].items():  # torch casts a state to its parameter's dtype: Adafactor's is float32
        state = optimizer.state[parameters[index]]
        state |= {
            key: value.to(state[key].device)
            for key, value in values.items()
            if isinstance(value, Tensor) and state[key].dtype != value.dtype
        }
    scheduler.load_state_dict(json.loads((folder / SCHEDULER).read_text()))


def _parameter_names(optimizer: torch.optim.Optimizer, model: PeftModel) -> list[str]:
    """Return names in the order in which the optimizer's state numbers the parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


# --- the adapter's file ---


def adapter_state(model: PeftModel) -> dict[str, Tensor]:
    """Return the trained tensors as this rank has them, by their names in PEFT's files.

    (`save_pretrained` would gather the full model's state, a collective under FSDP2, and ask the hub whether the
    vocabulary has grown.)
    """
    reshard(model)
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    in_full = {name: p for name, p in trained.items() if "lora_" not in name}  # weights of the base
    return in_full | dict(get_peft_model_state_dict(model, state_dict=trained, save_embedding_layers=False))


def adapter_config(model: PeftModel) -> PeftConfig:
    """Return the adapter's configuration with full module names: PEFT's shortened ones match a vision tower too."""
    config = copy.copy(model.peft_config[model.active_adapter])
    config.inference_mode = True
    config.target_modules = sorted(model.base_model.targeted_module_names)
    return config


def save_adapter(model: PeftModel, folder: Path) -> None:
    """Save in the format that plain PEFT opens. A collective; rank 0 writes."""
    experts = ExpertGatherer(model)
    state = {name: experts.gather(name, tensor) for name, tensor in adapter_state(model).items()}
    if get_rank() == 0:
        write_adapter(state, adapter_config(model), folder)


def write_adapter(state: dict[str, Tensor], config: PeftConfig, folder: Path) -> None:
    """Write the files, read the tensors back and compare them bit by bit."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(state, folder / ADAPTER, {"format": "pt"})
    config.save_pretrained(str(folder))
    with safe_open(folder / ADAPTER, "pt") as file:
        differing = [name for name, tensor in state.items() if not _same_bits(file.get_tensor(name), tensor)]
    if differing:
        raise RunError(
            f"{len(differing)} tensors in {folder / ADAPTER} are not what was written: {differing[0]}",
            str(folder),
            "the storage, its driver or this node's memory changed it",
            "not-as-written",
        )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8))


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, raising the system's own error (such as a full disk), which the library wraps."""
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
    except SafetensorError as error:
        raise find_system_error(error, path) or OSError(errno.EIO, os.strerror(errno.EIO), str(path)) from None
    path.chmod(0o644)  # the library ignores the umask and makes the file readable by its owner only


def find_system_error(error: Exception, path: Path) -> OSError | None:
    """Return the system's error (such as a full disk) that a library in Rust has wrapped in its own."""
    number = re.search(r"os error (\d+)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1])), str(path)) if number else None


def load_adapter(model: PeftModel, folder: Path) -> None:
    """Load an adapter; each rank keeps its own part of split experts."""
    parts = AdapterShards(model)
    reshard(model)
    with safe_open(folder / ADAPTER, "pt") as file:  # one at a time to bound memory: every rank reads them all
        state = {name: parts.cut(name, file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    outcome = set_peft_model_state_dict(model, shard_like(model, state))
    wrong = [*(key for key in outcome.missing_keys if "lora_" in key), *outcome.unexpected_keys]
    if wrong:
        raise RunError(
            f"{folder} contains another adapter than this run's: {wrong[0]}",
            str(folder),
            "train into a new folder, or put the lora section back as it was",
            "other-adapter",
        )


def require_intact(adapter: Path) -> None:
    """Refuse an adapter that was damaged or changed since it was saved, or that has non-finite values."""
    damage = find_damage(adapter) if (adapter / MANIFEST).is_file() else ""
    sealed_by = MANIFEST
    recorded = read_json(adapter / BASE_MODEL).get("files")
    if recorded:
        sealed_by = BASE_MODEL
        now = describe_files(adapter)["files"]
        changed = [name for name, digest in recorded.items() if now.get(name) != digest]
        damage = f"{', '.join(changed)}: not what was written" if changed else ""
    if damage:
        hint = f"copy the folder again; if the change is meant, remove {sealed_by} from it"
        raise UserError(damage, str(adapter), hint, "not-as-written")
    with safe_open(adapter / ADAPTER, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            if not bool(file.get_tensor(name).isfinite().all()):
                problem = f"{name} contains values that are not finite numbers"
                raise UserError(problem, str(adapter / ADAPTER), "take an earlier checkpoint of the run", "not-finite")


class ExpertGatherer:
    """Assembles split experts' tensors: each rank has its own experts', files have all. A collective.

    One tensor at a time, because the adapter of many experts fits in host memory but not on the GPU next to the model.
    Tensors travel through the host: NCCL would open a channel, with buffers on the GPU, between rank 0 and every other
    rank at the first save.
    """

    def __init__(self, model: PeftModel) -> None:
        self.parts = AdapterShards(model)
        self.numel = {name: parameter.numel() for name, parameter in model.named_parameters()}
        self.rank_of = find_shard_holders(self.parts)

    def own_part(self, name: str, value: Any, key: str = "") -> ExpertShard | None:
        """Return which part of this tensor (`key`: of its optimizer state) the rank has; None if it isn't split."""
        part = self.parts.of(name)
        if part is None or not isinstance(value, Tensor) or value.ndim == 0:
            return None
        if key and value.numel() not in (self.numel[name], self.numel[name] * part.total // part.count):
            raise RunError(
                f"the optimizer's {key} of {name} is not of its shape: split experts' can't be put together",
                "train.optim",
                "use adamw_torch",
                "optimizer-shape",
            )
        return part

    def gather(self, name: str, value: Any, key: str = "") -> Any:
        """Return the full tensor, on rank 0 as a copy in host memory."""
        value = value.full_tensor() if isinstance(value, DTensor) else value
        part = self.own_part(name, value, key)
        if get_rank():
            if part and self.rank_of[part.first] == get_rank():
                dist.send(value.detach().contiguous().cpu(), 0)
            return value
        if part is None:
            return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
        value = value.detach()
        rows, columns = value.shape
        ways = part.total // part.count
        shape = (ways * rows, columns) if ".lora_A." in name else (rows, ways * columns)
        full = torch.empty(shape, dtype=value.dtype)
        for first, holder in self.rank_of.items():
            piece = value
            if holder:
                piece = torch.empty((rows, columns), dtype=value.dtype)
                dist.recv(piece, holder)
            view_by_expert(name, full, part.total)[first : first + part.count] = view_by_expert(
                name, piece, part.count
            ).cpu()
        return full


# --- random numbers: every generator that training draws from ---


def get_random_state() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
        # Only this rank's GPU: a resumed run's nodes may have another number of GPUs.
        "cuda": torch.cuda.get_rng_state().tolist() if torch.cuda.is_available() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))
