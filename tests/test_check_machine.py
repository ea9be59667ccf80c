"""This machine's checks: a planted /sys, /proc and /dev, planted GPUs, and a fault for each check."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checks_seen import require_all, watched

from windlass.hardware import GIB, LocalMachine
from windlass.launch.check import fabric, gpus, machine
from windlass.launch.check.nvml import Card, Seen
from windlass.launch.check.result import FAIL, PASS, UNSEEN, WARN, Result
from windlass.plan import Plan, make
from windlass.runfile import read

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "examples" / "mistral-small-4" / "train.yaml"
H200 = Card(0, "NVIDIA H200", 143771 / 1024, 143000 / 1024, links=18, links_up=18, pcie_width_most=16)


@pytest.fixture(scope="module", autouse=True)
def said() -> Iterator[set[Any]]:
    """What the tests of this file made checks say; the last one looks at it."""
    with watched() as found:
        yield found


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Three nodes with an H200 each and InfiniBand."""
    return make(read(RECIPE))


@pytest.fixture(scope="module")
def server() -> Plan:
    """One node with eight."""
    return make(read(RECIPE, ["cluster.nodes=1", "cluster.gpus_per_node=8"]))


@pytest.fixture(scope="module")
def processors() -> Plan:
    return make(read(RECIPE, ["cluster.nodes=1", "cluster.gpu=cpu"]))


def named(results: Sequence[Result], name: str) -> Result:
    found = [result for result in results if result.name == name]
    assert len(found) == 1, [result.name for result in results]
    return found[0]


def planted(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


# --- host


def test_host_memory_for_the_load(plan: Plan) -> None:
    need = plan.cost.host_gib
    assert machine.host_memory(plan, LocalMachine((), 8, need + 1, None)).verdict == PASS
    found = machine.host_memory(plan, LocalMachine((), 8, need - 1, need - 1))
    assert (found.verdict, "control group" in found.seen) == (FAIL, True)
    assert machine.host_memory(plan, LocalMachine((), 8, 0.0, None)).verdict == UNSEEN


def test_processors_for_ranks_and_loaders(server: Plan) -> None:
    assert machine.processors(server, LocalMachine((), 8, 1, None)).verdict == PASS
    assert machine.processors(server, LocalMachine((), 4, 1, None)).verdict == WARN
    loading = make(read(RECIPE, ["cluster.nodes=1", "cluster.gpus_per_node=8", "train.dataloader_num_workers=2"]))
    assert machine.processors(loading, LocalMachine((), 8, 1, None)).verdict == WARN
    assert machine.processors(loading, LocalMachine((), 24, 1, None)).verdict == PASS


def test_shared_memory(plan: Plan, server: Plan, tmp_path: Path) -> None:
    assert machine.enough_shared(server, 64 << 20, 64 << 20).verdict == FAIL  # a container runtime's default
    assert machine.enough_shared(server, 8 * GIB, 8 * GIB).verdict == PASS
    assert machine.enough_shared(plan, 64 << 20, 64 << 20).verdict == PASS  # one rank that loads by itself
    assert machine.shared_memory(plan, tmp_path).verdict == PASS
    assert machine.shared_memory(plan, tmp_path / "none").verdict == UNSEEN


LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max processes             {processes:<20} unlimited            processes
Max open files            {files:<20} 1048576              files
Max locked memory         {locked:<20} unlimited            bytes
"""


def limited(root: Path, processes: str = "unlimited", files: str = "1048576", locked: str = "unlimited") -> Path:
    return planted(root, {"proc/self/limits": LIMITS.format(processes=processes, files=files, locked=locked)})


def test_locked_memory_for_infiniband(plan: Plan, server: Plan, tmp_path: Path) -> None:
    assert machine.locked_memory(server, tmp_path).verdict == UNSEEN  # no RDMA asked for
    assert machine.locked_memory(plan, tmp_path).verdict == UNSEEN  # nothing says
    assert machine.locked_memory(plan, limited(tmp_path)).verdict == PASS
    assert machine.locked_memory(plan, limited(tmp_path, locked="65536")).verdict == FAIL
    planted(tmp_path, {"proc/self/status": "Name:\tx\nCapEff:\t0000000000004000\n"})
    assert machine.locked_memory(plan, tmp_path).verdict == PASS
    planted(tmp_path, {"proc/self/status": "Name:\tx\nCapEff:\t0000000000000001\n"})
    assert machine.locked_memory(plan, tmp_path).verdict == FAIL


def test_limits_of_files_and_processes(tmp_path: Path) -> None:
    assert machine.open_files(tmp_path).verdict == machine.processes(tmp_path).verdict == UNSEEN
    limited(tmp_path)
    assert machine.open_files(tmp_path).verdict == machine.processes(tmp_path).verdict == PASS
    limited(tmp_path, files="1024", processes="100")
    assert machine.open_files(tmp_path).verdict == WARN
    assert machine.processes(tmp_path).verdict == FAIL
    planted(limited(tmp_path), {"sys/fs/cgroup/pids.max": "max\n"})
    assert machine.processes(tmp_path).verdict == PASS
    planted(tmp_path, {"sys/fs/cgroup/pids.max": "512\n"})
    assert machine.processes(tmp_path).verdict == FAIL


def test_the_kernels_own_files_are_understood() -> None:
    limits = machine.limits(Path("/"))
    assert {"Max locked memory", "Max open files", "Max processes"} <= set(limits)


def test_a_user_without_an_account(tmp_path: Path) -> None:
    planted(tmp_path, {"etc/passwd": "root:x:0:0:root:/root:/bin/sh\nme:x:1000:0::/home/me:/bin/sh\n"})
    assert machine.account(tmp_path, 1000, {}).verdict == PASS
    assert machine.account(tmp_path, 1000680000, {}).verdict == FAIL
    assert machine.account(tmp_path, 1000680000, {"LOGNAME": "windlass"}).verdict == PASS


# --- fabric


def port(
    device: str, state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)", verbs: bool = True
) -> dict[str, str]:
    below = f"sys/class/infiniband/{device}/ports/1"
    files = {f"{below}/state": f"{state}\n", f"{below}/rate": f"{rate}\n", f"{below}/link_layer": "InfiniBand\n"}
    if verbs:
        files |= {f"sys/class/infiniband_verbs/u-{device}/ibdev": f"{device}\n", f"dev/infiniband/u-{device}": ""}
    return files


@pytest.mark.parametrize(
    ("files", "environ", "verdict", "said"),
    [
        (port("mlx5_0"), {}, PASS, "mlx5_0:1 ACTIVE at 400 Gb/s"),
        ({}, {}, FAIL, "no RDMA card"),
        (port("mlx5_0", state="1: DOWN"), {}, FAIL, "0 ports active, 1 planned"),
        (port("mlx5_0", state="2: INIT"), {}, FAIL, "mlx5_0:1 INIT"),
        (port("mlx5_0", rate="100 Gb/sec (4X EDR)"), {}, FAIL, "slower than infiniband-400"),
        (port("mlx5_0", verbs=False), {}, FAIL, "/dev/infiniband"),
        (port("mlx5_0"), {"NCCL_IB_HCA": "mlx4"}, FAIL, "matches none of mlx5_0:1"),
        (port("mlx5_0") | port("mlx5_1", state="1: DOWN"), {"NCCL_IB_HCA": "=mlx5_0"}, PASS, "mlx5_0:1"),
        (port("mlx5_0") | port("mlx5_1", state="1: DOWN"), {"NCCL_IB_HCA": "^mlx5_0"}, FAIL, "mlx5_1:1 DOWN"),
        (port("mlx5_0") | port("mlx5_1"), {"NCCL_IB_HCA": "mlx5_1:1"}, PASS, "mlx5_1:1"),
    ],
)
def test_infiniband_ports(
    plan: Plan, tmp_path: Path, files: dict[str, str], environ: dict[str, str], verdict: str, said: str
) -> None:
    found = fabric.infiniband(plan, planted(tmp_path, files), environ)
    assert (found.verdict, said in found.seen) == (verdict, True), found


def test_every_planned_card_is_wanted_and_none_where_none_is(server: Plan, tmp_path: Path) -> None:
    two = make(read(RECIPE, ["cluster.nics_per_node=2"]))
    assert fabric.infiniband(two, planted(tmp_path, port("mlx5_0")), {}).verdict == FAIL
    assert fabric.infiniband(two, planted(tmp_path, port("mlx5_1")), {}).verdict == PASS
    assert fabric.infiniband(server, tmp_path, {}).verdict == UNSEEN


def test_peer_memory(plan: Plan, server: Plan, tmp_path: Path) -> None:
    assert fabric.peer_memory(server, tmp_path).verdict == UNSEEN
    assert fabric.peer_memory(plan, tmp_path).verdict == WARN
    open_driver = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06\n"
    planted(tmp_path, {"proc/sys/kernel/osrelease": "5.4.0-generic\n", "proc/driver/nvidia/version": open_driver})
    assert fabric.peer_memory(plan, tmp_path).verdict == WARN  # the kernel is too old for DMA-BUF
    planted(tmp_path, {"proc/sys/kernel/osrelease": "6.8.0-generic\n"})
    assert fabric.peer_memory(plan, tmp_path).verdict == PASS
    planted(tmp_path, {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module\n"})
    assert fabric.peer_memory(plan, tmp_path).verdict == WARN
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    assert fabric.peer_memory(plan, tmp_path).verdict == PASS


@pytest.mark.parametrize(
    ("pattern", "exact", "expected"),
    [
        ("eth", False, ["eth0", "eth1"]),
        ("=eth0", False, ["eth0"]),
        ("eth", True, []),
        ("net1,eth1", True, ["eth1", "net1"]),
        ("^lo,eth", False, ["net1"]),
    ],
)
def test_interface_patterns(pattern: str, exact: bool, expected: list[str]) -> None:
    assert fabric.interfaces(pattern, ["eth0", "eth1", "lo", "net1"], exact=exact) == expected


def test_the_chosen_interface_exists_is_up_and_has_an_address(tmp_path: Path) -> None:
    here = fabric.interface({"NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "lo"}, Path("/"))
    assert [result.verdict for result in here] == [PASS, PASS]
    assert "127.0.0.1" in here[0].seen
    assert {result.verdict for result in fabric.interface({}, Path("/"))} == {UNSEEN}
    planted(tmp_path, {"sys/class/net/lo/operstate": "unknown", "sys/class/net/net1/operstate": "down"})
    absent, down = fabric.interface({"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "net1"}, tmp_path)
    assert (absent.verdict, "there are lo, net1" in absent.seen) == (FAIL, True)
    assert (down.verdict, "is down" in down.seen) == (FAIL, True)
    planted(tmp_path, {"sys/class/net/net1/operstate": "up"})
    bare = fabric.interface({"GLOO_SOCKET_IFNAME": "net1"}, tmp_path)[1]
    assert (bare.verdict, "has no address" in bare.seen) == (FAIL, True)
    table = "fe80000000000000000000000000000a 02 40 20 80 net1\n"
    assert fabric.addresses("net1", planted(tmp_path, {"proc/net/if_inet6": table})) == []  # link-local alone
    table += "fd000000000000000000000000000001 02 40 00 80 net1\n"
    assert fabric.addresses("net1", planted(tmp_path, {"proc/net/if_inet6": table})) == ["fd00::1"]


# --- GPUs


def eight(**fault: object) -> Seen:
    cards = [replace(H200, index=index) for index in range(8)]
    cards[3] = replace(cards[3], **fault)  # type: ignore[arg-type]
    return Seen(tuple(cards), driver="580.65.06")


def test_sound_gpus_pass(server: Plan, tmp_path: Path) -> None:
    results = gpus.check(server, eight(), planted(tmp_path, {"dev/kmsg": "6,1,2,-;all is well\n"}))
    assert {result.verdict for result in results} == {PASS}, results
    assert "8 x NVIDIA H200" in named(results, "GPUs").seen


@pytest.mark.parametrize(
    ("fault", "name", "verdict"),
    [
        ({"free_gib": 10.0}, "GPU memory", FAIL),
        ({"others": (4711,)}, "GPU processes", FAIL),
        ({"uncorrected": 2}, "GPU errors", FAIL),
        ({"remap_pending": True}, "GPU errors", FAIL),
        ({"throttle": ("hardware thermal slowdown",)}, "GPU clocks", FAIL),
        ({"persistence": False}, "GPU persistence", WARN),
        ({"links_up": 17}, "NVLink", FAIL),
        ({"links": 0, "links_up": 0}, "NVLink", FAIL),
        ({"pcie_width": 8}, "PCIe width", WARN),
        ({"name": "NVIDIA A100-SXM4-80GB", "memory_gib": 80.0}, "GPU kind", FAIL),
        ({"name": "NVIDIA H100", "memory_gib": 80.0, "free_gib": 130.0}, "GPUs", WARN),
        ({"others": None}, "GPU processes", UNSEEN),
        ({"uncorrected": None, "remap_pending": None}, "GPU errors", UNSEEN),
        ({"throttle": None}, "GPU clocks", UNSEEN),
        ({"persistence": None}, "GPU persistence", UNSEEN),
        ({"pcie_width": None}, "PCIe width", UNSEEN),
    ],
)
def test_a_fault_of_one_gpu_of_eight_is_named(
    server: Plan, tmp_path: Path, fault: dict[str, object], name: str, verdict: str
) -> None:
    found = named(gpus.check(server, eight(**fault), tmp_path), name)
    assert found.verdict == verdict, found
    if verdict != WARN or name != "GPUs":
        assert "GPU 3" in found.seen


def test_gpus_that_are_missing_or_were_not_asked(plan: Plan, server: Plan, processors: Plan, tmp_path: Path) -> None:
    assert named(gpus.check(server, Seen((H200,)), tmp_path), "GPUs").verdict == FAIL
    assert named(gpus.check(plan, Seen(why="NVML does not start: Driver Not Loaded"), tmp_path), "GPUs").verdict == FAIL
    assert named(gpus.check(plan, Seen(why="not installed", looked=False), tmp_path), "GPUs").verdict == UNSEEN
    assert [result.verdict for result in gpus.check(processors, Seen((H200,)), tmp_path)] == [UNSEEN]
    assert named(gpus.check(plan, Seen((H200,)), tmp_path), "NVLink").verdict == UNSEEN  # alone in its node


def test_a_power_cap_is_no_fault(server: Plan, tmp_path: Path) -> None:
    found = named(gpus.check(server, eight(throttle=("software power cap",)), tmp_path), "GPU clocks")
    assert found.verdict == PASS


@pytest.mark.parametrize(
    ("log", "verdict"),
    [
        ("4,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n", FAIL),
        ("4,1,2,-;NVRM: Xid (PCI:0000:3b:00): 13, pid=1, Graphics Exception\n", PASS),
        ("quiet\n", PASS),
        (None, UNSEEN),
    ],
)
def test_gpu_faults_in_the_kernels_log(tmp_path: Path, log: str | None, verdict: str) -> None:
    if log is not None:
        planted(tmp_path, {"dev/kmsg": log})
    found = gpus.xid(tmp_path)
    assert found.verdict == verdict
    assert ("3b:00" in found.seen) == (verdict == FAIL)


# --- NVML itself, through nvidia-ml-py and a driver's library built for the occasion

LIBRARY = r"""
#include <string.h>
#define OK 0
#define NOT_SUPPORTED 3
typedef void *device;
typedef struct { unsigned long long total, free, used; } memory;
typedef struct { unsigned pid; unsigned long long used; unsigned instance, compute; } process;
int nvmlInitWithFlags(unsigned f) { return INIT; }
int nvmlInit_v2(void) { return INIT; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int e) { return "Driver Not Loaded"; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, device *d) { *d = (device)(long)(i + 1); return OK; }
int nvmlSystemGetDriverVersion(char *s, unsigned n) { strncpy(s, "580.65.06", n); return OK; }
int nvmlDeviceGetName(device d, char *s, unsigned n) { strncpy(s, "NVIDIA H200", n); return OK; }
int nvmlDeviceGetMemoryInfo(device d, memory *m) {
  m->total = 143771ULL << 20; m->free = 143000ULL << 20; m->used = 771ULL << 20; return OK; }
int nvmlDeviceGetComputeRunningProcesses_v3(device d, unsigned *n, process *p) {
  unsigned room = *n; *n = d == (device)2 ? 1 : 0;
  if (*n > room) return 7;
  if (*n) { memset(p, 0, sizeof *p); p->pid = 4711; }
  return OK; }
int nvmlDeviceGetCurrentClocksThrottleReasons(device d, unsigned long long *r) { *r = 0x40; return OK; }
int nvmlDeviceGetPersistenceMode(device d, unsigned *m) { *m = 0; return OK; }
int nvmlDeviceGetTotalEccErrors(device d, int t, int c, unsigned long long *n) { *n = 5; return OK; }
int nvmlDeviceGetNvLinkState(device d, unsigned link, unsigned *up) {
  if (link >= 4) return NOT_SUPPORTED;
  *up = link != 2; return OK; }
int nvmlDeviceGetRemappedRows(device d, unsigned *c, unsigned *u, unsigned *pending, unsigned *failed) {
  if (d == (device)1) return NOT_SUPPORTED;
  *c = 1; *u = 0; *pending = 1; *failed = 0; return OK; }
int nvmlDeviceGetCurrPcieLinkWidth(device d, unsigned *w) { *w = 8; return OK; }
int nvmlDeviceGetMaxPcieLinkWidth(device d, unsigned *w) { *w = 16; return OK; }
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler to build a driver's library with")
@pytest.mark.parametrize("init", [0, 9])
def test_what_nvml_says_is_understood(tmp_path: Path, init: int) -> None:
    """The binding loads the library by its name, so a stand-in for the driver's is found on the library path."""
    (tmp_path / "nvml.c").write_text(LIBRARY)
    built = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", f"-DINIT={init}", "-o", built, tmp_path / "nvml.c"], check=True)
    assert ctypes.CDLL(str(built))
    script = "from windlass.launch.check import nvml; print(nvml.look())"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
    )
    seen: Seen = eval(done.stdout, {"Seen": Seen, "Card": Card})
    if init:
        assert (seen.cards, seen.looked) == ((), True)
        assert "NVML does not start" in seen.why
        return
    assert (len(seen.cards), seen.driver) == (2, "580.65.06")
    first, second = seen.cards
    assert (first.name, round(first.memory_gib, 1)) == ("NVIDIA H200", 140.4)
    assert (first.others, second.others) == ((), (4711,))
    assert (first.uncorrected, first.remap_pending) == (5, None)  # a GPU that knows nothing of remapped rows
    assert second.remap_pending is True
    assert first.throttle == ("hardware thermal slowdown",)
    assert (first.persistence, first.links, first.links_up) == (False, 4, 3)
    assert (first.pcie_width, first.pcie_width_most) == (8, 16)


def test_every_hint_says_what_to_do(server: Plan, tmp_path: Path) -> None:
    bad: Callable[[], list[Result]] = lambda: gpus.check(server, eight(free_gib=1.0, uncorrected=1), tmp_path)  # noqa: E731
    assert all(result.hint for result in bad() if result.verdict in (FAIL, WARN))


def test_every_check_of_these_has_failed_above(request: pytest.FixtureRequest, said: set[Any]) -> None:
    require_all(request, [machine, fabric, gpus], said)
    asked = {question.name for question in gpus.QUESTIONS} | {"GPU memory", "NVLink"}
    assert asked <= said, f"{asked - said} is asked of every GPU, and was never answered badly"
