"""Nodes around one table: node 0 sits, the others come, each says one thing and hears what all have said.

Plain sockets, so that a node whose torch is broken can come and say so, and a wait that ends names who is missing.
"""

from __future__ import annotations

import io
import json
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from windlass.errors import UserError

ANSWER_SECONDS = 60.0  # what one round may take once everybody is there; the longest is a measurement
RETRY_SECONDS = 0.5
PORT = 29500


@dataclass(frozen=True, slots=True)
class Place:
    """This process among those that check: one per node where the launch script starts it."""

    rank: int
    world: int
    host: str
    port: int


def place(environ: Mapping[str, str]) -> Place:
    """PET_* first, by node; else RANK and WORLD_SIZE as torchrun or the caller set them; else alone."""
    for rank, world, host, port in (
        ("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
        ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    ):
        if world not in environ:
            continue
        try:
            found = Place(
                int(environ.get(rank, "0")),
                int(environ[world]),
                environ.get(host) or environ.get("MASTER_ADDR") or "localhost",
                int(environ.get(port) or environ.get("MASTER_PORT") or PORT),
            )
        except ValueError as error:
            hint = "start it through launch.sh, which sets them"
            raise UserError(f"{world}, {rank} and {port} must be numbers: {error}", "the environment", hint) from None
        if not 0 <= found.rank < found.world:
            said = f"{rank}={found.rank} is no node of {world}={found.world}"
            raise UserError(said, "the environment", "nodes are counted from 0")
        return found
    return Place(0, 1, "localhost", PORT)


class AbsentError(Exception):
    """This node did not get to the table; the text says how far it came."""


@dataclass(slots=True)
class Seat:
    """A line to another node."""

    end: socket.socket
    line: io.BufferedRWPair

    def close(self) -> None:
        with suppress(OSError):
            self.line.close()
        self.end.close()


@dataclass(slots=True)
class Meeting:
    """On node 0 a seat for each other node, elsewhere one for node 0. One whose line broke is taken away."""

    place: Place
    address: str  # this node's, as the others see it
    seats: dict[int, Seat] = field(default_factory=dict)

    def gather(self, said: Any, seconds: float = ANSWER_SECONDS) -> list[Any]:
        """What every node says, by rank; None for one that is not there or did not answer in time."""
        if self.place.rank:
            self._tell(0, said)
            answer = self._hear(0, time.monotonic() + 2 * seconds)  # node 0 first waits for the others
            if answer is None:
                raise AbsentError("node 0 went away")
            return list(answer)
        deadline = time.monotonic() + seconds
        everything = [said if rank == 0 else self._hear(rank, deadline) for rank in range(self.place.world)]
        for rank in list(self.seats):
            self._tell(rank, everything)
        return everything

    def close(self) -> None:
        """The guests leave first: the port is free at once for what is launched next."""
        for rank, seat in list(self.seats.items()):
            if not self.place.rank:
                self._hear(rank, time.monotonic() + 5.0)
            seat.close()

    def _tell(self, rank: int, said: Any) -> None:
        try:
            if seat := self.seats.get(rank):
                seat.line.write(json.dumps(said).encode() + b"\n")
                seat.line.flush()
        except OSError:
            self.seats.pop(rank).close()

    def _hear(self, rank: int, deadline: float) -> Any:
        seat = self.seats.get(rank)
        if seat is None:
            return None
        try:
            seat.end.settimeout(max(0.1, deadline - time.monotonic()))
            heard = seat.line.readline()
            if heard.endswith(b"\n"):
                return json.loads(heard)
        except (OSError, ValueError):
            pass
        self.seats.pop(rank).close()  # a late answer would be taken for one to the next question
        return None


def resolve(host: str, deadline: float) -> str:
    """The address of a name. A pod's name is known only once the pod is ready, so it is asked for until then."""
    while True:
        try:
            return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            if time.monotonic() + RETRY_SECONDS > deadline:
                raise AbsentError(f"{host!r} does not resolve: {error.strerror or error}") from None
        time.sleep(RETRY_SECONDS)


def attend(here: Place, patience_seconds: float, say: Callable[[str], None]) -> Meeting:
    """Come together within the patience. Node 0 then continues with those that came; nobody waits for ever."""
    deadline = time.monotonic() + patience_seconds
    return host(here, deadline, say) if here.rank == 0 else join(here, deadline)


def host(here: Place, deadline: float, say: Callable[[str], None]) -> Meeting:
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        door = socket.create_server(("", here.port), family=family, dualstack_ipv6=dual, backlog=here.world)
    except OSError as error:
        raise AbsentError(f"port {here.port} cannot be opened: {error.strerror}") from None
    meeting = Meeting(here, "")
    with door:
        while len(meeting.seats) < here.world - 1 and (left := deadline - time.monotonic()) > 0:
            door.settimeout(min(left, 10.0))
            try:
                guest, _ = door.accept()
            except TimeoutError:
                missing = [str(rank) for rank in range(1, here.world) if rank not in meeting.seats]
                say(f"waiting for node {', '.join(missing)}, {left:.0f} s left")
                continue
            welcome(meeting, guest)
    return meeting


def welcome(meeting: Meeting, guest: socket.socket) -> None:
    """Let a guest sit down who says which node it is; whoever else knocks at the port is sent away."""
    guest.settimeout(5.0)
    seat = Seat(guest, guest.makefile("rwb"))
    try:
        said = json.loads(seat.line.readline(200))
        rank, world = int(said["node"]), int(said["world"])
    except (OSError, ValueError, KeyError, TypeError):
        seat.close()
        return
    wrong = ""
    if world != meeting.place.world:
        wrong = f"node 0 waits for {meeting.place.world} nodes, this one counts {world}"
    elif rank in meeting.seats or not 0 < rank < world:
        wrong = f"there are two nodes {rank}: PET_NODE_RANK (or RANK) must differ"
    with suppress(OSError):
        seat.line.write(json.dumps({"wrong": wrong}).encode() + b"\n")
        seat.line.flush()
    if wrong:
        seat.close()
        return
    meeting.seats[rank] = seat
    meeting.address = plain(guest.getsockname()[0])


def join(here: Place, deadline: float) -> Meeting:
    address = resolve(here.host, deadline)
    while True:
        left = deadline - time.monotonic()
        try:
            end = socket.create_connection((address, here.port), timeout=max(0.1, min(5.0, left)))
            break
        except OSError as error:
            if left <= RETRY_SECONDS:
                said = f"{here.host}:{here.port} ({address}) does not answer: {error.strerror or error}"
                raise AbsentError(said) from None
        time.sleep(RETRY_SECONDS)
    seat = Seat(end, end.makefile("rwb"))
    try:
        seat.line.write(json.dumps({"node": here.rank, "world": here.world}).encode() + b"\n")
        seat.line.flush()
        wrong = json.loads(seat.line.readline())["wrong"]
    except (OSError, ValueError, KeyError, TypeError):
        wrong = f"{here.host}:{here.port} is not the check of node 0: something else answers there"
    if wrong:
        seat.close()
        raise AbsentError(wrong)
    return Meeting(here, plain(end.getsockname()[0]), {0: seat})


def plain(address: str) -> str:
    return address.removeprefix("::ffff:").partition("%")[0]
