"""What transformers would build from a config.json: shipped, beside the model, cached, or derived where torch is."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from windlass.errors import Problem, UserError, raise_all
from windlass.files import write_json

SHIPPED: Final = Path(__file__).with_name("descriptions")
CODE: Final = Path(__file__).parents[1] / "derive.py"  # what another one found is not asked
BESIDE: Final = "windlass.json"  # in a model's folder
# Entries of config.json that no name, shape or class depends on.
ASIDE: Final = (
    *("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "quantization_config"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "attention_dropout", "architectures"),
    *("max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "rms_norm_eps", "auto_map"),
)


def digest(config: Mapping[str, Any]) -> str:
    """The same for configs of the same model, whatever else they say."""

    def bare(table: Mapping[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in table.items() if key not in ASIDE}
        return {key: bare(value) if isinstance(value, dict) else value for key, value in kept.items()}

    return hashlib.sha256(json.dumps(bare(config), sort_keys=True).encode()).hexdigest()[:16]


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "windlass" / "models"


def find_description(config: Mapping[str, Any], where: str, folder: Path | None = None) -> dict[str, Any]:
    """The description of this config. Derived in a process of its own: torch takes seconds, and memory."""
    key, code = digest(config), hashlib.sha256(CODE.read_bytes()).hexdigest()[:8]
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    cached = cache_folder() / f"{key}-{version}-{code}.json"
    beside = folder / BESIDE if folder else cached
    for file in (SHIPPED / f"{key}.json", cached, beside):
        try:
            found: dict[str, Any] = json.loads(file.read_text())
            if found.get("config") == key:
                return found
        except (OSError, ValueError):
            continue
    if not all(importlib.util.find_spec(name) for name in ("torch", "transformers", "peft")):
        place = folder or Path(where).parent
        what = f"windlass has no description of this {config.get('model_type')} model, and there is no torch here"
        hint = f"where torch is, run: python -m windlass.derive {place} > {BESIDE}; then copy {BESIDE} into {place}"
        raise UserError(what, where, hint)
    found = _derive(config, where)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_json(cached, found)
    except OSError:
        pass  # it is derived again
    return found


def _derive(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    if "transformers" in sys.modules:
        found: dict[str, Any] = importlib.import_module("windlass.derive").derive(config, where)
        return found
    command = [sys.executable, "-m", "windlass.derive", "-", where]
    done = subprocess.run(command, input=json.dumps(config), capture_output=True, text=True, check=False)
    try:
        found = json.loads(done.stdout)
    except ValueError:
        why = (done.stderr.strip().splitlines() or ["no output"])[-1][:200]
        raise UserError(
            f"transformers can't describe it: {why}", where, "install the versions of constraints.txt"
        ) from None
    raise_all([Problem(**each) for each in found.get("problems", ())])
    return found
