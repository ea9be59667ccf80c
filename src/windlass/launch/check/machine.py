"""Checks of this machine: GPUs, InfiniBand, memory, limits, the user's account, and the folders that a run writes to.

Linux's files are read below a root, so that a test can plant them.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from windlass import hardware
from windlass.errors import UserError
from windlass.hardware import GIB, GpuReading, Gpus, LocalMachine
from windlass.launch.check.inputs import Installed, check_cuda, size
from windlass.launch.check.results import Result, failed, not_here, passed, skipped, warned
from windlass.launch.interfaces import EXACT, choices
from windlass.plan.script import AnyPlan, ScriptPlan

if TYPE_CHECKING:
    from windlass.plan import Plan
    from windlass.runfile import Loaded, LoadedScript

IPC_LOCK = 14  # number of that capability, capabilities(7)
# NCCL registers a few MiB of buffers per connection; an unprivileged pod's default of 64 KiB holds not one.
LOCKED_LEAST = 64 << 20
# NCCL shares 1 to 10 MiB per channel and peer between ranks of a node, and 64 MiB is the container runtimes' default.
SHARED_PER_RANK = 256 << 20
SHARED_PER_WORKER = 512 << 20  # batches that a loading process holds ready, generously
FILES_LEAST = 4096  # safetensors shards, token files, sockets to each peer, times the ranks of a node
PROCESSES_LEAST = 1024  # torch, tokenizers and loaders start dozens of threads per rank
RDMA = ("infiniband", "roce")
# A fabric's name gives its line rate: infiniband-400. Those that are named by generation are looked up by alias first.
LINE_RATE = re.compile(r"-(\d+)$")
# The kernel log's line for a GPU's fault: NVRM: Xid (PCI:0000:3b:00): 79, pid=…, GPU has fallen off the bus.
XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+)")
# Faults of an application, not of the GPU or its links (NVIDIA, "XID Errors": user application).
XID_APPLICATION = {13, 31, 43, 45, 68}
LOG_BYTES = 1 << 20
OTHER_NODE = "use another node, and have this one drained: nvidia-smi -q shows the GPU's own record"
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
TOKEN_BYTES = 8  # of the token cache: an id, and whether the loss is computed on it
# Written by libraries during a run, and where they put it if nothing is set.
CACHES = {"HF_HOME": ".cache/huggingface", "TRITON_CACHE_DIR": ".triton", "TORCHINDUCTOR_CACHE_DIR": ""}


def check_machine(plan: AnyPlan | None, have: Installed, environ: Mapping[str, str], root: Path) -> list[Result]:
    """What needs no plan is checked without one."""
    gpus = hardware.read_gpus()
    results = [
        *check_limits(root),
        check_account(root, os.getuid(), environ),
        *check_caches(environ),
        *check_interfaces(environ, plan.layout.nodes if plan else 1, root),
        check_torch_cuda(have, gpus),
    ]
    if plan is None:
        return [*results, skipped("this machine", "there is no plan to compare it with")]
    here = hardware.this_machine()
    return [
        *results,
        *check_gpus(plan, gpus, root),
        check_host_memory(plan, here),
        check_processors(plan, here),
        check_shared_memory(plan, root / "dev/shm"),
        check_locked_memory(plan, root),
        check_infiniband(plan, root, environ),
        check_peer_memory(plan, root),
    ]


def check_torch_cuda(have: Installed, gpus: Gpus) -> Result:
    if "torch" not in have:
        return skipped("CUDA", "torch is not installed")
    try:
        import torch.cuda
        from torch.version import cuda as built_for
    except (ImportError, OSError) as error:
        return skipped("CUDA", f"torch can't be imported: {str(error).splitlines()[0]}")
    return check_cuda(built_for, gpus.driver, len(gpus.gpus), torch.cuda.is_available)


def read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# --- memory, processors, limits -------------------------------------------------------------------------------------


def check_host_memory(plan: AnyPlan, here: LocalMachine) -> Result:
    """The host's memory, or the control group's limit, against what the plan needs on a node."""
    if isinstance(plan, ScriptPlan):
        return skipped("host memory", f"{here.memory_gib:.1f} GiB; what a script needs is not known")
    need, have = plan.cost.host_gib, here.memory_gib
    limit = f", limited to {here.memory_limit_gib:.1f} by the control group" if here.memory_limit_gib else ""
    seen = f"{have:.1f} GiB{limit}; the run needs {need:.1f}"
    if have <= 0:
        return skipped("host memory", "this system does not report it")
    if have < need:
        return failed("host memory", seen, "raise cluster.memory_limit, or choose a layout that loads less per node")
    return passed("host memory", seen)


def check_processors(plan: AnyPlan, here: LocalMachine) -> Result:
    """One processor per rank to feed it, and one per loading process."""
    ranks = plan.layout.gpus_per_node
    need = ranks * (1 + plan.loaded.run.workers)
    seen = f"{here.cpus} for {ranks} ranks" + (f" and {need - ranks} loading processes" if need > ranks else "")
    if here.cpus < need:
        return warned("processors", seen, f"set cluster.cpu to at least {need}: ranks wait for each other's processor")
    return passed("processors", seen)


def check_shared_memory(plan: AnyPlan, shm: Path) -> Result:
    """Ranks of a node exchange data in /dev/shm unless the GPUs' own links are used, loading processes always."""
    try:
        stat = os.statvfs(shm)
    except OSError as error:
        return skipped("/dev/shm", f"{shm}: {error.strerror}")
    ranks, workers = plan.layout.gpus_per_node, plan.loaded.run.workers
    need = (ranks * SHARED_PER_RANK if ranks > 1 else 0) + ranks * workers * SHARED_PER_WORKER
    free, total = stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize
    seen = f"{free / GIB:.2f} of {total / GIB:.2f} GiB free; the run needs {need / GIB:.2f}"
    if free >= need:
        return passed("/dev/shm", seen)
    key = "script.workers" if isinstance(plan, ScriptPlan) else "train.dataloader_num_workers"
    hint = f"cluster.large_shm: true mounts a larger one; or {key}: 0"
    return failed("/dev/shm", seen, hint, plan.loaded.where("cluster.large_shm"))


def limits(root: Path) -> dict[str, float]:
    """Soft limits of this process, by the kernel's names."""
    rows = re.findall(r"^(Max [a-z ]+?)\s{2,}(\S+)", read_text(root / "proc/self/limits"), re.MULTILINE)
    return {name: math.inf if value == "unlimited" else float(value) for name, value in rows}


def check_limits(root: Path) -> list[Result]:
    """Open files of this process; its processes, by the user's limit and the control group's."""
    found = limits(root)
    group = read_text(root / "sys/fs/cgroup/pids.max").strip()
    if group.isdigit():
        found["Max processes"] = min(float(group), found.get("Max processes", math.inf))
    results = []
    for name, least, otherwise, hint in (
        ("open files", FILES_LEAST, warned, f"ulimit -n {FILES_LEAST}, or the node's default"),
        ("processes", PROCESSES_LEAST, failed, f"raise the pod's pids limit to {PROCESSES_LEAST} or more"),
    ):
        limit = found.get(f"Max {name}")
        if limit is None:
            results.append(skipped(name, "the kernel reports no limit"))
        elif limit < least:
            results.append(otherwise(name, f"at most {limit:.0f}", hint))
        else:
            results.append(passed(name, "unlimited" if limit == math.inf else f"at most {limit:,.0f}"))
    return results


def check_locked_memory(plan: AnyPlan, root: Path) -> Result:
    """InfiniBand pins memory: an unlimited memlock, or the capability that lifts it."""
    if not wants_rdma(plan):
        return skipped("locked memory", "this run uses no RDMA")
    limit = limits(root).get("Max locked memory")
    if limit is None:
        return skipped("locked memory", "the kernel reports no limit")
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)", read_text(root / "proc/self/status"), re.MULTILINE)
    lifted = bool(effective and int(effective[1], 16) >> IPC_LOCK & 1)
    seen = f"{'unlimited' if limit == math.inf else f'{limit / 2**20:.1f} MiB'}{', IPC_LOCK is effective' * lifted}"
    if limit < LOCKED_LEAST and not lifted:
        hint = "raise memlock in the node's container runtime (IPC_LOCK does nothing for a user other than root)"
        return failed("locked memory", f"{seen}: InfiniBand can't register its buffers", hint)
    return passed("locked memory", seen)


def check_account(root: Path, uid: int, environ: Mapping[str, str]) -> Result:
    """A number without an account, as OpenShift gives it: Python's getpass, which torch calls, needs a name."""
    lines = (line.split(":") for line in read_text(root / "etc/passwd").splitlines())
    name = next((fields[0] for fields in lines if len(fields) > 2 and fields[2] == str(uid)), None)
    if name is not None:
        return passed("account", f"{name} ({uid})")
    given = next((key for key in ("LOGNAME", "USER", "LNAME", "USERNAME") if environ.get(key)), None)
    if given:
        return passed("account", f"user {uid} has no entry in /etc/passwd, {given} names it {environ[given]}")
    return failed("account", f"user {uid} has no entry in /etc/passwd, and LOGNAME is not set", "set LOGNAME: windlass")


# --- network --------------------------------------------------------------------------------------------------------


def wants_rdma(plan: AnyPlan) -> bool:
    return plan.layout.nodes > 1 and plan.machine.network.name.startswith(RDMA)


def check_interfaces(environ: Mapping[str, str], nodes: int, root: Path) -> list[Result]:
    """Each interface that the environment chooses exists, is up and has an address."""
    chosen = {choice.variable: choice for choice in choices(environ, nodes, root)}
    results = []
    for variable in EXACT:
        title, choice = f"interface {variable}", chosen.get(variable)
        if choice is None:
            results.append(skipped(title, "is not set: the library chooses"))
        elif choice.problem:
            hint = f"set {variable} to one that has an address, or cluster.networks so that the pod gets it"
            results.append(failed(title, choice.problem, hint))
        else:
            shown = ", ".join(f"{name} {address}" for name, address in choice.addresses)
            results.append(passed(title, f"{choice.pattern}: {shown}"))
    return results


@dataclass(frozen=True, slots=True)
class Port:
    """A port of an RDMA card."""

    device: str
    number: str
    state: str  # ACTIVE, INIT, DOWN …
    gigabits: float
    usable: bool  # there is a verbs device for it in this container

    @property
    def name(self) -> str:
        return f"{self.device}:{self.number}"


def rdma_ports(root: Path, hca: str = "") -> list[Port]:
    """Those that this container sees and NCCL_IB_HCA lets NCCL use: prefixes, exact with =, all but these with ^."""
    exclude, exact = hca.startswith("^"), "=" in hca[:2]
    names = [name for name in hca.lstrip("^=").split(",") if name]
    ports = []
    for path in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        device = path.parent.parent.name
        verbs = (root / "sys/class/infiniband_verbs").glob("*")
        devices = [one.name for one in verbs if read_text(one / "ibdev").strip() == device]
        rate = re.match(r"[\d.]+", read_text(path / "rate"))
        state = read_text(path / "state").partition(":")[2].strip()
        usable = any((root / "dev/infiniband" / name).exists() for name in devices)
        port = Port(device, path.name, state, float(rate[0]) if rate else 0.0, usable)
        named = any(port.name == n or (device == n if exact else device.startswith(n)) for n in names)
        if not names or named != exclude:
            ports.append(port)
    return ports


def check_infiniband(plan: AnyPlan, root: Path, environ: Mapping[str, str]) -> Result:
    """As many active ports as the plan counts on, at the rate that the fabric's name states."""
    title = "InfiniBand"
    if not wants_rdma(plan):
        return skipped(title, "this run uses none")
    network, nics, where = plan.machine.network, plan.machine.nics_per_node, plan.loaded.where("cluster.network")
    if not (every := rdma_ports(root)):
        hint = "request the network cards in cluster.extended_resources, or set cluster.network to what there is"
        return failed(title, f"{network.name} is planned, and this container sees no RDMA card", hint, where)
    hca = environ.get("NCCL_IB_HCA", "")
    if not (ports := rdma_ports(root, hca)):
        names = ", ".join(port.name for port in every)
        return failed(title, f"NCCL_IB_HCA={hca} matches none of {names}", "name one of these", where)
    active = [port for port in ports if port.state == "ACTIVE"]
    seen = ", ".join(f"{port.name} {port.state or 'unknown'} at {port.gigabits:g} Gb/s" for port in ports)
    if len(active) < nics:
        hint = "the cable, the switch port or the subnet manager; or choose others with NCCL_IB_HCA"
        return failed(title, f"{len(active)} ports active, {nics} planned: {seen}", hint, where)
    if closed := ", ".join(port.name for port in active if not port.usable):
        hint = "the card is not given to this container: request it in cluster.extended_resources"
        return failed(title, f"no device below /dev/infiniband for {closed}", hint, where)
    rate = LINE_RATE.search(network.name)
    if rate and any(port.gigabits < float(rate[1]) for port in active):
        hint = "a cable or port that trained down; or state the real rate in cluster.network"
        return failed(title, f"slower than {network.name}: {seen}", hint, where)
    return passed(title, seen)


def check_peer_memory(plan: AnyPlan, root: Path) -> Result:
    """GPU memory straight to the network card: a kernel module, or DMA-BUF of newer kernels with the open driver."""
    title = "GPUDirect RDMA"
    if not wants_rdma(plan) or plan.machine.gpu.name == "cpu":
        return skipped(title, "this run uses none")
    for name in ("nvidia_peermem", "nv_peer_mem"):
        if (root / "sys/module" / name).is_dir():
            return passed(title, name)
    kernel = tuple(int(part) for part in re.findall(r"\d+", read_text(root / "proc/sys/kernel/osrelease"))[:2])
    if kernel >= (5, 12) and "open" in read_text(root / "proc/driver/nvidia/version").lower():
        return passed(title, f"DMA-BUF: kernel {kernel[0]}.{kernel[1]} and NVIDIA's open kernel module")
    hint = "load nvidia_peermem on the node (GPU operator: driver.rdma.enabled); transfers go through host memory"
    return warned(title, "no peer memory module, and no open driver for DMA-BUF", hint)


# --- GPUs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Question:
    """One property of each GPU: how it reads (None: the driver does not report it), and when it is wrong."""

    name: str
    text: Callable[[GpuReading], str | None]
    bad: Callable[[GpuReading], bool]
    hint: str
    otherwise: Callable[[str, str, str], Result] = failed


def describe_errors(gpu: GpuReading) -> str | None:
    if gpu.ecc_uncorrected is None and gpu.remap_pending is None:
        return None
    return f"{gpu.ecc_uncorrected or 0} uncorrected" + ", rows wait to be remapped" * bool(gpu.remap_pending)


QUESTIONS = (
    Question(
        "GPU processes",
        lambda g: None if g.processes is None else f"processes {', '.join(map(str, g.processes)) or 'none'}",
        lambda g: bool(g.processes),
        "end them, or request GPUs that are not shared",
    ),
    Question("GPU errors", describe_errors, lambda g: bool(g.ecc_uncorrected or g.remap_pending), OTHER_NODE),
    Question(
        "GPU clocks",
        lambda g: None if g.throttle is None else ", ".join(g.throttle) or "not throttled",
        lambda g: bool(hardware.THROTTLE_FAULTS & set(g.throttle or ())),
        f"cooling or power supply; {OTHER_NODE}",
    ),
    Question(
        "GPU persistence",
        lambda g: None if g.persistence is None else "on" if g.persistence else "off",
        lambda g: not g.persistence,
        "nvidia-smi -pm 1 on the node: without it the first call of each process waits for the driver",
        warned,
    ),
    Question(
        "PCIe width",
        lambda g: f"{g.pcie_width} of {g.pcie_width_max or '?'} lanes" if g.pcie_width else None,
        lambda g: bool(g.pcie_width and g.pcie_width_max and g.pcie_width < g.pcie_width_max),
        f"a badly seated card, or a slot with fewer lanes; {OTHER_NODE}",
        warned,
    ),
)
NVLINK = Question(
    "NVLink",
    lambda g: f"{g.nvlinks_up} of {g.nvlinks} links up" if g.nvlinks else "no links",
    lambda g: not g.nvlinks or (g.nvlinks_up or 0) < g.nvlinks,
    f"set cluster.link: pcie if these GPUs have no NVLink; else {OTHER_NODE}",
)


def check_gpus(plan: AnyPlan, found: Gpus, root: Path) -> list[Result]:
    """As many as planned, the planned ones, free, healthy, and connected at full width."""
    if plan.machine.gpu.name == "cpu":
        return [skipped("GPUs", "the run computes on the CPU")]
    if not found.installed:
        return [skipped("GPUs", found.error), check_kernel_log(root)]
    wanted, gpus = plan.layout.gpus_per_node, found.gpus
    names = Counter(gpu.name for gpu in gpus)
    seen = ", ".join(f"{count} x {name}" for name, count in names.items())
    if len(gpus) < wanted:
        seen = f"{len(gpus)} here, {wanted} planned" + (f": {found.error}" if found.error else "")
        where = plan.loaded.where("cluster.gpus_per_node")
        results = [failed("GPUs", seen, "the pod's request for GPUs, or cluster.gpus_per_node", where)]
    elif len(names) > 1:
        results = [warned("GPUs", f"of different kinds: {seen}", "one kind per node"), check_gpu_kind(plan, gpus)]
    else:
        results = [passed("GPUs", seen), check_gpu_kind(plan, gpus)]
    if gpus:
        if not isinstance(plan, ScriptPlan):  # what a script needs is not known
            need = plan.cost.gpu_gib
            memory = Question(
                "GPU memory",
                lambda g: f"{g.free_gib:.1f} of {g.memory_gib:.1f} GiB free",
                lambda g: g.free_gib < need,
                f"the run needs {need:.1f} GiB of each: end what else runs on them",
            )
            results.append(ask_each(memory, gpus))
        results += [ask_each(question, gpus) for question in QUESTIONS]
        link = plan.machine.link.name
        if plan.layout.gpus_per_node == 1:
            results.append(skipped("NVLink", "one GPU per node: nothing to link"))
        elif not link.startswith("nvlink"):
            results.append(skipped("NVLink", f"planned between GPUs of a node is {link}"))
        else:
            results.append(ask_each(NVLINK, gpus))
    return [*results, check_kernel_log(root)]


def check_gpu_kind(plan: AnyPlan, gpus: Sequence[GpuReading]) -> Result:
    """The plan's figures are those of one GPU: that one should be here."""
    planned, others = plan.machine.gpu, []
    for gpu in gpus:
        try:
            same = hardware.gpu(gpu.name).name == planned.name
        except UserError:  # not in the table: compare its memory
            same = abs(gpu.memory_gib - planned.memory_gib) < 0.03 * planned.memory_gib
        if not same:
            others.append(f"GPU {gpu.index} is {gpu.name} with {gpu.memory_gib:.0f} GiB")
    if others:
        hint, where = "state what is there in cluster.gpu, and plan again", plan.loaded.where("cluster.gpu")
        return failed("GPU kind", f"planned for {planned.name}; {'; '.join(others)}", hint, where)
    return passed("GPU kind", f"{planned.name}, as planned")


def ask_each(question: Question, gpus: Sequence[GpuReading]) -> Result:
    """One result for all GPUs: the bad ones named, else those that don't report it, else what they all report."""
    texts = {gpu.index: question.text(gpu) for gpu in gpus}
    if wrong := [gpu for gpu in gpus if texts[gpu.index] is not None and question.bad(gpu)]:
        faults = "; ".join(f"GPU {gpu.index}: {texts[gpu.index]}" for gpu in wrong)
        return question.otherwise(question.name, faults, question.hint)
    if silent := [str(index) for index, text in texts.items() if text is None]:
        return skipped(question.name, f"GPU {', '.join(silent)}: the driver does not report it")
    alike = Counter(texts.values())
    return passed(question.name, "; ".join(f"{n} x {text}" if n > 1 else str(text) for text, n in alike.items()))


def check_kernel_log(root: Path) -> Result:
    """GPU faults in the kernel's log, which most containers may not read."""
    title, log = "GPU faults (Xid)", read_kernel_log(root)
    if log is None:
        return skipped(title, "the kernel's log can't be read here", "on the node: dmesg | grep Xid")
    events = [(device, int(number)) for device, number in XID.findall(log)]
    faults = [f"{device}: Xid {number}" for device, number in events if number not in XID_APPLICATION]
    if faults:
        return failed(title, "; ".join(dict.fromkeys(faults)), OTHER_NODE)
    return passed(title, f"none of the GPU's own in the kernel's log, {len(events)} of applications")


def read_kernel_log(root: Path) -> str | None:
    """The ring buffer if it may be read: a record per read, without waiting for a new one."""
    try:
        file = os.open(root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    log = b""
    try:
        while len(log) < LOG_BYTES and (record := os.read(file, 8192)):
            log += record
    except BlockingIOError:  # all of it is read
        pass
    except OSError:
        if not log:
            return None
    finally:
        os.close(file)
    return log.decode(errors="replace")


# --- folders --------------------------------------------------------------------------------------------------------


def existing(path: Path) -> Path:
    """The deepest folder of a path that exists: where a missing one would be made."""
    return next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))


def try_folder(folder: Path) -> str:
    """Why files can't be written, locked and renamed in a folder (or where it would be made); empty if they can."""
    place = existing(folder)
    if not place.is_dir():
        return f"{place} is a file"
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".windlass-check-", delete=False) as file:
            path = Path(file.name)
            try:
                file.write(b"windlass")
                file.flush()
                os.fsync(file.fileno())
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path = path.replace(path.with_suffix(".renamed"))
            finally:
                path.unlink(missing_ok=True)
    except OSError as error:
        return f"{place}: {error.strerror}"
    return ""


def check_run_folder(loaded: Loaded | LoadedScript, *, elsewhere: bool) -> Result:
    """The run folder, which all nodes share."""
    folder, where = Path(loaded.run.folder), loaded.where(loaded.run.folder_key)
    if elsewhere and not folder.is_dir():
        return not_here("run folder", str(folder))
    if wrong := try_folder(folder):
        hint = "mount the volume writable, or name another folder; a read-only file system is so for root too"
        return failed("run folder", f"files can't be written, locked and renamed: {wrong}", hint, where)
    made = "" if folder.is_dir() else ", where it will be created"
    return passed("run folder", f"written, locked and renamed in {existing(folder)}{made}")


def check_disk_space(plan: Plan | None, *, elsewhere: bool, free: float | None = None) -> Result:
    """Space for what the run has yet to write; a warning for the merged model that an export may write."""
    if plan is None:
        return skipped("disk space", "there is no plan")
    folder, where = Path(plan.loaded.run.train.output_dir), plan.loaded.where("train.output_dir")
    if elsewhere and not folder.is_dir():
        return not_here("disk space", str(folder))
    run, merged, words = space_needed(plan)
    free = shutil.disk_usage(existing(folder)).free if free is None else free
    if free < run:
        hint = "free some space, lower train.save_total_limit, or name a larger volume in train.output_dir"
        return failed("disk space", f"{size(free)} free in {folder}; the run needs {size(run)} ({words})", hint, where)
    if free < run + merged:
        seen = f"{size(free)} free in {folder}: enough for the run ({words}), not for a merged model of {size(merged)}"
        return warned("disk space", seen, "export the adapter alone, or the merged model to another volume", where)
    return passed("disk space", f"{size(free)} free in {folder}: {words}, merged model {size(merged)}")


def space_needed(plan: Plan) -> tuple[float, float, str]:
    """Bytes that the run has yet to write, bytes of a merged model, and the former in words."""
    schedule, adapter, run = plan.schedule, plan.adapter, plan.loaded.run
    kept = schedule.checkpoints_kept
    if kept is None:  # the number of rows is not known: the limit, or at least one
        kept = run.train.save_total_limit or 1
    # One more than is kept: the newest is complete before the oldest goes.
    checkpoints = (kept + 1 if kept else 0) * schedule.checkpoint_bytes
    final = adapter.trainable * adapter.dtype_bytes
    tokens = (schedule.steps_per_epoch or 0) * schedule.tokens_per_step * TOKEN_BYTES
    words = f"checkpoints {size(checkpoints)}, final adapter {size(final)}, tokens {size(tokens)}"
    folder = Path(run.train.output_dir)
    there = min(checkpoints, disk_usage(folder / "checkpoints")) + min(tokens, disk_usage(folder / "tokens"))
    if there:
        words += f", of which {size(there)} are there"
    return checkpoints + final + tokens - there, plan.total * BYTES[run.model.torch_dtype], words


def disk_usage(folder: Path) -> int:
    """Bytes that a folder takes on its disk."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # a checkpoint that is being removed
                total += os.lstat(Path(parent) / name).st_blocks * 512  # man inode: in such units
    return total


def check_caches(environ: Mapping[str, str]) -> list[Result]:
    """HOME, temporary files and the libraries' caches."""
    results = []
    for name, default in {"HOME": "", "TMPDIR": "", **CACHES}.items():
        title, path = f"folder {name}", environ.get(name, "")
        if not path and name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR"):
            path = tempfile.gettempdir()
        elif not path and default:
            path = str(Path(environ.get("HOME") or "/") / default)
        if not path:
            hint = "set HOME to a folder that can be written, as a variable in cluster.env"
            results.append(failed(title, "is not set", hint))
        elif wrong := try_folder(Path(path)):
            hint = f"set {name} in cluster.env to a folder that can"
            results.append(failed(title, f"can't be written: {wrong}", hint))
        else:
            results.append(passed(title, path if environ.get(name) else f"{path}, by default"))
    return results
