"""What NVIDIA's management library says of each GPU of this machine. What a GPU does not know is None."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from windlass.observe.meter.nvml import THROTTLE

GIB = 2**30
# Clocks held down by a fault; a power cap reached while idle clocks rise is none.
FAULTS = ("hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "hardware power brake")


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU now."""

    index: int
    name: str
    memory_gib: float
    free_gib: float
    others: tuple[int, ...] | None = ()  # processes that are not this one
    uncorrected: int | None = 0  # ECC errors since the driver started that were not corrected
    remap_pending: bool | None = False  # rows wait for a reset to be remapped, or could not be
    throttle: tuple[str, ...] | None = ()
    persistence: bool | None = True
    links_up: int | None = 0  # NVLinks
    links: int | None = 0
    pcie_width: int | None = 16
    pcie_width_most: int | None = 16


@dataclass(frozen=True, slots=True)
class Seen:
    """All GPUs, or why there are none."""

    cards: tuple[Card, ...] = ()
    why: str = ""
    looked: bool = True  # False: there was nothing to ask
    driver: str | None = None


def look() -> Seen:
    try:
        import pynvml
    except ImportError:
        return Seen(why="nvidia-ml-py is not installed (pip install 'windlass[gpu]')", looked=False)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Seen(why=f"NVML does not start: {error}")
    try:
        count = pynvml.nvmlDeviceGetCount()
        cards = tuple(card(pynvml, index) for index in range(count))
        driver = ask(pynvml, pynvml.nvmlSystemGetDriverVersion)
    except pynvml.NVMLError as error:
        return Seen(why=f"NVML stopped answering: {error}")
    finally:
        pynvml.nvmlShutdown()
    return Seen(cards, "" if cards else "NVML lists no GPU", driver=text(driver) if driver else None)


def card(nvml: Any, index: int) -> Card:
    gpu = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(gpu)

    def of(question: str, *arguments: Any) -> Any:
        return ask(nvml, lambda: getattr(nvml, question)(gpu, *arguments))

    running = of("nvmlDeviceGetComputeRunningProcesses")
    reasons = of("nvmlDeviceGetCurrentClocksThrottleReasons")
    remapped = of("nvmlDeviceGetRemappedRows")  # corrected, uncorrected, pending, failed
    persistence = of("nvmlDeviceGetPersistenceMode")
    states = [of("nvmlDeviceGetNvLinkState", link) for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18))]
    return Card(
        index=index,
        name=text(nvml.nvmlDeviceGetName(gpu)),
        memory_gib=memory.total / GIB,
        free_gib=memory.free / GIB,
        others=None if running is None else tuple(p.pid for p in running if p.pid != os.getpid()),
        uncorrected=of(
            "nvmlDeviceGetTotalEccErrors",
            getattr(nvml, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", 1),
            getattr(nvml, "NVML_VOLATILE_ECC", 0),
        ),
        remap_pending=None if remapped is None else bool(remapped[2] or remapped[3]),
        throttle=None if reasons is None else tuple(said for bit, said in THROTTLE.items() if reasons & bit),
        persistence=None if persistence is None else bool(persistence),
        links=None if all(state is None for state in states) else sum(state is not None for state in states),
        links_up=None if all(state is None for state in states) else sum(bool(state) for state in states),
        pcie_width=of("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_width_most=of("nvmlDeviceGetMaxPcieLinkWidth"),
    )


def ask(nvml: Any, question: Callable[[], Any]) -> Any:
    """The answer, or None where the GPU, the driver or the binding doesn't know the question."""
    try:
        return question()
    except (nvml.NVMLError, AttributeError):
        return None


def text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
