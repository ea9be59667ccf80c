"""Slurm: a batch script that starts launch.sh once on every node; observed by squeue and the run folder."""

import math
import shlex
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.resources import files as resources
from pathlib import Path, PurePosixPath

from windlass import __version__
from windlass.errors import RANK_USER_INPUT, SAVED, Problem, RunError, UserError
from windlass.files import read_json
from windlass.launch.job import (
    RECORD,
    Job,
    JobRecord,
    call_client,
    keep_record,
    parse_cores,
    parse_gib,
    quote,
    quote_words,
    render_launch_sh,
    to_one_line,
)
from windlass.launch.platforms import local

BATCH = "job.sbatch"
PAUSE_SECONDS = 2.0
# Options of sbatch that `logs`, `stop`, the rendezvous and the saving at the time limit rely on.
RELIED_ON = (
    *("job-name", "nodes", "ntasks-per-node", "ntasks", "signal", "requeue", "no-requeue", "open-mode", "chdir"),
    *("output", "error"),
)


def list_options(job: Job) -> dict[str, str]:
    """Return sbatch's options by their long names; a switch has an empty value. The user's own come last."""
    cluster = job.cluster
    section = cluster.slurm
    seconds = cluster.deadline_seconds
    limit = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}" if seconds else None
    known = not job.is_script or cluster.memory_limit or cluster.memory_request  # a script's needs are unknown
    rows = {
        "job-name": job.name,
        "partition": section.partition,
        "account": section.account,
        "qos": section.qos,
        "nodes": str(job.nodes),
        "ntasks-per-node": "1",
        "gpus-per-node": str(job.ranks_per_node) if job.gpu else None,
        "cpus-per-task": str(math.ceil(parse_cores(job.cpu))),
        "mem": f"{math.ceil(parse_gib(job.memory_limit) * 1024)}M" if known else None,
        "time": limit,
        # sent to all ranks, this long before the time limit
        "signal": f"USR1@{job.grace_seconds}",
        "requeue": "",
        "open-mode": "append",
        # paths in the run file may be relative to the folder where it was submitted
        "chdir": None if Path(job.folder).is_absolute() else str(Path.cwd()),
        "output": f"{Path(job.folder).absolute()}/slurm-%j.log",
    }
    return {key: value for key, value in rows.items() if value is not None} | section.sbatch


def container_options(job: Job) -> tuple[list[str], list[str]]:
    container = job.cluster.slurm.container
    image = job.cluster.image or ""
    mounts = []
    for volume in job.cluster.volumes if container else ():
        source = str(PurePosixPath(volume.host or "/", volume.sub_path or ""))
        mounts.append(f"{source}:{volume.path}{':ro' if volume.read_only else ''}")
    is_file = image.startswith(("/", "./")) or "://" in image
    if container == "pyxis":
        registry, slash, rest = image.partition("/")
        if slash and not is_file and ("." in registry or ":" in registry or registry == "localhost"):
            image = f"{registry}#{rest}"  # enroot's syntax for a registry
        bound = [f"--container-mounts={','.join(mounts)}"] if mounts else []
        return [f"--container-image={image}", *bound, "--no-container-mount-home", "--no-container-entrypoint"], []
    if container == "apptainer":
        bound = [word for mount in mounts for word in ("--bind", mount)]
        gpu = ["--nv"] if job.gpu else []
        return [], ["apptainer", "exec", *gpu, *bound, image if is_file else f"docker://{image}"]
    return [], []


def render_batch_script(job: Job) -> str:
    more, before = container_options(job)
    label = ["--label"] if job.cluster.log_format == "text" else []  # a JSON line names its node
    parts = {
        "title": job.title,
        "source": to_one_line(job.source),
        "version": __version__,
        "options": "\n".join(
            f"#SBATCH --{key}{f'={quote(to_one_line(value))}' if value else ''}"
            for key, value in list_options(job).items()
        ),
        "folder": quote(str(Path(job.folder).absolute())),
        "restarts": str(job.cluster.max_restarts),
        "srun": quote_words(["srun", "--kill-on-bad-exit=0", *label, *more]),
        "before": "".join(f"{word} " for word in map(quote, before)),
        "exit_input": str(RANK_USER_INPUT),
        "exit_saved": str(SAVED),
    }
    text = resources("windlass.launch.platforms").joinpath(BATCH).read_text(encoding="utf-8")
    for name, value in parts.items():
        text = text.replace(f"@@{name.upper()}@@", value)
    return text


def review(job: Job) -> Iterator[Problem | str]:
    cluster = job.cluster
    if cluster.slurm.container:
        yield from _find_container_problems(job, cluster.slurm.container)
    else:
        for key in ("image", "volumes"):
            if getattr(cluster, key):
                yield f"cluster.{key} has no effect on Slurm unless cluster.slurm.container is pyxis or apptainer"
    if cluster.memory_request and cluster.memory_limit:
        yield "cluster.memory_request has no effect on Slurm: a job gets cluster.memory_limit"
    if cluster.cpu_limit:
        yield Problem("Slurm can't set it", job.where("cluster.cpu_limit"), "set cluster.cpu", "not-on-platform")
    seconds = cluster.deadline_seconds
    if seconds and seconds <= job.grace_seconds:
        what = f"{seconds} s, and saving may take {job.grace_seconds} s of them"
        yield Problem(what, job.where("cluster.deadline_seconds"), "raise it", "deadline-within-grace")
    for option in sorted({*RELIED_ON} & cluster.slurm.sbatch.keys()):
        hint = "remove it; nodes and time to save are cluster.nodes and cluster.grace_seconds"
        where = job.where(f"cluster.slurm.sbatch.{option}")
        yield Problem("windlass sets it, and relies on it", where, hint, "set-by-windlass")


def _find_container_problems(job: Job, container: str) -> Iterator[Problem | str]:
    cluster = job.cluster
    folder = PurePosixPath(job.folder)
    if not folder.is_absolute():
        hint = "give an absolute path, which is the same inside the container"
        where = job.where(job.plan.run.folder_key)
        yield Problem(f"{folder} is a path of this working folder", where, hint, "relative-path")
    if not cluster.image:
        where = job.where("cluster.image")
        yield Problem(f"nothing for {container} to run", where, "set cluster.image", "no-image")
    for index, volume in enumerate(cluster.volumes):
        if not volume.host:
            hint = f"mount a folder of the nodes: {{host: {volume.path}, path: {volume.path}}}"
            where = job.where(f"cluster.volumes[{index}]")
            yield Problem("Slurm mounts folders of its nodes only", where, hint, "not-on-platform")
    shared = [
        volume.path
        for volume in cluster.volumes
        if volume.host == volume.path and not volume.sub_path and not volume.read_only
    ]
    if folder.is_absolute() and not any(folder.is_relative_to(path) for path in shared):
        top = f"/{folder.parts[1]}"
        hint = f"cluster.volumes: [{{host: {top}, path: {top}}}]"
        what = f"{folder} is not mounted at its own path, to be written to"
        yield Problem(what, job.where(job.plan.run.folder_key), hint, "not-mounted")
    if container == "pyxis" and "@" in (cluster.image or ""):
        yield f"{job.where('cluster.image')}: enroot's documented names have a tag and no digest: try it once by srun"


def files(job: Job) -> dict[str, str]:
    return {BATCH: render_batch_script(job), "launch.sh": render_launch_sh(job, exports=True), **job.files}


def require_free(_: Job, folder: Path) -> None:
    """Refuse to submit what Slurm has: a job that is requeued reads the files of its folder again."""
    facts = read_json(folder / RECORD)
    state = query_squeue(facts["number"], "%T") if facts.get("platform") == "slurm" else ""
    if state:
        hint = "`windlass status RUN`; `windlass stop RUN`; or another train.output_dir"
        what = f"Slurm has it already, as job {facts['number']} ({state})"
        raise UserError(what, str(folder / RECORD), hint, "already-running")


def start(job: Job, folder: Path, say: Callable[[str], None]) -> bool:
    by_hand = f"sbatch {shlex.quote(str(folder / BATCH))}"
    if folder != Path(job.folder):
        say(f"{job.folder} is not here: copy {', '.join(files(job))} there; then there: sbatch {BATCH}")
        return False
    done = run_command("sbatch", "--parsable", str(folder / BATCH))
    if done.returncode:
        hint = "the options come from `cluster` in the run file: `windlass explain cluster` prints its keys"
        raise RunError(done.stderr.strip() or f"sbatch ended with {done.returncode}", by_hand, hint, "client-failed")
    number = done.stdout.strip().partition(";")[0]
    keep_record(job, "slurm", folder, number=number)
    say(f"submitted as job {number}; its log: {folder}/slurm-{number}.log")
    return True


run_command = partial(call_client, hint="ask Slurm again later")


def query_squeue(number: str, form: str) -> str:
    """Query the state of a job; empty once it has ended."""
    done = run_command("squeue", f"--jobs={number}", "--noheader", f"--format={form}")
    if done.returncode and "Invalid job id" not in done.stderr:
        raise RunError(done.stderr.strip(), "squeue", "ask Slurm again later", "client-failed")
    return done.stdout.strip()


def status(record: JobRecord) -> int:
    number = record.facts["number"]
    line = query_squeue(number, "%T, %M of %l, %D nodes %R")
    ended = record.run / f"slurm-{number}.exit"
    code = f"ended with {ended.read_text().strip()}" if ended.is_file() else "not in the queue"
    print(f"job {number}: {line or code}")
    return local.status(record)


def logs(record: JobRecord, *, follow: bool) -> int:
    """Print the job's log file, to which all its attempts append."""
    number = record.facts["number"]
    path, ended = (record.run / f"slurm-{number}.{end}" for end in ("log", "exit"))
    waiting = ""
    shown = 0
    while True:
        state = query_squeue(number, "%T: %R") if follow else ""
        if path.is_file():
            with path.open(encoding="utf-8", errors="replace") as log:
                log.seek(shown)
                print(log.read(), end="", flush=True)
                shown = log.tell()
        elif not follow:
            raise UserError("there is no log yet", str(path), "`windlass status RUN`", "no-log")
        elif state and state != waiting:
            record.say(f"waiting: {state}")
        waiting = state
        if not state:
            break
        time.sleep(PAUSE_SECONDS)
    return 0 if not follow or (ended.is_file() and ended.read_text().strip() == "0") else 1


def stop(record: JobRecord) -> int:
    """Stop the job: its ranks save, and it is not requeued."""
    number = record.facts["number"]
    state = query_squeue(number, "%T")
    if not state:
        record.say(f"job {number} has ended already")
        return 0
    if state != "RUNNING":
        done = run_command("scancel", number)
    else:
        done = run_command("scontrol", "update", f"JobId={number}", "Requeue=0")
        if not done.returncode:
            done = run_command("scancel", "--signal=USR1", number)
    if done.returncode:
        raise RunError(done.stderr.strip(), f"job {number}", f"scancel --signal=USR1 {number}", "client-failed")
    saves = "is stopping: its ranks save, and `windlass submit RUN` resumes from there"
    record.say(f"job {number} {saves if state == 'RUNNING' else 'is taken from the queue'}")
    return 0
