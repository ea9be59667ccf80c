"""Commands for while it runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windlass.cli.options import (
    TRAINING,
    Accelerate,
    Overrides,
    Run,
    app,
    make_plan,
    print_error,
    require,
    say,
)
from windlass.errors import UserError

if TYPE_CHECKING:
    from windlass.launch.runai_api import ControlPlane
    from windlass.plan import Plan

Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DIR", help="Where the job's files are. Default: the run folder.", show_default=False
    ),
]


@app.command(
    epilog="**Examples**\n\n"
    "`windlass train run.yaml`\n\n"
    "`windlass train run.yaml --ranks 2 --override train.max_steps=20`\n\n"
    "`accelerate launch --config_file fsdp.yaml -m windlass train run.yaml`"
)
def train(
    run: Run,
    override: Overrides = None,
    accelerate: Accelerate = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", metavar="N", min=1, help="Number of ranks, on this machine only.", show_default=False),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the unfinished run in the run folder.")] = False,
    debug_freq: Annotated[
        int | None,
        typer.Option("--debug-freq", metavar="N", min=0, help="Measure GPUs and experts every N steps; 0: never."),
    ] = None,
) -> None:
    """Train: start this machine's ranks, or be one of those that a launcher started.

    Exits with 0 when finished, 1 when the run failed, 2 when the input is wrong (13 from a rank),
    and 75 when a signal stopped it and everything is saved.
    """
    from windlass import train as training
    from windlass.runfile import kind

    overrides = [*(override or ()), *([] if ranks is None else ["cluster.nodes=1", f"cluster.gpus_per_node={ranks}"])]
    if kind(run, overrides) == "script":
        overrides += [] if ranks is None else ["layout.ranks=null"]
        raise typer.Exit(_script(run, overrides, accelerate, resume=resume, debug_freq=debug_freq))
    require(TRAINING, "train")

    def planned() -> Plan:
        from windlass import plan as planning
        from windlass.hardware import this_machine
        from windlass.plan.layout import accelerate_file, parents
        from windlass.runfile import read
        from windlass.train.machines import started_on

        loaded, file = read(run, overrides), accelerate_file(accelerate, os.environ, parents())
        if file is None and (found := started_on(loaded, os.environ, len(this_machine().gpus))):
            loaded = read(run, [*overrides, *found])
        return planning.make(loaded, file)

    arguments = ["train", str(run), *(word for option in overrides for word in ("--override", option))]
    arguments += [*(["--accelerate", str(accelerate)] if accelerate else []), *(["--resume"] if resume else [])]
    arguments += [] if debug_freq is None else ["--debug-freq", str(debug_freq)]
    code = training.train(
        planned, arguments=arguments, environ=os.environ, resume=resume, debug_freq=debug_freq, say=print_error
    )
    raise typer.Exit(code)


def _script(run: Path, overrides: list[str], accelerate: Path | None, *, resume: bool, debug_freq: int | None) -> int:
    from windlass.hardware import this_machine
    from windlass.plan.script import ScriptPlan, make_script, refuse_accelerate
    from windlass.runfile import LoadedScript, read_any
    from windlass.train import script
    from windlass.train.machines import started_on

    require(("torch",), "train")

    def planned() -> ScriptPlan:
        if debug_freq is not None:
            hint = "give it to the script's meter, as an argument of the script"
            raise UserError("a script measures by itself", "--debug-freq", hint)
        refuse_accelerate(accelerate)
        loaded = read_any(run, overrides)
        if found := started_on(loaded, os.environ, len(this_machine().gpus)):
            loaded = read_any(run, [*overrides, *found])
        assert isinstance(loaded, LoadedScript)
        return make_script(loaded)

    return script.train(planned, environ=os.environ, resume=resume, say=print_error)


@app.command(epilog="**Example**\n\n`windlass demo --dir demo-run`, then `windlass report demo-run/run`")
def demo(
    directory: Annotated[Path, typer.Option("--dir", metavar="DIR", help="Where to make it.")] = Path("demo-run"),
    make_only: Annotated[bool, typer.Option("--make-only", help="Make model, data and run file, and stop.")] = False,
) -> None:
    """Train a tiny Mistral 4, made on the spot in its published layout, on two ranks of this machine's CPU."""
    from windlass import demo as demonstration

    run = demonstration.make(directory)
    print(f"made {directory / 'model'}, {directory / 'data'} and {run}", file=sys.stderr)
    if not make_only:
        train(run)


@app.command(
    epilog="**Examples**\n\n"
    "`windlass submit run.yaml --to script`\n\n"
    "`windlass submit run.yaml --to kubernetes --dry-run`\n\n"
    "`windlass submit run.yaml --to runai --follow`"
)
def submit(
    run: Run,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="PLATFORM",
            help="local, script, runai or kubernetes; default: cluster.platform.",
            show_default=False,
        ),
    ] = None,
    override: Overrides = None,
    accelerate: Accelerate = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write the files and start nothing.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Stay, and print the run's log until it ends.")] = False,
    api: Annotated[
        bool,
        typer.Option("--api", help="Run:ai over REST: by RUNAI_BASE_URL and RUNAI_TOKEN, else payload.json alone."),
    ] = False,
    out: Out = None,
) -> None:
    """Write a platform's job files and submit them. Submit again to resume.

    Local starts the run here, in the foreground: the command ends when the run does.
    Script writes launch.sh, which runs on every node, by hand or as a Slurm step.
    The other two go through `runai` and `kubectl` where these are at hand; else their files are written.
    """
    from windlass.launch import PLATFORMS
    from windlass.launch import submit as submitting

    made = make_plan(run, override, accelerate)
    platform = to or made.loaded.run.cluster.platform
    if platform not in PLATFORMS:
        raise UserError(f"there is no platform {platform!r}", "--to", f"one of {', '.join(PLATFORMS)}")
    code = submitting.submit(
        made,
        platform,
        overrides=override or (),
        accelerate=accelerate,
        out=out,
        dry_run=dry_run,
        follow=follow,
        api=api,
        plane=_control_plane() if api else None,
        say=say,
    )
    raise typer.Exit(code)


@app.command(epilog="**Example**\n\n`windlass status run.yaml`")
def status(run: Run, override: Overrides = None, out: Out = None) -> None:
    """Show the state of a submitted run, as its platform reports it."""
    from windlass.launch import submit as submitting

    raise typer.Exit(submitting.status(*_submitted(run, override, out)))


@app.command(epilog="**Example**\n\n`windlass logs run.yaml --follow`")
def logs(
    run: Run,
    override: Overrides = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing as lines arrive.")] = False,
    out: Out = None,
) -> None:
    """Show what the nodes of a submitted run have printed."""
    from windlass.launch import submit as submitting

    raise typer.Exit(submitting.logs(*_submitted(run, override, out), follow=follow, say=say))


@app.command(epilog="**Example**\n\n`windlass stop run.yaml`, later `windlass submit run.yaml` to resume")
def stop(run: Run, override: Overrides = None, out: Out = None) -> None:
    """Stop a submitted run. Its nodes save first; submit again to resume."""
    from windlass.launch import submit as submitting

    raise typer.Exit(submitting.stop(*_submitted(run, override, out), say))


@app.command(epilog="**Examples**\n\n`windlass watch run`\n\n`windlass watch run --once`")
def watch(
    folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run folder: train.output_dir.")],
    once: Annotated[bool, typer.Option("--once", help="Print the current state and exit.")] = False,
) -> None:
    """Watch a run, live or finished: curves, ranks, alarms, from its files alone."""
    from rich.console import Console

    from windlass.observe.watch import live

    live.watch(folder, once=once, console=Console(highlight=False))


def _control_plane() -> ControlPlane | None:
    from windlass.launch import runai_api

    return runai_api.control_plane(os.environ)


def _submitted(run: Path, override: list[str] | None, out: Path | None) -> tuple[Path, Path]:
    """Where the run left its record, and the run folder."""
    from windlass.launch import submit as submitting
    from windlass.runfile import read_any

    loaded = read_any(run, override or ())
    return submitting.find(loaded, out), Path(loaded.run.folder)
