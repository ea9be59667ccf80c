"""Commented run files to start from: the *.yaml beside this module; the first line of each says what it is for."""

from __future__ import annotations

from importlib.resources import files

from windlass.errors import UserError
from windlass.runfile.names import close_names


def presets() -> dict[str, str]:
    """Name and one-line summary of every start."""
    return {name: text.splitlines()[0].removeprefix("# ") for name, text in sorted(_texts().items())}


def init(preset: str = "mistral-small-4") -> str:
    """The text of a start."""
    texts = _texts()
    if preset not in texts:
        near = close_names(preset, texts) or sorted(texts)
        raise UserError(f"there is no start {preset!r}", "windlass init", f"nearest: {', '.join(near)}")
    return texts[preset]


def _texts() -> dict[str, str]:
    folder = files("windlass.runfile") / "presets"
    found = [entry for entry in folder.iterdir() if entry.name.endswith(".yaml")]
    return {entry.name.removesuffix(".yaml"): entry.read_text(encoding="utf-8") for entry in found}
