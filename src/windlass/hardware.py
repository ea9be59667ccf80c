"""GPUs and fabrics as a table with sources, and this machine's GPUs (NVML), processors, memory and addresses."""

from __future__ import annotations

import contextlib
import difflib
import os
import platform
import re
import socket
import struct
import tomllib
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import exp, log
from pathlib import Path
from typing import Any, Final

from windlass.errors import UserError

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")

# A rate as a function of two sizes: (rows, width, TFLOP/s). Between points it is interpolated, in logarithms.
Points = tuple[tuple[float, float, float], ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """One kind of collective over a number of ranks: seconds = latency + bytes that one GPU sends / rate."""

    kind: str  # all-gather, reduce-scatter, all-reduce, all-to-all
    fabric: str  # link: all ranks on one node; network: they span nodes
    ranks: int
    latency_seconds: float  # of the smallest, called through PyTorch
    # Large ones. link: bytes that one GPU sends a second ((n - 1) / n of all; twice that for all-reduce).
    # network: bytes that leave one node a second, over all its NICs (a ring sends each byte out of a node once).
    gb_per_second: float


@dataclass(frozen=True, slots=True)
class Rates:
    """The machine's rates for the time model: measured by `windlass calibrate`, else derived from data sheets."""

    basis: str  # "data sheet", or "calibrated on 2 x h100, 2026-01-31"
    products: Mapping[str, Points]  # by dtype (bfloat16, float32): rows, sqrt(inputs x outputs), TFLOP/s
    grouped: Points  # one product of all experts, in the dtype of compute: rows per expert, the same width, TFLOP/s
    attention: Points  # causal attention forward: length, head width, TFLOP/s of the unmasked half
    attention_backward: Points  # the same operations over its backward's time
    memory_gb_per_second: float  # read + written by a large elementwise operation
    decode_gb_per_second: float  # FP8 codes read, with the scales applied
    operator_seconds: float  # host time of one dispatched operator, autograd included
    module_seconds: float  # host time of one module's call in Python
    sync_seconds: float  # host waits for the GPU and starts again
    collectives: tuple[Collective, ...]
    host_link_gb_per_second: float  # pinned host memory to GPU
    storage_gb_per_second: float  # cold weights, per node
    low: float  # measured / planned step time: the range of its residuals
    high: float

    __hash__ = object.__hash__  # a key of caches

    def collective(self, kind: str, fabric: str, ranks: int) -> Collective:
        """Return the measured collective of the most similar group."""
        alike = [c for c in self.collectives if (c.kind, c.fabric) == (kind, fabric)]
        return min(alike, key=lambda c: abs(log(c.ranks / ranks)))


@lru_cache(maxsize=10_000)
def get_product_rate(rates: Rates, kind: str, rows: float, width: float) -> float:
    """Return TFLOP/s of matrix products in a dtype, or `grouped` for all experts at once."""
    return interpolate(rates.grouped if kind == "grouped" else rates.products[kind], rows, width)


def interpolate(points: Points, first: float, second: float) -> float:
    """Return the rate at these two sizes. Outside of the points: the nearest one's, reduced in proportion for fewer
    rows."""
    firsts, lines = _group_by_first(points)
    after = bisect_right(firsts, first)
    near = slice(max(after - 1, 0), min(after + 1, len(firsts)))
    line = [(size, _interpolate_line(rest, second)) for size, rest in zip(firsts[near], lines[near], strict=True)]
    return _interpolate_line(line, first) * min(1.0, first / firsts[0])


@lru_cache
def _group_by_first(points: Points) -> tuple[list[float], list[list[tuple[float, float]]]]:
    lines: dict[float, list[tuple[float, float]]] = {}
    for first, second, rate in sorted(points):
        lines.setdefault(first, []).append((second, rate))
    return list(lines), list(lines.values())


def _interpolate_line(line: list[tuple[float, float]], at: float) -> float:
    after = bisect_right(line, at, key=lambda point: point[0])
    if after in (0, len(line)):
        return line[min(after, len(line) - 1)][1]
    left, low = line[after - 1]
    right, high = line[after]
    share = log(at / left) / log(right / left)
    return exp(log(low) * (1 - share) + log(high) * share)


GIB = 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_gib: float  # what a process can use, not what the box says
    bf16_tflops: float  # dense peak
    achieved_tflops: float  # what its largest products sustain, for estimates
    memory_gb_per_second: float  # achieved
    link: str = "nvlink4"  # fabric between such GPUs of one node
    host_link: str = "pcie5"
    fp32_tflops: float | None = None  # peak without matrix units; None: a sixteenth of bf16_tflops
    has_bf16: bool = True  # False: bfloat16 is computed in float32


@dataclass(frozen=True, slots=True)
class Fabric:
    name: str
    gb_per_second: float  # achieved, per GPU and direction


@dataclass(frozen=True)
class Machine:
    gpu: Gpu
    link: Fabric  # between GPUs of one node
    network: Fabric  # between nodes, per NIC
    host_link: Fabric  # PCIe between GPU and host memory
    nics_per_node: int
    host_memory_gib: float | None
    measured: Rates | None = None  # by `windlass calibrate`; None: what the data sheets imply
    notes: tuple[str, ...] = ()

    @cached_property  # the time model asks thousands of times
    def rates(self) -> Rates:
        """Return the measured rates, with the data sheets' for collectives that were not measured."""
        sheet = derive_rates(self.gpu, self.link, self.network, self.host_link, self.nics_per_node)
        if not self.measured:
            return sheet
        measured = {(c.kind, c.fabric) for c in self.measured.collectives}
        others = (c for c in sheet.collectives if (c.kind, c.fabric) not in measured)
        return replace(self.measured, collectives=(*self.measured.collectives, *others))


# Large bfloat16 products: power holds Hopper's clocks down (grouped ones reach 474 TFLOP/s at 512 rows an expert on an
# H100, which 0.7 of the peak and the reading of the weights explain). hardware.toml has other shares: Ampere's come
# closer to the peak.
ACHIEVED_SHARE = 0.7
# Large additions reach nine tenths of the data sheet's memory rate; a layer's operations other than products reach
# less, which was fitted.
MEMORY_SHARE = 0.85


def _read_gpu(name: str, row: Mapping[str, Any]) -> Gpu:
    share = row.get("share", ACHIEVED_SHARE)
    rate = row["tb_per_second"] * 1000 * MEMORY_SHARE
    return Gpu(
        name,
        row["mib"] / 1024,
        row["tflops"],
        row["tflops"] * share,
        rate,
        row["link"],
        row["host_link"],
        row.get("fp32"),
        row.get("bf16", True),
    )


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ALIASES, FABRIC_ALIASES = (
    {alias: name for name, row in _TABLE[kind].items() for alias in row.get("names", "").split()}
    for kind in ("gpus", "fabrics")
)
FABRICS = {name: Fabric(name, row["gb"]) for name, row in _TABLE["fabrics"].items()}
GPUS = {name: _read_gpu(name, row) for name, row in _TABLE["gpus"].items()}
# A round figure for a rank on a core or two; memory: what this machine has.
GPUS["cpu"] = Gpu("cpu", 16.0, 0.4, 0.2, 20.0, "loopback", "memory", fp32_tflops=0.4)
ALIASES["none"] = "cpu"

# Bytes that the memory moves to decode a weight in 8 bits: one read, two written, at three quarters of large additions'
# rate; measured on an H100 in steps of Mistral Small 4 (benchmarks/gpu).
DECODED_BYTES = 4
# Host time: a launch takes about 5 us, and autograd and the dispatcher as much again; a module's call in Python, with
# hooks and adapters, several times that. Published steps that wait for the host fit these figures; a virtual machine's
# host took 36 and 64 us (benchmarks/gpu), which the upper end of the range says. Collectives: 20-40 us through PyTorch
# for small ones (NCCL on NVLink 10-16).
OPERATOR = 8e-6
MODULE = 20e-6
SLOW_HOST = 4.5
SYNC = 50e-6
LATENCY = 25e-6
BACKWARD = 2.5  # attention's backward over its forward, which it computes again
STORAGE = 2.0  # GB/s a node from a shared volume, an assumption
# Measured / planned step time where nothing was measured: benchmarks/published.py has nine tenths of the eager runs at
# 0.97 to 1.2, and the fastest of the other engines at 0.8.
UNTRIED = (0.8, 1.3)
UNTRIED_CPU = (0.7, 4.0)  # a round figure stands for all processors; one with AVX2 alone took 2.3 x the time


@lru_cache
def derive_rates(gpu: Gpu, link: Fabric, network: Fabric, host_link: Fabric, nics_per_node: int) -> Rates:
    """Derive rates from data sheets. A product takes its operations at the sustained rate plus its matrices' way
    through memory: narrow matrices and those with few rows are slower."""
    peak = gpu.fp32_tflops or gpu.bf16_tflops / 16  # without matrix units
    fp32 = peak * gpu.achieved_tflops / gpu.bf16_tflops

    def products(size: int, tflops: float) -> Points:
        points = []
        for width in (2**i for i in range(6, 15)):
            for rows in (2**i for i in range(18)):
                flops = 2 * rows * width**2
                moved = size * (width**2 + 2 * rows * width)
                seconds = flops / tflops / 1e12 + moved / gpu.memory_gb_per_second / 1e9
                points.append((float(rows), float(width), flops / seconds / 1e12))
        return tuple(points)

    halves = products(2, gpu.achieved_tflops)
    wide = products(4, fp32)
    lengths = [2.0**i for i in range(6, 18)]
    attention = tuple((n, 128.0, gpu.achieved_tflops * 0.7 * n / (n + 512)) for n in lengths)
    low, high, basis = (*UNTRIED_CPU, "any CPU, not calibrated") if gpu.name == "cpu" else (*UNTRIED, "data sheet")
    inside = link.gb_per_second
    outside = nics_per_node * network.gb_per_second
    return Rates(
        basis=basis,
        products={"bfloat16": halves, "float32": wide},
        grouped=halves,
        attention=attention,
        attention_backward=tuple((n, width, rate / BACKWARD) for n, width, rate in attention),
        memory_gb_per_second=gpu.memory_gb_per_second,
        decode_gb_per_second=gpu.memory_gb_per_second / DECODED_BYTES,
        operator_seconds=OPERATOR,
        module_seconds=MODULE,
        sync_seconds=SYNC,
        collectives=tuple(
            Collective(kind, fabric, ranks, LATENCY + ranks * hop, rate)
            for fabric, rate, hop in (("link", inside, 1e-6), ("network", outside, 5e-6))
            for kind in KINDS
            for ranks in (2, 4, 8, 16, 32, 64)
        ),
        host_link_gb_per_second=host_link.gb_per_second,
        storage_gb_per_second=STORAGE,
        low=low,
        high=high,
    )


def slow_down(rates: Rates, factor: float) -> Rates:
    """Return a node's rates, at which all that it computes, copies and exchanges takes `factor` times as long."""

    def slower(points: Points) -> Points:
        return tuple((first, second, rate / factor) for first, second, rate in points)

    return replace(
        rates,
        products={dtype: slower(points) for dtype, points in rates.products.items()},
        grouped=slower(rates.grouped),
        attention=slower(rates.attention),
        attention_backward=slower(rates.attention_backward),
        memory_gb_per_second=rates.memory_gb_per_second / factor,
        decode_gb_per_second=rates.decode_gb_per_second / factor,
        operator_seconds=rates.operator_seconds * factor,
        module_seconds=rates.module_seconds * factor,
        sync_seconds=rates.sync_seconds * factor,
        collectives=tuple(
            replace(c, latency_seconds=c.latency_seconds * factor, gb_per_second=c.gb_per_second / factor)
            for c in rates.collectives
            if c.fabric == "link"
        ),
        host_link_gb_per_second=rates.host_link_gb_per_second / factor,
    )


FIGURES = ("name", "memory_gib", "bf16_tflops", "memory_gb_per_second")


def find_gpu(name: str | Mapping[str, Any], where: str = "cluster.gpu") -> Gpu:
    """Return the table's row, or one built from the run file's figures. An unknown name is an error that asks for
    figures."""
    if isinstance(name, Mapping):
        gib, peak, rate = (float(name[key]) for key in FIGURES[1:])
        return Gpu(name["name"], gib, peak, name.get("achieved_tflops", peak * ACHIEVED_SHARE), rate * MEMORY_SHARE)
    key = re.sub(r"[\s_/]+", "-", name.strip().lower())
    key = re.sub(r"^((nvidia|amd)-)?((instinct|tesla|geforce)-)?", "", key)
    figures = f"cluster.gpu: {{{', '.join(f'{figure}: …' for figure in FIGURES)}}}"
    if "-mig-" in key:  # the nearest row would be that of all of the GPU
        what = f"{name!r} is a part of a GPU, which no table has"
        raise UserError(what, where, f"give the part's figures: {figures}", "part-of-gpu")
    counted = re.fullmatch(r"(\d+)-?x?-?([a-z].*)", key)
    if counted and counted[2] in {*GPUS, *ALIASES} and key not in {*GPUS, *ALIASES}:
        hint = f"write cluster.gpu: {counted[2]} and cluster.gpus_per_node: {counted[1]}"
        if where == "--gpus":
            hint = f"did you mean {counted[1]}x{counted[2]}?"
        raise UserError(f"{name!r} is a number of GPUs and their kind in one word", where, hint, "number-in-name")
    key = _find("GPU", name, ALIASES.get(key, key), GPUS, ALIASES, figures, where)
    return GPUS[key]


def find_fabric(name: str | Mapping[str, Any], where: str = "cluster.network") -> Fabric:
    """Return the table's row by name or alias, or one built from given figures."""
    if isinstance(name, Mapping):
        return Fabric(str(name["name"]), float(name["gb_per_second"]))
    key = re.sub(r"[\s_]+", "-", name.strip().lower())
    key = FABRIC_ALIASES.get(key, key)
    return FABRICS[_find("fabric", name, key, FABRICS, FABRIC_ALIASES, "{name: …, gb_per_second: …}", where)]


def _find(
    kind: str, name: str, key: str, known: Collection[str], aliases: Collection[str], figures: str, where: str
) -> str:
    if key in known:
        return key
    close = difflib.get_close_matches(key, [*known, *aliases], 3, 0.6)
    nearest = "nearest: " + ", ".join(close) if close else "known: " + ", ".join(known)
    what = f"the {kind} {name!r} is not in the table"
    raise UserError(what, where, f"{nearest}; or give its figures in the run file: {figures}", "unknown-hardware")


@dataclass(frozen=True, slots=True)
class LocalMachine:
    gpus: tuple[GpuReading, ...]
    cpus: int
    memory_gib: float  # the smaller of the machine's and the control group's
    memory_limit_gib: float | None  # the control group's, if there is one
    notes: tuple[str, ...] = ()


def read_this_machine() -> LocalMachine:
    """Return GPUs as NVML reports them, and processors and memory within the control group's limits."""
    nvml = read_gpus(health=False)
    limit = read_memory_limit()
    kib = re.search(r"^MemTotal:\s+(\d+) kB", read_text(Path("/proc/meminfo")), re.MULTILINE)
    if kib:
        total = int(kib[1]) * 1024 / GIB
    elif platform.system() == "Windows":  # no sysconf there
        total = 0.0
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    notes = (nvml.error,) if nvml.error else ()
    gpus = keep_visible(nvml.gpus, os.environ)
    return LocalMachine(gpus, count_usable_cpus(), min(total, limit) if limit else total, limit, notes)


def parse_gpus(text: str, where: str) -> tuple[int, int, str]:
    """Parse 8xh200 as eight GPUs on one node, and 2x8xh200 as two such nodes."""
    match = re.fullmatch(r"(?:(\d+)x)?(?:(\d+)x)?(\d*[a-z].*|\d{4})", text.strip().lower().replace("×", "x"))
    counts = [int(count) for count in match.groups()[:2] if count] if match else [0]
    if match is None or 0 in counts:
        what = f"{text!r} is not a number of GPUs"
        raise UserError(what, where, "write 8xh200, or 2x8xh200 for two nodes", "not-gpu-count")
    nodes, per_node = [1, 1, *counts][-2:]
    return nodes, per_node, find_gpu(match[3], where).name


def has_bf16_products() -> bool:
    """Return whether this machine's processor has instructions for products in bfloat16."""
    lines = read_text(Path("/proc/cpuinfo")).splitlines()
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags.split())


def read_gpu_name() -> str:
    """Return the name of this machine's first GPU, or `cpu` if there is none."""
    gpus = read_gpus(health=False).gpus
    return gpus[0].name if gpus else "cpu"


# Enumerators of nvml.h. Every driver knows them; older bindings don't name them all.
TEMPERATURE_GPU = 0
CLOCK_SM = 1
CLOCK_MEM = 2
PCIE_SENT = 0
PCIE_RECEIVED = 1
NVLINK_SENT = 138
NVLINK_RECEIVED = 139
ALL_LINKS = 0xFFFFFFFF
MAX_NVLINKS = 36
UNCORRECTED = 1
SINCE_DRIVER_START = 0
# Bits of nvmlDeviceGetCurrentClocksEventReasons, from nvml.h. Idle and application clocks are no fault.
THROTTLE: Final = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
# Clocks lowered by a fault; a power cap reached under load, or a sync boost, is none.
THROTTLE_FAULTS: Final = frozenset(THROTTLE.values()) - {"software power cap", "sync boost"}


@dataclass(frozen=True, slots=True)
class GpuReading:
    """NVML's current report about one GPU. None: the GPU, the driver or the binding doesn't report it."""

    index: int
    name: str
    memory_gib: float
    free_gib: float
    uuid: str | None = None
    processes: tuple[int, ...] | None = ()  # ids of processes on it that are not this one
    ecc_uncorrected: int | None = 0  # ECC errors since the driver started that were not corrected
    remap_pending: bool | None = False  # rows wait for a reset to be remapped, or could not be
    throttle: tuple[str, ...] | None = ()  # of THROTTLE
    nvlinks: int | None = 0
    nvlinks_up: int | None = 0
    pcie_width: int | None = 16
    pcie_width_max: int | None = 16


@dataclass(frozen=True, slots=True)
class Gpus:
    gpus: tuple[GpuReading, ...] = ()
    error: str = ""
    driver: str | None = None
    installed: bool = True  # nvidia-ml-py; without it nothing is known of GPUs


def read_gpus(*, health: bool = True) -> Gpus:
    """Read every GPU's memory; with `health` also errors, clocks, links and processes."""
    nvml = Nvml()
    if nvml.error:
        return Gpus(error=nvml.error, installed=nvml.installed)
    try:
        gpus = tuple(nvml.read_gpu(index, gpu, health=health) for index, gpu in enumerate(nvml.handles()))
        return Gpus(gpus, "" if gpus else "NVML lists no GPU", nvml.ask("nvmlSystemGetDriverVersion"))
    except nvml.library.NVMLError as error:
        return Gpus(error=f"NVML stopped answering: {error}")
    finally:
        nvml.library.nvmlShutdown()


def keep_visible(gpus: tuple[GpuReading, ...], environ: Mapping[str, str]) -> tuple[GpuReading, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES lists, by index or the beginning of a UUID; all if it is not set, or
    lists parts of GPUs, whose UUIDs are their own."""
    if "CUDA_VISIBLE_DEVICES" not in environ:
        return gpus
    names = [name.strip() for name in environ["CUDA_VISIBLE_DEVICES"].split(",")]
    if any(name.startswith("MIG-") for name in names):
        return gpus
    uuids = tuple(name for name in names if name.startswith("GPU-"))
    return tuple(gpu for gpu in gpus if str(gpu.index) in names or (gpu.uuid or "").startswith(uuids))


class Nvml:
    """NVIDIA's management library, opened. `error` says why it can't be used."""

    def __init__(self) -> None:
        self.error = ""
        self.installed = True
        try:
            import pynvml
        except ImportError:
            self.error = "nvidia-ml-py is not installed (pip install nvidia-ml-py)"
            self.installed = False
            return
        self.library: Any = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.error = f"NVML does not start: {error}"

    def ask(self, function: str, *arguments: Any) -> Any:
        """Return the answer, or None if the GPU, the driver or the binding doesn't support the query."""
        try:
            answer = getattr(self.library, function)(*arguments)
        except (AttributeError, TypeError, ValueError, self.library.NVMLError):  # UnicodeDecodeError: garbled names
            return None
        return answer.decode(errors="replace") if isinstance(answer, bytes) else answer

    def handles(self) -> list[Any]:
        """Return handles of every GPU; in MIG mode of its instances, on which alone processes can compute."""
        handles = []
        for index in range(self.library.nvmlDeviceGetCount()):
            gpu = self.library.nvmlDeviceGetHandleByIndex(index)
            if not (self.ask("nvmlDeviceGetMigMode", gpu) or [0])[0]:
                handles.append(gpu)
                continue
            most = self.ask("nvmlDeviceGetMaxMigDeviceCount", gpu) or 0
            instances = (self.ask("nvmlDeviceGetMigDeviceHandleByIndex", gpu, number) for number in range(most))
            handles += [instance for instance in instances if instance is not None]
        return handles

    def find(self, uuid: str, index: int) -> Any:
        """Return the GPU that torch calls `index`, by UUID if possible: NVML ignores CUDA_VISIBLE_DEVICES."""
        for name in (f"GPU-{uuid}", f"MIG-{uuid}", uuid):
            gpu = self.ask("nvmlDeviceGetHandleByUUID", name)
            if gpu is not None:
                return gpu
        return self.ask("nvmlDeviceGetHandleByIndex", index)

    def read_gpu(self, index: int, gpu: Any, *, health: bool = True) -> GpuReading:
        """Read one GPU. Raises NVMLError if not even its memory can be read."""
        memory = self.library.nvmlDeviceGetMemoryInfo(gpu)
        name = self.ask("nvmlDeviceGetName", gpu) or "unknown GPU"
        reading = GpuReading(index, name, memory.total / GIB, memory.free / GIB, self.ask("nvmlDeviceGetUUID", gpu))
        if not health:
            return reading
        running = self.ask("nvmlDeviceGetComputeRunningProcesses", gpu)
        remapped = self.ask("nvmlDeviceGetRemappedRows", gpu)  # corrected, uncorrected, pending, failed
        states = (self.ask("nvmlDeviceGetNvLinkState", gpu, link) for link in range(MAX_NVLINKS))
        links = [bool(state) for state in states if state is not None]
        return replace(
            reading,
            processes=None if running is None else tuple(p.pid for p in running if p.pid != os.getpid()),
            ecc_uncorrected=self.ask("nvmlDeviceGetTotalEccErrors", gpu, UNCORRECTED, SINCE_DRIVER_START),
            remap_pending=None if remapped is None else bool(remapped[2] or remapped[3]),
            throttle=self._throttle(gpu),
            nvlinks=len(links) or None,
            nvlinks_up=sum(links) if links else None,
            pcie_width=self.ask("nvmlDeviceGetCurrPcieLinkWidth", gpu),
            pcie_width_max=self.ask("nvmlDeviceGetMaxPcieLinkWidth", gpu),
        )

    def read_load(self, gpu: Any, *, pcie: bool = True) -> dict[str, Any]:
        """Return a GPU's current load, by the step files' field names. The driver measures PCIe for 20 ms per
        direction."""
        rates = self.ask("nvmlDeviceGetUtilizationRates", gpu)
        milliwatts = self.ask("nvmlDeviceGetPowerUsage", gpu)
        throttle = self._throttle(gpu)
        load = {
            "gpu_utilization": rates and rates.gpu / 100,
            "gpu_memory_utilization": rates and rates.memory / 100,
            "gpu_power_watts": milliwatts and milliwatts / 1000,
            "gpu_temperature_celsius": self.ask("nvmlDeviceGetTemperature", gpu, TEMPERATURE_GPU),
            "gpu_sm_clock_mhz": self.ask("nvmlDeviceGetClockInfo", gpu, CLOCK_SM),
            "gpu_memory_clock_mhz": self.ask("nvmlDeviceGetClockInfo", gpu, CLOCK_MEM),
            "gpu_throttle": None if throttle is None else list(throttle),
        }
        for way, counter, field in (("sent", PCIE_SENT, NVLINK_SENT), ("received", PCIE_RECEIVED, NVLINK_RECEIVED)):
            kib = self.ask("nvmlDeviceGetPcieThroughput", gpu, counter) if pcie else None
            load[f"pcie_{way}_gb_per_second"] = None if kib is None else kib * 1024 / 1e9
            # KiB since the driver started, over all links
            values = self.ask("nvmlDeviceGetFieldValues", gpu, [(field, ALL_LINKS)])
            known = values and not values[0].nvmlReturn
            load[f"nvlink_{way}_total_gb"] = float(values[0].value.ullVal) * 1024 / 1e9 if known else None
        return load

    def _throttle(self, gpu: Any) -> tuple[str, ...] | None:
        reasons = self.ask("nvmlDeviceGetCurrentClocksEventReasons", gpu)
        if reasons is None:  # its name in drivers before 535
            reasons = self.ask("nvmlDeviceGetCurrentClocksThrottleReasons", gpu)
        return None if reasons is None else tuple(text for bit, text in THROTTLE.items() if reasons & bit)


def list_interface_addresses(name: str, root: Path = Path("/")) -> list[str]:
    """Return the IP addresses of a network interface, without link-local ones, which reach nobody beyond the cable."""
    import fcntl

    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
        addresses.append(socket.inet_ntoa(answer[20:24]))
    for line in read_text(root / "proc/net/if_inet6").splitlines():
        fields = line.split()
        if len(fields) == 6 and fields[5] == name and fields[3] != "20":
            addresses.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0])))
    return addresses


CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
MEMORY_LIMITS = ("memory.max", "memory.limit_in_bytes")  # of version 2 and 1


def list_control_groups(controller: str, root: Path = CONTROL_GROUPS, own: Path = OWN_GROUPS) -> Iterator[Path]:
    """Yield the folders of this process's control group and of its parents, which limit it too: in version 2, and in
    version 1, which has a tree for each controller."""
    for line in ("0::/", f"0:{controller}:/", *read_text(own).splitlines()):
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            tree = root / controller if controllers else root
            group = tree / path.strip("/")  # not there if the container sees its own group as the tree's root
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(tree))


def count_usable_cpus(root: Path = CONTROL_GROUPS, own: Path = OWN_GROUPS) -> int:
    """Return the number of processors that this process may use, within the control groups' quotas."""
    affinity = getattr(os, "sched_getaffinity", None)
    allowed = len(affinity(0)) if affinity else os.cpu_count() or 1
    for group in list_control_groups("cpu", root, own):
        quota, period, *_ = (*read_text(group / "cpu.max").split(), "", "")
        if quota.isdigit() and period.isdigit() and int(period):
            allowed = min(allowed, max(1, int(quota) // int(period)))
    return allowed


def read_memory_limit(root: Path = CONTROL_GROUPS, own: Path = OWN_GROUPS) -> float | None:
    """Return the lowest limit of the control groups in GiB; version 1 writes 'no limit' as a huge number."""
    files = (group / name for group in list_control_groups("memory", root, own) for name in MEMORY_LIMITS)
    lines = (read_text(file).strip() for file in files)
    return min((int(line) / GIB for line in lines if line.isdigit() and int(line) < 2**60), default=None)


def read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
