"""What is exported: from a run folder its best checkpoint's adapter, or the adapter folder itself; and its base."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windlass.errors import UserError
from windlass.model import Base, find_base
from windlass.observe import steps
from windlass.train import checkpoint as checkpoints

CONFIG, WEIGHTS = "adapter_config.json", checkpoints.ADAPTER


@dataclass(frozen=True, slots=True)
class Chosen:
    """One adapter, why this one, and what is known of the run that made it."""

    folder: Path
    why: str
    config: dict[str, Any]  # adapter_config.json
    run_folder: Path | None = None
    manifest: dict[str, Any] = field(default_factory=dict)  # the run's: run, versions, git

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS


def choose(source: Path) -> Chosen:
    """The adapter that `source` names: a run folder, one of its checkpoints, `final`, or any PEFT adapter."""
    if not source.is_dir():
        raise UserError("there is no such folder", str(source), "name a run folder, or a folder that holds an adapter")
    if (source / CONFIG).is_file():
        run_folder = _run_of(source)
        return _chosen(source, "the folder that was named", run_folder)
    if not (source / steps.MANIFEST).is_file():
        hint = (
            "a run folder holds manifest.json; an adapter's folder adapter_config.json, as PEFT and windlass write it"
        )
        raise UserError("it is neither a run folder nor an adapter", str(source), hint)
    folder, why = _best(source)
    return _chosen(folder, why, source)


def _run_of(adapter: Path) -> Path | None:
    """The run folder that an adapter's folder lies in: run/final, run/checkpoints/step-N."""
    for folder in (adapter.resolve().parent, adapter.resolve().parent.parent):
        if "run" in steps.read(folder / steps.MANIFEST):
            return folder
    return None


def _best(run: Path) -> tuple[Path, str]:
    """The whole checkpoint with the lowest evaluation loss; without evaluations the run's final adapter."""
    state = {folder: checkpoints.damage(folder) for folder in checkpoints.saved(run / "checkpoints")}
    whole = [folder for folder, damage in state.items() if not damage]
    passed = "".join(f"; passed over {folder.name}: {damage}" for folder, damage in state.items() if damage)
    losses = [loss for folder in whole if math.isfinite(loss := checkpoints.evaluated(folder))]
    if lowest := checkpoints.best_of(whole):
        return lowest, f"lowest evaluation loss of {len(losses)} saved: {min(losses):.4f} at {lowest.name}{passed}"
    if (run / "final" / CONFIG).is_file():
        return run / "final", f"the run's last step: no whole checkpoint was evaluated{passed}"
    if whole:
        return whole[-1], f"the newest whole checkpoint, {whole[-1].name}: the run has not finished{passed}"
    raise UserError(
        f"the run has saved no adapter that is whole{passed}",
        str(run),
        "let it reach its first save (train.save_steps)",
    )


def evaluations(run: Path) -> dict[int, float]:
    """Evaluation loss by step as the log has it, the latest where a step was evaluated twice: for the model card."""
    path = run / steps.EVENTS
    found: dict[int, float] = {}
    for event in steps.lines(path) if path.is_file() else ():
        step, loss = event.get("step"), event.get("eval_loss")
        if isinstance(step, int) and isinstance(loss, int | float) and math.isfinite(loss):
            found[step] = float(loss)
    return found


def _chosen(folder: Path, why: str, run: Path | None) -> Chosen:
    config = steps.read(folder / CONFIG)
    if not config:
        raise UserError("it is not JSON, or empty", str(folder / CONFIG), "export from another checkpoint of the run")
    if not (folder / WEIGHTS).is_file():
        raise UserError(
            f"the adapter has no {WEIGHTS}",
            str(folder),
            "adapters are read from safetensors only: save it again with PEFT's save_pretrained",
        )
    manifest = steps.read(run / steps.MANIFEST) if run else {}
    return Chosen(folder, why, config, run, manifest)


def base_of(chosen: Chosen, base: str | None) -> Base:
    """The model that the adapter was trained on, with its weights."""
    named = base or chosen.config.get("base_model_name_or_path") or ""
    where = "--base" if base else str(chosen.folder / CONFIG)
    if not named:
        raise UserError("the adapter does not name its base model", where, "name the base model's folder: --base DIR")
    checkpoint = (
        find_base(named, where) if base or Path(named).exists() else None
    )  # an export names its base, and no folder
    if checkpoint is None or checkpoint.path is None:
        hint = "name the folder that holds its weights: --base DIR"
        raise UserError(f"the weights of the base model {named} are not on this machine", where, hint)
    return checkpoint


def base_name(chosen: Chosen, base: str | None, given: str | None) -> str:
    """What the base model is called, in words that mean something on another machine: never a local path."""
    if given:
        return given
    named = Path(base or str(chosen.config.get("base_model_name_or_path") or "unknown"))
    if named.parent.name == "snapshots":  # the hub's cache: models--org--name/snapshots/hash
        return named.parent.parent.name.removeprefix("models--").replace("--", "/")
    if not named.is_absolute() and not named.exists():
        return str(named)  # a hub id
    return named.resolve().name
