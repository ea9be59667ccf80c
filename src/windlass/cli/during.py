"""Commands during a run."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from windlass.cli.options import (
    DURING,
    Accelerate,
    Follow,
    JobDir,
    Kustomize,
    OtherBase,
    Overrides,
    RankCount,
    RunDir,
    RunPath,
    command,
    flag,
    make_plan,
    opt,
    option_words,
    say,
)
from windlass.errors import TRAINING, UserError, print_error
from windlass.versions import require_libraries


@command(DURING, "train run.yaml", "train run.yaml --ranks 2 --override train.max_steps=20")
def train(
    run: RunPath,
    override: Overrides = None,
    accelerate: Accelerate = None,
    ranks: RankCount = None,
    resume: Annotated[bool, flag("--resume", "Resume the unfinished run in the run folder.")] = False,
    debug_freq: Annotated[int | None, opt("--debug-freq", "N", "Measure GPUs every N steps; 0: never.", min=0)] = None,
    allow_other_base: OtherBase = False,
) -> None:
    """Start training. Under torchrun or accelerate, runs as one rank.

    Such as: accelerate launch --config_file fsdp.yaml -m windlass train run.yaml

    Exits with 0 when finished, 1 if the run failed, 2 if the input is wrong (13 from a rank), and 75 if a signal
    stopped it and everything was saved.
    """
    from windlass.ranks.job import USUAL_WAIT_SECONDS, WAIT, take_job
    from windlass.runfile import read_kind
    from windlass.start import RankCommand, compute_fingerprint, train

    overrides = list(override or ())
    if ranks is not None:
        overrides += ["cluster.nodes=1", f"cluster.gpus_per_node={ranks}"]
        if read_kind(run, overrides) == "script":
            overrides.append("layout.ranks=null")
    words = [str(run), *(word for value in overrides for word in ("--override", value))]
    words += option_words({"--accelerate": accelerate})
    options = {"--debug-freq": debug_freq, "--resume": resume, "--allow-other-base": allow_other_base}
    wait_seconds = float(os.environ.get(WAIT) or USUAL_WAIT_SECONDS)
    job = take_job(os.environ)
    started = RankCommand(
        ["train", *words, *option_words(options)],
        os.environ,
        print_error,
        job,
        check=[sys.executable, "-m", "windlass", "check", *words, "--in-pod", "--wait", str(wait_seconds)],
        fingerprint=compute_fingerprint([run, accelerate] if accelerate else [run], overrides),
        wait_seconds=wait_seconds,
    )

    def planned() -> Any:
        """Plan for the launcher's ranks, else for this machine, unless the files set nodes and GPUs."""
        from windlass.hardware import read_this_machine
        from windlass.plan.script import make_any_plan
        from windlass.ranks.supervisor import default_overrides
        from windlass.runfile import read_any
        from windlass.runfile.accelerate import load_accelerate

        is_script = read_kind(run, overrides) == "script"
        require_libraries(("torch",) if is_script else TRAINING, "train")
        if is_script and debug_freq is not None:
            hint = "pass it to the meter inside your script"
            raise UserError("has no effect on a script, which measures itself", "--debug-freq", hint, "no-effect")
        file = load_accelerate(accelerate, {} if is_script else os.environ)
        loaded = read_any(run, overrides, file)
        defaults = default_overrides(loaded, os.environ, len(read_this_machine().gpus), job)
        if defaults:
            loaded = read_any(run, [*overrides, *defaults], file)
        return make_any_plan(loaded, is_here=True)

    code = train(planned, started, resume=resume, debug_freq=debug_freq, allow_other_base=allow_other_base)
    raise typer.Exit(code)


@command(DURING, "demo --dir demo-run", "report demo-run/run")
def demo(
    directory: Annotated[Path, opt("--dir", "DIR", "Folder to create it in. Default: demo-run.")] = Path("demo-run"),
    make_only: Annotated[bool, flag("--make-only", "Create model, data and run file, but don't train.")] = False,
) -> None:
    """Create a tiny Mistral 4 and teach it to translate, on this CPU with two ranks.

    The model can repeat phrases of a made-up language, which it was trained to in seconds; LoRA teaches it what they
    mean. The report counts how many phrases that were held out it translates, before and after.
    """
    from windlass.calibrate import calibrate
    from windlass.demo import MACHINE, RANKS, can_calibrate, make_demo

    calibrated = not make_only and can_calibrate()
    run = make_demo(directory, calibrated=calibrated)
    say(f"created {directory / 'model'}, {directory / 'data'} and {run}")
    if calibrated:  # or the plan would know this processor's kind alone
        calibrate(RANKS, directory / MACHINE, os.environ, say)
    if not make_only:
        train(run)


PLATFORMS = "local, script, slurm, kubernetes, openshift, runai or skypilot."


@command(DURING, "submit run.yaml --to kubernetes --dry-run", "submit run.yaml --to runai --follow")
def submit(
    run: RunPath,
    to: Annotated[str | None, opt("--to", "PLATFORM", PLATFORMS)] = None,
    override: Overrides = None,
    accelerate: Accelerate = None,
    dry_run: Annotated[bool, flag("--dry-run", "Write the files, start nothing.")] = False,
    follow: Annotated[bool, flag("--follow", "Print the run's log until it ends.")] = False,
    out: JobDir = None,
    kustomize: Kustomize = None,
) -> None:
    """Write the job's files for a platform and submit it.

    local trains here, in the foreground. script writes launch.sh, to be run on every node by hand. slurm, kubernetes,
    openshift, runai and skypilot use the commands sbatch, kubectl (or oc), runai and sky; --dry-run needs none of them.
    Submit an interrupted run again to resume it.
    """
    from windlass.launch.submit import require_platform, submit

    require_platform(to)
    plan = make_plan(run, override, accelerate, for_start=False)
    code = submit(
        plan,
        to or plan.run.cluster.platform,
        overrides=override or (),
        accelerate=accelerate,
        out=out,
        dry_run=dry_run,
        follow=follow,
        kustomize=kustomize,
        say=say,
    )
    raise typer.Exit(code)


@command(DURING, "status run.yaml")
def status(run: RunPath, override: Overrides = None, out: JobDir = None) -> None:
    """Show the state of a submitted run, as its platform reports it."""
    from windlass.launch.submit import find_submission

    platform, record = find_submission(run, override or (), out, say)
    raise typer.Exit(platform.status(record))


@command(DURING, "logs run.yaml --follow")
def logs(run: RunPath, override: Overrides = None, follow: Follow = False, out: JobDir = None) -> None:
    """Show the output of a submitted run's nodes."""
    from windlass.launch.submit import find_submission

    platform, record = find_submission(run, override or (), out, say)
    raise typer.Exit(platform.logs(record, follow=follow))


@command(DURING, "stop run.yaml", "submit run.yaml    # resumes it")
def stop(run: RunPath, override: Overrides = None, out: JobDir = None) -> None:
    """Stop a submitted run after it has saved a checkpoint."""
    from windlass.launch.submit import find_submission

    platform, record = find_submission(run, override or (), out, say)
    raise typer.Exit(platform.stop(record))


@command(DURING, "watch run", "watch run --once")
def watch(folder: RunDir, once: Annotated[bool, flag("--once", "Print the current state and exit.")] = False) -> None:
    """Watch a run: curves, ranks, alarms.

    Reads only the files in the run folder, so it also works on a finished run or from another machine.
    """
    from rich.console import Console

    from windlass.observe.watch.live import watch

    watch(folder, once=once, console=Console(highlight=False))
