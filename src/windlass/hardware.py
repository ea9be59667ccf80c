"""GPUs and fabrics as a table with sources, and what this machine really has."""

from __future__ import annotations

import difflib
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.errors import Problem, UserError, raise_all

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_gib: float  # what a process can take, not what the box says
    bf16_tflops: float  # dense peak
    achieved_tflops: float  # what mixtures of experts sustain, for estimates
    memory_gb_per_second: float  # achieved
    source: str
    link: str = "nvlink4"  # fabric between such GPUs of one node
    host_link: str = "pcie5"


@dataclass(frozen=True, slots=True)
class Fabric:
    name: str
    gb_per_second: float  # achieved, per GPU and direction
    source: str


@dataclass(frozen=True, slots=True)
class Machine:
    """What one run is laid out on."""

    gpu: Gpu
    link: Fabric  # between GPUs of one node
    network: Fabric  # between nodes, per NIC
    host_link: Fabric  # PCIe between GPU and host memory
    nics_per_node: int
    host_memory_gib: float | None


# Mixtures of experts sustain 231-334 TFLOP/s on an H100 by what Megatron-Core and NeMo publish: a quarter of the peak.
ACHIEVED_SHARE = 0.25
# STREAM-like kernels reach about nine tenths of the data sheet's memory rate.
MEMORY_SHARE = 0.9


def _gpu(name: str, mib: int, tflops: float, tb_per_second: float, link: str, host_link: str, sheet: str) -> Gpu:
    """One row. `mib` is what nvidia-smi (or rocm-smi) reports as total, which is what a process can hope for."""
    source = (
        f"memory: {mib} MiB as the driver reports it; peak and memory rate: {sheet}; "
        f"sustained: {ACHIEVED_SHARE:.0%} of the dense peak, {MEMORY_SHARE:.0%} of the memory rate"
    )
    rate = tb_per_second * 1000 * MEMORY_SHARE
    return Gpu(name, mib / 1024, tflops, tflops * ACHIEVED_SHARE, rate, source, link, host_link)


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("h200", 143771, 989, 4.8, "nvlink4", "pcie5", "NVIDIA H200 data sheet, SXM"),
        _gpu("h200-nvl", 143771, 836, 4.8, "nvlink4", "pcie5", "NVIDIA H200 data sheet, NVL"),
        _gpu("h100", 81559, 989, 3.35, "nvlink4", "pcie5", "NVIDIA H100 data sheet, SXM"),
        _gpu("h100-nvl", 95830, 835, 3.9, "nvlink4", "pcie5", "NVIDIA H100 data sheet, NVL"),
        _gpu("h100-pcie", 81559, 756, 2.0, "pcie5", "pcie5", "NVIDIA H100 data sheet, PCIe"),
        _gpu("a100-80gb", 81920, 312, 2.039, "nvlink3", "pcie4", "NVIDIA A100 data sheet, SXM"),
        _gpu("a100-40gb", 40960, 312, 1.555, "nvlink3", "pcie4", "NVIDIA A100 data sheet, SXM"),
        _gpu("b200", 183359, 2250, 8.0, "nvlink5", "pcie5", "NVIDIA DGX B200 data sheet, per GPU"),
        _gpu("l40s", 46068, 362, 0.864, "pcie4", "pcie4", "NVIDIA L40S data sheet"),
        _gpu("l4", 23034, 121, 0.3, "pcie4", "pcie4", "NVIDIA L4 data sheet"),
        _gpu("a10", 23028, 125, 0.6, "pcie4", "pcie4", "NVIDIA A10 data sheet"),
        _gpu("mi300x", 196592, 1307, 5.3, "xgmi", "pcie5", "AMD Instinct MI300X data sheet"),
    )
}
GPUS["cpu"] = Gpu(
    "cpu",
    16.0,
    0.1,
    0.03,
    10.0,
    "a round figure for two CPU cores; memory: what this machine has",
    "loopback",
    "memory",
)

ALIASES: dict[str, str] = {
    "h200-sxm": "h200",
    "h200-sxm5": "h200",
    "h200-141gb": "h200",
    "h100-sxm": "h100",
    "h100-sxm5": "h100",
    "h100-80gb": "h100",
    "h100-80gb-hbm3": "h100",
    "h100-94gb": "h100-nvl",
    "a100": "a100-80gb",
    "a100-sxm4-80gb": "a100-80gb",
    "a100-sxm4-40gb": "a100-40gb",
    "a100-80": "a100-80gb",
    "a100-40": "a100-40gb",
    "b200-180gb": "b200",
    "gb200": "b200",
    "mi300": "mi300x",
    "none": "cpu",
}

_NETWORK = "line rate x 0.9, what NCCL's all-gather reaches on InfiniBand with RDMA"
_TCP = "line rate x 0.8, TCP sockets without RDMA"
FABRICS: dict[str, Fabric] = {
    fabric.name: fabric
    for fabric in (
        Fabric("nvlink3", 240.0, "300 GB/s a direction (A100 data sheet) x 0.8"),
        Fabric("nvlink4", 360.0, "450 GB/s a direction (H100 data sheet) x 0.8"),
        Fabric("nvlink5", 720.0, "900 GB/s a direction (B200 data sheet) x 0.8"),
        Fabric("xgmi", 310.0, "448 GB/s a direction (MI300X data sheet) x 0.7"),
        Fabric("pcie4", 25.0, "31.5 GB/s for 16 lanes x 0.8"),
        Fabric("pcie5", 49.5, "63 GB/s for 16 lanes x 0.8"),
        Fabric("infiniband-100", 11.25, _NETWORK),
        Fabric("infiniband-200", 22.5, _NETWORK),
        Fabric("infiniband-400", 45.0, _NETWORK),
        Fabric("infiniband-800", 90.0, _NETWORK),
        Fabric("roce-100", 11.25, _NETWORK),
        Fabric("roce-200", 22.5, _NETWORK),
        Fabric("roce-400", 45.0, _NETWORK),
        Fabric("ethernet-10", 1.0, _TCP),
        Fabric("ethernet-25", 2.5, _TCP),
        Fabric("ethernet-100", 10.0, _TCP),
        Fabric("loopback", 1.0, "gloo between two processes of one machine, order of magnitude"),
        Fabric("memory", 10.0, "copies within host memory, order of magnitude"),
    )
}
FABRIC_ALIASES: dict[str, str] = {
    "nvlink": "nvlink4",
    "pcie": "pcie5",
    "infiniband": "infiniband-400",
    "ib": "infiniband-400",
    "ib-100": "infiniband-100",
    "ib-200": "infiniband-200",
    "ib-400": "infiniband-400",
    "hdr": "infiniband-200",
    "ndr": "infiniband-400",
    "xdr": "infiniband-800",
    "roce": "roce-400",
    "ethernet": "ethernet-25",
}
FIGURES = ("name", "memory_gib", "bf16_tflops", "memory_gb_per_second")
SUSTAINED = "achieved_tflops"  # may be given besides


def gpu(name: str | Mapping[str, Any], where: str = "cluster.gpu") -> Gpu:
    """The table's row, or one built from given figures. An unknown name asks for them."""
    if isinstance(name, Mapping):
        return _given(name, where)
    key = _key(name)
    key = ALIASES.get(key, key)
    if key in GPUS:
        return GPUS[key]
    close = difflib.get_close_matches(key, [*GPUS, *ALIASES], 3, 0.4)
    nearest = f"nearest: {', '.join(close)}. " if close else f"known: {', '.join(GPUS)}. "
    raise UserError(
        f"no figures are known for the GPU {name!r}",
        where,
        nearest + "Or give its figures: cluster.gpu: {" + ", ".join(f"{key}: …" for key in FIGURES) + "}",
    )


def this_gpu() -> str:
    """The first GPU of this machine by name, or `cpu` where there is none."""
    cards, _ = _cards()
    return cards[0].name if cards else "cpu"


def fabric(name: str | Mapping[str, Any], where: str = "cluster.network") -> Fabric:
    """The table's row by name or alias, or one built from given figures."""
    if isinstance(name, Mapping):
        return Fabric(str(name["name"]), float(name["gb_per_second"]), "given in the run file")
    key = re.sub(r"[\s_]+", "-", name.strip().lower())
    key = FABRIC_ALIASES.get(key, key)
    if key in FABRICS:
        return FABRICS[key]
    close = difflib.get_close_matches(key, [*FABRICS, *FABRIC_ALIASES], 3, 0.4)
    raise UserError(
        f"no rate is known for the fabric {name!r}",
        where,
        f"{'nearest' if close else 'known'}: {', '.join(close or FABRICS)}; "
        "or give its figures: {name: …, gb_per_second: …}",
    )


def _key(name: str) -> str:
    key = re.sub(r"[\s_/]+", "-", name.strip().lower())
    return re.sub(r"^(nvidia|amd|instinct|tesla)-", "", re.sub(r"^(nvidia|amd)-(?=instinct)", "", key))


def _given(figures: Mapping[str, Any], where: str) -> Gpu:
    problems = [
        Problem(f"{key!r} is not a figure of a GPU", f"{where}.{key}", f"known: {', '.join(FIGURES)}")
        for key in figures
        if key not in (*FIGURES, SUSTAINED)
    ]
    values: dict[str, float] = {}
    for key in FIGURES[1:]:
        value = figures.get(key)
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
        if good:
            values[key] = float(value or 0)
        else:
            problem = f"{key} is missing" if value is None else f"{key} is {value!r}"
            problems.append(Problem(problem, f"{where}.{key}", "a positive number, from the GPU's data sheet"))
    name = figures.get("name")
    if not isinstance(name, str) or not name.strip():
        problems.append(Problem("name is missing", f"{where}.name", "what to call this GPU in the plan"))
    raise_all(problems)
    peak, rate = values["bf16_tflops"], values["memory_gb_per_second"] * MEMORY_SHARE
    sustained = figures.get(SUSTAINED) or peak * ACHIEVED_SHARE
    source = f"given in the run file; sustained: {sustained:,.0f} TFLOP/s, {MEMORY_SHARE:.0%} of the memory rate"
    return Gpu(str(name), values["memory_gib"], peak, float(sustained), rate, source)


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU of this machine, as its driver reports it."""

    name: str
    memory_gib: float
    free_gib: float


@dataclass(frozen=True, slots=True)
class Here:
    """What this machine has, as far as this process may use it."""

    cards: tuple[Card, ...]
    cpus: int
    memory_gib: float  # the smaller of the machine's and the control group's
    memory_limit_gib: float | None  # the control group's, where there is one
    notes: tuple[str, ...] = ()


def this_machine() -> Here:
    """GPUs through NVML where nvidia-ml-py is installed, processors and memory within the control group's limits."""
    cards, notes = _cards()
    limit = _memory_limit_gib()
    total = _memory_gib()
    return Here(cards, _cpus(), min(total, limit) if limit else total, limit, notes)


def _cards() -> tuple[tuple[Card, ...], tuple[str, ...]]:
    try:
        import pynvml
    except ImportError:
        return (), ("GPUs were not looked for: nvidia-ml-py is not installed (pip install 'windlass[gpu]')",)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), (f"no NVIDIA GPU: {error}",)
    cards = []
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            name = pynvml.nvmlDeviceGetName(handle)
            cards.append(Card(str(name), memory.total / GIB, memory.free / GIB))
    except pynvml.NVMLError as error:
        return tuple(cards), (f"NVML stopped answering: {error}",)
    finally:
        pynvml.nvmlShutdown()
    return tuple(cards), ()


def _cpus(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Processors that this process may run on, within the control group's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    allowed = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = _first_line(root / "cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit() and int(quota[1]):
        allowed = min(allowed, max(1, int(quota[0]) // int(quota[1])))
    return allowed


def _memory_gib() -> float:
    match = re.search(r"^MemTotal:\s+(\d+) kB", _text(Path("/proc/meminfo")), re.MULTILINE)
    if match:
        return int(match[1]) * 1024 / GIB
    if platform.system() == "Windows":  # no sysconf there
        return 0.0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB


def _memory_limit_gib(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Version 2 of control groups first, then version 1, which says 'no limit' with a huge number."""
    for path in (root / "memory.max", root / "memory" / "memory.limit_in_bytes"):
        line = _first_line(path)
        if line.isdigit() and int(line) < 2**60:
            return int(line) / GIB
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _first_line(path: Path) -> str:
    return _text(path).partition("\n")[0].strip()
