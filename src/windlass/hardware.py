"""GPUs and fabrics as a table with sources, and what this machine really has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_gib: float  # what a process can take, not what the box says
    bf16_tflops: float  # dense peak
    achieved_tflops: float  # what mixtures of experts sustain, for estimates
    memory_gb_per_second: float
    source: str


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
