"""This machine's checks: planted /sys, /proc and /dev, planted GPUs, and a fault for each check."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from windlass.hardware import GpuReading, Gpus, LocalMachine
from windlass.launch.check import machine
from windlass.launch.check.results import FAIL, PASS, SKIPPED, WARN, Result
from windlass.launch.interfaces import choices, matching
from windlass.plan import Plan, make
from windlass.runfile import read

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "examples" / "mistral-small-4" / "train.yaml"
H200 = GpuReading(0, "NVIDIA H200", 143771 / 1024, 143000 / 1024, nvlinks=18, nvlinks_up=18)


def planned(*overrides: str) -> Plan:
    return make(read(RECIPE, overrides))


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    """The recipe's three nodes with an H200 each and InfiniBand; one node with eight; one that computes on its CPU."""
    return {
        "nodes": planned(),
        "server": planned("cluster.nodes=1", "cluster.gpus_per_node=8"),
        "loading": planned("cluster.nodes=1", "cluster.gpus_per_node=8", "train.dataloader_num_workers=2"),
        "two cards": planned("cluster.nics_per_node=2"),
        "cpu": planned("cluster.nodes=1", "cluster.gpu=cpu"),
    }


def named(results: Sequence[Result], name: str) -> Result:
    found = [result for result in results if result.name == name]
    assert len(found) == 1, [result.name for result in results]
    return found[0]


def plant(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


# --- memory, processors, limits


def test_host_memory_and_processors(plans: dict[str, Plan]) -> None:
    nodes, need = plans["nodes"], plans["nodes"].cost.host_gib
    assert machine.check_host_memory(nodes, LocalMachine((), 8, need + 1, None)).verdict == PASS
    found = machine.check_host_memory(nodes, LocalMachine((), 8, need - 1, need - 1))
    assert (found.verdict, "control group" in found.seen) == (FAIL, True)
    assert machine.check_host_memory(nodes, LocalMachine((), 8, 0.0, None)).verdict == SKIPPED
    for plan, cpus, verdict in (("server", 8, PASS), ("server", 4, WARN), ("loading", 8, WARN), ("loading", 24, PASS)):
        assert machine.check_processors(plans[plan], LocalMachine((), cpus, 1, None)).verdict == verdict


def test_shared_memory(plans: dict[str, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.check_shared_memory(plans["nodes"], tmp_path).verdict == PASS
    assert machine.check_shared_memory(plans["nodes"], tmp_path / "none").verdict == SKIPPED
    # A container runtime's default is 64 MiB: too little for eight ranks, enough for one that loads by itself.
    for plan, mib, verdict in (("server", 64, FAIL), ("server", 8192, PASS), ("nodes", 64, PASS)):
        stat = SimpleNamespace(f_blocks=mib, f_bavail=mib, f_frsize=1 << 20)
        monkeypatch.setattr(os, "statvfs", lambda _, stat=stat: stat)
        assert machine.check_shared_memory(plans[plan], Path("/dev/shm")).verdict == verdict


LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max processes             {processes:<20} unlimited            processes
Max open files            {files:<20} 1048576              files
Max locked memory         {locked:<20} unlimited            bytes
"""


def limited(root: Path, processes: str = "unlimited", files: str = "1048576", locked: str = "unlimited") -> Path:
    return plant(root, {"proc/self/limits": LIMITS.format(processes=processes, files=files, locked=locked)})


def test_limits(plans: dict[str, Plan], tmp_path: Path) -> None:
    def verdicts() -> list[str]:
        return [result.verdict for result in machine.check_limits(tmp_path)]

    def locked(plan: str = "nodes") -> str:
        return machine.check_locked_memory(plans[plan], tmp_path).verdict

    assert {"Max locked memory", "Max open files", "Max processes"} <= set(
        machine.limits(Path("/"))
    )  # the kernel's own
    assert (verdicts(), locked()) == ([SKIPPED, SKIPPED], SKIPPED)  # nothing is reported
    limited(tmp_path)
    assert (verdicts(), locked(), locked("server")) == ([PASS, PASS], PASS, SKIPPED)  # no RDMA
    limited(tmp_path, files="1024", processes="100", locked="65536")
    assert (verdicts(), locked()) == ([WARN, FAIL], FAIL)
    for mask, verdict in (("0000000000004000", PASS), ("0000000000000001", FAIL)):  # with and without IPC_LOCK
        plant(tmp_path, {"proc/self/status": f"Name:\tx\nCapEff:\t{mask}\n"})
        assert locked() == verdict
    for group, verdict in (("max\n", PASS), ("512\n", FAIL)):
        plant(limited(tmp_path), {"sys/fs/cgroup/pids.max": group})
        assert verdicts() == [PASS, verdict]


def test_a_user_without_an_account(tmp_path: Path) -> None:
    plant(tmp_path, {"etc/passwd": "root:x:0:0:root:/root:/bin/sh\nme:x:1000:0::/home/me:/bin/sh\n"})
    assert machine.check_account(tmp_path, 1000, {}).verdict == PASS
    assert machine.check_account(tmp_path, 1000680000, {}).verdict == FAIL
    assert machine.check_account(tmp_path, 1000680000, {"LOGNAME": "windlass"}).verdict == PASS


# --- network


def port(
    device: str, state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)", verbs: bool = True
) -> dict[str, str]:
    below = f"sys/class/infiniband/{device}/ports/1"
    files = {f"{below}/state": f"{state}\n", f"{below}/rate": f"{rate}\n"}
    if verbs:
        files |= {f"sys/class/infiniband_verbs/u-{device}/ibdev": f"{device}\n", f"dev/infiniband/u-{device}": ""}
    return files


@pytest.mark.parametrize(
    ("plan", "files", "hca", "verdict", "seen"),
    [
        ("nodes", port("mlx5_0"), "", PASS, "mlx5_0:1 ACTIVE at 400 Gb/s"),
        ("nodes", {}, "", FAIL, "no RDMA card"),
        ("nodes", port("mlx5_0", state="1: DOWN"), "", FAIL, "0 ports active, 1 planned"),
        ("nodes", port("mlx5_0", state="2: INIT"), "", FAIL, "mlx5_0:1 INIT"),
        ("nodes", port("mlx5_0", rate="100 Gb/sec (4X EDR)"), "", FAIL, "slower than infiniband-400"),
        ("nodes", port("mlx5_0", verbs=False), "", FAIL, "/dev/infiniband"),
        ("nodes", port("mlx5_0"), "mlx4", FAIL, "matches none of mlx5_0:1"),
        ("nodes", port("mlx5_0") | port("mlx5_1", state="1: DOWN"), "=mlx5_0", PASS, "mlx5_0:1"),
        ("nodes", port("mlx5_0") | port("mlx5_1", state="1: DOWN"), "^mlx5_0", FAIL, "mlx5_1:1 DOWN"),
        ("nodes", port("mlx5_0") | port("mlx5_1"), "mlx5_1:1", PASS, "mlx5_1:1"),
        ("two cards", port("mlx5_0"), "", FAIL, "1 ports active, 2 planned"),
        ("two cards", port("mlx5_0") | port("mlx5_1"), "", PASS, "mlx5_1:1"),
        ("server", {}, "", SKIPPED, "uses none"),
    ],
)
def test_infiniband_ports(
    plans: dict[str, Plan], tmp_path: Path, plan: str, files: dict[str, str], hca: str, verdict: str, seen: str
) -> None:
    found = machine.check_infiniband(plans[plan], plant(tmp_path, files), {"NCCL_IB_HCA": hca})
    assert (found.verdict, seen in found.seen) == (verdict, True), found


def test_peer_memory(plans: dict[str, Plan], tmp_path: Path) -> None:
    def verdict(plan: str = "nodes") -> str:
        return machine.check_peer_memory(plans[plan], tmp_path).verdict

    assert (verdict("server"), verdict()) == (SKIPPED, WARN)
    open_driver = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06\n"
    plant(tmp_path, {"proc/sys/kernel/osrelease": "5.4.0-generic\n", "proc/driver/nvidia/version": open_driver})
    assert verdict() == WARN  # the kernel is too old for DMA-BUF
    plant(tmp_path, {"proc/sys/kernel/osrelease": "6.8.0-generic\n"})
    assert verdict() == PASS
    plant(tmp_path, {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module\n"})
    assert verdict() == WARN
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    assert verdict() == PASS


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
    assert matching(pattern, ["eth0", "eth1", "lo", "net1"], exact=exact) == expected


@pytest.mark.parametrize(
    ("environ", "nodes", "problem"),
    [
        ({}, 2, ""),
        ({"GLOO_SOCKET_IFNAME": "lo"}, 1, ""),
        ({"GLOO_SOCKET_IFNAME": "lo"}, 2, "reaches no other node"),
        ({"NCCL_SOCKET_IFNAME": "=lo"}, 2, "reaches no other node"),
        ({"NCCL_SOCKET_IFNAME": "net9"}, 2, "names no interface"),
        ({"NCCL_SOCKET_IFNAME": "^net9"}, 1, ""),
        ({"GLOO_SOCKET_IFNAME": "l"}, 1, "names no interface"),
        ({"NCCL_SOCKET_IFNAME": "l"}, 1, ""),
    ],
)
def test_interfaces_are_chosen_by_each_librarys_own_rules(environ: dict[str, str], nodes: int, problem: str) -> None:
    problems = [choice.problem for choice in choices(environ, nodes) if choice.problem]
    assert len(problems) == bool(problem)
    assert all(problem in text for text in problems)


def test_the_chosen_interface_exists_is_up_and_has_an_address(tmp_path: Path) -> None:
    def check(environ: dict[str, str], root: Path) -> tuple[Result, Result]:
        gloo, nccl = machine.check_interfaces(environ, 1, root)
        return gloo, nccl

    here = check({"NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "lo"}, Path("/"))
    assert [result.verdict for result in here] == [PASS, PASS]
    assert "127.0.0.1" in here[0].seen
    assert {result.verdict for result in check({}, Path("/"))} == {SKIPPED}
    plant(tmp_path, {"sys/class/net/lo/operstate": "unknown", "sys/class/net/net1/operstate": "down"})
    down, absent = check({"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "net1"}, tmp_path)
    assert (absent.verdict, "it has lo, net1" in absent.seen) == (FAIL, True)
    assert (down.verdict, "is down" in down.seen) == (FAIL, True)
    plant(tmp_path, {"sys/class/net/net1/operstate": "up"})
    bare = check({"GLOO_SOCKET_IFNAME": "net1"}, tmp_path)[0]
    assert (bare.verdict, "has no IP address" in bare.seen) == (FAIL, True)


# --- GPUs


def eight(**fault: object) -> Gpus:
    gpus = [replace(H200, index=index) for index in range(8)]
    gpus[3] = replace(gpus[3], **fault)  # type: ignore[arg-type]
    return Gpus(tuple(gpus), driver="580.65.06")


def test_healthy_gpus_pass(plans: dict[str, Plan], tmp_path: Path) -> None:
    results = machine.check_gpus(plans["server"], eight(), plant(tmp_path, {"dev/kmsg": "6,1,2,-;all is well\n"}))
    assert {result.verdict for result in results} == {PASS}, results
    assert "8 x NVIDIA H200" in named(results, "GPUs").seen


@pytest.mark.parametrize(
    ("fault", "name", "verdict"),
    [
        ({"free_gib": 10.0}, "GPU memory", FAIL),
        ({"processes": (4711,)}, "GPU processes", FAIL),
        ({"ecc_uncorrected": 2}, "GPU errors", FAIL),
        ({"remap_pending": True}, "GPU errors", FAIL),
        ({"throttle": ("hardware thermal slowdown",)}, "GPU clocks", FAIL),
        ({"throttle": ("software power cap",)}, "GPU clocks", PASS),
        ({"persistence": False}, "GPU persistence", WARN),
        ({"nvlinks_up": 17}, "NVLink", FAIL),
        ({"nvlinks": 0, "nvlinks_up": 0}, "NVLink", FAIL),
        ({"pcie_width": 8}, "PCIe width", WARN),
        ({"name": "NVIDIA A100-SXM4-80GB", "memory_gib": 80.0}, "GPU kind", FAIL),
        ({"name": "NVIDIA H100", "memory_gib": 80.0, "free_gib": 130.0}, "GPUs", WARN),
        ({"processes": None}, "GPU processes", SKIPPED),
        ({"ecc_uncorrected": None, "remap_pending": None}, "GPU errors", SKIPPED),
        ({"throttle": None}, "GPU clocks", SKIPPED),
        ({"persistence": None}, "GPU persistence", SKIPPED),
        ({"pcie_width": None}, "PCIe width", SKIPPED),
    ],
)
def test_a_fault_of_one_gpu_of_eight_is_named(
    plans: dict[str, Plan], tmp_path: Path, fault: dict[str, object], name: str, verdict: str
) -> None:
    found = named(machine.check_gpus(plans["server"], eight(**fault), tmp_path), name)
    assert found.verdict == verdict, found
    assert found.hint or verdict in (PASS, SKIPPED)
    assert "GPU 3" in found.seen or verdict == PASS or name == "GPUs"


def test_missing_gpus(plans: dict[str, Plan], tmp_path: Path) -> None:
    for plan, gpus, name, verdict in (
        ("server", Gpus((H200,)), "GPUs", FAIL),
        ("nodes", Gpus(error="NVML does not start: Driver Not Loaded"), "GPUs", FAIL),
        ("nodes", Gpus(error="not installed", installed=False), "GPUs", SKIPPED),
        ("nodes", Gpus((H200,)), "NVLink", SKIPPED),  # alone in its node
        ("cpu", Gpus((H200,)), "GPUs", SKIPPED),
    ):
        assert named(machine.check_gpus(plans[plan], gpus, tmp_path), name).verdict == verdict


@pytest.mark.parametrize(
    ("log", "verdict"),
    [
        ("4,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n", FAIL),
        ("4,1,2,-;NVRM: Xid (PCI:0000:3b:00): 13, pid=1, Graphics Exception\n", PASS),
        ("quiet\n", PASS),
        (None, SKIPPED),
    ],
)
def test_gpu_faults_in_the_kernels_log(tmp_path: Path, log: str | None, verdict: str) -> None:
    found = machine.check_kernel_log(plant(tmp_path, {} if log is None else {"dev/kmsg": log}))
    assert (found.verdict, "3b:00" in found.seen) == (verdict, verdict == FAIL)


# --- folders


def test_a_folder_that_cannot_be_written_fails(tmp_path: Path) -> None:
    assert machine.try_folder(tmp_path / "not" / "yet") == ""
    assert not list(tmp_path.iterdir())  # the trial leaves nothing
    (tmp_path / "file").touch()
    assert "is a file" in machine.try_folder(tmp_path / "file" / "below")
    assert "/proc" in machine.try_folder(Path("/proc/windlass"))  # refused to root too
    for folder, verdict in (("/proc/windlass", FAIL), (tmp_path, PASS)):
        loaded = read(RECIPE, [f"train.output_dir={folder}"])
        assert machine.check_run_folder(loaded, elsewhere=False).verdict == verdict


def test_disk_space_for_the_run_and_for_a_merged_model(tmp_path: Path) -> None:
    def verdict(plan: Plan, free: float) -> str:
        return machine.check_disk_space(plan, elsewhere=False, free=free).verdict

    plan = planned(f"train.output_dir={tmp_path}")
    run, merged, words = machine.space_needed(plan)
    kept = plan.schedule.checkpoints_kept or 0
    adapter = plan.adapter.trainable * plan.adapter.dtype_bytes
    tokens = 8 * plan.schedule.tokens_per_step * (plan.schedule.steps_per_epoch or 0)
    assert run == (kept + 1) * plan.schedule.checkpoint_bytes + adapter + tokens
    assert merged == plan.total * 2
    assert words in machine.check_disk_space(plan, elsewhere=False, free=run - 1).seen
    assert [verdict(plan, free) for free in (run - 1, run, run + merged)] == [FAIL, WARN, PASS]
    # What the run has written already is not needed again.
    for name, size in (("checkpoints/step-10/adapter.safetensors", 300_000), ("tokens/a/data.arrow", 200_000)):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(b"x" * size)
    after, _, words = machine.space_needed(plan)
    assert 500_000 <= run - after < 600_000
    assert "are there" in words
    assert [verdict(plan, free) for free in (after - 1, after)] == [FAIL, WARN]
    # More than this run would ever hold makes no room for the rest.
    with (tmp_path / "tokens" / "a" / "other.arrow").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 64 << 20)
    assert run - machine.space_needed(plan)[0] <= 300_000 + 100_000 + tokens


def test_caches_and_home_must_be_writable(tmp_path: Path) -> None:
    assert {result.verdict for result in machine.check_caches({"HOME": str(tmp_path)})} == {PASS}
    bad = {"HOME": "/proc/nobody", "HF_HOME": "/proc/hub", "TRITON_CACHE_DIR": str(tmp_path), "TMPDIR": "/proc/tmp"}
    results = machine.check_caches(bad | {"TORCHINDUCTOR_CACHE_DIR": "/proc/inductor"})
    for name in ("HOME", "HF_HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert named(results, f"folder {name}").verdict == FAIL, name
    assert named(results, "folder TRITON_CACHE_DIR").verdict == PASS
    assert named(machine.check_caches({}), "folder HOME").verdict == FAIL
