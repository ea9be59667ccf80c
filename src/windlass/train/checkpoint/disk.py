"""Folders that are whole or not there: written under another name, flushed, sealed with their hashes, renamed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

MANIFEST = "manifest.json"
SEAL = "seal"  # of the manifest itself: it holds the hashes of everything else


def appear(partial: Path, folder: Path) -> None:
    """Flush `partial` to disk and let it take the name `folder`; what had that name is replaced."""
    flush(partial)
    if folder.exists():  # no rename replaces a folder that is not empty
        discard(folder)
    partial.rename(folder)
    flush_one(folder.parent)


def discard(folder: Path) -> None:
    """Gone from its name at once; a crash while its files are deleted leaves nothing that looks like a checkpoint."""
    aside = folder.with_name(f".{folder.name}.discarded")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def sweep(checkpoints: Path) -> None:
    """What crashes left half written or half deleted."""
    for left in (*checkpoints.glob(".*.partial"), *checkpoints.glob(".*.discarded")):
        shutil.rmtree(left, ignore_errors=True)


def seal(partial: Path, manifest: dict[str, Any]) -> None:
    """The manifest, with the hash of every other file and of itself."""
    whole = json.loads(json.dumps({**manifest, "sha256": hashes(partial)}, default=str))
    (partial / MANIFEST).write_text(json.dumps({**whole, SEAL: _seal(whole)}, indent=2))


def damage(folder: Path) -> str:
    """Why this folder can't be used; empty when it is as it was written."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        given, expected = manifest.pop(SEAL, None), manifest["sha256"]
        if given != _seal(manifest):
            return f"{MANIFEST} is not what was written"
        found = hashes(folder)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return f"its manifest can't be read ({error})"
    wrong = sorted(name for name in expected if found.get(name) != expected[name])
    return f"{wrong[0]} is {'not what was written' if wrong[0] in found else 'missing'}" if wrong else ""


def hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {str(path.relative_to(folder)): _sha256(path) for path in files}


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """safetensors wraps the system's error, a full disk among them: it is told by its number as any other."""
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code), str(path)) from None
    path.chmod(0o644)  # the library makes it readable for its owner alone, whatever the umask says


def flush(folder: Path) -> None:
    """To disk, files first, then the folder that names them."""
    for path in (*folder.rglob("*"), folder):
        flush_one(path)


def flush_one(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
