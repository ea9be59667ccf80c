"""The adapter alone, in PEFT's format: as it was saved, or in 16 bits, naming its base instead of a path."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from windlass.errors import UserError
from windlass.export.choose import CONFIG, WEIGHTS, Chosen
from windlass.export.recipe import BF16
from windlass.export.write import RECORD
from windlass.train.checkpoint import save_tensors

ADAPTER = "adapter"  # as the record of an export says
DTYPES = {BF16: torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Of the adapter's folder: what makes it usable. Optimizer, scheduler and random state are the run's own.
TAKEN = ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab*", "merges.txt", "*.model")


def write(chosen: Chosen, to: Path, base: str, dtype: str | None) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"an adapter can't be written as {dtype!r}", "--dtype", f"one of {', '.join(DTYPES)}")
    if to.resolve() == chosen.folder.resolve():
        raise UserError("it is the adapter's own folder", f"--to {to}", "name a new folder")
    try:
        to.mkdir(parents=True, exist_ok=True)
        held = sorted(path.name for path in to.iterdir())
        if held and kind_in(to) != ADAPTER:
            what = f"{len(held)} other files ({held[0]} …)" if kind_in(to) is None else f"a {kind_in(to)} model"
            raise UserError(f"the folder holds {what}", f"--to {to}", "name a new one")
        config = {**chosen.config, "base_model_name_or_path": base, "inference_mode": True}
        # PEFT writes this list as a set, in another order each time: sorted, two exports can be compared.
        if isinstance(config.get("target_modules"), list):
            config["target_modules"] = sorted(config["target_modules"])
        (to / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        if dtype is None:
            shutil.copyfile(chosen.weights, to / WEIGHTS)
        else:
            rounded = {key: tensor.to(DTYPES[dtype]) for key, tensor in load_file(chosen.weights).items()}
            save_tensors(rounded, to / WEIGHTS, {"format": "pt"})
        for path in companions(chosen):
            shutil.copyfile(path, to / path.name)
    except OSError as error:
        raise UserError(
            f"can't be written: {error.strerror}", f"--to {to}", "check that the folder can be written, and has room"
        ) from None


def kind_in(folder: Path) -> str | None:
    """What an earlier export put there."""
    try:
        return str(json.loads((folder / RECORD).read_text())["kind"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def companions(chosen: Chosen) -> list[Path]:
    """The tokenizer's files: beside the adapter, or beside the run's final one."""
    folders = [chosen.folder, *([chosen.run_folder / "final"] if chosen.run_folder else [])]
    for folder in folders:
        found = sorted({path for pattern in TAKEN for path in folder.glob(pattern)})
        if found:
            return found
    return []


def prove(chosen: Chosen, to: Path, dtype: str | None) -> list[str]:
    """Opened again: the same tensors, each the one that was saved."""
    before, after = load_file(chosen.weights), load_file(to / WEIGHTS)
    wrong = [f"{key} is missing" for key in before.keys() - after.keys()]
    wrong += [f"{key} is there, and was not saved" for key in after.keys() - before.keys()]
    for key in sorted(before.keys() & after.keys()):
        expected = before[key] if dtype is None else before[key].to(DTYPES[dtype])
        same = after[key].dtype == expected.dtype and torch.equal(after[key], expected)
        if not same:
            wrong.append(f"{key} is not what was saved")
        elif not bool(after[key].isfinite().all()):
            wrong.append(f"{key} is not finite")
    return wrong
