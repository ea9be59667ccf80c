"""Whether the network interfaces that the environment names are there: a wrong one ends in silence or in a hang."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from windlass.errors import FAILED, RANK_USER_INPUT

SIOCGIFADDR = 0x8915  # man netdevice


def complaint(environ: Mapping[str, str], nodes: int) -> tuple[str, int] | None:
    """What is wrong on this node, and its exit code: a name that is nowhere is the input's fault."""
    there = [name for _, name in socket.if_nameindex()]
    for variable, chosen in (
        ("GLOO_SOCKET_IFNAME", _exact(environ.get("GLOO_SOCKET_IFNAME", ""), there)),
        ("NCCL_SOCKET_IFNAME", _by_prefix(environ.get("NCCL_SOCKET_IFNAME", ""), there)),
    ):
        value = environ.get(variable)
        if not value:
            continue
        if not chosen:
            return f"{variable}={value} names no interface of this node; it has {', '.join(there)}", RANK_USER_INPUT
        if nodes > 1 and set(chosen) == {"lo"}:
            return f"{variable}={value} reaches no other node", RANK_USER_INPUT
        if not any(map(_has_address, chosen)):
            return f"{variable}={value}: {', '.join(chosen)} has no IP address", FAILED
    return None


def _exact(value: str, there: list[str]) -> list[str]:
    return [name for name in there if name in value.split(",")]


def _by_prefix(value: str, there: list[str]) -> list[str]:
    """NCCL's rules: prefixes; `=` for exact names; `^` for all but those."""
    excluded, exact = value.startswith("^"), value.lstrip("^").startswith("=")
    names = [name for name in value.lstrip("^=").split(",") if name]
    return [
        name for name in there if any(name == one if exact else name.startswith(one) for one in names) is not excluded
    ]


def _has_address(name: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            table = Path("/proc/net/if_inet6")
            return table.exists() and any(line.split()[-1] == name for line in table.read_text().splitlines())
    return True
