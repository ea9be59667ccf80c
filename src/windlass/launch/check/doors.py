"""Who reaches whom, and whose clock is off: each node opens a port, and every other one knocks."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from windlass.launch.check.result import Result, failed, passed, unseen, warned

KNOCK_SECONDS = 5.0
ASKED = 5  # times the clock is asked; the quickest answer counts
SKEW_WARN_SECONDS = 1.0  # logs of two nodes no longer tell what came first
SKEW_FAIL_SECONDS = 60.0  # locks, caches and certificates go by times of change


class Door:
    """A port of this node that answers every byte with the time; closed with `close`."""

    def __init__(self, address: str = "", clock: Callable[[], float] = time.time) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family, backlog=64)
        self.port = int(self._server.getsockname()[1])
        self._clock = clock
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                guest, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(guest,), daemon=True).start()

    def _answer(self, guest: socket.socket) -> None:
        with suppress(OSError), guest:
            guest.settimeout(KNOCK_SECONDS)
            while guest.recv(1):
                guest.sendall(f"{self._clock():.6f}\n".encode())

    def close(self) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._server.close()


def knock(address: str, port: int, clock: Callable[[], float] = time.time) -> tuple[str, float | None]:
    """Why a node cannot be reached (empty if it can), and how far its clock is ahead of this one's."""
    answers: list[tuple[float, float]] = []  # how long each took, and how far ahead it said the other clock is
    try:
        with socket.create_connection((address, port), timeout=KNOCK_SECONDS) as end, end.makefile("rb") as line:
            for _ in range(ASKED):
                asked, began = clock(), time.perf_counter()
                end.sendall(b"?")
                theirs = float(line.readline())
                took = time.perf_counter() - began
                answers.append((took, theirs - asked - took / 2))
    except TimeoutError:
        return "no answer", None
    except (OSError, ValueError) as error:
        return str(getattr(error, "strerror", None) or error or "it hung up"), None
    return "", min(answers)[1]


def reach(reports: Sequence[Mapping[str, str] | None], names: Sequence[str]) -> Result:
    """From each node to each other. A node that nobody reaches is named before pairs are."""
    broken = {(a, int(b)): why for a, row in enumerate(reports) if row for b, why in row.items() if why}
    if not any(reports):
        return unseen("ports", "no node reports whom it reaches")
    if not broken:
        return passed("ports", f"every one of {len(names)} nodes reaches every other")
    knocked = {b: [a for a, row in enumerate(reports) if row and str(b) in row] for _, b in broken}
    said = []
    for b, callers in knocked.items():
        cut_off = [a for a in callers if (a, b) in broken]
        whom = "no other node" if len(cut_off) == len(callers) > 1 else " and ".join(names[a] for a in cut_off)
        verb = "reaches" if whom == "no other node" else "cannot reach"
        said.append(f"{whom} {verb} {names[b]} ({broken[cut_off[0], b]})")
    hint = "a firewall or network policy between the pods, or the wrong interface: ranks talk on ports of any number"
    return failed("ports", "; ".join(said), hint)


def clocks(offsets: Sequence[float | None], names: Sequence[str]) -> Result:
    """Each node's clock against node 0's."""
    known = {name: offset for name, offset in zip(names, offsets, strict=True) if offset is not None}
    if len(known) < 2:
        return unseen("clocks", "no node's clock could be compared with node 0's")
    furthest = max(known, key=lambda name: abs(known[name]))
    said = f"{furthest} is {abs(known[furthest]):.3f} s {'ahead of' if known[furthest] > 0 else 'behind'} {names[0]}"
    hint = "have chrony or ntpd running on that node"
    if abs(known[furthest]) > SKEW_FAIL_SECONDS:
        return failed("clocks", said, hint)
    if abs(known[furthest]) > SKEW_WARN_SECONDS:
        return warned("clocks", said, hint)
    return passed("clocks", f"within {abs(known[furthest]) * 1000:.0f} ms of {names[0]}'s")
