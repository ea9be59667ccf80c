"""The rehearsal from top to bottom: every phase a process, as a user would start it. No torch here."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from windlass.errors import UserError
from windlass.rehearse import after, before, during, process
from windlass.rehearse.record import RECORD, Failed, Record
from windlass.rehearse.stage import Screen, Stage
from windlass.runfile import Loaded, kind, read_any

# All that a rehearsal leaves in its folder.
OURS = {"logs", "submit", "model", "data", "run", "adapter", "merged", "request.json", "rehearsal.yaml", RECORD}
TOLD = ("plan", "check", "submit", "data")  # phases whose faults are told in full: no log says more
ON_GPUS = {
    "NCCL and GPUs": "the ranks talk over gloo, between processes of one machine",
    "kernels": "flash attention, grouped matrix products and FP8 arithmetic of the GPU are not run on a CPU",
}


def rehearse(
    run: Path,
    *,
    overrides: Sequence[str] = (),
    accelerate: Path | None = None,
    keep: Path | None = None,
    environ: Mapping[str, str],
    screen: Screen,
) -> Record:
    """Rehearse a run file on this machine's CPU. Faults of the run are in the record, not raised."""
    options = [word for one in overrides for word in ("--override", one)]
    options += ["--accelerate", str(accelerate)] if accelerate else []
    record, began = Record(str(run)), time.monotonic()
    folder = chosen(keep)
    try:
        # A folder with a short name: sockets have short names.
        with process.ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="windlass-") as scratch:
            stage = Stage(run, options, folder, process.environment(environ, 1, Path(scratch)), record, screen)
            stage.logs.mkdir()
            phases(stage, environ, Path(scratch))
    except Failed:  # it is in the record
        pass
    except (KeyboardInterrupt, SystemExit):
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    record.seconds = round(time.monotonic() - began, 1)
    record.folder = str(folder)
    if keep is None and (record.failure is None or record.failure["phase"] in TOLD):
        shutil.rmtree(folder)
        record.gone()
    for place in {folder if record.folder else None, run_folder(run, options)}:
        if place is not None:
            with contextlib.suppress(OSError):
                record.write(place)
    return record


def phases(stage: Stage, environ: Mapping[str, str], scratch: Path) -> None:
    if kind(stage.run, before.overrides_of(stage.options)) == "script":
        before.script(stage)
        return

    # 1. The user's own run file, through what holds no GPU.
    loaded = before.plan(stage)
    before.check(stage, loaded)
    before.submit(stage, loaded)

    # 2. The twin, the first rows, and the run file in small.
    here = before.chosen_spread(stage)
    made = before.material(stage, here)
    small = before.small(stage, loaded, made, here)

    # 3. Trained by as many ranks, stopped, resumed.
    stage.environ = process.environment(environ, here.ranks, scratch)
    during.train(stage, small)

    # 4. Judged, exported, merged, and opened by others.
    stage.environ = process.environment(environ, 1, scratch)
    after.judge(stage)
    after.export(stage)
    after.merge(stage)
    after.reload(stage)
    stage.record.not_proved += unproved(stage, loaded)


def unproved(stage: Stage, loaded: Loaded) -> list[dict[str, str]]:
    """What no CPU can show, with what the plan estimates of it."""
    made, run = stage.plan, loaded.run
    memory, estimate, layout = made["memory"], made["estimate"], made["layout"]
    gpus = run.cluster.gpu != "cpu"
    found = dict(ON_GPUS) if gpus else {}
    found["GPU memory" if gpus else "memory"] = (
        f"the plan estimates {memory['gpu_gib']:.1f} of {memory['gpu_memory_gib']:.1f} GiB for each rank, "
        f"{memory['host_gib']:.1f} GiB of each host"
    )
    found["speed"] = (
        f"the plan estimates {estimate['step_seconds']:.3g} s a step, {estimate['tokens_per_second']:,.0f} tokens/s"
    )
    if layout["nodes"] > 1:
        network = run.cluster.network if isinstance(run.cluster.network, str) else "the network"
        found[f"{network} between {layout['nodes']} nodes"] = (
            f"the plan estimates {estimate['wire_gb_per_step']:.1f} GB a step over it; "
            "`windlass check RUN --in-pod` measures it where the run starts"
        )
    if run.train.report_to != "none":
        found["trackers"] = f"{run.train.report_to}: a rehearsal reports to none"
    for change in stage.record.changes:
        if change.key in ("lora.adapter", "model.attn_implementation"):
            found[change.key] = f"{change.yours}: {change.why}"
    return [{"what": what, "why": why} for what, why in found.items()]


def chosen(keep: Path | None) -> Path:
    """Where everything of the rehearsal lies: a folder to keep, or one that goes when all is well."""
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="windlass-rehearsal-"))
    try:
        keep.mkdir(parents=True, exist_ok=True)
        ours = OURS if (keep / "logs" / "plan.log").is_file() else set()  # an earlier rehearsal
        if others := sorted(path.name for path in keep.iterdir() if path.name not in ours):
            raise UserError(f"the folder holds other files ({others[0]} …)", f"--keep {keep}", "name a new one")
        for path in keep.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", f"--keep {keep}", "name another folder") from None
    return keep.resolve()


def run_folder(run: Path, options: list[str]) -> Path | None:
    """The user's run folder where it is there already: plan.json and check.json are written there too.

    A fault is written as well, for it takes an older record's place. What a finished run left is not touched.
    """
    try:
        folder = Path(read_any(run, before.overrides_of(options)).run.folder)
    except UserError:
        return None
    return folder if folder.is_dir() and not before.finished(folder) else None
