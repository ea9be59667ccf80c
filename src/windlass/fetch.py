"""Fetch what a run needs from the hub to the shared volume, once, before any GPU is reserved."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from windlass.data.hub import fetch, fetch_set
from windlass.data.select import list_all_sets
from windlass.data.sources import HUB_NAME, resolve_source
from windlass.errors import UserError, Where
from windlass.files import read_json, write_json
from windlass.model import read_base
from windlass.model.files import DIGEST, PUBLISHED
from windlass.runfile import RunFile

# What transformers loads: safetensors, configs, tokenizer. Mistral's repositories hold every weight a second time as
# consolidated*.safetensors, others as .bin or original/: fetched, they would double the traffic and the disk. If a
# repository has no others, as Mistral's of NVFP4, they are fetched.
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py")
DUPLICATES = ("consolidated*", "original/*", "*.bin", "*.gguf", "*.onnx*")


def fetch_run(run: RunFile, where: Where, say: Callable[[str], None], *, headers_only: bool = False) -> dict[str, Path]:
    """Local folders of the model and the data, fetched where they are named by hub id; safe to repeat, anywhere. With
    `headers_only` what a plan needs of the model, a few MB, and no data."""
    folders = {}
    name = run.model.model_name_or_path
    if Path(name).expanduser().exists() or not HUB_NAME.fullmatch(name):
        say(f"model: {name} is a path: nothing to fetch")
    else:
        files = MODEL_FILES[1:] if headers_only else MODEL_FILES
        place = where("model.model_name_or_path")
        folders["model"] = fetch(name, "model", files, place, say, DUPLICATES, headers=headers_only)
        record_digest(folders["model"], say)
    several = bool(run.data.mix or run.data.eval or run.data.keep)
    for part in () if headers_only else list_all_sets(run.data, where):
        name = part.data.dataset_name_or_path
        if resolve_source(part.data, part.where).format == "hub":
            folders[name if several else "data"] = fetch_set(part.data, part.where, say)
        else:
            say(f"data: {name} is here: nothing to fetch")
    for title, folder in folders.items():
        say(f"{title}: {folder}")
    return folders


def record_digest(folder: Path, say: Callable[[str], None]) -> None:
    """Record, next to the files' published SHA-256, the digest that loading them must find."""
    published = read_json(folder / PUBLISHED)
    if not published or DIGEST in published or find_spec("torch") is None:
        return
    try:
        base = read_base(folder)
    except UserError:  # a model that windlass can't train: `plan` says why
        return
    if base.path is None:  # headers only
        return
    from windlass.weights.same_base import digest_files

    say("hashing the weights as training will")
    write_json(folder / PUBLISHED, {**published, DIGEST: digest_files(base)})
