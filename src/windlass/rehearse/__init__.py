"""`windlass rehearse`: the user's own run, start to end, with a tiny replica of the model on this machine's CPU."""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from windlass.errors import UserError
from windlass.files import write_json
from windlass.rehearse.process import exit_on_sigterm, make_environment
from windlass.rehearse.record import RECORD, Failed, RehearsalRecord, print_record
from windlass.rehearse.stages import SCRIPT_STAGES, SELF_EXPLAINED, STAGES, Rehearsal
from windlass.run_folder import is_finished
from windlass.runfile import Loaded, LoadedScript, read_any, read_kind
from windlass.runfile.accelerate import load_accelerate

__all__ = ["RehearsalRecord", "print_record", "rehearse"]

# Everything that a rehearsal leaves in its folder.
OURS = {"logs", "submit", "model", "data", "run", "adapter", "merged", "request.json", "rehearsal.yaml", RECORD}


def rehearse(
    run: Path,
    *,
    overrides: Sequence[str] = (),
    accelerate: Path | None = None,
    keep: Path | None = None,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> RehearsalRecord:
    """Rehearse a run file on this machine's CPU. Faults of the run are in the record, not raised."""
    loaded: Loaded | LoadedScript | None = None
    with contextlib.suppress(UserError):  # the first stage reports it
        loaded = read_any(run, overrides, load_accelerate(accelerate))
    has_trials = isinstance(loaded, Loaded) and bool(loaded.trials)
    overrides = [*overrides, "sweep={}"] if has_trials else [*overrides]
    record = RehearsalRecord(str(run))
    began = time.monotonic()
    folder = make_empty_folder(keep) if keep else Path(tempfile.mkdtemp(prefix="windlass-rehearsal-"))
    try:
        with (
            exit_on_sigterm(),
            tempfile.TemporaryDirectory(prefix="windlass-") as scratch,  # short: sockets have short names
            contextlib.ExitStack() as processes,
            contextlib.suppress(Failed),  # the failure is in the record
        ):
            (folder / "logs").mkdir()
            environment = make_environment(environ, Path(scratch))
            rehearsal = Rehearsal(run, overrides, folder, environment, record, say, processes, accelerate=accelerate)
            script = read_kind(run, overrides) == "script"
            for name, doing, prove in STAGES:
                if name in SCRIPT_STAGES or not script:
                    rehearsal.stage(name, doing, prove)
            if not script:
                record.not_proved += list_unproved(rehearsal)
            if has_trials:
                about = "its trials, one after the other: this was the run file without `sweep`"
                record.not_proved.append({"what": "sweep", "why": about})
    except (KeyboardInterrupt, SystemExit):
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    record.seconds = round(time.monotonic() - began, 1)
    record.folder = str(folder)
    if keep is None and (record.failure is None or record.failure["phase"] in SELF_EXPLAINED):
        shutil.rmtree(folder)
        record.folder = None
        if record.failure:
            record.failure["log"] = None
    places = [folder] if record.folder else []
    # The user's run folder, if it exists: plan.json and check.json are written there too. A fault replaces an older
    # record; a finished run's folder is not touched.
    if loaded:
        places.append(Path(loaded.run.folder))
    for place in places:
        with contextlib.suppress(OSError):
            if place.is_dir() and not is_finished(place):
                write_json(place / RECORD, record.as_dict())
    return record


def make_empty_folder(keep: Path) -> Path:
    """Return the folder to keep everything in, after removing what an earlier rehearsal left there."""
    try:
        keep.mkdir(parents=True, exist_ok=True)
        ours = OURS if (keep / "logs" / "plan.log").is_file() else set()
        others = sorted(path.name for path in keep.iterdir() if path.name not in ours)
        if others:
            problem = f"the folder contains other files ({others[0]} …)"
            raise UserError(problem, f"--keep {keep}", "name a new one", "folder-taken")
        for path in keep.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    except OSError as error:
        problem = f"cannot be written: {error.strerror}"
        raise UserError(problem, f"--keep {keep}", "name another folder", "unwritable") from None
    return keep.resolve()


def list_unproved(rehearsal: Rehearsal) -> list[dict[str, str]]:
    """Return what no CPU can show, with the plan's estimates of it."""
    plan = rehearsal.plan
    run = rehearsal.load().run
    memory = plan["memory"]
    estimate = plan["estimate"]
    nodes = plan["layout"]["nodes"]
    gpu_gib = memory["gpu_gib"]
    host_gib = memory["host_gib"]
    speed = estimate["tokens_per_second"]
    found: dict[str, str] = {}
    if gpus := run.cluster.gpu != "cpu":
        found["NCCL and GPUs"] = "the ranks talk over gloo, between processes of one machine"
        found["kernels"] = "flash attention, grouped matrix products and FP8 arithmetic of the GPU don't run on a CPU"
    found["GPU memory" if gpus else "memory"] = (
        f"the plan estimates {gpu_gib:.1f} of {memory['gpu_memory_gib']:.1f} GiB for each rank, "
        f"{host_gib:.1f} GiB of each host"
    )
    found["speed"] = f"the plan estimates {estimate['step_seconds']:.3g} s a step, {speed:,.0f} tokens/s"
    if nodes > 1:
        network = run.cluster.network if isinstance(run.cluster.network, str) else "the network"
        found[f"{network} between {nodes} nodes"] = (
            f"the plan estimates {estimate['wire_gb_per_step']:.1f} GB a step over it; "
            "`windlass check RUN --in-pod` measures it where the run starts"
        )
    for change in rehearsal.record.changes:
        if change.key in ("lora.adapter", "model.attn_implementation", "train.report_to"):
            found[change.key] = f"{change.yours}: {change.why}"
    return [{"what": what, "why": why} for what, why in found.items()]
