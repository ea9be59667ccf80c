"""What NCCL's own log says of the fabric: the transports that its channels really use."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

LOG = "nccl-%h-%p.log"  # NCCL puts in the host and the process
PATTERN = "nccl-*.log"

# `… NCCL INFO Channel 00/0 : 1[0] -> 2[0] [send] via NET/Socket/0`; over InfiniBand `via NET/IB/0/GDRDMA`.
CHANNEL = re.compile(rb"via NET/(?P<net>[A-Za-z]+)/\d+(?P<direct>/GDRDMA)?")


def environment(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """What makes NCCL write that log into the run folder; nothing where the user directs NCCL's log otherwise."""
    if "NCCL_DEBUG" in environ or "NCCL_DEBUG_FILE" in environ:
        return {}
    return {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(folder / LOG)}


def transports(lines: Iterable[bytes]) -> dict[str, int]:
    """Channels between nodes by transport: IB, Socket, or what a plugin calls itself."""
    found: dict[str, int] = {}
    for line in lines:
        if match := CHANNEL.search(line):
            name = match["net"].decode()
            found[name] = found.get(name, 0) + 1
    return found


def fell_back(found: Mapping[str, int], expected: str) -> str:
    """What to say when channels go over sockets although `expected` names InfiniBand; else nothing."""
    sockets = found.get("Socket", 0)
    if not sockets or not expected:
        return ""
    return (
        f"NCCL sends {sockets} of {sum(found.values())} channels between nodes over sockets, and there is {expected}:"
        " see `windlass check --in-pod`, NCCL_IB_HCA and the pod's RDMA resource"
    )
