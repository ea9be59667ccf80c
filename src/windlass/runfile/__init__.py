"""The run file: one YAML file, typed, with the place of every value."""

from windlass.runfile.fields import ExpertLora, Lora, Model, RunFile, ScriptRun, Train, Watch
from windlass.runfile.machines import Cluster, LayoutSection, Secret
from windlass.runfile.read import Loaded, LoadedFile, LoadedScript, parse_settings, read_any, read_kind, read_run_file
from windlass.runfile.reference import list_keys, make_schema, read_preset, read_presets
from windlass.runfile.rows import Data
from windlass.runfile.rules import resolve_accumulation

__all__ = ["Cluster", "Data", "ExpertLora", "LayoutSection", "Loaded", "LoadedFile", "LoadedScript", "Lora", "Model"]
__all__ += ["RunFile", "ScriptRun", "Secret", "Train", "Watch", "list_keys", "make_schema", "parse_settings"]
__all__ += ["read_any", "read_kind", "read_preset", "read_presets", "read_run_file", "resolve_accumulation"]
