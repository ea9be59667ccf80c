"""A run as a job: the parts of the plan that every launcher needs, launch.sh, and checks for pods that couldn't run."""

import json
import math
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files as resources
from pathlib import Path, PurePosixPath
from typing import Any

from windlass import __version__, run_folder
from windlass.data.select import list_all_sets
from windlass.errors import Problem, RunError, UserError, require_writable
from windlass.files import read_json_lines, write_atomic
from windlass.hardware import GIB
from windlass.plan import Plan
from windlass.plan.script import AnyPlan, ScriptPlan
from windlass.ranks.job import GRACE, JOB, LOG_FORMAT, NODES, RANKS_PER_NODE
from windlass.runfile import ScriptRun
from windlass.runfile.machines import GRACE_SECONDS, Cluster, Secret
from windlass.runfile.rows import is_template
from windlass.runfile.values import Section
from windlass.variables import DEFAULTS, variables

RECORD = "submitted.json"  # from which status, logs and stop find a job again
CLIENT_SECONDS = 60  # timeout of one command of a platform
DISK_BYTES_PER_SECOND = 100e6  # a slow shared volume; an adapter is small
SHM_GIB_PER_WORKER = 0.5  # batches of images that a data loader's process prefetches
SHM_GIB_PER_RANK = 1  # NCCL's buffers between GPUs of a node and the batches of data loaders, with room
# NCCL shares 1 to 10 MiB per channel and peer between ranks of a node, and 64 MiB is the container runtimes' default.
SHM_GIB_LEAST = 0.25
NAME_LETTERS = 45  # limit of a job's name: a JobSet's pods append `-node-0-9999-abcde`
UNITS = {"": 1, "m": 0.001, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("KMGTPE", 1)}
LAUNCH_HEAD = """\
# {title}
# Written by windlass {version} from {source}; runs once on every node and starts its ranks.
#
# Kubernetes, Run:ai, SkyPilot and Slurm (--to slurm) start it by themselves. By hand, on each of the machines:
#   PET_NNODES={nodes} PET_NODE_RANK=0 PET_MASTER_ADDR=FIRST-MACHINE bash launch.sh     (0, 1, … on the others)
#
# Exit codes: 0 finished; 13 the input is wrong, don't retry; 75 stopped by a signal, saved; 1 anything else."""


@dataclass(frozen=True, slots=True)
class JobVariable:
    """One environment variable of the run: its value, or the secret that contains it, and why it is set."""

    name: str
    value: str | Secret
    reason: str


@dataclass(frozen=True, slots=True)
class Job:
    plan: AnyPlan
    name: str
    nodes: int
    ranks_per_node: int
    gpu: bool  # false: ranks run on the CPU
    folder: str  # the run folder, as the ranks see it
    files: dict[str, str]  # next to launch.sh
    arguments: tuple[str, ...]  # of `windlass train` on this machine
    overrides: tuple[str, ...]
    environment: tuple[JobVariable, ...]
    memory_gib: int  # per node, including /dev/shm; for a script only /dev/shm: the rest is unknown
    shm_gib: int
    memory_request: str
    memory_limit: str
    cpu: str
    grace_seconds: int
    grace_reason: str  # what the grace period is based on
    cluster: Cluster
    title: str
    source: str  # name of the run file, for headings
    engine: str  # on Kubernetes

    @property
    def is_script(self) -> bool:
        return isinstance(self.plan, ScriptPlan)

    @property
    def pod_restarts(self) -> int:
        """Return `cluster.max_restarts` for operators that add up the restarts of all pods and fail when the sum
        reaches the limit; 0 allows none."""
        restarts = self.cluster.max_restarts
        return restarts * self.nodes + 1 if restarts else 0

    def where(self, key: str) -> str:
        return self.plan.where(key)


def build_job(plan: AnyPlan, *, overrides: Sequence[str] = (), accelerate: Path | None = None) -> Job:
    """Convert a plan to a job. `overrides` and `accelerate` are those that the plan was made with."""
    run = plan.run
    layout = plan.layout
    cluster = run.cluster
    slug = re.sub(r"[^a-z0-9]+", "-", Path(run.folder).name.lower()).strip("-")
    slug = slug if slug[:1].isalpha() else f"run-{slug}"
    name = run.name or slug[:NAME_LETTERS].strip("-") or "run"
    shm_gib, _ = size_shm(plan)
    memory_gib = shm_gib if cluster.large_shm else 0
    files = {"run.yaml": read_text(plan.file)}
    if not isinstance(plan, ScriptPlan):
        files = {"accelerate.yaml": read_text(accelerate) if accelerate else render_accelerate_yaml(plan), **files}
        # Add half: libraries, the page cache (which a cgroup counts), growth of the allocator.
        memory_gib += math.ceil(plan.cost.host_gib * 1.5)
    arguments = [str(plan.file), *(word for override in overrides for word in ("--override", override))]
    arguments += ["--accelerate", str(accelerate)] if accelerate else []
    request = cluster.memory_request or cluster.memory_limit or f"{memory_gib}Gi"
    grace_seconds, grace_reason = estimate_grace(plan)
    table = variables()
    defaults = {key: value for key, value in DEFAULTS.items() if key not in cluster.env}
    environment = [JobVariable(key, value, table[key].about) for key, value in defaults.items()]
    for key, value in cluster.env.items():
        known = table.get(key)
        reason = f"cluster.env: {known.verdict if known.status else known.about}" if known else "cluster.env"
        environment.append(JobVariable(key, value, reason))
    return Job(
        plan=plan,
        name=name,
        nodes=layout.nodes,
        ranks_per_node=layout.gpus_per_node,
        gpu=plan.machine.gpu.name != "cpu",
        folder=run.folder,
        files=files,
        arguments=tuple(arguments),
        overrides=tuple(overrides),
        environment=tuple(environment),
        memory_gib=memory_gib,
        shm_gib=shm_gib,
        memory_request=request,
        memory_limit=cluster.memory_limit or request,
        cpu=cluster.cpu or cluster.cpu_limit or str(layout.gpus_per_node * (2 + run.workers)),
        grace_seconds=grace_seconds,
        grace_reason=grace_reason,
        cluster=cluster,
        title=f"{name}: {layout.nodes} x {layout.gpus_per_node} {plan.machine.gpu.name}, {layout.name}",
        source=plan.file.name,
        engine="job" if cluster.kubernetes.engine == "auto" else cluster.kubernetes.engine,
    )


def size_shm(plan: AnyPlan) -> tuple[int, float]:
    """Return the GiB of a node's /dev/shm that a pod gets, and the least with which its ranks can start."""
    ranks = plan.layout.gpus_per_node
    # A script's may prefetch images; text batches are small, and training itself looks whether they fit.
    loading = plan.run.workers * SHM_GIB_PER_WORKER if isinstance(plan, ScriptPlan) else 0
    exchanged = SHM_GIB_LEAST if ranks > 1 and plan.machine.gpu.name != "cpu" else 0  # gloo exchanges over TCP
    return 1 + ranks * (SHM_GIB_PER_RANK + math.ceil(loading)), ranks * (exchanged + loading)


def estimate_grace(plan: AnyPlan) -> tuple[int, str]:
    """Return the seconds needed to end a step and save after a stop signal, and what the figure is based on."""
    run = plan.run
    if run.cluster.grace_seconds:
        return run.cluster.grace_seconds, "set by cluster.grace_seconds"
    if isinstance(plan, ScriptPlan):
        return GRACE_SECONDS, "what a script needs is not known: cluster.grace_seconds sets it"
    folders = [trial.folder for trial in plan.trials] or [plan.folder]
    logs = [path for path in (folder / run_folder.EVENTS for folder in folders) if path.is_file()]
    saves = [event for path in logs for event in read_json_lines(path) if event.get("kind") == "save"]
    together = max((len(group.names) for group in plan.groups), default=1)  # trials that save one after the other
    if measured := [float(save["seconds"]) for save in saves if save.get("ok", True) and "seconds" in save]:
        saving = max(measured) * 2  # the speed of storage varies from day to day
        reason = f"by the plan's step and the slowest save in this run folder, {max(measured):.1f} s"
    else:
        saving = plan.adapter.trainable * 4 * 3 / DISK_BYTES_PER_SECOND  # float32 weights and AdamW's two moments
        reason = "estimated from the plan's step and the adapter's size"
    seconds = together * (plan.cost.step_seconds_serial * 1.5 + saving) + 60
    return max(GRACE_SECONDS, math.ceil(seconds / 30) * 30), reason


def render_accelerate_yaml(plan: Plan) -> str:
    """Return the ranks as a configuration of Accelerate. It doesn't configure sharding: the engine does."""
    layout = plan.layout
    precision = f"'{layout.precision}'" if layout.precision == "no" else layout.precision  # YAML 1.1: no is false
    return f"""\
# The ranks, as Accelerate's configuration; written by windlass from the plan.
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


def render_launch_sh(job: Job, *, exports: bool) -> str:
    """Render launch.sh. `exports`: set the environment too; Run:ai and Kubernetes set it visibly on the pod."""
    head = LAUNCH_HEAD.format(title=job.title, version=__version__, source=to_one_line(job.source), nodes=job.nodes)
    options = "".join(f"\n  {quote_words(('--override', override))}" for override in job.overrides)
    settings = (
        (f"export {JOB}", quote(job.name), ""),
        (f"export {NODES}", str(job.nodes), ""),
        (f"export {RANKS_PER_NODE}", str(job.ranks_per_node), "one per GPU" if job.gpu else "on the CPU"),
        (f"export {GRACE}", str(job.grace_seconds), f"to end a step and save; {job.grace_reason}"),
        (f"export {LOG_FORMAT}", job.cluster.log_format, ""),
        ("working_dir", quote(job.cluster.working_dir or ""), "empty: where this is started"),
        ("install", f"({quote_words(job.cluster.install)})", "what the image lacks"),
        ("options", f"({options}\n)" if options else "()", ""),
        ("here", '"$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"', ""),
    )
    exported = ["", "# --- the environment ".ljust(119, "-")] if exports else []
    for variable in job.environment if exports else ():
        name, value = variable.name, variable.value
        exported.append(f"# {to_one_line(variable.reason)}")
        if isinstance(value, Secret):
            missing = f"{name} is a secret ({value.secret}, key {value.key}): export it before"
            exported.append(
                f'if [[ -z "${{{name}:-}}" ]]; then\n  echo {quote(missing)} >&2\n  exit 13\nfi\nexport {name}'
            )
        else:
            exported.append(f"export {name}={quote(value)}")
    parts = {
        "@@HEAD@@": head,
        "@@SETTINGS@@": "\n".join(f"{name}={value}{f'  # {why}' if why else ''}" for name, value, why in settings),
        "@@ENVIRONMENT@@": "\n".join([*exported, ""] if exports else []),
        "@@ACCELERATE@@": "" if job.is_script else ' --accelerate "$here/accelerate.yaml"',
    }
    template = resources("windlass.launch").joinpath("launch.sh").read_text(encoding="utf-8")
    # Split first, so that inserted text is not searched for placeholders.
    return "".join(parts.get(piece, piece) for piece in re.split("(@@[A-Z]+@@)", template))


def read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"can't be read: {error}", str(path), "give a file of UTF-8 text", "unreadable") from None
    return text if text.endswith("\n") else text + "\n"


def quote(word: str) -> str:
    """Quote one word of a shell command; a comma needs no quotes, but in an array it looks like a mistake."""
    quoted = shlex.quote(word)
    return f"'{word}'" if quoted == word and "," in word else quoted


def quote_words(items: Sequence[str]) -> str:
    return " ".join(map(quote, items))


def to_one_line(text: str) -> str:
    """Make text safe for a comment: after a line break it would be a command, and YAML allows no control characters."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


@dataclass(frozen=True, slots=True)
class JobRecord:
    facts: dict[str, Any]
    path: Path  # of the record file
    run: Path  # the run folder
    say: Callable[[str], None]


def call_client(
    *command: str, hint: str = "", feed: str | None = None, show: bool = False, seconds: float = CLIENT_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Run a platform's own command and capture its output, or show it here. `hint`: if it doesn't answer in time."""
    try:
        timeout = None if show else seconds
        return subprocess.run(command, input=feed, capture_output=not show, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise RunError(f"no answer within {seconds:g} s", " ".join(command), hint, "no-answer") from None
    except OSError as error:
        hint = "install it, or run this where it is; `windlass submit RUN --dry-run` needs none"
        raise UserError(f"{command[0]} can't be run: {error.strerror}", "PATH", hint, "no-client") from None


def keep_record(job: Job, platform: str, folder: Path, **more: Any) -> None:
    now = time.strftime("%Y-%m-%d %H:%M:%S %z")
    facts = {"platform": platform, "name": job.name, "nodes": job.nodes, "submitted": now, **more}
    write_files(folder, {RECORD: json.dumps(facts, indent=2) + "\n"})


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Replace each file atomically: nodes of a run may be reading it."""
    with require_writable(folder, "set output_dir to a folder that can be created, or give another --out DIR"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_atomic(folder / name, text)
            if name.endswith(".sh"):
                (folder / name).chmod(0o755)


def find_pod_problems(job: Job) -> Iterator[Problem]:
    """Yield the settings that would give pods that can't start, or that lose their work. Other errors are refused by
    the server, or earlier by the types of the run file's keys."""
    cluster = job.cluster
    if not cluster.image:
        hint = "set cluster.image; see Containerfile"
        yield Problem("no container image", job.where("cluster.image"), hint, "no-image")
    yield from _find_path_problems(job)
    yield from _find_memory_problems(job)
    if cluster.cpu_limit and parse_cores(job.cpu) > parse_cores(cluster.cpu_limit):
        what = f"less than the {job.cpu} of cluster.cpu"
        yield Problem(what, job.where("cluster.cpu_limit"), "raise it", "too-few-cpus")
    for index, volume in enumerate(cluster.volumes):
        if volume.host:
            where = job.where(f"cluster.volumes[{index}]")
            hint = "mount a claim; only Slurm's containers mount it"
            yield Problem("pods mount no folder of their node", where, hint, "not-on-platform")
    yield from find_restart_problems(job)


def find_restart_problems(job: Job) -> Iterator[Problem]:
    """Yield a problem if a restarted run would find no checkpoint."""
    plan = job.plan
    if isinstance(plan, Plan) and job.cluster.max_restarts and plan.run.train.save_strategy == "no":
        text = "a run that is started again would start from the beginning: it saves no checkpoints"
        hint = "save by steps, or set cluster.max_restarts: 0"
        yield Problem(text, job.where("train.save_strategy"), hint, "restarts-without-saves")


def _find_path_problems(job: Job) -> Iterator[Problem]:
    """Yield paths of this machine that pods don't have, and a run folder that is lost with them."""
    run = job.plan.run
    own = job.where(run.folder_key)
    for place, path in {own: run.folder, **list_inputs(job)}.items():
        if not path.startswith("/") and (place == own or Path(path).exists()):
            hint = "give the absolute path that the pods see"
            yield Problem(f"{path} is a path of this machine's working folder", place, hint, "relative-path")
    folder = PurePosixPath(job.folder)
    if folder.is_absolute() and not any(folder.is_relative_to(volume.path) for volume in job.cluster.volumes):
        hint = f"mount a volume there: cluster.volumes: [{{claim: my-claim, path: /{folder.parts[1]}}}]"
        what = f"{folder} is on no volume: what the run writes would vanish with its pods"
        yield Problem(what, job.where(run.folder_key), hint, "not-mounted")


def list_inputs(job: Job) -> dict[str, str]:
    """Return the paths, or names on the hub, of what the run reads, by the places where they are set."""
    run = job.plan.run
    where = job.where
    paths: dict[str, str | None] = {where("cluster.machine"): job.cluster.machine}
    if isinstance(run, ScriptRun):
        paths[where("script.path")] = None if job.cluster.working_dir else run.script.path
    else:
        paths[where("model.model_name_or_path")] = run.model.model_name_or_path
        paths[where("lora.adapter")] = run.lora.adapter
        for rows in list_all_sets(run.data, where):
            paths[rows.where("data.dataset_name_or_path")] = rows.data.dataset_name_or_path
            template = rows.data.chat_template or ""
            paths[rows.where("data.chat_template")] = None if is_template(template) else template
        paths[where("train.sample.file")] = run.train.sample.file if run.train.sample else None
    return {place: path for place, path in paths.items() if path}


def _find_memory_problems(job: Job) -> Iterator[Problem]:
    cluster = job.cluster
    keys = [key for key in ("memory_request", "memory_limit") if getattr(cluster, key)]
    need_gib = float(job.shm_gib if cluster.large_shm else 0)
    why = "/dev/shm counts in it"
    if isinstance(job.plan, Plan):
        need_gib += job.plan.cost.host_gib
        why = f"the plan needs {need_gib:.1f} GiB on each node with /dev/shm"
    elif not keys:
        hint = f"set cluster.memory_limit, such as 64Gi; {why}"
        what = "what a script needs of host memory can't be planned"
        yield Problem(what, job.where("cluster.memory_limit"), hint, "memory-unknown")
    for key in keys:
        amount = getattr(cluster, key)
        if parse_gib(amount) <= need_gib:
            hint = f"set at least {job.memory_gib + job.is_script}Gi"
            yield Problem(f"{amount} of memory, and {why}", job.where(f"cluster.{key}"), hint, "too-little-memory")


def parse_gib(amount: str) -> float:
    number = amount.rstrip("mkKMGTPEi")
    return float(number) * UNITS[amount[len(number) :]] / GIB


def parse_cores(amount: str) -> float:
    """Convert a Kubernetes CPU quantity to cores: 500m is 0.5."""
    return int(amount[:-1]) / 1000 if amount.endswith("m") else float(amount)


def escape_variables(value: str) -> str:
    """Escape a value for a pod's environment: Kubernetes replaces $(NAME) by other variables and reads $$ as $."""
    return value.replace("$", "$$") if "$(" in value or "$$" in value else value


def list_refused_keys(job: Job, name: str, refused: Mapping[str, str], what: str) -> Iterator[Problem]:
    """Yield a problem for each configured key of a section of `cluster` that `what` doesn't support, with a hint."""
    section: Section = getattr(job.cluster, name)
    for key, hint in refused.items():
        if key in section.changed:
            yield Problem(f"{what} can't set it", job.where(f"cluster.{name}.{key}"), hint, "not-on-platform")
