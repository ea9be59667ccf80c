"""`windlass submit`, `status`, `logs`, `stop`: write a platform's files, start the job, and find it again."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from windlass import run_folder
from windlass.errors import FAILED, Problem, UserError, raise_all
from windlass.launch.job import RECORD, Job, JobRecord, build_job, quote_words, write_files
from windlass.launch.platforms import kubernetes, local, openshift, runai, script, skypilot, slurm
from windlass.plan import Plan
from windlass.plan.finished import describe_finished, has_finished, require_own_folder
from windlass.plan.script import AnyPlan
from windlass.runfile import RunFile, ScriptRun, read_any
from windlass.runfile.machines import PLATFORM_SECTIONS
from windlass.runfile.names import NOT_VALUES
from windlass.variables import variables


class Platform(Protocol):
    """The functions of a platform's module, besides `require_free` of those that may have the job already."""

    def review(self, job: Job, /) -> Iterator[Problem | str]: ...  # errors and notes
    def files(self, job: Job, /) -> dict[str, str]: ...
    def start(self, job: Job, folder: Path, say: Callable[[str], None], /) -> bool: ...  # whether it was started
    def status(self, record: JobRecord, /) -> int: ...
    def logs(self, record: JobRecord, /, *, follow: bool) -> int: ...
    def stop(self, record: JobRecord, /) -> int: ...


PLATFORMS: dict[str, Platform] = {
    "local": local,
    "script": script,
    "slurm": slurm,
    "runai": runai,
    "kubernetes": kubernetes,
    "openshift": openshift,
    "skypilot": skypilot,
}


# Commands of which one starts the job.
CLIENTS: dict[str, tuple[str, ...]] = {
    "slurm": ("sbatch",),
    "runai": ("runai",),
    "kubernetes": ("kubectl", "oc"),
    "openshift": ("kubectl", "oc"),
    "skypilot": ("sky",),
}


def require_platform(to: str | None) -> None:
    if to is not None and to not in PLATFORMS:
        hint = NOT_VALUES.get(("cluster.platform", to.lower()), f"choose {', '.join(PLATFORMS)}")
        raise UserError(f"unknown platform {to!r}", "--to", hint, "unknown-platform")


def review(job: Job, to: str) -> list[str]:
    """Return the notes about a job before it is submitted. Raise if something is wrong."""
    cluster = job.cluster
    findings = [*PLATFORMS[to].review(job)]
    raise_all([finding for finding in findings if isinstance(finding, Problem)])
    notes = [finding for finding in findings if isinstance(finding, str)]
    for name in dict.fromkeys(PLATFORM_SECTIONS.values()):  # a run file may describe several platforms
        keys = getattr(cluster, name).changed
        if keys and name != PLATFORM_SECTIONS.get(to):
            notes.append(f"cluster.{name} has no effect on platform {to}: {', '.join(sorted(keys))}")
    table = variables()
    known = {name: table[name] for name in cluster.env if name in table}
    notes += [
        f"cluster.env.{name}: {row.verdict} (`windlass explain {name}`)" for name, row in known.items() if row.status
    ]
    if to in ("kubernetes", "openshift", "runai", "skypilot") and cluster.image and "@sha256:" not in cluster.image:
        notes.append(f"{job.where('cluster.image')}: a tag may change between two starts of one run; name a digest")
    return notes


def submit(
    plan: AnyPlan,
    to: str,
    *,
    overrides: Sequence[str] = (),
    accelerate: Path | None = None,
    out: Path | None = None,
    dry_run: bool = False,
    follow: bool = False,
    kustomize: Path | None = None,
    say: Callable[[str], None],
) -> int:
    """Write the files and start the run. Return an exit code: 1 if it still has to be submitted elsewhere."""
    if kustomize and (to not in ("kubernetes", "openshift") or not dry_run or out):
        hint = "give it with --to kubernetes or --to openshift, with --dry-run, and without --out"
        raise UserError("writes a base for kustomize, and starts nothing", "--kustomize", hint, "starts-nothing")
    if not dry_run:
        require_own_folder(plan, finished=True)
        if has_finished(plan):
            say(describe_finished(plan))
            return 0
    platform = PLATFORMS[to]
    clients = CLIENTS.get(to, ())
    if clients and not dry_run and not any(map(shutil.which, clients)):
        hint = f"submit it where {clients[0]} is; --dry-run writes the files without it"
        what = f"{' or '.join(clients)} is not installed here: nothing was submitted"
        raise UserError(what, "PATH", hint, "no-client")
    folder = kustomize or choose_job_folder(plan.run, to, out, dry_run=dry_run)
    job = build_job(plan, overrides=overrides, accelerate=accelerate)
    notes = review(job, to)  # report what the run file alone shows before querying a cluster
    if to in ("kubernetes", "openshift"):
        job = kubernetes.choose_engine(job, ask=not dry_run, say=say)
        notes = review(job, to)
    remedy = plan.cost.remedy if isinstance(plan, Plan) and not plan.cost.fits else ""
    if remedy:
        notes.append(f"it does not fit: {remedy}")
    for note in notes:
        say(f"note: {note}")
    files = kubernetes.render_kustomize(job) if kustomize else platform.files(job)
    if not dry_run:  # before anything that a job runs from is written over
        if remedy:
            raise UserError("the plan says that it does not fit", str(plan.file), remedy, "does-not-fit")
        if require_free := getattr(platform, "require_free", None):
            require_free(job, folder)
    if files:
        write_files(folder, files)
        say(f"written to {folder}: {', '.join(files)}")
    if dry_run:
        if not files:
            say(f"nothing is written; it would start: windlass train {quote_words(job.arguments)} --resume")
        return 0
    if not platform.start(job, folder, say):
        return 0 if to == "script" else FAILED
    if follow:
        platform, record = open_record(folder, Path(job.folder), say)
        return platform.logs(record, follow=True)
    return 0


def choose_job_folder(run: RunFile | ScriptRun, to: str, out: Path | None = None, *, dry_run: bool = False) -> Path:
    """Return the folder for the files: the run folder, unless it is on a volume that this machine doesn't have. A dry
    run doesn't write there: nodes of the run may be reading it."""
    folder = Path(run.folder)
    elsewhere = Path(f"{run.name or folder.name}-job")
    if out is not None or to == "local":
        return out or folder
    if dry_run or to == "skypilot":
        return elsewhere
    volumes = (Path(volume.path) for volume in run.cluster.volumes)
    mounted = any(folder.is_relative_to(path) and path.is_dir() for path in volumes)
    return folder if to in ("script", "slurm") or folder.exists() or mounted else elsewhere


def find_submission(
    run: Path, override: Sequence[str], out: Path | None, say: Callable[[str], None]
) -> tuple[Platform, JobRecord]:
    """Return the platform that a run was submitted to, and its record. `run`: the run file or the run folder."""
    if run.is_dir():
        return open_record(out or run, run, say)
    if not run.exists():
        hint = "name the run file, or the folder that its train.output_dir names"
        raise UserError("no such run file or run folder", str(run), hint, "no-such-file")
    loaded = read_any(run, override)
    folders = [choose_job_folder(loaded.run, to, out) for to in ("script", "runai", "skypilot")]
    folder = next((folder for folder in folders if (folder / RECORD).exists()), folders[0])
    return open_record(folder, Path(loaded.run.folder), say)


def open_record(folder: Path, run: Path, say: Callable[[str], None]) -> tuple[Platform, JobRecord]:
    """Return the platform of a submission and its record. `folder`: where the record is; `run`: the run folder."""
    path = folder / RECORD
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(facts, dict) or facts.get("platform") not in PLATFORMS:
            raise ValueError("it names no platform")
    except FileNotFoundError:
        if not (folder / run_folder.MANIFEST).exists():
            hint = "`windlass submit RUN`; or the --out that it was given"
            raise UserError("nothing was submitted from here", str(path), hint, "nothing-submitted") from None
        facts = {"platform": "script"}  # started by `windlass train`, or by a launch.sh that was copied here
    except (OSError, ValueError) as error:
        hint = "`windlass submit RUN` writes it again"
        raise UserError(f"can't be read: {error}", str(path), hint, "unreadable") from None
    return PLATFORMS[facts["platform"]], JobRecord(facts, path, run, say)
