"""The plan of a run of `kind: script`: how and where it is started. Its memory and time are unknown beforehand."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass import __version__
from windlass.errors import UserError, Where
from windlass.files import write_json
from windlass.hardware import Machine
from windlass.plan.layout import OPEN, Layout
from windlass.plan.machine import find_machine
from windlass.plan.make import make_plan
from windlass.plan.plan import Plan
from windlass.run_folder import PLAN, is_free
from windlass.runfile import Loaded, LoadedScript, ScriptRun

UNKNOWN = "a script's memory and time are not known before it runs: `windlass report RUN_DIR` shows them afterwards"


@dataclass(frozen=True, slots=True)
class ScriptPlan:
    """The plan of a script's run, as far as it is known before a GPU is reserved."""

    loaded: LoadedScript
    machine: Machine
    layout: Layout  # the script decides how its ranks work together
    notes: tuple[str, ...]

    @property
    def run(self) -> ScriptRun:
        return self.loaded.run

    @property
    def where(self) -> Where:
        return self.loaded.where

    @property
    def file(self) -> Path:
        return self.loaded.path

    @property
    def folder(self) -> Path:
        return Path(self.run.folder)

    @property
    def command(self) -> list[str]:
        return ["python", *self.run.command]

    def as_dict(self) -> dict[str, Any]:
        """Return those keys of a language model's plan that apply to a script; unknown values are None."""
        script = self.run.script
        gpu_gib = self.machine.gpu.memory_gib
        return {
            "windlass": __version__,
            "kind": "script",
            "script": {"path": script.path, "module": script.module, "args": script.args, "command": self.command},
            "memory": {"gpu_gib": None, "host_gib": None, "gpu_memory_gib": gpu_gib, "fits": None, "remedy": ""},
            "layout": {key: getattr(self.layout, key) for key in ("nodes", "gpus_per_node", "name", "ranks")},
            "estimate": {"step_seconds": None, "hours": None, "gpu_hours": None},
            "notes": list(self.notes),
        }


AnyPlan = Plan | ScriptPlan


def make_any_plan(loaded: Loaded | LoadedScript, *, is_here: bool = False) -> AnyPlan:
    """Plan a run file of any kind. `is_here`: it is trained by the libraries of this process."""
    if isinstance(loaded, Loaded):
        return make_plan(loaded, is_here=is_here)
    # cluster.nodes x cluster.gpus_per_node ranks; if neither is set, layout.ranks on one machine.
    cluster = loaded.run.cluster
    ranks = loaded.run.layout.ranks
    nodes, gpus_per_node = cluster.size
    if ranks is not None and cluster.nodes == "auto" and cluster.gpus_per_node == "auto":
        gpus_per_node = ranks
    layout = Layout("script", "", nodes, gpus_per_node, **OPEN)
    machine = find_machine(cluster.model_copy(update={"gpus_per_node": layout.gpus_per_node}), loaded.where)
    notes = [*loaded.notes, *machine.notes]
    path = loaded.run.script.path
    if path is not None and not Path(path).is_file():  # it may exist on the platform that runs it
        problem = f"{path} is a folder" if Path(path).is_dir() else f"there is no {path} here"
        notes.append(f"{problem}: it must be there when the run starts")
    return ScriptPlan(loaded, machine, layout, (*notes, UNKNOWN))


def write_plan(plan: AnyPlan, out: Path | None) -> Path | None:
    """Write plan.json into `out`, or into the run folder if that already exists, unless a run has begun there."""
    folder = out or plan.folder
    hint = "give another --out DIR"
    try:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        if not is_free(folder):
            if out is not None:
                raise UserError("a run has begun there: its plan.json stays as it is", str(out), hint, "has-run")
            return None
        write_json(folder / PLAN, plan.as_dict())
    except OSError as error:
        text = f"cannot write {PLAN}: {error.strerror}"
        raise UserError(text, str(error.filename or folder), hint, "unwritable") from None
    return folder / PLAN
