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
    print_error,
    without,
)

if TYPE_CHECKING:
    from windlass.plan import Plan


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
        typer.Option("--ranks", metavar="N", min=1, help="So many ranks on this machine alone.", show_default=False),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the unfinished run in the run folder.")] = False,
    debug_freq: Annotated[
        int | None,
        typer.Option("--debug-freq", metavar="N", min=0, help="Measure GPUs and experts every N steps; 0: never."),
    ] = None,
) -> None:
    """Train: start this machine's ranks, or be one of those that a launcher started.

    Exits with 0 when finished, 1 when the run failed, 2 when the input is wrong (13 from a rank),
    and 75 when a signal stopped it and everything is saved.
    """
    from importlib.util import find_spec

    from windlass import train as training

    if missing := [name for name in TRAINING if find_spec(name) is None]:
        raise without(", ".join(missing))
    overrides = [*(override or ()), *([] if ranks is None else ["cluster.nodes=1", f"cluster.gpus_per_node={ranks}"])]

    def planned() -> Plan:
        from windlass import plan as planning
        from windlass.layout import accelerate_file, parents
        from windlass.runfile import read

        return planning.make(read(run, overrides), accelerate_file(accelerate, os.environ, parents()))

    arguments = ["train", str(run), *(word for option in overrides for word in ("--override", option))]
    arguments += [*(["--accelerate", str(accelerate)] if accelerate else []), *(["--resume"] if resume else [])]
    arguments += [] if debug_freq is None else ["--debug-freq", str(debug_freq)]
    code = training.train(
        planned, arguments=arguments, environ=os.environ, resume=resume, debug_freq=debug_freq, say=print_error
    )
    raise typer.Exit(code)


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
