"""Machines for tests: network namespaces on one bridge, each with its own host name."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


def _ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=200, check=check)


@functools.cache
def why_not() -> str:
    """Return why no namespaces can be created here; empty if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    try:
        _ip("netns", "add", f"wl{os.getpid()}probe")
        _ip("-n", f"wl{os.getpid()}probe", "link", "add", "v0", "type", "veth", "peer", "name", "v1")
    except (OSError, subprocess.SubprocessError) as error:
        return f"no network namespaces: {getattr(error, 'stderr', '') or error}".strip()
    finally:
        with contextlib.suppress(OSError):
            _ip("netns", "del", f"wl{os.getpid()}probe", check=False)
    return ""


class Hosts:
    """Several machines with the addresses 10.77.0.1N on eth0."""

    def __init__(self, count: int) -> None:
        self.prefix = f"wl{os.getpid()}n"
        self.count = count
        self.running: list[subprocess.Popen[str]] = []

    def address(self, node: int) -> str:
        return f"10.77.0.1{node}"

    def up(self) -> None:
        switch = f"{self.prefix}s"
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for node in range(self.count):
            name = f"{self.prefix}{node}"
            _ip("netns", "add", name)
            _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"p{node}", "netns", switch)
            _ip("-n", switch, "link", "set", f"p{node}", "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def start(self, node: int, command: Sequence[str], environ: Mapping[str, str], log: Path) -> subprocess.Popen[str]:
        """Run a command as on that machine, in its own session."""
        within = ["ip", "netns", "exec", f"{self.prefix}{node}", "unshare", "--uts", "bash", "-c"]
        inner = ['hostname "$0" && exec "$@"', f"machine-{node}", *command]
        with log.open("w") as stream:
            process = subprocess.Popen(
                [*within, *inner], env=dict(environ), stdout=stream, stderr=stream, start_new_session=True, text=True
            )
        self.running.append(process)
        return process

    def pids(self, node: int) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", f"{self.prefix}{node}", check=False).stdout.split()]

    def kill(self, node: int) -> None:
        """Cut the machine's power."""
        for pid in self.pids(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def unplug(self, node: int) -> None:
        _ip("-n", f"{self.prefix}s", "link", "set", f"p{node}", "down")

    def slow_down(self, node: int) -> None:
        limit = ("rate", "200mbit", "burst", "256kb", "latency", "400ms")
        name = f"{self.prefix}{node}"
        subprocess.run(
            ["tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf", *limit], timeout=200, check=True
        )

    def cut(self, node: int, other: int) -> None:
        _ip("-n", f"{self.prefix}{node}", "route", "add", "blackhole", f"{self.address(other)}/32")

    def down(self) -> None:
        for node in range(self.count):
            self.kill(node)
        for process in self.running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(120)
        for name in [f"{self.prefix}{node}" for node in range(self.count)] + [f"{self.prefix}s"]:
            _ip("netns", "del", name, check=False)


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    made = Hosts(count)
    try:
        made.up()
        yield made
    finally:
        made.down()
