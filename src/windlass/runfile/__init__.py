"""The run file: one YAML file, typed, with the place of every value."""

from windlass.runfile.fields import Data, ExpertLora, Lora, Model, RunFile, ScriptRun, Train, Watch
from windlass.runfile.machines import Cluster, LayoutSection, Secret
from windlass.runfile.read import Loaded, LoadedFile, LoadedScript, kind, read, read_any
from windlass.runfile.reference import init, keys, presets, schema
from windlass.runfile.rules import accumulation, contradictions

__all__ = [
    "Cluster",
    "Data",
    "ExpertLora",
    "LayoutSection",
    "Loaded",
    "LoadedFile",
    "LoadedScript",
    "Lora",
    "Model",
    "RunFile",
    "ScriptRun",
    "Secret",
    "Train",
    "Watch",
    "accumulation",
    "contradictions",
    "init",
    "keys",
    "kind",
    "presets",
    "read",
    "read_any",
    "schema",
]
