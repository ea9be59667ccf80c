"""Counters of the GPU, the process and the network, sampled together; and the facts about this machine."""

from __future__ import annotations

import os
import platform
import resource
import time
import weakref
from pathlib import Path
from typing import Any, ClassVar, Final

import psutil  # type: ignore[import-untyped]
import torch

from windlass.hardware import GIB, Nvml, read_gpus, read_this_machine
from windlass.run_folder import read_versions

PACKAGES: Final = ("torch", "transformers", "peft", "accelerate", "datasets")
INFINIBAND: Final = Path("/sys/class/infiniband")
INFINIBAND_WORD: Final = 4  # bytes: port_xmit_data and port_rcv_data count 32-bit words
PCIE_SECONDS: Final = 10.0  # between two PCIe readings, which block the host for 40 ms


class Counters:
    """One rank's counters. Totals become differences between two samples. `unmeasured`: missing counters, and why."""

    of_process: ClassVar[weakref.WeakSet[Counters]] = weakref.WeakSet()  # of all trials that train together

    def __init__(self, device: torch.device, infiniband: Path = INFINIBAND) -> None:
        self.device = device
        self.unmeasured: dict[str, str] = {}
        self.peak_gib = 0.0  # highest GPU peak of all samples
        self.unsampled_gib = 0.0  # peak since the last sample, as far as other samples have read it
        self.of_process.add(self)
        self.ports = list_infiniband_ports(infiniband)
        if not self.ports:
            self.unmeasured["infiniband_*"] = "no active InfiniBand port in /sys/class/infiniband"
        self.nvml = Nvml() if device.type == "cuda" else None
        self.gpu = self._find_gpu()
        self.pcie_at = -PCIE_SECONDS
        self.before, load = self._read()
        missing = [name for name, value in load.items() if value is None]
        self.unmeasured |= dict.fromkeys(missing, "not supported by this GPU or driver")
        self.pcie_at = -PCIE_SECONDS

    def sample(self) -> dict[str, Any]:
        """Return the fields of one sample, without those that can't be measured."""
        now, load = self._read()
        change = {name: now[name] - self.before[name] for name in now}
        self.before = now
        fields = {
            "rss_gib": read_rss_gib(),
            "page_faults": int(change.pop("page_faults")),
            "cpu_cores": change.pop("cpu_seconds") / max(change.pop("seconds"), 1e-9),
        }
        if self.device.type == "cuda":
            stats = torch.cuda.memory_stats(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)  # so that the next sample has the peak since this one
            names = ("allocated_bytes.all.current", "reserved_bytes.all.current", "allocated_bytes.all.peak")
            allocated, reserved, peak = (stats.get(name, 0) / GIB for name in names)
            for each in self.of_process:
                each.unsampled_gib = max(each.unsampled_gib, peak)
            peak = self.unsampled_gib
            self.unsampled_gib = 0.0
            self.peak_gib = max(self.peak_gib, peak)
            fields |= {"gpu_allocated_gib": allocated, "gpu_reserved_gib": reserved, "gpu_peak_gib": peak}
            fields["gpu_fragmentation"] = 1 - allocated / reserved if reserved else 0.0
        return fields | change | {name: value for name, value in load.items() if value is not None}

    def _find_gpu(self) -> Any:
        if self.nvml is None:
            self.unmeasured["gpu_*, pcie_*, nvlink_*"] = f"the run is on {self.device.type}"
            return None
        uuid = getattr(torch.cuda.get_device_properties(self.device), "uuid", "")
        gpu = None if self.nvml.error else self.nvml.find(str(uuid), self.device.index or 0)
        if gpu is None:
            why = self.nvml.error or "NVML does not know this GPU"
            self.unmeasured["gpu_utilization, gpu_power_watts, pcie_*, nvlink_* …"] = why
        return gpu

    def _read(self) -> tuple[dict[str, float], dict[str, Any]]:
        """Read the totals, and the GPU's load. Totals are named like the fields that their differences become."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        now = time.monotonic()
        totals = {"seconds": now, "cpu_seconds": usage.ru_utime + usage.ru_stime, "page_faults": usage.ru_majflt}
        if self.ports:
            for way, name in (("sent", "port_xmit_data"), ("received", "port_rcv_data")):
                words = sum(int(_read(port / name) or 0) for port in self.ports)
                totals[f"infiniband_{way}_gb"] = words * INFINIBAND_WORD / 1e9
        if self.gpu is None or self.nvml is None:
            return totals, {}
        reads_pcie = now - self.pcie_at >= PCIE_SECONDS
        if reads_pcie:
            self.pcie_at = now
        load = self.nvml.read_load(self.gpu, pcie=reads_pcie)
        for way in ("sent", "received"):
            total = load.pop(f"nvlink_{way}_total_gb")
            if total is None:
                load[f"nvlink_{way}_gb"] = None
            else:
                totals[f"nvlink_{way}_gb"] = total
        return totals, load


def nvml_gpu_stats() -> list[dict[str, Any]]:
    """Return one dict per GPU of this machine, with the step files' field names; empty without a GPU or NVML."""
    gpus = read_gpus(health=False).gpus
    if not gpus:
        return []
    nvml = Nvml()
    stats = []
    for gpu, handle in zip(gpus, nvml.handles(), strict=True):
        memory = {"memory_total_gib": gpu.memory_gib, "memory_used_gib": gpu.memory_gib - gpu.free_gib}
        stats.append({"name": gpu.name, **memory, **nvml.read_load(handle)})
    return stats


def read_rss_gib() -> float:
    """Return the resident memory of this process, or its peak where /proc can't be read."""
    try:
        return float(psutil.Process().memory_info().rss) / GIB
    except psutil.Error:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / GIB  # bytes on macOS


def list_infiniband_ports(root: Path = INFINIBAND) -> list[Path]:
    """Return the counter folders of the ports that are up."""
    active = [port / "counters" for port in sorted(root.glob("*/ports/*")) if _read(port / "state").endswith("ACTIVE")]
    return [counters for counters in active if _read(counters / "port_xmit_data").isdigit()]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def describe_machine(device: torch.device | None = None) -> dict[str, Any]:
    """Return the facts that the report shows under "Hardware"."""
    machine = read_this_machine()
    gpus = read_gpus(health=False)
    lines = _read(Path("/proc/cpuinfo")).splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "")
    return {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": f"{model} x {os.cpu_count()}" if model else platform.machine(),
        "cpus": machine.cpus,
        "memory_gib": round(machine.memory_gib, 1),
        "device": str(device) if device is not None else "",
        "gpu": torch.cuda.get_device_name(device) if device is not None and device.type == "cuda" else None,
        "gpus": [{"name": gpu.name, "memory_gib": round(gpu.memory_gib, 1)} for gpu in gpus.gpus],
        "no_gpu_because": gpus.error,
        "driver": gpus.driver,
        "cuda": torch.version.cuda,
        "infiniband": [str(port.parent.relative_to(INFINIBAND)) for port in list_infiniband_ports()],
        "python": platform.python_version(),
        "versions": read_versions(PACKAGES),
    }


def print_hw_summary() -> None:
    """Print one line per fact about this machine, including that it has no GPU."""
    facts = describe_machine()
    gpus = "; ".join(f"{gpu['name']}, {gpu['memory_gib']:.0f} GiB" for gpu in facts["gpus"])
    rows = {
        "host": f"{facts['host']}, {facts['system']}",
        "processor": f"{facts['processor']}, {facts['cpus']} usable",
        "memory": f"{facts['memory_gib']} GiB",
        "GPUs": gpus or f"none ({facts['no_gpu_because']})",
        "driver": f"{facts['driver'] or 'none'}, CUDA {facts['cuda'] or 'none'}",
        "InfiniBand": ", ".join(facts["infiniband"]) or "no active port",
        "versions": ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
    }
    for name, value in rows.items():
        print(f"{name:<11} {value}")
