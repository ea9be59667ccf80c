"""The run file: one YAML file, typed, with the place of every value."""

from windlass.runfile.fields import Data, ExpertLora, Lora, Model, RunFile, Script, ScriptRun, Train, Watch
from windlass.runfile.machines import Cluster, FabricFigures, GpuFigures, LayoutSection, Secret, User, Volume
from windlass.runfile.read import Loaded, LoadedFile, LoadedScript, kind, read, read_any
from windlass.runfile.reference import describe, init, keys, presets, schema
from windlass.runfile.rules import accumulation, contradictions

__all__ = [
    "Cluster",
    "Data",
    "ExpertLora",
    "FabricFigures",
    "GpuFigures",
    "LayoutSection",
    "Loaded",
    "LoadedFile",
    "LoadedScript",
    "Lora",
    "Model",
    "RunFile",
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
