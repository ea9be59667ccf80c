"""The machine that a run is on: as data for the report, and as lines for the log's head."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

from windlass import hardware as machine
from windlass.observe.meter import nvml
from windlass.observe.meter.host import INFINIBAND, infiniband_ports

PACKAGES = ("windlass", "torch", "transformers", "peft", "accelerate", "datasets")


def hardware(device: torch.device | None = None) -> dict[str, Any]:
    """What the report shows under 'hardware'."""
    here = machine.this_machine()
    gpus = nvml.nvml_gpu_stats()
    return {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cpus": here.cpus,
        "memory_gib": round(here.memory_gib, 1),
        "device": str(device) if device is not None else "",
        "gpu": torch.cuda.get_device_name(device) if device is not None and device.type == "cuda" else None,
        "gpus": [{"name": gpu["name"], "memory_gib": gpu["memory_total_gib"]} for gpu in gpus],
        "driver": nvml.driver(),
        "cuda": torch.version.cuda,
        "infiniband": [str(port.parent.relative_to(INFINIBAND)) for port in infiniband_ports()],
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
    }


def print_hw_summary() -> None:
    """One line per fact; no GPU is a fact too."""
    facts = hardware()
    gpus = [f"{gpu['name']}, {gpu['memory_gib']:.0f} GiB" for gpu in facts["gpus"] if gpu["memory_gib"]]
    rows = {
        "host": f"{facts['host']}, {facts['system']}",
        "processor": f"{facts['processor']}, {facts['cpus']} usable",
        "memory": f"{facts['memory_gib']} GiB",
        "GPUs": "; ".join(gpus) or f"none ({nvml.why_absent() or 'NVML lists none'})",
        "driver": f"{facts['driver'] or 'none'}, CUDA {facts['cuda'] or 'none'}",
        "InfiniBand": ", ".join(facts["infiniband"]) or "no active port",
        "versions": ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
    }
    for name, value in rows.items():
        print(f"{name:<11} {value}")


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return f"{names[0]} x {os.cpu_count()}" if names else platform.machine()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
