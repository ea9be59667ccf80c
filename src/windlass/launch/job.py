"""A run as a job: what every launcher needs to know, all of it from the plan, and what would keep pods from running."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from windlass import __version__, run_folder
from windlass.errors import Problem, UserError
from windlass.files import read_json_lines, write_atomic
from windlass.launch.rendezvous import PORT
from windlass.plan import Plan
from windlass.plan.script import AnyPlan, ScriptPlan
from windlass.runfile import ScriptRun
from windlass.runfile.fields import RUN_NAME_LETTERS
from windlass.runfile.machines import GRACE_SECONDS, Cluster, Secret
from windlass.variables import DEFAULTS, variables

if TYPE_CHECKING:
    from windlass.launch.runai import ControlPlane

RECORD = "submitted.json"  # by which status, logs and stop find a job again
JOIN_SECONDS = 300  # until all nodes must have started; names resolve only once pods are ready
DISK_BYTES_PER_SECOND = 100e6  # a slow shared volume; an adapter is small
SHM_GIB_PER_WORKER = 0.5  # batches of images that a loading process holds ready
SHM_GIB_PER_RANK = 1  # NCCL's buffers between GPUs of a node and the batches of data loaders, with room
GIB = 1024**3
UNITS = {"": 1, "m": 0.001, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("KMGTPE", 1)}
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
MOUNTED = ("/dev/shm", "/etc/windlass")  # by windlass itself


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable of the run: a value, or the secret that holds it; and why it is set."""

    name: str
    value: str | Secret
    reason: str


@dataclass(frozen=True, slots=True)
class Job:
    """`run_text` and `accelerate_text` are the files that are sent with it."""

    name: str
    nodes: int
    ranks_per_node: int
    gpu: bool  # false: ranks are processes of the CPU
    folder: str  # the run folder, as the ranks see it
    run_text: str
    accelerate_text: str  # empty for a script: torchrun starts it
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
    def is_script(self) -> bool:
        return not self.accelerate_text

    @property
    def files(self) -> dict[str, str]:
        """Next to launch.sh."""
        accelerate = {"accelerate.yaml": self.accelerate_text} if self.accelerate_text else {}
        return {**accelerate, "run.yaml": self.run_text}

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
    """The plan as a job. `overrides` and `accelerate` are what the plan was made with, with the run file."""
    run, layout, cluster = plan.loaded.run, plan.layout, plan.loaded.run.cluster
    slug = re.sub(r"[^a-z0-9]+", "-", Path(run.folder).name.lower()).strip("-")
    slug = slug if slug[:1].isalpha() else f"run-{slug}"
    name = run.name or slug[: name_letters(layout.nodes)].strip("-") or "run"
    workers = run.workers if isinstance(plan, ScriptPlan) else 0  # may hold images; a language model's hold few numbers
    shm_gib = 1 + layout.gpus_per_node * (SHM_GIB_PER_RANK + math.ceil(workers * SHM_GIB_PER_WORKER))
    accelerate_text, memory_gib = "", 0
    if not isinstance(plan, ScriptPlan):
        accelerate_text = read_text(accelerate) if accelerate else accelerate_yaml(plan)
        # Half as much again: libraries, the page cache that a cgroup counts, growth of the allocator.
        memory_gib = math.ceil(plan.cost.host_gib * 1.5)
    grace_seconds, grace_reason = grace(plan)
    return Job(
        name=name,
        nodes=layout.nodes,
        ranks_per_node=layout.gpus_per_node,
        gpu=plan.machine.gpu.name != "cpu",
        folder=run.folder,
        run_text=read_text(plan.loaded.path),
        accelerate_text=accelerate_text,
        overrides=tuple(overrides),
        environment=environment(cluster),
        memory_gib=memory_gib + (shm_gib if cluster.large_shm else 0),
        shm_gib=shm_gib,
        cpu=cluster.cpu or str(layout.gpus_per_node * (2 + run.workers)),
        grace_seconds=grace_seconds,
        grace_reason=grace_reason,
        cluster=cluster,
        title=f"{name}: {layout.nodes} x {layout.gpus_per_node} {plan.machine.gpu.name}, {layout.name}",
        source=plan.loaded.path.name,
    )


def grace(plan: AnyPlan) -> tuple[int, str]:
    """Time to end a step and save after a stop signal, and what it is taken from."""
    run = plan.loaded.run
    if run.cluster.grace_seconds:
        return run.cluster.grace_seconds, "set by cluster.grace_seconds"
    if isinstance(plan, ScriptPlan):
        return GRACE_SECONDS, "what a script needs is not known: cluster.grace_seconds sets it"
    events = Path(run.folder) / run_folder.EVENTS
    saves = [event for event in read_json_lines(events) if event.get("kind") == "save"] if events.is_file() else []
    measured = [
        save["seconds"] for save in saves if save.get("ok", True) and isinstance(save.get("seconds"), int | float)
    ]
    if measured:
        saving = max(measured) * 2  # storage is not equally fast every day
        reason = f"by the plan's step and the slowest save in this run folder, {max(measured):.1f} s"
    else:
        saving = plan.adapter.trainable * 4 * 3 / DISK_BYTES_PER_SECOND  # float32 weights and AdamW's two moments
        reason = "estimated from the plan's step and the adapter's size"
    seconds = plan.cost.step_seconds_serial * 1.5 + saving + 60
    return max(GRACE_SECONDS, math.ceil(seconds / 30) * 30), reason


def environment(cluster: Cluster) -> tuple[Variable, ...]:
    """What every job gets, then what the site sets, which takes precedence."""
    table = variables()
    every = [Variable(name, value, table[name].about) for name, value in DEFAULTS.items() if name not in cluster.env]
    for name, value in cluster.env.items():
        known = table.get(name)
        reason = f"cluster.env: {known.about}" if known else "cluster.env"
        every.append(Variable(name, value, f"cluster.env; {known.verdict}" if known and known.status else reason))
    return tuple(every)


def accelerate_yaml(plan: Plan) -> str:
    """How `accelerate launch` starts the ranks. It sets nothing about sharding: that is the engine's part."""
    layout = plan.layout
    precision = f"'{layout.precision}'" if layout.precision == "no" else layout.precision  # YAML 1.1: no is false
    return f"""\
# How `accelerate launch` starts the ranks; written by windlass from the plan.
# It shards nothing: each rank shards the model itself ({layout.name}), as the run file's layout says.
compute_environment: LOCAL_MACHINE
distributed_type: {"NO" if layout.ranks == 1 else "MULTI_GPU"}  # one process per GPU; on a CPU the same way over gloo
num_machines: {layout.nodes}
num_processes: {layout.ranks}  # of all machines together
mixed_precision: {precision}
rdzv_backend: static  # node 0's address and every node's number come from the platform
same_network: true
use_cpu: {str(plan.machine.gpu.name == "cpu").lower()}
"""


def name_letters(nodes: int) -> int:
    """How long a job's name may be: pods' names append the node's number, which for most runs has two digits."""
    return RUN_NAME_LETTERS - max(0, len(str(nodes - 1)) - 2)


def read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"can't be read: {error}", str(path), "give a file of UTF-8 text") from None
    return text if text.endswith("\n") else text + "\n"


def quote(word: str) -> str:
    """One word of a shell command; a comma needs no quotes, but in an array it looks like a mistake."""
    quoted = shlex.quote(word)
    return f"'{word}'" if quoted == word and "," in word else quoted


def words(items: Sequence[str]) -> str:
    return " ".join(map(quote, items))


def one_line(text: str) -> str:
    """Fit for a comment: what comes after a line break would be a command, and YAML takes no control characters."""
    return " ".join("".join(one if one.isprintable() else " " for one in text).split())


# --- a submission -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submission:
    """What every platform needs to render a job and to start it."""

    plan: AnyPlan
    job: Job
    platform: str
    folder: Path  # of the job's files
    say: Callable[[str], None]
    engine: str = ""  # on Kubernetes; empty: what needs no cluster to be asked
    version: str = ""  # of Kubeflow Trainer
    api: bool = False  # Run:ai over REST
    control_plane: ControlPlane | None = None
    command: tuple[str, ...] = ()  # `windlass train` with the same arguments

    def where(self, key: str) -> str:
        return self.plan.loaded.where(key)

    def keep_record(self, **more: Any) -> None:
        facts = {
            "platform": self.platform,
            "name": self.job.name,
            "engine": self.engine or None,
            "namespace": self.job.cluster.namespace,
            "project": self.job.cluster.project,
            "nodes": self.job.nodes,
            "submitted": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        }
        write_files(self.folder, {RECORD: json.dumps(facts | more, indent=2) + "\n"})

    def is_in_place(self, then: str) -> bool:
        """Whether the files are where the pods will look; else reports what to do."""
        there = self.folder == Path(self.job.folder)
        if not there:
            files = f"copy {', '.join(('launch.sh', *self.job.files))} there"
            self.say(f"{self.job.folder} is not here: {files}, onto the pods' volume; then: {then}")
        return there


@dataclass(frozen=True, slots=True)
class Record:
    """A job that was submitted."""

    facts: dict[str, Any]
    path: Path  # of the record
    run: Path  # the run folder
    say: Callable[[str], None]


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Each at once: nodes of a run may be reading what is replaced."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_atomic(folder / name, text)
            if name.endswith(".sh"):
                (folder / name).chmod(0o755)
    except OSError as error:
        hint = "set output_dir to a folder that can be created, or give another --out DIR"
        raise UserError(f"can't be written: {error.strerror}", str(folder), hint) from None


# --- pods -------------------------------------------------------------------------------------------------------------


def quantity(text: str) -> float:
    """A Kubernetes quantity as a number: 500m is 0.5, 1Gi is 1073741824."""
    number = text.rstrip("mkKMGTPEi")
    return float(number) * UNITS[text[len(number) :]]


def pod_problems(plan: AnyPlan, job: Job) -> Iterator[Problem]:
    """What would end in pods that can't start, or whose work is lost."""
    cluster, where, run = job.cluster, plan.loaded.where, plan.loaded.run
    if not cluster.image:
        yield Problem("no container image", where("cluster.image"), "set cluster.image; see Containerfile")
    if isinstance(run, ScriptRun):
        paths = [("script.output_dir", run.folder)]
        paths += [("script.path", run.script.path)] if run.script.path and not cluster.working_dir else []
    else:
        model, data = run.model.model_name_or_path, run.data.dataset_name_or_path
        paths = [("train.output_dir", run.train.output_dir), ("model.model_name_or_path", model)]
        paths += [("data.dataset_name_or_path", data)]
        paths += [("lora.adapter", run.lora.adapter)] if run.lora.adapter else []
    for key, path in paths:
        if not path.startswith("/") and (key == run.folder_key or Path(path).exists()):
            hint = "give the absolute path that the pods see"
            yield Problem(f"{path} is a path of this machine's working folder", where(key), hint)
    folder = PurePosixPath(job.folder)
    if folder.is_absolute() and not any(folder.is_relative_to(volume.path) for volume in cluster.volumes):
        hint = f"mount a volume there: cluster.volumes: [{{claim: NAME, path: /{folder.parts[1]}}}]"
        what = f"{folder} is on no volume: what the run writes would vanish with its pods"
        yield Problem(what, where(run.folder_key), hint)
    yield from _key_problems(job, where)
    shm = float(job.shm_gib if cluster.large_shm else 0)
    given = [(key, getattr(cluster, key)) for key in ("memory_request", "memory_limit") if getattr(cluster, key)]
    if isinstance(plan, ScriptPlan):
        need, least, what = shm + 1 / 1024, f"more than {shm:g}Gi", f"{shm:g} GiB of /dev/shm count in it"
        if not given:
            hint = f"set cluster.memory_limit, such as 64Gi; {what}"
            yield Problem("what a script needs of host memory can't be planned", where("cluster.memory_limit"), hint)
    else:
        need, least = plan.cost.host_gib + shm, f"at least {job.memory_gib}Gi"
        what = f"the plan needs {need:.1f} GiB on each node with /dev/shm"
        if cluster.max_restarts and plan.loaded.run.train.save_strategy == "no":
            text = "a run that is started again would start from the beginning: it saves no checkpoints"
            yield Problem(text, where("train.save_strategy"), "save by steps, or set cluster.max_restarts: 0")
    for key, amount in given:
        if quantity(amount) < need * GIB:
            yield Problem(f"{amount} of memory, and {what}", where(f"cluster.{key}"), f"set {least}")


def _key_problems(job: Job, where: Callable[[str], str]) -> Iterator[Problem]:
    """Of what users write. The run file's own rules refuse what is wrong on every platform."""
    cluster = job.cluster
    for index, volume in enumerate(cluster.volumes):
        key = f"cluster.volumes[{index}].path"
        if volume.path.rstrip("/") in MOUNTED:
            yield Problem(f"windlass mounts {volume.path} itself", where(key), "mount it elsewhere")
        if ":" in volume.path:
            yield Problem(f"{volume.path} holds a colon, which a mount path may not", where(key), "mount it elsewhere")
    values = {f"cluster.node_selector.{key}": value for key, value in cluster.node_selector.items()}
    values |= {f"cluster.tolerations[{i}].value": one.value or "" for i, one in enumerate(cluster.tolerations)}
    values |= {"cluster.queue": cluster.queue or ""}
    for key, value in values.items():
        if not LABEL_VALUE.fullmatch(value):
            hint = "at most 63 letters, digits, dashes, dots and underscores"
            yield Problem(f"{value!r} is no value of a label", where(key), hint)
    devices = {f"cluster.extended_resources.{name}": name for name in cluster.extended_resources}
    for key, name in (devices | {"cluster.gpu_resource": cluster.gpu_resource}).items():
        if "/" not in name:
            yield Problem(f"{name!r} is no device", where(key), "devices are named domain/name, such as nvidia.com/gpu")


def ignored_keys(cluster: Cluster, ignored: Mapping[str, str], platform: str) -> Iterator[str]:
    """Keys that are set and have no effect on this platform: nothing is dropped silently."""
    for key, why in ignored.items():
        if key in cluster.model_fields_set and getattr(cluster, key):
            yield f"cluster.{key} has no effect on {platform}: {why}"


def environment_notes(cluster: Cluster) -> Iterator[str]:
    """Variables of the run file that are outdated or do nothing."""
    for name in cluster.env:
        known = variables().get(name)
        if known and known.status:
            yield f"cluster.env.{name}: {known.verdict} (windlass explain {name})"
