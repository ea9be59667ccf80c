"""The run file: one YAML file, typed, with the place of every value."""

from windlass.runfile.fields import Data, ExpertLora, Lora, Model, RunFile, Watch
from windlass.runfile.machines import Cluster, FabricFigures, GpuFigures, LayoutSection, Secret, User, Volume
from windlass.runfile.read import Loaded, LoadedScript, Said, kind, read, read_any
from windlass.runfile.reference import describe, keys, schema
from windlass.runfile.rules import accumulation, contradictions
from windlass.runfile.script import Script, ScriptRun
from windlass.runfile.starts import init, presets
from windlass.runfile.training import Train

__all__ = [
    "Cluster",
    "Data",
    "ExpertLora",
    "FabricFigures",
    "GpuFigures",
    "LayoutSection",
    "Loaded",
    "LoadedScript",
    "Lora",
    "Model",
    "RunFile",
    "Said",
    "Script",
    "ScriptRun",
    "Secret",
    "Train",
    "User",
    "Volume",
    "Watch",
    "accumulation",
    "contradictions",
    "describe",
    "init",
    "keys",
    "kind",
    "presets",
    "read",
    "read_any",
    "schema",
]
