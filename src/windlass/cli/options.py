"""The app, what its commands have in common, and how they print."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windlass.errors import UserError

if TYPE_CHECKING:
    from windlass.plan.script import AnyPlan

TRAINING = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "safetensors", "numpy", "huggingface_hub")

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


def without(name: str | None, command: str) -> UserError:
    """This machine has windlass as a login node has it."""
    return UserError(f"{name} is not installed here", f"windlass {command}", "pip install 'windlass[train]'")


def require(libraries: Sequence[str], command: str) -> None:
    """Found without being imported."""
    if missing := [name for name in libraries if find_spec(name) is None]:
        raise without(", ".join(missing), command)


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


def make_plan(run: Path, override: list[str] | None, accelerate: Path | None) -> AnyPlan:
    from windlass.plan.layout import read_accelerate
    from windlass.plan.script import make_any
    from windlass.runfile import read_any

    return make_any(read_any(run, override or ()), read_accelerate(accelerate) if accelerate else None)
