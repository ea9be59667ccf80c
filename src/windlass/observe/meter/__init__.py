"""Measure a training run step by step: `StepProfiler`, `LLMStepProfiler`, `print_hw_summary`, `nvml_gpu_stats`.

`StepProfiler` is for any loop in PyTorch, `LLMStepProfiler` for scripts that use transformers' Trainer or TRL.
Importing this package imports no torch yet.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windlass.observe.meter.nvml import nvml_gpu_stats
    from windlass.observe.meter.profiler import LLMStepProfiler
    from windlass.observe.meter.step import StepProfiler
    from windlass.observe.meter.summary import print_hw_summary

__all__ = ["LLMStepProfiler", "StepProfiler", "nvml_gpu_stats", "print_hw_summary"]

HOMES = {
    "LLMStepProfiler": "profiler",
    "StepProfiler": "step",
    "nvml_gpu_stats": "nvml",
    "print_hw_summary": "summary",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{HOMES[name]}"), name)
