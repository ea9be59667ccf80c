"""`windlass submit`, `status`, `logs`, `stop`: write a platform's files, start the job, and find it again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from windlass import run_folder
from windlass.errors import Problem, UserError, raise_all
from windlass.launch import kubernetes, local, runai, script
from windlass.launch.job import RECORD, Record, Submission, environment_notes, job_of, words, write_files
from windlass.plan.script import AnyPlan, ScriptPlan
from windlass.runfile import Loaded, LoadedScript
from windlass.runfile.machines import admission

if TYPE_CHECKING:
    from windlass.launch.runai import ControlPlane


class Platform(Protocol):
    """One row of the table of platforms: a module."""

    def problems(self, submission: Submission, /) -> Iterator[Problem]: ...
    def notes(self, submission: Submission, /) -> Iterator[str]: ...
    def files(self, submission: Submission, /) -> dict[str, str]: ...
    def start(self, submission: Submission, /) -> bool: ...  # whether it is on its way
    def status(self, record: Record, /) -> int: ...
    def logs(self, record: Record, /, *, follow: bool) -> int: ...
    def stop(self, record: Record, /) -> int: ...


PLATFORMS: dict[str, Platform] = {"local": local, "script": script, "runai": runai, "kubernetes": kubernetes}


def submission_of(
    plan: AnyPlan,
    to: str,
    *,
    overrides: Sequence[str] = (),
    accelerate: Path | None = None,
    folder: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
    engine: str = "",
    version: str = "",
    api: bool = False,
    control_plane: ControlPlane | None = None,
) -> Submission:
    if api and to != "runai":
        raise UserError(f"{to} has no API that windlass can use", "--api", "it is for --to runai")
    job = job_of(plan, overrides=overrides, accelerate=accelerate)
    command = [str(plan.loaded.path), *(word for one in overrides for word in ("--override", one))]
    command += ["--accelerate", str(accelerate)] if accelerate else []
    folder = folder or Path(job.folder)
    return Submission(plan, job, to, folder, say, engine, version, api, control_plane, tuple(command))


def render(
    plan: AnyPlan,
    to: str,
    *,
    overrides: Sequence[str] = (),
    accelerate: Path | None = None,
    engine: str = "",
    version: str = "",
    api: bool = False,
) -> dict[str, str]:
    """All files of one platform, or everything that is wrong."""
    made = submission_of(plan, to, overrides=overrides, accelerate=accelerate, engine=engine, version=version, api=api)
    if to == "kubernetes" and not engine:
        made, _ = kubernetes.choose_engine(made, ask=False)
    raise_all([*PLATFORMS[to].problems(made)])
    return PLATFORMS[to].files(made)


def submit(
    plan: AnyPlan,
    to: str,
    *,
    overrides: Sequence[str] = (),
    accelerate: Path | None = None,
    out: Path | None = None,
    dry_run: bool = False,
    follow: bool = False,
    api: bool = False,
    plane: ControlPlane | None = None,
    say: Callable[[str], None],
) -> int:
    """Write the files and start the run. Returns an exit code. `plane`: for Run:ai over REST."""
    platform, asked = PLATFORMS[to], False
    folder = job_folder(plan.loaded, to, out, dry_run=dry_run)
    made = submission_of(
        plan, to, overrides=overrides, accelerate=accelerate, folder=folder, say=say, api=api, control_plane=plane
    )
    raise_all([*platform.problems(made)])  # what the run file alone shows is reported before a cluster is asked
    if to == "kubernetes":
        made, asked = kubernetes.choose_engine(made, ask=not dry_run)
        raise_all([*platform.problems(made)])
    for note in notes(made, asked=asked):
        say(f"note: {note}")
    files = platform.files(made)
    if files:
        write_files(folder, files)
        say(f"written to {folder}: {', '.join(files)}")
    if dry_run:
        if not files:
            say(f"nothing is written; it would start: windlass train {words(made.command)} --resume")
        return 0
    if remedy := does_not_fit(plan):
        raise UserError("the plan says that it does not fit", str(plan.loaded.path), remedy)
    if platform.start(made) and follow:
        return logs(folder, Path(made.job.folder), follow=True, say=say)
    return 0


def notes(submission: Submission, *, asked: bool = False) -> Iterator[str]:
    """What should be known before it is sent. `asked`: the cluster was."""
    section, where = submission.job.cluster, submission.where
    yield from environment_notes(section)
    if submission.platform == "kubernetes":
        yield from kubernetes.notes(submission, asked=asked)
    else:
        yield from PLATFORMS[submission.platform].notes(submission)
    if submission.platform in ("kubernetes", "runai"):
        yield from admission(section, where)
        if section.image and "@sha256:" not in section.image:
            yield f"{where('cluster.image')}: a tag may change between two starts of one run; name a digest"
    if remedy := does_not_fit(submission.plan):
        yield f"it does not fit: {remedy}"


def does_not_fit(plan: AnyPlan) -> str:
    """The remedy, if the plan knows that it doesn't; of a script nothing is known."""
    return "" if isinstance(plan, ScriptPlan) or plan.cost.fits else plan.cost.remedy


def job_folder(loaded: Loaded | LoadedScript, to: str, out: Path | None = None, *, dry_run: bool = False) -> Path:
    """Where the files go: the run folder, unless that is on a volume that this machine does not have. A dry run leaves
    the run folder alone: nodes of the run may be reading what is there."""
    run, folder = loaded.run, Path(loaded.run.folder)
    elsewhere = Path(f"{run.name or folder.name}-job")
    if out is not None or to == "local":
        return out or folder
    if dry_run:
        return elsewhere
    volumes = (Path(volume.path) for volume in run.cluster.volumes)
    mounted = any(folder.is_relative_to(path) and path.is_dir() for path in volumes)
    return folder if to == "script" or folder.exists() or mounted else elsewhere


# --- what was submitted ---------------------------------------------------------------------------------------------


def find(loaded: Loaded | LoadedScript, out: Path | None = None) -> Path:
    """Where this run's job left its record."""
    folders = [job_folder(loaded, to, out) for to in ("script", "runai")]
    return next((folder for folder in folders if (folder / RECORD).exists()), folders[0])


def status(folder: Path, run: Path) -> int:
    """`folder`: where the record is; `run`: the run folder."""
    platform, record = _submitted(folder, run, lambda _: None)
    return platform.status(record)


def logs(folder: Path, run: Path, *, follow: bool, say: Callable[[str], None]) -> int:
    platform, record = _submitted(folder, run, say)
    return platform.logs(record, follow=follow)


def stop(folder: Path, run: Path, say: Callable[[str], None]) -> int:
    platform, record = _submitted(folder, run, say)
    return platform.stop(record)


def _submitted(folder: Path, run: Path, say: Callable[[str], None]) -> tuple[Platform, Record]:
    path = folder / RECORD
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(facts, dict) or facts.get("platform") not in PLATFORMS:
            raise ValueError("it names no platform")
    except FileNotFoundError:
        if not (folder / run_folder.MANIFEST).exists():
            hint = "windlass submit RUN; or the --out that it was given"
            raise UserError("nothing was submitted from here", str(path), hint) from None
        facts = {"platform": "script"}  # `windlass train`, or launch.sh that was copied here
    except (OSError, ValueError) as error:
        raise UserError(f"can't be read: {error}", str(path), "windlass submit writes it anew") from None
    return PLATFORMS[facts["platform"]], Record(facts, path, run, say)
