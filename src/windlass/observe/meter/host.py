"""What the operating system says of this process and this node. Linux's /proc and /sys; elsewhere fewer fields."""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

GIB = 2**30
PAGE = os.sysconf("SC_PAGE_SIZE")
INFINIBAND = Path("/sys/class/infiniband")
WORD = 4  # port_xmit_data and port_rcv_data count 32-bit words


def rss_gib() -> float:
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * PAGE / GIB
    except (OSError, IndexError, ValueError):  # no /proc: the peak is all there is, in bytes on macOS
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak * (1 if sys.platform == "darwin" else 1024) / GIB


def infiniband_ports(root: Path = INFINIBAND) -> list[Path]:
    """Counter folders of the ports that are up."""
    return [
        port / "counters"
        for port in sorted(root.glob("*/ports/*"))
        if _text(port / "state").endswith("ACTIVE") and (port / "counters" / "port_xmit_data").is_file()
    ]


class Host:
    """Counters become differences between two samples."""

    def __init__(self, ports: list[Path]) -> None:
        self.ports = ports
        self.before = self._counters()

    def sample(self) -> dict[str, Any]:
        now = self._counters()
        seconds = max(now["wall"] - self.before["wall"], 1e-9)
        change = {name: now[name] - self.before[name] for name in now}
        self.before = now
        sample = {
            "rss_gib": rss_gib(),
            "page_faults": int(change["faults"]),
            "cpu_cores": change["cpu"] / seconds,
        }
        if self.ports:
            sample["infiniband_sent_gb"] = change["sent"] * WORD / 1e9
            sample["infiniband_received_gb"] = change["received"] * WORD / 1e9
        return sample

    def _counters(self) -> dict[str, float]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "wall": time.monotonic(),
            "cpu": usage.ru_utime + usage.ru_stime,
            "faults": usage.ru_majflt,
            "sent": sum(_number(port / "port_xmit_data") for port in self.ports),
            "received": sum(_number(port / "port_rcv_data") for port in self.ports),
        }


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdigit() else 0
