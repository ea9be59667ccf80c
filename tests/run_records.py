"""What a run folder records, to compare before and after."""

from pathlib import Path
from typing import Any

from windlass.files import read_json


def read_records(folder: Path) -> dict[str, Any]:
    """Return the files of a run or sweep by name. What a refused resume changes is left out: tokens, and how the run
    ended."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    records: dict[str, Any] = {name: content for name, content in files.items() if not name.startswith("tokens/")}
    manifest = read_json(folder / "manifest.json")
    return records | {"manifest.json": {key: manifest[key] for key in manifest if key not in ("state", "failure")}}
