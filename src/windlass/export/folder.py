"""The folder that an export is written to."""

import shutil
from itertools import chain
from pathlib import Path
from typing import Final

from windlass.errors import UserError
from windlass.export.source import AdapterSource
from windlass.files import read_json, write_json
from windlass.hardware import GIB
from windlass.run_folder import BASE_MODEL, PROBE

EXPORT: Final = "export.json"  # what was exported, and the result of its proof
ADAPTER: Final = "adapter"  # kinds of export
MERGED: Final = "merged"
# The adapter's files that are needed to use it. Optimizer, scheduler and random state belong to the run.
COMPANIONS: Final = ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab*", "merges.txt", "*.model")
RESERVE: Final = 2**26  # bytes of disk reserved for tokenizer, config, card


def claim_folder(source: AdapterSource, base: Path | None, to: Path, kind: str, size: int = 0) -> None:
    """Claim a new or empty folder, an earlier export of an adapter, or an interrupted merge, which then starts over."""
    for taken, title in ((base, "the base model's folder"), (source.folder, "the adapter's folder")):
        if taken is not None and to.resolve() == taken.resolve():
            raise UserError(f"it is {title}", f"--to {to}", "name a new folder", "own-folder")
    to.mkdir(parents=True, exist_ok=True)
    names = sorted(path.name for path in to.iterdir())
    earlier = read_json(to / EXPORT)
    is_finished_merge = kind == MERGED and "deviations" in earlier
    if names and (earlier.get("kind") != kind or is_finished_merge):
        content = f"{len(names)} other files ({names[0]} …)"
        if "kind" in earlier:
            content = f"a {earlier['kind']} model"
        hint = "name a new folder, or empty this one"
        raise UserError(f"the folder holds {content}", f"--to {to}", hint, "folder-taken")
    if kind == ADAPTER:  # the new one may lack what an earlier one had
        for path in chain.from_iterable(to.glob(pattern) for pattern in (*COMPANIONS, BASE_MODEL, PROBE)):
            path.unlink()
    if kind == MERGED:
        written = (to.glob(f"{name}*.safetensors*") for name in ("model", "consolidated"))
        for path in (to / "config.json", to / "params.json", *chain(*written)):
            path.unlink(missing_ok=True)
    free = shutil.disk_usage(to).free
    needed = size + RESERVE
    if free < needed:
        problem = f"the export needs {needed / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free there"
        raise UserError(problem, f"--to {to}", "free some, or name a folder on a larger volume", "no-room")
    write_json(to / EXPORT, {"kind": kind})
