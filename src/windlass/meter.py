"""The profiler for users' own scripts. Importing it imports no torch yet."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windlass.observe.counters import nvml_gpu_stats, print_hw_summary
    from windlass.observe.profiler import LLMStepProfiler, StepProfiler

__all__ = ["LLMStepProfiler", "StepProfiler", "nvml_gpu_stats", "print_hw_summary"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "windlass.observe.profiler" if name.endswith("Profiler") else "windlass.observe.counters"
    return getattr(importlib.import_module(home), name)
