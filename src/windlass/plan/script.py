"""The plan of a script: how it is started, and where. What it needs is its own matter, and is said to be unknown."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from windlass import __version__
from windlass.errors import UserError
from windlass.hardware import Machine
from windlass.plan import Plan, machine_of, make, write
from windlass.plan.layout import AccelerateFile
from windlass.runfile import Loaded, LoadedScript

UNKNOWN = (
    "what a script holds in memory and how long it takes is not known before it runs: windlass report says it after"
)


@dataclass(frozen=True, slots=True)
class Spread:
    """Ranks over nodes; what they do with each other is the script's matter."""

    nodes: int
    gpus_per_node: int
    name: str = "script"

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True)
class ScriptPlan:
    """What can be known of a script's run before a GPU is reserved."""

    loaded: LoadedScript
    machine: Machine
    layout: Spread
    notes: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        return ["python", *self.loaded.run.command]

    def as_dict(self) -> dict[str, Any]:
        """The keys of a language model's plan, as far as they mean anything here; None for what is not known."""
        script = self.loaded.run.script
        return {
            "windlass": __version__,
            "kind": "script",
            "script": {"path": script.path, "module": script.module, "args": script.args, "command": self.command},
            "memory": {
                "gpu_gib": None,
                "host_gib": None,
                "gpu_memory_gib": self.machine.gpu.memory_gib,
                "fits": None,
                "remedy": "",
            },
            "layout": {**asdict(self.layout), "ranks": self.layout.ranks},
            "estimate": {"step_seconds": None, "hours": None, "gpu_hours": None},
            "notes": list(self.notes),
        }

    def write(self, out: Path | None = None) -> Path | None:
        """plan.json into `out`, or into the run folder where that exists already."""
        return write(self.as_dict(), Path(self.loaded.run.folder), out)


AnyPlan = Plan | ScriptPlan


def make_any(loaded: Loaded | LoadedScript, accelerate: AccelerateFile | None = None) -> AnyPlan:
    """The plan of a run file, of whichever kind."""
    if isinstance(loaded, Loaded):
        return make(loaded, accelerate)
    refuse_accelerate(accelerate.path if accelerate else None)
    return make_script(loaded)


def refuse_accelerate(file: Path | None) -> None:
    if file is not None:
        what = "says how a language model is sharded, and this run is of kind: script"
        raise UserError(what, str(file), "leave --accelerate out: a script shards by itself")


def make_script(loaded: LoadedScript) -> ScriptPlan:
    run, where = loaded.run, loaded.where
    layout = spread(loaded)
    machine = machine_of(run.cluster.model_copy(update={"gpus_per_node": layout.gpus_per_node}), where)
    return ScriptPlan(loaded, machine, layout, (*loaded.notes, *found(loaded), UNKNOWN))


def spread(loaded: LoadedScript) -> Spread:
    """cluster.nodes x cluster.gpus_per_node; where neither is said, layout.ranks on one machine."""
    cluster, ranks = loaded.run.cluster, loaded.run.layout.ranks
    if ranks is None or loaded.given("cluster.nodes") or loaded.given("cluster.gpus_per_node"):
        return Spread(cluster.nodes, cluster.gpus_per_node)
    return Spread(1, ranks)


def found(loaded: LoadedScript) -> tuple[str, ...]:
    """Whether the file is here, as far as this machine can know. A run for another platform finds it there."""
    path = loaded.run.script.path
    if path is None or Path(path).is_file():
        return ()
    what = f"{path} is a folder" if Path(path).is_dir() else f"there is no {path} here"
    return (f"{what}: it is looked for where the run starts",)


def show(plan: ScriptPlan) -> None:
    """To stdout, what is not known last, where the eye rests."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from windlass.plan.show import machines

    console = Console(highlight=False, emoji=False, markup=False)
    script = plan.loaded.run.script
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(overflow="fold")
    for name, value in (
        ("script", script.path or f"module {script.module}"),
        ("arguments", shlex.join(script.args) or "none"),
        ("machine", machines(plan.layout, plan.machine)),
        ("ranks", f"{plan.layout.ranks}, each with torchrun's environment"),
        ("folder", plan.loaded.run.folder),
    ):
        grid.add_row(Text(name, style="bold"), value)
    console.print(grid)
    for note in plan.notes:
        console.print(Text("note: ", style="cyan") + Text(note))
