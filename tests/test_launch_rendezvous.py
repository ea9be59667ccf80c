"""The nodes' rendezvous over this machine's own address: who joined, who did not, who left, and what the others
learn."""

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from launch_jobs import program, wait_for
from ports import free_port

from windlass.errors import UserError
from windlass.ranks.place import Node, read_node
from windlass.ranks.rendezvous import LEAVING, LOST, READY, Rendezvous, RendezvousError

pytestmark = pytest.mark.long


class Nodes:
    """Nodes as threads of this process, each as `windlass train` runs it, with its own status directory."""

    def __init__(self, folder: Path, world: int, seconds: float = 10.0) -> None:
        self.folder, self.world, self.seconds, self.port = folder, world, seconds, free_port()
        self.made: list[Rendezvous] = []
        self.codes: dict[int, int] = {}
        self.errors: list[str] = []
        self.threads: list[threading.Thread] = []

    def start(self, rank: int, *, master: str = "localhost", silent: bool = False, **options: Any) -> Rendezvous:
        made = Rendezvous(Node(rank, self.world, master, self.port), **{"fingerprint": "f", **options})
        made.heartbeat_seconds, made.silence_seconds = 60 if silent else 0.1, 0.6
        self.status(rank).mkdir(parents=True, exist_ok=True)
        slot = len(self.made)
        self.made.append(made)

        def run() -> None:
            try:
                made.join(self.seconds)
            except RendezvousError as error:
                self.errors.append(f"{made.name}: {error}")
                self.codes[slot] = error.code
                return
            (self.status(rank) / READY).touch()
            made.supervise(self.status(rank))
            made.disconnect()
            self.codes[slot] = 0

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()
        return made

    def status(self, rank: int) -> Path:
        return self.folder / str(rank)

    def lost(self, rank: int) -> str | None:
        path = self.status(rank) / LOST
        return path.read_text() if path.exists() else None

    def joined(self) -> None:
        wait_for(lambda: all((self.status(made.node.number) / READY).exists() for made in self.made))

    def leave(self, *codes: int | None) -> None:
        """Scripts leave their exit codes."""
        for rank, code in enumerate(codes):
            if code is not None:
                (self.status(rank) / LEAVING).write_text(str(code))

    def ended(self) -> list[int]:
        for thread in self.threads:
            thread.join(200)
            assert not thread.is_alive(), "a node hangs"
        return [self.codes[slot] for slot in range(len(self.made))]


def test_rendezvous_works_in_any_order_of_arrival(tmp_path: Path) -> None:
    """A node that is lost while others join comes again: its number is free. Strangers change nothing."""
    crew = Nodes(tmp_path, 4)
    crew.start(2)
    time.sleep(0.2)
    first = crew.start(0)

    def connect(words: bytes) -> socket.socket:
        ends: list[socket.socket] = []

        def reached() -> bool:
            with contextlib.suppress(ConnectionRefusedError):
                ends.append(socket.create_connection(("localhost", crew.port), 5))
            return bool(ends)

        wait_for(reached)
        with contextlib.suppress(OSError):
            ends[0].sendall(words)
        return ends[0]

    like_a_node = b'{"node": 1, "host": "x", "problem": "of another protocol"}\n'
    for words in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xfe\n",
        b"[]\n",
        b'{"node": "x"}\n',
        like_a_node,
        b"[" * 100_000 + b"\n",
    ):
        connect(words).close()
    stays = connect(b"")
    with connect(b'{"node": 1, "world": 4, "host": "x", "fingerprint": "f"}\n'):
        wait_for(lambda: 1 in first.peers)
        assert not crew.codes
    wait_for(lambda: 1 not in first.peers)
    crew.start(1)
    crew.start(3)
    crew.joined()
    with contextlib.suppress(OSError):
        stays.sendall(b'{"bye": 1}\n')
    stays.close()
    time.sleep(0.3)
    assert not crew.codes
    crew.leave(0, 75, 0, 0)
    assert crew.ended() == [0, 0, 0, 0]
    assert [crew.lost(rank) for rank in range(4)] == [None] * 4


@pytest.mark.fault(
    "two of four nodes missing", "`windlass train`", "nodes 1, 3 did not join within 1 s (node 0, node 2"
)
def test_missing_nodes_are_reported_on_every_present_node(tmp_path: Path) -> None:
    crew = Nodes(tmp_path, 4, seconds=1)
    crew.start(0)
    crew.start(2)
    assert crew.ended() == [1, 1]
    assert any("nodes 1, 3 did not join within 1 s (node 0, node 2" in error for error in crew.errors)
    assert any("node 0 says: nodes 1, 3 did not join" in error for error in crew.errors)


def test_a_master_that_cannot_be_reached_is_reported_with_the_reason(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = taken.accept()
                    peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    peer.close()

        threading.Thread(target=answer, daemon=True).start()
        port, crews = int(taken.getsockname()[1]), []
        for rank, master, at, why in (
            (1, "localhost", free_port(), "node 0 at localhost:(.|\n)*refused"),
            (1, "no-such-name.invalid", port, "Name or service not known|Temporary failure in name resolution"),
            (1, "127.0.0.1", port, "node 0 at 127.0.0.1:(.|\n)*is not windlass"),
            (0, "localhost", port, f"port {port} can't be opened"),
        ):
            crew = Nodes(tmp_path, 2, seconds=1)
            crew.port = at
            crew.start(rank, master=master)
            crews.append((crew, why))
        for crew, why in crews:
            assert crew.ended() == [1]
            assert re.search(why, crew.errors[0])
        taken.shutdown(socket.SHUT_RDWR)


WRONG = ("GLOO_SOCKET_IFNAME=net9 names no interface", 13)


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ([{"rank": 0}, {"rank": 1, "fingerprint": "other"}, {"rank": 2}], "has another run file"),
        ([{"rank": 0}, {"rank": 1}, {"rank": 1}], "are node 1"),
        ([{"rank": 0}, {"rank": 1}, {"rank": 3}], "there are nodes 0 to 2"),
        ([{"rank": 0}, {"rank": 1, "problem": WRONG}, {"rank": 2}], "net9 names no interface"),
        ([{"rank": 0, "problem": WRONG}, {"rank": 1}, {"rank": 2}], "net9 names no interface"),
    ],
)
def test_nodes_that_do_not_belong_together_do_not_start(tmp_path: Path, nodes: list[dict[str, Any]], why: str) -> None:
    crew = Nodes(tmp_path, 3)
    for options in nodes:
        crew.start(**options)
    assert crew.ended() == [13, 13, 13]
    assert all(why in error for error in crew.errors)


FIRST = {"problems": [{"where": "run.yaml:7: train.dtype", "problem": "this GPU has no fp8", "hint": "bf16"}]}


@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        (13, "13", "ended with 13: run.yaml:7: train.dtype: this GPU has no fp8"),
        (143, "143", "was stopped before its ranks began"),
        ("closed", "1", "is gone: its connection closed"),
        ("silent", "1", "has not been heard from for 1 s"),
    ],
)
def test_a_node_that_fails_or_is_lost_is_reported_to_all(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], how: int | str, code: str, text: str
) -> None:
    crew = Nodes(tmp_path, 3)
    made = [crew.start(rank, silent=how == "silent" and rank == 1) for rank in range(3)]
    crew.joined()
    if isinstance(how, int):
        for rank, at, error in ((1, 3.0, {"traceback": "Traceback\n later"}), (3, 2.0, "cut {"), (2, 1.0, FIRST)):
            content = json.dumps({**error, "time": at}) if isinstance(error, dict) else error
            (crew.status(1) / f"error-{rank}").write_text(content)
        crew.leave(None, how)
    elif how == "closed":
        made[1].peers[0].end.shutdown(socket.SHUT_RDWR)
    wait_for(lambda: crew.lost(0) and crew.lost(2))
    assert (crew.lost(0), crew.lost(2)) == (code, code)
    crew.leave(1, 1, 1)
    assert crew.ended() == [0, 0, 0]
    printed = capfd.readouterr().err
    assert f"node 1 ({made[1].host}) {text}" in printed
    assert f"node 0 says: node 1 ({made[1].host}) {text}" in printed


# --- all-gather


def meet(world: int, work: Callable[[Rendezvous], Any], seconds: float = 20, without: Sequence[int] = ()) -> list[Any]:
    """Let nodes of this process join, each doing `work`; an exception is the result of its node."""
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


def test_all_gather_returns_none_for_missing_nodes() -> None:
    def work(made: Rendezvous) -> Any:
        return [made.gather(f"{made.node.number}"), made.gather({"n": made.node.number}), made.address]

    assert meet(3, work) == [[["0", "1", "2"], [{"n": 0}, {"n": 1}, {"n": 2}], "127.0.0.1"]] * 3
    assert meet(3, lambda made: made.gather(made.node.number, 5), seconds=4, without=[2])[:2] == [[0, 1, None]] * 2

    def falls_silent(made: Rendezvous) -> Any:
        first = made.gather(made.node.number, 5)
        if made.node.number == 1:
            time.sleep(0.8)
            return made.gather("late", 5)  # not taken for an answer to a later question
        second = made.gather("again", 0.4)
        time.sleep(0.8)
        return [first, second, made.gather("and again", 5)]

    heard = meet(3, falls_silent)
    for rank in (0, 2):
        assert heard[rank] == [[0, 1, 2], ["again", None, "again"], ["and again", None, "and again"]]
    assert isinstance(heard[1], RendezvousError)

    def node_0_leaves(made: Rendezvous) -> Any:
        if made.node.number == 0:
            for peer in made.peers.values():
                peer.end.shutdown(socket.SHUT_RDWR)
            return None
        return made.gather(1, 5)

    assert isinstance(meet(2, node_0_leaves)[1], RendezvousError)


PET = {"PET_NNODES": "3", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "p", "PET_MASTER_PORT": "1"}
SLURM = {"SLURM_JOB_ID": "123", "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[1-2]"}
POD = {"RANK": "1", "WORLD_SIZE": "16", "MASTER_ADDR": "m", "MASTER_PORT": "23457"}
SKY = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
INDEXED = {"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "m", "MASTER_PORT": "23458"}


@pytest.mark.parametrize(
    ("environ", "planned", "expected"),
    [
        ({}, None, Node(0, 1, "localhost", 29500)),
        ({**POD, "WORLD_SIZE": "3"}, None, Node(1, 3, "m", 23457)),
        (POD, 2, Node(1, 2, "m", 23457)),  # it counts ranks or pods
        ({**POD, **PET}, None, Node(1, 3, "p", 1)),  # nodes count, not ranks
        ({"PET_NNODES": "2", "PET_NODE_RANK": "1", "MASTER_ADDR": "m", "MASTER_PORT": "7"}, None, Node(1, 2, "m", 7)),
        ({**PET, "PET_NNODES": "2:2"}, 2, Node(1, 2, "p", 1)),
        (INDEXED, 2, Node(1, 2, "m", 23458)),
        ({"JOB_COMPLETION_INDEX": "3"}, 1, Node(0, 1, "localhost", 29500)),  # one of many runs on one node each
        (SLURM, 2, Node(1, 2, "n1", 20246)),
        ({**SLURM, "MASTER_ADDR": "m", "MASTER_PORT": "5"}, 2, Node(1, 2, "m", 5)),
        (SKY, 2, Node(1, 2, "10.0.0.1", 29500)),
        ({**SKY, "SKYPILOT_NODE_RANK": "2"}, 2, "there is no node '2' among '2'"),
        ({**SLURM, "PATH": ""}, 2, "the address of node 0 is unknown"),
        ({**PET, "PET_NNODES": "1:1"}, None, "there is no node '1' among '1'"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "m"}, None, "there is no node '2' among '2'"),
        ({"WORLD_SIZE": "2", "MASTER_PORT": "http"}, None, "'http' is not a port"),
    ],
)
def test_node_number_from_each_platforms_variables(
    environ: dict[str, str], planned: int | None, expected: Node | str, tmp_path: Path
) -> None:
    program(tmp_path, "scontrol", "printf '%s\\n' n1 n2")
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", **environ}
    if isinstance(expected, Node):
        assert read_node(environ, planned) == expected
        return
    with pytest.raises(UserError, match=re.escape(expected)):
        read_node(environ, planned)
