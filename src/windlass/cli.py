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
from windlass.errors import RunError, UserError

if TYPE_CHECKING:
    from windlass.plan import Plan

TRAINING = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "safetensors", "numpy", "huggingface_hub")
FAILED, USER_INPUT = 1, 2  # exit codes: a check or run that failed; input that is wrong

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
        sys.exit(FAILED if isinstance(error, RunError) else USER_INPUT)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in TRAINING:
            raise
        print_error(without(error.name))
        sys.exit(USER_INPUT)
    except BrokenPipeError:  # `windlass plan … | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def without(name: str | None) -> UserError:
    """This machine has windlass as a login node has it."""
    return UserError(f"{name} is not installed here", f"windlass {sys.argv[1]}", "pip install 'windlass[train]'")


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


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
    """Know the run before a GPU is held: parameters, adapter, memory, traffic, time.

    Reads the run file, config.json and the safetensors headers; no weights and no torch.
    Whether the run fits is an answer, not a failure: the exit code is 0 either way, and the JSON says `memory.fits`.
    """
    made = make_plan(run, override, accelerate)
    written = made.write(out)
    if as_json:
        write_json(made.as_dict())
    else:
        from windlass.plan.show import show

        show(made, formulas=explain, compare=compare)
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
    agree on one verdict and each exits with 13.
    """
    from windlass import check as checking
    from windlass.layout import read_accelerate
    from windlass.runfile import read

    try:
        loaded = read(run, override or ())
    except UserError as error:
        if not in_pod:
            raise
        print_error(error)
        raise typer.Exit(checking.FAILED_IN_POD) from None
    report = checking.run(
        loaded,
        lambda: read_accelerate(accelerate) if accelerate else None,
        depth=checking.IN_POD if in_pod else checking.HERE if here else checking.ALONE,
        environ=os.environ,
        patience_seconds=wait,
        say=say,
    )
    written = report.write(Path(loaded.run.train.output_dir)) if report.speaks else None
    if report.speaks and as_json:
        write_json(report.as_dict())
    elif report.speaks:
        from windlass.check.show import show

        show(report)
    if written:
        say(f"checks written to {written}")
    raise typer.Exit(report.exit_code)


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


@app.command(epilog="**Example**\n\n`windlass data run.yaml --override data.packing=true`")
def data(run: Run, override: Overrides = None, as_json: Json = False) -> None:
    """Look at the data as training will see it: rows, tokens, what is learnt, what is cut, what packing gains."""
    from windlass.data import show
    from windlass.data.alone import look
    from windlass.runfile import read

    look(read(run, override or ()), say=say, audited=write_json if as_json else show)


@app.command(epilog="**Example**\n\n`windlass fetch run.yaml`")
def fetch(run: Run, override: Overrides = None) -> None:
    """Bring a model and data set named by hub id to this machine's shared folder, once; resumable."""
    from windlass import fetch as fetching
    from windlass.runfile import read

    loaded = read(run, override or ())
    for name, folder in fetching.fetched(loaded.run, loaded.where, say).items():
        print(f"{name}\t{folder}")


@app.command(epilog="**Examples**\n\n`windlass report run`\n\n`windlass report run-a run-b --out compared`")
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN_DIR…", help="One run folder, or several to compare.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where to write the report.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw a run's page: report.html and report.json beside it, and a summary here."""
    from windlass import report as reporting

    made = reporting.make(folders, out)
    if as_json:
        write_json(made.as_dict())
        return
    from windlass.report.show import show

    show(made)


@app.command(
    epilog="**Examples**\n\n"
    "`windlass export run --to my-adapter`\n\n"
    "`windlass export run --to my-model --merge --dtype bf16`\n\n"
    "`windlass export run --to my-adapter --serve-check --push org/my-adapter`"
)
def export(
    source: Annotated[Path, typer.Argument(metavar="RUN_DIR|CHECKPOINT", help="A run folder, or an adapter's.")],
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Where to write it.")],
    merge: Annotated[
        bool, typer.Option("--merge/--adapter", help="Merge it into its base, or write the adapter alone.")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="Merged: bf16 or fp8; adapter: bf16. Default: as it is.", show_default=False),
    ] = None,
    base: Annotated[
        str | None, typer.Option("--base", metavar="DIR", help="The base model's folder.", show_default=False)
    ] = None,
    base_name: Annotated[
        str | None,
        typer.Option("--base-name", metavar="NAME", help="What the card calls the base.", show_default=False),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Files written at a time.", show_default=False)
    ] = None,
    serve_check: Annotated[
        bool, typer.Option("--serve-check", help="Say what servers do with it, and how to start one.")
    ] = False,
    push: Annotated[
        str | None,
        typer.Option("--push", metavar="ORG/NAME", help="Bring it to a private hub repository.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a run's best adapter, alone or merged into its base, and prove what was written.

    Exits with 1 when the proof finds a deviation; nothing is deleted then.
    """
    from windlass import export as exporting
    from windlass.export import screen

    names = exporting.Names(base, base_name)
    made = exporting.export(
        source, to, merge=merge, dtype=dtype, names=names, workers=workers, say=screen.say, progress=screen.progress
    )
    served = exporting.served(source, made, base) if serve_check else None
    if served and not as_json:
        screen.served(served)
    address = exporting.push(to, push, say=screen.say) if push else None
    if as_json:
        write_json({**made.record, "served": served.as_dict() if served else None, "pushed": address})
    else:
        print(to)


@app.command(epilog="**Example**\n\n`windlass generate my-model --prompt 'Once upon a time'`")
def generate(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A merged model, an adapter, or a run folder.")],
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="What to go on from.")],
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="At most so many.")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", min=0, help="0: always the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    base: Annotated[
        str | None, typer.Option("--base", metavar="DIR", help="The adapter's base model.", show_default=False)
    ] = None,
) -> None:
    """Let a model say something on this machine, for a look."""
    from windlass.export import screen
    from windlass.export.generate import generate as generating

    generating(
        folder,
        prompt,
        base=base,
        tokens=tokens,
        temperature=temperature,
        seed=seed,
        chat=chat,
        say=screen.say,
        write=lambda text: print(text, end="", flush=True),
    )


def make_plan(run: Path, override: list[str] | None, accelerate: Path | None) -> Plan:
    from windlass import plan as planning
    from windlass.layout import read_accelerate
    from windlass.runfile import read

    return planning.make(read(run, override or ()), read_accelerate(accelerate) if accelerate else None)
