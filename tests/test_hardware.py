"""The hardware table, figures given instead of it, this machine's hardware, and NVML's answers."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warm

from windlass import hardware
from windlass.errors import UserError


def test_the_table_has_sources_links_that_exist_and_every_usual_spelling() -> None:
    for name, row in hardware.GPUS.items():
        assert row.name == name
        assert {row.link, row.host_link} <= hardware.FABRICS.keys()
        assert 0 < row.achieved_tflops < row.bf16_tflops
    for name, fabric in hardware.FABRICS.items():
        assert (fabric.name, fabric.gb_per_second > 0) == (name, True)
    assert set(hardware.ALIASES.values()) <= set(hardware.GPUS)
    assert set(hardware.FABRIC_ALIASES.values()) <= set(hardware.FABRICS)
    h200 = hardware.find_gpu("h200")
    assert h200.memory_gib == pytest.approx(140.4, abs=0.05)  # as the driver reports it, not as the box says
    assert h200.achieved_tflops == pytest.approx(692, rel=0.01)
    assert h200.memory_gb_per_second == pytest.approx(4080, rel=0.01)
    for spelling, expected in {
        "nvidia-h200": "h200",
        "H200 NVL": "h200-nvl",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA A100-SXM4-40GB": "a100-40gb",
        "AMD Instinct MI300X": "mi300x",
        "NVIDIA GeForce RTX 4090": "rtx-4090",
        "A6000": "rtx-a6000",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx-pro-6000-server",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": "rtx-pro-6000-max-q",
        "Tesla T4": "t4",
        "NVIDIA B300 SXM6 AC": "b300",
        "CPU": "cpu",
    }.items():
        assert hardware.find_gpu(spelling).name == expected
    for gpus in ("4xrtx4090", "4x4090"):
        assert hardware.parse_gpus(gpus, "--gpus") == (1, 4, "rtx-4090")
    assert hardware.find_fabric("InfiniBand 400").gb_per_second == 45
    assert hardware.find_fabric("nvlink").name == "nvlink4"


def test_unknown_names_get_the_nearest_and_ask_for_figures() -> None:
    with pytest.raises(UserError) as caught:
        hardware.find_gpu("h20x", "run.yaml:3: cluster.gpu")
    problem = caught.value.problems[0]
    assert problem.where == "run.yaml:3: cluster.gpu"
    for where, words in (("--gpus", "did you mean 8xh100?"), ("cluster.gpu", "cluster.gpu: h100 and cluster.gpus_per")):
        with pytest.raises(UserError) as caught:
            hardware.find_gpu("8h100", where)
        assert words in caught.value.problems[0].hint
    assert all(word in problem.hint for word in ("h200", *hardware.FIGURES))
    with pytest.raises(UserError) as caught:
        hardware.find_gpu("Gaudi 3", "cluster.gpu")
    assert "nearest" not in caught.value.problems[0].hint
    with pytest.raises(UserError, match="infinband-400") as caught:
        hardware.find_fabric("infinband-400", "run.yaml: cluster.network")
    assert "infiniband-400" in caught.value.problems[0].hint


def test_given_figures_make_a_row() -> None:
    row = hardware.find_gpu({"name": "x1", "memory_gib": 64, "bf16_tflops": 400, "memory_gb_per_second": 2000})
    assert (row.name, row.memory_gib, row.bf16_tflops) == ("x1", 64.0, 400.0)
    assert (row.achieved_tflops, row.memory_gb_per_second) == (280, 1700)


def test_this_machine_and_its_control_group(tmp_path: Path) -> None:
    here = hardware.read_this_machine()
    assert here.cpus >= 1
    assert here.memory_gib > 0.1
    assert here.gpus or here.notes  # no GPU is never silent
    (tmp_path / "memory.max").write_text(f"{3 * 2**30}\n")
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert (hardware.read_memory_limit(tmp_path), hardware.count_usable_cpus(tmp_path)) == (3, 1)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert hardware.read_memory_limit(tmp_path) is None

    assert "127.0.0.1" in hardware.list_interface_addresses("lo")
    assert hardware.list_interface_addresses("nowhere0") == []
    (tmp_path / "proc/net").mkdir(parents=True)
    lines = (
        "20010db8000000000000000000000001 02 40 00 80     eth7",
        "fe800000000000000000000000000001 02 40 20 80     eth7",  # link-local: reaches nobody beyond the cable
    )
    (tmp_path / "proc/net/if_inet6").write_text("\n".join(lines) + "\n")
    assert hardware.list_interface_addresses("eth7", tmp_path) == ["2001:db8::1"]


def test_limits_of_control_groups_above_this_process(tmp_path: Path) -> None:
    """Those of a Slurm job, whose step has none, or of a systemd scope."""
    own = tmp_path / "own"
    job = tmp_path / "slurm" / "job_7"
    (job / "step_0").mkdir(parents=True)
    (job / "step_0" / "memory.max").write_text("max\n")
    (job / "memory.max").write_text(f"{8 * 2**30}\n")
    (job / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "slurm" / "memory.max").write_text(f"{64 * 2**30}\n")
    own.write_text("0::/slurm/job_7/step_0\n")
    assert (hardware.read_memory_limit(tmp_path, own), hardware.count_usable_cpus(tmp_path, own)) == (8, 1)
    first = tmp_path / "memory" / "slurm" / "job_7"  # version 1
    first.mkdir(parents=True)
    (first / "memory.limit_in_bytes").write_text(f"{2 * 2**30}\n")
    own.write_text("11:cpuset:/\n9:memory,hugetlb:/slurm/job_7\n1:name=systemd:/slurm\n0::/\n")
    assert hardware.read_memory_limit(tmp_path, own) == 2
    own.write_text("0::/elsewhere\n")  # a path of the host, which a container doesn't see
    assert hardware.read_memory_limit(tmp_path, own) is None


def test_hidden_gpus_are_not_this_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(hardware.GpuReading(index, "NVIDIA H200", 140, 140, f"GPU-{index}") for index in range(4))
    monkeypatch.setattr(hardware, "read_gpus", lambda **_: hardware.Gpus(gpus))
    every = [0, 1, 2, 3]  # of a part of a GPU nobody says here which it is
    for visible, indices in (("0,2", [0, 2]), ("GPU-3", [3]), ("", []), ("MIG-7", every), (None, every)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        assert [gpu.index for gpu in hardware.read_this_machine().gpus] == indices


RECIPE = Path(__file__).parent.parent / "examples" / "mistral-small-4" / "train.yaml"
# A driver's library that is built for the test: the binding loads it by its name from the library path. Its faults are
# set by variables, so that one is built for all.
LIBRARY = r"""
#include <stdlib.h>
#include <string.h>
#define OK 0
#define NOT_SUPPORTED 3
#define NO_PERMISSION 4
#define NOT_FOUND 6
#define IS(kind) (getenv("KIND") && !strcmp(getenv("KIND"), kind))
#define INSTANCE(d) ((long)(d) > 8)
#define ANSWER(name) (getenv(name) ? atoi(getenv(name)) : OK)
typedef void *device;
typedef struct { unsigned long long total, free, used; } memory;
typedef struct { unsigned pid; unsigned long long used; unsigned instance, compute; } process;
typedef struct { unsigned gpu, memory; } rates;
static int users;
int nvmlInitWithFlags(unsigned f) { users++; return ANSWER("INIT"); }
int nvmlInit_v2(void) { users++; return ANSWER("INIT"); }
int nvmlShutdown(void) { users--; return OK; }
const char *nvmlErrorString(int e) { return e == 15 ? "GPU is lost" : "Driver Not Loaded"; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return ANSWER("COUNT"); }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, device *d) { *d = (device)(long)(i + 1); return OK; }
int nvmlDeviceGetHandleByUUID(const char *s, device *d) {
  *d = (device)(IS("MIG") ? 9L : 2L); return strcmp(s, IS("MIG") ? "MIG-b" : "GPU-b") ? NOT_FOUND : OK; }
int nvmlDeviceGetMigMode(device d, unsigned *now, unsigned *later) {
  *now = *later = IS("MIG"); return IS("A100") ? NOT_SUPPORTED : OK; }
int nvmlDeviceGetMaxMigDeviceCount(device d, unsigned *n) { *n = 7; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(device d, unsigned i, device *m) {
  *m = (device)(long)(9 + i); return i || d != (device)1 ? NOT_FOUND : OK; }
int nvmlSystemGetDriverVersion(char *s, unsigned n) { strncpy(s, "580.65.06", n); return users > 0 ? OK : 1; }
int nvmlDeviceGetName(device d, char *s, unsigned n) {
  strncpy(s, IS("A100") ? "NVIDIA A100-SXM4-80GB" : IS("MIG") ? "NVIDIA H200 MIG 3g.71gb" : "NVIDIA H200", n);
  return OK; }
int nvmlDeviceGetUUID(device d, char *s, unsigned n) { strncpy(s, INSTANCE(d) ? "MIG-b" : "GPU-b", n); return OK; }
int nvmlDeviceGetMemoryInfo(device d, memory *m) {
  if (IS("MIG") && !INSTANCE(d)) return NO_PERMISSION;  /* of all of the GPU: the administrator's alone */
  m->total = (IS("A100") ? 81920ULL : IS("MIG") ? 71424ULL : 143771ULL) << 20;
  m->free = m->total - (771ULL << 20); m->used = 771ULL << 20; return OK; }
int nvmlDeviceGetComputeRunningProcesses_v3(device d, unsigned *n, process *p) {
  unsigned room = *n; *n = d == (device)2 ? 1 : 0;
  if (*n > room) return 7;
  if (*n) { memset(p, 0, sizeof *p); p->pid = 4711; }
  return OK; }
int nvmlDeviceGetCurrentClocksThrottleReasons(device d, unsigned long long *r) { *r = 0x44; return OK; }
int nvmlDeviceGetTotalEccErrors(device d, int t, int c, unsigned long long *n) { *n = 5; return OK; }
int nvmlDeviceGetNvLinkState(device d, unsigned link, unsigned *up) {
  if (link >= 4) return NOT_SUPPORTED;
  *up = link != 2; return OK; }
int nvmlDeviceGetRemappedRows(device d, unsigned *c, unsigned *u, unsigned *pending, unsigned *failed) {
  if (d == (device)1) return NOT_SUPPORTED;
  *c = 1; *u = 0; *pending = 1; *failed = 0; return OK; }
int nvmlDeviceGetCurrPcieLinkWidth(device d, unsigned *w) { *w = 8; return OK; }
int nvmlDeviceGetMaxPcieLinkWidth(device d, unsigned *w) { *w = 16; return OK; }
int nvmlDeviceGetUtilizationRates(device d, rates *r) {
  if (INSTANCE(d)) return NOT_SUPPORTED;
  r->gpu = 90; r->memory = 40; return OK; }
int nvmlDeviceGetPowerUsage(device d, unsigned *mw) { *mw = 650000; return OK; }
int nvmlDeviceGetTemperature(device d, int sensor, unsigned *t) { *t = sensor ? 0 : 61; return OK; }
int nvmlDeviceGetClockInfo(device d, int clock, unsigned *mhz) { *mhz = 1000 + clock; return OK; }
int nvmlDeviceGetPcieThroughput(device d, int counter, unsigned *kib) { *kib = 1000000 * (counter + 1); return OK; }
"""
READ = """
import dataclasses, json, os, sys
from pathlib import Path
from windlass import hardware
from windlass.launch.check.machine import check_gpus
from windlass.launch.check.results import Context
from windlass.plan import make_plan
from windlass.runfile import read_run_file
root, answers = Path(sys.argv[1]).parent, []
part = "{name: a part, memory_gib: 69.75, bf16_tflops: 400, memory_gb_per_second: 2000}"
for case in json.loads(sys.argv[2]):
    os.environ |= {"KIND": "", "INIT": "0", "COUNT": "0"} | case  # the library asks for them at every call
    found, nvml = hardware.read_gpus(), hardware.Nvml()
    load = {} if nvml.error else nvml.read_load(nvml.find("b", 0))
    gpu = case.get("PLANNED", part)
    settings = ["cluster.nodes=1", "cluster.gpus_per_node=2", f"cluster.gpu={gpu}"]
    plan = make_plan(read_run_file(Path(sys.argv[1]), settings))
    results = check_gpus(Context(plan.loaded, plan, {}, {}, root, alone=False), plan, found)
    checks = {result.name: f"{result.verdict}: {result.seen}" for result in results}
    answers.append([dataclasses.asdict(found), load, hardware.read_gpu_name(), checks])
print(json.dumps(answers))
"""
STATS = """
import ctypes, json, sys
library = ctypes.CDLL(sys.argv[1])  # who asks for one of this name then gets this one
from windlass.meter import nvml_gpu_stats, print_hw_summary
print(json.dumps(nvml_gpu_stats()))
print_hw_summary()
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler to build a driver's library with")
@pytest.mark.fault("a GPU's driver that does not answer", "`windlass check`", "NVML does not start: Driver Not Loaded")
def test_nvml_answers_are_understood(tmp_path: Path) -> None:
    (tmp_path / "nvml.c").write_text(LIBRARY)
    library = str(tmp_path / "libnvidia-ml.so.1")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", library, tmp_path / "nvml.c"], check=True
    )

    def read(*cases: dict[str, str], folder: Path = tmp_path) -> Any:
        environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
        command = [sys.executable, "-c", READ, str(RECIPE), json.dumps(cases)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        return json.loads(done.stdout)

    h200, a100 = {"PLANNED": "h200"}, {"KIND": "A100", "PLANNED": "a100"}
    fails, stops, sound, other, planned, part = read(
        h200 | {"INIT": "9"}, h200 | {"COUNT": "15"}, h200, a100 | h200, a100, {"KIND": "MIG"}
    )
    for words, found in (
        ("NVML does not start: Driver Not Loaded", fails),
        ("NVML stopped answering: GPU is lost", stops),
        ("NVML does not start: NVML Shared Library Not Found", *read(h200, folder=tmp_path / "nowhere")),
    ):
        facts, _, first_gpu, checks = found
        assert (facts["gpus"], facts["installed"], first_gpu, facts["error"]) == ([], True, "cpu", words)
        assert checks["GPUs"] == f"fail: 0 here, 2 planned: {words}"

    found, load, first_gpu, checks = sound
    assert (len(found["gpus"]), found["driver"], found["error"], first_gpu) == (2, "580.65.06", "", "NVIDIA H200")
    expected: dict[str, Any] = {
        "index": 1, "name": "NVIDIA H200", "uuid": "GPU-b", "processes": [4711], "ecc_uncorrected": 5,
        "remap_pending": True, "throttle": ["software power cap", "hardware thermal slowdown"],
        "nvlinks": 4, "nvlinks_up": 3, "pcie_width": 8, "pcie_width_max": 16,
    }  # fmt: skip
    first, second = found["gpus"]
    assert {key: second[key] for key in expected} == expected
    assert round(second["memory_gib"], 1) == 140.4
    assert (first["processes"], first["remap_pending"]) == ([], None)  # it knows nothing of remapped rows
    busy = {
        "gpu_utilization": 0.9, "gpu_memory_utilization": 0.4, "gpu_power_watts": 650.0,
        "gpu_temperature_celsius": 61, "gpu_sm_clock_mhz": 1001, "gpu_memory_clock_mhz": 1002,
        "gpu_throttle": ["software power cap", "hardware thermal slowdown"],
        "pcie_sent_gb_per_second": 1.024, "pcie_received_gb_per_second": 2.048,
        "nvlink_sent_total_gb": None, "nvlink_received_total_gb": None,
    }  # fmt: skip
    assert load == busy
    assert (checks["GPUs"], checks["GPU kind"]) == ("pass: 2 x NVIDIA H200", "pass: h200, as planned")
    assert checks["GPU processes"] == "fail: GPU 1: processes [4711]"
    assert checks["GPU errors"].endswith("GPU 1: 5 uncorrected, rows wait to be remapped")
    assert checks["GPU clocks"].startswith("fail: GPU 0: software power cap, hardware thermal slowdown; GPU 1")
    assert checks["PCIe width"].startswith("warn: GPU 0: 8 of 16 lanes")
    assert checks["NVLink"].startswith("fail: GPU 0: 3 of 4 links up")

    found, load, first_gpu, checks = other
    assert (first_gpu, [gpu["memory_gib"] for gpu in found["gpus"]]) == ("NVIDIA A100-SXM4-80GB", [80, 80])
    assert load == busy
    assert checks["GPU kind"].startswith("fail: planned for h200; GPU 0 is NVIDIA A100-SXM4-80GB with 80 GiB")
    assert planned[3]["GPU kind"] == "pass: a100-80gb, as planned"

    # One instance of a GPU in MIG mode, as a container has it: of all of the GPU the driver says nothing.
    found, load, first_gpu, checks = part
    (instance,) = found["gpus"]
    assert (instance["name"], instance["uuid"], instance["memory_gib"]) == (first_gpu, "MIG-b", 69.75)
    assert (first_gpu, load["gpu_utilization"]) == ("NVIDIA H200 MIG 3g.71gb", None)
    assert checks["GPUs"] == "fail: 1 here, 2 planned"
    with pytest.raises(UserError, match="is a part of a GPU, which no table has") as caught:
        hardware.find_gpu(first_gpu)
    assert caught.value.problems[0].hint.startswith("give the part's figures: cluster.gpu: {name: …, memory_gib: …")

    done = subprocess.run(
        [warm.python(), "-c", STATS, library], capture_output=True, text=True, check=True,
        env={**os.environ, "KIND": "MIG"},
    )  # fmt: skip
    (stats,), summary = json.loads(done.stdout.partition("\n")[0]), done.stdout.partition("\n")[2]
    assert (stats["name"], stats["memory_total_gib"], stats["gpu_power_watts"]) == (first_gpu, 69.75, 650)
    assert "GPUs        NVIDIA H200 MIG 3g.71gb, 70 GiB" in summary
    assert "driver      580.65.06" in summary
