"""Commands for before a GPU is reserved."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from windlass.cli.options import (
    TRAINING,
    Accelerate,
    Json,
    Overrides,
    Run,
    app,
    make_plan,
    print_error,
    require,
    say,
    write_json,
)
from windlass.errors import RANK_USER_INPUT, UserError


@app.command(epilog="**Examples**\n\n`windlass init mistral-small-4 > run.yaml`\n\n`windlass init --list`")
def init(
    preset: Annotated[str, typer.Argument(metavar="[PRESET]", help="Which start; see --list.")] = "mistral-small-4",
    names: Annotated[bool, typer.Option("--list", help="Name the presets.")] = False,
) -> None:
    """Print a commented run file to start from."""
    from windlass import runfile

    if names:
        for name, summary in runfile.presets().items():
            print(f"{name:32} {summary}")
        return
    print(runfile.init(preset), end="")


@app.command(
    epilog="**Example**\n\n`windlass schema > windlass.schema.json`, "
    "then at the top of run.yaml:\n\n`# yaml-language-server: $schema=windlass.schema.json`"
)
def schema() -> None:
    """Print the run file's JSON Schema: editors complete and check from it."""
    from windlass import runfile

    write_json(runfile.schema())


@app.command(
    epilog="**Examples**\n\n"
    "`windlass plan run.yaml`\n\n"
    "`windlass plan run.yaml --compare --override cluster.nodes=2`\n\n"
    "`windlass plan run.yaml --accelerate fsdp.yaml --json | jq .estimate`"
)
def plan(
    run: Run,
    override: Overrides = None,
    accelerate: Accelerate = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="The same run under every other layout, best on top.")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="The formula behind every figure.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write plan.json there.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Compute the run before reserving a GPU: parameters, adapter, memory, traffic, time.

    Reads the run file, config.json and the safetensors headers; no weights and no torch.
    Whether the run fits is an answer, not a failure: the exit code is 0 either way, and the JSON says `memory.fits`.
    """
    from windlass.plan import Plan

    made = make_plan(run, override, accelerate)
    written = made.write(out)
    if as_json:
        write_json(made.as_dict())
    elif isinstance(made, Plan):
        from windlass.plan.show import show

        show(made, formulas=explain, compare=compare)
    else:
        from windlass.plan.script import show as show_script

        show_script(made)
    if written:
        print(f"plan written to {written}", file=sys.stderr)


@app.command(
    epilog="**Examples**\n\n"
    "`windlass explain fsdp_use_orig_params`\n\n"
    "`windlass explain lora.target_modules`\n\n"
    "`windlass explain NCCL_IB_HCA`\n\n"
    "`windlass explain --accelerate fsdp.yaml`"
)
def explain(
    topic: Annotated[
        str | None,
        typer.Argument(
            metavar="[KEY]", help="An Accelerate key, run-file key or environment variable.", show_default=False
        ),
    ] = None,
    accelerate: Accelerate = None,
    as_json: Json = False,
) -> None:
    """Say what a setting does here: honoured, translated, without effect, or refused, and why."""
    from windlass import explain as explaining

    rows = [*(explaining.topic(topic) if topic else ()), *(explaining.file(accelerate) if accelerate else ())]
    if not rows:
        raise UserError("nothing to explain", "windlass explain", "give a key, or a file with --accelerate FILE")
    if as_json:
        write_json([row.as_dict() for row in rows])
    else:
        explaining.show(rows)


@app.command(epilog="**Example**\n\n`windlass data run.yaml --override data.packing=true`")
def data(run: Run, override: Overrides = None, as_json: Json = False) -> None:
    """Look at the data as training will see it: rows, tokens, what is learnt, what is cut, what packing gains."""
    from windlass.data.alone import look
    from windlass.data.show import show
    from windlass.runfile import read

    look(read(run, override or ()), say=say, audited=write_json if as_json else show)


@app.command(epilog="**Example**\n\n`windlass fetch run.yaml`")
def fetch(run: Run, override: Overrides = None) -> None:
    """Download a model and data set by hub id into the shared folder, once; resumable."""
    from windlass import fetch as fetching
    from windlass.runfile import read

    loaded = read(run, override or ())
    for name, folder in fetching.fetched(loaded.run, loaded.where, say).items():
        print(f"{name}\t{folder}")


@app.command(
    epilog="**Examples**\n\n"
    "`windlass check run.yaml`\n\n"
    "`windlass check run.yaml --here`\n\n"
    "`windlass check run.yaml --in-pod --wait 600 --json`"
)
def check(
    run: Run,
    override: Overrides = None,
    accelerate: Accelerate = None,
    here: Annotated[bool, typer.Option("--here", help="This machine too, as one that the run will use.")] = False,
    in_pod: Annotated[
        bool, typer.Option("--in-pod", help="Started on every node of the run: the nodes too, and between them.")
    ] = False,
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=1, help="How long nodes wait for each other.")
    ] = 300.0,
    as_json: Json = False,
) -> None:
    """Find what would stop the run before it loads anything: input, libraries, folders, GPUs, network.

    Writes check.json into the run folder where that exists. Exits with 1 when something fails; with --in-pod all nodes
    agree on one verdict and each exits with 13, or with 1 where nodes were missing and nothing else is wrong.
    """
    from windlass.launch import check as checking
    from windlass.plan.layout import read_accelerate
    from windlass.plan.script import refuse_accelerate
    from windlass.runfile import LoadedScript, read_any

    try:
        loaded = read_any(run, override or ())
        if isinstance(loaded, LoadedScript):
            refuse_accelerate(accelerate)
    except UserError as error:
        if not in_pod:
            raise
        print_error(error)
        raise typer.Exit(RANK_USER_INPUT) from None
    report = checking.run(
        loaded,
        lambda: read_accelerate(accelerate) if accelerate else None,
        depth=checking.IN_POD if in_pod else checking.HERE if here else checking.ALONE,
        environ=os.environ,
        patience_seconds=wait,
        say=say,
    )
    written = report.write(Path(loaded.run.folder)) if report.speaks else None
    if report.speaks and as_json:
        write_json(report.as_dict())
    elif report.speaks:
        from windlass.launch.check.show import show

        show(report)
    if written:
        say(f"checks written to {written}")
    raise typer.Exit(report.exit_code)


@app.command(
    epilog="**Examples**\n\n"
    "`windlass rehearse run.yaml`\n\n"
    "`windlass rehearse run.yaml --keep rehearsal --override cluster.nodes=2`\n\n"
    "`windlass rehearse run.yaml --json > rehearsal.json`"
)
def rehearse(
    run: Run,
    override: Overrides = None,
    accelerate: Accelerate = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep",
            metavar="DIR",
            help="Leave everything there: twin, logs, exports, rehearsal.json. Default: gone when all is well.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Rehearse the whole run in small on this machine's CPU, in minutes: what would fail on the cluster fails here.

    A twin of the model, your first rows, your launch script, as many ranks: plan, check, train, stop, resume, export,
    merge, and plain transformers opening the result. Exits with 1 when a phase finds a fault, 2 when it is the input.
    """
    from windlass import rehearse as rehearsing
    from windlass.rehearse.show import Terminal, show

    require(TRAINING, "rehearse")
    record = rehearsing.rehearse(
        run, overrides=override or (), accelerate=accelerate, keep=keep, environ=os.environ, screen=Terminal()
    )
    if as_json:
        write_json(record.as_dict())
    else:
        show(record)
    raise typer.Exit(record.exit_code)
