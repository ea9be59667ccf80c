"""The meeting of nodes, over this machine's own address: who came, who did not, who left, and how that is told."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from argparse import Namespace
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from windlass.launch import interfaces
from windlass.launch.meeting import Meeting


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


class Table:
    """Some nodes with a desk each."""

    def __init__(
        self, tmp_path: Path, nodes: int, seconds: float = 5.0, beat: float = 0.1, silence: float = 5.0
    ) -> None:
        self.tmp_path, self.nodes, self.seconds = tmp_path, nodes, seconds
        self.beat, self.silence = beat, silence
        self.port = free_port()

    def node(self, number: int, *, fingerprint: str = "f", master: str = "localhost") -> Meeting:
        desk = self.tmp_path / str(number)
        desk.mkdir(exist_ok=True)
        options = Namespace(
            node=number, nodes=self.nodes, master=master, port=self.port,
            seconds=self.seconds, fingerprint=fingerprint, desk=str(desk),
        )  # fmt: skip
        return Meeting(options, self.beat, self.silence)

    def gone(self, number: int) -> str | None:
        path = self.tmp_path / str(number) / "gone"
        return path.read_text() if path.exists() else None

    async def met(self, *numbers: int) -> None:
        async with asyncio.timeout(10):
            while not all((self.tmp_path / str(number) / "met").exists() for number in numbers):
                await asyncio.sleep(0.02)


def end(meeting: Meeting, code: int) -> None:
    """As launch.sh takes its leave."""
    (meeting.desk / "farewell").write_text(str(code))
    meeting.done.set()


def together(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await work

    asyncio.run(bounded())


def test_all_come_and_leave_in_peace(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def work() -> None:
        table = Table(tmp_path, 3)
        nodes = [table.node(number) for number in range(3)]
        runs = [asyncio.create_task(node.run()) for node in nodes]
        await table.met(0, 1, 2)
        for node, code in zip(nodes, (0, 75, 0), strict=True):
            end(node, code)
        assert list(await asyncio.gather(*runs)) == [0, 0, 0]
        assert [table.gone(number) for number in range(3)] == [None] * 3

    together(work())
    assert capfd.readouterr().err.count("all 3 nodes have met") == 3


def test_node_0_may_come_last(tmp_path: Path) -> None:
    async def work() -> None:
        table = Table(tmp_path, 2)
        nodes = [table.node(0), table.node(1)]
        second = asyncio.create_task(nodes[1].run())
        await asyncio.sleep(0.8)
        first = asyncio.create_task(nodes[0].run())
        await table.met(0, 1)
        for node in nodes:
            end(node, 0)
        assert list(await asyncio.gather(first, second)) == [0, 0]

    together(work())


def test_who_does_not_come_is_named_to_all_that_did(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def work() -> None:
        table = Table(tmp_path, 4, seconds=1)
        assert list(await asyncio.gather(table.node(0).run(), table.node(2).run())) == [1, 1]

    together(work())
    said = capfd.readouterr().err
    assert "nodes 1, 3 did not join within 1 s" in said
    assert "node 0 says: nodes 1, 3 did not join" in said


@pytest.mark.parametrize(
    ("master", "why"),
    [("localhost", "Connect call failed|refused"), ("no-such-name.invalid", "the name does not resolve")],
)
def test_a_master_that_is_not_there_is_told_with_the_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], master: str, why: str
) -> None:
    async def work() -> None:
        table = Table(tmp_path, 2, seconds=1)
        assert await table.node(1, master=master).run() == 1

    together(work())
    said = capfd.readouterr().err
    assert f"node 0 at {master}:" in said
    assert any(word in said for word in why.split("|")), said


@pytest.mark.parametrize(
    ("second", "third", "says"),
    [
        ({"number": 1, "fingerprint": "other"}, {"number": 2}, "has another run file"),
        ({"number": 1}, {"number": 1}, "say that they are node 1"),
        ({"number": 1}, {"number": 3}, "there are nodes 0 to 2"),
    ],
)
def test_nodes_that_do_not_belong_together_do_not_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], second: dict[str, Any], third: dict[str, Any], says: str
) -> None:
    async def work() -> None:
        table = Table(tmp_path, 3)
        nodes = [table.node(0), *(table.node(one.pop("number"), **one) for one in (dict(second), dict(third)))]
        codes = await asyncio.gather(*(node.run() for node in nodes))
        assert list(codes) == [13, 13, 13]

    together(work())
    assert says in capfd.readouterr().err


@pytest.mark.parametrize("ill", [0, 1])
def test_a_node_that_cannot_start_tells_the_others_why(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], ill: int
) -> None:
    async def work() -> None:
        table = Table(tmp_path, 2)
        nodes = [table.node(0), table.node(1)]
        nodes[ill].own = ("GLOO_SOCKET_IFNAME=net9 names no interface", 13)
        assert list(await asyncio.gather(*(node.run() for node in nodes))) == [13, 13]

    together(work())
    assert capfd.readouterr().err.count("net9 names no interface") == 2


def test_who_ends_badly_is_told_to_all_with_the_code(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def work() -> None:
        table = Table(tmp_path, 3)
        nodes = [table.node(number) for number in range(3)]
        runs = [asyncio.create_task(node.run()) for node in nodes]
        await table.met(0, 1, 2)
        end(nodes[1], 13)
        async with asyncio.timeout(5):
            while table.gone(0) is None or table.gone(2) is None:
                await asyncio.sleep(0.02)
        assert (table.gone(0), table.gone(2)) == ("13", "13")
        end(nodes[0], 1)
        end(nodes[2], 1)
        await asyncio.gather(*runs)

    together(work())
    said = capfd.readouterr().err
    assert "node 1 (" in said
    assert "ended with 13" in said


@pytest.mark.parametrize("number", [0, 1])
def test_a_meeting_that_is_stopped_before_all_have_come_ends_at_once(tmp_path: Path, number: int) -> None:
    async def work() -> None:
        table = Table(tmp_path, 3, seconds=60)
        node = table.node(number)
        run = asyncio.create_task(node.run())
        await asyncio.sleep(0.3)
        node.stop()
        async with asyncio.timeout(3):
            assert await run == 75
        assert not (node.desk / "met").exists()

    together(work())


def test_a_node_that_is_stopped_while_all_come_may_be_replaced(tmp_path: Path) -> None:
    """A pod that is taken away comes again: its number is free, and it does not count twice."""

    async def work() -> None:
        table = Table(tmp_path, 3, seconds=20)
        first, second = table.node(0), table.node(1)
        host, guest = asyncio.create_task(first.run()), asyncio.create_task(second.run())
        while 1 not in first.peers:
            await asyncio.sleep(0.02)
        second.stop()
        assert await guest == 75
        again, third = table.node(1), table.node(2)
        runs = [host, *(asyncio.create_task(node.run()) for node in (again, third))]
        await table.met(0, 1, 2)
        for node in (first, again, third):
            end(node, 0)
        assert list(await asyncio.gather(*runs)) == [0, 0, 0]
        assert [table.gone(number) for number in range(3)] == [None] * 3

    together(work())


def test_once_all_have_met_only_the_scripts_farewell_ends_it(tmp_path: Path) -> None:
    async def work() -> None:
        table = Table(tmp_path, 2)
        nodes = [table.node(0), table.node(1)]
        runs = [asyncio.create_task(node.run()) for node in nodes]
        await table.met(0, 1)
        for node in nodes:
            node.stop()  # as everything on the node is told
        await asyncio.sleep(0.3)
        assert not any(run.done() for run in runs)
        for node in nodes:
            (node.desk / "farewell").write_text("75")
            node.stop()
        assert list(await asyncio.gather(*runs)) == [0, 0]
        assert [table.gone(number) for number in range(2)] == [None, None]

    together(work())


def test_silence_is_noticed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def work() -> None:
        table = Table(tmp_path, 2, beat=0.1, silence=0.6)
        nodes = [table.node(0), table.node(1)]
        nodes[1].beat = 60  # it lives, and says nothing
        runs = [asyncio.create_task(node.run()) for node in nodes]
        await table.met(0, 1)
        async with asyncio.timeout(5):
            while table.gone(0) is None:
                await asyncio.sleep(0.02)
        for node in nodes:
            end(node, 1)
        await asyncio.gather(*runs)

    together(work())
    assert "has not been heard for 1 s" in capfd.readouterr().err


def test_strangers_at_the_port_change_nothing(tmp_path: Path) -> None:
    async def work() -> None:
        table = Table(tmp_path, 2)
        nodes = [table.node(0), table.node(1)]
        first = asyncio.create_task(nodes[0].run())
        for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe\n", b"[]\n", b'{"node": "x"}\n', b""):
            for _ in range(50):
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("localhost", table.port)
                    writer.write(noise)
                    writer.close()
                    break
                await asyncio.sleep(0.05)
        second = asyncio.create_task(nodes[1].run())
        await table.met(0, 1)
        for node in nodes:
            end(node, 0)
        assert list(await asyncio.gather(first, second)) == [0, 0]

    together(work())


@pytest.mark.parametrize(
    ("environ", "nodes", "says"),
    [
        ({}, 2, None),
        ({"GLOO_SOCKET_IFNAME": "lo"}, 1, None),
        ({"GLOO_SOCKET_IFNAME": "lo"}, 2, "reaches no other node"),
        ({"NCCL_SOCKET_IFNAME": "=lo"}, 2, "reaches no other node"),
        ({"NCCL_SOCKET_IFNAME": "net9"}, 2, "names no interface"),
        ({"NCCL_SOCKET_IFNAME": "^net9"}, 1, None),
        ({"GLOO_SOCKET_IFNAME": "l"}, 1, "names no interface"),
        ({"NCCL_SOCKET_IFNAME": "l"}, 1, None),
    ],
)
def test_interfaces_are_looked_at_by_each_librarys_own_rules(
    environ: dict[str, str], nodes: int, says: str | None
) -> None:
    found = interfaces.complaint(environ, nodes)
    assert (found is None) == (says is None), found
    if found and says:
        assert says in found[0]


def test_the_image_is_for_any_user_and_holds_what_was_tested() -> None:
    text = (Path(__file__).parent.parent / "Containerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if line.startswith("USER")][-1] == "USER 1001:0"
    assert "--constraint" in text
    assert ":latest" not in text
    assert "chmod -R g=u" in text
    needed = {
        word.lstrip("!")
        for word in Path(__file__).parent.parent.joinpath(".containerignore").read_text().split()
        if word.startswith("!")
    }
    copied = {word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]}
    assert copied == needed, "what is copied is not ignored, and nothing else is sent"
