"""Checks between nodes: they connect over real sockets, a fault is planted in one, and every node reports it."""

import functools
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from launch_hosts import Hosts, hosts, why_not
from ports import free_port
from test_launch_rendezvous import meet
from text_run import make_text_run

from windlass.hardware import interpolate
from windlass.launch.check import IN_POD, CheckReport, bandwidth, machine, nodes
from windlass.launch.check.results import FAIL, PASS, SKIPPED, WARN, Context, Result, failed, passed
from windlass.plan import Plan, make_plan
from windlass.ranks.place import Node
from windlass.ranks.rendezvous import Rendezvous, read_first_error
from windlass.runfile import Loaded, read_run_file

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "examples" / "mistral-small-4" / "train.yaml"
NAMES = ("node 0", "node 1", "node 2", "node 3")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_run(tmp_path_factory.mktemp("check") / "demo")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(read_run_file(RECIPE))


@pytest.fixture(scope="module")
def wired() -> Plan:
    return make_plan(read_run_file(RECIPE, ["cluster.network=ethernet-10"]))


def named(results: Sequence[Result], name: str) -> Result:
    found = [result for result in results if result.name == name]
    assert len(found) == 1, [result.name for result in results]
    return found[0]


# --- who reaches whom, and the clocks


def test_a_slow_gpu_is_named_with_its_node(plan: Plan) -> None:
    rates = plan.machine.rates
    usual = interpolate(rates.products["bfloat16"], bandwidth.SIDE, bandwidth.SIDE)
    sound = {"products": usual, "memory": rates.memory_gb_per_second, "host link": rates.host_link_gb_per_second}
    fast = {what: 1.05 * rate for what, rate in sound.items()}

    def found(*by_node: dict[str, dict[str, float]]) -> Result:
        return bandwidth.check_gpu_speed(plan, by_node, NAMES[: len(by_node)])

    two = {"GPU 0": sound, "GPU 1": fast}
    assert found(two, two).verdict == PASS
    for what, unit in bandwidth.UNITS.items():
        slow = found(two, {"GPU 0": fast, "GPU 1": {**sound, what: 0.6 * sound[what]}})
        assert (slow.verdict, f"node 1 GPU 1: {what}" in slow.seen, unit in slow.seen) == (WARN, True, True)
        assert "node 0" not in slow.seen
    alone = found({"GPU 0": {what: 0.6 * rate for what, rate in sound.items()}})
    assert alone.seen.count("60% of h200 by data sheet") == len(bandwidth.UNITS)
    # Faster than its data sheet, but not as fast as the others.
    rich = {what: 1.4 * rate for what, rate in sound.items()}
    assert "node 2 GPU 0: memory" in found({"GPU 0": rich}, {"GPU 0": rich}, {"GPU 0": sound}).seen
    assert found({}, {}).verdict == SKIPPED
    assert all({*each} == {*bandwidth.UNITS} for each in bandwidth.measure_gpus().values())


@pytest.mark.fault("a GPU that is full or broken", "`windlass check`", "GPU 3: CUDA error: an illegal memory access")
def test_a_full_or_broken_gpu_fails_the_check_and_keeps_the_report(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 64 MiB")

    def measures(made: Rendezvous) -> Any:
        if made.node.number:
            made.gather("")
            return made.gather({"GPU 3": "CUDA error: an illegal memory access"})
        return nodes.measure_speed(made, c, [], NAMES[:2])

    c = Context(plan.loaded, plan, {"torch": "2"}, {}, Path("/"), alone=False)
    monkeypatch.setattr(torch, "randn", full)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    (here,) = bandwidth.check_here(c)
    assert (here.verdict, here.seen) == (FAIL, "GPU 0: CUDA out of memory.; GPU 1: CUDA out of memory.")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    broken, skipped = meet(2, measures)[0]
    assert (broken.title, broken.seen) == ("GPU speed", "node 1 GPU 3: CUDA error: an illegal memory access")
    assert (broken.verdict, skipped.verdict) == (FAIL, SKIPPED)


@pytest.mark.fault("a port that is closed", "`windlass check`", "node 0 can't reach node 1 (no answer)")
def test_a_closed_port_names_the_node_behind_it() -> None:
    with nodes.serve_time() as port:
        why, offset = nodes.read_time("127.0.0.1", port)
        assert (why, offset is not None and abs(offset) < 0.5) == ("", True)
        assert nodes.read_time("::1", port)[0] == "" or not socket.has_dualstack_ipv6()
    assert nodes.read_time("127.0.0.1", port) == ("Connection refused", None)
    fine, silent = ["", 0.0], ["no answer", None]
    dead: list[Any] = [{"1": fine, "2": silent}, {"0": fine, "2": silent}, {"0": fine, "1": fine}]
    pair: list[Any] = [{"1": silent, "2": fine}, {"0": fine, "2": fine}, {"0": fine, "1": fine}]
    for reports, verdict, seen in (
        (dead, FAIL, "no other node reaches node 2 (no answer)"),
        (pair, FAIL, "node 0 can't reach node 1 (no answer)"),
        ([{"1": fine}, {"0": fine}], PASS, "every one of 2 nodes reaches every other"),
        ([{}, None], SKIPPED, "no node reports whom it reaches"),
    ):
        found = nodes.check_ports(reports, NAMES[: len(reports)])
        assert (found.verdict, found.seen) == (verdict, seen)


def add_to_clock(seconds: float) -> float:
    return time.time() + seconds


@pytest.mark.fault("a clock that is off", "`windlass check`", "ahead of node 0")
def test_a_clock_that_is_off_is_measured_over_the_network() -> None:
    """Node 0's clock, as node 1 reads it."""
    for ahead, verdict, seen in (
        (0.0, PASS, "within"),
        (5.0, WARN, "ahead of node 0"),
        (-300.0, FAIL, "behind node 0"),
    ):
        with nodes.serve_time(functools.partial(add_to_clock, -ahead)) as port:
            answer = nodes.read_time("127.0.0.1", port)
        assert answer[1] == pytest.approx(-ahead, abs=0.5)
        found = nodes.check_clocks([{}, {"0": answer}], NAMES[:2])
        assert (found.verdict, seen in found.seen) == (verdict, True)
    assert nodes.check_clocks([{}, {"0": ["no answer", None]}], NAMES[:2]).verdict == SKIPPED


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


@pytest.mark.fault("another torch on a node", "`windlass check`", "node 1 has torch=2.12.0")
def test_the_node_that_differs_is_named() -> None:
    for fault, name, verdict, seen in (
        ({}, "run file", PASS, "a"),
        ({"run file": "b"}, "run file", FAIL, "node 1 has b"),
        ({"data": None}, "data", FAIL, "node 1 can't read it"),
        ({"image": {"torch": "2.12.0", "numpy": "2.4"}}, "image", FAIL, "node 1 has torch=2.12.0"),
        ({"image": {"torch": "2.13.0"}}, "image", FAIL, "node 1 has numpy=none"),
        ({"variables": {"NCCL_DEBUG": "INFO"}}, "variables", WARN, "node 1 has NCCL_DEBUG=INFO"),
    ):
        results = nodes.compare_facts(dict(zip(NAMES, [FACTS, {**FACTS, **fault}, FACTS], strict=False)))
        found = named(results, f"same {name}")
        assert (found.verdict, seen in found.seen) == (verdict, True), found
        assert {result.verdict for result in results if result is not found} == {PASS}
    blind = {**FACTS, "data": None}
    assert named(nodes.compare_facts(dict.fromkeys(NAMES, blind)), "same data").verdict == SKIPPED


def test_file_digests_cover_both_ends_and_size(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"a" * 200_000)
    before = nodes.file_digest([file])
    assert before == nodes.file_digest([tmp_path])  # a folder stands for its files
    for content in (b"b" + b"a" * 199_999, b"a" * 199_999 + b"b", b"a" * 200_001):
        file.write_bytes(content)
        assert nodes.file_digest([file]) != before
    assert nodes.file_digest([tmp_path / "none"]) is None


def test_shared_volume_is_visible_to_all_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "SEEN_SECONDS", 0.5)
    assert meet(3, lambda made: nodes.check_shared_volume(made, tmp_path / "run")) == ["", "", ""]
    assert not list(tmp_path.iterdir())
    assert all(
        "can't write in /proc" in row for row in meet(2, lambda made: nodes.check_shared_volume(made, Path("/proc/w")))
    )

    def other_volume(made: Rendezvous) -> str:
        """Node 1 has another volume at the same path, without node 0's file."""
        gather = made.gather

        def elsewhere(value: Any) -> list[Any]:
            answers = gather(value)
            if isinstance(answers[0], list) and made.node.number:
                answers[0][1] = str(tmp_path / "elsewhere" / "file")
            return answers

        monkeypatch.setattr(made, "gather", elsewhere)
        return nodes.check_shared_volume(made, tmp_path)

    ours, other = meet(2, other_volume)
    assert (ours, "does not show here" in other) == ("", True)
    assert not list(tmp_path.iterdir())


# --- bandwidth


def test_rounds_contain_every_pair_once() -> None:
    for world in (2, 5, 8):
        rounds = bandwidth.make_rounds(world)
        every = sorted(pair for pairs in rounds for pair in pairs)
        assert every == [(a, b) for a in range(world) for b in range(a + 1, world)]
        for pairs in rounds:
            ranks = [rank for pair in pairs for rank in pair]
            assert len(ranks) == len(set(ranks))


def measured(backend: str = "nccl", **speeds: float | None) -> bandwidth.BandwidthResult:
    every = {(a, b): 45.0 for a in range(4) for b in range(a + 1, 4)}
    given = {(int(key[1]), int(key[2])): value for key, value in speeds.items() if key != "overall"}
    return bandwidth.BandwidthResult(backend, {**every, **given}, speeds.get("overall", 45.0))


def test_speeds_are_compared_with_the_fabric_and_each_other(plan: Plan, wired: Plan) -> None:
    """Mere slowness stops no run: the network may be busy."""
    slow = bandwidth.check_speed(wired, measured("gloo", p13=0.001, overall=0.001), NAMES)
    assert CheckReport(IN_POD, tuple(slow)).exit_code == 0
    assert CheckReport(IN_POD, tuple(bandwidth.check_speed(wired, measured("gloo", p13=None), NAMES))).exit_code == 13
    assert {result.verdict for result in bandwidth.check_speed(plan, measured(), NAMES)} == {PASS}
    pairs, overall = "all-reduce of pairs", "all-reduce of all"
    for made, figures, name, verdict, seen in (
        (plan, measured(p13=10.0, p23=11.0), pairs, WARN, "node 3 is in 2 of the slow ones"),
        (plan, measured(p03=23.0, p13=23.0, p23=23.0), pairs, WARN, "node 3 is in 3 of the slow ones"),
        (plan, measured(overall=23.0), overall, WARN, "51% of"),
        (plan, measured(p02=None), pairs, FAIL, "node 0 and node 2"),
        (plan, measured(overall=None), overall, FAIL, "no result"),
        (plan, measured("gloo", overall=0.05), overall, PASS, "not comparable"),
        (wired, measured("gloo", overall=0.05), overall, WARN, "5% of"),
        (plan, bandwidth.BandwidthResult("gloo", error="node 1: no interface"), "all-reduce", FAIL, "no interface"),
    ):
        found = named(bandwidth.check_speed(made, figures, NAMES), name)
        assert (found.verdict, seen in found.seen) == (verdict, True), found


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


def test_sockets_instead_of_infiniband_fail_the_check(plan: Plan, wired: Plan) -> None:
    assert bandwidth.check_transport(plan, INFINIBAND).seen == "2 x NET/IB/GDRDMA, 1 x P2P"
    for made, log, verdict in (
        (plan, INFINIBAND, PASS),
        (plan, SOCKETS, FAIL),
        (wired, SOCKETS, PASS),
        (plan, INFINIBAND.replace("/GDRDMA", ""), WARN),
        (plan, "NCCL INFO cudaDriverVersion 13000\n", SKIPPED),
        (plan, "NCCL INFO Using network Socket\n", FAIL),  # ended before it opened a channel
    ):
        assert bandwidth.check_transport(made, log).verdict == verdict


# --- all of it together


def check_all(
    loaded: Sequence[Loaded],
    mine: Sequence[Sequence[Result]] | None = None,
    have: Sequence[Mapping[str, str]] | None = None,
    *,
    seconds: float = 20,
    instead: Mapping[int, Callable[[int], None] | None] | None = None,
    plan: Plan | None = None,
) -> list[tuple[list[Result], bool]]:
    """Return every node's results, without torch and so without bandwidths. `instead`: what a faulty node does,
    given the port; None: it never comes."""
    port, world = free_port(), len(loaded)
    plan = plan or make_plan(loaded[0])
    results: list[Any] = [None] * world

    def node(rank: int) -> None:
        if rank in (instead or {}):
            if fault := (instead or {})[rank]:
                fault(port)
            return
        environ = {"PET_NNODES": str(world), "PET_NODE_RANK": str(rank), "PET_MASTER_ADDR": "127.0.0.1"}
        environ["PET_MASTER_PORT"] = str(port)
        own, has = mine[rank] if mine else [], have[rank] if have else {}
        c = Context(loaded[rank], plan, has, environ, Path("/"), alone=False)
        results[rank] = nodes.check_nodes(c, own, seconds, lambda _: None)

    threads = [threading.Thread(target=node, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a node hangs"
    return results


def spread(sound: Path, world: int, *overrides: str) -> Loaded:
    return read_run_file(
        sound, [f"cluster.nodes={world}", "cluster.gpus_per_node=1", "cluster.network=loopback", *overrides]
    )


def test_every_node_reports_each_nodes_faults(sound: Path) -> None:
    mine = [[passed("open files", "many")]] * 2 + [[failed("open files", "few", "more")]]
    loaded = [spread(sound, 3), spread(sound, 3, "train.learning_rate=0.5"), spread(sound, 3)]
    found = check_all(loaded, mine, [{"numpy": "2.4"}, {"numpy": "2.4"}, {"numpy": "2.3"}])
    assert [is_leader for _, is_leader in found] == [True, False, False]
    results = found[0][0]
    assert results == found[1][0] == found[2][0]
    bad = {result.name: (result.node, result.seen) for result in results if result.verdict == FAIL}
    assert bad.keys() == {"open files", "same run file", "same image"}
    assert bad["open files"][0].startswith("node 2 ")
    assert bad["same run file"][1].startswith("node 1 ")
    assert bad["same image"][1].startswith("node 2 ")
    for name in ("nodes", "ports", "shared volume", "clocks", "same data"):
        assert named(results, name).verdict == PASS
    speed = named(results, "all-reduce")
    assert (speed.verdict, "torch is not installed" in speed.seen) == (SKIPPED, True)


@pytest.mark.takes("waits until a node is missed")
def test_missing_node_is_named_by_the_others(sound: Path) -> None:
    found = check_all([spread(sound, 3)] * 3, seconds=2, instead={1: None})
    for rank in (0, 2):
        missing = named(found[rank][0], "nodes")
        assert (missing.verdict, "node 1 did not join" in missing.seen) == (FAIL, True)
        assert named(found[rank][0], "all-reduce").verdict == SKIPPED
    results, is_leader = check_all([spread(sound, 2)] * 2, seconds=1, instead={0: None})[1]
    missing = named(results, "nodes")
    assert (missing.verdict, "was not reached" in missing.seen, is_leader) == (FAIL, True, True)


def joined(rank: int, world: int, port: int) -> Rendezvous:
    made = Rendezvous(Node(rank, world, "127.0.0.1", port))
    made.join(20, partial=True)
    return made


def test_nodes_that_leave_fail_only_their_own_checks(sound: Path) -> None:
    found = check_all([spread(sound, 2)] * 2, instead={0: lambda port: joined(0, 2, port).disconnect()})[1][0]
    assert "node 1" in named(found, "nodes").seen
    assert "lost the others while checking" in named(found, "nodes").seen

    def leaves(port: int) -> None:
        """The node closes its port to all that connect: no network fault, and a retry may pass."""
        made = joined(2, 3, port)
        with nodes.serve_time() as closed:
            word = {"name": "node 2", "address": "127.0.0.1", "port": closed, "results": []}
        made.gather({**word, "facts": nodes.collect_facts(c)})
        made.disconnect()

    loaded = spread(sound, 3)
    plan = make_plan(loaded)
    c = Context(loaded, plan, {}, {}, Path("/"), alone=False)
    for results, _ in check_all([loaded] * 3, instead={2: leaves}, plan=plan)[:2]:
        assert [result.name for result in results if result.verdict == FAIL] == ["nodes"]
        assert named(results, "nodes").seen == "node 2 left while checking"
        assert CheckReport(IN_POD, tuple(results)).exit_code == 1

    def measures(made: Rendezvous) -> Any:
        if made.node.number:
            return made.gather("")  # it is able, and gone when measuring begins
        return nodes.measure_speed(made, replace(c, have={"torch": "2"}), [], ["node 0", "node 1"])

    found = meet(2, measures)[0]
    assert (named(found, "nodes").verdict, named(found, "nodes").seen) == (FAIL, "node 1 left while speed was measured")


def test_hanging_tests_are_skipped(sound: Path, plan: Plan) -> None:
    c = Context(read_run_file(sound), plan, {}, {"GLOO_SOCKET_IFNAME": "net9"}, Path("/"), alone=False)
    wrong = machine.check_interfaces(c)
    results = check_all([spread(sound, 2)] * 2, [[], wrong], [{"torch": "2.13.0"}] * 2)[0][0]
    assert named(results, "interface GLOO_SOCKET_IFNAME").verdict == FAIL
    speed = named(results, "all-reduce")
    assert (speed.verdict, "would hang: interface GLOO_SOCKET_IFNAME failed" in speed.seen) == (SKIPPED, True)
    assert named(check_all([spread(sound, 3)] * 2)[0][0], "number of nodes").verdict == FAIL
    results, is_leader = nodes.check_nodes(replace(c, environ={"WORLD_SIZE": "2", "RANK": "2"}), [], 1, lambda _: None)
    assert (named(results, "number of nodes").verdict, is_leader) == (FAIL, True)


def test_two_processes_measure_each_other_and_agree(sound: Path, tmp_path: Path) -> None:
    """Started as by the launch script, one with a HOME that can't be written."""
    port, crew = free_port(), []
    settings = ("cluster.nodes=2", "cluster.gpus_per_node=1", "cluster.network=loopback")
    words = [word for setting in settings for word in ("--override", setting)]
    for rank, more in enumerate(({}, {"HOME": "/proc/nobody"})):
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PET_NNODES": "2", "PET_NODE_RANK": str(rank), **more}
        environ |= {"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": str(port)}
        environ["WINDLASS_STATUS_DIR"] = str(tmp_path)  # both in one: the last one's reason stays
        command = [warm.python(), "-m", "windlass", "check", str(sound), "--in-pod", "--wait", "60", *words]
        crew.append(subprocess.Popen(command, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    printed = [process.communicate(timeout=120) for process in crew]
    assert [process.returncode for process in crew] == [13, 13], printed
    assert printed[1][0] == ""  # one node prints
    table = " ".join(printed[0][0].split())
    assert "gloo: " in table
    assert "of loopback's 1" in table
    assert "folder HOME on node 1" in table.partition("failing: ")[2]
    assert "on node 0" not in table.partition("failing: ")[2]
    assert "check failed: folder HOME on node 1" in printed[1][1], "and in its own log too"
    assert "windlass check: folder HOME on node 1" in read_first_error(tmp_path), "what launch.sh tells the others"


# --- on hosts of their own: network namespaces

NODE = """
import json, os, sys
from pathlib import Path
from windlass.launch.check import inputs, nodes
from windlass.launch.check.results import Context
from windlass.plan import make_plan
from windlass.runfile import read_run_file
loaded = read_run_file(Path(sys.argv[1]), sys.argv[2:])
c = Context(loaded, make_plan(loaded), inputs.list_distributions(), os.environ, Path("/"), alone=False)
results, _ = nodes.check_nodes(c, [], 60, lambda _: None)
print(json.dumps([[result.name, result.verdict, result.seen] for result in results]))
sys.stdout.flush()
os._exit(0)
"""


def check_on(machines: Hosts, sound: Path, folder: Path) -> dict[str, tuple[str, str]]:
    """Return each check's verdict and finding, the same on every host."""
    overrides = ["cluster.nodes=3", "cluster.gpus_per_node=1", "cluster.network=ethernet-10"]
    command = [warm.python(), "-c", NODE, str(sound), *overrides, f"train.output_dir={folder / 'run'}"]
    port, logs = free_port(), [folder / f"log-{rank}" for rank in range(3)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "PET_NNODES": "3"}
    environ |= {"PET_MASTER_ADDR": machines.address(0), "PET_MASTER_PORT": str(port)}
    crew = [machines.start(rank, command, {**environ, "PET_NODE_RANK": str(rank)}, logs[rank]) for rank in range(3)]
    assert [process.wait(150) for process in crew] == [0, 0, 0], [log.read_text() for log in logs]
    found = [json.loads(log.read_text().splitlines()[-1]) for log in logs]
    assert found[0] == found[1] == found[2]
    return {name: (verdict, seen) for name, verdict, seen in found[0]}


@pytest.mark.prove
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
def test_a_slow_host_and_a_cut_between_two_are_named(sound: Path, tmp_path: Path) -> None:
    with hosts(3) as machines:
        machines.slow_down(2)
        verdicts = check_on(machines, sound, tmp_path)
        assert verdicts["ports"][0] == verdicts["shared volume"][0] == PASS
        assert verdicts["all-reduce of pairs"][0] == verdicts["all-reduce of all"][0] == WARN
        assert "slowest is" in verdicts["all-reduce of pairs"][1]
        assert "node 2" in verdicts["all-reduce of pairs"][1]
        machines.cut(1, 2)
        verdicts = check_on(machines, sound, tmp_path)
        assert verdicts["ports"][0] == FAIL
        assert "node 1" in verdicts["ports"][1]
        assert "node 2" in verdicts["ports"][1]
        assert "node 0" not in verdicts["ports"][1]
        assert verdicts["all-reduce"][0] == SKIPPED  # it would have hung
