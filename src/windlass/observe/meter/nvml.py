"""What NVIDIA's management library says of the GPUs. What a GPU or driver doesn't know is None, never an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import pynvml
except ImportError:  # nvidia-ml-py belongs to the extra `gpu`
    pynvml = None

GIB = 2**30

# Bits of nvmlDeviceGetCurrentClocksEventReasons, from nvml.h. Idle and application clocks are no fault.
THROTTLE = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


def why_absent() -> str:
    """Why there is nothing to ask; empty when there is."""
    if pynvml is None:
        return "nvidia-ml-py is not installed (pip install 'windlass[gpu]')"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"NVML does not start: {error}"
    return ""


def nvml_gpu_stats() -> list[dict[str, Any]]:
    """One dict per GPU of this machine, with the field names of the step files; no GPU or no NVML: an empty list."""
    if why_absent():
        return []
    try:
        return [read(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []


def driver() -> str | None:
    if why_absent():
        return None
    version = _ask(lambda: pynvml.nvmlSystemGetDriverVersion())
    return version.decode() if isinstance(version, bytes) else version


def handle(uuid: str, index: int) -> Any:
    """The GPU that torch calls `index`: by UUID, because NVML doesn't know CUDA_VISIBLE_DEVICES."""
    for name in (f"GPU-{uuid}", f"MIG-{uuid}", uuid):
        found = _ask(lambda name=name: pynvml.nvmlDeviceGetHandleByUUID(name))  # type: ignore[misc]
        if found is not None:
            return found
    return _ask(lambda: pynvml.nvmlDeviceGetHandleByIndex(index))


def read(gpu: Any, *, pcie: bool = True) -> dict[str, Any]:
    """Everything that one GPU says now. PCIe takes its time: the driver counts for 20 ms in each direction."""
    rates = _ask(lambda: pynvml.nvmlDeviceGetUtilizationRates(gpu))
    memory = _ask(lambda: pynvml.nvmlDeviceGetMemoryInfo(gpu))
    milliwatts = _ask(lambda: pynvml.nvmlDeviceGetPowerUsage(gpu))
    reasons = _ask(lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu))
    if reasons is None:  # its name in drivers before 535
        reasons = _ask(lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))
    name = _ask(lambda: pynvml.nvmlDeviceGetName(gpu))
    return {
        "name": name.decode() if isinstance(name, bytes) else name,
        "memory_total_gib": memory and memory.total / GIB,
        "memory_used_gib": memory and memory.used / GIB,
        "gpu_utilization": rates and rates.gpu / 100,
        "gpu_memory_utilization": rates and rates.memory / 100,
        "gpu_power_watts": milliwatts and milliwatts / 1000,
        "gpu_temperature_celsius": _ask(lambda: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)),
        "gpu_sm_clock_mhz": _ask(lambda: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)),
        "gpu_memory_clock_mhz": _ask(lambda: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM)),
        "gpu_throttle": None if reasons is None else [text for bit, text in THROTTLE.items() if reasons & bit],
        "pcie_sent_gb_per_second": _pcie(gpu, "NVML_PCIE_UTIL_TX_BYTES") if pcie else None,
        "pcie_received_gb_per_second": _pcie(gpu, "NVML_PCIE_UTIL_RX_BYTES") if pcie else None,
        **_nvlink(gpu),
    }


def _pcie(gpu: Any, counter: str) -> float | None:
    kib = _ask(lambda: pynvml.nvmlDeviceGetPcieThroughput(gpu, getattr(pynvml, counter)))
    return None if kib is None else kib * 1024 / 1e9


def _nvlink(gpu: Any) -> dict[str, float | None]:
    """Totals since the driver started, over all links."""
    sent = _field(gpu, "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX")
    received = _field(gpu, "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX")
    return {"nvlink_sent_total_gb": sent, "nvlink_received_total_gb": received}


def _field(gpu: Any, name: str) -> float | None:
    """An NVLink counter in KiB, of scope 'all links' (UINT_MAX in nvml.h)."""

    values = _ask(lambda: pynvml.nvmlDeviceGetFieldValues(gpu, [(getattr(pynvml, name), 0xFFFFFFFF)]))
    if not values or values[0].nvmlReturn:
        return None
    return float(values[0].value.ullVal) * 1024 / 1e9


def _ask(question: Callable[[], Any]) -> Any:
    """The answer, or None where the GPU, the driver or the binding doesn't know the question."""
    try:
        return question()
    except (AttributeError, TypeError, ValueError, UnicodeDecodeError):
        return None
    except pynvml.NVMLError:
        return None
