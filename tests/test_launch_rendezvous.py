"""The nodes' rendezvous over this machine's own address: who came, who did not, who left, and what the others learn."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from windlass.errors import UserError
from windlass.launch.rendezvous import LEAVING, LOST, READY, Node, Rendezvous, RendezvousError, this_node


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def wait_for(condition: Callable[[], Any], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


class Nodes:
    """Nodes as threads of this process, each as launch.sh runs it, with a status directory of its own."""

    def __init__(self, folder: Path, world: int, seconds: float = 10.0) -> None:
        self.folder, self.world, self.seconds, self.port = folder, world, seconds, free_port()
        self.made: list[Rendezvous] = []
        self.codes: dict[int, int] = {}
        self.errors: list[str] = []
        self.threads: list[threading.Thread] = []

    def start(
        self, rank: int, *, master: str = "localhost", heartbeat: float = 0.1, silence: float = 10.0, **options: Any
    ) -> Rendezvous:
        made = Rendezvous(Node(rank, self.world, master, self.port), **{"fingerprint": "f", **options})
        self.status(rank).mkdir(exist_ok=True)
        slot = len(self.made)
        self.made.append(made)

        def run() -> None:
            try:
                made.join(self.seconds)
            except RendezvousError as error:
                self.errors.append(f"{made}: {error}")
                self.codes[slot] = error.code
                return
            (self.status(rank) / READY).touch()
            made.supervise(self.status(rank), heartbeat, silence)
            self.codes[slot] = 0

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()
        return made

    def status(self, rank: int) -> Path:
        return self.folder / str(rank)

    def lost(self, rank: int) -> str | None:
        path = self.status(rank) / LOST
        return path.read_text() if path.exists() else None

    def joined(self, *ranks: int) -> None:
        wait_for(lambda: all((self.status(rank) / READY).exists() for rank in ranks))

    def leave(self, made: Rendezvous, code: int) -> None:
        """As launch.sh does."""
        (self.status(made.node.rank) / LEAVING).write_text(str(code))
        made.stop()

    def ended(self) -> list[int]:
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive(), "a node hangs"
        return [self.codes[slot] for slot in range(len(self.made))]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[..., Nodes]]:
    started: list[Nodes] = []

    def make(world: int, seconds: float = 10.0) -> Nodes:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(Nodes(folder, world, seconds))
        return started[-1]

    yield make
    for crew in started:
        for made in crew.made:
            made.disconnect()


def test_all_join_and_leave_in_peace_whoever_comes_first(nodes: Callable[..., Nodes]) -> None:
    crew = nodes(3)
    late = [crew.start(1), crew.start(2)]
    time.sleep(0.8)
    made = [crew.start(0), *late]
    crew.joined(0, 1, 2)
    for one in made:
        one.stop()  # SIGTERM to everything on the node: only the script's own word ends it
    time.sleep(0.3)
    assert not crew.codes
    for one, code in zip(made, (0, 75, 0), strict=True):
        crew.leave(one, code)
    assert crew.ended() == [0, 0, 0]
    assert [crew.lost(rank) for rank in range(3)] == [None] * 3


def test_missing_nodes_are_named_to_all_that_came(nodes: Callable[..., Nodes]) -> None:
    crew = nodes(4, seconds=1)
    crew.start(0)
    crew.start(2)
    assert crew.ended() == [1, 1]
    assert any("nodes 1, 3 did not join within 1 s (node 0, node 2" in error for error in crew.errors)
    assert any("node 0 says: nodes 1, 3 did not join" in error for error in crew.errors)


def test_a_master_that_cannot_be_reached_is_reported_with_the_reason(nodes: Callable[..., Nodes]) -> None:
    with socket.create_server(("", 0)) as taken:

        def answer() -> None:
            while True:
                try:
                    peer, _ = taken.accept()
                except OSError:
                    return
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                peer.close()

        threading.Thread(target=answer, daemon=True).start()
        cases: tuple[tuple[str, int | None, str], ...] = (
            ("localhost", None, "refused"),
            ("no-such-name.invalid", None, "does not resolve"),
            ("127.0.0.1", int(taken.getsockname()[1]), "is not windlass"),
        )
        for master, port, why in cases:
            crew = nodes(2, seconds=1)
            crew.port = port or crew.port
            crew.start(1, master=master)
            assert crew.ended() == [1]
            assert f"node 0 at {master}:" in crew.errors[0]
            assert why in crew.errors[0]
        crew = nodes(2, seconds=1)
        crew.port = int(taken.getsockname()[1])
        crew.start(0)
        assert crew.ended() == [1]
        assert f"port {crew.port} can't be opened" in crew.errors[0]
        taken.shutdown(socket.SHUT_RDWR)


WRONG = ("GLOO_SOCKET_IFNAME=net9 names no interface", 13)


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ([{"rank": 1, "fingerprint": "other"}, {"rank": 2}], "has another run file"),
        ([{"rank": 1}, {"rank": 1}], "are node 1"),
        ([{"rank": 1}, {"rank": 3}], "there are nodes 0 to 2"),
        ([{"rank": 1, "problem": WRONG}, {"rank": 2}], "net9 names no interface"),
        ([{"rank": 0, "problem": WRONG}, {"rank": 1}, {"rank": 2}], "net9 names no interface"),
    ],
)
def test_nodes_that_do_not_belong_together_do_not_start(
    nodes: Callable[..., Nodes], others: list[dict[str, Any]], why: str
) -> None:
    crew = nodes(3)
    for options in others if others[0]["rank"] == 0 else [{"rank": 0}, *others]:
        crew.start(**options)
    assert crew.ended() == [13, 13, 13]
    assert all(why in error for error in crew.errors)


def test_a_node_that_fails_is_reported_to_all_with_its_code(
    nodes: Callable[..., Nodes], capfd: pytest.CaptureFixture[str]
) -> None:
    for code, text in ((13, "ended with 13"), (143, "was stopped before its ranks began")):
        crew = nodes(3)
        made = [crew.start(rank) for rank in range(3)]
        crew.joined(0, 1, 2)
        crew.leave(made[1], code)
        wait_for(lambda crew=crew: crew.lost(0) and crew.lost(2))  # type: ignore[misc]
        assert (crew.lost(0), crew.lost(2)) == (str(code), str(code))
        crew.leave(made[0], 1)
        crew.leave(made[2], 1)
        assert crew.ended() == [0, 0, 0]
        said = capfd.readouterr().err
        assert f"node 1 ({made[1].host}) {text}" in said
        assert f"node 0 says: node 1 ({made[1].host}) {text}" in said


def test_a_lost_connection_and_silence_are_noticed(
    nodes: Callable[..., Nodes], capfd: pytest.CaptureFixture[str]
) -> None:
    for kind, text in (("closed", "is gone: its connection closed"), ("silent", "has not been heard for 1 s")):
        crew = nodes(2)
        first = crew.start(0, silence=0.6 if kind == "silent" else 10)
        second = crew.start(1, heartbeat=60 if kind == "silent" else 0.1)
        crew.joined(0, 1)
        if kind == "closed":
            second.peers[0].close()
        wait_for(lambda crew=crew: crew.lost(0))  # type: ignore[misc]
        assert crew.lost(0) == "1"
        for made in (first, second):
            crew.leave(made, 1)
        crew.ended()
        assert f"node 1 ({second.host}) {text}" in capfd.readouterr().err


def test_stopped_while_nodes_join_it_ends_at_once_and_may_be_replaced(nodes: Callable[..., Nodes]) -> None:
    """A pod that is taken away comes again: its number is free, and it does not count twice."""
    for rank in (0, 1):
        crew = nodes(3, seconds=60)
        made = crew.start(rank)
        time.sleep(0.3)
        made.stop()
        assert crew.ended() == [75]
        assert not (crew.status(rank) / READY).exists()
    crew = nodes(3)
    first, second = crew.start(0), crew.start(1)
    wait_for(lambda: 1 in first.peers)
    second.stop()
    wait_for(lambda: 1 not in first.peers)
    again, third = crew.start(1), crew.start(2)
    crew.joined(0, 1, 2)
    for made in (first, again, third):
        crew.leave(made, 0)
    assert crew.ended() == [0, 75, 0, 0]
    assert [crew.lost(rank) for rank in range(3)] == [None] * 3


def test_strangers_at_the_port_change_nothing(nodes: Callable[..., Nodes]) -> None:
    crew = nodes(2)
    first = crew.start(0)
    like_a_node = b'{"node": 1, "host": "x", "problem": "of another protocol"}\n'
    words = (b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe\n", b"[]\n", b'{"node": "x"}\n', like_a_node)
    for noise in (*words, b"[" * 100_000 + b"\n", b""):

        def connect(noise: bytes = noise) -> bool:
            try:
                with socket.create_connection(("localhost", crew.port), 5) as end:
                    end.sendall(noise)
            except OSError:
                return False
            return True

        wait_for(connect)
    second = crew.start(1)
    crew.joined(0, 1)
    for made in (first, second):
        crew.leave(made, 0)
    assert crew.ended() == [0, 0]


# --- all-gather


def meet(world: int, work: Callable[[Rendezvous], Any], seconds: float = 20, without: Sequence[int] = ()) -> list[Any]:
    """Nodes of this process join and each does `work`; an exception is the result of its node."""
    port, results = free_port(), [None] * world

    def node(rank: int) -> None:
        made = Rendezvous(Node(rank, world, "localhost", port))
        try:
            made.join(seconds, partial=True)
            results[rank] = work(made)
        except Exception as error:
            results[rank] = error  # type: ignore[call-overload]
        finally:
            made.close()

    threads = [threading.Thread(target=node, args=(rank,), daemon=True) for rank in range(world) if rank not in without]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a node hangs"
    return results


def test_every_node_gets_what_all_sent() -> None:
    def work(made: Rendezvous) -> Any:
        return [made.gather(f"{made.node.rank}"), made.gather({"n": made.node.rank}), made.address]

    assert meet(3, work) == [[["0", "1", "2"], [{"n": 0}, {"n": 1}, {"n": 2}], "127.0.0.1"]] * 3


def test_a_node_that_is_missing_silent_or_gone_is_none_and_the_rest_go_on() -> None:
    assert meet(3, lambda made: made.gather(made.node.rank, 5), seconds=1.5, without=[2])[:2] == [[0, 1, None]] * 2

    def falls_silent(made: Rendezvous) -> Any:
        first = made.gather(made.node.rank, 5)
        if made.node.rank == 1:
            time.sleep(1.5)
            return made.gather("late", 5)  # not taken for an answer to a later question
        second = made.gather("again", 0.5)
        time.sleep(2)
        return [first, second, made.gather("and again", 5)]

    heard = meet(3, falls_silent)
    for rank in (0, 2):
        assert heard[rank] == [[0, 1, 2], ["again", None, "again"], ["and again", None, "and again"]]
    assert isinstance(heard[1], RendezvousError)

    def node_0_leaves(made: Rendezvous) -> Any:
        if made.node.rank == 0:
            for peer in made.peers.values():
                peer.close()
            return None
        return made.gather(1, 5)

    assert isinstance(meet(2, node_0_leaves)[1], RendezvousError)


PET = {"PET_NNODES": "3", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "p", "PET_MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Node(0, 1, "localhost", 29500)),
        ({"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "m-0", "MASTER_PORT": "23456"}, Node(1, 3, "m-0", 23456)),
        ({"RANK": "1", "WORLD_SIZE": "24", "MASTER_ADDR": "m", **PET}, Node(1, 3, "p", 1)),  # nodes count, not ranks
        ({"PET_NNODES": "2", "PET_NODE_RANK": "1", "MASTER_ADDR": "m", "MASTER_PORT": "7"}, Node(1, 2, "m", 7)),
        ({"PET_NNODES": "1:3"}, None),
        ({"WORLD_SIZE": "2", "RANK": "2"}, None),
        ({"WORLD_SIZE": "2", "MASTER_PORT": "http"}, None),
    ],
)
def test_which_node_this_is(environ: dict[str, str], expected: Node | None) -> None:
    if expected:
        assert this_node(environ) == expected
        return
    with pytest.raises(UserError):
        this_node(environ)
