"""The module that the published training script imports its profiler from, under all the names it uses."""

from __future__ import annotations

from windlass.meter import LLMStepProfiler, nvml_gpu_stats, print_hw_summary

# Both spellings of the published scripts.
_nval_gpu_stats = nvml_gpu_stats
_nvaml_gpu_stats = nvml_gpu_stats

__all__ = ["LLMStepProfiler", "_nval_gpu_stats", "_nvaml_gpu_stats", "nvml_gpu_stats", "print_hw_summary"]
