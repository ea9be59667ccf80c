"""Train with any engine on one or two ranks, and measure it from outside, so that all are measured alike."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LIMIT = 3600  # seconds for one training
Processes = Sequence[subprocess.Popen[bytes]]


@dataclass
class Measured:
    ok: bool
    steps: int = 0
    step_seconds: float = 0.0  # between the ends of the first and the last optimizer step
    first_step_seconds: float = 0.0  # from starting the processes to the end of the first
    peak_gib: float = 0.0  # most resident memory of a rank
    sent_mb: float | None = None  # by rank 0, per optimizer step
    why: str = ""


def race(
    words: Sequence[str],
    out: Path,
    steps_done: Callable[[], int],
    *,
    ranks: int = 2,
    gbit: float | None = None,
    environ: Mapping[str, str] | None = None,
) -> Measured:
    """Run `words` as every rank, in `out`. `steps_done` counts the optimizer steps that have ended."""
    with network(gbit) as hosts, contextlib.ExitStack() as stack:
        shared = {
            **os.environ,
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "10.78.0.1" if hosts else "localhost",
            "MASTER_PORT": str(free_port()),
            "GLOO_SOCKET_IFNAME": "eth0" if hosts else "lo",
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            **(environ or {}),
        }
        began, crew = time.perf_counter(), []
        for rank in range(ranks):
            log = stack.enter_context((out / f"rank{rank}.log").open("w"))
            inside = ["ip", "netns", "exec", hosts[rank]] if hosts else []
            env = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            crew.append(subprocess.Popen([*inside, *words], env=env, stdout=log, stderr=subprocess.STDOUT, cwd=out))
            stack.callback(crew[-1].kill)
        return look_on(crew, hosts, out, steps_done, began)


def look_on(crew: Processes, hosts: Sequence[str], out: Path, steps_done: Callable[[], int], began: float) -> Measured:
    """Record twenty times a second the steps that have ended, peak memory and network traffic."""
    ends: list[tuple[float, float]] = []  # of steps: seconds, bytes that rank 0 had sent by then
    peak = 0.0
    while any(process.poll() is None for process in crew):
        if any(process.poll() for process in crew) or time.perf_counter() - began > LIMIT:
            break
        time.sleep(0.05)
        if (ended := steps_done() - len(ends)) > 0:
            ends += [(time.perf_counter() - began, sent_bytes(hosts))] * ended
        peak = max(peak, *(peak_gib(process.pid) for process in crew))
    if any(process.poll() != 0 for process in crew) or len(ends) < 2:
        return Measured(False, why="\n".join(log.read_text()[-2000:] for log in sorted(out.glob("rank*.log"))))
    (first, before), (last, after) = ends[0], ends[-1]
    sent = (after - before) / (len(ends) - 1) / 1e6 if hosts else None
    return Measured(True, len(ends), (last - first) / (len(ends) - 1), first, peak, sent)


@contextlib.contextmanager
def network(gbit: float | None) -> Iterator[list[str]]:
    """Create a network namespace for each of two ranks, connected at full speed or at `gbit`."""
    if os.geteuid() != 0:
        if gbit:
            raise SystemExit("a throttled link needs network namespaces, and these need root")
        yield []
        return
    names = [f"wl{os.getpid()}{end}" for end in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for number, name in enumerate(names, start=1):
            ip("-n", name, "addr", "add", f"10.78.0.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            if gbit:
                rate = ["rate", f"{gbit * 1000:.0f}mbit", "burst", "512kb", "latency", "200ms"]
                subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf", *rate], check=True)
        yield names
    finally:
        for name in names:
            ip("netns", "del", name, check=False)


def ip(*words: str, check: bool = True) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=check, timeout=20).stdout


def sent_bytes(hosts: Sequence[str]) -> float:
    if not hosts:
        return 0.0
    return float(json.loads(ip("-n", hosts[0], "-j", "-s", "link", "show", "eth0"))[0]["stats64"]["tx"]["bytes"])


def peak_gib(pid: int) -> float:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 2**20
    return 0.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
