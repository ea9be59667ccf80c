"""The adapter's tensors: to a file in PEFT's own format, back again, and the file held against every rank's tensors."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import replace
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from windlass.errors import RunError
from windlass.model.targets import ExpertShards
from windlass.train.checkpoint.disk import save_tensors
from windlass.train.checkpoint.parts import holders, whole
from windlass.train.group import from_rank_0, gather, rank

ADAPTER = "adapter_model.safetensors"


def adapter_state(model: PeftModel) -> dict[str, Tensor]:
    """The trained tensors by the names of PEFT's files, as they are on this rank.

    (`save_pretrained` asks for the whole model's state, which under FSDP2 is a collective, and asks the hub whether
    the vocabulary has grown.)
    """
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return dict(get_peft_model_state_dict(model, state_dict=trained, save_embedding_layers=False))


def described(model: PeftModel) -> PeftConfig:
    """The adapter's configuration, as whoever opens the file wants it."""
    config = copy.copy(model.peft_config[model.active_adapter])
    config.inference_mode = True
    return config


def whole_adapter(model: PeftModel) -> dict[str, Tensor]:
    """The same with whole tensors where ranks hold parts: on rank 0, in host memory of their own. A collective."""
    state = adapter_state(model)
    return dict(zip(state, whole(ExpertShards(model), state.items()), strict=True))


def save_adapter(model: PeftModel, folder: Path) -> None:
    """Plain PEFT opens it. A collective; rank 0 writes."""
    state = whole_adapter(model)
    if rank() == 0:
        write_adapter(state, described(model), folder)


def write_adapter(state: dict[str, Tensor], config: PeftConfig, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(state, folder / ADAPTER, {"format": "pt"})
    config.save_pretrained(str(folder))


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
    """Open the file that was just written and hold it against the tensors of all ranks, bit by bit. A collective."""
    parts = ExpertShards(model)
    firsts = [*holders(parts)] or [0]
    written = from_rank_0(_written(load_file(folder / ADAPTER), parts, firsts) if rank() == 0 else None)
    live = {name: (parts.of(name), _fingerprint(tensor)) for name, tensor in adapter_state(model).items()}
    here = {(name, part.first if part else 0): print_ for name, (part, print_) in live.items()}
    names = {name for name, _ in written} ^ live.keys()
    mine = sorted(names | {name for (name, first), print_ in here.items() if written.get((name, first)) != print_})
    found = {i: names for i, names in enumerate(gather(mine)) if names}
    if found:
        first = min(found)
        raise RunError(
            f"{len(found[first])} tensors in {folder / ADAPTER} are not those of rank {first}: {found[first][0]}",
            str(folder),
            "the file was written and read again: the storage, its driver or this rank's memory changed it",
        )


def _written(state: dict[str, Tensor], parts: ExpertShards, firsts: list[int]) -> dict[tuple[str, int], str]:
    """A fingerprint of every tensor, or of every part that some rank holds of it, by name and first expert."""
    found = {}
    for name, tensor in state.items():
        part = parts.of(name)
        for first in firsts if part else [0]:
            found[name, first] = _fingerprint(replace(part, first=first).own(name, tensor) if part else tensor)
    return found


def _fingerprint(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {_sha256(tensor)}"


def _sha256(tensor: Tensor) -> str:
    bits = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(bits.numpy().data).hexdigest()
