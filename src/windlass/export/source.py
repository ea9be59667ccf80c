"""Find what to export: a run folder's best adapter, or the adapter folder itself; its base model; claim a folder."""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final

from windlass.errors import UserError
from windlass.files import read_json, write_json
from windlass.hardware import GIB
from windlass.model import Base, find_base
from windlass.model.base import find_fetched_folder
from windlass.run_folder import ADAPTER as WEIGHTS_FILE
from windlass.run_folder import ADAPTER_CONFIG, BASE_MODEL, CHECKPOINTS, FINAL, MANIFEST, PROBE, list_trials
from windlass.train.checkpoint.folder import find_best, find_damage, list_checkpoints, read_eval_loss
from windlass.weights.same_base import require_same_base

CONFIG: Final = ADAPTER_CONFIG
WEIGHTS: Final = WEIGHTS_FILE
EXPORT: Final = "export.json"  # what was exported, and the result of its proof
ADAPTER: Final = "adapter"  # kinds of export
MERGED: Final = "merged"
# The adapter's files that are needed to use it. Optimizer, scheduler and random state belong to the run.
COMPANIONS: Final = ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab*", "merges.txt", "*.model")
RESERVE: Final = 2**26  # bytes of disk reserved for tokenizer, config, card


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """One adapter, why it was chosen, what is known about its run, and which base the user names for it."""

    folder: Path
    why: str
    config: dict[str, Any]  # adapter_config.json
    run_folder: Path | None = None
    manifest: dict[str, Any] = field(default_factory=dict)  # the run's: run, versions, git
    base: str | None = None  # its folder, instead of the one that the adapter names
    allow_other_base: bool = False

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS

    @property
    def base_name(self) -> str:
        """Return what the base is named by: a folder, or a name on the hub; empty if nothing names it."""
        return self.base or str(self.config.get("base_model_name_or_path") or "")

    @property
    def base_setting(self) -> str:
        """Return the option or the file that names the base, for errors."""
        return "--base" if self.base else str(self.folder / CONFIG)

    def require_same_base(self, base: Base, digest: str, say: Callable[[str], None]) -> str:
        allow_other = self.allow_other_base
        return require_same_base(self.folder, base, digest, self.base_setting, allow_other=allow_other, say=say)


def choose_adapter(path: Path, base: str | None = None, *, allow_other_base: bool = False) -> AdapterSource:
    """Find the adapter of a run folder, of one of its checkpoints, of `final`, or one that PEFT saved."""
    if not path.is_dir():
        hint = "name a run folder, or a folder that holds an adapter"
        raise UserError("no such folder", str(path), hint, "no-such-folder")
    run_folder: Path | None = None
    if (path / CONFIG).is_file():
        folder = path
        why = "the folder that was named"
        parents = (path.resolve().parent, path.resolve().parent.parent)  # run/final, run/checkpoints/step-N
        run_folder = next((parent for parent in parents if "run" in read_json(parent / MANIFEST)), None)
    elif trials := list_trials(path):
        hint = f"name one of its trials: {', '.join(map(str, trials))}"
        raise UserError("it is a sweep, whose adapters are in its trials", str(path), hint, "is-a-sweep")
    elif (path / MANIFEST).is_file():
        folder, why = _choose_best(path)
        run_folder = path
    else:
        hint = f"a run folder contains {MANIFEST}; an adapter's folder {CONFIG}, as PEFT and windlass write it"
        raise UserError("it is neither a run folder nor an adapter", str(path), hint, "no-adapter")
    config = read_json(folder / CONFIG)
    if not config:
        hint = "export from another checkpoint of the run"
        raise UserError("it is not JSON, or empty", str(folder / CONFIG), hint, "not-json")
    if not (folder / WEIGHTS).is_file():
        hint = "adapters are read from safetensors only: save it again with PEFT's save_pretrained"
        raise UserError(f"the adapter has no {WEIGHTS}", str(folder), hint, "incomplete-adapter")
    manifest = read_json(run_folder / MANIFEST) if run_folder else {}
    return AdapterSource(folder, why, config, run_folder, manifest, base, allow_other_base)


def _choose_best(run: Path) -> tuple[Path, str]:
    """Return the undamaged checkpoint with the lowest evaluation loss; without evaluations the run's final adapter."""
    damage_by_folder = {folder: find_damage(folder) for folder in list_checkpoints(run / CHECKPOINTS)}
    intact = [folder for folder, damage in damage_by_folder.items() if not damage]
    skipped = "".join(f"; skipped {folder.name}: {damage}" for folder, damage in damage_by_folder.items() if damage)
    lowest = find_best(intact)
    if lowest:
        losses = [loss for loss in map(read_eval_loss, intact) if math.isfinite(loss)]
        return lowest, f"lowest evaluation loss of {len(losses)} saved: {min(losses):.4f} at {lowest.name}{skipped}"
    if (run / FINAL / CONFIG).is_file():
        return run / FINAL, f"the run's last step: no intact checkpoint was evaluated{skipped}"
    if intact:
        return intact[-1], f"the newest intact checkpoint, {intact[-1].name}: the run has not finished{skipped}"
    hint = "let it reach its first save (train.save_steps)"
    raise UserError(f"the run has no intact adapter{skipped}", str(run), hint, "no-intact-checkpoint")


def find_local_base(source: AdapterSource) -> Base | None:
    """Return the model that the adapter was trained on, if its weights are on this machine."""
    name = source.base_name
    if not name or not (source.base or Path(name).exists() or find_fetched_folder(name)):  # a name alone is no folder
        return None
    local = find_base(name, source.base_setting)
    return local if local.path else None


def require_local_base(source: AdapterSource) -> Base:
    """Return the same, or raise an error."""
    local = find_local_base(source)
    if local is not None:
        return local
    name = source.base_name
    problem = f"the weights of the base model {name} are not on this machine" if name else "it names no base model"
    hint = "name the folder that holds its weights: --base DIR"
    raise UserError(problem, source.base_setting, hint, "base-not-here")


def public_base_name(source: AdapterSource) -> str:
    """Return the base model's name for use on other machines: never a local path."""
    path = Path(source.base_name or "unknown")
    if path.parent.name == "snapshots":  # the hub's cache: models--org--name/snapshots/hash
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    if not path.is_absolute() and not path.exists():
        return str(path)  # a hub id
    return path.resolve().name


def locate_base(source: AdapterSource, name: str) -> str:
    """Return what PEFT opens the base model by: its name on the hub, or the absolute path of a folder that has none."""
    path = Path(source.base_name or "unknown")
    return str(path.resolve()) if path.resolve().name == name and path.is_dir() else name


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
