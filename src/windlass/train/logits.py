"""Logits of a model with and without its adapter, and the distance between two sets of logits."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from windlass.data.packing import open_rows
from windlass.files import read_json
from windlass.model import Base
from windlass.model.family import WRAPPERS
from windlass.plan.layout import Layout
from windlass.run_folder import DATA
from windlass.train.load import load_base
from windlass.train.lora import ignore_peft_warnings, read_inner_config
from windlass.train.patches import Patches


def load_float32(base: Base) -> Any:
    return load_base(base, Layout("resident", "compared", 1, 1, shard=1), dtype=torch.float32)[0].eval()


def open_adapter(model: Any, folder: Path) -> Any:
    """Open a saved adapter with PEFT. A language model also takes one that was saved inside a wrapper."""
    from peft import PeftModel

    config, mapping = read_inner_config(folder)
    if type(model).__name__ in {wrapper.architecture for wrapper in WRAPPERS.values()}:
        config = mapping = None
    with ignore_peft_warnings():
        adapted = PeftModel.from_pretrained(model, str(folder), config=config, key_mapping=mapping).eval()
    Patches().patch_adapted_linears(adapted)
    return adapted


@torch.no_grad()
def compute_logits(model: Any, rows: Tensor) -> Tensor:
    """Return logits in float32 and host memory, wherever the model is."""
    device = next(model.parameters()).device
    return torch.cat([model(input_ids=row[None].to(device), use_cache=False).logits.float().cpu() for row in rows])


def compute_both_logits(adapted: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    with adapted.disable_adapter():
        plain = compute_logits(adapted, rows)
    return plain, compute_logits(adapted, rows)


def kl_divergence(true: Tensor, other: Tensor) -> float:
    """Return the mean over tokens, in nats."""
    return max(0.0, float(kl_by_token(true, other).mean()))


def kl_by_token(true: Tensor, other: Tensor) -> Tensor:
    p, q = (torch.log_softmax(logits.double(), -1) for logits in (true, other))
    return (p.exp() * (p - q)).sum(-1)


def sample_rows(run_folder: Path | None, vocab: int, count: int = 4, length: int = 128) -> Tensor:
    """Return tokens that a run was trained or evaluated on if they still exist, else random ones."""
    file = find_rows(run_folder)
    if file:
        data = open_rows(file)
        if "input_ids" in data.column_names:
            tokens = [token for row in data.slice(0, 256)["input_ids"].to_pylist() for token in row]
            fitting = min(length, len(tokens) // count)
            if fitting >= 2 and max(tokens) < vocab:
                return torch.tensor(tokens[: count * fitting]).view(count, fitting)
    return torch.randint(vocab, (count, length), generator=torch.Generator().manual_seed(0))


def find_rows(run_folder: Path | None) -> Path | None:
    """Return the rows that a run was evaluated on, else those that it was trained on, before those that
    `windlass best --eval-data` has left in its folder; None if there are none."""
    if run_folder is None:
        return None
    files = sorted(run_folder.glob("tokens/*/*.arrow"))
    fingerprint = read_json(run_folder / DATA).get("fingerprint")
    own = [file for file in files if read_json(file.parent / "audit.json").get("fingerprint") == fingerprint]
    return min(own or files, key=lambda file: file.stem != "validation", default=None)
