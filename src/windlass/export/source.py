"""Find what to export: a run folder's best adapter, or the adapter folder itself; and its base model."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windlass.errors import UserError
from windlass.files import read_json
from windlass.model import Base, find_base
from windlass.model.base import find_fetched_folder
from windlass.run_folder import ADAPTER, ADAPTER_CONFIG, CHECKPOINTS, FINAL, MANIFEST, list_trials
from windlass.train.checkpoint.folder import find_best, find_damage, list_checkpoints, read_eval_loss

CONFIG = ADAPTER_CONFIG
WEIGHTS = ADAPTER


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """One adapter, why it was chosen, and what is known about its run."""

    folder: Path
    why: str
    config: dict[str, Any]  # adapter_config.json
    run_folder: Path | None = None
    manifest: dict[str, Any] = field(default_factory=dict)  # the run's: run, versions, git

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS


def choose_adapter(path: Path) -> AdapterSource:
    """Find the adapter of a run folder, of one of its checkpoints, of `final`, or one that PEFT saved."""
    if not path.is_dir():
        raise UserError(
            "no such folder", str(path), "name a run folder, or a folder that holds an adapter", "no-such-folder"
        )
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
        raise UserError(
            "it is not JSON, or empty", str(folder / CONFIG), "export from another checkpoint of the run", "not-json"
        )
    if not (folder / WEIGHTS).is_file():
        hint = "adapters are read from safetensors only: save it again with PEFT's save_pretrained"
        raise UserError(f"the adapter has no {WEIGHTS}", str(folder), hint, "incomplete-adapter")
    return AdapterSource(folder, why, config, run_folder, read_json(run_folder / MANIFEST) if run_folder else {})


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


def find_local_base(source: AdapterSource, base: str | None = None) -> Base | None:
    """Return the model that the adapter was trained on, if its weights are on this machine. `base` names another
    folder."""
    name = base or source.config.get("base_model_name_or_path")
    if not name or not (base or Path(name).exists() or find_fetched_folder(name)):  # a name alone is no folder
        return None
    local = find_base(name, "--base" if base else str(source.folder / CONFIG))
    return local if local.path else None


def require_local_base(source: AdapterSource, base: str | None = None) -> Base:
    """Return the same, or raise an error."""
    local = find_local_base(source, base)
    if local is not None:
        return local
    name = base or source.config.get("base_model_name_or_path")
    problem = f"the weights of the base model {name} are not on this machine" if name else "it names no base model"
    where = "--base" if base else str(source.folder / CONFIG)
    raise UserError(problem, where, "name the folder that holds its weights: --base DIR", "base-not-here")


def public_base_name(source: AdapterSource, base: str | None, given: str | None) -> str:
    """Return the base model's name for use on other machines: never a local path."""
    if given:
        return given
    path = Path(_get_base(source, base))
    if path.parent.name == "snapshots":  # the hub's cache: models--org--name/snapshots/hash
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    if not path.is_absolute() and not path.exists():
        return str(path)  # a hub id
    return path.resolve().name


def locate_base(source: AdapterSource, base: str | None, name: str) -> str:
    """Return what PEFT opens the base model by: its name on the hub, or the absolute path of a folder that has none."""
    path = Path(_get_base(source, base))
    return str(path.resolve()) if path.resolve().name == name and path.is_dir() else name


def _get_base(source: AdapterSource, base: str | None) -> str:
    return base or str(source.config.get("base_model_name_or_path") or "unknown")
