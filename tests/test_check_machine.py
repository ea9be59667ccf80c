"""This machine's checks: planted /sys, /proc and /dev, planted GPUs, and a fault for each check."""

import importlib.util
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from refusals import refused

from windlass.hardware import GpuReading, Gpus, LocalMachine
from windlass.launch.check import machine
from windlass.launch.check.results import FAIL, PASS, SKIPPED, WARN, Context, Result
from windlass.launch.job import build_job
from windlass.launch.submit import submit
from windlass.plan import Plan, make_plan
from windlass.plan.script import AnyPlan, make_any_plan
from windlass.ranks.place import list_choices, match_interfaces
from windlass.run_folder import FAILED, FINISHED, MANIFEST, update_manifest
from windlass.runfile import read_any, read_run_file
from windlass.start import leave_finished
from windlass.variables import find_unread, variables

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "examples" / "mistral-small-4" / "train.yaml"
H200 = GpuReading(0, "NVIDIA H200", 143771 / 1024, 143000 / 1024, nvlinks=18, nvlinks_up=18)
TORCH = importlib.util.find_spec("torch")
TORCH_HEADER = Path((TORCH and TORCH.origin) or "").parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
MANY = LocalMachine((), 64, 4000, None)


def planned(*overrides: str) -> Plan:
    return make_plan(read_run_file(RECIPE, overrides))


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    """The recipe's three nodes with one H200 each and InfiniBand; one node with eight; one that computes on its CPU."""
    return {
        "nodes": planned(),
        "server": planned("cluster.nodes=1", "cluster.gpus_per_node=8"),
        "loading": planned("cluster.nodes=1", "cluster.gpus_per_node=8", "train.dataloader_num_workers=2"),
        "two cards": planned("cluster.nics_per_node=2"),
        "cpu": planned("cluster.nodes=1", "cluster.gpu=cpu"),
    }


def context(plan: Plan, root: str | Path = "/", **environ: str) -> Context:
    return Context(plan.loaded, plan, {}, environ, Path(root), alone=False)


def named(results: Sequence[Result], name: str) -> Result:
    (found,) = (result for result in results if result.name == name)
    return found


def plant(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


# --- memory, processors, limits

LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max processes             {processes:<20} unlimited            processes
Max open files            {files:<20} 1048576              files
Max locked memory         {locked:<20} unlimited            bytes
"""


def limited(root: Path, processes: str = "unlimited", files: str = "1048576", locked: str = "unlimited") -> Path:
    return plant(root, {"proc/self/limits": LIMITS.format(processes=processes, files=files, locked=locked)})


def test_limits(plans: dict[str, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def verdict(name: str, plan: str = "nodes", here: LocalMachine = MANY, root: Path = tmp_path) -> str:
        return named(machine.check_limits(context(plans[plan], root), here), name).verdict

    three = ("open files", "processes", "locked memory")
    need = plans["nodes"].cost.host_gib
    for gib, expected in ((need + 1, PASS), (need - 1, FAIL), (0.0, SKIPPED)):
        assert verdict("host memory", here=LocalMachine((), 8, gib, gib or None)) == expected
    for plan, cpus, expected in (("server", 8, PASS), ("server", 4, WARN), ("loading", 8, WARN), ("loading", 24, PASS)):
        assert verdict("processors", plan, LocalMachine((), cpus, 1, None)) == expected
    assert all(verdict(name, root=Path("/")) != SKIPPED for name in three)  # this kernel's own
    assert [verdict(name) for name in three] == [SKIPPED, SKIPPED, SKIPPED]  # nothing is reported
    limited(tmp_path)
    assert [verdict(name) for name in three] == [PASS, PASS, PASS]
    rows = machine.check_limits(context(plans["server"], tmp_path), MANY)
    assert "locked memory" not in {row.name for row in rows}  # no RDMA
    limited(tmp_path, files="1024", processes="100", locked="65536")
    assert [verdict(name) for name in three] == [WARN, FAIL, FAIL]
    for mask, expected in (("0000000000004000", PASS), ("0000000000000001", FAIL)):  # with and without IPC_LOCK
        plant(tmp_path, {"proc/self/status": f"Name:\tx\nCapEff:\t{mask}\n"})
        assert verdict("locked memory") == expected
    for group, expected in (("max\n", PASS), ("512\n", FAIL)):
        plant(limited(tmp_path), {"sys/fs/cgroup/pids.max": group})
        assert verdict("processes") == expected
    assert (verdict("/dev/shm", root=Path("/")), verdict("/dev/shm")) == (PASS, SKIPPED)
    # A container runtime's default is 64 MiB: too little for eight ranks, enough for one that loads by itself.
    for plan, mib, expected in (("server", 64, FAIL), ("server", 8192, PASS), ("nodes", 64, PASS)):
        stat = SimpleNamespace(f_blocks=mib, f_bavail=mib, f_frsize=1 << 20)
        monkeypatch.setattr(os, "statvfs", lambda _, stat=stat: stat)
        assert verdict("/dev/shm", plan) == expected
    # A control group above this process's own limits it too.
    own = {"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/step/pids.max": "max\n"}
    plant(limited(tmp_path), {"sys/fs/cgroup/pids.max": "max\n", **own, "sys/fs/cgroup/job/pids.max": "512\n"})
    assert verdict("processes") == FAIL


SCRIPT = """
kind: script
script: {path: train.py, workers: %d}
cluster: {gpu: h200, gpus_per_node: %d}
"""


def test_a_pod_has_the_shared_memory_that_its_check_wants(
    plans: dict[str, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verdict(plan: AnyPlan, gib: float) -> str:
        stat = SimpleNamespace(f_bavail=int(gib * 1024), f_frsize=1 << 20)
        monkeypatch.setattr(os, "statvfs", lambda _: stat)
        c = Context(plan.loaded, plan, {}, {}, tmp_path, alone=False)
        return named(machine.check_limits(c, MANY), "/dev/shm").verdict

    run = tmp_path / "run.yaml"
    for ranks in (1, 8):
        layout = replace(plans["server"].layout, gpus_per_node=ranks)
        for workers in (0, 1, 8):
            loaded = read_run_file(RECIPE, [f"train.dataloader_num_workers={workers}"])
            run.write_text(SCRIPT % (workers, ranks))
            for plan in (replace(plans["server"], loaded=loaded, layout=layout), make_any_plan(read_any(run, []))):
                assert verdict(plan, build_job(plan).shm_gib) == PASS
            if workers:  # a script's may prefetch images
                assert verdict(plan, ranks * workers * 0.5 - 0.1) == FAIL
    # Ranks on the CPU exchange over TCP.
    assert verdict(replace(plans["cpu"], layout=layout), 0.0625) == PASS


def test_a_user_without_an_account(plans: dict[str, Plan], tmp_path: Path) -> None:
    plant(tmp_path, {"etc/passwd": "root:x:0:0:root:/root:/bin/sh\nme:x:1000:0::/home/me:/bin/sh\n"})
    alone, named_by_environment = context(plans["cpu"], tmp_path), context(plans["cpu"], tmp_path, LOGNAME="windlass")
    for c, uid, verdict in ((alone, 1000, PASS), (alone, 100, FAIL), (named_by_environment, 1000680000, PASS)):
        assert machine.check_account(c, uid).verdict == verdict


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
        ("nodes", port("mlx5_0", rate="100 Gb/sec (4X EDR)"), "", WARN, "slower than infiniband-400"),
        ("nodes", port("mlx5_0", verbs=False), "", FAIL, "/dev/infiniband"),
        ("nodes", port("mlx5_0"), "mlx4", FAIL, "matches none of mlx5_0:1"),
        ("nodes", port("mlx5_0") | port("mlx5_1", state="1: DOWN"), "=mlx5_0", PASS, "mlx5_0:1"),
        ("nodes", port("mlx5_0") | port("mlx5_1", state="1: DOWN"), "^mlx5_0", FAIL, "mlx5_1:1 DOWN"),
        ("two cards", port("mlx5_0"), "", FAIL, "1 ports active, 2 planned"),
        ("server", {}, "", SKIPPED, "uses none"),
    ],
)
def test_infiniband_ports(
    plans: dict[str, Plan], tmp_path: Path, plan: str, files: dict[str, str], hca: str, verdict: str, seen: str
) -> None:
    found = machine.check_infiniband(context(plans[plan], plant(tmp_path, files), NCCL_IB_HCA=hca), plans[plan])
    assert (found.verdict, seen in found.seen) == (verdict, True), found


def test_interfaces_are_chosen_by_each_librarys_own_rules() -> None:
    for pattern, exact, expected in (
        ("eth", False, ["eth0", "eth1"]),
        ("=eth0", False, ["eth0"]),
        ("eth", True, []),
        ("net1,eth1", True, ["eth1", "net1"]),
        ("^lo,eth", False, ["net1"]),
    ):
        assert match_interfaces(pattern, ["eth0", "eth1", "lo", "net1"], exact=exact) == expected
    for variable, pattern, nodes, problem in (
        ("GLOO", "lo", 2, "reaches no other node"),
        ("NCCL", "=lo", 2, "reaches no other node"),
        ("NCCL", "^net9", 1, ""),
        ("GLOO", "l", 1, "names no interface"),
        ("NCCL", "l", 1, ""),
    ):
        (choice,) = list_choices({f"{variable}_SOCKET_IFNAME": pattern}, nodes)
        assert (bool(choice.problem), problem in choice.problem) == (bool(problem), True)


def test_the_chosen_interface_exists_is_up_and_has_an_address(plans: dict[str, Plan], tmp_path: Path) -> None:
    def seen(root: Path, **environ: str) -> list[tuple[str, str]]:
        results = machine.check_interfaces(context(plans["cpu"], root, **environ))
        return [(result.verdict, result.seen) for result in results]

    here = seen(Path("/"), NCCL_SOCKET_IFNAME="=lo", GLOO_SOCKET_IFNAME="lo")
    assert here == [(PASS, "lo: lo 127.0.0.1"), (PASS, "=lo: lo 127.0.0.1")]
    assert seen(Path("/")) == []
    plant(tmp_path, {"sys/class/net/lo/operstate": "unknown", "sys/class/net/net1/operstate": "down"})
    (down, absent) = seen(tmp_path, NCCL_SOCKET_IFNAME="ib0", GLOO_SOCKET_IFNAME="net1")
    assert (absent[0], "it has lo, net1" in absent[1]) == (down[0], "is down" in down[1]) == (FAIL, True)
    plant(tmp_path, {"sys/class/net/net1/operstate": "up"})
    assert "has no IP address" in seen(tmp_path, GLOO_SOCKET_IFNAME="net1")[0][1]


@pytest.mark.fault("a host whose name leads to itself", "`windlass check`", "other nodes can't reach gloo there")
def test_hostname_resolution_is_checked(plans: dict[str, Plan], tmp_path: Path) -> None:
    plant(tmp_path, {"sys/class/net/lo/operstate": "up", "sys/class/net/eth7/operstate": "up"})
    for addresses in (["127.0.1.1", "10.0.0.7"], ["::1"], []):
        (found,) = machine.check_hostname(context(plans["nodes"], tmp_path), addresses)
        assert (found.verdict, found.seen.endswith("other nodes can't reach gloo there")) == (WARN, True)
        assert found.hint.endswith("reach: eth7")
    (found,) = machine.check_hostname(context(plans["nodes"], tmp_path), ["10.0.0.7", "127.0.1.1"])
    assert (found.verdict, found.seen) == (PASS, "10.0.0.7, 127.0.1.1")
    assert machine.list_addresses("localhost")[0] in ("127.0.0.1", "::1")
    assert machine.list_addresses("no-such-host.invalid") == []
    assert machine.check_hostname(context(plans["nodes"], GLOO_SOCKET_IFNAME="eth7"), []) == []
    assert machine.check_hostname(context(plans["server"]), []) == []


def test_unread_variables_are_reported(plans: dict[str, Plan]) -> None:
    """The table must have every name that the libraries read, or valid names would be reported."""
    c = context(
        plans["cpu"],
        **dict.fromkeys(("NCCL_IB_HCAS", "TORCH_NCCL_BLOCKING_WAITS", "NCCL_TIMEOUT", "NCCL_ZZ", "NCCL_DEBUG"), "1"),
        **dict.fromkeys(("NCCL_VERSION", "NCCL_CROSS_NIC", "NCCL_OFI_NEW", "TORCH_NCCL_NAN_CHECK", "NCCLX"), "1"),
    )
    results = machine.check_variables(c)
    assert {result.name: (result.verdict, result.seen) for result in results} == {
        "variable NCCL_IB_HCAS": (WARN, "nothing reads it; did you mean NCCL_IB_HCA?"),
        "variable NCCL_ZZ": (WARN, "nothing reads it: remove it"),
        "variable NCCL_TIMEOUT": (WARN, f"NCCL has no such variable; {variables()['NCCL_TIMEOUT'].windlass}"),
        "variable TORCH_NCCL_BLOCKING_WAITS": (WARN, "nothing reads it; did you mean TORCH_NCCL_BLOCKING_WAIT?"),
    }
    of_torch = find_unread(re.findall(r'"((?:TORCH_)?NCCL_[A-Z_]+)"', TORCH_HEADER.read_text()))
    assert all("the old name of" in problem for problem in of_torch.values())


# --- GPUs


def eight(**fault: object) -> Gpus:
    gpus = [replace(H200, index=index) for index in range(8)]
    gpus[3] = replace(gpus[3], **fault)  # type: ignore[arg-type]
    return Gpus(tuple(gpus), driver="580.65.06")


@pytest.mark.parametrize(
    ("fault", "name", "verdict"),
    [
        ({}, "GPUs", PASS),
        ({"free_gib": 10.0}, "GPU memory", FAIL),
        ({"processes": (4711,)}, "GPU processes", FAIL),
        ({"ecc_uncorrected": 2}, "GPU errors", FAIL),
        ({"remap_pending": True}, "GPU errors", FAIL),
        ({"throttle": ("hardware thermal slowdown",)}, "GPU clocks", FAIL),
        ({"throttle": ("software power cap",)}, "GPU clocks", PASS),
        ({"nvlinks": 0, "nvlinks_up": 0}, "NVLink", FAIL),
        ({"pcie_width": 8}, "PCIe width", WARN),
        ({"name": "NVIDIA A100-SXM4-80GB", "memory_gib": 80.0}, "GPU kind", FAIL),
        ({"processes": None}, "GPU processes", SKIPPED),
        ({"ecc_uncorrected": None, "remap_pending": None}, "GPU errors", SKIPPED),
        ({"pcie_width": None}, "PCIe width", SKIPPED),
    ],
)
def test_a_fault_of_one_gpu_of_eight_is_named(
    plans: dict[str, Plan], tmp_path: Path, fault: dict[str, object], name: str, verdict: str
) -> None:
    c = context(plans["server"], plant(tmp_path, {"dev/kmsg": "6,1,2,-;all is well\n"}))
    results = machine.check_gpus(c, plans["server"], eight(**fault))
    assert {result.name for result in results if result.verdict != PASS} <= {name}
    found = named(results, name)
    assert found.verdict == verdict, found
    assert found.hint or verdict in (PASS, SKIPPED)
    assert "GPU 3" in found.seen or verdict == PASS


def test_hidden_gpus_are_not_judged(plans: dict[str, Plan], tmp_path: Path) -> None:
    plan = replace(plans["server"], layout=replace(plans["server"].layout, gpus_per_node=2))
    found = eight(free_gib=10.0, uuid="GPU-c0ffee")
    for visible, verdict, faulty in (
        ("0,1", PASS, False),
        ("2, 3", PASS, True),
        ("1,GPU-c0f", PASS, True),
        ("GPU-c0ffee", FAIL, True),
        ("", FAIL, False),
        ("-1", FAIL, False),
    ):
        results = machine.check_gpus(context(plan, tmp_path, CUDA_VISIBLE_DEVICES=visible), plan, found)
        assert named(results, "GPUs").verdict == verdict, visible
        assert any("GPU 3: 10.0 of" in result.seen for result in results) == faulty, visible


def test_missing_gpus_and_faults_in_the_kernels_log(plans: dict[str, Plan], tmp_path: Path) -> None:
    for plan, gpus, verdict in (
        ("server", Gpus((H200,)), FAIL),
        ("nodes", Gpus((H200,)), PASS),
        ("nodes", Gpus(error="NVML does not start: Driver Not Loaded"), FAIL),
        ("nodes", Gpus(error="not installed", installed=False), SKIPPED),
        ("cpu", Gpus((H200,)), SKIPPED),
    ):
        results = machine.check_gpus(context(plans[plan], tmp_path), plans[plan], gpus)
        assert named(results, "GPUs").verdict == verdict
    for log, verdict in (
        (None, SKIPPED),
        ("4,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n", FAIL),
        ("4,1,2,-;NVRM: Xid (PCI:0000:3b:00): 13, pid=1, Graphics Exception\n", PASS),
    ):
        plant(tmp_path, {} if log is None else {"dev/kmsg": log})
        found = machine.check_kernel_log(context(plans["cpu"], tmp_path))
        assert (found.verdict, "3b:00" in found.seen) == (verdict, verdict == FAIL)


# --- folders


def test_unwritable_folder_fails_the_check(plans: dict[str, Plan], tmp_path: Path) -> None:
    assert machine.try_folder(tmp_path / "not" / "yet") == ""
    assert not list(tmp_path.iterdir())  # the trial leaves nothing
    (tmp_path / "file").touch()
    assert "is a file" in machine.try_folder(tmp_path / "file" / "below")
    assert "/proc" in machine.try_folder(Path("/proc/windlass"))  # refused to root too
    for folder, verdict in (("/proc/windlass", FAIL), (tmp_path, PASS)):
        loaded = read_run_file(RECIPE, [f"train.output_dir={folder}"])
        assert machine.check_run_folder(replace(context(plans["cpu"]), loaded=loaded)).verdict == verdict
    assert {result.verdict for result in machine.check_caches(context(plans["cpu"], HOME=str(tmp_path)))} == {PASS}
    bad = dict.fromkeys(("HOME", "HF_HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR"), "/proc/nobody")
    results = machine.check_caches(context(plans["cpu"], **bad, TRITON_CACHE_DIR=str(tmp_path)))
    assert {result.name for result in results if result.verdict == FAIL} == {f"folder {name}" for name in bad}
    assert named(machine.check_caches(context(plans["cpu"])), "folder HOME").verdict == FAIL
    # A shared cache that can only be read is enough, but for a model's own code.
    c = context(plans["cpu"], HOME=str(tmp_path), HF_HOME="/proc")
    assert named(machine.check_caches(c), "folder HF_HOME").verdict == WARN
    c = replace(c, loaded=read_run_file(RECIPE, ["model.trust_remote_code=true"]))
    assert named(machine.check_caches(c), "folder HF_HOME").verdict == FAIL


@pytest.mark.fault("a finished sweep, to check", "`windlass check`", "contains a finished sweep")
def test_a_finished_sweep_fails_the_check_as_a_run_does(tmp_path: Path) -> None:
    """One with trials that the run file has now is to be trained on."""
    for name, state in (("r8", FINISHED), ("r32", FAILED)):
        (tmp_path / "trials" / name).mkdir(parents=True)
        update_manifest(tmp_path / "trials" / name, state=state)
    update_manifest(tmp_path, state=FINISHED, trials={"r8": FINISHED, "r32": FAILED})
    for values, verdict in (("[8, 32]", FAIL), ("[8, 32, 64]", PASS)):
        plan = planned(f"sweep={{lora.r: {values}}}", f"train.output_dir={tmp_path}")
        result = machine.check_run_folder(context(plan))
        assert (result.verdict, "contains a finished sweep" in result.seen) == (verdict, verdict == FAIL)


@pytest.mark.fault("a run into the folder of a sweep, to check", "`windlass check`", "contains a sweep, and no run")
@pytest.mark.fault("a sweep into the folder of a run, to check", "`windlass check`", "contains a run, and no sweep")
@pytest.mark.parametrize("state", [FINISHED, FAILED])
def test_another_kind_of_run_in_the_folder_is_refused(state: str, tmp_path: Path) -> None:
    """By every command that starts one."""
    sweep = "sweep={lora.r: [8, 32]}"
    for overrides, trials, problem in (
        ([sweep], {}, "contains a run, and no sweep"),
        ([], {"trials": {}}, "contains a sweep, and no run"),
        ([], {"kind": "script"}, "contains a script's run, and no run"),
    ):
        (tmp_path / MANIFEST).write_text(json.dumps({"state": state, **trials}))
        plan = planned(*overrides, f"train.output_dir={tmp_path}")
        for there in (plan, None):  # not planned: it has no weights, as on a login node
            result = machine.check_run_folder(replace(context(plan), plan=there))
            assert (result.verdict, result.seen) == (FAIL, f"{tmp_path} {problem}")
            assert result.hint == "name another train.output_dir, or remove the folder to start over"
        with refused("unlike-folder", f"train.output_dir={tmp_path}"):
            leave_finished(plan, resume=True)
        with refused("unlike-folder", f"train.output_dir={tmp_path}"):
            submit(plan, "kubernetes", say=print)
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]


def test_disk_space_for_the_run_and_for_a_merged_model(tmp_path: Path) -> None:
    plan = planned(f"train.output_dir={tmp_path}")

    def verdict(free: float) -> str:
        return machine.check_disk_space(context(plan), free).verdict

    run, merged, words = machine.estimate_space(plan)
    kept = plan.schedule.checkpoints_kept or 0
    adapter = plan.adapter.trainable * plan.adapter.dtype_bytes
    tokens = 8 * plan.schedule.tokens_per_step * (plan.schedule.steps_per_epoch or 0)
    assert run == (kept + 1) * plan.schedule.checkpoint_bytes + adapter + tokens
    assert merged == plan.total * 2
    assert words in machine.check_disk_space(context(plan), run - 1).seen
    assert [verdict(free) for free in (run - 1, run, run + merged)] == [FAIL, WARN, PASS]
    # What the run has written already is not needed again, and what it would never hold makes no room for the rest.
    for name, size in (("checkpoints/step-10/adapter.safetensors", 300_000), ("tokens/a/data.arrow", 200_000)):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(b"x" * size)
    after, _, words = machine.estimate_space(plan)
    assert (500_000 <= run - after < 600_000, "are there" in words) == (True, True)
    assert [verdict(free) for free in (after - 1, after)] == [FAIL, WARN]
    with (tmp_path / "tokens" / "a" / "other.arrow").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 64 << 20)
    assert run - machine.estimate_space(plan)[0] <= 300_000 + 100_000 + tokens
