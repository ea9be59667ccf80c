"""Counters of the GPU, the process and the network, sampled together; and the facts about this machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch

from windlass.hardware import GIB, Nvml, read_gpus, this_machine

PACKAGES: Final = ("windlass", "torch", "transformers", "peft", "accelerate", "datasets")
INFINIBAND: Final = Path("/sys/class/infiniband")
INFINIBAND_WORD: Final = 4  # bytes: port_xmit_data and port_rcv_data count 32-bit words
PCIE_SECONDS: Final = 10.0  # between two PCIe readings, which block the host for 40 ms
NVLINK: Final = {"nvlink_sent_total_gb": "nvlink_sent_gb", "nvlink_received_total_gb": "nvlink_received_gb"}


class Counters:
    """One rank's. Totals become differences between two samples. `unmeasured`: what this machine lacks, and why."""

    def __init__(self, device: torch.device, infiniband: Path = INFINIBAND) -> None:
        self.device = device
        self.unmeasured: dict[str, str] = {}
        self.peak_gib = 0.0  # highest GPU peak of all samples
        self.ports = infiniband_ports(infiniband)
        if not self.ports:
            self.unmeasured["infiniband_*"] = "no active InfiniBand port in /sys/class/infiniband"
        self.nvml = Nvml() if self.device.type == "cuda" else None
        self.gpu = self._find_gpu()
        self.nvlink: dict[str, float] = {}
        self.pcie_at = -PCIE_SECONDS
        self.before = self._totals()

    def sample(self) -> dict[str, Any]:
        """The fields of one sample; what can't be measured is left out."""
        now = self._totals()
        change = {name: now[name] - self.before[name] for name in now}
        self.before = now
        fields = {
            "rss_gib": rss_gib(),
            "page_faults": int(change["page_faults"]),
            "cpu_cores": change["cpu_seconds"] / max(change["seconds"], 1e-9),
        }
        if self.ports:
            fields["infiniband_sent_gb"] = change["sent_words"] * INFINIBAND_WORD / 1e9
            fields["infiniband_received_gb"] = change["received_words"] * INFINIBAND_WORD / 1e9
        if self.device.type == "cuda":
            fields |= self._gpu_memory()
        return fields | (self._load() if self.gpu is not None else {})

    def _totals(self) -> dict[str, float]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "seconds": time.monotonic(),
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "page_faults": usage.ru_majflt,
            "sent_words": sum(int(_read(port / "port_xmit_data") or 0) for port in self.ports),
            "received_words": sum(int(_read(port / "port_rcv_data") or 0) for port in self.ports),
        }

    def _find_gpu(self) -> Any:
        if self.nvml is None:
            self.unmeasured["gpu_*, pcie_*, nvlink_*"] = f"the run is on {self.device.type}"
            return None
        gpu = None
        if not self.nvml.error:
            uuid = getattr(torch.cuda.get_device_properties(self.device), "uuid", "")
            gpu = self.nvml.find(str(uuid), self.device.index or 0)
        if gpu is None:
            why = self.nvml.error or "NVML does not know this GPU"
            self.unmeasured["gpu_utilization, gpu_power_watts, pcie_*, nvlink_* …"] = why
            return None
        for name, value in self.nvml.read_load(gpu).items():
            if value is None:
                self.unmeasured[NVLINK.get(name, name)] = "not supported by this GPU or driver"
        return gpu

    def _gpu_memory(self) -> dict[str, float]:
        stats = torch.cuda.memory_stats(self.device)
        allocated, reserved = stats.get("allocated_bytes.all.current", 0), stats.get("reserved_bytes.all.current", 0)
        peak = stats.get("allocated_bytes.all.peak", 0) / GIB
        self.peak_gib = max(self.peak_gib, peak)
        torch.cuda.reset_peak_memory_stats(self.device)  # so that the next sample has the peak since this one
        return {
            "gpu_allocated_gib": allocated / GIB,
            "gpu_reserved_gib": reserved / GIB,
            "gpu_peak_gib": peak,
            "gpu_fragmentation": 1 - allocated / reserved if reserved else 0.0,
        }

    def _load(self) -> dict[str, Any]:
        assert self.nvml is not None
        with_pcie = time.monotonic() - self.pcie_at >= PCIE_SECONDS
        self.pcie_at = time.monotonic() if with_pcie else self.pcie_at
        load = {n: value for n, value in self.nvml.read_load(self.gpu, pcie=with_pcie).items() if value is not None}
        for total, since in NVLINK.items():
            if total in load:
                now = load.pop(total)
                if total in self.nvlink:
                    load[since] = now - self.nvlink[total]
                self.nvlink[total] = now
        return load


def nvml_gpu_stats() -> list[dict[str, Any]]:
    """One dict per GPU of this machine, with the field names of the step files; no GPU or no NVML: an empty list."""
    nvml = Nvml()
    try:
        numbers = range(0 if nvml.error else nvml.count())
        return [
            {
                "name": gpu.name,
                "memory_total_gib": gpu.memory_gib,
                "memory_used_gib": gpu.memory_gib - gpu.free_gib,
                **nvml.read_load(nvml.library.nvmlDeviceGetHandleByIndex(gpu.index)),
            }
            for gpu in (nvml.read_gpu(number, health=False) for number in numbers)
        ]
    except nvml.library.NVMLError:
        return []


def rss_gib() -> float:
    """Resident memory of this process; without /proc its peak, which is in bytes on macOS."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE") / GIB
    except (OSError, IndexError, ValueError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak * (1 if sys.platform == "darwin" else 1024) / GIB


def infiniband_ports(root: Path = INFINIBAND) -> list[Path]:
    """Counter folders of the ports that are up."""
    return [
        port / "counters"
        for port in sorted(root.glob("*/ports/*"))
        if _read(port / "state").endswith("ACTIVE") and _read(port / "counters" / "port_xmit_data").isdigit()
    ]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def machine_facts(device: torch.device | None = None) -> dict[str, Any]:
    """What the report shows under "Hardware"."""
    here, found = this_machine(), read_gpus(health=False)
    models = [
        line.partition(":")[2].strip() for line in _read(Path("/proc/cpuinfo")).splitlines() if "model name" in line
    ]
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": f"{models[0]} x {os.cpu_count()}" if models else platform.machine(),
        "cpus": here.cpus,
        "memory_gib": round(here.memory_gib, 1),
        "device": str(device) if device is not None else "",
        "gpu": torch.cuda.get_device_name(device) if device is not None and device.type == "cuda" else None,
        "gpus": [{"name": gpu.name, "memory_gib": round(gpu.memory_gib, 1)} for gpu in found.gpus],
        "driver": found.driver,
        "cuda": torch.version.cuda,
        "infiniband": [str(port.parent.relative_to(INFINIBAND)) for port in infiniband_ports()],
        "python": platform.python_version(),
        "versions": versions,
    }


def print_hw_summary() -> None:
    """One line per fact about this machine; no GPU is a fact too."""
    facts = machine_facts()
    gpus = [f"{gpu['name']}, {gpu['memory_gib']:.0f} GiB" for gpu in facts["gpus"]]
    rows = {
        "host": f"{facts['host']}, {facts['system']}",
        "processor": f"{facts['processor']}, {facts['cpus']} usable",
        "memory": f"{facts['memory_gib']} GiB",
        "GPUs": "; ".join(gpus) or f"none ({read_gpus(health=False).error})",
        "driver": f"{facts['driver'] or 'none'}, CUDA {facts['cuda'] or 'none'}",
        "InfiniBand": ", ".join(facts["infiniband"]) or "no active port",
        "versions": ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
    }
    for name, value in rows.items():
        print(f"{name:<11} {value}")
