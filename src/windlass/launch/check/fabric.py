"""InfiniBand, PCIe and interfaces as the kernel shows them below /sys and /dev."""

from __future__ import annotations

import fcntl
import re
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from windlass.launch.check.machine import wants_rdma
from windlass.launch.check.result import Result, failed, passed, unseen, warned
from windlass.plan.script import AnyPlan

SIOCGIFADDR = 0x8915  # linux/sockios.h
# A fabric's name gives its line rate: infiniband-400. Those that are named by generation are looked up by alias first.
LINE_RATE = re.compile(r"-(\d+)$")


@dataclass(frozen=True, slots=True)
class Port:
    device: str
    number: str
    state: str  # ACTIVE, INIT, DOWN …
    gigabits: float
    layer: str  # InfiniBand or Ethernet
    usable: bool  # there is a verbs device for it in this container

    @property
    def name(self) -> str:
        return f"{self.device}:{self.number}"


def ports(root: Path) -> list[Port]:
    """Every port of every RDMA card that this container sees."""
    found = []
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        device = port.parent.parent
        rate = re.match(r"[\d.]+", _text(port / "rate"))
        verbs = [d.name for d in (root / "sys/class/infiniband_verbs").glob("*") if _text(d / "ibdev") == device.name]
        usable = any((root / "dev/infiniband" / name).exists() for name in verbs)
        state = _text(port / "state").partition(":")[2].strip()
        gigabits = float(rate[0]) if rate else 0.0
        found.append(Port(device.name, port.name, state, gigabits, _text(port / "link_layer"), usable))
    return found


def chosen(found: Sequence[Port], hca: str) -> list[Port]:
    """Those that NCCL_IB_HCA lets NCCL use: prefixes, exact with =, all but these with ^."""
    exclude, exact = hca.startswith("^"), "=" in hca[:2]
    names = [name for name in hca.lstrip("^=").split(",") if name]

    def named(port: Port) -> bool:
        return any(port.name == n or (port.device == n if exact else port.device.startswith(n)) for n in names)

    return [port for port in found if named(port) != exclude] if names else list(found)


def infiniband(plan: AnyPlan, root: Path, environ: Mapping[str, str]) -> Result:
    """As many active ports as the plan counts on, at the rate that the fabric's name states."""
    if not wants_rdma(plan):
        return unseen("InfiniBand", "this run asks for none")
    network, nics, place = plan.machine.network, plan.machine.nics_per_node, plan.loaded.where("cluster.network")
    everything = ports(root)
    if not everything:
        hint = "ask for the network cards in cluster.extended_resources, or set cluster.network to what there is"
        return failed("InfiniBand", f"{network.name} is planned, and this container sees no RDMA card", hint, place)
    hca = environ.get("NCCL_IB_HCA", "")
    mine = chosen(everything, hca)
    if not mine:
        names = ", ".join(port.name for port in everything)
        return failed("InfiniBand", f"NCCL_IB_HCA={hca} matches none of {names}", "name one of these", place)
    active = [port for port in mine if port.state == "ACTIVE"]
    said = ", ".join(f"{port.name} {port.state or 'unknown'} at {port.gigabits:g} Gb/s" for port in mine)
    if len(active) < nics:
        hint = "the cable, the switch port or the subnet manager; or choose others with NCCL_IB_HCA"
        return failed("InfiniBand", f"{len(active)} ports active, {nics} planned: {said}", hint, place)
    if not all(port.usable for port in active):
        closed = ", ".join(port.name for port in active if not port.usable)
        hint = "the card is not given to this container: cluster.extended_resources asks for it"
        return failed("InfiniBand", f"no device below /dev/infiniband for {closed}", hint, place)
    rate = LINE_RATE.search(network.name)
    slow = [port.name for port in active if rate and port.gigabits < float(rate[1])]
    if slow:
        hint = "a cable or port that trained down; or state the real rate in cluster.network"
        return failed("InfiniBand", f"slower than {network.name}: {said}", hint, place)
    return passed("InfiniBand", said)


def peer_memory(plan: AnyPlan, root: Path) -> Result:
    """GPU memory straight to the network card: a kernel module, or DMA-BUF of newer kernels with the open driver."""
    if not wants_rdma(plan) or plan.machine.gpu.name == "cpu":
        return unseen("GPUDirect RDMA", "this run asks for none")
    modules = root / "sys/module"
    for name in ("nvidia_peermem", "nv_peer_mem"):
        if (modules / name).is_dir():
            return passed("GPUDirect RDMA", name)
    kernel = tuple(int(part) for part in re.findall(r"\d+", _text(root / "proc/sys/kernel/osrelease"))[:2])
    if kernel >= (5, 12) and "open" in _text(root / "proc/driver/nvidia/version").lower():
        return passed("GPUDirect RDMA", f"DMA-BUF: kernel {kernel[0]}.{kernel[1]} and NVIDIA's open kernel module")
    hint = "load nvidia_peermem on the node (GPU operator: driver.rdma.enabled); transfers go through host memory"
    return warned("GPUDirect RDMA", "no peer memory module, and no open driver for DMA-BUF", hint)


def interfaces(pattern: str, names: Sequence[str], *, exact: bool) -> list[str]:
    """Interfaces that a *_SOCKET_IFNAME stands for: NCCL's match by prefix unless =, ^ excludes; gloo's are exact."""
    exclude, exact = pattern.startswith("^"), exact or "=" in pattern[:2]
    wanted = [name for name in pattern.lstrip("^=").split(",") if name]
    return [n for n in names if any(n == w or (not exact and n.startswith(w)) for w in wanted) != exclude]


def interface(environ: Mapping[str, str], root: Path) -> list[Result]:
    """Each interface that the environment chooses exists, is up and has an address."""
    names = sorted(path.name for path in (root / "sys/class/net").glob("*"))
    found = []
    for variable, exact in (("NCCL_SOCKET_IFNAME", False), ("GLOO_SOCKET_IFNAME", True)):
        pattern, title = environ.get(variable, ""), f"interface {variable}"
        if not pattern:
            found.append(unseen(title, "is not set: the library chooses"))
            continue
        mine = interfaces(pattern, names, exact=exact)
        up = [name for name in mine if _text(root / "sys/class/net" / name / "operstate") != "down"]
        having = [name for name in up if addresses(name, root)]
        if having:
            shown = ", ".join(f"{name} {addresses(name, root)[0]}" for name in having)
            found.append(passed(title, f"{pattern}: {shown}"))
        elif not mine:
            hint = f"set {variable} to one of them, or cluster.networks so that the pod gets it"
            found.append(failed(title, f"no interface {pattern}; there are {', '.join(names) or 'none'}", hint))
        else:
            state = "has no address" if up else "is down"
            found.append(failed(title, f"{', '.join(mine)} {state}", "the pod's network gives it none: see its status"))
    return found


def addresses(name: str, root: Path = Path("/")) -> list[str]:
    """IPv4 by asking the kernel, IPv6 from its table. Link-local ones reach nobody beyond the cable."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        try:
            answer = fcntl.ioctl(asker.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            found.append(socket.inet_ntoa(answer[20:24]))
        except OSError:
            pass
    for line in _text(root / "proc/net/if_inet6").splitlines():
        fields = line.split()
        if len(fields) == 6 and fields[5] == name and fields[3] != "20":
            found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0])))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
