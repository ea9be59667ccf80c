"""Every command: parse, call one function, print. Data goes to stdout, everything said about it to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windlass import __version__
from windlass.errors import UserError

if TYPE_CHECKING:
    from windlass.plan import Plan

USER_INPUT = 2  # exit code: the user's input is wrong; 1 is a failed check or run

app = typer.Typer(
    name="windlass",
    help="LoRA fine-tuning of large language models over many GPUs that can't be silently wrong.\n\n"
    "Start with `windlass init > run.yaml`, then `windlass plan run.yaml`.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The run file, YAML.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--override",
        metavar="KEY=VALUE",
        help="Set one key of the run file; repeatable.",
        show_default=False,
    ),
]
Accelerate = Annotated[
    Path | None,
    typer.Option(
        "--accelerate", metavar="FILE", help="An Accelerate FSDP YAML to lay the run out by.", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of tables.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script. Only a `UserError` is printed without a traceback."""
    try:
        app(args=None if arguments is None else list(arguments))
    except UserError as error:
        print_error(error)
        sys.exit(USER_INPUT)
    except BrokenPipeError:  # `windlass plan … | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_error(error: UserError) -> None:
    """All problems at once, numbered by nothing but a blank line between them."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for i, problem in enumerate(error.problems):
        console.print(
            Text("error: ", style="bold red")
            + Text(f"{problem.where}: " if problem.where else "", style="bold")
            + Text(problem.problem)
        )
        if problem.hint:
            console.print(Text("\nhint: ", style="cyan") + Text(problem.hint))
        if i + 1 < len(error.problems):
            console.print()


def write_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def version(asked: bool) -> None:
    if asked:
        print(f"windlass {__version__}")
        raise typer.Exit


@app.callback()
def windlass(
    _version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


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
    epilog="**Example**\n\n`windlass schema > windlass.schema.json`, then at the top of run.yaml:\n\n`# yaml-language-server: $schema=windlass.schema.json`"
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
    """Know the run before a GPU is held: parameters, adapter, memory, traffic, time.

    Reads the run file, config.json and the safetensors headers; no weights and no torch.
    Exits with 1 when the run does not fit in memory.
    """
    made = make_plan(run, override, accelerate, compare=compare)
    written = made.write(out)
    if as_json:
        write_json(made.as_dict())
    else:
        from windlass.plan.show import show

        show(made, formulas=explain)
    if written:
        print(f"plan written to {written}", file=sys.stderr)
    raise typer.Exit(0 if made.cost.fits else 1)


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

    if (topic is None) == (accelerate is None):
        raise UserError(
            "nothing to explain" if topic is None else "both a key and a file",
            "windlass explain",
            "give one key, or one file with --accelerate FILE",
        )
    rows = explaining.topic(topic) if topic is not None else explaining.file(accelerate)
    if as_json:
        write_json([row.as_dict() for row in rows])
    else:
        explaining.show(rows)


def make_plan(run: Path, override: list[str] | None, accelerate: Path | None, *, compare: bool = False) -> Plan:
    from windlass import plan as planning
    from windlass.runfile import read

    return planning.make(read(run, override or ()), accelerate=accelerate, compare=compare)


if __name__ == "__main__":
    main()
