"""The adapter's tensors: to a file in PEFT's own format, back again, and the file held against every rank's tensors."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from windlass.checkpoint.group import agree, gather, rank
from windlass.errors import RunError

ADAPTER = "adapter_model.safetensors"


def adapter_state(model: PeftModel) -> dict[str, Tensor]:
    """The trained tensors by the names of PEFT's files, as they are on this rank; nothing that ranks hold in parts.

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


def save_adapter(model: PeftModel, folder: Path) -> None:
    """Plain PEFT opens it. One rank calls this."""
    write_adapter({name: tensor.to("cpu") for name, tensor in adapter_state(model).items()}, described(model), folder)


def write_adapter(state: dict[str, Tensor], config: PeftConfig, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / ADAPTER, {"format": "pt"})
    except SafetensorError as error:  # it wraps the system's error; a full disk is told by its words alone
        raise OSError(str(error)) from None
    (folder / ADAPTER).chmod(0o644)  # the library makes it readable for its owner alone, whatever the umask says
    config.save_pretrained(str(folder))


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


def read_back(model: PeftModel, folder: Path) -> None:
    """Open the file that was just written and hold it against the tensors of all ranks, bit by bit. A collective."""
    state = adapter_state(model)
    written = agree(_fingerprints(load_file(folder / ADAPTER)) if rank() == 0 else None)
    live = _fingerprints(state)
    mine = sorted(name for name in written.keys() | live.keys() if written.get(name) != live.get(name))
    found = {i: names for i, names in enumerate(gather(mine)) if names}
    if found:
        first = min(found)
        raise RunError(
            f"{len(found[first])} tensors in {folder / ADAPTER} are not those of rank {first}: {found[first][0]}",
            str(folder),
            "the file was written and read again: the storage, its driver or this rank's memory changed it",
        )


def _fingerprints(state: dict[str, Tensor]) -> dict[str, str]:
    return {name: f"{t.dtype} {tuple(t.shape)} {_sha256(t)}" for name, t in state.items()}


def _sha256(tensor: Tensor) -> str:
    bits = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(bits.numpy().data).hexdigest()
