"""What this machine gives a run: memory, processors, limits, the user's account. Linux's files below a root."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from windlass.hardware import GIB, LocalMachine
from windlass.launch.check.result import Result, failed, passed, unseen, warned
from windlass.plan.script import AnyPlan, ScriptPlan

IPC_LOCK = 14  # number of that capability, capabilities(7)
# NCCL registers a few MiB of buffers per connection; an unprivileged pod's default of 64 KiB holds not one.
LOCKED_LEAST = 64 << 20
# NCCL shares 1 to 10 MiB per channel and peer between ranks of a node, and 64 MiB is the container runtimes' default.
SHARED_PER_RANK = 256 << 20
SHARED_PER_WORKER = 512 << 20  # batches that a loading process holds ready, generously
FILES_LEAST = 4096  # safetensors shards, token files, sockets to each peer, times the ranks of a node
PROCESSES_LEAST = 1024
RDMA = ("infiniband", "roce")


def wants_rdma(plan: AnyPlan) -> bool:
    return plan.layout.nodes > 1 and plan.machine.network.name.startswith(RDMA)


def host_memory(plan: AnyPlan, here: LocalMachine) -> Result:
    """The host's memory, or the control group's limit, against what the plan needs on a node."""
    if isinstance(plan, ScriptPlan):
        return unseen("host memory", f"{here.memory_gib:.1f} GiB; what a script needs is not known")
    need, have = plan.cost.host_gib, here.memory_gib
    limit = f", limited to {here.memory_limit_gib:.1f} by the control group" if here.memory_limit_gib else ""
    said = f"{have:.1f} GiB{limit}; the run needs {need:.1f}"
    if have <= 0:
        return unseen("host memory", "this system does not say")
    if have < need:
        return failed("host memory", said, "raise cluster.memory_limit, or choose a layout that loads less per node")
    return passed("host memory", said)


def processors(plan: AnyPlan, here: LocalMachine) -> Result:
    """One processor per rank to feed it, and one per loading process."""
    ranks = plan.layout.gpus_per_node
    need = ranks * (1 + plan.loaded.run.workers)
    said = f"{here.cpus} for {ranks} ranks" + (f" and {need - ranks} loading processes" if need > ranks else "")
    if here.cpus < need:
        return warned("processors", said, f"set cluster.cpu to at least {need}: ranks wait for each other's processor")
    return passed("processors", said)


def shared_memory(plan: AnyPlan, shm: Path) -> Result:
    try:
        stat = os.statvfs(shm)
    except OSError as error:
        return unseen("/dev/shm", f"{shm}: {error.strerror}")
    return enough_shared(plan, stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize)


def enough_shared(plan: AnyPlan, size: float, free: float) -> Result:
    """Ranks of one node talk through /dev/shm where the GPUs' own links are not used, loading processes always."""
    ranks, workers = plan.layout.gpus_per_node, plan.loaded.run.workers
    need = (ranks * SHARED_PER_RANK if ranks > 1 else 0) + ranks * workers * SHARED_PER_WORKER
    said = f"{free / GIB:.2f} of {size / GIB:.2f} GiB free; {need / GIB:.2f} wanted"
    if free >= need:
        return passed("/dev/shm", said)
    fewer = "script.workers" if isinstance(plan, ScriptPlan) else "train.dataloader_num_workers"
    hint = f"cluster.large_shm: true mounts a larger one; or {fewer}: 0"
    return failed("/dev/shm", said, hint, plan.loaded.where("cluster.large_shm"))


def limits(root: Path) -> dict[str, float]:
    """Soft limits of this process, by the kernel's names."""
    text = _text(root / "proc/self/limits")
    found = re.findall(r"^(Max [a-z ]+?)\s{2,}(\S+)", text, re.MULTILINE)
    return {name: float("inf") if value == "unlimited" else float(value) for name, value in found}


def locked_memory(plan: AnyPlan, root: Path) -> Result:
    """InfiniBand pins memory: an unlimited memlock, or the capability that lifts it."""
    if not wants_rdma(plan):
        return unseen("locked memory", "this run asks for no RDMA")
    limit = limits(root).get("Max locked memory")
    if limit is None:
        return unseen("locked memory", f"{root}/proc/self/limits does not say")
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)", _text(root / "proc/self/status"), re.MULTILINE)
    lifted = bool(effective and int(effective[1], 16) >> IPC_LOCK & 1)
    said = f"{'unlimited' if limit == float('inf') else f'{limit / 2**20:.1f} MiB'}{', IPC_LOCK is effective' * lifted}"
    if limit < LOCKED_LEAST and not lifted:
        hint = "raise memlock in the node's container runtime (IPC_LOCK does nothing for a user other than root)"
        return failed("locked memory", f"{said}: InfiniBand cannot register its buffers", hint)
    return passed("locked memory", said)


def open_files(root: Path) -> Result:
    limit = limits(root).get("Max open files")
    if limit is None:
        return unseen("open files", f"{root}/proc/self/limits does not say")
    if limit < FILES_LEAST:
        return warned("open files", f"at most {limit:.0f}", f"ulimit -n {FILES_LEAST}, or the node's default")
    return passed("open files", f"at most {limit:,.0f}")


def processes(root: Path) -> Result:
    """The user's limit and the control group's; torch, tokenizers and loaders start dozens of threads per rank."""
    limit = limits(root).get("Max processes")
    group = _text(root / "sys/fs/cgroup/pids.max").strip()
    most = min(float(group) if group.isdigit() else float("inf"), float("inf") if limit is None else limit)
    if limit is None and not group:
        return unseen("processes", f"neither {root}/proc/self/limits nor the control group says")
    if most < PROCESSES_LEAST:
        return failed("processes", f"at most {most:.0f}", f"raise the pod's pids limit to {PROCESSES_LEAST} or more")
    return passed("processes", "unlimited" if most == float("inf") else f"at most {most:,.0f}")


def account(root: Path, uid: int, environ: Mapping[str, str]) -> Result:
    """A number without an account, as OpenShift gives it: Python's getpass, which torch asks, wants a name."""
    lines = (line.split(":") for line in _text(root / "etc/passwd").splitlines())
    name = next((fields[0] for fields in lines if len(fields) > 2 and fields[2] == str(uid)), None)
    if name is not None:
        return passed("account", f"{name} ({uid})")
    given = next((key for key in ("LOGNAME", "USER", "LNAME", "USERNAME") if environ.get(key)), None)
    if given:
        return passed("account", f"user {uid} has no entry in /etc/passwd, {given} names it {environ[given]}")
    return failed("account", f"user {uid} has no entry in /etc/passwd, and LOGNAME is not set", "set LOGNAME: windlass")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
