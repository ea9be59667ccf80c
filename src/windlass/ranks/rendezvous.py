"""TCP rendezvous and JSON all-gather between a run's nodes, and a monitor of which nodes are alive.

Node 0 listens; each other node keeps one connection to it. Messages are JSON objects, one per line. `windlass check`
gathers every node's results over it; `windlass train` runs it next to the ranks, whose own errors name no machine. It
uses only the standard library, so that it starts at once.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windlass.errors import FAILED, RANK_USER_INPUT, SAVED
from windlass.files import write_atomic
from windlass.ranks.place import Node, list_choices

ANSWER_SECONDS = 60.0  # for one gather, once all nodes have joined; the slowest follows a measurement
RETRY_SECONDS = 0.5
REPORT_SECONDS = 30.0  # how often node 0 names the nodes that it waits for
TELL_SECONDS = 30.0  # a node that can't start waits this long for the others, to send them the reason
POLL_SECONDS = 0.2  # how often it checks whether the supervisor has ended
LONGEST_LINE = 1 << 26  # bytes that a stranger on the port can make us buffer
LONGEST_REASON = 500  # characters of another node's reason
STOPPED_EARLY = 143  # stopped by a signal before it had ranks that could agree with the others'
# Files in the status directory, shared by this process and the supervisor of this node's ranks.
READY = "ready"
LOST = "lost"
LEAVING = "leaving"


class RendezvousError(Exception):
    """The nodes can't start or continue together. Has the reason and the exit code of all nodes."""

    def __init__(self, why: str, code: int = FAILED) -> None:
        super().__init__(why)
        self.code = code


@dataclass(eq=False, slots=True)
class Peer:
    """A connection to another node; `number` is -1 until it has introduced itself."""

    end: socket.socket
    number: int = -1
    host: str = ""
    alive: bool = True  # it was neither lost nor did it leave
    heard: float = field(default_factory=time.monotonic)
    unread: bytearray = field(default_factory=bytearray)  # the beginning of a message

    def __str__(self) -> str:
        return f"node {self.number} ({self.host})"

    @property
    def connected(self) -> bool:
        return self.end.fileno() >= 0

    def send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # it may be gone: the next read notices that
            self.end.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any] | None]:
        """Return the messages that have arrived; None for a closed connection or an invalid message."""
        try:
            data = self.end.recv(1 << 16)
            self.unread += data
            *lines, rest = self.unread.split(b"\n") if b"\n" in data else [self.unread]
            messages = [json.loads(line) for line in lines]
            ended = not data or len(rest) > LONGEST_LINE or not all(isinstance(one, dict) for one in messages)
        except (OSError, ValueError, RecursionError):
            return [None]
        self.unread = rest
        self.heard = time.monotonic()
        return [None] if ended else messages


class Rendezvous:
    heartbeat_seconds = 5.0
    silence_seconds = 60.0  # a machine that is busy loading is late by less than this

    def __init__(self, node: Node, fingerprint: str = "", problem: tuple[str, int] | None = None) -> None:
        self.node = node
        self.fingerprint = fingerprint
        self.problem = problem  # why this node can't start, and its exit code
        self.host = socket.gethostname()
        self.name = f"node {node.number} ({self.host})"
        self.peers: dict[int, Peer] = {}  # on node 0: all others; on the others: node 0
        self.selector = selectors.DefaultSelector()

    @property
    def address(self) -> str:
        """Return this node's address as the others see it."""
        peer = next(iter(self.peers.values()), None)
        return str(peer.end.getsockname()[0]).removeprefix("::ffff:").partition("%")[0] if peer else ""

    def _add(self, end: socket.socket) -> Peer:
        peer = Peer(end)
        self.selector.register(end, selectors.EVENT_READ, peer)
        return peer

    def _connections(self) -> list[Peer]:
        """Return the peers and all other connections to the port."""
        return [key.data for key in (self.selector.get_map() or {}).values() if isinstance(key.data, Peer)]

    def _drop(self, peer: Peer) -> None:
        if self.peers.get(peer.number) is peer:  # another peer may take its number
            del self.peers[peer.number]
        if peer.connected:
            self.selector.unregister(peer.end)
            peer.end.close()

    def _receive(self, deadline: float) -> list[tuple[Peer, dict[str, Any] | None]]:
        """Return the next messages of all connections; None for a closed one, which is then no peer any more."""
        arrived = []
        for key, _ in self.selector.select(max(0.0, deadline - time.monotonic())):
            if isinstance(key.data, Peer):
                arrived += [(key.data, message) for message in key.data.receive()]
            else:  # the port
                with contextlib.suppress(OSError):
                    self._add(key.data.accept()[0])
        for peer, message in arrived:
            if message is None:
                self._drop(peer)
        return arrived

    def disconnect(self) -> None:
        for peer in self._connections():
            peer.end.close()
        self.selector.close()

    def join(self, seconds: float, *, partial: bool = False, say: Callable[[str], None] = lambda _: None) -> None:
        """Wait for all nodes. `partial`: node 0 goes on with those that came in time."""
        try:
            if self.node.number:
                self._reach_master(seconds)
            else:
                self._accept_peers(seconds, partial, say)
        except RendezvousError:
            self.disconnect()
            raise

    def _accept_peers(self, seconds: float, partial: bool, say: Callable[[str], None]) -> None:
        world = self.node.count
        began = time.monotonic()
        dual = socket.has_dualstack_ipv6()
        deadline = began + seconds
        report = began + REPORT_SECONDS
        refusal = RendezvousError(f"{self.name}: {self.problem[0]}", self.problem[1]) if self.problem else None
        came: list[Peer] = []  # includes refused peers: they are sent the reason
        family = socket.AF_INET6 if dual else socket.AF_INET
        try:
            server = socket.create_server(("", self.node.port), family=family, dualstack_ipv6=dual, backlog=world)
        except OSError as error:
            raise RendezvousError(f"port {self.node.port} can't be opened: {error.strerror}") from None
        with server:  # connections after it is closed belong to another attempt
            server.setblocking(False)
            self.selector.register(server, selectors.EVENT_READ, server)
            while sum(peer.connected for peer in came) < world - 1 and time.monotonic() < deadline:
                for peer, message in self._receive(min(deadline, report)):
                    if message is None or peer.number >= 0:
                        continue
                    try:
                        peer.number = int(message["node"])
                        peer.host = str(message["host"])
                        wrong = self._find_objection(peer, message)
                    except (KeyError, TypeError, ValueError):
                        self._drop(peer)
                        continue
                    came.append(peer)
                    if wrong is None:
                        self.peers[peer.number] = peer
                    elif refusal is None:
                        refusal = wrong
                missing = [str(number) for number in range(1, world) if number not in self.peers]
                if refusal:  # wait for the rest only to send them the reason
                    deadline = min(deadline, time.monotonic() + TELL_SECONDS)
                elif missing and time.monotonic() >= report:
                    say(f"waiting for node {', '.join(missing)}, {max(0.0, deadline - report):.0f} s left")
                    report += REPORT_SECONDS
            self.selector.unregister(server)
        for peer in self._connections():
            if peer not in came:  # not one of our nodes
                self._drop(peer)
        missing = [str(number) for number in range(1, world) if number not in self.peers]
        if missing and not (refusal or partial):
            there = ", ".join(["node 0", *map(str, self.peers.values())])
            noun = "node" if len(missing) == 1 else "nodes"
            refusal = RendezvousError(f"{noun} {', '.join(missing)} did not join within {seconds:.0f} s ({there} did)")
        for peer in came:
            peer.send(**({"stop": str(refusal), "code": refusal.code} if refusal else {"go": True, "host": self.host}))
        if refusal:
            raise refusal

    def _find_objection(self, peer: Peer, message: dict[str, Any]) -> RendezvousError | None:
        code = RANK_USER_INPUT
        known = self.peers.get(peer.number)
        if message.get("problem"):
            what = f"{peer}: {message['problem']}"
            code = int(message["code"])
        elif message.get("world") != self.node.count or not 0 < peer.number < self.node.count:
            what = f"{peer} of {message.get('world')} nodes came, and there are nodes 0 to {self.node.count - 1}"
        elif known:
            what = f"both {known.host} and {peer.host} are node {peer.number}"
        elif message.get("fingerprint") != self.fingerprint:
            what = f"{peer} has another run file, other options or another windlass"
        else:
            return None
        return RendezvousError(what, code)

    def _reach_master(self, seconds: float) -> None:
        """Connect to node 0, whose name may not resolve yet, and wait for its answer."""
        address = (self.node.host, self.node.port)
        problem, code = self.problem or ("", 0)
        hello = {"node": self.node.number, "world": self.node.count, "host": self.host, "fingerprint": self.fingerprint}
        deadline = time.monotonic() + seconds
        why = "no attempt was made"
        while (left := deadline - time.monotonic()) > 0:
            try:
                peer = self._add(socket.create_connection(address, timeout=max(0.1, min(10.0, left))))
            except OSError as error:
                why = error.strerror or str(error)
                time.sleep(min(RETRY_SECONDS, left))
                continue
            peer.end.settimeout(None)
            peer.send(**hello, problem=problem, code=code)
            # Node 0 waits for the others as long as we wait for it.
            while peer.connected and time.monotonic() < deadline + TELL_SECONDS:
                for _, message in self._receive(deadline + TELL_SECONDS):
                    if message and "stop" in message:
                        raise RendezvousError(f"node 0 says: {message['stop']}", int(message["code"]))
                    if message and "go" in message:
                        peer.number = 0
                        peer.host = str(message.get("host", self.node.host))
                        self.peers[0] = peer
                        return
            # A connection closed without an answer is an earlier attempt's, or another program's on that port.
            why = "no word" if peer.connected else "it closed the connection, or is not windlass"
            time.sleep(RETRY_SECONDS)
        raise RendezvousError(f"node 0 at {address[0]}:{address[1]} was not reached within {seconds:.0f} s: {why}")

    def gather(self, value: Any, seconds: float = ANSWER_SECONDS) -> list[Any]:
        """Return every node's value by number. A node that left or didn't answer in time gets None and is dropped."""
        if self.node.number and self.peers:
            self.peers[0].send(gather=value)
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + seconds * (2 if self.node.number else 1)  # node 0 waits for the others first
        while self.peers.keys() - answers.keys() and time.monotonic() < deadline:
            for peer, message in self._receive(deadline):
                if message and "gather" in message and self.peers.get(peer.number) is peer:
                    answers[peer.number] = message["gather"]
        for number in self.peers.keys() - answers.keys():
            self._drop(self.peers[number])  # its late answer would count for the next gather
        if self.node.number:
            if 0 not in answers:
                raise RendezvousError("node 0 went away")
            return list(answers[0])
        everything = [value, *(answers.get(number) for number in range(1, self.node.count))]
        for peer in self.peers.values():
            peer.send(gather=everything)
        return everything

    def close(self) -> None:
        """Close the connections, node 0 last: its port is then free at once for the next launch."""
        deadline = time.monotonic() + 5.0
        while self.node.number == 0 and self.peers and time.monotonic() < deadline:
            self._receive(deadline)
        self.disconnect()

    def supervise(self, status_dir: Path) -> None:
        """Wait until this node's supervisor has left its exit code in the status directory. Report lost nodes to it and
        to all other nodes."""

        def lose(peer: Peer, how: str, code: int = FAILED) -> None:
            peer.alive = False
            self.report(how)
            if not (status_dir / LOST).exists():
                write_atomic(status_dir / LOST, str(code))
            for other in self.peers.values() if self.node.number == 0 else ():
                if other is not peer:
                    other.send(lost=how, code=code)

        supervisor = os.getppid()
        leaving = status_dir / LEAVING
        due = 0.0
        printed = set[str]()
        for peer in self.peers.values():
            peer.heard = time.monotonic()
        while not leaving.exists() and os.getppid() == supervisor:
            for peer, message in self._receive(time.monotonic() + POLL_SECONDS):
                if message is None:
                    if peer.alive:
                        lose(peer, f"{peer} is gone: its connection closed")
                elif "bye" in message:
                    code = int(message["bye"])
                    if code in (0, SAVED):  # finished, or stopped and saved: its ranks agreed on that with ours
                        peer.alive = False
                    elif code == STOPPED_EARLY:
                        lose(peer, f"{peer} was stopped before its ranks began", code)
                    else:
                        why = message.get("why") or "the cause is in its log"
                        lose(peer, f"{peer} ended with {code}: {'as above' if why in printed else why}", code)
                        printed.add(why)
                elif "lost" in message:
                    lose(peer, f"node 0 says: {message['lost']}", int(message["code"]))
            if time.monotonic() >= due:
                due = time.monotonic() + self.heartbeat_seconds
                for peer in self.peers.values():
                    peer.send(alive=True)
                    if peer.alive and time.monotonic() - peer.heard > self.silence_seconds:
                        lose(peer, f"{peer} has not been heard from for {self.silence_seconds:.0f} s")
        code = int(leaving.read_text() or FAILED) if leaving.exists() else FAILED
        for peer in self.peers.values():
            peer.send(bye=code, why=read_first_error(status_dir))
            with contextlib.suppress(OSError):
                peer.end.shutdown(socket.SHUT_WR)

    def report(self, text: str) -> None:
        print(f"windlass: {self.name}: {text}", file=sys.stderr, flush=True)


def read_first_error(status_dir: Path) -> str:
    """Return the error that a rank of this node or its check has left; empty if there is none."""
    errors: list[dict[str, Any]] = []
    for path in status_dir.glob("error-*"):
        with contextlib.suppress(OSError, ValueError):
            errors.append(json.loads(path.read_text(errors="replace")))
    error: dict[str, Any] = min(errors, key=lambda error: float(error["time"]), default={})
    lines = [f"{problem['where']}: {problem['problem']}" for problem in error.get("problems", ())]
    return (lines[0] if lines else str(error.get("traceback", "")).strip().rpartition("\n")[2])[:LONGEST_REASON]


def main() -> int:
    """Join, then stay next to this node's ranks: `OtherNodes` starts it."""
    node, nodes, master, port, seconds, fingerprint, status_dir = sys.argv[1:]
    began = time.monotonic()
    problem = next(
        ((choice.problem, choice.code) for choice in list_choices(os.environ, int(nodes)) if choice.problem), None
    )
    rendezvous = Rendezvous(Node(int(node), int(nodes), master, int(port)), fingerprint, problem)
    for number in (signal.SIGUSR1, signal.SIGINT):  # sent to the whole group
        signal.signal(number, signal.SIG_IGN)
    try:
        rendezvous.join(float(seconds), say=rendezvous.report)  # SIGTERM ends it at once and frees its number
    except RendezvousError as error:
        rendezvous.report(str(error))
        return error.code
    # Ranks that got the signal too may still be saving: their supervisor waits for them and reports the end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    write_atomic(Path(status_dir) / READY, "")
    rendezvous.report(f"all {nodes} nodes have joined after {time.monotonic() - began:.0f} s")
    rendezvous.supervise(Path(status_dir))
    return 0


if __name__ == "__main__":
    sys.exit(main())
