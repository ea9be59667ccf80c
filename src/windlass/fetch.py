"""What a run takes from the hub, brought to the shared volume once, before any GPU is reserved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.data.hub import fetch, fetch_set
from windlass.data.source import resolve
from windlass.data.source.files import HUB_NAME

if TYPE_CHECKING:
    from windlass.runfile import RunFile

Say = Callable[[str], None]

# What transformers loads: safetensors, configs, tokenizer. Mistral's repositories hold every weight a second time as
# consolidated*.safetensors, others as .bin or original/: fetched, they would double the traffic and the disk.
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py")
DOUBLES = ("consolidated*", "original/*", "*.bin", "*.gguf", "*.onnx*")


def fetched(run: RunFile, where: Callable[[str], str], say: Say) -> dict[str, Path]:
    """Local folders of the model and the data, fetched where they are named by hub id; safe to repeat, anywhere."""
    found = {}
    name = run.model.model_name_or_path
    if Path(name).expanduser().exists() or not HUB_NAME.fullmatch(name):
        say(f"model: {name} is a path: nothing to fetch")
    else:
        found["model"] = fetch(name, "model", MODEL_FILES, where("model.model_name_or_path"), say, DOUBLES)
    if resolve(run.data, where).format == "hub":
        found["data"] = fetch_set(run.data, where, say)
    else:
        say(f"data: {run.data.dataset_name_or_path} is here: nothing to fetch")
    for part, folder in found.items():
        say(f"{part}: {folder}")
    return found
