"""All nodes of a run, over TCP: each says that it is here before ranks start, and who leaves later is named.

Ranks that lose a peer say "connection closed", and ranks that wait for one say nothing for minutes; neither names a
machine. Node 0 keeps a connection to every other node for the length of the run, so it can, and tells the rest.
Words are JSON, one to a line. Standard library alone: it starts in a moment, and no library can hold it up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from windlass.errors import FAILED, RANK_USER_INPUT, SAVED
from windlass.launch import interfaces

BEAT_SECONDS = 5.0  # how often each side says that it lives
TELLING_SECONDS = 30.0  # a node 0 that cannot start waits so long for the others, to tell them
SILENCE_SECONDS = 60.0  # a machine busy with loading may be late, but not so late
LEFT_WELL = (0, SAVED)  # finished, or stopped by a signal after saving: its ranks have agreed on that with ours
STOPPED_EARLY = 143  # by a signal, before there were ranks to agree with

Reader: TypeAlias = asyncio.StreamReader
Writer: TypeAlias = asyncio.StreamWriter


@dataclass
class Peer:
    """Another node, once it has said who it is."""

    node: int
    host: str
    reader: Reader
    writer: Writer
    heard: float = field(default_factory=time.monotonic)
    left: bool = False

    def __str__(self) -> str:
        return f"node {self.node} ({self.host})"

    @property
    def hung_up(self) -> bool:
        return self.reader.at_eof()

    def tell(self, **word: Any) -> None:
        with contextlib.suppress(Exception):  # it may be gone: whoever listens to it says so
            self.writer.write(json.dumps(word).encode() + b"\n")


class RefusedError(Exception):
    """The nodes cannot start together: why, and the exit code of all of them."""

    def __init__(self, why: str, code: int = FAILED) -> None:
        super().__init__(why)
        self.why, self.code = why, code


class Meeting:
    """One node's side of it."""

    def __init__(self, options: argparse.Namespace, beat: float = BEAT_SECONDS, silence: float = SILENCE_SECONDS):
        self.node: int = options.node
        self.nodes: int = options.nodes
        self.master: str = options.master
        self.port: int = options.port
        self.seconds: float = options.seconds
        self.fingerprint: str = options.fingerprint
        self.desk = Path(options.desk)
        self.beat, self.silence = beat, silence
        self.host = socket.gethostname()
        self.own: tuple[str, int] | None = None  # what keeps this very node from starting, and its exit code
        self.peers: dict[int, Peer] = {}  # for node 0 all others; for these node 0
        self.done = asyncio.Event()
        self.script = os.getppid()

    def __str__(self) -> str:
        return f"node {self.node} ({self.host})"

    def say(self, text: str) -> None:
        print(f"windlass: {self}: {text}", file=sys.stderr, flush=True)

    def note(self, name: str, text: str = "") -> None:
        """Leave word for this node's script, whole or not at all."""
        part = self.desk / f".{name}"
        part.write_text(text)
        part.replace(self.desk / name)

    def stop(self) -> None:
        """SIGTERM. Once all have met, ranks may be saving that got it too, as all of a node do: the script, which waits
        for them, says farewell, and is what is listened to."""
        if not (self.desk / "met").exists() or (self.desk / "farewell").exists() or os.getppid() != self.script:
            self.done.set()

    async def run(self) -> int:
        """Meet, then stay until this node's script has ended. Returns the exit code."""
        try:
            return await self._run()
        finally:
            for peer in self.peers.values():
                await _close(peer.writer)

    async def _run(self) -> int:
        began = time.monotonic()
        coming = asyncio.create_task(self.host_all() if self.node == 0 else self.go_to_master())
        stopped = asyncio.create_task(self.done.wait())
        await asyncio.wait((coming, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not coming.done():  # another node of this number may still come in its place
            await _cancel([coming])
            return SAVED
        await _cancel([stopped])
        try:
            coming.result()
        except RefusedError as refusal:
            self.say(refusal.why)
            return refusal.code
        self.note("met")
        self.say(f"all {self.nodes} nodes have met after {time.monotonic() - began:.0f} s")
        tasks = [asyncio.create_task(self.listen(peer)) for peer in self.peers.values()]
        tasks.append(asyncio.create_task(self.live()))
        await self.done.wait()
        farewell = self.desk / "farewell"
        code = int(farewell.read_text() or 1) if farewell.exists() else 1
        for peer in self.peers.values():
            peer.tell(bye=code)
        with contextlib.suppress(Exception):
            await asyncio.wait_for(asyncio.gather(*(peer.writer.drain() for peer in self.peers.values())), 2)
        await _cancel(tasks)
        return 0

    # --- before the ranks -----------------------------------------------------------------------------------------

    async def host_all(self) -> None:
        """Node 0: wait for every other node, then tell all of them to go, or why not."""
        refused = [RefusedError(f"{self}: {self.own[0]}", self.own[1])] if self.own else []
        came: list[Peer] = []
        changed = asyncio.Event()
        arrivals: set[asyncio.Task[None]] = set()

        async def arrive(reader: Reader, writer: Writer) -> None:
            if task := asyncio.current_task():
                arrivals.add(task)
            with contextlib.suppress(Exception):  # anybody may knock on a port; only who speaks our words counts
                word = json.loads(await asyncio.wait_for(reader.readline(), 30))
                peer = Peer(int(word["node"]), str(word["host"]), reader, writer)
                if refusal := self.objection(peer, word):
                    refused.append(refusal)
                if (known := self.peers.setdefault(peer.node, peer)).hung_up:
                    known.writer.close()
                    self.peers[peer.node] = peer
                came.append(peer)
                changed.set()
                return
            await _close(writer)

        try:
            server = await asyncio.start_server(arrive, sock=_listening(self.port))
        except OSError as error:
            raise RefusedError(f"port {self.port} can't be listened on: {error.strerror}") from None
        deadline = time.monotonic() + self.seconds
        try:
            while sum(not peer.hung_up for peer in came) < self.nodes - 1 and time.monotonic() < deadline:
                if refused:  # the rest are waited for only to be told
                    deadline = min(deadline, time.monotonic() + TELLING_SECONDS)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), max(0.0, deadline - time.monotonic()))
                changed.clear()
        finally:
            server.close()  # who comes from now on is of another try
            await _cancel(arrivals)
        refused = refused or self._missing()
        word = {"stop": refused[0].why, "code": refused[0].code} if refused else {"go": True}
        for peer in came:
            peer.tell(**word)
            with contextlib.suppress(Exception):
                await asyncio.wait_for(peer.writer.drain(), 2)
        if refused:
            for peer in came:
                await _close(peer.writer)
            raise refused[0]

    def _missing(self) -> list[RefusedError]:
        here = [peer for peer in self.peers.values() if not peer.hung_up]
        missing = [str(node) for node in range(1, self.nodes) if node not in {peer.node for peer in here}]
        if not missing:
            return []
        came = ", ".join(["node 0", *map(str, here)])
        word = "nodes" if len(missing) > 1 else "node"
        return [RefusedError(f"{word} {', '.join(missing)} did not join within {self.seconds:.0f} s ({came} did)")]

    def objection(self, peer: Peer, word: dict[str, Any]) -> RefusedError | None:
        known = self.peers.get(peer.node)
        if word.get("problem"):
            return RefusedError(f"{peer}: {word['problem']}", int(word["code"]))
        if not 0 < peer.node < self.nodes:
            return RefusedError(f"{peer} came, and there are nodes 0 to {self.nodes - 1}", RANK_USER_INPUT)
        if known and not known.hung_up:
            return RefusedError(
                f"both {known.host} and {peer.host} say that they are node {peer.node}", RANK_USER_INPUT
            )
        if word["fingerprint"] != self.fingerprint:
            return RefusedError(f"{peer} has another run file, other options or another windlass", RANK_USER_INPUT)
        return None

    async def go_to_master(self) -> None:
        """Any other node: reach node 0, whose name may not resolve yet, and wait for its word."""
        deadline = time.monotonic() + self.seconds
        why = "no try was made"
        while time.monotonic() < deadline:
            try:
                left = deadline - time.monotonic()
                opened = asyncio.open_connection(self.master, self.port)
                reader, writer = await asyncio.wait_for(opened, max(0.1, min(10, left)))
            except TimeoutError:
                why = "no answer: an unknown address, a firewall, or the wrong network"
            except socket.gaierror as error:
                why = f"the name does not resolve ({error.strerror})"
            except OSError as error:
                why = error.strerror or "connection failed"
            else:
                peer = Peer(0, self.master, reader, writer)
                problem, code = self.own or (None, 0)
                peer.tell(node=self.node, host=self.host, fingerprint=self.fingerprint, problem=problem, code=code)
                try:
                    # Node 0 waits for the others as long as we do; an end without a word is one of an earlier try.
                    line = await _line(reader, max(1.0, deadline - time.monotonic()) + 10)
                    if line is not None:
                        if "stop" in line:
                            raise RefusedError(f"node 0 says: {line['stop']}", int(line["code"]))
                        self.peers[0] = peer
                        return
                finally:
                    if not self.peers:
                        await _close(writer)
                why = "it closed the connection"
            await asyncio.sleep(0.5)
        raise RefusedError(f"node 0 at {self.master}:{self.port} was not reached within {self.seconds:.0f} s: {why}")

    # --- beside the ranks -----------------------------------------------------------------------------------------

    async def live(self) -> None:
        """Say that this node lives, and notice who does not say so."""
        while True:
            await asyncio.sleep(self.beat)
            for peer in self.peers.values():
                peer.tell(here=True)
                if not peer.left and time.monotonic() - peer.heard > self.silence:
                    self.lost(peer, f"{peer} has not been heard for {self.silence:.0f} s", FAILED)

    async def listen(self, peer: Peer) -> None:
        while (word := await _line(peer.reader, None)) is not None:
            peer.heard = time.monotonic()
            if "bye" in word:
                code = int(word["bye"])
                if code in LEFT_WELL:
                    peer.left = True
                elif code == STOPPED_EARLY:
                    self.lost(peer, f"{peer} was stopped before its ranks began", code)
                else:
                    self.lost(peer, f"{peer} ended with {code}: the cause is in its log", code)
            elif "gone" in word:
                self.lost(peer, f"node 0 says: {word['gone']}", int(word["code"]))
        if not peer.left:
            self.lost(peer, f"{peer} is gone: its connection closed", FAILED)

    def lost(self, peer: Peer, how: str, code: int) -> None:
        """Say it once, to the script of this node and, from node 0, to all others."""
        peer.left = True
        self.say(how)
        if not (self.desk / "gone").exists():
            self.note("gone", str(code))
        for other in self.peers.values() if self.node == 0 else ():
            if other is not peer:
                other.tell(gone=how, code=code)


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    waiting = [task for task in tasks if not task.done()]
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def _close(writer: Writer) -> None:
    with contextlib.suppress(Exception):  # the other end may have gone first
        writer.close()
        await asyncio.wait_for(writer.wait_closed(), 1)


async def _line(reader: Reader, seconds: float | None) -> dict[str, Any] | None:
    """The next word; None where the connection ended, or where it was none."""
    try:
        word = json.loads(await asyncio.wait_for(reader.readline(), seconds))
    except (OSError, ValueError, TimeoutError):
        return None
    return word if isinstance(word, dict) else None


def _listening(port: int) -> socket.socket:
    """On every address, of both kinds where the machine has both."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both)


async def _main(options: argparse.Namespace) -> int:
    meeting = Meeting(options)
    meeting.own = interfaces.complaint(os.environ, meeting.nodes)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, meeting.stop)
    return await meeting.run()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m windlass.launch.meeting")
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--master", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--fingerprint", required=True)
    parser.add_argument("--desk", required=True)
    options = parser.parse_args(arguments)
    for number in (signal.SIGUSR1, signal.SIGINT):  # sent to the whole group; the script says when it is over
        signal.signal(number, signal.SIG_IGN)
    return asyncio.run(_main(options))


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a name that is being looked up would hold the process for as long as that takes
