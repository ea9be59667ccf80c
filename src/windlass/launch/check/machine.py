"""Checks of this machine: GPUs, InfiniBand, memory, limits, the user's account, and the folders that a run writes to.

Linux's files are read below the context's root, so that a test can replace them.
"""

import fcntl
import math
import os
import re
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from windlass import hardware
from windlass.errors import UserError
from windlass.hardware import GIB, GpuReading, Gpus, LocalMachine, read_text
from windlass.launch.check.inputs import check_cuda, format_size
from windlass.launch.check.results import NO_PLAN, Context, Result, failed, passed, skipped, skipped_elsewhere, warned
from windlass.launch.job import size_shm
from windlass.observe.format import format_plural
from windlass.plan import Plan
from windlass.plan.finished import has_finished, require_own_folder
from windlass.plan.script import AnyPlan, ScriptPlan
from windlass.ranks.place import list_choices
from windlass.runfile import Loaded, RunFile
from windlass.variables import find_unread

IPC_LOCK = 14  # the capability's number, capabilities(7)
# NCCL registers a few MiB of buffers per connection; an unprivileged pod's default of 64 KiB is less than one.
LOCKED_LEAST = 64 << 20
FILES_LEAST = 4096  # safetensors shards, token files, sockets to each peer, times the ranks of a node
PROCESSES_LEAST = 1024  # torch, tokenizers and loaders start dozens of threads per rank
RDMA = ("infiniband", "roce")
# The kernel log's line for a GPU's fault: NVRM: Xid (PCI:0000:3b:00): 79, pid=…, GPU has fallen off the bus.
XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+)")
# Faults of an application, not of the GPU or its links (NVIDIA, "XID Errors": user application).
XID_APPLICATION = {13, 31, 43, 45, 68}
LOG_BYTES = 1 << 20
OTHER_NODE = "use another node, and have this one drained: nvidia-smi -q shows the GPU's own record"
# Readings of each GPU: what to do if one is wrong, and how bad that is.
GPU_CHECKS = {
    "GPU memory": ("end what else runs on them, or lower what the run needs", failed),
    "GPU processes": ("end them, or request GPUs that are not shared", failed),
    "GPU errors": (OTHER_NODE, failed),
    "GPU clocks": (f"cooling or power supply; {OTHER_NODE}", failed),
    "PCIe width": (f"a badly seated card, or a slot with fewer lanes; {OTHER_NODE}", warned),
    "NVLink": (f"set cluster.link: pcie if these GPUs have no NVLink; else {OTHER_NODE}", failed),
}
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
TOKEN_BYTES = 8  # per token in the token cache: an id, and whether the loss is computed on it


def check_machine(c: Context) -> list[Result]:
    gpus = hardware.read_gpus()
    results = [
        *check_limits(c, hardware.read_this_machine()),
        check_account(c, os.getuid()),
        *check_caches(c),
        *check_variables(c),
        *check_interfaces(c),
        *check_hostname(c, list_addresses(socket.gethostname())),
        check_cuda(c, gpus),
    ]
    if c.plan is None:
        return [*results, skipped("GPUs and InfiniBand", NO_PLAN)]
    return [*results, *check_gpus(c, c.plan, gpus), check_infiniband(c, c.plan)]


def check_limits(c: Context, here: LocalMachine) -> list[Result]:
    """Compare this process's limits with the least that any run needs and, with a plan, that this run needs."""
    plan = c.plan
    root = c.root
    found = re.findall(r"^Max ([a-z ]+?)\s{2,}(\S+)", read_text(root / "proc/self/limits"), re.MULTILINE)
    limits = {name: math.inf if value == "unlimited" else float(value) for name, value in found}
    for group in hardware.list_control_groups("pids", root / "sys/fs/cgroup", root / "proc/self/cgroup"):
        most = read_text(group / "pids.max").strip()
        if most.isdigit():
            limits["processes"] = min(float(most), limits.get("processes", math.inf))
    files, processes, locked = (limits.get(name) for name in ("open files", "processes", "locked memory"))
    seen = {name: "unlimited" if limit == math.inf else f"at most {limit:,.0f}" for name, limit in limits.items()}
    # check: available amount (None: not reported), the least, what to do, how bad it is. `seen` has the text shown.
    rows: dict[str, tuple[float | None, float, str, Callable[..., Result]]] = {
        "open files": (files, FILES_LEAST, f"ulimit -n {FILES_LEAST}, or the node's default", warned),
        "processes": (processes, PROCESSES_LEAST, f"raise the pod's pids limit to {PROCESSES_LEAST} or more", failed),
    }
    if plan is not None:
        ranks = plan.layout.gpus_per_node
        workers = plan.run.workers
        cpus = ranks * (1 + workers)
        each = f", each with {workers} for loading" if workers else ""
        seen["processors"] = f"{here.cpus} for {format_plural(ranks, 'rank')}{each}"
        hint = f"set cluster.cpu to at least {cpus}: ranks wait for each other's processor"
        rows["processors"] = (here.cpus, cpus, hint, warned)
        _, shared = size_shm(plan)
        free = None
        with suppress(OSError):
            stat = os.statvfs(root / "dev/shm")
            free = stat.f_bavail * stat.f_frsize / GIB
            seen["/dev/shm"] = f"{free:.2f} GiB free; the run needs {shared:.2f}"
        hint = "cluster.large_shm: true mounts a larger one; or let the ranks load their data without workers"
        rows["/dev/shm"] = (free, shared, hint, failed)
        if not isinstance(plan, ScriptPlan):  # a script's needs are unknown
            limit = f", limited to {here.memory_limit_gib:.1f} by the control group" if here.memory_limit_gib else ""
            seen["host memory"] = f"{here.memory_gib:.1f} GiB{limit}; the run needs {plan.cost.host_gib:.1f}"
            hint = "raise cluster.memory_limit, or choose a layout that loads less per node"
            rows["host memory"] = (here.memory_gib or None, plan.cost.host_gib, hint, failed)
        if wants_rdma(plan):  # RDMA pins memory: unlimited memlock, or the capability that lifts it
            effective = re.search(r"^CapEff:\s*([0-9a-f]+)", read_text(root / "proc/self/status"), re.MULTILINE)
            if effective and int(effective[1], 16) >> IPC_LOCK & 1:
                locked = math.inf
                seen["locked memory"] = "IPC_LOCK is effective"
            hint = "raise memlock in the node's container runtime (IPC_LOCK does nothing for a user other than root)"
            rows["locked memory"] = (locked, LOCKED_LEAST, hint, failed)

    results = []
    for name, (have, least, hint, otherwise) in rows.items():
        if have is None:
            results.append(skipped(name, "this system does not report it"))
        else:
            results.append(otherwise(name, seen[name], hint) if have < least else passed(name, seen[name]))
    return results


def check_account(c: Context, uid: int) -> Result:
    """Check that the user has a name: OpenShift gives only a number, and torch calls getpass, which needs one."""
    if name := re.search(rf"^([^:\n]*):[^:\n]*:{uid}:", read_text(c.root / "etc/passwd"), re.MULTILINE):
        return passed("account", f"{name[1]} ({uid})")
    given = next((key for key in ("LOGNAME", "USER", "LNAME", "USERNAME") if c.environ.get(key)), None)
    if given:
        return passed("account", f"user {uid} has no entry in /etc/passwd, {given} names it {c.environ[given]}")
    return failed("account", f"user {uid} has no entry in /etc/passwd, and LOGNAME is not set", "set LOGNAME: windlass")


def wants_rdma(plan: AnyPlan) -> bool:
    return plan.layout.nodes > 1 and plan.machine.network.name.startswith(RDMA)


def check_variables(c: Context) -> list[Result]:
    """Warn about NCCL variables that nothing reads: NCCL ignores a misspelt one without a message."""
    hint = "correct it where it is set: the image, the pod or the shell"
    return [warned(f"variable {name}", problem, hint) for name, problem in find_unread(c.environ).items()]


def check_run_variables(c: Context) -> list[Result]:
    """Do the same for the variables in the run file, which needs no machine."""
    found = find_unread(c.loaded.run.cluster.env)
    where = c.loaded.where
    hint = "correct it there, or remove it"
    return [warned(f"variable {name}", problem, hint, where(f"cluster.env.{name}")) for name, problem in found.items()]


def check_interfaces(c: Context) -> list[Result]:
    """Check that each interface chosen by the environment exists, is up and has an address."""
    hint = "set it to one that has an address, or give the pod one: `networks` in its section of cluster"
    results = []
    for choice in list_choices(c.environ, c.plan.layout.nodes if c.plan else 1, c.root):
        title = f"interface {choice.variable}"
        shown = ", ".join(f"{name} {address}" for name, address in choice.addresses)
        problem = choice.problem
        results.append(failed(title, problem, hint) if problem else passed(title, f"{choice.pattern}: {shown}"))
    return results


def list_addresses(name: str) -> list[str]:
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def check_hostname(c: Context, addresses: Sequence[str]) -> list[Result]:
    """Check the address of the host's name: gloo, which also connects ranks with GPUs, listens on it by default."""
    alone = c.plan is None or c.plan.layout.nodes == 1 or c.plan.machine.network.name == "loopback"
    if alone or c.environ.get("GLOO_SOCKET_IFNAME"):
        return []
    title = "address of this host's name"
    seen = ", ".join(dict.fromkeys(addresses)) or "none"
    if not addresses or addresses[0].startswith("127.") or addresses[0] == "::1":
        others = ", ".join(path.name for path in sorted(c.root.glob("sys/class/net/*")) if path.name != "lo")
        hint = f"set GLOO_SOCKET_IFNAME in cluster.env to the interface that they reach: {others or 'ip address'}"
        return [warned(title, f"{seen}: other nodes can't reach gloo there", hint)]
    return [passed(title, seen)]


def _read_ports(root: Path, hca: str) -> tuple[list[str], dict[str, tuple[str, str, bool]]]:
    """Return all InfiniBand ports of this container, and state, rate and whether there is a device file of those that
    NCCL_IB_HCA chooses: it has prefixes, exact names with =, all but these with ^."""
    every = []
    chosen = {}
    exclude = hca.startswith("^")
    exact = "=" in hca[:2]
    wanted = [name for name in hca.lstrip("^=").split(",") if name]
    for path in sorted(root.glob("sys/class/infiniband/*/ports/*")):
        device = path.parent.parent.name
        name = f"{device}:{path.name}"
        every.append(name)
        named = any(name == w or (device == w if exact else device.startswith(w)) for w in wanted)
        if not wanted or exclude != named:
            state = read_text(path / "state").partition(":")[2].strip()
            rate = read_text(path / "rate").partition(" ")[0]
            verbs = [v for v in root.glob("sys/class/infiniband_verbs/*") if read_text(v / "ibdev").strip() == device]
            chosen[name] = state, rate, any((root / "dev/infiniband" / verb.name).exists() for verb in verbs)
    return every, chosen


def check_infiniband(c: Context, plan: AnyPlan) -> Result:
    """Check for as many active ports as planned, at the rate in the fabric's name."""
    title = "InfiniBand"
    network = plan.machine.network.name
    cards = plan.machine.nics_per_node
    if not wants_rdma(plan):
        return skipped(title, "this run uses none")
    hca = c.environ.get("NCCL_IB_HCA", "")
    every, chosen = _read_ports(c.root, hca)
    shown = ", ".join(f"{name} {state or 'unknown'} at {rate or '?'} Gb/s" for name, (state, rate, _) in chosen.items())
    active = [name for name, (state, _, _) in chosen.items() if state == "ACTIVE"]
    closed = ", ".join(name for name in active if not chosen[name][2])
    slowest = min((float(chosen[name][1] or 0) for name in active), default=0.0)
    request = "request the network cards: `extended_resources` in the platform's section of cluster"
    for bad, problem, hint in (
        (not every, f"{network} is planned, and this container sees no RDMA card", request),
        (not chosen, f"NCCL_IB_HCA={hca} matches none of {', '.join(every)}", "name one of these"),
        (len(active) < cards, f"{len(active)} ports active, {cards} planned: {shown}",
         "the cable, the switch port or the subnet manager; or choose others with NCCL_IB_HCA"),
        (closed, f"no device below /dev/infiniband for {closed}", request),
    ):  # fmt: skip
        if bad:
            return failed(title, problem, hint, c.loaded.where("cluster.network"))
    line_rate = network.rpartition("-")[2]  # a fabric's name gives it: infiniband-400
    if line_rate.isdigit() and slowest < float(line_rate):
        hint = "a cable or port that trained down; or state the real rate in cluster.network"
        return warned(title, f"slower than {network}: {shown}", hint)
    return passed(title, shown)


def check_gpus(c: Context, plan: AnyPlan, found: Gpus) -> list[Result]:
    """Check that the GPUs are as many and of the kind planned, free, healthy, and connected at full width."""
    wanted = plan.layout.gpus_per_node
    gpus = hardware.keep_visible(found.gpus, c.environ)
    if plan.machine.gpu.name == "cpu":
        return [skipped("GPUs", "the run computes on the CPU")]
    if not found.installed:
        return [skipped("GPUs", found.error), check_kernel_log(c)]
    seen = ", ".join(f"{count} x {name}" for name, count in Counter(gpu.name for gpu in gpus).items())
    if len(gpus) < wanted:
        seen = f"{len(gpus)} here, {wanted} planned" + (f": {found.error}" if found.error else "")
        where = c.loaded.where("cluster.gpus_per_node")
        results = [failed("GPUs", seen, "the pod's request for GPUs, or cluster.gpus_per_node", where)]
    else:
        results = [passed("GPUs", seen), check_gpu_kind(c, plan, gpus)]
    facts = {gpu.index: describe_gpu(plan, gpu) for gpu in gpus}
    for name, (hint, otherwise) in GPU_CHECKS.items():
        rows = {index: each[name] for index, each in facts.items() if name in each}
        wrong = "; ".join(f"GPU {index}: {text}" for index, (text, bad) in rows.items() if text and bad)
        silent = ", ".join(str(index) for index, (text, _) in rows.items() if text is None)
        alike = Counter(text for text, _ in rows.values())
        if wrong:
            results.append(otherwise(name, wrong, hint))
        elif silent:
            results.append(skipped(name, f"GPU {silent}: the driver does not report it"))
        elif rows:
            results.append(
                passed(name, "; ".join(f"{n} x {text}" if n > 1 else str(text) for text, n in alike.items()))
            )
    return [*results, check_kernel_log(c)]


def check_gpu_kind(c: Context, plan: AnyPlan, gpus: tuple[GpuReading, ...]) -> Result:
    planned = plan.machine.gpu
    others = []
    for gpu in gpus:
        try:
            same = hardware.find_gpu(gpu.name).name == planned.name
        except UserError:  # not in the table: compare its memory
            same = abs(gpu.memory_gib - planned.memory_gib) < 0.03 * planned.memory_gib
        if not same:
            others.append(f"GPU {gpu.index} is {gpu.name} with {gpu.memory_gib:.0f} GiB")
    if others:
        hint = "state what is there in cluster.gpu, and plan again"
        where = c.loaded.where("cluster.gpu")
        return failed("GPU kind", f"planned for {planned.name}; {'; '.join(others)}", hint, where)
    return passed("GPU kind", f"{planned.name}, as planned")


def describe_gpu(plan: AnyPlan, gpu: GpuReading) -> dict[str, tuple[str | None, bool]]:
    """Return each check's reading (None: the driver doesn't report it) and whether it is wrong."""
    processes = gpu.processes
    throttle = gpu.throttle
    width = gpu.pcie_width
    widest = gpu.pcie_width_max
    unknown = gpu.ecc_uncorrected is None and gpu.remap_pending is None
    errors = f"{gpu.ecc_uncorrected or 0} uncorrected"
    if gpu.remap_pending:
        errors += ", rows wait to be remapped"
    clocks = None if throttle is None else ", ".join(throttle) or "not throttled"
    lanes = f"{width} of {widest or '?'} lanes" if width else None
    facts = {
        "GPU processes": (None if processes is None else f"processes {list(processes) or 'none'}", bool(processes)),
        "GPU errors": (None if unknown else errors, bool(gpu.ecc_uncorrected or gpu.remap_pending)),
        "GPU clocks": (clocks, bool(hardware.THROTTLE_FAULTS & set(throttle or ()))),
        "PCIe width": (lanes, bool(width and widest and width < widest)),
    }
    if not isinstance(plan, ScriptPlan):  # a script's needs are unknown
        free = f"{gpu.free_gib:.1f} of {gpu.memory_gib:.1f} GiB free, the run needs {plan.cost.gpu_gib:.1f}"
        facts["GPU memory"] = (free, gpu.free_gib < plan.cost.gpu_gib)
    if plan.layout.gpus_per_node > 1 and plan.machine.link.name.startswith("nvlink"):
        links = f"{gpu.nvlinks_up} of {gpu.nvlinks} links up" if gpu.nvlinks else "no links"
        facts["NVLink"] = (links, not gpu.nvlinks or (gpu.nvlinks_up or 0) < gpu.nvlinks)
    return facts


def check_kernel_log(c: Context) -> Result:
    """Look for GPU faults in the kernel's log, which most containers may not read."""
    title = "GPU faults (Xid)"
    log = b""
    try:
        file = os.open(c.root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        try:  # each read returns one record, without waiting for a new one
            while len(log) < LOG_BYTES and (record := os.read(file, 8192)):
                log += record
        except BlockingIOError:  # all of it is read
            pass
        finally:
            os.close(file)
    except OSError:
        if not log:
            return skipped(title, "the kernel's log can't be read here", "on the node: dmesg | grep Xid")
    events = [(device, int(number)) for device, number in XID.findall(log.decode(errors="replace"))]
    faults = [f"{device}: Xid {number}" for device, number in events if number not in XID_APPLICATION]
    if faults:
        return failed(title, "; ".join(dict.fromkeys(faults)), OTHER_NODE)
    return passed(title, f"none of the GPU's own in the kernel's log, {len(events)} of applications")


def deepest_existing_dir(path: Path) -> Path:
    """Return the deepest folder of a path that exists: a missing one would be created there."""
    return next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))


def try_folder(folder: Path) -> str:
    """Return why files can't be written, locked and renamed in a folder (or where it would be); empty if they can."""
    place = deepest_existing_dir(folder)
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


def check_run_folder(c: Context) -> Result:
    folder = Path(c.loaded.run.folder)
    where = c.loaded.where(c.loaded.run.folder_key)
    if c.elsewhere and not folder.is_dir():
        return skipped_elsewhere("run folder", str(folder))
    if wrong := try_folder(folder):
        hint = "mount the volume writable, or name another folder; a read-only file system is so for root too"
        return failed("run folder", f"files can't be written, locked and renamed: {wrong}", hint, where)
    try:
        is_sweep = isinstance(c.loaded, Loaded) and bool(c.loaded.trials)  # a finished one may get more trials
        require_own_folder(c.loaded, finished=is_sweep and not (c.plan and has_finished(c.plan)))
    except UserError as error:
        return failed("run folder", error.problems[0].problem, error.problems[0].hint, where)
    made = "" if folder.is_dir() else ", where it will be created"
    return passed("run folder", f"written, locked and renamed in {deepest_existing_dir(folder)}{made}")


def check_disk_space(c: Context, free: float | None = None) -> Result:
    """Check for space for the files still to be written; only warn for the merged model of a possible export."""
    if c.plan is None or isinstance(c.plan, ScriptPlan):
        return skipped("disk space", NO_PLAN if c.plan is None else "what a script writes is not known")
    folder = Path(c.loaded.run.folder)
    where = c.loaded.where(c.loaded.run.folder_key)
    if c.elsewhere and not folder.is_dir():
        return skipped_elsewhere("disk space", str(folder))
    run, merged, words = estimate_space(c.plan)
    free = shutil.disk_usage(deepest_existing_dir(folder)).free if free is None else free
    if free < run:
        hint = "free some space, lower train.save_total_limit, or name a larger volume in train.output_dir"
        seen = f"{format_size(free)} free in {folder}; the run needs {format_size(run)} ({words})"
        return failed("disk space", seen, hint, where)
    if free < run + merged:
        seen = f"{format_size(free)} free in {folder}: enough for the run ({words}), "
        seen += f"not for a merged model of {format_size(merged)}"
        return warned("disk space", seen, "export the adapter alone, or the merged model to another volume", where)
    return passed("disk space", f"{format_size(free)} free in {folder}: {words}, merged model {format_size(merged)}")


def estimate_space(plan: Plan) -> tuple[float, float, str]:
    """Return the bytes still to be written, the bytes of a merged model, and the former in words."""
    if plan.trials:
        needs = [estimate_space(trial) for trial in plan.trials]
        words = f"{len(needs)} trials, the largest with {max(needs)[2]}"
        return sum(need for need, _, _ in needs), needs[0][1], words
    schedule = plan.schedule
    adapter = plan.adapter
    run = plan.run
    kept = schedule.checkpoints_kept
    if kept is None:  # unknown number of rows: use the limit, or at least one
        kept = run.train.save_total_limit or 1
    # One more than is kept: the newest is complete before the oldest is deleted.
    checkpoints = (kept + 1 if kept else 0) * schedule.checkpoint_bytes
    final = adapter.trainable * adapter.dtype_bytes
    tokens = (schedule.steps_per_epoch or 0) * schedule.tokens_per_step * TOKEN_BYTES
    words = f"checkpoints {format_size(checkpoints)}, final adapter {format_size(final)}, tokens {format_size(tokens)}"
    there = 0.0  # written by this run before it was interrupted
    for folder, most in (("checkpoints", checkpoints), ("tokens", tokens)):
        used = 0
        for path in Path(run.train.output_dir, folder).rglob("*"):
            with suppress(OSError):  # a checkpoint that is being removed
                used += path.lstat().st_blocks * 512  # man inode: units of 512 bytes
        there += min(most, used)
    words += f", of which {format_size(there)} are there" if there else ""
    return checkpoints + final + tokens - there, plan.total * BYTES[run.model.torch_dtype], words


def check_caches(c: Context) -> list[Result]:
    """Check HOME, the temporary folder and the caches that libraries write during a run."""
    home = c.environ.get("HOME", "")
    temporary = tempfile.gettempdir()
    results = []
    for name, default in {
        "HOME": "",
        "TMPDIR": temporary,
        "HF_HOME": f"{home}/.cache/huggingface",
        "TRITON_CACHE_DIR": f"{home}/.triton",
        "TORCHINDUCTOR_CACHE_DIR": temporary,
    }.items():
        title = f"folder {name}"
        path = c.environ.get(name) or default
        if wrong := try_folder(Path(path)) if path else "it is not set":
            hint = f"set {name} to a folder that can be written, as a variable in cluster.env"
            # A shared hub cache may be read-only, if no model's own code is copied in it.
            copies_code = isinstance(c.loaded.run, RunFile) and c.loaded.run.model.trust_remote_code
            is_cache = name == "HF_HOME" and Path(path).is_dir() and not copies_code
            results.append((warned if is_cache else failed)(title, f"can't be written: {wrong}", hint))
        else:
            results.append(passed(title, path))
    return results
