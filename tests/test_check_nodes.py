"""Between nodes: they meet over real sockets, one fault is planted in one of them, and every node names it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from checks_seen import require_all, watched

from windlass import demo
from windlass.errors import UserError
from windlass.launch.check import IN_POD, Report, doors, fabric, meeting, nodes, pairs, shared
from windlass.launch.check.meeting import AbsentError, Meeting, Place
from windlass.launch.check.result import FAIL, PASS, UNSEEN, WARN, Result, failed, passed
from windlass.plan import Plan, make
from windlass.runfile import Loaded, read

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "examples" / "mistral-small-4" / "train.yaml"
NAMES = ("node 0", "node 1", "node 2", "node 3")


@pytest.fixture(scope="module", autouse=True)
def said() -> Iterator[set[Any]]:
    """What the tests of this file made checks say; the last one looks at it."""
    with watched() as found:
        yield found


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo.make(tmp_path_factory.mktemp("check") / "demo")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make(read(RECIPE))


@pytest.fixture(scope="module")
def wired() -> Plan:
    return make(read(RECIPE, ["cluster.network=ethernet-10"]))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def at_once(works: Sequence[Callable[[], Any]], seconds: float = 60) -> list[Any]:
    """Each in a thread of its own, as nodes are; an exception is the result of its node."""
    results: list[Any] = [None] * len(works)

    def run(index: int) -> None:
        try:
            results[index] = works[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    assert not any(thread.is_alive() for thread in threads), "a node hangs"
    return results


def named(results: Sequence[Result], name: str) -> Result:
    found = [result for result in results if result.name == name]
    assert len(found) == 1, [result.name for result in results]
    return found[0]


# --- who is there


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Place(0, 1, "localhost", 29500)),
        (
            {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"},
            Place(1, 3, "job-master-0", 23456),
        ),
        (  # an operator's pod with eight GPUs: nodes count, not ranks
            {
                "RANK": "1",
                "WORLD_SIZE": "24",
                "MASTER_ADDR": "m",
                "PET_NNODES": "3",
                "PET_NODE_RANK": "1",
                "PET_MASTER_ADDR": "p",
                "PET_MASTER_PORT": "1",
            },
            Place(1, 3, "p", 1),
        ),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "1", "MASTER_ADDR": "m", "MASTER_PORT": "7"}, Place(1, 2, "m", 7)),
    ],
)
def test_the_place_of_a_node(environ: dict[str, str], expected: Place) -> None:
    assert meeting.place(environ) == expected


@pytest.mark.parametrize(
    "environ",
    [{"PET_NNODES": "1:3"}, {"WORLD_SIZE": "2", "RANK": "2"}, {"WORLD_SIZE": "2", "MASTER_PORT": "http"}],
)
def test_a_place_that_cannot_be_is_the_users_mistake(environ: dict[str, str]) -> None:
    with pytest.raises(UserError):
        meeting.place(environ)


def test_a_place_that_cannot_be_fails_the_check(sound: Path, plan: Plan) -> None:
    environ = {"WORLD_SIZE": "2", "RANK": "2"}
    met = nodes.check(read(sound), plan, [], {}, environ, Path("/"), 1, lambda _: None)
    assert named(met.results, "number of nodes").verdict == FAIL
    assert met.speaks


def meet(world: int, work: Callable[[Meeting], Any], patience: float = 20, without: Sequence[int] = ()) -> list[Any]:
    """Nodes of this process meet and each does `work`."""
    port = free_port()

    def node(rank: int) -> Any:
        if rank in without:
            return None
        table = meeting.attend(Place(rank, world, "localhost", port), patience, lambda _: None)
        try:
            return work(table)
        finally:
            table.close()

    return at_once([lambda rank=rank: node(rank) for rank in range(world)])  # type: ignore[misc]


def test_every_node_hears_what_all_say() -> None:
    heard = meet(3, lambda table: [table.gather(f"{table.place.rank}"), table.gather({"n": table.place.rank})])
    assert heard == [[["0", "1", "2"], [{"n": 0}, {"n": 1}, {"n": 2}]]] * 3


def test_a_node_that_never_comes_is_told_to_the_others_in_bounded_time() -> None:
    began = time.monotonic()
    heard = meet(3, lambda table: table.gather(table.place.rank, 5), patience=1.5, without=[2])
    assert heard[:2] == [[0, 1, None]] * 2
    assert time.monotonic() - began < 10


def test_a_node_that_falls_silent_is_dropped_and_the_rest_goes_on() -> None:
    def work(table: Meeting) -> Any:
        first = table.gather(table.place.rank, 5)
        if table.place.rank == 1:
            time.sleep(1.5)
            try:
                return table.gather("late", 5)
            except AbsentError:
                return "dropped"
        second = table.gather("again", 0.5)
        time.sleep(2)
        return [first, second, table.gather("and again", 5)]

    heard = meet(3, work)
    for rank in (0, 2):
        assert heard[rank] == [[0, 1, 2], ["again", None, "again"], ["and again", None, "and again"]]
    assert heard[1] == "dropped"  # its late word is not taken for an answer to a later question


def test_node_0_that_goes_away_ends_the_meeting() -> None:
    def work(table: Meeting) -> Any:
        if table.place.rank == 0:
            for seat in table.seats.values():
                seat.close()
            return None
        return table.gather(1, 5)

    assert isinstance(meet(2, work)[1], AbsentError)


def test_names_and_ports_that_never_answer_end_within_the_patience() -> None:
    began = time.monotonic()
    with pytest.raises(AbsentError, match=r"'no-such-host\.invalid' does not resolve"):
        meeting.attend(Place(1, 2, "no-such-host.invalid", 1), 0.5, lambda _: None)
    with pytest.raises(AbsentError, match="does not answer"):
        meeting.attend(Place(1, 2, "localhost", free_port()), 0.5, lambda _: None)
    assert time.monotonic() - began < 10


def test_the_masters_name_is_asked_for_on_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "NAME_SECONDS", 0.3)
    assert nodes.master(Place(0, 2, "127.0.0.1", 1)).verdict == PASS
    found = nodes.master(Place(0, 2, "no-such-host.invalid", 1))
    assert (found.verdict, "does not resolve" in found.seen) == (FAIL, True)


def test_a_port_in_use_and_a_stranger_behind_it_are_told() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AbsentError, match=f"port {port} cannot be opened"):
            meeting.attend(Place(0, 2, "localhost", port), 0.5, lambda _: None)

        def answer() -> None:
            guest, _ = taken.accept()
            guest.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            guest.close()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(AbsentError, match="something else answers"):
            meeting.attend(Place(1, 2, "127.0.0.1", port), 2, lambda _: None)
        thread.join()


def test_two_nodes_of_one_number_and_of_different_counts_are_refused() -> None:
    port = free_port()
    places = [Place(0, 3, "localhost", port), Place(1, 3, "localhost", port), Place(1, 3, "localhost", port)]
    waiting: list[str] = []

    def attend(here: Place, late: float) -> Any:
        time.sleep(late)
        return meeting.attend(here, 3, waiting.append).close()

    results = at_once([lambda p=p, i=i: attend(p, i / 3) for i, p in enumerate(places)])  # type: ignore[misc]
    assert "two nodes 1" in str(results[2])
    port = free_port()
    results = at_once(
        [
            lambda: meeting.attend(Place(0, 2, "localhost", port), 2, waiting.append).close(),
            lambda: meeting.attend(Place(1, 4, "localhost", port), 2, waiting.append),
        ]
    )
    assert "node 0 waits for 2 nodes, this one counts 4" in str(results[1])
    assert any("waiting for node" in said for said in waiting) or not waiting


# --- who reaches whom, and the clocks


def test_a_door_that_is_shut_names_the_node_behind_it() -> None:
    door = doors.Door("127.0.0.1")
    why, offset = doors.knock("127.0.0.1", door.port)
    assert why == ""
    assert offset is not None
    assert abs(offset) < 0.5
    door.close()
    assert doors.knock("127.0.0.1", door.port) == ("Connection refused", None)
    good = {"0": "", "1": "", "2": ""}
    one = [{**good, "2": "no answer"}, {**good, "2": "no answer"}, good]
    found = doors.reach([{k: v for k, v in row.items() if k != str(i)} for i, row in enumerate(one)], NAMES[:3])
    assert (found.verdict, found.seen) == (FAIL, "no other node reaches node 2 (no answer)")
    pair = [{"1": "no answer", "2": ""}, {"0": "", "2": ""}, {"0": "", "1": ""}]
    assert doors.reach(pair, NAMES[:3]).seen == "node 0 cannot reach node 1 (no answer)"
    assert doors.reach([{"1": ""}, {"0": ""}], NAMES[:2]).verdict == PASS
    assert doors.reach([None, None], NAMES[:2]).verdict == UNSEEN


@pytest.mark.parametrize(("ahead", "verdict"), [(0.0, PASS), (5.0, WARN), (-300.0, FAIL)])
def test_a_clock_that_is_off_is_measured_over_the_network(ahead: float, verdict: str) -> None:
    door = doors.Door("127.0.0.1", clock=lambda: time.time() + ahead)
    offset = doors.knock("127.0.0.1", door.port)[1]
    door.close()
    assert offset == pytest.approx(ahead, abs=0.5)
    found = doors.clocks([0.0, offset], NAMES[:2])
    assert found.verdict == verdict
    assert verdict == PASS or found.seen.startswith("node 1 is ")
    assert doors.clocks([0.0, None], NAMES[:2]).verdict == UNSEEN


# --- the same of everything, and one volume

FACTS = {
    "run file": "a",
    "windlass": "1",
    "system": "Debian",
    "data": "d",
    "model": "m",
    "image": {"torch": "2.13.0", "numpy": "2.4"},
    "variables": {"NCCL_DEBUG": "WARN"},
}


@pytest.mark.parametrize(
    ("fault", "name", "verdict", "said"),
    [
        ({}, "same run file", PASS, "a"),
        ({"run file": "b"}, "same run file", FAIL, "node 1 has b"),
        ({"windlass": "2"}, "same windlass", FAIL, "node 1 has 2"),
        ({"system": "RHEL"}, "same system", FAIL, "node 1 has RHEL"),
        ({"data": "e"}, "same data", FAIL, "node 1 has e"),
        ({"data": None}, "same data", FAIL, "node 1 cannot read it"),
        ({"model": "n"}, "same model", FAIL, "node 1 has n"),
        ({"image": {"torch": "2.12.0", "numpy": "2.4"}}, "same image", FAIL, "node 1 has torch 2.12.0"),
        ({"image": {"torch": "2.13.0"}}, "same image", FAIL, "node 1 has numpy none"),
        ({"variables": {"NCCL_DEBUG": "INFO"}}, "same variables", WARN, "node 1 has NCCL_DEBUG=INFO"),
    ],
)
def test_the_node_that_differs_is_named(fault: dict[str, Any], name: str, verdict: str, said: str) -> None:
    results = shared.compare([FACTS, {**FACTS, **fault}, FACTS], NAMES[:3])
    found = named(results, name)
    assert (found.verdict, said in found.seen) == (verdict, True), found
    assert {result.verdict for result in results if result.name != name} == {PASS}


def test_what_no_node_can_read_was_not_compared() -> None:
    blind = {**FACTS, "data": None}
    assert named(shared.compare([blind, blind], NAMES[:2]), "same data").verdict == UNSEEN


def test_fingerprints_know_content_at_both_ends_and_size(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"a" * 200_000)
    before = shared.files([file])
    assert before == shared.files([tmp_path])  # a folder stands for its files
    for content in (b"b" + b"a" * 199_999, b"a" * 199_999 + b"b", b"a" * 200_001):
        file.write_bytes(content)
        assert shared.files([file]) != before
    assert shared.files([tmp_path / "none"]) is None


def test_one_volume_is_written_and_seen_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "SEEN_SECONDS", 0.5)
    assert meet(3, lambda table: shared.volume(table, tmp_path / "run")) == [{}, {}, {}]
    assert not list(tmp_path.iterdir())
    assert shared.one_volume([{}, {}], NAMES[:2], "out", "w").verdict == PASS


def test_a_volume_of_its_own_and_one_that_cannot_be_written_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "SEEN_SECONDS", 0.5)
    unwritable = meet(2, lambda table: shared.volume(table, Path("/proc/windlass")))
    assert all("written" in row for row in unwritable)
    assert shared.one_volume(unwritable, NAMES[:2], "out", "w").verdict == FAIL

    def vanishing(table: Meeting) -> dict[str, str]:
        """As node 1 sees another volume that is mounted at the same path: what node 0 wrote is not there."""
        if table.place.rank == 0:
            return shared.volume(table, tmp_path)
        said = table.gather({"wrong": "", "token": "x", "folder": ""})[0]
        found = {} if (tmp_path / "elsewhere" / f".windlass-{said['token']}.part").exists() else {"seen": "not here"}
        for answer in (None, "", None):
            table.gather(answer)
        return found

    rows = meet(2, vanishing)
    found = shared.one_volume(rows, NAMES[:2], str(tmp_path), "run.yaml:1: train.output_dir")
    assert (found.verdict, found.seen) == (FAIL, "node 1: not here")


# --- bandwidth


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8, 17])
def test_rounds_hold_every_pair_once_and_no_rank_twice(world: int) -> None:
    rounds = pairs.rounds(world)
    everything = [game for games in rounds for game in games]
    assert sorted(everything) == [(a, b) for a in range(world) for b in range(a + 1, world)]
    for games in rounds:
        playing = [rank for game in games for rank in game]
        assert len(playing) == len(set(playing))


def measured(backend: str = "nccl", **speeds: float | None) -> pairs.Measured:
    every = {(a, b): 45.0 for a in range(4) for b in range(a + 1, 4)}
    given = {(int(key[1]), int(key[2])): value for key, value in speeds.items() if key != "overall"}
    return pairs.Measured(backend, {**every, **given}, speeds.get("overall", 45.0))


def test_speeds_against_the_fabric_and_each_other(plan: Plan) -> None:
    names = NAMES
    assert {result.verdict for result in pairs.judge(plan, measured(), names)} == {PASS}
    slow = named(pairs.judge(plan, measured(p13=10.0, p23=11.0), names), "all-reduce of pairs")
    assert (slow.verdict, "node 1 with node 3 at 10.00" in slow.seen) == (WARN, True)
    assert "node 3 is in 2 of the slow ones" in slow.seen
    crawling = named(pairs.judge(plan, measured(p13=0.5), names), "all-reduce of pairs")
    assert (crawling.verdict, "infiniband-400 gets 45" in crawling.seen) == (FAIL, True)
    dead = named(pairs.judge(plan, measured(p02=None), names), "all-reduce of pairs")
    assert (dead.verdict, "node 0 and node 2" in dead.seen) == (FAIL, True)
    assert named(pairs.judge(plan, measured(overall=10.0), names), "all-reduce of all").verdict == WARN
    assert named(pairs.judge(plan, measured(overall=1.0), names), "all-reduce of all").verdict == FAIL
    assert named(pairs.judge(plan, measured(overall=None), names), "all-reduce of all").verdict == FAIL
    assert pairs.judge(plan, pairs.Measured("gloo", trouble="node 1: no interface"), names)[0].verdict == FAIL


def test_gloos_figures_are_not_held_against_infiniband(plan: Plan, wired: Plan) -> None:
    slow = measured("gloo", overall=0.05)
    found = named(pairs.judge(plan, slow, NAMES), "all-reduce of all")
    assert (found.verdict, "not comparable" in found.seen) == (PASS, True)
    assert named(pairs.judge(wired, slow, NAMES), "all-reduce of all").verdict == FAIL


INFINIBAND = """\
pod:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB net1:10.0.0.1<0>
pod:1:2 [0] NCCL INFO Using network IB
pod:1:2 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
pod:1:2 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA
pod:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
"""
SOCKETS = """\
pod:1:2 [0] NCCL INFO NET/IB : No device found.
pod:1:2 [0] NCCL INFO Using network Socket
pod:1:2 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
"""


def test_sockets_where_infiniband_was_asked_for_fail(plan: Plan, wired: Plan) -> None:
    assert dict(pairs.transports(INFINIBAND)) == {"NET/IB/GDRDMA": 2, "P2P": 1}
    assert pairs.transport(plan, INFINIBAND).verdict == PASS
    assert pairs.transport(plan, SOCKETS).verdict == FAIL
    assert pairs.transport(wired, SOCKETS).verdict == PASS
    assert pairs.transport(plan, INFINIBAND.replace("/GDRDMA", "")).verdict == WARN
    assert pairs.transport(plan, "").verdict == UNSEEN
    assert pairs.transport(plan, "NCCL INFO cudaDriverVersion 13000\n").verdict == UNSEEN
    early = "NCCL INFO Using network Socket\n"  # ended before it opened a channel
    assert pairs.transport(plan, early).verdict == FAIL


# --- all of it together


def nodes_of(
    loaded: Sequence[Loaded],
    mine: Sequence[Sequence[Result]],
    have: Sequence[Mapping[str, str]],
    patience: float = 20,
    absent: Sequence[int] = (),
) -> list[nodes.Met]:
    """The protocol in threads, without torch, so without its bandwidths."""
    port, world = free_port(), len(loaded)
    plan = make(loaded[0])

    def node(rank: int) -> Any:
        if rank in absent:
            return None
        environ = {"PET_NNODES": str(world), "PET_NODE_RANK": str(rank), "PET_MASTER_PORT": str(port)}
        given = loaded[rank], plan, mine[rank], have[rank], environ, Path("/"), patience, lambda _: None
        return nodes.check(*given)

    return at_once([lambda rank=rank: node(rank) for rank in range(world)])  # type: ignore[misc]


def spread(sound: Path, world: int, *overrides: str) -> Loaded:
    return read(sound, [f"cluster.nodes={world}", "cluster.gpus_per_node=1", "cluster.network=loopback", *overrides])


def test_one_nodes_fault_is_every_nodes_verdict_with_its_name(sound: Path) -> None:
    loaded = [spread(sound, 3)] * 3
    mine = [[passed("open files", "many")]] * 2 + [[failed("open files", "few", "more")]]
    met = nodes_of(loaded, mine, [{"numpy": "2.4"}] * 3)
    assert [m.speaks for m in met] == [True, False, False]
    assert met[0].results == met[1].results == met[2].results
    results = met[0].results
    bad = [result for result in results if result.verdict == FAIL]
    assert [(result.name, result.node.split(" (")[0]) for result in bad] == [("open files", "node 2")]
    assert named(results, "nodes").verdict == named(results, "ports").verdict == PASS
    assert named(results, "shared volume").verdict == named(results, "clocks").verdict == PASS
    assert named(results, "all-reduce").verdict == UNSEEN
    assert "torch is not installed" in named(results, "all-reduce").seen


def test_another_run_file_and_another_image_are_named(sound: Path) -> None:
    loaded = [spread(sound, 3), spread(sound, 3, "train.learning_rate=0.5"), spread(sound, 3)]
    results = nodes_of(loaded, [[]] * 3, [{"numpy": "2.4"}, {"numpy": "2.4"}, {"numpy": "2.3"}])[1].results
    assert named(results, "same run file").seen.startswith("node 1 ")
    assert named(results, "same image").seen.startswith("node 2 ")
    assert named(results, "same data").verdict == PASS


def test_a_node_that_never_comes_is_named_by_the_rest(sound: Path) -> None:
    met = nodes_of([spread(sound, 3)] * 3, [[]] * 3, [{}] * 3, patience=2, absent=[1])
    for rank in (0, 2):
        found = named(met[rank].results, "nodes")
        assert (found.verdict, "node 1 did not join" in found.seen) == (FAIL, True)
        assert named(met[rank].results, "all-reduce").verdict == UNSEEN
    alone = nodes_of([spread(sound, 2)] * 2, [[]] * 2, [{}] * 2, patience=1, absent=[0])[1]
    found = named(alone.results, "nodes")
    assert (found.verdict, "does not answer" in found.seen, alone.speaks) == (FAIL, True, True)


def test_a_node_0_that_dies_while_checking_is_told_by_the_others(sound: Path) -> None:
    port = free_port()

    def dies() -> None:
        host = meeting.attend(Place(0, 2, "127.0.0.1", port), 20, lambda _: None)
        for seat in host.seats.values():
            seat.close()

    def node() -> Any:
        environ = {
            "PET_NNODES": "2",
            "PET_NODE_RANK": "1",
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(port),
        }
        return nodes.check(spread(sound, 2), make(spread(sound, 2)), [], {}, environ, Path("/"), 20, lambda _: None)

    found = named(at_once([dies, node])[1].results, "nodes")
    assert found.verdict == FAIL
    assert "node 1" in found.seen
    assert "lost the others while checking" in found.seen


def test_a_node_that_leaves_while_checking_is_all_that_fails(sound: Path) -> None:
    """Its door is shut to all that knock: no fault of the network's, and the next try may go well."""
    port = free_port()

    def leaves() -> None:
        table = meeting.attend(Place(2, 3, "127.0.0.1", port), 20, lambda _: None)
        door = doors.Door()
        door.close()  # it says where it can be reached, and dies
        told = {"name": "node 2", "address": "127.0.0.1", "port": door.port, "results": []}
        table.gather({**told, "facts": shared.facts(loaded, plan, {}, {})})
        for seat in table.seats.values():
            seat.close()

    def node(rank: int) -> Any:
        place = {"PET_NNODES": "3", "PET_NODE_RANK": str(rank), "PET_MASTER_ADDR": "127.0.0.1"}
        environ = {**place, "PET_MASTER_PORT": str(port)}
        return nodes.check(loaded, plan, [], {}, environ, Path("/"), 20, lambda _: None)

    loaded = spread(sound, 3)
    plan = make(loaded)
    met = at_once([lambda: node(0), lambda: node(1), leaves])[:2]
    for one in met:
        assert [result.name for result in one.results if result.verdict == FAIL] == ["nodes"]
        assert named(one.results, "nodes").seen == "node 2 left while checking"
        assert Report(IN_POD, one.results).exit_code == 1


def test_a_node_that_leaves_while_speed_is_measured_is_told(sound: Path, plan: Plan) -> None:
    def work(table: Meeting) -> Any:
        if table.place.rank:
            return table.gather("")  # it is able, and gone when measuring begins
        return nodes.speed(table, plan, True, [], ["node 0", "node 1"], {})

    found = named(meet(2, work)[0], "nodes")
    assert (found.verdict, found.seen) == (FAIL, "node 1 left while speed was measured")


def test_a_collective_that_would_hang_is_not_begun(sound: Path) -> None:
    wrong = fabric.interface({"GLOO_SOCKET_IFNAME": "net9"}, Path("/"))
    results = nodes_of([spread(sound, 2)] * 2, [[], wrong], [{"torch": "2.13.0"}] * 2)[0].results
    assert named(results, "interface GLOO_SOCKET_IFNAME").verdict == FAIL
    found = named(results, "all-reduce")
    assert (found.verdict, "would hang: interface GLOO_SOCKET_IFNAME failed" in found.seen) == (UNSEEN, True)


def test_more_or_fewer_nodes_than_the_run_file_says(sound: Path) -> None:
    met = nodes_of([spread(sound, 3)] * 2, [[]] * 2, [{}] * 2)
    assert named(met[0].results, "number of nodes").verdict == FAIL


def started(sound: Path, port: int, rank: int, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PET_NNODES": "2", "PET_NODE_RANK": str(rank)}
    environ |= {"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": str(port), **variables}
    settings = ("cluster.nodes=2", "cluster.gpus_per_node=1", "cluster.network=loopback")
    overrides = [word for setting in settings for word in ("--override", setting)]
    return subprocess.Popen(
        [sys.executable, "-m", "windlass", "check", str(sound), "--in-pod", "--wait", "60", *overrides, *arguments],
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_two_processes_measure_each_other_and_agree(sound: Path) -> None:
    """As the launch script starts them, one with a HOME that cannot be written."""
    port = free_port()
    crew = [started(sound, port, 0), started(sound, port, 1, HOME="/proc/nobody")]
    said = [process.communicate(timeout=120) for process in crew]
    assert [process.returncode for process in crew] == [13, 13], said
    assert said[1][0] == ""  # one node speaks
    table = " ".join(said[0][0].split())
    assert "gloo: " in table
    assert "of loopback's 1" in table
    assert "folder HOME on node 1" in table.partition("failing: ")[2]
    assert "on node 0" not in table.partition("failing: ")[2]


# --- on hosts of their own: network namespaces

NODE = """
import json, os, sys
from pathlib import Path
from windlass.launch.check import nodes, versions
from windlass.plan import make
from windlass.runfile import read
loaded = read(Path(sys.argv[1]), sys.argv[2:])
met = nodes.check(loaded, make(loaded), [], versions.installed(), os.environ, Path("/"), 60, lambda _: None)
print(json.dumps([[result.name, result.verdict, result.seen] for result in met.results]))
sys.stdout.flush()
os._exit(0)
"""


def ip(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=20)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    """Three hosts on one switch, 10.78.0.10 to .12, as network namespaces; skipped where they can't be made."""
    prefix = f"wlc{os.getpid() % 10000}"
    switch, names = f"{prefix}s", [f"{prefix}n{i}" for i in range(3)]
    try:
        try:
            ip("ip", "netns", "add", switch)
            ip("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
            ip("ip", "-n", switch, "link", "set", "br0", "up")
            for i, name in enumerate(names):
                ip("ip", "netns", "add", name)
                peer = ("type", "veth", "peer", "name", f"p{i}", "netns", switch)
                ip("ip", "link", "add", "eth0", "netns", name, *peer)
                ip("ip", "-n", switch, "link", "set", f"p{i}", "master", "br0", "up")
                ip("ip", "-n", name, "addr", "add", f"10.78.0.1{i}/24", "dev", "eth0")
                for device in ("eth0", "lo"):
                    ip("ip", "-n", name, "link", "set", device, "up")
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield names
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def checked(hosts: Sequence[str], sound: Path, output: Path) -> list[list[list[str]]]:
    """What each host found."""
    overrides = ["cluster.nodes=3", "cluster.gpus_per_node=1", "cluster.network=ethernet-10"]
    command = [sys.executable, "-c", NODE, str(sound), *overrides, f"train.output_dir={output}"]
    port = free_port()
    crew = []
    for rank, host in enumerate(hosts):
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "PET_NNODES": "3"}
        environ |= {"PET_NODE_RANK": str(rank), "PET_MASTER_ADDR": "10.78.0.10", "PET_MASTER_PORT": str(port)}
        words = ["ip", "netns", "exec", host, *command]
        crew.append(subprocess.Popen(words, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    said = [process.communicate(timeout=150) for process in crew]
    assert [process.returncode for process in crew] == [0, 0, 0], said
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


@pytest.mark.prove
def test_a_slow_host_and_a_cut_between_two_are_named(hosts: list[str], sound: Path, tmp_path: Path) -> None:
    ip("tc", "-n", hosts[2], "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "200mbit", "burst", "256kb",
       "latency", "400ms")  # fmt: skip
    found = checked(hosts, sound, tmp_path)
    assert found[0] == found[1] == found[2]
    verdicts = {name: (verdict, seen) for name, verdict, seen in found[0]}
    assert verdicts["ports"][0] == verdicts["shared volume"][0] == PASS
    assert verdicts["all-reduce of pairs"][0] == FAIL
    assert "slowest is" in verdicts["all-reduce of pairs"][1]
    assert "node 2" in verdicts["all-reduce of pairs"][1]
    assert verdicts["all-reduce of all"][0] == FAIL

    ip("ip", "-n", hosts[1], "route", "add", "blackhole", "10.78.0.12/32")
    found = checked(hosts, sound, tmp_path)
    verdicts = {name: (verdict, seen) for name, verdict, seen in found[0]}
    assert verdicts["ports"][0] == FAIL
    assert "node 1" in verdicts["ports"][1]
    assert "node 2" in verdicts["ports"][1]
    assert "node 0" not in verdicts["ports"][1]
    assert verdicts["all-reduce"][0] == UNSEEN  # it would have hung


def test_every_check_of_these_has_failed_above(request: pytest.FixtureRequest, said: set[Any]) -> None:
    require_all(request, [doors, nodes, pairs, shared], said)
