"""TCP rendezvous and JSON all-gather between the nodes of a run, and a watch on which of them are still alive.

Node 0 listens; each other node keeps one connection to it. Messages are JSON objects, one per line. `windlass check`
gathers over it what every node found. launch.sh runs it as a process beside the ranks for the length of the run: ranks
that lose a peer report "connection closed", ranks that wait for one report nothing for minutes, and neither names a
machine. Standard library only, so that it starts at once and no library can hold it up.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.errors import FAILED, RANK_USER_INPUT, SAVED, UserError
from windlass.files import write_atomic
from windlass.launch.interfaces import choices

PORT = 29500  # torch's default
ANSWER_SECONDS = 60.0  # one gather, once all nodes have joined; the slowest waits for a measurement
RETRY_SECONDS = 0.5
REPORT_SECONDS = 30.0  # node 0 names those it waits for this often
TELL_SECONDS = 30.0  # a run that can't start waits this long for the other nodes, so that they learn why
HEARTBEAT_SECONDS = 5.0
SILENCE_SECONDS = 60.0  # a machine busy with loading may be late, but not this late
LONGEST_LINE = 1 << 26  # what a stranger on the port can make us hold
STOPPED_EARLY = 143  # by a signal, before it had ranks that could agree with ours
# Files in the status directory, between this process and launch.sh.
READY, LOST, LEAVING = "ready", "lost", "leaving"


@dataclass(frozen=True, slots=True)
class Node:
    """This process among those that join: one per node when launch.sh starts it."""

    rank: int
    world: int
    host: str  # of node 0
    port: int


def this_node(environ: Mapping[str, str]) -> Node:
    """PET_* first, which counts nodes; else RANK and WORLD_SIZE as torchrun or the caller set them; else alone."""
    for rank, world, host, port in (
        ("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
        ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    ):
        if world not in environ:
            continue
        try:
            node = Node(
                int(environ.get(rank, "0")),
                int(environ[world]),
                environ.get(host) or environ.get("MASTER_ADDR") or "localhost",
                int(environ.get(port) or environ.get("MASTER_PORT") or PORT),
            )
        except ValueError as error:
            hint = "start it through launch.sh, which sets them"
            raise UserError(f"{world}, {rank} and {port} must be numbers: {error}", "the environment", hint) from None
        if not 0 <= node.rank < node.world:
            what = f"{rank}={node.rank} is no node of {world}={node.world}"
            raise UserError(what, "the environment", "nodes are counted from 0")
        return node
    return Node(0, 1, "localhost", PORT)


class RendezvousError(Exception):
    """The nodes can't start, or go on, together: why, and the exit code of all of them."""

    def __init__(self, why: str, code: int = FAILED) -> None:
        super().__init__(why)
        self.code = code


@dataclass(eq=False, slots=True)
class Peer:
    """A connection to another node; `rank` is -1 until it has introduced itself."""

    end: socket.socket
    rank: int = -1
    host: str = ""
    alive: bool = True
    address: str = ""  # this node's, as the other one sees it

    def __post_init__(self) -> None:
        with contextlib.suppress(OSError):
            self.address = str(self.end.getsockname()[0]).removeprefix("::ffff:").partition("%")[0]

    def __str__(self) -> str:
        return f"node {self.rank} ({self.host})"

    def send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # it may be gone: whoever reads from it notices
            self.end.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        self.alive = False
        with contextlib.suppress(OSError):
            self.end.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
        self.end.close()


Message = dict[str, Any]


class Rendezvous:
    """One node's side. Threads read from the connections into one inbox; None there says that a connection ended."""

    def __init__(self, node: Node, fingerprint: str = "", problem: tuple[str, int] | None = None) -> None:
        self.node, self.fingerprint = node, fingerprint
        self.problem = problem  # what keeps this very node from starting, and its exit code
        self.host = socket.gethostname()
        self.peers: dict[int, Peer] = {}  # node 0: all others; these: node 0
        self.inbox: queue.SimpleQueue[tuple[Peer | None, Message | None]] = queue.SimpleQueue()
        self.connections: list[Peer] = []  # all that were ever made
        self.over = False
        self.why = ""  # the last attempt to reach node 0 failed

    def __str__(self) -> str:
        return f"node {self.node.rank} ({self.host})"

    @property
    def address(self) -> str:
        """This node's, as the others see it."""
        return next((peer.address for peer in self.peers.values()), "")

    def stop(self) -> None:
        """For a signal handler: while nodes join, ends it; later it ends if the script says how."""
        self.inbox.put((None, None))

    # --- joining ------------------------------------------------------------------------------------------------------

    def join(self, seconds: float, *, partial: bool = False, say: Callable[[str], None] = lambda _: None) -> None:
        """Wait for all nodes. `partial`: node 0 goes on with those that came in time."""
        try:
            if self.node.rank:
                self._reach_master(seconds)
            else:
                self._accept_all(seconds, partial, say)
        except RendezvousError:
            self.disconnect()
            raise

    def _accept_all(self, seconds: float, partial: bool, say: Callable[[str], None]) -> None:
        deadline, world = time.monotonic() + seconds, self.node.world
        refusal = RendezvousError(f"{self}: {self.problem[0]}", self.problem[1]) if self.problem else None
        came: list[Peer] = []
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        try:
            server = socket.create_server(("", self.node.port), family=family, dualstack_ipv6=dual, backlog=world)
        except OSError as error:
            raise RendezvousError(f"port {self.node.port} can't be opened: {error.strerror}") from None
        threading.Thread(target=self._accept_peers, args=(server,), daemon=True).start()
        try:
            while sum(peer.alive for peer in came) < world - 1 and (left := deadline - time.monotonic()) > 0:
                try:
                    peer, message = self.inbox.get(timeout=min(left, REPORT_SECONDS))
                except queue.Empty:
                    missing = ", ".join(str(rank) for rank in range(1, world) if rank not in self.peers)
                    say(f"waiting for node {missing}, {max(0.0, left - REPORT_SECONDS):.0f} s left")
                    continue
                if peer is None:
                    raise RendezvousError("stopped before all nodes had joined", SAVED)
                if message is None:  # a stranger, or a node that is taken away: another one may take its number
                    peer.close()
                    if self.peers.get(peer.rank) is peer:
                        del self.peers[peer.rank]
                elif peer.rank < 0:
                    try:
                        peer.rank, peer.host = int(message["node"]), str(message["host"])
                        wrong = self._objection(peer, message)
                    except (KeyError, TypeError, ValueError):
                        peer.close()
                        continue
                    came.append(peer)
                    if wrong:
                        refusal = refusal or wrong
                    else:
                        self.peers[peer.rank] = peer
                if refusal:  # the rest are awaited only to learn why
                    deadline = min(deadline, time.monotonic() + TELL_SECONDS)
        finally:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            server.close()  # whoever comes from now on belongs to another try
        refusal = refusal or (None if partial else self._absence(seconds))
        for peer in came:
            peer.send(**({"stop": str(refusal), "code": refusal.code} if refusal else {"go": True, "host": self.host}))
        if refusal:
            raise refusal

    def _accept_peers(self, server: socket.socket) -> None:
        while True:
            try:
                end, _ = server.accept()
            except OSError:
                return
            self.connections.append(Peer(end))
            threading.Thread(target=self._read, args=(self.connections[-1],), daemon=True).start()

    def _objection(self, peer: Peer, message: Message) -> RendezvousError | None:
        known = self.peers.get(peer.rank)
        if message.get("problem"):
            return RendezvousError(f"{peer}: {message['problem']}", int(message["code"]))
        if message.get("world") != self.node.world or not 0 < peer.rank < self.node.world:
            what = f"{peer} of {message.get('world')} nodes came, and there are nodes 0 to {self.node.world - 1}"
            return RendezvousError(what, RANK_USER_INPUT)
        if known:
            return RendezvousError(f"both {known.host} and {peer.host} are node {peer.rank}", RANK_USER_INPUT)
        if message.get("fingerprint") != self.fingerprint:
            return RendezvousError(f"{peer} has another run file, other options or another windlass", RANK_USER_INPUT)
        return None

    def _absence(self, seconds: float) -> RendezvousError | None:
        missing = [str(rank) for rank in range(1, self.node.world) if rank not in self.peers]
        if not missing:
            return None
        came = ", ".join(["node 0", *map(str, self.peers.values())])
        noun = "nodes" if len(missing) > 1 else "node"
        return RendezvousError(f"{noun} {', '.join(missing)} did not join within {seconds:.0f} s ({came} did)")

    def _reach_master(self, seconds: float) -> None:
        """Reach node 0, whose name may not resolve yet, and wait for its word."""
        deadline = time.monotonic() + seconds
        self.why = "no attempt was made"
        threading.Thread(target=self._connect, args=(deadline,), daemon=True).start()
        while True:
            # Node 0 waits for the others as long as we do.
            left = deadline - time.monotonic() + (TELL_SECONDS if self.why == "no word" else 0)
            try:
                peer, message = self.inbox.get(timeout=max(0.0, min(left, RETRY_SECONDS)))
            except queue.Empty:
                if left > 0:
                    continue
                what = f"node 0 at {self.node.host}:{self.node.port} was not reached within {seconds:.0f} s: {self.why}"
                raise RendezvousError(what) from None
            if peer is None:
                raise RendezvousError("stopped before all nodes had joined", SAVED)
            if message and "stop" in message:
                raise RendezvousError(f"node 0 says: {message['stop']}", int(message["code"]))
            if message and "go" in message:
                peer.rank, peer.host = 0, str(message.get("host", self.node.host))
                self.peers[0] = peer
                return

    def _connect(self, deadline: float) -> None:
        """In a thread: a name that is being looked up would hold a signal up."""
        while not (self.peers or self.over) and (left := deadline - time.monotonic()) > 0:
            try:
                end = socket.create_connection((self.node.host, self.node.port), timeout=max(0.1, min(10.0, left)))
            except TimeoutError:
                self.why = "no answer: an unknown address, a firewall, or the wrong network"
            except socket.gaierror as error:
                self.why = f"{self.node.host!r} does not resolve ({error.strerror})"
            except OSError as error:
                self.why = error.strerror or "connection failed"
            else:
                end.settimeout(None)
                peer, (problem, code) = Peer(end, host=self.node.host), self.problem or ("", 0)
                self.connections.append(peer)
                self.why = "no word"
                hello = {"node": self.node.rank, "world": self.node.world, "host": self.host}
                peer.send(**hello, fingerprint=self.fingerprint, problem=problem, code=code)
                self._read(peer)
                # An end without a word is that of an earlier try, or of something else on that port.
                self.why = "it closed the connection, or is not windlass"
            time.sleep(RETRY_SECONDS)

    def _read(self, peer: Peer) -> None:
        """In a thread: everything that comes over one connection, until it ends or is no JSON object."""
        with contextlib.suppress(OSError, ValueError, RecursionError), peer.end.makefile("rb") as lines:
            while isinstance(message := json.loads(lines.readline(LONGEST_LINE)), dict):
                self.inbox.put((peer, message))
        peer.end.close()
        self.inbox.put((peer, None))

    def disconnect(self) -> None:
        self.over = True
        for peer in self.connections:
            peer.close()

    # --- all-gather ---------------------------------------------------------------------------------------------------

    def gather(self, value: Any, seconds: float = ANSWER_SECONDS) -> list[Any]:
        """What every node sent, by rank; None for one that is gone or did not answer in time, which is dropped."""
        if self.node.rank:
            self.peers[0].send(gather=value)
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + seconds * (2 if self.node.rank else 1)  # node 0 waits for the others first
        while self.peers.keys() - answers.keys() and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                peer, message = self.inbox.get(timeout=left)
                if peer is None or self.peers.get(peer.rank) is not peer:
                    continue
                if message is None:
                    self.peers.pop(peer.rank).close()
                elif "gather" in message:
                    answers[peer.rank] = message["gather"]
        for rank in self.peers.keys() - answers.keys():
            self.peers.pop(rank).close()  # a late answer would be taken for one to the next question
        if self.node.rank:
            if 0 not in answers:
                raise RendezvousError("node 0 went away")
            return list(answers[0])
        everything = [value, *(answers.get(rank) for rank in range(1, self.node.world))]
        for peer in self.peers.values():
            peer.send(gather=everything)
        return everything

    def close(self) -> None:
        """Node 0 closes last: its port is free at once for what is launched next."""
        deadline = time.monotonic() + 5.0
        while self.node.rank == 0 and self.peers and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                peer, message = self.inbox.get(timeout=left)
                if peer and message is None and self.peers.get(peer.rank) is peer:
                    self.peers.pop(peer.rank).close()
        self.disconnect()

    # --- beside the ranks ---------------------------------------------------------------------------------------------

    def supervise(
        self, status_dir: Path, heartbeat: float = HEARTBEAT_SECONDS, silence: float = SILENCE_SECONDS
    ) -> None:
        """Stay until this node's script ends; name the nodes that are lost, to the script and to all others.

        After SIGTERM ranks may still be saving that got it too, as all of a node do: the script, which waits for them,
        leaves its exit code in the status directory and stops us a second time.
        """
        script, leaving = os.getppid(), status_dir / LEAVING
        heard = dict.fromkeys(self.peers.values(), time.monotonic())
        due = time.monotonic() + heartbeat
        while True:
            try:
                peer, message = self.inbox.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                due = time.monotonic() + heartbeat
                for other in self.peers.values():
                    other.send(alive=True)
                    if other.alive and time.monotonic() - heard[other] > silence:
                        self._lose(other, f"{other} has not been heard for {silence:.0f} s", FAILED, status_dir)
                continue
            if peer is None:
                if leaving.exists() or os.getppid() != script:
                    break
                continue
            heard[peer] = time.monotonic()
            if message is None:
                if peer.alive:
                    self._lose(peer, f"{peer} is gone: its connection closed", FAILED, status_dir)
            elif "bye" in message:
                code = int(message["bye"])
                if code in (0, SAVED):  # finished, or stopped and saved: its ranks have agreed on that with ours
                    peer.alive = False
                elif code == STOPPED_EARLY:
                    self._lose(peer, f"{peer} was stopped before its ranks began", code, status_dir)
                else:
                    self._lose(peer, f"{peer} ended with {code}: the cause is in its log", code, status_dir)
            elif "lost" in message:
                self._lose(peer, f"node 0 says: {message['lost']}", int(message["code"]), status_dir)
        code = int(leaving.read_text() or FAILED) if leaving.exists() else FAILED
        for peer in self.peers.values():
            peer.send(bye=code)
            with contextlib.suppress(OSError):
                peer.end.shutdown(socket.SHUT_WR)

    def _lose(self, peer: Peer, how: str, code: int, status_dir: Path) -> None:
        """Once: to the script of this node and, from node 0, to all others."""
        peer.alive = False
        self.report(how)
        if not (status_dir / LOST).exists():
            write_atomic(status_dir / LOST, str(code))
        for other in self.peers.values() if self.node.rank == 0 else ():
            if other is not peer:
                other.send(lost=how, code=code)

    def report(self, text: str) -> None:
        print(f"windlass: {self}: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """For launch.sh: join, then stay beside the ranks."""
    parser = argparse.ArgumentParser(prog="python -m windlass.launch.rendezvous")
    for name, kind in (("node", int), ("nodes", int), ("master", str), ("port", int), ("seconds", float)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    for name in ("fingerprint", "status-dir"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args(arguments)
    node = Node(options.node, options.nodes, options.master, options.port)
    wrong = (choice for choice in choices(os.environ, options.nodes) if choice.problem)
    problem = next(((choice.problem, choice.code) for choice in wrong), None)
    rendezvous = Rendezvous(node, options.fingerprint, problem)
    signal.signal(signal.SIGTERM, lambda *_: rendezvous.stop())
    for number in (signal.SIGUSR1, signal.SIGINT):  # sent to the whole group; the script says when it is over
        signal.signal(number, signal.SIG_IGN)
    began = time.monotonic()
    try:
        rendezvous.join(options.seconds, say=rendezvous.report)
    except RendezvousError as error:
        rendezvous.report(str(error))
        return error.code
    write_atomic(Path(options.status_dir) / READY, "")
    rendezvous.report(f"all {options.nodes} nodes have joined after {time.monotonic() - began:.0f} s")
    rendezvous.supervise(Path(options.status_dir))
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a name that is being looked up would hold the process for as long as that takes
