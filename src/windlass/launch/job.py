"""What a launcher has to know of a run, whatever the platform: drawn from the plan, nothing typed twice."""

from __future__ import annotations

import hashlib
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from windlass import __version__
from windlass.errors import UserError
from windlass.observe import steps
from windlass.plan import Plan
from windlass.plan.script import AnyPlan, ScriptPlan
from windlass.runfile.kinds import RUN_NAME_LETTERS
from windlass.runfile.machines import GRACE_SECONDS, Cluster, Secret
from windlass.variables import DEFAULTS, variables

PORT = 29500  # torch's default; Run:ai and the Training Operator tell another one
JOIN_SECONDS = 300  # until all nodes must have come; names resolve only once pods are ready
DISK_BYTES_PER_SECOND = 100e6  # what a slow shared volume takes; an adapter is small
SHM_GIB_PER_WORKER = 0.5  # batches of images that a loading process holds ready
SHM_GIB_PER_RANK = 1  # NCCL's buffers between GPUs of a node and the batches of data loaders, with room


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable of the run: a value, or the secret that holds it; and why it is set."""

    name: str
    value: str | Secret
    reason: str


@dataclass(frozen=True, slots=True)
class Job:
    """A run as a job. `run_text` and `accelerate_text` are the files that travel with it."""

    name: str
    nodes: int
    ranks_per_node: int
    gpu: bool  # false: ranks are processes of the CPU
    folder: str  # the run folder, as the ranks see it
    run_text: str
    accelerate_text: str  # of a script empty: torchrun starts it
    overrides: tuple[str, ...]
    environment: tuple[Variable, ...]
    memory_gib: int  # of each node, /dev/shm included; of a script /dev/shm alone: the rest is not known
    shm_gib: int
    cpu: str
    grace_seconds: int
    grace_reason: str  # where that figure comes from
    cluster: Cluster
    title: str
    source: str  # name of the run file, for headings
    port: int = PORT
    join_seconds: int = JOIN_SECONDS

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def is_script(self) -> bool:
        return not self.accelerate_text

    @property
    def accelerate_file(self) -> dict[str, str]:
        return {"accelerate.yaml": self.accelerate_text} if self.accelerate_text else {}

    @property
    def fingerprint(self) -> str:
        """Same on all nodes of one run, another for another run file."""
        text = "\0".join((self.run_text, self.accelerate_text, *self.overrides, __version__))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def memory_request(self) -> str:
        return self.cluster.memory_request or self.cluster.memory_limit or f"{self.memory_gib}Gi"

    @property
    def memory_limit(self) -> str:
        return self.cluster.memory_limit or self.memory_request


def job_of(plan: AnyPlan, *, overrides: Sequence[str] = (), accelerate: Path | None = None) -> Job:
    """The plan as a job. `overrides` and `accelerate` are what the plan was made with besides the run file."""
    run, layout = plan.loaded.run, plan.layout
    name = run.name or _name(run.folder, layout.nodes)
    shm_gib = _shm_gib(plan)
    grace_seconds, grace_reason = grace(plan)
    return Job(
        name=name,
        nodes=layout.nodes,
        ranks_per_node=layout.gpus_per_node,
        gpu=plan.machine.gpu.name != "cpu",
        folder=run.folder,
        run_text=_text(plan.loaded.path),
        accelerate_text=_accelerate_text(plan, accelerate),
        overrides=tuple(overrides),
        environment=environment(run.cluster),
        memory_gib=_memory_gib(plan) + (shm_gib if run.cluster.large_shm else 0),
        shm_gib=shm_gib,
        cpu=run.cluster.cpu or str(layout.gpus_per_node * (2 + run.workers)),
        grace_seconds=grace_seconds,
        grace_reason=grace_reason,
        cluster=run.cluster,
        title=f"{name}: {layout.nodes} x {layout.gpus_per_node} {plan.machine.gpu.name}, {layout.name}",
        source=plan.loaded.path.name,
    )


def _accelerate_text(plan: AnyPlan, file: Path | None) -> str:
    if isinstance(plan, ScriptPlan):
        return ""
    return _text(file) if file else accelerate_yaml(plan)


def _memory_gib(plan: AnyPlan) -> int:
    """Half as much again as planned: libraries, the page cache that a cgroup counts, growth of the allocator."""
    return 0 if isinstance(plan, ScriptPlan) else math.ceil(plan.cost.host_gib * 1.5)


def _shm_gib(plan: AnyPlan) -> int:
    """A script's loading processes may hold images, where a language model's hold numbers of tokens."""
    workers = plan.loaded.run.workers if isinstance(plan, ScriptPlan) else 0
    return 1 + plan.layout.gpus_per_node * (SHM_GIB_PER_RANK + math.ceil(workers * SHM_GIB_PER_WORKER))


def grace(plan: AnyPlan) -> tuple[int, str]:
    """Time to end a step and save after a stop signal, and what it is taken from."""
    run = plan.loaded.run
    if run.cluster.grace_seconds:
        return run.cluster.grace_seconds, "as cluster.grace_seconds says"
    measured = slowest_save(Path(run.folder))
    if isinstance(plan, ScriptPlan):
        return GRACE_SECONDS, "what a script needs is not known: cluster.grace_seconds says more or less"
    if measured is None:
        saving = plan.adapter.trainable * 4 * 3 / DISK_BYTES_PER_SECOND  # float32 weights and AdamW's two moments
        reason = "estimated from the plan's step and the adapter's size"
    else:
        saving = measured * 2  # storage is not equally fast every day
        reason = f"by the plan's step and the slowest save in this run folder, {measured:.1f} s"
    seconds = plan.cost.step_seconds_serial * 1.5 + saving + 60
    return max(GRACE_SECONDS, math.ceil(seconds / 30) * 30), reason


def slowest_save(folder: Path) -> float | None:
    """Seconds of the longest save that this run has made, where its folder is here and some were."""
    path = folder / steps.EVENTS
    events = steps.lines(path) if path.is_file() else ()
    saves = (event for event in events if event.get("kind") == "save" and event.get("ok", True))
    return max((event["seconds"] for event in saves if isinstance(event.get("seconds"), int | float)), default=None)


def environment(cluster: Cluster) -> tuple[Variable, ...]:
    """What every job gets, then what the site says; the site's word counts."""
    known = variables()
    ours = [Variable(name, value, known[name].about) for name, value in DEFAULTS.items() if name not in cluster.env]
    return (*ours, *(Variable(name, value, _reason(name)) for name, value in cluster.env.items()))


def _reason(name: str) -> str:
    known = variables().get(name)
    if known is None:
        return "cluster.env"
    if known.status:
        return f"cluster.env; {known.verdict}"
    return f"cluster.env: {known.about}"


def environment_notes(cluster: Cluster) -> tuple[str, ...]:
    """What is outdated or idle among the variables that the run file sets."""
    notes = []
    for name in cluster.env:
        known = variables().get(name)
        if known and known.status:
            notes.append(f"cluster.env.{name}: {known.verdict} (windlass explain {name})")
    return tuple(notes)


def accelerate_yaml(plan: Plan) -> str:
    """How `accelerate launch` starts the ranks. It says nothing of sharding: that is the engine's part."""
    layout = plan.layout
    kind = "NO" if layout.ranks == 1 else "MULTI_GPU"
    cpu = str(plan.machine.gpu.name == "cpu").lower()
    return "\n".join(
        (
            "# How `accelerate launch` starts the ranks; written by windlass from the plan.",
            f"# It shards nothing: each rank shards the model itself ({layout.name}), as the run file's layout says.",
            "compute_environment: LOCAL_MACHINE",
            f"distributed_type: {kind}  # one process per GPU; on a CPU the same way over gloo",
            f"num_machines: {layout.nodes}",
            f"num_processes: {layout.ranks}  # of all machines together",
            f"mixed_precision: {_quoted(layout.precision)}",
            "rdzv_backend: static  # node 0's address and every node's number come from the platform",
            "same_network: true",
            f"use_cpu: {cpu}",
            "",
        )
    )


def _quoted(word: str) -> str:
    return f"'{word}'" if word == "no" else word  # YAML 1.1 reads a bare no as false


def name_letters(nodes: int) -> int:
    """How long a job's name may be: pods' names append the node's number to it, which for most runs has two digits."""
    return RUN_NAME_LETTERS - max(0, len(str(nodes - 1)) - 2)


def _name(folder: str, nodes: int) -> str:
    """A job's name out of the run folder's: small letters, digits, dashes."""
    slug = re.sub(r"[^a-z0-9]+", "-", Path(folder).name.lower()).strip("-")
    slug = slug if slug[:1].isalpha() else f"run-{slug}"
    return slug[: name_letters(nodes)].strip("-") or "run"


def _text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read: {error}", str(path), "give a file of UTF-8 text") from None
    return text if text.endswith("\n") else text + "\n"


def quote(word: str) -> str:
    """One word of a shell command; a comma needs no quotes, but in an array it looks like a mistake."""
    quoted = shlex.quote(word)
    return f"'{word}'" if quoted == word and "," in word else quoted


def words(items: Sequence[str]) -> str:
    """Words of a shell command, each quoted where it needs it."""
    return " ".join(map(quote, items))
