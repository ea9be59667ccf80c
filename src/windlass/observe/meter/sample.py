"""Counters of the GPU, the host and the network, asked together."""

from __future__ import annotations

import time
from typing import Any

import torch

from windlass.observe.meter import nvml
from windlass.observe.meter.host import Host, infiniband_ports

GIB = 2**30
PCIE_SECONDS = 10.0  # between two questions for PCIe, which hold the host up for 40 ms
NVLINK = {"nvlink_sent_total_gb": "nvlink_sent_gb", "nvlink_received_total_gb": "nvlink_received_gb"}


class Sampler:
    """One per rank. `unmeasured` names what this machine doesn't give, and why."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.unmeasured: dict[str, str] = {}
        ports = infiniband_ports()
        self.host = Host(ports)
        if not ports:
            self.unmeasured["infiniband_*"] = "no active InfiniBand port in /sys/class/infiniband"
        self.gpu = self._gpu()
        self.links: dict[str, float] = {}
        self.pcie_at = -PCIE_SECONDS
        self.most_gib = 0.0  # of the peaks of all samples

    def _gpu(self) -> Any:
        if self.device.type != "cuda":
            self.unmeasured["gpu_*, pcie_*, nvlink_*"] = f"the run is on {self.device.type}"
            return None
        why = nvml.why_absent()
        gpu = None
        if not why:
            properties = torch.cuda.get_device_properties(self.device)
            gpu = nvml.handle(str(getattr(properties, "uuid", "")), self.device.index or 0)
            why = "" if gpu is not None else "NVML does not know this GPU"
        if gpu is None:
            self.unmeasured["gpu_utilization, gpu_power_watts, pcie_*, nvlink_* …"] = why
            return None
        for name, value in nvml.read(gpu).items():
            if value is None:
                self.unmeasured[NVLINK.get(name, name)] = "not supported by this GPU or driver"
        return gpu

    def sample(self) -> dict[str, Any]:
        """The fields of one sample; what can't be measured is left out."""
        fields = self.host.sample()
        if self.device.type == "cuda":
            fields |= self._memory()
        if self.gpu is not None:
            fields |= self._nvml()
        return fields

    def _memory(self) -> dict[str, float]:
        stats = torch.cuda.memory_stats(self.device)
        allocated, reserved = stats.get("allocated_bytes.all.current", 0), stats.get("reserved_bytes.all.current", 0)
        peak = stats.get("allocated_bytes.all.peak", 0)
        self.most_gib = max(self.most_gib, peak / GIB)
        torch.cuda.reset_peak_memory_stats(self.device)  # so that the next peak is that of the time from here on
        return {
            "gpu_allocated_gib": allocated / GIB,
            "gpu_reserved_gib": reserved / GIB,
            "gpu_peak_gib": peak / GIB,
            "gpu_fragmentation": 1 - allocated / reserved if reserved else 0.0,
        }

    def _nvml(self) -> dict[str, Any]:
        pcie = time.monotonic() - self.pcie_at >= PCIE_SECONDS
        self.pcie_at = time.monotonic() if pcie else self.pcie_at
        read = {name: value for name, value in nvml.read(self.gpu, pcie=pcie).items() if value is not None}
        for name in ("name", "memory_total_gib", "memory_used_gib"):
            read.pop(name, None)
        for total, since in NVLINK.items():
            if total in read:
                now = read.pop(total)
                if total in self.links:
                    read[since] = now - self.links[total]
                self.links[total] = now
        return read
