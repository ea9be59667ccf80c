"""What commands share: how one is declared, the groups of the help, arguments, options and output."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from windlass import __version__
from windlass.errors import GIVEN, UserError, make_pasteable, require_writable
from windlass.files import write_atomic

if TYPE_CHECKING:
    from windlass.plan.script import AnyPlan

CommandFunction = TypeVar("CommandFunction", bound=Callable[..., None])

BEFORE = "Before a run"
DURING = "During a run"
AFTER = "After a run"
HELP = "If something is wrong"


class CommandGroups(TyperGroup):
    """Lists the commands in the order in which a run meets them."""

    def format_commands(self, _context: Any, formatter: Any) -> None:
        for title in (BEFORE, DURING, AFTER, HELP):
            commands = [item for item in self.commands.values() if getattr(item, "rich_help_panel", None) == title]
            with formatter.section(title):
                formatter.write_dl([(item.name or "", item.get_short_help_str(limit=200)) for item in commands])


class Help(TyperCommand):
    """Names arguments as one types them: RUN if required, [RUN] if not, RUN_DIR... if there may be several."""

    def collect_usage_pieces(self, context: Any) -> list[str]:
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(context)]

    def format_options(self, context: Any, formatter: Any) -> None:
        arguments = []
        options = []
        for parameter in self.get_params(context):
            if parameter.param_type_name == "argument":
                name = f"{parameter.metavar}..." if parameter.nargs == -1 else parameter.metavar
                arguments.append((name, getattr(parameter, "help", "")))
            elif record := parameter.get_help_record(context):
                options.append(record)
        for title, lines in (("Arguments", arguments), ("Options", options)):
            if lines:
                with formatter.section(title):
                    formatter.write_dl(lines)


app = typer.Typer(
    name="windlass",
    cls=CommandGroups,
    help="Multi-GPU LoRA fine-tuning that fails loudly instead of training the wrong thing.\n\n"
    "Start with `windlass plan Qwen/Qwen3-8B --gpus 1xh100`, and with your data: "
    "`windlass init --model DIR --data FILE --out run.yaml`.",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: rich's takes longer to import than all the rest of `--help`
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def command(group: str, *examples: str) -> Callable[[CommandFunction], CommandFunction]:
    """Register a command, with examples below its help; their first word is its name."""
    title = "Examples" if len(examples) > 1 else "Example"
    lines = "".join(f"  windlass {example}\n" for example in examples)
    return app.command(examples[0].split()[0], cls=Help, rich_help_panel=group, epilog=f"{title}:\n\n\b\n{lines}")


def arg(metavar: str, help: str, **more: Any) -> Any:
    return typer.Argument(metavar=metavar, help=help, show_default=False, **more)


def opt(name: str, metavar: str, help: str, **more: Any) -> Any:
    return typer.Option(*name.split(), metavar=metavar, help=help, show_default=False, **more)


def flag(name: str, help: str, **more: Any) -> Any:
    return typer.Option(*name.split(), help=help, show_default=False, **more)


def print_version(requested: bool) -> None:
    if requested:
        print(f"windlass {__version__}")
        raise typer.Exit


@app.callback()
def windlass(
    _v: Annotated[bool, flag("--version", "Print the version.", callback=print_version, is_eager=True)] = False,
) -> None: ...


def remember_run_file(parameter: typer.CallbackParam, run: Path | None) -> Path | None:
    """Remember the run file so that hints can quote it."""
    GIVEN.clear()
    if run is not None and run.is_dir() == (parameter.metavar == "RUN_DIR"):
        GIVEN[str(parameter.metavar)] = str(run)
    return run


def say(text: str) -> None:
    print(make_pasteable(text), file=sys.stderr, flush=True)


def option_words(options: Mapping[str, object]) -> list[str]:
    """Return the options that were given, as words of a command line."""
    given = {option: value for option, value in options.items() if value is not None and value is not False}
    return [word for option, value in given.items() for word in ([option] if value is True else [option, str(value)])]


def write_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def write_result(value: Any, as_json: bool, show: Callable[[Any], None]) -> None:
    if as_json:
        write_json(value.as_dict() if hasattr(value, "as_dict") else value)
    else:
        show(value)


def require_new(out: Path | None, force: bool) -> None:
    if out is not None and out.exists() and not force:
        raise UserError("exists already", str(out), "--force overwrites it; --out names another file", "exists")


def write_run_file(text: str, out: Path | None) -> None:
    """Print a run file, or write it in full or not at all."""
    if not text:
        return
    if out is None:
        print(text, end="", flush=True)
        return
    text = text.replace("windlass plan run.yaml", f"windlass plan {shlex.quote(str(out))}", 1)  # the next step
    with require_writable(out, "name another file with --out"):
        write_atomic(out, text)
    say(f"written to {out}: next, windlass plan {shlex.quote(str(out))}")


def make_plan(run: Path, override: list[str] | None, accelerate: Path | None, *, for_start: bool = True) -> AnyPlan:
    """Plan the run: for_start, as `windlass train` here would train it if this is its machine."""
    from windlass.plan.machine import is_this_machine
    from windlass.plan.script import make_any_plan
    from windlass.runfile import read_any
    from windlass.runfile.accelerate import load_accelerate

    loaded = read_any(run, override or (), load_accelerate(accelerate))
    return make_any_plan(loaded, is_here=for_start and is_this_machine(loaded.run.cluster))


RunPath = Annotated[Path, arg("RUN", "The run file (YAML).", callback=remember_run_file)]
RunDir = Annotated[Path, arg("RUN_DIR", "The run folder: train.output_dir.", callback=remember_run_file)]
Overrides = Annotated[list[str] | None, opt("--override", "KEY=VALUE", "Set one key of the run file; repeatable.")]
Accelerate = Annotated[Path | None, opt("--accelerate", "FILE", "Take the layout from an Accelerate FSDP YAML.")]
Json = Annotated[bool, flag("--json", "Print one JSON object instead of tables.")]
JobDir = Annotated[Path | None, opt("--out", "DIR", "Folder of the job's files. Default: the run folder.")]
Follow = Annotated[bool, flag("--follow -f", "Keep printing the log as lines arrive.")]
OutFile = Annotated[Path | None, opt("--out", "FILE", "Write the run file there instead of printing it.")]
Force = Annotated[bool, flag("--force", "Let --out overwrite a file.")]
RankCount = Annotated[int | None, opt("--ranks", "N", "Run N ranks, on this machine only.", min=1)]
BaseFolder = Annotated[str | None, opt("--base", "DIR", "Folder of the base model.")]

BaseDtypeList = Annotated[
    str | None, opt("--base-dtype", "DTYPES", "Also evaluate with the base stored in these dtypes.")
]
OtherBase = Annotated[
    bool, flag("--allow-other-base", "Accept a base model whose weights are not those the adapter was trained on.")
]
Kustomize = Annotated[
    Path | None, opt("--kustomize", "DIR", "With --dry-run: write a kustomize base for Kubernetes there.")
]
