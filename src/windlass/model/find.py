"""From what the run file calls a model to its checkpoint: a folder, or a known model's published config."""

from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path

from windlass.errors import UserError
from windlass.model.config import describe, list_parameters
from windlass.model.folder import read_base
from windlass.model.parameters import Base
from windlass.model.published import CONFIGS

__all__ = ["find_base", "published_base", "read_base"]


def published_base(name: str) -> Base | None:
    """A known model without its weights, or none of that name."""
    known = next((key for key in CONFIGS if key.lower() == name.lower()), None)
    if known is None:
        return None
    described = describe(CONFIGS[known], f"published config of {known}")
    return Base(
        name=known,
        path=None,
        family=described.family,
        config=described.config,
        dims=described.dims,
        parameters=tuple(list_parameters(described, tied=described.tied)),
        wrapper=described.wrapper.architecture if described.wrapper else None,
        quantization=described.quantization,
    )


def find_base(model_name_or_path: str, where: str) -> Base:
    """The checkpoint in a folder; of a known model the published config where there is no such folder."""
    try:
        path = Path(model_name_or_path).expanduser()
        folder, exists = path.is_dir(), path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        said = f"{_short(model_name_or_path)} can't be opened: {why}"
        raise UserError(said, where, "name a model folder") from None
    if folder:
        return read_base(path)
    if exists:
        raise UserError(
            f"{_short(model_name_or_path)} is a file, not a folder",
            where,
            "name the folder that holds config.json and the safetensors files",
        )
    known = published_base(path.name)
    if known is None:
        raise UserError(
            f"there is no folder {_short(model_name_or_path)}, and no config is known for {_short(path.name)}",
            where,
            f"give the folder of the checkpoint; {_nearest(path.name)}",
        )
    note = (
        f"no weights at {model_name_or_path[:200]}: planned from the published config of {known.name}; "
        "check and train will refuse this path"
    )
    return replace(known, notes=(note, *known.notes))


def _nearest(name: str) -> str:
    lower = {key.lower(): key for key in CONFIGS}
    close = difflib.get_close_matches(name.lower()[:120], lower, 3, 0.4)
    if close:
        return f"nearest published: {', '.join(lower[key] for key in close)}"
    return f"published configs are known of {', '.join(CONFIGS)}"


def _short(text: str) -> str:
    return repr(text if len(text) <= 120 else f"{text[:120]}…")
