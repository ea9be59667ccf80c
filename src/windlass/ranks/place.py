"""Which node or rank this process is, by the variables that each launcher sets, and which interfaces it connects on.

A wrong NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME hangs without a message.
"""

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from windlass.errors import FAILED, RANK_USER_INPUT, UserError
from windlass.hardware import list_interface_addresses

PORT: Final = 29500  # torch's default
# Beginnings of the variables below: without them a process is no rank and no node of a job that something else started.
LAUNCHERS: Final = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "PET_", "SLURM_", "OMPI_", "SKYPILOT_"),
    "JOB_COMPLETION_INDEX",
)


@dataclass(frozen=True, slots=True)
class Node:
    """This process's place among those that join: one per node, or one per rank if torchrun started them."""

    number: int = 0
    count: int = 1
    host: str = "localhost"  # the first node's
    port: int = PORT


@dataclass(frozen=True, slots=True)
class NodeVariables:
    """The variables in which a launcher that starts one process per node tells it its place. Of several names the
    first that is set counts."""

    present: tuple[str, ...]  # all are set if this launcher started the process
    number: str
    count: str  # empty: it doesn't tell
    host: tuple[str, ...] = ("MASTER_ADDR",)
    port: tuple[str, ...] = ("MASTER_PORT",)


@dataclass(frozen=True, slots=True)
class RankVariables:
    """The variables in which a launcher that starts every rank tells each its place."""

    rank: str
    world: str
    local_rank: str
    local_world: str


SRUN: Final = NodeVariables(("SLURM_NODEID", "SLURM_STEP_NUM_NODES"), "SLURM_NODEID", "SLURM_STEP_NUM_NODES")
# An operator's pod without PET_*: WORLD_SIZE counts ranks or pods, depending on the version.
POD: Final = NodeVariables(("WORLD_SIZE",), "RANK", "WORLD_SIZE")
NODES: Final = (
    # Kubeflow, Run:ai, or a person
    NodeVariables(
        ("PET_NNODES",),
        "PET_NODE_RANK",
        "PET_NNODES",
        ("PET_MASTER_ADDR", "MASTER_ADDR"),
        ("PET_MASTER_PORT", "MASTER_PORT"),
    ),
    SRUN,
    NodeVariables(("SKYPILOT_NODE_IPS",), "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", ("SKYPILOT_NODE_IPS",)),
    NodeVariables(("JOB_COMPLETION_INDEX", "MASTER_ADDR"), "JOB_COMPLETION_INDEX", ""),  # an indexed Job
    POD,
    NodeVariables(("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # mpirun
)
TORCHRUN: Final = RankVariables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # and `accelerate launch`
OTHERS: Final = (
    RankVariables("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    RankVariables(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
)
EVERY_NODE: Final = "srun --ntasks-per-node=1"
EXACT = {"GLOO_SOCKET_IFNAME": True, "NCCL_SOCKET_IFNAME": False}  # variable: whether it takes names only, not prefixes


def parse_number(text: str) -> int:
    return int(text) if text.isdecimal() else -1


def read_node(environ: Mapping[str, str], planned: int | None = None) -> Node:
    """Return this node by the first of NODES that started this process; without any, the only node. planned: the plan's
    number of nodes, for launchers that don't tell it."""
    launcher = next((row for row in NODES if all(environ.get(name) for name in row.present)), None)
    if launcher is None:
        return Node()
    number = environ.get(launcher.number) or "0"
    if planned is not None and (launcher is POD or not launcher.count):
        count = str(planned)
    else:
        count = environ.get(launcher.count, "1").rpartition(":")[2]  # the upper end of an elastic job's range
    host = next((environ[name] for name in launcher.host if environ.get(name)), "").partition("\n")[0]
    if launcher is SRUN and not host and count != "1":
        host = find_first_host(environ)
    port = next((environ[name] for name in launcher.port if environ.get(name)), "")
    if launcher is SRUN and not port:
        port = choose_job_port(environ)
    node = Node(parse_number(number), parse_number(count), host or "localhost", parse_number(port or str(PORT)))
    wrong = ""
    if not 0 <= node.number < node.count:
        wrong = f"there is no node {number!r} among {count!r}"
    elif node.port < 0:
        wrong = f"{port!r} is not a port"
    elif node.count > 1 and not host:
        wrong = f"the address of node 0 is unknown: set {launcher.host[-1]}"
    if wrong:
        names = (launcher.number, launcher.count, *launcher.host, *launcher.port)
        values = ", ".join(f"{name}={environ[name]}" for name in names if name in environ)
        what = f"{values}: {wrong}"
        hint = "set PET_NNODES, PET_NODE_RANK (from 0) and PET_MASTER_ADDR on each node; on one: unset them and RANK"
        raise UserError(what, "the environment", hint, "wrong-environment")
    return node


def choose_job_port(environ: Mapping[str, str]) -> str:
    """Return a port of this Slurm job's own, since jobs may share a machine; without Slurm torch's."""
    job = environ.get("SLURM_JOB_ID")
    return str(20000 + int(job) % 5000 * 2) if job else str(PORT)


def find_first_host(environ: Mapping[str, str]) -> str:
    """Return the first host of the Slurm step; empty in a container without Slurm's programs."""
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    try:
        command = ["scontrol", "show", "hostnames", hosts]
        done = subprocess.run(command, env=dict(environ), capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.partition("\n")[0] if done.returncode == 0 else ""


def require_one_process_per_node(environ: Mapping[str, str]) -> None:
    """Refuse several tasks of srun on a node where each would start all of the node's ranks."""
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    if not re.fullmatch(r"1(\(x\d+\))?", tasks):
        raise UserError(f"srun must start one task per node, and starts {tasks}", "srun", EVERY_NODE, "tasks-per-node")


def translate_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for a rank that srun or mpirun started; nothing if they started nodes, or if another
    launcher has set its own."""
    if TORCHRUN.rank in environ or "PET_NNODES" in environ:
        return {}
    launcher = next((row for row in OTHERS if environ.get(row.world, "1") != "1"), None)
    if launcher is None:
        return {}
    world = environ[launcher.world]
    spread = environ.get(launcher.local_world, "")
    local_world = re.fullmatch(r"(\d+)(\(x\d+\))?", spread)  # srun's: 8(x2)
    if local_world is None:
        hint = "start the same number on each: srun --ntasks-per-node=N"
        raise UserError(f"{world} tasks are spread unevenly over the nodes: {spread}", "srun", hint, "uneven-tasks")
    if local_world[1] == "1":
        return {}
    host = environ.get("MASTER_ADDR") or ("localhost" if world == local_world[1] else find_first_host(environ))
    if not host:
        hint = 'before srun: export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        what = f"{world} tasks on several nodes, and MASTER_ADDR is not set"
        raise UserError(what, "srun", hint, "no-master-address")
    return {
        TORCHRUN.rank: environ[launcher.rank],
        TORCHRUN.world: world,
        TORCHRUN.local_rank: environ[launcher.local_rank],
        TORCHRUN.local_world: local_world[1],
        "MASTER_ADDR": host,
        "MASTER_PORT": environ.get("MASTER_PORT") or choose_job_port(environ),
    }


@dataclass(frozen=True, slots=True)
class InterfaceChoice:
    """The interfaces that one variable chooses on this node, and any problem with them. If a name exists on no node,
    the user's setting is wrong."""

    variable: str
    pattern: str
    addresses: tuple[tuple[str, str], ...]  # (interface, its first address)
    problem: str
    code: int  # to end with if there is one


def match_interfaces(pattern: str, names: Sequence[str], *, exact: bool) -> list[str]:
    """Match names by NCCL's rules: prefixes; `=` for exact names; `^` to exclude. gloo's names are always exact."""
    exclude = pattern.startswith("^")
    exact = exact or "=" in pattern[:2]
    wanted = [name for name in pattern.lstrip("^=").split(",") if name]
    return [n for n in names if any(n == w or (not exact and n.startswith(w)) for w in wanted) != exclude]


def list_choices(environ: Mapping[str, str], nodes: int, root: Path = Path("/")) -> Iterator[InterfaceChoice]:
    names = sorted(path.name for path in (root / "sys/class/net").glob("*"))
    for variable, exact in EXACT.items():
        pattern = environ.get(variable, "")
        if not pattern:
            continue
        chosen = match_interfaces(pattern, names, exact=exact)
        setting = f"{variable}={pattern}"
        states = {name: root / "sys/class/net" / name / "operstate" for name in chosen}
        up = [name for name, state in states.items() if not state.is_file() or state.read_text().strip() != "down"]
        addresses = tuple((name, found[0]) for name in up if (found := list_interface_addresses(name, root)))
        problem = ""
        code = RANK_USER_INPUT
        if not chosen:
            problem = f"{setting} names no interface of this node; it has {', '.join(names) or 'none'}"
        elif nodes > 1 and set(chosen) == {"lo"}:
            problem = f"{setting} reaches no other node"
        elif not addresses:
            problem = f"{setting}: {', '.join(chosen)} {'has no IP address' if up else 'is down'}"
            code = FAILED
        yield InterfaceChoice(variable, pattern, addresses, problem, code)
